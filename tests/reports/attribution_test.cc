// Attribution on hand-made reports.
#include "reports/attribution.h"

#include <doctest/doctest.h>

#include <cmath>

namespace replayeval {
namespace {

/// A state of one document of four positions with a constant KL.
StateReport state(const std::string& name, float kl, double bits, const std::string& layers = "all",
                  const std::string& heads = "all") {
  StateReport s;
  s.info.name = name;
  s.info.bits_per_element = bits;
  s.info.options = {{"layers", layers}, {"heads", heads}};
  s.info.sha256 = name;
  StateDocument document;
  document.length = 4;
  document.kl.assign(4, kl);
  document.nll.assign(4, 1.0f);
  document.nll.back() = NAN;
  document.top1.assign(4, 1);
  s.documents.push_back(document);
  return s;
}

/// Three layers of equal size, two heads each; nvfp4 has 4 bits, the baseline 32.
Report sweep() {
  Report report;
  report.run.baseline = "fp32";
  report.run.vocabulary = 100;
  report.documents.push_back({"1", "one", 4, "", 0});
  report.token_ids.push_back({1, 2, 3, 4});
  for (int layer : {0, 2, 5}) report.layers.push_back({layer, "mamba2", 2, {}});
  report.states = {state("fp32", 0.0f, 32), state("nvfp4", 0.8f, 4), state("fp16+sr", 0.03f, 16)};
  const double alone = (4 + 32 + 32) / 3.0;
  report.states.push_back(state("nvfp4@layers=0", 0.1f, alone, "0"));
  report.states.push_back(state("nvfp4@layers=2", 0.5f, alone, "2"));
  report.states.push_back(state("nvfp4@layers=5", 0.15f, alone, "5"));
  report.states.push_back(state("nvfp4@layers=0,5", 0.25f, (4 + 4 + 32) / 3.0, "0,5"));
  report.states.push_back(state("nvfp4@layers=2;heads=0", 0.2f, 30, "2", "0"));
  report.states.push_back(state("nvfp4@layers=2;heads=1", 0.3f, 30, "2", "1"));
  return report;
}

}  // namespace

TEST_CASE("layers and heads are ranked by the KL they cause alone") {
  const Report report = sweep();
  const auto results = attribute(report, kl_statistics(report));
  REQUIRE(results.size() == 2);
  const Attribution& layers = results[0];
  CHECK(layers.precision == "nvfp4");
  CHECK_FALSE(layers.heads);
  CHECK(layers.whole == doctest::Approx(0.8));
  CHECK(layers.sum_of_parts == doctest::Approx(0.75));
  REQUIRE(layers.ranked.size() == 3);
  CHECK(layers.ranked[0].layer == 2);
  CHECK(layers.ranked[0].share == doctest::Approx(0.5 / 0.75));
  CHECK(layers.ranked[0].removed == doctest::Approx(0.8 - 0.25));
  CHECK(layers.ranked[0].elements == doctest::Approx(1.0 / 3));
  CHECK(std::isnan(layers.ranked[1].removed));
  CHECK(layers.ranked[1].layer == 5);
  CHECK(layers.ranked[2].layer == 0);
  const Attribution& heads = results[1];
  REQUIRE(heads.heads);
  REQUIRE(heads.ranked.size() == 2);
  CHECK(heads.ranked[0].head == 1);
  // Leaving head 0 of two out is the state with head 1 alone: both readings hold of one state; with
  // two heads it counts as alone.
  CHECK(heads.ranked[0].only == doctest::Approx(0.3));
  CHECK(heads.policy.empty());
}

TEST_CASE("the policy keeps the worst layers first and says what it costs") {
  const Report report = sweep();
  const Attribution layers = attribute(report, kl_statistics(report))[0];
  CHECK(layers.wider == "fp16+sr");
  REQUIRE(layers.policy.size() == 4);
  CHECK(layers.policy[0].bits_per_element == doctest::Approx(4));
  CHECK(layers.policy[0].predicted == doctest::Approx(0.75));
  CHECK(layers.policy[1].spelling == "nvfp4@layers=0,5;else=fp16+sr");
  CHECK(layers.policy[1].bits_per_element == doctest::Approx(8));
  CHECK(layers.policy[1].predicted == doctest::Approx(0.25 + 0.01));
  CHECK(layers.policy[2].spelling == "nvfp4@layers=0;else=fp16+sr");
  CHECK(layers.policy[3].spelling == "fp16+sr");
  CHECK(layers.policy[3].predicted == doctest::Approx(0.03));
}

TEST_CASE("a report without a sweep has no ranking") {
  Report report = sweep();
  report.states.resize(3);
  CHECK(attribution_tables(report, kl_statistics(report)).empty());
  CHECK(attribution_tables(sweep(), kl_statistics(sweep())).size() == 3);
}

}  // namespace replayeval
