// What one report holds and another one of the same run does not.
#pragma once

#include <string>

#include "reports/results.h"

namespace replayeval {

/// What `stored` holds and `report` does not, as part of a sentence ("96 of 100 positions of
/// document 3608 by state fp32, and 3 more"); empty when `report` holds all of it. States are
/// matched by definition, documents by id, answers by task, item and repeat. The last position of a
/// document that has grown since counts for nothing: its nll has to be computed again.
std::string shortfall(const Report& stored, const Report& report);

}  // namespace replayeval
