// The vectorised interpreter gives the bits of the plain one, at every instruction-set level, for
// every kind of format and awkward shapes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "quant/quantize_core.h"
#include "quant/state_format.h"
#include "tests/support/format_variants.h"

using namespace replayeval;
using namespace replayeval::test;

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

TEST_CASE("every FP16 code decodes to the plain interpreter's bits, NaN included") {
  const FormatDescriptor& d = find_format("fp16")->descriptor;
  const StateShape shape{512, 128};
  const PackedLayout layout = packed_layout(d, shape.head_dim, shape.state_dim);
  std::vector<std::byte> packed(layout.total);
  for (int i = 0; i < 65536; ++i) {
    const uint16_t code = static_cast<uint16_t>(i);
    std::memcpy(packed.data() + 2 * i, &code, 2);
  }
  std::vector<float> expected(65536), values(65536), scratch(fast_scratch_floats(layout));
  decode_reference(d, layout, packed.data(), expected.data());
  for (const Level& level : levels()) {
    INFO(std::string(level.name));
    level.decode(d, layout, packed.data(), scratch.data(), values.data());
    int different = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      if (float_bits(values[i]) != float_bits(expected[i])) ++different;
    }
    CHECK(different == 0);
  }
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
