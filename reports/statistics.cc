#include "reports/statistics.h"

#include <algorithm>
#include <boost/math/distributions/binomial.hpp>
#include <boost/math/distributions/normal.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>

namespace replayeval {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kFloorFactor = 3;
constexpr size_t kGrowthBins = 4;

template <class T>
double interpolate(std::span<const T> sorted, double fraction) {
  if (sorted.empty()) return kNaN;
  const double at = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  if (below + 1 >= sorted.size()) return static_cast<double>(sorted.back());
  const double low = static_cast<double>(sorted[below]),
               high = static_cast<double>(sorted[below + 1]);
  return low + (at - static_cast<double>(below)) * (high - low);
}

/// Columns of the block sums of one state.
enum Column : size_t {
  kKl,
  kKlCount,
  kTop1,
  kTop1Count,
  kNll,
  kNllCount,
  kExcess,  // NLL minus the baseline's, where both are finite
  kExcessCount,
  kKlBelow,                                  // one column a quantile: 1 where KL <= that quantile
  kNllBelow = kKlBelow + kQuantiles.size(),  // likewise
  kColumns = kNllBelow + kQuantiles.size()
};

/// Statistics evaluated on every bootstrap replicate of one state.
enum Statistic : size_t {
  kMeanKl,
  kShareTop1,
  kMeanNll,
  kMeanExcess,
  kShareKlBelow,
  kShareNllBelow = kShareKlBelow + kQuantiles.size(),
  kStatistics = kShareNllBelow + kQuantiles.size()
};

/// A range of positions of some documents, with the figures of one state.
struct View {
  const Report& report;
  const StateReport& state;
  const StateReport& baseline;

  int64_t begin(size_t document, const Bin& bin) const {
    return std::max(bin.first, state.documents[document].first_position);
  }
  int64_t end(size_t document, const Bin& bin) const {
    return std::min(bin.last, state.documents[document].length);
  }
  float kl(size_t d, int64_t t) const { return state.documents[d].kl[static_cast<size_t>(t)]; }
  float nll(size_t d, int64_t t) const { return state.documents[d].nll[static_cast<size_t>(t)]; }
  uint8_t top1(size_t d, int64_t t) const {
    return state.documents[d].top1[static_cast<size_t>(t)];
  }
  bool has_next(size_t d, int64_t t) const { return t + 1 < report.documents[d].tokens; }
  float baseline_nll(size_t d, int64_t t) const {
    const std::vector<float>& values = baseline.documents[d].nll;
    return static_cast<size_t>(t) < values.size() ? values[static_cast<size_t>(t)]
                                                  : std::numeric_limits<float>::quiet_NaN();
  }
};

/// Point figures that need no bootstrap: counts, quantiles, maxima. `sorted_*` receive the finite
/// values in order.
KlFigures point_figures(const View& view, const Bin& bin, std::vector<float>* sorted_kl,
                        std::vector<float>* sorted_nll) {
  KlFigures out;
  sorted_kl->clear();
  sorted_nll->clear();
  for (size_t d = 0; d < view.state.documents.size(); ++d) {
    const int64_t begin = view.begin(d, bin), end = view.end(d, bin);
    if (begin >= end) continue;
    ++out.documents;
    out.reaching += end == bin.last ? 1 : 0;
    for (int64_t t = begin; t < end; ++t) {
      const float kl = view.kl(d, t), nll = view.nll(d, t);
      const bool nll_expected = view.has_next(d, t);
      if (!std::isfinite(kl) || (nll_expected && !std::isfinite(nll))) ++out.non_finite;
      if (std::isfinite(kl)) {
        sorted_kl->push_back(kl);
        if (out.kl_max_document < 0 || kl > out.kl_max) {
          out.kl_max = kl;
          out.kl_max_document = static_cast<int>(d);
          out.kl_max_position = t;
        }
      }
      if (nll_expected && std::isfinite(nll)) {
        sorted_nll->push_back(nll);
        if (out.nll_max_document < 0 || nll > out.nll_max) {
          out.nll_max = nll;
          out.nll_max_document = static_cast<int>(d);
          out.nll_max_position = t;
        }
      }
    }
  }
  out.positions = static_cast<int64_t>(sorted_kl->size());
  std::sort(sorted_kl->begin(), sorted_kl->end());
  std::sort(sorted_nll->begin(), sorted_nll->end());
  for (size_t q = 0; q < kQuantiles.size(); ++q) {
    out.kl_quantiles[q].value = quantile(std::span<const float>(*sorted_kl), kQuantiles[q]);
    out.nll_quantiles[q].value = quantile(std::span<const float>(*sorted_nll), kQuantiles[q]);
  }
  return out;
}

/// Adds the columns of one position.
void add_position(const View& view, size_t d, int64_t t, const KlFigures& figures,
                  std::span<double> sums) {
  const float kl = view.kl(d, t), nll = view.nll(d, t), base = view.baseline_nll(d, t);
  if (std::isfinite(kl)) {
    sums[kKl] += static_cast<double>(kl);
    sums[kKlCount] += 1;
    for (size_t q = 0; q < kQuantiles.size(); ++q) {
      sums[kKlBelow + q] += static_cast<double>(kl) <= figures.kl_quantiles[q].value ? 1 : 0;
    }
  }
  if (view.top1(d, t) != kNoTop1) {
    sums[kTop1] += view.top1(d, t);
    sums[kTop1Count] += 1;
  }
  if (!view.has_next(d, t) || !std::isfinite(nll)) return;
  sums[kNll] += static_cast<double>(nll);
  sums[kNllCount] += 1;
  for (size_t q = 0; q < kQuantiles.size(); ++q) {
    sums[kNllBelow + q] += static_cast<double>(nll) <= figures.nll_quantiles[q].value ? 1 : 0;
  }
  if (!std::isfinite(base)) return;
  sums[kExcess] += static_cast<double>(nll) - static_cast<double>(base);
  sums[kExcessCount] += 1;
}

/// Block sums of several states over the same documents, cut into the same blocks, so that
/// replicates are paired. A stretch too short for two blocks is one.
BlockSums block_sums(const std::vector<View>& views, const std::vector<KlFigures>& figures,
                     const std::vector<Bin>& bins, const std::vector<size_t>& documents) {
  BlockSums out;
  out.columns = static_cast<int>(views.size() * kColumns);
  out.cells = static_cast<int>(bins.size());
  const auto columns = static_cast<size_t>(out.columns);
  for (size_t d : documents) {
    std::vector<BlockSums::Cell> cells(bins.size());
    for (size_t c = 0; c < bins.size(); ++c) {
      int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
      for (const View& view : views) {
        begin = std::min(begin, view.begin(d, bins[c]));
        end = std::max(end, view.end(d, bins[c]));
      }
      if (begin >= end) continue;
      BlockSums::Cell& cell = cells[c];
      cell.blocks = std::max<int64_t>(1, block_count(end - begin));
      cell.sums.assign(static_cast<size_t>(cell.blocks) * columns, 0.0);
      for (int64_t b = 0; b < cell.blocks; ++b) {
        const int64_t first = begin + (end - begin) * b / cell.blocks;
        const int64_t last = begin + (end - begin) * (b + 1) / cell.blocks;
        for (size_t v = 0; v < views.size(); ++v) {
          const std::span<double> sums = std::span(cell.sums).subspan(
              static_cast<size_t>(b) * columns + v * kColumns, kColumns);
          const int64_t stop = std::min(last, views[v].end(d, bins[c]));
          for (int64_t t = first; t < stop; ++t) add_position(views[v], d, t, figures[v], sums);
        }
      }
    }
    out.documents.push_back(std::move(cells));
  }
  return out;
}

void evaluate_state(std::span<const double> t, std::span<double> out) {
  out[kMeanKl] = t[kKl] / t[kKlCount];
  out[kShareTop1] = t[kTop1] / t[kTop1Count];
  out[kMeanNll] = t[kNll] / t[kNllCount];
  out[kMeanExcess] = t[kExcess] / t[kExcessCount];
  for (size_t q = 0; q < kQuantiles.size(); ++q) {
    out[kShareKlBelow + q] = t[kKlBelow + q] / t[kKlCount];
    out[kShareNllBelow + q] = t[kNllBelow + q] / t[kNllCount];
  }
}

/// Interval of a quantile by inverting that of the share of values below it (Woodruff 1952).
Interval quantile_interval(const Bootstrap& replicates, size_t statistic, double fraction,
                           const std::vector<float>& sorted) {
  const double error = standard_error(replicates, static_cast<int>(statistic), Scale::linear);
  if (!std::isfinite(error)) return {};
  const double reach = student_quantile(0.975, replicates.degrees_of_freedom) * error;
  return {quantile(std::span<const float>(sorted), std::max(0.0, fraction - reach)),
          quantile(std::span<const float>(sorted), std::min(1.0, fraction + reach))};
}

Interval within(Interval limits, double low, double high) {
  if (!limits.known()) return limits;
  return {std::max(low, limits.low), std::min(high, limits.high)};
}

std::vector<size_t> documents_in(const std::vector<View>& views, const std::vector<Bin>& bins) {
  std::vector<size_t> out;
  for (size_t d = 0; d < views.front().report.documents.size(); ++d) {
    const bool any = std::any_of(views.begin(), views.end(), [&](const View& view) {
      return std::any_of(bins.begin(), bins.end(),
                         [&](const Bin& bin) { return view.begin(d, bin) < view.end(d, bin); });
    });
    if (any) out.push_back(d);
  }
  return out;
}

/// Figures of every state over the union of the bins, resampled bin by bin.
std::vector<KlFigures> figures_over(const std::vector<View>& views, const std::vector<Bin>& bins,
                                    const StatisticsOptions& options) {
  const Bin whole{"", bins.front().first, bins.back().last};
  std::vector<KlFigures> out;
  std::vector<std::vector<float>> sorted_kl(views.size()), sorted_nll(views.size());
  for (size_t v = 0; v < views.size(); ++v)
    out.push_back(point_figures(views[v], whole, &sorted_kl[v], &sorted_nll[v]));

  const BlockSums sums = block_sums(views, out, bins, documents_in(views, bins));
  const size_t columns = views.size() * kColumns;
  std::vector<double> joined(columns);
  const Evaluate evaluate = [&](std::span<const double> totals, std::span<double> statistics) {
    std::fill(joined.begin(), joined.end(), 0.0);
    for (size_t c = 0; c < bins.size(); ++c) {
      for (size_t i = 0; i < columns; ++i) joined[i] += totals[c * columns + i];
    }
    for (size_t v = 0; v < views.size(); ++v) {
      evaluate_state(std::span<const double>(joined).subspan(v * kColumns, kColumns),
                     statistics.subspan(v * kStatistics, kStatistics));
    }
  };
  const Bootstrap draws = bootstrap(sums, static_cast<int>(views.size() * kStatistics), evaluate,
                                    options.seed, options.replicates);

  for (size_t v = 0; v < views.size(); ++v) {
    KlFigures& f = out[v];
    const size_t at = v * kStatistics;
    auto estimate = [&](size_t statistic, Scale scale) {
      Estimate e;
      e.value = draws.estimate[at + statistic];
      e.interval = interval(draws, static_cast<int>(at + statistic), scale);
      return e;
    };
    auto exponential = [](Estimate e) {
      e.value = std::exp(e.value);
      e.interval = {std::exp(e.interval.low), std::exp(e.interval.high)};
      return e;
    };
    f.kl = estimate(kMeanKl, Scale::logarithm);
    f.top1 = estimate(kShareTop1, Scale::linear);
    f.top1.interval = within(f.top1.interval, 0, 1);
    f.nll = estimate(kMeanNll, Scale::linear);
    f.perplexity = exponential(f.nll);
    f.perplexity_ratio = exponential(estimate(kMeanExcess, Scale::linear));
    for (size_t q = 0; q < kQuantiles.size(); ++q) {
      f.kl_quantiles[q].interval =
          quantile_interval(draws, at + kShareKlBelow + q, kQuantiles[q], sorted_kl[v]);
      f.nll_quantiles[q].interval =
          quantile_interval(draws, at + kShareNllBelow + q, kQuantiles[q], sorted_nll[v]);
    }
  }
  return out;
}

/// Mean KL by bin and growth exponent, of the documents that reach the end of the last bin.
void add_growth(const std::vector<View>& views, const StatisticsOptions& options,
                KlStatistics* out) {
  const std::vector<Bin>& bins = out->bins;
  std::vector<size_t> documents;
  for (size_t d = 0; d < views.front().report.documents.size(); ++d) {
    const bool reaches = std::all_of(views.begin(), views.end(), [&](const View& view) {
      return view.end(d, bins.back()) == bins.back().last;
    });
    if (reaches) documents.push_back(d);
  }
  out->growth_documents = static_cast<int>(documents.size());
  const std::vector<KlFigures> unused(views.size());
  const BlockSums sums = block_sums(views, unused, bins, documents);
  const size_t columns = views.size() * kColumns;
  const std::vector<Bin> octaves = growth_bins(bins);
  const size_t width = bins.size() + 1;
  const Evaluate evaluate = [&](std::span<const double> totals, std::span<double> statistics) {
    for (size_t v = 0; v < views.size(); ++v) {
      const std::span<double> mine = statistics.subspan(v * width, width);
      for (size_t c = 0; c < bins.size(); ++c) {
        const std::span<const double> t = totals.subspan(c * columns + v * kColumns, kColumns);
        mine[c] = t[kKl] / t[kKlCount];
      }
      mine[bins.size()] =
          growth_slope(octaves, mine.subspan(bins.size() - octaves.size(), octaves.size()));
    }
  };
  const Bootstrap draws = bootstrap(sums, static_cast<int>(views.size() * width), evaluate,
                                    options.seed, options.replicates);
  for (size_t v = 0; v < views.size(); ++v) {
    StateStatistics& state = out->states[v];
    for (size_t c = 0; c <= bins.size(); ++c) {
      const auto s = static_cast<int>(v * width + c);
      Estimate e;
      e.value = draws.estimate[static_cast<size_t>(s)];
      e.interval = interval(draws, s, c < bins.size() ? Scale::logarithm : Scale::linear);
      if (c < bins.size()) {
        state.growth_curve.push_back(e);
      } else {
        state.growth = e;
      }
    }
  }
}

/// A state's name without the modifier `seed=...`.
std::string without_seed(const std::string& name) {
  const size_t at = name.find('@');
  if (at == std::string::npos) return name;
  std::string kept;
  size_t start = at + 1;
  while (start <= name.size()) {
    const size_t end = std::min(name.find(';', start), name.size());
    const std::string modifier = name.substr(start, end - start);
    if (!modifier.starts_with("seed=")) kept += (kept.empty() ? "@" : ";") + modifier;
    start = end + 1;
  }
  return name.substr(0, at) + kept;
}

void add_seed_spread(const Report& report, KlStatistics* out) {
  std::map<std::string, std::vector<int>> groups;
  for (size_t s = 0; s < report.states.size(); ++s) {
    groups[without_seed(report.states[s].info.name)].push_back(static_cast<int>(s));
  }
  for (const auto& [name, states] : groups) {
    if (states.size() < 2) continue;
    SeedSpread spread{name, states, 0, 0};
    const auto n = static_cast<double>(states.size());
    for (int s : states) spread.mean += out->states[static_cast<size_t>(s)].all.kl.value / n;
    for (int s : states) {
      const double d = out->states[static_cast<size_t>(s)].all.kl.value - spread.mean;
      spread.standard_deviation += d * d / (n - 1);
    }
    spread.standard_deviation = std::sqrt(spread.standard_deviation);
    out->seeds.push_back(std::move(spread));
  }
}

}  // namespace

Estimate::Estimate() : value(kNaN) {}
KlFigures::KlFigures() : kl_max(kNaN), nll_max(kNaN) {}

double quantile(std::span<const double> sorted, double fraction) {
  return interpolate(sorted, fraction);
}
double quantile(std::span<const float> sorted, double fraction) {
  return interpolate(sorted, fraction);
}

std::vector<Bin> position_bins(int64_t longest) {
  std::vector<Bin> bins;
  int64_t first = 0;
  for (int64_t last = 1024; first < longest; first = last, last *= 2) {
    bins.push_back({std::to_string(last / 1024) + "K", first, std::min(last, longest)});
  }
  return bins;
}

double growth_slope(const std::vector<Bin>& bins, std::span<const double> mean_kl) {
  double n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (size_t i = 0; i < bins.size(); ++i) {
    if (!(mean_kl[i] > 0)) return kNaN;
    const double x = std::log(0.5 * static_cast<double>(bins[i].first + bins[i].last));
    const double y = std::log(mean_kl[i]);
    n += 1;
    sx += x;
    sy += y;
    sxx += x * x;
    sxy += x * y;
  }
  const double spread = n * sxx - sx * sx;
  return n < 2 || spread <= 0 ? kNaN : (n * sxy - sx * sy) / spread;
}

std::vector<Bin> growth_bins(const std::vector<Bin>& bins) {
  const size_t count = std::min(kGrowthBins, bins.empty() ? 0 : bins.size() - 1);
  return {bins.end() - static_cast<std::ptrdiff_t>(count), bins.end()};
}

int find_floor(const Report& report) {
  const int baseline = report.baseline();
  if (baseline < 0) return -1;
  const StateInfo& reference = report.states[static_cast<size_t>(baseline)].info;
  for (size_t s = 0; s < report.states.size(); ++s) {
    const StateInfo& state = report.states[s].info;
    if (static_cast<int>(s) != baseline && state.recurrence == reference.recurrence &&
        state.read.empty() && state.recurrence_rounding == reference.recurrence_rounding &&
        state.window == 1) {
      return static_cast<int>(s);
    }
  }
  return -1;
}

KlStatistics kl_statistics(const Report& report, const StatisticsOptions& options) {
  const int baseline = report.baseline();
  if (baseline < 0) {
    throw std::invalid_argument((report.path.empty() ? "report" : report.path) +
                                ": no state is called '" + report.run.baseline + "', the baseline");
  }
  KlStatistics out;
  std::vector<View> views;
  int64_t longest = 0;
  for (const StateReport& state : report.states) {
    views.push_back({report, state, report.states[static_cast<size_t>(baseline)]});
    for (const StateDocument& document : state.documents)
      longest = std::max(longest, document.length);
    StateStatistics statistics;
    statistics.name = state.info.name;
    out.states.push_back(std::move(statistics));
  }
  out.bins = position_bins(longest);
  out.floor_state = find_floor(report);
  if (out.bins.empty()) return out;

  const std::vector<KlFigures> all = figures_over(views, out.bins, options);
  for (size_t s = 0; s < views.size(); ++s) out.states[s].all = all[s];
  for (const Bin& bin : out.bins) {
    const std::vector<KlFigures> figures = figures_over(views, {bin}, options);
    for (size_t s = 0; s < views.size(); ++s) out.states[s].bins.push_back(figures[s]);
  }
  for (const StateStatistics& state : out.states)
    out.documents = std::max(out.documents, state.all.documents);
  out.between_documents = out.documents > 1;
  add_growth(views, options, &out);

  if (out.floor_state >= 0) {
    const StateStatistics& floor = out.states[static_cast<size_t>(out.floor_state)];
    for (size_t s = 0; s < out.states.size(); ++s) {
      if (static_cast<int>(s) == baseline || static_cast<int>(s) == out.floor_state) continue;
      StateStatistics& state = out.states[s];
      auto mark = [](KlFigures& figures, const KlFigures& reference) {
        figures.below_floor = figures.kl.value < kFloorFactor * reference.kl.value;
      };
      mark(state.all, floor.all);
      for (size_t b = 0; b < state.bins.size(); ++b) mark(state.bins[b], floor.bins[b]);
    }
  }
  add_seed_spread(report, &out);
  return out;
}

Interval wilson_of_share(double share, double trials) {
  if (!(trials > 0)) return {};
  const double z = boost::math::quantile(boost::math::normal(), 0.975);
  const double n = trials, p = share;
  const double middle = (p + z * z / (2 * n)) / (1 + z * z / n);
  const double half = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  return {p == 0 ? 0.0 : middle - half, p == 1 ? 1.0 : middle + half};
}

Interval wilson(int64_t successes, int64_t trials) {
  if (trials <= 0) return {};
  return wilson_of_share(static_cast<double>(successes) / static_cast<double>(trials),
                         static_cast<double>(trials));
}

Interval no_difference(int64_t items) {
  if (items <= 0) return {};
  const double z = boost::math::quantile(boost::math::normal(), 0.975);
  const double reach = z * z / (static_cast<double>(items) + z * z);
  return {-reach, reach};
}

double mcnemar_exact(int64_t lost, int64_t gained) {
  const int64_t n = lost + gained;
  if (n == 0) return 1;
  const boost::math::binomial pairs(static_cast<double>(n), 0.5);
  return std::min(1.0, 2 * boost::math::cdf(pairs, static_cast<double>(std::min(lost, gained))));
}

PairedDifference paired_bootstrap(std::span<const double> base, std::span<const double> candidate,
                                  std::span<const int64_t> cluster,
                                  const StatisticsOptions& options) {
  if (base.size() != candidate.size() || base.size() != cluster.size()) {
    throw std::invalid_argument("paired_bootstrap: " + std::to_string(base.size()) +
                                " base values, " + std::to_string(candidate.size()) +
                                " candidate values, " + std::to_string(cluster.size()) +
                                " clusters; expected equal numbers");
  }
  std::map<int64_t, size_t> index;
  std::vector<std::pair<double, double>> clusters;  // sum of differences, values
  for (size_t i = 0; i < base.size(); ++i) {
    auto [found, fresh] = index.emplace(cluster[i], clusters.size());
    if (fresh) clusters.emplace_back(0, 0);
    clusters[found->second].first += candidate[i] - base[i];
    clusters[found->second].second += 1;
  }
  // Most clusters look alike (nothing lost or gained): a replicate counts how often each kind is
  // drawn.
  std::map<std::pair<double, double>, size_t> kinds;
  std::vector<size_t> kind_of;
  for (const auto& one : clusters)
    kind_of.push_back(kinds.emplace(one, kinds.size()).first->second);
  std::vector<std::pair<double, double>> kind(kinds.size());
  for (const auto& [value, number] : kinds) kind[number] = value;
  std::vector<double> counts(kind.size(), 0.0);
  auto mean = [&] {
    double sum = 0, count = 0;
    for (size_t k = 0; k < kind.size(); ++k) {
      sum += counts[k] * kind[k].first;
      count += counts[k] * kind[k].second;
    }
    return sum / count;
  };
  for (const size_t k : kind_of) counts[k] += 1;
  Bootstrap draws;
  draws.documents = static_cast<int>(clusters.size());
  draws.estimate = {clusters.empty() ? kNaN : mean()};
  draws.replicates.resize(1);
  const auto n = clusters.size();
  if (n > 1) {
    draws.degrees_of_freedom = static_cast<double>(n - 1);
    draws.inflation = static_cast<double>(n) / static_cast<double>(n - 1);
    std::mt19937_64 random(options.seed);
    for (int r = 0; r < options.replicates; ++r) {
      std::fill(counts.begin(), counts.end(), 0.0);
      for (size_t i = 0; i < n; ++i) counts[kind_of[draw_below(random, n)]] += 1;
      draws.replicates[0].push_back(mean());
    }
  }
  draws.by_document = draws.replicates;
  PairedDifference out;
  out.items = static_cast<int64_t>(n);
  out.difference = draws.estimate[0];
  out.standard_error = standard_error(draws, 0, Scale::linear);
  out.interval = interval(draws, 0, Scale::linear);
  const bool same =
      std::all_of(kind.begin(), kind.end(), [](const auto& one) { return one.first == 0; });
  if (same) out.interval = no_difference(out.items);
  return out;
}

}  // namespace replayeval
