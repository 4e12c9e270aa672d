#include "quant/state_format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>

#include "base/hash.h"
#include "quant/codec_library.h"
#include "quant/packed_layout.h"
#include "quant/quantize.h"

namespace replayeval {
namespace {

using FormatPointer = std::shared_ptr<const StateFormat>;

struct Builtin {
  const char* name;
  const char* description;
  FormatDescriptor (*descriptor)();
};

FormatDescriptor float_element(const FloatFormat& number) {
  FormatDescriptor d;
  d.element = ElementKind::floating;
  d.number = number;
  return d;
}

FormatDescriptor integer_element(int highest) {
  FormatDescriptor d;
  d.element = ElementKind::integer;
  d.lowest = -highest;
  d.highest = highest;
  return d;
}

FormatDescriptor with_span(FormatDescriptor d, Span span) {
  d.span = span;
  return d;
}

FormatDescriptor nvfp4(ScaleOrder order) {
  FormatDescriptor d = float_element(kE2m1);
  d.block_scale = BlockScale::floating;
  d.scale_number = kE4m3;
  d.block_rows = 1;
  d.block_columns = 16;
  d.span = Span::head;
  d.order = order;
  return d;
}

FormatDescriptor four_over_six(float scale_max, Choose choose) {
  FormatDescriptor d = nvfp4(ScaleOrder::four_six);
  d.scale_max = scale_max;
  d.candidate_count = 2;
  d.candidates[1] = 1.5f;
  d.choose = choose;
  return d;
}

FormatDescriptor mx(const FloatFormat& number) {
  FormatDescriptor d = float_element(number);
  d.block_scale = BlockScale::e8m0;
  d.scale_rounding = ScaleRounding::down;
  d.block_rows = 1;
  d.block_columns = 32;
  return d;
}

FormatDescriptor decoupled(FormatDescriptor d) {
  d.column_scale = true;
  return d;
}

const Builtin kBuiltins[] = {
    {"fp32", "IEEE binary32: the reference", [] { return FormatDescriptor{}; }},
    {"bf16", "bfloat16", [] { return float_element(kBf16); }},
    {"fp16", "IEEE binary16, saturating", [] { return float_element(kFp16); }},
    {"fp8", "E4M3 with one FP32 scale a row",
     [] { return with_span(float_element(kE4m3), Span::row); }},
    {"fp8_e4m3", "E4M3 without scale", [] { return float_element(kE4m3); }},
    {"fp8_e5m2", "E5M2 without scale", [] { return float_element(kE5m2); }},
    {"fp8_decoupled", "E4M3 with FP32 scales a column and a row",
     [] { return decoupled(with_span(float_element(kE4m3), Span::row)); }},
    {"nvfp4", "E2M1, blocks of 16 with E4M3 scales, FP32 scale a head; FP32 order of vLLM",
     [] { return nvfp4(ScaleOrder::vllm); }},
    {"nvfp4_te", "NVFP4 in the FP32 order of TransformerEngine",
     [] { return nvfp4(ScaleOrder::te); }},
    {"nvfp4_modelopt", "NVFP4 in the FP32 order of ModelOpt (division, scale 1 for zero blocks)",
     [] { return nvfp4(ScaleOrder::modelopt); }},
    {"4over6", "NVFP4 that maps a block's maximum to 6 or 4, whichever errs less (MAE)",
     [] { return four_over_six(448, Choose::mae); }},
    {"4over6_448_mae", "the same as 4over6", [] { return four_over_six(448, Choose::mae); }},
    {"4over6_448_mse", "4over6 chosen by squared error",
     [] { return four_over_six(448, Choose::mse); }},
    {"4over6_256_mae", "4over6 with the largest block scale at 256",
     [] { return four_over_six(256, Choose::mae); }},
    {"4over6_256_mse", "4over6 with the largest block scale at 256, chosen by squared error",
     [] { return four_over_six(256, Choose::mse); }},
    {"mxfp4", "E2M1, blocks of 32 with power-of-two scales (OCP MX)", [] { return mx(kE2m1); }},
    {"mxfp8", "E4M3, blocks of 32 with power-of-two scales (OCP MX)", [] { return mx(kE4m3); }},
    {"mxfp8_e5m2", "E5M2, blocks of 32 with power-of-two scales (OCP MX)",
     [] { return mx(kE5m2); }},
    {"int8", "8-bit integers to +-127 with one FP32 scale a row",
     [] { return with_span(integer_element(127), Span::row); }},
    {"int16", "16-bit integers to +-32767 with one FP32 scale a row",
     [] { return with_span(integer_element(32767), Span::row); }},
    {"int8_decoupled", "8-bit integers with FP32 scales a column and a row",
     [] { return decoupled(with_span(integer_element(127), Span::row)); }},
};

std::string number_text(float x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(x));
  return text;
}

[[noreturn]] void refuse(const std::string& place, const std::string& message) {
  throw std::invalid_argument(place + ": " + message);
}

int bits_for(int count) {
  int bits = 0;
  while ((1 << bits) < count) ++bits;
  return bits > 0 ? bits : 1;
}

int integer_bits(int lowest, int highest) {
  int bits = 1;
  if (lowest < 0) {
    while (-(1 << (bits - 1)) > lowest || (1 << (bits - 1)) - 1 < highest) ++bits;
  } else {
    while ((1 << bits) - 1 < highest) ++bits;
  }
  return bits;
}

void finish_element(FormatDescriptor* d, const PlaceOfKey& place) {
  switch (d->element) {
    case ElementKind::fp32:
      d->code_bits = 32;
      d->random_bits = 0;
      d->element_max = kFloatMax;
      d->clip_low = -std::numeric_limits<float>::infinity();
      d->clip_high = std::numeric_limits<float>::infinity();
      if (d->scaled() || d->hadamard != Axis::none)
        refuse(place("element"), "fp32 elements take no scale and no transform");
      return;
    case ElementKind::floating:
      d->code_bits = d->number.bits();
      if (d->random_bits == 0) d->random_bits = d->number.random_bits;
      if (d->random_bits < 1 || d->random_bits > 24) {
        refuse(place("element"),
               "random_bits is " + std::to_string(d->random_bits) + ", expected 1 to 24");
      }
      d->clip_high = decode_float(d->number, d->number.max_code);
      d->clip_low = d->number.has_sign ? -d->clip_high : 0.0f;
      break;
    case ElementKind::integer:
      if (d->lowest > d->highest || d->lowest < -32768 || d->highest > 65535 ||
          (d->lowest < 0 && d->highest > 32767) || (d->lowest == 0 && d->highest == 0)) {
        refuse(place("element"), "integers from " + std::to_string(d->lowest) + " to " +
                                     std::to_string(d->highest) +
                                     " do not fit 16 bits or are empty");
      }
      d->code_bits = integer_bits(d->lowest, d->highest);
      d->random_bits = 24;
      d->clip_low = static_cast<float>(d->lowest);
      d->clip_high = static_cast<float>(d->highest);
      break;
    case ElementKind::values:
      d->code_bits = bits_for(d->list.count);
      d->random_bits = kValueRandomBits;
      d->clip_low = d->list.values[0];
      d->clip_high = d->list.values[d->list.count - 1];
      break;
  }
  d->element_max = larger(magnitude(d->clip_low), magnitude(d->clip_high));
  if (!(d->element_max > 0)) refuse(place("element"), "the element has no value but zero");
}

/// 2^floor(log2 x).
float power_below(float x) { return bits_float(float_bits(x) & 0x7F800000u); }

void finish_scales(FormatDescriptor* d, bool default_divisor, const PlaceOfKey& place) {
  bool blocks = d->block_scale != BlockScale::none;
  bool measured = blocks || (d->span != Span::none && d->span != Span::fixed);
  if (blocks && (d->block_rows < 0 || d->block_columns < 0))
    refuse(place("scale"), "a block has a negative side");
  if (!default_divisor && !measured) refuse(place("divisor"), "divisor needs a measured scale");
  if (default_divisor) {
    bool floor_scale =
        d->block_scale == BlockScale::e8m0 && d->scale_rounding == ScaleRounding::down;
    d->divisor = floor_scale ? power_below(d->element_max) : d->element_max;
  }
  if (!(d->divisor > 0) || !(d->divisor <= kFloatMax))
    refuse(place("divisor"), "divisor is not a positive finite number");
  if (d->block_scale == BlockScale::floating) {
    float largest = decode_float(d->scale_number, d->scale_number.max_code);
    if (d->scale_max == 0) d->scale_max = largest;
    if (!(d->scale_max > 0) || d->scale_max > largest) {
      refuse(place("scale"), "scale maximum " + number_text(d->scale_max) +
                                 " is beyond the largest value " + number_text(largest) +
                                 " of the block scale");
    }
  } else {
    d->scale_max = d->scale_max == 0 ? 1.0f : d->scale_max;
    d->order = ScaleOrder::vllm;
  }
  if (d->span != Span::none && !(d->scale_max * d->divisor <= kFloatMax))
    refuse(place("divisor"), "divisor times the largest block scale overflows FP32");
  if (d->block_scale == BlockScale::fp32 && d->span != Span::none) {
    refuse(place("outer"), "an FP32 block scale under an outer FP32 scale; drop one of them");
  }
  if (d->block_scale == BlockScale::fp32 || !blocks) d->scale_rounding = ScaleRounding::nearest;
  if (blocks && d->span == Span::row && d->block_rows != 1) {
    refuse(place("outer"),
           "an outer scale a row needs blocks of one row, got " +
               (d->block_rows == 0 ? std::string("all") : std::to_string(d->block_rows)));
  }
  if (!blocks) {
    d->block_rows = 0;
    d->block_columns = 0;
  }
  if (d->candidate_count < 1 || d->candidate_count > kMaxCandidates) {
    refuse(place("candidates"), std::to_string(d->candidate_count) + " candidates, expected 1 to " +
                                    std::to_string(kMaxCandidates));
  }
  if (d->candidate_count == 1) d->choose = Choose::mae;
  for (int k = 0; k < d->candidate_count; ++k) {
    if (!(d->candidates[k] > 0) || !(d->candidates[k] <= 1024)) {
      refuse(place("candidates"),
             "candidate " + number_text(d->candidates[k]) + " is not in (0, 1024]");
    }
  }
  bool plain_candidate = d->candidate_count == 1 && d->candidates[0] == 1.0f;
  if (!plain_candidate && !blocks) refuse(place("candidates"), "candidates need a block scale");
  if (d->zero_point != ZeroPoint::none && !blocks) {
    refuse(place("zero_point"), "a zero point needs a block scale (a block may be a whole row)");
  }
  if (d->zero_point == ZeroPoint::none) {
    d->zero_point_fp32 = true;
    d->zero_point_number = FloatFormat{};
  }
  if (d->span == Span::layer &&
      (d->zero_point != ZeroPoint::none || d->column_scale || d->hadamard != Axis::none)) {
    refuse(place("outer"),
           "span layer does not go with a zero point, a column scale or a transform: its maximum "
           "is taken from the "
           "untransformed states of all heads");
  }
  if (!d->saturate && d->scaled())
    refuse(place("element"), "overflow to infinity needs an unscaled format");
  if (d->scaled()) {
    float margin = d->element_max * 0x1p-20f;
    d->clip_low -= margin;
    d->clip_high += margin;
  }
}

FormatPointer make_builtin(const Builtin& builtin) {
  auto format = std::make_shared<StateFormat>();
  format->name = builtin.name;
  format->descriptor = builtin.descriptor();
  finish_format(format.get(), builtin.name);
  return format;
}

/// A changed copy, checked again.
FormatPointer changed(const StateFormat& format, const char* what,
                      void (*change)(FormatDescriptor*, int), int value) {
  auto copy = std::make_shared<StateFormat>(format);
  change(&copy->descriptor, value);
  finish_format(copy.get(), format.name + "@" + what);
  return copy;
}

std::string float_text(const FloatFormat& f) {
  auto code = [](uint32_t c) { return c == kNoCode ? std::string("none") : std::to_string(c); };
  return "exponent " + std::to_string(f.exponent_bits) + " mantissa " +
         std::to_string(f.mantissa_bits) + " bias " + std::to_string(f.bias) + " max " +
         code(f.max_code) + " inf " + code(f.inf_code) + " nan " + code(f.nan_code) +
         (f.has_sign ? " signed" : " unsigned");
}

std::string hex_text(float x) {
  char text[16];
  std::snprintf(text, sizeof(text), "%08x", float_bits(x));
  return text;
}

std::string span_text(Span span) {
  switch (span) {
    case Span::none:
      return "none";
    case Span::row:
      return "row";
    case Span::head:
      return "head";
    case Span::layer:
      return "layer";
    case Span::fixed:
      return "fixed";
  }
  return "";
}

std::string side_text(int side) { return side == 0 ? "all" : std::to_string(side); }

}  // namespace

ValueList make_value_list(const std::vector<float>& values,
                          const std::function<std::string(size_t)>& place) {
  if (values.empty()) refuse(place(0), "the list of values is empty");
  if (values.size() > kMaxValues) {
    refuse(place(kMaxValues), "the list has " + std::to_string(values.size()) +
                                  " values, at most " + std::to_string(kMaxValues) +
                                  " are possible");
  }
  ValueList list;
  list.count = static_cast<int>(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    std::string position = "value " + std::to_string(i + 1) + " of the list";
    if (!std::isfinite(values[i]) || magnitude(values[i]) > kFloatMax / 4) {
      refuse(place(i), position + " is " + number_text(values[i]) +
                           "; values must be finite, of magnitude below 8.5e37");
    }
    if (i > 0 && values[i] == values[i - 1])
      refuse(place(i), position + " repeats " + number_text(values[i]));
    if (i > 0 && values[i] < values[i - 1]) {
      refuse(place(i), position + " is " + number_text(values[i]) + " after " +
                           number_text(values[i - 1]) + "; values must ascend");
    }
    list.values[i] = values[i];
  }
  for (int i = list.count; i < kMaxValues; ++i) list.values[i] = list.values[list.count - 1];
  for (int i = 0; i + 1 < list.count; ++i) {
    // The midpoint, exactly: `sum` plus `error` is a + b (Knuth's two-sum in FP64), and halving is
    // exact.
    double a = list.values[i], b = list.values[i + 1];
    double sum = a + b;
    double part = sum - a;
    double error = (a - (sum - part)) + (b - part);
    double middle = sum / 2;
    float threshold = static_cast<float>(middle);
    auto below_middle = [&](float x) {
      double wide = x;
      return wide < middle || (wide == middle && error > 0);
    };
    // The smallest FP32 number that is not below the midpoint; the tie itself belongs to the even
    // code.
    const float infinity = std::numeric_limits<float>::infinity();
    while (below_middle(threshold)) threshold = std::nextafter(threshold, infinity);
    while (!below_middle(std::nextafter(threshold, -infinity)))
      threshold = std::nextafter(threshold, -infinity);
    bool tie = static_cast<double>(threshold) == middle && error == 0;
    if (tie && i % 2 == 0) threshold = std::nextafter(threshold, infinity);
    list.thresholds[i] = threshold;
  }
  for (int i = list.count - 1; i < kMaxValues; ++i)
    list.thresholds[i] = std::numeric_limits<float>::infinity();
  list.zero_code = static_cast<uint32_t>(count_not_above(list.thresholds, list.count - 1, 0.0f));
  return list;
}

void finish_format(StateFormat* format, const PlaceOfKey& place) {
  if (format->library) return;
  FormatDescriptor* d = &format->descriptor;
  finish_element(d, place);
  if (d->element != ElementKind::fp32) finish_scales(d, format->default_divisor, place);
  if (d->hadamard_size < 0 || (d->hadamard_size & (d->hadamard_size - 1)) != 0 ||
      d->hadamard_size == 1) {
    refuse(place("transform"),
           "the Hadamard transform needs a power of two, got " + std::to_string(d->hadamard_size));
  }
  if (format->residual) {
    const StateFormat& r = *format->residual;
    if (r.residual || r.library || r.descriptor.span == Span::fixed ||
        r.descriptor.span == Span::layer) {
      refuse(
          place("residual"),
          "the residual format '" + r.name +
              "' may not have a residual, a library, fixed scales or a scale a layer of its own");
    }
    if (d->span == Span::layer)
      refuse(place("residual"),
             "span layer does not go with a residual: its maximum is taken before the residual is "
             "added");
  }
}

void finish_format(StateFormat* format, const std::string& place) {
  finish_format(format, [&](const char*) { return place; });
}

FormatPointer find_format(std::string_view name) {
  static std::mutex mutex;
  static std::map<std::string, FormatPointer, std::less<>> made;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto found = made.find(name); found != made.end()) return found->second;
  for (const Builtin& b : kBuiltins) {
    if (name == b.name) return made[std::string(name)] = make_builtin(b);
  }
  std::string known;
  for (const Builtin& b : kBuiltins) known += std::string(" ") + b.name;
  throw std::invalid_argument("unknown format '" + std::string(name) + "'; known:" + known);
}

std::vector<BuiltinFormat> builtin_formats() {
  std::vector<BuiltinFormat> list;
  for (const Builtin& b : kBuiltins) list.push_back({b.name, b.description});
  return list;
}

FormatPointer format_with_span(const FormatPointer& format, Span span) {
  if (format->library || format->descriptor.span == Span::none ||
      format->descriptor.span == Span::fixed || span == Span::none || span == Span::fixed) {
    throw std::invalid_argument(
        "span=" + span_text(span) + ": format '" + format->name +
        "' has no measured outer FP32 scale; " +
        "known for fp8, int8, int16, nvfp4 and 4over6, and for files with `outer:`");
  }
  return changed(
      *format, "span", [](FormatDescriptor* d, int value) { d->span = static_cast<Span>(value); },
      static_cast<int>(span));
}

FormatPointer format_with_scale_rounding(const FormatPointer& format, ScaleRounding rounding) {
  BlockScale scale = format->descriptor.block_scale;
  if (format->library || scale == BlockScale::none || scale == BlockScale::fp32) {
    throw std::invalid_argument(
        "scale_rounding: format '" + format->name +
        "' has no low-precision block scale; known for nvfp4, 4over6, mxfp4, mxfp8");
  }
  return changed(
      *format, "scale_rounding",
      [](FormatDescriptor* d, int value) { d->scale_rounding = static_cast<ScaleRounding>(value); },
      static_cast<int>(rounding));
}

FormatPointer format_with_overflow_to_infinity(const FormatPointer& format) {
  const FormatDescriptor& d = format->descriptor;
  if (format->library || d.element != ElementKind::floating || d.scaled() ||
      d.number.inf_code == kNoCode) {
    throw std::invalid_argument(
        "overflow=inf: format '" + format->name +
        "' is not an unscaled float with infinity; known for fp16, bf16, fp8_e5m2");
  }
  return changed(
      *format, "overflow",
      [](FormatDescriptor* changed_descriptor, int) { changed_descriptor->saturate = false; }, 0);
}

bool needs_layer_amax(const StateFormat& format) {
  return !format.library && format.descriptor.span == Span::layer;
}

double bits_per_element(const StateFormat& format, StateShape shape) {
  check_shape(format, shape);
  if (format.library)
    return format.library->codec().bits_per_element({shape.head_dim, shape.state_dim});
  const FormatDescriptor& d = format.descriptor;
  PackedLayout l = packed_layout(d, shape.head_dim, shape.state_dim);
  double n = static_cast<double>(shape.elements());
  double blocks = static_cast<double>(l.blocks_down) * l.blocks_across;
  double scale_bits = d.block_scale == BlockScale::fp32   ? 32
                      : d.block_scale == BlockScale::e8m0 ? 8
                                                          : d.scale_number.bits();
  // The sign bit of a scale is stored, as the published layouts do.
  double zero_bits = d.zero_point == ZeroPoint::none ? 0
                     : d.zero_point_fp32             ? 32
                                                     : d.zero_point_number.bits();
  double bits = d.code_bits + blocks / n * (scale_bits + zero_bits) + 32.0 * l.outer_count / n;
  if (d.column_scale) bits += 32.0 * shape.state_dim / n;
  if (format.residual) bits += bits_per_element(*format.residual, shape);
  return bits;
}

std::string definition(const StateFormat& format) {
  if (format.library) return "library " + format.library->sha256() + "\n";
  const FormatDescriptor& d = format.descriptor;
  std::string text;
  auto line = [&](const std::string& s) { text += s + "\n"; };
  switch (d.element) {
    case ElementKind::fp32:
      line("element fp32");
      break;
    case ElementKind::floating:
      line("element float " + float_text(d.number) + " random " + std::to_string(d.random_bits) +
           (d.saturate ? " saturate" : " overflow"));
      break;
    case ElementKind::integer:
      line("element integer " + std::to_string(d.lowest) + " " + std::to_string(d.highest));
      break;
    case ElementKind::values: {
      std::string values = "element values";
      for (int i = 0; i < d.list.count; ++i) values += " " + hex_text(d.list.values[i]);
      line(values);
      break;
    }
  }
  if (d.block_scale != BlockScale::none) {
    line("block rows " + side_text(d.block_rows) + " columns " + side_text(d.block_columns));
    std::string scale = d.block_scale == BlockScale::fp32   ? "fp32"
                        : d.block_scale == BlockScale::e8m0 ? "e8m0"
                                                            : "float " + float_text(d.scale_number);
    const char* rounding[] = {"nearest", "up", "down"};
    line("scale " + scale + " rounding " + rounding[static_cast<int>(d.scale_rounding)]);
    if (d.block_scale == BlockScale::floating) {
      const char* order[] = {"vllm", "te", "four_six", "modelopt"};
      line(std::string("order ") + order[static_cast<int>(d.order)] + " maximum " +
           hex_text(d.scale_max));
    }
    if (d.candidate_count > 1 || d.candidates[0] != 1.0f) {
      std::string candidates = d.choose == Choose::mse ? "candidates mse" : "candidates mae";
      for (int k = 0; k < d.candidate_count; ++k) candidates += " " + hex_text(d.candidates[k]);
      line(candidates);
    }
  }
  if (d.span != Span::none) line("outer fp32 span " + span_text(d.span));
  if (d.block_scale != BlockScale::none || (d.span != Span::none && d.span != Span::fixed))
    line("divisor " + hex_text(d.divisor));
  for (const FixedScale& s : format.fixed_scales) {
    line("fixed " + std::to_string(s.layer) + " " + std::to_string(s.head) + " " +
         hex_text(s.scale));
  }
  if (d.zero_point != ZeroPoint::none) {
    line(std::string("zero_point ") +
         (d.zero_point == ZeroPoint::midpoint ? "midpoint " : "minimum ") +
         (d.zero_point_fp32 ? "fp32" : float_text(d.zero_point_number)));
  }
  if (d.column_scale) line("column_scale fp32");
  if (d.hadamard != Axis::none) {
    line(std::string("hadamard ") + (d.hadamard == Axis::state_dim ? "state_dim " : "head_dim ") +
         side_text(d.hadamard_size));
  }
  if (format.residual) {
    std::string inner = definition(*format.residual);
    size_t start = 0;
    while (start < inner.size()) {
      size_t end = inner.find('\n', start);
      line("residual " + inner.substr(start, end - start));
      start = end + 1;
    }
  }
  return text;
}

std::string definition_hash(const StateFormat& format) { return sha256_hex(definition(format)); }

void check_shape(const StateFormat& format, StateShape shape) {
  std::string where = (format.place.empty() ? "" : format.place + ": ") + format.name +
                      ": state [" + std::to_string(shape.head_dim) + ", " +
                      std::to_string(shape.state_dim) + "]";
  if (shape.head_dim < 1 || shape.state_dim < 1)
    throw std::invalid_argument(where + ": both sides must be positive");
  if (format.library) {
    auto check = format.library->codec().check_shape;
    const char* reason = check ? check({shape.head_dim, shape.state_dim}) : nullptr;
    if (reason != nullptr) throw std::invalid_argument(where + ": " + reason);
    return;
  }
  const FormatDescriptor& d = format.descriptor;
  if (d.block_rows > 0 && shape.head_dim % d.block_rows != 0) {
    throw std::invalid_argument(where + ": a block of " + std::to_string(d.block_rows) +
                                " rows does not divide head_dim " + std::to_string(shape.head_dim));
  }
  if (d.block_columns > 0 && shape.state_dim % d.block_columns != 0) {
    throw std::invalid_argument(where + ": a block of " + std::to_string(d.block_columns) +
                                " columns does not divide state_dim " +
                                std::to_string(shape.state_dim));
  }
  if (d.hadamard != Axis::none) {
    int axis = d.hadamard == Axis::state_dim ? shape.state_dim : shape.head_dim;
    int size = d.hadamard_size > 0 ? d.hadamard_size : axis;
    if ((size & (size - 1)) != 0 || axis % size != 0) {
      throw std::invalid_argument(where + ": the Hadamard transform of " + std::to_string(size) +
                                  " does not fit the axis of " + std::to_string(axis) +
                                  "; its size must be a power of two that divides the axis");
    }
  }
  if (format.residual) check_shape(*format.residual, shape);
}

void check_fixed_scales(const StateFormat& format, int layer, int first_head, int heads) {
  if (format.library || format.descriptor.span != Span::fixed) return;
  for (int head = first_head; head < first_head + heads; ++head) {
    bool found =
        std::any_of(format.fixed_scales.begin(), format.fixed_scales.end(),
                    [&](const FixedScale& s) { return s.layer == layer && s.head == head; });
    if (!found) {
      throw std::invalid_argument(format.name + ": no scale for layer " + std::to_string(layer) +
                                  ", head " + std::to_string(head) +
                                  "; the file of scales needs one line for each");
    }
  }
}

}  // namespace replayeval
