#include "harness/build_info.h"

#include <nlohmann/json.hpp>

#include "models/torch_dense.h"
#include "replayeval_revision.h"

namespace replayeval {

BuildInfo build_info() {
  BuildInfo info;
  info.version = REPLAYEVAL_VERSION;
  info.revision = REPLAYEVAL_REVISION;
#if defined(__clang__)
  info.compiler = std::string("clang ") + __clang_version__;
#else
  info.compiler = std::string("gcc ") + __VERSION__;
#endif
  info.versions["libtorch"] = torch_version();
  info.versions["nlohmann-json"] = std::to_string(NLOHMANN_JSON_VERSION_MAJOR) + "." +
                                   std::to_string(NLOHMANN_JSON_VERSION_MINOR) + "." +
                                   std::to_string(NLOHMANN_JSON_VERSION_PATCH);
  return info;
}

}  // namespace replayeval
