// `replayeval show` and `replayeval report`: the tables of runs on a terminal, one page, or figures
// in open formats.
#pragma once

#include <string>
#include <vector>

#include "reports/results.h"

namespace replayeval {

struct ReportOptions {
  std::vector<std::string> runs;  // run folders or report.h5 files
  std::string out;                // the page; with `export_as`, a folder
  std::string export_as;          // "csv", "parquet" or "samples"; empty: the page
  std::string redact;             // "formats", or empty
};

struct ShowOptions {
  std::vector<std::string> runs;  // run folders or report.h5 files
  bool csv = false;
  bool json = false;
  bool health = false;  // also the health of each layer
  bool flips = false;   // also the answers that a state turned from right to wrong
};

/// The report of a run folder or report.h5. A folder's report.h5 is written when it has none, or
/// not of all that is finished by now; one that holds what the parts lack is kept, named on stderr,
/// and read instead of them.
Report read_run(const std::string& run);

/// read_run of one run, or of several put side by side. Throws std::invalid_argument, beginning
/// with the command's name, naming what forbids that.
Report read_runs(const std::vector<std::string>& runs, const std::string& command);

/// The tables of the runs. Graded answers and KL may be given together: with `flips`, a kl run over
/// the baseline's answers tells the KL where a state's answer parts from it. Throws as read_runs,
/// and std::invalid_argument for options that do not fit the runs.
std::string show_runs(const ShowOptions& options);

/// Writes the page or the tables and prints what was written. Returns 0; throws
/// std::invalid_argument for a wrong request, std::runtime_error when a file cannot be read or
/// written.
int report_command(const ReportOptions& options);

}  // namespace replayeval
