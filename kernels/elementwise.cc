#include "kernels/elementwise.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels/elementwise_simd.h"

namespace replayeval {
namespace {

/// body(first, last) over blocks of rows, in parallel when there is enough to do. Rows are
/// independent, so the cut is free.
template <class Body>
void for_rows(int64_t rows, int64_t cols, Body body) {
  constexpr int64_t kBlockValues = 4096;
  const int64_t block = std::max<int64_t>(1, kBlockValues / std::max<int64_t>(cols, 1));
  const int64_t blocks = (rows + block - 1) / block;
#pragma omp parallel for schedule(static) if (blocks > 3)
  for (int64_t b = 0; b < blocks; ++b) body(b * block, std::min(rows, (b + 1) * block));
}

}  // namespace

void rms_norm(const RmsNorm& norm, const float* x, int64_t x_stride, const float* gate,
              int64_t gate_stride, float* y, int64_t y_stride, int64_t rows, int64_t cols) {
  const bool needs_weight = norm.gate != GateOrder::gate_only;
  const int64_t group = norm.group > 0 ? norm.group : cols;
  if (cols < 1 || cols % group != 0 ||
      (needs_weight &&
       (norm.weight_size < 1 || cols % norm.weight_size != 0 || norm.weight_size % group != 0))) {
    throw std::invalid_argument(
        "rms_norm: group " + std::to_string(group) + " and weight of " +
        std::to_string(norm.weight_size) + " do not fit " + std::to_string(cols) +
        " columns (group divides the weight, the weight divides the columns)");
  }
  if ((needs_weight && norm.weight == nullptr) ||
      ((norm.gate != GateOrder::none) != (gate != nullptr))) {
    throw std::invalid_argument("rms_norm: weight or gate missing, or a gate without an order");
  }
  const auto function = REPLAYEVAL_SIMD_CALL(rms_norm_rows);
  for_rows(rows, cols, [&](int64_t first, int64_t last) {
    function(norm, {x, x_stride}, {gate, gate_stride}, {y, y_stride}, first, last, cols);
  });
}

void activate(Activation f, const float* x, int64_t x_stride, const float* bias, float* y,
              int64_t y_stride, int64_t rows, int64_t cols, WeightType activation) {
  const auto function = REPLAYEVAL_SIMD_CALL(activate_rows);
  for_rows(rows, cols, [&](int64_t first, int64_t last) {
    function(f, {x, x_stride}, bias, {y, y_stride}, first, last, cols, activation);
  });
}

float activate(Activation f, float x) {
  float y;
  REPLAYEVAL_SIMD_CALL(activate_rows)(f, {&x, 1}, nullptr, {&y, 1}, 0, 1, 1, WeightType::fp32);
  return y;
}

void activate_multiply(Activation f, const float* gate, int64_t gate_stride, float gate_scale,
                       const float* up, int64_t up_stride, float* y, int64_t y_stride, int64_t rows,
                       int64_t cols, WeightType activation) {
  const auto function = REPLAYEVAL_SIMD_CALL(activate_multiply_rows);
  for_rows(rows, cols, [&](int64_t first, int64_t last) {
    function(f, {gate, gate_stride}, gate_scale, {up, up_stride}, {y, y_stride}, first, last, cols,
             activation);
  });
}

void add_scaled(float* y, int64_t y_stride, const float* x, int64_t x_stride, float multiplier,
                int64_t rows, int64_t cols, WeightType activation) {
  const auto function = REPLAYEVAL_SIMD_CALL(add_scaled_rows);
  for_rows(rows, cols, [&](int64_t first, int64_t last) {
    function({y, y_stride}, {x, x_stride}, multiplier, nullptr, first, last, cols, activation);
  });
}

void add_row_scaled(float* y, int64_t y_stride, const float* x, int64_t x_stride,
                    const float* row_scale, int64_t rows, int64_t cols, WeightType activation) {
  const auto function = REPLAYEVAL_SIMD_CALL(add_scaled_rows);
  for_rows(rows, cols, [&](int64_t first, int64_t last) {
    function({y, y_stride}, {x, x_stride}, 1.0F, row_scale, first, last, cols, activation);
  });
}

void scale(float* x, int64_t stride, float factor, const float* column, int64_t rows, int64_t cols,
           WeightType activation) {
  const auto function = REPLAYEVAL_SIMD_CALL(scale_rows);
  for_rows(rows, cols, [&](int64_t first, int64_t last) {
    function({x, stride}, factor, column, first, last, cols, activation);
  });
}

void round_to(WeightType type, float* x, int64_t n) {
  if (type == WeightType::fp32) return;
  const auto function = REPLAYEVAL_SIMD_CALL(round_values);
  for_rows(n, 1, [&](int64_t first, int64_t last) { function(x + first, last - first, type); });
}

void round_to_bf16(float* x, int64_t n) { round_to(WeightType::bf16, x, n); }

void exp_values(const float* x, float* y, int64_t n) {
  const auto function = REPLAYEVAL_SIMD_CALL(exp_values);
  for_rows(n, 1,
           [&](int64_t first, int64_t last) { function(x + first, y + first, last - first); });
}

std::vector<float> rotary_inverse_frequencies(double theta, int dims) {
  if (dims < 2 || dims % 2 != 0 || !(theta > 0)) {
    throw std::invalid_argument("rotary: " + std::to_string(dims) + " dimensions and theta " +
                                std::to_string(theta) +
                                ", expected an even number of at least 2 and theta > 0");
  }
  std::vector<float> inverse(static_cast<size_t>(dims / 2));
  for (int i = 0; i < dims / 2; ++i) {
    // Exponent, power and reciprocal are rounded to FP32 in turn, as in the library.
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dims);
    const auto power = static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
    inverse[static_cast<size_t>(i)] = 1.0F / power;
  }
  return inverse;
}

void rotary_tables(std::span<const float> inv_freq, int64_t first, int64_t n, float* cos,
                   float* sin, WeightType activation) {
  const auto half = static_cast<int64_t>(inv_freq.size());
  for_rows(n, 16 * half, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(first + t) * inv_freq[static_cast<size_t>(i)];
        cos[t * half + i] = static_cast<float>(std::cos(static_cast<double>(angle)));
        sin[t * half + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
      }
    }
  });
  round_to(activation, cos, n * half);
  round_to(activation, sin, n * half);
}

void rotary_apply(float* x, int64_t stride, int64_t n, int heads, int head_dim, int dims,
                  const float* cos, const float* sin, WeightType activation) {
  if (dims < 0 || dims % 2 != 0 || dims > head_dim) {
    throw std::invalid_argument("rotary: " + std::to_string(dims) + " dimensions of a head of " +
                                std::to_string(head_dim) +
                                ", expected an even number of at most that");
  }
  const auto function = REPLAYEVAL_SIMD_CALL(rotary_rows);
  for_rows(n, static_cast<int64_t>(heads) * dims, [&](int64_t first, int64_t last) {
    function({x, stride}, heads, head_dim, dims, cos, sin, first, last, activation);
  });
}

void softmax(const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows,
             int64_t cols) {
  const auto function = REPLAYEVAL_SIMD_CALL(softmax_rows);
  for_rows(rows, cols, [&](int64_t first, int64_t last) {
    function({x, x_stride}, {y, y_stride}, first, last, cols);
  });
}

void top_k(const float* x, int64_t x_stride, int64_t rows, int64_t cols, int k, int32_t* index,
           float* value) {
  if (k < 1 || k > cols) {
    throw std::invalid_argument("top_k: k is " + std::to_string(k) + ", expected 1 to " +
                                std::to_string(cols));
  }
  const auto larger = [](float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; };
  for_rows(rows, cols * 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* from = x + row * x_stride;
      int32_t* best = index + row * k;
      int held = 0;
      for (int64_t c = 0; c < cols; ++c) {
        if (held == k && !larger(from[c], from[best[k - 1]])) continue;
        int place = held < k ? held++ : k - 1;
        for (; place > 0 && larger(from[c], from[best[place - 1]]); --place)
          best[place] = best[place - 1];
        best[place] = static_cast<int32_t>(c);
      }
      if (value != nullptr) {
        for (int j = 0; j < k; ++j) value[row * k + j] = from[best[j]];
      }
    }
  });
}

void combine_experts(const ExpertGroups& groups, const float* slot_output, int64_t cols, float* y,
                     int64_t y_stride, int64_t tokens, WeightType activation, bool add) {
  if (tokens == 0) return;
  if (tokens < 0 || groups.slots.size() % static_cast<size_t>(tokens) != 0) {
    throw std::invalid_argument("combine_experts: " + std::to_string(groups.slots.size()) +
                                " slots for " + std::to_string(tokens) + " tokens");
  }
  const auto choices = static_cast<int64_t>(groups.slots.size()) / tokens;
  const auto function = REPLAYEVAL_SIMD_CALL(combine_rows);
  for_rows(tokens, cols * choices, [&](int64_t first, int64_t last) {
    function(groups.slots.data(), groups.weights.data(), slot_output, cols, choices, {y, y_stride},
             first, last, activation, add);
  });
}

}  // namespace replayeval
