// What the kernels share that stream checkpoints through shared memory (mamba2_decode_fp32.cu,
// gdn_decode_fp32.cu): a block that stays takes unit after unit (some heads of one row), its warps
// the unit's tiles (a few rows of a head), each warp with a ring of tiles of its own that are
// copied behind its back. Copies run ahead across units, so that memory is busy while the block
// prepares the next unit.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/activation.cuh"
#include "kernels/decode_cuda.h"

namespace replayeval {

/// A block's units: whole ones in turn with the other blocks, and of those that do not go round an
/// equal share of tiles.
struct TileWalk {
  int tiles, whole, round = -1, rest, rest_end;
  int unit = 0, first = 0, last = 0;  // tiles first .. last - 1 of a unit

  __device__ TileWalk(int units, int tiles) : tiles(tiles), whole(units / gridDim.x) {
    const int64_t left = int64_t{units - whole * static_cast<int>(gridDim.x)} * tiles;
    rest = static_cast<int>(left * blockIdx.x / gridDim.x);
    rest_end = static_cast<int>(left * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ bool next() {
    if (++round < whole) {
      unit = round * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
      first = 0;
      last = tiles;
      return true;
    }
    if (rest >= rest_end) return false;
    unit = whole * static_cast<int>(gridDim.x) + rest / tiles;
    first = rest % tiles;
    last = min(tiles, first + rest_end - rest);
    rest += last - first;
    return true;
  }
};

/// A warp's copies: tile after tile into the places of its ring.
template <int kPlaces, class Copy>
struct TileCopies {
  TileWalk walk;
  Copy copy;  // (unit, tile, place)
  int tile = 0, place = 0;
  bool more = true;

  __device__ TileCopies(const TileWalk& from, Copy copy) : walk(from), copy(copy) {
    enter();
#pragma unroll 1
    for (int i = 0; i + 1 < kPlaces; ++i) begin();
  }
  __device__ void enter() {
    more = walk.next();
    tile = walk.first + static_cast<int>(threadIdx.x >> 5);
  }
  /// Begins the next copy.
  __device__ void begin() {
    while (more && tile >= walk.last) enter();
    if (more) copy(walk.unit, tile, place);
    commit_copies();
    tile += static_cast<int>(blockDim.x >> 5);
    if (++place == kPlaces) place = 0;
  }
  /// Waits for the oldest copy; its place is free once the warp has passed here the next time.
  __device__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPlaces - 2) : "memory");
    __syncwarp();
  }
};

/// Copies `rows` runs of `run` bytes (a multiple of 16), the i-th from from(i), one behind the
/// other to shared memory, four loads of a thread in flight; also(i, offset, 16 bytes) sees each.
template <class From, class Also>
__device__ void gather_runs(int rows, int run, std::byte* to, From&& from, Also&& also) {
  const int chunks = run / 16, count = rows * chunks, threads = static_cast<int>(blockDim.x);
  for (int base = threadIdx.x; base < count; base += 4 * threads) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = base + k * threads;
      if (i < count) {
        v[k] = *reinterpret_cast<const uint4*>(
            reinterpret_cast<const std::byte*>(from(i / chunks)) + 16 * (i % chunks));
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = base + k * threads;
      if (i >= count) continue;
      *reinterpret_cast<uint4*>(to + 16 * i) = v[k];
      also(i / chunks, 16 * (i % chunks), v[k]);
    }
  }
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

  /// `fixed` bytes of a block and `ring` of a warp; two blocks a multiprocessor where that leaves
  /// four warps each.
  static TileLaunch fit(size_t fixed, size_t ring, int units, int tiles) {
    int device = 0, all = 0, each = 0, count = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&each, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    TileLaunch launch;
    for (int blocks : {2, 1}) {
      const int room = std::min(all / blocks - 1024, each) - static_cast<int>(fixed);
      const int warps = std::min(8, room / static_cast<int>(ring));
      if (warps < (blocks == 2 ? 4 : 1)) continue;
      launch.warps = warps;
      const int64_t most = (int64_t{units} * tiles + warps - 1) / warps;
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

}  // namespace replayeval
