#include "harness/bench_decoder.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <stdexcept>

#include "harness/bench_traffic.h"
#include "kernels/decode_traffic.h"
#include "models/decoder.h"

namespace replayeval {
namespace {

constexpr double kBf16 = 2, kFp32 = 4;

/// Bytes that a step of `rows` rows moves at `context` positions, by what they are, and the
/// operations of its products.
struct StepBytes {
  double weights = 0, states = 0, cache = 0, logits = 0;
  double operations = 0;
  double all() const { return weights + states + cache + logits; }
};

StepBytes step_bytes(const ModelSpec& spec, const HeadPlan& plan, int rows, double context) {
  StepBytes bytes;
  const double vocabulary = spec.vocabulary;
  const double weights = product_operations(spec) / 2 + vocabulary * spec.hidden;
  bytes.weights = kBf16 * weights;
  bytes.operations = 2 * weights * rows;
  bytes.logits = 2 * kFp32 * vocabulary * rows;  // written, and read for the choice
  for (const Block& block : spec.blocks) {
    for (const Branch& branch : block.branches) {
      if (const auto* a = std::get_if<AttentionSpec>(&branch.mixer))
        bytes.cache += 2 * kBf16 * a->kv_heads * a->head_dim * context * rows;
      DecodeWorkload w;
      if (!decode_layer(branch.mixer, &w)) continue;
      const auto shape = state_shape(branch.mixer, block.layer);
      w.rows = rows;
      w.plan = plan;
      bytes.states += decode_bytes(w);
      bytes.states += 2 * kBf16 * (shape->conv_kernel - 1) * shape->channels * rows;
    }
  }
  return bytes;
}

}  // namespace

int run_decoder_bench(const std::filesystem::path& folder, const GpuBenchOptions& options,
                      int64_t context, std::FILE* out) {
  check_options(options);
  std::string reason;
  if (!cuda_available(&reason)) throw std::runtime_error("bench: " + reason);
  ModelOptions model_options;
  model_options.compute = ComputeType::bf16;
  model_options.dense = options.dense;
  model_options.device = Device::cuda;
  model_options.products = Products::together;
  const Model model(Checkpoint::open(folder, WeightType::bf16), model_options);
  const DeviceRates rates = measure_device_rates();
  const double matrix_rate = device_matrix_rate(true);
  const int64_t steps = int64_t{options.window} * options.cycles;
  const int64_t most = context + options.window + 2 * steps;
  std::mt19937 random(1);
  std::uniform_int_distribution<int32_t> any(0, model.spec().vocabulary - 1);
  StateOptions defaults;
  defaults.seed = 1;
  defaults.window = options.window;
  const StatePrecision baseline = parse_state_precision("fp32", defaults);
  std::fprintf(out,
               "%s: %d rows from %lld tokens on, L = %d, BF16, captured steps; read %.2f TB/s, "
               "products %.0f T operations/s\n",
               folder.string().c_str(), options.rows, static_cast<long long>(context),
               options.window, rates.read * 1e-12, matrix_rate * 1e-12);
  std::fprintf(out, "%-16s %9s %9s %7s %9s %7s  %s\n", "state", "ms a step", "bytes' ms", "share",
               "bound ms", "share", "GB: weights, states, cache, logits");
  std::vector<std::string> names = options.states;
  if (names.empty()) names = {"fp32", "fp16+sr", "fp16+sr/nvfp4"};
  for (const std::string& name : names) {
    DecoderOptions wanted;
    wanted.states = {parse_state_precision(name, defaults)};
    wanted.baseline = baseline;
    wanted.rows_per_state = options.rows;
    wanted.most_positions = most;
    wanted.cache_positions = most * options.rows;
    Decoder decoder(model, wanted);
    {
      StateSet prompt(model, {{wanted.states[0], 1u, 0, 0}}, baseline, KernelForm::fast);
      std::vector<int32_t> tokens(static_cast<size_t>(context));
      for (int32_t& token : tokens) token = any(random);
      model.forward({tokens, std::vector<int>{static_cast<int>(context)}}, prompt);
      for (int place = 0; place < options.window; ++place) {
        for (int row = place; row < options.rows; row += options.window)
          decoder.admit(decoder.reserve(0, most), prompt, 0);
        const std::vector<int32_t> next = {any(random)};
        model.forward({next, std::vector<int>{1}}, prompt);
      }
    }
    std::vector<int32_t> tokens(static_cast<size_t>(options.rows));
    for (int32_t& token : tokens) token = any(random);
    const auto run = [&] {
      for (int64_t i = 0; i < steps; ++i) decoder.step(tokens);
    };
    run();
    const auto start = std::chrono::steady_clock::now();
    run();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
        static_cast<double>(steps);
    const double middle =
        static_cast<double>(context) + options.window / 2.0 + 1.5 * static_cast<double>(steps);
    const StepBytes bytes =
        step_bytes(model.spec(), head_plan(wanted.states[0]), options.rows, middle);
    const double needed = bytes.all() / rates.read;
    // Products of many rows take longer to multiply than their weights take to arrive.
    const double bound = (bytes.all() - bytes.weights) / rates.read +
                         std::max(bytes.weights / rates.read, bytes.operations / matrix_rate);
    std::fprintf(out, "%-16s %9.2f %9.2f %6.0f%% %9.2f %6.0f%%  %.2f, %.2f, %.2f, %.2f\n",
                 name.c_str(), 1e3 * seconds, 1e3 * needed, 100 * needed / seconds, 1e3 * bound,
                 100 * bound / seconds, 1e-9 * bytes.weights, 1e-9 * bytes.states,
                 1e-9 * bytes.cache, 1e-9 * bytes.logits);
    std::fflush(out);
  }
  std::fprintf(
      out,
      "bytes' ms: what they take at the read rate; bound ms: likewise, but the products at "
      "the matrix rate where that is longer.\n");
  return 0;
}

}  // namespace replayeval
