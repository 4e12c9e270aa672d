// Inner loops of kernels/elementwise.h on a range of rows, called through base/simd_dispatch.h.
#pragma once

#include "base/simd_dispatch.h"
#include "kernels/elementwise.h"

namespace replayeval {

/// Rows of FP32 values with a stride; `data` null: absent.
struct RowsIn {
  const float* data = nullptr;
  int64_t stride = 0;
};
struct RowsOut {
  float* data = nullptr;
  int64_t stride = 0;
};

// Each works on rows [first, last) of `cols` columns; arguments as the public function of the same
// name.
REPLAYEVAL_SIMD_DECLARE(
    void rms_norm_rows(const RmsNorm& norm, RowsIn x, RowsIn gate, RowsOut y, int64_t first,
                       int64_t last, int64_t cols);
    void activate_rows(Activation f, RowsIn x, const float* bias, RowsOut y, int64_t first,
                       int64_t last, int64_t cols, WeightType activation);
    void activate_multiply_rows(Activation f, RowsIn gate, float gate_scale, RowsIn up, RowsOut y,
                                int64_t first, int64_t last, int64_t cols, WeightType activation);
    void add_scaled_rows(RowsOut y, RowsIn x, float multiplier, const float* row_scale,
                         int64_t first, int64_t last, int64_t cols, WeightType activation);
    void scale_rows(RowsOut x, float factor, const float* column, int64_t first, int64_t last,
                    int64_t cols, WeightType activation);
    void rotary_rows(RowsOut x, int heads, int head_dim, int dims, const float* cos,
                     const float* sin, int64_t first, int64_t last, WeightType activation);
    void softmax_rows(RowsIn x, RowsOut y, int64_t first, int64_t last, int64_t cols);
    void combine_rows(const int32_t* slots, const float* weights, const float* slot_output,
                      int64_t cols, int64_t choices, RowsOut y, int64_t first, int64_t last,
                      WeightType activation, bool add);
    void round_values(float* x, int64_t n, WeightType type);
    void exp_values(const float* x, float* y, int64_t n))

}  // namespace replayeval
