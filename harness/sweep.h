// Attribution: which layers and heads cause the KL of a state precision, from runs that have it in
// one place only or everywhere but there, and which to keep in a wider format for the least KL at a
// given number of bits.
#pragma once

#include <string>
#include <vector>

#include "harness/experiment.h"
#include "models/model.h"

namespace replayeval {

/// The states that a sweep adds, in order of layer and head. Empty without one.
std::vector<StatePrecision> expand_sweep(const Sweep& sweep, const ModelSpec& model,
                                         const StateOptions& defaults);

}  // namespace replayeval
