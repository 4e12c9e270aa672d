// What surrounds the elements of a state: residual, transform, column scales, zero points, blocks
// along head_dim, health counts; and the figures of quant/properties.h.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "quant/format_file.h"
#include "quant/packed_layout.h"
#include "quant/properties.h"
#include "quant/quantize.h"

using namespace replayeval;

namespace {

using FormatPointer = std::shared_ptr<const StateFormat>;

FormatPointer parse(const std::string& text) {
  return parse_format(text, "mine.yaml", std::string(REPLAYEVAL_SOURCE_DIR) + "/formats");
}

struct Result {
  std::vector<std::byte> packed;
  std::vector<float> decoded;
  EncodeHealth health;
};

Result round_trip(const FormatPointer& format, StateShape shape, const std::vector<float>& x,
                  Rounding rounding = Rounding::nearest_even,
                  std::vector<std::byte>* memory = nullptr, float span_amax = 0,
                  uint32_t position = 0) {
  Result r;
  r.packed.resize(packed_bytes(*format, shape));
  r.decoded.resize(x.size());
  RandomKey key;
  key.position = position;
  encode_head({format, rounding}, shape, x.data(), key, span_amax, r.packed.data(),
              memory ? memory->data() : nullptr, &r.health);
  decode_head(*format, shape, r.packed.data(), r.decoded.data());
  return r;
}

std::vector<float> normal_state(StateShape shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(shape.elements()));
  for (float& v : x) v = normal(random);
  return x;
}

}  // namespace

TEST_CASE("error feedback: what one encoding loses the next ones give back") {
  StateShape shape{16, 64};
  auto with =
      load_format_file(std::string(REPLAYEVAL_SOURCE_DIR) + "/formats/int8_residual_int4.yaml");
  auto without = find_format("int8");
  std::vector<float> x = normal_state(shape, 1);
  std::vector<std::byte> memory(memory_bytes(*with, shape));
  CHECK(memory_bytes(*without, shape) == 0);
  std::vector<double> sum(x.size(), 0);
  const int kRounds = 64;
  float largest_first = 0;
  for (int t = 0; t < kRounds; ++t) {
    Result r = round_trip(with, shape, x, Rounding::nearest_even, &memory);
    for (size_t i = 0; i < x.size(); ++i) sum[i] += r.decoded[i];
    if (t > 0) continue;
    Result plain = round_trip(without, shape, x);
    CHECK(r.packed == plain.packed);  // nothing to give back yet
    for (size_t i = 0; i < x.size(); ++i)
      largest_first = std::max(largest_first, std::fabs(plain.decoded[i] - x[i]));
  }
  // decoded_t = x + e_(t-1) - e'_t with e the stored and e' the true error, so the sum of n decoded
  // states is n x minus the last true error and plus what storing the residuals lost: each at most
  // half an INT4 step of a block, m / 14 with m the largest error, plus the rounding of its FP16
  // scale (2^-11 of 7 steps) and FP32 rounding of sums (2^-22 of the largest |x|, generously). An
  // error itself is at most half an INT8 step of sums that the residual has widened by itself: step
  // = amax / 127.
  float amax = state_amax(x.data(), shape.elements());
  double step = amax * 1.02 / 127;
  double stored = step / 2 * (1.0 / 14 + 0x1p-10);
  double bound = step / 2 + kRounds * (stored + amax * 0x1p-22);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i)
    worst = std::max(worst, std::fabs(sum[i] - kRounds * static_cast<double>(x[i])));
  INFO("worst " << worst << " bound " << bound << " plain would reach " << kRounds * largest_first);
  CHECK(worst <= bound);
  CHECK(bound < kRounds * largest_first / 3);  // and that is far less than without feedback

  // The residual in memory, behind a count of 16 bytes, is the error's own encoding with the bits
  // of role + 2.
  std::fill(memory.begin(), memory.end(), std::byte{0});
  Result first = round_trip(with, shape, x, Rounding::stochastic, &memory);
  std::vector<float> error(x.size());
  for (size_t i = 0; i < x.size(); ++i) error[i] = x[i] - first.decoded[i];
  std::vector<std::byte> again(packed_bytes(*with->residual, shape));
  EncodeHealth ignored;
  RandomKey key;
  key.role = static_cast<StateRole>(2);
  encode_head({with->residual, Rounding::stochastic}, shape, error.data(), key, 0, again.data(),
              nullptr, &ignored);
  CHECK(std::memcmp(again.data(), memory.data() + 16, again.size()) == 0);

  // A non-finite error is forgotten.
  x[3] = std::numeric_limits<float>::infinity();
  x[4] = std::nanf("");
  Result r = round_trip(with, shape, x, Rounding::stochastic, &memory);
  CHECK(r.health.non_finite == 2);
  x[3] = x[4] = 0;
  r = round_trip(with, shape, x, Rounding::stochastic, &memory);
  for (float v : r.decoded) REQUIRE(std::isfinite(v));
}

TEST_CASE("the Hadamard transform is orthonormal, its own inverse, and flattens an outlier") {
  StateShape shape{8, 32};
  for (const char* transform :
       {"hadamard", "{kind: hadamard, axis: head_dim}", "{kind: hadamard, size: 4}",
        "{kind: hadamard, axis: head_dim, size: 2}"}) {
    INFO(std::string(transform));
    // FP16 elements of a transform of small integers by a power-of-two factor are exact, so the
    // round trip must be.
    auto format = parse(std::string("element: fp16\ntransform: ") + transform);
    std::vector<float> x(static_cast<size_t>(shape.elements()));
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>(static_cast<int>(i * 7 % 9) - 4);
    Result r = round_trip(format, shape, x);
    bool exact_factor = std::string(transform).find("size: 4") != std::string::npos;
    for (size_t i = 0; i < x.size(); ++i) {
      // Otherwise: FP16's 2^-11 of a transformed number of at most 4 sqrt(32), 32 of them summed
      // with 1 / sqrt(32).
      double bound = exact_factor ? 0 : 0x1p-11 * 4 * 32;
      if (std::fabs(r.decoded[i] - x[i]) > bound)
        FAIL_CHECK("element " << i << ": " << r.decoded[i] << " expected " << x[i] << " within "
                              << bound);
    }
  }
  std::vector<float> outlier(static_cast<size_t>(shape.elements()), 0.25f);
  outlier[5] = 100;
  EncodingError plain =
      measure_error({find_format("int8"), Rounding::nearest_even}, shape, outlier, 1);
  EncodingError turned = measure_error(
      {parse("element: int8\nouter: {span: row}\ntransform: hadamard"), Rounding::nearest_even},
      shape, outlier, 1);
  CHECK(turned.relative_rms > 0);
  CHECK(turned.worst < plain.worst * 4);
  CHECK_THROWS_WITH_AS(
      packed_bytes(*parse("element: int8\nouter: {span: row}\ntransform: hadamard"),
                   StateShape{4, 80}),
      doctest::Contains("does not fit the axis of 80"), std::invalid_argument);
}

TEST_CASE("decoupled formats scale columns, then rows") {
  StateShape shape{16, 32};
  std::vector<float> x = normal_state(shape, 4);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] *= power_of_two(static_cast<int>(i % 32) - 16);  // columns of very different size
  for (size_t r = 0; r < 16; ++r) x[r * 32 + 9] = 0;
  for (const char* name : {"fp8_decoupled", "int8_decoupled"}) {
    INFO(std::string(name));
    auto format = find_format(name);
    Result r = round_trip(format, shape, x);
    PackedLayout l = packed_layout(format->descriptor, 16, 32);
    std::vector<float> columns(32);
    std::memcpy(columns.data(), r.packed.data() + l.columns, 128);
    std::vector<float> scaled(x.size());
    for (size_t c = 0; c < 32; ++c) {
      float most = 0;
      for (size_t i = 0; i < 16; ++i) most = std::max(most, std::fabs(x[i * 32 + c]));
      CHECK(columns[c] == (most > 0 ? most : 1.0f));
      for (size_t i = 0; i < 16; ++i) scaled[i * 32 + c] = x[i * 32 + c] / columns[c];
    }
    Result rows = round_trip(find_format(std::string(name).substr(0, std::string(name).find('_'))),
                             shape, scaled);
    for (size_t i = 0; i < x.size(); ++i) CHECK(r.decoded[i] == rows.decoded[i] * columns[i % 32]);
    CHECK(std::memcmp(r.packed.data(), rows.packed.data(), l.columns) == 0);
  }
}

TEST_CASE("zero points: an asymmetric block uses all its codes") {
  StateShape shape{4, 32};
  std::vector<float> x(static_cast<size_t>(shape.elements()));
  for (size_t i = 0; i < x.size(); ++i) x[i] = 10 + static_cast<float>(i % 16);  // 10 ... 25
  auto minimum = parse(
      "element: {integer: {from: 0, to: 15}}\nscale: {format: fp32, block: 16}\nzero_point: "
      "minimum");
  CHECK(round_trip(minimum, shape, x).decoded == x);
  CHECK(bits_per_element(*minimum, shape) == 4 + 64.0 / 16);
  auto midpoint = parse(
      "element: {values: [-7.5, -0.5, 0.5, 7.5]}\nscale: {format: fp32, block: {rows: 2, columns: "
      "16}}\nzero_point: {at: midpoint, format: fp16}");
  Result r = round_trip(midpoint, shape, x);
  CHECK(r.decoded[0] == 10);
  CHECK(r.decoded[15] == 25);
  CHECK(r.decoded[7] == 17);
  CHECK(bits_per_element(*midpoint, shape) == 2 + 48.0 / 32);
  // An odd state_dim takes the plain interpreter: 15 numbers 10 ... 24 in 16 codes, half a step off
  // at most.
  StateShape odd{4, 15};
  auto row = parse(
      "element: {integer: {from: 0, to: 15}}\nscale: {format: fp32, block: 15}\nzero_point: "
      "minimum");
  std::vector<float> y(static_cast<size_t>(odd.elements()));
  for (size_t i = 0; i < y.size(); ++i) y[i] = 10 + static_cast<float>(i % 15);
  const Result plain = round_trip(row, odd, y);
  for (size_t i = 0; i < y.size(); ++i)
    CHECK(std::fabs(plain.decoded[i] - y[i]) <= 0.5f * 14 / 15 + 1e-5f);
  x[0] = std::numeric_limits<float>::infinity();
  x[1] = std::nanf("");
  r = round_trip(minimum, shape, x);
  CHECK(r.health.non_finite == 2);
  CHECK(r.decoded[17] == 11);
}

TEST_CASE("blocks along head_dim equal blocks along state_dim of the transposed state") {
  StateShape shape{32, 8}, turned{8, 32};
  std::vector<float> x = normal_state(shape, 6), y(x.size());
  for (size_t r = 0; r < 32; ++r) {
    for (size_t c = 0; c < 8; ++c) y[c * 32 + r] = x[r * 8 + c];
  }
  Result down = round_trip(parse("element: e2m1\nscale: {format: e4m3, block: {axis: head_dim, "
                                 "size: 16}}\nouter: {span: head}"),
                           shape, x);
  Result along = round_trip(find_format("nvfp4"), turned, y);
  for (size_t r = 0; r < 32; ++r) {
    for (size_t c = 0; c < 8; ++c) CHECK(down.decoded[r * 8 + c] == along.decoded[c * 32 + r]);
  }
}

TEST_CASE(
    "spans: a scale a layer is one scale for heads of any size, a scale a row couples nothing") {
  StateShape shape{4, 32};
  std::vector<float> x = normal_state(shape, 7), small = x;
  for (float& v : small) v *= 0x1p-10f;
  auto layer = format_with_span(find_format("nvfp4"), Span::layer);
  CHECK(needs_layer_amax(*layer));
  CHECK(!needs_layer_amax(*find_format("nvfp4")));
  float amax = state_amax(x.data(), shape.elements());
  PackedLayout l = packed_layout(layer->descriptor, 4, 32);
  Result a = round_trip(layer, shape, x, Rounding::nearest_even, nullptr, amax);
  Result b = round_trip(layer, shape, small, Rounding::nearest_even, nullptr, amax);
  CHECK(std::memcmp(a.packed.data() + l.outer, b.packed.data() + l.outer, 4) == 0);
  CHECK(a.packed ==
        round_trip(find_format("nvfp4"), shape, x).packed);  // the same maximum: the same bits
  auto row = format_with_span(find_format("nvfp4"), Span::row);
  std::vector<float> mixed = x;
  for (size_t c = 0; c < 32; ++c) mixed[32 + c] *= 0x1p20f;
  Result alone = round_trip(row, shape, x), beside = round_trip(row, shape, mixed);
  for (size_t i = 0; i < 32; ++i) CHECK(alone.decoded[i] == beside.decoded[i]);
  CHECK_THROWS_AS(format_with_span(find_format("fp16"), Span::head), std::invalid_argument);
  CHECK_THROWS_AS(format_with_span(find_format("fp8_decoupled"), Span::layer),
                  std::invalid_argument);
  CHECK_THROWS_AS(format_with_scale_rounding(find_format("fp8"), ScaleRounding::up),
                  std::invalid_argument);
  CHECK_THROWS_AS(format_with_overflow_to_infinity(find_format("fp8")), std::invalid_argument);
}

TEST_CASE("health counts what happened") {
  const float infinity = std::numeric_limits<float>::infinity();
  StateShape shape{1, 32};
  std::vector<float> x(32, 1.0f);
  x[0] = 70000;
  x[1] = -infinity;
  x[2] = std::nanf("");
  x[3] = 65504;
  EncodeHealth h = round_trip(find_format("fp16"), shape, x).health;
  CHECK(h.elements == 32);
  CHECK(h.non_finite == 2);
  CHECK(h.saturated == 2);
  CHECK(h.clipped == 0);
  CHECK(round_trip(format_with_overflow_to_infinity(find_format("fp16")), shape, x)
            .health.saturated == 0);
  CHECK(std::isinf(
      round_trip(format_with_overflow_to_infinity(find_format("fp16")), shape, x).decoded[0]));

  // NVFP4: block 0 has a maximum of 2688 x 2^-20 of the head's, below what an E4M3 scale can hold;
  // the other block defines the head's scale.
  std::vector<float> wide(32, 1e-7f);
  wide[5] = 0;
  for (size_t i = 16; i < 32; ++i) wide[i] = 1.0f;
  h = round_trip(find_format("nvfp4"), shape, wide).health;
  CHECK(h.vanished == 15);
  CHECK(h.clipped == 0);

  // A block whose scale rounds down clips its largest element: amax 17.0 of 16-multiples -> 17/6
  // with the outer scale at 1 = 2.8333 -> 2.75.
  auto unscaled = parse("element: e2m1\nscale: {format: e4m3, block: 16}");
  std::vector<float> clip(32, 1.0f);
  clip[4] = -17;
  h = round_trip(unscaled, shape, clip).health;
  CHECK(h.clipped == 1);
  CHECK(round_trip(format_with_scale_rounding(unscaled, ScaleRounding::up), shape, clip)
            .health.clipped == 0);
  CHECK(round_trip(find_format("fp8"), shape, clip).health.clipped == 0);
  CHECK(round_trip(parse("element: e4m3\nouter: {span: row}\ndivisor: 896"), shape, clip)
            .health.clipped == 1);
}

TEST_CASE("properties of known formats") {
  ElementProperties p = element_properties(*find_format("fp8"));
  CHECK(p.values.size() == 253);  // 256 codes, two NaN, two zeros
  CHECK(p.largest == 448);
  CHECK(p.min_normal == 0x1p-6);
  CHECK(p.min_subnormal == 0x1p-9);
  CHECK(p.smallest == 0x1p-9);
  CHECK(p.unit_roundoff == 0x1p-4);
  CHECK(p.dynamic_range_bits == doctest::Approx(std::log2(448 * 512.0)));
  CHECK(p.widest_half_gap == doctest::Approx(16.0 / 448));
  CHECK(p.has_nan);
  CHECK(!p.has_infinity);
  p = element_properties(*find_format("nvfp4"));
  CHECK(p.values ==
        std::vector<float>{-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6});
  CHECK(element_properties(*find_format("int8")).values.size() == 255);
  CHECK(element_properties(*find_format("fp32")).unit_roundoff == 0x1p-24);
}

TEST_CASE("measured errors agree with the figures of the reference page") {
  // Gaussian data, NVFP4: relative RMS 0.095 rtn, 0.138 sr, 0.149 sr with scales rounded up; 3.5 %
  // of the elements clipped with scales to nearest. Mean shrink: 0.73 % rtn; 0.19 % sr, 0 with
  // scales rounded up, for exact random numbers. Here n = 8 bits give floor(256 d) / 256 in place
  // of d: 1/512 of a gap toward zero. In the block of 16 the mean gap is about 0.37 of the mean
  // magnitude, so 0.07 % more. The standard error of a mean shrink is 0.149 / sqrt(262144) / sqrt(2
  // / pi) = 0.00036; bounds are 4 of them, and half a digit of the page elsewhere.
  StateShape shape{128, 128};
  std::vector<float> x = synthetic_states(SyntheticData::gaussian, shape, 16, 5);
  double mean = 0, square = 0;
  for (float v : x) {
    mean += v;
    square += static_cast<double>(v) * v;
  }
  double n = static_cast<double>(x.size());
  CHECK(std::fabs(mean / n) < 4 / std::sqrt(n));
  CHECK(std::fabs(square / n - 1) < 4 * std::sqrt(2 / n));
  auto nvfp4 = find_format("nvfp4");
  EncodingError rtn = measure_error({nvfp4, Rounding::nearest_even}, shape, x, 1);
  EncodingError sr = measure_error({nvfp4, Rounding::stochastic}, shape, x, 1);
  EncodingError up = measure_error(
      {format_with_scale_rounding(nvfp4, ScaleRounding::up), Rounding::stochastic}, shape, x, 1);
  auto fine = parse(
      "element: {format: e2m1, random_bits: 24}\nscale: {format: e4m3, block: 16}\nouter: {span: "
      "head}");
  EncodingError exact = measure_error({fine, Rounding::stochastic}, shape, x, 1);
  INFO("rtn " << rtn.relative_rms << " " << rtn.shrink << ", sr " << sr.relative_rms << " "
              << sr.shrink << " clipped " << sr.clipped << ", up " << up.relative_rms << " "
              << up.shrink);
  CHECK(rtn.relative_rms == doctest::Approx(0.095).epsilon(0.01));
  CHECK(sr.relative_rms == doctest::Approx(0.138).epsilon(0.01));
  CHECK(up.relative_rms == doctest::Approx(0.149).epsilon(0.01));
  CHECK(std::fabs(sr.clipped - 0.035) < 0.001);
  CHECK(up.clipped == 0);
  CHECK(std::fabs(rtn.shrink - 0.0073) < 0.0005);
  CHECK(std::fabs(sr.shrink - 0.0026) < 4 * 0.00036);
  CHECK(std::fabs(up.shrink - 0.0007) < 4 * 0.00036);
  CHECK(std::fabs(exact.shrink - 0.0019) < 4 * 0.00036);
  CHECK(rtn.elements == x.size());
  CHECK(rtn.non_finite == 0);
}

TEST_CASE("accumulated error equals the recurrence it is the sum of") {
  double mean = 0, variance = 0;
  for (int t = 0; t < 40; ++t) {
    mean = 0.93 * mean + 0.25;
    variance = 0.93 * 0.93 * variance + 2.0;
  }
  Accumulation a = accumulated_error(0.93, 0.25, 2.0, 40);
  CHECK(a.mean == doctest::Approx(mean).epsilon(1e-12));
  CHECK(a.variance == doctest::Approx(variance).epsilon(1e-12));
  a = accumulated_error(0.93, 0.25, 2.0);
  CHECK(a.mean == doctest::Approx(0.25 / 0.07).epsilon(1e-12));
  CHECK(a.variance == doctest::Approx(2.0 / (1 - 0.93 * 0.93)).epsilon(1e-12));
  CHECK(accumulated_error(1, 0.5, 0, 10).mean == 5);
  CHECK(std::isinf(accumulated_error(1, 0.5, 0).mean));
  CHECK(accumulated_error(1, 0.5, 0).variance == 0);
  CHECK(accumulated_error(0, 0.5, 3, 10).mean == 0.5);
  CHECK_THROWS_AS(accumulated_error(1.5, 0, 0), std::invalid_argument);
}
