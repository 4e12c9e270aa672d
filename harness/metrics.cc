#include "harness/metrics.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "kernels/kl.h"
#include "kernels/kl_cuda.h"

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

namespace {

/// Positions whose logits a device holds at a time, of two rows. A fixed number: a product's shape,
/// and so its bits, must not depend on the number of rows.
constexpr int64_t kDevicePositions = 256;

/// `measure` with the metrics' kernels on the model's device.
void measure_on_device(const Model& model, const Hidden& hidden, int rows, int tokens,
                       std::span<const int32_t> targets, std::vector<PositionFigures>& figures) {
  Backend& backend = model.backend();
  const int64_t vocabulary = model.spec().vocabulary;
  const int64_t slice = std::min<int64_t>(kDevicePositions, tokens);
  const Buffer reference(backend, slice * vocabulary), candidate(backend, slice * vocabulary);
  const size_t count = static_cast<size_t>(slice);
  const Memory next(backend, targets.size_bytes());
  backend.upload(next.data(), targets.data(), targets.size_bytes());
  const Memory sums(backend, count * sizeof(KlSums));
  auto* const sum = reinterpret_cast<KlSums*>(sums.data());
  // Of all rows and positions: KL, NLL of the candidate, top-1.
  const size_t all = static_cast<size_t>(rows) * static_cast<size_t>(tokens);
  const Memory kl(backend, all * sizeof(double)), nll(backend, all * sizeof(double)),
      top1(backend, all);
  for (int64_t first = 0; first < tokens; first += slice) {
    const int64_t part = std::min<int64_t>(slice, tokens - first);
    model.lm_head_into(hidden, first, part, reference.data());
    for (int64_t r = 0; r < rows; ++r) {
      if (r > 0) model.lm_head_into(hidden, r * tokens + first, part, candidate.data());
      KlSlice logits;
      logits.positions = part;
      logits.tokens = vocabulary;
      logits.reference = reference.data();
      logits.candidate = r == 0 ? reference.data() : candidate.data();
      logits.reference_stride = logits.candidate_stride = vocabulary;
      logits.targets = reinterpret_cast<const int32_t*>(next.data()) + first;
      kl_begin_cuda(sum, part);
      kl_add_cuda(logits, sum);
      const int64_t at = r * tokens + first;
      kl_finish_cuda(sum, part, reinterpret_cast<double*>(kl.data()) + at, nullptr,
                     reinterpret_cast<double*>(nll.data()) + at,
                     reinterpret_cast<uint8_t*>(top1.data()) + at);
    }
  }
  std::vector<double> host_kl(all), host_nll(all);
  std::vector<uint8_t> host_top1(all);
  backend.download(host_kl.data(), kl.data(), kl.bytes());
  backend.download(host_nll.data(), nll.data(), nll.bytes());
  backend.download(host_top1.data(), top1.data(), top1.bytes());
  for (size_t r = 0; r < figures.size(); ++r) {
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
      const size_t at = r * static_cast<size_t>(tokens) + t;
      figures[r].kl_nats[t] = static_cast<float>(host_kl[at]);
      figures[r].nll_nats[t] = static_cast<float>(host_nll[at]);
      figures[r].top1[t] = host_top1[at];
    }
  }
}

}  // namespace

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
  if (model.backend().on_device()) {
    const auto start = std::chrono::steady_clock::now();
    measure_on_device(model, hidden, rows, tokens, targets, figures);
    if (times != nullptr) {
      times->metrics +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return figures;
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
