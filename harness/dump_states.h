// What `dump_states` writes: the FP32 row's states after a flush, with the records of the window
// that led there.
#pragma once

#include <cstdint>
#include <string>

#include "models/model.h"
#include "models/state_store.h"
#include "reports/state_dump.h"

namespace replayeval {

/// Row 0's decoded recurrence checkpoints and its traced records (StateStore::set_trace).
/// `position` is the last token folded.
StateDump make_state_dump(const Model& model, const StateSet& states, const std::string& document,
                          int64_t position);

}  // namespace replayeval
