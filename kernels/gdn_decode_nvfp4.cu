// Outputs and corrections of a token of GDN (decode_cuda.h) from checkpoints of NVFP4 and of other
// 4-bit elements with its scales, for the rows that do not flush: bound by instructions. A unit is
// the value heads of one key head of one row, a tile 32 rows of a head, one a thread, whose sums
// with key and query are chains as kernels/gdn.h has them.
#include <cmath>

#include "kernels/gdn_unit.cuh"
#include "kernels/nvfp4.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 32;
constexpr int kPlaces = 2;  // tiles in a warp's ring
constexpr int kMostWarps = 4, kMostBlocks = 4;

struct Launch {
  GdnUnits units;
  TileWork work;
  const std::byte* read;
  size_t row_stride, head_stride, scales, outer;
  NarrowElement element;
  Divisor head_tiles;
};

/// Bytes of a tile: codes, scales, v, the ring's corrections.
__host__ __device__ constexpr int place_bytes(int key_dim, int window, int u_bytes, int act_bytes) {
  return kTileRows * (key_dim / 2 + key_dim / 16 + act_bytes + window * u_bytes);
}

template <class Act, int kN16, class Codes>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), kMostBlocks)
    read_nvfp4(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ uint64_t barriers[4];
  constexpr int kKeyDim = 16 * kN16, kCodeBytes = kTileRows * kKeyDim / 2,
                kScaleBytes = kTileRows * kN16, kVBytes = kTileRows * sizeof(Act);
  using Unit = GdnUnit<Act, kKeyDim>;
  const GdnLayer& layer = p.units.layer;
  const int value_dim = layer.value_dim, heads = p.units.heads, window = p.units.window;
  const RecordType ring_u = p.units.ring_u;
  const GdnUnitLayout at(kKeyDim, window, heads, sizeof(Act));
  const int place_size =
      place_bytes(kKeyDim, window, ring_u == RecordType::bf16 ? 2 : 4, sizeof(Act));
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5,
            warps = static_cast<int>(blockDim.x >> 5) - 1;
  std::byte* ring = shared + at.end + warp * (kPlaces * place_size);
  if (tid == 0) PreparedPlaces::init(barriers, 1, warps);
  const TileShare share(p.work, shared + at.end + warps * (kPlaces * place_size));
  const PreparedPlaces prepared{barriers};
  TileWalk walk(share, warp, warps);
  walk.move();
  if (!walk.runs.now.real()) return;
  const auto scales = [&](auto team, const Unit& unit, std::byte* place) {
    using Team = decltype(team);
    for (int h = Team::rank(); h < heads; h += Team::size()) {
      copy_word(place + at.scale + 4 * h,
                p.read + unit.row * p.row_stride + (unit.head0 + h) * p.head_stride + p.outer);
    }
  };
  {
    const Unit unit(p.units, walk.runs.now);
    unit.template copy_inputs<Team<0>>(at, shared);
    scales(Team<0>(), unit, shared);
    commit_copies();
    if (warp == warps) {
      finish_copies();
      __syncthreads();
      unit.template prepare<Team<0>>(at, unit.t + 1 < window, shared, shared);
      prepared.fill(0);
      Unit::template prepare_runs<1>(
          p.units, at, walk.runs, prepared, shared,
          [&](const Unit& next, std::byte* place) { scales(Team<1>(), next, place); });
      return;
    }
  }
  const auto copy = [&](const TileRun& run, int tile, int, int place) {
    const Unit unit(p.units, run);
    const int h = tile / p.head_tiles, head = unit.head0 + h,
              row = (tile - h * p.head_tiles) * kTileRows;
    const std::byte* from = p.read + unit.row * p.row_stride + head * p.head_stride;
    std::byte* to = ring + place * place_size;
#pragma unroll
    for (int i = lane; i < kCodeBytes / 16; i += 32) {
      copy_async(to + 16 * nvfp4_chunk<kN16>(i / (kN16 / 2), i % (kN16 / 2)),
                 from + row * (kKeyDim / 2) + 16 * i);
    }
    for (int i = lane; i < kScaleBytes / 16; i += 32)
      copy_async(to + kCodeBytes + 16 * i, from + p.scales + row * kN16 + 16 * i);
    const int64_t first = int64_t{head} * value_dim + row;
    unit.template copy_v<kTileRows>(first, to + kCodeBytes + kScaleBytes);
    unit.template copy_corrections<kTileRows>(first, to + kCodeBytes + kScaleBytes + kVBytes);
  };
  TileCopies<kPlaces, 1, RunSource<decltype(copy)>> copies(share, warp, warps, {copy});
  wait_before_ring<kPlaces>();
  __syncthreads();
  {
    const Unit unit(p.units, walk.runs.now);
    unit.template prepare<Team<0>>(at, unit.t + 1 < window, shared, shared);
  }

  const uint32_t unit_matrix = unit_part();
  const Codes element(p.element);
  int place = 0;
  for (int run = 0; walk.runs.now.real(); walk.move(), ++run) {
    const Unit unit(p.units, walk.runs.now);
    const int t = unit.t, last = walk.runs.now.last;
    const bool flush = t + 1 == window;
    const std::byte* of_unit = shared + (run & 1) * at.unit;
    const float* key = reinterpret_cast<const float*>(of_unit + at.key);
    const float* query = reinterpret_cast<const float*>(of_unit + at.query);
    prepared.wait_filled(run);
    for (; walk.tile < last; walk.tile += warps) {
      copies.wait();
      copies.begin();
      const std::byte* packed = ring + place * place_size;
      if (++place == kPlaces) place = 0;
      const int h = walk.tile / p.head_tiles;
      const int64_t first =
          int64_t{unit.head0 + h} * value_dim + (walk.tile - h * p.head_tiles) * kTileRows + lane;
      const int64_t here = unit.row * unit.v_stride() + first,
                    appended = unit.slot(t) * unit.v_stride() + first;
      const float outer = p.element.power * reinterpret_cast<const float*>(of_unit + at.scale)[h];
      float with_key = 0.0f, with_query = 0.0f;
      bool nan = false;
#pragma unroll
      for (int m = 0; m < kN16; m += 4) {
        const uint32_t scales =
            *reinterpret_cast<const uint32_t*>(packed + kCodeBytes + lane * kN16 + m);
        nan = nan || nan_scale(scales);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint2 codes = *reinterpret_cast<const uint2*>(
              packed + 16 * nvfp4_chunk<kN16>(lane, (m + k) / 2) + k % 2 * 8);
          const typename Codes::Scale scale = element.scale(scales, k);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float widened[8], s[8];
            element.widen(half == 0 ? codes.x : codes.y, scale, unit_matrix, widened);
#pragma unroll
            for (int i = 0; i < 8; ++i) s[Codes::column(i)] = widened[i] * outer;
            const int n = 16 * (m + k) + 8 * half;
            const float4 low = make_float4(s[0], s[1], s[2], s[3]),
                         high = make_float4(s[4], s[5], s[6], s[7]);
            with_key = chain(load4(key + n + 4), high, chain(load4(key + n), low, with_key));
            with_query =
                chain(load4(query + n + 4), high, chain(load4(query + n), low, with_query));
          }
        }
      }
      if (nan) with_key = with_query = __int_as_float(0x7FC00000);
      const float *key_weight =
                      reinterpret_cast<const float*>(of_unit + at.key_weights) + h * (window + 1),
                  *query_weight =
                      reinterpret_cast<const float*>(of_unit + at.query_weights) + h * (window + 1);
      const std::byte* us = packed + kCodeBytes + kScaleBytes + kVBytes;
      const float v =
          to_float(reinterpret_cast<const Act*>(packed + kCodeBytes + kScaleBytes)[lane]);
      float rest = __fmaf_rn(key_weight[window], with_key, v),
            o = query_weight[window] * with_query;
#pragma unroll 4
      for (int j = 0; j < t; ++j) {
        const float u = load_record(ring_u, us, j * kTileRows + lane);
        rest = __fmaf_rn(key_weight[j], u, rest);
        o = __fmaf_rn(query_weight[j], u, o);
      }
      const float u =
          unit.rounded_beta(reinterpret_cast<const float*>(of_unit + at.beta)[h]) * rest;
      static_cast<Act*>(p.units.step.o)[here] = from_float<Act>(__fmaf_rn(query_weight[t], u, o));
      if (!flush) {
        static_cast<Act*>(p.units.step.ring_v)[appended] = from_float<Act>(v);
        store_record(ring_u, p.units.step.ring_u, appended, u);
      }
    }
    prepared.empty(run);
  }
}

using Kernel = void (*)(const Launch);
template <class Act, class Codes>
Kernel kernel_of(int key_dim) {
  return key_dim == 128  ? read_nvfp4<Act, 8, Codes>
         : key_dim == 64 ? read_nvfp4<Act, 4, Codes>
                         : read_nvfp4<Act, 16, Codes>;
}
template <class Act>
Kernel kernel_of(NarrowElement::Kind kind, int key_dim) {
  switch (kind) {
    case NarrowElement::Kind::e2m1:
      return kernel_of<Act, FloatCodes<1>>(key_dim);
    case NarrowElement::Kind::e3m0:
      return kernel_of<Act, FloatCodes<0>>(key_dim);
    case NarrowElement::Kind::fixed_point:
      return kernel_of<Act, FixedPointCodes>(key_dim);
  }
  return nullptr;
}

}  // namespace

bool gdn_read_nvfp4(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                    const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream) {
  const StateFormat& format = plan.read ? *plan.read->format : *plan.recurrence.format;
  const int n = layer.key_dim, heads = layer.value_heads / layer.key_heads;
  const PackedLayout l = packed_layout(format.descriptor, layer.value_dim, n);
  const std::optional<NarrowElement> element = NarrowElement::of(format, l);
  if (!element || (n != 64 && n != 128 && n != 256) || l.scales % 16 != 0 ||
      layer.value_dim % kTileRows != 0 || reinterpret_cast<uintptr_t>(step.v) % 16 != 0) {
    return false;
  }
  const bool bf16 = step.activation == RecordType::bf16,
             skip_flush = plan.flush_output == FlushOutput::recurrence;
  const int head_tiles = layer.value_dim / kTileRows, most = std::min(rows.rows, kMostTileRows);
  const GdnUnitLayout at(n, plan.window, heads, bf16 ? 2 : 4);
  const int place =
      place_bytes(n, plan.window, plan.ring_u == RecordType::bf16 ? 2 : 4, bf16 ? 2 : 4);
  const TileLaunch use = TileLaunch::fit(
      static_cast<size_t>(at.end) + TileShare::bytes(most), static_cast<size_t>(kPlaces * place),
      most * layer.key_heads, heads * head_tiles, kMostBlocks, kMostWarps);
  if (use.warps == 0) return false;
  const Kernel kernel =
      bf16 ? kernel_of<__nv_bfloat16>(element->kind, n) : kernel_of<float>(element->kind, n);
  allow_shared(kernel, use.shared);
  TileWork::each(
      rows, plan.window, skip_flush, use.turns, layer.key_heads, heads * head_tiles,
      [&](const TileWork& work) {
        const Launch launch{
            {layer, rows, step, static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))),
             plan.ring_u, plan.beta, plan.window, Divisor(heads)},
            work,
            plan.read ? states.read : states.recurrence,
            plan.read ? states.read_row_stride : states.row_stride,
            plan.read ? states.read_head_stride : states.head_stride,
            l.scales,
            l.outer,
            *element,
            Divisor(head_tiles)};
        kernel<<<static_cast<unsigned>(use.blocks), static_cast<unsigned>(32 * (use.warps + 1)),
                 use.shared, stream>>>(launch);
        CUDA_CHECK(cudaGetLastError());
      });
  return true;
}

}  // namespace replayeval
