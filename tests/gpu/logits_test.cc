// Convolution and metrics on the device.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/causal_conv_cuda.h"
#include "kernels/kl.h"
#include "kernels/kl_cuda.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

TEST_CASE("gpu: the causal convolution has the host's bits") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(71);
  for (int channels : {1, 100, 384}) {
    for (int taps : {1, 3, 4, 5}) {
      for (bool silu : {false, true}) {
        INFO("channels " << channels << ", taps " << taps);
        std::vector<float> weight(static_cast<size_t>(channels) * taps), bias(channels);
        std::generate(weight.begin(), weight.end(), [&] { return bf16_normal(&random); });
        std::generate(bias.begin(), bias.end(), [&] { return bf16_normal(&random); });
        const int tokens[] = {70, 0, 1, 33};
        const int64_t stride = channels + 3;
        std::vector<float> x(static_cast<size_t>(stride) * 4 * 80), y(x.size(), -7.0f);
        std::generate(x.begin(), x.end(), [&] { return bf16_normal(&random, 3.0f); });
        x[static_cast<size_t>(stride) * 40] = -INFINITY;
        const DeviceArray<float> device_x(x), device_weight(weight), device_bias(bias);
        DeviceArray<float> device_y(y);
        CausalConv conv{channels, taps, weight.data(), bias.data(), silu};
        CausalConv device_conv{channels, taps, device_weight.data(), device_bias.data(), silu};
        if (taps == 3) conv.bias = device_conv.bias = nullptr;
        std::vector<CausalConvRow> rows, device_rows;
        for (int r = 0; r < 4; ++r) {
          const int64_t at = (int64_t{r} * 80 + 8) * stride;
          rows.push_back({tokens[r], x.data() + at, stride, y.data() + at, stride});
          device_rows.push_back(
              {tokens[r], device_x.data() + at, stride, device_y.data() + at, stride});
        }
        causal_conv(conv, rows, KernelForm::fast);
        causal_conv_cuda(device_conv, device_rows);
        CHECK(different_floats(device_y.get(), y) == "");
      }
    }
  }
}

namespace {

/// A and B of kl_cuda.h in long double, and Bs = sum p |e^-d - 1|.
struct Terms {
  double a = 0, b = 0, b_size = 0, spread = 0;
};
Terms terms_of(const float* r, const float* c, int64_t vocab) {
  const LogitSummary s = summarize_reference(r, vocab);
  Terms t;
  for (int64_t v = 0; v < vocab; ++v) {
    const long double p = std::exp(static_cast<long double>(r[v]) - s.log_sum_exp);
    const long double d = static_cast<long double>(r[v]) - c[v];
    t.a += static_cast<double>(p * (std::expm1(-d) + d));
    t.b += static_cast<double>(p * std::expm1(-d));
    t.b_size += static_cast<double>(p * std::abs(std::expm1(-d)));
    t.spread = std::max(t.spread, static_cast<double>(s.max) - r[v]);
  }
  return t;
}

}  // namespace

TEST_CASE(
    "gpu: kl, nll and top-1 agree with long double within the bound of their terms, in any "
    "slices") {
  if (!gpu()) return;
  std::mt19937 random(72);
  std::normal_distribution<float> normal;
  constexpr int64_t kPositions = 6;
  for (int64_t vocab : {int64_t{1}, int64_t{7}, int64_t{1000}, int64_t{50257}}) {
    for (float distance : {0.0f, 1e-4f, 0.03f, 0.5f, 5.0f}) {
      constexpr int kCandidates = 2;
      std::vector<float> r(static_cast<size_t>(kPositions * vocab)), c(r.size() * kCandidates);
      std::vector<int32_t> targets;
      for (float& x : r) x = 4.0f * normal(random);
      for (size_t i = 0; i < c.size(); ++i)
        c[i] = r[i % r.size()] + distance * normal(random) + distance;
      for (int64_t p = 0; p < kPositions; ++p)
        targets.push_back(static_cast<int32_t>(random() % vocab));
      targets[1] = -1;
      const DeviceArray<float> device_r(r), device_c(c);
      const DeviceArray<int32_t> device_targets(targets);
      for (int64_t slice : {vocab, std::max<int64_t>(1, vocab / 3)}) {
        const int64_t count = kPositions * kCandidates;
        DeviceArray<KlSums> sums(static_cast<size_t>(count));
        DeviceArray<double> kl(static_cast<size_t>(count)), nll_r(static_cast<size_t>(count)),
            nll_c(static_cast<size_t>(count));
        DeviceArray<uint8_t> top1(static_cast<size_t>(count));
        kl_begin_cuda(sums.data(), count);
        for (int64_t first = 0; first < vocab; first += slice) {
          KlSlice s;
          s.positions = kPositions;
          s.candidates = kCandidates;
          s.first_token = first;
          s.tokens = std::min(slice, vocab - first);
          s.reference = device_r.data() + first;
          s.candidate = device_c.data() + first;
          s.reference_stride = s.candidate_stride = vocab;
          s.candidate_stride_rows = kPositions;
          s.targets = device_targets.data();
          kl_add_cuda(s, sums.data());
        }
        kl_finish_cuda(sums.data(), count, kl.data(), nll_r.data(), nll_c.data(), top1.data());
        const auto got = kl.get(), got_r = nll_r.get(), got_c = nll_c.get();
        const auto got_top1 = top1.get();
        for (int64_t i = 0; i < count; ++i) {
          const int64_t p = i % kPositions;
          const float *row = r.data() + p * vocab, *other = c.data() + i * vocab;
          INFO("vocab " << vocab << ", distance " << distance << ", position " << p);
          const double want = kl_reference(row, other, vocab);
          // Every term has a relative error below (m - r + 24) 2^-24: rounding of r - m, two ulp of
          // the exponential, of d, of h by 8 fused steps, of the sum of four. z likewise. B enters
          // ln(1 + B) - B with the factor B / (1 + B).
          const Terms t = terms_of(row, other, vocab);
          const double unit = (t.spread + 24) * 0x1p-24, slope = std::abs(t.b / (1 + t.b));
          const double bound =
              2 * unit * (t.a + slope * (t.b_size + std::abs(t.b)) + t.b * t.b) + 1e-15;
          CHECK(got[i] >= 0);
          CHECK_MESSAGE(std::abs(got[i] - want) <= bound,
                        "kl " << got[i] << ", expected " << want << ", bound " << bound);
          if (distance == 0.0f) CHECK(got[i] == 0.0);
          const LogitSummary rs = summarize_reference(row, vocab),
                             cs = summarize_reference(other, vocab);
          CHECK(got_top1[i] == top1_agreement(rs, cs));
          if (targets[p] < 0) {
            CHECK(std::isnan(got_r[i]));
            CHECK(std::isnan(got_c[i]));
            continue;
          }
          const double nll_bound = unit * 2 + 1e-12 + unit * t.b_size * 2;
          CHECK(std::abs(got_r[i] - negative_log_likelihood(row, rs, targets[p])) <= nll_bound);
          CHECK(std::abs(got_c[i] - negative_log_likelihood(other, cs, targets[p])) <= nll_bound);
        }
      }
    }
  }
}

TEST_CASE("gpu: metrics of rows with NaN, infinities and impossible tokens") {
  if (!gpu()) return;
  constexpr int64_t kVocab = 4099;
  const float none = -std::numeric_limits<float>::infinity();
  std::mt19937 random(73);
  std::normal_distribution<float> normal;
  std::vector<float> base(kVocab);
  for (float& x : base) x = normal(random);
  const auto run = [&](std::vector<float> r, std::vector<float> c) {
    const DeviceArray<float> device_r(r), device_c(c);
    DeviceArray<KlSums> sums(1);
    DeviceArray<double> kl(1);
    DeviceArray<uint8_t> top1(1);
    KlSlice s;
    s.positions = 1;
    s.tokens = kVocab;
    s.reference = device_r.data();
    s.candidate = device_c.data();
    s.reference_stride = s.candidate_stride = kVocab;
    s.candidate_stride_rows = 1;
    kl_begin_cuda(sums.data(), 1);
    kl_add_cuda(s, sums.data());
    kl_finish_cuda(sums.data(), 1, kl.data(), nullptr, nullptr, top1.data());
    return std::pair(kl.get()[0], static_cast<int>(top1.get()[0]));
  };
  CHECK(run(base, base) == std::pair(0.0, 1));
  std::vector<float> changed = base;
  changed[77] = NAN;
  CHECK(std::isnan(run(base, changed).first));
  CHECK(std::isnan(run(changed, base).first));
  CHECK(run(changed, base).second == 255);
  changed[77] = INFINITY;
  CHECK(std::isnan(run(base, changed).first));
  changed[77] = none;
  CHECK(run(base, changed).first == INFINITY);
  // The reference excludes 2,000 tokens, the first of all among them.
  std::vector<float> masked = base;
  std::fill(masked.begin(), masked.begin() + 2000, none);
  const double want = kl_reference(masked.data(), base.data(), kVocab);
  CHECK(std::abs(run(masked, base).first - want) <= 1e-5 * want);
  CHECK(run(masked, masked) == std::pair(0.0, 1));
  std::fill(masked.begin(), masked.end(), none);
  CHECK(std::isnan(run(masked, base).first));
  // A far candidate: the direct difference of the log-sum-exps.
  std::vector<float> far = base;
  for (float& x : far) x = 20.0f * normal(random) - 300.0f;
  const double far_want = kl_reference(base.data(), far.data(), kVocab);
  CHECK(std::abs(run(base, far).first - far_want) <= 1e-5 * far_want);
  // Equal maxima: the lowest id counts.
  std::vector<float> tie = base;
  tie[4000] = tie[100] = 50.0f;
  changed = base;
  changed[100] = 50.0f;
  CHECK(run(tie, changed).second == 1);
  changed[50] = 51.0f;
  CHECK(run(tie, changed).second == 0);
}
