// One token of Mamba-2 with plain FP32 checkpoints (decode_cuda.h): bound by reading them. A unit
// is some heads of a group of one row, a tile eight rows of a head; four threads hold a row of a
// tile, so that the sums over state_dim have the order of kernels/mamba2.h, and fold it where it
// lies when the row flushes.
#include "kernels/mamba2_unit.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 8;
constexpr int kPlaces = 3;      // tiles in a warp's ring
constexpr int kMostHeads = 16;  // of a unit

struct Launch {
  Mamba2Units units;
  DecodeStates states;
  int tiles;
};

/// Bytes of a tile and the records' x of its rows.
__host__ __device__ constexpr int place_bytes(int state_dim, int window, int act_bytes) {
  return kTileRows * (4 * state_dim + window * act_bytes);
}

template <class Act, int kN16>
__global__ void __launch_bounds__(256, kN16 > 8 ? 1 : 2)
    decode_fp32(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr int kStateDim = 16 * kN16, kTileBytes = kTileRows * kStateDim * 4;
  const Mamba2Layer& layer = p.units.layer;
  const int head_dim = layer.head_dim, heads = p.units.unit_heads, window = p.units.window;
  using Unit = Mamba2Unit<Act, kStateDim>;
  const Mamba2UnitLayout at(kStateDim, window, heads, sizeof(Act));
  constexpr int kEach = 16 / sizeof(Act), kXChunks = kTileRows / kEach;
  const int place_size = place_bytes(kStateDim, window, sizeof(Act));
  const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31, part = lane & 3;
  const int head_tiles = head_dim / kTileRows;
  std::byte* ring = shared + at.end + (tid >> 5) * (kPlaces * place_size);
  const auto tile_of = [&](int row, int head, int tile) {
    return p.states.recurrence + row * p.states.row_stride + head * p.states.head_stride +
           tile % head_tiles * kTileBytes;
  };
  // Every second row lies with its 64-byte halves exchanged, so that the threads that read two rows
  // together meet different banks.
  const auto copy = [&](int index, int tile, int, int place, int t) {
    const Unit unit(p.units, index);
    const int head = unit.head0 + tile / head_tiles;
    const std::byte* from = tile_of(unit.row, head, tile);
    std::byte* to = ring + place * place_size;
    constexpr int kChunks = kStateDim / 4;
#pragma unroll
    for (int m = 0; m < kTileBytes / 512; ++m) {
      const int i = 32 * m + lane;
      copy_async(to + 16 * (i ^ (i / kChunks & 1) << 2), from + 16 * i);
    }
    const int64_t first = int64_t{head} * head_dim + tile % head_tiles * kTileRows;
    for (int i = lane; i < (t + 1) * kXChunks; i += 32) {
      copy_async(to + kTileBytes + 16 * i,
                 unit.x_of(i / kXChunks, t) + first + i % kXChunks * kEach);
    }
  };
  const TileShare share(p.units.units, p.tiles);
  TileRuns runs(&share, p.units.rows.pending, p.units.row_units);
  TileCopies<kPlaces, 1, decltype(copy)> copies(runs, copy);
  if (runs.next.real()) Unit(p.units, runs.next.unit).copy_inputs(at, runs.next_t, shared);
  commit_copies();

  const float* weights = reinterpret_cast<const float*>(shared + at.weights);
  int place = 0, walked = 0;
  for (runs.move(); runs.now.real(); runs.move()) {
    const Unit unit(p.units, runs.now.unit);
    const int row = unit.row, head0 = unit.head0, t = runs.t;
    const bool flush = t + 1 == window;
    const std::byte* inputs = shared + (runs.index & 1) * at.inputs;
    const Act* bs = reinterpret_cast<const Act*>(inputs + at.b);
    const float* skips = reinterpret_cast<const float*>(inputs + at.skip);
    // The inputs went with the first copy of the last unit; later ones have been waited for since.
    if (walked < kPlaces) finish_copies();
    walked = 0;
    __syncthreads();  // and the last unit's readers are done
    if (runs.next.real()) {
      Unit(p.units, runs.next.unit)
          .copy_inputs(at, runs.next_t, shared + (~runs.index & 1) * at.inputs);
    }
    float4 c[kN16];
#pragma unroll
    for (int m = 0; m < kN16; ++m)
      c[m] = four(reinterpret_cast<const Act*>(inputs + at.c) + 16 * m + 4 * part);
    unit.prepare(at, t, !flush, flush, inputs, c, shared);

    for (int tile = runs.now.first + (tid >> 5); tile < runs.now.last; tile += threads >> 5) {
      copies.wait();
      copies.begin();
      ++walked;
      const int odd = lane >> 2 & 1;
      const std::byte* state =
          ring + place * place_size + (lane >> 2) * (4 * kStateDim) + 16 * part + 64 * odd;
      const auto state_four = [&](int m) {
        return load4(reinterpret_cast<const float*>(state + 64 * m - (m & 1) * 128 * odd));
      };
      const std::byte* records = ring + place * place_size + kTileBytes;
      if (++place == kPlaces) place = 0;
      const int h = tile / head_tiles, q = tile % head_tiles * kTileRows + (lane >> 2);
      const float* weight = weights + h * at.weight_row;
      const Act* own_x = reinterpret_cast<const Act*>(records) + (lane >> 2);
      const float last_x = to_float(own_x[t * kTileRows]);
      float y;
      if (!flush) {
        if (lane < kXChunks) {
          Act* to = static_cast<Act*>(p.units.step.ring_x) + unit.slot(t) * unit.x_stride() +
                    int64_t{head0 + h} * head_dim + tile % head_tiles * kTileRows;
          *reinterpret_cast<uint4*>(to + lane * kEach) =
              *reinterpret_cast<const uint4*>(records + 16 * (t * kXChunks + lane));
        }
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int m = 0; m < kN16; ++m) sum = fma4(state_four(m), c[m], sum);
        y = weight[window] * sum_of_lanes(sum);
#pragma unroll 4
        for (int j = 0; j <= t; ++j) y = __fmaf_rn(weight[j], to_float(own_x[j * kTileRows]), y);
      } else {
        const float carry = weight[window];
        float4 s[kN16];
#pragma unroll
        for (int m = 0; m < kN16; ++m) {
          const float4 v = state_four(m);
          s[m] = make_float4(carry * v.x, carry * v.y, carry * v.z, carry * v.w);
        }
#pragma unroll 1
        for (int j = 0; j <= t; ++j) {
          const float u = weight[j] * to_float(own_x[j * kTileRows]);
          const Act* record = bs + j * kStateDim + 4 * part;
#pragma unroll
          for (int m = 0; m < kN16; ++m) s[m] = fma1(u, four(record + 16 * m), s[m]);
        }
        float4* to = reinterpret_cast<float4*>(tile_of(row, head0 + h, tile)) +
                     (lane >> 2) * (kStateDim / 4) + part;
        float4 sum = make_float4(0, 0, 0, 0);
        uint32_t non_finite = 0, infinite = 0;
#pragma unroll
        for (int m = 0; m < kN16; ++m) {
          __stcs(to + 4 * m, s[m]);
          sum = fma4(s[m], c[m], sum);
          if (p.states.health) count_odd(s[m], &non_finite, &infinite);
        }
        y = sum_of_lanes(sum);
        if (p.states.health) {
          add_tile_health(p.states.health + int64_t{row} * layer.heads + head0 + h,
                          kTileRows * kStateDim, non_finite, infinite, p.units.rows.position[row]);
        }
      }
      if (layer.skip) y = __fmaf_rn(skips[h], last_x, y);
      if (part == 0) {
        static_cast<Act*>(
            p.units.step.y)[row * unit.x_stride() + int64_t{head0 + h} * head_dim + q] =
            from_float<Act>(y);
      }
    }
  }
}

using Kernel = void (*)(const Launch);
template <class Act>
Kernel kernel_of(int state_dim) {
  return state_dim == 128  ? decode_fp32<Act, 8>
         : state_dim == 64 ? decode_fp32<Act, 4>
                           : decode_fp32<Act, 16>;
}

}  // namespace

bool mamba2_decode_fp32(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                        const DecodeStates& states, const Mamba2DecodeStep& step,
                        CudaStream stream) {
  const int n = layer.state_dim, group_heads = layer.heads / layer.groups;
  if (plan.read || !is_plain_fp32(*plan.recurrence.format) || plan.dot != DotType::fp32 ||
      plan.flush_output != FlushOutput::recurrence || (n != 64 && n != 128 && n != 256)) {
    return false;
  }
  const bool bf16 = step.activation == RecordType::bf16;
  Launch launch{{layer, rows, step, plan.window, 0, 0, 0}, states, 0};
  TileLaunch use;
  // As many heads of a group a unit as leave room.
  for (int heads = std::min(group_heads, kMostHeads); heads > 0; --heads) {
    if (group_heads % heads != 0) continue;
    launch.units.unit_heads = heads;
    launch.units.row_units = layer.heads / heads;
    launch.units.units = rows.rows * launch.units.row_units;
    launch.tiles = heads * (layer.head_dim / kTileRows);
    const Mamba2UnitLayout at(n, plan.window, heads, bf16 ? 2 : 4);
    use = TileLaunch::fit(static_cast<size_t>(at.end),
                          static_cast<size_t>(kPlaces * place_bytes(n, plan.window, bf16 ? 2 : 4)),
                          launch.units.units, launch.tiles, 2, 8);
    if (use.warps >= 7) break;
  }
  if (use.warps == 0) return false;
  const Kernel kernel = bf16 ? kernel_of<__nv_bfloat16>(n) : kernel_of<float>(n);
  allow_shared(kernel, use.shared);
  kernel<<<static_cast<unsigned>(use.blocks), static_cast<unsigned>(32 * use.warps), use.shared,
           stream>>>(launch);
  CUDA_CHECK(cudaGetLastError());
  return true;
}

}  // namespace replayeval
