// A strided copy of FP32 values, one of many that are done together.
#pragma once

#include <cstdint>

namespace replayeval {

/// rows x cols values from `from` to `to`; a null `from` writes zeros.
struct CopyJob {
  float* to = nullptr;
  int64_t to_stride = 0;
  const float* from = nullptr;
  int64_t from_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};

}  // namespace replayeval
