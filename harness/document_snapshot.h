// Where a teacher-forced document stands, saved in the run folder so that a run which was stopped
// or killed goes on inside it (DESIGN.md section 6).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/metrics.h"
#include "models/state_store.h"
#include "reports/results.h"
#include "reports/run_folder.h"

namespace replayeval {

/// What a document's run carries from chunk to chunk beside the StateSet.
struct DocumentProgress {
  int64_t position = 0;                          // tokens done
  int64_t span_first = 0;                        // first position of the unit in progress
  std::vector<PositionFigures> figures;          // [row], of the unit in progress
  std::vector<StateSpan> samples;                // [row], state errors of it
  std::vector<std::vector<StoreHealth>> health;  // [row][layer] when the unit began
  std::vector<std::vector<double>> decay;        // [layer][head] sums when it began; may be empty
  double nll_sum = 0;                            // of the document's beginning, for the warning
  int64_t nll_count = 0;
  std::vector<int64_t> cache_ends;  // the key-value caches are saved in pieces that end here
};

/// Saves both under `name`; only the keys and values since the last snapshot are written.
/// `identity` is a text that a later run must give too (states, document, tokens).
void save_snapshot(RunFolder& folder, const std::string& name, const std::string& identity,
                   DocumentProgress& progress, const StateSet& states);

/// `refused` says why a snapshot that is there was not used.
struct SnapshotOutcome {
  bool used = false;
  std::string refused;
};

/// Puts a snapshot of the same name and identity into fresh `states` and `progress`, both made for
/// the same rows. Where there is none that is whole and of that identity both are as before.
SnapshotOutcome load_snapshot(const RunFolder& folder, const std::string& name,
                              const std::string& identity, DocumentProgress& progress,
                              StateSet& states);

/// Removes what save_snapshot wrote.
void remove_snapshot(RunFolder& folder, const std::string& name, const DocumentProgress& progress,
                     int rows);

}  // namespace replayeval
