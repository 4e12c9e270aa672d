// GDN and KDA on the device: outputs, corrections, checkpoints, cursors and health are the host's,
// bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "kernels/gdn_cuda.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

struct Sizes {
  int key_heads, value_heads, value_dim, key_dim;
  bool channel;
};

/// A layer, and the records of all tokens of several rows on both sides.
class Problem {
 public:
  /// `exact`: every number is a small multiple of a power of two. Keys and queries are 2^20 times
  /// unit vectors (2^40 + 1e-6 is 2^40, so k^ is exactly a unit vector and q^ exactly K^-1/2 times
  /// one), values -4 .. 4, beta and decays 1 or 1/2; a state element stays below 8 on multiples of
  /// 2^-9 (E4M3) or 2^-16 (E5M2), and a window of 2 halves it at most 4 times.
  Problem(Sizes sizes, int rows, int tokens, unsigned seed, bool exact = false)
      : sizes_(sizes), tokens_(tokens) {
    std::mt19937 random(seed);
    k_row_ = sizes.key_heads * sizes.key_dim;
    v_row_ = sizes.value_heads * sizes.value_dim;
    g_row_ = sizes.value_heads * (sizes.channel ? sizes.key_dim : 1);
    const size_t count = static_cast<size_t>(rows) * tokens;
    std::uniform_real_distribution<float> unit(0.0f, 1.0f);
    q_.resize(count * k_row_);
    k_.resize(count * k_row_);
    v_.resize(count * v_row_);
    g_.resize(count * g_row_);
    beta_.resize(count * sizes.value_heads);
    std::generate(q_.begin(), q_.end(), [&] { return bf16_normal(&random); });
    std::generate(k_.begin(), k_.end(), [&] { return bf16_normal(&random); });
    std::generate(v_.begin(), v_.end(), [&] { return bf16_normal(&random); });
    std::generate(g_.begin(), g_.end(), [&] { return -std::exp(6.0f * unit(random) - 5.0f); });
    std::generate(beta_.begin(), beta_.end(), [&] { return unit(random); });
    for (std::vector<float>* x : {&q_, &k_}) {
      if (!exact) break;
      std::fill(x->begin(), x->end(), 0.0f);
      for (size_t i = 0; i < x->size(); i += sizes.key_dim) {
        (*x)[i + random() % sizes.key_dim] = random() % 2 ? 0x1p20f : -0x1p20f;
      }
    }
    if (exact) {
      for (float& x : v_) x = static_cast<float>(static_cast<int>(random() % 9) - 4);
      for (float& x : beta_) x = random() % 2 ? 1.0f : 0.5f;
      for (float& x : g_) x = random() % 2 ? -1.0f : 0.0f;
    }
    u_.assign(v_.size(), -77.0f);
    o_.assign(v_.size(), -77.0f);
    device_q_ = DeviceArray<float>(q_);
    device_k_ = DeviceArray<float>(k_);
    device_v_ = DeviceArray<float>(v_);
    device_g_ = DeviceArray<float>(g_);
    device_beta_ = DeviceArray<float>(beta_);
    device_u_ = DeviceArray<float>(u_);
    device_o_ = DeviceArray<float>(o_);
  }
  GdnLayer layer() const {
    GdnLayer layer;
    layer.key_heads = sizes_.key_heads;
    layer.value_heads = sizes_.value_heads;
    layer.key_dim = sizes_.key_dim;
    layer.value_dim = sizes_.value_dim;
    layer.channel_decay = sizes_.channel;
    layer.layer = 4;
    layer.head_offset = 2;
    return layer;
  }
  GdnInputs inputs(bool device, int row, int first, int count) {
    const int64_t at = int64_t{row} * tokens_ + first;
    GdnInputs in;
    in.tokens = count;
    in.q = (device ? device_q_.data() : q_.data()) + at * k_row_;
    in.k = (device ? device_k_.data() : k_.data()) + at * k_row_;
    in.v = (device ? device_v_.data() : v_.data()) + at * v_row_;
    in.decay_log2 = (device ? device_g_.data() : g_.data()) + at * g_row_;
    in.beta = (device ? device_beta_.data() : beta_.data()) + at * sizes_.value_heads;
    in.u = (device ? device_u_.data() : u_.data()) + at * v_row_;
    in.o = (device ? device_o_.data() : o_.data()) + at * v_row_;
    in.q_stride = in.k_stride = k_row_;
    in.v_stride = in.u_stride = in.o_stride = v_row_;
    in.decay_stride = g_row_;
    in.beta_stride = sizes_.value_heads;
    return in;
  }
  void poison(int row, int token) {
    v_[(int64_t{row} * tokens_ + token) * v_row_ + 3] = INFINITY;
    device_v_.set(v_);
  }
  void scale(int row, float factor) {
    const auto from = v_.begin() + int64_t{row} * tokens_ * v_row_;
    std::transform(from, from + int64_t{tokens_} * v_row_, from,
                   [&](float x) { return factor * x; });
    device_v_.set(v_);
  }
  void check_outputs() const {
    CHECK(different_floats(device_o_.get(), o_) == "");
    CHECK(different_floats(device_u_.get(), u_) == "");
  }

 private:
  Sizes sizes_;
  int tokens_;
  int k_row_, v_row_, g_row_;
  std::vector<float> q_, k_, v_, g_, beta_, u_, o_;
  DeviceArray<float> device_q_, device_k_, device_v_, device_g_, device_beta_, device_u_, device_o_;
};

void advance(Problem& problem, std::deque<RowPair>& rows, const std::vector<int>& first,
             const std::vector<int>& counts, AdvanceMode mode, KernelForm form = KernelForm::fast) {
  std::vector<StateRow> host, device;
  std::vector<GdnInputs> host_inputs, device_inputs;
  for (size_t r = 0; r < rows.size(); ++r) {
    host.push_back(rows[r].host());
    device.push_back(rows[r].device());
    host_inputs.push_back(problem.inputs(false, static_cast<int>(r), first[r], counts[r]));
    device_inputs.push_back(problem.inputs(true, static_cast<int>(r), first[r], counts[r]));
  }
  gdn_advance(problem.layer(), host, host_inputs, mode, form);
  gdn_advance_cuda(problem.layer(), device, device_inputs, mode);
}

std::vector<HeadPlan> gdn_plans() {
  std::vector<HeadPlan> plans = plans_to_test();
  for (const char* name : {"fp32|nvfp4", "fp16+sr", "fp8+sr|fp16"}) {
    for (GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
      for (RecordType ring : {RecordType::fp32, RecordType::bf16}) {
        plans.push_back(plan_of(name, 6));
        plans.back().gdn_fold = fold;
        plans.back().ring_u = ring;
        plans.back().beta = ring;
        plans.back().flush_output = fold == GdnFold::cached && ring == RecordType::bf16
                                        ? FlushOutput::read
                                        : FlushOutput::recurrence;
      }
    }
  }
  plans.push_back(plan_of("fp16+sr|nvfp4", 7));
  plans.back().gdn_fold = GdnFold::cached;
  plans.back().dot = DotType::bf16;
  return plans;
}

std::deque<RowPair> make_rows(Sizes sizes, std::mt19937* random) {
  std::deque<RowPair> rows;
  uint32_t stream = 77;
  for (const HeadPlan& plan : gdn_plans()) {
    rows.emplace_back(StateShape{sizes.value_dim, sizes.key_dim}, sizes.value_heads,
                      std::vector<HeadPlan>{plan}, std::vector<uint8_t>{}, ++stream, random, 0.1f);
  }
  return rows;
}

std::string named(Sizes s) {
  return std::string(s.channel ? "kda" : "gdn") + " [" + std::to_string(s.value_dim) + ", " +
         std::to_string(s.key_dim) + "]";
}

}  // namespace

TEST_CASE("gpu: gdn and kda have the host's bits for every format, ragged rows and any split") {
  if (!gpu() || !host_has_fma()) return;
  for (Sizes sizes : {Sizes{2, 4, 128, 128, false}, Sizes{2, 2, 128, 128, true},
                      Sizes{2, 4, 64, 64, false}, Sizes{1, 2, 32, 64, true}}) {
    INFO(named(sizes));
    std::mt19937 random(51);
    std::deque<RowPair> rows = make_rows(sizes, &random);
    const int count = static_cast<int>(rows.size());
    constexpr int kTokens = 60;
    Problem problem(sizes, count, kTokens, 52);
    std::vector<int> done(rows.size(), 0);
    std::uniform_int_distribution<int> some(0, 30);
    for (int call = 0; call < 12; ++call) {
      std::vector<int> counts;
      for (int r = 0; r < count; ++r) {
        counts.push_back(
            std::min(some(random) * (call % 3 == 2 ? 0 : 1) + call % 3, kTokens - done[r]));
      }
      advance(problem, rows, done, counts, AdvanceMode::commit);
      for (int r = 0; r < count; ++r) {
        done[r] += counts[r];
        rows[r].move(counts[r]);
      }
    }
    for (int r = 0; r < count; ++r) {
      INFO("row " << r);
      CHECK(done[r] == kTokens);
      rows[r].check_equal();
    }
    problem.check_outputs();
  }
}

TEST_CASE("gpu: gdn rows of 128 columns, from subnormal numbers to infinity") {
  if (!gpu() || !host_has_fma()) return;
  for (Sizes sizes : {Sizes{1, 2, 128, 128, false}, Sizes{1, 2, 64, 128, false},
                      Sizes{1, 3, 20, 128, false}, Sizes{1, 1, 97, 128, false}}) {
    INFO(named(sizes));
    std::mt19937 random(61);
    std::deque<RowPair> rows;
    std::vector<std::string> names;
    std::vector<float> magnitudes;
    for (const StateCodec& codec : row_codecs()) {
      for (int window : {1, 4, 16}) {
        magnitudes.push_back(row_magnitude(magnitudes.size()));
        HeadPlan plan = plan_of("fp32", window);
        if (window == 4) {
          plan.read = codec;
        } else {
          plan.recurrence = codec;
        }
        names.push_back(codec.format->name);
        rows.emplace_back(StateShape{sizes.value_dim, sizes.key_dim}, sizes.value_heads,
                          std::vector<HeadPlan>{plan}, std::vector<uint8_t>{}, 9u, &random,
                          magnitudes.back());
      }
    }
    const int count = static_cast<int>(rows.size());
    Problem problem(sizes, count, 70, 62);
    for (int r = 0; r < count; ++r) problem.scale(r, magnitudes[static_cast<size_t>(r)]);
    for (int row : {9, 11, 51}) problem.poison(row, 40);
    for (int first : {0, 37}) {
      const int tokens = first == 0 ? 37 : 33;
      advance(problem, rows, std::vector<int>(rows.size(), first),
              std::vector<int>(rows.size(), tokens), AdvanceMode::commit);
      for (RowPair& row : rows) row.move(tokens);
    }
    for (int r = 0; r < count; ++r) {
      INFO("row " << r << " " << names[static_cast<size_t>(r)]);
      rows[static_cast<size_t>(r)].check_equal();
    }
    problem.check_outputs();
  }
}

TEST_CASE("gpu: gdn and kda with long windows and odd sizes") {
  if (!gpu() || !host_has_fma()) return;
  for (Sizes sizes :
       {Sizes{1, 2, 128, 128, false}, Sizes{1, 1, 128, 128, true}, Sizes{1, 3, 5, 20, false},
        Sizes{1, 1, 17, 9, true}, Sizes{1, 1, 1, 1, false}}) {
    INFO(named(sizes));
    std::mt19937 random(53);
    std::deque<RowPair> rows;
    for (int window : {1, 33, 64}) {
      for (const char* name : {"fp32", "fp16+sr|fp8", "fp8+sr"}) {
        rows.emplace_back(StateShape{sizes.value_dim, sizes.key_dim}, sizes.value_heads,
                          std::vector<HeadPlan>{plan_of(name, window)}, std::vector<uint8_t>{}, 9u,
                          &random, 0.1f);
      }
    }
    Problem problem(sizes, static_cast<int>(rows.size()), 130, 54);
    for (int first : {0, 61}) {
      const int tokens = first == 0 ? 61 : 69;
      advance(problem, rows, std::vector<int>(rows.size(), first),
              std::vector<int>(rows.size(), tokens), AdvanceMode::commit);
      for (RowPair& row : rows) row.move(tokens);
    }
    for (const RowPair& row : rows) row.check_equal();
    problem.check_outputs();
  }
}

TEST_CASE("gpu: gdn and kda verify, commit and flush as the host does") {
  if (!gpu() || !host_has_fma()) return;
  for (bool channel : {false, true}) {
    const Sizes sizes{2, channel ? 2 : 4, 64, 64, channel};
    INFO(named(sizes));
    std::mt19937 random(55);
    std::deque<RowPair> rows = make_rows(sizes, &random);
    const int count = static_cast<int>(rows.size());
    constexpr int kTokens = 120;
    Problem problem(sizes, count, kTokens, 56);
    std::vector<int> done(rows.size(), 0);
    for (int call = 0; call < 16; ++call) {
      std::vector<int> drafts;
      for (int r = 0; r < count; ++r) drafts.push_back(1 + static_cast<int>(random() % 6));
      advance(problem, rows, done, drafts, AdvanceMode::verify);
      for (int r = 0; r < count; ++r) {
        const int accepted = 1 + static_cast<int>(random() % static_cast<unsigned>(drafts[r]));
        done[r] += accepted;
        rows[r].accept(accepted);
      }
      if (call % 5 != 4) continue;
      std::vector<StateRow> host, device;
      std::vector<GdnInputs> host_inputs, device_inputs;
      for (int r = 0; r < count; ++r) {
        host.push_back(rows[r].host());
        device.push_back(rows[r].device());
        host_inputs.push_back(problem.inputs(false, r, done[r], 0));
        device_inputs.push_back(problem.inputs(true, r, done[r], 0));
      }
      gdn_flush(problem.layer(), host, host_inputs, KernelForm::fast);
      gdn_flush_cuda(problem.layer(), device, device_inputs);
    }
    for (int r = 0; r < count; ++r) {
      INFO("row " << r);
      rows[r].check_equal();
    }
    problem.check_outputs();
  }
}

TEST_CASE("gpu: gdn plans by head, and non-finite states are counted where the host counts them") {
  if (!gpu() || !host_has_fma()) return;
  const Sizes sizes{3, 6, 64, 64, false};
  std::mt19937 random(57);
  std::deque<RowPair> rows;
  for (int i = 0; i < 2; ++i) {
    rows.emplace_back(
        StateShape{sizes.value_dim, sizes.key_dim}, sizes.value_heads,
        std::vector<HeadPlan>{plan_of("nvfp4+sr", 4), plan_of("fp32|fp8", 9), plan_of("fp32", 16)},
        std::vector<uint8_t>{0, 1, 2, 1, 0, 2}, 5u, &random, 0.1f);
  }
  Problem problem(sizes, 2, 64, 58);
  problem.poison(1, 21);
  for (int first : {0, 10, 50}) {
    const int tokens = first == 0 ? 10 : first == 10 ? 40 : 14;
    advance(problem, rows, {first, first}, {tokens, tokens}, AdvanceMode::commit);
    for (RowPair& row : rows) row.move(tokens);
  }
  for (const RowPair& row : rows) row.check_equal();
  CHECK(rows[0].non_finite() == 0);
  CHECK(rows[1].non_finite() > 0);
  problem.check_outputs();
}

TEST_CASE("gpu: gdn and kda exact sums give the FP64 reference's bits over 10,000 flushes") {
  if (!gpu()) return;
  constexpr int kTokens = 20000;
  for (bool channel : {false, true}) {
    for (const char* name : {"fp8_e4m3+sr", "fp8_e4m3+sr|fp8_e5m2+sr"}) {
      INFO(name);
      const Sizes sizes{1, 1, 8, 16, channel};
      std::mt19937 random(59);
      std::deque<RowPair> rows;
      rows.emplace_back(StateShape{8, 16}, 1, std::vector<HeadPlan>{plan_of(name, 2)},
                        std::vector<uint8_t>{}, 3u, &random, 0.0f);
      Problem problem(sizes, 1, kTokens, 60, true);
      advance(problem, rows, {0}, {kTokens}, AdvanceMode::commit, KernelForm::reference);
      rows[0].check_equal();
      problem.check_outputs();
    }
  }
}
