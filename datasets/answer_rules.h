// Extraction of the final answer from what a model wrote, and its comparison with the known answer:
// one table of rules for letters and free answers, by name.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace replayeval {

struct ExtractedAnswer {
  std::string text;  // letter or answer; empty: none
  int stage = 0;     // of the rule, from 1; 0: none

  explicit operator bool() const { return stage != 0; }
};

/// One extraction rule. Rules are pure functions of text and options, in time linear in the text.
struct AnswerRule {
  std::string_view name;
  std::string_view source;
  std::string_view description;
  int stages;
  bool letters;  // it finds the letter of an option, not a free answer
};

/// All rules: the letter rules of datasets/grade_letter.h, then those for free answers. "." and
/// white space are Python's.
///   boxed               content of the last box
///   final_answer        final_math_answer (datasets/grade_math.h): boxes, "final answer is", last
///                       formula, last number
///   minerva             between "Final Answer: The final answer is" and ". I hope it is correct."
///                       (at the end of the text without the first three words), on one line
///   lm_eval_hendrycks   between the first and the last dollar sign; the whole text without two
///   simple_evals_line   first "Answer" in any case, white space, ":", white space, to the line's
///   end gsm8k_strict        first "#### " and a number (digits, commas, full stops, a minus sign)
///   gsm8k_flexible      last run of digits, commas, full stops and dollar signs
///   whole               the text, trimmed
std::vector<AnswerRule> answer_rules();

/// Whether a rule of that name exists.
bool is_answer_rule(std::string_view name);

/// Applies a rule by name; `options` are the texts of the options where a rule reads them. Throws
/// std::invalid_argument for an unknown name, listing all.
ExtractedAnswer extract_answer(std::string_view rule, std::string_view text,
                               std::span<const std::string> options = {});

/// One way to compare free answers.
struct CompareRule {
  std::string_view name;
  std::string_view source;
  std::string_view description;
};

/// The math rules of datasets/grade_math.h (math, hendrycks, minerva), "exact": equal after
/// trimming, and "gsm8k": equal without case, commas, dollar signs, a final full stop, and what
/// stands up to
/// "#### ".
std::vector<CompareRule> compare_rules();

/// Whether the answers are equal by a rule. Throws std::invalid_argument for an unknown name,
/// listing all.
bool answers_equal(std::string_view rule, std::string_view gold, std::string_view answer);

}  // namespace replayeval
