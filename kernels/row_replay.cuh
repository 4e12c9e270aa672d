// What the state kernels with the matrix in registers share (quant/row_codec.cuh): which rows they
// take, a head's roles, its largest magnitude over blocks, and copies of records into shared
// memory. A row of 128 columns belongs to four neighbouring threads.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kernels/replay_cuda.cuh"
#include "quant/row_codec.cuh"

namespace replayeval {

constexpr int kRowRecords = 16;  // longest window, and the tokens an eager head reads at a time

/// How a row of a call is walked: `eager`, windows of 1 token with one shared checkpoint;
/// `separate` and `shared`, windows of up to kRowRecords, `shared` where no plan has a checkpoint
/// of its own to read; `general`, everything else.
enum class RowPath : uint8_t { eager, separate, shared, general };

inline RowPath row_path(const StateRow& row, int state_dim, WalkMode mode) {
  if (mode != WalkMode::commit) return RowPath::general;
  bool eager = true, shared = true;
  for (size_t p = 0; p < row.plans.size(); ++p) {
    const HeadPlan& plan = row.plans[p];
    if (plan.window > kRowRecords || row.pending[p] >= plan.window || plan.dot != DotType::fp32 ||
        plan.flush_output != FlushOutput::recurrence || plan.gdn_fold != GdnFold::rederive ||
        plan.ring_u != RecordType::fp32 || plan.beta != RecordType::fp32 ||
        !row_codec_takes(*plan.recurrence.format, state_dim) ||
        (plan.read && !row_codec_takes(*plan.read->format, state_dim))) {
      return RowPath::general;
    }
    eager = eager && plan.window == 1 && !plan.read;
    shared = shared && !plan.read;
  }
  return eager ? RowPath::eager : shared ? RowPath::shared : RowPath::separate;
}

/// Whether a plan of the row has a checkpoint of its own to read.
inline bool has_own_read(const StateRow& row) {
  return std::any_of(row.plans.begin(), row.plans.end(),
                     [](const HeadPlan& plan) { return plan.read.has_value(); });
}

/// The rows of a call by path, in the order of what they cost: short windows first, of those
/// stochastic ones before others before FP32.
struct RowGroups {
  std::vector<int> eager, separate, shared, general;

  /// eager, separate, shared.
  std::vector<int> fast() const {
    std::vector<int> all = eager;
    all.insert(all.end(), separate.begin(), separate.end());
    all.insert(all.end(), shared.begin(), shared.end());
    return all;
  }

  template <class Takes>
  RowGroups(std::span<const StateRow> rows, int state_dim, WalkMode mode, Takes&& takes) {
    std::vector<int> least;
    for (size_t r = 0; r < rows.size(); ++r) {
      const RowPath path =
          takes(static_cast<int>(r)) ? row_path(rows[r], state_dim, mode) : RowPath::general;
      int shortest = 4 * kMaxWindow;
      for (const HeadPlan& plan : rows[r].plans) {
        const bool rounds = plan.recurrence.format->descriptor.element != ElementKind::fp32;
        const int ease = !rounds ? 2 : plan.recurrence.rounding == Rounding::nearest_even ? 1 : 0;
        shortest = std::min(shortest, 4 * plan.window + ease);
      }
      least.push_back(shortest);
      (path == RowPath::eager      ? eager
       : path == RowPath::separate ? separate
       : path == RowPath::shared   ? shared
                                   : general)
          .push_back(static_cast<int>(r));
    }
    for (std::vector<int>* list : {&eager, &separate, &shared, &general}) {
      std::stable_sort(list->begin(), list->end(), [&](int a, int b) {
        return least[static_cast<size_t>(a)] < least[static_cast<size_t>(b)];
      });
    }
  }
};

/// Further streams of the calling thread, so that launches of one call run beside each other:
/// `fork` makes them wait for what `stream` has so far, `join` makes `stream` wait for them.
class SideStreams {
 public:
  static constexpr int kCount = 2;

  void fork(cudaStream_t stream) {
    CUDA_CHECK(cudaEventRecord(begin_, stream));
    for (cudaStream_t side : side_) CUDA_CHECK(cudaStreamWaitEvent(side, begin_, 0));
  }
  cudaStream_t operator[](int i) const { return side_[i]; }
  void join(cudaStream_t stream) {
    for (int i = 0; i < kCount; ++i) {
      CUDA_CHECK(cudaEventRecord(end_[i], side_[i]));
      CUDA_CHECK(cudaStreamWaitEvent(stream, end_[i], 0));
    }
  }
  /// Those of the current device; they live as long as the process.
  static SideStreams& current() {
    thread_local std::vector<SideStreams*> all;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    if (all.size() <= static_cast<size_t>(device)) all.resize(static_cast<size_t>(device) + 1);
    SideStreams*& own = all[static_cast<size_t>(device)];
    if (!own) own = new SideStreams;
    return *own;
  }

 private:
  SideStreams() {
    CUDA_CHECK(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming));
    for (int i = 0; i < kCount; ++i) {
      CUDA_CHECK(cudaStreamCreateWithFlags(&side_[i], cudaStreamNonBlocking));
      CUDA_CHECK(cudaEventCreateWithFlags(&end_[i], cudaEventDisableTiming));
    }
  }
  cudaStream_t side_[kCount] = {};
  cudaEvent_t begin_ = nullptr, end_[kCount] = {};
};

/// Whether the current device has thread block clusters.
inline bool has_clusters() {
  int device = 0, major = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= 9;
}

/// Launches a kernel whose blocks form clusters of `cluster` neighbours along x.
template <class Launch>
void launch_clusters(void (*kernel)(Launch), const Launch& launch, dim3 grid, int cluster,
                     int threads, size_t shared, cudaStream_t stream) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared)));
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, launch));
}

// ---------------------------------------------------------------- device

__device__ __forceinline__ void copy16_async(float* to, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy4_async(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
/// Waits for the thread's own copies; a barrier makes them visible to others.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Starts copying `rows` rows of width (at most 128) numbers, a warp a row from row `first_warp`
/// on; with kSkew four numbers of room follow every 32. `aligned`: rows start on 16 bytes.
template <bool kSkew>
__device__ __forceinline__ void copy_rows_async(float* to, int to_row, const float* from,
                                                int64_t from_row, int rows, int width,
                                                bool aligned) {
  const int lane = threadIdx.x & 31, at = 4 * lane + (kSkew ? 4 * (lane >> 3) : 0);
  for (int r = threadIdx.x >> 5; r < rows; r += static_cast<int>(blockDim.x >> 5)) {
    const float* source = from + r * from_row;
    if (aligned) {
      if (4 * lane < width) copy16_async(to + r * to_row + at, source + 4 * lane);
    } else {
      for (int e = 4 * lane; e < min(width, 4 * lane + 4); ++e)
        copy4_async(to + r * to_row + at + e - 4 * lane, source + e);
    }
  }
}
__device__ __forceinline__ bool rows_aligned(const float* from, int64_t row, int width) {
  return ((reinterpret_cast<uintptr_t>(from) & 15) | ((row | width) & 3)) == 0;
}

/// ((x_first + x_{first + 1}) + ...) + x_last of kRowRecords numbers, 0 where there are none.
__device__ __forceinline__ float sum_between(const float* x, int first, int last) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kRowRecords; k += 4) {
    const float4 v = load4(x + k);
    if (first <= k && k <= last) sum = sum + v.x;
    if (first <= k + 1 && k + 1 <= last) sum = sum + v.y;
    if (first <= k + 2 && k + 2 <= last) sum = sum + v.z;
    if (first <= k + 3 && k + 3 <= last) sum = sum + v.w;
  }
  return sum;
}

/// Thread block clusters; without them (below 9.0) a block is alone.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ __forceinline__ void store_in_cluster(float* own, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#else
  (void)rank;
  *own = value;
#endif
}

/// The largest magnitude of a head over the warps of its blocks (at most kWords in all): `publish`
/// and, after other work, `collect`, each by all threads.
struct HeadMax {
  static constexpr int kWords = 16;
  float* words;  // [2, kWords] in shared memory
  int own, blocks;
  int phase = 0;

  __device__ HeadMax(float* memory, int rank, int cluster)
      : words(memory),
        own(rank * static_cast<int>(blockDim.x >> 5) + static_cast<int>(threadIdx.x >> 5)),
        blocks(cluster) {
    if (threadIdx.x < 2 * kWords) words[threadIdx.x] = 0;
    __syncthreads();
    if (blocks > 1) {
      cluster_arrive();
      cluster_wait();
    }
  }
  __device__ __forceinline__ void publish(float largest) {
    const float m = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest)));
    const int lane = threadIdx.x & 31;
    float* to = words + phase * kWords + own;
    if (blocks > 1) {
      if (lane < blocks) store_in_cluster(to, lane, m);
      cluster_arrive();
    } else if (lane == 0) {
      *to = m;
    }
  }
  __device__ __forceinline__ float collect() {
    if (blocks > 1) {
      cluster_wait();
    } else {
      __syncthreads();
    }
    const float* all = words + phase * kWords;
    phase ^= 1;
    float m[kWords / 4];
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const float4 v = load4(all + 4 * i);
      m[i] = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    }
    return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
  }
  /// Before the block ends: others may still write here.
  __device__ void finish() {
    if (blocks > 1) {
      cluster_arrive();
      cluster_wait();
    }
  }
};

__device__ inline row_codec::Role role_of(const ReplayTables& tables, const DeviceHead& head,
                                          StateRole role) {
  const bool read = role == StateRole::read;
  const DevicePlan& plan = *head.plan;
  const int format = read ? plan.read : plan.recurrence;
  const bool stochastic = read ? plan.read_stochastic : plan.recurrence_stochastic;
  return row_codec::make_role(
      tables.formats[format].descriptor, stochastic,
      device_philox_key({plan.seed, head.row->stream, static_cast<uint32_t>(tables.layer),
                         static_cast<uint32_t>(tables.head_offset + head.head), 0, role}),
      head.packed(role), tables.buckets, 2 * format + (stochastic ? 1 : 0));
}

/// Adds a block's counts to its head's health; `first_odd` is the thread's first token with a
/// number that is not finite, or beyond the call.
__device__ inline void finish_health(const DeviceHead& head, uint64_t elements, int first_odd,
                                     int tokens, const ThreadCounts& counts) {
  if (!head.row->health || elements == 0) return;
  HeadHealth* health = &head.row->health[head.head];
  add_health(&health->encode, elements, counts);
  const int first = __reduce_min_sync(0xFFFFFFFFu, first_odd);
  // -1 is the largest unsigned number.
  if ((threadIdx.x & 31) == 0 && first < tokens) {
    atomicMin(reinterpret_cast<unsigned long long*>(&health->first_non_finite_position),
              static_cast<unsigned long long>(head.row->position + first));
  }
}

}  // namespace replayeval
