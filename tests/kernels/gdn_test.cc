// GDN and KDA by replay: both forms against the recurrence in FP64 within derived bounds, and what
// must hold bit for bit.
#include "kernels/gdn.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/replay.h"
#include "quant/quantize.h"
#include "quant/state_format.h"

namespace replayeval {
namespace {

using Vector = std::vector<double>;
using Matrix = std::vector<Vector>;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float to_bf16(float x) {
  if (std::isnan(x)) return x;
  uint32_t bits = bits_of(x);
  bits = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

double dot(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
  return sum;
}

double norm(const Vector& a) { return std::sqrt(dot(a, a)); }

Vector unit(const float* x, int dim, double scale) {
  double squares = 0.0;
  for (int n = 0; n < dim; ++n) squares += double{x[n]} * x[n];
  Vector result(dim);
  for (int n = 0; n < dim; ++n) result[n] = x[n] * (scale / std::sqrt(squares + 1e-6));
  return result;
}

/// Inputs of one row: all tokens of a sequence.
struct Sequence {
  GdnLayer layer;
  int tokens = 0;
  std::vector<float> q, k, v, g, beta;

  int decays() const { return layer.value_heads * (layer.channel_decay ? layer.key_dim : 1); }
};

GdnLayer make_layer(int key_dim, int value_dim, int key_heads, int value_heads,
                    bool channel_decay = false) {
  GdnLayer layer;
  layer.key_heads = key_heads;
  layer.value_heads = value_heads;
  layer.key_dim = key_dim;
  layer.value_dim = value_dim;
  layer.channel_decay = channel_decay;
  layer.layer = 3;
  return layer;
}

/// BF16 q, k, v from normal distributions, beta a sigmoid, decays 2^-x with x log-uniform in [2^-9,
/// strongest].
Sequence random_sequence(const GdnLayer& layer, int tokens, uint32_t seed, double strongest = 1.0) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  Sequence s;
  s.layer = layer;
  s.tokens = tokens;
  const auto fill = [&](std::vector<float>* x, int count) {
    x->resize(static_cast<size_t>(count) * tokens);
    for (float& value : *x) value = to_bf16(normal(engine));
  };
  fill(&s.q, layer.key_heads * layer.key_dim);
  fill(&s.k, layer.key_heads * layer.key_dim);
  fill(&s.v, layer.value_heads * layer.value_dim);
  s.beta.resize(static_cast<size_t>(layer.value_heads) * tokens);
  for (float& value : s.beta) value = 1.0f / (1.0f + std::exp(-2.0f * normal(engine)));
  s.g.resize(static_cast<size_t>(s.decays()) * tokens);
  for (float& value : s.g) {
    value = static_cast<float>(-std::exp2(-9.0 + (9.0 + std::log2(strongest)) * uniform(engine)));
  }
  return s;
}

StateCodec codec(const std::string& name) {
  const size_t plus = name.find("+sr");
  return {find_format(name.substr(0, plus)),
          plus == std::string::npos ? Rounding::nearest_even : Rounding::stochastic};
}

/// "recurrence/read" or one shared format.
HeadPlan make_plan(const std::string& states, int window) {
  HeadPlan plan;
  const size_t slash = states.find('/');
  plan.recurrence = codec(states.substr(0, slash));
  if (slash != std::string::npos) plan.read = codec(states.substr(slash + 1));
  plan.window = window;
  plan.seed = 11;
  return plan;
}

/// A row with its checkpoints, corrections and outputs.
struct Row {
  const Sequence* data = nullptr;
  std::vector<HeadPlan> plans;
  std::vector<uint8_t> plan_of_head;
  std::vector<int> pending;
  std::vector<std::byte> recurrence, read, memory;
  size_t recurrence_stride = 0, read_stride = 0, memory_stride = 0;
  std::vector<HeadHealth> health;
  std::vector<float> u, o;
  int position = 0;
  uint32_t stream = 7;

  StateShape shape() const { return {data->layer.value_dim, data->layer.key_dim}; }
  int heads() const { return data->layer.value_heads; }
  const HeadPlan& plan(int head) const {
    return plans[plan_of_head.empty() ? 0 : plan_of_head[head]];
  }
  StateRow state() {
    StateRow row;
    row.position = position;
    row.stream = stream;
    row.plans = plans;
    row.plan_of_head = plan_of_head.empty() ? nullptr : plan_of_head.data();
    row.pending = pending.data();
    row.recurrence = recurrence.data();
    row.recurrence_stride = recurrence_stride;
    row.read = read.empty() ? nullptr : read.data();
    row.read_stride = read_stride;
    row.memory = memory.empty() ? nullptr : memory.data();
    row.memory_stride = memory_stride;
    row.health = health.data();
    return row;
  }
  GdnInputs inputs(int tokens) {
    const GdnLayer& layer = data->layer;
    GdnInputs in;
    in.tokens = tokens;
    in.k_stride = in.q_stride = layer.key_heads * layer.key_dim;
    in.v_stride = in.u_stride = in.o_stride = layer.value_heads * layer.value_dim;
    in.decay_stride = data->decays();
    in.beta_stride = layer.value_heads;
    in.q = data->q.data() + position * in.q_stride;
    in.k = data->k.data() + position * in.k_stride;
    in.v = data->v.data() + position * in.v_stride;
    in.decay_log2 = data->g.data() + position * in.decay_stride;
    in.beta = data->beta.data() + position * in.beta_stride;
    in.u = u.data() + position * in.u_stride;
    in.o = o.data() + position * in.o_stride;
    return in;
  }
  Matrix decoded(int head, StateRole role) {
    std::vector<float> state(shape().elements());
    decode_checkpoint(this->state(), shape(), head, role, state.data());
    Matrix rows(shape().head_dim, Vector(shape().state_dim));
    for (int64_t i = 0; i < shape().elements(); ++i) {
      rows[i / shape().state_dim][i % shape().state_dim] = state[i];
    }
    return rows;
  }
};

Row make_row(const Sequence& data, const std::vector<HeadPlan>& plans,
             const std::vector<uint8_t>& plan_of_head = {}) {
  Row row;
  row.data = &data;
  row.plans = plans;
  row.plan_of_head = plan_of_head;
  row.pending.assign(plans.size(), 0);
  size_t memory = 0;
  for (const HeadPlan& plan : plans) {
    const size_t kept = memory_bytes(*plan.recurrence.format, row.shape());
    row.recurrence_stride =
        std::max(row.recurrence_stride, packed_bytes(*plan.recurrence.format, row.shape()));
    if (plan.read) {
      row.read_stride = std::max(row.read_stride, packed_bytes(*plan.read->format, row.shape()));
      memory = std::max(memory, kept + memory_bytes(*plan.read->format, row.shape()));
    }
    memory = std::max(memory, kept);
  }
  row.memory_stride = memory;
  row.recurrence.resize(row.recurrence_stride * row.heads());
  row.read.resize(row.read_stride * row.heads());
  row.memory.resize(memory * row.heads());
  row.health.resize(row.heads());
  row.u.assign(data.v.size(), 0.0f);
  row.o.assign(data.v.size(), 0.0f);
  const std::vector<float> zeros(row.shape().elements());
  for (int h = 0; h < row.heads(); ++h) {
    encode_checkpoints(row.state(), row.shape(), h, {}, 0.0f, zeros.data());
  }
  row.health.assign(row.heads(), {});
  return row;
}

/// A normal random matrix of the given size for every head, encoded in both roles.
void set_random_state(Row* row, uint32_t seed, float size) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> state(row->shape().elements());
  for (int h = 0; h < row->heads(); ++h) {
    for (float& x : state) x = size * normal(engine);
    encode_checkpoints(row->state(), row->shape(), h, {}, 4.0f * size, state.data());
  }
  row->health.assign(row->heads(), {});
}

/// One call for one row, on one thread (the test of splits uses more).
void advance(Row* row, int tokens, KernelForm form, AdvanceMode mode = AdvanceMode::commit) {
  omp_set_num_threads(1);
  StateRow state = row->state();
  const GdnInputs in = row->inputs(tokens);
  gdn_advance(row->data->layer, {&state, 1}, {&in, 1}, mode, form);
  if (mode == AdvanceMode::commit) row->position += tokens;
}

void flush(Row* row, KernelForm form) {
  StateRow state = row->state();
  const GdnInputs in = row->inputs(0);
  gdn_flush(row->data->layer, {&state, 1}, {&in, 1}, form);
}

void check_same(const char* what, const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (bits_of(a[i]) == bits_of(b[i])) continue;
    FAIL_CHECK(what << ": element " << i << " is " << a[i] << " (bits " << std::hex << bits_of(a[i])
                    << "), expected " << b[i] << " (bits " << bits_of(b[i]) << ")");
    return;
  }
}

void check_same_rows(const Row& a, const Row& b) {
  check_same("o", a.o, b.o);
  check_same("u", a.u, b.u);
  CHECK(a.recurrence == b.recurrence);
  CHECK(a.read == b.read);
  CHECK(a.memory == b.memory);
  CHECK(a.pending == b.pending);
}

/// Keeps the element nearest to (or furthest above) its bound.
struct Worst {
  double ratio = 0.0;
  std::string text;

  void see(const std::string& where, double got, double expected, double bound) {
    const double error = std::abs(got - expected);
    const double r = error == 0.0 ? 0.0 : error / bound;
    if (r <= ratio && !std::isnan(r)) return;
    ratio = std::isnan(r) ? std::numeric_limits<double>::infinity() : r;
    std::ostringstream out;
    out.precision(9);
    out << where << ": " << got << " (bits " << std::hex << bits_of(static_cast<float>(got))
        << std::dec << "), expected " << expected << ", error " << error << ", bound " << bound;
    text = out.str();
  }
  void check() const {
    INFO(text);
    CHECK(ratio <= 1.0);
  }
};

/// Rounding of the arithmetic that a bound is for.
struct Precision {
  double arithmetic;  // unit roundoff of sums and products
  double stored_u;    // of corrections in the ring
  double output;      // of what is handed out and stored
  double operand;     // of a flush's operands

  Precision(KernelForm form, const HeadPlan& plan)
      : arithmetic(form == KernelForm::fast ? 0x1p-24 : 0x1p-52),
        stored_u(plan.ring_u == RecordType::bf16 ? 0x1p-8 : 0x1p-24),
        output(0x1p-24),
        operand(plan.dot == DotType::fp32   ? 0.0
                : plan.dot == DotType::tf32 ? 0x1p-11
                                            : 0x1p-8) {}
};

/// One window of one head in FP64: what the definition says, without any rounding, and how far a
/// form may be from it.
///
/// Let e be the unit roundoff, |.| 2-norms over state_dim, k = k^ (|k| <= 1), q = q^ (|q| <=
/// K^-1/2), w_tj the largest decay from record j to t, c_t that from the window's start. First
/// order in e, enlarged by 1 % for the rest:
///  - a normalised vector: K/2 e from the sum of squares under the root, and 4 operations:  ek =
///  (K/2 + 4) e, relative in norm;
///  - a sum of K products x.y in any order: K e |x| |y|;
///  - a decay: exp2 within 1e-7 < 1.7 e, its argument a sum D of m terms: m e |D| ln 2; KDA, a
///  product of m factors: m (1.7 + 1) e.  ew;
///  - an operand rounding eo of a flush adds eo to ek, and eo to reads of S.
/// The correction's equation is then evaluated with the error
///  r_t = beta { c_t |S| (K e + ek + ew + 2e + eo) + sum_j w_tj |u_j| (K e + 2 ek + ew + 2e) + (t +
///  2) e M_t } + e |u_t|,
/// M_t = |v| + c_t |S| + sum_j w_tj |u_j| (t + 2 roundings of partial sums), and the solve carries
/// it on: |du| <= |(I+A)^-1| (r + |A| s), where s_j = stored_u |u_j| is the rounding of what the
/// ring hands to later tokens and (I+A)^-1 is computed here. Outputs and the fold add up in the
/// same way.
struct ExactWindow {
  int n;
  int key_dim, value_dim;
  Matrix keys, queries, decays, values;
  Vector betas;
  bool channel;
  Matrix weights;               // [t][j + 1], largest decay after record j up to t
  Matrix key_dots, query_dots;  // [t][j], with the decays
  Matrix inverse;               // (I + A)^-1

  ExactWindow(const Sequence& data, const HeadPlan& plan, int first, int records, int head)
      : n(records),
        key_dim(data.layer.key_dim),
        value_dim(data.layer.value_dim),
        channel(data.layer.channel_decay) {
    const GdnLayer& layer = data.layer;
    const int key_head = head / (layer.value_heads / layer.key_heads);
    for (int64_t t = first; t < first + n; ++t) {
      const int64_t key_at = (t * layer.key_heads + key_head) * key_dim;
      keys.push_back(unit(data.k.data() + key_at, key_dim, 1.0));
      queries.push_back(unit(data.q.data() + key_at, key_dim, 1.0 / std::sqrt(double(key_dim))));
      const float* v = data.v.data() + (t * layer.value_heads + head) * value_dim;
      values.emplace_back(v, v + value_dim);
      const float beta = data.beta[t * layer.value_heads + head];
      betas.push_back(plan.beta == RecordType::bf16 ? to_bf16(beta) : beta);
      Vector decay(key_dim);
      for (int c = 0; c < key_dim; ++c) {
        decay[c] = std::exp2(double{channel ? data.g[t * data.decays() + head * key_dim + c]
                                            : data.g[t * data.decays() + head]});
      }
      decays.push_back(decay);
    }
    weights.assign(n, Vector(n + 1));
    key_dots = query_dots = inverse = Matrix(n, Vector(n));
    for (int j = -1; j < n; ++j) {
      Vector w(key_dim, 1.0);
      for (int t = std::max(j, 0); t < n; ++t) {
        if (t > j) {
          for (int c = 0; c < key_dim; ++c) w[c] *= decays[t][c];
        }
        weights[t][j + 1] = largest(w);
        if (j < 0) continue;
        for (int c = 0; c < key_dim; ++c) {
          key_dots[t][j] += keys[t][c] * w[c] * keys[j][c];
          query_dots[t][j] += queries[t][c] * w[c] * keys[j][c];
        }
      }
    }
    for (int t = 0; t < n; ++t) {
      inverse[t][t] = 1.0;
      for (int j = 0; j < t; ++j) {
        for (int m = 0; m <= j; ++m) inverse[t][m] -= betas[t] * key_dots[t][j] * inverse[j][m];
      }
    }
  }

  static double largest(const Vector& x) { return *std::max_element(x.begin(), x.end()); }
  /// Largest decay after record j up to t; j = -1: from the window's start.
  double weight(int t, int j) const { return weights[t][j + 1]; }
  /// Relative error of such a decay.
  double weight_error(int t, int j, double e) const {
    const int m = t - j;
    if (channel) return m * 2.7 * e;
    const double w = weight(t, j);
    return 1.7 * e + (w > 0.0 ? m * e * std::abs(std::log(w)) : 0.0);
  }

  Vector decayed(const Vector& row, int t) const {
    Vector result = row;
    for (int c = 0; c < key_dim; ++c) result[c] *= decays[t][c];
    return result;
  }

  /// One row p of the state through the window. `known` corrections are folded as given (bounded by
  /// known_error) for t < known.size().
  struct Path {
    Vector u, u_error;  // corrections and the bound of a form's
    Vector o, o_error;
    Vector state;
    double state_error = 0.0;  // in norm
  };
  Path walk(const Vector& start, int p, const Precision& precision, bool flush_operands,
            const Vector& known = {}, const Vector& known_error = {}) const {
    const double e = precision.arithmetic, eo = flush_operands ? precision.operand : 0.0;
    const double K = key_dim, ek = (K / 2 + 4) * e + eo;
    Path path;
    path.state = start;
    const double size = norm(start);
    const int known_count = static_cast<int>(known.size());
    Vector residual(n);
    for (int t = 0; t < n; ++t) {
      const double carried = weight(t, -1);
      const double carried_error = weight_error(t, -1, e);
      path.state = decayed(path.state, t);
      const double beta = betas[t];
      double magnitude = std::abs(values[t][p]) + carried * size;
      double r = carried * size * (K * e + ek + carried_error + 2 * e + eo);
      double o_size = carried * size;
      double o_r = carried * size * (K * e + (K / 2 + 4) * e + carried_error + 2 * e);
      for (int j = 0; j < t; ++j) {
        const double w = weight(t, j), ew = weight_error(t, j, e);
        magnitude += w * std::abs(path.u[j]);
        r += w * std::abs(path.u[j]) * (K * e + 2 * ek + ew + 2 * e);
        o_size += w * std::abs(path.u[j]);
        o_r += w * std::abs(path.u[j]) * (K * e + (K + 8) * e + ew + 2 * e);
      }
      const bool given = t < known_count;
      const double u = given ? known[t] : beta * (values[t][p] - dot(path.state, keys[t]));
      path.u.push_back(u);
      // Given corrections carry an error of their own, and nothing of earlier records'.
      residual[t] = given ? known_error[t] : beta * (r + (t + 2) * e * magnitude) + e * std::abs(u);
      double error = residual[t];
      if (!given) {
        for (int j = 0; j < t; ++j) {
          const double a = std::abs(beta * key_dots[t][j]);
          if (known_count > 0) {
            error += a * path.u_error[j];
          } else if (!flush_operands) {
            residual[t] += a * precision.stored_u * std::abs(path.u[j]);
          }
        }
        if (known_count == 0) {
          error = 0.0;
          for (int m = 0; m <= t; ++m) error += std::abs(inverse[t][m]) * residual[m];
        }
      }
      path.u_error.push_back(1.01 * error);

      double o = dot(path.state, queries[t]) + u * dot(keys[t], queries[t]);
      path.o.push_back(o);
      const double q_size = norm(queries[t]);
      o_size += std::abs(u);
      o_r += std::abs(u) * (K * e + (K + 8) * e + 3 * e);
      double o_error = q_size * (o_r + (t + 3) * e * o_size) + precision.output * std::abs(o);
      for (int j = 0; j <= t; ++j) {
        const double stored =
            j < t && !flush_operands ? precision.stored_u * std::abs(path.u[j]) : 0.0;
        o_error += std::abs(query_dots[t][j]) * (path.u_error[j] + stored);
      }
      path.o_error.push_back(1.01 * o_error + FLT_MIN);
      for (int c = 0; c < key_dim; ++c) path.state[c] += u * keys[t][c];
    }
    const double carried = weight(n - 1, -1);
    double error = carried * size * (weight_error(n - 1, -1, e) + 2 * e);
    double magnitude = carried * size;
    for (int j = 0; j < n; ++j) {
      const double w = weight(n - 1, j);
      error += w * (path.u_error[j] +
                    std::abs(path.u[j]) * (ek + eo + weight_error(n - 1, j, e) + 2 * e));
      magnitude += w * std::abs(path.u[j]);
    }
    path.state_error =
        1.01 * (error + (n + 1) * e * magnitude + precision.output * norm(path.state)) +
        key_dim * FLT_MIN;
    return path;
  }

  /// Output of the last record read from the folded state.
  double folded_output(const Path& path) const { return dot(path.state, queries[n - 1]); }
  double folded_output_error(const Path& path, const Precision& precision) const {
    const double K = key_dim, e = precision.arithmetic, q = norm(queries[n - 1]);
    return 1.01 * (path.state_error * q + norm(path.state) * q * (K * e + (K / 2 + 4) * e) +
                   precision.output * std::abs(folded_output(path))) +
           FLT_MIN;
  }
};

/// Runs whole windows of one row and compares outputs and folded states with ExactWindow.
/// Checkpoints in FP32 follow the exact recurrence through all windows (an error E of a row of the
/// state becomes E P with |P| <= 1, and adds |E| |q| to an output); others start every window from
/// the decoded checkpoints and must encode S within its bound: formats without scales are monotone,
/// so the code lies between those of S - bound and S + bound.
void check_against_exact(Row row, int windows, KernelForm form) {
  const Sequence& data = *row.data;
  const int window = row.plans[0].window;
  const HeadPlan& plan = row.plans[0];
  const Precision precision(form, plan);
  const bool plain =
      plan.recurrence.format->name == "fp32" && (!plan.read || plan.read->format->name == "fp32");
  std::vector<Matrix> exact(row.heads());
  std::vector<Vector> state_error(row.heads(), Vector(data.layer.value_dim));
  Worst outputs, states;
  for (int w = 0; w < windows; ++w) {
    std::vector<Matrix> recurrence(row.heads()), read(row.heads());
    for (int h = 0; h < row.heads(); ++h) {
      recurrence[h] = row.decoded(h, StateRole::recurrence);
      read[h] = row.decoded(h, StateRole::read);
      if (w == 0) exact[h] = recurrence[h];
      if (plain) recurrence[h] = read[h] = exact[h];
    }
    const int first = row.position;
    advance(&row, window, form);
    for (int h = 0; h < row.heads(); ++h) {
      const ExactWindow reality(data, plan, first, window, h);
      const Matrix after = row.decoded(h, StateRole::recurrence);
      const int value_dim = data.layer.value_dim, key_dim = data.layer.key_dim;
      std::vector<float> low(int64_t{value_dim} * key_dim), high(low.size());
      Matrix folded(value_dim);
      for (int p = 0; p < value_dim; ++p) {
        const ExactWindow::Path from_read = reality.walk(read[h][p], p, precision, false);
        Vector known, known_error;
        if (plan.gdn_fold == GdnFold::cached) {
          for (int j = 0; j + 1 < window; ++j) {
            known.push_back(from_read.u[j]);
            known_error.push_back(from_read.u_error[j] +
                                  precision.stored_u * std::abs(from_read.u[j]));
          }
        }
        const ExactWindow::Path fold =
            reality.walk(recurrence[h][p], p, precision, true, known, known_error);
        const double inherited = state_error[h][p];
        for (int t = 0; t < window; ++t) {
          const bool from_fold = t == window - 1 && plan.flush_output == FlushOutput::recurrence;
          const double expected = from_fold ? reality.folded_output(fold) : from_read.o[t];
          const double bound =
              (from_fold ? reality.folded_output_error(fold, precision) : from_read.o_error[t]) +
              inherited * norm(reality.queries[t]);
          const float got = row.o[(int64_t{first + t} * row.heads() + h) * value_dim + p];
          outputs.see("o of token " + std::to_string(first + t) + " head " + std::to_string(h) +
                          " value " + std::to_string(p),
                      got, expected, bound);
        }
        state_error[h][p] = fold.state_error + inherited;
        folded[p] = fold.state;
        for (int c = 0; c < key_dim; ++c) {
          if (plain) {
            states.see("S after token " + std::to_string(row.position - 1) + " head " +
                           std::to_string(h) + " [" + std::to_string(p) + ", " + std::to_string(c) +
                           "]",
                       after[p][c], fold.state[c], state_error[h][p]);
          }
          low[p * key_dim + c] = static_cast<float>(fold.state[c] - 1.01 * fold.state_error);
          high[p * key_dim + c] = static_cast<float>(fold.state[c] + 1.01 * fold.state_error);
        }
        if (!plain) state_error[h][p] = 0.0;
      }
      exact[h] = folded;
      if (plain) continue;
      Row bracket = row;
      const FlushKey key{data.layer.layer, data.layer.head_offset, row.position - 1};
      encode_checkpoints(bracket.state(), bracket.shape(), h, key, 0.0f, low.data());
      const Matrix lowest = bracket.decoded(h, StateRole::recurrence);
      encode_checkpoints(bracket.state(), bracket.shape(), h, key, 0.0f, high.data());
      const Matrix highest = bracket.decoded(h, StateRole::recurrence);
      for (int p = 0; p < value_dim; ++p) {
        for (int c = 0; c < key_dim; ++c) {
          INFO("token " << row.position - 1 << " head " << h << " [" << p << ", " << c << "] is "
                        << after[p][c] << ", expected " << lowest[p][c] << " to " << highest[p][c]
                        << "; S is " << folded[p][c]);
          const bool between = lowest[p][c] <= after[p][c] && after[p][c] <= highest[p][c];
          if (!between) CHECK(between);
        }
      }
    }
  }
  outputs.check();
  states.check();
}

const std::array<KernelForm, 2> kForms = {KernelForm::reference, KernelForm::fast};

struct Case {
  int key_dim, value_dim, key_heads, value_heads, window;
  bool channel_decay;
};
const std::vector<Case> kCases = {{1, 1, 1, 1, 1, false},    {1, 1, 1, 1, 3, true},
                                  {3, 5, 1, 2, 2, false},    {16, 16, 2, 2, 4, true},
                                  {17, 33, 1, 3, 7, false},  {33, 17, 3, 3, 5, true},
                                  {64, 31, 1, 2, 16, false}, {32, 48, 1, 1, 17, false},
                                  {20, 16, 1, 1, 33, true},  {16, 16, 1, 1, 64, false}};

TEST_CASE("gdn: FP32 state in any window agrees with the recurrence") {
  for (const Case& c : kCases) {
    const Sequence data = random_sequence(
        make_layer(c.key_dim, c.value_dim, c.key_heads, c.value_heads, c.channel_decay),
        4 * c.window, 100 + c.key_dim + c.window);
    for (const char* states : {"fp32", "fp32/fp32"}) {
      for (const GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
        for (const FlushOutput output : {FlushOutput::recurrence, FlushOutput::read}) {
          HeadPlan plan = make_plan(states, c.window);
          plan.gdn_fold = fold;
          plan.flush_output = output;
          for (const KernelForm form : kForms) {
            CAPTURE(c.key_dim);
            CAPTURE(c.window);
            CAPTURE(states);
            CAPTURE(int(fold));
            CAPTURE(int(output));
            CAPTURE(int(form));
            check_against_exact(make_row(data, {plan}), 4, form);
          }
        }
      }
    }
  }
}

TEST_CASE("gdn: low-precision checkpoints round the recurrence's state within its bound") {
  for (const Case& c : {kCases[2], kCases[3], kCases[4], kCases[6], kCases[8]}) {
    const Sequence data = random_sequence(
        make_layer(c.key_dim, c.value_dim, c.key_heads, c.value_heads, c.channel_decay),
        3 * c.window, 300 + c.key_dim);
    for (const char* states : {"fp16", "bf16+sr", "fp16+sr/fp8_e4m3", "bf16/fp8_e5m2+sr"}) {
      for (const GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
        for (int option = 0; option < 5; ++option) {
          HeadPlan plan = make_plan(states, c.window);
          plan.gdn_fold = fold;
          if (option == 1) plan.flush_output = FlushOutput::read;
          if (option == 2) plan.ring_u = RecordType::bf16;
          if (option == 3) plan.dot = DotType::tf32;
          if (option == 4) {
            plan.dot = DotType::bf16;
            plan.beta = RecordType::bf16;
          }
          for (const KernelForm form : kForms) {
            CAPTURE(c.key_dim);
            CAPTURE(states);
            CAPTURE(int(fold));
            CAPTURE(option);
            CAPTURE(int(form));
            Row row = make_row(data, {plan});
            set_random_state(&row, 5, 0.25f);
            check_against_exact(row, 3, form);
          }
        }
      }
    }
  }
}

/// Eager decoding in a format: decode, one step, output, encode; FP64 in the order of the equation.
void eager_step(Row* row, Row* checkpoints, std::vector<float>* outputs) {
  const GdnLayer& layer = row->data->layer;
  for (int h = 0; h < layer.value_heads; ++h) {
    const ExactWindow step(*row->data, row->plan(h), row->position, 1, h);
    Matrix state = checkpoints->decoded(h, StateRole::recurrence);
    std::vector<float> next;
    for (int p = 0; p < layer.value_dim; ++p) {
      for (int n = 0; n < layer.key_dim; ++n) state[p][n] *= step.decays[0][n];
      const double u = step.betas[0] * (step.values[0][p] - dot(state[p], step.keys[0]));
      for (int n = 0; n < layer.key_dim; ++n) state[p][n] += u * step.keys[0][n];
      outputs->push_back(static_cast<float>(dot(state[p], step.queries[0])));
      for (double x : state[p]) next.push_back(static_cast<float>(x));
    }
    encode_checkpoints(checkpoints->state(), row->shape(), h,
                       {layer.layer, layer.head_offset, row->position}, 0.0f, next.data());
  }
}

TEST_CASE("gdn: a window of 1 with a shared checkpoint is eager decoding, bit for bit") {
  for (const bool channel : {false, true}) {
    const Sequence data = random_sequence(make_layer(32, 16, 1, 2, channel), 40, 21);
    for (const char* states : {"fp32", "fp16+sr", "nvfp4+sr", "mxfp8", "int8+sr"}) {
      for (const GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
        CAPTURE(states);
        HeadPlan plan = make_plan(states, 1);
        plan.gdn_fold = fold;
        Row row = make_row(data, {plan});
        Row checkpoints = row;
        std::vector<float> expected;
        for (int t = 0; t < data.tokens; ++t) {
          eager_step(&row, &checkpoints, &expected);
          advance(&row, 1, KernelForm::reference);
        }
        check_same("o", row.o, expected);
        CHECK(row.recurrence == checkpoints.recurrence);
        CHECK(row.pending[0] == 0);
      }
    }
  }
}

TEST_CASE("gdn: cached and rederive are the same bits while the checkpoint is FP32") {
  for (const bool channel : {false, true}) {
    const Sequence data = random_sequence(make_layer(24, 19, 1, 2, channel), 100, 22);
    for (const char* states : {"fp32", "fp32/fp32"}) {
      std::vector<Row> rows;
      for (const GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
        HeadPlan plan = make_plan(states, 8);
        plan.gdn_fold = fold;
        rows.push_back(make_row(data, {plan}));
        advance(&rows.back(), 100, KernelForm::fast);
      }
      check_same_rows(rows[0], rows[1]);
    }
  }
}

// Every number here is a small multiple of a power of two: keys and queries 2^20 times unit vectors
// (2^40 + 1e-6 is 2^40 in FP32 and in FP64, so k^ is exactly a unit vector and q^ exactly K^-1/2 =
// 2^-m times one), values -4 .. 4, beta and decays 1 or 1/2. A state element stays below 8 and is
// encoded on multiples of 2^-9 (E4M3) or of 2^-16 (E5M2); a window of 2 halves it at most 4 times,
// so that 3 + 16 + 4 bits hold every sum.
Sequence exact_sequence(const GdnLayer& layer, int tokens) {
  std::mt19937 engine(31);
  Sequence s;
  s.layer = layer;
  s.tokens = tokens;
  const auto one_hot = [&](std::vector<float>* x) {
    x->assign(static_cast<size_t>(layer.key_heads) * layer.key_dim * tokens, 0.0f);
    for (int64_t i = 0; i < int64_t{layer.key_heads} * tokens; ++i) {
      (*x)[i * layer.key_dim + engine() % layer.key_dim] = engine() % 2 ? 0x1p20f : -0x1p20f;
    }
  };
  one_hot(&s.q);
  one_hot(&s.k);
  s.v.resize(static_cast<size_t>(layer.value_heads) * layer.value_dim * tokens);
  for (float& x : s.v) x = static_cast<float>(static_cast<int>(engine() % 9) - 4);
  s.beta.resize(static_cast<size_t>(layer.value_heads) * tokens);
  for (float& x : s.beta) x = engine() % 2 ? 1.0f : 0.5f;
  s.g.resize(static_cast<size_t>(s.decays()) * tokens);
  for (float& x : s.g) x = engine() % 2 ? -1.0f : 0.0f;
  return s;
}

TEST_CASE("gdn: exact sums give the reference's bits over 10,000 flushes") {
  constexpr int kFlushes = 10000;
  for (const bool channel : {false, true}) {
    const Sequence data = exact_sequence(make_layer(16, 8, 1, 1, channel), 2 * kFlushes);
    for (const char* states : {"fp8_e4m3+sr", "fp8_e4m3+sr/fp8_e5m2+sr"}) {
      CAPTURE(states);
      CAPTURE(channel);
      HeadPlan plan = make_plan(states, 2);
      Row fast = make_row(data, {plan}), slow = fast;
      advance(&fast, data.tokens, KernelForm::fast);
      advance(&slow, data.tokens, KernelForm::reference);
      check_same_rows(fast, slow);
      CHECK(fast.pending[0] == 0);
      // The rows are no constant: the state is still moving at the end.
      CHECK(std::any_of(fast.o.end() - 64, fast.o.end(), [](float x) { return x != 0.0f; }));
    }
  }
}

/// Plans that differ in everything that takes a path of its own.
std::vector<HeadPlan> varied_plans() {
  std::vector<HeadPlan> plans;
  for (const auto& [states, window] :
       std::vector<std::pair<std::string, int>>{{"fp32", 16},
                                                {"fp32", 1},
                                                {"fp16+sr", 5},
                                                {"nvfp4+sr", 16},
                                                {"fp16+sr/nvfp4", 7},
                                                {"fp8+sr/fp8_e5m2", 3},
                                                {"bf16/fp32", 12},
                                                {"fp32/nvfp4+sr", 64}}) {
    plans.push_back(make_plan(states, window));
  }
  plans[3].gdn_fold = GdnFold::cached;
  plans[4].flush_output = FlushOutput::read;
  plans[5].gdn_fold = GdnFold::cached;
  plans[5].ring_u = RecordType::bf16;
  plans[6].dot = DotType::bf16;
  plans[6].beta = RecordType::bf16;
  HeadPlan layer_span = make_plan("nvfp4+sr/nvfp4", 6);
  layer_span.recurrence.format = format_with_span(layer_span.recurrence.format, Span::layer);
  layer_span.read->format = layer_span.recurrence.format;
  plans.push_back(layer_span);
  HeadPlan rounded_ring = make_plan("fp16+sr", 9);
  rounded_ring.ring_u = RecordType::bf16;
  rounded_ring.dot = DotType::tf32;
  rounded_ring.flush_output = FlushOutput::read;
  plans.push_back(rounded_ring);
  return plans;
}

TEST_CASE("gdn: any split, ragged set, row order and number of threads gives the same bits") {
  const int threads = omp_get_max_threads();
  std::mt19937 engine(41);
  for (const bool channel : {false, true}) {
    constexpr int kTokens = 70;
    std::vector<Sequence> data;
    const std::vector<HeadPlan> plans = varied_plans();
    const std::vector<uint8_t> mixed = {0, 4, 8, 2, 8, 8};
    for (size_t r = 0; r <= plans.size(); ++r) {
      data.push_back(random_sequence(make_layer(32, 21, 2, 6, channel), kTokens,
                                     static_cast<uint32_t>(400 + r)));
    }
    std::vector<Row> rows;
    for (size_t r = 0; r <= plans.size(); ++r) {
      rows.push_back(r < plans.size() ? make_row(data[r], {plans[r]})
                                      : make_row(data[r], plans, mixed));
      set_random_state(&rows.back(), static_cast<uint32_t>(50 + r), 0.5f);
    }
    for (const KernelForm form : kForms) {
      std::vector<Row> whole = rows;
      omp_set_num_threads(1);
      for (Row& row : whole) advance(&row, kTokens, form);
      for (int trial = 0; trial < (form == KernelForm::fast ? 6 : 1); ++trial) {
        std::vector<Row> split = rows;
        omp_set_num_threads(1 + trial % 4);
        std::vector<size_t> order(rows.size());
        for (size_t r = 0; r < order.size(); ++r) order[r] = r;
        while (!order.empty()) {
          std::shuffle(order.begin(), order.end(), engine);
          std::vector<StateRow> states;
          std::vector<GdnInputs> inputs;
          std::vector<int> lengths;
          for (const size_t r : order) {
            const int longest = trial == 0 ? 1 : trial == 1 ? 3 : 30;
            const int length = std::min<int>(engine() % (longest + 1), kTokens - split[r].position);
            lengths.push_back(length);
            states.push_back(split[r].state());
            states.back().corrections_hold = trial % 2 == 0;  // true here; false only costs time
            inputs.push_back(split[r].inputs(length));
          }
          gdn_advance(data[0].layer, states, inputs, AdvanceMode::commit, form);
          for (size_t i = 0; i < order.size(); ++i) split[order[i]].position += lengths[i];
          std::erase_if(order, [&](size_t r) { return split[r].position == kTokens; });
        }
        for (size_t r = 0; r < rows.size(); ++r) {
          CAPTURE(r);
          CAPTURE(trial);
          check_same_rows(split[r], whole[r]);
          for (int h = 0; h < whole[r].heads(); ++h) {
            CHECK(split[r].health[h].encode.elements == whole[r].health[h].encode.elements);
          }
        }
      }
    }
  }
  omp_set_num_threads(threads);
}

TEST_CASE("gdn: a flush takes corrections that hold as they are, others only with a cached fold") {
  const Sequence data = random_sequence(make_layer(16, 16, 1, 2), 8, 77);
  const auto state_after = [&](const HeadPlan& plan, bool hold, float change) {
    Row row = make_row(data, {plan});
    for (int t = 0; t < 8; ++t) {
      if (t == 7) row.u[3] += change;  // of record 0, head 0
      StateRow state = row.state();
      state.corrections_hold = hold;
      const GdnInputs in = row.inputs(1);
      gdn_advance(data.layer, {&state, 1}, {&in, 1}, AdvanceMode::commit, KernelForm::fast);
      ++row.position;
    }
    return row.recurrence;
  };
  for (const char* format : {"fp32", "nvfp4+sr", "fp16/fp32"}) {
    CAPTURE(format);
    const HeadPlan plan = make_plan(format, 8);
    const std::vector<std::byte> right = state_after(plan, false, 0.0f);
    CHECK(state_after(plan, true, 0.0f) == right);
    CHECK(state_after(plan, false, 4.0f) == right);
    CHECK((state_after(plan, true, 4.0f) == right) == plan.read.has_value());
  }
}

TEST_CASE("gdn: the recurrence checkpoint does not depend on the read checkpoint with rederive") {
  for (const bool channel : {false, true}) {
    const Sequence data = random_sequence(make_layer(32, 20, 1, 2, channel), 200, 51);
    std::vector<Row> rows;
    for (const char* states : {"fp16+sr", "fp16+sr/nvfp4", "fp16+sr/fp8+sr"}) {
      rows.push_back(make_row(data, {make_plan(states, 8)}));
      advance(&rows.back(), 200, KernelForm::fast);
    }
    CHECK(rows[0].recurrence == rows[1].recurrence);
    CHECK(rows[0].recurrence == rows[2].recurrence);
    HeadPlan cached = make_plan("fp16+sr/nvfp4", 8);
    cached.gdn_fold = GdnFold::cached;
    Row open = make_row(data, {cached});
    advance(&open, 200, KernelForm::fast);
    CHECK(open.recurrence != rows[0].recurrence);  // the read error enters
  }
}

TEST_CASE("gdn: rederive folds nothing that a ring has kept, cached folds it") {
  // The ring's corrections may come from another state (drafts read from an unencoded one):
  // changing them changes outputs only.
  for (const bool channel : {false, true}) {
    const Sequence data = random_sequence(make_layer(16, 20, 1, 2, channel), 8, 52);
    for (const char* states : {"fp32", "bf16", "fp32/fp32"}) {
      for (const GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
        for (const KernelForm form : kForms) {
          HeadPlan plan = make_plan(states, 8);
          plan.gdn_fold = fold;
          Row row = make_row(data, {plan});
          advance(&row, 5, form);
          Row other = row;
          for (int i = 0; i < 5 * 40; ++i) other.u[i] += 1.0f;
          advance(&row, 3, form);
          advance(&other, 3, form);
          CHECK(row.o[5 * 40] != other.o[5 * 40]);
          CHECK((row.recurrence == other.recurrence) == (fold == GdnFold::rederive));
        }
      }
    }
  }
}

/// K = V = 1, k = q = 2^20 (k^ = 1): the numbers of a window by hand.
Sequence scalar_sequence(const std::vector<float>& v, const std::vector<float>& beta, float g) {
  Sequence s;
  s.layer = make_layer(1, 1, 1, 1);
  s.tokens = static_cast<int>(v.size());
  s.q = s.k = std::vector<float>(v.size(), 0x1p20f);
  s.v = v;
  s.beta = beta;
  s.g = std::vector<float>(v.size(), g);
  return s;
}

TEST_CASE("gdn: fold, flush output and option types of a window by hand") {
  // R = 1.125, C = 1 (E5M2 has two mantissa bits; ties to even), decay 1/2, beta 1/2, v = 3 and 1.
  //   token 0, from C:      0.5,     u0 = 0.5 (3 - 0.5) = 1.25,        o = 1.75
  //   token 1, from C:      0.875,   u1 = 0.5 (1 - 0.875) = 0.0625,    o = 0.9375
  //   rederive, from R:     0.5625,  u0 = 1.21875, S = 1.78125;  0.890625, u1 = 0.0546875, S =
  //   0.9453125 cached:               0.5625 + 1.25 = 1.8125;               0.90625,  u1 =
  //   0.046875,  S = 0.953125
  const Sequence data = scalar_sequence({3.0f, 1.0f}, {0.5f, 0.5f}, -1.0f);
  for (const KernelForm form : kForms) {
    for (const GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
      for (const FlushOutput output : {FlushOutput::recurrence, FlushOutput::read}) {
        HeadPlan plan = make_plan("fp32/fp8_e5m2", 2);
        plan.gdn_fold = fold;
        plan.flush_output = output;
        Row row = make_row(data, {plan});
        const float start = 1.125f;
        encode_checkpoints(row.state(), row.shape(), 0, {}, 0.0f, &start);
        REQUIRE(row.decoded(0, StateRole::read)[0][0] == 1.0);
        advance(&row, 2, form);
        const double folded = fold == GdnFold::rederive ? 0.9453125 : 0.953125;
        CHECK(row.o[0] == 1.75f);
        CHECK(row.o[1] == (output == FlushOutput::read ? 0.9375 : folded));
        CHECK(row.u[0] == 1.25f);
        CHECK(row.decoded(0, StateRole::recurrence)[0][0] == folded);
        CHECK(row.decoded(0, StateRole::read)[0][0] == 1.0);  // either S in E5M2
      }
    }
  }
}

TEST_CASE("gdn: beta, stored corrections and a flush's operands through BF16") {
  for (const KernelForm form : kForms) {
    // The example of vLLM #53877: sigmoid(0.5) = 0.62245935 in FP32, 0.62109375 in BF16. S = beta
    // v.
    for (const RecordType type : {RecordType::fp32, RecordType::bf16}) {
      const Sequence data = scalar_sequence({1.0f}, {0.62245935f}, 0.0f);
      HeadPlan plan = make_plan("fp32", 1);
      plan.beta = type;
      Row row = make_row(data, {plan});
      advance(&row, 1, form);
      const float expected = type == RecordType::bf16 ? 0.62109375f : 0.62245935f;
      CHECK(row.o[0] == expected);
      CHECK(row.decoded(0, StateRole::recurrence)[0][0] == double{expected});
    }
    // u_0 = 1 + 2^-9 goes into the ring as 1; its own output still has all bits, the next one reads
    // 1: beta_1 = 0, so o_1 = u_0 as stored. cached folds the stored one, rederive computes it
    // again.
    const float v0 = 1.0f + 0x1p-9f;
    for (const GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
      const Sequence data = scalar_sequence({v0, 5.0f, 5.0f}, {1.0f, 0.0f, 0.0f}, 0.0f);
      HeadPlan plan = make_plan("fp32", 3);
      plan.ring_u = RecordType::bf16;
      plan.gdn_fold = fold;
      Row row = make_row(data, {plan});
      advance(&row, 3, form);
      CHECK(row.u[0] == 1.0f);
      CHECK(row.o[0] == v0);
      CHECK(row.o[1] == 1.0f);
      CHECK(row.o[2] == (fold == GdnFold::cached ? 1.0f : v0));
    }
    // The flush folds round(u) round(k): BF16 drops 2^-9 and 2^-12, TF32 2^-12 only.
    for (const bool channel : {false, true}) {
      for (const DotType type : {DotType::fp32, DotType::tf32, DotType::bf16}) {
        Sequence data = scalar_sequence({1.0f + 0x1p-9f + 0x1p-12f}, {1.0f}, -1.0f);
        data.layer.channel_decay = channel;
        HeadPlan plan = make_plan("fp32", 1);
        plan.dot = type;
        Row row = make_row(data, {plan});
        advance(&row, 1, form);
        const float expected = type == DotType::fp32   ? 1.0f + 0x1p-9f + 0x1p-12f
                               : type == DotType::tf32 ? 1.0f + 0x1p-9f
                                                       : 1.0f;
        CHECK(row.o[0] == expected);
      }
      // R = 1 + 2^-9 is read as 1 for the correction and kept in full: u = 1 - 1, S = R.
      Sequence data = scalar_sequence({1.0f}, {1.0f}, 0.0f);
      data.layer.channel_decay = channel;
      HeadPlan plan = make_plan("fp32", 1);
      plan.dot = DotType::bf16;
      Row row = make_row(data, {plan});
      const float start = 1.0f + 0x1p-9f;
      encode_checkpoints(row.state(), row.shape(), 0, {}, 0.0f, &start);
      advance(&row, 1, form);
      CHECK(row.decoded(0, StateRole::recurrence)[0][0] == double{start});

      // S = 1, decay 2^-0.3 = 0.8122524, v = 0.8125 (its BF16): KDA decays the key and rounds it,
      // so u = 0; GDN decays the read, so u = 2.476e-4, which the fold rounds to BF16.
      data.v = {0.8125f};
      data.g = {-0.3f};
      const float one = 1.0f;
      Row decayed = make_row(data, {plan});
      encode_checkpoints(decayed.state(), decayed.shape(), 0, {}, 0.0f, &one);
      advance(&decayed, 1, form);
      const double decay = std::exp2(double{-0.3f});
      const double folded = decay + (channel ? 0.0 : to_bf16(static_cast<float>(0.8125 - decay)));
      // 2^-24 each for the exponential and the sum. The small u is 129.8 steps of 2^-19: 0.3 steps
      // from the next boundary, seven times its own error.
      CHECK(std::abs(decayed.decoded(0, StateRole::recurrence)[0][0] - folded) <= 2 * 0x1p-24);
    }
  }
}

TEST_CASE("gdn: an FP32 scale over the layer is that of all heads of the plan") {
  const Sequence data = random_sequence(make_layer(16, 4, 2, 4), 6, 61);
  HeadPlan scaled = make_plan("nvfp4/nvfp4+sr", 6);
  scaled.recurrence.format = format_with_span(scaled.recurrence.format, Span::layer);
  scaled.read->format = scaled.recurrence.format;
  HeadPlan plain = make_plan("fp32", 6);
  const std::vector<uint8_t> plan_of_head = {0, 1, 0, 0};
  Row row = make_row(data, {scaled, make_plan("nvfp4", 6)}, plan_of_head);
  Row unscaled = make_row(data, {plain});
  for (const KernelForm form : kForms) {
    Row with = row, without = unscaled;
    advance(&with, 6, form);
    advance(&without, 6, form);
    float amax = 0.0f;
    std::vector<std::vector<float>> folded(4);
    for (int h = 0; h < 4; ++h) {
      for (const Vector& values : without.decoded(h, StateRole::recurrence)) {
        folded[h].insert(folded[h].end(), values.begin(), values.end());
      }
      if (h != 1) amax = std::max(amax, state_amax(folded[h].data(), 64));
    }
    Row expected = row;
    for (int h = 0; h < 4; ++h) {
      encode_checkpoints(expected.state(), row.shape(), h, {3, 0, 5}, amax, folded[h].data());
    }
    CHECK(with.recurrence == expected.recurrence);
    CHECK(with.read == expected.read);
    CHECK(with.recurrence != row.recurrence);
  }
}

/// Verify steps of given lengths and accepted counts. Tokens beyond the accepted ones are `garbage`
/// while they are drafts, and are written before they become the step's real tokens.
void speculate(Row* row, Sequence* live, const Sequence& truth,
               const std::vector<std::pair<int, int>>& steps, float garbage, KernelForm form) {
  const GdnLayer& layer = truth.layer;
  const auto copy = [&](std::vector<float> Sequence::*field, int first, int tokens, int accepted) {
    const size_t width = (truth.*field).size() / truth.tokens;
    for (size_t i = 0; i < width * tokens; ++i) {
      const bool real = i < width * accepted;
      (live->*field)[first * width + i] = real ? (truth.*field)[first * width + i] : garbage;
    }
  };
  for (const auto& [tokens, accepted] : steps) {
    for (auto field : {&Sequence::q, &Sequence::k, &Sequence::v, &Sequence::g, &Sequence::beta}) {
      copy(field, row->position, tokens, accepted);
    }
    advance(row, tokens, form, AdvanceMode::verify);
    const size_t width = layer.value_heads * layer.value_dim;
    std::fill(row->u.begin() + (row->position + accepted) * width,
              row->u.begin() + (row->position + tokens) * width, garbage);
    std::fill(row->o.begin() + (row->position + accepted) * width,
              row->o.begin() + (row->position + tokens) * width, 0.0f);
    for (int& pending : row->pending) pending += accepted;
    row->position += accepted;
  }
}

TEST_CASE("gdn: rejected drafts never reach the state or an accepted output") {
  const std::vector<std::pair<int, int>> steps = {{4, 2}, {4, 4}, {1, 1}, {3, 1}, {6, 5}, {2, 2},
                                                  {5, 1}, {8, 3}, {4, 4}, {4, 1}, {3, 3}, {7, 6}};
  for (const bool channel : {false, true}) {
    const Sequence truth = random_sequence(make_layer(32, 18, 1, 2, channel), 64, 71);
    for (const HeadPlan& plan : varied_plans()) {
      for (const KernelForm form : kForms) {
        CAPTURE(plan.window);
        CAPTURE(plan.recurrence.format->name);
        Sequence live = truth, other = truth;
        Row poisoned = make_row(live, {plan}), clean = make_row(other, {plan});
        speculate(&poisoned, &live, truth, steps, std::numeric_limits<float>::quiet_NaN(), form);
        speculate(&clean, &other, truth, steps, 1.0f, form);
        const size_t accepted = poisoned.position * 36;
        check_same("o", {poisoned.o.begin(), poisoned.o.begin() + accepted},
                   {clean.o.begin(), clean.o.begin() + accepted});
        CHECK(poisoned.recurrence == clean.recurrence);
        CHECK(poisoned.read == clean.read);
        CHECK(std::none_of(poisoned.o.begin(), poisoned.o.begin() + accepted,
                           [](float x) { return std::isnan(x); }));
      }
    }
  }
}

TEST_CASE("gdn: verified tokens are the steps they stand for") {
  // Without a fold the outputs and corrections of a verify step are those of single steps, bit for
  // bit; committing them and going on gives the plain run's state.
  for (const bool channel : {false, true}) {
    const Sequence data = random_sequence(make_layer(32, 18, 1, 2, channel), 64, 72);
    for (HeadPlan plan : varied_plans()) {
      plan.window = 16;
      for (const KernelForm form : kForms) {
        Row plain = make_row(data, {plan}), verified = plain;
        advance(&plain, 5, form);
        advance(&verified, 5, form);
        const Row before = verified;
        advance(&verified, 9, form, AdvanceMode::verify);
        CHECK(verified.pending[0] == 5);
        CHECK(verified.recurrence == before.recurrence);
        for (int t = 0; t < 9; ++t) advance(&plain, 1, form);
        check_same("o", verified.o, plain.o);
        check_same("u", verified.u, plain.u);
        verified.pending[0] += 9;
        verified.position += 9;
        advance(&verified, 10, form);
        advance(&plain, 10, form);
        check_same_rows(verified, plain);
      }
    }
  }
}

TEST_CASE(
    "gdn: a verify step that does not fit folds what is committed and reads the unencoded state") {
  for (const bool channel : {false, true}) {
    const Sequence data = random_sequence(make_layer(16, 18, 1, 2, channel), 32, 73);
    for (const FlushOutput output : {FlushOutput::recurrence, FlushOutput::read}) {
      for (const GdnFold fold : {GdnFold::rederive, GdnFold::cached}) {
        for (const KernelForm form : kForms) {
          HeadPlan plan = make_plan("bf16+sr/nvfp4", 8);
          plan.flush_output = output;
          plan.gdn_fold = fold;
          Row row = make_row(data, {plan});
          advance(&row, 6, form);
          Row folded = row, exact = row;
          advance(&row, 4, form, AdvanceMode::verify);
          CHECK(row.pending[0] == 0);
          flush(&folded, form);  // the same fold, at position 5
          CHECK(folded.pending[0] == 0);
          CHECK(row.recurrence == folded.recurrence);
          CHECK(row.read == folded.read);
          CHECK(row.recurrence != exact.recurrence);
          // The drafts' outputs come from S itself: an FP32 recurrence from the same R, folded by
          // the same flush; or from the new C.
          HeadPlan wide = plan;
          wide.recurrence = codec("fp32");
          if (output == FlushOutput::recurrence) wide.read.reset();
          Row reader = make_row(data, {wide});
          reader.position = 6;
          reader.u = exact.u;
          reader.pending[0] = 6;
          for (int h = 0; h < 2; ++h) {
            std::vector<float> start;
            for (const Vector& values : exact.decoded(h, StateRole::recurrence)) {
              start.insert(start.end(), values.begin(), values.end());
            }
            encode_checkpoints(reader.state(), reader.shape(), h, {3, 0, 5}, 0.0f, start.data());
          }
          if (output == FlushOutput::read) reader.read = exact.read;
          flush(&reader, form);
          if (output == FlushOutput::read) reader.read = folded.read;
          reader.plans[0].window = 64;
          advance(&reader, 4, form);
          const auto tail = [&](const std::vector<float>& x) {
            return std::vector<float>(x.begin() + 6 * 36, x.begin() + 10 * 36);
          };
          CAPTURE(int(form));
          CAPTURE(int(output));
          if (form == KernelForm::fast) {
            check_same("o", tail(row.o), tail(reader.o));
          } else {
            // The reference keeps S in FP64, the reader has it rounded to FP32: 2^-24 |S| |q|, and
            // as much through u.
            for (int i = 6 * 36; i < 10 * 36; ++i) {
              CHECK(std::abs(row.o[i] - reader.o[i]) <= 64 * 0x1p-24);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("gdn: an explicit flush is the fold a full window would make") {
  const Sequence data = random_sequence(make_layer(32, 16, 1, 1), 12, 74);
  for (const KernelForm form : kForms) {
    for (const char* states : {"fp16+sr", "fp16+sr/nvfp4+sr"}) {
      Row early = make_row(data, {make_plan(states, 16)}),
          full = make_row(data, {make_plan(states, 12)});
      advance(&early, 12, form);
      flush(&early, form);
      advance(&full, 12, form);
      CHECK(early.recurrence == full.recurrence);
      CHECK(early.read == full.read);
      CHECK(early.pending[0] == 0);
      const Row before = early;
      flush(&early, form);  // nothing is pending: nothing is encoded again
      CHECK(early.recurrence == before.recurrence);
      CHECK(early.health[0].encode.elements == before.health[0].encode.elements);
    }
  }
}

TEST_CASE("gdn: the adjoint form agrees with the recurrence") {
  for (const int n : {1, 2, 16, 64}) {
    const Sequence data = random_sequence(make_layer(19, 6, 1, 2), n, 81 + n);
    std::mt19937 engine(82);
    std::normal_distribution<float> normal;
    std::vector<float> state(6 * 19);
    for (float& x : state) x = normal(engine);
    for (int h = 0; h < 2; ++h) {
      const HeadPlan plan = make_plan("fp32", 64);
      const ExactWindow forward(data, plan, 0, n, h);
      GdnHeadRecords records;
      records.records = n;
      records.key_dim = 19;
      records.value_dim = 6;
      records.k = data.k.data();
      records.k_stride = 19;
      records.v = data.v.data() + h * 6;
      records.v_stride = 12;
      records.decay_log2 = data.g.data() + h;
      records.beta = data.beta.data() + h;
      records.decay_stride = records.beta_stride = 2;
      std::vector<double> o(6);
      gdn_adjoint_output(records, state.data(), data.q.data() + (n - 1) * 19, o.data());
      Worst worst;
      for (int p = 0; p < 6; ++p) {
        const Vector start(state.begin() + p * 19, state.begin() + (p + 1) * 19);
        const ExactWindow::Path path =
            forward.walk(start, p, Precision(KernelForm::reference, plan), false);
        // n steps of about 2 K operations on numbers below |S| |q| + sum |u_j| |q|, in either form,
        // each rounding by 2^-53.
        double size = norm(start);
        for (double u : path.u) size += std::abs(u) + 4.0;
        worst.see("o " + std::to_string(p), o[p], path.o[n - 1],
                  2 * n * 2 * (19 + 4) * 0x1p-53 * size);
      }
      worst.check();
    }
  }
}

TEST_CASE("gdn: KDA with one decay for all channels is GDN") {
  for (const char* states : {"fp32", "fp32/nvfp4"}) {
    const Sequence scalar = random_sequence(make_layer(32, 18, 2, 2), 48, 91);
    Sequence channels = scalar;
    channels.layer.channel_decay = true;
    channels.g.clear();
    for (float g : scalar.g) channels.g.insert(channels.g.end(), 32, g);
    Row a = make_row(scalar, {make_plan(states, 16)}),
        b = make_row(channels, {make_plan(states, 16)});
    advance(&a, 48, KernelForm::reference);
    advance(&b, 48, KernelForm::reference);
    check_same_rows(a, b);
  }
  // The fast forms differ in where they round; each is within its own bound of the same recurrence.
  const Sequence scalar = random_sequence(make_layer(32, 18, 2, 2), 48, 92);
  Sequence channels = scalar;
  channels.layer.channel_decay = true;
  channels.g.clear();
  for (float g : scalar.g) channels.g.insert(channels.g.end(), 32, g);
  check_against_exact(make_row(scalar, {make_plan("fp32", 16)}), 3, KernelForm::fast);
  check_against_exact(make_row(channels, {make_plan("fp32", 16)}), 3, KernelForm::fast);
}

TEST_CASE("gdn: KDA with strong decays in some channels stays finite and accurate") {
  Sequence data = random_sequence(make_layer(32, 16, 1, 2, true), 64, 93);
  for (size_t i = 0; i < data.g.size(); ++i) {
    if (i % 3 == 0) data.g[i] = -30.0f;
    if (i % 7 == 0) data.g[i] = -200.0f;
  }
  for (const char* states : {"fp32", "fp32/fp32"}) {
    for (const KernelForm form : kForms) {
      HeadPlan plan = make_plan(states, 16);
      Row row = make_row(data, {plan});
      set_random_state(&row, 94, 100.0f);
      check_against_exact(row, 4, form);
      advance(&row, 64, form);
      CHECK(std::all_of(row.o.begin(), row.o.end(), [](float x) { return std::isfinite(x); }));
      CHECK(row.health[0].encode.non_finite == 0);
      CHECK(row.health[0].first_non_finite_position == -1);
    }
  }
  // A scalar decay of 2^-1000 forgets everything before it, without 0 * infinity anywhere.
  Sequence scalar = random_sequence(make_layer(32, 16, 1, 2), 64, 95);
  for (size_t i = 0; i < scalar.g.size(); i += 5) scalar.g[i] = -1000.0f;
  Row row = make_row(scalar, {make_plan("fp32", 16)});
  set_random_state(&row, 96, 100.0f);
  check_against_exact(row, 4, KernelForm::fast);
}

TEST_CASE(
    "gdn: a non-finite value is counted where it happened and goes no further than its head") {
  Sequence data = random_sequence(make_layer(16, 4, 1, 2), 24, 97);
  Sequence bad = data;
  bad.v[(9 * 2 + 1) * 4 + 2] = std::numeric_limits<float>::infinity();
  for (const KernelForm form : kForms) {
    Row good = make_row(data, {make_plan("fp32/nvfp4", 8)}),
        row = make_row(bad, {make_plan("fp32/nvfp4", 8)});
    advance(&good, 24, form);
    advance(&row, 24, form);
    CHECK(row.health[0].encode.non_finite == 0);
    CHECK(row.health[0].first_non_finite_position == -1);
    CHECK(row.health[1].encode.non_finite > 0);
    CHECK(row.health[1].first_non_finite_position == 15);
    for (int t = 0; t < 24; ++t) {
      for (int p = 0; p < 4; ++p) CHECK(row.o[t * 8 + p] == good.o[t * 8 + p]);
      for (int p = 4; p < 8 && t < 9; ++p) CHECK(row.o[t * 8 + p] == good.o[t * 8 + p]);
    }
  }
}

GdnHeadRecords records_of(const Sequence& data) {
  GdnHeadRecords records;
  records.records = data.tokens;
  records.key_dim = data.layer.key_dim;
  records.value_dim = data.layer.value_dim;
  records.channel_decay = data.layer.channel_decay;
  records.k = data.k.data();
  records.k_stride = data.layer.key_dim;
  records.v = data.v.data();
  records.v_stride = data.layer.value_dim;
  records.decay_log2 = data.g.data();
  records.decay_stride = data.decays();
  records.beta = data.beta.data();
  records.beta_stride = 1;
  return records;
}

TEST_CASE("gdn: stability of a window by hand") {
  // K = 1: every map is a number. L = 3, decay 1/2, beta 1/4 (1 - beta = 3/4):
  //   P_3 = (3/8)^3, P_2 = (3/8)^2, D_2 = 1/4, F = 3/8: read_norm = (1/4 - 9/64) 3/8 = 21/512.
  //   A = [0 0 0; 1/8 0 0; 1/16 1/8 0]; (I + A)^-1 = [1; -1/8 1; -3/64 -1/8 1]: row sums 1, 9/8,
  //   75/64.
  const GdnStability scalar =
      gdn_window_stability(records_of(scalar_sequence({1, 1, 1}, {0.25f, 0.25f, 0.25f}, -1.0f)));
  CHECK(scalar.map_norm == doctest::Approx(27.0 / 512).epsilon(1e-12));
  CHECK(scalar.read_norm == doctest::Approx(21.0 / 512).epsilon(1e-12));
  CHECK(scalar.decay == doctest::Approx(0.125).epsilon(1e-12));
  CHECK(scalar.solve_norm == doctest::Approx(75.0 / 64).epsilon(1e-12));
  CHECK(scalar.largest_read_error ==
        doctest::Approx((1 - 27.0 / 512) / (21.0 / 512)).epsilon(1e-9));

  // One key for all, beta 2, no decay: A is 2 below the diagonal, the inverse alternates -2, 2: 1 +
  // 2 (L - 1).
  const GdnStability reflected =
      gdn_window_stability(records_of(scalar_sequence({1, 1, 1, 1}, {2, 2, 2, 2}, 0.0f)));
  CHECK(reflected.solve_norm == doctest::Approx(7.0).epsilon(1e-12));
  CHECK(reflected.map_norm == doctest::Approx(1.0).epsilon(1e-12));

  // Fewer keys than dimensions: some direction only decays, so map_norm is the decay.
  Sequence wide = random_sequence(make_layer(12, 2, 1, 1), 5, 98);
  for (float& g : wide.g) g = -0.25f;
  const GdnStability few = gdn_window_stability(records_of(wide));
  CHECK(few.map_norm == doctest::Approx(std::exp2(-1.25)).epsilon(1e-6));
  CHECK(few.decay == doctest::Approx(std::exp2(-1.25)).epsilon(1e-12));
}

TEST_CASE("gdn: the read error enters a cached fold as the stability measure says") {
  // With the same R, the cached fold's S moves by (C - R)(P_{L-1} - D_{L-1}) F when C moves: built
  // here as a matrix, and its largest singular value found by iterating it.
  constexpr int K = 6, V = 3, L = 7;
  for (const bool channel : {false, true}) {
    const Sequence data = random_sequence(make_layer(K, V, 1, 1, channel), L, 99);
    const ExactWindow window(data, make_plan("fp32", L), 0, L, 0);
    const auto step = [&](Vector row, int t, bool correct) {
      for (int n = 0; n < K; ++n) row[n] *= window.decays[t][n];
      const double c = window.betas[t] * dot(row, window.keys[t]);
      if (correct) {
        for (int n = 0; n < K; ++n) row[n] -= c * window.keys[t][n];
      }
      return row;
    };
    Matrix map, whole;  // rows: images of the unit vectors
    for (int n = 0; n < K; ++n) {
      Vector mapped(K), decayed(K);
      mapped[n] = decayed[n] = 1.0;
      for (int t = 0; t < L - 1; ++t) {
        mapped = step(mapped, t, true);
        decayed = step(decayed, t, false);
      }
      whole.push_back(step(mapped, L - 1, true));
      for (int m = 0; m < K; ++m) mapped[m] -= decayed[m];
      map.push_back(step(mapped, L - 1, true));
    }
    const auto largest = [&](const Matrix& m) {
      Vector x(K, 1.0);
      double value = 0.0;
      for (int i = 0; i < 20000; ++i) {
        Vector y(K), back(K);
        for (int r = 0; r < K; ++r) {
          for (int c = 0; c < K; ++c) y[c] += x[r] * m[r][c];
        }
        for (int r = 0; r < K; ++r) back[r] = dot(m[r], y);
        value = std::sqrt(norm(back) / norm(x));
        const double length = norm(back);
        for (int r = 0; r < K; ++r) x[r] = back[r] / length;
      }
      return value;
    };
    const GdnStability stability = gdn_window_stability(records_of(data));
    CHECK(stability.read_norm == doctest::Approx(largest(map)).epsilon(1e-6));
    CHECK(stability.map_norm == doctest::Approx(largest(whole)).epsilon(1e-6));

    HeadPlan plan = make_plan("fp32/fp32", L);
    plan.gdn_fold = GdnFold::cached;
    Row row = make_row(data, {plan});
    set_random_state(&row, 100, 1.0f);
    Row moved = row;
    float* read = reinterpret_cast<float*>(moved.read.data());
    Matrix difference(V, Vector(K));
    std::mt19937 engine(101);
    for (int i = 0; i < V * K; ++i) {
      const float before = read[i];
      read[i] += 0.125f * static_cast<float>(static_cast<int>(engine() % 17) - 8);
      difference[i / K][i % K] = double{read[i]} - before;
    }
    advance(&row, L, KernelForm::reference);
    advance(&moved, L, KernelForm::reference);
    const Matrix a = row.decoded(0, StateRole::recurrence),
                 b = moved.decoded(0, StateRole::recurrence);
    Worst worst;
    for (int p = 0; p < V; ++p) {
      for (int c = 0; c < K; ++c) {
        double expected = 0.0;
        for (int r = 0; r < K; ++r) expected += difference[p][r] * map[r][c];
        // Stored corrections and both states are rounded to FP32; all stay below 16.
        worst.see("S' - S", b[p][c] - a[p][c], expected, (L + 2) * 2 * 0x1p-24 * 16);
      }
    }
    worst.check();
  }
}

TEST_CASE("gdn: stability of heads over a sequence") {
  const Sequence data = random_sequence(make_layer(16, 4, 2, 4), 70, 102, 0.25);
  Row row = make_row(data, {make_plan("fp32", 16)});
  std::vector<GdnHeadStability> heads(4);
  const std::vector<double> read_error = {0.0, 0.1, 0.1, 1e6};
  gdn_measure_stability(data.layer, row.inputs(70), 16, read_error, heads);
  for (int h = 0; h < 4; ++h) {
    CHECK(heads[h].windows == 4);  // whole windows only
    double growth = 0.0, solve = 0.0, least = std::numeric_limits<double>::infinity();
    int unstable = 0;
    for (int w = 0; w < 4; ++w) {
      GdnHeadRecords records;
      records.records = 16;
      records.key_dim = 16;
      records.k = data.k.data() + w * 16 * 32 + (h / 2) * 16;
      records.k_stride = 32;
      records.decay_log2 = data.g.data() + w * 16 * 4 + h;
      records.beta = data.beta.data() + w * 16 * 4 + h;
      records.decay_stride = records.beta_stride = 4;
      const GdnStability one = gdn_window_stability(records);
      const double factor = one.map_norm + read_error[h] * one.read_norm;
      growth += std::log2(factor) / 4;
      solve = std::max(solve, one.solve_norm);
      least = std::min(least, one.largest_read_error);
      unstable += factor >= 1.0;
    }
    CHECK(heads[h].mean_log2_growth == doctest::Approx(growth));
    CHECK(heads[h].max_solve_norm == solve);
    CHECK(heads[h].smallest_read_error == least);
    CHECK(heads[h].unstable_windows == unstable);
  }
  CHECK(heads[0].stable());
  CHECK(!heads[3].stable());
  CHECK(heads[3].unstable_windows == 4);
}

std::string refusal(auto call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no refusal";
}

TEST_CASE("gdn: wrong requests name place, value and expectation") {
  const Sequence data = random_sequence(make_layer(16, 4, 2, 4), 8, 103);
  Row row = make_row(data, {make_plan("fp32", 4)});
  const auto call = [&](GdnLayer layer, auto change) {
    StateRow state = row.state();
    GdnInputs in = row.inputs(8);
    change(state, in);
    gdn_advance(layer, {&state, 1}, {&in, 1}, AdvanceMode::commit, KernelForm::fast);
  };
  GdnLayer odd = data.layer;
  odd.value_heads = 3;
  const auto nothing = [](StateRow&, GdnInputs&) {};
  CHECK(refusal([&] { call(odd, nothing); }) ==
        "gdn: value_heads is 3, expected a positive multiple of key_heads 2");
  CHECK(refusal([&] { call(data.layer, [](StateRow&, GdnInputs& in) { in.u = nullptr; }); }) ==
        "gdn: row 0: u is null, expected an array");
  CHECK(refusal([&] { call(data.layer, [](StateRow&, GdnInputs& in) { in.tokens = -1; }); }) ==
        "gdn: row 0: tokens is -1, expected at least 0");
  auto fixed = std::make_shared<StateFormat>(*find_format("nvfp4"));
  fixed->descriptor.span = Span::fixed;
  HeadPlan unmeasured = make_plan("fp32", 4);
  unmeasured.recurrence.format = fixed;
  CHECK(refusal([&] {
          call(data.layer, [&](StateRow& state, GdnInputs&) { state.plans = {&unmeasured, 1}; });
        }).starts_with("nvfp4: no scale for layer 3, head 0"));
  CHECK(std::all_of(row.o.begin(), row.o.end(), [](float x) { return x == 0.0f; }));
  std::vector<GdnHeadStability> heads(3);
  const std::vector<double> errors(4);
  CHECK(refusal([&] { gdn_measure_stability(data.layer, row.inputs(8), 4, errors, heads); }) ==
        "gdn: 3 results and 4 read errors, expected 4 (value heads)");
  CHECK(refusal([] { gdn_window_stability({}); }) ==
        "gdn: a window of 0 records, expected at least 1");
}

}  // namespace
}  // namespace replayeval
