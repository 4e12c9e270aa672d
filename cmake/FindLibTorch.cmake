# LibTorch from the PyPI wheel unpacked by `./dev deps` into .deps/site (or LIBTORCH_ROOT): imported targets
# LibTorch::torch_cpu and LibTorch::c10, and LibTorch::torch_cuda, LibTorch::c10_cuda with REPLAYEVAL_CUDA. The wheel's
# own TorchConfig.cmake is not used: it looks for CUDA even when only the CPU libraries are wanted.
set(LIBTORCH_ROOT "${PROJECT_SOURCE_DIR}/.deps/site/torch" CACHE PATH "Folder of the unpacked torch wheel")
find_path(LibTorch_INCLUDE_DIR ATen/ATen.h PATHS ${LIBTORCH_ROOT}/include NO_DEFAULT_PATH)
set(LibTorch_required LibTorch_INCLUDE_DIR)
set(LibTorch_names torch_cpu c10)
if(REPLAYEVAL_CUDA)
  list(APPEND LibTorch_names torch_cuda c10_cuda)
endif()
foreach(name ${LibTorch_names})
  find_library(LibTorch_${name}_LIBRARY ${name} PATHS ${LIBTORCH_ROOT}/lib NO_DEFAULT_PATH)
  list(APPEND LibTorch_required LibTorch_${name}_LIBRARY)
endforeach()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS ${LibTorch_required}
  REASON_FAILURE_MESSAGE "run ./dev deps, or set LIBTORCH_ROOT to the torch folder of an unpacked torch==2.11.0 wheel")
if(LibTorch_FOUND)
  foreach(name ${LibTorch_names})
    if(NOT TARGET LibTorch::${name})
      add_library(LibTorch::${name} SHARED IMPORTED)
      set_target_properties(LibTorch::${name} PROPERTIES
        IMPORTED_LOCATION ${LibTorch_${name}_LIBRARY}
        INTERFACE_INCLUDE_DIRECTORIES "${LibTorch_INCLUDE_DIR};${LibTorch_INCLUDE_DIR}/torch/csrc/api/include")
      # libtorch_cpu names CUDA libraries that live in sibling wheels; its own run path finds them at run time.
      target_link_options(LibTorch::${name} INTERFACE -Wl,--allow-shlib-undefined)
    endif()
  endforeach()
endif()
mark_as_advanced(${LibTorch_required})
