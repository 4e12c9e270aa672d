// `replayeval bench`: rates of the kernels that a run uses, and where a run's time goes, each
// beside a yardstick measured in the same process (LibTorch's SGEMM, memcpy), so that the printed
// ratios mean something on a noisy machine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace replayeval {

struct BenchOptions {
  std::string what = "all";  // all, formats, kernels, job, growth
  int threads = 0;           // 0: all cores
  std::filesystem::path model = "models/mini-mamba2";
  std::filesystem::path data = "datasets/sample";
  int64_t tokens = 8192;            // of the job
  int64_t longest = 32768;          // of the growth table
  std::vector<std::string> states;  // of the job; empty: the quickstart's
  bool single = false;              // on a GPU: single tokens in the middle of the job
};

/// `bench job --device cuda`: a job of `tokens` tokens in BF16 on the GPU with the nine rows of the
/// standard job (or `states`); time by kind of work, rates beside the device's matrix rate, memory
/// beside what weights, caches, states and a chunk need, and the time of single tokens around the
/// middle. A model without a tokenizer gets random tokens. Throws as run_bench and
/// std::runtime_error without a GPU.
int run_device_job_bench(const BenchOptions& options);

/// Prints the tables. Returns 0. Throws std::invalid_argument for an unknown `what`.
int run_bench(const BenchOptions& options);

}  // namespace replayeval
