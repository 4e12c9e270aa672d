#include "reports/tables.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "reports/run_json.h"
#include "reports/schema.h"
#include "reports/text.h"

namespace replayeval {
namespace {

using Json = nlohmann::ordered_json;

/// Characters shown, of UTF-8.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::vector<size_t> widths_of(const Table& table) {
  std::vector<size_t> widths;
  for (const std::string& head : table.head) widths.push_back(width_of(head));
  for (const auto& row : table.rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
  }
  return widths;
}

std::vector<bool> right_set(const Table& table) {
  std::vector<bool> right(table.head.size(), true);
  if (!right.empty()) right[0] = false;
  for (size_t c : table.left) right[c] = false;
  return right;
}

std::string padded(const std::string& text, size_t width, bool right) {
  const std::string blanks(width - std::min(width, width_of(text)), ' ');
  return right ? blanks + text : text + blanks;
}

std::string bytes_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return format(unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
}

struct Health {
  LayerHealth sum;
  int first_layer = -1;  // of the first non-finite state, index in the checkpoint
};

Health health_of(const Report& report, const StateReport& state) {
  Health out;
  const std::vector<LayerHealth> layers = state.health();
  for (size_t l = 0; l < layers.size(); ++l) {
    const int64_t before = out.sum.first_non_finite_position;
    out.sum.merge(layers[l]);
    if (out.sum.first_non_finite_position != before) out.first_layer = report.layers[l].index;
  }
  return out;
}

/// The gravest thing that happened, in one word; how many positions the means do not hold.
std::string health_word(const Health& health, const KlFigures& figures) {
  if (figures.non_finite > 0)
    return "NON-FINITE: " + std::to_string(figures.non_finite) + " positions left out";
  if (health.sum.non_finite > 0) return "NON-FINITE";
  if (health.sum.saturated > 0) return "saturated";
  if (health.sum.clipped > 0) return "clipped";
  if (health.sum.vanished > 0) return "vanished";
  return "ok";
}

/// One row for each state to which something happened.
Table health_table(const Report& report, const KlStatistics& statistics) {
  Table table;
  table.title =
      "State health: elements of the encoded states, and positions without a finite KL or NLL";
  table.head = {"state",   "encoded",  "non-finite", "saturated",
                "clipped", "vanished", "positions",  "first non-finite state"};
  table.left = {7};
  for (size_t s = 0; s < statistics.states.size(); ++s) {
    const Health health = health_of(report, report.states[s]);
    const KlFigures& figures = statistics.states[s].all;
    if (health_word(health, figures) == "ok") continue;
    const LayerHealth& sum = health.sum;
    table.rows.push_back(
        {report.states[s].info.name, std::to_string(sum.elements), std::to_string(sum.non_finite),
         std::to_string(sum.saturated), std::to_string(sum.clipped), std::to_string(sum.vanished),
         std::to_string(figures.non_finite),
         sum.first_non_finite_position < 0
             ? "-"
             : format("position %" PRId64 ", layer %d, head %d", sum.first_non_finite_position,
                      health.first_layer, sum.first_non_finite_head)});
  }
  return table;
}

std::string floor_mark(const KlFigures& figures) { return figures.below_floor ? " *" : ""; }

Json optional(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json estimate_json(const Estimate& e) {
  return {{"value", optional(e.value)},
          {"low", optional(e.interval.low)},
          {"high", optional(e.interval.high)}};
}

Json figures_json(const Report& report, const KlFigures& f) {
  auto document = [&](int index) {
    return index < 0 ? Json(nullptr) : Json(report.documents[static_cast<size_t>(index)].id);
  };
  auto position = [](int64_t p) { return p < 0 ? Json(nullptr) : Json(p); };
  Json json = {{"documents", f.documents},
               {"reaching", f.reaching},
               {"positions", f.positions},
               {"non_finite", f.non_finite},
               {"kl_mean", estimate_json(f.kl)},
               {"kl_max", optional(f.kl_max)},
               {"kl_max_document", document(f.kl_max_document)},
               {"kl_max_position", position(f.kl_max_position)},
               {"nll_mean", estimate_json(f.nll)},
               {"nll_max", optional(f.nll_max)},
               {"nll_max_document", document(f.nll_max_document)},
               {"nll_max_position", position(f.nll_max_position)},
               {"top1", estimate_json(f.top1)},
               {"perplexity", estimate_json(f.perplexity)},
               {"perplexity_ratio", estimate_json(f.perplexity_ratio)},
               {"below_floor", f.below_floor}};
  for (size_t q = 0; q < kQuantiles.size(); ++q) {
    const std::string name = format("%g", 100 * kQuantiles[q]);
    json["kl_percentiles"][name] = estimate_json(f.kl_quantiles[q]);
    json["nll_percentiles"][name] = estimate_json(f.nll_quantiles[q]);
  }
  return json;
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string csv_number(double value) { return std::isfinite(value) ? format("%.17g", value) : ""; }

Table state_table(const Report& report, const KlStatistics& statistics) {
  Table table;
  table.title = "KL against " + report.run.baseline + " at every position, by state";
  table.head = {"state",  "bits/elt", "state/seq",      "seq/GiB", "mean KL/nats [95 %]",
                "median", "99 %",     "max @ position", "top-1 %", "ppl ratio",
                "health"};
  table.left = {10};
  for (size_t s = 0; s < statistics.states.size(); ++s) {
    const StateReport& state = report.states[s];
    const KlFigures& f = statistics.states[s].all;
    const auto bytes = static_cast<double>(state.info.bytes_per_sequence);
    std::string max = number(f.kl_max) + " @ " + std::to_string(f.kl_max_position);
    if (report.documents.size() > 1 && f.kl_max_document >= 0) {
      max += " of " + report.documents[static_cast<size_t>(f.kl_max_document)].id;
    }
    table.rows.push_back(
        {state.info.name,
         state.info.bits_per_element > 0 ? format("%.3g", state.info.bits_per_element) : "-",
         bytes > 0 ? bytes_text(bytes) : "-",
         bytes > 0 ? format("%.0f", std::floor(0x1p30 / bytes)) : "-", number(f.kl) + floor_mark(f),
         number(f.kl_quantiles[kMedian].value), number(f.kl_quantiles[kQuantile99].value),
         f.kl_max_position < 0 ? "-" : max,
         std::isfinite(f.top1.value) ? format("%.2f", 100 * f.top1.value) : "-",

         std::isfinite(f.perplexity_ratio.value) ? format("%.5f", f.perplexity_ratio.value) : "-",
         health_word(health_of(report, state), f)});
  }
  return table;
}

Table bin_table(const Report& report, const KlStatistics& statistics) {
  Table table;
  table.title = "Mean KL in nats by position (bins end at ...)";
  table.head = {"state"};
  for (const Bin& bin : statistics.bins) table.head.push_back(bin.name);
  table.head.push_back("growth [95 %]");
  const int baseline = report.baseline();
  for (size_t s = 0; s < statistics.states.size(); ++s) {
    if (static_cast<int>(s) == baseline) continue;
    const StateStatistics& state = statistics.states[s];
    std::vector<std::string> row = {state.name};
    for (const KlFigures& f : state.bins) row.push_back(number(f.kl.value) + floor_mark(f));
    row.push_back(number(state.growth));
    table.rows.push_back(std::move(row));
  }
  std::vector<std::string> documents = {"documents"};
  for (size_t b = 0; b < statistics.bins.size(); ++b) {
    documents.push_back(std::to_string(
        statistics.states.empty() ? 0 : statistics.states.front().bins[b].documents));
  }
  documents.push_back(std::to_string(statistics.growth_documents));
  table.rows.push_back(std::move(documents));
  return table;
}

}  // namespace

nlohmann::ordered_json run_json(const RunInfo& run) {
  return {{"job", run.job},
          {"model", run.model},
          {"model_sha256", run.model_sha256},
          {"family", run.family},
          {"tokenizer_sha256", run.tokenizer_sha256},
          {"data", run.data},
          {"data_sha256", run.data_sha256},
          {"device", run.device},
          {"compute", run.compute},
          {"dense", run.dense},
          {"baseline", run.baseline},
          {"window", run.window},
          {"seed", run.seed},
          {"revision", run.revision},
          {"created", run.created},
          {"finished", run.finished}};
}

Table run_table(const Report& report) {
  const RunInfo& run = report.run;
  Table table;
  table.head = {"run", ""};
  table.left = {1};
  auto add = [&](const std::string& name, const std::string& value) {
    table.rows.push_back({name, value});
  };
  auto plural = [](size_t count, const std::string& noun) {
    return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
  };
  if (!report.path.empty()) add("from", report.path);
  if (!run.model_sha256.empty()) {
    add("model",
        run.model + " (" + run.family + ", sha256 " + run.model_sha256.substr(0, 12) + ")");
  } else if (!run.model.empty()) {
    add("model", run.model);
  }
  if (!report.documents.empty() || report.items.empty()) {
    int64_t positions = 0, planned = 0;
    const int baseline = report.baseline();
    if (baseline >= 0) {
      for (const StateDocument& d : report.states[static_cast<size_t>(baseline)].documents)
        positions += d.length;
    }
    for (const DocumentInfo& d : report.documents) planned += d.tokens;
    add("data",
        run.data + ", " + plural(report.documents.size(), "document") + ", " +
            std::to_string(positions) + " tokens" +
            (positions < planned ? " of " + std::to_string(planned) + " (not finished)" : ""));
  }
  std::vector<std::string> names;
  for (const ItemInfo& item : report.items) {
    if (std::find(names.begin(), names.end(), item.task) == names.end()) names.push_back(item.task);
  }
  for (const std::string& name : names) {
    const auto items =
        static_cast<size_t>(std::count_if(report.items.begin(), report.items.end(),
                                          [&](const ItemInfo& item) { return item.task == name; }));
    std::string text = name;
    for (const TaskInfo& task : run.tasks) {
      if (task.name == name)
        text += " version " + std::to_string(task.version) + " (sha256 " +
                task.sha256.substr(0, 12) + ")";
    }
    text += ", " + plural(items, "item");
    if (run.repeats > 1) text += ", " + std::to_string(run.repeats) + " answers to each";
    std::string open;
    for (const StateReport& state : report.states) {
      const auto given = static_cast<size_t>(
          std::count_if(state.answers.begin(), state.answers.end(), [&](const Answer& answer) {
            return report.items[static_cast<size_t>(answer.item)].task == name;
          }));
      const size_t asked = items * static_cast<size_t>(run.repeats);
      if (given < asked) {
        open += (open.empty() ? "" : ", ") + state.info.name + " " + std::to_string(given) +
                " of " + std::to_string(asked);
      }
    }
    if (!open.empty()) text += "; answers so far (not finished): " + open;
    add("task", text);
  }
  for (const std::string& note : run.notes) add("note", note);
  if (run.device.empty()) {
    add("answers", "imported, " + run.created);
  } else {
    add("window", std::to_string(run.window) + ", seed " + std::to_string(run.seed) + ", compute " +
                      run.compute + " on " + run.device + ", dense " + run.dense);
  }
  if (run.prompt_tokens > 0)
    add("prompt", std::to_string(run.prompt_tokens) + " tokens, outside the comparison");
  return table;
}

std::string as_text(const Table& table) {
  const std::vector<size_t> widths = widths_of(table);
  const std::vector<bool> right = right_set(table);
  std::string text = table.title.empty() ? "" : table.title + "\n";
  auto line = [&](const std::vector<std::string>& cells) {
    std::string row;
    for (size_t c = 0; c < cells.size(); ++c)
      row += (c == 0 ? "" : "  ") + padded(cells[c], widths[c], right[c]);
    row.erase(row.find_last_not_of(' ') + 1);
    text += row + "\n";
  };
  line(table.head);
  size_t total = 0;
  for (size_t c = 0; c < widths.size(); ++c) total += widths[c] + (c == 0 ? 0 : 2);
  text += std::string(total, '-') + "\n";
  for (const auto& row : table.rows) line(row);
  for (const std::string& note : table.notes) text += note + "\n";
  return text;
}

std::string as_markdown(const Table& table) {
  const std::vector<bool> right = right_set(table);
  std::string text = table.title.empty() ? "" : "**" + table.title + "**\n\n";
  auto line = [&](const std::vector<std::string>& cells) {
    text += "|";
    for (std::string cell : cells) {
      for (size_t at = 0; (at = cell.find('|', at)) != std::string::npos; at += 2)
        cell.insert(at, "\\");
      text += " " + cell + " |";
    }
    text += "\n";
  };
  line(table.head);
  text += "|";
  for (size_t c = 0; c < table.head.size(); ++c) text += right[c] ? " ---: |" : " --- |";
  text += "\n";
  for (const auto& row : table.rows) line(row);
  if (!table.notes.empty()) text += "\n";
  for (const std::string& note : table.notes) text += note + "\n";
  return text;
}

std::string number(double value) {
  if (std::isnan(value)) return "-";
  if (value == 0) return "0";
  const double magnitude = std::fabs(value);
  if (magnitude < 1e-3 || magnitude >= 1e5) return format("%.2e", value);
  const int decimals = std::clamp(2 - static_cast<int>(std::floor(std::log10(magnitude))), 0, 5);
  return format("%.*f", decimals, value);
}

std::string number(const Estimate& estimate) {
  std::string text = number(estimate.value);
  if (estimate.interval.known()) {
    text += " [" + number(estimate.interval.low) + ", " + number(estimate.interval.high) + "]";
  }
  return text;
}

std::vector<Table> kl_tables(const Report& report, const KlStatistics& statistics) {
  std::vector<Table> tables = {run_table(report), state_table(report, statistics)};
  std::vector<std::string>& notes = tables[1].notes;
  if (statistics.between_documents) {
    notes.push_back("Intervals: block bootstrap over " + std::to_string(statistics.documents) +
                    " documents and blocks of consecutive positions inside them.");
  } else {
    notes.push_back(
        "Intervals: block bootstrap inside the one document; they say nothing about other texts.");
  }
  bool marked = false;
  for (const StateStatistics& state : statistics.states) {
    marked = marked || state.all.below_floor;
    for (const KlFigures& f : state.bins) marked = marked || f.below_floor;
  }
  if (statistics.floor_state >= 0) {
    const StateStatistics& floor = statistics.states[static_cast<size_t>(statistics.floor_state)];
    notes.push_back("Floor: " + floor.name + " differs from " + report.run.baseline +
                    " by the order of the arithmetic alone (" + report.run.compute + "): mean KL " +
                    number(floor.all.kl.value) + "." +
                    (marked ? " * under 3 times the floor: not told apart from it." : ""));
  } else {
    notes.push_back("No floor row: add " + report.run.baseline +
                    "@L=1 to the states to see what arithmetic alone does.");
  }
  for (const SeedSpread& seeds : statistics.seeds) {
    notes.push_back("Seeds: " + seeds.name + ", " + std::to_string(seeds.states.size()) +
                    " seeds: mean KL " + number(seeds.mean) +
                    ", standard deviation between seeds " + number(seeds.standard_deviation) + ".");
  }
  if (!statistics.bins.empty()) {
    tables.push_back(bin_table(report, statistics));
    tables.back().notes.push_back(
        "growth: d ln(mean KL) / d ln(position) over the last octaves, of the documents that reach "
        "the end of the last bin.");
  }
  Table health = health_table(report, statistics);
  if (!health.rows.empty()) tables.push_back(std::move(health));
  return tables;
}

std::string kl_text(const Report& report, const KlStatistics& statistics) {
  std::string text;
  for (const Table& table : kl_tables(report, statistics))
    text += (text.empty() ? "" : "\n") + as_text(table);
  return text;
}

std::string kl_csv(const Report& report, const KlStatistics& statistics) {
  std::string text =
      "state,bits_per_element,bytes_per_sequence,bin,first,last,documents,reaching,positions,non_"
      "finite,kl_mean,kl_mean_low,"
      "kl_mean_high";
  for (double q : kQuantiles) text += format(",kl_p%g", 100 * q);
  text += ",kl_max,kl_max_document,kl_max_position,nll_mean,nll_mean_low,nll_mean_high";
  for (double q : kQuantiles) text += format(",nll_p%g", 100 * q);
  text +=
      ",nll_max,top1,top1_low,top1_high,perplexity,perplexity_low,perplexity_high,perplexity_ratio,"
      "perplexity_ratio_low,"
      "perplexity_ratio_high,below_floor,growth,growth_low,growth_high\n";
  auto estimate = [](const Estimate& e) {
    return "," + csv_number(e.value) + "," + csv_number(e.interval.low) + "," +
           csv_number(e.interval.high);
  };
  for (size_t s = 0; s < statistics.states.size(); ++s) {
    const StateStatistics& state = statistics.states[s];
    const StateInfo& info = report.states[s].info;
    auto line = [&](const std::string& bin, int64_t first, int64_t last, const KlFigures& f,
                    bool growth) {
      text += csv_field(info.name) + "," + csv_number(info.bits_per_element) + "," +
              std::to_string(info.bytes_per_sequence) + "," + bin + "," + std::to_string(first) +
              "," + std::to_string(last) + "," + std::to_string(f.documents) + "," +
              std::to_string(f.reaching) + "," + std::to_string(f.positions) + "," +
              std::to_string(f.non_finite) + estimate(f.kl);
      for (const Estimate& q : f.kl_quantiles) text += "," + csv_number(q.value);
      text += "," + csv_number(f.kl_max) + "," +
              (f.kl_max_document < 0
                   ? ""
                   : csv_field(report.documents[static_cast<size_t>(f.kl_max_document)].id)) +
              "," + (f.kl_max_position < 0 ? "" : std::to_string(f.kl_max_position)) +
              estimate(f.nll);
      for (const Estimate& q : f.nll_quantiles) text += "," + csv_number(q.value);
      text += "," + csv_number(f.nll_max) + estimate(f.top1) + estimate(f.perplexity) +
              estimate(f.perplexity_ratio) + "," + (f.below_floor ? "1" : "0") +
              (growth ? estimate(state.growth) : ",,,") + "\n";
    };
    line("all", 0, statistics.bins.empty() ? 0 : statistics.bins.back().last, state.all, true);
    for (size_t b = 0; b < state.bins.size(); ++b) {
      line(statistics.bins[b].name, statistics.bins[b].first, statistics.bins[b].last,
           state.bins[b], false);
    }
  }
  return text;
}

std::string kl_json(const Report& report, const KlStatistics& statistics) {
  Json json;
  json["schema"] = kSchema;
  json["run"] = run_json(report.run);
  json["documents"] = Json::array();
  for (const DocumentInfo& d : report.documents) {
    json["documents"].push_back(
        {{"id", d.id}, {"title", d.title}, {"tokens", d.tokens}, {"sha256", d.sha256}});
  }
  json["bins"] = Json::array();
  for (const Bin& bin : statistics.bins)
    json["bins"].push_back({{"name", bin.name}, {"first", bin.first}, {"last", bin.last}});
  json["between_documents"] = statistics.between_documents;
  json["growth_documents"] = statistics.growth_documents;
  json["floor"] = statistics.floor_state < 0
                      ? Json(nullptr)
                      : Json(statistics.states[static_cast<size_t>(statistics.floor_state)].name);
  json["states"] = Json::array();
  for (size_t s = 0; s < statistics.states.size(); ++s) {
    const StateStatistics& state = statistics.states[s];
    const StateReport& stored = report.states[s];
    Json one = {{"name", state.name},
                {"definition", stored.info.definition},
                {"sha256", stored.info.sha256},
                {"bits_per_element", stored.info.bits_per_element},
                {"bytes_per_sequence", stored.info.bytes_per_sequence},
                {"all", figures_json(report, state.all)},
                {"growth", estimate_json(state.growth)}};
    one["bins"] = Json::array();
    for (const KlFigures& f : state.bins) one["bins"].push_back(figures_json(report, f));
    one["growth_curve"] = Json::array();
    for (const Estimate& e : state.growth_curve) one["growth_curve"].push_back(estimate_json(e));
    one["health"] = Json::array();
    const std::vector<LayerHealth> health = stored.health();
    for (size_t l = 0; l < health.size(); ++l) {
      one["health"].push_back({{"layer", report.layers[l].index},
                               {"elements", health[l].elements},
                               {"non_finite", health[l].non_finite},
                               {"saturated", health[l].saturated},
                               {"clipped", health[l].clipped},
                               {"vanished", health[l].vanished},
                               {"first_non_finite_position", health[l].first_non_finite_position},
                               {"first_non_finite_head", health[l].first_non_finite_head}});
    }
    json["states"].push_back(std::move(one));
  }
  json["seeds"] = Json::array();
  for (const SeedSpread& seeds : statistics.seeds) {
    json["seeds"].push_back({{"name", seeds.name},
                             {"count", seeds.states.size()},
                             {"kl_mean", optional(seeds.mean)},
                             {"standard_deviation", optional(seeds.standard_deviation)}});
  }
  return json.dump(2) + "\n";
}

}  // namespace replayeval
