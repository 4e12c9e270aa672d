// What can be said about a number format before a model runs: its values, its error on given
// states, the statistics of its stochastic rounding, and how an error of every flush accumulates in
// a decaying state (ReplaySSM §C.6). Plain numbers; printing is done elsewhere.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "quant/quantize.h"
#include "quant/state_format.h"

namespace replayeval {

/// Of the element alone, in its own units (before scales).
struct ElementProperties {
  int code_bits = 0;
  int random_bits = 0;
  std::vector<float>
      values;  // distinct finite values, ascending; empty for FP32, whose codes are too many
  double largest = 0;        // magnitude
  double lowest = 0;         // most negative value
  double smallest = 0;       // smallest magnitude above zero
  double min_normal = 0;     // floats; 0 otherwise
  double min_subnormal = 0;  // floats with subnormals; 0 otherwise
  bool has_infinity = false;
  bool has_nan = false;
  double dynamic_range_bits = 0;  // log2(largest / smallest)
  double unit_roundoff = 0;  // floats: 2^-(mantissa + 1), the largest relative error of rtn between
                             // min_normal and largest; 0 otherwise
  double widest_half_gap = 0;  // half the widest gap between neighbours, in units of `largest`
};

/// Throws std::invalid_argument for a library codec, whose element is not known.
ElementProperties element_properties(const StateFormat& format);

/// Error of decode(encode(x)) on states, over the finite elements.
struct EncodingError {
  uint64_t elements = 0;
  double relative_rms = 0;  // ||decoded - x|| / ||x||
  double mean_error = 0;    // mean of decoded - x, in units of the RMS of x
  double shrink = 0;  // sum of (|x| - decoded sign(x)) / sum of |x|: what acts like extra decay; 0
                      // for an unbiased format
  double worst = 0;   // largest |decoded - x| in units of the largest |x|
  double non_finite = 0;  // shares of all elements
  double saturated = 0;
  double clipped = 0;
  double vanished = 0;
};

/// Encodes and decodes `states`, matrices [head_dim, state_dim] one after the other, as head 0, 1,
/// ... of layer 0 at position 0. Every matrix starts with zero memory. A scale that spans the layer
/// covers all of them. Throws std::invalid_argument when the numbers are not whole matrices.
EncodingError measure_error(const StateCodec& codec, StateShape shape,
                            std::span<const float> states, uint64_t seed);

/// Stochastic rounding of one element value, measured and predicted.
struct StochasticPoint {
  float x = 0;
  float low = 0, high = 0;  // neighbours on the grid, |low| <= |high| unless they straddle 0; equal
                            // when x is on the grid
  double fraction = 0;      // d = (x - low) / (high - low)
  double probability = 0;   // floor(d 2^n) / 2^n of taking `high`
  double mean = 0;          // measured, of the rounded value
  double variance = 0;      // measured
  double expected_mean = 0;      // low + probability (high - low)
  double expected_variance = 0;  // probability (1 - probability) (high - low)^2
};

/// Rounds every x (in units of the element, inside its range) `draws` times with bits of the key
/// (seed, position = draw). Throws as element_properties, and for a format without stochastic
/// rounding.
std::vector<StochasticPoint> measure_stochastic(const StateFormat& format, std::span<const float> x,
                                                int draws, uint64_t seed);

/// Mean and variance of the accumulated error of S_t = alpha S_{t-1} + u_t when every encoding adds
/// an independent error of mean b and variance s2: b (1 - alpha^t) / (1 - alpha) and s2 (1 -
/// alpha^2t) / (1 - alpha^2); t < 0: the limit b / (1 - alpha), s2 / (1 - alpha^2). alpha = 1: t b
/// and t s2, infinite in the limit unless 0. 0 <= alpha <= 1, otherwise std::invalid_argument.
struct Accumulation {
  double mean = 0;
  double variance = 0;
};
Accumulation accumulated_error(double alpha, double mean, double variance, int64_t steps = -1);

enum class SyntheticData : uint8_t { gaussian, uniform, heavy_tailed };

/// Standard normal numbers, uniform ones in [-1, 1), or Student t with 3 degrees of freedom; a pure
/// function of the seed.
std::vector<float> synthetic_states(SyntheticData kind, StateShape shape, int matrices,
                                    uint64_t seed);

}  // namespace replayeval
