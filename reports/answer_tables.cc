#include "reports/answer_tables.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "reports/run_json.h"
#include "reports/schema.h"
#include "reports/text.h"

namespace replayeval {
namespace {

using Json = nlohmann::ordered_json;

double share(int64_t part, int64_t whole) {
  return whole == 0 ? std::nan("") : static_cast<double>(part) / static_cast<double>(whole);
}

std::string percent(double value, int decimals = 2) {
  return std::isfinite(value) ? format("%.*f", decimals, 100 * value) : "-";
}

std::string limits_text(const Interval& limits, int decimals) {
  if (!limits.known()) return "";
  return " [" + percent(limits.low, decimals) + ", " + percent(limits.high, decimals) + "]";
}

/// "-2.50 [-4.10, -0.90]" in percentage points.
std::string change_text(const PairedFigures& paired, int decimals) {
  return format("%+.*f", decimals, 100 * paired.change) + limits_text(paired.interval, decimals);
}

std::string state_name(const Report& report, int state) {
  return report.states[static_cast<size_t>(state)].info.name;
}

bool counts_chance(const Report& report) {
  return std::any_of(report.run.tasks.begin(), report.run.tasks.end(),
                     [](const TaskInfo& task) { return task.chance_for_none; });
}

Table accuracy_table(const Report& report, const AnswerStatistics& statistics) {
  Table table;
  table.title = "Accuracy in percent, by task and state";
  table.head = {"task",          "state",     "bits/elt",  "answers", "accuracy [95 %]",
                "finished only", "truncated", "no answer", "tokens",  "change/points [95 %]",
                "lost",          "gained",    "McNemar p"};
  table.left = {1};
  const bool chance = counts_chance(report);
  if (chance) table.head.insert(table.head.begin() + 5, "none by chance");
  bool shown = false, paired = false, repeated = false;
  for (const AnswerRow& row : statistics.rows) {
    if (row.by != AnswerGroup::all) continue;
    const AnswerFigures& f = row.figures;
    const StateInfo& info = report.states[static_cast<size_t>(row.state)].info;
    repeated = repeated || f.items != f.answers;
    std::vector<std::string> cells = {
        row.task,
        info.name,
        info.bits_per_element > 0 ? format("%.3g", info.bits_per_element) : "-",
        std::to_string(f.answers),
        percent(share(f.correct, f.answers)) + limits_text(f.accuracy, 2),
        f.finish_known ? percent(share(f.finished_correct, f.finished())) : "-",
        f.finish_known ? percent(share(f.truncated, f.answers)) : "-",
        percent(share(f.missing, f.answers)),
        f.tokens_known ? format("%.1f", f.tokens / static_cast<double>(f.answers)) : "-"};
    if (chance) {
      cells.insert(cells.begin() + 5, percent((static_cast<double>(f.correct) + f.chance) /
                                              static_cast<double>(f.answers)));
    }
    if (row.against_baseline) {
      const PairedFigures& p = *row.against_baseline;
      const bool below = p.p < kShownBelow;
      shown = shown || below;
      paired = true;
      cells.push_back(change_text(p, 2) + (below ? " *" : ""));
      cells.push_back(std::to_string(p.lost));
      cells.push_back(std::to_string(p.gained));
      cells.push_back(format("%.3g", p.p));
    } else {
      cells.insert(cells.end(), 4, "-");
    }
    table.rows.push_back(std::move(cells));
  }
  table.notes.push_back(
      "Truncated answers and those from which nothing was extracted count as wrong; finished only "
      "leaves the truncated ones out.");
  if (chance) {
    table.notes.push_back(
        "none by chance: accuracy if an option were drawn where nothing was extracted.");
  }
  if (paired) {
    table.notes.push_back(
        "change: against " + report.run.baseline +
        " on the same items, paired bootstrap over items (a score interval where none differs); "
        "lost and gained answers, exact McNemar" +
        (repeated ? ", which takes the repeats of an item as independent." : "."));
    table.notes.push_back(shown
                              ? format("* p < %.3g; the other changes are not shown.", kShownBelow)
                              : format("No change is shown at p < %.3g.", kShownBelow));
  }
  if (repeated) {
    table.notes.push_back(
        "Intervals of accuracies: Wilson, the number of answers divided by the design effect of "
        "their repeats.");
  }
  return table;
}

/// Rows are states, columns the groups.
Table group_table(const Report& report, const AnswerStatistics& statistics, const std::string& task,
                  AnswerGroup by, const std::string& title, const std::vector<std::string>& groups,
                  const std::vector<std::string>& heads) {
  Table table;
  table.title = title;
  table.head = {"state"};
  table.head.insert(table.head.end(), heads.begin(), heads.end());
  std::vector<std::string> counts = {"answers"};
  for (const std::string& group : groups) {
    int64_t most = 0;
    for (size_t s = 0; s < report.states.size(); ++s) {
      const AnswerRow* row = statistics.find(task, static_cast<int>(s), by, group);
      if (row != nullptr) most = std::max(most, row->figures.answers);
    }
    counts.push_back(std::to_string(most));
  }
  for (size_t s = 0; s < report.states.size(); ++s) {
    if (report.states[s].answers.empty()) continue;
    std::vector<std::string> cells = {report.states[s].info.name};
    for (const std::string& group : groups) {
      const AnswerRow* row = statistics.find(task, static_cast<int>(s), by, group);
      if (row == nullptr) {
        cells.push_back("-");
        continue;
      }
      std::string cell = percent(share(row->figures.correct, row->figures.answers), 1) +
                         limits_text(row->figures.accuracy, 0);
      if (row->against_baseline) cell += format(" %+.1f", 100 * row->against_baseline->change);
      if (row->figures.truncated > 0)
        cell += " cut " + percent(share(row->figures.truncated, row->figures.answers), 0);
      cells.push_back(cell);
    }
    table.rows.push_back(std::move(cells));
  }
  table.rows.push_back(std::move(counts));
  return table;
}

/// Rows are groups (there may be many), columns the states.
Table tall_table(const Report& report, const AnswerStatistics& statistics, const std::string& task,
                 AnswerGroup by, const std::string& title, const std::vector<std::string>& groups) {
  Table table;
  table.title = title;
  table.head = {by == AnswerGroup::level ? "level" : "category", "answers"};
  std::vector<int> states;
  for (size_t s = 0; s < report.states.size(); ++s) {
    if (report.states[s].answers.empty()) continue;
    states.push_back(static_cast<int>(s));
    table.head.push_back(report.states[s].info.name);
  }
  for (const std::string& group : groups) {
    std::vector<std::string> cells = {group.empty() ? "(none)" : group, ""};
    int64_t most = 0;
    for (const int s : states) {
      const AnswerRow* row = statistics.find(task, s, by, group);
      if (row != nullptr) most = std::max(most, row->figures.answers);
      cells.push_back(row == nullptr
                          ? "-"
                          : percent(share(row->figures.correct, row->figures.answers), 1) +
                                limits_text(row->figures.accuracy, 0));
    }
    cells[1] = std::to_string(most);
    table.rows.push_back(std::move(cells));
  }
  return table;
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string csv_number(double value) {
  if (!std::isfinite(value)) return "";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

Json optional(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json interval_json(double value, const Interval& limits) {
  return {
      {"value", optional(value)}, {"low", optional(limits.low)}, {"high", optional(limits.high)}};
}

}  // namespace

std::vector<Table> answer_tables(const Report& report, const AnswerStatistics& statistics) {
  std::vector<Table> tables = {accuracy_table(report, statistics)};
  for (const std::string& task : statistics.tasks) {
    std::vector<std::string> categories, levels;
    for (const AnswerRow& row : statistics.rows) {
      if (row.task != task) continue;
      std::vector<std::string>* names = row.by == AnswerGroup::category ? &categories
                                        : row.by == AnswerGroup::level  ? &levels
                                                                        : nullptr;
      if (names != nullptr && std::find(names->begin(), names->end(), row.group) == names->end())
        names->push_back(row.group);
    }
    for (const LengthQuartiles& quartiles : statistics.quartiles) {
      if (quartiles.task != task) continue;
      std::vector<std::string> groups, heads;
      for (size_t q = 0; q < 4; ++q) {
        groups.push_back("Q" + std::to_string(q + 1));
        heads.push_back(groups.back() + ": " + std::to_string(quartiles.tokens[q].first) + "-" +
                        std::to_string(quartiles.tokens[q].second) + " tokens");
      }
      tables.push_back(group_table(report, statistics, task, AnswerGroup::length,
                                   "Accuracy of " + task +
                                       " in percent, by length of the answer "
                                       "of " +
                                       report.run.baseline,
                                   groups, heads));
      tables.back().notes.push_back(
          "accuracy [95 %], change against " + report.run.baseline +
          " in points, and the share of truncated answers where there are any.");
    }
    if (!levels.empty()) {
      tables.push_back(tall_table(report, statistics, task, AnswerGroup::level,
                                  "Accuracy of " + task + " in percent, by level", levels));
    }
    if (!categories.empty()) {
      tables.push_back(tall_table(report, statistics, task, AnswerGroup::category,
                                  "Accuracy of " + task + " in percent, by category", categories));
    }
  }
  return tables;
}

std::string answer_text(const Report& report, const AnswerStatistics& statistics) {
  std::string text = as_text(run_table(report));
  for (const Table& table : answer_tables(report, statistics)) text += "\n" + as_text(table);
  return text;
}

std::string answer_csv(const Report& report, const AnswerStatistics& statistics) {
  std::string text =
      "task,state,bits_per_element,bytes_per_sequence,by,group,items,answers,correct,accuracy,"
      "accuracy_low,accuracy_high,finished,finished_correct,finished_accuracy,"
      "finished_accuracy_low,finished_accuracy_high,truncated,no_answer,chance_accuracy,"
      "mean_tokens,paired_answers,change,change_low,change_high,lost,gained,mcnemar_p\n";
  for (const AnswerRow& row : statistics.rows) {
    const AnswerFigures& f = row.figures;
    const StateInfo& info = report.states[static_cast<size_t>(row.state)].info;
    const auto n = static_cast<double>(f.answers);
    auto finished = [&](const std::string& value) {
      return f.finish_known ? value : std::string();
    };
    text += csv_field(row.task) + "," + csv_field(info.name) + "," +
            csv_number(info.bits_per_element) + "," + std::to_string(info.bytes_per_sequence) +
            "," + group_name(row.by) + "," + csv_field(row.group) + "," + std::to_string(f.items) +
            "," + std::to_string(f.answers) + "," + std::to_string(f.correct) + "," +
            csv_number(share(f.correct, f.answers)) + "," + csv_number(f.accuracy.low) + "," +
            csv_number(f.accuracy.high) + "," + finished(std::to_string(f.finished())) + "," +
            finished(std::to_string(f.finished_correct)) + "," +
            finished(csv_number(share(f.finished_correct, f.finished()))) + "," +
            finished(csv_number(f.finished_accuracy.low)) + "," +
            finished(csv_number(f.finished_accuracy.high)) + "," +
            finished(std::to_string(f.truncated)) + "," + std::to_string(f.missing) + "," +
            csv_number((static_cast<double>(f.correct) + f.chance) / n) + "," +
            (f.tokens_known ? csv_number(f.tokens / n) : "");
    if (row.against_baseline) {
      const PairedFigures& p = *row.against_baseline;
      text += "," + std::to_string(p.answers) + "," + csv_number(p.change) + "," +
              csv_number(p.interval.low) + "," + csv_number(p.interval.high) + "," +
              std::to_string(p.lost) + "," + std::to_string(p.gained) + "," + csv_number(p.p);
    } else {
      text += ",,,,,,,";
    }
    text += "\n";
  }
  return text;
}

std::string answer_json(const Report& report, const AnswerStatistics& statistics,
                        const std::string& flips) {
  Json json;
  json["schema"] = kSchema;
  json["run"] = run_json(report.run);
  json["tasks"] = Json::array();
  for (const TaskInfo& task : report.run.tasks) {
    json["tasks"].push_back({{"name", task.name},
                             {"version", task.version},
                             {"sha256", task.sha256},
                             {"private", task.private_data}});
  }
  json["repeats"] = report.run.repeats;
  json["states"] = Json::array();
  for (const StateReport& state : report.states) {
    json["states"].push_back({{"name", state.info.name},
                              {"definition", state.info.definition},
                              {"sha256", state.info.sha256},
                              {"bits_per_element", state.info.bits_per_element},
                              {"bytes_per_sequence", state.info.bytes_per_sequence}});
  }
  json["length_quartiles"] = Json::array();
  for (const LengthQuartiles& quartiles : statistics.quartiles) {
    Json ranges = Json::array();
    for (const auto& [first, last] : quartiles.tokens) ranges.push_back({first, last});
    json["length_quartiles"].push_back({{"task", quartiles.task}, {"tokens", ranges}});
  }
  json["rows"] = Json::array();
  for (const AnswerRow& row : statistics.rows) {
    const AnswerFigures& f = row.figures;
    const auto n = static_cast<double>(f.answers);
    Json one = {{"task", row.task},
                {"state", state_name(report, row.state)},
                {"by", group_name(row.by)},
                {"group", row.group},
                {"items", f.items},
                {"answers", f.answers},
                {"correct", f.correct},
                {"accuracy", interval_json(share(f.correct, f.answers), f.accuracy)},
                {"finished", f.finish_known ? Json(f.finished()) : Json(nullptr)},
                {"finished_accuracy",
                 f.finish_known
                     ? interval_json(share(f.finished_correct, f.finished()), f.finished_accuracy)
                     : Json(nullptr)},
                {"truncated", f.finish_known ? Json(f.truncated) : Json(nullptr)},
                {"no_answer", f.missing},
                {"chance_accuracy", (static_cast<double>(f.correct) + f.chance) / n},
                {"mean_tokens", f.tokens_known ? Json(f.tokens / n) : Json(nullptr)},
                {"against_baseline", nullptr}};
    if (row.against_baseline) {
      const PairedFigures& p = *row.against_baseline;
      one["against_baseline"] = {{"items", p.items},
                                 {"answers", p.answers},
                                 {"change", interval_json(p.change, p.interval)},
                                 {"lost", p.lost},
                                 {"gained", p.gained},
                                 {"mcnemar_p", p.p}};
    }
    json["rows"].push_back(std::move(one));
  }
  if (!flips.empty()) json["flips"] = Json::parse(flips);
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace replayeval
