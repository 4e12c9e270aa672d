// What the records of a window do to a state's errors, and the adjoint form of the read-out
// (gdn.h); both FP64, from the equations.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/gdn.h"

namespace replayeval {
namespace {

using Vector = std::vector<double>;

constexpr double kSmallestGrowth = 0x1p-1000;  // keeps the mean of logarithms finite

Vector unit(const float* x, int dim, double scale) {
  double squares = 0.0;
  for (int n = 0; n < dim; ++n) squares += double{x[n]} * double{x[n]};
  Vector result(dim);
  for (int n = 0; n < dim; ++n) result[n] = x[n] * (scale / std::sqrt(squares + 1e-6));
  return result;
}

double dot(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
  return sum;
}

/// The records as FP64 vectors.
struct Window {
  std::vector<Vector> keys, decays;
  Vector betas;

  explicit Window(const GdnHeadRecords& records) {
    for (int j = 0; j < records.records; ++j) {
      keys.push_back(unit(records.k + j * records.k_stride, records.key_dim, 1.0));
      const float* g = records.decay_log2 + j * records.decay_stride;
      Vector decay(records.key_dim);
      for (int n = 0; n < records.key_dim; ++n) {
        decay[n] = std::exp2(double{g[records.channel_decay ? n : 0]});
      }
      decays.push_back(std::move(decay));
      betas.push_back(records.beta[j * records.beta_stride]);
    }
  }
  int size() const { return static_cast<int>(keys.size()); }

  void decay(int t, Vector* row) const {
    for (size_t n = 0; n < row->size(); ++n) (*row)[n] *= decays[t][n];
  }
  void project(int t, Vector* row) const {
    const double c = betas[t] * dot(*row, keys[t]);
    for (size_t n = 0; n < row->size(); ++n) (*row)[n] -= c * keys[t][n];
  }
  /// row P of the records first .. last - 1, and its transpose.
  void map(int first, int last, Vector* row) const {
    for (int t = first; t < last; ++t) {
      decay(t, row);
      project(t, row);
    }
  }
  void map_transposed(int first, int last, Vector* row) const {
    for (int t = last - 1; t >= first; --t) {
      project(t, row);
      decay(t, row);
    }
  }
  void carry(int first, int last, Vector* row) const {
    for (int t = first; t < last; ++t) decay(t, row);
  }
};

/// Largest singular value of a linear map by power iteration on map and transpose. The start is
/// fixed and has no zero entry.
template <class Map, class Transpose>
double spectral_norm(int dim, Map map, Transpose transpose) {
  constexpr int kSteps = 1000;
  constexpr double kTolerance = 1e-13;
  Vector x(dim);
  uint32_t word = 1;
  for (double& value : x) {
    word = word * 1664525u + 1013904223u;
    value = ((word >> 8) + 0.5) * 0x1p-24 - 0.5;
  }
  double norm = 0.0;
  for (int step = 0; step < kSteps; ++step) {
    const double length = std::sqrt(dot(x, x));
    if (!(length > 0.0)) return length;
    for (double& value : x) value /= length;
    map(&x);
    const double next = std::sqrt(dot(x, x));
    transpose(&x);
    const bool done = std::abs(next - norm) <= kTolerance * next;
    norm = next;
    if (done) break;
  }
  return norm;
}

/// Largest row sum of |(I + A)^-1|: row i of the inverse is e_i - sum_{j < i} A_ij row j.
double solve_norm(const Window& window) {
  const int n = window.size();
  std::vector<Vector> inverse;
  std::vector<Vector> decayed;  // keys carried to the current record
  double largest = 0.0;
  for (int i = 0; i < n; ++i) {
    for (Vector& key : decayed) window.decay(i, &key);
    Vector row(n);
    row[i] = 1.0;
    for (int j = 0; j < i; ++j) {
      const double a = window.betas[i] * dot(window.keys[i], decayed[j]);
      for (int m = 0; m <= j; ++m) row[m] -= a * inverse[j][m];
    }
    double sum = 0.0;
    for (double value : row) sum += std::abs(value);
    largest = std::max(largest, sum);
    inverse.push_back(std::move(row));
    decayed.push_back(window.keys[i]);
  }
  return largest;
}

}  // namespace

void gdn_adjoint_output(const GdnHeadRecords& records, const float* state, const float* q,
                        double* o) {
  if (records.channel_decay) {
    throw std::invalid_argument(
        "gdn: adjoint form with a decay a channel, expected one decay a head");
  }
  if (!records.v) throw std::invalid_argument("gdn: v is null, expected the records' values");
  const Window window(records);
  Vector t = unit(q, records.key_dim, 1.0 / std::sqrt(double(records.key_dim)));
  std::fill_n(o, records.value_dim, 0.0);
  for (int j = window.size() - 1; j >= 0; --j) {
    const double c = window.betas[j] * dot(window.keys[j], t);
    const float* v = records.v + j * records.v_stride;
    for (int p = 0; p < records.value_dim; ++p) o[p] += c * v[p];
    for (int n = 0; n < records.key_dim; ++n) {
      t[n] = window.decays[j][n] * (t[n] - c * window.keys[j][n]);
    }
  }
  for (int p = 0; p < records.value_dim; ++p) {
    for (int n = 0; n < records.key_dim; ++n) o[p] += state[p * records.key_dim + n] * t[n];
  }
}

GdnStability gdn_window_stability(const GdnHeadRecords& records) {
  if (records.records < 1) {
    throw std::invalid_argument("gdn: a window of " + std::to_string(records.records) +
                                " records, expected at least 1");
  }
  const Window window(records);
  const int last = window.size() - 1, dim = records.key_dim;
  GdnStability result;
  result.solve_norm = solve_norm(window);
  Vector carried(dim, 1.0);
  window.carry(0, window.size(), &carried);
  result.decay = *std::max_element(carried.begin(), carried.end());
  result.map_norm = spectral_norm(
      dim, [&](Vector* x) { window.map(0, window.size(), x); },
      [&](Vector* x) { window.map_transposed(0, window.size(), x); });
  result.read_norm = spectral_norm(
      dim,
      [&](Vector* x) {
        Vector decayed = *x;
        window.carry(0, last, &decayed);
        window.map(0, last, x);
        for (int n = 0; n < dim; ++n) (*x)[n] -= decayed[n];
        window.map(last, last + 1, x);
      },
      [&](Vector* x) {
        window.map_transposed(last, last + 1, x);
        Vector decayed = *x;
        window.carry(0, last, &decayed);
        window.map_transposed(0, last, x);
        for (int n = 0; n < dim; ++n) (*x)[n] -= decayed[n];
      });
  const double margin = 1.0 - result.map_norm;
  result.largest_read_error = result.read_norm > 0.0 ? margin / result.read_norm
                              : margin > 0.0         ? std::numeric_limits<double>::infinity()
                                                     : 0.0;
  return result;
}

void gdn_measure_stability(const GdnLayer& layer, const GdnInputs& inputs, int window,
                           std::span<const double> read_error, std::span<GdnHeadStability> heads) {
  const size_t expected = static_cast<size_t>(layer.value_heads);
  if (window < 1 || window > kMaxWindow) {
    throw std::invalid_argument("gdn: window " + std::to_string(window) + ", expected 1 to " +
                                std::to_string(kMaxWindow));
  }
  if (heads.size() != expected || read_error.size() != expected) {
    throw std::invalid_argument("gdn: " + std::to_string(heads.size()) + " results and " +
                                std::to_string(read_error.size()) + " read errors, expected " +
                                std::to_string(expected) + " (value heads)");
  }
  if (layer.key_heads < 1 || layer.value_heads % layer.key_heads != 0) {
    throw std::invalid_argument("gdn: value_heads is " + std::to_string(layer.value_heads) +
                                ", expected a positive multiple of key_heads " +
                                std::to_string(layer.key_heads));
  }
#pragma omp parallel for schedule(dynamic)
  for (int h = 0; h < layer.value_heads; ++h) {
    GdnHeadStability& head = heads[h];
    if (head.windows == 0) head.smallest_read_error = std::numeric_limits<double>::infinity();
    const int64_t key_head = h / (layer.value_heads / layer.key_heads);
    for (int64_t first = 0; first + window <= inputs.tokens; first += window) {
      GdnHeadRecords records;
      records.records = window;
      records.key_dim = layer.key_dim;
      records.value_dim = layer.value_dim;
      records.channel_decay = layer.channel_decay;
      records.k = inputs.k + first * inputs.k_stride + key_head * layer.key_dim;
      records.k_stride = inputs.k_stride;
      records.decay_log2 = inputs.decay_log2 + first * inputs.decay_stride +
                           (layer.channel_decay ? int64_t{h} * layer.key_dim : int64_t{h});
      records.decay_stride = inputs.decay_stride;
      records.beta = inputs.beta + first * inputs.beta_stride + h;
      records.beta_stride = inputs.beta_stride;
      const GdnStability one = gdn_window_stability(records);
      const double growth = one.map_norm + read_error[h] * one.read_norm;
      const double share = 1.0 / static_cast<double>(++head.windows);
      head.mean_solve_norm += (one.solve_norm - head.mean_solve_norm) * share;
      head.max_solve_norm = std::max(head.max_solve_norm, one.solve_norm);
      head.mean_decay += (one.decay - head.mean_decay) * share;
      head.max_map_norm = std::max(head.max_map_norm, one.map_norm);
      head.mean_log2_growth +=
          (std::log2(std::max(growth, kSmallestGrowth)) - head.mean_log2_growth) * share;
      head.smallest_read_error = std::min(head.smallest_read_error, one.largest_read_error);
      if (!(growth < 1.0)) ++head.unstable_windows;
    }
  }
}

}  // namespace replayeval
