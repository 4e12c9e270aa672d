// Attention over contiguous keys and values on the device against the host's pages, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <random>

#include "kernels/attention_cuda.h"
#include "kernels/dense.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

/// One row: the host's cache and the device's arrays with the same keys and values, appended in two
/// parts, and queries for the last `tokens` positions.
struct Row {
  KvCache cache;
  KvType type;
  int64_t position, tokens, stride;
  std::vector<float> q, out;
  DeviceArray<std::byte> k, v;
  DeviceArray<float> device_q, device_out;

  /// change(k, v, q) may put in special values; k, v [positions, kv_heads, head_dim].
  template <class Change>
  Row(int heads, int kv_heads, int head_dim, KvType kv_type, int64_t first, int64_t count,
      std::mt19937* random, Change change)
      : cache(kv_heads, head_dim, kv_type),
        type(kv_type),
        position(first),
        tokens(count),
        stride(int64_t{heads} * head_dim + 5) {
    const int64_t width = int64_t{kv_heads} * head_dim, length = first + count;
    std::normal_distribution<float> normal;
    std::vector<float> keys(static_cast<size_t>(length * width)), values(keys);
    q.resize(static_cast<size_t>(count * stride));
    for (float& x : keys) x = normal(*random);
    for (float& x : values) x = normal(*random);
    for (float& x : q) x = normal(*random);
    change(keys, values, q);
    cache.append(keys.data(), width, values.data(), width, length);
    out.assign(q.size(), -7.0f);
    device_q = DeviceArray<float>(q);
    device_out = DeviceArray<float>(out);
    const size_t bytes = type == KvType::bf16 ? 2 : 4;
    k = DeviceArray<std::byte>(keys.size() * bytes);
    v = DeviceArray<std::byte>(keys.size() * bytes);
    const DeviceArray<float> device_keys(keys), device_values(values);
    const int64_t part = length / 3;
    append_kv_cuda(device_keys.data(), width, device_values.data(), width, part, width, k.data(),
                   v.data(), type);
    append_kv_cuda(device_keys.data() + part * width, width, device_values.data() + part * width,
                   width, length - part, width,
                   k.data() + static_cast<size_t>(part * width) * bytes,
                   v.data() + static_cast<size_t>(part * width) * bytes, type);
    cuda_synchronize();
  }
  AttentionRow host() { return {&cache, position, tokens, q.data(), stride, out.data(), stride}; }
  AttentionRowCuda device() {
    return {k.data(), v.data(),          type,  position, tokens, device_q.data(),
            stride,   device_out.data(), stride};
  }
};

const auto kUnchanged = [](std::vector<float>&, std::vector<float>&, std::vector<float>&) {};

struct Heads {
  int heads, kv_heads, head_dim;
};

}  // namespace

TEST_CASE("gpu: attention has the host's bits for chunks and single tokens of any shape") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(101);
  for (const Heads& h : {Heads{4, 2, 64}, Heads{6, 1, 37}, Heads{3, 3, 128}, Heads{16, 2, 256},
                         Heads{70, 1, 16}, Heads{8, 8, 80}, Heads{5, 1, 200}, Heads{2, 2, 1}}) {
    for (KvType type : {KvType::fp32, KvType::bf16}) {
      INFO("heads " << h.heads << ", KV heads " << h.kv_heads << ", head_dim " << h.head_dim
                    << ", type " << static_cast<int>(type));
      std::deque<Row> rows;
      for (auto [first, count] : {std::pair<int64_t, int64_t>{0, 5},
                                  {61, 70},
                                  {130, 1},
                                  {127, 1},
                                  {0, 1},
                                  {64, 0},
                                  {200, 129}}) {
        rows.emplace_back(h.heads, h.kv_heads, h.head_dim, type, first, count, &random, kUnchanged);
      }
      std::vector<AttentionRow> host;
      std::vector<AttentionRowCuda> device;
      for (Row& row : rows) {
        host.push_back(row.host());
        device.push_back(row.device());
      }
      const float scale = 1.0f / std::sqrt(static_cast<float>(h.head_dim));
      attention(host, h.heads, scale);
      attention_cuda(device, h.heads, h.kv_heads, h.head_dim, scale);
      for (Row& row : rows) CHECK(different_floats(row.device_out.get(), row.out) == "");
      // Single tokens alone take another cut of blocks.
      for (Row& row : rows) {
        if (row.tokens != 1) continue;
        row.device_out.fill(0);
        const AttentionRowCuda one = row.device();
        attention_cuda({&one, 1}, h.heads, h.kv_heads, h.head_dim, scale);
        std::vector<float> got = row.device_out.get();
        const auto width = static_cast<size_t>(h.heads * h.head_dim);
        got.resize(width);
        CHECK(different_floats(got, {row.out.begin(), row.out.begin() + width}) == "");
      }
    }
  }
}

TEST_CASE("gpu: attention of NaN, infinities and large scores, in place, rows of both types") {
  if (!gpu() || !host_has_fma()) return;
  std::mt19937 random(102);
  constexpr Heads kHeads{4, 2, 64};
  constexpr int64_t kWidth = 128;
  std::deque<Row> rows;
  const auto add = [&](KvType type, int64_t first, int64_t count, auto change) {
    rows.emplace_back(kHeads.heads, kHeads.kv_heads, kHeads.head_dim, type, first, count, &random,
                      change);
  };
  using Values = std::vector<float>&;
  for (KvType type : {KvType::fp32, KvType::bf16}) {
    // Keys and values of the future are NaN: only queries that see them are NaN.
    add(type, 90, 60, [&](Values k, Values v, Values) {
      std::fill(k.begin() + 110 * kWidth, k.end(), NAN);
      std::fill(v.begin() + 130 * kWidth, v.end(), INFINITY);
    });
    add(type, 70, 1, [&](Values k, Values, Values) { k[3] = NAN; });
    // No finite score in the first page, or anywhere.
    add(type, 0, 150, [&](Values k, Values, Values q) {
      std::fill(k.begin(), k.begin() + 64 * kWidth, -INFINITY);
      for (float& x : q) x = std::abs(x);
    });
    add(type, 3, 2, [&](Values k, Values, Values q) {
      std::fill(k.begin(), k.end(), -INFINITY);
      for (float& x : q) x = std::abs(x);
    });
    // Scores of thousands: weights vanish and the maximum moves from page to page.
    add(type, 300, 40, [&](Values, Values, Values q) {
      for (float& x : q) x *= 1000.0f;
    });
    add(type, 20, 20, [&](Values, Values, Values q) {
      q[0] = INFINITY;
      q[600] = NAN;
    });
  }
  std::vector<AttentionRow> host;
  std::vector<AttentionRowCuda> device;
  for (Row& row : rows) {
    host.push_back(row.host());
    device.push_back(row.device());
    host.back().out = row.q.data();
    device.back().out = row.device_q.data();
  }
  attention(host, kHeads.heads, 0.125f);
  attention_cuda(device, kHeads.heads, kHeads.kv_heads, kHeads.head_dim, 0.125f);
  for (size_t i = 0; i < rows.size(); ++i) {
    INFO("row " << i);
    CHECK(different_floats(rows[i].device_q.get(), rows[i].q) == "");
  }
}

TEST_CASE("gpu: a chunk cut anywhere, and more rows than a launch takes, have the same bits") {
  if (!gpu()) return;
  std::mt19937 random(103);
  constexpr Heads kHeads{6, 2, 96};
  Row row(kHeads.heads, kHeads.kv_heads, kHeads.head_dim, KvType::bf16, 100, 90, &random,
          kUnchanged);
  const AttentionRowCuda whole = row.device();
  attention_cuda({&whole, 1}, kHeads.heads, kHeads.kv_heads, kHeads.head_dim, 0.1f);
  const std::vector<float> want = row.device_out.get();
  row.device_out.set(row.out);
  std::vector<AttentionRowCuda> parts;
  for (int64_t t = 0; t < 90; ++t) {
    AttentionRowCuda part = whole;
    part.position += t;
    part.tokens = 1;
    part.q += t * row.stride;
    part.out += t * row.stride;
    parts.push_back(part);
  }
  attention_cuda(parts, kHeads.heads, kHeads.kv_heads, kHeads.head_dim, 0.1f);
  CHECK(different_floats(row.device_out.get(), want) == "");
}

TEST_CASE("gpu: attention is the FP64 equation within the bound of its operations") {
  if (!gpu()) return;
  std::mt19937 random(104);
  constexpr Heads kHeads{4, 1, 128};
  constexpr int64_t kFirst = 500, kTokens = 20;
  Row row(kHeads.heads, kHeads.kv_heads, kHeads.head_dim, KvType::fp32, kFirst, kTokens, &random,
          kUnchanged);
  const AttentionRowCuda device = row.device();
  const float scale = 0.088388347648f;
  attention_cuda({&device, 1}, kHeads.heads, kHeads.kv_heads, kHeads.head_dim, scale);
  const std::vector<float> got = row.device_out.get();
  const AttentionRow host = row.host();
  attention_reference({&host, 1}, kHeads.heads, scale);
  std::vector<float> k(static_cast<size_t>((kFirst + kTokens) * kHeads.head_dim)), v(k);
  row.cache.read(0, kFirst + kTokens, k.data(), v.data());
  const double largest_value = std::abs(*std::max_element(
      v.begin(), v.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < kHeads.heads; ++h) {
      const float* q = row.q.data() + t * row.stride + h * kHeads.head_dim;
      double score_size = 0;
      for (int64_t j = 0; j <= kFirst + t; ++j) {
        double size = 0;
        for (int64_t d = 0; d < kHeads.head_dim; ++d)
          size +=
              std::abs(static_cast<double>(q[d]) * k[static_cast<size_t>(j * kHeads.head_dim + d)]);
        score_size = std::max(score_size, size * scale);
      }
      // A score is off by head_dim + 3 roundings of its terms' size, so a weight relatively by that
      // and 4 more; sums add one rounding a key and a page. Both numerator and sum: twice.
      const double keys = static_cast<double>(kFirst + t + 1);
      const double relative =
          2 * ((kHeads.head_dim + 3) * score_size + 4 + keys + 2 * keys / kKvPage) * 0x1p-24;
      for (int64_t d = 0; d < kHeads.head_dim; ++d) {
        const auto at = static_cast<size_t>(t * row.stride + h * kHeads.head_dim + d);
        CHECK(std::abs(static_cast<double>(got[at]) - row.out[at]) <= relative * largest_value);
      }
    }
  }
}

TEST_CASE("gpu: keys and values are appended with the cache's rounding") {
  if (!gpu()) return;
  std::mt19937 random(105);
  for (int64_t width : {1, 37, 128}) {
    for (KvType type : {KvType::fp32, KvType::bf16}) {
      constexpr int64_t kTokens = 19;
      const int64_t k_stride = width + 3, v_stride = width;
      std::normal_distribution<float> normal;
      std::vector<float> k(static_cast<size_t>(kTokens * k_stride)), v(k.size());
      for (float& x : k) x = normal(random);
      for (float& x : v) x = normal(random);
      v[0] = -INFINITY;
      const size_t bytes = type == KvType::bf16 ? 2 : 4;
      const auto stored = static_cast<WeightType>(type == KvType::bf16);
      std::vector<std::byte> want_k(static_cast<size_t>(kTokens * width) * bytes), want_v(want_k);
      for (int64_t t = 0; t < kTokens; ++t) {
        const size_t at = static_cast<size_t>(t * width) * bytes;
        narrow(k.data() + t * k_stride, width, stored, want_k.data() + at);
        narrow(v.data() + t * v_stride, width, stored, want_v.data() + at);
      }
      const DeviceArray<float> device_k(k), device_v(v);
      DeviceArray<std::byte> k_out(want_k.size()), v_out(want_v.size());
      append_kv_cuda(device_k.data(), k_stride, device_v.data(), v_stride, kTokens, width,
                     k_out.data(), v_out.data(), type);
      CHECK(different_bytes(k_out.get(), want_k) == "");
      CHECK(different_bytes(v_out.get(), want_v) == "");
    }
  }
}

TEST_CASE("gpu: wrong attention calls are refused") {
  if (!gpu()) return;
  DeviceArray<float> x(4096);
  AttentionRowCuda row{x.data(), x.data(), KvType::fp32, 0, 2, x.data(), 64, x.data(), 64};
  CHECK_THROWS_AS(attention_cuda({&row, 1}, 1, 1, 257, 1.0f), std::invalid_argument);
  CHECK_THROWS_AS(attention_cuda({&row, 1}, 3, 2, 64, 1.0f), std::invalid_argument);
  CHECK_THROWS_AS(attention_cuda({&row, 1}, 2, 1, 64, 1.0f), std::invalid_argument);
  row.position = -1;
  CHECK_THROWS_AS(attention_cuda({&row, 1}, 1, 1, 64, 1.0f), std::invalid_argument);
}
