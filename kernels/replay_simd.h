// Interface between replay.cc and replay_simd.cc.
#pragma once

#include "base/simd_dispatch.h"

namespace replayeval {

REPLAYEVAL_SIMD_DECLARE(void exp2_array(const float* x, int count, float* result))

}  // namespace replayeval
