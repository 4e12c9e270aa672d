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

int64_t check_steps(const char* function, WeightType activation, int rows, int heads,
                    int64_t stride) {
  if (rows < 0 || heads < 0 || (rows > 1 && stride < heads)) {
    refuse(std::string(function) + ": " + std::to_string(rows) + " rows of " +
           std::to_string(heads) + " heads, stride " + std::to_string(stride) +
           ", expected sizes of 0 or more and a stride of at least the heads");
  }
  if (activation == WeightType::fp16)
    refuse(std::string(function) + ": activations in FP16, expected FP32 or BF16");
  return int64_t{rows} * heads;
}

// ---------------------------------------------------------------- convolution

/// Element i of floats, or of BF16 codes.
template <bool kCodes>
__device__ float element(const void* values, int64_t i) {
  if constexpr (kCodes) {
    return widen_code<WeightType::bf16>(static_cast<const uint16_t*>(values)[i]);
  } else {
    return static_cast<const float*>(values)[i];
  }
}

template <bool kCodes>
__device__ Quad elements(const void* values, int64_t i) {
  if constexpr (kCodes) {
    return load_quad<WeightType::bf16>(static_cast<const uint16_t*>(values) + i, 4, true);
  } else {
    return load_quad(static_cast<const float*>(values) + i, 4, true);
  }
}
template <bool kCodes>
__device__ void set_elements(void* values, int64_t i, const Quad& q) {
  if constexpr (kCodes) {
    store_quad<WeightType::bf16>(static_cast<uint16_t*>(values) + i, q, 4, true);
  } else {
    store_quad(static_cast<float*>(values) + i, q, 4, true);
  }
}

/// Where channel c goes: its part, and its index there.
__device__ int part_of(const ConvDecodeStep& step, int* c) {
  int part = 0;
  while (*c >= step.parts[part].channels) *c -= step.parts[part++].channels;
  return part;
}

/// kCodes: x and state are BF16.
template <bool kCodes>
__global__ void __launch_bounds__(kThreads)
    convolve_token(const __grid_constant__ CausalConv conv,
                   const __grid_constant__ ConvDecodeStep step) {
  const int row = static_cast<int>(blockIdx.y);
  int c = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (c >= conv.channels || (step.position != nullptr && step.position[row] < 0)) return;
  using T = std::conditional_t<kCodes, uint16_t, float>;
  const int taps = conv.taps;
  const int64_t channels = conv.channels;
  T* state = static_cast<T*>(step.state) + row * (taps - 1) * channels + c;
  const T* newest = static_cast<const T*>(step.x) + row * step.x_stride + c;
  const float* weight = conv.weight + int64_t{c} * taps;
  float sum = conv.bias != nullptr ? conv.bias[c] : 0.0f;
  for (int k = 0; k + 1 < taps; ++k) {
    sum = __fmaf_rn(weight[k], element<kCodes>(state, k * channels), sum);
    state[k * channels] = k + 2 < taps ? state[(k + 1) * channels] : *newest;
  }
  sum = __fmaf_rn(weight[taps - 1], element<kCodes>(newest, 0), sum);
  if (conv.silu) sum = conv_silu(sum);
  const ConvPart& part = step.parts[part_of(step, &c)];
  const int64_t at = int64_t{row} * part.channels + c;
  if (step.type == RecordType::bf16) {
    static_cast<uint16_t*>(part.to)[at] = static_cast<uint16_t>(bf16_code(sum));
  } else {
    static_cast<float*>(part.to)[at] = sum;
  }
}

/// Four channels a thread, kTaps taps; everything starts on multiples of four elements.
template <bool kCodes>
__global__ void __launch_bounds__(kThreads)
    convolve_quads(const __grid_constant__ CausalConv conv,
                   const __grid_constant__ ConvDecodeStep step) {
  const int row = static_cast<int>(blockIdx.y);
  int c = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * 4;
  if (c >= conv.channels || (step.position != nullptr && step.position[row] < 0)) return;
  const int64_t channels = conv.channels, first = row * (kTaps - 1) * channels + c;
  Quad seen[kTaps], w[4], sum = {};
#pragma unroll
  for (int k = 0; k + 1 < kTaps; ++k) seen[k] = elements<kCodes>(step.state, first + k * channels);
  seen[kTaps - 1] = elements<kCodes>(step.x, row * step.x_stride + c);
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = load_quad(conv.weight + int64_t{c + i} * kTaps, 4, true);
  if (conv.bias != nullptr) sum = load_quad(conv.bias + c, 4, true);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) sum.v[i] = __fmaf_rn(w[i].v[k], seen[k].v[i], sum.v[i]);
    if (conv.silu) sum.v[i] = conv_silu(sum.v[i]);
  }
#pragma unroll
  for (int k = 0; k + 1 < kTaps; ++k)
    set_elements<kCodes>(step.state, first + k * channels, seen[k + 1]);
  const ConvPart& part = step.parts[part_of(step, &c)];
  const int64_t at = int64_t{row} * part.channels + c;
  if (step.type == RecordType::bf16) {
    set_elements<true>(part.to, at, sum);
  } else {
    set_elements<false>(part.to, at, sum);
  }
}

/// Whether convolve_quads serves.
bool in_quads(const CausalConv& conv, const ConvDecodeStep& step) {
  const auto on = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  const auto element_bytes = [](RecordType type) -> uintptr_t {
    return type == RecordType::bf16 ? 2 : 4;
  };
  const uintptr_t four = 4 * element_bytes(step.x_type);
  for (const ConvPart& part : step.parts) {
    if (part.channels % 4 != 0 || !on(part.to, 4 * element_bytes(step.type))) return false;
  }
  return conv.taps == kTaps && step.x_stride % 4 == 0 && on(step.x, four) && on(step.state, four) &&
         on(conv.weight, 16) && on(conv.bias, 16);
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

// ---------------------------------------------------------------- scalars

template <WeightType Type>
__global__ void __launch_bounds__(kThreads)
    mamba2_steps(const void* x, int64_t x_stride, const float* bias, float low, float high,
                 int64_t n, int heads, float* dt) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t row = i / heads;
  const int h = static_cast<int>(i - row * heads);
  const float from = element<Type == WeightType::bf16>(x, row * x_stride + h);
  const float step =
      rounded<Type>(apply<Activation::softplus>(bias ? rounded<Type>(from + bias[h]) : from));
  const float above = step < low ? low : step;
  dt[i] = high < above ? high : above;
}

template <WeightType Type>
__global__ void __launch_bounds__(kThreads)
    gdn_steps(GdnStepScalars in, int64_t n, int heads, float* decay, float* beta) {
  constexpr float kLog2E = 1.44269504088896340736F;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t row = i / heads;
  const int h = static_cast<int>(i - row * heads);
  const float a = element<Type == WeightType::bf16>(in.a, row * in.stride + h);
  const float step = apply<Activation::softplus>(in.bias ? a + in.bias[h] : a);
  decay[i] = -(in.a_exp[h] * step) * kLog2E;
  beta[i] =
      apply<Activation::sigmoid>(element<Type == WeightType::bf16>(in.b, row * in.stride + h));
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
  const bool codes = step.x_type == RecordType::bf16, quads = in_quads(conv, step);
  const dim3 grid(blocks_of("conv_decode", quads ? conv.channels / 4 : conv.channels, kThreads),
                  static_cast<unsigned>(step.rows));
  const auto kernel = quads ? (codes ? convolve_quads<true> : convolve_quads<false>)
                            : (codes ? convolve_token<true> : convolve_token<false>);
  kernel<<<grid, kThreads, 0, stream>>>(conv, step);
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

void mamba2_steps_cuda(WeightType activation, const void* x, int64_t x_stride, const float* bias,
                       float low, float high, int rows, int heads, float* dt, CudaStream stream) {
  const int64_t n = check_steps("mamba2_steps", activation, rows, heads, x_stride);
  if (n == 0) return;
  if (x == nullptr || dt == nullptr) refuse("mamba2_steps: x or dt is null, expected arrays");
  const auto kernel = activation == WeightType::bf16 ? mamba2_steps<WeightType::bf16>
                                                     : mamba2_steps<WeightType::fp32>;
  kernel<<<blocks_of("mamba2_steps", n, kThreads), kThreads, 0, stream>>>(x, x_stride, bias, low,
                                                                          high, n, heads, dt);
  CUDA_CHECK(cudaGetLastError());
}

void gdn_steps_cuda(const GdnStepScalars& inputs, int rows, int heads, float* decay_log2,
                    float* beta, CudaStream stream) {
  const int64_t n = check_steps("gdn_steps", inputs.activation, rows, heads, inputs.stride);
  if (n == 0) return;
  if (inputs.a == nullptr || inputs.b == nullptr || inputs.a_exp == nullptr ||
      decay_log2 == nullptr || beta == nullptr) {
    refuse("gdn_steps: a, b, a_exp, decay_log2 or beta is null, expected arrays");
  }
  const auto kernel = inputs.activation == WeightType::bf16 ? gdn_steps<WeightType::bf16>
                                                            : gdn_steps<WeightType::fp32>;
  kernel<<<blocks_of("gdn_steps", n, kThreads), kThreads, 0, stream>>>(inputs, n, heads, decay_log2,
                                                                       beta);
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
