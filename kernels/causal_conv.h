// The depthwise causal convolution in front of Mamba-2 and GDN, over tokens, with optional bias and
// SiLU.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/state_row.h"

namespace replayeval {

/// Constants of a layer's convolution.
struct CausalConv {
  int channels = 0;
  int taps = 0;                   // K
  const float* weight = nullptr;  // [channels, taps]; tap K - 1 meets the newest token
  const float* bias = nullptr;    // [channels]; null: none
  bool silu = false;
};

/// Inputs and outputs of one row. x addresses the call's first token; the K - 1 tokens before it
/// (zeros at the start of a sequence) stand before it with the same stride. y [tokens, channels]
/// must not overlap x.
struct CausalConvRow {
  int tokens = 0;
  const float* x = nullptr;  // [channels] a token
  int64_t x_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
};

/// y[t, c] = f(bias[c] + sum_k weight[c, k] x[t - (K - 1) + k, c]), f the identity or silu(s) = s /
/// (1 + 2^(-s log2(e))). The fast form starts from the bias (or 0) and adds the taps in ascending
/// order, one fused multiply-add each, so that the result depends on nothing but its K inputs: any
/// split into calls, set of rows and number of threads gives the same bits. Rows may differ in
/// length (0 is allowed). NaN and infinity propagate; silu(-inf) is NaN. The reference form sums in
/// FP64. Throws std::invalid_argument on sizes below 1, strides below `channels` and missing
/// arrays.
void causal_conv(const CausalConv& conv, std::span<const CausalConvRow> rows, KernelForm form);

}  // namespace replayeval
