#include "harness/task_results.h"

namespace replayeval {
namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

TaskInfo task_info(const TaskSpec& task) {
  TaskInfo info;
  info.name = task.name;
  info.version = task.version;
  info.sha256 = task.sha256;
  info.definition = task.definition;
  info.private_data = task.private_data;
  info.chance_for_none = task.no_answer == NoAnswer::kChance;
  return info;
}

ItemInfo item_info(const TaskSpec& task, const PromptedItem& item) {
  ItemInfo info;
  info.id = item.item.id;
  info.task = task.name;
  info.category = item.item.category;
  info.level = item.item.level;
  info.gold = item.gold;
  info.options = static_cast<int>(item.item.options.size());
  info.option_order.assign(item.option_order.begin(), item.option_order.end());
  info.prompt_sha256 = item.prompt_sha256;
  info.grading = joined(task.rules);
  if (!task.compare.empty()) info.grading += "; " + joined(task.compare);
  return info;
}

void grade_into(const TaskSpec& task, const PromptedItem& item, Answer* answer) {
  const Grade grade = grade_answer(task, item, answer->text);
  answer->extracted = grade.extracted;
  answer->rule = grade.rule;
  answer->stage = grade.stage;
  answer->correct = grade.correct;
}

}  // namespace replayeval
