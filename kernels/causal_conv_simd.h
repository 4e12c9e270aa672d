// Interface between causal_conv.cc and causal_conv_simd.cc.
#pragma once

#include <cstdint>

#include "base/simd_dispatch.h"

namespace replayeval {

/// Channels first .. end - 1 of `tokens` tokens. weight [taps, channels] (transposed), bias
/// [channels].
struct CausalConvBlock {
  int first = 0;
  int end = 0;
  int tokens = 0;
  int channels = 0;
  int taps = 0;
  const float* weight = nullptr;
  const float* bias = nullptr;
  bool silu = false;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
};

REPLAYEVAL_SIMD_DECLARE(void causal_conv_block(const CausalConvBlock& block))

}  // namespace replayeval
