#include "harness/teacher_forced.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "base/hash.h"
#include "harness/answer_documents.h"
#include "harness/document_snapshot.h"
#include "harness/dump_states.h"
#include "harness/metrics.h"
#include "harness/progress.h"
#include "harness/run_plan.h"
#include "harness/sweep.h"
#include "models/state_store.h"
#include "reports/run_folder.h"
#include "reports/state_dump.h"

namespace replayeval {
namespace {

constexpr int64_t kUnitTokens = 1024;
constexpr int64_t kTrimUnits = 8;  // units between two returns of free memory
constexpr int kDefaultChunk = 256;
constexpr int64_t kWarningTokens = 1024;  // positions whose mean NLL tells a wrongly loaded model

int chunk_tokens(const Experiment& experiment) {
  return experiment.chunk_tokens > 0 ? experiment.chunk_tokens : kDefaultChunk;
}

LayerHealth difference(const StoreHealth& now, const StoreHealth& before) {
  LayerHealth health;
  health.elements = now.encode.elements - before.encode.elements;
  health.non_finite = now.encode.non_finite - before.encode.non_finite;
  health.saturated = now.encode.saturated - before.encode.saturated;
  health.clipped = now.encode.clipped - before.encode.clipped;
  health.vanished = now.encode.vanished - before.encode.vanished;
  if (before.first_non_finite_position < 0) {
    health.first_non_finite_position = now.first_non_finite_position;
    health.first_non_finite_head = now.first_non_finite_head;
  }
  return health;
}

/// Relative Frobenius error of a row's decoded checkpoint against row 0's, NaN unless both have
/// just flushed.
float state_error(const StateStore& store, int row, int head, StateRole role) {
  if (store.pending(row, head) != 0 || store.pending(0, head) != 0)
    return std::numeric_limits<float>::quiet_NaN();
  const size_t size = static_cast<size_t>(store.shape().state.elements());
  std::vector<float> reference(size), state(size);
  store.decode(0, head, StateRole::recurrence, reference.data());
  store.decode(row, head, role, state.data());
  double error = 0, norm = 0;
  for (size_t i = 0; i < size; ++i) {
    const double d = double{state[i]} - double{reference[i]};
    error += d * d;
    norm += double{reference[i]} * double{reference[i]};
  }
  if (norm == 0) return error == 0 ? 0.0f : std::numeric_limits<float>::infinity();
  return static_cast<float>(std::sqrt(error / norm));
}

/// One piece of work: a document under the baseline and some of the states (indices into the plan;
/// 0 is the baseline).
struct WorkItem {
  int document = 0;
  std::vector<int> states;
  std::string name;
};

class TeacherForcedRun {
 public:
  TeacherForcedRun(const Experiment& experiment, const RunOptions& options, const Model& model,
                   const std::vector<Document>& documents, const std::vector<int64_t>& prompts,
                   RunFolder& folder, const MemoryPlan& memory)
      : experiment_(experiment),
        options_(options),
        model_(model),
        documents_(documents),
        prompts_(prompts),
        folder_(folder),
        memory_(memory) {
    precisions_.push_back(experiment.baseline);
    precisions_.insert(precisions_.end(), experiment.states.begin(), experiment.states.end());
  }

  /// True when every unit of the plan is stored.
  bool run();

  int64_t units_written() const { return written_; }
  int64_t units_compared() const { return compared_; }

 private:
  std::vector<WorkItem> work_items() const;
  bool run_item(const WorkItem& item);
  /// The unit that ends at at.position; the next one begins there.
  KlSpan take_span(const WorkItem& item, const StateSet& states, DocumentProgress& at) const;
  std::filesystem::path dump_path(int document, int64_t position) const;
  void note_missing_dumps();
  std::string snapshot_identity(const WorkItem& item) const;
  /// Whether the units before `position` are stored for all states of the item.
  bool stored_before(const WorkItem& item, int64_t position) const;
  bool snapshot_due(int64_t first, int64_t end) const;
  void sample_errors(const WorkItem& item, const StateSet& states, int64_t position,
                     std::vector<StateSpan>& samples) const;

  const Experiment& experiment_;
  const RunOptions& options_;
  const Model& model_;
  const std::vector<Document>& documents_;
  const std::vector<int64_t>& prompts_;  // tokens of each document that are outside the comparison
  RunFolder& folder_;
  MemoryPlan memory_;
  std::vector<StatePrecision> precisions_;  // as the plan's states
  std::optional<Progress> progress_;
  bool warned_ = false;
  int64_t written_ = 0;
  int64_t compared_ = 0;
};

std::vector<WorkItem> TeacherForcedRun::work_items() const {
  std::vector<std::vector<int>> missing(documents_.size());
  for (const Unit& unit : folder_.missing()) {
    std::vector<int>& states = missing[static_cast<size_t>(unit.document)];
    for (int s : unit.states) {
      if (std::find(states.begin(), states.end(), s) == states.end()) states.push_back(s);
    }
  }
  const size_t busy = static_cast<size_t>(
      std::count_if(missing.begin(), missing.end(), [](const auto& m) { return !m.empty(); }));
  std::vector<WorkItem> items;
  for (size_t d = 0; d < missing.size(); ++d) {
    std::vector<int> states = missing[d];
    if (states.empty()) continue;
    std::sort(states.begin(), states.end());
    std::erase(states, 0);
    // With fewer documents than processes, a document's states are split among them; each part
    // computes the FP32 row beside its own.
    size_t parts = busy > 0 && options_.shards > static_cast<int>(busy)
                       ? (static_cast<size_t>(options_.shards) + busy - 1) / busy
                       : 1;
    const size_t per_wave = static_cast<size_t>(std::max(1, memory_.rows_per_wave - 1));
    const size_t split = states.empty() ? 1 : (states.size() + parts - 1) / parts;
    const size_t size = std::max<size_t>(1, std::min(per_wave, split));
    size_t begin = 0;
    do {
      WorkItem item;
      item.document = static_cast<int>(d);
      item.states = {0};
      const size_t end = std::min(states.size(), begin + size);
      item.states.insert(item.states.end(), states.begin() + static_cast<std::ptrdiff_t>(begin),
                         states.begin() + static_cast<std::ptrdiff_t>(end));
      item.name = "document-" + std::to_string(d);
      for (int s : item.states) item.name += "-" + std::to_string(s);
      items.push_back(std::move(item));
      begin = end;
    } while (begin < states.size());
  }
  return items;
}

bool TeacherForcedRun::run() {
  std::vector<WorkItem> items = work_items();
  std::vector<std::string> names;
  for (const StatePrecision& precision : precisions_) names.push_back(precision.name);
  int64_t total = 0;
  for (const WorkItem& item : items)
    total += static_cast<int64_t>(documents_[static_cast<size_t>(item.document)].tokens.size());
  progress_.emplace(names, total, 0, stderr, is_terminal(stderr));
  if (const std::string note = host_codec_note(experiment_); !note.empty()) progress_->note(note);
  if (options_.shards > 1 && !items.empty()) {
    std::rotate(items.begin(),
                items.begin() +
                    static_cast<std::ptrdiff_t>(items.size() * static_cast<size_t>(options_.shard) /
                                                static_cast<size_t>(options_.shards)),
                items.end());
  }
  for (const WorkItem& item : items) {
    std::optional<Claim> claim = folder_.claim(item.name);
    if (!claim) {
      if (const std::optional<std::string> owner = folder_.claimed_by(item.name)) {
        progress_->note("document " + documents_[static_cast<size_t>(item.document)].id +
                        ": left to " + *owner + "; a claim is free after " +
                        std::to_string(static_cast<int>(kStaleSeconds)) + " s without a sign");
      } else {
        progress_->note("document " + documents_[static_cast<size_t>(item.document)].id +
                        ": left to another process");
      }
      continue;
    }
    folder_.refresh();
    if (!run_item(item)) break;
  }
  progress_->finish();
  folder_.refresh();
  const bool complete = folder_.missing().empty();
  if (complete && options_.shards == 1) note_missing_dumps();
  return complete;
}

bool TeacherForcedRun::run_item(const WorkItem& item) {
  const Document& document = documents_[static_cast<size_t>(item.document)];
  const int64_t length = static_cast<int64_t>(document.tokens.size());
  const int64_t prompt = prompts_[static_cast<size_t>(item.document)];
  std::vector<RowSpec> rows;
  for (int s : item.states) {
    rows.push_back(
        {precisions_[static_cast<size_t>(s)], document.stream, prompt, experiment_.prefill_chunk});
  }
  StateSet states(model_, rows, experiment_.baseline, experiment_.kernels);
  states.reserve(length);
  const int row_count = states.rows();
  DocumentProgress at;
  at.figures.resize(static_cast<size_t>(row_count));
  at.samples.resize(static_cast<size_t>(row_count));
  at.health.resize(static_cast<size_t>(row_count));
  for (int r = 0; r < row_count; ++r) {
    for (const StateStore* store : states.stores())
      at.health[static_cast<size_t>(r)].push_back(store->health(r));
  }
  if (!experiment_.dump_states.empty()) {
    for (StateStore* store : states.stores()) store->set_trace(experiment_.baseline.options.window);
  }
  const std::string identity = snapshot_identity(item);
  DocumentProgress stored = at;
  SnapshotOutcome snapshot;
  if (options_.resume) snapshot = load_snapshot(folder_, item.name, identity, stored, states);
  if (snapshot.used && stored_before(item, stored.span_first)) {
    at = std::move(stored);
  } else if (snapshot.used) {
    snapshot.refused = "units before it are missing";
    for (int r = 0; r < row_count; ++r) states.reset(r, rows[static_cast<size_t>(r)]);
  }
  if (!snapshot.refused.empty()) {
    progress_->note("document " + document.id + ": its snapshot is not used (" + snapshot.refused +
                    "); the document is computed from its start");
  }
  if (at.position > 0) {
    progress_->skip(at.position);
    progress_->note("document " + document.id + ": goes on at position " +
                    std::to_string(at.position) + " from a snapshot");
  }
  while (at.position < length) {
    const int64_t first = at.position;
    int64_t end =
        std::min({length, first + chunk_tokens(experiment_), at.span_first + kUnitTokens});
    // Flushes fall on multiples of L counted from the first decoded token, so samples do too.
    if (const int64_t every = experiment_.state_error_every; every > 0 && first >= prompt) {
      end = std::min(end, prompt + ((first - prompt) / every + 1) * every);
    } else if (every > 0) {
      end = std::min(end, prompt);
    }
    for (int64_t position : experiment_.dump_states) {
      if (position >= first) end = std::min(end, position + 1);
    }
    const int count = static_cast<int>(end - first);
    std::vector<int32_t> tokens;
    for (int r = 0; r < row_count; ++r) {
      tokens.insert(tokens.end(), document.tokens.begin() + first, document.tokens.begin() + end);
    }
    std::vector<int32_t> targets(document.tokens.begin() + first + 1,
                                 document.tokens.begin() + std::min(end + 1, length));
    targets.resize(static_cast<size_t>(count), -1);

    const Hidden hidden =
        model_.forward({tokens, std::vector<int>(static_cast<size_t>(row_count), count)}, states);
    const std::vector<PositionFigures> chunk = measure(model_, hidden, row_count, count, targets);

    for (int r = 0; r < row_count; ++r)
      at.figures[static_cast<size_t>(r)].append(chunk[static_cast<size_t>(r)]);
    for (size_t t = 0;
         t < chunk[0].nll_nats.size() && first + static_cast<int64_t>(t) < kWarningTokens; ++t) {
      if (std::isnan(chunk[0].nll_nats[t])) continue;
      at.nll_sum += double{chunk[0].nll_nats[t]};
      ++at.nll_count;
    }
    if (!warned_ && (end >= kWarningTokens || end == length) && at.nll_count > 0 &&
        at.nll_sum / static_cast<double>(at.nll_count) >
            std::log(static_cast<double>(model_.spec().vocabulary)) / 2) {
      warned_ = true;
      char text[240];
      std::snprintf(text, sizeof text,
                    "WARNING: mean NLL of the first %lld tokens of document %s is %.2f nats, above "
                    "ln(vocabulary)/2 = %.2f: is the "
                    "model or the tokenizer loaded wrongly?",
                    static_cast<long long>(at.nll_count), document.id.c_str(),
                    at.nll_sum / static_cast<double>(at.nll_count),
                    std::log(static_cast<double>(model_.spec().vocabulary)) / 2);
      progress_->note(text);
    }
    if (std::binary_search(experiment_.dump_states.begin(), experiment_.dump_states.end(),
                           end - 1)) {
      write_state_dump(make_state_dump(model_, states, document.id, end - 1),
                       dump_path(item.document, end - 1));
    }
    if (const int64_t every = experiment_.state_error_every;
        every > 0 && end > prompt && (end - prompt) % every == 0) {
      sample_errors(item, states, end - 1, at.samples);
    }
    // Positions of the prompt are outside the comparison.
    const auto skipped = static_cast<size_t>(std::clamp<int64_t>(prompt - first, 0, count));
    for (int r = 0; r < row_count; ++r) {
      progress_->observe(item.states[static_cast<size_t>(r)],
                         std::span(chunk[static_cast<size_t>(r)].kl_nats).subspan(skipped));
    }
    progress_->advance(count);
    at.position = end;
    if (end == length || end == at.span_first + kUnitTokens) {
      const KlSpan span = take_span(item, states, at);
      (folder_.put(span) == PutOutcome::written ? written_ : compared_) += 1;
      // The caches' pages settle between the chunks' temporary arrays; without this the gaps stay
      // and memory grows by a quarter more than the caches.
      if (end / kUnitTokens % kTrimUnits == 0) malloc_trim(0);
    }
    const bool stop = stop_requested();
    if (end < length && (stop || snapshot_due(first, end))) {
      save_snapshot(folder_, item.name, identity, at, states);
    }
    if (stop) {
      progress_->note("stopped; everything up to here is kept, --resume goes on");
      return false;
    }
  }
  remove_snapshot(folder_, item.name, at, row_count);
  return true;
}

std::filesystem::path TeacherForcedRun::dump_path(int document, int64_t position) const {
  return folder_.path() / "dumps" /
         ("document-" + std::to_string(document) + "-position-" + std::to_string(position) + ".h5");
}

// A position asked for after its unit was stored, or beyond the text, has no dump.
void TeacherForcedRun::note_missing_dumps() {
  for (size_t d = 0; d < documents_.size(); ++d) {
    std::string positions;
    for (int64_t position : experiment_.dump_states) {
      if (!std::filesystem::exists(dump_path(static_cast<int>(d), position)))
        positions += (positions.empty() ? "" : ", ") + std::to_string(position);
    }
    if (positions.empty()) continue;
    progress_->note(
        "dump_states: document " + documents_[d].id + " of " +
        std::to_string(documents_[d].tokens.size()) + " tokens: no dump of position " + positions +
        ": beyond the text, or computed before it was asked for (use a new run folder)");
  }
}

// What a snapshot belongs to: the states and the text up to its end.
std::string TeacherForcedRun::snapshot_identity(const WorkItem& item) const {
  const Document& document = documents_[static_cast<size_t>(item.document)];
  std::string text = document.id + " " + document.sha256 + "\n";
  for (int s : item.states) {
    text += state_identity(precisions_[static_cast<size_t>(s)], experiment_.baseline) + "\n";
  }
  return text;
}

bool TeacherForcedRun::stored_before(const WorkItem& item, int64_t position) const {
  for (const Unit& unit : folder_.missing()) {
    if (unit.document != item.document || unit.first >= position) continue;
    for (int s : unit.states) {
      if (std::ranges::find(item.states, s) != item.states.end()) return false;
    }
  }
  return true;
}

bool TeacherForcedRun::snapshot_due(int64_t first, int64_t end) const {
  const int64_t every = experiment_.snapshot_tokens;
  return every > 0 && first / every != end / every;
}

void TeacherForcedRun::sample_errors(const WorkItem& item, const StateSet& states, int64_t position,
                                     std::vector<StateSpan>& samples) const {
  const auto stores = states.stores();
  int heads = 0;
  for (const StateStore* store : stores) heads = std::max(heads, store->shape().heads);
  for (size_t r = 0; r < item.states.size(); ++r) {
    const bool separate = precisions_[static_cast<size_t>(item.states[r])].read.has_value();
    StateSpan& span = samples[r];
    span.error_positions.push_back(position);
    const size_t base = span.error.size();
    const size_t block = stores.size() * static_cast<size_t>(heads);
    span.error.resize(base + block, std::numeric_limits<float>::quiet_NaN());
    if (separate) span.error_read.resize(base + block, std::numeric_limits<float>::quiet_NaN());
#pragma omp parallel for schedule(dynamic)
    for (size_t l = 0; l < stores.size(); ++l) {
      for (int h = 0; h < stores[l]->shape().heads; ++h) {
        const size_t at = base + l * static_cast<size_t>(heads) + static_cast<size_t>(h);
        span.error[at] = state_error(*stores[l], static_cast<int>(r), h, StateRole::recurrence);
        if (separate)
          span.error_read[at] = state_error(*stores[l], static_cast<int>(r), h, StateRole::read);
      }
    }
  }
}

KlSpan TeacherForcedRun::take_span(const WorkItem& item, const StateSet& states,
                                   DocumentProgress& at) const {
  const int64_t first = at.span_first;
  const int64_t end = at.position;
  const Document& document = documents_[static_cast<size_t>(item.document)];
  const auto stores = states.stores();
  KlSpan span;
  span.document = item.document;
  span.first = first;
  span.tokens.assign(document.tokens.begin() + first, document.tokens.begin() + end);
  for (size_t r = 0; r < item.states.size(); ++r) {
    StateSpan state = std::move(at.samples[r]);
    at.samples[r] = {};
    state.state = item.states[r];
    state.kl = std::move(at.figures[r].kl_nats);
    state.nll = std::move(at.figures[r].nll_nats);
    state.top1 = std::move(at.figures[r].top1);
    at.figures[r] = {};
    for (int64_t t = first; t < std::min(end, prompts_[static_cast<size_t>(item.document)]); ++t) {
      const size_t i = static_cast<size_t>(t - first);
      state.kl[i] = state.nll[i] = std::numeric_limits<float>::quiet_NaN();
      state.top1[i] = kNoTop1;
    }
    for (size_t l = 0; l < stores.size(); ++l) {
      const StoreHealth now = stores[l]->health(static_cast<int>(r));
      state.health.push_back(difference(now, at.health[r][l]));
      at.health[r][l] = now;
    }
    span.states.push_back(std::move(state));
  }
  const std::vector<std::vector<double>> sums = states.decay_sums();
  int heads = 0;
  for (const StateStore* store : stores) heads = std::max(heads, store->shape().heads);
  for (size_t l = 0; l < sums.size(); ++l) {
    for (size_t h = 0; h < static_cast<size_t>(heads); ++h) {
      if (h >= sums[l].size()) {
        span.decay_sum.push_back(0);
      } else {
        span.decay_sum.push_back(sums[l][h] - (at.decay.empty() ? 0.0 : at.decay[l][h]));
      }
    }
  }
  at.decay = sums;
  at.span_first = end;
  return span;
}

RunPlan make_plan(const Experiment& experiment, const Model& model, const Tokenizer& tokenizer,
                  const LoadedDocuments& loaded, const std::vector<int64_t>& prompts) {
  RunPlan plan = common_plan(experiment, model, tokenizer);
  plan.run.data = experiment.data.path.string();
  std::string hashes;
  for (const Document& document : loaded.documents)
    hashes += document.id + " " + document.sha256 + "\n";
  plan.run.data_sha256 = sha256_hex(hashes);
  plan.run.prompt_tokens = experiment.prompt_tokens;
  for (size_t d = 0; d < loaded.documents.size(); ++d) {
    const Document& document = loaded.documents[d];
    plan.documents.push_back({document.id, document.title,
                              static_cast<int64_t>(document.tokens.size()), document.sha256,
                              document.stream, experiment.data_answers ? prompts[d] : 0});
  }
  plan.unit_tokens = kUnitTokens;
  return plan;
}

void print_memory(const MemoryPlan& plan, int64_t tokens, int documents) {
  auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  std::printf("documents            %d, longest %lld tokens\n", documents,
              static_cast<long long>(tokens));
  std::printf("weights (mapped)     %10.1f MiB\n", mib(plan.weights));
  std::printf("KV cache a row       %10.1f MiB\n", mib(plan.cache_per_row));
  std::printf("states a row, up to  %10.1f MiB\n", mib(plan.state_per_row));
  std::printf("chunk a row          %10.1f MiB\n", mib(plan.chunk_per_row));
  std::printf("memory available     %s: %d rows a wave, %d wave%s\n",
              available_text(plan.available).c_str(), plan.rows_per_wave, plan.waves,
              plan.waves == 1 ? "" : "s");
  std::printf("disk, at most        %10.1f MiB\n", mib(plan.report_bytes));
}

}  // namespace

MemoryPlan plan_memory(const Experiment& experiment, const ModelSpec& model,
                       int64_t longest_document, int documents, int states) {
  MemoryPlan plan;
  const RowMemory row_bytes = row_memory(experiment, model, longest_document);
  plan.weights = row_bytes.weights;
  plan.cache_per_row = row_bytes.cache;
  plan.state_per_row = row_bytes.state;
  plan.chunk_per_row = row_bytes.chunk;
  plan.available = available_memory(experiment.device);
  if (experiment.device == Device::cuda) plan.available -= plan.weights;
  const int64_t row = plan.cache_per_row + plan.state_per_row + plan.chunk_per_row;
  const int64_t logits = kLogitSliceBytes;
  const int64_t budget = plan.available * 9 / 10 - logits;
  plan.rows_per_wave =
      static_cast<int>(std::clamp<int64_t>(budget / std::max<int64_t>(row, 1), 0, states + 1));
  if (plan.rows_per_wave < std::min(2, states + 1)) {
    throw std::runtime_error(
        "run: the FP32 row and one state need " + std::to_string((2 * row + logits) >> 20) +
        " MiB beside the weights, available " + std::to_string(plan.available >> 20) +
        " MiB; use fewer data.tokens or chunk_tokens");
  }
  plan.waves =
      states == 0 ? 1 : (states + plan.rows_per_wave - 2) / std::max(1, plan.rows_per_wave - 1);
  plan.report_bytes = int64_t{documents} * longest_document * (states + 1) * 9 * 2;
  return plan;
}

int run_teacher_forced(const Experiment& requested, const RunOptions& options) {
  Experiment experiment = requested;
  use_threads(experiment.threads);

  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(experiment.tokenizer);
  AnswerDocuments answers;
  if (experiment.data_answers) answers = load_answer_documents(experiment, *tokenizer);
  const LoadedDocuments loaded = experiment.data_answers
                                     ? std::move(answers.loaded)
                                     : load_documents(experiment.data, *tokenizer);
  std::vector<int64_t> prompts = std::move(answers.prompt_tokens);
  prompts.resize(loaded.documents.size(), experiment.prompt_tokens);
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
  if (experiment.data_answers && !options.dry_run &&
      model.checkpoint().hash() != answers.model_sha256) {
    std::fprintf(stderr, "WARNING: the answers of %s were given by another model (%s, here %s)\n",
                 experiment.data.path.string().c_str(), answers.model_sha256.substr(0, 12).c_str(),
                 model.checkpoint().hash().substr(0, 12).c_str());
  }
  for (StatePrecision& precision :
       expand_sweep(experiment.sweep, model.spec(), experiment.state_options)) {
    experiment.states.push_back(std::move(precision));
  }
  for (const StatePrecision& precision : experiment.states)
    check_selections(precision, model.spec());
  int64_t longest = 0;
  for (const Document& document : loaded.documents)
    longest = std::max(longest, static_cast<int64_t>(document.tokens.size()));
  const MemoryPlan memory =
      plan_memory(experiment, model.spec(), longest, static_cast<int>(loaded.documents.size()),
                  static_cast<int>(experiment.states.size()));
  std::fprintf(stderr, "%s\n", loaded.description.c_str());
  if (model.spec().max_positions > 0 && longest > model.spec().max_positions) {
    std::fprintf(
        stderr,
        "WARNING: documents of %lld tokens go beyond max_position_embeddings = %lld of the model\n",
        static_cast<long long>(longest), static_cast<long long>(model.spec().max_positions));
  }
  if (options.dry_run) {
    print_memory(memory, longest, static_cast<int>(loaded.documents.size()));
    return 0;
  }
  RunFolder folder =
      RunFolder::open(experiment.out, make_plan(experiment, model, *tokenizer, loaded, prompts),
                      options.resume || options.shards > 1 ? OpenMode::resume : OpenMode::fresh);
  for (const std::string& note : folder.notes()) std::fprintf(stderr, "%s\n", note.c_str());
  const size_t kept = folder.finished().size();
  TeacherForcedRun run(experiment, options, model, loaded.documents, prompts, folder, memory);
  const bool complete = run.run();
  if (options.resume) {
    std::fprintf(stderr,
                 "units: %zu kept from before (%lld of them recomputed and equal), %lld written\n",
                 kept, static_cast<long long>(run.units_compared()),
                 static_cast<long long>(run.units_written()));
  }
  const std::filesystem::path report = folder.assemble(complete ? utc_now() : std::string());
  std::fprintf(stderr, "%s%s\n", report.string().c_str(), complete ? "" : " (incomplete)");
  return complete || options.shards > 1 ? 0 : 1;
}

}  // namespace replayeval
