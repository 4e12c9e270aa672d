// Causal softmax attention over a paged KV cache, in an order that depends only on a query's
// absolute position: results are bit-identical for any split of a sequence into chunks, any set of
// rows and any number of threads (DESIGN.md section 2, iii).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace replayeval {

enum class KvType : uint8_t { fp32, bf16 };

/// Tokens in a page; page i holds absolute positions 64 i .. 64 i + 63.
constexpr int64_t kKvPage = 64;

/// Keys and values of one row of one attention layer. A page holds, for one KV head after the
/// other, K as two panels [head_dim, 32 positions] and V as panels of 32 channels [64 positions,
/// 32] (the last one padded with zeros). Growing allocates pages and never moves old ones. Movable;
/// copies are explicit and share the pages that are full: many rows after one prompt read the same
/// memory.
class KvCache {
 public:
  /// Throws std::invalid_argument unless kv_heads >= 1 and head_dim >= 1.
  KvCache(int kv_heads, int head_dim, KvType type);

  /// Appends `tokens` keys and values, [kv_heads, head_dim] a token, token t at k + t * k_stride.
  /// KvType::bf16 rounds to nearest even. Throws std::runtime_error when memory runs out; the
  /// length is then unchanged.
  void append(const float* k, int64_t k_stride, const float* v, int64_t v_stride, int64_t tokens);
  /// Forgets everything from `length` on and frees whole pages behind it. Throws
  /// std::invalid_argument unless 0 <= length <= length().
  void truncate(int64_t length);
  /// Keys and values of positions [first, first + tokens) as FP32: k, v [tokens, kv_heads,
  /// head_dim]; either may be null.
  void read(int64_t first, int64_t tokens, float* k, float* v) const;
  /// A cache with the same contents, which goes its own way from here.
  KvCache clone() const;

  int64_t length() const { return length_; }
  int kv_heads() const { return kv_heads_; }
  int head_dim() const { return head_dim_; }
  KvType type() const { return type_; }
  /// Bytes of the pages held now, shared ones in full, and of those that `length` tokens need.
  size_t bytes() const { return pages_.size() * page_bytes_; }
  static size_t bytes_needed(int kv_heads, int head_dim, KvType type, int64_t length);

  /// Start of K and of V of one KV head in a page; elements as `type()`.
  const std::byte* key_page(int64_t page, int kv_head) const {
    return pages_[static_cast<size_t>(page)].get() + static_cast<size_t>(kv_head) * head_bytes_;
  }
  const std::byte* value_page(int64_t page, int kv_head) const {
    return key_page(page, kv_head) + key_bytes_;
  }
  /// head_dim rounded up to whole panels of V.
  int64_t padded_dim() const { return padded_dim_; }

 private:
  using Page = std::shared_ptr<std::byte[]>;  // written only while nobody shares it
  Page allocate() const;                      // zeros; null without memory

  int kv_heads_;
  int head_dim_;
  KvType type_;
  int64_t padded_dim_;
  size_t key_bytes_;
  size_t head_bytes_;
  size_t page_bytes_;
  int64_t length_ = 0;
  std::vector<Page> pages_;
};

/// Queries of one row: token t of the call at absolute position position + t attends to positions 0
/// .. position + t of `cache`, which already holds them. q [heads, head_dim] a token at q + t *
/// q_stride; out likewise; out may be q itself when the strides are equal.
struct AttentionRow {
  const KvCache* cache = nullptr;
  int64_t position = 0;
  int64_t tokens = 0;
  const float* q = nullptr;
  int64_t q_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};

/// out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g]) v[j, g], j = 0 .. position + t, g = h /
/// (heads / kv_heads), all FP32. Order for each query: pages ascending; in a page dot products
/// sequential in head_dim, running maximum, exp (2 ulp), sum over 16 lanes and a tree, values
/// sequential in j, one fused multiply-add each (online softmax: m' = max(m, max_j s_j), l' = l
/// e^(m - m') + sum_j e^(s_j - m'), o' = o e^(m - m') + sum_j e^(s_j - m') v_j; out = o / l). A NaN
/// score, or scores without a finite maximum, gives a NaN output of that query and head alone; keys
/// and values at positions after the query are never used. Rows may be ragged (tokens 0 allowed),
/// and share `heads`, `scale`. Extra memory: a block of queries a thread. Throws
/// std::invalid_argument on a shape mismatch or a cache shorter than the queries need.
void attention(std::span<const AttentionRow> rows, int heads, float scale);

/// FP64 reference of `attention`: two passes over all visible keys, rounded once to FP32.
void attention_reference(std::span<const AttentionRow> rows, int heads, float scale);

}  // namespace replayeval
