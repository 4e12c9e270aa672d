// Metrics of logits on the device (kernels/kl.h): KL divergence, negative log-likelihood, top-1,
// from one read of both rows of logits, slice by slice of the vocabulary.
#pragma once

#include <cstdint>

#include "quant/cuda_support.h"

namespace replayeval {

/// What has been seen of one position's two rows of logits r (reference) and c (candidate). With a
/// common scale e^m,
///   z = sum e^(r - m),  a = sum e^(r - m) (e^-d - 1 + d),  b = sum e^(r - m) (e^-d - 1),  d = r -
///   c,
/// so that with A = a / z, B = b / z: lse_c - lse_r = ln(1 + B) and kl = A - (B - ln(1 + B)): terms
/// that vanish with d, no difference of large numbers. zc = sum e^(c - mc) gives lse_c where B is
/// not small.
struct KlSums {
  double z, a, b, zc;
  float scale, candidate_scale;  // m, mc
  float max_reference, max_candidate;
  int32_t argmax_reference, argmax_candidate;  // lowest id among equals; -1: none
  float target_reference, target_candidate;    // logits of the target; NaN: not seen
  int32_t nan_reference, nan_candidate;
};

/// Logits FP32 [positions, tokens] of tokens first_token .. first_token + tokens - 1, rows `stride`
/// apart; candidate i of `candidates` begins at candidate + i * candidate_stride_rows *
/// candidate_stride.
struct KlSlice {
  int64_t positions = 0;
  int candidates = 1;
  int64_t first_token = 0;
  int64_t tokens = 0;
  const float* reference = nullptr;
  int64_t reference_stride = 0;
  const float* candidate = nullptr;
  int64_t candidate_stride = 0;
  int64_t candidate_stride_rows =
      0;  // rows from one candidate to the next; at least `positions` with several
  const int32_t* targets = nullptr;  // [positions], -1: none; null: none at all
};

/// Begins sums [candidates, positions].
void kl_begin_cuda(KlSums* sums, int64_t count, CudaStream stream = nullptr);
/// Adds a slice. Every sum has one order, given by the slices alone.
void kl_add_cuda(const KlSlice& slice, KlSums* sums, CudaStream stream = nullptr);
/// kl [count] in nats, never negative, 0 for equal rows, infinite where a possible token has no
/// candidate probability, NaN when a row has NaN or an infinite maximum; nll_reference,
/// nll_candidate [count] in nats, NaN without target; top1 [count] 1, 0 or 255 (either row not
/// valid). Any output may be null.
void kl_finish_cuda(const KlSums* sums, int64_t count, double* kl, double* nll_reference,
                    double* nll_candidate, uint8_t* top1, CudaStream stream = nullptr);

}  // namespace replayeval
