// Norms, activations, rotary embedding and router functions of the model families, each row
// independent of the others and in a fixed order: sums take 16 lanes (lane i sums elements i, i +
// 16, ...) and then a tree (DESIGN.md section 2, iii). Where a function takes `activation`, a
// 16-bit type rounds (to nearest even) after each step the library rounds after; WeightType::fp32
// rounds nowhere. All functions run in parallel over rows or blocks; NaN and inf follow IEEE
// arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/dense.h"

namespace replayeval {

enum class GateOrder : uint8_t {
  none,
  gate_first,  // norm(x * silu(gate)): Mamba-2, Bamba, Granite, Nemotron-H, Falcon-H1 with
               // mamba_norm_before_gate false
  norm_first,  // norm(x) * silu(gate): GDN, Falcon-H1 with mamba_norm_before_gate true
  gate_only    // x * silu(gate), no norm: Falcon-H1 without mamba_rms_norm
};

/// An RMS norm over groups of `group` columns: y = w x / sqrt(mean(x^2) + eps), the mean over the
/// group.
struct RmsNorm {
  const float* weight = nullptr;  // [weight_size]; null only with gate_only
  int64_t weight_size = 0;  // the row's columns, or a divisor of it that repeats (GDN: one head)
  int64_t group = 0;        // columns that share a mean; 0: all
  float eps = 1e-6F;
  bool one_plus =
      false;  // weight means 1 + w, and the product is rounded only once, at the end (Qwen)
  GateOrder gate = GateOrder::none;
  WeightType activation = WeightType::fp32;
  bool round_normalized = true;  // 16-bit activation, plain weight: round x / rms before the
                                 // product with w (false: Falcon-H1)
};

/// x, gate, y [rows, cols] with strides; gate null without a gate. y may be x or gate.
/// Throws std::invalid_argument when group or weight_size does not divide cols, or a pointer is
/// missing.
void rms_norm(const RmsNorm& norm, const float* x, int64_t x_stride, const float* gate,
              int64_t gate_stride, float* y, int64_t y_stride, int64_t rows, int64_t cols);

enum class Activation : uint8_t {
  silu,     // x / (1 + e^-x)
  relu2,    // max(x, 0)^2
  sigmoid,  // 1 / (1 + e^-x)
  softplus  // x > 20 ? x : log(1 + e^x), accurate in both tails
};

/// y[i, c] = f(x[i, c] + bias[c]), each step rounded to `activation`. x, y [rows, cols] with
/// strides, y may be x; bias [cols] or null. Relative error of f at most 4 ulp of the rounded sum's
/// exact value, for every finite input whose result is a normal number.
void activate(Activation f, const float* x, int64_t x_stride, const float* bias, float* y,
              int64_t y_stride, int64_t rows, int64_t cols,
              WeightType activation = WeightType::fp32);

/// y[i, c] = f(gate_scale * gate[i, c]) * up[i, c], each step rounded to `activation`: the gated
/// MLP (silu), and attention output times sigmoid of its gate (up = attention output). Strides as
/// above; y may be gate or up.
void activate_multiply(Activation f, const float* gate, int64_t gate_stride, float gate_scale,
                       const float* up, int64_t up_stride, float* y, int64_t y_stride, int64_t rows,
                       int64_t cols, WeightType activation = WeightType::fp32);

/// The functions above for one value, with the same bits: routers, gates, and tests.
float activate(Activation f, float x);

/// y[i, c] += multiplier * x[i, c]: one fused multiply-add in FP32; product and sum each rounded
/// for a 16-bit `activation`.
void add_scaled(float* y, int64_t y_stride, const float* x, int64_t x_stride, float multiplier,
                int64_t rows, int64_t cols, WeightType activation = WeightType::fp32);
/// y[i, c] += row_scale[i] * x[i, c], likewise: a shared expert behind its gate.
void add_row_scaled(float* y, int64_t y_stride, const float* x, int64_t x_stride,
                    const float* row_scale, int64_t rows, int64_t cols,
                    WeightType activation = WeightType::fp32);
/// x[i, c] *= factor (* column[c] when not null), each step rounded to `activation`.
void scale(float* x, int64_t stride, float factor, const float* column, int64_t rows, int64_t cols,
           WeightType activation = WeightType::fp32);

/// Rounds n values to BF16 (to nearest even), kept as FP32: the activation type of BF16 models.
void round_to_bf16(float* x, int64_t n);
/// Likewise for any type; nothing for FP32.
void round_to(WeightType type, float* x, int64_t n);

/// y[i] = e^x[i], at most 2 ulp off for results >= 2^-126 (underflow below -87.34 gives 0,
/// above 88.73 inf; NaN stays).
void exp_values(const float* x, float* y, int64_t n);

/// inv_freq[i] = theta^(-2i / dims), i < dims / 2, in FP32. dims is even.
std::vector<float> rotary_inverse_frequencies(double theta, int dims);
/// cos and sin [n, inv_freq.size()] of position * inv_freq[i] (product in FP32), positions first ..
/// first + n - 1, rounded to `activation`.
void rotary_tables(std::span<const float> inv_freq, int64_t first, int64_t n, float* cos,
                   float* sin, WeightType activation = WeightType::fp32);
/// Rotates the first `dims` of each head ("rotate half"), in place: with x1, x2 the halves of the
/// dims, x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin. x [heads, head_dim] a token with stride;
/// cos, sin [n, dims / 2].
void rotary_apply(float* x, int64_t stride, int64_t n, int heads, int head_dim, int dims,
                  const float* cos, const float* sin, WeightType activation = WeightType::fp32);

/// y[i, :] = softmax(x[i, :]); y may be x. A NaN, or a row without a finite maximum, gives NaN in
/// that row.
void softmax(const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows,
             int64_t cols);

/// The k largest of each row, descending; equal values in ascending order of index, NaN counts as
/// largest. index, value [rows, k]; value may be null. Throws std::invalid_argument unless 1 <= k
/// <= cols.
void top_k(const float* x, int64_t x_stride, int64_t rows, int64_t cols, int k, int32_t* index,
           float* value);

}  // namespace replayeval
