// Mamba-2 with a head's state in registers: 16 i + 4 p are the columns of a thread, so that it has
// four lanes of every dot product (kernels/mamba2.h). A block walks one head of one row: four
// threads a row of the matrix.
#pragma once

#include "kernels/mamba2.h"
#include "kernels/row_replay.cuh"

namespace replayeval {

constexpr int kMamba2RowThreads = 320;  // rows of 80
constexpr int kMamba2Row = 144;         // of B and C: neighbouring rows lie in different banks

struct Mamba2RowLaunch {
  ReplayTables tables;
  Mamba2Layer layer;
  const Mamba2Inputs* inputs;
  const int* rows;
};

/// Offsets in floats of a block's shared memory.
struct Mamba2RowLayout {
  int p_row, buffer;  // of x; size of one set of records
  int x, b, c, dt;    // within a set
  int sets, words, carry, fold, decay, weights, state, read, end;

  __host__ __device__ Mamba2RowLayout(int head_dim, int threads, int buffers, int matrices) {
    p_row = (head_dim + 3) / 4 * 4;
    x = 0;
    b = x + kRowRecords * p_row;
    c = b + kRowRecords * kMamba2Row;
    dt = c + kRowRecords * kMamba2Row;
    buffer = dt + kRowRecords;
    sets = 0;
    words = buffers * buffer;
    carry = words + 2 * HeadMax::kWords;
    fold = carry + kRowRecords;
    decay = fold + kRowRecords;
    weights = decay + kRowRecords;
    state = weights + kRowRecords * kRowRecords;
    read = state + (matrices > 0 ? 32 * threads : 0);
    end = read + (matrices > 1 ? 32 * threads : 0);
  }
};

/// Where a head's records lie.
struct Mamba2Records {
  const Mamba2Inputs* in;
  const float *x, *b, *c, *dt;
  int head_dim;
  bool aligned;

  __device__ Mamba2Records(const Mamba2Layer& layer, const Mamba2Inputs& inputs, int head)
      : in(&inputs), head_dim(layer.head_dim) {
    const int64_t group = head / (layer.heads / layer.groups);
    x = inputs.x + int64_t{head} * head_dim;
    b = inputs.b + group * kRowColumns;
    c = inputs.c + group * kRowColumns;
    dt = inputs.dt + head;
    aligned = rows_aligned(x, inputs.x_stride, head_dim) && rows_aligned(b, inputs.b_stride, 0) &&
              rows_aligned(c, inputs.c_stride, 0);
  }
  /// Starts copying records first .. and queries first_query ..
  __device__ void start(const Mamba2RowLayout& at, float* set, int64_t first, int records,
                        int64_t first_query, int queries) const {
    copy_rows_async<false>(set + at.x, at.p_row, x + first * in->x_stride, in->x_stride, records,
                           head_dim, aligned);
    copy_rows_async<false>(set + at.b, kMamba2Row, b + first * in->b_stride, in->b_stride, records,
                           kRowColumns, aligned);
    copy_rows_async<false>(set + at.c, kMamba2Row, c + first_query * in->c_stride, in->c_stride,
                           queries, kRowColumns, aligned);
    const int j = static_cast<int>(threadIdx.x);
    if (j < records) copy4_async(set + at.dt + j, dt + (first + j) * in->dt_stride);
  }
};

/// L = 1, one shared checkpoint: S <- 2^(dt a) S + (dt x) B^T, y = S C + D x, S encoded and decoded
/// every token.
__global__ void __launch_bounds__(kMamba2RowThreads, 2)
    mamba2_eager(const __grid_constant__ Mamba2RowLaunch launch) {
  extern __shared__ __align__(16) float shared_floats[];
  using namespace row_codec;
  const Mamba2Layer& layer = launch.layer;
  DeviceHead head;
  int pending = 0;
  const int row_index = launch.rows[blockIdx.y];
  if (!bind_head(launch.tables, LayerStep{}, static_cast<int>(blockIdx.x), row_index, &head,
                 &pending))
    return;
  const Mamba2Inputs& in = launch.inputs[row_index];
  const int tid = threadIdx.x, row = tid >> 2, part = tid & 3, head_dim = layer.head_dim;
  const Mamba2RowLayout at(head_dim, static_cast<int>(blockDim.x), 2, 0);
  const Mamba2Records records(layer, in, head.head);
  const int tokens = in.tokens;
  const Role role = role_of(launch.tables, head, StateRole::recurrence);
  HeadMax head_max(shared_floats + at.words, 0, 1);
  const bool has_row = row < head_dim, head_span = role.span == Span::head;
  const float decay_log2 = layer.decay_log2[head.head];
  const float skip = layer.skip ? layer.skip[head.head] : 0.0f;
  float *carry = shared_floats + at.carry, *y = in.y + int64_t{head.head} * head_dim + row;
  const int64_t y_stride = in.y_stride;
  const bool has_skip = layer.skip;
  float4 v[kRowQuads];
  if (tokens > 0) decode_rows<LaneColumns>(*role.d, head_dim, role.packed, row, part, v);
  records.start(at, shared_floats, 0, min(kRowRecords, tokens), 0, min(kRowRecords, tokens));
  const uint32_t position = static_cast<uint32_t>(head.row->position);
  ThreadCounts counts;
  int first_odd = tokens;
  for (int base = 0; base < tokens; base += kRowRecords) {
    const int count = min(kRowRecords, tokens - base);
    const float* set = shared_floats + (base / kRowRecords & 1) * at.buffer;
    copies_wait();
    __syncthreads();
    if (base + kRowRecords < tokens) {
      const int next = base + kRowRecords, more = min(kRowRecords, tokens - next);
      records.start(at, shared_floats + (next / kRowRecords & 1) * at.buffer, next, more, next,
                    more);
    }
    if (tid < count) carry[tid] = exp2_ordered(0.0f + set[at.dt + tid] * decay_log2);
    __syncthreads();
    for (int j = 0; j < count; ++j) {
      const int t = base + j;
      const float x = has_row ? set[at.x + j * at.p_row + row] : 0.0f;
      const float u = set[at.dt + j] * x, c = carry[j];
      const float* b = set + at.b + j * kMamba2Row + 4 * part;
      const float* q = set + at.c + j * kMamba2Row + 4 * part;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        v[i] =
            fma1(u, load4(b + 16 * i), make_float4(c * v[i].x, c * v[i].y, c * v[i].z, c * v[i].w));
      }
      float quad[kRowQuads];
      float largest;
      bool odd;
      measure_quads(v, quad, &largest, &odd);
      odd = odd && has_row;
      if (odd) first_odd = min(first_odd, t);
      if (head_span) head_max.publish(largest);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) sum = fma4(v[i], load4(q + 16 * i), sum);
      float out = sum_of_lanes(sum);
      if (has_skip) out = __fmaf_rn(skip, x, out);
      if (part == 0 && has_row) *y = out;
      y += y_stride;
      const float head_amax = head_span ? head_max.collect() : 0.0f;
      const Numbers numbers{v,
                            quad,
                            largest,
                            head_amax,
                            odd,
                            row,
                            part,
                            head_dim,
                            position + static_cast<uint32_t>(t),
                            t + 1 == tokens};
      round_rows<LaneColumns>(role, numbers, &counts, [&](int i, float4 q4) { v[i] = q4; });
    }
  }
  // Rows past the head's end held zeros times records, which may be anything.
  if (!has_row) counts = {};
  finish_health(head, static_cast<uint64_t>(tokens) * head_dim * kRowColumns, first_odd, tokens,
                counts);
}

/// Sums over lanes of four queries: thread `part` of a row gets query `part`'s.
__device__ __forceinline__ float scatter_lanes(const float4 (&sum)[4], int part) {
  const bool high = part & 2, odd = part & 1;
  float4 half[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float4 send = high ? sum[k] : sum[k + 2], keep = high ? sum[k + 2] : sum[k];
    half[k].x = keep.x + __shfl_xor_sync(0xFFFFFFFFu, send.x, 2);
    half[k].y = keep.y + __shfl_xor_sync(0xFFFFFFFFu, send.y, 2);
    half[k].z = keep.z + __shfl_xor_sync(0xFFFFFFFFu, send.z, 2);
    half[k].w = keep.w + __shfl_xor_sync(0xFFFFFFFFu, send.w, 2);
  }
  const float4 send = odd ? half[0] : half[1], keep = odd ? half[1] : half[0];
  float4 v;
  v.x = keep.x + __shfl_xor_sync(0xFFFFFFFFu, send.x, 1);
  v.y = keep.y + __shfl_xor_sync(0xFFFFFFFFu, send.y, 1);
  v.z = keep.z + __shfl_xor_sync(0xFFFFFFFFu, send.z, 1);
  v.w = keep.w + __shfl_xor_sync(0xFFFFFFFFu, send.w, 1);
  return (v.x + v.z) + (v.y + v.w);
}

/// Windows of up to 16 tokens. The decoded checkpoints lie in shared memory, each thread's own
/// numbers side by side with those of its neighbours.
__global__ void __launch_bounds__(kMamba2RowThreads, 2)
    mamba2_windows(const __grid_constant__ Mamba2RowLaunch launch) {
  extern __shared__ __align__(16) float shared_floats[];
  using namespace row_codec;
  const Mamba2Layer& layer = launch.layer;
  DeviceHead head;
  int pending = 0;
  const int row_index = launch.rows[blockIdx.y];
  if (!bind_head(launch.tables, LayerStep{}, static_cast<int>(blockIdx.x), row_index, &head,
                 &pending))
    return;
  const Mamba2Inputs& in = launch.inputs[row_index];
  const int tid = threadIdx.x, row = tid >> 2, part = tid & 3, head_dim = layer.head_dim;
  const int threads = static_cast<int>(blockDim.x);
  const bool separate = !head.shared();
  const Mamba2RowLayout at(head_dim, threads, 1, 2);
  const Mamba2Records records(layer, in, head.head);
  HeadMax head_max(shared_floats + at.words, 0, 1);
  float* own_state = shared_floats + at.state + 4 * tid;  // quad i at + 4 threads i
  float* own_read = shared_floats + (separate ? at.read : at.state) + 4 * tid;
  const bool has_row = row < head_dim;
  const float decay_log2 = layer.decay_log2[head.head];
  const float skip = layer.skip ? layer.skip[head.head] : 0.0f;
  const float *x = shared_floats + at.x, *b = shared_floats + at.b, *c = shared_floats + at.c,
              *dt = shared_floats + at.dt;
  float *carry = shared_floats + at.carry, *fold = shared_floats + at.fold,
        *decay = shared_floats + at.decay, *weights = shared_floats + at.weights;
  float* y = in.y + int64_t{head.head} * head_dim + row;

  SpanWalk walk(pending, head.plan->window, in.tokens, launch.tables.mode, head.plan->flush_output);
  WalkSpan span;
  bool more = walk.next(&span);
  if (!more) return;
  const Role roles[2] = {
      role_of(launch.tables, head, StateRole::recurrence),
      role_of(launch.tables, head, separate ? StateRole::read : StateRole::recurrence)};
  {
    float4 v[kRowQuads];
    decode_rows<LaneColumns>(*roles[0].d, head_dim, roles[0].packed, row, part, v);
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) store4(own_state + 4 * threads * i, v[i]);
    if (separate) {
      decode_rows<LaneColumns>(*roles[1].d, head_dim, roles[1].packed, row, part, v);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) store4(own_read + 4 * threads * i, v[i]);
    }
  }
  const bool head_span = roles[0].span == Span::head || roles[1].span == Span::head;
  records.start(at, shared_floats, span.first, span.records, span.first_query, span.queries());
  const uint32_t position = static_cast<uint32_t>(head.row->position);
  ThreadCounts counts;
  int first_odd = in.tokens;
  uint64_t encodings = 0;
  while (more) {
    const int n = span.records, queries = span.queries(), first_query = n - queries;
    const int window_queries = queries - (span.flush ? 1 : 0);
    copies_wait();
    __syncthreads();
    if (tid < n) decay[tid] = dt[tid] * decay_log2;
    __syncthreads();
    if (tid < 2 * kRowRecords) {
      const int t = tid & (kRowRecords - 1);
      if (t < n) {
        float sum = 0.0f;
        if (tid < kRowRecords) {
          for (int k = 0; k <= t; ++k) sum = sum + decay[k];
          carry[t] = exp2_ordered(sum);
        } else {
          for (int k = t + 1; k < n; ++k) sum = sum + decay[k];
          fold[t] = exp2_ordered(sum) * dt[t];
        }
      }
    }
    // (2^D(j, t) dt_j) (B_j . C_t) at weights[j, t mod 4, t / 4] (t counted from the first query):
    // a pair for every group of four threads; two rows of the triangle have one length together.
    const int across = first_query == 0 ? window_queries + 1 : n;
    const int pairs = first_query == 0 ? (window_queries + 1) / 2 * across : window_queries * n;
    for (int base = 0; base < pairs; base += threads >> 2) {
      const int i = base + (tid >> 2);
      int q = i / across, j = i % across;
      if (first_query == 0 && j > q) {
        j = j - q - 1;
        q = window_queries - 1 - q;
      }
      const int t = first_query + q;
      const bool wanted = i < pairs && j <= t;
      q = wanted ? q : 0, j = wanted ? j : 0;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int m = 0; m < kRowQuads; ++m) {
        sum = fma4(load4(b + j * kMamba2Row + 16 * m + 4 * part),
                   load4(c + q * kMamba2Row + 16 * m + 4 * part), sum);
      }
      const float product = sum_of_lanes(sum);
      float d = 0.0f;
      for (int k = j + 1; k <= t; ++k) d = d + decay[k];
      if (wanted && part == 0)
        weights[j * kRowRecords + 4 * (q & 3) + (q >> 2)] = (exp2_ordered(d) * dt[j]) * product;
    }
    __syncthreads();

    float4 v[kRowQuads];
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) v[i] = load4(own_read + 4 * threads * i);
    const int own_row = has_row ? row : 0;
    float out[kRowRecords / 4] = {};  // of queries 4 g + part
#pragma unroll
    for (int g = 0; g < kRowRecords / 4; ++g) {
      if (4 * g >= window_queries) break;
      float4 sum[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sum[k] = fma4(v[i], load4(c + (4 * g + k) * kMamba2Row + 16 * i + 4 * part), sum[k]);
      }
      const float z = scatter_lanes(sum, part);
      out[g] = carry[min(first_query + 4 * g + part, n - 1)] * z;
    }
    if (window_queries > 0) {
      for (int j = 0; j < n; ++j) {
        const float4 w = load4(weights + j * kRowRecords + 4 * part);
        const float from = x[j * at.p_row + own_row];
        const int t = first_query + part;
        if (j <= t) out[0] = __fmaf_rn(w.x, from, out[0]);
        if (j <= t + 4) out[1] = __fmaf_rn(w.y, from, out[1]);
        if (j <= t + 8) out[2] = __fmaf_rn(w.z, from, out[2]);
        if (j <= t + 12) out[3] = __fmaf_rn(w.w, from, out[3]);
      }
#pragma unroll
      for (int g = 0; g < kRowRecords / 4; ++g) {
        const int q = 4 * g + part;
        if (q >= window_queries || !has_row) continue;
        float sum = out[g];
        if (layer.skip) sum = __fmaf_rn(skip, x[(first_query + q) * at.p_row + own_row], sum);
        y[(int64_t{span.first_query} + q) * in.y_stride] = sum;
      }
    }
    const bool again = walk.flushes_again(), flush = span.flush;
    const int token = span.end() - 1;
    if (flush) {
      if (separate) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) v[i] = load4(own_state + 4 * threads * i);
      }
      const float last = carry[n - 1];
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        v[i] = make_float4(last * v[i].x, last * v[i].y, last * v[i].z, last * v[i].w);
      }
#pragma unroll 2
      for (int j = 0; j < n; ++j) {
        const float u = has_row ? fold[j] * x[j * at.p_row + own_row] : 0.0f;
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i)
          v[i] = fma1(u, load4(b + j * kMamba2Row + 16 * i + 4 * part), v[i]);
      }
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i)
        sum = fma4(v[i], load4(c + (queries - 1) * kMamba2Row + 16 * i + 4 * part), sum);
      float result = sum_of_lanes(sum);
      if (layer.skip) result = __fmaf_rn(skip, x[(n - 1) * at.p_row + own_row], result);
      if (part == 0 && has_row) y[int64_t{token} * in.y_stride] = result;
    }
    more = walk.next(&span);
    __syncthreads();
    if (more)
      records.start(at, shared_floats, span.first, span.records, span.first_query, span.queries());
    if (!flush) continue;
    float quad[kRowQuads];
    float largest;
    bool odd;
    measure_quads(v, quad, &largest, &odd);
    odd = odd && has_row;
    if (odd) first_odd = min(first_odd, token);
    float head_amax = 0.0f;
    if (head_span) {
      head_max.publish(largest);
      head_amax = head_max.collect();
    }
    const Numbers numbers{v,         quad,     largest,
                          head_amax, odd,      row,
                          part,      head_dim, position + static_cast<uint32_t>(token),
                          !again};
#pragma unroll 1
    for (int k = separate ? 1 : 0; k >= 0; --k) {
      float* to = k == 1 ? own_read : own_state;
      round_rows<LaneColumns>(k == 1 ? roles[1] : roles[0], numbers, &counts,
                              [&](int i, float4 q4) { store4(to + 4 * threads * i, q4); });
      ++encodings;
    }
  }
  if (!has_row) counts = {};
  finish_health(head, encodings * head_dim * kRowColumns, first_odd, in.tokens, counts);
}

}  // namespace replayeval
