// Tasks, items and verdicts as a report holds them, for answers of a run and of other programs
// alike.
#pragma once

#include <string>

#include "datasets/task.h"
#include "reports/results.h"

namespace replayeval {

TaskInfo task_info(const TaskSpec& task);

/// `grading` spells the rules: "boxed, last_answer; math".
ItemInfo item_info(const TaskSpec& task, const PromptedItem& item);

/// Grades `answer`'s text and sets what was extracted, rule, stage and verdict.
void grade_into(const TaskSpec& task, const PromptedItem& item, Answer* answer);

}  // namespace replayeval
