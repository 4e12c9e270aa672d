#include "harness/score.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <map>
#include <set>
#include <stdexcept>

#include "base/hash.h"
#include "datasets/chat_template.h"
#include "datasets/unicode_normalize.h"
#include "harness/metrics.h"
#include "harness/progress.h"
#include "harness/report_command.h"
#include "harness/run_plan.h"
#include "harness/task_results.h"
#include "reports/run_folder.h"

namespace replayeval {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kWorthSharing = 32;  // tokens
constexpr int kMostSlots = 64;         // with slots: 0
constexpr int kMostDeviceSlots = 256;  // likewise on a GPU
constexpr size_t kBlockItems = 8;      // that a process claims together
constexpr double kBatchSeconds = 5;    // finished answers wait at most so long to be stored
constexpr size_t kListed = 8;          // bad items named in one error

/// What the experiment says over the task.
void apply(const DrawSettings& draw, GenerationLimits* limits) {
  if (draw.max_tokens) limits->max_tokens = *draw.max_tokens;
  if (draw.temperature) limits->temperature = *draw.temperature;
  if (draw.top_p) limits->top_p = *draw.top_p;
  if (draw.top_k) limits->top_k = *draw.top_k;
}

TaskSpec requested_task(const TaskRequest& request, const Experiment& experiment) {
  TaskSpec task = load_task(request.task);
  if (!request.path.empty()) task.source.path = request.path;
  if (!request.split.empty()) task.source.split = request.split;
  if (request.level) task.source.level = request.level;
  if (request.items) task.source.items = request.items;
  if (request.per_category) task.source.per_category = request.per_category;
  if (!request.ids.empty()) task.source.ids = request.ids;
  apply(experiment.draw, &task.generation);
  apply(request.draw, &task.generation);
  check_sampling({task.generation.temperature, task.generation.top_k, task.generation.top_p});
  update_identity(&task);
  return task;
}

/// Why the prompt does not come back from its tokens; empty when it does.
std::string round_trip_fault(const Tokenizer& tokenizer, const std::string& text,
                             std::span<const int32_t> tokens, bool* normalized) {
  const std::string back = tokenizer.decode(tokens);
  if (back == text) return {};
  if (normalize_unicode(back, NormalForm::kNfkc) == normalize_unicode(text, NormalForm::kNfkc)) {
    *normalized = true;
    return {};
  }
  const auto [a, b] = std::mismatch(text.begin(), text.end(), back.begin(), back.end());
  const size_t at = static_cast<size_t>(a - text.begin());
  return "the tokenizer does not give its prompt back: they differ from byte " +
         std::to_string(at) + " of " + std::to_string(text.size());
}

std::string count_of(int64_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

void share_prefixes(const std::vector<std::string>& groups, std::vector<Prompt>& prompts) {
  struct Group {
    const Prompt* first = nullptr;
    int64_t common = 0;
    int64_t items = 0;
  };
  std::map<std::string, Group> found;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::vector<int32_t>& tokens = prompts[i].tokens;
    Group& group = found[groups[i]];
    if (group.items++ == 0) {
      group.first = &prompts[i];
      group.common = static_cast<int64_t>(tokens.size());
      continue;
    }
    const std::vector<int32_t>& first = group.first->tokens;
    int64_t common = 0;
    while (common < std::min<int64_t>(group.common, static_cast<int64_t>(tokens.size())) &&
           first[static_cast<size_t>(common)] == tokens[static_cast<size_t>(common)]) {
      ++common;
    }
    group.common = common;
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Group& group = found[groups[i]];
    if (group.items < 2 || group.common < kWorthSharing) continue;
    prompts[i].group = groups[i];
    prompts[i].shared_tokens = group.common;
  }
}

AskedItems load_asked_items(const Experiment& experiment, const Tokenizer& tokenizer,
                            int64_t max_positions) {
  AskedItems asked;
  const std::unique_ptr<ChatTemplate> chat = load_chat_template(experiment.model_folder);
  std::string hashes;
  std::vector<std::string> groups;
  std::vector<Prompt> prompts;
  for (const TaskRequest& request : experiment.tasks) {
    TaskSpec task = requested_task(request, experiment);
    const int index = static_cast<int>(asked.tasks.size());
    for (const TaskSpec& other : asked.tasks) {
      if (other.name == task.name) {
        throw std::invalid_argument("tasks: " + task.name +
                                    ": expected each task once, got it twice; put the second in "
                                    "an experiment of its own");
      }
    }
    if (index == 0) {
      asked.repeats = experiment.repeats.value_or(task.generation.repeats);
    } else if (!experiment.repeats && task.generation.repeats != asked.repeats) {
      throw std::invalid_argument(
          "tasks: " + task.name + ": expected " + count_of(asked.repeats, "repeat") +
          " as the tasks before it, got " + std::to_string(task.generation.repeats) +
          "; set repeats for all");
    }
    const uint64_t seed = experiment.state_options.seed;
    PromptSet set = load_prompts(task, seed, chat.get(), &tokenizer);
    for (const BadItem& bad : set.bad) {
      asked.skipped.push_back("task " + task.name + ", row " + std::to_string(bad.row) +
                              (bad.id.empty() ? "" : " (" + bad.id + ")") + ": " + bad.reason);
    }
    for (const std::string& warning : set.warnings)
      asked.warnings.push_back("task " + task.name + ": " + warning);
    asked.warnings.push_back("task " + task.name + ": " + set.description);
    asked.data += (asked.data.empty() ? "" : ", ") + task.source.path.string();
    hashes += task.name + " " + set.data_sha256 + "\n";
    int64_t normalized = 0, cut = 0;
    for (PromptedItem& item : set.items) {
      const auto bad = [&](const std::string& reason) {
        asked.skipped.push_back("task " + task.name + ", item " + item.item.id + ": " + reason);
      };
      Prompt prompt;
      if (set.add_bos && tokenizer.bos_id()) prompt.tokens.push_back(*tokenizer.bos_id());
      const size_t before = prompt.tokens.size();
      std::vector<int32_t> text = tokenizer.encode(item.prompt);
      prompt.tokens.insert(prompt.tokens.end(), text.begin(), text.end());
      if (prompt.tokens.empty()) {
        bad("its prompt has no token");
        continue;
      }
      bool differs = false;
      const std::string fault =
          round_trip_fault(tokenizer, item.prompt,
                           std::span<const int32_t>(prompt.tokens).subspan(before), &differs);
      if (!fault.empty()) {
        bad(fault);
        continue;
      }
      normalized += differs;
      const int64_t length = static_cast<int64_t>(prompt.tokens.size());
      if (max_positions > 0 && length >= max_positions) {
        bad("its prompt has " + std::to_string(length) + " tokens, the model's context " +
            std::to_string(max_positions));
        continue;
      }
      int64_t max_tokens = task.generation.max_tokens;
      if (max_positions > 0 && max_tokens > max_positions - length) {
        max_tokens = max_positions - length;
        ++cut;
      }
      prompt.opens_thinking = opens_thinking(item.prompt, task.generation.think_end);
      groups.push_back(task.name + "/" + item.item.category + "/" +
                       std::to_string(item.shared_bytes));
      prompts.push_back(std::move(prompt));
      asked.items.push_back({index, std::move(item), nullptr, max_tokens});
    }
    if (normalized > 0) {
      asked.warnings.push_back("task " + task.name +
                               ": the tokenizer changes the Unicode form of " +
                               count_of(normalized, "prompt"));
    }
    if (cut > 0) {
      asked.warnings.push_back("task " + task.name + ": the context of " +
                               std::to_string(max_positions) + " tokens leaves less than " +
                               std::to_string(task.generation.max_tokens) + " for the answers to " +
                               count_of(cut, "item"));
    }
    asked.tasks.push_back(std::move(task));
  }
  if (!asked.skipped.empty() && experiment.on_bad_item == OnBadItem::stop) {
    std::string list;
    for (size_t i = 0; i < std::min(kListed, asked.skipped.size()); ++i)
      list += "\n  " + asked.skipped[i];
    if (asked.skipped.size() > kListed)
      list += "\n  and " + std::to_string(asked.skipped.size() - kListed) + " more";
    throw std::invalid_argument(
        "tasks: " + count_of(static_cast<int64_t>(asked.skipped.size()), "item") +
        " cannot be asked; on_bad_item: skip goes on without them:" + list);
  }
  if (asked.items.empty()) {
    throw std::invalid_argument(
        "tasks: no item is left; " + count_of(static_cast<int64_t>(asked.skipped.size()), "item") +
        " cannot be asked" + (asked.skipped.empty() ? "" : ":\n  " + asked.skipped[0]));
  }
  share_prefixes(groups, prompts);
  for (size_t i = 0; i < prompts.size(); ++i)
    asked.items[i].prompt = std::make_shared<const Prompt>(std::move(prompts[i]));
  asked.data_sha256 = sha256_hex(hashes);
  return asked;
}

namespace {

/// How many answers run side by side, and the memory they may take.
struct SlotPlan {
  RowMemory row;  // at the longest prompt and answer
  int64_t longest = 0;
  int64_t available = 0;
  int64_t cache = 0;  // for key-value caches
  int slots = 0;
};

SlotPlan plan_slots(const Experiment& experiment, const ModelSpec& model, const AskedItems& asked,
                    int states) {
  SlotPlan plan;
  for (const AskedItem& item : asked.items) {
    plan.longest =
        std::max(plan.longest, static_cast<int64_t>(item.prompt->tokens.size()) + item.max_tokens);
  }
  plan.row = row_memory(experiment, model, plan.longest);
  plan.available = available_memory(experiment.device);
  if (experiment.device == Device::cuda) plan.available -= plan.row.weights;
  const int64_t answers = static_cast<int64_t>(asked.items.size()) * asked.repeats * states;
  const int usual = experiment.device == Device::cuda ? kMostDeviceSlots : kMostSlots;
  const int64_t most = std::min<int64_t>(experiment.slots > 0 ? experiment.slots : usual, answers);
  const int64_t budget = plan.available * 9 / 10 - kLogitSliceBytes - 2 * plan.row.chunk;
  const auto left = [&](int64_t slots) {
    return budget - Generator::most_state_rows(static_cast<int>(slots), states) * plan.row.state;
  };
  // Room for one answer and the shared prompts of its class, whatever else has to wait.
  const int64_t least = 3 * plan.row.cache;
  int64_t slots = most;
  while (slots > 1 && left(slots) < (experiment.slots > 0 ? least : slots * plan.row.cache))
    --slots;
  if (left(slots) < least || (experiment.slots > 0 && slots < most)) {
    throw std::runtime_error("score: " + count_of(most, "slot") + " need at least " +
                             std::to_string((plan.available - left(most) + least) >> 20) +
                             " MiB beside the weights, available " +
                             std::to_string(plan.available >> 20) +
                             " MiB; use fewer slots or a smaller max_tokens");
  }
  plan.slots = static_cast<int>(slots);
  plan.cache = left(slots);
  return plan;
}

class ScoreRun {
 public:
  ScoreRun(const Experiment& experiment, const RunOptions& options, const Model& model,
           const Tokenizer& tokenizer, const AskedItems& asked, RunFolder& folder)
      : experiment_(experiment),
        options_(options),
        model_(model),
        tokenizer_(tokenizer),
        asked_(asked),
        folder_(folder) {}

  /// True when every answer of the plan is stored.
  bool run(const SlotPlan& memory);
  const GenerationCounts& counts() const { return counts_; }
  double seconds() const { return seconds_; }
  int64_t non_finite() const { return non_finite_; }

 private:
  /// Items that a process answers together, with the claim that keeps others off.
  struct Block {
    std::optional<Claim> claim;
    int64_t waiting = 0;  // answers not stored yet
  };
  struct Tally {
    int64_t answers = 0;
    int64_t correct = 0;
  };

  void order_blocks();
  bool next_block();
  std::optional<GenerationRequest> next_request();
  void take(GenerationResult&& result);
  void store();
  void show(int state);

  const Experiment& experiment_;
  const RunOptions& options_;
  const Model& model_;
  const Tokenizer& tokenizer_;
  const AskedItems& asked_;
  RunFolder& folder_;
  std::vector<std::vector<int>> blocks_;  // items of each
  size_t next_block_ = 0;
  std::vector<AnswerKey> missing_;                       // ordered
  std::map<size_t, Block> open_;                         // by index into blocks_
  std::deque<std::pair<AnswerKey, size_t>> queue_;       // with the block
  std::vector<std::pair<AnswerKey, size_t>> asked_for_;  // by tag
  std::vector<std::shared_ptr<const StopRule>> stops_;   // by task
  AnswerBatch batch_;
  std::vector<size_t> batch_blocks_;
  Clock::time_point stored_;
  std::vector<Tally> tallies_;
  std::optional<Progress> progress_;
  GenerationCounts counts_;
  double seconds_ = 0;
  int64_t non_finite_ = 0;
};

/// Items that share a prefix follow each other.
void ScoreRun::order_blocks() {
  std::map<std::pair<int, std::string>, std::vector<int>> groups;
  std::vector<std::pair<int, std::string>> order;
  for (size_t i = 0; i < asked_.items.size(); ++i) {
    const std::pair key(asked_.items[i].task, asked_.items[i].prompt->group);
    std::vector<int>& items = groups[key];
    if (items.empty()) order.push_back(key);
    items.push_back(static_cast<int>(i));
  }
  for (const auto& key : order) {
    const std::vector<int>& items = groups[key];
    for (size_t first = 0; first < items.size(); first += kBlockItems) {
      blocks_.emplace_back(
          items.begin() + static_cast<std::ptrdiff_t>(first),
          items.begin() + static_cast<std::ptrdiff_t>(std::min(first + kBlockItems, items.size())));
    }
  }
  // Several processes begin at different places.
  std::rotate(blocks_.begin(),
              blocks_.begin() +
                  static_cast<std::ptrdiff_t>(blocks_.size() * static_cast<size_t>(options_.shard) /
                                              static_cast<size_t>(options_.shards)),
              blocks_.end());
}

/// Puts the missing answers of the next block that no other process holds into the queue.
bool ScoreRun::next_block() {
  for (; next_block_ < blocks_.size(); ++next_block_) {
    const std::vector<int>& items = blocks_[next_block_];
    const auto wanted = [&] {
      std::vector<AnswerKey> keys;
      for (int item : items) {
        const auto [first, last] = std::equal_range(
            missing_.begin(), missing_.end(), AnswerKey{0, item, 0},
            [](const AnswerKey& a, const AnswerKey& b) { return a.item < b.item; });
        keys.insert(keys.end(), first, last);
      }
      return keys;
    };
    if (wanted().empty()) continue;
    std::optional<Claim> claim = folder_.claim("answers-" + std::to_string(items.front()));
    if (!claim) continue;
    if (options_.shards > 1) {
      folder_.refresh();
      missing_ = folder_.missing_answers();
    }
    const std::vector<AnswerKey> keys = wanted();
    if (keys.empty()) continue;
    Block& block = open_[next_block_];
    block.claim = std::move(claim);
    block.waiting = static_cast<int64_t>(keys.size());
    for (const AnswerKey& key : keys) queue_.emplace_back(key, next_block_);
    ++next_block_;
    return true;
  }
  return false;
}

std::optional<GenerationRequest> ScoreRun::next_request() {
  if (queue_.empty() && !next_block()) return std::nullopt;
  const auto [key, block] = queue_.front();
  queue_.pop_front();
  const AskedItem& item = asked_.items[static_cast<size_t>(key.item)];
  const TaskSpec& task = asked_.tasks[static_cast<size_t>(item.task)];
  GenerationRequest request;
  request.tag = static_cast<int64_t>(asked_for_.size());
  asked_for_.emplace_back(key, block);
  request.state = key.state;
  request.prompt = item.prompt;
  request.stream =
      stream_of(task.name + "/" + item.item.item.id + "/" + std::to_string(key.repeat));
  request.sampling = {task.generation.temperature, task.generation.top_k, task.generation.top_p};
  request.stop = stops_[static_cast<size_t>(item.task)];
  request.max_tokens = item.max_tokens;
  return request;
}

void ScoreRun::take(GenerationResult&& result) {
  const auto [key, block] = asked_for_[static_cast<size_t>(result.tag)];
  const AskedItem& item = asked_.items[static_cast<size_t>(key.item)];
  AnswerBatch::Row row;
  row.state = key.state;
  Answer& answer = row.answer;
  answer.item = key.item;
  answer.repeat = key.repeat;
  answer.text = std::move(result.text);
  answer.tokens = static_cast<int64_t>(result.tokens.size());
  answer.finish_reason = name_of(result.finish);
  answer.seconds = result.seconds;
  answer.token_ids = std::move(result.tokens);
  answer.margins = std::move(result.margins);
  grade_into(asked_.tasks[static_cast<size_t>(item.task)], item.item, &answer);
  non_finite_ += result.non_finite;
  Tally& tally = tallies_[static_cast<size_t>(key.state)];
  ++tally.answers;
  tally.correct += answer.correct;
  show(key.state);
  batch_.rows.push_back(std::move(row));
  batch_blocks_.push_back(block);
}

void ScoreRun::show(int state) {
  const Tally& tally = tallies_[static_cast<size_t>(state)];
  char text[64];
  std::snprintf(text, sizeof text, "%.1f %% of %lld",
                100.0 * static_cast<double>(tally.correct) /
                    static_cast<double>(std::max<int64_t>(tally.answers, 1)),
                static_cast<long long>(tally.answers));
  progress_->set_figure(state, text);
}

/// Writes what has ended, and gives up the claims of blocks that are complete.
void ScoreRun::store() {
  const Clock::time_point now = Clock::now();
  if (!batch_.rows.empty()) {
    batch_.seconds = std::chrono::duration<double>(now - stored_).count();
    folder_.put(batch_);
    for (size_t block : batch_blocks_) {
      if (--open_.at(block).waiting == 0) open_.erase(block);
    }
    batch_ = {};
    batch_blocks_.clear();
  }
  stored_ = now;
}

bool ScoreRun::run(const SlotPlan& memory) {
  order_blocks();
  missing_ = folder_.missing_answers();
  std::vector<StatePrecision> states = {experiment_.baseline};
  states.insert(states.end(), experiment_.states.begin(), experiment_.states.end());
  std::vector<std::string> names;
  for (const StatePrecision& state : states) names.push_back(state.name);
  const int64_t total = static_cast<int64_t>(asked_.items.size()) * asked_.repeats *
                        static_cast<int64_t>(states.size());
  const int64_t kept = total - static_cast<int64_t>(missing_.size());
  progress_.emplace(names, total, kept, stderr, is_terminal(stderr), "answers", "correct");
  if (const std::string note = host_codec_note(experiment_); !note.empty()) progress_->note(note);
  tallies_.resize(states.size());
  if (kept > 0) {
    const Report report = folder_.report();
    for (size_t s = 0; s < report.states.size(); ++s) {
      for (const Answer& answer : report.states[s].answers) {
        ++tallies_[s].answers;
        tallies_[s].correct += answer.correct;
      }
      show(static_cast<int>(s));
    }
  }
  for (const TaskSpec& task : asked_.tasks) {
    stops_.push_back(std::make_shared<const StopRule>(
        StopRule{task.generation.stop, task.generation.think_end}));
  }
  GenerationOptions options;
  options.slots = memory.slots;
  options.chunk_tokens = experiment_.chunk_tokens;
  options.decode_prompt = experiment_.decode_prompt;
  options.prefill_chunk = experiment_.prefill_chunk;
  options.seed = experiment_.state_options.seed;
  options.end_tokens = tokenizer_.eos_ids();
  options.cache_bytes = memory.cache;
  options.most_tokens = memory.longest;
  options.compute = experiment_.compute;
  options.kernels = experiment_.kernels;
  bool stopped = false;
  const Clock::time_point start = stored_ = Clock::now();
  if (!missing_.empty()) {
    Generator generator(model_, tokenizer_, std::move(states), experiment_.baseline, options);
    if (!generator.refusal().empty())
      progress_->note("no captured decoding: " + generator.refusal());
    int64_t seen = 0;
    stopped = !generator.run(
        [&] { return next_request(); }, [&](GenerationResult&& result) { take(std::move(result)); },
        [&](const GenerationCounts& counts) {
          const Clock::time_point now = Clock::now();
          if (std::chrono::duration<double>(now - stored_).count() >= kBatchSeconds) store();
          const double seconds = std::chrono::duration<double>(now - start).count();
          progress_->set_stage(
              format_count(static_cast<int64_t>(static_cast<double>(counts.generated) / seconds)) +
              " tokens/s");
          progress_->advance(counts.answers - seen, now);
          seen = counts.answers;
          return !stop_requested();
        });
    counts_ = generator.counts();
  }
  store();
  seconds_ = std::chrono::duration<double>(Clock::now() - start).count();
  open_.clear();
  progress_->finish();
  if (stopped) progress_->note("stopped; finished answers are kept, --resume goes on");
  folder_.refresh();
  return folder_.missing_answers().empty();
}

RunPlan score_plan(const Experiment& experiment, const Model& model, const Tokenizer& tokenizer,
                   const AskedItems& asked) {
  RunPlan plan = common_plan(experiment, model, tokenizer);
  plan.run.data = asked.data;
  plan.run.data_sha256 = asked.data_sha256;
  plan.run.repeats = asked.repeats;
  for (const TaskSpec& task : asked.tasks) plan.run.tasks.push_back(task_info(task));
  for (const AskedItem& item : asked.items)
    plan.items.push_back(item_info(asked.tasks[static_cast<size_t>(item.task)], item.item));
  for (const std::string& line : asked.skipped) plan.run.notes.push_back("not asked: " + line);
  return plan;
}

void print_score_plan(const SlotPlan& plan, const AskedItems& asked, int states) {
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  for (size_t t = 0; t < asked.tasks.size(); ++t) {
    int64_t items = 0, tokens = 0, longest = 0, shared = 0;
    for (const AskedItem& item : asked.items) {
      if (item.task != static_cast<int>(t)) continue;
      const int64_t length = static_cast<int64_t>(item.prompt->tokens.size());
      ++items;
      tokens += length;
      longest = std::max(longest, length);
      shared += item.prompt->shared_tokens;
    }
    const GenerationLimits& limits = asked.tasks[t].generation;
    std::printf(
        "task %-16s %lld items, prompts of %lld tokens (mean %lld, %lld %% of them shared), "
        "answers of up to %lld\n",
        asked.tasks[t].name.c_str(), static_cast<long long>(items), static_cast<long long>(longest),
        static_cast<long long>(tokens / std::max<int64_t>(items, 1)),
        static_cast<long long>(100 * shared / std::max<int64_t>(tokens, 1)),
        static_cast<long long>(limits.max_tokens));
  }
  std::printf("answers              %lld = %zu items x %d states x %d repeats\n",
              static_cast<long long>(asked.items.size()) * states * asked.repeats,
              asked.items.size(), states, asked.repeats);
  std::printf("items not asked      %zu\n", asked.skipped.size());
  std::printf("weights (mapped)     %10.1f MiB\n", mib(plan.row.weights));
  std::printf("KV cache an answer   %10.1f MiB at %lld tokens\n", mib(plan.row.cache),
              static_cast<long long>(plan.longest));
  std::printf("states an answer     %10.1f MiB\n", mib(plan.row.state));
  std::printf("memory available     %s: %d slots", available_text(plan.available).c_str(),
              plan.slots);
  if (plan.available < kUnknownMemory / 2) std::printf(", %.1f MiB for KV caches", mib(plan.cache));
  std::printf("\n");
}

}  // namespace

int run_score(const Experiment& experiment, const RunOptions& options) {
  use_threads(experiment.threads);
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(experiment.tokenizer);
  const Model model(Checkpoint::open(experiment.model_folder,
                                     experiment.compute == ComputeType::bf16 ? WeightType::bf16
                                                                             : WeightType::fp32,
                                     options.dry_run ? WeightAccess::headers : WeightAccess::data),
                    model_options(experiment, options.dry_run));
  if (tokenizer->vocabulary_size() > model.spec().vocabulary) {
    throw std::invalid_argument(experiment.tokenizer.string() +
                                ": tokenizer: " + std::to_string(tokenizer->vocabulary_size()) +
                                " tokens, more than the model's vocabulary of " +
                                std::to_string(model.spec().vocabulary));
  }
  for (const StatePrecision& precision : experiment.states)
    check_selections(precision, model.spec());
  const AskedItems asked = load_asked_items(experiment, *tokenizer, model.spec().max_positions);
  for (const std::string& warning : asked.warnings) std::fprintf(stderr, "%s\n", warning.c_str());
  for (const std::string& line : asked.skipped)
    std::fprintf(stderr, "not asked: %s\n", line.c_str());
  if (!asked.skipped.empty()) {
    std::fprintf(stderr, "%zu items are not asked, %zu are\n", asked.skipped.size(),
                 asked.items.size());
  }
  if (tokenizer->eos_ids().empty()) {
    std::fprintf(stderr,
                 "WARNING: %s names no end token; answers end at stop texts and max_tokens only\n",
                 experiment.tokenizer.string().c_str());
  }
  const int states = static_cast<int>(experiment.states.size()) + 1;
  const SlotPlan memory = plan_slots(experiment, model.spec(), asked, states);
  if (options.dry_run) {
    print_score_plan(memory, asked, states);
    return 0;
  }
  RunFolder folder =
      RunFolder::open(experiment.out, score_plan(experiment, model, *tokenizer, asked),
                      options.resume || options.shards > 1 ? OpenMode::resume : OpenMode::fresh);
  for (const std::string& note : folder.notes()) std::fprintf(stderr, "%s\n", note.c_str());
  ScoreRun run(experiment, options, model, *tokenizer, asked, folder);
  const bool complete = run.run(memory);
  const GenerationCounts& counts = run.counts();
  std::fprintf(stderr,
               "%s answers, %s tokens in %s (%.0f tokens/s) over %d slots; prompts: %s tokens "
               "computed, %s copied\n",
               format_count(counts.answers).c_str(), format_count(counts.generated).c_str(),
               format_duration(run.seconds()).c_str(),
               static_cast<double>(counts.generated) / std::max(run.seconds(), 1e-9), memory.slots,
               format_count(counts.prefilled).c_str(), format_count(counts.copied).c_str());
  if (run.non_finite() > 0) {
    std::fprintf(stderr, "WARNING: %s answers ended where the logits were not finite\n",
                 format_count(run.non_finite()).c_str());
  }
  const std::filesystem::path report = folder.assemble(complete ? utc_now() : std::string());
  std::fprintf(stderr, "%s%s\n", report.string().c_str(), complete ? "" : " (incomplete)");
  ShowOptions show;
  show.runs = {experiment.out.string()};
  std::printf("%s", show_runs(show).c_str());
  return complete || options.shards > 1 ? 0 : 1;
}

}  // namespace replayeval
