// The functions of kernels/math16.h and the roundings of kernels/vector16.h for one value on the
// device, operation by operation, and what elementwise kernels share: four neighbouring values of a
// row, copies to shared memory, and sums over the sixteen lanes in the host's order.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/dense.h"
#include "kernels/elementwise.h"

namespace replayeval {

// ---------------------------------------------------------------- functions

/// e^x: exp16 of kernels/math16.h. 2^n in two factors has the bits of one exact scaling: results
/// below 2^-126 are cut to 0.
__device__ __forceinline__ float exp_ordered(float argument) {
  constexpr float kShift = 0x1.8p23F;
  float x = 90.0F < argument ? 90.0F : argument;
  x = -90.0F > x ? -90.0F : x;
  const float shifted = __fmaf_rn(x, 1.44269504F, kShift);
  const float n = shifted - kShift;
  float r = __fmaf_rn(n, -0.693359375F, x);
  r = __fmaf_rn(n, 2.12194440e-4F, r);
  float p = 2.05498233e-4F;
  p = __fmaf_rn(p, r, 1.38958291e-3F);
  p = __fmaf_rn(p, r, 8.33331805e-3F);
  p = __fmaf_rn(p, r, 4.16666660e-2F);
  p = __fmaf_rn(p, r, 1.66666667e-1F);
  p = __fmaf_rn(p, r, 0.5F);
  const float value = __fmaf_rn(r * r, p, r) + 1.0F;
  const int power = __float_as_int(shifted) - __float_as_int(kShift);
  const int half = power >> 1;
  const float first = __int_as_float(static_cast<int>(static_cast<uint32_t>(half + 127) << 23));
  const float second =
      __int_as_float(static_cast<int>(static_cast<uint32_t>(power - half + 127) << 23));
  return argument < -87.33654F ? 0.0F : value * first * second;
}

/// log(1 + e): log1p16.
__device__ __forceinline__ float log1p_ordered(float e) {
  const bool upper = e > 0.41421356F;
  const float f = upper ? (e - 1.0F) * 0.5F : e;
  float q = -7.63439374e-2F;
  q = __fmaf_rn(q, f, 1.27654279e-1F);
  q = __fmaf_rn(q, f, -1.31620023e-1F);
  q = __fmaf_rn(q, f, 1.42013687e-1F);
  q = __fmaf_rn(q, f, -1.66231447e-1F);
  q = __fmaf_rn(q, f, 2.00012359e-1F);
  q = __fmaf_rn(q, f, -2.50008268e-1F);
  q = __fmaf_rn(q, f, 3.33333317e-1F);
  const float square = f * f;
  float rest = __fmaf_rn(square, -0.5F, q * (square * f));
  if (upper) rest = rest + -1.90465421e-9F;
  return upper ? 0x1.62e43p-1F + (f + rest) : f + rest;
}

__device__ __forceinline__ float silu_ordered(float x) {
  return x / (1.0F + exp_ordered(0.0F - x));
}

/// silu16, relu2_16, sigmoid16, softplus16.
template <Activation Function>
__device__ __forceinline__ float apply(float x) {
  if constexpr (Function == Activation::silu) return silu_ordered(x);
  if constexpr (Function == Activation::relu2) {
    const float positive = x < 0.0F ? 0.0F : x;
    return positive * positive;
  }
  if constexpr (Function == Activation::sigmoid) return 1.0F / (1.0F + exp_ordered(0.0F - x));
  if constexpr (Function == Activation::softplus) {
    const float positive = x > 0.0F ? x : 0.0F;
    const float magnitude = __int_as_float(__float_as_int(x) & 0x7fffffff);
    return x > 20.0F ? x : positive + log1p_ordered(exp_ordered(0.0F - magnitude));
  }
}

// ---------------------------------------------------------------- 16-bit types

/// To nearest even; NaN keeps its upper bits and gets the quiet bit.
__device__ __forceinline__ uint32_t bf16_code(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
__device__ __forceinline__ uint32_t fp16_code(float x) {
  return __half_as_ushort(__float2half_rn(x));
}
template <WeightType Type>
__device__ __forceinline__ float widen_code(uint32_t code) {
  if constexpr (Type == WeightType::bf16) return __uint_as_float(code << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(code)));
}

template <WeightType Type>
__device__ __forceinline__ float rounded(float x) {
  if constexpr (Type == WeightType::bf16) return __uint_as_float(bf16_code(x) << 16);
  if constexpr (Type == WeightType::fp16) return __half2float(__float2half_rn(x));
  return x;
}

// ---------------------------------------------------------------- four values

struct Quad {
  float v[4];
};

/// The first n (any number) of four values from p, zeros after them; `vector`: p is a multiple of
/// 16 bytes.
__device__ __forceinline__ Quad load_quad(const float* p, int n, bool vector) {
  Quad q = {};
  if (vector && n >= 4) {
    const float4 f = *reinterpret_cast<const float4*>(p);
    q = {{f.x, f.y, f.z, f.w}};
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < n) q.v[i] = p[i];
    }
  }
  return q;
}
__device__ __forceinline__ void store_quad(float* p, const Quad& q, int n, bool vector) {
  if (vector && n >= 4) {
    *reinterpret_cast<float4*>(p) = make_float4(q.v[0], q.v[1], q.v[2], q.v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < n) p[i] = q.v[i];
    }
  }
}

/// Four 16-bit codes; `vector`: p is a multiple of 8 bytes.
template <WeightType Type>
__device__ __forceinline__ Quad load_quad(const uint16_t* p, int n, bool vector) {
  Quad q = {};
  if (vector && n >= 4) {
    const uint2 u = *reinterpret_cast<const uint2*>(p);
    q = {{widen_code<Type>(u.x & 0xFFFFu), widen_code<Type>(u.x >> 16),
          widen_code<Type>(u.y & 0xFFFFu), widen_code<Type>(u.y >> 16)}};
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < n) q.v[i] = widen_code<Type>(p[i]);
    }
  }
  return q;
}
template <WeightType Type>
__device__ __forceinline__ void store_quad(uint16_t* p, const Quad& q, int n, bool vector) {
  uint32_t code[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    code[i] = Type == WeightType::bf16 ? bf16_code(q.v[i]) : fp16_code(q.v[i]);
  if (vector && n >= 4) {
    *reinterpret_cast<uint2*>(p) = make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < n) p[i] = static_cast<uint16_t>(code[i]);
    }
  }
}

// ---------------------------------------------------------------- copies

/// Copies `bytes` (0 to 16) and zeros up to 16 from global to shared memory behind the thread's
/// back; both on multiples of 16.
__device__ __forceinline__ void copy_behind(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes));
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;"); }
template <int kOpen>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

/// A thread's column (0 to 7) and row (0 to 3) in a warp's tile of products. Shared memory serves
/// sixteen threads at once with 16 bytes each when neighbours in the lowest or the second lowest
/// bit ask for the same ones: threads that share a row differ in bit 0, those that share a column
/// in bit 1.
__device__ __forceinline__ int lane_column(int thread) { return (thread & 1) | (thread >> 1 & 6); }
__device__ __forceinline__ int lane_row(int thread) {
  return (thread >> 1 & 1) | (thread >> 3 & 2);
}

// ---------------------------------------------------------------- sums over lanes

/// `sum` of kernels/vector16.h where thread t of four neighbours holds lanes 4 t .. 4 t + 3: lanes
/// i and i + 8, then 4, 2, 1 apart. The whole warp takes part; each of the four gets the sum.
__device__ __forceinline__ float sum_over_four(Quad s) {
#pragma unroll
  for (int i = 0; i < 4; ++i) s.v[i] += __shfl_xor_sync(0xFFFFFFFFu, s.v[i], 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) s.v[i] += __shfl_xor_sync(0xFFFFFFFFu, s.v[i], 1);
  return (s.v[0] + s.v[2]) + (s.v[1] + s.v[3]);
}
/// Likewise where each of sixteen neighbouring threads holds a lane.
__device__ __forceinline__ float sum_over_sixteen(float s, uint32_t mask) {
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) s += __shfl_xor_sync(mask, s, distance);
  return s;
}

}  // namespace replayeval
