#include "harness/document_snapshot.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "models/state_precision.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

StatePrecision precision(const std::string& text) { return parse_state_precision(text, {}); }

RunPlan plan() {
  RunPlan plan;
  plan.documents.push_back({"a", "", 4096, "0", 0});
  plan.layers.push_back({0, "mamba2", 8, {}});
  for (const char* name : {"fp32", "nvfp4+sr"}) {
    StateInfo state;
    state.name = state.definition = state.sha256 = name;
    plan.states.push_back(state);
  }
  return plan;
}

struct Fixture {
  test::TemporaryFolder place;
  Model model{Checkpoint::open(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-mamba2"),
              ModelOptions{}};
  RunFolder folder = RunFolder::open(place / "run", plan(), OpenMode::fresh);

  StateSet fresh() const {
    return StateSet(model, {{precision("fp32"), 1, 0, 0}, {precision("nvfp4+sr"), 1, 0, 0}},
                    precision("fp32"), KernelForm::fast);
  }
  DocumentProgress empty(const StateSet& states) const {
    DocumentProgress at;
    at.figures.resize(2);
    at.samples.resize(2);
    at.health.assign(2, std::vector<StoreHealth>(states.stores().size()));
    return at;
  }
  void feed(StateSet& states, DocumentProgress& at, int count) const {
    std::vector<int32_t> tokens(static_cast<size_t>(2 * count), 77);
    model.forward({tokens, std::vector<int>(2, count)}, states);
    at.position += count;
  }
};

TEST_CASE("a document's snapshot brings back where it stood, cache pieces included") {
  Fixture f;
  StateSet states = f.fresh();
  DocumentProgress at = f.empty(states);
  f.feed(states, at, 70);
  at.figures[1] = {{0.25f, 0.5f}, {1.0f, 2.0f}, {1, 0}};
  at.samples[0].error_positions = {15, 31};
  at.samples[0].error = {0.125f};
  at.health[1][2].encode.saturated = 9;
  at.decay = {{1.5, 2.5}, {3.5}};
  at.nll_sum = 12.5;
  at.nll_count = 7;
  at.span_first = 64;
  save_snapshot(f.folder, "document-0", "identity", at, states);
  f.feed(states, at, 33);
  save_snapshot(f.folder, "document-0", "identity", at, states);
  CHECK(at.cache_ends == std::vector<int64_t>{70, 103});

  StateSet back = f.fresh();
  DocumentProgress got = f.empty(back);
  REQUIRE(load_snapshot(f.folder, "document-0", "identity", got, back).used);
  CHECK(got.position == 103);
  CHECK(got.span_first == 64);
  CHECK(got.figures[1].kl_nats == at.figures[1].kl_nats);
  CHECK(got.figures[1].top1 == at.figures[1].top1);
  CHECK(got.samples[0].error_positions == at.samples[0].error_positions);
  CHECK(got.samples[0].error == at.samples[0].error);
  CHECK(got.health[1][2].encode.saturated == 9);
  CHECK(got.decay == at.decay);
  CHECK(got.nll_sum == 12.5);
  CHECK(got.nll_count == 7);
  CHECK(got.cache_ends == at.cache_ends);
  CHECK(back.save() == states.save());
  CHECK(back.save_cache(1, 0, 103) == states.save_cache(1, 0, 103));

  remove_snapshot(f.folder, "document-0", got, 2);
  CHECK(fs::is_empty(f.place / "run/snapshots"));
}

TEST_CASE("a snapshot of something else, or one that is not whole, is not used") {
  Fixture f;
  StateSet states = f.fresh();
  DocumentProgress at = f.empty(states);
  f.feed(states, at, 40);
  save_snapshot(f.folder, "document-0", "identity", at, states);
  StateSet back = f.fresh();
  const std::vector<std::byte> untouched = back.save();
  DocumentProgress got = f.empty(back);
  SnapshotOutcome outcome;
  std::string reason;
  SUBCASE("another name") { outcome = load_snapshot(f.folder, "other", "identity", got, back); }
  SUBCASE("another identity") {
    outcome = load_snapshot(f.folder, "document-0", "other", got, back);
    reason = "it belongs to other states or another text";
  }
  SUBCASE("a missing piece") {
    f.folder.remove_snapshot("document-0-row-1-cache-0");
    outcome = load_snapshot(f.folder, "document-0", "identity", got, back);
    reason = "the piece document-0-row-1-cache-0 of the key-value cache is missing or broken";
  }
  SUBCASE("a flipped byte in a piece") {
    std::fstream file(f.place / "run/snapshots/document-0-row-1-cache-0.bin",
                      std::ios::in | std::ios::out | std::ios::binary);
    REQUIRE(file);
    file.seekp(-5, std::ios::end);
    file.put('\x5a');
    file.close();
    outcome = load_snapshot(f.folder, "document-0", "identity", got, back);
    reason = "the piece document-0-row-1-cache-0 of the key-value cache is missing or broken";
  }
  SUBCASE("a head cut short") {
    fs::resize_file(f.place / "run/snapshots/document-0.bin", 200);
    outcome = load_snapshot(f.folder, "document-0", "identity", got, back);
    reason = "its checksum differs";
  }
  CHECK_FALSE(outcome.used);
  CHECK(outcome.refused == reason);
  CHECK(got.position == 0);
  CHECK(back.position(0) == 0);
  CHECK(back.save() == untouched);
}

}  // namespace
}  // namespace replayeval
