// `replayeval bench decode --sweep ...` and `--model DIR`: the traffic of single-token decoding by
// batch and window beside what a GPU takes for it, and the context length at which a model's
// key-value cache moves more bytes than its recurrent state.
#pragma once

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "harness/bench_gpu.h"
#include "models/model.h"

namespace replayeval {

/// Operations of all products of one token but the LM head's: two for each weight.
double product_operations(const ModelSpec& model);

/// The shape of a recurrent layer; false for a mixer without state.
bool decode_layer(const Mixer& mixer, DecodeWorkload* workload);

/// `sweep` is batch=FROM..TO or window=FROM..TO; powers of two between the two, and both ends.
/// Prints, for each shape and state, measured microseconds beside those that the bytes need at the
/// read bandwidth of the same run, the share of the conventional step's bytes, and the window with
/// the fewest bytes. Throws std::invalid_argument for another sweep, std::runtime_error without a
/// GPU.
int run_decode_sweep(const std::string& sweep, const GpuBenchOptions& options, std::FILE* out);

/// For each state: bytes of one sequence's recurrent layers in a step (BF16 activations), bytes of
/// its key-value caches per position of context, and the context where both are equal
/// (ReplaySSM C.2). From the shapes; needs no GPU.
int print_model_traffic(const std::filesystem::path& model, const GpuBenchOptions& options,
                        std::FILE* out);

}  // namespace replayeval
