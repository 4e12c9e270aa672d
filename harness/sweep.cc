#include "harness/sweep.h"

#include <algorithm>

#include "models/state_store.h"

namespace replayeval {
namespace {

/// All of `everything` but one value, as ranges.
IndexSelection without(const std::vector<int>& everything, int left_out) {
  std::string text;
  for (int i : everything) {
    if (i != left_out) text += (text.empty() ? "" : ",") + std::to_string(i);
  }
  return text.empty() ? IndexSelection{} : parse_index_selection(text);
}

IndexSelection one(int index) { return parse_index_selection(std::to_string(index)); }

}  // namespace

std::vector<StatePrecision> expand_sweep(const Sweep& sweep, const ModelSpec& model,
                                         const StateOptions& defaults) {
  std::vector<StatePrecision> states;
  if (!sweep.state) return states;
  std::vector<int> layers;
  std::vector<int> heads;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      if (const auto shape = state_shape(branch.mixer, block.layer)) {
        layers.push_back(block.layer);
        heads.push_back(shape->heads);
      }
    }
  }
  auto add = [&](const IndexSelection& chosen_layers, const IndexSelection& chosen_heads) {
    states.push_back(with_selection(*sweep.state, chosen_layers, chosen_heads, defaults));
  };
  const bool only = sweep.keep != Sweep::Keep::except;
  const bool except = sweep.keep != Sweep::Keep::only;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (sweep.over == Sweep::Over::layers) {
      if (only) add(one(layers[l]), {});
      // With a single layer, everything but it is nothing.
      if (except && layers.size() > 1) add(without(layers, layers[l]), {});
      continue;
    }
    std::vector<int> all_heads;
    for (int h = 0; h < heads[l]; ++h) all_heads.push_back(h);
    for (int h = 0; h < heads[l]; ++h) {
      if (only) add(one(layers[l]), one(h));
      // Within its layer: the spelling selects the same heads in every layer it names.
      if (except && heads[l] > 1) add(one(layers[l]), without(all_heads, h));
    }
  }
  return states;
}

}  // namespace replayeval
