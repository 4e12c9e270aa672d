// What the kernels share that stream checkpoints through shared memory (mamba2_decode_fp32.cu,
// mamba2_decode_nvfp4.cu, gdn_decode_fp32.cu, gdn_decode_nvfp4.cu). Work is units (some heads of
// one row) of tiles (a few rows of a head). Every block takes an equal share of the tiles of the
// rows that flush and of the others, runs of tiles of neighbouring units. Most of its warps take
// the tiles in turn, each with a ring of tiles of its own that are copied behind its back across
// units; the last one prepares what the next unit needs beside its checkpoints meanwhile, so that
// nobody waits for it but at the start. Its code is hardly unrolled and there once, beside that of
// the whole block for the first unit: the instruction cache holds little (reports/BENCHMARKS.md).
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "kernels/activation.cuh"
#include "kernels/decode_cuda.h"

namespace replayeval {

/// A number that others are divided by: n / d and n % d without a division, for n >= 0 with n d
/// below 2^32.
class Divisor {
 public:
  __host__ __device__ Divisor(int d = 1)
      : divisor_(d),
        inverse_(d == 1 ? 0u : static_cast<uint32_t>(((uint64_t{1} << 32) + d - 1) / d)) {}
  __host__ __device__ operator int() const { return divisor_; }
  friend __host__ __device__ int operator/(int n, const Divisor& by) {
    if (by.inverse_ == 0u) return n;
#ifdef __CUDA_ARCH__
    return static_cast<int>(__umulhi(static_cast<uint32_t>(n), by.inverse_));
#else
    return static_cast<int>(static_cast<uint64_t>(n) * by.inverse_ >> 32);
#endif
  }
  friend __host__ __device__ int operator%(int n, const Divisor& by) {
    return n - n / by * by.divisor_;
  }

 private:
  int divisor_;
  uint32_t inverse_;
};

/// Calls body(row) for every `step`-th of the rows that flush, the `first`-th of them and on, in
/// turn: an even share wherever they lie. By all threads of a block.
template <class Body>
__device__ __forceinline__ void each_flushing_row(const DecodeRows& rows, int window, int first,
                                                  int step, Body&& body) {
  int skip = first;
  for (int base = 0; base < rows.rows; base += 32) {
    const int r = base + static_cast<int>(threadIdx.x & 31);
    unsigned flushing = __ballot_sync(0xFFFFFFFFu, r < rows.rows && rows.pending[r] + 1 == window);
    for (; __popc(flushing) > skip; skip = step - 1) {
      for (; skip > 0; --skip) flushing &= flushing - 1u;
      body(base + __ffs(static_cast<int>(flushing)) - 1);
      flushing &= flushing - 1u;
    }
    skip -= __popc(flushing);
  }
}

constexpr int kMostTileRows = 1024;  // of a launch

/// The tiles of a launch: rows first_row .. of row_units units of `tiles` tiles; those of rows that
/// flush with `skip_flush` are another kernel's. The `turns` blocks of a multiprocessor flush one
/// after the other, while the others read.
struct TileWork {
  const int32_t* pending = nullptr;
  int first_row = 0, rows = 0, window = 0;
  bool skip_flush = false;
  int turns = 1;
  Divisor row_units, tiles;

  /// Calls launch(work) for the rows of a step, as many at a time as a launch takes.
  template <class Start>
  static void each(const DecodeRows& rows, int window, bool skip_flush, int turns, int row_units,
                   int tiles, Start&& launch) {
    const int64_t row_tiles = int64_t{row_units} * tiles;
    const int most = static_cast<int>(std::clamp<int64_t>(
        (int64_t{1} << 31) / (row_tiles * std::max(row_units, tiles)), 1, kMostTileRows));
    for (int first = 0; first < rows.rows; first += most) {
      launch(TileWork{rows.pending, first, std::min(most, rows.rows - first), window, skip_flush,
                      turns, Divisor(row_units), Divisor(tiles)});
    }
  }
};

/// Tiles first .. last - 1 of unit `part` of a row with t records in its ring; none behind a
/// block's last run.
struct TileRun {
  int row = 0, part = 0, t = 0, first = 0, last = 0;
  __device__ bool real() const { return first < last; }
};

/// A block's share, in shared memory: an equal part of the tiles of the rows that flush, whole
/// units of the others in turn with the other blocks, which so stay close to each other in memory,
/// and an equal part of the tiles of those that do not go round; and the rows, those that flush
/// behind the others, as 64 (row - first_row) + records in the ring.
struct TileShare {
  const TileWork* work;
  // Begin, end of the flushing tiles; of the rest of the others; whole units; of them, those before
  // the flushing tiles.
  const int* bounds;
  const uint16_t* order;

  static constexpr int kBlockWarps = 32, kBounds = 32, kCounts = 2 * 2 * kBlockWarps;  // bytes
  /// Bytes of shared memory.
  static size_t bytes(int rows) {
    return (static_cast<size_t>(rows) * 2 + kBounds + kCounts + 15) / 16 * 16;
  }

  /// By all threads of a block of up to kBlockWarps whole warps; the barrier at its end serves
  /// others too.
  __device__ TileShare(const TileWork& w, std::byte* memory)
      : work(&w),
        bounds(reinterpret_cast<const int*>(memory)),
        order(reinterpret_cast<const uint16_t*>(memory + kBounds + kCounts)) {
    static_assert(kMaxWindow <= 64 && 64 * kMostTileRows <= 65536);
    // Of every warp the rows that flush and, in the upper half, the others; two arrays in turn, so
    // that one barrier a pass is enough.
    uint16_t* counts = reinterpret_cast<uint16_t*>(memory + kBounds);
    uint16_t* to = reinterpret_cast<uint16_t*>(memory + kBounds + kCounts);
    const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5),
              threads = static_cast<int>(blockDim.x);
    const auto load = [&](int r) { return r < w.rows ? w.pending[w.first_row + r] : 0; };
    int flushing = 0, others = 0, next = load(static_cast<int>(threadIdx.x));
    for (int base = 0, turn = 0; base < w.rows; base += threads, turn ^= kBlockWarps) {
      const int r = base + static_cast<int>(threadIdx.x), t = next;
      next = load(r + threads);
      const bool real = r < w.rows, flush = real && t + 1 == w.window;
      const unsigned flushes = __ballot_sync(0xFFFFFFFFu, flush),
                     plain = __ballot_sync(0xFFFFFFFFu, real) & ~flushes, lower = (1u << lane) - 1u;
      if (lane == 0)
        counts[turn + warp] = static_cast<uint16_t>(__popc(flushes) | __popc(plain) << 8);
      __syncthreads();
      int flushing_before = flushing, others_before = others;
#pragma unroll 1
      for (int i = 0; i < threads / 32; ++i) {
        const int count = counts[turn + i], of_flushing = count & 0xFF, of_others = count >> 8;
        if (i < warp) flushing_before += of_flushing, others_before += of_others;
        flushing += of_flushing;
        others += of_others;
      }
      const uint16_t entry = static_cast<uint16_t>(64 * r + t);
      if (flush) {
        to[w.rows - 1 - flushing_before - __popc(flushes & lower)] = entry;
      } else if (real) {
        to[others_before + __popc(plain & lower)] = entry;
      }
    }
    if (threadIdx.x < 2) {
      // What does not go round is the last blocks' of the ones and the first blocks' of the
      // others.
      const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x),
                other_units = others * w.row_units, whole = other_units / blocks * blocks;
      const int start = lane == 1 ? whole : other_units,
                units = lane == 1      ? other_units - whole
                        : w.skip_flush ? 0
                                       : flushing * w.row_units,
                all = units * w.tiles, each = all / blocks, more = all - each * blocks;
      const int place = lane == 1 ? block : blocks - 1 - block;
      const int begin = start * w.tiles + block * each +
                        (lane == 1 ? min(block, more) : max(more - 1 - place, 0));
      int* limits = reinterpret_cast<int*>(memory);
      limits[2 * lane] = begin;
      limits[2 * lane + 1] = begin + each + (place < more ? 1 : 0);
      if (lane == 1) {
        limits[4] = whole / blocks;
        limits[5] = whole / blocks * (block * w.turns / blocks) / w.turns;
      }
    }
    __syncthreads();
  }
};

/// The runs of a block in turn.
struct TileRuns {
  TileShare share;
  int at = 0, end = 0, taken = 0;
  bool flushed = false;
  TileRun now;

  __device__ explicit TileRuns(const TileShare& share) : share(share) {}
  __device__ void move() {
    const TileWork& w = *share.work;
    if (at == end && !flushed && taken == share.bounds[5]) {
      flushed = true;
      at = share.bounds[0];
      end = share.bounds[1];
    }
    if (at == end) {
      const int whole = share.bounds[4];
      if (taken < whole) {
        at = (taken * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * w.tiles;
        end = at + w.tiles;
      } else if (taken == whole) {
        at = share.bounds[2];
        end = share.bounds[3];
      }
      taken = min(taken, whole) + 1;
    }
    const int unit = at / w.tiles, place = unit / w.row_units;
    now.first = at - unit * w.tiles;
    now.last = min(now.first + end - at, static_cast<int>(w.tiles));
    if (!now.real()) return;
    at += now.last - now.first;
    const int entry = share.order[place];
    now.row = w.first_row + (entry >> 6);
    now.part = unit - place * w.row_units;
    now.t = entry & 63;
  }
};

/// A warp's walk over every `warps`-th tile of a block.
struct TileWalk {
  TileRuns runs;
  int warps, tile;

  __device__ TileWalk(const TileShare& share, int warp, int warps)
      : runs(share), warps(warps), tile(warp) {}
  /// To the next run.
  __device__ void move() {
    tile -= runs.now.last;
    runs.move();
    tile += runs.now.first;
  }
};

/// A warp's copies: tile after tile into the places of its ring. `source` enters runs and copies
/// their tiles: enter(run), copy(tile, place).
template <int kPlaces, class Source>
struct TileCopies {
  TileWalk walk;
  Source source;
  int place = 0;

  /// Those of the first tiles begin; none in a warp behind the `warps` that take tiles.
  __device__ TileCopies(const TileShare& share, int warp, int warps, const Source& from)
      : walk(share, warp, warps), source(from) {
    if (warp < warps) {
      walk.move();
      if (walk.runs.now.real()) source.enter(walk.runs.now);
    }
#pragma unroll 1
    for (int i = 0; i + 1 < kPlaces; ++i) begin();
  }
  /// Waits for what was asked for before the first copies.
  __device__ void wait_before() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPlaces - 1) : "memory");
  }
  /// Begins the next copy.
  __device__ void begin() {
    const TileRun& run = walk.runs.now;
    while (run.real() && walk.tile >= run.last) {
      walk.move();
      if (run.real()) source.enter(run);
    }
    if (run.real()) source.copy(walk.tile, place);
    commit_copies();
    walk.tile += walk.warps;
    if (++place == kPlaces) place = 0;
  }
  /// Waits for the oldest copy, and for what was asked for before it; its place is free once the
  /// warp has passed here the next time.
  __device__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPlaces - 2) : "memory");
    __syncwarp();
  }
};

/// A source of copies that keeps nothing of a run: body(run, tile, place).
template <class Body>
struct RunSource {
  Body body;
  TileRun run = {};

  __device__ void enter(const TileRun& next) { run = next; }
  __device__ void copy(int tile, int place) const { body(run, tile, place); }
};

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
/// Waits for the end of a barrier's phase of this parity.
__device__ __forceinline__ void wait_phase(uint64_t* barrier, int parity) {
  int done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#endif
  } while (!done);
}

/// A warp's tiles on their way into the places of its ring where they are pieces of contiguous
/// bytes: by the copy engine, which needs one instruction a piece; before sm_90 by the warp's
/// threads.
template <int kPlaces>
struct TilePieces {
  static constexpr int kBytes = (kPlaces * 8 + 15) / 16 * 16;  // of its barriers
  uint64_t* barriers;
  int place = 0, parity = 0;  // of the next tile that is waited for

  __device__ explicit TilePieces(std::byte* memory)
      : barriers(reinterpret_cast<uint64_t*>(memory)) {}
  /// By the whole warp, before the first copy.
  __device__ void init() const {
#if __CUDA_ARCH__ >= 900
    if ((threadIdx.x & 31) == 0) {
      for (int i = 0; i < kPlaces; ++i) init_barrier(barriers + i, 1);
      fence_writes();
    }
    __syncwarp();
#endif
  }
  /// Begins to copy a tile of kPieces pieces of kPieceBytes that follow each other to place `index`
  /// at `to`, `apart` bytes from each other. By the whole warp.
  template <int kPieces, int kPieceBytes>
  __device__ void copy(int index, std::byte* to, unsigned apart, const std::byte* from) const {
    static_assert(kPieces <= 32);
    const unsigned lane = threadIdx.x & 31u;
#if __CUDA_ARCH__ >= 900
    const unsigned barrier = shared_address(barriers + index);
    if (lane == 0) {
      asm volatile(
          "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
              barrier),
          "r"(kPieces * kPieceBytes)
          : "memory");
    }
    __syncwarp();
    if (lane < kPieces) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(shared_address(to) + lane * apart),
          "l"(from + lane * kPieceBytes), "r"(kPieceBytes), "r"(barrier)
          : "memory");
    }
#else
    constexpr unsigned kChunks = kPieceBytes / 16;
#pragma unroll 4
    for (unsigned i = lane; i < kPieces * kChunks; i += 32)
      copy_async(to + i / kChunks * apart + 16 * (i % kChunks), from + 16 * i);
#endif
  }
  /// Waits for the next tile, after TileCopies::wait. Its place.
  __device__ int wait() {
#if __CUDA_ARCH__ >= 900
    wait_phase(barriers + place, parity);
#endif
    const int now = place;
    if (++place == kPlaces) {
      place = 0;
      parity ^= 1;
    }
    return now;
  }
  /// Between a thread's own writes to a place or its barrier and what the copy engine does with
  /// them, before the warp's barrier.
  static __device__ void fence_writes() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
};

/// What is prepared for a run of a block lies in one of two places: `filled` by the warp that
/// prepares, `emptied` by those that take tiles. Runs are counted from 0.
struct PreparedPlaces {
  uint64_t* barriers;  // [4] in shared memory: filled, emptied

  /// `taking`: the warps that take tiles.
  static __device__ void init(uint64_t* barriers, int taking) {
    for (int i = 0; i < 4; ++i) init_barrier(barriers + i, 32 * (i < 2 ? 1 : taking));
  }
  /// By a whole warp.
  __device__ void fill(int run) const { arrive(barriers + (run & 1)); }
  __device__ void empty(int run) const { arrive(barriers + 2 + (run & 1)); }
  __device__ void wait_filled(int run) const { wait_phase(barriers + (run & 1), run >> 1 & 1); }
  __device__ void wait_emptied(int run) const {
    if (run >= 0) wait_phase(barriers + 2 + (run & 1), run >> 1 & 1);
  }

 private:
  // Each thread for itself: an arrival orders its own accesses for those who wait.
  static __device__ void arrive(uint64_t* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(
                     shared_address(barrier))
                 : "memory");
  }
};

/// Those who prepare together: the whole block (0), or some warps of it, the last ones.
template <int kWarps>
struct Team {
  static constexpr bool kIsWarp = kWarps == 1;
  static __device__ int size() { return kWarps == 0 ? static_cast<int>(blockDim.x) : 32 * kWarps; }
  static __device__ int rank() {
    return static_cast<int>(threadIdx.x) -
           (kWarps == 0 ? 0 : static_cast<int>(blockDim.x) - 32 * kWarps);
  }
  static __device__ void meet() {
    if constexpr (kWarps == 0) {
      __syncthreads();
    } else if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory");
    }
  }
};

/// Waits for all copies, also those that are in no group yet.
__device__ __forceinline__ void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Begins to copy 4 bytes, as copy_async does 16.
__device__ __forceinline__ void copy_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from));
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
  int warps = 0, blocks = 0, turns = 1;  // turns: blocks of a multiprocessor
  size_t shared = 0;

  /// `fixed` bytes of a block and `ring` of a warp that takes tiles; up to `most_blocks` blocks of
  /// `most_warps` such warps a multiprocessor, or fewer of at least four.
  static TileLaunch fit(size_t fixed, size_t ring, int units, int tiles, int most_blocks,
                        int most_warps) {
    int device = 0, all = 0, each = 0, count = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&each, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    TileLaunch launch;
    for (int blocks = most_blocks; blocks > 0; --blocks) {
      const int room = std::min(all / blocks - 1024, each) - 64 - static_cast<int>(fixed);
      const int warps = std::min(most_warps, room / static_cast<int>(ring));
      if (warps < (blocks > 1 ? 4 : 1)) continue;
      launch.warps = warps;
      launch.turns = blocks;
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

/// Starts `kernel` for the rows of a step, as many at a time as a launch takes, with
/// arguments(work).
template <class Kernel, class Arguments>
void start_tiles(const TileLaunch& use, Kernel kernel, const DecodeRows& rows, int window,
                 bool skip_flush, int row_units, int tiles, CudaStream stream,
                 Arguments&& arguments) {
  allow_shared(kernel, use.shared);
  TileWork::each(rows, window, skip_flush, use.turns, row_units, tiles, [&](const TileWork& work) {
    kernel<<<static_cast<unsigned>(use.blocks), static_cast<unsigned>(32 * (use.warps + 1)),
             use.shared, stream>>>(arguments(work));
    CUDA_CHECK(cudaGetLastError());
  });
}

/// Whether arrays start on multiples of 16 bytes, as copies of so many need it.
inline bool on_16_bytes(std::initializer_list<const void*> arrays) {
  return std::all_of(arrays.begin(), arrays.end(),
                     [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; });
}

/// Plain FP32 checkpoints that serve both roles, outputs of a flush from the folded state, FP32
/// products. False where the kernel does not take the sizes; arguments are checked.
bool mamba2_decode_fp32(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                        const DecodeStates& states, const Mamba2DecodeStep& step,
                        CudaStream stream);
bool gdn_decode_fp32(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                     const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream);

/// The same sizes and plans where the checkpoints are few enough for the time of one to count
/// (kFewMamba2Bytes, kFewGdnBytes). False where they are not, or the window is
/// too long; the callers have checked the rest.
bool mamba2_decode_few(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                       const DecodeStates& states, const Mamba2DecodeStep& step, CudaStream stream);
bool gdn_decode_few(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                    const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream);

/// Blocks of 16 columns with E4M3 scales under one FP32 scale.
inline bool has_nvfp4_scales(const FormatDescriptor& d, const PackedLayout& l) {
  return d.block_scale == BlockScale::floating && d.scale_number == kE4m3 && l.block_rows == 1 &&
         l.block_columns == 16 && l.outer_count == 1;
}
inline bool is_nvfp4(const FormatDescriptor& d, const PackedLayout& l) {
  return d.element == ElementKind::floating && d.number == kE2m1 && has_nvfp4_scales(d, l);
}
/// What mamba2_decode_cuda and gdn_decode_cuda have a row do that does not flush, or whose flush
/// has its output from the read checkpoint, where that is NVFP4 or another 4-bit element with its
/// scales (NarrowElement, nvfp4.cuh). False where the kernel does not take element or sizes.
bool mamba2_read_nvfp4(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                       const DecodeStates& states, const Mamba2DecodeStep& step, CudaStream stream);
/// The rows that flush; their output too, unless it is the read checkpoint's. False where the
/// kernel does not take formats or sizes.
bool mamba2_flush_rows(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                       const DecodeStates& states, const Mamba2DecodeStep& step, CudaStream stream);
bool gdn_read_nvfp4(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                    const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream);
/// Whether the corrections that such reads leave in the ring are of free sums
/// (DecodeStates::sums_freely), not those that the recurrence would give.
bool gdn_reads_freely(const GdnLayer& layer, const HeadPlan& plan, const DecodeStates& states);
bool gdn_flush_rows(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                    const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream);

}  // namespace replayeval
