// Formats from files: a described built-in gives the built-in's bits, the files that ship, every
// rule of bad input, library codecs.
#include "quant/format_file.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/hash.h"
#include "quant/quantize.h"
#include "tests/support/temporary_folder.h"

using namespace replayeval;

namespace {

const std::string kFormats = std::string(REPLAYEVAL_SOURCE_DIR) + "/formats/";

std::shared_ptr<const StateFormat> parse(const std::string& text) {
  return parse_format(text, "mine.yaml", kFormats);
}

/// The message of the refusal, empty when nothing is refused.
std::string refusal(const std::string& text) {
  try {
    parse(text);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::byte> bits(const StateFormat& format, StateShape shape,
                            const std::vector<float>& x, Rounding rounding) {
  std::vector<std::byte> packed(packed_bytes(format, shape)), memory(memory_bytes(format, shape));
  EncodeHealth health;
  RandomKey key{3, 4, 5, 6, 7, StateRole::read};
  auto shared = std::make_shared<StateFormat>(format);
  encode_head({shared, rounding}, shape, x.data(), key, state_amax(x.data(), shape.elements()),
              packed.data(), memory.data(), &health);
  return packed;
}

std::vector<float> normal_state(StateShape shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(shape.elements()));
  for (float& v : x) v = normal(random);
  return x;
}

}  // namespace

TEST_CASE("a described built-in has the definition and the bits of the built-in") {
  const std::pair<const char*, const char*> described[] = {
      {"fp32", "element: fp32"},
      {"bf16", "element: {exponent: 8, mantissa: 7, bias: 127, inf: true, nan: true}"},
      {"fp16", "element: {exponent: 5, mantissa: 10, inf: true, nan: true}"},
      {"fp8", "element: {exponent: 4, mantissa: 3, bias: 7, nan: true}\nouter: {span: row}"},
      {"fp8_e4m3", "element: e4m3"},
      {"fp8_e5m2", "element: {format: e5m2}"},
      {"fp8_decoupled", "element: e4m3\nouter: {span: row}\ncolumn_scale: true"},
      {"nvfp4",
       "element: {exponent: 2, mantissa: 1, bias: 1}\nscale: {format: e4m3, block: 16}\nouter: "
       "{span: head}"},
      {"nvfp4_te",
       "element: e2m1\nscale: {format: e4m3, block: 16, order: te}\nouter: {span: head}"},
      {"nvfp4_modelopt",
       "element: e2m1\nscale: {format: e4m3, block: {axis: state_dim, size: 16}, order: "
       "modelopt}\nouter: {span: head}"},
      {"4over6_448_mse",
       "element: e2m1\nscale: {format: e4m3, block: 16, order: 4over6}\nouter: {span: "
       "head}\ncandidates: [1, 1.5]\nchoose: mse"},
      {"4over6_256_mae",
       "element: e2m1\nscale: {format: e4m3, block: {rows: 1, columns: 16}, order: 4over6, "
       "maximum: 256}\nouter: {span: head}\n"
       "candidates: [1, 1.5]\nchoose: mae"},
      {"mxfp4", "element: e2m1\nscale: {format: e8m0, block: 32}"},
      {"mxfp8", "element: e4m3\nscale: {format: e8m0, rounding: down, block: 32}\ndivisor: 256"},
      {"int8", "element: int8\nouter: {span: row}"},
      {"int16", "element: {integer: {from: -32767, to: 32767}}\nouter: {span: row}"},
  };
  StateShape shape{32, 64};
  std::vector<float> x = normal_state(shape, 1);
  for (auto& [name, text] : described) {
    INFO(std::string(name));
    auto built_in = find_format(name);
    auto mine = parse(text);
    CHECK(definition(*mine) == definition(*built_in));
    CHECK(definition_hash(*mine) == definition_hash(*built_in));
    CHECK(mine->name == "mine");
    for (Rounding rounding : {Rounding::nearest_even, Rounding::stochastic}) {
      CHECK(bits(*mine, shape, x, rounding) == bits(*built_in, shape, x, rounding));
    }
  }
}

TEST_CASE("every built-in has its own definition, and known names are listed") {
  std::vector<std::string> definitions;
  for (const BuiltinFormat& b : builtin_formats()) {
    if (b.name != "4over6") definitions.push_back(definition(*find_format(b.name)));
  }
  std::sort(definitions.begin(), definitions.end());
  CHECK(std::adjacent_find(definitions.begin(), definitions.end()) == definitions.end());
  CHECK(definition(*find_format("4over6")) == definition(*find_format("4over6_448_mae")));
  CHECK(definition(*format_with_span(find_format("nvfp4"), Span::row)) !=
        definition(*find_format("nvfp4")));
  try {
    find_format("nvfp5");
    FAIL("nvfp5 was found");
  } catch (const std::invalid_argument& e) {
    CHECK(has(e.what(), "unknown format 'nvfp5'; known: fp32 bf16 fp16 fp8 "));
  }
}

TEST_CASE("the files that ship load and say what they cost") {
  const std::tuple<const char*, double> files[] = {
      {"nf4.yaml", 4.5},
      {"int4_block32.yaml", 4.5},
      {"e3m2_block32.yaml", 6.25},
      {"fp8_tile32.yaml", 8 + 32.0 / (32 * 128)},
      {"int8_residual_int4.yaml", 8 + 32.0 / 128 + 4.5}};
  StateShape shape{128, 128};
  std::vector<float> x = normal_state(shape, 2);
  for (auto& [name, cost] : files) {
    auto format = load_format_file(kFormats + name);
    INFO(std::string(name) << "\n" << definition(*format));
    CHECK(format->name == std::filesystem::path(name).stem().string());
    CHECK(bits_per_element(*format, shape) == doctest::Approx(cost).epsilon(1e-12));
    std::vector<float> decoded(x.size());
    decode_head(*format, shape, bits(*format, shape, x, Rounding::nearest_even).data(),
                decoded.data());
    // Each block's error is at most half of the widest gap, which is below a sixth of its largest
    // magnitude in all of these formats.
    float amax = state_amax(x.data(), shape.elements());
    for (size_t i = 0; i < x.size(); ++i) REQUIRE(std::fabs(decoded[i] - x[i]) <= amax / 6);
  }
  CHECK(bits_per_element(*find_format("nvfp4"), shape) == doctest::Approx(4.5 + 32.0 / 16384));
  CHECK(bits_per_element(*find_format("fp8"), shape) == doctest::Approx(8.25));
  CHECK(bits_per_element(*find_format("mxfp4"), shape) == doctest::Approx(4.25));
}

TEST_CASE("broken rules are refused with file, line and rule") {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"element: {values: [1, 0.5]}", "mine.yaml:1: ", "must ascend"},
      {"element:\n  values: [0,\n    1,\n    1]", "mine.yaml:4: ", "repeats 1"},
      {"element:\n  values:\n    - 0\n    - .nan", "mine.yaml:4: ", "must be finite"},
      {"element:\n  values: [0, .inf]", "mine.yaml:2: ", "must be finite"},
      {"element: {values: []}", "mine.yaml:1: ", "empty"},
      {"element: {values: [a]}", "mine.yaml:1: ", "expected a number"},
      {"element: {values: [0]}", "mine.yaml:1: ", "no value but zero"},
      {"element: e2m1\nscale:\n  format: e4m3\n  block: 0",
       "mine.yaml:4: ", "at least one element"},
      {"element: e2m1\nscale:\n  format: e4m3\n  block: {rows: 0, columns: 4}",
       "mine.yaml:4: ", "at least one element"},
      {"element: e2m1\nscale:\n  format: e4m3\n  block: -16",
       "mine.yaml:4: ", "at least one element"},
      {"element: e2m1\nscale:\n  format: e4m3\n  block: 1.5", "mine.yaml:4: ", "whole number"},
      {"element: e2m1\nscales: {format: e4m3, block: 16}", "mine.yaml:2: ", "unknown key 'scales'"},
      {"element: e2m1\nscale: {format: e4m3, block: 16, size: 2}",
       "mine.yaml:2: ", "unknown key 'size'"},
      {"element: e2m1\nelement: e4m3", "mine.yaml:2: ", "appears twice"},
      {"element: e9m9", "mine.yaml:1: ", "element is 'e9m9'; known: "},
      {"element: {exponent: 9, mantissa: 2}", "mine.yaml:1: ", "from 1 to 8"},
      {"element: {exponent: 8, mantissa: 8}", "mine.yaml:1: ", "at most 16"},
      {"element: {exponent: 5, mantissa: 2, bias: 200}", "mine.yaml:1: ", "do not fit FP32"},
      {"element: {exponent: 8, mantissa: 3, bias: 100}", "mine.yaml:1: ", "do not fit FP32"},
      {"element: {mantissa: 2}", "mine.yaml:1: ", "needs exponent and mantissa"},
      {"element: int1", "mine.yaml:1: ", "from 2 to 16"},
      {"scale: {format: e4m3, block: 16}", "mine.yaml:1: ", "has no element"},
      {"element: e2m1\nscale: {format: e4m3}", "mine.yaml:2: ", "needs format and block"},
      {"element: e2m1\nscale: {format: e4m3, block: 16, maximum: 500}\nouter: {span: head}",
       "mine.yaml:2: ", "beyond the largest"},
      {"element: e2m1\nscale: {format: e4m3, block: 16, maximum: 0}\nouter: {span: head}",
       "mine.yaml:2:", "not a number above 0"},
      {"element: e2m1\nscale: {format: e4m3, block: 16, maximum: -1}\nouter: {span: head}",
       "mine.yaml:2:", "not a number above 0"},
      {"element: e2m1\nscale: {format: fp32, block: 16}\nouter: {span: head}",
       "mine.yaml:3: ", "drop one"},
      {"element: e2m1\nscale: {format: e4m3, block: {rows: 2, columns: 8}}\nouter: {span: row}",
       "mine.yaml:3: ", "blocks of one row"},
      {"element: e2m1\nouter: {span: column}", "mine.yaml:2: ", "known: row head layer"},
      {"element: e2m1\nouter: {file: missing.csv}", "mine.yaml:2: ", "cannot be read"},
      {"element: e2m1\ndivisor: 0", "mine.yaml:2: ", "positive"},
      {"element: e2m1\ndivisor: 3", "mine.yaml:2: ", "measured scale"},
      {"element: e2m1\ncandidates: [1, 1.5]\nchoose: mae",
       "mine.yaml:2: ", "candidates need a block scale"},
      {"element: e2m1\nscale: {format: e4m3, block: 16}\ncandidates: [1, 1.5]",
       "mine.yaml:1: ", "go together"},
      {"element: e2m1\nzero_point: minimum", "mine.yaml:2: ", "zero point needs a block"},
      {"element: e4m3\nouter: {span: layer}\ntransform: hadamard",
       "mine.yaml:2: ", "span layer does not go"},
      {"element: e4m3\ntransform: {kind: hadamard, size: 12}", "mine.yaml:2: ", "power of two"},
      {"element: e4m3\nresidual: nothing", "mine.yaml:2: ", "unknown format 'nothing'"},
      {"element: e4m3\nresidual: missing.yaml", "mine.yaml:2: ", "cannot be read"},
      {"element: e4m3\nresidual: int8_residual_int4.yaml",
       "int8_residual_int4.yaml:", "may not have a residual"},
      {"element: {format: e4m3, overflow: inf}\nouter: {span: row}", "mine.yaml:1: ", "unscaled"},
      {"library: missing.so", "mine.yaml:1: ", "does not exist"},
      {"element: [", "mine.yaml:1: ", ""},
      {"- 1", "mine.yaml:1: ", "must be a mapping"},
  };
  for (auto& [text, place, rule] : cases) {
    std::string message = refusal(text);
    INFO(text << "\n-> " << message);
    CHECK(has(message, place));
    CHECK(has(message, rule));
    CHECK(!has(message, "\n"));
  }
  std::string many = "element:\n  values: [0";
  for (int i = 1; i <= 256; ++i)
    many += "," + std::string(i % 16 == 0 ? "\n    " : " ") + std::to_string(i);
  std::string message = refusal(many + "]");
  CHECK(has(message, "mine.yaml:18: the list has 257 values, at most 256"));

  auto nvfp4 = parse("element: e2m1\nscale:\n  format: e4m3\n  block: 48");
  for (StateShape shape : {StateShape{4, 64}, StateShape{4, 0}}) {
    try {
      packed_bytes(*nvfp4, shape);
      FAIL("a block of 48 divided the axis");
    } catch (const std::invalid_argument& e) {
      CHECK(has(e.what(), "mine.yaml:4: mine: state [4, "));
    }
  }
  CHECK_THROWS_WITH_AS(load_format_file("no/such.yaml"),
                       doctest::Contains("no/such.yaml: format file cannot be read"),
                       std::invalid_argument);
}

TEST_CASE("scales given in advance are used, stored and required for every head") {
  test::TemporaryFolder folder;
  folder.write("scales.csv", "layer,head,scale\n5,6,0.5\n# slow head\n5,7,0.25\n");
  auto format =
      parse_format("element: e4m3\nouter: {file: scales.csv}", "mine.yaml", folder.path());
  StateShape shape{2, 4};
  std::vector<float> x = {1, 2, 3, 448, 0.0625f, -1, 224, 500};
  std::vector<std::byte> packed(packed_bytes(*format, shape));
  EncodeHealth health;
  RandomKey key;
  key.layer = 5;
  key.head = 6;
  encode_head({format, Rounding::nearest_even}, shape, x.data(), key, 0, packed.data(), nullptr,
              &health);
  std::vector<float> decoded(8);
  decode_head(*format, shape, packed.data(), decoded.data());
  // x / 0.5 saturates at 448: 224 is exact, 448 and 500 are clipped to 224.
  CHECK(decoded == std::vector<float>{1, 2, 3, 224, 0.0625f, -1, 224, 224});
  CHECK(health.clipped == 2);
  key.head = 8;
  CHECK_THROWS_AS(encode_head({format, Rounding::nearest_even}, shape, x.data(), key, 0,
                              packed.data(), nullptr, &health),
                  std::invalid_argument);
  CHECK_NOTHROW(check_fixed_scales(*format, 5, 6, 2));
  CHECK_THROWS_AS(check_fixed_scales(*format, 5, 6, 3), std::invalid_argument);
  auto same = parse_format("element: e4m3\nouter: {file: scales.csv}", "other.yaml", folder.path());
  CHECK(definition(*same) == definition(*format));
  for (const char* bad : {"5,6\n", "5,6,0\n", "5,6,nan\n", "5,6,1\n5,6,2\n", "-1,0,1\n",
                          "5,6,1,2\n", "# nothing\n"}) {
    folder.write("bad.csv", bad);
    INFO(bad);
    CHECK_THROWS_AS(
        parse_format("element: e4m3\nouter: {file: bad.csv}", "mine.yaml", folder.path()),
        std::invalid_argument);
  }
}

TEST_CASE("a library codec encodes, keeps its memory, and is refused when it does not fit") {
  std::string folder = REPLAYEVAL_TEST_CODECS;
  auto library = [&](const std::string& name) {
    return parse_format("library: lib" + name + ".so", "mine.yaml", folder);
  };
  auto format = library("test_codec_good");
  CHECK(definition(*format) == "library " + sha256_file(folder + "/libtest_codec_good.so") + "\n");
  StateShape shape{8, 32};
  CHECK(packed_bytes(*format, shape) == 12 + 256);
  CHECK(memory_bytes(*format, shape) == 8);
  CHECK(bits_per_element(*format, shape) == 8 + 96.0 / 256);
  std::vector<float> x = normal_state(shape, 3), decoded(x.size());
  std::vector<std::byte> packed(packed_bytes(*format, shape)), memory(8);
  EncodeHealth health;
  float scale = state_amax(x.data(), 256) / 127.0f;
  for (uint64_t round = 1; round <= 3; ++round) {
    encode_head({format, round == 3 ? Rounding::stochastic : Rounding::nearest_even}, shape,
                x.data(), RandomKey{}, 0, packed.data(), memory.data(), &health);
    uint64_t seen = 0;
    std::memcpy(&seen, packed.data(), 8);
    CHECK(seen == round);
    decode_head(*format, shape, packed.data(), decoded.data());
    // Half a step for nearest, a step for stochastic; 2^-16 for the FP32 sum y + 128.
    float bound = scale * (round == 3 ? 1.0f : 0.5f) + scale * 0x1p-15f;
    for (size_t i = 0; i < x.size(); ++i) REQUIRE(std::fabs(decoded[i] - x[i]) <= bound);
  }
  CHECK(health.elements == 3 * 256);
  x[5] = 1e35f;
  CHECK_THROWS_AS(encode_head({format, Rounding::nearest_even}, shape, x.data(), RandomKey{}, 0,
                              packed.data(), memory.data(), &health),
                  std::runtime_error);
  CHECK_THROWS_WITH_AS(packed_bytes(*format, StateShape{4, 3}),
                       doctest::Contains("state_dim must be even"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(library("test_codec_version"),
                       doctest::Contains("has interface version 99, expected 1"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(library("test_codec_broken"), doctest::Contains("leaves a function"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(library("test_codec_none"),
                       doctest::Contains("does not export replayeval_codec"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(library("test_codec_missing"), doctest::Contains("does not exist"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(
      parse_format("library: libtest_codec_good.so\nelement: e4m3", "mine.yaml", folder),
      doctest::Contains("mine.yaml:2: key 'element' beside library"), std::invalid_argument);
}
