// The next token from a row of logits: the largest, or a draw from the tempered and truncated
// distribution whose random numbers are a pure function of (seed, item and repeat, position,
// token), so that all states of a run draw alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace replayeval {

/// How tokens are chosen. temperature 0 is greedy; then top_k and top_p have no effect.
struct Sampling {
  double temperature = 0;  // logits are divided by it
  int top_k = 0;           // only the k largest logits; 0: all
  double top_p = 1;        // then the fewest most likely tokens whose probabilities reach it
  bool greedy() const { return temperature == 0; }
};

/// Throws std::invalid_argument unless temperature >= 0 and finite, top_k >= 0, 0 < top_p <= 1.
void check_sampling(const Sampling& sampling);

/// What a draw depends on beside the logits: `stream` is stream_of("task/item/repeat"), `position`
/// the absolute position of the token that is drawn.
struct DrawKey {
  uint64_t seed = 0;
  uint32_t stream = 0;
  int64_t position = 0;
};

/// E = -ln((w + 1/2) / 2^32), an exponential variable of mean 1, from the Philox word w of counter
/// (token / 4, 2^32 - 1, position, 4 stream), word token mod 4, key = seed. State roundings have
/// head + 2^16 layer in the second place and never reach 2^32 - 1, so that no word is used twice.
double draw_exponential(const DrawKey& key, int32_t token);

/// Tokens that remain after top_k and top_p, most likely first (the lower id first among equal
/// logits): the k largest logits; of those, the shortest prefix whose probabilities (softmax of
/// logit / temperature over the k) sum to at least top_p. NaN logits are never among them; +inf
/// counts as the largest. Empty when no logit is larger than -inf.
std::vector<int32_t> candidate_tokens(std::span<const float> logits, const Sampling& sampling);

/// A chosen token. `margin` is the largest minus the second largest logit in nats, whatever was
/// drawn; NaN when fewer than two logits are finite. token is -1 when every logit is NaN or -inf.
struct Choice {
  int32_t token = -1;
  float margin = 0;
};

/// Greedy: the lowest id among the largest logits. Otherwise the candidate with the largest
/// logit / temperature - ln E(token): token v with probability softmax(logit / temperature) over
/// the candidates (the minimum of exponential variables E_v / p_v falls on v with probability
/// p_v / sum p). Two states whose distributions differ by a total variation of d draw different
/// tokens with probability 2 d / (1 + d) at most.
Choice choose_token(std::span<const float> logits, const Sampling& sampling, const DrawKey& key);

}  // namespace replayeval
