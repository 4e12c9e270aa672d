// `replayeval report`: one page, or tables in open formats, of runs.
#pragma once

#include <string>
#include <vector>

#include "reports/results.h"

namespace replayeval {

struct ReportOptions {
  std::vector<std::string> runs;  // run folders or report.h5 files
  std::string out;                // the page; with `export_as`, a folder
  std::string export_as;          // "csv", or empty: the page
  std::string redact;             // "formats", or empty
};

/// The report of a run folder or report.h5. A folder's report.h5 is assembled when it has none, or
/// not of all that is finished by now.
Report read_run(const std::string& run);

/// read_run of one run, or of several put side by side. Throws std::invalid_argument naming what
/// forbids that.
Report read_runs(const std::vector<std::string>& runs);

/// Writes the page or the tables and prints what was written. Returns 0; throws
/// std::invalid_argument for a wrong request, std::runtime_error when a file cannot be read or
/// written.
int report_command(const ReportOptions& options);

}  // namespace replayeval
