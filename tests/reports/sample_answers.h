// A made-up score run whose answers are a function of state, item and repeat, shared by the tests
// of reports.
#pragma once

#include <algorithm>
#include <string>

#include "tests/reports/sample_run.h"

namespace replayeval::test {

/// Items alternate between a free task "math" (m0, m2, ...) and a quiz of four options (q1, q3,
/// ...).
inline ItemInfo sample_item(int index) {
  ItemInfo item;
  const bool quiz = index % 2 == 1;
  item.id = (quiz ? "q" : "m") + std::to_string(index);
  item.task = quiz ? "quiz" : "math";
  item.category = quiz ? (index % 4 == 1 ? "law" : "history") : "sums";
  item.level = quiz ? 0 : 1 + index / 2 % 5;
  item.gold = quiz ? std::string(1, static_cast<char>('A' + index % 4)) : std::to_string(index);
  item.options = quiz ? 4 : 0;
  if (quiz) item.option_order = {2, 0, 3, 1};
  item.prompt_sha256 = sha256_hex("prompt of " + item.id);
  item.grading = quiz ? "last_answer" : "math";
  return item;
}

inline RunPlan sample_score_plan(std::vector<std::string> states = {"fp32", "nvfp4+sr",
                                                                    "fp16+sr/nvfp4"},
                                 int items = 7, int repeats = 2) {
  RunPlan plan = sample_plan(std::move(states), {});
  plan.run.job = "score";
  plan.run.experiment = "job: score\nmodel: models/mini-mamba2\n";
  plan.run.data = "tasks";
  for (const char* name : {"quiz", "math"}) {
    const std::string definition = "name: " + std::string(name) + "\nversion: 3\n";
    plan.run.tasks.push_back({name, 3, sha256_hex(definition), definition, false, false});
  }
  plan.run.repeats = repeats;
  for (int i = 0; i < items; ++i) plan.items.push_back(sample_item(i));
  return plan;
}

/// Every fifth answer is cut off; of the others most are right, those of the baseline more often.
/// States agree with the baseline's tokens up to a token that depends on the item.
inline Answer sample_answer(const RunPlan& plan, const AnswerKey& key) {
  const ItemInfo& item = plan.items[static_cast<size_t>(key.item)];
  const StateInfo& state = plan.states[static_cast<size_t>(key.state)];
  const bool baseline = state.name == plan.run.baseline;
  const uint64_t common = name_key(item.task + "/" + item.id + "/" + std::to_string(key.repeat));
  const uint64_t own = common ^ (baseline ? 0 : name_key(state.name));
  Answer answer;
  answer.item = key.item;
  answer.repeat = key.repeat;
  answer.tokens = 8 + static_cast<int64_t>(mix(common) % 20);
  const int64_t parting = baseline ? answer.tokens : static_cast<int64_t>(mix(common + 5) % 12);
  for (int64_t t = 0; t < answer.tokens; ++t) {
    const uint64_t source = (t < parting ? common : own) + 100 + static_cast<uint64_t>(t);
    answer.token_ids.push_back(static_cast<int32_t>(mix(source) % 4096));
    answer.margins.push_back(uniform(source + 9) * 4);
    answer.text += (t == 0 ? "t" : " t") + std::to_string(answer.token_ids.back());
  }
  const bool cut = mix(own + 1) % 5 == 0;
  answer.finish_reason = cut ? "length" : "stop";
  answer.correct = !cut && mix(own + 2) % 10 < (baseline ? 8u : 6u);
  answer.extracted = cut ? "" : answer.correct ? item.gold : "\xC3\xA9 wrong";
  answer.rule = cut ? "" : "boxed";
  answer.stage = cut ? 0 : 1;
  answer.seconds = 0.25 + static_cast<double>(key.item);
  return answer;
}

/// Puts what is missing, `batch` answers at a time.
inline void put_answers(RunFolder& folder, size_t batch = 10) {
  const std::vector<AnswerKey> missing = folder.missing_answers();
  for (size_t first = 0; first < missing.size(); first += batch) {
    AnswerBatch rows;
    for (size_t i = first; i < std::min(first + batch, missing.size()); ++i)
      rows.rows.push_back({missing[i].state, sample_answer(folder.plan(), missing[i])});
    rows.seconds = 0.5;
    folder.put(rows);
  }
}

/// Empty when all fields but the seconds agree.
inline std::string same_answer(const Answer& a, const Answer& b) {
  if (a.item != b.item) return "item";
  if (a.repeat != b.repeat) return "repeat";
  if (a.text != b.text) return "text";
  if (a.tokens != b.tokens) return "tokens";
  if (a.finish_reason != b.finish_reason) return "finish_reason";
  if (a.extracted != b.extracted) return "extracted";
  if (a.rule != b.rule) return "rule";
  if (a.stage != b.stage) return "stage";
  if (a.correct != b.correct) return "correct";
  if (a.token_ids != b.token_ids) return "token_ids";
  if (!same_floats(a.margins, b.margins)) return "margins";
  return {};
}

/// Empty when both reports hold the same items and answers, otherwise what differs first.
inline std::string answers_differ(const Report& a, const Report& b) {
  if (a.items != b.items) return "items";
  if (a.states.size() != b.states.size()) return "number of states";
  for (size_t s = 0; s < a.states.size(); ++s) {
    const std::string& name = a.states[s].info.name;
    if (name != b.states[s].info.name) return "state " + name;
    const std::vector<Answer>&x = a.states[s].answers, &y = b.states[s].answers;
    if (x.size() != y.size()) return "number of answers of " + name;
    for (size_t i = 0; i < x.size(); ++i) {
      const std::string what = same_answer(x[i], y[i]);
      if (!what.empty()) return what + " of answer " + std::to_string(i) + " of " + name;
    }
  }
  return {};
}

}  // namespace replayeval::test
