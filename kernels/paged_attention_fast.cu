// Single tokens over pages on tensor cores: every key and value is read once. A block takes a KV
// head and a chunk of a row's positions. Its teams take tiles of 16 positions in turn, which they
// fetch ahead; a team has one warp for each 8 queries of the head, and they share its tiles. Sums
// of teams, then those of chunks, are merged in order (FlashAttention-2, section 3.1;
// Flash-Decoding).
#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <string>

#include "kernels/math_cuda.cuh"
#include "kernels/paged_attention_cuda.h"
#include "kernels/paged_kv.cuh"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

constexpr int kTile = 16;    // positions
constexpr int kQueries = 8;  // of a warp
constexpr int kLanes = 32;
constexpr int kWarps = 4;  // of a block whose teams are single warps
constexpr int kMostWarps = 8;
constexpr int kMergeThreads = 256;

// Positions of a chunk: powers of two. Long enough that its partial sums do not count, short enough
// that the last blocks of a launch do not stand alone for long.
constexpr int kChunkBytes = 1 << 20;
constexpr int kLeastChunk = 256, kMostChunk = 4096;
// Fewer rows get shorter chunks until those of kMostChunk positions fill a device.
constexpr int64_t kBlocks = 1024;

/// Queries, outputs and partial sums of one call: `sums` [rows, heads, chunks, head_dim] relative
/// to the maximum, `tops` [rows, heads, chunks] maximum and sum of weights.
struct Call {
  PagePool pool;
  const float* q;
  float* out;
  float* sums;
  float2* tops;
  int64_t q_stride, out_stride, most_positions;
  int heads, group, chunk, chunks;
  int teams, team;   // of a block; warps of each
  int parts;         // of a KV head's queries: blocks
  int part_queries;  // of each
  float scale;
};

/// Maximum of scores as it is subtracted: without a finite one, 0 keeps the weights at 0.
__device__ __forceinline__ float subtrahend(float maximum) {
  return maximum == -INFINITY ? 0.0F : maximum;
}

// ---------------------------------------------------------------- tensor cores

/// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
/// The lane gets elements (i / 4, 2 (i % 4)) and its right neighbour of each matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
/// Likewise transposed: elements (2 (i % 4), i / 4) and the one below.
__device__ __forceinline__ void load_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

/// A [16, 16] BF16 of a warp: rows lane / 4 (`upper`) and that + 8 (`lower`), columns 2 (lane % 4)
/// and the next of the first and second eight.
struct Factor {
  uint32_t upper[2], lower[2];
};

/// c += a b, b [16, 8] with rows and columns as a's columns and rows; c [16, 8]: c[0], c[1] in row
/// lane / 4, c[2], c[3] in that + 8, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void multiply_add(float (&c)[4], const Factor& a, uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.upper[0]), "r"(a.lower[0]), "r"(a.upper[1]), "r"(a.lower[1]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}

// ---------------------------------------------------------------- tiles

/// Slots of a team in shared memory, each a tile of keys or of values of up to 16 kSteps channels.
template <int kSteps, bool kShared>
struct Ring {
  static constexpr int kSlots = (kSteps == 16 ? 3 : 32 / kSteps) * (kShared ? 2 : 1);
  static constexpr int kSlotBytes = kTile * kSteps * 32;
  static constexpr int kBytes = kSlots * kSlotBytes;
};

/// Bytes from the start of a slot to 16 bytes `unit` of a position: panels as in a page, but eight
/// neighbouring positions have a unit in different banks.
__device__ __forceinline__ int tile_offset(int position, int unit) {
  return unit / 8 * (kTile * kPanel) + position * kPanel + ((unit ^ position) & 7) * 16;
}

/// Keys and values of the tiles of a team, first those of one tile, then of the next, on their way
/// to its ring.
template <int kSteps, bool kShared>
struct Fetch {
  using Slots = Ring<kSteps, kShared>;
  const PagePool& pool;
  const int32_t* pages;  // of the chunk
  char* ring;
  int first;  // position of the chunk in its first page
  int count;  // of its positions that the row has reached
  int kv_head, tile, teams, member, team, lane;
  bool values = false;
  int to = 0, from = 0;  // slots

  static __device__ int after(int slot) { return slot + 1 == Slots::kSlots ? 0 : slot + 1; }

  __device__ void start() {
    for (int i = 0; i < Slots::kSlots - 1; ++i) next();
  }
  __device__ void next() {
    if (tile * kTile < count) {
      copy(tile * kTile);
      if (values) tile += teams;
      values = !values;
    }
    to = after(to);
    close_copies();
  }
  /// Four positions by a panel at once. Zeros stand for positions that the row has not reached: the
  /// pool may hold NaN there.
  __device__ void copy(int begin) {
    const int at = first + begin, unit = lane % 8, row = lane / 8;
    const int64_t in_page = (at & static_cast<int>(pool.mask())) + row;
    const char* source = (values ? pool.v : pool.k) +
                         pool.head_offset(pages[at >> pool.page_shift], kv_head) + unit * 16;
    char* slot = ring + to * Slots::kSlotBytes;
#pragma unroll 1
    for (int left = pool.row_bytes; unit * 16 < left; left -= kPanel) {
      const int bytes = min(left, kPanel);
#pragma unroll
      for (int n = kShared ? member : 0; n < kTile / 4; n += kShared ? team : 1) {
        const int r = 4 * n + row;
        copy_behind(slot + tile_offset(r, unit), source + (in_page + 4 * n) * bytes,
                    begin + r < count ? 16 : 0);
      }
      source += int64_t{kPanel} << pool.page_shift;
      slot += kTile * kPanel;
    }
  }
  /// Address of the next slot in turn once it is there; the one before is free.
  __device__ uint32_t wait(int team_index) {
    wait_copies<Slots::kSlots - 2>();
    if constexpr (kShared) {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team_index), "r"(kLanes * team) : "memory");
    } else {
      __syncwarp();
    }
    const char* slot = ring + from * Slots::kSlotBytes;
    from = after(from);
    next();
    return static_cast<uint32_t>(__cvta_generic_to_shared(slot));
  }
};

// ---------------------------------------------------------------- a warp's queries

/// Words of a warp's queries in shared memory: [kSteps, kLanes], each a lane's factor of 16
/// channels.
template <int kSteps>
constexpr int kQueryWords = kSteps * 32;

/// Writes the lane's steps first, first + stride, ... of query lane / 4 from q [head_dim] (null:
/// there is none), rounded to BF16.
template <int kSteps>
__device__ void load_query(uint2* to, const float* q, int head_dim, int first, int stride,
                           int lane) {
  for (int k = first; k < kSteps; k += stride) {
    const auto pair = [&](int d) {
      return q != nullptr && d < head_dim ? pack(q[d], q[d + 1]) : 0u;
    };
    const int d = k * 16 + lane % 4 * 2;
    to[k * kLanes + lane] = make_uint2(pair(d), pair(d + 8));
  }
}

/// What was summed for a warp's queries. They are the upper rows of products; the lower ones of the
/// queries are zero, and those of the weights hold what rounding to BF16 took off, so that weights
/// count with 16 bits.
template <int kSteps>
struct Sums {
  float maximum = -INFINITY, total = 0.0F;  // of query lane / 4; total: of this lane's weights
  float values[2 * kSteps][4] = {};

  /// scores[i]: of query lane / 4 and position 8 (i / 2) + 2 (lane % 4) + i % 2 of the tile at
  /// `keys`; -inf from position `count` on.
  static __device__ void score(const uint2* queries, uint32_t keys, int count, float scale,
                               int lane, float (&scores)[4]) {
    const int row = lane / 16 * 8 + lane % 8, side = lane / 8 % 2;
    const uint32_t base = keys + static_cast<uint32_t>(tile_offset(row, side));
    float low[4] = {}, high[4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t m[4];
      load_matrices(m, (base ^ k % 4 * 32) + k / 4 * (kTile * kPanel));
      const uint2 upper = queries[k * kLanes + lane];
      const Factor q{{upper.x, upper.y}, {0u, 0u}};
      multiply_add(low, q, m[0], m[1]);
      multiply_add(high, q, m[2], m[3]);
    }
    const float products[4] = {low[0], low[1], high[0], high[1]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = i / 2 * 8 + lane % 4 * 2 + i % 2;
      scores[i] = position < count ? products[i] * scale : -INFINITY;
    }
  }

  /// Moves on to the maximum with these scores; gives their weights.
  __device__ Factor weigh(const float (&scores)[4]) {
    float largest = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    const float old = maximum;
    maximum = fmaxf(old, largest);
    const float subtract = subtrahend(maximum);
    const float factor = expf(old - subtract);
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = expf(scores[i] - subtract);
    total = __fmaf_rn(total, factor, (w[0] + w[1]) + (w[2] + w[3]));
#pragma unroll
    for (int j = 0; j < 2 * kSteps; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[j][e] *= factor;
    }
    Factor weights;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights.upper[half] = pack(w[2 * half], w[2 * half + 1]);
      const float2 rounded = unpack(weights.upper[half]);
      weights.lower[half] = pack(w[2 * half] - rounded.x, w[2 * half + 1] - rounded.y);
    }
    return weights;
  }

  /// Adds the values of the tile at `tile`.
  __device__ void add(uint32_t tile, const Factor& weights, int lane) {
    const int row = lane / 8 % 2 * 8 + lane % 8, side = lane / 16;
    const uint32_t base = tile + static_cast<uint32_t>(tile_offset(row, side));
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t m[4];
      load_transposed(m, (base ^ k % 4 * 32) + k / 4 * (kTile * kPanel));
      multiply_add(values[2 * k], weights, m[0], m[1]);
      multiply_add(values[2 * k + 1], weights, m[2], m[3]);
    }
  }

  /// Channel 8 j + 2 (lane % 4) + e. The rests of weights times an
  /// infinite value are NaN or of any sign: the upper sum alone counts.
  __device__ float value(int j, int e) const {
    const float upper = values[j][e];
    return fabsf(upper) == INFINITY ? upper : upper + values[j][e + 2];
  }
};

// ---------------------------------------------------------------- a block

/// Floats of a query in shared memory when teams are merged: 16 kSteps channels, the sum of
/// weights, and room that puts queries in different banks.
template <int kSteps>
constexpr int kSumRow = 16 * kSteps + 8;

/// A block's row, chunk, KV head and part of its queries.
struct Place {
  int row, chunk, kv_head, first_query, queries;

  __device__ explicit Place(const Call& call)
      : row(static_cast<int>(blockIdx.y)),
        chunk(static_cast<int>(blockIdx.z)),
        kv_head(static_cast<int>(blockIdx.x) / call.parts),
        first_query(static_cast<int>(blockIdx.x) % call.parts * call.part_queries),
        queries(min(call.part_queries, call.group - first_query)) {}
  __device__ int64_t head(const Call& call, int query) const {
    return int64_t{kv_head} * call.group + first_query + query;
  }
  /// body(query, channel), spread over the block.
  template <class Body>
  __device__ void for_channels(int head_dim, Body body) const {
    for (int i = static_cast<int>(threadIdx.x); i < queries * head_dim;
         i += static_cast<int>(blockDim.x))
      body(i / head_dim, i % head_dim);
  }
  __device__ float* out(const Call& call, int query) const {
    return call.out + row * call.out_stride + head(call, query) * call.pool.head_dim;
  }
};

/// Sums of teams in order: the output where the row is `whole` in its first chunk, else partial
/// sums.
template <int kSteps>
__device__ void merge_teams(const Call& call, const Place& place, Sums<kSteps>& sums, float* memory,
                            bool whole) {
  __shared__ float maxima[kMostWarps * kQueries];
  const int lane = static_cast<int>(threadIdx.x % kLanes), quad = lane % 4;
  const int slots = call.team * kQueries;  // queries of a team
  const int own = static_cast<int>(threadIdx.x / kLanes) * kQueries + lane / 4;
  const int query = own % slots;
  const auto maximum_of = [&](int q) {
    float maximum = maxima[q];
    for (int t = 1; t < call.teams; ++t) maximum = fmaxf(maximum, maxima[t * slots + q]);
    return maximum;
  };
  if (quad == 0) maxima[own] = sums.maximum;
  float total = sums.total;
  total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
  total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
  __syncthreads();

  const float factor = expf(sums.maximum - subtrahend(maximum_of(query)));
  float* row = memory + own * kSumRow<kSteps>;
#pragma unroll
  for (int j = 0; j < 2 * kSteps; ++j) {
    *reinterpret_cast<float2*>(row + 8 * j + 2 * quad) =
        make_float2(sums.value(j, 0) * factor, sums.value(j, 1) * factor);
  }
  if (quad == 0) row[16 * kSteps] = total * factor;
  __syncthreads();

  const int head_dim = call.pool.head_dim;
  place.for_channels(head_dim, [&](int q, int channel) {
    float value = 0.0F, weight = 0.0F;
    for (int t = 0; t < call.teams; ++t) {
      const float* from = memory + (t * slots + q) * kSumRow<kSteps>;
      value += from[channel];
      weight += from[16 * kSteps];
    }
    if (whole) {
      place.out(call, q)[channel] = value / weight;
      return;
    }
    const int64_t to =
        (int64_t{place.row} * call.heads + place.head(call, q)) * call.chunks + place.chunk;
    call.sums[to * head_dim + channel] = value;
    if (channel == 0) call.tops[to] = make_float2(maximum_of(q), weight);
  });
}

/// Blocks of a multiprocessor: what registers are cut to.
template <int kSteps, bool kShared>
constexpr int kBlocksAtOnce = kShared ? 1 : (kSteps == 16 ? 2 : 3);

template <int kSteps, bool kShared>
__global__ void __launch_bounds__((kShared ? kMostWarps : kWarps) * kLanes,
                                  kBlocksAtOnce<kSteps, kShared>)
    attend_chunk(const __grid_constant__ Call call) {
  const PagePool& pool = call.pool;
  const Place place(call);
  const int64_t last = pool.position[place.row], first = int64_t{place.chunk} * call.chunk;
  if (last < first) return;
  if (last >= call.most_positions) {
    if (place.chunk == 0)
      place.for_channels(pool.head_dim, [&](int q, int c) { place.out(call, q)[c] = NAN; });
    return;
  }
  extern __shared__ __align__(kPanel) float4 memory[];
  __shared__ int32_t pages[kMostChunk / kKvPage];
  const int count = static_cast<int>(min(last - first + 1, int64_t{call.chunk}));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
  const int team = kShared ? warp / call.team : warp, member = kShared ? warp % call.team : 0;
  const int in_page = static_cast<int>(first & pool.mask());
  const int last_page = (in_page + count - 1) >> pool.page_shift;
  if (thread <= last_page) pages[thread] = pool.table[pool.page_entry(place.row, first) + thread];
  if (pool.head_dim < 16 * kSteps) {  // Channels that no copy fills.
    const int units = call.teams * Ring<kSteps, kShared>::kBytes / 16;
    for (int i = thread; i < units; i += static_cast<int>(blockDim.x))
      memory[i] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  }
  const int query = member * kQueries + lane / 4;
  uint2* queries = reinterpret_cast<uint2*>(reinterpret_cast<char*>(memory) +
                                            call.teams * Ring<kSteps, kShared>::kBytes) +
                   member * kQueryWords<kSteps>;
  load_query<kSteps>(queries,
                     query < place.queries ? call.q + place.row * call.q_stride +
                                                 place.head(call, query) * pool.head_dim
                                           : nullptr,
                     pool.head_dim, team, call.teams, lane);
  __syncthreads();
  char* ring = reinterpret_cast<char*>(memory) + team * Ring<kSteps, kShared>::kBytes;
  Fetch<kSteps, kShared> fetch{pool, pages,      ring,   in_page,   count, place.kv_head,
                               team, call.teams, member, call.team, lane};
  fetch.start();

  Sums<kSteps> sums;
  for (int begin = team * kTile; begin < count; begin += call.teams * kTile) {
    float scores[4];
    sums.score(queries, fetch.wait(team), count - begin, call.scale, lane, scores);
    const Factor weights = sums.weigh(scores);
    sums.add(fetch.wait(team), weights, lane);
  }
  wait_copies<0>();
  __syncthreads();
  merge_teams(call, place, sums, reinterpret_cast<float*>(memory), last < call.chunk);
}

// ---------------------------------------------------------------- chunks

/// A thread a channel of a row that has more than one chunk.
__global__ void __launch_bounds__(kMergeThreads) merge_chunks(const __grid_constant__ Call call) {
  const int row = static_cast<int>(blockIdx.y), head_dim = call.pool.head_dim;
  const int64_t last = call.pool.position[row];
  if (last < call.chunk || last >= call.most_positions) return;
  const int index = static_cast<int>(blockIdx.x) * kMergeThreads + static_cast<int>(threadIdx.x);
  const int head = index / head_dim, channel = index % head_dim;
  if (head >= call.heads) return;
  const int chunks = static_cast<int>(last / call.chunk) + 1;
  const int64_t first = (int64_t{row} * call.heads + head) * call.chunks;
  float maximum = -INFINITY, value = 0.0F, weight = 0.0F;
  for (int c = 0; c < chunks; ++c) maximum = fmaxf(maximum, call.tops[first + c].x);
  for (int c = 0; c < chunks; ++c) {
    const float2 top = call.tops[first + c];
    const float factor = expf(top.x - subtrahend(maximum));
    weight = __fmaf_rn(factor, top.y, weight);
    value = __fmaf_rn(factor, call.sums[(first + c) * head_dim + channel], value);
  }
  call.out[row * call.out_stride + int64_t{head} * head_dim + channel] = value / weight;
}

// ---------------------------------------------------------------- launches

/// Positions of a chunk. Not by most_positions: a row has the same chunks in every call.
int chunk_positions(int rows, int kv_heads, int head_dim) {
  int chunk = std::clamp(
      static_cast<int>(std::bit_floor(unsigned{kChunkBytes} / static_cast<unsigned>(4 * head_dim))),
      kLeastChunk, kMostChunk);
  while (chunk > kLeastChunk && int64_t{rows} * kv_heads * (kMostChunk / chunk) < kBlocks)
    chunk /= 2;
  return chunk;
}

int64_t chunks_of(int64_t most_positions, int chunk) {
  return std::max<int64_t>(ceil_div(most_positions, chunk), 1);
}

void check_fast(const PagedKv& kv) {
  if (paged_attention_fast_fits(kv)) return;
  refuse_paged(
      "elements of " + std::to_string(kv_element_bytes(kv.type)) + " bytes and head_dim " +
      std::to_string(kv.head_dim) +
      ", expected BF16 and a multiple of 16 up to 256 (128 with less than 100 KiB of shared "
      "memory); paged_attention_cuda takes others");
}

/// Of a block with the largest heads.
constexpr size_t kMostShared =
    kWarps * Ring<16, false>::kBytes + kQueryWords<16> * sizeof(uint2) + 1024;

template <int kSteps, bool kShared>
void launch(const Call& call, int rows, cudaStream_t stream) {
  const int warps = call.teams * call.team;
  const int shared = std::max(call.teams * Ring<kSteps, kShared>::kBytes +
                                  call.team * kQueryWords<kSteps> * static_cast<int>(sizeof(uint2)),
                              warps * kQueries * kSumRow<kSteps> * static_cast<int>(sizeof(float)));
  const auto kernel = attend_chunk<kSteps, kShared>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  kernel<<<dim3(static_cast<unsigned>(call.pool.kv_heads * call.parts), static_cast<unsigned>(rows),
                static_cast<unsigned>(call.chunks)),
           static_cast<unsigned>(warps * kLanes), static_cast<size_t>(shared), stream>>>(call);
  CUDA_CHECK(cudaGetLastError());
}

template <int kSteps>
void launch(const Call& call, int rows, cudaStream_t stream) {
  if (call.team > 1) {
    launch<kSteps, true>(call, rows, stream);
  } else {
    launch<kSteps, false>(call, rows, stream);
  }
}

}  // namespace

bool paged_attention_fast_fits(const PagedKv& kv) {
  if (kv.type != KvType::bf16 || kv.head_dim < 16 || kv.head_dim > kMaxAttentionDim ||
      kv.head_dim % 16 != 0)
    return false;
  return kv.head_dim <= 128 || block_shared_limit() >= kMostShared;
}

size_t paged_attention_fast_workspace(int rows, int heads, const PagedKv& kv,
                                      int64_t most_positions) {
  check_paged_shape(kv);
  check_fast(kv);
  check_paged_call(kv, heads, most_positions);
  const int64_t chunks = chunks_of(most_positions, chunk_positions(rows, kv.kv_heads, kv.head_dim));
  if (chunks == 1) return 0;
  return static_cast<size_t>(rows) * static_cast<size_t>(heads) * static_cast<size_t>(chunks) *
         (static_cast<size_t>(kv.head_dim) * sizeof(float) + sizeof(float2));
}

void paged_attention_fast_cuda(const float* q, int64_t q_stride, float* out, int64_t out_stride,
                               int rows, int heads, const PagedKv& kv, const int64_t* position,
                               int64_t most_positions, float scale, void* workspace,
                               CudaStream stream) {
  Call call{};
  call.pool = page_pool(kv, position, rows);
  check_fast(kv);
  check_paged_call(kv, heads, most_positions);
  if (rows == 0) return;
  check_paged_arrays(kv, rows, heads, q, q_stride, out, out_stride, position);
  call.chunk = chunk_positions(rows, kv.kv_heads, kv.head_dim);
  const int64_t chunks = chunks_of(most_positions, call.chunk);
  if (chunks > 65535) {
    refuse_paged("most_positions is " + std::to_string(most_positions) + ", expected at most " +
                 std::to_string(int64_t{65535} * call.chunk));
  }
  if (workspace == nullptr && chunks > 1)
    refuse_paged("workspace is null, expected paged_attention_fast_workspace bytes");
  call.q = q;
  call.q_stride = q_stride;
  call.out = out;
  call.out_stride = out_stride;
  call.most_positions = most_positions;
  call.heads = heads;
  call.group = heads / kv.kv_heads;
  call.chunks = static_cast<int>(chunks);
  call.scale = scale;
  call.sums = static_cast<float*>(workspace);
  call.tops = reinterpret_cast<float2*>(call.sums + int64_t{rows} * heads * chunks * kv.head_dim);
  call.parts = static_cast<int>(ceil_div(call.group, kMostWarps * kQueries));
  call.part_queries = static_cast<int>(ceil_div(call.group, call.parts));
  call.team = static_cast<int>(ceil_div(call.part_queries, kQueries));
  call.teams = call.team == 1 ? kWarps : call.team == 2 ? kWarps / 2 : 1;
  if (kv.head_dim <= 64) {
    launch<4>(call, rows, stream);
  } else if (kv.head_dim <= 128) {
    launch<8>(call, rows, stream);
  } else {
    launch<16>(call, rows, stream);
  }
  if (chunks == 1) return;
  merge_chunks<<<dim3(static_cast<unsigned>(ceil_div(int64_t{heads} * kv.head_dim, kMergeThreads)),
                      static_cast<unsigned>(rows)),
                 kMergeThreads, 0, stream>>>(call);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
