// One token of GDN with plain FP32 checkpoints (decode_cuda.h): bound by reading them. A unit is
// the value heads of one key head of one row, so that its keys are normalised and multiplied once;
// a tile is eight rows of a head. Half of a warp reads a row with the key each, the other half with
// the query, one chain over key_dim a thread as kernels/gdn.h has it. A flush needs no other row:
// the ring's corrections are what R and the raw records would give again, so it folds a tile where
// it lies.
#include <cmath>

#include "kernels/decode_tiles.cuh"
#include "kernels/gdn_block.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 8;
constexpr int kPlaces = 3;  // tiles in a warp's ring

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
  int k_row;  // floats
  int keys, query, dots, decay, u, v, beta, key_weights, query_weights, fold_weights, end;

  __host__ __device__ Layout(int value_dim, int key_dim, int window, int heads) {
    k_row = key_dim + 4;
    int at = 0;
    const auto take = [&at](int floats) {
      const int from = at;
      at += (4 * floats + 15) / 16 * 16;
      return from;
    };
    keys = take(window * k_row);
    query = take(k_row);
    dots = take(2 * window);
    decay = take(window * heads);
    u = take(window * heads * value_dim);
    v = take(heads * value_dim);
    beta = take(heads);
    // Of a head: records, then the checkpoint's.
    key_weights = take(heads * (window + 1));
    query_weights = take(heads * (window + 1));
    fold_weights = take(heads * window);
    end = at;
  }
};

template <class Act, int kKeyDim>
__global__ void __launch_bounds__(256, kKeyDim > 128 ? 1 : 2)
    decode_fp32(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr int kChunks = kKeyDim / 4, kTileBytes = kTileRows * kKeyDim * 4, kN16 = kKeyDim / 16;
  const GdnLayer& layer = p.layer;
  const int value_dim = layer.value_dim, heads = layer.value_heads / layer.key_heads,
            window = p.window, width = heads * value_dim;
  const Layout at(value_dim, kKeyDim, window, heads);
  const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31;
  const int head_tiles = value_dim / kTileRows;
  const int64_t k_stride = int64_t{layer.key_heads} * kKeyDim,
                v_stride = int64_t{layer.value_heads} * value_dim;
  std::byte* ring = shared + at.end + (tid >> 5) * (kPlaces * kTileBytes);
  const auto tile_of = [&](int unit, int tile) {
    const int row = unit / layer.key_heads,
              head = unit % layer.key_heads * heads + tile / head_tiles;
    return p.states.recurrence + row * p.states.row_stride + head * p.states.head_stride +
           tile % head_tiles * kTileBytes;
  };
  // 16 bytes of a row lie at another place in each row, so that threads that read the same columns
  // of eight rows meet different banks.
  const auto copy = [&](int unit, int tile, int place) {
    const std::byte* from = tile_of(unit, tile);
    std::byte* to = ring + place * kTileBytes;
#pragma unroll
    for (int m = 0; m < kTileBytes / 512; ++m) {
      const int i = 32 * m + lane, row = i / kChunks, chunk = i % kChunks;
      copy_async(to + 16 * (row * kChunks + (chunk ^ row)), from + 16 * i);
    }
  };
  TileWalk walk(p.units, p.tiles);
  TileCopies<kPlaces, decltype(copy)> copies(walk, copy);
  int place = 0;

  float* keys = reinterpret_cast<float*>(shared + at.keys);
  float* query = reinterpret_cast<float*>(shared + at.query);
  float* dots = reinterpret_cast<float*>(shared + at.dots);
  float* decays = reinterpret_cast<float*>(shared + at.decay);
  float* us = reinterpret_cast<float*>(shared + at.u);
  float* vs = reinterpret_cast<float*>(shared + at.v);
  float* betas = reinterpret_cast<float*>(shared + at.beta);
  float* key_weights = reinterpret_cast<float*>(shared + at.key_weights);
  float* query_weights = reinterpret_cast<float*>(shared + at.query_weights);
  float* fold_weights = reinterpret_cast<float*>(shared + at.fold_weights);
  while (walk.next()) {
    const int row = walk.unit / layer.key_heads, key_head = walk.unit % layer.key_heads,
              head0 = key_head * heads;
    const int t = p.rows.pending[row];
    const bool flush = t + 1 == window;
    const int64_t slot = int64_t{row} * window;
    __syncthreads();  // the last unit's readers are done
    const int64_t at_u = slot * v_stride + int64_t{head0} * value_dim;
    // Corrections of the ring, four a load and four loads of a thread in flight.
    {
      const int quads = width / 4, count = t * quads;
      for (int base = tid; base < count; base += 4 * threads) {
        float4 v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int i = base + k * threads;
          if (i >= count) continue;
          const int64_t from = at_u + i / quads * v_stride + i % quads * 4;
          v[k] = p.ring_u == RecordType::bf16
                     ? four(static_cast<const __nv_bfloat16*>(p.step.ring_u) + from)
                     : four(static_cast<const float*>(p.step.ring_u) + from);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (base + k * threads < count) store4(us + 4 * (base + k * threads), v[k]);
        }
      }
    }
    {
      const Act* v =
          static_cast<const Act*>(p.step.v) + row * v_stride + int64_t{head0} * value_dim;
      Act* to =
          static_cast<Act*>(p.step.ring_v) + (slot + t) * v_stride + int64_t{head0} * value_dim;
      for (int i = tid; i < width; i += threads) {
        vs[i] = to_float(v[i]);
        if (!flush) to[i] = v[i];
      }
    }
    for (int i = tid; i < (t + 1) * heads; i += threads) {
      const int j = i / heads, h = head0 + i % heads;
      float* own = p.step.ring_decay + (slot + j) * layer.value_heads + h;
      const float decay = j == t ? p.step.decay_log2[int64_t{row} * layer.value_heads + h] : *own;
      decays[i] = decay;
      if (j == t && !flush) *own = decay;
    }
    for (int i = tid; i < heads; i += threads) {
      const float beta = p.step.beta[int64_t{row} * layer.value_heads + head0 + i];
      if (!flush) p.step.ring_beta[(slot + t) * layer.value_heads + head0 + i] = beta;
      betas[i] = p.beta == RecordType::bf16 ? round_value(DotType::bf16, beta) : beta;
    }
    // Normalised keys of the window and, as the last row, the query; sixteen threads a row.
    {
      const int part = tid & 15;
      Act* ring_k = static_cast<Act*>(p.step.ring_k) + slot * k_stride + key_head * kKeyDim;
      const int64_t own = row * k_stride + key_head * kKeyDim;
      for (int base = 0; base < t + 2; base += threads / 16) {
        const int i = base + (tid >> 4), j = min(i, t + 1);
        const Act* x = j < t    ? ring_k + j * k_stride
                       : j == t ? static_cast<const Act*>(p.step.k) + own
                                : static_cast<const Act*>(p.step.q) + own;
        float value[kN16], squares = 0.0f;
#pragma unroll
        for (int m = 0; m < kN16; ++m) value[m] = to_float(x[part + 16 * m]);
#pragma unroll
        for (int m = 0; m < kN16; ++m) squares = __fmaf_rn(value[m], value[m], squares);
#pragma unroll
        for (int d = 8; d > 0; d >>= 1)
          squares = squares + __shfl_xor_sync(0xFFFFFFFFu, squares, d);
        if (i > t + 1) continue;
        const float factor = (j <= t ? 1.0f : p.query_scale) / sqrtf(squares + 1e-6f);
        float* to = j <= t ? keys + j * at.k_row : query;
#pragma unroll
        for (int m = 0; m < kN16; ++m) to[part + 16 * m] = value[m] * factor;
        if (j == t && !flush) {
#pragma unroll
          for (int m = 0; m < kN16; ++m)
            ring_k[t * k_stride + part + 16 * m] = from_float<Act>(value[m]);
        }
      }
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

    for (int tile = walk.first + (tid >> 5); tile < walk.last; tile += threads >> 5) {
      copies.wait();
      copies.begin();
      std::byte* state = ring + place * kTileBytes;
      if (++place == kPlaces) place = 0;
      const int h = tile / head_tiles, first = tile % head_tiles * kTileRows;
      const int r = lane & 7, side = lane >> 3 & 1;  // lanes from 16 on repeat the others
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
      const float* own_u = us + h * value_dim + first + r;
      const float* weight = (side == 0 ? key_weights : query_weights) + h * (window + 1);
      const float carried = weight[window];
      const float sum = read(side == 0 ? keys + t * at.k_row : query);
      // Of the key: v - carried S k - ..., of the query: carried S q + ...
      float rest =
          side == 0 ? __fmaf_rn(carried, sum, vs[h * value_dim + first + r]) : carried * sum;
#pragma unroll 4
      for (int j = 0; j < t; ++j) rest = __fmaf_rn(weight[j], own_u[j * width], rest);
      const float u = __shfl_sync(0xFFFFFFFFu, betas[h] * rest, r);
      const int64_t out = row * v_stride + int64_t{head0 + h} * value_dim + first + r;
      if (!flush) {
        if (lane < 8) {
          store_record(p.ring_u, p.step.ring_u,
                       (slot + t) * v_stride + int64_t{head0 + h} * value_dim + first + r, u);
        } else if (lane < 16) {
          static_cast<Act*>(p.step.o)[out] = from_float<Act>(__fmaf_rn(weight[t], u, rest));
        }
        continue;
      }
      // S = carried S + sum_j (decayed u_j) k_j^T, four threads a row.
      const int q = lane >> 2, part = lane & 3;
      const float last_u = __shfl_sync(0xFFFFFFFFu, u, q);
      const float carry = query_weights[h * (window + 1) + window];
      const float* fold = fold_weights + h * window;
      const float* row_u = us + h * value_dim + first + q;
      float4 s[kN16];
#pragma unroll
      for (int m = 0; m < kN16; ++m) {
        const float4 v =
            *reinterpret_cast<const float4*>(state + 16 * (q * kChunks + ((4 * m + part) ^ q)));
        s[m] = make_float4(carry * v.x, carry * v.y, carry * v.z, carry * v.w);
      }
#pragma unroll 1
      for (int j = 0; j <= t; ++j) {
        const float w = fold[j] * (j == t ? last_u : row_u[j * width]);
        const float* key = keys + j * at.k_row + 4 * part;
#pragma unroll
        for (int m = 0; m < kN16; ++m) s[m] = fma1(w, load4(key + 16 * m), s[m]);
      }
      __syncwarp();
      float4* to = reinterpret_cast<float4*>(tile_of(walk.unit, tile)) + q * kChunks + part;
      uint32_t non_finite = 0, infinite = 0;
#pragma unroll
      for (int m = 0; m < kN16; ++m) {
        __stcs(to + 4 * m, s[m]);
        *reinterpret_cast<float4*>(state + 16 * (q * kChunks + ((4 * m + part) ^ q))) = s[m];
        if (p.states.health) count_odd(s[m], &non_finite, &infinite);
      }
      __syncwarp();
      const float o = read(query);
      if (lane < 8) static_cast<Act*>(p.step.o)[out] = from_float<Act>(o);
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
      plan.flush_output != FlushOutput::recurrence || !stored ||
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
  const Layout at(layer.value_dim, n, plan.window, layer.value_heads / layer.key_heads);
  const TileLaunch use =
      TileLaunch::fit(static_cast<size_t>(at.end), static_cast<size_t>(kPlaces * kTileRows * 4 * n),
                      launch.units, launch.tiles);
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
