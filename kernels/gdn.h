// Gated DeltaNet and KDA by replay of a window of inputs (ReplaySSM sections 5.3 and B, DESIGN.md
// section 1). With S [V, K], k and q after their L2 normalisation (x / sqrt(sum x^2 + 1e-6); q also
// times K^-1/2):
//   S <- S 2^g (GDN: one g a head; KDA: one g a key channel)
//   u_t = beta_t (v_t - S k_t);  S <- S + u_t k_t^T;  o_t = S q_t.
#pragma once

#include <span>

#include "kernels/state_row.h"

namespace replayeval {

/// Value head h reads key head h / (value_heads / key_heads). `layer` and `head_offset` (of the
/// value heads) enter the random key.
struct GdnLayer {
  int key_heads = 0;
  int value_heads = 0;
  int key_dim = 0;             // K = state_dim
  int value_dim = 0;           // V = head_dim
  bool channel_decay = false;  // KDA: decay_log2 has key_dim values a head
  int layer = 0;
  int head_offset = 0;
};

/// Records and queries of one row for one call, laid out as Mamba2Inputs: token t at k + t *
/// k_stride, with `pending` earlier records before the call's first token. q and k are raw (before
/// L2 normalisation). `u` [value_heads, value_dim] a token holds the corrections: earlier ones are
/// read, the call's are written (the caller keeps them with the ring; a plan with RecordType::bf16
/// stores them rounded). A step whose output comes from a flush's S writes the correction that was
/// folded.
struct GdnInputs {
  int tokens = 0;
  const float* q = nullptr;  // [key_heads, key_dim] a token; only the call's tokens are read
  int64_t q_stride = 0;
  const float* k = nullptr;  // [key_heads, key_dim] a token
  int64_t k_stride = 0;
  const float* v = nullptr;  // [value_heads, value_dim] a token
  int64_t v_stride = 0;
  // g log2(e): [value_heads] a token; KDA: [value_heads, key_dim]
  const float* decay_log2 = nullptr;
  int64_t decay_stride = 0;
  const float* beta = nullptr;  // [value_heads] a token
  int64_t beta_stride = 0;
  float* u = nullptr;
  int64_t u_stride = 0;
  float* o = nullptr;  // [value_heads, value_dim] a token
  int64_t o_stride = 0;
};

/// Walks inputs[i].tokens tokens of rows[i], window by window (ragged; 0 tokens are allowed).
///
/// A step without flush computes u_t from C carried forward by the decays and the ring's earlier
/// u_j as they are stored, and its output with its own u_t before the ring rounds it. A flush with
/// GdnFold::rederive computes every u of the window again from R and the raw records (of FP32
/// matrices that are shared the operations are the same ones, and so are the bits); with
/// GdnFold::cached it folds the stored ones, and the flush token's own u comes from R carried
/// forward plus those. A fold without a flush token (a verify step's, gdn_flush) has all u stored
/// and folds them all with `cached`. FP32 state and any window agree with the recurrence up to
/// rounding.
///
/// DotType rounds the operands of a flush's products over state_dim and over records: the reads
/// R k_j, the products k_i . k_j and the fold (GDN: decayed u_j and k_j; KDA, whose decays belong
/// to the channels: decayed keys in all three). Sums, the triangular solve and the output stay
/// FP32.
///
/// Order (KernelForm::fast): every sum over n or over records j is one chain of fused multiply-adds
/// in ascending order, starting from the carried term where there is one; results are bit-equal for
/// any split of the tokens into calls, any set and order of rows and any number of threads.
/// Decays: GDN 2^(sum of g), summed from each record's own start; KDA multiplies step decays, so
/// that channels with strong decays underflow and nothing is divided.
/// NaN and infinity propagate within their head and are counted by the encoder.
/// Throws std::invalid_argument on a shape mismatch or a missing array.
void gdn_advance(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs,
                 AdvanceMode mode, KernelForm form);

/// Folds the pending records of every plan into its checkpoints now (prompt hand-over), encoding at
/// position row.position - 1; pending becomes 0. inputs.tokens is ignored, only the earlier records
/// are read.
void gdn_flush(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs,
               KernelForm form);

/// One value head's records of a window, oldest first: record j's key at k + j * k_stride, and so
/// on. k is raw; v may be null where only the decays and keys matter.
struct GdnHeadRecords {
  int records = 0;
  int key_dim = 0;
  int value_dim = 0;
  bool channel_decay = false;
  const float* k = nullptr;
  int64_t k_stride = 0;
  const float* v = nullptr;
  int64_t v_stride = 0;
  const float* decay_log2 = nullptr;
  int64_t decay_stride = 0;
  const float* beta = nullptr;
  int64_t beta_stride = 0;
};

/// The output after the last record for a query q (raw), in FP64, without state or corrections of
/// the records (the adjoint form; a scalar decay only):
///   T = q^;  for j = newest .. oldest:  c = beta_j k^_j . T,  o += c v_j,  T <- 2^g_j (T - c
///   k^_j); at last o += S T.
/// state [value_dim, key_dim] before the first record, q [key_dim], o [value_dim]. Throws
/// std::invalid_argument with channel_decay or without v.
void gdn_adjoint_output(const GdnHeadRecords& records, const float* state, const float* q,
                        double* o);

/// What one window of L records does to errors. Let D_t be the decays up to record t (diagonal),
/// P_t = prod_{s <= t} diag(2^g_s) (I - beta_s k_s k_s^T) the map of the state's rows, F the last
/// factor of P_L alone, and E_R = R - S, E_C = C - S the checkpoints' errors at the window's start.
/// `rederive` leaves E_R P_L. `cached` folds corrections that were read from C: with them a state
/// moves by D_{L-1} plus what the corrections do to C, which is C (P_{L-1} - D_{L-1}), so that
///   E' = [E_R D_{L-1} + E_C (P_{L-1} - D_{L-1})] F = E_R P_L + (C - R) (P_{L-1} - D_{L-1}) F.
/// A format's error is proportional to the state, ||C - R|| <= eta ||R|| (Frobenius), hence state
/// and error grow by at most
///   map_norm + eta read_norm,  map_norm = ||P_L||,  read_norm = ||(P_{L-1} - D_{L-1}) F||
/// a window, and an open loop stays bounded when that is below 1: decay against the correction's
/// read error. With eta = 0 (shared checkpoint, or rederive) the condition is map_norm < 1.
struct GdnStability {
  double solve_norm = 0;  // largest row sum of |(I + A)^-1|, A_ij = beta_i k_i . D_ij k_j, j < i
  double decay = 0;       // largest entry of D_L
  double map_norm = 0;    // spectral, by power iteration (approached from below)
  double read_norm = 0;   // spectral
  double largest_read_error = 0;  // eta below which the condition holds: (1 - map_norm) / read_norm
};

/// Measures one window in FP64. Throws std::invalid_argument for a window without records.
GdnStability gdn_window_stability(const GdnHeadRecords& records);

/// One head over all windows seen. `mean_log2_growth` is the mean of log2(map_norm + eta
/// read_norm): below 0, `cached` is stable over the run even where single windows are not.
struct GdnHeadStability {
  int64_t windows = 0;
  double mean_solve_norm = 0;
  double max_solve_norm = 0;
  double mean_decay = 0;
  double max_map_norm = 0;
  double mean_log2_growth = 0;
  double smallest_read_error = 0;  // smallest largest_read_error of a window
  int64_t unstable_windows = 0;    // windows where the condition fails for the head's eta
  bool stable() const { return windows > 0 && mean_log2_growth < 0; }
};

/// Cuts inputs.tokens tokens (u, q, o are not read) into whole windows and adds them to heads
/// [value_heads]; read_error [value_heads] is eta of each head. Parallel over heads. Throws
/// std::invalid_argument on a shape mismatch.
void gdn_measure_stability(const GdnLayer& layer, const GdnInputs& inputs, int window,
                           std::span<const double> read_error, std::span<GdnHeadStability> heads);

}  // namespace replayeval
