#include "harness/check_model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "models/safetensors.h"
#include "models/state_precision.h"
#include "models/state_store.h"

namespace replayeval {
namespace {

struct Reference {
  std::vector<int64_t> input_ids;
  int64_t sequences = 0, tokens = 0, vocabulary = 0;
  std::vector<float> logits, logits_fp64;
  std::vector<int64_t> fp64_positions;
  std::vector<int64_t> hidden_positions;
  std::vector<float> hidden;  // [layers + 1, positions, hidden]
  int64_t hidden_layers = 0, hidden_size = 0;
  std::vector<int64_t> greedy;
  int64_t greedy_tokens = 0;
  double forward_distance =
      0;  // the library's own FP32 forward pass against its FP64 pass; 0: not known
};

Reference read_reference(const Safetensors& file, const std::filesystem::path& folder) {
  Reference r;
  const TensorInfo& ids = file.at("input_ids");
  if (ids.shape.size() != 2)
    throw std::invalid_argument(file.path().string() + ": input_ids: expected two dimensions");
  r.sequences = ids.shape[0];
  r.tokens = ids.shape[1];
  r.input_ids = read_integers(ids);
  const TensorInfo& logits = file.at("logits");
  if (logits.shape.size() != 3 || logits.shape[0] != r.sequences || logits.shape[1] != r.tokens) {
    throw std::invalid_argument(file.path().string() + ": logits: expected [" +
                                std::to_string(r.sequences) + ", " + std::to_string(r.tokens) +
                                ", vocabulary], got " + shape_text(logits.shape));
  }
  r.vocabulary = logits.shape[2];
  r.logits = read_floats(logits);
  if (file.find("logits_fp64") != nullptr && file.find("decode_positions") != nullptr) {
    r.logits_fp64 = read_floats(file.at("logits_fp64"));
    r.fp64_positions = read_integers(file.at("decode_positions"));
  }
  if (const TensorInfo* hidden = file.find("hidden_states"); hidden != nullptr) {
    r.hidden = read_floats(*hidden);
    r.hidden_positions = read_integers(file.at("hidden_positions"));
    r.hidden_layers = hidden->shape.at(0);
    r.hidden_size = hidden->shape.at(2);
  }
  if (const TensorInfo* greedy = file.find("greedy_tokens"); greedy != nullptr) {
    r.greedy = read_integers(*greedy);
    r.greedy_tokens = greedy->shape.at(1);
  }
  const std::filesystem::path meta = folder / "meta.json";
  if (std::filesystem::exists(meta)) {
    r.forward_distance = Config::load(meta).number("fp32_forward_vs_fp64_max_abs", 0.0);
  }
  return r;
}

float largest(const std::vector<float>& values) {
  float most = 0.0f;
  for (float v : values) most = std::max(most, std::abs(v));
  return most;
}

/// Keeps the worst element; a NaN counts as infinitely far.
class Worst {
 public:
  void see(float got, float expected, const char* format, int64_t a, int64_t b, int64_t c) {
    const double difference = std::isnan(got) != std::isnan(expected)
                                  ? INFINITY
                                  : std::abs(double{got} - double{expected});
    if (difference <= row_.worst && !row_.place.empty()) return;
    if (std::isnan(difference)) return;
    row_.worst = difference;
    char place[160];
    std::snprintf(place, sizeof place, format, static_cast<long long>(a), static_cast<long long>(b),
                  static_cast<long long>(c), static_cast<double>(got),
                  static_cast<double>(expected));
    row_.place = place;
  }
  CheckRow take(std::string what, double bound) {
    row_.what = std::move(what);
    row_.bound = bound;
    return row_;
  }

 private:
  CheckRow row_;
};

/// One pass over all sequences in calls of `chunk` tokens (0: one call).
struct Pass {
  std::vector<float> logits;               // [sequences, tokens, vocabulary]
  std::vector<std::vector<float>> hidden;  // [layers + 1] of [positions, hidden], sequence 0
};

StateSet make_states(const Model& model, const CheckModelOptions& options, int window,
                     int64_t sequences) {
  StateOptions defaults;
  defaults.window = window;
  const StatePrecision precision = parse_state_precision(options.state, defaults);
  std::vector<RowSpec> rows(static_cast<size_t>(sequences));
  for (size_t r = 0; r < rows.size(); ++r) rows[r] = {precision, static_cast<uint32_t>(r), 0, 0};
  return StateSet(model, rows, parse_state_precision("fp32", defaults), options.kernels);
}

Pass run_pass(const Model& model, StateSet& states, const Reference& reference, int chunk) {
  Pass pass;
  const int64_t sequences = reference.sequences;
  pass.logits.resize(static_cast<size_t>(sequences * reference.tokens * reference.vocabulary));
  pass.hidden.resize(static_cast<size_t>(reference.hidden_layers));
  const int64_t width = model.spec().hidden;
  for (int64_t first = 0; first < reference.tokens;) {
    const int64_t count =
        chunk == 0 ? reference.tokens : std::min<int64_t>(chunk, reference.tokens - first);
    std::vector<int32_t> tokens;
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t t = 0; t < count; ++t) {
        tokens.push_back(static_cast<int32_t>(
            reference.input_ids[static_cast<size_t>(s * reference.tokens + first + t)]));
      }
    }
    const std::vector<int> lengths(static_cast<size_t>(sequences), static_cast<int>(count));
    auto observe = [&](int layer, std::span<const float> residual) {
      const size_t index = static_cast<size_t>(layer + 1);
      if (index >= pass.hidden.size()) return;
      for (int64_t p : reference.hidden_positions) {
        if (p < first || p >= first + count) continue;
        const float* row = residual.data() + (p - first) * width;
        pass.hidden[index].insert(pass.hidden[index].end(), row, row + width);
      }
    };
    const Hidden hidden = model.forward({tokens, lengths}, states, AdvanceMode::commit, observe);
    for (int64_t s = 0; s < sequences; ++s) {
      model.lm_head(hidden, s * count, count,
                    pass.logits.data() + (s * reference.tokens + first) * reference.vocabulary);
    }
    first += count;
  }
  return pass;
}

std::vector<int64_t> greedy_continuation(const Model& model, const CheckModelOptions& options,
                                         const Reference& reference, int window, int chunk) {
  constexpr int64_t kPrompt = 32;  // models-ref: argmax continuation of the first 32 tokens
  StateSet states = make_states(model, options, window, reference.sequences);
  const size_t sequences = static_cast<size_t>(reference.sequences);
  std::vector<int64_t> produced(sequences * static_cast<size_t>(reference.greedy_tokens));
  std::vector<std::vector<int32_t>> next(sequences);
  for (size_t s = 0; s < sequences; ++s) {
    for (int64_t t = 0; t < kPrompt; ++t) {
      next[s].push_back(static_cast<int32_t>(
          reference.input_ids[s * static_cast<size_t>(reference.tokens) + static_cast<size_t>(t)]));
    }
  }
  std::vector<float> logits(static_cast<size_t>(reference.vocabulary));
  int64_t fed = 0;
  for (int64_t step = 0; step < reference.greedy_tokens;) {
    const int64_t waiting = static_cast<int64_t>(next[0].size()) - fed;
    const int64_t count = chunk == 0 ? waiting : std::min<int64_t>(chunk, waiting);
    std::vector<int32_t> tokens;
    for (size_t s = 0; s < sequences; ++s)
      tokens.insert(tokens.end(), next[s].begin() + fed, next[s].begin() + fed + count);
    const Hidden hidden =
        model.forward({tokens, std::vector<int>(sequences, static_cast<int>(count))}, states);
    fed += count;
    if (fed < static_cast<int64_t>(next[0].size())) continue;
    for (size_t s = 0; s < sequences; ++s) {
      model.lm_head(hidden, static_cast<int64_t>(s + 1) * count - 1, 1, logits.data());
      const int64_t best = std::max_element(logits.begin(), logits.end()) - logits.begin();
      produced[s * static_cast<size_t>(reference.greedy_tokens) + static_cast<size_t>(step)] = best;
      next[s].push_back(static_cast<int32_t>(best));
    }
    ++step;
  }
  return produced;
}

/// The recurrent state after the last token, pending records folded in by the mixer's own flush.
void compare_states(const Model& model, const StateSet& states, const Safetensors& file,
                    double bound_scale, const std::string& label, std::vector<CheckRow>& rows) {
  const auto stores = states.stores();
  size_t index = 0;
  Worst worst;
  double bound = 0;
  bool any = false;
  for (const Block& block : model.spec().blocks) {
    for (const Branch& branch : block.branches) {
      if (!state_shape(branch.mixer, block.layer)) continue;
      const StateStore& store = *stores[index++];
      const TensorInfo* stored =
          file.find("cache." + std::to_string(block.layer) + ".recurrent_states");
      if (stored == nullptr) continue;
      const std::vector<float> expected = read_floats(*stored);
      const StateShape shape = store.shape().state;
      if (store.pending(0, 0) != 0) continue;
      const bool transposed = std::holds_alternative<GdnSpec>(branch.mixer);
      std::vector<float> state(static_cast<size_t>(shape.elements()));
      bound = std::max(bound, bound_scale * largest(expected));
      any = true;
      for (int h = 0; h < store.shape().heads; ++h) {
        store.decode(0, h, StateRole::recurrence, state.data());
        for (int p = 0; p < shape.head_dim; ++p) {
          for (int n = 0; n < shape.state_dim; ++n) {
            const int64_t at = transposed ? (int64_t{h} * shape.state_dim + n) * shape.head_dim + p
                                          : (int64_t{h} * shape.head_dim + p) * shape.state_dim + n;
            worst.see(state[static_cast<size_t>(int64_t{p} * shape.state_dim + n)],
                      expected[static_cast<size_t>(at)],
                      "layer %lld head %lld element %lld: %.9g, expected %.9g", block.layer, h, at);
          }
        }
      }
    }
  }
  if (any) rows.push_back(worst.take("recurrent states, " + label, bound));
}

}  // namespace

bool CheckModelResult::passed() const {
  return std::all_of(rows.begin(), rows.end(), [](const CheckRow& row) { return row.passed(); });
}

CheckModelResult check_model_results(const CheckModelOptions& options) {
  const auto checkpoint = Checkpoint::open(
      options.folder, options.compute == ComputeType::bf16 ? WeightType::bf16 : WeightType::fp32);
  const Model model(checkpoint, {options.compute, options.dense, options.dt_clamp, options.device});
  const std::filesystem::path path =
      options.reference.value_or(options.folder / "reference.safetensors");
  if (!std::filesystem::exists(path)) {
    throw std::runtime_error(
        "check model: " + path.string() +
        ": expected stored answers, got no such file; models/dump_reference.py "
        "writes them, --reference FILE names others");
  }
  const Safetensors file = Safetensors::open(path);
  const Reference reference = read_reference(file, path.parent_path());
  if (reference.vocabulary != model.spec().vocabulary) {
    throw std::invalid_argument(path.string() + ": logits: expected a vocabulary of " +
                                std::to_string(model.spec().vocabulary) + " (config.json), got " +
                                std::to_string(reference.vocabulary));
  }
  const double top = largest(reference.logits);
  const double own = reference.forward_distance;
  const double fp64_bound = own > 0 ? 5 * own : 1e-3 * top;
  const double fp32_bound = own > 0 ? std::max(2e-5, 10 * own) : 1e-3 * top;
  CheckModelResult result;
  for (int window : options.windows) {
    for (int chunk : options.chunks) {
      const std::string label =
          "L = " + std::to_string(window) + ", " +
          (chunk == 0 ? std::string("one call") : std::to_string(chunk) + " tokens a call");
      StateSet states = make_states(model, options, window, reference.sequences);
      const Pass pass = run_pass(model, states, reference, chunk);
      Worst all;
      for (int64_t s = 0; s < reference.sequences; ++s) {
        for (int64_t t = 0; t < reference.tokens; ++t) {
          for (int64_t v = 0; v < reference.vocabulary; ++v) {
            const size_t i =
                static_cast<size_t>((s * reference.tokens + t) * reference.vocabulary + v);
            all.see(pass.logits[i], reference.logits[i],
                    "sequence %lld token %lld logit %lld: %.9g, expected %.9g", s, t, v);
          }
        }
      }
      result.rows.push_back(all.take("logits (FP32), " + label, fp32_bound));
      if (!reference.logits_fp64.empty()) {
        Worst exact;
        const int64_t positions = static_cast<int64_t>(reference.fp64_positions.size());
        for (int64_t s = 0; s < reference.sequences; ++s) {
          for (int64_t p = 0; p < positions; ++p) {
            const int64_t t = reference.fp64_positions[static_cast<size_t>(p)];
            for (int64_t v = 0; v < reference.vocabulary; ++v) {
              exact.see(pass.logits[static_cast<size_t>(
                            (s * reference.tokens + t) * reference.vocabulary + v)],
                        reference.logits_fp64[static_cast<size_t>(
                            (s * positions + p) * reference.vocabulary + v)],
                        "sequence %lld token %lld logit %lld: %.9g, expected %.9g", s, t, v);
            }
          }
        }
        result.rows.push_back(exact.take("logits (FP64), " + label, fp64_bound));
      }
      for (int64_t layer = 0; layer < reference.hidden_layers; ++layer) {
        const int64_t size =
            static_cast<int64_t>(reference.hidden_positions.size()) * reference.hidden_size;
        const std::vector<float> expected(reference.hidden.begin() + layer * size,
                                          reference.hidden.begin() + (layer + 1) * size);
        const std::vector<float>& got = pass.hidden[static_cast<size_t>(layer)];
        const std::string name =
            layer == 0 ? std::string("embedding") : "layer " + std::to_string(layer - 1);
        if (got.size() != expected.size()) {
          throw std::invalid_argument(path.string() + ": hidden_states: expected " +
                                      std::to_string(got.size()) + " values for " + name +
                                      ", got " + std::to_string(expected.size()));
        }
        Worst worst;
        for (int64_t i = 0; i < size; ++i) {
          worst.see(got[static_cast<size_t>(i)], expected[static_cast<size_t>(i)],
                    "position index %lld dimension %lld (%lld): %.9g, expected %.9g",
                    i / reference.hidden_size, i % reference.hidden_size, i);
        }
        // A layer's values may exceed the logits': the bound keeps the same relative size.
        CheckRow row = worst.take(
            "hidden states after " + name + ", " + label,
            fp32_bound * std::max(1.0, double{largest(expected)} / std::max(top, 1e-30)));
        if (!row.passed() && result.first_layer_differing.empty())
          result.first_layer_differing = name;
        if (!row.passed() || layer + 1 == reference.hidden_layers) result.rows.push_back(row);
      }
      compare_states(model, states, file, fp32_bound / std::max(top, 1e-30), label, result.rows);
      if (options.greedy && reference.greedy_tokens > 0) {
        const std::vector<int64_t> produced =
            greedy_continuation(model, options, reference, window, chunk);
        CheckRow row;
        row.what = "greedy tokens differing, " + label;
        for (size_t i = 0; i < produced.size(); ++i) {
          if (produced[i] == reference.greedy[i]) continue;
          if (row.worst == 0) {
            row.place =
                "sequence " + std::to_string(i / static_cast<size_t>(reference.greedy_tokens)) +
                " step " + std::to_string(i % static_cast<size_t>(reference.greedy_tokens)) +
                ": token " + std::to_string(produced[i]) + ", expected " +
                std::to_string(reference.greedy[i]);
          }
          row.worst += 1;
        }
        result.rows.push_back(row);
      }
    }
  }
  return result;
}

int check_model(const CheckModelOptions& options) {
  const CheckModelResult result = check_model_results(options);
  for (const CheckRow& row : result.rows) {
    std::printf("%-4s  %-58s worst %-10.3g bound %-10.3g %s\n", row.passed() ? "ok" : "FAIL",
                row.what.c_str(), row.worst, row.bound, row.place.c_str());
  }
  if (!result.first_layer_differing.empty()) {
    std::printf("first difference: hidden states after %s\n", result.first_layer_differing.c_str());
  }
  std::printf("%s: %s\n", options.folder.string().c_str(), result.passed() ? "agrees" : "DIFFERS");
  return result.passed() ? 0 : 1;
}

}  // namespace replayeval
