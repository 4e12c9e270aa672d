// Inner parts of the dense products (kernels/dense_simd.cc), called through base/simd_dispatch.h,
// and the scratch memory of the threads that run them.
#pragma once

#include <cstddef>

#include "base/simd_dispatch.h"
#include "kernels/dense.h"

namespace replayeval {

constexpr int64_t kPanel = 32;         // columns of a packed panel
constexpr int64_t kDepth = 256;        // input columns of a packed panel
constexpr int64_t kMaxRowBlock = 516;  // rows of x packed at a time

/// Floats of scratch that dense_unit needs for a block of `rows` rows.
constexpr int64_t dense_scratch(int64_t rows) {
  return (rows + 16) * (kDepth + 16) + kPanel * (kDepth + 34);
}

/// At least `floats` floats, aligned to 64 bytes, that belong to this thread until its next call.
/// Null without memory.
float* thread_scratch(int64_t floats);

REPLAYEVAL_SIMD_DECLARE(void dense_unit(const LinearJob& job, int64_t row, int64_t rows,
                                        int64_t col, int64_t cols, float* scratch);
                        void widen_block(const void* data, WeightType type, int64_t n, float* out);
                        void narrow_block(const float* x, int64_t n, WeightType type, void* out))

}  // namespace replayeval
