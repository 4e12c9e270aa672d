// What gdn_advance and gdn_flush refuse, on every device. Pointers are compared with null only.
#pragma once

#include <span>

#include "kernels/gdn.h"

namespace replayeval {

/// Throws std::invalid_argument for sizes that do not fit together.
void check_gdn_layer(const GdnLayer& layer);

/// Throws std::invalid_argument for a missing array of a row with tokens; without `queries` of any
/// row.
void check_gdn_inputs(std::span<const GdnInputs> inputs, bool queries);

}  // namespace replayeval
