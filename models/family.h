// What the family files share: reading a norm, a projection or a whole mixer of a layer by its
// names and sizes, and the checks whose messages name the config's field and both values. Facts:
// models.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/model.h"

namespace replayeval {

// One builder a family (models/registry.cc lists them).
ModelSpec build_nemotron_h(const Checkpoint& checkpoint);
ModelSpec build_mamba2(const Checkpoint& checkpoint);
ModelSpec build_bamba(const Checkpoint& checkpoint);
ModelSpec build_granite_hybrid(const Checkpoint& checkpoint);
ModelSpec build_falcon_h1(const Checkpoint& checkpoint);
ModelSpec build_qwen3_5(const Checkpoint& checkpoint);
ModelSpec build_qwen3_5_moe(const Checkpoint& checkpoint);
ModelSpec build_qwen3_next(const Checkpoint& checkpoint);

namespace family {

enum class LayerKind : uint8_t { recurrent, attention, mlp, moe };

/// "FILE: FIELD: expected a divisor of WHOLE_FIELD (n), got m" unless `part` divides `whole`.
void require_divides(const Config& config, std::string_view field, int64_t part,
                     std::string_view whole_field, int64_t whole);

/// Kinds from a list of names at `field`: "linear_attention" or "mamba", "full_attention" or
/// "attention"; unless `mixers_only` also "mlp" and "moe".
std::vector<LayerKind> layer_kinds(const Config& config, const std::string& field,
                                   bool mixers_only);
/// The mixers of the layers from the first of `layer_types` and `layers_block_type` that the config
/// has, one for each of num_hidden_layers; nothing without either.
std::optional<std::vector<LayerKind>> listed_mixers(const Config& config);

/// vocab_size, hidden_size, embedding (first of the names), lm_head, max_position_embeddings,
/// notes. A matrix of another size is reported with the config's field. `layers` is the number of
/// layers; a tensor PREFIX + "layers.N." with N = layers in the file means that the config has too
/// few.
ModelSpec start_model(const Checkpoint& checkpoint, std::string family,
                      const std::string& embedding, const std::string& prefix, int layers);

/// The prefix among `prefixes` under which PREFIX + name is a tensor. Throws std::runtime_error
/// naming all.
std::string find_prefix(const Checkpoint& checkpoint, std::initializer_list<const char*> prefixes,
                        const std::string& name);

NormSpec read_norm(const Checkpoint& checkpoint, const std::string& name, int64_t width, double eps,
                   bool one_plus = false);
/// NAME.weight [out, in] and, with `bias`, NAME.bias [out].
LinearSpec read_linear(const Checkpoint& checkpoint, const std::string& name, int64_t out,
                       int64_t in, bool bias = false);
/// A matrix without a bias.
LinearSpec plain(const WeightView& weight);

/// The activation of a name in the config at `field`: "silu" (or "swish"), "relu2".
Activation read_activation(const Config& config, std::string_view field, std::string_view fallback);
/// Throws unless the config's convolution activation is silu, the only one in use.
void require_silu(const Config& config, std::string_view field);

/// Sizes of a Mamba-2 mixer, with the fields they were read from for messages.
struct Mamba2Sizes {
  int heads = 0, head_dim = 0, groups = 0, state_dim = 0, conv_kernel = 0;
  bool in_bias = false, out_bias = false, conv_bias = true;
  double eps = 1e-5;
  Mamba2Spec::Gate gate = Mamba2Spec::Gate::gate_then_norm;
  int norm_group = 0;  // 0: the whole inner size
  double dt_min = 0.0, dt_max = 0.0;
  std::string_view heads_field, groups_field;
};
/// The mixer whose tensors are PREFIX + "A_log", "in_proj.weight", ...
Mamba2Spec read_mamba2(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                       const Mamba2Sizes& sizes);
/// Bamba's and Granite's sizes: fields mamba_*.
Mamba2Sizes bamba_sizes(const Config& config, int hidden);
/// time_step_limit as (dt_min, dt_max), default (0, infinity).
void read_time_step_limit(const Config& config, Mamba2Sizes& sizes);

/// What attention differs in between families. heads, key/value heads and head_dim come from
/// num_attention_heads, num_key_value_heads and head_dim.
struct AttentionForm {
  bool bias = false;
  std::optional<double> scale;     // default head_dim^-0.5
  std::optional<RopeConfig> rope;  // none: no position signal
  bool gated_with_norms = false;   // Qwen: output gate, q_norm, k_norm
  double eps = 1e-6;
  double key_multiplier = 1.0;
};
/// The attention whose tensors are PREFIX + "q_proj.weight", ...
AttentionSpec read_attention(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                             const AttentionForm& form);

/// down(act(gate(x)) * up(x)): PREFIX + "gate_proj", "up_proj", "down_proj".
MlpSpec read_gated_mlp(const Checkpoint& checkpoint, const std::string& prefix, int hidden,
                       int width, Activation activation, bool bias = false);
/// The same from one matrix [2 width, hidden] = [gate | up] and one [hidden, width].
MlpSpec split_gated_mlp(const WeightView& gate_up, const WeightView& down, Activation activation);

/// The number of experts at `field`, checked against the rows of the router's matrix and
/// experts_per_token (1 to that number).
int read_expert_count(const Checkpoint& checkpoint, const std::string& field,
                      const std::string& router, int experts_per_token,
                      const std::string& per_token_field);

}  // namespace family
}  // namespace replayeval
