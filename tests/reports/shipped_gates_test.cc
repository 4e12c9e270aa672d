#include <doctest/doctest.h>

#include <filesystem>
#include <set>

#include "reports/compare.h"

using namespace replayeval;

TEST_CASE("the shipped gates can be read") {
  const std::filesystem::path root = std::filesystem::path(REPLAYEVAL_SOURCE_DIR) / "eval_configs";
  const Gate safe = read_gate(root / "gates/safe-state.yaml");
  std::set<std::string> metrics;
  for (const Limit& limit : safe.limits) {
    metrics.insert(limit.metric.name);
    CHECK(limit.metric.state == "fp16+sr/nvfp4");
    CHECK(limit.kind == LimitKind::regression);
    if (limit.against) CHECK(limit.against->state == "fp16+sr");
  }
  CHECK(metrics == std::set<std::string>{"growth", "kl.mean", "non_finite"});
  CHECK(!safe.allow_non_finite);
  CHECK(safe.undecided_fails == false);

  const Gate accuracy = read_gate(root / "gates/safe-state-accuracy.yaml");
  REQUIRE(accuracy.limits.size() == 1);
  CHECK(accuracy.limits[0].metric.name == "accuracy");
  CHECK(accuracy.limits[0].kind == LimitKind::noninferior);
  CHECK(accuracy.limits[0].offset == -1.0);

  const Gate ci = read_gate(root / "ci/gate.yaml");
  CHECK(ci.limits.size() == 3);
  for (const Limit& limit : ci.limits) CHECK(limit.metric.state == "fp16+sr/candidate");
}
