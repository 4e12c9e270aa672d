// Encoding and decoding of many heads on the device: the codec of quantize.h, bit for bit. Formats
// from files are descriptors, so nothing is compiled for them. Arrays are in device memory unless
// said otherwise; packed heads and memories start on multiples of 16 bytes. Every function queues
// its work in `stream` and returns.
#pragma once

#include <span>

#include "quant/cuda_support.h"
#include "quant/quantize.h"

namespace replayeval {

/// Largest magnitude of `count` numbers (NaN ignored, infinity taken as FLT_MAX) into *amax.
void state_amax_cuda(const float* state, int64_t count, float* amax, CudaStream stream = nullptr);

/// Encodes keys.size() heads: head i is state + i * elements, FP32 [head_dim, state_dim], and goes
/// to packed + i * packed_stride under keys[i] (host memory). `span_amax` (one number) is read only
/// where the FP32 scale spans the layer. `memory` as in encode_head, memory_stride apart; `health`
/// [heads] is added to and may be null. Throws std::invalid_argument for a shape the format cannot
/// hold, a missing fixed scale or array, a format that a library defines; std::runtime_error for
/// errors of the device.
void encode_heads_cuda(const StateCodec& codec, StateShape shape, std::span<const RandomKey> keys,
                       const float* state, const float* span_amax, std::byte* packed,
                       size_t packed_stride, std::byte* memory, size_t memory_stride,
                       EncodeHealth* health, CudaStream stream = nullptr);

/// Decodes `heads` packed heads into state [heads, head_dim, state_dim] FP32.
void decode_heads_cuda(const StateFormat& format, StateShape shape, int heads,
                       const std::byte* packed, size_t packed_stride, float* state,
                       CudaStream stream = nullptr);

}  // namespace replayeval
