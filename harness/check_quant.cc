#include "harness/check_quant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <functional>
#include <stdexcept>

#include "quant/codec.h"
#include "quant/packed_layout.h"
#include "quant/quantize.h"
#include "quant/random.h"
#include "quant/state_format.h"
#include "reports/files.h"
#include "reports/hdf5_image.h"

namespace replayeval {
namespace {

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llX", static_cast<unsigned long long>(value));
  return text;
}

std::string number(float value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.9g (bits 0x%08X)", static_cast<double>(value),
                std::bit_cast<uint32_t>(value));
  return text;
}

/// Counts comparisons and keeps the worst mismatch.
class Comparison {
 public:
  explicit Comparison(std::string what) { row_.what = std::move(what); }

  /// `distance` orders mismatches; NaN counts as infinitely far.
  void add(bool equal, double distance, const std::function<std::string()>& describe) {
    ++row_.compared;
    if (equal) {
      ++row_.equal;
      return;
    }
    if (std::isnan(distance)) distance = HUGE_VAL;
    if (row_.worst.empty() || distance > worst_) {
      worst_ = distance;
      row_.worst = describe();
    }
  }

  QuantCheckRow row() const { return row_; }

 private:
  QuantCheckRow row_;
  double worst_ = 0;
};

QuantCheckRow not_compared(const std::string& what, const std::string& note) {
  QuantCheckRow row;
  row.what = what;
  row.note = note;
  return row;
}

/// Codes got from inputs; `decode` gives what a code stands for. Codes that are both NaN are equal.
QuantCheckRow compare_codes(const std::string& what, const std::vector<float>& inputs,
                            const std::vector<uint32_t>& expected,
                            const std::function<uint32_t(size_t)>& encode,
                            const std::function<float(uint32_t)>& decode) {
  Comparison comparison(what);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const uint32_t got = encode(i);
    const float got_value = decode(got);
    const float expected_value = decode(expected.at(i));
    const bool equal = got == expected[i] || (std::isnan(got_value) && std::isnan(expected_value));
    comparison.add(equal, std::abs(double{got_value} - double{expected_value}), [&] {
      return "[" + std::to_string(i) + "] input " + number(inputs[i]) + ": expected code " +
             hex(expected[i]) + " = " + number(expected_value) + ", got " + hex(got) + " = " +
             number(got_value);
    });
  }
  return comparison.row();
}

QuantCheckRow compare_decode(const std::string& what, const std::vector<float>& expected,
                             const std::function<float(uint32_t)>& decode) {
  Comparison comparison(what);
  for (size_t code = 0; code < expected.size(); ++code) {
    const float got = decode(static_cast<uint32_t>(code));
    const bool equal = std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(expected[code]) ||
                       (std::isnan(got) && std::isnan(expected[code]));
    comparison.add(equal, std::abs(double{got} - double{expected[code]}), [&] {
      return "code " + hex(code) + ": expected " + number(expected[code]) + ", got " + number(got);
    });
  }
  return comparison.row();
}

/// Row of kFloatFormats that a group is about: "e4m3fn" is e4m3, "e2m1_16bit" is e2m1.
const FloatFormat* float_format_of(std::string name) {
  if (name.ends_with("_16bit")) name.resize(name.size() - 6);
  if (name.ends_with("fn")) name.resize(name.size() - 2);
  for (const NamedFloatFormat& row : kFloatFormats) {
    if (name == row.name) return &row.format;
  }
  return nullptr;
}

void check_e8m0(const Hdf5Reader& file, const std::string& group,
                std::vector<QuantCheckRow>* rows) {
  const auto decode = [](uint32_t code) { return decode_e8m0(code); };
  rows->push_back(
      compare_decode(group + " decode", file.dataset<float>("/" + group + "/decode"), decode));
  const auto input = file.dataset<float>("/" + group + "/input");
  const std::pair<const char*, ScaleRounding> directions[] = {
      {"encode_toward_zero", ScaleRounding::down},
      {"encode_upward", ScaleRounding::up},
      {"encode_nearest", ScaleRounding::nearest}};
  for (const auto& [name, rounding] : directions) {
    const std::string path = "/" + group + "/" + name;
    if (!file.has(path)) continue;
    std::vector<float> inputs;
    std::vector<uint32_t> expected;
    const auto codes = file.dataset<uint32_t>(path);
    for (size_t i = 0; i < input.size(); ++i) {
      // 0 and infinity have no nearest power of two: the source answers NaN, the codec saturates.
      if (rounding == ScaleRounding::nearest && (input[i] == 0 || std::isinf(input[i]))) continue;
      inputs.push_back(input[i]);
      expected.push_back(codes[i]);
    }
    rows->push_back(compare_codes(
        group + " " + name, inputs, expected,
        [&](size_t i) { return encode_e8m0(double{inputs[i]}, rounding); }, decode));
  }
}

void check_float_format(const Hdf5Reader& file, const std::string& group,
                        std::vector<QuantCheckRow>* rows) {
  if (group == "e8m0") return check_e8m0(file, group, rows);
  const FloatFormat* format = float_format_of(group);
  if (format == nullptr) {
    rows->push_back(not_compared(group, "no float format of this name here"));
    return;
  }
  const auto decode = [format](uint32_t code) { return decode_float(*format, code); };
  const std::string path = "/" + group + "/";
  if (file.has(path + "decode")) {
    rows->push_back(
        compare_decode(group + " decode", file.dataset<float>(path + "decode"), decode));
  }
  const auto input = file.dataset<float>(path + "input");
  const bool stochastic = file.has(path + "random");
  const auto random =
      stochastic ? file.dataset<uint32_t>(path + "random") : std::vector<uint32_t>();
  const int bits = stochastic ? file.attribute<int32_t>("/" + group, "random_bits") : 0;
  for (const bool saturate : {true, false}) {
    const std::string name = saturate ? "encode_satfinite" : "encode_overflow";
    if (!file.has(path + name)) continue;
    const auto encode = [&](size_t i) {
      return stochastic ? encode_float_stochastic(*format, input[i], random.at(i), bits, saturate)
                        : encode_float(*format, input[i], saturate);
    };
    rows->push_back(compare_codes(group + " " + name, input, file.dataset<uint32_t>(path + name),
                                  encode, decode));
  }
}

template <int rounds>
void check_philox_rounds(const Hdf5Reader& file, std::vector<QuantCheckRow>* rows) {
  const std::string name = "philox4x32_" + std::to_string(rounds);
  if (!file.has("/" + name)) return;
  const auto seed = file.dataset<uint64_t>("/seed");
  const auto offset = file.dataset<uint64_t>("/offset");
  const auto expected = file.dataset<uint32_t>("/" + name);
  Comparison comparison(name);
  for (size_t i = 0; i < seed.size(); ++i) {
    const PhiloxWords words = philox4x32<rounds>(
        static_cast<uint32_t>(offset[i]), static_cast<uint32_t>(offset[i] >> 32), 0, 0,
        static_cast<uint32_t>(seed[i]), static_cast<uint32_t>(seed[i] >> 32));
    for (size_t w = 0; w < 4; ++w) {
      const uint32_t want = expected.at(4 * i + w);
      comparison.add(words.word[w] == want, 1, [&] {
        return "[" + std::to_string(i) + "] seed " + hex(seed[i]) + ", offset " + hex(offset[i]) +
               ", word " + std::to_string(w) + ": expected " + hex(want) + ", got " +
               hex(words.word[w]);
      });
    }
  }
  rows->push_back(comparison.row());
}

/// A matrix of a case, encoded as one head.
struct Encoded {
  StateShape shape;
  std::vector<float> x;
  std::shared_ptr<const StateFormat> format;
  PackedLayout layout{};
  std::vector<std::byte> packed;

  uint32_t code(size_t element) const {
    const auto at = [&](size_t i) { return static_cast<uint32_t>(packed[i]); };
    switch (layout.code_size) {
      case 4:
        return at(element / 2) >> (element % 2 == 0 ? 0 : 4) & 15u;
      case 8:
        return at(element);
      default:
        return at(2 * element) | at(2 * element + 1) << 8;
    }
  }
  float outer(size_t i) const {
    float value = 0;
    std::copy_n(packed.begin() + static_cast<std::ptrdiff_t>(layout.outer + 4 * i), 4,
                reinterpret_cast<std::byte*>(&value));
    return value;
  }
};

Encoded encode_case(const Hdf5Reader& file, const std::string& group, const std::string& format) {
  Encoded encoded;
  const std::vector<int64_t> dims = file.dims("/" + group + "/x");
  encoded.shape = {static_cast<int>(dims.at(0)), static_cast<int>(dims.at(1))};
  encoded.x = file.dataset<float>("/" + group + "/x");
  encoded.format = find_format(format);
  encoded.layout =
      packed_layout(encoded.format->descriptor, encoded.shape.head_dim, encoded.shape.state_dim);
  encoded.packed.resize(packed_bytes(*encoded.format, encoded.shape));
  EncodeHealth health;
  encode_head({encoded.format, Rounding::nearest_even}, encoded.shape, encoded.x.data(),
              RandomKey{}, 0, encoded.packed.data(), nullptr, &health);
  return encoded;
}

std::string element_name(const Encoded& e, size_t element) {
  const auto columns = static_cast<size_t>(e.shape.state_dim);
  return "[" + std::to_string(element / columns) + ", " + std::to_string(element % columns) +
         "] input " + number(e.x[element]);
}

void check_nvfp4(const Hdf5Reader& file, const std::string& group, const std::string& source,
                 const std::string& format, std::vector<QuantCheckRow>* rows) {
  const std::string path = "/" + group + "/" + source + "/";
  const std::string what = group + " " + source;
  if (!file.has(path + "codes"))
    return rows->push_back(not_compared(what, "the file holds no answers"));
  const Encoded e = encode_case(file, group, format);
  // Where FP32 scales underflow the published implementations differ; what can be asked is a finite
  // value with an error of at most the matrix's maximum.
  if (group == "f32_subnormal" || group == "tiny_normal") {
    std::vector<float> decoded(e.x.size());
    decode_head(*e.format, e.shape, e.packed.data(), decoded.data());
    const float bound = state_amax(e.x.data(), static_cast<int64_t>(e.x.size()));
    Comparison comparison(what + " finite, error at most amax");
    for (size_t i = 0; i < decoded.size(); ++i) {
      const double error = std::abs(double{decoded[i]} - double{e.x[i]});
      comparison.add(error <= double{bound}, error, [&] {
        return element_name(e, i) + ": got " + number(decoded[i]) + ", bound " + number(bound);
      });
    }
    return rows->push_back(comparison.row());
  }
  const FormatDescriptor& d = e.format->descriptor;
  const auto codes = file.dataset<uint32_t>(path + "codes");
  const auto scales = file.dataset<uint32_t>(path + "scales");
  const auto block = static_cast<size_t>(e.layout.block_columns);
  Comparison scale_comparison(what + " scales");
  for (size_t b = 0; b < scales.size(); ++b) {
    const auto got = static_cast<uint32_t>(e.packed[e.layout.scales + b]);
    const float got_value = decode_block_scale(d, got);
    const float expected_value = decode_block_scale(d, scales[b]);
    scale_comparison.add(
        got == scales[b], std::abs(double{got_value} - double{expected_value}), [&] {
          return "block " + std::to_string(b) + ": expected code " + hex(scales[b]) + " = " +
                 number(expected_value) + ", got " + hex(got) + " = " + number(got_value);
        });
  }
  rows->push_back(scale_comparison.row());
  // Where the value is zero (a zero code of either sign, any code below a zero scale) the code
  // itself is free.
  Comparison code_comparison(what + " codes");
  for (size_t i = 0; i < codes.size(); ++i) {
    const float scale = decode_block_scale(d, scales.at(i / block));
    const float expected_value = decode_element(d, codes[i]) * scale;
    const float got_value = decode_element(d, e.code(i)) * scale;
    const bool equal = e.code(i) == codes[i] || (expected_value == 0 && got_value == 0);
    code_comparison.add(equal, std::abs(double{got_value} - double{expected_value}), [&] {
      return element_name(e, i) + ": expected code " + hex(codes[i]) + ", got " + hex(e.code(i));
    });
  }
  rows->push_back(code_comparison.row());
  Comparison outer_comparison(what + " FP32 scale");
  const bool encode_side = file.has(path + "global_encode") || file.has(path + "global_scale");
  const float stored =
      file.dataset<float>(path + (file.has(path + "global_encode")  ? "global_encode"
                                  : file.has(path + "global_scale") ? "global_scale"
                                                                    : "global_decode"))
          .at(0);
  const float expected = encode_side ? 1.0f / stored : stored;
  outer_comparison.add(e.outer(0) == expected, 1, [&] {
    return "expected " + number(expected) + ", got " + number(e.outer(0));
  });
  rows->push_back(outer_comparison.row());
}

void check_row_scaled(const Hdf5Reader& file, const std::string& group, const std::string& source,
                      const std::string& format, std::vector<QuantCheckRow>* rows) {
  const std::string path = "/" + group + "/" + source + "/";
  const Encoded e = encode_case(file, group, format);
  const auto codes = file.dataset<int32_t>(path + "codes");
  const auto scales = file.dataset<float>(path + "decode_scale");
  const uint32_t mask = e.layout.code_size == 16 ? 0xFFFFu : 0xFFu;
  Comparison code_comparison(group + " " + source + " codes");
  for (size_t i = 0; i < codes.size(); ++i) {
    const uint32_t expected = static_cast<uint32_t>(codes[i]) & mask;
    const uint32_t got = e.code(i);
    const float distance =
        decode_element(e.format->descriptor, expected) - decode_element(e.format->descriptor, got);
    code_comparison.add(got == expected, std::abs(double{distance}), [&] {
      return element_name(e, i) + ": expected code " + hex(expected) + ", got " + hex(got);
    });
  }
  rows->push_back(code_comparison.row());
  Comparison scale_comparison(group + " " + source + " scales");
  for (size_t r = 0; r < scales.size(); ++r) {
    scale_comparison.add(e.outer(r) == scales[r], std::abs(double{e.outer(r)} - double{scales[r]}),
                         [&] {
                           return "row " + std::to_string(r) + ": expected " + number(scales[r]) +
                                  ", got " + number(e.outer(r));
                         });
  }
  rows->push_back(scale_comparison.row());
}

/// Names of stored answers and the built-in format that claims to equal them.
constexpr std::pair<const char*, const char*> kNvfp4Sources[] = {
    {"vllm", "nvfp4"},
    {"te", "nvfp4_te"},
    {"modelopt", "nvfp4_modelopt"},
    {"te_4over6_448_mae", "4over6_448_mae"},
    {"te_4over6_448_mse", "4over6_448_mse"},
    {"te_4over6_256_mae", "4over6_256_mae"},
    {"te_4over6_256_mse", "4over6_256_mse"},
};
constexpr std::pair<const char*, const char*> kRowSources[] = {
    {"int8", "int8"}, {"int16", "int16"}, {"e4m3", "fp8"}};

}  // namespace

std::vector<QuantCheckRow> check_quant_results(const std::filesystem::path& path) {
  const auto bytes = read_file(path);
  if (!bytes) throw std::runtime_error(path.string() + ": no such file");
  const Hdf5Reader file(path.string(), *bytes);
  std::vector<QuantCheckRow> rows;
  if (file.has("/seed") && file.has("/offset")) {
    check_philox_rounds<10>(file, &rows);
    check_philox_rounds<7>(file, &rows);
    check_philox_rounds<4>(file, &rows);
  } else {
    for (const std::string& group : file.members("/")) {
      if (file.has("/" + group + "/input")) check_float_format(file, group, &rows);
      if (!file.has("/" + group + "/x")) continue;
      for (const auto& [source, format] : kNvfp4Sources) {
        if (file.has("/" + group + "/" + source)) check_nvfp4(file, group, source, format, &rows);
      }
      for (const auto& [source, format] : kRowSources) {
        if (file.has("/" + group + "/" + source))
          check_row_scaled(file, group, source, format, &rows);
      }
    }
  }
  if (rows.empty()) {
    throw std::invalid_argument(
        path.string() +
        ": holds no vectors known here; expected groups with input and encode_*, philox4x32_*, or "
        "cases with x and nvfp4 or row-scaled codes");
  }
  return rows;
}

int check_quant(const std::filesystem::path& file) {
  const std::vector<QuantCheckRow> rows = check_quant_results(file);
  size_t width = 0;
  for (const QuantCheckRow& row : rows) width = std::max(width, row.what.size());
  int64_t compared = 0;
  int64_t equal = 0;
  for (const QuantCheckRow& row : rows) {
    compared += row.compared;
    equal += row.equal;
    if (row.compared == 0) {
      std::printf("%-*s  not compared: %s\n", static_cast<int>(width), row.what.c_str(),
                  row.note.c_str());
    } else {
      std::printf("%-*s  %lld of %lld equal\n", static_cast<int>(width), row.what.c_str(),
                  static_cast<long long>(row.equal), static_cast<long long>(row.compared));
    }
    if (!row.worst.empty()) std::printf("  worst: %s\n", row.worst.c_str());
  }
  std::printf("%s: %lld of %lld equal\n", file.string().c_str(), static_cast<long long>(equal),
              static_cast<long long>(compared));
  return equal == compared && compared > 0 ? 0 : 1;
}

}  // namespace replayeval
