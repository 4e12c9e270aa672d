// The forward pass of every family on a backend: blocks of normed mixers over a residual stream,
// all rows (sequences in their own state precision) through one set of weights.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <string>

#include "models/forward.h"

namespace replayeval {
namespace {

/// log2(e), the factor between natural and binary logarithms of decays.
constexpr float kLog2E = std::numbers::log2e_v<float>;

/// Arrays of one call of a recurrent mixer: each row's ring, then its tokens; in the row's own
/// arrays for a few tokens, in arrays of the call otherwise.
class Records {
 public:
  Records(Backend& backend, StateStore& store, const Call& call)
      : backend_(backend), store_(store), call_(call), shape_(store.shape()) {
    const size_t count = call.first.size();
    rows_.resize(count);
    std::vector<size_t> gathered;
    int64_t inputs = 0, records = 0;
    for (size_t r = 0; r < count; ++r) {
      if (call.lengths[r] <= StateStore::kInPlaceTokens) {
        rows_[r] = store.in_place(static_cast<int>(r), call.lengths[r]);
        continue;
      }
      gathered.push_back(r);
      inputs += shape_.conv_kernel - 1 + call.lengths[r];
      records += store.history(static_cast<int>(r)) + call.lengths[r];
    }
    if (gathered.empty()) return;
    conv_ = Buffer(backend, inputs * shape_.channels);
    channels_ = Buffer(backend, records * shape_.channels);
    scalars_ = Buffer(backend, records * shape_.scalars);
    corrections_ = Buffer(backend, records * shape_.corrections);
    std::vector<CopyJob> copies;
    int64_t input = 0, record = 0;
    for (size_t r : gathered) {
      input += shape_.conv_kernel - 1;
      record += store.history(static_cast<int>(r));
      rows_[r] = {conv_.data() + input * shape_.channels,
                  channels_.data() + record * shape_.channels,
                  scalars_.data() + record * shape_.scalars,
                  corrections_.data() + record * shape_.corrections};
      store.gather(static_cast<int>(r), rows_[r], copies);
      input += call.lengths[r];
      record += call.lengths[r];
    }
    backend.copy(copies);
  }

  /// Copies the call's convolution inputs, columns [offset, offset + channels) of x.
  void take_inputs(const float* x, int64_t stride, int64_t offset) const {
    std::vector<CopyJob> copies;
    for (size_t r = 0; r < rows_.size(); ++r) {
      if (call_.lengths[r] == 0) continue;
      copies.push_back({rows_[r].conv, shape_.channels, x + call_.first[r] * stride + offset,
                        stride, call_.lengths[r], shape_.channels});
    }
    backend_.copy(copies);
  }

  void keep() const {
    std::vector<CopyJob> copies;
    for (size_t r = 0; r < rows_.size(); ++r) {
      store_.keep(static_cast<int>(r), call_.lengths[r], call_.mode, rows_[r], copies);
    }
    if (!copies.empty()) backend_.copy(copies);
  }

  std::span<const RecordPointers> rows() const { return rows_; }
  const RecordPointers& operator[](size_t r) const { return rows_[r]; }

 private:
  Backend& backend_;
  StateStore& store_;
  const Call& call_;
  StateStore::Shape shape_;
  std::vector<RecordPointers> rows_;
  Buffer conv_, channels_, scalars_, corrections_;
};

}  // namespace

void Model::Implementation::convolve(const StateStore& store, const Call& call,
                                     const std::vector<float>& weight,
                                     const std::vector<float>& bias,
                                     std::span<const RecordPointers> records,
                                     const StateSet& states) const {
  const int64_t channels = store.shape().channels;
  std::vector<CausalConvRow> rows;
  for (size_t r = 0; r < call.first.size(); ++r) {
    rows.push_back({call.lengths[r], records[r].conv, channels, records[r].channels, channels});
  }
  const Stopwatch timed = watch(call.times->convolution);
  backend->causal_conv({static_cast<int>(channels), store.shape().conv_kernel, constant(weight),
                        constant(bias), true},
                       rows, states.form());
  if (activation == WeightType::fp32) return;
  for (size_t r = 0; r < call.first.size(); ++r) {
    if (states.row(static_cast<int>(r)).precision.options.ring == RingType::fp32) continue;
    backend->round_to(activation, rows[r].y, call.lengths[r] * channels);
  }
}

Buffer Model::Implementation::mamba2_inputs(const Mamba2Spec& mixer, const float* x,
                                            const Call& call) const {
  Buffer projected = project(mixer.in_proj, x, call);
  if (!mixer.in_proj_multiplier.empty()) {
    const int64_t width = mixer.in_proj.weight.rows;
    backend->scale(projected.data(), width, 1.0f, constant(mixer.in_proj_multiplier), call.tokens,
                   width, activation);
  }
  return projected;
}

void Model::Implementation::mamba2_steps(const Mamba2Spec& mixer, const float* from, int64_t stride,
                                         float* dt, int64_t tokens) const {
  backend->activate(Activation::softplus, from, stride, constant(mixer.dt_bias), dt, mixer.heads,
                    tokens, mixer.heads, activation);
  if (options.dt_clamp == DtClamp::forward)
    backend->clamp(dt, tokens * mixer.heads, mixer.dt_min, mixer.dt_max);
}

Mamba2Layer Model::Implementation::mamba2_layer(const Mamba2Spec& mixer, int layer) const {
  Mamba2Layer plan;
  plan.heads = mixer.heads;
  plan.groups = mixer.groups;
  plan.head_dim = mixer.head_dim;
  plan.state_dim = mixer.state_dim;
  plan.layer = layer;
  plan.decay_log2 = constant(mixer.decay_log2);
  plan.skip = constant(mixer.d);
  return plan;
}

RmsNorm Model::Implementation::mamba2_norm(const Mamba2Spec& mixer) const {
  RmsNorm norm = norm_of(mixer.norm, mixer.norm_group);
  norm.gate = mixer.gate == Mamba2Spec::Gate::gate_only        ? GateOrder::gate_only
              : mixer.gate == Mamba2Spec::Gate::norm_then_gate ? GateOrder::norm_first
                                                               : GateOrder::gate_first;
  norm.round_normalized = mixer.round_normalized;
  return norm;
}

Buffer Model::Implementation::mamba2_output(const Mamba2Spec& mixer, Buffer& y,
                                            const Buffer& projected, const Call& call) const {
  const int64_t inner = int64_t{mixer.heads} * mixer.head_dim;
  backend->round_to(activation, y.data(), call.tokens * inner);
  backend->rms_norm(mamba2_norm(mixer), y.data(), inner, projected.data(),
                    mixer.in_proj.weight.rows, y.data(), inner, call.tokens, inner);
  return project(mixer.out_proj, y.data(), call);
}

Buffer Model::Implementation::mamba2(const Mamba2Spec& mixer, StateStore& store, const Call& call,
                                     const float* x, const StateSet& states,
                                     double* decay_sum) const {
  const int64_t inner = int64_t{mixer.heads} * mixer.head_dim;
  const int64_t group_width = int64_t{mixer.groups} * mixer.state_dim;
  const int64_t channels = inner + 2 * group_width;
  const int64_t width = inner + channels + mixer.heads;
  Buffer projected = mamba2_inputs(mixer, x, call);
  const Records records(*backend, store, call);
  records.take_inputs(projected.data(), width, inner);
  convolve(store, call, mixer.conv_weight, mixer.conv_bias, records.rows(), states);

  for (size_t r = 0; r < call.first.size(); ++r) {
    float* dt = records[r].scalars;
    mamba2_steps(mixer, projected.data() + call.first[r] * width + inner + channels, width, dt,
                 call.lengths[r]);
    if (r == 0) {
      backend->add_decays(dt, mixer.heads, constant(mixer.decay_log2), call.lengths[0], mixer.heads,
                          decay_sum);
    }
  }

  Buffer y = buffer(call.tokens * inner);
  const Mamba2Layer layer = mamba2_layer(mixer, store.shape().layer);
  auto inputs_of = [&](size_t r, int first, int count) {
    Mamba2Inputs in;
    in.tokens = count;
    in.x = records[r].channels + first * channels;
    in.b = in.x + inner;
    in.c = in.b + group_width;
    in.x_stride = in.b_stride = in.c_stride = channels;
    in.dt = records[r].scalars + int64_t{first} * mixer.heads;
    in.dt_stride = mixer.heads;
    in.y = y.data() + (call.first[r] + first) * inner;
    in.y_stride = inner;
    return in;
  };
  {
    const Stopwatch timed = watch(call.times->state);
    store.advance(
        call.positions, call.lengths, call.mode,
        [&](std::span<StateRow> rows, std::span<const int> first, std::span<const int> count) {
          std::vector<Mamba2Inputs> inputs;
          for (size_t r = 0; r < rows.size(); ++r)
            inputs.push_back(inputs_of(r, first[r], count[r]));
          backend->mamba2_advance(layer, rows, inputs, call.mode, states.form());
        },
        [&](StateRow& row, int r, int end) {
          const Mamba2Inputs inputs = inputs_of(static_cast<size_t>(r), end, 0);
          backend->mamba2_flush(layer, {&row, 1}, {&inputs, 1}, states.form());
        });
  }
  records.keep();

  return mamba2_output(mixer, y, projected, call);
}

Model::Implementation::Projections Model::Implementation::gdn_inputs(const GdnSpec& mixer,
                                                                     const float* x,
                                                                     const Call& call) const {
  return project({&mixer.qkv, &mixer.z, &mixer.b, &mixer.a}, x, call);
}

Model::Implementation::GdnScalars Model::Implementation::gdn_scalars(const GdnSpec& mixer,
                                                                     const Projections& inputs,
                                                                     const Call& call) const {
  const int64_t heads = mixer.value_heads;
  GdnScalars scalars{buffer(call.tokens * heads), buffer(call.tokens * heads)};
  backend->activate(Activation::sigmoid, inputs.at(2), inputs.width, nullptr, scalars.b.data(),
                    heads, call.tokens, heads, WeightType::fp32);
  backend->activate(Activation::softplus, inputs.at(3), inputs.width, constant(mixer.dt_bias),
                    scalars.a.data(), heads, call.tokens, heads, WeightType::fp32);
  return scalars;
}

GdnLayer Model::Implementation::gdn_layer(const GdnSpec& mixer, int layer) {
  GdnLayer plan;
  plan.key_heads = mixer.key_heads;
  plan.value_heads = mixer.value_heads;
  plan.key_dim = mixer.key_dim;
  plan.value_dim = mixer.value_dim;
  plan.layer = layer;
  return plan;
}

RmsNorm Model::Implementation::gdn_norm(const GdnSpec& mixer) const {
  RmsNorm norm = norm_of(mixer.norm, mixer.value_dim);
  norm.gate = GateOrder::norm_first;
  return norm;
}

Buffer Model::Implementation::gdn_output(const GdnSpec& mixer, Buffer& o, const Projections& inputs,
                                         const Call& call) const {
  const int64_t value_width = int64_t{mixer.value_heads} * mixer.value_dim;
  backend->round_to(activation, o.data(), call.tokens * value_width);
  backend->rms_norm(gdn_norm(mixer), o.data(), value_width, inputs.at(1), inputs.width, o.data(),
                    value_width, call.tokens, value_width);
  return project(mixer.out_proj, o.data(), call);
}

Buffer Model::Implementation::gdn(const GdnSpec& mixer, StateStore& store, const Call& call,
                                  const float* x, const StateSet& states, double* decay_sum) const {
  const int64_t key_width = int64_t{mixer.key_heads} * mixer.key_dim;
  const int64_t value_width = int64_t{mixer.value_heads} * mixer.value_dim;
  const int64_t channels = 2 * key_width + value_width;
  const int64_t heads = mixer.value_heads;
  const Records records(*backend, store, call);
  const Projections projected = gdn_inputs(mixer, x, call);
  records.take_inputs(projected.at(0), projected.width, 0);
  convolve(store, call, mixer.conv_weight, {}, records.rows(), states);

  const GdnScalars scalars = gdn_scalars(mixer, projected, call);
  for (size_t r = 0; r < call.first.size(); ++r) {
    const int64_t token = call.first[r] * heads;
    backend->gdn_scalars(scalars.a.data() + token, scalars.b.data() + token, constant(mixer.a_exp),
                         call.lengths[r], static_cast<int>(heads), records[r].scalars);
    if (r == 0) {
      backend->add_decays(records[0].scalars, 2 * heads, nullptr, call.lengths[0],
                          static_cast<int>(heads), decay_sum);
    }
  }

  Buffer o = buffer(call.tokens * value_width);
  const GdnLayer layer = gdn_layer(mixer, store.shape().layer);
  auto inputs_of = [&](size_t r, int first, int count) {
    GdnInputs in;
    in.tokens = count;
    in.q = records[r].channels + first * channels;
    in.k = in.q + key_width;
    in.v = in.k + key_width;
    in.q_stride = in.k_stride = in.v_stride = channels;
    in.decay_log2 = records[r].scalars + first * 2 * heads;
    in.beta = in.decay_log2 + heads;
    in.decay_stride = in.beta_stride = 2 * heads;
    in.u = records[r].corrections + first * value_width;
    in.u_stride = value_width;
    in.o = o.data() + (call.first[r] + first) * value_width;
    in.o_stride = value_width;
    return in;
  };
  {
    const Stopwatch timed = watch(call.times->state);
    store.advance(
        call.positions, call.lengths, call.mode,
        [&](std::span<StateRow> rows, std::span<const int> first, std::span<const int> count) {
          std::vector<GdnInputs> inputs;
          for (size_t r = 0; r < rows.size(); ++r)
            inputs.push_back(inputs_of(r, first[r], count[r]));
          backend->gdn_advance(layer, rows, inputs, call.mode, states.form());
        },
        [&](StateRow& row, int r, int end) {
          const GdnInputs inputs = inputs_of(static_cast<size_t>(r), end, 0);
          backend->gdn_flush(layer, {&row, 1}, {&inputs, 1}, states.form());
        });
  }
  records.keep();

  return gdn_output(mixer, o, projected, call);
}

// Rows at the same position, and all layers of a call, share a table.
const RotaryTable& Model::Implementation::rotary(const AttentionSpec& mixer, const Call& call,
                                                 size_t row) const {
  const int64_t position = call.positions[row];
  const int64_t tokens = call.lengths[row];
  for (const RotaryTable& table : call.rotary) {
    if (table.position == position && table.tokens == tokens &&
        *table.frequency == mixer.inverse_frequency) {
      return table;
    }
  }
  const size_t size = static_cast<size_t>(tokens) * mixer.inverse_frequency.size();
  std::vector<float> cosine(size), sine(size);
  rotary_tables(mixer.inverse_frequency, position, tokens, cosine.data(), sine.data(), activation);
  RotaryTable table{&mixer.inverse_frequency, position, tokens, buffer(static_cast<int64_t>(size)),
                    buffer(static_cast<int64_t>(size))};
  backend->upload(table.cos.data(), cosine.data(), size * sizeof(float));
  backend->upload(table.sin.data(), sine.data(), size * sizeof(float));
  return call.rotary.emplace_back(std::move(table));
}

Model::Implementation::AttentionInputs Model::Implementation::attention_inputs(
    const AttentionSpec& mixer, const float* x, const Call& call) const {
  const int64_t dim = mixer.head_dim;
  const int64_t kv_width = int64_t{mixer.kv_heads} * dim;
  const int64_t q_head =
      mixer.output_gate ? 2 * dim : dim;  // q_proj rows of a head: q, then its gate
  AttentionInputs in{project(mixer.q, x, call), buffer(call.tokens * mixer.heads * dim),
                     project(mixer.k, x, call), project(mixer.v, x, call)};
  if (mixer.q_norm) {
    backend->rms_norm(norm_of(*mixer.q_norm, dim), in.projected.data(), q_head, nullptr, 0,
                      in.q.data(), dim, call.tokens * mixer.heads, dim);
  } else {
    const CopyJob queries{in.q.data(), dim, in.projected.data(), q_head, call.tokens * mixer.heads,
                          dim};
    backend->copy({&queries, 1});
  }
  if (mixer.k_norm) {
    backend->rms_norm(norm_of(*mixer.k_norm, dim), in.k.data(), dim, nullptr, 0, in.k.data(), dim,
                      call.tokens * mixer.kv_heads, dim);
  }
  if (mixer.key_multiplier != 1.0f) {
    backend->scale(in.k.data(), kv_width, mixer.key_multiplier, nullptr, call.tokens, kv_width,
                   activation);
  }
  return in;
}

Buffer Model::Implementation::attention_output(const AttentionSpec& mixer, Buffer& out,
                                               const AttentionInputs& inputs,
                                               const Call& call) const {
  const int64_t dim = mixer.head_dim;
  const int64_t queries = call.tokens * mixer.heads;
  backend->round_to(activation, out.data(), queries * dim);
  if (mixer.output_gate) {
    backend->activate_multiply(Activation::sigmoid, inputs.projected.data() + dim, 2 * dim, 1.0f,
                               out.data(), dim, out.data(), dim, queries, dim, activation);
  }
  return project(mixer.o, out.data(), call);
}

Buffer Model::Implementation::attend(const AttentionSpec& mixer, KvStore& cache, const Call& call,
                                     const float* x) const {
  const int64_t dim = mixer.head_dim;
  const int64_t q_width = mixer.heads * dim;
  const int64_t kv_width = mixer.kv_heads * dim;
  const AttentionInputs in = attention_inputs(mixer, x, call);
  Buffer out = buffer(call.tokens * q_width);
  std::vector<AttentionQueries> queries;
  for (size_t r = 0; r < call.first.size(); ++r) {
    const int64_t n = call.lengths[r];
    if (n == 0) continue;
    float* row_q = in.q.data() + call.first[r] * q_width;
    float* row_k = in.k.data() + call.first[r] * kv_width;
    if (mixer.rotary_dim > 0) {
      const RotaryTable& table = rotary(mixer, call, r);
      backend->rotary_apply(row_q, q_width, n, mixer.heads, mixer.head_dim, mixer.rotary_dim,
                            table.cos.data(), table.sin.data(), activation);
      backend->rotary_apply(row_k, kv_width, n, mixer.kv_heads, mixer.head_dim, mixer.rotary_dim,
                            table.cos.data(), table.sin.data(), activation);
    }
    const int row = static_cast<int>(r);
    cache.append(row, row_k, kv_width, in.v.data() + call.first[r] * kv_width, kv_width, n);
    queries.push_back(
        {row, call.positions[r], n, row_q, q_width, out.data() + call.first[r] * q_width, q_width});
  }
  {
    const Stopwatch timed = watch(call.times->attention);
    cache.attend(queries, mixer.heads, mixer.scale, call.form);
  }
  return attention_output(mixer, out, in, call);
}

Buffer Model::Implementation::mlp(const MlpSpec& mixer, const float* x, const Call& call) const {
  const int64_t m = call.tokens;
  const int64_t width = mixer.up.weight.rows;
  const Projections in =
      mixer.gate ? project({&mixer.up, &*mixer.gate}, x, call) : project({&mixer.up}, x, call);
  float* up = in.at(0);
  if (mixer.gate) {
    backend->activate_multiply(mixer.activation, in.at(1), in.width, mixer.gate_multiplier, up,
                               in.width, up, in.width, m, width, activation);
  } else {
    backend->activate(mixer.activation, up, in.width, nullptr, up, in.width, m, width, activation);
  }
  Buffer y = project(mixer.down, up, call, in.width);
  if (mixer.down_multiplier != 1.0f) {
    backend->scale(y.data(), mixer.down.weight.rows, mixer.down_multiplier, nullptr, m,
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

// Chosen experts of a range of tokens multiply at once: their products' shapes then depend on no
// other range.
void Model::Implementation::experts(const MoeSpec& mixer, const float* logits, const float* input,
                                    TokenRange range, float* y, const Call& call) const {
  const int64_t m = range.tokens;
  const int64_t expert_count = mixer.router.weight.rows;
  std::vector<float> host(static_cast<size_t>(m * expert_count));
  backend->download(host.data(), logits + range.first * expert_count, host.size() * sizeof(float));
  const Routing routing = route(mixer, host.data(), m, activation);
  const ExpertGroups groups =
      group_by_expert(routing.chosen.data(), routing.weights.data(), m, mixer.experts_per_token,
                      static_cast<int>(expert_count));
  const auto placed = [&](const auto& values) {
    Memory memory(*backend, values.size() * sizeof(values[0]));
    backend->upload(memory.data(), values.data(), memory.bytes());
    return memory;
  };
  const Memory rows_memory = placed(groups.rows), slots_memory = placed(groups.slots),
               weights_memory = placed(groups.weights);
  const auto* rows = reinterpret_cast<const int32_t*>(rows_memory.data());
  const int64_t in_width = mixer.experts.front().up.weight.cols;
  const int64_t up_width = mixer.experts.front().up.weight.rows;
  const int64_t out_width = mixer.experts.front().down.weight.rows;
  const int64_t slots = m * mixer.experts_per_token;
  Buffer up = buffer(slots * up_width);
  Buffer gate = buffer(mixer.experts.front().gate ? slots * up_width : 0);
  Buffer down = buffer(slots * out_width);
  const auto products = [&](const float* source, int64_t stride, const int32_t* chosen, float* to,
                            auto layer) {
    ExpertProducts p{source, stride, chosen, groups.offsets, {}, to};
    for (const MlpSpec& expert : mixer.experts) {
      const LinearSpec& linear = layer(expert);
      p.experts.push_back({&linear.weight, &linear.bias});
    }
    return p;
  };
  input += range.first * in_width;
  std::vector<ExpertProducts> first;
  first.push_back(products(input, in_width, rows, up.data(),
                           [](const MlpSpec& e) -> const LinearSpec& { return e.up; }));
  if (mixer.experts.front().gate) {
    first.push_back(products(input, in_width, rows, gate.data(),
                             [](const MlpSpec& e) -> const LinearSpec& { return *e.gate; }));
  }
  {
    const Stopwatch timed = watch(call.times->products);
    backend->linear(first);
  }
  const MlpSpec& form = mixer.experts.front();
  if (form.gate) {
    backend->activate_multiply(form.activation, gate.data(), up_width, form.gate_multiplier,
                               up.data(), up_width, up.data(), up_width, slots, up_width,
                               activation);
  } else {
    backend->activate(form.activation, up.data(), up_width, nullptr, up.data(), up_width, slots,
                      up_width, activation);
  }
  {
    const Stopwatch timed = watch(call.times->products);
    const ExpertProducts second =
        products(up.data(), up_width, nullptr, down.data(),
                 [](const MlpSpec& e) -> const LinearSpec& { return e.down; });
    backend->linear({&second, 1});
  }
  backend->combine_experts(reinterpret_cast<const int32_t*>(slots_memory.data()),
                           reinterpret_cast<const float*>(weights_memory.data()),
                           mixer.experts_per_token, down.data(), out_width,
                           y + range.first * out_width, out_width, m, activation);
}

Buffer Model::Implementation::moe(const MoeSpec& mixer, const float* x, const Call& call) const {
  const int64_t m = call.tokens;
  const int64_t expert_count = mixer.router.weight.rows;
  Buffer logits = buffer(m * expert_count);
  // The router's own product is FP32 in every compute type for sigmoid scores; the others take
  // logits in the activation type.
  backend->linear_fp32(x, m, mixer.router.weight.cols, mixer.router.weight, logits.data());
  if (mixer.score != MoeSpec::Score::sigmoid)
    backend->round_to(activation, logits.data(), m * expert_count);
  Buffer latent;
  const float* input = x;
  if (mixer.latent_in) {
    latent = project(*mixer.latent_in, x, call);
    input = latent.data();
  }
  Buffer y = buffer(m * mixer.experts.front().down.weight.rows);
  for (const TokenRange& range : call.ranges) {
    experts(mixer, logits.data(), input, range, y.data(), call);
  }
  if (mixer.latent_out) y = project(*mixer.latent_out, y.data(), call);
  if (mixer.shared) {
    const int64_t hidden = mixer.shared->down.weight.rows;
    Buffer shared = mlp(*mixer.shared, x, call);
    if (mixer.shared_gate) {
      Buffer open = project(*mixer.shared_gate, x, call);
      backend->activate(Activation::sigmoid, open.data(), 1, nullptr, open.data(), 1, m, 1,
                        activation);
      backend->add_row_scaled(y.data(), shared.data(), open.data(), m, hidden, activation);
    } else {
      backend->add_scaled(y.data(), shared.data(), 1.0f, m, hidden, activation);
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
  if (const std::vector<std::string> unread = implementation_->checkpoint->unread();
      !unread.empty()) {
    constexpr size_t kShown = 4;
    std::string note = "tensors of the checkpoint that " + implementation_->spec.family +
                       " does not read (" + std::to_string(unread.size()) + "):";
    for (size_t i = 0; i < std::min(kShown, unread.size()); ++i) note += " " + unread[i];
    if (unread.size() > kShown) note += " ...";
    implementation_->spec.notes.push_back(note);
  }
  for (Block& block : implementation_->spec.blocks) {
    for (Branch& branch : block.branches) {
      auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer);
      if (mamba == nullptr) continue;
      mamba->decay_log2 = mamba->a;
      for (float& a : mamba->decay_log2) a *= kLog2E;
    }
  }
  const bool fast = options.dense == DenseMode::fast;
  const bool bf16 = options.compute == ComputeType::bf16;
  implementation_->backend = options.device == Device::cuda ? make_cuda_backend(fast, bf16)
                                                            : make_host_backend(fast, bf16);
}

Model::~Model() = default;

const ModelSpec& Model::spec() const { return implementation_->spec; }
const ModelOptions& Model::options() const { return implementation_->options; }
const Checkpoint& Model::checkpoint() const { return *implementation_->checkpoint; }
Backend& Model::backend() const { return *implementation_->backend; }

void Model::Implementation::layers(const Call& call, float* residual, const MixerCall& mixer,
                                   const std::function<void(int layer)>& after) const {
  const int64_t hidden = spec.hidden;
  const WeightType residual_type = spec.residual_fp32 ? WeightType::fp32 : activation;
  Buffer normed = buffer(call.tokens * hidden);
  for (size_t b = 0; b < spec.blocks.size(); ++b) {
    const Block& block = spec.blocks[b];
    backend->rms_norm(norm_of(block.norm, 0), residual, hidden, nullptr, 0, normed.data(), hidden,
                      call.tokens, hidden);
    Buffer sum;
    for (size_t i = 0; i < block.branches.size(); ++i) {
      const Branch& branch = block.branches[i];
      Buffer scaled;
      const float* x = normed.data();
      if (branch.in_multiplier != 1.0f) {
        scaled = buffer(call.tokens * hidden);
        backend->copy(scaled.data(), normed.data(),
                      static_cast<size_t>(call.tokens * hidden) * sizeof(float));
        backend->scale(scaled.data(), hidden, branch.in_multiplier, nullptr, call.tokens, hidden,
                       activation);
        x = scaled.data();
      }
      Buffer output = mixer(b, i, x);
      if (branch.out_multiplier != 1.0f) {
        backend->scale(output.data(), hidden, branch.out_multiplier, nullptr, call.tokens, hidden,
                       activation);
      }
      if (sum) {
        backend->add_scaled(sum.data(), output.data(), 1.0f, call.tokens, hidden, activation);
      } else {
        sum = std::move(output);
      }
    }
    backend->add_scaled(residual, sum.data(), 1.0f, call.tokens, hidden, residual_type);
    const bool layer_ends = b + 1 == spec.blocks.size() || spec.blocks[b + 1].layer != block.layer;
    if (after && layer_ends) after(block.layer);
  }
}

Buffer Model::Implementation::embed(const int32_t* ids, int64_t count) const {
  Buffer residual = buffer(count * spec.hidden);
  backend->embed(spec.embedding, ids, count, residual.data());
  scale_embedding(residual, count);
  return residual;
}

Buffer Model::Implementation::embed(std::span<const int32_t> ids) const {
  const int64_t count = static_cast<int64_t>(ids.size());
  Buffer residual = buffer(count * spec.hidden);
  backend->embed(spec.embedding, ids, residual.data());
  scale_embedding(residual, count);
  return residual;
}

void Model::Implementation::scale_embedding(Buffer& residual, int64_t count) const {
  const int64_t hidden = spec.hidden;
  backend->round_to(activation, residual.data(), count * hidden);
  if (spec.embedding_multiplier != 1.0f) {
    backend->scale(residual.data(), hidden, spec.embedding_multiplier, nullptr, count, hidden,
                   activation);
  }
}

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
  const bool together = !self.backend->on_device() || self.options.products == Products::together;
  if (together) call.ranges.push_back({0, call.tokens});
  for (size_t r = 0; !together && r < call.first.size(); ++r) {
    if (batch.lengths[r] > 0) call.ranges.push_back({call.first[r], batch.lengths[r]});
  }
  const int64_t hidden = spec.hidden;
  for (int64_t t = 0; t < call.tokens; ++t) {
    const int32_t token = batch.tokens[static_cast<size_t>(t)];
    if (token < 0 || token >= spec.vocabulary) {
      throw std::invalid_argument("forward: token " + std::to_string(token) + " at row position " +
                                  std::to_string(t) + ", expected 0 to " +
                                  std::to_string(spec.vocabulary - 1));
    }
  }
  Backend& backend = *self.backend;
  const Buffer residual = self.embed(batch.tokens);
  const std::function<void(int)> observe = [&](int layer) {
    std::vector<float> values(static_cast<size_t>(call.tokens * hidden));
    backend.download(values.data(), residual.data(), values.size() * sizeof(float));
    observer(layer, values);
  };
  if (observer) observe(-1);

  const auto mixer = [&](size_t b, size_t i, const float* x) -> Buffer {
    const Branch& branch = spec.blocks[b].branches[i];
    StateSet::Slot& slot = states.slots_[b][i];
    double* decay_sum = reinterpret_cast<double*>(slot.decay_sum.data());
    if (const auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer))
      return self.mamba2(*mamba, *slot.store, call, x, states, decay_sum);
    if (const auto* gdn = std::get_if<GdnSpec>(&branch.mixer))
      return self.gdn(*gdn, *slot.store, call, x, states, decay_sum);
    if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer))
      return self.attend(*attention, *slot.cache, call, x);
    if (const auto* mlp = std::get_if<MlpSpec>(&branch.mixer)) return self.mlp(*mlp, x, call);
    return self.moe(std::get<MoeSpec>(branch.mixer), x, call);
  };
  self.layers(call, residual.data(), mixer, observer ? observe : std::function<void(int)>());
  Hidden result;
  result.tokens = call.tokens;
  result.hidden = spec.hidden;
  result.memory = Memory(backend, static_cast<size_t>(call.tokens * hidden) * sizeof(float));
  backend.rms_norm(self.norm_of(spec.final_norm, 0), residual.data(), hidden, nullptr, 0,
                   result.data(), hidden, call.tokens, hidden);
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
  Backend& backend = *implementation_->backend;
  if (!backend.on_device()) return lm_head_into(hidden, first, count, logits);
  const size_t size = static_cast<size_t>(count * implementation_->spec.vocabulary);
  const Buffer device(backend, static_cast<int64_t>(size));
  lm_head_into(hidden, first, count, device.data());
  backend.download(logits, device.data(), size * sizeof(float));
}

// Logits stay FP32 in every compute type: BF16 logits of 16 to 32 are 0.125 apart (DESIGN.md
// section 3).
void Model::lm_head_into(const Hidden& hidden, int64_t first, int64_t count, float* logits) const {
  Backend& backend = *implementation_->backend;
  const ModelSpec& spec = implementation_->spec;
  const TokenRange range{0, count};
  backend.linear(hidden.data() + first * hidden.hidden, spec.hidden, spec.lm_head.weight, {},
                 logits, {&range, 1}, true);
  if (spec.logits_multiplier != 1.0f) {
    backend.scale(logits, spec.vocabulary, spec.logits_multiplier, nullptr, count, spec.vocabulary,
                  WeightType::fp32);
  }
}

Hidden Hidden::select(std::span<const int64_t> positions) const {
  Hidden chosen;
  chosen.hidden = hidden;
  chosen.tokens = static_cast<int64_t>(positions.size());
  Backend& backend = *memory.backend();
  chosen.memory = Memory(backend, positions.size() * static_cast<size_t>(hidden) * sizeof(float));
  std::vector<CopyJob> copies;
  for (size_t i = 0; i < positions.size(); ++i) {
    copies.push_back({chosen.data() + static_cast<int64_t>(i) * hidden, hidden,
                      data() + positions[i] * hidden, hidden, 1, hidden});
  }
  backend.copy(copies);
  return chosen;
}

std::vector<float> Hidden::values() const {
  std::vector<float> host(static_cast<size_t>(tokens * hidden));
  if (!host.empty()) memory.backend()->download(host.data(), data(), host.size() * sizeof(float));
  return host;
}

}  // namespace replayeval
