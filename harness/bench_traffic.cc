#include "harness/bench_traffic.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include "kernels/decode_traffic.h"
#include "models/checkpoint.h"
#include "models/model.h"
#include "models/state_precision.h"

namespace replayeval {
namespace {

constexpr int kMostRows = 4096;

std::vector<std::string> states_of(const GpuBenchOptions& options) {
  return options.states.empty() ? std::vector<std::string>{"fp32", "fp16+sr/nvfp4"}
                                : options.states;
}

struct Range {
  bool windows = false;
  std::vector<int> values;
};

Range read_sweep(const std::string& sweep) {
  const auto refuse = [&] {
    throw std::invalid_argument("bench: --sweep: expected batch=FROM..TO (1 to " +
                                std::to_string(kMostRows) + ") or window=FROM..TO (1 to " +
                                std::to_string(kMaxWindow) + "), got '" + sweep + "'");
  };
  Range range;
  const size_t equals = sweep.find('='), dots = sweep.find("..");
  if (equals == std::string::npos || dots == std::string::npos || dots < equals) refuse();
  const std::string what = sweep.substr(0, equals);
  if (what != "batch" && what != "window") refuse();
  range.windows = what == "window";
  const auto number = [&](size_t begin, size_t end) {
    int value = 0;
    const char* last = sweep.data() + end;
    const auto [at, error] = std::from_chars(sweep.data() + begin, last, value);
    if (error != std::errc() || at != last) refuse();
    return value;
  };
  const int from = number(equals + 1, dots), to = number(dots + 2, sweep.size());
  if (from < 1 || to < from || to > (range.windows ? kMaxWindow : kMostRows)) refuse();
  for (int value = 1; value < to; value *= 2) {
    if (value > from) range.values.push_back(value);
  }
  range.values.insert(range.values.begin(), from);
  if (to > from) range.values.push_back(to);
  return range;
}

}  // namespace

double product_operations(const ModelSpec& model) {
  double operations = 0;
  const auto add = [&](const LinearSpec& linear, double times = 1) {
    operations += times * 2.0 * static_cast<double>(linear.weight.rows) *
                  static_cast<double>(linear.weight.cols);
  };
  const auto add_mlp = [&](const MlpSpec& mlp, double times = 1) {
    add(mlp.up, times);
    add(mlp.down, times);
    if (mlp.gate) add(*mlp.gate, times);
  };
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      if (const auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer)) {
        add(mamba->in_proj);
        add(mamba->out_proj);
      } else if (const auto* gdn = std::get_if<GdnSpec>(&branch.mixer)) {
        for (const LinearSpec* linear : {&gdn->qkv, &gdn->z, &gdn->b, &gdn->a, &gdn->out_proj})
          add(*linear);
      } else if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer)) {
        for (const LinearSpec* linear :
             {&attention->q, &attention->k, &attention->v, &attention->o})
          add(*linear);
      } else if (const auto* mlp = std::get_if<MlpSpec>(&branch.mixer)) {
        add_mlp(*mlp);
      } else if (const auto* moe = std::get_if<MoeSpec>(&branch.mixer)) {
        add(moe->router);
        add_mlp(moe->experts.front(), moe->experts_per_token);
        if (moe->shared) add_mlp(*moe->shared);
        if (moe->latent_in) add(*moe->latent_in);
        if (moe->latent_out) add(*moe->latent_out);
      }
    }
  }
  return operations;
}

bool decode_layer(const Mixer& mixer, DecodeWorkload* w) {
  if (const auto* mamba = std::get_if<Mamba2Spec>(&mixer)) {
    w->is_gdn = false;
    w->mamba2.heads = mamba->heads;
    w->mamba2.groups = mamba->groups;
    w->mamba2.head_dim = mamba->head_dim;
    w->mamba2.state_dim = mamba->state_dim;
    return true;
  }
  if (const auto* gdn = std::get_if<GdnSpec>(&mixer)) {
    w->is_gdn = true;
    w->gdn.value_heads = gdn->value_heads;
    w->gdn.key_heads = gdn->key_heads;
    w->gdn.value_dim = gdn->value_dim;
    w->gdn.key_dim = gdn->key_dim;
    return true;
  }
  return false;
}

int run_decode_sweep(const std::string& sweep, const GpuBenchOptions& options, std::FILE* out) {
  const Range range = read_sweep(sweep);
  check_options(options);
  std::string reason;
  if (!cuda_available(&reason)) throw std::runtime_error("bench: " + reason);
  const DeviceRates rates = measure_device_rates();
  std::fprintf(out, "read %.2f TB/s; microseconds a layer and step, rows staggered, BF16\n",
               rates.read * 1e-12);
  std::fprintf(out, "%-12s %-16s %6s %3s %9s %9s %9s %14s %7s\n", "shape", "state", "batch", "L",
               "us", "predicted", "MB", "of convention", "best L");
  int result = 0;
  for (const std::string& shape : decode_shapes(options)) {
    for (const std::string& state : states_of(options)) {
      for (int value : range.values) {
        DecodeWorkload w = decode_workload(shape);
        w.rows = range.windows ? options.rows : value;
        w.plan = decode_plan(state, range.windows ? value : options.window);
        w.layers = options.layers;
        w.sums_freely = options.dense == DenseMode::fast;
        w.cycles = options.cycles;
        const DecodeTiming t = time_decode(w);
        const double bytes = decode_bytes(w);
        std::fprintf(out, "%-12s %-16s %6d %3d %9.1f %9.1f %9.1f %13.2fx %7d %s\n", shape.c_str(),
                     state.c_str(), w.rows, w.plan.window, 1e6 * t.seconds,
                     1e6 * bytes / rates.read, 1e-6 * bytes, bytes / conventional_bytes(w),
                     best_window(w), t.difference.c_str());
        std::fflush(out);
        if (!t.difference.empty()) result = 1;
      }
    }
  }
  return result;
}

int print_model_traffic(const std::filesystem::path& model, const GpuBenchOptions& options,
                        std::FILE* out) {
  check_options(options);
  std::vector<HeadPlan> plans;
  for (const std::string& state : states_of(options))
    plans.push_back(decode_plan(state, options.window));
  const auto checkpoint = Checkpoint::open(model, WeightType::bf16, WeightAccess::headers);
  const ModelSpec spec = find_family(*checkpoint).build(*checkpoint);
  constexpr double kBf16 = 2;
  double cache = 0;
  for (const Block& block : spec.blocks) {
    for (const Branch& branch : block.branches) {
      if (const auto* a = std::get_if<AttentionSpec>(&branch.mixer))
        cache += 2 * kBf16 * a->kv_heads * a->head_dim;
    }
  }
  std::fprintf(out, "%s: key-value caches %.1f kB a position and sequence (BF16)\n",
               model.string().c_str(), 1e-3 * cache);
  std::fprintf(out, "%-16s %3s %14s %18s %8s\n", "state", "L", "state MB/step", "equal at tokens",
               "best L");
  for (size_t s = 0; s < plans.size(); ++s) {
    const std::string state = states_of(options)[s];
    double bytes = 0;
    int best = 0;
    for (const Block& block : spec.blocks) {
      for (const Branch& branch : block.branches) {
        DecodeWorkload w;
        w.rows = 1;
        w.plan = plans[s];
        if (!decode_layer(branch.mixer, &w)) continue;
        bytes += decode_bytes(w);
        best = best_window(w);
      }
    }
    if (bytes == 0) throw std::invalid_argument(model.string() + ": no layer has recurrent state");
    std::fprintf(out, "%-16s %3d %14.2f ", state.c_str(), plans[s].window, 1e-6 * bytes);
    if (cache > 0) {
      std::fprintf(out, "%18.0f", bytes / cache);
    } else {
      std::fprintf(out, "%18s", "no attention");
    }
    std::fprintf(out, " %8d\n", best);
  }
  return 0;
}

}  // namespace replayeval
