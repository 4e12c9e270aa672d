// Formats that reach every branch of the codec, and states that are awkward for it.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "quant/quantize.h"
#include "quant/state_format.h"

namespace replayeval::test {

inline std::shared_ptr<StateFormat> variant(const std::string& name,
                                            const FormatDescriptor& descriptor) {
  auto format = std::make_shared<StateFormat>();
  format->name = name;
  format->descriptor = descriptor;
  finish_format(format.get(), name);
  return format;
}

/// The built-in formats and variants that reach every branch.
inline std::vector<std::shared_ptr<const StateFormat>> all_formats() {
  std::vector<std::shared_ptr<const StateFormat>> list;
  for (const BuiltinFormat& b : builtin_formats()) list.push_back(find_format(b.name));
  auto fp8 = find_format("fp8"), nvfp4 = find_format("nvfp4");
  list.push_back(format_with_span(fp8, Span::head));
  list.push_back(format_with_span(fp8, Span::layer));
  list.push_back(format_with_span(nvfp4, Span::row));
  list.push_back(format_with_span(nvfp4, Span::layer));
  list.push_back(format_with_scale_rounding(nvfp4, ScaleRounding::up));
  list.push_back(format_with_scale_rounding(nvfp4, ScaleRounding::down));
  list.push_back(format_with_scale_rounding(find_format("mxfp8"), ScaleRounding::up));
  list.push_back(format_with_scale_rounding(find_format("mxfp4"), ScaleRounding::nearest));
  list.push_back(format_with_span(find_format("4over6"), Span::row));
  list.push_back(format_with_overflow_to_infinity(find_format("fp16")));
  list.push_back(format_with_overflow_to_infinity(find_format("fp8_e5m2")));
  for (const NamedFloatFormat& f : kFloatFormats) {
    FormatDescriptor d;
    d.element = ElementKind::floating;
    d.number = f.format;
    list.push_back(variant(f.name, d));
    d.random_bits = 24;
    if (f.format.mantissa_bits <= 6) list.push_back(variant(std::string(f.name) + " 24 bits", d));
    d = nvfp4->descriptor;
    d.scale_number = f.format;
    d.scale_max = 0;
    d.span = Span::none;
    if (f.format.exponent_bits < 8) list.push_back(variant(std::string("scale ") + f.name, d));
  }
  std::mt19937 random(5);
  for (int count : {2, 3, 16, 17, 31, 33, 64, 200, 256}) {
    std::vector<float> values;
    std::normal_distribution<float> normal;
    while (static_cast<int>(values.size()) < count) values.push_back(normal(random));
    std::sort(values.begin(), values.end());
    FormatDescriptor d;
    d.element = ElementKind::values;
    d.list = make_value_list(values, [](size_t) { return std::string("test"); });
    list.push_back(variant("values " + std::to_string(count), d));
    d.span = Span::row;
    list.push_back(variant("row values " + std::to_string(count), d));
    d.span = Span::head;
    d.block_scale = BlockScale::floating;
    d.scale_number = kFp16;
    d.block_rows = 1;
    d.block_columns = 32;
    d.candidate_count = 3;
    d.candidates[1] = 0.75f;
    d.candidates[2] = 1.25f;
    d.choose = Choose::mse;
    d.scale_max = 100;
    list.push_back(variant("block values " + std::to_string(count), d));
  }
  for (auto [rows, columns] :
       {std::pair{4, 1}, std::pair{2, 8}, std::pair{4, 0}, std::pair{0, 4}, std::pair{1, 0}}) {
    for (BlockScale scale : {BlockScale::fp32, BlockScale::e8m0, BlockScale::floating}) {
      FormatDescriptor d;
      d.element = ElementKind::integer;
      d.lowest = -7;
      d.highest = 7;
      d.block_scale = scale;
      d.scale_number = kBf16;
      d.block_rows = rows;
      d.block_columns = columns;
      if (scale == BlockScale::e8m0) d.scale_rounding = ScaleRounding::down;
      std::string name = "int4 " + std::to_string(rows) + "x" + std::to_string(columns);
      list.push_back(variant(name, d));
      d.candidate_count = 2;
      d.candidates[1] = 0.9f;
      list.push_back(variant(name + " candidates", d));
      d.candidate_count = 1;
      d.element = ElementKind::floating;
      d.number = kE4m3;
      list.push_back(variant("e4m3 " + name, d));
    }
  }
  FormatDescriptor d;
  d.element = ElementKind::integer;
  d.lowest = 0;
  d.highest = 15;
  list.push_back(variant("uint4", d));
  d.lowest = -32768;
  d.highest = 32767;
  list.push_back(variant("int16 full", d));
  d = fp8->descriptor;
  d.divisor = 600;
  auto clipping = std::make_shared<StateFormat>();
  clipping->name = "fp8 clipping";
  clipping->descriptor = d;
  clipping->default_divisor = false;
  finish_format(clipping.get(), clipping->name);
  list.push_back(clipping);
  return list;
}

inline std::vector<float> test_state(int kind, StateShape shape, std::mt19937* random) {
  std::vector<float> x(static_cast<size_t>(shape.elements()));
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<uint32_t> bits;
  for (float& v : x) v = normal(*random);
  const float infinity = std::numeric_limits<float>::infinity();
  switch (kind) {
    case 0:
      break;
    case 1:  // any bit pattern: NaN, infinity, subnormals
      for (float& v : x) v = bits_float(bits(*random));
      break;
    case 2:  // rows of very different size, zeros
      for (size_t i = 0; i < x.size(); ++i) {
        size_t row = i / shape.state_dim;
        x[i] = row % 3 == 2 ? 0.0f : x[i] * power_of_two(static_cast<int>(row * 7 % 200) - 100);
      }
      break;
    case 3:  // a few non-finite numbers and outliers
      x[0] = infinity;
      x[x.size() / 2] = bits_float(0xFFC00001u);
      x[x.size() - 1] = -3e38f;
      break;
    case 4:  // small against the largest: block scales underflow
      for (float& v : x) v *= 1e-6f;
      x[x.size() / 3] = 100.0f;
      break;
    default:
      for (float& v : x) v = 0.0f;
  }
  return x;
}

}  // namespace replayeval::test
