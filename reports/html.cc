#include "reports/html.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "reports/answer_statistics.h"
#include "reports/answer_tables.h"
#include "reports/bootstrap.h"
#include "reports/flips.h"
#include "reports/tables.h"
#include "reports/text.h"

// Files of this folder and plotly.js, embedded by page_files.S.
extern "C" {
extern const char replayeval_page_css_begin[], replayeval_page_css_end[];
extern const char replayeval_page_js_begin[], replayeval_page_js_end[];
extern const char replayeval_plotly_js_begin[], replayeval_plotly_js_end[];
}

namespace replayeval {
namespace {

using Json = nlohmann::ordered_json;

// Cells of positions an octave: of the curve with intervals, and of the detailed one.
constexpr int kCoarse = 2;
constexpr int kFine = 16;
// Positions before this one are a single cell of the coarse curve.
constexpr int64_t kFirstCell = 16;
// Flipped answers listed of each state.
constexpr size_t kFlipsShown = 12;
// Points of the exceedance curve a decade of probability.
constexpr int kTailPoints = 24;

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

/// 1234567 as "1,234,567".
std::string grouped(int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > (value < 0 ? 1 : 0); at -= 3)
    digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string plural(int64_t count, const std::string& noun) {
  return grouped(count) + " " + noun + (count == 1 ? "" : "s");
}

/// A number with five significant digits, null where there is none.
Json shown(double value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(format("%.5g", value).c_str(), nullptr);
}

// ---- curves over positions ----

/// Cells that cover [0, longest), `per_octave` to a doubling of the number of tokens seen, each at
/// least one position wide; what lies below `first` is one cell.
std::vector<Bin> log_cells(int64_t longest, int per_octave, int64_t first) {
  std::vector<Bin> cells;
  int64_t begin = 0;
  for (int k = 0; begin < longest; ++k) {
    const auto end = static_cast<int64_t>(
        std::llround(static_cast<double>(first) * std::exp2(static_cast<double>(k) / per_octave)));
    if (end <= begin) continue;
    cells.push_back({"", begin, std::min(end, longest)});
    begin = end;
  }
  return cells;
}

/// The documents that the curves are of: those that reach the last bin, all when none does.
std::vector<size_t> curve_documents(const Report& report, int64_t longest) {
  std::vector<size_t> reaching, all;
  for (size_t d = 0; d < report.documents.size(); ++d) {
    all.push_back(d);
    const bool reaches =
        std::all_of(report.states.begin(), report.states.end(),
                    [&](const StateReport& s) { return s.documents[d].length == longest; });
    if (reaches) reaching.push_back(d);
  }
  return reaching.empty() ? all : reaching;
}

/// Means with intervals: {"first", "last", "states": [{"kl", "kl_low", "kl_high", "top1", ...}]}.
/// A cell with too few positions for a block bootstrap has no interval.
Json coarse_curves(const Report& report, const std::vector<size_t>& documents, int64_t longest) {
  enum Column : size_t { kKl, kKlCount, kTop1, kTop1Count, kColumns };
  const std::vector<Bin> cells = log_cells(longest, kCoarse, kFirstCell);
  const size_t states = report.states.size(), columns = states * kColumns;
  BlockSums sums;
  sums.columns = static_cast<int>(columns);
  sums.cells = static_cast<int>(cells.size());
  for (size_t d : documents) {
    std::vector<BlockSums::Cell> parts(cells.size());
    for (size_t c = 0; c < cells.size(); ++c) {
      int64_t begin = cells[c].last, end = 0;
      for (const StateReport& state : report.states) {
        begin = std::min(begin, std::max(cells[c].first, state.documents[d].first_position));
        end = std::max(end, std::min(cells[c].last, state.documents[d].length));
      }
      if (begin >= end) continue;
      BlockSums::Cell& part = parts[c];
      part.blocks = std::max<int64_t>(1, block_count(end - begin));
      part.sums.assign(static_cast<size_t>(part.blocks) * columns, 0.0);
      for (int64_t b = 0; b < part.blocks; ++b) {
        const int64_t first = begin + (end - begin) * b / part.blocks;
        const int64_t last = begin + (end - begin) * (b + 1) / part.blocks;
        for (size_t s = 0; s < states; ++s) {
          const StateDocument& values = report.states[s].documents[d];
          double* mine = part.sums.data() + static_cast<size_t>(b) * columns + s * kColumns;
          for (int64_t t = std::max(first, values.first_position);
               t < std::min(last, values.length); ++t) {
            const auto i = static_cast<size_t>(t);
            if (std::isfinite(values.kl[i])) {
              mine[kKl] += static_cast<double>(values.kl[i]);
              mine[kKlCount] += 1;
            }
            if (values.top1[i] != kNoTop1) {
              mine[kTop1] += values.top1[i];
              mine[kTop1Count] += 1;
            }
          }
        }
      }
    }
    sums.documents.push_back(std::move(parts));
  }
  const Evaluate evaluate = [&](std::span<const double> totals, std::span<double> out) {
    for (size_t i = 0; i < cells.size() * states; ++i) {
      out[2 * i] = totals[i * kColumns + kKl] / totals[i * kColumns + kKlCount];
      out[2 * i + 1] = totals[i * kColumns + kTop1] / totals[i * kColumns + kTop1Count];
    }
  };
  const StatisticsOptions options;
  const Bootstrap draws = bootstrap(sums, static_cast<int>(2 * cells.size() * states), evaluate,
                                    options.seed, options.replicates);
  Json out = {{"first", Json::array()}, {"last", Json::array()}, {"states", Json::array()}};
  for (const Bin& cell : cells) {
    out["first"].push_back(cell.first);
    out["last"].push_back(cell.last);
  }
  for (size_t s = 0; s < states; ++s) {
    Json one;
    for (size_t c = 0; c < cells.size(); ++c) {
      const auto at = static_cast<int>(2 * (c * states + s));
      const bool resampled =
          sums.documents.size() > 1 || block_count(cells[c].last - cells[c].first) > 0;
      const Interval kl = resampled ? interval(draws, at, Scale::logarithm) : Interval();
      const Interval top1 = resampled ? interval(draws, at + 1, Scale::linear) : Interval();
      one["kl"].push_back(shown(draws.estimate[static_cast<size_t>(at)]));
      one["kl_low"].push_back(shown(kl.low));
      one["kl_high"].push_back(shown(kl.high));
      one["top1"].push_back(shown(draws.estimate[static_cast<size_t>(at) + 1]));
      one["top1_low"].push_back(shown(std::max(0.0, top1.low)));
      one["top1_high"].push_back(shown(top1.known() ? std::min(1.0, top1.high) : top1.high));
      if (!top1.known()) one["top1_low"].back() = nullptr;
    }
    out["states"].push_back(std::move(one));
  }
  return out;
}

/// Mean, extremes and their places in narrow cells: {"first", "last", "states": [{"mean", "min",
/// "max", "at", "of"}]}.
Json fine_curves(const Report& report, const std::vector<size_t>& documents, int64_t longest) {
  const std::vector<Bin> cells = log_cells(longest, kFine, 1);
  Json out = {{"first", Json::array()}, {"last", Json::array()}, {"states", Json::array()}};
  for (const Bin& cell : cells) {
    out["first"].push_back(cell.first);
    out["last"].push_back(cell.last);
  }
  for (const StateReport& state : report.states) {
    Json one;
    for (const Bin& cell : cells) {
      double sum = 0, count = 0;
      float low = 0, high = 0;
      int64_t at = -1;
      size_t of = 0;
      for (size_t d : documents) {
        const StateDocument& values = state.documents[d];
        for (int64_t t = std::max(cell.first, values.first_position);
             t < std::min(cell.last, values.length); ++t) {
          const float kl = values.kl[static_cast<size_t>(t)];
          if (!std::isfinite(kl)) continue;
          sum += static_cast<double>(kl);
          count += 1;
          if (at < 0 || kl < low) low = kl;
          if (at < 0 || kl > high) {
            high = kl;
            at = t;
            of = d;
          }
        }
      }
      one["mean"].push_back(shown(sum / count));
      one["min"].push_back(at < 0 ? Json(nullptr) : shown(static_cast<double>(low)));
      one["max"].push_back(at < 0 ? Json(nullptr) : shown(static_cast<double>(high)));
      one["at"].push_back(at);
      if (documents.size() > 1) one["of"].push_back(of);
    }
    out["states"].push_back(std::move(one));
  }
  return out;
}

/// Exceedance of the KL of a state: the k-th largest of n values against k / n, k on a logarithmic
/// grid down to the maximum.
Json exceedance(const StateReport& state) {
  std::vector<float> values;
  for (const StateDocument& d : state.documents) {
    for (int64_t t = d.first_position; t < d.length; ++t) {
      const float kl = d.kl[static_cast<size_t>(t)];
      if (std::isfinite(kl)) values.push_back(kl);
    }
  }
  std::sort(values.begin(), values.end(), std::greater<>());
  Json out = {{"kl", Json::array()}, {"share", Json::array()}};
  const auto n = static_cast<double>(values.size());
  size_t previous = 0;
  for (int i = 0; previous < values.size(); ++i) {
    const auto k = static_cast<size_t>(
        std::min(n, std::round(std::pow(10.0, static_cast<double>(i) / kTailPoints))));
    if (k == previous) continue;
    out["kl"].push_back(shown(static_cast<double>(values[k - 1])));
    out["share"].push_back(shown(static_cast<double>(k) / n));
    previous = k;
  }
  return out;
}

// ---- state error by layer and head ----

/// Mean over documents and samples of the error of every head, [layers][heads]; null beyond a
/// layer's heads. Empty when no sample has a value.
Json error_map(const Report& report, const StateReport& state, size_t heads,
               const std::vector<float> StateDocument::*member, int64_t* samples) {
  const size_t layers = report.layers.size(), width = layers * heads;
  std::vector<double> sum(width, 0), count(width, 0);
  *samples = 0;
  for (const StateDocument& d : state.documents) {
    const std::vector<float>& values = d.*member;
    if (width == 0 || values.size() != d.error_positions.size() * width) continue;
    *samples += static_cast<int64_t>(d.error_positions.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (!std::isfinite(values[i])) continue;
      sum[i % width] += static_cast<double>(values[i]);
      count[i % width] += 1;
    }
  }
  Json map = Json::array();
  if (std::all_of(count.begin(), count.end(), [](double n) { return n == 0; })) return map;
  for (size_t l = 0; l < layers; ++l) {
    Json row = Json::array();
    for (size_t h = 0; h < heads; ++h)
      row.push_back(shown(sum[l * heads + h] / count[l * heads + h]));
    map.push_back(std::move(row));
  }
  return map;
}

Json error_maps(const Report& report) {
  size_t heads = 0;
  for (const LayerInfo& layer : report.layers)
    heads = std::max(heads, static_cast<size_t>(std::max(0, layer.heads)));
  Json out = {{"layers", Json::array()}, {"maps", Json::array()}};
  for (const LayerInfo& layer : report.layers) {
    Json decay = Json::array();
    for (float value : layer.mean_decay) decay.push_back(shown(static_cast<double>(value)));
    out["layers"].push_back(
        {{"index", layer.index}, {"kind", layer.kind}, {"heads", layer.heads}, {"decay", decay}});
  }
  for (size_t s = 0; s < report.states.size(); ++s) {
    if (static_cast<int>(s) == report.baseline()) continue;
    const StateReport& state = report.states[s];
    for (const bool read : {false, true}) {
      int64_t samples = 0;
      Json map = error_map(report, state, heads,
                           read ? &StateDocument::error_read : &StateDocument::error, &samples);
      if (map.empty()) continue;
      const std::string role = state.info.read.empty() ? "" : read ? "read" : "recurrence";
      out["maps"].push_back(
          {{"state", s}, {"role", role}, {"samples", samples}, {"error", std::move(map)}});
    }
  }
  return out;
}

// ---- answers ----

/// {"answers", "correct", "low", "high", "truncated", "without", "change", ...}; percent, points.
Json counts_json(const AnswerRow* row) {
  if (row == nullptr) return nullptr;
  const AnswerFigures& f = row->figures;
  const auto n = static_cast<double>(f.answers);
  auto percent = [&](int64_t part) { return shown(100.0 * static_cast<double>(part) / n); };
  Json out = {{"answers", f.answers},
              {"correct", percent(f.correct)},
              {"low", shown(100 * f.accuracy.low)},
              {"high", shown(100 * f.accuracy.high)},
              {"truncated", f.finish_known ? percent(f.truncated) : Json(nullptr)},
              {"without", percent(f.missing)}};
  if (row->against_baseline) {
    const PairedFigures& p = *row->against_baseline;
    out["change"] = shown(100 * p.change);
    out["change_low"] = shown(100 * p.interval.low);
    out["change_high"] = shown(100 * p.interval.high);
    out["lost"] = p.lost;
    out["gained"] = p.gained;
    out["p"] = shown(p.p);
  }
  return out;
}

/// {"tasks": [{"name", "lengths": ["8-12", ...], "states": [{"state", "all", "quartiles": [4]}]}]}
Json answers_json(const Report& report, const AnswerStatistics& statistics) {
  Json tasks = Json::array();
  for (const std::string& task : statistics.tasks) {
    Json one = {{"name", task}, {"lengths", Json::array()}, {"states", Json::array()}};
    for (const LengthQuartiles& quartiles : statistics.quartiles) {
      if (quartiles.task != task) continue;
      for (const auto& [first, last] : quartiles.tokens)
        one["lengths"].push_back(std::to_string(first) + "\u2013" + std::to_string(last));
    }
    for (size_t s = 0; s < report.states.size(); ++s) {
      const int state = static_cast<int>(s);
      const AnswerRow* all = statistics.find(task, state, AnswerGroup::all, "");
      if (all == nullptr) continue;
      Json figures = {{"state", s}, {"all", counts_json(all)}, {"quartiles", Json::array()}};
      for (int q = 1; q <= 4 && !one["lengths"].empty(); ++q) {
        figures["quartiles"].push_back(counts_json(
            statistics.find(task, state, AnswerGroup::length, "Q" + std::to_string(q))));
      }
      one["states"].push_back(std::move(figures));
    }
    tasks.push_back(std::move(one));
  }
  return {{"tasks", std::move(tasks)}};
}

/// Flips with at most kFlipsShown rows a state; a task marked private shows neither tokens nor
/// texts.
Table shown_flips(const Report& report) {
  std::vector<Flip> flips = find_flips(report, report.documents.empty() ? nullptr : &report);
  std::map<int, size_t> counts;
  size_t left_out = 0;
  std::vector<Flip> kept;
  for (Flip& flip : flips) {
    if (counts[flip.state]++ < kFlipsShown) {
      kept.push_back(std::move(flip));
    } else {
      ++left_out;
    }
  }
  Table table = flips_table(report, kept, false);
  if (left_out > 0) {
    table.notes.push_back(plural(static_cast<int64_t>(left_out), "more flip") +
                          " are not listed; replayeval show --flips lists all.");
  }
  return table;
}

// ---- the summary in words ----

std::string bits_text(const StateInfo& info) {
  return info.bits_per_element > 0 ? format("%.3g bits an element", info.bits_per_element)
                                   : std::string("size unknown");
}

std::string code(const std::string& text) { return "<code>" + escaped(text) + "</code>"; }

/// Names in a sentence, the first three of more than four.
std::string listed(const std::vector<std::string>& names) {
  std::string text;
  if (names.size() > 4) {
    for (size_t i = 0; i < 3; ++i) text += code(names[i]) + ", ";
    return text + "and " + std::to_string(names.size() - 3) + " more";
  }
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + code(names[i]);
  return text;
}

/// Numbers whose exponents do not break over lines.
std::string unbroken(std::string text) {
  for (size_t at = 0; (at = text.find("e-", at)) != std::string::npos;)
    text.replace(at, 2, "e\u2011");
  return text;
}

/// What the run found, in sentences, from its statistics alone.
std::string summary(const Report& report, const KlStatistics& statistics,
                    const AnswerStatistics& answers) {
  std::string text;
  std::vector<size_t> states;  // those that are measured against the baseline
  std::vector<std::string> growing, non_finite, under;
  bool growth_known = false;
  int64_t positions = 0;
  for (size_t s = 0; s < statistics.states.size(); ++s) {
    const KlFigures& f = statistics.states[s].all;
    positions = std::max(positions, f.positions + f.non_finite);
    if (static_cast<int>(s) == report.baseline()) continue;
    uint64_t bad = static_cast<uint64_t>(f.non_finite);
    for (const LayerHealth& health : report.states[s].health()) bad += health.non_finite;
    if (bad > 0) non_finite.push_back(report.states[s].info.name);
    if (static_cast<int>(s) == statistics.floor_state || !std::isfinite(f.kl.value)) continue;
    states.push_back(s);
    const Estimate& growth = statistics.states[s].growth;
    growth_known = growth_known || growth.interval.known();
    if (growth.interval.low > 0) growing.push_back(report.states[s].info.name);
    if (f.below_floor) under.push_back(report.states[s].info.name);
  }
  auto kl = [&](size_t s) { return statistics.states[s].all.kl.value; };
  auto info = [&](size_t s) -> const StateInfo& { return report.states[s].info; };
  if (!states.empty()) {
    const auto [least, most] = std::minmax_element(
        states.begin(), states.end(), [&](size_t a, size_t b) { return kl(a) < kl(b); });
    text += "Over " + plural(positions, "position") + " of " +
            plural(statistics.documents, "document") + ", the mean KL divergence from " +
            code(report.run.baseline) + " ";
    if (*least == *most) {
      text += "is " + unbroken(number(kl(*least))) + " nats with " + code(info(*least).name) +
              " (" + bits_text(info(*least)) + "). ";
    } else {
      text += "runs from " + unbroken(number(kl(*least))) + " nats with " +
              code(info(*least).name) + " (" + bits_text(info(*least)) + ") to " +
              unbroken(number(kl(*most))) + " with " + code(info(*most).name) + " (" +
              bits_text(info(*most)) + "). ";
    }
    const size_t smallest =
        *std::min_element(states.begin(), states.end(), [&](size_t a, size_t b) {
          const double x = info(a).bits_per_element, y = info(b).bits_per_element;
          return x != y ? x < y : kl(a) < kl(b);
        });
    const KlFigures& last = statistics.states[smallest].bins.back();
    const Bin& bin = statistics.bins.back();
    if (std::isfinite(last.kl.value)) {
      text += "In the last position bin (" + grouped(bin.first) + " to " + grouped(bin.last - 1) +
              ") the smallest state" + (states.size() > 1 ? ", " + code(info(smallest).name) : "") +
              ", stands at " + unbroken(number(last.kl)) +
              " nats and keeps the baseline's most likely token at " +
              format("%.2f", 100 * last.top1.value) + " % of positions. ";
    }
    if (growth_known) {
      text += growing.empty()
                  ? "No state's KL is shown to grow with position over the last octaves. "
                  : "KL is shown to grow with position over the last octaves for " +
                        listed(growing) + ". ";
    }
    if (statistics.floor_state >= 0) {
      const Estimate& floor = statistics.states[static_cast<size_t>(statistics.floor_state)].all.kl;
      text += under.empty()
                  ? "Every state lies above three times the floor of the arithmetic itself (" +
                        unbroken(number(floor.value)) + " nats). "
                  : listed(under) + (under.size() == 1 ? " is" : " are") +
                        " not told apart from the floor of the arithmetic itself (" +
                        unbroken(number(floor.value)) + " nats). ";
    }
  }
  if (!answers.rows.empty()) {
    std::vector<std::pair<double, std::string>> shares;  // of correct answers, in percent
    std::string baseline;
    std::vector<std::string> losing;
    for (size_t s = 0; s < report.states.size(); ++s) {
      int64_t correct = 0, given = 0;
      bool lost = false;
      for (const AnswerRow& row : answers.rows) {
        if (row.state != static_cast<int>(s) || row.by != AnswerGroup::all) continue;
        correct += row.figures.correct;
        given += row.figures.answers;
        lost = lost || (row.against_baseline && row.against_baseline->change < 0 &&
                        row.against_baseline->p < kShownBelow);
      }
      if (given == 0) continue;
      const double share = 100.0 * static_cast<double>(correct) / static_cast<double>(given);
      if (static_cast<int>(s) == report.baseline()) {
        baseline = format("%.1f", share);
      } else {
        shares.emplace_back(share, report.states[s].info.name);
        if (lost) losing.push_back(report.states[s].info.name);
      }
    }
    size_t asked = 0, given = 0;
    for (const StateReport& state : report.states) {
      if (state.answers.empty()) continue;  // of another job
      asked += report.items.size() * static_cast<size_t>(std::max(1, report.run.repeats));
      given += state.answers.size();
    }
    if (given < asked) {
      text += "<strong>Not finished: " + std::to_string(given) + " of " + std::to_string(asked) +
              " answers are there; the figures are of those.</strong> ";
    }
    text += "Over " + plural(static_cast<int64_t>(report.items.size()), "item") + ", ";
    if (!baseline.empty())
      text += code(report.run.baseline) + " answers " + baseline + " % correctly" +
              (shares.empty() ? ". " : ", ");
    if (shares.size() == 1) {
      text += code(shares[0].second) + " " + format("%.1f", shares[0].first) + " %. ";
    } else if (!shares.empty()) {
      const auto [worst, best] = std::minmax_element(shares.begin(), shares.end());
      text += "the states between " + format("%.1f", worst->first) + " % (" + code(worst->second) +
              ") and " + format("%.1f", best->first) + " % (" + code(best->second) + "). ";
    }
    if (!shares.empty() && !baseline.empty()) {
      text += losing.empty() ? "No state is shown to lose accuracy (exact McNemar, p < 0.01). "
                             : listed(losing) + (losing.size() == 1 ? " is" : " are") +
                                   " shown to lose accuracy (exact McNemar, p < 0.01). ";
    }
  }
  for (size_t d = 0; d < report.documents.size(); ++d) {
    int64_t shortest = report.documents[d].tokens;
    for (const StateReport& state : report.states)
      shortest = std::min(shortest, state.documents[d].length);
    if (shortest < report.documents[d].tokens) {
      text += "<strong>Not finished: " + std::to_string(shortest) + " of " +
              std::to_string(report.documents[d].tokens) + " positions of document " +
              escaped(report.documents[d].id) + ".</strong> ";
    }
  }
  if (!non_finite.empty()) {
    text += "<strong>Non-finite values occurred with " + listed(non_finite) +
            "</strong>; they are "
            "counted and left out of every mean. ";
  } else if (!states.empty()) {
    text += "No state or logit became non-finite. ";
  }
  if (!states.empty() && !statistics.between_documents) {
    text += "With one document, the intervals say nothing about other texts.";
  }
  return text.empty() ? "This run has no finished position and no answer yet." : text;
}

// ---- parts of the page ----

std::string table_html(const Table& table) {
  std::vector<bool> left(table.head.size(), false);
  if (!left.empty()) left[0] = true;
  for (size_t c : table.left) {
    if (c < left.size()) left[c] = true;
  }
  std::string html = "<div class=\"table\" tabindex=\"0\"><table>\n";
  if (!table.title.empty()) html += "<caption>" + escaped(table.title) + "</caption>\n";
  auto row = [&](const std::vector<std::string>& cells, bool head) {
    html += "<tr>";
    for (size_t c = 0; c < cells.size(); ++c) {
      const bool header = head || c == 0;
      html += std::string(header ? "<th" : "<td") +
              (head     ? " scope=\"col\""
               : header ? " scope=\"row\""
                        : "") +
              (c < left.size() && left[c] ? " class=\"left\"" : "") + ">" + escaped(cells[c]) +
              (header ? "</th>" : "</td>");
    }
    html += "</tr>\n";
  };
  const bool any_head =
      std::any_of(table.head.begin() + (table.head.empty() ? 0 : 1), table.head.end(),
                  [](const std::string& text) { return !text.empty(); });
  if (any_head) {
    html += "<thead>";
    row(table.head, true);
    html += "</thead>\n";
  }
  html += "<tbody>";
  for (const auto& cells : table.rows) row(cells, false);
  html += "</tbody></table></div>\n";
  for (const std::string& note : table.notes)
    html += "<p class=\"note\">" + escaped(note) + "</p>\n";
  return html;
}

std::string hash_html(const std::string& hash) {
  return hash.empty() ? "<span class=\"muted\">none</span>"
                      : "<code class=\"hash\">" + escaped(hash) + "</code>";
}

std::string provenance(const Report& report) {
  const RunInfo& run = report.run;
  std::string html =
      "<div class=\"table\" tabindex=\"0\"><table class=\"wide\"><caption>Where these figures come "
      "from</caption><tbody>\n";
  auto line = [&](const std::string& name, const std::string& value) {
    html += "<tr><th scope=\"row\" class=\"left\">" + escaped(name) + "</th><td class=\"left\">" +
            value + "</td></tr>\n";
  };
  auto hashed = [&](const std::string& name, const std::string& text, const std::string& hash) {
    line(name, escaped(text) + "<br>" + hash_html(hash));
  };
  hashed("model", run.model + (run.family.empty() ? "" : " (" + run.family + ")"),
         run.model_sha256);
  hashed("tokenizer", run.tokenizer, run.tokenizer_sha256);
  for (const TaskInfo& task : run.tasks) {
    hashed("task " + task.name,
           "version " + std::to_string(task.version) + (task.private_data ? ", private" : ""),
           task.sha256);
  }
  hashed("data", run.data, run.data_sha256);
  for (const DocumentInfo& d : report.documents) {
    hashed("document " + d.id, (d.title.empty() ? "" : d.title + ", ") + plural(d.tokens, "token"),
           d.sha256);
  }
  for (const StateReport& state : report.states) {
    line("state " + state.info.name, hash_html(state.info.sha256));
  }
  line("program", "revision " + code(run.revision) + ", " + escaped(run.compiler));
  std::string versions;
  for (const auto& [library, version] : run.versions)
    versions += (versions.empty() ? "" : ", ") + library + " " + version;
  if (!versions.empty()) line("libraries", escaped(versions));
  for (const std::string& note : run.notes) line("note", escaped(note));
  if (!run.device.empty()) {
    line("device", escaped(run.device + ", compute " + run.compute + ", dense " + run.dense + ", " +
                           plural(run.threads, "thread")));
  }
  line("seed", std::to_string(run.seed));
  line("created", escaped(run.created));
  line("finished", escaped(run.finished.empty() ? "-" : run.finished));
  html += "</tbody></table></div>\n";

  html += "<details><summary>Definitions of the states</summary>\n";
  for (const StateReport& state : report.states) {
    const StateInfo& info = state.info;
    html += "<h4>" + code(info.name) + "</h4><p class=\"note\">" + escaped(bits_text(info)) +
            (info.bytes_per_sequence > 0
                 ? ", " + plural(info.bytes_per_sequence, "byte") + " a sequence"
                 : std::string()) +
            ", sha256 " + hash_html(info.sha256) + "</p><pre>" + escaped(info.definition) +
            "</pre>\n";
  }
  // The definition of a private task may quote its items.
  if (std::any_of(run.tasks.begin(), run.tasks.end(), [](auto& t) { return !t.private_data; })) {
    html += "</details>\n<details><summary>Definitions of the tasks</summary>\n";
    for (const TaskInfo& task : run.tasks) {
      if (!task.private_data)
        html += "<h4>" + code(task.name) + "</h4><pre>" + escaped(task.definition) + "</pre>\n";
    }
  }
  html +=
      "</details>\n<details class=\"printed\"><summary>The resolved experiment</summary>\n<pre>" +
      escaped(run.experiment) + "</pre></details>\n";
  return html;
}

std::string figure(const std::string& id, const std::string& title, const std::string& text,
                   const std::string& controls = {}, const std::string& kind = {}) {
  return "<figure class=\"panel" + (kind.empty() ? "" : " " + kind) + "\">\n<figcaption><h3>" +
         title + "</h3><p>" + text + "</p></figcaption>\n" + controls +
         "<div class=\"plot\" id=\"" + id + "\"></div>\n</figure>\n";
}

std::string choice(const std::string& name, const std::string& label,
                   const std::vector<std::pair<std::string, std::string>>& options) {
  std::string html = "<div class=\"segments\" role=\"group\" aria-label=\"" + label +
                     "\" data-choice=\"" + name + "\">";
  for (size_t i = 0; i < options.size(); ++i) {
    html += "<button type=\"button\" data-value=\"" + options[i].first + "\" aria-pressed=\"" +
            (i == 0 ? "true" : "false") + "\">" + options[i].second + "</button>";
  }
  return html + "</div>";
}

std::string embedded(const char* begin, const char* end) {
  return {begin, static_cast<size_t>(end - begin)};
}

// ---- redaction ----

/// Letters for formats in the order of their appearance; fp32 keeps its name.
class FormatLetters {
 public:
  std::string of(const std::string& format) {
    if (format.empty() || format == "fp32") return format;
    const auto [place, fresh] = letters_.emplace(format, "");
    if (fresh) {
      size_t n = letters_.size() - 1;
      do {
        place->second.insert(0, 1, static_cast<char>('A' + n % 26));
        n = n / 26;
      } while (n-- > 0);
    }
    return place->second;
  }

  /// "mine+sr/fp8@L=1" as "A+sr/B@L=1".
  std::string state(const std::string& name) {
    const size_t modifiers = std::min(name.find('@'), name.size());
    std::string out;
    for (size_t begin = 0; begin <= modifiers;) {
      const size_t end = std::min(name.find('/', begin), modifiers);
      const std::string role = name.substr(begin, end - begin);
      const size_t rounding = std::min(role.find('+'), role.size());
      out += (begin == 0 ? "" : "/") + of(role.substr(0, rounding)) + role.substr(rounding);
      begin = end + 1;
    }
    return out + name.substr(modifiers);
  }

 private:
  std::map<std::string, std::string> letters_;
};

/// The experiment without the keys that can name or define a format.
std::string redacted_experiment(const std::string& text) {
  constexpr const char* kHidden = "(redacted)";
  try {
    const YAML::Node root = YAML::Load(text);
    YAML::Emitter out;
    out << YAML::BeginMap;
    for (const auto& entry : root) {
      const std::string key = entry.first.Scalar();
      out << YAML::Key << key << YAML::Value;
      if (key == "formats" || key == "states" || key == "baseline" || key == "out" ||
          key == "include" || key == "snapshots" || key == "import") {
        out << kHidden;
      } else {
        out << entry.second;
      }
    }
    out << YAML::EndMap;
    return std::string(out.c_str()) + "\n";
  } catch (const YAML::Exception&) {
    return std::string(kHidden) + "\n";
  }
}

}  // namespace

void redact_formats(Report* report, KlStatistics* statistics) {
  FormatLetters letters;
  report->path.clear();
  report->run.experiment = redacted_experiment(report->run.experiment);
  report->run.baseline = letters.state(report->run.baseline);
  for (StateReport& state : report->states) {
    StateInfo& info = state.info;
    info.name = letters.state(info.name);
    info.recurrence = letters.of(info.recurrence);
    info.read = letters.of(info.read);
    info.definition = "(redacted)";
    info.sha256.clear();
    info.options.clear();
  }
  for (StateStatistics& state : statistics->states) state.name = letters.state(state.name);
  for (SeedSpread& seeds : statistics->seeds) seeds.name = letters.state(seeds.name);
}

std::string report_html(const Report& original, const KlStatistics& figures,
                        const HtmlOptions& options) {
  Report copy;
  KlStatistics copied;
  if (options.redact_formats) {
    copy = original;
    copied = figures;
    redact_formats(&copy, &copied);
  }
  const Report& report = options.redact_formats ? copy : original;
  const KlStatistics& statistics = options.redact_formats ? copied : figures;
  const RunInfo& run = report.run;
  const bool curves = !statistics.bins.empty();

  Json data;
  data["baseline"] = report.baseline();
  data["baseline_name"] = run.baseline;
  data["floor"] = statistics.floor_state;
  data["states"] = Json::array();
  for (size_t s = 0; s < report.states.size(); ++s) {
    const StateInfo& info = report.states[s].info;
    Json state = {
        {"name", info.name},
        {"separate", !info.read.empty()},
        {"bits", info.bits_per_element > 0 ? shown(info.bits_per_element) : Json(nullptr)},
        {"bytes", info.bytes_per_sequence}};
    if (curves) {
      const KlFigures& last = statistics.states[s].bins.back();
      state["last"] = {{"kl", shown(last.kl.value)},
                       {"low", shown(last.kl.interval.low)},
                       {"high", shown(last.kl.interval.high)}};
      state["exceedance"] = exceedance(report.states[s]);
    }
    data["states"].push_back(std::move(state));
  }
  data["documents"] = Json::array();
  for (const DocumentInfo& d : report.documents) data["documents"].push_back(d.id);
  int64_t longest = 0;
  std::vector<size_t> documents;
  if (curves) {
    longest = statistics.bins.back().last;
    documents = curve_documents(report, longest);
    data["last_bin"] = {{"name", statistics.bins.back().name},
                        {"first", statistics.bins.back().first},
                        {"last", statistics.bins.back().last}};
    data["coarse"] = coarse_curves(report, documents, longest);
    data["fine"] = fine_curves(report, documents, longest);
  }
  const Json errors = error_maps(report);
  const bool sampled = !errors["maps"].empty();
  if (sampled) data["errors"] = errors;
  const bool answers = has_answers(report);
  AnswerStatistics graded;
  if (answers) {
    graded = answer_statistics(report);
    data["answers"] = answers_json(report, graded);
  }

  const std::string base = code(run.baseline);
  std::string html =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src "
      "'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">\n"
      "<meta name=\"generator\" content=\"ReplayEval\">\n<title>" +
      escaped(run.model) + ": state precision</title>\n<style>\n" +
      embedded(replayeval_page_css_begin, replayeval_page_css_end) + "</style>\n</head>\n<body>\n";
  const std::string subject =
      run.model.empty() ? "the model" : "<span class=\"model\">" + escaped(run.model) + "</span>";
  html += "<header>\n<div class=\"top\"><p class=\"eyebrow\">ReplayEval report" +
          std::string(options.redact_formats ? ", formats redacted" : "") + "</p>" +
          choice("theme", "Colours", {{"auto", "Auto"}, {"light", "Light"}, {"dark", "Dark"}}) +
          "</div>\n<h1>" +
          (run.device.empty() && answers
               ? "How well does " + subject + " answer?"
               : "How far does " + subject + " move when its state is stored in low precision?") +
          "</h1>\n<p class=\"lead\">" + summary(report, statistics, graded) +
          "</p>\n<dl class=\"facts\">";
  auto fact = [&](const std::string& name, const std::string& value) {
    html += "<div><dt>" + name + "</dt><dd>" + escaped(value) + "</dd></div>";
  };
  if (!run.family.empty()) fact("Family", run.family);
  fact("Data", run.data);
  if (!report.documents.empty() || !answers)
    fact("Tokens", std::to_string(report.documents.size()) + " × " + grouped(longest));
  if (answers) {
    fact("Items", grouped(static_cast<int64_t>(report.items.size())) +
                      (run.repeats > 1 ? " × " + std::to_string(run.repeats) : ""));
  }
  if (!run.device.empty()) {
    fact("Window L", std::to_string(run.window));
    fact("Seed", std::to_string(run.seed));
    fact("Arithmetic", run.compute + " on " + run.device + ", dense " + run.dense);
  }
  if (!run.created.empty()) fact("Run", run.created.substr(0, 10));
  html += "</dl>\n</header>\n<main>\n";
  html +=
      "<nav class=\"states\" aria-label=\"States shown\"><span class=\"hint\">States</span><div "
      "id=\"chips\"></div>"
      "<button type=\"button\" id=\"all\" class=\"plain\">Show all</button></nav>\n"
      "<noscript><p class=\"note\">The charts need JavaScript; the tables below do "
      "not.</p></noscript>\n";

  if (curves) {
    const std::string which =
        documents.size() < report.documents.size()
            ? " Of the " + plural(static_cast<int64_t>(documents.size()), "document") +
                  " that reach" + (documents.size() == 1 ? "es" : "") + " the last position."
            : "";
    html += figure(
        "drift", "KL divergence against position",
        "Nats between the next-token distributions of " + base +
            " and of each state, after so many tokens. Lower is better. Half-octave means with 95 "
            "% "
            "intervals where a cell holds enough positions for one; nothing is drawn where KL is "
            "0, "
            "as it is until a state is first encoded." +
            (statistics.floor_state >= 0
                 ? " The dotted grey line is the floor: the same formats, another order of "
                   "arithmetic."
                 : "") +
            which,
        "<div class=\"controls\">" +
            choice("view", "What is drawn",
                   {{"mean", "Means, 95 %"}, {"fine", "Fine means"}, {"extremes", "Maxima"}}) +
            choice("axis", "Position axis", {{"log", "log"}, {"linear", "linear"}}) + "</div>\n",
        "full");
    html += "<div class=\"pair\">\n";
    html += figure("top1", "Top-1 agreement",
                   "Share of positions, in percent, where a state's most likely token is that of " +
                       base + ". Higher is better.");
    html += figure("tail", "KL distribution",
                   "Share of positions whose KL reaches a value; the right end of a line is the "
                   "worst position.");
    html += figure("pareto", "Size against drift",
                   "Bits a state element, all checkpoints and scales together, against mean KL in "
                   "the last position bin (" +
                       grouped(statistics.bins.back().first) + " to " +
                       grouped(statistics.bins.back().last - 1) +
                       "). The line joins the states that no other beats in both.");
    if (sampled) {
      html += figure(
          "errors", "State error by layer and head",
          "Mean relative Frobenius error of the decoded state against that of " + base +
              ", over the sampled positions.",
          "<div class=\"controls\"><label>State <select id=\"map\"></select></label></div>\n");
    }
    html += "</div>\n";
  }
  if (answers) {
    const bool lengths = !graded.quartiles.empty();
    const bool cut = std::any_of(graded.rows.begin(), graded.rows.end(),
                                 [](const AnswerRow& row) { return row.figures.finish_known; });
    const bool losses = std::any_of(graded.rows.begin(), graded.rows.end(), [&](auto& row) {
      return row.against_baseline &&
             report.states[static_cast<size_t>(row.state)].info.bits_per_element > 0;
    });
    const std::string choose =
        graded.tasks.size() > 1
            ? "<div class=\"controls\"><label>Task <select class=\"task\"></select></label></div>\n"
            : "";
    html += "<div class=\"pair\">\n" +
            figure("accuracy", "Accuracy",
                   "Correct answers in percent with 95 % intervals, by task. Truncated and "
                   "missing answers count as wrong.");
    if (cut) {
      html += figure("truncation", "Truncated answers",
                     "Share of answers that the token limit ended, in percent, by task.");
    }
    if (lengths) {
      html += figure("quartiles", "Accuracy by answer length",
                     "Correct answers in percent, by quartile of the length in tokens of the "
                     "answers of " +
                         base + ", shortest first.",
                     choose);
    }
    if (losses) {
      html += figure("loss", "Size against accuracy",
                     "Bits a state element, all checkpoints and scales together, against the "
                     "change of accuracy in points from " +
                         base + " on the same items, with 95 % intervals.",
                     choose);
    }
    html += "</div>\n";
  }
  html += "<section><h2>Tables</h2>\n";
  if (curves) {
    for (const Table& table : kl_tables(report, statistics)) html += table_html(table);
  }
  if (answers) {
    for (const Table& table : answer_tables(report, graded)) html += table_html(table);
    const Table flips = shown_flips(report);
    if (!flips.rows.empty()) html += table_html(flips);
  }
  html +=
      "</section>\n<section><h2>Provenance</h2>\n" + provenance(report) + "</section>\n</main>\n";
  html +=
      "<footer><p>One page, nothing loaded from elsewhere. Charts: plotly.js (MIT).</p></footer>\n";

  // A "</script>" or "<!--" inside the data would end or hide the element.
  std::string json = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string safe;
  for (char c : json) safe += c == '<' ? std::string("\\u003c") : std::string(1, c);
  html += "<script type=\"application/json\" id=\"data\">" + safe + "</script>\n<script>";
  html += embedded(replayeval_plotly_js_begin, replayeval_plotly_js_end) + "</script>\n<script>\n";
  html +=
      embedded(replayeval_page_js_begin, replayeval_page_js_end) + "</script>\n</body>\n</html>\n";
  return html;
}

}  // namespace replayeval
