// The two interpreters of a FormatDescriptor behind encode_head and decode_head: the plain one,
// written element by element from the definition, and the vectorised one, which gives the same
// bits.
#pragma once

#include <cstddef>

#include "quant/packed_layout.h"
#include "quant/quantize.h"
#include "quant/random.h"

namespace replayeval {

/// One head to encode, after residual, transform and column scale: x [head_dim, state_dim].
struct EncodeTask {
  const FormatDescriptor* descriptor = nullptr;
  PackedLayout layout{};
  const float* x = nullptr;
  bool stochastic = false;
  PhiloxKey key;
  float layer_amax = 0;   // Span::layer
  float fixed_scale = 0;  // Span::fixed
  std::byte* packed = nullptr;
};

/// Counts of one encoding; non_finite are those of x.
struct EncodeCounts {
  uint64_t non_finite = 0, saturated = 0, clipped = 0, vanished = 0;
};

/// Key and counter of DESIGN.md section 1; residual encodings pass role + 2.
PhiloxKey philox_key(const RandomKey& key, uint32_t role_offset = 0);

void encode_reference(const EncodeTask& task, EncodeCounts* counts);
void decode_reference(const FormatDescriptor& descriptor, const PackedLayout& layout,
                      const std::byte* packed, float* x);

}  // namespace replayeval
