// Stored grader cases against the rules of this program (`replayeval check grader FILE.jsonl`).
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace replayeval {

/// A case on which a rule and the stored answer differ.
struct GraderDisagreement {
  std::string id;
  size_t line = 0;       // of the file, from 1
  std::string expected;  // "null": no answer
  std::string got;
  std::string excerpt;        // of the text, or gold and answer; at most 160 bytes
  bool false_accept = false;  // equality: accepted although unequal
};

/// One rule on one kind of case.
struct GraderCheck {
  std::string rule;     // letter or math rule, "last_boxed", "mmlu_pro_l2 stage", ...
  std::string against;  // the stored column
  size_t cases = 0;
  size_t agree = 0;
  size_t false_accepts = 0;  // equality only
  size_t false_rejects = 0;
  double slowest_seconds = 0;               // of one case
  std::optional<GraderDisagreement> worst;  // a false accept before anything else, then the first
  std::vector<GraderDisagreement> disagreements;
};

struct GraderReport {
  std::string file;
  size_t rows = 0;
  size_t unknown_rows = 0;          // of no known layout
  std::vector<GraderCheck> checks;  // in the order in which the rules appear

  const GraderCheck* find(const std::string& rule, const std::string& against) const;
};

/// Grades every row of a JSON-lines file and compares. Layouts, told apart by their keys:
///   output, expect {rule: letter or null, mmlu_pro_stage, ...}        letters; "[invalid]" counts
///   as none gold, answer, equal [, equal_true, mode, upstream_verdicts]       equality: rule math
///   against the true verdict (bare pairs and
///                                                                      texts apart), hendrycks and
///                                                                      minerva against their
///                                                                      columns
///   text, expected [, hendrycks_last_boxed]                           boxed answers
///   answer, pred, model_outputs                                       published MMLU-Pro answers:
///   mmlu_pro_l2 against pred (a
///                                                                      letter that was drawn for
///                                                                      no answer differs)
/// Throws std::runtime_error for a file that cannot be read or a line that is no JSON object,
/// naming the line.
GraderReport check_grader(const std::filesystem::path& file);

}  // namespace replayeval
