// Encoding and decoding of single numbers and of scales: the definition that every device follows.
// One generic function a kind of element, without branches on the value; order of operations is
// part of the definition (no contraction). Host and device.
#pragma once

#include <cstdint>

#include "quant/float_format.h"

namespace replayeval {

constexpr float kFloatMax = 3.402823466e+38f;

REPLAYEVAL_HD constexpr uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
REPLAYEVAL_HD constexpr float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
REPLAYEVAL_HD constexpr bool is_nan(float x) { return (float_bits(x) & 0x7FFFFFFFu) > 0x7F800000u; }
REPLAYEVAL_HD constexpr float magnitude(float x) { return bits_float(float_bits(x) & 0x7FFFFFFFu); }
REPLAYEVAL_HD constexpr float smaller(float a, float b) { return a < b ? a : b; }
REPLAYEVAL_HD constexpr float larger(float a, float b) { return a > b ? a : b; }

/// 2^k in FP32, -149 <= k <= 127: 2^0 = 0x3F800000, 2^-149 = 0x00000001.
REPLAYEVAL_HD constexpr float power_of_two(int k) {
  return k >= -126 ? bits_float(static_cast<uint32_t>(k + 127) << 23) : bits_float(1u << (k + 149));
}

/// Contribution of x to a maximum of magnitudes: NaN counts as 0, infinity as FLT_MAX.
REPLAYEVAL_HD constexpr float amax_term(float x) {
  return is_nan(x) ? 0.0f : smaller(magnitude(x), kFloatMax);
}

enum class ScaleRounding : uint8_t { nearest, up, down };

namespace codec_detail {

/// |x| split for a format: magnitude code = base + (significand >> shift) plus a rounding
/// increment; the `shift` low bits of the significand are discarded. The carry of a significand
/// walks into the exponent, and subnormals are the case base = 0. Example, E2M1 of 2.5 (bits
/// 0x40200000): significand 0xA00000, shift 22, base 2; 0xA00000 >> 22 = 2, so the code is 4 (2.0)
/// or, rounded up, 5 (3.0).
struct Split {
  uint32_t significand;
  uint32_t base;
  int shift;
};

REPLAYEVAL_HD constexpr Split split(const FloatFormat& f, uint32_t bits) {
  int exponent = static_cast<int>(bits >> 23);
  uint32_t significand = (bits & 0x7FFFFFu) | (exponent > 0 ? 0x800000u : 0u);
  exponent = exponent > 0 ? exponent : 1;
  if (f.bias > 127) {  // FP32 subnormals are normal numbers of the format
    while (significand != 0 && significand < 0x800000u) {
      significand <<= 1;
      --exponent;
    }
  }
  int lowest = 128 - f.bias;
  if (significand == 0) exponent = lowest;
  int above = exponent - lowest;
  int below = above < 0 ? -above : 0;
  above = above > 0 ? above : 0;
  return {significand, static_cast<uint32_t>(above) << f.mantissa_bits,
          23 - f.mantissa_bits + below};
}

/// Applies overflow, NaN and sign to a rounded magnitude code.
REPLAYEVAL_HD constexpr uint32_t finish(const FloatFormat& f, float x, uint32_t code,
                                        bool saturate) {
  uint32_t past = saturate                ? f.max_code
                  : f.inf_code != kNoCode ? f.inf_code
                  : f.nan_code != kNoCode ? f.nan_code
                                          : f.max_code;
  code = code > f.max_code ? past : code;
  uint32_t negative = float_bits(x) >> 31;
  code = f.has_sign ? code | (negative << f.magnitude_bits()) : (negative ? 0u : code);
  uint32_t nan = f.nan_code != kNoCode ? f.nan_code : f.max_code;
  return is_nan(x) ? nan : code;
}

}  // namespace codec_detail

/// Nearest code, ties to even. Past the largest value: +-max with `saturate` (infinity too),
/// otherwise infinity, or NaN where the format has no infinity. NaN becomes the positive NaN code,
/// or +max_code where there is none.
REPLAYEVAL_HD constexpr uint32_t encode_float(const FloatFormat& f, float x, bool saturate = true) {
  codec_detail::Split s = codec_detail::split(f, float_bits(x) & 0x7FFFFFFFu);
  int shift = s.shift < 26
                  ? s.shift
                  : 26;  // 25 and more discard everything: below half of the smallest value
  uint32_t kept = s.significand >> shift;
  uint32_t half = (1u << shift >> 1) - 1u + ((s.base + kept) & 1u);
  return codec_detail::finish(f, x, s.base + ((s.significand + half) >> shift), saturate);
}

/// Stochastic rounding with r of `random_bits` (n) bits: with d the discarded part of |x| in units
/// of the format's gap, the magnitude rounds up exactly when floor(d 2^n) + r >= 2^n. Overflow and
/// NaN as in encode_float.
REPLAYEVAL_HD constexpr uint32_t encode_float_stochastic(const FloatFormat& f, float x, uint32_t r,
                                                         int random_bits, bool saturate = true) {
  codec_detail::Split s = codec_detail::split(f, float_bits(x) & 0x7FFFFFFFu);
  int shift = s.shift < 31 ? s.shift : 31;
  uint32_t kept = s.significand >> shift;
  uint32_t discarded = s.significand - (kept << shift);
  int excess = s.shift - random_bits;
  uint32_t fraction = excess >= 0 ? discarded >> (excess < 31 ? excess : 31) : discarded << -excess;
  uint32_t rounded = kept + ((fraction + r) >> random_bits);
  return codec_detail::finish(f, x, s.base + rounded, saturate);
}

/// Code of a non-negative scale rounded in a given direction; saturates.
REPLAYEVAL_HD constexpr uint32_t encode_float_directed(const FloatFormat& f, float x,
                                                       ScaleRounding rounding) {
  if (rounding == ScaleRounding::nearest) return encode_float(f, x);
  codec_detail::Split s = codec_detail::split(f, float_bits(x) & 0x7FFFFFFFu);
  int shift = s.shift < 31 ? s.shift : 31;
  uint32_t kept = s.significand >> shift;
  uint32_t up = rounding == ScaleRounding::up && kept << shift != s.significand ? 1u : 0u;
  return codec_detail::finish(f, x, s.base + kept + up, true);
}

/// Value of a code. NaN codes give NaN; the sign of zero is kept.
REPLAYEVAL_HD constexpr float decode_float(const FloatFormat& f, uint32_t code) {
  uint32_t mask = (1u << f.magnitude_bits()) - 1u;
  uint32_t sign = f.has_sign ? (code >> f.magnitude_bits() & 1u) << 31 : 0u;
  code &= mask;
  uint32_t exponent = code >> f.mantissa_bits;
  uint32_t fraction = code & ((1u << f.mantissa_bits) - 1u);
  uint32_t significand = fraction + (exponent > 0 ? 1u << f.mantissa_bits : 0u);
  int power = static_cast<int>(exponent > 0 ? exponent : 1u) - f.bias - f.mantissa_bits;
  bool has_inf = f.inf_code != kNoCode;
  if (has_inf && code == f.inf_code) return bits_float(sign | 0x7F800000u);
  if (has_inf ? code > f.inf_code : code == f.nan_code) return bits_float(sign | 0x7FC00000u);
  return bits_float(float_bits(static_cast<float>(significand) * power_of_two(power)) | sign);
}

/// E8M0 (OCP MX v1.0): code k is 2^(k - 127), 0xFF is NaN; there is no zero. The sign of the
/// argument is ignored. `up` and `down` saturate to codes 0 and 0xFE. `nearest` follows the
/// published encoder (ml_dtypes): 1.5 2^k goes up, everything between 2^-127 and 2^-126 to 2^-126;
/// 0 and 1.5 2^127 and more are NaN. Takes FP64, so that a quotient of two FP32 numbers loses
/// nothing.
REPLAYEVAL_HD constexpr uint32_t encode_e8m0(double x, ScaleRounding rounding) {
  constexpr uint64_t kInfinity = 0x7FF0000000000000ull;
  constexpr uint64_t kHalf = 0x8000000000000ull;
  uint64_t bits = __builtin_bit_cast(uint64_t, x) & 0x7FFFFFFFFFFFFFFFull;
  bool nearest = rounding == ScaleRounding::nearest;
  if (bits > kInfinity || (nearest && (bits == 0 || bits == kInfinity))) return 0xFFu;
  int code = static_cast<int>(bits >> 52) - 1023 + 127;
  uint64_t fraction = bits & 0xFFFFFFFFFFFFFull;
  if (code < 0) return 0u;
  if (rounding == ScaleRounding::up) code += fraction != 0 ? 1 : 0;
  if (nearest) code += fraction >= kHalf || (code == 0 && fraction != 0) ? 1 : 0;
  return static_cast<uint32_t>(code < 0xFE || nearest ? code : 0xFE);
}

REPLAYEVAL_HD constexpr float decode_e8m0(uint32_t code) {
  return code == 0xFFu ? bits_float(0x7FC00000u) : power_of_two(static_cast<int>(code) - 127);
}

/// Nearest integer of |x| < 2^22, ties to even: adding 1.5 * 2^23 leaves no fraction bits in FP32.
REPLAYEVAL_HD constexpr float round_to_even(float x) {
  constexpr float kMagic = 12582912.0f;
  return (x + kMagic) - kMagic;
}

/// Integer in [lowest, highest] nearest to x, ties to even; NaN gives 0 clipped to the range.
/// |lowest|, highest <= 65535.
REPLAYEVAL_HD constexpr int encode_integer(float x, int lowest, int highest) {
  float y = is_nan(x) ? 0.0f : x;
  y = larger(smaller(y, static_cast<float>(highest)), static_cast<float>(lowest));
  return static_cast<int>(round_to_even(y));
}

/// Stochastic rounding of an integer with r of 24 bits: the magnitude rounds up exactly when
/// floor(d 2^24) + r >= 2^24; clipped.
REPLAYEVAL_HD constexpr int encode_integer_stochastic(float x, int lowest, int highest,
                                                      uint32_t r) {
  float y = is_nan(x) ? 0.0f : smaller(magnitude(x), 65536.0f);
  int whole = static_cast<int>(y);
  uint32_t fraction = static_cast<uint32_t>((y - static_cast<float>(whole)) * 16777216.0f);
  whole += static_cast<int>((fraction + r) >> 24);
  int q = float_bits(x) >> 31 ? -whole : whole;
  q = q < highest ? q : highest;
  return q > lowest ? q : lowest;
}

constexpr int kMaxValues = 256;
constexpr int kValueRandomBits = 24;

/// A list of values, ascending: code i is values[i]. thresholds[i] is the smallest FP32 number
/// whose nearest value (ties to the even code) is values[i + 1] or larger, so the nearest code of x
/// is the number of thresholds <= x. zero_code is the code of 0, and of NaN.
struct ValueList {
  int count = 0;
  uint32_t zero_code = 0;
  float values[kMaxValues] = {};
  float thresholds[kMaxValues] =
      {};  // count - 1 of them, then +infinity; NaN and +infinity compare as the caller arranges
};

/// Number of entries of ascending `table[0..count)` that are <= x.
REPLAYEVAL_HD constexpr int count_not_above(const float* table, int count, float x) {
  int first = 0;
  int length = count;
  while (length > 0) {
    int half = length >> 1;
    bool right = table[first + half] <= x;
    first = right ? first + half + 1 : first;
    length = right ? length - half - 1 : half;
  }
  return first;
}

/// Nearest code of a list, ties to the even code. Past the ends: the end. NaN: zero_code.
REPLAYEVAL_HD constexpr uint32_t encode_value(const ValueList& list, float x) {
  return is_nan(x) ? list.zero_code
                   : static_cast<uint32_t>(count_not_above(list.thresholds, list.count - 1, x));
}

/// Stochastic rounding to a list with r of 24 bits. Between neighbours `low` (the one toward zero,
/// or the one left of x >= 0 when they straddle zero) and `high`, d = (x - low) / (high - low) in
/// FP32, and `high` is taken exactly when floor(d 2^24) + r >= 2^24.
REPLAYEVAL_HD constexpr uint32_t encode_value_stochastic(const ValueList& list, float x,
                                                         uint32_t r) {
  if (is_nan(x)) return list.zero_code;
  if (list.count < 2) return 0u;
  float y = larger(smaller(x, list.values[list.count - 1]), list.values[0]);
  int left = count_not_above(list.values, list.count - 1, y) - 1;
  bool negative = y < 0.0f;
  float a = list.values[left];
  float b = list.values[left + 1];
  float d = negative ? (b - y) / (b - a) : (y - a) / (b - a);
  uint32_t up = (static_cast<uint32_t>(d * 16777216.0f) + r) >> 24;
  return static_cast<uint32_t>(left) + (negative ? 1u - up : up);
}

}  // namespace replayeval
