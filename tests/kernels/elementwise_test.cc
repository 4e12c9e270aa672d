// Norms, activations, rotary embedding, router functions: the exponential over its whole range, the
// promised order bit for bit, and FP64 with derived bounds.
#include "kernels/elementwise.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "kernels/elementwise_simd.h"
#include "tests/kernels/compare.h"

namespace replayeval {
namespace {

using namespace test;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float bf16(float x) { return bf16_to_fp32(fp32_to_bf16(x)); }
float rounded(WeightType type, float x) {
  if (type == WeightType::bf16) return bf16(x);
  if (type == WeightType::fp16) return fp16_to_fp32(fp32_to_fp16(x));
  return x;
}

/// Every `step`-th float between two positive ones, with both signs chosen by the caller.
std::vector<float> sweep(float from, float to, uint32_t step, float sign) {
  std::vector<float> values;
  for (uint32_t bits = bits_of(from); bits <= bits_of(to); bits += step)
    values.push_back(sign * float_of(bits));
  return values;
}

TEST_CASE("exp: at most 2 ulp over its range, at every instruction-set level") {
  std::vector<float> x = sweep(1e-30F, 87.33F, 1201, -1);
  const std::vector<float> positive = sweep(1e-30F, 88.72F, 1201, 1);
  const std::vector<float> dense = sweep(0.3F, 0.4F, 3, 1);  // where the reduction changes its n
  x.insert(x.end(), positive.begin(), positive.end());
  x.insert(x.end(), dense.begin(), dense.end());
  std::vector<std::vector<float>> results;
  for (const auto& [name, function] : REPLAYEVAL_LEVELS(exp_values)) {
    std::vector<float> y(x.size());
    function(x.data(), y.data(), static_cast<int64_t>(x.size()));
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double error = ulps(y[i], std::exp(static_cast<double>(x[i])));
      if (!(error <= worst)) {
        worst = error;
        at = i;
      }
    }
    CHECK_MESSAGE(worst <= 2, name, ": exp(", x[at], ") = ", y[at], " is ", worst, " ulp off");
    const float edges[] = {0.0F,     -0.0F,  -87.3365F, -87.34F,  -1000.0F, -INFINITY,
                           88.7228F, 88.73F, 1000.0F,   INFINITY, kNan};
    float e[11];
    function(edges, e, 11);
    CHECK(e[0] == 1.0F);
    CHECK(e[1] == 1.0F);
    CHECK(ulps(e[2], std::exp(static_cast<double>(edges[2]))) <= 2);
    for (int i = 3; i < 6; ++i) CHECK(bits_of(e[i]) == 0);
    CHECK(ulps(e[6], std::exp(static_cast<double>(edges[6]))) <= 2);
    for (int i = 7; i < 10; ++i) CHECK(e[i] == INFINITY);
    CHECK(std::isnan(e[10]));
    results.push_back(std::move(y));
  }
  if (results.size() == 3)
    CHECK_MESSAGE(different(results[2], results[1]).empty(),
                  "v4 against v3: ", different(results[2], results[1]));
  std::vector<float> y(x.size());
  exp_values(x.data(), y.data(), static_cast<int64_t>(x.size()));
  CHECK(different(y, results.back()).empty());
}

double exact(Activation f, double x) {
  if (f == Activation::silu) return x / (1 + std::exp(-x));
  if (f == Activation::relu2) return x > 0 ? x * x : 0;
  if (f == Activation::sigmoid) return 1 / (1 + std::exp(-x));
  return x > 20 ? x : std::log1p(std::exp(x));
}

TEST_CASE(
    "activations: at most 4 ulp over the range of normal results, both tails of softplus, special "
    "values") {
  std::vector<float> x = sweep(1e-20F, 87.0F, 4001, -1);
  const std::vector<float> positive = sweep(1e-20F, 3e4F, 4001, 1);
  x.insert(x.end(), positive.begin(), positive.end());
  for (const float edge :
       {20.0F, 20.000002F, 19.999998F, 0.0F, -0.88137F, 0.88137F, -17.0F, -104.0F})
    x.push_back(edge);
  for (const auto& [name, function] : REPLAYEVAL_LEVELS(activate_rows)) {
    for (const Activation f :
         {Activation::silu, Activation::relu2, Activation::sigmoid, Activation::softplus}) {
      std::vector<float> y(x.size());
      const auto n = static_cast<int64_t>(x.size());
      function(f, {x.data(), n}, nullptr, {y.data(), n}, 0, 1, n, WeightType::fp32);
      double worst = 0;
      size_t at = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const double want = exact(f, x[i]);
        if (std::abs(want) < 0x1p-126) {
          CHECK(std::abs(y[i]) <= 0x1p-126);
          continue;
        }
        const double error = ulps(y[i], want);
        if (!(error <= worst)) {
          worst = error;
          at = i;
        }
      }
      CHECK_MESSAGE(worst <= 4, name, " function ", static_cast<int>(f), ": f(", x[at],
                    ") = ", y[at], " is ", worst, " ulp off");
      const float edges[] = {kNan, INFINITY, -INFINITY};
      float e[3];
      function(f, {edges, 3}, nullptr, {e, 3}, 0, 1, 3, WeightType::fp32);
      CHECK(std::isnan(e[0]));
      CHECK(e[1] == (f == Activation::sigmoid ? 1.0F : INFINITY));
      if (f != Activation::silu) CHECK(e[2] == 0.0F);  // silu: inf / inf
    }
  }
  CHECK(activate(Activation::softplus, 20.5F) == 20.5F);
  CHECK(activate(Activation::relu2, -3.0F) == 0.0F);
  CHECK(activate(Activation::relu2, 3.0F) == 9.0F);
  CHECK(activate(Activation::sigmoid, 0.0F) == 0.5F);
}

TEST_CASE("activations on rows: bias, strides, tails and rounding are those of single values") {
  for (const WeightType type : {WeightType::fp32, WeightType::bf16, WeightType::fp16}) {
    for (const int64_t cols : {1, 15, 16, 17, 33}) {
      constexpr int64_t kRows = 5;
      const int64_t stride = cols + 2;
      const std::vector<float> x = random_floats(kRows * stride, 101, 3);
      const std::vector<float> up = random_floats(kRows * stride, 102);
      const std::vector<float> bias = random_floats(cols, 103);
      for (const Activation f :
           {Activation::silu, Activation::relu2, Activation::sigmoid, Activation::softplus}) {
        std::vector<float> y(x.size(), -5.0F), want(x.size(), -5.0F), product(x.size(), -5.0F),
            want_product(x.size(), -5.0F);
        for (int64_t i = 0; i < kRows; ++i) {
          for (int64_t c = 0; c < cols; ++c) {
            const auto at = static_cast<size_t>(i * stride + c);
            want[at] =
                rounded(type, activate(f, rounded(type, x[at] + bias[static_cast<size_t>(c)])));
            want_product[at] =
                rounded(type, rounded(type, activate(f, rounded(type, x[at] * 0.7F))) * up[at]);
          }
        }
        activate(f, x.data(), stride, bias.data(), y.data(), stride, kRows, cols, type);
        CHECK_MESSAGE(different(y, want).empty(), different(y, want));
        activate_multiply(f, x.data(), stride, 0.7F, up.data(), stride, product.data(), stride,
                          kRows, cols, type);
        CHECK_MESSAGE(different(product, want_product).empty(), different(product, want_product));
      }
    }
  }
}

/// The sum that elementwise.h promises: 16 lanes, each a chain of fused multiply-adds, then 8, 4,
/// 2, 1.
float lane_sum(const std::vector<float>& terms, bool squares) {
  float lanes[16] = {};
  for (size_t i = 0; i < terms.size(); ++i) {
    lanes[i % 16] =
        squares ? std::fma(terms[i], terms[i], lanes[i % 16]) : lanes[i % 16] + terms[i];
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

TEST_CASE("rms_norm: every variant in the promised order, bit for bit, and near FP64") {
  if (!has_fma()) {
    MESSAGE("SKIPPED: no FMA on this machine");
    return;
  }
  constexpr int64_t kRows = 7;
  struct Case {
    int64_t cols, group, weight_size;
  };
  for (const Case& c : {Case{1, 0, 1}, Case{24, 0, 24}, Case{96, 32, 96}, Case{60, 20, 20},
                        Case{34, 17, 34}, Case{256, 128, 128}}) {
    for (const GateOrder gate :
         {GateOrder::none, GateOrder::gate_first, GateOrder::norm_first, GateOrder::gate_only}) {
      for (const WeightType type : {WeightType::fp32, WeightType::bf16}) {
        for (const bool one_plus : {false, true}) {
          for (const bool round_normalized : {false, true}) {
            const int64_t stride = c.cols + 5;
            const std::vector<float> x = random_floats(kRows * stride, 111, 2);
            const std::vector<float> z = random_floats(kRows * stride, 112, 2);
            const std::vector<float> w = random_floats(c.weight_size, 113);
            RmsNorm norm;
            norm.weight = w.data();
            norm.weight_size = c.weight_size;
            norm.group = c.group;
            norm.eps = 1e-3F;
            norm.one_plus = one_plus;
            norm.gate = gate;
            norm.activation = type;
            norm.round_normalized = round_normalized;
            std::vector<float> y(x.size(), -5.0F), want(x.size(), -5.0F);
            Worst worst;
            rms_norm(norm, x.data(), stride, gate == GateOrder::none ? nullptr : z.data(), stride,
                     y.data(), stride, kRows, c.cols);
            const int64_t group = c.group > 0 ? c.group : c.cols;
            for (int64_t row = 0; row < kRows; ++row) {
              for (int64_t begin = 0; begin < c.cols; begin += group) {
                std::vector<float> input(static_cast<size_t>(group));
                double squares = 0;
                for (int64_t i = 0; i < group; ++i) {
                  const auto at = static_cast<size_t>(row * stride + begin + i);
                  const bool first = gate == GateOrder::gate_first || gate == GateOrder::gate_only;
                  input[static_cast<size_t>(i)] =
                      first ? x[at] * activate(Activation::silu, z[at]) : x[at];
                  const double value = first ? x[at] * exact(Activation::silu, z[at]) : x[at];
                  squares += value * value;
                }
                const float inverse =
                    1.0F / std::sqrt(lane_sum(input, true) / static_cast<float>(group) + norm.eps);
                for (int64_t i = 0; i < group; ++i) {
                  const auto at = static_cast<size_t>(row * stride + begin + i);
                  const float weight = w[static_cast<size_t>((begin + i) % c.weight_size)];
                  const bool steps = round_normalized && !one_plus;
                  float value = input[static_cast<size_t>(i)];
                  if (gate != GateOrder::gate_only) {
                    value *= inverse;
                    if (steps) value = rounded(type, value);
                    value *= one_plus ? weight + 1.0F : weight;
                    if (gate == GateOrder::norm_first) {
                      if (steps) value = rounded(type, value);
                      value *= activate(Activation::silu, z[at]);
                    }
                  }
                  want[at] = rounded(type, value);
                  if (type == WeightType::fp32) {
                    // group + 20 roundings: squares and their sum (halved by the root), root,
                    // quotients, products, silu (4 ulp, twice).
                    double real =
                        gate == GateOrder::none ? x[at] : x[at] * exact(Activation::silu, z[at]);
                    if (gate != GateOrder::gate_only) {
                      real *= (one_plus ? 1.0 + weight : weight) /
                              std::sqrt(squares / static_cast<double>(group) + norm.eps);
                    }
                    worst.see(static_cast<int64_t>(at), y[at], real,
                              gamma(static_cast<double>(group) + 40) * std::abs(real) +
                                  kUnit * std::abs(one_plus ? real : 0));
                  }
                }
              }
            }
            CHECK_MESSAGE(different(y, want).empty(), "cols ", c.cols, " gate ",
                          static_cast<int>(gate), ": ", different(y, want));
            if (type == WeightType::fp32)
              CHECK_MESSAGE(worst.good(), "cols ", c.cols, " gate ", static_cast<int>(gate), ": ",
                            worst.text());
          }
        }
      }
    }
  }
}

TEST_CASE("rms_norm: in place, refusals") {
  const std::vector<float> x = random_floats(3 * 40, 121);
  const std::vector<float> w = random_floats(40, 122);
  RmsNorm norm;
  norm.weight = w.data();
  norm.weight_size = 40;
  std::vector<float> y(x.size()), in_place = x;
  rms_norm(norm, x.data(), 40, nullptr, 0, y.data(), 40, 3, 40);
  rms_norm(norm, in_place.data(), 40, nullptr, 0, in_place.data(), 40, 3, 40);
  CHECK(different(in_place, y).empty());
  norm.group = 16;
  CHECK_THROWS_AS(rms_norm(norm, x.data(), 40, nullptr, 0, y.data(), 40, 3, 40),
                  std::invalid_argument);
  norm.group = 20;
  norm.weight_size = 10;
  CHECK_THROWS_AS(rms_norm(norm, x.data(), 40, nullptr, 0, y.data(), 40, 3, 40),
                  std::invalid_argument);
  norm.weight_size = 20;
  norm.gate = GateOrder::gate_first;
  CHECK_THROWS_AS(rms_norm(norm, x.data(), 40, nullptr, 0, y.data(), 40, 3, 40),
                  std::invalid_argument);
  norm.weight = nullptr;
  norm.gate = GateOrder::none;
  CHECK_THROWS_AS(rms_norm(norm, x.data(), 40, nullptr, 0, y.data(), 40, 3, 40),
                  std::invalid_argument);
}

TEST_CASE("row functions: bits do not depend on the number of rows or threads") {
  constexpr int64_t kRows = 300, kCols = 130;
  const std::vector<float> x = random_floats(kRows * kCols, 131, 2);
  const std::vector<float> z = random_floats(kRows * kCols, 132, 2);
  const std::vector<float> w = random_floats(kCols, 133);
  RmsNorm norm;
  norm.weight = w.data();
  norm.weight_size = kCols;
  norm.gate = GateOrder::gate_first;
  std::vector<float> single(x.size()), soft(x.size());
  for (int64_t i = 0; i < kRows; ++i) {
    rms_norm(norm, x.data() + i * kCols, kCols, z.data() + i * kCols, kCols,
             single.data() + i * kCols, kCols, 1, kCols);
    softmax(x.data() + i * kCols, kCols, soft.data() + i * kCols, kCols, 1, kCols);
  }
  const int before = omp_get_max_threads();
  for (const int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    std::vector<float> y(x.size());
    rms_norm(norm, x.data(), kCols, z.data(), kCols, y.data(), kCols, kRows, kCols);
    CHECK(different(y, single).empty());
    softmax(x.data(), kCols, y.data(), kCols, kRows, kCols);
    CHECK(different(y, soft).empty());
  }
  omp_set_num_threads(before);
}

TEST_CASE("sums and scales of rows: one operation a step, rounded where it says so") {
  constexpr int64_t kRows = 4, kCols = 21, kStride = 23;
  const std::vector<float> x = random_floats(kRows * kStride, 141);
  const std::vector<float> start = random_floats(kRows * kStride, 142);
  const std::vector<float> column = random_floats(kCols, 143);
  const float row_scale[] = {0.3F, -2.0F, 0.0F, 1.0F};
  for (const WeightType type : {WeightType::fp32, WeightType::bf16}) {
    std::vector<float> added = start, by_row = start, scaled = start;
    std::vector<float> want_added = start, want_by_row = start, want_scaled = start;
    const auto sum = [type](float y, float a, float f) {
      if (type == WeightType::fp32) return has_fma() ? std::fma(a, f, y) : y + a * f;
      return rounded(type, y + rounded(type, a * f));
    };
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t c = 0; c < kCols; ++c) {
        const auto at = static_cast<size_t>(i * kStride + c);
        want_added[at] = sum(start[at], x[at], 0.22F);
        want_by_row[at] = sum(start[at], x[at], row_scale[i]);
        want_scaled[at] =
            rounded(type, rounded(type, start[at] * 1.7F) * column[static_cast<size_t>(c)]);
      }
    }
    add_scaled(added.data(), kStride, x.data(), kStride, 0.22F, kRows, kCols, type);
    add_row_scaled(by_row.data(), kStride, x.data(), kStride, row_scale, kRows, kCols, type);
    scale(scaled.data(), kStride, 1.7F, column.data(), kRows, kCols, type);
    CHECK_MESSAGE(different(added, want_added).empty(), different(added, want_added));
    CHECK_MESSAGE(different(by_row, want_by_row).empty(), different(by_row, want_by_row));
    CHECK_MESSAGE(different(scaled, want_scaled).empty(), different(scaled, want_scaled));
  }
  std::vector<float> values = random_floats(1003, 144), want = values;
  for (float& v : want) v = bf16(v);
  round_to_bf16(values.data(), 1003);
  CHECK(different(values, want).empty());
  round_to(WeightType::fp32, values.data(), 1003);
  CHECK(different(values, want).empty());
}

TEST_CASE("rotary embedding: rotate half of the leading dimensions") {
  // theta 10000, 4 dimensions: frequencies 1 and 1/100.
  const std::vector<float> frequencies = rotary_inverse_frequencies(10000, 4);
  REQUIRE(frequencies.size() == 2);
  CHECK(frequencies[0] == 1.0F);
  CHECK(frequencies[1] == 0.01F);
  CHECK_THROWS_AS(rotary_inverse_frequencies(10000, 5), std::invalid_argument);

  constexpr int64_t kTokens = 6;
  constexpr int kHeads = 3, kHeadDim = 50, kDims = 38;
  constexpr int64_t kStride = kHeads * kHeadDim + 1;
  constexpr int64_t kFirst = 131000;
  const std::vector<float> inverse = rotary_inverse_frequencies(1e7, kDims);
  for (const WeightType type : {WeightType::fp32, WeightType::bf16}) {
    std::vector<float> cos(kTokens * kDims / 2), sin(cos.size());
    rotary_tables(inverse, kFirst, kTokens, cos.data(), sin.data(), type);
    const std::vector<float> x = random_floats(kTokens * kStride, 151);
    std::vector<float> y = x;
    rotary_apply(y.data(), kStride, kTokens, kHeads, kHeadDim, kDims, cos.data(), sin.data(), type);
    Worst worst;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t i = 0; i < kTokens * kStride; ++i) {
        if (i / kStride != t) continue;
        const int64_t c = i % kStride;
        const int64_t d = c % kHeadDim;
        if (c == kStride - 1 || d >= kDims) {
          CHECK(y[static_cast<size_t>(i)] == x[static_cast<size_t>(i)]);
          continue;
        }
        const bool upper = d >= kDims / 2;
        const int64_t f = upper ? d - kDims / 2 : d;
        // The angle is an FP32 product by definition.
        const double angle = static_cast<float>(kFirst + t) * inverse[static_cast<size_t>(f)];
        const double self = x[static_cast<size_t>(i)];
        const double other = x[static_cast<size_t>(upper ? i - kDims / 2 : i + kDims / 2)];
        const double want = upper ? self * std::cos(angle) + other * std::sin(angle)
                                  : self * std::cos(angle) - other * std::sin(angle);
        // Table, products and sum: one rounding each (unit 2^-9 in BF16), on terms of at most
        // |self|, |other|.
        const double unit = type == WeightType::fp32 ? kUnit : 0x1p-9;
        worst.see(i, y[static_cast<size_t>(i)], want,
                  3.1 * unit * (std::abs(self) + std::abs(other)));
      }
    }
    CHECK_MESSAGE(worst.good(), worst.text());
    if (type == WeightType::bf16) {
      for (size_t i = 0; i < cos.size(); ++i) CHECK(cos[i] == bf16(cos[i]));
    }
    // One token alone at its own position: same bits.
    std::vector<float> alone(x.begin() + 4 * kStride, x.begin() + 5 * kStride);
    rotary_tables(inverse, kFirst + 4, 1, cos.data(), sin.data(), type);
    rotary_apply(alone.data(), kStride, 1, kHeads, kHeadDim, kDims, cos.data(), sin.data(), type);
    CHECK(different(alone.data(), y.data() + 4 * kStride, kStride).empty());
  }
  std::vector<float> x(10);
  CHECK_THROWS_AS(rotary_apply(x.data(), 10, 1, 1, 10, 12, x.data(), x.data()),
                  std::invalid_argument);
}

TEST_CASE("softmax: near FP64, NaN rows") {
  for (const int64_t cols : {1, 5, 16, 130, 513}) {
    std::vector<float> x = random_floats(3 * cols, 161, 4);
    for (int64_t c = 0; c < cols; ++c) {
      x[static_cast<size_t>(cols + c)] += 200;  // e^x overflows without the maximum
      x[static_cast<size_t>(2 * cols + c)] -= 200;
    }
    std::vector<float> y(x.size());
    softmax(x.data(), cols, y.data(), cols, 3, cols);
    Worst worst;
    for (int64_t row = 0; row < 3; ++row) {
      const float* from = x.data() + row * cols;
      const double maximum = *std::max_element(from, from + cols);
      double total = 0, range = 0;
      for (int64_t c = 0; c < cols; ++c) {
        total += std::exp(from[c] - maximum);
        range = std::max(range, maximum - from[c]);
      }
      for (int64_t c = 0; c < cols; ++c) {
        const double want = std::exp(from[c] - maximum) / total;
        // Difference (u r), exp (4 u), sum of cols terms, twice the first two; one division.
        worst.see(row * cols + c, y[static_cast<size_t>(row * cols + c)], want,
                  1.01 * want * (gamma(static_cast<double>(cols) + 1) + kUnit * (2 * range + 8)));
      }
    }
    CHECK_MESSAGE(worst.good(), worst.text());
  }
  float rows[4][3] = {
      {1, kNan, 2}, {-INFINITY, -INFINITY, -INFINITY}, {1, INFINITY, 2}, {0, -INFINITY, 0}};
  softmax(rows[0], 3, rows[0], 3, 4, 3);
  for (int i = 0; i < 3; ++i) {
    CHECK(std::isnan(rows[0][i]));
    CHECK(std::isnan(rows[1][i]));
  }
  CHECK(std::isnan(rows[2][1]));
  CHECK(rows[3][0] == 0.5F);
  CHECK(rows[3][1] == 0.0F);
}

TEST_CASE("top_k: descending, lowest index first among equals, NaN largest") {
  const float x[2][7] = {{1, 3, 3, -INFINITY, 2, 3, 1}, {0, kNan, 5, -0.0F, INFINITY, kNan, 5}};
  int32_t index[2][5];
  float value[2][5];
  top_k(x[0], 7, 2, 7, 5, index[0], value[0]);
  const int32_t first[] = {1, 2, 5, 4, 0}, second[] = {1, 5, 4, 2, 6};
  for (int j = 0; j < 5; ++j) {
    CHECK(index[0][j] == first[j]);
    CHECK(index[1][j] == second[j]);
    CHECK((value[0][j] == x[0][first[j]]));
  }
  const std::vector<float> random = random_floats(50 * 64, 171);
  std::vector<float> coarse = random;
  for (float& v : coarse) v = std::round(v * 2);  // many ties
  std::vector<int32_t> got(50 * 8);
  top_k(coarse.data(), 64, 50, 64, 8, got.data(), nullptr);
  for (int64_t row = 0; row < 50; ++row) {
    std::vector<int32_t> order(64);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return coarse[static_cast<size_t>(row * 64 + a)] > coarse[static_cast<size_t>(row * 64 + b)];
    });
    for (int64_t j = 0; j < 8; ++j)
      REQUIRE(got[static_cast<size_t>(row * 8 + j)] == order[static_cast<size_t>(j)]);
  }
  CHECK_THROWS_AS(top_k(x[0], 7, 1, 7, 8, index[0], nullptr), std::invalid_argument);
  CHECK_THROWS_AS(top_k(x[0], 7, 1, 7, 0, index[0], nullptr), std::invalid_argument);
}

}  // namespace
}  // namespace replayeval
