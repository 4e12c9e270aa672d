// A block takes 64 queries of one KV head over the pages of that head in turn: scores, the online
// softmax in sixteen partial sums a query, then the weighted values, every output in one thread's
// register. Keys and values stream through shared memory in pieces of 2,048 numbers. Rows of few
// queries take their scores page by page at once and only then the pages in turn.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/attention_cuda.h"
#include "kernels/math_cuda.cuh"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPage = static_cast<int>(kKvPage);
constexpr int kPiece = 2048;
constexpr int kKeyDepth = kPiece / kPage;  // head_dim columns of a piece of K
constexpr int kScoreFloats = kPage + 4;    // a row of scores: eight rows touch every bank once
constexpr int kRows = 64;                  // of a launch

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <KvType Type>
constexpr int kElement = Type == KvType::bf16 ? 2 : 4;  // bytes

struct Call {
  AttentionRowCuda rows[kRows];
  int heads, kv_heads, head_dim;
  float scale;
};

/// How a block of 64 queries is cut. kDim: head_dim rounded up to 64, 128 or 256.
template <int kDimension>
struct Cut {
  static constexpr int kDim = kDimension;
  static constexpr int kQueries = 64;
  static constexpr int kStages = 2;
  static constexpr int kKeyRow = kKeyDepth + 4;  // floats; eight rows touch every bank once
  static constexpr int kStageFloats = kPage * kKeyRow;
  static constexpr int kQueryFloats = kDim + 4;
  static constexpr int kValueRows = kPiece / kDim;
  static constexpr int kValuePieces = kPage / kValueRows;
  // Scores: a warp has 16 queries, a thread ty + 4 i; and 32 keys, tx + 8 j.
  static constexpr int kScoreWarps = 4;
  static constexpr int kOwnKeys = 4;
  // Values: a warp has 64 channels, a thread 4 tx + 32 h ..; queries ty + 4 i of its share.
  static constexpr int kQuads = 2;
  static constexpr int kDimWarps = kDim / 64;
  static constexpr int kWarpQueries = kQueries / (kWarps / kDimWarps);
  static constexpr int kOwnQueries = kWarpQueries / 4;
  static constexpr int kSharedBytes =
      4 * (kQueries * (kQueryFloats + kScoreFloats + 2) + kStages * kStageFloats);
};

/// Pieces of one KV head: of every page the K pieces, then the V pieces.
template <KvType Type, class C>
struct Pieces {
  const char *k, *v;  // of the head
  int64_t row;        // elements between positions
  int64_t positions;  // that exist
  int head_dim, key_pieces;
  bool vector;
  float* stages;
  uint4 codes;  // of a piece of BF16 numbers, until they are widened

  static constexpr int kUnit = Type == KvType::bf16 ? 8 : 4;  // elements of 16 bytes

  /// Place of unit `index` of piece `piece`: false where there is nothing to read.
  __device__ bool place(int piece, int index, const char** from, int* to) const {
    const int page_pieces = key_pieces + C::kValuePieces;
    const int page = piece / page_pieces, part = piece - page * page_pieces;
    const bool key = part < key_pieces;
    const int row_units = key ? kKeyDepth / kUnit : C::kDim / kUnit;
    const int r = index / row_units, c = index % row_units * kUnit;
    const int64_t position =
        int64_t{page} * kPage + (key ? r : (part - key_pieces) * C::kValueRows + r);
    const int channel = key ? part * kKeyDepth + c : c;
    *to = key ? r * C::kKeyRow + c : r * C::kDim + c;
    *from = (key ? k : v) + (position * row + channel) * kElement<Type>;
    return position < positions && channel < head_dim;
  }
  __device__ int left(int piece, int index) const {  // elements of the unit inside the head
    const int page_pieces = key_pieces + C::kValuePieces;
    const int part = piece % page_pieces;
    const bool key = part < key_pieces;
    const int row_units = key ? kKeyDepth / kUnit : C::kDim / kUnit;
    return head_dim - ((key ? part * kKeyDepth : 0) + index % row_units * kUnit);
  }
  __device__ float* stage(int piece) const { return stages + piece % C::kStages * C::kStageFloats; }

  __device__ void fetch(int piece) {
#pragma unroll
    for (int i = 0; i < kPiece / kUnit / kThreads; ++i) {
      const int index = static_cast<int>(threadIdx.x) + i * kThreads;
      const char* from;
      int to;
      const bool there = place(piece, index, &from, &to);
      float* shared = stage(piece) + to;
      if constexpr (Type == KvType::fp32) {
        if (vector) {
          copy_behind(shared, there ? from : k, there ? 16 : 0);
        } else {
          const int n = there ? left(piece, index) : 0;
          store_quad(shared, load_quad(reinterpret_cast<const float*>(from), n, false), 4, true);
        }
      } else if (vector) {
        codes = there ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      } else {
        const int n = there ? left(piece, index) : 0;
        const uint16_t* code = reinterpret_cast<const uint16_t*>(from);
        uint32_t pairs[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          pairs[e] = (2 * e < n ? code[2 * e] : 0u) | (2 * e + 1 < n ? code[2 * e + 1] : 0u) << 16;
        }
        codes = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
    close_copies();
  }
  /// After `fetch`, once its loads may be waited for.
  __device__ void widen_codes(int piece) const {
    if constexpr (Type == KvType::bf16) {
      const char* from;
      int to;
      place(piece, static_cast<int>(threadIdx.x), &from, &to);
      float4* shared = reinterpret_cast<float4*>(stage(piece) + to);
      const auto low = [](uint32_t u) { return __uint_as_float(u << 16); };
      const auto high = [](uint32_t u) { return __uint_as_float(u & 0xFFFF0000u); };
      shared[0] = make_float4(low(codes.x), high(codes.x), low(codes.y), high(codes.y));
      shared[1] = make_float4(low(codes.z), high(codes.z), low(codes.w), high(codes.w));
    }
  }
};

template <KvType Type, class C>
__global__ void __launch_bounds__(kThreads, 2) attend(const __grid_constant__ Call call) {
  const AttentionRowCuda& row = call.rows[blockIdx.z];
  const int head_dim = call.head_dim, group = call.heads / call.kv_heads;
  const int64_t all_queries = row.tokens * group;
  const int64_t blocks = (all_queries + C::kQueries - 1) / C::kQueries;
  if (blockIdx.x >= blocks) return;
  // The blocks with most pages start first.
  const int64_t first_query = (blocks - 1 - blockIdx.x) * C::kQueries;
  const int queries = static_cast<int>(min(int64_t{C::kQueries}, all_queries - first_query));
  const int kv_head = static_cast<int>(blockIdx.y);

  extern __shared__ float4 memory[];
  float* q = reinterpret_cast<float*>(memory);
  float* scores = q + C::kQueries * C::kQueryFloats;
  float* factors = scores + C::kQueries * kScoreFloats;
  int* limits = reinterpret_cast<int*>(factors + C::kQueries);  // keys that a query sees
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, tx = lane_column(thread), ty = lane_row(thread);

  const auto query_at = [&](int64_t stride, int i) {
    const int64_t index = first_query + i;
    return index / group * stride + (int64_t{kv_head} * group + index % group) * head_dim;
  };
  for (int i = thread; i < C::kQueries * (C::kDim / 4); i += kThreads) {
    const int query = i / (C::kDim / 4), d = i % (C::kDim / 4) * 4;
    Quad value = {};
    if (query < queries)
      value = load_quad(row.q + query_at(row.q_stride, query) + d, head_dim - d, false);
    store_quad(q + query * C::kQueryFloats + d, value, 4, true);
  }
  for (int i = thread; i < C::kQueries; i += kThreads) {
    limits[i] = i < queries ? static_cast<int>(row.position + (first_query + i) / group) + 1 : 0;
  }

  Pieces<Type, C> pieces;
  pieces.row = int64_t{call.kv_heads} * head_dim;
  pieces.k = static_cast<const char*>(row.k) + int64_t{kv_head} * head_dim * (kElement<Type>);
  pieces.v = static_cast<const char*>(row.v) + int64_t{kv_head} * head_dim * (kElement<Type>);
  pieces.positions = row.position + row.tokens;
  pieces.head_dim = head_dim;
  pieces.key_pieces = (head_dim + kKeyDepth - 1) / kKeyDepth;
  pieces.vector =
      head_dim % pieces.kUnit == 0 &&
      (reinterpret_cast<uintptr_t>(row.k) | reinterpret_cast<uintptr_t>(row.v)) % 16 == 0;
  pieces.stages = reinterpret_cast<float*>(limits + C::kQueries);

  const int least_limit = static_cast<int>(row.position + first_query / group) + 1;
  const int most_limit = static_cast<int>(row.position + (first_query + queries - 1) / group) + 1;
  const int pages = (most_limit - 1) / kPage + 1;
  const int all_pieces = pages * (pieces.key_pieces + C::kValuePieces);

  const int score_query = warp % C::kScoreWarps * 16 + ty;
  const int score_key = warp / C::kScoreWarps * 8 * C::kOwnKeys + tx;
  const int value_query = warp / C::kDimWarps * C::kWarpQueries + ty;
  const int value_channel = warp % C::kDimWarps * 32 * C::kQuads + tx * 4;
  const int own_query = thread / 4, own_lane = thread % 4 * 4;  // of the softmax
  float maximum = -INFINITY;
  Quad total = {};
  float sums[C::kOwnQueries][C::kQuads * 4];
#pragma unroll
  for (int i = 0; i < C::kOwnQueries; ++i) {
#pragma unroll
    for (int j = 0; j < C::kQuads * 4; ++j) sums[i][j] = 0;
  }

  int piece = 0;
#pragma unroll 1
  for (; piece < C::kStages - 1; ++piece) {
    if (piece < all_pieces) {
      pieces.fetch(piece);
      pieces.widen_codes(piece);
    } else {
      close_copies();
    }
  }
  piece = 0;
  const auto begin_piece = [&] {
    wait_copies<C::kStages - 2>();
    __syncthreads();
    if (piece + C::kStages - 1 < all_pieces) {
      pieces.fetch(piece + C::kStages - 1);
    } else {
      close_copies();
    }
    return pieces.stage(piece);
  };
  const auto end_piece = [&] {
    if (piece + C::kStages - 1 < all_pieces) pieces.widen_codes(piece + C::kStages - 1);
    ++piece;
  };

#pragma unroll 1
  for (int page = 0; page < pages; ++page) {
    float s[4][C::kOwnKeys];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < C::kOwnKeys; ++j) s[i][j] = 0;
    }
#pragma unroll 1
    for (int part = 0; part < pieces.key_pieces; ++part) {
      const float* keys = begin_piece();
      const float* own = q + score_query * C::kQueryFloats + part * kKeyDepth;
#pragma unroll
      for (int d = 0; d < kKeyDepth; d += 4) {
        Quad b[C::kOwnKeys];
#pragma unroll
        for (int j = 0; j < C::kOwnKeys; ++j)
          b[j] = load_quad(keys + (score_key + j * 8) * C::kKeyRow + d, 4, true);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Quad a = load_quad(own + i * 4 * C::kQueryFloats + d, 4, true);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int j = 0; j < C::kOwnKeys; ++j) s[i][j] = __fmaf_rn(a.v[e], b[j].v[e], s[i][j]);
          }
        }
      }
      end_piece();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < C::kOwnKeys; ++j)
        scores[(score_query + i * 4) * kScoreFloats + score_key + j * 8] = s[i][j];
    }
    __syncthreads();

    if (thread < 4 * C::kQueries) {
      const int seen = limits[own_query] - page * kPage;
      float* own = scores + own_query * kScoreFloats + own_lane;
      Quad weight[4];
      float largest = -INFINITY;
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        weight[v] = load_quad(own + 16 * v, 4, true);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float scaled = weight[v].v[e] * call.scale;
          weight[v].v[e] = 16 * v + own_lane + e < seen ? scaled : -INFINITY;
          largest = weight[v].v[e] > largest ? weight[v].v[e] : largest;
        }
      }
#pragma unroll
      for (int distance = 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, largest, distance);
        largest = other > largest ? other : largest;
      }
      float factor = 1.0F;
      if (seen > 0) {
        const float old = maximum;
        maximum = largest > old ? largest : old;
        // Without a finite score so far, subtracting 0 keeps the weights at 0.
        const float subtract = maximum == -INFINITY ? 0.0F : maximum;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
#pragma unroll
          for (int e = 0; e < 4; ++e) weight[v].v[e] = exp_ordered(weight[v].v[e] - subtract);
          store_quad(own + 16 * v, weight[v], 4, true);
        }
        factor = exp_ordered(old - subtract);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float added = (weight[0].v[e] + weight[1].v[e]) + (weight[2].v[e] + weight[3].v[e]);
          total.v[e] = __fmaf_rn(total.v[e], factor, added);
        }
      }
      if (own_lane == 0) factors[own_query] = factor;
    }

    const bool whole = least_limit - page * kPage >= kPage;
#pragma unroll 1
    for (int part = 0; part < C::kValuePieces; ++part) {
      const float* values = begin_piece();
      if (part == 0) {
#pragma unroll
        for (int i = 0; i < C::kOwnQueries; ++i) {
          const float factor = factors[value_query + i * 4];
#pragma unroll
          for (int j = 0; j < C::kQuads * 4; ++j) sums[i][j] *= factor;
        }
      }
      const float* own = scores + value_query * kScoreFloats + part * C::kValueRows;
      if (whole) {
#pragma unroll 2
        for (int r = 0; r < C::kValueRows; r += 4) {
          Quad b[4][C::kQuads];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int h = 0; h < C::kQuads; ++h)
              b[e][h] = load_quad(values + (r + e) * C::kDim + value_channel + 32 * h, 4, true);
          }
#pragma unroll
          for (int i = 0; i < C::kOwnQueries; ++i) {
            const Quad a = load_quad(own + i * 4 * kScoreFloats + r, 4, true);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#pragma unroll
              for (int j = 0; j < C::kQuads * 4; ++j)
                sums[i][j] = __fmaf_rn(a.v[e], b[e][j / 4].v[j % 4], sums[i][j]);
            }
          }
        }
      } else {
        // Keys that a query does not see are never multiplied by anything: they may hold NaN.
        const int position = page * kPage + part * C::kValueRows;
#pragma unroll 1
        for (int r = 0; r < C::kValueRows; ++r) {
          Quad b[C::kQuads];
#pragma unroll
          for (int h = 0; h < C::kQuads; ++h)
            b[h] = load_quad(values + r * C::kDim + value_channel + 32 * h, 4, true);
#pragma unroll
          for (int i = 0; i < C::kOwnQueries; ++i) {
            if (position + r >= limits[value_query + i * 4]) continue;
            const float a = own[i * 4 * kScoreFloats + r];
#pragma unroll
            for (int j = 0; j < C::kQuads * 4; ++j)
              sums[i][j] = __fmaf_rn(a, b[j / 4].v[j % 4], sums[i][j]);
          }
        }
      }
      end_piece();
    }
  }
  wait_copies<0>();

  __syncthreads();
  if (thread < 4 * C::kQueries) {
    const float sum = sum_over_four(total);
    if (own_lane == 0) factors[own_query] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < C::kOwnQueries; ++i) {
    const int query = value_query + i * 4;
    if (query >= queries) continue;
    const float divisor = factors[query];
    float* to = row.out + query_at(row.out_stride, query);
#pragma unroll
    for (int j = 0; j < C::kQuads * 4; ++j) {
      const int channel = value_channel + 32 * (j / 4) + j % 4;
      if (channel < head_dim) to[channel] = sums[i][j] / divisor;
    }
  }
}

// ---------------------------------------------------------------- few queries

// Single tokens: scores of all pages at once, then a walk over the pages in which a warp has a
// query and 32 channels.
constexpr int kFewQueries = 16;   // of a KV head
constexpr int kFewDepth = 64;     // head_dim columns of K in shared memory
constexpr int kFewChannels = 32;  // of a block of the walk
constexpr int kFewStages = 4;

/// Scaled scores [row, KV head, query, position], of kFewQueries queries and `stride` positions.
struct Scores {
  float* data;
  int64_t stride;
  __device__ float* at(int64_t row, int64_t kv_heads, int kv_head, int query) const {
    return data + ((row * kv_heads + kv_head) * kFewQueries + query) * stride;
  }
};

/// Four elements from `index` of an array of keys or values.
template <KvType Type>
__device__ __forceinline__ Quad load_kv(const void* data, int64_t index, int n, bool vector) {
  if constexpr (Type == KvType::bf16) {
    return load_quad<WeightType::bf16>(static_cast<const uint16_t*>(data) + index, n, vector);
  } else {
    return load_quad(static_cast<const float*>(data) + index, n, vector);
  }
}

/// A page of a KV head a block: thread (key, g) has queries g, g + 4, ...
template <KvType Type>
__global__ void __launch_bounds__(kThreads)
    score_page(const __grid_constant__ Call call, Scores scores, bool vector) {
  const AttentionRowCuda& row = call.rows[blockIdx.z];
  const int64_t positions = row.position + row.tokens;
  const int64_t first = int64_t{blockIdx.x} * kPage;
  if (first >= positions) return;
  __shared__ float keys[kPage * (kFewDepth + 4)];
  __shared__ float queries[kFewQueries * (kMaxAttentionDim + 4)];
  const int head_dim = call.head_dim, group = call.heads / call.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int count = static_cast<int>(row.tokens) * group;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < count * kMaxAttentionDim; i += kThreads) {
    const int query = i / kMaxAttentionDim, d = i % kMaxAttentionDim;
    const int64_t head = int64_t{kv_head} * group + query % group;
    queries[query * (kMaxAttentionDim + 4) + d] =
        d < head_dim ? row.q[query / group * row.q_stride + head * head_dim + d] : 0.0F;
  }
  const int key = thread % kPage, own = thread / kPage;
  float sums[kFewQueries / 4] = {};
  for (int begin = 0; begin < head_dim; begin += kFewDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPage * kFewDepth / 4 / kThreads; ++i) {
      const int r = (thread + i * kThreads) / (kFewDepth / 4);
      const int c = (thread + i * kThreads) % (kFewDepth / 4) * 4;
      const int n = first + r < positions ? head_dim - begin - c : 0;
      const int64_t at = ((first + r) * call.kv_heads + kv_head) * head_dim + begin + c;
      store_quad(keys + r * (kFewDepth + 4) + c, load_kv<Type>(row.k, at, n, vector), 4, true);
    }
    __syncthreads();
#pragma unroll 4
    for (int d = 0; d < kFewDepth; d += 4) {
      const Quad b = load_quad(keys + key * (kFewDepth + 4) + d, 4, true);
#pragma unroll
      for (int i = 0; i < kFewQueries / 4; ++i) {
        if (own + 4 * i >= count) break;
        const Quad a =
            load_quad(queries + (own + 4 * i) * (kMaxAttentionDim + 4) + begin + d, 4, true);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i] = __fmaf_rn(a.v[e], b.v[e], sums[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kFewQueries / 4; ++i) {
    const int query = own + 4 * i;
    if (query >= count) break;
    const bool seen = first + key <= row.position + query / group;
    scores.at(blockIdx.z, call.kv_heads, kv_head, query)[first + key] =
        seen ? sums[i] * call.scale : -INFINITY;
  }
}

/// 32 channels of a KV head a block, a query a warp, a channel a thread; pages in turn.
template <KvType Type>
__global__ void __launch_bounds__(32 * kFewQueries)
    walk_pages(const __grid_constant__ Call call, Scores scores, bool vector) {
  const AttentionRowCuda& row = call.rows[blockIdx.z];
  constexpr int kUnit = 16 / kElement<Type>;
  constexpr int kRowUnits = kFewChannels / kUnit;
  constexpr int kStageBytes = kPage * kFewChannels * kElement<Type>;
  __shared__ float4 stages[kFewStages * kStageBytes / 16];
  __shared__ float weights[kFewQueries][kPage];
  const int head_dim = call.head_dim, group = call.heads / call.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int first_channel = static_cast<int>(blockIdx.x) * kFewChannels;
  const int64_t positions = row.position + row.tokens;
  const int pages = static_cast<int>((positions + kPage - 1) / kPage);
  const int query = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const bool has_query = query < static_cast<int>(row.tokens) * group;
  const int64_t limit = row.position + query / group + 1;

  const auto stage = [&](int page) {
    return reinterpret_cast<char*>(stages) + page % kFewStages * kStageBytes;
  };
  const auto fetch = [&](int page) {
    for (int i = static_cast<int>(threadIdx.x); i < kPage * kRowUnits;
         i += static_cast<int>(blockDim.x)) {
      const int64_t position = int64_t{page} * kPage + i / kRowUnits;
      const int channel = first_channel + i % kRowUnits * kUnit;
      const int64_t at = (position * call.kv_heads + kv_head) * head_dim + channel;
      const bool there = position < positions && channel < head_dim;
      const char* from = static_cast<const char*>(row.v) + at * kElement<Type>;
      char* to = stage(page) + i * 16;
      if (vector) {
        copy_behind(to, there ? from : row.v, there ? 16 : 0);
      } else {
        for (int e = 0; there && e < kUnit && channel + e < head_dim; ++e) {
          if constexpr (Type == KvType::bf16) {
            reinterpret_cast<uint16_t*>(to)[e] = reinterpret_cast<const uint16_t*>(from)[e];
          } else {
            reinterpret_cast<float*>(to)[e] = reinterpret_cast<const float*>(from)[e];
          }
        }
      }
    }
    close_copies();
  };

  const float* own_scores = scores.at(blockIdx.z, call.kv_heads, kv_head, query);
  float next[2] = {-INFINITY, -INFINITY};
  const auto fetch_scores = [&](int page) {
    if (!has_query) return;
    next[0] = own_scores[int64_t{page} * kPage + lane];
    next[1] = own_scores[int64_t{page} * kPage + 32 + lane];
  };
  for (int page = 0; page < kFewStages - 1; ++page) {
    if (page < pages) {
      fetch(page);
    } else {
      close_copies();
    }
  }
  fetch_scores(0);
  float maximum = -INFINITY, total = 0, sum = 0;  // total: of lane % 16
  for (int page = 0; page < pages; ++page) {
    const float s[2] = {next[0], next[1]};
    if (page + 1 < pages) fetch_scores(page + 1);
    const int64_t seen = limit - int64_t{page} * kPage;
    float factor = 1.0F;
    if (has_query && seen > 0) {
      float largest = s[0] > -INFINITY ? s[0] : -INFINITY;
      largest = s[1] > largest ? s[1] : largest;
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, largest, distance);
        largest = other > largest ? other : largest;
      }
      const float old = maximum;
      maximum = largest > old ? largest : old;
      // Without a finite score so far, subtracting 0 keeps the weights at 0.
      const float subtract = maximum == -INFINITY ? 0.0F : maximum;
      const float low = exp_ordered(s[0] - subtract), high = exp_ordered(s[1] - subtract);
      __syncwarp();
      weights[query][lane] = low;
      weights[query][32 + lane] = high;
      factor = exp_ordered(old - subtract);
      const float added = (low + __shfl_xor_sync(0xFFFFFFFFu, low, 16)) +
                          (high + __shfl_xor_sync(0xFFFFFFFFu, high, 16));
      total = __fmaf_rn(total, factor, added);
    }
    wait_copies<kFewStages - 2>();
    __syncthreads();
    if (page + kFewStages - 1 < pages) {
      fetch(page + kFewStages - 1);
    } else {
      close_copies();
    }
    if (!has_query || seen <= 0) continue;
    sum *= factor;
    const char* values = stage(page);
    const auto value = [&](int j) {
      if constexpr (Type == KvType::bf16) {
        return widen_code<WeightType::bf16>(
            reinterpret_cast<const uint16_t*>(values)[j * kFewChannels + lane]);
      } else {
        return reinterpret_cast<const float*>(values)[j * kFewChannels + lane];
      }
    };
    if (seen >= kPage) {
#pragma unroll 16
      for (int j = 0; j < kPage; j += 4) {
        const Quad w = load_quad(&weights[query][j], 4, true);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum = __fmaf_rn(w.v[e], value(j + e), sum);
      }
    } else {
      for (int j = 0; j < static_cast<int>(seen); ++j)
        sum = __fmaf_rn(weights[query][j], value(j), sum);
    }
  }
  wait_copies<0>();
  const float divisor = sum_over_sixteen(total, 0xFFFFFFFFu);
  const int channel = first_channel + lane;
  if (!has_query || channel >= head_dim) return;
  const int64_t head = int64_t{kv_head} * group + query % group;
  row.out[query / group * row.out_stride + head * head_dim + channel] = sum / divisor;
}

template <KvType Type>
void launch_few(const Call& call, int64_t most_queries, int64_t positions, unsigned rows,
                bool vector, cudaStream_t stream) {
  const auto pages = static_cast<unsigned>(ceil_div(positions, kPage));
  const auto kv_heads = static_cast<unsigned>(call.kv_heads);
  const int64_t stride = int64_t{pages} * kPage;
  CallTables scratch(stream);
  const size_t at = scratch.reserve(static_cast<size_t>(rows * call.kv_heads * stride) *
                                    kFewQueries * sizeof(float));
  scratch.upload();
  const Scores scores{scratch.scratch<float>(at), stride};
  score_page<Type><<<dim3(pages, kv_heads, rows), kThreads, 0, stream>>>(call, scores, vector);
  const auto channels = static_cast<unsigned>(ceil_div(call.head_dim, kFewChannels));
  walk_pages<Type>
      <<<dim3(channels, kv_heads, rows), static_cast<unsigned>(32 * most_queries), 0, stream>>>(
          call, scores, vector);
  CUDA_CHECK(cudaGetLastError());
}

// ---------------------------------------------------------------- launches

template <KvType Type, int kDim>
void launch(const Call& call, int64_t most_queries, unsigned rows, cudaStream_t stream) {
  using C = Cut<kDim>;
  CUDA_CHECK(cudaFuncSetAttribute(attend<Type, C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  C::kSharedBytes));
  const dim3 grid(static_cast<unsigned>(ceil_div(most_queries, C::kQueries)),
                  static_cast<unsigned>(call.kv_heads), rows);
  attend<Type, C><<<grid, kThreads, C::kSharedBytes, stream>>>(call);
  CUDA_CHECK(cudaGetLastError());
}

template <KvType Type>
class Launches {
 public:
  Launches(const Call& call, cudaStream_t stream) : call_(call), stream_(stream) {}

  /// Rows of up to 16 queries a KV head, or of more, but not both.
  void add(const AttentionRowCuda& row) {
    const int64_t queries = row.tokens * (call_.heads / call_.kv_heads);
    const int64_t positions = row.position + row.tokens;
    const auto scratch = [&](int64_t rows) {  // bytes
      return rows * call_.kv_heads * kFewQueries * std::max(positions_, positions) * 4;
    };
    if (held_ == kRows || (few_ && held_ > 0 && scratch(held_ + 1) > kMostScratch)) send();
    few_ = queries <= kFewQueries;
    const uintptr_t addresses =
        reinterpret_cast<uintptr_t>(row.k) | reinterpret_cast<uintptr_t>(row.v);
    vector_ = vector_ && addresses % 16 == 0 && call_.head_dim % (16 / kElement<Type>) == 0;
    queries_ = std::max(queries_, queries);
    positions_ = std::max(positions_, positions);
    call_.rows[held_++] = row;
  }
  void send() {
    if (held_ == 0) return;
    if (few_) {
      launch_few<Type>(call_, queries_, positions_, held_, vector_, stream_);
    } else if (call_.head_dim <= 64) {
      launch<Type, 64>(call_, queries_, held_, stream_);
    } else if (call_.head_dim <= 128) {
      launch<Type, 128>(call_, queries_, held_, stream_);
    } else {
      launch<Type, 256>(call_, queries_, held_, stream_);
    }
    held_ = 0;
    queries_ = positions_ = 0;
    vector_ = true;
  }

 private:
  static constexpr int64_t kMostScratch = int64_t{1} << 29;
  Call call_;
  cudaStream_t stream_;
  unsigned held_ = 0;
  bool few_ = false, vector_ = true;
  int64_t queries_ = 0, positions_ = 0;
};

template <KvType Type>
void launch_type(std::span<const AttentionRowCuda> rows, const Call& call, cudaStream_t stream) {
  for (bool few : {false, true}) {
    Launches<Type> launches(call, stream);
    for (const AttentionRowCuda& row : rows) {
      if (row.type != Type || row.tokens == 0) continue;
      if ((row.tokens * (call.heads / call.kv_heads) <= kFewQueries) == few) launches.add(row);
    }
    launches.send();
  }
}

/// Rows of k, then rows of v.
__global__ void __launch_bounds__(kThreads)
    append_rows(const float* k, int64_t k_stride, const float* v, int64_t v_stride, int64_t tokens,
                int64_t width, void* k_out, void* v_out, KvType type, bool vector) {
  const int64_t row_quads = (width + 3) / 4, quads = tokens * row_quads;
  const float* from = blockIdx.y == 0 ? k : v;
  void* to = blockIdx.y == 0 ? k_out : v_out;
  const int64_t stride = blockIdx.y == 0 ? k_stride : v_stride;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < quads;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = i / row_quads, c = (i - token * row_quads) * 4;
    const int n = static_cast<int>(width - c < 4 ? width - c : 4);
    const Quad value = load_quad(from + token * stride + c, n, vector);
    if (type == KvType::fp32) {
      store_quad(static_cast<float*>(to) + token * width + c, value, n, vector);
    } else {
      store_quad<WeightType::bf16>(static_cast<uint16_t*>(to) + token * width + c, value, n,
                                   vector);
    }
  }
}

}  // namespace

void attention_cuda(std::span<const AttentionRowCuda> rows, int heads, int kv_heads, int head_dim,
                    float scale, CudaStream stream) {
  if (head_dim < 1 || head_dim > kMaxAttentionDim) {
    throw std::invalid_argument("attention: head_dim " + std::to_string(head_dim) +
                                ", expected 1 to " + std::to_string(kMaxAttentionDim) +
                                " on the device");
  }
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0 || kv_heads > 65535) {
    throw std::invalid_argument("attention: " + std::to_string(heads) +
                                " heads, expected a multiple of " + std::to_string(kv_heads) +
                                " KV heads (1 to 65535)");
  }
  const int64_t width = int64_t{heads} * head_dim;
  for (size_t i = 0; i < rows.size(); ++i) {
    const AttentionRowCuda& row = rows[i];
    const std::string place = "attention: row " + std::to_string(i);
    if (row.tokens == 0) continue;
    if (row.tokens < 0 || row.position < 0 || row.position + row.tokens > INT32_MAX - 64) {
      throw std::invalid_argument(place + ": queries at positions [" +
                                  std::to_string(row.position) + ", " +
                                  std::to_string(row.position + row.tokens) +
                                  "), expected a range from 0 on below 2^31 - 64");
    }
    if (row.k == nullptr || row.v == nullptr || row.q == nullptr || row.out == nullptr) {
      throw std::invalid_argument(place + ": k, v, q or out is null, expected arrays");
    }
    if (row.tokens > 1 && (row.q_stride < width || row.out_stride < width)) {
      throw std::invalid_argument(place + ": strides " + std::to_string(row.q_stride) + " and " +
                                  std::to_string(row.out_stride) + ", expected at least " +
                                  std::to_string(width));
    }
  }
  Call call = {};
  call.heads = heads;
  call.kv_heads = kv_heads;
  call.head_dim = head_dim;
  call.scale = scale;
  launch_type<KvType::fp32>(rows, call, stream);
  launch_type<KvType::bf16>(rows, call, stream);
}

void append_kv_cuda(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                    int64_t tokens, int64_t width, void* k_out, void* v_out, KvType type,
                    CudaStream stream) {
  if (tokens < 0 || width < 0 || (tokens > 1 && std::min(k_stride, v_stride) < width)) {
    throw std::invalid_argument("append_kv: " + std::to_string(tokens) + " tokens of " +
                                std::to_string(width) + " numbers, strides " +
                                std::to_string(k_stride) + " and " + std::to_string(v_stride) +
                                ", expected sizes >= 0 and strides of at least the width");
  }
  if (tokens == 0 || width == 0) return;
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(k) | reinterpret_cast<uintptr_t>(v) |
                              reinterpret_cast<uintptr_t>(k_out) |
                              reinterpret_cast<uintptr_t>(v_out);
  const bool vector = addresses % 16 == 0 && (k_stride | v_stride | width) % 4 == 0;
  const int64_t blocks = std::min<int64_t>(ceil_div(tokens * ceil_div(width, 4), kThreads), 65536);
  append_rows<<<dim3(static_cast<unsigned>(blocks), 2), kThreads, 0, stream>>>(
      k, k_stride, v, v_stride, tokens, width, k_out, v_out, type, vector);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
