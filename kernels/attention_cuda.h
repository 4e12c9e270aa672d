// Causal attention on the device in the one order of kernels/attention.h, over keys and values that
// lie contiguously: bits depend on a query's absolute position alone and are the host's on hardware
// with fused multiply-add (a NaN is a NaN).
#pragma once

#include <cstdint>
#include <span>

#include "kernels/attention.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// Queries of one row: token t of the call at absolute position position + t attends to positions 0
/// .. position + t. k, v [positions, kv_heads, head_dim] contiguous, elements as `type`, hold at
/// least position + tokens positions. q [heads, head_dim] a token at q + t * q_stride; out
/// likewise; out may be q itself when the strides are equal. Pointers are device memory.
struct AttentionRowCuda {
  const void* k = nullptr;
  const void* v = nullptr;
  KvType type = KvType::fp32;
  int64_t position = 0;
  int64_t tokens = 0;
  const float* q = nullptr;
  int64_t q_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};

/// Largest head_dim of attention_cuda.
constexpr int kMaxAttentionDim = 256;

/// attention on the device; rows may be ragged (tokens 0 allowed) and of different types, and are
/// read on the host before the call returns. One launch for each 64 rows of a type. Rows of up to
/// 16 queries a KV head (single tokens) take two: their scores, then a walk over the pages; scores
/// need 64 bytes a row, KV head and position, taken from the device in stream order, at most about
/// 512 MiB or one row at a time. Throws std::invalid_argument on a shape mismatch or head_dim
/// outside 1
/// .. 256, std::runtime_error for errors of the device.
void attention_cuda(std::span<const AttentionRowCuda> rows, int heads, int kv_heads, int head_dim,
                    float scale, CudaStream stream = nullptr);

/// Writes `tokens` keys and values of `width` = kv_heads * head_dim numbers, token t at k + t *
/// k_stride, to k_out and v_out [tokens, width] contiguous (the caches' place of the first token).
/// KvType::bf16 rounds to nearest even. k_out, v_out must not overlap k, v.
void append_kv_cuda(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                    int64_t tokens, int64_t width, void* k_out, void* v_out, KvType type,
                    CudaStream stream = nullptr);

}  // namespace replayeval
