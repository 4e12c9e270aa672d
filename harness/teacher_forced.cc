#include "harness/teacher_forced.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "base/hash.h"
#include "harness/build_info.h"
#include "harness/dump_states.h"
#include "harness/metrics.h"
#include "harness/progress.h"
#include "harness/sweep.h"
#include "models/state_store.h"
#include "models/torch_dense.h"
#include "reports/run_folder.h"
#include "reports/state_dump.h"

namespace replayeval {
namespace {

constexpr int64_t kUnitTokens = 1024;
constexpr int kDefaultChunk = 256;
constexpr int64_t kWarningTokens = 1024;  // positions whose mean NLL tells a wrongly loaded model

int chunk_tokens(const Experiment& experiment) {
  return experiment.chunk_tokens > 0 ? experiment.chunk_tokens : kDefaultChunk;
}

int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kib = 0;
  std::string unit;
  while (file >> name >> kib) {
    std::getline(file, unit);
    if (name == "MemAvailable:") return kib * 1024;
  }
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
}

std::string kind_of(const Mixer& mixer) {
  if (std::holds_alternative<Mamba2Spec>(mixer)) return "mamba2";
  if (std::holds_alternative<GdnSpec>(mixer)) return "gdn";
  return {};
}

/// Layers with recurrent state, in block order.
std::vector<LayerInfo> recurrent_layers(const ModelSpec& model) {
  std::vector<LayerInfo> layers;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      if (auto shape = state_shape(branch.mixer, block.layer)) {
        layers.push_back({block.layer, kind_of(branch.mixer), shape->heads, {}});
      }
    }
  }
  return layers;
}

std::string rounding_name(const StateCodec& codec) {
  return codec.rounding == Rounding::stochastic ? "sr" : "rtn";
}

StateInfo state_info(const StatePrecision& precision, const StatePrecision& baseline,
                     const ModelSpec& model) {
  StateInfo info;
  info.name = precision.name;
  info.definition = state_definition(precision, baseline);
  info.sha256 = state_identity(precision, baseline);
  info.recurrence = codec_name({precision.recurrence.format, Rounding::nearest_even});
  info.recurrence_rounding = rounding_name(precision.recurrence);
  if (precision.read) {
    info.read = codec_name({precision.read->format, Rounding::nearest_even});
    info.read_rounding = rounding_name(*precision.read);
  }
  info.window = precision.options.window;
  info.seed = precision.options.seed;
  info.options = {{"gdn_fold", std::string(name_of(precision.options.gdn_fold))},
                  {"flush_output", std::string(name_of(precision.options.flush_output))},
                  {"ring", std::string(name_of(precision.options.ring))},
                  {"ring_u", std::string(name_of(precision.options.ring_u))},
                  {"beta", std::string(name_of(precision.options.beta))},
                  {"dot", std::string(name_of(precision.options.dot))},
                  {"layers", precision.layers.text()},
                  {"heads", precision.heads.text()}};
  int64_t elements = 0;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      const auto shape = state_shape(branch.mixer, block.layer);
      if (!shape) continue;
      elements += shape->state.elements() * shape->heads;
      const RowSpec row{precision, 0, 0, 0};
      info.bytes_per_sequence +=
          static_cast<int64_t>(StateStore(*shape, {&row, 1}, baseline).checkpoint_bytes(0));
    }
  }
  if (elements > 0)
    info.bits_per_element =
        8.0 * static_cast<double>(info.bytes_per_sequence) / static_cast<double>(elements);
  return info;
}

/// Layer or head selections that choose nothing in this model are errors.
void check_selections(const StatePrecision& precision, const ModelSpec& model) {
  if (precision.whole_model()) return;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      const auto shape = state_shape(branch.mixer, block.layer);
      if (!shape || !precision.layers.contains(block.layer)) continue;
      for (int h = 0; h < shape->heads; ++h) {
        if (precision.heads.contains(h)) return;
      }
    }
  }
  std::string known;
  for (const LayerInfo& layer : recurrent_layers(model))
    known += (known.empty() ? "" : ", ") + std::to_string(layer.index);
  throw std::invalid_argument(
      "states: " + precision.name +
      ": the selection holds no layer and head with state; layers with state: " + known);
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
                   const std::vector<Document>& documents, RunFolder& folder,
                   const MemoryPlan& memory)
      : experiment_(experiment),
        options_(options),
        model_(model),
        documents_(documents),
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
  KlSpan take_span(const WorkItem& item, const StateSet& states, int64_t first, int64_t end,
                   std::vector<PositionFigures>& figures, std::vector<StateSpan>& samples);
  void sample_errors(const WorkItem& item, const StateSet& states, int64_t position,
                     std::vector<StateSpan>& samples) const;

  const Experiment& experiment_;
  const RunOptions& options_;
  const Model& model_;
  const std::vector<Document>& documents_;
  RunFolder& folder_;
  MemoryPlan memory_;
  std::vector<StatePrecision> precisions_;  // as the plan's states
  std::optional<Progress> progress_;
  std::vector<std::vector<StoreHealth>> health_;  // [row][layer] at the end of the last span
  std::vector<std::vector<double>> decay_;        // [layer][head] sums at the end of the last span
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
  if (options_.shards > 1 && !items.empty()) {
    std::rotate(items.begin(),
                items.begin() +
                    static_cast<std::ptrdiff_t>(items.size() * static_cast<size_t>(options_.shard) /
                                                static_cast<size_t>(options_.shards)),
                items.end());
  }
  for (const WorkItem& item : items) {
    std::optional<Claim> claim = folder_.claim(item.name);
    if (!claim) continue;
    folder_.refresh();
    if (!run_item(item)) break;
  }
  progress_->finish();
  folder_.refresh();
  return folder_.missing().empty();
}

bool TeacherForcedRun::run_item(const WorkItem& item) {
  const Document& document = documents_[static_cast<size_t>(item.document)];
  const int64_t length = static_cast<int64_t>(document.tokens.size());
  std::vector<RowSpec> rows;
  for (int s : item.states) {
    rows.push_back({precisions_[static_cast<size_t>(s)], document.stream, experiment_.prompt_tokens,
                    experiment_.prefill_chunk});
  }
  StateSet states(model_.spec(), experiment_.compute, rows, experiment_.baseline,
                  experiment_.kernels);
  const int row_count = states.rows();
  health_.assign(static_cast<size_t>(row_count), {});
  for (int r = 0; r < row_count; ++r) {
    for (const StateStore* store : states.stores())
      health_[static_cast<size_t>(r)].push_back(store->health(r));
  }
  decay_.clear();
  if (!experiment_.dump_states.empty()) {
    for (StateStore* store : states.stores()) store->set_trace(experiment_.baseline.options.window);
  }
  std::vector<PositionFigures> figures(static_cast<size_t>(row_count));
  std::vector<StateSpan> samples(static_cast<size_t>(row_count));
  double nll_sum = 0;
  int64_t nll_count = 0;
  for (int64_t first = 0, span_first = 0; first < length;) {
    int64_t end = std::min({length, first + chunk_tokens(experiment_), span_first + kUnitTokens});
    // Flushes fall on multiples of L counted from the first decoded token, so samples do too.
    const int64_t prompt = experiment_.prompt_tokens;
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
      figures[static_cast<size_t>(r)].append(chunk[static_cast<size_t>(r)]);
    for (size_t t = 0;
         t < chunk[0].nll_nats.size() && first + static_cast<int64_t>(t) < kWarningTokens; ++t) {
      if (std::isnan(chunk[0].nll_nats[t])) continue;
      nll_sum += double{chunk[0].nll_nats[t]};
      ++nll_count;
    }
    if (!warned_ && (end >= kWarningTokens || end == length) && nll_count > 0 &&
        nll_sum / static_cast<double>(nll_count) >
            std::log(static_cast<double>(model_.spec().vocabulary)) / 2) {
      warned_ = true;
      char text[240];
      std::snprintf(text, sizeof text,
                    "WARNING: mean NLL of the first %lld tokens of document %s is %.2f nats, above "
                    "ln(vocabulary)/2 = %.2f: is the "
                    "model or the tokenizer loaded wrongly?",
                    static_cast<long long>(nll_count), document.id.c_str(),
                    nll_sum / static_cast<double>(nll_count),
                    std::log(static_cast<double>(model_.spec().vocabulary)) / 2);
      progress_->note(text);
    }
    if (std::binary_search(experiment_.dump_states.begin(), experiment_.dump_states.end(),
                           end - 1)) {
      const std::string name = "document-" + std::to_string(item.document) + "-position-" +
                               std::to_string(end - 1) + ".h5";
      write_state_dump(make_state_dump(model_, states, document.id, end - 1),
                       folder_.path() / "dumps" / name);
    }
    if (const int64_t every = experiment_.state_error_every;
        every > 0 && end > prompt && (end - prompt) % every == 0) {
      sample_errors(item, states, end - 1, samples);
    }
    for (int r = 0; r < row_count; ++r) {
      progress_->observe(item.states[static_cast<size_t>(r)],
                         chunk[static_cast<size_t>(r)].kl_nats);
    }
    progress_->advance(count);
    first = end;
    if (end == length || end == span_first + kUnitTokens) {
      const KlSpan span = take_span(item, states, span_first, end, figures, samples);
      (folder_.put(span) == PutOutcome::written ? written_ : compared_) += 1;
      span_first = end;
    }
    if (stop_requested()) {
      progress_->note("stopped; finished units are kept, --resume goes on");
      return false;
    }
  }
  return true;
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

KlSpan TeacherForcedRun::take_span(const WorkItem& item, const StateSet& states, int64_t first,
                                   int64_t end, std::vector<PositionFigures>& figures,
                                   std::vector<StateSpan>& samples) {
  const Document& document = documents_[static_cast<size_t>(item.document)];
  const auto stores = states.stores();
  KlSpan span;
  span.document = item.document;
  span.first = first;
  span.tokens.assign(document.tokens.begin() + first, document.tokens.begin() + end);
  for (size_t r = 0; r < item.states.size(); ++r) {
    StateSpan state = std::move(samples[r]);
    samples[r] = {};
    state.state = item.states[r];
    state.kl = std::move(figures[r].kl_nats);
    state.nll = std::move(figures[r].nll_nats);
    state.top1 = std::move(figures[r].top1);
    figures[r] = {};
    for (int64_t t = first; t < std::min(end, experiment_.prompt_tokens); ++t) {
      const size_t i = static_cast<size_t>(t - first);
      state.kl[i] = state.nll[i] = std::numeric_limits<float>::quiet_NaN();
      state.top1[i] = kNoTop1;
    }
    for (size_t l = 0; l < stores.size(); ++l) {
      const StoreHealth now = stores[l]->health(static_cast<int>(r));
      state.health.push_back(difference(now, health_[r][l]));
      health_[r][l] = now;
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
        span.decay_sum.push_back(sums[l][h] - (decay_.empty() ? 0.0 : decay_[l][h]));
      }
    }
  }
  decay_ = sums;
  return span;
}

RunPlan make_plan(const Experiment& experiment, const Model& model, const Tokenizer& tokenizer,
                  const LoadedDocuments& loaded) {
  RunPlan plan;
  plan.run.job = experiment.job;
  plan.run.experiment = resolved_text(experiment);
  plan.run.model = experiment.model;
  plan.run.model_sha256 = model.checkpoint().hash();
  plan.run.family = model.spec().family;
  plan.run.tokenizer = experiment.tokenizer.string();
  plan.run.tokenizer_sha256 = tokenizer.sha256();
  plan.run.data = experiment.data.path.string();
  std::string hashes;
  for (const Document& document : loaded.documents)
    hashes += document.id + " " + document.sha256 + "\n";
  plan.run.data_sha256 = sha256_hex(hashes);
  const BuildInfo build = build_info();
  plan.run.revision = build.revision;
  plan.run.compiler = build.compiler;
  plan.run.versions = build.versions;
  plan.run.device = experiment.device;
  plan.run.compute = experiment.compute == ComputeType::fp32 ? "fp32" : "bf16";
  plan.run.dense = experiment.dense == DenseMode::invariant ? "invariant" : "fast";
  plan.run.baseline = experiment.baseline.name;
  plan.run.window = experiment.state_options.window;
  plan.run.seed = experiment.state_options.seed;
  plan.run.vocabulary = model.spec().vocabulary;
  plan.run.prompt_tokens = experiment.prompt_tokens;
  plan.run.threads = omp_get_max_threads();
  plan.run.created = utc_now();
  for (const std::string& note : model.spec().notes)
    plan.run.versions["note " + std::to_string(plan.run.versions.size())] = note;
  for (const ExperimentField& field : experiment_fields(experiment))
    plan.settings.push_back({field.name, field.value});
  plan.settings.push_back({"model sha256", plan.run.model_sha256});
  plan.settings.push_back({"tokenizer sha256", plan.run.tokenizer_sha256});
  for (const Document& document : loaded.documents) {
    plan.documents.push_back({document.id, document.title,
                              static_cast<int64_t>(document.tokens.size()), document.sha256,
                              document.stream});
  }
  plan.layers = recurrent_layers(model.spec());
  plan.states.push_back(state_info(experiment.baseline, experiment.baseline, model.spec()));
  for (const StatePrecision& precision : experiment.states) {
    plan.states.push_back(state_info(precision, experiment.baseline, model.spec()));
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
  std::printf("memory available     %10.1f MiB: %d rows a wave, %d wave%s\n", mib(plan.available),
              plan.rows_per_wave, plan.waves, plan.waves == 1 ? "" : "s");
  std::printf("disk, at most        %10.1f MiB\n", mib(plan.report_bytes));
}

}  // namespace

MemoryPlan plan_memory(const Experiment& experiment, const ModelSpec& model,
                       int64_t longest_document, int documents, int states) {
  MemoryPlan plan;
  auto matrix = [](const WeightView& w) { return w.rows * w.cols * weight_bytes(w.type); };
  int64_t widest = model.hidden;
  plan.weights = matrix(model.embedding);
  if (model.lm_head.weight.data != model.embedding.data)
    plan.weights += matrix(model.lm_head.weight);
  const KvType kv = experiment.compute == ComputeType::bf16 ? KvType::bf16 : KvType::fp32;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      if (const auto shape = state_shape(branch.mixer, block.layer)) {
        plan.state_per_row += shape->heads * shape->state.elements() * int64_t{8};
        plan.state_per_row += int64_t{kMaxWindow + shape->conv_kernel} *
                              (shape->channels + shape->scalars + shape->corrections) * 4;
        widest = std::max<int64_t>(widest, 3 * int64_t{shape->channels});
      }
      if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer)) {
        plan.cache_per_row += static_cast<int64_t>(
            KvCache::bytes_needed(attention->kv_heads, attention->head_dim, kv, longest_document));
        plan.weights += matrix(attention->q.weight) + matrix(attention->k.weight) +
                        matrix(attention->v.weight) + matrix(attention->o.weight);
      } else if (const auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer)) {
        plan.weights += matrix(mamba->in_proj.weight) + matrix(mamba->out_proj.weight);
      } else if (const auto* gdn = std::get_if<GdnSpec>(&branch.mixer)) {
        plan.weights +=
            matrix(gdn->qkv.weight) + matrix(gdn->z.weight) + matrix(gdn->out_proj.weight);
      } else if (const auto* mlp = std::get_if<MlpSpec>(&branch.mixer)) {
        plan.weights += matrix(mlp->up.weight) + matrix(mlp->down.weight) +
                        (mlp->gate ? matrix(mlp->gate->weight) : 0);
        widest = std::max(widest, 2 * mlp->up.weight.rows);
      } else if (const auto* moe = std::get_if<MoeSpec>(&branch.mixer)) {
        for (const MlpSpec& expert : moe->experts) {
          plan.weights += matrix(expert.up.weight) + matrix(expert.down.weight) +
                          (expert.gate ? matrix(expert.gate->weight) : 0);
        }
        widest = std::max(
            widest, int64_t{moe->experts_per_token} * 3 * moe->experts.front().up.weight.rows);
      }
    }
  }
  plan.chunk_per_row = int64_t{chunk_tokens(experiment)} * (widest + 4 * model.hidden) * 4;
  plan.available = available_memory();
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
  const int threads = experiment.threads > 0
                          ? experiment.threads
                          : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  omp_set_num_threads(threads);
  set_torch_threads(threads);

  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(experiment.tokenizer);
  const LoadedDocuments loaded = load_documents(experiment.data, *tokenizer);
  const Model model(Checkpoint::open(experiment.model_folder,
                                     experiment.compute == ComputeType::bf16 ? WeightType::bf16
                                                                             : WeightType::fp32,
                                     options.dry_run ? WeightAccess::headers : WeightAccess::data),
                    {experiment.compute, experiment.dense, experiment.dt_clamp});
  if (tokenizer->vocabulary_size() > model.spec().vocabulary) {
    throw std::invalid_argument(experiment.tokenizer.string() +
                                ": tokenizer: " + std::to_string(tokenizer->vocabulary_size()) +
                                " tokens, more than the model's vocabulary of " +
                                std::to_string(model.spec().vocabulary));
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
      RunFolder::open(experiment.out, make_plan(experiment, model, *tokenizer, loaded),
                      options.resume || options.shards > 1 ? OpenMode::resume : OpenMode::fresh);
  for (const std::string& note : folder.notes()) std::fprintf(stderr, "%s\n", note.c_str());
  const size_t kept = folder.finished().size();
  TeacherForcedRun run(experiment, options, model, loaded.documents, folder, memory);
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
