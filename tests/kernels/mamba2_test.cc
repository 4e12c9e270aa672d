// Mamba-2 replay: the window form against the FP64 reference, exact records, and what must agree
// bit for bit (DESIGN.md section 2).
#include "kernels/mamba2.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/mamba2_simd.h"
#include "kernels/mamba2_timing.h"
#include "kernels/replay.h"

namespace replayeval {
namespace {

constexpr double kUnit = 0x1p-24;

struct Sizes {
  int heads = 4, groups = 2, head_dim = 8, state_dim = 16;
};

/// Constants of a layer with the arrays they point to.
struct Layer {
  Sizes sizes;
  std::vector<float> decay, skip;

  explicit Layer(Sizes sizes, float slowest = -0.02f) : sizes(sizes) {
    for (int h = 0; h < sizes.heads; ++h) {
      decay.push_back(slowest * static_cast<float>(1 << (2 * (h % 4))));
      skip.push_back(0.5f + 0.25f * static_cast<float>(h));
    }
  }
  Mamba2Layer view(bool with_skip = true) const {
    Mamba2Layer layer;
    layer.heads = sizes.heads;
    layer.groups = sizes.groups;
    layer.head_dim = sizes.head_dim;
    layer.state_dim = sizes.state_dim;
    layer.layer = 5;
    layer.decay_log2 = decay.data();
    layer.skip = with_skip ? skip.data() : nullptr;
    return layer;
  }
  StateShape shape() const { return {sizes.head_dim, sizes.state_dim}; }
};

/// Records and queries of one row, as one token-major array [x | gap | B | gap | C] as a
/// convolution leaves them, and dt apart.
struct Records {
  Sizes sizes;
  int tokens;
  int64_t stride, dt_stride;
  std::vector<float> values, dt;

  Records(Sizes s, int tokens)
      : sizes(s),
        tokens(tokens),
        stride(s.heads * s.head_dim + 2 * s.groups * s.state_dim + 5),
        dt_stride(s.heads + 1),
        values(static_cast<size_t>(tokens * stride), NAN),
        dt(static_cast<size_t>(tokens * dt_stride), NAN) {}

  static Records random(Sizes sizes, int tokens, unsigned seed) {
    Records r(sizes, tokens);
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> step(0.01f, 1.0f);
    const auto bf16 = [&] { return round_operand(DotType::bf16, normal(engine)); };
    for (int t = 0; t < tokens; ++t) {
      std::generate_n(r.x(t), sizes.heads * sizes.head_dim, bf16);
      std::generate_n(r.b(t), sizes.groups * sizes.state_dim, bf16);
      std::generate_n(r.c(t), sizes.groups * sizes.state_dim, bf16);
      std::generate_n(r.step(t), sizes.heads, [&] { return step(engine); });
    }
    return r;
  }
  float* x(int t, int head = 0) { return values.data() + t * stride + head * sizes.head_dim; }
  float* b(int t, int group = 0) {
    return values.data() + t * stride + sizes.heads * sizes.head_dim + 2 + group * sizes.state_dim;
  }
  float* c(int t, int group = 0) { return b(t, group) + sizes.groups * sizes.state_dim + 1; }
  float* step(int t) { return dt.data() + t * dt_stride; }

  Mamba2Inputs inputs(int first, int count, std::vector<float>& y) {
    const int64_t y_stride = int64_t{sizes.heads} * sizes.head_dim + 3;
    if (y.empty()) y.assign(static_cast<size_t>(tokens * y_stride), -77.0f);
    Mamba2Inputs in;
    in.tokens = count;
    // A call of no tokens at the end has no token to point to; the kernels must not look there.
    in.x = values.data() + first * stride;
    in.b = in.x + (b(0) - x(0));
    in.c = in.x + (c(0) - x(0));
    in.x_stride = in.b_stride = in.c_stride = stride;
    in.dt = dt.data() + first * dt_stride;
    in.dt_stride = dt_stride;
    in.y = y.data() + first * y_stride;
    in.y_stride = y_stride;
    return in;
  }
};

StateCodec codec(const std::string& name) {
  const bool stochastic = name.size() > 3 && name.substr(name.size() - 3) == "+sr";
  return {find_format(stochastic ? name.substr(0, name.size() - 3) : name),
          stochastic ? Rounding::stochastic : Rounding::nearest_even};
}

/// "recurrence" or "recurrence/read".
HeadPlan plan_of(const std::string& name, int window) {
  HeadPlan plan;
  const size_t slash = name.find('/');
  plan.recurrence = codec(name.substr(0, slash));
  if (slash != std::string::npos) plan.read = codec(name.substr(slash + 1));
  plan.window = window;
  plan.seed = 0x123456789abcdefull;
  return plan;
}

/// One row with its checkpoints, outputs and position.
struct Row {
  std::vector<HeadPlan> plans;
  std::vector<uint8_t> plan_of_head;
  std::vector<int> pending;
  size_t stride = 0;
  std::vector<std::byte> recurrence, read;
  std::vector<HeadHealth> health;
  std::vector<float> y;
  int64_t position = 0;
  uint32_t stream = 0;

  Row(const Layer& layer, std::vector<HeadPlan> row_plans, std::vector<uint8_t> of_head = {})
      : plans(std::move(row_plans)), plan_of_head(std::move(of_head)), pending(plans.size(), 0) {
    const size_t heads = static_cast<size_t>(layer.sizes.heads);
    for (const HeadPlan& plan : plans) {
      stride = std::max(stride, packed_bytes(*plan.recurrence.format, layer.shape()));
      if (plan.read) stride = std::max(stride, packed_bytes(*plan.read->format, layer.shape()));
    }
    stride = (stride + 63) / 64 * 64;
    recurrence.resize(heads * stride);
    read.resize(heads * stride);
    health.resize(heads);
  }
  Row(const Layer& layer, const std::string& name, int window)
      : Row(layer, std::vector<HeadPlan>{plan_of(name, window)}) {}

  StateRow view() {
    StateRow row;
    row.position = position;
    row.stream = stream;
    row.plans = plans;
    row.plan_of_head = plan_of_head.empty() ? nullptr : plan_of_head.data();
    row.pending = pending.data();
    row.recurrence = recurrence.data();
    row.read = read.data();
    row.recurrence_stride = row.read_stride = stride;
    row.health = health.data();
    return row;
  }
  std::vector<float> decoded(const Layer& layer, int head, StateRole role = StateRole::recurrence) {
    std::vector<float> state(static_cast<size_t>(layer.shape().elements()));
    decode_checkpoint(view(), layer.shape(), head, role, state.data());
    return state;
  }
  /// Places a state in both checkpoints of a head.
  void set(const Layer& layer, int head, const std::vector<float>& state) {
    encode_checkpoints(view(), layer.shape(), head, {},
                       state_amax(state.data(), layer.shape().elements()), state.data());
    health[static_cast<size_t>(head)] = {};
  }
};

void advance(const Mamba2Layer& layer, Row& row, Records& records, int first, int count,
             AdvanceMode mode = AdvanceMode::commit, KernelForm form = KernelForm::fast) {
  StateRow view = row.view();
  const Mamba2Inputs in = records.inputs(first, count, row.y);
  mamba2_advance(layer, {&view, 1}, {&in, 1}, mode, form);
  if (mode == AdvanceMode::commit) row.position += count;
}

void flush(const Mamba2Layer& layer, Row& row, Records& records, int next,
           KernelForm form = KernelForm::fast) {
  StateRow view = row.view();
  const Mamba2Inputs in = records.inputs(next, 0, row.y);
  mamba2_flush(layer, {&view, 1}, {&in, 1}, form);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool same_health(const Row& a, const Row& b) {
  for (size_t h = 0; h < a.health.size(); ++h) {
    const HeadHealth &p = a.health[h], &q = b.health[h];
    if (p.encode.elements != q.encode.elements || p.encode.non_finite != q.encode.non_finite ||
        p.encode.saturated != q.encode.saturated || p.encode.clipped != q.encode.clipped ||
        p.encode.vanished != q.encode.vanished ||
        p.first_non_finite_position != q.first_non_finite_position) {
      return false;
    }
  }
  return true;
}

/// Everything a row holds, bit for bit.
void check_equal_rows(const Row& got, const Row& want) {
  CHECK(same_bits(got.y, want.y));
  CHECK(got.recurrence == want.recurrence);
  CHECK(got.read == want.read);
  CHECK(got.pending == want.pending);
  CHECK(same_health(got, want));
}

/// Tiny calls run faster on one thread.
class OneThread {
 public:
  OneThread() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(threads_); }

 private:
  int threads_;
};

/// Keeps the largest error in units of its bound and how it came about.
struct Worst {
  double ratio = -1;
  std::string report;

  void see(const std::string& place, float got, double want, double bound) {
    const double error = std::fabs(got - want);
    if (error / bound <= ratio || (error == 0 && bound == 0)) return;
    ratio = std::isnan(error) ? std::numeric_limits<double>::infinity() : error / bound;
    char text[256];
    std::snprintf(text, sizeof text, "%s: got %.9g (%a), expected %.17g, error %.3g, bound %.3g",
                  place.c_str(), got, got, want, error, bound);
    report = text;
  }
  void check() const {
    INFO(report);
    CHECK(ratio <= 1.0);
  }
};

/// Error bound of the window form for one head, from magnitudes alone. u = 2^-24; every fused step
/// is counted as two roundings, so that the bound holds without FMA hardware; 1.01 covers
/// second-order terms and that magnitudes are taken from exact values.
///
/// Decays: g_t = dt_t a carries u, and D(j,t) sums at most m of them of one sign, so its error is
/// at most (m + 1) u |D|. The exponential turns it into a relative ln 2 (m + 1) u |D| and adds 1e-7
/// < 2 u (kernels/lanes.h): d = ln 2 (m + 1) |D(0)| + 2 units for every weight of a window of m
/// records. Fold: S_new = sum of m + 1 terms, each weight times dt times x (2 units), added in m +
/// 1 fused steps (2 (m + 1) units), and the reference rounds its state to FP32 once: kappa_S = d +
/// 2 + 2 (m + 1) + 1. Dot products over N: ceil(N / 16) fused steps and 4 additions: q = 2 ceil(N /
/// 16) + 4 units. Window read: terms carry d + q, weights two products more, the sum m + 2 fused
/// steps, the reference's rounding 1: kappa_y = d + q + 2 + 2 (m + 2) + 1. Flush read: y = S_new .
/// C + D x: q + 3 units and the error of S_new. Underflow: results below 2^-126 lose at most 2^-149
/// each; 2^-120 covers all of them here.
class Bound {
 public:
  Bound(const Layer& layer, int head)
      : layer_(layer),
        head_(head),
        group_(head / (layer.sizes.heads / layer.sizes.groups)),
        magnitude_(static_cast<size_t>(layer.shape().elements()), 0.0),
        error_(magnitude_) {}

  /// Starts from a known state without error.
  void start(const std::vector<float>& state) {
    for (size_t i = 0; i < state.size(); ++i) magnitude_[i] = std::fabs(state[i]), error_[i] = 0;
  }
  /// Bounds of y of token t of a window that starts at `first`, for each p.
  std::vector<double> read(Records& r, int first, int t, bool from_new) const {
    std::vector<double> m = magnitude_, e = error_;
    const double units = fold(r, first, t + 1, m, e);
    const int n_dim = layer_.sizes.state_dim;
    const int records = t + 1 - first;
    const double q = 2 * ((n_dim + 15) / 16) + 4;
    const double kappa =
        from_new ? q + 3 : units - 1 - 2 * (records + 1) + q + 2 * (records + 2) + 1;
    std::vector<double> bounds;
    for (int p = 0; p < layer_.sizes.head_dim; ++p) {
      double sum = std::fabs(layer_.skip[static_cast<size_t>(head_)] * r.x(t, head_)[p]);
      double carried = 0;
      for (int n = 0; n < n_dim; ++n) {
        const size_t i = static_cast<size_t>(p * n_dim + n);
        const double c = std::fabs(r.c(t, group_)[n]);
        sum += m[i] * c;
        // Window reads see the error of the checkpoint, not the fold's own roundings, which kappa
        // counts instead.
        carried += (from_new ? e[i] : error_[i] * carry_) * c;
      }
      bounds.push_back(1.01 * (carried + kUnit * kappa * sum) + 0x1p-120);
    }
    return bounds;
  }
  void flush(Records& r, int first, int end) { fold(r, first, end, magnitude_, error_); }
  double state_bound(size_t i) const { return 1.01 * error_[i] + 0x1p-120; }
  double magnitude(size_t i) const { return magnitude_[i]; }

 private:
  double fold(Records& r, int first, int end, std::vector<double>& m,
              std::vector<double>& e) const {
    const int n_dim = layer_.sizes.state_dim;
    const double a = layer_.decay[static_cast<size_t>(head_)];
    double total = 0;
    carry_ = 1;
    for (int t = first; t < end; ++t) {
      const double g = r.step(t)[head_] * a;
      total += std::fabs(g);
      carry_ *= std::exp2(g);
      for (int p = 0; p < layer_.sizes.head_dim; ++p) {
        const double u = std::fabs(double{r.step(t)[head_]} * r.x(t, head_)[p]);
        for (int n = 0; n < n_dim; ++n) {
          double& value = m[static_cast<size_t>(p * n_dim + n)];
          value = value * std::exp2(g) + u * std::fabs(r.b(t, group_)[n]);
        }
      }
    }
    const int records = end - first;
    const double units = std::log(2.0) * (records + 1) * total + 2 + 2 + 2 * (records + 1) + 1;
    for (size_t i = 0; i < e.size(); ++i) e[i] = e[i] * carry_ + kUnit * units * m[i];
    return units;
  }

  const Layer& layer_;
  int head_, group_;
  std::vector<double> magnitude_, error_;
  mutable double carry_ = 1;
};

std::string place(const char* what, int t, int head, int p) {
  return std::string(what) + " token " + std::to_string(t) + " head " + std::to_string(head) +
         " element " + std::to_string(p);
}

/// Outputs and final states of an FP32 row against those of the reference, over commit windows of L
/// from token 0.
void check_fp32_row(const Layer& layer, Records& records, Row& fast, Row& slow, int window) {
  Worst worst;
  const int64_t y_stride = int64_t{layer.sizes.heads} * layer.sizes.head_dim + 3;
  for (int head = 0; head < layer.sizes.heads; ++head) {
    Bound bound(layer, head);
    int first = 0;
    for (int t = 0; t < records.tokens; ++t) {
      const bool full = t + 1 - first == window;
      const bool from_new = full && fast.plans[0].flush_output == FlushOutput::recurrence;
      const std::vector<double> bounds = bound.read(records, first, t, from_new);
      for (int p = 0; p < layer.sizes.head_dim; ++p) {
        const size_t i = static_cast<size_t>(t * y_stride + head * layer.sizes.head_dim + p);
        worst.see(place("y", t, head, p), fast.y[i], slow.y[i], bounds[static_cast<size_t>(p)]);
      }
      if (full) bound.flush(records, first, t + 1), first = t + 1;
    }
    const std::vector<float> got = fast.decoded(layer, head), want = slow.decoded(layer, head);
    for (size_t i = 0; i < got.size(); ++i) {
      worst.see(place("state", records.tokens, head, static_cast<int>(i)), got[i], want[i],
                bound.state_bound(i));
    }
  }
  worst.check();
}

}  // namespace

TEST_CASE("mamba2: FP32 window form against the FP64 reference, all shapes and windows") {
  const OneThread one_thread;
  const Sizes shapes[] = {{4, 2, 8, 16},  {1, 1, 1, 1},   {3, 1, 5, 7},   {4, 4, 17, 33},
                          {2, 1, 16, 48}, {2, 2, 20, 80}, {6, 3, 33, 15}, {2, 1, 80, 128}};
  for (const Sizes& sizes : shapes) {
    const Layer layer(sizes);
    for (int window : {1, 2, 3, 16, 17, 64}) {
      for (FlushOutput output : {FlushOutput::recurrence, FlushOutput::read}) {
        // The largest shape once for windows of 1 and 16: the bound costs a fold a token.
        if (sizes.state_dim == 128 &&
            (output == FlushOutput::read || (window != 1 && window != 16)))
          continue;
        CAPTURE(sizes.head_dim);
        CAPTURE(sizes.state_dim);
        CAPTURE(window);
        const int tokens = 2 * window + window / 2 + 3;
        Records records = Records::random(sizes, tokens, static_cast<unsigned>(window));
        Row fast(layer, "fp32", window), slow(layer, "fp32", window);
        fast.plans[0].flush_output = slow.plans[0].flush_output = output;
        advance(layer.view(), fast, records, 0, tokens);
        advance(layer.view(), slow, records, 0, tokens, AdvanceMode::commit, KernelForm::reference);
        CHECK(fast.pending == slow.pending);
        CHECK(same_health(fast, slow));
        check_fp32_row(layer, records, fast, slow, window);
      }
    }
  }
}

TEST_CASE("mamba2: strong decays stay within the bound and never overflow") {
  const Layer layer({4, 1, 8, 32}, -3.0f);  // down to 2^-192 a token
  Records records = Records::random(layer.sizes, 50, 3);
  for (int window : {5, 16}) {
    Row fast(layer, "fp32", window), slow(layer, "fp32", window);
    advance(layer.view(), fast, records, 0, 50);
    advance(layer.view(), slow, records, 0, 50, AdvanceMode::commit, KernelForm::reference);
    check_fp32_row(layer, records, fast, slow, window);
  }
}

TEST_CASE("mamba2: no skip connection") {
  Layer layer({2, 1, 8, 16});
  Records records = Records::random(layer.sizes, 9, 3);
  Row with(layer, "fp32", 4), without(layer, "fp32", 4);
  advance(layer.view(false), without, records, 0, 9);
  std::fill(layer.skip.begin(), layer.skip.end(), 0.0f);
  advance(layer.view(true), with, records, 0, 9);
  CHECK(with.y == without.y);
}

TEST_CASE("mamba2: L = 1 with a shared FP32 checkpoint is the eager recurrence") {
  const Layer layer({3, 1, 20, 37});
  Records records = Records::random(layer.sizes, 40, 11);
  Row row(layer, "fp32", 1);
  advance(layer.view(), row, records, 0, 40);
  const bool fused = simd_level() != SimdLevel::generic;
  Worst worst;
  for (int head = 0; head < 3; ++head) {
    std::vector<float> state(20 * 37, 0.0f);
    for (int t = 0; t < 40; ++t) {
      const float dt = records.step(t)[head];
      const float g = dt * layer.decay[static_cast<size_t>(head)];
      float decay = 0;
      exp2_array(&g, 1, &decay);
      for (int p = 0; p < 20; ++p) {
        const float u = dt * records.x(t, head)[p];
        double y = double{layer.skip[static_cast<size_t>(head)]} * records.x(t, head)[p];
        double magnitude = std::fabs(y);
        for (int n = 0; n < 37; ++n) {
          float& s = state[static_cast<size_t>(p * 37 + n)];
          const float carried = decay * s, b = records.b(t)[n];
          const float product = u * b;
          s = fused ? std::fmaf(u, b, carried) : carried + product;
          y += double{s} * records.c(t)[n];
          magnitude += std::fabs(double{s} * records.c(t)[n]);
        }
        // A dot product over 37 (3 steps and 4 additions) and the skip, on the state itself.
        worst.see(place("y", t, head, p), row.y[static_cast<size_t>(t * 63 + head * 20 + p)], y,
                  1.01 * kUnit * (2 * 3 + 4 + 2) * magnitude);
      }
    }
    CHECK(same_bits(row.decoded(layer, head), state));
  }
  worst.check();
}

TEST_CASE("mamba2: every instruction-set level meets the bound") {
  const Layer layer({1, 1, 21, 37});
  constexpr int kRecords = 19;
  Records records = Records::random(layer.sizes, kRecords, 5);
  Row slow(layer, "fp32", kRecords);
  slow.plans[0].flush_output = FlushOutput::recurrence;
  advance(layer.view(), slow, records, 0, kRecords, AdvanceMode::commit, KernelForm::reference);
  const std::vector<float> want = slow.decoded(layer, 0);
  const auto run = [&](auto gram_of_level, auto span_of_level) {
    std::vector<float> y(kRecords * 21), state(21 * 37, 0.0f), gram(kRecords * 32),
        scratch(static_cast<size_t>(mamba2_scratch_floats(21, 37)));
    Mamba2Span s;
    s.head_dim = 21;
    s.state_dim = 37;
    s.records = s.queries = kRecords;
    s.flush = s.read_new = s.check_finite = s.has_skip = true;
    s.decay_log2 = layer.decay[0];
    s.skip = layer.skip[0];
    s.x = records.x(0);
    s.b = records.b(0);
    s.c = records.c(0);
    s.x_stride = s.b_stride = s.c_stride = records.stride;
    s.dt = records.step(0);
    s.dt_stride = records.dt_stride;
    s.y = y.data();
    s.y_stride = 21;
    s.gram = gram.data();
    s.gram_stride = 32;
    s.read_state = s.state = state.data();
    s.scratch = scratch.data();
    gram_of_level(s.b, s.b_stride, s.c, s.c_stride, 37, kRecords, kRecords, gram.data(), 32);
    CHECK(span_of_level(s));
    Bound bound(layer, 0);
    Worst worst;
    for (int t = 0; t < kRecords; ++t) {
      const std::vector<double> bounds = bound.read(records, 0, t, t == kRecords - 1);
      for (int p = 0; p < 21; ++p) {
        worst.see(place("y", t, 0, p), y[static_cast<size_t>(t * 21 + p)],
                  slow.y[static_cast<size_t>(t * 24 + p)], bounds[static_cast<size_t>(p)]);
      }
    }
    bound.flush(records, 0, kRecords);
    for (size_t i = 0; i < want.size(); ++i) {
      worst.see(place("state", 0, 0, static_cast<int>(i)), state[i], want[i], bound.state_bound(i));
    }
    worst.check();
  };
  run(simd_generic::mamba2_gram, simd_generic::mamba2_span);
#if defined(__x86_64__)
  if (simd_level() != SimdLevel::generic) run(simd_v3::mamba2_gram, simd_v3::mamba2_span);
  if (simd_level() == SimdLevel::v4) run(simd_v4::mamba2_gram, simd_v4::mamba2_span);
#endif
}

namespace {

/// Records for which every sum of the state is exact in FP32 although the state decays and is
/// rounded 10,000 times: decays are 2^-1, at most two of them a window; every element keeps one
/// sign and a magnitude between about 1 and 84; and the largest magnitude of each matrix and row is
/// a constant, `base` times a power of two, so that FP32 scales (divisors 6 * 448 = 21 * 2^7 and
/// 448 = 7 * 2^6) are powers of two.
Records exact_records(Sizes sizes, int tokens, int window, int base, unsigned seed) {
  Records r(sizes, tokens);
  std::mt19937 engine(seed);
  const auto pick = [&](int n) { return static_cast<int>(engine() % static_cast<unsigned>(n)); };
  std::vector<bool> active(static_cast<size_t>(tokens));
  for (int first = 0; first < tokens; first += window) {
    // Two tokens of a window decay and contribute, the others have dt = 0.
    for (int i = 0; i < 2; ++i) {
      const int t = first + pick(window);
      if (t < tokens) active[static_cast<size_t>(t)] = true;
    }
  }
  active[0] = true;
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < sizes.heads; ++h) {
      r.step(t)[h] = active[static_cast<size_t>(t)] ? 1.0f : 0.0f;
      for (int p = 0; p < sizes.head_dim; ++p) {
        // S starts at 2 u, so that 2^-1 S + u = S holds where B is constant.
        const float sign = p % 3 == 1 ? -1.0f : 1.0f;
        r.x(t, h)[p] = sign * static_cast<float>(base << (p % 2)) * (t == 0 ? 2.0f : 1.0f);
      }
    }
    for (int g = 0; g < sizes.groups; ++g) {
      for (int n = 0; n < sizes.state_dim; ++n) {
        const float sign = n % 5 == 2 ? -1.0f : 1.0f;
        r.b(t, g)[n] = n == 0 ? 1.0f : sign * std::ldexp(1.0f, -(t == 0 ? 1 : pick(3)));
        r.c(t, g)[n] = static_cast<float>(pick(3) - 1);
      }
    }
  }
  return r;
}

/// Integer records with decays of one: sums of an FP32 state stay exact for as long as they stay
/// below 2^24.
Records integer_records(Sizes sizes, int tokens, unsigned seed) {
  Records r(sizes, tokens);
  std::mt19937 engine(seed);
  const auto pick = [&](int n) { return static_cast<float>(engine() % static_cast<unsigned>(n)); };
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < sizes.heads; ++h) r.step(t)[h] = 1.0f + pick(2);
    for (int i = 0; i < sizes.heads * sizes.head_dim; ++i) r.x(t)[i] = pick(5) - 2.0f;
    for (int i = 0; i < sizes.groups * sizes.state_dim; ++i) r.b(t)[i] = pick(3) - 1.0f;
    for (int i = 0; i < sizes.groups * sizes.state_dim; ++i) r.c(t)[i] = pick(3) - 1.0f;
  }
  return r;
}

/// Walks fast and reference side by side and compares the packed checkpoints after every flush.
void check_exact(const Layer& layer, Records& records, const std::string& name, int window) {
  Row fast(layer, name, window), slow(layer, name, window);
  constexpr int kFlushesPerCall = 100;
  int64_t flushes = 0;
  for (int t = 0; t < records.tokens; t += kFlushesPerCall * window) {
    const int count = std::min(kFlushesPerCall * window, records.tokens - t);
    advance(layer.view(false), fast, records, t, count);
    advance(layer.view(false), slow, records, t, count, AdvanceMode::commit, KernelForm::reference);
    flushes += count / window;
    CAPTURE(name);
    CAPTURE(window);
    CAPTURE(flushes);
    REQUIRE(fast.recurrence == slow.recurrence);
    REQUIRE(fast.read == slow.read);
  }
  CHECK(flushes == 10000);
  CHECK(same_health(fast, slow));
  // The walk must not have died out or saturated.
  CHECK(fast.health[0].encode.non_finite == 0);
  CHECK(fast.health[0].encode.saturated == 0);
  const std::vector<float> state = fast.decoded(layer, 0);
  CHECK(std::count_if(state.begin(), state.end(), [](float s) { return s != 0; }) >
        static_cast<int64_t>(state.size()) / 2);
}

}  // namespace

TEST_CASE("mamba2: exact sums give equal bits over 10,000 flushes") {
  const OneThread one_thread;
  Layer layer({2, 1, 4, 32});
  layer.decay.assign(2, -1.0f);
  Records by_head = exact_records(layer.sizes, 40000, 4, 21, 1);
  for (const std::string name : {"fp16+sr", "nvfp4+sr", "fp16+sr/nvfp4+sr", "mxfp4+sr"}) {
    check_exact(layer, by_head, name, 4);
  }
  by_head.tokens = 10000;
  check_exact(layer, by_head, "nvfp4+sr", 1);
  Records by_row = exact_records(layer.sizes, 40000, 4, 7, 2);
  check_exact(layer, by_row, "fp8+sr", 4);
  layer.decay.assign(2, 0.0f);
  Records integers = integer_records(layer.sizes, 40000, 3);
  check_exact(layer, integers, "fp32", 4);
}

TEST_CASE("mamba2: codes differ from the reference only next to a rounding boundary") {
  const OneThread one_thread;
  // Single windows from equal checkpoints. The unencoded states come from rows that hold the
  // decoded checkpoint in FP32; with them the bound of the window says which codes are possible:
  // those of S - bound to S + bound, which the encoder maps monotonically for given random bits.
  const Layer layer({4, 2, 16, 64});
  const StateShape shape = layer.shape();
  for (const std::string name : {"fp16", "fp16+sr", "bf16+sr", "fp8_e4m3+sr", "fp8_e5m2"}) {
    for (int window : {1, 16}) {
      Records records = Records::random(layer.sizes, 40 * window, 21);
      Row fast(layer, name, window), slow(layer, name, window);
      int64_t differing = 0, elements = 0;
      Worst worst;
      for (int t = 0; t < records.tokens; t += window) {
        slow.recurrence = fast.recurrence;
        std::vector<Bound> bounds;
        for (int head = 0; head < 4; ++head) {
          bounds.emplace_back(layer, head);
          bounds.back().start(fast.decoded(layer, head));
          bounds.back().flush(records, t, t + window);
        }
        Row exact(layer, "fp32", window);
        for (int head = 0; head < 4; ++head) exact.set(layer, head, fast.decoded(layer, head));
        exact.position = slow.position = fast.position;
        advance(layer.view(), exact, records, t, window, AdvanceMode::commit,
                KernelForm::reference);
        advance(layer.view(), slow, records, t, window, AdvanceMode::commit, KernelForm::reference);
        advance(layer.view(), fast, records, t, window);
        for (int head = 0; head < 4; ++head) {
          const std::vector<float> got = fast.decoded(layer, head),
                                   want = slow.decoded(layer, head);
          const std::vector<float> state = exact.decoded(layer, head);
          std::vector<float> low = state, high = state;
          for (size_t i = 0; i < state.size(); ++i) {
            // One FP32 rounding more than the bound: low and high are FP32 numbers themselves.
            const double reach =
                bounds[static_cast<size_t>(head)].state_bound(i) + kUnit * std::fabs(state[i]);
            low[i] = static_cast<float>(state[i] - reach);
            high[i] = static_cast<float>(state[i] + reach);
          }
          const auto encoded = [&](const std::vector<float>& s) {
            Row row(layer, name, window);
            encode_checkpoints(row.view(), shape, head, {5, 0, t + window - 1}, 0.0f, s.data());
            return row.decoded(layer, head);
          };
          const std::vector<float> least = encoded(low), most = encoded(high);
          for (size_t i = 0; i < state.size(); ++i) {
            ++elements;
            if (got[i] == want[i]) continue;
            ++differing;
            const bool possible = least[i] <= got[i] && got[i] <= most[i];
            worst.see(place("code", t, head, static_cast<int>(i)), got[i], want[i],
                      possible ? std::fabs(double{got[i]} - want[i]) : 0.0);
          }
        }
      }
      CAPTURE(name);
      worst.check();
      MESSAGE(name, " L = ", window, ": ", differing, " of ", elements, " codes differ");
    }
  }
}

TEST_CASE("mamba2: scaled formats differ from the reference by single steps in few codes") {
  const OneThread one_thread;
  const Layer layer({4, 2, 16, 64});
  for (const std::string name : {"nvfp4", "nvfp4+sr", "fp8+sr", "mxfp4+sr", "int8"}) {
    Records records = Records::random(layer.sizes, 640, 22);
    Row fast(layer, name, 16), slow(layer, name, 16);
    int64_t differing = 0, elements = 0;
    Worst worst;
    for (int t = 0; t < 640; t += 16) {
      slow.recurrence = fast.recurrence;
      slow.position = fast.position;
      advance(layer.view(), slow, records, t, 16, AdvanceMode::commit, KernelForm::reference);
      advance(layer.view(), fast, records, t, 16);
      for (int head = 0; head < 4; ++head) {
        const std::vector<float> got = fast.decoded(layer, head), want = slow.decoded(layer, head);
        const double amax = state_amax(want.data(), static_cast<int64_t>(want.size()));
        for (size_t i = 0; i < got.size(); ++i) {
          ++elements;
          // Scales follow the largest magnitude, so decoded values may differ by their roundings
          // too.
          if (std::fabs(got[i] - want[i]) > 16 * kUnit * amax) ++differing;
          // The widest step of these grids is a third of the largest magnitude (E2M1: 4 to 6); a
          // block scale one step apart (2^-3) moves a value by less.
          worst.see(place("code", t, head, static_cast<int>(i)), got[i], want[i], amax / 3 * 1.01);
        }
      }
    }
    CAPTURE(name);
    worst.check();
    // An element flips when a boundary lies within its error; errors are near 1e-6 of the state,
    // the finest step here 2^-8 of it, block scales flip likewise and take 16 elements along: far
    // below one in a thousand.
    CHECK(differing < elements / 1000);
    MESSAGE(name, ": ", differing, " of ", elements, " codes differ");
  }
}

namespace {

/// Rows of all kinds, so that every path is walked.
std::vector<Row> mixed_rows(const Layer& layer) {
  std::vector<Row> rows;
  for (const std::string name :
       {"fp32", "fp16+sr", "nvfp4+sr", "fp32/nvfp4", "fp16+sr/nvfp4+sr", "fp8+sr"}) {
    rows.emplace_back(layer, name, 16);
  }
  rows.emplace_back(layer, "fp32", 1);
  rows.emplace_back(layer, "nvfp4+sr", 1);
  rows.emplace_back(layer, "fp32", 64);
  rows.emplace_back(layer, "fp32/fp16", 5);
  rows.back().plans[0].flush_output = FlushOutput::read;
  rows.emplace_back(layer, "fp16+sr", 7);
  rows.back().plans[0].dot = DotType::bf16;
  // Heads with plans, windows and seeds of their own; one plan's scale spans the layer.
  HeadPlan layer_wide = plan_of("nvfp4+sr", 6);
  layer_wide.recurrence.format = format_with_span(layer_wide.recurrence.format, Span::layer);
  rows.emplace_back(
      layer, std::vector<HeadPlan>{plan_of("fp32", 16), layer_wide, plan_of("fp16+sr/nvfp4", 3)},
      std::vector<uint8_t>{1, 0, 2, 1, 1, 0});
  rows.emplace_back(layer, std::vector<HeadPlan>{layer_wide});
  for (size_t r = 0; r < rows.size(); ++r) rows[r].stream = static_cast<uint32_t>(r % 3);
  return rows;
}

}  // namespace

TEST_CASE("mamba2: any split, ragged lengths, row order and thread count gives the same bits") {
  const Layer layer({6, 2, 20, 32});
  const int tokens = 150;
  std::vector<Row> want = mixed_rows(layer);
  std::vector<Records> records;
  for (size_t r = 0; r < want.size(); ++r) {
    records.push_back(Records::random(layer.sizes, tokens, static_cast<unsigned>(r)));
    advance(layer.view(), want[r], records[r], 0, tokens);
  }
  const int threads = omp_get_max_threads();
  std::mt19937 random(17);
  for (int round = 0; round < 8; ++round) {
    omp_set_num_threads(1 + round % 4);
    std::vector<Row> got = mixed_rows(layer);
    std::vector<size_t> order(got.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::vector<int> done(got.size(), 0);
    while (*std::min_element(done.begin(), done.end()) < tokens) {
      std::shuffle(order.begin(), order.end(), random);
      const size_t rows_in_call = 1 + random() % got.size();
      std::vector<StateRow> views;
      std::vector<Mamba2Inputs> inputs;
      for (size_t i = 0; i < rows_in_call; ++i) {
        const size_t r = order[i];
        // Single tokens in the first round, then lengths from 0 to beyond every window.
        const int length = round == 0 ? 1 : static_cast<int>(random() % (round < 4 ? 5 : 70));
        const int count = std::min(length, tokens - done[r]);
        views.push_back(got[r].view());
        inputs.push_back(records[r].inputs(done[r], count, got[r].y));
        done[r] += count;
        got[r].position += count;
      }
      mamba2_advance(layer.view(), views, inputs, AdvanceMode::commit, KernelForm::fast);
    }
    for (size_t r = 0; r < got.size(); ++r) {
      CAPTURE(round);
      CAPTURE(r);
      check_equal_rows(got[r], want[r]);
    }
  }
  omp_set_num_threads(threads);
}

TEST_CASE("mamba2: the reference is split-independent and agrees on health and cursors") {
  const OneThread one_thread;
  const Layer layer({6, 2, 20, 32});
  std::vector<Row> want = mixed_rows(layer), got = mixed_rows(layer), fast = mixed_rows(layer);
  for (size_t r = 0; r < want.size(); ++r) {
    Records records = Records::random(layer.sizes, 70, static_cast<unsigned>(r));
    advance(layer.view(), want[r], records, 0, 70, AdvanceMode::commit, KernelForm::reference);
    advance(layer.view(), fast[r], records, 0, 70);
    int first = 0;
    for (int count : {1, 9, 0, 33, 2, 25}) {
      advance(layer.view(), got[r], records, first, count, AdvanceMode::commit,
              KernelForm::reference);
      first += count;
    }
    CAPTURE(r);
    check_equal_rows(got[r], want[r]);
    CHECK(fast[r].pending == want[r].pending);
    CHECK(fast[r].health[0].encode.elements == want[r].health[0].encode.elements);
  }
}

TEST_CASE("mamba2: a read checkpoint does not touch the recurrence") {
  const Layer layer({4, 2, 16, 32});
  Records records = Records::random(layer.sizes, 100, 31);
  for (KernelForm form : {KernelForm::fast, KernelForm::reference}) {
    Row shared(layer, "fp16+sr", 8), separate(layer, "fp16+sr/nvfp4", 8);
    advance(layer.view(), shared, records, 0, 100, AdvanceMode::commit, form);
    advance(layer.view(), separate, records, 0, 100, AdvanceMode::commit, form);
    for (int head = 0; head < 4; ++head) {
      CHECK(same_bits(shared.decoded(layer, head), separate.decoded(layer, head)));
    }
    // The read checkpoint is what one rounding of the unencoded state gives, not a rounding of R;
    // outputs between flushes come from it, flush outputs from S: they equal those of the shared
    // row.
    CHECK(!same_bits(shared.y, separate.y));
    for (int t = 0; t < 100; ++t) {
      const bool equal =
          std::memcmp(shared.y.data() + t * 67, separate.y.data() + t * 67, 64 * 4) == 0;
      CHECK(equal == (t % 8 == 7 || t < 8));
    }
  }
}

TEST_CASE("mamba2: both roles are encoded from the same unencoded state") {
  const Layer layer({4, 2, 16, 32});
  Records records = Records::random(layer.sizes, 8, 32);
  Row fp32(layer, "fp32", 8), both(layer, "fp16+sr/nvfp4+sr", 8),
      expected(layer, "fp16+sr/nvfp4+sr", 8);
  advance(layer.view(), fp32, records, 0, 8);
  advance(layer.view(), both, records, 0, 8);
  for (int head = 0; head < 4; ++head) {
    encode_checkpoints(expected.view(), layer.shape(), head, {5, 0, 7}, 0.0f,
                       fp32.decoded(layer, head).data());
  }
  CHECK(both.recurrence == expected.recurrence);
  CHECK(both.read == expected.read);
}

TEST_CASE("mamba2: flush_output read takes the flush step from the old read checkpoint") {
  const Layer layer({2, 1, 8, 32});
  Records records = Records::random(layer.sizes, 32, 33);
  Row row(layer, "fp32/nvfp4", 16), longer(layer, "fp32/nvfp4", 16);
  row.plans[0].flush_output = longer.plans[0].flush_output = FlushOutput::read;
  advance(layer.view(), row, records, 0, 32);
  // The second flush step, read as if its window did not end there: same checkpoint, same ring,
  // longer window.
  advance(layer.view(), longer, records, 0, 16);
  longer.plans[0].window = 17;
  advance(layer.view(), longer, records, 16, 16);
  CHECK(longer.pending[0] == 16);
  CHECK(same_bits(row.y, longer.y));
}

TEST_CASE("mamba2: rounded fold operands move the state by their own rounding") {
  const Layer layer({2, 1, 16, 32});
  Records records = Records::random(layer.sizes, 16, 34);
  const auto state = [&](DotType dot, KernelForm form) {
    Row row(layer, "fp32", 16);
    row.plans[0].dot = dot;
    advance(layer.view(), row, records, 0, 16, AdvanceMode::commit, form);
    return row.decoded(layer, 1);
  };
  Bound bound(layer, 1);
  bound.flush(records, 0, 16);
  const std::vector<float> plain = state(DotType::fp32, KernelForm::fast);
  for (DotType dot : {DotType::tf32, DotType::bf16}) {
    const double half_step = dot == DotType::tf32 ? 0x1p-11 : 0x1p-8;
    const std::vector<float> fast = state(dot, KernelForm::fast),
                             slow = state(dot, KernelForm::reference);
    Worst against_plain, against_slow;
    int64_t moved = 0;
    for (size_t i = 0; i < fast.size(); ++i) {
      moved += fast[i] != plain[i];
      // Both operands are rounded (x is a BF16 number already, 2^D dt B is not): half a step each.
      // Fast and reference operands may round to neighbours: a whole step.
      against_plain.see(place("state", 0, 1, static_cast<int>(i)), fast[i], plain[i],
                        2 * half_step * bound.magnitude(i) + bound.state_bound(i));
      against_slow.see(place("state", 0, 1, static_cast<int>(i)), fast[i], slow[i],
                       2 * half_step * bound.magnitude(i) + bound.state_bound(i));
    }
    against_plain.check();
    against_slow.check();
    CHECK(moved > static_cast<int64_t>(fast.size() * 9 / 10));
  }
}

namespace {

/// Drafts are written into the ring before a verify step; what a rejection leaves there must not
/// matter. Overwrites tokens from `first` on with NaN.
void spoil(Records& records, int first) {
  for (int t = first; t < records.tokens; ++t) {
    std::fill_n(records.x(t), records.stride, NAN);
    std::fill_n(records.step(t), records.sizes.heads, NAN);
  }
}

}  // namespace

TEST_CASE("mamba2: committing k of T drafts equals k plain steps") {
  const OneThread one_thread;
  const Layer layer({4, 2, 16, 32});
  const int tokens = 120, draft_count = 4;
  const Records truth = Records::random(layer.sizes, tokens + draft_count, 41);
  std::mt19937 random(42);
  for (const std::string name : {"fp32", "fp16+sr", "nvfp4+sr", "fp16+sr/nvfp4+sr"}) {
    for (int window : {3, 8, 16}) {
      for (FlushOutput output : {FlushOutput::recurrence, FlushOutput::read}) {
        CAPTURE(name);
        CAPTURE(window);
        // Plain steps fold at the same records: a window that never fills, and flushes where the
        // verify steps fold.
        Row drafted(layer, name, window), plain(layer, name, kMaxWindow);
        drafted.plans[0].flush_output = plain.plans[0].flush_output = output;
        Records ring = Records::random(layer.sizes, tokens + draft_count, 77);
        spoil(ring, 0);
        Records steps = truth;
        int t = 0;
        bool folded_once = false, outputs_equal = true, finite = true;
        while (t < tokens) {
          // The true token and three drafts: the true continuation up to the accepted count, then
          // something else.
          const int accepted = 1 + static_cast<int>(random() % draft_count);
          Records other = Records::random(layer.sizes, draft_count, static_cast<unsigned>(t));
          for (int i = 0; i < draft_count; ++i) {
            Records& from = i < accepted ? steps : other;
            const int at = i < accepted ? t + i : i;
            std::copy_n(from.x(at), ring.stride - 2, ring.x(t + i));
            std::copy_n(from.step(at), layer.sizes.heads, ring.step(t + i));
          }
          const bool fold = drafted.pending[0] > 0 && drafted.pending[0] + draft_count > window;
          const std::vector<std::byte> before = drafted.recurrence;
          advance(layer.view(), drafted, ring, t, draft_count, AdvanceMode::verify);
          CHECK((drafted.recurrence != before) == fold);
          // commit(accepted): the caller's cursor moves; the rejected drafts stay as garbage.
          drafted.pending[0] += accepted;
          drafted.position += accepted;
          spoil(ring, t + accepted);

          if (fold) {
            flush(layer.view(), plain, steps, t);
            folded_once = true;
          }
          CHECK(plain.recurrence == drafted.recurrence);
          CHECK(plain.read == drafted.read);
          CHECK(same_health(plain, drafted));
          advance(layer.view(), plain, steps, t, accepted);
          for (int i = 0; i < accepted; ++i) {
            const size_t at = static_cast<size_t>((t + i) * 67);
            const bool equal = std::memcmp(&plain.y[at], &drafted.y[at], 64 * sizeof(float)) == 0;
            // Outputs are bit-equal except where they come from the unencoded state of a fold.
            if (!fold || output == FlushOutput::read || name == "fp32") {
              CHECK(equal);
            } else {
              outputs_equal = outputs_equal && equal;
            }
            finite = finite && std::all_of(&drafted.y[at], &drafted.y[at] + 64,
                                           [](float value) { return std::isfinite(value); });
          }
          t += accepted;
        }
        CHECK(finite);
        CHECK(folded_once);
        if (output == FlushOutput::recurrence && name != "fp32") CHECK(!outputs_equal);
      }
    }
  }
}

TEST_CASE("mamba2: drafts after a fold are read from the unencoded state") {
  const Layer layer({4, 2, 16, 32});
  Records records = Records::random(layer.sizes, 20, 43);
  for (const std::string name : {"nvfp4+sr", "nvfp4+sr/fp16"}) {
    for (KernelForm form : {KernelForm::fast, KernelForm::reference}) {
      CAPTURE(name);
      Row low(layer, name, 16), exact(layer, "fp32", 16);
      for (Row* row : {&low, &exact}) {
        advance(layer.view(), *row, records, 0, 14, AdvanceMode::commit, form);
        advance(layer.view(), *row, records, 14, 6, AdvanceMode::verify, form);
        CHECK(row->pending[0] == 0);
        CHECK(row->health[0].encode.elements == (row->plans[0].read ? 2 : 1) * 16 * 32);
      }
      // Nothing was encoded before the fold, so the drafts' outputs are those of the FP32 row.
      CHECK(same_bits(low.y, exact.y));
    }
  }
}

TEST_CASE("mamba2: commit after a ring left full folds first") {
  const Layer layer({4, 2, 16, 32});
  Records records = Records::random(layer.sizes, 24, 44);
  Row verified(layer, "fp16+sr", 8), plain(layer, "fp16+sr", 8);
  advance(layer.view(), verified, records, 0, 4);
  advance(layer.view(), verified, records, 4, 4, AdvanceMode::verify);
  verified.pending[0] += 4;
  verified.position += 4;
  CHECK(verified.pending[0] == 8);
  advance(layer.view(), verified, records, 8, 16);
  advance(layer.view(), plain, records, 0, 24);
  CHECK(verified.recurrence == plain.recurrence);
  CHECK(verified.pending == plain.pending);
}

TEST_CASE("mamba2: an explicit flush folds what is pending at the last position, once") {
  const Layer layer({4, 2, 16, 32});
  Records records = Records::random(layer.sizes, 10, 45);
  for (KernelForm form : {KernelForm::fast, KernelForm::reference}) {
    Row row(layer, "fp16+sr/nvfp4+sr", 16), whole(layer, "fp16+sr/nvfp4+sr", 10);
    advance(layer.view(), row, records, 0, 10, AdvanceMode::commit, form);
    flush(layer.view(), row, records, 10, form);
    advance(layer.view(), whole, records, 0, 10, AdvanceMode::commit, form);
    CHECK(row.recurrence == whole.recurrence);
    CHECK(row.read == whole.read);
    CHECK(row.pending[0] == 0);
    flush(layer.view(), row, records, 10, form);
    CHECK(row.recurrence == whole.recurrence);
    CHECK(row.health[0].encode.elements == 2 * 16 * 32);
  }
}

TEST_CASE("mamba2: plans by head act as rows of their own") {
  const Layer layer({4, 2, 16, 32});
  Records records = Records::random(layer.sizes, 50, 46);
  const std::vector<HeadPlan> plans = {plan_of("fp32", 16), plan_of("nvfp4+sr", 4),
                                       plan_of("fp16+sr/nvfp4", 7)};
  const std::vector<uint8_t> of_head = {2, 1, 0, 1};
  Row mixed(layer, plans, of_head);
  advance(layer.view(), mixed, records, 0, 50);
  CHECK(mixed.pending == std::vector<int>{2, 2, 1});
  for (int head = 0; head < 4; ++head) {
    Row alone(layer, std::vector<HeadPlan>{plans[of_head[static_cast<size_t>(head)]]});
    advance(layer.view(), alone, records, 0, 50);
    CHECK(same_bits(mixed.decoded(layer, head), alone.decoded(layer, head)));
    CHECK(same_bits(mixed.decoded(layer, head, StateRole::read),
                    alone.decoded(layer, head, StateRole::read)));
    for (int t = 0; t < 50; ++t) {
      CHECK(std::memcmp(&mixed.y[static_cast<size_t>(t * 67 + head * 16)],
                        &alone.y[static_cast<size_t>(t * 67 + head * 16)],
                        16 * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("mamba2: a scale that spans the layer sees all heads") {
  const Layer layer({4, 2, 16, 32});
  Records records = Records::random(layer.sizes, 16, 47);
  for (int t = 0; t < 16; ++t) {
    for (int i = 0; i < 16; ++i) records.x(t, 2)[i] *= 64.0f;  // one head much larger
  }
  HeadPlan plan = plan_of("nvfp4", 16);
  plan.recurrence.format = format_with_span(plan.recurrence.format, Span::layer);
  for (KernelForm form : {KernelForm::fast, KernelForm::reference}) {
    Row row(layer, std::vector<HeadPlan>{plan}), expected(layer, std::vector<HeadPlan>{plan}),
        exact(layer, "fp32", 16);
    advance(layer.view(), row, records, 0, 16, AdvanceMode::commit, form);
    advance(layer.view(), exact, records, 0, 16, AdvanceMode::commit, form);
    float amax = 0;
    for (int head = 0; head < 4; ++head) {
      const std::vector<float> s = exact.decoded(layer, head);
      amax = std::max(amax, state_amax(s.data(), static_cast<int64_t>(s.size())));
    }
    for (int head = 0; head < 4; ++head) {
      encode_checkpoints(expected.view(), layer.shape(), head, {5, 0, 15}, amax,
                         exact.decoded(layer, head).data());
    }
    CHECK(row.recurrence == expected.recurrence);
    // Without the layer's maximum the small heads would be stored otherwise.
    Row by_head(layer, "nvfp4", 16);
    advance(layer.view(), by_head, records, 0, 16, AdvanceMode::commit, form);
    CHECK(row.recurrence != by_head.recurrence);
  }
}

TEST_CASE("mamba2: a tensor-parallel shard draws the bits of the whole layer") {
  const Layer layer({4, 4, 16, 32});
  Records records = Records::random(layer.sizes, 40, 48);
  Row whole(layer, "nvfp4+sr", 8);
  advance(layer.view(), whole, records, 0, 40);
  Layer half({2, 2, 16, 32});
  half.decay = {layer.decay[2], layer.decay[3]};
  half.skip = {layer.skip[2], layer.skip[3]};
  Records part(half.sizes, 40);
  for (int t = 0; t < 40; ++t) {
    std::copy_n(records.x(t, 2), 32, part.x(t));
    std::copy_n(records.b(t, 2), 64, part.b(t));
    std::copy_n(records.c(t, 2), 64, part.c(t));
    std::copy_n(records.step(t) + 2, 2, part.step(t));
  }
  Mamba2Layer view = half.view();
  view.head_offset = 2;
  Row shard(half, "nvfp4+sr", 8), wrong(half, "nvfp4+sr", 8);
  advance(view, shard, part, 0, 40);
  for (int head = 0; head < 2; ++head) {
    CHECK(same_bits(shard.decoded(half, head), whole.decoded(layer, head + 2)));
  }
  advance(half.view(), wrong, part, 0, 40);
  CHECK(wrong.recurrence != shard.recurrence);
}

TEST_CASE("mamba2: streams draw independent rounding errors, equal streams the same") {
  const Layer layer({4, 1, 32, 64});
  Records records = Records::random(layer.sizes, 16, 49);
  Row exact(layer, "fp32", 16);
  advance(layer.view(), exact, records, 0, 16);
  const auto errors = [&](uint32_t stream, uint64_t seed) {
    Row row(layer, "fp8_e4m3+sr", 16);
    row.stream = stream;
    row.plans[0].seed = seed;
    advance(layer.view(), row, records, 0, 16);
    std::vector<double> e;
    for (int head = 0; head < 4; ++head) {
      const std::vector<float> got = row.decoded(layer, head), want = exact.decoded(layer, head);
      for (size_t i = 0; i < got.size(); ++i) e.push_back(got[i] - want[i]);
    }
    return e;
  };
  // Sum of products over its standard deviation if the signs were independent, whatever the
  // magnitudes: normal with deviation 1.
  const auto score = [](const std::vector<double>& a, const std::vector<double>& b) {
    double ab = 0, square = 0;
    for (size_t i = 0; i < a.size(); ++i) ab += a[i] * b[i], square += a[i] * b[i] * a[i] * b[i];
    return ab / std::sqrt(square);
  };
  const std::vector<double> one = errors(1, 7), again = errors(1, 7), two = errors(2, 7),
                            reseeded = errors(1, 8);
  CHECK(one == again);
  CHECK(score(one, again) > 20);
  CHECK(std::fabs(score(one, two)) < 5);
  CHECK(std::fabs(score(one, reseeded)) < 5);
}

TEST_CASE(
    "mamba2: non-finite records are counted at their flush, stay in their head, and reach its "
    "outputs") {
  const Layer layer({4, 2, 16, 32});
  for (const std::string name : {"fp32", "nvfp4+sr", "fp16", "fp32/nvfp4"}) {
    for (KernelForm form : {KernelForm::fast, KernelForm::reference}) {
      CAPTURE(name);
      Records records = Records::random(layer.sizes, 40, 50), clean = records;
      records.x(21, 1)[3] = INFINITY;
      Row row(layer, name, 8), healthy(layer, name, 8);
      row.position = healthy.position = 100;
      advance(layer.view(), row, records, 0, 40, AdvanceMode::commit, form);
      advance(layer.view(), healthy, clean, 0, 40, AdvanceMode::commit, form);
      // Token 21 is folded with token 23: position 123. Row 3 of head 1 is lost: 32 elements.
      CHECK(row.health[1].first_non_finite_position == 123);
      CHECK(row.health[1].encode.non_finite >= 32);
      CHECK(!std::isfinite(row.y[static_cast<size_t>(21 * 67 + 16 + 3)]));
      CHECK(!std::isfinite(row.y[static_cast<size_t>(23 * 67 + 16 + 3)]));
      if (name == "fp32") {
        CHECK(!std::isfinite(row.y[static_cast<size_t>(39 * 67 + 16 + 3)]));
        CHECK(row.health[1].encode.non_finite == 3 * 32);
      }
      for (int head : {0, 2, 3}) {
        CHECK(row.health[static_cast<size_t>(head)].first_non_finite_position == -1);
        CHECK(same_bits(row.decoded(layer, head), healthy.decoded(layer, head)));
      }
      for (int t = 0; t < 21; ++t) {
        CHECK(std::memcmp(&row.y[static_cast<size_t>(t * 67)],
                          &healthy.y[static_cast<size_t>(t * 67)], 64 * 4) == 0);
      }
    }
  }
}

TEST_CASE("mamba2: wrong requests are refused with their place") {
  const Layer layer({4, 2, 16, 32});
  Records records = Records::random(layer.sizes, 4, 51);
  const auto message = [&](const std::function<void(Mamba2Layer&, Row&, Mamba2Inputs&)>& change) {
    Row row(layer, "fp32", 16);
    Mamba2Layer wrong = layer.view();
    Mamba2Inputs in = records.inputs(0, 4, row.y);
    change(wrong, row, in);
    StateRow view = row.view();
    try {
      mamba2_advance(wrong, {&view, 1}, {&in, 1}, AdvanceMode::commit, KernelForm::fast);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  CHECK(message([](Mamba2Layer&, Row&, Mamba2Inputs&) {}) == "accepted");
  CHECK(message([](Mamba2Layer& l, Row&, Mamba2Inputs&) { l.groups = 3; }) ==
        "mamba2: groups 3, expected a divisor of heads 4");
  CHECK(message([](Mamba2Layer&, Row&, Mamba2Inputs& in) { in.b_stride = 63; }) ==
        "mamba2: row 0: b_stride is 63, expected at least 64");
  CHECK(message([](Mamba2Layer&, Row&, Mamba2Inputs& in) { in.c = nullptr; }) ==
        "mamba2: row 0: c or y is null, expected queries and room for outputs");
  CHECK(message([](Mamba2Layer&, Row&, Mamba2Inputs& in) { in.tokens = -1; }) ==
        "mamba2: row 0: -1 tokens, expected 0 or more");
  CHECK(message([](Mamba2Layer&, Row& row, Mamba2Inputs&) { row.plans[0].window = 0; }) ==
        "mamba2: row 0: plan 0: window 0, expected 1 to 64");
}

TEST_CASE("mamba2: timing counts the operations of the window equations") {
  Mamba2Workload workload;
  workload.layer.heads = 2;
  workload.layer.groups = 1;
  workload.layer.head_dim = 4;
  workload.layer.state_dim = 8;
  workload.plan = plan_of("fp32", 2);
  workload.tokens = workload.tokens_per_call = 4;
  workload.repeats = 1;
  const KernelTiming timing = time_mamba2(workload);
  CHECK(timing.seconds > 0);
  // A window of 2 of one head: 4 * 32 * 2 + 32 + 2 * 4 * (3 + 2) = 328; of a group: 2 * 8 * 3 = 48;
  // two windows.
  CHECK(timing.operations == 2 * (2 * 328 + 48));
}

}  // namespace replayeval
