// Timing of mamba2_advance on synthetic records, for `replayeval bench kernels`.
#pragma once

#include <cstdint>

#include "kernels/mamba2.h"

namespace replayeval {

/// One measurement. `operations`: floating-point operations of the window equations (a multiply-add
/// counts two); `bytes`: packed checkpoints and records as they are read and written once.
struct KernelTiming {
  double seconds = 0;
  double operations = 0;
  double bytes = 0;
};

/// What to time: `rows` equal rows walk `tokens` tokens in calls of `tokens_per_call`. `layer`
/// gives the sizes; its arrays are not used.
struct Mamba2Workload {
  Mamba2Layer layer;
  HeadPlan plan;
  int rows = 1;
  int tokens = 512;
  int tokens_per_call = 512;
  int repeats = 3;  // the fastest counts
  KernelForm form = KernelForm::fast;
};

/// Runs the workload once to warm up, then `repeats` times. tokens should be a multiple of the
/// window, so that whole flush cycles are walked. Throws std::invalid_argument as mamba2_advance
/// does.
KernelTiming time_mamba2(const Mamba2Workload& workload);

}  // namespace replayeval
