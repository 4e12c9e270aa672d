// A channel, or four neighbouring ones, a thread; greedy choices take a block a row.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/causal_conv.cuh"
#include "kernels/decode_inputs_cuda.h"
#include "kernels/rotary.cuh"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

constexpr int kThreads = 128;
constexpr int kChooseThreads = 1024;
constexpr int kTaps = 4;  // that lie in registers

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check_rows(const char* function, int64_t rows) {
  if (rows < 0 || rows > 65535) {
    refuse(std::string(function) + ": " + std::to_string(rows) + " rows, expected 0 to 65535");
  }
}

unsigned blocks_of(const char* function, int64_t items, int threads) {
  const int64_t blocks = ceil_div(items, threads);
  if (blocks > INT32_MAX) {
    refuse(std::string(function) + ": " + std::to_string(items) + " numbers, expected fewer");
  }
  return static_cast<unsigned>(blocks);
}

// ---------------------------------------------------------------- convolution

/// kFixed: taps are kTaps and the weights start on multiples of 16 bytes.
template <bool kFixed>
__global__ void __launch_bounds__(kThreads)
    convolve_token(const __grid_constant__ CausalConv conv,
                   const __grid_constant__ ConvDecodeStep step) {
  const int row = static_cast<int>(blockIdx.y);
  const int c = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (c >= conv.channels || (step.position != nullptr && step.position[row] < 0)) return;
  const int taps = kFixed ? kTaps : conv.taps;
  const int64_t channels = conv.channels;
  float* state = step.state + row * (taps - 1) * channels + c;
  const float newest = step.x[row * step.x_stride + c];
  float sum = conv.bias != nullptr ? conv.bias[c] : 0.0f;
  if constexpr (kFixed) {
    const Quad w = load_quad(conv.weight + int64_t{c} * kTaps, 4, true);
    float seen[kTaps];
#pragma unroll
    for (int k = 0; k + 1 < kTaps; ++k) seen[k] = state[k * channels];
    seen[kTaps - 1] = newest;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) sum = __fmaf_rn(w.v[k], seen[k], sum);
#pragma unroll
    for (int k = 0; k + 1 < kTaps; ++k) state[k * channels] = seen[k + 1];
  } else {
    const float* weight = conv.weight + int64_t{c} * taps;
    for (int k = 0; k + 1 < taps; ++k) {
      sum = __fmaf_rn(weight[k], state[k * channels], sum);
      state[k * channels] = k + 2 < taps ? state[(k + 1) * channels] : newest;
    }
    sum = __fmaf_rn(weight[taps - 1], newest, sum);
  }
  if (conv.silu) sum = conv_silu(sum);
  int first = 0, part = 0;
  while (c >= first + step.parts[part].channels) first += step.parts[part++].channels;
  const int64_t at = int64_t{row} * step.parts[part].channels + (c - first);
  if (step.type == RecordType::bf16) {
    static_cast<uint16_t*>(step.parts[part].to)[at] = static_cast<uint16_t>(bf16_code(sum));
  } else {
    static_cast<float*>(step.parts[part].to)[at] = sum;
  }
}

// ---------------------------------------------------------------- rotary embedding

struct Rotation {
  float* x;
  int64_t stride;
  int heads, head_dim, half;
  const float *cos, *sin;
  const int64_t* position;
  bool vector, vector_half;  // heads, and halves and tables, start on multiples of 16 bytes
};

template <WeightType Type>
__global__ void __launch_bounds__(kThreads) rotate_heads(Rotation call) {
  const int row = static_cast<int>(blockIdx.y);
  const int64_t position = call.position[row];
  const int quads = (call.half + 3) / 4;
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int head = index / quads, c = index % quads * 4;
  if (position < 0 || head >= call.heads) return;
  const int n = min(4, call.half - c);
  float* low = call.x + row * call.stride + int64_t{head} * call.head_dim + c;
  float* high = low + call.half;
  Quad a = load_quad(low, n, call.vector), b = load_quad(high, n, call.vector_half);
  rotate<Type>(&a, &b, load_quad(call.cos + position * call.half + c, n, call.vector_half),
               load_quad(call.sin + position * call.half + c, n, call.vector_half));
  store_quad(low, a, n, call.vector);
  store_quad(high, b, n, call.vector_half);
}

// ---------------------------------------------------------------- scalars and records

__global__ void __launch_bounds__(kThreads)
    decay_exponents(const float* a, const float* a_exp, int64_t n, int heads, float* decay) {
  constexpr float kLog2E = 1.44269504088896340736F;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) decay[i] = -(a_exp[i % heads] * a[i]) * kLog2E;
}

__global__ void __launch_bounds__(kThreads)
    widen_codes(const uint16_t* x, int64_t n, float* out, bool vector) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 4;
  if (i >= n) return;
  const int count = static_cast<int>(min(int64_t{4}, n - i));
  store_quad(out + i, load_quad<WeightType::bf16>(x + i, count, vector), count, vector);
}

// ---------------------------------------------------------------- greedy choice

/// The largest logit, the lowest token that has it, and the largest of the others.
struct Best {
  float first = -INFINITY, second = -INFINITY;
  int32_t token = INT32_MAX;

  /// A token above all that were offered before.
  __device__ void offer(float x, int32_t id) {
    const bool larger = x > first;
    second = larger ? first : x > second ? x : second;
    token = larger ? id : token;
    first = larger ? x : first;
  }
  __device__ void merge(float other_first, float other_second, int32_t other_token) {
    const bool larger = other_first > first || (other_first == first && other_token < token);
    const float lower = larger ? first : other_first;
    const float rest = larger ? other_second : second;
    second = lower > rest ? lower : rest;
    token = larger ? other_token : token;
    first = larger ? other_first : first;
  }
  __device__ void merge_warp() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      merge(__shfl_down_sync(0xFFFFFFFFu, first, distance),
            __shfl_down_sync(0xFFFFFFFFu, second, distance),
            __shfl_down_sync(0xFFFFFFFFu, token, distance));
    }
  }
};

__global__ void __launch_bounds__(kChooseThreads)
    choose_rows(const float* logits, int64_t stride, int vocabulary, bool vector, int32_t* token,
                float* margin) {
  constexpr int kWarps = kChooseThreads / 32;
  __shared__ float first[kWarps], second[kWarps];
  __shared__ int32_t tokens[kWarps];
  const int64_t row = blockIdx.x;
  const float* from = logits + row * stride;
  const int thread = static_cast<int>(threadIdx.x);
  Best best;
#pragma unroll 4
  for (int v = thread * 4; v < vocabulary; v += kChooseThreads * 4) {
    const int n = min(4, vocabulary - v);
    const Quad x = load_quad(from + v, n, vector);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < n) best.offer(x.v[i], v + i);
    }
  }
  best.merge_warp();
  if (thread % 32 == 0) {
    first[thread / 32] = best.first;
    second[thread / 32] = best.second;
    tokens[thread / 32] = best.token;
  }
  __syncthreads();
  if (thread >= 32) return;
  best = {};
  if (thread < kWarps) best.merge(first[thread], second[thread], tokens[thread]);
  best.merge_warp();
  if (thread > 0) return;
  token[row] = best.first > -INFINITY ? best.token : -1;
  if (margin == nullptr) return;
  const bool finite = fabsf(best.first) < INFINITY && fabsf(best.second) < INFINITY;
  margin[row] = finite ? best.first - best.second : NAN;
}

}  // namespace

void conv_decode_cuda(const CausalConv& conv, const ConvDecodeStep& step, CudaStream stream) {
  const char* place = "conv_decode: ";
  if (conv.channels < 1 || conv.taps < 1) {
    refuse(place + ("channels " + std::to_string(conv.channels)) + ", taps " +
           std::to_string(conv.taps) + ", expected at least 1 each");
  }
  check_rows("conv_decode", step.rows);
  int64_t covered = 0;
  for (const ConvPart& part : step.parts) {
    if (part.channels < 0 || (part.channels > 0 && part.to == nullptr))
      refuse(place + std::string("a part without an array, or of negative size"));
    covered += part.channels;
  }
  if (covered != conv.channels) {
    refuse(place + ("parts of " + std::to_string(covered)) + " channels, expected " +
           std::to_string(conv.channels));
  }
  if (step.rows == 0) return;
  if (conv.weight == nullptr || step.x == nullptr || (conv.taps > 1 && step.state == nullptr))
    refuse(place + std::string("weight, x or state is null, expected arrays"));
  if (step.rows > 1 && step.x_stride < conv.channels) {
    refuse(place + ("x has stride " + std::to_string(step.x_stride)) + ", expected at least " +
           std::to_string(conv.channels) + " (channels)");
  }
  const dim3 grid(blocks_of("conv_decode", conv.channels, kThreads),
                  static_cast<unsigned>(step.rows));
  if (conv.taps == kTaps && reinterpret_cast<uintptr_t>(conv.weight) % 16 == 0) {
    convolve_token<true><<<grid, kThreads, 0, stream>>>(conv, step);
  } else {
    convolve_token<false><<<grid, kThreads, 0, stream>>>(conv, step);
  }
  CUDA_CHECK(cudaGetLastError());
}

void rotary_decode_cuda(float* x, int64_t stride, int rows, int heads, int head_dim, int dims,
                        const float* cos, const float* sin, const int64_t* position,
                        WeightType activation, CudaStream stream) {
  if (dims < 0 || dims % 2 != 0 || dims > head_dim) {
    refuse("rotary: " + std::to_string(dims) + " dimensions of a head of " +
           std::to_string(head_dim) + ", expected an even number of at most that");
  }
  check_rows("rotary", rows);
  if (heads < 0 || (rows > 1 && stride < int64_t{heads} * head_dim)) {
    refuse("rotary: " + std::to_string(heads) + " heads, stride " + std::to_string(stride) +
           ", expected at least " + std::to_string(int64_t{heads} * head_dim));
  }
  if (rows == 0 || heads == 0 || dims == 0) return;
  if (x == nullptr || cos == nullptr || sin == nullptr || position == nullptr)
    refuse("rotary: x, cos, sin or position is null, expected arrays");
  const int half = dims / 2;
  const bool vector =
      reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 4 == 0 && head_dim % 4 == 0;
  const bool tables =
      (reinterpret_cast<uintptr_t>(cos) | reinterpret_cast<uintptr_t>(sin)) % 16 == 0;
  const Rotation call{x,   stride, heads,    head_dim, half,
                      cos, sin,    position, vector,   vector && tables && half % 4 == 0};
  const dim3 grid(blocks_of("rotary", heads * ceil_div(half, 4), kThreads),
                  static_cast<unsigned>(rows));
  if (activation == WeightType::fp32) {
    rotate_heads<WeightType::fp32><<<grid, kThreads, 0, stream>>>(call);
  } else if (activation == WeightType::bf16) {
    rotate_heads<WeightType::bf16><<<grid, kThreads, 0, stream>>>(call);
  } else {
    rotate_heads<WeightType::fp16><<<grid, kThreads, 0, stream>>>(call);
  }
  CUDA_CHECK(cudaGetLastError());
}

void gdn_decay_cuda(const float* a, const float* a_exp, int64_t rows, int heads, float* decay_log2,
                    CudaStream stream) {
  if (rows < 0 || heads < 0) {
    refuse("gdn_decay: " + std::to_string(rows) + " rows of " + std::to_string(heads) +
           " heads, expected sizes of 0 or more");
  }
  const int64_t n = rows * heads;
  if (n == 0) return;
  decay_exponents<<<blocks_of("gdn_decay", n, kThreads), kThreads, 0, stream>>>(a, a_exp, n, heads,
                                                                                decay_log2);
  CUDA_CHECK(cudaGetLastError());
}

void widen_records_cuda(RecordType type, const void* x, int64_t n, float* out, CudaStream stream) {
  if (n < 0) refuse("widen_records: " + std::to_string(n) + " numbers, expected 0 or more");
  if (n == 0) return;
  if (type == RecordType::fp32) {
    device_copy(out, x, static_cast<size_t>(n) * sizeof(float), stream);
    return;
  }
  const bool vector =
      reinterpret_cast<uintptr_t>(x) % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  widen_codes<<<blocks_of("widen_records", ceil_div(n, 4), kThreads), kThreads, 0, stream>>>(
      static_cast<const uint16_t*>(x), n, out, vector);
  CUDA_CHECK(cudaGetLastError());
}

void choose_greedy_cuda(const float* logits, int64_t stride, int rows, int64_t vocabulary,
                        int32_t* token, float* margin, CudaStream stream) {
  if (rows < 0 || vocabulary < 1 || vocabulary > INT32_MAX - 4 * kChooseThreads ||
      (rows > 1 && stride < vocabulary)) {
    refuse("choose_greedy: " + std::to_string(rows) + " rows of " + std::to_string(vocabulary) +
           " logits, stride " + std::to_string(stride) +
           ", expected a vocabulary of 1 or more and a stride of at least that");
  }
  if (rows == 0) return;
  if (logits == nullptr || token == nullptr)
    refuse("choose_greedy: logits or token is null, expected arrays");
  const bool vector =
      reinterpret_cast<uintptr_t>(logits) % 16 == 0 && (stride % 4 == 0 || rows == 1);
  choose_rows<<<static_cast<unsigned>(rows), kChooseThreads, 0, stream>>>(
      logits, stride, static_cast<int>(vocabulary), vector, token, margin);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
