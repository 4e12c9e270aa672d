#include "kernels/dense.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/dense_simd.h"

namespace replayeval {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_weight(const WeightView& w) {
  if (w.rows < 0 || w.cols < 0 || (w.rows > 1 && w.stride < w.cols)) {
    throw std::invalid_argument(
        "linear: weight has shape [" + std::to_string(w.rows) + ", " + std::to_string(w.cols) +
        "] and stride " + std::to_string(w.stride) + ", expected sizes >= 0 and stride >= columns");
  }
}

void check_job(const LinearJob& job) {
  check_weight(job.w);
  if (job.m < 0)
    throw std::invalid_argument("linear: m is " + std::to_string(job.m) + ", expected >= 0");
  if (job.m > 1 && job.y_stride < job.w.rows) {
    throw std::invalid_argument("linear: y has stride " + std::to_string(job.y_stride) +
                                ", expected at least " + std::to_string(job.w.rows) +
                                " (rows of the weight)");
  }
  if (job.x_rows == nullptr && job.m > 1 && job.x_stride < job.w.cols) {
    throw std::invalid_argument("linear: x has stride " + std::to_string(job.x_stride) +
                                ", expected at least " + std::to_string(job.w.cols) +
                                " (columns of the weight)");
  }
}

/// A job cut into blocks of rows and groups of columns; results do not depend on the cut.
struct Cut {
  int64_t first_unit = 0;
  int64_t row_block = 0;
  int64_t row_blocks = 0;
  int64_t col_group = 0;
  int64_t col_groups = 0;
};

Cut cut_job(const LinearJob& job, int64_t threads, int64_t jobs) {
  constexpr int64_t kRowUnit = 12;  // a multiple of every level's tile rows
  // Units the job should give, so that no thread waits long for the last one; larger units pack x
  // less often.
  const int64_t wanted = threads == 1 ? 1 : ceil_div(2 * threads, jobs);
  const int64_t panels = ceil_div(job.w.rows, kPanel);
  Cut cut;
  cut.row_blocks = ceil_div(job.m, kMaxRowBlock);
  if (panels * cut.row_blocks < wanted) {
    cut.row_blocks =
        std::clamp(ceil_div(wanted, panels), cut.row_blocks, ceil_div(job.m, 4 * kRowUnit));
  }
  cut.row_block = ceil_div(ceil_div(job.m, cut.row_blocks), kRowUnit) * kRowUnit;
  cut.row_blocks = ceil_div(job.m, cut.row_block);
  const int64_t group = std::clamp<int64_t>(panels * cut.row_blocks / wanted, 1, 8);
  // As many units as share out evenly among the threads.
  cut.col_groups = ceil_div(panels, group);
  if (cut.row_blocks == 1 && jobs == 1) {
    cut.col_groups = std::min(panels, ceil_div(cut.col_groups, threads) * threads);
  }
  const int64_t width = ceil_div(panels, cut.col_groups);
  cut.col_groups = ceil_div(panels, width);
  cut.col_group = width * kPanel;
  return cut;
}

struct FreeDelete {
  void operator()(float* p) const { std::free(p); }
};

}  // namespace

float* thread_scratch(int64_t floats) {
  thread_local std::unique_ptr<float[], FreeDelete> memory;
  thread_local int64_t held = 0;
  if (held < floats) {
    memory.reset();
    held = 0;
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (memory) {
      held = floats;
      std::memset(memory.get(), 0, bytes);
    }
  }
  return memory.get();
}

WeightView row_slice(const WeightView& w, int64_t first, int64_t count) {
  if (first < 0 || count < 0 || first + count > w.rows) {
    throw std::invalid_argument("row_slice: rows [" + std::to_string(first) + ", " +
                                std::to_string(first + count) + ") of a weight with " +
                                std::to_string(w.rows) + " rows");
  }
  WeightView slice = w;
  slice.data = static_cast<const std::byte*>(w.data) + first * w.stride * weight_bytes(w.type);
  slice.rows = count;
  return slice;
}

void linear(std::span<const LinearJob> jobs) {
  int64_t threads = 1;
#ifdef _OPENMP
  threads = omp_in_parallel() ? 1 : omp_get_max_threads();
#endif
  std::vector<Cut> cuts(jobs.size());
  int64_t units = 0;
  int64_t scratch_rows = 0;
  double products = 0;
  int64_t filled = 0;
  for (const LinearJob& job : jobs) {
    check_job(job);
    if (job.m > 0 && job.w.rows > 0) ++filled;
  }
  for (size_t i = 0; i < jobs.size(); ++i) {
    cuts[i].first_unit = units;
    if (jobs[i].m == 0 || jobs[i].w.rows == 0) continue;
    cuts[i] = cut_job(jobs[i], threads, filled);
    cuts[i].first_unit = units;
    units += cuts[i].row_blocks * cuts[i].col_groups;
    scratch_rows = std::max(scratch_rows, cuts[i].row_block);
    products += static_cast<double>(std::max<int64_t>(jobs[i].m, 4)) *
                static_cast<double>(jobs[i].w.rows) * static_cast<double>(jobs[i].w.cols);
  }
  std::atomic<bool> out_of_memory = false;
  const auto unit_function = REPLAYEVAL_SIMD_CALL(dense_unit);
  const bool parallel = threads > 1 && units > 1 && products > 1e5;
#pragma omp parallel for schedule(dynamic, 1) if (parallel)
  for (int64_t unit = 0; unit < units; ++unit) {
    float* scratch = thread_scratch(dense_scratch(scratch_rows));
    if (scratch == nullptr) {
      out_of_memory = true;
      continue;
    }
    // The last job that starts at or before this unit; jobs without units start where the next one
    // does.
    size_t low = 0;
    size_t high = jobs.size();
    while (high - low > 1) {
      const size_t middle = (low + high) / 2;
      (cuts[middle].first_unit <= unit ? low : high) = middle;
    }
    const LinearJob& job = jobs[low];
    const Cut& cut = cuts[low];
    const int64_t local = unit - cut.first_unit;
    // Row blocks of one column group follow each other, so that weights from a file are read once.
    const int64_t row = local % cut.row_blocks * cut.row_block;
    const int64_t col = local / cut.row_blocks * cut.col_group;
    unit_function(job, row, std::min(cut.row_block, job.m - row), col,
                  std::min(cut.col_group, job.w.rows - col), scratch);
  }
  if (out_of_memory) throw std::runtime_error("linear: no memory for packing");
}

void linear(const float* x, int64_t m, int64_t x_stride, const WeightView& w, const float* bias,
            float* y, int64_t y_stride) {
  LinearJob job;
  job.x = x;
  job.x_stride = x_stride;
  job.m = m;
  job.w = w;
  job.bias = bias;
  job.y = y;
  job.y_stride = y_stride;
  linear({&job, 1});
}

void linear_reference(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                      const float* bias, float* y, int64_t y_stride) {
  check_weight(w);
  std::vector<float> row(static_cast<size_t>(w.cols));
  for (int64_t r = 0; r < w.rows; ++r) {
    widen(w, r, row.data());
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < w.cols; ++c)
        sum += static_cast<double>(x[i * x_stride + c]) * row[static_cast<size_t>(c)];
      if (bias != nullptr) sum += bias[r];
      y[i * y_stride + r] = static_cast<float>(sum);
    }
  }
}

ExpertGroups group_by_expert(const int32_t* chosen, const float* weights, int64_t tokens, int k,
                             int experts) {
  ExpertGroups groups;
  const auto choices = static_cast<size_t>(tokens * k);
  groups.offsets.assign(static_cast<size_t>(experts) + 1, 0);
  groups.rows.resize(choices);
  groups.slots.resize(choices);
  groups.weights.resize(choices);
  for (size_t i = 0; i < choices; ++i) {
    if (chosen[i] < 0 || chosen[i] >= experts) {
      throw std::invalid_argument("group_by_expert: token " +
                                  std::to_string(i / static_cast<size_t>(k)) + " chose expert " +
                                  std::to_string(chosen[i]) + ", expected 0 to " +
                                  std::to_string(experts - 1));
    }
    ++groups.offsets[static_cast<size_t>(chosen[i]) + 1];
  }
  for (size_t e = 0; e < static_cast<size_t>(experts); ++e)
    groups.offsets[e + 1] += groups.offsets[e];
  std::vector<int32_t> next(groups.offsets.begin(), groups.offsets.end() - 1);
  std::vector<int> order(static_cast<size_t>(k));
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* mine = chosen + t * k;
    for (int j = 0; j < k; ++j) order[static_cast<size_t>(j)] = j;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return mine[a] < mine[b]; });
    for (int j = 0; j < k; ++j) {
      const int from = order[static_cast<size_t>(j)];
      const int32_t slot = next[static_cast<size_t>(mine[from])]++;
      groups.rows[static_cast<size_t>(slot)] = static_cast<int32_t>(t);
      groups.slots[static_cast<size_t>(t * k + j)] = slot;
      groups.weights[static_cast<size_t>(t * k + j)] = weights[t * k + from];
    }
  }
  return groups;
}

void widen(const WeightView& w, int64_t row, float* out) {
  if (row < 0 || row >= w.rows) {
    throw std::invalid_argument("widen: row " + std::to_string(row) + " of a weight with " +
                                std::to_string(w.rows) + " rows");
  }
  widen(static_cast<const std::byte*>(w.data) + row * w.stride * weight_bytes(w.type), w.type,
        w.cols, out);
}

void widen(const void* data, WeightType type, int64_t n, float* out) {
  REPLAYEVAL_SIMD_CALL(widen_block)(data, type, n, out);
}

void narrow(const float* x, int64_t n, WeightType type, void* out) {
  if (type == WeightType::fp32) {
    std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  REPLAYEVAL_SIMD_CALL(narrow_block)(x, n, type, out);
}

float bf16_to_fp32(uint16_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
uint16_t fp32_to_bf16(float value) {
  uint16_t code;
  narrow(&value, 1, WeightType::bf16, &code);
  return code;
}
float fp16_to_fp32(uint16_t code) {
  float value;
  widen(&code, WeightType::fp16, 1, &value);
  return value;
}
uint16_t fp32_to_fp16(float value) {
  uint16_t code;
  narrow(&value, 1, WeightType::fp16, &code);
  return code;
}

}  // namespace replayeval
