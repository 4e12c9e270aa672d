// Metrics of two rows of logits (DESIGN.md section 3, Metrics): KL divergence and negative
// log-likelihood in nats, top-1 agreement. A row is summarised once (maximum, log-sum-exp, argmax),
// the reference's summary is reused for every candidate.
#pragma once

#include <cstdint>

namespace replayeval {

/// What one pass over a row of logits gives. log_sum_exp is FP64: its sum of exponentials
/// has a relative error below (vocab / 16 + 16) 2^-53.
struct LogitSummary {
  double log_sum_exp = 0;  // NaN when not valid()
  float max = 0;           // NaN when the row has one
  int32_t argmax = -1;     // lowest id among equal maxima; -1 when not valid()
  int32_t nan_count = 0;
  int32_t inf_count = 0;  // +inf and -inf
  /// No NaN, and a finite maximum. -inf elsewhere is a probability of zero, not an error.
  bool valid() const { return argmax >= 0; }
};

/// Summaries of rows [rows, vocab] FP32 with stride; out [rows]. Parallel over rows; each row in a
/// fixed order.
void summarize_logits(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                      LogitSummary* out);

/// kl[i] = sum_v p(v) ln(p(v) / q(v)), p = softmax of reference row i, q of candidate row i, in
/// nats, as
///   sum_v p (e^-d + d - 1),   d = (r - c) - (lse_r - lse_c) in FP64,
/// whose terms are never negative (the sum is the same, since p and q both sum to 1). So kl >= 0,
/// it is exactly 0 for bit-equal rows, and an error of a log-sum-exp enters squared: 1e-13 is
/// meaningful at any vocabulary. Terms are FP32, with relative error below 2^-21 (8 + |ln p| + |ln
/// q|) where p and q are at least 2^-126 (0 stands for less); their sum is FP64 in a fixed order.
/// NaN when either row is not valid(); +inf when q(v) = 0 < p(v).
void kl_divergence(const float* reference, int64_t reference_stride,
                   const LogitSummary* reference_summary, const float* candidate,
                   int64_t candidate_stride, const LogitSummary* candidate_summary, int64_t rows,
                   int64_t vocab, double* kl);

/// -ln p(target) in nats = log_sum_exp - logits[target]; NaN when the row is not valid or target is
/// negative.
double negative_log_likelihood(const float* logits, const LogitSummary& summary, int64_t target);

/// 1 when both argmax are equal, 0 when not, 255 when either row is not valid.
uint8_t top1_agreement(const LogitSummary& reference, const LogitSummary& candidate);

/// Straight from the equations in long double, for tests: the same rules for NaN and inf.
LogitSummary summarize_reference(const float* logits, int64_t vocab);
double kl_reference(const float* reference, const float* candidate, int64_t vocab);

}  // namespace replayeval
