// Where a model's arithmetic runs and its arrays lie. The forward pass (models/hybrid.cc) and the
// states (models/state_store.h) are written once against this interface; the host's backend calls
// the kernels of kernels/*.h, the device's those of kernels/*_cuda.h, which have the same contracts
// (shapes, orders of sums, roundings), so that only products and attention of `dense: fast` differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention.h"
#include "kernels/causal_conv.h"
#include "kernels/copy_job.h"
#include "kernels/dense.h"
#include "kernels/elementwise.h"
#include "kernels/gdn.h"
#include "kernels/mamba2.h"
#include "quant/cuda_support.h"

namespace replayeval {

class Backend;

/// Uninitialised bytes of a backend, 64-byte aligned. Movable.
class Memory {
 public:
  Memory() = default;
  Memory(Backend& backend, size_t bytes);
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Backend* backend() const { return backend_; }

 private:
  void swap(Memory& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Backend* backend_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Uninitialised FP32 values of a backend.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Backend& backend, int64_t size)
      : memory_(backend, static_cast<size_t>(size) * sizeof(float)) {}
  float* data() const { return reinterpret_cast<float*>(memory_.data()); }
  explicit operator bool() const { return memory_.data() != nullptr; }

 private:
  Memory memory_;
};

/// A part of a call that is multiplied at once: tokens first .. first + tokens - 1.
struct TokenRange {
  int64_t first = 0;
  int64_t tokens = 0;
};

/// One of several products of one input; the host's weights and bias (empty: none).
struct LinearPart {
  const WeightView* w = nullptr;
  const std::vector<float>* bias = nullptr;
};

/// Slots offsets[e] .. offsets[e + 1] - 1 through expert e: y [slots, out] = x W_e^T + b_e, whose
/// shapes are equal. `rows` (the backend's; null: s) is the row of x that slot s takes.
struct ExpertProducts {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* rows = nullptr;
  std::span<const int32_t> offsets;  // [experts + 1], the host's
  std::vector<LinearPart> experts;
  float* y = nullptr;
};

/// Queries of one row for KvStore::attend.
struct AttentionQueries {
  int row = 0;
  int64_t position = 0;
  int64_t tokens = 0;
  const float* q = nullptr;  // [heads, head_dim] a token
  int64_t q_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};

/// Keys and values of all rows of one attention layer.
class KvStore {
 public:
  KvStore(int kv_heads, int head_dim, KvType type)
      : kv_heads_(kv_heads), head_dim_(head_dim), type_(type) {}
  virtual ~KvStore() = default;

  int kv_heads() const { return kv_heads_; }
  int head_dim() const { return head_dim_; }
  KvType type() const { return type_; }

  virtual int64_t length(int row) const = 0;
  virtual size_t bytes(int row) const = 0;  // held now
  /// Room for `tokens` positions, so that growing never moves keys. A hint.
  virtual void reserve(int row, int64_t tokens) = 0;
  /// As KvCache::append and truncate, arrays of the backend.
  virtual void append(int row, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                      int64_t tokens) = 0;
  virtual void truncate(int row, int64_t length) = 0;
  /// Row `to` becomes a copy of row `from`.
  virtual void copy(int from, int to) = 0;
  /// Positions first .. first + tokens - 1 as FP32 in host memory: k, v [tokens, kv_heads,
  /// head_dim].
  virtual void read(int row, int64_t first, int64_t tokens, float* k, float* v) const = 0;
  /// Appends from host memory, contiguous.
  virtual void append_host(int row, const float* k, const float* v, int64_t tokens) = 0;
  /// A device's keys and values of a row, [length, kv_heads, head_dim] in the store's type; null on
  /// the host, whose caches are paged.
  struct Contiguous {
    const void* k = nullptr;
    const void* v = nullptr;
  };
  virtual Contiguous contiguous(int) const { return {}; }
  /// As kernels' `attention` (or its reference) over the rows' caches.
  virtual void attend(std::span<const AttentionQueries> queries, int heads, float scale,
                      KernelForm form) = 0;

 private:
  int kv_heads_;
  int head_dim_;
  KvType type_;
};

/// Work on a device that was queued once and runs again and again, as a CUDA graph.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
  /// Queues all of it.
  virtual void run() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// False where arrays lie in host memory.
  virtual bool on_device() const = 0;
  /// Where the device's work is queued now: the default stream (null) but inside `capture`.
  virtual CudaStream stream() const { return nullptr; }
  /// Runs `queue`, then captures what it queues a second time; it must not wait, upload, download
  /// or hand memory out. Memory that it allocates and gives back belongs to the work, or to
  /// `beside`, which shares it: of the two, one runs at a time. Throws std::logic_error on the
  /// host.
  virtual std::unique_ptr<CapturedWork> capture(const std::function<void()>& queue,
                                                CapturedWork* beside = nullptr);
  /// Waits for all work queued so far; nothing on the host.
  virtual void synchronize() = 0;

  // Memory. Pointers belong to the backend unless called host.
  /// Throws std::runtime_error when there is not enough.
  virtual std::byte* allocate(size_t bytes) = 0;
  virtual void release(std::byte* memory, size_t bytes) noexcept = 0;
  virtual void upload(void* to, const void* host, size_t bytes) = 0;
  /// Waits for the work that `from` depends on.
  virtual void download(void* host, const void* from, size_t bytes) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  virtual void copy(std::span<const CopyJob> jobs) = 0;
  virtual void clear(void* memory, size_t bytes) = 0;
  /// The backend's copy of constants that stay where they are on the host as long as the backend
  /// lives. Null for an empty array.
  virtual const float* constant(const std::vector<float>& host) = 0;

  // Products. With BF16 compute operands are rounded to BF16 where the library multiplies; sums are
  // FP32.
  /// y = x W^T + b for each range of tokens in turn (DESIGN.md section 2, iii); the ranges follow
  /// one another from token 0. x [m, in], y [m, out] contiguous but for x_stride. `w` and `bias`
  /// are the host's. y is rounded to the activation type of the compute type unless `fp32_result`
  /// (logits).
  virtual void linear(const float* x, int64_t x_stride, const WeightView& w,
                      const std::vector<float>& bias, float* y, std::span<const TokenRange> ranges,
                      bool fp32_result = false) = 0;
  /// Products of one input side by side, y [m, sum of the parts' rows] contiguous; otherwise as
  /// above, result rounded.
  virtual void linear(const float* x, int64_t x_stride, std::span<const LinearPart> parts, float* y,
                      std::span<const TokenRange> ranges) = 0;
  /// Products of one input side by side as above for the `tokens` rows of x at once, on a device,
  /// of activations in the compute type's own form: x and y are BF16 codes with BF16 compute, FP32
  /// otherwise; y stays FP32 if `fp32_result`, for one product. Throws std::logic_error on the
  /// host.
  virtual void linear_activations(const void* x, int64_t x_stride,
                                  std::span<const LinearPart> parts, void* y, int64_t tokens,
                                  bool fp32_result = false);
  /// FP32 products in the fixed order for routers: as kernels' `linear`.
  virtual void linear_fp32(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                           float* y) = 0;
  /// All of these, rounded likewise.
  virtual void linear(std::span<const ExpertProducts> products) = 0;

  // Elementwise work, as in kernels/elementwise.h with the backend's arrays.
  virtual void rms_norm(const RmsNorm& norm, const float* x, int64_t x_stride, const float* gate,
                        int64_t gate_stride, float* y, int64_t y_stride, int64_t rows,
                        int64_t cols) = 0;
  virtual void activate(Activation f, const float* x, int64_t x_stride, const float* bias, float* y,
                        int64_t y_stride, int64_t rows, int64_t cols, WeightType activation) = 0;
  virtual void activate_multiply(Activation f, const float* gate, int64_t gate_stride,
                                 float gate_scale, const float* up, int64_t up_stride, float* y,
                                 int64_t y_stride, int64_t rows, int64_t cols,
                                 WeightType activation) = 0;
  virtual void add_scaled(float* y, const float* x, float multiplier, int64_t rows, int64_t cols,
                          WeightType activation) = 0;
  virtual void add_row_scaled(float* y, const float* x, const float* row_scale, int64_t rows,
                              int64_t cols, WeightType activation) = 0;
  virtual void scale(float* x, int64_t stride, float factor, const float* column, int64_t rows,
                     int64_t cols, WeightType activation) = 0;
  virtual void round_to(WeightType type, float* x, int64_t n) = 0;
  virtual void clamp(float* x, int64_t n, float low, float high) = 0;
  virtual void rotary_apply(float* x, int64_t stride, int64_t n, int heads, int head_dim, int dims,
                            const float* cos, const float* sin, WeightType activation) = 0;
  /// slots [tokens, k] and weights [tokens, k] are the backend's; as combine_experts.
  virtual void combine_experts(const int32_t* slots, const float* weights, int k,
                               const float* slot_output, int64_t cols, float* y, int64_t y_stride,
                               int64_t tokens, WeightType activation) = 0;
  /// Rows `ids` (host) of a host weight matrix as FP32 [ids, cols].
  virtual void embed(const WeightView& embedding, std::span<const int32_t> ids, float* out) = 0;
  /// The same with `count` ids of the backend.
  virtual void embed(const WeightView& embedding, const int32_t* ids, int64_t count,
                     float* out) = 0;

  // Recurrent layers.
  virtual void causal_conv(const CausalConv& conv, std::span<const CausalConvRow> rows,
                           KernelForm form) = 0;
  virtual void mamba2_advance(const Mamba2Layer& layer, std::span<StateRow> rows,
                              std::span<const Mamba2Inputs> inputs, AdvanceMode mode,
                              KernelForm form) = 0;
  virtual void mamba2_flush(const Mamba2Layer& layer, std::span<StateRow> rows,
                            std::span<const Mamba2Inputs> inputs, KernelForm form) = 0;
  virtual void gdn_advance(const GdnLayer& layer, std::span<StateRow> rows,
                           std::span<const GdnInputs> inputs, AdvanceMode mode,
                           KernelForm form) = 0;
  virtual void gdn_flush(const GdnLayer& layer, std::span<StateRow> rows,
                         std::span<const GdnInputs> inputs, KernelForm form) = 0;
  /// a (after softplus) and b (after sigmoid) [tokens, heads] to records' scalars [tokens, 2
  /// heads]: decay_log2 = -(a_exp a) log2(e), then beta.
  virtual void gdn_scalars(const float* a, const float* b, const float* a_exp, int64_t tokens,
                           int heads, float* scalars) = 0;
  /// sums[h] += sum over tokens of 2^(values[t, h] factor[h]); factor null: 1. `sums` [heads] FP64
  /// is the backend's.
  virtual void add_decays(const float* values, int64_t stride, const float* factor, int64_t tokens,
                          int heads, double* sums) = 0;

  virtual std::unique_ptr<KvStore> make_kv_store(int kv_heads, int head_dim, KvType type,
                                                 int rows) = 0;
};

/// Host memory and the kernels of kernels/*.h. `fast`: products through LibTorch; `bf16`: their
/// operands in BF16.
std::unique_ptr<Backend> make_host_backend(bool fast, bool bf16);
/// Operations a second of the library's product of two BF16 (or FP32) matrices of 8192 x 8192 on
/// the current GPU, FP32 result. Throws std::runtime_error without a usable GPU.
double device_matrix_rate(bool bf16);
/// One product for each expert that has slots; `bias` gives the backend's copy of a host vector.
std::vector<LinearJob> expert_jobs(
    std::span<const ExpertProducts> products,
    const std::function<const float*(const std::vector<float>&)>& bias);

/// The current GPU. `fast`: cuBLAS and fused attention; otherwise the fixed order of the host's
/// kernels, bit for bit. Throws std::runtime_error without a usable GPU.
std::unique_ptr<Backend> make_cuda_backend(bool fast, bool bf16);

}  // namespace replayeval
