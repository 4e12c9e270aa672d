// Interface between mamba2.cc and the per-instruction-set code in mamba2_simd.cc: plain structs and
// pointers.
#pragma once

#include <cstdint>

#include "base/simd_dispatch.h"

namespace replayeval {

/// One span of one head. Pointers address the span's first record (x, dt, b) or its first query (c,
/// y, gram).
struct Mamba2Span {
  int head_dim = 0;
  int state_dim = 0;
  int records = 0;
  int queries = 0;        // the last `queries` records are read out
  bool flush = false;     // fold the records into `state`
  bool read_new = false;  // the last query reads the folded state
  bool check_finite = false;
  int operand_bits = 23;  // mantissa bits of the fold's operands: 23, 10 (tf32), 7 (bf16)
  float decay_log2 = 0;
  float skip = 0;
  bool has_skip = false;
  const float* x = nullptr;
  int64_t x_stride = 0;
  const float* dt = nullptr;
  int64_t dt_stride = 0;
  const float* b = nullptr;
  int64_t b_stride = 0;
  const float* c = nullptr;
  int64_t c_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* gram = nullptr;        // [queries, gram_stride]: B_j . C_t at t * gram_stride + j
  int64_t gram_stride = 0;            // a multiple of 16, at least `records`
  const float* read_state = nullptr;  // [head_dim, state_dim]; unused without window reads
  bool read_far = false;              // read_state is a checkpoint in memory, not yet in a cache
  float* state = nullptr;             // [head_dim, state_dim]; unused without flush
  float* scratch = nullptr;           // mamba2_scratch_floats
};

/// Floats of scratch that mamba2_span needs.
int64_t mamba2_scratch_floats(int head_dim, int state_dim);

/// gram[t * gram_stride + j] = B_j . C_t for the last `queries` of `records`, j up to t's own
/// record.
REPLAYEVAL_SIMD_DECLARE(void mamba2_gram(const float* b, int64_t b_stride, const float* c,
                                         int64_t c_stride, int state_dim, int records, int queries,
                                         float* gram, int64_t gram_stride))

/// Outputs and fold of a span; true when `check_finite` is set and every element of the folded
/// state is finite.
REPLAYEVAL_SIMD_DECLARE(bool mamba2_span(const Mamba2Span& span))

}  // namespace replayeval
