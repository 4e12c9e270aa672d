// Parts of attention merged by log-sum-exp, against attention over all keys in FP64.
#include <doctest/doctest.h>

#include <cmath>
#include <random>

#include "kernels/attention_merge_cuda.h"
#include "kernels/dense.h"
#include "tests/gpu/gpu.h"

using namespace replayeval;
using namespace replayeval::test;

TEST_CASE("gpu: merged parts of the keys are attention over all of them") {
  if (!gpu()) return;
  constexpr int64_t kTokens = 5, kParts = 3, kKeys = 40;
  constexpr int kHeads = 3, kDim = 12;
  constexpr int64_t kStride = kHeads * kDim + 7;
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  // Part p: scores [heads, tokens, keys] and values [heads, keys, dim]; its own output and sum.
  std::vector<double> numerator(kTokens * kHeads * kDim), denominator(kTokens * kHeads);
  std::vector<DeviceArray<uint16_t>> outs;
  std::vector<DeviceArray<float>> sums;
  std::vector<AttentionPart> parts;
  for (int p = 0; p < kParts; ++p) {
    std::vector<float> out(kTokens * kHeads * kDim), lse(kHeads * kTokens);
    for (int h = 0; h < kHeads; ++h) {
      std::vector<double> values(kKeys * kDim);
      for (double& v : values) v = normal(random);
      for (int64_t t = 0; t < kTokens; ++t) {
        double sum = 0;
        std::vector<double> y(kDim);
        for (int64_t s = 0; s < kKeys; ++s) {
          const double e = std::exp(3 * normal(random) + 20 * p);  // parts of very different weight
          sum += e;
          for (int d = 0; d < kDim; ++d)
            y[static_cast<size_t>(d)] += e * values[static_cast<size_t>(s * kDim + d)];
        }
        const auto at = static_cast<size_t>(t * kHeads + h);
        denominator[at] += sum;
        lse[static_cast<size_t>(h * kTokens + t)] = static_cast<float>(std::log(sum));
        for (int d = 0; d < kDim; ++d) {
          numerator[at * kDim + static_cast<size_t>(d)] += y[static_cast<size_t>(d)];
          out[at * kDim + static_cast<size_t>(d)] =
              static_cast<float>(y[static_cast<size_t>(d)] / sum);
        }
      }
    }
    std::vector<uint16_t> narrow_out(out.size());
    narrow(out.data(), static_cast<int64_t>(out.size()), WeightType::bf16, narrow_out.data());
    outs.emplace_back(narrow_out);
    sums.emplace_back(lse);
    parts.push_back({outs.back().data(), kHeads * kDim, kDim, sums.back().data()});
  }
  const DeviceArray<float> y(std::vector<float>(kTokens * kStride, -7.0f));
  merge_attention_cuda(parts, kTokens, kHeads, kDim, y.data(), kStride);
  const std::vector<float> merged = y.get();
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t c = 0; c < kStride; ++c) {
      const double got = merged[static_cast<size_t>(t * kStride + c)];
      if (c >= kHeads * kDim) {
        CHECK(got == -7.0);
        continue;
      }
      const auto at = static_cast<size_t>(t * kHeads * kDim + c);
      const double expected = numerator[at] / denominator[at / kDim];
      // BF16 rounding of a part's output (2^-9 of up to 4), FP32 sums and logarithms.
      CHECK(std::abs(got - expected) <= 4 * 0x1p-9 + 1e-4);
    }
  }
  CHECK_THROWS_AS(merge_attention_cuda({}, 1, 1, 4, y.data(), 4), std::invalid_argument);
}
