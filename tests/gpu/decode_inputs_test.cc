// What a decode step needs around its state kernels, against the host's functions, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/decode_cuda.h"
#include "kernels/decode_inputs_cuda.h"
#include "kernels/elementwise.h"
#include "kernels/elementwise_cuda.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

std::vector<float> normals(size_t n, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(*random);
  return values;
}

/// What choose_greedy_cuda says, from the sorted logits.
std::pair<int32_t, float> greedy(const float* logits, int64_t vocabulary) {
  std::vector<std::pair<float, int32_t>> order;
  for (int64_t v = 0; v < vocabulary; ++v) {
    if (logits[v] > -std::numeric_limits<float>::infinity())
      order.emplace_back(-logits[v], static_cast<int32_t>(v));
  }
  std::sort(order.begin(), order.end());
  if (order.empty()) return {-1, NAN};
  if (order.size() < 2 || std::isinf(order[0].first)) return {order[0].second, NAN};
  return {order[0].second, order[1].first - order[0].first};
}

}  // namespace

TEST_CASE("gpu: a convolution token by token has the bits of the convolution over tokens") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(121);
  constexpr int kRows = 5, kTokens = 9, kIdle = 3;
  struct Sizes {
    int taps, parts[3];
    bool bias, silu;
  };
  for (const Sizes& sizes :
       {Sizes{4, {64, 16, 16}, true, true}, Sizes{4, {300, 37, 0}, false, true},
        Sizes{4, {0, 1, 0}, true, false}, Sizes{1, {20, 0, 3}, true, true},
        Sizes{3, {100, 50, 50}, false, false}, Sizes{2, {7, 0, 0}, true, true}}) {
    for (const auto& [x_type, type] : {std::pair(RecordType::fp32, RecordType::fp32),
                                       std::pair(RecordType::fp32, RecordType::bf16),
                                       std::pair(RecordType::bf16, RecordType::fp32),
                                       std::pair(RecordType::bf16, RecordType::bf16)}) {
      const int channels = sizes.parts[0] + sizes.parts[1] + sizes.parts[2];
      INFO("taps " << sizes.taps << ", channels " << channels << ", types "
                   << static_cast<int>(x_type) << " to " << static_cast<int>(type));
      const auto n = static_cast<size_t>(channels);
      // Two elements before x, or four: then everything may start on multiples of 16 bytes.
      const int64_t past = sizes.taps - 1, before = channels % 8 == 0 ? 4 : 2,
                    stride = channels + before;
      const WeightType x_weights = x_type == RecordType::bf16 ? WeightType::bf16 : WeightType::fp32;
      const std::vector<float> weight = normals(n * static_cast<size_t>(sizes.taps), &random);
      const std::vector<float> bias = normals(n, &random);
      const auto host_bias = sizes.bias ? bias.data() : nullptr;
      // Row, then token, the tokens before the first are zeros.
      const auto row_size = static_cast<size_t>((past + kTokens) * channels);
      std::vector<float> x = normals(kRows * row_size, &random), y(x.size());
      round_to(x_weights, x.data(), static_cast<int64_t>(x.size()));
      std::vector<CausalConvRow> rows;
      for (size_t r = 0; r < kRows; ++r) {
        std::fill_n(x.begin() + static_cast<int64_t>(r * row_size), past * channels, 0.0f);
        rows.push_back({kTokens, x.data() + r * row_size + past * channels, channels,
                        y.data() + r * row_size + past * channels, channels});
      }
      x[static_cast<size_t>((past + 2) * channels)] = NAN;
      x[row_size + static_cast<size_t>((past + 4) * channels)] = -INFINITY;
      causal_conv({channels, sizes.taps, weight.data(), host_bias, sizes.silu}, rows,
                  KernelForm::fast);
      if (type == RecordType::bf16) round_to_bf16(y.data(), static_cast<int64_t>(y.size()));

      const DeviceArray<float> device_weight(weight), device_bias(bias);
      const CausalConv conv{channels, sizes.taps, device_weight.data(),
                            sizes.bias ? device_bias.data() : nullptr, sizes.silu};
      std::vector<float> state(static_cast<size_t>(kRows * past * channels), 0.0f);
      std::fill_n(state.begin() + kIdle * past * channels, past * channels, 3.0f);
      const size_t x_element = x_type == RecordType::bf16 ? 2 : 4;
      const DeviceArray<float> wide_state(state);
      DeviceArray<std::byte> device_state(state.size() * x_element);
      narrow_cuda(wide_state.data(), 0, 1, static_cast<int64_t>(state.size()), x_weights,
                  device_state.data());
      const DeviceArray<int64_t> position(std::vector<int64_t>{0, 4, 0, -1, 9});
      DeviceArray<float> wide_x(static_cast<size_t>(kRows * stride + before));
      const DeviceArray<std::byte> device_x(wide_x.size() * x_element);
      std::vector<DeviceArray<std::byte>> parts;
      ConvDecodeStep step;
      step.rows = kRows;
      step.position = position.data();
      step.x = device_x.data() + static_cast<size_t>(before) * x_element;
      step.x_stride = stride;
      step.x_type = x_type;
      step.state = device_state.data();
      step.type = type;
      const size_t element = type == RecordType::bf16 ? 2 : 4;
      for (int p = 0; p < 3; ++p) {
        parts.emplace_back(static_cast<size_t>(kRows * sizes.parts[p]) * element);
        parts.back().fill(0);
        step.parts[p] = {parts.back().data(), sizes.parts[p]};
      }
      for (int t = 0; t < kTokens; ++t) {
        std::vector<float> inputs(wide_x.size(), -9.0f);
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t c = 0; c < channels; ++c)
            inputs[static_cast<size_t>(before + r * stride + c)] =
                rows[static_cast<size_t>(r)].x[t * channels + c];
        }
        wide_x.set(inputs);
        narrow_cuda(wide_x.data(), 0, 1, static_cast<int64_t>(inputs.size()), x_weights,
                    device_x.data());
        conv_decode_cuda(conv, step);
        int64_t first = 0;
        for (int p = 0; p < 3; ++p) {
          const int64_t width = sizes.parts[p];
          std::vector<float> want(static_cast<size_t>(kRows * width), 0.0f);
          for (int64_t r = 0; r < kRows; ++r) {
            if (r == kIdle) continue;
            std::copy_n(rows[static_cast<size_t>(r)].y + t * channels + first, width,
                        want.begin() + r * width);
          }
          const DeviceArray<float> got(want.size());
          widen_cuda(type == RecordType::bf16 ? WeightType::bf16 : WeightType::fp32,
                     step.parts[p].to, width, kRows, width, got.data());
          CHECK(different_floats(got.get(), want) == "");
          first += width;
        }
      }
      for (int64_t r = 0; r < kRows; ++r) {
        if (r == kIdle) continue;
        std::copy_n(rows[static_cast<size_t>(r)].x + (kTokens - past) * channels, past * channels,
                    state.begin() + r * past * channels);
      }
      const DeviceArray<float> got(state.size());
      widen_cuda(x_weights, device_state.data(), 0, 1, static_cast<int64_t>(state.size()),
                 got.data());
      CHECK(different_floats(got.get(), state) == "");
    }
  }
}

TEST_CASE("gpu: rotary embedding at each row's position has the bits of rotary_apply") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(122);
  constexpr int kRows = 6, kPositions = 700;
  const std::vector<int64_t> positions = {0, 699, -1, 17, 256, 17};
  const DeviceArray<int64_t> device_positions(positions);
  struct Size {
    int heads, head_dim, dims;
  };
  for (const Size& size : {Size{3, 64, 64}, Size{16, 256, 64}, Size{5, 37, 30}, Size{1, 20, 12},
                           Size{2, 16, 2}, Size{40, 128, 128}}) {
    for (WeightType type : {WeightType::fp32, WeightType::bf16, WeightType::fp16}) {
      for (int64_t pad : {0, 3}) {
        const int64_t stride = int64_t{size.heads} * size.head_dim + pad, half = size.dims / 2;
        const std::vector<float> inverse = rotary_inverse_frequencies(1e6, size.dims);
        std::vector<float> cosine(static_cast<size_t>(kPositions * half)), sine(cosine);
        rotary_tables(inverse, 0, kPositions, cosine.data(), sine.data(), type);
        std::vector<float> x = normals(static_cast<size_t>(kRows * stride), &random);
        round_to(type, x.data(), static_cast<int64_t>(x.size()));
        const DeviceArray<float> device_x(x), device_cosine(cosine), device_sine(sine);
        rotary_decode_cuda(device_x.data(), stride, kRows, size.heads, size.head_dim, size.dims,
                           device_cosine.data(), device_sine.data(), device_positions.data(), type);
        for (size_t r = 0; r < kRows; ++r) {
          if (positions[r] < 0) continue;
          const auto at = static_cast<size_t>(positions[r] * half);
          rotary_apply(x.data() + static_cast<int64_t>(r) * stride, stride, 1, size.heads,
                       size.head_dim, size.dims, cosine.data() + at, sine.data() + at, type);
        }
        INFO("heads " << size.heads << ", dims " << size.dims << " of " << size.head_dim);
        CHECK(different_floats(device_x.get(), x) == "");
      }
    }
  }
}

TEST_CASE("gpu: scalars of a step have the bits of the functions over tokens") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(123);
  constexpr float kInf = std::numeric_limits<float>::infinity(), kLog2E = 1.44269504088896340736f;
  for (int heads : {1, 30, 33}) {
    for (WeightType type : {WeightType::fp32, WeightType::bf16}) {
      for (bool biased : {true, false}) {
        constexpr int kRows = 19;
        const int64_t stride = 2 * heads + 3;
        std::vector<float> x = normals(static_cast<size_t>(kRows * stride), &random);
        for (float& value : x) value *= 8.0f;
        x[0] = x[1] = NAN;
        round_to(type, x.data(), static_cast<int64_t>(x.size()));
        const std::vector<float> bias = normals(static_cast<size_t>(heads), &random),
                                 a_exp = normals(static_cast<size_t>(heads), &random);
        const DeviceArray<float> wide(x), device_bias(bias), device_a_exp(a_exp);
        const size_t element = static_cast<size_t>(weight_bytes(type));
        DeviceArray<std::byte> device_x(x.size() * element);
        narrow_cuda(wide.data(), stride, kRows, stride, type, device_x.data());
        const float* on_host = biased ? bias.data() : nullptr;
        const float* on_device = biased ? device_bias.data() : nullptr;
        const auto n = static_cast<size_t>(kRows * heads);
        std::vector<float> want(n), other(n);
        const DeviceArray<float> got(n), got_other(n);

        for (const auto& [low, high] : {std::pair(0.001f, 0.5f), std::pair(-kInf, kInf)}) {
          activate(Activation::softplus, x.data() + 1, stride, on_host, want.data(), heads, kRows,
                   heads, type);
          for (float& value : want) {
            if (value < low) value = low;
            if (value > high) value = high;
          }
          mamba2_steps_cuda(type, device_x.data() + element, stride, on_device, low, high, kRows,
                            heads, got.data());
          CHECK(different_floats(got.get(), want) == "");
        }
        // a behind b.
        activate(Activation::sigmoid, x.data(), stride, nullptr, other.data(), heads, kRows, heads);
        activate(Activation::softplus, x.data() + heads, stride, on_host, want.data(), heads, kRows,
                 heads);
        for (size_t i = 0; i < n; ++i)
          want[i] = -(a_exp[i % static_cast<size_t>(heads)] * want[i]) * kLog2E;
        gdn_steps_cuda({type, device_x.data() + static_cast<size_t>(heads) * element,
                        device_x.data(), stride, on_device, device_a_exp.data()},
                       kRows, heads, got.data(), got_other.data());
        CHECK(different_floats(got.get(), want) == "");
        CHECK(different_floats(got_other.get(), other) == "");
      }
    }
  }
}

TEST_CASE("gpu: greedy choices and their margins") {
  if (!gpu()) return;
  std::mt19937 random(124);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int64_t vocabulary : {1, 2, 7, 128, 4099, 250000}) {
    for (int64_t pad : {0, 1}) {
      constexpr int kRows = 11;
      const int64_t stride = vocabulary + pad;
      std::vector<float> logits = normals(static_cast<size_t>(kRows * stride), &random);
      const auto row = [&](int r) { return logits.begin() + r * stride; };
      const auto place = [&] {
        return static_cast<int64_t>(random() % static_cast<uint64_t>(vocabulary));
      };
      // Ties of the largest, and of the second; NaN; infinities; few or no finite ones.
      for (int i = 0; i < 3; ++i) row(1)[place()] = 50.0f;
      for (int i = 0; i < 3; ++i) row(2)[place()] = 49.5f;
      row(2)[place()] = 50.0f;
      for (int i = 0; i < 40; ++i) row(3)[place()] = NAN;
      row(4)[place()] = kInf;
      for (int i = 0; i < 2; ++i) row(5)[place()] = kInf;
      std::fill_n(row(6), vocabulary, -kInf);
      std::fill_n(row(7), vocabulary, NAN);
      std::fill_n(row(8), vocabulary, -kInf);
      row(8)[place()] = -3.0f;
      std::fill_n(row(9), vocabulary, 0.0f);
      row(9)[place()] = -0.0f;
      for (int64_t v = 0; v < vocabulary; ++v) row(10)[v] = static_cast<float>(v % 1000);
      const DeviceArray<float> device_logits(logits);
      const DeviceArray<int32_t> token(kRows);
      const DeviceArray<float> margin(kRows);
      choose_greedy_cuda(device_logits.data(), stride, kRows, vocabulary, token.data(),
                         margin.data());
      std::vector<int32_t> want_token;
      std::vector<float> want_margin;
      for (int r = 0; r < kRows; ++r) {
        const auto [id, difference] = greedy(&*row(r), vocabulary);
        want_token.push_back(id);
        want_margin.push_back(difference);
      }
      INFO("vocabulary " << vocabulary << ", stride " << stride);
      CHECK(token.get() == want_token);
      CHECK(different_floats(margin.get(), want_margin) == "");
      choose_greedy_cuda(device_logits.data(), stride, kRows, vocabulary, token.data(), nullptr);
      CHECK(token.get() == want_token);
    }
  }
}

TEST_CASE("gpu: captured inputs of decode steps are the steps one by one") {
  if (!gpu()) return;
  std::mt19937 random(125);
  constexpr int kRows = 3, kHeads = 4, kDim = 16, kChannels = kHeads * kDim, kPositions = 64;
  const DeviceArray<float> weight(normals(4 * kChannels, &random));
  const std::vector<float> inverse = rotary_inverse_frequencies(1e4, kDim);
  std::vector<float> cosine(kPositions * kDim / 2), sine(cosine);
  rotary_tables(inverse, 0, kPositions, cosine.data(), sine.data());
  const DeviceArray<float> device_cosine(cosine), device_sine(sine);
  const std::vector<float> embedding_values = normals(kChannels * kChannels, &random);
  const DeviceArray<float> embedding(embedding_values);
  DeviceArray<float> x(kRows * kChannels), state(kRows * 3 * kChannels), margin(kRows);
  DeviceArray<uint16_t> records(kRows * kChannels);
  DeviceArray<int32_t> token(kRows), pending(kRows);
  DeviceArray<int64_t> position(kRows);
  DecodeRows rows;
  rows.rows = kRows;
  rows.pending = pending.data();
  rows.position = position.data();
  ConvDecodeStep conv;
  conv.rows = kRows;
  conv.position = position.data();
  conv.x = x.data();
  conv.x_stride = kChannels;
  conv.state = state.data();
  conv.parts[0] = {records.data(), kChannels};
  const auto reset = [&] {
    state.fill(0);
    pending.fill(0);
    position.set({0, 5, 30});
    token.set({1, 2, 3});
  };
  // The token chosen from what the channels became is embedded next.
  const auto step = [&](CudaStream stream) {
    widen_rows_cuda({embedding.data(), WeightType::fp32, kChannels, kChannels, kChannels},
                    token.data(), kRows, x.data(), stream);
    conv_decode_cuda({kChannels, 4, weight.data(), nullptr, true}, conv, stream);
    widen_cuda(WeightType::bf16, records.data(), kChannels, kRows, kChannels, x.data(), stream);
    rotary_decode_cuda(x.data(), kChannels, kRows, kHeads, kDim, kDim, device_cosine.data(),
                       device_sine.data(), position.data(), WeightType::fp32, stream);
    choose_greedy_cuda(x.data(), kChannels, kRows, kChannels, token.data(), margin.data(), stream);
    decode_step_cuda(rows, 4, stream);
  };
  const auto result = [&] {
    std::vector<float> all = x.get();
    for (const std::vector<float>& more : {state.get(), margin.get()})
      all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  reset();
  for (int i = 0; i < 21; ++i) step(nullptr);
  const std::vector<float> want = result();
  const std::vector<int32_t> want_token = token.get();
  reset();
  const CapturedSteps three([&](CudaStream stream) {
    for (int i = 0; i < 3; ++i) step(stream);
  });
  CHECK(different_floats(result(), want) != "");
  for (int i = 0; i < 7; ++i) three.run();
  CHECK(different_floats(result(), want) == "");
  CHECK(token.get() == want_token);
}

TEST_CASE("gpu: wrong inputs of decode steps are refused") {
  if (!gpu()) return;
  const DeviceArray<float> x(256);
  const DeviceArray<int64_t> position(2);
  const DeviceArray<int32_t> token(2);
  ConvDecodeStep step;
  step.rows = 2;
  step.x = x.data();
  step.x_stride = 8;
  step.state = x.data() + 64;
  step.parts[0] = {x.data() + 128, 7};
  const CausalConv conv{8, 4, x.data(), nullptr, false};
  CHECK_THROWS_AS(conv_decode_cuda(conv, step), std::invalid_argument);
  step.parts[0].channels = 8;
  step.x_stride = 7;
  CHECK_THROWS_AS(conv_decode_cuda(conv, step), std::invalid_argument);
  CHECK_THROWS_AS(
      rotary_decode_cuda(x.data(), 16, 2, 1, 16, 18, x.data(), x.data(), position.data()),
      std::invalid_argument);
  CHECK_THROWS_AS(
      rotary_decode_cuda(x.data(), 15, 2, 1, 16, 4, x.data(), x.data(), position.data()),
      std::invalid_argument);
  CHECK_THROWS_AS(choose_greedy_cuda(x.data(), 16, 2, 17, token.data(), nullptr),
                  std::invalid_argument);
  const auto refuses_gdn = [&](int rows, int64_t stride, const float* a) {
    CHECK_THROWS_AS(gdn_steps_cuda({WeightType::fp32, a, x.data(), stride, nullptr, x.data()}, rows,
                                   2, x.data(), x.data()),
                    std::invalid_argument);
  };
  refuses_gdn(-1, 2, x.data());
  refuses_gdn(2, 1, x.data());
  refuses_gdn(2, 2, nullptr);
  CHECK_THROWS_AS(mamba2_steps_cuda(WeightType::fp16, x.data(), 2, nullptr, 0, 1, 1, 2, x.data()),
                  std::invalid_argument);
}
