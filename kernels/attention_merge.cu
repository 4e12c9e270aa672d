// A thread merges four dimensions of a head and token.
#include <cuda_bf16.h>

#include <stdexcept>
#include <string>

#include "kernels/attention_merge_cuda.h"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

constexpr int kThreads = 256;

struct Merge {
  AttentionPart parts[kMostAttentionParts];
  int count;
  int64_t tokens;
  int heads, head_dim;
  float* y;
  int64_t y_stride;
};

__global__ void __launch_bounds__(kThreads) merge_parts(const __grid_constant__ Merge merge) {
  const int quads = merge.head_dim / 4;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= merge.tokens * merge.heads * quads) return;
  const int64_t token = i / (merge.heads * quads);
  const int head = static_cast<int>(i / quads % merge.heads);
  const int column = static_cast<int>(i % quads) * 4;
  const int64_t sums = head * merge.tokens + token;
  float largest = merge.parts[0].lse[sums];
  for (int p = 1; p < merge.count; ++p) largest = fmaxf(largest, merge.parts[p].lse[sums]);
  float total = 0.0f;
  float y[4] = {};
  for (int p = 0; p < merge.count; ++p) {
    const AttentionPart& part = merge.parts[p];
    const float w = expf(part.lse[sums] - largest);
    const auto* out = static_cast<const __nv_bfloat16*>(part.out) + token * part.token_stride +
                      head * part.head_stride + column;
    total += w;
#pragma unroll
    for (int k = 0; k < 4; ++k) y[k] = __fmaf_rn(w, __bfloat162float(out[k]), y[k]);
  }
  float* to = merge.y + token * merge.y_stride + head * merge.head_dim + column;
#pragma unroll
  for (int k = 0; k < 4; ++k) to[k] = y[k] / total;
}

}  // namespace

void merge_attention_cuda(std::span<const AttentionPart> parts, int64_t tokens, int heads,
                          int head_dim, float* y, int64_t y_stride, CudaStream stream) {
  if (parts.empty() || parts.size() > kMostAttentionParts || head_dim % 4 != 0) {
    throw std::invalid_argument("merge attention: " + std::to_string(parts.size()) +
                                " parts of head_dim " + std::to_string(head_dim) +
                                ", expected 1 to " + std::to_string(kMostAttentionParts) +
                                " and a multiple of 4");
  }
  Merge merge{{}, static_cast<int>(parts.size()), tokens, heads, head_dim, y, y_stride};
  for (size_t p = 0; p < parts.size(); ++p) merge.parts[p] = parts[p];
  const int64_t threads = tokens * heads * (head_dim / 4);
  if (threads == 0) return;
  merge_parts<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      merge);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
