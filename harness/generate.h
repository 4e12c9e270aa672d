// Free generation: many answers at a time through Model::forward, each a row of one StateSet in its
// own state precision. A fixed number of slots is refilled as answers end; prompts are computed in
// chunks beside the decoding rows, once for all states that compute a prompt alike, and what
// prompts have in common is computed once for all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "datasets/tokenizer.h"
#include "harness/sampling.h"
#include "models/decoder.h"
#include "models/model.h"
#include "models/state_precision.h"
#include "models/state_store.h"

namespace replayeval {

/// Where an answer's text ends, and which part of it is thinking.
struct StopRule {
  std::vector<std::string> stop;  // texts, none empty: the answer ends before the first of them
  std::string think_end;          // "</think>": closes the thinking section; empty: there is none
};

/// The text of an answer while its tokens arrive. Stop texts may begin in one token and end in
/// another. They do not count inside a thinking section, which is open from the start
/// (`opened`: the prompt ends with the opening tag) or from an opening tag that is the first text
/// of the answer; the opening tag of "</x>" is "<x>". The tokenizer must outlive the object.
class AnswerText {
 public:
  AnswerText(const Tokenizer& tokenizer, const StopRule& rule, bool opened);
  /// True once a stop text is complete: text() then ends before it, and nothing may follow.
  bool push(int32_t token);
  /// No token follows: incomplete characters become U+FFFD. True when that completes a stop text.
  bool finish();
  const std::string& text() const { return text_; }

 private:
  enum class Section : uint8_t { undecided, thinking, answer };
  bool append(const std::string& more, bool last);

  StreamingDecoder decoder_;
  StopRule rule_;
  std::string think_start_;
  Section section_ = Section::answer;
  size_t answer_ = 0;   // first byte where stop texts count
  size_t scanned_ = 0;  // bytes that were looked through
  std::string text_;
};

/// Whether the prompt's text ends with the opening tag of `think_end`'s section, white space aside.
bool opens_thinking(const std::string& prompt, const std::string& think_end);

/// A prompt as tokens, bos included. Prompts with the same non-empty `group` have their first
/// `shared_tokens` tokens in common.
struct Prompt {
  std::vector<int32_t> tokens;
  std::string group;
  int64_t shared_tokens = 0;
  bool opens_thinking = false;
};

/// One answer to generate.
struct GenerationRequest {
  int64_t tag = 0;  // for the caller
  int state = 0;    // index into the generator's states
  std::shared_ptr<const Prompt> prompt;
  uint32_t stream = 0;  // stream_of("task/item/repeat")
  Sampling sampling;
  std::shared_ptr<const StopRule> stop;  // null: only end tokens
  int64_t max_tokens = 0;
};

enum class FinishReason : uint8_t { stop, length };
const char* name_of(FinishReason reason);

/// A finished answer. `tokens` includes the end token where one was chosen, and the tokens that
/// complete a stop text; `text` neither.
struct GenerationResult {
  int64_t tag = 0;
  int state = 0;
  std::vector<int32_t> tokens;
  std::vector<float> margins;  // [tokens] largest minus second largest logit, nats
  std::string text;
  FinishReason finish = FinishReason::stop;
  bool non_finite = false;  // ended where every logit was NaN or -inf, as `length`
  double seconds = 0;       // from its admission to a slot
};

struct GenerationOptions {
  int slots = 16;              // answers side by side
  int chunk_tokens = 256;      // prompt tokens in one call, of all rows together
  bool decode_prompt = false;  // the prompt runs in the state's own precision
  int64_t prefill_chunk = 0;   // RowSpec::prefill_chunk
  uint64_t seed = 0;           // of the draws
  std::vector<int32_t> end_tokens;
  int64_t cache_bytes = 0;  // limit for key-value caches; 0: none
  /// On a device: no prompt and its answer is longer. Answers then decode as captured steps
  /// (models/decoder.h) where the states allow it, slots / states of each state side by side; 0:
  /// through Model::forward.
  int64_t most_tokens = 0;
  ComputeType compute = ComputeType::fp32;
  KernelForm kernels = KernelForm::fast;
};

struct GenerationCounts {
  int64_t answers = 0;
  int64_t generated = 0;  // tokens
  int64_t prefilled = 0;  // prompt tokens computed
  int64_t copied = 0;     // prompt tokens taken from another row instead
  int64_t steps = 0;      // calls of Model::forward
  int64_t captured = 0;   // steps of the decoder
  int most_rows = 0;      // answers side by side, at most
};

/// Generates answers. Each one's tokens depend on its request, the options seed, decode_prompt and
/// prefill_chunk alone: with `dense: invariant` bit-equal for any slots, chunk_tokens, order and
/// company.
class Generator {
 public:
  /// `model` and `tokenizer` must outlive the object. Allocates the states of `slots` rows, and of
  /// two more for every group of states that compute prompts alike. Throws std::invalid_argument
  /// for options out of range.
  Generator(const Model& model, const Tokenizer& tokenizer, std::vector<StatePrecision> states,
            const StatePrecision& baseline, GenerationOptions options);
  ~Generator();

  /// The next request, in the order of admission (requests for one prompt should follow each
  /// other); none when there are no more.
  using Supply = std::function<std::optional<GenerationRequest>()>;
  using Sink = std::function<void(GenerationResult&&)>;
  /// Called after each step; false stops the run: unfinished answers are dropped.
  using AfterStep = std::function<bool(const GenerationCounts&)>;

  /// Answers all requests; false when it was stopped. Throws std::invalid_argument for a request
  /// without prompt, state or max_tokens, and std::runtime_error when an answer needs more cache
  /// than cache_bytes by itself.
  bool run(const Supply& supply, const Sink& sink, const AfterStep& after_step = {});

  const GenerationCounts& counts() const { return counts_; }
  const ForwardTimes& times() const { return states_->times(); }
  /// Key-value cache held now.
  int64_t cache_bytes() const {
    return static_cast<int64_t>(states_->cache_bytes()) + (decoder_ ? decoder_->cache_bytes() : 0);
  }
  /// Why answers do not decode as captured steps; empty when they do.
  const std::string& refusal() const { return refusal_; }
  /// Groups of states that compute prompts alike.
  int prompt_classes() const;
  /// Rows of a StateSet that a generator for so many slots and states holds at most.
  static int most_state_rows(int slots, int states) { return slots + 2 * states; }

 private:
  struct Slot;
  struct Shared;
  struct PromptClass;
  struct Piece;

  void make_decoder(const StatePrecision& baseline);
  bool shares_prompts() const;
  void find_classes(const StatePrecision& baseline);
  int64_t cache_needed(int64_t tokens) const;
  int64_t cache_held() const;
  bool any_active() const;
  void restart(const PromptClass& group, Shared& shared,
               const std::shared_ptr<const Prompt>& prompt, int64_t wanted);
  bool fits(int64_t tokens, const std::string& what, const PromptClass* own);
  void look_ahead(const Supply& supply);
  int admit();
  void start_shared();
  std::vector<Piece> next_pieces();
  void step(std::vector<Piece>& pieces, const Sink& sink);
  void choose(const std::vector<int>& rows, const std::vector<int64_t>& at, const Hidden& hidden,
              const Sink& sink);
  bool decode(const Sink& sink);
  void hand_on(int row);
  void take(int row, const Choice& choice, const Sink& sink);

  const Model& model_;
  const Tokenizer& tokenizer_;
  std::vector<StatePrecision> precisions_;
  GenerationOptions options_;
  std::vector<PromptClass> classes_;
  std::vector<int> class_of_state_;
  std::string refusal_;
  std::unique_ptr<Decoder> decoder_;
  int entries_ = 0;  // slots that are rows of states_; the decoder's rows follow
  std::unique_ptr<StateSet> states_;
  std::vector<Slot> slots_;
  std::vector<GenerationRequest> queue_;
  std::vector<float> logits_;  // of a step's rows, kept for the next step
  bool exhausted_ = false;
  GenerationCounts counts_;
};

}  // namespace replayeval
