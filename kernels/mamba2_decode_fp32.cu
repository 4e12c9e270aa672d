// One token of Mamba-2 with plain FP32 checkpoints (decode_cuda.h): bound by reading them. A unit
// is some heads of a group of one row, a tile eight rows of a head; four threads hold a row of a
// tile, so that the sums over state_dim have the order of kernels/mamba2.h, and fold it where it
// lies when the row flushes.
#include "kernels/decode_tiles.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 8;
constexpr int kPlaces = 3;  // tiles in a warp's ring

struct Launch {
  Mamba2Layer layer;
  DecodeRows rows;
  DecodeStates states;
  Mamba2DecodeStep step;
  int window, unit_heads, row_units, units, tiles;
};

/// Shared memory in bytes, behind it the warps' rings.
struct Layout {
  int weight_row;  // weights of a head: records, then the checkpoint's
  int x, b, dots, dt, weights, decay, skip, end;

  __host__ __device__ Layout(int head_dim, int state_dim, int window, int heads, int act_bytes) {
    weight_row = window + 1;
    int at = 0;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    x = take(window * heads * head_dim * act_bytes);
    b = take(window * state_dim * act_bytes);
    dots = take(4 * window);
    dt = take(4 * window * heads);
    weights = take(4 * heads * weight_row);
    decay = take(4 * heads);
    skip = take(4 * heads);
    end = at;
  }
};

template <class Act>
__device__ __forceinline__ void put_four(Act* to, float4 v) {
  if constexpr (sizeof(Act) == 4) {
    store4(to, v);
  } else {
    const auto code = [](float x) {
      return __float_as_uint(x) >> 16;
    };  // exact: it came from there
    *reinterpret_cast<uint2*>(to) =
        make_uint2(code(v.x) | code(v.y) << 16, code(v.z) | code(v.w) << 16);
  }
}

template <class Act, int kN16>
__global__ void __launch_bounds__(256, kN16 > 8 ? 1 : 2)
    decode_fp32(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr int kStateDim = 16 * kN16, kTileBytes = kTileRows * kStateDim * 4;
  const Mamba2Layer& layer = p.layer;
  const int head_dim = layer.head_dim, heads = p.unit_heads, window = p.window,
            width = heads * head_dim;
  const Layout at(head_dim, kStateDim, window, heads, sizeof(Act));
  const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31, part = lane & 3;
  const int head_tiles = head_dim / kTileRows, group_heads = layer.heads / layer.groups;
  const int64_t x_stride = int64_t{layer.heads} * head_dim,
                b_stride = int64_t{layer.groups} * kStateDim;
  std::byte* ring = shared + at.end + (tid >> 5) * (kPlaces * kTileBytes);
  const auto tile_of = [&](int unit, int tile) {
    const int row = unit / p.row_units, head = unit % p.row_units * heads + tile / head_tiles;
    return p.states.recurrence + row * p.states.row_stride + head * p.states.head_stride +
           tile % head_tiles * kTileBytes + (lane >> 2) * (4 * kStateDim) + 16 * part;
  };
  // A thread copies what it reads itself, to places in different banks.
  const auto copy = [&](int unit, int tile, int place) {
    const std::byte* from = tile_of(unit, tile);
    std::byte* to = ring + place * kTileBytes + 16 * lane;
#pragma unroll
    for (int m = 0; m < kN16; ++m) copy_async(to + 512 * m, from + 64 * m);
  };
  TileWalk walk(p.units, p.tiles);
  TileCopies<kPlaces, decltype(copy)> copies(walk, copy);
  int place = 0;

  Act* xs = reinterpret_cast<Act*>(shared + at.x);
  Act* bs = reinterpret_cast<Act*>(shared + at.b);
  float* dots = reinterpret_cast<float*>(shared + at.dots);
  float* dts = reinterpret_cast<float*>(shared + at.dt);
  float* weights = reinterpret_cast<float*>(shared + at.weights);
  float* decays = reinterpret_cast<float*>(shared + at.decay);
  float* skips = reinterpret_cast<float*>(shared + at.skip);
  while (walk.next()) {
    const int row = walk.unit / p.row_units, head0 = walk.unit % p.row_units * heads,
              group = head0 / group_heads;
    const int t = p.rows.pending[row];
    const bool flush = t + 1 == window;
    const int64_t slot = int64_t{row} * window;
    float4 c[kN16];
    {
      const Act* from =
          static_cast<const Act*>(p.step.c) + row * b_stride + group * kStateDim + 4 * part;
#pragma unroll
      for (int m = 0; m < kN16; ++m) c[m] = four(from + 16 * m);
    }
    __syncthreads();  // the last unit's readers are done
    Act* ring_x = static_cast<Act*>(p.step.ring_x) + slot * x_stride + int64_t{head0} * head_dim;
    const Act* x = static_cast<const Act*>(p.step.x) + row * x_stride + int64_t{head0} * head_dim;
    gather_runs(
        t + 1, width * static_cast<int>(sizeof(Act)), shared + at.x,
        [&](int j) { return j == t ? x : ring_x + j * x_stride; },
        [&](int j, int offset, uint4 v) {
          if (j == t && !flush) {
            *reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(ring_x + t * x_stride) +
                                      offset) = v;
          }
        });
    for (int i = tid; i < (t + 1) * heads; i += threads) {
      const int j = i / heads, h = head0 + i % heads;
      float* own = p.step.ring_dt + (slot + j) * layer.heads + h;
      const float dt = j == t ? p.step.dt[int64_t{row} * layer.heads + h] : *own;
      dts[i] = dt;
      if (j == t && !flush) *own = dt;
    }
    for (int h = tid; h < heads; h += threads) {
      decays[h] = layer.decay_log2[head0 + h];
      skips[h] = layer.skip ? layer.skip[head0 + h] : 0.0f;
    }
    // B_j . C_t, four threads a record; a flush folds with B_j.
    const Act* own_b = static_cast<const Act*>(p.step.b) + row * b_stride + group * kStateDim;
    Act* ring_b = static_cast<Act*>(p.step.ring_b) + slot * b_stride + group * kStateDim;
    for (int base = 0; base <= t; base += threads / 4) {
      const int record = base + tid / 4, j = min(record, t);
      const Act* from = (j == t ? own_b : ring_b + j * b_stride) + 4 * part;
      float4 v[kN16], sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int m = 0; m < kN16; ++m) v[m] = four(from + 16 * m);
#pragma unroll
      for (int m = 0; m < kN16; ++m) sum = fma4(v[m], c[m], sum);
      const float product = sum_of_lanes(sum);
      if (record > t) continue;
      if (part == 0) dots[j] = product;
#pragma unroll
      for (int m = 0; m < kN16; ++m) {
        if (flush) put_four(bs + j * kStateDim + 16 * m + 4 * part, v[m]);
        if (!flush && j == t && head0 % group_heads == 0)
          put_four(ring_b + t * b_stride + 16 * m + 4 * part, v[m]);
      }
    }
    __syncthreads();
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

    for (int tile = walk.first + (tid >> 5); tile < walk.last; tile += threads >> 5) {
      copies.wait();
      copies.begin();
      const std::byte* state = ring + place * kTileBytes + 16 * lane;
      if (++place == kPlaces) place = 0;
      const int h = tile / head_tiles, q = tile % head_tiles * kTileRows + (lane >> 2);
      const float* weight = weights + h * at.weight_row;
      const Act* own_x = xs + h * head_dim + q;
      const float last_x = to_float(own_x[t * width]);
      float y;
      if (!flush) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int m = 0; m < kN16; ++m)
          sum = fma4(load4(reinterpret_cast<const float*>(state + 512 * m)), c[m], sum);
        y = weight[window] * sum_of_lanes(sum);
#pragma unroll 4
        for (int j = 0; j <= t; ++j) y = __fmaf_rn(weight[j], to_float(own_x[j * width]), y);
      } else {
        const float carry = weight[window];
        float4 s[kN16];
#pragma unroll
        for (int m = 0; m < kN16; ++m) {
          const float4 v = load4(reinterpret_cast<const float*>(state + 512 * m));
          s[m] = make_float4(carry * v.x, carry * v.y, carry * v.z, carry * v.w);
        }
#pragma unroll 1
        for (int j = 0; j <= t; ++j) {
          const float u = weight[j] * to_float(own_x[j * width]);
          const Act* record = bs + j * kStateDim + 4 * part;
#pragma unroll
          for (int m = 0; m < kN16; ++m) s[m] = fma1(u, four(record + 16 * m), s[m]);
        }
        float4* to = reinterpret_cast<float4*>(const_cast<std::byte*>(tile_of(walk.unit, tile)));
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
  // As many heads of a group a unit, up to four, as leave room.
  for (int heads : {4, 3, 2, 1}) {
    if (group_heads % heads != 0) continue;
    launch.unit_heads = heads;
    launch.row_units = layer.heads / heads;
    launch.units = rows.rows * launch.row_units;
    launch.tiles = heads * (layer.head_dim / kTileRows);
    const Layout at(layer.head_dim, n, plan.window, heads, bf16 ? 2 : 4);
    use = TileLaunch::fit(static_cast<size_t>(at.end),
                          static_cast<size_t>(kPlaces * kTileRows * 4 * n), launch.units,
                          launch.tiles);
    if (use.warps >= 8) break;
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
