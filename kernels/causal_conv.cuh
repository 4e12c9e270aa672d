// What the convolutions on the device share.
#pragma once

#include "kernels/replay_cuda.cuh"

namespace replayeval {

/// silu of kernels/causal_conv.h: s / (1 + 2^(-s log2(e))).
__device__ __forceinline__ float conv_silu(float s) {
  return s / (1.0f + exp2_ordered(s * -1.4426950408889634f));
}

}  // namespace replayeval
