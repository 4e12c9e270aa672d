#include "models/torch_dense.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <torch/headeronly/version.h>

#include <algorithm>

namespace replayeval {
namespace {

at::ScalarType scalar_type(WeightType type) {
  switch (type) {
    case WeightType::fp32:
      return at::kFloat;
    case WeightType::bf16:
      return at::kBFloat16;
    case WeightType::fp16:
      return at::kHalf;
  }
  return at::kFloat;
}

at::Tensor view(const void* data, int64_t rows, int64_t cols, int64_t stride, at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), {rows, cols}, {stride, 1},
                       at::TensorOptions().dtype(type));
}

}  // namespace

void torch_linear(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                  const float* bias, float* y, int64_t y_stride, bool bf16) {
  c10::InferenceMode guard;
  constexpr int64_t kSlice = 1024;
  at::Tensor input = view(x, m, w.cols, x_stride, at::kFloat);
  if (bf16) input = input.to(at::kBFloat16);
  at::Tensor output = view(y, m, w.rows, y_stride, at::kFloat);
  for (int64_t first = 0; first < w.rows; first += kSlice) {
    const int64_t count = std::min(kSlice, w.rows - first);
    const char* data = static_cast<const char*>(w.data) + first * w.stride * weight_bytes(w.type);
    at::Tensor weight =
        view(data, count, w.cols, w.stride, scalar_type(w.type)).to(input.scalar_type());
    at::Tensor slice = output.slice(1, first, first + count);
    slice.copy_(at::mm(input, weight.t()));
    if (bias != nullptr)
      slice.add_(at::from_blob(const_cast<float*>(bias) + first, {count}, at::kFloat));
  }
}

void set_torch_threads(int threads) { at::set_num_threads(threads); }

std::string torch_version() { return TORCH_VERSION; }

}  // namespace replayeval
