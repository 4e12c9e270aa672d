// Encoding and decoding of one head whose matrix lies in registers, the device's fast form for rows
// of 128 columns: four neighbouring threads share a row, each keeps 32 numbers of it. Formats and
// bits are those of block_codec.cuh. The common numbers are rounded without taking them apart: for
// |y| and the smallest normal number c of a format, z = max(|y| + c, 2 |y|) has the format's code
// in its upper bits, subnormals included.
#pragma once

#include "quant/block_codec.cuh"

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

/// One rounded number: its code's value, before scales.
struct Rounded {
  float value;
  uint32_t code;
};

template <FloatFormat kFormat>
struct KnownNumber {
  static constexpr FloatFormat kNumber = kFormat;
  static constexpr int kCodeSize = storage_bits(kFormat.bits());
  static constexpr int kShift = 23 - kFormat.mantissa_bits;
  static constexpr uint32_t kMask = 0xFFFFFFFFu << kShift;
  static constexpr uint32_t kLeastExponent = 128 - kFormat.bias;  // FP32's, of c
  static constexpr bool kWide = kFormat.exponent_bits == 8;  // FP32's own range: 2 |y| overflows

  /// |y| rounded to nearest, ties to even; NaN gives the largest value.
  static __device__ __forceinline__ float nearest(float a) {
    constexpr FloatFormat f = kFormat;
    constexpr float largest = decode_float(f, f.max_code);
    const uint32_t bits = float_bits(a);
    const uint32_t t = (bits + ((1u << kShift >> 1) - 1u) + (bits >> kShift & 1u)) & kMask;
    const float normal = bits_float(min(t, float_bits(largest)));
    if constexpr (kWide) return normal;
    constexpr float least = bits_float(kLeastExponent << 23);
    constexpr float unit = least * static_cast<float>(1 << kShift);  // its ulp is the gap below c
    return a < least ? (a + unit) - unit : normal;
  }
  static __device__ __forceinline__ float stochastic(float a, uint32_t word) {
    constexpr FloatFormat f = kFormat;
    constexpr float largest = decode_float(f, f.max_code);
    const uint32_t r = word >> (32 - f.random_bits) << (kShift - f.random_bits);
    if constexpr (kWide) {
      return bits_float(min((float_bits(a) + r) & kMask, float_bits(largest)));
    } else {
      constexpr float least = bits_float(kLeastExponent << 23);
      const float z = fmaxf(__fadd_rz(a, least), a + a);
      const float t = bits_float(min((float_bits(z) + r) & kMask, float_bits(2 * largest)));
      return fminf(t - least, t * 0.5f);
    }
  }
  static __device__ __forceinline__ uint32_t magnitude_code(float value) {
    if constexpr (kWide) {
      return float_bits(value) >> kShift;
    } else {
      constexpr float least = bits_float(kLeastExponent << 23);
      return (float_bits(fmaxf(value + least, value + value)) >> kShift) -
             (kLeastExponent << kFormat.mantissa_bits);
    }
  }
  template <bool kStochastic>
  static __device__ __forceinline__ Rounded round(float y, uint32_t word) {
    constexpr FloatFormat f = kFormat;
    const float a = magnitude(y);
    const float value = kStochastic ? stochastic(a, word) : nearest(a);
    const uint32_t sign = float_bits(y) & 0x80000000u;
    Rounded r;
    r.value = bits_float(float_bits(value) | sign);
    r.code = magnitude_code(value) | sign >> (31 - f.magnitude_bits());
    // Without a NaN code a NaN is the largest value, and positive: y is a product, whose NaN is.
    if constexpr (f.nan_code != kNoCode) {
      r.value = y != y ? bits_float(0x7FC00000u) : r.value;
      r.code = y != y ? f.nan_code : r.code;
    }
    return r;
  }
};

enum class Element : uint8_t { fp32, e2m1, e4m3, fp16, bf16, described };

/// What a role's encodings of one head have in common, in registers.
struct Role {
  const FormatDescriptor* d = nullptr;
  Element element = Element::fp32;
  bool stochastic = false, plain_scale = false;
  Span span = Span::none;
  int block = 0;  // columns, 0: no blocks
  float high = 0, limit = 0, inverse_divisor = 0;
  PhiloxKey key;
  std::byte* packed = nullptr;
};

__device__ inline Role make_role(const FormatDescriptor& d, bool stochastic, const PhiloxKey& key,
                                 std::byte* packed) {
  using namespace block_codec;
  Role r;
  r.d = &d;
  r.block = d.block_scale == BlockScale::none ? 0 : d.block_columns;
  r.stochastic = stochastic && d.element != ElementKind::fp32;
  r.element = d.element == ElementKind::fp32 && d.span == Span::none && r.block == 0 ? Element::fp32
              : is_known<kE2m1>(d) && r.block > 0                                    ? Element::e2m1
              : is_known<kE4m3>(d) && r.block != 16                                  ? Element::e4m3
              : is_known<kFp16>(d) && r.block == 0                                   ? Element::fp16
              : is_known<kBf16>(d) && r.block == 0                                   ? Element::bf16
                                                   : Element::described;
  r.span = d.span;
  constexpr FloatFormat e4m3 = kE4m3;
  r.plain_scale = d.block_scale == BlockScale::floating && d.scale_number == e4m3 &&
                  d.scale_rounding == ScaleRounding::nearest && d.candidates[0] == 1.0f;
  r.high = d.clip_high;
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

__device__ __forceinline__ ScaledBlock block_of(const Role& r, float amax, const OuterScale& o) {
  if (!r.plain_scale) return block_scale(*r.d, amax, o, r.d->candidates[0]);
  ScaledBlock b;
  b.scale = KnownNumber<kE4m3>::nearest(o.encode * (amax * r.inverse_divisor));
  b.code = KnownNumber<kE4m3>::magnitude_code(b.scale);
  b.factor = b.scale > 0 ? smaller(1.0f / (b.scale * o.decode), kFloatMax) : 0.0f;
  return b;
}

__device__ __forceinline__ float part_max(float v) {
  v = larger(v, __shfl_xor_sync(0xFFFFFFFFu, v, 1));
  return larger(v, __shfl_xor_sync(0xFFFFFFFFu, v, 2));
}

/// Largest magnitudes of the thread's own blocks (of 16 columns: 2 part and 2 part + 1; of 32:
/// part) from those of its quads.
template <class Columns, int kBlock>
__device__ __forceinline__ void own_blocks(const float (&quad)[kRowQuads], int part, float* own) {
  if constexpr (Columns::kRuns) {
    for (int k = 0; k < 32 / kBlock; ++k) {
      own[k] = quad[k * kBlock / 4];
      for (int i = 1; i < kBlock / 4; ++i) own[k] = larger(own[k], quad[k * kBlock / 4 + i]);
    }
  } else {
    constexpr int kCount = kRowColumns / kBlock;
    float all[kCount], half[kCount / 2];
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      all[k] =
          kBlock == 16 ? quad[k] : larger(quad[2 * k % kRowQuads], quad[2 * k % kRowQuads + 1]);
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) {
      const float send = part & 2 ? all[k] : all[k + kCount / 2];
      const float keep = part & 2 ? all[k + kCount / 2] : all[k];
      half[k] = larger(keep, __shfl_xor_sync(0xFFFFFFFFu, send, 2));
    }
#pragma unroll
    for (int k = 0; k < kCount / 4; ++k) {
      const float send = part & 1 ? half[k] : half[k + kCount / 4];
      const float keep = part & 1 ? half[k + kCount / 4] : half[k];
      own[k] = larger(keep, __shfl_xor_sync(0xFFFFFFFFu, send, 1));
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
  float head_amax;
  bool odd;  // some number of the thread is not finite
  int row, part, head_dim;
  uint32_t position;
  bool store;
};

/// Outer scale of the thread's row; stored by one thread.
__device__ __forceinline__ OuterScale row_outer(const Role& r, const Numbers& n) {
  float amax = n.head_amax;
  if (r.span == Span::row) {
    amax = n.quad[0];
#pragma unroll
    for (int i = 1; i < kRowQuads; ++i) amax = larger(amax, n.quad[i]);
    amax = part_max(amax);
  }
  const OuterScale o = outer_of(r, amax);
  if (n.store && r.span != Span::none && n.part == 0 && n.row < n.head_dim) {
    const PackedLayout l = packed_layout(*r.d, n.head_dim, kRowColumns);
    if (r.span == Span::row || n.row == 0)
      reinterpret_cast<float*>(r.packed + l.outer)[r.span == Span::row ? n.row : 0] = o.decode;
  }
  return o;
}

template <class Columns>
__device__ __forceinline__ PhiloxWords words_of(const Role& r, const Numbers& n, int column) {
  return philox4x32<10>((static_cast<uint32_t>(column) >> 2) + (static_cast<uint32_t>(n.row) << 16),
                        r.key.counter1, n.position, r.key.counter3, r.key.key0, r.key.key1);
}

/// Rounds with numbers and blocks known to the compiler; sink(i, quad) receives what the codes
/// decode to.
template <class Columns, class Number, int kBlock, bool kStochastic, class Sink>
__device__ __forceinline__ void round_known(const Role& r, const Numbers& n, ThreadCounts* counts,
                                            Sink&& sink) {
  const OuterScale o = row_outer(r, n);
  constexpr int kOwn = kBlock == 16 ? 2 : 1;
  float own_factor[kOwn], own_scale[kOwn];
  const bool stores = n.store && n.row < n.head_dim;
  if constexpr (kBlock > 0) {
    float quads[kRowQuads], own[kOwn];
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) quads[i] = n.quad[i];
    own_blocks<Columns, kBlock>(quads, n.part, own);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const ScaledBlock b = block_of(r, own[k], o);
      own_factor[k] = b.factor;
      own_scale[k] = b.scale;
      if (stores) {
        const PackedLayout l = packed_layout(*r.d, n.head_dim, kRowColumns);
        block_codec::store_small(
            r.packed + l.scales +
                static_cast<size_t>(n.row * l.blocks_across + kOwn * n.part + k) * l.scale_size,
            l.scale_size, b.code);
      }
    }
  }
  // What the loop below does not count: numbers that are not finite, and without blocks whether the
  // largest is outside at all.
  const bool odd = __any_sync(0xFFFFFFFFu, n.odd);
  bool count = odd;
  if constexpr (kBlock == 0) {
    float largest = n.quad[0];
#pragma unroll
    for (int i = 1; i < kRowQuads; ++i) largest = larger(largest, n.quad[i]);
    count = odd || largest * o.encode > r.high;
  }
  if (count) {
    block_codec::ElementCounter counter(*r.d);
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
      const float factor = kBlock > 0 ? of_quad<Columns, kBlock>(own_factor, i) : o.encode;
      const float scale = kBlock > 0 ? of_quad<Columns, kBlock>(own_scale, i) : 1.0f;
      float x[4];
      to_array(n.v[i], x);
      for (int e = 0; e < 4; ++e) counter.see(x[e], x[e] * factor, scale);
    }
    counter.add_to(counts);
  }
  uint32_t clipped = 0, vanished = 0;
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    const int column = Columns::column(n.part, i);
    const float factor = kBlock > 0 ? of_quad<Columns, kBlock>(own_factor, i) : o.encode;
    const float scale = kBlock > 0 ? of_quad<Columns, kBlock>(own_scale, i) : 1.0f;
    PhiloxWords words{};
    if constexpr (kStochastic) words = words_of<Columns>(r, n, column);
    float x[4];
    uint32_t code[4];
    to_array(n.v[i], x);
    if constexpr (kBlock > 0) {
      if (scale == 0.0f) {
        for (int e = 0; e < 4; ++e) vanished += x[e] != 0 ? 1 : 0;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float y = x[e] * factor;
      if constexpr (kBlock > 0) clipped += magnitude(y) > r.high ? 1 : 0;
      const Rounded rounded = Number::template round<kStochastic>(y, words.word[e]);
      code[e] = rounded.code;
      float value = rounded.value;
      if constexpr (kBlock > 0) value = value * scale;
      x[e] = value * o.decode;
    }
    if (stores) {
      block_codec::store_four(r.packed, Number::kCodeSize,
                              static_cast<size_t>(n.row) * kRowColumns + column, code);
    }
    sink(i, make_float4(x[0], x[1], x[2], x[3]));
  }
  if (kBlock > 0 && !odd) {
    counts->clipped += clipped;
    counts->vanished += vanished;
  }
}

/// Any element and block, a quad at a time through local memory.
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
    if (r.stochastic) words = words_of<Columns>(r, n, column);
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

template <class Columns, class Number, int kBlock, class Sink>
__device__ __forceinline__ void round_number(const Role& r, const Numbers& n, ThreadCounts* counts,
                                             Sink&& sink) {
  if (r.stochastic) {
    round_known<Columns, Number, kBlock, true>(r, n, counts, sink);
  } else {
    round_known<Columns, Number, kBlock, false>(r, n, counts, sink);
  }
}

}  // namespace row_codec

/// Largest magnitudes of the thread's quads; `odd`: some number is not finite.
__device__ __forceinline__ void measure_quads(const float4 (&v)[kRowQuads],
                                              float (&quad)[kRowQuads], bool* odd) {
  float all = 0;
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    using row_codec::larger_or_nan;
    quad[i] = larger_or_nan(larger_or_nan(fabsf(v[i].x), fabsf(v[i].y)),
                            larger_or_nan(fabsf(v[i].z), fabsf(v[i].w)));
    all = larger_or_nan(all, quad[i]);
  }
  *odd = !(all <= kFloatMax);
  if (*odd) {
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
      quad[i] = larger(larger(amax_term(v[i].x), amax_term(v[i].y)),
                       larger(amax_term(v[i].z), amax_term(v[i].w)));
    }
  }
}

/// Rounds the thread's numbers, stores their codes where n.store says so, adds to the counts and
/// gives sink(i, quad) what they decode to. All threads of a warp call it; no barriers.
template <class Columns, class Sink>
__device__ __forceinline__ void round_rows(const row_codec::Role& r, const row_codec::Numbers& n,
                                           ThreadCounts* counts, Sink&& sink) {
  using namespace row_codec;
  if (r.element == Element::fp32) {
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
      if (n.store && n.row < n.head_dim) {
        *reinterpret_cast<float4*>(r.packed +
                                   4 * (n.row * kRowColumns + Columns::column(n.part, i))) = n.v[i];
      }
      if (n.odd) {
        float x[4];
        to_array(n.v[i], x);
        for (int e = 0; e < 4; ++e) counts->non_finite += magnitude(x[e]) <= kFloatMax ? 0 : 1;
      }
      sink(i, n.v[i]);
    }
  } else if (r.element == Element::e2m1 && r.block == 16) {
    round_number<Columns, KnownNumber<kE2m1>, 16>(r, n, counts, sink);
  } else if (r.element == Element::e2m1) {
    round_number<Columns, KnownNumber<kE2m1>, 32>(r, n, counts, sink);
  } else if (r.element == Element::e4m3 && r.block == 0) {
    round_number<Columns, KnownNumber<kE4m3>, 0>(r, n, counts, sink);
  } else if (r.element == Element::e4m3) {
    round_number<Columns, KnownNumber<kE4m3>, 32>(r, n, counts, sink);
  } else if (r.element == Element::fp16) {
    round_number<Columns, KnownNumber<kFp16>, 0>(r, n, counts, sink);
  } else if (r.element == Element::bf16) {
    round_number<Columns, KnownNumber<kBf16>, 0>(r, n, counts, sink);
  } else {
    round_described<Columns>(r, n, counts, sink);
  }
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
