#include "harness/show_format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "quant/format_file.h"
#include "quant/properties.h"
#include "quant/state_format.h"
#include "reports/files.h"
#include "reports/hdf5_image.h"
#include "reports/run_folder.h"
#include "reports/state_dump.h"
#include "reports/tables.h"

namespace replayeval {
namespace {

constexpr int kMatrices = 16;                        // of synthetic data a kind
constexpr int kDraws = 4096;                         // of stochastic rounding a point
constexpr size_t kMostValues = 64;                   // printed one by one
constexpr int64_t kMostElements = int64_t{1} << 24;  // of a head's state

struct DataError {
  std::string data;
  std::string rounding;
  EncodingError error;
};

/// One head of a run: the error of one encoding against what the run measured in its states.
struct HeadGrowth {
  int layer = 0;
  int head = 0;
  double decay = 0;  // mean decay a token
  double alpha = 0;  // a flush: decay^L
  double predicted =
      0;  // sqrt(sigma^2 / (1 - alpha^2) + (b / (1 - alpha))^2), relative to the state
  double measured = 0;  // mean of state_error over the run's samples
};

/// A state of a run that is stored in the format.
struct RunGrowth {
  std::string state;
  int window = 0;
  std::vector<HeadGrowth> heads;  // slowest decay first
};

/// What is said about a format, before it becomes text or JSON.
struct FormatFacts {
  std::shared_ptr<const StateFormat> format;
  double bits = 0;
  std::optional<ElementProperties> element;  // none: a library codec
  std::vector<DataError> errors;
  std::vector<StochasticPoint> stochastic;
  std::vector<RunGrowth> growth;
};

bool rounds(const StateFormat& format) {
  return format.library != nullptr || format.descriptor.element != ElementKind::fp32;
}

/// The matrices of one layer over all dumps, [dumps * heads] of them.
struct DumpedLayer {
  StateShape shape;
  std::vector<float> states;
};

std::map<int, DumpedLayer> dumped_layers(const std::string& path) {
  std::map<int, DumpedLayer> layers;
  for (const StateDump& dump : read_state_dumps(path)) {
    for (const LayerDump& layer : dump.layers) {
      DumpedLayer& all = layers[layer.layer];
      const StateShape shape{layer.head_dim, layer.state_dim};
      if (!all.states.empty() &&
          (all.shape.head_dim != shape.head_dim || all.shape.state_dim != shape.state_dim)) {
        throw std::invalid_argument(path + ": layer " + std::to_string(layer.layer) +
                                    ": expected states of one shape in all dumps");
      }
      all.shape = shape;
      all.states.insert(all.states.end(), layer.state.begin(), layer.state.end());
    }
  }
  return layers;
}

/// Error of one encoding of Gaussian states in the state's rounding: what a flush adds.
EncodingError flush_error(const FormatFacts& facts, const std::string& rounding) {
  for (const char* data : {"all dumped states", "gaussian"}) {
    for (const DataError& row : facts.errors) {
      if (row.data == data && row.rounding == rounding) return row.error;
    }
  }
  return {};
}

std::vector<RunGrowth> measured_growth(const FormatFacts& facts, const std::string& path) {
  const Report report = load_report(path);
  std::vector<RunGrowth> all;
  size_t most_heads = 0;
  for (const LayerInfo& layer : report.layers)
    most_heads = std::max(most_heads, layer.mean_decay.size());
  for (const StateReport& state : report.states) {
    if (state.info.recurrence != facts.format->name) continue;
    const auto everywhere = [&state](const char* option) {
      const auto it = state.info.options.find(option);
      return it == state.info.options.end() || it->second == "all";
    };
    if (!everywhere("layers") || !everywhere("heads")) continue;
    RunGrowth growth;
    growth.state = state.info.name;
    growth.window = state.info.window;
    const EncodingError error = flush_error(facts, state.info.recurrence_rounding);
    const double variance = std::max(
        0.0, error.relative_rms * error.relative_rms - error.mean_error * error.mean_error);
    for (size_t l = 0; l < report.layers.size(); ++l) {
      const LayerInfo& layer = report.layers[l];
      for (size_t h = 0; h < layer.mean_decay.size(); ++h) {
        double sum = 0;
        int count = 0;
        for (const StateDocument& document : state.documents) {
          for (size_t s = 0; s < document.error_positions.size(); ++s) {
            const double value = static_cast<double>(
                document.error[(s * report.layers.size() + l) * most_heads + h]);
            if (!std::isfinite(value)) continue;
            sum += value;
            ++count;
          }
        }
        if (count == 0) continue;
        HeadGrowth head;
        head.layer = layer.index;
        head.head = static_cast<int>(h);
        head.decay = static_cast<double>(layer.mean_decay[h]);
        head.alpha = std::pow(head.decay, growth.window);
        const Accumulation limit =
            accumulated_error(std::min(head.alpha, 1.0), error.mean_error, variance);
        head.predicted = std::sqrt(limit.variance + limit.mean * limit.mean);
        head.measured = sum / count;
        growth.heads.push_back(head);
      }
    }
    std::ranges::sort(growth.heads,
                      [](const HeadGrowth& a, const HeadGrowth& b) { return a.decay > b.decay; });
    if (!growth.heads.empty()) all.push_back(std::move(growth));
  }
  if (all.empty()) {
    throw std::invalid_argument(path + ": holds no state error of a state stored in " +
                                facts.format->name +
                                "; run it with that state and state_error_every");
  }
  return all;
}

FormatFacts gather(const ShowFormatOptions& options) {
  FormatFacts facts;
  facts.format = find_or_load_format(options.format);
  if (options.shape.elements() > kMostElements) {
    throw std::invalid_argument("format: --head-dim " + std::to_string(options.shape.head_dim) +
                                " --state-dim " + std::to_string(options.shape.state_dim) +
                                ": expected at most " + std::to_string(kMostElements) +
                                " elements");
  }
  check_shape(*facts.format, options.shape);
  facts.bits = bits_per_element(*facts.format, options.shape);
  if (facts.format->library == nullptr) facts.element = element_properties(*facts.format);
  const std::pair<const char*, SyntheticData> kinds[] = {
      {"gaussian", SyntheticData::gaussian},
      {"uniform", SyntheticData::uniform},
      {"heavy-tailed", SyntheticData::heavy_tailed}};
  for (const auto& [name, kind] : kinds) {
    const std::vector<float> states =
        synthetic_states(kind, options.shape, kMatrices, options.seed);
    for (const bool stochastic : {false, true}) {
      if (stochastic && !rounds(*facts.format)) continue;
      const StateCodec codec{facts.format,
                             stochastic ? Rounding::stochastic : Rounding::nearest_even};
      facts.errors.push_back({name, stochastic ? "sr" : "rtn",
                              measure_error(codec, options.shape, states, options.seed)});
    }
  }
  if (!options.states.empty()) {
    const std::map<int, DumpedLayer> layers = dumped_layers(options.states);
    bool same_shape = true;
    std::vector<float> everything;
    for (const auto& [index, layer] : layers) {
      same_shape = same_shape && layer.shape.head_dim == layers.begin()->second.shape.head_dim &&
                   layer.shape.state_dim == layers.begin()->second.shape.state_dim;
      everything.insert(everything.end(), layer.states.begin(), layer.states.end());
    }
    for (const bool stochastic : {false, true}) {
      if (stochastic && !rounds(*facts.format)) continue;
      const StateCodec codec{facts.format,
                             stochastic ? Rounding::stochastic : Rounding::nearest_even};
      const char* rounding = stochastic ? "sr" : "rtn";
      for (const auto& [index, layer] : layers) {
        facts.errors.push_back({"states of layer " + std::to_string(index), rounding,
                                measure_error(codec, layer.shape, layer.states, options.seed)});
      }
      if (same_shape) {
        facts.errors.push_back(
            {"all dumped states", rounding,
             measure_error(codec, layers.begin()->second.shape, everything, options.seed)});
      }
    }
  }
  if (!options.run.empty()) facts.growth = measured_growth(facts, options.run);
  if (facts.element && rounds(*facts.format)) {
    // Points over the range of the element, none of them on its grid.
    std::vector<float> x;
    for (const double share : {0.83, 0.41, 0.19, 0.067, 0.013})
      x.push_back(static_cast<float>(share * facts.element->largest));
    if (facts.element->lowest < 0) x.push_back(static_cast<float>(0.41 * facts.element->lowest));
    facts.stochastic = measure_stochastic(*facts.format, x, kDraws, options.seed);
  }
  return facts;
}

std::string percent(double share) { return number(100 * share); }

std::string text_of(const FormatFacts& facts, const ShowFormatOptions& options) {
  const StateFormat& format = *facts.format;
  std::string text = format.name + "\n" + definition(format);
  if (!text.ends_with('\n')) text += "\n";
  text += "sha256 " + definition_hash(format) + "\n";
  char line[160];
  std::snprintf(line, sizeof line,
                "%.6g bits an element, scales included, for a head of %d x %d\n\n", facts.bits,
                options.shape.head_dim, options.shape.state_dim);
  text += line;

  if (facts.element) {
    const ElementProperties& e = *facts.element;
    Table table{"Element, before scales", {"property", "value"}, {}};
    table.rows = {{"bits of a code", std::to_string(e.code_bits)},
                  {"random bits of sr", std::to_string(e.random_bits)},
                  {"largest", number(e.largest)},
                  {"lowest", number(e.lowest)},
                  {"smallest above 0", number(e.smallest)}};
    if (e.min_normal > 0) table.rows.push_back({"smallest normal", number(e.min_normal)});
    if (e.min_subnormal > 0) table.rows.push_back({"smallest subnormal", number(e.min_subnormal)});
    table.rows.push_back({"dynamic range, bits", number(e.dynamic_range_bits)});
    if (e.unit_roundoff > 0) table.rows.push_back({"unit roundoff", number(e.unit_roundoff)});
    table.rows.push_back({"widest half gap / largest", number(e.widest_half_gap)});
    table.rows.push_back({"infinity, NaN", std::string(e.has_infinity ? "yes" : "no") + ", " +
                                               (e.has_nan ? "yes" : "no")});
    if (!e.values.empty() && e.values.size() <= kMostValues) {
      std::string values = "values:";
      for (const float value : e.values) {
        std::snprintf(line, sizeof line, " %.6g", static_cast<double>(value));
        values += line;
      }
      table.notes.push_back(values);
    } else if (!e.values.empty()) {
      table.notes.push_back(std::to_string(e.values.size()) + " distinct finite values");
    }
    text += as_text(table) + "\n";
  }

  Table errors{
      options.states.empty() ? "Error on synthetic states" : "Error on synthetic and dumped states",
      {"data", "rounding", "relative RMS", "bias / RMS", "shrink", "worst / max", "clipped %",
       "vanished %", "saturated %"},
      {},
      {"shrink: sum of (|x| - |decoded|) / sum of |x|, which acts like extra decay at every flush"},
      {1}};
  for (const DataError& row : facts.errors) {
    const EncodingError& e = row.error;
    errors.rows.push_back({row.data, row.rounding, number(e.relative_rms), number(e.mean_error),
                           number(e.shrink), number(e.worst), percent(e.clipped),
                           percent(e.vanished), percent(e.saturated)});
  }
  text += as_text(errors) + "\n";

  if (!facts.stochastic.empty()) {
    Table points{
        "Stochastic rounding of single values, " + std::to_string(kDraws) + " draws",
        {"x", "low", "high", "mean", "expected", "off by / s.e.", "variance", "p(1-p) gap^2"},
        {}};
    for (const StochasticPoint& p : facts.stochastic) {
      const double error = std::sqrt(p.expected_variance / kDraws);
      points.rows.push_back({number(static_cast<double>(p.x)), number(static_cast<double>(p.low)),
                             number(static_cast<double>(p.high)), number(p.mean),
                             number(p.expected_mean),
                             error > 0 ? number((p.mean - p.expected_mean) / error) : "-",
                             number(p.variance), number(p.expected_variance)});
    }
    text += as_text(points) + "\n";
  }

  Table growth{
      "An error of every flush in a state with decay alpha a flush: b / (1 - alpha) and sigma / "
      "sqrt(1 - alpha^2)",
      {"rounding", "alpha", "bias / RMS", "its s.e.", "sd / RMS"},
      {},
      {"b and sigma of the Gaussian rows above, in units of the state's RMS; a bias within 2 s.e. "
       "of 0 is noise"}};
  for (const DataError& row : facts.errors) {
    if (row.data != "gaussian") continue;
    for (const double alpha : {0.9, 0.99, 0.999}) {
      const double variance = std::max(0.0, row.error.relative_rms * row.error.relative_rms -
                                                row.error.mean_error * row.error.mean_error);
      const Accumulation sum = accumulated_error(alpha, row.error.mean_error, variance);
      const double error =
          std::sqrt(variance / static_cast<double>(row.error.elements)) / (1 - alpha);
      growth.rows.push_back({row.rounding, number(alpha), number(sum.mean), number(error),
                             number(std::sqrt(sum.variance))});
    }
  }
  text += as_text(growth);
  for (const RunGrowth& run : facts.growth) {
    constexpr size_t kMostHeads = 32;
    Table table{"State error of " + run.state + " in the run, slowest heads first",
                {"layer.head", "decay a token", "alpha a flush", "predicted", "measured",
                 "measured / predicted"},
                {}};
    for (const HeadGrowth& head : run.heads) {
      if (table.rows.size() == kMostHeads) break;
      char decay[32], alpha[32];
      std::snprintf(decay, sizeof decay, "%.6f", head.decay);
      std::snprintf(alpha, sizeof alpha, "%.6f", head.alpha);
      table.rows.push_back({std::to_string(head.layer) + "." + std::to_string(head.head), decay,
                            alpha, number(head.predicted), number(head.measured),
                            number(head.measured / head.predicted)});
    }
    table.notes = {
        "relative Frobenius error of the recurrence checkpoint; predicted from the mean decay and "
        "the error of one encoding, as if "
        "the state kept its size; the model's own drift is in `measured` alone"};
    if (run.heads.size() > kMostHeads) {
      table.notes.push_back(std::to_string(run.heads.size() - kMostHeads) +
                            " faster heads are in --json and -o");
    }
    text += "\n" + as_text(table);
  }
  return text.ends_with('\n') ? text : text + "\n";
}

std::string json_of(const FormatFacts& facts, const ShowFormatOptions& options) {
  using nlohmann::json;
  json out = {{"name", facts.format->name},
              {"definition", definition(*facts.format)},
              {"sha256", definition_hash(*facts.format)},
              {"shape", {options.shape.head_dim, options.shape.state_dim}},
              {"bits_per_element", facts.bits}};
  if (facts.element) {
    const ElementProperties& e = *facts.element;
    out["element"] = {{"code_bits", e.code_bits},
                      {"random_bits", e.random_bits},
                      {"values", e.values},
                      {"largest", e.largest},
                      {"lowest", e.lowest},
                      {"smallest", e.smallest},
                      {"min_normal", e.min_normal},
                      {"min_subnormal", e.min_subnormal},
                      {"has_infinity", e.has_infinity},
                      {"has_nan", e.has_nan},
                      {"dynamic_range_bits", e.dynamic_range_bits},
                      {"unit_roundoff", e.unit_roundoff},
                      {"widest_half_gap", e.widest_half_gap}};
  }
  out["errors"] = json::array();
  for (const DataError& row : facts.errors) {
    const EncodingError& e = row.error;
    out["errors"].push_back({{"data", row.data},
                             {"rounding", row.rounding},
                             {"relative_rms", e.relative_rms},
                             {"mean_error", e.mean_error},
                             {"shrink", e.shrink},
                             {"worst", e.worst},
                             {"non_finite", e.non_finite},
                             {"saturated", e.saturated},
                             {"clipped", e.clipped},
                             {"vanished", e.vanished}});
  }
  out["stochastic"] = json::array();
  for (const StochasticPoint& p : facts.stochastic) {
    out["stochastic"].push_back({{"x", p.x},
                                 {"low", p.low},
                                 {"high", p.high},
                                 {"fraction", p.fraction},
                                 {"probability", p.probability},
                                 {"draws", kDraws},
                                 {"mean", p.mean},
                                 {"variance", p.variance},
                                 {"expected_mean", p.expected_mean},
                                 {"expected_variance", p.expected_variance}});
  }
  out["growth"] = json::array();
  for (const RunGrowth& run : facts.growth) {
    json heads = json::array();
    for (const HeadGrowth& h : run.heads) {
      heads.push_back({{"layer", h.layer},
                       {"head", h.head},
                       {"decay", h.decay},
                       {"alpha", h.alpha},
                       {"predicted", h.predicted},
                       {"measured", h.measured}});
    }
    out["growth"].push_back({{"state", run.state}, {"window", run.window}, {"heads", heads}});
  }
  return out.dump(1) + "\n";
}

/// The same as HDF5: one dataset a column.
void save(const FormatFacts& facts, const ShowFormatOptions& options) {
  Hdf5Writer writer(options.output);
  writer.attribute<std::string>("/", "schema", "replayeval-format/1");
  writer.attribute<std::string>("/", "name", facts.format->name);
  writer.attribute<std::string>("/", "definition", definition(*facts.format));
  writer.attribute<std::string>("/", "sha256", definition_hash(*facts.format));
  writer.attribute<double>("/", "bits_per_element", facts.bits);
  auto column = [&writer](const std::string& path, const std::vector<double>& values) {
    if (!values.empty())
      writer.dataset<double>(path, {static_cast<int64_t>(values.size())}, values);
  };
  auto names = [&writer](const std::string& path, const std::vector<std::string>& values) {
    if (!values.empty())
      writer.dataset<std::string>(path, {static_cast<int64_t>(values.size())}, values);
  };
  if (facts.element) {
    const ElementProperties& e = *facts.element;
    writer.group("/element");
    column("/element/values", {e.values.begin(), e.values.end()});
    for (const auto& [name, value] : {std::pair<const char*, double>{"largest", e.largest},
                                      {"lowest", e.lowest},
                                      {"smallest", e.smallest},
                                      {"min_normal", e.min_normal},
                                      {"min_subnormal", e.min_subnormal},
                                      {"dynamic_range_bits", e.dynamic_range_bits},
                                      {"unit_roundoff", e.unit_roundoff}}) {
      writer.attribute<double>("/element", name, value);
    }
  }
  std::vector<std::string> data, rounding;
  std::vector<double> rms, bias, shrink, clipped, vanished, saturated;
  for (const DataError& row : facts.errors) {
    data.push_back(row.data);
    rounding.push_back(row.rounding);
    rms.push_back(row.error.relative_rms);
    bias.push_back(row.error.mean_error);
    shrink.push_back(row.error.shrink);
    clipped.push_back(row.error.clipped);
    vanished.push_back(row.error.vanished);
    saturated.push_back(row.error.saturated);
  }
  names("/errors/data", data);
  names("/errors/rounding", rounding);
  column("/errors/relative_rms", rms);
  column("/errors/bias", bias);
  column("/errors/shrink", shrink);
  column("/errors/clipped", clipped);
  column("/errors/vanished", vanished);
  column("/errors/saturated", saturated);
  std::vector<double> x, mean, expected_mean, variance, expected_variance;
  for (const StochasticPoint& p : facts.stochastic) {
    x.push_back(static_cast<double>(p.x));
    mean.push_back(p.mean);
    expected_mean.push_back(p.expected_mean);
    variance.push_back(p.variance);
    expected_variance.push_back(p.expected_variance);
  }
  column("/stochastic/x", x);
  column("/stochastic/mean", mean);
  column("/stochastic/expected_mean", expected_mean);
  column("/stochastic/variance", variance);
  column("/stochastic/expected_variance", expected_variance);
  for (size_t i = 0; i < facts.growth.size(); ++i) {
    const std::string group = "/growth/" + std::to_string(i);
    std::vector<double> layer, head, decay, alpha, predicted, measured;
    for (const HeadGrowth& h : facts.growth[i].heads) {
      layer.push_back(h.layer);
      head.push_back(h.head);
      decay.push_back(h.decay);
      alpha.push_back(h.alpha);
      predicted.push_back(h.predicted);
      measured.push_back(h.measured);
    }
    column(group + "/layer", layer);
    column(group + "/head", head);
    column(group + "/decay", decay);
    column(group + "/alpha", alpha);
    column(group + "/predicted", predicted);
    column(group + "/measured", measured);
    writer.attribute<std::string>(group, "state", facts.growth[i].state);
    writer.attribute<int64_t>(group, "window", facts.growth[i].window);
  }
  replace_file(options.output, writer.finish());
}

}  // namespace

std::string format_text(const ShowFormatOptions& options) {
  const FormatFacts facts = gather(options);
  if (!options.output.empty()) save(facts, options);
  return options.json ? json_of(facts, options) : text_of(facts, options);
}

int show_format(const ShowFormatOptions& options) {
  std::printf("%s", format_text(options).c_str());
  return 0;
}

}  // namespace replayeval
