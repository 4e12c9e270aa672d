#include "harness/generate.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>

#include "harness/metrics.h"

namespace replayeval {
namespace {

using Clock = std::chrono::steady_clock;

std::string opening_tag(const std::string& think_end) {
  if (!think_end.starts_with("</")) return {};
  return "<" + think_end.substr(2);
}

/// Rows that take prompts for a decoder: one for every state, and a few more.
int entry_rows(size_t states) { return static_cast<int>(std::max<size_t>(states, 8)); }

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// Text
// ---------------------------------------------------------------------------------------------------------------

bool opens_thinking(const std::string& prompt, const std::string& think_end) {
  const std::string tag = opening_tag(think_end);
  size_t end = prompt.size();
  while (end > 0 && is_space(prompt[end - 1])) --end;
  return !tag.empty() && std::string_view(prompt).substr(0, end).ends_with(tag);
}

AnswerText::AnswerText(const Tokenizer& tokenizer, const StopRule& rule, bool opened)
    : decoder_(tokenizer), rule_(rule), think_start_(opening_tag(rule.think_end)) {
  for (const std::string& stop : rule_.stop) {
    if (stop.empty()) throw std::invalid_argument("stop: expected texts, got an empty one");
  }
  if (!rule_.think_end.empty()) {
    section_ = opened                 ? Section::thinking
               : think_start_.empty() ? Section::answer
                                      : Section::undecided;
  }
}

bool AnswerText::push(int32_t token) { return append(decoder_.push(token), false); }

bool AnswerText::finish() { return append(decoder_.finish(), true); }

bool AnswerText::append(const std::string& more, bool last) {
  text_ += more;
  if (section_ == Section::undecided) {
    size_t first = 0;
    while (first < text_.size() && is_space(text_[first])) ++first;
    const std::string_view start = std::string_view(text_).substr(first, think_start_.size());
    if (start == think_start_) {
      section_ = Section::thinking;
    } else if (last || !std::string_view(think_start_).starts_with(start)) {
      section_ = Section::answer;
    } else {
      return false;
    }
  }
  // A text that ends after what was looked through may begin up to its length before that.
  const auto find = [&](const std::string& wanted) {
    const size_t from = scanned_ < wanted.size() ? 0 : scanned_ - wanted.size() + 1;
    return text_.find(wanted, std::max(from, answer_));
  };
  if (section_ == Section::thinking) {
    const size_t at = find(rule_.think_end);
    if (at == std::string::npos) {
      scanned_ = text_.size();
      return false;
    }
    section_ = Section::answer;
    answer_ = at + rule_.think_end.size();
  }
  size_t end = std::string::npos;
  for (const std::string& stop : rule_.stop) end = std::min(end, find(stop));
  scanned_ = text_.size();
  if (end == std::string::npos) return false;
  text_.resize(end);
  return true;
}

const char* name_of(FinishReason reason) {
  return reason == FinishReason::stop ? "stop" : "length";
}

// ---------------------------------------------------------------------------------------------------------------
// Rows
// ---------------------------------------------------------------------------------------------------------------

/// A row that answers: tokens of the prompt, then its own ones, go through it. With a decoder a row
/// of the StateSet takes the prompt and the first choice, the decoder's row that was set aside for
/// it the rest.
struct Generator::Slot {
  bool active = false;
  int decoder_row = -1;
  GenerationRequest request;
  GenerationResult result;
  std::optional<AnswerText> text;
  int64_t fed = 0;       // prompt tokens that went through
  int64_t reserved = 0;  // tokens of key-value cache
  Clock::time_point admitted;
};

/// A row that computes tokens for others to copy: the first `wanted` ones of a prompt.
struct Generator::Shared {
  int row = 0;
  std::shared_ptr<const Prompt> prompt;  // null: holds nothing
  int64_t wanted = 0;
  int64_t done = 0;
  bool ready() const { return prompt && done == wanted; }
};

struct Generator::PromptClass {
  int state = 0;  // of those that compute prompts alike, the one whose precision the rows have
  Shared prefix;  // what prompts of a group have in common
  Shared whole;   // a prompt but for its last token, which every row takes itself
};

/// Tokens of one row in a call.
struct Generator::Piece {
  int row = 0;
  const int32_t* tokens = nullptr;
  int count = 0;
  bool chooses = false;  // a token is chosen after the last one
};

Generator::~Generator() = default;

Generator::Generator(const Model& model, const Tokenizer& tokenizer,
                     std::vector<StatePrecision> states, const StatePrecision& baseline,
                     GenerationOptions options)
    : model_(model),
      tokenizer_(tokenizer),
      precisions_(std::move(states)),
      options_(std::move(options)) {
  if (precisions_.empty()) throw std::invalid_argument("generate: expected at least one state");
  if (options_.decode_prompt && options_.prefill_chunk > 0) {
    throw std::invalid_argument(
        "generate: prefill_chunk holds for a prompt with FP32 state; expected no decode_prompt");
  }
  if (options_.slots < 1 || options_.chunk_tokens < 1 || options_.prefill_chunk < 0) {
    throw std::invalid_argument(
        "generate: expected slots and chunk_tokens of at least 1 and prefill_chunk of at least 0, "
        "got " +
        std::to_string(options_.slots) + ", " + std::to_string(options_.chunk_tokens) + " and " +
        std::to_string(options_.prefill_chunk));
  }
  class_of_state_.assign(precisions_.size(), 0);
  if (shares_prompts()) find_classes(baseline);
  make_decoder(baseline);
  entries_ = decoder_ ? std::min(decoder_->rows(), entry_rows(precisions_.size())) : options_.slots;
  std::vector<RowSpec> rows(static_cast<size_t>(entries_), RowSpec{precisions_[0], 0, 0, 0});
  for (PromptClass& c : classes_) {
    c.prefix.row = static_cast<int>(rows.size());
    c.whole.row = c.prefix.row + 1;
    rows.insert(rows.end(), 2, RowSpec{precisions_[static_cast<size_t>(c.state)], 0, 1, 0});
  }
  states_ = std::make_unique<StateSet>(model_, std::move(rows), baseline, options_.kernels);
}

/// The caches of rows that hold prompts come out of the same limit.
void Generator::make_decoder(const StatePrecision& baseline) {
  if (!model_.backend().on_device() || options_.most_tokens == 0) return;
  DecoderOptions wanted;
  wanted.states = precisions_;
  wanted.baseline = baseline;
  wanted.form = options_.kernels;
  wanted.rows_per_state = std::max(1, options_.slots / static_cast<int>(precisions_.size()));
  wanted.most_positions = options_.most_tokens;
  wanted.cache_positions =
      options_.most_tokens * wanted.rows_per_state * static_cast<int64_t>(precisions_.size());
  if (options_.cache_bytes > 0 && cache_needed(1) > 0) {
    const int64_t prompts =
        entry_rows(precisions_.size()) + 2 * static_cast<int64_t>(classes_.size());
    const int64_t left = options_.cache_bytes - prompts * cache_needed(options_.most_tokens);
    const double positions = static_cast<double>(left) * static_cast<double>(options_.most_tokens) /
                             static_cast<double>(cache_needed(options_.most_tokens));
    if (positions < static_cast<double>(options_.most_tokens)) {
      refusal_ = "the caches of prompts and one answer do not fit";
      return;
    }
    wanted.cache_positions = std::min(wanted.cache_positions, static_cast<int64_t>(positions));
  }
  if (const auto reason = Decoder::refusal(model_, wanted)) {
    refusal_ = *reason;
    return;
  }
  try {
    decoder_ = std::make_unique<Decoder>(model_, std::move(wanted));
  } catch (const std::invalid_argument& error) {  // a format that the step's kernels refuse
    refusal_ = error.what();
  }
}

int Generator::prompt_classes() const { return static_cast<int>(classes_.size()); }

/// A prompt that is encoded on the way draws random bits of its own answer.
bool Generator::shares_prompts() const {
  return !options_.decode_prompt && options_.prefill_chunk == 0;
}

void Generator::find_classes(const StatePrecision& baseline) {
  StateSet pair(model_, std::vector<RowSpec>(2, RowSpec{precisions_[0], 0, 1, 0}), baseline,
                options_.kernels);
  for (size_t s = 0; s < precisions_.size(); ++s) {
    pair.reset(1, {precisions_[s], 0, 1, 0});
    size_t c = 0;
    for (; c < classes_.size(); ++c) {
      pair.reset(0, {precisions_[static_cast<size_t>(classes_[c].state)], 0, 1, 0});
      if (pair.same_prompt(0, 1)) break;
    }
    if (c == classes_.size()) classes_.push_back({static_cast<int>(s), {}, {}});
    class_of_state_[s] = static_cast<int>(c);
  }
}

int64_t Generator::cache_needed(int64_t tokens) const {
  const KvType type = options_.compute == ComputeType::bf16 ? KvType::bf16 : KvType::fp32;
  int64_t bytes = 0;
  for (const Block& block : model_.spec().blocks) {
    for (const Branch& branch : block.branches) {
      if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer)) {
        bytes += static_cast<int64_t>(
            KvCache::bytes_needed(attention->kv_heads, attention->head_dim, type, tokens));
      }
    }
  }
  return bytes;
}

int64_t Generator::cache_held() const {
  int64_t held = 0;
  for (const Slot& slot : slots_) held += slot.active ? cache_needed(slot.reserved) : 0;
  for (const PromptClass& c : classes_) {
    held += c.prefix.prompt ? cache_needed(c.prefix.wanted) : 0;
    held += c.whole.prompt ? cache_needed(c.whole.wanted) : 0;
  }
  return held;
}

bool Generator::any_active() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.active; });
}

/// Empties a shared row, or gives it a prompt of whose tokens it is to hold the first `wanted`.
void Generator::restart(const PromptClass& group, Shared& shared,
                        const std::shared_ptr<const Prompt>& prompt, int64_t wanted) {
  // The row stays inside its prompt: the last of `wanted` tokens must not end it.
  states_->reset(shared.row, {precisions_[static_cast<size_t>(group.state)], 0, wanted + 1, 0});
  shared.prompt = prompt;
  shared.wanted = wanted;
  shared.done = 0;
}

/// Whether `tokens` more of cache fit beside what is held. Where nothing under way would make room
/// by ending, prompts of other classes than `own` are given up for it; throws when that does not
/// help.
bool Generator::fits(int64_t tokens, const std::string& what, const PromptClass* own) {
  if (options_.cache_bytes == 0 || decoder_) return true;
  const int64_t needed = cache_needed(tokens);
  if (cache_held() + needed <= options_.cache_bytes) return true;
  if (any_active()) return false;
  for (PromptClass& group : classes_) {
    if (&group == own) continue;
    for (Shared* shared : {&group.prefix, &group.whole}) {
      if (shared->prompt) restart(group, *shared, nullptr, 0);
    }
  }
  if (cache_held() + needed <= options_.cache_bytes) return true;
  throw std::runtime_error(
      "generate: " + what + " of " + std::to_string(tokens) + " tokens needs " +
      std::to_string(needed >> 10) + " KiB of key-value cache beside " +
      std::to_string(cache_held() >> 10) + " KiB held for its prompt, available " +
      std::to_string(options_.cache_bytes >> 10) + " KiB; use a smaller max_tokens");
}

// ---------------------------------------------------------------------------------------------------------------
// Schedule
// ---------------------------------------------------------------------------------------------------------------

/// Requests are known some way ahead, so that prompts are ready when a slot falls free.
void Generator::look_ahead(const Supply& supply) {
  while (!exhausted_ && queue_.size() <= precisions_.size()) {
    std::optional<GenerationRequest> request = supply();
    if (!request) {
      exhausted_ = true;
      return;
    }
    if (!request->prompt || request->prompt->tokens.empty() || request->max_tokens < 1 ||
        request->state < 0 || request->state >= static_cast<int>(precisions_.size())) {
      throw std::invalid_argument("generate: request " + std::to_string(request->tag) +
                                  ": expected a prompt of at least one token, a state below " +
                                  std::to_string(precisions_.size()) +
                                  " and max_tokens of at least 1");
    }
    queue_.push_back(std::move(*request));
  }
}

/// Moves requests whose prompts are ready into free slots, in order; returns how many.
int Generator::admit() {
  int admitted = 0;
  for (size_t r = 0; r < static_cast<size_t>(entries_) && !queue_.empty(); ++r) {
    Slot& slot = slots_[r];
    if (slot.active) continue;
    const GenerationRequest& request = queue_.front();
    const int64_t prompt = static_cast<int64_t>(request.prompt->tokens.size());
    PromptClass* group = nullptr;
    if (shares_prompts()) {
      group = &classes_[static_cast<size_t>(class_of_state_[static_cast<size_t>(request.state)])];
      if (!group->whole.ready() || group->whole.prompt != request.prompt) break;
    }
    const int64_t reserved = prompt + request.max_tokens;
    if (!fits(reserved, "an answer", group)) break;
    const int decoder_row = decoder_ ? decoder_->reserve(request.state, reserved) : -1;
    if (decoder_ && decoder_row < 0) break;
    const int row = static_cast<int>(r);
    states_->reset(row, {precisions_[static_cast<size_t>(request.state)], request.stream,
                         options_.decode_prompt ? 0 : prompt, options_.prefill_chunk});
    slot = Slot{};
    slot.decoder_row = decoder_row;
    if (group != nullptr && group->whole.done > 0) {
      states_->copy_prompt(group->whole.row, row);
      slot.fed = group->whole.done;
      counts_.copied += slot.fed;
    }
    slot.active = true;
    slot.reserved = reserved;
    slot.result.tag = request.tag;
    slot.result.state = request.state;
    slot.text.emplace(tokenizer_, request.stop ? *request.stop : StopRule{},
                      request.prompt->opens_thinking);
    slot.admitted = Clock::now();
    slot.request = std::move(queue_.front());
    queue_.erase(queue_.begin());
    ++admitted;
  }
  counts_.most_rows = std::max(
      counts_.most_rows, static_cast<int>(std::count_if(slots_.begin(), slots_.end(),
                                                        [](const Slot& s) { return s.active; })));
  return admitted;
}

/// Gives each class's shared rows the next prompt that a waiting request needs, once the one they
/// hold is needed no more.
void Generator::start_shared() {
  for (size_t c = 0; c < classes_.size(); ++c) {
    PromptClass& group = classes_[c];
    const auto next = std::find_if(queue_.begin(), queue_.end(), [&](const GenerationRequest& r) {
      return class_of_state_[static_cast<size_t>(r.state)] == static_cast<int>(c);
    });
    if (next == queue_.end()) {
      if (!exhausted_) continue;
      if (group.whole.prompt) restart(group, group.whole, nullptr, 0);
      if (group.prefix.prompt) restart(group, group.prefix, nullptr, 0);
      continue;
    }
    const std::shared_ptr<const Prompt>& prompt = next->prompt;
    if (group.whole.prompt == prompt) continue;
    if (group.whole.prompt) restart(group, group.whole, nullptr, 0);
    const int64_t wanted = static_cast<int64_t>(prompt->tokens.size()) - 1;
    const int64_t common = prompt->group.empty() ? 0 : std::min(prompt->shared_tokens, wanted);
    Shared& prefix = group.prefix;
    if (common > 0) {
      // What is held may be longer than this one prompt but for its last token.
      if (!prefix.prompt || prefix.prompt->group != prompt->group || prefix.wanted > common) {
        if (prefix.prompt) restart(group, prefix, nullptr, 0);
        if (!fits(common, "the common part of prompts", &group)) continue;
        restart(group, prefix, prompt, common);
      }
      if (!prefix.ready()) continue;
    }
    if (!fits(wanted, "a prompt", &group)) continue;
    restart(group, group.whole, prompt, wanted);
    if (common > 0) {
      states_->copy_prompt(prefix.row, group.whole.row);
      group.whole.done = prefix.done;
      counts_.copied += prefix.done;
    }
  }
}

/// One token of every decoding row, and up to chunk_tokens tokens of prompts.
std::vector<Generator::Piece> Generator::next_pieces() {
  std::vector<Piece> pieces;
  int64_t budget = options_.chunk_tokens;
  for (size_t r = 0; r < static_cast<size_t>(entries_); ++r) {
    const Slot& slot = slots_[r];
    if (!slot.active) continue;
    const std::vector<int32_t>& prompt = slot.request.prompt->tokens;
    const int64_t left = static_cast<int64_t>(prompt.size()) - slot.fed;
    const int row = static_cast<int>(r);
    if (left == 0) {
      pieces.push_back({row, &slot.result.tokens.back(), 1, true});
    } else if (left == 1) {
      pieces.push_back({row, &prompt.back(), 1, true});
    } else if (budget > 0) {
      const int64_t count = std::min(left, budget);
      budget -= count;
      pieces.push_back({row, prompt.data() + slot.fed, static_cast<int>(count), count == left});
    }
  }
  for (const PromptClass& group : classes_) {
    for (const Shared* shared : {&group.prefix, &group.whole}) {
      const int64_t count = std::min(shared->wanted - shared->done, budget);
      if (!shared->prompt || count <= 0) continue;
      budget -= count;
      pieces.push_back({shared->row, shared->prompt->tokens.data() + shared->done,
                        static_cast<int>(count), false});
    }
  }
  return pieces;
}

void Generator::step(std::vector<Piece>& pieces, const Sink& sink) {
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.row < b.row; });
  std::vector<int32_t> tokens;
  std::vector<int> lengths(static_cast<size_t>(states_->rows()), 0);
  std::vector<int> rows;
  std::vector<int64_t> at;  // index of the hidden state that a row chooses from
  for (const Piece& piece : pieces) {
    tokens.insert(tokens.end(), piece.tokens, piece.tokens + piece.count);
    lengths[static_cast<size_t>(piece.row)] = piece.count;
    if (!piece.chooses) continue;
    rows.push_back(piece.row);
    at.push_back(static_cast<int64_t>(tokens.size()) - 1);
  }
  const Hidden hidden = model_.forward({tokens, lengths}, *states_);
  ++counts_.steps;
  for (const Piece& piece : pieces) {
    if (piece.row >= entries_) {
      for (PromptClass& group : classes_) {
        for (Shared* shared : {&group.prefix, &group.whole}) {
          if (shared->row == piece.row) shared->done += piece.count;
        }
      }
      counts_.prefilled += piece.count;
      continue;
    }
    Slot& slot = slots_[static_cast<size_t>(piece.row)];
    if (slot.fed == static_cast<int64_t>(slot.request.prompt->tokens.size())) continue;
    slot.fed += piece.count;
    counts_.prefilled += piece.count;
  }
  choose(rows, at, hidden, sink);
}

void Generator::choose(const std::vector<int>& rows, const std::vector<int64_t>& at,
                       const Hidden& hidden, const Sink& sink) {
  const int64_t vocabulary = model_.spec().vocabulary;
  const int64_t count = static_cast<int64_t>(rows.size());
  const int64_t slice =
      std::clamp<int64_t>(kLogitSliceBytes / (vocabulary * static_cast<int64_t>(sizeof(float))), 1,
                          std::max<int64_t>(count, 1));
  const auto values = static_cast<size_t>(std::min(slice, count) * vocabulary);
  if (logits_.size() < values) logits_.resize(values);
  std::vector<Choice> choices(rows.size());
  for (int64_t first = 0; first < count; first += slice) {
    const int64_t part = std::min(slice, count - first);
    const Hidden chosen =
        hidden.select(std::span(at).subspan(static_cast<size_t>(first), static_cast<size_t>(part)));
    model_.lm_head(chosen, 0, part, logits_.data());
#pragma omp parallel for schedule(dynamic, 1) if (part > 1)
    for (int64_t i = 0; i < part; ++i) {
      const int row = rows[static_cast<size_t>(first + i)];
      const GenerationRequest& request = slots_[static_cast<size_t>(row)].request;
      const DrawKey key{options_.seed, request.stream, states_->position(row)};
      choices[static_cast<size_t>(first + i)] =
          choose_token({logits_.data() + i * vocabulary, static_cast<size_t>(vocabulary)},
                       request.sampling, key);
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) take(rows[i], choices[i], sink);
}

void Generator::take(int row, const Choice& choice, const Sink& sink) {
  Slot& slot = slots_[static_cast<size_t>(row)];
  GenerationResult& result = slot.result;
  bool ended = false;
  if (choice.token < 0) {
    result.non_finite = ended = true;
    result.finish = FinishReason::length;
  } else {
    result.tokens.push_back(choice.token);
    result.margins.push_back(choice.margin);
    ++counts_.generated;
    if (std::find(options_.end_tokens.begin(), options_.end_tokens.end(), choice.token) !=
        options_.end_tokens.end()) {
      ended = true;
    } else if (slot.text->push(choice.token)) {
      ended = true;
      slot.active = false;  // the text is complete
    } else if (static_cast<int64_t>(result.tokens.size()) == slot.request.max_tokens) {
      ended = true;
      result.finish = FinishReason::length;
    }
  }
  if (!ended) {
    if (decoder_ && row < entries_) hand_on(row);
    return;
  }
  if (slot.active && slot.text->finish()) result.finish = FinishReason::stop;
  slot.active = false;
  result.text = slot.text->text();
  result.seconds = std::chrono::duration<double>(Clock::now() - slot.admitted).count();
  ++counts_.answers;
  if (row < entries_) states_->reset(row, {precisions_[0], 0, 0, 0});  // gives its cache back
  if (decoder_) decoder_->release(slot.decoder_row);
  GenerationResult finished = std::move(result);
  slot = Slot{};
  sink(std::move(finished));
}

/// The row's answer goes on in the decoder.
void Generator::hand_on(int row) {
  Slot& slot = slots_[static_cast<size_t>(row)];
  decoder_->admit(slot.decoder_row, *states_, row);
  states_->reset(row, {precisions_[0], 0, 0, 0});
  slots_[static_cast<size_t>(entries_ + slot.decoder_row)] = std::move(slot);
  slot = Slot{};
}

/// A token of every answer in the decoder; false when there is none.
bool Generator::decode(const Sink& sink) {
  if (!decoder_) return false;
  std::vector<int32_t> tokens(static_cast<size_t>(decoder_->rows()), 0);
  std::vector<int> rows;
  for (int r = 0; r < decoder_->rows(); ++r) {
    const Slot& slot = slots_[static_cast<size_t>(entries_ + r)];
    if (!slot.active) continue;
    tokens[static_cast<size_t>(r)] = slot.result.tokens.back();
    rows.push_back(r);
  }
  if (rows.empty()) return false;
  const std::span<const Decoder::Choice> greedy = decoder_->step(tokens);
  ++counts_.captured;
  const auto vocabulary = static_cast<size_t>(model_.spec().vocabulary);
  for (int r : rows) {
    const GenerationRequest& request = slots_[static_cast<size_t>(entries_ + r)].request;
    Choice choice{greedy[static_cast<size_t>(r)].token, greedy[static_cast<size_t>(r)].margin};
    if (!request.sampling.greedy()) {
      if (logits_.size() < vocabulary) logits_.resize(vocabulary);
      decoder_->logits(r, logits_.data());
      const DrawKey key{options_.seed, request.stream, decoder_->position(r)};
      choice = choose_token({logits_.data(), vocabulary}, request.sampling, key);
    }
    take(entries_ + r, choice, sink);
  }
  return true;
}

bool Generator::run(const Supply& supply, const Sink& sink, const AfterStep& after_step) {
  exhausted_ = false;
  queue_.clear();
  slots_.clear();
  slots_.resize(static_cast<size_t>(entries_ + (decoder_ ? decoder_->rows() : 0)));
  for (int r = 0; decoder_ && r < decoder_->rows(); ++r) decoder_->release(r);
  for (;;) {
    do {
      look_ahead(supply);
      start_shared();
    } while (admit() > 0);
    std::vector<Piece> pieces = next_pieces();
    if (!pieces.empty()) step(pieces, sink);
    if (!decode(sink) && pieces.empty()) {
      if (!any_active() && queue_.empty() && exhausted_) return true;
      throw std::logic_error("generate: no row can advance");
    }
    if (after_step && !after_step(counts_)) return false;
  }
}

}  // namespace replayeval
