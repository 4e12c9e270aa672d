// The whole model on the mini checkpoint that ships: what must be bit-equal, and what only within
// rounding.
#include "models/model.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>

#include "models/state_precision.h"
#include "models/state_store.h"

namespace replayeval {
namespace {

const Model& mini(const char* name = "mini-mamba2", DenseMode dense = DenseMode::invariant) {
  static std::map<std::string, std::unique_ptr<Model>> models;
  std::unique_ptr<Model>& model =
      models[std::string(name) + (dense == DenseMode::fast ? "+fast" : "")];
  if (!model) {
    model = std::make_unique<Model>(
        Checkpoint::open(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/" + name),
        ModelOptions{ComputeType::fp32, dense, DtClamp::forward});
  }
  return *model;
}

StatePrecision precision(const std::string& text, int window = 16) {
  StateOptions defaults;
  defaults.window = window;
  defaults.seed = 1;
  return parse_state_precision(text, defaults);
}

std::vector<int32_t> some_tokens(int count, uint32_t seed = 7) {
  std::vector<int32_t> tokens{1};
  uint32_t x = seed;
  while (static_cast<int>(tokens.size()) < count) {
    x = x * 1664525u + 1013904223u;
    tokens.push_back(static_cast<int32_t>(4 + (x >> 8) % 4000));
  }
  return tokens;
}

StateSet make_states(const Model& model, const std::vector<std::string>& names, int64_t prompt = 0,
                     int64_t prefill = 0, KernelForm form = KernelForm::fast) {
  std::vector<RowSpec> rows;
  for (const std::string& name : names) rows.push_back({precision(name), 12345u, prompt, prefill});
  return StateSet(model, rows, precision("fp32"), form);
}

/// Logits [rows][tokens * vocabulary] of the same tokens in every row, in calls of the given sizes
/// (repeated).
std::vector<std::vector<float>> run(const Model& model, StateSet& states,
                                    const std::vector<int32_t>& tokens,
                                    const std::vector<int>& calls) {
  const int rows = states.rows();
  const int64_t vocabulary = model.spec().vocabulary;
  std::vector<std::vector<float>> logits(static_cast<size_t>(rows));
  size_t call = 0;
  for (size_t first = 0; first < tokens.size(); ++call) {
    const int count =
        std::min<int>(calls[call % calls.size()], static_cast<int>(tokens.size() - first));
    std::vector<int32_t> batch;
    for (int r = 0; r < rows; ++r)
      batch.insert(batch.end(), tokens.begin() + static_cast<long>(first),
                   tokens.begin() + static_cast<long>(first) + count);
    const Hidden hidden =
        model.forward({batch, std::vector<int>(static_cast<size_t>(rows), count)}, states);
    for (int r = 0; r < rows; ++r) {
      auto& out = logits[static_cast<size_t>(r)];
      const size_t at = out.size();
      out.resize(at + static_cast<size_t>(count * vocabulary));
      model.lm_head(hidden, int64_t{r} * count, count, out.data() + at);
    }
    first += static_cast<size_t>(count);
  }
  return logits;
}

void check_equal_bits(const std::vector<float>& a, const std::vector<float>& b,
                      const std::string& what) {
  REQUIRE_MESSAGE(a.size() == b.size(), what);
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) == std::bit_cast<uint32_t>(b[i])) continue;
    FAIL_CHECK(what << ": element " << i << ": " << a[i] << " and " << b[i]);
    return;
  }
}

std::vector<std::byte> packed(const StateSet& states, size_t layer, int row, StateRole role) {
  const auto bytes = states.stores()[layer]->packed(row, role);
  return {bytes.begin(), bytes.end()};
}

const std::vector<std::string> kRows = {
    "fp32", "fp16+sr", "nvfp4+sr", "fp16+sr/nvfp4", "nvfp4+sr@L=1", "fp32@L=5", "fp8+sr/nvfp4@L=7"};

}  // namespace

TEST_CASE("level iii: chunks, threads, row order and row subset do not change a bit") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    const Model& model = mini(name);
    const std::vector<int32_t> tokens = some_tokens(83);
    StateSet whole = make_states(model, kRows);
    const auto expected = run(model, whole, tokens, {83});
    const int before = omp_get_max_threads();
    for (const std::vector<int>& calls : {std::vector<int>{1}, {7}, {16}, {1, 40, 3, 0 + 2, 31}}) {
      StateSet states = make_states(model, kRows);
      const auto got = run(model, states, tokens, calls);
      for (size_t r = 0; r < kRows.size(); ++r) {
        check_equal_bits(
            got[r], expected[r],
            std::string(name) + " " + kRows[r] + " in calls of " + std::to_string(calls[0]));
        for (size_t l = 0; l < states.stores().size(); ++l) {
          CHECK(packed(states, l, static_cast<int>(r), StateRole::recurrence) ==
                packed(whole, l, static_cast<int>(r), StateRole::recurrence));
        }
      }
    }
    for (int threads : {1, 3}) {
      omp_set_num_threads(threads);
      StateSet states = make_states(model, kRows);
      const auto got = run(model, states, tokens, {29});
      for (size_t r = 0; r < kRows.size(); ++r)
        check_equal_bits(got[r], expected[r], kRows[r] + ", threads");
    }
    omp_set_num_threads(before);
    const std::vector<size_t> order = {4, 0, 6, 2};
    std::vector<std::string> names;
    for (size_t i : order) names.push_back(kRows[i]);
    StateSet states = make_states(model, names);
    const auto got = run(model, states, tokens, {17});
    for (size_t i = 0; i < order.size(); ++i)
      check_equal_bits(got[i], expected[order[i]], names[i] + ", other rows");
  }
}

TEST_CASE("a second FP32 row is bit-equal, and FP32 state with any window agrees within rounding") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    const Model& model = mini(name);
    const std::vector<int32_t> tokens = some_tokens(130);
    StateSet states = make_states(model, {"fp32", "fp32", "fp32@L=1", "fp32@L=64", "fp32@L=3"});
    const auto logits = run(model, states, tokens, {50});
    check_equal_bits(logits[1], logits[0], "second FP32 row");
    for (size_t r = 2; r < logits.size(); ++r) {
      float worst = 0, top = 0;
      for (size_t i = 0; i < logits[0].size(); ++i) {
        worst = std::max(worst, std::abs(logits[r][i] - logits[0][i]));
        top = std::max(top, std::abs(logits[0][i]));
      }
      // FP32 rounding of a different summation order, carried through 12 (8) layers: the library's
      // own FP32 distance to FP64 on models of this depth is below 1e-5 of the largest logit
      // (models-ref, meta.json: rel 1e-6 with logits of 10).
      CHECK_MESSAGE(worst <= 1e-5f * top, name << " row " << r << ": " << worst << " of " << top);
      CHECK(worst > 0);
    }
  }
}

TEST_CASE("layer 0's recurrence checkpoint is bit-equal in fp16+sr and fp16+sr/nvfp4") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    const Model& model = mini(name);
    StateSet states = make_states(model, {"fp16+sr", "fp16+sr/nvfp4", "fp16+sr@seed=2"});
    run(model, states, some_tokens(64), {64});
    CHECK(packed(states, 0, 0, StateRole::recurrence) ==
          packed(states, 0, 1, StateRole::recurrence));
    CHECK(packed(states, 0, 0, StateRole::recurrence) !=
          packed(states, 0, 2, StateRole::recurrence));
    CHECK(packed(states, 1, 0, StateRole::recurrence) !=
          packed(states, 1, 1, StateRole::recurrence));
  }
}

TEST_CASE(
    "rounding errors of two documents under one seed are uncorrelated, of one document equal") {
  const Model& model = mini();
  std::vector<RowSpec> rows;
  for (uint32_t stream : {5u, 5u, 900u}) rows.push_back({precision("fp8+sr"), stream, 0, 0});
  rows.push_back({precision("fp32"), 5u, 0, 0});
  StateSet states(model, rows, precision("fp32"), KernelForm::fast);
  run(model, states, some_tokens(16), {16});
  const StateStore& store = *states.stores()[0];
  double cross = 0, square_a = 0, square_b = 0;
  int64_t count = 0;
  for (int h = 0; h < store.shape().heads; ++h) {
    const size_t size = static_cast<size_t>(store.shape().state.elements());
    std::vector<float> a(size), same(size), b(size), exact(size);
    store.decode(0, h, StateRole::recurrence, a.data());
    store.decode(1, h, StateRole::recurrence, same.data());
    store.decode(2, h, StateRole::recurrence, b.data());
    store.decode(3, h, StateRole::recurrence, exact.data());
    CHECK(a == same);
    for (size_t i = 0; i < size; ++i) {
      const double ea = double{a[i]} - double{exact[i]}, eb = double{b[i]} - double{exact[i]};
      cross += ea * eb;
      square_a += ea * ea;
      square_b += eb * eb;
      ++count;
    }
  }
  // Errors of stochastic rounding have mean 0 given the value; were the draws shared, the
  // correlation would be 1. Independent draws leave a correlation of standard deviation at most ~
  // sqrt(kurtosis / n); errors of a row-scaled format differ in size by exponent, so n_eff is far
  // below n = 65,536: four standard deviations at n_eff = n / 30.
  const double correlation = cross / std::sqrt(square_a * square_b);
  CHECK_MESSAGE(std::abs(correlation) < 4 / std::sqrt(static_cast<double>(count) / 30),
                correlation);
}

TEST_CASE("commit k of T equals k plain steps, and rejected drafts leave nothing behind") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    const Model& model = mini(name);
    const std::vector<std::string> names = {"fp32", "fp16+sr/nvfp4", "nvfp4+sr", "fp8+sr@L=1"};
    const size_t rows = names.size();
    const std::vector<int32_t> tokens = some_tokens(61);
    const std::vector<int32_t> wrong = some_tokens(200, 99);
    StateSet plain = make_states(model, names);
    StateSet spoiled = make_states(model, names);
    // Both draft 4 tokens a step and accept 1 to 4; one of them drafts other tokens behind the
    // accepted ones.
    size_t position = 0;
    for (size_t step = 0; position < tokens.size(); ++step) {
      const size_t left = tokens.size() - position;
      const size_t accepted = std::min(left, 1 + step * 7 % 4);
      std::vector<int32_t> a, b;
      for (size_t r = 0; r < rows; ++r) {
        for (size_t t = 0; t < 4; ++t) {
          a.push_back(t < accepted ? tokens[position + t] : wrong[step + t]);
          b.push_back(t < accepted ? tokens[position + t] : wrong[step + 50 + t]);
        }
      }
      const std::vector<int> lengths(rows, 4);
      const Hidden ha = model.forward({a, lengths}, plain, AdvanceMode::verify);
      const Hidden hb = model.forward({b, lengths}, spoiled, AdvanceMode::verify);
      for (size_t r = 0; r < rows; ++r) {
        for (size_t t = 0; t < accepted; ++t) {
          const size_t at = (r * 4 + t) * static_cast<size_t>(ha.hidden);
          CHECK(std::memcmp(ha.data() + at, hb.data() + at,
                            static_cast<size_t>(ha.hidden) * sizeof(float)) == 0);
        }
      }
      const std::vector<int> counts(rows, static_cast<int>(accepted));
      plain.commit(counts);
      spoiled.commit(counts);
      position += accepted;
    }
    CHECK(plain.position(0) == 61);
    for (size_t l = 0; l < plain.stores().size(); ++l) {
      for (int r = 0; r < static_cast<int>(rows); ++r) {
        CHECK(packed(plain, l, r, StateRole::recurrence) ==
              packed(spoiled, l, r, StateRole::recurrence));
      }
    }
    // FP32 rows: the same tokens without speculation, up to where the folds fall (rounding only).
    StateSet eager = make_states(model, {"fp32"});
    const auto logits = run(model, eager, tokens, {61});
    StateSet again = make_states(model, {"fp32"});
    position = 0;
    std::vector<float> last(static_cast<size_t>(model.spec().vocabulary));
    while (position < tokens.size()) {
      const size_t count = std::min<size_t>(3, tokens.size() - position);
      const std::vector<int32_t> draft(tokens.begin() + static_cast<long>(position),
                                       tokens.begin() + static_cast<long>(position + count));
      const std::vector<int> lengths{static_cast<int>(count)};
      const Hidden hidden = model.forward({draft, lengths}, again, AdvanceMode::verify);
      model.lm_head(hidden, static_cast<int64_t>(count) - 1, 1, last.data());
      again.commit(lengths);
      position += count;
    }
    float worst = 0, top = 0;
    for (size_t v = 0; v < last.size(); ++v) {
      const float expected = logits[0][60 * last.size() + v];
      worst = std::max(worst, std::abs(last[v] - expected));
      top = std::max(top, std::abs(expected));
    }
    CHECK_MESSAGE(worst <= 1e-5f * top, name << ": " << worst);
    CHECK_THROWS_AS(again.commit(std::vector<int>{1}), std::invalid_argument);
  }
}

TEST_CASE(
    "prompt hand-over: FP32 until the prompt ends, then one encode of both checkpoints with h = "
    "0") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    const Model& model = mini(name);
    const std::vector<int32_t> tokens = some_tokens(60);
    StateSet prompted = make_states(model, {"fp32", "nvfp4+sr", "fp16+sr/nvfp4"}, 21);
    const auto logits = run(model, prompted, tokens, {60});
    const size_t vocabulary = static_cast<size_t>(model.spec().vocabulary);
    for (size_t r = 1; r < 3; ++r) {
      const std::vector<float> head(logits[r].begin(),
                                    logits[r].begin() + static_cast<long>(21 * vocabulary));
      const std::vector<float> reference(logits[0].begin(),
                                         logits[0].begin() + static_cast<long>(21 * vocabulary));
      check_equal_bits(head, reference, "positions of the prompt");
      CHECK(std::memcmp(logits[r].data() + 21 * vocabulary, logits[0].data() + 21 * vocabulary,
                        vocabulary * sizeof(float)) != 0);
    }
    // Flushes count from the first decoded token: 39 decoded tokens leave 39 - 32 = 7 records.
    CHECK(prompted.stores()[0]->pending(1, 0) == 7);
    for (const std::vector<int>& calls : {std::vector<int>{1}, {20, 2, 9}}) {
      StateSet states = make_states(model, {"fp32", "nvfp4+sr", "fp16+sr/nvfp4"}, 21);
      const auto got = run(model, states, tokens, calls);
      for (size_t r = 0; r < 3; ++r) check_equal_bits(got[r], logits[r], "prompted, other calls");
    }
    StateSet chunked = make_states(model, {"fp32", "fp8"}, 40, 8);
    const auto prefilled = run(model, chunked, tokens, {60});
    CHECK(std::memcmp(prefilled[1].data() + 8 * vocabulary, prefilled[0].data() + 8 * vocabulary,
                      vocabulary * sizeof(float)) != 0);
    CHECK(std::memcmp(prefilled[1].data(), prefilled[0].data(), 8 * vocabulary * sizeof(float)) ==
          0);
  }
}

TEST_CASE("layer and head selections leave the rest at the baseline's precision") {
  const Model& model = mini();
  StateSet states = make_states(model, {"fp32", "nvfp4@layers=2", "nvfp4@heads=1-2", "nvfp4",
                                        "nvfp4@layers=2;else=fp16", "fp16"});
  run(model, states, some_tokens(48), {48});
  const auto stores = states.stores();
  auto state = [&](size_t layer, int row, int head) {
    std::vector<float> values(static_cast<size_t>(stores[layer]->shape().state.elements()));
    stores[layer]->decode(row, head, StateRole::recurrence, values.data());
    return values;
  };
  CHECK(stores[0]->shape().layer == 0);
  CHECK(stores[1]->shape().layer == 2);
  CHECK(state(0, 1, 0) == state(0, 0, 0));
  CHECK(state(1, 1, 0) != state(1, 0, 0));
  CHECK(state(0, 4, 0) == state(0, 5, 0));
  CHECK(state(0, 4, 0) != state(0, 0, 0));
  CHECK(state(0, 2, 0) == state(0, 0, 0));
  CHECK(state(0, 2, 1) == state(0, 3, 1));
  CHECK(state(0, 2, 1) != state(0, 0, 1));
  CHECK(state(0, 2, 3) == state(0, 0, 3));
}

TEST_CASE("dense: fast agrees with invariant up to rounding") {
  const std::vector<int32_t> tokens = some_tokens(90);
  StateSet a = make_states(mini(), {"fp32"});
  StateSet b = make_states(mini("mini-mamba2", DenseMode::fast), {"fp32"});
  const auto exact = run(mini(), a, tokens, {90});
  const auto fast = run(mini("mini-mamba2", DenseMode::fast), b, tokens, {90});
  float worst = 0, top = 0;
  for (size_t i = 0; i < exact[0].size(); ++i) {
    worst = std::max(worst, std::abs(exact[0][i] - fast[0][i]));
    top = std::max(top, std::abs(exact[0][i]));
  }
  CHECK_MESSAGE(worst <= 1e-5f * top, worst);
}

TEST_CASE("the FP64 kernels inside the whole model agree with the fast ones") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    const Model& model = mini(name);
    const std::vector<int32_t> tokens = some_tokens(70);
    StateSet fast = make_states(model, {"fp32", "fp32@L=1"});
    StateSet slow = make_states(model, {"fp32", "fp32@L=1"}, 0, 0, KernelForm::reference);
    const auto a = run(model, fast, tokens, {33});
    const auto b = run(model, slow, tokens, {33});
    for (size_t r = 0; r < 2; ++r) {
      float worst = 0, top = 0;
      for (size_t i = 0; i < a[r].size(); ++i) {
        worst = std::max(worst, std::abs(a[r][i] - b[r][i]));
        top = std::max(top, std::abs(b[r][i]));
      }
      CHECK_MESSAGE(worst <= 1e-5f * top, name << ": " << worst);
      CHECK(worst > 0);
    }
  }
}

TEST_CASE("bad batches are refused with what was expected") {
  const Model& model = mini();
  StateSet states = make_states(model, {"fp32"});
  CHECK_THROWS_WITH_AS(model.forward({std::vector<int32_t>{1, 5000}, std::vector<int>{2}}, states),
                       doctest::Contains("token 5000"), std::invalid_argument);
  CHECK_THROWS_AS(model.forward({std::vector<int32_t>{1, 2}, std::vector<int>{1, 1}}, states),
                  std::invalid_argument);
  CHECK_THROWS_AS(model.forward({std::vector<int32_t>{1, 2}, std::vector<int>{3}}, states),
                  std::invalid_argument);
}

}  // namespace replayeval
