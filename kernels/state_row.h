// What a state kernel reads and changes of one row (one sequence in one state precision) of one
// layer: the checkpoints, how far the ring is filled, and how each head keeps its state. Shared by
// Mamba-2, GDN and KDA; memory belongs to the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "quant/quantize.h"

namespace replayeval {

constexpr int kMaxWindow = 64;

enum class GdnFold : uint8_t { rederive, cached };
enum class FlushOutput : uint8_t { recurrence, read };
enum class RecordType : uint8_t { fp32, bf16 };
enum class DotType : uint8_t { fp32, tf32, bf16 };
/// `fast`: window form, vectorised, parallel over rows and heads. `reference`: token by token from
/// the equation, FP64.
enum class KernelForm : uint8_t { fast, reference };
/// `commit`: tokens are final, a plan flushes whenever its window is full. `verify`: outputs of the
/// call's T tokens, which stay uncommitted drafts (DESIGN.md section 1, Speculation): when pending
/// + T > window the pending records are folded and encoded first (position - 1 is the last
/// committed token), pending becomes 0, and the outputs come from the unencoded state (from the new
/// read checkpoint with FlushOutput::read).
enum class AdvanceMode : uint8_t { commit, verify };

/// How a group of heads keeps its state.
struct HeadPlan {
  StateCodec recurrence;
  std::optional<StateCodec> read;  // none: one shared checkpoint
  int window = 16;                 // L, 1 to kMaxWindow
  FlushOutput flush_output = FlushOutput::recurrence;
  GdnFold gdn_fold = GdnFold::rederive;
  RecordType ring_u = RecordType::fp32;  // GDN, KDA: type of the stored corrections
  RecordType beta = RecordType::fp32;    // GDN, KDA: type beta passes through
  DotType dot = DotType::fp32;           // operands of a flush's products
  uint64_t seed = 0;
};

/// First non-finite state and the encoder's counts, for one head of one row.
struct HeadHealth {
  EncodeHealth encode;
  int64_t first_non_finite_position = -1;
};

/// One row of one layer. `position` is the absolute index of the first token of the call.
/// `pending[p]` is h, the records since plan p's last flush; kernels update it (commit mode, and a
/// verify call that folds). Packed checkpoints: head h at recurrence + h * recurrence_stride, in
/// the format of its plan; `read` likewise, unused by plans with a shared checkpoint; `memory`
/// likewise (memory_bytes of the recurrence format, then of the read format). `corrections` (GDN,
/// KDA) is described there.
struct StateRow {
  int64_t position = 0;
  uint32_t stream = 0;
  std::span<const HeadPlan> plans;
  const uint8_t* plan_of_head = nullptr;  // [heads]; null: plan 0 for all
  int* pending = nullptr;                 // [plans]
  // GDN, KDA: the pending records' corrections are of commit calls that read this very checkpoint,
  // so that GdnFold::rederive of a shared FP32-carried window gives them again. False is safe.
  bool corrections_hold = false;
  std::byte* recurrence = nullptr;
  size_t recurrence_stride = 0;
  std::byte* read = nullptr;
  size_t read_stride = 0;
  std::byte* memory = nullptr;
  size_t memory_stride = 0;
  HeadHealth* health = nullptr;  // [heads]
};

}  // namespace replayeval
