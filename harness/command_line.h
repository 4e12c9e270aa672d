// The command line: `replayeval run|show|list|check ...` (DESIGN.md section 5).
#pragma once

namespace replayeval {

/// Runs the program and returns its exit code: 0 done, 1 the run failed, 2 the request is wrong. An
/// error is one line on standard error: place, expected, got, hint.
int run_command_line(int argc, const char* const* argv);

}  // namespace replayeval
