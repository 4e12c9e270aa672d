#include "quant/properties.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "quant/packed_layout.h"
#include "quant/random.h"

namespace replayeval {
namespace {

void require_table(const StateFormat& format) {
  if (format.library) {
    throw std::invalid_argument(format.name +
                                ": a library codec has no table of element values; expected a "
                                "built-in or described format");
  }
}

/// The element's grid neighbours of x inside its range: the rule's `low` and `high`.
void neighbours(const std::vector<float>& values, float x, float* low, float* high) {
  auto above = std::upper_bound(values.begin(), values.end(), x);
  if (above == values.begin() || x >= values.back()) {
    *low = *high = above == values.begin() ? values.front() : values.back();
    return;
  }
  float left = *(above - 1);
  if (left == x) {
    *low = *high = left;
  } else if (x < 0) {
    *low = *above;
    *high = left;
  } else {
    *low = left;
    *high = *above;
  }
}

double uniform_unit(uint32_t word) { return (static_cast<double>(word) + 0.5) * 0x1p-32; }

}  // namespace

ElementProperties element_properties(const StateFormat& format) {
  require_table(format);
  const FormatDescriptor& d = format.descriptor;
  ElementProperties p;
  p.code_bits = d.code_bits;
  p.random_bits = d.random_bits;
  if (d.element == ElementKind::fp32) {
    p.largest = kFloatMax;
    p.lowest = -p.largest;
    p.min_normal = 0x1p-126;
    p.smallest = p.min_subnormal = 0x1p-149;
    p.has_infinity = p.has_nan = true;
    p.unit_roundoff = 0x1p-24;
    p.widest_half_gap = 0x1p103 / p.largest;
  } else {
    uint32_t codes =
        d.element == ElementKind::values ? static_cast<uint32_t>(d.list.count) : 1u << d.code_bits;
    if (d.element == ElementKind::integer) {
      for (int q = d.lowest; q <= d.highest; ++q) p.values.push_back(static_cast<float>(q));
    } else {
      for (uint32_t code = 0; code < codes; ++code) {
        float v = decode_element(d, code);
        if (std::isfinite(v)) p.values.push_back(v == 0 ? 0.0f : v);
      }
    }
    std::sort(p.values.begin(), p.values.end());
    p.values.erase(std::unique(p.values.begin(), p.values.end()), p.values.end());
    p.lowest = p.values.front();
    p.largest = d.element_max;
    double widest = 0;
    p.smallest = p.largest;
    for (size_t i = 0; i < p.values.size(); ++i) {
      double v = std::fabs(static_cast<double>(p.values[i]));
      if (v > 0) p.smallest = std::min(p.smallest, v);
      if (i > 0) widest = std::max(widest, static_cast<double>(p.values[i]) - p.values[i - 1]);
    }
    p.widest_half_gap = 0.5 * widest / p.largest;
    if (d.element == ElementKind::floating) {
      const FloatFormat& f = d.number;
      p.has_infinity = f.inf_code != kNoCode;
      p.has_nan = f.nan_code != kNoCode;
      p.min_normal = std::ldexp(1.0, 1 - f.bias);
      p.min_subnormal = f.mantissa_bits > 0 ? std::ldexp(1.0, 1 - f.bias - f.mantissa_bits) : 0;
      p.unit_roundoff = std::ldexp(1.0, -(f.mantissa_bits + 1));
    }
  }
  p.dynamic_range_bits = std::log2(p.largest / p.smallest);
  return p;
}

EncodingError measure_error(const StateCodec& codec, StateShape shape,
                            std::span<const float> states, uint64_t seed) {
  const StateFormat& format = *codec.format;
  check_shape(format, shape);
  size_t n = static_cast<size_t>(shape.elements());
  if (states.empty() || states.size() % n != 0) {
    throw std::invalid_argument(
        format.name + ": " + std::to_string(states.size()) + " numbers are not whole states of [" +
        std::to_string(shape.head_dim) + ", " + std::to_string(shape.state_dim) + "]");
  }
  float span_amax = state_amax(states.data(), static_cast<int64_t>(states.size()));
  std::vector<std::byte> packed(packed_bytes(format, shape));
  std::vector<float> decoded(n);
  EncodeHealth health;
  double error2 = 0, norm2 = 0, error = 0, inward = 0, norm1 = 0, worst = 0, most = 0;
  uint64_t finite = 0;
  for (size_t start = 0; start < states.size(); start += n) {
    const float* x = states.data() + start;
    std::vector<std::byte> memory(memory_bytes(format, shape));
    RandomKey key;
    key.seed = seed;
    key.head = static_cast<uint32_t>(start / n);
    encode_head(codec, shape, x, key, span_amax, packed.data(),
                memory.empty() ? nullptr : memory.data(), &health);
    decode_head(format, shape, packed.data(), decoded.data());
    for (size_t i = 0; i < n; ++i) {
      if (!std::isfinite(x[i]) || !std::isfinite(decoded[i])) continue;
      double v = x[i];
      double e = decoded[i] - v;
      ++finite;
      error2 += e * e;
      norm2 += v * v;
      error += e;
      norm1 += std::fabs(v);
      inward += v < 0 ? e : v > 0 ? -e : 0;
      worst = std::max(worst, std::fabs(e));
      most = std::max(most, std::fabs(v));
    }
  }
  EncodingError result;
  result.elements = health.elements;
  double count = static_cast<double>(std::max<uint64_t>(finite, 1));
  double rms = std::sqrt(norm2 / count);
  result.relative_rms = norm2 > 0 ? std::sqrt(error2 / norm2) : 0;
  result.mean_error = rms > 0 ? error / count / rms : 0;
  result.shrink = norm1 > 0 ? inward / norm1 : 0;
  result.worst = most > 0 ? worst / most : 0;
  double all = static_cast<double>(health.elements);
  result.non_finite = static_cast<double>(health.non_finite) / all;
  result.saturated = static_cast<double>(health.saturated) / all;
  result.clipped = static_cast<double>(health.clipped) / all;
  result.vanished = static_cast<double>(health.vanished) / all;
  return result;
}

std::vector<StochasticPoint> measure_stochastic(const StateFormat& format, std::span<const float> x,
                                                int draws, uint64_t seed) {
  require_table(format);
  const FormatDescriptor& d = format.descriptor;
  if (d.element == ElementKind::fp32)
    throw std::invalid_argument(format.name +
                                ": fp32 rounds nothing; expected a format of fewer bits");
  std::vector<float> values = element_properties(format).values;
  std::vector<StochasticPoint> points;
  for (size_t i = 0; i < x.size(); ++i) {
    StochasticPoint p;
    p.x = x[i];
    neighbours(values, x[i], &p.low, &p.high);
    double gap = static_cast<double>(p.high) - p.low;
    double scale = std::ldexp(1.0, d.random_bits);
    p.fraction = gap != 0 ? (static_cast<double>(x[i]) - p.low) / gap : 0;
    p.probability = std::floor(p.fraction * scale) / scale;
    p.expected_mean = p.low + p.probability * gap;
    p.expected_variance = p.probability * (1 - p.probability) * gap * gap;
    double sum = 0, sum2 = 0;
    for (int draw = 0; draw < draws; ++draw) {
      PhiloxKey key;
      key.key0 = static_cast<uint32_t>(seed);
      key.key1 = static_cast<uint32_t>(seed >> 32);
      key.counter1 = static_cast<uint32_t>(i >> 16);
      key.counter2 = static_cast<uint32_t>(draw);
      uint32_t word = random_word(key, 0, static_cast<int>(i & 0xFFFF));
      double e =
          decode_element(d, encode_element(d, x[i], true, word)) - static_cast<double>(p.low);
      sum += e;
      sum2 += e * e;
    }
    double mean = sum / draws;
    p.mean = p.low + mean;
    p.variance = draws > 1 ? std::max(0.0, (sum2 - sum * mean) / (draws - 1)) : 0;
    points.push_back(p);
  }
  return points;
}

Accumulation accumulated_error(double alpha, double mean, double variance, int64_t steps) {
  if (!(alpha >= 0 && alpha <= 1))
    throw std::invalid_argument("accumulated_error: decay is " + std::to_string(alpha) +
                                ", expected 0 to 1");
  auto sum = [&](double ratio, double term) {
    if (term == 0) return 0.0;
    double t = static_cast<double>(steps);
    if (steps < 0) return term / (1 - ratio);
    return ratio < 1 ? term * -std::expm1(t * std::log(ratio)) / (1 - ratio) : term * t;
  };
  return {sum(alpha, mean), sum(alpha * alpha, variance)};
}

std::vector<float> synthetic_states(SyntheticData kind, StateShape shape, int matrices,
                                    uint64_t seed) {
  std::vector<float> x(static_cast<size_t>(shape.elements()) * static_cast<size_t>(matrices));
  PhiloxKey key;
  key.key0 = static_cast<uint32_t>(seed);
  key.key1 = static_cast<uint32_t>(seed >> 32);
  for (size_t i = 0; i < x.size(); ++i) {
    PhiloxWords w = philox4x32<10>(static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), 0, 0,
                                   key.key0, key.key1);
    double u = uniform_unit(w.word[0]), v = uniform_unit(w.word[1]);
    constexpr double kTwoPi = 6.283185307179586;
    double radius = std::sqrt(-2 * std::log(u));
    switch (kind) {
      case SyntheticData::gaussian:
        x[i] = static_cast<float>(radius * std::cos(kTwoPi * v));
        break;
      case SyntheticData::uniform:
        x[i] = static_cast<float>(2 * u - 1);
        break;
      case SyntheticData::heavy_tailed: {
        // z / sqrt(chi2_3 / 3): three degrees of freedom are one exponential (two) and one squared
        // normal.
        double second = std::sqrt(-2 * std::log(uniform_unit(w.word[2])));
        double normal = radius * std::cos(kTwoPi * v), other = radius * std::sin(kTwoPi * v);
        double chi2 = second * second + other * other;
        x[i] = static_cast<float>(normal / std::sqrt(chi2 / 3));
        break;
      }
    }
  }
  return x;
}

}  // namespace replayeval
