// One token of GDN with plain FP32 checkpoints (decode_cuda.h): bound by reading them. A unit is
// the value heads of one key head of one row, so that its keys are normalised and multiplied once;
// a tile is 16 rows of a head as they lie in memory. The sums of a row over key_dim with key and
// query are chains as kernels/gdn.h has them, one a thread. A flush needs no other row: the ring's
// corrections are what R and the raw records would give again, so it folds a tile where it lies.
#include <cmath>

#include "kernels/gdn_unit.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 16;
constexpr int kPlaces = 2;  // tiles in a warp's ring
constexpr int kMostWarps = 5, kMostBlocks = 2;

struct Launch {
  GdnUnits units;
  TileWork work;
  DecodeStates states;
  Divisor head_tiles;
};

/// Bytes of two rows of a tile, 16 bytes behind them, so that threads that read the same columns of
/// every second row meet different banks.
__host__ __device__ constexpr int pair_bytes(int key_dim) { return 8 * key_dim + 16; }
/// Bytes of a tile: states, corrections of the ring, v.
__host__ __device__ constexpr int place_bytes(int key_dim, int window, int u_bytes, int act_bytes) {
  return kTileRows / 2 * pair_bytes(key_dim) + kTileRows * (window * u_bytes + act_bytes);
}
__host__ __device__ constexpr int ring_bytes(int place) {
  return kPlaces * place + TilePieces<kPlaces>::kBytes;
}

template <class Act, int kKeyDim>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), kMostBlocks)
    decode_fp32(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ uint64_t barriers[4];
  constexpr unsigned kChunks = kKeyDim / 4, kStateBytes = kTileRows * kKeyDim * 4,
                     kPair = pair_bytes(kKeyDim), kPlaced = kTileRows / 2 * kPair;
  constexpr int kN16 = kKeyDim / 16;
  const GdnLayer& layer = p.units.layer;
  using Unit = GdnUnit<Act, kKeyDim>;
  const int value_dim = layer.value_dim, heads = p.units.heads, window = p.units.window;
  const RecordType ring_u = p.units.ring_u;
  const int u_bytes = ring_u == RecordType::bf16 ? 2 : 4;
  const GdnUnitLayout at(kKeyDim, window, heads, sizeof(Act));
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5,
            warps = static_cast<int>(blockDim.x >> 5) - 1,
            place_size = place_bytes(kKeyDim, window, u_bytes, sizeof(Act));
  std::byte* ring = shared + at.end + warp * ring_bytes(place_size);
  TilePieces<kPlaces> pieces(ring + kPlaces * place_size);
  if (warp < warps) pieces.init();
  if (tid == 0) PreparedPlaces::init(barriers, warps);
  const TileShare share(p.work, shared + at.end + warps * ring_bytes(place_size));
  const PreparedPlaces prepared{barriers};
  TileWalk walk(share, warp, warps);
  walk.move();
  if (!walk.runs.now.real()) return;
  {
    const Unit unit(p.units, walk.runs.now);
    unit.template copy_inputs<Team<0>>(at, shared);
    commit_copies();
  }
  const auto placed = [](unsigned r, unsigned chunk) {
    return (r >> 1) * kPair + (r & 1u) * (4 * kKeyDim) + 16 * chunk;
  };
  const auto copy = [&](const TileRun& run, int tile, int place) {
    const Unit unit(p.units, run);
    const unsigned h = tile / p.head_tiles, head = unit.head0 + h,
                   in_head = tile - static_cast<int>(h) * p.head_tiles;
    std::byte* to = ring + place * place_size;
    pieces.template copy<kTileRows / 2, 8 * kKeyDim>(
        place, to, kPair,
        p.states.recurrence + run.row * p.states.row_stride + head * p.states.head_stride +
            in_head * kStateBytes);
    const int64_t first = head * static_cast<unsigned>(value_dim) + in_head * kTileRows;
    unit.template copy_corrections<kTileRows>(first, to + kPlaced);
    unit.template copy_v<kTileRows>(first, to + kPlaced + kTileRows * window * u_bytes);
  };
  TileCopies<kPlaces, RunSource<decltype(copy)>> copies(share, warp, warps, {copy});
  copies.wait_before();
  __syncthreads();
  {
    const Unit unit(p.units, walk.runs.now);
    unit.template prepare<Team<0>>(at, unit.t + 1 < window, shared, shared);
  }
  if (warp == warps) {
    Unit::prepare_runs(
        p.units, at, true, walk.runs, prepared, shared, [](const Unit&, std::byte*) {}, [](int) {});
    return;
  }

  const float* keys = reinterpret_cast<const float*>(shared + at.keys);
  const int r = 2 * (lane & 7) + (lane >> 3 & 1);
  const bool of_query = lane >= 16;
  const unsigned own_row = placed(static_cast<unsigned>(r), 0);
  for (int run = 0; walk.runs.now.real(); walk.move(), ++run) {
    const Unit unit(p.units, walk.runs.now);
    const int row = unit.row, head0 = unit.head0, t = unit.t, last = walk.runs.now.last;
    Act* o_row = static_cast<Act*>(p.units.step.o) + unit.value_of(row);
    const int64_t appended = unit.value_of(unit.slot(t));
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
      copies.wait();
      copies.begin();
      std::byte* state = ring + pieces.wait() * place_size;
      const std::byte* us = state + kPlaced;
      const int h = walk.tile / p.head_tiles, in_head = walk.tile - h * p.head_tiles;
      const int first = h * value_dim + in_head * kTileRows;
      const auto stored = [&](int j, int i) { return load_record(ring_u, us, j * kTileRows + i); };
      const auto read = [&](const float* operand) {
        float sum = 0.0f;
#pragma unroll
        for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
          const float4 s = *reinterpret_cast<const float4*>(state + own_row + 16 * chunk);
          sum = chain(load4(operand + 4 * chunk), s, sum);
        }
        return sum;
      };
      const float beta = unit.rounded_beta(betas[h]);
      const float *key_weight = key_weights + h * (window + 1),
                  *query_weight = query_weights + h * (window + 1);
      Act* out = o_row + first;
      const float v = to_float(reinterpret_cast<const Act*>(us + kTileRows * window * u_bytes)[r]);
      // The first sixteen threads make corrections, the others outputs; all of them corrections
      // where a flush has its output from the folded state.
      const bool output = of_query && !flush;
      const float* weight = output ? query_weight : key_weight;
      const float product = read(output ? query : own_key);
      float sum = output ? weight[window] * product : __fmaf_rn(weight[window], product, v);
#pragma unroll 4
      for (int j = 0; j < t; ++j) sum = __fmaf_rn(weight[j], stored(j, r), sum);
      const float u = __shfl_sync(0xFFFFFFFFu, beta * sum, lane & 15);
      if (!flush) {
        if (of_query) {
          out[r] = from_float<Act>(__fmaf_rn(query_weight[t], u, sum));
        } else {
          const int64_t to = appended + first + r;
          static_cast<Act*>(p.units.step.ring_v)[to] = from_float<Act>(v);
          store_record(ring_u, p.units.step.ring_u, to, u);
        }
        continue;
      }
      // S = carried S + sum_j (decayed u_j) k_j^T, four threads a row; rows r and r + 8, whose
      // banks differ, are read together.
      const int part = lane & 3;
      const float carry = query_weight[window];
      const float* fold = fold_weights + h * window;
      uint32_t non_finite = 0, infinite = 0;
      __syncwarp();
#pragma unroll 1
      for (int pass = 0; pass < kTileRows / 8; ++pass) {
        const int q = (lane >> 3) + 8 * (lane >> 2 & 1) + 4 * pass;
        const float last_u = __shfl_sync(0xFFFFFFFFu, u, q / 2 + 8 * (q & 1));
        float4* to =
            reinterpret_cast<float4*>(p.states.recurrence + row * p.states.row_stride +
                                      (head0 + h) * p.states.head_stride + in_head * kStateBytes) +
            q * kChunks + part;
        const auto own = [&](int m) {
          return reinterpret_cast<float4*>(
              state + placed(static_cast<unsigned>(q), static_cast<unsigned>(4 * m + part)));
        };
        float4 s[kN16];
#pragma unroll
        for (int m = 0; m < kN16; ++m) {
          const float4 x = *own(m);
          s[m] = make_float4(carry * x.x, carry * x.y, carry * x.z, carry * x.w);
        }
#pragma unroll 1
        for (int j = 0; j <= t; ++j) {
          const float w = fold[j] * (j == t ? last_u : stored(j, q));
          const float* key = keys + j * at.k_row + 4 * part;
#pragma unroll
          for (int m = 0; m < kN16; ++m) s[m] = fma1(w, load4(key + 16 * m), s[m]);
        }
#pragma unroll
        for (int m = 0; m < kN16; ++m) {
          __stcs(to + 4 * m, s[m]);
          *own(m) = s[m];
          if (p.states.health) count_odd(s[m], &non_finite, &infinite);
        }
      }
      TilePieces<kPlaces>::fence_writes();
      __syncwarp();
      const float o = read(query);
      if (!of_query) out[r] = from_float<Act>(o);
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
      (n != 64 && n != 128 && n != 256)) {
    return false;
  }
  if (gdn_decode_few(layer, plan, rows, states, step, stream)) return true;
  const int heads = layer.value_heads / layer.key_heads, head_tiles = layer.value_dim / kTileRows,
            most = std::min(rows.rows, kMostTileRows),
            act_bytes = step.activation == RecordType::bf16 ? 2 : 4;
  const GdnUnitLayout at(n, plan.window, heads, act_bytes);
  const int place = place_bytes(n, plan.window, plan.ring_u == RecordType::bf16 ? 2 : 4, act_bytes);
  const TileLaunch use = TileLaunch::fit(
      static_cast<size_t>(at.end) + TileShare::bytes(most), static_cast<size_t>(ring_bytes(place)),
      most * layer.key_heads, heads * head_tiles, kMostBlocks, kMostWarps);
  if (use.warps == 0) return false;
  const Kernel kernel =
      step.activation == RecordType::bf16 ? kernel_of<__nv_bfloat16>(n) : kernel_of<float>(n);
  start_tiles(use, kernel, rows, plan.window, false, layer.key_heads, heads * head_tiles, stream,
              [&](const TileWork& work) {
                return Launch{
                    {layer, rows, step, static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))),
                     plan.ring_u, plan.beta, plan.window, Divisor(heads)},
                    work,
                    states,
                    Divisor(head_tiles)};
              });
  return true;
}

}  // namespace replayeval
