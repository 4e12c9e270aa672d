// What mamba2_advance and mamba2_flush refuse, on every device. Pointers are compared with null
// only.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/mamba2.h"

namespace replayeval {

/// Sizes of the layer, rows and their plans. Throws std::invalid_argument.
void check_mamba2_layer(const Mamba2Layer& layer, std::span<const StateRow> rows,
                        std::span<const Mamba2Inputs> inputs);

/// Arrays and strides of one row: those of its records, of its queries. Throws
/// std::invalid_argument.
void check_mamba2_inputs(const Mamba2Layer& layer, size_t row, const Mamba2Inputs& in, bool records,
                         bool queries);

}  // namespace replayeval
