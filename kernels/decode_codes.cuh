// Encoding of rows in registers that stores codes, what a flush of a decode step ends with: bits
// and counts of row_codec.cuh's round_rows with `store`, without its walk through local memory
// where the format is FP16 or NVFP4.
#pragma once

#include <cuda_fp16.h>

#include "kernels/row_replay.cuh"

namespace replayeval {
namespace row_codec {

/// Rounds finite numbers without scales and stores them as FP16.
template <class Columns, bool kStochastic>
__device__ __forceinline__ void store_fp16(const Role& r, const Numbers& n, ThreadCounts* counts) {
  uint32_t outside = 0;
  if (n.largest > r.high) {
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
      float x[4];
      to_array(n.v[i], x);
      for (float e : x) outside += fabsf(e) > r.high ? 1 : 0;
    }
    counts->saturated += outside;
  }
  const KnownElement<kFp16> number;
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    const int column = Columns::column(n.part, i);
    PhiloxWords words{};
    if constexpr (kStochastic) words = words_of(r, n, column);
    float x[4];
    to_array(n.v[i], x);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value = number.template rounded<kStochastic, false>(x[e], words.word[e], 1.0f);
      x[e] = bits_float(float_bits(value) | (float_bits(x[e]) & 0x80000000u));
    }
    if (n.row >= n.head_dim) continue;
    const __half2 low = __floats2half2_rn(x[0], x[1]), high = __floats2half2_rn(x[2], x[3]);
    *reinterpret_cast<uint2*>(r.packed + (static_cast<size_t>(n.row) * kRowColumns + column) * 2) =
        make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                   *reinterpret_cast<const uint32_t*>(&high));
  }
}

/// Rounds finite numbers to NVFP4 (blocks of 16 columns with E4M3 scales under one FP32 scale) and
/// stores codes and scales. False, with nothing done, where a block's scale vanishes.
template <class Columns, bool kStochastic>
__device__ __forceinline__ bool store_nvfp4(const Role& r, const Numbers& n, ThreadCounts* counts) {
  const OuterScale o = row_outer(r, n);
  float quads[kRowQuads], own[2], own_factor[2], own_scale[2];
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) quads[i] = n.quad[i];
  own_blocks<Columns, 16>(quads, n.part, own);
  block_scales<2>(r, own, o, own_factor, own_scale);
  if (__any_sync(0xFFFFFFFFu,
                 (own_scale[0] == 0 && own[0] > 0) || (own_scale[1] == 0 && own[1] > 0))) {
    return false;
  }
  using Number = KnownNumber<kE2m1>;
  const PackedLayout l = packed_layout(*r.d, n.head_dim, kRowColumns);
  const bool real = n.row < n.head_dim;
  uint32_t clipped = 0;
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    const int column = Columns::column(n.part, i);
    const float factor = of_quad<Columns, 16>(own_factor, i);
    PhiloxWords words{};
    if constexpr (kStochastic) words = words_of(r, n, column);
    float x[4];
    to_array(n.v[i], x);
    uint32_t codes = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float y = x[e] * factor, a = fabsf(y);
      float value;
      if constexpr (kStochastic) {
        value = Number::template stochastic<false>(a, words.word[e], 1.0f);
      } else {
        value = Number::nearest(a);
      }
      clipped += a > r.high ? 1 : 0;
      codes |= (Number::code(value) | (float_bits(y) >> 31) << 3) << 4 * e;
    }
    if (real) {
      *reinterpret_cast<uint16_t*>(r.packed + (static_cast<size_t>(n.row) * kRowColumns + column) /
                                                  2) = static_cast<uint16_t>(codes);
    }
  }
  counts->clipped += clipped;
  if (real) {
    *reinterpret_cast<uint16_t*>(r.packed + l.scales + n.row * (kRowColumns / 16) + 2 * n.part) =
        static_cast<uint16_t>(KnownNumber<kE4m3>::code(own_scale[0]) |
                              KnownNumber<kE4m3>::code(own_scale[1]) << 8);
    if (n.row == 0 && n.part == 0) *reinterpret_cast<float*>(r.packed + l.outer) = o.decode;
  }
  return true;
}

/// Any format, any numbers.
template <class Columns>
__device__ __noinline__ void store_described(const Role& r, const Numbers& n,
                                             ThreadCounts* counts) {
  round_described<Columns>(r, n, counts, [](int, float4) {});
}

}  // namespace row_codec

/// Rounds the thread's numbers, stores their codes and adds to the counts. All threads of a warp
/// call it; no barriers.
template <class Columns>
__device__ __forceinline__ void store_rows(const row_codec::Role& r, const row_codec::Numbers& n,
                                           ThreadCounts* counts) {
  using namespace row_codec;
  bool done = false;
  if (!__any_sync(0xFFFFFFFFu, n.odd)) {
    if (r.element == Element::fp16 && r.span == Span::none) {
      if (r.stochastic) {
        store_fp16<Columns, true>(r, n, counts);
      } else {
        store_fp16<Columns, false>(r, n, counts);
      }
      done = true;
    } else if (r.element == Element::e2m1 && r.block == 16 && r.plain_scale &&
               r.span == Span::head) {
      done = r.stochastic ? store_nvfp4<Columns, true>(r, n, counts)
                          : store_nvfp4<Columns, false>(r, n, counts);
    }
  }
  if (done) return;
  float4 v[kRowQuads];
  float quad[kRowQuads];
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) v[i] = n.v[i], quad[i] = n.quad[i];
  Numbers copy = n;
  copy.v = v;
  copy.quad = quad;
  const Role role = r;
  ThreadCounts own;
  store_described<Columns>(role, copy, &own);
  counts->add(own);
}

}  // namespace replayeval
