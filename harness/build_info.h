// What this program was built from, for the report.
#pragma once

#include <map>
#include <string>

namespace replayeval {

struct BuildInfo {
  std::string version;   // of the program
  std::string revision;  // of the sources, "-dirty" when they differed from it; "unknown" outside a
                         // repository
  std::string compiler;
  std::map<std::string, std::string> versions;  // library -> version
};

BuildInfo build_info();

}  // namespace replayeval
