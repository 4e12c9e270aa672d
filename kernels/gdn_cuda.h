// Gated DeltaNet and KDA replay on the device: the contract of kernels/gdn.h, sum for sum.
#pragma once

#include <span>

#include "kernels/gdn.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// gdn_advance (KernelForm::fast) on the device; what mamba2_advance_cuda says of pointers, bits
/// and errors holds here too.
void gdn_advance_cuda(const GdnLayer& layer, std::span<StateRow> rows,
                      std::span<const GdnInputs> inputs, AdvanceMode mode,
                      CudaStream stream = nullptr);

/// gdn_flush on the device.
void gdn_flush_cuda(const GdnLayer& layer, std::span<StateRow> rows,
                    std::span<const GdnInputs> inputs, CudaStream stream = nullptr);

}  // namespace replayeval
