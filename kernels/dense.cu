// Products as tiles of outputs, each output in one thread's register: no order of additions is ever
// changed.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/dense_cuda.h"
#include "kernels/math_cuda.cuh"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// One product; `vector`: rows of x start on multiples of 16 bytes, rows of w on multiples of 16 (8
/// for 16-bit types).
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

constexpr int kDepthTile = 16;  // columns of x and w in a stage

/// Four columns c .. c + 3 of a row of `cols` on their way to shared memory.
template <WeightType Type>
struct Staged {
  Quad values;
  __device__ __forceinline__ void load(const char* row, int c, int cols, bool vector) {
    values = load_quad(reinterpret_cast<const float*>(row) + c, cols - c, vector);
  }
  __device__ __forceinline__ Quad widened() const { return values; }
};
template <WeightType Type>
requires(Type != WeightType::fp32) struct Staged<Type> {
  uint2 codes;
  __device__ __forceinline__ void load(const char* row, int c, int cols, bool vector) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(row) + c;
    if (vector && c + 4 <= cols) {
      codes = *reinterpret_cast<const uint2*>(from);
    } else {
      uint32_t code[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) code[k] = c + k < cols ? from[k] : 0u;
      codes = make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
    }
  }
  __device__ __forceinline__ Quad widened() const {
    return {{widen_code<Type>(codes.x & 0xFFFFu), widen_code<Type>(codes.x >> 16),
             widen_code<Type>(codes.y & 0xFFFFu), widen_code<Type>(codes.y >> 16)}};
  }
};

/// kBlockM x kBlockN outputs a block, 8 x 8 a thread: rows 4 ty + 16 h .., columns 4 tx + 32 h ..
/// of a warp's 32 x 64. A stage holds x and w by columns: the four values of one access belong to
/// four outputs, so that a product's operand and its sum can lie in different banks of registers.
template <WeightType Type, int kBlockM, int kBlockN, int kBlocks>
__global__ void __launch_bounds__(kBlockM* kBlockN / 64, kBlocks)
    multiply(const __grid_constant__ Products products) {
  constexpr int kThreads = kBlockM * kBlockN / 64;
  constexpr int kWarpsN = kBlockN / 64;
  constexpr int kLoadsX = kBlockM * kDepthTile / 4 / kThreads;
  constexpr int kLoadsW = kBlockN * kDepthTile / 4 / kThreads;
  constexpr int kLoadRows = kThreads / 4;
  constexpr int kRowX = kBlockM + 4, kRowW = kBlockN + 4;  // floats of a column
  __shared__ float4 memory[2 * kDepthTile * (kRowX + kRowW) / 4];

  const Product& product = find_product(products, blockIdx.x);
  const uint32_t tile = blockIdx.x - product.first_tile;
  const int cols = product.cols;
  const uint32_t row_tiles = static_cast<uint32_t>((product.m + kBlockM - 1) / kBlockM);
  // Tiles of the same weights follow each other.
  const int first_m = static_cast<int>(tile % row_tiles) * kBlockM;
  const int first_n = static_cast<int>(tile / row_tiles) * kBlockN;

  // Half a warp stores sixteen rows of one column at once, each in its own bank.
  const int thread = static_cast<int>(threadIdx.x);
  const int load_row = thread % 16 + thread / 64 * 16, load_c = thread / 16 % 4 * 4;
  // Rows past the end repeat the last one; their outputs are not stored.
  const char *x_rows[kLoadsX], *w_rows[kLoadsW];
#pragma unroll
  for (int i = 0; i < kLoadsX; ++i) {
    const int row = min(first_m + load_row + i * kLoadRows, product.m - 1);
    x_rows[i] = reinterpret_cast<const char*>(
        product.x + (product.x_rows != nullptr ? product.x_rows[row] : row) * product.x_stride);
  }
#pragma unroll
  for (int i = 0; i < kLoadsW; ++i) {
    const int row = min(first_n + load_row + i * kLoadRows, product.rows - 1);
    w_rows[i] = static_cast<const char*>(product.w) + row * product.w_stride * weight_bytes(Type);
  }
  const bool vector_x = product.vector_x, vector_w = product.vector_w;
  Staged<WeightType::fp32> next_x[kLoadsX];
  Staged<Type> next_w[kLoadsW];
  const auto stage = [&](int step) {
    return reinterpret_cast<float*>(memory) + step % 2 * kDepthTile * (kRowX + kRowW);
  };
  const auto fetch = [&](int step) {
    const int c = step * kDepthTile + load_c;
#pragma unroll
    for (int i = 0; i < kLoadsX; ++i) next_x[i].load(x_rows[i], c, cols, vector_x);
#pragma unroll
    for (int i = 0; i < kLoadsW; ++i) next_w[i].load(w_rows[i], c, cols, vector_w);
  };
  const auto keep = [&](int step) {
    float* x = stage(step) + load_c * kRowX + load_row;
    float* w = stage(step) + kDepthTile * kRowX + load_c * kRowW + load_row;
#pragma unroll
    for (int i = 0; i < kLoadsX; ++i) {
      const Quad q = next_x[i].widened();
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k * kRowX + i * kLoadRows] = q.v[k];
    }
#pragma unroll
    for (int i = 0; i < kLoadsW; ++i) {
      const Quad q = next_w[i].widened();
#pragma unroll
      for (int k = 0; k < 4; ++k) w[k * kRowW + i * kLoadRows] = q.v[k];
    }
  };

  const int warp = thread / 32;
  const int tx = lane_column(thread), ty = lane_row(thread);
  const int own_m = warp / kWarpsN * 32 + ty * 4, own_n = warp % kWarpsN * 64 + tx * 4;
  float sums[8][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[i][j] = 0;
  }

  const int steps = (cols + kDepthTile - 1) / kDepthTile;
  if (steps > 0) {
    fetch(0);
    keep(0);
  }
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    const bool more = step + 1 < steps;
    if (more) fetch(step + 1);
    const float* x = stage(step) + own_m;
    const float* w = stage(step) + kDepthTile * kRowX + own_n;
    const auto add_column = [&](int k) {
      Quad a[2], b[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        a[h] = load_quad(x + k * kRowX + 16 * h, 4, true);
        b[h] = load_quad(w + k * kRowW + 32 * h, 4, true);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          sums[i][j] = __fmaf_rn(a[i / 4].v[i % 4], b[j / 4].v[j % 4], sums[i][j]);
      }
    };
    const int depth = min(kDepthTile, cols - step * kDepthTile);
    if (depth == kDepthTile) {
#pragma unroll
      for (int k = 0; k < kDepthTile; ++k) add_column(k);
    } else {
      // Adding 0 * 0 would turn a sum of -0 into +0: the last stage ends where the columns end.
#pragma unroll 1
      for (int k = 0; k < depth; ++k) add_column(k);
    }
    if (more) keep(step + 1);
    __syncthreads();
  }

  const bool vector_y =
      reinterpret_cast<uintptr_t>(product.y) % 16 == 0 && product.y_stride % 4 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int n = first_n + own_n + 32 * h;
    const int left = product.rows - n;
    Quad bias = {};
    if (product.bias != nullptr) bias = load_quad(product.bias + n, left, false);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = first_m + own_m + i / 4 * 16 + i % 4;
      if (row >= product.m) continue;
      Quad out;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float sum = sums[i][4 * h + j];
        out.v[j] = product.bias != nullptr ? sum + bias.v[j] : sum;
      }
      store_quad(product.y + row * product.y_stride + n, out, left, vector_y);
    }
  }
}

// ---------------------------------------------------------------- few rows

/// Four columns c .. c + 3 of a row of FP32 values of `cols`, zeros past the end, to shared memory.
__device__ __forceinline__ void stage_fp32(float* to, const float* row, int c, int cols,
                                           bool vector) {
  const int left = cols - c;
  if (vector) {
    copy_behind(to, left > 0 ? row + c : row, left <= 0 ? 0 : left < 4 ? 4 * left : 16);
  } else {
    store_quad(to, load_quad(row + c, left, false), 4, true);
  }
}

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
      char* to = stage + r * kFewRowBytes<Type> + i % kRowChunks * 16;
      const char* row = static_cast<const char*>(product.w) +
                        min(first_n + r, product.rows - 1) * product.w_stride * kElement;
      const int left = cols - c;
      if (product.vector_w) {
        copy_behind(to, left > 0 ? row + int64_t{c} * kElement : row,
                    left <= 0 ? 0 : min(left, kChunk) * kElement);
      } else if constexpr (Type == WeightType::fp32) {
        for (int k = 0; k < kChunk && k < left; ++k)
          reinterpret_cast<float*>(to)[k] = reinterpret_cast<const float*>(row)[c + k];
      } else {
        for (int k = 0; k < kChunk && k < left; ++k)
          reinterpret_cast<uint16_t*>(to)[k] = reinterpret_cast<const uint16_t*>(row)[c + k];
      }
    }
    float* x_stage = reinterpret_cast<float*>(stage + kFewOutputs * kFewRowBytes<Type>);
    for (int i = thread; i < m * (kFewDepth / 4); i += kFewThreads) {
      const int r = i / (kFewDepth / 4), c = i % (kFewDepth / 4) * 4;
      const float* row =
          product.x + (product.x_rows != nullptr ? product.x_rows[r] : r) * product.x_stride;
      stage_fp32(x_stage + r * kFewDepth + c, row, begin + c, cols, product.vector_x);
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
    const auto four = [&](int k) {
      if constexpr (Type == WeightType::fp32) {
        return load_quad(reinterpret_cast<const float*>(w) + k, 4, true);
      } else {
        return load_quad<Type>(reinterpret_cast<const uint16_t*>(w) + k, 4, true);
      }
    };
    const auto walk = [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      const auto step_of_four = [&](int k) {
        const Quad b = four(k);
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
        float b;
        if constexpr (Type == WeightType::fp32) {
          b = reinterpret_cast<const float*>(w)[k];
        } else {
          b = widen_code<Type>(reinterpret_cast<const uint16_t*>(w)[k]);
        }
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
  product.vector_w = false;
  return product;
}

bool rows_start_on(const LinearJob& job, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(job.w.data) % static_cast<uintptr_t>(bytes) == 0 &&
         (job.w.stride * weight_bytes(job.w.type) % bytes == 0 || job.w.rows == 1);
}

/// kernel over all products; `list` has their first tiles.
template <class Kernel>
void launch(Kernel kernel, unsigned tiles, int threads, size_t shared,
            const std::vector<Product>& list, cudaStream_t stream) {
  if (shared > 0) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)));
  }
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

template <WeightType Type, int kBlockM, int kBlockN, int kBlocks>
void launch_tiles(std::vector<Product>& list, cudaStream_t stream) {
  uint32_t tiles = 0;
  for (Product& product : list) {
    product.first_tile = tiles;
    tiles += static_cast<uint32_t>(ceil_div(product.m, kBlockM) * ceil_div(product.rows, kBlockN));
  }
  launch(multiply<Type, kBlockM, kBlockN, kBlocks>, tiles, kBlockM * kBlockN / 64, 0, list, stream);
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
      product.vector_w = rows_start_on(job, 16);
      product.first_tile = few_tiles;
      few_tiles += static_cast<uint32_t>(ceil_div(job.w.rows, kFewOutputs));
      few.push_back(product);
      continue;
    }
    product.vector_w = rows_start_on(job, 4 * weight_bytes(Type));
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
  // little slower.
  if (1.06 * static_cast<double>(ceil_div(small, multiprocessors)) <
      2.0 * static_cast<double>(ceil_div(large, multiprocessors))) {
    launch_tiles<Type, 64, 128, 3>(many, stream);
  } else {
    launch_tiles<Type, 128, 128, 1>(many, stream);
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
