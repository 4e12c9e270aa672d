#include "models/state_store.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace replayeval {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

HeadPlan fp32_plan(HeadPlan plan) {
  plan.recurrence = StateCodec{find_format("fp32"), Rounding::nearest_even};
  plan.read.reset();
  plan.gdn_fold = GdnFold::rederive;
  return plan;
}

/// How each head of a layer keeps its state.
struct HeadPlans {
  std::vector<HeadPlan> plans;  // the precision's, then those of the heads outside its selection
  std::vector<uint8_t> plan_of_head;
};

HeadPlans plans_of_heads(const StateStore::Shape& shape, const StatePrecision& precision,
                         const StatePrecision& baseline) {
  HeadPlans chosen;
  chosen.plan_of_head.assign(static_cast<size_t>(shape.heads), 0);
  const StatePrecision& outside = precision.outside ? *precision.outside : baseline;
  if (!precision.layers.contains(shape.layer)) {
    chosen.plans.push_back(head_plan(outside));
    return chosen;
  }
  chosen.plans.push_back(head_plan(precision));
  for (int h = 0; h < shape.heads; ++h) {
    if (precision.heads.contains(h)) continue;
    if (chosen.plans.size() == 1) chosen.plans.push_back(head_plan(outside));
    chosen.plan_of_head[static_cast<size_t>(h)] = 1;
  }
  return chosen;
}

size_t plan_bytes(const HeadPlan& plan, StateShape shape) {
  return packed_bytes(*plan.recurrence.format, shape) +
         (plan.read ? packed_bytes(*plan.read->format, shape) : 0);
}

/// A copy of backend memory on the host (the memory itself where that is the host's), written back
/// on request.
class Staged {
 public:
  explicit Staged(const Memory& memory) : memory_(memory) {
    if (memory.backend() == nullptr || !memory.backend()->on_device()) return;
    copy_.resize(memory.bytes());
    memory.backend()->download(copy_.data(), memory.data(), copy_.size());
  }
  std::byte* data() { return copy_.empty() ? memory_.data() : copy_.data(); }
  void store() {
    if (!copy_.empty()) memory_.backend()->upload(memory_.data(), copy_.data(), copy_.size());
  }

 private:
  const Memory& memory_;
  std::vector<std::byte> copy_;
};

std::vector<std::byte> bytes_of(const Memory& memory, size_t offset, size_t bytes) {
  std::vector<std::byte> copy(bytes);
  if (bytes > 0) memory.backend()->download(copy.data(), memory.data() + offset, bytes);
  return copy;
}

}  // namespace

StateStore::StateStore(Backend& backend, const Shape& shape, std::span<const RowSpec> rows,
                       const StatePrecision& baseline)
    : backend_(&backend), shape_(shape), baseline_(baseline), rows_(rows.size()) {
  for (size_t r = 0; r < rows.size(); ++r) reset(static_cast<int>(r), rows[r]);
}

void StateStore::reset(int r, const RowSpec& spec) {
  Row& row = rows_[static_cast<size_t>(r)];
  row = Row{};
  row.spec = spec;
  const size_t heads = static_cast<size_t>(shape_.heads);
  HeadPlans chosen = plans_of_heads(shape_, spec.precision, baseline_);
  row.plans = std::move(chosen.plans);
  row.plan_of_head = std::move(chosen.plan_of_head);
  for (const HeadPlan& plan : row.plans) row.prompt_plans.push_back(fp32_plan(plan));
  row.in_prompt = spec.prompt_tokens > 0;
  row.pending.assign(row.plans.size(), 0);
  auto cover = [&](const std::vector<HeadPlan>& plans) {
    for (const HeadPlan& plan : plans) {
      size_t memory = memory_bytes(*plan.recurrence.format, shape_.state);
      row.recurrence_stride = std::max(
          row.recurrence_stride, aligned(packed_bytes(*plan.recurrence.format, shape_.state)));
      if (plan.read) {
        row.read_stride =
            std::max(row.read_stride, aligned(packed_bytes(*plan.read->format, shape_.state)));
        memory += memory_bytes(*plan.read->format, shape_.state);
      }
      row.memory_stride = std::max(row.memory_stride, aligned(memory));
    }
  };
  cover(row.plans);
  if (row.in_prompt) cover(row.prompt_plans);
  // The zero state is encoded like any other, so that every format's scales hold a legal value; it
  // counts nothing.
  std::vector<std::byte> recurrence(heads * row.recurrence_stride), read(heads * row.read_stride);
  const std::vector<HeadPlan>& first = row.in_prompt ? row.prompt_plans : row.plans;
  const std::vector<float> zero(static_cast<size_t>(shape_.state.elements()), 0.0f);
  for (size_t h = 0; h < heads; ++h) {
    const HeadPlan& plan = first[row.plan_of_head[h]];
    EncodeHealth ignored;
    std::vector<std::byte> memory(row.memory_stride);
    encode_head({plan.recurrence.format, Rounding::nearest_even}, shape_.state, zero.data(),
                RandomKey{}, 0.0f, recurrence.data() + h * row.recurrence_stride, memory.data(),
                &ignored);
    if (plan.read) {
      encode_head({plan.read->format, Rounding::nearest_even}, shape_.state, zero.data(),
                  RandomKey{}, 0.0f, read.data() + h * row.read_stride,
                  memory.data() + memory_bytes(*plan.recurrence.format, shape_.state), &ignored);
    }
  }
  auto hold = [&](const std::vector<std::byte>& bytes) {
    Memory memory(*backend_, bytes.size());
    backend_->upload(memory.data(), bytes.data(), bytes.size());
    return memory;
  };
  row.recurrence = hold(recurrence);
  row.read = hold(read);
  row.memory = hold(std::vector<std::byte>(heads * row.memory_stride));
  const std::vector<HeadHealth> health(heads);
  row.health = Memory(*backend_, heads * sizeof(HeadHealth));
  backend_->upload(row.health.data(), health.data(), row.health.bytes());
  make_conv_room(row, 0);
  backend_->clear(row.conv.data(), row.conv.bytes());
}

bool StateStore::same_prompt(int a, int b) const {
  const Row& x = rows_[static_cast<size_t>(a)];
  const Row& y = rows_[static_cast<size_t>(b)];
  if (x.spec.prefill_chunk > 0 || y.spec.prefill_chunk > 0) return false;
  for (size_t h = 0; h < static_cast<size_t>(shape_.heads); ++h) {
    const HeadPlan& p = x.prompt_plans[x.plan_of_head[h]];
    const HeadPlan& q = y.prompt_plans[y.plan_of_head[h]];
    if (p.window != q.window || p.flush_output != q.flush_output || p.ring_u != q.ring_u ||
        p.beta != q.beta || p.dot != q.dot) {
      return false;
    }
  }
  return true;
}

void StateStore::copy_prompt(int from, int to) {
  const Row& source = rows_[static_cast<size_t>(from)];
  Row& target = rows_[static_cast<size_t>(to)];
  for (size_t h = 0; h < static_cast<size_t>(shape_.heads); ++h) {
    const uint8_t plan = source.plan_of_head[h];
    const size_t bytes = packed_bytes(*source.prompt_plans[plan].recurrence.format, shape_.state);
    backend_->copy(target.recurrence.data() + h * target.recurrence_stride,
                   source.recurrence.data() + h * source.recurrence_stride, bytes);
    target.pending[target.plan_of_head[h]] = source.pending[plan];
  }
  backend_->copy(target.health.data(), source.health.data(), source.health.bytes());
  target.records = 0;
  target.ring_first = target.conv_first = 0;
  make_room(target, source.records, 0);
  make_conv_room(target, 0);
  target.records = source.records;
  const auto copy_values = [&](Memory& to, const Memory& from, int first, int count, int width) {
    const size_t size = static_cast<size_t>(width) * sizeof(float);
    backend_->copy(to.data(), from.data() + static_cast<size_t>(first) * size,
                   static_cast<size_t>(count) * size);
  };
  copy_values(target.channels, source.channels, source.ring_first, source.records, shape_.channels);
  copy_values(target.scalars, source.scalars, source.ring_first, source.records, shape_.scalars);
  copy_values(target.corrections, source.corrections, source.ring_first, source.records,
              shape_.corrections);
  copy_values(target.conv, source.conv, source.conv_first, taps(), shape_.channels);
}

// Room for `records` of the ring with `tokens` after it. Records move to the front of the array, or
// to a larger one; the array is never so small that the two places overlap.
void StateStore::make_room(Row& row, int records, int tokens) {
  if (row.ring_first + records + tokens <= row.ring_capacity) return;
  const int held = std::min(row.records, records);
  const int from = row.ring_first;
  const bool grow = row.ring_capacity < 2 * records + tokens;
  const int capacity = !grow         ? row.ring_capacity
                       : tokens == 0 ? std::max(records, row.plans.front().window)
                                     : std::max(2 * records + tokens, row.plans.front().window * 3);
  const auto move = [&](Memory& memory, int width) {
    const size_t size = static_cast<size_t>(width) * sizeof(float);
    if (!grow) {
      backend_->copy(memory.data(), memory.data() + static_cast<size_t>(from) * size,
                     static_cast<size_t>(held) * size);
      return;
    }
    Memory larger(*backend_, static_cast<size_t>(capacity) * size);
    if (held > 0) {
      backend_->copy(larger.data(), memory.data() + static_cast<size_t>(from) * size,
                     static_cast<size_t>(held) * size);
    }
    memory = std::move(larger);
  };
  move(row.channels, shape_.channels);
  move(row.scalars, shape_.scalars);
  move(row.corrections, shape_.corrections);
  row.ring_capacity = capacity;
  row.ring_first = 0;
}

// Likewise for the convolution's inputs, of which conv_kernel - 1 are held.
void StateStore::make_conv_room(Row& row, int tokens) {
  if (row.conv_first + taps() + tokens <= row.conv_capacity) return;
  const size_t size = static_cast<size_t>(shape_.channels) * sizeof(float);
  const size_t held = static_cast<size_t>(taps()) * size;
  const size_t from = static_cast<size_t>(row.conv_first) * size;
  if (row.conv_capacity < 2 * taps() + tokens) {
    const int capacity = tokens == 0 ? std::max(taps(), 1) : 2 * taps() + 3 * kInPlaceTokens;
    Memory larger(*backend_, static_cast<size_t>(capacity) * size);
    if (row.conv.data() != nullptr) backend_->copy(larger.data(), row.conv.data() + from, held);
    row.conv = std::move(larger);
    row.conv_capacity = capacity;
  } else {
    backend_->copy(row.conv.data(), row.conv.data() + from, held);
  }
  row.conv_first = 0;
}

RecordPointers StateStore::end_of(Row& row) const {
  const auto at = [](const Memory& memory, int token, int width) {
    return reinterpret_cast<float*>(memory.data()) + int64_t{token} * width;
  };
  const int end = row.ring_first + row.records;
  return {at(row.conv, row.conv_first + taps(), shape_.channels),
          at(row.channels, end, shape_.channels), at(row.scalars, end, shape_.scalars),
          at(row.corrections, end, shape_.corrections)};
}

RecordPointers StateStore::in_place(int r, int tokens) {
  Row& row = rows_[static_cast<size_t>(r)];
  make_room(row, row.records, tokens);
  make_conv_room(row, tokens);
  return end_of(row);
}

void StateStore::gather(int r, const RecordPointers& to, std::vector<CopyJob>& copies) const {
  const RecordPointers from = end_of(const_cast<Row&>(rows_[static_cast<size_t>(r)]));
  const auto before = [&](float* target, const float* source, int count, int width) {
    const int64_t offset = int64_t{count} * width;
    if (offset > 0) copies.push_back({target - offset, offset, source - offset, offset, 1, offset});
  };
  const int records = rows_[static_cast<size_t>(r)].records;
  before(to.conv, from.conv, taps(), shape_.channels);
  before(to.channels, from.channels, records, shape_.channels);
  before(to.scalars, from.scalars, records, shape_.scalars);
  before(to.corrections, from.corrections, records, shape_.corrections);
}

StateRow StateStore::view(Row& row, int64_t position) const {
  StateRow view;
  view.position = position;
  view.stream = row.spec.stream;
  view.plans = row.in_prompt ? row.prompt_plans : row.plans;
  view.plan_of_head = row.plan_of_head.data();
  view.pending = row.pending.data();
  view.recurrence = row.recurrence.data();
  view.recurrence_stride = row.recurrence_stride;
  view.read = row.read.data();
  view.read_stride = row.read_stride;
  view.memory = row.memory.data();
  view.memory_stride = row.memory_stride;
  view.health = reinterpret_cast<HeadHealth*>(row.health.data());
  return view;
}

void StateStore::advance(std::span<const int64_t> positions, std::span<const int> lengths,
                         AdvanceMode mode, const Kernel& kernel, const Flush& flush) {
  const size_t count = rows_.size();
  std::vector<int> done(count, 0);
  for (;;) {
    std::vector<int> steps(count, 0);
    std::vector<StateRow> views(count);
    bool any = false;
    for (size_t r = 0; r < count; ++r) {
      Row& row = rows_[r];
      const int64_t position = positions[r] + done[r];
      int64_t step = lengths[r] - done[r];
      if (row.in_prompt && step > 0) {
        if (mode == AdvanceMode::verify)
          throw std::invalid_argument("state store: a prompt cannot be a speculation");
        int64_t end = row.spec.prompt_tokens;
        if (row.spec.prefill_chunk > 0) {
          end = std::min(end, (position / row.spec.prefill_chunk + 1) * row.spec.prefill_chunk);
        }
        step = std::min(step, end - position);
      }
      steps[r] = static_cast<int>(step);
      any = any || step > 0;
      views[r] = view(row, position);
    }
    if (!any) return;
    kernel(views, done, steps);
    for (size_t r = 0; r < count; ++r) {
      Row& row = rows_[r];
      done[r] += steps[r];
      if (!row.in_prompt || steps[r] == 0) continue;
      const int64_t position = positions[r] + done[r];
      const bool ends = position == row.spec.prompt_tokens;
      if (!ends && (row.spec.prefill_chunk == 0 || position % row.spec.prefill_chunk != 0))
        continue;
      StateRow self = view(row, position);
      flush(self, static_cast<int>(r), done[r]);
      hand_over(row, position - 1, !ends);
    }
  }
}

// The row's checkpoint holds the folded FP32 state of the prompt so far. It is encoded in the row's
// own formats at `position`; where the prompt goes on (`keep_prompt`), the recurrence copy is
// decoded again and FP32 continues from it.
void StateStore::hand_over(Row& row, int64_t position, bool keep_prompt) {
  const int64_t elements = shape_.state.elements();
  std::vector<float> states(static_cast<size_t>(elements) * static_cast<size_t>(shape_.heads));
  Staged recurrence(row.recurrence), read(row.read), memories(row.memory), healths(row.health);
  float amax = 0.0f;
  for (int h = 0; h < shape_.heads; ++h) {
    float* state = states.data() + h * elements;
    const size_t head = static_cast<size_t>(h);
    decode_head(*row.prompt_plans[row.plan_of_head[head]].recurrence.format, shape_.state,
                recurrence.data() + head * row.recurrence_stride, state);
    amax = std::max(amax, state_amax(state, elements));
  }
  for (int h = 0; h < shape_.heads; ++h) {
    float* state = states.data() + h * elements;
    const size_t head = static_cast<size_t>(h);
    const HeadPlan& plan = row.plans[row.plan_of_head[head]];
    RandomKey key{plan.seed,
                  row.spec.stream,
                  static_cast<uint32_t>(shape_.layer),
                  static_cast<uint32_t>(h),
                  static_cast<uint32_t>(position),
                  StateRole::recurrence};
    std::byte* packed = recurrence.data() + head * row.recurrence_stride;
    std::byte* memory = memories.data() + head * row.memory_stride;
    HeadHealth& health = reinterpret_cast<HeadHealth*>(healths.data())[head];
    const uint64_t before = health.encode.non_finite;
    encode_head(plan.recurrence, shape_.state, state, key, amax, packed, memory, &health.encode);
    if (health.encode.non_finite > before && health.first_non_finite_position < 0) {
      health.first_non_finite_position = position;
    }
    if (plan.read && !keep_prompt) {
      key.role = StateRole::read;
      EncodeHealth read_health;
      encode_head(*plan.read, shape_.state, state, key, amax, read.data() + head * row.read_stride,
                  memory + memory_bytes(*plan.recurrence.format, shape_.state), &read_health);
      health.encode.saturated += read_health.saturated;
      health.encode.clipped += read_health.clipped;
      health.encode.vanished += read_health.vanished;
    }
    if (keep_prompt) {
      decode_head(*plan.recurrence.format, shape_.state, packed, state);
      EncodeHealth ignored;
      encode_head(row.prompt_plans[row.plan_of_head[head]].recurrence, shape_.state, state, key,
                  0.0f, packed, nullptr, &ignored);
    }
  }
  for (Staged* staged : {&recurrence, &read, &memories, &healths}) staged->store();
  if (!keep_prompt) row.in_prompt = false;
}

void StateStore::keep(int r, int tokens, AdvanceMode mode, const RecordPointers& at,
                      std::vector<CopyJob>& copies) {
  if (tokens == 0) return;
  Row& row = rows_[static_cast<size_t>(r)];
  const int total = row.records + tokens;
  if (r == 0 && trace_tokens_ > 0) {
    const int traced = std::min(total, trace_tokens_);
    const auto trace = [&](std::vector<float>& values, const float* source, int width) {
      values.resize(static_cast<size_t>(traced) * static_cast<size_t>(width));
      backend_->download(values.data(), source + int64_t{tokens - traced} * width,
                         values.size() * sizeof(float));
    };
    trace(trace_channels_, at.channels, shape_.channels);
    trace(trace_scalars_, at.scalars, shape_.scalars);
  }
  row.uncommitted = mode == AdvanceMode::verify ? tokens : 0;
  const int pending = *std::max_element(row.pending.begin(), row.pending.end());
  const int kept = std::min(total, pending + row.uncommitted);
  if (at.channels == end_of(row).channels) {
    row.ring_first += total - kept;
    row.records = kept;
    row.conv_first += tokens - row.uncommitted;
    return;
  }
  row.records = 0;
  row.ring_first = 0;
  make_room(row, kept, 0);
  row.records = kept;
  row.conv_first = 0;
  if (row.conv_capacity < taps() + row.uncommitted) {
    row.conv = Memory(*backend_, static_cast<size_t>(taps() + row.uncommitted) *
                                     static_cast<size_t>(shape_.channels) * sizeof(float));
    row.conv_capacity = taps() + row.uncommitted;
  }
  const auto tail = [&](const Memory& memory, const float* source, int count, int width) {
    const int64_t size = int64_t{count} * width;
    if (size == 0) return;
    copies.push_back({reinterpret_cast<float*>(memory.data()), size,
                      source + int64_t{tokens} * width - size, size, 1, size});
  };
  tail(row.channels, at.channels, kept, shape_.channels);
  tail(row.scalars, at.scalars, kept, shape_.scalars);
  tail(row.corrections, at.corrections, kept, shape_.corrections);
  tail(row.conv, at.conv, taps() + row.uncommitted, shape_.channels);
}

void StateStore::commit(int r, int accepted) {
  Row& row = rows_[static_cast<size_t>(r)];
  const int dropped = row.uncommitted - accepted;
  if (accepted < 0 || dropped < 0) {
    throw std::invalid_argument("commit: " + std::to_string(accepted) + " of " +
                                std::to_string(row.uncommitted) + " uncommitted tokens");
  }
  row.conv_first += accepted;
  row.records -= dropped;
  for (int& pending : row.pending) pending += accepted;
  row.uncommitted = 0;
}

const StateCodec& StateStore::codec(const Row& row, int head, StateRole role) const {
  const std::vector<HeadPlan>& plans = row.in_prompt ? row.prompt_plans : row.plans;
  const HeadPlan& plan = plans[row.plan_of_head[static_cast<size_t>(head)]];
  return role == StateRole::read && plan.read ? *plan.read : plan.recurrence;
}

void StateStore::decode(int r, int head, StateRole role, float* out) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  const StateCodec& chosen = codec(row, head, role);
  const bool separate = &chosen != &codec(row, head, StateRole::recurrence);
  const Memory& memory = separate ? row.read : row.recurrence;
  const size_t stride = separate ? row.read_stride : row.recurrence_stride;
  const std::vector<std::byte> packed =
      bytes_of(memory, static_cast<size_t>(head) * stride, stride);
  decode_head(*chosen.format, shape_.state, packed.data(), out);
}

int StateStore::pending(int r, int head) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  return row.pending[row.plan_of_head[static_cast<size_t>(head)]];
}

std::vector<HeadHealth> StateStore::head_health(int r) const {
  std::vector<HeadHealth> health(static_cast<size_t>(shape_.heads));
  backend_->download(health.data(), rows_[static_cast<size_t>(r)].health.data(),
                     health.size() * sizeof(HeadHealth));
  return health;
}

StoreHealth StateStore::health(int r) const {
  StoreHealth total;
  const std::vector<HeadHealth> heads = head_health(r);
  for (size_t h = 0; h < heads.size(); ++h) {
    const EncodeHealth& e = heads[h].encode;
    total.encode.elements += e.elements;
    total.encode.non_finite += e.non_finite;
    total.encode.saturated += e.saturated;
    total.encode.clipped += e.clipped;
    total.encode.vanished += e.vanished;
    const int64_t first = heads[h].first_non_finite_position;
    if (first >= 0 &&
        (total.first_non_finite_position < 0 || first < total.first_non_finite_position)) {
      total.first_non_finite_position = first;
      total.first_non_finite_head = static_cast<int>(h);
    }
  }
  return total;
}

size_t StateStore::checkpoint_bytes(int r) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  size_t bytes = 0;
  for (uint8_t plan : row.plan_of_head) bytes += plan_bytes(row.plans[plan], shape_.state);
  return bytes;
}

size_t checkpoint_bytes(const StateStore::Shape& shape, const StatePrecision& precision,
                        const StatePrecision& baseline) {
  const HeadPlans chosen = plans_of_heads(shape, precision, baseline);
  size_t bytes = 0;
  for (uint8_t plan : chosen.plan_of_head) bytes += plan_bytes(chosen.plans[plan], shape.state);
  return bytes;
}

std::vector<std::byte> StateStore::packed(int r, StateRole role) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  const Memory& memory = role == StateRole::recurrence ? row.recurrence : row.read;
  return bytes_of(memory, 0, memory.bytes());
}

std::optional<StateStore::Shape> state_shape(const Mixer& mixer, int layer) {
  StateStore::Shape shape;
  shape.layer = layer;
  if (const auto* mamba = std::get_if<Mamba2Spec>(&mixer)) {
    shape.heads = mamba->heads;
    shape.state = {mamba->head_dim, mamba->state_dim};
    shape.conv_kernel = mamba->conv_kernel;
    shape.channels = mamba->heads * mamba->head_dim + 2 * mamba->groups * mamba->state_dim;
    shape.scalars = mamba->heads;
    return shape;
  }
  if (const auto* gdn = std::get_if<GdnSpec>(&mixer)) {
    shape.heads = gdn->value_heads;
    shape.state = {gdn->value_dim, gdn->key_dim};
    shape.conv_kernel = gdn->conv_kernel;
    shape.channels = 2 * gdn->key_heads * gdn->key_dim + gdn->value_heads * gdn->value_dim;
    shape.scalars = 2 * gdn->value_heads;
    shape.corrections = gdn->value_heads * gdn->value_dim;
    return shape;
  }
  return std::nullopt;
}

StateSet::StateSet(const Model& model, std::vector<RowSpec> rows, const StatePrecision& baseline,
                   KernelForm form)
    : backend_(&model.backend()),
      rows_(std::move(rows)),
      baseline_(baseline),
      form_(form),
      positions_(rows_.size(), 0),
      uncommitted_(rows_.size(), 0) {
  const KvType type = model.options().compute == ComputeType::bf16 ? KvType::bf16 : KvType::fp32;
  for (const Block& block : model.spec().blocks) {
    std::vector<Slot>& slots = slots_.emplace_back();
    for (const Branch& branch : block.branches) {
      Slot& slot = slots.emplace_back();
      if (auto shape = state_shape(branch.mixer, block.layer)) {
        slot.store = std::make_unique<StateStore>(*backend_, *shape, rows_, baseline_);
        slot.decay_sum = Memory(*backend_, static_cast<size_t>(shape->heads) * sizeof(double));
        backend_->clear(slot.decay_sum.data(), slot.decay_sum.bytes());
      } else if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer)) {
        slot.cache = backend_->make_kv_store(attention->kv_heads, attention->head_dim, type,
                                             static_cast<int>(rows_.size()));
      }
    }
  }
}

StateSet::~StateSet() = default;
StateSet::StateSet(StateSet&&) noexcept = default;
StateSet& StateSet::operator=(StateSet&&) noexcept = default;

void StateSet::commit(std::span<const int> accepted) {
  if (accepted.size() != rows_.size()) {
    throw std::invalid_argument("commit: " + std::to_string(accepted.size()) +
                                " counts, expected one a row (" + std::to_string(rows_.size()) +
                                ")");
  }
  for (int r = 0; r < rows(); ++r) {
    const size_t i = static_cast<size_t>(r);
    if (accepted[i] < 0 || accepted[i] > uncommitted_[i]) {
      throw std::invalid_argument("commit: row " + std::to_string(r) + ": " +
                                  std::to_string(accepted[i]) + " of " +
                                  std::to_string(uncommitted_[i]) + " uncommitted tokens");
    }
  }
  for (size_t i = 0; i < rows_.size(); ++i) {
    positions_[i] += accepted[i];
    uncommitted_[i] = 0;
    for (auto& block : slots_) {
      for (Slot& slot : block) {
        if (slot.store) slot.store->commit(static_cast<int>(i), accepted[i]);
        if (slot.cache) slot.cache->truncate(static_cast<int>(i), positions_[i]);
      }
    }
  }
}

void StateSet::reset(int r, const RowSpec& spec) {
  const size_t i = static_cast<size_t>(r);
  rows_[i] = spec;
  positions_[i] = 0;
  uncommitted_[i] = 0;
  for (auto& block : slots_) {
    for (Slot& slot : block) {
      if (slot.store) slot.store->reset(r, spec);
      if (r == 0 && slot.store) backend_->clear(slot.decay_sum.data(), slot.decay_sum.bytes());
      if (slot.cache) slot.cache->truncate(r, 0);
    }
  }
}

bool StateSet::same_prompt(int a, int b) const {
  const RowSpec& x = row(a);
  const RowSpec& y = row(b);
  if (x.precision.options.ring != y.precision.options.ring) return false;
  const std::vector<const StateStore*> all = stores();
  return std::all_of(all.begin(), all.end(),
                     [&](const StateStore* store) { return store->same_prompt(a, b); });
}

void StateSet::copy_prompt(int from, int to) {
  const size_t i = static_cast<size_t>(from), j = static_cast<size_t>(to);
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("copy of row " + std::to_string(from) + " to row " +
                                std::to_string(to) + ": " + why);
  };
  if (uncommitted_[i] > 0) refuse("the source has uncommitted tokens");
  if (positions_[j] != 0 || uncommitted_[j] > 0) refuse("expected an empty target; call reset");
  if (positions_[i] >= row(from).prompt_tokens || positions_[i] >= row(to).prompt_tokens) {
    refuse("position " + std::to_string(positions_[i]) + " is not inside both prompts (" +
           std::to_string(row(from).prompt_tokens) + " and " +
           std::to_string(row(to).prompt_tokens) + " tokens)");
  }
  if (!same_prompt(from, to)) refuse("the two states compute a prompt differently");
  for (auto& block : slots_) {
    for (Slot& slot : block) {
      if (slot.store) slot.store->copy_prompt(from, to);
      if (slot.cache) slot.cache->copy(from, to);
    }
  }
  positions_[j] = positions_[i];
}

std::vector<StateStore*> StateSet::stores() {
  std::vector<StateStore*> all;
  for (auto& block : slots_) {
    for (Slot& slot : block) {
      if (slot.store) all.push_back(slot.store.get());
    }
  }
  return all;
}

std::vector<const StateStore*> StateSet::stores() const {
  std::vector<StateStore*> all = const_cast<StateSet*>(this)->stores();
  return {all.begin(), all.end()};
}

size_t StateSet::checkpoint_bytes(int r) const {
  size_t bytes = 0;
  for (const StateStore* store : stores()) bytes += store->checkpoint_bytes(r);
  return bytes;
}

size_t StateSet::cache_bytes() const {
  size_t bytes = 0;
  for (const auto& block : slots_) {
    for (const Slot& slot : block) {
      for (int r = 0; slot.cache && r < rows(); ++r) bytes += slot.cache->bytes(r);
    }
  }
  return bytes;
}

void StateSet::reserve(int64_t tokens) {
  for (auto& block : slots_) {
    for (Slot& slot : block) {
      for (int r = 0; slot.cache && r < rows(); ++r) slot.cache->reserve(r, tokens);
    }
  }
}

std::vector<std::vector<double>> StateSet::decay_sums() const {
  std::vector<std::vector<double>> sums;
  for (const auto& block : slots_) {
    for (const Slot& slot : block) {
      if (!slot.store) continue;
      sums.emplace_back(static_cast<size_t>(slot.store->shape().heads));
      backend_->download(sums.back().data(), slot.decay_sum.data(), slot.decay_sum.bytes());
    }
  }
  return sums;
}

}  // namespace replayeval
