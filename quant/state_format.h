// State formats as data: an element, a scale rule of up to two levels, and what surrounds it. A
// FormatDescriptor is plain data that any device can interpret; a StateFormat adds what only the
// host needs (name, residual, static scales, library).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "quant/codec.h"
#include "quant/float_format.h"

namespace replayeval {

enum class ElementKind : uint8_t { fp32, floating, integer, values };
enum class BlockScale : uint8_t { none, floating, e8m0, fp32 };
/// What the outer FP32 scale covers. `fixed`: given a head in advance, not measured.
enum class Span : uint8_t { none, row, head, layer, fixed };
enum class Axis : uint8_t { none, state_dim, head_dim };
enum class ZeroPoint : uint8_t { none, midpoint, minimum };
enum class Choose : uint8_t { mae, mse };

/// FP32 order of operations for a block scale s below an outer scale g (outer_scale; 1 without
/// one). q is the divisor, m the largest scale value used, A the maximum of the span, a that of the
/// block, c a candidate:
///   vllm       s = round(c (g (a (1/q)))),  y = x min(1 / (s (1/g)), FLT_MAX), 0 if s = 0
///   te         s = round(c (a (g (1/q)))),  y = x min(1 / (s (1/g)), FLT_MAX)
///   four_six   s = round(c ((a / q) g)),    y as te
///   modelopt   G = A / (m q), s = round(c (a / (q G))), 1 if a = 0, y = x / (s G)
/// Decoded: (code s) (1/g), or (code s) G. The four agree but for a few ties and blocks whose scale
/// underflows.
enum class ScaleOrder : uint8_t { vllm, te, four_six, modelopt };

constexpr int kMaxCandidates = 8;

/// Everything encode and decode need, as plain data.
struct FormatDescriptor {
  ElementKind element = ElementKind::fp32;
  FloatFormat number;     // floating
  int lowest = 0;         // integer: codes are two's complement when lowest < 0
  int highest = 0;        // integer
  int code_bits = 32;     // bits of information of one element code
  int random_bits = 0;    // n of stochastic rounding
  bool saturate = true;   // false: overflow gives infinity (or NaN where the format has none)
  float element_max = 0;  // largest magnitude of an element
  float clip_low = 0;     // elements outside [clip_low, clip_high] count as clipped, or saturated
                          // without scales: the format's
  float clip_high = 0;    // range, widened by 2^-20 of element_max under a scale (rounding of y
                          // itself is no clipping)
  float divisor = 0;      // q: magnitude that a scale maps the maximum to

  BlockScale block_scale = BlockScale::none;
  FloatFormat scale_number;  // block_scale floating
  ScaleRounding scale_rounding = ScaleRounding::nearest;
  ScaleOrder order = ScaleOrder::vllm;
  float scale_max = 0;    // m: largest block scale under an outer scale
  int block_rows = 0;     // along head_dim; 0: the whole axis
  int block_columns = 0;  // along state_dim; 0: the whole axis
  Span span = Span::none;

  int candidate_count = 1;
  float candidates[kMaxCandidates] = {1.0f};
  Choose choose = Choose::mae;

  ZeroPoint zero_point = ZeroPoint::none;
  bool zero_point_fp32 = true;
  FloatFormat zero_point_number;  // when not FP32

  bool column_scale = false;  // c_n = max over rows of |S|, 1 if 0; the rest applies to S / c
  Axis hadamard = Axis::none;
  int hadamard_size = 0;  // 0: the whole axis

  ValueList list;  // values

  REPLAYEVAL_HD constexpr bool scaled() const {
    return block_scale != BlockScale::none || span != Span::none || column_scale;
  }
};

/// Scale of one head of one layer for Span::fixed: value = code * scale.
struct FixedScale {
  int layer = 0;
  int head = 0;
  float scale = 0;
};

class CodecLibrary;

/// One immutable format. `residual` (error feedback): the error of the last encoding is kept in
/// that format and added before the next.
struct StateFormat {
  std::string name;
  std::string place;  // file and line of the block's sides, for messages; empty for a built-in
  FormatDescriptor descriptor;
  bool default_divisor = true;           // finish_format derives descriptor.divisor from the rest
  std::vector<FixedScale> fixed_scales;  // sorted by (layer, head)
  std::shared_ptr<const StateFormat> residual;
  std::shared_ptr<const CodecLibrary> library;  // replaces the descriptor
};

struct StateShape;

/// A built-in format. Throws std::invalid_argument naming the known ones.
std::shared_ptr<const StateFormat> find_format(std::string_view name);

struct BuiltinFormat {
  std::string name;
  std::string description;
};

/// Names and one line of description of the built-in formats, in the order `replayeval list
/// formats` prints.
std::vector<BuiltinFormat> builtin_formats();

/// The format with another span of its FP32 scale. Throws std::invalid_argument when it has none or
/// the span does not go with the rest.
std::shared_ptr<const StateFormat> format_with_span(
    const std::shared_ptr<const StateFormat>& format, Span span);

/// The format with another rounding of its block scales. Throws std::invalid_argument when they are
/// not low-precision numbers.
std::shared_ptr<const StateFormat> format_with_scale_rounding(
    const std::shared_ptr<const StateFormat>& format, ScaleRounding rounding);

/// The format with overflow to infinity instead of saturation. Throws std::invalid_argument unless
/// it is an unscaled float with infinity.
std::shared_ptr<const StateFormat> format_with_overflow_to_infinity(
    const std::shared_ptr<const StateFormat>& format);

/// True where encode_head reads `span_amax`.
bool needs_layer_amax(const StateFormat& format);

/// Bits an element with all scales, zero points and residuals, for one head of the shape
/// (information, without padding).
double bits_per_element(const StateFormat& format, StateShape shape);

/// Canonical text of everything that decides the bits: equal formats have equal text whatever they
/// are called. A library is represented by the SHA-256 of its file.
std::string definition(const StateFormat& format);

/// SHA-256 of `definition`, hexadecimal.
std::string definition_hash(const StateFormat& format);

/// Throws std::invalid_argument, naming rule and values, when the format cannot hold a state of
/// this shape (a block does not divide its axis, an axis is no power of two for the Hadamard
/// transform).
void check_shape(const StateFormat& format, StateShape shape);

/// Throws std::invalid_argument when a fixed scale is missing for one of the heads of the layer.
void check_fixed_scales(const StateFormat& format, int layer, int first_head, int heads);

/// Begins a message about a key of a format file (element, scale, outer, divisor, candidates,
/// zero_point, transform, residual).
using PlaceOfKey = std::function<std::string(const char* key)>;

/// Fills in what follows from the rest (bits, maxima, default divisor, thresholds) and checks it.
/// Throws std::invalid_argument.
void finish_format(StateFormat* format, const PlaceOfKey& place);
void finish_format(StateFormat* format, const std::string& place);

/// Fills a value list and its thresholds; `place(i)` begins the message about value i. Throws
/// std::invalid_argument: empty, more than 256, not ascending, duplicate, not finite.
ValueList make_value_list(const std::vector<float>& values,
                          const std::function<std::string(size_t)>& place);

}  // namespace replayeval
