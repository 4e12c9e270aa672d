// Checkpoints with random BF16 weights in the layouts of DESIGN.md section 9: for timings and
// memory, not for accuracy.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace replayeval {

/// Names that write_random_checkpoint knows.
std::vector<std::string> random_checkpoint_names();

/// Writes config.json and model.safetensors into `folder`: `bench-gdn-4b` (Qwen3.5 layout, 8.4 GB),
/// `bench-mamba2-4b` (Nemotron-H layout, 7.2 GB), `bench-gdn-200m` (0.39 GB, the vocabulary of the
/// small models that ship, whose tokenizer it takes), and `bench-gdn-tiny`, `bench-mamba2-tiny` of
/// the same layouts with two or three layers of each kind and a hidden size of 64. Weights are
/// uniform with variance 1 / in, a function of the seed alone. Throws std::invalid_argument for an
/// unknown name, std::runtime_error when the disk refuses.
void write_random_checkpoint(const std::string& name, const std::filesystem::path& folder,
                             uint64_t seed = 1);

}  // namespace replayeval
