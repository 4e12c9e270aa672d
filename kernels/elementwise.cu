// Four neighbouring values a thread, any number of rows a launch. The norms and the softmax keep
// the host's sixteen partial sums: lane i takes elements i, i + 16, ... in turn.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/elementwise_cuda.h"
#include "kernels/math_cuda.cuh"
#include "kernels/rotary.cuh"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

constexpr int kThreads = 256;
constexpr size_t kNormBytes = 96 << 10;  // of shared memory for a group
constexpr int kNormThreads = 512;        // at most, of a block that takes one group
constexpr int kOwnQuads = 4;             // of a group in a thread's registers
constexpr float kLog2E = 1.44269504088896340736F;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// FP32 values, or BF16 codes.
__device__ Quad load_values(const float* p, int n, bool vector) { return load_quad(p, n, vector); }
__device__ Quad load_values(const uint16_t* p, int n, bool vector) {
  return load_quad<WeightType::bf16>(p, n, vector);
}
__device__ void store_values(float* p, const Quad& q, int n, bool vector) {
  store_quad(p, q, n, vector);
}
__device__ void store_values(uint16_t* p, const Quad& q, int n, bool vector) {
  store_quad<WeightType::bf16>(p, q, n, vector);
}

/// Rows of values, `stride` apart; `vector`: each starts on a multiple of four elements'
/// bytes.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;
  bool vector = false;

  Rows(T* values, int64_t row_stride)
      : data(values),
        stride(row_stride),
        vector(reinterpret_cast<uintptr_t>(values) % (4 * sizeof(T)) == 0 && row_stride % 4 == 0) {}
  __device__ T* at(int64_t row, int64_t c) const { return data + row * stride + c; }
  __device__ Quad load(int64_t row, int64_t c, int n) const {
    return load_values(at(row, c), n, vector);
  }
};
using In = Rows<const float>;
using Out = Rows<float>;

template <class T>
__device__ void store(const Rows<T>& y, int64_t row, int64_t c, const Quad& q, int n) {
  store_values(y.at(row, c), q, n, y.vector);
}

template <class Body>
__global__ void __launch_bounds__(kThreads)
    each_quad(uint32_t quads, uint32_t row_quads, int64_t first_row, int64_t cols, Body body) {
  const uint32_t q = blockIdx.x * kThreads + threadIdx.x;
  if (q >= quads) return;
  const uint32_t row = q / row_quads;
  const int64_t c = int64_t{q - row * row_quads} * 4;
  body(first_row + row, c, static_cast<int>(cols - c < 4 ? cols - c : 4));
}

/// body(row, c, n) for columns c .. c + n - 1, n <= 4, of every row.
template <class Body>
void for_quads(int64_t rows, int64_t cols, const Body& body, cudaStream_t stream) {
  if (rows <= 0 || cols <= 0) return;
  const int64_t row_quads = ceil_div(cols, 4);
  const int64_t most = std::max<int64_t>(1, (int64_t{1} << 30) / row_quads);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t quads = std::min(most, rows - first) * row_quads;
    each_quad<<<static_cast<unsigned>(ceil_div(quads, kThreads)), kThreads, 0, stream>>>(
        static_cast<uint32_t>(quads), static_cast<uint32_t>(row_quads), first, cols, body);
  }
  CUDA_CHECK(cudaGetLastError());
}

template <auto Value>
using Constant = std::integral_constant<decltype(Value), Value>;

/// body(Constant<type>) for the run-time type.
template <class Body>
void with_type(WeightType type, Body body) {
  if (type == WeightType::fp32) body(Constant<WeightType::fp32>());
  if (type == WeightType::bf16) body(Constant<WeightType::bf16>());
  if (type == WeightType::fp16) body(Constant<WeightType::fp16>());
}
template <class Body>
void with_function(Activation f, WeightType type, Body body) {
  with_type(type, [&](auto constant) {
    if (f == Activation::silu) body(Constant<Activation::silu>(), constant);
    if (f == Activation::relu2) body(Constant<Activation::relu2>(), constant);
    if (f == Activation::sigmoid) body(Constant<Activation::sigmoid>(), constant);
    if (f == Activation::softplus) body(Constant<Activation::softplus>(), constant);
  });
}

// ---------------------------------------------------------------- norms

/// What a norm does to each value. Elements of x, of the gate and of y are floats or BF16 codes.
template <class X, class G, class Y>
struct NormPlan {
  Rows<X> x;
  Rows<const G> gate;
  Rows<Y> y;
  const float* weight;
  int64_t weight_size, group;
  float eps;
  bool gate_before, one_plus, norm_first, round_steps, vector_weight;
  bool adds = false;      // x is a residual stream: the gate's array is added to it first
  bool adds_fp32 = true;  // without rounding
};

/// A value of x with the gate's that belongs to it, and the weight's.
struct NormQuad {
  Quad x, gate, weight;
};

template <bool kWhole, class T>
__device__ Quad load_some(const Rows<T>& from, int64_t row, int64_t c, int n) {
  return kWhole ? load_values(from.at(row, c), 4, true) : from.load(row, c, n);
}

/// kWhole: everything starts on multiples of four elements and n is at least 4. Columns c .. of the
/// row, of which c_in_weight .. of the weight.
template <bool kWhole, class X, class G, class Y>
__device__ NormQuad load_norm(const NormPlan<X, G, Y>& plan, int64_t row, int64_t c,
                              int64_t c_in_weight, int n) {
  NormQuad q = {};
  q.x = load_some<kWhole>(plan.x, row, c, n);
  if (plan.gate.data != nullptr) q.gate = load_some<kWhole>(plan.gate, row, c, n);
  q.weight = kWhole ? load_quad(plan.weight + c_in_weight, 4, true)
                    : load_quad(plan.weight + c_in_weight, n, plan.vector_weight);
  return q;
}

/// What is squared: x, gated or with what is added to the stream.
template <WeightType Type, class X, class G, class Y>
__device__ void combine(const NormPlan<X, G, Y>& plan, NormQuad* q) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& x = q->x.v[i];
    const float gate = q->gate.v[i];
    if (plan.gate_before) x = x * silu_ordered(gate);
    if (!plan.adds) continue;
    x = plan.adds_fp32 ? x + gate : rounded<Type>(x + rounded<Type>(gate));
  }
}

/// The sum goes back to the residual stream.
template <bool kWhole, class X, class G, class Y>
__device__ void keep_sum(const NormPlan<X, G, Y>& plan, int64_t row, int64_t c, const NormQuad& q,
                         int n) {
  if constexpr (!std::is_const_v<X>) {
    if (plan.adds) store_values(plan.x.at(row, c), q.x, kWhole ? 4 : n, kWhole || plan.x.vector);
  }
}

/// q.x times the inverse root times the weight.
template <WeightType Type, bool kWhole, class X, class G, class Y>
__device__ void norm_output(const NormPlan<X, G, Y>& plan, int64_t row, int64_t c,
                            const NormQuad& q, float inverse, int n) {
  Quad value;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value.v[i] = q.x.v[i] * inverse;
    if (plan.round_steps) value.v[i] = rounded<Type>(value.v[i]);
    value.v[i] = value.v[i] * (plan.one_plus ? q.weight.v[i] + 1.0F : q.weight.v[i]);
  }
  if (plan.norm_first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (plan.round_steps) value.v[i] = rounded<Type>(value.v[i]);
      value.v[i] = value.v[i] * silu_ordered(q.gate.v[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) value.v[i] = rounded<Type>(value.v[i]);
  store_values(plan.y.at(row, c), value, kWhole ? 4 : n, kWhole || plan.y.vector);
}

__device__ float inverse_root(float squares, int64_t group, float eps) {
  return 1.0F / __fsqrt_rn(squares / static_cast<float>(group) + eps);
}

/// A group of at most 16 kSteps columns for each four neighbouring threads, its values in
/// registers.
template <WeightType Type, int kSteps, bool kWhole, class X, class G, class Y>
__global__ void __launch_bounds__(kThreads)
    norm_small(NormPlan<X, G, Y> plan, uint32_t groups, uint32_t row_groups) {
  const uint32_t index = blockIdx.x * (kThreads / 4) + threadIdx.x / 4;
  const uint32_t own = index < groups ? index : groups - 1;  // the whole warp joins in the sums
  const uint32_t row = own / row_groups;
  const int group = static_cast<int>(plan.group);
  const int64_t first = int64_t{own - row * row_groups} * group;
  const int64_t weight_first = first % plan.weight_size;
  const int lane = static_cast<int>(threadIdx.x % 4) * 4;
  Quad input[kSteps];
  Quad squares = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step * 16 + lane;
    if (kWhole && c >= group) {
      input[step] = {};
      continue;
    }
    NormQuad q = {};
    q.x = load_some<kWhole>(plan.x, row, first + c, group - c);
    if (plan.gate_before || plan.adds)
      q.gate = load_some<kWhole>(plan.gate, row, first + c, group - c);
    combine<Type>(plan, &q);
    if (index < groups && c < group) keep_sum<kWhole>(plan, row, first + c, q, group - c);
    input[step] = q.x;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      squares.v[i] = __fmaf_rn(input[step].v[i], input[step].v[i], squares.v[i]);
  }
  const float inverse = inverse_root(sum_over_four(squares), plan.group, plan.eps);
  if (index >= groups) return;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step * 16 + lane;
    if (c >= group) continue;
    NormQuad q = {};
    q.x = input[step];
    if (plan.norm_first) q.gate = load_some<kWhole>(plan.gate, row, first + c, group - c);
    q.weight = kWhole ? load_quad(plan.weight + weight_first + c, 4, true)
                      : load_quad(plan.weight + weight_first + c, group - c, plan.vector_weight);
    norm_output<Type, kWhole>(plan, row, first + c, q, inverse, group - c);
  }
}

/// The inverse root of the squares of `count` values, of which value(c) is one, in thread 0.
template <class Value>
__device__ float inverse_of(int count, int64_t group, float eps, Value value) {
  float squares = 0;
#pragma unroll 16
  for (int c = static_cast<int>(threadIdx.x); c < count; c += 16) {
    const float x = value(c);
    squares = __fmaf_rn(x, x, squares);
  }
  return inverse_root(sum_over_sixteen(squares, 0xFFFFu), group, eps);
}

/// A group a block, at most kOwnQuads quads a thread, which stay in registers. The values pass
/// through shared memory to the sixteen threads that sum.
template <WeightType Type, bool kWhole, class X, class G, class Y>
__global__ void __launch_bounds__(kNormThreads)
    norm_block(NormPlan<X, G, Y> plan, uint32_t row_groups) {
  extern __shared__ float4 memory[];
  float* values = reinterpret_cast<float*>(memory);
  __shared__ float inverse_of_block;
  const uint32_t row = blockIdx.x / row_groups;
  const int64_t first = int64_t{blockIdx.x - row * row_groups} * plan.group;
  const int64_t weight_first = first % plan.weight_size;
  const int group = static_cast<int>(plan.group);
  const int padded = (group + 15) / 16 * 16;
  const auto column = [&](int i) {
    return 4 * static_cast<int>(threadIdx.x + static_cast<unsigned>(i) * blockDim.x);
  };
  NormQuad own[kOwnQuads];
#pragma unroll
  for (int i = 0; i < kOwnQuads; ++i) {
    const int c = column(i);
    own[i] = {};
    if (c < group) own[i] = load_norm<kWhole>(plan, row, first + c, weight_first + c, group - c);
  }
#pragma unroll
  for (int i = 0; i < kOwnQuads; ++i) {
    const int c = column(i);
    if (c >= padded) continue;
    combine<Type>(plan, &own[i]);
    store_quad(values + c, own[i].x, 4, true);
    if (c < group) keep_sum<kWhole>(plan, row, first + c, own[i], group - c);
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    const float inverse =
        inverse_of(padded, plan.group, plan.eps, [&](int c) { return values[c]; });
    if (threadIdx.x == 0) inverse_of_block = inverse;
  }
  __syncthreads();
  const float inverse = inverse_of_block;
#pragma unroll
  for (int i = 0; i < kOwnQuads; ++i) {
    const int c = column(i);
    if (c < group) norm_output<Type, kWhole>(plan, row, first + c, own[i], inverse, group - c);
  }
}

/// A larger group a block, its values in shared memory (`staged`) or read twice, then nothing is
/// added to them.
template <WeightType Type, bool kWhole, class X, class G, class Y>
__global__ void __launch_bounds__(kNormThreads)
    norm_large(NormPlan<X, G, Y> plan, uint32_t row_groups, bool staged) {
  extern __shared__ float4 memory[];
  float* values = reinterpret_cast<float*>(memory);
  __shared__ float inverse_of_block;
  const uint32_t row = blockIdx.x / row_groups;
  const int64_t first = int64_t{blockIdx.x - row * row_groups} * plan.group;
  const int64_t weight_first = first % plan.weight_size;
  const int group = static_cast<int>(plan.group), step = 4 * static_cast<int>(blockDim.x);
  const int begin = 4 * static_cast<int>(threadIdx.x);
  const auto combined = [&](int c, int n) {
    NormQuad q = load_norm<kWhole>(plan, row, first + c, weight_first + c, n);
    combine<Type>(plan, &q);
    return q;
  };
  if (staged) {
    for (int c = begin; c < (group + 15) / 16 * 16; c += step) {
      const NormQuad q = c < group ? combined(c, group - c) : NormQuad{};
      store_quad(values + c, q.x, 4, true);
      if (c < group) keep_sum<kWhole>(plan, row, first + c, q, group - c);
    }
    __syncthreads();
  }
  if (threadIdx.x < 16) {
    const float inverse = inverse_of(group, plan.group, plan.eps, [&](int c) {
      if (staged) return values[c];
      NormQuad q = load_norm<false>(plan, row, first + c, weight_first + c, 1);
      combine<Type>(plan, &q);
      return q.x.v[0];
    });
    if (threadIdx.x == 0) inverse_of_block = inverse;
  }
  __syncthreads();
  const float inverse = inverse_of_block;
  for (int c = begin; c < group; c += step) {
    NormQuad q;
    if (staged) {
      q = load_norm<kWhole>(plan, row, first + c, weight_first + c, group - c);
      q.x = load_quad(values + c, 4, true);
    } else {
      q = combined(c, group - c);
    }
    norm_output<Type, kWhole>(plan, row, first + c, q, inverse, group - c);
  }
}

template <WeightType Type, class T>
struct GateOnlyBody {
  Rows<const T> x, gate;
  Rows<T> y;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    Quad value = x.load(row, c, n);
    const Quad g = gate.load(row, c, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) value.v[i] = rounded<Type>(value.v[i] * silu_ordered(g.v[i]));
    store(y, row, c, value, n);
  }
};

// ---------------------------------------------------------------- one value from one place

template <Activation Function, WeightType Type, class T>
struct ActivateBody {
  Rows<const T> x;
  const float* bias;
  bool vector_bias;
  Rows<T> y;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    Quad value = x.load(row, c, n);
    if (bias != nullptr) {
      const Quad b = load_quad(bias + c, n, vector_bias);
#pragma unroll
      for (int i = 0; i < 4; ++i) value.v[i] = rounded<Type>(value.v[i] + b.v[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) value.v[i] = rounded<Type>(apply<Function>(value.v[i]));
    store(y, row, c, value, n);
  }
};

template <Activation Function, WeightType Type, class T>
struct ActivateMultiplyBody {
  Rows<const T> gate;
  float gate_scale;
  Rows<const T> up;
  Rows<T> y;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    Quad value = gate.load(row, c, n);
    const Quad u = up.load(row, c, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (gate_scale != 1.0F) value.v[i] = rounded<Type>(value.v[i] * gate_scale);
      value.v[i] = rounded<Type>(apply<Function>(value.v[i]));
      value.v[i] = rounded<Type>(value.v[i] * u.v[i]);
    }
    store(y, row, c, value, n);
  }
};

template <WeightType Type, class Y, class X>
struct AddBody {
  Rows<Y> y;
  Rows<const X> x;
  float multiplier;
  const float* row_scale;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    const float factor = row_scale != nullptr ? row_scale[row] : multiplier;
    Quad total = y.load(row, c, n);
    const Quad added = x.load(row, c, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total.v[i] = Type == WeightType::fp32
                       ? __fmaf_rn(added.v[i], factor, total.v[i])
                       : rounded<Type>(total.v[i] + rounded<Type>(added.v[i] * factor));
    }
    store(y, row, c, total, n);
  }
};

template <WeightType Type, class T>
struct ScaleBody {
  Rows<T> x;
  float factor;
  const float* column;
  bool vector_column;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    Quad value = x.load(row, c, n);
    Quad by = {};
    if (column != nullptr) by = load_quad(column + c, n, vector_column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (factor != 1.0F) value.v[i] = rounded<Type>(value.v[i] * factor);
      if (column != nullptr) value.v[i] = rounded<Type>(value.v[i] * by.v[i]);
    }
    store(x, row, c, value, n);
  }
};

template <WeightType Type>
struct RoundBody {
  Out x;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    Quad value = load_quad(x.at(row, c), n, x.vector);
#pragma unroll
    for (int i = 0; i < 4; ++i) value.v[i] = rounded<Type>(value.v[i]);
    store(x, row, c, value, n);
  }
};

struct ClampBody {
  Out x;
  float low, high;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    Quad value = load_quad(x.at(row, c), n, x.vector);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float above = value.v[i] < low ? low : value.v[i];
      value.v[i] = high < above ? high : above;
    }
    store(x, row, c, value, n);
  }
};

/// A row is a head of a token.
template <WeightType Type>
struct RotaryBody {
  float* x;
  int64_t stride;
  uint32_t heads;
  int64_t head_dim;
  In cos, sin;
  bool vector_low, vector_high;
  int64_t half;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    const int64_t token = static_cast<uint32_t>(row) / heads;
    float* low = x + token * stride + (row - token * heads) * head_dim + c;
    float* high = low + half;
    Quad a = load_quad(low, n, vector_low), b = load_quad(high, n, vector_high);
    rotate<Type>(&a, &b, cos.load(token, c, n), sin.load(token, c, n));
    store_quad(low, a, n, vector_low);
    store_quad(high, b, n, vector_high);
  }
};

template <WeightType Type>
struct CombineBody {
  const int32_t* slots;
  const float* weights;
  int choices;
  In outputs;
  Out y;
  bool add;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    Quad total = {};
    if (add) total = load_quad(y.at(row, c), n, y.vector);
    for (int64_t j = row * choices; j < (row + 1) * choices; ++j) {
      const Quad value = outputs.load(slots[j], c, n);
      const float weight = weights[j];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total.v[i] = Type == WeightType::fp32
                         ? __fmaf_rn(value.v[i], weight, total.v[i])
                         : rounded<Type>(total.v[i] + rounded<Type>(value.v[i] * weight));
      }
    }
    store(y, row, c, total, n);
  }
};

template <WeightType Type>
struct WidenBody {
  Rows<const uint16_t> w;
  const int32_t* ids;
  Out out;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    store(out, row, c, load_quad<Type>(w.at(ids[row], c), n, w.vector), n);
  }
};
template <WeightType Type>
struct WidenRowsBody {
  Rows<const uint16_t> x;
  Out out;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    store(out, row, c, load_quad<Type>(x.at(row, c), n, x.vector), n);
  }
};
struct GatherBody {
  In w;
  const int32_t* ids;
  Out out;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    store(out, row, c, w.load(ids[row], c, n), n);
  }
};

template <WeightType Type>
struct NarrowBody {
  In x;
  Rows<uint16_t> out;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    store_quad<Type>(out.at(row, c), x.load(row, c, n), n, out.vector);
  }
};

struct GdnScalarsBody {
  In a, b;
  const float* a_exp;
  Out scalars;
  int64_t heads;
  __device__ void operator()(int64_t row, int64_t c, int n) const {
    const Quad step = a.load(row, c, n), beta = b.load(row, c, n);
    for (int i = 0; i < n; ++i) {
      *scalars.at(row, c + i) = -(a_exp[c + i] * step.v[i]) * kLog2E;
      *scalars.at(row, heads + c + i) = beta.v[i];
    }
  }
};

// ---------------------------------------------------------------- rows

/// A row for each 16 neighbouring threads.
__global__ void __launch_bounds__(kThreads) softmax_rows(In x, Out y, int64_t rows, int64_t cols) {
  const int64_t index = int64_t{blockIdx.x} * (kThreads / 16) + threadIdx.x / 16;
  const int64_t row = index < rows ? index : rows - 1;  // the whole warp joins in the sums
  const int64_t lane = threadIdx.x % 16;
  const float* from = x.at(row, 0);
  float* to = y.at(row, 0);
  // NaN is passed over as on the host; it returns with x - maximum.
  float maximum = -INFINITY;
  for (int64_t c = lane; c < cols; c += 16) maximum = from[c] > maximum ? from[c] : maximum;
  for (int distance = 8; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, maximum, distance);
    maximum = other > maximum ? other : maximum;
  }
  float total = 0;
  for (int64_t c = lane; c < cols; c += 16) {
    const float value = exp_ordered(from[c] - maximum);
    total = total + value;
    if (index < rows) to[c] = value;
  }
  const float divisor = sum_over_sixteen(total, 0xFFFFFFFFu);
  if (index >= rows) return;
  for (int64_t c = lane; c < cols; c += 16) to[c] = to[c] / divisor;
}

constexpr int kDecaySlices = 8;

__global__ void decay_sums(const float* scalars, int64_t stride, const float* factor,
                           int64_t tokens, int heads, double* sums) {
  __shared__ double partial[kDecaySlices][32];
  const int head = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  double total = 0;
  if (head < heads) {
    const float by = factor != nullptr ? factor[head] : 1.0F;
    for (int64_t t = threadIdx.y; t < tokens; t += kDecaySlices) {
      const float value = scalars[t * stride + head];
      total += static_cast<double>(exp2f(factor != nullptr ? value * by : value));
    }
  }
  partial[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y > 0 || head >= heads) return;
  for (int slice = 1; slice < kDecaySlices; ++slice) total += partial[slice][threadIdx.x];
  sums[head] += total;
}

// ---------------------------------------------------------------- copies

constexpr int kJobs = 128;
constexpr int kTileQuads = 4 * kThreads;

struct CopyTable {
  CopyJob jobs[kJobs];
  uint32_t first_tile[kJobs + 1];
  int count = 0;
};

__global__ void __launch_bounds__(kThreads) copy_jobs(const __grid_constant__ CopyTable table) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.first_tile[middle] <= blockIdx.x ? low : high) = middle;
  }
  const CopyJob& job = table.jobs[low];
  const bool vector =
      (reinterpret_cast<uintptr_t>(job.to) | reinterpret_cast<uintptr_t>(job.from)) % 16 == 0 &&
      (job.to_stride | job.from_stride) % 4 == 0;
  const uint32_t row_quads = static_cast<uint32_t>((job.cols + 3) / 4);
  const uint32_t quads = row_quads * static_cast<uint32_t>(job.rows);
  const uint32_t begin = (blockIdx.x - table.first_tile[low]) * kTileQuads + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kTileQuads / kThreads; ++i) {
    const uint32_t q = begin + static_cast<uint32_t>(i * kThreads);
    if (q >= quads) return;
    const uint32_t row = q / row_quads;
    const int64_t c = int64_t{q - row * row_quads} * 4;
    const int n = static_cast<int>(job.cols - c < 4 ? job.cols - c : 4);
    Quad value = {};
    if (job.from != nullptr) value = load_quad(job.from + row * job.from_stride + c, n, vector);
    store_quad(job.to + row * job.to_stride + c, value, n, vector);
  }
}

void check_size(const char* function, int64_t n) {
  if (n < 0) {
    throw std::invalid_argument(std::string(function) + ": a size of " + std::to_string(n) +
                                ", expected at least 0");
  }
}

/// A row's columns in groups; throws on a shape that does not fit.
int64_t checked_group(const RmsNorm& norm, bool has_gate, int64_t rows, int64_t cols) {
  const bool needs_weight = norm.gate != GateOrder::gate_only;
  const int64_t group = norm.group > 0 ? norm.group : cols;
  if (cols < 1 || cols % group != 0 ||
      (needs_weight &&
       (norm.weight_size < 1 || cols % norm.weight_size != 0 || norm.weight_size % group != 0))) {
    throw std::invalid_argument(
        "rms_norm: group " + std::to_string(group) + " and weight of " +
        std::to_string(norm.weight_size) + " do not fit " + std::to_string(cols) +
        " columns (group divides the weight, the weight divides the columns)");
  }
  if ((needs_weight && norm.weight == nullptr) || ((norm.gate != GateOrder::none) != has_gate))
    throw std::invalid_argument("rms_norm: weight or gate missing, or a gate without an order");
  check_size("rms_norm", rows);
  if (needs_weight && rows * (cols / group) > INT32_MAX) {
    throw std::invalid_argument("rms_norm: " + std::to_string(rows * (cols / group)) +
                                " groups, expected at most 2^31 - 1 in a call");
  }
  return group;
}

template <class X, class G, class Y>
NormPlan<X, G, Y> norm_plan(const RmsNorm& norm, int64_t group, const Rows<X>& x,
                            const Rows<const G>& gate, const Rows<Y>& y) {
  return {x,
          gate,
          y,
          norm.weight,
          norm.weight_size,
          group,
          norm.eps,
          norm.gate == GateOrder::gate_first,
          norm.one_plus,
          norm.gate == GateOrder::norm_first,
          norm.round_normalized && !norm.one_plus,
          reinterpret_cast<uintptr_t>(norm.weight) % 16 == 0};
}

/// Queues the norm; shapes are checked.
template <WeightType Type, class X, class G, class Y>
void launch_norm(NormPlan<X, G, Y> plan, int64_t rows, int64_t cols, cudaStream_t stream) {
  const int64_t group = plan.group, row_groups = cols / group, groups = rows * row_groups;
  if (group % 4 != 0) {  // groups after the first start anywhere
    plan.x.vector = plan.gate.vector = plan.y.vector = plan.vector_weight = false;
  }
  const bool whole = plan.x.vector && plan.y.vector && plan.vector_weight && group % 16 == 0 &&
                     (plan.gate.data == nullptr || plan.gate.vector);
  const auto launch = [&](auto whole_quads) {
    if (group <= 256) {
      const auto blocks = static_cast<unsigned>(ceil_div(groups, kThreads / 4));
      const auto kernel = group <= 128 ? norm_small<Type, 8, whole_quads(), X, G, Y>
                                       : norm_small<Type, 16, whole_quads(), X, G, Y>;
      kernel<<<blocks, kThreads, 0, stream>>>(plan, static_cast<uint32_t>(groups),
                                              static_cast<uint32_t>(row_groups));
      return;
    }
    const auto bytes = static_cast<size_t>(ceil_div(group, 16)) * 64;
    if (group <= 4 * kOwnQuads * kNormThreads) {
      const int64_t threads = ceil_div(ceil_div(group, 4 * kOwnQuads), 32) * 32;
      norm_block<Type, whole_quads()>
          <<<static_cast<unsigned>(groups), static_cast<unsigned>(threads), bytes, stream>>>(
              plan, static_cast<uint32_t>(row_groups));
      return;
    }
    const bool staged = bytes <= kNormBytes;
    if constexpr (!std::is_const_v<X>) {
      if (plan.adds && !staged) {
        const auto add = [&](auto type) {
          for_quads(rows, cols, AddBody<type(), X, G>{plan.x, plan.gate, 1.0F, nullptr}, stream);
        };
        if (plan.adds_fp32) {
          add(Constant<WeightType::fp32>());
        } else {
          add(Constant<Type>());
        }
        plan.adds = false;
        plan.gate.data = nullptr;
      }
    }
    const auto kernel = norm_large<Type, whole_quads(), X, G, Y>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kNormBytes));
    kernel<<<static_cast<unsigned>(groups), kNormThreads, staged ? bytes : 0, stream>>>(
        plan, static_cast<uint32_t>(row_groups), staged);
  };
  if (whole) {
    launch(std::true_type());
  } else {
    launch(std::false_type());
  }
  CUDA_CHECK(cudaGetLastError());
}

template <WeightType Type, class X, class Y>
void norm_rows(const RmsNorm& norm, const Rows<const X>& x, const Rows<const X>& gate,
               const Rows<Y>& y, int64_t rows, int64_t cols, cudaStream_t stream) {
  const int64_t group = checked_group(norm, gate.data != nullptr, rows, cols);
  if (rows == 0) return;
  if constexpr (std::is_same_v<X, Y>) {
    if (norm.gate == GateOrder::gate_only) {
      for_quads(rows, cols, GateOnlyBody<Type, X>{x, gate, y}, stream);
      return;
    }
  }
  launch_norm<Type>(norm_plan(norm, group, x, gate, y), rows, cols, stream);
}

void check_codes(WeightType activation) {
  if (activation != WeightType::bf16)
    throw std::invalid_argument("BF16 codes: expected the activation type BF16");
}

}  // namespace

void rms_norm_cuda(const RmsNorm& norm, const float* x, int64_t x_stride, const float* gate,
                   int64_t gate_stride, float* y, int64_t y_stride, int64_t rows, int64_t cols,
                   CudaStream stream) {
  with_type(norm.activation, [&](auto type) {
    norm_rows<type(), float, float>(norm, {x, x_stride}, {gate, gate_stride}, {y, y_stride}, rows,
                                    cols, stream);
  });
}
void rms_norm_cuda(const RmsNorm& norm, const uint16_t* x, int64_t x_stride, const uint16_t* gate,
                   int64_t gate_stride, uint16_t* y, int64_t y_stride, int64_t rows, int64_t cols,
                   CudaStream stream) {
  check_codes(norm.activation);
  norm_rows<WeightType::bf16, uint16_t, uint16_t>(norm, {x, x_stride}, {gate, gate_stride},
                                                  {y, y_stride}, rows, cols, stream);
}
void rms_norm_cuda(const RmsNorm& norm, const uint16_t* x, int64_t x_stride, float* y,
                   int64_t y_stride, int64_t rows, int64_t cols, CudaStream stream) {
  check_codes(norm.activation);
  norm_rows<WeightType::bf16, uint16_t, float>(norm, {x, x_stride}, {nullptr, 0}, {y, y_stride},
                                               rows, cols, stream);
}

template <class T>
void add_rms_norm_cuda(const RmsNorm& norm, WeightType residual_type, float* residual,
                       const T* added, T* y, int64_t rows, int64_t cols, CudaStream stream) {
  if (norm.gate != GateOrder::none || residual == nullptr) {
    throw std::invalid_argument("add_rms_norm: expected a residual stream and no gate");
  }
  const int64_t group = checked_group(norm, false, rows, cols);
  if (rows == 0) return;
  const auto run = [&](auto type) {
    auto plan = norm_plan<float, T, T>(norm, group, {residual, cols}, {added, cols}, {y, cols});
    plan.adds = added != nullptr;
    plan.adds_fp32 = residual_type == WeightType::fp32;
    launch_norm<type()>(plan, rows, cols, stream);
  };
  if constexpr (std::is_same_v<T, float>) {
    if (norm.activation != WeightType::fp32)
      throw std::invalid_argument("add_rms_norm: FP32 arrays, expected the activation type FP32");
    run(Constant<WeightType::fp32>());
  } else {
    check_codes(norm.activation);
    run(Constant<WeightType::bf16>());
  }
}
template void add_rms_norm_cuda(const RmsNorm&, WeightType, float*, const float*, float*, int64_t,
                                int64_t, CudaStream);
template void add_rms_norm_cuda(const RmsNorm&, WeightType, float*, const uint16_t*, uint16_t*,
                                int64_t, int64_t, CudaStream);

void activate_cuda(Activation f, const float* x, int64_t x_stride, const float* bias, float* y,
                   int64_t y_stride, int64_t rows, int64_t cols, WeightType activation,
                   CudaStream stream) {
  with_function(f, activation, [&](auto function, auto type) {
    for_quads(rows, cols,
              ActivateBody<function(), type(), float>{
                  {x, x_stride}, bias, reinterpret_cast<uintptr_t>(bias) % 16 == 0, {y, y_stride}},
              stream);
  });
}

void activate_multiply_cuda(Activation f, const float* gate, int64_t gate_stride, float gate_scale,
                            const float* up, int64_t up_stride, float* y, int64_t y_stride,
                            int64_t rows, int64_t cols, WeightType activation, CudaStream stream) {
  with_function(f, activation, [&](auto function, auto type) {
    for_quads(rows, cols,
              ActivateMultiplyBody<function(), type(), float>{
                  {gate, gate_stride}, gate_scale, {up, up_stride}, {y, y_stride}},
              stream);
  });
}

void add_scaled_cuda(float* y, int64_t y_stride, const float* x, int64_t x_stride, float multiplier,
                     int64_t rows, int64_t cols, WeightType activation, CudaStream stream) {
  with_type(activation, [&](auto type) {
    for_quads(rows, cols,
              AddBody<type(), float, float>{{y, y_stride}, {x, x_stride}, multiplier, nullptr},
              stream);
  });
}

void add_row_scaled_cuda(float* y, int64_t y_stride, const float* x, int64_t x_stride,
                         const float* row_scale, int64_t rows, int64_t cols, WeightType activation,
                         CudaStream stream) {
  with_type(activation, [&](auto type) {
    for_quads(rows, cols,
              AddBody<type(), float, float>{{y, y_stride}, {x, x_stride}, 1.0F, row_scale}, stream);
  });
}

void scale_cuda(float* x, int64_t stride, float factor, const float* column, int64_t rows,
                int64_t cols, WeightType activation, CudaStream stream) {
  with_type(activation, [&](auto type) {
    for_quads(rows, cols,
              ScaleBody<type(), float>{
                  {x, stride}, factor, column, reinterpret_cast<uintptr_t>(column) % 16 == 0},
              stream);
  });
}

namespace {

template <class Body>
void with_code_function(Activation f, Body body) {
  with_function(f, WeightType::bf16, [&](auto function, auto type) {
    if constexpr (type() == WeightType::bf16) body(function);
  });
}

}  // namespace

void activate_cuda(Activation f, const uint16_t* x, int64_t x_stride, const float* bias,
                   uint16_t* y, int64_t y_stride, int64_t rows, int64_t cols, WeightType activation,
                   CudaStream stream) {
  check_codes(activation);
  with_code_function(f, [&](auto function) {
    for_quads(rows, cols,
              ActivateBody<function(), WeightType::bf16, uint16_t>{
                  {x, x_stride}, bias, reinterpret_cast<uintptr_t>(bias) % 16 == 0, {y, y_stride}},
              stream);
  });
}

void activate_multiply_cuda(Activation f, const uint16_t* gate, int64_t gate_stride,
                            float gate_scale, const uint16_t* up, int64_t up_stride, uint16_t* y,
                            int64_t y_stride, int64_t rows, int64_t cols, WeightType activation,
                            CudaStream stream) {
  check_codes(activation);
  with_code_function(f, [&](auto function) {
    for_quads(rows, cols,
              ActivateMultiplyBody<function(), WeightType::bf16, uint16_t>{
                  {gate, gate_stride}, gate_scale, {up, up_stride}, {y, y_stride}},
              stream);
  });
}

void add_scaled_cuda(uint16_t* y, int64_t y_stride, const uint16_t* x, int64_t x_stride,
                     float multiplier, int64_t rows, int64_t cols, WeightType activation,
                     CudaStream stream) {
  check_codes(activation);
  for_quads(rows, cols,
            AddBody<WeightType::bf16, uint16_t, uint16_t>{
                {y, y_stride}, {x, x_stride}, multiplier, nullptr},
            stream);
}

void scale_cuda(uint16_t* x, int64_t stride, float factor, const float* column, int64_t rows,
                int64_t cols, WeightType activation, CudaStream stream) {
  check_codes(activation);
  for_quads(rows, cols,
            ScaleBody<WeightType::bf16, uint16_t>{
                {x, stride}, factor, column, reinterpret_cast<uintptr_t>(column) % 16 == 0},
            stream);
}

void round_to_cuda(WeightType type, float* x, int64_t n, CudaStream stream) {
  if (type == WeightType::fp32) return;
  constexpr int64_t kCols = int64_t{1} << 30;
  with_type(type, [&](auto constant) {
    for (int64_t first = 0; first < n; first += kCols) {
      for_quads(1, std::min(kCols, n - first), RoundBody<constant()>{{x + first, 0}}, stream);
    }
  });
}

void clamp_cuda(float* x, int64_t n, float low, float high, CudaStream stream) {
  constexpr int64_t kCols = int64_t{1} << 30;
  for (int64_t first = 0; first < n; first += kCols) {
    for_quads(1, std::min(kCols, n - first), ClampBody{{x + first, 0}, low, high}, stream);
  }
}

void rotary_apply_cuda(float* x, int64_t stride, int64_t n, int heads, int head_dim, int dims,
                       const float* cos, const float* sin, WeightType activation,
                       CudaStream stream) {
  if (dims < 0 || dims % 2 != 0 || dims > head_dim) {
    throw std::invalid_argument("rotary: " + std::to_string(dims) + " dimensions of a head of " +
                                std::to_string(head_dim) +
                                ", expected an even number of at most that");
  }
  if (n * heads > INT32_MAX) {
    throw std::invalid_argument("rotary: " + std::to_string(n) + " tokens of " +
                                std::to_string(heads) + " heads, expected fewer than 2^31 heads");
  }
  const int64_t half = dims / 2;
  const bool low = Out(x, stride).vector && head_dim % 4 == 0;
  with_type(activation, [&](auto type) {
    for_quads(n * heads, half,
              RotaryBody<type()>{x,
                                 stride,
                                 static_cast<uint32_t>(heads),
                                 head_dim,
                                 {cos, half},
                                 {sin, half},
                                 low,
                                 low && half % 4 == 0,
                                 half},
              stream);
  });
}

void softmax_cuda(const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows,
                  int64_t cols, CudaStream stream) {
  if (rows <= 0 || cols <= 0) return;
  softmax_rows<<<static_cast<unsigned>(ceil_div(rows, kThreads / 16)), kThreads, 0, stream>>>(
      {x, x_stride}, {y, y_stride}, rows, cols);
  CUDA_CHECK(cudaGetLastError());
}

void combine_experts_cuda(const int32_t* slots, const float* weights, int choices,
                          const float* slot_output, int64_t cols, float* y, int64_t y_stride,
                          int64_t tokens, WeightType activation, bool add, CudaStream stream) {
  check_size("combine_experts", choices);
  with_type(activation, [&](auto type) {
    for_quads(tokens, cols,
              CombineBody<type()>{slots, weights, choices, {slot_output, cols}, {y, y_stride}, add},
              stream);
  });
}

void widen_rows_cuda(const WeightView& w, const int32_t* ids, int64_t n, float* out,
                     CudaStream stream) {
  const Out rows(out, w.cols);
  with_type(w.type, [&](auto type) {
    if constexpr (type() == WeightType::fp32) {
      for_quads(n, w.cols, GatherBody{{static_cast<const float*>(w.data), w.stride}, ids, rows},
                stream);
    } else {
      for_quads(n, w.cols,
                WidenBody<type()>{{static_cast<const uint16_t*>(w.data), w.stride}, ids, rows},
                stream);
    }
  });
}

void narrow_cuda(const float* x, int64_t x_stride, int64_t rows, int64_t cols, WeightType type,
                 void* out, CudaStream stream) {
  with_type(type, [&](auto constant) {
    if constexpr (constant() == WeightType::fp32) {
      const CopyJob job{static_cast<float*>(out), cols, x, x_stride, rows, cols};
      copy_cuda({&job, 1}, stream);
    } else {
      for_quads(rows, cols,
                NarrowBody<constant()>{{x, x_stride}, {static_cast<uint16_t*>(out), cols}}, stream);
    }
  });
}

void widen_cuda(WeightType type, const void* x, int64_t x_stride, int64_t rows, int64_t cols,
                float* out, CudaStream stream) {
  with_type(type, [&](auto constant) {
    if constexpr (constant() == WeightType::fp32) {
      const CopyJob job{out, cols, static_cast<const float*>(x), x_stride, rows, cols};
      copy_cuda({&job, 1}, stream);
    } else {
      for_quads(rows, cols,
                WidenRowsBody<constant()>{{static_cast<const uint16_t*>(x), x_stride}, {out, cols}},
                stream);
    }
  });
}

void copy_cuda(std::span<const CopyJob> jobs, CudaStream stream) {
  CopyTable table;
  uint32_t tiles = 0;
  const auto launch = [&] {
    if (table.count == 0) return;
    table.first_tile[table.count] = tiles;
    copy_jobs<<<tiles, kThreads, 0, stream>>>(table);
    CUDA_CHECK(cudaGetLastError());
    table.count = 0;
    tiles = 0;
  };
  const auto add = [&](const CopyJob& job) {
    if (table.count == kJobs) launch();
    table.first_tile[table.count] = tiles;
    tiles += static_cast<uint32_t>(ceil_div(job.rows * ceil_div(job.cols, 4), kTileQuads));
    table.jobs[table.count++] = job;
  };
  for (CopyJob job : jobs) {
    check_size("copy", job.rows);
    check_size("copy", job.cols);
    if (job.rows == 0 || job.cols == 0) continue;
    if (job.from == nullptr) job.from_stride = 0;
    if (job.rows == 1 ||
        (job.to_stride == job.cols && (job.from == nullptr || job.from_stride == job.cols))) {
      // One run of values, in rows that start on multiples of 16 bytes when it does.
      const int64_t n = job.rows * job.cols;
      const int64_t width = std::min<int64_t>(n, int64_t{1} << 20);
      const int64_t whole = n / width, stride = whole > 1 ? width : 0;
      const float* rest = job.from != nullptr ? job.from + whole * width : nullptr;
      const CopyJob parts[] = {{job.to, stride, job.from, stride, whole, width},
                               {job.to + whole * width, 0, rest, 0, 1, n - whole * width}};
      for (const CopyJob& part : parts) {
        if (part.cols > 0) add(part);
      }
      continue;
    }
    add(job);
  }
  launch();
}

void gdn_scalars_cuda(const float* a, const float* b, const float* a_exp, int64_t tokens, int heads,
                      float* scalars, CudaStream stream) {
  for_quads(tokens, heads,
            GdnScalarsBody{{a, heads}, {b, heads}, a_exp, {scalars, 2 * int64_t{heads}}, heads},
            stream);
}

void decay_sum_cuda(const float* scalars, int64_t stride, const float* factor, int64_t tokens,
                    int heads, double* sums, CudaStream stream) {
  if (tokens <= 0 || heads <= 0) return;
  decay_sums<<<static_cast<unsigned>(ceil_div(heads, 32)), dim3(32, kDecaySlices), 0, stream>>>(
      scalars, stride, factor, tokens, heads, sums);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
