# plotly.js from the PyPI wheel `plotly` unpacked by `./dev deps` into .deps/site (or PLOTLY_ROOT): the file
# Plotly_SCRIPT, which is embedded in the program (reports/page_files.S).
set(PLOTLY_ROOT "${PROJECT_SOURCE_DIR}/.deps/site/plotly" CACHE PATH "Folder of the unpacked plotly wheel")
find_file(Plotly_SCRIPT plotly.min.js PATHS ${PLOTLY_ROOT}/package_data NO_DEFAULT_PATH)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Plotly REQUIRED_VARS Plotly_SCRIPT
  REASON_FAILURE_MESSAGE "run ./dev deps, or set PLOTLY_ROOT to the plotly folder of an unpacked plotly==7.1.0 wheel")
mark_as_advanced(Plotly_SCRIPT)
