// The vectorised interpreter gives the bits of the plain one, at every instruction-set level, for
// every kind of format and awkward shapes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "quant/quantize_core.h"
#include "quant/state_format.h"

using namespace replayeval;

namespace {

struct Level {
  const char* name;
  void (*encode)(const EncodeTask&, float*, EncodeCounts*);
  void (*decode)(const FormatDescriptor&, const PackedLayout&, const std::byte*, float*, float*);
  void (*random)(const PhiloxKey&, int, int, uint32_t*);
  float (*amax)(const float*, int64_t);
  uint64_t (*non_finite)(const float*, int64_t);
};

std::vector<Level> levels() {
  std::vector<Level> list = {{"generic", simd_generic::encode_fast, simd_generic::decode_fast,
                              simd_generic::random_row, simd_generic::amax_fast,
                              simd_generic::non_finite_fast}};
#if defined(__x86_64__)
  if (simd_level() != SimdLevel::generic) {
    list.push_back({"v3", simd_v3::encode_fast, simd_v3::decode_fast, simd_v3::random_row,
                    simd_v3::amax_fast, simd_v3::non_finite_fast});
  }
  if (simd_level() == SimdLevel::v4) {
    list.push_back({"v4", simd_v4::encode_fast, simd_v4::decode_fast, simd_v4::random_row,
                    simd_v4::amax_fast, simd_v4::non_finite_fast});
  }
#endif
  return list;
}

std::shared_ptr<StateFormat> variant(const std::string& name, const FormatDescriptor& descriptor) {
  auto format = std::make_shared<StateFormat>();
  format->name = name;
  format->descriptor = descriptor;
  finish_format(format.get(), name);
  return format;
}

/// The built-in formats and variants that reach every branch.
std::vector<std::shared_ptr<const StateFormat>> all_formats() {
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

std::vector<float> test_state(int kind, StateShape shape, std::mt19937* random) {
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

}  // namespace

TEST_CASE("every instruction-set level gives the bits and counts of the plain interpreter") {
  std::mt19937 random(11);
  const StateShape shapes[] = {{4, 128}, {8, 64}, {4, 32}, {12, 96}, {4, 8},
                               {4, 40},  {8, 4},  {4, 30}, {4, 7},   {4, 1}};
  int compared = 0;
  for (const auto& format : all_formats()) {
    const FormatDescriptor& d = format->descriptor;
    for (StateShape shape : shapes) {
      if (d.block_rows > 0 && shape.head_dim % d.block_rows != 0) continue;
      if (d.block_columns > 0 && shape.state_dim % d.block_columns != 0) continue;
      PackedLayout layout = packed_layout(d, shape.head_dim, shape.state_dim);
      if (!has_fast_path(d, layout)) continue;
      for (int kind = 0; kind < 6; ++kind) {
        std::vector<float> x = test_state(kind, shape, &random);
        for (bool stochastic : {false, true}) {
          EncodeTask task;
          task.descriptor = &d;
          task.layout = layout;
          task.x = x.data();
          task.stochastic = stochastic && d.element != ElementKind::fp32;
          task.key = {1u, 2u, 3u + (4u << 16), 5u, 6u};
          task.layer_amax = state_amax(x.data(), shape.elements()) * 1.5f;
          std::vector<std::byte> expected(layout.total), packed(layout.total);
          EncodeCounts expected_counts;
          task.packed = expected.data();
          encode_reference(task, &expected_counts);
          std::vector<float> expected_values(x.size()), values(x.size());
          decode_reference(d, layout, expected.data(), expected_values.data());
          for (const Level& level : levels()) {
            std::vector<float> scratch(fast_scratch_floats(layout));
            EncodeCounts counts;
            std::fill(packed.begin(), packed.end(), std::byte{0});
            task.packed = packed.data();
            level.encode(task, scratch.data(), &counts);
            ++compared;
            INFO(format->name << " [" << shape.head_dim << ", " << shape.state_dim << "] data "
                              << kind << (stochastic ? " sr " : " rtn ")
                              << std::string(level.name));
            size_t at = 0;
            while (at < layout.total && packed[at] == expected[at]) ++at;
            if (at < layout.total) {
              size_t i = layout.code_size == 4 ? 2 * at : at * 8 / layout.code_size;
              FAIL_CHECK(
                  "byte " << at << " is " << static_cast<int>(packed[at]) << " expected "
                          << static_cast<int>(expected[at])
                          << (at < layout.scales ? "; element " : "; beyond the codes, element ")
                          << i << " x " << (i < x.size() ? x[i] : 0.0f));
            }
            CHECK(counts.non_finite == expected_counts.non_finite);
            CHECK(counts.saturated == expected_counts.saturated);
            CHECK(counts.clipped == expected_counts.clipped);
            CHECK(counts.vanished == expected_counts.vanished);
            level.decode(d, layout, expected.data(), scratch.data(), values.data());
            for (size_t i = 0; i < x.size(); ++i) {
              bool nan = is_nan(values[i]) && is_nan(expected_values[i]);
              if (float_bits(values[i]) != float_bits(expected_values[i]) && !nan) {
                FAIL_CHECK("decoded element " << i << " is " << values[i] << " expected "
                                              << expected_values[i]);
                break;
              }
            }
          }
        }
      }
    }
  }
  CHECK(compared > 5000);
}

TEST_CASE("vectorised random words, maxima and counts equal the plain ones") {
  PhiloxKey key{0x12345678u, 0x9ABCDEF0u, 7u, 8u, 0xFFFFFFF1u};
  std::vector<uint32_t> words(200 + 64);
  std::mt19937 random(3);
  std::vector<float> x(301);
  for (float& v : x) v = bits_float(random());
  for (const Level& level : levels()) {
    for (int row : {0, 1, 127, 65535}) {
      level.random(key, row, 200, words.data());
      for (int c = 0; c < 200; ++c) REQUIRE(words[c] == random_word(key, row, c));
    }
    for (int64_t count : {0, 1, 15, 16, 17, 33, 301}) {
      float amax = 0;
      uint64_t non_finite = 0;
      for (int64_t i = 0; i < count; ++i) {
        amax = larger(amax, amax_term(x[i]));
        non_finite += magnitude(x[i]) <= kFloatMax ? 0 : 1;
      }
      CHECK(level.amax(x.data(), count) == amax);
      CHECK(level.non_finite(x.data(), count) == non_finite);
    }
  }
}
