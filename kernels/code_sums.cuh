// Rows of 4-bit codes with NVFP4's scales (blocks of 16 columns, E4M3 scales, one FP32 scale) times
// FP32 vectors, for decoding with `dense: fast`: the codes' numbers are whole multiples of a unit,
// the vector is cut into four signed digits of base 256 below its largest magnitude, and the tensor
// cores multiply both as integers. Sums over a block are exact; what is rounded is the vector (to
// 2^-30 of its largest magnitude), a block's sum (to FP32) and the sum over blocks, in an order
// that depends on nothing but the columns, and the numbers of a list that have no common unit
// (CodeTable).
#pragma once

#include <cuda_fp8.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <optional>
#include <type_traits>

#include "kernels/decode_tiles.cuh"
#include "kernels/nvfp4.cuh"

namespace replayeval {

/// The numbers of a 4-bit element: unit sum_d (byte_d - zero_d) 128^(digits - 1 - d).
struct CodeTable {
  static constexpr int kMostDigits = 3;
  int digits = 1;
  uint32_t bytes[kMostDigits][4] = {};  // of code c in byte c % 4 of word c / 4, 0 .. 127
  int zero[kMostDigits] = {};
  float unit = 1;

  /// None where a row of such codes is no row of 4-bit codes with NVFP4's scales, or a number is
  /// not finite, or the numbers are too far from 1 for FP32 sums. Numbers that need more than three
  /// digits are rounded to the last one, 2^-22 of the distance between the largest and the
  /// smallest; none where that is more than 2^-16 of one.
  static std::optional<CodeTable> of(const StateFormat& format, const PackedLayout& l) {
    const FormatDescriptor& d = format.descriptor;
    if (!has_nvfp4_scales(d, l) || storage_bits(d.code_bits) != 4) return std::nullopt;
    double values[16], low = 0, high = 0;
    int last = INT_MAX;  // the exponent of the last bit that is set
    for (uint32_t code = 0; code < 16; ++code) {
      const float x = decode_element(d, code);
      if (!std::isfinite(x)) return std::nullopt;
      values[code] = x;
      low = std::min(low, values[code]);
      high = std::max(high, values[code]);
      if (x == 0) continue;
      int exponent = 0;
      const double significand = std::ldexp(std::frexp(std::fabs(values[code]), &exponent), 24);
      last = std::min(last, exponent - 24 + std::countr_zero(static_cast<uint32_t>(significand)));
    }
    if (low == high) return std::nullopt;
    int top = 0;
    std::frexp(high - low, &top);
    CodeTable table;
    const auto units = [&](int exponent) { return std::ldexp(high - low, -exponent); };
    const int most_bits = 7 * kMostDigits;
    int exponent = std::max(last, top - most_bits);
    table.digits = units(exponent) < 128 ? 1 : units(exponent) < 128 * 128 ? 2 : kMostDigits;
    // Rounding both ends away from 0 must not take another bit.
    if (table.digits == kMostDigits && units(exponent) > std::ldexp(1.0, most_bits) - 2) ++exponent;
    if (exponent < -60 || exponent > 60) return std::nullopt;
    table.unit = static_cast<float>(std::ldexp(1.0, exponent));
    const int64_t zero = -std::llrint(std::ldexp(low, -exponent));
    const auto digit = [&](int64_t n, int d) {
      return static_cast<uint32_t>(n >> 7 * (table.digits - 1 - d) & 127);
    };
    for (int d = 0; d < table.digits; ++d) {
      table.zero[d] = static_cast<int>(digit(zero, d));
      for (uint32_t code = 0; code < 16; ++code) {
        const double units = std::ldexp(values[code], -exponent);
        if (std::fabs(std::nearbyint(units) - units) > std::ldexp(std::fabs(units), -16))
          return std::nullopt;
        const int64_t n = zero + std::llrint(units);
        table.bytes[d][code / 4] |= digit(n, d) << code % 4 * 8;
      }
    }
    return table;
  }
};

/// As a choice of sums beside NarrowFloats and NarrowFixedPoint, which are those of the CPU.
template <int kNumberDigits>
struct WholeCodes {
  using Element = CodeTable;
  static constexpr int kDigits = kNumberDigits;
};

/// A vector of 16 kN16 numbers in shared memory, as digits: the highest of all columns, then the
/// others, kPlane bytes apart, so that threads that read the same columns of all four meet
/// different banks; for every digit d of a code the sums of a block's digits times -zero_d, [d,
/// block, two pairs of digits], each pair twice; two factors that the last digit belongs to, NaN
/// where a number was not finite.
template <int kN16, int kDigits>
struct DigitVector {
  static constexpr int kColumns = 16 * kN16, kPlane = kColumns + 32,
                       kSumBytes = 32 * kDigits * kN16;
  static constexpr int kBytes = 4 * kPlane + kSumBytes + 32;  // a multiple of 32, as of the zeros
  const float* numbers;
  std::byte* digits;

  __device__ int4* sums() const { return reinterpret_cast<int4*>(digits + 4 * kPlane); }
  __device__ float2* scale() const {
    return reinterpret_cast<float2*>(digits + 4 * kPlane + kSumBytes);
  }

  /// By a warp, from FP32 `numbers` that a barrier lies behind. Others see it behind another.
  __device__ void split(const CodeTable& table) const {
    constexpr int kQuads = kColumns / 4, kEach = (kQuads + 31) / 32;
    const int lane = threadIdx.x & 31;
    float4 x[kEach];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int quad = 32 * i + lane;
      x[i] = quad < kQuads ? load4(numbers + 4 * quad) : make_float4(0, 0, 0, 0);
      for (float e : {x[i].x, x[i].y, x[i].z, x[i].w})
        largest = max(largest, __float_as_uint(e) & 0x7FFFFFFFu);
    }
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    // Below 2^30 times the last digit; powers of two in two factors, since one may be out of range.
    const bool finite = largest < 0x7F800000u;
    const int power = 156 - static_cast<int>(largest >> 23), half = power / 2;
    const auto two_to = [](int k) { return __int_as_float((127 + k) << 23); };
    const float nan = __int_as_float(0x7FC00000);
    if (lane == 0)
      *scale() = finite ? make_float2(two_to(-half), two_to(half - power)) : make_float2(nan, nan);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int quad = 32 * i + lane;
      uint32_t columns[4];
      const float e[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const uint32_t q =
            finite
                ? static_cast<uint32_t>(__float2int_rn(e[c] * two_to(half) * two_to(power - half)))
                : 0u;
        columns[c] = (q + 0x00808080u) ^ 0x00808080u;  // digits from -128 to 127
      }
      const uint32_t upper01 = __byte_perm(columns[0], columns[1], 0x6273),
                     upper23 = __byte_perm(columns[2], columns[3], 0x6273),
                     lower01 = __byte_perm(columns[0], columns[1], 0x4051),
                     lower23 = __byte_perm(columns[2], columns[3], 0x4051);
      const uint32_t planes[4] = {
          __byte_perm(upper01, upper23, 0x5410), __byte_perm(upper01, upper23, 0x7632),
          __byte_perm(lower01, lower23, 0x5410), __byte_perm(lower01, lower23, 0x7632)};
      int sum[4];
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        if (quad < kQuads) *reinterpret_cast<uint32_t*>(digits + d * kPlane + 4 * quad) = planes[d];
        sum[d] = __dp4a(static_cast<int>(planes[d]), 0x01010101, 0);
        sum[d] += __shfl_xor_sync(0xFFFFFFFFu, sum[d], 1);
        sum[d] += __shfl_xor_sync(0xFFFFFFFFu, sum[d], 2);
      }
      if (quad < kQuads && lane % 4 == 0) {
#pragma unroll
        for (int d = 0; d < kDigits; ++d) {
          const int zero = -table.zero[d];
          int4* to = sums() + 2 * (d * kN16 + quad / 4);
          to[0] = make_int4(zero * sum[0], zero * sum[1], zero * sum[0], zero * sum[1]);
          to[1] = make_int4(zero * sum[2], zero * sum[3], zero * sum[2], zero * sum[3]);
        }
      }
    }
  }
};

/// The packed heads that a plan's steps read, and where a head's scales and its own scale lie.
struct ReadHeads {
  const std::byte* first;
  uint32_t row_stride, head_stride, scales, outer;

  ReadHeads(const HeadPlan& plan, const DecodeStates& states, const PackedLayout& l)
      : first(plan.read ? states.read : states.recurrence),
        row_stride(static_cast<uint32_t>(plan.read ? states.read_row_stride : states.row_stride)),
        head_stride(
            static_cast<uint32_t>(plan.read ? states.read_head_stride : states.head_stride)),
        scales(static_cast<uint32_t>(l.scales)),
        outer(static_cast<uint32_t>(l.outer)) {}
  __device__ const std::byte* head(unsigned row, unsigned head) const {
    return first + uint64_t{row} * row_stride + uint64_t{head} * head_stride;
  }
  /// Begins to copy the scales of the heads from `head0` on, by all threads of a team.
  template <class Team>
  __device__ void copy_scales(int row, int head0, int heads, std::byte* to) const {
    for (int h = Team::rank(); h < heads; h += Team::size())
      copy_word(to + 4 * h, head(row, head0 + h) + outer);
  }
};
inline const StateFormat& read_format(const HeadPlan& plan) {
  return *(plan.read ? *plan.read : plan.recurrence).format;
}

/// Calls with(blocks of 16 columns), a constant: 4, 8 or 16.
template <class With>
bool with_blocks(int columns, With&& with) {
  return columns == 128  ? with(std::integral_constant<int, 8>())
         : columns == 64 ? with(std::integral_constant<int, 4>())
                         : with(std::integral_constant<int, 16>());
}

/// Calls start(codes, element) with the way to sum that a format of 4-bit codes with NVFP4's scales
/// is read by, a null pointer of its type, and its element. False, without a call, where there is
/// none.
template <class Start>
bool read_codes(const StateFormat& format, const PackedLayout& l, bool sums_freely, Start&& start) {
  const auto with = [&]<class Codes>(const typename Codes::Element& element) {
    return start(static_cast<const Codes*>(nullptr), element);
  };
  if (sums_freely) {
    if (const std::optional<CodeTable> table = CodeTable::of(format, l)) {
      return table->digits == 1   ? with.template operator()<WholeCodes<1>>(*table)
             : table->digits == 2 ? with.template operator()<WholeCodes<2>>(*table)
                                  : with.template operator()<WholeCodes<3>>(*table);
    }
  }
  const std::optional<NarrowElement> element = NarrowElement::of(format, l);
  if (!element) return false;
  switch (element->kind) {
    case NarrowElement::Kind::e2m1:
      return with.template operator()<NarrowFloats<1>>(*element);
    case NarrowElement::Kind::e3m0:
      return with.template operator()<NarrowFloats<0>>(*element);
    case NarrowElement::Kind::fixed_point:
      return with.template operator()<NarrowFixedPoint>(*element);
  }
  return false;
}

/// Two E4M3 scales, the first in the lower byte.
__device__ __forceinline__ float2 two_scales(uint32_t codes) {
  const __half2_raw half =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return __half22float2(__half2(half));
}

/// c + a b: unsigned bytes of rows lane / 4 and 8 on, signed ones of column lane / 4.
__device__ __forceinline__ int4 multiply_bytes(const uint32_t (&a)[4], uint2 b, int4 c) {
  int4 d;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(c.x), "r"(c.y),
        "r"(c.z), "r"(c.w));
  return d;
}

/// Tiles of 32 rows in shared memory, codes placed by nvfp4_chunk, times vectors. Lane 4 g + q
/// takes the q-th 8 of every 32 columns of rows g, g + 8, g + 16, g + 24. A product covers 32
/// columns, two blocks; its eight columns of the other factor are the first block's four digits
/// with zeros in the place of the second, and the second's likewise, so that a thread has two
/// digits of one block.
template <int kN16, int kDigits>
class CodeSums {
 public:
  using Vector = DigitVector<kN16, kDigits>;
  static constexpr int kColumns = 16 * kN16, kChunks = kN16 / 2, kRowBytes = kColumns / 2;
  /// Bytes of zeros that `zeros` must have.
  static constexpr int kZeroBytes = kColumns;

  __device__ CodeSums(const CodeTable& table, const std::byte* zeros)
      : table_(table), zeros_(zeros) {}
  /// The row of a tile that the thread gets the totals of.
  static __device__ int row() {
    const int lane = threadIdx.x & 31;
    return lane / 4 + 8 * (lane & 3);
  }

  /// Sums of a tile's row `row()` with each vector; `outer`: the scale of that row's head. By a
  /// whole warp.
  template <int kVectors>
  __device__ __forceinline__ void totals(const std::byte* codes, const std::byte* scales,
                                         const Vector (&vectors)[kVectors], float outer,
                                         float (&total)[kVectors]) const {
    const unsigned lane = threadIdx.x & 31u, g = lane >> 2, q = lane & 3u, second = q >> 1;
    const unsigned own_chunk = 16u * nvfp4_chunk<kN16>(g, 0) - g * kRowBytes;
    const std::byte* own_codes = codes + g * kRowBytes + 4 * q;
    const std::byte *digits[kVectors], *sums[kVectors];
    float sum[kVectors][4];
    // Looking up codes keeps the units of logic busy: halves of the table are put together by the
    // multipliers, where nvcc does not know this factor, and halves of words are loaded.
    uint32_t one = 1;
    asm volatile("" : "+r"(one));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      digits[v] =
          (second == g >> 2 ? vectors[v].digits + (g & 3u) * Vector::kPlane : zeros_) + 8 * q;
      sums[v] = reinterpret_cast<const std::byte*>(vectors[v].sums()) + 16 * q;
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[v][r] = 0.0f;
    }
    // The scales of the own blocks, every second one.
    constexpr int kScaleWords = (kN16 + 7) / 8;
    uint32_t own_scales[4][kScaleWords];
    const uint32_t choice = second ? 0x7531u : 0x6420u;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::byte* from = scales + (g + 8 * r) * kN16;
      if constexpr (kN16 == 4) {
        own_scales[r][0] = __byte_perm(*reinterpret_cast<const uint32_t*>(from), 0, choice);
      } else {
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i) {
          const uint2 all = *reinterpret_cast<const uint2*>(from + 8 * i);
          own_scales[r][i] = __byte_perm(all.x, all.y, choice);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kChunks; ++m) {
      uint32_t words[4][2];  // codes in the lower half
      const std::byte* from = own_codes + (own_chunk ^ 16u * m);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        words[r][0] = *reinterpret_cast<const uint32_t*>(from + 8 * r * kRowBytes);
        // Volatile, as nvcc would shift the word instead.
        words[r][1] = *reinterpret_cast<const volatile uint16_t*>(from + 8 * r * kRowBytes + 2);
      }
      float of_block[kVectors][4];
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
        uint32_t a[2][4];  // rows g and g + 8 or 16 on
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t codes = words[r][i];
            a[r / 2][r % 2 + 2 * i] =
                four_of_eight(table_.bytes[d][0], table_.bytes[d][1], codes) * one +
                four_of_eight(table_.bytes[d][2], table_.bytes[d][3], codes ^ 0x88888888u);
          }
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const uint2 of = *reinterpret_cast<const uint2*>(digits[v] + 32 * m);
          const int4 start = *reinterpret_cast<const int4*>(sums[v] + 64 * (d * kChunks + m));
#pragma unroll
          for (int rows = 0; rows < 2; ++rows) {
            const int4 products = multiply_bytes(a[rows], of, start);
            const float two[2] = {__int2float_rn(products.x * 256 + products.y),
                                  __int2float_rn(products.z * 256 + products.w)};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              float& to = of_block[v][2 * rows + r];
              to = d == 0 ? two[r] : __fmaf_rn(to, 128.0f, two[r]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 both = two_scales(own_scales[r][m / 4] >> 16 * (m / 2 % 2));
        const float scale = m % 2 == 0 ? both.x : both.y;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sum[v][r] = __fmaf_rn(of_block[v][r], scale, sum[v][r]);
      }
    }
    // Rows g + 8 r over four lanes, lane q keeps r = q; even lanes have the higher digits.
    const bool upper = second != 0, odd = (q & 1u) != 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float weight = odd ? 1.0f : 65536.0f;
      const float keep0 = upper ? sum[v][2] : sum[v][0], keep1 = upper ? sum[v][3] : sum[v][1],
                  send0 = upper ? sum[v][0] : sum[v][2], send1 = upper ? sum[v][1] : sum[v][3];
      const float two0 = (keep0 + __shfl_xor_sync(0xFFFFFFFFu, send0, 2)) * weight,
                  two1 = (keep1 + __shfl_xor_sync(0xFFFFFFFFu, send1, 2)) * weight;
      const float all = (odd ? two1 : two0) + __shfl_xor_sync(0xFFFFFFFFu, odd ? two0 : two1, 1);
      const float2 scale = *vectors[v].scale();
      total[v] = all * scale.x * (table_.unit * outer) * scale.y;
    }
  }

 private:
  const CodeTable& table_;
  const std::byte* zeros_;
};

/// What such sums need of shared memory beside a unit's places: zeros and, twice, the rest of
/// kVectors vectors.
template <int kN16, class Codes, int kVectors>
struct SumLayout {
  static constexpr bool kWhole = Codes::kDigits > 0;
  using Sums = CodeSums<kN16, kWhole ? Codes::kDigits : 1>;
  using Vector = typename Sums::Vector;
  static constexpr int kBytes = kWhole ? Sums::kZeroBytes + 2 * kVectors * Vector::kBytes : 0;

  /// By all threads; a barrier follows.
  static __device__ void clear(std::byte* memory) {
    if constexpr (kWhole) {
      for (int i = static_cast<int>(threadIdx.x); i < Sums::kZeroBytes / 4;
           i += static_cast<int>(blockDim.x)) {
        reinterpret_cast<uint32_t*>(memory)[i] = 0;
      }
    }
  }
  /// Vector v of a run's unit, whose numbers lie at `numbers`.
  static __device__ Vector vector(std::byte* memory, std::byte* numbers, int run, int v) {
    return {reinterpret_cast<const float*>(numbers),
            memory + Sums::kZeroBytes + ((run & 1) * kVectors + v) * Vector::kBytes};
  }
};

}  // namespace replayeval
