#include "harness/metrics.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "kernels/kl.h"

namespace replayeval {

std::span<const MetricInfo> metric_infos() {
  static constexpr MetricInfo kMetrics[] = {
      {"kl", "nats", "KL(p_fp32 || p_state) of the next-token distribution after each position"},
      {"nll", "nats", "negative log-likelihood of the next token"},
      {"top1", "share", "positions where both distributions have the same most likely token"},
      {"state_error", "relative",
       "Frobenius error of the decoded checkpoint against the FP32 row's, per layer and head"},
      {"health", "count", "non-finite, saturated, clipped and vanished state elements per layer"},
  };
  return kMetrics;
}

void PositionFigures::append(const PositionFigures& other) {
  kl_nats.insert(kl_nats.end(), other.kl_nats.begin(), other.kl_nats.end());
  nll_nats.insert(nll_nats.end(), other.nll_nats.begin(), other.nll_nats.end());
  top1.insert(top1.end(), other.top1.begin(), other.top1.end());
}

std::vector<PositionFigures> measure(const Model& model, const Hidden& hidden, int rows, int tokens,
                                     std::span<const int32_t> targets, int64_t slice_bytes,
                                     MeasureTimes* times) {
  const int64_t vocabulary = model.spec().vocabulary;
  if (hidden.tokens != int64_t{rows} * tokens || static_cast<int64_t>(targets.size()) != tokens) {
    throw std::invalid_argument("measure: " + std::to_string(hidden.tokens) +
                                " hidden states and " + std::to_string(targets.size()) +
                                " targets for " + std::to_string(rows) + " rows of " +
                                std::to_string(tokens));
  }
  std::vector<PositionFigures> figures(static_cast<size_t>(rows));
  for (PositionFigures& f : figures) {
    f.kl_nats.resize(static_cast<size_t>(tokens));
    f.nll_nats.resize(static_cast<size_t>(tokens));
    f.top1.resize(static_cast<size_t>(tokens));
  }
  const int64_t slice = std::clamp<int64_t>(
      slice_bytes / (int64_t{rows} * vocabulary * static_cast<int64_t>(sizeof(float))), 1, tokens);
  std::vector<float> logits(static_cast<size_t>(int64_t{rows} * slice * vocabulary));
  std::vector<LogitSummary> summaries(static_cast<size_t>(int64_t{rows} * slice));
  std::vector<double> kl(static_cast<size_t>(slice));
  for (int64_t first = 0; first < tokens; first += slice) {
    const int64_t count = std::min<int64_t>(slice, tokens - first);
    const int64_t block = count * vocabulary;
    const auto start = std::chrono::steady_clock::now();
    for (int64_t r = 0; r < rows; ++r)
      model.lm_head(hidden, r * tokens + first, count, logits.data() + r * block);
    const auto formed = std::chrono::steady_clock::now();
    summarize_logits(logits.data(), vocabulary, rows * count, vocabulary, summaries.data());
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = logits.data() + r * block;
      const LogitSummary* summary = summaries.data() + r * count;
      kl_divergence(logits.data(), vocabulary, summaries.data(), row, vocabulary, summary, count,
                    vocabulary, kl.data());
      PositionFigures& f = figures[static_cast<size_t>(r)];
      for (int64_t t = 0; t < count; ++t) {
        const size_t i = static_cast<size_t>(first + t);
        f.kl_nats[i] = static_cast<float>(kl[static_cast<size_t>(t)]);
        f.nll_nats[i] = static_cast<float>(
            negative_log_likelihood(row + t * vocabulary, summary[t], targets[i]));
        f.top1[i] = top1_agreement(summaries[static_cast<size_t>(t)], summary[t]);
      }
    }
    if (times != nullptr) {
      times->head += std::chrono::duration<double>(formed - start).count();
      times->metrics +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - formed).count();
    }
  }
  return figures;
}

}  // namespace replayeval
