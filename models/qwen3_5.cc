// Qwen3.5, dense (model_type qwen3_5, qwen3_5_text) and with experts in every layer (qwen3_5_moe):
// projections in plain order (models.md section 4).
#include "models/qwen.h"

namespace replayeval {
namespace {

using namespace family;

void read_projections(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                      GdnSpec& mixer) {
  const int64_t value_width = int64_t{mixer.value_heads} * mixer.value_dim;
  const int64_t key_width = int64_t{mixer.key_heads} * mixer.key_dim;
  mixer.qkv = read_linear(checkpoint, prefix + "in_proj_qkv", 2 * key_width + value_width, hidden);
  mixer.z = read_linear(checkpoint, prefix + "in_proj_z", value_width, hidden);
  mixer.b = read_linear(checkpoint, prefix + "in_proj_b", mixer.value_heads, hidden);
  mixer.a = read_linear(checkpoint, prefix + "in_proj_a", mixer.value_heads, hidden);
}

}  // namespace

ModelSpec build_qwen3_5(const Checkpoint& checkpoint) {
  return build_qwen(checkpoint, {"qwen3_5", read_projections, [](int) { return false; }, true});
}

ModelSpec build_qwen3_5_moe(const Checkpoint& checkpoint) {
  // norm_topk_prob does not exist here: the chosen weights are always normalised.
  return build_qwen(checkpoint, {"qwen3_5_moe", read_projections, [](int) { return true; }, true});
}

}  // namespace replayeval
