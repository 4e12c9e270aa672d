#include "models/qwen.h"

#include <cmath>
#include <stdexcept>

namespace replayeval::family {
namespace {

GdnSpec read_gdn(const Checkpoint& checkpoint, const std::string& prefix, int hidden, double eps,
                 const QwenForm& form) {
  const Config& config = checkpoint.config();
  GdnSpec mixer;
  mixer.key_heads = config.size("linear_num_key_heads");
  mixer.value_heads = config.size("linear_num_value_heads");
  mixer.key_dim = config.size("linear_key_head_dim");
  mixer.value_dim = config.size("linear_value_head_dim");
  mixer.conv_kernel = config.size("linear_conv_kernel_dim", 4);
  require_divides(config, "linear_num_key_heads", mixer.key_heads, "linear_num_value_heads",
                  mixer.value_heads);
  form.read_projections(checkpoint, prefix, hidden, mixer);
  const int64_t value_width = int64_t{mixer.value_heads} * mixer.value_dim;
  const int64_t channels = 2 * int64_t{mixer.key_heads} * mixer.key_dim + value_width;
  mixer.conv_weight = checkpoint.values(prefix + "conv1d.weight", {channels, 1, mixer.conv_kernel});
  mixer.dt_bias = checkpoint.values(prefix + "dt_bias", {mixer.value_heads});
  mixer.a_exp = checkpoint.values(prefix + "A_log", {mixer.value_heads});
  for (float& a : mixer.a_exp) a = static_cast<float>(std::exp(static_cast<double>(a)));
  mixer.norm = read_norm(checkpoint, prefix + "norm", mixer.value_dim, eps);  // w, not 1 + w
  mixer.out_proj = read_linear(checkpoint, prefix + "out_proj", hidden, value_width);
  return mixer;
}

MoeSpec read_moe(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                 Activation activation, const QwenForm& form) {
  const Config& config = checkpoint.config();
  MoeSpec moe;
  moe.score = MoeSpec::Score::softmax;
  moe.normalize = form.normalize_experts;
  moe.experts_per_token = config.size("num_experts_per_tok");
  const int experts = read_expert_count(checkpoint, "num_experts", prefix + "gate.weight",
                                        moe.experts_per_token, "num_experts_per_tok");
  const int width = config.size("moe_intermediate_size");
  moe.router = read_linear(checkpoint, prefix + "gate", experts, hidden);
  if (checkpoint.has(prefix + "experts.gate_up_proj")) {
    const WeightView gate_up =
        checkpoint.weight(prefix + "experts.gate_up_proj", {experts, 2 * width, hidden});
    const WeightView down =
        checkpoint.weight(prefix + "experts.down_proj", {experts, hidden, width});
    for (int64_t e = 0; e < experts; ++e) {
      moe.experts.push_back(split_gated_mlp(row_slice(gate_up, e * 2 * width, 2 * width),
                                            row_slice(down, e * hidden, hidden), activation));
    }
  } else {
    for (int e = 0; e < experts; ++e) {
      moe.experts.push_back(read_gated_mlp(
          checkpoint, prefix + "experts." + std::to_string(e) + ".", hidden, width, activation));
    }
  }
  moe.shared = read_gated_mlp(checkpoint, prefix + "shared_expert.", hidden,
                              config.size("shared_expert_intermediate_size"), activation);
  moe.shared_gate = read_linear(checkpoint, prefix + "shared_expert_gate", 1, hidden);
  return moe;
}

std::vector<LayerKind> read_layers(const Config& config, int layers) {
  if (std::optional<std::vector<LayerKind>> listed = listed_mixers(config)) return *listed;
  const int interval = config.size("full_attention_interval", 4);
  std::vector<LayerKind> kinds;
  for (int i = 0; i < layers; ++i) {
    kinds.push_back((i + 1) % interval == 0 ? LayerKind::attention : LayerKind::recurrent);
  }
  return kinds;
}

}  // namespace

ModelSpec build_qwen(const Checkpoint& checkpoint, const QwenForm& form) {
  const Config& config = checkpoint.config();
  const std::string prefix =
      find_prefix(checkpoint, {"model.", "model.language_model.", "language_model.model."},
                  "embed_tokens.weight");
  const int layers = config.size("num_hidden_layers");
  ModelSpec model =
      start_model(checkpoint, form.name, prefix + "embed_tokens.weight", prefix, layers);
  const std::vector<LayerKind> kinds = read_layers(config, layers);
  const double eps = config.epsilon("rms_norm_eps", 1e-6);
  require_silu(config, "hidden_act");
  AttentionForm attention;
  attention.bias = config.boolean("attention_bias", false);
  attention.rope = rope_config(config, {10000.0, 0.25});
  attention.gated_with_norms = true;
  attention.eps = eps;

  for (int i = 0; i < layers; ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    Block mixer;
    mixer.layer = i;
    mixer.norm = read_norm(checkpoint, layer + "input_layernorm", model.hidden, eps, true);
    if (kinds[static_cast<size_t>(i)] == LayerKind::recurrent) {
      mixer.branches.push_back(
          {read_gdn(checkpoint, layer + "linear_attn.", model.hidden, eps, form)});
    } else {
      mixer.branches.push_back(
          {read_attention(checkpoint, layer + "self_attn.", model.hidden, attention)});
    }
    Block mlp;
    mlp.layer = i;
    mlp.norm = read_norm(checkpoint, layer + "post_attention_layernorm", model.hidden, eps, true);
    if (form.mixture(i)) {
      mlp.branches.push_back(
          {read_moe(checkpoint, layer + "mlp.", model.hidden, Activation::silu, form)});
    } else {
      mlp.branches.push_back({read_gated_mlp(checkpoint, layer + "mlp.", model.hidden,
                                             config.size("intermediate_size"), Activation::silu)});
    }
    model.blocks.push_back(std::move(mixer));
    model.blocks.push_back(std::move(mlp));
  }
  model.final_norm = read_norm(checkpoint, prefix + "norm", model.hidden, eps, true);
  return model;
}

}  // namespace replayeval::family
