// The provenance of a run as a JSON object, for the JSON forms of the tables.
#pragma once

#include <nlohmann/json.hpp>

#include "reports/results.h"

namespace replayeval {

nlohmann::ordered_json run_json(const RunInfo& run);

}  // namespace replayeval
