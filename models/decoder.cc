#include "models/decoder.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "kernels/decode_cuda.h"
#include "kernels/decode_inputs_cuda.h"
#include "kernels/elementwise_cuda.h"
#include "kernels/paged_attention_cuda.h"
#include "models/forward.h"

namespace replayeval {
namespace {

/// The shortest bound of positions that steps are captured for; further ones double.
constexpr int64_t kShortestSteps = 1024;
constexpr size_t kAlignment = 256;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t record_bytes(RecordType type) { return type == RecordType::bf16 ? 2 : 4; }

WeightType weight_type(RecordType type) {
  return type == RecordType::bf16 ? WeightType::bf16 : WeightType::fp32;
}

std::byte* at(const Memory& memory, size_t bytes) { return memory.data() + bytes; }

/// [rows, columns] on the device in the compute type's own form: floats, or BF16 codes.
class Activations {
 public:
  Activations() = default;
  Activations(Backend& backend, RecordType type, int64_t rows, int64_t columns)
      : memory_(backend, static_cast<size_t>(rows * columns) * record_bytes(type)),
        type_(type),
        columns_(columns) {}
  int64_t columns() const { return columns_; }
  explicit operator bool() const { return memory_.data() != nullptr; }
  /// From column c of the first row on.
  std::byte* at(int64_t c) const {
    return memory_.data() + static_cast<size_t>(c) * record_bytes(type_);
  }
  template <class T>
  T* as(int64_t c = 0) const {
    return reinterpret_cast<T*>(at(c));
  }

 private:
  Memory memory_;
  RecordType type_ = RecordType::fp32;
  int64_t columns_ = 0;
};

/// Rows of one state precision, one after another.
struct Band {
  int first = 0;
  int run = 0;  // first row of the neighbouring bands with this type of records
  HeadPlan plan;
  RecordType records = RecordType::fp32;  // x, B, k, v as they enter the ring
};

/// The rows from a run's first one on in an array [rows, columns] that has room for FP32 records:
/// those of a run lie without gaps, whatever their type.
std::byte* run_part(const Buffer& array, int64_t run, int64_t columns) {
  return reinterpret_cast<std::byte*>(array.data() + run * columns);
}
std::byte* band_part(const Buffer& array, const Band& band, int64_t columns) {
  return run_part(array, band.run, columns) +
         static_cast<size_t>((band.first - band.run) * columns) * record_bytes(band.records);
}

/// One recurrent layer of one band. Rings: Mamba-2 x, B, dt; GDN k, v, u, decay, beta.
struct BandStates {
  Memory recurrence, read;
  size_t recurrence_stride = 0, read_stride = 0;  // of a head
  Memory first, second, corrections, steps, betas;
};

/// One stateful branch of a block; nothing in it for others.
struct Slot {
  std::optional<StateStore::Shape> shape;
  std::vector<BandStates> bands;
  Memory conv;  // [rows, conv_kernel - 1, channels] as activations
  std::optional<PagedKv> kv;
  Memory k, v;
  int rotary = -1;
};

struct Rotary {
  const std::vector<float>* frequency;
  Buffer cos, sin;  // [positions, frequencies]
};

}  // namespace

struct Decoder::Implementation {
  const Model& model;
  const Model::Implementation& self;
  Backend& backend;
  DecoderOptions options;
  RecordType type;  // of activations
  int rows = 0;
  std::vector<Band> bands;
  std::vector<std::vector<Slot>> slots;  // [block][branch]
  std::vector<Rotary> rotary;

  // What a step reads, in one array on the device: positions, tokens, pending, streams.
  std::vector<std::byte> inputs;
  Memory device_inputs;
  int64_t* positions = nullptr;  // -1: free
  int32_t* tokens = nullptr;
  int32_t* pending = nullptr;
  uint32_t* streams = nullptr;

  // Pages of key-value cache.
  int page = 0;
  int32_t table_stride = 0;
  std::vector<int32_t> table;  // [rows, table_stride]
  Memory device_table;
  std::vector<int32_t> free_pages;
  std::vector<int> row_pages;
  std::vector<int64_t> reserved;  // positions a row may reach; 0: free
  int64_t pages_set_aside = 0;
  int64_t pages = 0;

  Memory workspace;
  Buffer logits;
  Memory chosen;  // token int32 [rows], margin float [rows]
  std::vector<Choice> choices;
  std::vector<std::unique_ptr<CapturedWork>> steps;  // for kShortestSteps, twice that, ...

  Implementation(const Model& m, DecoderOptions o);
  Memory cleared(size_t bytes);
  void make_slot(const Branch& branch, int layer, Slot& slot);
  /// Attention over these pages need not keep to the order of kernels/attention.h.
  bool sums_freely(const PagedKv& kv) const {
    return model.options().dense == DenseMode::fast && paged_attention_fast_fits(kv);
  }
  void make_rotary(const AttentionSpec& mixer, Slot& slot);

  size_t input_offset(const void* host) const {
    return static_cast<size_t>(static_cast<const std::byte*>(host) - inputs.data());
  }
  template <class T>
  T* on_device(T* host) const {
    return reinterpret_cast<T*>(at(device_inputs, input_offset(host)));
  }
  DecodeRows band_rows(const Band& band) const {
    return {options.rows_per_state, on_device(pending) + band.first,
            on_device(positions) + band.first, on_device(streams) + band.first};
  }
  /// Calls work(first band, bands, type) for each run of bands with one type of records.
  template <class Work>
  void for_runs(Work work) const {
    for (size_t b = 0; b < bands.size();) {
      size_t end = b + 1;
      while (end < bands.size() && bands[end].run == bands[b].run) ++end;
      work(bands[b].run, static_cast<int>(end - b) * options.rows_per_state, bands[b].records);
      b = end;
    }
  }

  Activations activations(int64_t columns) const { return {backend, type, rows, columns}; }
  /// Calls work(p), p a null pointer to activations' elements.
  template <class Work>
  void typed(Work work) const {
    if (type == RecordType::bf16) {
      work(static_cast<uint16_t*>(nullptr));
    } else {
      work(static_cast<float*>(nullptr));
    }
  }
  /// x (`stride` elements a row) through layers that share their input, outputs side by side.
  Activations project(std::initializer_list<const LinearSpec*> layers, const std::byte* x,
                      int64_t stride) const;
  void norm(const RmsNorm& norm, const std::byte* x, int64_t x_stride, const std::byte* gate,
            int64_t gate_stride, const Activations& y) const;
  void scale(const Activations& x, float factor, const float* column) const;

  void queue_step(int64_t most_positions);
  /// The blocks on the residual stream [rows, hidden]; the normed stream behind the last.
  Activations layers(const Buffer& residual, int64_t most_positions);
  Activations branch(const Branch& branch, Slot& slot, const Activations& normed,
                     int64_t most_positions);
  /// One token of every row through a layer's convolution into arrays of records.
  void convolve(Slot& slot, const std::byte* x, int64_t x_stride, const std::vector<float>& weight,
                const std::vector<float>& bias,
                const std::array<std::pair<const Buffer*, int64_t>, 3>& parts);
  /// Where the state kernels of bands put their outputs [rows, columns]: in `values`, but FP32 for
  /// bands with FP32 records beside BF16 activations; `rounded` brings those to the others.
  struct Outputs {
    Activations values;
    Buffer wide;
  };
  Outputs outputs(int64_t columns) const;
  std::byte* output_of(const Outputs& outputs, const Band& band) const;
  const Activations& rounded(const Outputs& outputs) const;
  Activations mamba2(const Mamba2Spec& mixer, Slot& slot, const std::byte* x);
  Activations gdn(const GdnSpec& mixer, Slot& slot, const std::byte* x);
  Activations attend(const AttentionSpec& mixer, Slot& slot, const std::byte* x,
                     int64_t most_positions);
  Activations mlp(const MlpSpec& mixer, const std::byte* x) const;
  DecodeStates states_of(const BandStates& states, int heads) const;
  int64_t pages_for(int64_t reach) const { return (reach + page - 1) / page; }
  void take_pages(int row, int64_t reach);
  void check_row(int row) const;
  void admit(int row, const StateSet& from, int from_row);
};

Memory Decoder::Implementation::cleared(size_t bytes) {
  Memory memory(backend, bytes);
  backend.clear(memory.data(), bytes);
  return memory;
}

void Decoder::Implementation::make_rotary(const AttentionSpec& mixer, Slot& slot) {
  if (mixer.rotary_dim == 0) return;
  for (size_t i = 0; i < rotary.size(); ++i) {
    if (*rotary[i].frequency == mixer.inverse_frequency) slot.rotary = static_cast<int>(i);
  }
  if (slot.rotary >= 0) return;
  const size_t size = static_cast<size_t>(options.most_positions) * mixer.inverse_frequency.size();
  std::vector<float> cosine(size), sine(size);
  rotary_tables(mixer.inverse_frequency, 0, options.most_positions, cosine.data(), sine.data(),
                self.activation);
  Rotary table{&mixer.inverse_frequency, Buffer(backend, static_cast<int64_t>(size)),
               Buffer(backend, static_cast<int64_t>(size))};
  backend.upload(table.cos.data(), cosine.data(), size * sizeof(float));
  backend.upload(table.sin.data(), sine.data(), size * sizeof(float));
  slot.rotary = static_cast<int>(rotary.size());
  rotary.push_back(std::move(table));
}

void Decoder::Implementation::make_slot(const Branch& branch, int layer, Slot& slot) {
  slot.shape = state_shape(branch.mixer, layer);
  const size_t band_rows = static_cast<size_t>(options.rows_per_state);
  if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer)) {
    PagedKv kv;
    kv.type = model.options().compute == ComputeType::bf16 ? KvType::bf16 : KvType::fp32;
    kv.kv_heads = attention->kv_heads;
    kv.head_dim = attention->head_dim;
    kv.page = page;
    kv.table = reinterpret_cast<const int32_t*>(device_table.data());
    kv.table_stride = table_stride;
    const size_t bytes = paged_kv_bytes(kv, pages);
    slot.k = cleared(bytes);
    slot.v = cleared(bytes);
    kv.k = slot.k.data();
    kv.v = slot.v.data();
    slot.kv = kv;
    make_rotary(*attention, slot);
    return;
  }
  if (!slot.shape) return;
  const StateStore::Shape& shape = *slot.shape;
  const auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer);
  const auto* gated = std::get_if<GdnSpec>(&branch.mixer);
  const size_t heads = static_cast<size_t>(shape.heads);
  slot.conv = cleared(static_cast<size_t>(rows) * static_cast<size_t>(shape.conv_kernel - 1) *
                      static_cast<size_t>(shape.channels) * record_bytes(type));
  for (const Band& band : bands) {
    BandStates states;
    states.recurrence_stride = aligned(packed_bytes(*band.plan.recurrence.format, shape.state));
    states.recurrence = cleared(band_rows * heads * states.recurrence_stride);
    if (band.plan.read) {
      states.read_stride = aligned(packed_bytes(*band.plan.read->format, shape.state));
      states.read = cleared(band_rows * heads * states.read_stride);
    }
    const size_t records = band_rows * static_cast<size_t>(band.plan.window);
    const size_t element = record_bytes(band.records);
    if (mamba != nullptr) {
      states.first = cleared(records * element * heads * static_cast<size_t>(mamba->head_dim));
      states.second = cleared(records * element * static_cast<size_t>(mamba->groups) *
                              static_cast<size_t>(mamba->state_dim));
      states.steps = cleared(records * heads * sizeof(float));
    } else if (gated != nullptr) {
      const size_t values = heads * static_cast<size_t>(gated->value_dim);
      states.first = cleared(records * element * static_cast<size_t>(gated->key_heads) *
                             static_cast<size_t>(gated->key_dim));
      states.second = cleared(records * element * values);
      states.corrections = cleared(records * record_bytes(band.plan.ring_u) * values);
      states.steps = cleared(records * heads * sizeof(float));
      states.betas = cleared(records * heads * sizeof(float));
    }
    slot.bands.push_back(std::move(states));
  }
}

Decoder::Implementation::Implementation(const Model& m, DecoderOptions o)
    : model(m),
      self(m.implementation()),
      backend(m.backend()),
      options(std::move(o)),
      type(self.activation == WeightType::bf16 ? RecordType::bf16 : RecordType::fp32) {
  if (const auto reason = Decoder::refusal(model, options))
    throw std::invalid_argument("decoder: " + *reason);
  if (options.rows_per_state < 1 || options.most_positions < 1 ||
      options.cache_positions < options.most_positions) {
    throw std::invalid_argument(
        "decoder: expected rows_per_state and most_positions of at least 1 and cache_positions of "
        "at least most_positions, got " +
        std::to_string(options.rows_per_state) + ", " + std::to_string(options.most_positions) +
        " and " + std::to_string(options.cache_positions));
  }
  for (const StatePrecision& state : options.states) {
    Band band;
    band.first = rows;
    band.plan = head_plan(state);
    band.records = state.options.ring == RingType::activation ? type : RecordType::fp32;
    const bool joins = !bands.empty() && bands.back().records == band.records;
    band.run = joins ? bands.back().run : rows;
    bands.push_back(std::move(band));
    rows += options.rows_per_state;
  }
  const size_t count = static_cast<size_t>(rows);
  inputs.resize(count * (sizeof(int64_t) + 2 * sizeof(int32_t) + sizeof(uint32_t)));
  positions = reinterpret_cast<int64_t*>(inputs.data());
  tokens = reinterpret_cast<int32_t*>(positions + count);
  pending = tokens + count;
  streams = reinterpret_cast<uint32_t*>(pending + count);
  std::fill_n(positions, count, -1);
  device_inputs = Memory(backend, inputs.size());
  backend.upload(device_inputs.data(), inputs.data(), inputs.size());

  page = static_cast<int>(kKvPage);
  table_stride = static_cast<int32_t>(pages_for(options.most_positions));
  pages = pages_for(options.cache_positions) + rows;  // a row does not fill its last page
  table.assign(count * static_cast<size_t>(table_stride), 0);
  device_table = cleared(table.size() * sizeof(int32_t));
  for (int64_t p = pages; p-- > 0;) free_pages.push_back(static_cast<int32_t>(p));
  row_pages.assign(count, 0);
  reserved.assign(count, 0);

  size_t most_workspace = 0;
  for (const Block& block : self.spec.blocks) {
    std::vector<Slot>& branches = slots.emplace_back(block.branches.size());
    for (size_t i = 0; i < block.branches.size(); ++i) {
      make_slot(block.branches[i], block.layer, branches[i]);
      const auto* attention = std::get_if<AttentionSpec>(&block.branches[i].mixer);
      if (attention == nullptr) continue;
      const PagedKv& kv = *branches[i].kv;
      most_workspace = std::max(
          most_workspace,
          sums_freely(kv)
              ? paged_attention_fast_workspace(rows, attention->heads, kv, options.most_positions)
              : paged_attention_workspace(rows, attention->heads, options.most_positions));
    }
  }
  workspace = Memory(backend, most_workspace);
  logits = Buffer(backend, int64_t{rows} * self.spec.vocabulary);
  chosen = cleared(count * (sizeof(int32_t) + sizeof(float)));
  choices.resize(count);
  for (int64_t bound = kShortestSteps;; bound *= 2) {
    const int64_t most = std::min(bound, options.most_positions);
    steps.push_back(
        backend.capture([&] { queue_step(most); }, steps.empty() ? nullptr : steps.front().get()));
    if (most == options.most_positions) break;
  }
}

DecodeStates Decoder::Implementation::states_of(const BandStates& states, int heads) const {
  DecodeStates view;
  view.sums_freely = model.options().dense == DenseMode::fast;
  view.recurrence = states.recurrence.data();
  view.head_stride = states.recurrence_stride;
  view.row_stride = static_cast<size_t>(heads) * states.recurrence_stride;
  view.read = states.read.data();
  view.read_head_stride = states.read_stride;
  view.read_row_stride = static_cast<size_t>(heads) * states.read_stride;
  return view;
}

Activations Decoder::Implementation::project(std::initializer_list<const LinearSpec*> layers,
                                             const std::byte* x, int64_t stride) const {
  int64_t width = 0;
  std::vector<LinearPart> parts;
  for (const LinearSpec* layer : layers) {
    parts.push_back({&layer->weight, &layer->bias});
    width += layer->weight.rows;
  }
  Activations y = activations(width);
  backend.linear_activations(x, stride, parts, y.at(0), rows);
  return y;
}

void Decoder::Implementation::norm(const RmsNorm& norm, const std::byte* x, int64_t x_stride,
                                   const std::byte* gate, int64_t gate_stride,
                                   const Activations& y) const {
  typed([&]<class T>(T*) {
    rms_norm_cuda(norm, reinterpret_cast<const T*>(x), x_stride, reinterpret_cast<const T*>(gate),
                  gate_stride, y.as<T>(), y.columns(), rows, y.columns(), backend.stream());
  });
}

void Decoder::Implementation::scale(const Activations& x, float factor, const float* column) const {
  typed([&]<class T>(T*) {
    scale_cuda(x.as<T>(), x.columns(), factor, column, rows, x.columns(), self.activation,
               backend.stream());
  });
}

void Decoder::Implementation::convolve(
    Slot& slot, const std::byte* x, int64_t x_stride, const std::vector<float>& weight,
    const std::vector<float>& bias, const std::array<std::pair<const Buffer*, int64_t>, 3>& parts) {
  const StateStore::Shape& shape = *slot.shape;
  const CausalConv conv{shape.channels, shape.conv_kernel, self.constant(weight),
                        self.constant(bias), true};
  for_runs([&](int first, int count, RecordType records) {
    ConvDecodeStep step;
    step.rows = count;
    step.position = on_device(positions) + first;
    step.x = x + static_cast<size_t>(first * x_stride) * record_bytes(type);
    step.x_stride = x_stride;
    step.x_type = type;
    step.state = at(slot.conv,
                    static_cast<size_t>(int64_t{first} * (shape.conv_kernel - 1) * shape.channels) *
                        record_bytes(type));
    step.type = records;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto& [array, columns] = parts[i];
      step.parts[i] = {run_part(*array, first, columns), static_cast<int>(columns)};
    }
    conv_decode_cuda(conv, step, backend.stream());
  });
}

Decoder::Implementation::Outputs Decoder::Implementation::outputs(int64_t columns) const {
  const bool any = std::any_of(bands.begin(), bands.end(),
                               [&](const Band& band) { return band.records != type; });
  return {activations(columns), self.buffer(any ? rows * columns : 0)};
}

std::byte* Decoder::Implementation::output_of(const Outputs& outputs, const Band& band) const {
  const int64_t columns = outputs.values.columns();
  if (band.records == type) return outputs.values.at(band.first * columns);
  return band_part(outputs.wide, band, columns);
}

const Activations& Decoder::Implementation::rounded(const Outputs& outputs) const {
  const int64_t columns = outputs.values.columns();
  for_runs([&](int first, int count, RecordType records) {
    if (records == type) return;
    narrow_cuda(outputs.wide.data() + first * columns, columns, count, columns, self.activation,
                outputs.values.at(first * columns), backend.stream());
  });
  return outputs.values;
}

Activations Decoder::Implementation::mamba2(const Mamba2Spec& mixer, Slot& slot,
                                            const std::byte* x) {
  const StateStore::Shape& shape = *slot.shape;
  const CudaStream stream = backend.stream();
  const int64_t inner = int64_t{mixer.heads} * mixer.head_dim;
  const int64_t group_width = int64_t{mixer.groups} * mixer.state_dim;
  const Activations projected = project({&mixer.in_proj}, x, self.spec.hidden);
  const int64_t width = projected.columns();
  if (!mixer.in_proj_multiplier.empty())
    scale(projected, 1.0f, self.constant(mixer.in_proj_multiplier));
  const Buffer xs = self.buffer(rows * inner), bs = self.buffer(rows * group_width),
               cs = self.buffer(rows * group_width), dt = self.buffer(int64_t{rows} * mixer.heads);
  const Outputs outs = outputs(inner);
  convolve(slot, projected.at(inner), width, mixer.conv_weight, mixer.conv_bias,
           {{{&xs, inner}, {&bs, group_width}, {&cs, group_width}}});
  const bool clamped = self.options.dt_clamp == DtClamp::forward;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  mamba2_steps_cuda(self.activation, projected.at(inner + shape.channels), width,
                    self.constant(mixer.dt_bias), clamped ? mixer.dt_min : -kInfinity,
                    clamped ? mixer.dt_max : kInfinity, rows, mixer.heads, dt.data(), stream);
  const Mamba2Layer layer = self.mamba2_layer(mixer, shape.layer);
  for (size_t b = 0; b < bands.size(); ++b) {
    const Band& band = bands[b];
    const BandStates& states = slot.bands[b];
    Mamba2DecodeStep step;
    step.activation = band.records;
    step.x = band_part(xs, band, inner);
    step.dt = dt.data() + int64_t{band.first} * mixer.heads;
    step.b = band_part(bs, band, group_width);
    step.c = band_part(cs, band, group_width);
    step.y = output_of(outs, band);
    step.ring_x = states.first.data();
    step.ring_dt = reinterpret_cast<float*>(states.steps.data());
    step.ring_b = states.second.data();
    mamba2_decode_cuda(layer, band.plan, band_rows(band), states_of(states, mixer.heads), step,
                       stream);
  }
  const Activations& y = rounded(outs);
  norm(self.mamba2_norm(mixer), y.at(0), inner, projected.at(0), width, y);
  return project({&mixer.out_proj}, y.at(0), inner);
}

Activations Decoder::Implementation::gdn(const GdnSpec& mixer, Slot& slot, const std::byte* x) {
  const StateStore::Shape& shape = *slot.shape;
  const CudaStream stream = backend.stream();
  const int64_t key_width = int64_t{mixer.key_heads} * mixer.key_dim;
  const int64_t value_width = int64_t{mixer.value_heads} * mixer.value_dim;
  const Activations projected =
      project({&mixer.qkv, &mixer.z, &mixer.b, &mixer.a}, x, self.spec.hidden);
  const int64_t width = projected.columns(), gate = mixer.qkv.weight.rows,
                b_column = gate + mixer.z.weight.rows, a_column = b_column + mixer.b.weight.rows;
  const Buffer q = self.buffer(rows * key_width), k = self.buffer(rows * key_width),
               v = self.buffer(rows * value_width);
  const Outputs outs = outputs(value_width);
  convolve(slot, projected.at(0), width, mixer.conv_weight, {},
           {{{&q, key_width}, {&k, key_width}, {&v, value_width}}});
  const Buffer decay = self.buffer(int64_t{rows} * mixer.value_heads),
               beta = self.buffer(int64_t{rows} * mixer.value_heads);
  gdn_steps_cuda({self.activation, projected.at(a_column), projected.at(b_column), width,
                  self.constant(mixer.dt_bias), self.constant(mixer.a_exp)},
                 rows, mixer.value_heads, decay.data(), beta.data(), stream);
  const GdnLayer layer = Model::Implementation::gdn_layer(mixer, shape.layer);
  for (size_t b = 0; b < bands.size(); ++b) {
    const Band& band = bands[b];
    const BandStates& states = slot.bands[b];
    GdnDecodeStep step;
    step.activation = band.records;
    step.q = band_part(q, band, key_width);
    step.k = band_part(k, band, key_width);
    step.v = band_part(v, band, value_width);
    step.decay_log2 = decay.data() + int64_t{band.first} * mixer.value_heads;
    step.beta = beta.data() + int64_t{band.first} * mixer.value_heads;
    step.o = output_of(outs, band);
    step.ring_k = states.first.data();
    step.ring_v = states.second.data();
    step.ring_u = states.corrections.data();
    step.ring_decay = reinterpret_cast<float*>(states.steps.data());
    step.ring_beta = reinterpret_cast<float*>(states.betas.data());
    gdn_decode_cuda(layer, band.plan, band_rows(band), states_of(states, mixer.value_heads), step,
                    stream);
  }
  const Activations& o = rounded(outs);
  norm(self.gdn_norm(mixer), o.at(0), value_width, projected.at(gate), width, o);
  return project({&mixer.out_proj}, o.at(0), value_width);
}

Activations Decoder::Implementation::attend(const AttentionSpec& mixer, Slot& slot,
                                            const std::byte* x, int64_t most_positions) {
  const CudaStream stream = backend.stream();
  const int64_t dim = mixer.head_dim, hidden = self.spec.hidden;
  const int64_t q_head = mixer.output_gate ? 2 * dim : dim;  // a query, then its gate
  const int64_t q_width = mixer.heads * dim, kv_width = mixer.kv_heads * dim;
  const Activations projected = project({&mixer.q}, x, hidden),
                    keys = project({&mixer.k}, x, hidden), values = project({&mixer.v}, x, hidden);
  const Buffer q = self.buffer(rows * q_width), k = self.buffer(rows * kv_width),
               v = self.buffer(rows * kv_width);
  // FP32 heads, normed.
  const auto heads_of = [&](const Activations& from, int64_t from_head, int heads,
                            const std::optional<NormSpec>& head_norm, const Buffer& to) {
    const int64_t count = int64_t{rows} * heads;
    typed([&]<class T>(T*) {
      if (head_norm) {
        if constexpr (std::is_same_v<T, float>) {
          rms_norm_cuda(self.norm_of(*head_norm, dim), from.as<T>(), from_head, nullptr, 0,
                        to.data(), dim, count, dim, stream);
        } else {
          rms_norm_cuda(self.norm_of(*head_norm, dim), from.as<T>(), from_head, to.data(), dim,
                        count, dim, stream);
        }
      } else {
        widen_cuda(self.activation, from.at(0), from_head, count, dim, to.data(), stream);
      }
    });
  };
  heads_of(projected, q_head, mixer.heads, mixer.q_norm, q);
  heads_of(keys, dim, mixer.kv_heads, mixer.k_norm, k);
  heads_of(values, dim, mixer.kv_heads, std::nullopt, v);
  if (mixer.key_multiplier != 1.0f) {
    scale_cuda(k.data(), kv_width, mixer.key_multiplier, nullptr, rows, kv_width, self.activation,
               stream);
  }
  if (slot.rotary >= 0) {
    const Rotary& table = rotary[static_cast<size_t>(slot.rotary)];
    const auto rotate = [&](const Buffer& to, int64_t width, int heads) {
      rotary_decode_cuda(to.data(), width, rows, heads, mixer.head_dim, mixer.rotary_dim,
                         table.cos.data(), table.sin.data(), on_device(positions), self.activation,
                         stream);
    };
    rotate(q, q_width, mixer.heads);
    rotate(k, kv_width, mixer.kv_heads);
  }
  append_paged_cuda(k.data(), kv_width, v.data(), kv_width, rows, *slot.kv, on_device(positions),
                    stream);
  const auto attention = sums_freely(*slot.kv) ? paged_attention_fast_cuda : paged_attention_cuda;
  attention(q.data(), q_width, q.data(), q_width, rows, mixer.heads, *slot.kv, on_device(positions),
            most_positions, mixer.scale, workspace.data(), stream);
  const Activations out = activations(q_width);
  narrow_cuda(q.data(), q_width, rows, q_width, self.activation, out.at(0), stream);
  if (mixer.output_gate) {
    typed([&]<class T>(T*) {
      activate_multiply_cuda(Activation::sigmoid, projected.as<T>(dim), q_head, 1.0f, out.as<T>(),
                             dim, out.as<T>(), dim, int64_t{rows} * mixer.heads, dim,
                             self.activation, stream);
    });
  }
  return project({&mixer.o}, out.at(0), q_width);
}

Activations Decoder::Implementation::mlp(const MlpSpec& mixer, const std::byte* x) const {
  const int64_t width = mixer.up.weight.rows, hidden = mixer.up.weight.cols;
  const Activations in =
      mixer.gate ? project({&mixer.up, &*mixer.gate}, x, hidden) : project({&mixer.up}, x, hidden);
  const int64_t stride = in.columns();
  typed([&]<class T>(T*) {
    if (mixer.gate) {
      activate_multiply_cuda(mixer.activation, in.as<T>(width), stride, mixer.gate_multiplier,
                             in.as<T>(), stride, in.as<T>(), stride, rows, width, self.activation,
                             backend.stream());
    } else {
      activate_cuda(mixer.activation, in.as<T>(), stride, nullptr, in.as<T>(), stride, rows, width,
                    self.activation, backend.stream());
    }
  });
  Activations y = project({&mixer.down}, in.at(0), stride);
  if (mixer.down_multiplier != 1.0f) scale(y, mixer.down_multiplier, nullptr);
  return y;
}

Activations Decoder::Implementation::branch(const Branch& branch, Slot& slot,
                                            const Activations& normed, int64_t most_positions) {
  Activations scaled;
  const std::byte* x = normed.at(0);
  if (branch.in_multiplier != 1.0f) {
    scaled = activations(normed.columns());
    backend.copy(scaled.at(0), x,
                 static_cast<size_t>(rows * normed.columns()) * record_bytes(type));
    scale(scaled, branch.in_multiplier, nullptr);
    x = scaled.at(0);
  }
  Activations output;
  if (const auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer)) {
    output = mamba2(*mamba, slot, x);
  } else if (const auto* gated = std::get_if<GdnSpec>(&branch.mixer)) {
    output = gdn(*gated, slot, x);
  } else if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer)) {
    output = attend(*attention, slot, x, most_positions);
  } else {
    output = mlp(std::get<MlpSpec>(branch.mixer), x);
  }
  if (branch.out_multiplier != 1.0f) scale(output, branch.out_multiplier, nullptr);
  return output;
}

Activations Decoder::Implementation::layers(const Buffer& residual, int64_t most_positions) {
  const ModelSpec& spec = self.spec;
  const WeightType residual_type = spec.residual_fp32 ? WeightType::fp32 : self.activation;
  const Activations normed = activations(spec.hidden);
  Activations sum;  // of the last block's branches, not in the residual stream yet
  const auto next_norm = [&](const NormSpec& norm, const Activations& y) {
    typed([&]<class T>(T*) {
      add_rms_norm_cuda<T>(self.norm_of(norm, 0), residual_type, residual.data(),
                           sum ? sum.as<T>() : nullptr, y.as<T>(), rows, spec.hidden,
                           backend.stream());
    });
  };
  for (size_t b = 0; b < spec.blocks.size(); ++b) {
    const Block& block = spec.blocks[b];
    next_norm(block.norm, normed);
    for (size_t i = 0; i < block.branches.size(); ++i) {
      Activations output = branch(block.branches[i], slots[b][i], normed, most_positions);
      if (i == 0) {
        sum = std::move(output);
        continue;
      }
      typed([&]<class T>(T*) {
        add_scaled_cuda(sum.as<T>(), spec.hidden, output.as<T>(), spec.hidden, 1.0f, rows,
                        spec.hidden, self.activation, backend.stream());
      });
    }
  }
  Activations out = activations(spec.hidden);
  next_norm(spec.final_norm, out);
  return out;
}

void Decoder::Implementation::queue_step(int64_t most_positions) {
  const ModelSpec& spec = self.spec;
  const Buffer residual = self.embed(on_device(tokens), rows);
  const Activations out = layers(residual, most_positions);
  const LinearPart head{&spec.lm_head.weight, &spec.lm_head.bias};
  backend.linear_activations(out.at(0), spec.hidden, {&head, 1}, logits.data(), rows, true);
  if (spec.logits_multiplier != 1.0f) {
    backend.scale(logits.data(), spec.vocabulary, spec.logits_multiplier, nullptr, rows,
                  spec.vocabulary, WeightType::fp32);
  }
  auto* token = reinterpret_cast<int32_t*>(chosen.data());
  choose_greedy_cuda(logits.data(), spec.vocabulary, rows, spec.vocabulary, token,
                     reinterpret_cast<float*>(token + rows), backend.stream());
}

void Decoder::Implementation::check_row(int row) const {
  if (row < 0 || row >= rows) {
    throw std::invalid_argument("decoder: row " + std::to_string(row) + ", expected 0 to " +
                                std::to_string(rows - 1));
  }
}

// The row's pages hold `reach` positions from now on.
void Decoder::Implementation::take_pages(int row, int64_t reach) {
  int& held = row_pages[static_cast<size_t>(row)];
  const int64_t wanted = pages_for(reach);
  if (wanted <= held) return;
  const size_t first = static_cast<size_t>(row) * static_cast<size_t>(table_stride);
  for (; held < wanted; ++held) {
    table[first + static_cast<size_t>(held)] = free_pages.back();
    free_pages.pop_back();
  }
  backend.upload(at(device_table, first * sizeof(int32_t)), table.data() + first,
                 static_cast<size_t>(held) * sizeof(int32_t));
}

void Decoder::Implementation::admit(int row, const StateSet& from, int from_row) {
  const size_t band_index = static_cast<size_t>(row / options.rows_per_state);
  const Band& band = bands[band_index];
  const size_t local = static_cast<size_t>(row - band.first);
  const int64_t length = from.position(from_row);
  take_pages(row, length);
  int held = 0;
  std::vector<CopyJob> copies;
  // Columns of FP32 records into a ring of `type`, [window, columns] a row.
  const auto fill = [&](const Memory& ring, RecordType type, const float* values, int64_t stride,
                        int64_t columns) {
    std::byte* to = at(ring, local * static_cast<size_t>(band.plan.window) *
                                 static_cast<size_t>(columns) * record_bytes(type));
    if (type == RecordType::fp32) {
      copies.push_back({reinterpret_cast<float*>(to), columns, values, stride, held, columns});
    } else {
      narrow_cuda(values, stride, held, columns, weight_type(type), to, backend.stream());
    }
  };
  for (size_t b = 0; b < slots.size(); ++b) {
    for (size_t i = 0; i < slots[b].size(); ++i) {
      Slot& slot = slots[b][i];
      const Mixer& mixer = self.spec.blocks[b].branches[i].mixer;
      if (slot.kv) {
        const KvStore::Contiguous cache = from.cache(b, i).contiguous(from_row);
        load_paged_cuda(cache.k, cache.v, length, *slot.kv, row, backend.stream());
        continue;
      }
      if (!slot.shape) continue;
      const StateStore::Shape& shape = *slot.shape;
      const StateStore::Contents contents = from.store(b, i).contents(from_row);
      held = contents.pending;
      BandStates& states = slot.bands[band_index];
      const size_t heads = static_cast<size_t>(shape.heads);
      for (size_t h = 0; h < heads; ++h) {
        const auto take = [&](const Memory& to, size_t stride, const std::byte* packed,
                              size_t packed_stride, const StateCodec& codec) {
          const size_t bytes = packed_bytes(*codec.format, shape.state);
          copies.push_back({reinterpret_cast<float*>(at(to, (local * heads + h) * stride)), 0,
                            reinterpret_cast<const float*>(packed + h * packed_stride), 0, 1,
                            static_cast<int64_t>((bytes + sizeof(float) - 1) / sizeof(float))});
        };
        take(states.recurrence, states.recurrence_stride, contents.recurrence,
             contents.recurrence_stride, band.plan.recurrence);
        if (band.plan.read)
          take(states.read, states.read_stride, contents.read, contents.read_stride,
               *band.plan.read);
      }
      const int64_t inputs_kept = int64_t{shape.conv_kernel - 1} * shape.channels;
      narrow_cuda(contents.conv, inputs_kept, 1, inputs_kept, self.activation,
                  at(slot.conv, static_cast<size_t>(row * inputs_kept) * record_bytes(type)),
                  backend.stream());
      if (held == 0) continue;
      if (const auto* mamba = std::get_if<Mamba2Spec>(&mixer)) {
        const int64_t inner = int64_t{mamba->heads} * mamba->head_dim;
        fill(states.first, band.records, contents.channels, shape.channels, inner);
        fill(states.second, band.records, contents.channels + inner, shape.channels,
             int64_t{mamba->groups} * mamba->state_dim);
        fill(states.steps, RecordType::fp32, contents.scalars, shape.scalars, mamba->heads);
      } else {
        const auto& gated = std::get<GdnSpec>(mixer);
        const int64_t keys = int64_t{gated.key_heads} * gated.key_dim;
        const int64_t values = int64_t{gated.value_heads} * gated.value_dim;
        fill(states.first, band.records, contents.channels + keys, shape.channels, keys);
        fill(states.second, band.records, contents.channels + 2 * keys, shape.channels, values);
        fill(states.corrections, band.plan.ring_u, contents.corrections, shape.corrections, values);
        fill(states.steps, RecordType::fp32, contents.scalars, shape.scalars, gated.value_heads);
        fill(states.betas, RecordType::fp32, contents.scalars + gated.value_heads, shape.scalars,
             gated.value_heads);
      }
    }
  }
  backend.copy(copies);
  positions[row] = length;
  pending[row] = held;
  streams[row] = from.row(from_row).stream;
}

std::optional<std::string> Decoder::refusal(const Model& model, const DecoderOptions& options) {
  if (!model.backend().on_device()) return "the model runs on the host";
  if (options.states.empty()) return "no states";
  if (options.form != KernelForm::fast) return "kernels: reference";
  for (const Block& block : model.spec().blocks) {
    for (const Branch& branch : block.branches) {
      if (std::holds_alternative<MoeSpec>(branch.mixer)) return "experts are chosen on the host";
    }
  }
  for (const StatePrecision& state : options.states) {
    if (!state.whole_model()) return state.name + ": a selection of layers or heads";
    if (state.recurrence.format->library != nullptr ||
        (state.read && state.read->format->library != nullptr)) {
      return state.name + ": a library's codec";
    }
  }
  return std::nullopt;
}

Decoder::Decoder(const Model& model, DecoderOptions options)
    : implementation_(std::make_unique<Implementation>(model, std::move(options))) {}

Decoder::~Decoder() = default;

int Decoder::rows() const { return implementation_->rows; }

int Decoder::reserve(int state, int64_t positions) {
  Implementation& d = *implementation_;
  if (positions < 1 || positions > d.options.most_positions) {
    throw std::invalid_argument("decoder: " + std::to_string(positions) +
                                " positions, expected 1 to " +
                                std::to_string(d.options.most_positions));
  }
  const int64_t wanted = d.pages_for(positions);
  if (d.pages_set_aside + wanted > d.pages) return -1;
  const auto first = d.reserved.begin() + int64_t{state} * d.options.rows_per_state;
  const auto free = std::find(first, first + d.options.rows_per_state, 0);
  if (free == first + d.options.rows_per_state) return -1;
  *free = positions;
  d.pages_set_aside += wanted;
  return static_cast<int>(free - d.reserved.begin());
}

void Decoder::admit(int row, const StateSet& from, int from_row) {
  Implementation& d = *implementation_;
  d.check_row(row);
  const int64_t reserved = d.reserved[static_cast<size_t>(row)];
  if (d.positions[row] >= 0 || from.position(from_row) > reserved) {
    throw std::invalid_argument(
        "decoder: row " + std::to_string(row) + " of " + std::to_string(reserved) +
        " reserved positions: expected one that does not decode yet and at least " +
        std::to_string(from.position(from_row)) + " positions");
  }
  d.admit(row, from, from_row);
}

void Decoder::release(int row) {
  Implementation& d = *implementation_;
  d.check_row(row);
  const size_t r = static_cast<size_t>(row);
  for (int p = 0; p < d.row_pages[r]; ++p) {
    d.free_pages.push_back(
        d.table[r * static_cast<size_t>(d.table_stride) + static_cast<size_t>(p)]);
  }
  d.pages_set_aside -= d.pages_for(d.reserved[r]);
  d.row_pages[r] = 0;
  d.reserved[r] = 0;
  d.positions[row] = -1;
  d.pending[row] = 0;
}

int64_t Decoder::position(int row) const {
  implementation_->check_row(row);
  return implementation_->positions[row];
}

std::span<const Decoder::Choice> Decoder::step(std::span<const int32_t> tokens) {
  Implementation& d = *implementation_;
  const int vocabulary = d.self.spec.vocabulary;
  if (static_cast<int>(tokens.size()) != d.rows) {
    throw std::invalid_argument("decoder: " + std::to_string(tokens.size()) + " tokens, expected " +
                                std::to_string(d.rows));
  }
  int64_t longest = 0;
  for (int r = 0; r < d.rows; ++r) {
    const int64_t position = d.positions[r];
    d.tokens[r] = 0;
    if (position < 0) continue;
    const int32_t token = tokens[static_cast<size_t>(r)];
    if (token < 0 || token >= vocabulary || position >= d.reserved[static_cast<size_t>(r)]) {
      throw std::invalid_argument("decoder: row " + std::to_string(r) + ", token " +
                                  std::to_string(token) + " at position " +
                                  std::to_string(position) + ": expected 0 to " +
                                  std::to_string(vocabulary - 1) + " below position " +
                                  std::to_string(d.reserved[static_cast<size_t>(r)]));
    }
    d.tokens[r] = token;
    d.take_pages(r, position + 1);
    longest = std::max(longest, position + 1);
  }
  d.backend.upload(d.device_inputs.data(), d.inputs.data(), d.inputs.size());
  size_t graph = 0;
  while (graph + 1 < d.steps.size() && longest > kShortestSteps << graph) ++graph;
  d.steps[graph]->run();
  const size_t count = static_cast<size_t>(d.rows);
  std::vector<std::byte> host(count * (sizeof(int32_t) + sizeof(float)));
  d.backend.download(host.data(), d.chosen.data(), host.size());
  const auto* token = reinterpret_cast<const int32_t*>(host.data());
  const auto* margin = reinterpret_cast<const float*>(token + count);
  for (size_t r = 0; r < count; ++r) d.choices[r] = {token[r], margin[r]};
  for (int r = 0; r < d.rows; ++r) {
    if (d.positions[r] < 0) continue;
    const int window = d.bands[static_cast<size_t>(r / d.options.rows_per_state)].plan.window;
    d.positions[r] += 1;
    d.pending[r] = (d.pending[r] + 1) % window;
  }
  return d.choices;
}

void Decoder::logits(int row, float* out) const {
  const Implementation& d = *implementation_;
  d.check_row(row);
  const int64_t vocabulary = d.self.spec.vocabulary;
  d.backend.download(out, d.logits.data() + row * vocabulary,
                     static_cast<size_t>(vocabulary) * sizeof(float));
}

int64_t Decoder::cache_bytes() const {
  int64_t bytes = 0;
  for (const std::vector<Slot>& branches : implementation_->slots) {
    for (const Slot& slot : branches)
      bytes += static_cast<int64_t>(slot.k.bytes() + slot.v.bytes());
  }
  return bytes;
}

std::vector<std::byte> Decoder::packed(int layer, int row, StateRole role) const {
  const Implementation& d = *implementation_;
  d.check_row(row);
  const size_t band = static_cast<size_t>(row / d.options.rows_per_state);
  for (const std::vector<Slot>& branches : d.slots) {
    for (const Slot& slot : branches) {
      if (!slot.shape || slot.shape->layer != layer) continue;
      const BandStates& states = slot.bands[band];
      const HeadPlan& plan = d.bands[band].plan;
      const bool read = role == StateRole::read && plan.read;
      const size_t bytes =
          packed_bytes(*(read ? *plan.read : plan.recurrence).format, slot.shape->state);
      const size_t stride = read ? states.read_stride : states.recurrence_stride;
      const size_t heads = static_cast<size_t>(slot.shape->heads);
      std::vector<std::byte> all(heads * bytes);
      for (size_t h = 0; h < heads; ++h) {
        d.backend.download(
            all.data() + h * bytes,
            at(read ? states.read : states.recurrence,
               (static_cast<size_t>(row - d.bands[band].first) * heads + h) * stride),
            bytes);
      }
      return all;
    }
  }
  throw std::invalid_argument("decoder: layer " + std::to_string(layer) + " has no state");
}

}  // namespace replayeval
