// Mamba-2 (model_type mamba2): h = h + mixer(RMSNorm(h)), the residual stream in FP32 (models.md
// section 6).
#include "models/family.h"

namespace replayeval {

using namespace family;

ModelSpec build_mamba2(const Checkpoint& checkpoint) {
  const Config& config = checkpoint.config();
  const std::string prefix = "backbone.";
  // The files of the state-spaces group say "embedding".
  const std::string embedding =
      checkpoint.first_of({prefix + "embeddings.weight", prefix + "embedding.weight"});
  ModelSpec model =
      start_model(checkpoint, "mamba2", embedding, prefix, config.size("num_hidden_layers"));
  model.residual_fp32 = config.boolean("residual_in_fp32", true);
  const double eps = config.epsilon("layer_norm_epsilon", 1e-5);

  Mamba2Sizes sizes;
  sizes.heads_field = "num_heads";
  sizes.groups_field = "n_groups";
  sizes.heads = config.size("num_heads");
  sizes.head_dim = config.size("head_dim");
  const int64_t inner = int64_t{config.size("expand", 2)} * model.hidden;
  if (int64_t{sizes.heads} * sizes.head_dim != inner) {
    config.fail("num_heads", std::to_string(inner) + " (expand * hidden_size) / head_dim (" +
                                 std::to_string(sizes.head_dim) + ")");
  }
  sizes.groups = config.size("n_groups");
  sizes.state_dim = config.size("state_size");
  sizes.conv_kernel = config.size("conv_kernel", 4);
  sizes.in_bias = sizes.out_bias = config.boolean("use_bias", false);
  sizes.conv_bias = config.boolean("use_conv_bias", true);
  sizes.eps = eps;
  require_silu(config, "hidden_act");
  read_time_step_limit(config, sizes);

  for (int i = 0; i < model.layers; ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    Block block;
    block.layer = i;
    block.norm = read_norm(checkpoint, layer + "norm", model.hidden, eps);
    block.branches.push_back({read_mamba2(checkpoint, layer + "mixer.", model.hidden, sizes)});
    model.blocks.push_back(std::move(block));
  }
  model.final_norm = read_norm(checkpoint, prefix + "norm_f", model.hidden, eps);
  return model;
}

}  // namespace replayeval
