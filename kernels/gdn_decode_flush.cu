// The rows of a token of GDN that flush, where formats are those of row_codec.cuh: corrections,
// fold, output and the codes of both roles with a head's matrix in registers. A block takes heads
// of such rows in turn; the next head's inputs come while codes are made. As in gdn_rows.cuh
// columns 32 p .. 32 p + 31 of two rows are a thread's, and a sum over them passes through the four
// threads of a row.
#include <cmath>

#include "kernels/decode_codes.cuh"
#include "kernels/gdn_unit.cuh"

namespace replayeval {
namespace {

constexpr int kMostRows = 256;  // of a head
constexpr int kKeyRow = 156;    // of keys: room behind each 32, records in different banks

struct Launch {
  GdnUnits units;
  DecodeStates states;
  TileWork work;
  FlushRoles roles;
  size_t packed;  // bytes of a recurrence head
  bool again;     // corrections of the ring's records are made again, from the recurrence
  bool output;
};

/// Shared memory in bytes: what has one size for all windows, so that no register holds where it
/// lies, then the rest. A row of `sums` and `folded` has two numbers for every thread of a row.
struct Layout {
  static constexpr int kKeys = 0, kQuery = kKeys + 4 * kRowRecords * kKeyRow,
                       kKeyWeights = kQuery + 4 * kKeyRow,
                       kDecay = kKeyWeights + 4 * kRowRecords * kRowRecords,
                       kRawBeta = kDecay + 4 * kRowRecords, kBeta = kRawBeta + 4 * kRowRecords,
                       kCarried = kBeta + 4 * kRowRecords, kWeights = kCarried + 4 * kRowRecords,
                       kWords = kWeights + 4 * kRowRecords,
                       kRoles = kWords + 4 * 2 * HeadMax::kWords,
                       kSums = kRoles + (FlushRoles::kBytes + 15) / 16 * 16;
  int folded, state, raw_keys, raw_query, v, us, share;

  __host__ __device__ Layout(int value_dim, int window, int rows, int act_bytes, int u_bytes,
                             size_t packed) {
    int at = kSums;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    take(4 * window * rows);
    folded = take(4 * window * rows);
    state = take(static_cast<int>(packed));
    raw_keys = take(window * kRowColumns * act_bytes);
    raw_query = take(kRowColumns * act_bytes);
    v = take(window * value_dim * act_bytes);
    us = take(window * value_dim * u_bytes);
    share = at;
  }
};

/// Threads of a block, whole warps of them.
__host__ __device__ constexpr int threads_of(int value_dim) {
  return (kRowThreads * ((value_dim + 1) / 2) + 31) / 32 * 32;
}
/// Of the ring's corrections as they are copied.
__host__ __device__ constexpr int u_bytes(RecordType ring_u, bool again) {
  return again ? 0 : ring_u == RecordType::bf16 ? 2 : 4;
}

template <class Act>
__global__ void __launch_bounds__(threads_of(kMostRows))
    flush_rows(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  using Unit = GdnUnit<Act, kRowColumns>;
  const GdnLayer& layer = p.units.layer;
  const int value_dim = layer.value_dim, n = p.units.window, last = n - 1;
  const int first =
      p.again ? 0 : last;  // record whose correction is made here, with all later ones
  const int tid = threadIdx.x, threads = static_cast<int>(blockDim.x), part = tid & 3;
  const int rows = threads / 2;
  const int row[2] = {tid >> 2, rows / 2 + (tid >> 2)};
  const bool has_row[2] = {row[0] < value_dim, row[1] < value_dim};
  const int u_size = u_bytes(p.units.ring_u, p.again);
  const Layout at(value_dim, n, rows, sizeof(Act), u_size, p.packed);
  const TileShare share(p.work, shared + at.share);
  const HeadCopy<RunColumns> state = p.roles.copy<RunColumns>(shared + at.state, value_dim);
  p.roles.prepare(shared + Layout::kRoles, value_dim);
  HeadMax head_max(reinterpret_cast<float*>(shared + Layout::kWords), 0, 1);
  struct Place {
    int row, head;
  };
  const auto place_of = [&](int item) {
    const int listed = item / p.work.row_units;
    return Place{p.work.first_row + (share.order[listed] >> 6), item - listed * p.work.row_units};
  };
  const auto copy_inputs = [&](int item) {
    const Place place = place_of(item);
    const int key_head = place.head / p.units.heads, warp = tid >> 5, warps = threads >> 5,
              lane = tid & 31;
    const Unit unit(p.units, TileRun{place.row, key_head, last, 0, 1});
    const GdnDecodeStep& step = p.units.step;
    const std::byte* from =
        p.states.recurrence + place.row * p.states.row_stride + place.head * p.states.head_stride;
#pragma unroll 1
    for (int i = tid; i < static_cast<int>(p.packed / 16); i += threads)
      copy_async(shared + at.state + 16 * state.place(i), from + 16 * i);
    constexpr int kEach = Unit::kEach, kKeyChunks = Unit::kKeyChunks;
    const int64_t key = int64_t{key_head} * kRowColumns, value = int64_t{place.head} * value_dim;
    const auto record = [&](const void* now, const void* ring, int64_t stride, int j) {
      return j == last ? static_cast<const Act*>(now) + place.row * stride
                       : static_cast<const Act*>(ring) + unit.slot(j) * stride;
    };
#pragma unroll 1
    for (int i = tid; i < n * kKeyChunks; i += threads) {
      const int j = i / kKeyChunks;
      copy_async(shared + at.raw_keys + 16 * i,
                 record(step.k, step.ring_k, unit.k_stride(), j) + key + i % kKeyChunks * kEach);
    }
#pragma unroll 1
    for (int i = tid; i < kKeyChunks; i += threads) {
      copy_async(shared + at.raw_query + 16 * i,
                 static_cast<const Act*>(step.q) + place.row * unit.k_stride() + key + i * kEach);
    }
#pragma unroll 1
    for (int j = first + warp; j < n; j += warps) {
      const Act* v = record(step.v, step.ring_v, unit.v_stride(), j) + value;
#pragma unroll 1
      for (int i = lane; i < value_dim / kEach; i += 32)
        copy_async(shared + at.v + (j * value_dim + i * kEach) * sizeof(Act), v + i * kEach);
    }
#pragma unroll 1
    for (int j = warp; j < first; j += warps) {
      const std::byte* u = static_cast<const std::byte*>(step.ring_u) +
                           (unit.slot(j) * unit.v_stride() + value) * u_size;
#pragma unroll 1
      for (int i = lane; i < value_dim * u_size / 16; i += 32)
        copy_async(shared + at.us + j * value_dim * u_size + 16 * i, u + 16 * i);
    }
#pragma unroll 1
    for (int j = tid; j < n; j += threads) {
      const int64_t own = int64_t{place.row} * layer.value_heads + place.head,
                    ring = unit.slot(j) * layer.value_heads + place.head;
      copy_word(shared + Layout::kDecay + 4 * j,
                j == last ? step.decay_log2 + own : step.ring_decay + ring);
      copy_word(shared + Layout::kRawBeta + 4 * j,
                j == last ? step.beta + own : step.ring_beta + ring);
    }
    commit_copies();
  };
  const Act *raw_keys = reinterpret_cast<const Act*>(shared + at.raw_keys),
            *raw_query = reinterpret_cast<const Act*>(shared + at.raw_query),
            *vs = reinterpret_cast<const Act*>(shared + at.v);
  const float *g = reinterpret_cast<const float*>(shared + Layout::kDecay),
              *raw_beta = reinterpret_cast<const float*>(shared + Layout::kRawBeta);
  float *keys = reinterpret_cast<float*>(shared + Layout::kKeys),
        *query = reinterpret_cast<float*>(shared + Layout::kQuery),
        *sums = reinterpret_cast<float*>(shared + Layout::kSums),
        *folded = reinterpret_cast<float*>(shared + at.folded),
        *beta = reinterpret_cast<float*>(shared + Layout::kBeta),
        *carried = reinterpret_cast<float*>(shared + Layout::kCarried),
        *weights = reinterpret_cast<float*>(shared + Layout::kWeights),
        *key_weights = reinterpret_cast<float*>(shared + Layout::kKeyWeights);
  int item = share.bounds[0];
  const int end = share.bounds[1];
  if (item < end) copy_inputs(item);
  for (; item < end; ++item) {
    const Place place = place_of(item);
    const Unit unit(p.units, TileRun{place.row, place.head / p.units.heads, last, 0, 1});
    finish_copies();
    __syncthreads();
#pragma unroll 1
    for (int base = 0; base <= n; base += threads / 16) {
      const int j = base + (tid >> 4);
      float value[Unit::kN16];
      Unit::normalise(j < n ? raw_keys + j * kRowColumns : raw_query,
                      j < n ? 1.0f : p.units.query_scale, value);
      if (j > n) continue;
      float* to = (j < n ? keys + j * kKeyRow : query) + (tid & 15);
#pragma unroll
      for (int m = 0; m < Unit::kN16; ++m) to[16 * m + 4 * (m >> 1)] = value[m];
    }
    if (tid < 2 * kRowRecords) {
      const int t = tid & (kRowRecords - 1);
      const bool is_carried = tid < kRowRecords;
      const float power =
          exp2_ordered(sum_between(g, is_carried ? 0 : t + 1, is_carried ? t : last));
      if (t < n) {
        (is_carried ? carried : weights)[t] = power;
        if (is_carried) beta[t] = unit.rounded_beta(raw_beta[t]);
      }
    }
    __syncthreads();
    // k_t . k_j (j < t) with its decay, a chain each, at [j, t].
#pragma unroll 1
    for (int i = tid; i < (n - first) * kRowRecords; i += threads) {
      const int t = first + i / kRowRecords, j = i % kRowRecords;
      if (j >= t) continue;
      float dot = 0.0f;
#pragma unroll 1
      for (int run = 0; run < 4 * 36; run += 36) {
#pragma unroll
        for (int m = 0; m < 32; m += 4)
          dot =
              chain(load4(keys + t * kKeyRow + run + m), load4(keys + j * kKeyRow + run + m), dot);
      }
      key_weights[j * kRowRecords + t] = exp2_ordered(sum_between(g, j + 1, t)) * dot;
    }
    float4 s[2][kRowQuads];
#pragma unroll
    for (int r = 0; r < 2; ++r) state.row(has_row[r] ? row[r] : 0, part, s[r]);
    {
      // S k_t: thread `part` adds its columns to the sums of token first + step - part.
      float sum[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int step = 0; step < n - first + kRowThreads - 1; ++step) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sum[r] = __shfl_up_sync(0xFFFFFFFFu, sum[r], 1, kRowThreads);
          if (part == 0) sum[r] = 0.0f;
        }
        const int t = first + step - part;
        const float* key = keys + min(max(t, first), last) * kKeyRow + 36 * part;
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
          const float4 k = load4(key + 4 * i);
#pragma unroll
          for (int r = 0; r < 2; ++r) sum[r] = chain(k, s[r][i], sum[r]);
        }
        if (part == kRowThreads - 1 && t >= first) {
#pragma unroll
          for (int r = 0; r < 2; ++r) sums[t * rows + row[r]] = sum[r];
        }
      }
    }
    __syncthreads();
    {
      // u_t = beta_t (v_t - carried_t (S k_t) - sum_{j < t} w_tj u_j), j after j, decayed for the
      // fold; two of a row's threads have a row each.
      const int own = part & 1 ? row[1] : row[0], known = own < value_dim ? own : 0;
      const auto fold = [&](int j, float u) {
        if (part < 2) folded[j * rows + own] = weights[j] * u;
      };
      const auto rest_of = [&](int t) {
        return __fmaf_rn(-carried[t], sums[t * rows + own], to_float(vs[t * value_dim + known]));
      };
      if (p.again) {
        float u[kRowRecords];
#pragma unroll
        for (int t = 0; t < kRowRecords; ++t) {
          if (t >= n) break;
          u[t] = rest_of(t);
        }
#pragma unroll
        for (int j = 0; j < kRowRecords; ++j) {
          if (j >= n) break;
          u[j] = beta[j] * u[j];
          fold(j, u[j]);
#pragma unroll
          for (int t4 = (j + 1) / 4 * 4; t4 < kRowRecords; t4 += 4) {
            const float4 w = load4(key_weights + j * kRowRecords + t4);
            if (t4 > j) u[t4] = __fmaf_rn(-w.x, u[j], u[t4]);
            if (t4 + 1 > j) u[t4 + 1] = __fmaf_rn(-w.y, u[j], u[t4 + 1]);
            if (t4 + 2 > j) u[t4 + 2] = __fmaf_rn(-w.z, u[j], u[t4 + 2]);
            if (t4 + 3 > j) u[t4 + 3] = __fmaf_rn(-w.w, u[j], u[t4 + 3]);
          }
        }
      } else {
        float rest = rest_of(last);
#pragma unroll 4
        for (int j = 0; j < last; ++j) {
          const float u = load_record(p.units.ring_u, shared + at.us, j * value_dim + known);
          rest = __fmaf_rn(-key_weights[j * kRowRecords + last], u, rest);
          fold(j, u);
        }
        fold(last, beta[last] * rest);
      }
    }
    __syncwarp();
    // S = carried S + sum_j (decayed u_j) k_j^T.
    const float carry = carried[last];
#pragma unroll
    for (int i = 0; i < 2 * kRowQuads; ++i) {
      float4& x = s[i / kRowQuads][i % kRowQuads];
      x = make_float4(carry * x.x, carry * x.y, carry * x.z, carry * x.w);
    }
#pragma unroll 1
    for (int j = 0; j < n; ++j) {
      const float w0 = has_row[0] ? folded[j * rows + row[0]] : 0.0f,
                  w1 = has_row[1] ? folded[j * rows + row[1]] : 0.0f;
      const float* key = keys + j * kKeyRow + 36 * part;
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        const float4 k = load4(key + 4 * i);
        s[0][i] = fma1(w0, k, s[0][i]);
        s[1][i] = fma1(w1, k, s[1][i]);
      }
    }
    if (p.output) {
      float o[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int stage = 0; stage < kRowThreads; ++stage) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
          const float4 q = load4(query + 36 * part + 4 * i);
#pragma unroll
          for (int r = 0; r < 2; ++r) o[r] = chain(q, s[r][i], o[r]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) o[r] = __shfl_sync(0xFFFFFFFFu, o[r], stage, kRowThreads);
      }
      Act* to = static_cast<Act*>(p.units.step.o) + place.row * unit.v_stride() +
                int64_t{place.head} * value_dim;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (part == 0 && has_row[r]) to[row[r]] = from_float<Act>(o[r]);
      }
    }
    p.roles.store<RunColumns>(shared + Layout::kRoles, p.units.rows, p.states, place.row,
                              place.head, layer.value_heads, value_dim, s, row, part, &head_max,
                              [&] {
                                if (item + 1 < end) copy_inputs(item + 1);
                              });
  }
}

}  // namespace

bool gdn_flush_rows(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                    const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream) {
  if (plan.dot != DotType::fp32 || layer.value_dim > kMostRows || plan.window > kRowRecords ||
      !FlushRoles::takes(plan, layer.key_dim)) {
    return false;
  }
  // Otherwise the ring's are what the recurrence would give, or are to be folded as they are.
  const bool again =
      plan.gdn_fold == GdnFold::rederive &&
      (plan.read || plan.ring_u != RecordType::fp32 || gdn_reads_freely(layer, plan, states));
  const bool bf16 = step.activation == RecordType::bf16;
  const StateShape shape{layer.value_dim, layer.key_dim};
  const size_t packed = (packed_bytes(*plan.recurrence.format, shape) + 15) / 16 * 16;
  const int threads = threads_of(layer.value_dim);
  const Layout at(layer.value_dim, plan.window, threads / 2, bf16 ? 2 : 4,
                  u_bytes(plan.ring_u, again), packed);
  const size_t shared =
      static_cast<size_t>(at.share) + TileShare::bytes(std::min(rows.rows, kMostTileRows));
  const auto kernel = bf16 ? flush_rows<__nv_bfloat16> : flush_rows<float>;
  if (shared > block_shared_limit()) return false;
  allow_shared(kernel, shared);
  const int64_t resident = resident_blocks(kernel, threads, shared);
  const float query_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(layer.key_dim)));
  TileWork::each(rows, plan.window, false, 1, layer.value_heads, 1, [&](const TileWork& work) {
    const Launch launch{{layer, rows, step, query_scale, plan.ring_u, plan.beta, plan.window,
                         Divisor(layer.value_heads / layer.key_heads)},
                        states,
                        work,
                        FlushRoles(plan, shape, layer.layer, layer.head_offset),
                        packed,
                        again,
                        plan.flush_output == FlushOutput::recurrence};
    kernel<<<static_cast<unsigned>(std::min(int64_t{work.rows} * layer.value_heads, resident)),
             static_cast<unsigned>(threads), shared, stream>>>(launch);
    CUDA_CHECK(cudaGetLastError());
  });
  return true;
}

}  // namespace replayeval
