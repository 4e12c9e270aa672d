// One token of Mamba-2 with plain FP32 checkpoints (decode_cuda.h): bound by reading them. A unit
// is some heads of a group of one row, a tile eight rows of a head; four threads hold a row of a
// tile, so that the sums over state_dim have the order of kernels/mamba2.h, and fold it where it
// lies when the row flushes.
#include "kernels/decode_tiles.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 8;
constexpr int kPlaces = 3;     // tiles in a warp's ring
constexpr int kMostHeads = 4;  // of a unit

struct Launch {
  Mamba2Layer layer;
  DecodeRows rows;
  DecodeStates states;
  Mamba2DecodeStep step;
  int window, unit_heads, row_units, units, tiles;
};

/// Shared memory in bytes, behind it the warps' rings.
struct Layout {
  int weight_row;                     // weights of a head: records, then the checkpoint's
  int b, c, dt, decay, skip, inputs;  // of a unit, twice
  int dots, weights, end;
  int place;  // of a tile and the records' x of its rows

  __host__ __device__ Layout(int state_dim, int window, int heads, int act_bytes) {
    weight_row = window + 1;
    int at = 0;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    b = take(window * state_dim * act_bytes);
    c = take(state_dim * act_bytes);
    dt = take(4 * window * heads);
    decay = take(4 * heads);
    skip = take(4 * heads);
    inputs = at;
    at *= 2;
    dots = take(4 * window);
    weights = take(4 * heads * weight_row);
    end = at;
    place = kTileRows * (4 * state_dim + window * act_bytes);
  }
};

template <class Act, int kN16>
__global__ void __launch_bounds__(256, kN16 > 8 ? 1 : 2)
    decode_fp32(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr int kStateDim = 16 * kN16, kTileBytes = kTileRows * kStateDim * 4;
  const Mamba2Layer& layer = p.layer;
  const int head_dim = layer.head_dim, heads = p.unit_heads, window = p.window;
  const Layout at(kStateDim, window, heads, sizeof(Act));
  constexpr int kEach = 16 / sizeof(Act), kXChunks = kTileRows / kEach;
  const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31, part = lane & 3;
  const int head_tiles = head_dim / kTileRows, group_heads = layer.heads / layer.groups;
  const int64_t x_stride = int64_t{layer.heads} * head_dim,
                b_stride = int64_t{layer.groups} * kStateDim;
  std::byte* ring = shared + at.end + (tid >> 5) * (kPlaces * at.place);
  const auto tile_of = [&](int row, int head, int tile) {
    return p.states.recurrence + row * p.states.row_stride + head * p.states.head_stride +
           tile % head_tiles * kTileBytes;
  };
  // Every second row lies with its 64-byte halves exchanged, so that the threads that read two rows
  // together meet different banks.
  const auto copy = [&](int unit, int tile, int, int place, int t) {
    const int row = unit / p.row_units, head = unit % p.row_units * heads + tile / head_tiles;
    const std::byte* from = tile_of(row, head, tile);
    std::byte* to = ring + place * at.place;
    constexpr int kChunks = kStateDim / 4;
#pragma unroll
    for (int m = 0; m < kTileBytes / 512; ++m) {
      const int i = 32 * m + lane;
      copy_async(to + 16 * (i ^ (i / kChunks & 1) << 2), from + 16 * i);
    }
    const int64_t first = int64_t{head} * head_dim + tile % head_tiles * kTileRows;
    for (int i = lane; i < (t + 1) * kXChunks; i += 32) {
      const int j = i / kXChunks;
      const Act* x =
          j == t ? static_cast<const Act*>(p.step.x) + row * x_stride
                 : static_cast<const Act*>(p.step.ring_x) + (int64_t{row} * window + j) * x_stride;
      copy_async(to + kTileBytes + 16 * i, x + first + i % kXChunks * kEach);
    }
  };
  const TileShare share(p.units, p.tiles);
  TileRuns runs(&share, p.rows.pending, p.row_units);
  TileCopies<kPlaces, 1, decltype(copy)> copies(runs, copy);
  // A unit's records of B, its C, steps, decays and skips.
  const auto copy_inputs = [&](int unit, int t, std::byte* to) {
    const int row = unit / p.row_units, head0 = unit % p.row_units * heads,
              group = head0 / group_heads;
    const int64_t slot = int64_t{row} * window;
    constexpr int kChunks = kStateDim / kEach;
    const Act* own = static_cast<const Act*>(p.step.b) + row * b_stride + group * kStateDim;
    const Act* ring_b =
        static_cast<const Act*>(p.step.ring_b) + slot * b_stride + group * kStateDim;
    for (int i = tid; i < (t + 1) * kChunks; i += threads) {
      const int j = i / kChunks;
      copy_async(to + at.b + 16 * i, (j == t ? own : ring_b + j * b_stride) + i % kChunks * kEach);
    }
    if (tid < kChunks) {
      copy_async(to + at.c + 16 * tid, static_cast<const Act*>(p.step.c) + row * b_stride +
                                           group * kStateDim + tid * kEach);
    }
    const float* own_dt = p.step.dt + int64_t{row} * layer.heads + head0;
    const float* ring_dt = p.step.ring_dt + slot * layer.heads + head0;
    for (int i = tid; i < (t + 1) * heads; i += threads) {
      const int j = i / heads;
      copy_word(to + at.dt + 4 * i, (j == t ? own_dt : ring_dt + j * layer.heads) + i % heads);
    }
    for (int h = tid; h < heads; h += threads) {
      copy_word(to + at.decay + 4 * h, layer.decay_log2 + head0 + h);
      if (layer.skip) copy_word(to + at.skip + 4 * h, layer.skip + head0 + h);
    }
  };
  if (runs.next.real()) copy_inputs(runs.next.unit, runs.next_t, shared);
  commit_copies();

  float* dots = reinterpret_cast<float*>(shared + at.dots);
  float* weights = reinterpret_cast<float*>(shared + at.weights);
  int place = 0, walked = 0;
  for (runs.move(); runs.now.real(); runs.move()) {
    const int row = runs.now.unit / p.row_units, head0 = runs.now.unit % p.row_units * heads,
              group = head0 / group_heads, t = runs.t;
    const bool flush = t + 1 == window;
    std::byte* inputs = shared + (runs.index & 1) * at.inputs;
    const Act* bs = reinterpret_cast<const Act*>(inputs + at.b);
    const float* dts = reinterpret_cast<const float*>(inputs + at.dt);
    const float* decays = reinterpret_cast<const float*>(inputs + at.decay);
    const float* skips = reinterpret_cast<const float*>(inputs + at.skip);
    // The inputs went with the first copy of the last unit; later ones have been waited for since.
    if (walked < kPlaces) finish_copies();
    walked = 0;
    __syncthreads();  // and the last unit's readers are done
    if (runs.next.real())
      copy_inputs(runs.next.unit, runs.next_t, shared + (~runs.index & 1) * at.inputs);
    float4 c[kN16];
#pragma unroll
    for (int m = 0; m < kN16; ++m)
      c[m] = four(reinterpret_cast<const Act*>(inputs + at.c) + 16 * m + 4 * part);
    if (!flush) {
      const int64_t slot = int64_t{row} * window + t;
      for (int h = tid; h < heads; h += threads)
        p.step.ring_dt[slot * layer.heads + head0 + h] = dts[t * heads + h];
      constexpr int kChunks = kStateDim / kEach;
      if (head0 % group_heads == 0 && tid < kChunks) {
        Act* to = static_cast<Act*>(p.step.ring_b) + slot * b_stride + group * kStateDim;
        *reinterpret_cast<uint4*>(to + tid * kEach) =
            *reinterpret_cast<const uint4*>(bs + t * kStateDim + tid * kEach);
      }
      // B_j . C_t, four threads a record.
      for (int base = 0; base <= t; base += threads / 4) {
        const int record = base + tid / 4, j = min(record, t);
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int m = 0; m < kN16; ++m)
          sum = fma4(four(bs + j * kStateDim + 16 * m + 4 * part), c[m], sum);
        const float product = sum_of_lanes(sum);
        if (record <= t && part == 0) dots[j] = product;
      }
      __syncthreads();
    }
    for (int i = tid; i < (t + 2) * heads; i += threads) {
      const int j = i / heads, h = i % heads;
      const bool carry = j == t + 1;
      float exponent = 0.0f;
      for (int k = carry ? 0 : j + 1; k <= t; ++k)
        exponent = exponent + dts[k * heads + h] * decays[h];
      float weight = exp2_ordered(exponent);
      if (!carry) weight = weight * dts[j * heads + h];
      if (!carry && !flush) weight = weight * dots[j];
      weights[h * at.weight_row + (carry ? window : j)] = weight;
    }
    __syncthreads();

    for (int tile = runs.now.first + (tid >> 5); tile < runs.now.last; tile += threads >> 5) {
      copies.wait();
      copies.begin();
      ++walked;
      const int odd = lane >> 2 & 1;
      const std::byte* state =
          ring + place * at.place + (lane >> 2) * (4 * kStateDim) + 16 * part + 64 * odd;
      const auto state_four = [&](int m) {
        return load4(reinterpret_cast<const float*>(state + 64 * m - (m & 1) * 128 * odd));
      };
      const std::byte* records = ring + place * at.place + kTileBytes;
      if (++place == kPlaces) place = 0;
      const int h = tile / head_tiles, q = tile % head_tiles * kTileRows + (lane >> 2);
      const float* weight = weights + h * at.weight_row;
      const Act* own_x = reinterpret_cast<const Act*>(records) + (lane >> 2);
      const float last_x = to_float(own_x[t * kTileRows]);
      float y;
      if (!flush) {
        if (lane < kXChunks) {
          Act* to = static_cast<Act*>(p.step.ring_x) + (int64_t{row} * window + t) * x_stride +
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
                          kTileRows * kStateDim, non_finite, infinite, p.rows.position[row]);
        }
      }
      if (layer.skip) y = __fmaf_rn(skips[h], last_x, y);
      if (part == 0) {
        static_cast<Act*>(p.step.y)[row * x_stride + int64_t{head0 + h} * head_dim + q] =
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
  Launch launch{layer, rows, states, step, plan.window, 0, 0, 0, 0};
  TileLaunch use;
  // As many heads of a group a unit as leave room.
  for (int heads = std::min(group_heads, kMostHeads); heads > 0; --heads) {
    if (group_heads % heads != 0) continue;
    launch.unit_heads = heads;
    launch.row_units = layer.heads / heads;
    launch.units = rows.rows * launch.row_units;
    launch.tiles = heads * (layer.head_dim / kTileRows);
    const Layout at(n, plan.window, heads, bf16 ? 2 : 4);
    use = TileLaunch::fit(static_cast<size_t>(at.end), static_cast<size_t>(kPlaces * at.place),
                          launch.units, launch.tiles, 2, 8);
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
