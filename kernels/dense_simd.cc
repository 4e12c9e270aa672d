// Packing and the row-by-panel loop of `linear` (kernels/dense.h), and conversions of whole rows.
#include "kernels/dense_simd.h"

#include "kernels/tile16.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {
namespace {

using namespace wide;

constexpr int64_t kDepthStride =
    kDepth + 16;  // not a multiple of 1024 floats: rows spread over the sets of the cache

REPLAYEVAL_INLINE F16 widen_bf16(const void* x) { return as_float(shift_left(load_short(x), 16)); }

REPLAYEVAL_INLINE F16 widen_fp16(const void* x) { return widen_fp16_code(load_short(x)); }

template <WeightType Type>
REPLAYEVAL_INLINE F16 widen16(const void* x) {
  if constexpr (Type == WeightType::bf16) return widen_bf16(x);
  if constexpr (Type == WeightType::fp16) return widen_fp16(x);
  return load(static_cast<const float*>(x));
}

/// Lane r of out[k] = lane k of in[r].
REPLAYEVAL_INLINE void transpose(const F16* in, F16* out) {
#if defined(__AVX512F__)
  // After two rounds quad[4 g + j], 128-bit part p, holds column 4 p + j of rows 4 g .. 4 g + 3;
  // two more rounds move the parts.
  NativeFloat pair[16], quad[16];
  REPLAYEVAL_UNROLL for (int i = 0; i < 16; i += 2) {
    pair[i] =
        __builtin_shuffle(in[i].v[0], in[i + 1].v[0],
                          NativeInt{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29});
    pair[i + 1] =
        __builtin_shuffle(in[i].v[0], in[i + 1].v[0],
                          NativeInt{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
  }
  constexpr NativeInt kLow = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  constexpr NativeInt kHigh = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  REPLAYEVAL_UNROLL for (int g = 0; g < 16; g += 4) {
    quad[g] = __builtin_shuffle(pair[g], pair[g + 2], kLow);
    quad[g + 1] = __builtin_shuffle(pair[g], pair[g + 2], kHigh);
    quad[g + 2] = __builtin_shuffle(pair[g + 1], pair[g + 3], kLow);
    quad[g + 3] = __builtin_shuffle(pair[g + 1], pair[g + 3], kHigh);
  }
  constexpr NativeInt kEven = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  constexpr NativeInt kOdd = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
  REPLAYEVAL_UNROLL for (int j = 0; j < 4; ++j) {
    const NativeFloat even01 = __builtin_shuffle(quad[j], quad[4 + j], kEven);
    const NativeFloat even23 = __builtin_shuffle(quad[8 + j], quad[12 + j], kEven);
    const NativeFloat odd01 = __builtin_shuffle(quad[j], quad[4 + j], kOdd);
    const NativeFloat odd23 = __builtin_shuffle(quad[8 + j], quad[12 + j], kOdd);
    out[j].v[0] = __builtin_shuffle(even01, even23, kEven);
    out[4 + j].v[0] = __builtin_shuffle(odd01, odd23, kEven);
    out[8 + j].v[0] = __builtin_shuffle(even01, even23, kOdd);
    out[12 + j].v[0] = __builtin_shuffle(odd01, odd23, kOdd);
  }
#else
  typedef float Four __attribute__((vector_size(16)));
  typedef int32_t FourInt __attribute__((vector_size(16)));
  REPLAYEVAL_UNROLL for (int r = 0; r < 16; r += 4) {
    REPLAYEVAL_UNROLL for (int k = 0; k < 16; k += 4) {
      Four rows[4];
      REPLAYEVAL_UNROLL for (int j = 0; j < 4; ++j) {
        memcpy(&rows[j], reinterpret_cast<const float*>(in + r + j) + k, sizeof(Four));
      }
      const Four low01 = __builtin_shuffle(rows[0], rows[1], FourInt{0, 4, 1, 5});
      const Four high01 = __builtin_shuffle(rows[0], rows[1], FourInt{2, 6, 3, 7});
      const Four low23 = __builtin_shuffle(rows[2], rows[3], FourInt{0, 4, 1, 5});
      const Four high23 = __builtin_shuffle(rows[2], rows[3], FourInt{2, 6, 3, 7});
      const Four columns[4] = {__builtin_shuffle(low01, low23, FourInt{0, 1, 4, 5}),
                               __builtin_shuffle(low01, low23, FourInt{2, 3, 6, 7}),
                               __builtin_shuffle(high01, high23, FourInt{0, 1, 4, 5}),
                               __builtin_shuffle(high01, high23, FourInt{2, 3, 6, 7})};
      REPLAYEVAL_UNROLL for (int j = 0; j < 4; ++j) {
        memcpy(reinterpret_cast<float*>(out + k + j) + r, &columns[j], sizeof(Four));
      }
    }
  }
#endif
}

/// Columns of w that one block of a panel takes: 64 bytes of FP32 or BF16, 32 of FP16.
template <WeightType Type>
constexpr int64_t kBlockDepth = Type == WeightType::bf16 ? 32 : 16;

/// Sixteen rows of w, `row_bytes` apart, to panel[k, 0 .. 15], k < kBlockDepth. A pair of BF16
/// columns travels as one 32-bit lane: low half first (column 2 j), high half (column 2 j + 1)
/// after.
template <WeightType Type>
REPLAYEVAL_INLINE void pack_block(const char* w, int64_t row_bytes, float* panel) {
  F16 rows[16], columns[16];
  REPLAYEVAL_UNROLL for (int r = 0; r < 16; ++r) {
    if constexpr (Type == WeightType::fp16) {
      rows[r] = widen16<Type>(w + r * row_bytes);
    } else {
      memcpy(&rows[r], w + r * row_bytes, sizeof(F16));
    }
  }
  transpose(rows, columns);
  REPLAYEVAL_UNROLL for (int k = 0; k < 16; ++k) {
    if constexpr (Type == WeightType::bf16) {
      store(panel + 2 * k * kPanel, as_float(shift_left(as_int(columns[k]), 16)));
      store(panel + (2 * k + 1) * kPanel, as_float(as_int(columns[k]) & splat_int(-65536)));
    } else {
      store(panel + k * kPanel, columns[k]);
    }
  }
}

/// panel[k, c] = w[col + c, depth_begin + k] for k < depth, c < 32; zeros where c >= count. Writes
/// whole blocks of k.
template <WeightType Type>
void pack_panel(const WeightView& w, int64_t col, int64_t count, int64_t depth_begin, int64_t depth,
                float* panel) {
  constexpr int64_t kBytes = weight_bytes(Type);
  constexpr int64_t kBlock = kBlockDepth<Type>;
  const int64_t row_bytes = w.stride * kBytes;
  const char* data = static_cast<const char*>(w.data);
  for (int64_t group = 0; group < kPanel; group += kLanes) {
    const int64_t valid = count - group;
    if (valid <= 0) {
      for (int64_t k = 0; k < depth; ++k) store(panel + k * kPanel + group, splat(0));
      continue;
    }
    const char* start = data + (col + group) * row_bytes + depth_begin * kBytes;
    for (int64_t k = 0; k < depth; k += kBlock) {
      if (valid >= kLanes && depth - k >= kBlock) {
        pack_block<Type>(start + k * kBytes, row_bytes, panel + k * kPanel + group);
        continue;
      }
      char buffer[kLanes * kBlock * kBytes] = {};
      const int64_t left = depth - k < kBlock ? depth - k : kBlock;
      for (int64_t r = 0; r < kLanes && r < valid; ++r) {
        memcpy(buffer + r * kBlock * kBytes, start + r * row_bytes + k * kBytes,
               static_cast<size_t>(left * kBytes));
      }
      pack_block<Type>(buffer, kBlock * kBytes, panel + k * kPanel + group);
    }
  }
}

void pack_rows(const LinearJob& job, int64_t row, int64_t rows, int64_t depth_begin, int64_t depth,
               float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = job.x_rows != nullptr ? job.x_rows[row + r] : row + r;
    const float* x = job.x + source * job.x_stride + depth_begin;
    float* to = out + r * kDepthStride;
    for (int64_t k = 0; k < depth; k += kLanes)
      store_partial(to + k, load_partial(x + k, depth - k), depth - k);
  }
}

/// Asks for the part `part` of `parts` of what pack_panel reads, into the second-level cache.
void prefetch_panel(const WeightView& w, int64_t col, int64_t count, int64_t depth_begin,
                    int64_t depth, int64_t part, int64_t parts) {
  const int64_t bytes = weight_bytes(w.type);
  const int64_t last = count * (part + 1) / parts;
  for (int64_t r = count * part / parts; r < last; ++r) {
    const char* row =
        static_cast<const char*>(w.data) + ((col + r) * w.stride + depth_begin) * bytes;
    for (int64_t i = 0; i < depth * bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
}

}  // namespace

void dense_unit(const LinearJob& job, int64_t row, int64_t rows, int64_t col, int64_t cols,
                float* scratch) {
  float* packed_x = scratch;
  float* panel = packed_x + rows * kDepthStride;
  float* bias = panel + kDepth * kPanel;
  float* edge = bias + kPanel;
  const int64_t inner = job.w.cols;
  // Weights come from far away when many rows of state have passed since. While a panel is
  // multiplied by many rows, the next one is asked for.
  const bool many = rows >= kTileRows;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const auto depth_at = [inner](int64_t begin) {
    return inner - begin < kDepth ? inner - begin : kDepth;
  };
  for (int64_t begin = 0; begin < inner || begin == 0; begin += kDepth) {
    const int64_t depth = depth_at(begin);
    const bool first = begin == 0;
    const bool last = begin + depth >= inner;
    pack_rows(job, row, rows, begin, depth, packed_x);
    for (int64_t c = col; c < col + cols; c += kPanel) {
      const int64_t count = col + cols - c < kPanel ? col + cols - c : kPanel;
      if (job.w.type == WeightType::fp32)
        pack_panel<WeightType::fp32>(job.w, c, count, begin, depth, panel);
      if (job.w.type == WeightType::bf16)
        pack_panel<WeightType::bf16>(job.w, c, count, begin, depth, panel);
      if (job.w.type == WeightType::fp16)
        pack_panel<WeightType::fp16>(job.w, c, count, begin, depth, panel);
      const float* added = nullptr;
      if (last && job.bias != nullptr) {
        for (int64_t i = 0; i < kPanel; i += kLanes)
          store(bias + i, load_partial(job.bias + c + i, count - i));
        added = bias;
      }
      int64_t next_col = c + kPanel, next_begin = begin;
      if (next_col >= col + cols && !last) {
        next_col = col;
        next_begin = begin + kDepth;
      } else if (next_col >= col + cols) {
        next_begin = 0;  // of the next columns, which are likely to be this thread's too
      }
      const int64_t next_count = job.w.rows - next_col < kPanel ? job.w.rows - next_col : kPanel;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        if (many && next_count > 0) {
          prefetch_panel(job.w, next_col, next_count, next_begin, depth_at(next_begin),
                         r / kTileRows, tiles);
        }
        const int64_t tile_count = rows - r < kTileRows ? rows - r : kTileRows;
        float* y = job.y + (row + r) * job.y_stride + c;
        const float* a = packed_x + r * kDepthStride;
        if (count == kPanel) {
          tile_rows<kDepthStride>(tile_count, a, panel, depth, y, job.y_stride, first, nullptr,
                                  added, kPanel / kLanes);
          continue;
        }
        // The last panel is narrower: the tile works in a buffer.
        if (!first) {
          for (int64_t i = 0; i < tile_count; ++i)
            memcpy(edge + i * kPanel, y + i * job.y_stride, static_cast<size_t>(count) * 4);
        }
        tile_rows<kDepthStride>(tile_count, a, panel, depth, edge, kPanel, first, nullptr, added,
                                kPanel / kLanes);
        for (int64_t i = 0; i < tile_count; ++i)
          memcpy(y + i * job.y_stride, edge + i * kPanel, static_cast<size_t>(count) * 4);
      }
    }
  }
}

void widen_block(const void* data, WeightType type, int64_t n, float* out) {
  const char* x = static_cast<const char*>(data);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i < kLanes ? n - i : kLanes;
    char buffer[kLanes * 4] = {};
    const char* from = x + i * weight_bytes(type);
    if (left < kLanes) {
      memcpy(buffer, from, static_cast<size_t>(left * weight_bytes(type)));
      from = buffer;
    }
    F16 value;
    if (type == WeightType::fp32) value = widen16<WeightType::fp32>(from);
    if (type == WeightType::bf16) value = widen16<WeightType::bf16>(from);
    if (type == WeightType::fp16) value = widen16<WeightType::fp16>(from);
    store_partial(out + i, value, left);
  }
}

void narrow_block(const float* x, int64_t n, WeightType type, void* out) {
  char* to = static_cast<char*>(out);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i < kLanes ? n - i : kLanes;
    const F16 value = load_partial(x + i, left);
    uint16_t codes[kLanes];
    if (type == WeightType::bf16) store_short(codes, bf16_code(value));
    if (type == WeightType::fp16) store_short(codes, fp16_code(value));
    memcpy(to + i * 2, codes, static_cast<size_t>(left * 2));
  }
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
