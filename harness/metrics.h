// Figures of each position: KL against the reference row, negative log-likelihood of the next
// token, top-1 agreement (DESIGN.md section 3, Metrics).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "models/model.h"

namespace replayeval {

/// A figure that runs log, for `replayeval list metrics`.
struct MetricInfo {
  std::string_view name;
  std::string_view unit;
  std::string_view meaning;
};
std::span<const MetricInfo> metric_infos();

/// Figures of one state over consecutive positions. kl_nats is NaN where either row's logits are
/// not finite; nll_nats is NaN where there is no next token; top1: 1 both argmax equal (lowest id
/// on ties), 0 not, 255 no value.
struct PositionFigures {
  std::vector<float> kl_nats;
  std::vector<float> nll_nats;
  std::vector<uint8_t> top1;

  void append(const PositionFigures& other);
};

/// Logits that `measure` holds at a time.
constexpr int64_t kLogitSliceBytes = int64_t{64} << 20;

/// Seconds of one call of `measure`; on a device all of it counts as metrics.
struct MeasureTimes {
  double head = 0;     // LM head
  double metrics = 0;  // summaries and KL
};

/// Compares all rows of a chunk with row 0. `hidden` holds `rows` rows of `tokens` positions each,
/// concatenated; targets[t] is the token after position t of the chunk, -1 for none. Logits are
/// formed in slices of at most `slice_bytes` (all rows of a few positions at a time), so memory
/// does not grow with context times vocabulary. Row 0 against itself gives 0 and 1.
std::vector<PositionFigures> measure(const Model& model, const Hidden& hidden, int rows, int tokens,
                                     std::span<const int32_t> targets,
                                     int64_t slice_bytes = kLogitSliceBytes,
                                     MeasureTimes* times = nullptr);

}  // namespace replayeval
