// NVFP4 rows (blocks of 16 columns, E4M3 scales, one FP32 scale) on their way into sums: a thread
// decodes a row, 16 columns at a time. A code times its block's scale is exact in FP16; the tensor
// cores widen four such numbers a thread to FP32 in one product with the unit matrix, which is
// exact too and keeps every thread's numbers its own; one FP32 product with the head's scale rounds
// as decode_block does.
#pragma once

#include <cuda_fp16.h>

#include "kernels/activation.cuh"

namespace replayeval {

/// This thread's part of the unit matrix for widen_four.
__device__ __forceinline__ uint32_t unit_part() {
  const int lane = threadIdx.x & 31, column = lane >> 2, row = 2 * (lane & 3);
  return (column == row ? 0x3C00u : 0u) | (column == row + 1 ? 0x3C000000u : 0u);
}
/// Four FP16 numbers to FP32. The whole warp takes part; none of its numbers may be infinite or
/// NaN.
__device__ __forceinline__ void widen_four(uint32_t a, uint32_t b, uint32_t unit, float* to) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %7, %7, %7};"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(a), "r"(b), "r"(unit), "f"(0.0f));
}

/// Eight codes times 2^-7 of the block's scale: columns 0, 4, 1, 5, 2, 6, 3, 7.
/// `scale`: 2^7 times the block's, twice.
__device__ __forceinline__ void widen_nvfp4(uint32_t codes, __half2 scale, uint32_t unit,
                                            float* to) {
  // Sign, exponent and mantissa of a code are those of an FP16 number that is 2^-14 of it; codes 16
  // bits apart go together.
  uint32_t pair[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t sign = codes << (12 - 4 * k) & 0x80008000u;
    const uint32_t rest = k == 3 ? codes >> 3 : codes << (9 - 4 * k);
    const uint32_t code = sign | (rest & 0x0E000E00u);
    const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&code), scale);
    pair[k] = *reinterpret_cast<const uint32_t*>(&value);
  }
  widen_four(pair[0], pair[1], unit, to);
  widen_four(pair[2], pair[3], unit, to + 4);
}
/// Column of number i of widen_nvfp4.
__host__ __device__ constexpr int nvfp4_column(int i) { return i / 2 + i % 2 * 4; }

/// 2^7 times the E4M3 scale in byte i of a word, twice; 0x7F, which is NaN, becomes a number.
__device__ __forceinline__ __half2 nvfp4_scale(uint32_t scales, int i) {
  const uint32_t twice = __byte_perm(scales, 0u, 0x4040u | static_cast<uint32_t>(i * 0x0101)) << 7;
  return __hmul2(*reinterpret_cast<const __half2*>(&twice), __float2half2_rn(32768.0f));
}
/// Whether one of four E4M3 scales is NaN.
__device__ __forceinline__ bool nan_scale(uint32_t scales) {
  return ((scales + 0x01010101u) & 0x80808080u) != 0;
}

/// Rows of 16 kN16 columns in shared memory: codes in 16-byte chunks, placed so that eight threads
/// that read the same columns of eight rows meet different banks.
template <int kN16>
__device__ __forceinline__ int nvfp4_chunk(int row, int chunk) {
  constexpr int kChunks = kN16 / 2, kApart = kChunks >= 8 ? 1 : 8 / kChunks;
  return row * kChunks + (chunk ^ (row / kApart & (kChunks - 1)));
}

}  // namespace replayeval
