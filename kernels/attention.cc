#include "kernels/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/attention_simd.h"
#include "kernels/dense.h"
#include "kernels/dense_simd.h"
#include "kernels/host_memory.h"

namespace replayeval {
namespace {

constexpr int64_t kPanelWidth = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t element_bytes(KvType type) { return type == KvType::fp32 ? 4 : 2; }
int64_t padded(int64_t head_dim) { return ceil_div(head_dim, kPanelWidth) * kPanelWidth; }

/// Element of K: panel of 32 positions, channel, position. Element of V: panel of 32 channels,
/// position, channel.
int64_t key_index(int64_t position, int64_t channel, int64_t head_dim) {
  return (position / kPanelWidth * head_dim + channel) * kPanelWidth + position % kPanelWidth;
}
int64_t value_index(int64_t position, int64_t channel) {
  return (channel / kPanelWidth * kKvPage + position) * kPanelWidth + channel % kPanelWidth;
}

void check_rows(std::span<const AttentionRow> rows, int heads) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const AttentionRow& row = rows[i];
    const auto place = [i] { return "attention: row " + std::to_string(i); };
    if (row.tokens == 0) continue;
    if (row.cache == nullptr) throw std::invalid_argument(place() + " has no cache");
    if (heads < 1 || heads % row.cache->kv_heads() != 0) {
      throw std::invalid_argument(place() + ": " + std::to_string(heads) +
                                  " heads, expected a multiple of " +
                                  std::to_string(row.cache->kv_heads()) + " KV heads");
    }
    if (row.tokens < 0 || row.position < 0 || row.position + row.tokens > row.cache->length()) {
      throw std::invalid_argument(
          place() + ": queries at positions [" + std::to_string(row.position) + ", " +
          std::to_string(row.position + row.tokens) + "), but the cache holds " +
          std::to_string(row.cache->length()) + " tokens (append first)");
    }
    const int64_t width = static_cast<int64_t>(heads) * row.cache->head_dim();
    if (row.tokens > 1 && (row.q_stride < width || row.out_stride < width)) {
      throw std::invalid_argument(place() + ": strides " + std::to_string(row.q_stride) + " and " +
                                  std::to_string(row.out_stride) + ", expected at least " +
                                  std::to_string(width));
    }
  }
}

}  // namespace

KvCache::KvCache(int kv_heads, int head_dim, KvType type)
    : kv_heads_(kv_heads), head_dim_(head_dim), type_(type), padded_dim_(padded(head_dim)) {
  if (kv_heads < 1 || head_dim < 1) {
    throw std::invalid_argument("KvCache: " + std::to_string(kv_heads) + " heads of " +
                                std::to_string(head_dim) + ", expected at least 1 of each");
  }
  key_bytes_ = static_cast<size_t>(kKvPage * head_dim) * element_bytes(type);
  head_bytes_ = key_bytes_ + static_cast<size_t>(kKvPage * padded_dim_) * element_bytes(type);
  page_bytes_ = head_bytes_ * static_cast<size_t>(kv_heads);
}

KvCache::Page KvCache::allocate() const {
  try {
    std::byte* memory = take_host_memory(page_bytes_);
    std::memset(memory, 0, page_bytes_);
    const size_t bytes = page_bytes_;
    return Page(memory, [bytes](std::byte* page) { give_host_memory(page, bytes); });
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

size_t KvCache::bytes_needed(int kv_heads, int head_dim, KvType type, int64_t length) {
  return static_cast<size_t>(ceil_div(length, kKvPage) * kv_heads * kKvPage *
                             (head_dim + padded(head_dim))) *
         element_bytes(type);
}

void KvCache::append(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                     int64_t tokens) {
  if (tokens < 0)
    throw std::invalid_argument("KvCache: append of " + std::to_string(tokens) + " tokens");
  const int64_t end = length_ + tokens;
  const auto out_of_memory = [this] {
    truncate(length_);
    throw std::runtime_error("KvCache: no memory for a page of " + std::to_string(page_bytes_) +
                             " bytes (" + std::to_string(bytes()) + " bytes held)");
  };
  // A page that a copy of this cache has in use too must not be written.
  if (tokens > 0 && length_ % kKvPage != 0) {
    Page& page = pages_[static_cast<size_t>(length_ / kKvPage)];
    if (page.use_count() > 1) {
      Page own = allocate();
      if (!own) out_of_memory();
      std::memcpy(own.get(), page.get(), page_bytes_);
      page = std::move(own);
    }
  }
  while (static_cast<int64_t>(pages_.size()) * kKvPage < end) {
    Page page = allocate();
    if (!page) out_of_memory();
    pages_.push_back(std::move(page));
  }
  const int64_t first_page = length_ / kKvPage;
  const int64_t touched = tokens > 0 ? (end - 1) / kKvPage - first_page + 1 : 0;
  const int64_t parts = touched * kv_heads_;
#pragma omp parallel for schedule(static) if (tokens * kv_heads_ * head_dim_ > 32768)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t page = first_page + part / kv_heads_;
    const int64_t head = part % kv_heads_;
    const int64_t begin = std::max(length_, page * kKvPage);
    const int64_t stop = std::min(end, (page + 1) * kKvPage);
    std::byte* keys =
        pages_[static_cast<size_t>(page)].get() + static_cast<size_t>(head) * head_bytes_;
    std::byte* values = keys + key_bytes_;
    // Rounded row by row into a buffer of codes, then spread over the panels.
    std::vector<uint16_t> codes(type_ == KvType::bf16 ? static_cast<size_t>(head_dim_) : 0);
    const auto spread = [&](const float* row, std::byte* to, auto index) {
      if (type_ == KvType::bf16) narrow(row, head_dim_, WeightType::bf16, codes.data());
      for (int64_t d = 0; d < head_dim_; ++d) {
        if (type_ == KvType::fp32) {
          std::memcpy(to + index(d) * 4, row + d, 4);
        } else {
          std::memcpy(to + index(d) * 2, &codes[static_cast<size_t>(d)], 2);
        }
      }
    };
    for (int64_t position = begin; position < stop; ++position) {
      const int64_t slot = position - page * kKvPage;
      const int64_t token = position - length_;
      spread(k + token * k_stride + head * head_dim_, keys,
             [&](int64_t d) { return key_index(slot, d, head_dim_); });
      spread(v + token * v_stride + head * head_dim_, values,
             [&](int64_t d) { return value_index(slot, d); });
    }
  }
  length_ = end;
}

void KvCache::truncate(int64_t length) {
  if (length < 0 || length > length_) {
    throw std::invalid_argument("KvCache: truncate to " + std::to_string(length) +
                                ", expected 0 to " + std::to_string(length_));
  }
  length_ = length;
  pages_.resize(static_cast<size_t>(ceil_div(length, kKvPage)));
}

void KvCache::read(int64_t first, int64_t tokens, float* k, float* v) const {
  if (first < 0 || tokens < 0 || first + tokens > length_) {
    throw std::invalid_argument("KvCache: read of positions [" + std::to_string(first) + ", " +
                                std::to_string(first + tokens) + ") of " + std::to_string(length_));
  }
  const auto get = [this](const std::byte* from, int64_t index) {
    if (type_ == KvType::fp32) {
      float value;
      std::memcpy(&value, from + index * 4, 4);
      return value;
    }
    uint16_t code;
    std::memcpy(&code, from + index * 2, 2);
    return bf16_to_fp32(code);
  };
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t page = (first + t) / kKvPage;
    const int64_t slot = (first + t) % kKvPage;
    for (int head = 0; head < kv_heads_; ++head) {
      const int64_t at = (t * kv_heads_ + head) * head_dim_;
      for (int64_t d = 0; d < head_dim_; ++d) {
        if (k != nullptr) k[at + d] = get(key_page(page, head), key_index(slot, d, head_dim_));
        if (v != nullptr) v[at + d] = get(value_page(page, head), value_index(slot, d));
      }
    }
  }
}

KvCache KvCache::clone() const {
  KvCache copy(kv_heads_, head_dim_, type_);
  copy.pages_ = pages_;
  copy.length_ = length_;
  return copy;
}

void attention(std::span<const AttentionRow> rows, int heads, float scale) {
  check_rows(rows, heads);
  int64_t threads = 1;
#ifdef _OPENMP
  threads = omp_in_parallel() ? 1 : omp_get_max_threads();
#endif
  // Blocks of about 96 queries read each page once for all of them; fewer when there would be too
  // few blocks.
  int64_t total_queries = 0;
  for (const AttentionRow& row : rows) total_queries += row.tokens * heads;
  const int64_t wanted = std::clamp<int64_t>(total_queries / (6 * threads) / 12 * 12, 24, 96);
  std::vector<AttentionBlock> blocks;
  int64_t scratch_floats = 0;
  for (const AttentionRow& row : rows) {
    if (row.tokens == 0) continue;
    const int group = heads / row.cache->kv_heads();
    const int64_t step = std::max<int64_t>(1, wanted / group);
    for (int64_t first = 0; first < row.tokens; first += step) {
      for (int head = 0; head < row.cache->kv_heads(); ++head) {
        blocks.push_back({&row, head, group, first, std::min(step, row.tokens - first), scale});
      }
    }
    scratch_floats =
        std::max(scratch_floats, attention_scratch(std::min(step, row.tokens) * group,
                                                   row.cache->head_dim(), row.cache->padded_dim()));
  }
  // Longest first, so that no thread waits long for the last block.
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const AttentionBlock& a, const AttentionBlock& b) {
                     return a.row->position + a.first > b.row->position + b.first;
                   });
  const auto block_function = REPLAYEVAL_SIMD_CALL(attention_block);
  std::atomic<bool> out_of_memory = false;
  const auto count = static_cast<int64_t>(blocks.size());
#pragma omp parallel for schedule(dynamic, 1) if (threads > 1 && count > 1)
  for (int64_t i = 0; i < count; ++i) {
    float* scratch = thread_scratch(scratch_floats);
    if (scratch == nullptr) {
      out_of_memory = true;
      continue;
    }
    block_function(blocks[static_cast<size_t>(i)], scratch);
  }
  if (out_of_memory) throw std::runtime_error("attention: no memory for a block of queries");
}

void attention_reference(std::span<const AttentionRow> rows, int heads, float scale) {
  check_rows(rows, heads);
  for (const AttentionRow& row : rows) {
    if (row.tokens == 0) continue;
    const int64_t kv_heads = row.cache->kv_heads();
    const int64_t head_dim = row.cache->head_dim();
    const int64_t keys = row.position + row.tokens;
    std::vector<float> k(static_cast<size_t>(keys * kv_heads * head_dim));
    std::vector<float> v(k.size());
    row.cache->read(0, keys, k.data(), v.data());
    std::vector<double> weight(static_cast<size_t>(keys));
    std::vector<double> sum(static_cast<size_t>(head_dim));
    for (int64_t t = 0; t < row.tokens; ++t) {
      const int64_t visible = row.position + t + 1;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t offset = h / (heads / kv_heads) * head_dim;
        const float* q = row.q + t * row.q_stride + h * head_dim;
        double maximum = -std::numeric_limits<double>::infinity();
        bool has_nan = false;
        for (int64_t j = 0; j < visible; ++j) {
          double score = 0;
          for (int64_t d = 0; d < head_dim; ++d) {
            score += static_cast<double>(q[d]) *
                     k[static_cast<size_t>(j * kv_heads * head_dim + offset + d)];
          }
          weight[static_cast<size_t>(j)] = score * scale;
          has_nan = has_nan || std::isnan(score);
          maximum = std::max(maximum, score * scale);
        }
        double total = has_nan ? std::numeric_limits<double>::quiet_NaN() : 0;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (int64_t j = 0; j < visible; ++j) {
          const double w = std::exp(weight[static_cast<size_t>(j)] - maximum);
          total += w;
          for (int64_t d = 0; d < head_dim; ++d) {
            sum[static_cast<size_t>(d)] +=
                w * v[static_cast<size_t>(j * kv_heads * head_dim + offset + d)];
          }
        }
        for (int64_t d = 0; d < head_dim; ++d) {
          row.out[t * row.out_stride + h * head_dim + d] =
              static_cast<float>(sum[static_cast<size_t>(d)] / total);
        }
      }
    }
  }
}

}  // namespace replayeval
