#include "reports/health_tables.h"

namespace replayeval {

std::vector<Table> health_tables(const Report& report) {
  std::vector<Table> tables;
  for (const StateReport& state : report.states) {
    const std::vector<LayerHealth> layers = state.health();
    Table table{"State health of " + state.info.name + " by layer, % of the encoded elements",
                {"layer", "encoded", "non-finite", "saturated %", "clipped %", "vanished %",
                 "first non-finite state"},
                {}};
    bool any = false;
    for (size_t l = 0; l < layers.size(); ++l) {
      const LayerHealth& health = layers[l];
      if (health.elements == 0 && health.non_finite == 0) continue;
      any = any || health.non_finite + health.saturated + health.clipped + health.vanished > 0;
      const auto share = [&health](uint64_t count) {
        return count == 0 ? std::string("0")
                          : number(100.0 * static_cast<double>(count) /
                                   static_cast<double>(health.elements));
      };
      table.rows.push_back({std::to_string(report.layers[l].index), std::to_string(health.elements),
                            std::to_string(health.non_finite), share(health.saturated),
                            share(health.clipped), share(health.vanished),
                            health.first_non_finite_position < 0
                                ? std::string("-")
                                : "position " + std::to_string(health.first_non_finite_position) +
                                      ", head " + std::to_string(health.first_non_finite_head)});
    }
    if (any) tables.push_back(std::move(table));
  }
  return tables;
}

}  // namespace replayeval
