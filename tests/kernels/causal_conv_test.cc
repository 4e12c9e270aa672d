// The causal convolution against its FP64 reference, and its independence of splits, rows and
// threads.
#include "kernels/causal_conv.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/causal_conv_simd.h"

namespace replayeval {
namespace {

struct Problem {
  int channels, taps, tokens;
  int64_t stride;
  std::vector<float> weight, bias, x;  // x holds taps - 1 earlier tokens first

  Problem(int channels, int taps, int tokens, unsigned seed)
      : channels(channels), taps(taps), tokens(tokens), stride(channels + 3) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& v, int64_t count) {
      v.resize(static_cast<size_t>(count));
      for (float& value : v) value = normal(random);
    };
    fill(weight, int64_t{channels} * taps);
    fill(bias, channels);
    fill(x, (tokens + taps - 1) * stride);
  }
  CausalConv conv(bool with_bias, bool silu) const {
    return {channels, taps, weight.data(), with_bias ? bias.data() : nullptr, silu};
  }
  CausalConvRow row(std::vector<float>& y, int first, int count) const {
    y.resize(static_cast<size_t>(tokens * stride));
    return {count, x.data() + (taps - 1 + first) * stride, stride, y.data() + first * stride,
            stride};
  }
  /// Sum of magnitudes of an output's terms.
  double magnitude(bool with_bias, int t, int c) const {
    double sum = with_bias ? std::fabs(bias[c]) : 0.0;
    for (int k = 0; k < taps; ++k) {
      sum += std::fabs(double{weight[c * taps + k]} * x[(t + k) * stride + c]);
    }
    return sum;
  }
};

/// Worst excess over the bound. With u = 2^-24 and m the sum of magnitudes: s has an error of at
/// most 2 K u m (K steps, two roundings each without FMA hardware). silu has a slope of at
/// most 1.1. Its own error: the exponent -s log2(e) carries 2 u relative, hence the exponential ln
/// 2 * 2 u |s log2(e)| + 1e-7 (kernels/lanes.h), which enters through e / (1 + e) <= min(1, e) and
/// so at most 1 relative; the sum and the quotient add u each, the reference's own rounding u. The
/// result is |silu(s)| <= |s|. Far left, where e overflows, |silu| itself is below 2^-120.
void check_against_reference(const Problem& problem, bool with_bias, bool silu,
                             const std::vector<float>& got) {
  std::vector<float> want;
  const CausalConvRow row = problem.row(want, 0, problem.tokens);
  causal_conv(problem.conv(with_bias, silu), {&row, 1}, KernelForm::reference);
  constexpr double kUnit = 0x1p-24;
  double worst = -1;
  std::string report;
  for (int t = 0; t < problem.tokens; ++t) {
    for (int c = 0; c < problem.channels; ++c) {
      const size_t at = static_cast<size_t>(t * problem.stride + c);
      const double m = problem.magnitude(with_bias, t, c);
      double bound = 2 * problem.taps * kUnit * m + kUnit * std::fabs(want[at]);
      if (silu) {
        bound = 1.1 * bound +
                std::fabs(want[at]) *
                    ((2 * m * std::log2(std::exp(1.0)) * std::log(2.0) + 3) * kUnit + 1e-7) +
                0x1p-120;
      }
      const double error = std::fabs(double{got[at]} - want[at]);
      if (!(error / bound <= worst)) {
        worst = error / bound;
        report = "token " + std::to_string(t) + " channel " + std::to_string(c) + ": got " +
                 std::to_string(got[at]) + ", expected " + std::to_string(want[at]) + ", error " +
                 std::to_string(error / bound) + " of the bound " + std::to_string(bound);
      }
    }
  }
  INFO(report);
  CHECK(worst <= 1.0);
}

}  // namespace

TEST_CASE("causal_conv: fast form against FP64") {
  for (int channels : {1, 15, 16, 17, 300}) {
    for (int taps : {1, 2, 4, 5}) {
      for (int tokens : {1, 3, 16, 37}) {
        const Problem problem(channels, taps, tokens, static_cast<unsigned>(channels + taps));
        for (bool bias : {false, true}) {
          for (bool silu : {false, true}) {
            CAPTURE(channels);
            CAPTURE(taps);
            CAPTURE(tokens);
            std::vector<float> y;
            const CausalConvRow row = problem.row(y, 0, tokens);
            causal_conv(problem.conv(bias, silu), {&row, 1}, KernelForm::fast);
            check_against_reference(problem, bias, silu, y);
          }
        }
      }
    }
  }
}

TEST_CASE("causal_conv: every instruction-set level meets the bound") {
  const Problem problem(37, 4, 21, 9);
  std::vector<float> transposed(problem.weight.size());
  for (int c = 0; c < 37; ++c) {
    for (int k = 0; k < 4; ++k) transposed[k * 37 + c] = problem.weight[c * 4 + k];
  }
  const auto run = [&](void (*level)(const CausalConvBlock&)) {
    std::vector<float> y;
    const CausalConvRow row = problem.row(y, 0, 21);
    level({0, 37, 21, 37, 4, transposed.data(), problem.bias.data(), true, row.x, row.x_stride,
           row.y, row.y_stride});
    check_against_reference(problem, true, true, y);
  };
  run(simd_generic::causal_conv_block);
#if defined(__x86_64__)
  if (simd_level() != SimdLevel::generic) run(simd_v3::causal_conv_block);
  if (simd_level() == SimdLevel::v4) run(simd_v4::causal_conv_block);
#endif
}

TEST_CASE("causal_conv: any split, set of rows and number of threads gives the same bits") {
  const Problem a(70, 4, 83, 1), b(70, 4, 83, 2);
  std::vector<float> whole;
  const CausalConvRow row = a.row(whole, 0, 83);
  causal_conv(a.conv(true, true), {&row, 1}, KernelForm::fast);
  const int threads = omp_get_max_threads();
  for (int count : {1, 3}) {
    omp_set_num_threads(count);
    std::vector<float> pieces, other;
    int first = 0;
    for (int length : {1, 0, 7, 16, 17, 1, 41}) {
      const CausalConvRow rows[] = {b.row(other, 0, 83 - first), a.row(pieces, first, length)};
      causal_conv(a.conv(true, true), rows, KernelForm::fast);
      first += length;
    }
    CHECK(first == 83);
    CHECK(std::memcmp(pieces.data(), whole.data(), whole.size() * sizeof(float)) == 0);
  }
  omp_set_num_threads(threads);
}

TEST_CASE("causal_conv: NaN and infinity reach exactly the outputs that see them") {
  Problem problem(20, 4, 12, 3);
  problem.x[static_cast<size_t>((3 + 5) * problem.stride + 7)] = NAN;
  problem.x[static_cast<size_t>((3 + 2) * problem.stride + 18)] = INFINITY;
  for (KernelForm form : {KernelForm::fast, KernelForm::reference}) {
    std::vector<float> y;
    const CausalConvRow row = problem.row(y, 0, 12);
    causal_conv(problem.conv(true, true), {&row, 1}, form);
    for (int t = 0; t < 12; ++t) {
      for (int c = 0; c < 20; ++c) {
        const bool touched = (c == 7 && t >= 5 && t < 9) || (c == 18 && t >= 2 && t < 6);
        CAPTURE(t);
        CAPTURE(c);
        CHECK(std::isfinite(y[static_cast<size_t>(t * problem.stride + c)]) == !touched);
      }
    }
  }
}

TEST_CASE("causal_conv: wrong requests are refused") {
  Problem problem(8, 4, 2, 4);
  std::vector<float> y;
  CausalConvRow row = problem.row(y, 0, 2);
  CausalConv conv = problem.conv(false, false);
  conv.weight = nullptr;
  CHECK_THROWS_AS(causal_conv(conv, {&row, 1}, KernelForm::fast), std::invalid_argument);
  row.x_stride = 7;
  CHECK_THROWS_WITH(causal_conv(problem.conv(false, false), {&row, 1}, KernelForm::fast),
                    "causal_conv: row 0: strides 7 and 11, expected at least 8 (channels)");
}

}  // namespace replayeval
