// Inner loops of kernels/kl.h on one row, called through base/simd_dispatch.h.
#pragma once

#include "base/simd_dispatch.h"
#include "kernels/kl.h"

namespace replayeval {

REPLAYEVAL_SIMD_DECLARE(
    /* Everything of a summary except the logarithm: log_sum_exp holds the sum of e^(x - max). */
    void summarize_row(const float* logits, int64_t vocab, LogitSummary* summary);
    double kl_row(const float* reference, double reference_lse, const float* candidate,
                  double candidate_lse, int64_t vocab))

}  // namespace replayeval
