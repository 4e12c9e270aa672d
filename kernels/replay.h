// What every mixer's replay shares (DESIGN.md section 1): which records a call folds and when,
// decoding a head's checkpoints once, encoding both roles from the same FP32 state at a flush, and
// counting what happened there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/aligned.h"
#include "kernels/state_row.h"

namespace replayeval {

/// Plan index of a head.
inline int plan_index(const StateRow& row, int head) {
  return row.plan_of_head ? row.plan_of_head[head] : 0;
}

/// A run of records that ends in a flush or at the end of the call. Tokens are counted from the
/// call's first token, so records of earlier calls are negative. Outputs are due for tokens
/// first_query .. first + records - 1.
struct ReplaySpan {
  int first = 0;                // first record
  int records = 0;              // records in the ring once all tokens of the span are appended
  int first_query = 0;          // >= first; first + records when there is nothing to read
  bool flush = false;           // fold all records, encode both roles at the last one's position
  bool from_unencoded = false;  // verify after a fold: read the folded state before its encoding

  int end() const { return first + records; }
  int queries() const { return end() - first_query; }
};

/// The spans of one plan in one call. commit: a flush wherever the ring holds `window` records; a
/// ring that a verify step left full is folded first. verify: one fold of the pending records when
/// pending + tokens > window, then one span of drafts. `pending_after` receives h after the call.
/// Throws std::invalid_argument when the ring or a verify step exceeds kMaxWindow.
std::vector<ReplaySpan> replay_spans(int pending, int window, int tokens, AdvanceMode mode,
                                     FlushOutput flush_output, int* pending_after);

/// The single span of an explicit flush: all pending records, no output. Empty when nothing is
/// pending.
std::vector<ReplaySpan> flush_spans(int pending);

/// Which flush an encoding belongs to: the part of the random key that the head's own index and
/// plan do not give.
struct FlushKey {
  int layer = 0;
  int head_offset = 0;   // added to the head's index in the row (tensor-parallel shards)
  int64_t position = 0;  // absolute index of the last token folded
};

/// Encodes the recurrence and the read checkpoint of one head, each from `state` [head_dim,
/// state_dim] itself. Adds the counts of both encodings to row.health[head] (may be null) and sets
/// first_non_finite_position there. `span_amax` is used by layer-span formats only.
void encode_checkpoints(const StateRow& row, StateShape shape, int head, const FlushKey& key,
                        float span_amax, const float* state);

/// Decodes one checkpoint of a head into state [head_dim, state_dim] FP32; `role` read means
/// recurrence when it is shared.
void decode_checkpoint(const StateRow& row, StateShape shape, int head, StateRole role,
                       float* state);

/// Asks the memory system for what decode_checkpoint reads of a head soon: the read role, with
/// `state_too` the recurrence as well. A plain FP32 matrix is left to the loops that walk through
/// it.
void prefetch_checkpoint(const StateRow& row, StateShape shape, int head, bool state_too);

/// Asks for `count` floats.
inline void prefetch_floats(const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i, 0, 2);
}

/// Whether an encoding of this plan needs the largest magnitude over all heads of the layer that
/// share the plan.
bool spans_layer(const HeadPlan& plan);

/// True when a checkpoint in this format is the FP32 matrix itself, so that it can be read and
/// updated in place.
bool is_plain_fp32(const StateFormat& format);

/// The FP32 matrices of one head while its spans are walked. Checkpoints are decoded when first
/// asked for; a plain FP32 checkpoint is used where it lies. `state()` is S = decode(R), to be
/// folded in place; `read()` is decode(C), the same matrix when shared.
class HeadState {
 public:
  /// Binds to a head of a row; buffers are kept between binds. The row must outlive the use.
  void bind(const StateRow& row, StateShape shape, int head);
  float* state();
  const float* read();
  /// Encodes the folded state() in both roles. `finite` may be set when the caller has seen that
  /// every element is finite (it spares counting). From now on state() and read() are the decoded
  /// checkpoints.
  void flush(const FlushKey& key, float span_amax, bool finite);
  /// Largest magnitude of the folded state.
  float amax() { return state_amax(state(), shape_.elements()); }

 private:
  std::byte* packed(StateRole role) const;
  float* scratch(AlignedVector<float>* buffer) const;

  const StateRow* row_ = nullptr;
  const HeadPlan* plan_ = nullptr;
  StateShape shape_;
  int head_ = 0;
  AlignedVector<float> state_buffer_, read_buffer_;
  bool in_place_ = false;   // the recurrence checkpoint is used where it lies
  float* state_ = nullptr;  // null: not decoded yet
  const float* read_ = nullptr;
};

/// Checks what all mixers require of rows: plans, windows in 1 .. kMaxWindow, codecs with formats,
/// plan indices in range, pending counts, and the pointers the plans need. `kernel` opens the
/// message. Throws std::invalid_argument.
void check_rows(const char* kernel, std::span<const StateRow> rows, size_t input_rows, int heads,
                StateShape shape);

/// The nearest value of the type, ties to even: 23, 10 (tf32) or 7 (bf16) mantissa bits. Infinity
/// and NaN stay.
float round_operand(DotType type, float x);

/// 2^x of `count` numbers with the kernels' own exponential (kernels/lanes.h): exact for integers,
/// relative error below 1.0e-7.
void exp2_array(const float* x, int count, float* result);

}  // namespace replayeval
