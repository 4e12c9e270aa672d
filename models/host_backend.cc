// The host's backend: the kernels of kernels/*.h on host memory.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numbers>
#include <stdexcept>

#include "kernels/host_memory.h"
#include "models/backend.h"
#include "models/torch_dense.h"

namespace replayeval {
namespace {

/// Fewer copies than this are made by one thread.
constexpr size_t kFewCopies = 48;

class HostKvStore : public KvStore {
 public:
  HostKvStore(int kv_heads, int head_dim, KvType type, int rows)
      : KvStore(kv_heads, head_dim, type) {
    for (int r = 0; r < rows; ++r) caches_.emplace_back(kv_heads, head_dim, type);
  }

  int64_t length(int row) const override { return at(row).length(); }
  size_t bytes(int row) const override { return at(row).bytes(); }
  void reserve(int, int64_t) override {}  // pages never move
  void append(int row, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
              int64_t tokens) override {
    at(row).append(k, k_stride, v, v_stride, tokens);
  }
  void truncate(int row, int64_t length) override { at(row).truncate(length); }
  void copy(int from, int to) override { at(to) = at(from).clone(); }
  void read(int row, int64_t first, int64_t tokens, float* k, float* v) const override {
    at(row).read(first, tokens, k, v);
  }
  void append_host(int row, const float* k, const float* v, int64_t tokens) override {
    const int64_t width = int64_t{kv_heads()} * head_dim();
    at(row).append(k, width, v, width, tokens);
  }
  void attend(std::span<const AttentionQueries> queries, int heads, float scale,
              KernelForm form) override {
    std::vector<AttentionRow> rows;
    for (const AttentionQueries& q : queries) {
      rows.push_back({&at(q.row), q.position, q.tokens, q.q, q.q_stride, q.out, q.out_stride});
    }
    if (form == KernelForm::reference) {
      attention_reference(rows, heads, scale);
    } else {
      attention(rows, heads, scale);
    }
  }

 private:
  KvCache& at(int row) { return caches_[static_cast<size_t>(row)]; }
  const KvCache& at(int row) const { return caches_[static_cast<size_t>(row)]; }
  std::vector<KvCache> caches_;
};

class HostBackend : public Backend {
 public:
  HostBackend(bool fast, bool bf16) : fast_(fast), bf16_(bf16) {}

  bool on_device() const override { return false; }
  void synchronize() override {}

  std::byte* allocate(size_t bytes) override { return take_host_memory(bytes); }
  void release(std::byte* memory, size_t bytes) noexcept override {
    give_host_memory(memory, bytes);
  }
  void upload(void* to, const void* host, size_t bytes) override { copy(to, host, bytes); }
  void download(void* host, const void* from, size_t bytes) override { copy(host, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void copy(std::span<const CopyJob> jobs) override {
#pragma omp parallel for schedule(static) if (jobs.size() > kFewCopies)
    for (size_t i = 0; i < jobs.size(); ++i) {
      const CopyJob& job = jobs[i];
      const size_t bytes = static_cast<size_t>(job.cols) * sizeof(float);
      if (bytes == 0) continue;
      for (int64_t r = 0; r < job.rows; ++r) {
        float* to = job.to + r * job.to_stride;
        if (job.from == nullptr) {
          std::memset(to, 0, bytes);
        } else {
          std::memcpy(to, job.from + r * job.from_stride, bytes);
        }
      }
    }
  }
  void clear(void* memory, size_t bytes) override {
    if (bytes > 0) std::memset(memory, 0, bytes);
  }
  const float* constant(const std::vector<float>& host) override {
    return host.empty() ? nullptr : host.data();
  }

  void linear(const float* x, int64_t x_stride, const WeightView& w, const std::vector<float>& bias,
              float* y, std::span<const TokenRange> ranges, bool fp32_result) override {
    for (const TokenRange& range : ranges) {
      const float* from = x + range.first * x_stride;
      float* to = y + range.first * w.rows;
      if (fast_) {
        torch_linear(from, range.tokens, x_stride, w, constant(bias), to, w.rows,
                     bf16_ && !fp32_result);
      } else {
        replayeval::linear(from, range.tokens, x_stride, w, constant(bias), to, w.rows);
      }
      if (!fp32_result) round_to(activation(), to, range.tokens * w.rows);
    }
  }
  void linear(const float* x, int64_t x_stride, std::span<const LinearPart> parts, float* y,
              std::span<const TokenRange> ranges) override {
    int64_t width = 0;
    for (const LinearPart& part : parts) width += part.w->rows;
    for (const TokenRange& range : ranges) {
      const float* from = x + range.first * x_stride;
      float* to = y + range.first * width;
      std::vector<LinearJob> jobs;
      for (const LinearPart& part : parts) {
        jobs.push_back(
            {from, x_stride, nullptr, range.tokens, *part.w, constant(*part.bias), to, width});
        to += part.w->rows;
      }
      if (fast_) {
        for (const LinearJob& job : jobs) {
          torch_linear(job.x, job.m, job.x_stride, job.w, job.bias, job.y, job.y_stride, bf16_);
        }
      } else {
        replayeval::linear(jobs);
      }
      round_to(activation(), y + range.first * width, range.tokens * width);
    }
  }
  void linear_fp32(const float* x, int64_t m, int64_t x_stride, const WeightView& w,
                   float* y) override {
    replayeval::linear(x, m, x_stride, w, nullptr, y, w.rows);
  }
  void linear(std::span<const ExpertProducts> products) override {
    const std::vector<LinearJob> jobs =
        expert_jobs(products, [&](const std::vector<float>& bias) { return constant(bias); });
    replayeval::linear(jobs);
    if (!bf16_) return;
    for (const LinearJob& job : jobs) round_to(activation(), job.y, job.m * job.w.rows);
  }

  void rms_norm(const RmsNorm& norm, const float* x, int64_t x_stride, const float* gate,
                int64_t gate_stride, float* y, int64_t y_stride, int64_t rows,
                int64_t cols) override {
    replayeval::rms_norm(norm, x, x_stride, gate, gate_stride, y, y_stride, rows, cols);
  }
  void activate(Activation f, const float* x, int64_t x_stride, const float* bias, float* y,
                int64_t y_stride, int64_t rows, int64_t cols, WeightType activation) override {
    replayeval::activate(f, x, x_stride, bias, y, y_stride, rows, cols, activation);
  }
  void activate_multiply(Activation f, const float* gate, int64_t gate_stride, float gate_scale,
                         const float* up, int64_t up_stride, float* y, int64_t y_stride,
                         int64_t rows, int64_t cols, WeightType activation) override {
    replayeval::activate_multiply(f, gate, gate_stride, gate_scale, up, up_stride, y, y_stride,
                                  rows, cols, activation);
  }
  void add_scaled(float* y, const float* x, float multiplier, int64_t rows, int64_t cols,
                  WeightType activation) override {
    replayeval::add_scaled(y, cols, x, cols, multiplier, rows, cols, activation);
  }
  void add_row_scaled(float* y, const float* x, const float* row_scale, int64_t rows, int64_t cols,
                      WeightType activation) override {
    replayeval::add_row_scaled(y, cols, x, cols, row_scale, rows, cols, activation);
  }
  void scale(float* x, int64_t stride, float factor, const float* column, int64_t rows,
             int64_t cols, WeightType activation) override {
    replayeval::scale(x, stride, factor, column, rows, cols, activation);
  }
  void round_to(WeightType type, float* x, int64_t n) override { replayeval::round_to(type, x, n); }
  void clamp(float* x, int64_t n, float low, float high) override {
    for (int64_t i = 0; i < n; ++i) x[i] = std::min(std::max(x[i], low), high);
  }
  void rotary_apply(float* x, int64_t stride, int64_t n, int heads, int head_dim, int dims,
                    const float* cos, const float* sin, WeightType activation) override {
    replayeval::rotary_apply(x, stride, n, heads, head_dim, dims, cos, sin, activation);
  }
  void combine_experts(const int32_t* slots, const float* weights, int k, const float* slot_output,
                       int64_t cols, float* y, int64_t y_stride, int64_t tokens,
                       WeightType activation) override {
    ExpertGroups groups;
    groups.slots.assign(slots, slots + tokens * k);
    groups.weights.assign(weights, weights + tokens * k);
    replayeval::combine_experts(groups, slot_output, cols, y, y_stride, tokens, activation);
  }
  void embed(const WeightView& embedding, std::span<const int32_t> ids, float* out) override {
    embed(embedding, ids.data(), static_cast<int64_t>(ids.size()), out);
  }
  void embed(const WeightView& embedding, const int32_t* ids, int64_t count, float* out) override {
    for (int64_t i = 0; i < count; ++i) widen(embedding, ids[i], out + i * embedding.cols);
  }

  void causal_conv(const CausalConv& conv, std::span<const CausalConvRow> rows,
                   KernelForm form) override {
    replayeval::causal_conv(conv, rows, form);
  }
  void mamba2_advance(const Mamba2Layer& layer, std::span<StateRow> rows,
                      std::span<const Mamba2Inputs> inputs, AdvanceMode mode,
                      KernelForm form) override {
    replayeval::mamba2_advance(layer, rows, inputs, mode, form);
  }
  void mamba2_flush(const Mamba2Layer& layer, std::span<StateRow> rows,
                    std::span<const Mamba2Inputs> inputs, KernelForm form) override {
    replayeval::mamba2_flush(layer, rows, inputs, form);
  }
  void gdn_advance(const GdnLayer& layer, std::span<StateRow> rows,
                   std::span<const GdnInputs> inputs, AdvanceMode mode, KernelForm form) override {
    replayeval::gdn_advance(layer, rows, inputs, mode, form);
  }
  void gdn_flush(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs,
                 KernelForm form) override {
    replayeval::gdn_flush(layer, rows, inputs, form);
  }
  void gdn_scalars(const float* a, const float* b, const float* a_exp, int64_t tokens, int heads,
                   float* scalars) override {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        scalars[2 * t * heads + h] = -(a_exp[h] * a[t * heads + h]) * std::numbers::log2e_v<float>;
        scalars[(2 * t + 1) * heads + h] = b[t * heads + h];
      }
    }
  }
  void add_decays(const float* values, int64_t stride, const float* factor, int64_t tokens,
                  int heads, double* sums) override {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        const float value = values[t * stride + h];
        sums[h] += std::exp2(factor == nullptr ? value : value * factor[h]);
      }
    }
  }

  std::unique_ptr<KvStore> make_kv_store(int kv_heads, int head_dim, KvType type,
                                         int rows) override {
    return std::make_unique<HostKvStore>(kv_heads, head_dim, type, rows);
  }

 private:
  WeightType activation() const { return bf16_ ? WeightType::bf16 : WeightType::fp32; }

  bool fast_;
  bool bf16_;
};

}  // namespace

std::vector<LinearJob> expert_jobs(
    std::span<const ExpertProducts> products,
    const std::function<const float*(const std::vector<float>&)>& bias) {
  std::vector<LinearJob> jobs;
  for (const ExpertProducts& p : products) {
    for (size_t e = 0; e < p.experts.size(); ++e) {
      const int64_t first = p.offsets[e], count = p.offsets[e + 1] - first;
      if (count == 0) continue;
      const WeightView& w = *p.experts[e].w;
      LinearJob job{p.x, p.x_stride, nullptr, count, w, nullptr, p.y + first * w.rows, w.rows};
      if (p.rows != nullptr) {
        job.x_rows = p.rows + first;
      } else {
        job.x += first * p.x_stride;
      }
      if (!p.experts[e].bias->empty()) job.bias = bias(*p.experts[e].bias);
      jobs.push_back(job);
    }
  }
  return jobs;
}

void Backend::linear_activations(const void*, int64_t, std::span<const LinearPart>, void*, int64_t,
                                 bool) {
  throw std::logic_error("backend: the host multiplies FP32 arrays");
}

std::unique_ptr<CapturedWork> Backend::capture(const std::function<void()>&, CapturedWork*) {
  throw std::logic_error("backend: work on the host cannot be captured");
}

Memory::Memory(Backend& backend, size_t bytes)
    : backend_(&backend), data_(backend.allocate(bytes)), bytes_(bytes) {}

Memory::~Memory() {
  if (data_ != nullptr) backend_->release(data_, bytes_);
}

std::unique_ptr<Backend> make_host_backend(bool fast, bool bf16) {
  return std::make_unique<HostBackend>(fast, bf16);
}

}  // namespace replayeval
