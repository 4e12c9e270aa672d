// Norms, activations, rotary embedding, expert sums and copies on the device: the contract of
// kernels/elementwise.h and kernels/dense.h, sum for sum and rounding for rounding, so that the
// bits are the host's on hardware with fused multiply-add (a NaN is a NaN, its payload is not
// fixed). Every array is device memory, unless said otherwise; the work is queued in `stream`. All
// functions throw std::invalid_argument as the host's and std::runtime_error for errors of the
// device.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/copy_job.h"
#include "kernels/elementwise.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// rms_norm; norm.weight is device memory. y may be x or gate.
void rms_norm_cuda(const RmsNorm& norm, const float* x, int64_t x_stride, const float* gate,
                   int64_t gate_stride, float* y, int64_t y_stride, int64_t rows, int64_t cols,
                   CudaStream stream = nullptr);

/// activate; y may be x.
void activate_cuda(Activation f, const float* x, int64_t x_stride, const float* bias, float* y,
                   int64_t y_stride, int64_t rows, int64_t cols,
                   WeightType activation = WeightType::fp32, CudaStream stream = nullptr);

/// activate_multiply; y may be gate or up.
void activate_multiply_cuda(Activation f, const float* gate, int64_t gate_stride, float gate_scale,
                            const float* up, int64_t up_stride, float* y, int64_t y_stride,
                            int64_t rows, int64_t cols, WeightType activation = WeightType::fp32,
                            CudaStream stream = nullptr);

/// add_scaled.
void add_scaled_cuda(float* y, int64_t y_stride, const float* x, int64_t x_stride, float multiplier,
                     int64_t rows, int64_t cols, WeightType activation = WeightType::fp32,
                     CudaStream stream = nullptr);
/// add_row_scaled; row_scale [rows].
void add_row_scaled_cuda(float* y, int64_t y_stride, const float* x, int64_t x_stride,
                         const float* row_scale, int64_t rows, int64_t cols,
                         WeightType activation = WeightType::fp32, CudaStream stream = nullptr);
/// scale; column [cols] or null.
void scale_cuda(float* x, int64_t stride, float factor, const float* column, int64_t rows,
                int64_t cols, WeightType activation = WeightType::fp32,
                CudaStream stream = nullptr);

// The same for arrays of BF16 codes, which hold every number that a function of activation type
// BF16 gives; strides are in elements. Throw std::invalid_argument for another activation type.
void rms_norm_cuda(const RmsNorm& norm, const uint16_t* x, int64_t x_stride, const uint16_t* gate,
                   int64_t gate_stride, uint16_t* y, int64_t y_stride, int64_t rows, int64_t cols,
                   CudaStream stream = nullptr);
/// From codes to FP32, without a gate.
void rms_norm_cuda(const RmsNorm& norm, const uint16_t* x, int64_t x_stride, float* y,
                   int64_t y_stride, int64_t rows, int64_t cols, CudaStream stream = nullptr);
void activate_cuda(Activation f, const uint16_t* x, int64_t x_stride, const float* bias,
                   uint16_t* y, int64_t y_stride, int64_t rows, int64_t cols, WeightType activation,
                   CudaStream stream = nullptr);
void activate_multiply_cuda(Activation f, const uint16_t* gate, int64_t gate_stride,
                            float gate_scale, const uint16_t* up, int64_t up_stride, uint16_t* y,
                            int64_t y_stride, int64_t rows, int64_t cols, WeightType activation,
                            CudaStream stream = nullptr);
void add_scaled_cuda(uint16_t* y, int64_t y_stride, const uint16_t* x, int64_t x_stride,
                     float multiplier, int64_t rows, int64_t cols, WeightType activation,
                     CudaStream stream = nullptr);
void scale_cuda(uint16_t* x, int64_t stride, float factor, const float* column, int64_t rows,
                int64_t cols, WeightType activation, CudaStream stream = nullptr);

/// A branch's output joins the residual stream, and the next block's norm follows: add_scaled of
/// `added` to `residual` with multiplier 1 and `residual_type` (FP32 or the activation type), then
/// y = rms_norm(residual). All [rows, cols] contiguous; added null: nothing is added. T is float
/// for the activation type FP32, uint16_t (BF16 codes) for BF16.
template <class T>
void add_rms_norm_cuda(const RmsNorm& norm, WeightType residual_type, float* residual,
                       const T* added, T* y, int64_t rows, int64_t cols,
                       CudaStream stream = nullptr);

/// round_to: n values rounded to the type, kept as FP32.
void round_to_cuda(WeightType type, float* x, int64_t n, CudaStream stream = nullptr);

/// x[i] = min(max(x[i], low), high) for n values; NaN stays.
void clamp_cuda(float* x, int64_t n, float low, float high, CudaStream stream = nullptr);

/// rotary_apply; cos, sin [n, dims / 2] as rotary_tables makes them.
void rotary_apply_cuda(float* x, int64_t stride, int64_t n, int heads, int head_dim, int dims,
                       const float* cos, const float* sin, WeightType activation = WeightType::fp32,
                       CudaStream stream = nullptr);

/// softmax; y may be x.
void softmax_cuda(const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows,
                  int64_t cols, CudaStream stream = nullptr);

/// combine_experts: y[t, :] = sum_j weights[t, j] * slot_output[slots[t, j], :], j < choices in
/// turn. slots, weights [tokens, choices] are those of ExpertGroups, copied to the device;
/// slot_output [slots, cols] contiguous; y [tokens, cols].
void combine_experts_cuda(const int32_t* slots, const float* weights, int choices,
                          const float* slot_output, int64_t cols, float* y, int64_t y_stride,
                          int64_t tokens, WeightType activation = WeightType::fp32,
                          bool add = false, CudaStream stream = nullptr);

/// out[i, :] = w[ids[i], :] as FP32 (exact), i < n: rows of an embedding. w.data and ids [n] are
/// device memory, out [n, w.cols] contiguous. The caller checks that 0 <= ids[i] < w.rows.
void widen_rows_cuda(const WeightView& w, const int32_t* ids, int64_t n, float* out,
                     CudaStream stream = nullptr);

/// narrow: x [rows, cols] with x_stride, rounded to the type (to nearest even; overflow gives inf,
/// NaN a quiet NaN), into out [rows, cols] contiguous.
void narrow_cuda(const float* x, int64_t x_stride, int64_t rows, int64_t cols, WeightType type,
                 void* out, CudaStream stream = nullptr);

/// widen: x [rows, cols] of the type with x_stride (elements) to FP32 (exact), out [rows, cols]
/// contiguous.
void widen_cuda(WeightType type, const void* x, int64_t x_stride, int64_t rows, int64_t cols,
                float* out, CudaStream stream = nullptr);

/// All jobs, in any order, a launch for each 128 of them; `to` and `from` of a job must not
/// overlap. Throws std::invalid_argument for negative sizes.
void copy_cuda(std::span<const CopyJob> jobs, CudaStream stream = nullptr);

/// The two scalars of a GDN step from activated projections a (softplus) and b (sigmoid), both
/// [tokens, heads] contiguous: scalars [tokens, 2 heads] = -(a_exp[h] a[t, h]) log2(e), the binary
/// logarithm of the decay, then b[t, h]. a_exp [heads].
void gdn_scalars_cuda(const float* a, const float* b, const float* a_exp, int64_t tokens, int heads,
                      float* scalars, CudaStream stream = nullptr);

/// sums[h] += sum over t < tokens of 2^(scalars[t * stride + h] * factor[h]), factor null: 1; FP32
/// powers, FP64 sums in a fixed order. For a run's mean decay, a figure of the report: the device's
/// exp2f is within 2 ulp of the host's and the order is another, so the sums are close to the
/// host's, not equal. factor [heads], sums [heads].
void decay_sum_cuda(const float* scalars, int64_t stride, const float* factor, int64_t tokens,
                    int heads, double* sums, CudaStream stream = nullptr);

}  // namespace replayeval
