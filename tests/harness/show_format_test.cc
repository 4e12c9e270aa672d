// `format`: facts of a format as text and JSON.
#include "harness/show_format.h"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "harness/teacher_forced.h"
#include "reports/files.h"
#include "reports/hdf5_image.h"
#include "reports/state_dump.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

nlohmann::json facts(const std::string& format) {
  ShowFormatOptions options;
  options.format = format;
  options.json = true;
  return nlohmann::json::parse(format_text(options));
}

TEST_CASE("facts of formats known by hand") {
  const nlohmann::json nvfp4 = facts("nvfp4");
  // 4 bits, 8 for each 16, 32 for each head of 64 x 128.
  CHECK(nvfp4["bits_per_element"].get<double>() ==
        doctest::Approx(4.0 + 8.0 / 16 + 32.0 / (64 * 128)).epsilon(1e-12));
  CHECK(nvfp4["element"]["largest"] == 6.0);
  CHECK(nvfp4["element"]["smallest"] == 0.5);
  CHECK(nvfp4["element"]["values"].size() == 15);
  CHECK(nvfp4["errors"].size() == 6);
  const nlohmann::json fp16 = facts("fp16");
  CHECK(fp16["element"]["largest"] == 65504.0);
  CHECK(fp16["element"]["min_normal"] == std::ldexp(1.0, -14));
  CHECK(fp16["element"]["min_subnormal"] == std::ldexp(1.0, -24));
  CHECK(fp16["element"]["unit_roundoff"] == std::ldexp(1.0, -11));
  const nlohmann::json fp32 = facts("fp32");
  CHECK(fp32["stochastic"].empty());
  CHECK(fp32["errors"].size() == 3);
  for (const auto& row : fp32["errors"]) CHECK(row["relative_rms"] == 0.0);
}

TEST_CASE("a state of too many elements is refused before it is allocated") {
  ShowFormatOptions options;
  options.format = "nvfp4";
  options.shape = {100000, 70000};
  CHECK_THROWS_AS(format_text(options), std::invalid_argument);
}

TEST_CASE("stochastic rounding is within 5 standard errors of its rule") {
  // 6 points of each format; chance of a false alarm under 1e-5 in all. Draws are a fixed function
  // of the seed.
  for (const std::string format : {"fp16", "fp8", "nvfp4", "int8"}) {
    CAPTURE(format);
    const nlohmann::json points = facts(format)["stochastic"];
    CHECK(points.size() == 6);
    for (const auto& p : points) {
      CAPTURE(p.dump());
      const double variance = p["expected_variance"].get<double>();
      CHECK(p["low"].get<double>() != p["high"].get<double>());
      CHECK(std::abs(p["mean"].get<double>() - p["expected_mean"].get<double>()) <=
            5 * std::sqrt(variance / p["draws"].get<double>()));
    }
  }
}

TEST_CASE("text has every table; wrong requests are refused") {
  ShowFormatOptions options;
  options.format = "mxfp4";
  const std::string text = format_text(options);
  for (const std::string part :
       {"mxfp4", "4.25 bits an element", "values: -6 -4 -3 -2 -1.5 -1 -0.5 0 0.5 1 1.5 2 3 4 6",
        "heavy-tailed", "p(1-p) gap^2", "alpha"}) {
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
  }
  options.shape = {64, 48};
  CHECK_THROWS_AS(format_text(options), std::invalid_argument);
  options.shape = {64, 128};
  options.format = "mxfp5";
  CHECK_THROWS_AS(format_text(options), std::invalid_argument);
}

TEST_CASE("errors on dumped states, growth beside a run, and everything as HDF5") {
  const test::TemporaryFolder folder;
  const std::string root = REPLAYEVAL_SOURCE_DIR;
  const std::filesystem::path file = folder / "run.yaml";
  std::ofstream(file)
      << "job: kl\nmodel: " << root << "/models/mini-mamba2\n"
      << "data: {kind: pg19, path: " << root << "/datasets/sample, documents: 1, tokens: 256}\n"
      << "states: [fp8+sr]\nstate_error_every: 64\ndump_states: [127, 143, 255]\nout: "
      << (folder / "out").string() << "\n";
  REQUIRE(run_teacher_forced(load_experiment(file), {}) == 0);
  const auto dumps = read_state_dumps(folder / "out");
  REQUIRE(dumps.size() == 3);
  CHECK(dumps[0].position == 127);
  CHECK(dumps[0].layers.size() == 6);
  const LayerDump& layer = dumps[1].layers[0];
  CHECK(dumps[1].position == 143);
  CHECK(layer.tokens == 16);
  REQUIRE(layer.x.size() == 16u * 8 * 64);
  // A dump's records lead from the state of the window before to its own: S' = 2^(sum dt a) S +
  // sum_j 2^(sum after j) dt_j x_j B_j^T.
  const LayerDump& before = dumps[0].layers[0];
  const LayerDump& after = dumps[1].layers[0];
  double worst = 0, largest = 0;
  for (int h = 0; h < 8; ++h) {
    for (int p = 0; p < 64; ++p) {
      for (int n = 0; n < 128; ++n) {
        const size_t at =
            (static_cast<size_t>(h) * 64 + static_cast<size_t>(p)) * 128 + static_cast<size_t>(n);
        double state = static_cast<double>(before.state[at]);
        for (size_t t = 0; t < 16; ++t) {
          const double dt = static_cast<double>(after.dt[t * 8 + static_cast<size_t>(h)]);
          state = state * std::exp2(dt *
                                    static_cast<double>(after.decay_log2[static_cast<size_t>(h)])) +
                  dt *
                      static_cast<double>(
                          after.x[(t * 8 + static_cast<size_t>(h)) * 64 + static_cast<size_t>(p)]) *
                      static_cast<double>(after.b[t * 128 + static_cast<size_t>(n)]);
        }
        worst = std::max(worst, std::abs(state - static_cast<double>(after.state[at])));
        largest = std::max(largest, std::abs(state));
      }
    }
  }
  // 16 records: each term carries a few roundings of 2^-24, decays 1e-7 relative; the largest
  // element bounds the terms here within a factor of 16.
  CHECK(worst <= 16 * 16 * 0x1p-24 * largest);
  CHECK(largest > 0);

  ShowFormatOptions options;
  options.format = "fp8";
  options.states = (folder / "out").string();
  options.run = (folder / "out").string();
  options.output = (folder / "fp8.h5").string();
  options.json = true;
  const nlohmann::json facts = nlohmann::json::parse(format_text(options));
  bool dumped = false;
  for (const auto& row : facts["errors"]) {
    if (row["data"] != "all dumped states") continue;
    dumped = true;
    // E4M3 has 3 mantissa bits: a relative error between 2^-6 (values in the middle of a binade)
    // and 2^-4 (the unit roundoff) of normal values.
    CHECK(row["relative_rms"].get<double>() < 0.0625);
    CHECK(row["relative_rms"].get<double>() > 0.0078);
  }
  CHECK(dumped);
  REQUIRE(facts["growth"].size() == 1);
  const auto& heads = facts["growth"][0]["heads"];
  REQUIRE(heads.size() == 48);
  double last = 2;
  int near = 0;
  for (const auto& head : heads) {
    CHECK(head["decay"].get<double>() <= last);
    last = head["decay"].get<double>();
    const double ratio = head["measured"].get<double>() / head["predicted"].get<double>();
    near += ratio > 0.5 && ratio < 2;
  }
  CHECK(near >= 40);  // the closed form is of the right size for nearly all heads
  const auto bytes = read_file(options.output);
  REQUIRE(bytes);
  const Hdf5Reader reader(options.output, *bytes);
  CHECK(reader.dataset<double>("/growth/0/measured").size() == 48);
  CHECK(reader.attribute<std::string>("/", "name") == "fp8");

  options.format = "int8";
  CHECK_THROWS_WITH_AS(format_text(options), doctest::Contains("state_error_every"),
                       std::invalid_argument);
  options.run.clear();
  options.states = file.string();
  CHECK_THROWS_AS(format_text(options), std::runtime_error);
}

}  // namespace
}  // namespace replayeval
