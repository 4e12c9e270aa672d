// Two launches. First the scores: a warp takes tiles of 32 positions of a row and KV head, a
// position a lane, for all queries of that head. Then the weights and values: a warp walks over the
// pages of a row and KV head in turn with 128 bytes of channels, which lie in its lanes' registers;
// the warps of one head share the weights. Warps fetch their pieces of K and V ahead, 32 positions
// by 128 bytes, which lie together in a page.
#include <algorithm>
#include <string>
#include <type_traits>

#include "kernels/math_cuda.cuh"
#include "kernels/paged_attention_cuda.h"
#include "kernels/paged_kv.cuh"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kPage = static_cast<int>(kKvPage);  // of the order of sums
constexpr int kPiece = kPanel;                    // bytes
constexpr int kTile = 32;                         // positions
constexpr int kKeyRow = kPiece + 16;  // in shared memory: eight rows touch every bank once
constexpr int kStages = 2;
constexpr int kMostQueries = 8;  // of a KV head at once

/// Blocks of a multiprocessor: what registers are cut to.
constexpr int blocks_for(int queries) { return queries > 6 ? 4 : 5; }

template <KvType Type>
constexpr int kElement = Type == KvType::bf16 ? 2 : 4;

/// Queries, scores [rows, heads, `positions`] and outputs of one call.
struct Call {
  PagePool pool;
  const float* q;
  float* out;
  float* scores;
  int64_t q_stride, out_stride, positions, most_positions;
  int rows, heads, group;
  float scale;
};

/// Pieces of a row and KV head on their way to shared memory: tiles first, first + step, ... and of
/// each its pieces [begin, end).
template <int kRow>
struct Fetch {
  const PagePool& pool;
  const char* data;
  char* stages;
  int row, kv_head, tile, step, tiles, begin, end, lane;
  int64_t last;  // position that the row has reached
  int piece = 0, slot = 0;
  const char* head = nullptr;
  int32_t page = 0;  // of `tile`

  __device__ void start() {
    piece = begin;
    if (tile < tiles) page = pool.table[pool.page_entry(row, int64_t{tile} * kTile)];
    for (int i = 0; i < kStages - 1; ++i) next();
  }
  __device__ char* stage(int index) const { return stages + index * kTile * kRow; }
  __device__ void next() {
    if (tile < tiles) {
      const int64_t first = int64_t{tile} * kTile;
      if (piece == begin) {
        head = data + pool.head_offset(page, kv_head);
        if (tile + step < tiles)
          page = pool.table[pool.page_entry(row, int64_t{tile + step} * kTile)];
      }
      constexpr int kChunks = kPiece / 16, kRows = 32 / kChunks;
      const int chunk = lane % kChunks * 16, bytes = pool.panel_bytes(piece);
      const char* from = head + pool.byte_offset(first, piece * kPiece) + chunk;
      char* to = stage(slot) + chunk;
      if (chunk < bytes) {
#pragma unroll
        for (int i = 0; i < kTile / kRows; ++i) {
          const int r = i * kRows + lane / kChunks;
          if (first + r <= last) copy_behind(to + r * kRow, from + r * bytes, 16);
        }
      }
      if (++piece == end) {
        piece = begin;
        tile += step;
      }
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
    close_copies();
  }
};

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

/// kQueries of a KV head (the last ones again where there are no more) against the tiles that are
/// this warp's.
template <KvType Type, int kQueries>
__global__ void __launch_bounds__(kThreads, blocks_for(kQueries))
    score_tiles(const __grid_constant__ Call call) {
  const PagePool& pool = call.pool;
  const int row = static_cast<int>(blockIdx.z);
  const int64_t last = pool.position[row];
  if (last < 0 || last >= call.most_positions) return;
  const int tiles = static_cast<int>(last / kTile) + 1;
  if (static_cast<int>(blockIdx.x) * kWarps >= tiles) return;
  extern __shared__ float4 memory[];
  float* queries = reinterpret_cast<float*>(memory);
  constexpr int kUnit = 16 / kElement<Type>, kElements = kPiece / kElement<Type>;
  const int head_dim = pool.head_dim, query_floats = (head_dim + 7) / 8 * 8;
  const int chunks = (call.group + kQueries - 1) / kQueries;
  const int kv_head = static_cast<int>(blockIdx.y) / chunks;
  const int first_query = static_cast<int>(blockIdx.y) % chunks * kQueries;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);

  const int first_tile = static_cast<int>(blockIdx.x) * kWarps + warp;
  const int step = static_cast<int>(gridDim.x) * kWarps;
  const int pieces = (pool.row_bytes + kPiece - 1) / kPiece;
  char* stages =
      reinterpret_cast<char*>(queries + kQueries * query_floats) + warp * kStages * kTile * kKeyRow;
  Fetch<kKeyRow> fetch{pool, pool.k, stages, row,    kv_head, first_tile,
                       step, tiles,  0,      pieces, lane,    last};
  fetch.start();

  const float* q = call.q + row * call.q_stride + int64_t{kv_head} * call.group * head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * query_floats; i += kThreads) {
    const int query = min(first_query + i / query_floats, call.group - 1), d = i % query_floats;
    queries[i] = d < head_dim ? q[query * head_dim + d] : 0.0F;
  }
  __syncthreads();

  int slot = 0;
  for (int tile = first_tile; tile < tiles; tile += step) {
    float sums[kQueries] = {};
    for (int piece = 0; piece < pieces; ++piece) {
      wait_copies<kStages - 2>();
      __syncwarp();
      const char* key = fetch.stage(slot) + lane * kKeyRow;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      fetch.next();
      const float* own = queries + piece * kElements;
      const auto unit = [&](int c) {
        const uint4 u = *reinterpret_cast<const uint4*>(key + c * kElement<Type>);
        const uint32_t words[4] = {u.x, u.y, u.z, u.w};
        float k[kUnit];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (Type == KvType::bf16) {
            k[2 * e] = low_bf16(words[e]);
            k[2 * e + 1] = high_bf16(words[e]);
          } else {
            k[e] = __uint_as_float(words[e]);
          }
        }
#pragma unroll
        for (int e = 0; e < kUnit; e += 4) {
          Quad a[kQueries];
#pragma unroll
          for (int i = 0; i < kQueries; ++i)
            a[i] = load_quad(own + i * query_floats + c + e, 4, true);
#pragma unroll
          for (int f = 0; f < 4; ++f) {
#pragma unroll
            for (int i = 0; i < kQueries; ++i) sums[i] = __fmaf_rn(a[i].v[f], k[e + f], sums[i]);
          }
        }
      };
      const int n = min(kElements, head_dim - piece * kElements);
      if (n == kElements) {
#pragma unroll 4
        for (int c = 0; c < kElements; c += kUnit) unit(c);
        continue;
      }
      int c = 0;
      for (; c + kUnit <= n; c += kUnit) unit(c);
      for (; c < n; ++c) {
        float k;
        if constexpr (Type == KvType::bf16) {
          k = widen_code<WeightType::bf16>(reinterpret_cast<const uint16_t*>(key)[c]);
        } else {
          k = reinterpret_cast<const float*>(key)[c];
        }
#pragma unroll
        for (int i = 0; i < kQueries; ++i)
          sums[i] = __fmaf_rn(own[i * query_floats + c], k, sums[i]);
      }
    }
    const int64_t position = int64_t{tile} * kTile + lane;
    if (position > last) continue;
    float* to =
        call.scores +
        (int64_t{row} * call.heads + int64_t{kv_head} * call.group + first_query) * call.positions +
        position;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (first_query + i < call.group) to[i * call.positions] = sums[i] * call.scale;
    }
  }
  wait_copies<0>();
}

/// The weights of a page in shared memory: for each four queries (and the 1 to 3 that are left) a
/// block [positions, kWidth], for loads of up to 16 bytes.
template <int kQueries>
struct PageWeights {
  float data[kQueries % 4 == 3 ? (kQueries + 1) * kPage : kQueries * kPage];
  float factors[kMostQueries];  // for what was summed before

  static constexpr int width(int query) {
    const int left = kQueries - query / 4 * 4;
    return left >= 3 ? 4 : left;
  }
  __device__ float* block(int query) { return data + query / 4 * 4 * kPage; }
  __device__ void put(int query, int position, float weight) {
    block(query)[position * width(query) + query % 4] = weight;
  }
  __device__ void get(int position, float (&w)[kQueries]) {
#pragma unroll
    for (int i = 0; i < kQueries; i += 4) {
      const float* from = block(i) + position * width(i);
      if constexpr (kQueries == 3 || kQueries == 7) {
        const Quad quad = load_quad(from, 4, true);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (i + e < kQueries) w[i + e] = quad.v[e];
        }
      } else if (width(i) == 4) {
        const Quad quad = load_quad(from, 4, true);
#pragma unroll
        for (int e = 0; e < 4; ++e) w[i + e] = quad.v[e];
      } else if (width(i) == 2) {
        const float2 pair = *reinterpret_cast<const float2*>(from);
        w[i] = pair.x;
        w[i + 1] = pair.y;
      } else {
        w[i] = *from;
      }
    }
  }
};

/// Warps with neighbouring pieces of a row and KV head share its weights.
__host__ __device__ constexpr int team_of(int pieces) {
  return pieces % kWarps == 0 ? kWarps : pieces % 2 == 0 ? 2 : 1;
}

/// Row, KV head, kQueries of it and a piece of its channels: a warp for each, neighbouring pieces
/// side by side.
template <KvType Type, int kQueries>
__global__ void __launch_bounds__(kThreads, blocks_for(kQueries))
    walk_pages(const __grid_constant__ Call call) {
  constexpr int kElements = kPiece / kElement<Type>, kOwn = kElements / 32;  // of a lane
  const PagePool& pool = call.pool;
  const int head_dim = pool.head_dim, group = call.group;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int pieces = (pool.row_bytes + kPiece - 1) / kPiece;
  const int team = team_of(pieces), member = warp % team;
  const int chunks = (group + kQueries - 1) / kQueries;
  int64_t unit = int64_t{blockIdx.x} * kWarps + warp;
  const int piece = static_cast<int>(unit % pieces);
  unit /= pieces;
  const int first_query = static_cast<int>(unit % chunks) * kQueries;
  unit /= chunks;
  const int kv_head = static_cast<int>(unit % pool.kv_heads);
  if (unit / pool.kv_heads >= call.rows) return;
  const int row = static_cast<int>(unit / pool.kv_heads);
  const int64_t last = pool.position[row];
  if (last < 0) return;

  const int channel = piece * kElements + lane * kOwn;
  const int64_t first_head = int64_t{kv_head} * group + first_query;
  const auto write = [&](int query, int c, float value) {
    if (first_query + query < group && channel + c < head_dim)
      call.out[row * call.out_stride + (first_head + query) * head_dim + channel + c] = value;
  };
  if (last >= call.most_positions) {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) write(i, c, NAN);
    }
    return;
  }

  extern __shared__ float4 memory[];
  char* stages = reinterpret_cast<char*>(memory) + warp * kStages * kTile * kPiece;
  PageWeights<kQueries>* shared =
      reinterpret_cast<PageWeights<kQueries>*>(reinterpret_cast<char*>(memory) +
                                               kWarps * kStages * kTile * kPiece) +
      warp / team * 2;
  const auto wait_for_team = [&] {
    if (team == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / team), "r"(32 * team) : "memory");
    }
  };
  const int tiles = static_cast<int>(last / kTile) + 1;
  Fetch<kPiece> fetch{pool, pool.v, stages, row,       kv_head, 0,
                      1,    tiles,  piece,  piece + 1, lane,    last};
  fetch.start();

  // Of the queries member, member + team, ...
  const float* scores = call.scores + (int64_t{row} * call.heads + first_head) * call.positions;
  float next[kQueries][2], maximum[kQueries], total[kQueries];  // total: of lane % 16
  const auto fetch_scores = [&](int64_t first) {
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      const int query = member + n * team;
      if (query >= kQueries) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t position = first + 32 * h + lane;
        next[n][h] = position <= last && first_query + query < group
                         ? scores[query * call.positions + position]
                         : -INFINITY;
      }
    }
  };
  const auto weigh = [&](int page) {
    PageWeights<kQueries>& to = shared[page % 2];
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      const int query = member + n * team;
      if (query >= kQueries) break;
      const float s[2] = {next[n][0], next[n][1]};
      float largest = s[0] > -INFINITY ? s[0] : -INFINITY;
      largest = s[1] > largest ? s[1] : largest;
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, largest, distance);
        largest = other > largest ? other : largest;
      }
      const float old = maximum[n];
      maximum[n] = largest > old ? largest : old;
      // Without a finite score so far, subtracting 0 keeps the weights at 0.
      const float subtract = maximum[n] == -INFINITY ? 0.0F : maximum[n];
      const float low = exp_ordered(s[0] - subtract), high = exp_ordered(s[1] - subtract);
      const float factor = exp_ordered(old - subtract);
      const float added = (low + __shfl_xor_sync(0xFFFFFFFFu, low, 16)) +
                          (high + __shfl_xor_sync(0xFFFFFFFFu, high, 16));
      total[n] = __fmaf_rn(total[n], factor, added);
      to.put(query, lane, low);
      to.put(query, 32 + lane, high);
      if (lane == 0) to.factors[query] = factor;
    }
    if (int64_t{page + 1} * kPage <= last) fetch_scores(int64_t{page + 1} * kPage);
  };
  float sums[kQueries][kOwn];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    maximum[i] = -INFINITY;
    total[i] = 0;
#pragma unroll
    for (int c = 0; c < kOwn; ++c) sums[i][c] = 0;
  }
  fetch_scores(0);
  weigh(0);

  int slot = 0, page = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    page = tile * kTile / kPage;
    if (tile * kTile % kPage == 0) {
      // The team has written this page's weights, and is done with those before.
      wait_for_team();
      if (int64_t{page + 1} * kPage <= last) weigh(page + 1);
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
#pragma unroll
        for (int c = 0; c < kOwn; ++c) sums[i][c] *= shared[page % 2].factors[i];
      }
    }
    wait_copies<kStages - 2>();
    __syncwarp();
    const char* values = fetch.stage(slot) + lane * 4;
    slot = slot + 1 == kStages ? 0 : slot + 1;
    fetch.next();
    PageWeights<kQueries>& weights = shared[page % 2];
    const int first = tile * kTile % kPage;
    const auto add = [&](int j) {
      const uint32_t bits = *reinterpret_cast<const uint32_t*>(values + j * kPiece);
      float v[kOwn];
      if constexpr (Type == KvType::bf16) {
        v[0] = low_bf16(bits);
        v[1] = high_bf16(bits);
      } else {
        v[0] = __uint_as_float(bits);
      }
      float w[kQueries];
      weights.get(first + j, w);
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
#pragma unroll
        for (int c = 0; c < kOwn; ++c) sums[i][c] = __fmaf_rn(w[i], v[c], sums[i][c]);
      }
    };
    // Values that the query does not see are never multiplied by anything: they may hold NaN.
    const int64_t seen = last + 1 - int64_t{tile} * kTile;
    if (seen >= kTile) {
#pragma unroll(kQueries == 1 ? kTile : 8)
      for (int j = 0; j < kTile; ++j) add(j);
    } else {
      for (int j = 0; j < static_cast<int>(seen); ++j) add(j);
    }
  }
  wait_copies<0>();

  float* divisors = shared[(page + 1) % 2].factors;
#pragma unroll
  for (int n = 0; n < kQueries; ++n) {
    const int query = member + n * team;
    if (query >= kQueries) break;
    const float divisor = sum_over_sixteen(total[n], 0xFFFFFFFFu);
    if (lane == 0) divisors[query] = divisor;
  }
  wait_for_team();
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
#pragma unroll
    for (int c = 0; c < kOwn; ++c) write(i, c, sums[i][c] / divisors[i]);
  }
}

// ---------------------------------------------------------------- pages

/// k, then v (blockIdx.z); four channels a thread.
__global__ void __launch_bounds__(kThreads)
    append_tokens(const float* k, int64_t k_stride, const float* v, int64_t v_stride, PagePool pool,
                  KvType type, bool vector) {
  const int row = static_cast<int>(blockIdx.y);
  const int64_t position = pool.position[row];
  if (position < 0) return;
  const int head_quads = (pool.head_dim + 3) / 4;
  const int index = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int kv_head = index / head_quads, c = index % head_quads * 4;
  if (kv_head >= pool.kv_heads) return;
  const float* from =
      (blockIdx.z == 0 ? k + row * k_stride : v + row * v_stride) + kv_head * pool.head_dim + c;
  const int n = min(4, pool.head_dim - c);
  const Quad value = load_quad(from, n, vector);
  char* to = (blockIdx.z == 0 ? pool.k : pool.v) +
             pool.head_offset(pool.table[pool.page_entry(row, position)], kv_head) +
             pool.byte_offset(position, c * (type == KvType::fp32 ? 4 : 2));
  if (type == KvType::fp32) {
    store_quad(reinterpret_cast<float*>(to), value, n, true);
  } else {
    store_quad<WeightType::bf16>(reinterpret_cast<uint16_t*>(to), value, n, true);
  }
}

/// head_units units a position and KV head; k, then v (blockIdx.y).
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    load_positions(const Unit* k, const Unit* v, int64_t positions, int head_units, PagePool pool,
                   int row) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t head = index / head_units;  // of a position
  const int64_t position = head / pool.kv_heads;
  if (position >= positions) return;
  const int kv_head = static_cast<int>(head % pool.kv_heads);
  char* to = (blockIdx.y == 0 ? pool.k : pool.v) +
             pool.head_offset(pool.table[pool.page_entry(row, position)], kv_head) +
             pool.byte_offset(position, static_cast<int>(index % head_units * sizeof(Unit)));
  *reinterpret_cast<Unit*>(to) = (blockIdx.y == 0 ? k : v)[index];
}

// ---------------------------------------------------------------- launches

/// body(integral_constant<n>) for n = 1 .. 8.
template <class Body>
void with_queries(int n, Body body) {
  static_assert(kMostQueries == 8);
  switch (n) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 5:
      return body(std::integral_constant<int, 5>());
    case 6:
      return body(std::integral_constant<int, 6>());
    case 7:
      return body(std::integral_constant<int, 7>());
    default:
      return body(std::integral_constant<int, 8>());
  }
}

template <class Kernel>
void allow_shared(Kernel kernel, size_t bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)));
}

template <KvType Type>
void launch(const Call& call, int multiprocessors, cudaStream_t stream) {
  const PagePool& pool = call.pool;
  const int64_t heads = int64_t{call.rows} * pool.kv_heads;
  const int64_t least_chunks = ceil_div(call.group, kMostQueries);
  with_queries(static_cast<int>(ceil_div(call.group, least_chunks)), [&](auto queries) {
    constexpr int kQueries = queries();
    const int64_t chunks = ceil_div(call.group, kQueries);
    // Enough warps to hide what they wait for, and no more: most leave at once in short rows.
    const int64_t blocks =
        std::clamp<int64_t>(ceil_div(int64_t{32} * multiprocessors, heads * chunks), 1,
                            ceil_div(call.most_positions, kTile * kWarps));
    const size_t shared = static_cast<size_t>(kQueries * ((pool.head_dim + 7) / 8 * 8) * 4 +
                                              kWarps * kStages * kTile * kKeyRow);
    const auto kernel = score_tiles<Type, kQueries>;
    allow_shared(kernel, shared);
    kernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(pool.kv_heads * chunks),
                  static_cast<unsigned>(call.rows)),
             kThreads, shared, stream>>>(call);
    CUDA_CHECK(cudaGetLastError());
  });
  // Few rows: fewer queries a warp, so that more of them share the walk.
  const int64_t pieces = ceil_div(pool.row_bytes, kPiece);
  int64_t chunks = least_chunks;
  while (chunks < call.group && heads * pieces * chunks < int64_t{4} * multiprocessors)
    chunks = std::min<int64_t>(2 * chunks, call.group);
  with_queries(static_cast<int>(ceil_div(call.group, chunks)), [&](auto queries) {
    constexpr int kQueries = queries();
    const int64_t warps = heads * pieces * ceil_div(call.group, kQueries);
    const size_t shared = size_t{kWarps} * kStages * kTile * kPiece +
                          static_cast<size_t>(kWarps / team_of(static_cast<int>(pieces)) * 2) *
                              sizeof(PageWeights<kQueries>);
    const auto kernel = walk_pages<Type, kQueries>;
    allow_shared(kernel, shared);
    kernel<<<static_cast<unsigned>(ceil_div(warps, kWarps)), kThreads, shared, stream>>>(call);
    CUDA_CHECK(cudaGetLastError());
  });
}

int64_t padded_positions(int64_t most_positions) { return ceil_div(most_positions, kPage) * kPage; }

}  // namespace

size_t paged_kv_bytes(const PagedKv& kv, int64_t pages) {
  check_paged_shape(kv);
  if (pages < 0) refuse_paged(std::to_string(pages) + " pages, expected 0 or more");
  return static_cast<size_t>(pages) * static_cast<size_t>(kv.kv_heads) *
         static_cast<size_t>(kv.page) * static_cast<size_t>(paged_row_bytes(kv));
}

void append_paged_cuda(const float* k, int64_t k_stride, const float* v, int64_t v_stride, int rows,
                       const PagedKv& kv, const int64_t* position, CudaStream stream) {
  const PagePool pool = page_pool(kv, position, rows);
  const int64_t width = int64_t{kv.kv_heads} * kv.head_dim;
  if (rows == 0) return;
  if (k == nullptr || v == nullptr || position == nullptr)
    refuse_paged("keys, values or positions are null, expected arrays");
  if (rows > 1 && std::min(k_stride, v_stride) < width) {
    refuse_paged("strides " + std::to_string(k_stride) + " and " + std::to_string(v_stride) +
                 " of keys and values, expected at least " + std::to_string(width));
  }
  const bool vector = (reinterpret_cast<uintptr_t>(k) | reinterpret_cast<uintptr_t>(v)) % 16 == 0 &&
                      (k_stride | v_stride | kv.head_dim) % 4 == 0;
  const int64_t blocks = ceil_div(kv.kv_heads * ceil_div(kv.head_dim, 4), kThreads);
  append_tokens<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(rows), 2), kThreads, 0,
                  stream>>>(k, k_stride, v, v_stride, pool, kv.type, vector);
  CUDA_CHECK(cudaGetLastError());
}

void load_paged_cuda(const void* k, const void* v, int64_t positions, const PagedKv& kv, int row,
                     CudaStream stream) {
  const PagePool pool = page_pool(kv, nullptr, 1);
  if (row < 0 || positions < 0 || positions > int64_t{kv.table_stride} * kv.page) {
    refuse_paged(std::to_string(positions) + " positions into row " + std::to_string(row) +
                 ", expected a row of 0 or more and at most the " +
                 std::to_string(int64_t{kv.table_stride} * kv.page) + " positions of its table");
  }
  if (positions == 0) return;
  if (k == nullptr || v == nullptr) refuse_paged("keys or values are null, expected arrays");
  const int64_t bytes = kv.head_dim * kv_element_bytes(kv.type);
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(k) | reinterpret_cast<uintptr_t>(v);
  const auto run = [&](auto unit) {
    using Unit = decltype(unit);
    const int head_units = static_cast<int>(bytes / static_cast<int64_t>(sizeof(Unit)));
    const int64_t blocks = ceil_div(positions * kv.kv_heads * head_units, kThreads);
    if (blocks > INT32_MAX) refuse_paged("more than 2^31 blocks of keys, load fewer positions");
    load_positions<<<dim3(static_cast<unsigned>(blocks), 2), kThreads, 0, stream>>>(
        static_cast<const Unit*>(k), static_cast<const Unit*>(v), positions, head_units, pool, row);
    CUDA_CHECK(cudaGetLastError());
  };
  if (bytes % 16 == 0 && addresses % 16 == 0) {
    run(uint4());
  } else if (kv.type == KvType::bf16) {
    run(uint16_t());
  } else {
    run(uint32_t());
  }
}

size_t paged_attention_workspace(int rows, int heads, int64_t most_positions) {
  if (rows < 0 || heads < 1 || most_positions < 0) {
    refuse_paged(std::to_string(rows) + " rows of " + std::to_string(heads) + " heads and " +
                 std::to_string(most_positions) + " positions, expected sizes of 0 or more");
  }
  return static_cast<size_t>(rows) * static_cast<size_t>(heads) *
         static_cast<size_t>(padded_positions(most_positions)) * sizeof(float);
}

void paged_attention_cuda(const float* q, int64_t q_stride, float* out, int64_t out_stride,
                          int rows, int heads, const PagedKv& kv, const int64_t* position,
                          int64_t most_positions, float scale, void* workspace, CudaStream stream) {
  const PagePool pool = page_pool(kv, position, rows);
  check_paged_call(kv, heads, most_positions);
  const int64_t group = heads / kv.kv_heads;
  if (kv.kv_heads * ceil_div(group, kMostQueries) > 65535)
    refuse_paged(std::to_string(heads) + " heads, expected fewer");
  if (rows == 0) return;
  check_paged_arrays(kv, rows, heads, q, q_stride, out, out_stride, position);
  if (workspace == nullptr && most_positions > 0)
    refuse_paged("workspace is null, expected paged_attention_workspace bytes");
  int device = 0, multiprocessors = 1;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const Call call{pool,
                  q,
                  out,
                  static_cast<float*>(workspace),
                  q_stride,
                  out_stride,
                  padded_positions(most_positions),
                  most_positions,
                  rows,
                  heads,
                  static_cast<int>(group),
                  scale};
  if (kv.type == KvType::bf16) {
    launch<KvType::bf16>(call, multiprocessors, stream);
  } else {
    launch<KvType::fp32>(call, multiprocessors, stream);
  }
}

}  // namespace replayeval
