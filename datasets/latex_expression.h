// Answers written in LaTeX or plain text, as trees: numbers, expressions, lists, sets, intervals,
// matrices, relations.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace replayeval {

enum class MathKind {
  kNumber,     // text: decimal literal, "12.5"; "0.1(23)" repeats 23
  kSymbol,     // text: name with subscript and primes; "pi", "e", "i", "infinity" are constants
  kSum,        // children are added
  kProduct,    // children are multiplied
  kQuotient,   // [numerator, denominator]
  kNegate,     // [x]
  kPlusMinus,  // [x]: +x and -x; text "-": the opposite signs
  kPower,      // [base, exponent]
  kFunction,   // text: sin, sqrt, root [x, n], log [x, base], abs, floor, binomial, factorial, base
               // (digits in a base), ...
  kPercent,    // [x]
  kDegree,     // [x]
  kQuantity,   // [x], text: unit, "cm^2"
  kList,       // items between commas, semicolons, "and", "or"
  kSet,        // { ... }
  kBracketed,  // text: the two brackets; tuples, points, intervals
  kUnion,      // sets between union signs
  kMatrix,     // row after row; columns: number of columns
  kRelation,  // operands; text: one character between them: = ~ (approximately) ! < > l (<=) g (>=)
              // i (element of)
  kRatio,     // a : b : c
  kText,      // text: words
};

struct MathNode {
  MathKind kind = MathKind::kText;
  std::string text;
  std::vector<int> children;
  int columns = 0;
};

/// A parsed answer. Children come before their parents in `nodes`.
struct MathTree {
  std::vector<MathNode> nodes;
  int root = -1;

  int add(MathKind kind, std::string text = {}, std::vector<int> children = {});
  const MathNode& at(int node) const { return nodes[static_cast<size_t>(node)]; }
};

/// How a comma between digits is read: "1,234" is 1234 with kThousands (outside of brackets), two
/// items with kSeparator, 1.234 with kDecimal. "{,}" and ",\!" before three digits always group
/// digits.
enum class CommaReading { kThousands, kSeparator, kDecimal };

/// Longest answer and deepest nesting (of brackets and scripts; a tree is at most twice as deep)
/// that are parsed.
inline constexpr size_t kMaxAnswerBytes = 8192;
inline constexpr int kMaxAnswerDepth = 200;

/// Parses an answer: LaTeX with or without dollar signs, or plain text. None if it is not
/// understood as a whole, longer than kMaxAnswerBytes or deeper than kMaxAnswerDepth. Mixed numbers
/// (an integer before a proper fraction) are sums. Time is linear in the text.
std::optional<MathTree> parse_answer(std::string_view text,
                                     CommaReading reading = CommaReading::kThousands);

/// The answer as one line in which equal spellings agree: spacing and size commands, dollar signs
/// and text wrappers are gone, and variants of a command have one name. *has_words: it holds a word
/// (in \text{...} or plain).
std::string canonical_answer(std::string_view text, bool* has_words = nullptr);

}  // namespace replayeval
