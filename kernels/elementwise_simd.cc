// Inner loops of kernels/elementwise.h. A row's tail goes through the same vector code as its body,
// padded.
#include "kernels/elementwise_simd.h"

#include "kernels/math16.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {
namespace {

using namespace wide;

template <WeightType Type>
REPLAYEVAL_INLINE F16 rounded(const F16& x) {
  if constexpr (Type == WeightType::bf16) return round_bf16(x);
  if constexpr (Type == WeightType::fp16) return round_fp16(x);
  return x;
}

template <Activation Function>
REPLAYEVAL_INLINE F16 apply(const F16& x) {
  if constexpr (Function == Activation::silu) return silu16(x);
  if constexpr (Function == Activation::relu2) return relu2_16(x);
  if constexpr (Function == Activation::sigmoid) return sigmoid16(x);
  if constexpr (Function == Activation::softplus) return softplus16(x);
}

/// Calls body.template operator()<Type>() for the run-time type.
template <class Body>
REPLAYEVAL_INLINE void with_type(WeightType type, Body body) {
  if (type == WeightType::fp32) body.template operator()<WeightType::fp32>();
  if (type == WeightType::bf16) body.template operator()<WeightType::bf16>();
  if (type == WeightType::fp16) body.template operator()<WeightType::fp16>();
}
template <class Body>
REPLAYEVAL_INLINE void with_function(Activation f, WeightType type, Body body) {
  with_type(type, [&]<WeightType Type> {
    if (f == Activation::silu) body.template operator()<Activation::silu, Type>();
    if (f == Activation::relu2) body.template operator()<Activation::relu2, Type>();
    if (f == Activation::sigmoid) body.template operator()<Activation::sigmoid, Type>();
    if (f == Activation::softplus) body.template operator()<Activation::softplus, Type>();
  });
}

/// One group of one row; `gate` null without a gate.
template <WeightType Type>
void norm_group(const RmsNorm& norm, const float* x, const float* gate, const float* weight,
                float* y, int64_t n) {
  const bool gate_before = norm.gate == GateOrder::gate_first || norm.gate == GateOrder::gate_only;
  const auto input = [&](int64_t c) {
    const F16 value = load_partial(x + c, n - c);
    return gate_before ? value * silu16(load_partial(gate + c, n - c)) : value;
  };
  if (norm.gate == GateOrder::gate_only) {
    for (int64_t c = 0; c < n; c += kLanes) store_partial(y + c, rounded<Type>(input(c)), n - c);
    return;
  }
  F16 squares = splat(0);
  for (int64_t c = 0; c < n; c += kLanes) {
    const F16 value = input(c);
    squares = fma(value, value, squares);
  }
  const float mean = sum(squares) / static_cast<float>(n);
  const F16 inverse = splat(1.0F / __builtin_sqrtf(mean + norm.eps));
  const bool round_steps = norm.round_normalized && !norm.one_plus;
  for (int64_t c = 0; c < n; c += kLanes) {
    const F16 w = load_partial(weight + c, n - c);
    F16 value = input(c) * inverse;
    if (round_steps) value = rounded<Type>(value);
    value = value * (norm.one_plus ? w + splat(1.0F) : w);
    if (norm.gate == GateOrder::norm_first) {
      if (round_steps) value = rounded<Type>(value);
      value = value * silu16(load_partial(gate + c, n - c));
    }
    store_partial(y + c, rounded<Type>(value), n - c);
  }
}

}  // namespace

void rms_norm_rows(const RmsNorm& norm, RowsIn x, RowsIn gate, RowsOut y, int64_t first,
                   int64_t last, int64_t cols) {
  const int64_t group = norm.group > 0 ? norm.group : cols;
  with_type(norm.activation, [&]<WeightType Type> {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t c = 0; c < cols; c += group) {
        norm_group<Type>(norm, x.data + row * x.stride + c,
                         gate.data != nullptr ? gate.data + row * gate.stride + c : nullptr,
                         norm.weight != nullptr ? norm.weight + c % norm.weight_size : nullptr,
                         y.data + row * y.stride + c, group);
      }
    }
  });
}

void activate_rows(Activation f, RowsIn x, const float* bias, RowsOut y, int64_t first,
                   int64_t last, int64_t cols, WeightType activation) {
  with_function(f, activation, [&]<Activation Function, WeightType Type> {
    for (int64_t row = first; row < last; ++row) {
      const float* from = x.data + row * x.stride;
      float* to = y.data + row * y.stride;
      for (int64_t c = 0; c < cols; c += kLanes) {
        F16 value = load_partial(from + c, cols - c);
        if (bias != nullptr) value = rounded<Type>(value + load_partial(bias + c, cols - c));
        store_partial(to + c, rounded<Type>(apply<Function>(value)), cols - c);
      }
    }
  });
}

void activate_multiply_rows(Activation f, RowsIn gate, float gate_scale, RowsIn up, RowsOut y,
                            int64_t first, int64_t last, int64_t cols, WeightType activation) {
  with_function(f, activation, [&]<Activation Function, WeightType Type> {
    for (int64_t row = first; row < last; ++row) {
      const float* gates = gate.data + row * gate.stride;
      const float* ups = up.data + row * up.stride;
      float* to = y.data + row * y.stride;
      for (int64_t c = 0; c < cols; c += kLanes) {
        F16 value = load_partial(gates + c, cols - c);
        if (gate_scale != 1.0F) value = rounded<Type>(value * splat(gate_scale));
        value = rounded<Type>(apply<Function>(value));
        store_partial(to + c, rounded<Type>(value * load_partial(ups + c, cols - c)), cols - c);
      }
    }
  });
}

void add_scaled_rows(RowsOut y, RowsIn x, float multiplier, const float* row_scale, int64_t first,
                     int64_t last, int64_t cols, WeightType activation) {
  with_type(activation, [&]<WeightType Type> {
    for (int64_t row = first; row < last; ++row) {
      const F16 factor = splat(row_scale != nullptr ? row_scale[row] : multiplier);
      const float* from = x.data + row * x.stride;
      float* to = y.data + row * y.stride;
      for (int64_t c = 0; c < cols; c += kLanes) {
        const F16 old = load_partial(to + c, cols - c);
        const F16 added = load_partial(from + c, cols - c);
        const F16 total = Type == WeightType::fp32 ? fma(added, factor, old)
                                                   : old + rounded<Type>(added * factor);
        store_partial(to + c, rounded<Type>(total), cols - c);
      }
    }
  });
}

void scale_rows(RowsOut x, float factor, const float* column, int64_t first, int64_t last,
                int64_t cols, WeightType activation) {
  with_type(activation, [&]<WeightType Type> {
    for (int64_t row = first; row < last; ++row) {
      float* to = x.data + row * x.stride;
      for (int64_t c = 0; c < cols; c += kLanes) {
        F16 value = load_partial(to + c, cols - c);
        if (factor != 1.0F) value = rounded<Type>(value * splat(factor));
        if (column != nullptr) value = rounded<Type>(value * load_partial(column + c, cols - c));
        store_partial(to + c, value, cols - c);
      }
    }
  });
}

void rotary_rows(RowsOut x, int heads, int head_dim, int dims, const float* cos, const float* sin,
                 int64_t first, int64_t last, WeightType activation) {
  const int64_t half = dims / 2;
  with_type(activation, [&]<WeightType Type> {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        float* low = x.data + row * x.stride + head * head_dim;
        float* high = low + half;
        for (int64_t c = 0; c < half; c += kLanes) {
          const int64_t left = half - c;
          const F16 a = load_partial(low + c, left), b = load_partial(high + c, left);
          const F16 cosine = load_partial(cos + row * half + c, left),
                    sine = load_partial(sin + row * half + c, left);
          F16 rotated_a, rotated_b;
          if constexpr (Type == WeightType::fp32) {
            rotated_a = fma(a, cosine, splat(0) - b * sine);
            rotated_b = fma(b, cosine, a * sine);
          } else {
            rotated_a = rounded<Type>(rounded<Type>(a * cosine) - rounded<Type>(b * sine));
            rotated_b = rounded<Type>(rounded<Type>(b * cosine) + rounded<Type>(a * sine));
          }
          store_partial(low + c, rotated_a, left);
          store_partial(high + c, rotated_b, left);
        }
      }
    }
  });
}

void softmax_rows(RowsIn x, RowsOut y, int64_t first, int64_t last, int64_t cols) {
  const float kNone = -__builtin_inff();
  for (int64_t row = first; row < last; ++row) {
    const float* from = x.data + row * x.stride;
    float* to = y.data + row * y.stride;
    F16 largest = splat(kNone);
    for (int64_t c = 0; c < cols; c += kLanes)
      largest = max(load_partial(from + c, cols - c, kNone), largest);
    const F16 maximum = splat(max_lane(largest));
    F16 total = splat(0);
    for (int64_t c = 0; c < cols; c += kLanes) {
      const F16 value = exp16(load_partial(from + c, cols - c, kNone) - maximum);
      total = total + value;
      store_partial(to + c, value, cols - c);
    }
    const F16 divisor = splat(sum(total));
    for (int64_t c = 0; c < cols; c += kLanes)
      store_partial(to + c, load_partial(to + c, cols - c) / divisor, cols - c);
  }
}

void combine_rows(const int32_t* slots, const float* weights, const float* slot_output,
                  int64_t cols, int64_t choices, RowsOut y, int64_t first, int64_t last,
                  WeightType activation, bool add) {
  with_type(activation, [&]<WeightType Type> {
    for (int64_t row = first; row < last; ++row) {
      float* to = y.data + row * y.stride;
      for (int64_t c = 0; c < cols; c += kLanes) {
        F16 total = add ? load_partial(to + c, cols - c) : splat(0);
        for (int64_t j = row * choices; j < (row + 1) * choices; ++j) {
          const F16 value = load_partial(slot_output + slots[j] * cols + c, cols - c);
          if constexpr (Type == WeightType::fp32) {
            total = fma(value, splat(weights[j]), total);
          } else {
            total = rounded<Type>(total + rounded<Type>(value * splat(weights[j])));
          }
        }
        store_partial(to + c, total, cols - c);
      }
    }
  });
}

void round_values(float* x, int64_t n, WeightType type) {
  with_type(type, [&]<WeightType Type> {
    for (int64_t i = 0; i < n; i += kLanes)
      store_partial(x + i, rounded<Type>(load_partial(x + i, n - i)), n - i);
  });
}

void exp_values(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes)
    store_partial(y + i, exp16(load_partial(x + i, n - i)), n - i);
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
