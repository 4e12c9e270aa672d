#include "reports/bootstrap.h"

#include <algorithm>
#include <boost/math/distributions/normal.hpp>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <limits>

#include "reports/statistics.h"

namespace replayeval {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
// Blocks of b positions miss a share 2 rho / ((1 - rho^2) b) of the variance when neighbours
// correlate by rho: 7 % at 0.9.
constexpr int64_t kBlockPositions = 128;
constexpr int64_t kMaxBlocks = 64;
constexpr double kTail = 0.025;

void add(std::span<double> totals, const double* sums, double times) {
  for (size_t i = 0; i < totals.size(); ++i) totals[i] += times * sums[i];
}

/// The logarithm only where every value is positive.
Scale possible_scale(const Bootstrap& bootstrap, size_t statistic, Scale scale) {
  auto positive = [](const std::vector<double>& values) {
    return std::all_of(values.begin(), values.end(), [](double v) { return v > 0; });
  };
  const bool all = bootstrap.estimate[statistic] > 0 && positive(bootstrap.replicates[statistic]) &&
                   positive(bootstrap.by_document[statistic]);
  return all ? scale : Scale::linear;
}

/// The values about the estimate.
std::vector<double> deviations(const std::vector<double>& values, double estimate, Scale scale) {
  std::vector<double> out;
  out.reserve(values.size());
  for (double v : values) {
    out.push_back(scale == Scale::logarithm ? std::log(v) - std::log(estimate) : v - estimate);
  }
  return out;
}

/// Standard deviation about the mean.
double spread(const std::vector<double>& values) {
  double sum = 0, squares = 0;
  for (double v : values) sum += v;
  const double mean = sum / static_cast<double>(values.size());
  for (double v : values) squares += (v - mean) * (v - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

bool usable(const Bootstrap& bootstrap, int statistic) {
  const auto s = static_cast<size_t>(statistic);
  return bootstrap.degrees_of_freedom > 0 && bootstrap.replicates[s].size() > 1 &&
         std::isfinite(bootstrap.estimate[s]) &&
         std::all_of(bootstrap.replicates[s].begin(), bootstrap.replicates[s].end(),
                     [](double v) { return std::isfinite(v); });
}

}  // namespace

size_t draw_below(std::mt19937_64& random, size_t count) {
  return static_cast<size_t>(((random() >> 32) * count) >> 32);
}

Interval::Interval() : low(kNaN), high(kNaN) {}

int64_t block_count(int64_t positions) {
  if (positions < 2 * kBlockPositions) return 0;
  return std::min(positions / kBlockPositions, kMaxBlocks);
}

Bootstrap bootstrap(const BlockSums& sums, int statistics, const Evaluate& evaluate, uint64_t seed,
                    int replicates) {
  const size_t count = sums.documents.size();
  const auto columns = static_cast<size_t>(sums.columns);
  const size_t width = static_cast<size_t>(sums.cells) * columns;
  Bootstrap result;
  result.documents = static_cast<int>(count);
  result.estimate.assign(static_cast<size_t>(statistics), kNaN);
  result.replicates.resize(static_cast<size_t>(statistics));
  result.by_document.resize(static_cast<size_t>(statistics));
  if (count == 0) return result;

  std::vector<std::vector<double>> whole(
      count, std::vector<double>(width, 0.0));  // totals of each document
  std::vector<double> totals(width, 0.0);
  int64_t blocks = 0, strata = 0;
  for (size_t d = 0; d < count; ++d) {
    for (size_t c = 0; c < sums.documents[d].size(); ++c) {
      const BlockSums::Cell& cell = sums.documents[d][c];
      const std::span<double> part = std::span(whole[d]).subspan(c * columns, columns);
      for (int64_t b = 0; b < cell.blocks; ++b)
        add(part, cell.sums.data() + static_cast<size_t>(b) * columns, 1);
      blocks += cell.blocks;
      strata += cell.blocks > 0 ? 1 : 0;
    }
    add(totals, whole[d].data(), 1);
  }
  evaluate(totals, result.estimate);
  if (count > 1) {
    result.degrees_of_freedom = static_cast<double>(count - 1);
    result.inflation = static_cast<double>(count) / static_cast<double>(count - 1);
  } else {
    if (blocks <= strata) return result;
    result.degrees_of_freedom = static_cast<double>(blocks - strata);
    result.inflation = static_cast<double>(blocks) / static_cast<double>(blocks - strata);
  }

  std::mt19937_64 random(seed);
  std::vector<double> values(static_cast<size_t>(statistics));
  std::vector<double> times;
  auto store = [&](std::vector<std::vector<double>>& out) {
    evaluate(totals, values);
    for (size_t s = 0; s < values.size(); ++s) out[s].push_back(values[s]);
  };
  std::vector<size_t> drawn(count, 0);
  for (int r = 0; r < replicates; ++r) {
    std::fill(drawn.begin(), drawn.end(), count > 1 ? 0 : 1);
    if (count > 1) {
      for (size_t i = 0; i < count; ++i) ++drawn[draw_below(random, count)];
      std::fill(totals.begin(), totals.end(), 0.0);
      for (size_t d = 0; d < count; ++d) {
        if (drawn[d] > 0) add(totals, whole[d].data(), static_cast<double>(drawn[d]));
      }
      store(result.by_document);
    }
    std::fill(totals.begin(), totals.end(), 0.0);
    for (size_t d = 0; d < count; ++d) {
      if (drawn[d] == 0) continue;
      for (size_t c = 0; c < sums.documents[d].size(); ++c) {
        const BlockSums::Cell& cell = sums.documents[d][c];
        times.assign(static_cast<size_t>(cell.blocks), 0.0);
        for (size_t i = 0; i < drawn[d] * times.size(); ++i)
          times[draw_below(random, times.size())] += 1;
        const std::span<double> part = std::span(totals).subspan(c * columns, columns);
        for (size_t b = 0; b < times.size(); ++b) {
          if (times[b] > 0) add(part, cell.sums.data() + b * columns, times[b]);
        }
      }
    }
    store(result.replicates);
  }
  return result;
}

double standard_error(const Bootstrap& bootstrap, int statistic, Scale scale) {
  if (!usable(bootstrap, statistic)) return kNaN;
  const auto s = static_cast<size_t>(statistic);
  const std::vector<double>& values =
      bootstrap.documents > 1 ? bootstrap.by_document[s] : bootstrap.replicates[s];
  scale = possible_scale(bootstrap, s, scale);
  return spread(deviations(values, bootstrap.estimate[s], scale)) * std::sqrt(bootstrap.inflation);
}

Interval interval(const Bootstrap& bootstrap, int statistic, Scale scale) {
  if (!usable(bootstrap, statistic)) return {};
  const auto s = static_cast<size_t>(statistic);
  const double estimate = bootstrap.estimate[s];
  scale = possible_scale(bootstrap, s, scale);
  std::vector<double> about = deviations(bootstrap.replicates[s], estimate, scale);
  const double drawn = spread(about);
  if (drawn == 0) return {estimate, estimate};
  const double wanted = standard_error(bootstrap, statistic, scale);
  const double normal = boost::math::quantile(boost::math::normal(), 1 - kTail);
  const double factor =
      wanted / drawn * student_quantile(1 - kTail, bootstrap.degrees_of_freedom) / normal;
  std::sort(about.begin(), about.end());
  const double low = factor * quantile(std::span<const double>(about), kTail);
  const double high = factor * quantile(std::span<const double>(about), 1 - kTail);
  if (scale == Scale::logarithm) return {estimate * std::exp(low), estimate * std::exp(high)};
  return {estimate + low, estimate + high};
}

double student_quantile(double probability, double degrees) {
  return boost::math::quantile(boost::math::students_t(degrees), probability);
}

double student_probability(double value, double degrees) {
  return boost::math::cdf(boost::math::students_t(degrees), value);
}

}  // namespace replayeval
