// Block bootstrap of means over positions of documents: neighbouring positions are correlated, so
// blocks of consecutive positions are drawn, and positions of one document have its character in
// common, so documents are drawn too. (Davison and Hinkley, Bootstrap Methods and their
// Application, 3.8 and 8.2.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <vector>

namespace replayeval {

/// Limits of a 95 % interval, NaN when there is none.
struct Interval {
  double low, high;
  Interval();
  Interval(double low, double high) : low(low), high(high) {}
  bool known() const { return low == low && high == high; }
};

/// Sums of `columns` quantities over blocks of consecutive positions. A cell is a stratum of
/// positions (a position bin); documents may lack cells.
struct BlockSums {
  int columns = 0;
  int cells = 0;
  struct Cell {
    int64_t blocks = 0;
    std::vector<double> sums;  // [blocks, columns]
  };
  std::vector<std::vector<Cell>> documents;  // [document][cell]
};

/// Uniform on 0 .. count - 1, count < 2^32; the same on every platform.
size_t draw_below(std::mt19937_64& random, size_t count);

/// Number of blocks that `positions` consecutive positions of one document are cut into: blocks of
/// at least 128 positions, at most 64 blocks; 0 when there are fewer than 256 positions.
int64_t block_count(int64_t positions);

/// Values of statistics over bootstrap replicates.
///   With several documents, `replicates` draws documents and, inside each, blocks; `by_document`
///   draws whole documents, and gives the variance (between documents, degrees of freedom documents
///   - 1). With one document blocks alone are drawn: the spread then says nothing about other
///   texts.
struct Bootstrap {
  int documents = 0;
  double degrees_of_freedom = 0;
  double inflation = 1;  // variance of an estimated mean over that of its bootstrap replicates
  std::vector<double> estimate;
  std::vector<std::vector<double>> replicates, by_document;  // [statistic][replicate]
};

/// Computes statistics from totals [cells, columns].
using Evaluate = std::function<void(std::span<const double> totals, std::span<double> statistics)>;

Bootstrap bootstrap(const BlockSums& sums, int statistics, const Evaluate& evaluate, uint64_t seed,
                    int replicates);

enum class Scale : uint8_t { linear, logarithm };

/// Standard error of a statistic (of its logarithm), NaN when it cannot be told.
double standard_error(const Bootstrap& bootstrap, int statistic, Scale scale);

/// 95 % interval: quantiles of the replicates about the estimate, widened to the standard error and
/// by Student's t for few documents or blocks. `logarithm` for positive quantities; falls back to
/// `linear` when a replicate is not positive.
Interval interval(const Bootstrap& bootstrap, int statistic, Scale scale);

/// Quantile of Student's t; `degrees` > 0.
double student_quantile(double probability, double degrees);
/// Probability of Student's t below `value`.
double student_probability(double value, double degrees);

}  // namespace replayeval
