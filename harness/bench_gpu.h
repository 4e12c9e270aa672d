// `replayeval bench decode` on a GPU: microseconds a layer and step of single-token decoding over
// whole flush cycles, bytes that must move, and the share of the read and copy bandwidth measured
// in the same run.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "kernels/gpu_timing.h"
#include "models/model.h"
#include "quant/state_format.h"

namespace replayeval {

struct GpuBenchOptions {
  int rows = 256;
  int window = 16;
  int layers = 4;  // whose states are used in turn
  int cycles = 3;
  DenseMode dense = DenseMode::fast;  // invariant: sums of decode steps as the CPU's
  std::vector<std::string> shapes;    // mamba2-h96, mamba2-h128, gdn-h32; empty: all
  std::vector<std::string>
      states;  // built-in formats, `recurrence/read`; empty: fp32, fp16+sr, nvfp4+sr, fp16+sr/nvfp4
};

/// Throws std::invalid_argument for rows, a window or a shape that cannot be.
void check_options(const GpuBenchOptions& options);
/// Names of the shapes that are asked for; throws std::invalid_argument for an unknown one.
std::vector<std::string> decode_shapes(const GpuBenchOptions& options);
/// How a state of this spelling is kept, with seed 1. Throws std::invalid_argument for a selection
/// of layers or heads, which a shape does not have.
HeadPlan decode_plan(const std::string& name, int window);
/// A layer of that shape.
DecodeWorkload decode_workload(const std::string& shape);

/// Prints a table to `out`. Returns 0, or 1 when a checkpoint differs from the host's. Throws
/// std::runtime_error without a GPU, std::invalid_argument for an unknown shape or format.
int run_gpu_decode_bench(const GpuBenchOptions& options, std::FILE* out);

/// Prints the time of a chunk of 512 tokens through one layer for the nine rows of the standard
/// job, together and each alone, and of the metrics over a vocabulary.
int run_gpu_kernel_bench(std::FILE* out);

/// A format as a file would give it, beside the built-in one of equal width and equal scales.
struct FormatTwin {
  std::string builtin;
  std::string name;
  std::string element;  // of the file
  bool same = false;    // as the built-in one's
};
const std::vector<FormatTwin>& format_twins();
std::shared_ptr<const StateFormat> twin_format(const FormatTwin& twin);

/// Prints times of formats from files beside those of the built-in ones: encoding and decoding
/// alone, a chunk through one layer, a decode step that reads them. Returns 0.
int run_gpu_format_bench(const GpuBenchOptions& options, std::FILE* out);

/// `bench WHAT --device cuda`: decode, kernels, kl and formats (which are parts of kernels) or all.
int run_gpu_bench(const std::string& what, const GpuBenchOptions& options, std::FILE* out);

}  // namespace replayeval
