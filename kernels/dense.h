// Dense products in one fixed order (DESIGN.md section 2, level iii): every output row is
// bit-identical whatever rows are computed beside it. Also conversions between FP32 and the 16-bit
// types that weights and activations are stored in.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace replayeval {

enum class WeightType : uint8_t { fp32, bf16, fp16 };

/// Bytes of one element.
constexpr int64_t weight_bytes(WeightType type) { return type == WeightType::fp32 ? 4 : 2; }

/// A weight matrix [rows, cols] = [out, in], `in` contiguous, `stride` elements between rows. The
/// memory (usually a mapped file, of any alignment) belongs to the caller and is never copied
/// whole: tiles are widened while they are packed.
struct WeightView {
  const void* data = nullptr;
  WeightType type = WeightType::fp32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
};

/// Rows [first, first + count) of a weight matrix, without copying. Throws std::invalid_argument
/// outside the matrix.
WeightView row_slice(const WeightView& w, int64_t first, int64_t count);

/// One product for `linear`: y[i, r] = sum_c x[row(i), c] w[r, c] + bias[r], i < m, row(i) = x_rows
/// ? x_rows[i] : i. x [*, w.cols] with x_stride; y [m, w.rows] with y_stride; bias [w.rows] FP32 or
/// null. y must not overlap x.
struct LinearJob {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [m] rows to gather; null: rows 0 .. m - 1
  int64_t m = 0;
  WeightView w;
  const float* bias = nullptr;
  float* y = nullptr;
  int64_t y_stride = 0;
};

/// y[i, r] = sum_c x[i, c] w[r, c] + bias[r] for i < m. Each sum starts at +0 and takes c = 0, 1,
/// 2, ... in turn, one FP32 fused multiply-add a step (multiply, then add, where the instruction
/// set has none); then the bias is added. So a row's bits do not depend on m, on the other rows, on
/// strides or on the number of threads; |error| <= gamma_cols sum_c |x w|. NaN and inf follow IEEE
/// arithmetic and stay in their row. Throws std::invalid_argument on a shape or stride mismatch.
void linear(const float* x, int64_t m, int64_t x_stride, const WeightView& w, const float* bias,
            float* y, int64_t y_stride);

/// Several independent products in one parallel region: the experts of a mixture, or projections
/// that share an input. Each output has the bits that `linear` gives it. Outputs must not overlap.
void linear(std::span<const LinearJob> jobs);

/// FP64 reference of `linear`: the equation, one element at a time, rounded once to FP32.
void linear_reference(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                      const float* bias, float* y, int64_t y_stride);

/// Tokens grouped by expert. Slot s (offsets[e] <= s < offsets[e + 1] for expert e) computes token
/// rows[s]; within an expert tokens ascend. slots[t * k + j] is the j-th slot of token t, in
/// ascending order of expert id.
struct ExpertGroups {
  std::vector<int32_t> offsets;  // [experts + 1]
  std::vector<int32_t> rows;     // [tokens * k]
  std::vector<int32_t> slots;    // [tokens, k]
  std::vector<float> weights;    // [tokens, k], in the order of `slots`
};

/// Groups the choices of a router: chosen [tokens, k] expert ids (distinct within a token), weights
/// [tokens, k]. Throws std::invalid_argument on an id outside [0, experts). A mixture of experts is
/// then: linear() over one job an expert with a non-empty group (x_rows = rows + offsets[e], y = up
/// + offsets[e] * m), the activation, linear() over the down projections (slots are contiguous, no
/// x_rows), and combine_experts().
ExpertGroups group_by_expert(const int32_t* chosen, const float* weights, int64_t tokens, int k,
                             int experts);

/// y[t, :] = sum_j weight[t, j] * slot_output[slots[t, j], :], j in ascending order of expert id,
/// one fused multiply-add a term (a 16-bit `activation`: product and sum each rounded to it).
/// slot_output [slots, cols] contiguous; y [tokens, cols] with y_stride. `add` adds to y instead of
/// starting at 0. Throws std::invalid_argument when the groups are not of `tokens` tokens.
void combine_experts(const ExpertGroups& groups, const float* slot_output, int64_t cols, float* y,
                     int64_t y_stride, int64_t tokens, WeightType activation = WeightType::fp32,
                     bool add = false);

/// Row `row` of a weight matrix as FP32 (exact): out [w.cols]. Throws std::invalid_argument outside
/// the matrix.
void widen(const WeightView& w, int64_t row, float* out);
/// n contiguous elements as FP32 (exact; NaN stays NaN).
void widen(const void* data, WeightType type, int64_t n, float* out);
/// n values rounded to the type, ties to even; overflow gives inf, NaN a quiet NaN, subnormals are
/// kept.
void narrow(const float* x, int64_t n, WeightType type, void* out);

/// One value each way, as `widen` and `narrow`.
float bf16_to_fp32(uint16_t code);
uint16_t fp32_to_bf16(float value);
float fp16_to_fp32(uint16_t code);
uint16_t fp32_to_fp16(float value);

}  // namespace replayeval
