// Tasks of the job `score`: a data set with prompt, shots, generation limits and the rules by which
// answers are graded, described in YAML (eval_configs/tasks).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "datasets/items.h"
#include "datasets/option_order.h"

namespace replayeval {

class ChatTemplate;
class Tokenizer;

/// How an answer is generated and where it ends.
struct GenerationLimits {
  int64_t max_tokens = 2048;      // of the answer, thinking included
  std::vector<std::string> stop;  // the answer ends before the first of these texts
  std::string think_end;          // only what follows its last occurrence is graded; empty: all
  double temperature = 0;         // 0: greedy
  double top_p = 1;               // of the probability mass, (0, 1]
  int top_k = 0;                  // 0: all tokens
  int repeats = 1;                // answers to each item, drawn independently
};

/// Worked examples before the question.
struct ShotSource {
  int count = 0;  // 0: none
  // Either rows of another split of the same data: the first `count` in the file's order, of the
  // item's category or of all.
  std::string split;
  bool same_category = false;
  // Or these, each a map of template variables (question, solution, ...).
  std::vector<std::map<std::string, std::string>> fixed;
  // Shots are left out, the last first, until the prompt has fewer tokens than this; 0: never.
  int64_t prompt_tokens = 0;
};

/// Prompt = head + a text for each shot + the question's text. All three are Jinja templates
/// (datasets/jinja.h) over question, options (texts in the order shown), letters (A, B, ...),
/// category, level, gold, solution and id; the head sees the category only. What is not there is an
/// error.
struct PromptForm {
  std::string head;
  std::string shot;
  std::string question;
  ShotSource shots;
};

/// The order in which options are shown.
struct OptionRule {
  enum class Order {
    kFile,         // as the data set has them
    kItem,         // item_option_order: a function of item and seed
    kGpqaAuthors,  // gpqa_shuffled_orders with `seed` (also lm-eval's, and NeMo-Skills' with 42)
    kSimpleEvals,  // gpqa_sampled_orders
  };
  Order order = Order::kFile;
  uint64_t seed = 0;  // of kGpqaAuthors
  int rounds = 1;     // kSimpleEvals: each item is asked so often, each time in another order; from
                      // the second round on its id is "<id>/<round>", from 1
  // "lm_eval_gpqa": options as lm-evaluation-harness cleans them: outer white space off, " [title]"
  // becomes ". ", what stands in brackets on one line goes, two spaces become one.
  std::string clean;
};

/// Whether the prompt becomes a user's turn of the model's chat template.
struct ChatUse {
  bool use = false;
  std::string system;                            // a system turn before it; empty: none
  std::map<std::string, std::string> variables;  // for the template; YAML scalars
};

/// What an answer without an answer counts.
enum class NoAnswer { kWrong, kChance };  // kChance: 1 / number of options, beside the plain figure

/// A resolved task.
struct TaskSpec {
  std::string name;
  int version = 0;  // raised whenever scores change
  std::string about;
  bool private_data = false;  // texts of its items stay out of pages
  ItemSource source;          // path and selection may be set by the experiment
  PromptForm prompt;
  OptionRule options;
  ChatUse chat;
  GenerationLimits generation;
  std::vector<std::string> rules;  // of extraction (datasets/answer_rules.h): the first that finds
                                   // something decides
  std::vector<std::string> compare;  // free answers: equal by any of these (answers_equal)
  NoAnswer no_answer = NoAnswer::kWrong;
  std::filesystem::path file;
  std::string definition;  // the resolved task as YAML, without path and selection of its data
  std::string sha256;      // of `definition`: two runs ask the same task only when it is equal
};

/// Reads a task file strictly; a bare name (no slash, no .yaml) means eval_configs/tasks/NAME.yaml.
/// Throws std::invalid_argument, `file:line:column: key: message`, for unknown keys, wrong values,
/// templates that do not parse or name a variable that is not there, fixed shots with unknown
/// fields, rules that do not exist and unknown names (naming the tasks that are there), and
/// std::runtime_error for a file that cannot be read.
TaskSpec load_task(const std::filesystem::path& file);

/// Recomputes `definition` and `sha256` after a change of the other members.
void update_identity(TaskSpec* task);

/// One question as it is asked.
struct PromptedItem {
  Item item;                      // options and gold in the order shown
  std::vector<int> option_order;  // the data set's option indices in the order shown; may be empty
  std::string gold;               // letter, or the free answer
  std::string prompt;
  size_t shared_bytes = 0;  // leading bytes equal to those of every item of its category that has
                            // as many shots: head and shots
  std::string prompt_sha256;
};

struct PromptSet {
  std::vector<PromptedItem> items;
  std::vector<BadItem> bad;
  std::string data_sha256;
  std::string description;
  std::vector<std::string> warnings;
  bool add_bos = true;  // false: a chat template wrote what stands before the text
};

/// Loads the items of a task and writes their prompts. `seed` is that of option orders by item.
/// `chat` is the model's template, used where the task says so (null: none, which a task that wants
/// one mentions in `warnings`). `tokenizer` counts tokens for ShotSource::prompt_tokens (null: no
/// shot is left out). `warnings` says how many items have the prompt of another. Throws as
/// load_items; std::invalid_argument for shots that are not there, and for a template that uses
/// what an item does not have (file, template, line and name).
PromptSet load_prompts(const TaskSpec& task, uint64_t seed, const ChatTemplate* chat = nullptr,
                       const Tokenizer* tokenizer = nullptr);

struct Grade {
  std::string extracted;  // letter or answer text; empty: none
  std::string rule;       // that extracted it; empty: none did
  int stage = 0;          // of the rule, from 1
  bool correct = false;
};

/// Grades what a model wrote behind the prompt. With think_end only the part behind its last
/// occurrence counts, and nothing does when a thinking section was opened (at the end of the prompt
/// or at the start of the text) and never ended.
Grade grade_answer(const TaskSpec& task, const PromptedItem& item, std::string_view answer_text);

struct TaskListing {
  std::string name;
  int version = 0;
  std::string data;  // data set and split
  std::string about;
  std::filesystem::path file;
};

/// The tasks in a folder, by name; files that are no tasks are errors, as in load_task.
std::vector<TaskListing> list_tasks(const std::filesystem::path& folder = "eval_configs/tasks");

}  // namespace replayeval
