#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "harness/command_line.h"

namespace {

/// Threads of the OpenMP library that wait keep spinning for milliseconds before they sleep. Beside
/// other work on the same cores they so keep those from running that they wait for: a run is then
/// many times slower than on one thread. The library reads its settings when it is loaded; loading
/// all libraries again is worth it only to the commands that multiply.
void restart_with_short_spins(std::string_view command, char** argv) {
  if (command != "run" && command != "bench" && command != "check") return;
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  if (setenv("GOMP_SPINCOUNT", "10000", 1) == 0) execv("/proc/self/exe", argv);
  // Where that is not possible the program goes on as it is.
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) restart_with_short_spins(argv[1], argv);
  return replayeval::run_command_line(argc, argv);
}
