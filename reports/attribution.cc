#include "reports/attribution.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

namespace replayeval {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

/// Indices of "0-5,7"; empty for "all".
std::set<int> indices(const std::string& text) {
  std::set<int> chosen;
  if (text == "all") return chosen;
  size_t at = 0;
  while (at < text.size()) {
    size_t end = text.find(',', at);
    if (end == std::string::npos) end = text.size();
    const std::string part = text.substr(at, end - at);
    const size_t dash = part.find('-');
    const int first = std::stoi(part.substr(0, dash));
    const int last = dash == std::string::npos ? first : std::stoi(part.substr(dash + 1));
    for (int i = first; i <= last; ++i) chosen.insert(i);
    at = end + 1;
  }
  return chosen;
}

std::string ranges(const std::set<int>& chosen) {
  std::string text;
  for (auto it = chosen.begin(); it != chosen.end();) {
    const int first = *it;
    int last = first;
    for (++it; it != chosen.end() && *it == last + 1; ++it) last = *it;
    text += (text.empty() ? "" : ",") + std::to_string(first) +
            (last > first ? "-" + std::to_string(last) : "");
  }
  return text;
}

std::string option(const StateInfo& state, const char* name) {
  const auto it = state.options.find(name);
  return it == state.options.end() ? "all" : it->second;
}

/// A state's name without its selection: "nvfp4+sr@L=8;layers=2" -> "nvfp4+sr@L=8".
std::string unselected(const std::string& name) {
  const size_t at = name.find('@');
  if (at == std::string::npos) return name;
  std::string text = name.substr(0, at);
  char separator = '@';
  for (size_t start = at + 1; start <= name.size();) {
    size_t end = name.find(';', start);
    if (end == std::string::npos) end = name.size();
    const std::string item = name.substr(start, end - start);
    if (!item.starts_with("layers=") && !item.starts_with("heads=")) {
      text += separator + item;
      separator = ';';
    }
    start = end + 1;
  }
  return text;
}

std::string with_option(const std::string& name, const std::string& added) {
  return name + (name.find('@') == std::string::npos ? "@" : ";") + added;
}

struct Member {
  std::set<int> layers, heads;
  double kl = 0;
  double bits = 0;
};

int heads_of(const Report& report, int layer) {
  for (const LayerInfo& info : report.layers) {
    if (info.index == layer) return info.heads;
  }
  return 0;
}

/// State whose recurrence is fp16, in the whole model and shared, at this window; the wider format
/// of policies.
const StateStatistics* find_wider(const Report& report, const KlStatistics& statistics,
                                  int* index) {
  for (const char* name : {"fp16+sr", "fp16", "bf16+sr", "bf16"}) {
    const int state = report.find_state(name);
    if (state >= 0) {
      *index = state;
      return &statistics.states[static_cast<size_t>(state)];
    }
  }
  return nullptr;
}

void propose(const Report& report, const KlStatistics& statistics, double narrow_bits,
             Attribution& result) {
  std::vector<Contribution> layers = result.ranked;
  if (layers.size() != report.layers.size()) return;
  for (const Contribution& layer : layers) {
    if (std::isnan(layer.only) || !(layer.elements > 0)) return;
  }
  int wider_index = -1;
  const StateStatistics* wider = find_wider(report, statistics, &wider_index);
  result.wider = wider != nullptr ? wider->name : "fp16+sr";
  const double wide_bits =
      wider != nullptr ? report.states[static_cast<size_t>(wider_index)].info.bits_per_element
                       : 16.0;
  const double wide_kl = wider != nullptr ? wider->all.kl.value : 0.0;
  // Each step keeps the layer whose KL is largest for the bits it costs.
  std::sort(layers.begin(), layers.end(), [](const Contribution& a, const Contribution& b) {
    return a.only / a.elements > b.only / b.elements;
  });
  std::set<int> rest;
  for (const LayerInfo& layer : report.layers) rest.insert(layer.index);
  for (size_t kept = 0; kept <= layers.size(); ++kept) {
    PolicyStep step;
    step.kept = static_cast<int>(kept);
    for (size_t i = 0; i < layers.size(); ++i) {
      const bool wide = i < kept;
      step.bits_per_element += layers[i].elements * (wide ? wide_bits : narrow_bits);
      step.predicted += wide ? layers[i].elements * wide_kl : layers[i].only;
    }
    if (kept > 0) rest.erase(layers[kept - 1].layer);
    step.spelling =
        kept == 0 ? result.precision
        : rest.empty()
            ? result.wider
            : with_option(result.precision, "layers=" + ranges(rest) + ";else=" + result.wider);
    result.policy.push_back(std::move(step));
  }
}

}  // namespace

std::vector<Attribution> attribute(const Report& report, const KlStatistics& statistics) {
  std::map<std::string, std::vector<Member>> groups;
  std::map<std::string, std::pair<double, double>> whole;  // mean KL, bits
  double baseline_bits = 32;
  if (report.baseline() >= 0)
    baseline_bits = report.states[static_cast<size_t>(report.baseline())].info.bits_per_element;
  for (size_t s = 0; s < report.states.size(); ++s) {
    const StateInfo& info = report.states[s].info;
    const double kl = statistics.states[s].all.kl.value;
    const std::string layers = option(info, "layers"), heads = option(info, "heads");
    if (layers == "all" && heads == "all") {
      whole[info.name] = {kl, info.bits_per_element};
      continue;
    }
    if (info.name.find("else=") != std::string::npos) continue;
    groups[unselected(info.name)].push_back(
        {indices(layers), indices(heads), kl, info.bits_per_element});
  }
  std::vector<Attribution> results;
  for (const bool over_heads : {false, true}) {
    for (const auto& [name, members] : groups) {
      Attribution result;
      result.precision = name;
      result.heads = over_heads;
      const auto total = whole.find(name);
      result.whole = total == whole.end() ? kNone : total->second.first;
      double narrow_bits = total == whole.end() ? kNone : total->second.second;
      std::map<std::pair<int, int>, Contribution> parts;
      std::map<int, double> layer_alone;
      auto part = [&](int layer, int head) -> Contribution& {
        auto [it, fresh] = parts.try_emplace({layer, head});
        if (fresh) it->second = {layer, head, kNone, kNone, kNone, kNone};
        return it->second;
      };
      for (const Member& m : members) {
        if (m.heads.empty() && m.layers.size() == 1) layer_alone[*m.layers.begin()] = m.kl;
      }
      for (const Member& m : members) {
        if (!over_heads && m.heads.empty()) {
          if (m.layers.size() == 1 && report.layers.size() > 1) {
            Contribution& c = part(*m.layers.begin(), -1);
            c.only = m.kl;
            // bits = baseline + elements (narrow - baseline)
            if (!std::isnan(narrow_bits))
              c.elements = (baseline_bits - m.bits) / (baseline_bits - narrow_bits);
          } else if (m.layers.size() + 1 == report.layers.size()) {
            for (const LayerInfo& layer : report.layers) {
              if (!m.layers.contains(layer.index))
                part(layer.index, -1).removed = result.whole - m.kl;
            }
          }
        } else if (over_heads && m.layers.size() == 1 && !m.heads.empty()) {
          const int layer = *m.layers.begin();
          const int heads = heads_of(report, layer);
          if (m.heads.size() == 1 && heads > 1) {
            part(layer, *m.heads.begin()).only = m.kl;
          } else if (static_cast<int>(m.heads.size()) + 1 == heads && layer_alone.contains(layer)) {
            for (int h = 0; h < heads; ++h) {
              if (!m.heads.contains(h)) part(layer, h).removed = layer_alone[layer] - m.kl;
            }
          }
        }
      }
      if (parts.size() < 2) continue;
      for (const auto& [key, c] : parts) {
        if (!std::isnan(c.only)) result.sum_of_parts += c.only;
        result.ranked.push_back(c);
      }
      for (Contribution& c : result.ranked) c.share = c.only / result.sum_of_parts;
      std::sort(result.ranked.begin(), result.ranked.end(),
                [](const Contribution& a, const Contribution& b) {
                  const double x = std::isnan(a.only) ? a.removed : a.only,
                               y = std::isnan(b.only) ? b.removed : b.only;
                  if (x != y) return x > y;
                  return std::pair(a.layer, a.head) < std::pair(b.layer, b.head);
                });
      if (!over_heads) propose(report, statistics, narrow_bits, result);
      results.push_back(std::move(result));
    }
  }
  return results;
}

std::vector<Table> attribution_tables(const Report& report, const KlStatistics& statistics) {
  std::vector<Table> tables;
  for (const Attribution& a : attribute(report, statistics)) {
    Table ranking{
        "Where the KL of " + a.precision + " comes from, by " + (a.heads ? "head" : "layer"),
        {a.heads ? "layer.head" : "layer", "alone/nats", "share %", "without it/nats less"},
        {}};
    for (const Contribution& c : a.ranked) {
      ranking.rows.push_back(
          {std::to_string(c.layer) + (a.heads ? "." + std::to_string(c.head) : ""), number(c.only),
           number(100 * c.share), number(c.removed)});
    }
    ranking.notes.push_back(
        "alone: mean KL with this precision there and the baseline elsewhere; the parts add up "
        "to " +
        number(a.sum_of_parts) + ", the whole model has " + number(a.whole) + ".");
    tables.push_back(std::move(ranking));
    if (a.policy.empty()) continue;
    Table policy{"Mixed policies: layers of " + a.precision + " kept in " + a.wider,
                 {"kept", "bits/elt", "predicted KL/nats", "state"},
                 {}};
    policy.left = {3};
    for (const PolicyStep& step : a.policy) {
      policy.rows.push_back({std::to_string(step.kept), number(step.bits_per_element),
                             number(step.predicted), step.spelling});
    }
    policy.notes.push_back(
        "predicted: the sum of what the other layers cause alone; run the state to see what it "
        "is.");
    tables.push_back(std::move(policy));
  }
  return tables;
}

}  // namespace replayeval
