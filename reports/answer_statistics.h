// Accuracy of graded answers with intervals, and what each state loses against the baseline on the
// same items: by task, category, level, and length of the baseline's answer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reports/results.h"
#include "reports/statistics.h"

namespace replayeval {

/// Counts of some answers of one state. A truncated answer is one that the token limit ended; a
/// missing one is an answer from which no rule extracted anything. Both count as wrong.
struct AnswerFigures {
  int64_t items = 0;
  int64_t answers = 0;
  int64_t correct = 0;
  int64_t truncated = 0;
  int64_t finished_correct = 0;  // of answers - truncated
  int64_t missing = 0;
  double chance = 0;         // expected hits of a random option instead of each missing answer
  double tokens = 0;         // of all answers together
  bool finish_known = true;  // of every answer; otherwise truncated and finished say nothing
  bool tokens_known = true;
  Interval accuracy;  // shares; Wilson, see answer_statistics()
  Interval finished_accuracy;

  int64_t finished() const { return answers - truncated; }
};

/// A state against the baseline, over the answers to the same item and repeat that both have given.
struct PairedFigures {
  int64_t items = 0;
  int64_t answers = 0;
  int64_t lost = 0;  // right by the baseline, wrong by the state
  int64_t gained = 0;
  double change = 0;  // of the share of right answers
  Interval interval;  // 95 %, paired bootstrap over items
  double p = 1;       // exact McNemar, two-sided; it takes the repeats of an item as independent
};

/// What the figures of a row are of.
enum class AnswerGroup : uint8_t { all, length, category, level };

/// "all", "length", "category", "level".
std::string group_name(AnswerGroup group);

struct AnswerRow {
  std::string task;
  int state = 0;  // index into Report::states
  AnswerGroup by = AnswerGroup::all;
  std::string group;  // of length: Q1 .. Q4; a category's name; a level's number; empty for all
  AnswerFigures figures;
  std::optional<PairedFigures> against_baseline;
};

/// Quartiles of a task by the tokens of the baseline's answers, shortest first; ties are broken by
/// item. Fewest and most tokens of each; absent for fewer than four answers, or unknown lengths.
struct LengthQuartiles {
  std::string task;
  std::array<std::pair<int64_t, int64_t>, 4> tokens;
};

struct AnswerStatistics {
  std::vector<std::string> tasks;  // in the order of the items
  std::vector<LengthQuartiles> quartiles;
  std::vector<AnswerRow> rows;  // by task, group, and state

  const AnswerRow* find(const std::string& task, int state, AnswerGroup by,
                        const std::string& group) const;
};

/// Intervals of shares are Wilson's. Where items are answered several times the number of answers
/// is divided by the design effect that the spread between items shows, at most down to the number
/// of items.
AnswerStatistics answer_statistics(const Report& report, const StatisticsOptions& options = {});

/// Whether any state has answers.
bool has_answers(const Report& report);

}  // namespace replayeval
