// GDN and KDA inside a window: what a block of threads does for one head (gdn_cuda.h), wherever the
// records lie.
#pragma once

#include "kernels/gdn.h"
#include "kernels/replay_cuda.cuh"

namespace replayeval {

/// Offsets, in floats, of a block's arrays; the matrices apart.
struct GdnLayout {
  int v_row;  // row stride of the matrices and of what has value_dim numbers
  int k_row;  // of keys and queries
  int w_row;  // of weights
  int keys, queries, u, read_k, read_q, key_weights, query_weights, weights, g, beta, carried;
  int steps, carried_k, carried_q;  // KDA; the decayed keys of the fold lie over carried_q
  int end;
  int state, read, matrices_end;

  __host__ __device__ GdnLayout(int value_dim, int key_dim, int records, bool channel,
                                bool separate) {
    v_row = padded_row(value_dim);
    k_row = padded_row(key_dim);
    w_row = records + 1;
    int at = 0;
    const auto take = [&at](int count) {
      const int from = at;
      at += (count + 3) / 4 * 4;
      return from;
    };
    keys = take(records * k_row);
    queries = take(records * k_row);
    u = take(records * v_row);
    read_k = take(records * v_row);
    read_q = take(records * v_row);
    key_weights = take(records * w_row);
    query_weights = take(records * w_row);
    weights = take(records);
    g = take(records);
    beta = take(records);
    carried = take(channel ? key_dim : records);
    steps = channel ? take(records * k_row) : 0;
    carried_k = channel ? take(records * k_row) : 0;
    carried_q = channel ? take(records * k_row) : 0;
    end = at;
    at = 0;
    state = take(key_dim * v_row);
    read = separate ? take(key_dim * v_row) : state;
    matrices_end = at;
  }
};

/// out[t] = x[t] (scale / sqrt(sum x[t]^2 + 1e-6)) for `rows` rows: sixteen threads a row, lane l
/// summing n = l, l + 16, ..., then the tree of lanes i + 8, + 4, + 2, + 1.
template <class Value>
__device__ void normalise(int rows, int dim, float scale, Value&& x, float* out, int out_row) {
  constexpr int kKept =
      16;  // numbers of a row that a thread keeps: rows of up to 256 are read once
  const int lane = threadIdx.x & 15;
  for (int base = 0; base < rows; base += static_cast<int>(blockDim.x >> 4)) {
    const int t = base + static_cast<int>(threadIdx.x >> 4);
    const int row = t < rows ? t : rows - 1;
    float kept[kKept];
#pragma unroll
    for (int m = 0; m < kKept; ++m) kept[m] = lane + 16 * m < dim ? x(row, lane + 16 * m) : 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (int m = 0; m < kKept; ++m) squares = __fmaf_rn(kept[m], kept[m], squares);
    for (int n = lane + 16 * kKept; n < dim; n += 16)
      squares = __fmaf_rn(x(row, n), x(row, n), squares);
    for (int d = 8; d > 0; d >>= 1) {
      squares = squares + __shfl_xor_sync(0xFFFFFFFFu, squares, d);
    }
    if (t >= rows) continue;
    const float factor = scale / sqrtf(squares + 1e-6f);
#pragma unroll
    for (int m = 0; m < kKept; ++m) {
      if (lane + 16 * m < dim) out[t * out_row + lane + 16 * m] = kept[m] * factor;
    }
    for (int n = lane + 16 * kKept; n < dim; n += 16) out[t * out_row + n] = x(t, n) * factor;
  }
}

/// read[t][p] = sum_n keys[t][n] state[n][p], n ascending, for `rows` rows; 4 rows by 4 columns a
/// thread.
inline __device__ void carried_read(const float* state, int v_row, int value_dim, const float* keys,
                                    int k_row, int key_dim, int rows, float* read) {
  if (rows == 1) {  // too few tiles to go round
    for (int p = threadIdx.x; p < value_dim; p += static_cast<int>(blockDim.x)) {
      float sum = 0.0f;
#pragma unroll 16
      for (int n = 0; n < key_dim; ++n) sum = __fmaf_rn(keys[n], state[n * v_row + p], sum);
      read[p] = sum;
    }
    return;
  }
  const int quads = (value_dim + 3) / 4, tiles = (rows + 3) / 4 * quads;
  for (int tile = threadIdx.x; tile < tiles; tile += static_cast<int>(blockDim.x)) {
    const int p = tile % quads * 4, t = tile / quads * 4;
    const float* key[4];
    for (int i = 0; i < 4; ++i) key[i] = keys + min(t + i, rows - 1) * k_row;
    float4 sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = make_float4(0, 0, 0, 0);
    int n = 0;
    for (; n + 4 <= key_dim; n += 4) {
      const float4 a = load4(state + n * v_row + p), b = load4(state + (n + 1) * v_row + p),
                   c = load4(state + (n + 2) * v_row + p), d = load4(state + (n + 3) * v_row + p);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 k = load4(key[i] + n);
        sum[i] = fma1(k.w, d, fma1(k.z, c, fma1(k.y, b, fma1(k.x, a, sum[i]))));
      }
    }
    for (; n < key_dim; ++n) {
      const float4 a = load4(state + n * v_row + p);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = fma1(key[i][n], a, sum[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (t + i < rows) store4(read + (t + i) * v_row + p, sum[i]);
    }
  }
}

/// state[n][p] = carried state[n][p] + sum_j keys[j][n] u[j][p], j ascending; 4 rows by 4 columns a
/// thread. `carried` has one number, or key_dim of them with `by_channel`.
inline __device__ void fold_state(float* state, int v_row, int value_dim, int key_dim,
                                  const float* carried, bool by_channel, const float* keys,
                                  int k_row, const float* u, int records) {
  const int quads = (value_dim + 3) / 4, tiles = (key_dim + 3) / 4 * quads;
  for (int tile = threadIdx.x; tile < tiles; tile += static_cast<int>(blockDim.x)) {
    const int p = tile % quads * 4, n = tile / quads * 4;
    float4 sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(n + i, key_dim - 1);
      const float4 s = load4(state + row * v_row + p);
      const float c = by_channel ? carried[row] : carried[0];
      sum[i] = make_float4(c * s.x, c * s.y, c * s.z, c * s.w);
    }
    for (int j = 0; j < records; ++j) {
      const float4 k = load4(keys + j * k_row + n), w = load4(u + j * v_row + p);
      sum[0] = fma1(k.x, w, sum[0]);
      sum[1] = fma1(k.y, w, sum[1]);
      sum[2] = fma1(k.z, w, sum[2]);
      sum[3] = fma1(k.w, w, sum[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (n + i < key_dim) store4(state + (n + i) * v_row + p, sum[i]);
    }
  }
}

/// Nearest value of the type, ties to even, with the host's NaN and overflow (gdn_round).
__device__ __forceinline__ float round_value(DotType type, float x) {
  if (type == DotType::fp32) return x;
  const int dropped = type == DotType::bf16 ? 16 : 13;
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return __uint_as_float(bits | 0x00400000u);
  const uint32_t half = 1u << (dropped - 1);
  return __uint_as_float((bits + half - 1u + ((bits >> dropped) & 1u)) & ~((1u << dropped) - 1u));
}

__device__ __forceinline__ float4 round_four(DotType type, float4 x) {
  return make_float4(round_value(type, x.x), round_value(type, x.y), round_value(type, x.z),
                     round_value(type, x.w));
}
/// sum + a . b, four terms in order.
__device__ __forceinline__ float chain(float4 a, float4 b, float sum) {
  return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}

/// Outputs of one span of one head, and the fold into the head's state if it flushes. Inputs: k, q,
/// v, beta, decay, u of a token, counted as the span's, and store_u, store_o.
template <class Inputs>
struct GdnSpan {
  const GdnLayer* layer_of;
  float query_scale;
  DeviceHead* head;
  Inputs in;
  float* work;
  GdnLayout at;

  /// Decays and the weights of rows first .. records - 1 (queries from first_query), products
  /// rounded to `dot`; GDN: also `weights`, the decays of each record up to the last. Ends with a
  /// barrier.
  __device__ void decays(const WalkSpan& span, int first, int first_query, DotType dot) const {
    const GdnLayer& layer = *layer_of;
    const int n = span.records, key_dim = layer.key_dim, tid = threadIdx.x;
    const float *keys = work + at.keys, *queries = work + at.queries, *g = work + at.g;
    float *key_weights = work + at.key_weights, *query_weights = work + at.query_weights;
    if (!layer.channel_decay) {
      for (int t = tid; t < n; t += static_cast<int>(blockDim.x)) {
        float sum = 0.0f;
        for (int k = 0; k <= t; ++k) sum = sum + g[k];
        work[at.carried + t] = exp2_ordered(sum);
      }
      for (int i = tid; i < (n - first) * n; i += static_cast<int>(blockDim.x)) {
        const int t = first + i / n, j = i % n;
        if (j > t) continue;
        float sum = 0.0f;
        for (int k = j + 1; k <= t; ++k) sum = sum + g[k];
        const float weight = exp2_ordered(sum);
        if (t == n - 1) work[at.weights + j] = weight;
        const float *a = keys + t * at.k_row, *b = keys + j * at.k_row, *q = queries + t * at.k_row;
        const bool with_q = t >= first_query;
        float key_dot = 0.0f, query_dot = 0.0f;
        // Rows are padded with zeros to multiples of 4, which add nothing to a sum.
        if (j < t) {
#pragma unroll 4
          for (int m = 0; m < key_dim; m += 4) {
            const float4 x = load4(a + m), y = load4(b + m);
            if (dot == DotType::fp32) {
              key_dot = chain(x, y, key_dot);
            } else {
              key_dot = chain(round_four(dot, x), round_four(dot, y), key_dot);
            }
          }
        }
        if (with_q) {
#pragma unroll 4
          for (int m = 0; m < key_dim; m += 4)
            query_dot = chain(load4(q + m), load4(b + m), query_dot);
        }
        key_weights[t * at.w_row + j] = weight * key_dot;
        if (with_q) query_weights[t * at.w_row + j] = weight * query_dot;
      }
      __syncthreads();
      return;
    }
    const float* steps = work + at.steps;
    for (int m = tid; m < key_dim; m += static_cast<int>(blockDim.x)) {
      float carried = 1.0f;
      for (int t = 0; t < n; ++t) {
        carried = carried * steps[t * at.k_row + m];
        if (t < first) continue;
        work[at.carried_k + t * at.k_row + m] = round_value(dot, carried * keys[t * at.k_row + m]);
        if (t >= first_query)
          work[at.carried_q + t * at.k_row + m] = carried * queries[t * at.k_row + m];
      }
      work[at.carried + m] = carried;
    }
    for (int i = tid; i < (n - first) * n; i += static_cast<int>(blockDim.x)) {
      const int t = first + i / n, j = i % n;
      if (j > t) continue;
      const float *a = keys + t * at.k_row, *b = keys + j * at.k_row, *q = queries + t * at.k_row;
      const bool with_q = t >= first_query;
      float with_k = 0.0f, query_weight = 0.0f;
      for (int m = 0; m < key_dim; ++m) {
        float key = b[m];
        for (int k = j + 1; k <= t; ++k) key = key * steps[k * at.k_row + m];
        key = round_value(dot, key);
        with_k = __fmaf_rn(round_value(dot, a[m]), key, with_k);
        if (with_q) query_weight = __fmaf_rn(q[m], key, query_weight);
      }
      key_weights[t * at.w_row + j] = with_k;
      if (with_q) query_weights[t * at.w_row + j] = query_weight;
    }
    __syncthreads();
  }

  /// u of records first .. last - 1, one chain a column: u_t = beta_t (v_t - carried_t read_k_t -
  /// sum_{j<t} w_tj u_j), from read_k, where the unrounded u goes; `u` holds what the ring stores.
  /// With `outputs` o_t too, before the ring rounds u_t.
  __device__ void correct(const WalkSpan& span, int first, int last, bool outputs,
                          bool round_u) const {
    const GdnLayer& layer = *layer_of;
    const bool channel = layer.channel_decay;
    const float *key_weights = work + at.key_weights, *query_weights = work + at.query_weights;
    float *u = work + at.u, *read_k = work + at.read_k;
    const float* read_q = work + at.read_q;
    const int value_dim = layer.value_dim;
    for (int p = threadIdx.x; p < value_dim; p += static_cast<int>(blockDim.x)) {
      float next = first < last ? in.v(int64_t{span.first} + first, p) : 0.0f;
      for (int t = first; t < last; ++t) {
        const float v = next;  // asked for a token ahead
        if (t + 1 < last) next = in.v(int64_t{span.first} + t + 1, p);
        const float carried = channel ? 1.0f : work[at.carried + t];
        float rest = __fmaf_rn(-carried, read_k[t * at.v_row + p], v);
#pragma unroll 4
        for (int j = 0; j < t; ++j)
          rest = __fmaf_rn(-key_weights[t * at.w_row + j], u[j * at.v_row + p], rest);
        const float own = work[at.beta + t] * rest;
        read_k[t * at.v_row + p] = own;
        u[t * at.v_row + p] = round_u ? round_value(DotType::bf16, own) : own;
      }
    }
    __syncthreads();
    if (!outputs) return;
    for (int i = threadIdx.x; i < (last - first) * value_dim; i += static_cast<int>(blockDim.x)) {
      const int t = first + i / value_dim, p = i % value_dim;
      const float carried = channel ? 1.0f : work[at.carried + t];
      float o = carried * read_q[t * at.v_row + p];
      for (int j = 0; j < t; ++j)
        o = __fmaf_rn(query_weights[t * at.w_row + j], u[j * at.v_row + p], o);
      in.store_o(int64_t{span.first} + t, p,
                 __fmaf_rn(query_weights[t * at.w_row + t], read_k[t * at.v_row + p], o));
      in.store_u(int64_t{span.first} + t, p, u[t * at.v_row + p]);
    }
    __syncthreads();
  }

  /// `skip_reads`: outputs that are read from the checkpoint are not wanted.
  __device__ void operator()(const WalkSpan& span, bool skip_reads = false) const {
    const GdnLayer& layer = *layer_of;
    const DevicePlan& plan = *head->plan;
    const int n = span.records, tid = threadIdx.x, key_dim = layer.key_dim,
              value_dim = layer.value_dim;
    const int new_first = span.first_query - span.first;
    const bool channel = layer.channel_decay, flush_token = span.flush && span.queries() > 0;
    const bool output_from_fold = flush_token && plan.flush_output == FlushOutput::recurrence;
    const int read_end = output_from_fold ? n - 1 : n;
    const bool reads = span.queries() > 0 && read_end > new_first && !skip_reads;
    // First record whose folded u is computed from R. Those that were computed in this span from
    // the same FP32 matrix are what it would give, operation by operation.
    int fold_first = n;
    if (span.flush) {
      fold_first = plan.gdn_fold == GdnFold::rederive ? 0 : flush_token ? n - 1 : n;
      const bool same = plan.gdn_fold == GdnFold::rederive && head->shared() && new_first == 0 &&
                        flush_token && plan.ring_u == RecordType::fp32 && plan.dot == DotType::fp32;
      if (same && !skip_reads) fold_first = read_end;
    }
    int first_row = min(new_first, fold_first);
    if (span.flush) first_row = min(first_row, n - 1);
    float *keys = work + at.keys, *queries = work + at.queries, *u = work + at.u;

    if (reads) {
      if (span.from_unencoded) {
        head->need_state();
      } else {
        head->need_read();
      }
    }
    if (span.flush) head->need_state();
    const float* read_state = span.from_unencoded ? head->state.x : head->read.x;

    const int64_t first = span.first;
    normalise(
        n, key_dim, 1.0f, [&](int t, int m) { return in.k(first + t, m); }, keys, at.k_row);
    if (span.queries() > 0) {
      normalise(
          span.queries(), key_dim, query_scale,
          [&](int t, int m) { return in.q(int64_t{span.first_query} + t, m); },
          queries + new_first * at.k_row, at.k_row);
    }
    for (int t = tid; t < n; t += static_cast<int>(blockDim.x)) {
      const float beta = in.beta(first + t);
      work[at.beta + t] = plan.beta == RecordType::bf16 ? round_value(DotType::bf16, beta) : beta;
      if (!channel) work[at.g + t] = in.decay(first + t, 0);
    }
    if (channel) {
      for (int i = tid; i < n * key_dim; i += static_cast<int>(blockDim.x)) {
        const int t = i / key_dim, m = i % key_dim;
        work[at.steps + t * at.k_row + m] = exp2_ordered(in.decay(first + t, m));
      }
    }
    for (int i = tid; i < min(new_first, n) * value_dim; i += static_cast<int>(blockDim.x)) {
      u[i / value_dim * at.v_row + i % value_dim] = in.u(first + i / value_dim, i % value_dim);
    }
    __syncthreads();
    decays(span, first_row, new_first, DotType::fp32);

    if (reads) {
      const int count = read_end - new_first, offset = new_first * at.k_row,
                to = new_first * at.v_row;
      carried_read(read_state, at.v_row, value_dim, (channel ? work + at.carried_k : keys) + offset,
                   at.k_row, key_dim, count, work + at.read_k + to);
      carried_read(read_state, at.v_row, value_dim,
                   (channel ? work + at.carried_q : queries) + offset, at.k_row, key_dim, count,
                   work + at.read_q + to);
      __syncthreads();
      correct(span, new_first, read_end, true, plan.ring_u == RecordType::bf16);
    }
    if (span.flush) fold(span, fold_first, first_row, output_from_fold);
    __syncthreads();
  }

  __device__ void fold(const WalkSpan& span, int fold_first, int first_row,
                       bool output_from_fold) const {
    const GdnLayer& layer = *layer_of;
    const DevicePlan& plan = *head->plan;
    const int n = span.records, tid = threadIdx.x, key_dim = layer.key_dim,
              value_dim = layer.value_dim;
    const bool channel = layer.channel_decay, rounded = plan.dot != DotType::fp32;
    float *keys = work + at.keys, *u = work + at.u, *state = head->state.x;
    if (rounded) decays(span, first_row, n, plan.dot);
    if (fold_first < n) {
      const float* from = channel ? work + at.carried_k : keys;
      float* read_k = work + at.read_k;
      if (!rounded) {
        carried_read(state, at.v_row, value_dim, from + fold_first * at.k_row, at.k_row, key_dim,
                     n - fold_first, read_k + fold_first * at.v_row);
      } else {
        for (int i = tid; i < (n - fold_first) * value_dim; i += static_cast<int>(blockDim.x)) {
          const int t = fold_first + i / value_dim, p = i % value_dim;
          float sum = 0.0f;
          for (int m = 0; m < key_dim; ++m) {
            sum = __fmaf_rn(round_value(plan.dot, from[t * at.k_row + m]),
                            round_value(plan.dot, state[m * at.v_row + p]), sum);
          }
          read_k[t * at.v_row + p] = sum;
        }
      }
      __syncthreads();
      correct(span, fold_first, n, false, false);
    }
    if (output_from_fold) {
      for (int p = tid; p < value_dim; p += static_cast<int>(blockDim.x)) {
        const float own = u[(n - 1) * at.v_row + p];
        in.store_u(int64_t{span.first} + n - 1, p,
                   plan.ring_u == RecordType::bf16 ? round_value(DotType::bf16, own) : own);
      }
    }
    // S = carried S + sum_j (decayed u_j) k_j^T; KDA: sum_j u_j (decayed k_j)^T.
    float* fold_keys = keys;
    if (channel) {
      fold_keys = work + at.carried_q;
      for (int i = tid; i < n * key_dim; i += static_cast<int>(blockDim.x)) {
        const int j = i / key_dim, m = i % key_dim;
        float key = keys[j * at.k_row + m];
        for (int k = j + 1; k < n; ++k) key = key * work[at.steps + k * at.k_row + m];
        fold_keys[j * at.k_row + m] = round_value(plan.dot, key);
      }
    } else if (rounded) {
      for (int i = tid; i < n * key_dim; i += static_cast<int>(blockDim.x)) {
        float& key = keys[i / key_dim * at.k_row + i % key_dim];
        key = round_value(plan.dot, key);
      }
    }
    __syncthreads();
    for (int i = tid; i < n * value_dim; i += static_cast<int>(blockDim.x)) {
      float& x = u[i / value_dim * at.v_row + i % value_dim];
      if (!channel) x = work[at.weights + i / value_dim] * x;
      x = round_value(plan.dot, x);
    }
    __syncthreads();
    fold_state(state, at.v_row, value_dim, key_dim,
               channel ? work + at.carried : work + at.carried + n - 1, channel, fold_keys,
               at.k_row, u, n);
    __syncthreads();
    if (!output_from_fold) return;
    for (int p = tid; p < value_dim; p += static_cast<int>(blockDim.x)) {
      const float* query = work + at.queries + (n - 1) * at.k_row;
      float o = 0.0f;
#pragma unroll 16
      for (int m = 0; m < key_dim; ++m) o = __fmaf_rn(query[m], state[m * at.v_row + p], o);
      in.store_o(int64_t{span.first} + n - 1, p, o);
    }
  }
};

}  // namespace replayeval
