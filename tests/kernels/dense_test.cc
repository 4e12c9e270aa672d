// Linear products: bit-equal whatever runs beside a row, equal to the order that the header
// promises, close to FP64; and conversions of 16-bit types against nearest-value search.
#include "kernels/dense.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/dense_simd.h"
#include "tests/kernels/compare.h"

namespace replayeval {
namespace {

using namespace test;

/// A weight matrix in one of the types, from normal values, with a stride and at an odd byte
/// address.
struct Weights {
  Weights(WeightType type, int64_t rows, int64_t cols, int64_t gap, uint32_t seed)
      : bytes(static_cast<size_t>(rows * (cols + gap) * weight_bytes(type) + 1)) {
    const std::vector<float> values = random_floats(rows * (cols + gap), seed);
    narrow(values.data(), rows * (cols + gap), type, bytes.data() + 1);
    view = {bytes.data() + 1, type, rows, cols, cols + gap};
  }
  std::vector<std::byte> bytes;
  WeightView view;
};

/// Restores the number of OpenMP threads.
struct Threads {
  explicit Threads(int n) : before(omp_get_max_threads()) { omp_set_num_threads(n); }
  ~Threads() { omp_set_num_threads(before); }
  int before;
};

struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1}, {7, 5}, {33, 17}, {64, 256}, {40, 300}, {101, 513}};
constexpr WeightType kTypes[] = {WeightType::fp32, WeightType::bf16, WeightType::fp16};

TEST_CASE("linear: a row's bits do not depend on the rows beside it, strides or threads") {
  constexpr int64_t kMany = 530;  // more than one block of rows
  for (const Shape& shape : kShapes) {
    for (const WeightType type : kTypes) {
      const Weights w(type, shape.rows, shape.cols, 3, 1);
      const std::vector<float> x = random_floats(kMany * shape.cols, 2);
      const std::vector<float> bias = random_floats(shape.rows, 3);
      std::vector<float> all(static_cast<size_t>(kMany * shape.rows));
      linear(x.data(), kMany, shape.cols, w.view, bias.data(), all.data(), shape.rows);
      for (const int threads : {1, 2, 3}) {
        const Threads guard(threads);
        for (int64_t m = 1; m <= 40; ++m) {
          const int64_t first = (m * 37) % (kMany - m);
          const int64_t x_stride = shape.cols + m % 3;
          const int64_t y_stride = shape.rows + m % 4;
          std::vector<float> some(static_cast<size_t>(m * x_stride), 7.0F);
          for (int64_t i = 0; i < m; ++i) {
            std::copy_n(x.data() + (first + i) * shape.cols, shape.cols,
                        some.data() + i * x_stride);
          }
          std::vector<float> y(static_cast<size_t>(m * y_stride), -1.0F);
          linear(some.data(), m, x_stride, w.view, bias.data(), y.data(), y_stride);
          for (int64_t i = 0; i < m; ++i) {
            const std::string text = different(y.data() + i * y_stride,
                                               all.data() + (first + i) * shape.rows, shape.rows);
            if (!text.empty()) {
              FAIL("shape [", shape.rows, ", ", shape.cols, "], m ", m, ", row ", i, ", threads ",
                   threads, ": ", text);
            }
            for (int64_t c = shape.rows; c < y_stride; ++c)
              REQUIRE(y[static_cast<size_t>(i * y_stride + c)] == -1.0F);
          }
        }
      }
    }
  }
}

TEST_CASE("linear: each output is one chain of fused multiply-adds in the order of the columns") {
  if (!has_fma()) {
    MESSAGE("SKIPPED: no FMA on this machine");
    return;
  }
  for (const Shape& shape : kShapes) {
    for (const WeightType type : kTypes) {
      constexpr int64_t kRows = 29;
      const Weights w(type, shape.rows, shape.cols, 0, 4);
      const std::vector<float> x = random_floats(kRows * shape.cols, 5);
      const std::vector<float> bias = random_floats(shape.rows, 6);
      std::vector<float> y(static_cast<size_t>(kRows * shape.rows));
      std::vector<float> want(y.size());
      linear(x.data(), kRows, shape.cols, w.view, bias.data(), y.data(), shape.rows);
      std::vector<float> row(static_cast<size_t>(shape.cols));
      for (int64_t r = 0; r < shape.rows; ++r) {
        widen(w.view, r, row.data());
        for (int64_t i = 0; i < kRows; ++i) {
          float sum = 0;
          for (int64_t c = 0; c < shape.cols; ++c) {
            sum = std::fma(x[static_cast<size_t>(i * shape.cols + c)], row[static_cast<size_t>(c)],
                           sum);
          }
          want[static_cast<size_t>(i * shape.rows + r)] = sum + bias[static_cast<size_t>(r)];
        }
      }
      CHECK_MESSAGE(different(y, want).empty(), different(y, want));
    }
  }
}

// K steps of one or two roundings and the bias: |y - exact| <= gamma_(2 K + 1) (sum |x w| + |bias|)
// without FMA, gamma_(K + 1) with it; the FP64 value is itself off by far less than the slack of
// one more rounding.
TEST_CASE("linear: error against FP64 stays below the bound, at every instruction-set level") {
  const auto units = REPLAYEVAL_LEVELS(dense_unit);
  for (const Shape& shape : kShapes) {
    for (const WeightType type : kTypes) {
      constexpr int64_t kRows = 31;
      const Weights w(type, shape.rows, shape.cols, 1, 7);
      const std::vector<float> x = random_floats(kRows * shape.cols, 8);
      const std::vector<float> bias = random_floats(shape.rows, 9);
      std::vector<std::vector<float>> results;
      for (const auto& [name, unit] : units) {
        std::vector<float> y(static_cast<size_t>(kRows * shape.rows), 99.0F);
        const LinearJob job{x.data(), shape.cols,  nullptr,  kRows,
                            w.view,   bias.data(), y.data(), shape.rows};
        unit(job, 0, kRows, 0, shape.rows, thread_scratch(dense_scratch(kRows)));
        Worst worst;
        std::vector<float> row(static_cast<size_t>(shape.cols));
        for (int64_t r = 0; r < shape.rows; ++r) {
          widen(w.view, r, row.data());
          for (int64_t i = 0; i < kRows; ++i) {
            double sum = bias[static_cast<size_t>(r)];
            double size = std::abs(sum);
            for (int64_t c = 0; c < shape.cols; ++c) {
              const double product =
                  static_cast<double>(x[static_cast<size_t>(i * shape.cols + c)]) *
                  row[static_cast<size_t>(c)];
              sum += product;
              size += std::abs(product);
            }
            const double steps =
                static_cast<double>(name == "generic" ? 2 * shape.cols : shape.cols) + 2;
            worst.see(i * shape.rows + r, y[static_cast<size_t>(i * shape.rows + r)], sum,
                      gamma(steps) * size);
          }
        }
        CHECK_MESSAGE(worst.good(), name, ": ", worst.text());
        results.push_back(y);
      }
      if (results.size() == 3)
        CHECK_MESSAGE(different(results[2], results[1]).empty(),
                      "v4 against v3: ", different(results[2], results[1]));
    }
  }
}

TEST_CASE("linear: the shipped reference is the rounded FP64 sum") {
  const Weights w(WeightType::bf16, 9, 70, 2, 10);
  const std::vector<float> x = random_floats(3 * 70, 11);
  const std::vector<float> bias = random_floats(9, 12);
  std::vector<float> y(27), reference(27);
  linear(x.data(), 3, 70, w.view, bias.data(), y.data(), 9);
  linear_reference(x.data(), 3, 70, w.view, bias.data(), reference.data(), 9);
  std::vector<float> row(70);
  Worst worst;
  for (int64_t r = 0; r < 9; ++r) {
    widen(w.view, r, row.data());
    for (int64_t i = 0; i < 3; ++i) {
      double size = std::abs(bias[static_cast<size_t>(r)]);
      for (size_t c = 0; c < 70; ++c)
        size += std::abs(static_cast<double>(x[static_cast<size_t>(i) * 70 + c]) * row[c]);
      worst.see(i * 9 + r, y[static_cast<size_t>(i * 9 + r)],
                reference[static_cast<size_t>(i * 9 + r)], gamma(142) * size);
    }
  }
  CHECK_MESSAGE(worst.good(), worst.text());
}

TEST_CASE("linear: several jobs, gathered rows and empty ones give the bits of single calls") {
  const Weights first(WeightType::bf16, 70, 130, 0, 13);
  const Weights second(WeightType::fp32, 5, 130, 0, 14);
  const std::vector<float> x = random_floats(50 * 130, 15);
  const std::vector<int32_t> rows = {3, 3, 49, 0, 17, 21, 8, 30, 31, 32, 33, 34, 40};
  const auto m = static_cast<int64_t>(rows.size());
  std::vector<float> whole(50 * 70), whole_second(50 * 5);
  linear(x.data(), 50, 130, first.view, nullptr, whole.data(), 70);
  linear(x.data(), 50, 130, second.view, nullptr, whole_second.data(), 5);
  std::vector<float> y(static_cast<size_t>(m * 70)), z(50 * 5);
  std::vector<LinearJob> jobs(4);
  jobs[0].w = first.view;  // m = 0
  jobs[1] = {x.data(), 130, rows.data(), m, first.view, nullptr, y.data(), 70};
  jobs[2].w = {nullptr, WeightType::fp32, 0, 130, 130};  // no outputs
  jobs[2].m = 4;
  jobs[2].x = x.data();
  jobs[2].x_stride = 130;
  jobs[3] = {x.data(), 130, nullptr, 50, second.view, nullptr, z.data(), 5};
  linear(jobs);
  for (int64_t i = 0; i < m; ++i) {
    const std::string text =
        different(y.data() + i * 70, whole.data() + rows[static_cast<size_t>(i)] * 70, 70);
    CHECK_MESSAGE(text.empty(), "gathered row ", i, ": ", text);
  }
  CHECK_MESSAGE(different(z, whole_second).empty(), different(z, whole_second));
  linear(std::span<const LinearJob>{});
}

TEST_CASE("linear: no columns gives the bias, NaN and inf stay in their row") {
  const std::vector<float> bias = {1.5F, -2.0F};
  std::vector<float> y(6, 9.0F);
  linear(nullptr, 3, 0, {nullptr, WeightType::fp32, 2, 0, 0}, bias.data(), y.data(), 2);
  CHECK(y == std::vector<float>{1.5F, -2.0F, 1.5F, -2.0F, 1.5F, -2.0F});

  const Weights w(WeightType::bf16, 40, 90, 0, 16);
  std::vector<float> x = random_floats(20 * 90, 17);
  std::vector<float> clean(20 * 40), dirty(20 * 40);
  linear(x.data(), 20, 90, w.view, nullptr, clean.data(), 40);
  x[5 * 90 + 33] = std::numeric_limits<float>::quiet_NaN();
  x[7 * 90 + 1] = std::numeric_limits<float>::infinity();
  linear(x.data(), 20, 90, w.view, nullptr, dirty.data(), 40);
  for (int64_t i = 0; i < 20; ++i) {
    if (i == 5 || i == 7) {
      for (int64_t r = 0; r < 40; ++r)
        CHECK_FALSE(std::isfinite(dirty[static_cast<size_t>(i * 40 + r)]));
    } else {
      CHECK(different(dirty.data() + i * 40, clean.data() + i * 40, 40).empty());
    }
  }
}

TEST_CASE("linear: impossible shapes are refused") {
  std::vector<float> x(20), y(20);
  const WeightView w{x.data(), WeightType::fp32, 3, 4, 4};
  CHECK_THROWS_AS(linear(x.data(), 2, 3, w, nullptr, y.data(), 3), std::invalid_argument);
  CHECK_THROWS_AS(linear(x.data(), 2, 4, w, nullptr, y.data(), 2), std::invalid_argument);
  CHECK_THROWS_AS(linear(x.data(), -1, 4, w, nullptr, y.data(), 3), std::invalid_argument);
  CHECK_THROWS_AS(
      linear(x.data(), 1, 4, {x.data(), WeightType::fp32, 3, 4, 2}, nullptr, y.data(), 3),
      std::invalid_argument);
  CHECK_THROWS_AS(row_slice(w, 2, 2), std::invalid_argument);
  CHECK_THROWS_AS(widen(w, 3, y.data()), std::invalid_argument);
  const WeightView slice = row_slice(w, 1, 2);
  CHECK(slice.rows == 2);
  CHECK(slice.data == x.data() + 4);
}

TEST_CASE("experts: grouping and combining against one token at a time") {
  constexpr int64_t kTokens = 37;
  constexpr int kExperts = 6, kChoices = 3;
  constexpr int64_t kIn = 20, kOut = 35;
  std::vector<int32_t> chosen;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int j = 0; j < kChoices; ++j)
      chosen.push_back(static_cast<int32_t>((t * 5 + (kChoices - j) * (t % 2 + 1)) %
                                            5));  // expert 5 stays empty
  }
  const std::vector<float> weights = random_floats(kTokens * kChoices, 18);
  const std::vector<float> x = random_floats(kTokens * kIn, 19);
  const Weights w(WeightType::bf16, kExperts * kOut, kIn, 0, 20);
  const ExpertGroups groups =
      group_by_expert(chosen.data(), weights.data(), kTokens, kChoices, kExperts);
  CHECK(groups.offsets.front() == 0);
  CHECK(groups.offsets.back() == kTokens * kChoices);
  CHECK(groups.offsets[5] == groups.offsets[6]);
  std::vector<float> slots(static_cast<size_t>(kTokens * kChoices * kOut));
  std::vector<LinearJob> jobs;
  for (int e = 0; e < kExperts; ++e) {
    const int32_t first = groups.offsets[static_cast<size_t>(e)];
    jobs.push_back({x.data(), kIn, groups.rows.data() + first,
                    groups.offsets[static_cast<size_t>(e) + 1] - first,
                    row_slice(w.view, e * kOut, kOut), nullptr, slots.data() + first * kOut, kOut});
  }
  linear(jobs);
  for (const WeightType activation : {WeightType::fp32, WeightType::bf16}) {
    for (const bool add : {false, true}) {
      std::vector<float> y = random_floats(kTokens * (kOut + 1), 21);
      std::vector<float> want = y;
      combine_experts(groups, slots.data(), kOut, y.data(), kOut + 1, kTokens, activation, add);
      for (int64_t t = 0; t < kTokens; ++t) {
        std::vector<std::pair<int32_t, float>> order;
        for (int j = 0; j < kChoices; ++j)
          order.emplace_back(chosen[static_cast<size_t>(t * kChoices + j)],
                             weights[static_cast<size_t>(t * kChoices + j)]);
        std::sort(order.begin(), order.end());
        std::vector<float> out(kOut);
        float* to = want.data() + t * (kOut + 1);
        if (!add) std::fill_n(to, kOut, 0.0F);
        for (const auto& [expert, weight] : order) {
          linear(x.data() + t * kIn, 1, kIn, row_slice(w.view, expert * kOut, kOut), nullptr,
                 out.data(), kOut);
          for (int64_t c = 0; c < kOut; ++c) {
            const float value = out[static_cast<size_t>(c)];
            if (activation == WeightType::fp32) {
              to[c] = has_fma() ? std::fma(value, weight, to[c]) : to[c] + value * weight;
            } else {
              to[c] =
                  bf16_to_fp32(fp32_to_bf16(to[c] + bf16_to_fp32(fp32_to_bf16(value * weight))));
            }
          }
        }
      }
      CHECK_MESSAGE(different(y, want).empty(), different(y, want));
    }
  }
  chosen[4] = kExperts;
  CHECK_THROWS_AS(group_by_expert(chosen.data(), weights.data(), kTokens, kChoices, kExperts),
                  std::invalid_argument);
  CHECK_THROWS_AS(combine_experts(groups, slots.data(), kOut, slots.data(), kOut, kTokens + 1),
                  std::invalid_argument);
}

/// Value of a code from its fields, in FP64: fraction_bits 7 and exponent bias 127 (BF16), or 10
/// and 15 (FP16).
double decode(uint16_t code, int fraction_bits, int bias) {
  const int exponent_mask = (1 << (15 - fraction_bits)) - 1;
  const int exponent = (code >> fraction_bits) & exponent_mask;
  const int fraction = code & ((1 << fraction_bits) - 1);
  const double sign = (code & 0x8000) != 0 ? -1 : 1;
  if (exponent == exponent_mask) return fraction != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(1.0 + std::ldexp(fraction, -fraction_bits), exponent - bias);
}

TEST_CASE("conversions: every code, every midpoint and its neighbours, at every level") {
  const auto wideners = REPLAYEVAL_LEVELS(widen_block);
  const auto narrowers = REPLAYEVAL_LEVELS(narrow_block);
  for (size_t level = 0; level < wideners.size(); ++level) {
    for (const WeightType type : {WeightType::bf16, WeightType::fp16}) {
      const int fraction_bits = type == WeightType::bf16 ? 7 : 10;
      const int bias = type == WeightType::bf16 ? 127 : 15;
      std::vector<uint16_t> codes(65536);
      for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
      std::vector<float> values(65536);
      wideners[level].second(codes.data(), type, 65536, values.data());
      std::vector<uint16_t> back(65536);
      narrowers[level].second(values.data(), 65536, type, back.data());
      int wrong = 0;
      for (size_t i = 0; i < codes.size(); ++i) {
        const double want = decode(codes[i], fraction_bits, bias);
        if (std::isnan(want)) {
          wrong += !std::isnan(values[i]) || !std::isnan(decode(back[i], fraction_bits, bias));
        } else {
          wrong += static_cast<double>(values[i]) != want || back[i] != codes[i];
        }
      }
      CHECK_MESSAGE(wrong == 0, wideners[level].first, " type ", static_cast<int>(type));

      // Between neighbouring codes i and i + 1 (the one after the largest finite value counts as
      // its successor, then becomes inf).
      std::vector<float> inputs;
      std::vector<uint16_t> wanted;
      const int infinity = ((1 << (15 - fraction_bits)) - 1) << fraction_bits;
      for (int i = 0; i < infinity; ++i) {
        const double low = decode(static_cast<uint16_t>(i), fraction_bits, bias);
        const double high = i + 1 < infinity
                                ? decode(static_cast<uint16_t>(i + 1), fraction_bits, bias)
                                : 2 * decode(static_cast<uint16_t>(i), fraction_bits, bias) -
                                      decode(static_cast<uint16_t>(i - 1), fraction_bits, bias);
        const double middle = (low + high) / 2;
        const auto tie = static_cast<float>(middle);
        if (static_cast<double>(tie) != middle)
          continue;  // BF16 below FP32's smallest steps: never, kept for safety
        const auto even = static_cast<uint16_t>(i % 2 == 0 ? i : i + 1);
        for (const uint16_t sign : {0x0000, 0x8000}) {
          const float s = sign != 0 ? -1.0F : 1.0F;
          inputs.insert(inputs.end(), {s * tie, s * std::nextafter(tie, 0.0F),
                                       s * std::nextafter(tie, INFINITY)});
          wanted.insert(wanted.end(),
                        {static_cast<uint16_t>(even | sign), static_cast<uint16_t>(i | sign),
                         static_cast<uint16_t>((i + 1) | sign)});
        }
      }
      std::vector<uint16_t> got(inputs.size());
      narrowers[level].second(inputs.data(), static_cast<int64_t>(inputs.size()), type, got.data());
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (got[i] != wanted[i]) {
          FAIL(narrowers[level].first, ": ", inputs[i], " (0x", std::hex, bits_of(inputs[i]),
               ") gave 0x", got[i], ", expected 0x", wanted[i]);
        }
      }
      const float specials[] = {
          INFINITY, -INFINITY, 3e38F * 1.1F, float_of(0x7f800001), float_of(0xffffffff),
          0.0F,     -0.0F,     float_of(1)};
      uint16_t special_codes[8];
      narrowers[level].second(specials, 8, type, special_codes);
      CHECK(special_codes[0] == infinity);
      CHECK(special_codes[1] == (infinity | 0x8000));
      CHECK(std::isnan(decode(special_codes[3], fraction_bits, bias)));
      CHECK(std::isnan(decode(special_codes[4], fraction_bits, bias)));
      CHECK(special_codes[5] == 0);
      CHECK(special_codes[6] == 0x8000);
      CHECK(special_codes[7] == 0);
    }
  }
  CHECK(bf16_to_fp32(0x3fc0) == 1.5F);
  CHECK(fp32_to_bf16(float_of(0x3f808000)) == 0x3f80);
  CHECK(fp32_to_bf16(float_of(0x3f818000)) == 0x3f82);
  CHECK(fp16_to_fp32(0x3e00) == 1.5F);
  CHECK(fp32_to_fp16(65520.0F) == 0x7c00);
}

}  // namespace
}  // namespace replayeval
