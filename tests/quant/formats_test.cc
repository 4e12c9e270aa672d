// Single numbers against the stored vectors: decode tables, round to nearest even, stochastic
// rounding, Philox.
#include <doctest/doctest.h>

#include <cmath>

#include "quant/codec.h"
#include "quant/random.h"
#include "tests/support/case_file.h"

using namespace replayeval;
using replayeval::test::case_path;
using replayeval::test::CaseFile;

namespace {

struct CaseFormat {
  const char* group;
  FloatFormat format;
};
constexpr CaseFormat kCaseFormats[] = {
    {"e4m3fn", kE4m3}, {"e5m2", kE5m2}, {"e2m1", kE2m1}, {"fp16", kFp16}, {"bf16", kBf16}};

/// Prints the first mismatch and returns how many there are. Codes that decode to NaN count as
/// equal.
template <class Encode>
size_t mismatches(const std::string& name, const FloatFormat& format,
                  const std::vector<float>& input, const std::vector<uint32_t>& expected,
                  Encode&& encode) {
  size_t wrong = 0;
  for (size_t i = 0; i < input.size(); ++i) {
    uint32_t code = encode(i, input[i]);
    if (code == expected[i]) continue;
    if (is_nan(decode_float(format, expected[i])) && is_nan(decode_float(format, code))) continue;
    if (wrong++ == 0) {
      MESSAGE(name << ": element " << i << " input " << input[i] << " (bits "
                   << float_bits(input[i]) << ") code " << code << " expected " << expected[i]);
    }
  }
  return wrong;
}

}  // namespace

TEST_CASE("decode tables equal the stored ones") {
  std::string path = case_path("cases/quant/formats.h5");
  if (path.empty()) return;
  CaseFile file(path);
  for (const CaseFormat& c : kCaseFormats) {
    std::vector<float> table = file.floats(std::string(c.group) + "/decode");
    REQUIRE(table.size() == size_t{1} << c.format.bits());
    for (uint32_t code = 0; code < table.size(); ++code) {
      float value = decode_float(c.format, code);
      bool equal =
          float_bits(value) == float_bits(table[code]) || (is_nan(value) && is_nan(table[code]));
      if (!equal)
        FAIL_CHECK(c.group << " code " << code << ": " << value << " expected " << table[code]);
    }
    CHECK(decode_float(c.format, c.format.max_code) ==
          static_cast<float>(file.attribute(c.group, "max_finite")));
  }
  std::vector<float> table = file.floats("e8m0/decode");
  for (uint32_t code = 0; code < 256; ++code) {
    float value = decode_e8m0(code);
    CHECK((float_bits(value) == float_bits(table[code]) || (is_nan(value) && is_nan(table[code]))));
  }
}

TEST_CASE("round to nearest even equals the stored codes") {
  std::string path = case_path("cases/quant/formats.h5");
  if (path.empty()) return;
  CaseFile file(path);
  for (const CaseFormat& c : kCaseFormats) {
    std::string group = c.group;
    std::vector<float> input = file.floats(group + "/input");
    CHECK(mismatches(group, c.format, input, file.u32(group + "/encode_satfinite"),
                     [&](size_t, float x) { return encode_float(c.format, x); }) == 0);
    if (!file.has(group + "/encode_overflow")) continue;
    CHECK(mismatches(group + " overflow", c.format, input, file.u32(group + "/encode_overflow"),
                     [&](size_t, float x) { return encode_float(c.format, x, false); }) == 0);
  }
  std::vector<float> input = file.floats("e8m0/input");
  std::vector<uint32_t> zero = file.u32("e8m0/encode_toward_zero");
  std::vector<uint32_t> up = file.u32("e8m0/encode_upward");
  std::vector<uint32_t> nearest = file.u32("e8m0/encode_nearest");
  for (size_t i = 0; i < input.size(); ++i) {
    INFO("e8m0 element " << i << " input " << input[i]);
    CHECK(encode_e8m0(input[i], ScaleRounding::down) == zero[i]);
    CHECK(encode_e8m0(input[i], ScaleRounding::up) == up[i]);
    CHECK(encode_e8m0(input[i], ScaleRounding::nearest) == nearest[i]);
  }
}

TEST_CASE("stochastic rounding equals the stored codes for given bits") {
  std::string path = case_path("cases/quant/stochastic.h5");
  if (path.empty()) return;
  CaseFile file(path);
  for (const std::string& group : file.members("/")) {
    FloatFormat format = kE2m1;
    for (const CaseFormat& c : kCaseFormats) {
      if (group == c.group) format = c.format;
    }
    int n = static_cast<int>(file.attribute(group, "random_bits"));
    std::vector<float> input = file.floats(group + "/input");
    std::vector<uint32_t> random = file.u32(group + "/random");
    if (group != "e2m1_16bit") CHECK(n == format.random_bits);
    CHECK(mismatches(group, format, input, file.u32(group + "/encode_satfinite"),
                     [&](size_t i, float x) {
                       return encode_float_stochastic(format, x, random[i], n);
                     }) == 0);
    if (!file.has(group + "/encode_overflow")) continue;
    CHECK(mismatches(group + " overflow", format, input, file.u32(group + "/encode_overflow"),
                     [&](size_t i, float x) {
                       return encode_float_stochastic(format, x, random[i], n, false);
                     }) == 0);
  }
}

TEST_CASE("Philox equals Random123") {
  std::string path = case_path("cases/quant/philox.h5");
  if (path.empty()) return;
  CaseFile file(path);
  std::vector<uint64_t> seed = file.u64("seed"), offset = file.u64("offset");
  std::vector<uint32_t> ten = file.u32("philox4x32_10"), seven = file.u32("philox4x32_7"),
                        four = file.u32("philox4x32_4");
  for (size_t i = 0; i < seed.size(); ++i) {
    auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
    auto high = [](uint64_t v) { return static_cast<uint32_t>(v >> 32); };
    PhiloxWords a =
        philox4x32<10>(low(offset[i]), high(offset[i]), 0, 0, low(seed[i]), high(seed[i]));
    PhiloxWords b =
        philox4x32<7>(low(offset[i]), high(offset[i]), 0, 0, low(seed[i]), high(seed[i]));
    PhiloxWords c =
        philox4x32<4>(low(offset[i]), high(offset[i]), 0, 0, low(seed[i]), high(seed[i]));
    for (size_t w = 0; w < 4; ++w) {
      CHECK(a.word[w] == ten[4 * i + w]);
      CHECK(b.word[w] == seven[4 * i + w]);
      CHECK(c.word[w] == four[4 * i + w]);
    }
  }
}
