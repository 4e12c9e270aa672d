// Inner part of attention (kernels/attention.h), called through base/simd_dispatch.h.
#pragma once

#include "base/simd_dispatch.h"
#include "kernels/attention.h"

namespace replayeval {

/// A block of queries that share a KV head: tokens [first, first + tokens) of `row`, query heads
/// [kv_head * group, (kv_head + 1) * group).
struct AttentionBlock {
  const AttentionRow* row = nullptr;
  int kv_head = 0;
  int group = 1;
  int64_t first = 0;
  int64_t tokens = 0;
  float scale = 1;
};

constexpr int64_t kQueryDepth = 256;  // input columns of one pass of a score tile

/// Floats of scratch that attention_block needs for `queries` = tokens * group.
constexpr int64_t attention_scratch(int64_t queries, int64_t head_dim, int64_t padded_dim) {
  const int64_t passes = (head_dim + kQueryDepth - 1) / kQueryDepth;
  return queries * (passes * (kQueryDepth + 16) + padded_dim + 17) +
         kKvPage * (head_dim + padded_dim) + 2048;
}

REPLAYEVAL_SIMD_DECLARE(void attention_block(const AttentionBlock& block, float* scratch))

}  // namespace replayeval
