// The kernels' exponential on arrays (kernels/lanes.h).
#include "kernels/replay_simd.h"

#include "kernels/lanes.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {

void exp2_array(const float* x, int count, float* result) {
  for (int i = 0; i < count; i += kLanes) {
    const int part = count - i < kLanes ? count - i : kLanes;
    store_part(result + i, exp2_lanes(load_part(x + i, part)), part);
  }
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
