#include "kernels/replay_cuda.cuh"

namespace replayeval {
namespace {

std::vector<RandomKey> head_keys(int heads, int layer, int head_offset) {
  std::vector<RandomKey> keys(static_cast<size_t>(heads));
  for (int h = 0; h < heads; ++h) {
    keys[static_cast<size_t>(h)].layer = static_cast<uint32_t>(layer);
    keys[static_cast<size_t>(h)].head = static_cast<uint32_t>(head_offset + h);
  }
  return keys;
}

bool same(const DevicePlan& a, const DevicePlan& b) {
  return a.recurrence == b.recurrence && a.read == b.read &&
         a.recurrence_stochastic == b.recurrence_stochastic &&
         a.read_stochastic == b.read_stochastic && a.window == b.window &&
         a.flush_output == b.flush_output && a.gdn_fold == b.gdn_fold && a.ring_u == b.ring_u &&
         a.beta == b.beta && a.dot == b.dot && a.seed == b.seed;
}

}  // namespace

RowTables::RowTables(std::span<const StateRow> rows, StateShape shape, int heads, int layer,
                     int head_offset, WalkMode mode)
    : formats_(head_keys(heads, layer, head_offset)),
      mode_(mode),
      layer_(layer),
      head_offset_(head_offset) {
  for (size_t r = 0; r < rows.size(); ++r) {
    const StateRow& row = rows[r];
    DeviceRow device{};
    device.position = row.position;
    device.stream = row.stream;
    device.first_plan = static_cast<int>(row_plans_.size());
    device.plan_of_head = -1;
    device.recurrence = row.recurrence;
    device.recurrence_stride = row.recurrence_stride;
    device.read = row.read;
    device.read_stride = row.read_stride;
    device.memory = row.memory;
    device.memory_stride = row.memory_stride;
    device.health = row.health;
    if (row.plan_of_head) {
      device.plan_of_head = static_cast<int>(head_plans_.size());
      head_plans_.insert(head_plans_.end(), row.plan_of_head, row.plan_of_head + heads);
    }
    rows_.push_back(device);
    for (size_t p = 0; p < row.plans.size(); ++p) {
      const HeadPlan& plan = row.plans[p];
      DevicePlan d;
      d.recurrence = formats_.add(*plan.recurrence.format);
      d.recurrence_stochastic = plan.recurrence.rounding == Rounding::stochastic;
      any_residual_ = any_residual_ || plan.recurrence.format->residual;
      if (plan.read) {
        d.read = formats_.add(*plan.read->format);
        d.read_stochastic = plan.read->rounding == Rounding::stochastic;
        d.read_memory = memory_bytes(*plan.recurrence.format, shape);
        any_residual_ = any_residual_ || plan.read->format->residual;
      }
      d.spans_layer = spans_layer(plan);
      d.window = plan.window;
      d.flush_output = plan.flush_output;
      d.gdn_fold = plan.gdn_fold;
      d.ring_u = plan.ring_u;
      d.beta = plan.beta;
      d.dot = plan.dot;
      d.seed = plan.seed;
      const auto known = std::find_if(plans_.begin(), plans_.end(),
                                      [&](const DevicePlan& k) { return same(k, d); });
      row_plans_.push_back(static_cast<int>(known - plans_.begin()));
      if (known == plans_.end()) plans_.push_back(d);
      pending_.push_back(row.pending[p]);
      if (d.spans_layer) layer_plans_.emplace_back(static_cast<int>(r), static_cast<int>(p));
    }
  }
}

void RowTables::add_to(CallTables* tables) {
  formats_.add_to(tables);
  rows_at_ = tables->add(std::span<const DeviceRow>(rows_));
  plans_at_ = tables->add(std::span<const DevicePlan>(plans_));
  row_plans_at_ = tables->add(std::span<const int>(row_plans_));
  pending_at_ = tables->add(std::span<const int>(pending_));
  head_plans_at_ = tables->add(std::span<const uint8_t>(head_plans_));
}

ReplayTables RowTables::on_device(const CallTables& tables) const {
  ReplayTables t;
  t.rows = tables.table<const DeviceRow>(rows_at_);
  t.plans = tables.table<const DevicePlan>(plans_at_);
  t.row_plans = tables.table<const int>(row_plans_at_);
  t.pending = tables.table<const int>(pending_at_);
  t.head_plans = tables.table<const uint8_t>(head_plans_at_);
  t.formats = formats_.formats(tables);
  t.buckets = formats_.buckets(tables);
  t.fixed_scales = formats_.scales(tables);
  t.mode = mode_;
  t.layer = layer_;
  t.head_offset = head_offset_;
  return t;
}

std::vector<int> pending_after(const StateRow& row, int tokens, AdvanceMode mode) {
  std::vector<int> after(row.plans.size());
  for (size_t p = 0; p < row.plans.size(); ++p) {
    replay_spans(row.pending[p], row.plans[p].window, tokens, mode, row.plans[p].flush_output,
                 &after[p]);
  }
  return after;
}

int largest_span(std::span<const StateRow> rows, std::span<const int> tokens, WalkMode mode) {
  int largest = 1;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t p = 0; p < rows[r].plans.size(); ++p) {
      const HeadPlan& plan = rows[r].plans[p];
      SpanWalk walk(rows[r].pending[p], plan.window, tokens[r], mode, plan.flush_output);
      WalkSpan span;
      for (int i = 0; i < 3 && walk.next(&span); ++i) largest = std::max(largest, span.records);
    }
  }
  return largest;
}

}  // namespace replayeval
