// Single-token decoding on the device: the ring of input records lies in device memory, and cursor
// and flush are decided there, so that a step can be captured in a graph. One plan a call; the
// arithmetic is that of mamba2_advance and gdn_advance, one token a call, bit for bit (unless
// DecodeStates::sums_freely), after the inputs have been rounded to the activation type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "kernels/gdn.h"
#include "kernels/mamba2.h"
#include "quant/cuda_support.h"

namespace replayeval {

/// Rows of a step, device memory, [rows] each. `pending`: records in the ring before this token, 0
/// .. window - 1; the token is appended at that index, and the step flushes when the ring is full
/// then. `position` of this token. Layers share the arrays: decode_step_cuda moves them on after
/// the last one.
struct DecodeRows {
  int rows = 0;
  int32_t* pending = nullptr;
  int64_t* position = nullptr;
  const uint32_t* stream = nullptr;
};

/// Packed checkpoints of all rows: head h of row r at recurrence + r * row_stride + h *
/// head_stride, `read` likewise (unused when shared). Strides are multiples of 16 bytes. `health`
/// [rows, heads] is added to and may be null.
struct DecodeStates {
  std::byte* recurrence = nullptr;
  size_t row_stride = 0, head_stride = 0;
  std::byte* read = nullptr;
  size_t read_row_stride = 0, read_head_stride = 0;
  HeadHealth* health = nullptr;
  /// Reads of 4-bit codes with NVFP4's scales may sum otherwise than the CPU (`dense: fast`), with
  /// errors of 2^-23 of the largest products (kernels/code_sums.cuh; values of a list that have no
  /// common unit count to 2^-22 of its range).
  bool sums_freely = false;
  bool streamed = false;  // by the kernels for many checkpoints however few they are (tests)
};

/// Plain FP32 checkpoints of so many bytes a call and fewer have kernels that do not stream them
/// (mamba2_decode_few.cu for windows of up to 32, gdn_decode_few.cu); results are the same.
constexpr int64_t kFewMamba2Bytes = int64_t{128} << 20, kFewGdnBytes = int64_t{24} << 20;

/// One token of every row. x, y [rows, heads, head_dim], b, c [rows, groups, state_dim] in
/// `activation`, dt [rows, heads] FP32; rings x [rows, window, heads, head_dim], b [rows, window,
/// groups, state_dim], dt [rows, window, heads] of the same types. Those of the activation type
/// start on multiples of 16 bytes.
struct Mamba2DecodeStep {
  RecordType activation = RecordType::bf16;
  const void* x = nullptr;
  const float* dt = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* y = nullptr;
  void* ring_x = nullptr;
  float* ring_dt = nullptr;
  void* ring_b = nullptr;
};

/// Queues one token in `stream`. Throws std::invalid_argument for a state_dim that is no multiple
/// of 16, a head_dim that is none of 8, for formats whose scale spans the layer, that are prepared
/// (transforms, zero points, column scales), keep a residual or belong to a library
/// (mamba2_advance_cuda takes those it can), and for arrays that are missing or not on a multiple
/// of 16 bytes.
void mamba2_decode_cuda(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                        const DecodeStates& states, const Mamba2DecodeStep& step,
                        CudaStream stream = nullptr);

/// One token of every row of a GDN layer. q, k [rows, key_heads, key_dim], v, o [rows, value_heads,
/// value_dim] in `activation`; decay_log2, beta [rows, value_heads] FP32; rings k, v, decay_log2,
/// beta of the same types and u [rows, window, value_heads, value_dim] of the plan's ring_u, each
/// [rows, window, ...]; those of the activation type, and u, start on multiples of 16 bytes. The
/// ring's u are those that earlier steps made (or gdn_advance): where they are what
/// GdnFold::rederive would give again, a flush takes them as they are.
struct GdnDecodeStep {
  RecordType activation = RecordType::bf16;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const float* decay_log2 = nullptr;
  const float* beta = nullptr;
  void* o = nullptr;
  void* ring_k = nullptr;
  void* ring_v = nullptr;
  void* ring_u = nullptr;
  float* ring_decay = nullptr;
  float* ring_beta = nullptr;
};

/// As mamba2_decode_cuda, for GDN (no decay a channel) with key_dim a multiple of 16 and value_dim
/// a multiple of 8.
void gdn_decode_cuda(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                     const DecodeStates& states, const GdnDecodeStep& step,
                     CudaStream stream = nullptr);

/// pending and position after a token: pending + 1, or 0 after a flush.
void decode_step_cuda(const DecodeRows& rows, int window, CudaStream stream = nullptr);

/// Work that is queued once and run many times, as a CUDA graph: the decode functions with
/// decode_step_cuda behind them, for example. The arrays that it names must outlive it.
class CapturedSteps {
 public:
  /// Calls queue(stream), which queues work in the stream it is given and waits for nothing.
  /// Nothing runs yet. Throws std::runtime_error for what cannot be captured.
  explicit CapturedSteps(const std::function<void(CudaStream)>& queue);
  CapturedSteps(const CapturedSteps&) = delete;
  CapturedSteps& operator=(const CapturedSteps&) = delete;
  ~CapturedSteps();
  /// Queues all of it in `stream`.
  void run(CudaStream stream = nullptr) const;

 private:
  void* graph_ = nullptr;
};

}  // namespace replayeval
