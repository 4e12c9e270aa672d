// Norms, activations, rotary embedding, expert sums, conversions and copies on the device against
// the host's, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/elementwise_cuda.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

constexpr WeightType kTypes[] = {WeightType::fp32, WeightType::bf16, WeightType::fp16};
constexpr Activation kActivations[] = {Activation::silu, Activation::relu2, Activation::sigmoid,
                                       Activation::softplus};

/// Rows of a strided array that starts `offset` floats behind a multiple of 16 bytes.
struct Shape {
  int64_t rows, cols, stride, offset;
  size_t floats() const { return static_cast<size_t>(offset + rows * stride + 8); }
};
constexpr Shape kShapes[] = {{1, 1, 1, 0},     {3, 7, 9, 1},     {5, 16, 16, 0},    {4, 33, 36, 0},
                             {7, 128, 132, 4}, {6, 130, 131, 0}, {2, 2560, 2560, 0}};

std::vector<float> normals(size_t n, std::mt19937* random, float scale = 1.0f) {
  std::vector<float> x(n);
  std::normal_distribution<float> normal;
  for (float& value : x) value = scale * normal(*random);
  return x;
}

/// NaN, infinities, zeros of both signs and subnormals in some places.
void add_specials(std::vector<float>* x, std::mt19937* random) {
  const float specials[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-41f, -3e38f, 1e38f, -100.0f};
  for (float value : specials) (*x)[(*random)() % x->size()] = value;
}

/// Every `step`-th bit pattern.
std::vector<float> bit_patterns(uint64_t step) {
  std::vector<float> x;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += step)
    x.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  return x;
}

std::string different_codes(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want,
                            WeightType type) {
  std::vector<float> a(got.size()), b(want.size());
  widen(got.data(), type, static_cast<int64_t>(got.size()), a.data());
  widen(want.data(), type, static_cast<int64_t>(want.size()), b.data());
  return different_floats(a, b);
}

}  // namespace

TEST_CASE("gpu: every 4099th number has the host's bits in every activation and rounding") {
  if (!gpu() || !host_has_fma()) return;
  const std::vector<float> x = bit_patterns(4099);
  const auto n = static_cast<int64_t>(x.size());
  const DeviceArray<float> device_x(x);
  DeviceArray<float> device_y(x.size());
  std::vector<float> y(x.size());
  for (WeightType type : kTypes) {
    INFO("type " << static_cast<int>(type));
    for (Activation f : kActivations) {
      INFO("activation " << static_cast<int>(f));
      activate(f, x.data(), n, nullptr, y.data(), n, 1, n, type);
      activate_cuda(f, device_x.data(), n, nullptr, device_y.data(), n, 1, n, type);
      CHECK(different_floats(device_y.get(), y) == "");
    }
    y = x;
    round_to(type, y.data(), n);
    device_y.set(x);
    round_to_cuda(type, device_y.data(), n);
    CHECK(different_floats(device_y.get(), y) == "");
    if (type == WeightType::fp32) continue;
    std::vector<uint16_t> codes(x.size());
    DeviceArray<uint16_t> device_codes(x.size());
    narrow(x.data(), n, type, codes.data());
    narrow_cuda(device_x.data(), n, 1, n, type, device_codes.data());
    CHECK(different_codes(device_codes.get(), codes, type) == "");
  }
}

TEST_CASE("gpu: rms_norm has the host's bits") {
  if (!gpu() || !host_has_fma()) return;
  struct Sizes {
    int64_t rows, cols, group, weight;
  };
  constexpr Sizes kSizes[] = {{3, 1, 0, 1},         {5, 30, 10, 10},     {4, 96, 48, 96},
                              {3, 256, 128, 128},   {2, 512, 256, 512},  {6, 100, 0, 100},
                              {2, 1536, 768, 1536}, {2, 2561, 0, 2561},  {2, 5120, 0, 5120},
                              {1, 24576, 0, 24576}, {2, 26001, 0, 26001}};
  std::mt19937 random(81);
  for (const Sizes& size : kSizes) {
    for (int64_t pad : {0, 3}) {
      const Shape shape{size.rows, size.cols, size.cols + pad, pad};
      std::vector<float> x = normals(shape.floats(), &random, 2.0f);
      std::vector<float> gate = normals(shape.floats(), &random, 2.0f);
      const std::vector<float> weight = normals(static_cast<size_t>(size.weight), &random);
      add_specials(&gate, &random);
      if (size.rows > 2) {
        x[static_cast<size_t>(shape.offset + 2 * shape.stride)] = NAN;
        std::fill_n(x.begin() + shape.offset, size.cols, 0.0f);
      }
      const DeviceArray<float> device_x(x), device_gate(gate), device_weight(weight);
      for (GateOrder order :
           {GateOrder::none, GateOrder::gate_first, GateOrder::norm_first, GateOrder::gate_only}) {
        for (WeightType type : kTypes) {
          for (int variant = 0; variant < 3; ++variant) {
            RmsNorm norm{weight.data(), size.weight, size.group, 1e-5f,
                         variant == 1,  order,       type,       variant != 2};
            RmsNorm device_norm = norm;
            device_norm.weight = device_weight.data();
            const bool gated = order != GateOrder::none;
            INFO("cols " << size.cols << ", group " << size.group << ", pad " << pad << ", order "
                         << static_cast<int>(order) << ", type " << static_cast<int>(type)
                         << ", variant " << variant);
            std::vector<float> y(shape.floats(), -7.0f);
            DeviceArray<float> device_y(y);
            rms_norm(norm, x.data() + shape.offset, shape.stride,
                     gated ? gate.data() + shape.offset : nullptr, shape.stride,
                     y.data() + shape.offset, shape.stride, size.rows, size.cols);
            rms_norm_cuda(device_norm, device_x.data() + shape.offset, shape.stride,
                          gated ? device_gate.data() + shape.offset : nullptr, shape.stride,
                          device_y.data() + shape.offset, shape.stride, size.rows, size.cols);
            CHECK(different_floats(device_y.get(), y) == "");
            // In place of x, then of the gate.
            device_y.set(x);
            rms_norm_cuda(device_norm, device_y.data() + shape.offset, shape.stride,
                          gated ? device_gate.data() + shape.offset : nullptr, shape.stride,
                          device_y.data() + shape.offset, shape.stride, size.rows, size.cols);
            std::vector<float> want = x;
            for (int64_t r = 0; r < size.rows; ++r) {
              const int64_t at = shape.offset + r * shape.stride;
              std::copy_n(y.begin() + at, size.cols, want.begin() + at);
            }
            CHECK(different_floats(device_y.get(), want) == "");
            if (!gated) continue;
            device_y.set(gate);
            rms_norm_cuda(device_norm, device_x.data() + shape.offset, shape.stride,
                          device_y.data() + shape.offset, shape.stride,
                          device_y.data() + shape.offset, shape.stride, size.rows, size.cols);
            want = gate;
            for (int64_t r = 0; r < size.rows; ++r) {
              const int64_t at = shape.offset + r * shape.stride;
              std::copy_n(y.begin() + at, size.cols, want.begin() + at);
            }
            CHECK(different_floats(device_y.get(), want) == "");
          }
        }
      }
    }
  }
}

TEST_CASE("gpu: functions of BF16 codes have the bits of the host's on FP32 arrays") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(89);
  struct Sizes {
    int64_t rows, cols, group, weight;
  };
  constexpr Sizes kSizes[] = {{5, 30, 10, 10},      {4, 96, 48, 96},     {3, 256, 128, 128},
                              {2, 512, 256, 512},   {6, 100, 0, 100},    {2, 1536, 768, 1536},
                              {3, 2560, 0, 2560},   {2, 2561, 0, 2561},  {1, 24576, 0, 24576},
                              {2, 26001, 0, 26001}, {2, 25600, 0, 25600}};
  for (const Sizes& size : kSizes) {
    for (int64_t pad : {0, 3}) {
      const Shape shape{size.rows, size.cols, size.cols + pad, pad};
      INFO("cols " << size.cols << ", group " << size.group << ", pad " << pad);
      const auto n = static_cast<int64_t>(shape.floats());
      std::vector<float> x = normals(shape.floats(), &random, 2.0f),
                         gate = normals(shape.floats(), &random, 2.0f);
      add_specials(&gate, &random);
      round_to(WeightType::bf16, x.data(), n);
      round_to(WeightType::bf16, gate.data(), n);
      const std::vector<float> weight = normals(static_cast<size_t>(size.weight), &random),
                               column = normals(static_cast<size_t>(size.cols), &random);
      const DeviceArray<float> device_weight(weight), device_column(column);
      const auto codes_of = [&](const std::vector<float>& values) {
        std::vector<uint16_t> codes(values.size());
        narrow(values.data(), n, WeightType::bf16, codes.data());
        return codes;
      };
      const DeviceArray<uint16_t> device_x(codes_of(x)), device_gate(codes_of(gate));
      const int64_t at = shape.offset, stride = shape.stride;
      // `host` writes rows of y; `device` writes its codes over those of y.
      const auto compare = [&](auto host, auto device) {
        std::vector<float> y = gate;
        host(y.data() + at);
        DeviceArray<uint16_t> device_y(codes_of(gate));
        device(device_y.data() + at);
        CHECK(different_codes(device_y.get(), codes_of(y), WeightType::bf16) == "");
      };
      for (GateOrder order :
           {GateOrder::none, GateOrder::gate_first, GateOrder::norm_first, GateOrder::gate_only}) {
        for (int variant = 0; variant < 3; ++variant) {
          INFO("order " << static_cast<int>(order) << ", variant " << variant);
          const bool gated = order != GateOrder::none;
          const RmsNorm norm{weight.data(), size.weight, size.group,       1e-5f,
                             variant == 1,  order,       WeightType::bf16, variant != 2};
          RmsNorm device_norm = norm;
          device_norm.weight = device_weight.data();
          compare(
              [&](float* y) {
                rms_norm(norm, x.data() + at, stride, gated ? gate.data() + at : nullptr, stride, y,
                         stride, size.rows, size.cols);
              },
              [&](uint16_t* y) {
                rms_norm_cuda(device_norm, device_x.data() + at, stride,
                              gated ? device_gate.data() + at : nullptr, stride, y, stride,
                              size.rows, size.cols);
              });
          // In place.
          std::vector<float> all = x;
          rms_norm(norm, all.data() + at, stride, gated ? gate.data() + at : nullptr, stride,
                   all.data() + at, stride, size.rows, size.cols);
          const DeviceArray<uint16_t> device_all(codes_of(x));
          rms_norm_cuda(device_norm, device_all.data() + at, stride,
                        gated ? device_gate.data() + at : nullptr, stride, device_all.data() + at,
                        stride, size.rows, size.cols);
          CHECK(different_codes(device_all.get(), codes_of(all), WeightType::bf16) == "");
          if (gated) continue;
          std::vector<float> y(shape.floats(), -7.0f);
          const DeviceArray<float> device_y(y);
          rms_norm(norm, x.data() + at, stride, nullptr, 0, y.data() + at, stride, size.rows,
                   size.cols);
          rms_norm_cuda(device_norm, device_x.data() + at, stride, device_y.data() + at, stride,
                        size.rows, size.cols);
          CHECK(different_floats(device_y.get(), y) == "");
        }
      }
      for (Activation f : kActivations) {
        INFO("activation " << static_cast<int>(f));
        compare(
            [&](float* y) {
              activate(f, x.data() + at, stride, column.data(), y, stride, size.rows, size.cols,
                       WeightType::bf16);
            },
            [&](uint16_t* y) {
              activate_cuda(f, device_x.data() + at, stride, device_column.data(), y, stride,
                            size.rows, size.cols, WeightType::bf16);
            });
        compare(
            [&](float* y) {
              activate_multiply(f, x.data() + at, stride, 0.7f, y, stride, y, stride, size.rows,
                                size.cols, WeightType::bf16);
            },
            [&](uint16_t* y) {
              activate_multiply_cuda(f, device_x.data() + at, stride, 0.7f, y, stride, y, stride,
                                     size.rows, size.cols, WeightType::bf16);
            });
      }
      compare(
          [&](float* y) {
            add_scaled(y, stride, x.data() + at, stride, 1.3f, size.rows, size.cols,
                       WeightType::bf16);
          },
          [&](uint16_t* y) {
            add_scaled_cuda(y, stride, device_x.data() + at, stride, 1.3f, size.rows, size.cols,
                            WeightType::bf16);
          });
      compare(
          [&](float* y) {
            scale(y, stride, 0.9f, column.data(), size.rows, size.cols, WeightType::bf16);
          },
          [&](uint16_t* y) {
            scale_cuda(y, stride, 0.9f, device_column.data(), size.rows, size.cols,
                       WeightType::bf16);
          });
    }
  }
}

TEST_CASE("gpu: a sum into the residual stream and its norm have the bits of the two") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(90);
  for (int64_t cols : {1, 30, 64, 256, 2560, 3137, 24576, 25600}) {
    for (bool codes : {false, true}) {
      const WeightType type = codes ? WeightType::bf16 : WeightType::fp32;
      for (WeightType residual_type : {WeightType::fp32, type}) {
        for (bool adds : {true, false}) {
          INFO("cols " << cols << ", types " << static_cast<int>(type) << " and "
                       << static_cast<int>(residual_type) << ", adds " << adds);
          constexpr int64_t kRows = 3;
          const int64_t n = kRows * cols;
          std::vector<float> residual = normals(static_cast<size_t>(n), &random, 2.0f),
                             added = normals(static_cast<size_t>(n), &random, 2.0f), y(added);
          round_to(residual_type, residual.data(), n);
          round_to(type, added.data(), n);
          const std::vector<float> weight = normals(static_cast<size_t>(cols), &random);
          const DeviceArray<float> device_residual(residual), device_weight(weight),
              wide_added(added), wide_y(y.size());
          RmsNorm norm{weight.data(), cols};
          norm.activation = type;
          if (adds)
            add_scaled(residual.data(), cols, added.data(), cols, 1.0f, kRows, cols, residual_type);
          rms_norm(norm, residual.data(), cols, nullptr, 0, y.data(), cols, kRows, cols);
          norm.weight = device_weight.data();
          if (codes) {
            const DeviceArray<uint16_t> code(added.size()), code_y(added.size());
            narrow_cuda(wide_added.data(), cols, kRows, cols, type, code.data());
            add_rms_norm_cuda<uint16_t>(norm, residual_type, device_residual.data(),
                                        adds ? code.data() : nullptr, code_y.data(), kRows, cols);
            widen_cuda(type, code_y.data(), cols, kRows, cols, wide_y.data());
          } else {
            add_rms_norm_cuda<float>(norm, residual_type, device_residual.data(),
                                     adds ? wide_added.data() : nullptr, wide_y.data(), kRows,
                                     cols);
          }
          CHECK(different_floats(wide_y.get(), y) == "");
          CHECK(different_floats(device_residual.get(), residual) == "");
        }
      }
    }
  }
}

TEST_CASE("gpu: rms_norm is the FP64 equation within the bound of its operations") {
  if (!gpu()) return;
  std::mt19937 random(82);
  for (int64_t cols : {int64_t{128}, int64_t{2560}}) {
    const std::vector<float> x = normals(static_cast<size_t>(4 * cols), &random, 3.0f);
    const std::vector<float> w = normals(static_cast<size_t>(cols), &random);
    const DeviceArray<float> device_x(x), device_w(w);
    DeviceArray<float> device_y(x.size());
    rms_norm_cuda({device_w.data(), cols}, device_x.data(), cols, nullptr, 0, device_y.data(), cols,
                  4, cols);
    const std::vector<float> y = device_y.get();
    // The sum of squares has cols / 16 + 4 roundings, the rest (mean, eps, root, inverse and two
    // products) 6, each at most 2^-24 of the result; the root halves what comes before it.
    const double bound = (static_cast<double>(cols) / 16 + 12) * 0x1p-24;
    for (int64_t r = 0; r < 4; ++r) {
      double squares = 0;
      for (int64_t c = 0; c < cols; ++c)
        squares += std::pow(static_cast<double>(x[r * cols + c]), 2);
      const double root = std::sqrt(squares / static_cast<double>(cols) + 1e-6);
      for (int64_t c = 0; c < cols; ++c) {
        const double want = static_cast<double>(w[c]) * x[r * cols + c] / root;
        CHECK(std::abs(y[static_cast<size_t>(r * cols + c)] - want) <= bound * std::abs(want));
      }
    }
  }
}

TEST_CASE("gpu: activations, sums and scales of rows have the host's bits") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(83);
  for (const Shape& shape : kShapes) {
    const int64_t rows = shape.rows, cols = shape.cols, stride = shape.stride, at = shape.offset;
    std::vector<float> a = normals(shape.floats(), &random, 4.0f);
    std::vector<float> b = normals(shape.floats(), &random, 4.0f);
    add_specials(&a, &random);
    add_specials(&b, &random);
    const std::vector<float> column = normals(static_cast<size_t>(cols), &random);
    const std::vector<float> by_row = normals(static_cast<size_t>(rows), &random);
    const DeviceArray<float> device_a(a), device_b(b), device_column(column), device_by_row(by_row);
    DeviceArray<float> device_y(a.size());
    std::vector<float> y;
    const auto start = [&](const std::vector<float>& values) {
      y = values;
      device_y.set(values);
    };
    for (WeightType type : kTypes) {
      INFO("cols " << cols << ", stride " << stride << ", type " << static_cast<int>(type));
      for (Activation f : kActivations) {
        for (bool bias : {false, true}) {
          start(a);  // in place
          activate(f, y.data() + at, stride, bias ? column.data() : nullptr, y.data() + at, stride,
                   rows, cols, type);
          activate_cuda(f, device_y.data() + at, stride, bias ? device_column.data() : nullptr,
                        device_y.data() + at, stride, rows, cols, type);
          CHECK(different_floats(device_y.get(), y) == "");
        }
        for (float gate_scale : {1.0f, 0.7f}) {
          start(b);  // in place of up
          activate_multiply(f, a.data() + at, stride, gate_scale, y.data() + at, stride,
                            y.data() + at, stride, rows, cols, type);
          activate_multiply_cuda(f, device_a.data() + at, stride, gate_scale, device_y.data() + at,
                                 stride, device_y.data() + at, stride, rows, cols, type);
          CHECK(different_floats(device_y.get(), y) == "");
        }
      }
      start(a);
      add_scaled(y.data() + at, stride, b.data() + at, stride, 0.3f, rows, cols, type);
      add_scaled_cuda(device_y.data() + at, stride, device_b.data() + at, stride, 0.3f, rows, cols,
                      type);
      CHECK(different_floats(device_y.get(), y) == "");
      start(a);
      add_row_scaled(y.data() + at, stride, b.data() + at, stride, by_row.data(), rows, cols, type);
      add_row_scaled_cuda(device_y.data() + at, stride, device_b.data() + at, stride,
                          device_by_row.data(), rows, cols, type);
      CHECK(different_floats(device_y.get(), y) == "");
      for (float factor : {1.0f, 1.7f}) {
        for (bool columns : {false, true}) {
          start(a);
          scale(y.data() + at, stride, factor, columns ? column.data() : nullptr, rows, cols, type);
          scale_cuda(device_y.data() + at, stride, factor, columns ? device_column.data() : nullptr,
                     rows, cols, type);
          CHECK(different_floats(device_y.get(), y) == "");
        }
      }
    }
    start(a);
    const float low = -0.5f, high = 1.5f;
    for (float& value : y) value = std::min(std::max(value, low), high);
    clamp_cuda(device_y.data(), static_cast<int64_t>(y.size()), low, high);
    CHECK(different_floats(device_y.get(), y) == "");
  }
}

TEST_CASE("gpu: the rotary embedding has the host's bits") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(84);
  struct Sizes {
    int heads, head_dim, dims;
    int64_t pad;
  };
  for (const Sizes& size : {Sizes{3, 64, 64, 0}, Sizes{2, 128, 32, 4}, Sizes{5, 20, 10, 1},
                            Sizes{1, 2, 2, 0}, Sizes{4, 256, 64, 0}, Sizes{2, 16, 0, 0}}) {
    for (WeightType type : kTypes) {
      INFO("head_dim " << size.head_dim << ", dims " << size.dims << ", type "
                       << static_cast<int>(type));
      constexpr int64_t kTokens = 9;
      const int64_t stride = int64_t{size.heads} * size.head_dim + size.pad;
      std::vector<float> x = normals(static_cast<size_t>(kTokens * stride), &random);
      if (x.size() > 100) add_specials(&x, &random);
      std::vector<float> cosine(static_cast<size_t>(kTokens * size.dims / 2) + 1), sine(cosine);
      if (size.dims > 0) {
        rotary_tables(rotary_inverse_frequencies(10000.0, size.dims), 77, kTokens, cosine.data(),
                      sine.data(), type);
      }
      const DeviceArray<float> device_cosine(cosine), device_sine(sine);
      DeviceArray<float> device_x(x);
      rotary_apply(x.data(), stride, kTokens, size.heads, size.head_dim, size.dims, cosine.data(),
                   sine.data(), type);
      rotary_apply_cuda(device_x.data(), stride, kTokens, size.heads, size.head_dim, size.dims,
                        device_cosine.data(), device_sine.data(), type);
      CHECK(different_floats(device_x.get(), x) == "");
    }
  }
}

TEST_CASE("gpu: softmax has the host's bits, and NaN where the host has NaN") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(85);
  for (int64_t cols : {1, 5, 16, 100, 513}) {
    constexpr int64_t kRows = 37;
    const int64_t stride = cols + 2;
    std::vector<float> x = normals(static_cast<size_t>(kRows * stride), &random, 10.0f);
    x[static_cast<size_t>(3 * stride)] = NAN;
    x[static_cast<size_t>(4 * stride + cols - 1)] = INFINITY;
    std::fill_n(x.begin() + 5 * stride, cols, -INFINITY);
    x[static_cast<size_t>(6 * stride)] = -INFINITY;
    std::vector<float> y = x;
    DeviceArray<float> device_y(x);
    softmax(y.data(), stride, y.data(), stride, kRows, cols);
    softmax_cuda(device_y.data(), stride, device_y.data(), stride, kRows, cols);
    CHECK(different_floats(device_y.get(), y) == "");
  }
}

TEST_CASE("gpu: combine_experts has the host's bits") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(86);
  constexpr int64_t kTokens = 33;
  constexpr int kChoices = 3, kExperts = 7;
  std::vector<int32_t> chosen;
  for (int64_t t = 0; t < kTokens; ++t) {
    std::vector<int32_t> ids(kExperts);
    for (int32_t e = 0; e < kExperts; ++e) ids[static_cast<size_t>(e)] = e;
    std::shuffle(ids.begin(), ids.end(), random);
    chosen.insert(chosen.end(), ids.begin(), ids.begin() + kChoices);
  }
  const ExpertGroups groups = group_by_expert(chosen.data(), normals(chosen.size(), &random).data(),
                                              kTokens, kChoices, kExperts);
  const DeviceArray<int32_t> slots(groups.slots);
  const DeviceArray<float> weights(groups.weights);
  for (int64_t cols : {1, 30, 64}) {
    std::vector<float> output = normals(static_cast<size_t>(kTokens * kChoices * cols), &random);
    output[5] = NAN;
    const DeviceArray<float> device_output(output);
    const int64_t stride = cols + 4;
    const std::vector<float> start = normals(static_cast<size_t>(kTokens * stride), &random);
    for (WeightType type : kTypes) {
      for (bool add : {false, true}) {
        std::vector<float> y = start;
        DeviceArray<float> device_y(start);
        combine_experts(groups, output.data(), cols, y.data(), stride, kTokens, type, add);
        combine_experts_cuda(slots.data(), weights.data(), kChoices, device_output.data(), cols,
                             device_y.data(), stride, kTokens, type, add);
        CHECK(different_floats(device_y.get(), y) == "");
      }
    }
  }
}

TEST_CASE("gpu: rows of an embedding, and narrowing of strided rows") {
  if (!gpu()) return;
  std::mt19937 random(87);
  for (int64_t cols : {1, 6, 64, 2560}) {
    for (int64_t pad : {0, 1, 4}) {
      for (WeightType type : kTypes) {
        INFO("cols " << cols << ", pad " << pad << ", type " << static_cast<int>(type));
        const int64_t stride = cols + pad;
        const std::vector<float> values = normals(static_cast<size_t>(11 * stride), &random);
        std::vector<std::byte> stored(values.size() * static_cast<size_t>(weight_bytes(type)));
        narrow(values.data(), static_cast<int64_t>(values.size()), type, stored.data());
        const DeviceArray<std::byte> device_stored(stored);
        const std::vector<int32_t> ids = {10, 0, 3, 3, 7};
        std::vector<float> rows(ids.size() * static_cast<size_t>(cols));
        WeightView w{stored.data(), type, 11, cols, stride};
        for (size_t i = 0; i < ids.size(); ++i)
          widen(w, ids[i], rows.data() + i * static_cast<size_t>(cols));
        w.data = device_stored.data();
        DeviceArray<float> device_rows(rows.size());
        widen_rows_cuda(w, DeviceArray<int32_t>(ids).data(), 5, device_rows.data());
        CHECK(different_floats(device_rows.get(), rows) == "");

        const DeviceArray<float> device_values(values);
        std::vector<std::byte> codes(static_cast<size_t>(11 * cols * weight_bytes(type)));
        for (int64_t r = 0; r < 11; ++r) {
          narrow(values.data() + r * stride, cols, type,
                 codes.data() + r * cols * weight_bytes(type));
        }
        DeviceArray<std::byte> device_codes(codes.size());
        narrow_cuda(device_values.data(), stride, 11, cols, type, device_codes.data());
        CHECK(different_bytes(device_codes.get(), codes) == "");

        std::vector<float> wide(static_cast<size_t>(11 * cols));
        for (int64_t r = 0; r < 11; ++r)
          widen({stored.data(), type, 11, cols, stride}, r, wide.data() + r * cols);
        const DeviceArray<float> device_wide(wide.size());
        widen_cuda(type, device_stored.data(), stride, 11, cols, device_wide.data());
        CHECK(different_floats(device_wide.get(), wide) == "");
      }
    }
  }
}

TEST_CASE("gpu: many strided copies and zeros") {
  if (!gpu()) return;
  std::mt19937 random(88);
  const std::vector<float> source = normals(300000, &random);
  const DeviceArray<float> device_source(source);
  std::vector<float> target(2000000, -7.0f);
  DeviceArray<float> device_target(target);
  std::vector<CopyJob> jobs;
  int64_t at = 0;
  for (int i = 0; i < 300; ++i) {
    const int64_t rows = static_cast<int64_t>(random() % 9);
    const int64_t cols = static_cast<int64_t>(i % 7 == 0 ? random() % 400 * 4 : random() % 60);
    const int64_t to_stride = cols + static_cast<int64_t>(i % 3 == 0 ? 0 : random() % 8);
    const int64_t from_stride = i % 5 == 0 ? cols : cols + 4 * static_cast<int64_t>(random() % 3);
    const int64_t from =
        static_cast<int64_t>(random() % 100000) / (i % 2 == 0 ? 4 : 1) * (i % 2 == 0 ? 4 : 1);
    const bool zeros = i % 11 == 0;
    if (i % 4 == 0) at = (at + 3) / 4 * 4;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        target[static_cast<size_t>(at + r * to_stride + c)] =
            zeros ? 0.0f : source[static_cast<size_t>(from + r * from_stride + c)];
      }
    }
    jobs.push_back({device_target.data() + at, to_stride,
                    zeros ? nullptr : device_source.data() + from, from_stride, rows, cols});
    at += rows * to_stride + 5;
  }
  REQUIRE(at < static_cast<int64_t>(target.size()));
  copy_cuda(jobs);
  CHECK(different_floats(device_target.get(), target) == "");

  // One run longer than a row of the copy, and its rest.
  const auto long_run = static_cast<int64_t>((size_t{1} << 20) + 7);
  DeviceArray<float> device_copy(target.size());
  device_copy.fill(0);
  const CopyJob whole{device_copy.data(), long_run, device_target.data(), long_run, 1, long_run};
  const CopyJob rows{
      device_copy.data() + long_run, 1000, device_target.data() + long_run, 1000, 900, 1000};
  copy_cuda(std::vector<CopyJob>{whole, rows});
  std::vector<float> want(target.size(), 0.0f);
  std::copy_n(target.begin(), long_run + 900000, want.begin());
  CHECK(different_floats(device_copy.get(), want) == "");
  CHECK_THROWS_AS(copy_cuda(std::vector<CopyJob>{{device_copy.data(), 1, nullptr, 1, -1, 1}}),
                  std::invalid_argument);
}

TEST_CASE("gpu: scalars of GDN steps, and sums of decays") {
  if (!gpu()) return;
  std::mt19937 random(89);
  for (int heads : {1, 30, 32, 65}) {
    constexpr int64_t kTokens = 77;
    const size_t n = static_cast<size_t>(kTokens * heads);
    std::vector<float> a = normals(n, &random), b = normals(n, &random);
    for (float& value : a) value = std::abs(value);
    std::vector<float> a_exp = normals(static_cast<size_t>(heads), &random);
    for (float& value : a_exp) value = std::abs(value);
    std::vector<float> scalars(2 * n);
    const float log2e = 1.44269504088896340736f;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const auto i = static_cast<size_t>(t * heads + h);
        scalars[static_cast<size_t>(t * 2 * heads + h)] =
            -(a_exp[static_cast<size_t>(h)] * a[i]) * log2e;
        scalars[static_cast<size_t>(t * 2 * heads + heads + h)] = b[i];
      }
    }
    const DeviceArray<float> device_a(a), device_b(b), device_a_exp(a_exp);
    DeviceArray<float> device_scalars(2 * n);
    gdn_scalars_cuda(device_a.data(), device_b.data(), device_a_exp.data(), kTokens, heads,
                     device_scalars.data());
    CHECK(different_floats(device_scalars.get(), scalars) == "");

    std::vector<float> factor = normals(static_cast<size_t>(heads), &random);
    for (float& value : factor) value = -std::abs(value);
    const DeviceArray<float> device_factor(factor);
    for (bool with_factor : {false, true}) {
      DeviceArray<double> sums(std::vector<double>(static_cast<size_t>(heads), 3.0));
      decay_sum_cuda(device_scalars.data(), 2 * heads, with_factor ? device_factor.data() : nullptr,
                     kTokens, heads, sums.data());
      const std::vector<double> got = sums.get();
      for (int64_t h = 0; h < heads; ++h) {
        double want = 3.0;
        for (int64_t t = 0; t < kTokens; ++t) {
          float value = scalars[static_cast<size_t>(t * 2 * heads + h)];
          if (with_factor) value *= factor[static_cast<size_t>(h)];
          want += std::exp2(static_cast<double>(value));
        }
        // Two units in the last place of each FP32 power.
        CHECK(std::abs(got[static_cast<size_t>(h)] - want) <= 0x1p-22 * want);
      }
    }
  }
}

TEST_CASE("gpu: wrong shapes are refused as on the host") {
  if (!gpu()) return;
  DeviceArray<float> x(64);
  CHECK_THROWS_AS(rms_norm_cuda({x.data(), 7}, x.data(), 16, nullptr, 0, x.data(), 16, 1, 16),
                  std::invalid_argument);
  CHECK_THROWS_AS(rms_norm_cuda({nullptr, 16}, x.data(), 16, nullptr, 0, x.data(), 16, 1, 16),
                  std::invalid_argument);
  CHECK_THROWS_AS(rotary_apply_cuda(x.data(), 16, 1, 1, 16, 18, x.data(), x.data()),
                  std::invalid_argument);
  DeviceArray<uint16_t> codes(64);
  CHECK_THROWS_AS(scale_cuda(codes.data(), 16, 2.0f, nullptr, 1, 16, WeightType::fp16),
                  std::invalid_argument);
  CHECK_THROWS_AS(add_rms_norm_cuda<uint16_t>({x.data(), 16}, WeightType::fp32, x.data(),
                                              codes.data(), codes.data(), 1, 16),
                  std::invalid_argument);
}
