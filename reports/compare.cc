#include "reports/compare.h"

#include <algorithm>
#include <boost/math/distributions/binomial.hpp>
#include <boost/math/distributions/normal.hpp>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "reports/text.h"

namespace replayeval {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// ---- what must agree ----

/// The fields that --allow takes.
constexpr const char* kFields[] = {"job",      "model",         "tokenizer", "data",
                                   "baseline", "prompt_tokens", "tasks",     "repeats",
                                   "gold",     "prompts",       "grading",   "states"};

void check_allowed(const std::vector<std::string>& allow) {
  for (const std::string& field : allow) {
    if (std::find(std::begin(kFields), std::end(kFields), field) != std::end(kFields)) continue;
    std::string known;
    for (const char* name : kFields) known += std::string(" ") + name;
    throw std::invalid_argument("compare: --allow: unknown field '" + field + "'; known:" + known);
  }
}

/// Collects differences of fields: allowed ones are noted, others thrown.
class FieldCheck {
 public:
  FieldCheck(const Report& base, const Report& candidate, const std::vector<std::string>& allow,
             std::vector<std::string>* notes)
      : base_(base.path.empty() ? "base" : base.path),
        candidate_(candidate.path.empty() ? "candidate" : candidate.path),
        allow_(allow),
        notes_(notes) {}

  void equal(const std::string& field, const std::string& base,
             const std::string& candidate) const {
    if (base == candidate) return;
    const std::string what = field + " differs: " + base_ + " has '" + shown(base) + "', " +
                             candidate_ + " has '" + shown(candidate) + "'";
    if (std::find(allow_.begin(), allow_.end(), field) == allow_.end()) {
      throw std::invalid_argument("compare: " + what + "; accept it with --allow " + field);
    }
    notes_->push_back(what + " (allowed)");
  }
  void mention(const std::string& field, const std::string& base,
               const std::string& candidate) const {
    if (base != candidate)
      notes_->push_back(field + " differs: '" + shown(base) + "' and '" + shown(candidate) + "'");
  }

 private:
  static std::string shown(const std::string& value) {
    return value.size() > 160 ? value.substr(0, 160) + "..." : value;
  }
  std::string base_, candidate_;
  const std::vector<std::string>& allow_;
  std::vector<std::string>* notes_;
};

/// The lines of a state's definition that another one of its name does not have.
std::string lines_beside(const StateInfo& state, const StateInfo& other) {
  const auto lines_of = [](const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  };
  const std::vector<std::string> others = lines_of(other.definition);
  std::string text = state.name + ":";
  bool any = false;
  for (const std::string& line : lines_of(state.definition)) {
    if (std::find(others.begin(), others.end(), line) != others.end()) continue;
    text += (any ? "; " : " ") + line;
    any = true;
  }
  return text + (any ? "" : " sha256 " + state.sha256.substr(0, 12));
}

std::string documents_text(const Report& report) {
  std::string text;
  for (const DocumentInfo& d : report.documents) text += d.id + ":" + d.sha256.substr(0, 12) + " ";
  return text;
}

std::string item_key(const ItemInfo& item) { return item.task + "/" + item.id; }

/// The first item whose `member` differs, as "key: value" on both sides, so that a message stays
/// short.
void check_items(const FieldCheck& check, const std::string& field, const Report& base,
                 const Report& candidate, std::string ItemInfo::*member) {
  std::map<std::string, const ItemInfo*> known;
  for (const ItemInfo& item : base.items) known[item_key(item)] = &item;
  int64_t count = 0;
  std::string first_base, first_candidate;
  for (const ItemInfo& item : candidate.items) {
    auto found = known.find(item_key(item));
    if (found == known.end() || found->second->*member == item.*member) continue;
    if (count++ == 0) {
      first_base = item_key(item) + ": " + found->second->*member;
      first_candidate = item_key(item) + ": " + item.*member;
    }
  }
  if (count == 0) return;
  const std::string more = count > 1 ? " (and " + std::to_string(count - 1) + " more)" : "";
  check.equal(field, first_base + more, first_candidate + more);
}

/// Tasks of the same name are the same task, in the same version.
void check_tasks(const FieldCheck& check, const Report& base, const Report& candidate) {
  for (const TaskInfo& a : base.run.tasks) {
    for (const TaskInfo& b : candidate.run.tasks) {
      auto identity = [](const TaskInfo& task) {
        return task.name + " version " + std::to_string(task.version) + " (sha256 " +
               task.sha256.substr(0, 12) + ")";
      };
      if (a.name == b.name) check.equal("tasks", identity(a), identity(b));
    }
  }
  if (!base.run.tasks.empty() || !candidate.run.tasks.empty())
    check.equal("repeats", std::to_string(base.run.repeats), std::to_string(candidate.run.repeats));
}

// ---- pairs ----

struct Pair {
  int base = 0;
  int candidate = 0;
  std::string name;  // "a", or "a = b"
};

int state_or_throw(const Report& report, const std::string& side, const std::string& name) {
  const int index = report.find_state(name);
  if (index >= 0) return index;
  std::string known;
  for (const StateReport& s : report.states) known += " " + s.info.name;
  throw std::invalid_argument("compare: the " + side + " run has no state '" + name + "'; it has" +
                              known);
}

std::vector<Pair> pair_states(const Report& base, const Report& candidate,
                              const CompareOptions& options) {
  std::vector<Pair> pairs;
  std::set<int> taken;
  for (const auto& [a, b] : options.pairs) {
    const int i = state_or_throw(base, "base", a), j = state_or_throw(candidate, "candidate", b);
    if (!taken.insert(j).second)
      throw std::invalid_argument("compare: state '" + b + "' is paired twice");
    pairs.push_back({i, j, a == b ? a : a + " = " + b});
  }
  for (size_t j = 0; j < candidate.states.size(); ++j) {
    const int i = base.find_state(candidate.states[j].info.name);
    if (i >= 0 && taken.insert(static_cast<int>(j)).second) {
      pairs.push_back({i, static_cast<int>(j), candidate.states[j].info.name});
    }
  }
  if (pairs.empty())
    throw std::invalid_argument(
        "compare: no state of the same name in both runs; name one with --pair A=B");
  return pairs;
}

/// One line for the states of each run that no pair holds.
std::vector<std::string> unpaired_states(const Report& base, const Report& candidate,
                                         const std::vector<Pair>& pairs) {
  std::set<int> in_base, in_candidate;
  for (const Pair& pair : pairs) {
    in_base.insert(pair.base);
    in_candidate.insert(pair.candidate);
  }
  std::vector<std::string> lines;
  const auto add = [&](const char* side, const Report& report, const std::set<int>& paired) {
    std::string names;
    for (size_t s = 0; s < report.states.size(); ++s) {
      if (!paired.contains(static_cast<int>(s)))
        names += (names.empty() ? "" : ", ") + report.states[s].info.name;
    }
    if (!names.empty())
      lines.push_back(std::string("only the ") + side + " run has " + names + " (--pair A=B)");
  };
  add("base", base, in_base);
  add("candidate", candidate, in_candidate);
  return lines;
}

// ---- positions ----

struct Range {
  int64_t first = 0;
  int64_t last = 0;  // one after
};

/// One state of one report over one document of it.
struct Series {
  const Report* report;
  const StateReport* state;

  const StateDocument& document(size_t d) const { return state->documents[d]; }
};

/// Documents of both, by id: (index in a, index in b).
std::vector<std::pair<size_t, size_t>> common_documents(const Report& a, const Report& b) {
  std::vector<std::pair<size_t, size_t>> out;
  for (size_t i = 0; i < a.documents.size(); ++i) {
    for (size_t j = 0; j < b.documents.size(); ++j) {
      if (a.documents[i].id == b.documents[j].id) out.push_back({i, j});
    }
  }
  return out;
}

int64_t measured(const Series& a, const Series& b, const std::pair<size_t, size_t>& d) {
  return std::min(a.document(d.first).length, b.document(d.second).length);
}

/// The longest document of both, as long as both experiments have it.
int64_t longest(const Report& a, const Report& b) {
  int64_t length = 0;
  for (const auto& [i, j] : common_documents(a, b))
    length = std::max(length, std::min(a.documents[i].tokens, b.documents[j].tokens));
  return length;
}

std::string positions_text(int64_t first, int64_t last) {
  return "positions " + std::to_string(first) + "-" + std::to_string(last);
}

/// Throws unless the series holds all positions below `end` that its experiment asks for, of every
/// document that `other` has too.
void check_measured(const std::string& limit, const std::string& side, const Series& series,
                    const Report& other, int64_t end) {
  for (const auto& [d, unused] : common_documents(*series.report, other)) {
    const DocumentInfo& document = series.report->documents[d];
    const int64_t wanted = std::min(document.tokens, end), length = series.document(d).length;
    if (length >= wanted) continue;
    throw std::invalid_argument("gate: limit '" + limit + "': the " + side +
                                " run is not finished: document " + document.id + " lacks " +
                                positions_text(length, wanted) + " by state " +
                                series.state->info.name + "; go on with it (run --resume)");
  }
}

/// Throws when the experiment of one run has positions below `end` that the other one's has not.
/// `allowed`: what one alone has is left out.
void check_same_positions(const std::string& limit, const Report& base, const Report& candidate,
                          int64_t end, bool allowed) {
  if (allowed) return;
  auto check = [&](const Report& has, const std::string& lacking_side, const Report& lacking) {
    for (const DocumentInfo& document : has.documents) {
      int64_t tokens = 0;
      for (const DocumentInfo& other : lacking.documents) {
        if (other.id == document.id) tokens = other.tokens;
      }
      const int64_t wanted = std::min(document.tokens, end);
      if (tokens >= wanted) continue;
      throw std::invalid_argument(
          "gate: limit '" + limit + "': the experiment of the " + lacking_side + " run has no " +
          positions_text(tokens, wanted) + " of document " + document.id +
          ", which the other has; name a range that both have (@0-" + std::to_string(tokens) +
          "), or leave them out with --allow data");
    }
  };
  check(base, "candidate", candidate);
  check(candidate, "base", base);
}

/// What of the documents of either run has no part in a comparison of these states, or nothing.
std::string left_out(const Series& a, const Series& b) {
  std::string first;
  int64_t count = 0;
  auto add = [&](const DocumentInfo& document, int64_t from, int64_t to, int64_t in_base,
                 int64_t in_candidate) {
    if (from >= to) return;
    if (count++ == 0) {
      first = positions_text(from, to) + " of document " + document.id + " (base has " +
              std::to_string(in_base) + ", candidate " + std::to_string(in_candidate) +
              " positions of it)";
    }
  };
  std::set<size_t> common;
  for (size_t i = 0; i < a.report->documents.size(); ++i) {
    const DocumentInfo& document = a.report->documents[i];
    int64_t tokens = document.tokens, length = 0;
    for (size_t j = 0; j < b.report->documents.size(); ++j) {
      if (b.report->documents[j].id != document.id) continue;
      common.insert(j);
      length = b.document(j).length;
      tokens = std::max(tokens, b.report->documents[j].tokens);
    }
    add(document, std::min(length, a.document(i).length), tokens, a.document(i).length, length);
  }
  for (size_t j = 0; j < b.report->documents.size(); ++j) {
    const DocumentInfo& document = b.report->documents[j];
    if (!common.contains(j)) add(document, 0, document.tokens, 0, b.document(j).length);
  }
  if (count > 1) first += ", and of " + std::to_string(count - 1) + " more documents";
  return first;
}

/// "98304-131072", a bin's name, "last", "" for everything. Throws when the range is not measured
/// to its end in any common document.
Range resolve_range(const std::string& text, int64_t length, const std::string& limit) {
  const std::vector<Bin> bins = position_bins(length);
  auto missing = [&](const std::string& what) {
    throw std::invalid_argument("gate: limit '" + limit + "': " + what + "; both runs have " +
                                std::to_string(length) + " positions of a document in common");
  };
  if (length == 0) missing("the runs have no document in common");
  if (text.empty()) return {0, length};
  if (text == "last") return {bins.back().first, bins.back().last};
  for (const Bin& bin : bins) {
    if (bin.name == text) return {bin.first, bin.last};
  }
  long long first = 0, last = 0;
  char rest = 0;
  if (std::sscanf(text.c_str(), "%lld-%lld%c", &first, &last, &rest) != 2 || first < 0 ||
      first >= last) {
    missing("range '" + text +
            "' is neither FIRST-LAST nor a bin measured on both sides, nor last");
  }
  if (last > length) missing("range '" + text + "' is not measured");
  return {first, last};
}

enum Column : size_t {
  kKlA,
  kKlB,
  kKlCount,
  kNllA,
  kNllB,
  kNllCount,
  kTopA,
  kTopB,
  kTopCount,
  kColumns
};

struct PairedPositions {
  BlockSums sums;
  int64_t positions = 0;
  int64_t non_finite_a = 0;
  int64_t non_finite_b = 0;
};

/// Block sums over positions where both sides have a finite value, cells = ranges. A document
/// counts when both sides measured the last range to its end.
PairedPositions paired_positions(const Series& a, const Series& b,
                                 const std::vector<std::pair<size_t, size_t>>& documents,
                                 const std::vector<Range>& ranges) {
  PairedPositions out;
  out.sums.columns = kColumns;
  out.sums.cells = static_cast<int>(ranges.size());
  for (const auto& d : documents) {
    if (measured(a, b, d) < ranges.back().last) continue;
    const StateDocument &x = a.document(d.first), &y = b.document(d.second);
    const std::vector<int32_t>&s = a.report->token_ids[d.first], &t = b.report->token_ids[d.second];
    const int64_t start = std::max(x.first_position, y.first_position);
    const int64_t tokens =
        std::min(a.report->documents[d.first].tokens, b.report->documents[d.second].tokens);
    std::vector<BlockSums::Cell> cells;
    for (const Range& range : ranges) {
      const int64_t begin = std::max(range.first, start);
      BlockSums::Cell cell;
      if (begin < range.last) {
        cell.blocks = std::max<int64_t>(1, block_count(range.last - begin));
        cell.sums.assign(static_cast<size_t>(cell.blocks) * kColumns, 0.0);
      }
      for (int64_t k = 0; k < cell.blocks; ++k) {
        double* sums = cell.sums.data() + static_cast<size_t>(k) * kColumns;
        const int64_t first = begin + (range.last - begin) * k / cell.blocks;
        const int64_t last = begin + (range.last - begin) * (k + 1) / cell.blocks;
        for (int64_t p = first; p < last; ++p) {
          const auto i = static_cast<size_t>(p);
          if (s[i] != t[i]) {
            throw std::invalid_argument("compare: document " + a.report->documents[d.first].id +
                                        ": token at position " + std::to_string(p) + " is " +
                                        std::to_string(s[i]) + " in the base run, " +
                                        std::to_string(t[i]) + " in the candidate run");
          }
          const bool next = p + 1 < tokens;
          const bool good_a = std::isfinite(x.kl[i]) && (!next || std::isfinite(x.nll[i]));
          const bool good_b = std::isfinite(y.kl[i]) && (!next || std::isfinite(y.nll[i]));
          out.non_finite_a += good_a ? 0 : 1;
          out.non_finite_b += good_b ? 0 : 1;
          if (!good_a || !good_b) continue;
          ++out.positions;
          sums[kKlA] += static_cast<double>(x.kl[i]);
          sums[kKlB] += static_cast<double>(y.kl[i]);
          sums[kKlCount] += 1;
          if (next) {
            sums[kNllA] += static_cast<double>(x.nll[i]);
            sums[kNllB] += static_cast<double>(y.nll[i]);
            sums[kNllCount] += 1;
          }
          if (x.top1[i] != kNoTop1 && y.top1[i] != kNoTop1) {
            sums[kTopA] += x.top1[i];
            sums[kTopB] += y.top1[i];
            sums[kTopCount] += 1;
          }
        }
      }
      cells.push_back(std::move(cell));
    }
    out.sums.documents.push_back(std::move(cells));
  }
  return out;
}

/// Value of a metric on side 0 (a) or 1 (b) from totals [cells, kColumns].
double metric_value(const std::string& metric, const std::vector<Range>& ranges,
                    std::span<const double> totals, size_t side) {
  if (metric == "growth") {
    std::vector<double> means;
    std::vector<Bin> bins;
    for (size_t c = 0; c < ranges.size(); ++c) {
      means.push_back(totals[c * kColumns + kKlA + side] / totals[c * kColumns + kKlCount]);
      bins.push_back({"", ranges[c].first, ranges[c].last});
    }
    return growth_slope(bins, means);
  }
  if (metric == "kl.mean") return totals[kKlA + side] / totals[kKlCount];
  if (metric == "nll.mean") return totals[kNllA + side] / totals[kNllCount];
  if (metric == "perplexity") return std::exp(totals[kNllA + side] / totals[kNllCount]);
  return 100 * totals[kTopA + side] / totals[kTopCount];
}

// ---- answers ----

struct PairedAnswers {
  BlockSums sums;  // columns: correct of a, correct of b, count; one document an item
  int64_t items = 0;
  int64_t answers = 0;
  int64_t lost = 0, gained = 0;  // of answers
  int64_t alone = 0;             // answers that one side alone has
  int64_t correct = 0;           // of the candidate
  double chance = 0;             // percent, of items with options
};

/// Answers of the same item and repeat on both sides. For a limit of a gate it throws when the task
/// or an answer is missing on either side; for a table (empty `limit`) such answers are left out
/// and counted.
PairedAnswers paired_answers(const Series& a, const Series& b, const std::string& task,
                             const std::string& limit) {
  using Key = std::pair<std::string, int32_t>;
  auto collect = [&](const Series& side, const std::string& name) {
    std::map<Key, const Answer*> found;
    for (const Answer& answer : side.state->answers) {
      const ItemInfo& item = side.report->items.at(static_cast<size_t>(answer.item));
      if (task.empty() || item.task == task) found[{item_key(item), answer.repeat}] = &answer;
    }
    if (found.empty() && !limit.empty()) {
      throw std::invalid_argument("compare: " + limit + ": the " + name +
                                  " run has no answers of " +
                                  (task.empty() ? "any task" : "task '" + task + "'") +
                                  " by state " + side.state->info.name);
    }
    return found;
  };
  const std::map<Key, const Answer*> base = collect(a, "base"), candidate = collect(b, "candidate");
  PairedAnswers out;
  out.sums.columns = 3;
  out.sums.cells = 1;
  std::map<std::string, size_t> index;
  double chance = 0;
  for (const auto& [key, answer] : base) {
    auto other = candidate.find(key);
    if (other == candidate.end()) {
      ++out.alone;
      if (limit.empty()) continue;
      throw std::invalid_argument("compare: " + limit + ": the candidate run has no answer to " +
                                  key.first + ", repeat " + std::to_string(key.second) +
                                  ", by state " + b.state->info.name);
    }
    auto [place, fresh] = index.emplace(key.first, out.sums.documents.size());
    if (fresh) {
      out.sums.documents.push_back({{1, {0, 0, 0}}});
      const int options = a.report->items[static_cast<size_t>(answer->item)].options;
      chance += options > 0 ? 100.0 / options : 0;
    }
    std::vector<double>& sums = out.sums.documents[place->second][0].sums;
    sums[0] += answer->correct ? 1 : 0;
    sums[1] += other->second->correct ? 1 : 0;
    sums[2] += 1;
    out.answers += 1;
    out.correct += other->second->correct ? 1 : 0;
    out.lost += answer->correct && !other->second->correct ? 1 : 0;
    out.gained += !answer->correct && other->second->correct ? 1 : 0;
  }
  out.alone += static_cast<int64_t>(candidate.size()) - out.answers;
  if (candidate.size() > base.size() && !limit.empty()) {
    throw std::invalid_argument("gate: limit '" + limit + "': the candidate run has " +
                                std::to_string(candidate.size()) + " answers, the base run " +
                                std::to_string(base.size()));
  }
  out.items = static_cast<int64_t>(out.sums.documents.size());
  out.chance = chance / static_cast<double>(out.items);
  return out;
}

// ---- limits ----

/// Loss beyond the bound: positive is worse than allowed. Logarithmic for positive quantities
/// without an offset.
double loss_of(const Limit& limit, bool logarithmic, double candidate, double reference) {
  const double bound = limit.factor == 0 ? limit.offset : limit.factor * reference + limit.offset;
  const double over = logarithmic ? std::log(candidate) - std::log(bound) : candidate - bound;
  return limit.at_most ? over : -over;
}

struct Evidence {
  BlockSums sums;
  std::function<std::pair<double, double>(std::span<const double>)> values;  // candidate, reference
};

/// Fills the statistical part of a result from paired sums.
void judge(const Gate& gate, const StatisticsOptions& options, const Evidence& evidence,
           LimitResult* out) {
  const Limit& limit = out->limit;
  const std::string& metric = limit.metric.name;
  const bool pure_factor = limit.factor == 0 || limit.offset == 0;
  out->logarithmic =
      pure_factor && (metric == "kl.mean" || metric == "perplexity" || metric == "nll.mean");
  auto run = [&] {
    return bootstrap(
        evidence.sums, 3,
        [&](std::span<const double> totals, std::span<double> statistics) {
          const auto [candidate, reference] = evidence.values(totals);
          statistics[0] = loss_of(limit, out->logarithmic, candidate, reference);
          statistics[1] = candidate;
          statistics[2] = reference;
        },
        options.seed, options.replicates);
  };
  Bootstrap draws = run();
  auto all_finite = [&] {
    return std::isfinite(draws.estimate[0]) &&
           std::all_of(draws.replicates[0].begin(), draws.replicates[0].end(),
                       [](double v) { return std::isfinite(v); });
  };
  if (out->logarithmic && !all_finite()) {
    out->logarithmic = false;
    draws = run();
  }
  out->loss = draws.estimate[0];
  out->candidate = draws.estimate[1];
  out->reference = draws.estimate[2];
  out->bound = limit.factor == 0 ? limit.offset : limit.factor * out->reference + limit.offset;
  out->standard_error = standard_error(draws, 0, Scale::linear);
  if (std::isnan(out->loss)) {
    out->warnings.push_back("no value: " + metric + " cannot be computed from these positions");
    return;
  }
  if (out->standard_error == 0) {
    out->p_exceeds = out->loss > 0 ? 0 : 1;
    out->p_keeps = out->loss > 0 ? 1 : 0;
    return;
  }
  if (std::isnan(out->standard_error)) {
    out->warnings.push_back("too few blocks of positions for an interval");
    return;
  }
  const double degrees = draws.degrees_of_freedom;
  out->p_exceeds = student_probability(-out->loss / out->standard_error, degrees);
  out->p_keeps = student_probability(out->loss / out->standard_error, degrees);
  const double reach =
      student_quantile(1 - gate.alpha, degrees) + student_quantile(gate.power, degrees);
  out->least_detectable = reach * out->standard_error;
  const double ratio = out->least_detectable / std::fabs(out->loss);
  out->count_to_decide = std::ceil(static_cast<double>(out->count) * ratio * ratio);
  if (out->unit == "tokens" && out->documents == 1) {
    out->warnings.push_back("one document: the error rates do not cover other texts");
  }
}

/// P values of a limit on accuracy that hold for few answers and few differences too, where a
/// bootstrap knows too little spread, or none. Of items answered several times only in the latter
/// case: then all answers to an item agree in what they say, and each item counts once.
///   Against a constant: the binomial distribution at the bound.
///   Against a reference with factor 1: the score test of a difference of paired shares (Tango,
///   Statistics in Medicine 17, 1998). Of n answers b are lost and c gained; at the bound the true
///   difference is o. z = ((c - b) / n - o) / sqrt((2 q + o - o^2) / n) with q the likeliest share
///   of lost answers given o, the larger root of 2 n q^2 - (b + c - o (2 n + b - c)) q - b o (1 -
///   o) = 0. For o = 0 this is McNemar's test.
void judge_counts(const Gate& gate, const PairedAnswers& answers, LimitResult* out) {
  const Limit& limit = out->limit;
  const bool repeated = answers.items != answers.answers;
  if (repeated && out->standard_error != 0) return;
  const auto n = static_cast<double>(answers.items);
  const double scale = n / static_cast<double>(answers.answers);
  double variance = 0;  // of the difference, in shares
  if (limit.factor == 0) {
    const double bound = limit.offset / 100;
    if (!(bound > 0 && bound < 1)) return;
    const boost::math::binomial right(n, bound);
    const double k = std::round(scale * static_cast<double>(answers.correct));
    const double at_most = boost::math::cdf(right, k);
    const double at_least = k == 0 ? 1 : boost::math::cdf(boost::math::complement(right, k - 1));
    out->p_exceeds = limit.at_most ? at_least : at_most;
    out->p_keeps = limit.at_most ? at_most : at_least;
    variance = bound * (1 - bound) / n;
  } else if (limit.factor == 1 && std::fabs(limit.offset) < 100) {
    const double o = limit.offset / 100;
    const double b = scale * static_cast<double>(answers.lost);
    const double c = scale * static_cast<double>(answers.gained);
    const double half = b + c - o * (2 * n + b - c);
    const double root = std::max(0.0, half * half + 8 * n * b * o * (1 - o));
    const double q = (half + std::sqrt(root)) / (4 * n);
    variance = std::max(0.0, 2 * q + o - o * o) / n;
    const double over = (c - b) / n - o;
    // Nothing differs and nothing may: no difference is shown, nor that there is none.
    double below = 1, above = 1;
    if (variance > 0) {
      const boost::math::normal normal;
      below = boost::math::cdf(normal, over / std::sqrt(variance));
      above = boost::math::cdf(boost::math::complement(normal, over / std::sqrt(variance)));
    } else if (over != 0) {
      below = over < 0 ? 0 : 1;
      above = over > 0 ? 0 : 1;
    }
    out->p_exceeds = limit.at_most ? above : below;
    out->p_keeps = limit.at_most ? below : above;
  } else {
    return;
  }
  if (out->standard_error > 0 || variance == 0) return;
  out->standard_error = 100 * std::sqrt(variance);
  const boost::math::normal normal;
  const double reach =
      boost::math::quantile(normal, 1 - gate.alpha) + boost::math::quantile(normal, gate.power);
  out->least_detectable = reach * out->standard_error;
  const double ratio = out->least_detectable / std::fabs(out->loss);
  out->count_to_decide = std::ceil(n * ratio * ratio);
}

LimitResult evaluate_limit(const Gate& gate, const Limit& limit, const Report& base,
                           const Report& candidate, const std::vector<Pair>& pairs,
                           const CompareOptions& options) {
  LimitResult out;
  out.limit = limit;
  const int own = state_or_throw(candidate, "candidate", limit.metric.state);
  Series b{&candidate, &candidate.states[static_cast<size_t>(own)]};
  Series a = b;  // the reference; a constant is compared with nothing
  if (limit.against_base) {
    auto pair =
        std::find_if(pairs.begin(), pairs.end(), [&](const Pair& p) { return p.candidate == own; });
    if (pair == pairs.end()) {
      throw std::invalid_argument("gate: limit '" + limit.text + "': the base run has no state '" +
                                  limit.metric.state + "'; name its counterpart with --pair A=B");
    }
    a = {&base, &base.states[static_cast<size_t>(pair->base)]};
  } else if (limit.against) {
    const int other = state_or_throw(candidate, "candidate", limit.against->state);
    a = {&candidate, &candidate.states[static_cast<size_t>(other)]};
    if (limit.against->range != limit.metric.range || limit.against->task != limit.metric.task) {
      throw std::invalid_argument("gate: limit '" + limit.text +
                                  "': both sides must be of the same range and task");
    }
  }

  const std::string& metric = limit.metric.name;
  Evidence evidence;
  double lowest = metric == "growth" ? -std::numeric_limits<double>::infinity() : 0;
  double highest = std::numeric_limits<double>::infinity();
  if (metric == "top1" || metric == "accuracy") highest = 100;
  if (metric == "perplexity") lowest = 1;
  double chance = kNaN;
  if (metric == "accuracy") {
    const PairedAnswers answers = paired_answers(a, b, limit.metric.task, limit.text);
    // Judged by itself alone the candidate must have answered what the base has.
    for (const StateReport* state : {a.state, b.state}) {
      if (limit.against_base) break;
      const auto pair = std::find_if(pairs.begin(), pairs.end(), [&](const Pair& p) {
        return &candidate.states[static_cast<size_t>(p.candidate)] == state;
      });
      if (pair == pairs.end()) continue;
      const Series counterpart{&base, &base.states[static_cast<size_t>(pair->base)]};
      if (paired_answers(counterpart, counterpart, limit.metric.task, "").items > 0)
        paired_answers(counterpart, {&candidate, state}, limit.metric.task, limit.text);
    }
    out.unit = "items";
    out.count = answers.items;
    chance = answers.chance;
    evidence.sums = answers.sums;
    evidence.values = [](std::span<const double> t) {
      return std::pair(100 * t[1] / t[2], 100 * t[0] / t[2]);
    };
    judge(gate, options.statistics, evidence, &out);
    judge_counts(gate, answers, &out);
    if (limit.against_base || limit.against) {
      out.warnings.push_back(
          format("lost %" PRId64 ", gained %" PRId64 " answers, exact McNemar p = %.3g",
                 answers.lost, answers.gained, mcnemar_exact(answers.lost, answers.gained)));
    }
  } else {
    const auto documents = common_documents(*a.report, *b.report);
    const int64_t length = longest(base, candidate);
    std::vector<Range> ranges;
    if (metric == "growth") {
      const std::vector<Bin> bins = growth_bins(position_bins(length));
      for (const Bin& bin : bins) ranges.push_back({bin.first, bin.last});
      if (ranges.size() < 2) {
        throw std::invalid_argument(
            "gate: limit '" + limit.text +
            "': growth needs two octaves (more than 2048 positions), there are " +
            std::to_string(length) + " positions in common");
      }
    } else {
      ranges.push_back(resolve_range(limit.metric.range, length, limit.text));
    }
    const int64_t end = ranges.back().last;
    const bool allowed =
        std::find(options.allow.begin(), options.allow.end(), "data") != options.allow.end();
    check_same_positions(limit.text, base, candidate, end, allowed);
    check_measured(limit.text, "candidate", b, base, end);
    if (limit.against_base) check_measured(limit.text, "base", a, candidate, end);
    if (limit.against) check_measured(limit.text, "candidate", a, base, end);
    PairedPositions positions = paired_positions(a, b, documents, ranges);
    out.unit = "tokens";
    out.count = positions.positions;
    out.documents = static_cast<int>(positions.sums.documents.size());
    if (metric == "non_finite") {
      out.candidate = static_cast<double>(positions.non_finite_b);
      out.reference = limit.factor == 0 ? kNaN : static_cast<double>(positions.non_finite_a);
      out.bound = limit.factor == 0 ? limit.offset : limit.factor * out.reference + limit.offset;
      out.loss = loss_of(limit, false, out.candidate, out.reference);
      out.standard_error = 0;
      out.p_exceeds = out.loss > 0 ? 0 : 1;
      out.p_keeps = out.loss > 0 ? 1 : 0;
      return out;
    }
    evidence.sums = std::move(positions.sums);
    evidence.values = [&](std::span<const double> t) {
      return std::pair(metric_value(metric, ranges, t, 1), metric_value(metric, ranges, t, 0));
    };
    judge(gate, options.statistics, evidence, &out);
    if (positions.non_finite_b > 0) {
      const std::string what = format("%" PRId64 " positions of %s are not finite",
                                      positions.non_finite_b, b.state->info.name.c_str());
      if (gate.allow_non_finite) {
        out.warnings.push_back(what + ", left out on both sides");
      } else {
        out.warnings.push_back(what + ": fails (allow them with non_finite: allow)");
        out.p_exceeds = 0;
        out.p_keeps = 1;
      }
    }
    if (positions.non_finite_a > 0 && a.state != b.state) {
      out.warnings.push_back(
          format("%" PRId64 " positions of the reference are not finite, left out on both sides",
                 positions.non_finite_a));
    }
  }
  if (limit.factor == 0) out.reference = kNaN;
  if (limit.at_most ? highest <= out.bound : lowest >= out.bound) {
    out.warnings.push_back("this limit can never fail: " + metric + " always lies between " +
                           number(lowest) + " and " + number(highest));
  }
  // A mean lies at the end of its range only if all values do.
  const bool is_mean = metric == "kl.mean" || metric == "top1" || metric == "accuracy";
  const bool outside = limit.at_most ? lowest > out.bound : highest < out.bound;
  const bool at_end = limit.at_most ? out.bound == lowest && out.candidate > lowest
                                    : out.bound == highest && out.candidate < highest;
  if (outside) {
    out.warnings.push_back("this limit can never be kept: " + metric + " always lies between " +
                           number(lowest) + " and " + number(highest));
  }
  if (outside || (is_mean && at_end)) {
    out.p_exceeds = 0;
    out.p_keeps = 1;
  }
  if (std::isfinite(chance) && chance > 0 && std::isfinite(out.reference) &&
      std::isfinite(out.least_detectable) && out.reference - out.least_detectable < chance) {
    out.warnings.push_back(
        format("the reference (%.1f) lies within the least detectable effect (%.1f) of chance "
               "(%.1f): a loss can "
               "hardly show",
               out.reference, out.least_detectable, chance));
  }
  return out;
}

/// Verdicts of all limits. That a limit is exceeded is shown when its p stays below alpha after
/// Holm's correction over the limits (their false alarms add up); that it is kept, when its own p
/// does (all have to be kept, so errors there do not).
void decide(const Gate& gate, std::vector<LimitResult>* results) {
  std::vector<LimitResult*> order;
  for (LimitResult& r : *results) order.push_back(&r);
  std::stable_sort(order.begin(), order.end(), [](const LimitResult* a, const LimitResult* b) {
    return a->p_exceeds < b->p_exceeds;
  });
  bool rejecting = true;
  for (size_t i = 0; i < order.size(); ++i) {
    LimitResult& r = *order[i];
    rejecting = rejecting && r.p_exceeds < gate.alpha / static_cast<double>(order.size() - i);
    if (rejecting) {
      r.verdict = Verdict::fail;
    } else if (r.p_keeps < gate.alpha) {
      r.verdict = Verdict::pass;
    } else {
      r.verdict = Verdict::undecided;
      r.blocks = gate.undecided_fails.value_or(r.limit.kind == LimitKind::noninferior);
    }
  }
}

// ---- tables ----

const char* verdict_text(const LimitResult& r) {
  if (r.verdict == Verdict::pass) return "pass";
  if (r.verdict == Verdict::fail) return "FAIL";
  return r.blocks ? "UNDECIDED" : "undecided";
}

/// A loss in the terms of its metric: a factor for logarithmic ones.
std::string effect_text(const LimitResult& r, double effect) {
  if (!std::isfinite(effect)) return "-";
  return r.logarithmic ? "x " + format("%.4g", std::exp(r.limit.at_most ? effect : -effect))
                       : number(effect);
}

Table limits_table(const std::vector<LimitResult>& results) {
  Table table;
  table.title = "Gate";
  table.head = {"verdict",   "limit",     "kind",         "candidate",
                "reference", "bound",     "beyond bound", "least detectable",
                "n",         "p exceeds", "p keeps"};
  table.left = {1, 2};
  for (const LimitResult& r : results) {
    table.rows.push_back({verdict_text(r), r.limit.text,
                          r.limit.kind == LimitKind::regression ? "regression" : "noninferior",
                          number(r.candidate), number(r.reference), number(r.bound),
                          effect_text(r, r.loss), effect_text(r, r.least_detectable),
                          std::to_string(r.count) + " " + r.unit, format("%.3g", r.p_exceeds),
                          format("%.3g", r.p_keeps)});
    if (r.verdict == Verdict::undecided && std::isfinite(r.count_to_decide)) {
      table.notes.push_back(r.limit.text + ": undecided; about " +
                            format("%.3g", r.count_to_decide) + " " + r.unit +
                            " like these would decide if the difference stays as it is");
    }
    for (const std::string& warning : r.warnings)
      table.notes.push_back(r.limit.text + ": " + warning);
  }
  return table;
}

Table pair_table(const Report& base, const Report& candidate, const std::vector<Pair>& pairs,
                 const StatisticsOptions& options) {
  Table table;
  table.title = "Candidate against base, over the positions that both have";
  table.head = {"state",
                "tokens",
                "KL base",
                "KL candidate",
                "KL ratio [95 %]",
                "ppl ratio [95 %]",
                "top-1 change/points [95 %]",
                "non-finite"};
  const auto documents = common_documents(base, candidate);
  table.notes = unpaired_states(base, candidate, pairs);
  for (const Pair& pair : pairs) {
    const Series a{&base, &base.states[static_cast<size_t>(pair.base)]};
    const Series b{&candidate, &candidate.states[static_cast<size_t>(pair.candidate)]};
    const std::string without = left_out(a, b);
    if (!without.empty()) table.notes.push_back(pair.name + ": left out: " + without);
    const bool any = std::any_of(documents.begin(), documents.end(),
                                 [&](const auto& d) { return measured(a, b, d) > 0; });
    if (!any) continue;
    // Documents of different lengths each count as far as both runs have them.
    PairedPositions positions;
    positions.sums.columns = kColumns;
    positions.sums.cells = 1;
    for (const auto& d : documents) {
      const int64_t end = measured(a, b, d);
      if (end == 0) continue;
      PairedPositions one = paired_positions(a, b, {d}, {{0, end}});
      positions.positions += one.positions;
      positions.non_finite_a += one.non_finite_a;
      positions.non_finite_b += one.non_finite_b;
      for (auto& cells : one.sums.documents) positions.sums.documents.push_back(std::move(cells));
    }
    const Bootstrap draws = bootstrap(
        positions.sums, 3,
        [](std::span<const double> t, std::span<double> out) {
          out[0] = t[kKlB] / t[kKlA];
          out[1] = std::exp((t[kNllB] - t[kNllA]) / t[kNllCount]);
          out[2] = 100 * (t[kTopB] - t[kTopA]) / t[kTopCount];
        },
        options.seed, options.replicates);
    double kl_a = 0, kl_b = 0, count = 0;
    for (const auto& cells : positions.sums.documents) {
      for (const BlockSums::Cell& cell : cells) {
        for (size_t i = 0; i < cell.sums.size(); i += kColumns) {
          kl_a += cell.sums[i + kKlA];
          kl_b += cell.sums[i + kKlB];
          count += cell.sums[i + kKlCount];
        }
      }
    }
    auto estimate = [&](int statistic, Scale scale) {
      Estimate e;
      e.value = draws.estimate[static_cast<size_t>(statistic)];
      e.interval = interval(draws, statistic, scale);
      return number(e);
    };
    table.rows.push_back(
        {pair.name, std::to_string(positions.positions), number(kl_a / count), number(kl_b / count),
         estimate(0, Scale::logarithm), estimate(1, Scale::logarithm), estimate(2, Scale::linear),
         std::to_string(positions.non_finite_a) + " / " + std::to_string(positions.non_finite_b)});
  }
  return table;
}

/// Accuracy of each task on both sides.
Table answer_table(const Report& base, const Report& candidate, const std::vector<Pair>& pairs,
                   const StatisticsOptions& options) {
  Table table;
  table.title = "Accuracy in percent, of the items that both have answered";
  table.head = {"state",         "task", "items",  "base",     "candidate",
                "change [95 %]", "lost", "gained", "McNemar p"};
  table.left = {1};
  std::set<std::string> tasks;
  for (const ItemInfo& item : candidate.items) tasks.insert(item.task);
  table.notes = unpaired_states(base, candidate, pairs);
  for (const Pair& pair : pairs) {
    const Series a{&base, &base.states[static_cast<size_t>(pair.base)]};
    const Series b{&candidate, &candidate.states[static_cast<size_t>(pair.candidate)]};
    if (a.state->answers.empty() || b.state->answers.empty()) continue;
    for (const std::string& task : tasks) {
      const PairedAnswers answers = paired_answers(a, b, task, "");
      if (answers.alone > 0) {
        table.notes.push_back(pair.name + ", " + task + ": " + std::to_string(answers.alone) +
                              " answers that one run alone has are left out");
      }
      if (answers.items == 0) continue;
      const Bootstrap draws = bootstrap(
          answers.sums, 3,
          [](std::span<const double> t, std::span<double> out) {
            out[0] = 100 * (t[1] - t[0]) / t[2];
            out[1] = 100 * t[0] / t[2];
            out[2] = 100 * t[1] / t[2];
          },
          options.seed, options.replicates);
      Estimate change;
      change.value = draws.estimate[0];
      change.interval = interval(draws, 0, Scale::linear);
      if (answers.lost + answers.gained == 0) {
        const Interval limits = no_difference(answers.items);
        change.interval = {100 * limits.low, 100 * limits.high};
      }
      table.rows.push_back({pair.name, task, std::to_string(answers.items),
                            format("%.2f", draws.estimate[1]), format("%.2f", draws.estimate[2]),
                            number(change), std::to_string(answers.lost),
                            std::to_string(answers.gained),
                            format("%.3g", mcnemar_exact(answers.lost, answers.gained))});
    }
  }
  return table;
}

std::string xml(const std::string& text) {
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
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

}  // namespace

int Comparison::exit_code() const {
  int code = 0;
  for (const LimitResult& r : limits) {
    if (r.verdict == Verdict::fail) return 3;
    if (r.verdict == Verdict::undecided && r.blocks) code = 4;
  }
  return code;
}

std::vector<LimitResult> evaluate_gate(const Gate& gate, const Report& base,
                                       const Report& candidate, const CompareOptions& options) {
  const std::vector<Pair> pairs = pair_states(base, candidate, options);
  std::vector<LimitResult> results;
  for (const Limit& limit : gate.limits) {
    results.push_back(evaluate_limit(gate, limit, base, candidate, pairs, options));
  }
  decide(gate, &results);
  return results;
}

Comparison compare(const Report& base, const Report& candidate, const CompareOptions& options,
                   const Gate* gate) {
  Comparison out;
  check_allowed(options.allow);
  const FieldCheck check(base, candidate, options.allow, &out.differences);
  check.equal("job", base.run.job, candidate.run.job);
  check.equal("model", base.run.model_sha256, candidate.run.model_sha256);
  check.equal("tokenizer", base.run.tokenizer_sha256, candidate.run.tokenizer_sha256);
  check.equal("data", documents_text(base), documents_text(candidate));
  // Answers alone are compared state by state; which of them is the baseline plays no part.
  if (!base.documents.empty() || !candidate.documents.empty())
    check.equal("baseline", base.run.baseline, candidate.run.baseline);
  check.equal("prompt_tokens", std::to_string(base.run.prompt_tokens),
              std::to_string(candidate.run.prompt_tokens));
  check_tasks(check, base, candidate);
  check_items(check, "gold", base, candidate, &ItemInfo::gold);
  check_items(check, "prompts", base, candidate, &ItemInfo::prompt_sha256);
  check_items(check, "grading", base, candidate, &ItemInfo::grading);
  for (const StateReport& state : candidate.states) {
    const int other = base.find_state(state.info.name);
    if (other < 0) continue;
    const StateInfo& info = base.states[static_cast<size_t>(other)].info;
    if (info.sha256 == state.info.sha256) continue;
    check.equal("states", lines_beside(info, state.info), lines_beside(state.info, info));
  }
  check.mention("device", base.run.device, candidate.run.device);
  check.mention("compute", base.run.compute, candidate.run.compute);
  check.mention("dense", base.run.dense, candidate.run.dense);
  check.mention("revision", base.run.revision, candidate.run.revision);

  const std::vector<Pair> pairs = pair_states(base, candidate, options);
  Table table = pair_table(base, candidate, pairs, options.statistics);
  std::vector<std::string> notes = table.notes;
  if (!table.rows.empty()) out.tables.push_back(std::move(table));
  table = answer_table(base, candidate, pairs, options.statistics);
  notes.insert(notes.end(), table.notes.begin(), table.notes.end());
  if (!table.rows.empty()) out.tables.push_back(std::move(table));
  if (gate == nullptr && out.tables.empty()) {
    throw std::invalid_argument(
        "compare: the runs have no measured position and no answer in common" +
        (notes.empty() ? std::string() : ": " + notes[0]) +
        "; compare runs over the same documents or items, as far as they are finished");
  }
  if (gate != nullptr) {
    out.limits = evaluate_gate(*gate, base, candidate, options);
    out.tables.push_back(limits_table(out.limits));
    out.tables.back().notes.push_back(format(
        "alpha %.3g over %zu limit%s (Holm), power %.3g of the least detectable effect; beyond the "
        "bound and least detectable: x is a factor",
        gate->alpha, gate->limits.size(), gate->limits.size() == 1 ? "" : "s", gate->power));
  }
  return out;
}

std::string comparison_text(const Comparison& comparison) {
  std::string text;
  for (const std::string& difference : comparison.differences) text += difference + "\n";
  for (const Table& table : comparison.tables) text += (text.empty() ? "" : "\n") + as_text(table);
  return text;
}

std::string comparison_markdown(const Comparison& comparison) {
  std::string text;
  for (const std::string& difference : comparison.differences) text += "- " + difference + "\n";
  for (const Table& table : comparison.tables)
    text += (text.empty() ? "" : "\n") + as_markdown(table);
  return text;
}

std::string comparison_junit(const Comparison& comparison) {
  size_t failures = 0, skipped = 0;
  std::string cases;
  for (const LimitResult& r : comparison.limits) {
    const std::string summary =
        "candidate " + number(r.candidate) + ", bound " + number(r.bound) + ", beyond the bound " +
        effect_text(r, r.loss) + ", n " + std::to_string(r.count) + " " + r.unit + ", p exceeds " +
        format("%.3g", r.p_exceeds) + ", p keeps " + format("%.3g", r.p_keeps);
    std::string detail = summary;
    for (const std::string& warning : r.warnings) detail += "; " + warning;
    cases += "    <testcase classname=\"replayeval.gate\" name=\"" + xml(r.limit.text) + "\">\n";
    if (r.verdict == Verdict::fail || (r.verdict == Verdict::undecided && r.blocks)) {
      ++failures;
      cases += "      <failure message=\"" + xml(std::string(verdict_text(r)) + ": " + summary) +
               "\">" + xml(detail) + "</failure>\n";
    } else if (r.verdict == Verdict::undecided) {
      ++skipped;
      cases += "      <skipped message=\"" + xml("undecided: " + summary) + "\"/>\n";
    } else {
      cases += "      <system-out>" + xml(detail) + "</system-out>\n";
    }
    cases += "    </testcase>\n";
  }
  return "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n  <testsuite name=\"replayeval "
         "compare\" tests=\"" +
         std::to_string(comparison.limits.size()) + "\" failures=\"" + std::to_string(failures) +
         "\" errors=\"0\" skipped=\"" + std::to_string(skipped) + "\">\n" + cases +
         "  </testsuite>\n</testsuites>\n";
}

namespace {

/// Calls `equal(field, a, b)` for what must agree between the items and tasks of two runs.
template <class Equal>
void merge_items(const Report& a, const Report& b, Equal equal) {
  for (const TaskInfo& task : a.run.tasks) {
    for (const TaskInfo& other : b.run.tasks) {
      if (other.name == task.name)
        equal("definition of task " + task.name, task.sha256, other.sha256);
    }
  }
  equal("repeats", std::to_string(a.run.repeats), std::to_string(b.run.repeats));
  equal("number of items", std::to_string(a.items.size()), std::to_string(b.items.size()));
  for (size_t i = 0; i < a.items.size(); ++i) {
    const std::string place = " of item number " + std::to_string(i);
    equal("name" + place, item_key(a.items[i]), item_key(b.items[i]));
    equal("prompt" + place, a.items[i].prompt_sha256, b.items[i].prompt_sha256);
    equal("gold" + place, a.items[i].gold, b.items[i].gold);
    equal("grading" + place, a.items[i].grading, b.items[i].grading);
  }
}

}  // namespace

Report merge_reports(const std::vector<Report>& reports, const std::string& command) {
  if (reports.empty()) throw std::invalid_argument(command + ": no run");
  Report out = reports.front();
  for (size_t i = 1; i < reports.size(); ++i) {
    const Report& next = reports[i];
    auto refuse = [&](const std::string& field, const std::string& a, const std::string& b) {
      auto shown = [](const std::string& value) {
        return value.size() > 160 ? value.substr(0, 160) + "..." : value;
      };
      throw std::invalid_argument(command + ": " + out.path + " and " + next.path +
                                  " cannot be shown in one table: " + field + " differs: '" +
                                  shown(a) + "' and '" + shown(b) + "'; give each of them a " +
                                  command + " of its own");
    };
    auto equal = [&](const std::string& field, const std::string& a, const std::string& b) {
      if (a != b) refuse(field, a, b);
    };
    equal("job", out.run.job, next.run.job);
    equal("model", out.run.model_sha256, next.run.model_sha256);
    equal("tokenizer", out.run.tokenizer_sha256, next.run.tokenizer_sha256);
    equal("documents", documents_text(out), documents_text(next));
    merge_items(out, next, equal);
    equal("baseline", out.run.baseline, next.run.baseline);
    const int a = out.baseline(), b = next.baseline();
    if (a < 0 || b < 0) refuse("baseline", a < 0 ? "none" : "there", b < 0 ? "none" : "there");
    for (size_t d = 0; d < out.documents.size(); ++d) {
      const StateDocument& x = out.states[static_cast<size_t>(a)].documents[d];
      const StateDocument& y = next.states[static_cast<size_t>(b)].documents[d];
      equal("tokens of document " + out.documents[d].id, std::to_string(x.length),
            std::to_string(y.length));
      for (size_t t = 0; t < x.nll.size(); ++t) {
        if (x.nll[t] != y.nll[t] && !(std::isnan(x.nll[t]) && std::isnan(y.nll[t]))) {
          refuse("the " + out.run.baseline + " row at position " + std::to_string(t) +
                     " of document " + out.documents[d].id,
                 format("%.9g", static_cast<double>(x.nll[t])),
                 format("%.9g", static_cast<double>(y.nll[t])));
        }
      }
    }
    const std::vector<Answer>& answers = out.states[static_cast<size_t>(a)].answers;
    const std::vector<Answer>& others = next.states[static_cast<size_t>(b)].answers;
    equal("number of answers of " + out.run.baseline, std::to_string(answers.size()),
          std::to_string(others.size()));
    for (size_t k = 0; k < answers.size(); ++k) {
      const std::string answer = out.run.baseline + "'s answer to " +
                                 item_key(out.items[static_cast<size_t>(answers[k].item)]) +
                                 ", repeat " + std::to_string(answers[k].repeat);
      equal("place of " + answer, std::to_string(answers[k].item), std::to_string(others[k].item));
      equal("text of " + answer, answers[k].text, others[k].text);
      equal("verdict of " + answer, answers[k].correct ? "right" : "wrong",
            others[k].correct ? "right" : "wrong");
    }
    for (const StateReport& state : next.states) {
      const int same = out.find_state(state.info.name);
      if (same < 0) {
        out.states.push_back(state);
      } else {
        equal("definition of state " + state.info.name,
              out.states[static_cast<size_t>(same)].info.sha256, state.info.sha256);
      }
    }
    out.path += " " + next.path;
  }
  return out;
}

}  // namespace replayeval
