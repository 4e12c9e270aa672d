// The forward pass of every family on the CPU: blocks of normed mixers over a residual stream, all
// rows (sequences in their own state precision) through one set of weights.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <new>
#include <numbers>
#include <stdexcept>
#include <string>

#include "kernels/attention.h"
#include "kernels/causal_conv.h"
#include "kernels/dense.h"
#include "kernels/elementwise.h"
#include "kernels/gdn.h"
#include "kernels/mamba2.h"
#include "models/model.h"
#include "models/state_store.h"
#include "models/torch_dense.h"

namespace replayeval {
namespace {

/// Uninitialised floats, 64-byte aligned.
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : values_(static_cast<float*>(::operator new(
            static_cast<size_t>(std::max<int64_t>(size, 1)) * sizeof(float), kAlignment))) {}
  float* data() { return values_.get(); }
  const float* data() const { return values_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* values) const { ::operator delete(values, kAlignment); }
  };
  std::unique_ptr<float, Delete> values_;
};

/// log2(e), the factor between natural and binary logarithms of decays.
constexpr float kLog2E = std::numbers::log2e_v<float>;

/// Rings of so many rows are copied by one thread.
constexpr size_t kFewRows = 12;

/// Adds the time until its end to one kind of work.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds)
      : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
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
};

}  // namespace

struct Model::Implementation {
  std::shared_ptr<const Checkpoint> checkpoint;
  ModelOptions options;
  ModelSpec spec;
  WeightType activation = WeightType::fp32;

  void product(const LinearSpec& layer, const float* x, int64_t m, int64_t x_stride, float* y,
               int64_t y_stride) const {
    const float* bias = layer.bias.empty() ? nullptr : layer.bias.data();
    if (options.dense == DenseMode::fast) {
      torch_linear(x, m, x_stride, layer.weight, bias, y, y_stride, activation == WeightType::bf16);
    } else {
      linear(x, m, x_stride, layer.weight, bias, y, y_stride);
    }
  }

  /// x [m, in] -> [m, out], rounded to the activation type.
  Buffer project(const LinearSpec& layer, const float* x, const Call& call) const {
    Stopwatch watch(call.times->products);
    const int64_t m = call.tokens;
    Buffer y(m * layer.weight.rows);
    product(layer, x, m, layer.weight.cols, y.data(), layer.weight.rows);
    round_to(activation, y.data(), m * layer.weight.rows);
    return y;
  }

  RmsNorm norm_of(const NormSpec& norm, int64_t group) const {
    RmsNorm plan;
    plan.weight = norm.weight.data();
    plan.weight_size = static_cast<int64_t>(norm.weight.size());
    plan.group = group;
    plan.eps = norm.eps;
    plan.one_plus = norm.one_plus;
    plan.activation = activation;
    return plan;
  }

  void convolve(const StateStore& store, const Call& call, const float* inputs, const float* weight,
                const float* bias, const std::vector<int64_t>& input_first, float* outputs,
                const std::vector<int64_t>& output_first, const StateSet& states) const;

  Buffer mamba2(const Mamba2Spec& mixer, StateStore& store, const Call& call, const float* x,
                const StateSet& states, std::vector<double>& decay_sum) const;
  Buffer gdn(const GdnSpec& mixer, StateStore& store, const Call& call, const float* x,
             const StateSet& states, std::vector<double>& decay_sum) const;
  Buffer attend(const AttentionSpec& mixer, std::vector<KvCache>& caches, const Call& call,
                const float* x) const;
  Buffer mlp(const MlpSpec& mixer, const float* x, const Call& call) const;
  Buffer moe(const MoeSpec& mixer, const float* x, const Call& call) const;
};

namespace {

/// Buffers of one call of a recurrent mixer: every row's ring, then its tokens.
struct Gathered {
  Gathered(const StateStore& store, const Call& call)
      : shape(store.shape()), conv_first(call.first.size()), first(call.first.size()) {
    int64_t conv_rows = 0;
    int64_t rows = 0;
    for (size_t r = 0; r < call.first.size(); ++r) {
      conv_first[r] = conv_rows + shape.conv_kernel - 1;
      conv_rows += shape.conv_kernel - 1 + call.lengths[r];
      first[r] = rows + store.history(static_cast<int>(r));
      rows += store.history(static_cast<int>(r)) + call.lengths[r];
    }
    conv = std::make_unique<Buffer>(conv_rows * shape.channels);
    channels = std::make_unique<Buffer>(rows * shape.channels);
    scalars = std::make_unique<Buffer>(rows * shape.scalars);
    corrections = std::make_unique<Buffer>(rows * shape.corrections);
#pragma omp parallel for schedule(static) if (call.first.size() > kFewRows)
    for (size_t r = 0; r < call.first.size(); ++r) {
      const int row = static_cast<int>(r);
      const int64_t start = first[r] - store.history(row);
      store.gather_conv(row,
                        conv->data() + (conv_first[r] - (shape.conv_kernel - 1)) * shape.channels);
      store.gather(row, channels->data() + start * shape.channels,
                   scalars->data() + start * shape.scalars,
                   corrections->data() + start * shape.corrections);
    }
  }

  /// Copies the call's convolution inputs, columns [offset, offset + channels) of x.
  void take_inputs(const Call& call, const float* x, int64_t stride, int64_t offset) {
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < call.first.size(); ++r) {
      for (int t = 0; t < call.lengths[r]; ++t) {
        const float* source = x + (call.first[r] + t) * stride + offset;
        std::copy(source, source + shape.channels,
                  conv->data() + (conv_first[r] + t) * shape.channels);
      }
    }
  }

  void keep(StateStore& store, const Call& call) const {
    std::exception_ptr error;
#pragma omp parallel for schedule(static) if (call.first.size() > kFewRows)
    for (size_t r = 0; r < call.first.size(); ++r) {
      try {
        const int row = static_cast<int>(r);
        const int64_t start = first[r] - store.history(row);
        store.keep(row, call.lengths[r], call.mode,
                   conv->data() + (conv_first[r] - (shape.conv_kernel - 1)) * shape.channels,
                   channels->data() + start * shape.channels,
                   scalars->data() + start * shape.scalars,
                   corrections->data() + start * shape.corrections);
      } catch (...) {  // no memory
#pragma omp critical(replayeval_keep_error)
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }

  StateStore::Shape shape;
  std::vector<int64_t> conv_first, first;  // [rows] index of the call's first token in the buffers
  std::unique_ptr<Buffer> conv, channels, scalars, corrections;
};

}  // namespace

void Model::Implementation::convolve(const StateStore& store, const Call& call, const float* inputs,
                                     const float* weight, const float* bias,
                                     const std::vector<int64_t>& input_first, float* outputs,
                                     const std::vector<int64_t>& output_first,
                                     const StateSet& states) const {
  const int64_t channels = store.shape().channels;
  std::vector<CausalConvRow> rows;
  for (size_t r = 0; r < call.first.size(); ++r) {
    CausalConvRow row;
    row.tokens = call.lengths[r];
    row.x = inputs + input_first[r] * channels;
    row.x_stride = channels;
    row.y = outputs + output_first[r] * channels;
    row.y_stride = channels;
    rows.push_back(row);
  }
  Stopwatch watch(call.times->convolution);
  causal_conv({static_cast<int>(channels), store.shape().conv_kernel, weight, bias, true}, rows,
              states.form());
  if (activation == WeightType::fp32) return;
  for (size_t r = 0; r < call.first.size(); ++r) {
    if (states.row(static_cast<int>(r)).precision.options.ring == RingType::fp32) continue;
    round_to(activation, rows[r].y, call.lengths[r] * channels);
  }
}

Buffer Model::Implementation::mamba2(const Mamba2Spec& mixer, StateStore& store, const Call& call,
                                     const float* x, const StateSet& states,
                                     std::vector<double>& decay_sum) const {
  const int64_t inner = int64_t{mixer.heads} * mixer.head_dim;
  const int64_t group_width = int64_t{mixer.groups} * mixer.state_dim;
  const int64_t channels = inner + 2 * group_width;
  const int64_t width = inner + channels + mixer.heads;
  Buffer projected = project(mixer.in_proj, x, call);
  if (!mixer.in_proj_multiplier.empty()) {
    scale(projected.data(), width, 1.0f, mixer.in_proj_multiplier.data(), call.tokens, width,
          activation);
  }
  Gathered buffers(store, call);
  buffers.take_inputs(call, projected.data(), width, inner);
  convolve(store, call, buffers.conv->data(), mixer.conv_weight.data(),
           mixer.conv_bias.empty() ? nullptr : mixer.conv_bias.data(), buffers.conv_first,
           buffers.channels->data(), buffers.first, states);

  std::vector<float> decay_log2(mixer.a);
  for (float& a : decay_log2) a *= kLog2E;
  for (size_t r = 0; r < call.first.size(); ++r) {
    float* dt = buffers.scalars->data() + buffers.first[r] * mixer.heads;
    activate(Activation::softplus, projected.data() + call.first[r] * width + inner + channels,
             width, mixer.dt_bias.data(), dt, mixer.heads, call.lengths[r], mixer.heads,
             activation);
    if (options.dt_clamp == DtClamp::forward) {
      for (int64_t i = 0; i < int64_t{call.lengths[r]} * mixer.heads; ++i) {
        dt[i] = std::min(std::max(dt[i], mixer.dt_min), mixer.dt_max);
      }
    }
    if (r == 0) {
      for (int64_t i = 0; i < int64_t{call.lengths[0]} * mixer.heads; ++i) {
        const size_t head = static_cast<size_t>(i % mixer.heads);
        decay_sum[head] += std::exp2(dt[i] * decay_log2[head]);
      }
    }
  }

  Buffer y(call.tokens * inner);
  Mamba2Layer layer;
  layer.heads = mixer.heads;
  layer.groups = mixer.groups;
  layer.head_dim = mixer.head_dim;
  layer.state_dim = mixer.state_dim;
  layer.layer = store.shape().layer;
  layer.decay_log2 = decay_log2.data();
  layer.skip = mixer.d.data();
  auto inputs_of = [&](size_t r, int first, int count) {
    const int64_t token = buffers.first[r] + first;
    Mamba2Inputs in;
    in.tokens = count;
    in.x = buffers.channels->data() + token * channels;
    in.b = in.x + inner;
    in.c = in.b + group_width;
    in.x_stride = in.b_stride = in.c_stride = channels;
    in.dt = buffers.scalars->data() + token * mixer.heads;
    in.dt_stride = mixer.heads;
    in.y = y.data() + (call.first[r] + first) * inner;
    in.y_stride = inner;
    return in;
  };
  {
    Stopwatch watch(call.times->state);
    store.advance(
        call.positions, call.lengths, call.mode,
        [&](std::span<StateRow> rows, std::span<const int> first, std::span<const int> count) {
          std::vector<Mamba2Inputs> inputs;
          for (size_t r = 0; r < rows.size(); ++r)
            inputs.push_back(inputs_of(r, first[r], count[r]));
          mamba2_advance(layer, rows, inputs, call.mode, states.form());
        },
        [&](StateRow& row, int r, int end) {
          const Mamba2Inputs inputs = inputs_of(static_cast<size_t>(r), end, 0);
          mamba2_flush(layer, {&row, 1}, {&inputs, 1}, states.form());
        });
  }
  buffers.keep(store, call);

  round_to(activation, y.data(), call.tokens * inner);
  RmsNorm norm = norm_of(mixer.norm, mixer.norm_group);
  norm.gate = mixer.gate == Mamba2Spec::Gate::gate_only        ? GateOrder::gate_only
              : mixer.gate == Mamba2Spec::Gate::norm_then_gate ? GateOrder::norm_first
                                                               : GateOrder::gate_first;
  norm.round_normalized = mixer.round_normalized;
  rms_norm(norm, y.data(), inner, projected.data(), width, y.data(), inner, call.tokens, inner);
  return project(mixer.out_proj, y.data(), call);
}

Buffer Model::Implementation::gdn(const GdnSpec& mixer, StateStore& store, const Call& call,
                                  const float* x, const StateSet& states,
                                  std::vector<double>& decay_sum) const {
  const int64_t key_width = int64_t{mixer.key_heads} * mixer.key_dim;
  const int64_t value_width = int64_t{mixer.value_heads} * mixer.value_dim;
  const int64_t channels = 2 * key_width + value_width;
  const int64_t heads = mixer.value_heads;
  Gathered buffers(store, call);
  {
    Buffer qkv = project(mixer.qkv, x, call);
    buffers.take_inputs(call, qkv.data(), channels, 0);
  }
  convolve(store, call, buffers.conv->data(), mixer.conv_weight.data(), nullptr, buffers.conv_first,
           buffers.channels->data(), buffers.first, states);

  Buffer b = project(mixer.b, x, call);
  Buffer a = project(mixer.a, x, call);
  activate(Activation::sigmoid, b.data(), heads, nullptr, b.data(), heads, call.tokens, heads);
  activate(Activation::softplus, a.data(), heads, mixer.dt_bias.data(), a.data(), heads,
           call.tokens, heads);
  for (size_t r = 0; r < call.first.size(); ++r) {
    for (int t = 0; t < call.lengths[r]; ++t) {
      float* scalars = buffers.scalars->data() + (buffers.first[r] + t) * 2 * heads;
      const int64_t token = call.first[r] + t;
      for (int64_t h = 0; h < heads; ++h) {
        const float decay_log2 =
            -(mixer.a_exp[static_cast<size_t>(h)] * a.data()[token * heads + h]) * kLog2E;
        scalars[h] = decay_log2;
        scalars[heads + h] = b.data()[token * heads + h];
        if (r == 0) decay_sum[static_cast<size_t>(h)] += std::exp2(decay_log2);
      }
    }
  }

  Buffer o(call.tokens * value_width);
  GdnLayer layer;
  layer.key_heads = mixer.key_heads;
  layer.value_heads = mixer.value_heads;
  layer.key_dim = mixer.key_dim;
  layer.value_dim = mixer.value_dim;
  layer.layer = store.shape().layer;
  auto inputs_of = [&](size_t r, int first, int count) {
    const int64_t token = buffers.first[r] + first;
    GdnInputs in;
    in.tokens = count;
    in.q = buffers.channels->data() + token * channels;
    in.k = in.q + key_width;
    in.v = in.k + key_width;
    in.q_stride = in.k_stride = in.v_stride = channels;
    in.decay_log2 = buffers.scalars->data() + token * 2 * heads;
    in.beta = in.decay_log2 + heads;
    in.decay_stride = in.beta_stride = 2 * heads;
    in.u = buffers.corrections->data() + token * value_width;
    in.u_stride = value_width;
    in.o = o.data() + (call.first[r] + first) * value_width;
    in.o_stride = value_width;
    return in;
  };
  {
    Stopwatch watch(call.times->state);
    store.advance(
        call.positions, call.lengths, call.mode,
        [&](std::span<StateRow> rows, std::span<const int> first, std::span<const int> count) {
          std::vector<GdnInputs> inputs;
          for (size_t r = 0; r < rows.size(); ++r)
            inputs.push_back(inputs_of(r, first[r], count[r]));
          gdn_advance(layer, rows, inputs, call.mode, states.form());
        },
        [&](StateRow& row, int r, int end) {
          const GdnInputs inputs = inputs_of(static_cast<size_t>(r), end, 0);
          gdn_flush(layer, {&row, 1}, {&inputs, 1}, states.form());
        });
  }
  buffers.keep(store, call);

  round_to(activation, o.data(), call.tokens * value_width);
  Buffer z = project(mixer.z, x, call);
  RmsNorm norm = norm_of(mixer.norm, mixer.value_dim);
  norm.gate = GateOrder::norm_first;
  rms_norm(norm, o.data(), value_width, z.data(), value_width, o.data(), value_width, call.tokens,
           value_width);
  return project(mixer.out_proj, o.data(), call);
}

Buffer Model::Implementation::attend(const AttentionSpec& mixer, std::vector<KvCache>& caches,
                                     const Call& call, const float* x) const {
  const int64_t heads = mixer.heads;
  const int64_t dim = mixer.head_dim;
  const int64_t q_width = heads * dim;
  const int64_t kv_width = int64_t{mixer.kv_heads} * dim;
  const int64_t q_head =
      mixer.output_gate ? 2 * dim : dim;  // q_proj rows of a head: q, then its gate
  Buffer projected = project(mixer.q, x, call);
  Buffer k = project(mixer.k, x, call);
  Buffer v = project(mixer.v, x, call);
  Buffer q(call.tokens * q_width);
  if (mixer.q_norm) {
    rms_norm(norm_of(*mixer.q_norm, dim), projected.data(), q_head, nullptr, 0, q.data(), dim,
             call.tokens * heads, dim);
  } else {
    for (int64_t i = 0; i < call.tokens * heads; ++i) {
      std::copy_n(projected.data() + i * q_head, dim, q.data() + i * dim);
    }
  }
  if (mixer.k_norm) {
    rms_norm(norm_of(*mixer.k_norm, dim), k.data(), dim, nullptr, 0, k.data(), dim,
             call.tokens * mixer.kv_heads, dim);
  }
  if (mixer.key_multiplier != 1.0f) {
    scale(k.data(), kv_width, mixer.key_multiplier, nullptr, call.tokens, kv_width, activation);
  }
  Buffer out(call.tokens * q_width);
  std::vector<AttentionRow> rows;
  std::vector<float> cosine, sine;
  for (size_t r = 0; r < call.first.size(); ++r) {
    const int64_t n = call.lengths[r];
    float* row_q = q.data() + call.first[r] * q_width;
    float* row_k = k.data() + call.first[r] * kv_width;
    if (mixer.rotary_dim > 0 && n > 0) {
      cosine.resize(static_cast<size_t>(n) * mixer.inverse_frequency.size());
      sine.resize(cosine.size());
      rotary_tables(mixer.inverse_frequency, call.positions[r], n, cosine.data(), sine.data(),
                    activation);
      rotary_apply(row_q, q_width, n, mixer.heads, mixer.head_dim, mixer.rotary_dim, cosine.data(),
                   sine.data(), activation);
      rotary_apply(row_k, kv_width, n, mixer.kv_heads, mixer.head_dim, mixer.rotary_dim,
                   cosine.data(), sine.data(), activation);
    }
    caches[r].append(row_k, kv_width, v.data() + call.first[r] * kv_width, kv_width, n);
    AttentionRow row;
    row.cache = &caches[r];
    row.position = call.positions[r];
    row.tokens = n;
    row.q = row_q;
    row.q_stride = q_width;
    row.out = out.data() + call.first[r] * q_width;
    row.out_stride = q_width;
    rows.push_back(row);
  }
  {
    Stopwatch watch(call.times->attention);
    if (call.form == KernelForm::reference) {
      attention_reference(rows, mixer.heads, mixer.scale);
    } else {
      attention(rows, mixer.heads, mixer.scale);
    }
  }
  round_to(activation, out.data(), call.tokens * q_width);
  if (mixer.output_gate) {
    activate_multiply(Activation::sigmoid, projected.data() + dim, q_head, 1.0f, out.data(), dim,
                      out.data(), dim, call.tokens * heads, dim, activation);
  }
  return project(mixer.o, out.data(), call);
}

Buffer Model::Implementation::mlp(const MlpSpec& mixer, const float* x, const Call& call) const {
  const int64_t m = call.tokens;
  const int64_t width = mixer.up.weight.rows;
  Buffer up = project(mixer.up, x, call);
  if (mixer.gate) {
    Buffer gate = project(*mixer.gate, x, call);
    activate_multiply(mixer.activation, gate.data(), width, mixer.gate_multiplier, up.data(), width,
                      up.data(), width, m, width, activation);
  } else {
    activate(mixer.activation, up.data(), width, nullptr, up.data(), width, m, width, activation);
  }
  Buffer y = project(mixer.down, up.data(), call);
  if (mixer.down_multiplier != 1.0f) {
    scale(y.data(), mixer.down.weight.rows, mixer.down_multiplier, nullptr, m,
          mixer.down.weight.rows, activation);
  }
  return y;
}

namespace {

/// Chosen experts of each token with their weights: chosen, weights [tokens, k].
struct Routing {
  std::vector<int32_t> chosen;
  std::vector<float> weights;
};

Routing route(const MoeSpec& moe, const float* logits, int64_t tokens, WeightType activation) {
  const int64_t experts = moe.router.weight.rows;
  const int k = moe.experts_per_token;
  Routing routing;
  routing.chosen.resize(static_cast<size_t>(tokens * k));
  routing.weights.resize(routing.chosen.size());
  std::vector<float> score(logits, logits + tokens * experts);
  std::vector<float> choice;
  switch (moe.score) {
    case MoeSpec::Score::softmax:
      softmax(logits, experts, score.data(), experts, tokens, experts);
      choice = score;
      break;
    case MoeSpec::Score::softmax_top:
      choice = score;
      break;
    case MoeSpec::Score::sigmoid:
      activate(Activation::sigmoid, logits, experts, nullptr, score.data(), experts, tokens,
               experts);
      choice = score;
      for (int64_t i = 0; i < tokens * experts && !moe.correction_bias.empty(); ++i) {
        choice[static_cast<size_t>(i)] += moe.correction_bias[static_cast<size_t>(i % experts)];
      }
      if (moe.groups > 1) {
        const int64_t size = experts / moe.groups;
        std::vector<float> group_score(static_cast<size_t>(moe.groups));
        std::vector<float> best(2);
        std::vector<int32_t> index(static_cast<size_t>(std::max(2, moe.top_groups)));
        for (int64_t t = 0; t < tokens; ++t) {
          float* row = choice.data() + t * experts;
          for (int g = 0; g < moe.groups; ++g) {
            top_k(row + g * size, size, 1, size, 2, index.data(), best.data());
            group_score[static_cast<size_t>(g)] = best[0] + best[1];
          }
          top_k(group_score.data(), moe.groups, 1, moe.groups, moe.top_groups, index.data(),
                nullptr);
          std::vector<bool> kept(static_cast<size_t>(moe.groups), false);
          for (int g = 0; g < moe.top_groups; ++g)
            kept[static_cast<size_t>(index[static_cast<size_t>(g)])] = true;
          for (int64_t e = 0; e < experts; ++e) {
            if (!kept[static_cast<size_t>(e / size)])
              row[e] = -std::numeric_limits<float>::infinity();
          }
        }
      }
      break;
  }
  top_k(choice.data(), experts, tokens, experts, k, routing.chosen.data(), nullptr);
  for (int64_t t = 0; t < tokens; ++t) {
    float* weights = routing.weights.data() + t * k;
    float sum = 0.0f;
    for (int j = 0; j < k; ++j) {
      weights[j] =
          score[static_cast<size_t>(t * experts + routing.chosen[static_cast<size_t>(t * k + j)])];
      sum += weights[j];
    }
    if (moe.score == MoeSpec::Score::softmax_top) softmax(weights, k, weights, k, 1, k);
    for (int j = 0; j < k; ++j) {
      if (moe.normalize) weights[j] /= sum + moe.normalize_epsilon;
      weights[j] *= moe.scale;
    }
  }
  round_to(activation, routing.weights.data(), tokens * k);
  return routing;
}

}  // namespace

Buffer Model::Implementation::moe(const MoeSpec& mixer, const float* x, const Call& call) const {
  const int64_t m = call.tokens;
  const int64_t experts = mixer.router.weight.rows;
  Buffer logits(m * experts);
  // The router's own product is FP32 in every compute type for sigmoid scores; the others take
  // logits in the activation type.
  linear(x, m, mixer.router.weight.cols, mixer.router.weight, nullptr, logits.data(), experts);
  if (mixer.score != MoeSpec::Score::sigmoid) round_to(activation, logits.data(), m * experts);
  const Routing routing = route(mixer, logits.data(), m, activation);
  const ExpertGroups groups = group_by_expert(routing.chosen.data(), routing.weights.data(), m,
                                              mixer.experts_per_token, static_cast<int>(experts));
  std::unique_ptr<Buffer> latent;
  const float* input = x;
  if (mixer.latent_in) {
    latent = std::make_unique<Buffer>(project(*mixer.latent_in, x, call));
    input = latent->data();
  }
  const int64_t in_width = mixer.experts.front().up.weight.cols;
  const int64_t up_width = mixer.experts.front().up.weight.rows;
  const int64_t out_width = mixer.experts.front().down.weight.rows;
  const int64_t slots = m * mixer.experts_per_token;
  Buffer up(slots * up_width);
  Buffer gate(mixer.experts.front().gate ? slots * up_width : 0);
  Buffer down(slots * out_width);
  std::vector<LinearJob> first_jobs, second_jobs;
  auto job = [&](const LinearSpec& layer, const float* source, int64_t stride, const int32_t* rows,
                 size_t e, float* y, int64_t width) {
    const int32_t offset = groups.offsets[e];
    return LinearJob{source,
                     stride,
                     rows,
                     groups.offsets[e + 1] - offset,
                     layer.weight,
                     layer.bias.empty() ? nullptr : layer.bias.data(),
                     y + offset * width,
                     width};
  };
  for (size_t e = 0; e < mixer.experts.size(); ++e) {
    if (groups.offsets[e] == groups.offsets[e + 1]) continue;
    const int32_t* rows = groups.rows.data() + groups.offsets[e];
    const MlpSpec& expert = mixer.experts[e];
    first_jobs.push_back(job(expert.up, input, in_width, rows, e, up.data(), up_width));
    if (expert.gate)
      first_jobs.push_back(job(*expert.gate, input, in_width, rows, e, gate.data(), up_width));
    second_jobs.push_back(job(expert.down, up.data() + groups.offsets[e] * up_width, up_width,
                              nullptr, e, down.data(), out_width));
  }
  {
    Stopwatch watch(call.times->products);
    linear(first_jobs);
  }
  round_to(activation, up.data(), slots * up_width);
  const MlpSpec& form = mixer.experts.front();
  if (form.gate) {
    round_to(activation, gate.data(), slots * up_width);
    activate_multiply(form.activation, gate.data(), up_width, form.gate_multiplier, up.data(),
                      up_width, up.data(), up_width, slots, up_width, activation);
  } else {
    activate(form.activation, up.data(), up_width, nullptr, up.data(), up_width, slots, up_width,
             activation);
  }
  {
    Stopwatch watch(call.times->products);
    linear(second_jobs);
  }
  round_to(activation, down.data(), slots * out_width);
  Buffer y(m * out_width);
  combine_experts(groups, down.data(), out_width, y.data(), out_width, m, activation);
  if (mixer.latent_out) y = project(*mixer.latent_out, y.data(), call);
  if (mixer.shared) {
    const int64_t hidden = mixer.shared->down.weight.rows;
    Buffer shared = mlp(*mixer.shared, x, call);
    if (mixer.shared_gate) {
      Buffer open = project(*mixer.shared_gate, x, call);
      activate(Activation::sigmoid, open.data(), 1, nullptr, open.data(), 1, m, 1, activation);
      add_row_scaled(y.data(), hidden, shared.data(), hidden, open.data(), m, hidden, activation);
    } else {
      add_scaled(y.data(), hidden, shared.data(), hidden, 1.0f, m, hidden, activation);
    }
  }
  return y;
}

Model::Model(std::shared_ptr<const Checkpoint> checkpoint, ModelOptions options)
    : implementation_(std::make_unique<Implementation>()) {
  implementation_->checkpoint = std::move(checkpoint);
  implementation_->options = options;
  implementation_->activation =
      options.compute == ComputeType::bf16 ? WeightType::bf16 : WeightType::fp32;
  implementation_->spec =
      find_family(*implementation_->checkpoint).build(*implementation_->checkpoint);
}

Model::~Model() = default;

const ModelSpec& Model::spec() const { return implementation_->spec; }
const ModelOptions& Model::options() const { return implementation_->options; }
const Checkpoint& Model::checkpoint() const { return *implementation_->checkpoint; }

Hidden Model::forward(const Batch& batch, StateSet& states, AdvanceMode mode,
                      const LayerObserver& observer) const {
  const Implementation& self = *implementation_;
  const ModelSpec& spec = self.spec;
  Call call;
  call.lengths = batch.lengths;
  call.mode = mode;
  call.form = states.form();
  ForwardTimes times;
  call.times = &times;
  const auto started = std::chrono::steady_clock::now();
  if (static_cast<int>(batch.lengths.size()) != states.rows()) {
    throw std::invalid_argument("forward: " + std::to_string(batch.lengths.size()) +
                                " row lengths, expected one a state row (" +
                                std::to_string(states.rows()) + ")");
  }
  for (size_t r = 0; r < batch.lengths.size(); ++r) {
    if (states.uncommitted_[r] > 0) {
      throw std::invalid_argument("forward: row " + std::to_string(r) +
                                  " has uncommitted tokens; call commit first");
    }
    call.first.push_back(call.tokens);
    call.positions.push_back(states.positions_[r]);
    call.tokens += batch.lengths[r];
  }
  if (call.tokens != static_cast<int64_t>(batch.tokens.size())) {
    throw std::invalid_argument("forward: " + std::to_string(batch.tokens.size()) +
                                " tokens, expected the sum of the lengths, " +
                                std::to_string(call.tokens));
  }
  const int64_t hidden = spec.hidden;
  const WeightType residual_type = spec.residual_fp32 ? WeightType::fp32 : self.activation;
  std::vector<float> residual(static_cast<size_t>(call.tokens * hidden));
  for (int64_t t = 0; t < call.tokens; ++t) {
    const int32_t token = batch.tokens[static_cast<size_t>(t)];
    if (token < 0 || token >= spec.vocabulary) {
      throw std::invalid_argument("forward: token " + std::to_string(token) + " at row position " +
                                  std::to_string(t) + ", expected 0 to " +
                                  std::to_string(spec.vocabulary - 1));
    }
    widen(spec.embedding, token, residual.data() + t * hidden);
  }
  round_to(self.activation, residual.data(), call.tokens * hidden);
  if (spec.embedding_multiplier != 1.0f) {
    scale(residual.data(), hidden, spec.embedding_multiplier, nullptr, call.tokens, hidden,
          self.activation);
  }
  if (observer) observer(-1, residual);

  Buffer normed(call.tokens * hidden);
  for (size_t b = 0; b < spec.blocks.size(); ++b) {
    const Block& block = spec.blocks[b];
    rms_norm(self.norm_of(block.norm, 0), residual.data(), hidden, nullptr, 0, normed.data(),
             hidden, call.tokens, hidden);
    std::unique_ptr<Buffer> sum;
    for (size_t i = 0; i < block.branches.size(); ++i) {
      const Branch& branch = block.branches[i];
      StateSet::Slot& slot = states.slots_[b][i];
      std::unique_ptr<Buffer> scaled;
      const float* x = normed.data();
      if (branch.in_multiplier != 1.0f) {
        scaled = std::make_unique<Buffer>(call.tokens * hidden);
        std::copy_n(normed.data(), call.tokens * hidden, scaled->data());
        scale(scaled->data(), hidden, branch.in_multiplier, nullptr, call.tokens, hidden,
              self.activation);
        x = scaled->data();
      }
      auto run = [&]() -> Buffer {
        if (const auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer)) {
          return self.mamba2(*mamba, *slot.store, call, x, states, slot.decay_sum);
        }
        if (const auto* gdn = std::get_if<GdnSpec>(&branch.mixer)) {
          return self.gdn(*gdn, *slot.store, call, x, states, slot.decay_sum);
        }
        if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer)) {
          return self.attend(*attention, slot.caches, call, x);
        }
        if (const auto* mlp = std::get_if<MlpSpec>(&branch.mixer)) return self.mlp(*mlp, x, call);
        return self.moe(std::get<MoeSpec>(branch.mixer), x, call);
      };
      auto output = std::make_unique<Buffer>(run());
      if (branch.out_multiplier != 1.0f) {
        scale(output->data(), hidden, branch.out_multiplier, nullptr, call.tokens, hidden,
              self.activation);
      }
      if (sum) {
        add_scaled(sum->data(), hidden, output->data(), hidden, 1.0f, call.tokens, hidden,
                   self.activation);
      } else {
        sum = std::move(output);
      }
    }
    add_scaled(residual.data(), hidden, sum->data(), hidden, 1.0f, call.tokens, hidden,
               residual_type);
    const bool layer_ends = b + 1 == spec.blocks.size() || spec.blocks[b + 1].layer != block.layer;
    if (observer && layer_ends) observer(block.layer, residual);
  }
  Hidden result;
  result.values.resize(residual.size());
  result.tokens = call.tokens;
  result.hidden = spec.hidden;
  rms_norm(self.norm_of(spec.final_norm, 0), residual.data(), hidden, nullptr, 0,
           result.values.data(), hidden, call.tokens, hidden);
  const double total =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  states.times_.products += times.products;
  states.times_.attention += times.attention;
  states.times_.state += times.state;
  states.times_.convolution += times.convolution;
  states.times_.other += total - times.products - times.attention - times.state - times.convolution;
  for (size_t r = 0; r < batch.lengths.size(); ++r) {
    if (mode == AdvanceMode::verify) {
      states.uncommitted_[r] = batch.lengths[r];
    } else {
      states.positions_[r] += batch.lengths[r];
    }
  }
  return result;
}

void Model::lm_head(const Hidden& hidden, int64_t first, int64_t count, float* logits) const {
  const Implementation& self = *implementation_;
  const int64_t vocabulary = self.spec.vocabulary;
  const LinearSpec& head = self.spec.lm_head;
  const float* x = hidden.values.data() + first * hidden.hidden;
  // Logits stay FP32 in every compute type: BF16 logits of 16 to 32 are 0.125 apart (DESIGN.md
  // section 3).
  if (self.options.dense == DenseMode::fast) {
    torch_linear(x, count, hidden.hidden, head.weight, nullptr, logits, vocabulary, false);
  } else {
    linear(x, count, hidden.hidden, head.weight, nullptr, logits, vocabulary);
  }
  if (self.spec.logits_multiplier != 1.0f) {
    scale(logits, vocabulary, self.spec.logits_multiplier, nullptr, count, vocabulary);
  }
}

}  // namespace replayeval
