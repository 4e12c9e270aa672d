// All that changes while a model runs: for every row (one sequence in one state precision) and
// every layer the packed checkpoints, the ring of recent inputs, the last inputs of the
// convolution, and the key-value cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "models/backend.h"
#include "models/model.h"
#include "models/state_precision.h"

namespace replayeval {

/// What one row of a StateSet is.
struct RowSpec {
  StatePrecision precision;
  uint32_t stream = 0;        // low 30 bits of the document's or item's hash (base/hash.h)
  int64_t prompt_tokens = 0;  // positions below run with FP32 state; then one encode, h = 0
  int64_t prefill_chunk = 0;  // > 0: encode and decode every so many prompt tokens
};

/// Counts over the heads of one layer of one row.
struct StoreHealth {
  EncodeHealth encode;
  int64_t first_non_finite_position = -1;
  int first_non_finite_head = -1;
};

/// Arrays of one row around a call: each pointer addresses the call's first token, and what stands
/// before it (conv_kernel - 1 convolution inputs; `history` records) lies directly before it.
struct RecordPointers {
  float* conv = nullptr;         // [channels] a token
  float* channels = nullptr;     // [channels] a token, convolved
  float* scalars = nullptr;      // [scalars] a token
  float* corrections = nullptr;  // [corrections] a token
};

/// Recurrent state of one layer, all rows, in the memory of a backend. A call of few tokens writes
/// its records behind the row's ring (`in_place`); for a long one the mixer lays the ring before
/// its own buffers (`gather`). Either way it then advances and tells what to keep (`keep`).
class StateStore {
 public:
  /// `channels` inputs of a convolution of `kernel` taps; a record has `width` convolved channels,
  /// `scalars` FP32 values (dt; or decay and beta) and `corrections` values (u). `heads`, `shape`:
  /// the state. Rows outside a precision's selection follow `baseline`.
  struct Shape {
    int layer = 0;
    int heads = 0;
    StateShape state;
    int conv_kernel = 0;
    int channels = 0;
    int scalars = 0;
    int corrections = 0;
  };

  /// Calls of at most so many tokens of a row work in place.
  static constexpr int kInPlaceTokens = 16;

  StateStore(Backend& backend, const Shape& shape, std::span<const RowSpec> rows,
             const StatePrecision& baseline);

  const Shape& shape() const { return shape_; }
  int rows() const { return static_cast<int>(rows_.size()); }
  /// Records of row r that stand before its next token in gathered buffers.
  int history(int row) const { return rows_[static_cast<size_t>(row)].records; }

  /// Row r's own arrays, with room for `tokens` more tokens.
  RecordPointers in_place(int row, int tokens);
  /// Copies what stands before row r's next token to before these pointers; the copies are appended
  /// to `copies`, not made.
  void gather(int row, const RecordPointers& to, std::vector<CopyJob>& copies) const;

  /// Runs `kernel(rows, first, count)` over the tokens of a call, split where a row's prompt ends
  /// or a prefill chunk ends; rows[r] covers tokens first[r] .. first[r] + count[r] - 1 of its
  /// call. `flush(row, r, end)` folds row r's pending records, whose newest is its token end - 1.
  using Kernel = std::function<void(std::span<StateRow>, std::span<const int> first,
                                    std::span<const int> count)>;
  using Flush = std::function<void(StateRow&, int row, int end)>;
  void advance(std::span<const int64_t> positions, std::span<const int> lengths, AdvanceMode mode,
               const Kernel& kernel, const Flush& flush);

  /// Keeps what the next call needs of row r's arrays of this call (`at`: from in_place, or where
  /// gather put the history). Copies that this takes are appended to `copies`.
  void keep(int row, int tokens, AdvanceMode mode, const RecordPointers& at,
            std::vector<CopyJob>& copies);

  /// Makes the first `accepted` of the row's uncommitted tokens final and forgets the rest.
  void commit(int row, int accepted);

  /// decode(R) or decode(C) of one head, FP32 [head_dim, state_dim].
  void decode(int row, int head, StateRole role, float* out) const;
  /// h: records since the last flush of the plan that `head` follows.
  int pending(int row, int head) const;
  StoreHealth health(int row) const;
  std::vector<HeadHealth> head_health(int row) const;
  /// Packed bytes of both checkpoints of a row (what an engine would hold), without ring.
  size_t checkpoint_bytes(int row) const;
  /// What a row past its prompt holds, as it lies in the backend's memory: packed heads, the
  /// pending records oldest first, the convolution's last conv_kernel - 1 inputs. Valid until the
  /// row changes. Throws std::logic_error inside a prompt, with uncommitted tokens, with heads of
  /// several plans or a library's codec.
  struct Contents {
    const std::byte* recurrence;
    size_t recurrence_stride;
    const std::byte* read;
    size_t read_stride;
    int pending;
    const float* channels;
    const float* scalars;
    const float* corrections;
    const float* conv;
  };
  Contents contents(int row) const;
  /// A copy of the packed checkpoints of all heads, as they lie.
  std::vector<std::byte> packed(int row, StateRole role) const;

  void reset(int row, const RowSpec& spec);

  /// Row r's checkpoints, scale memories, cursors, ring, convolution inputs and counts, and back
  /// into a row of the same RowSpec. Uncommitted tokens are not part of it.
  void save(int row, ByteWriter& writer) const;
  void restore(int row, ByteReader& reader);

  /// True when rows a and b compute the same bits inside a prompt: the FP32 form of every head's
  /// plan is the same in both (windows, types of products and records), and neither is encoded
  /// between prompt chunks.
  bool same_prompt(int a, int b) const;
  /// Gives row `to` what row `from` holds inside its prompt: FP32 checkpoints, ring, convolution
  /// inputs, counts. `to` keeps its own precision. StateSet::copy_prompt checks the conditions.
  void copy_prompt(int from, int to);

  /// From now on the last `tokens` tokens' convolved channels and scalars of row 0 are kept after
  /// each call, oldest first.
  void set_trace(int tokens) { trace_tokens_ = tokens; }
  std::span<const float> trace_channels() const { return trace_channels_; }
  std::span<const float> trace_scalars() const { return trace_scalars_; }

 private:
  struct Row {
    RowSpec spec;
    std::vector<HeadPlan>
        plans;  // the precision's, then the baseline's where a selection leaves heads out
    std::vector<HeadPlan> prompt_plans;  // the same windows with FP32 state
    std::vector<uint8_t> plan_of_head;
    std::vector<int> pending;
    Memory recurrence, read, memory;
    size_t recurrence_stride = 0, read_stride = 0, memory_stride = 0;
    bool in_prompt = false;
    bool corrections_hold = true;  // StateRow::corrections_hold
    Memory health;                 // HeadHealth [heads]
    // On a device, what a library encodes stays on the host; the device holds the decoded values in
    // FP32 and works by `device_plans` (empty without such a codec).
    std::vector<HeadPlan> device_plans;
    std::vector<std::byte> host_recurrence, host_read, host_memory;
    std::vector<HeadHealth> host_health;
    size_t host_recurrence_stride = 0, host_read_stride = 0, host_memory_stride = 0;
    int records = 0;      // in the ring, committed and drafts
    int uncommitted = 0;  // newest of them
    // The ring is records `ring_first` .. ring_first + records - 1 of `ring_capacity`.
    Memory channels, scalars, corrections;
    int ring_first = 0, ring_capacity = 0;
    // The last conv_kernel - 1 committed inputs, then the drafts', from conv_first on.
    Memory conv;
    int conv_first = 0, conv_capacity = 0;
  };

  /// Packed heads on the host.
  struct PackedHeads {
    std::byte* recurrence;
    size_t recurrence_stride;
    std::byte* read;
    size_t read_stride;
    std::byte* memory;
    size_t memory_stride;
    HeadHealth* health;
  };
  static PackedHeads host_heads(Row& row);
  bool staged(const Row& row, int head) const;
  void encode(const Row& row, int head, const float* state, float amax, int64_t position,
              bool with_read, const PackedHeads& to) const;
  void show_device(Row& row, int head);
  void encode_staged(Row& row, size_t plan, int64_t position);
  void make_room(Row& row, int records, int tokens);
  void make_conv_room(Row& row, int tokens);
  RecordPointers end_of(Row& row) const;
  int taps() const { return shape_.conv_kernel - 1; }
  StateRow view(Row& row, int64_t position) const;
  static void note_corrections(Row& row, AdvanceMode mode);
  void hand_over(Row& row, int64_t position, bool keep_prompt);
  void hand_over_on_device(Row& row, int64_t position, bool keep_prompt);
  const StateCodec& codec(const Row& row, int head, StateRole role) const;

  Backend* backend_;
  Shape shape_;
  StatePrecision baseline_;
  std::vector<Row> rows_;
  int trace_tokens_ = 0;
  std::vector<float> trace_channels_, trace_scalars_;
};

/// Seconds that forward calls spent, by kind of work. `state` holds the replay with its encodings;
/// `other` everything else (norms, activations, routing, copies).
struct ForwardTimes {
  double products = 0;
  double attention = 0;
  double state = 0;
  double convolution = 0;
  double other = 0;
};

/// The state of all rows of a model.
class StateSet {
 public:
  /// The states of `rows` in the memory of the model's backend; the model must outlive them.
  StateSet(const Model& model, std::vector<RowSpec> rows, const StatePrecision& baseline,
           KernelForm form);
  ~StateSet();
  StateSet(StateSet&&) noexcept;
  StateSet& operator=(StateSet&&) noexcept;

  int rows() const { return static_cast<int>(rows_.size()); }
  const RowSpec& row(int r) const { return rows_[static_cast<size_t>(r)]; }
  KernelForm form() const { return form_; }
  /// Tokens committed so far = absolute position of the row's next token.
  int64_t position(int r) const { return positions_[static_cast<size_t>(r)]; }

  /// accepted[r] of row r's uncommitted tokens (of the last verify call) become final. Throws
  /// std::invalid_argument beyond their number.
  void commit(std::span<const int> accepted);
  /// Empties row r for another document or item.
  void reset(int r, const RowSpec& spec);

  /// True when a prompt computed in row a may be copied to row b: both store their prompt alike
  /// (StateStore::same_prompt) and keep the same type of ring.
  bool same_prompt(int a, int b) const;
  /// Makes row `to`, at position 0, a copy of row `from` at its position: from here on both give
  /// the bits that `to` would have computed itself with `dense: invariant`. Key-value pages are
  /// copied. Throws std::invalid_argument unless both rows are inside their prompts with nothing
  /// uncommitted, the position is below the end of `to`'s prompt, and same_prompt holds.
  void copy_prompt(int from, int to);

  /// All rows' state but the key-value caches, as bytes: packed checkpoints, rings, cursors,
  /// convolution inputs, counts, decay sums, positions. Throws std::invalid_argument with
  /// uncommitted tokens.
  std::vector<std::byte> save() const;
  /// Row r's keys and values of positions first .. end - 1, in the caches' type.
  std::vector<std::byte> save_cache(int r, int64_t first, int64_t end) const;
  /// Puts what `save` wrote into a set made with the same model and rows; then every piece of a
  /// row's caches is appended in order of position. Throws std::runtime_error when the bytes do not
  /// fit.
  void restore(std::span<const std::byte> bytes);
  void append_cache(int r, std::span<const std::byte> bytes);

  /// The state of a branch of a block (models/model.h), which has one.
  const StateStore& store(size_t block, size_t branch) const {
    return *slots_[block][branch].store;
  }
  const KvStore& cache(size_t block, size_t branch) const { return *slots_[block][branch].cache; }
  /// Recurrent layers in block order.
  std::vector<StateStore*> stores();
  std::vector<const StateStore*> stores() const;

  /// Bytes that one row holds at a context of `tokens`: checkpoints (recurrence and read) and
  /// key-value cache.
  size_t checkpoint_bytes(int r) const;
  size_t cache_bytes() const;
  /// Room in every row's caches for `tokens` positions.
  void reserve(int64_t tokens);

  /// Time of all forward calls so far.
  const ForwardTimes& times() const { return times_; }

  /// Sums over row 0's tokens of each head's decay 2^g, recurrent layers in block order:
  /// [layers][heads].
  std::vector<std::vector<double>> decay_sums() const;

 private:
  friend class Model;
  struct Slot {  // one stateful branch of one block
    std::unique_ptr<StateStore> store;
    std::unique_ptr<KvStore> cache;
    Memory decay_sum;  // double [heads], row 0
  };

  Backend* backend_;
  std::vector<RowSpec> rows_;
  StatePrecision baseline_;
  KernelForm form_;
  std::vector<int64_t> positions_;
  std::vector<int> uncommitted_;
  ForwardTimes times_;
  std::vector<std::vector<Slot>> slots_;  // [block][branch]
};

/// Packed bytes of both checkpoints of one layer of one row in this precision, without allocating
/// them.
size_t checkpoint_bytes(const StateStore::Shape& shape, const StatePrecision& precision,
                        const StatePrecision& baseline);

/// Shape of a mixer's recurrent state; nothing for mixers without one.
std::optional<StateStore::Shape> state_shape(const Mixer& mixer, int layer);

}  // namespace replayeval
