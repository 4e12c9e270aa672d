// Nemotron-H (model_type nemotron_h), dense and with experts: h = h + mixer(RMSNorm(h)), one mixer
// a layer, Mamba-2, attention without position signal, squared-ReLU MLP or mixture (models.md
// section 3).
#include <limits>

#include "models/family.h"

namespace replayeval {
namespace {

using namespace family;

std::vector<LayerKind> read_layers(const Config& config) {
  const char* const pattern_field = "hybrid_override_pattern";
  std::optional<std::vector<LayerKind>> listed, pattern;
  const std::string list_field =
      config.has("layers_block_type") ? "layers_block_type" : "layer_types";
  if (config.has(list_field)) listed = layer_kinds(config, list_field, false);
  if (config.has(pattern_field)) {
    pattern.emplace();
    for (const char c : config.text(pattern_field)) {
      switch (c) {
        case 'M':
          pattern->push_back(LayerKind::recurrent);
          break;
        case '*':
          pattern->push_back(LayerKind::attention);
          break;
        case '-':
          pattern->push_back(LayerKind::mlp);
          break;
        case 'E':
          pattern->push_back(LayerKind::moe);
          break;
        default:
          config.fail(pattern_field, "only M (Mamba), * (attention), - (MLP) and E (experts)");
      }
    }
    if (pattern->empty()) config.fail(pattern_field, "at least one layer");
  }
  if (listed && pattern && *listed != *pattern) {
    config.fail(pattern_field, "the same layers as in " + list_field);
  }
  if (listed) return *listed;
  if (pattern) return *pattern;
  config.fail("layers_block_type", "a list of layers, or hybrid_override_pattern");
}

Mamba2Sizes read_sizes(const Config& config, double eps) {
  Mamba2Sizes sizes;
  sizes.heads_field = "mamba_num_heads";
  sizes.groups_field = "n_groups";
  sizes.heads = config.size("mamba_num_heads");
  sizes.head_dim = config.size("mamba_head_dim");
  sizes.groups = config.size("n_groups");
  sizes.state_dim = config.size("ssm_state_size");
  sizes.conv_kernel = config.size("conv_kernel", 4);
  sizes.in_bias = sizes.out_bias = config.boolean("use_bias", false);
  sizes.conv_bias = config.boolean("use_conv_bias", true);
  sizes.eps = eps;
  require_divides(config, "n_groups", sizes.groups, "mamba_num_heads", sizes.heads);
  sizes.norm_group = sizes.heads / sizes.groups * sizes.head_dim;
  sizes.dt_min = config.number("time_step_min", 0.001);
  sizes.dt_max = std::numeric_limits<double>::infinity();
  require_silu(config, "mamba_hidden_act");
  return sizes;
}

/// down(act(up(x))): PREFIX + "up_proj", "down_proj".
MlpSpec read_mlp(const Checkpoint& checkpoint, const std::string& prefix, int in, int width,
                 Activation activation, bool bias) {
  MlpSpec mlp;
  mlp.activation = activation;
  mlp.up = read_linear(checkpoint, prefix + "up_proj", width, in, bias);
  mlp.down = read_linear(checkpoint, prefix + "down_proj", in, width, bias);
  return mlp;
}

MoeSpec read_moe(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                 Activation activation) {
  const Config& config = checkpoint.config();
  const bool bias = config.boolean("mlp_bias", false);
  MoeSpec moe;
  moe.score = MoeSpec::Score::sigmoid;
  moe.experts_per_token = config.size("num_experts_per_tok");
  const int experts = read_expert_count(checkpoint, "n_routed_experts", prefix + "gate.weight",
                                        moe.experts_per_token, "num_experts_per_tok");
  moe.router = read_linear(checkpoint, prefix + "gate", experts, hidden);
  moe.correction_bias = checkpoint.values(prefix + "gate.e_score_correction_bias", {experts});
  moe.groups = config.size("n_group", 1);
  require_divides(config, "n_group", moe.groups, "n_routed_experts", experts);
  moe.top_groups = config.size("topk_group", 1);
  const int group_size = experts / moe.groups;
  if (moe.top_groups > moe.groups) {
    config.fail("topk_group", "at most n_group (" + std::to_string(moe.groups) + ")");
  }
  if (moe.groups > 1 && group_size < 2) {
    config.fail("n_group",
                "groups of at least 2 of the n_routed_experts (" + std::to_string(experts) + ")");
  }
  if (moe.groups > 1 && moe.top_groups * group_size < moe.experts_per_token) {
    config.fail("num_experts_per_tok", "at most topk_group * n_routed_experts / n_group (" +
                                           std::to_string(moe.top_groups * group_size) + ")");
  }
  moe.normalize = config.boolean("norm_topk_prob", true);
  moe.normalize_epsilon = 1e-20f;
  moe.scale = static_cast<float>(config.number("routed_scaling_factor", 1.0));

  int in = hidden;
  if (config.has("moe_latent_size")) {
    in = config.size("moe_latent_size");
    moe.latent_in = read_linear(checkpoint, prefix + "fc1_latent_proj", in, hidden, bias);
    moe.latent_out = read_linear(checkpoint, prefix + "fc2_latent_proj", hidden, in, bias);
  }
  const int width = config.size("moe_intermediate_size");
  if (checkpoint.has(prefix + "experts.up_proj")) {
    const WeightView up = checkpoint.weight(prefix + "experts.up_proj", {experts, width, in});
    const WeightView down = checkpoint.weight(prefix + "experts.down_proj", {experts, in, width});
    for (int e = 0; e < experts; ++e) {
      MlpSpec expert;
      expert.activation = activation;
      expert.up = plain(row_slice(up, int64_t{e} * width, width));
      expert.down = plain(row_slice(down, int64_t{e} * in, in));
      moe.experts.push_back(std::move(expert));
    }
  } else {
    for (int e = 0; e < experts; ++e) {
      moe.experts.push_back(read_mlp(checkpoint, prefix + "experts." + std::to_string(e) + ".", in,
                                     width, activation, false));
    }
  }
  moe.shared = read_mlp(checkpoint, prefix + "shared_experts.", hidden,
                        config.size("moe_shared_expert_intermediate_size"), activation, bias);
  return moe;
}

}  // namespace

ModelSpec build_nemotron_h(const Checkpoint& checkpoint) {
  const Config& config = checkpoint.config();
  const std::vector<LayerKind> kinds = read_layers(config);
  const std::string prefix = find_prefix(checkpoint, {"backbone.", "model."}, "embeddings.weight");
  ModelSpec model = start_model(checkpoint, "nemotron_h", prefix + "embeddings.weight", prefix,
                                static_cast<int>(kinds.size()));
  const double eps = config.epsilon("layer_norm_epsilon", 1e-5);
  const Activation activation = read_activation(config, "mlp_hidden_act", "relu2");
  AttentionForm attention;
  attention.bias = config.boolean("attention_bias", false);
  for (int i = 0; i < model.layers; ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    const std::string mixer = layer + "mixer.";
    Block block;
    block.layer = i;
    block.norm = read_norm(checkpoint, layer + "norm", model.hidden, eps);
    switch (kinds[static_cast<size_t>(i)]) {
      case LayerKind::recurrent:
        block.branches.push_back(
            {read_mamba2(checkpoint, mixer, model.hidden, read_sizes(config, eps))});
        break;
      case LayerKind::attention:
        block.branches.push_back({read_attention(checkpoint, mixer, model.hidden, attention)});
        break;
      case LayerKind::mlp:
        block.branches.push_back(
            {read_mlp(checkpoint, mixer, model.hidden, config.size("intermediate_size"), activation,
                      config.boolean("mlp_bias", false))});
        break;
      case LayerKind::moe:
        block.branches.push_back({read_moe(checkpoint, mixer, model.hidden, activation)});
        break;
    }
    model.blocks.push_back(std::move(block));
  }
  model.final_norm = read_norm(checkpoint, prefix + "norm_f", model.hidden, eps);
  return model;
}

}  // namespace replayeval
