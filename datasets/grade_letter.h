// Letters of multiple-choice answers: the extraction rules that published harnesses use, by name.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace replayeval {

/// What a rule found in a text.
struct LetterAnswer {
  char letter = 0;    // as the rule returns it; 0: no answer
  int stage = 0;      // which of the rule's stages answered, from 1; 0: none
  size_t offset = 0;  // byte offset of the letter in the text

  explicit operator bool() const { return letter != 0; }
};

/// One extraction rule. Rules are pure functions of text and options, in time linear in the text.
struct LetterRule {
  std::string_view name;
  std::string_view source;
  std::string_view description;
  int stages;
  LetterAnswer (*extract)(std::string_view text, std::span<const std::string> options);
};

/// All rules. "Word", "white space" and "." are those of Python's `re` on text (Unicode).
///   mmlu_pro_l1            first "answer is", one space, optional "(", A-J; case-sensitive, no
///   word end mmlu_pro_l2            (1) the above; (2) on the first line that has one, the last
///   "answer:" or "Answer:", white space, A-J;
///                          (3) the last A-J that is a word
///   lm_eval_custom_extract the filter of lm-eval's mmlu_pro: as mmlu_pro_l1
///   simple_evals_abcd      first "Answer" in any case, blanks, ":", blanks, optional "$", A-D in
///   any case (returned as written, so
///                          that a lower-case letter is not the gold letter, as upstream)
///   gpqa_authors_abcd      first "answer is (.)", else "Answer: (.)", "answer: (.)", "answer (.)",
///   "(.)"; the letter must be A-D, else the
///                          next pattern
///   nemo_answer_colon      last "Answer" in any case with up to two * or _ around, ":", A-Z that
///   no letter or digit follows; upper case nemo_skills            (1) the last box, (2) else "The
///   final answer is" to the end of the text: one character, or the last lone
///                          capital in it; (3) nemo_answer_colon
///   lm_eval_multi_choice, lm_eval_gpqa_flexible
///                          (1) first / last parenthesised capital; (2) first / last option text
///                          (in lower case, without punctuation, for the second); (3) ":" white
///                          space, letter of an option
///   lm_eval_gpqa_strict    what follows the first "The answer is " in its line, without the last
///   character and punctuation, if it is one letter boxed_letter           the letter that the last
///   \boxed{...} holds, through \text{...}, parentheses and a full stop last_answer ReplayEval's
///   own: the last of the boxed letters and the letters after "answer" (is, :, markup), A-J or
///                          as many as there are options
std::span<const LetterRule> letter_rules();

/// The rule of a name. Throws std::invalid_argument, listing the names.
const LetterRule& letter_rule(std::string_view name);

/// Applies a rule by name; `options` are the texts of the options where a rule reads them. Throws
/// as letter_rule.
LetterAnswer extract_letter(std::string_view rule, std::string_view text,
                            std::span<const std::string> options = {});

}  // namespace replayeval
