#include "harness/show_format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "quant/format_file.h"
#include "quant/properties.h"
#include "quant/state_format.h"
#include "reports/tables.h"

namespace replayeval {
namespace {

constexpr int kMatrices = 16;       // of synthetic data a kind
constexpr int kDraws = 4096;        // of stochastic rounding a point
constexpr size_t kMostValues = 64;  // printed one by one

struct DataError {
  const char* data;
  const char* rounding;
  EncodingError error;
};

/// What is said about a format, before it becomes text or JSON.
struct FormatFacts {
  std::shared_ptr<const StateFormat> format;
  double bits = 0;
  std::optional<ElementProperties> element;  // none: a library codec
  std::vector<DataError> errors;
  std::vector<StochasticPoint> stochastic;
};

bool rounds(const StateFormat& format) {
  return format.library != nullptr || format.descriptor.element != ElementKind::fp32;
}

FormatFacts gather(const ShowFormatOptions& options) {
  FormatFacts facts;
  facts.format = find_or_load_format(options.format);
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
      "Error on synthetic states",
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
    if (std::string(row.data) != "gaussian") continue;
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
  return out.dump(1) + "\n";
}

}  // namespace

std::string format_text(const ShowFormatOptions& options) {
  const FormatFacts facts = gather(options);
  return options.json ? json_of(facts, options) : text_of(facts, options);
}

int show_format(const ShowFormatOptions& options) {
  std::printf("%s", format_text(options).c_str());
  return 0;
}

}  // namespace replayeval
