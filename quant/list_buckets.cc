#include "quant/list_buckets.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace replayeval {

int ListBuckets::bucket(float y) const {
  const float t = std::min(std::max(std::fma(y, scale, offset), 0.0f), 1.0f);
  return static_cast<int>(static_cast<double>(t) * kCount);
}

ListBuckets list_buckets(const ValueList& list, bool stochastic) {
  ListBuckets all{};
  if (list.count < 2) return all;
  const float* values = list.values;
  // Gap i lies between dividers i - 1 and i.
  float dividers[kMaxValues + 1];
  ListBuckets::Bucket gaps[kMaxValues + 1];
  int count = 0;  // of dividers
  const auto add_gap = [&](float near, float far, float end) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    gaps[count] = {nan, near, far, (far - near) * 0x1p-24f};
    dividers[count++] = end;
  };
  const int gap_count = stochastic ? list.count - 1 : list.count;
  for (int i = 0; i < gap_count; ++i) {
    const float value = values[i], next = values[std::min(i + 1, list.count - 1)];
    if (!stochastic) {
      add_gap(value, value, list.thresholds[i]);
    } else {
      if (value < 0) add_gap(next, value, next > 0 ? 0.0f : next);
      if (next > 0) add_gap(value, next, next);
    }
  }
  --count;  // the last gap has no end
  // The first divider begins bucket 0, the last lies in the middle of the last bucket.
  const float range = count > 1 ? dividers[count - 1] - dividers[0] : 0.0f;
  constexpr float kMiddle = (ListBuckets::kCount - 0.5f) / ListBuckets::kCount;
  all.scale = range > 0 ? kMiddle / range : 1.0f;
  all.offset = count > 0 ? -dividers[0] * all.scale : 0.0f;
  if (all.scale > kFloatMax) return all;
  int gap = 0;
  for (int i = 0; i <= ListBuckets::kCount; ++i) {
    all.buckets[i] = gaps[gap];
    if (i == ListBuckets::kCount || gap == count || all.bucket(dividers[gap]) != i) continue;
    all.buckets[i].divider = dividers[gap++];
  }
  all.taken = gap == count;
  return all;
}

}  // namespace replayeval
