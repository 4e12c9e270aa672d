// Window form of Mamba-2 (kernels/mamba2.h states the order of every sum). Compiled once per
// instruction-set level, without contraction: every fused multiply-add is written as fma.
#include "kernels/mamba2_simd.h"

#include "kernels/lanes.h"
#include "kernels/state_row.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {
namespace {

constexpr int kBlocks = kMaxWindow / kLanes;
#if defined(__AVX512F__)
constexpr int kQueryTile = 4;  // dot tile: 4 state rows by 4 queries in 16 registers
constexpr int kFoldRows = 4;   // fold tile: 4 state rows by 4 vectors
constexpr int kFoldVectors = 4;
#else
constexpr int kQueryTile = 1;
constexpr int kFoldRows = 2;
constexpr int kFoldVectors = 2;
#endif

REPLAYEVAL_INLINE int smaller(int a, int b) { return a < b ? a : b; }

/// Nearest value with `bits` mantissa bits, ties to even. Infinity and NaN stay.
REPLAYEVAL_INLINE float round_mantissa(float x, int bits) {
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  const int drop = 23 - bits;
  const uint32_t lsb = (u >> drop) & 1u;
  const uint32_t rounded = (u + ((1u << drop) / 2 - 1u) + lsb) & ~((1u << drop) - 1u);
  u = (u & 0x7F800000u) == 0x7F800000u ? u : rounded;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

/// Asks for what a walk through a checkpoint in memory reads soon: one page ahead, where the
/// machine does not look by itself.
REPLAYEVAL_INLINE void prefetch(const float* at) { __builtin_prefetch(at + 1024); }

/// Lane-wise partial sums of rows[i] . queries[k] over state_dim; result i + 4 k in acc. kFar: the
/// rows come from memory, one behind the other.
template <int kQueries, bool kFar = false>
REPLAYEVAL_INLINE void dot_tile(const float* const* rows, const float* const* queries, int n,
                                Lanes* acc) {
  Lanes sum[4 * kQueries];
  for (int i = 0; i < 4 * kQueries; ++i) sum[i] = splat(0.0f);
  const float *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    if (kFar) {
      for (int i = 0; i < 4; ++i) prefetch(rows[i] + k);
    }
    const Lanes a0 = load(r0 + k), a1 = load(r1 + k), a2 = load(r2 + k), a3 = load(r3 + k);
    for (int q = 0; q < kQueries; ++q) {
      const Lanes b = load(queries[q] + k);
      sum[4 * q] = fma(a0, b, sum[4 * q]);
      sum[4 * q + 1] = fma(a1, b, sum[4 * q + 1]);
      sum[4 * q + 2] = fma(a2, b, sum[4 * q + 2]);
      sum[4 * q + 3] = fma(a3, b, sum[4 * q + 3]);
    }
  }
  if (k < n) {
    const int rest = n - k;
    const Lanes a0 = load_part(r0 + k, rest), a1 = load_part(r1 + k, rest),
                a2 = load_part(r2 + k, rest), a3 = load_part(r3 + k, rest);
    for (int q = 0; q < kQueries; ++q) {
      const Lanes b = load_part(queries[q] + k, rest);
      sum[4 * q] = fma(a0, b, sum[4 * q]);
      sum[4 * q + 1] = fma(a1, b, sum[4 * q + 1]);
      sum[4 * q + 2] = fma(a2, b, sum[4 * q + 2]);
      sum[4 * q + 3] = fma(a3, b, sum[4 * q + 3]);
    }
  }
  for (int i = 0; i < 4 * kQueries; ++i) acc[i] = sum[i];
}

/// out[c * stride + r] = lane 4 c + r, for c < width and r < height.
REPLAYEVAL_INLINE void store_tile(Lanes sums, float* out, int64_t stride, int height, int width) {
  float lanes[kLanes];
  store(lanes, sums);
  if (height == 4) {
    for (int c = 0; c < width; ++c) __builtin_memcpy(out + c * stride, lanes + 4 * c, 16);
    return;
  }
  for (int c = 0; c < width; ++c) {
    for (int r = 0; r < height; ++r) out[c * stride + r] = lanes[4 * c + r];
  }
}

/// out[q * out_stride + m] = rows_m . queries_q. Each dot product: lane l sums n = l, l + 16, ...
/// in order by fma from 0, then the tree of sum_lanes. Rows and queries past the end repeat the
/// last one and are not stored. kFar as for dot_tile.
template <bool kFar = false>
void dot_rows(const float* rows, int64_t row_stride, int row_count, const float* queries,
              int64_t query_stride, int query_count, int n, float* out, int64_t out_stride) {
  int q = 0;
  // Four rows by four queries a tile while that many queries are left (three use a tile too),
  // sixteen rows by one query for the rest.
  if constexpr (kQueryTile == 4) {
    for (; query_count - q >= 3; q += 4) {
      const int width = smaller(4, query_count - q);
      const float* query[4];
      for (int i = 0; i < 4; ++i)
        query[i] = queries + smaller(q + i, query_count - 1) * query_stride;
      for (int m = 0; m < row_count; m += 4) {
        const float* row[4];
        for (int i = 0; i < 4; ++i) row[i] = rows + smaller(m + i, row_count - 1) * row_stride;
        Lanes partial[16], permuted[16];
        dot_tile<4>(row, query, n, partial);
        // partial[4 query + row]; sum_lanes puts v[4 r + c] in lane 4 c + r, so that lane 4 query +
        // row is wanted from v[4 row + query].
        for (int r = 0; r < 4; ++r) {
          for (int c = 0; c < 4; ++c) permuted[4 * r + c] = partial[4 * c + r];
        }
        store_tile(sum_lanes(permuted), out + q * out_stride + m, out_stride,
                   smaller(4, row_count - m), width);
      }
    }
  }
  for (; q < query_count; ++q) {
    const float* query = queries + q * query_stride;
    for (int m = 0; m < row_count; m += 16) {
      Lanes permuted[16];
      for (int c = 0; c < 4; ++c) {
        const float* row[4];
        for (int i = 0; i < 4; ++i) {
          row[i] = rows + smaller(m + 4 * c + i, row_count - 1) * row_stride;
        }
        Lanes partial[4];
        dot_tile<1, kFar>(row, &query, n, partial);
        for (int r = 0; r < 4; ++r) permuted[4 * r + c] = partial[r];
      }
      store_part(out + q * out_stride + m, sum_lanes(permuted), smaller(16, row_count - m));
    }
  }
}

/// state[i][k] = carry state[i][k] + sum_j u[j][i] v[j][k], j in order by fma, for kRows rows by
/// kVectors vectors, the last vector `count` wide. Adds 0 * result to `finite`, which is NaN
/// afterwards when a result is not finite; kCheck: that is wanted, and the state is a checkpoint in
/// memory.
template <int kRows, int kVectors, bool kCheck>
REPLAYEVAL_INLINE void fold_tile(float* state, int64_t stride, Lanes carry, const float* u,
                                 int64_t u_stride, const float* v, int64_t v_stride, int records,
                                 int count, Lanes* finite) {
  Lanes acc[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kVectors; ++k) {
      const float* p = state + i * stride + k * kLanes;
      if (kCheck) prefetch(p);
      acc[i][k] = carry * (kVectors == 1 ? load_part(p, count) : load(p));
    }
  }
  for (int j = 0; j < records; ++j) {
    Lanes b[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      const float* p = v + j * v_stride + k * kLanes;
      b[k] = kVectors == 1 ? load_part(p, count) : load(p);
    }
    for (int i = 0; i < kRows; ++i) {
      const Lanes w = splat(u[j * u_stride + i]);
      for (int k = 0; k < kVectors; ++k) acc[i][k] = fma(w, b[k], acc[i][k]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kVectors; ++k) {
      float* p = state + i * stride + k * kLanes;
      if (kVectors == 1) {
        store_part(p, acc[i][k], count);
      } else {
        store(p, acc[i][k]);
      }
      // An unused lane of a partial vector may be 0 * infinity; it is no element.
      if (kCheck) {
        const Lanes element = kVectors == 1 ? keep_first(acc[i][k], count) : acc[i][k];
        finite[k] = fma(element, splat(0.0f), finite[k]);
      }
    }
  }
}

template <int kRows, bool kCheck>
REPLAYEVAL_INLINE void fold_rows(float* state, int n, Lanes carry, const float* u, int64_t u_stride,
                                 const float* v, int64_t v_stride, int records, Lanes* finite) {
  int k = 0;
  for (; k + kFoldVectors * kLanes <= n; k += kFoldVectors * kLanes) {
    fold_tile<kRows, kFoldVectors, kCheck>(state + k, n, carry, u, u_stride, v + k, v_stride,
                                           records, kLanes, finite);
  }
  for (; k < n; k += kLanes) {
    fold_tile<kRows, 1, kCheck>(state + k, n, carry, u, u_stride, v + k, v_stride, records,
                                smaller(kLanes, n - k), finite);
  }
}

template <bool kCheck>
__attribute__((noinline)) bool fold(float* state, int head_dim, int n, float carry, const float* u,
                                    int64_t u_stride, const float* v, int64_t v_stride,
                                    int records) {
  Lanes finite[kFoldVectors];
  for (Lanes& f : finite) f = splat(0.0f);
  const Lanes a = splat(carry);
  int p = 0;
  for (; p + kFoldRows <= head_dim; p += kFoldRows) {
    fold_rows<kFoldRows, kCheck>(state + int64_t{p} * n, n, a, u + p, u_stride, v, v_stride,
                                 records, finite);
  }
  for (; p < head_dim; ++p) {
    fold_rows<1, kCheck>(state + int64_t{p} * n, n, a, u + p, u_stride, v, v_stride, records,
                         finite);
  }
  if (!kCheck) return false;
  float lanes[kLanes];
  for (const Lanes& f : finite) {
    store(lanes, f);
    for (float lane : lanes) {
      if (lane != 0.0f) return false;  // NaN
    }
  }
  return true;
}

/// y[p] = carry z[p] + sum_{j < terms} w[j] x_j[p] (j in order by fma), then + skip x_own[p], for
/// kVectors vectors from p on, the last `count` wide.
template <int kVectors>
REPLAYEVAL_INLINE void combine_tile(const Mamba2Span& s, const float* z, float carry,
                                    const float* w, int terms, const float* x_own, int count, int p,
                                    float* y) {
  const auto take = [count](const float* from) {
    return kVectors == 1 ? load_part(from, count) : load(from);
  };
  Lanes acc[kVectors];
  for (int k = 0; k < kVectors; ++k) acc[k] = splat(carry) * take(z + p + k * kLanes);
  for (int j = 0; j < terms; ++j) {
    const Lanes weight = splat(w[j]);
    const float* x = s.x + j * s.x_stride + p;
    for (int k = 0; k < kVectors; ++k) acc[k] = fma(weight, take(x + k * kLanes), acc[k]);
  }
  if (s.has_skip) {
    const Lanes skip = splat(s.skip);
    for (int k = 0; k < kVectors; ++k) {
      acc[k] = fma(skip, take(x_own + p + k * kLanes), acc[k]);
    }
  }
  for (int k = 0; k < kVectors; ++k) {
    if (kVectors == 1) {
      store_part(y + p, acc[k], count);
    } else {
      store(y + p + k * kLanes, acc[k]);
    }
  }
}

__attribute__((noinline)) void combine(const Mamba2Span& s, const float* z, float carry,
                                       const float* w, int terms, const float* x_own, float* y) {
  int p = 0;
  for (; p + 4 * kLanes <= s.head_dim; p += 4 * kLanes) {
    combine_tile<4>(s, z, carry, w, terms, x_own, kLanes, p, y);
  }
  for (; p < s.head_dim; p += kLanes) {
    combine_tile<1>(s, z, carry, w, terms, x_own, smaller(kLanes, s.head_dim - p), p, y);
  }
}

}  // namespace

void mamba2_gram(const float* b, int64_t b_stride, const float* c, int64_t c_stride, int state_dim,
                 int records, int queries, float* gram, int64_t gram_stride) {
  const int first_query = records - queries;
  for (int q = 0; q < queries; q += 4) {
    const int width = smaller(4, queries - q);
    dot_rows(b, b_stride, first_query + q + width, c + q * c_stride, c_stride, width, state_dim,
             gram + q * gram_stride, gram_stride);
  }
}

bool mamba2_span(const Mamba2Span& s) {
  const int64_t p_stride = (s.head_dim + kLanes - 1) / kLanes * kLanes;
  float* weights = s.scratch;                    // [queries, kMaxWindow]
  float* z = weights + kMaxWindow * kMaxWindow;  // [queries, p_stride]
  float* u = z + kMaxWindow * p_stride;          // [records, p_stride]
  float* v = u + kMaxWindow * p_stride;          // [records, state_dim]
  float dt[kMaxWindow] = {};
  float carry[kMaxWindow];
  for (int j = 0; j < s.records; ++j) dt[j] = s.dt[j * s.dt_stride];

  // decay[j] = D(j, t), the sum of the log2 decays after record j, each from its own start; `total`
  // from the span's start.
  Lanes decay[kBlocks];
  for (int i = 0; i < kBlocks; ++i) decay[i] = splat(0.0f);
  float total = 0.0f;
  const int first_query = s.records - s.queries;
  const int window_queries = s.queries - (s.read_new ? 1 : 0);
  const int blocks = (s.records + kLanes - 1) / kLanes;
  for (int t = 0; t < s.records; ++t) {
    const float g = dt[t] * s.decay_log2;
    total = total + g;
    carry[t] = total;
    for (int i = 0; i < kBlocks; ++i) {
      if (i * kLanes < t)
        decay[i] = decay[i] + keep_first(splat(g), smaller(kLanes, t - i * kLanes));
    }
    const int q = t - first_query;
    if (q < 0 || q >= window_queries) continue;
    for (int i = 0; i < kBlocks; ++i) {
      if (i * kLanes > t) break;
      const Lanes w = exp2_lanes(decay[i]) * load(dt + i * kLanes);
      store(weights + q * kMaxWindow + i * kLanes,
            w * load(s.gram + q * s.gram_stride + i * kLanes));
    }
  }
  for (int i = 0; i < blocks; ++i) {
    const int count = smaller(kLanes, s.records - i * kLanes);
    store_part(carry + i * kLanes, exp2_lanes(load_part(carry + i * kLanes, count)), count);
  }

  if (window_queries > 0) {
    const auto read = s.read_far ? dot_rows<true> : dot_rows<false>;
    read(s.read_state, s.state_dim, s.head_dim, s.c, s.c_stride, window_queries, s.state_dim, z,
         p_stride);
  }
  for (int q = 0; q < window_queries; ++q) {
    const int t = first_query + q;
    combine(s, z + q * p_stride, carry[t], weights + q * kMaxWindow, t + 1, s.x + t * s.x_stride,
            s.y + q * s.y_stride);
  }
  if (!s.flush) return false;

  // The decays now reach to the last record: the fold's weights are 2^D(j, last) dt_j.
  float w[kMaxWindow];
  for (int i = 0; i < blocks; ++i) {
    store(w + i * kLanes, exp2_lanes(decay[i]) * load(dt + i * kLanes));
  }
  const bool exact = s.operand_bits == 23;
  const float* right = s.b;
  int64_t right_stride = s.b_stride;
  for (int j = 0; j < s.records; ++j) {
    const float* x = s.x + j * s.x_stride;
    float* left = u + j * p_stride;
    if (exact) {
      int p = 0;
      for (; p + kLanes <= s.head_dim; p += kLanes) store(left + p, splat(w[j]) * load(x + p));
      if (p < s.head_dim) store(left + p, splat(w[j]) * load_part(x + p, s.head_dim - p));
      continue;
    }
    const float* b = s.b + j * s.b_stride;
    for (int p = 0; p < s.head_dim; ++p) left[p] = round_mantissa(x[p], s.operand_bits);
    for (int n = 0; n < s.state_dim; ++n) {
      v[j * s.state_dim + n] = round_mantissa(w[j] * b[n], s.operand_bits);
    }
  }
  if (!exact) {
    right = v;
    right_stride = s.state_dim;
  }
  const float last = carry[s.records - 1];
  const bool finite = s.check_finite ? fold<true>(s.state, s.head_dim, s.state_dim, last, u,
                                                  p_stride, right, right_stride, s.records)
                                     : fold<false>(s.state, s.head_dim, s.state_dim, last, u,
                                                   p_stride, right, right_stride, s.records);
  if (s.read_new) {
    const int q = s.queries - 1;
    dot_rows(s.state, s.state_dim, s.head_dim, s.c + q * s.c_stride, s.c_stride, 1, s.state_dim, z,
             p_stride);
    combine(s, z, 1.0f, nullptr, 0, s.x + (s.records - 1) * s.x_stride, s.y + q * s.y_stride);
  }
  return finite;
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
