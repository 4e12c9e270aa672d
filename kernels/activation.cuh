// Activations and records as FP32 or BF16 on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/replay_cuda.cuh"

namespace replayeval {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/// Element `at` of an array whose type is known at run time.
__device__ __forceinline__ float load_record(RecordType type, const void* x, int64_t at) {
  return type == RecordType::bf16 ? to_float(static_cast<const __nv_bfloat16*>(x)[at])
                                  : static_cast<const float*>(x)[at];
}
__device__ __forceinline__ void store_record(RecordType type, void* x, int64_t at, float value) {
  if (type == RecordType::bf16) {
    static_cast<__nv_bfloat16*>(x)[at] = from_float<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(x)[at] = value;
  }
}

/// Four neighbouring ones, from a multiple of 4 on.
__device__ __forceinline__ float4 four(const float* p) { return load4(p); }
__device__ __forceinline__ float4 four_bf16(uint32_t low, uint32_t high) {
  return make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xFFFF0000u),
                     __uint_as_float(high << 16), __uint_as_float(high & 0xFFFF0000u));
}
__device__ __forceinline__ float4 four(const __nv_bfloat16* p) {
  const uint2 u = *reinterpret_cast<const uint2*>(p);
  return four_bf16(u.x, u.y);
}

/// Eight, from a multiple of 8 on, in two halves.
__device__ __forceinline__ void load_eight(const float* p, float4* low, float4* high) {
  *low = load4(p);
  *high = load4(p + 4);
}
__device__ __forceinline__ void load_eight(const __nv_bfloat16* p, float4* low, float4* high) {
  const uint4 u = *reinterpret_cast<const uint4*>(p);
  *low = four_bf16(u.x, u.y);
  *high = four_bf16(u.z, u.w);
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
/// Copies 16 bytes from global to shared memory behind the thread's back; both on multiples of 16.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}
/// The same; the 128 bytes that they lie in come to the second-level cache, where others will ask
/// for the rest.
__device__ __forceinline__ void copy_async_of_line(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/// Four E2M1 codes: exponent and mantissa as those of an FP16 number are 2^-14 of the value,
/// subnormals included.
__device__ __forceinline__ float4 four_e2m1(uint32_t codes) {
  // Nibbles 0, 1 and 2, 3 into the halves of a word; magnitudes at bit 9, signs at bit 15.
  const uint32_t low = (codes & 0xFu) | (codes & 0xF0u) << 12,
                 high = (codes >> 8 & 0xFu) | (codes & 0xF000u) << 4;
  const uint32_t a = (low & 0x00070007u) << 9 | (low & 0x00080008u) << 12;
  const uint32_t b = (high & 0x00070007u) << 9 | (high & 0x00080008u) << 12;
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&a));
  const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&b));
  return make_float4(x.x * 16384.0f, x.y * 16384.0f, y.x * 16384.0f, y.y * 16384.0f);
}
/// Four FP16 numbers.
__device__ __forceinline__ float4 four_fp16(uint2 u) {
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&u.x));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&u.y));
  return make_float4(a.x, a.y, b.x, b.y);
}
/// A non-negative E4M3 number, twice, as FP16 numbers: its bits as FP16 bits are 2^-8 of its value,
/// subnormals included. 0x7F is NaN.
__device__ __forceinline__ __half2 e4m3_scale(uint32_t code) {
  const __half value =
      __ushort_as_half(static_cast<unsigned short>(code == 0x7Fu ? 0x7FFFu : code << 7));
  return __hmul2(__half2half2(value), __float2half2_rn(256.0f));
}

/// Four E2M1 codes times an E4M3 scale, exact in FP16 (at most 6 significant bits between 2^-10 and
/// 2688), times an FP32 scale.
__device__ __forceinline__ float4 four_nvfp4(uint32_t codes, __half2 scale, float outer) {
  // The high bytes of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 as FP16 numbers, chosen by the low
  // 3 bits of a code.
  const uint32_t bytes = __byte_perm(0x3E3C3800u, 0x46444240u, codes & 0x7777u);
  const uint32_t a =
      __byte_perm(bytes, 0u, 0x1404u) | (codes << 12 & 0x8000u) | (codes << 24 & 0x80000000u);
  const uint32_t b =
      __byte_perm(bytes, 0u, 0x3424u) | (codes << 4 & 0x8000u) | (codes << 16 & 0x80000000u);
  const float2 x = __half22float2(__hmul2(*reinterpret_cast<const __half2*>(&a), scale));
  const float2 y = __half22float2(__hmul2(*reinterpret_cast<const __half2*>(&b), scale));
  return make_float4(x.x * outer, x.y * outer, y.x * outer, y.y * outer);
}

}  // namespace replayeval
