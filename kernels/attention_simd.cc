// One block of queries against the pages of one KV head (kernels/attention.h).
#include "kernels/attention_simd.h"

#include "kernels/math16.h"
#include "kernels/tile16.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {
namespace {

using namespace wide;

constexpr int64_t kQueryStride = kQueryDepth + 16;
constexpr int64_t kScoreStride = kKvPage + 16;
constexpr int kVectors = kPanelColumns / kLanes;
constexpr int kPageVectors = kKvPage / kLanes;

/// A page as FP32: itself, or widened into `buffer`.
const float* page_as_float(const std::byte* page, KvType type, int64_t n, float* buffer) {
  if (type == KvType::fp32) return reinterpret_cast<const float*>(page);
  for (int64_t i = 0; i < n; i += kLanes)
    store(buffer + i, as_float(shift_left(load_short(page + 2 * i), 16)));
  return buffer;
}

void prefetch(const std::byte* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

/// scores[r, j] = q[r] . k[j] for j < 64; the second panel is left out when nobody sees it.
void score_tile(const float* q, int64_t query_block, int64_t rows, const float* keys,
                int64_t head_dim, int64_t visible, float* scores) {
  for (int64_t panel = 0; panel * kPanelColumns < visible; ++panel) {
    const float* k = keys + panel * head_dim * kPanelColumns;
    for (int64_t begin = 0; begin < head_dim; begin += kQueryDepth) {
      const int64_t depth = head_dim - begin < kQueryDepth ? head_dim - begin : kQueryDepth;
      tile_rows<kQueryStride>(rows, q + begin / kQueryDepth * query_block,
                              k + begin * kPanelColumns, depth, scores + panel * kPanelColumns,
                              kScoreStride, begin == 0, nullptr, nullptr, kVectors);
    }
  }
}

/// One row of scores to weights e^(s - m), in place. `visible` keys count; returns m_old - m for
/// the factor of what was summed before.
REPLAYEVAL_INLINE float softmax_step(float* scores, float scale, int64_t visible, float& maximum,
                                     F16& total) {
  F16 s[kPageVectors];
  REPLAYEVAL_UNROLL for (int v = 0; v < kPageVectors; ++v) s[v] =
      load(scores + v * kLanes) * splat(scale);
  const F16 none = splat(-__builtin_inff());
  if (visible < kKvPage) {
    REPLAYEVAL_UNROLL for (int v = 0; v < kPageVectors; ++v) {
      const I16 seen = lane_index() < splat_int(static_cast<int32_t>(visible) - v * kLanes);
      s[v] = select(seen, s[v], none);
    }
  }
  const float page_maximum = max_lane(max(max(s[0], s[1]), max(s[2], s[3])));
  const float old = maximum;
  maximum = page_maximum > old ? page_maximum : old;
  // Without a finite score so far, subtracting 0 keeps the weights at 0.
  const float subtract = maximum == -__builtin_inff() ? 0.0F : maximum;
  REPLAYEVAL_UNROLL for (int v = 0; v < kPageVectors; ++v) {
    s[v] = exp16(s[v] - splat(subtract));
    store(scores + v * kLanes, s[v]);
  }
  total = (s[0] + s[1]) + (s[2] + s[3]);
  return old - subtract;
}

}  // namespace

void attention_block(const AttentionBlock& block, float* scratch) {
  const AttentionRow& row = *block.row;
  const KvCache& cache = *row.cache;
  const int64_t head_dim = cache.head_dim();
  const int64_t padded_dim = cache.padded_dim();
  const int64_t group = block.group;
  const int64_t queries = block.tokens * group;
  const int64_t query_block = queries * kQueryStride;
  const int64_t passes = (head_dim + kQueryDepth - 1) / kQueryDepth;
  float* q = scratch;
  float* sums = q + passes * query_block;
  float* key_buffer = sums + queries * padded_dim;
  float* value_buffer = key_buffer + head_dim * kKvPage;
  float* scores = value_buffer + padded_dim * kKvPage;
  float* factors = scores + kTileRows * kScoreStride;
  float* totals = factors + kLanes;
  float* maxima = totals + queries * kLanes;
  static_assert(kTileRows * kScoreStride + kLanes <= 2048 && kTileRows <= kLanes &&
                kPageVectors == 4);

  for (int64_t i = 0; i < queries; ++i) {
    const float* from = row.q + (block.first + i / group) * row.q_stride +
                        (block.kv_head * group + i % group) * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store_partial(q + d / kQueryDepth * query_block + i * kQueryStride + d % kQueryDepth,
                    load_partial(from + d, head_dim - d), head_dim - d);
    }
    for (int64_t d = 0; d < padded_dim; d += kLanes) store(sums + i * padded_dim + d, splat(0));
    store(totals + i * kLanes, splat(0));
    maxima[i] = -__builtin_inff();
  }
  store(factors, splat(0));

  // The token of query i at absolute position p sees p + 1 - 64 page keys of a page.
  const int64_t start = row.position + block.first;
  const int64_t pages = (start + block.tokens - 1) / kKvPage + 1;
  // Few queries wait for memory more than for sums: the values are asked for before the scores, and
  // the next page's keys before the values are used.
  const bool few = queries <= kTileRows;
  const int64_t key_bytes = cache.type() == KvType::fp32 ? 4 : 2;
  const int64_t last = start + block.tokens;  // keys that the last query sees
  const auto prefetch_keys = [&](int64_t page) {
    if (last <= page * kKvPage) return;
    const int64_t panels = last - page * kKvPage > kPanelColumns ? 2 : 1;
    prefetch(cache.key_page(page, block.kv_head), panels * kPanelColumns * head_dim * key_bytes);
  };
  const auto prefetch_values = [&](int64_t page) {
    const int64_t seen = last - page * kKvPage < kKvPage ? last - page * kKvPage : kKvPage;
    for (int64_t panel = 0; panel < padded_dim / kPanelColumns; ++panel) {
      prefetch(cache.value_page(page, block.kv_head) + panel * kKvPage * kPanelColumns * key_bytes,
               seen * kPanelColumns * key_bytes);
    }
  };
  if (few) prefetch_keys(0);
  for (int64_t page = 0; page < pages; ++page) {
    if (few) prefetch_values(page);
    const float* keys = page_as_float(cache.key_page(page, block.kv_head), cache.type(),
                                      head_dim * kKvPage, key_buffer);
    const float* values = page_as_float(cache.value_page(page, block.kv_head), cache.type(),
                                        padded_dim * kKvPage, value_buffer);
    const auto visible_to = [&](int64_t i) {
      const int64_t seen = start + i / group + 1 - page * kKvPage;
      return seen < kKvPage ? seen : kKvPage;
    };
    int64_t begin = 0;
    if (visible_to(0) <= 0) begin = (page * kKvPage - start) * group;
    for (; begin < queries; begin += kTileRows) {
      const int64_t rows = queries - begin < kTileRows ? queries - begin : kTileRows;
      const int64_t least = visible_to(begin);
      const int64_t most = visible_to(begin + rows - 1);
      score_tile(q + begin * kQueryStride, query_block, rows, keys, head_dim, most, scores);
      if (few && page + 1 < pages) prefetch_keys(page + 1);
      F16 added[kTileRows];
      for (int64_t r = 0; r < rows; ++r) {
        factors[r] = softmax_step(scores + r * kScoreStride, block.scale, visible_to(begin + r),
                                  maxima[begin + r], added[r]);
      }
      store(factors, exp16(load(factors)));
      for (int64_t r = 0; r < rows; ++r) {
        float* total = totals + (begin + r) * kLanes;
        store(total, fma(load(total), splat(factors[r]), added[r]));
      }
      for (int64_t panel = 0; panel < padded_dim / kPanelColumns; ++panel) {
        const float* v = values + panel * kKvPage * kPanelColumns;
        float* sum = sums + begin * padded_dim + panel * kPanelColumns;
        tile_rows<kScoreStride>(rows, scores, v, least, sum, padded_dim, false, factors, nullptr,
                                kVectors);
        // Keys that only the later rows of the tile see: never multiplied by anything for the
        // others, whose future may hold NaN.
        for (int64_t r = 0; least < most && r < rows; ++r) {
          const int64_t more = visible_to(begin + r) - least;
          if (more <= 0) continue;
          tile_rows<kScoreStride, 1>(1, scores + r * kScoreStride + least,
                                     v + least * kPanelColumns, more, sum + r * padded_dim,
                                     padded_dim, false, nullptr, nullptr, kVectors);
        }
      }
    }
  }

  for (int64_t i = 0; i < queries; ++i) {
    float* to = row.out + (block.first + i / group) * row.out_stride +
                (block.kv_head * group + i % group) * head_dim;
    const F16 total = splat(sum(load(totals + i * kLanes)));
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store_partial(to + d, load(sums + i * padded_dim + d) / total, head_dim - d);
    }
  }
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
