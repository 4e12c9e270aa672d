// `format`: facts of a format as text and JSON.
#include "harness/show_format.h"

#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

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

}  // namespace
}  // namespace replayeval
