// Sixteen FP32 lanes, the unit in which the *_simd.cc kernels fix the order of their sums: one
// AVX-512 register, two AVX2 registers, or an array. Every function does the same operations lane
// by lane at every level; only `fma` rounds once with FMA hardware and twice without. Include it
// from *_simd.cc files only.
#pragma once

#include <stdint.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {

#define REPLAYEVAL_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Lanes {
  __m512 v;
};

REPLAYEVAL_INLINE __mmask16 lane_mask(int count) {
  return static_cast<__mmask16>((1u << count) - 1u);
}
REPLAYEVAL_INLINE Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
REPLAYEVAL_INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
/// The first `count` (0 to 16) values, zeros after them; memory beyond is not touched.
REPLAYEVAL_INLINE Lanes load_part(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(lane_mask(count), p)};
}
REPLAYEVAL_INLINE void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
REPLAYEVAL_INLINE void store_part(float* p, Lanes a, int count) {
  _mm512_mask_storeu_ps(p, lane_mask(count), a.v);
}
REPLAYEVAL_INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
REPLAYEVAL_INLINE Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
REPLAYEVAL_INLINE Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
REPLAYEVAL_INLINE Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
/// a b + c
REPLAYEVAL_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/// The first `count` lanes of a, zeros after them.
REPLAYEVAL_INLINE Lanes keep_first(Lanes a, int count) {
  return {_mm512_maskz_mov_ps(lane_mask(count), a.v)};
}
/// x limited to [low, high]; NaN stays NaN.
REPLAYEVAL_INLINE Lanes clamp(Lanes x, float low, float high) {
  return {_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), x.v))};
}
REPLAYEVAL_INLINE Lanes round_even(Lanes x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/// p 2^n for integral n in [-160, 160], rounded once.
REPLAYEVAL_INLINE Lanes scale_by_power(Lanes p, Lanes n) { return {_mm512_scalef_ps(p.v, n.v)}; }

#elif defined(__AVX2__) && defined(__FMA__)

struct Lanes {
  __m256 low, high;
};

REPLAYEVAL_INLINE __m256i lane_mask(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
REPLAYEVAL_INLINE Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
REPLAYEVAL_INLINE Lanes load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
REPLAYEVAL_INLINE Lanes load_part(const float* p, int count) {
  return {_mm256_maskload_ps(p, lane_mask(count)),
          count > 8 ? _mm256_maskload_ps(p + 8, lane_mask(count - 8)) : _mm256_setzero_ps()};
}
REPLAYEVAL_INLINE void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
REPLAYEVAL_INLINE void store_part(float* p, Lanes a, int count) {
  _mm256_maskstore_ps(p, lane_mask(count), a.low);
  if (count > 8) _mm256_maskstore_ps(p + 8, lane_mask(count - 8), a.high);
}
REPLAYEVAL_INLINE Lanes operator+(Lanes a, Lanes b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
REPLAYEVAL_INLINE Lanes operator-(Lanes a, Lanes b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
REPLAYEVAL_INLINE Lanes operator*(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
REPLAYEVAL_INLINE Lanes operator/(Lanes a, Lanes b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
REPLAYEVAL_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
REPLAYEVAL_INLINE Lanes keep_first(Lanes a, int count) {
  return {_mm256_and_ps(a.low, _mm256_castsi256_ps(lane_mask(count))),
          _mm256_and_ps(a.high, _mm256_castsi256_ps(lane_mask(count - 8)))};
}
REPLAYEVAL_INLINE Lanes clamp(Lanes x, float low, float high) {
  const __m256 l = _mm256_set1_ps(low), h = _mm256_set1_ps(high);
  return {_mm256_max_ps(l, _mm256_min_ps(h, x.low)), _mm256_max_ps(l, _mm256_min_ps(h, x.high))};
}
REPLAYEVAL_INLINE Lanes round_even(Lanes x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kMode), _mm256_round_ps(x.high, kMode)};
}
/// 2^n from the exponent bits; n in [-126, 127].
REPLAYEVAL_INLINE __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
REPLAYEVAL_INLINE __m256 scale_half(__m256 p, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(p, power_of_two(half)),
                       power_of_two(_mm256_sub_epi32(whole, half)));
}
REPLAYEVAL_INLINE Lanes scale_by_power(Lanes p, Lanes n) {
  return {scale_half(p.low, n.low), scale_half(p.high, n.high)};
}

#else

struct Lanes {
  float v[kLanes];
};

REPLAYEVAL_INLINE Lanes splat(float x) {
  Lanes r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = x;
  return r;
}
REPLAYEVAL_INLINE Lanes load_part(const float* p, int count) {
  Lanes r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = i < count ? p[i] : 0.0f;
  return r;
}
REPLAYEVAL_INLINE Lanes load(const float* p) {
  Lanes r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = p[i];
  return r;
}
REPLAYEVAL_INLINE void store_part(float* p, Lanes a, int count) {
  for (int i = 0; i < count; ++i) p[i] = a.v[i];
}
REPLAYEVAL_INLINE void store(float* p, Lanes a) {
  for (int i = 0; i < kLanes; ++i) p[i] = a.v[i];
}
REPLAYEVAL_INLINE Lanes operator+(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] += b.v[i];
  return a;
}
REPLAYEVAL_INLINE Lanes operator-(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] -= b.v[i];
  return a;
}
REPLAYEVAL_INLINE Lanes operator*(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] *= b.v[i];
  return a;
}
REPLAYEVAL_INLINE Lanes operator/(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] /= b.v[i];
  return a;
}
REPLAYEVAL_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
  for (int i = 0; i < kLanes; ++i) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
    c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
#else
    c.v[i] = a.v[i] * b.v[i] + c.v[i];
#endif
  }
  return c;
}
REPLAYEVAL_INLINE Lanes keep_first(Lanes a, int count) {
  for (int i = 0; i < kLanes; ++i) a.v[i] = i < count ? a.v[i] : 0.0f;
  return a;
}
REPLAYEVAL_INLINE Lanes clamp(Lanes x, float low, float high) {
  for (int i = 0; i < kLanes; ++i) {
    x.v[i] = x.v[i] > high ? high : x.v[i];
    x.v[i] = x.v[i] < low ? low : x.v[i];
  }
  return x;
}
/// Adding 1.5 * 2^23 leaves no fraction bits, so the sum is rounded to an integer, ties to even;
/// |x| < 2^22.
REPLAYEVAL_INLINE Lanes round_even(Lanes x) {
  for (int i = 0; i < kLanes; ++i) x.v[i] = (x.v[i] + 12582912.0f) - 12582912.0f;
  return x;
}
REPLAYEVAL_INLINE float power_of_two(uint32_t n) {
  const uint32_t bits = (n + 127u) << 23;
  float r;
  __builtin_memcpy(&r, &bits, sizeof r);
  return r;
}
REPLAYEVAL_INLINE Lanes scale_by_power(Lanes p, Lanes n) {
  for (int i = 0; i < kLanes; ++i) {
    // The bits of n + 1.5 * 2^23 count n in units of one; NaN gives some power, and p is NaN then.
    const float shifted = n.v[i] + 12582912.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    const uint32_t whole = bits - 0x4B400000u;
    const uint32_t half = (whole >> 1) | (whole & 0x80000000u);
    p.v[i] = (p.v[i] * power_of_two(half)) * power_of_two(whole - half);
  }
  return p;
}

#endif

/// Sums 16 vectors over their lanes: lane 4 q + r of the result is the sum of v[4 r + q]. The order
/// of each sum is the tree s8[i] = l[i] + l[i+8], s4[i] = s8[i] + s8[i+4], s2[i] = s4[i] + s4[i+2],
/// s2[0] + s2[1].
REPLAYEVAL_INLINE Lanes sum_lanes(const Lanes* v) {
#if defined(__AVX512F__)
  __m512 quad[4];
  for (int m = 0; m < 4; ++m) {
    const __m512 a = v[4 * m].v, b = v[4 * m + 1].v, c = v[4 * m + 2].v, d = v[4 * m + 3].v;
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    quad[m] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_ps(quad[0], quad[1], 0x44),
                                   _mm512_shuffle_ps(quad[0], quad[1], 0xEE));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_ps(quad[2], quad[3], 0x44),
                                    _mm512_shuffle_ps(quad[2], quad[3], 0xEE));
  return {_mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xDD))};
#else
  float sums[kLanes];
  for (int r = 0; r < 4; ++r) {
    for (int q = 0; q < 4; ++q) {
      float l[kLanes];
      store(l, v[4 * r + q]);
      for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) l[i] += l[i + width];
      }
      sums[4 * q + r] = l[0];
    }
  }
  return load(sums);
#endif
}

/// 2^x. With x = n + f, n the nearest integer: 2^n times the series sum_k (f ln 2)^k / k! up to k
/// = 7. Exact for integral x; relative error below 1.0e-7 (seen: 7.3e-8 with FMA, 9.6e-8 without)
/// where the result is normal; x < -160 gives 0, x > 160 infinity, NaN stays.
REPLAYEVAL_INLINE Lanes exp2_lanes(Lanes x) {
  x = clamp(x, -160.0f, 160.0f);
  const Lanes n = round_even(x);
  const Lanes f = x - n;
  Lanes p = splat(1.5252733804059841e-05f);       // (ln 2)^7 / 7!
  p = fma(p, f, splat(1.5403530393381609e-04f));  // (ln 2)^6 / 6!
  p = fma(p, f, splat(1.3333558146428443e-03f));  // (ln 2)^5 / 5!
  p = fma(p, f, splat(9.6181291076284772e-03f));  // (ln 2)^4 / 4!
  p = fma(p, f, splat(5.5504108664821580e-02f));  // (ln 2)^3 / 3!
  p = fma(p, f, splat(2.4022650695910071e-01f));  // (ln 2)^2 / 2!
  p = fma(p, f, splat(6.9314718055994531e-01f));  // ln 2
  p = fma(p, f, splat(1.0f));
  return scale_by_power(p, n);
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
