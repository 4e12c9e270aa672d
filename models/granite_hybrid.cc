// Granite 4 hybrid (model_type granitemoehybrid): Bamba's mixers with multipliers on embedding,
// residual and logits; each layer ends in a shared MLP and, when there are experts, a mixture
// beside it (models.md section 8).
#include <cmath>

#include "models/family.h"

namespace replayeval {
namespace {

using namespace family;

MoeSpec read_moe(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                 Activation activation) {
  const Config& config = checkpoint.config();
  const bool published = checkpoint.has(prefix + "input_linear.weight");
  const std::string router = prefix + (published ? "router.layer" : "router");
  MoeSpec moe;
  moe.score = MoeSpec::Score::softmax_top;
  moe.experts_per_token = config.size("num_experts_per_tok");
  const int experts = read_expert_count(checkpoint, "num_local_experts", router + ".weight",
                                        moe.experts_per_token, "num_experts_per_tok");
  const int width = config.size("intermediate_size");
  moe.router = read_linear(checkpoint, router, experts, hidden);
  const WeightView gate_up =
      checkpoint.weight(prefix + (published ? "input_linear.weight" : "experts.gate_up_proj"),
                        {experts, 2 * width, hidden});
  const WeightView down =
      checkpoint.weight(prefix + (published ? "output_linear.weight" : "experts.down_proj"),
                        {experts, hidden, width});
  for (int64_t e = 0; e < experts; ++e) {
    moe.experts.push_back(split_gated_mlp(row_slice(gate_up, e * 2 * width, 2 * width),
                                          row_slice(down, e * hidden, hidden), activation));
  }
  return moe;
}

}  // namespace

ModelSpec build_granite_hybrid(const Checkpoint& checkpoint) {
  const Config& config = checkpoint.config();
  const std::string prefix = "model.";
  const int layers = config.size("num_hidden_layers");
  ModelSpec model =
      start_model(checkpoint, "granitemoehybrid", prefix + "embed_tokens.weight", prefix, layers);
  const std::vector<LayerKind> kinds = listed_mixers(config).value_or(
      std::vector<LayerKind>(static_cast<size_t>(layers), LayerKind::recurrent));
  const double eps = config.epsilon("rms_norm_eps", 1e-6);
  model.embedding_multiplier = static_cast<float>(config.number("embedding_multiplier", 1.0));
  const double logits_scaling = config.number("logits_scaling", 1.0);
  if (!(logits_scaling > 0)) config.fail("logits_scaling", "a positive number");
  model.logits_multiplier = static_cast<float>(1.0 / logits_scaling);
  const auto residual = static_cast<float>(config.number("residual_multiplier", 1.0));

  AttentionForm attention;
  attention.bias = config.boolean("attention_bias", false);
  attention.scale = config.number("attention_multiplier", 1.0);
  if (config.text("position_embedding_type", "") == "rope")
    attention.rope = rope_config(config, {});
  Mamba2Sizes sizes = bamba_sizes(config, model.hidden);
  sizes.eps = eps;
  const Activation activation = read_activation(config, "hidden_act", "silu");
  const int experts = config.count("num_local_experts", 0);
  const int width = config.size("shared_intermediate_size");

  for (int i = 0; i < layers; ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    Block mixer;
    mixer.layer = i;
    mixer.norm = read_norm(checkpoint, layer + "input_layernorm", model.hidden, eps);
    if (kinds[static_cast<size_t>(i)] == LayerKind::recurrent) {
      mixer.branches.push_back(
          {read_mamba2(checkpoint, layer + "mamba.", model.hidden, sizes), 1.0f, residual});
    } else {
      mixer.branches.push_back(
          {read_attention(checkpoint, layer + "self_attn.", model.hidden, attention), 1.0f,
           residual});
    }
    Block mlp;
    mlp.layer = i;
    mlp.norm = read_norm(checkpoint, layer + "post_attention_layernorm", model.hidden, eps);
    MlpSpec shared = split_gated_mlp(
        checkpoint.weight(layer + "shared_mlp.input_linear.weight",
                          {2 * int64_t{width}, model.hidden}),
        checkpoint.weight(layer + "shared_mlp.output_linear.weight", {model.hidden, width}),
        activation);
    if (experts > 0) {
      MoeSpec moe = read_moe(checkpoint, layer + "block_sparse_moe.", model.hidden, activation);
      moe.shared = std::move(shared);
      mlp.branches.push_back({std::move(moe), 1.0f, residual});
    } else {
      mlp.branches.push_back({std::move(shared), 1.0f, residual});
    }
    model.blocks.push_back(std::move(mixer));
    model.blocks.push_back(std::move(mlp));
  }
  model.final_norm = read_norm(checkpoint, prefix + "norm", model.hidden, eps);
  return model;
}

}  // namespace replayeval
