// State health by layer: what `show --health` prints.
#pragma once

#include <vector>

#include "reports/results.h"
#include "reports/tables.h"

namespace replayeval {

/// One table a state in which any element was non-finite, saturated, clipped or vanished; a row a
/// layer with encoded elements.
std::vector<Table> health_tables(const Report& report);

}  // namespace replayeval
