// Pages of keys and values for a kernel, and the checks that calls on them share.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/attention_cuda.h"
#include "kernels/paged_attention_cuda.h"

namespace replayeval {

/// Bytes of a position that lie together in a page.
constexpr int kPanel = 128;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// PagedKv for a kernel.
struct PagePool {
  char *k, *v;
  const int32_t* table;
  const int64_t* position;  // [rows]
  int table_stride, page_shift, kv_heads, head_dim, row_bytes;

  __device__ int64_t page_entry(int row, int64_t position) const {
    return int64_t{row} * table_stride + (position >> page_shift);
  }
  __device__ int64_t mask() const { return (int64_t{1} << page_shift) - 1; }
  /// Bytes from the start of k or v to a KV head in page `page` of the pool.
  __device__ int64_t head_offset(int32_t page, int kv_head) const {
    return (int64_t{page} * kv_heads + kv_head) * row_bytes << page_shift;
  }
  __device__ int panel_bytes(int panel) const { return min(kPanel, row_bytes - panel * kPanel); }
  /// Bytes from there to byte `at` of a position.
  __device__ int64_t byte_offset(int64_t position, int at) const {
    const int panel = at / kPanel;
    return (int64_t{panel * kPanel} << page_shift) + (position & mask()) * panel_bytes(panel) +
           at % kPanel;
  }
};

[[noreturn]] inline void refuse_paged(const std::string& message) {
  throw std::invalid_argument("paged attention: " + message);
}

inline int64_t kv_element_bytes(KvType type) { return type == KvType::bf16 ? 2 : 4; }

/// Bytes of a position and KV head.
inline int paged_row_bytes(const PagedKv& kv) {
  return static_cast<int>(ceil_div(kv.head_dim * kv_element_bytes(kv.type), 16) * 16);
}

inline void check_paged_shape(const PagedKv& kv) {
  if (kv.kv_heads < 1 || kv.kv_heads > 8191 || kv.head_dim < 1 || kv.head_dim > kMaxAttentionDim) {
    refuse_paged(std::to_string(kv.kv_heads) + " KV heads of " + std::to_string(kv.head_dim) +
                 ", expected 1 to 8191 of 1 to " + std::to_string(kMaxAttentionDim));
  }
  if (kv.page < kKvPage || (kv.page & (kv.page - 1)) != 0) {
    refuse_paged("a page of " + std::to_string(kv.page) +
                 " positions, expected a power of two of " + std::to_string(kKvPage) + " or more");
  }
}

inline PagePool page_pool(const PagedKv& kv, const int64_t* position, int rows) {
  check_paged_shape(kv);
  if (rows < 0 || rows > 65535) refuse_paged(std::to_string(rows) + " rows, expected 0 to 65535");
  if (kv.k == nullptr || kv.v == nullptr || kv.table == nullptr)
    refuse_paged("k, v or table is null, expected arrays");
  if ((reinterpret_cast<uintptr_t>(kv.k) | reinterpret_cast<uintptr_t>(kv.v)) % 16 != 0)
    refuse_paged("k or v is not on a multiple of 16 bytes");
  if (kv.table_stride < 1)
    refuse_paged("table_stride is " + std::to_string(kv.table_stride) + ", expected at least 1");
  int shift = 0;
  while (1 << shift < kv.page) ++shift;
  return {static_cast<char*>(kv.k),
          static_cast<char*>(kv.v),
          kv.table,
          position,
          kv.table_stride,
          shift,
          kv.kv_heads,
          kv.head_dim,
          paged_row_bytes(kv)};
}

/// Heads and bound of a call.
inline void check_paged_call(const PagedKv& kv, int heads, int64_t most_positions) {
  if (heads < 1 || heads % kv.kv_heads != 0) {
    refuse_paged(std::to_string(heads) + " heads, expected a multiple of " +
                 std::to_string(kv.kv_heads) + " KV heads");
  }
  if (most_positions < 0 || most_positions > int64_t{kv.table_stride} * kv.page ||
      most_positions > INT32_MAX - kKvPage) {
    refuse_paged("most_positions is " + std::to_string(most_positions) + ", expected 0 to the " +
                 std::to_string(int64_t{kv.table_stride} * kv.page) +
                 " of the table, below 2^31 - 64");
  }
}

/// Arrays of a call with at least one row.
inline void check_paged_arrays(const PagedKv& kv, int rows, int heads, const void* q,
                               int64_t q_stride, const void* out, int64_t out_stride,
                               const void* position) {
  if (q == nullptr || out == nullptr || position == nullptr)
    refuse_paged("q, out or positions are null, expected arrays");
  const int64_t width = int64_t{heads} * kv.head_dim;
  if (rows > 1 && std::min(q_stride, out_stride) < width) {
    refuse_paged("strides " + std::to_string(q_stride) + " and " + std::to_string(out_stride) +
                 ", expected at least " + std::to_string(width));
  }
}

}  // namespace replayeval
