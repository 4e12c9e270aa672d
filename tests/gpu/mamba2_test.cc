// Mamba-2 on the device: outputs, checkpoints, cursors and health are the host's, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>

#include "kernels/mamba2_cuda.h"
#include "tests/gpu/state_rows.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

struct Sizes {
  int heads, groups, head_dim, state_dim;
};

/// A layer, and the records of all tokens of several rows on both sides.
class Problem {
 public:
  /// `exact_base` other than 0: records for which every sum of the state is exact in FP32 over any
  /// number of flushes of windows of 4. Decays are 2^-1, two tokens of a window contribute, every
  /// element keeps one sign and a magnitude between about 1 and 84, and the largest magnitude of
  /// each matrix and row is a constant, the base times a power of two, so that FP32 scales
  /// (divisors 6 * 448 = 21 * 2^7 and 448 = 7 * 2^6) are powers of two.
  Problem(Sizes sizes, int rows, int tokens, unsigned seed, int exact_base = 0)
      : sizes_(sizes), tokens_(tokens) {
    const bool exact = exact_base != 0;
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> step(0.01f, 1.0f);
    std::vector<float> decay, skip;
    for (int h = 0; h < sizes.heads; ++h) {
      decay.push_back(exact ? -1.0f : -0.02f * static_cast<float>(1 << (2 * (h % 4))));
      skip.push_back(0.5f + 0.25f * static_cast<float>(h));
    }
    const auto value = [&] { return bf16_normal(&random); };
    x_row_ = sizes.heads * sizes.head_dim;
    n_row_ = sizes.groups * sizes.state_dim;
    const size_t count = static_cast<size_t>(rows) * tokens;
    x_.resize(count * x_row_);
    b_.resize(count * n_row_);
    c_.resize(count * n_row_);
    dt_.resize(count * sizes.heads);
    std::generate(x_.begin(), x_.end(), value);
    std::generate(b_.begin(), b_.end(), value);
    std::generate(c_.begin(), c_.end(), value);
    std::generate(dt_.begin(), dt_.end(), [&] { return step(random); });
    for (int row = 0; row < rows && exact; ++row) make_exact(row, exact_base, &random);
    y_.assign(x_.size(), -77.0f);
    device_x_ = DeviceArray<float>(x_);
    device_b_ = DeviceArray<float>(b_);
    device_c_ = DeviceArray<float>(c_);
    device_dt_ = DeviceArray<float>(dt_);
    device_y_ = DeviceArray<float>(y_);
    device_decay_ = DeviceArray<float>(decay);
    device_skip_ = DeviceArray<float>(skip);
    decay_ = decay;
    skip_ = skip;
  }
  Mamba2Layer layer(bool device) const {
    Mamba2Layer layer;
    layer.heads = sizes_.heads;
    layer.groups = sizes_.groups;
    layer.head_dim = sizes_.head_dim;
    layer.state_dim = sizes_.state_dim;
    layer.layer = 5;
    layer.head_offset = 3;
    layer.decay_log2 = device ? device_decay_.data() : decay_.data();
    layer.skip = device ? device_skip_.data() : skip_.data();
    return layer;
  }
  Mamba2Inputs inputs(bool device, int row, int first, int count) {
    const int64_t at = int64_t{row} * tokens_ + first;
    Mamba2Inputs in;
    in.tokens = count;
    in.x = (device ? device_x_.data() : x_.data()) + at * x_row_;
    in.b = (device ? device_b_.data() : b_.data()) + at * n_row_;
    in.c = (device ? device_c_.data() : c_.data()) + at * n_row_;
    in.dt = (device ? device_dt_.data() : dt_.data()) + at * sizes_.heads;
    in.y = (device ? device_y_.data() : y_.data()) + at * x_row_;
    in.x_stride = in.y_stride = x_row_;
    in.b_stride = in.c_stride = n_row_;
    in.dt_stride = sizes_.heads;
    return in;
  }
  void poison(int row, int token) {
    for (int i = 0; i < n_row_; i += 7)
      b_[(int64_t{row} * tokens_ + token) * n_row_ + i] = INFINITY;
    device_b_.set(b_);
  }
  void scale(int row, float factor) {
    const auto from = x_.begin() + int64_t{row} * tokens_ * x_row_;
    std::transform(from, from + int64_t{tokens_} * x_row_, from,
                   [&](float x) { return factor * x; });
    device_x_.set(x_);
  }
  void make_exact(int row, int base, std::mt19937* random) {
    const auto pick = [&](int n) {
      return static_cast<int>((*random)() % static_cast<unsigned>(n));
    };
    for (int first = 0; first < tokens_; first += 4) {
      bool active[4] = {first == 0, false, false, false};
      active[pick(4)] = active[pick(4)] = true;
      for (int t = first; t < std::min(first + 4, tokens_); ++t) {
        const size_t at = static_cast<size_t>(row) * tokens_ + t;
        for (int h = 0; h < sizes_.heads; ++h)
          dt_[at * sizes_.heads + h] = active[t - first] ? 1.0f : 0.0f;
        for (int i = 0; i < x_row_; ++i) {
          const int p = i % sizes_.head_dim;
          // S starts at 2 u, so that 2^-1 S + u = S holds where B is constant.
          x_[at * x_row_ + i] = (p % 3 == 1 ? -1.0f : 1.0f) * static_cast<float>(base << (p % 2)) *
                                (t == 0 ? 2.0f : 1.0f);
        }
        for (int i = 0; i < n_row_; ++i) {
          const int n = i % sizes_.state_dim;
          b_[at * n_row_ + i] =
              n == 0 ? 1.0f
                     : (n % 5 == 2 ? -1.0f : 1.0f) * std::ldexp(1.0f, -(t == 0 ? 1 : pick(3)));
          c_[at * n_row_ + i] = static_cast<float>(pick(3) - 1);
        }
      }
    }
  }
  void check_outputs() const { CHECK(different_floats(device_y_.get(), y_) == ""); }
  const std::vector<float>& outputs() const { return y_; }

 private:
  Sizes sizes_;
  int tokens_;
  int x_row_, n_row_;
  std::vector<float> x_, b_, c_, dt_, y_, decay_, skip_;
  DeviceArray<float> device_x_, device_b_, device_c_, device_dt_, device_y_, device_decay_,
      device_skip_;
};

/// One call on both sides; counts[r] tokens of row r from first[r].
void advance(Problem& problem, std::deque<RowPair>& rows, const std::vector<int>& first,
             const std::vector<int>& counts, AdvanceMode mode, KernelForm form = KernelForm::fast) {
  std::vector<StateRow> host, device;
  std::vector<Mamba2Inputs> host_inputs, device_inputs;
  for (size_t r = 0; r < rows.size(); ++r) {
    host.push_back(rows[r].host());
    device.push_back(rows[r].device());
    host_inputs.push_back(problem.inputs(false, static_cast<int>(r), first[r], counts[r]));
    device_inputs.push_back(problem.inputs(true, static_cast<int>(r), first[r], counts[r]));
  }
  mamba2_advance(problem.layer(false), host, host_inputs, mode, form);
  mamba2_advance_cuda(problem.layer(true), device, device_inputs, mode);
}

std::deque<RowPair> make_rows(Sizes sizes, std::mt19937* random) {
  std::deque<RowPair> rows;
  uint32_t stream = 77;
  for (const HeadPlan& plan : plans_to_test()) {
    rows.emplace_back(StateShape{sizes.head_dim, sizes.state_dim}, sizes.heads,
                      std::vector<HeadPlan>{plan}, std::vector<uint8_t>{}, ++stream, random);
  }
  return rows;
}

}  // namespace

TEST_CASE("gpu: mamba2 has the host's bits for every format, ragged rows and any split") {
  if (!gpu() || !host_has_fma()) return;
  for (Sizes sizes :
       {Sizes{4, 2, 80, 128}, Sizes{3, 1, 64, 128}, Sizes{4, 4, 64, 64}, Sizes{2, 2, 4, 32}}) {
    INFO(sizes.heads << " heads [" << sizes.head_dim << ", " << sizes.state_dim << "]");
    std::mt19937 random(31);
    std::deque<RowPair> rows = make_rows(sizes, &random);
    const int count = static_cast<int>(rows.size());
    constexpr int kTokens = 75;
    Problem problem(sizes, count, kTokens, 32);
    std::vector<int> done(rows.size(), 0);
    std::uniform_int_distribution<int> some(0, 40);
    for (int call = 0; call < 12; ++call) {
      std::vector<int> counts;
      for (int r = 0; r < count; ++r)
        counts.push_back(
            std::min(some(random) * (call % 3 == 2 ? 0 : 1) + call % 3, kTokens - done[r]));
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

TEST_CASE("gpu: mamba2 rows of 128 columns, from subnormal numbers to infinity") {
  if (!gpu() || !host_has_fma()) return;
  for (Sizes sizes : {Sizes{3, 1, 80, 128}, Sizes{2, 1, 5, 128}}) {
    INFO(sizes.heads << " heads [" << sizes.head_dim << ", " << sizes.state_dim << "]");
    std::mt19937 random(41);
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
        rows.emplace_back(StateShape{sizes.head_dim, sizes.state_dim}, sizes.heads,
                          std::vector<HeadPlan>{plan}, std::vector<uint8_t>{}, 9u, &random,
                          magnitudes.back());
      }
    }
    const int count = static_cast<int>(rows.size());
    Problem problem(sizes, count, 70, 42);
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

TEST_CASE(
    "gpu: mamba2 keeps matrices in global memory where shared memory is too small, and odd sizes") {
  if (!gpu() || !host_has_fma()) return;
  for (Sizes sizes :
       {Sizes{2, 1, 128, 256}, Sizes{3, 1, 5, 20}, Sizes{1, 1, 1, 1}, Sizes{2, 1, 17, 9}}) {
    INFO(sizes.heads << " heads [" << sizes.head_dim << ", " << sizes.state_dim << "]");
    std::mt19937 random(33);
    std::deque<RowPair> rows;
    for (int window : {1, 7, 33, 64}) {
      for (const char* name : {"fp32", "fp16+sr|fp8", "fp8+sr"}) {
        rows.emplace_back(StateShape{sizes.head_dim, sizes.state_dim}, sizes.heads,
                          std::vector<HeadPlan>{plan_of(name, window)}, std::vector<uint8_t>{}, 9u,
                          &random);
      }
    }
    Problem problem(sizes, static_cast<int>(rows.size()), 130, 34);
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

TEST_CASE("gpu: mamba2 verifies, commits and flushes as the host does") {
  if (!gpu() || !host_has_fma()) return;
  const Sizes sizes{4, 2, 64, 128};
  std::mt19937 random(35);
  std::deque<RowPair> rows = make_rows(sizes, &random);
  const int count = static_cast<int>(rows.size());
  constexpr int kTokens = 120;
  Problem problem(sizes, count, kTokens, 36);
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
    std::vector<Mamba2Inputs> host_inputs, device_inputs;
    for (int r = 0; r < count; ++r) {
      host.push_back(rows[r].host());
      device.push_back(rows[r].device());
      host_inputs.push_back(problem.inputs(false, r, done[r], 0));
      device_inputs.push_back(problem.inputs(true, r, done[r], 0));
    }
    mamba2_flush(problem.layer(false), host, host_inputs, KernelForm::fast);
    mamba2_flush_cuda(problem.layer(true), device, device_inputs);
  }
  for (int r = 0; r < count; ++r) {
    INFO("row " << r);
    rows[r].check_equal();
  }
  problem.check_outputs();
}

TEST_CASE(
    "gpu: mamba2 plans by head, and non-finite states are counted where the host counts them") {
  if (!gpu() || !host_has_fma()) return;
  const Sizes sizes{6, 2, 64, 128};
  std::mt19937 random(37);
  std::deque<RowPair> rows;
  for (int i = 0; i < 2; ++i) {
    rows.emplace_back(
        StateShape{sizes.head_dim, sizes.state_dim}, sizes.heads,
        std::vector<HeadPlan>{plan_of("nvfp4+sr", 4), plan_of("fp32|fp8", 9), plan_of("fp32", 16)},
        std::vector<uint8_t>{0, 1, 2, 1, 0, 2}, 5u, &random);
  }
  Problem problem(sizes, 2, 64, 38);
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

TEST_CASE("gpu: mamba2 exact sums give the FP64 reference's bits over 10,000 flushes") {
  if (!gpu()) return;
  const Sizes sizes{2, 1, 4, 32};
  constexpr int kTokens = 4000;
  for (const char* name : {"fp16+sr", "nvfp4+sr", "fp16+sr|nvfp4+sr", "mxfp4+sr", "fp8+sr"}) {
    INFO(name);
    std::mt19937 random(39);
    std::deque<RowPair> rows;
    rows.emplace_back(StateShape{sizes.head_dim, sizes.state_dim}, sizes.heads,
                      std::vector<HeadPlan>{plan_of(name, 4)}, std::vector<uint8_t>{}, 3u, &random,
                      0.0f);
    Problem problem(sizes, 1, 10 * kTokens, 40, std::string(name) == "fp8+sr" ? 7 : 21);
    for (int first = 0; first < 10 * kTokens; first += kTokens) {
      advance(problem, rows, {first}, {kTokens}, AdvanceMode::commit, KernelForm::reference);
      rows[0].move(kTokens);
      rows[0].check_equal();
    }
  }
}
