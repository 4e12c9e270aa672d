// `replayeval bench decode --device cuda --model DIR`: a whole model decoding as captured steps.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>

#include "harness/bench_gpu.h"

namespace replayeval {

/// Prints, for each state, the time of a step of `options.rows` rows over whole windows (rows
/// staggered over them, `context` tokens before the first step) beside the time that its bytes need
/// at the read bandwidth of the same run: weights and logits once, checkpoints, ring and
/// convolution inputs, keys and values. Returns 0. Throws std::invalid_argument for a model or
/// state that the decoder refuses, std::runtime_error without a GPU or memory.
int run_decoder_bench(const std::filesystem::path& model, const GpuBenchOptions& options,
                      int64_t context, std::FILE* out);

}  // namespace replayeval
