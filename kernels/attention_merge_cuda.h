// Attention over parts of the past, merged by their log-sum-exp on the device.
#pragma once

#include <cstdint>
#include <span>

#include "quant/cuda_support.h"

namespace replayeval {

/// Attention of the same queries over one part of the keys: out [tokens, heads, head_dim] BF16,
/// token t of head h at out + t * token_stride + h * head_stride (elements); lse [heads, tokens]
/// FP32, the natural logarithm of the part's sum of exp(scale q.k). Device memory.
struct AttentionPart {
  const void* out = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  const float* lse = nullptr;
};

/// Parts of one merge.
constexpr int kMostAttentionParts = 24;

/// y[t, h, :] = sum over parts of w out / sum of w, w = exp(lse - largest lse): attention over the
/// union of the parts. y [tokens, heads * head_dim] FP32 with y_stride, head_dim a multiple of 4.
/// Sums are FP32 in the order of the parts; a NaN in a part's lse or out gives NaN. Throws
/// std::invalid_argument beyond kMostAttentionParts or without a part.
void merge_attention_cuda(std::span<const AttentionPart> parts, int64_t tokens, int heads,
                          int head_dim, float* y, int64_t y_stride, CudaStream stream = nullptr);

}  // namespace replayeval
