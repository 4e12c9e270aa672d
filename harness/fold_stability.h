// `replayeval check fold`: for each Gated DeltaNet head of dumped windows, how much the triangular
// solve amplifies and whether folding cached corrections (gdn_fold: cached) keeps a read format's
// error bounded (ReplaySSM B.4; the criterion is derived in kernels/gdn.h).
#pragma once

#include <cstdint>
#include <string>

namespace replayeval {

struct FoldStabilityOptions {
  std::string dumps;           // a file, a folder, or a run with dump_states
  std::string read = "nvfp4";  // format of the read checkpoint
  uint64_t seed = 1;
};

/// The table, one row a layer and head, slowest decay first. Throws std::invalid_argument when no
/// dump holds a GDN layer with records.
std::string fold_stability_text(const FoldStabilityOptions& options);

}  // namespace replayeval
