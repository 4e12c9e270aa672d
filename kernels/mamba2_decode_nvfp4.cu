// Outputs of a token of Mamba-2 (decode_cuda.h) from checkpoints of NVFP4 and of other 4-bit
// elements with its scales, for the rows that do not flush: bound by instructions. A unit is the
// heads of a group of one row, whatever their number, a tile 32 rows of them, one a thread, so that
// the sixteen lanes of its sum are the thread's own.
#include "kernels/mamba2_unit.cuh"
#include "kernels/nvfp4.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 32, kRunRows = 8;  // runs of rows lie in one head
constexpr int kRuns = kTileRows / kRunRows;
constexpr int kPlaces = 2;  // tiles in a warp's ring
constexpr int kMostWarps = 7, kMostBlocks = 3;

struct Launch {
  Mamba2Units units;
  TileWork work;
  const std::byte* read;
  size_t row_stride, head_stride, scales, outer;
  NarrowElement element;
  Divisor head_runs;
};

/// Bytes of a tile: codes, scales, the records' x.
__host__ __device__ constexpr int place_bytes(int state_dim, int window, int act_bytes) {
  return kTileRows * (state_dim / 2 + state_dim / 16 + window * act_bytes);
}

template <class Act, int kN16, class Codes>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), kMostBlocks)
    read_nvfp4(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ uint64_t barriers[4];
  constexpr int kStateDim = 16 * kN16, kCodeBytes = kTileRows * kStateDim / 2,
                kScaleBytes = kTileRows * kN16;
  using Unit = Mamba2Unit<Act, kStateDim>;
  const Mamba2Layer& layer = p.units.layer;
  const int head_dim = layer.head_dim, heads = p.units.unit_heads, window = p.units.window;
  const Mamba2UnitLayout at(kStateDim, window, heads, false);
  const int place_size = place_bytes(kStateDim, window, sizeof(Act));
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5,
            warps = static_cast<int>(blockDim.x >> 5) - 1;
  const int unit_runs = heads * p.head_runs;
  std::byte* ring = shared + at.end + warp * (kPlaces * place_size);
  if (tid == 0) PreparedPlaces::init(barriers, 1, warps);
  const TileShare share(p.work, shared + at.end + warps * (kPlaces * place_size));
  const PreparedPlaces prepared{barriers};
  float* dots = reinterpret_cast<float*>(shared + at.dots);
  TileWalk walk(share, warp, warps);
  walk.move();
  if (!walk.runs.now.real()) return;
  // C and the weights of a unit; its heads' scales.
  const auto prepare = [&](auto team, const TileRun& run, std::byte* place) {
    using Team = decltype(team);
    const Unit unit(p.units, run);
    for (int h = Team::rank(); h < heads; h += Team::size()) {
      copy_word(place + at.scale + 4 * h,
                p.read + unit.row * p.row_stride + (unit.head0 + h) * p.head_stride + p.outer);
    }
    unit.template prepare<Team>(at, unit.t + 1 < window, false, place, dots);
  };
  if (warp == warps) {
    TileRuns& runs = walk.runs;
    prepare(Team<0>(), runs.now, shared);
    prepared.fill(0);
    runs.move();
    for (int run = 1; runs.now.real(); runs.move(), ++run) {
      prepared.wait_emptied(run - 2);
      prepare(Team<1>(), runs.now, shared + (run & 1) * at.unit);
      prepared.fill(run);
    }
    return;
  }
  const auto copy = [&](const TileRun& of, int tile, int, int place) {
    const Unit unit(p.units, of);
    // A thread's 16 bytes are all of the same run of rows.
    const int own_run = lane % kRuns, nth = lane / kRuns,
              run = min(tile * kRuns + own_run, unit_runs - 1);
    const int h = run / p.head_runs, row = (run - h * p.head_runs) * kRunRows,
              head = unit.head0 + h;
    const std::byte* from = p.read + unit.row * p.row_stride + head * p.head_stride;
    std::byte* to = ring + place * place_size;
#pragma unroll
    for (int i = 0; i < kN16 / 2; ++i) {
      const int chunk = nth + 8 * i, r = chunk / (kN16 / 2), column = chunk % (kN16 / 2);
      copy_async(to + 16 * nvfp4_chunk<kN16>(own_run * kRunRows + r, column),
                 from + row * (kStateDim / 2) + 16 * chunk);
    }
    if (nth < kN16 / 2) {
      copy_async(to + kCodeBytes + own_run * (kRunRows * kN16) + 16 * nth,
                 from + p.scales + row * kN16 + 16 * nth);
    }
    constexpr int kXChunks = kRunRows / Unit::kEach;
    const int64_t first = int64_t{head} * head_dim + row;
    for (int i = nth; i < (of.t + 1) * kXChunks; i += 32 / kRuns) {
      const int j = i / kXChunks, part = i % kXChunks;
      copy_async(to + kCodeBytes + kScaleBytes +
                     (j * kTileRows + own_run * kRunRows + part * Unit::kEach) * sizeof(Act),
                 unit.x_of(j) + first + part * Unit::kEach);
    }
  };
  TileCopies<kPlaces, 1, RunSource<decltype(copy)>> copies(share, warp, warps, {copy});
  prepare(Team<0>(), walk.runs.now, shared);

  const uint32_t unit_matrix = unit_part();
  const Codes element(p.element);
  int place = 0;
  for (int run_index = 0; walk.runs.now.real(); walk.move(), ++run_index) {
    const Unit unit(p.units, walk.runs.now);
    const int t = unit.t, last = walk.runs.now.last;
    const bool flush = t + 1 == window;
    const std::byte* of_unit = shared + (run_index & 1) * at.unit;
    const float* cs = reinterpret_cast<const float*>(of_unit + at.c);
    const float* all_weights = reinterpret_cast<const float*>(of_unit + at.weights);
    prepared.wait_filled(run_index);
    for (; walk.tile < last; walk.tile += warps) {
      copies.wait();
      copies.begin();
      const std::byte* packed = ring + place * place_size;
      if (++place == kPlaces) place = 0;
      const int run = walk.tile * kRuns + lane / kRunRows,
                h = min(run, unit_runs - 1) / p.head_runs,
                r = (run - h * p.head_runs) * kRunRows + lane % kRunRows;
      const float outer = p.element.power * reinterpret_cast<const float*>(of_unit + at.scale)[h];
      float sum[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i] = 0.0f;
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
            float v[8];
            element.widen(half == 0 ? codes.x : codes.y, scale, unit_matrix, v);
            const float* c = cs + 16 * (m + k) + 8 * half;
            const float4 low = load4(c), high = load4(c + 4);
            const float operand[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const int n = Codes::column(i);
              sum[8 * half + n] = __fmaf_rn(v[i] * outer, operand[n], sum[8 * half + n]);
            }
          }
        }
      }
      // Lanes i and i + 8, then 4, 2, 1 apart.
#pragma unroll
      for (int d = 8; d > 0; d /= 2) {
#pragma unroll
        for (int i = 0; i < d; ++i) sum[i] = sum[i] + sum[i + d];
      }
      const float total = nan ? __int_as_float(0x7FC00000) : sum[0];
      const float* weight = all_weights + h * at.weight_row;
      const Act* x = reinterpret_cast<const Act*>(packed + kCodeBytes + kScaleBytes) + lane;
      float y = weight[window] * total;
#pragma unroll 4
      for (int j = 0; j <= t; ++j) y = __fmaf_rn(weight[j], to_float(x[j * kTileRows]), y);
      if (run >= unit_runs) continue;
      if (layer.skip) {
        y = __fmaf_rn(reinterpret_cast<const float*>(of_unit + at.skip)[h],
                      to_float(x[t * kTileRows]), y);
      }
      const int64_t first = int64_t{unit.head0 + h} * head_dim + r;
      static_cast<Act*>(p.units.step.y)[unit.row * unit.x_stride() + first] = from_float<Act>(y);
      if (!flush) {
        static_cast<Act*>(p.units.step.ring_x)[unit.slot(t) * unit.x_stride() + first] =
            x[t * kTileRows];
      }
    }
    prepared.empty(run_index);
  }
}

using Kernel = void (*)(const Launch);
template <class Act, class Codes>
Kernel kernel_of(int state_dim) {
  return state_dim == 128  ? read_nvfp4<Act, 8, Codes>
         : state_dim == 64 ? read_nvfp4<Act, 4, Codes>
                           : read_nvfp4<Act, 16, Codes>;
}
template <class Act>
Kernel kernel_of(NarrowElement::Kind kind, int state_dim) {
  switch (kind) {
    case NarrowElement::Kind::e2m1:
      return kernel_of<Act, FloatCodes<1>>(state_dim);
    case NarrowElement::Kind::e3m0:
      return kernel_of<Act, FloatCodes<0>>(state_dim);
    case NarrowElement::Kind::fixed_point:
      return kernel_of<Act, FixedPointCodes>(state_dim);
  }
  return nullptr;
}

}  // namespace

bool mamba2_read_nvfp4(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                       const DecodeStates& states, const Mamba2DecodeStep& step,
                       CudaStream stream) {
  const StateFormat& format = plan.read ? *plan.read->format : *plan.recurrence.format;
  const int n = layer.state_dim;
  const PackedLayout l = packed_layout(format.descriptor, layer.head_dim, n);
  const std::optional<NarrowElement> element = NarrowElement::of(format, l);
  if (!element || (n != 64 && n != 128 && n != 256) || l.scales % 16 != 0) return false;
  const bool bf16 = step.activation == RecordType::bf16,
             skip_flush = plan.flush_output == FlushOutput::recurrence;
  const int heads = layer.heads / layer.groups, head_runs = layer.head_dim / kRunRows,
            tiles = (heads * head_runs + kRuns - 1) / kRuns,
            most = std::min(rows.rows, kMostTileRows);
  const Mamba2UnitLayout at(n, plan.window, heads, false);
  const TileLaunch use =
      TileLaunch::fit(static_cast<size_t>(at.end) + TileShare::bytes(most),
                      static_cast<size_t>(kPlaces * place_bytes(n, plan.window, bf16 ? 2 : 4)),
                      most * layer.groups, tiles, kMostBlocks, kMostWarps);
  if (use.warps == 0) return false;
  const Kernel kernel =
      bf16 ? kernel_of<__nv_bfloat16>(element->kind, n) : kernel_of<float>(element->kind, n);
  allow_shared(kernel, use.shared);
  TileWork::each(
      rows, plan.window, skip_flush, use.turns, layer.groups, tiles, [&](const TileWork& work) {
        const Launch launch{{layer, rows, step, plan.window, Divisor(heads), Divisor(heads)},
                            work,
                            plan.read ? states.read : states.recurrence,
                            plan.read ? states.read_row_stride : states.row_stride,
                            plan.read ? states.read_head_stride : states.head_stride,
                            l.scales,
                            l.outer,
                            *element,
                            Divisor(head_runs)};
        kernel<<<static_cast<unsigned>(use.blocks), static_cast<unsigned>(32 * (use.warps + 1)),
                 use.shared, stream>>>(launch);
        CUDA_CHECK(cudaGetLastError());
      });
  return true;
}

}  // namespace replayeval
