// The two interpreters of a FormatDescriptor behind encode_head and decode_head: the plain one,
// written element by element from the definition, and the vectorised one, which gives the same
// bits.
#pragma once

#include <cstddef>

#include "base/simd_dispatch.h"
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

/// True where the vectorised interpreter knows the format and the shape; otherwise the plain one is
/// used.
bool has_fast_path(const FormatDescriptor& descriptor, const PackedLayout& layout);

/// FP32 numbers of scratch memory that the vectorised interpreter needs.
size_t fast_scratch_floats(const PackedLayout& layout);

// clang-format off
REPLAYEVAL_SIMD_DECLARE(void encode_fast(const EncodeTask& task, float* scratch, EncodeCounts* counts))
REPLAYEVAL_SIMD_DECLARE(void decode_fast(const FormatDescriptor& descriptor, const PackedLayout& layout,
                                         const std::byte* packed, float* scratch, float* x))
REPLAYEVAL_SIMD_DECLARE(float amax_fast(const float* x, int64_t count))
REPLAYEVAL_SIMD_DECLARE(uint64_t non_finite_fast(const float* x, int64_t count))
REPLAYEVAL_SIMD_DECLARE(void random_row(const PhiloxKey& key, int row, int columns, uint32_t* words))
// clang-format on

}  // namespace replayeval
