// A prompt computed in one row and copied to others: the same bits as if each had computed it.
#include <doctest/doctest.h>

#include <bit>
#include <string>
#include <vector>

#include "models/model.h"
#include "models/state_precision.h"
#include "models/state_store.h"

namespace replayeval {
namespace {

StatePrecision precision(const std::string& text) {
  StateOptions defaults;
  defaults.seed = 3;
  return parse_state_precision(text, defaults);
}

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens{1};
  uint32_t x = 11;
  while (static_cast<int>(tokens.size()) < count) {
    x = x * 1664525u + 1013904223u;
    tokens.push_back(static_cast<int32_t>(4 + (x >> 8) % 4000));
  }
  return tokens;
}

/// Feeds tokens [first, end) to one row of `states` in calls of at most `step`.
std::vector<float> feed(const Model& model, StateSet& states, int row,
                        const std::vector<int32_t>& tokens, int64_t first, int64_t end,
                        int64_t step) {
  std::vector<float> hidden;
  for (; first < end; first += step) {
    const int64_t count = std::min(step, end - first);
    std::vector<int> lengths(static_cast<size_t>(states.rows()), 0);
    lengths[static_cast<size_t>(row)] = static_cast<int>(count);
    const std::vector<int32_t> part(tokens.begin() + first, tokens.begin() + first + count);
    const std::vector<float> out = model.forward({part, lengths}, states).values();
    hidden.insert(hidden.end(), out.begin(), out.end());
  }
  return hidden;
}

void check_equal(const std::vector<float>& got, const std::vector<float>& expected) {
  REQUIRE(got.size() == expected.size());
  size_t worst = got.size();
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) != std::bit_cast<uint32_t>(expected[i]) &&
        worst == got.size()) {
      worst = i;
    }
  }
  if (worst < got.size()) {
    FAIL("element " << worst << ": got " << got[worst] << ", expected " << expected[worst]);
  }
}

TEST_CASE("a copied prompt continues with the bits of an own one") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    CAPTURE(name);
    const Model model(Checkpoint::open(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/" + name),
                      ModelOptions{ComputeType::fp32, DenseMode::invariant, DtClamp::forward});
    const std::vector<int32_t> tokens = some_tokens(120);
    constexpr int64_t kPrompt = 71, kShared = 53;  // neither ends a window of 16
    for (const char* spelling : {"fp32", "nvfp4+sr", "fp16+sr/nvfp4", "nvfp4+sr@heads=0-1",
                                 "fp8+sr/nvfp4@gdn_fold=cached", "nvfp4@layers=0-3"}) {
      CAPTURE(spelling);
      const RowSpec own{precision(spelling), 77, kPrompt, 0};
      StateSet alone(model, {own}, precision("fp32"), KernelForm::fast);
      const std::vector<float> expected = feed(model, alone, 0, tokens, 0, 120, 120);

      // Row 0 holds a longer prompt of another item in FP32; row 1 had another one before.
      const RowSpec other{precision("fp32"), 5, 1000, 0};
      StateSet shared(model, {other, own}, precision("fp32"), KernelForm::fast);
      feed(model, shared, 1, some_tokens(30), 0, 30, 30);
      shared.reset(1, own);
      std::vector<float> got = feed(model, shared, 0, tokens, 0, kShared, 19);
      shared.copy_prompt(0, 1);
      CHECK(shared.position(1) == kShared);
      // The source goes its own way; the copy must not follow.
      feed(model, shared, 0, some_tokens(40), 0, 40, 40);
      const std::vector<float> rest = feed(model, shared, 1, tokens, kShared, 120, 17);
      got.insert(got.end(), rest.begin(), rest.end());
      check_equal(got, expected);
      const StateStore& a = *shared.stores()[0];
      const StateStore& b = *alone.stores()[0];
      CHECK(a.health(1).encode.elements == b.health(0).encode.elements);
      CHECK(a.health(1).encode.saturated == b.health(0).encode.saturated);
    }
  }
}

TEST_CASE("prompts that are computed differently are not copied") {
  const Model model(Checkpoint::open(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-gdn"),
                    ModelOptions{ComputeType::fp32, DenseMode::invariant, DtClamp::forward});
  const auto same = [&](const char* a, const char* b, int64_t chunk = 0) {
    StateSet states(model, {{precision(a), 1, 40, 0}, {precision(b), 2, 40, chunk}},
                    precision("fp32"), KernelForm::fast);
    const bool answer = states.same_prompt(0, 1);
    CHECK(states.same_prompt(1, 0) == answer);
    feed(model, states, 0, some_tokens(20), 0, 20, 20);
    if (answer) {
      CHECK_NOTHROW(states.copy_prompt(0, 1));
    } else {
      CHECK_THROWS_AS(states.copy_prompt(0, 1), std::invalid_argument);
    }
    return answer;
  };
  CHECK(same("fp32", "nvfp4+sr"));
  CHECK(same("nvfp4+sr@seed=4", "int8+sr/nvfp4@seed=9"));
  CHECK(same("fp32", "fp32/nvfp4@gdn_fold=cached"));  // the prompt has no read copy
  CHECK_FALSE(same("fp32", "fp32@L=1"));
  CHECK_FALSE(same("fp32", "fp32@ring_u=bf16"));
  CHECK_FALSE(same("fp32", "fp32@beta=bf16"));
  CHECK_FALSE(same("fp32", "fp32@dot=tf32"));
  CHECK_FALSE(same("fp32", "fp32@ring=fp32"));
  CHECK_FALSE(same("fp32", "fp32@flush_output=read"));
  CHECK_FALSE(same("fp32", "fp32", 8));
}

TEST_CASE("a copy needs an empty row and a position inside both prompts") {
  const Model model(Checkpoint::open(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-mamba2"),
                    ModelOptions{ComputeType::fp32, DenseMode::invariant, DtClamp::forward});
  StateSet states(model, {{precision("fp32"), 1, 40, 0}, {precision("nvfp4"), 2, 20, 0}},
                  precision("fp32"), KernelForm::fast);
  feed(model, states, 0, some_tokens(20), 0, 20, 20);
  CHECK_THROWS_WITH_AS(states.copy_prompt(0, 1),
                       "copy of row 0 to row 1: position 20 is not inside both prompts (40 and 20 "
                       "tokens)",
                       std::invalid_argument);
  feed(model, states, 1, some_tokens(1), 0, 1, 1);
  CHECK_THROWS_WITH_AS(states.copy_prompt(0, 1),
                       "copy of row 0 to row 1: expected an empty target; call reset",
                       std::invalid_argument);
  states.reset(1, {precision("nvfp4"), 2, 21, 0});
  CHECK_NOTHROW(states.copy_prompt(0, 1));
}

}  // namespace
}  // namespace replayeval
