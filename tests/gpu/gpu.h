// Whether a test on the device can run here, and comparisons of what it left.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/decode_cuda.h"
#include "quant/cuda_support.h"

namespace replayeval::test {

/// False, with a line that says so, without a GPU.
inline bool gpu() {
  std::string reason;
  if (cuda_available(&reason)) return true;
  std::fprintf(stderr, "SKIPPED: %s\n", reason.c_str());
  return false;
}

/// Empty when equal, else the first byte that differs.
inline std::string different_bytes(const std::vector<std::byte>& got,
                                   const std::vector<std::byte>& want) {
  if (got.size() != want.size()) return "sizes differ";
  size_t first = got.size(), count = 0;
  for (size_t i = got.size(); i-- > 0;) {
    if (got[i] != want[i]) {
      first = i;
      ++count;
    }
  }
  if (count == 0) return {};
  std::ostringstream text;
  text << count << " of " << got.size() << " bytes differ, the first at " << first << ": got "
       << static_cast<int>(got[first]) << ", expected " << static_cast<int>(want[first]);
  return text.str();
}

/// Queues the steps one by one with `step`, then again from the same start as a graph of three
/// steps that runs seven times; `reset` puts everything back, `result` reads what the steps left.
template <class Reset, class Step, class Result>
void compare_captured(Reset&& reset, Step&& step, Result&& result) {
  reset();
  for (int i = 0; i < 21; ++i) step(CudaStream{});
  const std::vector<std::byte> want = result();
  reset();
  const CapturedSteps three([&](CudaStream stream) {
    for (int i = 0; i < 3; ++i) step(stream);
  });
  CHECK(different_bytes(result(), want) != "");
  for (int i = 0; i < 7; ++i) three.run();
  CHECK(different_bytes(result(), want) == "");
}

}  // namespace replayeval::test
