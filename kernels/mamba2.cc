// Mamba-2 replay on the host (kernels/mamba2.h): checks, the walk over rows, heads and spans, and
// the FP64 reference. The window form itself is in mamba2_simd.cc.
#include "kernels/mamba2.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/mamba2_checks.h"
#include "kernels/mamba2_simd.h"
#include "kernels/replay.h"

namespace replayeval {
namespace {

/// Spans of each plan of one row.
using RowSpans = std::vector<std::vector<ReplaySpan>>;

/// What one thread needs to walk a head. Buffers grow and are kept.
struct Walker {
  HeadState head;
  AlignedVector<float> scratch;
  AlignedVector<float> gram;           // of all spans of a plan and group: [queries, gram_stride]
  std::vector<double> state, carried;  // reference
};

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/// The first exception of a parallel region, thrown again behind it.
class RegionErrors {
 public:
  template <class Work>
  void run(Work&& work) {
    try {
      work();
    } catch (...) {
#pragma omp critical(replayeval_region_errors)
      if (!first_) first_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

/// Heads first .. end - 1 of one group and row; end 0: none.
struct HeadRange {
  int row = 0;
  int group = 0;
  int first = 0;
  int end = 0;
};

class Mamba2Walk {
 public:
  Mamba2Walk(const Mamba2Layer& layer, std::span<StateRow> rows,
             std::span<const Mamba2Inputs> inputs, std::vector<RowSpans> spans, KernelForm form)
      : layer_(layer),
        rows_(rows),
        inputs_(inputs),
        spans_(std::move(spans)),
        form_(form),
        shape_{layer.head_dim, layer.state_dim} {}

  void run() {
    const int heads_per_group = layer_.heads / layer_.groups;
    const int row_count = static_cast<int>(rows_.size());
    // One item is a row and some heads of a group, which share its products B . C; as many heads as
    // still leave eight items a thread.
    int block = heads_per_group;
    const auto items_of = [&](int size) {
      return int64_t{row_count} * layer_.groups * ((heads_per_group + size - 1) / size);
    };
    while (block > 1 && items_of(block) < int64_t{8} * omp_get_max_threads()) {
      block = (block + 1) / 2;
    }
    const int blocks = (heads_per_group + block - 1) / block;
    const int64_t per_row = int64_t{layer_.groups} * blocks;
    const std::vector<int> order = rows_with_work();
    const int64_t items = static_cast<int64_t>(order.size()) * per_row;
    const auto heads_of = [&](int64_t item) {
      const int group = static_cast<int>(item / blocks % layer_.groups);
      const int first = group * heads_per_group + static_cast<int>(item % blocks) * block;
      return HeadRange{order[static_cast<size_t>(item / per_row)], group, first,
                       std::min(first + block, (group + 1) * heads_per_group)};
    };
    std::atomic<int64_t> taken = 0;
    RegionErrors errors;
#pragma omp parallel if (items > 1)
    {
      static thread_local Walker walker;
      // An item is taken while the one before it is worked on: its data can be asked for.
      int64_t item = taken++;
      while (item < items) {
        const int64_t next = taken++;
        const HeadRange upcoming = next < items ? heads_of(next) : HeadRange{};
        errors.run([&] { walk_heads(walker, heads_of(item), upcoming); });
        item = next;
      }
    }
    errors.rethrow();
    for (int row = 0; row < row_count; ++row) {
      for (int plan = 0; plan < static_cast<int>(rows_[row].plans.size()); ++plan) {
        if (spans_layer(rows_[row].plans[plan])) walk_in_lockstep(row, plan);
      }
    }
  }

 private:
  const std::vector<ReplaySpan>& spans(int row, int plan) const { return spans_[row][plan]; }

  FlushKey flush_key(int row, const ReplaySpan& span) const {
    return {layer_.layer, layer_.head_offset, rows_[row].position + span.end() - 1};
  }

  /// Rows with spans, those that flush first: they take longest.
  std::vector<int> rows_with_work() const {
    std::vector<int> order, others;
    for (int row = 0; row < static_cast<int>(rows_.size()); ++row) {
      bool work = false, flush = false;
      for (const std::vector<ReplaySpan>& plan_spans : spans_[static_cast<size_t>(row)]) {
        work = work || !plan_spans.empty();
        flush = flush || (!plan_spans.empty() && plan_spans.front().flush);
      }
      if (work) (flush ? order : others).push_back(row);
    }
    order.insert(order.end(), others.begin(), others.end());
    return order;
  }

  /// Asks for what the first head of `range` reads, and for the records of all of them.
  void ask_for(const HeadRange& range) const {
    if (range.end == 0 || form_ == KernelForm::reference) return;
    const Mamba2Inputs& in = inputs_[range.row];
    const int plan = plan_index(rows_[range.row], range.first);
    const std::vector<ReplaySpan>& plan_spans = spans(range.row, plan);
    if (plan_spans.empty()) return;
    prefetch_checkpoint(rows_[range.row], shape_, range.first, plan_spans.front().flush);
    const ReplaySpan& span = plan_spans.front();
    const int64_t width = int64_t{range.end - range.first} * layer_.head_dim;
    for (int t = span.first; t < span.end(); ++t) {
      prefetch_floats(in.x + t * in.x_stride + int64_t{range.first} * layer_.head_dim, width);
      prefetch_floats(in.b + t * in.b_stride + int64_t{range.group} * layer_.state_dim,
                      layer_.state_dim);
    }
  }

  void walk_heads(Walker& walker, const HeadRange& range, const HeadRange& upcoming) {
    const auto [row, group, first, end] = range;
    for (int plan = 0; plan < static_cast<int>(rows_[row].plans.size()); ++plan) {
      const std::vector<ReplaySpan>& plan_spans = spans(row, plan);
      if (plan_spans.empty() || spans_layer(rows_[row].plans[plan])) continue;
      bool prepared = false;
      for (int head = first; head < end; ++head) {
        if (plan_index(rows_[row], head) != plan) continue;
        if (!prepared) prepare(walker, row, group, plan_spans);
        prepared = true;
        if (head + 1 < end) {
          prefetch_checkpoint(rows_[row], shape_, head + 1, plan_spans.front().flush);
        } else {
          ask_for(upcoming);
        }
        walker.head.bind(rows_[row], shape_, head);
        const float* gram = walker.gram.data();
        for (size_t i = 0; i < plan_spans.size(); ++i) {
          const ReplaySpan& span = plan_spans[i];
          const bool finite = step(walker, walker.head, row, head, span, &gram);
          if (!span.flush) continue;
          if (i + 1 < plan_spans.size() && plan_spans[i + 1].from_unencoded) {
            step(walker, walker.head, row, head, plan_spans[++i], &gram);
          }
          walker.head.flush(flush_key(row, span), 0.0f, finite);
        }
      }
    }
  }

  /// Heads whose scale spans the layer: all are folded before any is encoded.
  void walk_in_lockstep(int row, int plan) {
    const std::vector<ReplaySpan>& plan_spans = spans(row, plan);
    std::vector<int> heads;
    for (int head = 0; head < layer_.heads; ++head) {
      if (plan_index(rows_[row], head) == plan) heads.push_back(head);
    }
    const int count = static_cast<int>(heads.size());
    std::vector<HeadState> states(heads.size());
    std::vector<float> amax(heads.size());
    for (int i = 0; i < count; ++i) states[i].bind(rows_[row], shape_, heads[i]);
    const int heads_per_group = layer_.heads / layer_.groups;
    RegionErrors errors;
    for (size_t s = 0; s < plan_spans.size(); ++s) {
      const ReplaySpan& span = plan_spans[s];
      const bool read_too = s + 1 < plan_spans.size() && plan_spans[s + 1].from_unencoded;
      const std::vector<ReplaySpan> stepped(plan_spans.begin() + s,
                                            plan_spans.begin() + s + (read_too ? 2 : 1));
#pragma omp parallel if (count > 1)
      {
        Walker walker;
        int prepared_group = -1;
#pragma omp for schedule(static)
        for (int i = 0; i < count; ++i) {
          errors.run([&] {
            const int group = heads[i] / heads_per_group;
            if (group != prepared_group) prepare(walker, row, group, stepped);
            prepared_group = group;
            const float* gram = walker.gram.data();
            for (const ReplaySpan& part : stepped) {
              step(walker, states[i], row, heads[i], part, &gram);
            }
            if (span.flush) amax[i] = states[i].amax();
          });
        }
      }
      errors.rethrow();
      if (read_too) ++s;
      if (!span.flush || count == 0) continue;
      const float span_amax = *std::max_element(amax.begin(), amax.end());
#pragma omp parallel for schedule(static) if (count > 1)
      for (int i = 0; i < count; ++i) {
        errors.run([&] { states[i].flush(flush_key(row, span), span_amax, false); });
      }
      errors.rethrow();
    }
  }

  /// Products B_j . C_t of the spans for one group.
  void prepare(Walker& walker, int row, int group, const std::vector<ReplaySpan>& list) {
    if (form_ == KernelForm::reference) return;
    const auto scratch =
        static_cast<size_t>(mamba2_scratch_floats(layer_.head_dim, layer_.state_dim));
    if (walker.scratch.size() < scratch) walker.scratch.resize(scratch);
    int64_t floats = 0;
    for (const ReplaySpan& span : list) floats += span.queries() * round_up(span.records, 16);
    if (walker.gram.size() < static_cast<size_t>(floats)) {
      walker.gram.resize(static_cast<size_t>(floats));
    }
    float* gram = walker.gram.data();
    const Mamba2Inputs& in = inputs_[row];
    const int64_t offset = int64_t{group} * layer_.state_dim;
    for (const ReplaySpan& span : list) {
      if (span.queries() == 0) continue;
      const int64_t stride = round_up(span.records, 16);
      REPLAYEVAL_SIMD_CALL(mamba2_gram)
      (in.b + span.first * in.b_stride + offset, in.b_stride,
       in.c + span.first_query * in.c_stride + offset, in.c_stride, layer_.state_dim, span.records,
       span.queries(), gram, stride);
      gram += span.queries() * stride;
    }
  }

  /// Outputs of one span of one head, and the fold into head.state() if it flushes. True when the
  /// folded state was seen to be finite.
  bool step(Walker& walker, HeadState& state, int row, int head, const ReplaySpan& span,
            const float** gram) {
    if (form_ == KernelForm::reference) {
      reference_step(walker, state, row, head, span);
      return false;
    }
    const Mamba2Inputs& in = inputs_[row];
    const HeadPlan& plan = rows_[row].plans[plan_index(rows_[row], head)];
    const int64_t group = head / (layer_.heads / layer_.groups);
    Mamba2Span s;
    s.head_dim = layer_.head_dim;
    s.state_dim = layer_.state_dim;
    s.records = span.records;
    s.queries = span.queries();
    s.flush = span.flush;
    s.read_new = span.flush && s.queries > 0 && plan.flush_output == FlushOutput::recurrence;
    s.operand_bits = plan.dot == DotType::fp32 ? 23 : plan.dot == DotType::tf32 ? 10 : 7;
    s.decay_log2 = layer_.decay_log2[head];
    s.has_skip = layer_.skip != nullptr;
    if (s.has_skip) s.skip = layer_.skip[head];
    s.x = in.x + span.first * in.x_stride + int64_t{head} * layer_.head_dim;
    s.x_stride = in.x_stride;
    s.dt = in.dt + span.first * in.dt_stride + head;
    s.dt_stride = in.dt_stride;
    s.b = in.b + span.first * in.b_stride + group * layer_.state_dim;
    s.b_stride = in.b_stride;
    s.gram = *gram;
    s.gram_stride = round_up(span.records, 16);
    *gram += s.queries * s.gram_stride;
    if (s.queries > 0) {
      s.c = in.c + span.first_query * in.c_stride + group * layer_.state_dim;
      s.c_stride = in.c_stride;
      s.y = in.y + span.first_query * in.y_stride + int64_t{head} * layer_.head_dim;
      s.y_stride = in.y_stride;
    }
    if (s.queries > (s.read_new ? 1 : 0)) {
      s.read_state = span.from_unencoded ? state.state() : state.read();
      s.read_far = is_plain_fp32(*(plan.read ? *plan.read : plan.recurrence).format);
    }
    if (s.flush) {
      s.state = state.state();
      s.check_finite = is_plain_fp32(*plan.recurrence.format);
    }
    s.scratch = walker.scratch.data();
    return REPLAYEVAL_SIMD_CALL(mamba2_span)(s);
  }

  /// The same from the equation, token by token in FP64: the recurrence carries S from decode(R),
  /// reads carry decode(C). With `dot` other than fp32 the fold is the sum of rounded products, as
  /// in the window form, since only there are there products to round.
  void reference_step(Walker& walker, HeadState& head_state, int row, int head,
                      const ReplaySpan& span) {
    const Mamba2Inputs& in = inputs_[row];
    const HeadPlan& plan = rows_[row].plans[plan_index(rows_[row], head)];
    const int group = head / (layer_.heads / layer_.groups);
    const int head_dim = layer_.head_dim, state_dim = layer_.state_dim;
    const size_t elements = static_cast<size_t>(shape_.elements());
    const bool reads = span.queries() > 0;
    const auto x = [&](int t) { return in.x + t * in.x_stride + int64_t{head} * head_dim; };
    const auto b = [&](int t) { return in.b + t * in.b_stride + int64_t{group} * state_dim; };
    const auto c = [&](int t) { return in.c + t * in.c_stride + int64_t{group} * state_dim; };
    const auto dt = [&](int t) { return static_cast<double>(in.dt[t * in.dt_stride + head]); };
    const double a = layer_.decay_log2[head];
    const auto advance = [&](std::vector<double>& s, int t) {
      const double decay = std::exp2(dt(t) * a);
      for (int p = 0; p < head_dim; ++p) {
        const double u = dt(t) * x(t)[p];
        double* line = s.data() + int64_t{p} * state_dim;
        for (int n = 0; n < state_dim; ++n) line[n] = decay * line[n] + u * b(t)[n];
      }
    };
    const auto read_out = [&](const std::vector<double>& s, int t) {
      float* y = in.y + t * in.y_stride + int64_t{head} * head_dim;
      for (int p = 0; p < head_dim; ++p) {
        const double* line = s.data() + int64_t{p} * state_dim;
        double sum = 0;
        for (int n = 0; n < state_dim; ++n) sum += line[n] * c(t)[n];
        if (layer_.skip) sum += static_cast<double>(layer_.skip[head]) * x(t)[p];
        y[p] = static_cast<float>(sum);
      }
    };

    if (reads) {
      const float* from = span.from_unencoded ? head_state.state() : head_state.read();
      walker.carried.assign(from, from + elements);
    }
    if (span.flush) {
      const float* from = head_state.state();
      walker.state.assign(from, from + elements);
      if (plan.dot == DotType::fp32) {
        for (int t = span.first; t < span.end(); ++t) advance(walker.state, t);
      } else {
        fold_rounded(walker.state, span, plan.dot, x, b, dt, a);
      }
    }
    for (int t = span.first; reads && t < span.end(); ++t) {
      const bool from_new =
          span.flush && t == span.end() - 1 && plan.flush_output == FlushOutput::recurrence;
      if (!from_new) advance(walker.carried, t);
      if (t >= span.first_query) read_out(from_new ? walker.state : walker.carried, t);
    }
    if (span.flush) {
      float* folded = head_state.state();
      for (size_t i = 0; i < elements; ++i) folded[i] = static_cast<float>(walker.state[i]);
    }
  }

  template <class X, class B, class Dt>
  void fold_rounded(std::vector<double>& state, const ReplaySpan& span, DotType dot, const X& x,
                    const B& b, const Dt& dt, double a) const {
    std::vector<double> weight(static_cast<size_t>(span.records));
    double after = 0;  // log2 of the decays after the record
    for (int j = span.records - 1; j >= 0; --j) {
      weight[j] = std::exp2(after) * dt(span.first + j);
      after += dt(span.first + j) * a;
    }
    const double carry = std::exp2(after);
    for (double& s : state) s *= carry;
    for (int j = 0; j < span.records; ++j) {
      for (int n = 0; n < layer_.state_dim; ++n) {
        const double right =
            round_operand(dot, static_cast<float>(weight[j] * b(span.first + j)[n]));
        for (int p = 0; p < layer_.head_dim; ++p) {
          state[int64_t{p} * layer_.state_dim + n] +=
              round_operand(dot, x(span.first + j)[p]) * right;
        }
      }
    }
  }

  const Mamba2Layer& layer_;
  std::span<StateRow> rows_;
  std::span<const Mamba2Inputs> inputs_;
  std::vector<RowSpans> spans_;
  KernelForm form_;
  StateShape shape_;
};

}  // namespace

void check_mamba2_layer(const Mamba2Layer& layer, std::span<const StateRow> rows,
                        std::span<const Mamba2Inputs> inputs) {
  const auto refuse = [](const std::string& message) {
    throw std::invalid_argument("mamba2: " + message);
  };
  if (layer.heads < 1 || layer.head_dim < 1 || layer.state_dim < 1) {
    refuse("heads " + std::to_string(layer.heads) + ", head_dim " + std::to_string(layer.head_dim) +
           ", state_dim " + std::to_string(layer.state_dim) + ", expected at least 1 each");
  }
  if (layer.groups < 1 || layer.heads % layer.groups != 0) {
    refuse("groups " + std::to_string(layer.groups) + ", expected a divisor of heads " +
           std::to_string(layer.heads));
  }
  if (!layer.decay_log2) refuse("decay_log2 is null, expected [heads]");
  check_rows("mamba2", rows, inputs.size(), layer.heads, {layer.head_dim, layer.state_dim});
}

void check_mamba2_inputs(const Mamba2Layer& layer, size_t row, const Mamba2Inputs& in, bool records,
                         bool queries) {
  const auto refuse = [row](const std::string& message) {
    throw std::invalid_argument("mamba2: row " + std::to_string(row) + ": " + message);
  };
  const auto check_stride = [&](const char* name, int64_t stride, int64_t width) {
    if (stride < width) {
      refuse(std::string(name) + " is " + std::to_string(stride) + ", expected at least " +
             std::to_string(width));
    }
  };
  if (records) {
    if (!in.x || !in.dt || !in.b) refuse("x, dt or b is null, expected records");
    check_stride("x_stride", in.x_stride, int64_t{layer.heads} * layer.head_dim);
    check_stride("dt_stride", in.dt_stride, layer.heads);
    check_stride("b_stride", in.b_stride, int64_t{layer.groups} * layer.state_dim);
  }
  if (queries) {
    if (!in.c || !in.y) refuse("c or y is null, expected queries and room for outputs");
    check_stride("c_stride", in.c_stride, int64_t{layer.groups} * layer.state_dim);
    check_stride("y_stride", in.y_stride, int64_t{layer.heads} * layer.head_dim);
  }
}

int64_t mamba2_scratch_floats(int head_dim, int state_dim) {
  return int64_t{kMaxWindow} * (kMaxWindow + 2 * round_up(head_dim, 16) + state_dim);
}

void mamba2_advance(const Mamba2Layer& layer, std::span<StateRow> rows,
                    std::span<const Mamba2Inputs> inputs, AdvanceMode mode, KernelForm form) {
  check_mamba2_layer(layer, rows, inputs);
  std::vector<RowSpans> spans(rows.size());
  std::vector<std::vector<int>> pending(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const int tokens = inputs[r].tokens;
    if (tokens < 0) {
      throw std::invalid_argument("mamba2: row " + std::to_string(r) + ": " +
                                  std::to_string(tokens) + " tokens, expected 0 or more");
    }
    if (tokens > 0) check_mamba2_inputs(layer, r, inputs[r], true, true);
    for (size_t p = 0; p < rows[r].plans.size(); ++p) {
      const HeadPlan& plan = rows[r].plans[p];
      int after = 0;
      spans[r].push_back(
          replay_spans(rows[r].pending[p], plan.window, tokens, mode, plan.flush_output, &after));
      pending[r].push_back(after);
    }
  }
  Mamba2Walk(layer, rows, inputs, std::move(spans), form).run();
  for (size_t r = 0; r < rows.size(); ++r) {
    std::copy(pending[r].begin(), pending[r].end(), rows[r].pending);
  }
}

void mamba2_flush(const Mamba2Layer& layer, std::span<StateRow> rows,
                  std::span<const Mamba2Inputs> inputs, KernelForm form) {
  check_mamba2_layer(layer, rows, inputs);
  std::vector<RowSpans> spans(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t p = 0; p < rows[r].plans.size(); ++p) {
      spans[r].push_back(flush_spans(rows[r].pending[p]));
      if (!spans[r].back().empty()) check_mamba2_inputs(layer, r, inputs[r], true, false);
    }
  }
  Mamba2Walk(layer, rows, inputs, std::move(spans), form).run();
  for (StateRow& row : rows) std::fill_n(row.pending, row.plans.size(), 0);
}

}  // namespace replayeval
