// Encoding and decoding of one head's state matrix in a state format: the only place where a state
// is rounded (DESIGN.md section 1). Used by every mixer, on every device, through the same
// definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "quant/state_format.h"

namespace replayeval {

/// A state matrix of one head, [head_dim, state_dim], state_dim contiguous. GDN and KDA: head_dim
/// is the value dimension, state_dim the key dimension.
struct StateShape {
  int head_dim = 0;
  int state_dim = 0;
  int64_t elements() const { return int64_t{head_dim} * state_dim; }
};

enum class Rounding : uint8_t { nearest_even, stochastic };

/// A format with the rounding of the role that uses it. Formats are immutable and shared.
struct StateCodec {
  std::shared_ptr<const StateFormat> format;
  Rounding rounding = Rounding::nearest_even;
};

enum class StateRole : uint32_t { recurrence = 0, read = 1 };  // residual encodings add 2

/// What the random bits of one head's encoding are a function of; `head` is the index in the whole
/// model (a tensor-parallel shard adds its offset), `position` the absolute index of the last token
/// folded (bos = 0).
struct RandomKey {
  uint64_t seed = 0;
  uint32_t stream = 0;  // low 30 bits of the document's or item's hash
  uint32_t layer = 0;
  uint32_t head = 0;
  uint32_t position = 0;
  StateRole role = StateRole::recurrence;
};

/// What happened to the elements of the matrices encoded so far. `non_finite` is counted before
/// encoding; `saturated`: finite magnitude above the format's largest value (or infinity) stored as
/// that value; `clipped`: scaled magnitude above the element's largest value because the scale was
/// rounded down or is static; `vanished`: nonzero element whose block or row scale underflowed to
/// zero.
struct EncodeHealth {
  uint64_t elements = 0;
  uint64_t non_finite = 0;
  uint64_t saturated = 0;
  uint64_t clipped = 0;
  uint64_t vanished = 0;

  EncodeHealth& operator+=(const EncodeHealth& more) {
    elements += more.elements;
    non_finite += more.non_finite;
    saturated += more.saturated;
    clipped += more.clipped;
    vanished += more.vanished;
    return *this;
  }
};

/// Bytes of one head packed in the format: codes (4-bit codes two a byte, element 2i in the low
/// nibble), then block scales, then FP32 scales. Throws std::invalid_argument when a block does not
/// divide its axis.
size_t packed_bytes(const StateFormat& format, StateShape shape);

/// Bytes of memory a head keeps between encodings (the residual of a `residual:` format, a library
/// codec's memory); 0 for most. It starts as zeros.
size_t memory_bytes(const StateFormat& format, StateShape shape);

/// Largest magnitude: NaN ignored, infinity taken as FLT_MAX, 0 for none.
float state_amax(const float* state, int64_t count);

/// Number of NaN and infinities.
uint64_t count_non_finite(const float* state, int64_t count);

/// Encodes state [head_dim, state_dim] into `packed` (packed_bytes). `span_amax` is used only where
/// the FP32 scale spans the layer: the largest state_amax of the layer's heads. `memory` may be
/// null when memory_bytes is 0. Adds to `health`.
void encode_head(const StateCodec& codec, StateShape shape, const float* state,
                 const RandomKey& key, float span_amax, std::byte* packed, std::byte* memory,
                 EncodeHealth* health);

/// Decodes `packed` into state [head_dim, state_dim] FP32.
void decode_head(const StateFormat& format, StateShape shape, const std::byte* packed,
                 float* state);

}  // namespace replayeval
