// A block takes 64 (or 16) queries of one KV head over the pages of that head in turn: scores, the
// online softmax in sixteen partial sums a query, then the weighted values, every output in one
// thread's register. Keys and values stream through shared memory in pieces of 2,048 numbers.
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

struct Call {
  AttentionRowCuda rows[kRows];
  int heads, kv_heads, head_dim;
  float scale;
};

/// How a block is cut. kDim: head_dim rounded up to 64, 128 or 256; kQueries: 64, or 16 for single
/// tokens, whose pieces are fetched further ahead.
template <KvType Type, int kDimension, int kQueryCount>
struct Cut {
  static constexpr int kDim = kDimension, kQueries = kQueryCount;
  static constexpr bool kFew = kQueries == 16;
  static constexpr bool kBf16 = Type == KvType::bf16;
  static constexpr bool kCodes = kBf16 && kFew;  // pieces stay as they are and are widened at use
  static constexpr int kStages = kFew ? 6 : 2;
  static constexpr int kElement = kCodes ? 2 : 4;  // bytes in shared memory
  static constexpr int kKeyRow = kKeyDepth + 16 / kElement;
  static constexpr int kStageBytes = kPage * kKeyRow * kElement;
  static constexpr int kQueryFloats = kDim + 4;
  static constexpr int kValueRows = kPiece / kDim;
  static constexpr int kValuePieces = kPage / kValueRows;
  // Scores: a warp has 16 queries, a thread ty + 4 i; and 8 kOwnKeys keys, tx + 8 j.
  static constexpr int kScoreWarps = kQueries / 16;
  static constexpr int kOwnKeys = kPage / (kWarps / kScoreWarps) / 8;
  // Values: a warp has 32 kQuads channels, a thread 4 tx + 32 h ..; queries ty + 4 i of its share.
  static constexpr int kQuads = kFew ? 1 : 2;
  static constexpr int kDimWarps = kDim / (32 * kQuads);
  static constexpr int kWarpQueries = kQueries / (kWarps / kDimWarps);
  static constexpr int kOwnQueries = kWarpQueries / 4;
  static constexpr int kSharedBytes =
      4 * kQueries * (kQueryFloats + kScoreFloats + 2) + kStages * kStageBytes;
  static constexpr int kBlocks = kFew ? 1 : 2;  // of a multiprocessor
};

/// Pieces of one KV head: of every page the K pieces, then the V pieces.
template <KvType Type, class C>
struct Pieces {
  const char *k, *v;  // of the head
  int64_t row;        // elements between positions
  int64_t positions;  // that exist
  int head_dim, key_pieces;
  bool vector;
  char* stages;
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
    *from = (key ? k : v) + (position * row + channel) * (Type == KvType::bf16 ? 2 : 4);
    return position < positions && channel < head_dim;
  }
  __device__ int left(int piece, int index) const {  // elements of the unit inside the head
    const int page_pieces = key_pieces + C::kValuePieces;
    const int part = piece % page_pieces;
    const bool key = part < key_pieces;
    const int row_units = key ? kKeyDepth / kUnit : C::kDim / kUnit;
    return head_dim - ((key ? part * kKeyDepth : 0) + index % row_units * kUnit);
  }
  __device__ char* stage(int piece) const { return stages + piece % C::kStages * C::kStageBytes; }

  __device__ void fetch(int piece) {
#pragma unroll
    for (int i = 0; i < kPiece / kUnit / kThreads; ++i) {
      const int index = static_cast<int>(threadIdx.x) + i * kThreads;
      const char* from;
      int to;
      const bool there = place(piece, index, &from, &to);
      char* shared = stage(piece) + to * C::kElement;
      if constexpr (Type == KvType::fp32) {
        if (vector) {
          copy_behind(shared, there ? from : k, there ? 16 : 0);
        } else {
          const int n = there ? left(piece, index) : 0;
          store_quad(reinterpret_cast<float*>(shared),
                     load_quad(reinterpret_cast<const float*>(from), n, false), 4, true);
        }
      } else if (C::kCodes && vector) {
        copy_behind(shared, there ? from : k, there ? 16 : 0);
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
        if constexpr (C::kCodes) *reinterpret_cast<uint4*>(shared) = codes;
      }
    }
    close_copies();
  }
  /// After `fetch`, once its loads may be waited for.
  __device__ void widen_codes(int piece) const {
    if constexpr (Type == KvType::bf16 && !C::kCodes) {
      const char* from;
      int to;
      place(piece, static_cast<int>(threadIdx.x), &from, &to);
      float4* shared = reinterpret_cast<float4*>(stage(piece) + to * 4);
      const auto low = [](uint32_t u) { return __uint_as_float(u << 16); };
      const auto high = [](uint32_t u) { return __uint_as_float(u & 0xFFFF0000u); };
      shared[0] = make_float4(low(codes.x), high(codes.x), low(codes.y), high(codes.y));
      shared[1] = make_float4(low(codes.z), high(codes.z), low(codes.w), high(codes.w));
    }
  }
  __device__ static Quad four(const char* stage, int index) {
    if constexpr (C::kCodes) {
      return load_quad<WeightType::bf16>(reinterpret_cast<const uint16_t*>(stage) + index, 4, true);
    } else {
      return load_quad(reinterpret_cast<const float*>(stage) + index, 4, true);
    }
  }
};

template <KvType Type, class C>
__global__ void __launch_bounds__(kThreads, C::kBlocks) attend(const __grid_constant__ Call call) {
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
  const int warp = thread / 32, tx = thread % 8, ty = thread % 32 / 8;

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
  pieces.k = static_cast<const char*>(row.k) + int64_t{kv_head} * head_dim * (C::kBf16 ? 2 : 4);
  pieces.v = static_cast<const char*>(row.v) + int64_t{kv_head} * head_dim * (C::kBf16 ? 2 : 4);
  pieces.positions = row.position + row.tokens;
  pieces.head_dim = head_dim;
  pieces.key_pieces = (head_dim + kKeyDepth - 1) / kKeyDepth;
  pieces.vector =
      head_dim % pieces.kUnit == 0 &&
      (reinterpret_cast<uintptr_t>(row.k) | reinterpret_cast<uintptr_t>(row.v)) % 16 == 0;
  pieces.stages = reinterpret_cast<char*>(limits + C::kQueries);

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
      const char* keys = begin_piece();
      const float* own = q + score_query * C::kQueryFloats + part * kKeyDepth;
#pragma unroll
      for (int d = 0; d < kKeyDepth; d += 4) {
        Quad b[C::kOwnKeys];
#pragma unroll
        for (int j = 0; j < C::kOwnKeys; ++j)
          b[j] = pieces.four(keys, (score_key + j * 8) * C::kKeyRow + d);
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
      const char* values = begin_piece();
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
              b[e][h] = pieces.four(values, (r + e) * C::kDim + value_channel + 32 * h);
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
            b[h] = pieces.four(values, r * C::kDim + value_channel + 32 * h);
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

template <KvType Type, class C>
void launch(const Call& call, int64_t most_queries, unsigned rows, cudaStream_t stream) {
  CUDA_CHECK(cudaFuncSetAttribute(attend<Type, C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  C::kSharedBytes));
  const dim3 grid(static_cast<unsigned>(ceil_div(most_queries, C::kQueries)),
                  static_cast<unsigned>(call.kv_heads), rows);
  attend<Type, C><<<grid, kThreads, C::kSharedBytes, stream>>>(call);
  CUDA_CHECK(cudaGetLastError());
}

template <KvType Type, int kDim>
void launch_dim(const Call& call, int64_t most_queries, unsigned rows, cudaStream_t stream) {
  if (most_queries <= 16) {
    launch<Type, Cut<Type, kDim, 16>>(call, most_queries, rows, stream);
  } else {
    launch<Type, Cut<Type, kDim, 64>>(call, most_queries, rows, stream);
  }
}

template <KvType Type>
void launch_type(std::span<const AttentionRowCuda> rows, Call call, cudaStream_t stream) {
  unsigned held = 0;
  int64_t most_queries = 0;
  const auto send = [&] {
    if (held == 0) return;
    if (call.head_dim <= 64) {
      launch_dim<Type, 64>(call, most_queries, held, stream);
    } else if (call.head_dim <= 128) {
      launch_dim<Type, 128>(call, most_queries, held, stream);
    } else {
      launch_dim<Type, 256>(call, most_queries, held, stream);
    }
    held = 0;
    most_queries = 0;
  };
  for (const AttentionRowCuda& row : rows) {
    if (row.type != Type || row.tokens == 0) continue;
    if (held == kRows) send();
    call.rows[held++] = row;
    most_queries = std::max(most_queries, row.tokens * (call.heads / call.kv_heads));
  }
  send();
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
