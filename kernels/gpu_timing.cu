#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>

#include "kernels/decode_traffic.h"
#include "kernels/gdn_cuda.h"
#include "kernels/gpu_timing.h"
#include "kernels/kl_cuda.h"
#include "kernels/mamba2_cuda.h"
#include "kernels/replay_cuda.cuh"
#include "quant/quantize_cuda.h"

namespace replayeval {
namespace {

__global__ void __launch_bounds__(256) read_once(const float4* from, int64_t count, float* out) {
  float4 sum = make_float4(0, 0, 0, 0);
  const int64_t step = int64_t{gridDim.x} * 256 * 8;
  for (int64_t i = blockIdx.x * int64_t{2048} + threadIdx.x; i < count; i += step) {
    float4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
      v[k] = i + 256 * k < count ? __ldcs(from + i + 256 * k) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum.x += v[k].x, sum.y += v[k].y, sum.z += v[k].z, sum.w += v[k].w;
  }
  const float total = sum.x + sum.y + sum.z + sum.w;
  if (total == 1e38f) *out = total;  // never, but the reads must stay
}

/// Values close to normal: the sum of four uniform ones, standard deviation `scale`.
__global__ void fill_normal(float* x, int64_t count, uint32_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const PhiloxWords w =
        philox4x32<10>(static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), seed, 0, 1, 2);
    float sum = 0.0f;
    for (int k = 0; k < 4; ++k) sum += static_cast<float>(w.word[k] >> 8) * 0x1p-24f - 0.5f;
    x[i] = scale * 1.7320508f * sum;
  }
}

std::vector<float> host_normal(size_t count, uint32_t seed, float scale = 1.0f) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) {
    const PhiloxWords w = philox4x32<10>(static_cast<uint32_t>(i), 7, seed, 0, 1, 2);
    float sum = 0.0f;
    for (uint32_t word : w.word) sum += static_cast<float>(word >> 8) * 0x1p-24f - 0.5f;
    x[i] = round_operand(DotType::bf16, scale * 1.7320508f * sum);
  }
  return x;
}

std::vector<std::byte> as_type(const std::vector<float>& x, RecordType type) {
  const size_t size = type == RecordType::bf16 ? 2 : 4;
  std::vector<std::byte> bytes(x.size() * size);
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t bits = float_bits(x[i]) >> (type == RecordType::bf16 ? 16 : 0);
    std::memcpy(bytes.data() + size * i, &bits, size);
  }
  return bytes;
}

/// `times` copies of a token's values, one behind the other.
std::vector<float> repeated(const std::vector<float>& x, int times) {
  std::vector<float> out;
  for (int i = 0; i < times; ++i) out.insert(out.end(), x.begin(), x.end());
  return out;
}

/// Packed checkpoints of one role of all layers.
struct RoleStates {
  size_t head_stride = 0, row_stride = 0;
  std::vector<DeviceArray<std::byte>> layers;
};

class DecodeBench {
 public:
  explicit DecodeBench(const DecodeWorkload& w)
      : w_(w),
        heads_(w.is_gdn ? w.gdn.value_heads : w.mamba2.heads),
        shape_{w.is_gdn ? w.gdn.value_dim : w.mamba2.head_dim,
               w.is_gdn ? w.gdn.key_dim : w.mamba2.state_dim} {
    // Every step of a row has the same token, which the host can repeat.
    const size_t rows = static_cast<size_t>(w.rows);
    const auto values = [&](size_t width, uint32_t seed) {
      return host_normal(rows * width, seed);
    };
    const int window = w.plan.window;
    for (int r = 0; r < w.rows; ++r) {
      pending_.push_back(w.only_reads                       ? window / 2
                         : w.phases == RowPhases::staggered ? r % window
                         : w.phases == RowPhases::clustered ? r * window / w.rows
                                                            : 0);
      position_.push_back(1000 + pending_.back());
      stream_.push_back(static_cast<uint32_t>(r));
    }
    device_pending_ = DeviceArray<int32_t>(pending_);
    device_position_ = DeviceArray<int64_t>(position_);
    device_stream_ = DeviceArray<uint32_t>(stream_);
    rows_ = {w.rows, device_pending_.data(), device_position_.data(), device_stream_.data()};
    make_states();
    const auto add = [&](const std::vector<float>& x) {
      return inputs_.emplace_back(as_type(x, w.activation)).data();
    };
    const auto add_ring = [&](const std::vector<float>& x, size_t width, RecordType type) {
      std::vector<std::byte> ring;
      const std::vector<std::byte> bytes = as_type(x, type);
      const size_t row = bytes.size() / rows;
      for (size_t r = 0; r < rows; ++r) {
        for (int j = 0; j < window; ++j) {
          ring.insert(ring.end(), bytes.begin() + r * row, bytes.begin() + (r + 1) * row);
        }
      }
      std::vector<std::byte*> each;
      for (int l = 0; l < w.layers; ++l) each.push_back(inputs_.emplace_back(ring).data());
      static_cast<void>(width);
      return each;
    };
    if (!w.is_gdn) {
      const size_t p = static_cast<size_t>(heads_) * shape_.head_dim,
                   n = static_cast<size_t>(w.mamba2.groups) * shape_.state_dim;
      x_ = values(p, 11);
      b_ = values(n, 12);
      c_ = values(n, 13);
      dt_ = values(static_cast<size_t>(heads_), 14);
      for (float& d : dt_) d = 0.02f + 0.05f * std::abs(d);
      for (int h = 0; h < heads_; ++h) {
        decay_.push_back(-0.1f * static_cast<float>(1 << (h % 4)));
        skip_.push_back(0.5f);
      }
      mamba2_step_.activation = w.activation;
      mamba2_step_.x = add(x_);
      mamba2_step_.b = add(b_);
      mamba2_step_.c = add(c_);
      device_dt_ = DeviceArray<float>(dt_);
      mamba2_step_.dt = device_dt_.data();
      mamba2_step_.y = add(x_);
      ring_x_ = add_ring(x_, p, w.activation);
      ring_b_ = add_ring(b_, n, w.activation);
      ring_dt_ = add_ring(dt_, static_cast<size_t>(heads_), RecordType::fp32);
      device_decay_ = DeviceArray<float>(decay_);
      device_skip_ = DeviceArray<float>(skip_);
    } else {
      const size_t k = static_cast<size_t>(w.gdn.key_heads) * shape_.state_dim,
                   v = static_cast<size_t>(heads_) * shape_.head_dim;
      q_ = values(k, 21);
      k_ = values(k, 22);
      v_ = values(v, 23);
      g_ = values(static_cast<size_t>(heads_), 24);
      beta_ = values(static_cast<size_t>(heads_), 25);
      for (float& g : g_) g = -0.05f * std::abs(g) - 0.01f;
      for (float& b : beta_) b = 0.5f + 0.1f * b;
      gdn_step_.activation = w.activation;
      gdn_step_.q = add(q_);
      gdn_step_.k = add(k_);
      gdn_step_.v = add(v_);
      device_g_ = DeviceArray<float>(g_);
      device_beta_ = DeviceArray<float>(beta_);
      gdn_step_.decay_log2 = device_g_.data();
      gdn_step_.beta = device_beta_.data();
      gdn_step_.o = add(v_);
      ring_k_ = add_ring(k_, k, w.activation);
      ring_v_ = add_ring(v_, v, w.activation);
      ring_g_ = add_ring(g_, static_cast<size_t>(heads_), RecordType::fp32);
      ring_beta_ = add_ring(beta_, static_cast<size_t>(heads_), RecordType::fp32);
      // Earlier corrections; the rows that are checked get theirs from the host.
      ring_u_ = add_ring(std::vector<float>(v_.size(), 0.0f), v, w.plan.ring_u);
      for (int r : checked_rows()) {
        std::vector<std::byte> recurrence = rows_of(recurrence_, r), read = rows_of(read_, r);
        const std::vector<std::byte> u = as_type(
            host_tokens(r, pending_[static_cast<size_t>(r)], &recurrence, &read), w.plan.ring_u);
        const size_t ring =
            v * static_cast<size_t>(window) * (w.plan.ring_u == RecordType::bf16 ? 2 : 4);
        if (!u.empty())
          copy_to_device(ring_u_[0] + static_cast<size_t>(r) * ring, u.data(), u.size());
      }
    }
  }

  DecodeTiming run() {
    DecodeTiming timing;
    const std::vector<int> checked = checked_rows();
    for (int r : checked)
      before_.push_back(rows_of(recurrence_, r)), before_read_.push_back(rows_of(read_, r));
    const int window = w_.plan.window;
    // A cycle as a graph: decoding fixed shapes is captured in practice, and a step of one row
    // would else be timed by its launches.
    const CapturedSteps cycle([&](CudaStream stream) {
      for (int i = 0; i < window; ++i) step(stream);
    });
    cycle.run();
    cuda_synchronize();
    CudaTimer timer;
    timer.start();
    for (int i = 0; i < w_.cycles; ++i) cycle.run();
    timing.seconds = timer.stop() / (w_.cycles * window * w_.layers);
    steps_ = (w_.cycles + 1) * window;
    timing.bytes = decode_bytes(w_);
    if (!w_.only_reads) {
      for (size_t i = 0; i < checked.size() && timing.difference.empty(); ++i)
        timing.difference = check(checked[i], i);
    }
    return timing;
  }

 private:
  void make_states() {
    const size_t rows = static_cast<size_t>(w_.rows), count = rows * heads_;
    DeviceArray<float> state(count * static_cast<size_t>(shape_.elements()));
    std::vector<RandomKey> keys(count);
    for (int l = 0; l < w_.layers; ++l) {
      fill_normal<<<4096, 256>>>(state.data(), static_cast<int64_t>(state.size()), 99u + l, 0.5f);
      CUDA_CHECK(cudaGetLastError());
      const auto add = [&](RoleStates* role, const StateCodec& codec) {
        role->head_stride = (packed_bytes(*codec.format, shape_) + 15) / 16 * 16;
        role->row_stride = role->head_stride * heads_;
        role->layers.emplace_back(count * role->head_stride);
        role->layers.back().fill(0);  // rows are copied with what lies between their heads
        encode_heads_cuda({codec.format, Rounding::nearest_even}, shape_, keys, state.data(),
                          nullptr, role->layers.back().data(), role->head_stride, nullptr, 0,
                          nullptr);
        cuda_synchronize();
      };
      add(&recurrence_, w_.plan.recurrence);
      if (w_.plan.read) add(&read_, *w_.plan.read);
    }
  }
  DecodeStates states(int l) const {
    DecodeStates s;
    s.sums_freely = w_.sums_freely;
    s.recurrence = recurrence_.layers[l].data();
    s.head_stride = recurrence_.head_stride;
    s.row_stride = recurrence_.row_stride;
    if (w_.plan.read) {
      s.read = read_.layers[l].data();
      s.read_head_stride = read_.head_stride;
      s.read_row_stride = read_.row_stride;
    }
    return s;
  }
  /// A row's packed heads of layer 0.
  std::vector<std::byte> rows_of(const RoleStates& role, int row) const {
    std::vector<std::byte> bytes(role.row_stride);
    if (!bytes.empty())
      copy_to_host(bytes.data(), role.layers[0].data() + row * role.row_stride, bytes.size());
    return bytes;
  }

  void step(CudaStream stream) {
    for (int l = 0; l < w_.layers; ++l) {
      if (!w_.is_gdn) {
        Mamba2Layer layer = w_.mamba2;
        layer.decay_log2 = device_decay_.data();
        layer.skip = device_skip_.data();
        Mamba2DecodeStep in = mamba2_step_;
        in.ring_x = ring_x_[l];
        in.ring_b = ring_b_[l];
        in.ring_dt = reinterpret_cast<float*>(ring_dt_[l]);
        mamba2_decode_cuda(layer, w_.plan, rows_, states(l), in, stream);
      } else {
        GdnDecodeStep in = gdn_step_;
        in.ring_k = ring_k_[l];
        in.ring_v = ring_v_[l];
        in.ring_u = ring_u_[l];
        in.ring_decay = reinterpret_cast<float*>(ring_g_[l]);
        in.ring_beta = reinterpret_cast<float*>(ring_beta_[l]);
        gdn_decode_cuda(w_.gdn, w_.plan, rows_, states(l), in, stream);
      }
    }
    if (!w_.only_reads) decode_step_cuda(rows_, w_.plan.window, stream);
  }

  std::vector<int> checked_rows() const {
    return w_.rows == 1 ? std::vector<int>{0} : std::vector<int>{0, w_.rows - 1};
  }
  /// A row of layer 0 on the host, `tokens` tokens from an empty ring on; GDN: their corrections.
  std::vector<float> host_tokens(int r, int tokens, std::vector<std::byte>* recurrence,
                                 std::vector<std::byte>* read) const {
    const size_t index = static_cast<size_t>(r);
    StateRow row;
    const std::vector<HeadPlan> plans = {w_.plan};
    int pending = 0;
    row.position = position_[index] - pending_[index];
    row.stream = stream_[index];
    row.plans = plans;
    row.pending = &pending;
    row.recurrence = recurrence->data();
    row.recurrence_stride = recurrence_.head_stride;
    row.read = read->empty() ? nullptr : read->data();
    row.read_stride = read_.head_stride;
    const auto of_row = [&](const std::vector<float>& x) {
      const size_t width = x.size() / static_cast<size_t>(w_.rows);
      return repeated(std::vector<float>(x.begin() + r * width, x.begin() + (r + 1) * width),
                      tokens);
    };
    if (tokens == 0) return {};
    if (!w_.is_gdn) {
      const auto x = of_row(x_), b = of_row(b_), c = of_row(c_), dt = of_row(dt_);
      std::vector<float> y(x.size());
      Mamba2Layer layer = w_.mamba2;
      layer.decay_log2 = decay_.data();
      layer.skip = skip_.data();
      Mamba2Inputs in;
      in.x_stride = in.y_stride = static_cast<int64_t>(x.size()) / tokens;
      in.b_stride = in.c_stride = static_cast<int64_t>(b.size()) / tokens;
      in.dt_stride = heads_;
      in.tokens = tokens;
      in.x = x.data();
      in.b = b.data();
      in.c = c.data();
      in.dt = dt.data();
      in.y = y.data();
      mamba2_advance(layer, {&row, 1}, {&in, 1}, AdvanceMode::commit, KernelForm::fast);
      return {};
    }
    const auto q = of_row(q_), k = of_row(k_), v = of_row(v_), g = of_row(g_), beta = of_row(beta_);
    std::vector<float> o(v.size()), u(v.size(), 0.0f);
    GdnInputs in;
    in.q_stride = in.k_stride = static_cast<int64_t>(k.size()) / tokens;
    in.v_stride = in.o_stride = in.u_stride = static_cast<int64_t>(v.size()) / tokens;
    in.decay_stride = in.beta_stride = heads_;
    in.tokens = tokens;
    in.q = q.data();
    in.k = k.data();
    in.v = v.data();
    in.decay_log2 = g.data();
    in.beta = beta.data();
    in.u = u.data();
    in.o = o.data();
    gdn_advance(w_.gdn, {&row, 1}, {&in, 1}, AdvanceMode::commit, KernelForm::fast);
    return u;
  }
  /// Repeats a row of layer 0 on the host and compares.
  std::string check(int r, size_t index) {
    std::vector<std::byte> recurrence = before_[index], read = before_read_[index];
    host_tokens(r, pending_[static_cast<size_t>(r)] + steps_, &recurrence, &read);
    const std::vector<std::byte> got = rows_of(recurrence_, r), got_read = rows_of(read_, r);
    const auto compare = [&](const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                             const char* role) {
      size_t count = 0;
      for (size_t i = 0; i < a.size(); ++i) count += a[i] != b[i];
      return count == 0 ? std::string()
                        : "row " + std::to_string(r) + ": " + std::to_string(count) + " of " +
                              std::to_string(a.size()) + " bytes of the " + role +
                              " checkpoint differ from the host's";
    };
    const std::string first = compare(got, recurrence, "recurrence");
    return first.empty() ? compare(got_read, read, "read") : first;
  }

  DecodeWorkload w_;
  int heads_;
  StateShape shape_;
  int steps_ = 0;
  std::vector<int32_t> pending_;
  std::vector<int64_t> position_;
  std::vector<uint32_t> stream_;
  DeviceArray<int32_t> device_pending_;
  DeviceArray<int64_t> device_position_;
  DeviceArray<uint32_t> device_stream_;
  DecodeRows rows_;
  RoleStates recurrence_, read_;
  std::deque<DeviceArray<std::byte>> inputs_;
  std::vector<float> x_, b_, c_, dt_, decay_, skip_, q_, k_, v_, g_, beta_;
  DeviceArray<float> device_dt_, device_decay_, device_skip_, device_g_, device_beta_;
  std::vector<std::byte*> ring_x_, ring_b_, ring_dt_, ring_k_, ring_v_, ring_u_, ring_g_,
      ring_beta_;
  Mamba2DecodeStep mamba2_step_;
  GdnDecodeStep gdn_step_;
  std::vector<std::vector<std::byte>> before_, before_read_;
};

}  // namespace

DeviceRates measure_device_rates(size_t bytes) {
  DeviceRates rates;
  DeviceArray<std::byte> a(bytes), b(bytes);
  DeviceArray<float> out(1);
  fill_normal<<<4096, 256>>>(reinterpret_cast<float*>(a.data()), static_cast<int64_t>(bytes / 4), 5,
                             1.0f);
  CUDA_CHECK(cudaGetLastError());
  CudaTimer timer;
  for (int i = 0; i < 6; ++i) {
    timer.start();
    read_once<<<132 * 16, 256>>>(reinterpret_cast<const float4*>(a.data()),
                                 static_cast<int64_t>(bytes / 16), out.data());
    CUDA_CHECK(cudaGetLastError());
    const double read = static_cast<double>(bytes) / timer.stop();
    timer.start();
    CUDA_CHECK(cudaMemcpyAsync(b.data(), a.data(), bytes, cudaMemcpyDeviceToDevice, nullptr));
    const double copy = 2 * static_cast<double>(bytes) / timer.stop();
    if (i > 0) rates = {std::max(rates.read, read), std::max(rates.copy, copy)};
  }
  return rates;
}

double time_chunk(const ChunkWorkload& w) {
  const int heads = w.is_gdn ? w.gdn.value_heads : w.mamba2.heads;
  const StateShape shape{w.is_gdn ? w.gdn.value_dim : w.mamba2.head_dim,
                         w.is_gdn ? w.gdn.key_dim : w.mamba2.state_dim};
  const size_t rows = w.plans.size(), tokens = static_cast<size_t>(w.tokens);
  std::vector<DeviceArray<std::byte>> packed;
  std::vector<std::vector<int>> pending(rows, {0});
  std::vector<StateRow> state_rows(rows);
  std::deque<DeviceArray<float>> arrays;
  uint32_t seed = 100;
  const auto array = [&](size_t width, float scale) {
    arrays.emplace_back(rows * tokens * width);
    fill_normal<<<1024, 256>>>(arrays.back().data(), static_cast<int64_t>(arrays.back().size()),
                               ++seed, scale);
    CUDA_CHECK(cudaGetLastError());
    return arrays.back().data();
  };
  for (size_t r = 0; r < rows; ++r) {
    StateRow& row = state_rows[r];
    row.stream = static_cast<uint32_t>(r);
    row.plans = {&w.plans[r], 1};
    row.pending = pending[r].data();
    const auto zeros = [&](const StateFormat& format, size_t* stride) {
      *stride = (packed_bytes(format, shape) + 15) / 16 * 16;
      packed.emplace_back(*stride * heads);
      packed.back().fill(0);
      return packed.back().data();
    };
    row.recurrence = zeros(*w.plans[r].recurrence.format, &row.recurrence_stride);
    if (w.plans[r].read) row.read = zeros(*w.plans[r].read->format, &row.read_stride);
  }
  std::vector<Mamba2Inputs> mamba2(rows);
  std::vector<GdnInputs> gdn(rows);
  Mamba2Layer layer = w.mamba2;
  const DeviceArray<float> decay(std::vector<float>(static_cast<size_t>(heads), -0.5f));
  layer.decay_log2 = decay.data();
  if (!w.is_gdn) {
    const int64_t p = int64_t{heads} * shape.head_dim,
                  n = int64_t{w.mamba2.groups} * shape.state_dim;
    float *x = array(p, 1), *b = array(n, 1), *c = array(n, 1), *dt = array(heads, 0.05f),
          *y = array(p, 1);
    for (size_t r = 0; r < rows; ++r) {
      const int64_t at = static_cast<int64_t>(r * tokens);
      mamba2[r] = {w.tokens, x + at * p, p, dt + at * heads, heads, b + at * n,
                   n,        c + at * n, n, y + at * p,      p};
    }
  } else {
    const int64_t k = int64_t{w.gdn.key_heads} * shape.state_dim,
                  v = int64_t{heads} * shape.head_dim;
    float *q = array(k, 1), *keys = array(k, 1), *values = array(v, 1), *beta = array(heads, 0.1f),
          *u = array(v, 1), *o = array(v, 1);
    const int64_t width = w.gdn.channel_decay ? int64_t{heads} * shape.state_dim : heads;
    float* g = array(width, 0.02f);
    for (size_t r = 0; r < rows; ++r) {
      const int64_t at = static_cast<int64_t>(r * tokens);
      gdn[r] = {w.tokens, q + at * k,     k,     keys + at * k,     k,     values + at * v,
                v,        g + at * width, width, beta + at * heads, heads, u + at * v,
                v,        o + at * v,     v};
    }
  }
  CudaTimer timer;
  double best = 0;
  for (int i = 0; i <= w.repeats; ++i) {
    timer.start();
    if (w.is_gdn) {
      gdn_advance_cuda(w.gdn, state_rows, gdn, AdvanceMode::commit);
    } else {
      mamba2_advance_cuda(layer, state_rows, mamba2, AdvanceMode::commit);
    }
    const double seconds = timer.stop();
    if (i == 1 || (i > 1 && seconds < best)) best = seconds;
  }
  return best;
}

CodecTiming time_codec(const StateCodec& codec, StateShape shape, int heads, int repeats) {
  const size_t count = static_cast<size_t>(heads),
               stride = (packed_bytes(*codec.format, shape) + 15) / 16 * 16;
  DeviceArray<float> state(count * static_cast<size_t>(shape.elements()));
  DeviceArray<std::byte> packed(count * stride);
  fill_normal<<<4096, 256>>>(state.data(), static_cast<int64_t>(state.size()), 17, 1.0f);
  CUDA_CHECK(cudaGetLastError());
  std::vector<RandomKey> keys(count);
  for (size_t h = 0; h < count; ++h) keys[h].head = static_cast<uint32_t>(h);
  CudaTimer timer;
  CodecTiming best;
  for (int i = 0; i <= repeats; ++i) {
    timer.start();
    encode_heads_cuda(codec, shape, keys, state.data(), nullptr, packed.data(), stride, nullptr, 0,
                      nullptr);
    const double encode = timer.stop();
    timer.start();
    decode_heads_cuda(*codec.format, shape, heads, packed.data(), stride, state.data());
    const double decode = timer.stop();
    if (i == 0) continue;  // starts the kernels
    best.encode = i == 1 ? encode : std::min(best.encode, encode);
    best.decode = i == 1 ? decode : std::min(best.decode, decode);
  }
  return best;
}

double time_kl(int64_t positions, int candidates, int64_t vocabulary, int repeats) {
  const size_t count = static_cast<size_t>(positions * vocabulary);
  DeviceArray<float> reference(count), candidate(count * candidates);
  DeviceArray<KlSums> sums(static_cast<size_t>(positions * candidates));
  fill_normal<<<1024, 256>>>(reference.data(), static_cast<int64_t>(count), 3, 3.0f);
  CUDA_CHECK(cudaGetLastError());
  for (int i = 0; i < candidates; ++i) {
    // Close to the reference, as states are: the same values, and every candidate a little of its
    // own.
    CUDA_CHECK(cudaMemcpy(candidate.data() + i * count, reference.data(), count * sizeof(float),
                          cudaMemcpyDeviceToDevice));
    fill_normal<<<64, 256>>>(candidate.data() + i * count, static_cast<int64_t>(count / 50), 4u + i,
                             3.0f);
    CUDA_CHECK(cudaGetLastError());
  }
  KlSlice slice;
  slice.positions = positions;
  slice.candidates = candidates;
  slice.tokens = vocabulary;
  slice.reference = reference.data();
  slice.candidate = candidate.data();
  slice.reference_stride = slice.candidate_stride = vocabulary;
  slice.candidate_stride_rows = positions;
  CudaTimer timer;
  double best = 0;
  for (int i = 0; i <= repeats; ++i) {
    kl_begin_cuda(sums.data(), positions * candidates);
    timer.start();
    kl_add_cuda(slice, sums.data());
    const double seconds = timer.stop();
    if (i == 1 || (i > 1 && seconds < best)) best = seconds;
  }
  return best;
}

DecodeTiming time_decode(const DecodeWorkload& workload) { return DecodeBench(workload).run(); }

}  // namespace replayeval
