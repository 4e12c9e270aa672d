// Vector kernels of GDN and KDA (kernels/gdn_simd.cc), compiled once per instruction-set level.
// Working copies of a state are transposed to [state_dim, head_dim] and padded to whole vectors
// along head_dim, so that no sum crosses lanes: every element is summed alone, with one fused
// multiply-add a term, in ascending order of n or j.
#pragma once

#include <cstdint>

#include "base/simd_dispatch.h"
#include "kernels/state_row.h"

namespace replayeval {

constexpr int kGdnLanes = 16;
constexpr int padded_to_lanes(int n) { return (n + kGdnLanes - 1) / kGdnLanes * kGdnLanes; }

/// One value head's corrections and outputs of the tokens [first, last) of a window (row t of every
/// array is record t; rows of v, u, o and the reads have `value_stride` floats, a multiple of 16):
///   u_t = beta_t (v_t - carried_t read_k_t - sum_{j<t} key_weights[t][j] u_j)
///   o_t = carried_t read_q_t + sum_{j<t} query_weights[t][j] u_j + query_weights[t][t] u_t
/// u holds the corrections of records < first; with `round_u` each u_t is stored rounded to BF16
/// after its own output.
struct GdnCorrection {
  int first = 0;
  int last = 0;
  int64_t value_stride = 0;
  int64_t weight_stride = 0;
  const float* key_weights = nullptr;
  const float* query_weights = nullptr;  // null: no outputs
  const float* carried = nullptr;        // null: 1 (the reads are decayed already)
  const float* beta = nullptr;
  const float* v = nullptr;
  const float* read_k = nullptr;
  const float* read_q = nullptr;
  float* u = nullptr;
  float* o = nullptr;
  bool round_u = false;
};

/// Scalar decays of a window of n records: carried[t] = 2^(g_0 + .. + g_t), weights[t][j] =
/// 2^(g_{j+1} + .. + g_t) for the rows t >= first (each exponent is summed from its own record's
/// start; entries j > t are undefined). key_weights = weights * key_dots; query_weights = weights *
/// query_dots for t >= first_query. `exponents` [2, weight_stride] is scratch.
struct GdnScalarDecay {
  int first = 0;
  int first_query = 0;
  int records = 0;
  int64_t weight_stride = 0;
  const float* g = nullptr;
  const float* key_dots = nullptr;
  const float* query_dots = nullptr;
  float* exponents = nullptr;
  float* carried = nullptr;
  float* weights = nullptr;
  float* key_weights = nullptr;
  float* query_weights = nullptr;
};

/// Channel decays (KDA). decayed_keys [key_dim, weight_stride] ends as k_j[n] a_{j+1}[n] .. a_t[n]
/// of the last record t, carried [key_dim] as a_0 .. a_t; a row t >= first writes carried o k_t and
/// the weights sum_n decayed_keys[n][j] k_t[n] (j < t), a row t >= first_query carried o q_t and
/// sum_n decayed_keys[n][j] q_t[n] (j <= t) too. Decays are only multiplied, one step after the
/// other, so nothing overflows or is divided.
struct GdnChannelDecay {
  int first = 0;
  int first_query = 0;
  int records = 0;
  int key_dim = 0;
  int64_t weight_stride = 0;
  int64_t key_stride = 0;
  const float* g = nullptr;  // [records, key_dim] with g_stride
  int64_t g_stride = 0;
  const float* k = nullptr;
  const float* q = nullptr;
  DotType dot = DotType::fp32;  // operands of the weights, and carried_k, are rounded
  float* step = nullptr;        // [key_stride] scratch
  float* carried = nullptr;     // [key_stride]
  float* decayed_keys = nullptr;
  float* carried_k = nullptr;  // [records, key_stride]
  float* carried_q = nullptr;
  float* key_weights = nullptr;
  float* query_weights = nullptr;
};

REPLAYEVAL_SIMD_DECLARE(
    /* out[i][c] = initial + sum_{m < depth} x[i][m] y[m][c] for c < 16 vectors; initial = scale[i
       scale_step] out[i][c], or 0 with scale null */
    void gdn_multiply(int rows, int depth, int vectors, const float* x, int64_t x_stride,
                      const float* y, int64_t y_stride, const float* scale, int scale_step,
                      float* out, int64_t out_stride);
    /* out[t] = x[t] * (scale / sqrt(sum x[t]^2 + 1e-6)), zero padded to out_stride */
    void gdn_normalise(int rows, int dim, float scale, const float* x, int64_t x_stride, float* out,
                       int64_t out_stride);
    /* out [columns, out_stride] = in [rows, columns]^T, columns of out past `rows` are zero;
       says whether every element is finite */
    bool gdn_transpose(int rows, int columns, const float* in, int64_t in_stride, float* out,
                       int64_t out_stride);
    /* out[i] = S x[i], i < count (1 or 2), S [rows, columns] as it lies: no transposed copy of it;
       each sum ascends from 0. out[i] is padded to whole vectors. */
    void gdn_read(int rows, int columns, const float* state, int count, const float* const* x,
                  float* const* out);
    /* S = carried S + sum_j u_j k_j^T for S [rows, columns] as it lies, j ascending; says whether
       every element is finite */
    bool gdn_fold(int rows, int columns, int records, float carried, const float* u,
                  int64_t u_stride, const float* k, int64_t k_stride, float* state);
    void gdn_round(DotType type, int64_t count, const float* in, float* out);
    void gdn_scalar_decay(const GdnScalarDecay& window);
    void gdn_channel_decay(const GdnChannelDecay& window);
    void gdn_correct(const GdnCorrection& window))

}  // namespace replayeval
