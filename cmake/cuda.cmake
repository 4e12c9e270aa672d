# The CUDA language and how a folder's *.cu files become part of its library. Without REPLAYEVAL_CUDA the same symbols
# come from the folder's no_cuda.cc.
set(REPLAYEVAL_CUDA_ARCHITECTURES "80;86;89;90;100;120" CACHE STRING
  "GPU architectures to compile for; the last one also as PTX for newer GPUs")

if(REPLAYEVAL_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  # CMake 3.25 does not know this compiler's spelling of C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.2)
    message(FATAL_ERROR "CUDA ${CMAKE_CUDA_COMPILER_VERSION}, expected 12.2 or newer (kernel arguments beyond 4 KB)")
  endif()
  find_package(CUDAToolkit REQUIRED)
  # Order of operations is the definition of the codec and of every sum: --fmad=false, and fused multiply-add only where
  # the code asks for one.
  set(replayeval_cuda_flags --fmad=false --expt-relaxed-constexpr --extended-lambda
    -Xcompiler=-Wall,-Wextra,-ffp-contract=off)
  foreach(architecture ${REPLAYEVAL_CUDA_ARCHITECTURES})
    list(APPEND replayeval_cuda_flags "SHELL:-gencode arch=compute_${architecture},code=sm_${architecture}")
  endforeach()
  list(GET REPLAYEVAL_CUDA_ARCHITECTURES -1 newest)
  list(APPEND replayeval_cuda_flags "SHELL:-gencode arch=compute_${newest},code=compute_${newest}")
endif()

# replayeval_cuda(name): adds the folder's *.cu files to replayeval_<name>, or its no_cuda.cc.
function(replayeval_cuda name)
  if(REPLAYEVAL_CUDA)
    file(GLOB sources CONFIGURE_DEPENDS *.cu)
    target_sources(replayeval_${name} PRIVATE ${sources})
    target_compile_options(replayeval_${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${replayeval_cuda_flags}>")
    target_link_libraries(replayeval_${name} PUBLIC CUDA::cudart_static)
  else()
    target_sources(replayeval_${name} PRIVATE no_cuda.cc)
  endif()
endfunction()
