// Whether two mathematical answers are equal: by value, and by the string rules that published
// harnesses use.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace replayeval {

struct MathOptions {
  // A decimal answer equals a number that is no decimal itself when it is that number rounded to
  // its own places: at least this many decimals and this many significant digits. 0: never.
  int decimal_places = 6;
  uint64_t seed = 1;  // of the points at which expressions with variables are compared
};

struct MathVerdict {
  bool equal = false;
  std::string_view reason;  // what decided: "spelling", "value", "words", "time", "option", "no
                            // answer", "unequal", "not understood"
};

/// Compares two answers (LaTeX or plain text, with or without dollar signs).
///   numbers     exactly where rational; otherwise complex balls of 256 bits and more (MPFR), which
///   must agree to 64 bits or more variables   at six points; a point where a root or logarithm of
///   a negative number takes its principal value does not count against lists       "1, 2", "1 and
///   2", {1, 2} are sets; (1, 2) has an order; a list agrees with a tuple in its order intervals
///   (0, 1], 0 < x <= 1, x in (0, 1]; unions equations   "x = 5" agrees with "5"; two equations
///   agree when one is a multiple of the other; inequalities by a positive one percent     10%
///   agrees with 10 and with 0.1;  units: dropped, unless both sides have a known one (then
///   converted or unequal) plus-minus  two values;  mixed numbers, digits in a base, ratios, times
///   of day, matrices, words (without case)
/// Huge powers and factorials are refused (unequal unless spelled alike). Time is bounded: answers
/// over kMaxAnswerBytes are compared by spelling alone.
MathVerdict compare_math(std::string_view gold, std::string_view answer,
                         const MathOptions& options = {});

/// The final answer that a text states: the last boxed group; else what follows "final answer is"
/// or "answer is"; else the last formula between dollar signs, \( \) or \[ \]; else the text itself
/// if it is no prose; else its last number. Empty: none, or the last box is not closed. Linear
/// time.
std::string final_math_answer(std::string_view text);

/// The normaliser of hendrycks/math. Throws std::runtime_error where the published function raises.
std::string hendrycks_normalized(std::string_view answer);

/// The normaliser of Minerva (Lewkowycz et al. 2022, appendix D.1) as lm-evaluation-harness has it.
std::string minerva_normalized(std::string_view answer);

/// Grading rules by name: "math" (compare_math), "hendrycks" (equal after its normaliser; plain
/// equality where that raises), "minerva" (equal after its normaliser).
struct MathRule {
  std::string_view name;
  std::string_view source;
  std::string_view description;
  MathVerdict (*compare)(std::string_view gold, std::string_view answer,
                         const MathOptions& options);
};

std::span<const MathRule> math_rules();

/// The rule of a name. Throws std::invalid_argument, listing the names.
const MathRule& math_rule(std::string_view name);

}  // namespace replayeval
