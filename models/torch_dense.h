// `dense: fast`: matrix products through LibTorch's BLAS. Faster at some shapes, but a row's bits
// may depend on the rows beside it.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/dense.h"

namespace replayeval {

/// As kernels' `linear`, in the library's own summation order. `bf16`: x is rounded to BF16 and the
/// product runs in BF16 with FP32 accumulation (the result is widened); otherwise 16-bit weights
/// are widened to FP32 a slice at a time.
void torch_linear(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                  const float* bias, float* y, int64_t y_stride, bool bf16);

/// Version of LibTorch.
std::string torch_version();

/// Threads that the library's products use.
void set_torch_threads(int threads);

}  // namespace replayeval
