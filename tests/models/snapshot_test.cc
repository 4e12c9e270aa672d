// A state set saved inside a document and put into a fresh one continues with the same bits.
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
  defaults.seed = 5;
  return parse_state_precision(text, defaults);
}

std::vector<RowSpec> rows(int64_t prompt) {
  std::vector<RowSpec> specs;
  for (const char* text : {"fp32", "fp32@L=1", "fp16+sr/nvfp4", "nvfp4+sr@L=5",
                           "fp8+sr/nvfp4@gdn_fold=cached", "nvfp4@layers=0-3", "mxfp4/bf16@L=7"}) {
    specs.push_back({precision(text), 99, prompt, prompt > 0 ? int64_t{11} : int64_t{0}});
  }
  return specs;
}

Hidden feed(const Model& model, StateSet& states, int first, int count, AdvanceMode mode) {
  std::vector<int32_t> tokens;
  for (int r = 0; r < states.rows(); ++r) {
    for (int t = first; t < first + count; ++t)
      tokens.push_back(4 + static_cast<int32_t>((uint32_t(t) * 2654435761u) >> 20));
  }
  return model.forward({tokens, std::vector<int>(static_cast<size_t>(states.rows()), count)},
                       states, mode);
}

/// Runs to `cut`, saves in two pieces of the caches, and compares what both sets say afterwards. Of
/// `drafts` tokens verified after that, all but two are committed before saving.
void check_continuation(const std::string& name, ComputeType compute, int64_t prompt, int cut,
                        int drafts = 0) {
  CAPTURE(name);
  CAPTURE(cut);
  CAPTURE(prompt);
  const Model model(
      Checkpoint::open(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/" + name,
                       compute == ComputeType::bf16 ? WeightType::bf16 : WeightType::fp32),
      ModelOptions{compute, DenseMode::invariant, DtClamp::forward});
  StateSet whole(model, rows(prompt), precision("fp32"), KernelForm::fast);
  feed(model, whole, 0, cut, AdvanceMode::commit);
  if (drafts > 0) {
    feed(model, whole, cut, drafts, AdvanceMode::verify);
    whole.commit(std::vector<int>(static_cast<size_t>(whole.rows()), drafts - 2));
    cut += drafts - 2;
  }
  const std::vector<std::byte> state = whole.save();
  StateSet resumed(model, rows(prompt), precision("fp32"), KernelForm::fast);
  feed(model, resumed, 7, 9, AdvanceMode::commit);  // leaves nothing behind
  resumed.restore(state);
  const int64_t half = cut / 2;
  for (int r = 0; r < whole.rows(); ++r) {
    resumed.append_cache(r, whole.save_cache(r, 0, half));
    resumed.append_cache(r, whole.save_cache(r, half, cut));
    CHECK(resumed.position(r) == cut);
  }
  const std::vector<float> expected = feed(model, whole, cut, 40, AdvanceMode::commit).values();
  const std::vector<float> got = feed(model, resumed, cut, 40, AdvanceMode::commit).values();
  REQUIRE(got.size() == expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) != std::bit_cast<uint32_t>(expected[i])) {
      FAIL("element " << i << ": got " << got[i] << ", expected " << expected[i]);
    }
  }
  CHECK(resumed.save() == whole.save());
}

TEST_CASE("a saved state set continues with the same bits") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    for (int cut : {1, 32, 70}) check_continuation(name, ComputeType::fp32, 0, cut);
    check_continuation(name, ComputeType::bf16, 0, 37);
    check_continuation(name, ComputeType::fp32, 50, 37);  // inside a prompt
    check_continuation(name, ComputeType::fp32, 30, 37);  // just after it
    // A fold by the drafts: the corrections of those that stay come from the state before it was
    // encoded, and are not folded again as they are.
    check_continuation(name, ComputeType::fp32, 0, 30, 6);
  }
}

TEST_CASE("saving and restoring refuse what does not fit") {
  const Model model(Checkpoint::open(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-mamba2"),
                    ModelOptions{});
  StateSet states(model, rows(0), precision("fp32"), KernelForm::fast);
  feed(model, states, 0, 20, AdvanceMode::commit);
  const std::vector<std::byte> state = states.save();
  const std::vector<std::byte> cache = states.save_cache(0, 0, 20);
  SUBCASE("uncommitted tokens") {
    feed(model, states, 20, 3, AdvanceMode::verify);
    CHECK_THROWS_AS((void)states.save(), std::invalid_argument);
  }
  SUBCASE("another number of rows") {
    StateSet fewer(model, {rows(0)[0]}, precision("fp32"), KernelForm::fast);
    CHECK_THROWS_AS(fewer.restore(state), std::runtime_error);
  }
  SUBCASE("another format") {
    std::vector<RowSpec> specs = rows(0);
    specs[3].precision = precision("fp16");
    StateSet other(model, specs, precision("fp32"), KernelForm::fast);
    CHECK_THROWS_AS(other.restore(state), std::runtime_error);
  }
  SUBCASE("cut off anywhere") {
    StateSet fresh(model, rows(0), precision("fp32"), KernelForm::fast);
    for (size_t size : {size_t{0}, size_t{7}, state.size() / 2, state.size() - 1}) {
      CHECK_THROWS_AS(fresh.restore({state.data(), size}), std::runtime_error);
    }
    CHECK_THROWS_AS(fresh.append_cache(0, {cache.data(), cache.size() - 1}), std::runtime_error);
  }
  SUBCASE("a piece of the caches out of order") {
    CHECK_THROWS_AS(states.append_cache(0, cache), std::runtime_error);
  }
}

}  // namespace
}  // namespace replayeval
