// Bytes that single-token decoding must move, from the shapes alone: what a measured time is set
// against (ReplaySSM sections C.2, C.3).
#pragma once

#include "kernels/gpu_timing.h"

namespace replayeval {

/// Bytes of one layer and step, all rows, on average over a window: the checkpoint that is read; at
/// every L-th step the recurrence read, both checkpoints written; the ring's records ((L - 1) / 2
/// on average; `only_reads`: L / 2) and the append of one; inputs and outputs of the token.
double decode_bytes(const DecodeWorkload& workload);

/// Bytes of the conventional step: the recurrence's checkpoint read and written, inputs and
/// outputs.
double conventional_bytes(const DecodeWorkload& workload);

/// The window from 1 to kMaxWindow with the fewest decode_bytes.
int best_window(const DecodeWorkload& workload);

}  // namespace replayeval
