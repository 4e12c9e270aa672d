// The one inner loop of dense products and attention: a tile of rows times a panel of 32 columns,
// each output in its own accumulator. How many rows and vectors share registers depends on the
// instruction set; an output's order does not.
#pragma once

#include "kernels/vector16.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE::wide {

constexpr int64_t kPanelColumns = 32;

#if defined(__AVX512F__)
constexpr int kTileRows = 12;
constexpr int kTileVectors = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
constexpr int kTileVectors = 1;
#else
constexpr int kTileRows = 3;
constexpr int kTileVectors = 1;
#endif

/// y[r, c] = start + sum_k a[r, k] panel[k, c] (+ bias[c]), k ascending, one fma a step, for Rows
/// rows and 32 columns. a [Rows, Stride]; panel [depth, 32], aligned; y has y_stride. start: 0 when
/// `first`, else y[r, c] times factor[r] (null: 1). bias [32] or null, added last.
template <int Rows, int Stride>
REPLAYEVAL_INLINE void tile(const float* a, const float* panel, int64_t depth, float* y,
                            int64_t y_stride, bool first, const float* factor, const float* bias,
                            int64_t vectors) {
  for (int64_t half = 0; half < vectors; half += kTileVectors) {
    F16 sums[Rows][kTileVectors];
    if (first) {
      REPLAYEVAL_UNROLL for (int r = 0; r < Rows; ++r) {
        REPLAYEVAL_UNROLL for (int v = 0; v < kTileVectors; ++v) sums[r][v] = splat(0);
      }
    } else {
      REPLAYEVAL_UNROLL for (int r = 0; r < Rows; ++r) {
        REPLAYEVAL_UNROLL for (int v = 0; v < kTileVectors; ++v) {
          sums[r][v] = load(y + r * y_stride + (half + v) * kLanes);
        }
      }
      if (factor != nullptr) {
        REPLAYEVAL_UNROLL for (int r = 0; r < Rows; ++r) {
          const F16 f = splat(factor[r]);
          REPLAYEVAL_UNROLL for (int v = 0; v < kTileVectors; ++v) sums[r][v] = sums[r][v] * f;
        }
      }
    }
    const float* b = panel + half * kLanes;
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; ++k) {
      F16 columns[kTileVectors];
      REPLAYEVAL_UNROLL for (int v = 0; v < kTileVectors; ++v) columns[v] =
          load(b + k * kPanelColumns + v * kLanes);
      REPLAYEVAL_UNROLL for (int r = 0; r < Rows; ++r) {
        const F16 x = splat(a[r * Stride + k]);
        REPLAYEVAL_UNROLL for (int v = 0; v < kTileVectors; ++v) sums[r][v] =
            fma(x, columns[v], sums[r][v]);
      }
    }
    if (bias != nullptr) {
      REPLAYEVAL_UNROLL for (int v = 0; v < kTileVectors; ++v) {
        const F16 added = load(bias + (half + v) * kLanes);
        REPLAYEVAL_UNROLL for (int r = 0; r < Rows; ++r) sums[r][v] = sums[r][v] + added;
      }
    }
    REPLAYEVAL_UNROLL for (int r = 0; r < Rows; ++r) {
      REPLAYEVAL_UNROLL for (int v = 0; v < kTileVectors; ++v)
          store(y + r * y_stride + (half + v) * kLanes, sums[r][v]);
    }
  }
}

/// `tile` for 1 to Rows rows known at run time.
template <int Stride, int Rows = kTileRows>
void tile_rows(int64_t rows, const float* a, const float* panel, int64_t depth, float* y,
               int64_t y_stride, bool first, const float* factor, const float* bias,
               int64_t vectors) {
  if constexpr (Rows > 1) {
    if (rows < Rows) {
      tile_rows<Stride, Rows - 1>(rows, a, panel, depth, y, y_stride, first, factor, bias, vectors);
      return;
    }
  }
  tile<Rows, Stride>(a, panel, depth, y, y_stride, first, factor, bias, vectors);
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE::wide
