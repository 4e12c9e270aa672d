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

/// One token of every row. x [channels] a row; state [rows, taps - 1, channels], the inputs before
/// it, oldest first (zeros at the start of a sequence), which move on by one in place. The parts
/// cover the channels. Rows whose position is below 0 are left alone.
struct ConvDecodeStep {
  int rows = 0;
  const int64_t* position = nullptr;  // [rows]; null: every row takes part
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* state = nullptr;
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

/// The binary logarithm of a GDN step's decay, -(a_exp[h] a[r, h]) log2(e), from an activated
/// projection a (softplus) [rows, heads] contiguous: the first half of gdn_scalars_cuda, which may
/// be in place. a_exp [heads].
void gdn_decay_cuda(const float* a, const float* a_exp, int64_t rows, int heads, float* decay_log2,
                    CudaStream stream = nullptr);

/// n records as FP32 (exact). Narrowing is narrow_cuda.
void widen_records_cuda(RecordType type, const void* x, int64_t n, float* out,
                        CudaStream stream = nullptr);

/// Greedy choose_token (harness/sampling.h) for every row of logits [rows, vocabulary]: token[r]
/// the lowest id among the largest, -1 when every logit is NaN or -inf; margin[r] (may be null) the
/// largest minus the second largest, NaN when fewer than two are finite or one is infinite. NaN
/// logits are passed over.
void choose_greedy_cuda(const float* logits, int64_t stride, int rows, int64_t vocabulary,
                        int32_t* token, float* margin, CudaStream stream = nullptr);

}  // namespace replayeval
