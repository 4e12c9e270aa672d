// A run as one HTML page that needs no other file and no network: curves, tables, the resolved
// experiment and every hash. plotly.js is inside the page.
#pragma once

#include <string>

#include "reports/results.h"
#include "reports/statistics.h"

namespace replayeval {

struct HtmlOptions {
  /// Replaces the names of formats by letters (fp32 stays) and leaves out their definitions, the
  /// hashes of these and the keys of the experiment that can name them.
  bool redact_formats = false;
};

/// The whole page, UTF-8. Curves over positions are binned on logarithmic grids that keep the
/// extremes of each cell, so that its size does not grow with the number of positions. `statistics`
/// are kl_statistics(report).
std::string report_html(const Report& report, const KlStatistics& statistics,
                        const HtmlOptions& options = {});

/// The report and its statistics as `redact_formats` shows them.
void redact_formats(Report* report, KlStatistics* statistics);

}  // namespace replayeval
