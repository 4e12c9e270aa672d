#include "harness/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "quant/random.h"

namespace replayeval {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr uint32_t kDrawCounter = 0xFFFFFFFFu;

/// Words of four neighbouring tokens.
PhiloxWords draw_words(const DrawKey& key, int32_t token) {
  return philox4x32<10>(static_cast<uint32_t>(token) / 4, kDrawCounter,
                        static_cast<uint32_t>(key.position), 4 * key.stream,
                        static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
}

double exponential(uint32_t word) { return -std::log((static_cast<double>(word) + 0.5) * 0x1p-32); }

}  // namespace

void check_sampling(const Sampling& sampling) {
  const auto refuse = [](const std::string& name, const std::string& expected, double got) {
    throw std::invalid_argument(name + ": expected " + expected + ", got " + std::to_string(got));
  };
  if (!(sampling.temperature >= 0) || !std::isfinite(sampling.temperature))
    refuse("temperature", "a number of at least 0", sampling.temperature);
  if (sampling.top_k < 0) refuse("top_k", "at least 0", sampling.top_k);
  if (!(sampling.top_p > 0) || sampling.top_p > 1)
    refuse("top_p", "above 0 and at most 1", sampling.top_p);
}

double draw_exponential(const DrawKey& key, int32_t token) {
  return exponential(draw_words(key, token).word[token & 3]);
}

std::vector<int32_t> candidate_tokens(std::span<const float> logits, const Sampling& sampling) {
  std::vector<int32_t> tokens;
  for (size_t v = 0; v < logits.size(); ++v) {
    if (logits[v] > kNone) tokens.push_back(static_cast<int32_t>(v));
  }
  const auto before = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  // Only the first `sorted` tokens are in order; the others follow them in any.
  size_t sorted = 0;
  const auto sort_first = [&](size_t count) {
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(sorted);
    sorted = std::min(count, tokens.size());
    std::partial_sort(begin, tokens.begin() + static_cast<std::ptrdiff_t>(sorted), tokens.end(),
                      before);
  };
  if (sampling.top_k > 0) {
    sort_first(static_cast<size_t>(sampling.top_k));
    tokens.resize(sorted);
  }
  if (sampling.top_p >= 1 || tokens.size() < 2) {
    sort_first(tokens.size());
    return tokens;
  }
  const double largest =
      logits[static_cast<size_t>(*std::min_element(tokens.begin(), tokens.end(), before))];
  const auto weight = [&](int32_t v) {
    const double x = logits[static_cast<size_t>(v)];
    // A logit of +inf takes all probability, shared with its equals.
    return x == largest ? 1.0 : std::exp((x - largest) / sampling.temperature);
  };
  double total = 0;
  for (int32_t v : tokens) total += weight(v);
  double sum = 0;
  size_t count = 0;
  for (; count < tokens.size() && sum < sampling.top_p * total; ++count) {
    if (count == sorted) sort_first(std::max<size_t>(64, 4 * sorted));
    sum += weight(tokens[count]);
  }
  tokens.resize(std::max<size_t>(count, 1));
  return tokens;
}

Choice choose_token(std::span<const float> logits, const Sampling& sampling, const DrawKey& key) {
  Choice choice;
  float first = kNone, second = kNone;
  for (size_t v = 0; v < logits.size(); ++v) {
    const float x = logits[v];
    if (x > first) {
      second = first;
      first = x;
      choice.token = static_cast<int32_t>(v);
    } else if (x > second) {
      second = x;
    }
  }
  choice.margin = first - second;
  if (std::isinf(first) || std::isinf(second))
    choice.margin = std::numeric_limits<float>::quiet_NaN();
  if (sampling.greedy() || choice.token < 0 || std::isinf(first)) return choice;
  double best = -std::numeric_limits<double>::infinity();
  const auto offer = [&](int32_t token, uint32_t word) {
    const double score =
        static_cast<double>(logits[static_cast<size_t>(token)]) / sampling.temperature -
        std::log(exponential(word));
    if (score > best) {
      best = score;
      choice.token = token;
    }
  };
  if (sampling.top_k == 0 && sampling.top_p >= 1) {
    PhiloxWords words{};
    for (size_t v = 0; v < logits.size(); ++v) {
      if (v % 4 == 0) words = draw_words(key, static_cast<int32_t>(v));
      if (logits[v] > kNone) offer(static_cast<int32_t>(v), words.word[v % 4]);
    }
    return choice;
  }
  std::vector<int32_t> tokens = candidate_tokens(logits, sampling);
  std::sort(tokens.begin(), tokens.end());  // the lower id wins a tie, as without truncation
  for (int32_t token : tokens) offer(token, draw_words(key, token).word[token & 3]);
  return choice;
}

}  // namespace replayeval
