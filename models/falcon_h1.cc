// Falcon-H1 (model_type falcon_h1): Mamba-2 and attention side by side on the same normed input in
// every layer, with multipliers on almost everything, then a gated MLP (models.md section 9).
#include <algorithm>

#include "models/family.h"

namespace replayeval {
namespace {

using namespace family;

std::vector<double> multipliers(const Config& config, const char* field, size_t count) {
  if (!config.has(field)) return std::vector<double>(count, 1.0);
  std::vector<double> values = config.numbers(field);
  if (values.size() != count) config.fail(field, std::to_string(count) + " numbers");
  return values;
}

Mamba2Sizes read_sizes(const Config& config, int hidden, double eps) {
  Mamba2Sizes sizes;
  sizes.heads_field = "mamba_n_heads";
  sizes.groups_field = "mamba_n_groups";
  sizes.heads = config.size("mamba_n_heads");
  sizes.head_dim = config.size("mamba_d_head");
  const bool given = config.has("mamba_d_ssm");
  const int64_t inner =
      given ? config.size("mamba_d_ssm") : int64_t{config.size("mamba_expand", 2)} * hidden;
  if (int64_t{sizes.heads} * sizes.head_dim != inner) {
    config.fail("mamba_n_heads", std::string(given ? "mamba_d_ssm" : "mamba_expand * hidden_size") +
                                     " (" + std::to_string(inner) + ") / mamba_d_head (" +
                                     std::to_string(sizes.head_dim) + ")");
  }
  sizes.groups = config.size("mamba_n_groups", 1);
  require_divides(config, "mamba_n_groups", sizes.groups, "mamba_n_heads", sizes.heads);
  sizes.state_dim = config.size("mamba_d_state");
  sizes.conv_kernel = config.size("mamba_d_conv", 4);
  sizes.in_bias = config.boolean("mamba_proj_bias", false);
  sizes.out_bias = config.boolean("projectors_bias", false);
  sizes.conv_bias = config.boolean("mamba_conv_bias", true);
  sizes.eps = eps;
  sizes.gate = !config.boolean("mamba_rms_norm", false)         ? Mamba2Spec::Gate::gate_only
               : config.boolean("mamba_norm_before_gate", true) ? Mamba2Spec::Gate::norm_then_gate
                                                                : Mamba2Spec::Gate::gate_then_norm;
  sizes.norm_group = static_cast<int>(inner / sizes.groups);
  require_silu(config, "hidden_act");
  read_time_step_limit(config, sizes);
  return sizes;
}

}  // namespace

ModelSpec build_falcon_h1(const Checkpoint& checkpoint) {
  const Config& config = checkpoint.config();
  const std::string prefix = "model.";
  ModelSpec model = start_model(checkpoint, "falcon_h1", prefix + "embed_tokens.weight", prefix,
                                config.size("num_hidden_layers"));
  const double eps = config.epsilon("rms_norm_eps", 1e-5);
  const auto factor = [&](const char* field) {
    return static_cast<float>(config.number(field, 1.0));
  };
  model.embedding_multiplier = factor("embedding_multiplier");
  model.logits_multiplier = factor("lm_head_multiplier");

  AttentionForm attention;
  attention.bias = config.boolean("attention_bias", false);
  attention.rope = rope_config(config, {100000.0, 1.0});
  attention.key_multiplier = config.number("key_multiplier", 1.0);
  const Mamba2Sizes sizes = read_sizes(config, model.hidden, eps);
  const std::vector<double> parts = multipliers(config, "ssm_multipliers", 5);
  const std::vector<double> mlp_factors = multipliers(config, "mlp_multipliers", 2);
  const Activation activation = read_activation(config, "hidden_act", "silu");

  // One factor a row of in_proj: z, x, B, C, dt.
  std::vector<float> rows;
  const int64_t inner = int64_t{sizes.heads} * sizes.head_dim;
  const int64_t group_width = int64_t{sizes.groups} * sizes.state_dim;
  const int64_t widths[] = {inner, inner, group_width, group_width, sizes.heads};
  for (size_t p = 0; p < parts.size(); ++p) {
    rows.insert(rows.end(), static_cast<size_t>(widths[p]), static_cast<float>(parts[p]));
  }
  if (std::all_of(rows.begin(), rows.end(), [](float f) { return f == 1.0f; })) rows.clear();

  for (int i = 0; i < model.layers; ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    Block mixers;
    mixers.layer = i;
    mixers.norm = read_norm(checkpoint, layer + "input_layernorm", model.hidden, eps);
    Mamba2Spec mamba = read_mamba2(checkpoint, layer + "mamba.", model.hidden, sizes);
    mamba.in_proj_multiplier = rows;
    mamba.round_normalized = false;
    mixers.branches.push_back(
        {std::move(mamba), factor("ssm_in_multiplier"), factor("ssm_out_multiplier")});
    mixers.branches.push_back(
        {read_attention(checkpoint, layer + "self_attn.", model.hidden, attention),
         factor("attention_in_multiplier"), factor("attention_out_multiplier")});
    Block mlp;
    mlp.layer = i;
    mlp.norm = read_norm(checkpoint, layer + "pre_ff_layernorm", model.hidden, eps);
    MlpSpec feed_forward = read_gated_mlp(checkpoint, layer + "feed_forward.", model.hidden,
                                          config.size("intermediate_size"), activation,
                                          config.boolean("mlp_bias", false));
    feed_forward.gate_multiplier = static_cast<float>(mlp_factors[0]);
    feed_forward.down_multiplier = static_cast<float>(mlp_factors[1]);
    mlp.branches.push_back({std::move(feed_forward)});
    model.blocks.push_back(std::move(mixers));
    model.blocks.push_back(std::move(mlp));
  }
  model.final_norm = read_norm(checkpoint, prefix + "final_layernorm", model.hidden, eps);
  return model;
}

}  // namespace replayeval
