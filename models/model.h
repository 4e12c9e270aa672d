// A hybrid language model as data (what a family file produces from a checkpoint) and the forward
// pass over a ragged batch of rows. Weights are const; all that changes lives in a StateSet
// (models/state_store.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "kernels/dense.h"
#include "kernels/elementwise.h"
#include "kernels/state_row.h"
#include "models/backend.h"
#include "models/checkpoint.h"
#include "models/config.h"

namespace replayeval {

enum class ComputeType : uint8_t { fp32, bf16 };
enum class DenseMode : uint8_t { invariant, fast };
enum class Device : uint8_t { cpu, cuda };
inline const char* name_of(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }
/// On a device: one product a row, whose shape and bits no other row changes, or one for all rows.
enum class Products : uint8_t { per_row, together };
/// Nemotron-H and others: does the one-token step clamp dt as the forward pass does (models.md
/// section 2)?
enum class DtClamp : uint8_t { forward, none };

/// y = w * x / sqrt(mean(x^2) + eps), or (1 + w) * ...; weight [width].
struct NormSpec {
  std::vector<float> weight;
  float eps = 1e-6f;
  bool one_plus = false;
};

/// y = x W^T + b; weight [out, in] stays in the mapped checkpoint.
struct LinearSpec {
  WeightView weight;
  std::vector<float> bias;  // empty: none
};

/// Mamba-2 mixer (models.md section 2). in_proj rows: [z: I | x: I | B: G N | C: G N | dt: heads],
/// I = heads * head_dim.
struct Mamba2Spec {
  int heads = 0, head_dim = 0, groups = 0, state_dim = 0, conv_kernel = 4;
  LinearSpec in_proj, out_proj;
  std::vector<float> in_proj_multiplier;  // Falcon-H1: one factor a row of in_proj; empty: none
  std::vector<float> conv_weight;         // [I + 2 G N, conv_kernel]
  std::vector<float> conv_bias;           // empty: none
  std::vector<float> dt_bias;             // [heads]
  std::vector<float> a;                   // [heads], A = -exp(A_log)
  std::vector<float> decay_log2;          // [heads], A log2(e); Model fills it in
  std::vector<float> d;                   // [heads]
  float dt_min = 0.0f;
  float dt_max = 0.0f;  // infinity: no upper clamp
  /// Order of gate and norm; `group` is the width over which the norm averages.
  enum class Gate : uint8_t {
    gate_then_norm,
    norm_then_gate,
    gate_only
  } gate = Gate::gate_then_norm;
  NormSpec norm;  // weight [I]
  int norm_group = 0;
  bool round_normalized =
      true;  // BF16: x / rms is rounded before the product with the weight (Falcon-H1: not)
};

/// Gated DeltaNet or KDA mixer (models.md section 4), q, k, v already un-grouped: qkv rows [q all
/// heads | k all heads | v all heads].
struct GdnSpec {
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, conv_kernel = 4;
  LinearSpec qkv;
  LinearSpec z, b, a;              // b -> beta, a -> decay
  std::vector<float> conv_weight;  // [2 key_heads key_dim + value_heads value_dim, conv_kernel]
  std::vector<float> dt_bias;      // [value_heads]
  std::vector<float> a_exp;        // [value_heads], exp(A_log): g = -a_exp softplus(a + dt_bias)
  NormSpec norm;                   // weight [value_dim], then * silu(z)
  LinearSpec out_proj;
};

/// Full attention: rotary part is the leading `rotary_dim` dimensions (0: no position signal).
/// `output_gate` (Qwen): q_proj rows are [q | gate] a head, and the output is multiplied by
/// sigmoid(gate).
struct AttentionSpec {
  int heads = 0, kv_heads = 0, head_dim = 0;
  LinearSpec q, k, v, o;
  float scale = 0.0f;
  float key_multiplier = 1.0f;
  int rotary_dim = 0;
  std::vector<float> inverse_frequency;    // [rotary_dim / 2], FP32
  std::optional<NormSpec> q_norm, k_norm;  // [head_dim]
  bool output_gate = false;
};

/// down(act(gate(x) * gate_multiplier) * up(x)) * down_multiplier, or down(act(up(x))) without a
/// gate.
struct MlpSpec {
  Activation activation = Activation::silu;
  std::optional<LinearSpec> gate;
  LinearSpec up, down;
  float gate_multiplier = 1.0f;
  float down_multiplier = 1.0f;
};

/// Mixture of experts. Scores from router(x) in FP32: `sigmoid` (Nemotron: choice by score +
/// correction, optional groups), `softmax` over all experts (Qwen), `softmax_top` over the chosen
/// ones (Granite).
struct MoeSpec {
  enum class Score : uint8_t { sigmoid, softmax, softmax_top } score = Score::softmax;
  LinearSpec router;
  std::vector<float> correction_bias;  // [experts]; empty: none
  int experts_per_token = 0;
  int groups = 1, top_groups = 1;
  bool normalize = false;
  float normalize_epsilon = 0.0f;
  float scale = 1.0f;
  std::vector<MlpSpec> experts;
  std::optional<MlpSpec> shared;                    // always on
  std::optional<LinearSpec> shared_gate;            // sigmoid scalar a token on the shared expert
  std::optional<LinearSpec> latent_in, latent_out;  // Nemotron: experts work in a latent width
};

using Mixer = std::variant<Mamba2Spec, GdnSpec, AttentionSpec, MlpSpec, MoeSpec>;

/// One mixer of a block, on the block's normed input times in_multiplier; its output times
/// out_multiplier is added.
struct Branch {
  Mixer mixer;
  float in_multiplier = 1.0f;
  float out_multiplier = 1.0f;
};

/// h = h + sum over branches of out_multiplier * mixer(in_multiplier * norm(h)). `layer` is the
/// checkpoint's layer index; the last block of a layer ends it.
struct Block {
  int layer = 0;
  NormSpec norm;
  std::vector<Branch> branches;
};

/// Everything that a forward pass needs.
struct ModelSpec {
  std::string family;
  int hidden = 0;
  int vocabulary = 0;
  int layers = 0;
  int64_t max_positions = 0;  // 0: not stated
  WeightView embedding;       // [vocabulary, hidden]
  float embedding_multiplier = 1.0f;
  std::vector<Block> blocks;
  NormSpec final_norm;
  LinearSpec lm_head;
  float logits_multiplier = 1.0f;
  bool residual_fp32 = false;      // Mamba-2: the residual stream stays FP32 in BF16 compute
  std::vector<std::string> notes;  // e.g. declared activation quantization; go into the report
};

/// How a model runs.
struct ModelOptions {
  ComputeType compute = ComputeType::fp32;
  DenseMode dense = DenseMode::invariant;
  DtClamp dt_clamp = DtClamp::forward;
  Device device = Device::cpu;
  Products products = Products::per_row;
  bool timed = false;  // wait for the device around each kind of work, for ForwardTimes
};

/// What a family file offers: does it take this config, and its layer stack. The specification's
/// views point into the checkpoint, which must outlive it. Throws std::invalid_argument naming
/// field or tensor, expected and got.
struct ModelFamily {
  const char* name;  // model_type
  const char* description;
  bool trained_weights_seen;  // run on real trained weights, or checked by structure only (README
                              // table)
  ModelSpec (*build)(const Checkpoint& checkpoint);
};

/// All families, in the order that `replayeval list families` prints (models/registry.cc).
std::span<const ModelFamily> model_families();
/// The family of the checkpoint's model_type; the error lists the known ones.
const ModelFamily& find_family(const Checkpoint& checkpoint);

class StateSet;

/// The tokens of one call: row r advances lengths[r] tokens, concatenated in `tokens`. A length may
/// be 0.
struct Batch {
  std::span<const int32_t> tokens;
  std::span<const int> lengths;
};

/// Final hidden states [tokens, hidden] FP32 after the last norm, rows concatenated as in the
/// batch, in the memory of the model's backend; the model must outlive them.
struct Hidden {
  Memory memory;
  int64_t tokens = 0;
  int hidden = 0;

  float* data() const { return reinterpret_cast<float*>(memory.data()); }
  /// The states of these tokens, in this order.
  Hidden select(std::span<const int64_t> positions) const;
  /// A copy on the host.
  std::vector<float> values() const;
};

/// Called with the block's layer index (-1: embedding) and the residual stream [tokens, hidden]
/// after each layer; `check model` uses it.
using LayerObserver = std::function<void(int layer, std::span<const float> residual)>;

class Model {
 public:
  /// Takes the checkpoint (kept mapped) and builds its family. Throws as the readers do.
  Model(std::shared_ptr<const Checkpoint> checkpoint, ModelOptions options);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelSpec& spec() const;
  const ModelOptions& options() const;
  const Checkpoint& checkpoint() const;
  Backend& backend() const;

  /// Runs the rows of `states` through the batch's tokens; every row keeps its state in its own
  /// precision. AdvanceMode::verify leaves the tokens uncommitted until StateSet::commit.
  Hidden forward(const Batch& batch, StateSet& states, AdvanceMode mode = AdvanceMode::commit,
                 const LayerObserver& observer = {}) const;

  /// FP32 logits [count, vocabulary] of hidden states first .. first + count - 1 into `logits`.
  void lm_head(const Hidden& hidden, int64_t first, int64_t count, float* logits) const;
  /// The same into memory of the backend.
  void lm_head_into(const Hidden& hidden, int64_t first, int64_t count, float* logits) const;

  struct Implementation;
  /// For the files that write the forward pass (models/forward.h).
  const Implementation& implementation() const { return *implementation_; }

 private:
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace replayeval
