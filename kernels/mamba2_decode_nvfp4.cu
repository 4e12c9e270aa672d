// Outputs of a token of Mamba-2 (decode_cuda.h) from checkpoints of NVFP4 and of other 4-bit
// elements with its scales, for the rows that do not flush: bound by instructions. A unit is the
// heads of a group of one row, whatever their number, a tile 32 rows of them, one a thread, so that
// the sixteen lanes of its sum are the thread's own; or, where the order of the sums is free, four
// threads a row and its products in whole numbers (code_sums.cuh).
#include "kernels/code_sums.cuh"
#include "kernels/mamba2_unit.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 32, kRunRows = 8;  // runs of rows lie in one head
constexpr int kRuns = kTileRows / kRunRows;
constexpr int kPlaces = 3;  // tiles in a warp's ring
constexpr int kMostWarps = 4, kMostBlocks = 4;

template <class Codes>
struct Launch {
  Mamba2Units units;
  TileWork work;
  ReadHeads read;
  typename Codes::Element element;
  Divisor head_runs;
};

/// Bytes of a tile: codes, scales, the records' x.
__host__ __device__ constexpr int place_bytes(int state_dim, int window, int act_bytes) {
  return kTileRows * (state_dim / 2 + state_dim / 16 + window * act_bytes);
}

/// The copies of a warp's tiles: codes, scales and the records' x. A thread's 16 bytes are all of
/// the same eight rows.
template <class Act, int kN16, class Launch>
struct TileSource {
  static constexpr unsigned kChunks = kN16 / 2, kCodeBytes = kTileRows * 8 * kN16,
                            kScaleBytes = kTileRows * kN16;
  const Launch& p;
  std::byte* ring;
  int place_size, t = 0;
  // Of a run: the row's first head, the row's x and its first record's.
  const std::byte* packed = nullptr;
  const Act *token = nullptr, *records = nullptr;

  __device__ TileSource(const Launch& launch, std::byte* places, int bytes)
      : p(launch), ring(places), place_size(bytes) {}
  __device__ unsigned width() const {
    return static_cast<unsigned>(p.units.layer.heads * p.units.layer.head_dim);
  }
  __device__ void enter(const TileRun& run) {
    const unsigned heads = p.units.unit_heads, row = static_cast<unsigned>(run.row);
    const unsigned first = run.part * heads * p.units.layer.head_dim;
    t = run.t;
    packed = p.read.head(row, run.part * heads);
    token = static_cast<const Act*>(p.units.step.x) + uint64_t{row} * width() + first;
    records = static_cast<const Act*>(p.units.step.ring_x) +
              uint64_t{row * p.units.window} * width() + first;
  }
  __device__ void copy(int tile, int place) const {
    const unsigned thread = threadIdx.x & 31u, own = thread % kRuns, nth = thread / kRuns;
    const int run = min(tile * kRuns + static_cast<int>(own),
                        static_cast<int>(p.units.unit_heads) * p.head_runs - 1);
    const unsigned h = run / p.head_runs, row = (run - h * p.head_runs) * kRunRows;
    const std::byte* from = packed + uint64_t{h} * p.read.head_stride;
    std::byte* to = ring + place * place_size;
    // nvfp4_chunk of chunk nth + 8 i of the eight rows.
    const std::byte* codes = from + (row * kChunks + nth) * 16;
    std::byte* codes_to = to + own * (kRunRows * 16 * kChunks);
#pragma unroll
    for (unsigned i = 0; i < kChunks; ++i)
      copy_async(codes_to + (16 * nth ^ 16 * i) + 128 * i, codes + 128 * i);
    if (nth < kChunks) {
      copy_async(to + kCodeBytes + own * (kRunRows * kN16) + 16 * nth,
                 from + p.read.scales + row * kN16 + 16 * nth);
    }
    constexpr unsigned kXChunks = kRunRows * sizeof(Act) / 16, kStep = 32 / kRuns / kXChunks;
    const unsigned part = nth % kXChunks * (16 / sizeof(Act)), stride = width();
    unsigned j = nth / kXChunks;
    const unsigned first = h * static_cast<unsigned>(p.units.layer.head_dim) + row + part;
    const Act* x = records + first + uint64_t{j} * stride;
    std::byte* x_to =
        to + kCodeBytes + kScaleBytes + (j * kTileRows + own * kRunRows + part) * sizeof(Act);
#pragma unroll 1
    for (; static_cast<int>(j) <= t; j += kStep) {
      copy_async(x_to, static_cast<int>(j) == t ? token + first : x);
      x += kStep * stride;
      x_to += kStep * kTileRows * sizeof(Act);
    }
  }
};

/// Row `lane` of a tile times C, in the order of sums of kernels/mamba2.h. By a whole warp.
template <int kN16, class Codes>
__device__ __forceinline__ float ordered_sum(const NarrowElement& element, const std::byte* codes,
                                             const std::byte* scale_codes, const float* cs,
                                             float outer) {
  float sum[16] = {};
  const bool nan =
      each_eight<kN16, Codes>(element, codes, scale_codes, outer, [&](int n, const float(&s)[8]) {
        const float4 low = load4(cs + n), high = load4(cs + n + 4);
        const float c[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& to = sum[n % 16 + i];
          to = __fmaf_rn(s[i], c[i], to);
        }
      });
  // Lanes i and i + 8, then 4, 2, 1 apart.
#pragma unroll
  for (int d = 8; d > 0; d /= 2) {
#pragma unroll
    for (int i = 0; i < d; ++i) sum[i] = sum[i] + sum[i + d];
  }
  return nan ? __int_as_float(0x7FC00000) : sum[0];
}

template <class Act, int kN16, class Codes>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), kMostBlocks)
    read_nvfp4(const __grid_constant__ Launch<Codes> p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ uint64_t barriers[4];
  constexpr int kStateDim = 16 * kN16, kCodeBytes = kTileRows * kStateDim / 2,
                kScaleBytes = kTileRows * kN16;
  using Unit = Mamba2Unit<Act, kStateDim>;
  using Layout = SumLayout<kN16, Codes, 1>;
  using Sums = typename Layout::Sums;
  constexpr bool kWhole = Layout::kWhole;
  const Mamba2Layer& layer = p.units.layer;
  const int head_dim = layer.head_dim, heads = p.units.unit_heads, window = p.units.window;
  const Mamba2UnitLayout at(kStateDim, window, heads, false);
  const int place_size = place_bytes(kStateDim, window, sizeof(Act));
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5,
            warps = static_cast<int>(blockDim.x >> 5) - 1;
  const int unit_runs = heads * p.head_runs;
  std::byte* of_sums = shared + at.end;
  std::byte* rings = of_sums + Layout::kBytes;
  std::byte* ring = rings + warp * (kPlaces * place_size);
  Layout::clear(of_sums);
  if (tid == 0) PreparedPlaces::init(barriers, warps);
  const TileShare share(p.work, rings + warps * (kPlaces * place_size));
  const PreparedPlaces prepared{barriers};
  float* dots = reinterpret_cast<float*>(shared + at.dots);
  TileWalk walk(share, warp, warps);
  walk.move();
  if (!walk.runs.now.real()) return;
  const auto scales = [&](auto team, const Unit& unit, std::byte* place) {
    p.read.template copy_scales<decltype(team)>(unit.row, unit.head0, heads, place + at.scale);
  };
  const auto digits_of_c = [&](int run) {
    return Layout::vector(of_sums, shared + (run & 1) * at.unit + at.c, run, 0);
  };
  const auto split = [&](int run) {
    if constexpr (kWhole) digits_of_c(run).split(p.element);
  };
  {
    const Unit unit(p.units, walk.runs.now);
    scales(Team<0>(), unit, shared);
    unit.template copy_inputs<Team<0>>(at, shared);
    commit_copies();
    unit.template fetch<Team<0>>();
  }
  const TileSource<Act, kN16, Launch<Codes>> source(p, ring, place_size);
  TileCopies<kPlaces, TileSource<Act, kN16, Launch<Codes>>> copies(share, warp, warps, source);
  Unit(p.units, walk.runs.now).template prepare<Team<0>>(at, false, shared, dots, [&] {
    copies.wait_before();
  });
  if (warp == warps) {
    Unit::prepare_runs(
        p.units, at, false, walk.runs, prepared, shared, dots,
        [&](const Unit& next, int run) { scales(Team<1>(), next, shared + (run & 1) * at.unit); },
        split);
    return;
  }

  int place = 0;
  for (int run_index = 0; walk.runs.now.real(); walk.move(), ++run_index) {
    const Unit unit(p.units, walk.runs.now);
    const int t = unit.t, last = walk.runs.now.last;
    const bool flush = t + 1 == window;
    const std::byte* of_unit = shared + (run_index & 1) * at.unit;
    const float* cs = reinterpret_cast<const float*>(of_unit + at.c);
    const float* all_weights = reinterpret_cast<const float*>(of_unit + at.weights);
    const int first_row = unit.head0 * head_dim;
    const auto head0_of = [&](void* all, int index) {
      return static_cast<Act*>(all) + uint64_t{static_cast<unsigned>(index)} * source.width() +
             first_row;
    };
    Act* y_row = head0_of(p.units.step.y, unit.row);
    Act* appended = head0_of(p.units.step.ring_x, unit.row * window + t);
    prepared.wait_filled(run_index);
    for (; walk.tile < last; walk.tile += warps) {
      copies.wait();
      copies.begin();
      const std::byte* packed = ring + place * place_size;
      if (++place == kPlaces) place = 0;
      const int own = kWhole ? Sums::row() : lane, run = walk.tile * kRuns + own / kRunRows,
                h = min(run, unit_runs - 1) / p.head_runs,
                r = (run - h * p.head_runs) * kRunRows + own % kRunRows;
      const float outer = reinterpret_cast<const float*>(of_unit + at.scale)[h];
      float total;
      if constexpr (kWhole) {
        float totals[1];
        const typename Sums::Vector c[1] = {digits_of_c(run_index)};
        Sums(p.element, of_sums).totals(packed, packed + kCodeBytes, c, outer, totals);
        total = totals[0];
      } else {
        total = ordered_sum<kN16, Codes>(p.element, packed, packed + kCodeBytes, cs, outer);
      }
      const float* weight = all_weights + h * at.weight_row;
      const Act* x = reinterpret_cast<const Act*>(packed + kCodeBytes + kScaleBytes) + own;
      float y = weight[window] * total;
#pragma unroll 4
      for (int j = 0; j <= t; ++j) y = __fmaf_rn(weight[j], to_float(x[j * kTileRows]), y);
      if (run >= unit_runs) continue;
      if (layer.skip) {
        y = __fmaf_rn(reinterpret_cast<const float*>(of_unit + at.skip)[h],
                      to_float(x[t * kTileRows]), y);
      }
      const int first = h * head_dim + r;
      y_row[first] = from_float<Act>(y);
      if (!flush) appended[first] = x[t * kTileRows];
    }
    prepared.empty(run_index);
  }
}

/// A way to sum: its kernel and what it needs.
template <class Codes>
bool start(const typename Codes::Element& element, const Mamba2Layer& layer, const HeadPlan& plan,
           const DecodeRows& rows, const DecodeStates& states, const Mamba2DecodeStep& step,
           CudaStream stream) {
  return with_blocks(layer.state_dim, [&]<int kN16>(std::integral_constant<int, kN16>) {
    const bool bf16 = step.activation == RecordType::bf16,
               skip_flush = plan.flush_output == FlushOutput::recurrence;
    const int n = layer.state_dim, heads = layer.heads / layer.groups,
              head_runs = layer.head_dim / kRunRows,
              tiles = (heads * head_runs + kRuns - 1) / kRuns,
              most = std::min(rows.rows, kMostTileRows);
    const PackedLayout l = packed_layout(read_format(plan).descriptor, layer.head_dim, n);
    const Mamba2UnitLayout at(n, plan.window, heads, false);
    const TileLaunch use = TileLaunch::fit(
        static_cast<size_t>(at.end) + SumLayout<kN16, Codes, 1>::kBytes + TileShare::bytes(most),
        static_cast<size_t>(kPlaces * place_bytes(n, plan.window, bf16 ? 2 : 4)),
        most * layer.groups, tiles, kMostBlocks, kMostWarps);
    if (use.warps == 0) return false;
    const auto kernel =
        bf16 ? read_nvfp4<__nv_bfloat16, kN16, Codes> : read_nvfp4<float, kN16, Codes>;
    start_tiles(use, kernel, rows, plan.window, skip_flush, layer.groups, tiles, stream,
                [&](const TileWork& work) {
                  return Launch<Codes>{
                      {layer, rows, step, plan.window, Divisor(heads), Divisor(heads)},
                      work,
                      ReadHeads(plan, states, l),
                      element,
                      Divisor(head_runs)};
                });
    return true;
  });
}

}  // namespace

bool mamba2_read_nvfp4(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                       const DecodeStates& states, const Mamba2DecodeStep& step,
                       CudaStream stream) {
  const StateFormat& format = read_format(plan);
  const int n = layer.state_dim;
  const PackedLayout l = packed_layout(format.descriptor, layer.head_dim, n);
  if ((n != 64 && n != 128 && n != 256) || l.scales % 16 != 0) return false;
  return read_codes(format, l, states.sums_freely,
                    [&]<class Codes>(const Codes*, const typename Codes::Element& element) {
                      return start<Codes>(element, layer, plan, rows, states, step, stream);
                    });
}

}  // namespace replayeval
