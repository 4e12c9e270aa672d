// Dense products on the device in the one order of kernels/dense.h: every output is the sequence of
// FP32 fused multiply-adds over c = 0, 1, ... from +0, then the bias, so that the bits are those of
// `linear` on hardware with fused multiply-add, whatever rows and jobs run beside it.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dense.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// linear over several jobs: x, x_rows, w.data, bias and y of each are device memory; the table of
/// jobs itself is read on the host before the call returns. Outputs must not overlap, nor an output
/// an input. Jobs of up to 16 rows share one launch, the others another. Any alignment and stride
/// is right; rows of x and w that start on multiples of 16 bytes are fast, and many rows in one job
/// are faster than the same rows in several calls.
/// Throws std::invalid_argument as linear, std::runtime_error for errors of the device.
void linear_cuda(std::span<const LinearJob> jobs, CudaStream stream = nullptr);

/// The same for one product: y[i, r] = sum_c x[i, c] w[r, c] + bias[r], i < m.
void linear_cuda(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                 const float* bias, float* y, int64_t y_stride, CudaStream stream = nullptr);

}  // namespace replayeval
