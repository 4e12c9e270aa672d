// Mamba-2 with a head's state in registers: 16 i + 4 p are the columns of a thread, so that it has
// four lanes of every dot product (kernels/mamba2.h). A block, or a cluster of blocks with some of
// the rows each, walks one head of one row.
#pragma once

#include "kernels/mamba2.h"
#include "kernels/row_replay.cuh"

namespace replayeval {

constexpr int kMamba2MostRows = 80;                                   // of a head
constexpr int kMamba2RowThreads = kRowThreads * kMamba2MostRows / 2;  // half of them
constexpr int kMamba2Row = 144;  // of B and C: neighbouring rows lie in different banks

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
    read = state + (matrices > 0 ? 64 * threads : 0);
    end = read + (matrices > 1 ? 64 * threads : 0);
  }
};

/// Rows of a block where a head has `blocks` of them: whole warps.
__host__ __device__ inline int mamba2_block_rows(int head_dim, int blocks) {
  return blocks == 1 ? head_dim : ((head_dim + blocks - 1) / blocks + 7) / 8 * 8;
}

/// Where a head's records lie.
struct Mamba2Records {
  const Mamba2Inputs* in;
  const float *x, *b, *c, *dt;
  int rows;
  bool aligned;

  /// The block has the rows first_row .. of the matrix, row_count of them.
  __device__ Mamba2Records(const Mamba2Layer& layer, const Mamba2Inputs& inputs, int head,
                           int first_row, int row_count)
      : in(&inputs), rows(row_count) {
    const int64_t group = head / (layer.heads / layer.groups);
    x = inputs.x + int64_t{head} * layer.head_dim + first_row;
    b = inputs.b + group * kRowColumns;
    c = inputs.c + group * kRowColumns;
    dt = inputs.dt + head;
    aligned = rows_aligned(x, inputs.x_stride, rows) && rows_aligned(b, inputs.b_stride, 0) &&
              rows_aligned(c, inputs.c_stride, 0);
  }
  /// Starts copying records first .. and queries first_query ..
  __device__ void start(const Mamba2RowLayout& at, float* set, int64_t first, int records,
                        int64_t first_query, int queries) const {
    copy_rows_async<false>(set + at.x, at.p_row, x + first * in->x_stride, in->x_stride, records,
                           rows, aligned);
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
__global__ void __launch_bounds__(kMamba2RowThreads, 3)
    mamba2_eager(const __grid_constant__ Mamba2RowLaunch launch) {
  extern __shared__ __align__(16) float shared_floats[];
  using namespace row_codec;
  const Mamba2Layer& layer = launch.layer;
  DeviceHead head;
  int pending = 0;
  const int row_index = launch.rows[blockIdx.y];
  const int blocks = static_cast<int>(gridDim.x) / layer.heads;
  const int rank = static_cast<int>(blockIdx.x) % blocks;
  if (!bind_head(launch.tables, LayerStep{}, static_cast<int>(blockIdx.x) / blocks, row_index,
                 &head, &pending))
    return;
  const Mamba2Inputs& in = launch.inputs[row_index];
  const int tid = threadIdx.x, own = tid >> 2, part = tid & 3, head_dim = layer.head_dim;
  const int block_rows = mamba2_block_rows(head_dim, blocks), first_row = block_rows * rank;
  const int rows = min(block_rows, head_dim - first_row);
  const bool has_row = own < rows;
  const int row = has_row ? first_row + own : head_dim;
  const Mamba2RowLayout at(block_rows, static_cast<int>(blockDim.x), 2, 0);
  const Mamba2Records records(layer, in, head.head, first_row, rows);
  const int tokens = in.tokens;
  const Role role = role_of(launch.tables, head, StateRole::recurrence);
  HeadMax head_max(shared_floats + at.words, rank, blocks);
  const bool head_span = role.span == Span::head;
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
      const float x = has_row ? set[at.x + j * at.p_row + own] : 0.0f;
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
                            t + 1 == tokens,
                            launch.tables.buckets};
      round_rows<LaneColumns>(role, numbers, &counts, [&](int i, float4 q4) { v[i] = q4; });
    }
  }
  // Rows past the head's end held zeros times records, which may be anything.
  if (!has_row) counts = {};
  finish_health(head, static_cast<uint64_t>(tokens) * rows * kRowColumns, first_odd, tokens,
                counts);
  head_max.finish();
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

/// As scatter_lanes for two sums: threads 0 and 1 of a row get the first, 2 and 3 the second.
__device__ __forceinline__ float halve_lanes(const float4 (&sum)[2], int part) {
  const bool high = part & 2;
  const float4 send = high ? sum[0] : sum[1], keep = high ? sum[1] : sum[0];
  float4 v;
  v.x = keep.x + __shfl_xor_sync(0xFFFFFFFFu, send.x, 2);
  v.y = keep.y + __shfl_xor_sync(0xFFFFFFFFu, send.y, 2);
  v.z = keep.z + __shfl_xor_sync(0xFFFFFFFFu, send.z, 2);
  v.w = keep.w + __shfl_xor_sync(0xFFFFFFFFu, send.w, 2);
  v.x += __shfl_xor_sync(0xFFFFFFFFu, v.x, 1);
  v.y += __shfl_xor_sync(0xFFFFFFFFu, v.y, 1);
  v.z += __shfl_xor_sync(0xFFFFFFFFu, v.z, 1);
  v.w += __shfl_xor_sync(0xFFFFFFFFu, v.w, 1);
  return (v.x + v.z) + (v.y + v.w);
}

/// Windows of up to 16 tokens. A thread has its columns of two rows, half of the head apart, so
/// that what it loads of B and C serves both. The decoded checkpoints lie in shared memory, each
/// thread's own numbers side by side with those of its neighbours.
__global__ void __launch_bounds__(kMamba2RowThreads, 3)
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
  const int tid = threadIdx.x, part = tid & 3, head_dim = layer.head_dim;
  const int half = (head_dim + 1) / 2, threads = static_cast<int>(blockDim.x);
  const int row[2] = {tid >> 2, (tid >> 2) < half ? half + (tid >> 2) : head_dim};
  const bool has_row[2] = {row[0] < half, row[1] < head_dim};
  const bool separate = !head.shared();
  const Mamba2RowLayout at(head_dim, threads, 1, separate ? 2 : 1);
  const Mamba2Records records(layer, in, head.head, 0, head_dim);
  HeadMax head_max(shared_floats + at.words, 0, 1);
  const int step = 4 * threads;  // between a thread's quads: quad i of row r is number 8 r + i
  float* own_state = shared_floats + at.state + 4 * tid;
  float* own_read = shared_floats + (separate ? at.read : at.state) + 4 * tid;
  const float decay_log2 = layer.decay_log2[head.head];
  const float skip = layer.skip ? layer.skip[head.head] : 0.0f;
  const bool has_skip = layer.skip;
  const float *x = shared_floats + at.x, *b = shared_floats + at.b + 4 * part,
              *c = shared_floats + at.c + 4 * part, *dt = shared_floats + at.dt;
  const float* own_x[2] = {x + (has_row[0] ? row[0] : 0), x + (has_row[1] ? row[1] : 0)};
  float *carry = shared_floats + at.carry, *fold = shared_floats + at.fold,
        *decay = shared_floats + at.decay, *weights = shared_floats + at.weights;
  float* y = in.y + int64_t{head.head} * head_dim;
  const int64_t y_stride = in.y_stride;

  SpanWalk walk(pending, head.plan->window, in.tokens, launch.tables.mode, head.plan->flush_output);
  WalkSpan span;
  bool more = walk.next(&span);
  if (!more) return;
  const Role roles[2] = {
      role_of(launch.tables, head, StateRole::recurrence),
      role_of(launch.tables, head, separate ? StateRole::read : StateRole::recurrence)};
#pragma unroll 1
  for (int k = 0; k < (separate ? 4 : 2); ++k) {
    const Role& role = k < 2 ? roles[0] : roles[1];
    float4 v[kRowQuads];
    decode_rows<LaneColumns>(*role.d, head_dim, role.packed,
                             k & 1        ? row[1]
                             : has_row[0] ? row[0]
                                          : head_dim,
                             part, v);
    float* to = (k < 2 ? own_state : own_read) + (k & 1) * kRowQuads * step;
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) store4(to + step * i, v[i]);
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
    if (tid < kRowRecords) decay[tid] = tid < n ? dt[tid] * decay_log2 : 0.0f;
    __syncthreads();
    if (tid < 2 * kRowRecords) {
      const int t = tid & (kRowRecords - 1);
      const bool is_carry = tid < kRowRecords;
      const float power =
          exp2_ordered(sum_between(decay, is_carry ? 0 : t + 1, is_carry ? t : n - 1));
      if (t < n) (is_carry ? carry : fold)[t] = is_carry ? power : power * dt[t];
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
      for (int m = 0; m < kRowQuads; ++m)
        sum = fma4(load4(b + j * kMamba2Row + 16 * m), load4(c + q * kMamba2Row + 16 * m), sum);
      const float product = sum_of_lanes(sum);
      const float power = exp2_ordered(sum_between(decay, j + 1, t));
      if (wanted && part == 0)
        weights[j * kRowRecords + 4 * (q & 3) + (q >> 2)] = (power * dt[j]) * product;
    }
    __syncthreads();

    float out[2][kRowRecords / 4] = {};  // of queries 4 g + part
#pragma unroll
    for (int g = 0; g < kRowRecords / 4; ++g) {
      if (4 * g >= window_queries) break;
      float4 sum[2][4];
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k >> 2][k & 3] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        const float4 v0 = load4(own_read + step * i), v1 = load4(own_read + step * (kRowQuads + i));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float4 query = load4(c + (4 * g + k) * kMamba2Row + 16 * i);
          sum[0][k] = fma4(v0, query, sum[0][k]);
          sum[1][k] = fma4(v1, query, sum[1][k]);
        }
      }
      const float carried = carry[min(first_query + 4 * g + part, n - 1)];
      out[0][g] = carried * scatter_lanes(sum[0], part);
      out[1][g] = carried * scatter_lanes(sum[1], part);
    }
    if (window_queries > 0) {
#pragma unroll 4
      for (int j = 0; j < n; ++j) {
        const float4 w = load4(weights + j * kRowRecords + 4 * part);
        const float from[2] = {own_x[0][j * at.p_row], own_x[1][j * at.p_row]};
        const int t = first_query + part;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (j <= t) out[r][0] = __fmaf_rn(w.x, from[r], out[r][0]);
          if (j <= t + 4) out[r][1] = __fmaf_rn(w.y, from[r], out[r][1]);
          if (j <= t + 8) out[r][2] = __fmaf_rn(w.z, from[r], out[r][2]);
          if (j <= t + 12) out[r][3] = __fmaf_rn(w.w, from[r], out[r][3]);
        }
      }
#pragma unroll
      for (int k = 0; k < kRowRecords / 2; ++k) {
        const int r = k & 1, q = 4 * (k >> 1) + part;
        if (q >= window_queries || !has_row[r]) continue;
        float sum = out[r][k >> 1];
        if (has_skip) sum = __fmaf_rn(skip, own_x[r][(first_query + q) * at.p_row], sum);
        y[(int64_t{span.first_query} + q) * y_stride + row[r]] = sum;
      }
    }
    const bool again = walk.flushes_again(), flush = span.flush;
    const int token = span.end() - 1;
    float largest = 0.0f;
    if (flush) {
      float4 v[2][kRowQuads];
      const float last = carry[n - 1];
#pragma unroll
      for (int i = 0; i < 2 * kRowQuads; ++i) {
        const float4 from = load4(own_state + step * i);
        v[i / kRowQuads][i % kRowQuads] =
            make_float4(last * from.x, last * from.y, last * from.z, last * from.w);
      }
#pragma unroll 2
      for (int j = 0; j < n; ++j) {
        const float f = fold[j];
        const float u0 = has_row[0] ? f * own_x[0][j * at.p_row] : 0.0f,
                    u1 = has_row[1] ? f * own_x[1][j * at.p_row] : 0.0f;
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
          const float4 key = load4(b + j * kMamba2Row + 16 * i);
          v[0][i] = fma1(u0, key, v[0][i]);
          v[1][i] = fma1(u1, key, v[1][i]);
        }
      }
      float4 sum[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        const float4 query = load4(c + (queries - 1) * kMamba2Row + 16 * i);
        sum[0] = fma4(v[0][i], query, sum[0]);
        sum[1] = fma4(v[1][i], query, sum[1]);
      }
      float result = halve_lanes(sum, part);
      const int r = part >> 1;
      if (has_skip) result = __fmaf_rn(skip, (r ? own_x[1] : own_x[0])[(n - 1) * at.p_row], result);
      if ((part & 1) == 0 && (r ? has_row[1] : has_row[0]))
        y[int64_t{token} * y_stride + (r ? row[1] : row[0])] = result;
#pragma unroll
      for (int i = 0; i < 2 * kRowQuads; ++i)
        store4(own_state + step * i, v[i / kRowQuads][i % kRowQuads]);
      if (head_span) {
        float quad[kRowQuads], of_row[2];
        bool odd;
        measure_quads(v[0], quad, &of_row[0], &odd);
        measure_quads(v[1], quad, &of_row[1], &odd);
        largest = fmaxf(of_row[0], of_row[1]);
      }
    }
    more = walk.next(&span);
    __syncthreads();
    if (more)
      records.start(at, shared_floats, span.first, span.records, span.first_query, span.queries());
    if (!flush) continue;
    float head_amax = 0.0f;
    if (head_span) {
      head_max.publish(largest);
      head_amax = head_max.collect();
    }
    // Both rows; the read checkpoint first, since the other takes the folded state's place.
#pragma unroll 1
    for (int k = separate ? 3 : 1; k >= 0; --k) {
      const int r = k & 1;
      float* to = (k > 1 ? own_read : own_state) + r * kRowQuads * step;
      float4 v[kRowQuads];
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) v[i] = load4(own_state + step * (r * kRowQuads + i));
      float quad[kRowQuads];
      bool odd;
      measure_quads(v, quad, &largest, &odd);
      const bool has = r ? has_row[1] : has_row[0];
      odd = odd && has;
      if (odd) first_odd = min(first_odd, token);
      const Numbers numbers{v,
                            quad,
                            largest,
                            head_amax,
                            odd,
                            has ? (r ? row[1] : row[0]) : head_dim,
                            part,
                            head_dim,
                            position + static_cast<uint32_t>(token),
                            !again,
                            launch.tables.buckets};
      ThreadCounts own;
      round_rows<LaneColumns>(k > 1 ? roles[1] : roles[0], numbers, &own,
                              [&](int i, float4 q4) { store4(to + step * i, q4); });
      // Rows past the head's end held zeros times records, which may be anything.
      if (has) counts.add(own);
    }
    encodings += separate ? 2 : 1;
  }
  finish_health(head, encodings * head_dim * kRowColumns, first_odd, in.tokens, counts);
}

}  // namespace replayeval
