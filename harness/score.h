// The job `score`: every state precision answers the same items with the same random numbers, each
// answer is graded as it ends, and finished answers go into the run folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "datasets/task.h"
#include "datasets/tokenizer.h"
#include "harness/experiment.h"
#include "harness/generate.h"
#include "harness/teacher_forced.h"
#include "models/model.h"

namespace replayeval {

/// An item as the model is asked it.
struct AskedItem {
  int task = 0;  // index into AskedItems::tasks
  PromptedItem item;
  std::shared_ptr<const Prompt> prompt;
  int64_t max_tokens = 0;  // the task's, or what the context leaves
};

/// The items of all tasks of an experiment, in its order.
struct AskedItems {
  std::vector<TaskSpec> tasks;  // with the experiment's data and draws; identities recomputed
  std::vector<AskedItem> items;
  std::vector<std::string> skipped;   // a line for each item that cannot be asked
  std::vector<std::string> warnings;  // for people
  std::string data, data_sha256;
  int repeats = 1;
};

/// Loads the tasks of `experiment`, writes their prompts and turns them into tokens (bos before
/// them unless a chat template wrote its own). An item cannot be asked when its data is bad, when
/// its prompt does not come back from its tokens (but for Unicode normalization, which is a
/// warning), or when no token of answer fits into `max_positions` (0: no limit) behind it. With
/// on_bad_item: stop such items throw std::invalid_argument that names and counts them; with skip
/// they are listed. Throws as load_task and load_prompts, and std::invalid_argument for a task
/// named twice, differing repeats, and when no item is left.
AskedItems load_asked_items(const Experiment& experiment, const Tokenizer& tokenizer,
                            int64_t max_positions);

/// Tokens in common at the start of all prompts of a group: sets `group` and `shared_tokens` of the
/// prompts where it is worth a copy (at least two items and 32 tokens). `groups[i]` names the group
/// of prompts[i].
void share_prefixes(const std::vector<std::string>& groups, std::vector<Prompt>& prompts);

/// Answers the experiment's items into its run folder, assembles the report and prints its tables.
/// Prints progress. Returns 0; 1 when it was stopped before the end (finished answers are kept).
int run_score(const Experiment& experiment, const RunOptions& options);

}  // namespace replayeval
