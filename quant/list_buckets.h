// A list of values as equal intervals of FP32 numbers, for hardware where the 32 lanes of a warp
// are a table (row_codec.cuh): what divides the list (to nearest the thresholds, stochastically the
// values between the ends) is so far apart that no interval holds two of them.
#pragma once

#include "quant/state_format.h"

namespace replayeval {

struct ListBuckets {
  static constexpr int kCount = 31;  // the one bucket behind them has no divider

  /// Of a bucket: its divider, NaN where it has none, and what holds below the divider. What holds
  /// from the divider on is the next bucket's.
  struct alignas(16) Bucket {
    float divider;
    float near;  // to nearest the value, else the neighbour of y nearer to 0
    float far;   // the other neighbour
    float gap;   // 2^-24 (far - near)
  };
  Bucket buckets[kCount + 1];
  float scale, offset;
  bool taken;  // false: the list is not so, or has fewer than two values; the rest means nothing

  /// floor(kCount t), t = y scale + offset, rounded once and limited to 0 .. 1.
  int bucket(float y) const;
};

/// Buckets of a list for one rounding. Of values without zero, zero divides the neighbours on its
/// two sides.
ListBuckets list_buckets(const ValueList& list, bool stochastic);

}  // namespace replayeval
