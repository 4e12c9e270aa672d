#include "reports/results.h"

namespace replayeval {

void LayerHealth::merge(const LayerHealth& other) {
  elements += other.elements;
  non_finite += other.non_finite;
  saturated += other.saturated;
  clipped += other.clipped;
  vanished += other.vanished;
  if (other.first_non_finite_position < 0) return;
  if (first_non_finite_position < 0 ||
      other.first_non_finite_position < first_non_finite_position ||
      (other.first_non_finite_position == first_non_finite_position &&
       other.first_non_finite_head < first_non_finite_head)) {
    first_non_finite_position = other.first_non_finite_position;
    first_non_finite_head = other.first_non_finite_head;
  }
}

std::vector<LayerHealth> StateReport::health() const {
  std::vector<LayerHealth> sum;
  for (const StateDocument& document : documents) {
    if (sum.size() < document.health.size()) sum.resize(document.health.size());
    for (size_t i = 0; i < document.health.size(); ++i) sum[i].merge(document.health[i]);
  }
  return sum;
}

int Report::find_state(const std::string& name) const {
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].info.name == name) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace replayeval
