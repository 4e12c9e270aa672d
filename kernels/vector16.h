// Sixteen FP32 (or FP64) lanes as native vectors of the instruction-set level that the including
// *_simd.cc file is compiled for. Every function works lane by lane with one rounding an operation,
// so a lane's result does not depend on the others.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

#define REPLAYEVAL_INLINE inline __attribute__((always_inline))
#define REPLAYEVAL_UNROLL _Pragma("GCC unroll 32")

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE::wide {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;
constexpr int kLanes = 16;

typedef float NativeFloat __attribute__((vector_size(kWidth * 4)));
typedef int32_t NativeInt __attribute__((vector_size(kWidth * 4)));
typedef double NativeDouble __attribute__((vector_size(kWidth * 4)));
typedef int64_t NativeLong __attribute__((vector_size(kWidth * 4)));
typedef uint16_t NativeShort __attribute__((vector_size(kWidth * 2)));

REPLAYEVAL_INLINE NativeFloat native_fma(NativeFloat a, NativeFloat b, NativeFloat c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
REPLAYEVAL_INLINE NativeDouble native_fma(NativeDouble a, NativeDouble b, NativeDouble c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}
REPLAYEVAL_INLINE NativeFloat native_sqrt(NativeFloat a) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(a);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(a);
#else
  NativeFloat r = a;
  for (int i = 0; i < kWidth; ++i) r[i] = __builtin_sqrtf(a[i]);
  return r;
#endif
}

struct I16 {
  NativeInt v[kParts];
};
struct F16 {
  NativeFloat v[kParts];
};
/// Lanes 0..15 in order, two native vectors for each of an F16.
struct D16 {
  NativeDouble v[2 * kParts];
};

#define REPLAYEVAL_LANEWISE(Type, Parts, op)                                     \
  REPLAYEVAL_INLINE Type operator op(const Type& a, const Type& b) {             \
    Type r;                                                                      \
    REPLAYEVAL_UNROLL for (int i = 0; i < Parts; ++i) r.v[i] = a.v[i] op b.v[i]; \
    return r;                                                                    \
  }
REPLAYEVAL_LANEWISE(F16, kParts, +)
REPLAYEVAL_LANEWISE(F16, kParts, -)
REPLAYEVAL_LANEWISE(F16, kParts, *)
REPLAYEVAL_LANEWISE(F16, kParts, /)
REPLAYEVAL_LANEWISE(I16, kParts, +)
REPLAYEVAL_LANEWISE(I16, kParts, -)
REPLAYEVAL_LANEWISE(I16, kParts, &)
REPLAYEVAL_LANEWISE(I16, kParts, |)
REPLAYEVAL_LANEWISE(D16, 2 * kParts, +)
REPLAYEVAL_LANEWISE(D16, 2 * kParts, -)
REPLAYEVAL_LANEWISE(D16, 2 * kParts, *)
#undef REPLAYEVAL_LANEWISE

REPLAYEVAL_INLINE F16 splat(float x) {
  F16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = x - NativeFloat{};
  return r;
}
REPLAYEVAL_INLINE I16 splat_int(int32_t x) {
  I16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = x - NativeInt{};
  return r;
}
REPLAYEVAL_INLINE D16 splat_double(double x) {
  D16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < 2 * kParts; ++i) r.v[i] = x - NativeDouble{};
  return r;
}
REPLAYEVAL_INLINE I16 lane_index() {
  I16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kLanes; ++i) r.v[i / kWidth][i % kWidth] = i;
  return r;
}

REPLAYEVAL_INLINE F16 load(const float* x) {
  F16 r;
  memcpy(&r, x, sizeof r);
  return r;
}
REPLAYEVAL_INLINE void store(float* x, const F16& a) { memcpy(x, &a, sizeof a); }
// Tails are rare: out of line, so that loops stay small.
__attribute__((noinline)) inline F16 load_tail(const float* x, int64_t n, float rest) {
  float buffer[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) buffer[i] = i < n ? x[i] : rest;
  return load(buffer);
}
__attribute__((noinline)) inline void store_tail(float* x, const F16& a, int64_t n) {
  float buffer[kLanes];
  store(buffer, a);
  for (int64_t i = 0; i < n; ++i) x[i] = buffer[i];
}
/// The first n lanes from memory, `rest` in the others; n may exceed 16.
REPLAYEVAL_INLINE F16 load_partial(const float* x, int64_t n, float rest = 0) {
  return n >= kLanes ? load(x) : load_tail(x, n, rest);
}
/// The first n lanes to memory; n may exceed 16.
REPLAYEVAL_INLINE void store_partial(float* x, const F16& a, int64_t n) {
  if (n >= kLanes) {
    store(x, a);
  } else {
    store_tail(x, a, n);
  }
}
REPLAYEVAL_INLINE I16 load_int(const int32_t* x) {
  I16 r;
  memcpy(&r, x, sizeof r);
  return r;
}
REPLAYEVAL_INLINE void store_int(int32_t* x, const I16& a) { memcpy(x, &a, sizeof a); }
/// Sixteen 16-bit codes, zero-extended.
REPLAYEVAL_INLINE I16 load_short(const void* x) {
  I16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) {
    NativeShort s;
    memcpy(&s, static_cast<const char*>(x) + i * sizeof s, sizeof s);
    r.v[i] = __builtin_convertvector(s, NativeInt);
  }
  return r;
}
/// The low 16 bits of each lane.
REPLAYEVAL_INLINE void store_short(void* x, const I16& a) {
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) {
    NativeShort s = __builtin_convertvector(a.v[i], NativeShort);
    memcpy(static_cast<char*>(x) + i * sizeof s, &s, sizeof s);
  }
}

REPLAYEVAL_INLINE F16 as_float(const I16& a) {
  F16 r;
  memcpy(&r, &a, sizeof r);
  return r;
}
REPLAYEVAL_INLINE I16 as_int(const F16& a) {
  I16 r;
  memcpy(&r, &a, sizeof r);
  return r;
}
REPLAYEVAL_INLINE I16 shift_left(const I16& a, int bits) {
  I16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] << bits;
  return r;
}
/// Arithmetic shift.
REPLAYEVAL_INLINE I16 shift_right(const I16& a, int bits) {
  I16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] >> bits;
  return r;
}

/// a b + c, rounded once where the instruction set has FMA.
REPLAYEVAL_INLINE F16 fma(const F16& a, const F16& b, const F16& c) {
  F16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = native_fma(a.v[i], b.v[i], c.v[i]);
  return r;
}
REPLAYEVAL_INLINE D16 fma(const D16& a, const D16& b, const D16& c) {
  D16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < 2 * kParts; ++i) r.v[i] =
      native_fma(a.v[i], b.v[i], c.v[i]);
  return r;
}
REPLAYEVAL_INLINE F16 sqrt(const F16& a) {
  F16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = native_sqrt(a.v[i]);
  return r;
}

/// Comparisons give lanes of all ones or zeros; false for NaN (except !=).
#define REPLAYEVAL_COMPARE(op)                                                    \
  REPLAYEVAL_INLINE I16 operator op(const F16& a, const F16& b) {                 \
    I16 r;                                                                        \
    REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] op b.v[i]; \
    return r;                                                                     \
  }                                                                               \
  REPLAYEVAL_INLINE I16 operator op(const I16& a, const I16& b) {                 \
    I16 r;                                                                        \
    REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] op b.v[i]; \
    return r;                                                                     \
  }
REPLAYEVAL_COMPARE(<)
REPLAYEVAL_COMPARE(>)
REPLAYEVAL_COMPARE(==)
REPLAYEVAL_COMPARE(!=)
#undef REPLAYEVAL_COMPARE

REPLAYEVAL_INLINE F16 select(const I16& mask, const F16& yes, const F16& no) {
  F16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = mask.v[i] ? yes.v[i] : no.v[i];
  return r;
}
REPLAYEVAL_INLINE I16 select(const I16& mask, const I16& yes, const I16& no) {
  I16 r;
  REPLAYEVAL_UNROLL for (int i = 0; i < kParts; ++i) r.v[i] = mask.v[i] ? yes.v[i] : no.v[i];
  return r;
}
/// a > b ? a : b; b when either is NaN.
REPLAYEVAL_INLINE F16 max(const F16& a, const F16& b) {
#if defined(__AVX512F__)
  return {{_mm512_max_ps(a.v[0], b.v[0])}};
#elif defined(__AVX2__)
  return {{_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}};
#else
  return select(a > b, a, b);
#endif
}
/// a < b ? a : b; b when either is NaN.
REPLAYEVAL_INLINE F16 min(const F16& a, const F16& b) {
#if defined(__AVX512F__)
  return {{_mm512_min_ps(a.v[0], b.v[0])}};
#elif defined(__AVX2__)
  return {{_mm256_min_ps(a.v[0], b.v[0]), _mm256_min_ps(a.v[1], b.v[1])}};
#else
  return select(a < b, a, b);
#endif
}

REPLAYEVAL_INLINE D16 to_double(const F16& a) {
  D16 r;
#if defined(__AVX512F__)
  r.v[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(a.v[0]));
  r.v[1] = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v[0]), 1)));
#elif defined(__AVX2__)
  REPLAYEVAL_UNROLL for (int i = 0; i < 2; ++i) {
    r.v[2 * i] = _mm256_cvtps_pd(_mm256_castps256_ps128(a.v[i]));
    r.v[2 * i + 1] = _mm256_cvtps_pd(_mm256_extractf128_ps(a.v[i], 1));
  }
#else
  for (int i = 0; i < kLanes; ++i) r.v[i / 2][i % 2] = static_cast<double>(a.v[i / 4][i % 4]);
#endif
  return r;
}
REPLAYEVAL_INLINE F16 to_float(const D16& a) {
  F16 r;
#if defined(__AVX512F__)
  const __m512d low = _mm512_castps_pd(_mm512_castps256_ps512(_mm512_cvtpd_ps(a.v[0])));
  r.v[0] = _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(_mm512_cvtpd_ps(a.v[1])), 1));
#elif defined(__AVX2__)
  REPLAYEVAL_UNROLL for (int i = 0; i < 2; ++i) {
    r.v[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(a.v[2 * i])),
                                  _mm256_cvtpd_ps(a.v[2 * i + 1]), 1);
  }
#else
  for (int i = 0; i < kLanes; ++i) r.v[i / 4][i % 4] = static_cast<float>(a.v[i / 2][i % 2]);
#endif
  return r;
}

/// Whether a comparison holds in any lane.
REPLAYEVAL_INLINE bool any(const I16& mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask.v[0]),
                                reinterpret_cast<__m512i>(mask.v[0])) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask.v[0] | mask.v[1])) != 0;
#else
  const NativeInt folded = (mask.v[0] | mask.v[1]) | (mask.v[2] | mask.v[3]);
  return (folded[0] | folded[1] | folded[2] | folded[3]) != 0;
#endif
}

#if defined(__AVX2__)
/// Lanes 0 - 7 and 8 - 15.
REPLAYEVAL_INLINE void halves(const F16& a, __m256& low, __m256& high) {
#if defined(__AVX512F__)
  low = _mm512_castps512_ps256(a.v[0]);
  high = _mm512_extractf32x8_ps(a.v[0], 1);
#else
  low = a.v[0];
  high = a.v[1];
#endif
}
#endif

/// Sum of the lanes as a tree: lane i + lane i + 8, then 4, 2, 1 apart.
REPLAYEVAL_INLINE float sum(const F16& a) {
#if defined(__AVX2__)
  __m256 low, high;
  halves(a, low, high);
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float x[kLanes];
  store(x, a);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  }
  return x[0];
#endif
}
REPLAYEVAL_INLINE double sum(const D16& a) {
  double x[kLanes];
  memcpy(x, &a, sizeof x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  }
  return x[0];
}
/// Largest lane, by the same tree; with NaN among them, some lane or NaN.
REPLAYEVAL_INLINE float max_lane(const F16& a) {
#if defined(__AVX2__)
  __m256 low, high;
  halves(a, low, high);
  const __m256 eight = _mm256_max_ps(low, high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float x[kLanes];
  store(x, a);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  }
  return x[0];
#endif
}

/// BF16 code of each lane, to nearest even: add half of the last kept place less one, plus that
/// place's bit, and cut. NaN keeps its upper bits and gets the quiet bit. 0x3f808000 (a tie) ->
/// 0x3f80; 0x3f818000 -> 0x3f82.
REPLAYEVAL_INLINE I16 bf16_code(const F16& a) {
  const I16 bits = as_int(a);
  const I16 odd = shift_right(bits, 16) & splat_int(1);
  const I16 rounded = shift_right(bits + splat_int(0x7fff) + odd, 16);
  return select(a != a, shift_right(bits, 16) | splat_int(0x40), rounded);
}

/// FP16 code of each lane, to nearest even, subnormals kept, overflow to inf.
REPLAYEVAL_INLINE I16 fp16_code(const F16& a) {
#if defined(__AVX512F__)
  const __m256i codes = _mm512_cvtps_ph(a.v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return load_short(&codes);
#elif defined(__F16C__)
  const __m128i codes[2] = {_mm256_cvtps_ph(a.v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                            _mm256_cvtps_ph(a.v[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  return load_short(codes);
#else
  const I16 bits = as_int(a);
  const I16 sign = shift_right(bits, 16) & splat_int(0x8000);
  const I16 magnitude = bits & splat_int(0x7fffffff);
  // Normal: rebias the exponent (127 - 15 = 112) and round at bit 13. 0x477fefff is the last value
  // below the tie with 2^16.
  const I16 odd = shift_right(magnitude, 13) & splat_int(1);
  const I16 normal = shift_right(magnitude - splat_int(112 << 23) + splat_int(0xfff) + odd, 13);
  // Subnormal (below 2^-14): adding 0.5 leaves units of 2^-24 in the last places of the sum.
  const I16 small = as_int(as_float(magnitude) + splat(0.5F)) - splat_int(0x3f000000);
  I16 code = select(magnitude < splat_int(0x38800000), small, normal);
  code = select(magnitude > splat_int(0x477fefff), splat_int(0x7c00), code);
  const I16 quiet = (shift_right(magnitude, 13) & splat_int(0x3ff)) | splat_int(0x7e00);
  return select(magnitude > splat_int(0x7f800000), quiet, code) | sign;
#endif
}

/// Each lane rounded to the 16-bit type and widened again: BF16 by its bits, FP16 through its code
/// in widen.
REPLAYEVAL_INLINE F16 round_bf16(const F16& a) { return as_float(shift_left(bf16_code(a), 16)); }

REPLAYEVAL_INLINE F16 widen_fp16_code(const I16& code) {
#if defined(__AVX512F__)
  __m256i codes;
  store_short(&codes, code);
  return {{_mm512_cvtph_ps(codes)}};
#elif defined(__F16C__)
  __m128i codes[2];
  store_short(codes, code);
  return {{_mm256_cvtph_ps(codes[0]), _mm256_cvtph_ps(codes[1])}};
#else
  // Exponent and fraction moved to FP32's place read as value * 2^-112, subnormals included: 1.0 =
  // 0x3c00 -> 2^-112.
  const I16 magnitude = shift_left(code & splat_int(0x7fff), 13);
  const I16 sign = shift_left(code & splat_int(0x8000), 16);
  const I16 finite = as_int(as_float(magnitude) * splat(0x1p112F));
  const I16 special = magnitude | splat_int(0x7f800000);
  return as_float(select(magnitude > splat_int(0x0f7fffff), special, finite) | sign);
#endif
}
REPLAYEVAL_INLINE F16 round_fp16(const F16& a) { return widen_fp16_code(fp16_code(a)); }

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE::wide
