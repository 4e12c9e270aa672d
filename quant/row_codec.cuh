// Encoding and decoding of one head whose matrix lies in registers, the device's fast form for rows
// of 128 columns: four neighbouring threads share a row, each keeps 32 numbers of it. Formats and
// bits are those of block_codec.cuh. The common numbers are rounded without taking them apart: for
// |y| and the smallest normal number c of a format, z = max(|y| + c, 2 |y|) has the format's code
// in its upper bits, subnormals included.
#pragma once

#include "quant/block_codec.cuh"
#include "quant/list_buckets.h"

namespace replayeval {

constexpr int kRowColumns = 128;
constexpr int kRowThreads = 4;
constexpr int kRowQuads = kRowColumns / kRowThreads / 4;

/// Quad i of part p begins at column 16 i + 4 p: a thread has four of the sixteen lanes of a sum.
struct LaneColumns {
  static constexpr bool kRuns = false;
  __host__ __device__ static constexpr int column(int part, int i) { return 16 * i + 4 * part; }
};
/// Quad i of part p begins at column 32 p + 4 i: a thread has a run of columns.
struct RunColumns {
  static constexpr bool kRuns = true;
  __host__ __device__ static constexpr int column(int part, int i) { return 32 * part + 4 * i; }
};

/// What the functions below take: one candidate, scales of a row, of the head or of blocks of 16 or
/// 32 columns of a row, nothing that prepares the matrix or keeps a residual.
inline bool row_codec_takes(const StateFormat& format, int state_dim) {
  const FormatDescriptor& d = format.descriptor;
  const bool blocks = d.block_scale != BlockScale::none;
  return state_dim == kRowColumns && !format.library && !format.residual &&
         d.candidate_count == 1 && d.zero_point == ZeroPoint::none && !d.column_scale &&
         d.hadamard == Axis::none && d.order == ScaleOrder::vllm &&
         (d.span == Span::none || d.span == Span::row || d.span == Span::head) &&
         (!blocks || (d.block_rows == 1 && (d.block_columns == 16 || d.block_columns == 32)));
}

namespace row_codec {

__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

/// n + 1 where a condition holds, in one instruction beside it.
__device__ __forceinline__ uint32_t one_more_if(bool condition, uint32_t n) {
  asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %1, 0;\n\t@p add.u32 %0, %0, 1;\n\t}"
      : "+r"(n)
      : "r"(static_cast<uint32_t>(condition)));
  return n;
}

/// Rounds finite magnitudes a to the values of a format.
template <FloatFormat kFormat>
struct KnownNumber {
  static constexpr int kShift = 23 - kFormat.mantissa_bits;
  static constexpr uint32_t kMask = 0xFFFFFFFFu << kShift;
  static constexpr uint32_t kLeastExponent = 128 - kFormat.bias;  // FP32's, of c
  static constexpr bool kWide = kFormat.exponent_bits == 8;       // FP32's own range: 2 a overflows
  static constexpr float kLeast = bits_float(kLeastExponent << 23);
  static constexpr float kLargest = decode_float(kFormat, kFormat.max_code);

  /// To nearest, ties to even.
  static __device__ __forceinline__ float nearest(float a) {
    constexpr float largest = kLargest;
    const uint32_t bits = float_bits(a);
    const uint32_t t = (bits + ((1u << kShift >> 1) - 1u) + (bits >> kShift & 1u)) & kMask;
    const float normal = bits_float(min(t, float_bits(largest)));
    if constexpr (kWide) return normal;
    constexpr float least = kLeast;
    constexpr float unit = least * static_cast<float>(1 << kShift);  // its ulp is the gap below c
    return a < least ? (a + unit) - unit : normal;
  }
  /// a' scale, for a' = a rounded stochastically: with t = max(a' + c, 2 a'), a' is t - c or t / 2,
  /// the smaller one, and (t - c) scale = fma(t, scale, -c scale), rounded once like the product.
  template <bool kScaled>
  static __device__ __forceinline__ float stochastic(float a, uint32_t word, float scale) {
    constexpr FloatFormat f = kFormat;
    constexpr float largest = kLargest, least = kLeast;
    const float z = kWide ? a : fmaxf(__fadd_rz(a, least), a + a);
    uint32_t raised;
    asm("mad.lo.u32 %0, %1, %2, %3;"
        : "=r"(raised)
        : "r"(word >> (32 - f.random_bits)), "n"(1 << (kShift - f.random_bits)),
          "r"(float_bits(z)));
    constexpr uint32_t most = kWide ? float_bits(largest) : float_bits(2 * largest);
    const float t = bits_float(min(raised & kMask, most));
    if constexpr (kWide) return kScaled ? t * scale : t;
    if constexpr (kScaled) return fminf(__fmaf_rn(t, scale, -least * scale), t * (0.5f * scale));
    return fminf(t - least, t * 0.5f);
  }
  static __device__ __forceinline__ uint32_t code(float value) {
    if constexpr (kWide) return float_bits(value) >> kShift;
    constexpr float least = kLeast;
    return (float_bits(fmaxf(value + least, value + value)) >> kShift) -
           (kLeastExponent << kFormat.mantissa_bits);
  }
};

/// What round_known asks of an element: rounded(y, word, scale) is the magnitude of y (kSigned: y)
/// rounded, times the scale of its block. kTwoSided: its range is not the same on both sides;
/// kOnlyStochastic: it rounds in no other way; kByQuads: rounded(y, words, values) rounds four
/// numbers, without the scale.
struct ElementTraits {
  static constexpr bool kKnown = false, kSigned = false, kTwoSided = false, kOnlyStochastic = false,
                        kByQuads = false;
};

/// A number known to the compiler.
template <FloatFormat kFormat>
struct KnownElement : ElementTraits {
  static constexpr bool kKnown = true;
  template <bool kStochastic, bool kScaled>
  __device__ __forceinline__ float rounded(float y, uint32_t word, float scale) const {
    using Number = KnownNumber<kFormat>;
    if constexpr (kStochastic) return Number::template stochastic<kScaled>(fabsf(y), word, scale);
    const float value = Number::nearest(fabsf(y));
    return kScaled ? value * scale : value;
  }
};

/// What a float's magnitude past the largest becomes.
__device__ inline float past_largest(const FormatDescriptor& d) {
  return d.saturate || (d.number.inf_code == kNoCode && d.number.nan_code == kNoCode)
             ? decode_float(d.number, d.number.max_code)
         : d.number.inf_code != kNoCode ? bits_float(0x7F800000u)
                                        : bits_float(0x7FC00000u);
}

/// Any signed float of FP32's range or less: KnownNumber with its constants in registers. A float
/// of FP32's range has no subnormal numbers but FP32's: `least` is 0 and z is |y|.
struct FloatElement : ElementTraits {
  uint32_t shift, mask, odd_code, random_shift, random_factor;
  float least, unit, largest, past, twice, half;

  static __device__ bool takes(const FormatDescriptor& d, bool stochastic) {
    const FloatFormat& f = d.number;
    if (d.element != ElementKind::floating || !f.has_sign || f.mantissa_bits > 22) return false;
    if (f.exponent_bits == 8) return f.bias == 127;
    return f.exponent_bits < 8 && f.bias >= 0 && f.bias < 127 &&
           (1 << f.exponent_bits) - f.bias < 126 &&
           (!stochastic || 23 - f.mantissa_bits >= d.random_bits);
  }
  __device__ explicit FloatElement(const FormatDescriptor& d) {
    const FloatFormat& f = d.number;
    const bool wide = f.exponent_bits == 8;
    shift = 23 - static_cast<uint32_t>(f.mantissa_bits);
    mask = 0xFFFFFFFFu << shift;
    // Without a mantissa a code is even or odd as its exponent.
    odd_code = f.mantissa_bits == 0 && f.bias % 2 == 0 ? 1u : 0u;
    // Whether a word carries depends on no more of its bits than are discarded.
    const uint32_t random_bits = min(static_cast<uint32_t>(d.random_bits), shift);
    random_shift = 32 - random_bits;
    random_factor = 1u << (shift - random_bits);
    least = wide ? 0.0f : power_of_two(1 - f.bias);
    unit = least * static_cast<float>(1u << shift);
    largest = decode_float(f, f.max_code);
    past = past_largest(d);
    twice = wide ? 1.0f : 2.0f;
    half = wide ? 1.0f : 0.5f;
  }
  template <bool kStochastic, bool kScaled>
  __device__ __forceinline__ float rounded(float y, uint32_t word, float scale) const {
    const float a = fabsf(y);
    float value;
    if constexpr (kStochastic) {
      const float z = fmaxf(__fadd_rz(a, least), a * twice);
      const uint32_t raised = (word >> random_shift) * random_factor + float_bits(z);
      const float t = bits_float(raised & mask);
      value = fminf(t - least, t * half);
    } else {
      const uint32_t bits = float_bits(a);
      const uint32_t t =
          (bits + ((1u << shift >> 1) - 1u) + ((bits >> shift ^ odd_code) & 1u)) & mask;
      value = a < least ? (a + unit) - unit : bits_float(t);
    }
    value = value > largest ? past : value;
    return kScaled ? value * scale : value;
  }
};

/// A float whose stochastic rounding takes more random bits than it discards of its normal numbers:
/// with g the gap at |y|, w the number below and n random bits r, it rounds up where
/// |y| - w >= g (1 - r 2^-n), all exact.
struct FineFloatElement : ElementTraits {
  static constexpr bool kOnlyStochastic = true;
  uint32_t random_shift;
  float least, unit, gap, random_unit, largest, past;

  static __device__ bool takes(const FormatDescriptor& d) {
    const FloatFormat& f = d.number;
    const int shift = 23 - f.mantissa_bits;
    return d.element == ElementKind::floating && f.has_sign && f.exponent_bits < 8 && f.bias >= 0 &&
           shift > 0 && shift < d.random_bits && f.bias + f.mantissa_bits <= 100 &&
           (1 << f.exponent_bits) - f.bias + shift < 125;
  }
  __device__ explicit FineFloatElement(const FormatDescriptor& d)
      : random_shift(32 - static_cast<uint32_t>(d.random_bits)),
        least(power_of_two(1 - d.number.bias)),
        unit(power_of_two(23 - d.number.mantissa_bits)),
        gap(power_of_two(-d.number.mantissa_bits)),
        random_unit(power_of_two(-d.random_bits)),
        largest(decode_float(d.number, d.number.max_code)),
        past(past_largest(d)) {}
  template <bool kStochastic, bool kScaled>
  __device__ __forceinline__ float rounded(float y, uint32_t word, float scale) const {
    static_assert(kStochastic);
    const float a = fminf(fabsf(y), largest + largest);
    const float power = bits_float(float_bits(fmaxf(a, least)) & 0x7F800000u);
    const float whole = __fadd_rz(a, power * unit) - power * unit;
    const float rest =
        __fmaf_rn(static_cast<float>(word >> random_shift), -random_unit, 1.0f) * (power * gap);
    float value = a - whole >= rest ? __fmaf_rn(power, gap, whole) : whole;
    value = value > largest ? past : value;
    return kScaled ? value * scale : value;
  }
};

/// Integers lowest .. highest, zero among them; it is positive.
struct IntegerElement : ElementTraits {
  static constexpr bool kSigned = true, kTwoSided = true;
  float highest, deepest;

  static __device__ bool takes(const FormatDescriptor& d) {
    return d.element == ElementKind::integer && d.lowest <= 0 && d.highest >= 0;
  }
  __device__ explicit IntegerElement(const FormatDescriptor& d)
      : highest(static_cast<float>(d.highest)), deepest(-static_cast<float>(d.lowest)) {}
  template <bool kStochastic, bool kScaled>
  __device__ __forceinline__ float rounded(float y, uint32_t word, float scale) const {
    const float limit = y < 0 ? deepest : highest;
    float value;
    if constexpr (kStochastic) {
      // floor(d 2^24) + r >= 2^24 means d >= 1 - r 2^-24, both exact.
      constexpr float kWhole = 8388608.0f;
      const float a = fminf(fabsf(y), 65536.0f);
      const float whole = __fadd_rz(a, kWhole) - kWhole;
      const float rest = 1.0f - static_cast<float>(word >> 8) * 0x1p-24f;
      value = fminf(a - whole >= rest ? whole + 1.0f : whole, limit);
    } else {
      value = round_to_even(fminf(fabsf(y), limit));
    }
    value = bits_float(float_bits(value) | (float_bits(y) & 0x80000000u)) + 0.0f;
    return kScaled ? value * scale : value;
  }
};

/// A list of values. What divides them (to nearest the thresholds, stochastically all values but
/// the first) is searched by halves: the first two dividers are every thread's, those of the next
/// steps the warp's lanes hold. Of more than 16 values the lanes hold every eighth divider, and the
/// last three steps read the list.
template <bool kSmall>  // up to 16 values
struct ValueElement : ElementTraits {
  static constexpr bool kSigned = true, kTwoSided = true;
  static constexpr int kLanes = kSmall ? 16 : 32, kApart = kSmall ? 1 : 8;
  static_assert(kLanes * kApart == (kSmall ? 16 : kMaxValues));
  const float *dividers, *values;
  float root, lower, upper;
  float third, fourth, fifth;  // the lane's
  float value;                 // kSmall: the lane's

  static __device__ bool takes(const FormatDescriptor& d, bool stochastic) {
    if (d.element != ElementKind::values) return false;
    bool plain = true;
    for (int i = 0; i < d.list.count && stochastic; ++i) {
      const float x = d.list.values[i];
      plain = plain && magnitude(x) <= block_codec::kMostGap &&
              (i == 0 || x - d.list.values[i - 1] >= block_codec::kLeastGap);
    }
    return plain;
  }
  __device__ ValueElement(const FormatDescriptor& d, bool stochastic)
      : dividers(stochastic ? d.list.values + 1 : d.list.thresholds), values(d.list.values) {
    const auto divider = [&](int i) { return dividers[(min(i, kLanes - 2) + 1) * kApart - 1]; };
    const int lane = static_cast<int>(threadIdx.x & 31);
    root = divider(kLanes / 2 - 1);
    lower = divider(kLanes / 4 - 1);
    upper = divider(3 * kLanes / 4 - 1);
    third = divider(lane + kLanes / 8 - 1);
    fourth = divider(lane + kLanes / 16 - 1);
    fifth = divider(lane);
    value = values[lane];
  }
  static __device__ __forceinline__ float of_lane(float x, int lane) {
    return __shfl_sync(0xFFFFFFFFu, x, lane);
  }
  template <bool kStochastic, bool kScaled>
  __device__ __forceinline__ float rounded(float y, uint32_t word, float scale) const {
    const bool right = y >= root;
    int index = right ? kLanes / 2 : 0;
    index += y >= (right ? upper : lower) ? kLanes / 4 : 0;
    index += y >= of_lane(third, index) ? kLanes / 8 : 0;
    const bool negative = y < 0;
    float result = 0, near = 0, far = 0;  // neighbours of y, the one to begin from first
    if constexpr (kSmall) {
      const float divider = of_lane(fourth, index);
      const bool above = y >= divider;
      if constexpr (kStochastic) {
        const float other = of_lane(value, above ? index + 2 : index);
        near = above != negative ? divider : other;
        far = above != negative ? other : divider;
      } else {
        result = of_lane(value, above ? index + 1 : index);
      }
    } else {
      index += y >= of_lane(fourth, index) ? 2 : 0;
      index += y >= of_lane(fifth, index) ? 1 : 0;
      index *= kApart;
      index += y >= dividers[index + 3] ? 4 : 0;
      index += y >= dividers[index + 1] ? 2 : 0;
      index += y >= dividers[index] ? 1 : 0;
      if constexpr (kStochastic) {
        const int next = min(index + 1, kMaxValues - 1);
        near = values[negative ? next : index];
        far = values[negative ? index : next];
      } else {
        result = values[index];
      }
    }
    if constexpr (kStochastic) {
      const float past =
          block_codec::quotient_past(y - near, (far - near) * block_codec::kRandomUnit, word >> 8);
      result = (past < 0) == negative ? far : near;
    }
    return kScaled ? result * scale : result;
  }
};

/// A list of values far enough apart: a number's bucket, then what holds from its divider on, come
/// from the lanes of these numbers.
struct BucketElement : ElementTraits {
  static constexpr bool kSigned = true, kTwoSided = true, kByQuads = true;
  ListBuckets::Bucket own;  // the lane's
  float scale, offset;

  __device__ explicit BucketElement(const ListBuckets& b)
      : own(b.buckets[threadIdx.x & 31]), scale(b.scale), offset(b.offset) {}

  template <bool kStochastic>
  __device__ __forceinline__ void rounded(const float (&y)[4], const PhiloxWords& words,
                                          float (&value)[4]) const {
    uint32_t lane[4] = {};
    const auto of_lane = [&](float x, int e) {
      return __shfl_sync(0xFFFFFFFFu, x, static_cast<int>(lane[e]));
    };
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float t = __saturatef(__fmaf_rn(y[e], scale, offset));
      lane[e] = float_bits(__fmaf_rz(t, ListBuckets::kCount, 0x1p23f));  // the bucket's last bits
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) lane[e] = one_more_if(y[e] >= of_lane(own.divider, e), lane[e]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float near = of_lane(own.near, e);
      value[e] = near;
      if constexpr (kStochastic) {
        const float far = of_lane(own.far, e), gap = of_lane(own.gap, e);
        const float past = block_codec::quotient_past(y[e] - near, gap, words.word[e] >> 8);
        value[e] = (past < 0) == (gap < 0) ? far : near;
      }
    }
  }
};

/// 1 / x as the compiler divides, without its branch where x is neither small nor large.
__device__ __forceinline__ bool plain_reciprocal(float x) {
  return ((float_bits(x) + 0x1800000u) & 0x7F800000u) > 0x1FFFFFFu;
}
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, -__fmaf_rn(x, r, -1.0f), r);
}

/// bucket_values + i: the list whose ListBuckets are the i-th of a call.
enum class Element : int {
  fp32,
  e2m1,
  e4m3,
  fp16,
  bf16,
  floating,
  fine_floating,
  integer,
  few_values,
  values,
  described,
  bucket_values
};

/// What a role's encodings of one head have in common, in registers.
struct Role {
  const FormatDescriptor* d = nullptr;
  Element element = Element::fp32;
  bool stochastic = false, plain_scale = false;
  Span span = Span::none;
  int block = 0;            // columns, 0: no blocks
  float low = 0, high = 0;  // numbers outside are counted
  float limit = 0, inverse_divisor = 0;
  PhiloxKey key;
  std::byte* packed = nullptr;
};

__device__ inline Role make_role(const FormatDescriptor& d, bool stochastic, const PhiloxKey& key,
                                 std::byte* packed, const ListBuckets* buckets = nullptr,
                                 int bucket_list = 0) {
  using namespace block_codec;
  Role r;
  r.d = &d;
  r.block = d.block_scale == BlockScale::none ? 0 : d.block_columns;
  r.stochastic = stochastic && d.element != ElementKind::fp32;
  r.element = d.element == ElementKind::fp32 && d.span == Span::none && r.block == 0 ? Element::fp32
              : is_known<kE2m1>(d) && r.block > 0                                    ? Element::e2m1
              : is_known<kE4m3>(d) && r.block == 0                                   ? Element::e4m3
              : is_known<kFp16>(d) && r.block == 0                                   ? Element::fp16
              : is_known<kBf16>(d) && r.block == 0                                   ? Element::bf16
              : FloatElement::takes(d, r.stochastic)        ? Element::floating
              : FineFloatElement::takes(d)                  ? Element::fine_floating
              : IntegerElement::takes(d)                    ? Element::integer
              : !ValueElement<true>::takes(d, r.stochastic) ? Element::described
              : buckets && buckets[bucket_list].taken
                  ? static_cast<Element>(static_cast<int>(Element::bucket_values) + bucket_list)
              : d.list.count <= ValueElement<true>::kLanes ? Element::few_values
                                                           : Element::values;
  r.span = d.span;
  constexpr FloatFormat e4m3 = kE4m3;
  r.plain_scale = d.block_scale == BlockScale::floating && d.scale_number == e4m3 &&
                  d.scale_rounding == ScaleRounding::nearest && d.candidates[0] == 1.0f;
  r.low = d.saturate ? d.clip_low : bits_float(0xFF800000u);
  r.high = d.saturate ? d.clip_high : bits_float(0x7F800000u);
  r.limit = d.scale_max * d.divisor;
  r.inverse_divisor = 1.0f / d.divisor;
  r.key = key;
  r.packed = packed;
  return r;
}

__device__ __forceinline__ OuterScale outer_of(const Role& r, float amax) {
  OuterScale o;
  if (r.span == Span::none) return o;
  o.amax = amax;
  o.encode = amax > 0 ? smaller(1.0f / amax * r.limit, kFloatMax) : 1.0f;
  o.decode = 1.0f / o.encode;
  return o;
}

/// The scales of kCount blocks.
template <int kCount>
__device__ __forceinline__ void block_scales(const Role& r, const float* amax, const OuterScale& o,
                                             float* factor, float* scale) {
  if (!r.plain_scale) {
    for (int k = 0; k < kCount; ++k) {
      const ScaledBlock b = block_scale(*r.d, amax[k], o, r.d->candidates[0]);
      factor[k] = b.factor;
      scale[k] = b.scale;
    }
    return;
  }
  float product[kCount];
  bool plain = true;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    scale[k] = KnownNumber<kE4m3>::nearest(o.encode * (amax[k] * r.inverse_divisor));
    product[k] = scale[k] > 0 ? scale[k] * o.decode : 1.0f;
    factor[k] = reciprocal(product[k]);
    plain = plain && plain_reciprocal(product[k]);
  }
  if (!plain) {
    for (int k = 0; k < kCount; ++k) factor[k] = 1.0f / product[k];
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) factor[k] = scale[k] > 0 ? smaller(factor[k], kFloatMax) : 0.0f;
}

__device__ __forceinline__ float part_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 2));
}

/// Largest magnitudes of the thread's own blocks (of 16 columns: 2 part and 2 part + 1; of 32:
/// part) from those of its quads.
template <class Columns, int kBlock>
__device__ __forceinline__ void own_blocks(const float (&quad)[kRowQuads], int part, float* own) {
  if constexpr (Columns::kRuns) {
    for (int k = 0; k < 32 / kBlock; ++k) {
      own[k] = quad[k * kBlock / 4];
      for (int i = 1; i < kBlock / 4; ++i) own[k] = fmaxf(own[k], quad[k * kBlock / 4 + i]);
    }
  } else {
    constexpr int kCount = kRowColumns / kBlock;
    float all[kCount], half[kCount / 2];
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      all[k] = kBlock == 16 ? quad[k] : fmaxf(quad[2 * k % kRowQuads], quad[2 * k % kRowQuads + 1]);
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) {
      const float send = part & 2 ? all[k] : all[k + kCount / 2];
      const float keep = part & 2 ? all[k + kCount / 2] : all[k];
      half[k] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, send, 2));
    }
#pragma unroll
    for (int k = 0; k < kCount / 4; ++k) {
      const float send = part & 1 ? half[k] : half[k + kCount / 4];
      const float keep = part & 1 ? half[k + kCount / 4] : half[k];
      own[k] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, send, 1));
    }
  }
}

/// The value of the block that quad i lies in, from what its owner has.
template <class Columns, int kBlock>
__device__ __forceinline__ float of_quad(const float* own, int i) {
  if constexpr (Columns::kRuns) {
    return own[kBlock == 16 ? i >> 2 : 0];
  } else if constexpr (kBlock == 16) {
    return __shfl_sync(0xFFFFFFFFu, own[i & 1], i >> 1, 4);
  } else {
    return __shfl_sync(0xFFFFFFFFu, own[0], i >> 1, 4);
  }
}

__device__ __forceinline__ void to_array(const float4& v, float* x) {
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

/// The matrix to round: the thread's numbers, and the largest magnitudes of its quads.
struct Numbers {
  const float4* v;    // [kRowQuads]
  const float* quad;  // [kRowQuads]
  float largest;      // of the thread
  float head_amax;    // where a span is the head
  bool odd;           // some number of the thread is not finite
  int row, part, head_dim;
  uint32_t position;
  bool store;
  const ListBuckets* buckets = nullptr;  // of the call
};

/// Outer scale of the thread's row.
__device__ __forceinline__ OuterScale row_outer(const Role& r, const Numbers& n) {
  return outer_of(r, r.span == Span::row ? part_max(n.largest) : n.head_amax);
}

/// philox4x32<10> of the quad that begins at a column.
__device__ __forceinline__ PhiloxWords words_of(const Role& r, const Numbers& n, int column) {
  uint32_t c0 = (static_cast<uint32_t>(column) >> 2) + (static_cast<uint32_t>(n.row) << 16);
  uint32_t c1 = r.key.counter1, c2 = n.position, c3 = r.key.counter3;
  uint32_t key0 = r.key.key0, key1 = r.key.key1;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint64_t product0, product1;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product0) : "r"(c0), "n"(kPhiloxMultiplier0));
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product1) : "r"(c2), "n"(kPhiloxMultiplier1));
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// Rounds finite numbers with elements and blocks known to the compiler; sink(i, quad) receives
/// what the codes decode to. False, with nothing done, where a block's scale vanishes.
template <class Columns, int kBlock, bool kStochastic, class Number, class Sink>
__device__ __forceinline__ bool round_known(const Number& number, const Role& r, const Numbers& n,
                                            ThreadCounts* counts, Sink&& sink) {
  const auto is_outside = [&](float y) {
    return Number::kTwoSided ? y > r.high || y < r.low : fabsf(y) > r.high;
  };
  const OuterScale o = row_outer(r, n);
  constexpr int kOwn = kBlock == 16 ? 2 : 1;
  float own_factor[kOwn], own_scale[kOwn];
  uint32_t outside = 0;
  if constexpr (kBlock > 0) {
    float quads[kRowQuads], own[kOwn];
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) quads[i] = n.quad[i];
    own_blocks<Columns, kBlock>(quads, n.part, own);
    block_scales<kOwn>(r, own, o, own_factor, own_scale);
    bool vanished = false;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) vanished = vanished || (own_scale[k] == 0 && own[k] > 0);
    if (__any_sync(0xFFFFFFFFu, vanished)) return false;
  } else {
    if (n.largest * o.encode > (Number::kTwoSided ? fminf(r.high, -r.low) : r.high)) {
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        float x[4];
        to_array(n.v[i], x);
        for (int e = 0; e < 4; ++e) outside += is_outside(x[e] * o.encode) ? 1 : 0;
      }
      (r.span == Span::none ? counts->saturated : counts->clipped) += outside;
    }
  }
  // Known numbers outside are counted in FP32: 2^40 (|y| - high), limited to [0, 1].
  constexpr float kSteep = 0x1p40f;
  const float threshold = -kSteep * r.high;
  float clipped = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    const int column = Columns::column(n.part, i);
    const float factor = kBlock > 0 ? of_quad<Columns, kBlock>(own_factor, i) : o.encode;
    const float scale = kBlock > 0 ? of_quad<Columns, kBlock>(own_scale, i) : 1.0f;
    PhiloxWords words{};
    if constexpr (kStochastic) words = words_of(r, n, column);
    float x[4], quad[4];
    to_array(n.v[i], x);
    if constexpr (Number::kByQuads) {
      for (int e = 0; e < 4; ++e) x[e] = x[e] * factor;
      number.template rounded<kStochastic>(x, words, quad);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float y = Number::kByQuads ? x[e] : x[e] * factor;
      float value;
      if constexpr (Number::kByQuads) {
        value = kBlock > 0 ? quad[e] * scale : quad[e];
      } else {
        value = number.template rounded<kStochastic, (kBlock > 0)>(y, words.word[e], scale);
      }
      if constexpr (kBlock > 0 && Number::kKnown) {
        clipped = clipped + __saturatef(__fmaf_rn(fabsf(y), kSteep, threshold));
      } else if constexpr (kBlock > 0) {
        outside = one_more_if(is_outside(y), outside);
      }
      x[e] = value * o.decode;
      if constexpr (!Number::kSigned)
        x[e] = bits_float(float_bits(x[e]) | (float_bits(y) & 0x80000000u));
    }
    sink(i, make_float4(x[0], x[1], x[2], x[3]));
  }
  if constexpr (kBlock > 0) counts->clipped += static_cast<uint32_t>(clipped) + outside;
  return true;
}

/// Any element and block, any numbers, a quad at a time through local memory; the form that stores
/// codes.
template <class Columns, class Sink>
__device__ __forceinline__ void round_described(const Role& r, const Numbers& n,
                                                ThreadCounts* counts, Sink&& sink) {
  const FormatDescriptor& d = *r.d;
  const OuterScale o = row_outer(r, n);
  float4 quads[kRowQuads];
  float amax[kRowQuads];
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    quads[i] = n.v[i];
    amax[i] = n.quad[i];
  }
  if (r.block > 0) {
    float copy[kRowQuads], own[2];
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) copy[i] = n.quad[i];
    if (r.block == 16) {
      own_blocks<Columns, 16>(copy, n.part, own);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) amax[i] = of_quad<Columns, 16>(own, i);
    } else {
      own_blocks<Columns, 32>(copy, n.part, own);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) amax[i] = of_quad<Columns, 32>(own, i);
    }
  }
  const bool stores = n.store && n.row < n.head_dim;
  const PackedLayout l = packed_layout(d, n.head_dim, kRowColumns);
  if (stores && n.part == 0 && (r.span == Span::row || (r.span == Span::head && n.row == 0)))
    reinterpret_cast<float*>(r.packed + l.outer)[r.span == Span::row ? n.row : 0] = o.decode;
  block_codec::ElementCounter counter(d);
  const bool floats = d.element == ElementKind::floating;
  const block_codec::FloatRule float_rule(d);
  const block_codec::DescribedRule any_rule(d);
  ScaledBlock scale;
  scale.factor = o.encode;
#pragma unroll 1
  for (int i = 0; i < kRowQuads; ++i) {
    const int column = Columns::column(n.part, i);
    const bool first = column % (r.block > 0 ? r.block : kRowColumns) == 0;
    if (r.block > 0 && (!Columns::kRuns || first)) {
      scale = block_scale(d, amax[i], o, d.candidates[0]);
      if (stores && first) {
        block_codec::store_small(
            r.packed + l.scales +
                static_cast<size_t>(n.row * l.blocks_across + column / r.block) * l.scale_size,
            l.scale_size, scale.code);
      }
    }
    PhiloxWords words{};
    if (r.stochastic) words = words_of(r, n, column);
    float x[4];
    uint32_t code[4];
    to_array(quads[i], x);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float y = d.scaled() ? x[e] * scale.factor : x[e];
      counter.see(x[e], y, scale.scale);
      float value;
      if (floats) {
        code[e] = float_rule.encode(y, r.stochastic, words.word[e]);
        value = float_rule.decode(code[e]);
      } else {
        code[e] = any_rule.encode(y, r.stochastic, words.word[e]);
        value = any_rule.decode(code[e]);
      }
      if (r.block > 0) value = value * scale.scale;
      if (r.span != Span::none) value = value * o.decode;
      x[e] = value;
    }
    if (stores) {
      block_codec::store_four(r.packed, l.code_size,
                              static_cast<size_t>(n.row) * kRowColumns + column, code);
    }
    quads[i] = make_float4(x[0], x[1], x[2], x[3]);
  }
  counter.add_to(counts);
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) sink(i, quads[i]);
}

template <class Columns, int kBlock, class Number, class Sink>
__device__ __forceinline__ bool round_number(const Number& number, const Role& r, const Numbers& n,
                                             ThreadCounts* counts, Sink&& sink) {
  if constexpr (Number::kOnlyStochastic) {
    return round_known<Columns, kBlock, true>(number, r, n, counts, sink);
  } else {
    return r.stochastic ? round_known<Columns, kBlock, true>(number, r, n, counts, sink)
                        : round_known<Columns, kBlock, false>(number, r, n, counts, sink);
  }
}
/// Numbers whose constants are in registers, with any block.
template <class Columns, class Number, class Sink>
__device__ __forceinline__ bool round_blocks(const Number& number, const Role& r, const Numbers& n,
                                             ThreadCounts* counts, Sink&& sink) {
  return r.block == 0    ? round_number<Columns, 0>(number, r, n, counts, sink)
         : r.block == 16 ? round_number<Columns, 16>(number, r, n, counts, sink)
                         : round_number<Columns, 32>(number, r, n, counts, sink);
}

}  // namespace row_codec

/// Largest magnitudes of the thread's quads and of all; `odd`: some number is not finite.
__device__ __forceinline__ void measure_quads(const float4 (&v)[kRowQuads],
                                              float (&quad)[kRowQuads], float* largest, bool* odd) {
  float all = 0;
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    using row_codec::larger_or_nan;
    quad[i] = larger_or_nan(larger_or_nan(fabsf(v[i].x), fabsf(v[i].y)),
                            larger_or_nan(fabsf(v[i].z), fabsf(v[i].w)));
    all = larger_or_nan(all, quad[i]);
  }
  *odd = !(all <= kFloatMax);
  *largest = all;
  if (*odd) {
    *largest = 0;
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
      quad[i] = larger(larger(amax_term(v[i].x), amax_term(v[i].y)),
                       larger(amax_term(v[i].z), amax_term(v[i].w)));
      *largest = larger(*largest, quad[i]);
    }
  }
}

/// Rounds the thread's numbers, stores their codes where n.store says so, adds to the counts and
/// gives sink(i, quad) what they decode to; sink may overwrite n.v[i]. All threads of a warp call
/// it; no barriers.
template <class Columns, class Sink>
__device__ __forceinline__ void round_rows(const row_codec::Role& r, const row_codec::Numbers& n,
                                           ThreadCounts* counts, Sink&& sink) {
  using namespace row_codec;
  bool done = false;
  if (!n.store && !__any_sync(0xFFFFFFFFu, n.odd)) {
    if (r.element == Element::fp32) {
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) sink(i, n.v[i]);
      done = true;
    } else if (r.element == Element::e2m1) {
      const KnownElement<kE2m1> number;
      done = r.block == 16 ? round_number<Columns, 16>(number, r, n, counts, sink)
                           : round_number<Columns, 32>(number, r, n, counts, sink);
    } else if (r.element == Element::e4m3) {
      done = round_number<Columns, 0>(KnownElement<kE4m3>{}, r, n, counts, sink);
    } else if (r.element == Element::fp16) {
      done = round_number<Columns, 0>(KnownElement<kFp16>{}, r, n, counts, sink);
    } else if (r.element == Element::bf16) {
      done = round_number<Columns, 0>(KnownElement<kBf16>{}, r, n, counts, sink);
    } else if (r.element == Element::floating) {
      done = round_blocks<Columns>(FloatElement(*r.d), r, n, counts, sink);
    } else if (r.element == Element::fine_floating) {
      done = round_blocks<Columns>(FineFloatElement(*r.d), r, n, counts, sink);
    } else if (r.element == Element::integer) {
      done = round_blocks<Columns>(IntegerElement(*r.d), r, n, counts, sink);
    } else if (r.element >= Element::bucket_values) {
      const int list = static_cast<int>(r.element) - static_cast<int>(Element::bucket_values);
      done = round_blocks<Columns>(BucketElement(n.buckets[list]), r, n, counts, sink);
    } else if (r.element == Element::few_values) {
      done = round_blocks<Columns>(ValueElement<true>(*r.d, r.stochastic), r, n, counts, sink);
    } else if (r.element == Element::values) {
      done = round_blocks<Columns>(ValueElement<false>(*r.d, r.stochastic), r, n, counts, sink);
    }
  }
  if (!done) round_described<Columns>(r, n, counts, sink);
}

/// The thread's numbers of a packed head; zeros in rows past its end.
template <class Columns>
__device__ inline void decode_rows(const FormatDescriptor& d, int head_dim, const std::byte* packed,
                                   int row, int part, float4 (&v)[kRowQuads]) {
  using namespace block_codec;
  const PackedLayout l = packed_layout(d, head_dim, kRowColumns);
  const DescribedRule rule(d);
  float4 quads[kRowQuads];
#pragma unroll 1
  for (int i = 0; i < kRowQuads; ++i) {
    quads[i] = make_float4(0, 0, 0, 0);
    if (row >= head_dim) continue;
    const int column = Columns::column(part, i);
    uint32_t code[4];
    float x[4];
    load_four(packed, l.code_size, static_cast<size_t>(row) * kRowColumns + column, code);
    float scale = 1;
    if (l.blocks_down > 0) {
      const size_t block = static_cast<size_t>(row) * l.blocks_across + column / l.block_columns;
      scale =
          decode_block_scale(d, load_small(packed + l.scales + block * l.scale_size, l.scale_size));
    }
    for (int e = 0; e < 4; ++e) {
      x[e] = rule.decode(code[e]);
      if (l.blocks_down > 0) x[e] = x[e] * scale;
      if (l.outer_count > 0)
        x[e] =
            x[e] * reinterpret_cast<const float*>(packed + l.outer)[d.span == Span::row ? row : 0];
    }
    quads[i] = make_float4(x[0], x[1], x[2], x[3]);
  }
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) v[i] = quads[i];
}

}  // namespace replayeval
