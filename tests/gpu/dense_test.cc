// Dense products on the device against the host's, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/dense_cuda.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

constexpr WeightType kTypes[] = {WeightType::fp32, WeightType::bf16, WeightType::fp16};

std::vector<float> normals(size_t n, std::mt19937* random, float scale = 1.0f) {
  std::vector<float> x(n);
  std::normal_distribution<float> normal;
  for (float& value : x) value = scale * normal(*random);
  return x;
}

/// A weight on the host and on the device, `skip` elements behind a multiple of 256 bytes.
struct Weight {
  std::vector<std::byte> host;
  DeviceArray<std::byte> device;
  WeightView view, device_view;

  Weight(WeightType type, int64_t rows, int64_t cols, int64_t stride, int64_t skip,
         std::mt19937* random)
      : host(static_cast<size_t>((skip + rows * stride + 1) * weight_bytes(type))) {
    const std::vector<float> values = normals(host.size() / weight_bytes(type), random);
    narrow(values.data(), static_cast<int64_t>(values.size()), type, host.data());
    device = DeviceArray<std::byte>(host);
    view = {host.data() + skip * weight_bytes(type), type, rows, cols, stride};
    device_view = view;
    device_view.data = device.data() + skip * weight_bytes(type);
  }
};

}  // namespace

TEST_CASE("gpu: products have the host's bits at any size, stride and alignment") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(91);
  for (WeightType type : kTypes) {
    for (int64_t m : {1, 3, 16, 17, 64, 130}) {
      for (int64_t rows : {1, 31, 129, 200}) {
        for (int64_t cols : {1, 3, 16, 37, 160, 300}) {
          // Strides on multiples of four and off them; the second form starts off them too.
          for (int64_t pad : {(8 - cols % 8) % 8, int64_t{1}}) {
            INFO("type " << static_cast<int>(type) << ", m " << m << ", rows " << rows << ", cols "
                         << cols << ", pad " << pad);
            const int64_t skip = pad == 1 ? 1 : 0;
            const int64_t x_stride = cols + pad, y_stride = rows + 2;
            std::vector<float> x = normals(static_cast<size_t>(skip + m * x_stride), &random);
            if (m > 2) {
              x[static_cast<size_t>(skip + x_stride)] = NAN;
              x[static_cast<size_t>(skip + 2 * x_stride + cols - 1)] = INFINITY;
            }
            const Weight w(type, rows, cols, cols + pad, skip, &random);
            const std::vector<float> bias = normals(static_cast<size_t>(rows), &random);
            const bool with_bias = (m + rows + cols) % 2 == 0;
            std::vector<float> y(static_cast<size_t>(m * y_stride), -7.0f);
            const DeviceArray<float> device_x(x), device_bias(bias);
            DeviceArray<float> device_y(y);
            linear(x.data() + skip, m, x_stride, w.view, with_bias ? bias.data() : nullptr,
                   y.data(), y_stride);
            linear_cuda(device_x.data() + skip, m, x_stride, w.device_view,
                        with_bias ? device_bias.data() : nullptr, device_y.data(), y_stride);
            REQUIRE(different_floats(device_y.get(), y) == "");
          }
        }
      }
    }
  }
}

TEST_CASE("gpu: products of one, of few and of many tiles a multiprocessor have the host's bits") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(94);
  const int64_t processors = cuda_device().multiprocessors;
  struct Sizes {
    int64_t m, rows;
  };
  // Tiles of 64 x 128: four and a third each; of 128 x 128: one each.
  for (const Sizes& size : {Sizes{500, processors * 70 - 30}, Sizes{1500, processors * 128 / 12}}) {
    for (WeightType type : kTypes) {
      for (int64_t cols : {37, 72}) {
        INFO("m " << size.m << ", rows " << size.rows << ", cols " << cols << ", type "
                  << static_cast<int>(type));
        const std::vector<float> x = normals(static_cast<size_t>(size.m * cols), &random);
        const Weight w(type, size.rows, cols, cols, 0, &random);
        const std::vector<float> bias = normals(static_cast<size_t>(size.rows), &random);
        std::vector<float> y(static_cast<size_t>(size.m * size.rows));
        const DeviceArray<float> device_x(x), device_bias(bias);
        DeviceArray<float> device_y(y.size());
        linear(x.data(), size.m, cols, w.view, bias.data(), y.data(), size.rows);
        linear_cuda(device_x.data(), size.m, cols, w.device_view, device_bias.data(),
                    device_y.data(), size.rows);
        CHECK(different_floats(device_y.get(), y) == "");
      }
    }
  }
}

TEST_CASE("gpu: a sum of vanishing negative products stays -0") {
  if (!gpu() || !host_has_fma()) return;
  for (int64_t m : {4, 40}) {
    for (int64_t cols : {5, 16, 21}) {
      const std::vector<float> x(static_cast<size_t>(m * cols), -1e-30f);
      const std::vector<float> w(static_cast<size_t>(8 * cols), 1e-30f);
      std::vector<float> y(static_cast<size_t>(m * 8));
      const DeviceArray<float> device_x(x), device_w(w);
      DeviceArray<float> device_y(y.size());
      linear(x.data(), m, cols, {w.data(), WeightType::fp32, 8, cols, cols}, nullptr, y.data(), 8);
      REQUIRE(std::signbit(y[0]));
      linear_cuda(device_x.data(), m, cols, {device_w.data(), WeightType::fp32, 8, cols, cols},
                  nullptr, device_y.data(), 8);
      CHECK(different_floats(device_y.get(), y) == "");
    }
  }
}

TEST_CASE("gpu: long products and wide layers have the host's bits, and the equation's values") {
  if (!gpu()) return;
  std::mt19937 random(92);
  for (WeightType type : kTypes) {
    for (int64_t m : {9, 200}) {
      constexpr int64_t kRows = 300, kCols = 2560;
      const std::vector<float> x = normals(static_cast<size_t>(m * kCols), &random);
      const Weight w(type, kRows, kCols, kCols, 0, &random);
      const DeviceArray<float> device_x(x);
      std::vector<float> y(static_cast<size_t>(m * kRows)), reference(y);
      DeviceArray<float> device_y(y.size());
      linear_cuda(device_x.data(), m, kCols, w.device_view, nullptr, device_y.data(), kRows);
      const std::vector<float> got = device_y.get();
      if (host_has_fma()) {
        linear(x.data(), m, kCols, w.view, nullptr, y.data(), kRows);
        CHECK(different_floats(got, y) == "");
      }
      const int64_t checked = std::min<int64_t>(m, 4);
      linear_reference(x.data(), checked, kCols, w.view, nullptr, reference.data(), kRows);
      std::vector<float> row(kCols);
      for (int64_t r = 0; r < kRows; ++r) {
        widen(w.view, r, row.data());
        for (int64_t i = 0; i < checked; ++i) {
          double size = 0;
          for (int64_t c = 0; c < kCols; ++c)
            size += std::abs(static_cast<double>(x[static_cast<size_t>(i * kCols + c)]) *
                             row[static_cast<size_t>(c)]);
          // gamma_n of the n fused steps, and the reference's own rounding.
          const double bound = size * kCols * 0x1p-24 / (1 - kCols * 0x1p-24) + size * 0x1p-24;
          const auto at = static_cast<size_t>(i * kRows + r);
          CHECK(std::abs(static_cast<double>(got[at]) - reference[at]) <= bound);
        }
      }
    }
  }
}

TEST_CASE("gpu: jobs with gathered rows, of all sizes and types at once") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(93);
  constexpr int64_t kCols = 96, kTokens = 150;
  const std::vector<float> x = normals(static_cast<size_t>(kTokens * kCols), &random);
  const DeviceArray<float> device_x(x);
  for (int count : {3, 60}) {
    std::vector<Weight> weights;
    std::vector<std::vector<int32_t>> gathered;
    std::vector<DeviceArray<int32_t>> device_gathered;
    std::vector<LinearJob> jobs, device_jobs;
    std::vector<int64_t> first;
    int64_t floats = 0;
    for (int i = 0; i < count; ++i) {
      const int64_t m = i % 5 == 0 ? 0 : i % 3 == 0 ? random() % 16 + 1 : random() % 140 + 1;
      const int64_t rows = 20 + static_cast<int64_t>(random() % 120);
      weights.emplace_back(kTypes[i % 3], rows, kCols, kCols, 0, &random);
      std::vector<int32_t> list;
      for (int64_t t = 0; t < m; ++t) list.push_back(static_cast<int32_t>(random() % kTokens));
      gathered.push_back(std::move(list));
      device_gathered.emplace_back(gathered.back());
      first.push_back(floats);
      floats += m * rows;
    }
    std::vector<float> y(static_cast<size_t>(floats) + 1, -7.0f);
    DeviceArray<float> device_y(y);
    for (size_t i = 0; i < weights.size(); ++i) {
      LinearJob job;
      job.x = x.data();
      job.x_stride = kCols;
      job.m = static_cast<int64_t>(gathered[i].size());
      job.x_rows = i % 7 == 1 ? nullptr : gathered[i].data();
      job.w = weights[i].view;
      job.y = y.data() + first[i];
      job.y_stride = job.w.rows;
      jobs.push_back(job);
      job.x = device_x.data();
      job.x_rows = job.x_rows != nullptr ? device_gathered[i].data() : nullptr;
      job.w = weights[i].device_view;
      job.y = device_y.data() + first[i];
      device_jobs.push_back(job);
    }
    linear(jobs);
    linear_cuda(device_jobs);
    CHECK(different_floats(device_y.get(), y) == "");
  }
}

TEST_CASE("gpu: wrong products are refused, empty ones are none") {
  if (!gpu()) return;
  DeviceArray<float> x(64), y(64);
  const WeightView w{x.data(), WeightType::fp32, 4, 8, 8};
  CHECK_THROWS_AS(linear_cuda(x.data(), 2, 7, w, nullptr, y.data(), 4), std::invalid_argument);
  CHECK_THROWS_AS(linear_cuda(x.data(), 2, 8, w, nullptr, y.data(), 3), std::invalid_argument);
  CHECK_THROWS_AS(linear_cuda(x.data(), -1, 8, w, nullptr, y.data(), 4), std::invalid_argument);
  CHECK_THROWS_AS(
      linear_cuda(x.data(), 1, 8, {x.data(), WeightType::fp32, 4, 8, 7}, nullptr, y.data(), 4),
      std::invalid_argument);
  y.fill(0x41);
  const std::vector<float> before = y.get();
  linear_cuda(x.data(), 0, 8, w, nullptr, y.data(), 4);
  CHECK(different_floats(y.get(), before) == "");
  // Without columns the sums are empty: 0, or the bias.
  linear_cuda(x.data(), 2, 0, {x.data(), WeightType::bf16, 4, 0, 0}, nullptr, y.data(), 4);
  CHECK(y.get()[0] == 0.0f);
}
