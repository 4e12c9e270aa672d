// Qwen3-Next (model_type qwen3_next): Qwen3.5's layer with projections grouped by key head
// (models.md section 4). Their rows are copied into plain order once, so that everything after them
// is shared.
#include <algorithm>
#include <set>

#include "models/qwen.h"

namespace replayeval {
namespace {

using namespace family;

/// in_proj_qkvz rows, for each key head [q: dk | k: dk | v: r dv | z: r dv]; in_proj_ba rows, for
/// each key head [b: r | a: r]. Value head = key head * r + j.
void read_projections(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                      GdnSpec& mixer) {
  const int ratio = mixer.value_heads / mixer.key_heads;
  const int values = ratio * mixer.value_dim;
  const int group = 2 * mixer.key_dim + 2 * values;
  std::vector<int32_t> qkv, z, b, a;
  const auto take = [&](std::vector<int32_t>& rows, int group_size, int offset, int count) {
    for (int head = 0; head < mixer.key_heads; ++head) {
      for (int i = 0; i < count; ++i) rows.push_back(head * group_size + offset + i);
    }
  };
  take(qkv, group, 0, mixer.key_dim);
  take(qkv, group, mixer.key_dim, mixer.key_dim);
  take(qkv, group, 2 * mixer.key_dim, values);
  take(z, group, 2 * mixer.key_dim + values, values);
  take(b, 2 * ratio, 0, ratio);
  take(a, 2 * ratio, ratio, ratio);
  const std::vector<WeightView> wide = checkpoint.split_rows(
      prefix + "in_proj_qkvz.weight", {int64_t{mixer.key_heads} * group, hidden}, {qkv, z});
  const std::vector<WeightView> narrow = checkpoint.split_rows(
      prefix + "in_proj_ba.weight", {2 * int64_t{mixer.value_heads}, hidden}, {b, a});
  mixer.qkv = plain(wide[0]);
  mixer.z = plain(wide[1]);
  mixer.b = plain(narrow[0]);
  mixer.a = plain(narrow[1]);
}

}  // namespace

ModelSpec build_qwen3_next(const Checkpoint& checkpoint) {
  const Config& config = checkpoint.config();
  std::set<int64_t> dense_layers;
  if (config.has("mlp_only_layers")) {
    const std::vector<int64_t> layers = config.integers("mlp_only_layers");
    dense_layers.insert(layers.begin(), layers.end());
  }
  const int step = config.size("decoder_sparse_step", 1);
  const int experts = config.count("num_experts", 0);
  return build_qwen(checkpoint, {"qwen3_next", read_projections,
                                 [=](int layer) {
                                   return experts > 0 && !dense_layers.contains(layer) &&
                                          (layer + 1) % step == 0;
                                 },
                                 config.boolean("norm_topk_prob", true)});
}

}  // namespace replayeval
