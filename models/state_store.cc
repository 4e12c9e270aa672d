#include "models/state_store.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "quant/quantize_cuda.h"

namespace replayeval {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// True when a library encodes one of the plan's checkpoints.
bool host_codec(const HeadPlan& plan) {
  return plan.recurrence.format->library != nullptr ||
         (plan.read && plan.read->format->library != nullptr);
}

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

/// body(head) for every head, in parallel; throws again what the first failing one threw.
template <class Body>
void for_heads(int heads, const Body& body) {
  std::exception_ptr error;
#pragma omp parallel for schedule(dynamic)
  for (int h = 0; h < heads; ++h) {
    try {
      body(h);
    } catch (...) {
#pragma omp critical(replayeval_state_store_error)
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

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
  if (backend_->on_device() && std::any_of(row.plans.begin(), row.plans.end(), host_codec)) {
    row.device_plans = row.plans;
    for (HeadPlan& plan : row.device_plans) {
      if (!host_codec(plan)) continue;
      if (plan.read && plan.flush_output == FlushOutput::read) {
        throw std::invalid_argument(
            "states: " + spec.precision.name +
            ": a library's codec runs on the host after a flush; expected flush_output: "
            "recurrence with device cuda");
      }
      plan.recurrence = StateCodec{find_format("fp32"), Rounding::nearest_even};
      if (plan.read) plan.read = plan.recurrence;
    }
  }
  // Strides that hold any of the plans.
  const auto cover = [&](const std::vector<HeadPlan>& plans, size_t& recurrence, size_t& read,
                         size_t& memory) {
    for (const HeadPlan& plan : plans) {
      size_t kept = memory_bytes(*plan.recurrence.format, shape_.state);
      recurrence =
          std::max(recurrence, aligned(packed_bytes(*plan.recurrence.format, shape_.state)));
      if (plan.read) {
        read = std::max(read, aligned(packed_bytes(*plan.read->format, shape_.state)));
        kept += memory_bytes(*plan.read->format, shape_.state);
      }
      memory = std::max(memory, aligned(kept));
    }
  };
  const bool on_host = !row.device_plans.empty();
  cover(on_host ? row.device_plans : row.plans, row.recurrence_stride, row.read_stride,
        row.memory_stride);
  if (row.in_prompt)
    cover(row.prompt_plans, row.recurrence_stride, row.read_stride, row.memory_stride);
  if (on_host) {
    cover(row.plans, row.host_recurrence_stride, row.host_read_stride, row.host_memory_stride);
    row.host_recurrence.resize(heads * row.host_recurrence_stride);
    row.host_read.resize(heads * row.host_read_stride);
    row.host_memory.resize(heads * row.host_memory_stride);
    row.host_health.resize(heads);
  }
  // The zero state is encoded like any other, so that every format's scales hold a legal value; it
  // counts nothing.
  const std::vector<float> zero(static_cast<size_t>(shape_.state.elements()), 0.0f);
  const auto encode_zero = [&](const std::vector<HeadPlan>& plans,
                               std::vector<std::byte>& recurrence, size_t recurrence_stride,
                               std::vector<std::byte>& read, size_t read_stride,
                               size_t memory_stride) {
    std::vector<int> encoded(plans.size(), -1);  // head whose zeros a plan's other heads copy
    for (size_t h = 0; h < heads; ++h) {
      const HeadPlan& plan = plans[row.plan_of_head[h]];
      std::byte* own = recurrence.data() + h * recurrence_stride;
      std::byte* own_read = read.data() + h * read_stride;
      int& first = encoded[row.plan_of_head[h]];
      if (first >= 0) {
        const size_t from = static_cast<size_t>(first);
        std::copy_n(recurrence.data() + from * recurrence_stride, recurrence_stride, own);
        if (plan.read) std::copy_n(read.data() + from * read_stride, read_stride, own_read);
        continue;
      }
      first = static_cast<int>(h);
      EncodeHealth ignored;
      std::vector<std::byte> memory(memory_stride);
      encode_head({plan.recurrence.format, Rounding::nearest_even}, shape_.state, zero.data(),
                  RandomKey{}, 0.0f, own, memory.data(), &ignored);
      if (plan.read) {
        encode_head({plan.read->format, Rounding::nearest_even}, shape_.state, zero.data(),
                    RandomKey{}, 0.0f, own_read,
                    memory.data() + memory_bytes(*plan.recurrence.format, shape_.state), &ignored);
      }
    }
  };
  std::vector<std::byte> recurrence(heads * row.recurrence_stride), read(heads * row.read_stride);
  encode_zero(row.in_prompt ? row.prompt_plans
              : on_host     ? row.device_plans
                            : row.plans,
              recurrence, row.recurrence_stride, read, row.read_stride, row.memory_stride);
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
  if (!on_host) return;
  encode_zero(row.plans, row.host_recurrence, row.host_recurrence_stride, row.host_read,
              row.host_read_stride, row.host_memory_stride);
  for (size_t h = 0; h < heads && !row.in_prompt; ++h) {
    if (staged(row, static_cast<int>(h))) show_device(row, static_cast<int>(h));
  }
}

StateStore::PackedHeads StateStore::host_heads(Row& row) {
  return {row.host_recurrence.data(), row.host_recurrence_stride, row.host_read.data(),
          row.host_read_stride,       row.host_memory.data(),     row.host_memory_stride,
          row.host_health.data()};
}

bool StateStore::staged(const Row& row, int head) const {
  return !row.device_plans.empty() &&
         host_codec(row.plans[row.plan_of_head[static_cast<size_t>(head)]]);
}

// One head in its own formats at `position`.
void StateStore::encode(const Row& row, int h, const float* state, float amax, int64_t position,
                        bool with_read, const PackedHeads& to) const {
  const size_t head = static_cast<size_t>(h);
  const HeadPlan& plan = row.plans[row.plan_of_head[head]];
  RandomKey key{plan.seed,
                row.spec.stream,
                static_cast<uint32_t>(shape_.layer),
                static_cast<uint32_t>(h),
                static_cast<uint32_t>(position),
                StateRole::recurrence};
  std::byte* memory = to.memory + head * to.memory_stride;
  HeadHealth& health = to.health[head];
  const uint64_t before = health.encode.non_finite;
  encode_head(plan.recurrence, shape_.state, state, key, amax,
              to.recurrence + head * to.recurrence_stride, memory, &health.encode);
  if (health.encode.non_finite > before && health.first_non_finite_position < 0) {
    health.first_non_finite_position = position;
  }
  if (!plan.read || !with_read) return;
  key.role = StateRole::read;
  encode_head(*plan.read, shape_.state, state, key, amax, to.read + head * to.read_stride,
              memory + memory_bytes(*plan.recurrence.format, shape_.state), &health.encode);
}

// The device's FP32 copies of what the host's packed checkpoints of a head mean.
void StateStore::show_device(Row& row, int h) {
  const size_t head = static_cast<size_t>(h);
  const HeadPlan& plan = row.plans[row.plan_of_head[head]];
  std::vector<float> state(static_cast<size_t>(shape_.state.elements()));
  decode_head(*plan.recurrence.format, shape_.state,
              row.host_recurrence.data() + head * row.host_recurrence_stride, state.data());
  backend_->upload(row.recurrence.data() + head * row.recurrence_stride, state.data(),
                   state.size() * sizeof(float));
  if (!plan.read) return;
  decode_head(*plan.read->format, shape_.state, row.host_read.data() + head * row.host_read_stride,
              state.data());
  backend_->upload(row.read.data() + head * row.read_stride, state.data(),
                   state.size() * sizeof(float));
}

// Heads of a plan whose library encodes on the host, just after the device's flush at `position`.
void StateStore::encode_staged(Row& row, size_t plan, int64_t position) {
  const size_t elements = static_cast<size_t>(shape_.state.elements());
  std::vector<float> state(elements);
  for (int h = 0; h < shape_.heads; ++h) {
    const size_t head = static_cast<size_t>(h);
    if (row.plan_of_head[head] != plan) continue;
    backend_->download(state.data(), row.recurrence.data() + head * row.recurrence_stride,
                       elements * sizeof(float));
    encode(row, h, state.data(), 0.0f, position, true, host_heads(row));
    show_device(row, h);
  }
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
  target.corrections_hold = source.corrections_hold;
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
    // Few tokens more than needed, so that the same lines are used over and over.
    const int capacity = tokens == 0 ? std::max(taps(), 1) : 2 * taps() + std::max(tokens, 8);
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
  view.plans = row.in_prompt              ? row.prompt_plans
               : row.device_plans.empty() ? row.plans
                                          : row.device_plans;
  view.plan_of_head = row.plan_of_head.data();
  view.pending = row.pending.data();
  view.corrections_hold = row.corrections_hold;
  view.recurrence = row.recurrence.data();
  view.recurrence_stride = row.recurrence_stride;
  view.read = row.read.data();
  view.read_stride = row.read_stride;
  view.memory = row.memory.data();
  view.memory_stride = row.memory_stride;
  view.health = reinterpret_cast<HeadHealth*>(row.health.data());
  return view;
}

// Drafts' corrections may come from a folded state before it was encoded; those of the next window
// are as good as ever.
void StateStore::note_corrections(Row& row, AdvanceMode mode) {
  if (mode == AdvanceMode::verify) {
    row.corrections_hold = false;
  } else if (std::all_of(row.pending.begin(), row.pending.end(), [](int h) { return h == 0; })) {
    row.corrections_hold = true;
  }
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
      } else if (!row.device_plans.empty() && step > 0 && mode == AdvanceMode::commit) {
        // To the next flush of a plan that the host encodes.
        for (size_t p = 0; p < row.plans.size(); ++p) {
          if (!host_codec(row.plans[p])) continue;
          if (row.pending[p] >= row.plans[p].window) {
            StateRow self = view(row, position);
            flush(self, static_cast<int>(r), done[r]);
            for (size_t q = 0; q < row.plans.size(); ++q) {
              if (host_codec(row.plans[q])) encode_staged(row, q, position - 1);
            }
          }
          step = std::min<int64_t>(step, row.plans[p].window - row.pending[p]);
        }
      }
      steps[r] = static_cast<int>(step);
      any = any || step > 0;
      views[r] = view(row, position);
    }
    if (!any) return;
    std::vector<std::vector<int>> before(count);
    for (size_t r = 0; r < count; ++r) {
      if (!rows_[r].device_plans.empty()) before[r] = rows_[r].pending;
    }
    kernel(views, done, steps);
    for (size_t r = 0; r < count; ++r) {
      Row& row = rows_[r];
      for (size_t p = 0; p < before[r].size() && steps[r] > 0 && !row.in_prompt; ++p) {
        if (!host_codec(row.plans[p]) || row.pending[p] != 0) continue;
        const int64_t position = positions[r] + done[r];
        // A verify call that folds does so before its tokens.
        if (mode == AdvanceMode::verify) {
          if (before[r][p] > 0) encode_staged(row, p, position - 1);
        } else {
          encode_staged(row, p, position + steps[r] - 1);
        }
      }
      done[r] += steps[r];
      if (steps[r] > 0) note_corrections(row, mode);
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
  if (backend_->on_device() && row.plans.size() == 1 && row.device_plans.empty())
    return hand_over_on_device(row, position, keep_prompt);
  const int64_t elements = shape_.state.elements();
  std::vector<float> states(static_cast<size_t>(elements) * static_cast<size_t>(shape_.heads));
  Staged recurrence(row.recurrence), read(row.read), memory(row.memory), healths(row.health);
  const PackedHeads own = {recurrence.data(),
                           row.recurrence_stride,
                           read.data(),
                           row.read_stride,
                           memory.data(),
                           row.memory_stride,
                           reinterpret_cast<HeadHealth*>(healths.data())};
  std::vector<float> largest(static_cast<size_t>(shape_.heads));
  for_heads(shape_.heads, [&](int h) {
    float* state = states.data() + h * elements;
    const size_t head = static_cast<size_t>(h);
    decode_head(*row.prompt_plans[row.plan_of_head[head]].recurrence.format, shape_.state,
                own.recurrence + head * own.recurrence_stride, state);
    largest[head] = state_amax(state, elements);
  });
  float amax = 0.0f;
  for (float a : largest) amax = std::max(amax, a);
  for_heads(shape_.heads, [&](int h) {
    float* state = states.data() + h * elements;
    const size_t head = static_cast<size_t>(h);
    const PackedHeads& to = staged(row, h) ? host_heads(row) : own;
    if (staged(row, h)) to.health[head] = own.health[head];
    encode(row, h, state, amax, position, !keep_prompt, to);
    if (staged(row, h)) own.health[head] = to.health[head];
    if (!keep_prompt) return;
    decode_head(*row.plans[row.plan_of_head[head]].recurrence.format, shape_.state,
                to.recurrence + head * to.recurrence_stride, state);
    EncodeHealth ignored;
    encode_head(row.prompt_plans[row.plan_of_head[head]].recurrence, shape_.state, state,
                RandomKey{}, 0.0f, own.recurrence + head * own.recurrence_stride, nullptr,
                &ignored);
  });
  for (Staged* copy : {&recurrence, &read, &memory, &healths}) copy->store();
  if (keep_prompt) return;
  row.in_prompt = false;
  for (int h = 0; h < shape_.heads; ++h) {
    if (staged(row, h)) show_device(row, h);
  }
}

// The same where one plan holds for all heads and the device knows its formats.
void StateStore::hand_over_on_device(Row& row, int64_t position, bool keep_prompt) {
  const size_t heads = static_cast<size_t>(shape_.heads);
  const int64_t elements = shape_.state.elements() * shape_.heads;
  const HeadPlan& plan = row.plans.front();
  const StateCodec& prompt = row.prompt_plans.front().recurrence;
  const CudaStream stream = backend_->stream();
  const Buffer states(*backend_, elements), amax(*backend_, 1);
  const Memory counts(*backend_, 2 * heads * sizeof(EncodeHealth));
  auto* health = reinterpret_cast<EncodeHealth*>(counts.data());
  backend_->clear(counts.data(), counts.bytes());
  decode_heads_cuda(*prompt.format, shape_.state, shape_.heads, row.recurrence.data(),
                    row.recurrence_stride, states.data(), stream);
  state_amax_cuda(states.data(), elements, amax.data(), stream);
  std::vector<RandomKey> keys;
  for (size_t h = 0; h < heads; ++h) {
    keys.push_back({plan.seed, row.spec.stream, static_cast<uint32_t>(shape_.layer),
                    static_cast<uint32_t>(h), static_cast<uint32_t>(position),
                    StateRole::recurrence});
  }
  encode_heads_cuda(plan.recurrence, shape_.state, keys, states.data(), amax.data(),
                    row.recurrence.data(), row.recurrence_stride, row.memory.data(),
                    row.memory_stride, health, stream);
  if (plan.read && !keep_prompt) {
    for (RandomKey& key : keys) key.role = StateRole::read;
    encode_heads_cuda(*plan.read, shape_.state, keys, states.data(), amax.data(), row.read.data(),
                      row.read_stride,
                      row.memory.data() + memory_bytes(*plan.recurrence.format, shape_.state),
                      row.memory_stride, health + heads, stream);
  }
  if (keep_prompt) {
    decode_heads_cuda(*plan.recurrence.format, shape_.state, shape_.heads, row.recurrence.data(),
                      row.recurrence_stride, states.data(), stream);
    encode_heads_cuda(prompt, shape_.state, keys, states.data(), nullptr, row.recurrence.data(),
                      row.recurrence_stride, nullptr, 0, nullptr, stream);
  }
  std::vector<EncodeHealth> added(2 * heads);
  backend_->download(added.data(), health, counts.bytes());
  Staged staged_health(row.health);
  auto* total = reinterpret_cast<HeadHealth*>(staged_health.data());
  for (size_t i = 0; i < added.size(); ++i) {
    HeadHealth& head = total[i % heads];
    head.encode += added[i];
    if (i < heads && added[i].non_finite > 0 && head.first_non_finite_position < 0)
      head.first_non_finite_position = position;
  }
  staged_health.store();
  row.in_prompt = keep_prompt;
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
    // An empty ring starts again at the front: its lines are still in a near cache.
    row.ring_first = kept == 0 ? 0 : row.ring_first + total - kept;
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
  if (!row.in_prompt && staged(row, head)) {
    const size_t h = static_cast<size_t>(head);
    decode_head(*chosen.format, shape_.state,
                separate ? row.host_read.data() + h * row.host_read_stride
                         : row.host_recurrence.data() + h * row.host_recurrence_stride,
                out);
    return;
  }
  const Memory& memory = separate ? row.read : row.recurrence;
  const size_t stride = separate ? row.read_stride : row.recurrence_stride;
  const std::vector<std::byte> packed =
      bytes_of(memory, static_cast<size_t>(head) * stride, stride);
  decode_head(*chosen.format, shape_.state, packed.data(), out);
}

StateStore::Contents StateStore::contents(int r) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  if (row.in_prompt || row.uncommitted > 0 || row.plans.size() != 1 || !row.device_plans.empty())
    throw std::logic_error("state store: row " + std::to_string(r) + " cannot be handed on");
  const RecordPointers end = end_of(const_cast<Row&>(row));
  const int64_t records = row.pending.front();
  return {row.recurrence.data(),
          row.recurrence_stride,
          row.read.data(),
          row.read_stride,
          row.pending.front(),
          end.channels - records * shape_.channels,
          end.scalars - records * shape_.scalars,
          end.corrections - records * shape_.corrections,
          end.conv - int64_t{taps()} * shape_.channels};
}

int StateStore::pending(int r, int head) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  return row.pending[row.plan_of_head[static_cast<size_t>(head)]];
}

std::vector<HeadHealth> StateStore::head_health(int r) const {
  std::vector<HeadHealth> health(static_cast<size_t>(shape_.heads));
  const Row& row = rows_[static_cast<size_t>(r)];
  backend_->download(health.data(), row.health.data(), health.size() * sizeof(HeadHealth));
  for (int h = 0; h < shape_.heads; ++h) {
    if (staged(row, h) && !row.in_prompt)
      health[static_cast<size_t>(h)] = row.host_health[static_cast<size_t>(h)];
  }
  return health;
}

StoreHealth StateStore::health(int r) const {
  StoreHealth total;
  const std::vector<HeadHealth> heads = head_health(r);
  for (size_t h = 0; h < heads.size(); ++h) {
    total.encode += heads[h].encode;
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
  if (!row.device_plans.empty() && !row.in_prompt)
    return role == StateRole::recurrence ? row.host_recurrence : row.host_read;
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
