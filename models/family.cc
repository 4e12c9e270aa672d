#include "models/family.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace replayeval::family {

void require_divides(const Config& config, std::string_view field, int64_t part,
                     std::string_view whole_field, int64_t whole) {
  if (part > 0 && whole % part == 0) return;
  throw std::invalid_argument(config.file() + ": " + std::string(field) +
                              ": expected a divisor of " + std::string(whole_field) + " (" +
                              std::to_string(whole) + "), got " + std::to_string(part));
}

std::vector<LayerKind> layer_kinds(const Config& config, const std::string& field,
                                   bool mixers_only) {
  std::vector<LayerKind> kinds;
  for (const std::string& name : config.texts(field)) {
    if (name == "linear_attention" || name == "mamba") {
      kinds.push_back(LayerKind::recurrent);
    } else if (name == "full_attention" || name == "attention") {
      kinds.push_back(LayerKind::attention);
    } else if (name == "mlp" && !mixers_only) {
      kinds.push_back(LayerKind::mlp);
    } else if (name == "moe" && !mixers_only) {
      kinds.push_back(LayerKind::moe);
    } else {
      throw std::invalid_argument(
          config.file() + ": " + field +
          ": expected linear_attention (mamba) and full_attention (attention)" +
          (mixers_only ? "" : ", mlp, moe") + ", got \"" + name + "\"");
    }
  }
  if (kinds.empty()) config.fail(field, "at least one layer");
  return kinds;
}

std::optional<std::vector<LayerKind>> listed_mixers(const Config& config) {
  for (const char* field : {"layer_types", "layers_block_type"}) {
    if (!config.has(field)) continue;
    std::vector<LayerKind> kinds = layer_kinds(config, field, true);
    const int layers = config.size("num_hidden_layers");
    if (static_cast<int>(kinds.size()) != layers) {
      throw std::invalid_argument(config.file() + ": " + field + ": expected num_hidden_layers (" +
                                  std::to_string(layers) + ") entries, got " +
                                  std::to_string(kinds.size()));
    }
    return kinds;
  }
  return std::nullopt;
}

std::string find_prefix(const Checkpoint& checkpoint, std::initializer_list<const char*> prefixes,
                        const std::string& name) {
  std::string all;
  for (const char* prefix : prefixes) {
    if (checkpoint.has(prefix + name)) return prefix;
    all += (all.empty() ? "" : " or ") + (prefix + name);
  }
  throw std::runtime_error(checkpoint.folder().string() + ": expected a tensor " + all + ", got " +
                           std::to_string(checkpoint.tensors().tensors().size()) +
                           " tensors without it");
}

namespace {

/// "FILE: FIELD: expected n (the rows of tensor NAME), got m" where a tensor's dimension and a
/// field differ.
void require_dimension(const Checkpoint& checkpoint, const std::string& tensor, size_t dimension,
                       const char* what, const std::string& field, int64_t value) {
  const TensorInfo* info = checkpoint.tensors().find(tensor);
  if (info == nullptr || info->shape.size() <= dimension || info->shape[dimension] == value) return;
  throw std::invalid_argument(checkpoint.config().file() + ": " + field + ": expected " +
                              std::to_string(info->shape[dimension]) + " (the " + what +
                              " of tensor " + tensor + "), got " + std::to_string(value));
}

}  // namespace

ModelSpec start_model(const Checkpoint& checkpoint, std::string family,
                      const std::string& embedding, const std::string& prefix, int layers) {
  const Config& config = checkpoint.config();
  ModelSpec model;
  model.family = std::move(family);
  model.hidden = config.size("hidden_size");
  model.vocabulary = config.size("vocab_size");
  model.layers = layers;
  model.max_positions = config.count("max_position_embeddings", 0);
  model.notes = checkpoint.notes();
  require_dimension(checkpoint, embedding, 0, "rows", "vocab_size", model.vocabulary);
  require_dimension(checkpoint, embedding, 1, "columns", "hidden_size", model.hidden);
  model.embedding = checkpoint.weight(embedding, {model.vocabulary, model.hidden});
  model.lm_head = plain(checkpoint.lm_head(embedding, model.vocabulary, model.hidden));

  const std::string beyond = prefix + "layers." + std::to_string(layers) + ".";
  const std::span<const TensorInfo> tensors = checkpoint.tensors().tensors();
  const auto extra =
      std::lower_bound(tensors.begin(), tensors.end(), beyond,
                       [](const TensorInfo& t, const std::string& name) { return t.name < name; });
  if (extra != tensors.end() && extra->name.starts_with(beyond)) {
    throw std::invalid_argument(config.file() + ": expected more than " + std::to_string(layers) +
                                " layers (the file has the tensor " + extra->name + "), got " +
                                std::to_string(layers));
  }
  return model;
}

NormSpec read_norm(const Checkpoint& checkpoint, const std::string& name, int64_t width, double eps,
                   bool one_plus) {
  return {checkpoint.values(name + ".weight", {width}), static_cast<float>(eps), one_plus};
}

LinearSpec read_linear(const Checkpoint& checkpoint, const std::string& name, int64_t out,
                       int64_t in, bool bias) {
  LinearSpec linear = plain(checkpoint.weight(name + ".weight", {out, in}));
  if (bias) linear.bias = checkpoint.values(name + ".bias", {out});
  return linear;
}

LinearSpec plain(const WeightView& weight) {
  LinearSpec linear;
  linear.weight = weight;
  return linear;
}

Activation read_activation(const Config& config, std::string_view field,
                           std::string_view fallback) {
  const std::string name = config.text(field, fallback);
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "relu2") return Activation::relu2;
  config.fail(field, "silu or relu2");
}

void require_silu(const Config& config, std::string_view field) {
  if (read_activation(config, field, "silu") != Activation::silu) config.fail(field, "silu");
}

void read_time_step_limit(const Config& config, Mamba2Sizes& sizes) {
  sizes.dt_min = 0.0;
  sizes.dt_max = std::numeric_limits<double>::infinity();
  if (!config.has("time_step_limit")) return;
  const std::vector<double> limit = config.numbers("time_step_limit");
  if (limit.size() != 2 || !(limit[0] <= limit[1]))
    config.fail("time_step_limit", "[lowest, highest]");
  sizes.dt_min = limit[0];
  sizes.dt_max = limit[1];
}

Mamba2Sizes bamba_sizes(const Config& config, int hidden) {
  Mamba2Sizes sizes;
  const int64_t inner = int64_t{config.size("mamba_expand", 2)} * hidden;
  sizes.heads_field = "mamba_n_heads";
  sizes.groups_field = "mamba_n_groups";
  sizes.heads = config.size("mamba_n_heads");
  require_divides(config, "mamba_n_heads", sizes.heads, "mamba_expand * hidden_size", inner);
  const auto per_head = static_cast<int>(inner / sizes.heads);
  sizes.head_dim = per_head;
  // A number, or "auto".
  const bool automatic = [&] {
    try {
      return config.text("mamba_d_head", "auto") == "auto";
    } catch (const std::invalid_argument&) {
      return false;
    }
  }();
  if (!automatic && config.size("mamba_d_head") != per_head) {
    config.fail("mamba_d_head",
                std::to_string(per_head) + " (mamba_expand * hidden_size / mamba_n_heads)");
  }
  sizes.groups = config.size("mamba_n_groups", 1);
  sizes.state_dim = config.size("mamba_d_state");
  sizes.conv_kernel = config.size("mamba_d_conv", 4);
  sizes.in_bias = sizes.out_bias = config.boolean("mamba_proj_bias", false);
  sizes.conv_bias = config.boolean("mamba_conv_bias", true);
  require_silu(config, "hidden_act");
  read_time_step_limit(config, sizes);
  return sizes;
}

Mamba2Spec read_mamba2(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                       const Mamba2Sizes& sizes) {
  require_divides(checkpoint.config(), sizes.groups_field, sizes.groups, sizes.heads_field,
                  sizes.heads);
  Mamba2Spec mixer;
  mixer.heads = sizes.heads;
  mixer.head_dim = sizes.head_dim;
  mixer.groups = sizes.groups;
  mixer.state_dim = sizes.state_dim;
  mixer.conv_kernel = sizes.conv_kernel;
  const int64_t inner = int64_t{sizes.heads} * sizes.head_dim;
  const int64_t channels = inner + 2 * int64_t{sizes.groups} * sizes.state_dim;
  mixer.in_proj = read_linear(checkpoint, prefix + "in_proj", inner + channels + sizes.heads,
                              hidden, sizes.in_bias);
  mixer.out_proj = read_linear(checkpoint, prefix + "out_proj", hidden, inner, sizes.out_bias);
  mixer.conv_weight = checkpoint.values(prefix + "conv1d.weight", {channels, 1, sizes.conv_kernel});
  if (sizes.conv_bias) mixer.conv_bias = checkpoint.values(prefix + "conv1d.bias", {channels});
  mixer.dt_bias = checkpoint.values(prefix + "dt_bias", {sizes.heads});
  mixer.a = checkpoint.values(prefix + "A_log", {sizes.heads});
  for (float& a : mixer.a) a = static_cast<float>(-std::exp(static_cast<double>(a)));
  mixer.d = checkpoint.values(prefix + "D", {sizes.heads});
  mixer.dt_min = static_cast<float>(sizes.dt_min);
  mixer.dt_max = static_cast<float>(sizes.dt_max);
  mixer.gate = sizes.gate;
  if (sizes.gate != Mamba2Spec::Gate::gate_only) {
    mixer.norm = read_norm(checkpoint, prefix + "norm", inner, sizes.eps);
  }
  mixer.norm_group = sizes.norm_group > 0 ? sizes.norm_group : static_cast<int>(inner);
  return mixer;
}

AttentionSpec read_attention(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                             const AttentionForm& form) {
  const Config& config = checkpoint.config();
  AttentionSpec mixer;
  mixer.heads = config.size("num_attention_heads");
  mixer.kv_heads = config.size("num_key_value_heads", mixer.heads);
  require_divides(config, "num_key_value_heads", mixer.kv_heads, "num_attention_heads",
                  mixer.heads);
  if (!config.has("head_dim")) {
    require_divides(config, "num_attention_heads", mixer.heads, "hidden_size", hidden);
  }
  mixer.head_dim = config.size("head_dim", std::max(1, hidden / mixer.heads));
  const int64_t width = int64_t{mixer.heads} * mixer.head_dim;
  const int64_t kv_width = int64_t{mixer.kv_heads} * mixer.head_dim;
  mixer.output_gate = form.gated_with_norms;
  mixer.q = read_linear(checkpoint, prefix + "q_proj", mixer.output_gate ? 2 * width : width,
                        hidden, form.bias);
  mixer.k = read_linear(checkpoint, prefix + "k_proj", kv_width, hidden, form.bias);
  mixer.v = read_linear(checkpoint, prefix + "v_proj", kv_width, hidden, form.bias);
  mixer.o = read_linear(checkpoint, prefix + "o_proj", hidden, width, form.bias);
  mixer.scale =
      static_cast<float>(form.scale.value_or(1.0 / std::sqrt(static_cast<double>(mixer.head_dim))));
  mixer.key_multiplier = static_cast<float>(form.key_multiplier);
  if (form.gated_with_norms) {
    mixer.q_norm = read_norm(checkpoint, prefix + "q_norm", mixer.head_dim, form.eps, true);
    mixer.k_norm = read_norm(checkpoint, prefix + "k_norm", mixer.head_dim, form.eps, true);
  }
  if (form.rope) {
    mixer.rotary_dim = static_cast<int>(mixer.head_dim * form.rope->partial_rotary_factor);
    if (mixer.rotary_dim < 2 || mixer.rotary_dim % 2 != 0) {
      throw std::invalid_argument(config.file() +
                                  ": head_dim: expected an even number of rotary dimensions, got " +
                                  std::to_string(mixer.head_dim) + " * partial_rotary_factor (" +
                                  std::to_string(form.rope->partial_rotary_factor) +
                                  ") = " + std::to_string(mixer.rotary_dim));
    }
    // theta^(-2i / rd) with the exponent, the power and its reciprocal each rounded to FP32, as the
    // library does.
    for (int i = 0; i < mixer.rotary_dim / 2; ++i) {
      const float exponent = static_cast<float>(2 * i) / static_cast<float>(mixer.rotary_dim);
      const auto power =
          static_cast<float>(std::pow(form.rope->theta, static_cast<double>(exponent)));
      mixer.inverse_frequency.push_back(1.0f / power);
    }
  }
  return mixer;
}

MlpSpec read_gated_mlp(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                       int width, Activation activation, bool bias) {
  MlpSpec mlp;
  mlp.activation = activation;
  mlp.gate = read_linear(checkpoint, prefix + "gate_proj", width, hidden, bias);
  mlp.up = read_linear(checkpoint, prefix + "up_proj", width, hidden, bias);
  mlp.down = read_linear(checkpoint, prefix + "down_proj", hidden, width, bias);
  return mlp;
}

MlpSpec split_gated_mlp(const WeightView& gate_up, const WeightView& down, Activation activation) {
  MlpSpec mlp;
  mlp.activation = activation;
  mlp.gate = plain(row_slice(gate_up, 0, gate_up.rows / 2));
  mlp.up = plain(row_slice(gate_up, gate_up.rows / 2, gate_up.rows / 2));
  mlp.down = plain(down);
  return mlp;
}

int read_expert_count(const Checkpoint& checkpoint, const std::string& field,
                      const std::string& router, int experts_per_token,
                      const std::string& per_token_field) {
  const Config& config = checkpoint.config();
  const int experts = config.size(field);
  require_dimension(checkpoint, router, 0, "rows", field, experts);
  if (experts_per_token > experts) {
    config.fail(per_token_field, "at most " + field + " (" + std::to_string(experts) + ")");
  }
  return experts;
}

}  // namespace replayeval::family
