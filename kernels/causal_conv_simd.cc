// Depthwise causal convolution with channels along the lanes (kernels/causal_conv.h).
#include "kernels/causal_conv_simd.h"

#include "kernels/lanes.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {
namespace {

/// The block's tokens for the 16 channels from c on, `count` of them in use.
template <bool kWhole>
REPLAYEVAL_INLINE void convolve(const CausalConvBlock& b, int c, int count) {
  const auto take = [count](const float* p) { return kWhole ? load(p) : load_part(p, count); };
  const Lanes start = b.bias ? take(b.bias + c) : splat(0.0f);
  for (int t = 0; t < b.tokens; ++t) {
    const float* x = b.x + (t - (b.taps - 1)) * b.x_stride + c;
    Lanes sum = start;
    for (int k = 0; k < b.taps; ++k) {
      sum = fma(take(b.weight + int64_t{k} * b.channels + c), take(x + k * b.x_stride), sum);
    }
    if (b.silu) {
      const Lanes decay = exp2_lanes(sum * splat(-1.4426950408889634f));
      sum = sum / (splat(1.0f) + decay);
    }
    float* y = b.y + t * b.y_stride + c;
    if (kWhole) {
      store(y, sum);
    } else {
      store_part(y, sum, count);
    }
  }
}

}  // namespace

void causal_conv_block(const CausalConvBlock& b) {
  int c = b.first;
  for (; c + kLanes <= b.end; c += kLanes) convolve<true>(b, c, kLanes);
  if (c < b.end) convolve<false>(b, c, b.end - c);
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
