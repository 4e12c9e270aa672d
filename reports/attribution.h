// Which layers and heads cause the KL of a state precision, from the states of a sweep (the
// precision in one place only, or everywhere but there), and which layers to keep in a wider format
// for the least KL at a given number of bits.
#pragma once

#include <string>
#include <vector>

#include "reports/results.h"
#include "reports/statistics.h"
#include "reports/tables.h"

namespace replayeval {

/// One layer (head -1) or one head. `only`: mean KL in nats with the precision there alone;
/// `removed`: the whole model's mean KL minus that of everywhere but there (heads: everywhere in
/// its layer but there, against the layer alone). NaN where the run has no such state.
struct Contribution {
  int layer = 0;
  int head = -1;
  double only = 0;
  double removed = 0;
  double share = 0;     // `only` over the sum of all `only`
  double elements = 0;  // of the state, as a share of the model's
};

/// Keeping the `kept` worst layers in the wider format. `predicted` adds what the others cause
/// alone, and where the run has the wider format in the whole model, that format's KL times the
/// kept share.
struct PolicyStep {
  int kept = 0;
  double bits_per_element = 0;
  double predicted = 0;
  std::string spelling;  // as an experiment takes it
};

/// The sweep of one precision.
struct Attribution {
  std::string precision;  // spelling without the selection
  bool heads = false;
  double whole = 0;  // mean KL of the precision in the whole model, NaN when the run lacks it
  double sum_of_parts = 0;           // of all `only`
  std::vector<Contribution> ranked;  // largest first
  std::string wider;                 // format of the kept layers
  std::vector<PolicyStep>
      policy;  // 0, 1, ... layers kept; empty unless every layer has an `only` state
};

/// All sweeps that a report holds. Layers first.
std::vector<Attribution> attribute(const Report& report, const KlStatistics& statistics);

/// Ranking and policy as tables; empty without a sweep.
std::vector<Table> attribution_tables(const Report& report, const KlStatistics& statistics);

}  // namespace replayeval
