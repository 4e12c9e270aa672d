// The decoder layer that Qwen3-Next and Qwen3.5 share (models.md sections 4 and 5): Gated DeltaNet
// or gated full attention, then a gated MLP or a mixture of experts, norms that multiply by 1 + w.
#pragma once

#include <functional>

#include "models/family.h"

namespace replayeval::family {

/// What the families differ in.
struct QwenForm {
  const char* name;
  /// Fills qkv, z, b and a of a GDN mixer whose sizes are set, from the tensors PREFIX +
  /// "in_proj_...".
  void (*read_projections)(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                           GdnSpec& mixer);
  /// Does this layer hold a mixture?
  std::function<bool(int layer)> mixture;
  bool normalize_experts = true;
};

/// Builds the model. Tensors are named model.*, or model.language_model.* in multimodal files,
/// whose other tensors are left alone.
ModelSpec build_qwen(const Checkpoint& checkpoint, const QwenForm& form);

}  // namespace replayeval::family
