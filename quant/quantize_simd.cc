// The vectorised interpreter of a FormatDescriptor: the same operations in the same order as
// quantize_reference.cc on many elements at a time, bit for bit. Compiled once an instruction-set
// level.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12: false alarms inside immintrin.h
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "quant/quantize_core.h"

namespace replayeval {
namespace REPLAYEVAL_SIMD_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Pairs __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t NibblePairs __attribute__((vector_size(kLanes / 2)));

#define REPLAYEVAL_INLINE static inline __attribute__((always_inline))

template <class V, class T>
REPLAYEVAL_INLINE V load(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V, class T>
REPLAYEVAL_INLINE void store(T* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

REPLAYEVAL_INLINE Floats splat(float x) { return x - Floats{}; }
REPLAYEVAL_INLINE Words splat_word(uint32_t x) { return x - Words{}; }

REPLAYEVAL_INLINE Words word_max(Words a, Words b) { return a > b ? a : b; }
REPLAYEVAL_INLINE Ints int_max(Ints a, Ints b) { return a > b ? a : b; }
REPLAYEVAL_INLINE Ints int_min(Ints a, Ints b) { return a < b ? a : b; }

constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint32_t kInfinityBits = 0x7F800000u;

// ---- Numbers of a float format.

struct FloatConstants {
  int lowest, mantissa, shift, magnitude_bits;
  uint32_t max_code, past, nan;
  bool has_sign;
  int random_bits, left, right;
};

REPLAYEVAL_INLINE FloatConstants float_constants(const FloatFormat& f, bool saturate,
                                                 int random_bits) {
  FloatConstants k{};
  k.lowest = 128 - f.bias;
  k.mantissa = f.mantissa_bits;
  k.shift = 23 - f.mantissa_bits;
  k.magnitude_bits = f.magnitude_bits();
  k.max_code = f.max_code;
  k.past = saturate                ? f.max_code
           : f.inf_code != kNoCode ? f.inf_code
           : f.nan_code != kNoCode ? f.nan_code
                                   : f.max_code;
  k.nan = f.nan_code != kNoCode ? f.nan_code : f.max_code;
  k.has_sign = f.has_sign;
  k.random_bits = random_bits;
  k.left = random_bits > k.shift ? random_bits - k.shift : 0;
  k.right = random_bits > k.shift ? 0 : k.shift - random_bits;
  return k;
}

enum class Round { nearest, stochastic, up, down };

/// encode_float, encode_float_stochastic and encode_float_directed. The stochastic sum is
/// floor(significand 2^(n - shift)) + r: its bits from n up are the rounded significand.
template <Round kRound>
REPLAYEVAL_INLINE Words encode_floats(const FloatConstants& k, Floats y, Words random) {
  Words bits = (Words)y;
  Words a = bits & kMagnitude;
  Words exponent = a >> 23;
  Words significand = (a & 0x7FFFFFu) | (exponent > 0u ? splat_word(0x800000u) : Words{});
  Ints over = int_max((Ints)exponent, Ints{} + 1) - k.lowest;
  Ints above = int_max(over, Ints{});
  Ints below = above - over;
  Words rounded;
  if constexpr (kRound == Round::stochastic) {
    Ints right = int_min(below + k.right, Ints{} + 31);
    rounded = (((significand << k.left) >> (Words)right) + (random >> (32 - k.random_bits))) >>
              k.random_bits;
  } else if constexpr (kRound == Round::nearest) {
    Words shift = (Words)int_min(below + k.shift, Ints{} + 26);
    Words half = ((splat_word(1u) << shift) >> 1) - 1u + ((significand >> shift) & 1u);
    rounded = (significand + half) >> shift;
  } else {
    Words shift = (Words)int_min(below + k.shift, Ints{} + 31);
    rounded = significand >> shift;
    if constexpr (kRound == Round::up) {
      rounded += (rounded << shift) != significand ? splat_word(1u) : Words{};
    }
  }
  Words code = ((Words)above << k.mantissa) + rounded;
  code = code > k.max_code ? splat_word(k.past) : code;
  Words sign = bits >> 31;
  if (k.has_sign) {
    code |= sign << k.magnitude_bits;
  } else {
    code = sign != 0u ? Words{} : code;
  }
  return a > kInfinityBits ? splat_word(k.nan) : code;
}

/// encode_floats<Round::stochastic> of a format known when compiling: signed, saturating, with a
/// bias of at most 64, so that what is subnormal in FP32 is shifted out with or without its hidden
/// bit.
template <const FloatFormat& kFormat>
REPLAYEVAL_INLINE Words encode_known(Floats y, Words random) {
  constexpr int kLowest = 128 - kFormat.bias, kMantissa = kFormat.mantissa_bits;
  constexpr int kBits = kFormat.random_bits, kShift = 23 - kMantissa - kBits;
  constexpr uint32_t kSign = 1u << kFormat.magnitude_bits();
  static_assert(kFormat.has_sign && kLowest >= 64 && kBits > 0 && kShift >= 0);
  const Words bits = (Words)y;
  const Words a = bits & kMagnitude;
  const Ints exponent = (Ints)(a >> 23);
  const Words significand = (bits & 0x7FFFFFu) | 0x800000u;
  Words right = (Words)int_max(Ints{} + (kLowest + kShift) - exponent, Ints{} + kShift);
#if !defined(__AVX2__)
  right = (Words)int_min((Ints)right, Ints{} + 31);  // AVX2 and later: 0 for shifts of 32 or more
#endif
  const Words rounded = ((significand >> right) + (random >> (32 - kBits))) >> kBits;
  const Words whole = (Words)int_max(exponent, Ints{} + kLowest) << kMantissa;
  const Words code = whole + rounded - (static_cast<uint32_t>(kLowest) << kMantissa);
  const Words limited = code < kFormat.max_code ? code : splat_word(kFormat.max_code);
  constexpr uint32_t kNan = kFormat.nan_code != kNoCode ? kFormat.nan_code : kFormat.max_code;
  return a > kInfinityBits ? splat_word(kNan)
                           : limited | (bits >> (31 - kFormat.magnitude_bits()) & kSign);
}

struct DecodeConstants {
  int mantissa, magnitude_bits, power;
  uint32_t mask, inf, first_nan;
  bool has_sign, has_special, is_bf16;
};

REPLAYEVAL_INLINE DecodeConstants decode_constants(const FloatFormat& f) {
  DecodeConstants k{};
  k.mantissa = f.mantissa_bits;
  k.magnitude_bits = f.magnitude_bits();
  k.power = 127 - f.bias - f.mantissa_bits;
  k.mask = (1u << k.magnitude_bits) - 1u;
  k.inf = f.inf_code;
  k.first_nan = f.inf_code != kNoCode ? f.inf_code + 1u : f.nan_code;
  k.has_sign = f.has_sign;
  k.has_special = k.first_nan != kNoCode;
  k.is_bf16 = f.exponent_bits == 8;
  return k;
}

/// decode_float. A format with 8 exponent bits has FP32's exponents and is shifted into place.
REPLAYEVAL_INLINE Floats decode_floats(const DecodeConstants& k, Words code) {
  Words m = code & k.mask;
  Words sign = k.has_sign ? (code >> k.magnitude_bits) << 31 : Words{};
  Words value;
  if (k.is_bf16) {
    value = m << (23 - k.mantissa);
  } else {
    Words exponent = m >> k.mantissa;
    Words hidden = exponent > 0u ? splat_word(1u << k.mantissa) : Words{};
    Words significand = (m & ((1u << k.mantissa) - 1u)) | hidden;
    Words power = (Words)(int_max((Ints)exponent, Ints{} + 1) + k.power) << 23;
    value = (Words)(__builtin_convertvector((Ints)significand, Floats) * (Floats)power);
  }
  if (k.has_special) {
    value = m == k.inf ? splat_word(kInfinityBits) : value;
    value = m >= k.first_nan ? splat_word(0x7FC00000u) : value;
  }
  return (Floats)(value | sign);
}

// ---- Look-ups in a list of values.

#if defined(__AVX512F__)
REPLAYEVAL_INLINE Floats look_up16(const float* table, Words index) {
  return (Floats)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
}
REPLAYEVAL_INLINE Floats look_up32(const float* table, Words index) {
  return (Floats)_mm512_permutex2var_ps(_mm512_loadu_ps(table), (__m512i)index,
                                        _mm512_loadu_ps(table + 16));
}
REPLAYEVAL_INLINE Floats look_up256(const float* table, Words index) {
  return (Floats)_mm512_i32gather_ps((__m512i)index, table, 4);
}
#elif defined(__AVX2__)
REPLAYEVAL_INLINE Floats look_up256(const float* table, Words index) {
  return (Floats)_mm256_i32gather_ps(table, (__m256i)index, 4);
}
REPLAYEVAL_INLINE Floats look_up16(const float* table, Words index) {
  Floats low = (Floats)_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
  Floats high = (Floats)_mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);
  return index > 7u ? high : low;
}
#else
REPLAYEVAL_INLINE Floats look_up256(const float* table, Words index) {
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = table[index[i]];
  return v;
}
REPLAYEVAL_INLINE Floats look_up16(const float* table, Words index) {
  return look_up256(table, index);
}
#endif

constexpr int kTreeFloats =
    16 * 5 + 32 + 64 + 128;  // levels of at most 16 entries are padded to 16

/// Lays out ascending `table` (256 entries, padded with +infinity or the last value) for
/// count_below: entry i of level j is table[(2 i + 1) 2^(levels - 1 - j) - 1].
REPLAYEVAL_INLINE void build_tree(const float* table, int levels, float* tree) {
  for (int level = 0; level < levels; ++level) {
    int step = 1 << (levels - 1 - level);
    for (int i = 0; i < (1 << level); ++i) tree[i] = table[(2 * i + 1) * step - 1];
    for (int i = 1 << level; i < 16; ++i) tree[i] = 0;
    tree += level <= 4 ? 16 : 1 << level;
  }
}

/// Number of table entries <= x, at most 2^levels - 1: one comparison a level, the path so far
/// being the index into the next level.
REPLAYEVAL_INLINE Words count_below(const float* tree, int levels, Floats x) {
  Words path{};
  for (int level = 0; level < levels; ++level) {
    Floats pivot;
    if (level <= 4) {
      pivot = look_up16(tree, path);
      tree += 16;
    } else {
#if defined(__AVX512F__)
      int quarters = 1 << (level - 5);
      pivot = look_up32(tree, path);
      for (int i = 1; i < quarters; ++i) {
        Floats other = look_up32(tree + 32 * i, path);
        pivot = (path >> 5) == (uint32_t)i ? other : pivot;
      }
#else
      pivot = look_up256(tree, path);
#endif
      tree += 1 << level;
    }
    path = path + path + (pivot <= x ? splat_word(1u) : Words{});
  }
  return path;
}

// ---- Elements.

/// `fp16`, `e2m1`: floating, rounded stochastically with all of the format known when compiling.
enum class Kind { floating, fp16, e2m1, integer, values };

struct ElementConstants {
  FloatConstants number;
  float lowest, highest;
  uint32_t code_mask;
  float clip_low, clip_high;
  bool two_sided;  // clip_low is not -clip_high
  const float* tree;
  const float* values;
  int levels, count;
  uint32_t zero_code;
};

template <Kind kKind, bool kStochastic>
REPLAYEVAL_INLINE Words encode_elements(const ElementConstants& k, Floats y, Words random) {
  if constexpr (kKind == Kind::fp16) {
    return encode_known<kFp16>(y, random);
  } else if constexpr (kKind == Kind::e2m1) {
    return encode_known<kE2m1>(y, random);
  } else if constexpr (kKind == Kind::floating) {
    return encode_floats < kStochastic ? Round::stochastic : Round::nearest > (k.number, y, random);
  } else if constexpr (kKind == Kind::integer) {
    Floats clean = y == y ? y : Floats{};
    if constexpr (!kStochastic) {
      clean = clean < k.highest ? clean : splat(k.highest);
      clean = clean > k.lowest ? clean : splat(k.lowest);
      constexpr float kMagic = 12582912.0f;
      return ((Words)(clean + kMagic) - 0x4B400000u) & k.code_mask;
    } else {
      Floats a = (Floats)((Words)clean & kMagnitude);
      a = a < 65536.0f ? a : splat(65536.0f);
      Ints whole = __builtin_convertvector(a, Ints);
      Floats rest = (a - __builtin_convertvector(whole, Floats)) * 16777216.0f;
      Words up = ((Words) __builtin_convertvector(rest, Ints) + (random >> 8)) >> 24;
      whole += (Ints)up;
      whole = ((Words)y >> 31) != 0u ? -whole : whole;
      whole = int_max(int_min(whole, Ints{} + (int)k.highest), Ints{} + (int)k.lowest);
      return (Words)whole & k.code_mask;
    }
  } else {
    if constexpr (!kStochastic) {
      Words code = count_below(k.tree, k.levels, y);
      uint32_t last = (uint32_t)k.count - 1u;
      code = code > last ? splat_word(last) : code;
      return y == y ? code : splat_word(k.zero_code);
    } else {
      Floats clean = y == y ? y : splat(k.highest);
      clean = clean < k.highest ? clean : splat(k.highest);
      clean = clean > k.lowest ? clean : splat(k.lowest);
      Words left = count_below(k.tree, k.levels, clean);
      uint32_t last = (uint32_t)k.count - 1u;
      left = (left > last ? splat_word(last) : left) - 1u;
      bool small = k.count <= 16;
      Floats a = small ? look_up16(k.values, left) : look_up256(k.values, left);
      Floats b = small ? look_up16(k.values, left + 1u) : look_up256(k.values, left + 1u);
      Ints negative = clean < 0.0f;
      Floats part = negative ? b - clean : clean - a;
      Floats d = part / (b - a);
      Words up = ((Words) __builtin_convertvector(d * 16777216.0f, Ints) + (random >> 8)) >> 24;
      Words code = left + (negative ? 1u - up : up);
      return y == y ? code : splat_word(k.zero_code);
    }
  }
}

// Between vectors of words and packed codes. The compiler takes generic conversions of narrow
// vectors apart element by element, so the instructions are named where there are some.

#if defined(__AVX512F__)
REPLAYEVAL_INLINE Pairs widen_nibble_pairs(NibblePairs x) {
  return (Pairs)_mm512_cvtepu8_epi64(_mm_cvtsi64_si128((int64_t)x));
}
REPLAYEVAL_INLINE Words widen_bytes(Bytes x) { return (Words)_mm512_cvtepu8_epi32((__m128i)x); }
REPLAYEVAL_INLINE Words widen_halves(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
REPLAYEVAL_INLINE NibblePairs narrow_nibble_pairs(Pairs x) {
  return (NibblePairs)_mm_cvtsi128_si64(_mm512_cvtepi64_epi8((__m512i)x));
}
REPLAYEVAL_INLINE Bytes narrow_bytes(Words x) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)x); }
REPLAYEVAL_INLINE Halves narrow_halves(Words x) {
  return (Halves)_mm512_cvtepi32_epi16((__m512i)x);
}
#else
#if defined(__AVX2__)
REPLAYEVAL_INLINE Pairs widen_nibble_pairs(NibblePairs x) {
  int bytes;
  __builtin_memcpy(&bytes, &x, 4);
  return (Pairs)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
}
REPLAYEVAL_INLINE Words widen_bytes(Bytes x) {
  int64_t bytes;
  __builtin_memcpy(&bytes, &x, 8);
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes));
}
REPLAYEVAL_INLINE Words widen_halves(Halves x) { return (Words)_mm256_cvtepu16_epi32((__m128i)x); }
#else
REPLAYEVAL_INLINE Pairs widen_nibble_pairs(NibblePairs x) {
  return __builtin_convertvector(x, Pairs);
}
REPLAYEVAL_INLINE Words widen_bytes(Bytes x) { return __builtin_convertvector(x, Words); }
REPLAYEVAL_INLINE Words widen_halves(Halves x) { return __builtin_convertvector(x, Words); }
#endif
REPLAYEVAL_INLINE NibblePairs narrow_nibble_pairs(Pairs x) {
  return __builtin_convertvector(x, NibblePairs);
}
REPLAYEVAL_INLINE Bytes narrow_bytes(Words x) { return __builtin_convertvector(x, Bytes); }
REPLAYEVAL_INLINE Halves narrow_halves(Words x) { return __builtin_convertvector(x, Halves); }
#endif

REPLAYEVAL_INLINE void store_codes(std::byte* codes, int size, int64_t index, Words code) {
  if (size == 4) {
    Pairs pairs = (Pairs)code;
    pairs |= pairs >> 28;
    store(codes + index / 2, narrow_nibble_pairs(pairs));
  } else if (size == 8) {
    store(codes + index, narrow_bytes(code));
  } else {
    store(codes + 2 * index, narrow_halves(code));
  }
}

REPLAYEVAL_INLINE Words load_codes(const std::byte* codes, int size, int64_t index) {
  if (size == 4) {
    Pairs pairs = widen_nibble_pairs(load<NibblePairs>(codes + index / 2));
    pairs = (pairs | pairs << 28) & 0x0000000F0000000Full;
    return (Words)pairs;
  }
  if (size == 8) return widen_bytes(load<Bytes>(codes + index));
  return widen_halves(load<Halves>(codes + 2 * index));
}

enum class Scaling { none, multiply, divide };

/// A row to encode: y = x, x * factor or x / factor, element by element.
struct RowJob {
  const float* x;
  const float* factor;
  Scaling scaling;
  const uint32_t* random;
  int columns;
  std::byte* codes;
  int code_size;
  int64_t first;  // index of the row's first code
};

REPLAYEVAL_INLINE Floats scaled(Scaling scaling, Floats x, Floats factor) {
  return scaling == Scaling::none ? x : scaling == Scaling::multiply ? x * factor : x / factor;
}

/// What a row's elements turned out to be: how many y lie outside the clip limits, and the largest
/// bits of |y| (infinity and above, which a non-finite x always gives, mean that the counts have to
/// be taken apart).
struct RowCounts {
  uint64_t outside = 0;
  uint32_t largest = 0;
};

REPLAYEVAL_INLINE uint32_t largest_lane(Words v) {
  uint32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

template <Kind kKind, bool kStochastic>
REPLAYEVAL_INLINE Words encode_step(const ElementConstants& k, Floats x, Floats factor,
                                    Scaling scaling, Words random, Words* largest, Ints* outside) {
  Floats y = scaled(scaling, x, factor);
  *largest = word_max(*largest, (Words)y & kMagnitude);
  Ints past;
  if (k.two_sided) {
    past = (y > k.clip_high) | (y < k.clip_low);
  } else {
    past = (Floats)((Words)y & kMagnitude) > k.clip_high;
  }
  *outside = past;
  return encode_elements<kKind, kStochastic>(k, y, random);
}

template <Kind kKind, bool kStochastic>
__attribute__((noinline)) RowCounts encode_row(const ElementConstants& constants,
                                               const RowJob& job) {
  const ElementConstants k = constants;
  const Scaling scaling = job.scaling;
  const int columns = job.columns;
  const int size = kKind == Kind::fp16 ? 16 : kKind == Kind::e2m1 ? 4 : job.code_size;
  Words largest{};
  Ints outside{};
  int c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Floats factor = scaling == Scaling::none ? Floats{} : load<Floats>(job.factor + c);
    Words random = kStochastic ? load<Words>(job.random + c) : Words{};
    Ints past;
    Words code = encode_step<kKind, kStochastic>(k, load<Floats>(job.x + c), factor, scaling,
                                                 random, &largest, &past);
    outside -= past;
    store_codes(job.codes, size, job.first + c, code);
  }
  RowCounts counts;
  if (c < columns) {
    Floats x{}, factor = splat(1.0f);
    Words random{};
    int rest = columns - c;
    for (int i = 0; i < rest; ++i) {
      x[i] = job.x[c + i];
      if (scaling != Scaling::none) factor[i] = job.factor[c + i];
      if (kStochastic) random[i] = job.random[c + i];
    }
    Ints past;
    Words code = encode_step<kKind, kStochastic>(k, x, factor, scaling, random, &largest, &past);
    std::byte padded[2 * kLanes];
    store_codes(padded, size, 0, code);
    __builtin_memcpy(job.codes + (job.first + c) * size / 8, padded,
                     static_cast<size_t>(rest * size + 7) / 8);
    for (int i = 0; i < rest; ++i) counts.outside += past[i] != 0 ? 1 : 0;
  }
  for (int i = 0; i < kLanes; ++i) counts.outside += static_cast<uint32_t>(outside[i]);
  counts.largest = largest_lane(largest);
  return counts;
}

typedef RowCounts (*RowFunction)(const ElementConstants&, const RowJob&);

/// Whether a format rounds stochastically as encode_known<known> does.
REPLAYEVAL_INLINE bool rounds_as(const FormatDescriptor& d, const FloatFormat& known) {
  const FloatFormat& f = d.number;
  return d.saturate && d.random_bits == known.random_bits &&
         f.exponent_bits == known.exponent_bits && f.mantissa_bits == known.mantissa_bits &&
         f.bias == known.bias && f.max_code == known.max_code && f.nan_code == known.nan_code &&
         f.has_sign;
}

REPLAYEVAL_INLINE RowFunction row_function(const FormatDescriptor& d, bool stochastic) {
  switch (d.element) {
    case ElementKind::integer:
      return stochastic ? encode_row<Kind::integer, true> : encode_row<Kind::integer, false>;
    case ElementKind::values:
      return stochastic ? encode_row<Kind::values, true> : encode_row<Kind::values, false>;
    default:
      if (!stochastic) return encode_row<Kind::floating, false>;
      if (rounds_as(d, kFp16)) return encode_row<Kind::fp16, true>;
      if (rounds_as(d, kE2m1)) return encode_row<Kind::e2m1, true>;
      return encode_row<Kind::floating, true>;
  }
}

// ---- Scales.

REPLAYEVAL_INLINE Words amax_terms(Floats x) {
  Words a = (Words)x & kMagnitude;
  Words finite = a < 0x7F7FFFFFu ? a : splat_word(0x7F7FFFFFu);
  return a > kInfinityBits ? Words{} : finite;
}

/// Largest amax_term of a contiguous run.
REPLAYEVAL_INLINE float run_amax(const float* x, int64_t count) {
  Words most{}, second{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    most = word_max(most, amax_terms(load<Floats>(x + i)));
    second = word_max(second, amax_terms(load<Floats>(x + i + kLanes)));
  }
  for (; i + kLanes <= count; i += kLanes) most = word_max(most, amax_terms(load<Floats>(x + i)));
  uint32_t amax = largest_lane(word_max(most, second));
  for (; i < count; ++i) {
    uint32_t term = float_bits(amax_term(x[i]));
    amax = term > amax ? term : amax;
  }
  return bits_float(amax);
}

#if defined(__AVX512F__)
/// The largest |x|, as bits, of each of 16 blocks of 16: halves of the lanes against each other,
/// lanes that still stand for one block side by side.
REPLAYEVAL_INLINE Words block_maxima(const float* x) {
  const auto term = [x](int block) __attribute__((always_inline)) {
    return _mm512_and_si512(_mm512_loadu_si512(x + 16 * block), _mm512_set1_epi32(kMagnitude));
  };
  __m512i quad[4];
  for (int m = 0; m < 4; ++m) {  // 128-bit part p: block 4 p + m
    const __m512i a = term(m), b = term(4 + m), c = term(8 + m), d = term(12 + m);
    const __m512i ab =
        _mm512_max_epu32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
    const __m512i cd =
        _mm512_max_epu32(_mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xEE));
    quad[m] =
        _mm512_max_epu32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD));
  }
  const __m512i low = _mm512_max_epu32(_mm512_unpacklo_epi64(quad[0], quad[1]),
                                       _mm512_unpackhi_epi64(quad[0], quad[1]));
  const __m512i high = _mm512_max_epu32(_mm512_unpacklo_epi64(quad[2], quad[3]),
                                        _mm512_unpackhi_epi64(quad[2], quad[3]));
  const __m512 even = _mm512_shuffle_ps((__m512)low, (__m512)high, 0x88);
  const __m512 odd = _mm512_shuffle_ps((__m512)low, (__m512)high, 0xDD);
  return (Words)_mm512_max_epu32((__m512i)even, (__m512i)odd);
}
#endif

/// amax of the blocks of one band of block_rows rows.
REPLAYEVAL_INLINE void band_amax(const PackedLayout& l, const float* x, float* columns,
                                 float* amax) {
  const int n = l.state_dim;
  const float* source = x;
  if (l.block_rows > 1) {
    int c = 0;
    for (; c + kLanes <= n; c += kLanes) {
      Words most{};
      for (int r = 0; r < l.block_rows; ++r) {
        most = word_max(most, amax_terms(load<Floats>(x + static_cast<int64_t>(r) * n + c)));
      }
      store(columns + c, most);
    }
    for (; c < n; ++c) {
      float most = 0;
      for (int r = 0; r < l.block_rows; ++r) {
        most = larger(most, amax_term(x[static_cast<int64_t>(r) * n + c]));
      }
      columns[c] = most;
    }
    source = columns;
  }
  const int width = l.block_columns;
  for (int b = 0; b < l.blocks_across; ++b) amax[b] = run_amax(source + b * width, width);
}

/// amax of `count` blocks of 16 that lie one behind the other.
REPLAYEVAL_INLINE void amax_of_16(const float* x, int64_t count, float* amax) {
  int64_t b = 0;
#if defined(__AVX512F__)
  for (; b + 16 <= count; b += 16) {
    const Words most = block_maxima(x + 16 * b);
    // Only infinity and NaN make an amax_term differ from |x|.
    if (_mm512_cmpge_epu32_mask((__m512i)most, _mm512_set1_epi32(kInfinityBits))) break;
    store(amax + b, most);
  }
#endif
  for (; b < count; ++b) amax[b] = run_amax(x + 16 * b, 16);
}

struct ScaleConstants {
  FloatConstants number;
  DecodeConstants decode;
};

/// Scales of `count` blocks under one outer scale, in a float format: block_scale of
/// packed_layout.h. Writes values and factors, whole vectors of them (the arrays are padded); codes
/// go to `codes`, scale_size bytes each.
template <Round kRound>
REPLAYEVAL_INLINE void scale_vectors(const FormatDescriptor& d, const ScaleConstants& k,
                                     const OuterScale& outer, float candidate, const float* amax,
                                     int count, int scale_size, float* scale, float* factor,
                                     std::byte* codes) {
  const float reciprocal = 1.0f / d.divisor;
  const float folded = outer.encode * reciprocal;
  const float divided = d.divisor * outer.decode;
  for (int b = 0; b < count; b += kLanes) {
    Floats a = load<Floats>(amax + b);
    Floats raw;
    if (d.order == ScaleOrder::vllm) {
      raw = outer.encode * (a * reciprocal);
    } else if (d.order == ScaleOrder::te) {
      raw = a * folded;
    } else if (d.order == ScaleOrder::four_six) {
      raw = a / d.divisor * outer.encode;
    } else {
      raw = a > 0.0f ? a / divided : splat(1.0f);
    }
    Words code = encode_floats<kRound>(k.number, raw * candidate, Words{});
    Floats s = decode_floats(k.decode, code);
    Floats product = s * outer.decode;
    Floats f;
    if (d.order == ScaleOrder::modelopt) {
      f = product;
    } else {
      f = 1.0f / product;
      f = f < kFloatMax ? f : splat(kFloatMax);
      if (d.order == ScaleOrder::vllm) f = s > 0.0f ? f : Floats{};
    }
    store(scale + b, s);
    store(factor + b, f);
    if (b + kLanes <= count) {
      store_codes(codes, 8 * scale_size, b, code);
    } else {
      std::byte padded[2 * kLanes];
      store_codes(padded, 8 * scale_size, 0, code);
      __builtin_memcpy(codes + static_cast<size_t>(b) * scale_size, padded,
                       static_cast<size_t>(count - b) * scale_size);
    }
  }
}

/// Scales of `count` blocks under one outer scale in any format.
REPLAYEVAL_INLINE void scale_blocks(const FormatDescriptor& d, const ScaleConstants& k,
                                    const OuterScale& outer, float candidate, const float* amax,
                                    int count, int scale_size, float* scale, float* factor,
                                    std::byte* codes) {
  if (d.block_scale == BlockScale::floating) {
    if (d.scale_rounding == ScaleRounding::nearest) {
      scale_vectors<Round::nearest>(d, k, outer, candidate, amax, count, scale_size, scale, factor,
                                    codes);
    } else if (d.scale_rounding == ScaleRounding::up) {
      scale_vectors<Round::up>(d, k, outer, candidate, amax, count, scale_size, scale, factor,
                               codes);
    } else {
      scale_vectors<Round::down>(d, k, outer, candidate, amax, count, scale_size, scale, factor,
                                 codes);
    }
    return;
  }
  for (int b = 0; b < count; ++b) {
    ScaledBlock s = block_scale(d, amax[b], outer, candidate);
    scale[b] = s.scale;
    factor[b] = s.factor;
    __builtin_memcpy(codes + static_cast<size_t>(b) * scale_size, &s.code, scale_size);
  }
}

/// One number a block into one number a column.
REPLAYEVAL_INLINE void spread(const float* blocks, int count, int width, float* columns) {
  if (width % kLanes == 0) {
    for (int b = 0; b < count; ++b) {
      Floats v = splat(blocks[b]);
      for (int c = 0; c < width; c += kLanes) store(columns + b * width + c, v);
    }
  } else {
    for (int b = 0; b < count; ++b) {
      for (int c = 0; c < width; ++c) columns[b * width + c] = blocks[b];
    }
  }
}

// ---- Random words.

/// Philox-4x32-10 under one key. Of a head's counters only the first word varies, so that most of
/// the first two rounds is the same for all; `second_*` is what they leave, before the part that a
/// counter gives.
struct PhiloxRounds {
  uint64_t key0[10], key1[10];
  uint64_t first2, second0, second2, second3;
};

REPLAYEVAL_INLINE PhiloxRounds philox_rounds(const PhiloxKey& key) {
  PhiloxRounds r{};
  uint32_t key0 = key.key0, key1 = key.key1;
  for (int i = 0; i < 10; ++i) {
    r.key0[i] = key0;
    r.key1[i] = key1;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * key.counter2;
  const uint32_t first0 =
      static_cast<uint32_t>(product1 >> 32) ^ key.counter1 ^ static_cast<uint32_t>(r.key0[0]);
  const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * first0;
  r.first2 = key.counter3 ^ r.key1[0];
  r.second0 = static_cast<uint32_t>(product1) ^ r.key0[1];
  r.second2 = (product0 >> 32) ^ r.key1[1];
  r.second3 = static_cast<uint32_t>(product0);
  return r;
}

REPLAYEVAL_INLINE Pairs splat_pair(uint64_t x) { return x - Pairs{}; }

/// Products of the low words of every pair.
REPLAYEVAL_INLINE Pairs multiply_low(Pairs a, Pairs b) {
#if defined(__AVX512F__)
  return (Pairs)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Pairs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Pairs)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xFFFFFFFFull) * (b & 0xFFFFFFFFull);
#endif
}

/// The high word of every pair, in its low word; what the high one holds is not said. (A shuffle,
/// because shifts wait for the unit that multiplies.)
REPLAYEVAL_INLINE Pairs high_word(Pairs x) {
#if defined(__AVX512F__)
  return (Pairs)_mm512_shuffle_epi32((__m512i)x, (_MM_PERM_ENUM)0xF5);
#elif defined(__AVX2__)
  return (Pairs)_mm256_shuffle_epi32((__m256i)x, 0xF5);
#elif defined(__SSE2__)
  return (Pairs)_mm_shuffle_epi32((__m128i)x, 0xF5);
#else
  return x >> 32;
#endif
}

REPLAYEVAL_INLINE Pairs xor3(Pairs a, Pairs b, Pairs c) {
#if defined(__AVX512F__)
  return (Pairs)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

/// [a0 b0 a2 b2 ..] and [a1 b1 a3 b3 ..].
REPLAYEVAL_INLINE Words interleave_even(Pairs a, Pairs b) {
#if defined(__AVX512F__)
  return (Words)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
#else
  return (Words)Pairs{a[0], b[0]};
#endif
}
REPLAYEVAL_INLINE Words interleave_odd(Pairs a, Pairs b) {
#if defined(__AVX512F__)
  return (Words)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
#else
  return (Words)Pairs{a[1], b[1]};
#endif
}

constexpr int kCounters = kLanes / 2;  // a vector of pairs holds one word of so many counters

/// Words of kGroups vectors of counters from `counter` on: 4 kCounters a vector. A word lies in the
/// low half of its pair; the high half is anything.
template <int kGroups>
REPLAYEVAL_INLINE void philox_groups(const PhiloxRounds& r, uint32_t counter, uint32_t* words) {
  const Pairs multiplier0 = splat_pair(kPhiloxMultiplier0);
  const Pairs multiplier1 = splat_pair(kPhiloxMultiplier1);
  Pairs c0[kGroups], c1[kGroups], c2[kGroups], c3[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    // Even pairs take the first half of the counters, odd ones the second: the order of interleave.
    Pairs n;
    for (int i = 0; i < kCounters; ++i) {
      n[i] = static_cast<uint32_t>(g * kCounters + i / 2 + (i % 2) * (kCounters / 2));
    }
    const Pairs first = multiply_low(n + splat_pair(counter), multiplier0);
    const Pairs second = multiply_low(high_word(first) ^ splat_pair(r.first2), multiplier1);
    c0[g] = high_word(second) ^ splat_pair(r.second0);
    c1[g] = second;
    c2[g] = first ^ splat_pair(r.second2);
    c3[g] = splat_pair(r.second3);
  }
  for (int i = 2; i < 10; ++i) {
    const Pairs key0 = splat_pair(r.key0[i]), key1 = splat_pair(r.key1[i]);
    for (int g = 0; g < kGroups; ++g) {
      const Pairs product0 = multiply_low(c0[g], multiplier0);
      const Pairs product1 = multiply_low(c2[g], multiplier1);
      c0[g] = xor3(high_word(product1), c1[g], key0);
      c1[g] = product1;
      c2[g] = xor3(high_word(product0), c3[g], key1);
      c3[g] = product0;
    }
  }
  for (int g = 0; g < kGroups; ++g) {
    const Pairs low = (c0[g] & 0xFFFFFFFFull) | c1[g] << 32;
    const Pairs high = (c2[g] & 0xFFFFFFFFull) | c3[g] << 32;
    store(words + 2 * g * kLanes, interleave_even(low, high));
    store(words + (2 * g + 1) * kLanes, interleave_odd(low, high));
  }
}

/// The words of a row, at most 2 kLanes - 1 beyond `columns`.
__attribute__((noinline)) void random_words(const PhiloxRounds& r, int row, int columns,
                                            uint32_t* words) {
  constexpr int kStep = 2 * kLanes;
  const uint32_t first = static_cast<uint32_t>(row) << 16;
  int c = 0;
  for (; c + 4 * kStep <= columns; c += 4 * kStep) {
    philox_groups<4>(r, first + static_cast<uint32_t>(c / 4), words + c);
  }
  for (; c < columns; c += kStep) {
    philox_groups<1>(r, first + static_cast<uint32_t>(c / 4), words + c);
  }
}

// ---- A head.

/// Parts of the scratch memory; rows are padded to whole vectors.
struct Scratch {
  float *tree, *columns, *factor, *scale, *error, *block_amax, *block_scale, *block_factor,
      *try_scale, *try_factor, *block_error, *best_error;
  uint32_t* random;
  std::byte* try_codes;
};

REPLAYEVAL_INLINE Scratch divide_scratch(const PackedLayout& l, float* memory) {
  auto take = [&](int64_t count) {
    float* part = memory;
    memory += (count + 15) / 16 * 16;
    return part;
  };
  int64_t row = l.state_dim + 64;
  int64_t blocks = static_cast<int64_t>(l.blocks_down) * l.blocks_across + 16;
  Scratch s{};
  s.tree = take(kTreeFloats);
  s.columns = take(row);
  s.factor = take(row);
  s.scale = take(row);
  s.error = take(row);
  s.random = reinterpret_cast<uint32_t*>(take(row));
  s.block_amax = take(blocks);
  s.block_scale = take(blocks);
  s.block_factor = take(blocks);
  s.try_scale = take(blocks);
  s.try_factor = take(blocks);
  s.block_error = take(blocks);
  s.best_error = take(blocks);
  s.try_codes = reinterpret_cast<std::byte*>(take(blocks));
  return s;
}

REPLAYEVAL_INLINE ElementConstants element_constants(const FormatDescriptor& d, bool stochastic,
                                                     float* tree) {
  ElementConstants k{};
  k.clip_low = d.saturate ? d.clip_low : -__builtin_inff();
  k.clip_high = d.saturate ? d.clip_high : __builtin_inff();
  k.two_sided = k.clip_low != -k.clip_high;
  k.code_mask = d.code_bits < 32 ? (1u << storage_bits(d.code_bits)) - 1u : ~0u;
  if (d.element == ElementKind::floating) {
    k.number = float_constants(d.number, d.saturate, d.random_bits);
  } else if (d.element == ElementKind::integer) {
    k.lowest = static_cast<float>(d.lowest);
    k.highest = static_cast<float>(d.highest);
  } else if (d.element == ElementKind::values) {
    k.count = d.list.count;
    k.lowest = d.list.values[0];
    k.highest = d.list.values[k.count - 1];
    k.zero_code = d.list.zero_code;
    k.values = d.list.values;
    while ((1 << k.levels) < k.count) ++k.levels;
    build_tree(stochastic ? d.list.values : d.list.thresholds, k.levels, tree);
    k.tree = tree;
  }
  return k;
}

/// decode_element.
REPLAYEVAL_INLINE Floats decode_elements(const FormatDescriptor& d, const DecodeConstants& k,
                                         Words code) {
  if (d.element == ElementKind::floating) return decode_floats(k, code);
  if (d.element == ElementKind::integer) {
    int unused = 32 - storage_bits(d.code_bits);
    Ints value = d.lowest < 0 ? (Ints)(code << unused) >> unused : (Ints)code;
    return __builtin_convertvector(value, Floats);
  }
  if (d.element == ElementKind::values) {
    return d.list.count <= 16 ? look_up16(d.list.values, code & 15u)
                              : look_up256(d.list.values, code & 255u);
  }
  return (Floats)code;
}

template <Kind kKind>
REPLAYEVAL_INLINE void candidate_errors(const FormatDescriptor& d, const ElementConstants& k,
                                        const DecodeConstants& decode, Scaling scaling,
                                        const OuterScale& outer, const float* x, int columns,
                                        const float* scale, const float* factor, float* error) {
  const float limit = d.scale_max * d.divisor;
  const bool measured = d.span != Span::none && d.span != Span::fixed;
  for (int c = 0; c < columns; c += kLanes) {
    Floats v = load<Floats>(x + c);
    Words code =
        encode_elements<kKind, false>(k, scaled(scaling, v, load<Floats>(factor + c)), Words{});
    Floats value = decode_elements(d, decode, code) * load<Floats>(scale + c);
    if (measured) {
      value = value * outer.amax / limit;
    } else if (d.span == Span::fixed) {
      value = value * outer.decode;
    }
    Floats difference = value - v;
    store(error + c, d.choose == Choose::mse ? difference * difference
                                             : (Floats)((Words)difference & kMagnitude));
  }
}

/// Adds the errors of every block of a row to its sum, one element after the other: a lane is a
/// block.
REPLAYEVAL_INLINE void add_errors(const float* error, int across, int width, float* sums) {
  for (int b = 0; b < across; b += kLanes) {
    Words index{};
    for (int lane = 0; lane < kLanes; ++lane) {
      index[lane] = static_cast<uint32_t>(b + lane < across ? b + lane : across - 1) *
                    static_cast<uint32_t>(width);
    }
    Floats sum = load<Floats>(sums + b);
    for (int c = 0; c < width; ++c) sum = sum + look_up256(error + c, index);
    store(sums + b, sum);
  }
}

/// Counts of a row that holds non-finite numbers or a block whose scale is 0.
__attribute__((noinline)) void count_row(const FormatDescriptor& d, const RowJob& job,
                                         const float* scale, EncodeCounts* counts) {
  Ints non_finite{}, vanished{}, saturated{}, clipped{};
  for (int c = 0; c < job.columns; c += kLanes) {
    Floats x{}, factor = splat(1.0f), s = splat(1.0f);
    Ints present = Ints{} - 1;
    if (c + kLanes <= job.columns) {
      x = load<Floats>(job.x + c);
      if (job.scaling != Scaling::none) factor = load<Floats>(job.factor + c);
      if (scale != nullptr) s = load<Floats>(scale + c);
    } else {
      present = Ints{};
      for (int i = 0; c + i < job.columns; ++i) {
        present[i] = -1;
        x[i] = job.x[c + i];
        if (job.scaling != Scaling::none) factor[i] = job.factor[c + i];
        if (scale != nullptr) s[i] = scale[c + i];
      }
    }
    const Floats y = scaled(job.scaling, x, factor);
    const Ints finite = ((Words)x & kMagnitude) < kInfinityBits;
    const Ints lost = (s == 0.0f) & (x != 0.0f);
    Ints outside = ((y > d.clip_high) | (y < d.clip_low)) & ~lost;
    outside = d.saturate ? outside & present : Ints{};
    const Ints saturates = d.scaled() ? outside & ~finite : outside;
    non_finite -= ~finite & present;
    vanished -= lost & finite;
    saturated -= saturates;
    clipped -= outside & ~saturates;
  }
  for (int i = 0; i < kLanes; ++i) {
    counts->non_finite += static_cast<uint32_t>(non_finite[i]);
    counts->vanished += static_cast<uint32_t>(vanished[i]);
    counts->saturated += static_cast<uint32_t>(saturated[i]);
    counts->clipped += static_cast<uint32_t>(clipped[i]);
  }
}

}  // namespace

void random_row(const PhiloxKey& key, int row, int columns, uint32_t* words) {
  random_words(philox_rounds(key), row, columns, words);
}

float amax_fast(const float* x, int64_t count) { return run_amax(x, count); }

uint64_t non_finite_fast(const float* x, int64_t count) {
  uint64_t total = 0;
  int64_t i = 0;
  while (i + kLanes <= count) {
    Ints found{};
    int64_t end = count - i > (int64_t{1} << 30) ? i + (int64_t{1} << 30) : count;
    for (; i + kLanes <= end; i += kLanes) {
      found -= ((Words)load<Floats>(x + i) & kMagnitude) >= kInfinityBits;
    }
    for (int lane = 0; lane < kLanes; ++lane) total += static_cast<uint32_t>(found[lane]);
  }
  for (; i < count; ++i) total += magnitude(x[i]) <= kFloatMax ? 0 : 1;
  return total;
}

void encode_fast(const EncodeTask& task, float* memory, EncodeCounts* counts) {
  const FormatDescriptor& d = *task.descriptor;
  const PackedLayout& l = task.layout;
  const int n = l.state_dim;
  const bool blocks = d.block_scale != BlockScale::none;
  if (d.element == ElementKind::fp32) {
    int64_t elements = static_cast<int64_t>(l.head_dim) * n;
    counts->non_finite += non_finite_fast(task.x, elements);
    __builtin_memcpy(task.packed, task.x, static_cast<size_t>(elements) * 4);
    return;
  }
  Scratch s = divide_scratch(l, memory);
  const ElementConstants k = element_constants(d, task.stochastic, s.tree);
  const RowFunction encode = row_function(d, task.stochastic);
  const PhiloxRounds rounds = philox_rounds(task.key);

  RowJob job{};
  job.scaling = !d.scaled() || (!blocks && d.span == Span::none) ? Scaling::none
                : blocks && d.order == ScaleOrder::modelopt      ? Scaling::divide
                                                                 : Scaling::multiply;
  job.factor = s.factor;
  job.random = s.random;
  job.columns = n;
  job.codes = task.packed;
  job.code_size = l.code_size;

  auto row = [&](int r, const float* scale, bool zero_scale) __attribute__((always_inline)) {
    job.x = task.x + static_cast<int64_t>(r) * n;
    job.first = static_cast<int64_t>(r) * n;
    if (task.stochastic) random_words(rounds, r, n, s.random);
    RowCounts found = encode(k, job);
    if (found.largest >= kInfinityBits || zero_scale) {
      count_row(d, job, scale, counts);
    } else if (d.scaled()) {
      counts->clipped += found.outside;
    } else {
      counts->saturated += found.outside;
    }
  };

  OuterScale outer = d.span == Span::fixed   ? fixed_outer_scale(task.fixed_scale)
                     : d.span == Span::layer ? outer_scale(d, task.layer_amax)
                                             : OuterScale{};
  auto store_outer = [&](int index) {
    __builtin_memcpy(task.packed + l.outer + 4 * static_cast<size_t>(index), &outer.decode, 4);
  };

  if (!blocks) {
    if (d.span == Span::head) {
      outer = outer_scale(d, run_amax(task.x, static_cast<int64_t>(l.head_dim) * n));
    }
    if (d.span != Span::none && d.span != Span::row) store_outer(0);
    for (int r = 0; r < l.head_dim; ++r) {
      if (d.span == Span::row) {
        outer = outer_scale(d, run_amax(task.x + static_cast<int64_t>(r) * n, n));
        store_outer(r);
      }
      if (d.span == Span::row || (r == 0 && job.scaling != Scaling::none)) {
        Floats f = splat(outer.encode);
        for (int c = 0; c < n; c += kLanes) store(s.factor + c, f);
      }
      row(r, nullptr, false);
    }
    return;
  }

  const int across = l.blocks_across;
  const bool rows_of_16 = l.block_rows == 1 && l.block_columns == 16;
  if (rows_of_16) {
    amax_of_16(task.x, static_cast<int64_t>(l.blocks_down) * across, s.block_amax);
  }
  for (int band = 0; band < l.blocks_down && !rows_of_16; ++band) {
    band_amax(l, task.x + static_cast<int64_t>(band) * l.block_rows * n, s.columns,
              s.block_amax + static_cast<int64_t>(band) * across);
  }
  if (d.span == Span::head) {
    outer = outer_scale(d, run_amax(s.block_amax, static_cast<int64_t>(l.blocks_down) * across));
  }
  if (d.span != Span::none && d.span != Span::row) store_outer(0);

  ScaleConstants sk{};
  if (d.block_scale == BlockScale::floating) {
    sk.number = float_constants(d.scale_number, true, 1);
    sk.decode = decode_constants(d.scale_number);
  }
  DecodeConstants decode{};
  if (d.element == ElementKind::floating) decode = decode_constants(d.number);
  float* nearest_tree = s.tree;
  ElementConstants nearest = k;
  float second_tree[kTreeFloats];
  if (d.candidate_count > 1 && task.stochastic) {
    nearest_tree = second_tree;
    nearest = element_constants(d, false, nearest_tree);
  }

  // Bands under one outer scale are scaled together: one band a group for Span::row, otherwise all.
  const int group_bands = d.span == Span::row ? 1 : l.blocks_down;
  for (int group = 0; group < l.blocks_down; group += group_bands) {
    const int64_t first = static_cast<int64_t>(group) * across;
    const int count = group_bands * across;
    const float* amax = s.block_amax + first;
    float* scale = s.block_scale + first;
    float* factor = s.block_factor + first;
    std::byte* codes = task.packed + l.scales + first * l.scale_size;
    if (d.span == Span::row) {
      outer = outer_scale(d, run_amax(amax, across));
      store_outer(group);
    }
    scale_blocks(d, sk, outer, d.candidates[0], amax, count, l.scale_size, scale, factor, codes);
    for (int candidate = 0; d.candidate_count > 1 && candidate < d.candidate_count; ++candidate) {
      if (candidate > 0) {
        scale_blocks(d, sk, outer, d.candidates[candidate], amax, count, l.scale_size, s.try_scale,
                     s.try_factor, s.try_codes);
      }
      const float* try_scale = candidate > 0 ? s.try_scale : scale;
      const float* try_factor = candidate > 0 ? s.try_factor : factor;
      for (int band = 0; band < group_bands; ++band) {
        spread(try_scale + band * across, across, l.block_columns, s.scale);
        spread(try_factor + band * across, across, l.block_columns, s.factor);
        float* sums = s.block_error + band * across;
        for (int b = 0; b < across; ++b) sums[b] = 0;
        for (int i = 0; i < l.block_rows; ++i) {
          int r = (group + band) * l.block_rows + i;
          const float* x = task.x + static_cast<int64_t>(r) * n;
          if (n % kLanes != 0) {  // whole vectors are read
            for (int c = 0; c < n; ++c) s.columns[c] = x[c];
            x = s.columns;
          }
          if (d.element == ElementKind::floating) {
            candidate_errors<Kind::floating>(d, nearest, decode, job.scaling, outer, x, n, s.scale,
                                             s.factor, s.error);
          } else if (d.element == ElementKind::integer) {
            candidate_errors<Kind::integer>(d, nearest, decode, job.scaling, outer, x, n, s.scale,
                                            s.factor, s.error);
          } else {
            candidate_errors<Kind::values>(d, nearest, decode, job.scaling, outer, x, n, s.scale,
                                           s.factor, s.error);
          }
          add_errors(s.error, across, l.block_columns, sums);
        }
      }
      for (int b = 0; b < count; ++b) {
        if (candidate == 0) {
          s.best_error[b] = s.block_error[b];
        } else if (s.block_error[b] < s.best_error[b]) {
          s.best_error[b] = s.block_error[b];
          scale[b] = s.try_scale[b];
          factor[b] = s.try_factor[b];
          __builtin_memcpy(codes + static_cast<size_t>(b) * l.scale_size,
                           s.try_codes + static_cast<size_t>(b) * l.scale_size, l.scale_size);
        }
      }
    }
    for (int band = 0; band < group_bands; ++band) {
      spread(factor + band * across, across, l.block_columns, s.factor);
      bool zero_scale = false;
      for (int b = band * across; b < (band + 1) * across; ++b) zero_scale |= scale[b] == 0;
      if (zero_scale) spread(scale + band * across, across, l.block_columns, s.scale);
      for (int i = 0; i < l.block_rows; ++i) {
        row((group + band) * l.block_rows + i, zero_scale ? s.scale : nullptr, zero_scale);
      }
    }
  }
}

namespace {

/// Asks for what a walk through packed heads reads soon: one page ahead, where the machine does not
/// look by itself.
REPLAYEVAL_INLINE void prefetch(const std::byte* at) { __builtin_prefetch(at + 4096); }

/// table[code] of kLanes 4-bit codes.
REPLAYEVAL_INLINE Floats look_up_nibbles(const float* table, const std::byte* codes) {
#if defined(__AVX512F__)
  // Eight codes a word, in eight lanes, each shifted down to its own; a look-up reads four bits.
  int low, high;
  __builtin_memcpy(&low, codes, 4);
  __builtin_memcpy(&high, codes + 4, 4);
  const __m512i words = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xFF00, high);
  const __m512i shifts =
      _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  return look_up16(table, (Words)_mm512_srlv_epi32(words, shifts));
#else
  return look_up16(table, load_codes(codes, 4, 0));
#endif
}

/// decode_fast of 4-bit codes in blocks of whole vectors of a row (NVFP4, MXFP4): elements from a
/// table of their sixteen values, scales of kChunk blocks at a time. Factors in the same order.
REPLAYEVAL_INLINE void decode_nibble_blocks(const FormatDescriptor& d, const PackedLayout& l,
                                            const std::byte* packed, float* x) {
  constexpr int kChunk = 64;
  DecodeConstants k{};
  if (d.element == ElementKind::floating) k = decode_constants(d.number);
  DecodeConstants sk{};
  if (d.block_scale == BlockScale::floating) sk = decode_constants(d.scale_number);
  float table[16];
  for (int first = 0; first < 16; first += kLanes) {
    Words code;
    for (int i = 0; i < kLanes; ++i) code[i] = static_cast<uint32_t>(first + i);
    store(table + first, decode_elements(d, k, code));
  }
  const std::byte* scales = packed + l.scales;
  const int total = l.head_dim * l.blocks_across;
  float scale[kChunk];
  float outer = 1;
  if (l.outer_count > 0) __builtin_memcpy(&outer, packed + l.outer, 4);
  for (int first = 0; first < total; first += kChunk) {
    const int count = total - first < kChunk ? total - first : kChunk;
    const std::byte* codes = scales + static_cast<size_t>(first) * l.scale_size;
    if (d.block_scale == BlockScale::fp32) {
      __builtin_memcpy(scale, codes, static_cast<size_t>(count) * 4);
    } else if (d.block_scale == BlockScale::e8m0) {
      for (int b = 0; b < count; ++b) scale[b] = decode_e8m0(static_cast<uint32_t>(codes[b]));
    } else {
      std::byte padded[2 * kChunk] = {};
      if (count < kChunk) {
        __builtin_memcpy(padded, codes, static_cast<size_t>(count) * l.scale_size);
        codes = padded;
      }
      for (int b = 0; b < count; b += kLanes)
        store(scale + b, decode_floats(sk, load_codes(codes, 8 * l.scale_size, b)));
    }
    if (l.block_columns == kLanes && l.outer_count == 1) {  // NVFP4
      const std::byte* from = packed + static_cast<size_t>(first) * (kLanes / 2);
      float* to = x + static_cast<size_t>(first) * kLanes;
      for (int b = 0; b < count; ++b) {
        if (b % 8 == 0) prefetch(from + b * (kLanes / 2));
        store(to + b * kLanes,
              look_up_nibbles(table, from + b * (kLanes / 2)) * splat(scale[b]) * outer);
      }
      continue;
    }
    for (int b = 0; b < count; ++b) {
      if (l.outer_count > 1) {
        const size_t at = static_cast<size_t>((first + b) / l.blocks_across);
        __builtin_memcpy(&outer, packed + l.outer + 4 * at, 4);
      }
      const int64_t start = static_cast<int64_t>(first + b) * l.block_columns;
      prefetch(packed + start / 2);
      const Floats s = splat(scale[b]);
      for (int c = 0; c < l.block_columns; c += kLanes) {
        Floats v = look_up_nibbles(table, packed + (start + c) / 2) * s;
        if (l.outer_count > 0) v = v * outer;
        store(x + start + c, v);
      }
    }
  }
}

/// decode_fast of plain FP16: the machine's own conversion, but for NaN, whose payload it keeps.
REPLAYEVAL_INLINE void decode_fp16(const std::byte* packed, int64_t count, float* x) {
  int64_t i = 0;
#if defined(__AVX512F__) || defined(__F16C__)
  for (; i + kLanes <= count; i += kLanes) {
    prefetch(packed + 2 * i);
#if defined(__AVX512F__)
    const Floats v = (Floats)_mm512_cvtph_ps((__m256i)load<Halves>(packed + 2 * i));
#else
    const Floats v = (Floats)_mm256_cvtph_ps((__m128i)load<Halves>(packed + 2 * i));
#endif
    const Words nan = ((Words)v & 0x80000000u) | 0x7FC00000u;
    store(x + i, v == v ? v : (Floats)nan);
  }
#endif
  for (; i < count; ++i) {
    uint16_t code;
    __builtin_memcpy(&code, packed + 2 * i, 2);
    x[i] = decode_float(kFp16, code);
  }
}

}  // namespace

void decode_fast(const FormatDescriptor& d, const PackedLayout& l, const std::byte* packed,
                 float* memory, float* x) {
  if (l.code_size == 4 && d.block_scale != BlockScale::none && l.block_rows == 1 &&
      l.block_columns % kLanes == 0 && l.blocks_across * l.block_columns == l.state_dim) {
    decode_nibble_blocks(d, l, packed, x);
    return;
  }
  const int n = l.state_dim;
  if (d.element == ElementKind::fp32) {
    __builtin_memcpy(x, packed, static_cast<size_t>(l.head_dim) * n * 4);
    return;
  }
  if (d.element == ElementKind::floating && d.number == kFp16 &&
      d.block_scale == BlockScale::none && l.outer_count == 0) {
    decode_fp16(packed, static_cast<int64_t>(l.head_dim) * n, x);
    return;
  }
  Scratch s = divide_scratch(l, memory);
  DecodeConstants k{};
  if (d.element == ElementKind::floating) k = decode_constants(d.number);
  DecodeConstants sk{};
  if (d.block_scale == BlockScale::floating) sk = decode_constants(d.scale_number);
  const bool blocks = d.block_scale != BlockScale::none;
  const int across = l.blocks_across;
  float outer = 1;
  for (int r = 0; r < l.head_dim; ++r) {
    if (l.outer_count > 1 || (l.outer_count == 1 && r == 0)) {
      __builtin_memcpy(&outer, packed + l.outer + 4 * static_cast<size_t>(r), 4);
    }
    if (blocks && r % l.block_rows == 0) {
      const std::byte* codes =
          packed + l.scales + static_cast<size_t>(r / l.block_rows) * across * l.scale_size;
      if (d.block_scale == BlockScale::fp32) {
        __builtin_memcpy(s.block_scale, codes, static_cast<size_t>(across) * 4);
      } else if (d.block_scale == BlockScale::e8m0) {
        for (int b = 0; b < across; ++b) {
          s.block_scale[b] = decode_e8m0(static_cast<uint32_t>(codes[b]));
        }
      } else {
        int b = 0;
        for (; b + kLanes <= across; b += kLanes) {
          store(s.block_scale + b, decode_floats(sk, load_codes(codes, 8 * l.scale_size, b)));
        }
        if (b < across) {
          std::byte padded[2 * kLanes] = {};
          __builtin_memcpy(padded, codes + static_cast<size_t>(b) * l.scale_size,
                           static_cast<size_t>(across - b) * l.scale_size);
          store(s.block_scale + b, decode_floats(sk, load_codes(padded, 8 * l.scale_size, 0)));
        }
      }
      spread(s.block_scale, across, l.block_columns, s.scale);
    }
    float* out = x + static_cast<int64_t>(r) * n;
    int64_t first = static_cast<int64_t>(r) * n;
    const bool has_outer = l.outer_count > 0;
    int c = 0;
    for (; c + kLanes <= n; c += kLanes) {
      Floats v = decode_elements(d, k, load_codes(packed, l.code_size, first + c));
      if (blocks) v = v * load<Floats>(s.scale + c);
      if (has_outer) v = v * outer;
      store(out + c, v);
    }
    if (c < n) {
      std::byte padded[2 * kLanes] = {};
      __builtin_memcpy(padded, packed + (first + c) * l.code_size / 8,
                       static_cast<size_t>((n - c) * l.code_size + 7) / 8);
      Floats v = decode_elements(d, k, load_codes(padded, l.code_size, 0));
      if (blocks) v = v * load<Floats>(s.scale + c);
      if (has_outer) v = v * outer;
      for (int i = 0; c + i < n; ++i) out[c + i] = v[i];
    }
  }
}

}  // namespace REPLAYEVAL_SIMD_NAMESPACE
}  // namespace replayeval
