// One token of GDN with plain FP32 checkpoints (decode_cuda.h): bound by reading them. A unit is
// the value heads of one key head of one row, so that its keys are normalised and multiplied once;
// a tile is 32 rows of a head, one a thread, so that the sums over key_dim with key and query are
// chains as kernels/gdn.h has them, and comes in four steps of columns. A flush needs no other row:
// the ring's corrections are what R and the raw records would give again, so it folds eight rows
// after the other where they lie.
#include <cmath>

#include "kernels/gdn_unit.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 32, kSteps = 4;
constexpr int kFlushRows = kTileRows / kSteps;
constexpr int kPlaces = 3;  // steps in a warp's ring
constexpr int kMostWarps = 4, kMostBlocks = 3;

struct Launch {
  GdnUnits units;
  TileWork work;
  DecodeStates states;
  Divisor head_tiles;
};

/// Bytes of a step of a tile, and of a warp: corrections of the ring and v, behind them its places.
__host__ __device__ constexpr int place_bytes(int key_dim) { return kFlushRows * 4 * key_dim; }
__host__ __device__ constexpr int warp_bytes(int key_dim, int window, int u_bytes, int act_bytes) {
  return kTileRows * (window * u_bytes + act_bytes) + kPlaces * place_bytes(key_dim);
}

template <class Act, int kKeyDim>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), kMostBlocks)
    decode_fp32(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ uint64_t barriers[4];
  constexpr int kChunks = kKeyDim / 4, kStepChunks = kChunks / kSteps,
                kStepBytes = kFlushRows * kKeyDim * 4, kN16 = kKeyDim / 16;
  const GdnLayer& layer = p.units.layer;
  using Unit = GdnUnit<Act, kKeyDim>;
  const int value_dim = layer.value_dim, heads = p.units.heads, window = p.units.window;
  const RecordType ring_u = p.units.ring_u;
  const int u_bytes = ring_u == RecordType::bf16 ? 2 : 4;
  const GdnUnitLayout at(kKeyDim, window, heads, sizeof(Act));
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5,
            warps = static_cast<int>(blockDim.x >> 5) - 1,
            own_bytes = warp_bytes(kKeyDim, window, u_bytes, sizeof(Act));
  std::byte* us = shared + at.end + warp * own_bytes;
  std::byte* own_v = us + kTileRows * window * u_bytes;
  std::byte* ring = own_v + kTileRows * sizeof(Act);
  if (tid == 0) PreparedPlaces::init(barriers, 1, warps);
  const TileShare share(p.work, shared + at.end + warps * own_bytes);
  const PreparedPlaces prepared{barriers};
  TileWalk walk(share, warp, warps);
  walk.move();
  if (!walk.runs.now.real()) return;
  {
    const Unit unit(p.units, walk.runs.now);
    unit.template copy_inputs<Team<0>>(at, shared);
    commit_copies();
    if (warp == warps) {
      finish_copies();
      __syncthreads();
      unit.template prepare<Team<0>>(at, unit.t + 1 < window, shared, shared);
      prepared.fill(0);
      Unit::template prepare_runs<1>(p.units, at, walk.runs, prepared, shared,
                                     [](const Unit&, std::byte*) {});
      return;
    }
  }
  const auto tile_of = [&](int row, int head, int tile) {
    return p.states.recurrence + row * p.states.row_stride + head * p.states.head_stride +
           tile * (kTileRows * kKeyDim * 4);
  };
  // A step: some columns of all rows, or all columns of some rows where a flush folds them. 16
  // bytes of a row lie at another place in each row, so that threads that read the same columns of
  // eight rows meet different banks.
  constexpr int kApart = kStepChunks >= 8 ? 1 : 8 / kStepChunks;  // rows that share banks
  const auto swizzled = [](int r, int chunk) {
    return r * kStepChunks + (chunk ^ (r / kApart & (min(kStepChunks, 8) - 1)));
  };
  const auto copy = [&](const TileRun& run, int tile, int step, int place) {
    const int h = tile / p.head_tiles;
    const std::byte* from = tile_of(run.row, run.part * heads + h, tile - h * p.head_tiles);
    std::byte* to = ring + place * kStepBytes;
    if (run.t + 1 == window) {
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
  TileCopies<kPlaces, kSteps, RunSource<decltype(copy)>> copies(share, warp, warps, {copy});
  wait_before_ring<kPlaces>();
  __syncthreads();
  {
    const Unit unit(p.units, walk.runs.now);
    unit.template prepare<Team<0>>(at, unit.t + 1 < window, shared, shared);
  }

  const float* keys = reinterpret_cast<const float*>(shared + at.keys);
  int place = 0;
  for (int run = 0; walk.runs.now.real(); walk.move(), ++run) {
    const Unit unit(p.units, walk.runs.now);
    const int row = unit.row, head0 = unit.head0, t = unit.t, last = walk.runs.now.last;
    const int64_t v_stride = unit.v_stride();
    const bool flush = t + 1 == window;
    const std::byte* of_unit = shared + (run & 1) * at.unit;
    const float* own_key = reinterpret_cast<const float*>(of_unit + at.key);
    const float* query = reinterpret_cast<const float*>(of_unit + at.query);
    const float* key_weights = reinterpret_cast<const float*>(of_unit + at.key_weights);
    const float* query_weights = reinterpret_cast<const float*>(of_unit + at.query_weights);
    const float* fold_weights = reinterpret_cast<const float*>(of_unit + at.fold_weights);
    const float* betas = reinterpret_cast<const float*>(of_unit + at.beta);
    prepared.wait_filled(run);

    for (; walk.tile < last; walk.tile += warps) {
      const int h = walk.tile / p.head_tiles, head_tile = walk.tile - h * p.head_tiles;
      const int64_t first =
          int64_t{head0 + h} * value_dim + head_tile * kTileRows;  // row of the tile
      // The ring's corrections of the tile's rows and v go with the copies of its first step.
      __syncwarp();
      unit.template copy_corrections<kTileRows>(first, us);
      unit.template copy_v<kTileRows>(first, own_v);
      const auto stored = [&](int j, int i) { return load_record(ring_u, us, j * kTileRows + i); };
      const auto v_of = [&](int i) { return to_float(reinterpret_cast<const Act*>(own_v)[i]); };
      const float beta = unit.rounded_beta(betas[h]);
      const float *key_weight = key_weights + h * (window + 1),
                  *query_weight = query_weights + h * (window + 1);
      Act* out = static_cast<Act*>(p.units.step.o) + row * v_stride + first;
      float with_key = 0.0f, with_query = 0.0f;
      if (!flush) {
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
          copies.wait();
          copies.begin();
          const std::byte* state = ring + place * kStepBytes;
          if (++place == kPlaces) place = 0;
          const float *key = own_key + step * (4 * kStepChunks),
                      *q = query + step * (4 * kStepChunks);
#pragma unroll
          for (int chunk = 0; chunk < kStepChunks; ++chunk) {
            const float4 s = *reinterpret_cast<const float4*>(state + 16 * swizzled(lane, chunk));
            with_key = chain(load4(key + 4 * chunk), s, with_key);
            with_query = chain(load4(q + 4 * chunk), s, with_query);
          }
        }
        const float v = v_of(lane);
        float rest = __fmaf_rn(key_weight[window], with_key, v),
              o = query_weight[window] * with_query;
#pragma unroll 4
        for (int j = 0; j < t; ++j) {
          const float u = stored(j, lane);
          rest = __fmaf_rn(key_weight[j], u, rest);
          o = __fmaf_rn(query_weight[j], u, o);
        }
        const float u = beta * rest;
        const int64_t to = unit.slot(t) * v_stride + first + lane;
        static_cast<Act*>(p.units.step.ring_v)[to] = from_float<Act>(v);
        store_record(ring_u, p.units.step.ring_u, to, u);
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
        float rest = __fmaf_rn(key_weight[window], read(own_key), v_of(skip + r));
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
        float4* to =
            reinterpret_cast<float4*>(tile_of(row, head0 + h, head_tile) + step * kStepBytes) +
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
                        kTileRows * kKeyDim, non_finite, infinite, p.units.rows.position[row]);
      }
    }
    prepared.empty(run);
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
      (n != 64 && n != 128 && n != 256) || reinterpret_cast<uintptr_t>(step.v) % 16 != 0) {
    return false;
  }
  if (gdn_decode_few(layer, plan, rows, states, step, stream)) return true;
  const int heads = layer.value_heads / layer.key_heads, head_tiles = layer.value_dim / kTileRows,
            most = std::min(rows.rows, kMostTileRows);
  const GdnUnitLayout at(n, plan.window, heads, step.activation == RecordType::bf16 ? 2 : 4);
  const int warp = warp_bytes(n, plan.window, plan.ring_u == RecordType::bf16 ? 2 : 4,
                              step.activation == RecordType::bf16 ? 2 : 4);
  const TileLaunch use = TileLaunch::fit(static_cast<size_t>(at.end) + TileShare::bytes(most),
                                         static_cast<size_t>(warp), most * layer.key_heads,
                                         heads * head_tiles, kMostBlocks, kMostWarps);
  if (use.warps == 0) return false;
  const Kernel kernel =
      step.activation == RecordType::bf16 ? kernel_of<__nv_bfloat16>(n) : kernel_of<float>(n);
  allow_shared(kernel, use.shared);
  TileWork::each(
      rows, plan.window, false, use.turns, layer.key_heads, heads * head_tiles,
      [&](const TileWork& work) {
        const Launch launch{
            {layer, rows, step, static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))),
             plan.ring_u, plan.beta, plan.window, Divisor(heads)},
            work,
            states,
            Divisor(head_tiles)};
        kernel<<<static_cast<unsigned>(use.blocks), static_cast<unsigned>(32 * (use.warps + 1)),
                 use.shared, stream>>>(launch);
        CUDA_CHECK(cudaGetLastError());
      });
  return true;
}

}  // namespace replayeval
