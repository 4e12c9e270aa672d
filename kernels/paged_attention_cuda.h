// Attention of single tokens over a pool of pages on the device: lengths and page tables are read
// there and every call takes the same pointers, so that a step can be captured in a graph. The
// order of kernels/attention.h, but for the form on tensor cores: bits depend on a query's absolute
// position alone and are those of attention_cuda (a NaN is a NaN). Pointers are device memory, work
// is queued in `stream`; nothing is allocated, uploaded or waited for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// Keys and values of all rows of one layer: pools `k` and `v` of paged_kv_bytes(kv, pages) bytes
/// each, on multiples of 16 bytes. A page holds, for one KV head after the other, panels of 128
/// bytes of every position (the last panel narrower); head_dim elements of `type` are padded to a
/// multiple of 16 bytes. Position p of row r lies in page table[r * table_stride + p / page] of the
/// pool; entries of positions that a row has not reached are never read. Layers of one shape may
/// share a table, each with its own pools.
struct PagedKv {
  void* k = nullptr;
  void* v = nullptr;
  KvType type = KvType::fp32;
  int kv_heads = 1;
  int head_dim = 1;
  int page = static_cast<int>(kKvPage);  // positions: a power of two, at least 64
  const int32_t* table = nullptr;
  int32_t table_stride = 0;  // pages a row
};

/// Bytes of `k`, and of `v`, for a pool of `pages` pages. Throws std::invalid_argument on a shape
/// that the functions below refuse.
size_t paged_kv_bytes(const PagedKv& kv, int64_t pages);

/// Writes the key and value of one token of every row to its page: row r's at k + r * k_stride, v +
/// r * v_stride, [kv_heads, head_dim] each, at position[r]; rows with position[r] < 0 are left
/// alone. KvType::bf16 rounds to nearest even. Throws std::invalid_argument on a shape mismatch,
/// std::runtime_error for errors of the device.
void append_paged_cuda(const float* k, int64_t k_stride, const float* v, int64_t v_stride, int rows,
                       const PagedKv& kv, const int64_t* position, CudaStream stream = nullptr);

/// Copies the first `positions` keys and values of one row, k, v [positions, kv_heads, head_dim]
/// contiguous with elements of kv.type (as append_kv_cuda writes them), into its pages: the
/// hand-over from a prefill. Throws as append_paged_cuda.
void load_paged_cuda(const void* k, const void* v, int64_t positions, const PagedKv& kv, int row,
                     CudaStream stream = nullptr);

/// Bytes that paged_attention_cuda needs beside its arrays, on a multiple of 16; layers in turn may
/// share them.
size_t paged_attention_workspace(int rows, int heads, int64_t most_positions);

/// The query of row r, [heads, head_dim] at q + r * q_stride, attends to positions 0 ..
/// position[r], which its pages already hold; out likewise and may be q. Rows with position[r] < 0
/// are left alone. `most_positions` bounds position[r] + 1 and fixes the grid: a row beyond it gets
/// NaN. Two launches. Throws std::invalid_argument unless head_dim is 1 to 256, heads a multiple of
/// kv_heads, rows and most_positions at least 0; std::runtime_error for errors of the device.
void paged_attention_cuda(const float* q, int64_t q_stride, float* out, int64_t out_stride,
                          int rows, int heads, const PagedKv& kv, const int64_t* position,
                          int64_t most_positions, float scale, void* workspace,
                          CudaStream stream = nullptr);

/// Whether paged_attention_fast_cuda takes these pages on this device: KvType::bf16 and head_dim a
/// multiple of 16 up to 256 (up to 128 where a block has less than about 100 KiB of shared memory).
bool paged_attention_fast_fits(const PagedKv& kv);

/// Bytes that paged_attention_fast_cuda needs beside its arrays, on a multiple of 16 (0: none);
/// `kv` gives sizes. Throws std::invalid_argument as it does.
size_t paged_attention_fast_workspace(int rows, int heads, const PagedKv& kv,
                                      int64_t most_positions);

/// paged_attention_cuda on tensor cores, not in the order of kernels/attention.h: queries rounded
/// to BF16, products with keys and values summed in FP32, weights FP32 in their sum and split in
/// two BF16 parts before the values. NaN likewise. Positions are cut at multiples of a chunk that
/// rows, KV heads and head_dim decide, and sums are merged in order: bits depend on those and the
/// row's own length, keys and values alone. One launch, two where most_positions is more than a
/// chunk. Throws as paged_attention_cuda, and std::invalid_argument unless
/// paged_attention_fast_fits.
void paged_attention_fast_cuda(const float* q, int64_t q_stride, float* out, int64_t out_stride,
                               int rows, int heads, const PagedKv& kv, const int64_t* position,
                               int64_t most_positions, float scale, void* workspace,
                               CudaStream stream = nullptr);

}  // namespace replayeval
