// Mamba-2 replay on the device: the contract of kernels/mamba2.h, sum for sum.
#pragma once

#include <span>

#include "kernels/mamba2.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// mamba2_advance (KernelForm::fast) on the device. Every pointer is device memory, but in a
/// StateRow `plans`, `plan_of_head` and `pending`, which are read (and pending updated) on the host
/// when the call is made; the work is queued in `stream`. Packed heads and memories start on
/// multiples of 16 bytes (strides too), float arrays on multiples of 4. One block walks all windows
/// of a row and head, the state in its shared memory (in global scratch where it does not fit).
/// Final tokens of rows of 128 state columns, with windows of up to 16 tokens and a format of row,
/// head or block scales, keep the state in registers, several times faster. The order of every sum
/// is that of the host's kernels on hardware with fused multiply-add, so that the bits are the
/// host's, whatever the split, the rows and their order. Formats whose scale spans the layer go
/// span by span. Throws what mamba2_advance throws, std::invalid_argument for a library's format,
/// and std::runtime_error for errors of the device.
void mamba2_advance_cuda(const Mamba2Layer& layer, std::span<StateRow> rows,
                         std::span<const Mamba2Inputs> inputs, AdvanceMode mode,
                         CudaStream stream = nullptr);

/// mamba2_flush on the device.
void mamba2_flush_cuda(const Mamba2Layer& layer, std::span<StateRow> rows,
                       std::span<const Mamba2Inputs> inputs, CudaStream stream = nullptr);

}  // namespace replayeval
