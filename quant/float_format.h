// Floating-point element and scale formats as rows of a table: sign, exponent, mantissa, bias and
// the codes that are special. Everything else (largest value, subnormals, rounding) follows from a
// row. Host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define REPLAYEVAL_HD __host__ __device__
#elif defined(REPLAYEVAL_SIMD_NAMESPACE)
// No out-of-line copy for a wider instruction set may reach the linker, which would use it
// everywhere.
#define REPLAYEVAL_HD __attribute__((always_inline))
#else
#define REPLAYEVAL_HD
#endif

namespace replayeval {

constexpr uint32_t kNoCode = 0xFFFFFFFFu;

/// value = (-1)^sign * 2^(max(e, 1) - bias - mantissa_bits) * (fraction + (e > 0 ? 2^mantissa_bits
/// : 0)). Codes below are magnitudes (without the sign bit): `max_code` the largest finite one;
/// `inf_code` and `nan_code` kNoCode where the format has none. With an infinity every code above
/// it is NaN. Without a NaN, a NaN input is stored as +max_code. `random_bits` is n of stochastic
/// rounding (DESIGN.md section 1).
struct FloatFormat {
  int exponent_bits = 0;
  int mantissa_bits = 0;
  int bias = 0;
  uint32_t max_code = 0;
  uint32_t inf_code = kNoCode;
  uint32_t nan_code = kNoCode;
  int random_bits = 0;
  bool has_sign = true;

  REPLAYEVAL_HD constexpr int magnitude_bits() const { return exponent_bits + mantissa_bits; }
  REPLAYEVAL_HD constexpr int bits() const { return magnitude_bits() + (has_sign ? 1 : 0); }
  friend constexpr bool operator==(const FloatFormat&, const FloatFormat&) = default;
};

constexpr FloatFormat kFp16{5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF, 13, true};
constexpr FloatFormat kBf16{8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF, 16, true};
constexpr FloatFormat kE4m3{4, 3, 7, 0x7E, kNoCode, 0x7F, 16, true};  // OCP E4M3: no infinity
constexpr FloatFormat kE5m2{5, 2, 15, 0x7B, 0x7C, 0x7F, 16, true};
constexpr FloatFormat kE2m1{2, 1, 1, 0x7, kNoCode, kNoCode, 8, true};
constexpr FloatFormat kE2m3{2, 3, 1, 0x1F, kNoCode, kNoCode, 16, true};  // OCP MX v1.0 FP6
constexpr FloatFormat kE3m2{3, 2, 3, 0x1F, kNoCode, kNoCode, 16, true};
constexpr FloatFormat kUe5m3{5, 3, 15, 0xFE, kNoCode, 0xFF, 16, false};  // block scales only

struct NamedFloatFormat {
  const char* name;
  FloatFormat format;
};

/// The rows that a format file can name; the exhaustive tests walk this table.
constexpr NamedFloatFormat kFloatFormats[] = {
    {"fp16", kFp16}, {"bf16", kBf16}, {"e4m3", kE4m3}, {"e5m2", kE5m2},
    {"e2m1", kE2m1}, {"e2m3", kE2m3}, {"e3m2", kE3m2}, {"ue5m3", kUe5m3},
};

}  // namespace replayeval
