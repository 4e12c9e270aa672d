#include "reports/answer_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>

namespace replayeval {
namespace {

/// Item and repeat.
using Key = std::pair<int32_t, int32_t>;
using Answers = std::vector<const Answer*>;

Key key_of(const Answer& answer) { return {answer.item, answer.repeat}; }

/// Number of independent answers that know the share `successes` / `trials` as well as these do,
/// from the spread between clusters of `sums` successes in `counts` trials.
double effective_trials(const std::map<int32_t, std::pair<int64_t, int64_t>>& clusters,
                        int64_t successes, int64_t trials) {
  const auto n = static_cast<double>(trials), k = static_cast<double>(clusters.size());
  if (clusters.size() == static_cast<size_t>(trials)) return n;
  const double p = static_cast<double>(successes) / n;
  double between = 0;
  for (const auto& [item, sums] : clusters) {
    const double d = static_cast<double>(sums.first) - p * static_cast<double>(sums.second);
    between += d * d;
  }
  if (k < 2 || between == 0) return k;
  const double variance = between * k / (k - 1) / (n * n);
  return std::clamp(p * (1 - p) / variance, k, n);
}

/// Wilson's interval, of `trials` that need not be whole.
Interval wilson_of(const Answers& answers, bool finished_only) {
  std::map<int32_t, std::pair<int64_t, int64_t>> clusters;
  int64_t successes = 0, trials = 0;
  for (const Answer* answer : answers) {
    if (finished_only && answer->finish_reason == "length") continue;
    auto& [right, all] = clusters[answer->item];
    right += answer->correct ? 1 : 0;
    all += 1;
    successes += answer->correct ? 1 : 0;
    trials += 1;
  }
  if (trials == 0) return {};
  return wilson_of_share(static_cast<double>(successes) / static_cast<double>(trials),
                         effective_trials(clusters, successes, trials));
}

AnswerFigures figures_of(const Report& report, const Answers& answers) {
  AnswerFigures f;
  std::set<int32_t> items;
  for (const Answer* answer : answers) {
    const bool cut = answer->finish_reason == "length";
    items.insert(answer->item);
    f.answers += 1;
    f.correct += answer->correct ? 1 : 0;
    f.truncated += cut ? 1 : 0;
    f.finished_correct += answer->correct && !cut ? 1 : 0;
    f.tokens += static_cast<double>(answer->tokens);
    f.finish_known = f.finish_known && !answer->finish_reason.empty();
    f.tokens_known = f.tokens_known && answer->tokens >= 0;
    if (!answer->extracted.empty()) continue;
    f.missing += 1;
    const int options = report.items[static_cast<size_t>(answer->item)].options;
    if (options > 0 && !answer->correct) f.chance += 1.0 / options;
  }
  f.items = static_cast<int64_t>(items.size());
  f.accuracy = wilson_of(answers, false);
  f.finished_accuracy = wilson_of(answers, true);
  return f;
}

std::optional<PairedFigures> paired(const std::map<Key, const Answer*>& baseline,
                                    const Answers& answers, const StatisticsOptions& options) {
  PairedFigures out;
  std::vector<double> before, after;
  std::vector<int64_t> cluster;
  for (const Answer* answer : answers) {
    const auto found = baseline.find(key_of(*answer));
    if (found == baseline.end()) continue;
    const bool right = found->second->correct;
    before.push_back(right ? 1 : 0);
    after.push_back(answer->correct ? 1 : 0);
    cluster.push_back(answer->item);
    out.lost += right && !answer->correct ? 1 : 0;
    out.gained += !right && answer->correct ? 1 : 0;
  }
  if (before.empty()) return std::nullopt;
  const PairedDifference difference = paired_bootstrap(before, after, cluster, options);
  out.items = difference.items;
  out.answers = static_cast<int64_t>(before.size());
  out.change = difference.difference;
  // No share changes by more than all of it.
  if (difference.interval.known()) {
    out.interval = {std::clamp(difference.interval.low, -1.0, 1.0),
                    std::clamp(difference.interval.high, -1.0, 1.0)};
  }
  out.p = mcnemar_exact(out.lost, out.gained);
  return out;
}

/// Quartile, 0 .. 3, of each item and repeat that the baseline answered.
std::map<Key, size_t> quartiles_of(const Answers& baseline, LengthQuartiles* bounds) {
  std::map<Key, size_t> out;
  const bool known = std::all_of(baseline.begin(), baseline.end(),
                                 [](const Answer* answer) { return answer->tokens >= 0; });
  if (baseline.size() < 4 || !known) return out;
  Answers order = baseline;
  std::sort(order.begin(), order.end(), [](const Answer* a, const Answer* b) {
    return std::tuple(a->tokens, a->item, a->repeat) < std::tuple(b->tokens, b->item, b->repeat);
  });
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t quartile = 4 * i / order.size();
    out[key_of(*order[i])] = quartile;
    if (i == 0 || 4 * (i - 1) / order.size() != quartile)
      bounds->tokens[quartile].first = order[i]->tokens;
    bounds->tokens[quartile].second = order[i]->tokens;
  }
  return out;
}

}  // namespace

std::string group_name(AnswerGroup group) {
  switch (group) {
    case AnswerGroup::all:
      return "all";
    case AnswerGroup::length:
      return "length";
    case AnswerGroup::category:
      return "category";
    case AnswerGroup::level:
      return "level";
  }
  return {};
}

const AnswerRow* AnswerStatistics::find(const std::string& task, int state, AnswerGroup by,
                                        const std::string& group) const {
  for (const AnswerRow& row : rows) {
    if (row.task == task && row.state == state && row.by == by && row.group == group) return &row;
  }
  return nullptr;
}

bool has_answers(const Report& report) {
  return std::any_of(report.states.begin(), report.states.end(),
                     [](const StateReport& state) { return !state.answers.empty(); });
}

AnswerStatistics answer_statistics(const Report& report, const StatisticsOptions& options) {
  AnswerStatistics out;
  for (const ItemInfo& item : report.items) {
    if (std::find(out.tasks.begin(), out.tasks.end(), item.task) == out.tasks.end())
      out.tasks.push_back(item.task);
  }
  const int baseline = report.baseline();
  for (const std::string& task : out.tasks) {
    std::vector<Answers> answers(report.states.size());
    for (size_t s = 0; s < report.states.size(); ++s) {
      for (const Answer& answer : report.states[s].answers) {
        if (report.items.at(static_cast<size_t>(answer.item)).task == task)
          answers[s].push_back(&answer);
      }
    }
    std::map<Key, const Answer*> reference;
    LengthQuartiles bounds{task, {}};
    std::map<Key, size_t> quartiles;
    if (baseline >= 0) {
      for (const Answer* answer : answers[static_cast<size_t>(baseline)])
        reference[key_of(*answer)] = answer;
      quartiles = quartiles_of(answers[static_cast<size_t>(baseline)], &bounds);
    }
    if (!quartiles.empty()) out.quartiles.push_back(bounds);

    // Groups of items, or of answers; one that has all answers says nothing new.
    std::vector<std::string> categories;
    std::set<int> levels;
    for (const ItemInfo& item : report.items) {
      if (item.task != task) continue;
      if (std::find(categories.begin(), categories.end(), item.category) == categories.end())
        categories.push_back(item.category);
      levels.insert(item.level);
    }
    auto add = [&](AnswerGroup by, const std::string& group, auto member) {
      for (size_t s = 0; s < answers.size(); ++s) {
        Answers chosen;
        for (const Answer* answer : answers[s]) {
          if (member(*answer)) chosen.push_back(answer);
        }
        if (chosen.empty()) continue;
        AnswerRow row{task, static_cast<int>(s), by, group, figures_of(report, chosen), {}};
        if (static_cast<int>(s) != baseline)
          row.against_baseline = paired(reference, chosen, options);
        out.rows.push_back(std::move(row));
      }
    };
    auto item_of = [&](const Answer& answer) -> const ItemInfo& {
      return report.items[static_cast<size_t>(answer.item)];
    };
    add(AnswerGroup::all, "", [](const Answer&) { return true; });
    for (size_t q = 0; q < 4 && !quartiles.empty(); ++q) {
      add(AnswerGroup::length, "Q" + std::to_string(q + 1), [&](const Answer& answer) {
        const auto found = quartiles.find(key_of(answer));
        return found != quartiles.end() && found->second == q;
      });
    }
    if (categories.size() > 1) {
      for (const std::string& category : categories) {
        add(AnswerGroup::category, category,
            [&](const Answer& answer) { return item_of(answer).category == category; });
      }
    }
    if (levels.size() > 1) {
      for (const int level : levels) {
        add(AnswerGroup::level, std::to_string(level),
            [&](const Answer& answer) { return item_of(answer).level == level; });
      }
    }
  }
  return out;
}

}  // namespace replayeval
