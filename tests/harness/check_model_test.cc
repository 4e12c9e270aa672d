// Every stored reference model through `check model`: whole sequence, odd chunks, one token a call,
// L = 16 and L = 1.
#include "harness/check_model.h"

#include <doctest/doctest.h>

#include <cstdio>

#include "tests/support/case_file.h"

namespace replayeval {

TEST_CASE("reference models agree with the transformers library") {
  const char* folders[] = {"nemotron_h-dense",  "nemotron_h-moe",    "mamba2-tied",
                           "mamba2-groups",     "bamba-small",       "granitemoehybrid-moe-nope",
                           "falcon_h1-norm",    "falcon_h1-nonorm",  "qwen3_5-dense",
                           "qwen3_5-dense-hub", "qwen3_5_moe-small", "qwen3_next-small"};
  for (const char* name : folders) {
    std::string path = test::case_path("models-ref/" + std::string(name));
    if (path.empty()) path = test::case_path("cases/models-ref/" + std::string(name));
    if (path.empty()) continue;
    CheckModelOptions options;
    options.folder = path;
    const CheckModelResult result = check_model_results(options);
    CHECK(result.rows.size() >= 24);
    for (const CheckRow& row : result.rows) {
      CHECK_MESSAGE(row.passed(), name << ": " << row.what << ": worst " << row.worst << " bound "
                                       << row.bound << " at " << row.place);
    }
    CHECK_MESSAGE(result.first_layer_differing.empty(), result.first_layer_differing);
  }
}

TEST_CASE("a wrong model is found, and the first layer that differs is named") {
  std::string path = test::case_path("models-ref/nemotron_h-dense");
  if (path.empty()) path = test::case_path("cases/models-ref/nemotron_h-dense");
  REQUIRE(!path.empty());
  CheckModelOptions options;
  options.folder = path;
  options.state = "fp8";  // the state is stored in FP8: layer 0 is the first to move
  options.windows = {1};
  options.chunks = {0};
  options.greedy = false;
  const CheckModelResult result = check_model_results(options);
  CHECK_FALSE(result.passed());
  CHECK(result.first_layer_differing == "layer 0");
}

}  // namespace replayeval
