# Build conventions of ReplayEval: interface targets for warnings and floating-point contraction, and two functions
# that every folder uses.

add_library(replayeval_options INTERFACE)
target_include_directories(replayeval_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(replayeval_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Werror=return-type -Wno-psabi -Wno-ignored-attributes -Wno-restrict>)
if(REPLAYEVAL_SANITIZE)
  target_compile_options(replayeval_options INTERFACE
    -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  target_link_options(replayeval_options INTERFACE -fsanitize=address,undefined)
endif()

# Order of operations is the definition of a codec: no fused multiply-add unless the code asks for one.
add_library(replayeval_strict_fp INTERFACE)
target_compile_options(replayeval_strict_fp INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

# replayeval_library(name SOURCES file... DEPENDS target...): the static library replayeval_<name> with the alias
# replayeval::<name>.
function(replayeval_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  add_library(replayeval_${name} STATIC ${arg_SOURCES})
  add_library(replayeval::${name} ALIAS replayeval_${name})
  target_link_libraries(replayeval_${name} PUBLIC replayeval_options ${arg_DEPENDS} PRIVATE ${arg_PRIVATE_DEPENDS})
endfunction()

# replayeval_simd(name file...): compiles each file once per instruction-set level and adds the objects to
# replayeval_<name>. The file puts its functions into namespace REPLAYEVAL_SIMD_NAMESPACE; a caller chooses one at run
# time (base/simd_dispatch.h).
function(replayeval_simd name)
  set(levels "generic")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND levels v3 v4)
  endif()
  set(flags_generic "")
  set(flags_v3 -march=x86-64-v3)
  set(flags_v4 -march=x86-64-v4 -mprefer-vector-width=512)
  get_target_property(libraries replayeval_${name} LINK_LIBRARIES)
  foreach(level ${levels})
    set(objects replayeval_${name}_${level})
    add_library(${objects} OBJECT ${ARGN})
    target_compile_options(${objects} PRIVATE ${flags_${level}} -O3)
    target_compile_definitions(${objects} PRIVATE REPLAYEVAL_SIMD_NAMESPACE=simd_${level})
    target_link_libraries(${objects} PRIVATE ${libraries})
    target_sources(replayeval_${name} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endforeach()
endfunction()

# replayeval_test(folder DEPENDS target... SUITES suite...): one doctest executable from tests/<folder>/*.cc. CTest runs the cases
# outside of the suites reference, slow and gpu under the label unit, and each suite named here under its own label.
function(replayeval_test folder)
  cmake_parse_arguments(arg "" "" "DEPENDS;SUITES" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${folder}/*.cc)
  if(NOT sources)
    return()
  endif()
  add_executable(test_${folder} ${sources} ${PROJECT_SOURCE_DIR}/tests/support/test_main.cc)
  target_link_libraries(test_${folder} PRIVATE replayeval_options replayeval_test_support ${arg_DEPENDS}
    doctest::doctest)
  target_compile_definitions(test_${folder} PRIVATE
    REPLAYEVAL_SOURCE_DIR="${PROJECT_SOURCE_DIR}" REPLAYEVAL_SHARED_DIR="${PROJECT_SOURCE_DIR}/../shared")
  add_test(NAME ${folder} COMMAND test_${folder} --test-suite-exclude=reference,slow,gpu
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  # Sanitizers make the longest suite take half an hour.
  set_tests_properties(${folder} PROPERTIES LABELS unit TIMEOUT 7200)
  foreach(suite ${arg_SUITES})
    add_test(NAME ${folder}_${suite} COMMAND test_${folder} --test-suite=${suite} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_tests_properties(${folder}_${suite} PROPERTIES LABELS ${suite} TIMEOUT 7200)
  endforeach()
endfunction()

# replayeval_parquet(list file): leaves in a folder's list of sources the file that uses Arrow, or no_parquet.cc.
function(replayeval_parquet list file)
  set(sources ${${list}})
  if(REPLAYEVAL_PARQUET)
    list(FILTER sources EXCLUDE REGEX "/no_parquet\\.cc$")
  else()
    list(FILTER sources EXCLUDE REGEX "/${file}$")
  endif()
  set(${list} ${sources} PARENT_SCOPE)
endfunction()
