#include "harness/dump_states.h"

namespace replayeval {
namespace {

/// Columns [offset, offset + width) of the rows of `source`.
std::vector<float> columns(std::span<const float> source, int64_t stride, int64_t offset,
                           int64_t width) {
  std::vector<float> values;
  for (size_t row = 0; row + static_cast<size_t>(stride) <= source.size();
       row += static_cast<size_t>(stride)) {
    const auto start = source.begin() + static_cast<std::ptrdiff_t>(row) + offset;
    values.insert(values.end(), start, start + width);
  }
  return values;
}

}  // namespace

StateDump make_state_dump(const Model& model, const StateSet& states, const std::string& document,
                          int64_t position) {
  StateDump dump;
  dump.model_sha256 = model.checkpoint().hash();
  dump.document = document;
  dump.position = position;
  const auto stores = states.stores();
  size_t index = 0;
  for (const Block& block : model.spec().blocks) {
    for (const Branch& branch : block.branches) {
      const auto shape = state_shape(branch.mixer, block.layer);
      if (!shape) continue;
      const StateStore& store = *stores[index++];
      LayerDump layer;
      layer.layer = block.layer;
      layer.heads = shape->heads;
      layer.head_dim = shape->state.head_dim;
      layer.state_dim = shape->state.state_dim;
      const size_t elements = static_cast<size_t>(shape->state.elements());
      layer.state.resize(elements * static_cast<size_t>(shape->heads));
      for (int h = 0; h < shape->heads; ++h) {
        store.decode(0, h, StateRole::recurrence,
                     layer.state.data() + static_cast<size_t>(h) * elements);
      }
      const std::span<const float> channels = store.trace_channels(),
                                   scalars = store.trace_scalars();
      layer.tokens = static_cast<int>(channels.size() / static_cast<size_t>(shape->channels));
      const int64_t value_width = int64_t{shape->heads} * shape->state.head_dim;
      if (const auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer)) {
        layer.kind = "mamba2";
        layer.groups = mamba->groups;
        const int64_t group_width = int64_t{mamba->groups} * mamba->state_dim;
        layer.x = columns(channels, shape->channels, 0, value_width);
        layer.b = columns(channels, shape->channels, value_width, group_width);
        layer.c = columns(channels, shape->channels, value_width + group_width, group_width);
        layer.dt = columns(scalars, shape->scalars, 0, shape->heads);
        layer.decay_log2 = mamba->decay_log2;
      } else if (const auto* gdn = std::get_if<GdnSpec>(&branch.mixer)) {
        layer.kind = "gdn";
        layer.groups = gdn->key_heads;
        const int64_t key_width = int64_t{gdn->key_heads} * gdn->key_dim;
        layer.q = columns(channels, shape->channels, 0, key_width);
        layer.k = columns(channels, shape->channels, key_width, key_width);
        layer.v = columns(channels, shape->channels, 2 * key_width, value_width);
        layer.decay_log2 = columns(scalars, shape->scalars, 0, shape->heads);
        layer.beta = columns(scalars, shape->scalars, shape->heads, shape->heads);
      }
      dump.layers.push_back(std::move(layer));
    }
  }
  return dump;
}

}  // namespace replayeval
