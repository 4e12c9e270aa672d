// Bamba (model_type bamba): h = h + mixer(norm(h)), h = h + MLP(norm(h)); Mamba-2, or attention
// with half-rotary positions in the layers of attn_layer_indices (models.md section 7).
#include <set>

#include "models/family.h"

namespace replayeval {

using namespace family;

ModelSpec build_bamba(const Checkpoint& checkpoint) {
  const Config& config = checkpoint.config();
  const std::string prefix = "model.";
  ModelSpec model = start_model(checkpoint, "bamba", prefix + "embed_tokens.weight", prefix,
                                config.size("num_hidden_layers"));
  const double eps = config.epsilon("rms_norm_eps", 1e-5);
  std::set<int64_t> attention_layers;
  if (config.has("attn_layer_indices")) {
    for (const int64_t index : config.integers("attn_layer_indices")) {
      if (index < 0 || index >= model.layers) {
        config.fail("attn_layer_indices",
                    "indices below num_hidden_layers (" + std::to_string(model.layers) + ")");
      }
      attention_layers.insert(index);
    }
  }
  AttentionForm attention;
  attention.bias = config.boolean("attention_bias", false);
  attention.rope = rope_config(config, {10000.0, 0.5});
  attention.rope->partial_rotary_factor = 0.5;  // fixed in the model, whatever the config says
  Mamba2Sizes sizes = bamba_sizes(config, model.hidden);
  sizes.eps = eps;
  const Activation activation = read_activation(config, "hidden_act", "silu");

  for (int i = 0; i < model.layers; ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    Block mixer;
    mixer.layer = i;
    mixer.norm = read_norm(checkpoint, layer + "input_layernorm", model.hidden, eps);
    if (attention_layers.contains(i)) {
      mixer.branches.push_back(
          {read_attention(checkpoint, layer + "self_attn.", model.hidden, attention)});
    } else {
      mixer.branches.push_back({read_mamba2(checkpoint, layer + "mamba.", model.hidden, sizes)});
    }
    Block mlp;
    mlp.layer = i;
    mlp.norm = read_norm(checkpoint, layer + "pre_ff_layernorm", model.hidden, eps);
    mlp.branches.push_back({read_gated_mlp(checkpoint, layer + "feed_forward.", model.hidden,
                                           config.size("intermediate_size"), activation,
                                           config.boolean("mlp_bias", false))});
    model.blocks.push_back(std::move(mixer));
    model.blocks.push_back(std::move(mlp));
  }
  model.final_norm = read_norm(checkpoint, prefix + "final_layernorm", model.hidden, eps);
  return model;
}

}  // namespace replayeval
