// Attention of single tokens over pages against attention_cuda over the same keys and values, bit
// for bit; its fast form against FP64 within a bound from the operations.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/attention_cuda.h"
#include "kernels/decode_cuda.h"
#include "kernels/paged_attention_cuda.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

struct Shape {
  int heads, kv_heads, head_dim;
  int64_t width() const { return int64_t{heads} * head_dim; }
  int64_t kv_width() const { return int64_t{kv_heads} * head_dim; }
};

std::vector<float> normals(size_t n, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(*random);
  return values;
}

/// Rows with keys and values up to their positions twice: contiguous, and in pages of a pool that
/// is NaN elsewhere, in any order. The last token of each row is appended by itself.
class Layer {
 public:
  /// change(row, k, v) may put in special values; k, v [positions, kv_heads, head_dim].
  template <class Change>
  Layer(Shape shape, KvType type, int page, std::vector<int64_t> positions, std::mt19937* random,
        Change change)
      : shape_(shape), type_(type), positions_(std::move(positions)) {
    const int rows = static_cast<int>(positions_.size());
    const int64_t most = *std::max_element(positions_.begin(), positions_.end()) + 1;
    const auto stride = static_cast<int32_t>(most / page + 2);
    int64_t pages = 0;
    for (int64_t position : positions_) pages += position / page + 1;
    std::vector<int32_t> order(static_cast<size_t>(pages) + 3);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), *random);
    // Entries behind a row's last page must not be followed.
    std::vector<int32_t> table(static_cast<size_t>(rows) * static_cast<size_t>(stride),
                               -(int32_t{1} << 30));
    size_t taken = 0;
    for (size_t r = 0; r < positions_.size(); ++r) {
      for (int64_t p = 0; positions_[r] >= 0 && p <= positions_[r] / page; ++p)
        table[r * static_cast<size_t>(stride) + static_cast<size_t>(p)] = order[taken++];
    }
    table_ = DeviceArray<int32_t>(table);
    device_positions_ = DeviceArray<int64_t>(positions_);
    kv_.type = type;
    kv_.kv_heads = shape.kv_heads;
    kv_.head_dim = shape.head_dim;
    kv_.page = page;
    kv_.table = table_.data();
    kv_.table_stride = stride;
    const size_t bytes = paged_kv_bytes(kv_, static_cast<int64_t>(order.size()));
    pool_k_ = DeviceArray<std::byte>(bytes);
    pool_v_ = DeviceArray<std::byte>(bytes);
    pool_k_.fill(0xFF);
    pool_v_.fill(0xFF);
    kv_.k = pool_k_.data();
    kv_.v = pool_v_.data();

    const int64_t width = shape.kv_width();
    const size_t element = type == KvType::bf16 ? 2 : 4;
    std::vector<float> last_k(static_cast<size_t>(rows * (width + 3))), last_v(last_k);
    for (int r = 0; r < rows; ++r) {
      const int64_t length = positions_[static_cast<size_t>(r)] + 1;
      const auto n = static_cast<size_t>(std::max<int64_t>(length, 0) * width);
      std::vector<float> k = normals(n, random), v = normals(n, random);
      change(r, k, v);
      k_.emplace_back(n * element);
      v_.emplace_back(n * element);
      if (length <= 0) continue;
      const DeviceArray<float> device_k(k), device_v(v);
      append_kv_cuda(device_k.data(), width, device_v.data(), width, length, width,
                     k_.back().data(), v_.back().data(), type);
      load_paged_cuda(k_.back().data(), v_.back().data(), length - 1, kv_, r);
      cuda_synchronize();
      std::copy(k.end() - width, k.end(), last_k.begin() + r * (width + 3));
      std::copy(v.end() - width, v.end(), last_v.begin() + r * (width + 3));
    }
    const DeviceArray<float> device_k(last_k), device_v(last_v);
    append_paged_cuda(device_k.data(), width + 3, device_v.data(), width + 3, rows, kv_,
                      device_positions_.data());
    cuda_synchronize();
  }

  /// Both results for the queries [rows, q_stride], of which `heads * head_dim` count; rows without
  /// a position keep -7.
  void check(const std::vector<float>& q, int64_t stride, bool in_place = false) const {
    const int rows = static_cast<int>(positions_.size());
    std::vector<float> start(q.size(), -7.0f);
    if (in_place) start = q;
    const DeviceArray<float> device_q(q), want(start);
    std::vector<AttentionRowCuda> reference;
    for (int r = 0; r < rows; ++r) {
      const auto i = static_cast<size_t>(r);
      if (positions_[i] < 0) continue;
      reference.push_back({k_[i].data(), v_[i].data(), type_, positions_[i], 1,
                           device_q.data() + r * stride, stride, want.data() + r * stride, stride});
    }
    attention_cuda(reference, shape_.heads, shape_.kv_heads, shape_.head_dim, scale());
    const int64_t most = *std::max_element(positions_.begin(), positions_.end()) + 1;
    for (int64_t bound : {most, int64_t{kv_.table_stride} * kv_.page}) {
      const DeviceArray<float> got(start);
      DeviceArray<std::byte> workspace(paged_attention_workspace(rows, shape_.heads, bound));
      workspace.fill(0xFF);
      paged_attention_cuda(in_place ? got.data() : device_q.data(), stride, got.data(), stride,
                           rows, shape_.heads, kv_, device_positions_.data(), bound, scale(),
                           workspace.data());
      CHECK(different_floats(got.get(), want.get()) == "");
    }
  }
  void check(std::mt19937* random) const {
    const int64_t stride = shape_.width() + 3;
    check(normals(positions_.size() * static_cast<size_t>(stride), random), stride);
  }

  /// The fast form's outputs [rows, stride], -7 where it writes nothing, with these positions (at
  /// most the layer's).
  std::vector<float> fast(const std::vector<float>& q, int64_t stride,
                          const std::vector<int64_t>& positions, int64_t bound,
                          bool in_place = false) const {
    const int rows = static_cast<int>(positions.size());
    const DeviceArray<int64_t> device_positions(positions);
    const DeviceArray<float> device_q(q), got(in_place ? q : std::vector<float>(q.size(), -7.0f));
    DeviceArray<std::byte> workspace(
        paged_attention_fast_workspace(rows, shape_.heads, kv_, bound));
    workspace.fill(0xFF);
    paged_attention_fast_cuda(in_place ? got.data() : device_q.data(), stride, got.data(), stride,
                              rows, shape_.heads, kv_, device_positions.data(), bound, scale(),
                              workspace.data());
    return got.get();
  }

  /// The fast form against FP64 with every bound of positions, whose bits are the same. Pages of
  /// BF16.
  void check_fast(std::mt19937* random) const {
    const int64_t stride = shape_.width() + 3;
    const std::vector<float> q = normals(positions_.size() * static_cast<size_t>(stride), random);
    const int64_t most = *std::max_element(positions_.begin(), positions_.end()) + 1;
    const std::vector<float> got = fast(q, stride, positions_, most);
    CHECK(different_floats(fast(q, stride, positions_, int64_t{kv_.table_stride} * kv_.page),
                           got) == "");
    for (size_t r = 0; r < positions_.size(); ++r) {
      const float* row = got.data() + r * static_cast<size_t>(stride);
      const auto width = static_cast<size_t>(positions_[r] < 0 ? 0 : shape_.width());
      CHECK(std::all_of(row + width, row + stride, [](float x) { return x == -7.0f; }));
      INFO("row " << r << " of " << positions_[r] + 1 << " positions");
      if (width > 0) CHECK(worst_error(r, q.data() + r * static_cast<size_t>(stride), row) <= 1);
    }
  }

  /// NaN and infinities of the fast form are those of attention_cuda.
  void check_fast_kinds(const std::vector<float>& q, bool in_place) const {
    const int64_t stride = shape_.width();
    const int rows = static_cast<int>(positions_.size());
    const DeviceArray<float> device_q(q), out(q.size());
    std::vector<AttentionRowCuda> reference;
    for (int r = 0; r < rows; ++r) {
      const auto i = static_cast<size_t>(r);
      reference.push_back({k_[i].data(), v_[i].data(), type_, positions_[i], 1,
                           device_q.data() + r * stride, stride, out.data() + r * stride, stride});
    }
    attention_cuda(reference, shape_.heads, shape_.kv_heads, shape_.head_dim, scale());
    const std::vector<float> want = out.get();
    const int64_t most = *std::max_element(positions_.begin(), positions_.end()) + 1;
    const std::vector<float> got = fast(q, stride, positions_, most, in_place);
    size_t different = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::isnan(got[i]) != std::isnan(want[i]) || std::isinf(got[i]) != std::isinf(want[i]))
        ++different;
    }
    CHECK(different == 0);
  }

  const PagedKv& kv() const { return kv_; }

 private:
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

  /// Largest error of a row's outputs from FP64 over the BF16 values, as a part of its bound. With
  /// n positions of d channels, weights w = e^(s - m) and u = 2^-23 (a tensor core may cut where
  /// others round):
  ///   a score: d / 16 groups of 16 exact products and the sum before, each cut relative to the
  ///     largest: 17/16 d u scale sum |q k|; its scaling and subtraction u (|s| + |s - m|); e^x 2
  ///     u. Together an error of at most e in every exponent, hence a factor e^(2 e) in the
  ///     quotient.
  ///   the split of a weight in two BF16 parts: 2^-18 of it.
  ///   numerator and denominator: 17 u a tile of 16 positions, and 3 u for the factor that moves
  ///     what is there to a new maximum; at most 4096 positions are summed one after another.
  ///   merging four teams and then n / 256 chunks: 4 u each. The exponents of all these factors,
  ///     differences of maxima: u max |s - m|.
  /// All relative to sum w |v| / sum w, twice: numerator and denominator.
  double worst_error(size_t row, const float* q, const float* got) const {
    const size_t d = static_cast<size_t>(shape_.head_dim),
                 n = static_cast<size_t>(positions_[row]) + 1,
                 kv_width = static_cast<size_t>(shape_.kv_width());
    const std::vector<float> k = widened(k_[row]), v = widened(v_[row]);
    const double u = std::ldexp(1.0, -23);
    const double tiles = static_cast<double>(std::min<size_t>(n, 4096)) / 16 + 1,
                 merges = 4 + static_cast<double>(n) / 256 + 1;
    double worst = 0;
    for (int h = 0; h < shape_.heads; ++h) {
      const size_t kv_at = static_cast<size_t>(h / (shape_.heads / shape_.kv_heads)) * d;
      const float* query = q + static_cast<size_t>(h) * d;
      std::vector<double> scores(n), sizes(n);
      for (size_t j = 0; j < n; ++j) {
        for (size_t c = 0; c < d; ++c) {
          const double product = static_cast<double>(round_operand(DotType::bf16, query[c])) *
                                 k[j * kv_width + kv_at + c];
          scores[j] += product;
          sizes[j] += std::abs(product);
        }
        scores[j] *= scale();
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double total = 0, exponent = 0, spread = 0;
      std::vector<double> sums(d), magnitudes(d);
      for (size_t j = 0; j < n; ++j) {
        const double w = std::exp(scores[j] - top);
        total += w;
        spread = std::max(spread, top - scores[j]);
        exponent = std::max(exponent, u * (17.0 / 16 * static_cast<double>(d) * scale() * sizes[j] +
                                           std::abs(scores[j]) + (top - scores[j]) + 2));
        for (size_t c = 0; c < d; ++c) {
          const double value = v[j * kv_width + kv_at + c];
          sums[c] += w * value;
          magnitudes[c] += w * std::abs(value);
        }
      }
      const double relative = std::expm1(2 * exponent) + std::ldexp(1.0, -18) +
                              2 * u * (20 * tiles + 4 * merges + spread);
      for (size_t c = 0; c < d; ++c) {
        const double error = std::abs(got[static_cast<size_t>(h) * d + c] - sums[c] / total);
        const double part = error / (relative * magnitudes[c] / total);
        worst = part <= worst ? worst : part;  // NaN too
      }
    }
    return worst;
  }
  static std::vector<float> widened(const DeviceArray<std::byte>& codes) {
    const std::vector<std::byte> bytes = codes.get();
    std::vector<float> values(bytes.size() / 2);
    for (size_t i = 0; i < values.size(); ++i) {
      uint16_t code;
      std::memcpy(&code, bytes.data() + 2 * i, 2);
      const uint32_t bits = uint32_t{code} << 16;
      std::memcpy(&values[i], &bits, 4);
    }
    return values;
  }

  Shape shape_;
  KvType type_;
  std::vector<int64_t> positions_;
  PagedKv kv_;
  DeviceArray<int32_t> table_;
  DeviceArray<int64_t> device_positions_;
  DeviceArray<std::byte> pool_k_, pool_v_;
  std::vector<DeviceArray<std::byte>> k_, v_;
};

const auto kUnchanged = [](int, std::vector<float>&, std::vector<float>&) {};
constexpr KvType kTypes[] = {KvType::fp32, KvType::bf16};

}  // namespace

TEST_CASE("gpu: paged attention has the bits of attention over contiguous keys, of any shape") {
  if (!gpu()) return;
  std::mt19937 random(111);
  int page = 64;
  for (const Shape& shape :
       {Shape{4, 2, 32}, Shape{6, 3, 64}, Shape{8, 8, 80}, Shape{4, 2, 128}, Shape{6, 2, 256},
        Shape{16, 4, 256}, Shape{10, 2, 128}, Shape{6, 1, 37}, Shape{7, 1, 64}, Shape{8, 1, 128},
        Shape{12, 1, 96}, Shape{40, 2, 16}, Shape{2, 2, 1}}) {
    for (KvType type : kTypes) {
      INFO("heads " << shape.heads << ", KV heads " << shape.kv_heads << ", head_dim "
                    << shape.head_dim << ", type " << static_cast<int>(type) << ", page " << page);
      Layer(shape, type, page, {0, 1, 31, 32, -1, 63, 64, 65, 127, 128, 200, -5, 300, 255}, &random,
            kUnchanged)
          .check(&random);
      page = page == 256 ? 64 : 2 * page;
    }
  }
}

TEST_CASE("gpu: paged attention over thousands of positions, few rows and many") {
  if (!gpu()) return;
  std::mt19937 random(112);
  for (KvType type : kTypes) {
    Layer({16, 4, 256}, type, 64, {5000}, &random, kUnchanged).check(&random);
    Layer({40, 8, 128}, type, 128, {4095, 10, 4096, 2777}, &random, kUnchanged).check(&random);
    std::vector<int64_t> positions(150);
    for (int64_t& position : positions) position = static_cast<int64_t>(random() % 400) - 20;
    Layer({4, 2, 64}, type, 64, positions, &random, kUnchanged).check(&random);
  }
}

TEST_CASE("gpu: paged attention of NaN, infinities and large scores, in place") {
  if (!gpu()) return;
  std::mt19937 random(113);
  constexpr Shape kShape{4, 2, 64};
  for (KvType type : kTypes) {
    const Layer layer(kShape, type, 64, {70, 150, 3, 300, 20, 90}, &random,
                      [](int row, std::vector<float>& k, std::vector<float>& v) {
                        // A NaN key; no finite score in the first page; none at all; an infinite
                        // value.
                        if (row == 0) k[3] = NAN;
                        if (row == 1) std::fill(k.begin(), k.begin() + 64 * 128, -INFINITY);
                        if (row == 2) std::fill(k.begin(), k.end(), -INFINITY);
                        if (row == 5) v[80 * 128 + 7] = INFINITY;
                      });
    const int64_t stride = kShape.width();
    std::vector<float> q = normals(static_cast<size_t>(6 * stride), &random);
    for (int64_t c = stride; c < 3 * stride; ++c)
      q[static_cast<size_t>(c)] = std::abs(q[static_cast<size_t>(c)]);
    // Scores of thousands: weights vanish and the maximum moves from page to page.
    for (int64_t c = 3 * stride; c < 4 * stride; ++c) q[static_cast<size_t>(c)] *= 1000.0f;
    q[static_cast<size_t>(4 * stride)] = INFINITY;
    q[static_cast<size_t>(4 * stride + 100)] = NAN;
    layer.check(q, stride);
    layer.check(q, stride, true);
    if (type == KvType::fp32) continue;
    layer.check_fast_kinds(q, false);
    layer.check_fast_kinds(q, true);
  }
}

TEST_CASE("gpu: captured steps of paged attention are the steps one by one") {
  if (!gpu()) return;
  std::mt19937 random(114);
  constexpr int kRows = 4, kPagesARow = 6;
  constexpr Shape kShape{8, 2, 64};
  for (const auto& [type, fast] : {std::pair(KvType::fp32, false), std::pair(KvType::bf16, false),
                                   std::pair(KvType::bf16, true)}) {
    INFO("type " << static_cast<int>(type) << (fast ? ", fast" : ""));
    const auto attend = fast ? paged_attention_fast_cuda : paged_attention_cuda;
    PagedKv kv;
    kv.type = type;
    kv.kv_heads = kShape.kv_heads;
    kv.head_dim = kShape.head_dim;
    std::vector<int32_t> table(kRows * kPagesARow);
    std::iota(table.rbegin(), table.rend(), 0);
    const DeviceArray<int32_t> device_table(table);
    kv.table = device_table.data();
    kv.table_stride = kPagesARow;
    const size_t bytes = paged_kv_bytes(kv, kRows * kPagesARow);
    DeviceArray<std::byte> pool_k(bytes), pool_v(bytes);
    kv.k = pool_k.data();
    kv.v = pool_v.data();
    constexpr int64_t kMost = kPagesARow * kKvPage;
    const DeviceArray<std::byte> workspace(
        fast ? paged_attention_fast_workspace(kRows, kShape.heads, kv, kMost)
             : paged_attention_workspace(kRows, kShape.heads, kMost));
    const std::vector<float> start = normals(kRows * static_cast<size_t>(kShape.width()), &random);
    DeviceArray<float> x(start);
    DeviceArray<int64_t> position(kRows);
    DeviceArray<int32_t> pending(kRows);
    DecodeRows rows;
    rows.rows = kRows;
    rows.pending = pending.data();
    rows.position = position.data();
    const auto reset = [&] {
      pool_k.fill(0);
      pool_v.fill(0);
      pending.fill(0);
      position.set({0, 250, 64, 125});
      x.set(start);
    };
    // Every step's output gives the next one's query, key and value.
    const auto step = [&](CudaStream stream) {
      append_paged_cuda(x.data(), kShape.width(), x.data() + kShape.kv_width(), kShape.width(),
                        kRows, kv, position.data(), stream);
      attend(x.data(), kShape.width(), x.data(), kShape.width(), kRows, kShape.heads, kv,
             position.data(), kMost, 2.0f, workspace.data(), stream);
      decode_step_cuda(rows, 4, stream);
    };
    const auto result = [&] {
      std::vector<std::byte> all = pool_k.get();
      for (const std::vector<std::byte>& more : {pool_v.get()})
        all.insert(all.end(), more.begin(), more.end());
      const std::vector<float> out = x.get();
      const auto* from = reinterpret_cast<const std::byte*>(out.data());
      all.insert(all.end(), from, from + out.size() * sizeof(float));
      return all;
    };
    compare_captured(reset, step, result);
  }
}

TEST_CASE("gpu: a row beyond the bound of paged attention is NaN, and wrong calls are refused") {
  if (!gpu()) return;
  std::mt19937 random(115);
  constexpr Shape kShape{4, 2, 64};
  const Layer layer(kShape, KvType::bf16, 64, {100, 99}, &random, kUnchanged);
  PagedKv kv = layer.kv();
  const DeviceArray<int64_t> position(std::vector<int64_t>{100, 99});
  const DeviceArray<float> q(normals(static_cast<size_t>(2 * kShape.width()), &random));
  const DeviceArray<float> out(q.size());
  const DeviceArray<std::byte> workspace(paged_attention_workspace(2, kShape.heads, 100));
  const auto call = [&](const PagedKv& pages, int heads, int64_t most, int64_t stride) {
    paged_attention_cuda(q.data(), stride, out.data(), stride, 2, heads, pages, position.data(),
                         most, 0.125f, workspace.data());
  };
  call(kv, 4, 100, 256);
  const std::vector<float> got = out.get();
  for (size_t i = 0; i < 512; ++i) CHECK(std::isnan(got[i]) == (i < 256));

  CHECK_THROWS_AS(call(kv, 3, 100, 256), std::invalid_argument);
  CHECK_THROWS_AS(call(kv, 4, 1 << 20, 256), std::invalid_argument);
  CHECK_THROWS_AS(call(kv, 4, 100, 255), std::invalid_argument);
  CHECK_THROWS_AS(load_paged_cuda(q.data(), q.data(), int64_t{kv.table_stride} * 64 + 1, kv, 0),
                  std::invalid_argument);
  kv.page = 96;
  CHECK_THROWS_AS(call(kv, 4, 100, 256), std::invalid_argument);
  CHECK_THROWS_AS(paged_kv_bytes(kv, 1), std::invalid_argument);
  kv = layer.kv();
  kv.head_dim = 257;
  CHECK_THROWS_AS(append_paged_cuda(q.data(), 514, q.data(), 514, 2, kv, position.data()),
                  std::invalid_argument);
}

TEST_CASE("gpu: fast paged attention is within rounding of FP64, of any shape") {
  if (!gpu()) return;
  std::mt19937 random(116);
  int page = 64;
  for (const Shape& shape : {Shape{40, 8, 128}, Shape{16, 4, 256}, Shape{32, 2, 128},
                             Shape{24, 1, 64}, Shape{5, 5, 80}, Shape{8, 8, 16}, Shape{9, 1, 192},
                             Shape{71, 1, 64}, Shape{34, 2, 240}, Shape{64, 1, 256}}) {
    INFO("heads " << shape.heads << ", KV heads " << shape.kv_heads << ", head_dim "
                  << shape.head_dim << ", page " << page);
    Layer(shape, KvType::bf16, page, {0, 1, 62, -1, 63, 64, 126, -5, 15, 16, 300}, &random,
          kUnchanged)
        .check_fast(&random);
    page = page == 512 ? 64 : 2 * page;
  }
}

TEST_CASE("gpu: fast paged attention over thousands of positions, few rows and many") {
  if (!gpu()) return;
  std::mt19937 random(117);
  Layer({40, 8, 128}, KvType::bf16, 64, {4999, 999}, &random, kUnchanged).check_fast(&random);
  Layer({16, 4, 256}, KvType::bf16, 128, {4999, 255, 256}, &random, kUnchanged).check_fast(&random);
  Layer({24, 1, 64}, KvType::bf16, 8192, {4999}, &random, kUnchanged).check_fast(&random);
  // Chunks of 2048 and 4096 positions.
  for (const Shape& shape : {Shape{2, 2, 128}, Shape{2, 2, 64}}) {
    std::vector<int64_t> positions(520);
    for (int64_t& position : positions) position = static_cast<int64_t>(random() % 70) - 8;
    positions[7] = 4999;
    positions[301] = 2047;
    positions[302] = 2048;
    Layer(shape, KvType::bf16, 64, positions, &random, kUnchanged).check_fast(&random);
  }
}

TEST_CASE("gpu: fast paged attention of a row has its bits whatever the other rows") {
  if (!gpu()) return;
  std::mt19937 random(118);
  constexpr Shape kShape{10, 2, 128};
  const int64_t stride = kShape.width();
  const Layer layer(kShape, KvType::bf16, 64, {300, 700, 128, 900}, &random, kUnchanged);
  std::vector<float> q = normals(static_cast<size_t>(4 * stride), &random);
  const std::vector<float> all = layer.fast(q, stride, {300, 700, 128, 900}, 901);
  for (int64_t c = 0; c < 4 * stride; ++c) {
    if (c / stride != 1) q[static_cast<size_t>(c)] = c % 2 == 0 ? NAN : 3e30f;
  }
  const std::vector<float> alone = layer.fast(q, stride, {-1, 700, 5, 899}, 1000);
  const auto row = [&](const std::vector<float>& from) {
    return std::vector<float>(from.begin() + stride, from.begin() + 2 * stride);
  };
  CHECK(different_floats(row(alone), row(all)) == "");
  CHECK(different_floats(alone, all) != "");
}

TEST_CASE(
    "gpu: a row beyond the bound of fast paged attention is NaN, and wrong calls are refused") {
  if (!gpu()) return;
  std::mt19937 random(119);
  constexpr Shape kShape{4, 2, 64};
  const Layer layer(kShape, KvType::bf16, 64, {400, 99}, &random, kUnchanged);
  const PagedKv kv = layer.kv();
  const DeviceArray<int64_t> position(std::vector<int64_t>{400, 99});
  const DeviceArray<float> q(normals(static_cast<size_t>(2 * kShape.width()), &random));
  const DeviceArray<float> out(q.size());
  const DeviceArray<std::byte> workspace(paged_attention_fast_workspace(2, 4, kv, 400));
  const auto call = [&](const PagedKv& pages, int heads, int64_t most, int64_t stride) {
    paged_attention_fast_cuda(q.data(), stride, out.data(), stride, 2, heads, pages,
                              position.data(), most, 0.125f, workspace.data());
  };
  for (int64_t most : {int64_t{100}, int64_t{400}}) {
    call(kv, 4, most, 256);
    const std::vector<float> got = out.get();
    for (size_t i = 0; i < 512; ++i) CHECK(std::isnan(got[i]) == (i < 256));
  }
  CHECK_THROWS_AS(call(kv, 3, 400, 256), std::invalid_argument);
  CHECK_THROWS_AS(call(kv, 4, 1 << 20, 256), std::invalid_argument);
  CHECK_THROWS_AS(call(kv, 4, 400, 255), std::invalid_argument);
  CHECK_THROWS_AS(paged_attention_fast_workspace(2, 3, kv, 400), std::invalid_argument);
  CHECK_THROWS_AS(paged_attention_fast_cuda(q.data(), 256, out.data(), 256, 2, 4, kv,
                                            position.data(), 400, 0.125f, nullptr),
                  std::invalid_argument);
  const auto refused = [&](KvType type, int head_dim) {
    PagedKv other = kv;
    other.type = type;
    other.head_dim = head_dim;
    CHECK(!paged_attention_fast_fits(other));
    CHECK_THROWS_AS(call(other, 4, 100, 4 * head_dim), std::invalid_argument);
  };
  CHECK(paged_attention_fast_fits(kv));
  refused(KvType::fp32, 64);
  refused(KvType::bf16, 72);
  refused(KvType::bf16, 8);
  refused(KvType::bf16, 272);
}
