// Options of `bench` on a GPU, and the formats that it sets beside built-in ones.
#include "harness/bench_gpu.h"

#include <doctest/doctest.h>

#include <cstddef>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "quant/codec.h"
#include "quant/quantize.h"

namespace replayeval {
namespace {

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("options of a decode bench") {
  GpuBenchOptions options;
  CHECK_NOTHROW(check_options(options));
  CHECK(decode_shapes(options) == std::vector<std::string>{"mamba2-h96", "mamba2-h128", "gdn-h32"});
  options.shapes = {"gdn-h32"};
  CHECK(decode_shapes(options) == options.shapes);
  options.shapes.push_back("gdn-h31");
  CHECK(message_of([&] { check_options(options); }) ==
        "bench: unknown shape 'gdn-h31'; known: mamba2-h96 mamba2-h128 gdn-h32");
  options.shapes = {};
  options.rows = 0;
  CHECK(message_of([&] { check_options(options); }) == "bench: --rows: expected 1 or more, got 0");
  options.rows = 1;
  options.window = 65;
  CHECK(message_of([&] { check_options(options); }) == "bench: --window: expected 1 to 64, got 65");
  CHECK(message_of([&] { run_gpu_bench("grwoth", GpuBenchOptions{}, stdout); }) ==
        "bench: with --device cuda expected decode, formats, kernels, kl, job or all, got "
        "'grwoth'");
}

TEST_CASE("states of a decode bench") {
  const HeadPlan plan = decode_plan("fp16+sr/nvfp4", 8);
  CHECK(plan.window == 8);
  CHECK(plan.recurrence.format->name == "fp16");
  CHECK(plan.recurrence.rounding == Rounding::stochastic);
  REQUIRE(plan.read);
  CHECK(plan.read->format->name == "nvfp4");
  CHECK(message_of([&] { decode_plan("fp16@layers=0-5", 8); }).find("without a selection") !=
        std::string::npos);
}

TEST_CASE("formats beside built-in ones: equal width, the same codes where the bench says so") {
  const StateShape shape{48, 128};
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> state(static_cast<size_t>(shape.elements()));
  for (float& x : state) x = normal(random);
  const RandomKey key{1, 2, 3, 4, 5, StateRole::recurrence};
  const auto codes = [&](const std::shared_ptr<const StateFormat>& format, Rounding rounding) {
    std::vector<std::byte> packed(packed_bytes(*format, shape));
    EncodeHealth health;
    encode_head({format, rounding}, shape, state.data(), key, 0.0f, packed.data(), nullptr,
                &health);
    return packed;
  };
  int same = 0;
  for (const FormatTwin& twin : format_twins()) {
    CAPTURE(twin.name);
    const auto format = twin_format(twin), builtin = find_format(twin.builtin);
    CHECK(packed_bytes(*format, shape) == packed_bytes(*builtin, shape));
    for (const Rounding rounding : {Rounding::nearest_even, Rounding::stochastic})
      CHECK((codes(format, rounding) == codes(builtin, rounding)) == twin.same);
    same += twin.same;
  }
  CHECK(same == 3);
}

}  // namespace
}  // namespace replayeval
