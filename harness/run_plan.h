// What every job prepares alike: threads, memory, and the part of a run folder's plan that model,
// tokenizer and states give.
#pragma once

#include <cstdint>
#include <string>

#include "datasets/tokenizer.h"
#include "harness/experiment.h"
#include "models/model.h"
#include "reports/run_folder.h"

namespace replayeval {

/// Sets the number of threads of this process; 0: one a core.
void use_threads(int threads);

/// Bytes of memory that this machine can give now; on a GPU what is free there, kUnknownMemory
/// where there is none (a plan may be made elsewhere).
constexpr int64_t kUnknownMemory = int64_t{1} << 56;
int64_t available_memory(Device device);
/// For the plan that --dry-run prints.
std::string available_text(int64_t bytes);

/// How an experiment's model runs; a dry run reads its headers on the host. Several rows share
/// their products only in job score, whose steps of one token a row would be slow otherwise.
ModelOptions model_options(const Experiment& experiment, bool dry_run = false);

/// Bytes of a model's weights (mapped), and of what one row holds.
struct RowMemory {
  int64_t weights = 0;
  int64_t cache = 0;  // key-value cache at `tokens`
  int64_t state = 0;  // packed checkpoints, at most, and ring
  int64_t chunk = 0;  // activations of chunk_tokens tokens in one call
};
RowMemory row_memory(const Experiment& experiment, const ModelSpec& model, int64_t tokens);

/// For the progress line: which states have a library's codec, which works on the host, so that
/// their checkpoints are copied at every flush of a GPU's run. Empty when there are none.
std::string host_codec_note(const Experiment& experiment);

/// Throws std::invalid_argument when the precision names layers or heads beyond those of this
/// model, or of what it selects nothing has state.
void check_selections(const StatePrecision& precision, const ModelSpec& model);

/// Who runs what: RunInfo but for its data and tasks, settings, layers and states.
RunPlan common_plan(const Experiment& experiment, const Model& model, const Tokenizer& tokenizer);

}  // namespace replayeval
