// GDN with a head's state in registers: columns 32 p .. 32 p + 31 of the key dimension are a
// thread's, so that a sum over them (kernels/gdn.h: one chain, ascending) passes through the four
// threads of a row in turn. A head may be a cluster of blocks, each with some of its rows.
#pragma once

#include "kernels/gdn.h"
#include "kernels/row_replay.cuh"

namespace replayeval {

constexpr int kGdnRows = 64;       // of a block, at most
constexpr int kGdnEagerRows = 32;  // of a block that is one of a cluster
constexpr int kGdnRowThreads = kRowThreads * kGdnRows;
constexpr int kGdnWindowThreads = kGdnRowThreads / 2;
constexpr int kGdnKeyRow = 156;  // 4 numbers of room behind each 32: see copy_rows_async

struct GdnRowLaunch {
  ReplayTables tables;
  GdnLayer layer;
  float query_scale;
  const GdnInputs* inputs;
  const int* rows;
};

/// Offsets in floats of a block's shared memory.
struct GdnRowLayout {
  int keys, queries, v, beta, g, buffer;  // within a set of records
  int sets, words, carried, weights, key_weights, query_weights, read_k, read_q, state, read, end;

  __host__ __device__ GdnRowLayout(int buffers, int matrices) {
    keys = 0;
    queries = keys + kRowRecords * kGdnKeyRow;
    v = queries + kRowRecords * kGdnKeyRow;
    beta = v + kRowRecords * kGdnRows;
    g = beta + kRowRecords;
    buffer = g + kRowRecords;
    sets = 0;
    words = buffers * buffer;
    carried = words + 2 * HeadMax::kWords;
    weights = carried + kRowRecords;
    key_weights = weights + kRowRecords;
    const int windows = matrices > 0 ? 1 : 0;
    query_weights = key_weights + windows * kRowRecords * kRowRecords;
    read_k = query_weights + windows * kRowRecords * kRowRecords;
    read_q = read_k + windows * kRowRecords * kGdnRows;
    state = read_q + windows * kRowRecords * kGdnRows;
    read = state + (matrices > 0 ? 32 * kGdnRowThreads : 0);
    end = read + (matrices > 1 ? 32 * kGdnRowThreads : 0);
  }
};

/// Where a head's records lie; `first_row`, `rows`: of the matrix, those of the block.
struct GdnRecords {
  const GdnInputs* in;
  const float *k, *q, *v, *beta, *g;
  int rows;
  bool aligned;

  __device__ GdnRecords(const GdnLayer& layer, const GdnInputs& inputs, int head, int first_row,
                        int row_count)
      : in(&inputs), rows(row_count) {
    const int64_t key_head = head / (layer.value_heads / layer.key_heads);
    k = inputs.k + key_head * kRowColumns;
    q = inputs.q + key_head * kRowColumns;
    v = inputs.v + int64_t{head} * layer.value_dim + first_row;
    beta = inputs.beta + head;
    g = inputs.decay_log2 + head;
    aligned = rows_aligned(k, inputs.k_stride, 0) && rows_aligned(q, inputs.q_stride, 0) &&
              rows_aligned(v, inputs.v_stride, row_count);
  }
  __device__ void start(const GdnRowLayout& at, float* set, int64_t first, int records,
                        int64_t first_query, int queries) const {
    copy_rows_async<true>(set + at.keys, kGdnKeyRow, k + first * in->k_stride, in->k_stride,
                          records, kRowColumns, aligned);
    copy_rows_async<true>(set + at.queries + (first_query - first) * kGdnKeyRow, kGdnKeyRow,
                          q + first_query * in->q_stride, in->q_stride, queries, kRowColumns,
                          aligned);
    copy_rows_async<false>(set + at.v, kGdnRows, v + first * in->v_stride, in->v_stride, records,
                           rows, aligned);
    const int j = static_cast<int>(threadIdx.x);
    if (j < records) {
      copy4_async(set + at.beta + j, beta + (first + j) * in->beta_stride);
      copy4_async(set + at.g + j, g + (first + j) * in->decay_stride);
    }
  }
};

/// x (scale / sqrt(sum x^2 + 1e-6)) in place for the rows first .. count - 1: sixteen threads a
/// row, lane l summing n = l, l + 16, ..., then the tree of lanes i + 8, + 4, + 2, + 1.
__device__ __forceinline__ void normalise_rows(float* rows, int first, int count, float scale) {
  const int lane = threadIdx.x & 15;
  for (int base = 0; base < kRowRecords; base += static_cast<int>(blockDim.x >> 4)) {
    const int t = base + static_cast<int>(threadIdx.x >> 4);
    const bool wanted = t >= first && t < count;
    float* x = rows + t * kGdnKeyRow + lane;
    float kept[8], squares = 0.0f;
#pragma unroll
    for (int m = 0; m < 8; ++m) kept[m] = wanted ? x[16 * m + 4 * (m >> 1)] : 0.0f;
#pragma unroll
    for (int m = 0; m < 8; ++m) squares = __fmaf_rn(kept[m], kept[m], squares);
    for (int d = 8; d > 0; d >>= 1) squares = squares + __shfl_xor_sync(0xFFFFFFFFu, squares, d);
    if (!wanted) continue;
    const float factor = scale / sqrtf(squares + 1e-6f);
#pragma unroll
    for (int m = 0; m < 8; ++m) x[16 * m + 4 * (m >> 1)] = kept[m] * factor;
  }
}

/// sum + a . b over the thread's run of columns, ascending.
__device__ __forceinline__ float run_chain(const float4 (&a)[kRowQuads],
                                           const float4 (&b)[kRowQuads], float sum) {
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    sum = __fmaf_rn(a[i].x, b[i].x, sum);
    sum = __fmaf_rn(a[i].y, b[i].y, sum);
    sum = __fmaf_rn(a[i].z, b[i].z, sum);
    sum = __fmaf_rn(a[i].w, b[i].w, sum);
  }
  return sum;
}
/// The whole row's sum, to its four threads.
__device__ __forceinline__ float row_chain(const float4 (&a)[kRowQuads],
                                           const float4 (&b)[kRowQuads]) {
  float sum = 0.0f;
#pragma unroll 1
  for (int stage = 0; stage < kRowThreads; ++stage)
    sum = __shfl_sync(0xFFFFFFFFu, run_chain(a, b, sum), stage, kRowThreads);
  return sum;
}
__device__ __forceinline__ void load_run(const float* from, float4 (&to)[kRowQuads]) {
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) to[i] = load4(from + 4 * i);
}

/// L = 1, one shared checkpoint: u = beta (v - 2^g (S k)), S <- 2^g S + u k^T, o = S q, S encoded
/// and decoded every token.
__global__ void __launch_bounds__(kGdnRowThreads, 2)
    gdn_eager(const __grid_constant__ GdnRowLaunch launch) {
  extern __shared__ __align__(16) float shared_floats[];
  using namespace row_codec;
  const GdnLayer& layer = launch.layer;
  DeviceHead head;
  int pending = 0;
  const int row_index = launch.rows[blockIdx.y];
  const int blocks = static_cast<int>(gridDim.x) / layer.value_heads;
  const int rank = static_cast<int>(blockIdx.x) % blocks;
  if (!bind_head(launch.tables, LayerStep{}, static_cast<int>(blockIdx.x) / blocks, row_index,
                 &head, &pending))
    return;
  const GdnInputs& in = launch.inputs[row_index];
  const int tid = threadIdx.x, own = tid >> 2, part = tid & 3, value_dim = layer.value_dim;
  const int first_row = static_cast<int>(blockDim.x >> 2) * rank, row = first_row + own;
  const GdnRowLayout at(2, 0);
  const int rows = min(static_cast<int>(blockDim.x >> 2), value_dim - first_row);
  const GdnRecords records(layer, in, head.head, first_row, rows);
  const int tokens = in.tokens;
  const Role role = role_of(launch.tables, head, StateRole::recurrence);
  HeadMax head_max(shared_floats + at.words, rank, blocks);
  const bool has_row = row < value_dim, head_span = role.span == Span::head;
  float* carried = shared_floats + at.carried;
  float* u_out = in.u + int64_t{head.head} * value_dim + row;
  float* o_out = in.o + int64_t{head.head} * value_dim + row;
  const int64_t u_stride = in.u_stride, o_stride = in.o_stride;
  float4 s[kRowQuads];
  if (tokens > 0) decode_rows<RunColumns>(*role.d, value_dim, role.packed, row, part, s);
  records.start(at, shared_floats, 0, min(kRowRecords, tokens), 0, min(kRowRecords, tokens));
  const uint32_t position = static_cast<uint32_t>(head.row->position);
  ThreadCounts counts;
  int first_odd = tokens;
  for (int base = 0; base < tokens; base += kRowRecords) {
    const int count = min(kRowRecords, tokens - base);
    float* set = shared_floats + (base / kRowRecords & 1) * at.buffer;
    copies_wait();
    __syncthreads();
    if (base + kRowRecords < tokens) {
      const int next = base + kRowRecords, more = min(kRowRecords, tokens - next);
      records.start(at, shared_floats + (next / kRowRecords & 1) * at.buffer, next, more, next,
                    more);
    }
    normalise_rows(set + at.keys, 0, count, 1.0f);
    normalise_rows(set + at.queries, 0, count, launch.query_scale);
    if (tid < count) carried[tid] = exp2_ordered(0.0f + set[at.g + tid]);
    __syncthreads();
    for (int j = 0; j < count; ++j) {
      const int t = base + j;
      float4 k[kRowQuads];
      load_run(set + at.keys + j * kGdnKeyRow + 36 * part, k);
      const float v = has_row ? set[at.v + j * kGdnRows + own] : 0.0f;
      const float c = carried[j];
      const float rest = __fmaf_rn(-c, row_chain(k, s), v);
      const float u = has_row ? set[at.beta + j] * rest : 0.0f;
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        s[i] = fma1(u, k[i], make_float4(c * s[i].x, c * s[i].y, c * s[i].z, c * s[i].w));
      }
      float quad[kRowQuads];
      float largest;
      bool odd;
      measure_quads(s, quad, &largest, &odd);
      odd = odd && has_row;
      if (odd) first_odd = min(first_odd, t);
      if (head_span) head_max.publish(largest);
      load_run(set + at.queries + j * kGdnKeyRow + 36 * part, k);
      const float o = row_chain(k, s);
      if (part == 0 && has_row) {
        *u_out = u;
        *o_out = o;
      }
      u_out += u_stride;
      o_out += o_stride;
      const float head_amax = head_span ? head_max.collect() : 0.0f;
      const Numbers numbers{s,
                            quad,
                            largest,
                            head_amax,
                            odd,
                            row,
                            part,
                            value_dim,
                            position + static_cast<uint32_t>(t),
                            t + 1 == tokens,
                            launch.tables.buckets};
      round_rows<RunColumns>(role, numbers, &counts, [&](int i, float4 q4) { s[i] = q4; });
    }
  }
  if (!has_row) counts = {};
  finish_health(head, static_cast<uint64_t>(tokens) * rows * kRowColumns, first_odd, tokens,
                counts);
  head_max.finish();
}

/// Windows of up to 16 tokens; a thread has its columns of two rows and its checkpoints in shared
/// memory as in mamba2_windows.
__global__ void __launch_bounds__(kGdnWindowThreads, 3)
    gdn_windows(const __grid_constant__ GdnRowLaunch launch) {
  extern __shared__ __align__(16) float shared_floats[];
  using namespace row_codec;
  const GdnLayer& layer = launch.layer;
  DeviceHead head;
  int pending = 0;
  const int row_index = launch.rows[blockIdx.y];
  const int blocks = static_cast<int>(gridDim.x) / layer.value_heads;
  const int rank = static_cast<int>(blockIdx.x) % blocks;
  if (!bind_head(launch.tables, LayerStep{}, static_cast<int>(blockIdx.x) / blocks, row_index,
                 &head, &pending))
    return;
  const GdnInputs& in = launch.inputs[row_index];
  SpanWalk walk(pending, head.plan->window, in.tokens, launch.tables.mode, head.plan->flush_output);
  WalkSpan span;
  bool more = walk.next(&span);
  if (!more) return;
  constexpr int kHalf = kGdnRows / 2, kThreads = kGdnWindowThreads;
  const int tid = threadIdx.x, own = tid >> 2, part = tid & 3, value_dim = layer.value_dim;
  const int row[2] = {kGdnRows * rank + own, kGdnRows * rank + kHalf + own};
  const bool has_row[2] = {row[0] < value_dim, row[1] < value_dim};
  const bool separate = !head.shared();
  const GdnRowLayout at(1, separate ? 2 : 1);
  const int rows = min(kGdnRows, value_dim - kGdnRows * rank);
  const GdnRecords records(layer, in, head.head, kGdnRows * rank, rows);
  HeadMax head_max(shared_floats + at.words, rank, blocks);
  constexpr int kStep = 4 * kThreads;  // between a thread's quads, as in mamba2_windows
  float* own_state = shared_floats + at.state + 4 * tid;
  float* own_read = shared_floats + (separate ? at.read : at.state) + 4 * tid;
  float *keys = shared_floats + at.keys, *queries = shared_floats + at.queries;
  const float *vs = shared_floats + at.v + own, *beta = shared_floats + at.beta,
              *g = shared_floats + at.g;
  float *carried = shared_floats + at.carried, *weights = shared_floats + at.weights,
        *key_weights = shared_floats + at.key_weights,
        *query_weights = shared_floats + at.query_weights,
        *read_k = shared_floats + at.read_k + own, *read_q = shared_floats + at.read_q + own;
  float* u_out = in.u + int64_t{head.head} * value_dim;
  float* o_out = in.o + int64_t{head.head} * value_dim;
  const int64_t u_stride = in.u_stride, o_stride = in.o_stride;

  const Role roles[2] = {
      role_of(launch.tables, head, StateRole::recurrence),
      role_of(launch.tables, head, separate ? StateRole::read : StateRole::recurrence)};
#pragma unroll 1
  for (int k = 0; k < (separate ? 4 : 2); ++k) {
    const Role& role = k < 2 ? roles[0] : roles[1];
    float4 v[kRowQuads];
    decode_rows<RunColumns>(*role.d, value_dim, role.packed, k & 1 ? row[1] : row[0], part, v);
    float* to = (k < 2 ? own_state : own_read) + (k & 1) * kRowQuads * kStep;
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) store4(to + kStep * i, v[i]);
  }
  const bool head_span = roles[0].span == Span::head || roles[1].span == Span::head;
  records.start(at, shared_floats, span.first, span.records, span.first_query, span.queries());
  const uint32_t position = static_cast<uint32_t>(head.row->position);
  ThreadCounts counts;
  int first_odd = in.tokens;
  uint64_t encodings = 0;
  while (more) {
    const int n = span.records, new_first = span.first_query - span.first;
    const int64_t first = span.first;
    const bool flush = span.flush;
    const int read_end = flush ? n - 1 : n;
    copies_wait();
    __syncthreads();
    normalise_rows(keys, 0, n, 1.0f);
    normalise_rows(queries, new_first, n, launch.query_scale);
    if (tid < 2 * kRowRecords) {
      const int t = tid & (kRowRecords - 1);
      const bool is_carried = tid < kRowRecords;
      const float power =
          exp2_ordered(sum_between(g, is_carried ? 0 : t + 1, is_carried ? t : n - 1));
      if (t < n) (is_carried ? carried : weights)[t] = power;
    }
    __syncthreads();
    // k_t . k_j (j < t) and q_t . k_j (j <= t) with their decays, a chain each: key_weights at
    // [j, t], query_weights at [j, t mod 4, t / 4].
    static_assert(2 * kThreads == kRowRecords * kRowRecords);
    {
      // A thread takes rows a and 15 - a of the square; what lies right of the diagonal are pairs
      // of keys.
      const int a = tid / kRowRecords, b = tid % kRowRecords;
      const float *from[2], *key[2];
      int t[2], j[2];
      bool query[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int line = k == 0 ? a : kRowRecords - 1 - a;
        query[k] = b <= line;
        t[k] = query[k] ? line : b;
        j[k] = query[k] ? b : line;
        from[k] = (query[k] ? queries : keys) + t[k] * kGdnKeyRow;
        key[k] = keys + j[k] * kGdnKeyRow;
      }
      float dot[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int run = 0; run < 4 * 36; run += 36) {
#pragma unroll
        for (int m = 0; m < 32; m += 4) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float4 x = load4(from[k] + run + m), y = load4(key[k] + run + m);
            dot[k] = __fmaf_rn(
                x.w, y.w, __fmaf_rn(x.z, y.z, __fmaf_rn(x.y, y.y, __fmaf_rn(x.x, y.x, dot[k]))));
          }
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float weighted = exp2_ordered(sum_between(g, j[k] + 1, t[k])) * dot[k];
        if (query[k]) {
          query_weights[j[k] * kRowRecords + 4 * (t[k] & 3) + (t[k] >> 2)] = weighted;
        } else {
          key_weights[j[k] * kRowRecords + t[k]] = weighted;
        }
      }
    }
    const int token = span.end() - 1;
    float u[2][kRowRecords];
    // From the checkpoint that is read: corrections and outputs up to read_end; a shared one gives
    // the last correction too. Then those of the fold from R, where it is another or where earlier
    // corrections come from the ring.
    const bool again_from_state = flush && (separate || new_first > 0);
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1 && !again_from_state) break;
      const bool outputs = pass == 0;
      {
        const float* matrix = pass == 0 ? own_read : own_state;
        float4 s[2][kRowQuads];
#pragma unroll
        for (int i = 0; i < 2 * kRowQuads; ++i)
          s[i / kRowQuads][i % kRowQuads] = load4(matrix + kStep * i);
        // Thread `part` adds its columns to the sums of token step - part.
        float sum_k[2] = {0.0f, 0.0f}, sum_q[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (int step = 0; step < n + kRowThreads - 1; ++step) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            sum_k[r] = __shfl_up_sync(0xFFFFFFFFu, sum_k[r], 1, kRowThreads);
            sum_q[r] = __shfl_up_sync(0xFFFFFFFFu, sum_q[r], 1, kRowThreads);
            if (part == 0) sum_k[r] = sum_q[r] = 0.0f;
          }
          const int t = step - part, in_range = min(max(t, 0), n - 1);
          const float* key = keys + in_range * kGdnKeyRow + 36 * part;
          const float* query = queries + in_range * kGdnKeyRow + 36 * part;
#pragma unroll
          for (int i = 0; i < kRowQuads; ++i) {
            const float4 k = load4(key + 4 * i);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              sum_k[r] = __fmaf_rn(k.x, s[r][i].x, sum_k[r]);
              sum_k[r] = __fmaf_rn(k.y, s[r][i].y, sum_k[r]);
              sum_k[r] = __fmaf_rn(k.z, s[r][i].z, sum_k[r]);
              sum_k[r] = __fmaf_rn(k.w, s[r][i].w, sum_k[r]);
            }
            if (outputs) {
              const float4 q = load4(query + 4 * i);
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                sum_q[r] = __fmaf_rn(q.x, s[r][i].x, sum_q[r]);
                sum_q[r] = __fmaf_rn(q.y, s[r][i].y, sum_q[r]);
                sum_q[r] = __fmaf_rn(q.z, s[r][i].z, sum_q[r]);
                sum_q[r] = __fmaf_rn(q.w, s[r][i].w, sum_q[r]);
              }
            }
          }
          if (part == kRowThreads - 1 && t >= 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              read_k[t * kGdnRows + r * kHalf] = sum_k[r];
              if (outputs) read_q[t * kGdnRows + r * kHalf] = sum_q[r];
            }
          }
        }
      }
      if (pass == 0) {
        __syncthreads();  // the weights of all threads
      } else {
        __syncwarp();
      }
      // u_t = beta_t (v_t - carried_t read_k_t - sum_{j < t} w_tj u_j), j after j.
#pragma unroll
      for (int t = 0; t < kRowRecords; ++t) {
        if (t >= n) break;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int place = t * kGdnRows + r * kHalf;
          u[r][t] = __fmaf_rn(-carried[t], read_k[place], vs[place]);
        }
      }
#pragma unroll
      for (int j = 0; j < kRowRecords; ++j) {
        if (j >= n) break;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (outputs && j < new_first) {
            u[r][j] = has_row[r] ? u_out[(first + j) * u_stride + row[r]] : 0.0f;
          } else {
            u[r][j] = beta[j] * u[r][j];
          }
        }
#pragma unroll
        for (int t4 = (j + 1) / 4 * 4; t4 < kRowRecords; t4 += 4) {
          const float4 w = load4(key_weights + j * kRowRecords + t4);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (t4 > j) u[r][t4] = __fmaf_rn(-w.x, u[r][j], u[r][t4]);
            if (t4 + 1 > j) u[r][t4 + 1] = __fmaf_rn(-w.y, u[r][j], u[r][t4 + 1]);
            if (t4 + 2 > j) u[r][t4 + 2] = __fmaf_rn(-w.z, u[r][j], u[r][t4 + 2]);
            if (t4 + 3 > j) u[r][t4 + 3] = __fmaf_rn(-w.w, u[r][j], u[r][t4 + 3]);
          }
        }
      }
      if (outputs) {
        float o[2][kRowRecords / 4];  // of tokens 4 i + part
#pragma unroll
        for (int i = 0; i < kRowRecords / 2; ++i) {
          const int r = i & 1, t = 4 * (i >> 1) + part;
          o[r][i >> 1] = t < n ? carried[t] * read_q[t * kGdnRows + r * kHalf] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kRowRecords; ++j) {
          if (j >= n) break;
          const float4 w = load4(query_weights + j * kRowRecords + 4 * part);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (j <= part) o[r][0] = __fmaf_rn(w.x, u[r][j], o[r][0]);
            if (j <= part + 4) o[r][1] = __fmaf_rn(w.y, u[r][j], o[r][1]);
            if (j <= part + 8) o[r][2] = __fmaf_rn(w.z, u[r][j], o[r][2]);
            if (j <= part + 12) o[r][3] = __fmaf_rn(w.w, u[r][j], o[r][3]);
          }
        }
#pragma unroll
        for (int i = 0; i < kRowRecords / 2; ++i) {
          const int r = i & 1, t4 = 4 * (i >> 1), t = t4 + part;
          if (t < new_first || t >= read_end || !has_row[r]) continue;
          const float own_u = part == 0   ? u[r][t4]
                              : part == 1 ? u[r][t4 + 1]
                              : part == 2 ? u[r][t4 + 2]
                                          : u[r][t4 + 3];
          o_out[(first + t) * o_stride + row[r]] = o[r][i >> 1];
          u_out[(first + t) * u_stride + row[r]] = own_u;
        }
      }
    }
    const bool again = walk.flushes_again();
    float largest = 0.0f;
    if (flush) {
      // S = carried S + sum_j (decayed u_j) k_j^T.
      float4 s[2][kRowQuads];
      const float last = carried[n - 1];
#pragma unroll
      for (int i = 0; i < 2 * kRowQuads; ++i) {
        const float4 from = load4(own_state + kStep * i);
        s[i / kRowQuads][i % kRowQuads] =
            make_float4(last * from.x, last * from.y, last * from.z, last * from.w);
      }
#pragma unroll
      for (int j = 0; j < kRowRecords; ++j) {
        if (j >= n) break;
        float w[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (j == n - 1 && part == 0 && has_row[r])
            u_out[int64_t{token} * u_stride + row[r]] = u[r][j];
          w[r] = has_row[r] ? weights[j] * u[r][j] : 0.0f;
        }
        const float* key = keys + j * kGdnKeyRow + 36 * part;
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
          const float4 k = load4(key + 4 * i);
          s[0][i] = fma1(w[0], k, s[0][i]);
          s[1][i] = fma1(w[1], k, s[1][i]);
        }
      }
      float o[2] = {0.0f, 0.0f};
      const float* query = queries + (n - 1) * kGdnKeyRow + 36 * part;
#pragma unroll 1
      for (int stage = 0; stage < kRowThreads; ++stage) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
          const float4 q = load4(query + 4 * i);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            o[r] = __fmaf_rn(q.x, s[r][i].x, o[r]);
            o[r] = __fmaf_rn(q.y, s[r][i].y, o[r]);
            o[r] = __fmaf_rn(q.z, s[r][i].z, o[r]);
            o[r] = __fmaf_rn(q.w, s[r][i].w, o[r]);
          }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) o[r] = __shfl_sync(0xFFFFFFFFu, o[r], stage, kRowThreads);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (part == 0 && has_row[r]) o_out[int64_t{token} * o_stride + row[r]] = o[r];
      }
#pragma unroll
      for (int i = 0; i < 2 * kRowQuads; ++i)
        store4(own_state + kStep * i, s[i / kRowQuads][i % kRowQuads]);
      if (head_span) {
        float quad[kRowQuads], of_row[2];
        bool odd;
        measure_quads(s[0], quad, &of_row[0], &odd);
        measure_quads(s[1], quad, &of_row[1], &odd);
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
      float* to = (k > 1 ? own_read : own_state) + r * kRowQuads * kStep;
      float4 v[kRowQuads];
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) v[i] = load4(own_state + kStep * (r * kRowQuads + i));
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
                            r ? row[1] : row[0],
                            part,
                            value_dim,
                            position + static_cast<uint32_t>(token),
                            !again,
                            launch.tables.buckets};
      ThreadCounts own_counts;
      round_rows<RunColumns>(k > 1 ? roles[1] : roles[0], numbers, &own_counts,
                             [&](int i, float4 q4) { store4(to + kStep * i, q4); });
      if (has) counts.add(own_counts);
    }
    encodings += separate ? 2 : 1;
  }
  finish_health(head, encodings * rows * kRowColumns, first_odd, in.tokens, counts);
  head_max.finish();
}

}  // namespace replayeval
