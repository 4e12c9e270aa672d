// States, and the records that made them, as a run or another engine hands them over: one HDF5 file
// a document and position (reports/SCHEMA.md, State dumps).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace replayeval {

/// One recurrent layer at one position of one sequence. `state` [heads, head_dim, state_dim] FP32
/// is the state after the token at `position`, before any encoding. Records of the last `tokens`
/// tokens, oldest first; empty when not traced. Mamba-2: x [tokens, heads, head_dim], b and c
/// [tokens, groups, state_dim], dt [tokens, heads], decay_log2 [heads] = A log2(e). GDN, KDA: q and
/// k [tokens, groups, state_dim] before their L2 normalisation (groups = key heads), v [tokens,
/// heads, head_dim], decay_log2 [tokens, heads] (KDA: [tokens, heads, state_dim]), beta [tokens,
/// heads].
struct LayerDump {
  int layer = 0;
  std::string kind;  // mamba2, gdn, kda
  int heads = 0, head_dim = 0, state_dim = 0, groups = 0, tokens = 0;
  std::vector<float> state;
  std::vector<float> x, b, c, dt;    // Mamba-2
  std::vector<float> q, k, v, beta;  // GDN, KDA
  std::vector<float> decay_log2;
};

struct StateDump {
  std::string model_sha256, document;
  int64_t position = 0;
  std::vector<LayerDump> layers;
};

/// Writes `path` whole or not at all. Throws std::runtime_error with the system's reason.
void write_state_dump(const StateDump& dump, const std::filesystem::path& path);

/// Reads one dump. Throws std::runtime_error naming file and dataset when something is missing or
/// of another shape.
StateDump read_state_dump(const std::filesystem::path& path);

/// All *.h5 dumps of a file or folder (a run's dumps/ too), sorted by name. Throws
/// std::runtime_error when there is none.
std::vector<StateDump> read_state_dumps(const std::filesystem::path& path);

}  // namespace replayeval
