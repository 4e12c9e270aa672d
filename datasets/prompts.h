// Prompts of tasks: the parts of load_prompts and grade_answer that stand on their own.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "datasets/jinja.h"
#include "datasets/task.h"

namespace replayeval {

/// How the templates of task files are read: tags on lines of their own leave nothing behind, the
/// text ends where it ends, and a variable that is not there is an error.
JinjaOptions prompt_template_options();

/// What the templates of a task see of an item (PromptForm).
JinjaValue::Map template_variables(const Item& item);

/// Their names.
const std::vector<std::string>& template_variable_names();

/// An option or answer as lm-evaluation-harness's gpqa task shows it (OptionRule::clean).
std::string lm_eval_gpqa_clean(std::string_view text);

/// The part of an answer that is graded: with `think_end` what follows its last occurrence; nothing
/// when a thinking section was opened at the end of `prompt` or at the start of the text and does
/// not end; otherwise everything. The opening of "</x>" is "<x>", of "[/x]" "[x]".
std::string_view graded_part(std::string_view think_end, std::string_view prompt,
                             std::string_view text);

}  // namespace replayeval
