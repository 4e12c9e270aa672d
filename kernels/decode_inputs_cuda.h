// What single-token decoding needs around its state kernels and attention: inputs, lengths and
// positions are read on the device and every call takes the same pointers, so that a step can be
// captured in a graph. The arithmetic is that of the functions over tokens, bit for bit (a NaN is a
// NaN). Pointers are device memory, work is queued in `stream`; nothing is allocated, uploaded or
// waited for. All functions throw std::invalid_argument on a shape mismatch and std::runtime_error
// for errors of the device.
#pragma once

#include <cstdint>

#include "kernels/causal_conv.h"
#include "kernels/dense.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// A part of the channels in turn: to [rows, channels] contiguous, elements as the step's type.
struct ConvPart {
  void* to = nullptr;
  int channels = 0;
};

/// One token of every row. x [channels] a row and state [rows, taps - 1, channels] of x_type, the
/// inputs before it, oldest first (zeros at the start of a sequence), which move on by one in
/// place. The parts cover the channels. Rows whose position is below 0 are left alone.
struct ConvDecodeStep {
  int rows = 0;
  const int64_t* position = nullptr;  // [rows]; null: every row takes part
  const void* x = nullptr;
  int64_t x_stride = 0;  // elements
  RecordType x_type = RecordType::fp32;
  void* state = nullptr;
  RecordType type = RecordType::bf16;  // of the parts: FP32, or BF16 rounded to nearest even
  ConvPart parts[3];                   // unused ones have no channels
};

/// causal_conv_cuda of one token a row, then round_to and the split into parts.
void conv_decode_cuda(const CausalConv& conv, const ConvDecodeStep& step,
                      CudaStream stream = nullptr);

/// rotary_apply_cuda of one token a row, x [heads, head_dim] at x + r * stride, with row
/// position[r] of the tables: cos, sin [positions, dims / 2] as rotary_tables makes them. Rows
/// whose position is below 0 are left alone. The caller checks that the tables are long enough.
void rotary_decode_cuda(float* x, int64_t stride, int rows, int heads, int head_dim, int dims,
                        const float* cos, const float* sin, const int64_t* position,
                        WeightType activation = WeightType::fp32, CudaStream stream = nullptr);

/// Time steps of one token a row, dt [rows, heads]: softplus(x[r, h] + bias[h]) as activate_cuda
/// with activation type `activation` (FP32 or BF16, x in that type: floats or codes), then clamped
/// to low .. high as clamp_cuda.
void mamba2_steps_cuda(WeightType activation, const void* x, int64_t x_stride, const float* bias,
                       float low, float high, int rows, int heads, float* dt,
                       CudaStream stream = nullptr);

/// Scalars of one GDN step a row from the projections a and b [heads], both `stride` elements a row
/// in `activation` (FP32 or BF16 codes): beta [rows, heads] = sigmoid(b), decay_log2 [rows, heads]
/// = -(a_exp[h] softplus(a + bias[h])) log2(e), all in FP32 as activate_cuda and gdn_scalars_cuda.
struct GdnStepScalars {
  WeightType activation = WeightType::fp32;
  const void* a = nullptr;
  const void* b = nullptr;
  int64_t stride = 0;
  const float* bias = nullptr;
  const float* a_exp = nullptr;
};
void gdn_steps_cuda(const GdnStepScalars& inputs, int rows, int heads, float* decay_log2,
                    float* beta, CudaStream stream = nullptr);

/// Greedy choose_token (harness/sampling.h) for every row of logits [rows, vocabulary]: token[r]
/// the lowest id among the largest, -1 when every logit is NaN or -inf; margin[r] (may be null) the
/// largest minus the second largest, NaN when fewer than two are finite or one is infinite. NaN
/// logits are passed over.
void choose_greedy_cuda(const float* logits, int64_t stride, int rows, int64_t vocabulary,
                        int32_t* token, float* margin, CudaStream stream = nullptr);

}  // namespace replayeval
