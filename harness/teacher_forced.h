// The teacher-forced job: text to tokens to chunks through the model, every state precision a row
// of one batch, figures of every position into the run folder (DESIGN.md section 3).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "harness/experiment.h"

namespace replayeval {

/// What the command line adds to an experiment.
struct RunOptions {
  bool resume = false;
  bool dry_run = false;
  int shard = 0;  // of `shards` processes that fill one run folder
  int shards = 1;
};

/// Bytes a run needs, from headers and settings alone.
struct MemoryPlan {
  int64_t weights = 0;        // mapped
  int64_t cache_per_row = 0;  // key-value cache at the longest document
  int64_t state_per_row = 0;  // largest row's packed checkpoints and ring
  int64_t chunk_per_row = 0;  // activations of one chunk
  int64_t available = 0;      // of this machine now
  int rows_per_wave = 0;      // the FP32 row included
  int waves = 0;
  int64_t report_bytes = 0;  // upper bound, before compression
};
MemoryPlan plan_memory(const Experiment& experiment, const ModelSpec& model,
                       int64_t longest_document, int documents, int states);

/// Runs the experiment into its run folder and assembles the report. Prints progress. Returns 0; 1
/// when it was stopped before the end (what is finished is kept). Throws as the parts do.
int run_teacher_forced(const Experiment& experiment, const RunOptions& options);

}  // namespace replayeval
