#include "harness/bench_gpu.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kernels/gpu_timing.h"
#include "models/state_precision.h"
#include "quant/format_file.h"

namespace replayeval {
namespace {

struct Shape {
  const char* name;
  bool is_gdn;
  int heads, groups, head_dim, state_dim;  // GDN: value heads, key heads, V, K
};
constexpr Shape kShapes[] = {
    {"mamba2-h96", false, 96, 8, 80, 128},
    {"mamba2-h128", false, 128, 8, 64, 128},
    {"gdn-h32", true, 32, 16, 128, 128},
};

/// The layer of a shape, for a workload of decoding or of chunks.
template <class Workload>
Workload workload_of(const Shape& shape) {
  Workload w;
  w.is_gdn = shape.is_gdn;
  w.mamba2.heads = shape.heads;
  w.mamba2.groups = shape.groups;
  w.mamba2.head_dim = shape.head_dim;
  w.mamba2.state_dim = shape.state_dim;
  w.gdn.value_heads = shape.heads;
  w.gdn.key_heads = shape.groups;
  w.gdn.value_dim = shape.head_dim;
  w.gdn.key_dim = shape.state_dim;
  return w;
}

/// Microseconds: encoding and decoding a head, a token of a chunk, a decode step of a row that does
/// not flush, and one of a whole flush cycle.
struct FormatTimes {
  static constexpr const char* kNames[] = {"encode rtn", "encode sr", "decode", "chunk L=16",
                                           "chunk L=1",  "step",      "cycle"};
  static constexpr int kCount = 7;
  double us[kCount] = {};
};

FormatTimes time_format(const Shape& shape, const std::shared_ptr<const StateFormat>& format,
                        DenseMode dense) {
  constexpr int kHeads = 32768, kRows = 256;
  const StateShape head{shape.head_dim, shape.state_dim};
  FormatTimes t;
  const CodecTiming nearest = time_codec({format, Rounding::nearest_even}, head, kHeads),
                    stochastic = time_codec({format, Rounding::stochastic}, head, kHeads);
  t.us[0] = 1e6 * nearest.encode / kHeads;
  t.us[1] = 1e6 * stochastic.encode / kHeads;
  t.us[2] = 1e6 * nearest.decode / kHeads;
  auto chunk = workload_of<ChunkWorkload>(shape);
  for (const int window : {16, 1}) {
    HeadPlan plan;
    plan.recurrence = {format, Rounding::stochastic};
    plan.window = window;
    plan.seed = 1;
    chunk.plans = {plan};
    t.us[window == 16 ? 3 : 4] = 1e6 * time_chunk(chunk) / chunk.tokens;
  }
  auto decode = workload_of<DecodeWorkload>(shape);
  decode.plan.recurrence = {find_format("fp16"), Rounding::stochastic};
  decode.plan.read = StateCodec{format, Rounding::nearest_even};
  decode.plan.seed = 1;
  decode.rows = kRows;
  decode.only_reads = true;
  decode.sums_freely = dense == DenseMode::fast;
  t.us[5] = 1e6 * time_decode(decode).seconds / kRows;
  decode.only_reads = false;
  t.us[6] = 1e6 * time_decode(decode).seconds / kRows;
  return t;
}

}  // namespace

HeadPlan decode_plan(const std::string& name, int window) {
  StateOptions options;
  options.window = window;
  options.seed = 1;
  const StatePrecision precision = parse_state_precision(name, options);
  if (!precision.whole_model()) {
    throw std::invalid_argument("bench: " + name +
                                ": expected a state of all layers and heads, without a selection");
  }
  return head_plan(precision);
}

void check_options(const GpuBenchOptions& options) {
  const auto refuse = [](const char* option, const std::string& expected, int got) {
    throw std::invalid_argument(std::string("bench: --") + option + ": expected " + expected +
                                ", got " + std::to_string(got));
  };
  if (options.rows < 1) refuse("rows", "1 or more", options.rows);
  if (options.window < 1 || options.window > kMaxWindow)
    refuse("window", "1 to " + std::to_string(kMaxWindow), options.window);
  decode_shapes(options);
}

std::vector<std::string> decode_shapes(const GpuBenchOptions& options) {
  std::vector<std::string> known;
  for (const Shape& shape : kShapes) known.emplace_back(shape.name);
  for (const std::string& name : options.shapes) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw std::invalid_argument("bench: unknown shape '" + name +
                                  "'; known: mamba2-h96 mamba2-h128 gdn-h32");
    }
  }
  return options.shapes.empty() ? known : options.shapes;
}

DecodeWorkload decode_workload(const std::string& name) {
  for (const Shape& shape : kShapes) {
    if (name == shape.name) return workload_of<DecodeWorkload>(shape);
  }
  throw std::invalid_argument("bench: unknown shape '" + name + "'");
}

int run_gpu_decode_bench(const GpuBenchOptions& options, std::FILE* out) {
  std::string reason;
  if (!cuda_available(&reason)) throw std::runtime_error("bench: " + reason);
  const CudaDevice device = cuda_device();
  const DeviceRates rates = measure_device_rates();
  std::fprintf(out, "%s, %d multiprocessors; read %.2f TB/s, copy %.2f TB/s (read and written)\n",
               device.name.c_str(), device.multiprocessors, rates.read * 1e-12, rates.copy * 1e-12);
  std::fprintf(out,
               "%d rows, L = %d, BF16 activations; microseconds a layer and step, %d cycles over "
               "%d layers\n",
               options.rows, options.window, options.cycles, options.layers);
  std::fprintf(out, "%-12s %-16s %-10s %9s %9s %9s %7s  %s\n", "shape", "state", "rows", "us", "MB",
               "TB/s", "of read", "checkpoints");
  const std::vector<std::string> states =
      options.states.empty()
          ? std::vector<std::string>{"fp32", "fp16+sr", "nvfp4+sr", "fp16+sr/nvfp4"}
          : options.states;
  int result = 0;
  for (const std::string& shape : decode_shapes(options)) {
    for (const std::string& state : states) {
      DecodeWorkload w = decode_workload(shape);
      w.plan = decode_plan(state, options.window);
      w.rows = options.rows;
      w.layers = options.layers;
      w.sums_freely = options.dense == DenseMode::fast;
      w.cycles = options.cycles;
      struct Steps {
        const char* name;
        RowPhases phases;
        bool only_reads;
      };
      for (const Steps& steps : {Steps{"staggered", RowPhases::staggered, false},
                                 Steps{"clustered", RowPhases::clustered, false},
                                 Steps{"in step", RowPhases::in_step, false},
                                 Steps{"reads only", RowPhases::in_step, true}}) {
        w.phases = steps.phases;
        w.only_reads = steps.only_reads;
        const DecodeTiming t = time_decode(w);
        const double rate = t.bytes / t.seconds;
        const char* checked = w.only_reads           ? "not flushed"
                              : t.difference.empty() ? "equal"
                                                     : t.difference.c_str();
        std::fprintf(out, "%-12s %-16s %-10s %9.1f %9.1f %9.2f %6.0f%%  %s\n", shape.c_str(),
                     state.c_str(), steps.name, t.seconds * 1e6, t.bytes * 1e-6, rate * 1e-12,
                     100 * rate / rates.read, checked);
        std::fflush(out);
        if (!t.difference.empty()) result = 1;
      }
    }
  }
  return result;
}

int run_gpu_bench(const std::string& what, const GpuBenchOptions& options, std::FILE* out) {
  check_options(options);
  if (what == "decode") return run_gpu_decode_bench(options, out);
  if (what == "formats") return run_gpu_format_bench(options, out);
  if (what == "kernels" || what == "kl" || what == "all") {
    int result = run_gpu_kernel_bench(out);
    if (what != "kl") result = std::max(result, run_gpu_format_bench(options, out));
    return what == "all" ? std::max(result, run_gpu_decode_bench(options, out)) : result;
  }
  throw std::invalid_argument(
      "bench: with --device cuda expected decode, formats, kernels, kl, job or all, got '" + what +
      "'");
}

int run_gpu_kernel_bench(std::FILE* out) {
  std::string reason;
  if (!cuda_available(&reason)) throw std::runtime_error("bench: " + reason);
  const DeviceRates rates = measure_device_rates();
  const std::pair<const char*, int> states[] = {
      {"fp32", 16},       {"fp32", 1},           {"fp16+sr", 16},
      {"fp8+sr", 16},     {"nvfp4+sr", 16},      {"nvfp4+sr", 1},
      {"fp32/nvfp4", 16}, {"fp16+sr/nvfp4", 16}, {"fp8+sr/nvfp4", 16}};
  std::fprintf(out, "microseconds a token and layer, chunks of 512 tokens\n%-12s %-16s %3s %9s\n",
               "shape", "state", "L", "us");
  for (const Shape& shape : kShapes) {
    auto w = workload_of<ChunkWorkload>(shape);
    std::vector<HeadPlan> all;
    for (const auto& [name, window] : states) {
      w.plans = {decode_plan(name, window)};
      all.push_back(w.plans[0]);
      std::fprintf(out, "%-12s %-16s %3d %9.2f\n", shape.name, name, window,
                   1e6 * time_chunk(w) / w.tokens);
    }
    w.plans = all;
    std::fprintf(out, "%-12s %-16s %3s %9.2f\n", shape.name, "all nine", "",
                 1e6 * time_chunk(w) / w.tokens);
    std::fflush(out);
  }
  for (int64_t vocabulary : {int64_t{131072}, int64_t{248320}}) {
    const int64_t positions = 64;
    const double seconds = time_kl(positions, 8, vocabulary);
    const double bytes = static_cast<double>(positions * vocabulary) * 4 * 9;
    std::fprintf(
        out, "kl, vocabulary %lld, 8 candidates: %.2f us a position, %.2f TB/s, %.0f%% of read\n",
        static_cast<long long>(vocabulary), 1e6 * seconds / static_cast<double>(positions),
        1e-12 * bytes / seconds, 100 * bytes / seconds / rates.read);
  }
  return 0;
}

const std::vector<FormatTwin>& format_twins() {
  // Every kind of element that the kernels tell apart.
  static const std::vector<FormatTwin> twins = {
      {"nvfp4", "e2m1", "e2m1", true},
      {"nvfp4", "e1m2", "{exponent: 1, mantissa: 2}"},
      {"nvfp4", "int4", "int4"},
      {"nvfp4", "e3m0", "{exponent: 3, mantissa: 0}"},
      {"nvfp4", "15 values",
       "{values: [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]}"},
      {"nvfp4", "16 values",  // no multiples of a common unit
       "{values: [-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, "
       "0.56, 0.72, 1.0]}"},
      {"fp8", "e4m3", "e4m3", true},
      {"fp8", "e3m4", "{exponent: 3, mantissa: 4}"},
      {"fp8", "int8", "int8"},
      {"fp8", "-128 to 127", "{integer: {from: -128, to: 127}}"},
      {"fp16", "fp16", "fp16", true},
      {"fp16", "e6m9", "{exponent: 6, mantissa: 9}"},
  };
  return twins;
}

std::shared_ptr<const StateFormat> twin_format(const FormatTwin& twin) {
  const std::string scales = twin.builtin == "nvfp4"
                                 ? "scale: {format: e4m3, block: 16}\nouter: {span: head}\n"
                             : twin.builtin == "fp8" ? "outer: {span: row}\n"
                                                     : "";
  return parse_format("element: " + twin.element + "\n" + scales, "bench: " + twin.name, ".",
                      twin.name);
}

int run_gpu_format_bench(const GpuBenchOptions& options, std::FILE* out) {
  std::string reason;
  if (!cuda_available(&reason)) throw std::runtime_error("bench: " + reason);
  std::fprintf(
      out,
      "Formats from files beside the built-in ones of equal width: microseconds a head, a "
      "token (one layer, SR), a non-flush step of a row that reads the format and one of a "
      "whole cycle; behind each how many times the built-in one's. An aim of 1.5 x at "
      "most.\n");
  const auto print = [&](const char* shape, const char* name, const FormatTimes& t,
                         const FormatTimes* beside) {
    std::fprintf(out, "%-12s %-24s", shape, name);
    for (int i = 0; i < FormatTimes::kCount; ++i) {
      std::fprintf(out, " %8.4f", t.us[i]);
      if (beside) {
        const double ratio = t.us[i] / beside->us[i];
        std::fprintf(out, " %5.2fx%s", ratio, ratio > 1.5 ? "!" : " ");
      } else {
        std::fprintf(out, "        ");
      }
    }
    std::fprintf(out, "\n");
    std::fflush(out);
  };
  std::fprintf(out, "%-12s %-24s", "shape", "format");
  for (const char* name : FormatTimes::kNames) std::fprintf(out, " %8s        ", name);
  std::fprintf(out, "\n");
  const std::vector<std::string> wanted = decode_shapes(options);
  for (const Shape& shape : kShapes) {
    if (std::find(wanted.begin(), wanted.end(), shape.name) == wanted.end()) continue;
    std::string builtin;
    FormatTimes beside;
    for (const FormatTwin& twin : format_twins()) {
      if (builtin != twin.builtin) {
        builtin = twin.builtin;
        beside = time_format(shape, find_format(builtin), options.dense);
        print(shape.name, builtin.c_str(), beside, nullptr);
      }
      print(shape.name, ("  " + twin.name + (twin.same ? " (same)" : "")).c_str(),
            time_format(shape, twin_format(twin), options.dense), &beside);
    }
  }
  return 0;
}

}  // namespace replayeval
