// Timing of mamba2_advance (kernels/mamba2_timing.h).
#include "kernels/mamba2_timing.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <vector>

#include "kernels/aligned.h"

namespace replayeval {
namespace {

/// A reproducible value in [-1, 1).
float pattern(uint64_t index) {
  const uint64_t mixed = (index + 1) * 0x9E3779B97F4A7C15ull;
  return static_cast<float>(static_cast<int64_t>(mixed >> 40) - (1 << 23)) * 0x1p-23f;
}

}  // namespace

KernelTiming time_mamba2(const Mamba2Workload& workload) {
  Mamba2Layer layer = workload.layer;
  if (workload.tokens < 1 || workload.tokens_per_call < 1 || workload.repeats < 1 ||
      workload.rows < 1 || !workload.plan.recurrence.format) {
    throw std::invalid_argument(
        "mamba2 timing: expected rows, tokens, tokens_per_call and repeats of at least 1 and a "
        "format");
  }
  const StateShape shape{layer.head_dim, layer.state_dim};
  const size_t heads = static_cast<size_t>(layer.heads);
  const size_t rows = static_cast<size_t>(workload.rows);
  const int64_t tokens = workload.tokens, window = workload.plan.window;
  const int64_t inner = int64_t{layer.heads} * layer.head_dim;
  const int64_t group_width = int64_t{layer.groups} * layer.state_dim;

  std::vector<float> decay(heads), skip(heads, 1.0f);
  for (size_t h = 0; h < heads; ++h) decay[h] = -0.25f - 0.5f * static_cast<float>(h % 7);
  layer.decay_log2 = decay.data();
  layer.skip = skip.data();
  AlignedVector<float> x(rows * static_cast<size_t>(tokens * inner)), y(x.size());
  AlignedVector<float> b(rows * static_cast<size_t>(tokens * group_width)), c(b.size());
  std::vector<float> dt(rows * static_cast<size_t>(tokens) * heads);
  for (size_t i = 0; i < x.size(); ++i) x[i] = pattern(i);
  for (size_t i = 0; i < b.size(); ++i) b[i] = pattern(3 * i), c[i] = pattern(7 * i);
  for (size_t i = 0; i < dt.size(); ++i) dt[i] = 0.05f + 0.04f * pattern(i);

  const size_t stride = packed_bytes(*workload.plan.recurrence.format, shape);
  const size_t read_stride =
      workload.plan.read ? packed_bytes(*workload.plan.read->format, shape) : 0;
  const size_t memory_stride =
      memory_bytes(*workload.plan.recurrence.format, shape) +
      (workload.plan.read ? memory_bytes(*workload.plan.read->format, shape) : 0);
  AlignedVector<std::byte> recurrence(rows * heads * stride), read(rows * heads * read_stride),
      memory(rows * heads * memory_stride);
  std::vector<HeadHealth> health(rows * heads);
  std::vector<int> pending(rows, 0);
  std::vector<StateRow> row(rows);
  for (size_t r = 0; r < rows; ++r) {
    row[r].stream = static_cast<uint32_t>(r);
    row[r].plans = {&workload.plan, 1};
    row[r].pending = &pending[r];
    row[r].recurrence = recurrence.data() + r * heads * stride;
    row[r].recurrence_stride = stride;
    row[r].read = read.data() + r * heads * read_stride;
    row[r].read_stride = read_stride;
    row[r].memory = memory.data() + r * heads * memory_stride;
    row[r].memory_stride = memory_stride;
    row[r].health = health.data() + r * heads;
  }

  std::vector<Mamba2Inputs> inputs(rows);
  const auto walk = [&] {
    for (int64_t t = 0; t < tokens; t += workload.tokens_per_call) {
      for (size_t r = 0; r < rows; ++r) {
        const int64_t token = static_cast<int64_t>(r) * tokens + t;
        Mamba2Inputs& in = inputs[r];
        in.tokens = static_cast<int>(std::min<int64_t>(workload.tokens_per_call, tokens - t));
        in.x = x.data() + token * inner;
        in.y = y.data() + token * inner;
        in.x_stride = in.y_stride = inner;
        in.dt = dt.data() + token * layer.heads;
        in.dt_stride = layer.heads;
        in.b = b.data() + token * group_width;
        in.c = c.data() + token * group_width;
        in.b_stride = in.c_stride = group_width;
      }
      mamba2_advance(layer, row, inputs, AdvanceMode::commit, workload.form);
      for (StateRow& each : row) each.position += inputs[0].tokens;
    }
    // Every walk starts with an empty ring: the records before the first token do not exist.
    std::fill(pending.begin(), pending.end(), 0);
  };
  walk();
  KernelTiming timing;
  timing.seconds = std::numeric_limits<double>::infinity();
  for (int i = 0; i < workload.repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    walk();
    timing.seconds =
        std::min(timing.seconds,
                 std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }

  // A window of L of one head: reads S C_t and folds u_j B_j^T, 2 P N each a token; decays S, P N;
  // combines L (L + 1) / 2 pairs and D x, 2 P each; and one group's share of as many products B_j .
  // C_t, 2 N each.
  const double l = static_cast<double>(window), p = layer.head_dim, n = layer.state_dim;
  const double pairs = l * (l + 1) / 2;
  const double head_window = 4 * p * n * l + p * n + 2 * p * (pairs + l);
  const double group_window = 2 * n * pairs;
  const double windows = static_cast<double>(rows) * static_cast<double>(tokens) / l;
  timing.operations = windows * (layer.heads * head_window + layer.groups * group_window);
  const double checkpoints = static_cast<double>(recurrence.size() + read.size());
  timing.bytes =
      2 * checkpoints *
          static_cast<double>((tokens + workload.tokens_per_call - 1) / workload.tokens_per_call) +
      4.0 * static_cast<double>(x.size() + y.size() + b.size() + c.size() + dt.size());
  return timing;
}

}  // namespace replayeval
