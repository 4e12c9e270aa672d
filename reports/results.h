// What a run has to say, as plain structs: who ran what, which documents, layers and states, and
// the figures of one finished unit of work. Nothing here knows how they were computed or how they
// are stored (DESIGN.md section 6).
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace replayeval {

/// Value of `top1` where there is nothing to compare.
constexpr uint8_t kNoTop1 = 255;

/// A task whose items were asked. `sha256` is of `definition`, the resolved text of the task file:
/// two runs answer the same task only when it is equal.
struct TaskInfo {
  std::string name;
  int version = 0;
  std::string sha256;
  std::string definition;
  bool private_data = false;     // no text of its items may appear on a page
  bool chance_for_none = false;  // a second figure counts no answer as 1 / options

  bool operator==(const TaskInfo&) const = default;
};

/// Where a result comes from. Paths are as the request spelled them; hashes are lower-case
/// hexadecimal SHA-256; times are UTC, "2026-11-29T18:51:07Z".
struct RunInfo {
  std::string job = "kl";
  std::string experiment;  // the resolved YAML text
  std::string model, model_sha256, family;
  std::string tokenizer, tokenizer_sha256;
  std::string data, data_sha256;
  std::string revision, compiler;               // of this program's build
  std::map<std::string, std::string> versions;  // library -> version
  std::string device, compute, dense;
  std::string baseline = "fp32";  // name of the state that the others are compared with
  int window = 16;
  uint64_t seed = 0;
  int64_t vocabulary = 0;
  int64_t prompt_tokens = 0;  // positions before it are outside the comparison
  int threads = 0;
  std::vector<TaskInfo> tasks;     // of graded answers; empty in a kl run
  int repeats = 1;                 // answers of a state to an item
  std::vector<std::string> notes;  // what a reader should know of the model and the data
  std::string created, finished;
};

/// `sha256` is of the document's bytes before tokenization; `stream` as stream_of(id); `tokens`
/// counts bos. A document made of a stored answer is called "task/item/repeat"; its first
/// `prompt_tokens` tokens are the prompt, which is outside the comparison like
/// RunInfo::prompt_tokens of every document.
struct DocumentInfo {
  std::string id;
  std::string title;
  int64_t tokens = 0;
  std::string sha256;
  uint32_t stream = 0;
  int64_t prompt_tokens = 0;
};

/// A layer with recurrent state. `mean_decay` [heads] is filled from what the spans measured
/// (KlSpan::decay_sum); it may be empty before.
struct LayerInfo {
  int index = 0;  // in the checkpoint
  std::string kind;
  int heads = 0;
  std::vector<float> mean_decay;
};

/// A state precision. `sha256` is the hash of the whole `definition` and is the state's identity:
/// two runs may only be put side by side under one name when it is equal.
struct StateInfo {
  std::string name;
  std::string definition;
  std::string sha256;
  std::string recurrence, read;  // format names; `read` is empty when the checkpoint is shared
  std::string recurrence_rounding, read_rounding;  // rtn | sr
  int window = 16;
  uint64_t seed = 0;
  std::map<std::string, std::string> options;
  double bits_per_element = 0;     // of both checkpoints together, scales included
  int64_t bytes_per_sequence = 0;  // of both checkpoints of every layer, rings not included
};

/// What happened while one layer's state was encoded. `first_non_finite_position` is absolute, -1
/// for never; `first_non_finite_head` is the lowest head at that position.
struct LayerHealth {
  uint64_t elements = 0;
  uint64_t non_finite = 0;
  uint64_t saturated = 0;
  uint64_t clipped = 0;
  uint64_t vanished = 0;
  int64_t first_non_finite_position = -1;
  int32_t first_non_finite_head = -1;

  void merge(const LayerHealth& other);
  bool operator==(const LayerHealth&) const = default;
};

/// Figures of one state over the positions of a span. For the baseline `kl` is 0 and `top1` 1.
///   kl, nll [count]  nats; NaN in `kl` means non-finite logits; `nll` is NaN at the document's
///   last position top1 [count]     1 both argmax equal, 0 not, kNoTop1 no value error [samples,
///   layers, heads]  relative Frobenius error of the recurrence checkpoint against the baseline's;
///   heads is
///                    the largest head count of any layer, NaN beyond a layer's own; `error_read`
///                    likewise of the read checkpoint, empty when shared
///   health [layers]  counts of this span alone
struct StateSpan {
  int state = 0;  // index into RunPlan::states
  std::vector<float> kl, nll;
  std::vector<uint8_t> top1;
  std::vector<int64_t> error_positions;  // [samples], absolute
  std::vector<float> error, error_read;
  std::vector<LayerHealth> health;
};

/// One finished unit of work: positions first .. first + count - 1 of a document, count =
/// tokens.size(), for some or all of the states. Positions before RunInfo::prompt_tokens hold NaN
/// and kNoTop1.
struct KlSpan {
  int document = 0;  // index into RunPlan::documents
  int64_t first = 0;
  std::vector<int32_t> tokens;
  std::vector<StateSpan> states;
  std::vector<double> decay_sum;  // [layers, heads] sum of the decay factors over the positions;
                                  // empty: not measured
  double seconds = 0;             // time spent; never compared

  int64_t count() const { return static_cast<int64_t>(tokens.size()); }
};

/// A graded question. `grading` names the rule that decides; `options` is the number of choices, 0
/// for a free answer; `option_order` holds the data set's indices in the order shown.
struct ItemInfo {
  std::string id;
  std::string task;
  std::string category;
  int level = 0;  // 0: none
  std::string gold;
  int options = 0;
  std::vector<int32_t> option_order;
  std::string prompt_sha256;
  std::string grading;

  bool operator==(const ItemInfo&) const = default;
};

/// One answer of one state. `token_ids` are the generated tokens, as many as `tokens` (the end
/// token among them when it was generated), or none when they are not known (answers from
/// elsewhere). `margins` [tokens] is the largest minus the second largest logit where each token
/// was chosen, in nats; none when not known.
struct Answer {
  int32_t item = 0;    // index into Report::items
  int32_t repeat = 0;  // 0 .. repeats - 1
  std::string text;
  int64_t tokens = 0;         // -1: not known
  std::string finish_reason;  // stop | length; empty: not known
  std::string extracted;      // empty: no answer found
  std::string rule;           // which extraction rule matched
  int stage = 0;              // of that rule
  bool correct = false;
  double seconds = 0;  // time spent; never compared
  std::vector<int32_t> token_ids = {};
  std::vector<float> margins = {};
};

/// Finished answers, any of the run's items, states and repeats.
struct AnswerBatch {
  struct Row {
    int state = 0;  // index into RunPlan::states
    Answer answer;  // its item is an index into RunPlan::items
  };
  std::vector<Row> rows;
  double seconds = 0;  // time spent on all; never compared
};

/// One answer of a run.
struct AnswerKey {
  int state = 0;  // index into RunPlan::states
  int item = 0;   // index into RunPlan::items
  int repeat = 0;

  auto operator<=>(const AnswerKey&) const = default;
};

/// One state over one document as it is reported: [0, length) are the positions measured without a
/// gap from the start; values before `first_position` mean nothing. nll has a value at position t
/// only when the document has a token t + 1.
struct StateDocument {
  int64_t first_position = 0;
  int64_t length = 0;
  std::vector<float> kl, nll;
  std::vector<uint8_t> top1;
  std::vector<int64_t> error_positions;
  std::vector<float> error, error_read;
  std::vector<LayerHealth> health;  // [layers]
};

struct StateReport {
  StateInfo info;
  std::vector<StateDocument> documents;
  std::vector<Answer> answers = {};

  /// Counts of all documents together, [layers].
  std::vector<LayerHealth> health() const;
};

/// A whole report in memory. `token_ids[d]` holds as many ids as any state has measured of document
/// d.
struct Report {
  RunInfo run;
  std::vector<DocumentInfo> documents;
  std::vector<std::vector<int32_t>> token_ids;
  std::vector<LayerInfo> layers;
  std::vector<StateReport> states;
  std::vector<ItemInfo> items;
  std::string path;  // where it was read from, for messages

  /// Index of the state called `name`, -1 when there is none.
  int find_state(const std::string& name) const;
  int baseline() const { return find_state(run.baseline); }
};

}  // namespace replayeval
