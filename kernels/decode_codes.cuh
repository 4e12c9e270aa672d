// What a flush of a decode step does with a head whose matrix lies in registers, two rows a thread
// (mamba2_decode_flush.cu, gdn_decode_flush.cu): it is decoded from a copy in shared memory, and
// after the fold the codes of both roles are stored. Bits and counts are those of row_codec.cuh's
// decode_rows and round_rows with `store`, without their walk through local memory where the format
// is a common one.
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
      if (at % 4 == 0) {
        kept_[at / 4] = low;
        if (kBits == 16) kept_[at / 4 + 1] = high;
      } else {
        kept_[at / 4] |= low << 16;
      }
      if (i % kQuads == kQuads - 1 && real_) {
        *reinterpret_cast<uint4*>(to_ + Columns::column(part_, i + 1 - kQuads) * kBits / 8) =
            make_uint4(kept_[0], kept_[1], kept_[2], kept_[3]);
      }
    } else if (real_) {
      std::byte* to = to_ + Columns::column(part_, i) * kBits / 8;
      if constexpr (kBits == 4) {
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(low);
      } else if constexpr (kBits == 8) {
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

/// Rounds finite numbers without blocks and stores their codes and scale.
template <class Columns, FloatFormat kFormat, bool kStochastic>
__device__ __forceinline__ void store_known(const Role& r, const Numbers& n, ThreadCounts* counts) {
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
  if (n.part == 0 && n.row < n.head_dim &&
      (r.span == Span::row || (r.span == Span::head && n.row == 0))) {
    const PackedLayout l = packed_layout(*r.d, n.head_dim, kRowColumns);
    reinterpret_cast<float*>(r.packed + l.outer)[r.span == Span::row ? n.row : 0] = o.decode;
  }
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
__device__ __forceinline__ void store_known(const Role& r, const Numbers& n, ThreadCounts* counts) {
  if (r.stochastic) {
    store_known<Columns, kFormat, true>(r, n, counts);
  } else {
    store_known<Columns, kFormat, false>(r, n, counts);
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
  CodeRow<Columns, 4> row(r, n);
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    const float factor = of_quad<Columns, 16>(own_factor, i);
    PhiloxWords words{};
    if constexpr (kStochastic) words = words_of(r, n, Columns::column(n.part, i));
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
    row.put(i, codes);
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

/// Rounds the thread's numbers, stores their codes and adds to the counts, where the format is a
/// common one and the numbers allow it; else false, with nothing done. The same for all threads of
/// a warp, which all call it; no barriers.
template <class Columns>
__device__ __forceinline__ bool store_common(const row_codec::Role& r, const row_codec::Numbers& n,
                                             ThreadCounts* counts) {
  using namespace row_codec;
  if (__any_sync(0xFFFFFFFFu, n.odd)) return false;
  if (r.element == Element::fp16) {
    store_known<Columns, kFp16>(r, n, counts);
  } else if (r.element == Element::bf16) {
    store_known<Columns, kBf16>(r, n, counts);
  } else if (r.element == Element::e4m3) {
    store_known<Columns, kE4m3>(r, n, counts);
  } else if (r.element == Element::e2m1 && r.block == 16 && r.plain_scale && r.span == Span::head) {
    return r.stochastic ? store_nvfp4<Columns, true>(r, n, counts)
                        : store_nvfp4<Columns, false>(r, n, counts);
  } else {
    return false;
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

  /// Stores the codes of rows own[0] and own[1] of a head, of which the thread has part `part`, and
  /// adds to its health. By all threads of a block; `inputs_read` is called when all have come
  /// here.
  template <class Columns, class InputsRead>
  __device__ __forceinline__ void store(const DecodeRows& rows, const DecodeStates& states, int row,
                                        int head, int heads, int head_dim,
                                        const float4 (&v)[2][kRowQuads], const int (&own)[2],
                                        int part, HeadMax* head_max,
                                        InputsRead&& inputs_read) const {
    using namespace row_codec;
    const bool has_row[2] = {own[0] < head_dim, own[1] < head_dim};
    const int64_t position = rows.position[row];
    float quad[2][kRowQuads], largest[2];
    bool odd[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      measure_quads(v[r], quad[r], &largest[r], &odd[r]);
      if (!has_row[r]) largest[r] = 0.0f, odd[r] = false;
    }
    head_max->publish(fmaxf(largest[0], largest[1]));
    const float head_amax = head_max->collect();
    inputs_read();
    const auto role_of = [&](int k) {
      const RandomKey key{seed,
                          rows.stream[row],
                          static_cast<uint32_t>(layer),
                          static_cast<uint32_t>(head_offset + head),
                          0,
                          k == 1 ? StateRole::read : StateRole::recurrence};
      return make_role(
          formats[k], stochastic[k], device_philox_key(key),
          k == 1 ? states.read + row * states.read_row_stride + head * states.read_head_stride
                 : states.recurrence + row * states.row_stride + head * states.head_stride);
    };
    const auto numbers_of = [&](const float4* numbers, const float* quads, float largest, bool odd,
                                int own_row) {
      return Numbers{numbers,   quads,    largest,
                     head_amax, odd,      own_row,
                     part,      head_dim, static_cast<uint32_t>(position),
                     true};
    };
    ThreadCounts counts;
    int left = 0;  // bit 2 k + r: row r is not stored in role k yet
#pragma unroll 1
    for (int k = separate ? 1 : 0; k >= 0; --k) {
      const Role role = role_of(k);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ThreadCounts own_counts;
        if (!store_common<Columns>(role, numbers_of(v[r], quad[r], largest[r], odd[r], own[r]),
                                   &own_counts)) {
          left |= 1 << (2 * k + r);
        }
        // Rows past the head's end hold anything.
        if (has_row[r]) counts.add(own_counts);
      }
    }
    const bool non_finite = odd[0] || odd[1];
    if (left != 0) {
      // From a copy, so that no register has to last through the calls.
      float4 kept[2][kRowQuads];
      float kept_quad[2][kRowQuads], kept_largest[2];
      bool kept_odd[2];
      int kept_row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) kept[r][i] = v[r][i], kept_quad[r][i] = quad[r][i];
        kept_largest[r] = largest[r], kept_odd[r] = odd[r], kept_row[r] = own[r];
      }
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int k = __ffs(left) > 2 ? 1 : 0, r = (__ffs(left) - 1) & 1;
        const Role role = role_of(k);
        ThreadCounts own_counts;
        store_described<Columns>(
            role, numbers_of(kept[r], kept_quad[r], kept_largest[r], kept_odd[r], kept_row[r]),
            &own_counts);
        if (kept_row[r] < head_dim) counts.add(own_counts);
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
