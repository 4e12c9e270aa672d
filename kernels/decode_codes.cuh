// What a flush of a decode step does with a head whose matrix lies in registers, two rows a thread
// (mamba2_decode_flush.cu, gdn_decode_flush.cu): it is decoded from a copy in shared memory, and
// after the fold the codes of both roles are stored. Bits and counts are those of row_codec.cuh's
// decode_rows and round_rows with `store`, without their walk through local memory where codes have
// at most 16 bits: such a number becomes its code without being decoded.
#pragma once

#include <cuda_fp16.h>

#include "kernels/decode_tiles.cuh"
#include "kernels/row_replay.cuh"

namespace replayeval {
namespace row_codec {

/// Stores the codes of a thread's part of a row, quad after quad; runs of columns 16 bytes at a
/// time.
template <class Columns, int kBits>
class CodeRow {
 public:
  __device__ CodeRow(const Role& r, const Numbers& n)
      : to_(r.packed + static_cast<size_t>(n.row) * (kRowColumns * kBits / 8)),
        part_(n.part),
        real_(n.row < n.head_dim) {}
  /// Codes of quad i, the first in the lowest bits; `high` of codes of 16 bits.
  __device__ __forceinline__ void put(int i, uint32_t low, uint32_t high = 0) {
    constexpr int kQuad = kBits / 2, kQuads = 16 / kQuad;  // bytes of a quad, quads of a store
    if constexpr (Columns::kRuns) {
      const int at = i % kQuads * kQuad;
      kept_[at / 4] = low;
      if (kBits == 16) kept_[at / 4 + 1] = high;
      if (i % kQuads == kQuads - 1 && real_) {
        *reinterpret_cast<uint4*>(to_ + Columns::column(part_, i + 1 - kQuads) * kBits / 8) =
            make_uint4(kept_[0], kept_[1], kept_[2], kept_[3]);
      }
    } else if (real_) {
      std::byte* to = to_ + Columns::column(part_, i) * kBits / 8;
      if constexpr (kBits == 8) {
        *reinterpret_cast<uint32_t*>(to) = low;
      } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
      }
    }
  }

 private:
  std::byte* to_;
  int part_;
  bool real_;
  uint32_t kept_[4] = {};
};

/// The same for codes of 4 or 8 bits, which come a byte each.
template <class Columns>
class ShortCodeRow {
 public:
  __device__ ShortCodeRow(std::byte* packed, int row, int part, int head_dim, bool nibbles)
      : to_(packed + (row * kRowColumns + Columns::column(part, 0)) / (nibbles ? 2 : 1)),
        nibbles_(row < head_dim && nibbles),
        bytes_(row < head_dim && !nibbles) {}
  __device__ __forceinline__ void put(int i, uint32_t codes) {
    if constexpr (Columns::kRuns) {
      kept_[i] = codes;
      if (i + 1 < kRowQuads) return;
      uint4* to = reinterpret_cast<uint4*>(to_);
      if (nibbles_) {
        to[0] = make_uint4(pairs(0), pairs(2), pairs(4), pairs(6));
      } else if (bytes_) {
        to[0] = make_uint4(kept_[0], kept_[1], kept_[2], kept_[3]);
        to[1] = make_uint4(kept_[4], kept_[5], kept_[6], kept_[7]);
      }
    } else {
      // Stores without a branch, so that quads stay in one piece of code.
      constexpr int kStep = Columns::column(0, 1);
      const uint16_t pairs = static_cast<uint16_t>(__byte_perm(codes | codes >> 4, 0, 0x4420));
      if (nibbles_) *reinterpret_cast<uint16_t*>(to_ + i * kStep / 2) = pairs;
      if (bytes_) *reinterpret_cast<uint32_t*>(to_ + i * kStep) = codes;
    }
  }

 private:
  __device__ uint32_t pairs(int i) const {
    return __byte_perm(kept_[i] | kept_[i] >> 4, kept_[i + 1] | kept_[i + 1] >> 4, 0x6420);
  }
  std::byte* to_;
  bool nibbles_, bytes_;
  uint32_t kept_[kRowQuads] = {};
};

// Elements as codes of up to 16 bits: code<kStochastic>(y, word) is the stored code of y, which is
// no NaN. What row_codec.cuh's elements round to, for the same formats. kOfLane: the lanes of a
// warp hold different ones.
struct CodesTraits : ElementTraits {
  static constexpr bool kOfLane = false;
};

/// FloatElement. Below the smallest normal number c the last bits of |y| + unit count the gaps;
/// stochastically, max(|y| + c, 2 |y|) has the code in its upper bits.
struct FloatCodes : CodesTraits {
  uint32_t shift, nearest, odd_code, random_shift, random_factor, raised, most, past, sign;
  int sign_shift;
  float least, unit, twice;

  /// `past`: the code of what is past the largest number.
  __device__ __forceinline__ FloatCodes(const FloatFormat& f, int random_bits, uint32_t past)
      : most(f.max_code), past(past) {
    const bool wide = f.exponent_bits == 8;
    const uint32_t bias = wide ? 128u : static_cast<uint32_t>(f.bias);
    shift = 23 - static_cast<uint32_t>(f.mantissa_bits);
    nearest = (1u << shift >> 1) - 1u - (wide ? 0u : (127u - bias) << 23);
    odd_code = f.mantissa_bits == 0 && f.bias % 2 == 0 ? 1u : 0u;
    const uint32_t bits = min(static_cast<uint32_t>(random_bits), shift);
    random_shift = 32 - bits;
    random_factor = 1u << (shift - bits);
    raised = (128u - bias) << 23;
    sign = 1u << f.magnitude_bits();
    sign_shift = 31 - f.magnitude_bits();
    least = wide ? 0.0f : power_of_two(1 - f.bias);
    unit = least * static_cast<float>(1u << shift);
    twice = wide ? 1.0f : 2.0f;
  }
  __device__ explicit FloatCodes(const FormatDescriptor& d)
      : FloatCodes(d.number, d.random_bits, past_code(d)) {}
  static __device__ uint32_t past_code(const FormatDescriptor& d) {
    return d.saturate                     ? d.number.max_code
           : d.number.inf_code != kNoCode ? d.number.inf_code
           : d.number.nan_code != kNoCode ? d.number.nan_code
                                          : d.number.max_code;
  }
  template <bool kStochastic>
  __device__ __forceinline__ uint32_t code(float y, uint32_t word) const {
    const float a = fabsf(y);
    uint32_t code;
    if constexpr (kStochastic) {
      const float z = fmaxf(__fadd_rz(a, least), a * twice);
      code = ((word >> random_shift) * random_factor + (float_bits(z) - raised)) >> shift;
    } else {
      const uint32_t bits = float_bits(a);
      code = (bits + nearest + ((bits >> shift ^ odd_code) & 1u)) >> shift;
      code = a < least ? float_bits(a + unit) - float_bits(unit) : code;
    }
    return (code > most ? past : code) | (float_bits(y) >> sign_shift & sign);
  }
};

/// FineFloatElement.
struct FineFloatCodes : FineFloatElement {
  static constexpr bool kOfLane = false;
  uint32_t shift, raised, most, past_code, sign;
  int sign_shift;

  __device__ explicit FineFloatCodes(const FormatDescriptor& d) : FineFloatElement(d) {
    const FloatCodes codes(d);
    shift = codes.shift, raised = codes.raised, most = codes.most, past_code = codes.past;
    sign = codes.sign, sign_shift = codes.sign_shift;
    past = largest + largest;  // of a code above `most`
  }
  template <bool kStochastic>
  __device__ __forceinline__ uint32_t code(float y, uint32_t word) const {
    const float value = rounded<true, false>(y, word, 1.0f);
    const uint32_t code = (float_bits(fmaxf(value + least, value + value)) - raised) >> shift;
    return (code > most ? past_code : code) | (float_bits(y) >> sign_shift & sign);
  }
};

/// IntegerElement.
struct IntegerCodes : CodesTraits {
  static constexpr bool kTwoSided = true;
  float lowest, highest;
  uint32_t mask;

  __device__ explicit IntegerCodes(const FormatDescriptor& d)
      : lowest(static_cast<float>(d.lowest)),
        highest(static_cast<float>(d.highest)),
        mask((1u << storage_bits(d.code_bits)) - 1u) {}
  template <bool kStochastic>
  __device__ __forceinline__ uint32_t code(float y, uint32_t word) const {
    if constexpr (kStochastic) {
      constexpr float kWhole = 8388608.0f;
      const float a = fminf(fabsf(y), 65536.0f);
      const float whole = __fadd_rz(a, kWhole) - kWhole;
      const float rest = __fmaf_rn(static_cast<float>(word >> 8), -0x1p-24f, 1.0f);
      const float value = a - whole >= rest ? whole + 1.0f : whole;
      y = bits_float(float_bits(value) | (float_bits(y) & 0x80000000u));
    }
    // The last bits of a sum of whole numbers as large as this are two's complement.
    constexpr float kMagic = 12582912.0f;
    return float_bits(fmaxf(fminf(y, highest), lowest) + kMagic) & mask;
  }
};

/// ValueElement of up to 16 values.
struct ValueCodes : CodesTraits {
  using Values = ValueElement<true>;
  static constexpr bool kTwoSided = true, kOfLane = true;
  float root, lower, upper;
  uint32_t last;
  float third, fourth, value;  // the lane's

  __device__ ValueCodes(const FormatDescriptor& d, bool stochastic) {
    const Values e(d, stochastic);
    root = e.root, lower = e.lower, upper = e.upper;
    third = e.third, fourth = e.fourth, value = e.value;
    last = static_cast<uint32_t>(d.list.count - 1);
  }
  template <bool kStochastic>
  __device__ __forceinline__ uint32_t code(float y, uint32_t word) const {
    const bool right = y >= root;
    uint32_t index = right ? 8u : 0u;
    index += y >= (right ? upper : lower) ? 4u : 0u;
    index += y >= Values::of_lane(third, static_cast<int>(index)) ? 2u : 0u;
    const float divider = Values::of_lane(fourth, static_cast<int>(index));
    const bool above = y >= divider;
    if constexpr (kStochastic) {
      // Of its neighbours a negative y counts from the upper one.
      const float other = Values::of_lane(value, static_cast<int>(above ? index + 2u : index));
      const bool from_divider = above != (y < 0);
      const float near = from_divider ? divider : other, far = from_divider ? other : divider;
      index += above ? 1u : 0u;
      index += block_codec::quotient_past(y - near, (far - near) * block_codec::kRandomUnit,
                                          word >> 8) < 0
                   ? 0u
                   : 1u;
    } else {
      index += above ? 1u : 0u;
    }
    return min(index, last);
  }
};

/// A role of all heads, in shared memory: what of it takes long to find, and its elements' codes as
/// each lane of a warp has them.
struct StoreRole {
  static constexpr int kWords = 7 * 32;
  Role role;
  bool quick, nibbles, wide;      // whether store_coded takes it; codes of 4 bits; of 16
  int scales, scale_size, outer;  // bytes
  uint32_t words[kWords];

  /// By a warp.
  __device__ void set(const FormatDescriptor& d, bool stochastic, int head_dim) {
    role = make_role(d, stochastic, {}, nullptr);
    const PackedLayout l = packed_layout(d, head_dim, kRowColumns);
    quick = l.code_size <= 16;
    nibbles = l.code_size == 4;
    wide = l.code_size == 16;
    scales = static_cast<int>(l.scales), outer = static_cast<int>(l.outer);
    scale_size = l.scale_size;
    if (role.element == Element::floating) {
      keep(FloatCodes(d));
    } else if (role.element == Element::fine_floating) {
      keep(FineFloatCodes(d));
    } else if (role.element == Element::integer) {
      keep(IntegerCodes(d));
    } else if (role.element == Element::few_values) {
      keep(ValueCodes(d, role.stochastic));
    } else {
      quick = quick && role.element == Element::e2m1;
    }
  }
  template <class Codes>
  __device__ __forceinline__ Codes codes() const {
    Image<Codes> all;
#pragma unroll
    for (size_t i = 0; i < sizeof(all) / 4; ++i) all.word[i] = words[place<Codes>(i)];
    return __builtin_bit_cast(Codes, all);
  }

 private:
  template <class Codes>
  struct Image {
    uint32_t word[sizeof(Codes) / 4];
  };
  template <class Codes>
  static __device__ size_t place(size_t i) {
    return Codes::kOfLane ? 32 * i + (threadIdx.x & 31) : i;
  }
  template <class Codes>
  __device__ void keep(const Codes& codes) {
    static_assert(sizeof(Codes) % 4 == 0 &&
                  sizeof(Codes) / 4 * (Codes::kOfLane ? 32 : 1) <= kWords);
    const auto all = __builtin_bit_cast(Image<Codes>, codes);
    for (size_t i = 0; i < sizeof(all) / 4; ++i) words[place<Codes>(i)] = all.word[i];
  }
};

/// The outer scale of a row or, by its first row, of a head.
__device__ __forceinline__ void store_outer(const Role& r, const Numbers& n, int outer,
                                            float scale) {
  if (n.part == 0 && n.row < n.head_dim &&
      (r.span == Span::row || (r.span == Span::head && n.row == 0))) {
    reinterpret_cast<float*>(r.packed + outer)[r.span == Span::row ? n.row : 0] = scale;
  }
}

/// Rounds finite numbers without blocks and stores their codes and scale.
template <class Columns, FloatFormat kFormat, bool kStochastic>
__device__ __forceinline__ void store_known(const Role& r, const Numbers& n, int outer,
                                            ThreadCounts* counts) {
  constexpr int kBits = 1 + kFormat.exponent_bits + kFormat.mantissa_bits;
  const OuterScale o = row_outer(r, n);
  if (n.largest * o.encode > r.high) {
    uint32_t outside = 0;
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
      float x[4];
      to_array(n.v[i], x);
      for (float e : x) outside += fabsf(e * o.encode) > r.high ? 1 : 0;
    }
    (r.span == Span::none ? counts->saturated : counts->clipped) += outside;
  }
  store_outer(r, n, outer, o.decode);
  const KnownElement<kFormat> number;
  CodeRow<Columns, kBits> codes(r, n);
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    PhiloxWords words{};
    if constexpr (kStochastic) words = words_of(r, n, Columns::column(n.part, i));
    float x[4];
    to_array(n.v[i], x);
    uint32_t code[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float y = x[e] * o.encode;
      const float value = number.template rounded<kStochastic, false>(y, words.word[e], 1.0f);
      x[e] = bits_float(float_bits(value) | (float_bits(y) & 0x80000000u));
      code[e] = KnownNumber<kFormat>::code(value) | (float_bits(y) >> 31) << (kBits - 1);
    }
    if constexpr (kFormat.exponent_bits == 5 && kFormat.mantissa_bits == 10) {
      const __half2 low = __floats2half2_rn(x[0], x[1]), high = __floats2half2_rn(x[2], x[3]);
      codes.put(i, *reinterpret_cast<const uint32_t*>(&low),
                *reinterpret_cast<const uint32_t*>(&high));
    } else if constexpr (kBits == 16) {
      codes.put(i, code[0] | code[1] << 16, code[2] | code[3] << 16);
    } else {
      codes.put(i, code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24);
    }
  }
}
template <class Columns, FloatFormat kFormat>
__device__ __forceinline__ void store_known(const Role& r, const Numbers& n, int outer,
                                            ThreadCounts* counts) {
  if (r.stochastic) {
    store_known<Columns, kFormat, true>(r, n, outer, counts);
  } else {
    store_known<Columns, kFormat, false>(r, n, outer, counts);
  }
}

/// Stores the codes of y = x factor, `factor` those of the thread's own halves of 32 columns, and
/// gives how many y are outside the element's range.
template <class Columns, bool kStochastic, bool kWide, class Codes>
__device__ __forceinline__ uint32_t store_codes(const Codes& number, const Role& r,
                                                const Numbers& n, bool nibbles,
                                                const float* factor) {
  uint32_t outside = 0;
  ShortCodeRow<Columns> row(r.packed, n.row, n.part, n.head_dim, nibbles);
  CodeRow<Columns, 16> wide_row(r, n);
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    const float own = of_quad<Columns, 16>(factor, i);
    PhiloxWords words{};
    if constexpr (kStochastic) words = words_of(r, n, Columns::column(n.part, i));
    float x[4];
    to_array(n.v[i], x);
    uint32_t code[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float y = x[e] * own;
      outside += (Codes::kTwoSided ? y > r.high || y < r.low : fabsf(y) > r.high) ? 1 : 0;
      code[e] = number.template code<kStochastic>(y, words.word[e]);
    }
    if constexpr (kWide) {
      wide_row.put(i, code[0] | code[1] << 16, code[2] | code[3] << 16);
    } else {
      row.put(i, code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24);
    }
  }
  return outside;
}

/// The scales of finite numbers: stores them and gives the factors of the thread's two halves of 32
/// columns. False, with nothing done, where a block's scale vanishes.
template <class Columns>
__device__ __forceinline__ bool store_scales(const StoreRole& s, const Role& r, const Numbers& n,
                                             float* factor) {
  const OuterScale o = row_outer(r, n);
  factor[0] = factor[1] = o.encode;
  if (r.block > 0) {
    float quads[kRowQuads], own[2], scale[2];
    uint32_t code[2];
    bool vanished = false;
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) quads[i] = n.quad[i];
    if (r.block == 16) {
      own_blocks<Columns, 16>(quads, n.part, own);
    } else {
      own_blocks<Columns, 32>(quads, n.part, own);
      own[1] = own[0];
    }
    if (r.plain_scale) {
      block_scales<2>(r, own, o, factor, scale);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        code[k] = KnownNumber<kE4m3>::code(scale[k]);
        vanished = vanished || (scale[k] == 0 && own[k] > 0);
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < 2; ++k) {
        const ScaledBlock b = block_scale(*r.d, own[0], o, r.d->candidates[0]);
        vanished = vanished || (b.scale == 0 && own[0] > 0);
        own[0] = own[1], factor[0] = factor[1], scale[0] = scale[1], code[0] = code[1];
        factor[1] = b.factor, scale[1] = b.scale, code[1] = b.code;
      }
    }
    if (__any_sync(0xFFFFFFFFu, vanished)) return false;
    if (n.row < n.head_dim) {
      const int size = s.scale_size;
      std::byte* to = r.packed + s.scales + (n.row * kRowColumns + n.part * 32) / r.block * size;
      if (size == 1 && r.block == 16) {
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(code[0] | code[1] << 8);
      } else {
        block_codec::store_small(to, size, code[0]);
        if (r.block == 16) block_codec::store_small(to + size, size, code[1]);
      }
    }
  }
  store_outer(r, n, s.outer, o.decode);
  return true;
}

/// Elements of up to 16 bits with any scales; lists and E2M1 of up to 8.
template <class Columns>
__device__ __forceinline__ bool store_coded(const StoreRole& s, const Role& r, const Numbers& n,
                                            ThreadCounts* counts) {
  float factor[2];
  if (!store_scales<Columns>(s, r, n, factor)) return false;
  const auto either = [&](const auto& number, bool nibbles) {
    return r.stochastic ? store_codes<Columns, true, false>(number, r, n, nibbles, factor)
                        : store_codes<Columns, false, false>(number, r, n, nibbles, factor);
  };
  const auto of_any_size = [&](const auto& number) {
    if (!s.wide) return either(number, s.nibbles);
    return r.stochastic ? store_codes<Columns, true, true>(number, r, n, false, factor)
                        : store_codes<Columns, false, true>(number, r, n, false, factor);
  };
  uint32_t outside = 0;
  if (r.element == Element::e2m1) {
    constexpr FloatFormat e2m1 = kE2m1;
    outside = either(FloatCodes(e2m1, e2m1.random_bits, e2m1.max_code), true);
  } else if (r.element == Element::floating) {
    outside = of_any_size(s.codes<FloatCodes>());
  } else if (r.element == Element::integer) {
    outside = of_any_size(s.codes<IntegerCodes>());
  } else if (r.element == Element::few_values) {
    outside = either(s.codes<ValueCodes>(), true);
  } else if (s.wide) {
    outside = store_codes<Columns, true, true>(s.codes<FineFloatCodes>(), r, n, false, factor);
  } else {
    outside = store_codes<Columns, true, false>(s.codes<FineFloatCodes>(), r, n, s.nibbles, factor);
  }
  (r.block == 0 && r.span == Span::none ? counts->saturated : counts->clipped) += outside;
  return true;
}

/// Any format, any numbers.
template <class Columns>
__device__ __noinline__ void store_described(const Role& r, const float4 (&v)[kRowQuads], int row,
                                             int part, int head_dim, float head_amax,
                                             uint32_t position, ThreadCounts* counts) {
  float quad[kRowQuads], largest;
  bool odd;
  measure_quads(v, quad, &largest, &odd);
  if (row >= head_dim) largest = 0.0f, odd = false;
  round_described<Columns>(
      r, Numbers{v, quad, largest, head_amax, odd, row, part, head_dim, position, true}, counts,
      [](int, float4) {});
}

}  // namespace row_codec

/// Rounds the thread's numbers, stores their codes and adds to the counts, where the format is a
/// common one and the numbers allow it; else false, with nothing done. The same for all threads of
/// a warp, which all call it; no barriers.
template <class Columns>
__device__ __forceinline__ bool store_common(const row_codec::StoreRole& s,
                                             const row_codec::Role& r, const row_codec::Numbers& n,
                                             ThreadCounts* counts) {
  using namespace row_codec;
  if (__any_sync(0xFFFFFFFFu, n.odd)) return false;
  if (r.element == Element::fp16) {
    store_known<Columns, kFp16>(r, n, s.outer, counts);
  } else if (r.element == Element::bf16) {
    store_known<Columns, kBf16>(r, n, s.outer, counts);
  } else if (r.element == Element::e4m3) {
    store_known<Columns, kE4m3>(r, n, s.outer, counts);
  } else {
    return s.quick && store_coded<Columns>(s, r, n, counts);
  }
  return true;
}

/// How a recurrence head is decoded.
enum class HeadKind : uint8_t { fp16, fp32, nvfp4, described };

/// A head's copy in shared memory: where its chunks of 16 bytes lie, so that threads which read
/// runs of plain FP16 or FP32 numbers meet different banks, and what a row decodes to.
template <class Columns>
struct HeadCopy {
  const FormatDescriptor* formats;  // the first one counts
  HeadKind kind;
  const std::byte* packed;
  int head_dim;

  __device__ int place(int chunk) const {
    if constexpr (!Columns::kRuns) return chunk;
    return chunk ^ (chunk >> 3 & (kind == HeadKind::fp32 ? 7 : kind == HeadKind::fp16 ? 3 : 0));
  }
  __device__ void row(int row, int part, float4 (&v)[kRowQuads]) const {
    if (kind == HeadKind::fp16) {
      if constexpr (Columns::kRuns) {
#pragma unroll
        for (int i = 0; i < kRowQuads; i += 2) {
          const uint4 u = chunk(4 * (kRowThreads * row + part) + i / 2);
          v[i] = four_fp16(make_uint2(u.x, u.y));
          v[i + 1] = four_fp16(make_uint2(u.z, u.w));
        }
      } else {
        const std::byte* from = packed + row * (2 * kRowColumns) + 8 * part;
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i)
          v[i] = four_fp16(*reinterpret_cast<const uint2*>(from + 32 * i));
      }
    } else if (kind == HeadKind::fp32) {
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        const uint4 u = chunk((kRowColumns * row + Columns::column(part, i)) / 4);
        v[i] = make_float4(__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z),
                           __uint_as_float(u.w));
      }
    } else if (Columns::kRuns && kind == HeadKind::nvfp4) {
      const PackedLayout l = packed_layout(format(), head_dim, kRowColumns);
      const uint4 u = chunk(kRowThreads * row + part);
      const uint32_t words[4] = {u.x, u.y, u.z, u.w};
      const uint32_t scales = *reinterpret_cast<const uint16_t*>(
          packed + l.scales + row * (kRowColumns / 16) + 2 * part);
      const float outer = *reinterpret_cast<const float*>(packed + l.outer);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        v[i] = four_nvfp4(words[i / 2] >> 16 * (i & 1) & 0xFFFFu,
                          e4m3_scale(scales >> 8 * (i >> 2) & 0xFFu), outer);
      }
    } else {
      decode_rows<Columns>(format(), head_dim, packed, row, part, v);
    }
  }

 private:
  __device__ uint4 chunk(int i) const {
    return *reinterpret_cast<const uint4*>(packed + 16 * place(i));
  }
  /// As if it were another one for each head: what follows from it would else be kept in registers
  /// from head to head, where they are needed for the matrix.
  __device__ const FormatDescriptor& format() const {
    int first = 0;
    asm volatile("" : "+r"(first));
    return formats[first];
  }
};

/// A plan's two roles, and what their random numbers depend on.
struct FlushRoles {
  FormatDescriptor formats[2];  // recurrence, read
  uint64_t seed;
  int layer, head_offset;
  bool separate, stochastic[2];
  HeadKind kind;

  static bool takes(const HeadPlan& plan, int state_dim) {
    return row_codec_takes(*plan.recurrence.format, state_dim) &&
           (!plan.read || row_codec_takes(*plan.read->format, state_dim));
  }
  FlushRoles(const HeadPlan& plan, StateShape shape, int layer, int head_offset)
      : formats{plan.recurrence.format->descriptor,
                (plan.read ? *plan.read : plan.recurrence).format->descriptor},
        seed(plan.seed),
        layer(layer),
        head_offset(head_offset),
        separate(plan.read.has_value()),
        stochastic{plan.recurrence.rounding == Rounding::stochastic,
                   plan.read && plan.read->rounding == Rounding::stochastic},
        kind(kind_of(formats[0], packed_layout(formats[0], shape.head_dim, shape.state_dim))) {}
  template <class Columns>
  __device__ HeadCopy<Columns> copy(const std::byte* memory, int head_dim) const {
    return {formats, kind, memory, head_dim};
  }

  /// Shared memory in bytes that `prepare` fills, by all threads of a block; a barrier follows.
  static constexpr int kBytes = 2 * static_cast<int>(sizeof(row_codec::StoreRole));
  __device__ void prepare(std::byte* memory, int head_dim) const {
    if (threadIdx.x >= 32) return;
    for (int k = separate ? 1 : 0; k >= 0; --k)
      reinterpret_cast<row_codec::StoreRole*>(memory)[k].set(formats[k], stochastic[k], head_dim);
  }

  /// Stores the codes of rows own[0] and own[1] of a head, of which the thread has part `part`, and
  /// adds to its health; `prepared` by `prepare`. By all threads of a block; `inputs_read` is
  /// called when all have come here.
  template <class Columns, class InputsRead>
  __device__ __forceinline__ void store(const std::byte* prepared, const DecodeRows& rows,
                                        const DecodeStates& states, int row, int head, int heads,
                                        int head_dim, const float4 (&v)[2][kRowQuads],
                                        const int (&own)[2], int part, HeadMax* head_max,
                                        InputsRead&& inputs_read) const {
    using namespace row_codec;
    const int64_t position = rows.position[row];
    float largest[2];
    bool odd[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float quad[kRowQuads];
      measure_quads(v[r], quad, &largest[r], &odd[r]);
      if (own[r] >= head_dim) largest[r] = 0.0f, odd[r] = false;
    }
    head_max->publish(fmaxf(largest[0], largest[1]));
    const float head_amax = head_max->collect();
    inputs_read();
    const auto role_of = [&](int k) {
      Role role = reinterpret_cast<const StoreRole*>(prepared)[k].role;
      role.key = device_philox_key({seed, rows.stream[row], static_cast<uint32_t>(layer),
                                    static_cast<uint32_t>(head_offset + head), 0,
                                    k == 1 ? StateRole::read : StateRole::recurrence});
      role.packed =
          k == 1 ? states.read + row * states.read_row_stride + head * states.read_head_stride
                 : states.recurrence + row * states.row_stride + head * states.head_stride;
      return role;
    };
    const auto numbers_of = [&](const float4* numbers, const float* quads, float largest, bool odd,
                                int own_row) {
      return Numbers{numbers,   quads,    largest,
                     head_amax, odd,      own_row,
                     part,      head_dim, static_cast<uint32_t>(position),
                     true};
    };
    ThreadCounts counts;
    const bool non_finite = odd[0] || odd[1];
    int left = 0;  // bit 2 k + r: row r is not stored in role k yet
    // Roles and rows in turn by the same instructions, of which the cache holds few: the row that
    // is stored is the first of the two, which change places.
    float4 x[2][kRowQuads];
    int x_row[2] = {own[0], own[1]};
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) x[0][i] = v[0][i], x[1][i] = v[1][i];
#pragma unroll 1
    for (int i = 0; i < (separate ? 4 : 2); ++i) {
      const int k = separate && i < 2 ? 1 : 0;
      const StoreRole& role = reinterpret_cast<const StoreRole*>(prepared)[k];
      float quad[kRowQuads];
#pragma unroll
      for (int q = 0; q < kRowQuads; ++q) {
        quad[q] = fmaxf(fmaxf(fabsf(x[0][q].x), fabsf(x[0][q].y)),
                        fmaxf(fabsf(x[0][q].z), fabsf(x[0][q].w)));
      }
      ThreadCounts own_counts;
      if (!store_common<Columns>(role, role_of(k),
                                 numbers_of(x[0], quad, largest[0], odd[0], x_row[0]),
                                 &own_counts)) {
        left |= 1 << (2 * k + (i & 1));
      }
      // Rows past the head's end hold anything.
      if (x_row[0] < head_dim) counts.add(own_counts);
#pragma unroll
      for (int q = 0; q < kRowQuads; ++q) std::swap(x[0][q], x[1][q]);
      std::swap(largest[0], largest[1]);
      std::swap(odd[0], odd[1]);
      std::swap(x_row[0], x_row[1]);
    }
    if (left != 0) {
      // From a copy, so that no register has to last through the calls.
      float4 kept[2][kRowQuads];
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) kept[0][i] = x[0][i], kept[1][i] = x[1][i];
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int k = __ffs(left) > 2 ? 1 : 0, r = (__ffs(left) - 1) & 1;
        const int own_row = r == 0 ? own[0] : own[1];
        ThreadCounts own_counts;
        store_described<Columns>(role_of(k), kept[r], own_row, part, head_dim, head_amax,
                                 static_cast<uint32_t>(position), &own_counts);
        if (own_row < head_dim) counts.add(own_counts);
      }
    }
    if (!states.health) return;
    HeadHealth* health = states.health + int64_t{row} * heads + head;
    add_health(&health->encode, static_cast<uint64_t>(separate ? 2 : 1) * head_dim * kRowColumns,
               counts);
    if (__any_sync(0xFFFFFFFFu, non_finite) && (threadIdx.x & 31) == 0) {
      atomicMin(reinterpret_cast<unsigned long long*>(&health->first_non_finite_position),
                static_cast<unsigned long long>(position));
    }
  }

 private:
  static HeadKind kind_of(const FormatDescriptor& d, const PackedLayout& l) {
    return is_nvfp4(d, l)                                            ? HeadKind::nvfp4
           : d.scaled()                                              ? HeadKind::described
           : d.element == ElementKind::fp32                          ? HeadKind::fp32
           : d.element == ElementKind::floating && d.number == kFp16 ? HeadKind::fp16
                                                                     : HeadKind::described;
  }
};

/// Blocks of a kernel that the current device holds at once.
template <class Kernel>
int resident_blocks(Kernel kernel, int threads, size_t shared) {
  int each = 0, count = 0, device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared));
  return each * count;
}

}  // namespace replayeval
