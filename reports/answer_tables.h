// What `show` prints of graded answers, as aligned text, CSV and JSON, all from the same
// statistics.
#pragma once

#include <string>
#include <vector>

#include "reports/answer_statistics.h"
#include "reports/results.h"
#include "reports/tables.h"

namespace replayeval {

/// Changes with a McNemar p below this are marked as shown.
constexpr double kShownBelow = 0.01;

/// Accuracy of every state and task, by length quartile, category and level. Percent and
/// percentage points.
std::vector<Table> answer_tables(const Report& report, const AnswerStatistics& statistics);

/// What was run and the tables, as printed on a terminal.
std::string answer_text(const Report& report, const AnswerStatistics& statistics);

/// One line for each row of the statistics, with a header line; shares in full precision, empty
/// where there is none.
std::string answer_csv(const Report& report, const AnswerStatistics& statistics);

/// {"schema", "run", "tasks": [{"name", ...}], "states": [...], "rows": [{"task", "state", "by",
/// "group", "items", "answers", ..., "against_baseline": {...}}], "flips": ...}; null where there
/// is no value. `flips` is a JSON array, or empty: the member is left out.
std::string answer_json(const Report& report, const AnswerStatistics& statistics,
                        const std::string& flips = {});

}  // namespace replayeval
