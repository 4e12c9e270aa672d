// Decoding on a device: one token of every row a step through the whole model, as CUDA graphs. The
// states, rings and key-value pages of all rows lie in arrays of the decoder; lengths, cursors and
// page tables are read on the device, so that every step is the same work.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/model.h"
#include "models/state_precision.h"
#include "models/state_store.h"

namespace replayeval {

struct DecoderOptions {
  std::vector<StatePrecision> states;
  StatePrecision baseline;
  int rows_per_state = 1;       // rows s * rows_per_state .. of state s
  int64_t most_positions = 0;   // of a row
  int64_t cache_positions = 0;  // of all rows together: room in the pages
  KernelForm form = KernelForm::fast;
};

/// Rows that decode. Arithmetic and bits are those of Model::forward with one token a row, all rows
/// in one product (`dense: invariant`: whatever the rows; `fast`: as the shape of the product
/// decides, sums over 4-bit checkpoints in whole numbers, DecodeStates::sums_freely, and with
/// `compute: bf16` attention on tensor cores, paged_attention_fast_cuda).
class Decoder {
 public:
  /// Why these rows cannot be decoded so (then Model::forward does it); nothing when they can.
  static std::optional<std::string> refusal(const Model& model, const DecoderOptions& options);

  /// Allocates the rows' memory and captures the steps. The model must outlive the object. Throws
  /// std::invalid_argument with the refusal, std::runtime_error for errors of the device (not
  /// enough memory).
  Decoder(const Model& model, DecoderOptions options);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  int rows() const;
  /// Sets a free row of a state aside, with pages for `positions`: its index, or -1 when no row or
  /// no room is free. Throws std::invalid_argument beyond most_positions.
  int reserve(int state, int64_t positions);
  /// A reserved row goes on from row `from_row` of `from`, which is past its prompt, has nothing
  /// uncommitted and the row's state precision. Throws std::invalid_argument for a row that is not
  /// reserved or decodes already, or a position beyond its reservation.
  void admit(int row, const StateSet& from, int from_row);
  /// Frees a reserved or decoding row.
  void release(int row);
  /// Absolute position of the row's next token; -1 unless it decodes.
  int64_t position(int row) const;

  struct Choice {
    int32_t token;  // -1 when every logit is NaN or -inf
    float margin;   // largest minus second largest logit
  };
  /// One token of every row that decodes: tokens[row]. Returns each row's greedy choice after
  /// it, [rows], valid until the next step. Throws std::invalid_argument for a token outside the
  /// vocabulary or a row that is full.
  std::span<const Choice> step(std::span<const int32_t> tokens);
  /// FP32 logits [vocabulary] of a row after the last step.
  void logits(int row, float* out) const;

  /// Bytes of the pages on the device.
  int64_t cache_bytes() const;
  /// Packed checkpoint bytes of one head of a recurrent layer (tests): recurrence or read.
  std::vector<std::byte> packed(int layer, int row, StateRole role) const;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace replayeval
