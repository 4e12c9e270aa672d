// KL, log-likelihood and agreement: cases computed by hand, equal rows, far tails, non-finite
// logits, and long double.
#include "kernels/kl.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kl_simd.h"
#include "tests/kernels/compare.h"

namespace replayeval {
namespace {

using namespace test;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

LogitSummary summary_of(const std::vector<float>& logits) {
  LogitSummary summary;
  summarize_logits(logits.data(), 0, 1, static_cast<int64_t>(logits.size()), &summary);
  return summary;
}

double kl_of(const std::vector<float>& reference, const std::vector<float>& candidate) {
  const LogitSummary r = summary_of(reference), c = summary_of(candidate);
  double kl = -1;
  kl_divergence(reference.data(), 0, &r, candidate.data(), 0, &c, 1,
                static_cast<int64_t>(reference.size()), &kl);
  return kl;
}

// The bound of the header on each term, the FP64 sum of n terms, and the squared errors of both
// log-sum-exp: |kl - exact| <= 2^-21 sum T (8 + |ln p| + |ln q|) + n 2^-53 kl + 4 delta^2, delta =
// (n / 16 + 16) 2^-53 + 2^-52 |lse|. p or q below 2^-126 counts as 0: at most n 2^-126 (1 + largest
// |d|) more.
struct Bounded {
  double kl, bound;
};
Bounded exact_kl(const std::vector<float>& reference, const std::vector<float>& candidate) {
  const auto lse = [](const std::vector<float>& x) {
    const long double maximum = *std::max_element(x.begin(), x.end());
    long double total = 0;
    for (const float v : x) total += std::exp(v - maximum);
    return maximum + std::log(total);
  };
  const long double r = lse(reference), c = lse(candidate);
  long double kl = 0, weighted = 0, largest = 0;
  for (size_t v = 0; v < reference.size(); ++v) {
    const long double log_p = reference[v] - r, log_q = candidate[v] - c;
    const long double d = (static_cast<long double>(reference[v]) - candidate[v]) - (r - c);
    const long double term = std::exp(log_p) * (std::expm1(-d) + d);
    kl += term;
    weighted += term * (8 + std::abs(log_p) + std::abs(log_q));
    largest = std::max(largest, std::abs(d));
  }
  const auto n = static_cast<long double>(reference.size());
  const long double delta =
      (n / 16 + 16) * 0x1p-53L + 0x1p-52L * std::max(std::abs(r), std::abs(c));
  const long double bound =
      0x1p-21L * weighted + n * 0x1p-53L * kl + 4 * delta * delta + n * 0x1p-126L * (1 + largest);
  return {static_cast<double>(kl), static_cast<double>(bound)};
}

void check_near(const std::vector<float>& reference, const std::vector<float>& candidate,
                const char* what) {
  const Bounded want = exact_kl(reference, candidate);
  const LogitSummary r = summary_of(reference), c = summary_of(candidate);
  const auto n = static_cast<int64_t>(reference.size());
  for (const auto& [name, function] : REPLAYEVAL_LEVELS(kl_row)) {
    const double kl = function(reference.data(), r.log_sum_exp, candidate.data(), c.log_sum_exp, n);
    CHECK_MESSAGE(std::abs(kl - want.kl) <= want.bound, what, " ", name, ": got ", kl,
                  ", expected ", want.kl, ", error ", kl - want.kl, ", bound ", want.bound);
    CHECK(kl >= 0);
  }
  CHECK(kl_reference(reference.data(), candidate.data(), n) ==
        doctest::Approx(want.kl).epsilon(1e-12));
}

TEST_CASE("kl: two classes by hand") {
  // p = (1/2, 1/2), q = (3/4, 1/4): ln(2/3) / 2 + ln 2 / 2 = ln(4/3) / 2.
  const std::vector<float> even = {0, 0}, odds = {std::log(3.0F), 0};
  CHECK(kl_of(even, odds) == doctest::Approx(0.5 * std::log(4.0 / 3.0)).epsilon(1e-6));
  // Back: 3/4 ln(3/2) + 1/4 ln(1/2).
  CHECK(kl_of(odds, even) ==
        doctest::Approx(0.75 * std::log(1.5) + 0.25 * std::log(0.5)).epsilon(1e-6));
  // A certain reference: p = (1, 0) exactly by -inf; KL = -ln q_0 = ln(4/3).
  CHECK(kl_of({0, -kInf}, odds) == doctest::Approx(std::log(4.0 / 3.0)).epsilon(1e-6));
  // Four equal classes against 1/2, 1/4, 1/8, 1/8: mean of ln(1/4) - ln q = ln 2 (-1 + 0 + 1 + 1)
  // / 4.
  const float ln2 = std::log(2.0F);
  CHECK(kl_of({5, 5, 5, 5}, {3 * ln2, 2 * ln2, ln2, ln2}) ==
        doctest::Approx(0.25 * std::log(2.0)).epsilon(1e-6));
}

TEST_CASE("kl: exactly 0 for equal rows, unchanged by a constant, never negative") {
  for (const int64_t vocab : {1, 2, 15, 16, 17, 4096, 50001}) {
    const std::vector<float> x = random_floats(vocab, 201, 6);
    CHECK(kl_of(x, x) == 0.0);
    std::vector<float> shifted = x;
    for (float& v : shifted) v = std::round(v * 1024) / 1024;  // so that adding 8 is exact
    std::vector<float> other = shifted;
    for (float& v : other) v += 8;
    CHECK(kl_of(shifted, other) <= 1e-20 * static_cast<double>(vocab));
    CHECK(kl_of(shifted, other) >= 0);
  }
}

TEST_CASE("kl: random rows against long double, from 1e-13 to several nats") {
  for (const int64_t vocab : {1, 3, 17, 1000, 4096, 50001, 248320}) {
    for (const float size : {3e-7F, 1e-5F, 1e-3F, 0.1F, 1.0F, 4.0F}) {
      if (vocab > 100000 && size != 3e-7F && size != 1.0F) continue;
      const std::vector<float> reference = random_floats(vocab, 211, 3);
      std::vector<float> candidate = reference;
      const std::vector<float> noise = random_floats(vocab, 212, size);
      for (size_t v = 0; v < candidate.size(); ++v) candidate[v] += noise[v];
      check_near(reference, candidate, "random");
    }
  }
  // A difference of 1e-13 nats at each vocabulary is seen as such: one logit of a flat row moved by
  // e, KL = e^2 (1/n - 1/n^2) / 2.
  for (const int64_t vocab : {4096, 248320}) {
    std::vector<float> reference(static_cast<size_t>(vocab), 2.0F);
    std::vector<float> candidate = reference;
    const double n = static_cast<double>(vocab);
    candidate[77] += static_cast<float>(std::sqrt(2e-13 * n));
    const double e = static_cast<double>(candidate[77]) - 2.0;
    const double want = e * e * (1 / n - 1 / (n * n)) / 2;
    CHECK(want > 0.5e-13);
    CHECK(kl_of(reference, candidate) ==
          doctest::Approx(want).epsilon(e));  // the next order is a factor 1 + e / 3
    check_near(reference, candidate, "one logit");
  }
}

TEST_CASE("kl: tails of 40 nats and more, on either side") {
  for (const float depth : {40.0F, 80.0F, 95.0F, 200.0F, 1e4F}) {
    std::vector<float> reference = random_floats(300, 221), candidate = reference;
    for (size_t v = 0; v < 300; v += 3) reference[v] -= depth;
    check_near(reference, candidate, "reference tail");
    check_near(candidate, reference, "candidate tail");
    for (size_t v = 1; v < 300; v += 3) candidate[v] -= depth;
    check_near(reference, candidate, "both tails");
    CHECK(std::isfinite(kl_of(reference, candidate)));
    CHECK(std::isfinite(kl_of(candidate, reference)));
  }
  // p = 1 against q = e^-40: 40 nats (and the tiny rest).
  CHECK(kl_of({0, -200}, {-40, 0}) == doctest::Approx(40.0).epsilon(1e-6));
}

TEST_CASE("summaries: against long double, ties, at every instruction-set level") {
  for (const int64_t vocab : {1, 16, 31, 4096, 100003}) {
    std::vector<float> x = random_floats(vocab, 231, 8);
    if (vocab > 30) {
      const float top = *std::max_element(x.begin(), x.end()) + 1;
      x[21] = top;
      x[4] = top;
      x[20] = top;  // same lane as 4
    }
    const LogitSummary want = summarize_reference(x.data(), vocab);
    for (const auto& [name, function] : REPLAYEVAL_LEVELS(summarize_row)) {
      LogitSummary got;
      function(x.data(), vocab, &got);
      CHECK_MESSAGE(got.argmax == want.argmax, name, " vocab ", vocab);
      CHECK(got.max == want.max);
      CHECK(got.nan_count == 0);
      CHECK(got.inf_count == 0);
      const double lse = got.max + std::log(got.log_sum_exp);
      const double bound =
          (static_cast<double>(vocab) / 16 + 16) * 0x1p-53 + 0x1p-52 * std::abs(want.log_sum_exp);
      CHECK_MESSAGE(std::abs(lse - want.log_sum_exp) <= bound, name, ": got ", lse, ", expected ",
                    want.log_sum_exp, ", bound ", bound);
    }
    const LogitSummary got = summary_of(x);
    CHECK(negative_log_likelihood(x.data(), got, 0) ==
          doctest::Approx(want.log_sum_exp - x[0]).epsilon(1e-12));
    if (vocab > 30) CHECK(got.argmax == 4);
  }
  CHECK(negative_log_likelihood(std::vector<float>{0, 0, 0, 0}.data(), summary_of({0, 0, 0, 0}),
                                2) == doctest::Approx(std::log(4.0)));
}

TEST_CASE("non-finite logits: counted, KL and likelihood are NaN, agreement has no value") {
  const std::vector<float> good = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18};
  std::vector<float> with_nan = good;
  with_nan[3] = kNan;
  with_nan[17] = -kNan;
  with_nan[5] = kInf;
  const LogitSummary bad = summary_of(with_nan);
  CHECK_FALSE(bad.valid());
  CHECK(bad.nan_count == 2);
  CHECK(bad.inf_count == 1);
  CHECK(std::isnan(bad.max));
  CHECK(std::isnan(kl_of(good, with_nan)));
  CHECK(std::isnan(kl_of(with_nan, good)));
  CHECK(std::isnan(kl_of(with_nan, with_nan)));
  CHECK(std::isnan(negative_log_likelihood(with_nan.data(), bad, 0)));
  CHECK(std::isnan(negative_log_likelihood(good.data(), summary_of(good), -1)));
  CHECK(top1_agreement(bad, summary_of(good)) == 255);
  CHECK(top1_agreement(summary_of(good), summary_of(good)) == 1);
  CHECK(top1_agreement(summary_of(good), summary_of({19, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                                     15, 16, 17, 18})) == 0);

  std::vector<float> with_inf = good;
  with_inf[0] = kInf;
  CHECK_FALSE(summary_of(with_inf).valid());
  CHECK(summary_of(with_inf).inf_count == 1);
  CHECK(std::isnan(kl_of(good, with_inf)));
  const std::vector<float> none(18, -kInf);
  CHECK_FALSE(summary_of(none).valid());
  CHECK(summary_of(none).inf_count == 18);
  CHECK(std::isnan(kl_of(none, good)));

  // -inf beside finite logits is a probability of zero.
  std::vector<float> masked = good;
  masked[2] = -kInf;
  CHECK(summary_of(masked).valid());
  CHECK(summary_of(masked).inf_count == 1);
  CHECK(kl_of(good, masked) == std::numeric_limits<double>::infinity());
  CHECK(kl_reference(good.data(), masked.data(), 18) == std::numeric_limits<double>::infinity());
  CHECK(kl_of(masked, masked) == 0.0);
  CHECK(kl_of(masked, good) ==
        doctest::Approx(kl_reference(masked.data(), good.data(), 18)).epsilon(1e-6));
  for (const std::vector<float>& x : {good, with_nan, with_inf, none, masked}) {
    const LogitSummary fast = summary_of(x), slow = summarize_reference(x.data(), 18);
    CHECK(fast.argmax == slow.argmax);
    CHECK(fast.nan_count == slow.nan_count);
    CHECK(fast.inf_count == slow.inf_count);
  }
}

TEST_CASE("rows: strides and threads change nothing") {
  constexpr int64_t kRows = 9, kVocab = 5003, kStride = 5010;
  const std::vector<float> reference = random_floats(kRows * kStride, 241, 3);
  std::vector<float> candidate = reference;
  for (size_t i = 0; i < candidate.size(); i += 2) candidate[i] += 0.25F;
  const int before = omp_get_max_threads();
  std::vector<double> first;
  for (const int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    std::vector<LogitSummary> r(kRows), c(kRows);
    std::vector<double> kl(kRows);
    summarize_logits(reference.data(), kStride, kRows, kVocab, r.data());
    summarize_logits(candidate.data(), kStride, kRows, kVocab, c.data());
    kl_divergence(reference.data(), kStride, r.data(), candidate.data(), kStride, c.data(), kRows,
                  kVocab, kl.data());
    for (int64_t i = 0; i < kRows; ++i) {
      const auto at = reference.begin() + i * kStride;
      const auto other = candidate.begin() + i * kStride;
      CHECK(kl[static_cast<size_t>(i)] == kl_of({at, at + kVocab}, {other, other + kVocab}));
    }
    if (first.empty()) first = kl;
    CHECK(kl == first);
  }
  omp_set_num_threads(before);
}

}  // namespace
}  // namespace replayeval
