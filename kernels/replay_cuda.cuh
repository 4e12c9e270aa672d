// What the state kernels on the device share: a call's rows, plans and formats as tables, one
// head's checkpoints while its spans are walked, and the sums whose order the host's kernels fix
// (kernels/lanes.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "kernels/replay.h"
#include "kernels/span_walk.h"
#include "kernels/state_row.h"
#include "quant/device_formats.cuh"

namespace replayeval {

/// HeadPlan with formats as indices of the call's table.
struct DevicePlan {
  int recurrence = 0;
  int read = -1;  // shared
  bool recurrence_stochastic = false, read_stochastic = false;
  bool spans_layer = false;
  int window = 1;
  FlushOutput flush_output = FlushOutput::recurrence;
  GdnFold gdn_fold = GdnFold::rederive;
  RecordType ring_u = RecordType::fp32;
  RecordType beta = RecordType::fp32;
  DotType dot = DotType::fp32;
  uint64_t seed = 0;
  size_t read_memory = 0;  // offset of the read role's memory
};

struct DeviceRow {
  int64_t position;
  uint32_t stream;
  int first_plan;    // of this row, in `row_plans` and `pending`
  int plan_of_head;  // offset in `head_plans`, or -1: plan 0
  std::byte *recurrence, *read, *memory;
  size_t recurrence_stride, read_stride, memory_stride;
  HeadHealth* health;
};

/// The part of a launch that does not depend on the mixer.
struct ReplayTables {
  const DeviceRow* rows;
  const DevicePlan* plans;
  const int* row_plans;  // index of a plan in `plans`
  const int* pending;
  const uint8_t* head_plans;
  const DeviceFormat* formats;
  const ListBuckets* buckets;  // two a format: FormatTable::buckets
  const float* fixed_scales;
  WalkMode mode;
  int layer, head_offset;
};

/// Formats whose scale spans the layer need all heads folded before the first is encoded: such a
/// plan of a row goes span by span, `fold` leaves S in `unencoded` and its largest magnitude in
/// `amax`, `encode` rounds it.
enum class LayerPass : uint8_t { none, fold, encode };
struct LayerStep {
  LayerPass pass = LayerPass::none;
  int row = 0, plan = 0;  // plan of the row
  int span = 0;
  float* unencoded = nullptr;  // [heads, elements]
  uint32_t* amax = nullptr;
};

/// Builds the tables of one call. Pointers of rows are device memory, but plans, plan_of_head and
/// pending.
class RowTables {
 public:
  RowTables(std::span<const StateRow> rows, StateShape shape, int heads, int layer, int head_offset,
            WalkMode mode);
  void add_to(CallTables* tables);
  ReplayTables on_device(const CallTables& tables) const;

  bool any_residual() const { return any_residual_; }
  /// (row, plan of the row) of the plans that go span by span.
  const std::vector<std::pair<int, int>>& layer_plans() const { return layer_plans_; }

 private:
  std::vector<DeviceRow> rows_;
  std::vector<DevicePlan> plans_;
  std::vector<int> row_plans_, pending_;
  std::vector<uint8_t> head_plans_;
  FormatTable formats_;
  std::vector<std::pair<int, int>> layer_plans_;
  bool any_residual_ = false;
  WalkMode mode_;
  int layer_, head_offset_;
  size_t rows_at_ = 0, plans_at_ = 0, row_plans_at_ = 0, pending_at_ = 0, head_plans_at_ = 0;
};

/// h of every plan of a row after a call; throws as replay_spans.
std::vector<int> pending_after(const StateRow& row, int tokens, AdvanceMode mode);

/// Largest number of records in a span of the call.
int largest_span(std::span<const StateRow> rows, std::span<const int> tokens, WalkMode mode);

// ---------------------------------------------------------------- sums in the host's order

/// exp2_lanes of kernels/lanes.h, operation by operation.
__device__ __forceinline__ float exp2_ordered(float x) {
  x = x > 160.0f ? 160.0f : x;
  x = x < -160.0f ? -160.0f : x;
  const float n = rintf(x);
  const float f = x - n;
  float p = 1.5252733804059841e-05f;
  p = __fmaf_rn(p, f, 1.5403530393381609e-04f);
  p = __fmaf_rn(p, f, 1.3333558146428443e-03f);
  p = __fmaf_rn(p, f, 9.6181291076284772e-03f);
  p = __fmaf_rn(p, f, 5.5504108664821580e-02f);
  p = __fmaf_rn(p, f, 2.4022650695910071e-01f);
  p = __fmaf_rn(p, f, 6.9314718055994531e-01f);
  p = __fmaf_rn(p, f, 1.0f);
  const int whole = static_cast<int>(n), half = whole >> 1;
  return (p * __int_as_float((half + 127) << 23)) * __int_as_float((whole - half + 127) << 23);
}

/// round_operand of kernels/replay.h.
__device__ __forceinline__ float round_operand_device(DotType type, float x) {
  const uint32_t u = __float_as_uint(x);
  if (type == DotType::fp32 || (u & 0x7F800000u) == 0x7F800000u) return x;
  const int drop = type == DotType::tf32 ? 13 : 16;
  const uint32_t half = (1u << (drop - 1)) - 1u + ((u >> drop) & 1u);
  return __uint_as_float((u + half) >> drop << drop);
}

/// Rest of a dot product over 16 lanes, of which each of 4 neighbouring threads has summed 4
/// (thread t lanes 4 t to 4 t + 3): the tree of sum_lanes, lanes i and i + 8, then + 4, + 2, + 1.
/// Every thread of the four gets the sum.
__device__ __forceinline__ float sum_of_lanes(float4 v) {
  v.x += __shfl_xor_sync(0xFFFFFFFFu, v.x, 2);
  v.y += __shfl_xor_sync(0xFFFFFFFFu, v.y, 2);
  v.z += __shfl_xor_sync(0xFFFFFFFFu, v.z, 2);
  v.w += __shfl_xor_sync(0xFFFFFFFFu, v.w, 2);
  v.x += __shfl_xor_sync(0xFFFFFFFFu, v.x, 1);
  v.y += __shfl_xor_sync(0xFFFFFFFFu, v.y, 1);
  v.z += __shfl_xor_sync(0xFFFFFFFFu, v.z, 1);
  v.w += __shfl_xor_sync(0xFFFFFFFFu, v.w, 1);
  return (v.x + v.z) + (v.y + v.w);
}
__device__ __forceinline__ float4 fma4(float4 a, float4 b, float4 c) {
  return make_float4(__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y), __fmaf_rn(a.z, b.z, c.z),
                     __fmaf_rn(a.w, b.w, c.w));
}
__device__ __forceinline__ float4 fma1(float a, float4 b, float4 c) {
  return make_float4(__fmaf_rn(a, b.x, c.x), __fmaf_rn(a, b.y, c.y), __fmaf_rn(a, b.z, c.z),
                     __fmaf_rn(a, b.w, c.w));
}
__device__ __forceinline__ float4 load4(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}
__device__ __forceinline__ void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

// ---------------------------------------------------------------- one head

/// One head's matrices while a block walks its spans: HeadState of kernels/replay.h. All functions
/// are called by the whole block and end with a barrier.
struct DeviceHead {
  const ReplayTables* tables;
  const DeviceRow* row;
  const DevicePlan* plan;
  int head, head_dim, state_dim;
  MatrixView state, read;  // the same matrix when shared
  BlockCodecMemory* codec;
  float* spare;
  bool have_state = false, have_read = false;
  bool codes_only = false;  // the decoded checkpoints are not wanted after a flush, `read` is no
                            // matrix of its own
  ThreadCounts counts;
  uint32_t encodings = 0;

  __device__ bool shared() const { return plan->read < 0; }
  __device__ std::byte* packed(StateRole role) const {
    const size_t h = static_cast<size_t>(head);
    return role == StateRole::read ? row->read + h * row->read_stride
                                   : row->recurrence + h * row->recurrence_stride;
  }
  __device__ void need_state() {
    if (have_state) return;
    decode_block(tables->formats[plan->recurrence].descriptor, head_dim, state_dim,
                 packed(StateRole::recurrence), state, codec);
    have_state = true;
  }
  __device__ void need_read() {
    if (shared()) return need_state();
    if (have_read) return;
    decode_block(tables->formats[plan->read].descriptor, head_dim, state_dim,
                 packed(StateRole::read), read, codec);
    have_read = true;
  }
  __device__ void encode_role(StateRole role, int64_t position, float layer_amax, bool store) {
    const bool recurrence = role == StateRole::recurrence;
    EncodeCall call;
    call.formats = tables->formats;
    call.fixed_scales = tables->fixed_scales;
    call.format = recurrence ? plan->recurrence : plan->read;
    call.stochastic = recurrence ? plan->recurrence_stochastic : plan->read_stochastic;
    call.head_dim = head_dim;
    call.state_dim = state_dim;
    call.head = head;
    call.key = device_philox_key({plan->seed, row->stream, static_cast<uint32_t>(tables->layer),
                                  static_cast<uint32_t>(tables->head_offset + head),
                                  static_cast<uint32_t>(position), role});
    call.layer_amax = layer_amax;
    call.packed = packed(role);
    if (row->memory) {
      call.residual_memory = row->memory + static_cast<size_t>(head) * row->memory_stride +
                             (recurrence ? 0 : plan->read_memory);
    }
    call.spare = spare;
    call.store = store;
    call.round = !codes_only;
    encode_block(call, recurrence || codes_only ? state : read, codec, &counts);
    ++encodings;
  }
  /// Encodes both roles from the folded state and leaves the decoded checkpoints. `store` false: a
  /// later flush of the call overwrites the codes.
  __device__ void flush(int64_t position, float layer_amax, bool store) {
    if (!shared() && codes_only) {
      encode_role(StateRole::read, position, layer_amax, store);
    } else if (!shared()) {
      const int64_t distance = read.x - state.x;  // equal strides
      each_element(state, head_dim, state_dim, [&](float& x) { (&x)[distance] = x; });
      __syncthreads();
      encode_role(StateRole::read, position, layer_amax, store);
      have_read = true;
    }
    const uint32_t before = counts.non_finite;
    encode_role(StateRole::recurrence, position, layer_amax, store);
    if (row->health && __syncthreads_or(counts.non_finite != before)) {
      if (threadIdx.x == 0 && row->health[head].first_non_finite_position < 0) {
        row->health[head].first_non_finite_position = position;
      }
    }
  }
  __device__ void finish() {
    if (!row->health || encodings == 0) return;
    add_health(&row->health[head].encode, static_cast<uint64_t>(encodings) * head_dim * state_dim,
               counts);
  }
  __device__ float amax() {
    float largest = 0;
    each_element(state, head_dim, state_dim,
                 [&](float x) { largest = larger(largest, amax_term(x)); });
    return block_codec::block_max(largest, codec->partial);
  }
  __device__ void copy_unencoded(float* memory, bool to_memory) {
    float* own = memory + static_cast<size_t>(head) * head_dim * state_dim;
    for (int i = threadIdx.x; i < head_dim * state_dim; i += blockDim.x) {
      float& x = state.at(i / state_dim, i % state_dim);
      if (to_memory) {
        own[i] = x;
      } else {
        x = own[i];
      }
    }
    __syncthreads();
  }
};

/// Walks the spans of one head: `step(span)` computes a span's outputs and folds it into head.state
/// if it flushes.
template <class Step>
__device__ void walk_head(DeviceHead& head, SpanWalk walk, const LayerStep& layer, Step&& step) {
  WalkSpan span;
  if (layer.pass == LayerPass::none) {
    while (walk.next(&span)) {
      step(span);
      if (!span.flush) continue;
      const int64_t position = head.row->position + span.end() - 1;
      WalkSpan drafts;
      SpanWalk after = walk;
      if (after.next(&drafts) && drafts.from_unencoded) {
        walk = after;
        step(drafts);
      }
      head.flush(position, 0.0f, !walk.flushes_again());
    }
    head.finish();
    return;
  }
  for (int i = 0; i <= layer.span; ++i) walk.next(&span);
  if (layer.pass == LayerPass::encode) {
    head.copy_unencoded(layer.unencoded, false);
    head.flush(head.row->position + span.end() - 1, __uint_as_float(*layer.amax), true);
    head.finish();
    return;
  }
  step(span);
  if (!span.flush) return;
  WalkSpan drafts;
  if (walk.next(&drafts) && drafts.from_unencoded) step(drafts);
  const float largest = head.amax();
  if (threadIdx.x == 0) atomicMax(layer.amax, __float_as_uint(largest));
  head.copy_unencoded(layer.unencoded, true);
}

/// Binds a head to its block: plan, tables; false when this launch has nothing to do for it.
__device__ inline bool bind_head(const ReplayTables& tables, const LayerStep& layer, int head,
                                 int row_index, DeviceHead* bound, int* pending) {
  const DeviceRow& row = tables.rows[row_index];
  const int own = row.plan_of_head >= 0 ? tables.head_plans[row.plan_of_head + head] : 0;
  const DevicePlan& plan = tables.plans[tables.row_plans[row.first_plan + own]];
  if (layer.pass == LayerPass::none ? plan.spans_layer : own != layer.plan) return false;
  bound->tables = &tables;
  bound->row = &row;
  bound->plan = &plan;
  bound->head = head;
  *pending = tables.pending[row.first_plan + own];
  return true;
}

/// Runs a launch for all plans that go in one pass, then the passes of those that do not.
/// launch(step, rows) starts the kernel.
template <class Launch>
void launch_passes(const RowTables& rows, std::span<const StateRow> state_rows,
                   std::span<const int> tokens, WalkMode mode, float* unencoded, uint32_t* amax,
                   cudaStream_t stream, Launch&& launch) {
  launch(LayerStep{}, static_cast<int>(state_rows.size()));
  for (auto [row, plan] : rows.layer_plans()) {
    const StateRow& state_row = state_rows[static_cast<size_t>(row)];
    const HeadPlan& head_plan = state_row.plans[static_cast<size_t>(plan)];
    SpanWalk walk(state_row.pending[plan], head_plan.window, tokens[static_cast<size_t>(row)], mode,
                  head_plan.flush_output);
    WalkSpan span;
    for (int index = 0; walk.next(&span); ++index) {
      if (span.from_unencoded) break;
      LayerStep step{LayerPass::fold, row, plan, index, unencoded, amax};
      if (span.flush) CUDA_CHECK(cudaMemsetAsync(amax, 0, sizeof(uint32_t), stream));
      launch(step, 1);
      step.pass = LayerPass::encode;
      if (span.flush) launch(step, 1);
    }
  }
}

}  // namespace replayeval
