#include "harness/bench.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "datasets/token_stream.h"
#include "harness/bench_traffic.h"
#include "harness/metrics.h"
#include "kernels/attention.h"
#include "kernels/mamba2_timing.h"
#include "models/state_store.h"
#include "models/torch_dense.h"
#include "quant/codec.h"
#include "quant/cuda_support.h"
#include "quant/format_file.h"
#include "quant/random.h"

namespace replayeval {
namespace {

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Shortest of several timings after one warm-up; repeated until `budget` seconds are spent.
double best_seconds(const std::function<void()>& work, double budget = 0.6, int least = 3) {
  work();
  double best = INFINITY, spent = 0;
  for (int i = 0; i < least || spent < budget; ++i) {
    const double t = seconds_of(work);
    best = std::min(best, t);
    spent += t;
    if (i > 200) break;
  }
  return best;
}

/// Reproducible values, close to normal (sum of four uniform ones), standard deviation 1.
std::vector<float> random_values(size_t count, uint32_t seed) {
  std::vector<float> values(count);
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + 1;
  auto uniform = [&] {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<float>(x >> 40) * 0x1p-24f - 0.5f;
  };
  for (float& v : values) v = (uniform() + uniform() + uniform() + uniform()) * 1.7320508f;
  return values;
}

/// A float of the table as a list of its values, which stochastic rounding and encoding treat as
/// any code book.
std::string value_list(const FloatFormat& number) {
  std::vector<float> values;
  for (uint32_t code = 0; code < (1u << (1 + number.exponent_bits + number.mantissa_bits));
       ++code) {
    const float value = decode_float(number, code);
    if (std::isfinite(value)) values.push_back(value);
  }
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  std::string text = "[";
  char digits[40];
  for (const float value : values) {
    std::snprintf(digits, sizeof digits, "%s%.9g", text.size() > 1 ? ", " : "",
                  static_cast<double>(value));
    text += digits;
  }
  return text + "]";
}

void print_formats() {
  // One direction: bytes copied a second, 64 MiB, one thread.
  constexpr size_t kBytes = size_t{64} << 20;
  std::vector<char> source(kBytes, 1), target(kBytes);
  const double copy = static_cast<double>(kBytes) /
                      best_seconds([&] { std::memcpy(target.data(), source.data(), kBytes); });
  std::printf(
      "Codec: FP32 bytes read (encode) or written (decode) a second over bytes copied a second by "
      "memcpy (%.1f GB/s), one thread\n",
      copy * 1e-9);
  std::printf("%-16s %10s %12s %12s %12s\n", "format", "bits/elt", "encode rtn", "encode sr",
              "decode");
  const StateShape shape{64, 128};
  constexpr int kHeads = 256;
  const size_t elements = static_cast<size_t>(shape.elements());
  const std::vector<float> states = random_values(elements * kHeads, 1);
  std::vector<float> decoded(elements);
  std::vector<std::pair<std::string, std::shared_ptr<const StateFormat>>> formats;
  for (const BuiltinFormat& builtin : builtin_formats())
    formats.emplace_back(builtin.name, find_format(builtin.name));
  // The same values and scales as nvfp4 and fp8, as code books: what a format from a file costs
  // beside a built-in one.
  formats.emplace_back(
      "nvfp4, 15 values",
      parse_format("element: {values: " + value_list(find_format("nvfp4")->descriptor.number) +
                       "}\nscale: {format: e4m3, block: 16}\nouter: {span: head}\n",
                   "bench", "."));
  formats.emplace_back(
      "fp8, 253 values",
      parse_format("element: {values: " + value_list(find_format("fp8")->descriptor.number) +
                       "}\nouter: {span: row}\n",
                   "bench", "."));
  for (const auto& [name, format] : formats) {
    const size_t packed = packed_bytes(*format, shape);
    std::vector<std::byte> codes(packed * kHeads), memory(memory_bytes(*format, shape) + 1);
    EncodeHealth health;
    auto encode = [&](Rounding rounding) {
      for (int h = 0; h < kHeads; ++h) {
        const float* state = states.data() + static_cast<size_t>(h) * elements;
        const RandomKey key{1, 2, 3, static_cast<uint32_t>(h), 4, StateRole::recurrence};
        encode_head({format, rounding}, shape, state, key, 4.0f,
                    codes.data() + static_cast<size_t>(h) * packed, memory.data(), &health);
      }
    };
    const double bytes = static_cast<double>(elements) * kHeads * sizeof(float);
    const double rtn = bytes / best_seconds([&] { encode(Rounding::nearest_even); }, 0.2) / copy;
    const double sr = bytes / best_seconds([&] { encode(Rounding::stochastic); }, 0.2) / copy;
    const double read =
        bytes /
        best_seconds(
            [&] {
              for (int h = 0; h < kHeads; ++h) {
                decode_head(*format, shape, codes.data() + static_cast<size_t>(h) * packed,
                            decoded.data());
              }
            },
            0.2) /
        copy;
    std::printf("%-16s %10.4g %11.0f%% %11.0f%% %11.0f%%\n", name.c_str(),
                8.0 * static_cast<double>(packed) / static_cast<double>(elements), 100 * rtn,
                100 * sr, 100 * read);
  }
  std::printf("\n");
}

/// Operations a second of LibTorch's FP32 product, its best at 512^3: the yardstick of every rate
/// here.
double sgemm_rate() {
  constexpr int64_t n = 512;
  const std::vector<float> a = random_values(n * n, 3), b = random_values(n * n, 4);
  std::vector<float> c(n * n);
  const WeightView w{b.data(), WeightType::fp32, n, n, n};
  return 2.0 * n * n * n /
         best_seconds([&] { torch_linear(a.data(), n, n, w, nullptr, c.data(), n, false); });
}

double attention_rate(int64_t context, int heads, int kv_heads, int head_dim, int64_t chunk) {
  KvCache cache(kv_heads, head_dim, KvType::fp32);
  const int64_t kv_width = int64_t{kv_heads} * head_dim, width = int64_t{heads} * head_dim;
  const std::vector<float> k = random_values(static_cast<size_t>(context * kv_width), 5);
  const std::vector<float> v = random_values(k.size(), 6);
  const std::vector<float> q = random_values(static_cast<size_t>(chunk * width), 7);
  std::vector<float> out(q.size());
  cache.append(k.data(), kv_width, v.data(), kv_width, context);
  const int64_t position = context - chunk;
  const AttentionRow row{&cache, position, chunk, q.data(), width, out.data(), width};
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  double keys = 0;
  for (int64_t t = 0; t < chunk; ++t) keys += static_cast<double>(position + t + 1);
  return 4.0 * head_dim * heads * keys / best_seconds([&] {
           attention({&row, 1}, heads, static_cast<float>(scale));
         });
}

Mamba2Workload scan_workload(int window, int tokens_per_call, const char* format) {
  Mamba2Workload work;
  work.layer.heads = 8;
  work.layer.groups = 1;
  work.layer.head_dim = 64;
  work.layer.state_dim = 128;
  work.rows = 8;
  work.tokens = 256;
  work.tokens_per_call = tokens_per_call;
  work.plan.recurrence = {find_format(format), Rounding::nearest_even};
  work.plan.window = window;
  return work;
}

void print_kernels() {
  const double sgemm = sgemm_rate();
  std::printf(
      "Kernels: operations a second over LibTorch's SGEMM at 512^3 (%.0f GFLOP/s here, now)\n",
      sgemm * 1e-9);
  struct Shape {
    const char* what;
    int64_t m, n, k;
  };
  for (const Shape& s : {Shape{"product 512 x 512 x 512", 512, 512, 512},
                         Shape{"in_proj of mini-mamba2, 8 rows x 256", 2048, 1288, 256},
                         Shape{"MLP up of mini-mamba2, 8 rows x 256", 2048, 768, 256},
                         Shape{"MLP down, 8 rows x 256", 2048, 256, 768},
                         Shape{"LM head of mini-mamba2, 512 positions", 512, 4096, 256},
                         Shape{"product 512 x 2560 x 2560", 512, 2560, 2560},
                         Shape{"one token, 2560 x 2560", 1, 2560, 2560}}) {
    const std::vector<float> x = random_values(static_cast<size_t>(s.m * s.k), 8),
                             w = random_values(static_cast<size_t>(s.n * s.k), 9);
    std::vector<float> y(static_cast<size_t>(s.m * s.n));
    const WeightView view{w.data(), WeightType::fp32, s.n, s.k, s.k};
    const double operations =
        2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
    const double ours = operations / best_seconds([&] {
                          linear(x.data(), s.m, s.k, view, nullptr, y.data(), s.n);
                        });
    const double theirs = operations / best_seconds([&] {
                            torch_linear(x.data(), s.m, s.k, view, nullptr, y.data(), s.n, false);
                          });
    std::printf("  %-40s invariant %4.0f%%   LibTorch at this shape %4.0f%%\n", s.what,
                100 * ours / sgemm, 100 * theirs / sgemm);
  }
  for (const auto& [context, dim] : {std::pair<int64_t, int>{4096, 64}, {8192, 64}, {8192, 128}}) {
    std::printf("  attention, 4 heads of %-3d at %-5lld            %4.0f%%   (causal operations)\n",
                dim, static_cast<long long>(context),
                100 * attention_rate(context, 4, 2, dim, 512) / sgemm);
  }
  const KernelTiming window = time_mamba2(scan_workload(16, 256, "fp32"));
  const KernelTiming single = time_mamba2(scan_workload(16, 1, "fp32"));
  const KernelTiming eager = time_mamba2(scan_workload(1, 256, "fp32"));
  std::printf(
      "  Mamba-2 scan, FP32 rows, L = 16               %4.0f%%   (operations of the window form)\n",
      100 * window.operations / window.seconds / sgemm);
  std::printf("  ... over one token a call                     %4.1f x tokens/s\n",
              single.seconds / window.seconds);
  std::printf("  ... over L = 1                                %4.1f x tokens/s\n\n",
              eager.seconds / window.seconds);
}

struct JobTimes {
  ForwardTimes forward;
  double head = 0;     // LM head products
  double metrics = 0;  // KL, NLL, top-1
  double total = 0;

  double dense() const { return forward.products + forward.attention + head; }
};

struct JobBytes {
  double weights = 0, cache = 0, states = 0, chunk = 0;
  double all() const { return weights + cache + states + chunk; }
};

/// The states of a job and the time of its work so far.
class TimedJob {
 public:
  TimedJob(const Model& model, const Document& document, const std::vector<std::string>& names)
      : model_(model), document_(document) {
    StateOptions defaults;
    defaults.seed = 1;
    const StatePrecision baseline = parse_state_precision("fp32", defaults);
    rows_.push_back({baseline, document.stream, 0, 0});
    for (const std::string& name : names)
      rows_.push_back({parse_state_precision(name, defaults), document.stream, 0, 0});
    states_.emplace(model, rows_, baseline, KernelForm::fast);
  }

  void reserve(int64_t tokens) { states_->reserve(tokens); }

  /// The document's next `count` tokens, with their metrics.
  void step(int count) {
    times_.total += seconds_of([&] {
      const auto begin = document_.tokens.begin() + states_->position(0);
      std::vector<int32_t> batch, targets(static_cast<size_t>(count), -1);
      for (size_t r = 0; r < rows_.size(); ++r) batch.insert(batch.end(), begin, begin + count);
      const Hidden hidden =
          model_.forward({batch, std::vector<int>(rows_.size(), count)}, *states_);
      MeasureTimes measured;
      measure(model_, hidden, static_cast<int>(rows_.size()), count, targets, kLogitSliceBytes,
              &measured);
      times_.head += measured.head;
      times_.metrics += measured.metrics;
    });
  }

  /// Begins the document again; times go on.
  void restart() {
    for (size_t r = 0; r < rows_.size(); ++r) states_->reset(static_cast<int>(r), rows_[r]);
  }

  int64_t position() const { return states_->position(0); }
  /// What weights (BF16), caches, states with their rings and the arrays of a chunk need.
  JobBytes bytes(int chunk) const {
    const ModelSpec& spec = model_.spec();
    JobBytes bytes;
    const double embedding = static_cast<double>(spec.vocabulary) * spec.hidden;
    const bool tied = spec.lm_head.weight.data == spec.embedding.data;
    bytes.weights = 2 * (product_operations(spec) / 2 + embedding * (tied ? 1 : 2));
    bytes.cache = static_cast<double>(states_->cache_bytes());
    const double rows = static_cast<double>(rows_.size()), tokens = rows * chunk;
    double widest = 0;
    for (const Block& block : spec.blocks) {
      for (const Branch& branch : block.branches) {
        if (const auto shape = state_shape(branch.mixer, block.layer)) {
          const double record = shape->channels + shape->scalars + shape->corrections;
          bytes.states += 4 * rows * (kMaxWindow * record + shape->conv_kernel * shape->channels);
          // Inputs, their convolution and records, with the projection that they came from.
          widest = std::max(widest, 2.0 * shape->channels + record);
        }
        if (const auto* mlp = std::get_if<MlpSpec>(&branch.mixer))
          widest = std::max(widest, 2.0 * static_cast<double>(mlp->up.weight.rows));
      }
    }
    for (int r = 0; r < states_->rows(); ++r)
      bytes.states += static_cast<double>(states_->checkpoint_bytes(r));
    bytes.chunk = 4 * tokens * (widest + 3 * spec.hidden);
    return bytes;
  }
  JobTimes times() const {
    JobTimes times = times_;
    times.forward = states_->times();
    return times;
  }

 private:
  const Model& model_;
  const Document& document_;
  std::vector<RowSpec> rows_;
  std::optional<StateSet> states_;
  JobTimes times_;
};

JobTimes time_job(const Model& model, const Document& document,
                  const std::vector<std::string>& names, int64_t tokens, int chunk) {
  TimedJob job(model, document, names);
  job.reserve(tokens);
  while (job.position() < tokens)
    job.step(static_cast<int>(std::min<int64_t>(chunk, tokens - job.position())));
  return job.times();
}

/// Attention's operations over `tokens` tokens from the start: two products of 2 head_dim a query
/// and visible key.
double attention_operations(const ModelSpec& model, int64_t tokens) {
  double operations = 0;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      if (const auto* a = std::get_if<AttentionSpec>(&branch.mixer)) {
        operations += 2.0 * a->head_dim * a->heads * static_cast<double>(tokens) *
                      static_cast<double>(tokens + 1);
      }
    }
  }
  return operations;
}

Document load_document(const BenchOptions& options, int64_t tokens) {
  const auto tokenizer = load_tokenizer(options.model);
  DataSource source;
  source.kind = std::filesystem::exists(options.data / "metadata.csv") ? DataSource::Kind::kPg19
                                                                       : DataSource::Kind::kText;
  source.path = options.data;
  source.documents = 1;
  source.join = true;
  source.documents.reset();
  source.tokens = tokens;
  return load_documents(source, *tokenizer).documents.at(0);
}

void print_share(const char* what, double seconds, double total) {
  std::printf("  %-44s %5.1f%%\n", what, 100 * seconds / total);
}

void print_job(const BenchOptions& options) {
  const Model model(Checkpoint::open(options.model), {});
  std::vector<std::string> names = options.states;
  if (names.empty())
    names = {"fp32@L=1",     "fp16+sr",    "fp8+sr",       "nvfp4+sr",
             "nvfp4+sr@L=1", "fp32/nvfp4", "fp16+sr/nvfp4"};
  const Document document = load_document(options, options.tokens);
  const auto eager = [](const std::string& name) {
    return parse_state_precision(name, {}).options.window == 1;
  };
  std::vector<std::string> windowed;
  for (const std::string& name : names) {
    if (!eager(name)) windowed.push_back(name);
  }
  const JobTimes all = time_job(model, document, names, options.tokens, 256);
  std::printf("Job: %lld tokens of %s, %zu states and the FP32 row: %.0f tokens/s\n",
              static_cast<long long>(options.tokens), options.data.string().c_str(), names.size(),
              static_cast<double>(options.tokens) / all.total);
  const JobTimes times = windowed.size() == names.size()
                             ? all
                             : time_job(model, document, windowed, options.tokens, 256);
  std::printf("Shares without the L = 1 rows (%zu states):\n", windowed.size());
  print_share("matrix products and LM head", times.forward.products + times.head, times.total);
  print_share("attention", times.forward.attention, times.total);
  print_share("state replay with encoding", times.forward.state, times.total);
  print_share("convolution", times.forward.convolution, times.total);
  print_share("KL, NLL, top-1", times.metrics, times.total);
  print_share("norms, activations, copies", times.forward.other, times.total);
  print_share("everything but products and attention", times.total - times.dense(), times.total);
  if (windowed.size() != names.size()) {
    std::printf("  the L = 1 rows' states take %.1f x the time of the other rows' states\n",
                (all.forward.state - times.forward.state) / times.forward.state);
  }
  std::printf("\n");
}

// The machine's own speed changes over such a run. So a second job goes beside the first, chunk by
// chunk in turn, that starts again every 4,096 tokens: both see the same machine, and a ratio of
// the two over the same number of tokens is the growth.
void print_growth(const BenchOptions& options) {
  constexpr int64_t kShort = 4096;
  constexpr int kChunk = 256;
  if (options.longest < kShort || options.longest % kShort != 0) {
    throw std::invalid_argument("bench: --longest: expected a multiple of " +
                                std::to_string(kShort) + ", got " +
                                std::to_string(options.longest));
  }
  const Model model(Checkpoint::open(options.model), {});
  const Document document = load_document(options, options.longest);
  std::printf(
      "Growth: the FP32 row of one long text, beside texts of 4,096 tokens in turn with it; the "
      "last "
      "column counts operations from the shapes\n");
  std::printf("%10s %26s %30s\n", "tokens", "time without attention",
              "attention rate, operations/s");
  TimedJob(model, document, {}).step(kChunk);  // reads the weights, starts the threads
  TimedJob whole(model, document, {}), parts(model, document, {});
  const double short_operations = attention_operations(model.spec(), kShort);
  int64_t next = kShort;
  while (whole.position() < options.longest) {
    if (parts.position() == kShort) parts.restart();
    whole.step(kChunk);
    parts.step(kChunk);
    if (whole.position() != next && whole.position() != options.longest) continue;
    next = whole.position();
    const JobTimes w = whole.times(), p = parts.times();
    const double rest = (w.total - w.forward.attention) / (p.total - p.forward.attention);
    const double rate = attention_operations(model.spec(), next) / w.forward.attention;
    const double short_rate =
        short_operations * static_cast<double>(next / kShort) / p.forward.attention;
    std::printf("%10lld %18.3f x a token %22.3f x that of 4,096\n", static_cast<long long>(next),
                rest, rate / short_rate);
    std::fflush(stdout);
    next *= 2;
  }
  std::printf("\n");
}

/// Tokens of no text, for models without a tokenizer.
Document random_document(int vocabulary, int64_t tokens) {
  Document document;
  document.id = "random";
  std::mt19937 random(1);
  std::uniform_int_distribution<int32_t> any(0, vocabulary - 1);
  for (int64_t t = 0; t < tokens; ++t) document.tokens.push_back(any(random));
  return document;
}

}  // namespace

int run_device_job_bench(const BenchOptions& options) {
  constexpr int kChunk = 1024;
  constexpr int64_t kSingle = 2048;  // tokens in the middle that go one at a time
  if (options.tokens < 2 * kChunk) {
    throw std::invalid_argument("bench: --tokens: expected at least " + std::to_string(2 * kChunk) +
                                " on a GPU, got " + std::to_string(options.tokens));
  }
  ModelOptions model_options;
  model_options.compute = ComputeType::bf16;
  model_options.dense = DenseMode::fast;
  model_options.device = Device::cuda;
  model_options.timed = true;
  const Model model(Checkpoint::open(options.model, WeightType::bf16), model_options);
  std::vector<std::string> names = options.states;
  if (names.empty())
    names = {"fp32@L=1",     "fp16+sr",    "fp8+sr",        "nvfp4+sr",
             "nvfp4+sr@L=1", "fp32/nvfp4", "fp16+sr/nvfp4", "fp8+sr/nvfp4"};
  const bool text = std::filesystem::exists(options.model / "tokenizer.json") ||
                    std::filesystem::exists(options.model / "tokenizer.model");
  const Document document = text ? load_document(options, options.tokens)
                                 : random_document(model.spec().vocabulary, options.tokens);
  const int64_t free_before = static_cast<int64_t>(cuda_device().free_bytes);
  TimedJob job(model, document, names);
  job.reserve(options.tokens);
  const double rows = static_cast<double>(names.size() + 1);
  const int64_t middle = options.tokens / 2 / kChunk * kChunk - kSingle / 2;
  double single = 0, beside = 0;
  job.step(kChunk);  // uploads weights, chooses kernels
  const JobTimes warm = job.times();
  while (job.position() < options.tokens) {
    const int64_t left = options.tokens - job.position();
    if (options.single && middle > kChunk && job.position() == middle) {
      const double before = job.times().total;
      for (int64_t t = 1; t <= kSingle; ++t) {
        job.step(1);
        single = job.times().total - before;
        if (t % 256 > 0) continue;
        std::printf("  %lld of %lld single tokens: %.1f x the time of as many in chunks\n",
                    static_cast<long long>(t), static_cast<long long>(kSingle),
                    single / beside * static_cast<double>(kSingle) / static_cast<double>(t));
        std::fflush(stdout);
      }
      break;
    }
    const double before = job.times().total;
    const bool near_middle = job.position() >= middle - kSingle && job.position() < middle;
    job.step(static_cast<int>(std::min<int64_t>(kChunk, left)));
    if (near_middle) beside += job.times().total - before;
  }
  const JobTimes all = job.times();
  const double total = all.total - warm.total - single;
  const int64_t tokens = job.position() - kChunk - (single > 0 ? kSingle : 0);
  std::printf("%s: %lld tokens, %zu states and the FP32 row, chunks of %d, BF16, %s tokens\n",
              options.model.string().c_str(), static_cast<long long>(options.tokens), names.size(),
              kChunk, text ? "text" : "random");
  std::printf("  %.1f s for %lld tokens (without the first chunk%s): %.0f tokens/s a row\n", total,
              static_cast<long long>(tokens), single > 0 ? " and the single tokens" : "",
              static_cast<double>(tokens) / total);
  if (single > 0) {
    std::printf("  single tokens around position %lld take %.1f x the time of chunks before them\n",
                static_cast<long long>(middle + kSingle / 2), single / beside);
    return 0;  // the times by kind hold both
  }
  const ForwardTimes& f = all.forward;
  const ForwardTimes& w = warm.forward;
  print_share("matrix products", f.products - w.products, total);
  print_share("attention", f.attention - w.attention, total);
  print_share("state replay with encoding", f.state - w.state, total);
  print_share("convolution", f.convolution - w.convolution, total);
  print_share("LM head, KL, NLL, top-1", all.metrics - warm.metrics, total);
  print_share("norms, activations, copies", f.other - w.other, total);
  const double peak = device_matrix_rate(true);
  const double products = product_operations(model.spec()) * static_cast<double>(tokens) * rows;
  const double attention = (attention_operations(model.spec(), options.tokens) -
                            attention_operations(model.spec(), kChunk)) *
                           rows;
  const double product_seconds = f.products - w.products;
  const double attention_seconds = f.attention - w.attention;
  std::printf("  BF16 matrix rate %.0f T operations/s; products at %.0f%%", peak * 1e-12,
              100 * products / product_seconds / peak);
  if (attention_seconds > 0)
    std::printf(", attention at %.0f%%", 100 * attention / attention_seconds / peak);
  std::printf(", both at %.0f%%\n",
              100 * (products + attention) / (product_seconds + attention_seconds) / peak);
  const JobBytes bytes = job.bytes(kChunk);
  const double held =
      static_cast<double>(free_before - static_cast<int64_t>(cuda_device().free_bytes));
  std::printf(
      "  device memory %.2f GB; weights %.2f, key-value caches %.2f, states %.2f and a chunk %.2f "
      "are %.2f GB, held is %.2f of that\n",
      1e-9 * held, 1e-9 * bytes.weights, 1e-9 * bytes.cache, 1e-9 * bytes.states,
      1e-9 * bytes.chunk, 1e-9 * bytes.all(), held / bytes.all());
  return 0;
}

int run_bench(const BenchOptions& options) {
  const std::vector<std::string> known = {"all", "formats", "kernels", "job", "growth"};
  if (std::find(known.begin(), known.end(), options.what) == known.end()) {
    throw std::invalid_argument(
        "bench: expected formats, kernels, job, growth or all (decode with --model or --device "
        "cuda), got '" +
        options.what + "'");
  }
  const int threads = options.threads > 0
                          ? options.threads
                          : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  omp_set_num_threads(threads);
  set_torch_threads(threads);
  std::printf("%d threads\n\n", threads);
  const bool all = options.what == "all";
  if (all || options.what == "formats") print_formats();
  if (all || options.what == "kernels") print_kernels();
  if (all || options.what == "job") print_job(options);
  if (all || options.what == "growth") print_growth(options);
  return 0;
}

}  // namespace replayeval
