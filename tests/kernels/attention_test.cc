// Attention over the paged cache: against FP64 within a bound from the operation count, bit-equal
// for any cut into chunks, blind to the future, and the cache itself.
#include "kernels/attention.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/attention_simd.h"
#include "kernels/dense.h"
#include "kernels/dense_simd.h"
#include "tests/kernels/compare.h"

namespace replayeval {
namespace {

using namespace test;

struct Shape {
  int heads, kv_heads, head_dim;
  int64_t past, tokens;
  KvType type;
};
constexpr Shape kShapes[] = {{1, 1, 1, 0, 3, KvType::fp32},     {4, 2, 24, 0, 130, KvType::fp32},
                             {4, 2, 24, 70, 61, KvType::bf16},  {4, 2, 64, 128, 100, KvType::bf16},
                             {5, 1, 33, 10, 75, KvType::fp32},  {8, 8, 16, 63, 66, KvType::fp32},
                             {40, 1, 80, 5, 9, KvType::fp32},   {2, 1, 300, 3, 70, KvType::bf16},
                             {16, 4, 256, 190, 4, KvType::fp32}};

/// One sequence of a layer: raw q, k, v of all tokens.
struct Sequence {
  Sequence(const Shape& s, uint32_t seed, float size = 1)
      : shape(s),
        length(s.past + s.tokens),
        q(random_floats(length * s.heads * s.head_dim, seed, size)),
        k(random_floats(length * s.kv_heads * s.head_dim, seed + 1, size)),
        v(random_floats(length * s.kv_heads * s.head_dim, seed + 2)) {}
  int64_t width() const { return static_cast<int64_t>(shape.heads) * shape.head_dim; }
  int64_t kv_width() const { return static_cast<int64_t>(shape.kv_heads) * shape.head_dim; }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(shape.head_dim)); }
  void append(KvCache& cache, int64_t tokens) const {
    const int64_t at = cache.length() * kv_width();
    cache.append(k.data() + at, kv_width(), v.data() + at, kv_width(), tokens);
  }
  /// Outputs of all tokens, fed in calls of the given sizes (the last one repeats).
  std::vector<float> run(const std::vector<int64_t>& sizes) const {
    KvCache cache(shape.kv_heads, shape.head_dim, shape.type);
    std::vector<float> out(q.size());
    size_t call = 0;
    for (int64_t at = 0; at < length; ++call) {
      const int64_t n = std::min(sizes[std::min(call, sizes.size() - 1)], length - at);
      append(cache, n);
      const AttentionRow row{
          &cache, at, n, q.data() + at * width(), width(), out.data() + at * width(), width()};
      attention({&row, 1}, shape.heads, scale());
      at += n;
    }
    return out;
  }

  Shape shape;
  int64_t length;
  std::vector<float> q, k, v;
};

// With u = 2^-24, D = head_dim, n visible keys in P pages:
//  - a score is a chain of D fma (or D products and sums) and a product with scale: |error| <= e =
//  gamma_(2 D + 1) scale max_j sum |q k|;
//  - its weight e^(s - m) has relative error e, plus u |s - m| for the difference, plus 4 u for exp
//  (2 ulp); every later page multiplies
//    by e^(m - m') with 4 u, u |m - m'| and one rounding. The maxima only grow and |m - m'| add up
//    to at most the range r of the scores: relative error of a weight at most w = e + 2 u r + (5 P
//    + 4) u, counted twice (numerator and denominator);
//  - sums of n terms (2 n roundings at most, and P products with a factor): gamma_(2 n + P) each of
//  numerator and denominator; one division.
// |out - exact| <= (2 w + 2 gamma_(2 n + P + 1)) sum w |v| / sum w, and 1 % for products of errors.
TEST_CASE("attention: error against FP64 stays below the bound, at every instruction-set level") {
  const auto blocks = REPLAYEVAL_LEVELS(attention_block);
  for (const Shape& shape : kShapes) {
    for (const float size : {1.0F, 3.0F}) {
      const Sequence sequence(shape, 31, size);
      KvCache cache(shape.kv_heads, shape.head_dim, shape.type);
      sequence.append(cache, sequence.length);
      const int64_t width = sequence.width();
      const int64_t kv_width = sequence.kv_width();
      std::vector<float> k(sequence.k.size()), v(sequence.v.size());
      cache.read(0, sequence.length, k.data(), v.data());
      std::vector<std::vector<float>> results;
      for (const auto& [name, function] : blocks) {
        std::vector<float> out(static_cast<size_t>(shape.tokens * width), 99.0F);
        const AttentionRow row{
            &cache, shape.past, shape.tokens, sequence.q.data() + shape.past * width,
            width,  out.data(), width};
        const int group = shape.heads / shape.kv_heads;
        for (int head = 0; head < shape.kv_heads; ++head) {
          function({&row, head, group, 0, shape.tokens, sequence.scale()},
                   thread_scratch(attention_scratch(shape.tokens * group, shape.head_dim,
                                                    cache.padded_dim())));
        }
        results.push_back(std::move(out));
      }
      std::vector<Worst> worst(results.size());
      std::vector<double> scores, sum(static_cast<size_t>(shape.head_dim)), magnitude(sum.size());
      for (int64_t t = 0; t < shape.tokens; ++t) {
        for (int64_t h = 0; h < shape.heads; ++h) {
          const int64_t visible = shape.past + t + 1;
          const float* q = sequence.q.data() + (shape.past + t) * width + h * shape.head_dim;
          const int64_t offset = h / (shape.heads / shape.kv_heads) * shape.head_dim;
          scores.assign(static_cast<size_t>(visible), 0);
          double largest_product = 0;
          for (int64_t j = 0; j < visible; ++j) {
            double absolute = 0;
            for (int64_t d = 0; d < shape.head_dim; ++d) {
              const double product =
                  static_cast<double>(q[d]) * k[static_cast<size_t>(j * kv_width + offset + d)];
              scores[static_cast<size_t>(j)] += product * sequence.scale();
              absolute += std::abs(product) * sequence.scale();
            }
            largest_product = std::max(largest_product, absolute);
          }
          const auto [low, high] = std::minmax_element(scores.begin(), scores.end());
          const double range = *high - *low;
          const double maximum = *high;
          double total = 0;
          std::fill(sum.begin(), sum.end(), 0.0);
          std::fill(magnitude.begin(), magnitude.end(), 0.0);
          for (int64_t j = 0; j < visible; ++j) {
            const double w = std::exp(scores[static_cast<size_t>(j)] - maximum);
            total += w;
            for (int64_t d = 0; d < shape.head_dim; ++d) {
              const double term = w * v[static_cast<size_t>(j * kv_width + offset + d)];
              sum[static_cast<size_t>(d)] += term;
              magnitude[static_cast<size_t>(d)] += std::abs(term);
            }
          }
          const double pages = static_cast<double>((visible + kKvPage - 1) / kKvPage);
          const double weight_error = gamma(2.0 * shape.head_dim + 1) * largest_product +
                                      2 * kUnit * range + (5 * pages + 4) * kUnit;
          const double relative =
              1.01 * (2 * weight_error + 2 * gamma(2.0 * static_cast<double>(visible) + pages + 1));
          for (int64_t d = 0; d < shape.head_dim; ++d) {
            const int64_t at = t * width + h * shape.head_dim + d;
            for (size_t level = 0; level < results.size(); ++level) {
              worst[level].see(at, results[level][static_cast<size_t>(at)],
                               sum[static_cast<size_t>(d)] / total,
                               relative * magnitude[static_cast<size_t>(d)] / total);
            }
          }
        }
      }
      for (size_t level = 0; level < results.size(); ++level) {
        CHECK_MESSAGE(worst[level].good(), blocks[level].first, " head_dim ", shape.head_dim, ": ",
                      worst[level].text());
      }
      if (results.size() == 3)
        CHECK_MESSAGE(different(results[2], results[1]).empty(),
                      "v4 against v3: ", different(results[2], results[1]));

      std::vector<float> reference(static_cast<size_t>(shape.tokens * width));
      const AttentionRow row{
          &cache, shape.past,       shape.tokens, sequence.q.data() + shape.past * width,
          width,  reference.data(), width};
      attention_reference({&row, 1}, shape.heads, sequence.scale());
      Worst shipped;
      for (size_t i = 0; i < reference.size(); ++i) {
        shipped.see(static_cast<int64_t>(i), results.back()[i], reference[i],
                    1e-4 * size * size);  // only that both mean the same function
      }
      CHECK_MESSAGE(shipped.good(), "shipped reference: ", shipped.text());
    }
  }
}

TEST_CASE("attention: bits do not depend on the cut into chunks or the number of threads") {
  for (const Shape& shape : kShapes) {
    const Sequence sequence(shape, 41);
    const std::vector<float> whole = sequence.run({sequence.length});
    for (const int threads : {1, 2, 3}) {
      const int before = omp_get_max_threads();
      omp_set_num_threads(threads);
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{1},
                                                {7},
                                                {64},
                                                {1, 63, 65, 2},
                                                {50, 1, 1, 13, 200},
                                                {sequence.length}}) {
        const std::string text = different(sequence.run(sizes), whole);
        CHECK_MESSAGE(text.empty(), "head_dim ", shape.head_dim, ", first call ", sizes[0],
                      ", threads ", threads, ": ", text);
      }
      omp_set_num_threads(before);
    }
  }
}

TEST_CASE("attention: a row's bits do not depend on the rows beside it, their order or strides") {
  const Shape shape{4, 2, 24, 0, 90, KvType::fp32};
  std::vector<Sequence> sequences;
  std::vector<std::vector<float>> alone;
  std::vector<KvCache> caches;
  for (uint32_t i = 0; i < 4; ++i) {
    Shape own = shape;
    own.tokens = 40 + 31 * i;
    own.type = i == 2 ? KvType::bf16 : KvType::fp32;
    sequences.emplace_back(own, 51 + 10 * i);
    alone.push_back(sequences.back().run({sequences.back().length}));
    caches.emplace_back(own.kv_heads, own.head_dim, own.type);
    sequences.back().append(caches.back(), sequences.back().length);
  }
  for (const bool reversed : {false, true}) {
    std::vector<AttentionRow> rows;
    std::vector<std::vector<float>> outs;
    for (size_t n = 0; n < 4; ++n) {
      const size_t i = reversed ? 3 - n : n;
      const int64_t stride = sequences[i].width() + static_cast<int64_t>(n);
      outs.emplace_back(static_cast<size_t>(sequences[i].length * stride), -1.0F);
      rows.push_back({&caches[i], 0, sequences[i].length, sequences[i].q.data(),
                      sequences[i].width(), outs.back().data(), stride});
    }
    rows.push_back({});  // no tokens
    attention(rows, shape.heads, sequences[0].scale());
    for (size_t n = 0; n < 4; ++n) {
      const size_t i = reversed ? 3 - n : n;
      for (int64_t t = 0; t < sequences[i].length; ++t) {
        const std::string text =
            different(outs[n].data() + t * rows[n].out_stride,
                      alone[i].data() + t * sequences[i].width(), sequences[i].width());
        CHECK_MESSAGE(text.empty(), "row ", i, " token ", t, ": ", text);
      }
    }
  }
  // In place.
  std::vector<float> q = sequences[1].q;
  const AttentionRow row{&caches[1],           0,        sequences[1].length, q.data(),
                         sequences[1].width(), q.data(), sequences[1].width()};
  attention({&row, 1}, shape.heads, sequences[1].scale());
  CHECK_MESSAGE(different(q, alone[1]).empty(), different(q, alone[1]));
}

TEST_CASE(
    "attention: NaN in the future changes nothing, in the past gives NaN; no finite score gives "
    "NaN") {
  const Shape shape{2, 1, 24, 0, 150, KvType::fp32};
  Sequence sequence(shape, 61);
  const std::vector<float> clean = sequence.run({150});
  constexpr int64_t kBad = 101;
  for (int64_t d = 0; d < 24; ++d) {
    sequence.k[static_cast<size_t>(kBad * 24 + d)] = std::numeric_limits<float>::quiet_NaN();
    sequence.v[static_cast<size_t>(kBad * 24 + d)] = std::numeric_limits<float>::quiet_NaN();
  }
  const std::vector<float> dirty = sequence.run({150});
  CHECK_MESSAGE(different(dirty.data(), clean.data(), kBad * 48).empty(),
                different(dirty.data(), clean.data(), kBad * 48));
  for (size_t i = kBad * 48; i < dirty.size(); ++i) REQUIRE(std::isnan(dirty[i]));
  CHECK(different(sequence.run({13}), dirty).empty());

  // A NaN query is NaN alone; scores of -inf weigh nothing while another is finite.
  Sequence other(shape, 62);
  const std::vector<float> before = other.run({150});
  other.q[static_cast<size_t>(70 * 48 + 3)] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> after = other.run({150});
  for (size_t i = 0; i < after.size(); ++i) {
    if (i / 24 == 140) {
      REQUIRE(std::isnan(after[i]));
    } else {
      REQUIRE(bits_of(after[i]) == bits_of(before[i]));
    }
  }
  KvCache cache(1, 1, KvType::fp32);
  std::vector<float> keys(70, -INFINITY), values(70, 3.0F), q(70, 1.0F), out(70);
  keys[66] = 0.5F;
  cache.append(keys.data(), 1, values.data(), 1, 70);
  const AttentionRow row{&cache, 0, 70, q.data(), 1, out.data(), 1};
  attention({&row, 1}, 1, 1.0F);
  for (size_t t = 0; t < 66; ++t) CHECK(std::isnan(out[t]));
  for (size_t t = 66; t < 70; ++t) CHECK(out[t] == 3.0F);
}

TEST_CASE("attention: hand-computed weights") {
  KvCache cache(1, 2, KvType::fp32);
  // Scores of the last query: 0, ln 2, ln 5 -> weights 1/8, 2/8, 5/8.
  const float k[] = {0, 9, std::log(2.0F), 9, std::log(5.0F), 9};
  const float v[] = {8, 0, 16, -8, 24, 8};
  const float q[] = {0, 0, 0, 0, 1, 0};
  cache.append(k, 2, v, 2, 3);
  float out[6];
  const AttentionRow row{&cache, 0, 3, q, 2, out, 2};
  attention({&row, 1}, 1, 1.0F);
  CHECK(out[0] == 8.0F);
  CHECK(out[1] == 0.0F);
  CHECK(out[2] == 12.0F);  // equal scores
  CHECK(out[3] == -4.0F);
  CHECK(std::abs(out[4] - 20.0F) < 20 * 20 * kUnit);
  CHECK(std::abs(out[5] - 3.0F) < 20 * 20 * kUnit);
}

TEST_CASE("KvCache: append, read, truncate, growth, copies, bytes") {
  for (const KvType type : {KvType::fp32, KvType::bf16}) {
    constexpr int64_t kTokens = 150;
    constexpr int64_t kWidth = 2 * 35;
    const std::vector<float> k = random_floats(kTokens * (kWidth + 1), 71);
    const std::vector<float> v = random_floats(kTokens * (kWidth + 2), 72);
    KvCache cache(2, 35, type);
    CHECK(cache.bytes() == 0);
    const std::byte* first_page = nullptr;
    for (const int64_t n : {1, 62, 0, 2, 85}) {
      const int64_t at = cache.length();
      cache.append(k.data() + at * (kWidth + 1), kWidth + 1, v.data() + at * (kWidth + 2),
                   kWidth + 2, n);
      if (first_page == nullptr) first_page = cache.key_page(0, 0);
      CHECK(cache.key_page(0, 0) == first_page);
    }
    CHECK(cache.length() == kTokens);
    CHECK(cache.bytes() == KvCache::bytes_needed(2, 35, type, kTokens));
    CHECK(cache.bytes() == size_t{3} * 2 * 64 * (35 + 64) * (type == KvType::fp32 ? 4 : 2));
    const auto check = [&](const KvCache& some, int64_t from, int64_t n) {
      std::vector<float> got_k(static_cast<size_t>(n * kWidth)), got_v(got_k.size());
      some.read(from, n, got_k.data(), got_v.data());
      for (int64_t t = 0; t < n; ++t) {
        for (int64_t c = 0; c < kWidth; ++c) {
          float want_k = k[static_cast<size_t>((from + t) * (kWidth + 1) + c)];
          float want_v = v[static_cast<size_t>((from + t) * (kWidth + 2) + c)];
          if (type == KvType::bf16) {
            want_k = bf16_to_fp32(fp32_to_bf16(want_k));
            want_v = bf16_to_fp32(fp32_to_bf16(want_v));
          }
          REQUIRE(got_k[static_cast<size_t>(t * kWidth + c)] == want_k);
          REQUIRE(got_v[static_cast<size_t>(t * kWidth + c)] == want_v);
        }
      }
    };
    check(cache, 0, kTokens);
    check(cache, 60, 9);
    const KvCache copy = cache.clone();
    cache.truncate(64);
    CHECK(cache.length() == 64);
    CHECK(cache.bytes() == KvCache::bytes_needed(2, 35, type, 64));
    check(cache, 0, 64);
    check(copy, 0, kTokens);
    cache.append(k.data() + 64 * (kWidth + 1), kWidth + 1, v.data() + 64 * (kWidth + 2), kWidth + 2,
                 10);
    check(cache, 0, 74);
    CHECK_THROWS_AS(cache.truncate(75), std::invalid_argument);
    CHECK_THROWS_AS(cache.truncate(-1), std::invalid_argument);
    CHECK_THROWS_AS(cache.read(70, 5, nullptr, nullptr), std::invalid_argument);
    cache.truncate(0);
    CHECK(cache.bytes() == 0);
  }
  CHECK_THROWS_AS(KvCache(0, 8, KvType::fp32), std::invalid_argument);
  CHECK_THROWS_AS(KvCache(1, 0, KvType::fp32), std::invalid_argument);
}

TEST_CASE("attention: copies of a cache that go on by themselves leave each other alone") {
  const Shape shape{2, 1, 16, 0, 150, KvType::fp32};
  const Sequence one(shape, 11), other(shape, 12);
  for (int shared : {1, 64, 100}) {  // also within a page, and at the start of one
    CAPTURE(shared);
    KvCache cache(1, 16, KvType::fp32);
    one.append(cache, shared);
    std::vector<KvCache> caches;
    for (int i = 0; i < 3; ++i) caches.push_back(cache.clone());
    one.append(cache, 150 - shared);
    caches[0].append(other.k.data(), 16, other.v.data(), 16, 20);
    caches[1].truncate(shared / 2);  // inside a page that the others read
    caches[1].append(other.k.data(), 16, other.v.data(), 16, 20);
    std::vector<float> k(150 * 16), v(150 * 16);
    const auto same = [&](const KvCache& some, int64_t from, int64_t n, const Sequence& sequence,
                          int64_t first) {
      some.read(from, n, k.data(), v.data());
      const auto size = static_cast<size_t>(n * 16);
      return std::equal(k.begin(), k.begin() + size, sequence.k.begin() + first * 16) &&
             std::equal(v.begin(), v.begin() + size, sequence.v.begin() + first * 16);
    };
    CHECK(same(cache, 0, 150, one, 0));
    CHECK(same(caches[0], 0, shared, one, 0));
    CHECK(same(caches[0], shared, 20, other, 0));
    CHECK(same(caches[1], 0, shared / 2, one, 0));
    CHECK(same(caches[1], shared / 2, 20, other, 0));
    CHECK(same(caches[2], 0, shared, one, 0));
  }
}

TEST_CASE("attention: what was truncated and written again is forgotten") {
  const Shape shape{2, 1, 16, 0, 100, KvType::bf16};
  const Sequence sequence(shape, 81);
  const Sequence draft(shape, 91);
  KvCache cache(1, 16, KvType::bf16);
  sequence.append(cache, 60);
  cache.append(draft.k.data(), 16, draft.v.data(), 16, 30);
  cache.truncate(60);
  sequence.append(cache, 40);
  std::vector<float> out(sequence.q.size());
  const AttentionRow row{&cache, 0, 100, sequence.q.data(), 32, out.data(), 32};
  attention({&row, 1}, 2, sequence.scale());
  CHECK(different(out, sequence.run({100})).empty());
}

TEST_CASE("attention: impossible requests are refused") {
  KvCache cache(2, 8, KvType::fp32);
  std::vector<float> x(64);
  cache.append(x.data(), 16, x.data(), 16, 2);
  AttentionRow row{&cache, 0, 3, x.data(), 16, x.data(), 16};
  CHECK_THROWS_AS(attention({&row, 1}, 2, 1), std::invalid_argument);  // cache too short
  row.tokens = 2;
  CHECK_THROWS_AS(attention({&row, 1}, 3, 1), std::invalid_argument);  // 3 heads over 2 KV heads
  CHECK_THROWS_AS(attention({&row, 1}, 4, 1), std::invalid_argument);  // stride below 4 x 8
  row.cache = nullptr;
  CHECK_THROWS_AS(attention({&row, 1}, 2, 1), std::invalid_argument);
}

}  // namespace
}  // namespace replayeval
