// The choice of the next token: hand-computed truncations, frequencies, and draws that all states
// share.
#include "harness/sampling.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "quant/random.h"

namespace replayeval {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Logits whose softmax is proportional to the weights.
std::vector<float> logits_of(std::vector<double> weights) {
  std::vector<float> logits;
  for (double w : weights) logits.push_back(static_cast<float>(std::log(w)));
  return logits;
}

TEST_CASE("greedy takes the lowest id among the largest logits, and the margin to the next") {
  const std::vector<float> logits = {1.0f, 3.0f, 2.5f, 3.0f, kNan, -kInfinity};
  Choice choice = choose_token(logits, {}, {});
  CHECK(choice.token == 1);
  CHECK(choice.margin == 0.0f);
  choice = choose_token(std::vector<float>{1.0f, 3.0f, 2.5f}, {}, {});
  CHECK(choice.token == 1);
  CHECK(choice.margin == 0.5f);
  choice = choose_token(std::vector<float>{kNan, kNan, kNan}, {}, {});
  CHECK(choice.token == -1);
  CHECK(std::isnan(choice.margin));
  choice = choose_token(std::vector<float>{kNan, 2.0f, -kInfinity}, {}, {});
  CHECK(choice.token == 1);
  CHECK(std::isnan(choice.margin));
}

TEST_CASE("top-k and top-p by hand") {
  // Probabilities 0.1, 0.4, 0.2, 0.2, 0.1.
  const std::vector<float> logits = logits_of({1, 4, 2, 2, 1});
  const auto kept = [&](double temperature, int top_k, double top_p) {
    return candidate_tokens(logits, {temperature, top_k, top_p});
  };
  using Tokens = std::vector<int32_t>;
  CHECK(kept(1, 0, 1) == Tokens{1, 2, 3, 0, 4});
  CHECK(kept(1, 1, 1) == Tokens{1});
  CHECK(kept(1, 2, 1) == Tokens{1, 2});  // 2 and 3 are equal: the lower id
  CHECK(kept(1, 9, 1) == Tokens{1, 2, 3, 0, 4});
  CHECK(kept(1, 0, 0.3) == Tokens{1});
  CHECK(kept(1, 0, 0.41) == Tokens{1, 2});
  CHECK(kept(1, 0, 0.59) == Tokens{1, 2});
  CHECK(kept(1, 0, 0.61) == Tokens{1, 2, 3});
  CHECK(kept(1, 0, 0.81) == Tokens{1, 2, 3, 0});
  // Among the three largest the probabilities are 0.5, 0.25, 0.25.
  CHECK(kept(1, 3, 0.49) == Tokens{1});
  CHECK(kept(1, 3, 0.74) == Tokens{1, 2});
  CHECK(kept(1, 3, 0.76) == Tokens{1, 2, 3});
  // At temperature 1/2 weights are squared: 1, 16, 4, 4, 1 of 26.
  CHECK(kept(0.5, 0, 15.9 / 26) == Tokens{1});
  CHECK(kept(0.5, 0, 16.1 / 26) == Tokens{1, 2});
  CHECK(kept(0.5, 0, 24.1 / 26) == Tokens{1, 2, 3, 0});
}

TEST_CASE("top-p looks beyond the tokens it sorts first") {
  // 1,000 equal logits: 25 % are the first 250 ids.
  const std::vector<float> logits(1000, 2.0f);
  const std::vector<int32_t> kept = candidate_tokens(logits, {1, 0, 0.2495});
  REQUIRE(kept.size() == 250);
  for (int32_t i = 0; i < 250; ++i) CHECK(kept[static_cast<size_t>(i)] == i);
}

TEST_CASE("non-finite logits are left out of the candidates") {
  const std::vector<float> logits = {kNan, 1.0f, -kInfinity, kInfinity, 0.0f, kInfinity};
  CHECK(candidate_tokens(logits, {1, 0, 1}) == std::vector<int32_t>{3, 5, 1, 4});
  CHECK(candidate_tokens(logits, {1, 0, 0.9}) == std::vector<int32_t>{3, 5});
  CHECK(choose_token(logits, {1, 0, 1}, {}).token == 3);
  CHECK(candidate_tokens(std::vector<float>{kNan, -kInfinity}, {1, 0, 1}).empty());
}

TEST_CASE("draws come from counters that no state rounding uses") {
  const DrawKey key{0x123456789ABCDEF0u, 0x3FFFFFFFu, 77};
  const PhiloxWords words =
      philox4x32<10>(1234 / 4, 0xFFFFFFFFu, 77, 4 * 0x3FFFFFFFu, 0x9ABCDEF0u, 0x12345678u);
  CHECK(draw_exponential(key, 1234) ==
        -std::log((static_cast<double>(words.word[2]) + 0.5) / 4294967296.0));
}

TEST_CASE("frequencies follow the tempered, truncated distribution") {
  const std::vector<float> logits = logits_of({1, 4, 2, 2, 1});
  constexpr int kDraws = 40000;
  struct Case {
    Sampling sampling;
    std::vector<double> probability;
  };
  const std::vector<Case> cases = {
      {{1, 0, 1}, {0.1, 0.4, 0.2, 0.2, 0.1}},
      {{0.5, 0, 1}, {1 / 26.0, 16 / 26.0, 4 / 26.0, 4 / 26.0, 1 / 26.0}},
      {{1, 3, 1}, {0, 0.5, 0.25, 0.25, 0}},
      {{1, 0, 0.5}, {0, 2 / 3.0, 1 / 3.0, 0, 0}},
  };
  for (size_t c = 0; c < cases.size(); ++c) {
    CAPTURE(c);
    std::vector<int> count(5, 0);
    for (int i = 0; i < kDraws; ++i) {
      const DrawKey key{7, static_cast<uint32_t>(i / 200), i % 200};
      ++count[static_cast<size_t>(choose_token(logits, cases[c].sampling, key).token)];
    }
    // Counts are binomial; five standard deviations are exceeded once in 1.7 million.
    for (size_t v = 0; v < 5; ++v) {
      CAPTURE(v);
      const double p = cases[c].probability[v];
      const double bound = 5 * std::sqrt(kDraws * p * (1 - p));
      CAPTURE(count[v]);
      CHECK(std::abs(count[v] - kDraws * p) <= bound);
    }
  }
}

TEST_CASE("draws depend on seed, stream, position and token, and on nothing else") {
  const std::vector<float> logits(64, 0.0f);
  const Sampling sampling{1, 0, 1};
  const auto same = [&](const DrawKey& a, const DrawKey& b) {
    int equal = 0;
    for (int i = 0; i < 200; ++i) {
      equal += choose_token(logits, sampling, {a.seed, a.stream, a.position + i}).token ==
               choose_token(logits, sampling, {b.seed, b.stream, b.position + i}).token;
    }
    return equal;
  };
  const DrawKey key{5, 9, 100};
  CHECK(same(key, key) == 200);
  // Independent draws agree with probability 1/64: 3.1 of 200 expected, 20 are beyond 1e-9.
  CHECK(same(key, {6, 9, 100}) < 20);
  CHECK(same(key, {5ull << 32, 9, 100}) < 20);
  CHECK(same(key, {5, 10, 100}) < 20);
  CHECK(same(key, {5, 9, 1000}) < 20);
}

TEST_CASE("states with nearly equal distributions draw nearly always the same token") {
  // Total variation d between p and q; the shared exponentials differ in at most 2 d / (1 + d).
  const std::vector<float> a = logits_of({10, 20, 30, 40});
  const std::vector<float> b = logits_of({11, 19, 30, 40});
  constexpr int kDraws = 20000;
  const double d = 0.01;
  int differ = 0;
  for (int i = 0; i < kDraws; ++i) {
    const DrawKey key{1, 2, i};
    differ += choose_token(a, {1, 0, 1}, key).token != choose_token(b, {1, 0, 1}, key).token;
  }
  const double bound = 2 * d / (1 + d);
  CHECK(differ <= kDraws * bound + 5 * std::sqrt(kDraws * bound * (1 - bound)));
  CHECK(differ > 0);
}

TEST_CASE("a truncated draw is the draw of the whole distribution where that is a candidate") {
  std::vector<double> weights;
  for (int i = 0; i < 40; ++i) weights.push_back(1.0 + (i * 7) % 11);
  const std::vector<float> logits = logits_of(weights);
  for (int i = 0; i < 500; ++i) {
    const DrawKey key{3, 4, i};
    const int32_t whole = choose_token(logits, {0.8, 0, 1}, key).token;
    const Sampling truncated{0.8, 20, 0.7};
    const std::vector<int32_t> kept = candidate_tokens(logits, truncated);
    if (std::find(kept.begin(), kept.end(), whole) == kept.end()) continue;
    CHECK(choose_token(logits, truncated, key).token == whole);
  }
}

TEST_CASE("settings out of range are refused by name") {
  CHECK_THROWS_WITH_AS(check_sampling({-1, 0, 1}),
                       "temperature: expected a number of at least 0, got -1.000000",
                       std::invalid_argument);
  CHECK_THROWS_AS(check_sampling({kNan, 0, 1}), std::invalid_argument);
  CHECK_THROWS_AS(check_sampling({kInfinity, 0, 1}), std::invalid_argument);
  CHECK_THROWS_AS(check_sampling({1, -1, 1}), std::invalid_argument);
  CHECK_THROWS_AS(check_sampling({1, 0, 0}), std::invalid_argument);
  CHECK_THROWS_AS(check_sampling({1, 0, 1.5}), std::invalid_argument);
  CHECK_NOTHROW(check_sampling({0.7, 40, 0.95}));
}

}  // namespace
}  // namespace replayeval
