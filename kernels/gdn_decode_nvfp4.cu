// Outputs and corrections of a token of GDN (decode_cuda.h) from checkpoints of NVFP4 and of other
// 4-bit elements with its scales, for the rows that do not flush: bound by instructions. A unit is
// the value heads of one key head of one row, a tile 32 rows of a head, one a thread, whose sums
// with key and query are chains as kernels/gdn.h has them; or, where the order of the sums is free,
// four threads a row and its products in whole numbers (code_sums.cuh).
#include <cmath>

#include "kernels/code_sums.cuh"
#include "kernels/gdn_unit.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 32;
constexpr int kPlaces = 2;  // tiles in a warp's ring
constexpr int kMostWarps = 4, kMostBlocks = 4;

template <class Codes>
struct Launch {
  GdnUnits units;
  TileWork work;
  ReadHeads read;
  typename Codes::Element element;
  Divisor head_tiles;
};

/// Bytes of a tile: codes, scales, v, the ring's corrections.
__host__ __device__ constexpr int place_bytes(int key_dim, int window, int u_bytes, int act_bytes) {
  return kTileRows * (key_dim / 2 + key_dim / 16 + act_bytes + window * u_bytes);
}

/// Row `lane` of a tile times key and query, in the order of sums of kernels/gdn.h. By a whole
/// warp.
template <int kN16, class Codes>
__device__ __forceinline__ void ordered_sums(const NarrowElement& element, const std::byte* codes,
                                             const std::byte* scale_codes, const float* key,
                                             const float* query, float outer, float* with_key,
                                             float* with_query) {
  float a = 0.0f, b = 0.0f;
  const bool nan =
      each_eight<kN16, Codes>(element, codes, scale_codes, outer, [&](int n, const float(&s)[8]) {
        const float4 low = make_float4(s[0], s[1], s[2], s[3]),
                     high = make_float4(s[4], s[5], s[6], s[7]);
        a = chain(load4(key + n + 4), high, chain(load4(key + n), low, a));
        b = chain(load4(query + n + 4), high, chain(load4(query + n), low, b));
      });
  *with_key = nan ? __int_as_float(0x7FC00000) : a;
  *with_query = nan ? __int_as_float(0x7FC00000) : b;
}

template <class Act, int kN16, class Codes>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), kMostBlocks)
    read_nvfp4(const __grid_constant__ Launch<Codes> p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ uint64_t barriers[4];
  constexpr int kKeyDim = 16 * kN16, kCodeBytes = kTileRows * kKeyDim / 2,
                kScaleBytes = kTileRows * kN16, kVBytes = kTileRows * sizeof(Act);
  using Unit = GdnUnit<Act, kKeyDim>;
  using Layout = SumLayout<kN16, Codes, 2>;
  using Sums = typename Layout::Sums;
  constexpr bool kWhole = Layout::kWhole;
  const GdnLayer& layer = p.units.layer;
  const int value_dim = layer.value_dim, heads = p.units.heads, window = p.units.window;
  const RecordType ring_u = p.units.ring_u;
  const GdnUnitLayout at(kKeyDim, window, heads, sizeof(Act));
  const int place_size =
      place_bytes(kKeyDim, window, ring_u == RecordType::bf16 ? 2 : 4, sizeof(Act));
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5,
            warps = static_cast<int>(blockDim.x >> 5) - 1;
  std::byte* of_sums = shared + at.end;
  std::byte* rings = of_sums + Layout::kBytes;
  std::byte* ring = rings + warp * (kPlaces * place_size);
  Layout::clear(of_sums);
  if (tid == 0) PreparedPlaces::init(barriers, warps);
  const TileShare share(p.work, rings + warps * (kPlaces * place_size));
  const PreparedPlaces prepared{barriers};
  TileWalk walk(share, warp, warps);
  walk.move();
  if (!walk.runs.now.real()) return;
  const auto scales = [&](auto team, const Unit& unit, std::byte* place) {
    p.read.template copy_scales<decltype(team)>(unit.row, unit.head0, heads, place + at.scale);
  };
  const auto digits = [&](int run, int v) {
    return Layout::vector(of_sums, shared + (run & 1) * at.unit + (v == 0 ? at.key : at.query), run,
                          v);
  };
  const auto split = [&](int run) {
    if constexpr (kWhole) {
#pragma unroll 1
      for (int v = 0; v < 2; ++v) digits(run, v).split(p.element);
    }
  };
  {
    const Unit unit(p.units, walk.runs.now);
    unit.template copy_inputs<Team<0>>(at, shared);
    scales(Team<0>(), unit, shared);
    commit_copies();
  }
  const auto copy = [&](const TileRun& run, int tile, int place) {
    const Unit unit(p.units, run);
    const int h = tile / p.head_tiles, head = unit.head0 + h,
              row = (tile - h * p.head_tiles) * kTileRows;
    const std::byte* from = p.read.head(unit.row, head);
    std::byte* to = ring + place * place_size;
    constexpr unsigned kChunks = kN16 / 2;
    const unsigned thread = threadIdx.x & 31u;
    const std::byte* codes = from + row * (kKeyDim / 2) + 16 * thread;
#pragma unroll
    for (unsigned i = 0; i < kCodeBytes / 512; ++i) {
      // nvfp4_chunk of chunk thread + 32 i.
      const unsigned moved = 16 * ((thread / 8 + 4 * i) & (kChunks - 1));
      copy_async(to + (16 * thread ^ moved) + 512 * i, codes + 512 * i);
    }
#pragma unroll
    for (unsigned i = thread; i < kScaleBytes / 16; i += 32)
      copy_async(to + kCodeBytes + 16 * i, from + p.read.scales + row * kN16 + 16 * i);
    const int64_t first = int64_t{head} * value_dim + row;
    unit.template copy_v<kTileRows>(first, to + kCodeBytes + kScaleBytes);
    unit.template copy_corrections<kTileRows>(first, to + kCodeBytes + kScaleBytes + kVBytes);
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
        p.units, at, false, walk.runs, prepared, shared,
        [&](const Unit& next, std::byte* place) { scales(Team<1>(), next, place); }, split);
    return;
  }

  int place = 0;
  for (int run = 0; walk.runs.now.real(); walk.move(), ++run) {
    const Unit unit(p.units, walk.runs.now);
    const int t = unit.t, last = walk.runs.now.last;
    const bool flush = t + 1 == window;
    const std::byte* of_unit = shared + (run & 1) * at.unit;
    const float* key = reinterpret_cast<const float*>(of_unit + at.key);
    const float* query = reinterpret_cast<const float*>(of_unit + at.query);
    Act* o_row = static_cast<Act*>(p.units.step.o) + unit.value_of(unit.row);
    const int64_t appended = unit.value_of(unit.slot(t));
    prepared.wait_filled(run);
    for (; walk.tile < last; walk.tile += warps) {
      copies.wait();
      copies.begin();
      const std::byte* packed = ring + place * place_size;
      if (++place == kPlaces) place = 0;
      const int own = kWhole ? Sums::row() : lane, h = walk.tile / p.head_tiles;
      const int first = h * value_dim + (walk.tile - h * p.head_tiles) * kTileRows + own;
      const float outer = reinterpret_cast<const float*>(of_unit + at.scale)[h];
      float with_key, with_query;
      if constexpr (kWhole) {
        const typename Sums::Vector vectors[2] = {digits(run, 0), digits(run, 1)};
        float totals[2];
        Sums(p.element, of_sums).totals(packed, packed + kCodeBytes, vectors, outer, totals);
        with_key = totals[0];
        with_query = totals[1];
      } else {
        ordered_sums<kN16, Codes>(p.element, packed, packed + kCodeBytes, key, query, outer,
                                  &with_key, &with_query);
      }
      const float *key_weight =
                      reinterpret_cast<const float*>(of_unit + at.key_weights) + h * (window + 1),
                  *query_weight =
                      reinterpret_cast<const float*>(of_unit + at.query_weights) + h * (window + 1);
      const std::byte* us = packed + kCodeBytes + kScaleBytes + kVBytes;
      const float v =
          to_float(reinterpret_cast<const Act*>(packed + kCodeBytes + kScaleBytes)[own]);
      float rest = __fmaf_rn(key_weight[window], with_key, v),
            o = query_weight[window] * with_query;
#pragma unroll 4
      for (int j = 0; j < t; ++j) {
        const float u = load_record(ring_u, us, j * kTileRows + own);
        rest = __fmaf_rn(key_weight[j], u, rest);
        o = __fmaf_rn(query_weight[j], u, o);
      }
      const float u =
          unit.rounded_beta(reinterpret_cast<const float*>(of_unit + at.beta)[h]) * rest;
      o_row[first] = from_float<Act>(__fmaf_rn(query_weight[t], u, o));
      if (!flush) {
        static_cast<Act*>(p.units.step.ring_v)[appended + first] = from_float<Act>(v);
        store_record(ring_u, p.units.step.ring_u, appended + first, u);
      }
    }
    prepared.empty(run);
  }
}

/// A way to sum: its kernel and what it needs.
template <class Codes>
bool start(const typename Codes::Element& element, const GdnLayer& layer, const HeadPlan& plan,
           const DecodeRows& rows, const DecodeStates& states, const GdnDecodeStep& step,
           CudaStream stream) {
  return with_blocks(layer.key_dim, [&]<int kN16>(std::integral_constant<int, kN16>) {
    const bool bf16 = step.activation == RecordType::bf16,
               skip_flush = plan.flush_output == FlushOutput::recurrence;
    const int n = layer.key_dim, heads = layer.value_heads / layer.key_heads,
              head_tiles = layer.value_dim / kTileRows, most = std::min(rows.rows, kMostTileRows),
              act_bytes = bf16 ? 2 : 4;
    const PackedLayout l = packed_layout(read_format(plan).descriptor, layer.value_dim, n);
    const GdnUnitLayout at(n, plan.window, heads, act_bytes);
    const int place =
        place_bytes(n, plan.window, plan.ring_u == RecordType::bf16 ? 2 : 4, act_bytes);
    const TileLaunch use = TileLaunch::fit(
        static_cast<size_t>(at.end) + SumLayout<kN16, Codes, 2>::kBytes + TileShare::bytes(most),
        static_cast<size_t>(kPlaces * place), most * layer.key_heads, heads * head_tiles,
        kMostBlocks, kMostWarps);
    if (use.warps == 0) return false;
    const auto kernel =
        bf16 ? read_nvfp4<__nv_bfloat16, kN16, Codes> : read_nvfp4<float, kN16, Codes>;
    start_tiles(use, kernel, rows, plan.window, skip_flush, layer.key_heads, heads * head_tiles,
                stream, [&](const TileWork& work) {
                  return Launch<Codes>{{layer, rows, step,
                                        static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))),
                                        plan.ring_u, plan.beta, plan.window, Divisor(heads)},
                                       work,
                                       ReadHeads(plan, states, l),
                                       element,
                                       Divisor(head_tiles)};
                });
    return true;
  });
}

}  // namespace

bool gdn_reads_freely(const GdnLayer& layer, const HeadPlan& plan, const DecodeStates& states) {
  const StateFormat& format = read_format(plan);
  const PackedLayout l = packed_layout(format.descriptor, layer.value_dim, layer.key_dim);
  return states.sums_freely && CodeTable::of(format, l);
}

bool gdn_read_nvfp4(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                    const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream) {
  const StateFormat& format = read_format(plan);
  const int n = layer.key_dim;
  const PackedLayout l = packed_layout(format.descriptor, layer.value_dim, n);
  if ((n != 64 && n != 128 && n != 256) || l.scales % 16 != 0 || layer.value_dim % kTileRows != 0) {
    return false;
  }
  return read_codes(format, l, states.sums_freely,
                    [&]<class Codes>(const Codes*, const typename Codes::Element& element) {
                      return start<Codes>(element, layer, plan, rows, states, step, stream);
                    });
}

}  // namespace replayeval
