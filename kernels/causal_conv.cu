// One channel a thread, a tile of tokens a block; the taps of a channel stay in registers.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/causal_conv.cuh"
#include "kernels/causal_conv_cuda.h"

namespace replayeval {
namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 32;

/// kTaps: their number, or 0 for any.
template <int kTaps>
__global__ void __launch_bounds__(kThreads) convolve(CausalConv conv, const CausalConvRow* rows) {
  const CausalConvRow& row = rows[blockIdx.z];
  const int c = blockIdx.x * kThreads + threadIdx.x;
  const int first = blockIdx.y * kTokens, last = min(first + kTokens, row.tokens);
  if (c >= conv.channels) return;
  const int taps = kTaps > 0 ? kTaps : conv.taps;
  const float* weight = conv.weight + int64_t{c} * taps;
  const float bias = conv.bias ? conv.bias[c] : 0.0f;
  const auto finish = [&](float sum, int t) {
    row.y[t * row.y_stride + c] = conv.silu ? conv_silu(sum) : sum;
  };
  const float* x = row.x + c;
  if constexpr (kTaps > 0) {
    float w[kTaps], seen[kTaps];
    for (int k = 0; k < kTaps; ++k) w[k] = weight[k];
    if (first < last) {
      for (int k = 1; k < kTaps; ++k) seen[k] = x[(first - kTaps + k) * row.x_stride];
    }
    for (int t = first; t < last; ++t) {
#pragma unroll
      for (int k = 0; k + 1 < kTaps; ++k) seen[k] = seen[k + 1];
      seen[kTaps - 1] = x[t * row.x_stride];
      float sum = bias;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) sum = __fmaf_rn(w[k], seen[k], sum);
      finish(sum, t);
    }
  } else {
    for (int t = first; t < last; ++t) {
      float sum = bias;
      for (int k = 0; k < taps; ++k)
        sum = __fmaf_rn(weight[k], x[(t - (taps - 1) + k) * row.x_stride], sum);
      finish(sum, t);
    }
  }
}

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("causal_conv: " + message);
}

}  // namespace

void causal_conv_cuda(const CausalConv& conv, std::span<const CausalConvRow> rows,
                      CudaStream stream) {
  if (conv.channels < 1 || conv.taps < 1) {
    refuse("channels " + std::to_string(conv.channels) + ", taps " + std::to_string(conv.taps) +
           ", expected at least 1 each");
  }
  if (!conv.weight) refuse("weight is null, expected [channels, taps]");
  int most = 0;
  for (const CausalConvRow& row : rows) {
    if (row.tokens < 0) refuse("tokens is " + std::to_string(row.tokens) + ", expected at least 0");
    if (row.tokens == 0) continue;
    if (!row.x || !row.y) refuse("x or y is null, expected arrays");
    if (row.x_stride < conv.channels || row.y_stride < conv.channels) {
      refuse("a stride below channels " + std::to_string(conv.channels));
    }
    most = std::max(most, row.tokens);
  }
  if (most == 0) return;
  CallTables tables(stream);
  const size_t at = tables.add(rows);
  tables.upload();
  const dim3 grid(static_cast<unsigned>((conv.channels + kThreads - 1) / kThreads),
                  static_cast<unsigned>((most + kTokens - 1) / kTokens),
                  static_cast<unsigned>(rows.size()));
  const CausalConvRow* on_device = tables.table<const CausalConvRow>(at);
  if (conv.taps == 4) {
    convolve<4><<<grid, kThreads, 0, stream>>>(conv, on_device);
  } else {
    convolve<0><<<grid, kThreads, 0, stream>>>(conv, on_device);
  }
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
