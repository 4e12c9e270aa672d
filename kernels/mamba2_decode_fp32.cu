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
constexpr int kMostWarps = 7, kMostBlocks = 2;

struct Launch {
  Mamba2Units units;
  TileWork work;
  DecodeStates states;
  Divisor head_tiles;
  int64_t head_gap;  // bytes between heads
};

/// Bytes of a tile and the records' x of its rows.
__host__ __device__ constexpr int place_bytes(int state_dim, int window, int act_bytes) {
  return kTileRows * (4 * state_dim + (window + 3) / 4 * 4 * act_bytes);
}

/// What a warp copies (TileCopies). Every second row lies with its 64-byte halves exchanged, so
/// that the threads that read two rows together meet different banks.
template <class Act, int kStateDim>
struct Source {
  static constexpr int kEach = 16 / sizeof(Act), kXChunks = kTileRows / kEach,
                       kTileBytes = kTileRows * kStateDim * 4;
  const Launch& p;
  std::byte* ring;
  int place_size;
  const std::byte* state = nullptr;  // the unit's, from the thread's 16 bytes on
  const Act* x = nullptr;            // of the thread's record
  int chunks = 0;                    // 16 bytes of x each
  TileRun run = {};

  __device__ void enter(const TileRun& next) {
    run = next;
    const Mamba2Unit<Act, kStateDim> unit(p.units, run);
    const int lane = threadIdx.x & 31;
    state = p.states.recurrence + unit.row * p.states.row_stride +
            unit.head0 * p.states.head_stride + 16 * lane;
    chunks = (run.t + 1) * kXChunks;
    if (lane < chunks) x = x_chunk(unit, lane);
  }
  __device__ const Act* x_chunk(const Mamba2Unit<Act, kStateDim>& unit, int i) const {
    return unit.x_of(i / kXChunks) + int64_t{unit.head0} * p.units.layer.head_dim +
           i % kXChunks * kEach;
  }
  __device__ void copy(int tile, int place) const {
    const int lane = threadIdx.x & 31;
    const std::byte* from = state + tile * int64_t{kTileBytes} + tile / p.head_tiles * p.head_gap;
    std::byte* to = ring + place * place_size;
#pragma unroll
    for (int m = 0; m < kTileBytes / 512; ++m) {
      const int swizzled = lane ^ ((32 * m + lane) / (kStateDim / 4) & 1) << 2;
      copy_async(to + 512 * m + 16 * swizzled, from + 512 * m);
    }
    to += kTileBytes + 16 * lane;
    if (lane < chunks) copy_async(to, x + tile * kTileRows);
    if (chunks <= 32) return;
    const Mamba2Unit<Act, kStateDim> unit(p.units, run);
    for (int i = lane + 32; i < chunks; i += 32)
      copy_async(to + 16 * (i - lane), x_chunk(unit, i) + tile * kTileRows);
  }
};

template <class Act, int kN16>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), kN16 > 8 ? 1 : kMostBlocks)
    decode_fp32(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ uint64_t barriers[4];
  constexpr int kStateDim = 16 * kN16, kTileBytes = kTileRows * kStateDim * 4;
  const Mamba2Layer& layer = p.units.layer;
  const int head_dim = layer.head_dim, heads = p.units.unit_heads, window = p.units.window;
  using Unit = Mamba2Unit<Act, kStateDim>;
  const Mamba2UnitLayout at(kStateDim, window, heads, true);
  constexpr int kEach = 16 / sizeof(Act), kXChunks = kTileRows / kEach;
  const int place_size = place_bytes(kStateDim, window, sizeof(Act));
  const int tid = threadIdx.x, lane = tid & 31, part = lane & 3, warp = tid >> 5,
            warps = static_cast<int>(blockDim.x >> 5) - 1;
  std::byte* ring = shared + at.end + warp * (kPlaces * place_size);
  if (tid == 0) PreparedPlaces::init(barriers, warps);
  const TileShare share(p.work, shared + at.end + warps * (kPlaces * place_size));
  const PreparedPlaces prepared{barriers};
  float* dots = reinterpret_cast<float*>(shared + at.dots);
  TileWalk walk(share, warp, warps);
  walk.move();
  if (!walk.runs.now.real()) return;
  {
    const Unit unit(p.units, walk.runs.now);
    unit.template copy_inputs<Team<0>>(at, shared);
    commit_copies();
    unit.template fetch<Team<0>>();
  }
  const auto tile_of = [&](const Unit& unit, int head, int tile) {
    return p.states.recurrence + unit.row * p.states.row_stride + head * p.states.head_stride +
           tile * kTileBytes;
  };
  TileCopies<kPlaces, Source<Act, kStateDim>> copies(share, warp, warps,
                                                     Source<Act, kStateDim>{p, ring, place_size});
  Unit(p.units, walk.runs.now).template prepare<Team<0>>(at, true, shared, dots, [&] {
    copies.wait_before();
  });
  if (warp == warps) {
    Unit::prepare_runs(
        p.units, at, true, walk.runs, prepared, shared, dots, [](const Unit&, int) {}, [](int) {});
    return;
  }

  int place = 0;
  for (int run = 0; walk.runs.now.real(); walk.move(), ++run) {
    const Unit unit(p.units, walk.runs.now);
    const int row = unit.row, head0 = unit.head0, t = unit.t, last = walk.runs.now.last;
    const bool flush = t + 1 == window;
    const std::byte* of_unit = shared + (run & 1) * at.unit;
    const float* bs = reinterpret_cast<const float*>(of_unit + at.b);
    const float* skips = reinterpret_cast<const float*>(of_unit + at.skip);
    const float* weights = reinterpret_cast<const float*>(of_unit + at.weights);
    prepared.wait_filled(run);
    const float* cs = reinterpret_cast<const float*>(of_unit + at.c);
    // The unit's outputs; its tiles lie behind each other there.
    Act* out =
        static_cast<Act*>(p.units.step.y) + row * unit.x_stride() + int64_t{head0} * head_dim;
    if (flush) {
      // Eight threads a row have two rows each, columns 16 m + 2 i and the one behind, so that what
      // they load of B serves both.
      const int r = lane >> 3, i = lane & 7, odd = r & 1;
      const float *records = bs + 2 * i, *queries = cs + 2 * i;
      for (; walk.tile < last; walk.tile += warps) {
        copies.wait();
        copies.begin();
        const std::byte* state = ring + place * place_size;
        const Act* own_x = reinterpret_cast<const Act*>(state + kTileBytes) + r;
        state += r * (4 * kStateDim) + 8 * i + 64 * odd;
        if (++place == kPlaces) place = 0;
        const int h = walk.tile / p.head_tiles, head_tile = walk.tile - h * p.head_tiles;
        const float* weight = weights + h * at.weight_row;
        const float carry = weight[window];
        float2 s[2][kN16];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int m = 0; m < kN16; ++m) {
            const float2 v = *reinterpret_cast<const float2*>(state + k * (16 * kStateDim) +
                                                              64 * m - (m & 1) * 128 * odd);
            s[k][m] = make_float2(carry * v.x, carry * v.y);
          }
        }
#pragma unroll 2
        for (int j = 0; j <= t; ++j) {
          const float w = weight[j], u0 = w * to_float(own_x[j * kTileRows]),
                      u1 = w * to_float(own_x[j * kTileRows + 4]);
#pragma unroll
          for (int m = 0; m < kN16; ++m) {
            const float2 b = *reinterpret_cast<const float2*>(records + j * kStateDim + 16 * m);
            s[0][m] = make_float2(__fmaf_rn(u0, b.x, s[0][m].x), __fmaf_rn(u0, b.y, s[0][m].y));
            s[1][m] = make_float2(__fmaf_rn(u1, b.x, s[1][m].x), __fmaf_rn(u1, b.y, s[1][m].y));
          }
        }
        std::byte* to = tile_of(unit, head0 + h, head_tile) + r * (4 * kStateDim) + 8 * i;
        uint32_t non_finite = 0, infinite = 0;
        float2 sum[2] = {make_float2(0, 0), make_float2(0, 0)};
#pragma unroll
        for (int m = 0; m < kN16; ++m) {
          const float2 c = *reinterpret_cast<const float2*>(queries + 16 * m);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float2 v = s[k][m];
            __stcs(reinterpret_cast<float2*>(to + k * (16 * kStateDim) + 64 * m), v);
            sum[k] = make_float2(__fmaf_rn(v.x, c.x, sum[k].x), __fmaf_rn(v.y, c.y, sum[k].y));
            if (k == 0) continue;
            if (p.states.health)
              count_odd(make_float4(s[0][m].x, s[0][m].y, v.x, v.y), &non_finite, &infinite);
          }
        }
        if (p.states.health) {
          add_tile_health(p.states.health + int64_t{row} * layer.heads + head0 + h,
                          kTileRows * kStateDim, non_finite, infinite, p.units.rows.position[row]);
        }
        // Lanes 2 i and 2 i + 1: those 8, 4 and 2 apart, then the two.
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int d = 4; d > 0; d /= 2) {
            sum[k].x += __shfl_xor_sync(0xFFFFFFFFu, sum[k].x, d);
            sum[k].y += __shfl_xor_sync(0xFFFFFFFFu, sum[k].y, d);
          }
        }
        if (i < 2) {
          float y = i == 0 ? sum[0].x + sum[0].y : sum[1].x + sum[1].y;
          if (layer.skip) y = __fmaf_rn(skips[h], to_float(own_x[t * kTileRows + 4 * i]), y);
          out[walk.tile * kTileRows + r + 4 * i] = from_float<Act>(y);
        }
      }
      prepared.empty(run);
      continue;
    }
    float4 c[kN16];
#pragma unroll
    for (int m = 0; m < kN16; ++m) c[m] = load4(cs + 16 * m + 4 * part);
    const int odd = lane >> 2 & 1;
    Act* own_out = out + (lane >> 2);
    Act* appended = static_cast<Act*>(p.units.step.ring_x) + unit.slot(t) * unit.x_stride() +
                    int64_t{head0} * head_dim + lane * kEach;
    for (; walk.tile < last; walk.tile += warps) {
      copies.wait();
      copies.begin();
      const std::byte* state =
          ring + place * place_size + (lane >> 2) * (4 * kStateDim) + 16 * part + 64 * odd;
      const std::byte* records = ring + place * place_size + kTileBytes;
      if (++place == kPlaces) place = 0;
      const int h = walk.tile / p.head_tiles;
      const float* weight = weights + h * at.weight_row;
      const Act* own_x = reinterpret_cast<const Act*>(records) + (lane >> 2);
      if (lane < kXChunks) {
        *reinterpret_cast<uint4*>(appended + walk.tile * kTileRows) =
            *reinterpret_cast<const uint4*>(records + 16 * (t * kXChunks + lane));
      }
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int m = 0; m < kN16; ++m) {
        const float4 v =
            load4(reinterpret_cast<const float*>(state + 64 * m - (m & 1) * 128 * odd));
        sum = fma4(v, c[m], sum);
      }
      float y = weight[window] * sum_of_lanes(sum);
      y = add_records<kTileRows>(weight, own_x, t, y);
      if (layer.skip) y = __fmaf_rn(skips[h], to_float(own_x[t * kTileRows]), y);
      if (part == 0) own_out[walk.tile * kTileRows] = from_float<Act>(y);
    }
    prepared.empty(run);
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
  if (mamba2_decode_few(layer, plan, rows, states, step, stream)) return true;
  const bool bf16 = step.activation == RecordType::bf16;
  const size_t place = static_cast<size_t>(place_bytes(n, plan.window, bf16 ? 2 : 4));
  const int most = std::min(rows.rows, kMostTileRows), head_tiles = layer.head_dim / kTileRows;
  TileLaunch use;
  int unit_heads = std::min(group_heads, kMostHeads);
  // As many heads of a group a unit as leave room.
  for (;; --unit_heads) {
    if (group_heads % unit_heads != 0) continue;
    const Mamba2UnitLayout at(n, plan.window, unit_heads, true);
    use = TileLaunch::fit(static_cast<size_t>(at.end) + TileShare::bytes(most), kPlaces * place,
                          most * (layer.heads / unit_heads), unit_heads * head_tiles,
                          n > 128 ? 1 : kMostBlocks, kMostWarps);
    if (use.warps == kMostWarps || unit_heads == 1) break;
  }
  if (use.warps == 0) return false;
  const Kernel kernel = bf16 ? kernel_of<__nv_bfloat16>(n) : kernel_of<float>(n);
  start_tiles(
      use, kernel, rows, plan.window, false, layer.heads / unit_heads, unit_heads * head_tiles,
      stream, [&](const TileWork& work) {
        return Launch{
            {layer, rows, step, plan.window, Divisor(unit_heads), Divisor(group_heads)},
            work,
            states,
            Divisor(head_tiles),
            static_cast<int64_t>(states.head_stride) - int64_t{head_tiles} * kTileRows * n * 4};
      });
  return true;
}

}  // namespace replayeval
