// Spans, head state and checks shared by the mixers (kernels/replay.h).
#include "kernels/replay.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/simd_dispatch.h"
#include "kernels/replay_simd.h"

namespace replayeval {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

/// Encodes one role; the read role of a shared checkpoint does nothing. The recurrence role notes a
/// first non-finite state.
void encode_role(const StateRow& row, StateShape shape, int head, StateRole role,
                 const FlushKey& key, float span_amax, const float* state) {
  const HeadPlan& plan = row.plans[static_cast<size_t>(plan_index(row, head))];
  if (role == StateRole::read && !plan.read) return;
  const size_t index = static_cast<size_t>(head);
  const RandomKey random{plan.seed,
                         row.stream,
                         static_cast<uint32_t>(key.layer),
                         static_cast<uint32_t>(key.head_offset + head),
                         static_cast<uint32_t>(key.position),
                         role};
  HeadHealth unused;
  HeadHealth& health = row.health ? row.health[head] : unused;
  std::byte* memory = row.memory ? row.memory + index * row.memory_stride : nullptr;
  if (role == StateRole::read) {
    if (memory) memory += memory_bytes(*plan.recurrence.format, shape);
    encode_head(*plan.read, shape, state, random, span_amax, row.read + index * row.read_stride,
                memory, &health.encode);
    return;
  }
  const uint64_t non_finite = health.encode.non_finite;
  encode_head(plan.recurrence, shape, state, random, span_amax,
              row.recurrence + index * row.recurrence_stride, memory, &health.encode);
  if (health.encode.non_finite > non_finite && health.first_non_finite_position < 0) {
    health.first_non_finite_position = key.position;
  }
}

/// Whether a packed plain FP32 matrix can be used where it lies.
bool usable_in_place(const StateFormat& format, const std::byte* packed) {
  return is_plain_fp32(format) && reinterpret_cast<uintptr_t>(packed) % alignof(float) == 0;
}

}  // namespace

std::vector<ReplaySpan> replay_spans(int pending, int window, int tokens, AdvanceMode mode,
                                     FlushOutput flush_output, int* pending_after) {
  std::vector<ReplaySpan> spans;
  *pending_after = pending;
  if (tokens == 0) return spans;
  if (mode == AdvanceMode::verify) {
    if (tokens > kMaxWindow) {
      refuse("replay: a verify step of " + std::to_string(tokens) + " tokens, expected at most " +
             std::to_string(kMaxWindow));
    }
    const bool fold = pending > 0 && pending + tokens > window;
    if (fold) {
      spans.push_back({-pending, pending, 0, true, false});
      spans.push_back({0, tokens, 0, false, flush_output == FlushOutput::recurrence});
      *pending_after = 0;
    } else {
      spans.push_back({-pending, pending + tokens, 0, false, false});
    }
    return spans;
  }
  int first = -pending;
  if (pending >= window) {
    spans.push_back({first, pending, 0, true, false});
    first = 0;
  }
  while (first < tokens) {
    const int end = std::min(first + window, tokens);
    spans.push_back({first, end - first, std::max(first, 0), end - first == window, false});
    first = spans.back().flush ? end : first;
    *pending_after = end - first;
    if (!spans.back().flush) break;
  }
  return spans;
}

std::vector<ReplaySpan> flush_spans(int pending) {
  if (pending == 0) return {};
  return {{-pending, pending, 0, true, false}};
}

bool spans_layer(const HeadPlan& plan) {
  return needs_layer_amax(*plan.recurrence.format) ||
         (plan.read && needs_layer_amax(*plan.read->format));
}

bool is_plain_fp32(const StateFormat& format) {
  const FormatDescriptor& d = format.descriptor;
  return d.element == ElementKind::fp32 && !d.scaled() && d.zero_point == ZeroPoint::none &&
         d.hadamard == Axis::none && !format.residual && !format.library;
}

void encode_checkpoints(const StateRow& row, StateShape shape, int head, const FlushKey& key,
                        float span_amax, const float* state) {
  encode_role(row, shape, head, StateRole::recurrence, key, span_amax, state);
  encode_role(row, shape, head, StateRole::read, key, span_amax, state);
}

void decode_checkpoint(const StateRow& row, StateShape shape, int head, StateRole role,
                       float* state) {
  const HeadPlan& plan = row.plans[static_cast<size_t>(plan_index(row, head))];
  const size_t index = static_cast<size_t>(head);
  if (role == StateRole::read && plan.read) {
    decode_head(*plan.read->format, shape, row.read + index * row.read_stride, state);
  } else {
    decode_head(*plan.recurrence.format, shape, row.recurrence + index * row.recurrence_stride,
                state);
  }
}

void prefetch_checkpoint(const StateRow& row, StateShape shape, int head, bool state_too) {
  const HeadPlan& plan = row.plans[static_cast<size_t>(plan_index(row, head))];
  const auto ask = [&](const StateFormat& format, const std::byte* packed) {
    if (is_plain_fp32(format) || format.library) return;
    const size_t bytes = packed_bytes(format, shape);
    for (size_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(packed + i, 0, 2);
  };
  const size_t index = static_cast<size_t>(head);
  if (plan.read) ask(*plan.read->format, row.read + index * row.read_stride);
  if (plan.read && !state_too) return;
  ask(*plan.recurrence.format, row.recurrence + index * row.recurrence_stride);
}

void HeadState::bind(const StateRow& row, StateShape shape, int head) {
  row_ = &row;
  plan_ = &row.plans[static_cast<size_t>(plan_index(row, head))];
  shape_ = shape;
  head_ = head;
  state_ = nullptr;
  read_ = nullptr;
  in_place_ = usable_in_place(*plan_->recurrence.format, packed(StateRole::recurrence));
}

std::byte* HeadState::packed(StateRole role) const {
  const size_t index = static_cast<size_t>(head_);
  return role == StateRole::read ? row_->read + index * row_->read_stride
                                 : row_->recurrence + index * row_->recurrence_stride;
}

float* HeadState::scratch(AlignedVector<float>* buffer) const {
  const size_t elements = static_cast<size_t>(shape_.elements());
  if (buffer->size() < elements) buffer->resize(elements);
  return buffer->data();
}

float* HeadState::state() {
  if (state_) return state_;
  if (in_place_) {
    state_ = reinterpret_cast<float*>(packed(StateRole::recurrence));
  } else {
    state_ = scratch(&state_buffer_);
    decode_checkpoint(*row_, shape_, head_, StateRole::recurrence, state_);
  }
  return state_;
}

const float* HeadState::read() {
  if (!plan_->read) return state();
  if (read_) return read_;
  if (usable_in_place(*plan_->read->format, packed(StateRole::read))) {
    read_ = reinterpret_cast<const float*>(packed(StateRole::read));
  } else {
    float* buffer = scratch(&read_buffer_);
    decode_checkpoint(*row_, shape_, head_, StateRole::read, buffer);
    read_ = buffer;
  }
  return read_;
}

void HeadState::flush(const FlushKey& key, float span_amax, bool finite) {
  const float* folded = state();
  read_ = nullptr;
  if (!in_place_) {
    encode_checkpoints(*row_, shape_, head_, key, span_amax, folded);
    state_ = nullptr;
    return;
  }
  if (finite) {
    // Encoding would copy the matrix onto itself and count nothing but its elements.
    if (row_->health) {
      row_->health[head_].encode.elements += static_cast<uint64_t>(shape_.elements());
    }
  } else {
    float* copy = scratch(&state_buffer_);
    std::memcpy(copy, folded, static_cast<size_t>(shape_.elements()) * sizeof(float));
    encode_role(*row_, shape_, head_, StateRole::recurrence, key, span_amax, copy);
  }
  encode_role(*row_, shape_, head_, StateRole::read, key, span_amax, folded);
}

void check_rows(const char* kernel, std::span<const StateRow> rows, size_t input_rows, int heads,
                StateShape shape) {
  const auto place = [&] { return std::string(kernel) + ": "; };
  if (rows.size() != input_rows) {
    refuse(place() + std::to_string(input_rows) + " inputs for " + std::to_string(rows.size()) +
           " rows, expected one each");
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    const StateRow& row = rows[r];
    // Messages are put together only when they are wanted: rows are checked at every token.
    const auto where = [&] { return place() + "row " + std::to_string(r) + ": "; };
    if (row.plans.empty()) refuse(where() + "no head plan, expected at least one");
    if (!row.pending) refuse(where() + "pending is null, expected a count for each plan");
    if (!row.recurrence) refuse(where() + "recurrence is null, expected the packed checkpoints");
    for (size_t p = 0; p < row.plans.size(); ++p) {
      const HeadPlan& plan = row.plans[p];
      const auto of_plan = [&] { return where() + "plan " + std::to_string(p) + ": "; };
      if (plan.window < 1 || plan.window > kMaxWindow) {
        refuse(of_plan() + "window " + std::to_string(plan.window) + ", expected 1 to " +
               std::to_string(kMaxWindow));
      }
      if (!plan.recurrence.format || (plan.read && !plan.read->format)) {
        refuse(of_plan() + "a codec without a format");
      }
      if (row.pending[p] < 0 || row.pending[p] > kMaxWindow) {
        refuse(of_plan() + std::to_string(row.pending[p]) + " pending records, expected 0 to " +
               std::to_string(kMaxWindow));
      }
      const size_t bytes = packed_bytes(*plan.recurrence.format, shape);
      if (row.recurrence_stride < bytes && heads > 1) {
        refuse(of_plan() + "recurrence_stride " + std::to_string(row.recurrence_stride) +
               ", expected at least " + std::to_string(bytes) + " bytes");
      }
      size_t kept = memory_bytes(*plan.recurrence.format, shape);
      if (plan.read) {
        if (!row.read) refuse(of_plan() + "read is null, expected the packed read checkpoints");
        const size_t read_bytes = packed_bytes(*plan.read->format, shape);
        if (row.read_stride < read_bytes && heads > 1) {
          refuse(of_plan() + "read_stride " + std::to_string(row.read_stride) +
                 ", expected at least " + std::to_string(read_bytes) + " bytes");
        }
        kept += memory_bytes(*plan.read->format, shape);
      }
      if (kept > 0 && (!row.memory || (row.memory_stride < kept && heads > 1))) {
        refuse(of_plan() + "the formats keep " + std::to_string(kept) +
               " bytes a head between encodings, expected memory of that size");
      }
    }
    if (!row.plan_of_head) continue;
    for (int h = 0; h < heads; ++h) {
      if (row.plan_of_head[h] >= row.plans.size()) {
        refuse(where() + "head " + std::to_string(h) + " has plan " +
               std::to_string(row.plan_of_head[h]) + ", expected below " +
               std::to_string(row.plans.size()));
      }
    }
  }
}

float round_operand(DotType type, float x) {
  if (type == DotType::fp32 || !std::isfinite(x)) return x;
  const int drop = type == DotType::tf32 ? 13 : 16;
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t half = (1u << (drop - 1)) - 1u + ((u >> drop) & 1u);
  return std::bit_cast<float>((u + half) >> drop << drop);
}

void exp2_array(const float* x, int count, float* result) {
  REPLAYEVAL_SIMD_CALL(exp2_array)(x, count, result);
}

}  // namespace replayeval
