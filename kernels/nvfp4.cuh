// Rows of 4-bit codes with NVFP4's scales (blocks of 16 columns, E4M3 scales, one FP32 scale) on
// their way into sums: a thread decodes a row, 16 columns at a time. A code's number times its
// block's scale is exact in FP16; the tensor cores widen four such numbers a thread to FP32 in one
// product with the unit matrix, which is exact too and keeps every thread's numbers its own; one
// FP32 product with the head's scale rounds as decode_block does.
#pragma once

#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <optional>

#include "kernels/decode_tiles.cuh"

namespace replayeval {

/// This thread's part of the unit matrix for widen_four.
__device__ __forceinline__ uint32_t unit_part() {
  const int lane = threadIdx.x & 31, column = lane >> 2, row = 2 * (lane & 3);
  return (column == row ? 0x3C00u : 0u) | (column == row + 1 ? 0x3C000000u : 0u);
}
/// Four FP16 numbers to FP32. The whole warp takes part; none of its numbers may be infinite or
/// NaN.
__device__ __forceinline__ void widen_four(uint32_t a, uint32_t b, uint32_t unit, float* to) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %7, %7, %7};"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(a), "r"(b), "r"(unit), "f"(0.0f));
}

/// 2^-8 of the E4M3 scale in byte i of a word, twice; 0x7F, which is NaN, becomes a number.
__device__ __forceinline__ __half2 small_scale(uint32_t scales, int i) {
  const uint32_t twice = __byte_perm(scales, 0u, 0x4040u | static_cast<uint32_t>(i * 0x0101)) << 7;
  return *reinterpret_cast<const __half2*>(&twice);
}
/// Whether one of four E4M3 scales is NaN.
__device__ __forceinline__ bool nan_scale(uint32_t scales) {
  return ((scales + 0x01010101u) & 0x80808080u) != 0;
}

/// A 4-bit element as the reading kernels take it, and the power of two between what they widen
/// (2^-k of code times block scale, exact in FP16) and its value.
struct NarrowElement {
  enum class Kind : uint8_t { e2m1, e3m0, fixed_point };
  Kind kind = Kind::e2m1;
  float power = 1;         // 2^k, at least 1
  uint32_t bytes[4] = {};  // fixed_point: 64 + value / unit of the codes, 0 .. 127
  float scale_power = 1;   // fixed_point: from 2^-8 of a block's scale to its factor of a unit

  /// None where the element is another one, or 2^k times the FP32 scale of a head might overflow.
  static std::optional<NarrowElement> of(const StateFormat& format, const PackedLayout& l) {
    const FormatDescriptor& d = format.descriptor;
    if (!has_nvfp4_scales(d, l) || storage_bits(d.code_bits) != 4) return std::nullopt;
    NarrowElement element;
    if (is_nvfp4(d, l)) {
      element.power = 0x1p7f;
      return element;
    }
    const FloatFormat& f = d.number;
    if (d.element == ElementKind::floating && f.has_sign && f.exponent_bits == 3 &&
        f.mantissa_bits == 0 && f.max_code == 7 && f.bias <= 8) {
      element.kind = Kind::e3m0;
      element.power = power_of_two(8 - f.bias);
    } else if (!element.take_values(d)) {
      return std::nullopt;
    }
    // A measured scale is at most the largest FP32 number, divided by scale_max times divisor.
    if (d.span != Span::fixed && d.scale_max * d.divisor < 2 * element.power) return std::nullopt;
    for (const FixedScale& fixed : format.fixed_scales) {
      if (!std::isfinite(fixed.scale * element.power)) return std::nullopt;
    }
    return element;
  }

 private:
  /// Fixed point with unit 2^e: with |n| <= 64 and a scale s of 4 bits, n s has 10 bits, and all of
  /// n s 2^j are multiples of 2^(j - 9) below 2^16, numbers of FP16 for -15 <= j <= -3. Likewise
  /// 1088 s 2^j, since 1088 = 17 2^6. k = e - j.
  bool take_values(const FormatDescriptor& d) {
    constexpr int kMost = 60;
    int unit = kMost;  // e
    for (uint32_t code = 0; code < 16; ++code) {
      const float x = decode_element(d, code);
      if (!std::isfinite(x)) return false;
      if (x == 0) continue;
      int exponent = 0;
      const float significand = std::ldexp(std::frexp(std::fabs(x), &exponent), 24);
      unit = std::min(unit, exponent - 24 + std::countr_zero(static_cast<uint32_t>(significand)));
    }
    const int factor = std::min(unit, -3);  // j
    if (factor < -15) return false;
    kind = Kind::fixed_point;
    power = power_of_two(unit - factor);
    scale_power = power_of_two(8 + factor);
    for (uint32_t code = 0; code < 16; ++code) {
      const float n = std::ldexp(decode_element(d, code), -unit);
      if (n < -64 || n > 63) return false;
      bytes[code / 4] |= static_cast<uint32_t>(64 + static_cast<int>(n)) << code % 4 * 8;
    }
    return true;
  }
};

/// Codes of a sign and three bits, kMantissa of them the mantissa's.
template <int kMantissa>
struct NarrowFloats {
  using Element = NarrowElement;
  static constexpr int kDigits = 0;
  using Scale = __half2;  // 2^7 of a block's

  __device__ explicit NarrowFloats(const NarrowElement&) {}
  /// Column of number i of `widen`.
  static __host__ __device__ constexpr int column(int i) { return i / 2 + i % 2 * 4; }
  __device__ __forceinline__ Scale scale(uint32_t scales, int i) const {
    return __hmul2(small_scale(scales, i), __float2half2_rn(32768.0f));
  }
  /// The numbers of eight codes.
  __device__ __forceinline__ void widen(uint32_t codes, Scale scale, uint32_t unit,
                                        float* to) const {
    // Sign, exponent and mantissa of a code are those of an FP16 number that is a power of two of
    // it; codes 16 bits apart go together.
    uint32_t pair[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      constexpr int kPlace = 10 - kMantissa;
      const uint32_t sign = codes << (12 - 4 * k) & 0x80008000u;
      const uint32_t rest = 4 * k > kPlace ? codes >> (4 * k - kPlace) : codes << (kPlace - 4 * k);
      const uint32_t code = sign | (rest & 0x00070007u << kPlace);
      const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&code), scale);
      pair[k] = *reinterpret_cast<const uint32_t*>(&value);
    }
    widen_four(pair[0], pair[1], unit, to);
    widen_four(pair[2], pair[3], unit, to + 4);
  }
};

/// Four bytes of a table of eight, by the low bits of the selector's four lower digits; where a
/// digit's upper bit is set, 0 instead of a byte below 128.
__device__ __forceinline__ uint32_t four_of_eight(uint32_t low, uint32_t high, uint32_t digits) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(digits));
  return bytes;
}

/// Codes of any numbers in fixed point: a byte behind the upper bits of 1024 is an FP16 number from
/// which 1088 is taken in the product with the scale.
struct NarrowFixedPoint {
  using Element = NarrowElement;
  static constexpr int kDigits = 0;
  struct Scale {
    __half2 factor, less;  // 1, -1088 times it
  };
  uint32_t bytes[4];
  __half2 power;

  __device__ explicit NarrowFixedPoint(const NarrowElement& element)
      : bytes{element.bytes[0], element.bytes[1], element.bytes[2], element.bytes[3]},
        power(__float2half2_rn(element.scale_power)) {}
  static __host__ __device__ constexpr int column(int i) { return i; }
  __device__ __forceinline__ Scale scale(uint32_t scales, int i) const {
    const __half2 factor = __hmul2(small_scale(scales, i), power);
    return {factor, __hmul2(factor, __float2half2_rn(-1088.0f))};
  }
  __device__ __forceinline__ void widen(uint32_t codes, const Scale& scale, uint32_t unit,
                                        float* to) const {
    const uint32_t upper = codes ^ 0x88888888u;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t four = four_of_eight(bytes[0], bytes[1], codes >> 16 * k) |
                            four_of_eight(bytes[2], bytes[3], upper >> 16 * k);
      uint32_t pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t raised = __byte_perm(four, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
        const __half2 value =
            __hfma2(*reinterpret_cast<const __half2*>(&raised), scale.factor, scale.less);
        pair[i] = *reinterpret_cast<const uint32_t*>(&value);
      }
      widen_four(pair[0], pair[1], unit, to + 4 * k);
    }
  }
};

/// Rows of 16 kN16 columns in shared memory: codes in 16-byte chunks, placed so that eight threads
/// that read the same columns of eight rows meet different banks.
template <int kN16>
__device__ __forceinline__ unsigned nvfp4_chunk(unsigned row, unsigned chunk) {
  constexpr unsigned kChunks = kN16 / 2, kApart = kChunks >= 8 ? 1 : 8 / kChunks;
  return row * kChunks + (chunk ^ (row / kApart & (kChunks - 1)));
}

/// Row `lane` of a tile in shared memory, codes placed by nvfp4_chunk, times the scale `outer` of
/// its head: add(n, numbers) for columns n to n + 7 in turn. Whether a scale is NaN. By a whole
/// warp.
template <int kN16, class Codes, class Add>
__device__ __forceinline__ bool each_eight(const NarrowElement& element, const std::byte* codes,
                                           const std::byte* scale_codes, float outer, Add&& add) {
  const int lane = threadIdx.x & 31;
  const uint32_t unit_matrix = unit_part();
  const Codes codec(element);
  const float factor = element.power * outer;
  bool nan = false;
#pragma unroll
  for (int m = 0; m < kN16; m += 4) {
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(scale_codes + lane * kN16 + m);
    nan = nan || nan_scale(scales);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint2 both = *reinterpret_cast<const uint2*>(
          codes + 16 * nvfp4_chunk<kN16>(lane, (m + k) / 2) + k % 2 * 8);
      const typename Codes::Scale scale = codec.scale(scales, k);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float widened[8], numbers[8];
        codec.widen(half == 0 ? both.x : both.y, scale, unit_matrix, widened);
#pragma unroll
        for (int i = 0; i < 8; ++i) numbers[Codes::column(i)] = widened[i] * factor;
        add(16 * (m + k) + 8 * half, numbers);
      }
    }
  }
  return nan;
}

}  // namespace replayeval
