// Mamba-2 state update and read-out by replay of a window of inputs (ReplaySSM section 5.2,
// DESIGN.md section 1):
//   S_t = 2^(dt_t a) S_{t-1} + (dt_t x_t) B_t^T,   y_t = S_t C_t + D x_t,   a = A log2(e), A < 0
//   one number a head.
#pragma once

#include <span>

#include "kernels/state_row.h"

namespace replayeval {

/// Constants of a layer. Head h reads B and C of group h / (heads / groups). `layer` and
/// `head_offset` enter the random key.
struct Mamba2Layer {
  int heads = 0;
  int groups = 0;
  int head_dim = 0;
  int state_dim = 0;
  int layer = 0;
  int head_offset = 0;
  const float* decay_log2 = nullptr;  // [heads], A log2(e)
  const float* skip = nullptr;        // [heads], D; null: none
};

/// Records and queries of one row for one call. Pointers address the call's first token; the max
/// over plans of `pending` earlier records stand before it with the same strides (token t at x + t
/// * x_stride, t = -pending .. tokens - 1). x, B, C are already rounded to the activation type.
/// Output y [tokens, heads, head_dim] with stride y_stride.
struct Mamba2Inputs {
  int tokens = 0;
  const float* x = nullptr;  // [heads, head_dim] a token
  int64_t x_stride = 0;
  const float* dt = nullptr;  // [heads] a token, after softplus and clamp
  int64_t dt_stride = 0;
  const float* b = nullptr;  // [groups, state_dim] a token
  int64_t b_stride = 0;
  const float* c = nullptr;  // [groups, state_dim] a token; only the call's tokens are read
  int64_t c_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
};

/// Walks inputs[i].tokens tokens of rows[i], window by window. Row lengths may differ (ragged; 0 is
/// allowed). Results are bit-equal for any split of the tokens into calls, any set and order of
/// rows, and any number of threads, because every sum has one order (fast form; g_i = dt_i a,
/// D(j,t) = ((g_{j+1} + g_{j+2}) + ...) + g_t from each record's own start, exp2 of
/// kernels/lanes.h, fma where the hardware has it):
/// - dot over n: lane l adds n = l, l + 16, ... from 0, then lanes i and i + 8, i + 4, i + 2, i +
/// 1;
/// - y_t = 2^D(0,t) (Sc . C_t), + ((2^D(j,t) dt_j) (B_j . C_t)) x_j for j = 1 .. t, + D x_t;
/// - S_new = 2^D(0,L) S, + ((2^D(j,L) dt_j) x_j) B_j for j = 1 .. L; with `dot` other than fp32 the
///   operands are round(x_j) and round((2^D(j,L) dt_j) B_j), ties to even;
/// - y of a flush = S_new . C_t, + D x_t.
///
/// A ring that verify and commits left with `window` or more records is folded before the first
/// token. NaN and infinity propagate. The reference form does the same in FP64, token by token.
/// Arrays that start on a cache line (kernels/aligned.h), with strides that are multiples of 16,
/// are fastest. Throws std::invalid_argument on a shape mismatch, before anything is changed.
void mamba2_advance(const Mamba2Layer& layer, std::span<StateRow> rows,
                    std::span<const Mamba2Inputs> inputs, AdvanceMode mode, KernelForm form);

/// Folds the pending records of every plan into its checkpoint now (prompt hand-over), encoding at
/// position row.position - 1; pending becomes 0. inputs.tokens is ignored, only the earlier records
/// are read. A plan without pending records keeps its checkpoint as it is (encoding a decoded state
/// again might change it).
void mamba2_flush(const Mamba2Layer& layer, std::span<StateRow> rows,
                  std::span<const Mamba2Inputs> inputs, KernelForm form);

}  // namespace replayeval
