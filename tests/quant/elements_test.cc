// Properties of single elements that hold for every row of the table and every list: round trips,
// ties and neighbours, nearest value by brute force, frequency and variance of stochastic rounding.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "quant/format_file.h"
#include "quant/packed_layout.h"
#include "quant/properties.h"
#include "quant/quantize.h"
#include "quant/random.h"

using namespace replayeval;

namespace {

const float kInfinity = std::numeric_limits<float>::infinity();

StateFormat element_format(const FormatDescriptor& descriptor) {
  StateFormat format;
  format.name = "test";
  format.descriptor = descriptor;
  finish_format(&format, "test");
  return format;
}

ValueList make_list(const std::vector<float>& values) {
  return make_value_list(values, [](size_t i) { return "value " + std::to_string(i); });
}

/// Elements of every kind: the table, odd floats, integers, lists.
std::vector<std::pair<std::string, StateFormat>> elements() {
  std::vector<std::pair<std::string, StateFormat>> list;
  auto add = [&](const std::string& name, const FormatDescriptor& d) {
    list.emplace_back(name, element_format(d));
  };
  FormatDescriptor d;
  d.element = ElementKind::floating;
  for (const NamedFloatFormat& f : kFloatFormats) {
    d.number = f.format;
    add(f.name, d);
  }
  d.number = {5, 2, 140, 0x7F, kNoCode, kNoCode, 16, true};  // reaches into FP32's subnormals
  add("e5m2 bias 140", d);
  d.number = {4, 0, 3, 0xF, kNoCode, kNoCode, 16, true};  // powers of two only
  add("e4m0", d);
  d.number = {1, 5, 0, 0x3F, kNoCode, kNoCode, 16, true};
  add("e1m5", d);
  d = FormatDescriptor{};
  d.element = ElementKind::integer;
  for (auto [lowest, highest] : {std::pair{-127, 127}, std::pair{-7, 7}, std::pair{-8, 7},
                                 std::pair{0, 15}, std::pair{-1, 1}}) {
    d.lowest = lowest;
    d.highest = highest;
    add("integers to " + std::to_string(highest), d);
  }
  d = FormatDescriptor{};
  d.element = ElementKind::values;
  d.list = make_list({-1, 0, 1});
  add("ternary", d);
  d.list = make_list({-1, 1});
  add("sign", d);
  d.list = make_list({0.1f, 0.3f, 2, 1e20f});
  add("positive list", d);
  std::vector<float> log_values = {0};
  for (int i = -20; i <= 20; ++i) {
    log_values.push_back(std::pow(1.37f, static_cast<float>(i)));
    log_values.push_back(-log_values.back());
  }
  std::sort(log_values.begin(), log_values.end());
  d.list = make_list(log_values);
  add("logarithmic", d);
  return list;
}

/// (code, value) of the finite codes, ascending; -0 left out.
std::vector<std::pair<float, uint32_t>> table_of(const FormatDescriptor& d) {
  std::vector<std::pair<float, uint32_t>> table;
  if (d.element == ElementKind::integer) {
    uint32_t mask = (1u << storage_bits(d.code_bits)) - 1u;
    for (int q = d.lowest; q <= d.highest; ++q)
      table.emplace_back(static_cast<float>(q), static_cast<uint32_t>(q) & mask);
    return table;
  }
  uint32_t count =
      d.element == ElementKind::values ? static_cast<uint32_t>(d.list.count) : 1u << d.code_bits;
  for (uint32_t code = 0; code < count; ++code) {
    float v = decode_element(d, code);
    if (std::isfinite(v) && !(v == 0 && std::signbit(v))) table.emplace_back(v, code);
  }
  std::sort(table.begin(), table.end());
  return table;
}

/// Whether a tie between neighbours i and i + 1 goes up in value, by "ties to the even code": of
/// the magnitude for floats, of the integer, of the index in a list.
bool tie_goes_up(const FormatDescriptor& d, const std::vector<std::pair<float, uint32_t>>& table,
                 size_t i) {
  if (d.element == ElementKind::values) return (i + 1) % 2 == 0;
  if (d.element == ElementKind::integer) return static_cast<int>(table[i + 1].first) % 2 == 0;
  uint32_t mask = (1u << d.number.magnitude_bits()) - 1u;
  return (table[i + 1].second & mask) % 2 == 0;
}

}  // namespace

TEST_CASE("every code of every element comes back") {
  for (auto& [name, format] : elements()) {
    const FormatDescriptor& d = format.descriptor;
    INFO(name);
    for (auto [value, code] : table_of(d)) {
      uint32_t back = encode_element(d, value, false, 0);
      if (back != code)
        FAIL_CHECK("code " << code << " of value " << value << " came back as " << back);
      // Without a discarded fraction no random bits can move it.
      back = encode_element(d, value, true, 0xFFFFFFFFu);
      if (back != code)
        FAIL_CHECK("code " << code << " of value " << value << " was moved by random bits to "
                           << back);
    }
    CHECK(decode_element(d, encode_element(d, -0.0f, false, 0)) ==
          decode_element(d, encode_element(d, 0.0f, false, 0)));
  }
}

TEST_CASE("ties go to the even code and their FP32 neighbours to the nearer value") {
  for (auto& [name, format] : elements()) {
    const FormatDescriptor& d = format.descriptor;
    INFO(name);
    auto table = table_of(d);
    size_t ties = 0;
    for (size_t i = 0; i + 1 < table.size(); ++i) {
      double middle = (static_cast<double>(table[i].first) + table[i + 1].first) / 2;
      float x = static_cast<float>(middle);
      auto expect = [&](float input, float value) {
        float rounded = decode_element(d, encode_element(d, input, false, 0));
        if (rounded != value) {
          FAIL_CHECK("input " << input << " between " << table[i].first << " and "
                              << table[i + 1].first << " gave " << rounded << ", expected "
                              << value);
        }
      };
      // Middles of table entries are exact in FP64 here; where FP32 cannot hold them there is no
      // tie.
      float below = static_cast<double>(x) < middle ? x : std::nextafter(x, -kInfinity);
      float above = static_cast<double>(x) > middle ? x : std::nextafter(x, kInfinity);
      expect(below, table[i].first);
      expect(above, table[i + 1].first);
      if (static_cast<double>(x) == middle) {
        ++ties;
        expect(x, table[i + (tie_goes_up(d, table, i) ? 1 : 0)].first);
      }
    }
    // FP32 holds every midpoint of formats of at most 16 bits within its normal range.
    bool all_ties = d.element == ElementKind::integer ||
                    (d.element == ElementKind::floating && d.number.bias <= 127);
    if (all_ties) CHECK(ties == table.size() - 1);
    // Past the ends: saturation. NaN: a NaN, or where there is none the largest float, or the code
    // nearest to 0.
    CHECK(decode_element(d, encode_element(d, kInfinity, false, 0)) == table.back().first);
    CHECK(decode_element(d, encode_element(d, -kInfinity, false, 0)) == table.front().first);
    CHECK(decode_element(d, encode_element(d, kInfinity, true, 0xFFFFFFFFu)) == table.back().first);
    for (bool stochastic : {false, true}) {
      float nan = decode_element(d, encode_element(d, std::nanf(""), stochastic, 0x80000000u));
      if (d.element == ElementKind::floating) {
        CHECK((d.number.nan_code != kNoCode ? std::isnan(nan) : nan == table.back().first));
      } else {
        CHECK(nan == decode_element(d, encode_element(d, 0.0f, false, 0)));
      }
    }
  }
}

TEST_CASE("a list's codes equal a brute-force nearest-value search on a million inputs") {
  auto nf4 = load_format_file(std::string(REPLAYEVAL_SOURCE_DIR) + "/formats/nf4.yaml");
  std::mt19937 random(17);
  std::normal_distribution<float> normal;
  std::vector<float> code_book;
  for (int i = 0; i < 200; ++i)
    code_book.push_back(std::exp(3 * normal(random)) * (i % 2 == 0 ? 1.0f : -1.0f));
  std::sort(code_book.begin(), code_book.end());
  for (const ValueList& list : {nf4->descriptor.list, make_list(code_book)}) {
    FormatDescriptor d;
    d.element = ElementKind::values;
    d.list = list;
    auto format = std::make_shared<StateFormat>(element_format(d));
    // Half a million each: normal numbers, and bit patterns near the thresholds.
    StateShape shape{500, 1000};
    std::vector<float> x(static_cast<size_t>(shape.elements()));
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = i % 2 == 0 ? 2 * normal(random) * (i % 3 == 0 ? 10.0f : 1.0f)
                        : bits_float(float_bits(list.thresholds[random() % (list.count - 1)]) +
                                     random() % 5 - 2);
    }
    std::vector<std::byte> packed(packed_bytes(*format, shape));
    EncodeHealth health;
    encode_head({format, Rounding::nearest_even}, shape, x.data(), RandomKey{}, 0, packed.data(),
                nullptr, &health);
    size_t wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      // FP64 differences of FP32 numbers of this range are exact enough to order: they are exact
      // below 2^29 of ratio, and a tie needs equal ones.
      int best = 0;
      for (int k = 1; k < list.count; ++k) {
        long double a = std::fabs(static_cast<long double>(x[i]) - list.values[k]);
        long double b = std::fabs(static_cast<long double>(x[i]) - list.values[best]);
        if (a < b || (a == b && k % 2 == 0)) best = k;
      }
      uint32_t code = list.count <= 16 ? static_cast<uint32_t>(packed[i / 2]) >> (4 * (i % 2)) & 15u
                                       : static_cast<uint32_t>(packed[i]);
      if (code != static_cast<uint32_t>(best) && wrong++ == 0) {
        MESSAGE("x " << x[i] << " bits " << float_bits(x[i]) << " got code " << code << " ("
                     << list.values[code] << "), nearest is " << best << " (" << list.values[best]
                     << ")");
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("stochastic rounding has the rule's frequency and variance") {
  // The number k of roundups in n draws is binomial: |k - n p| <= 4 sqrt(n p (1 - p)) with
  // probability 0.99994 a point, and the sample variance of a two-valued variable is k (n - k) / (n
  // (n - 1)) of the gap's square, a function of k. Fixed seed: no flakiness.
  const int kDraws = 20000;
  std::mt19937 random(23);
  int points = 0, outside = 0;
  double worst = 0;
  for (auto& [name, format] : elements()) {
    auto table = table_of(format.descriptor);
    std::vector<float> x;
    for (int i = 0; i < 12; ++i) {
      size_t k = random() % (table.size() - 1);
      double u = std::generate_canonical<double, 32>(random);
      float v = static_cast<float>(table[k].first +
                                   u * (static_cast<double>(table[k + 1].first) - table[k].first));
      if (std::isfinite(v)) x.push_back(v);
    }
    for (const StochasticPoint& p : measure_stochastic(format, x, kDraws, 99)) {
      INFO(name << " x " << p.x << " between " << p.low << " and " << p.high);
      double gap = static_cast<double>(p.high) - p.low;
      if (gap == 0) {
        CHECK(p.mean == p.low);
        CHECK(p.variance == 0);
        continue;
      }
      CHECK(p.fraction >= 0);
      CHECK(p.fraction < 1);
      double n = kDraws, q = p.probability;
      double ups = (p.mean - p.low) / gap * n;
      double error = std::sqrt(n * q * (1 - q));
      // 1e-6: the value list's fraction is formed in FP32, so its floor may differ by one in 2^24.
      double deviation = std::fabs(ups - n * q) / (error + n * 0x1p-24 + 1e-9);
      worst = std::max(worst, deviation);
      ++points;
      outside += deviation > 4 ? 1 : 0;
      CHECK(deviation <= 5);
      double variance = ups * (n - ups) / (n * (n - 1)) * gap * gap;
      CHECK(p.variance == doctest::Approx(variance).epsilon(1e-6));
      CHECK(p.variance <= gap * gap / 4 * n / (n - 1) * (1 + 1e-9));
    }
  }
  MESSAGE(points << " points, worst deviation " << worst << " standard errors");
  CHECK(points > 150);
  CHECK(outside == 0);
}

TEST_CASE("random words follow the key of the definition") {
  // Given bits, given code: fp8_e4m3 of a constant, from Philox words recomputed from the
  // definition's counter.
  auto format = find_format("fp8_e4m3");
  StateShape shape{5, 21};
  std::vector<float> x(static_cast<size_t>(shape.elements()), 1.03f);
  std::vector<std::byte> packed(packed_bytes(*format, shape));
  EncodeHealth health;
  RandomKey key{0x0123456789ABCDEFull, 0x2ABCDEF1u, 7, 300, 123456, StateRole::read};
  encode_head({format, Rounding::stochastic}, shape, x.data(), key, 0, packed.data(), nullptr,
              &health);
  for (int r = 0; r < shape.head_dim; ++r) {
    for (int c = 0; c < shape.state_dim; ++c) {
      uint32_t column = static_cast<uint32_t>(c), row = static_cast<uint32_t>(r);
      PhiloxWords w = philox4x32<10>(column / 4 + 65536 * row, 300 + 65536 * 7, 123456,
                                     1 + 4 * 0x2ABCDEF1u, 0x89ABCDEFu, 0x01234567u);
      uint32_t expected = encode_float_stochastic(kE4m3, 1.03f, w.word[column % 4] >> 16, 16);
      CHECK(static_cast<uint32_t>(packed[static_cast<size_t>(r) * 21 + c]) == expected);
    }
  }
}
