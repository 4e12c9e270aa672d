// The forward pass from inside, for the files that write it: models/hybrid.cc over ragged batches,
// models/decoder.cc one token of every row.
#pragma once

#include <chrono>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "models/backend.h"
#include "models/model.h"
#include "models/state_store.h"

namespace replayeval {

/// Adds the time until its end to one kind of work; on a device only where the model is asked to
/// wait for it (ModelOptions::timed).
class Stopwatch {
 public:
  Stopwatch(double& seconds, Backend* waits)
      : seconds_(seconds), waits_(waits), start_(std::chrono::steady_clock::now()) {
    if (waits_ == nullptr) return;
    waits_->synchronize();
    start_ = std::chrono::steady_clock::now();
  }
  ~Stopwatch() {
    if (waits_ != nullptr) waits_->synchronize();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  Backend* waits_;
  std::chrono::steady_clock::time_point start_;
};

/// cos and sin [tokens, frequencies] of the positions from `position` on.
struct RotaryTable {
  const std::vector<float>* frequency = nullptr;
  int64_t position = 0;
  int64_t tokens = 0;
  Buffer cos, sin;
};

/// Rows of one call: where each starts, how many tokens it has.
struct Call {
  std::span<const int> lengths;
  std::vector<int64_t> first;      // [rows] index of the row's first token
  std::vector<int64_t> positions;  // [rows] its absolute position
  int64_t tokens = 0;
  AdvanceMode mode = AdvanceMode::commit;
  KernelForm form = KernelForm::fast;
  ForwardTimes* times = nullptr;
  std::vector<TokenRange> ranges;  // what is multiplied at once
  mutable std::vector<RotaryTable> rotary;
};

struct Model::Implementation {
  std::shared_ptr<const Checkpoint> checkpoint;
  ModelOptions options;
  ModelSpec spec;
  WeightType activation = WeightType::fp32;
  std::unique_ptr<Backend> backend;

  Buffer buffer(int64_t size) const { return Buffer(*backend, size); }
  const float* constant(const std::vector<float>& host) const { return backend->constant(host); }
  Stopwatch watch(double& seconds) const {
    const bool waits = options.timed && backend->on_device();
    return Stopwatch(seconds, waits ? backend.get() : nullptr);
  }

  /// x [m, in] -> [m, out], rounded to the activation type; tokens of x `stride` numbers apart (0:
  /// contiguous).
  Buffer project(const LinearSpec& layer, const float* x, const Call& call,
                 int64_t stride = 0) const {
    const Stopwatch timed = watch(call.times->products);
    Buffer y = buffer(call.tokens * layer.weight.rows);
    backend->linear(x, stride == 0 ? layer.weight.cols : stride, layer.weight, layer.bias, y.data(),
                    call.ranges);
    return y;
  }
  /// Projections of one input side by side: [m, width], layer i from column first[i] on.
  struct Projections {
    Buffer values;
    int64_t width = 0;
    std::vector<int64_t> first;
    float* at(size_t i) const { return values.data() + first[i]; }
  };
  Projections project(std::initializer_list<const LinearSpec*> layers, const float* x,
                      const Call& call) const {
    const Stopwatch timed = watch(call.times->products);
    Projections all;
    std::vector<LinearPart> parts;
    for (const LinearSpec* layer : layers) {
      parts.push_back({&layer->weight, &layer->bias});
      all.first.push_back(all.width);
      all.width += layer->weight.rows;
    }
    all.values = buffer(call.tokens * all.width);
    backend->linear(x, parts[0].w->cols, parts, all.values.data(), call.ranges);
    return all;
  }

  RmsNorm norm_of(const NormSpec& norm, int64_t group) const {
    RmsNorm plan;
    plan.weight = constant(norm.weight);
    plan.weight_size = static_cast<int64_t>(norm.weight.size());
    plan.group = group;
    plan.eps = norm.eps;
    plan.one_plus = norm.one_plus;
    plan.activation = activation;
    return plan;
  }

  /// The blocks on the residual stream [call.tokens, hidden]: `mixer(block, branch, x)` gives a
  /// branch's output from its input; `after(layer)`, which may be empty, follows each layer.
  using MixerCall = std::function<Buffer(size_t block, size_t branch, const float* x)>;
  void layers(const Call& call, float* residual, const MixerCall& mixer,
              const std::function<void(int layer)>& after) const;
  /// The residual stream [count, hidden] of tokens that lie in the backend's memory (`ids`), or of
  /// the host's.
  Buffer embed(const int32_t* ids, int64_t count) const;
  Buffer embed(std::span<const int32_t> ids) const;
  void scale_embedding(Buffer& residual, int64_t count) const;

  void convolve(const StateStore& store, const Call& call, const std::vector<float>& weight,
                const std::vector<float>& bias, std::span<const RecordPointers> records,
                const StateSet& states) const;

  Buffer mamba2(const Mamba2Spec& mixer, StateStore& store, const Call& call, const float* x,
                const StateSet& states, double* decay_sum) const;
  /// in_proj of all tokens: [z | x | B | C | dt].
  Buffer mamba2_inputs(const Mamba2Spec& mixer, const float* x, const Call& call) const;
  /// dt [tokens, heads] from the projected columns at `from`, a row `stride` numbers.
  void mamba2_steps(const Mamba2Spec& mixer, const float* from, int64_t stride, float* dt,
                    int64_t tokens) const;
  Mamba2Layer mamba2_layer(const Mamba2Spec& mixer, int layer) const;
  RmsNorm mamba2_norm(const Mamba2Spec& mixer) const;
  /// The state's output y [tokens, heads head_dim], which is changed, through gate, norm and
  /// out_proj.
  Buffer mamba2_output(const Mamba2Spec& mixer, Buffer& y, const Buffer& projected,
                       const Call& call) const;

  Buffer gdn(const GdnSpec& mixer, StateStore& store, const Call& call, const float* x,
             const StateSet& states, double* decay_sum) const;
  /// Projections 0: q, k, v; 1: the gate z; 2: b; 3: a.
  Projections gdn_inputs(const GdnSpec& mixer, const float* x, const Call& call) const;
  /// beta and softplus(a + bias) [tokens, value_heads].
  struct GdnScalars {
    Buffer b, a;
  };
  GdnScalars gdn_scalars(const GdnSpec& mixer, const Projections& inputs, const Call& call) const;
  static GdnLayer gdn_layer(const GdnSpec& mixer, int layer);
  RmsNorm gdn_norm(const GdnSpec& mixer) const;
  /// As mamba2_output, for o [tokens, value_heads value_dim].
  Buffer gdn_output(const GdnSpec& mixer, Buffer& o, const Projections& inputs,
                    const Call& call) const;

  const RotaryTable& rotary(const AttentionSpec& mixer, const Call& call, size_t row) const;
  Buffer attend(const AttentionSpec& mixer, KvStore& cache, const Call& call, const float* x) const;
  /// Queries [tokens, heads head_dim], keys and values before their rotation; `projected` are the
  /// queries with their gates.
  struct AttentionInputs {
    Buffer projected, q, k, v;
  };
  AttentionInputs attention_inputs(const AttentionSpec& mixer, const float* x,
                                   const Call& call) const;
  /// As mamba2_output, for the heads' outputs.
  Buffer attention_output(const AttentionSpec& mixer, Buffer& out, const AttentionInputs& inputs,
                          const Call& call) const;
  Buffer mlp(const MlpSpec& mixer, const float* x, const Call& call) const;
  void experts(const MoeSpec& mixer, const float* logits, const float* input, TokenRange range,
               float* y, const Call& call) const;
  Buffer moe(const MoeSpec& mixer, const float* x, const Call& call) const;
};

}  // namespace replayeval
