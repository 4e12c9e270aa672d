// Products as tiles of outputs, each output in one thread's register: no order of additions is ever
// changed. Rows of x and of w lie in shared memory as they lie in global memory, four columns an
// access, and the next ones are under way meanwhile.
#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/dense_cuda.h"
#include "kernels/math_cuda.cuh"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// One product; `vector`: rows start on multiples of 16 bytes.
struct Product {
  const float* x;
  const int32_t* x_rows;
  const void* w;
  const float* bias;
  float* y;
  int64_t x_stride, w_stride, y_stride;
  int32_t m, rows, cols;
  uint32_t first_tile;
  bool vector_x, vector_w;
};

/// The products of a launch: in the parameters of the kernel, or a table on the device.
constexpr int kInline = 16;
struct Products {
  Product list[kInline];
  const Product* table;  // null: `list`
  int count;
};

__device__ __forceinline__ const Product& find_product(const Products& products, uint32_t tile) {
  const Product* list = products.table != nullptr ? products.table : products.list;
  int low = 0, high = products.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (list[middle].first_tile <= tile ? low : high) = middle;
  }
  return list[low];
}

/// The first n (any number) elements of 16 bytes to shared memory. `vector`: behind the thread's
/// back, with zeros after them; `row` is any place that exists.
template <int kElement>
__device__ __forceinline__ void stage_unit(char* to, const char* from, const char* row, int n,
                                           bool vector) {
  constexpr int kUnit = 16 / kElement;
  if (vector) {
    copy_behind(to, n > 0 ? from : row, n <= 0 ? 0 : min(n, kUnit) * kElement);
    return;
  }
  using Element = std::conditional_t<kElement == 4, uint32_t, uint16_t>;
#pragma unroll
  for (int k = 0; k < kUnit; ++k) {
    if (k < n) reinterpret_cast<Element*>(to)[k] = reinterpret_cast<const Element*>(from)[k];
  }
}

/// Values k .. k + 3, and value k, of a row in shared memory.
template <WeightType Type>
__device__ __forceinline__ Quad four_at(const char* row, int k) {
  if constexpr (Type == WeightType::fp32) {
    return load_quad(reinterpret_cast<const float*>(row) + k, 4, true);
  } else {
    return load_quad<Type>(reinterpret_cast<const uint16_t*>(row) + k, 4, true);
  }
}
template <WeightType Type>
__device__ __forceinline__ float value_at(const char* row, int k) {
  if constexpr (Type == WeightType::fp32) {
    return reinterpret_cast<const float*>(row)[k];
  } else {
    return widen_code<Type>(reinterpret_cast<const uint16_t*>(row)[k]);
  }
}

/// How a launch cuts its products: outputs and columns of x and w of a stage, stages, and blocks of
/// a multiprocessor.
template <WeightType kWeights, int kM, int kN, int kColumns, int kStageCount, int kBlockCount>
struct Cut {
  static constexpr WeightType kType = kWeights;
  static constexpr int kBlockM = kM, kBlockN = kN;
  static constexpr int kDepthTile = kColumns, kStages = kStageCount, kBlocks = kBlockCount;
  static constexpr int kThreads = kBlockM * kBlockN / 64;
  static constexpr int kElement = static_cast<int>(weight_bytes(kType));
  // Rows in shared memory, 16-bit weights as they are: eight neighbours touch every bank once.
  static constexpr int kRowX = kDepthTile * 4 + 16, kRowW = kDepthTile * kElement + 16;
  static constexpr int kStageBytes = kBlockM * kRowX + kBlockN * kRowW;
};

/// 8 x 8 outputs a thread: rows ty + 4 i, columns tx + 8 j of a warp's 32 x 64.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    multiply(const __grid_constant__ Products products) {
  constexpr WeightType kType = C::kType;
  constexpr int kBlockM = C::kBlockM, kBlockN = C::kBlockN, kThreads = C::kThreads;
  constexpr int kDepthTile = C::kDepthTile, kStages = C::kStages, kElement = C::kElement;
  constexpr int kRowX = C::kRowX, kRowW = C::kRowW;
  constexpr int kWarpsN = kBlockN / 64;
  constexpr int kUnit = 16 / kElement;  // weights of 16 bytes
  constexpr int kUnitsX = kDepthTile / 4, kUnitsW = kDepthTile / kUnit;
  constexpr int kLoadsX = kBlockM * kUnitsX / kThreads, kLoadsW = kBlockN * kUnitsW / kThreads;
  extern __shared__ float4 memory[];
  char* stages = reinterpret_cast<char*>(memory);

  const Product& product = find_product(products, blockIdx.x);
  const uint32_t tile = blockIdx.x - product.first_tile;
  const int cols = product.cols;
  const uint32_t row_tiles = static_cast<uint32_t>((product.m + kBlockM - 1) / kBlockM);
  // Tiles of the same weights follow each other.
  const int first_m = static_cast<int>(tile % row_tiles) * kBlockM;
  const int first_n = static_cast<int>(tile / row_tiles) * kBlockN;

  const int thread = static_cast<int>(threadIdx.x);
  // Rows past the end repeat the last one; their outputs are not stored.
  const char *x_rows[kLoadsX], *w_rows[kLoadsW];
#pragma unroll
  for (int i = 0; i < kLoadsX; ++i) {
    const int row = min(first_m + thread / kUnitsX + i * (kThreads / kUnitsX), product.m - 1);
    x_rows[i] = reinterpret_cast<const char*>(
        product.x + (product.x_rows != nullptr ? product.x_rows[row] : row) * product.x_stride +
        thread % kUnitsX * 4);
  }
#pragma unroll
  for (int i = 0; i < kLoadsW; ++i) {
    const int row = min(first_n + thread / kUnitsW + i * (kThreads / kUnitsW), product.rows - 1);
    w_rows[i] = static_cast<const char*>(product.w) +
                (row * product.w_stride + thread % kUnitsW * kUnit) * kElement;
  }
  const bool vector_x = product.vector_x, vector_w = product.vector_w;
  char* const to_x = stages + thread / kUnitsX * kRowX + thread % kUnitsX * 16;
  char* const to_w = stages + kBlockM * kRowX + thread / kUnitsW * kRowW + thread % kUnitsW * 16;

  const auto fetch = [&](int step) {
    const int at = step % kStages * C::kStageBytes;
    const int left_x = cols - step * kDepthTile - thread % kUnitsX * 4;
    const int left_w = cols - step * kDepthTile - thread % kUnitsW * kUnit;
#pragma unroll
    for (int i = 0; i < kLoadsX; ++i) {
      const char* from = x_rows[i] + int64_t{step} * (kDepthTile * 4);
      char* to = to_x + at + i * (kThreads / kUnitsX) * kRowX;
      stage_unit<4>(to, from, x_rows[i], left_x, vector_x);
    }
#pragma unroll
    for (int i = 0; i < kLoadsW; ++i) {
      const char* from = w_rows[i] + int64_t{step} * (kDepthTile * kElement);
      char* to = to_w + at + i * (kThreads / kUnitsW) * kRowW;
      stage_unit<kElement>(to, from, w_rows[i], left_w, vector_w);
    }
    close_copies();
  };

  const int warp = thread / 32;
  const int tx = lane_column(thread), ty = lane_row(thread);
  const int own_m = warp / kWarpsN * 32 + ty, own_n = warp % kWarpsN * 64 + tx;
  float sums[8][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[i][j] = 0;
  }

  const int steps = (cols + kDepthTile - 1) / kDepthTile;
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) {
      fetch(step);
    } else {
      close_copies();
    }
  }
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < steps) {
      fetch(step + kStages - 1);
    } else {
      close_copies();
    }
    const char* stage = stages + step % kStages * C::kStageBytes;
    const char* x = stage + own_m * kRowX;
    const char* w = stage + kBlockM * kRowX + own_n * kRowW;
    const int depth = min(kDepthTile, cols - step * kDepthTile);
    if (depth == kDepthTile) {
#pragma unroll 4
      for (int k = 0; k < kDepthTile; k += 4) {
        Quad b[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) b[j] = four_at<kType>(w + j * 8 * kRowW, k);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const Quad a = four_at<WeightType::fp32>(x + i * 4 * kRowX, k);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[i][j] = __fmaf_rn(a.v[e], b[j].v[e], sums[i][j]);
          }
        }
      }
    } else {
      // Adding 0 * 0 would turn a sum of -0 into +0: the last stage ends where the columns end.
#pragma unroll 1
      for (int k = 0; k < depth; ++k) {
        float b[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) b[j] = value_at<kType>(w + j * 8 * kRowW, k);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float a = value_at<WeightType::fp32>(x + i * 4 * kRowX, k);
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[i][j] = __fmaf_rn(a, b[j], sums[i][j]);
        }
      }
    }
  }
  wait_copies<0>();

#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int n = first_n + own_n + j * 8;
    if (n >= product.rows) continue;
    const float bias = product.bias != nullptr ? product.bias[n] : 0.0F;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = first_m + own_m + i * 4;
      if (row >= product.m) continue;
      product.y[row * product.y_stride + n] =
          product.bias != nullptr ? sums[i][j] + bias : sums[i][j];
    }
  }
}

// ---------------------------------------------------------------- few rows

constexpr int kFewRows = 16;
constexpr int kFewThreads = 128;
constexpr int kFewOutputs = 32;
constexpr int kFewDepth = 128;
constexpr int kFewStages = 4;

template <WeightType Type>
constexpr int kFewRowBytes = kFewDepth* static_cast<int>(weight_bytes(Type)) + 16;
template <WeightType Type>
constexpr int kFewStageBytes = kFewOutputs* kFewRowBytes<Type> +
                               kFewRows* kFewDepth* static_cast<int>(sizeof(float));

/// At most 16 rows times 32 rows of w a block: thread (warp g, lane r) has row r of w, rows g, g +
/// 4, ... of x. A stage holds w as it is and x.
template <WeightType Type>
__global__ void __launch_bounds__(kFewThreads)
    multiply_few(const __grid_constant__ Products products) {
  constexpr int kElement = static_cast<int>(weight_bytes(Type));
  constexpr int kChunk = 16 / kElement;  // elements of 16 bytes
  constexpr int kRowChunks = kFewDepth / kChunk;
  extern __shared__ float4 memory[];
  char* stages = reinterpret_cast<char*>(memory);

  const Product& product = find_product(products, blockIdx.x);
  const int first_n = static_cast<int>(blockIdx.x - product.first_tile) * kFewOutputs;
  const int cols = product.cols, m = product.m;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32;

  const auto fetch = [&](int step) {
    char* stage = stages + step % kFewStages * kFewStageBytes<Type>;
    const int begin = step * kFewDepth;
    for (int i = thread; i < kFewOutputs * kRowChunks; i += kFewThreads) {
      const int r = i / kRowChunks, c = begin + i % kRowChunks * kChunk;
      const char* row = static_cast<const char*>(product.w) +
                        min(first_n + r, product.rows - 1) * product.w_stride * kElement;
      stage_unit<kElement>(stage + r * kFewRowBytes<Type> + i % kRowChunks * 16,
                           row + int64_t{c} * kElement, row, cols - c, product.vector_w);
    }
    char* x_stage = stage + kFewOutputs * kFewRowBytes<Type>;
    for (int i = thread; i < m * (kFewDepth / 4); i += kFewThreads) {
      const int r = i / (kFewDepth / 4), c = i % (kFewDepth / 4) * 4;
      const char* row = reinterpret_cast<const char*>(
          product.x + (product.x_rows != nullptr ? product.x_rows[r] : r) * product.x_stride);
      stage_unit<4>(x_stage + (r * kFewDepth + c) * 4, row + int64_t{begin + c} * 4, row,
                    cols - begin - c, product.vector_x);
    }
    close_copies();
  };

  constexpr int kOwn = kFewRows / 4;
  float sums[kOwn] = {};
  const int own = warp < m ? (m - warp + 3) / 4 : 0;
  const int steps = (cols + kFewDepth - 1) / kFewDepth;
  for (int step = 0; step < kFewStages - 1; ++step) {
    if (step < steps) {
      fetch(step);
    } else {
      close_copies();
    }
  }
  for (int step = 0; step < steps; ++step) {
    wait_copies<kFewStages - 2>();
    __syncthreads();
    if (step + kFewStages - 1 < steps) {
      fetch(step + kFewStages - 1);
    } else {
      close_copies();
    }
    const char* stage = stages + step % kFewStages * kFewStageBytes<Type>;
    const char* w = stage + lane * kFewRowBytes<Type>;
    const float* x =
        reinterpret_cast<const float*>(stage + kFewOutputs * kFewRowBytes<Type>) + warp * kFewDepth;
    const int depth = min(kFewDepth, cols - step * kFewDepth);
    const auto walk = [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      const auto step_of_four = [&](int k) {
        const Quad b = four_at<Type>(w, k);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const Quad a = load_quad(x + i * 4 * kFewDepth + k, 4, true);
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[i] = __fmaf_rn(a.v[e], b.v[e], sums[i]);
        }
      };
      if (depth == kFewDepth) {
#pragma unroll 8
        for (int k = 0; k < kFewDepth; k += 4) step_of_four(k);
        return;
      }
      for (int k = 0; k + 4 <= depth; k += 4) step_of_four(k);
      for (int k = depth / 4 * 4; k < depth; ++k) {
        const float b = value_at<Type>(w, k);
#pragma unroll
        for (int i = 0; i < kRows; ++i) sums[i] = __fmaf_rn(x[i * 4 * kFewDepth + k], b, sums[i]);
      }
    };
    if (own == 1) walk(std::integral_constant<int, 1>());
    if (own == 2) walk(std::integral_constant<int, 2>());
    if (own == 3) walk(std::integral_constant<int, 3>());
    if (own == 4) walk(std::integral_constant<int, 4>());
  }
  wait_copies<0>();
  const int n = first_n + lane;
  if (n >= product.rows) return;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int row = warp + 4 * i;
    if (row >= m) continue;
    product.y[row * product.y_stride + n] =
        product.bias != nullptr ? sums[i] + product.bias[n] : sums[i];
  }
}

// ---------------------------------------------------------------- launches

Product product_of(const LinearJob& job) {
  Product product;
  product.x = job.x;
  product.x_rows = job.x_rows;
  product.w = job.w.data;
  product.bias = job.bias;
  product.y = job.y;
  product.x_stride = job.x_stride;
  product.w_stride = job.w.stride;
  product.y_stride = job.y_stride;
  product.m = static_cast<int32_t>(job.m);
  product.rows = static_cast<int32_t>(job.w.rows);
  product.cols = static_cast<int32_t>(job.w.cols);
  product.first_tile = 0;
  product.vector_x = reinterpret_cast<uintptr_t>(job.x) % 16 == 0 &&
                     (job.x_stride % 4 == 0 || (job.m == 1 && job.x_rows == nullptr));
  product.vector_w = reinterpret_cast<uintptr_t>(job.w.data) % 16 == 0 &&
                     (job.w.stride * weight_bytes(job.w.type) % 16 == 0 || job.w.rows == 1);
  return product;
}

/// kernel over all products; `list` has their first tiles.
template <class Kernel>
void launch(Kernel kernel, unsigned tiles, int threads, size_t shared,
            const std::vector<Product>& list, cudaStream_t stream) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared)));
  Products products;
  products.table = nullptr;
  products.count = static_cast<int>(list.size());
  if (list.size() <= kInline) {
    std::copy(list.begin(), list.end(), products.list);
    kernel<<<tiles, threads, shared, stream>>>(products);
    CUDA_CHECK(cudaGetLastError());
    return;
  }
  CallTables tables(stream);
  const size_t at = tables.add(std::span<const Product>(list));
  tables.upload();
  products.table = tables.table<const Product>(at);
  kernel<<<tiles, threads, shared, stream>>>(products);
  CUDA_CHECK(cudaGetLastError());
}

template <class C>
void launch_tiles(std::vector<Product>& list, cudaStream_t stream) {
  uint32_t tiles = 0;
  for (Product& product : list) {
    product.first_tile = tiles;
    tiles +=
        static_cast<uint32_t>(ceil_div(product.m, C::kBlockM) * ceil_div(product.rows, C::kBlockN));
  }
  launch(multiply<C>, tiles, C::kThreads, C::kStages * C::kStageBytes, list, stream);
}

template <WeightType Type>
void launch_type(std::span<const LinearJob> jobs, cudaStream_t stream) {
  std::vector<Product> few, many;
  int64_t large = 0, small = 0;  // tiles
  uint32_t few_tiles = 0;
  for (const LinearJob& job : jobs) {
    if (job.w.type != Type || job.m == 0 || job.w.rows == 0) continue;
    Product product = product_of(job);
    if (job.m <= kFewRows) {
      product.first_tile = few_tiles;
      few_tiles += static_cast<uint32_t>(ceil_div(job.w.rows, kFewOutputs));
      few.push_back(product);
      continue;
    }
    large += ceil_div(job.m, 128) * ceil_div(job.w.rows, 128);
    small += ceil_div(job.m, 64) * ceil_div(job.w.rows, 128);
    many.push_back(product);
  }
  if (!few.empty()) {
    launch(multiply_few<Type>, few_tiles, kFewThreads, kFewStages * kFewStageBytes<Type>, few,
           stream);
  }
  if (many.empty()) return;
  int device = 0, multiprocessors = 1;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  // The multiprocessor with the most tiles ends last; a small tile is half a large one, and a
  // little slower. One tile alone must fetch further ahead.
  if (small <= multiprocessors) {
    launch_tiles<Cut<Type, 64, 128, 16, 3, 3>>(many, stream);
  } else if (1.06 * static_cast<double>(ceil_div(small, multiprocessors)) <
             2.0 * static_cast<double>(ceil_div(large, multiprocessors))) {
    launch_tiles<Cut<Type, 64, 128, 32, 2, 3>>(many, stream);
  } else {
    launch_tiles<Cut<Type, 128, 128, 32, 2, 1>>(many, stream);
  }
}

void check_job(const LinearJob& job) {
  const WeightView& w = job.w;
  if (w.rows < 0 || w.cols < 0 || (w.rows > 1 && w.stride < w.cols)) {
    throw std::invalid_argument(
        "linear: weight has shape [" + std::to_string(w.rows) + ", " + std::to_string(w.cols) +
        "] and stride " + std::to_string(w.stride) + ", expected sizes >= 0 and stride >= columns");
  }
  if (job.m < 0)
    throw std::invalid_argument("linear: m is " + std::to_string(job.m) + ", expected >= 0");
  if (std::max({job.m, w.rows, w.cols}) > INT32_MAX - 256) {
    throw std::invalid_argument("linear: a size of " +
                                std::to_string(std::max({job.m, w.rows, w.cols})) +
                                ", expected below 2^31 - 256 on the device");
  }
  if (job.m > 1 && job.y_stride < w.rows) {
    throw std::invalid_argument("linear: y has stride " + std::to_string(job.y_stride) +
                                ", expected at least " + std::to_string(w.rows) +
                                " (rows of the weight)");
  }
  if (job.x_rows == nullptr && job.m > 1 && job.x_stride < w.cols) {
    throw std::invalid_argument("linear: x has stride " + std::to_string(job.x_stride) +
                                ", expected at least " + std::to_string(w.cols) +
                                " (columns of the weight)");
  }
}

}  // namespace

void linear_cuda(std::span<const LinearJob> jobs, CudaStream stream) {
  for (const LinearJob& job : jobs) check_job(job);
  launch_type<WeightType::fp32>(jobs, stream);
  launch_type<WeightType::bf16>(jobs, stream);
  launch_type<WeightType::fp16>(jobs, stream);
}

void linear_cuda(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                 const float* bias, float* y, int64_t y_stride, CudaStream stream) {
  LinearJob job;
  job.x = x;
  job.x_stride = x_stride;
  job.m = m;
  job.w = w;
  job.bias = bias;
  job.y = y;
  job.y_stride = y_stride;
  linear_cuda({&job, 1}, stream);
}

}  // namespace replayeval
