// Single-token decoding with the ring on the device: outputs and checkpoints are those of the
// host's kernels, one token a call, for rows at different places of their windows.
#include <doctest/doctest.h>

#include <cmath>

#include "kernels/decode_cuda.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

std::vector<std::byte> as_type(const std::vector<float>& x, RecordType type) {
  std::vector<std::byte> bytes(x.size() * (type == RecordType::bf16 ? 2 : 4));
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t bits = float_bits(x[i]);
    const uint16_t half = static_cast<uint16_t>(bits >> 16);
    if (type == RecordType::bf16) {
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    } else {
      std::memcpy(bytes.data() + 4 * i, &bits, 4);
    }
  }
  return bytes;
}
std::vector<float> from_type(const std::vector<std::byte>& bytes, RecordType type) {
  const size_t size = type == RecordType::bf16 ? 2 : 4;
  std::vector<float> x(bytes.size() / size);
  for (size_t i = 0; i < x.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<std::byte*>(&bits) + (4 - size), bytes.data() + size * i, size);
    x[i] = bits_float(bits);
  }
  return x;
}

/// [rows, tokens, width] on the host, values of the activation type.
struct Stream {
  int rows, tokens, width;
  std::vector<float> values;
  Stream(int rows, int tokens, int width) : rows(rows), tokens(tokens), width(width) {
    values.resize(static_cast<size_t>(rows) * tokens * width);
  }
  float* at(int row, int token) {
    return values.data() + (static_cast<size_t>(row) * tokens + token) * width;
  }
  /// Token first[row] + t of every row.
  std::vector<float> slice(const std::vector<int>& token) {
    std::vector<float> out;
    for (int r = 0; r < rows; ++r) out.insert(out.end(), at(r, token[r]), at(r, token[r]) + width);
    return out;
  }
  /// Records 0 .. pending - 1 of every row as a ring [rows, window, width], the rest NaN.
  std::vector<float> ring(const std::vector<int>& pending, int window) {
    std::vector<float> out;
    for (int r = 0; r < rows; ++r) {
      out.insert(out.end(), at(r, 0), at(r, 0) + pending[r] * width);
      out.insert(out.end(), static_cast<size_t>(window - pending[r]) * width, NAN);
    }
    return out;
  }
};

struct Sizes {
  int heads, groups, head_dim, state_dim;
};

/// Neighbouring rows, `together` of them at a time, are at the same place of their windows.
/// `infinite`: a number of row 0's fourth token is (GDN). `freely`: outputs need not have the bits
/// of the host, but its numbers.
struct Case {
  int rows = 5, together = 1;
  bool infinite = false, streamed = false, freely = false;
};

/// Empty where FP32 outputs differ by what other orders of sums give: rms 2e-6 of the numbers' rms,
/// one number 2e-5 of it. BF16 outputs: one in 200 rounds to a neighbour.
std::string far_floats(const std::vector<float>& got, const std::vector<float>& want,
                       RecordType type) {
  double squares = 0, errors = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - want[i]);
    squares += static_cast<double>(want[i]) * want[i];
    errors += error * error;
    largest = std::max(largest, error);
  }
  const double count = static_cast<double>(want.size()), rms = std::sqrt(squares / count);
  size_t differ = 0, far = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double rounding = std::ldexp(std::max(std::abs(got[i]), std::abs(want[i])), -7);
    differ += got[i] != want[i] ? 1 : 0;
    far += std::abs(static_cast<double>(got[i]) - want[i]) > rounding + 2e-5 * rms ? 1 : 0;
  }
  const bool close = type == RecordType::fp32
                         ? std::sqrt(errors / count) <= 2e-6 * rms && largest <= 2e-5 * rms
                         : far == 0 && static_cast<double>(differ) <= 0.005 * count;
  if (close) return {};
  std::ostringstream text;
  text << "rms of the errors " << std::sqrt(errors / count) << ", the largest " << largest
       << ", of numbers with rms " << rms << "; " << differ << " of " << want.size() << " differ, "
       << far << " by more than a rounding";
  return text.str();
}

void compare_mamba2(Sizes sizes, const HeadPlan& plan, RecordType type, const Case& how = {}) {
  constexpr int kSteps = 23;
  const int row_count = how.rows, together = how.together;
  const int window = plan.window, tokens = kSteps + window;
  const StateShape shape{sizes.head_dim, sizes.state_dim};
  std::mt19937 random(81);
  Stream x(row_count, tokens, sizes.heads * sizes.head_dim),
      b(row_count, tokens, sizes.groups * sizes.state_dim),
      c(row_count, tokens, sizes.groups * sizes.state_dim), dt(row_count, tokens, sizes.heads),
      y(row_count, tokens, sizes.heads * sizes.head_dim);
  for (Stream* s : {&x, &b, &c}) {
    for (float& v : s->values) v = bf16_normal(&random);
  }
  std::uniform_real_distribution<float> step(0.01f, 1.0f);
  for (float& v : dt.values) v = step(random);
  std::vector<float> decay, skip;
  for (int h = 0; h < sizes.heads; ++h) {
    decay.push_back(-0.02f * static_cast<float>(1 << (2 * (h % 4))));
    skip.push_back(0.5f + 0.25f * static_cast<float>(h));
  }
  Mamba2Layer layer;
  layer.heads = sizes.heads;
  layer.groups = sizes.groups;
  layer.head_dim = sizes.head_dim;
  layer.state_dim = sizes.state_dim;
  layer.layer = 5;
  layer.head_offset = 3;
  layer.decay_log2 = decay.data();
  layer.skip = skip.data();

  // Rows start at different cursors; the host has walked the earlier tokens.
  std::deque<RowPair> rows;
  std::vector<int> pending, done;
  std::vector<std::byte> recurrence, read;
  std::vector<uint32_t> streams;
  const auto host_step = [&](int r, int count) {
    StateRow row = rows[r].host();
    Mamba2Inputs in;
    in.tokens = count;
    in.x = x.at(r, done[r]);
    in.b = b.at(r, done[r]);
    in.c = c.at(r, done[r]);
    in.dt = dt.at(r, done[r]);
    in.y = y.at(r, done[r]);
    in.x_stride = in.y_stride = x.width;
    in.b_stride = in.c_stride = b.width;
    in.dt_stride = dt.width;
    mamba2_advance(layer, {&row, 1}, {&in, 1}, AdvanceMode::commit, KernelForm::fast);
    rows[r].move(count);
    done[r] += count;
  };
  for (int r = 0; r < row_count; ++r) {
    rows.emplace_back(shape, sizes.heads, std::vector<HeadPlan>{plan}, std::vector<uint8_t>{},
                      40u + r, &random);
    streams.push_back(40u + r);
    recurrence.insert(recurrence.end(), rows[r].recurrence().begin(), rows[r].recurrence().end());
    read.insert(read.end(), rows[r].read().begin(), rows[r].read().end());
    pending.push_back(r / together * 3 % window);
    done.push_back(0);
    if (pending[r] > 0) host_step(r, pending[r]);
  }
  const DeviceArray<std::byte> device_recurrence(recurrence), device_read(read),
      ring_x(as_type(x.ring(pending, window), type)),
      ring_b(as_type(b.ring(pending, window), type));
  const DeviceArray<float> ring_dt(dt.ring(pending, window)), device_decay(decay),
      device_skip(skip);
  std::vector<int64_t> positions;
  for (int r = 0; r < row_count; ++r) positions.push_back(1000 + pending[r]);
  const DeviceArray<int32_t> device_pending(std::vector<int32_t>(pending.begin(), pending.end()));
  const DeviceArray<int64_t> device_position(positions);
  const DeviceArray<uint32_t> device_stream(streams);
  const DeviceArray<HeadHealth> health(
      std::vector<HeadHealth>(static_cast<size_t>(row_count) * sizes.heads));
  Mamba2Layer device_layer = layer;
  device_layer.decay_log2 = device_decay.data();
  device_layer.skip = device_skip.data();
  const DecodeRows device_rows{row_count, device_pending.data(), device_position.data(),
                               device_stream.data()};
  DecodeStates states;
  states.streamed = how.streamed;
  states.sums_freely = how.freely;
  states.recurrence = device_recurrence.data();
  states.head_stride = rows[0].stride();
  states.row_stride = rows[0].recurrence().size();
  states.read = device_read.data();
  states.read_head_stride = rows[0].read_stride();
  states.read_row_stride = rows[0].read().size();
  states.health = health.data();
  for (int t = 0; t < kSteps; ++t) {
    const DeviceArray<std::byte> device_x(as_type(x.slice(done), type)),
        device_b(as_type(b.slice(done), type)), device_c(as_type(c.slice(done), type)),
        device_y(std::vector<std::byte>(device_x.size(), std::byte{0x7F}));
    const DeviceArray<float> device_dt(dt.slice(done));
    Mamba2DecodeStep in;
    in.activation = type;
    in.x = device_x.data();
    in.b = device_b.data();
    in.c = device_c.data();
    in.dt = device_dt.data();
    in.y = device_y.data();
    in.ring_x = ring_x.data();
    in.ring_b = ring_b.data();
    in.ring_dt = ring_dt.data();
    mamba2_decode_cuda(device_layer, plan, device_rows, states, in);
    decode_step_cuda(device_rows, window);
    const std::vector<int> before = done;
    for (int r = 0; r < row_count; ++r) host_step(r, 1);
    std::vector<float> want = y.slice(before);
    if (type == RecordType::bf16) {
      for (float& v : want) v = round_operand(DotType::bf16, v);
    }
    INFO("step " << t);
    const std::vector<float> got = from_type(device_y.get(), type);
    if (how.freely) {
      CHECK(far_floats(got, want, type) == "");
    } else {
      CHECK(different_floats(got, want) == "");
    }
  }
  std::vector<std::byte> want_recurrence, want_read;
  const std::vector<HeadHealth> got = health.get();
  for (int r = 0; r < row_count; ++r) {
    want_recurrence.insert(want_recurrence.end(), rows[r].recurrence().begin(),
                           rows[r].recurrence().end());
    want_read.insert(want_read.end(), rows[r].read().begin(), rows[r].read().end());
    for (int h = 0; h < sizes.heads; ++h) {
      CHECK(got[r * sizes.heads + h].encode.elements == rows[r].health()[h].encode.elements);
      CHECK(got[r * sizes.heads + h].encode.clipped == rows[r].health()[h].encode.clipped);
      CHECK(got[r * sizes.heads + h].encode.non_finite == rows[r].health()[h].encode.non_finite);
    }
  }
  CHECK(different_bytes(device_recurrence.get(), want_recurrence) == "");
  CHECK(different_bytes(device_read.get(), want_read) == "");
}

template <class... Arrays>
std::vector<std::byte> bytes_of(const Arrays&... arrays) {
  std::vector<std::byte> all;
  const auto add = [&](const auto& array) {
    const auto values = array.get();
    const auto* from = reinterpret_cast<const std::byte*>(values.data());
    all.insert(all.end(), from, from + values.size() * sizeof(values[0]));
  };
  (add(arrays), ...);
  return all;
}

struct GdnSizes {
  int key_heads, value_heads, value_dim, key_dim;
};

/// As compare_mamba2.
void compare_gdn(GdnSizes sizes, const HeadPlan& plan, RecordType type, const Case& how = {}) {
  constexpr int kSteps = 23;
  const int row_count = how.rows, together = how.together;
  const int window = plan.window, tokens = kSteps + window;
  const StateShape shape{sizes.value_dim, sizes.key_dim};
  std::mt19937 random(91);
  Stream q(row_count, tokens, sizes.key_heads * sizes.key_dim),
      k(row_count, tokens, sizes.key_heads * sizes.key_dim),
      v(row_count, tokens, sizes.value_heads * sizes.value_dim),
      g(row_count, tokens, sizes.value_heads), beta(row_count, tokens, sizes.value_heads),
      u(row_count, tokens, v.width), o(row_count, tokens, v.width);
  for (Stream* s : {&q, &k, &v}) {
    for (float& x : s->values) x = bf16_normal(&random);
  }
  std::uniform_real_distribution<float> unit(0.0f, 1.0f);
  if (how.infinite) v.at(0, 3)[1] = INFINITY;
  for (float& x : g.values) x = -std::exp(6.0f * unit(random) - 5.0f);
  for (float& x : beta.values) x = unit(random);
  GdnLayer layer;
  layer.key_heads = sizes.key_heads;
  layer.value_heads = sizes.value_heads;
  layer.key_dim = sizes.key_dim;
  layer.value_dim = sizes.value_dim;
  layer.layer = 4;
  layer.head_offset = 2;

  std::deque<RowPair> rows;
  std::vector<int> pending, done;
  std::vector<std::byte> recurrence, read;
  std::vector<uint32_t> streams;
  const auto host_step = [&](int r, int count) {
    StateRow row = rows[r].host();
    GdnInputs in;
    in.tokens = count;
    in.q = q.at(r, done[r]);
    in.k = k.at(r, done[r]);
    in.v = v.at(r, done[r]);
    in.decay_log2 = g.at(r, done[r]);
    in.beta = beta.at(r, done[r]);
    in.u = u.at(r, done[r]);
    in.o = o.at(r, done[r]);
    in.q_stride = in.k_stride = k.width;
    in.v_stride = in.u_stride = in.o_stride = v.width;
    in.decay_stride = in.beta_stride = g.width;
    gdn_advance(layer, {&row, 1}, {&in, 1}, AdvanceMode::commit, KernelForm::fast);
    rows[r].move(count);
    done[r] += count;
  };
  for (int r = 0; r < row_count; ++r) {
    rows.emplace_back(shape, sizes.value_heads, std::vector<HeadPlan>{plan}, std::vector<uint8_t>{},
                      40u + r, &random, 0.1f);
    streams.push_back(40u + r);
    recurrence.insert(recurrence.end(), rows[r].recurrence().begin(), rows[r].recurrence().end());
    read.insert(read.end(), rows[r].read().begin(), rows[r].read().end());
    pending.push_back(r / together * 3 % window);
    done.push_back(0);
    if (pending[r] > 0) host_step(r, pending[r]);
  }
  const DeviceArray<std::byte> device_recurrence(recurrence), device_read(read),
      ring_k(as_type(k.ring(pending, window), type)),
      ring_v(as_type(v.ring(pending, window), type)),
      ring_u(as_type(u.ring(pending, window), plan.ring_u));
  const DeviceArray<float> ring_g(g.ring(pending, window)), ring_beta(beta.ring(pending, window));
  std::vector<int64_t> positions;
  for (int r = 0; r < row_count; ++r) positions.push_back(1000 + pending[r]);
  const DeviceArray<int32_t> device_pending(std::vector<int32_t>(pending.begin(), pending.end()));
  const DeviceArray<int64_t> device_position(positions);
  const DeviceArray<uint32_t> device_stream(streams);
  const DeviceArray<HeadHealth> health(
      std::vector<HeadHealth>(static_cast<size_t>(row_count) * sizes.value_heads));
  const DecodeRows device_rows{row_count, device_pending.data(), device_position.data(),
                               device_stream.data()};
  DecodeStates states;
  states.streamed = how.streamed;
  states.sums_freely = how.freely;
  states.recurrence = device_recurrence.data();
  states.head_stride = rows[0].stride();
  states.row_stride = rows[0].recurrence().size();
  states.read = device_read.data();
  states.read_head_stride = rows[0].read_stride();
  states.read_row_stride = rows[0].read().size();
  states.health = health.data();
  for (int t = 0; t < kSteps; ++t) {
    const DeviceArray<std::byte> device_q(as_type(q.slice(done), type)),
        device_k(as_type(k.slice(done), type)), device_v(as_type(v.slice(done), type)),
        device_o(std::vector<std::byte>(device_v.size(), std::byte{0x7F}));
    const DeviceArray<float> device_g(g.slice(done)), device_beta(beta.slice(done));
    GdnDecodeStep in;
    in.activation = type;
    in.q = device_q.data();
    in.k = device_k.data();
    in.v = device_v.data();
    in.decay_log2 = device_g.data();
    in.beta = device_beta.data();
    in.o = device_o.data();
    in.ring_k = ring_k.data();
    in.ring_v = ring_v.data();
    in.ring_u = ring_u.data();
    in.ring_decay = ring_g.data();
    in.ring_beta = ring_beta.data();
    gdn_decode_cuda(layer, plan, device_rows, states, in);
    decode_step_cuda(device_rows, window);
    const std::vector<int> before = done;
    for (int r = 0; r < row_count; ++r) host_step(r, 1);
    std::vector<float> want = o.slice(before);
    if (type == RecordType::bf16) {
      for (float& x : want) x = round_operand(DotType::bf16, x);
    }
    INFO("step " << t);
    const std::vector<float> got = from_type(device_o.get(), type);
    if (how.freely) {
      CHECK(far_floats(got, want, type) == "");
    } else {
      CHECK(different_floats(got, want) == "");
    }
  }
  std::vector<std::byte> want_recurrence, want_read;
  const std::vector<HeadHealth> got = health.get();
  for (int r = 0; r < row_count; ++r) {
    want_recurrence.insert(want_recurrence.end(), rows[r].recurrence().begin(),
                           rows[r].recurrence().end());
    want_read.insert(want_read.end(), rows[r].read().begin(), rows[r].read().end());
    for (int h = 0; h < sizes.value_heads; ++h) {
      const HeadHealth &own = got[r * sizes.value_heads + h], &host = rows[r].health()[h];
      CHECK(own.encode.elements == host.encode.elements);
      CHECK(own.encode.clipped == host.encode.clipped);
      CHECK(own.encode.saturated == host.encode.saturated);
      CHECK(own.encode.non_finite == host.encode.non_finite);
      CHECK(own.first_non_finite_position == host.first_non_finite_position);
    }
  }
  CHECK(different_bytes(device_recurrence.get(), want_recurrence) == "");
  CHECK(different_bytes(device_read.get(), want_read) == "");
}

}  // namespace

/// Adds plans with 4-bit elements other than NVFP4's under its scales: floats, integers, values in
/// fixed point and values that are not.
void add_narrow_elements(std::vector<HeadPlan>* plans) {
  for (const char* element :
       {"{exponent: 1, mantissa: 2}", "{exponent: 3, mantissa: 0}", "int4",
        "{integer: {from: 0, to: 15}}",
        "{values: [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]}",
        "{values: [-0.0625, -0.03125, -0.015625, -0.0009765625, 0, 0.0009765625, 0.0615234375]}",
        "{values: [-6.5, -4, -3, -2, -1.5, -1, -0.03125, 0, 0.5, 1, 1.5, 2, 3, 4, 6]}"}) {
    const auto format =
        parse_format(std::string("element: ") + element +
                         "\nscale: {format: e4m3, block: 16}\nouter: {span: head}\n",
                     "test", ".", element);
    plans->push_back(plan_of("fp16+sr", 8));
    plans->back().read = StateCodec{format, Rounding::nearest_even};
    plans->push_back(plan_of("fp16", 16));
    plans->back().recurrence = {format, Rounding::stochastic};
  }
}

TEST_CASE("gpu: mamba2 decode with the ring on the device has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  std::vector<HeadPlan> plans;
  for (const char* name :
       {"fp32", "fp16+sr", "fp8+sr", "nvfp4+sr", "fp16+sr|nvfp4", "fp32|nvfp4+sr", "mxfp4|mxfp8",
        "int8+sr|bf16", "formats/nf4.yaml", "fp32|fp32"}) {
    for (int window : {1, 8, 16}) plans.push_back(plan_of(name, window));
  }
  plans.push_back(plan_of("fp16+sr|nvfp4", 8));
  plans.back().flush_output = FlushOutput::read;
  plans.push_back(plan_of("fp32", 8));
  plans.back().flush_output = FlushOutput::read;
  plans.push_back(plan_of("fp32", 8));
  plans.back().dot = DotType::bf16;
  add_narrow_elements(&plans);
  for (const HeadPlan& plan : plans) {
    for (Sizes sizes :
         {Sizes{4, 2, 80, 128}, Sizes{2, 1, 64, 64}, Sizes{2, 2, 128, 256}, Sizes{2, 1, 32, 48}}) {
      for (RecordType type : {RecordType::bf16, RecordType::fp32}) {
        if (type == RecordType::fp32 && sizes.head_dim != 80) continue;
        INFO(plan.recurrence.format->name
             << " / " << (plan.read ? plan.read->format->name : "shared") << ", L " << plan.window
             << ", [" << sizes.head_dim << ", " << sizes.state_dim << "]");
        try {
          check_shape(*plan.recurrence.format, {sizes.head_dim, sizes.state_dim});
          if (plan.read) check_shape(*plan.read->format, {sizes.head_dim, sizes.state_dim});
        } catch (const std::invalid_argument&) {
          continue;
        }
        compare_mamba2(sizes, plan, type);
      }
    }
  }
}

TEST_CASE("gpu: gdn decode with the ring on the device has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  std::vector<HeadPlan> plans;
  for (const char* name :
       {"fp32", "fp16+sr", "fp8+sr", "nvfp4+sr", "fp16+sr|nvfp4", "fp32|nvfp4+sr", "mxfp4|mxfp8",
        "int8+sr|bf16", "formats/nf4.yaml", "fp32|fp32"}) {
    for (int window : {1, 8, 16}) plans.push_back(plan_of(name, window));
  }
  plans.push_back(plan_of("fp16+sr|nvfp4", 8));
  plans.back().flush_output = FlushOutput::read;
  plans.back().gdn_fold = GdnFold::cached;
  plans.push_back(plan_of("fp32", 1));
  plans.back().flush_output = FlushOutput::read;
  plans.push_back(plan_of("fp32", 8));
  plans.back().ring_u = RecordType::bf16;
  plans.back().beta = RecordType::bf16;
  plans.push_back(plan_of("fp16+sr|fp8", 8));
  plans.back().gdn_fold = GdnFold::cached;
  plans.back().dot = DotType::tf32;
  add_narrow_elements(&plans);
  for (const HeadPlan& plan : plans) {
    for (GdnSizes sizes :
         {GdnSizes{2, 4, 128, 128}, GdnSizes{1, 2, 64, 64}, GdnSizes{1, 1, 32, 48}}) {
      for (RecordType type : {RecordType::bf16, RecordType::fp32}) {
        if (type == RecordType::fp32 && sizes.value_dim != 128) continue;
        INFO(plan.recurrence.format->name
             << " / " << (plan.read ? plan.read->format->name : "shared") << ", L " << plan.window
             << ", [" << sizes.value_dim << ", " << sizes.key_dim << "]");
        try {
          check_shape(*plan.recurrence.format, {sizes.value_dim, sizes.key_dim});
          if (plan.read) check_shape(*plan.read->format, {sizes.value_dim, sizes.key_dim});
        } catch (const std::invalid_argument&) {
          continue;
        }
        compare_gdn(sizes, plan, type);
      }
    }
  }
}

// Checkpoints are the host's where no read goes into them.
TEST_CASE("gpu: decode steps that sum freely give the numbers of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  std::vector<HeadPlan> plans;
  for (int window : {1, 8, 16}) plans.push_back(plan_of("fp16+sr|nvfp4", window));
  plans.push_back(plan_of("fp16+sr|nvfp4", 8));
  plans.back().flush_output = FlushOutput::read;
  plans.push_back(plan_of("nvfp4+sr", 16));
  add_narrow_elements(&plans);
  for (const char* name : {"nf4", "tiny"}) {
    const std::string values =
        std::string(name) == "nf4"
            ? "[-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, "
              "0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, "
              "1.0]"
            : "[-1.0, -0.5, -1e-4, 0, 3e-9, 0.01, 0.3333333, 0.8]";
    plans.push_back(plan_of("fp16+sr", 8));
    plans.back().read =
        StateCodec{parse_format("element: {values: " + values +
                                    "}\nscale: {format: e4m3, block: 16}\nouter: {span: head}\n",
                                "test", ".", name),
                   Rounding::nearest_even};
  }
  for (const HeadPlan& plan : plans) {
    for (RecordType type : {RecordType::bf16, RecordType::fp32}) {
      for (int n : {64, 128, 256}) {
        INFO(plan.recurrence.format->name
             << " / " << (plan.read ? plan.read->format->name : "shared") << ", L " << plan.window
             << ", rows of " << n << (type == RecordType::bf16 ? ", BF16" : ", FP32"));
        compare_mamba2({6, 2, 40, n}, plan, type, {.freely = true});
        compare_gdn({2, 4, 64, n}, plan, type, {.freely = true});
        if (n == 64) compare_gdn({1, 16, 32, n}, plan, type, {.freely = true});
      }
    }
  }
}

// The kernels for few FP32 checkpoints and those for many, of which the tests above have only few.
TEST_CASE("gpu: mamba2 decode of few FP32 checkpoints has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  int rows = 1;
  for (Sizes sizes :
       {Sizes{3, 3, 8, 128}, Sizes{2, 1, 56, 64}, Sizes{6, 2, 64, 128}, Sizes{4, 2, 72, 256},
        Sizes{4, 4, 80, 128}, Sizes{3, 1, 96, 64}, Sizes{2, 1, 128, 128}, Sizes{2, 2, 256, 256},
        Sizes{2, 1, 88, 256}, Sizes{2, 2, 8, 256}}) {
    for (int window : {1, 2, 5, 16, 17, 31, 32, 33}) {
      for (RecordType type : {RecordType::bf16, RecordType::fp32}) {
        INFO("[" << sizes.head_dim << ", " << sizes.state_dim << "], L " << window << ", " << rows
                 << " rows");
        compare_mamba2(sizes, plan_of("fp32", window), type, {.rows = rows});
        rows = rows % 3 + 1;
      }
    }
  }
}

/// FP32 checkpoints with corrections in the ring as FP32, or in BF16 and folded as they are there.
HeadPlan gdn_plan(int window, RecordType ring_u) {
  HeadPlan plan = plan_of("fp32", window);
  plan.ring_u = plan.beta = ring_u;
  if (ring_u == RecordType::bf16) plan.gdn_fold = GdnFold::cached;
  return plan;
}

TEST_CASE("gpu: gdn decode of few FP32 checkpoints has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  int rows = 1;
  for (GdnSizes sizes : {GdnSizes{2, 4, 128, 128}, GdnSizes{3, 3, 32, 64}, GdnSizes{1, 3, 96, 256},
                         GdnSizes{1, 8, 64, 128}, GdnSizes{2, 2, 256, 64}, GdnSizes{1, 2, 48, 128},
                         GdnSizes{1, 1, 16, 64}}) {
    for (int window : {1, 2, 5, 16, 17, 31, 32, 33}) {
      for (RecordType type : {RecordType::bf16, RecordType::fp32}) {
        for (RecordType ring_u : {RecordType::bf16, RecordType::fp32}) {
          INFO("[" << sizes.value_dim << ", " << sizes.key_dim << "], L " << window << ", " << rows
                   << " rows");
          compare_gdn(sizes, gdn_plan(window, ring_u), type, {.rows = rows});
          rows = rows % 3 + 1;
        }
      }
    }
  }
}

/// Rows of more than kFewGdnBytes: several tiles for every warp of a GPU.
int many_rows(int heads, int head_dim, int state_dim) {
  return static_cast<int>((int64_t{32} << 20) / (int64_t{heads} * head_dim * state_dim * 4)) + 1;
}
const std::pair<int, RecordType> kManyRowsWindows[] = {
    {1, RecordType::fp32}, {7, RecordType::bf16}, {16, RecordType::bf16}, {16, RecordType::fp32}};

TEST_CASE("gpu: mamba2 decode of many FP32 checkpoints has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  for (Sizes sizes : {Sizes{16, 2, 80, 128}, Sizes{8, 8, 64, 64}, Sizes{6, 2, 128, 256}}) {
    for (const auto& [window, type] : kManyRowsWindows) {
      INFO("[" << sizes.head_dim << ", " << sizes.state_dim << "], L " << window);
      compare_mamba2(
          sizes, plan_of("fp32", window), type,
          {.rows = many_rows(sizes.heads, sizes.head_dim, sizes.state_dim), .streamed = true});
    }
  }
}

TEST_CASE("gpu: gdn decode of many FP32 checkpoints has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  for (GdnSizes sizes :
       {GdnSizes{8, 16, 128, 128}, GdnSizes{4, 12, 96, 64}, GdnSizes{2, 4, 128, 256},
        GdnSizes{4, 8, 48, 128}, GdnSizes{1, 16, 32, 64}}) {
    for (const auto& [window, type] : kManyRowsWindows) {
      INFO("[" << sizes.value_dim << ", " << sizes.key_dim << "], L " << window);
      compare_gdn(sizes, gdn_plan(window, window == 7 ? RecordType::bf16 : RecordType::fp32), type,
                  {.rows = many_rows(sizes.value_heads, sizes.value_dim, sizes.key_dim)});
    }
  }
}

// Several passes over the rows of a launch, two launches, and several units for every block, which
// so uses each of its places more than once.
TEST_CASE("gpu: decode of a thousand rows has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  for (const char* name : {"fp32", "fp16+sr|nvfp4"}) {
    for (int window : {5, 64}) {
      for (bool freely : {false, true}) {
        if (freely && std::string(name) == "fp32") continue;
        INFO(name << ", L " << window << (freely ? ", sums freely" : ""));
        const Case how = {.rows = 1100, .streamed = true, .freely = freely};
        compare_mamba2({1, 1, 8, 64}, plan_of(name, window), RecordType::bf16, how);
        compare_gdn({1, 1, 32, 64}, plan_of(name, window), RecordType::bf16, how);
      }
    }
  }
}

// The kernels that encode with a head's matrix in registers: value rows from a few to several warps
// of them, corrections of the ring that are taken, made again, or kept in BF16.
TEST_CASE("gpu: gdn flush of encoded checkpoints has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(17);
  const auto one_of = [&](auto... all) {
    const std::common_type_t<decltype(all)...> list[] = {all...};
    return list[random() % sizeof...(all)];
  };
  for (const char* name :
       {"fp16+sr", "fp16+sr|nvfp4", "nvfp4+sr", "nvfp4|nvfp4+sr", "fp8+sr", "fp8|fp8_e4m3+sr",
        "bf16", "bf16+sr|fp16", "fp32|nvfp4", "int8+sr", "mxfp4|mxfp8", "formats/e3m2_block32.yaml",
        "formats/int4_block32.yaml"}) {
    for (GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
      for (RecordType ring_u : {RecordType::fp32, RecordType::bf16}) {
        for (int draw = 0; draw < 4; ++draw) {
          HeadPlan plan = plan_of(name, one_of(1, 2, 5, 16, 16));
          plan.gdn_fold = fold;
          plan.ring_u = ring_u;
          plan.beta = one_of(RecordType::fp32, RecordType::bf16);
          plan.flush_output = one_of(FlushOutput::recurrence, FlushOutput::read);
          const GdnSizes sizes =
              one_of(GdnSizes{2, 4, 128, 128}, GdnSizes{1, 2, 32, 128}, GdnSizes{2, 2, 40, 128},
                     GdnSizes{1, 1, 96, 128}, GdnSizes{1, 3, 256, 128});
          const int rows = one_of(1, 2, 3, 40);
          INFO(name << ", fold " << static_cast<int>(fold) << ", u " << static_cast<int>(ring_u)
                    << ", output " << static_cast<int>(plan.flush_output) << ", L " << plan.window
                    << ", " << sizes.value_dim << " value rows, " << rows << " rows");
          compare_gdn(sizes, plan, one_of(RecordType::bf16, RecordType::fp32),
                      {.rows = rows, .together = one_of(1, 16)});
        }
      }
    }
  }
}

TEST_CASE("gpu: gdn flush of numbers that are not finite has the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  for (const char* name : {"fp16+sr", "fp16+sr|nvfp4", "nvfp4+sr", "fp8+sr|bf16"}) {
    INFO(name);
    compare_gdn({1, 2, 64, 128}, plan_of(name, 8), RecordType::bf16, {.rows = 3, .infinite = true});
  }
}

TEST_CASE("gpu: rows that flush together are flushed as others are") {
  if (!gpu() || !host_has_fma()) return;
  for (const char* name : {"fp32", "fp16+sr", "fp16+sr|nvfp4", "nvfp4+sr"}) {
    for (int window : {1, 8, 16}) {
      for (int size : {64, 128}) {
        for (int together : {16, 40}) {
          INFO(name << ", L " << window << ", rows of " << size << ", " << together << " together");
          compare_mamba2({2, 1, 64, size}, plan_of(name, window), RecordType::bf16,
                         {.rows = 40, .together = together});
          compare_gdn({1, 2, 64, size}, plan_of(name, window), RecordType::bf16,
                      {.rows = 40, .together = together});
        }
      }
    }
  }
}

TEST_CASE("gpu: decode steps captured in a graph give the bits of steps one by one") {
  if (!gpu()) return;
  constexpr int kRows = 3, kWindow = 8;
  std::mt19937 random(7);
  const auto normal = [&](size_t count) {
    std::vector<float> x(count);
    for (float& v : x) v = bf16_normal(&random);
    return as_type(x, RecordType::bf16);
  };
  const std::vector<int32_t> pending = {0, 3, 7};
  const std::vector<int64_t> position = {50, 60, 70};
  const DeviceArray<uint32_t> stream(std::vector<uint32_t>{1, 2, 3});
  DeviceArray<int32_t> device_pending(pending);
  DeviceArray<int64_t> device_position(position);
  const DecodeRows rows{kRows, device_pending.data(), device_position.data(), stream.data()};
  for (const char* name : {"fp32", "fp16+sr|nvfp4", "nvfp4+sr"}) {
    INFO(name);
    const HeadPlan plan = plan_of(name, kWindow);
    {
      constexpr int kHeads = 4, kGroups = 2;
      const StateShape shape{80, 128};
      std::deque<RowPair> start;
      std::vector<std::byte> recurrence, read;
      for (int r = 0; r < kRows; ++r) {
        start.emplace_back(shape, kHeads, std::vector<HeadPlan>{plan}, std::vector<uint8_t>{}, 1u,
                           &random);
        recurrence.insert(recurrence.end(), start[r].recurrence().begin(),
                          start[r].recurrence().end());
        read.insert(read.end(), start[r].read().begin(), start[r].read().end());
      }
      DeviceArray<std::byte> device_recurrence(recurrence), device_read(read);
      const DeviceArray<float> decay(std::vector<float>(kHeads, -0.3f)),
          dt(std::vector<float>(kRows * kHeads, 0.25f)),
          ring_dt(std::vector<float>(kRows * kWindow * kHeads, 0.5f));
      const DeviceArray<std::byte> x(normal(kRows * kHeads * 80)), b(normal(kRows * kGroups * 128)),
          c(normal(kRows * kGroups * 128));
      const std::vector<std::byte> records_x = normal(kRows * kWindow * kHeads * 80),
                                   records_b = normal(kRows * kWindow * kGroups * 128);
      DeviceArray<std::byte> ring_x(records_x), ring_b(records_b), y(x.size());
      Mamba2Layer layer;
      layer.heads = kHeads;
      layer.groups = kGroups;
      layer.head_dim = 80;
      layer.state_dim = 128;
      layer.decay_log2 = decay.data();
      DecodeStates states;
      states.recurrence = device_recurrence.data();
      states.head_stride = start[0].stride();
      states.row_stride = start[0].recurrence().size();
      states.read = device_read.data();
      states.read_head_stride = start[0].read_stride();
      states.read_row_stride = start[0].read().size();
      Mamba2DecodeStep in{RecordType::bf16, x.data(),      dt.data(),      b.data(),     c.data(),
                          y.data(),         ring_x.data(), ring_dt.data(), ring_b.data()};
      compare_captured(
          [&] {
            device_pending.set(pending);
            device_position.set(position);
            device_recurrence.set(recurrence);
            if (!read.empty()) device_read.set(read);
            ring_x.set(records_x);
            ring_b.set(records_b);
            device_fill(ring_dt.data(), 0x3E, ring_dt.size() * sizeof(float));
            y.fill(0);
          },
          [&](CudaStream queue) {
            mamba2_decode_cuda(layer, plan, rows, states, in, queue);
            decode_step_cuda(rows, kWindow, queue);
          },
          [&] {
            return bytes_of(device_recurrence, device_read, y, ring_x, ring_b, device_pending,
                            device_position);
          });
    }
    {
      constexpr int kHeads = 4, kKeyHeads = 2;
      const StateShape shape{128, 128};
      std::deque<RowPair> start;
      std::vector<std::byte> recurrence, read;
      for (int r = 0; r < kRows; ++r) {
        start.emplace_back(shape, kHeads, std::vector<HeadPlan>{plan}, std::vector<uint8_t>{}, 1u,
                           &random, 0.1f);
        recurrence.insert(recurrence.end(), start[r].recurrence().begin(),
                          start[r].recurrence().end());
        read.insert(read.end(), start[r].read().begin(), start[r].read().end());
      }
      DeviceArray<std::byte> device_recurrence(recurrence), device_read(read);
      const DeviceArray<float> decay(std::vector<float>(kRows * kHeads, -0.05f)),
          beta(std::vector<float>(kRows * kHeads, 0.5f)),
          ring_decay(std::vector<float>(kRows * kWindow * kHeads, -0.1f)),
          ring_beta(std::vector<float>(kRows * kWindow * kHeads, 0.25f));
      const DeviceArray<std::byte> q(normal(kRows * kKeyHeads * 128)),
          k(normal(kRows * kKeyHeads * 128)), v(normal(kRows * kHeads * 128));
      const std::vector<std::byte> records_k = normal(kRows * kWindow * kKeyHeads * 128),
                                   records_v = normal(kRows * kWindow * kHeads * 128);
      DeviceArray<std::byte> ring_k(records_k), ring_v(records_v), o(v.size());
      DeviceArray<float> ring_u(static_cast<size_t>(kRows) * kWindow * kHeads * 128);
      GdnLayer layer;
      layer.key_heads = kKeyHeads;
      layer.value_heads = kHeads;
      layer.key_dim = layer.value_dim = 128;
      DecodeStates states;
      states.recurrence = device_recurrence.data();
      states.head_stride = start[0].stride();
      states.row_stride = start[0].recurrence().size();
      states.read = device_read.data();
      states.read_head_stride = start[0].read_stride();
      states.read_row_stride = start[0].read().size();
      GdnDecodeStep in;
      in.q = q.data();
      in.k = k.data();
      in.v = v.data();
      in.decay_log2 = decay.data();
      in.beta = beta.data();
      in.o = o.data();
      in.ring_k = ring_k.data();
      in.ring_v = ring_v.data();
      in.ring_u = ring_u.data();
      in.ring_decay = ring_decay.data();
      in.ring_beta = ring_beta.data();
      compare_captured(
          [&] {
            device_pending.set(pending);
            device_position.set(position);
            device_recurrence.set(recurrence);
            if (!read.empty()) device_read.set(read);
            ring_k.set(records_k);
            ring_v.set(records_v);
            ring_u.fill(0);
            device_fill(ring_decay.data(), 0, ring_decay.size() * sizeof(float));
            device_fill(ring_beta.data(), 0x3E, ring_beta.size() * sizeof(float));
            o.fill(0);
          },
          [&](CudaStream queue) {
            gdn_decode_cuda(layer, plan, rows, states, in, queue);
            decode_step_cuda(rows, kWindow, queue);
          },
          [&] {
            return bytes_of(device_recurrence, device_read, o, ring_k, ring_v, ring_u,
                            device_pending, device_position);
          });
    }
  }
}

// Codes of up to 8 bits that are made from registers: every kind of element under every kind of
// scale, rounded both ways, as the recurrence's and as the read's.
TEST_CASE("gpu: flushes to elements and scales from files have the bits of the chunk kernels") {
  if (!gpu() || !host_has_fma()) return;
  const std::vector<std::string> elements = {
      "int4",
      "int8",
      "{integer: {from: -3, to: 9}}",
      "{exponent: 3, mantissa: 0}",
      "{exponent: 2, mantissa: 1, random_bits: 24}",
      "e5m2",
      "{values: [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, "
      "0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]}",
      "{values: [-5, -3, -1, 2]}",
      "{values: [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]}",
      "{values: [-31, -30, -28, -20, -16, -15, -8, -4, -1, 0, 1, 4, 8, 15, 16, 20, 28, 30, 31]}"};
  const std::vector<std::string> scales = {
      "scale: {format: e4m3, block: 16}\nouter: {span: head}\n",
      "scale: {format: e8m0, block: 32}\n", "scale: {format: bf16, block: 16}\n",
      "outer: {span: row}\n", ""};
  std::mt19937 random(23);
  for (const std::string& element : elements) {
    for (const std::string& scale : scales) {
      const auto format =
          parse_format("element: " + element + "\n" + scale, "test", ".", "from a file");
      for (Rounding rounding : {Rounding::nearest_even, Rounding::stochastic}) {
        for (bool read : {true, false}) {
          HeadPlan plan = plan_of("fp16+sr", random() % 2 ? 8 : 5);
          if (read) {
            plan.read = StateCodec{format, rounding};
          } else {
            plan.recurrence = {format, rounding};
          }
          INFO(element << " / " << scale << (read ? "read" : "recurrence")
                       << (rounding == Rounding::stochastic ? ", stochastic" : ", nearest"));
          const RecordType type = random() % 2 ? RecordType::bf16 : RecordType::fp32;
          compare_mamba2({2, 1, random() % 2 ? 80 : 24, 128}, plan, type);
          compare_gdn({1, 2, random() % 2 ? 128 : 40, 128}, plan, type);
        }
      }
    }
  }
}

TEST_CASE("gpu: decode steps with arrays off a multiple of 16 bytes are refused") {
  if (!gpu()) return;
  // Nothing is read or written.
  alignas(16) float memory[8] = {};
  float *at = memory, *off = memory + 1;
  int32_t pending = 0;
  int64_t position = 0;
  const uint32_t stream = 0;
  const DecodeRows rows{1, &pending, &position, &stream};
  const HeadPlan plan = plan_of("fp32", 2);
  DecodeStates states;
  states.recurrence = reinterpret_cast<std::byte*>(at);
  states.row_stride = states.head_stride = 8 * 16 * 4;
  const auto refused = [](const auto& call) {
    CHECK_THROWS_WITH_AS(call(), doctest::Contains("an array is not on a multiple of 16 bytes"),
                         std::invalid_argument);
  };
  Mamba2Layer mamba2;
  mamba2.heads = mamba2.groups = 1;
  mamba2.head_dim = 8;
  mamba2.state_dim = 16;
  mamba2.decay_log2 = at;
  const Mamba2DecodeStep of_mamba2{RecordType::fp32, at, at, at, at, at, at, at, at};
  for (const void* Mamba2DecodeStep::*array :
       {&Mamba2DecodeStep::x, &Mamba2DecodeStep::b, &Mamba2DecodeStep::c}) {
    Mamba2DecodeStep step = of_mamba2;
    step.*array = off;
    refused([&] { mamba2_decode_cuda(mamba2, plan, rows, states, step); });
  }
  for (void* Mamba2DecodeStep::*array :
       {&Mamba2DecodeStep::y, &Mamba2DecodeStep::ring_x, &Mamba2DecodeStep::ring_b}) {
    Mamba2DecodeStep step = of_mamba2;
    step.*array = off;
    refused([&] { mamba2_decode_cuda(mamba2, plan, rows, states, step); });
  }
  GdnLayer gdn;
  gdn.key_heads = gdn.value_heads = 1;
  gdn.key_dim = 16;
  gdn.value_dim = 8;
  const GdnDecodeStep of_gdn{RecordType::fp32, at, at, at, at, at, at, at, at, at, at, at};
  for (const void* GdnDecodeStep::*array :
       {&GdnDecodeStep::q, &GdnDecodeStep::k, &GdnDecodeStep::v}) {
    GdnDecodeStep step = of_gdn;
    step.*array = off;
    refused([&] { gdn_decode_cuda(gdn, plan, rows, states, step); });
  }
  for (void* GdnDecodeStep::*array : {&GdnDecodeStep::o, &GdnDecodeStep::ring_k,
                                      &GdnDecodeStep::ring_v, &GdnDecodeStep::ring_u}) {
    GdnDecodeStep step = of_gdn;
    step.*array = off;
    refused([&] { gdn_decode_cuda(gdn, plan, rows, states, step); });
  }
}
