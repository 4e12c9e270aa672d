#include "reports/statistics.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/reports/sample_run.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// A report of documents with given figures; state 0 is the baseline.
struct MadeUp {
  Report report;

  explicit MadeUp(const std::vector<std::string>& names) {
    report.run.baseline = "fp32";
    report.layers = {{0, "mamba2", 1, {}}};
    for (const std::string& name : names) report.states.push_back({sample_state(name), {}});
  }
  /// `kl`, `nll` [state][position]; the baseline's KL is taken as given too.
  void document(const std::vector<std::vector<float>>& kl,
                const std::vector<std::vector<float>>& nll, int64_t extra_tokens = 0) {
    const auto length = static_cast<int64_t>(kl[0].size());
    report.documents.push_back(
        {"d" + std::to_string(report.documents.size()), "", length + extra_tokens, "", 0});
    for (size_t s = 0; s < kl.size(); ++s) {
      StateDocument d;
      d.length = length;
      d.kl = kl[s];
      d.nll = nll[s];
      for (float x : kl[s]) d.top1.push_back(std::isfinite(x) ? (x < 0.5f ? 1 : 0) : kNoTop1);
      d.health.resize(1);
      report.states[s].documents.push_back(std::move(d));
    }
  }
};

double standard_normal(std::mt19937_64& random) {
  // Box and Muller; one of the pair is enough here.
  const double u = (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53;
  const double v = static_cast<double>(random() >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
}

/// Figures log-normal about exp(level), log-autocorrelation `rho` between neighbours.
std::vector<float> correlated(std::mt19937_64& random, int64_t count, double level, double sigma,
                              double rho) {
  std::vector<float> out;
  double z = standard_normal(random);
  for (int64_t t = 0; t < count; ++t) {
    out.push_back(static_cast<float>(std::exp(level + sigma * z)));
    z = rho * z + std::sqrt(1 - rho * rho) * standard_normal(random);
  }
  return out;
}

}  // namespace

TEST_CASE("quantiles interpolate linearly at fraction * (n - 1)") {
  const std::vector<double> v = {1, 2, 4, 8};
  CHECK(quantile(std::span(v), 0) == 1);
  CHECK(quantile(std::span(v), 1) == 8);
  CHECK(quantile(std::span(v), 0.5) == 3);                     // between 2 and 4
  CHECK(quantile(std::span(v), 0.9) == doctest::Approx(6.8));  // at 2.7: 4 + 0.7 * 4
  CHECK(quantile(std::span(v).first(1), 0.3) == 1);
  CHECK(std::isnan(quantile(std::span(v).first(0), 0.3)));
}

TEST_CASE("position bins double and end at the longest document") {
  CHECK(position_bins(0).empty());
  auto bins = position_bins(1000);
  REQUIRE(bins.size() == 1);
  CHECK(bins[0].name == "1K");
  CHECK(bins[0].last == 1000);
  bins = position_bins(131072);
  REQUIRE(bins.size() == 8);
  CHECK(bins[1].first == 1024);
  CHECK(bins[2].name == "4K");
  CHECK(bins[2].first == 2048);
  CHECK(bins[7].name == "128K");
  CHECK(bins[7].first == 65536);
  CHECK(bins[7].last == 131072);
  CHECK(position_bins(131073).size() == 9);
}

TEST_CASE("exact McNemar") {
  // 2 * sum_{i <= min} C(n, i) / 2^n, by rational arithmetic in another program.
  CHECK(mcnemar_exact(0, 0) == 1);
  CHECK(mcnemar_exact(5, 0) == doctest::Approx(0.0625).epsilon(1e-13));
  CHECK(mcnemar_exact(1, 9) == doctest::Approx(0.021484375).epsilon(1e-13));
  CHECK(mcnemar_exact(9, 1) == doctest::Approx(0.021484375).epsilon(1e-13));
  CHECK(mcnemar_exact(30, 12) == doctest::Approx(0.007915897334896727).epsilon(1e-12));
  CHECK(mcnemar_exact(400, 350) == doctest::Approx(0.07350777405843545).epsilon(1e-12));
  CHECK(mcnemar_exact(7, 7) == 1);
}

TEST_CASE("Wilson intervals") {
  // (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.959964, by another program.
  CHECK(wilson(0, 10).low == 0);
  CHECK(wilson(0, 10).high == doctest::Approx(0.27753279986288915).epsilon(1e-12));
  CHECK(wilson(10, 10).low == doctest::Approx(0.7224672001371109).epsilon(1e-12));
  CHECK(wilson(10, 10).high == 1);
  CHECK(wilson(81, 263).low == doctest::Approx(0.2552885198782743).epsilon(1e-12));
  CHECK(wilson(81, 263).high == doctest::Approx(0.3662095769828001).epsilon(1e-12));
  CHECK_FALSE(wilson(0, 0).known());
}

TEST_CASE("Student's t") {
  // Closed forms: 1 degree is Cauchy, tan(pi (p - 1/2)); 2 degrees (2 p - 1) sqrt(2 / (4 p (1 -
  // p))).
  CHECK(student_quantile(0.975, 1) == doctest::Approx(std::tan(3.14159265358979 * 0.475)));
  CHECK(student_quantile(0.975, 2) == doctest::Approx(0.95 * std::sqrt(2 / (4 * 0.975 * 0.025))));
  CHECK(student_probability(0, 5) == doctest::Approx(0.5));
}

TEST_CASE("figures of hand-computed runs") {
  MadeUp made({"fp32", "fp32@L=1", "nvfp4", "int8"});
  // Two documents of 4 and 3 tokens; the last NLL of each does not exist.
  made.document(
      {{0, 0, 0, 0}, {1e-3f, 1e-3f, 1e-3f, 1e-3f}, {0.25f, 0.75f, kNaN, 0.5f}, {0, 0, 0, 0.002f}},
      {{1, 2, 3, kNaN}, {1, 2, 3, kNaN}, {2, 2, kNaN, kNaN}, {1, 2, 3, kNaN}});
  made.document({{0, 0, 0}, {1e-3f, 1e-3f, 1e-3f}, {0.125f, 0.125f, 1}, {0, 0, 0}},
                {{1, 1, kNaN}, {1, 1, kNaN}, {1, 4, kNaN}, {1, 1, kNaN}});
  const KlStatistics s = kl_statistics(made.report);
  CHECK(s.documents == 2);
  CHECK(s.between_documents);
  CHECK(s.floor_state == 1);
  REQUIRE(s.bins.size() == 1);
  CHECK(s.bins[0].last == 4);

  const KlFigures& f = s.states[2].all;
  CHECK(f.positions == 6);
  CHECK(f.non_finite == 1);
  CHECK(f.documents == 2);
  CHECK(f.reaching == 1);
  CHECK(f.kl.value == doctest::Approx(2.75 / 6));
  CHECK(f.kl_quantiles[kMedian].value == doctest::Approx(0.375));  // 1/8 1/8 1/4 1/2 3/4 1
  CHECK(f.kl_quantiles[kQuantile99].value == doctest::Approx(0.75 + 0.95 * 0.25));
  CHECK(f.kl_max == 1);
  CHECK(f.kl_max_document == 1);
  CHECK(f.kl_max_position == 2);
  CHECK(f.top1.value ==
        doctest::Approx(3.0 / 6));  // KL below 1/2 counts as agreement in this made-up run
  CHECK(f.nll.value == doctest::Approx(9.0 / 4));  // 2 2 1 4
  CHECK(f.perplexity.value == doctest::Approx(std::exp(2.25)));
  CHECK(f.perplexity_ratio.value == doctest::Approx(std::exp(1.0)));  // differences 1 0 0 3
  CHECK(f.nll_max == 4);
  CHECK(f.nll_max_document == 1);
  CHECK(f.nll_max_position == 1);
  CHECK_FALSE(f.below_floor);
  CHECK(s.states[3].all.kl.value == doctest::Approx(0.002 / 7));
  CHECK(s.states[3].all.below_floor);
  CHECK(s.states[0].all.kl.value == 0);
  CHECK(s.states[0].all.kl.interval.high == 0);
  CHECK(s.states[0].all.perplexity_ratio.value == 1);
  CHECK(std::isnan(s.states[2].growth.value));

  made.report.run.baseline = "fp64";
  CHECK_THROWS_AS(kl_statistics(made.report), std::invalid_argument);
}

TEST_CASE("growth exponent, bins and documents that reach them") {
  // KL = 1e-6 (middle of the bin)^1.5 in a long document; a short one with ten times that must not
  // enter the growth.
  auto curve = [](int64_t length, double factor) {
    std::vector<float> kl;
    for (const Bin& bin : position_bins(16384)) {
      for (int64_t t = bin.first; t < std::min(bin.last, length); ++t) {
        kl.push_back(static_cast<float>(
            factor * std::pow(0.5 * static_cast<double>(bin.first + bin.last), 1.5)));
      }
    }
    return kl;
  };
  MadeUp made({"fp32", "fp16+sr@seed=1", "fp16+sr@seed=2"});
  for (int64_t length : {int64_t{16384}, int64_t{3000}}) {
    const std::vector<float> zero(static_cast<size_t>(length), 0.0f);
    const double factor = length == 3000 ? 1e-5 : 1e-6;
    made.document({zero, curve(length, factor), curve(length, 3 * factor)}, {zero, zero, zero});
  }
  const KlStatistics s = kl_statistics(made.report, {1, 50});
  REQUIRE(s.bins.size() == 5);
  CHECK(s.growth_documents == 1);
  CHECK(s.states[1].growth.value == doctest::Approx(1.5).epsilon(1e-5));
  CHECK(s.states[1].bins[0].documents == 2);
  CHECK(s.states[1].bins[2].documents == 2);
  CHECK(s.states[1].bins[2].reaching == 1);
  CHECK(s.states[1].bins[3].documents == 1);
  CHECK(s.states[1].bins[0].positions == 2048);
  CHECK(s.states[1].bins[2].positions == 2048 + 952);
  CHECK(s.states[1].growth_curve[0].value == doctest::Approx(1e-6 * std::pow(512, 1.5)));
  CHECK(s.states[1].bins[0].kl.value == doctest::Approx(5.5e-6 * std::pow(512, 1.5)));
  // Means m and 3 m: mean 2 m, standard deviation sqrt(2) m.
  REQUIRE(s.seeds.size() == 1);
  CHECK(s.seeds[0].name == "fp16+sr");
  CHECK(s.seeds[0].standard_deviation / s.seeds[0].mean ==
        doctest::Approx(std::sqrt(0.5)).epsilon(1e-5));
}

TEST_CASE("positions of the prompt are outside every figure") {
  MadeUp made({"fp32", "nvfp4"});
  made.document({{0, 0, 0, 0}, {9, 9, 0.25f, 0.5f}}, {{1, 1, 1, 1}, {5, 5, 1, 1}}, 1);
  for (StateReport& state : made.report.states) state.documents[0].first_position = 2;
  const KlStatistics s = kl_statistics(made.report);
  CHECK(s.states[1].all.kl.value == doctest::Approx(0.375));
  CHECK(s.states[1].all.positions == 2);
  CHECK(s.states[1].all.non_finite == 0);
  CHECK(s.states[1].all.nll.value == 1);
}

TEST_CASE("positions where the baseline itself is not finite are outside the ratio alone") {
  MadeUp made({"fp32", "nvfp4"});
  made.document({{0, 0, 0}, {0.5f, 0.5f, 0.5f}}, {{1, kNaN, 1}, {2, 9, 2}}, 1);
  const KlStatistics s = kl_statistics(made.report);
  CHECK(s.states[0].all.non_finite == 1);
  CHECK(s.states[1].all.nll.value == doctest::Approx(13.0 / 3));
  CHECK(s.states[1].all.perplexity_ratio.value == doctest::Approx(std::exp(1.0)));
}

TEST_CASE("a few documents: standard error and interval of their mean") {
  // Means 1, 2, 6 of three documents: standard deviation sqrt(7), standard error sqrt(7 / 3). A
  // replicate draws the least (or the greatest) mean three times with probability 1/27 = 3.7 %, so
  // the quantiles at 2.5 % are the extremes, 2 below and 3 above the estimate; replicates have the
  // standard deviation sqrt(14 / 9), and t(0.975; 2) = 4.3027 against 1.95996 of a normal one
  // widens: factor sqrt(7 / 3) / sqrt(14 / 9) * 4.3027 / 1.95996 = 2.6887. A standard deviation of
  // 40,000 replicates is uncertain by 1 / sqrt(80,000) = 0.35 %; four of those.
  BlockSums sums;
  sums.columns = 2;
  sums.cells = 1;
  for (double mean : {1.0, 2.0, 6.0}) sums.documents.push_back({{1, {10 * mean, 10}}});
  const Bootstrap draws = bootstrap(
      sums, 1, [](std::span<const double> t, std::span<double> out) { out[0] = t[0] / t[1]; }, 1,
      40000);
  CHECK(draws.degrees_of_freedom == 2);
  CHECK(draws.estimate[0] == doctest::Approx(3));
  CHECK(standard_error(draws, 0, Scale::linear) ==
        doctest::Approx(std::sqrt(7.0 / 3)).epsilon(0.014));
  const Interval limits = interval(draws, 0, Scale::linear);
  CHECK(3 - limits.low == doctest::Approx(2 * 2.6887).epsilon(0.014));
  CHECK(limits.high - 3 == doctest::Approx(3 * 2.6887).epsilon(0.014));
}

TEST_CASE("the bootstrap is a function of its seed, and pairs the states") {
  std::mt19937_64 random(7);
  MadeUp made({"fp32", "a", "b"});
  const std::vector<float> kl = correlated(random, 4096, -5, 1, 0.9);
  const std::vector<float> nll = correlated(random, 4096, 1, 0.5, 0.5);
  std::vector<float> shifted = nll;
  for (float& x : shifted) x += 0.25f;
  made.document({std::vector<float>(4096, 0.0f), kl, kl}, {nll, nll, shifted}, 1);
  const KlStatistics a = kl_statistics(made.report), b = kl_statistics(made.report),
                     c = kl_statistics(made.report, {2, 1000});
  CHECK(a.states[1].all.kl.interval.low == b.states[1].all.kl.interval.low);
  CHECK(a.states[1].all.kl.interval.low != c.states[1].all.kl.interval.low);
  CHECK(a.states[1].all.kl.interval.high == a.states[2].all.kl.interval.high);
  CHECK_FALSE(a.between_documents);
  // NLLs that differ by a constant: the perplexities are uncertain, their ratio is exact (to the
  // rounding of float figures of magnitude up to 16: 2^-20 each, far less on average).
  const KlFigures& f = a.states[2].all;
  CHECK(f.perplexity_ratio.value == doctest::Approx(std::exp(0.25)).epsilon(1e-6));
  CHECK(f.perplexity_ratio.interval.high - f.perplexity_ratio.interval.low < 2e-6);
  CHECK(f.perplexity.interval.high - f.perplexity.interval.low > 0.1);
  CHECK(f.kl_quantiles[kMedian].interval.low < f.kl_quantiles[kMedian].value);
  CHECK(f.kl_quantiles[kMedian].interval.high > f.kl_quantiles[kMedian].value);
}

TEST_CASE("paired bootstrap of graded answers") {
  // Base right on 60 of 100, candidate loses 10 of those and gains 4: difference -0.06; its
  // standard error is that of a mean of -1 (10), 1 (4), 0 (86): sqrt((0.14 - 0.06^2) / 99).
  std::vector<double> base, candidate;
  std::vector<int64_t> item;
  for (int i = 0; i < 100; ++i) {
    base.push_back(i < 60 ? 1 : 0);
    candidate.push_back(i < 50 || (i >= 60 && i < 64) ? 1 : 0);
    item.push_back(i);
  }
  const PairedDifference d = paired_bootstrap(base, candidate, item, {1, 20000});
  CHECK(d.items == 100);
  CHECK(d.difference == doctest::Approx(-0.06));
  // A standard deviation of 20,000 replicates is uncertain by 1 / sqrt(40,000) = 0.5 %; four of
  // those.
  CHECK(d.standard_error == doctest::Approx(std::sqrt((0.14 - 0.0036) / 99)).epsilon(0.02));
  CHECK(d.interval.low < -0.12);
  CHECK(d.interval.high > 0);
  // Each item answered four times alike: the same interval up to replicates, not half of it.
  std::vector<double> base4, candidate4;
  std::vector<int64_t> item4;
  for (int i = 0; i < 400; ++i) {
    base4.push_back(base[i / 4]);
    candidate4.push_back(candidate[i / 4]);
    item4.push_back(i / 4);
  }
  const PairedDifference d4 = paired_bootstrap(base4, candidate4, item4, {1, 20000});
  CHECK(d4.items == 100);
  CHECK(d4.standard_error == doctest::Approx(d.standard_error).epsilon(1e-9));
  CHECK_THROWS_AS(paired_bootstrap(base, candidate4, item), std::invalid_argument);
}

TEST_CASE("95 % intervals cover 92 to 98 % of 1,000 synthetic runs with correlated positions") {
  // Log-normal figures with correlation 0.9 between neighbours. With several documents each has its
  // own level (standard deviation `between` of its logarithm). True mean: exp(level + sigma^2/2 +
  // between^2/2). Of 1,000 runs at 95 % the count has standard deviation 7, so the limits are more
  // than four of them away.
  struct Setting {
    int documents;
    int64_t positions;
    double between;
  };
  for (const Setting& setting :
       {Setting{1, 4096, 0.0}, Setting{8, 512, 0.0}, Setting{8, 512, 0.3}, Setting{4, 512, 0.3}}) {
    const double level = -5, sigma = 0.7, rho = 0.9;
    const double truth =
        std::exp(level + 0.5 * (sigma * sigma + setting.between * setting.between));
    int covered = 0;
    for (uint64_t run = 0; run < 1000; ++run) {
      std::mt19937_64 random(run + 1);
      BlockSums sums;
      sums.columns = 2;
      sums.cells = 1;
      for (int d = 0; d < setting.documents; ++d) {
        const double own = level + setting.between * standard_normal(random);
        const std::vector<float> kl = correlated(random, setting.positions, own, sigma, rho);
        BlockSums::Cell cell{block_count(setting.positions), {}};
        for (int64_t b = 0; b < cell.blocks; ++b) {
          double sum = 0, count = 0;
          for (int64_t t = setting.positions * b / cell.blocks;
               t < setting.positions * (b + 1) / cell.blocks; ++t) {
            sum += static_cast<double>(kl[static_cast<size_t>(t)]);
            count += 1;
          }
          cell.sums.push_back(sum);
          cell.sums.push_back(count);
        }
        sums.documents.push_back({cell});
      }
      const Bootstrap draws = bootstrap(
          sums, 1, [](std::span<const double> t, std::span<double> out) { out[0] = t[0] / t[1]; },
          run, 400);
      const Interval limits = interval(draws, 0, Scale::logarithm);
      covered += limits.low <= truth && truth <= limits.high ? 1 : 0;
    }
    CAPTURE(setting.documents);
    CAPTURE(setting.between);
    MESSAGE("covered " << covered << " of 1000 with " << setting.documents << " documents");
    CHECK(covered >= 920);
    CHECK(covered <= 980);
  }
}
