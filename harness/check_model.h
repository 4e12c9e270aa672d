// `replayeval check model`: a checkpoint's logits, hidden states, caches and greedy tokens against
// stored answers of another program (the reference.safetensors layout of models-ref), through the
// same forward pass that a run uses.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "models/model.h"

namespace replayeval {

struct CheckModelOptions {
  std::filesystem::path folder;
  std::optional<std::filesystem::path> reference;  // default: reference.safetensors in the folder
  std::vector<int> windows = {16, 1};
  std::vector<int> chunks = {0, 7, 64, 1};  // tokens a call; 0: the whole sequence
  ComputeType compute = ComputeType::fp32;
  DenseMode dense = DenseMode::invariant;
  KernelForm kernels = KernelForm::fast;
  DtClamp dt_clamp = DtClamp::forward;
  Device device = Device::cpu;
  std::string state = "fp32";  // also a low-precision spelling, for runs of two kernel forms
  bool greedy = true;
};

/// Result of one comparison.
struct CheckRow {
  std::string what;  // "logits, window 16, chunks of 7"
  double worst = 0;  // largest absolute difference
  double bound = 0;
  std::string place;  // index and both values of the worst element
  bool passed() const { return worst <= bound; }
};

struct CheckModelResult {
  std::vector<CheckRow> rows;
  std::string first_layer_differing;  // empty when none
  bool passed() const;
};

/// Compares as models-ref/README.md says: FP32 logits within 5 times the library's own distance to
/// its FP64 pass at the stored positions, within 10 times it (at least 2e-5) of the FP32 logits
/// everywhere; hidden states, convolution and recurrent states in proportion; greedy tokens equal.
/// The library's distances come from meta.json beside the reference; where that file is missing (a
/// reference made by models/dump_reference.py holds them as tensors), 1e-3 of the largest logit is
/// the bound.
CheckModelResult check_model_results(const CheckModelOptions& options);

/// Prints the rows; returns 0 when all pass, 1 otherwise.
int check_model(const CheckModelOptions& options);

}  // namespace replayeval
