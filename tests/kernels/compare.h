// Comparisons that remember the worst element, and the instruction-set levels that this machine can
// run.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/simd_dispatch.h"

namespace replayeval::test {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

/// Unit roundoff of FP32, and n u / (1 - n u): the bound of n roundings in a row.
constexpr double kUnit = 0x1p-24;
inline double gamma(double n) { return n * kUnit / (1 - n * kUnit); }

/// Distance of x from `exact` in units of the last place of FP32 there (2^-149 at least).
inline double ulps(float x, double exact) {
  const int exponent = exact == 0 ? -126 : std::max(std::ilogb(exact), -126);
  return std::abs(static_cast<double>(x) - exact) / std::ldexp(1.0, exponent - 23);
}

/// Keeps the element that exceeds its bound by the largest factor.
class Worst {
 public:
  void see(int64_t index, float got, double want, double bound) {
    ++seen_;
    const double error = std::abs(static_cast<double>(got) - want);
    const double ratio = error <= bound ? (bound > 0 ? error / bound : 0) : error / bound;
    const bool bad = !(error <= bound);
    if (index_ >= 0 && !(bad && !bad_) && !(bad == bad_ && ratio > ratio_)) return;
    bad_ = bad;
    ratio_ = ratio;
    index_ = index;
    std::ostringstream text;
    text.precision(9);
    text << "element " << index << ": got " << got << " (0x" << std::hex << bits_of(got) << std::dec
         << "), expected " << want << ", error " << error << ", bound " << bound;
    text_ = text.str();
  }
  bool good() const { return seen_ > 0 && !bad_; }
  double ratio() const { return ratio_; }
  const std::string& text() const { return text_; }

 private:
  int64_t seen_ = 0;
  int64_t index_ = -1;
  bool bad_ = false;
  double ratio_ = 0;
  std::string text_;
};

/// Empty when n values are equal bit for bit (any NaN equals any NaN), else the first difference.
inline std::string different(const float* got, const float* want, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (bits_of(got[i]) == bits_of(want[i]) || (std::isnan(got[i]) && std::isnan(want[i])))
      continue;
    std::ostringstream text;
    text.precision(9);
    text << "element " << i << ": got " << got[i] << " (0x" << std::hex << bits_of(got[i])
         << "), expected " << std::dec << want[i] << " (0x" << std::hex << bits_of(want[i]) << ")";
    return text.str();
  }
  return {};
}
inline std::string different(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size()) return "sizes differ";
  return different(got.data(), want.data(), static_cast<int64_t>(got.size()));
}

inline std::vector<float> random_floats(int64_t n, uint32_t seed, float scale = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& x : values) x = normal(engine);
  return values;
}

/// One function at each level that this machine runs: REPLAYEVAL_LEVELS(name) is a vector of (level
/// name, pointer).
template <class Function>
using Levels = std::vector<std::pair<std::string, Function>>;
#if defined(__x86_64__)
template <class Function>
Levels<Function> levels(Function generic, Function v3, Function v4) {
  Levels<Function> all{{"generic", generic}};
  if (simd_level() != SimdLevel::generic) all.push_back({"v3", v3});
  if (simd_level() == SimdLevel::v4) all.push_back({"v4", v4});
  return all;
}
#define REPLAYEVAL_LEVELS(name) \
  ::replayeval::test::levels(&simd_generic::name, &simd_v3::name, &simd_v4::name)
#else
template <class Function>
Levels<Function> levels(Function generic) {
  return {{"generic", generic}};
}
#define REPLAYEVAL_LEVELS(name) ::replayeval::test::levels(&simd_generic::name)
#endif

/// Whether `fma` of the level in use rounds once.
inline bool has_fma() { return simd_level() != SimdLevel::generic; }

}  // namespace replayeval::test
