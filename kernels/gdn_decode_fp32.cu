// One token of GDN with plain FP32 checkpoints (decode_cuda.h): bound by reading them. A unit is
// the value heads of one key head of one row, so that its keys are normalised and multiplied once;
// a tile is eight rows of a head. Half of a warp reads a row with the key each, the other half with
// the query, one chain over key_dim a thread as kernels/gdn.h has it. A flush needs no other row:
// the ring's corrections are what R and the raw records would give again, so it folds eight rows
// after the other where they lie.
#include <cmath>

#include "kernels/decode_tiles.cuh"
#include "kernels/gdn_block.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 32, kSteps = 4;
constexpr int kFlushRows = kTileRows / kSteps;
constexpr int kPlaces = 3;  // steps in a warp's ring
constexpr int kMostWarps = 4, kMostBlocks = 3;

struct Launch {
  GdnLayer layer;
  DecodeRows rows;
  DecodeStates states;
  GdnDecodeStep step;
  float query_scale;
  RecordType ring_u, beta;
  int window, units, tiles;
};

/// Shared memory in bytes, behind it the warps' rings.
struct Layout {
  int k_row;                                     // floats
  int raw_keys, raw_query, decay, beta, inputs;  // of a unit, twice
  int keys, query, dots, key_weights, query_weights, fold_weights, end;
  int place, warp;  // a step of a tile; a warp's corrections of the ring, behind them its places

  __host__ __device__ Layout(int key_dim, int window, int heads, int act_bytes, int u_bytes) {
    k_row = key_dim + 4;
    int at = 0;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    raw_keys = take(window * key_dim * act_bytes);
    raw_query = take(key_dim * act_bytes);
    decay = take(4 * window * heads);
    beta = take(4 * heads);
    inputs = at;
    at *= 2;
    keys = take(4 * window * k_row);
    query = take(4 * k_row);
    dots = take(8 * window);
    // Of a head: records, then the checkpoint's.
    key_weights = take(4 * heads * (window + 1));
    query_weights = take(4 * heads * (window + 1));
    fold_weights = take(4 * heads * window);
    end = at;
    place = kFlushRows * 4 * key_dim;
    warp = kTileRows * window * u_bytes + kPlaces * place;
  }
};

template <class Act, int kKeyDim>
__global__ void __launch_bounds__(32 * kMostWarps, kMostBlocks)
    decode_fp32(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr int kChunks = kKeyDim / 4, kStepChunks = kChunks / kSteps,
                kStepBytes = kFlushRows * kKeyDim * 4, kN16 = kKeyDim / 16;
  const GdnLayer& layer = p.layer;
  const int value_dim = layer.value_dim, heads = layer.value_heads / layer.key_heads,
            window = p.window;
  const int u_bytes = p.ring_u == RecordType::bf16 ? 2 : 4;
  const Layout at(kKeyDim, window, heads, sizeof(Act), u_bytes);
  constexpr int kEach = 16 / sizeof(Act);
  const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31;
  const int head_tiles = value_dim / kTileRows;
  const int64_t k_stride = int64_t{layer.key_heads} * kKeyDim,
                v_stride = int64_t{layer.value_heads} * value_dim;
  std::byte* us = shared + at.end + (tid >> 5) * at.warp;  // [records, rows of a tile]
  std::byte* ring = us + kTileRows * window * u_bytes;
  const auto tile_of = [&](int row, int head, int tile) {
    return p.states.recurrence + row * p.states.row_stride + head * p.states.head_stride +
           tile % head_tiles * (kTileRows * kKeyDim * 4);
  };
  // A step: some columns of all rows, or all columns of some rows where a flush folds them. 16
  // bytes of a row lie at another place in each row, so that threads that read the same columns of
  // eight rows meet different banks.
  constexpr int kApart = kStepChunks >= 8 ? 1 : 8 / kStepChunks;  // rows that share banks
  const auto swizzled = [](int r, int chunk) {
    return r * kStepChunks + (chunk ^ (r / kApart & (min(kStepChunks, 8) - 1)));
  };
  const auto copy = [&](int unit, int tile, int step, int place, int t) {
    const int row = unit / layer.key_heads,
              head = unit % layer.key_heads * heads + tile / head_tiles;
    const std::byte* from = tile_of(row, head, tile);
    std::byte* to = ring + place * kStepBytes;
    if (t + 1 == window) {
      from += step * kStepBytes;
#pragma unroll
      for (int m = 0; m < kStepBytes / 512; ++m) {
        const int i = 32 * m + lane, r = i / kChunks, chunk = i % kChunks;
        copy_async(to + 16 * (r * kChunks + (chunk ^ r)), from + 16 * i);
      }
    } else {
      from += step * (16 * kStepChunks);
#pragma unroll
      for (int m = 0; m < kStepBytes / 512; ++m) {
        const int i = 32 * m + lane, r = i / kStepChunks, chunk = i % kStepChunks;
        copy_async(to + 16 * swizzled(r, chunk), from + 16 * (r * kChunks + chunk));
      }
    }
  };
  const TileShare share(p.units, p.tiles);
  TileRuns runs(&share, p.rows.pending, layer.key_heads);
  TileCopies<kPlaces, kSteps, decltype(copy)> copies(runs, copy);
  // A unit's raw keys and query, decays and beta.
  const auto copy_inputs = [&](int unit, int t, std::byte* to) {
    const int row = unit / layer.key_heads, key_head = unit % layer.key_heads,
              head0 = key_head * heads;
    const int64_t slot = int64_t{row} * window, own = row * k_stride + key_head * kKeyDim;
    constexpr int kKeyChunks = kKeyDim / kEach;
    const Act* key = static_cast<const Act*>(p.step.k) + own;
    const Act* ring_k =
        static_cast<const Act*>(p.step.ring_k) + slot * k_stride + key_head * kKeyDim;
    for (int i = tid; i < (t + 1) * kKeyChunks; i += threads) {
      const int j = i / kKeyChunks;
      copy_async(to + at.raw_keys + 16 * i,
                 (j == t ? key : ring_k + j * k_stride) + i % kKeyChunks * kEach);
    }
    for (int i = tid; i < kKeyChunks; i += threads) {
      copy_async(to + at.raw_query + 16 * i, static_cast<const Act*>(p.step.q) + own + i * kEach);
    }
    const float* decay = p.step.decay_log2 + int64_t{row} * layer.value_heads + head0;
    const float* ring_decay = p.step.ring_decay + slot * layer.value_heads + head0;
    for (int i = tid; i < (t + 1) * heads; i += threads) {
      const int j = i / heads;
      copy_word(to + at.decay + 4 * i,
                (j == t ? decay : ring_decay + j * layer.value_heads) + i % heads);
    }
    for (int h = tid; h < heads; h += threads) {
      copy_word(to + at.beta + 4 * h, p.step.beta + int64_t{row} * layer.value_heads + head0 + h);
    }
  };
  if (runs.next.real()) copy_inputs(runs.next.unit, runs.next_t, shared);
  commit_copies();

  float* keys = reinterpret_cast<float*>(shared + at.keys);
  float* query = reinterpret_cast<float*>(shared + at.query);
  float* dots = reinterpret_cast<float*>(shared + at.dots);
  float* key_weights = reinterpret_cast<float*>(shared + at.key_weights);
  float* query_weights = reinterpret_cast<float*>(shared + at.query_weights);
  float* fold_weights = reinterpret_cast<float*>(shared + at.fold_weights);
  int place = 0, walked = 0;
  for (runs.move(); runs.now.real(); runs.move()) {
    const int row = runs.now.unit / layer.key_heads, key_head = runs.now.unit % layer.key_heads,
              head0 = key_head * heads, t = runs.t;
    const bool flush = t + 1 == window;
    const int64_t slot = int64_t{row} * window;
    const std::byte* inputs = shared + (runs.index & 1) * at.inputs;
    const Act* raw_keys = reinterpret_cast<const Act*>(inputs + at.raw_keys);
    const Act* raw_query = reinterpret_cast<const Act*>(inputs + at.raw_query);
    const float* decays = reinterpret_cast<const float*>(inputs + at.decay);
    const float* betas = reinterpret_cast<const float*>(inputs + at.beta);
    // The inputs went with the first copy of the last unit; later ones have been waited for since.
    if (walked < kPlaces) finish_copies();
    walked = 0;
    __syncthreads();  // and the last unit's readers are done
    if (runs.next.real())
      copy_inputs(runs.next.unit, runs.next_t, shared + (~runs.index & 1) * at.inputs);
    if (!flush) {
      for (int h = tid; h < heads; h += threads) {
        const int64_t to = (slot + t) * layer.value_heads + head0 + h;
        p.step.ring_decay[to] = decays[t * heads + h];
        p.step.ring_beta[to] = betas[h];
      }
      constexpr int kKeyChunks = kKeyDim / kEach;
      for (int i = tid; i < kKeyChunks; i += threads) {
        Act* to = static_cast<Act*>(p.step.ring_k) + (slot + t) * k_stride + key_head * kKeyDim;
        *reinterpret_cast<uint4*>(to + i * kEach) =
            *reinterpret_cast<const uint4*>(raw_keys + t * kKeyDim + i * kEach);
      }
    }
    // Normalised keys of the window and, as the last row, the query; sixteen threads a row.
    for (int base = 0; base < t + 2; base += threads / 16) {
      const int part = tid & 15, i = base + (tid >> 4), j = min(i, t + 1);
      const Act* x = j <= t ? raw_keys + j * kKeyDim : raw_query;
      float value[kN16], squares = 0.0f;
#pragma unroll
      for (int m = 0; m < kN16; ++m) value[m] = to_float(x[part + 16 * m]);
#pragma unroll
      for (int m = 0; m < kN16; ++m) squares = __fmaf_rn(value[m], value[m], squares);
#pragma unroll
      for (int d = 8; d > 0; d >>= 1) squares = squares + __shfl_xor_sync(0xFFFFFFFFu, squares, d);
      if (i > t + 1) continue;
      const float factor = (j <= t ? 1.0f : p.query_scale) / sqrtf(squares + 1e-6f);
      float* to = j <= t ? keys + j * at.k_row : query;
#pragma unroll
      for (int m = 0; m < kN16; ++m) to[part + 16 * m] = value[m] * factor;
    }
    __syncthreads();
    // k_t . k_j and q_t . k_j, one chain a thread, by the first warps; decays by the others.
    const int records = (t + 32) / 32, dot_threads = 64 * records < threads ? 64 * records : 0;
    for (int i = tid; i < 64 * records; i += threads) {
      const int j = i / 64 * 32 + (i & 31), side = i >> 5 & 1;
      if (j > t) continue;
      const float *a = side == 1 ? query : keys + t * at.k_row, *b = keys + j * at.k_row;
      float sum = 0.0f;
#pragma unroll 8
      for (int n = 0; n < kKeyDim; n += 4) sum = chain(load4(a + n), load4(b + n), sum);
      dots[side * window + j] = sum;
    }
    for (int i = tid - dot_threads; i < (t + 2) * heads; i += threads - dot_threads) {
      if (i < 0) continue;
      const int j = i / heads, h = i % heads;
      float exponent = 0.0f;
      for (int k = j == t + 1 ? 0 : j + 1; k <= t; ++k) exponent = exponent + decays[k * heads + h];
      const float weight = exp2_ordered(exponent);
      if (j <= t) {
        fold_weights[h * window + j] = weight;
      } else {
        key_weights[h * (window + 1) + window] = -weight;
        query_weights[h * (window + 1) + window] = weight;
      }
    }
    __syncthreads();
    for (int i = tid; i < (t + 1) * heads; i += threads) {
      const int j = i / heads, h = i % heads;
      const float weight = fold_weights[h * window + j];
      key_weights[h * (window + 1) + j] = -(weight * dots[j]);
      query_weights[h * (window + 1) + j] = weight * dots[window + j];
    }
    __syncthreads();

    for (int tile = runs.now.first + (tid >> 5); tile < runs.now.last; tile += threads >> 5) {
      const int h = tile / head_tiles;
      const int64_t first =
          int64_t{head0 + h} * value_dim + tile % head_tiles * kTileRows;  // row of the tile
      // The ring's corrections of the tile's rows go with the copies of its first step.
      {
        const int record = kTileRows * u_bytes, shift = u_bytes == 2 ? 2 : 3;  // 16-byte chunks
        const std::byte* from =
            static_cast<const std::byte*>(p.step.ring_u) + (slot * v_stride + first) * u_bytes;
        __syncwarp();
        for (int i = lane; i < t << shift; i += 32) {
          const int j = i >> shift, chunk = i & ((1 << shift) - 1);
          copy_async(us + j * record + 16 * chunk, from + j * v_stride * u_bytes + 16 * chunk);
        }
      }
      const auto stored = [&](int j, int i) {
        return load_record(p.ring_u, us, j * kTileRows + i);
      };
      const float v = to_float(static_cast<const Act*>(p.step.v)[row * v_stride + first + lane]);
      const float beta =
          p.beta == RecordType::bf16 ? round_value(DotType::bf16, betas[h]) : betas[h];
      const float *key_weight = key_weights + h * (window + 1),
                  *query_weight = query_weights + h * (window + 1);
      Act* out = static_cast<Act*>(p.step.o) + row * v_stride + first;
      float with_key = 0.0f, with_query = 0.0f;
      if (!flush) {
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
          copies.wait();
          copies.begin();
          ++walked;
          const std::byte* state = ring + place * kStepBytes;
          if (++place == kPlaces) place = 0;
          const float *key = keys + t * at.k_row + step * (4 * kStepChunks),
                      *q = query + step * (4 * kStepChunks);
#pragma unroll
          for (int chunk = 0; chunk < kStepChunks; ++chunk) {
            const float4 s = *reinterpret_cast<const float4*>(state + 16 * swizzled(lane, chunk));
            with_key = chain(load4(key + 4 * chunk), s, with_key);
            with_query = chain(load4(q + 4 * chunk), s, with_query);
          }
        }
        float rest = __fmaf_rn(key_weight[window], with_key, v),
              o = query_weight[window] * with_query;
#pragma unroll 4
        for (int j = 0; j < t; ++j) {
          const float u = stored(j, lane);
          rest = __fmaf_rn(key_weight[j], u, rest);
          o = __fmaf_rn(query_weight[j], u, o);
        }
        const float u = beta * rest;
        const int64_t to = (slot + t) * v_stride + first + lane;
        static_cast<Act*>(p.step.ring_v)[to] = from_float<Act>(v);
        store_record(p.ring_u, p.step.ring_u, to, u);
        out[lane] = from_float<Act>(__fmaf_rn(query_weight[t], u, o));
        continue;
      }
      // S = carried S + sum_j (decayed u_j) k_j^T, four threads a row of eight.
      const int r = lane & 7, q = lane >> 2, part = lane & 3;
      const float carry = query_weight[window];
      const float* fold = fold_weights + h * window;
      uint32_t non_finite = 0, infinite = 0;
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        copies.wait();
        copies.begin();
        ++walked;
        if (step == 0) {
          finish_copies();
          __syncwarp();
        }
        std::byte* state = ring + place * kStepBytes;
        if (++place == kPlaces) place = 0;
        const auto read = [&](const float* operand) {
          float sum = 0.0f;
#pragma unroll 8
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            const float4 s =
                *reinterpret_cast<const float4*>(state + 16 * (r * kChunks + (chunk ^ r)));
            sum = chain(load4(operand + 4 * chunk), s, sum);
          }
          return sum;
        };
        const int skip = step * kFlushRows;
        float rest = __fmaf_rn(key_weight[window], read(keys + t * at.k_row),
                               __shfl_sync(0xFFFFFFFFu, v, skip + r));
#pragma unroll 4
        for (int j = 0; j < t; ++j) rest = __fmaf_rn(key_weight[j], stored(j, skip + r), rest);
        const float last_u = __shfl_sync(0xFFFFFFFFu, beta * rest, q);
        float4 s[kN16];
#pragma unroll
        for (int m = 0; m < kN16; ++m) {
          const float4 x =
              *reinterpret_cast<const float4*>(state + 16 * (q * kChunks + ((4 * m + part) ^ q)));
          s[m] = make_float4(carry * x.x, carry * x.y, carry * x.z, carry * x.w);
        }
#pragma unroll 1
        for (int j = 0; j <= t; ++j) {
          const float w = fold[j] * (j == t ? last_u : stored(j, skip + q));
          const float* key = keys + j * at.k_row + 4 * part;
#pragma unroll
          for (int m = 0; m < kN16; ++m) s[m] = fma1(w, load4(key + 16 * m), s[m]);
        }
        __syncwarp();
        float4* to = reinterpret_cast<float4*>(tile_of(row, head0 + h, tile) + step * kStepBytes) +
                     q * kChunks + part;
#pragma unroll
        for (int m = 0; m < kN16; ++m) {
          __stcs(to + 4 * m, s[m]);
          *reinterpret_cast<float4*>(state + 16 * (q * kChunks + ((4 * m + part) ^ q))) = s[m];
          if (p.states.health) count_odd(s[m], &non_finite, &infinite);
        }
        __syncwarp();
        const float o = read(query);
        if (lane < kFlushRows) out[skip + r] = from_float<Act>(o);
      }
      if (p.states.health) {
        add_tile_health(p.states.health + int64_t{row} * layer.value_heads + head0 + h,
                        kTileRows * kKeyDim, non_finite, infinite, p.rows.position[row]);
      }
    }
  }
}

using Kernel = void (*)(const Launch);
template <class Act>
Kernel kernel_of(int key_dim) {
  return key_dim == 128  ? decode_fp32<Act, 128>
         : key_dim == 64 ? decode_fp32<Act, 64>
                         : decode_fp32<Act, 256>;
}

}  // namespace

bool gdn_decode_fp32(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                     const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream) {
  const int n = layer.key_dim;
  const bool stored = plan.gdn_fold == GdnFold::cached || plan.ring_u == RecordType::fp32;
  if (plan.read || !is_plain_fp32(*plan.recurrence.format) || plan.dot != DotType::fp32 ||
      plan.flush_output != FlushOutput::recurrence || !stored || layer.value_dim % kTileRows != 0 ||
      (n != 64 && n != 128 && n != 256)) {
    return false;
  }
  Launch launch{layer,
                rows,
                states,
                step,
                static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))),
                plan.ring_u,
                plan.beta,
                plan.window,
                rows.rows * layer.key_heads,
                layer.value_heads / layer.key_heads * (layer.value_dim / kTileRows)};
  const Layout at(n, plan.window, layer.value_heads / layer.key_heads,
                  step.activation == RecordType::bf16 ? 2 : 4,
                  plan.ring_u == RecordType::bf16 ? 2 : 4);
  const TileLaunch use = TileLaunch::fit(static_cast<size_t>(at.end), static_cast<size_t>(at.warp),
                                         launch.units, launch.tiles, kMostBlocks, kMostWarps);
  if (use.warps == 0) return false;
  const Kernel kernel =
      step.activation == RecordType::bf16 ? kernel_of<__nv_bfloat16>(n) : kernel_of<float>(n);
  allow_shared(kernel, use.shared);
  kernel<<<static_cast<unsigned>(use.blocks), static_cast<unsigned>(32 * use.warps), use.shared,
           stream>>>(launch);
  CUDA_CHECK(cudaGetLastError());
  return true;
}

}  // namespace replayeval
