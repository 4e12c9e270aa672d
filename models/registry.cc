// The table of model families.
#include <stdexcept>

#include "models/family.h"

namespace replayeval {
namespace {

constexpr ModelFamily kFamilies[] = {
    {"nemotron_h",
     "Nemotron-H, Nemotron 3: Mamba-2, attention without positions, squared-ReLU MLP or experts",
     true, build_nemotron_h},
    {"mamba2", "Mamba-2", false, build_mamba2},
    {"bamba", "Bamba: Mamba-2 and attention", false, build_bamba},
    {"granitemoehybrid", "Granite 4 hybrid: Mamba-2, attention, experts beside a shared MLP", false,
     build_granite_hybrid},
    {"falcon_h1", "Falcon-H1: Mamba-2 and attention side by side in each layer", false,
     build_falcon_h1},
    {"qwen3_5", "Qwen3.5: Gated DeltaNet and gated attention", true, build_qwen3_5},
    {"qwen3_5_moe", "Qwen3.5 with experts", false, build_qwen3_5_moe},
    {"qwen3_next", "Qwen3-Next: Gated DeltaNet and gated attention with experts", false,
     build_qwen3_next},
};

}  // namespace

std::span<const ModelFamily> model_families() { return kFamilies; }

const ModelFamily& find_family(const Checkpoint& checkpoint) {
  const Config& config = checkpoint.config();
  std::string type = config.text("model_type");
  // The text part of a multimodal config, or a checkpoint of that part alone.
  if (type.ends_with("_text")) type.resize(type.size() - 5);
  std::string known;
  for (const ModelFamily& family : kFamilies) {
    if (type == family.name) return family;
    known += (known.empty() ? "" : " ") + std::string(family.name);
  }
  config.fail("model_type", "one of: " + known);
}

}  // namespace replayeval
