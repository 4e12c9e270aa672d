// Vector kernels of GDN and KDA: declared and specified in gdn_simd.h.
#include "kernels/gdn_simd.h"

#include "kernels/lanes.h"

// GCC's own AVX-512 header initialises a vector with itself and is warned about it (GCC bug
// 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {
namespace {

static_assert(kLanes == kGdnLanes);

// Register tile of gdn_multiply. The tile decides which elements are computed together, never the
// order of an element's sum.
#if defined(__AVX512F__)
constexpr int kTileRows = 4, kTileVectors = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kTileVectors = 1;
#else
constexpr int kTileRows = 1, kTileVectors = 1;
#endif
// Terms after which a tile's sums go through memory, so that the part of y in use stays in the
// first-level cache.
constexpr int kTileDepth = 64;

/// Operands of gdn_multiply, moved to a tile.
struct Multiply {
  const float* x;
  int64_t x_stride;
  const float* y;
  int64_t y_stride;
  const float* scale;
  int scale_step;
  float* out;
  int64_t out_stride;

  Multiply at_row(int i) const {
    return {x + i * x_stride,
            x_stride,
            y,
            y_stride,
            scale ? scale + i * scale_step : nullptr,
            scale_step,
            out + i * out_stride,
            out_stride};
  }
};

/// A tile's sums over `depth` terms; `more`: they go on from what `out` holds.
template <int kRows, int kVectors>
REPLAYEVAL_INLINE void multiply_tile(const Multiply& p, int depth, bool more) {
  Lanes sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < kVectors; ++c) {
      const float* before = p.out + i * p.out_stride + c * kLanes;
      sum[i][c] = more      ? load(before)
                  : p.scale ? splat(p.scale[i * p.scale_step]) * load(before)
                            : splat(0.0f);
    }
  }
  for (int m = 0; m < depth; ++m) {
    Lanes row[kVectors];
    for (int c = 0; c < kVectors; ++c) row[c] = load(p.y + m * p.y_stride + c * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Lanes factor = splat(p.x[i * p.x_stride + m]);
      for (int c = 0; c < kVectors; ++c) sum[i][c] = fma(factor, row[c], sum[i][c]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < kVectors; ++c) store(p.out + i * p.out_stride + c * kLanes, sum[i][c]);
  }
}

template <int kRows, int kVectors>
REPLAYEVAL_INLINE void multiply_last_rows(const Multiply& p, int rows, int depth, bool more) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      multiply_tile<kRows, kVectors>(p, depth, more);
    } else {
      multiply_last_rows<kRows - 1, kVectors>(p, rows, depth, more);
    }
  }
}

template <int kVectors>
REPLAYEVAL_INLINE void multiply_columns(Multiply p, int rows, int depth) {
  for (int first = 0; first == 0 || first < depth; first += kTileDepth) {
    const int terms = depth - first < kTileDepth ? depth - first : kTileDepth;
    int i = 0;
    for (; i + kTileRows <= rows; i += kTileRows) {
      multiply_tile<kTileRows, kVectors>(p.at_row(i), terms, first > 0);
    }
    multiply_last_rows<kTileRows - 1, kVectors>(p.at_row(i), rows - i, terms, first > 0);
    p.x += kTileDepth;
    p.y += kTileDepth * p.y_stride;
  }
}

/// block[i][j] <-> block[j][i].
REPLAYEVAL_INLINE void transpose_block(Lanes (&block)[kLanes]) {
#if defined(__AVX512F__)
  __m512 pairs[kLanes], quads[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(block[i].v, block[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(block[i].v, block[i + 1].v);
  }
  const auto lows = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto highs = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  for (int i = 0; i < kLanes;
       i += 4) {  // quads[i + c], 128-bit lane l: column 4 l + c of rows i .. i + 3
    quads[i] = lows(pairs[i], pairs[i + 2]);
    quads[i + 1] = highs(pairs[i], pairs[i + 2]);
    quads[i + 2] = lows(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = highs(pairs[i + 1], pairs[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 even_low = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xDD);
    const __m512 even_high = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xDD);
    block[c].v = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    block[8 + c].v = _mm512_shuffle_f32x4(even_low, even_high, 0xDD);
    block[4 + c].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    block[12 + c].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD);
  }
#else
  float rows[kLanes][kLanes], columns[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(rows[i], block[i]);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) columns[i][j] = rows[j][i];
  }
  for (int i = 0; i < kLanes; ++i) block[i] = load(columns[i]);
#endif
}

/// Rows of a block of S, transposed: column c of rows 0 .. 15 in block[c].
REPLAYEVAL_INLINE void load_transposed(const float* rows, int64_t stride, Lanes (&block)[kLanes]) {
#if defined(__AVX512F__)
  for (int c = 0; c < kLanes; c += 4) {
    // quarter[j], 128-bit lane l: columns c .. c + 3 of row 4 l + j.
    __m512 quarter[4];
    for (int j = 0; j < 4; ++j) {
      const float* p = rows + j * stride + c;
      quarter[j] = _mm512_castps128_ps512(_mm_loadu_ps(p));
      quarter[j] = _mm512_insertf32x4(quarter[j], _mm_loadu_ps(p + 4 * stride), 1);
      quarter[j] = _mm512_insertf32x4(quarter[j], _mm_loadu_ps(p + 8 * stride), 2);
      quarter[j] = _mm512_insertf32x4(quarter[j], _mm_loadu_ps(p + 12 * stride), 3);
    }
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(quarter[0], quarter[1]));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(quarter[0], quarter[1]));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(quarter[2], quarter[3]));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(quarter[2], quarter[3]));
    block[c].v = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
    block[c + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
    block[c + 2].v = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
    block[c + 3].v = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
  }
#else
  for (int i = 0; i < kLanes; ++i) block[i] = load(rows + i * stride);
  transpose_block(block);
#endif
}

template <int kCount>
REPLAYEVAL_INLINE void read_rows(int rows, int columns, const float* state, const float* const* x,
                                 float* const* out) {
  for (int r = 0; r < rows; r += kLanes) {
    Lanes sum[kCount];
    for (Lanes& s : sum) s = splat(0.0f);
    for (int c = 0; c < columns; c += kLanes) {
      const float* from = state + int64_t{r} * columns + c;
      const int width = columns - c < kLanes ? columns - c : kLanes;
      Lanes block[kLanes];
      if (r + kLanes <= rows && width == kLanes) {
        // The next rows, where the machine does not look for them by itself.
        for (int i = 0; i < kLanes; ++i) __builtin_prefetch(from + (kLanes + i) * columns);
        load_transposed(from, columns, block);
        for (int i = 0; i < kLanes; ++i) {
          for (int k = 0; k < kCount; ++k) sum[k] = fma(splat(x[k][c + i]), block[i], sum[k]);
        }
        continue;
      }
      for (int i = 0; i < kLanes; ++i) {
        block[i] = r + i < rows ? load_part(from + i * columns, width) : splat(0.0f);
      }
      transpose_block(block);
      for (int i = 0; i < width; ++i) {
        for (int k = 0; k < kCount; ++k) sum[k] = fma(splat(x[k][c + i]), block[i], sum[k]);
      }
    }
    for (int k = 0; k < kCount; ++k) store(out[k] + r, sum[k]);
  }
}

/// kVectors vectors of kRows rows of gdn_fold, the last one `count` wide. `finite` as in
/// gdn_transpose.
template <int kRows, int kVectors>
REPLAYEVAL_INLINE void fold_tile(int records, float carried, const float* u, int64_t u_stride,
                                 const float* k, int64_t k_stride, float* state, int columns,
                                 int count, Lanes& finite) {
  const auto take = [count](const float* from) {
    return kVectors == 1 ? load_part(from, count) : load(from);
  };
  Lanes sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < kVectors; ++c) {
      sum[i][c] = splat(carried) * take(state + i * columns + c * kLanes);
    }
  }
  for (int j = 0; j < records; ++j) {
    Lanes key[kVectors];
    for (int c = 0; c < kVectors; ++c) key[c] = take(k + j * k_stride + c * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Lanes factor = splat(u[j * u_stride + i]);
      for (int c = 0; c < kVectors; ++c) sum[i][c] = fma(factor, key[c], sum[i][c]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < kVectors; ++c) {
      float* to = state + i * columns + c * kLanes;
      if (kVectors == 1) {
        store_part(to, sum[i][c], count);
        sum[i][c] = keep_first(sum[i][c], count);
      } else {
        store(to, sum[i][c]);
      }
      finite = fma(sum[i][c], splat(0.0f), finite);
    }
  }
}

template <int kRows>
REPLAYEVAL_INLINE void fold_rows(int records, float carried, const float* u, int64_t u_stride,
                                 const float* k, int64_t k_stride, float* state, int columns,
                                 Lanes& finite) {
  int c = 0;
  for (; c + kTileVectors * kLanes <= columns; c += kTileVectors * kLanes) {
    fold_tile<kRows, kTileVectors>(records, carried, u, u_stride, k + c, k_stride, state + c,
                                   columns, kLanes, finite);
  }
  for (; c < columns; c += kLanes) {
    fold_tile<kRows, 1>(records, carried, u, u_stride, k + c, k_stride, state + c, columns,
                        columns - c < kLanes ? columns - c : kLanes, finite);
  }
}

REPLAYEVAL_INLINE bool all_zero(const Lanes& x) {
  float lane[kLanes];
  store(lane, x);
  bool all = true;
  for (float value : lane) all = all && value == 0.0f;
  return all;
}

REPLAYEVAL_INLINE float as_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
REPLAYEVAL_INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

/// Drops the low `dropped` mantissa bits, nearest, ties to even (13: TF32, 16: BF16); overflow
/// gives infinity, NaN stays NaN. Example, 16: 0x3F9E8000 (1.23828125) lies half-way and goes to
/// 0x3F9E0000.
REPLAYEVAL_INLINE float round_mantissa(float x, int dropped) {
  const uint32_t bits = as_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return as_float(bits | 0x00400000u);
  const uint32_t half = 1u << (dropped - 1);
  return as_float((bits + half - 1u + ((bits >> dropped) & 1u)) & ~((1u << dropped) - 1u));
}

REPLAYEVAL_INLINE float round_operand(DotType type, float x) {
  return type == DotType::fp32 ? x : round_mantissa(x, type == DotType::bf16 ? 16 : 13);
}

}  // namespace

void gdn_multiply(int rows, int depth, int vectors, const float* x, int64_t x_stride,
                  const float* y, int64_t y_stride, const float* scale, int scale_step, float* out,
                  int64_t out_stride) {
  Multiply p{x, x_stride, y, y_stride, scale, scale_step, out, out_stride};
  int c = 0;
  for (; c + kTileVectors <= vectors; c += kTileVectors) {
    multiply_columns<kTileVectors>(p, rows, depth);
    p.y += kTileVectors * kLanes;
    p.out += kTileVectors * kLanes;
  }
  for (; c < vectors; ++c) {
    multiply_columns<1>(p, rows, depth);
    p.y += kLanes;
    p.out += kLanes;
  }
}

void gdn_normalise(int rows, int dim, float scale, const float* x, int64_t x_stride, float* out,
                   int64_t out_stride) {
  for (int t = 0; t < rows; ++t) {
    const float* row = x + t * x_stride;
    float* result = out + t * out_stride;
    Lanes squares = splat(0.0f);
    for (int n = 0; n < dim; n += kLanes) {
      const Lanes part = load_part(row + n, dim - n < kLanes ? dim - n : kLanes);
      squares = fma(part, part, squares);
    }
    float lane[kLanes];
    store(lane, squares);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    }
    const Lanes factor = splat(scale / __builtin_sqrtf(lane[0] + 1e-6f));
    for (int n = 0; n < dim; n += kLanes) {
      store(result + n, load_part(row + n, dim - n < kLanes ? dim - n : kLanes) * factor);
    }
  }
}

bool gdn_transpose(int rows, int columns, const float* in, int64_t in_stride, float* out,
                   int64_t out_stride) {
  const Lanes zero = splat(0.0f);
  Lanes finite = zero;  // 0 x is 0 for finite x only
  const int padded = static_cast<int>(out_stride);
  for (int r = 0; r < padded; r += kLanes) {
    const int out_count = padded - r < kLanes ? padded - r : kLanes;
    for (int c = 0; c < columns; c += kLanes) {
      const int in_count = columns - c < kLanes ? columns - c : kLanes;
      Lanes block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = r + i < rows ? load_part(in + (r + i) * in_stride + c, in_count) : zero;
        finite = fma(block[i], zero, finite);
      }
      transpose_block(block);
      for (int i = 0; i < in_count; ++i) {
        store_part(out + (c + i) * out_stride + r, block[i], out_count);
      }
    }
  }
  return all_zero(finite);
}

void gdn_read(int rows, int columns, const float* state, int count, const float* const* x,
              float* const* out) {
  if (count == 2) {
    read_rows<2>(rows, columns, state, x, out);
  } else {
    read_rows<1>(rows, columns, state, x, out);
  }
}

bool gdn_fold(int rows, int columns, int records, float carried, const float* u, int64_t u_stride,
              const float* k, int64_t k_stride, float* state) {
  Lanes finite = splat(0.0f);
  int r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    fold_rows<kTileRows>(records, carried, u + r, u_stride, k, k_stride,
                         state + int64_t{r} * columns, columns, finite);
  }
  for (; r < rows; ++r) {
    fold_rows<1>(records, carried, u + r, u_stride, k, k_stride, state + int64_t{r} * columns,
                 columns, finite);
  }
  return all_zero(finite);
}

void gdn_round(DotType type, int64_t count, const float* in, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = round_operand(type, in[i]);
}

void gdn_scalar_decay(const GdnScalarDecay& window) {
  const int64_t stride = window.weight_stride;
  float* exponents = window.exponents;
  float* prefix = window.exponents + stride;
  for (int64_t j = 0; j < stride; ++j) exponents[j] = prefix[j] = 0.0f;
  float total = 0.0f;
  for (int t = 0; t < window.records; ++t) {
    const float g = window.g[t];
    total += g;
    prefix[t] = total;
    const Lanes step = splat(g);
    for (int j = 0; j < t; j += kLanes) store(exponents + j, load(exponents + j) + step);
    exponents[t] = 0.0f;
    if (t < window.first) continue;
    for (int j = 0; j <= t; j += kLanes) {
      const Lanes weight = exp2_lanes(load(exponents + j));
      const int64_t at = t * stride + j;
      store(window.weights + at, weight);
      store(window.key_weights + at, weight * load(window.key_dots + at));
      if (t >= window.first_query) {
        store(window.query_weights + at, weight * load(window.query_dots + at));
      }
    }
  }
  for (int j = 0; j < window.records; j += kLanes) {
    store(window.carried + j, exp2_lanes(load(prefix + j)));
  }
}

void gdn_channel_decay(const GdnChannelDecay& window) {
  const int key_dim = window.key_dim;
  const int64_t stride = window.weight_stride, key_stride = window.key_stride;
  float* step = window.step;
  for (int64_t i = 0; i < key_dim * stride; ++i) window.decayed_keys[i] = 0.0f;
  for (int64_t n = 0; n < key_stride; ++n) window.carried[n] = 1.0f;
  for (int t = 0; t < window.records; ++t) {
    const float* g = window.g + t * window.g_stride;
    const float* k = window.k + t * key_stride;
    for (int n = 0; n < key_dim; n += kLanes) {
      const Lanes decay = exp2_lanes(load_part(g + n, key_dim - n < kLanes ? key_dim - n : kLanes));
      store(step + n, decay);
      store(window.carried + n, load(window.carried + n) * decay);
    }
    for (int n = 0; n < key_dim; ++n) {
      float* keys = window.decayed_keys + n * stride;
      const Lanes decay = splat(step[n]);
      for (int j = 0; j < t; j += kLanes) store(keys + j, load(keys + j) * decay);
      keys[t] = k[n];
    }
    if (t < window.first) continue;
    for (int n = 0; n < key_dim; ++n) {
      window.carried_k[t * key_stride + n] = round_operand(window.dot, window.carried[n] * k[n]);
    }
    const float* q = t >= window.first_query ? window.q + t * key_stride : nullptr;
    if (q) {
      for (int n = 0; n < key_dim; ++n) {
        window.carried_q[t * key_stride + n] = window.carried[n] * q[n];
      }
    }
    for (int j = 0; j <= t; j += kLanes) {
      Lanes with_k = splat(0.0f), with_q = splat(0.0f);
      for (int n = 0; n < key_dim; ++n) {
        Lanes key = load(window.decayed_keys + n * stride + j);
        if (window.dot != DotType::fp32) {
          float lane[kLanes];
          store(lane, key);
          for (int i = 0; i < kLanes; ++i) lane[i] = round_operand(window.dot, lane[i]);
          key = load(lane);
        }
        with_k = fma(splat(round_operand(window.dot, k[n])), key, with_k);
        if (q) with_q = fma(splat(q[n]), key, with_q);
      }
      store(window.key_weights + t * stride + j, with_k);
      if (q) store(window.query_weights + t * stride + j, with_q);
    }
  }
}

void gdn_correct(const GdnCorrection& window) {
  const int64_t stride = window.value_stride;
  for (int64_t p = 0; p < stride; p += kLanes) {
    for (int t = window.first; t < window.last; ++t) {
      const int64_t at = t * stride + p;
      const float* key_weights = window.key_weights + t * window.weight_stride;
      const float carried = window.carried ? window.carried[t] : 1.0f;
      Lanes rest = fma(splat(-carried), load(window.read_k + at), load(window.v + at));
      for (int j = 0; j < t; ++j) {
        rest = fma(splat(-key_weights[j]), load(window.u + j * stride + p), rest);
      }
      const Lanes u = splat(window.beta[t]) * rest;
      if (window.query_weights) {
        const float* query_weights = window.query_weights + t * window.weight_stride;
        Lanes o = splat(carried) * load(window.read_q + at);
        for (int j = 0; j < t; ++j) {
          o = fma(splat(query_weights[j]), load(window.u + j * stride + p), o);
        }
        store(window.o + at, fma(splat(query_weights[t]), u, o));
      }
      store(window.u + at, u);
      if (window.round_u) {
        for (int i = 0; i < kLanes; ++i) window.u[at + i] = round_mantissa(window.u[at + i], 16);
      }
    }
  }
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
