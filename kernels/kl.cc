#include "kernels/kl.h"

#include <cmath>
#include <limits>

#include "kernels/kl_simd.h"

namespace replayeval {

void summarize_logits(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                      LogitSummary* out) {
  const auto function = REPLAYEVAL_SIMD_CALL(summarize_row);
#pragma omp parallel for schedule(static) if (rows > 1 && rows * vocab > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    function(logits + row * stride, vocab, out + row);
    if (out[row].valid()) out[row].log_sum_exp = out[row].max + std::log(out[row].log_sum_exp);
  }
}

void kl_divergence(const float* reference, int64_t reference_stride,
                   const LogitSummary* reference_summary, const float* candidate,
                   int64_t candidate_stride, const LogitSummary* candidate_summary, int64_t rows,
                   int64_t vocab, double* kl) {
  const auto function = REPLAYEVAL_SIMD_CALL(kl_row);
#pragma omp parallel for schedule(static) if (rows > 1 && rows * vocab > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    const LogitSummary& r = reference_summary[row];
    const LogitSummary& c = candidate_summary[row];
    kl[row] = r.valid() && c.valid()
                  ? function(reference + row * reference_stride, r.log_sum_exp,
                             candidate + row * candidate_stride, c.log_sum_exp, vocab)
                  : std::numeric_limits<double>::quiet_NaN();
  }
}

double negative_log_likelihood(const float* logits, const LogitSummary& summary, int64_t target) {
  if (!summary.valid() || target < 0) return std::numeric_limits<double>::quiet_NaN();
  return summary.log_sum_exp - logits[target];
}

uint8_t top1_agreement(const LogitSummary& reference, const LogitSummary& candidate) {
  if (!reference.valid() || !candidate.valid()) return 255;
  return reference.argmax == candidate.argmax ? 1 : 0;
}

LogitSummary summarize_reference(const float* logits, int64_t vocab) {
  LogitSummary summary;
  summary.max = -std::numeric_limits<float>::infinity();
  for (int64_t v = 0; v < vocab; ++v) {
    if (std::isnan(logits[v])) ++summary.nan_count;
    if (std::isinf(logits[v])) ++summary.inf_count;
    if (logits[v] > summary.max) {
      summary.max = logits[v];
      summary.argmax = static_cast<int32_t>(v);
    }
  }
  if (summary.nan_count > 0) summary.max = std::numeric_limits<float>::quiet_NaN();
  if (!std::isfinite(summary.max)) {
    summary.argmax = -1;
    summary.log_sum_exp = std::numeric_limits<double>::quiet_NaN();
    return summary;
  }
  long double total = 0;
  for (int64_t v = 0; v < vocab; ++v)
    total += std::exp(static_cast<long double>(logits[v]) - summary.max);
  summary.log_sum_exp = static_cast<double>(summary.max + std::log(total));
  return summary;
}

double kl_reference(const float* reference, const float* candidate, int64_t vocab) {
  const LogitSummary r = summarize_reference(reference, vocab);
  const LogitSummary c = summarize_reference(candidate, vocab);
  if (!r.valid() || !c.valid()) return std::numeric_limits<double>::quiet_NaN();
  const auto log_sum_exp = [vocab](const float* x, float max) {
    long double total = 0;
    for (int64_t v = 0; v < vocab; ++v) total += std::exp(static_cast<long double>(x[v]) - max);
    return max + std::log(total);
  };
  const long double r_lse = log_sum_exp(reference, r.max);
  const long double c_lse = log_sum_exp(candidate, c.max);
  long double total = 0;
  for (int64_t v = 0; v < vocab; ++v) {
    if (std::isinf(reference[v])) {
      total += std::exp(candidate[v] - c_lse);
      continue;
    }
    if (std::isinf(candidate[v])) return std::numeric_limits<double>::infinity();
    const long double d = (static_cast<long double>(reference[v]) - candidate[v]) - (r_lse - c_lse);
    total += std::exp(reference[v] - r_lse) * (std::expm1(-d) + d);
  }
  return static_cast<double>(total);
}

}  // namespace replayeval
