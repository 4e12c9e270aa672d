// The gate file and the grammar of a limit:
//   limit  = metric ("<=" | ">=") bound
//   bound  = number | [number "*"] ("base" | metric) [("+" | "-") number]
//   metric = name ["." task] ["[" state "]"] ["@" range]
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>

#include "reports/compare.h"
#include "reports/files.h"

namespace replayeval {
namespace {

constexpr const char* kMetrics[] = {"kl.mean",    "nll.mean", "perplexity", "top1",
                                    "non_finite", "growth",   "accuracy"};

class Parser {
 public:
  Parser(const std::string& text, const std::string& place) : text_(text), place_(place) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument(place_ + ": limit '" + text_ + "': " + what);
  }
  void skip_blanks() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
  }
  bool at_end() {
    skip_blanks();
    return at_ == text_.size();
  }
  bool accept(const std::string& token) {
    skip_blanks();
    if (text_.compare(at_, token.size(), token) != 0) return false;
    at_ += token.size();
    return true;
  }
  std::optional<double> number() {
    skip_blanks();
    const char* start = text_.c_str() + at_;
    if (std::isdigit(static_cast<unsigned char>(*start)) == 0 && *start != '.' && *start != '-')
      return std::nullopt;
    char* end = nullptr;
    const double value = std::strtod(start, &end);
    if (end == start) return std::nullopt;
    at_ += static_cast<size_t>(end - start);
    return value;
  }
  /// Letters, digits, '_' and '.'; '-' too in a range and in a task's name, so that "base-1" is a
  /// difference.
  std::string word(bool with_minus = false) {
    skip_blanks();
    const size_t start = at_;
    auto part = [&](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.' ||
             (c == '-' && (with_minus || text_.compare(start, 9, "accuracy.") == 0));
    };
    while (at_ < text_.size() && part(text_[at_])) ++at_;
    return text_.substr(start, at_ - start);
  }
  MetricRef metric(const std::string& name) {
    MetricRef metric;
    metric.name = name;
    if (name.starts_with("accuracy.")) {
      metric.name = "accuracy";
      metric.task = name.substr(9);
    }
    if (std::find(std::begin(kMetrics), std::end(kMetrics), metric.name) == std::end(kMetrics)) {
      std::string known;
      for (const char* m : kMetrics) known += std::string(" ") + m;
      fail("unknown metric '" + name + "'; known:" + known + " accuracy.TASK");
    }
    if (!accept("[")) fail("expected [state] after " + name);
    const size_t end = text_.find(']', at_);
    if (end == std::string::npos) fail("'[' without ']'");
    metric.state = text_.substr(at_, end - at_);
    at_ = end + 1;
    if (accept("@")) {
      metric.range = word(true);
      if (metric.range.empty()) fail("expected a range after @: 98304-131072, 128K or last");
      long long first = 0, last = 0;
      if (std::sscanf(metric.range.c_str(), "%lld-%lld", &first, &last) == 2 && first >= last) {
        fail("range '" + metric.range +
             "' is empty: expected FIRST-LAST with FIRST below LAST, which itself is outside");
      }
      if (metric.name == "accuracy" || metric.name == "growth") fail(metric.name + " has no range");
    }
    return metric;
  }

 private:
  std::string text_, place_;
  size_t at_ = 0;
};

std::string place_of(const std::string& path, const YAML::Node& node) {
  return path + ":" + std::to_string(node.Mark().line + 1) + ":" +
         std::to_string(node.Mark().column + 1);
}

/// Throws where a key of the map stands for the second time.
void refuse_repeated_keys(const std::string& path, const YAML::Node& map) {
  std::map<std::string, int> seen;
  for (const auto& entry : map) {
    const std::string key = entry.first.Scalar();
    const auto [earlier, fresh] = seen.emplace(key, entry.first.Mark().line + 1);
    if (!fresh) {
      throw std::invalid_argument(place_of(path, entry.first) + ": key '" + key +
                                  "' is given twice, first on line " +
                                  std::to_string(earlier->second) + "; remove one of them");
    }
  }
}

/// A number between 0 and 1, both excluded.
double probability(const std::string& path, const YAML::Node& node, const std::string& key) {
  double value = 0;
  if (!node.IsScalar() || !YAML::convert<double>::decode(node, value) ||
      !(value > 0 && value < 1)) {
    throw std::invalid_argument(place_of(path, node) + ": " + key +
                                ": expected a number between 0 and 1");
  }
  return value;
}

/// True for `yes`, false for `no`.
bool choice(const std::string& path, const YAML::Node& node, const std::string& key,
            const std::string& yes, const std::string& no) {
  const std::string value = node.IsScalar() ? node.Scalar() : "";
  if (value != yes && value != no) {
    throw std::invalid_argument(place_of(path, node) + ": " + key + ": expected " + no + " or " +
                                yes + ", got '" + value + "'");
  }
  return value == yes;
}

}  // namespace

Limit parse_limit(const std::string& text, LimitKind kind, const std::string& place) {
  Parser parser(text, place);
  Limit limit;
  limit.text = text;
  limit.kind = kind;
  limit.metric = parser.metric(parser.word());
  if (parser.accept("<=")) {
    limit.at_most = true;
  } else if (parser.accept(">=")) {
    limit.at_most = false;
  } else {
    parser.fail("expected <= or >=");
  }
  const std::optional<double> first = parser.number();
  if (first && parser.at_end()) {
    limit.offset = *first;
    return limit;
  }
  limit.factor = 1;
  if (first) {
    if (!parser.accept("*")) parser.fail("expected '*' after the number");
    limit.factor = *first;
  }
  const std::string name = parser.word();
  if (name == "base") {
    limit.against_base = true;
  } else if (!name.empty()) {
    limit.against = parser.metric(name);
    if (limit.against->name != limit.metric.name)
      parser.fail("compares " + limit.metric.name + " with " + name);
  } else {
    parser.fail("expected a number, base or a metric on the right");
  }
  if (!parser.at_end()) {
    double sign = 0;
    if (parser.accept("+")) {
      sign = 1;
    } else if (parser.accept("-")) {
      sign = -1;
    } else {
      parser.fail("expected + or - and a number at the end");
    }
    const std::optional<double> offset = parser.number();
    if (!offset || !parser.at_end()) parser.fail("expected a number at the end");
    limit.offset = sign * *offset;
  }
  return limit;
}

Gate read_gate(const std::filesystem::path& path) {
  const std::optional<std::vector<std::byte>> bytes = read_file(path);
  if (!bytes) throw std::runtime_error(path.string() + ": no such file");
  Gate gate;
  gate.path = path.string();
  YAML::Node root;
  try {
    root = YAML::Load(as_text(*bytes));
  } catch (const YAML::Exception& error) {
    throw std::invalid_argument(gate.path + ":" + std::to_string(error.mark.line + 1) + ":" +
                                std::to_string(error.mark.column + 1) + ": " + error.msg);
  }
  if (!root.IsMap())
    throw std::invalid_argument(gate.path + ": expected a map with the key limits");
  refuse_repeated_keys(gate.path, root);
  for (const auto& entry : root) {
    const std::string key = entry.first.Scalar();
    const YAML::Node value = entry.second;
    if (key == "alpha") {
      gate.alpha = probability(gate.path, value, key);
    } else if (key == "power") {
      gate.power = probability(gate.path, value, key);
    } else if (key == "undecided") {
      gate.undecided_fails = choice(gate.path, value, key, "fail", "pass");
    } else if (key == "non_finite") {
      gate.allow_non_finite = choice(gate.path, value, key, "allow", "fail");
    } else if (key == "limits") {
      if (!value.IsSequence())
        throw std::invalid_argument(place_of(gate.path, value) + ": limits: expected a list");
      for (const YAML::Node& item : value) {
        const std::string place = place_of(gate.path, item);
        if (item.IsScalar()) {
          gate.limits.push_back(parse_limit(item.Scalar(), LimitKind::regression, place));
          continue;
        }
        if (!item.IsMap() || !item["limit"]) {
          throw std::invalid_argument(
              place +
              ": limits: expected a text, or {limit: text, kind: regression | noninferior}");
        }
        refuse_repeated_keys(gate.path, item);
        LimitKind kind = LimitKind::regression;
        for (const auto& part : item) {
          const std::string name = part.first.Scalar();
          if (name == "kind") {
            kind = choice(gate.path, part.second, "kind", "noninferior", "regression")
                       ? LimitKind::noninferior
                       : LimitKind::regression;
          } else if (name != "limit") {
            throw std::invalid_argument(place_of(gate.path, part.first) + ": unknown key '" + name +
                                        "'; known: limit kind");
          }
        }
        gate.limits.push_back(parse_limit(item["limit"].Scalar(), kind, place));
      }
    } else {
      throw std::invalid_argument(place_of(gate.path, entry.first) + ": unknown key '" + key +
                                  "'; known: alpha power undecided non_finite limits");
    }
  }
  if (gate.limits.empty())
    throw std::invalid_argument(gate.path + ": limits: expected at least one");
  return gate;
}

}  // namespace replayeval
