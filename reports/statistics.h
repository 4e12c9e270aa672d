// Statistics of a run: KL and negative log-likelihood by position bins with block-bootstrap
// intervals, growth with length, the floor; Wilson intervals and paired tests for graded answers.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "reports/bootstrap.h"
#include "reports/results.h"

namespace replayeval {

/// Value at `fraction` of sorted values, by linear interpolation at fraction * (n - 1). NaN for
/// none.
double quantile(std::span<const double> sorted, double fraction);
double quantile(std::span<const float> sorted, double fraction);

/// Fractions reported of every distribution.
constexpr std::array<double, 11> kQuantiles = {0.001, 0.01, 0.05, 0.1,  0.25, 0.5,
                                               0.75,  0.9,  0.95, 0.99, 0.999};
constexpr size_t kMedian = 5;
constexpr size_t kQuantile99 = 9;

struct Estimate {
  double value;
  Interval interval;
  Estimate();
};

/// Positions [first, last).
struct Bin {
  std::string name;  // of its end: "1K" is [0, 1024), "2K" [1024, 2048), "4K" [2048, 4096)
  int64_t first = 0;
  int64_t last = 0;
};

/// Bins that cover [0, longest); the last one ends at `longest`.
std::vector<Bin> position_bins(int64_t longest);

/// The bins that growth is fitted over: the last four, without the first, which is no octave.
std::vector<Bin> growth_bins(const std::vector<Bin>& bins);

/// Least-squares slope of ln(mean KL) against ln(middle of the bin); NaN for fewer than two bins or
/// a mean that is not positive.
double growth_slope(const std::vector<Bin>& bins, std::span<const double> mean_kl);

/// Figures of one state over the positions of a bin (or all). Non-finite values are counted and
/// never averaged.
struct KlFigures {
  int documents = 0;       // with a position here
  int reaching = 0;        // measured to the end of the bin
  int64_t positions = 0;   // with a finite KL
  int64_t non_finite = 0;  // positions whose KL, or NLL where there is a next token, is not finite
  Estimate kl;             // mean, nats
  std::array<Estimate, kQuantiles.size()> kl_quantiles;
  double kl_max;
  int kl_max_document = -1;
  int64_t kl_max_position = -1;
  Estimate nll;  // mean, nats a token
  std::array<Estimate, kQuantiles.size()> nll_quantiles;
  double nll_max;
  int nll_max_document = -1;
  int64_t nll_max_position = -1;
  Estimate top1;              // share of positions with the baseline's argmax
  Estimate perplexity;        // exp of the mean NLL
  Estimate perplexity_ratio;  // to the baseline's, over positions where both are finite
  bool below_floor = false;   // mean KL under 3 times that of the floor row in the same positions
  KlFigures();
};

struct StateStatistics {
  std::string name;
  KlFigures all;
  std::vector<KlFigures> bins;  // [bin]
  std::vector<Estimate>
      growth_curve;  // mean KL by bin, of the documents that reach the end of the last bin
  Estimate growth;   // d ln(mean KL) / d ln(position) over the last octaves (up to four bins)
};

/// States that differ in their seed alone.
struct SeedSpread {
  std::string name;  // without the seed
  std::vector<int> states;
  double mean = 0;                // of the mean KLs
  double standard_deviation = 0;  // between seeds
};

struct KlStatistics {
  std::vector<Bin> bins;
  std::vector<StateStatistics> states;
  int documents = 0;
  int growth_documents = 0;  // that reach the end of the last bin
  int floor_state = -1;  // the row that is only re-ordered arithmetic (baseline formats at L = 1),
                         // -1 when there is none
  bool between_documents =
      false;  // intervals speak of other texts too; with one document they do not
  std::vector<SeedSpread> seeds;
};

struct StatisticsOptions {
  uint64_t seed = 1;
  int replicates = 1000;
};

/// Throws std::invalid_argument when the report has no baseline state.
KlStatistics kl_statistics(const Report& report, const StatisticsOptions& options = {});

/// `fp32@L=1` in the terms of the report: the baseline's formats, shared, at window 1; -1 when
/// there is none.
int find_floor(const Report& report);

/// Wilson's score interval at 95 % for `successes` of `trials`.
Interval wilson(int64_t successes, int64_t trials);
/// The same of a share, known as well as by `trials` independent trials, which need not be whole.
Interval wilson_of_share(double share, double trials);

/// Exact two-sided McNemar test: of n = lost + gained discordant pairs each side has probability
/// 1/2, p = min(1, 2 P(X <= min(lost, gained))); 1 for no discordant pair.
double mcnemar_exact(int64_t lost, int64_t gained);

/// 95 % interval of a paired change of shares when none of `items` differs, where a bootstrap knows
/// no spread: the score test (Tango 1998) inverted, -z^2 / (n + z^2) to z^2 / (n + z^2).
Interval no_difference(int64_t items);

struct PairedDifference {
  int64_t items = 0;  // clusters
  double difference;  // mean of candidate - base
  double standard_error;
  Interval interval;
};

/// Mean of candidate - base with a bootstrap over clusters: values with the same `cluster` (repeats
/// of an item) are drawn together. Where no cluster differs the interval is no_difference(). All
/// spans have equal length; throws std::invalid_argument
/// otherwise.
PairedDifference paired_bootstrap(std::span<const double> base, std::span<const double> candidate,
                                  std::span<const int64_t> cluster,
                                  const StatisticsOptions& options = {});

}  // namespace replayeval
