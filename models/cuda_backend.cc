// The GPU's backend: kernels/*_cuda.h on device memory, which the library's caching allocator
// gives. `dense: fast` multiplies with cuBLAS and attends with the library's fused kernels;
// otherwise products and attention keep the order of the host's kernels.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/_cudnn_attention_forward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_grouped_mm.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

#include "kernels/attention_cuda.h"
#include "kernels/attention_merge_cuda.h"
#include "kernels/causal_conv_cuda.h"
#include "kernels/dense_cuda.h"
#include "kernels/elementwise_cuda.h"
#include "kernels/gdn_cuda.h"
#include "kernels/mamba2_cuda.h"
#include "models/backend.h"
#include "quant/cuda_support.h"

namespace replayeval {
namespace {

/// Rows of at most so many tokens attend in one launch for all rows.
constexpr int64_t kFewTokens = 8;
/// The past goes to cuDNN in parts of so many positions times a power of two, whose plans are made
/// once; from so many positions on, for queries of a multiple of kPartQueries.
constexpr int64_t kPartPositions = 1024;
constexpr int64_t kLeastPast = 4096;
constexpr int64_t kPartQueries = 256;
/// Caches grow by at least this share of their length.
constexpr int64_t kGrowthParts = 4;
constexpr int64_t kLeastPositions = 256;

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

at::TensorOptions device_options(at::ScalarType type) {
  return at::TensorOptions().dtype(type).device(at::kCUDA);
}

at::Tensor view(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), sizes, strides, device_options(type));
}

/// Runs work of the library; its errors become this program's.
template <class Work>
auto library(const char* what, Work work) {
  try {
    return work();
  } catch (const c10::OutOfMemoryError&) {
    const CudaDevice device = cuda_device();
    throw std::runtime_error(
        std::string("device memory: ") + what + ": not enough (" +
        std::to_string(device.free_bytes >> 20) + " of " +
        std::to_string(device.memory_bytes >> 20) +
        " MiB free); use fewer states at a time, chunk_tokens, slots or data.tokens");
  } catch (const c10::Error& error) {
    throw std::runtime_error(std::string("device: ") + what + ": " +
                             error.what_without_backtrace());
  }
}

void require_fast(KernelForm form) {
  if (form == KernelForm::reference) {
    throw std::invalid_argument(
        "kernels: reference: the FP64 reference runs on the CPU; use device: cpu");
  }
}

class CudaBackend;

/// Keys and values contiguous a row: [positions, kv_heads, head_dim].
class CudaKvStore : public KvStore {
 public:
  CudaKvStore(CudaBackend& backend, int kv_heads, int head_dim, KvType type, int rows);

  int64_t length(int row) const override { return rows_[static_cast<size_t>(row)].length; }
  size_t bytes(int row) const override {
    const Row& r = rows_[static_cast<size_t>(row)];
    return r.k.bytes() + r.v.bytes();
  }
  void reserve(int row, int64_t tokens) override;
  void append(int row, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
              int64_t tokens) override;
  void truncate(int row, int64_t length) override;
  void copy(int from, int to) override;
  void read(int row, int64_t first, int64_t tokens, float* k, float* v) const override;
  void append_host(int row, const float* k, const float* v, int64_t tokens) override;
  Contiguous contiguous(int row) const override {
    const Row& r = rows_[static_cast<size_t>(row)];
    return {r.k.data(), r.v.data()};
  }
  void attend(std::span<const AttentionQueries> queries, int heads, float scale,
              KernelForm form) override;

 private:
  struct Row {
    int64_t length = 0;
    int64_t capacity = 0;
    Memory k, v;
  };
  int64_t width() const { return int64_t{kv_heads()} * head_dim(); }
  size_t position_bytes() const {
    return static_cast<size_t>(width()) * (type() == KvType::fp32 ? 4 : 2);
  }
  void grow(Row& row, int64_t capacity);
  void attend_bf16(const Row& row, const AttentionQueries& q, int heads, float scale);
  bool attend_past(const Row& row, const at::Tensor& query, int64_t past, float scale,
                   std::vector<at::Tensor>& out, std::vector<at::Tensor>& lse);
  void attend_efficient(const Row& row, const AttentionQueries& q, int heads, float scale) const;

  CudaBackend& backend_;
  std::vector<Row> rows_;
  bool cudnn_ = true;  // until it refuses these shapes
};

class CudaBackend : public Backend {
 public:
  CudaBackend(bool fast, bool bf16) : fast_(fast), bf16_(bf16) {
    std::string reason;
    if (!cuda_available(&reason)) throw std::runtime_error("device: cuda: " + reason);
    library("start", [] {
      at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
      // FP32 products are FP32, and BF16 products sum in FP32.
      at::globalContext().setAllowTF32CuBLAS(false);
      at::globalContext().setAllowBF16ReductionCuBLAS(false);
    });
  }

  bool fast() const { return fast_; }
  CudaStream stream() const override { return stream_; }
  std::unique_ptr<CapturedWork> capture(const std::function<void()>& queue,
                                        CapturedWork* beside) override;

  bool on_device() const override { return true; }
  void synchronize() override { cuda_synchronize(stream_); }

  std::byte* allocate(size_t bytes) override {
    const std::string what = std::to_string(bytes >> 20) + " MiB";
    return library(what.c_str(), [&] {
      return static_cast<std::byte*>(
          c10::cuda::CUDACachingAllocator::raw_alloc(std::max<size_t>(bytes, 1)));
    });
  }
  void release(std::byte* memory, size_t) noexcept override {
    c10::cuda::CUDACachingAllocator::raw_delete(memory);
  }
  void upload(void* to, const void* host, size_t bytes) override {
    if (bytes > 0) copy_to_device(to, host, bytes, stream_);
  }
  void download(void* host, const void* from, size_t bytes) override {
    if (bytes > 0) copy_to_host(host, from, bytes, stream_);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) device_copy(to, from, bytes, stream_);
  }
  void copy(std::span<const CopyJob> jobs) override { copy_cuda(jobs, stream_); }
  void clear(void* memory, size_t bytes) override {
    if (bytes > 0) device_fill(memory, 0, bytes, stream_);
  }

  const float* constant(const std::vector<float>& host) override {
    return host.empty() ? nullptr : constant(host.data(), host.size());
  }

  void linear(const float* x, int64_t x_stride, const WeightView& w, const std::vector<float>& bias,
              float* y, std::span<const TokenRange> ranges, bool fp32_result) override {
    const float* b = bias.empty() ? nullptr : bias.data();
    if (fast_) {
      library("product", [&] {
        const c10::InferenceMode guard;
        multiply_ranges(x, x_stride, w, b, y, ranges, fp32_result);
      });
      return;
    }
    // The fixed order gives a row the same bits whatever is multiplied beside it.
    const int64_t tokens = ranges.empty() ? 0 : ranges.back().first + ranges.back().tokens;
    const LinearJob job{x, x_stride, nullptr, tokens, w, b, y, w.rows};
    multiply({&job, 1}, fp32_result);
  }
  void linear(const float* x, int64_t x_stride, std::span<const LinearPart> parts, float* y,
              std::span<const TokenRange> ranges) override {
    if (fast_) {
      library("product", [&] {
        const c10::InferenceMode guard;
        const WeightView joined = joined_weight(parts);
        multiply_ranges(x, x_stride, joined, joined_bias(parts), y, ranges, false);
      });
      return;
    }
    int64_t width = 0;
    for (const LinearPart& part : parts) width += part.w->rows;
    const int64_t tokens = ranges.empty() ? 0 : ranges.back().first + ranges.back().tokens;
    std::vector<LinearJob> jobs;
    float* to = y;
    for (const LinearPart& part : parts) {
      const float* bias =
          part.bias->empty() ? nullptr : constant(part.bias->data(), part.bias->size());
      jobs.push_back({x, x_stride, nullptr, tokens, weight(*part.w), bias, to, width});
      to += part.w->rows;
    }
    linear_cuda(jobs, stream_);
    if (bf16_) round_to_cuda(WeightType::bf16, y, tokens * width, stream_);
  }
  void linear_activations(const void* x, int64_t x_stride, std::span<const LinearPart> parts,
                          void* y, int64_t tokens, bool fp32_result) override {
    const TokenRange whole{0, tokens};
    const int64_t in = parts[0].w->cols;
    int64_t width = 0;
    for (const LinearPart& part : parts) width += part.w->rows;
    const auto in_fp32 = [&](const float* from, int64_t stride, float* to) {
      if (fp32_result)
        return linear(from, stride, *parts[0].w, *parts[0].bias, to, {&whole, 1}, true);
      linear(from, stride, parts, to, {&whole, 1});
    };
    if (!bf16_) return in_fp32(static_cast<const float*>(x), x_stride, static_cast<float*>(y));
    const at::Tensor from = view(x, {tokens, in}, {x_stride, 1}, at::kBFloat16);
    const bool plain = std::all_of(parts.begin(), parts.end(), [&](const LinearPart& part) {
      return part.bias->empty() && (!fp32_result || part.w->type == WeightType::bf16);
    });
    library("product", [&] {
      const c10::InferenceMode guard;
      if (fast_ && plain) {
        const WeightView w = weight(joined_weight(parts), WeightType::bf16);
        const at::Tensor weights = view(w.data, {width, in}, {in, 1}, at::kBFloat16).t();
        at::Tensor to =
            view(y, {tokens, width}, {width, 1}, fp32_result ? at::kFloat : at::kBFloat16);
        if (fp32_result) {
          at::mm_out(to, from, weights, at::kFloat);
        } else {
          at::mm_out(to, from, weights);
        }
        return;
      }
      const Buffer wide(*this, tokens * in), sums(*this, fp32_result ? 0 : tokens * width);
      view(wide.data(), {tokens, in}, {in, 1}, at::kFloat).copy_(from);
      in_fp32(wide.data(), in, fp32_result ? static_cast<float*>(y) : sums.data());
      if (!fp32_result)
        narrow_cuda(sums.data(), width, tokens, width, WeightType::bf16, y, stream_);
    });
  }
  void linear_fp32(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                   float* y) override {
    linear_cuda(x, m, x_stride, weight(w), nullptr, y, w.rows, stream_);
  }
  void linear(std::span<const ExpertProducts> products) override {
    for (const ExpertProducts& p : products) {
      if (p.offsets.back() == 0) continue;
      if (can_group(p)) {
        library("product of experts", [&] {
          const c10::InferenceMode guard;
          multiply_experts(p);
        });
      } else {
        multiply(expert_jobs({&p, 1}, [](const std::vector<float>& bias) { return bias.data(); }),
                 false);
      }
    }
  }

  void rms_norm(const RmsNorm& norm, const float* x, int64_t x_stride, const float* gate,
                int64_t gate_stride, float* y, int64_t y_stride, int64_t rows,
                int64_t cols) override {
    rms_norm_cuda(norm, x, x_stride, gate, gate_stride, y, y_stride, rows, cols, stream_);
  }
  void activate(Activation f, const float* x, int64_t x_stride, const float* bias, float* y,
                int64_t y_stride, int64_t rows, int64_t cols, WeightType activation) override {
    activate_cuda(f, x, x_stride, bias, y, y_stride, rows, cols, activation, stream_);
  }
  void activate_multiply(Activation f, const float* gate, int64_t gate_stride, float gate_scale,
                         const float* up, int64_t up_stride, float* y, int64_t y_stride,
                         int64_t rows, int64_t cols, WeightType activation) override {
    activate_multiply_cuda(f, gate, gate_stride, gate_scale, up, up_stride, y, y_stride, rows, cols,
                           activation, stream_);
  }
  void add_scaled(float* y, const float* x, float multiplier, int64_t rows, int64_t cols,
                  WeightType activation) override {
    add_scaled_cuda(y, cols, x, cols, multiplier, rows, cols, activation, stream_);
  }
  void add_row_scaled(float* y, const float* x, const float* row_scale, int64_t rows, int64_t cols,
                      WeightType activation) override {
    add_row_scaled_cuda(y, cols, x, cols, row_scale, rows, cols, activation, stream_);
  }
  void scale(float* x, int64_t stride, float factor, const float* column, int64_t rows,
             int64_t cols, WeightType activation) override {
    scale_cuda(x, stride, factor, column, rows, cols, activation, stream_);
  }
  void round_to(WeightType type, float* x, int64_t n) override {
    if (type != WeightType::fp32) round_to_cuda(type, x, n, stream_);
  }
  void clamp(float* x, int64_t n, float low, float high) override {
    clamp_cuda(x, n, low, high, stream_);
  }
  void rotary_apply(float* x, int64_t stride, int64_t n, int heads, int head_dim, int dims,
                    const float* cos, const float* sin, WeightType activation) override {
    rotary_apply_cuda(x, stride, n, heads, head_dim, dims, cos, sin, activation, stream_);
  }
  void combine_experts(const int32_t* slots, const float* weights, int k, const float* slot_output,
                       int64_t cols, float* y, int64_t y_stride, int64_t tokens,
                       WeightType activation) override {
    combine_experts_cuda(slots, weights, k, slot_output, cols, y, y_stride, tokens, activation,
                         false, stream_);
  }
  void embed(const WeightView& embedding, std::span<const int32_t> ids, float* out) override {
    if (ids.empty()) return;
    const Memory device(*this, ids.size_bytes());
    upload(device.data(), ids.data(), ids.size_bytes());
    embed(embedding, reinterpret_cast<const int32_t*>(device.data()),
          static_cast<int64_t>(ids.size()), out);
  }
  void embed(const WeightView& embedding, const int32_t* ids, int64_t count, float* out) override {
    widen_rows_cuda(weight(embedding), ids, count, out, stream_);
  }

  void causal_conv(const CausalConv& conv, std::span<const CausalConvRow> rows,
                   KernelForm form) override {
    require_fast(form);
    causal_conv_cuda(conv, rows, stream_);
  }
  void mamba2_advance(const Mamba2Layer& layer, std::span<StateRow> rows,
                      std::span<const Mamba2Inputs> inputs, AdvanceMode mode,
                      KernelForm form) override {
    require_fast(form);
    mamba2_advance_cuda(layer, rows, inputs, mode, stream_);
  }
  void mamba2_flush(const Mamba2Layer& layer, std::span<StateRow> rows,
                    std::span<const Mamba2Inputs> inputs, KernelForm form) override {
    require_fast(form);
    mamba2_flush_cuda(layer, rows, inputs, stream_);
  }
  void gdn_advance(const GdnLayer& layer, std::span<StateRow> rows,
                   std::span<const GdnInputs> inputs, AdvanceMode mode, KernelForm form) override {
    require_fast(form);
    gdn_advance_cuda(layer, rows, inputs, mode, stream_);
  }
  void gdn_flush(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs,
                 KernelForm form) override {
    require_fast(form);
    gdn_flush_cuda(layer, rows, inputs, stream_);
  }
  void gdn_scalars(const float* a, const float* b, const float* a_exp, int64_t tokens, int heads,
                   float* scalars) override {
    gdn_scalars_cuda(a, b, a_exp, tokens, heads, scalars, stream_);
  }
  void add_decays(const float* values, int64_t stride, const float* factor, int64_t tokens,
                  int heads, double* sums) override {
    decay_sum_cuda(values, stride, factor, tokens, heads, sums, stream_);
  }

  std::unique_ptr<KvStore> make_kv_store(int kv_heads, int head_dim, KvType type,
                                         int rows) override {
    return std::make_unique<CudaKvStore>(*this, kv_heads, head_dim, type, rows);
  }

 private:
  struct Key {
    const void* data;
    int64_t rows, cols;
    WeightType type;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      const size_t h = std::hash<const void*>()(key.data);
      return h ^ static_cast<size_t>(key.rows * 131 + key.cols * 31) ^
             static_cast<size_t>(key.type) << 60;
    }
  };

  const float* constant(const float* host, size_t count) {
    auto [entry, added] = constants_.try_emplace(host);
    if (added) {
      try {
        entry->second = Memory(*this, count * sizeof(float));
        upload(entry->second.data(), host, count * sizeof(float));
      } catch (...) {
        constants_.erase(entry);
        throw;
      }
    }
    return reinterpret_cast<const float*>(entry->second.data());
  }

  WeightView weight(const WeightView& host) { return weight(host, host.type); }

  /// The device's copy of a matrix in `type`, rows without gaps.
  WeightView weight(const WeightView& host, WeightType type) {
    auto [entry, added] = weights_.try_emplace(Key{host.data, host.rows, host.cols, type});
    if (added) {
      try {
        entry->second = copied(host, type);
      } catch (...) {
        weights_.erase(entry);
        throw;
      }
    }
    return {entry->second.data(), type, host.rows, host.cols, host.cols};
  }

  /// One matrix of the parts' rows, on the device under its first part's data and all rows; the
  /// view is what multiply_ranges takes for a host's.
  WeightView joined_weight(std::span<const LinearPart> parts) {
    WeightView joined = *parts[0].w;
    joined.rows = 0;
    for (const LinearPart& part : parts) {
      joined.rows += part.w->rows;
      if (part.w->type != parts[0].w->type) joined.type = WeightType::fp32;
    }
    joined.stride = joined.cols;
    const WeightType type = bf16_ ? WeightType::bf16 : joined.type;
    auto [entry, added] = weights_.try_emplace(Key{joined.data, joined.rows, joined.cols, type});
    if (!added) return joined;
    try {
      entry->second =
          Memory(*this, static_cast<size_t>(joined.rows * joined.cols * weight_bytes(type)));
      size_t at = 0;
      for (const LinearPart& part : parts) {
        const Memory rows = copied(*part.w, type);
        copy(entry->second.data() + at, rows.data(), rows.bytes());
        at += rows.bytes();
        synchronize();
      }
    } catch (...) {
      weights_.erase(entry);
      throw;
    }
    return joined;
  }

  /// The parts' biases one after another, zeros for those without; null when none has one.
  const float* joined_bias(std::span<const LinearPart> parts) {
    const bool any = std::any_of(parts.begin(), parts.end(),
                                 [](const LinearPart& part) { return !part.bias->empty(); });
    if (!any) return nullptr;
    auto [entry, added] = joined_biases_.try_emplace(parts[0].w->data);
    std::vector<float>& joined = entry->second;
    for (const LinearPart& part : parts) {
      if (!added) break;
      joined.insert(joined.end(), part.bias->begin(), part.bias->end());
      if (part.bias->empty()) joined.resize(joined.size() + static_cast<size_t>(part.w->rows));
    }
    return joined.data();
  }

  Memory copied(const WeightView& host, WeightType type) {
    const size_t row_bytes = static_cast<size_t>(host.cols * weight_bytes(host.type));
    Memory memory(*this, static_cast<size_t>(host.rows) * row_bytes);
    if (host.stride == host.cols) {
      upload(memory.data(), host.data, memory.bytes());
    } else {
      const auto* from = static_cast<const std::byte*>(host.data);
      std::vector<std::byte> packed(memory.bytes());
      for (int64_t r = 0; r < host.rows; ++r) {
        std::memcpy(packed.data() + static_cast<size_t>(r) * row_bytes,
                    from + r * host.stride * weight_bytes(host.type), row_bytes);
      }
      upload(memory.data(), packed.data(), packed.size());
    }
    if (type == host.type) return memory;
    Memory converted(*this, static_cast<size_t>(host.rows * host.cols * weight_bytes(type)));
    library("weights", [&] {
      const c10::InferenceMode guard;
      view(converted.data(), {host.rows, host.cols}, {host.cols, 1}, scalar_type(type))
          .copy_(
              view(memory.data(), {host.rows, host.cols}, {host.cols, 1}, scalar_type(host.type)));
    });
    return converted;
  }

  /// Rows of x: as they lie, or `rows` of them copied.
  struct Gathered {
    Buffer copy;
    const float* x;
    int64_t stride;
  };
  Gathered gathered(const float* x, int64_t x_stride, const int32_t* rows, int64_t count,
                    int64_t cols) {
    if (rows == nullptr) return {{}, x, x_stride};
    Buffer copy(*this, count * cols);
    widen_rows_cuda({x, WeightType::fp32, 0, cols, x_stride}, rows, count, copy.data(), stream_);
    const float* values = copy.data();
    return {std::move(copy), values, cols};
  }

  /// The library's grouped product takes BF16 rows of whole 16 bytes, without a bias.
  bool can_group(const ExpertProducts& p) const {
    const WeightView& first = *p.experts[0].w;
    return fast_ && bf16_ && first.rows % 8 == 0 && first.cols % 8 == 0 &&
           std::all_of(p.experts.begin(), p.experts.end(), [&](const LinearPart& part) {
             return part.bias->empty() && part.w->rows == first.rows && part.w->cols == first.cols;
           });
  }

  /// All experts in one product of groups of rows.
  void multiply_experts(const ExpertProducts& p) {
    const int64_t in = p.experts[0].w->cols, out = p.experts[0].w->rows;
    const int64_t experts = static_cast<int64_t>(p.experts.size()), slots = p.offsets.back();
    const WeightView w = weight(joined_weight(p.experts), WeightType::bf16);
    at::Tensor narrow = at::empty({slots, in}, device_options(at::kBFloat16));
    const Gathered from = gathered(p.x, p.x_stride, p.rows, slots, in);
    narrow_cuda(from.x, from.stride, slots, in, WeightType::bf16, narrow.data_ptr(), stream_);
    at::Tensor ends = at::empty({experts}, device_options(at::kInt));
    upload(ends.data_ptr(), p.offsets.data() + 1, static_cast<size_t>(experts) * sizeof(int32_t));
    const at::Tensor weights = view(w.data, {experts, in, out}, {in * out, 1, in}, at::kBFloat16);
    view(p.y, {slots, out}, {out, 1}, at::kFloat)
        .copy_(at::_grouped_mm(narrow, weights, ends, {}, at::kBFloat16));
  }

  /// Products of host weights with device arrays.
  void multiply(std::span<const LinearJob> jobs, bool fp32_result) {
    if (fast_) {
      library("product", [&] {
        const c10::InferenceMode guard;
        for (const LinearJob& job : jobs) multiply_fast(job, fp32_result);
      });
      return;
    }
    std::vector<LinearJob> placed(jobs.begin(), jobs.end());
    for (LinearJob& job : placed) {
      if (job.bias != nullptr) job.bias = constant(job.bias, static_cast<size_t>(job.w.rows));
      job.w = weight(job.w);
    }
    linear_cuda(placed, stream_);
    if (!bf16_ || fp32_result) return;
    for (const LinearJob& job : placed) {  // contiguous
      round_to_cuda(WeightType::bf16, job.y, job.m * job.w.rows, stream_);
    }
  }

  void multiply_fast(const LinearJob& job, bool fp32_result) {
    if (job.m == 0) return;
    const Gathered from = gathered(job.x, job.x_stride, job.x_rows, job.m, job.w.cols);
    const TokenRange whole{0, job.m};
    multiply_ranges(from.x, from.stride, job.w, job.bias, job.y, {&whole, 1}, fp32_result);
  }

  /// A product of the library for each range; y [tokens, out] contiguous.
  void multiply_ranges(const float* x, int64_t x_stride, const WeightView& host_weight,
                       const float* host_bias, float* y, std::span<const TokenRange> ranges,
                       bool fp32_result) {
    if (ranges.empty()) return;
    const int64_t in = host_weight.cols, out = host_weight.rows;
    const int64_t tokens = ranges.back().first + ranges.back().tokens;
    // A result that stays FP32 keeps its weights: those of other types are not rounded to BF16.
    const bool as_bf16 = bf16_ && (!fp32_result || host_weight.type == WeightType::bf16);
    const WeightView w = weight(host_weight, as_bf16 ? WeightType::bf16 : host_weight.type);
    at::Tensor weights = view(w.data, {out, in}, {in, 1}, scalar_type(w.type)).t();
    const at::Tensor bias =
        host_bias == nullptr
            ? at::Tensor()
            : view(constant(host_bias, static_cast<size_t>(out)), {out}, {1}, at::kFloat);
    at::Tensor result = view(y, {tokens, out}, {out, 1}, at::kFloat);
    at::Tensor source = view(x, {tokens, in}, {x_stride, 1}, at::kFloat);
    if (as_bf16) {
      at::Tensor narrow = at::empty({tokens, in}, device_options(at::kBFloat16));
      narrow_cuda(x, x_stride, tokens, in, WeightType::bf16, narrow.data_ptr(), stream_);
      source = narrow;
    } else if (w.type != WeightType::fp32) {
      weights = weights.to(at::kFloat);
    }
    // Without a bias the library rounds the sums itself.
    const bool rounded = as_bf16 && !fp32_result && !bias.defined();
    at::Tensor narrow_result =
        rounded ? at::empty({tokens, out}, device_options(at::kBFloat16)) : at::Tensor();
    for (const TokenRange& range : ranges) {
      const at::Tensor part = source.narrow(0, range.first, range.tokens);
      at::Tensor to = (rounded ? narrow_result : result).narrow(0, range.first, range.tokens);
      if (as_bf16 && !rounded) {
        at::mm_out(to, part, weights, at::kFloat);
      } else {
        at::mm_out(to, part, weights);
      }
    }
    if (rounded) result.copy_(narrow_result);
    if (bias.defined()) result.add_(bias);
    if (bf16_ && !fp32_result && !rounded)
      round_to_cuda(WeightType::bf16, y, tokens * out, stream_);
  }

  bool fast_;
  bool bf16_;
  CudaStream stream_ = nullptr;
  std::unordered_map<const float*, Memory> constants_;
  std::unordered_map<Key, Memory, KeyHash> weights_;
  std::unordered_map<const void*, std::vector<float>> joined_biases_;  // by the first weight
};

class CudaGraph : public CapturedWork {
 public:
  void run() override {
    library("graph", [&] { graph.replay(); });
  }
  at::cuda::CUDAGraph graph;
};

std::unique_ptr<CapturedWork> CudaBackend::capture(const std::function<void()>& queue,
                                                   CapturedWork* beside) {
  auto work = std::make_unique<CudaGraph>();
  synchronize();
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(side);
  stream_ = side.stream();
  try {
    queue();
    synchronize();
    library("graph", [&] {
      const at::cuda::MempoolId_t own{0, 0};
      work->graph.capture_begin(beside ? static_cast<CudaGraph*>(beside)->graph.pool() : own,
                                cudaStreamCaptureModeThreadLocal);
    });
    queue();
    library("graph", [&] { work->graph.capture_end(); });
  } catch (...) {
    stream_ = nullptr;
    throw;
  }
  stream_ = nullptr;
  return work;
}

CudaKvStore::CudaKvStore(CudaBackend& backend, int kv_heads, int head_dim, KvType type, int rows)
    : KvStore(kv_heads, head_dim, type), backend_(backend), rows_(static_cast<size_t>(rows)) {}

void CudaKvStore::grow(Row& row, int64_t capacity) {
  const size_t held = static_cast<size_t>(row.length) * position_bytes();
  for (Memory* memory : {&row.k, &row.v}) {
    Memory larger(backend_, static_cast<size_t>(capacity) * position_bytes());
    if (held > 0) backend_.copy(larger.data(), memory->data(), held);
    *memory = std::move(larger);
  }
  row.capacity = capacity;
}

void CudaKvStore::reserve(int r, int64_t tokens) {
  Row& row = rows_[static_cast<size_t>(r)];
  if (tokens > row.capacity) grow(row, tokens);
}

void CudaKvStore::append(int r, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                         int64_t tokens) {
  Row& row = rows_[static_cast<size_t>(r)];
  const int64_t length = row.length + tokens;
  if (length > row.capacity) {
    grow(row, std::max({length, row.capacity + row.capacity / kGrowthParts, kLeastPositions}));
  }
  const size_t at = static_cast<size_t>(row.length) * position_bytes();
  append_kv_cuda(k, k_stride, v, v_stride, tokens, width(), row.k.data() + at, row.v.data() + at,
                 type(), backend_.stream());
  row.length = length;
}

void CudaKvStore::truncate(int r, int64_t length) {
  Row& row = rows_[static_cast<size_t>(r)];
  if (length < 0 || length > row.length) {
    throw std::invalid_argument("key-value cache: truncate to " + std::to_string(length) + " of " +
                                std::to_string(row.length) + " positions");
  }
  row.length = length;
  if (length == 0) row = Row{};
}

void CudaKvStore::copy(int from, int to) {
  const Row& source = rows_[static_cast<size_t>(from)];
  Row& target = rows_[static_cast<size_t>(to)];
  target.length = 0;
  if (target.capacity < source.length) grow(target, source.length);
  target.length = source.length;
  const size_t bytes = static_cast<size_t>(source.length) * position_bytes();
  backend_.copy(target.k.data(), source.k.data(), bytes);
  backend_.copy(target.v.data(), source.v.data(), bytes);
}

void CudaKvStore::read(int r, int64_t first, int64_t tokens, float* k, float* v) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  const size_t at = static_cast<size_t>(first) * position_bytes();
  const int64_t count = tokens * width();
  std::vector<std::byte> bytes(static_cast<size_t>(tokens) * position_bytes());
  const auto take = [&](const Memory& memory, float* out) {
    if (out == nullptr || bytes.empty()) return;
    backend_.download(bytes.data(), memory.data() + at, bytes.size());
    widen(bytes.data(), type() == KvType::fp32 ? WeightType::fp32 : WeightType::bf16, count, out);
  };
  take(row.k, k);
  take(row.v, v);
}

void CudaKvStore::append_host(int r, const float* k, const float* v, int64_t tokens) {
  const int64_t count = tokens * width();
  const Buffer keys(backend_, count), values(backend_, count);
  backend_.upload(keys.data(), k, static_cast<size_t>(count) * sizeof(float));
  backend_.upload(values.data(), v, static_cast<size_t>(count) * sizeof(float));
  append(r, keys.data(), width(), values.data(), width(), tokens);
}

void CudaKvStore::attend(std::span<const AttentionQueries> queries, int heads, float scale,
                         KernelForm form) {
  require_fast(form);
  const bool few = std::all_of(queries.begin(), queries.end(),
                               [](const AttentionQueries& q) { return q.tokens <= kFewTokens; });
  const bool fused = head_dim() <= kMaxAttentionDim && head_dim() % 8 == 0;
  if (!backend_.fast() || few || !fused) {
    std::vector<AttentionRowCuda> rows;
    for (const AttentionQueries& q : queries) {
      const Row& row = rows_[static_cast<size_t>(q.row)];
      rows.push_back({row.k.data(), row.v.data(), type(), q.position, q.tokens, q.q, q.q_stride,
                      q.out, q.out_stride});
    }
    attention_cuda(rows, heads, kv_heads(), head_dim(), scale, backend_.stream());
    return;
  }
  library("attention", [&] {
    const c10::InferenceMode guard;
    for (const AttentionQueries& q : queries) {
      const Row& row = rows_[static_cast<size_t>(q.row)];
      if (type() == KvType::bf16) {
        attend_bf16(row, q, heads, scale);
      } else {
        attend_efficient(row, q, heads, scale);
      }
    }
  });
}

// Attention to the first `past` positions, a multiple of kPartPositions, without mask: one part
// each power of two. False, and nothing of it, where cuDNN does not serve this head or GPU.
bool CudaKvStore::attend_past(const Row& row, const at::Tensor& query, int64_t past, float scale,
                              std::vector<at::Tensor>& out, std::vector<at::Tensor>& lse) {
  const int64_t dim = head_dim(), tokens = query.size(1);
  const std::optional<at::Tensor> none;
  const std::optional<double> factor = scale;
  int64_t first = 0;
  for (int64_t part = std::bit_floor(static_cast<uint64_t>(past)); first < past; part /= 2) {
    if (past - first < part) continue;
    const auto cache = [&](const Memory& memory) {
      return view(memory.data() + static_cast<size_t>(first) * position_bytes(),
                  {1, kv_heads(), part, dim}, {part * width(), dim, width(), 1}, at::kBFloat16);
    };
    try {
      const auto result =
          at::_cudnn_attention_forward(query.transpose(1, 2), cache(row.k), cache(row.v), none,
                                       none, none, tokens, part, true, 0.0, false, false, factor);
      out.push_back(std::get<0>(result).transpose(1, 2));
      lse.push_back(std::get<1>(result));
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error&) {
      out.clear();
      lse.clear();
      return cudnn_ = false;
    }
    first += part;
  }
  return true;
}

// Flash attention's causal mask is aligned to the end: query t of T sees S - T + t + 1 of S
// positions. On Hopper cuDNN takes half of its time but makes a plan for each shape, so that a long
// past goes there in few sizes, and the parts are merged.
void CudaKvStore::attend_bf16(const Row& row, const AttentionQueries& q, int heads, float scale) {
  const int64_t dim = head_dim(), length = q.position + q.tokens;
  at::Tensor query = at::empty({1, q.tokens, heads, dim}, device_options(at::kBFloat16));
  narrow_cuda(q.q, q.q_stride, q.tokens, heads * dim, WeightType::bf16, query.data_ptr(),
              backend_.stream());
  std::vector<at::Tensor> out, lse;
  int64_t past = 0;
  if (cudnn_ && q.tokens % kPartQueries == 0 && q.position >= kLeastPast) {
    past = q.position / kPartPositions * kPartPositions;
    if (!attend_past(row, query, past, scale, out, lse)) past = 0;
  }
  const int64_t rest = length - past;
  const auto cache = [&](const Memory& memory) {
    return view(memory.data() + static_cast<size_t>(past) * position_bytes(),
                {1, rest, kv_heads(), dim}, {rest * width(), width(), dim, 1}, at::kBFloat16);
  };
  const std::optional<at::Tensor> none;
  const std::optional<double> factor = scale;
  const auto newest = at::_flash_attention_forward(query, cache(row.k), cache(row.v), none, none,
                                                   q.tokens, rest, 0.0, true, false, factor);
  if (past == 0) {
    view(q.out, {1, q.tokens, heads, dim}, {q.tokens * q.out_stride, q.out_stride, dim, 1},
         at::kFloat)
        .copy_(std::get<0>(newest));
    return;
  }
  out.push_back(std::get<0>(newest));
  lse.push_back(std::get<1>(newest));
  std::vector<AttentionPart> parts;
  for (size_t i = 0; i < out.size(); ++i) {
    lse[i] = lse[i].contiguous();
    parts.push_back({out[i].data_ptr(), out[i].stride(1), out[i].stride(2),
                     static_cast<const float*>(lse[i].data_ptr())});
  }
  merge_attention_cuda(parts, q.tokens, heads, static_cast<int>(dim), q.out, q.out_stride,
                       backend_.stream());
}

// The kernel knows no grouped queries: each KV head is one of the batch, with its queries as heads
// that share it.
void CudaKvStore::attend_efficient(const Row& row, const AttentionQueries& q, int heads,
                                   float scale) const {
  constexpr int64_t kCausalFromEnd = 2;
  const int64_t dim = head_dim(), length = q.position + q.tokens;
  const int64_t group = heads / kv_heads();
  const auto cache = [&](const Memory& memory) {
    return view(memory.data(), {kv_heads(), length, group, dim}, {dim, width(), 0, 1}, at::kFloat);
  };
  const auto queries = [&](const float* data, int64_t stride) {
    return view(data, {kv_heads(), q.tokens, group, dim}, {group * dim, stride, dim, 1},
                at::kFloat);
  };
  const std::optional<at::Tensor> none;
  const std::optional<double> factor = scale;
  const at::Tensor out = std::get<0>(at::_efficient_attention_forward(
      queries(q.q, q.q_stride), cache(row.k), cache(row.v), none, none, none, q.tokens, length, 0.0,
      kCausalFromEnd, false, factor));
  queries(q.out, q.out_stride).copy_(out);
}

}  // namespace

double device_matrix_rate(bool bf16) {
  constexpr int64_t kSize = 8192;
  constexpr int kRepeats = 5;
  const CudaBackend start(true, bf16);
  return library("product", [&] {
    const c10::InferenceMode guard;
    const auto type = bf16 ? at::kBFloat16 : at::kFloat;
    const at::Tensor a = at::randn({kSize, kSize}, device_options(type)),
                     b = at::randn({kSize, kSize}, device_options(type));
    at::Tensor y = at::empty({kSize, kSize}, device_options(at::kFloat));
    const auto product = [&] {
      if (bf16) {
        at::mm_out(y, a, b.t(), at::kFloat);
      } else {
        at::mm_out(y, a, b.t());
      }
    };
    product();
    CudaTimer timer;
    timer.start();
    for (int i = 0; i < kRepeats; ++i) product();
    return kRepeats * 2.0 * kSize * kSize * kSize / timer.stop();
  });
}

std::unique_ptr<Backend> make_cuda_backend(bool fast, bool bf16) {
  return std::make_unique<CudaBackend>(fast, bf16);
}

}  // namespace replayeval
