// The causal convolution on the device: the contract of kernels/causal_conv.h, sum for sum.
#pragma once

#include <span>

#include "kernels/causal_conv.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// causal_conv (KernelForm::fast) on the device: pointers are device memory, the work is queued in
/// `stream`; the bits are the host's on hardware with fused multiply-add. Throws as causal_conv,
/// and std::runtime_error for errors of the device.
void causal_conv_cuda(const CausalConv& conv, std::span<const CausalConvRow> rows,
                      CudaStream stream = nullptr);

}  // namespace replayeval
