# Arrow C++ and its Parquet library from the PyPI wheel `pyarrow` unpacked by `./dev deps` into .deps/site (or
# ARROW_ROOT): the target replayeval::arrow. The wheel's libraries carry their version in the file name and have no
# CMake package files.
set(ARROW_ROOT "${PROJECT_SOURCE_DIR}/.deps/site/pyarrow" CACHE PATH "Folder of the unpacked pyarrow wheel")
find_path(Arrow_INCLUDE_DIR parquet/arrow/reader.h PATHS ${ARROW_ROOT}/include NO_DEFAULT_PATH)
find_file(Arrow_LIBRARY libarrow.so.2600 PATHS ${ARROW_ROOT} NO_DEFAULT_PATH)
find_file(Arrow_PARQUET_LIBRARY libparquet.so.2600 PATHS ${ARROW_ROOT} NO_DEFAULT_PATH)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Arrow REQUIRED_VARS Arrow_PARQUET_LIBRARY Arrow_LIBRARY Arrow_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "run ./dev deps, or set ARROW_ROOT to the pyarrow folder of an unpacked pyarrow==26.0.1 wheel")
if(Arrow_FOUND AND NOT TARGET replayeval::arrow)
  add_library(replayeval_arrow INTERFACE)
  add_library(replayeval::arrow ALIAS replayeval_arrow)
  target_include_directories(replayeval_arrow SYSTEM INTERFACE ${Arrow_INCLUDE_DIR})
  target_link_libraries(replayeval_arrow INTERFACE ${Arrow_PARQUET_LIBRARY} ${Arrow_LIBRARY})
endif()
mark_as_advanced(Arrow_INCLUDE_DIR Arrow_LIBRARY Arrow_PARQUET_LIBRARY)
