// Gated DeltaNet and KDA by replay of a window of inputs (ReplaySSM sections 5.3 and B, DESIGN.md section 1). With S [V, K], k and q after their L2
// normalisation (x / sqrt(sum x^2 + 1e-6); q also times K^-1/2):
//   S <- S 2^g (GDN: one g a head; KDA: one g a key channel);  u_t = beta_t (v_t - S k_t);  S <- S + u_t k_t^T;  o_t = S q_t.
#pragma once

#include <span>

#include "kernels/state_row.h"

namespace replayeval {

/// Value head h reads key head h / (value_heads / key_heads). `layer` and `head_offset` (of the value heads) enter the random key.
struct GdnLayer {
  int key_heads = 0;
  int value_heads = 0;
  int key_dim = 0;    // K = state_dim
  int value_dim = 0;  // V = head_dim
  bool channel_decay = false;  // KDA: decay_log2 has key_dim values a head
  int layer = 0;
  int head_offset = 0;
};

/// Records and queries of one row for one call, laid out as Mamba2Inputs: token t at k + t * k_stride, with `pending` earlier records
/// before the call's first token. q and k are raw (before L2 normalisation). `u` [value_heads, value_dim] a token holds the corrections:
/// earlier ones are read, the call's are written (the caller keeps them with the ring; a plan with RecordType::bf16 stores them rounded).
struct GdnInputs {
  int tokens = 0;
  const float* q = nullptr;  // [key_heads, key_dim] a token; only the call's tokens are read
  int64_t q_stride = 0;
  const float* k = nullptr;  // [key_heads, key_dim] a token
  int64_t k_stride = 0;
  const float* v = nullptr;  // [value_heads, value_dim] a token
  int64_t v_stride = 0;
  const float* decay_log2 = nullptr;  // g log2(e): [value_heads] a token; KDA: [value_heads, key_dim]
  int64_t decay_stride = 0;
  const float* beta = nullptr;  // [value_heads] a token
  int64_t beta_stride = 0;
  float* u = nullptr;
  int64_t u_stride = 0;
  float* o = nullptr;  // [value_heads, value_dim] a token
  int64_t o_stride = 0;
};

/// As mamba2_advance.
void gdn_advance(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs, AdvanceMode mode,
                 KernelForm form);

/// As mamba2_flush.
void gdn_flush(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs, KernelForm form);

}  // namespace replayeval
