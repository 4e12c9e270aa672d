// A state precision: the formats of the recurrence and read checkpoints and how their ring is kept,
// as spelled in an experiment (`fp16+sr/nvfp4@L=8;layers=0-5`, DESIGN.md section 1, Spelling).
// Parsing, canonical name, identity.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/state_row.h"
#include "quant/quantize.h"
#include "quant/state_format.h"

namespace replayeval {

/// Type that x, B, k and v of a ring record are kept in: as the convolution leaves them, or widened
/// to FP32.
enum class RingType : uint8_t { activation, fp32 };

/// Checkpoint indices of layers or heads: everything, or a union of inclusive ranges ("0-5,7").
struct IndexSelection {
  std::vector<std::pair<int, int>> ranges;  // ascending, disjoint, not adjacent; none: everything

  bool all() const { return ranges.empty(); }
  bool contains(int index) const;
  /// Largest index named; -1 when everything is selected.
  int last() const { return ranges.empty() ? -1 : ranges.back().second; }
  std::string text() const;
  bool operator==(const IndexSelection&) const = default;
};

/// Reads "7", "0-5", "0-5,7"; "all" selects everything. Throws std::invalid_argument.
IndexSelection parse_index_selection(std::string_view text);

/// What a state precision takes from the experiment unless its spelling says otherwise.
struct StateOptions {
  int window = 16;  // L, 1 to kMaxWindow
  GdnFold gdn_fold = GdnFold::rederive;
  FlushOutput flush_output = FlushOutput::recurrence;
  RingType ring = RingType::activation;
  RecordType ring_u = RecordType::fp32;
  RecordType beta = RecordType::fp32;
  DotType dot = DotType::fp32;
  uint64_t seed = 0;
  bool operator==(const StateOptions&) const = default;
};

/// Formats that an experiment names (`formats: {mine: formats/mine.yaml}`), beside the built-in
/// ones.
using NamedFormats = std::map<std::string, std::shared_ptr<const StateFormat>, std::less<>>;

struct StatePrecision {
  std::string name;  // canonical spelling: options in a fixed order, those equal to the
                     // experiment's left out
  StateCodec recurrence;
  std::optional<StateCodec> read;  // none: one shared checkpoint
  StateOptions options;
  // Given in the spelling; the formats of the codecs already have them.
  std::optional<Span> span;
  std::optional<ScaleRounding> scale_rounding;
  bool overflow_to_infinity = false;
  bool seed_in_name = false;
  IndexSelection layers, heads;  // outside of them `outside` holds, or the baseline
  std::shared_ptr<const StatePrecision> outside;  // `else=`: same options, no selection

  bool stochastic() const;
  bool whole_model() const { return layers.all() && heads.all(); }
};

/// Reads one spelling. Formats are looked up in `formats`, then among the built-in ones. Throws
/// std::invalid_argument with a message that starts with the spelling; the caller puts the place
/// before it.
StatePrecision parse_state_precision(std::string_view text, const StateOptions& defaults,
                                     const NamedFormats& formats = {});

/// The same precision drawing its random bits from `seed`, which its name then carries (`@seed=`).
StatePrecision with_seed(const StatePrecision& precision, uint64_t seed,
                         const StateOptions& defaults);

/// The same precision on these layers and heads only.
StatePrecision with_selection(const StatePrecision& precision, const IndexSelection& layers,
                              const IndexSelection& heads, const StateOptions& defaults);

/// Name of a codec as spelled: the format's name, "+sr" when stochastic.
std::string codec_name(const StateCodec& codec);

/// The plan of the heads inside the selection.
HeadPlan head_plan(const StatePrecision& precision);

/// Every setting that a result depends on, one `key: value` a line, the formats' whole definitions
/// included. With a selection, the definition of `baseline` follows, since it holds outside.
std::string state_definition(const StatePrecision& precision, const StatePrecision& baseline);

/// SHA-256 of state_definition, in hexadecimal: two states are the same exactly when these are
/// equal.
std::string state_identity(const StatePrecision& precision, const StatePrecision& baseline);

/// Spellings of the option values, shared with the experiment keys. Throw std::invalid_argument
/// naming the known ones.
GdnFold parse_gdn_fold(std::string_view text);
FlushOutput parse_flush_output(std::string_view text);
RingType parse_ring_type(std::string_view text);
RecordType parse_record_type(std::string_view text);
DotType parse_dot_type(std::string_view text);
std::string_view name_of(GdnFold value);
std::string_view name_of(FlushOutput value);
std::string_view name_of(RingType value);
std::string_view name_of(RecordType value);
std::string_view name_of(DotType value);

}  // namespace replayeval
