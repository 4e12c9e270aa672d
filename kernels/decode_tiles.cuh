// What the kernels share that stream checkpoints through shared memory (mamba2_decode_fp32.cu,
// gdn_decode_fp32.cu): a block that stays takes unit after unit (some heads of one row), its warps
// the unit's tiles (a few rows of a head), each warp with a ring of tiles of its own that are
// copied behind its back, with the ring's records of those rows. Copies run ahead across units, and
// what a unit needs to be prepared is asked for a unit before, so that memory is never idle.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/activation.cuh"
#include "kernels/decode_cuda.h"

namespace replayeval {

/// Tiles first .. last - 1 of a unit; none behind a block's last run.
struct TileRun {
  int unit, first, last;
  __device__ bool real() const { return first < last; }
};

/// A block's runs: whole units in turn with the other blocks, and of the units that do not go round
/// an equal share of tiles.
struct TileShare {
  int tiles, whole, rest, rest_end;

  __device__ TileShare(int units, int tiles)
      : tiles(tiles), whole(units / static_cast<int>(gridDim.x)) {
    const int64_t left = int64_t{units - whole * static_cast<int>(gridDim.x)} * tiles;
    rest = static_cast<int>(left * blockIdx.x / gridDim.x);
    rest_end = static_cast<int>(left * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ TileRun run(int index) const {
    const int grid = static_cast<int>(gridDim.x);
    if (index < whole) return {index * grid + static_cast<int>(blockIdx.x), 0, tiles};
    const int k = rest / tiles + index - whole;
    return {whole * grid + k, max(rest - k * tiles, 0), min(rest_end - k * tiles, tiles)};
  }
};

/// The runs of a block in turn with what must be known of a row before its records can be asked
/// for: how many lie in its ring, read a run ahead.
struct TileRuns {
  const TileShare* share;
  const int32_t* pending;
  int row_units, index = -1;
  TileRun now, next;
  int t, next_t = 0;

  __device__ TileRuns(const TileShare* share, const int32_t* pending, int row_units)
      : share(share), pending(pending), row_units(row_units) {
    next = share->run(0);
    if (next.real()) next_t = pending[next.unit / row_units];
  }
  __device__ void move() {
    ++index;
    now = next;
    t = next_t;
    next = share->run(index + 1);
    if (next.real()) next_t = pending[next.unit / row_units];
  }
};

/// A warp's copies: tile after tile, each in kSteps parts, into the places of its ring.
template <int kPlaces, int kSteps, class Copy>
struct TileCopies {
  TileRuns runs;
  Copy copy;  // (unit, tile, step, place, records in the row's ring)
  int tile = 0, step = 0, place = 0;

  __device__ TileCopies(const TileRuns& from, Copy copy) : runs(from), copy(copy) {
    enter();
#pragma unroll 1
    for (int i = 0; i + 1 < kPlaces; ++i) begin();
  }
  __device__ void enter() {
    runs.move();
    tile = runs.now.first + static_cast<int>(threadIdx.x >> 5);
  }
  /// Begins the next copy.
  __device__ void begin() {
    while (runs.now.real() && tile >= runs.now.last) enter();
    if (runs.now.real()) copy(runs.now.unit, tile, step, place, runs.t);
    commit_copies();
    if (++step == kSteps) {
      step = 0;
      tile += static_cast<int>(blockDim.x >> 5);
    }
    if (++place == kPlaces) place = 0;
  }
  /// Waits for the oldest copy, and for what was asked for before it; its place is free once the
  /// warp has passed here the next time.
  __device__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPlaces - 2) : "memory");
    __syncwarp();
  }
};

/// Waits for all copies, also those that are in no group yet.
__device__ __forceinline__ void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Begins to copy 4 bytes, as copy_async does 16.
__device__ __forceinline__ void copy_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from));
}

/// Adds a warp's counts of FP32 numbers that were stored.
__device__ inline void add_tile_health(HeadHealth* health, int elements, uint32_t non_finite,
                                       uint32_t infinite, int64_t position) {
  non_finite = __reduce_add_sync(0xFFFFFFFFu, non_finite);
  infinite = __reduce_add_sync(0xFFFFFFFFu, infinite);
  if ((threadIdx.x & 31) != 0) return;
  const auto add = [](uint64_t* to, uint32_t n) {
    if (n > 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(n));
  };
  add(&health->encode.elements, static_cast<uint32_t>(elements));
  add(&health->encode.non_finite, non_finite);
  add(&health->encode.saturated, infinite);
  if (non_finite > 0) {
    atomicCAS(reinterpret_cast<unsigned long long*>(&health->first_non_finite_position), ~0ull,
              static_cast<unsigned long long>(position));
  }
}
__device__ __forceinline__ void count_odd(const float4& v, uint32_t* non_finite,
                                          uint32_t* infinite) {
  for (float e : {v.x, v.y, v.z, v.w}) {
    *non_finite += magnitude(e) <= kFloatMax ? 0 : 1;
    *infinite += magnitude(e) == __int_as_float(0x7F800000) ? 1 : 0;
  }
}

/// How a launch uses the current device; warps is 0 where it does not fit.
struct TileLaunch {
  int warps = 0, blocks = 0;
  size_t shared = 0;

  /// `fixed` bytes of a block and `ring` of a warp; up to `most_blocks` blocks of `most_warps`
  /// warps a multiprocessor, or fewer of at least four warps.
  static TileLaunch fit(size_t fixed, size_t ring, int units, int tiles, int most_blocks,
                        int most_warps) {
    int device = 0, all = 0, each = 0, count = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&each, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    TileLaunch launch;
    for (int blocks = most_blocks; blocks > 0; --blocks) {
      const int room = std::min(all / blocks - 1024, each) - static_cast<int>(fixed);
      const int warps = std::min(most_warps, room / static_cast<int>(ring));
      if (warps < (blocks > 1 ? 4 : 1)) continue;
      launch.warps = warps;
      const int64_t most = int64_t{units} * ((tiles + warps - 1) / warps);
      launch.blocks = static_cast<int>(std::min<int64_t>(most, blocks * count));
      launch.shared = fixed + static_cast<size_t>(warps) * ring;
      break;
    }
    return launch;
  }
};

/// Lets a kernel have more than 48 KB; asks once a kernel, device and thread for the largest size.
template <class Kernel>
void allow_shared(Kernel kernel, size_t bytes) {
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  thread_local std::vector<std::pair<std::pair<const void*, int>, size_t>> allowed;
  const std::pair<const void*, int> key{reinterpret_cast<const void*>(kernel), device};
  for (auto& [known, size] : allowed) {
    if (known != key) continue;
    if (size >= bytes) return;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)));
    size = bytes;
    return;
  }
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)));
  allowed.push_back({key, bytes});
}

/// Plain FP32 checkpoints that serve both roles, outputs of a flush from the folded state, FP32
/// products. False where the kernel does not take the sizes; arguments are checked.
bool mamba2_decode_fp32(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                        const DecodeStates& states, const Mamba2DecodeStep& step,
                        CudaStream stream);
bool gdn_decode_fp32(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                     const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream);

/// Blocks of 16 columns with E4M3 scales under one FP32 scale.
inline bool is_nvfp4(const FormatDescriptor& d, const PackedLayout& l) {
  return d.element == ElementKind::floating && d.number == kE2m1 &&
         d.block_scale == BlockScale::floating && d.scale_number == kE4m3 && l.block_rows == 1 &&
         l.block_columns == 16 && l.outer_count == 1;
}
/// What mamba2_decode_cuda and gdn_decode_cuda have a row do that does not flush, or whose flush
/// has its output from the read checkpoint, where that is NVFP4. False where the kernel does not
/// take the sizes.
bool mamba2_read_nvfp4(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                       const DecodeStates& states, const Mamba2DecodeStep& step, CudaStream stream);
bool gdn_read_nvfp4(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                    const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream);

}  // namespace replayeval
