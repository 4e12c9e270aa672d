// Gated DeltaNet and KDA by replay (gdn.h): the FP64 reference, token by token; the window form on
// FP32, parallel over rows and heads; and what a head's windows say about the stability of folding
// stored corrections.
#include "kernels/gdn.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/gdn_checks.h"
#include "kernels/gdn_simd.h"
#include "kernels/replay.h"

namespace replayeval {
namespace {

constexpr double kNormEpsilon = 1e-6;

float round_to(DotType type, float x) {
  float result = 0.0f;
  REPLAYEVAL_SIMD_CALL(gdn_round)(type, 1, &x, &result);
  return result;
}

float stored_correction(RecordType type, double u) {
  const float narrow = static_cast<float>(u);
  return type == RecordType::bf16 ? round_to(DotType::bf16, narrow) : narrow;
}

float used_beta(RecordType type, float beta) {
  return type == RecordType::bf16 ? round_to(DotType::bf16, beta) : beta;
}

StateShape state_shape(const GdnLayer& layer) { return {layer.value_dim, layer.key_dim}; }

/// Which records of a span take their correction from where. Records are counted from the span's
/// first.
struct SpanPlan {
  int new_first;     // first record of this call's queries
  int read_end;      // records new_first .. read_end - 1 are read from the carried state, with
                     // corrections of their own
  bool flush_token;  // the last record's step is the flush itself
  bool output_from_fold;

  SpanPlan(const ReplaySpan& span, const HeadPlan& plan)
      : new_first(span.first_query - span.first),
        flush_token(span.flush && span.queries() > 0),
        output_from_fold(flush_token && plan.flush_output == FlushOutput::recurrence) {
    read_end = output_from_fold ? span.records - 1 : span.records;
  }
  /// First record whose folded correction is computed from R: the stored ones of earlier records
  /// are folded as they are. A verify step's fold and an explicit flush have no flush token, so
  /// that `cached` folds stored corrections only.
  int fold_first(const ReplaySpan& span, const HeadPlan& plan) const {
    if (!span.flush) return span.records;
    if (plan.gdn_fold == GdnFold::rederive) return 0;
    return flush_token ? span.records - 1 : span.records;
  }
};

// ---------------------------------------------------------------- reference

std::vector<double> normalised(const float* x, int dim, double scale) {
  double squares = 0.0;
  for (int n = 0; n < dim; ++n) squares += double{x[n]} * double{x[n]};
  const double factor = scale / std::sqrt(squares + kNormEpsilon);
  std::vector<double> result(dim);
  for (int n = 0; n < dim; ++n) result[n] = x[n] * factor;
  return result;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
  return sum;
}

/// The state of one head in FP64, [value_dim, key_dim].
class Recurrence {
 public:
  Recurrence(int value_dim, int key_dim) : rows_(value_dim, std::vector<double>(key_dim)) {}
  void set(const float* state) {
    for (auto& row : rows_) {
      for (double& x : row) x = *state++;
    }
  }
  void get(float* state) const {
    for (const auto& row : rows_) {
      for (double x : row) *state++ = static_cast<float>(x);
    }
  }
  void round(DotType type) {
    for (auto& row : rows_) {
      for (double& x : row) x = round_to(type, static_cast<float>(x));
    }
  }
  void decay(const std::vector<double>& factor) {
    for (auto& row : rows_) {
      for (size_t n = 0; n < row.size(); ++n) row[n] *= factor[n];
    }
  }
  void add(const std::vector<double>& u, const std::vector<double>& k) {
    for (size_t p = 0; p < rows_.size(); ++p) {
      for (size_t n = 0; n < k.size(); ++n) rows_[p][n] += u[p] * k[n];
    }
  }
  std::vector<double> read(const std::vector<double>& k) const {
    std::vector<double> result;
    for (const auto& row : rows_) result.push_back(dot(row, k));
    return result;
  }

 private:
  std::vector<std::vector<double>> rows_;
};

/// One value head of one row, token by token in FP64.
class ReferenceWalk {
 public:
  void bind(const GdnLayer& layer, const StateRow& row, const GdnInputs& inputs,
            const HeadPlan& plan, int key_head, std::span<const int> heads) {
    layer_ = &layer;
    row_ = &row;
    inputs_ = &inputs;
    plan_ = &plan;
    key_head_ = key_head;
    head_ = heads.front();
    state_.bind(row, state_shape(layer), head_);
    folded_ = std::make_unique<Recurrence>(layer.value_dim, layer.key_dim);
  }

  void window(const ReplaySpan& span) {
    const SpanPlan order(span, *plan_);
    const int value_dim = layer_->value_dim;
    Recurrence carried = *folded_;
    if (!span.from_unencoded) carried.set(state_.read());
    if (span.queries() > 0) {
      for (int t = 0; t < order.new_first; ++t) {
        const Record record = read_record(span.first + t);
        carried.decay(record.decay);
        carried.add(record.stored_u, record.k);
      }
    }
    for (int t = order.new_first; t < order.read_end; ++t) {
      const Record record = read_record(span.first + t);
      const std::vector<double> q = query(span.first + t);
      carried.decay(record.decay);
      std::vector<double> u = correction(record, carried.read(record.k));
      const std::vector<double> carried_output = carried.read(q);
      const double own = dot(record.k, q);
      float* o = output(span.first + t);
      for (int p = 0; p < value_dim; ++p) {
        o[p] = static_cast<float>(carried_output[p] + own * u[p]);
        store_u(span.first + t)[p] = stored_correction(plan_->ring_u, u[p]);
      }
      carried.add(read_record(span.first + t).stored_u, record.k);
    }
    if (!span.flush) return;
    const int fold_first = order.fold_first(span, *plan_);
    folded_->set(state_.state());
    std::vector<double> last_u;
    if (plan_->dot == DotType::fp32) {
      for (int t = 0; t < span.records; ++t) {
        const Record record = read_record(span.first + t);
        folded_->decay(record.decay);
        last_u = t < fold_first ? record.stored_u : correction(record, folded_->read(record.k));
        folded_->add(last_u, record.k);
      }
    } else {
      last_u = fold_rounded(span, fold_first);
    }
    folded_->get(state_.state());
    if (order.output_from_fold) {
      const std::vector<double> o = folded_->read(query(span.end() - 1));
      for (int p = 0; p < value_dim; ++p) {
        output(span.end() - 1)[p] = static_cast<float>(o[p]);
        store_u(span.end() - 1)[p] = stored_correction(plan_->ring_u, last_u[p]);
      }
    }
  }

  float amax() { return state_.amax(); }
  void encode(const ReplaySpan& span, float span_amax) {
    const FlushKey key{layer_->layer, layer_->head_offset, row_->position + span.end() - 1};
    state_.flush(key, span_amax, false);
  }

 private:
  struct Record {
    std::vector<double> k, v, decay, stored_u;
    double beta = 0.0;
  };

  Record read_record(int64_t token) const {
    const GdnInputs& in = *inputs_;
    const int key_dim = layer_->key_dim, value_dim = layer_->value_dim;
    Record record;
    record.k = normalised(in.k + token * in.k_stride + int64_t{key_head_} * key_dim, key_dim, 1.0);
    const float* v = in.v + token * in.v_stride + int64_t{head_} * value_dim;
    record.v.assign(v, v + value_dim);
    const float* u = in.u + token * in.u_stride + int64_t{head_} * value_dim;
    record.stored_u.assign(u, u + value_dim);
    const float* g = in.decay_log2 + token * in.decay_stride +
                     (layer_->channel_decay ? int64_t{head_} * key_dim : int64_t{head_});
    for (int n = 0; n < key_dim; ++n) {
      record.decay.push_back(std::exp2(double{g[layer_->channel_decay ? n : 0]}));
    }
    record.beta = used_beta(plan_->beta, in.beta[token * in.beta_stride + head_]);
    return record;
  }
  std::vector<double> query(int64_t token) const {
    const int key_dim = layer_->key_dim;
    return normalised(inputs_->q + token * inputs_->q_stride + int64_t{key_head_} * key_dim,
                      key_dim, 1.0 / std::sqrt(double(key_dim)));
  }
  float* output(int64_t token) const {
    return inputs_->o + token * inputs_->o_stride + int64_t{head_} * layer_->value_dim;
  }
  float* store_u(int64_t token) const {
    return inputs_->u + token * inputs_->u_stride + int64_t{head_} * layer_->value_dim;
  }
  static std::vector<double> correction(const Record& record, std::vector<double> read) {
    for (size_t p = 0; p < read.size(); ++p) read[p] = record.beta * (record.v[p] - read[p]);
    return read;
  }
  std::vector<double> rounded(std::vector<double> x) const {
    for (double& value : x) value = round_to(plan_->dot, static_cast<float>(value));
    return x;
  }
  static std::vector<double> product(std::vector<double> a, const std::vector<double>& b) {
    for (size_t n = 0; n < a.size(); ++n) a[n] *= b[n];
    return a;
  }

  /// A flush whose products have rounded operands, in window form (a recurrence would round other
  /// numbers). GDN decays the corrections, KDA the keys; reads of R and key products are rounded
  /// alike. Returns the last correction.
  std::vector<double> fold_rounded(const ReplaySpan& span, int fold_first) {
    const int value_dim = layer_->value_dim, key_dim = layer_->key_dim;
    Recurrence operand = *folded_;
    operand.round(plan_->dot);
    std::vector<Record> records;
    std::vector<std::vector<double>> weights;  // [j][n], decays after record j
    std::vector<std::vector<double>> u;
    std::vector<double> carried(key_dim, 1.0);
    for (int t = 0; t < span.records; ++t) {
      records.push_back(read_record(span.first + t));
      const Record& record = records.back();
      carried = product(carried, record.decay);
      for (auto& weight : weights) weight = product(weight, record.decay);
      if (t < fold_first) {
        u.push_back(record.stored_u);
      } else if (layer_->channel_decay) {
        std::vector<double> read = operand.read(rounded(product(carried, record.k)));
        for (int j = 0; j < t; ++j) {
          const double key_dot = dot(rounded(product(weights[j], records[j].k)), rounded(record.k));
          for (int p = 0; p < value_dim; ++p) read[p] += key_dot * u[j][p];
        }
        u.push_back(correction(record, read));
      } else {
        std::vector<double> read = operand.read(rounded(record.k));
        for (double& x : read) x *= carried[0];
        for (int j = 0; j < t; ++j) {
          const double key_dot = weights[j][0] * dot(rounded(records[j].k), rounded(record.k));
          for (int p = 0; p < value_dim; ++p) read[p] += key_dot * u[j][p];
        }
        u.push_back(correction(record, read));
      }
      weights.emplace_back(key_dim, 1.0);
    }
    folded_->decay(carried);
    for (int j = 0; j < span.records; ++j) {
      if (layer_->channel_decay) {
        folded_->add(rounded(u[j]), rounded(product(weights[j], records[j].k)));
      } else {
        std::vector<double> decayed = u[j];
        for (double& x : decayed) x *= weights[j][0];
        folded_->add(rounded(decayed), rounded(records[j].k));
      }
    }
    return u.back();
  }

  const GdnLayer* layer_ = nullptr;
  const StateRow* row_ = nullptr;
  const GdnInputs* inputs_ = nullptr;
  const HeadPlan* plan_ = nullptr;
  int key_head_ = 0;
  int head_ = 0;
  HeadState state_;
  std::unique_ptr<Recurrence> folded_;  // S of the last flush, unencoded
};

// ---------------------------------------------------------------- window form

/// Aligned scratch that grows and is not cleared.
class Floats {
 public:
  float* need(int64_t count) {
    if (count > capacity_) {
      data_.reset(static_cast<float*>(::operator new(count * sizeof(float), kAlign)));
      capacity_ = count;
    }
    return data_.get();
  }
  float* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

/// Scratch of one window, reused by all walks of a thread.
struct WindowScratch {
  Floats keys, queries, keys_by_channel, key_dots, query_dots;
  Floats rounded_keys, rounded_keys_by_channel, rounded_key_dots, rounded_state;
  Floats exponents, carried, weights, key_weights, query_weights, g, beta;
  Floats channel_step, carried_k, carried_q, decayed_keys;
  Floats v, u, fold_u, decayed_u, fold_weights, read_k, read_q, o;
};

/// The value heads of one key head of one row that share a plan. Key-head work (normalisation, key
/// and query products) is done once for them.
class FastWalk {
 public:
  void bind(const GdnLayer& layer, const StateRow& row, const GdnInputs& inputs,
            const HeadPlan& plan, int key_head, std::span<const int> heads) {
    layer_ = &layer;
    row_ = &row;
    inputs_ = &inputs;
    plan_ = &plan;
    key_head_ = key_head;
    if (heads_.size() < heads.size()) heads_.resize(heads.size());
    active_ = static_cast<int>(heads.size());
    key_dim_ = layer.key_dim;
    value_dim_ = layer.value_dim;
    key_stride_ = padded_to_lanes(key_dim_);
    value_stride_ = padded_to_lanes(value_dim_);
    for (int i = 0; i < active_; ++i) {
      heads_[i].index = heads[i];
      heads_[i].state.bind(row, state_shape(layer), heads[i]);
      heads_[i].have_recurrence = heads_[i].have_read = false;
    }
  }

  void window(const ReplaySpan& span) {
    static thread_local WindowScratch scratch;
    scratch_ = &scratch;
    order_ = std::make_unique<SpanPlan>(span, *plan_);
    prepare_keys(span);
    for (int i = 0; i < active_; ++i) {
      if (i + 1 < active_) {
        prefetch_checkpoint(*row_, state_shape(*layer_), heads_[i + 1].index, span.flush);
      }
      head_window(span, heads_[i]);
    }
  }

  float amax() {
    float largest = 0.0f;
    for (int i = 0; i < active_; ++i) largest = std::max(largest, heads_[i].state.amax());
    return largest;
  }

  void encode(const ReplaySpan& span, float span_amax) {
    const FlushKey key{layer_->layer, layer_->head_offset, row_->position + span.end() - 1};
    for (int i = 0; i < active_; ++i) {
      heads_[i].state.flush(key, span_amax, heads_[i].finite);
      // The transposed copy stays S itself, which is decode(R) only for a plain FP32 checkpoint.
      if (!is_plain_fp32(*plan_->recurrence.format)) heads_[i].have_recurrence = false;
      heads_[i].have_read = false;
    }
  }

 private:
  struct Head {
    int index = 0;
    HeadState state;
    Floats recurrence,
        read;  // [key_dim, value_stride]; read is unused while the checkpoint is shared
    bool have_recurrence = false, have_read = false;
    bool finite = false;  // every element of the folded state
  };

  bool shared() const { return !plan_->read.has_value(); }
  int vectors() const { return value_stride_ / kGdnLanes; }

  float* recurrence_state(Head& head) {
    float* state = head.recurrence.need(int64_t{key_dim_} * value_stride_);
    if (!head.have_recurrence) {
      REPLAYEVAL_SIMD_CALL(gdn_transpose)
      (value_dim_, key_dim_, head.state.state(), key_dim_, state, value_stride_);
      head.have_recurrence = true;
    }
    return state;
  }
  const float* read_state(Head& head) {
    if (shared()) return recurrence_state(head);
    float* state = head.read.need(int64_t{key_dim_} * value_stride_);
    if (!head.have_read) {
      REPLAYEVAL_SIMD_CALL(gdn_transpose)
      (value_dim_, key_dim_, head.state.read(), key_dim_, state, value_stride_);
      head.have_read = true;
    }
    return state;
  }

  /// Corrections computed from the same matrix that the flush starts from, in this call or (as the
  /// row says) in earlier ones, are those a rederivation would compute, operation by operation; it
  /// is spared when all of a window's are.
  int fold_first(const ReplaySpan& span) const {
    const bool same = plan_->gdn_fold == GdnFold::rederive && shared() && span.flush &&
                      (order_->new_first == 0 || row_->corrections_hold) && order_->flush_token &&
                      plan_->ring_u == RecordType::fp32 && plan_->dot == DotType::fp32;
    return same ? order_->read_end : order_->fold_first(span, *plan_);
  }
  /// First row of the weights that the span needs: those of its queries, of rederived records, and
  /// of the fold.
  int first_row(const ReplaySpan& span) const {
    int first = std::min(order_->new_first, fold_first(span));
    return span.flush ? std::min(first, span.records - 1) : first;
  }

  void prepare_keys(const ReplaySpan& span) {
    const int n = span.records;
    weight_stride_ = padded_to_lanes(n);
    WindowScratch& s = *scratch_;
    float* keys = s.keys.need(int64_t{n} * key_stride_);
    float* queries = s.queries.need(int64_t{n} * key_stride_);
    REPLAYEVAL_SIMD_CALL(gdn_normalise)
    (n, key_dim_, 1.0f, inputs_->k + span.first * inputs_->k_stride + int64_t{key_head_} * key_dim_,
     inputs_->k_stride, keys, key_stride_);
    if (span.queries() > 0) {
      REPLAYEVAL_SIMD_CALL(gdn_normalise)
      (span.queries(), key_dim_, static_cast<float>(1.0 / std::sqrt(double(key_dim_))),
       inputs_->q + span.first_query * inputs_->q_stride + int64_t{key_head_} * key_dim_,
       inputs_->q_stride, queries + order_->new_first * key_stride_, key_stride_);
    }
    if (layer_->channel_decay) return;
    float* by_channel = s.keys_by_channel.need(int64_t{key_dim_} * weight_stride_);
    REPLAYEVAL_SIMD_CALL(gdn_transpose)
    (n, key_dim_, keys, key_stride_, by_channel, weight_stride_);
    const int first = first_row(span);
    products(n, first, keys, by_channel, s.key_dots.need(int64_t{n} * weight_stride_));
    products(n, order_->new_first, queries, by_channel,
             s.query_dots.need(int64_t{n} * weight_stride_));
    if (span.flush && plan_->dot != DotType::fp32) {
      float* rounded = s.rounded_keys.need(int64_t{n} * key_stride_);
      REPLAYEVAL_SIMD_CALL(gdn_round)(plan_->dot, int64_t{n} * key_stride_, keys, rounded);
      float* rounded_by_channel =
          s.rounded_keys_by_channel.need(int64_t{key_dim_} * weight_stride_);
      REPLAYEVAL_SIMD_CALL(gdn_transpose)
      (n, key_dim_, rounded, key_stride_, rounded_by_channel, weight_stride_);
      products(n, first, rounded, rounded_by_channel,
               s.rounded_key_dots.need(int64_t{n} * weight_stride_));
    }
  }

  /// dots[t][j] = rows[t] . keys[j] for t >= first.
  void products(int n, int first, const float* rows, const float* by_channel, float* dots) const {
    REPLAYEVAL_SIMD_CALL(gdn_multiply)
    (n - first, key_dim_, weight_stride_ / kGdnLanes, rows + first * key_stride_, key_stride_,
     by_channel, weight_stride_, nullptr, 0, dots + first * weight_stride_, weight_stride_);
  }

  /// One token needs its state once: the checkpoint is read as it lies, unless a transposed copy of
  /// it is there already.
  bool reads_in_place(int reads, bool have_copy) const {
    return reads <= 1 && !have_copy && !layer_->channel_decay;
  }

  /// Decays and weights of one head. In a flush with rounded operands they are computed again from
  /// those.
  void decays(const ReplaySpan& span, int head, int first, int first_query, DotType dot) {
    WindowScratch& s = *scratch_;
    const int n = span.records;
    float* key_weights = s.key_weights.need(int64_t{n} * weight_stride_);
    float* query_weights = s.query_weights.need(int64_t{n} * weight_stride_);
    if (layer_->channel_decay) {
      GdnChannelDecay window;
      window.first = first;
      window.first_query = first_query;
      window.records = n;
      window.key_dim = key_dim_;
      window.weight_stride = weight_stride_;
      window.key_stride = key_stride_;
      window.g =
          inputs_->decay_log2 + span.first * inputs_->decay_stride + int64_t{head} * key_dim_;
      window.g_stride = inputs_->decay_stride;
      window.k = s.keys.get();
      window.q = s.queries.get();
      window.dot = dot;
      window.step = s.channel_step.need(key_stride_);
      window.carried = s.carried.need(key_stride_);
      window.decayed_keys = s.decayed_keys.need(int64_t{key_dim_} * weight_stride_);
      window.carried_k = s.carried_k.need(int64_t{n} * key_stride_);
      window.carried_q = s.carried_q.need(int64_t{n} * key_stride_);
      window.key_weights = key_weights;
      window.query_weights = query_weights;
      REPLAYEVAL_SIMD_CALL(gdn_channel_decay)(window);
      return;
    }
    float* g = s.g.need(n);
    for (int t = 0; t < n; ++t) {
      g[t] = inputs_->decay_log2[(span.first + t) * inputs_->decay_stride + head];
    }
    GdnScalarDecay window;
    window.first = first;
    window.first_query = first_query;
    window.records = n;
    window.weight_stride = weight_stride_;
    window.g = g;
    window.key_dots = (dot == DotType::fp32 ? s.key_dots : s.rounded_key_dots).get();
    window.query_dots = s.query_dots.get();
    window.exponents = s.exponents.need(2 * weight_stride_);
    window.carried = s.carried.need(weight_stride_);
    window.weights = s.weights.need(int64_t{n} * weight_stride_);
    window.key_weights = key_weights;
    window.query_weights = query_weights;
    REPLAYEVAL_SIMD_CALL(gdn_scalar_decay)(window);
  }

  /// read[t] = S k_t (KDA: of the decayed key) for the rows first .. last - 1.
  void carried_read(const float* keys, const float* state, int first, int last, float* read) const {
    if (last <= first) return;
    REPLAYEVAL_SIMD_CALL(gdn_multiply)
    (last - first, key_dim_, vectors(), keys + first * key_stride_, key_stride_, state,
     value_stride_, nullptr, 0, read + first * value_stride_, value_stride_);
  }

  void head_window(const ReplaySpan& span, Head& head) {
    WindowScratch& s = *scratch_;
    const GdnInputs& in = *inputs_;
    const int n = span.records, new_first = order_->new_first, read_end = order_->read_end;
    const bool channel = layer_->channel_decay;
    const int64_t head_at = int64_t{head.index} * value_dim_;
    const int64_t values = int64_t{n} * value_stride_;

    float* beta = s.beta.need(n);
    float* v = s.v.need(values);
    float* u = s.u.need(values);
    const int solved = std::min(new_first, fold_first(span));  // first record with a new correction
    for (int t = 0; t < n; ++t) {
      const int64_t token = span.first + t;
      if (t >= solved) {
        beta[t] = used_beta(plan_->beta, in.beta[token * in.beta_stride + head.index]);
        load_values(in.v + token * in.v_stride + head_at, v + t * value_stride_);
      }
      if (t < new_first) load_values(in.u + token * in.u_stride + head_at, u + t * value_stride_);
    }
    decays(span, head.index, first_row(span), new_first, DotType::fp32);

    GdnCorrection solve;
    solve.value_stride = value_stride_;
    solve.weight_stride = weight_stride_;
    solve.key_weights = s.key_weights.get();
    solve.carried = channel ? nullptr : s.carried.get();
    solve.beta = beta;
    solve.v = v;
    solve.read_k = s.read_k.need(values);
    solve.read_q = s.read_q.need(values);
    solve.o = s.o.need(values);
    if (read_end > new_first) {
      if (!span.from_unencoded &&
          reads_in_place(read_end - new_first, shared() ? head.have_recurrence : head.have_read)) {
        const float* const x[2] = {s.keys.get() + new_first * key_stride_,
                                   s.queries.get() + new_first * key_stride_};
        float* const out[2] = {s.read_k.get() + new_first * value_stride_,
                               s.read_q.get() + new_first * value_stride_};
        REPLAYEVAL_SIMD_CALL(gdn_read)(value_dim_, key_dim_, head.state.read(), 2, x, out);
      } else {
        const float* state = span.from_unencoded ? head.recurrence.get() : read_state(head);
        carried_read(channel ? s.carried_k.get() : s.keys.get(), state, new_first, read_end,
                     s.read_k.get());
        carried_read(channel ? s.carried_q.get() : s.queries.get(), state, new_first, read_end,
                     s.read_q.get());
      }
      solve.first = new_first;
      solve.last = read_end;
      solve.query_weights = s.query_weights.get();
      solve.u = u;
      solve.round_u = plan_->ring_u == RecordType::bf16;
      REPLAYEVAL_SIMD_CALL(gdn_correct)(solve);
      for (int t = new_first; t < read_end; ++t) {
        const int64_t token = span.first + t;
        store_values(s.o.get() + t * value_stride_, in.o + token * in.o_stride + head_at);
        store_values(u + t * value_stride_, in.u + token * in.u_stride + head_at);
      }
    }
    if (span.flush) fold(span, head, solve);
  }

  void fold(const ReplaySpan& span, Head& head, GdnCorrection solve) {
    WindowScratch& s = *scratch_;
    const int n = span.records, first = fold_first(span);
    const bool channel = layer_->channel_decay, rounded = plan_->dot != DotType::fp32;
    const int64_t values = int64_t{n} * value_stride_;
    // (What reads the folded state before it is encoded reads the transposed copy.)
    const bool in_place =
        !rounded && span.queries() > 0 && reads_in_place(n - first, head.have_recurrence);
    float* state = in_place ? head.state.state() : recurrence_state(head);
    if (rounded) decays(span, head.index, first_row(span), n, plan_->dot);

    float* u = s.fold_u.need(values);
    std::copy_n(s.u.get(), first * value_stride_, u);
    if (first < n) {
      const float* operand = state;
      if (rounded) {
        const int64_t count = int64_t{key_dim_} * value_stride_;
        REPLAYEVAL_SIMD_CALL(gdn_round)(plan_->dot, count, state, s.rounded_state.need(count));
        operand = s.rounded_state.get();
      }
      const float* keys = channel ? s.carried_k.get() : (rounded ? s.rounded_keys : s.keys).get();
      if (in_place) {
        const float* const x = keys + first * key_stride_;
        float* const out = s.read_k.get() + first * value_stride_;
        REPLAYEVAL_SIMD_CALL(gdn_read)(value_dim_, key_dim_, operand, 1, &x, &out);
      } else {
        carried_read(keys, operand, first, n, s.read_k.get());
      }
      solve.first = first;
      solve.last = n;
      solve.query_weights = nullptr;
      solve.u = u;
      solve.round_u = false;
      REPLAYEVAL_SIMD_CALL(gdn_correct)(solve);
    }

    // S = carried S + sum_j (decayed u_j) k_j^T, or u_j (decayed k_j)^T with a decay a channel.
    const float* keys = (rounded ? s.rounded_keys_by_channel : s.keys_by_channel).get();
    const float* corrections = u;
    if (channel) {
      keys = s.decayed_keys.get();
      if (rounded) {
        const int64_t count = int64_t{key_dim_} * weight_stride_;
        REPLAYEVAL_SIMD_CALL(gdn_round)(plan_->dot, count, keys, s.decayed_keys.get());
        corrections = s.decayed_u.need(values);
        REPLAYEVAL_SIMD_CALL(gdn_round)(plan_->dot, values, u, s.decayed_u.get());
      }
    } else {
      float* decayed = s.decayed_u.need(values);
      const float* weights = s.weights.get() + (n - 1) * int64_t{weight_stride_};
      for (int j = 0; j < n; ++j) {
        for (int p = 0; p < value_stride_; ++p) {
          decayed[j * value_stride_ + p] = weights[j] * u[j * value_stride_ + p];
        }
      }
      if (rounded) REPLAYEVAL_SIMD_CALL(gdn_round)(plan_->dot, values, decayed, decayed);
      corrections = decayed;
    }
    const float* carried = channel ? s.carried.get() : s.carried.get() + (n - 1);
    if (in_place) {
      head.finite = REPLAYEVAL_SIMD_CALL(gdn_fold)(value_dim_, key_dim_, n, *carried, corrections,
                                                   value_stride_, s.keys.get(), key_stride_, state);
    } else {
      REPLAYEVAL_SIMD_CALL(gdn_multiply)
      (key_dim_, n, vectors(), keys, weight_stride_, corrections, value_stride_, carried,
       channel ? 1 : 0, state, value_stride_);
      head.finite = REPLAYEVAL_SIMD_CALL(gdn_transpose)(key_dim_, value_dim_, state, value_stride_,
                                                        head.state.state(), key_dim_);
    }

    if (order_->output_from_fold) {
      const int64_t token = span.end() - 1, head_at = int64_t{head.index} * value_dim_;
      if (in_place) {
        const float* const x = s.queries.get() + (n - 1) * key_stride_;
        float* const out = s.o.get() + (n - 1) * value_stride_;
        REPLAYEVAL_SIMD_CALL(gdn_read)(value_dim_, key_dim_, state, 1, &x, &out);
      } else {
        carried_read(s.queries.get(), state, n - 1, n, s.o.get());
      }
      store_values(s.o.get() + (n - 1) * value_stride_,
                   inputs_->o + token * inputs_->o_stride + head_at);
      float* stored = inputs_->u + token * inputs_->u_stride + head_at;
      for (int p = 0; p < value_dim_; ++p) {
        stored[p] = stored_correction(plan_->ring_u, u[(n - 1) * value_stride_ + p]);
      }
    }
  }

  void load_values(const float* from, float* to) const {
    std::copy_n(from, value_dim_, to);
    std::fill(to + value_dim_, to + value_stride_, 0.0f);
  }
  void store_values(const float* from, float* to) const { std::copy_n(from, value_dim_, to); }

  const GdnLayer* layer_ = nullptr;
  const StateRow* row_ = nullptr;
  const GdnInputs* inputs_ = nullptr;
  const HeadPlan* plan_ = nullptr;
  int key_head_ = 0;
  int key_dim_ = 0, value_dim_ = 0, key_stride_ = 0, value_stride_ = 0, weight_stride_ = 0;
  int active_ = 0;
  std::vector<Head> heads_;
  std::unique_ptr<SpanPlan> order_;
  WindowScratch* scratch_ = nullptr;
};

// ---------------------------------------------------------------- driver

/// Heads of one row that are walked together.
struct Group {
  int row = 0;
  int plan = 0;
  int key_head = 0;
  std::vector<int> heads;
};

/// The value heads of every key head, by plan; `single` makes a group of every head.
std::vector<Group> make_groups(const GdnLayer& layer, std::span<const StateRow> rows, bool single) {
  std::vector<Group> groups;
  const int sharing = layer.value_heads / layer.key_heads;
  for (int r = 0; r < static_cast<int>(rows.size()); ++r) {
    for (int key_head = 0; key_head < layer.key_heads; ++key_head) {
      const size_t before = groups.size();
      for (int i = 0; i < sharing; ++i) {
        const int head = key_head * sharing + i;
        const int plan = plan_index(rows[r], head);
        size_t at = before;
        while (at < groups.size() && (single || groups[at].plan != plan)) ++at;
        if (at == groups.size()) groups.push_back({r, plan, key_head, {}});
        groups[at].heads.push_back(head);
      }
    }
  }
  return groups;
}

/// Asks for the records of a group's span and for the checkpoint of its first head.
void ask_for(const GdnLayer& layer, const StateRow& row, const GdnInputs& in, const Group& group,
             const ReplaySpan& span) {
  prefetch_checkpoint(row, state_shape(layer), group.heads.front(), span.flush);
  const int64_t values = static_cast<int64_t>(group.heads.size()) * layer.value_dim;
  const int64_t first = int64_t{group.heads.front()} * layer.value_dim;
  for (int64_t t = span.first; t < span.end(); ++t) {
    prefetch_floats(in.k + t * in.k_stride + int64_t{group.key_head} * layer.key_dim,
                    layer.key_dim);
    prefetch_floats(in.u + t * in.u_stride + first, values);
    if (span.flush) prefetch_floats(in.v + t * in.v_stride + first, values);
  }
}

/// Carries the first exception of a parallel loop (a codec library may fail) to its caller.
class FirstError {
 public:
  template <class Body>
  void guard(Body&& body) {
    try {
      body();
    } catch (...) {
#pragma omp critical(gdn_first_error)
      if (!error_) error_ = std::current_exception();
    }
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

/// spans[row][plan]
using Spans = std::vector<std::vector<std::vector<ReplaySpan>>>;

template <class Walk>
void run(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs,
         const Spans& spans, bool single) {
  const std::vector<Group> groups = make_groups(layer, rows, single);
  std::vector<int> independent, joint;
  for (int i = 0; i < static_cast<int>(groups.size()); ++i) {
    const Group& group = groups[i];
    if (spans[group.row][group.plan].empty()) continue;
    (spans_layer(rows[group.row].plans[group.plan]) ? joint : independent).push_back(i);
  }
  const auto bind = [&](const Group& group, Walk& walk) {
    walk.bind(layer, rows[group.row], inputs[group.row], rows[group.row].plans[group.plan],
              group.key_head, group.heads);
  };
  // Groups that flush take longest and go first.
  std::stable_partition(independent.begin(), independent.end(),
                        [&](int i) { return spans[groups[i].row][groups[i].plan].front().flush; });
  FirstError error;
  std::atomic<size_t> taken = 0;
#pragma omp parallel if (independent.size() > 1)
  {
    static thread_local Walk walk;  // keeps its buffers
    // A group is taken while the one before it is worked on: its data can be asked for.
    size_t item = taken++;
    while (item < independent.size()) {
      const size_t next = taken++;
      const Group* upcoming = next < independent.size() ? &groups[independent[next]] : nullptr;
      error.guard([&] {
        if (upcoming != nullptr) {
          const ReplaySpan& first = spans[upcoming->row][upcoming->plan].front();
          ask_for(layer, rows[upcoming->row], inputs[upcoming->row], *upcoming, first);
        }
        const Group& group = groups[independent[item]];
        bind(group, walk);
        for (const ReplaySpan& span : spans[group.row][group.plan]) {
          walk.window(span);
          if (span.flush) walk.encode(span, 0.0f);
        }
      });
      item = next;
    }
  }
  error.rethrow();
  // A scale over the layer needs every head's folded state before the first is encoded: the groups
  // of a row that share a plan go window by window, in two passes.
  for (size_t begin = 0; begin < joint.size();) {
    const Group& leader = groups[joint[begin]];
    std::vector<int> members;
    for (size_t i = begin; i < joint.size(); ++i) {
      const Group& group = groups[joint[i]];
      if (group.row == leader.row && group.plan == leader.plan) members.push_back(joint[i]);
    }
    std::vector<Walk> walks(members.size());
    for (size_t i = 0; i < members.size(); ++i) bind(groups[members[i]], walks[i]);
    for (const ReplaySpan& span : spans[leader.row][leader.plan]) {
      float amax = 0.0f;
#pragma omp parallel for schedule(dynamic) reduction(max : amax)
      for (size_t i = 0; i < walks.size(); ++i) {
        error.guard([&] {
          walks[i].window(span);
          if (span.flush) amax = std::max(amax, walks[i].amax());
        });
      }
      error.rethrow();
      if (!span.flush) continue;
#pragma omp parallel for schedule(dynamic)
      for (size_t i = 0; i < walks.size(); ++i) {
        error.guard([&] { walks[i].encode(span, amax); });
      }
      error.rethrow();
    }
    const int row = leader.row, plan = leader.plan;
    std::erase_if(joint, [&](int i) { return groups[i].row == row && groups[i].plan == plan; });
  }
}

/// A scale given in advance must be there for every head that uses it.
void check_scales(const GdnLayer& layer, std::span<const StateRow> rows) {
  for (const StateRow& row : rows) {
    for (int h = 0; h < layer.value_heads; ++h) {
      const HeadPlan& plan = row.plans[plan_index(row, h)];
      check_fixed_scales(*plan.recurrence.format, layer.layer, layer.head_offset + h, 1);
      if (plan.read) check_fixed_scales(*plan.read->format, layer.layer, layer.head_offset + h, 1);
    }
  }
}

void walk_rows(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs,
               const Spans& spans, KernelForm form) {
  if (form == KernelForm::reference) {
    run<ReferenceWalk>(layer, rows, inputs, spans, true);
  } else {
    const bool single = rows.size() * layer.key_heads < static_cast<size_t>(omp_get_max_threads());
    run<FastWalk>(layer, rows, inputs, spans, single);
  }
}

}  // namespace

void check_gdn_layer(const GdnLayer& layer) {
  if (layer.key_heads < 1 || layer.value_heads < 1 || layer.value_heads % layer.key_heads != 0) {
    throw std::invalid_argument("gdn: value_heads is " + std::to_string(layer.value_heads) +
                                ", expected a positive multiple of key_heads " +
                                std::to_string(layer.key_heads));
  }
  if (layer.key_dim < 1 || layer.value_dim < 1) {
    throw std::invalid_argument("gdn: key_dim, value_dim are " + std::to_string(layer.key_dim) +
                                ", " + std::to_string(layer.value_dim) + ", expected at least 1");
  }
}

void check_gdn_inputs(std::span<const GdnInputs> inputs, bool queries) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const GdnInputs& in = inputs[i];
    const auto place = [i] { return "gdn: row " + std::to_string(i) + ": "; };
    if (queries && in.tokens < 0) {
      throw std::invalid_argument(place() + "tokens is " + std::to_string(in.tokens) +
                                  ", expected at least 0");
    }
    if (queries && in.tokens == 0) continue;
    const std::pair<const char*, const void*> needed[] = {{"k", in.k},
                                                          {"v", in.v},
                                                          {"decay_log2", in.decay_log2},
                                                          {"beta", in.beta},
                                                          {"u", in.u},
                                                          {"q", queries ? in.q : in.k},
                                                          {"o", queries ? in.o : in.u}};
    for (const auto& [name, pointer] : needed) {
      if (!pointer) throw std::invalid_argument(place() + name + " is null, expected an array");
    }
  }
}

void gdn_advance(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs,
                 AdvanceMode mode, KernelForm form) {
  check_gdn_layer(layer);
  check_rows("gdn", rows, inputs.size(), layer.value_heads, state_shape(layer));
  check_scales(layer, rows);
  check_gdn_inputs(inputs, true);
  Spans spans(rows.size());
  std::vector<std::vector<int>> pending_after(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const StateRow& row = rows[r];
    pending_after[r].resize(row.plans.size());
    for (size_t p = 0; p < row.plans.size(); ++p) {
      spans[r].push_back(replay_spans(row.pending[p], row.plans[p].window, inputs[r].tokens, mode,
                                      row.plans[p].flush_output, &pending_after[r][p]));
    }
  }
  walk_rows(layer, rows, inputs, spans, form);
  for (size_t r = 0; r < rows.size(); ++r) {
    std::copy(pending_after[r].begin(), pending_after[r].end(), rows[r].pending);
  }
}

void gdn_flush(const GdnLayer& layer, std::span<StateRow> rows, std::span<const GdnInputs> inputs,
               KernelForm form) {
  check_gdn_layer(layer);
  check_rows("gdn", rows, inputs.size(), layer.value_heads, state_shape(layer));
  check_scales(layer, rows);
  Spans spans(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    bool any = false;
    for (size_t p = 0; p < rows[r].plans.size(); ++p) {
      spans[r].push_back(flush_spans(rows[r].pending[p]));
      any = any || !spans[r].back().empty();
    }
    if (any) check_gdn_inputs(inputs.subspan(r, 1), false);
  }
  walk_rows(layer, rows, inputs, spans, form);
  for (StateRow& row : rows) std::fill_n(row.pending, row.plans.size(), 0);
}

}  // namespace replayeval
