#include "harness/fold_stability.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <vector>

#include "kernels/gdn.h"
#include "quant/format_file.h"
#include "quant/properties.h"
#include "reports/state_dump.h"
#include "reports/tables.h"

namespace replayeval {
namespace {

struct LayerHeads {
  std::vector<GdnHeadStability> heads;
  std::vector<double> read_error;  // eta
};

}  // namespace

std::string fold_stability_text(const FoldStabilityOptions& options) {
  const std::vector<StateDump> dumps = read_state_dumps(options.dumps);
  const auto format = find_or_load_format(options.read);
  std::map<int, LayerHeads> layers;
  // The read error of a head: of its states in all dumps.
  for (const StateDump& dump : dumps) {
    for (const LayerDump& layer : dump.layers) {
      if (layer.kind != "gdn" || layer.tokens == 0 || layers.contains(layer.layer)) continue;
      LayerHeads& result = layers[layer.layer];
      result.heads.resize(static_cast<size_t>(layer.heads));
      const StateShape shape{layer.head_dim, layer.state_dim};
      const size_t size = static_cast<size_t>(shape.elements());
      for (size_t h = 0; h < static_cast<size_t>(layer.heads); ++h) {
        std::vector<float> states;
        for (const StateDump& other : dumps) {
          for (const LayerDump& same : other.layers) {
            if (same.layer != layer.layer || same.state.size() != layer.state.size()) continue;
            states.insert(states.end(), same.state.begin() + static_cast<std::ptrdiff_t>(h * size),
                          same.state.begin() + static_cast<std::ptrdiff_t>((h + 1) * size));
          }
        }
        result.read_error.push_back(
            measure_error({format, Rounding::nearest_even}, shape, states, options.seed)
                .relative_rms);
      }
    }
  }
  if (layers.empty()) {
    throw std::invalid_argument(
        options.dumps +
        ": expected dumps of Gated DeltaNet layers with records (dump_states of a run), got none");
  }
  for (const StateDump& dump : dumps) {
    for (const LayerDump& layer : dump.layers) {
      const auto found = layers.find(layer.layer);
      if (found == layers.end() || layer.kind != "gdn" || layer.tokens == 0) continue;
      GdnLayer sizes;
      sizes.key_heads = layer.groups;
      sizes.value_heads = layer.heads;
      sizes.key_dim = layer.state_dim;
      sizes.value_dim = layer.head_dim;
      sizes.layer = layer.layer;
      GdnInputs inputs;
      inputs.tokens = layer.tokens;
      inputs.k = layer.k.data();
      inputs.k_stride = int64_t{layer.groups} * layer.state_dim;
      inputs.v = layer.v.data();
      inputs.v_stride = int64_t{layer.heads} * layer.head_dim;
      inputs.decay_log2 = layer.decay_log2.data();
      inputs.beta = layer.beta.data();
      inputs.decay_stride = inputs.beta_stride = layer.heads;
      gdn_measure_stability(sizes, inputs, layer.tokens, found->second.read_error,
                            found->second.heads);
    }
  }
  struct Row {
    int layer;
    int head;
    const GdnHeadStability* heads;
    double eta;
  };
  std::vector<Row> rows;
  for (const auto& [index, layer] : layers) {
    for (size_t h = 0; h < layer.heads.size(); ++h)
      rows.push_back({index, static_cast<int>(h), &layer.heads[h], layer.read_error[h]});
  }
  std::ranges::sort(
      rows, [](const Row& a, const Row& b) { return a.heads->mean_decay > b.heads->mean_decay; });
  Table table{"Folding cached corrections read through " + format->name,
              {"layer.head", "windows", "decay a window", "|(I+A)^-1| mean", "max", "read error",
               "window map, max", "log2 growth a window", "cached fold"},
              {}};
  table.left = {8};
  int unstable = 0;
  for (const Row& row : rows) {
    unstable += !row.heads->stable();
    table.rows.push_back({std::to_string(row.layer) + "." + std::to_string(row.head),
                          std::to_string(row.heads->windows), number(row.heads->mean_decay),
                          number(row.heads->mean_solve_norm), number(row.heads->max_solve_norm),
                          number(row.eta), number(row.heads->max_map_norm),
                          number(row.heads->mean_log2_growth),
                          row.heads->stable() ? "bounded" : "may grow"});
  }
  table.notes = {
      "bounded: the mean of log2(window map + read error x its gain) is below 0 (sufficient, not "
      "necessary); rederive is free of "
      "the read error.",
      std::to_string(unstable) + " of " + std::to_string(rows.size()) +
          " heads fail the condition on these windows."};
  return as_text(table);
}

}  // namespace replayeval
