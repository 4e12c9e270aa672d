// What `show` prints of a run, as aligned text, CSV and JSON, all from the same statistics.
#pragma once

#include <string>
#include <vector>

#include "reports/results.h"
#include "reports/statistics.h"

namespace replayeval {

/// A table as text. The first column and those named in `left` (by index) are set left, the others
/// right.
struct Table {
  std::string title;
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> notes = {};  // lines below
  std::vector<size_t> left = {};
};

/// Columns aligned, two blanks apart.
std::string as_text(const Table& table);
/// GitHub-flavoured Markdown.
std::string as_markdown(const Table& table);

/// A number with three significant digits, "-" for NaN; exponents only outside 1e-3 .. 1e5.
std::string number(double value);
/// "1.23e-05 [1.1e-05, 1.4e-05]", without brackets when there is no interval.
std::string number(const Estimate& estimate);

/// What was run: model, data, tasks, arithmetic.
Table run_table(const Report& report);

/// The tables of a kl run: what was run, one row a state, mean KL by position bin.
std::vector<Table> kl_tables(const Report& report, const KlStatistics& statistics);

/// The tables with what they need to be understood, as printed on a terminal.
std::string kl_text(const Report& report, const KlStatistics& statistics);

/// One line for each state and bin ("all" first), with a header line; numbers in full precision,
/// empty where there is none.
std::string kl_csv(const Report& report, const KlStatistics& statistics);

/// {"schema", "run", "documents", "bins", "states": [{"name", ..., "all": {...}, "bins": [...]}]};
/// null where there is no value.
std::string kl_json(const Report& report, const KlStatistics& statistics);

}  // namespace replayeval
