// Comparison of two runs over the same positions and items, and a gate: limits that a candidate
// must keep, judged on paired differences with stated error rates.
#pragma once

#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reports/results.h"
#include "reports/statistics.h"
#include "reports/tables.h"

namespace replayeval {

/// A quantity of one state: "kl.mean[fp16+sr/nvfp4]@98304-131072".
///   kl.mean, nll.mean (nats), perplexity, top1 (percent), non_finite (positions), growth,
///   accuracy, accuracy.TASK (percent)
struct MetricRef {
  std::string name;
  std::string task;  // of accuracy; empty: all
  std::string state;
  std::string range;  // "98304-131072", a bin's name, "last", or empty for all positions
};

/// What a limit is: `regression` fails when the loss is shown to exceed it, and is undecided (which
/// passes) in between; `noninferior` passes only when the loss is shown to stay below it.
enum class LimitKind : uint8_t { regression, noninferior };

/// metric <= factor * reference + offset, or >=. The reference is the paired state of the base run
/// (`base`), a metric of the candidate run, or nothing (a constant, which is then the offset).
struct Limit {
  std::string text;
  LimitKind kind = LimitKind::regression;
  MetricRef metric;
  bool at_most = true;
  double factor = 0;
  bool against_base = false;
  std::optional<MetricRef> against;
  double offset = 0;
};

struct Gate {
  std::string path;
  double alpha = 0.05;                  // chance of a false alarm, of all limits together (Holm)
  double power = 0.8;                   // of the least detectable effect
  std::optional<bool> undecided_fails;  // none: of noninferior limits only
  bool allow_non_finite = false;
  std::vector<Limit> limits;
};

/// Parses one limit. Throws std::invalid_argument naming `place`.
Limit parse_limit(const std::string& text, LimitKind kind, const std::string& place);

/// Reads a gate file:
///   alpha: 0.05          power: 0.8         undecided: pass | fail        non_finite: fail | allow
///   limits: [ "kl.mean[nvfp4+sr]@last <= 1.3 * base", {limit: "accuracy.gpqa[nvfp4+sr] >= base
///   - 1.0", kind: noninferior} ]
/// Throws std::invalid_argument with line and column for an unknown key or a wrong value,
/// std::runtime_error when unreadable.
Gate read_gate(const std::filesystem::path& path);

enum class Verdict : uint8_t { pass, fail, undecided };

struct LimitResult {
  Limit limit;
  Verdict verdict = Verdict::undecided;
  bool blocks = false;  // undecided, and not allowed to be
  double candidate = std::numeric_limits<double>::quiet_NaN();
  double reference =
      std::numeric_limits<double>::quiet_NaN();  // of base or of the metric compared with
  double bound = std::numeric_limits<double>::quiet_NaN();  // factor * reference + offset
  std::string unit;                                         // tokens | items
  int64_t count = 0;                                        // of paired tokens or items
  int documents = 0;
  bool logarithmic = false;  // loss and its like are logarithms of ratios
  double loss = std::numeric_limits<double>::quiet_NaN();  // beyond the bound, positive is worse
  double standard_error = std::numeric_limits<double>::quiet_NaN();
  double p_exceeds = 1;  // that no loss at all beyond the bound would show this one (before Holm)
  double p_keeps = 1;    // that a loss at the bound would show one this small
  double least_detectable = std::numeric_limits<double>::quiet_NaN();
  double count_to_decide = std::numeric_limits<double>::quiet_NaN();
  std::vector<std::string> warnings;
};

struct CompareOptions {
  std::vector<std::string> allow;                          // fields whose difference is accepted
  std::vector<std::pair<std::string, std::string>> pairs;  // (state of base, state of candidate)
  StatisticsOptions statistics;
};

struct Comparison {
  std::vector<std::string> differences;  // accepted ones, and those that do not forbid comparing
  std::vector<Table> tables;
  std::vector<LimitResult> limits;

  /// 0, 3 when a limit failed, 4 when one came out undecided that must not.
  int exit_code() const;
};

/// Compares `candidate` with `base`. Throws std::invalid_argument naming the field and both values
/// when model, tokenizer, data, baseline, prompts, grading rules or the definition of an equally
/// named state differ and are not allowed to; for a field to allow that is not known; when the runs
/// have nothing in common; and when a state, task, answer, document or position that a limit is
/// about is missing on either side. Positions that an experiment has and its run has not measured
/// yet are missing whatever is allowed. With "data" allowed, documents and positions that the
/// experiment of one run alone has are left out. Without a gate, whatever is missing is left out
/// and named in the notes of the table.
Comparison compare(const Report& base, const Report& candidate, const CompareOptions& options,
                   const Gate* gate);

/// The limits of a gate alone, for runs that compare() accepts.
std::vector<LimitResult> evaluate_gate(const Gate& gate, const Report& base,
                                       const Report& candidate, const CompareOptions& options);

/// Everything on a terminal; GitHub-flavoured Markdown; JUnit XML (one test case a limit).
std::string comparison_text(const Comparison& comparison);
std::string comparison_markdown(const Comparison& comparison);
std::string comparison_junit(const Comparison& comparison);

/// One report with the states of all, for showing them side by side. Throws std::invalid_argument,
/// beginning with `command`, naming what differs when model, tokenizer, documents or the baseline's
/// figures do.
Report merge_reports(const std::vector<Report>& reports, const std::string& command = "show");

}  // namespace replayeval
