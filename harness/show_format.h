// `replayeval format`: what can be said about a number format before a model runs.
#pragma once

#include <cstdint>
#include <string>

#include "quant/quantize.h"

namespace replayeval {

struct ShowFormatOptions {
  std::string format;  // built-in name, or a YAML file
  StateShape shape{64, 128};
  uint64_t seed = 1;
  bool json = false;
  std::string states;  // state dumps of a run or another engine (file, folder or run folder):
                       // errors on them too
  std::string run;  // a run with state_error_every: what errors grow to in each head, predicted and
                    // measured
  std::string output;  // HDF5 file to save everything in; empty: none
};

/// The text of show_format: element, bits an element, error of both roundings on synthetic states,
/// measured against predicted statistics of stochastic rounding, and what an error of every flush
/// grows to in a decaying state. Throws std::invalid_argument for an unknown format, and for one
/// that cannot hold the shape.
std::string format_text(const ShowFormatOptions& options);

/// Prints format_text; returns 0.
int show_format(const ShowFormatOptions& options);

}  // namespace replayeval
