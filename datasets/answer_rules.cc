#include "datasets/answer_rules.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "datasets/grade_boxed.h"
#include "datasets/grade_letter.h"
#include "datasets/grade_math.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

constexpr size_t kNone = std::string_view::npos;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
char to_lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Python's \s, and what str.strip drops.
bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

size_t skip_space(std::string_view text, size_t at) {
  while (at < text.size()) {
    size_t behind = at;
    if (!is_space(next_code_point(text, &behind))) break;
    at = behind;
  }
  return at;
}

std::string_view trimmed(std::string_view text) {
  text.remove_prefix(skip_space(text, 0));
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    size_t behind = begin;
    if (!is_space(next_code_point(text, &behind))) break;
    text = text.substr(0, begin);
  }
  return text;
}

ExtractedAnswer found(std::string_view text) {
  const std::string_view kept = trimmed(text);
  return kept.empty() ? ExtractedAnswer{} : ExtractedAnswer{std::string(kept), 1};
}

ExtractedAnswer boxed(std::string_view text) {
  const auto box = last_boxed(text);
  return box ? found(box->content) : ExtractedAnswer{};
}

ExtractedAnswer final_answer(std::string_view text) { return found(final_math_answer(text)); }

// Final Answer: The final answer is(.*?). I hope it is correct.   on text + "I hope it is correct."
ExtractedAnswer minerva(std::string_view text) {
  constexpr std::string_view begin = "Final Answer: The final answer is";
  constexpr std::string_view end = " I hope it is correct";
  const std::string all = std::string(text) + "I hope it is correct.";
  for (size_t at = all.find(begin); at != kNone; at = all.find(begin, at)) {
    const size_t inside = at + begin.size();
    const size_t line_end = std::min(all.find('\n', inside), all.size());
    // One character, which "." in the pattern takes, stands before " I hope".
    size_t stop = all.find(end, inside + 1);
    if (stop != kNone && stop + end.size() < line_end) {
      --stop;
      while (stop > inside && (static_cast<unsigned char>(all[stop]) & 0xC0) == 0x80) --stop;
      return found(std::string_view(all).substr(inside, stop - inside));
    }
    at = line_end;  // a later beginning on this line has no end either
  }
  return {};
}

ExtractedAnswer lm_eval_hendrycks(std::string_view text) {
  const size_t first = text.find('$'), last = text.rfind('$');
  return found(first == last ? text : text.substr(first + 1, last - first - 1));
}

ExtractedAnswer simple_evals_line(std::string_view text) {
  constexpr std::string_view word = "answer";
  for (size_t at = text.find_first_of("aA"); at != kNone; at = text.find_first_of("aA", at + 1)) {
    if (text.size() - at < word.size() ||
        !std::equal(word.begin(), word.end(), text.begin() + static_cast<ptrdiff_t>(at),
                    [](char wanted, char got) { return wanted == to_lower(got); }))
      continue;
    size_t behind = skip_space(text, at + word.size());
    if (behind >= text.size() || text[behind] != ':') continue;
    behind = skip_space(text, behind + 1);
    if (behind >= text.size()) return {};
    return found(text.substr(behind, std::min(text.find('\n', behind), text.size()) - behind));
  }
  return {};
}

ExtractedAnswer gsm8k_strict(std::string_view text) {
  constexpr std::string_view mark = "#### ";
  for (size_t at = text.find(mark); at != kNone; at = text.find(mark, at + 1)) {
    const size_t begin = at + mark.size();
    const size_t digits = begin + (begin < text.size() && text[begin] == '-');
    const size_t end = std::min(text.find_first_not_of("0123456789.,", digits), text.size());
    if (end > digits) return found(text.substr(begin, end - begin));
  }
  return {};
}

// The last match of (-?[$0-9.,]{2,})|(-?[0-9]+).
ExtractedAnswer gsm8k_flexible(std::string_view text) {
  std::string_view last;
  for (size_t at = 0; at < text.size();) {
    const size_t digits = at + (text[at] == '-');
    const size_t end = std::min(text.find_first_not_of("$0123456789.,", digits), text.size());
    if (end >= digits + 2 || (end == digits + 1 && is_digit(text[digits]))) {
      last = text.substr(at, end - at);
      at = end;
    } else {
      at = std::max(end, at + 1);
    }
  }
  return found(last);
}

struct FreeRule {
  AnswerRule rule;
  ExtractedAnswer (*extract)(std::string_view text);
};
constexpr FreeRule kFreeRules[] = {
    {{"boxed", "MATH", "the last box", 1, false}, boxed},
    {{"final_answer", "ReplayEval", "last box, 'final answer is', last formula, last number", 1,
      false},
     final_answer},
    {{"minerva", "Minerva, lm-evaluation-harness minerva_math",
      "between 'Final Answer: The final answer is' and '. I hope it is correct.'", 1, false},
     minerva},
    {{"lm_eval_hendrycks", "lm-evaluation-harness hendrycks_math",
      "between the first and the last dollar sign, else everything", 1, false},
     lm_eval_hendrycks},
    {{"simple_evals_line", "simple-evals math", "first 'Answer:' in any case, to the line's end", 1,
      false},
     simple_evals_line},
    {{"gsm8k_strict", "GSM8K, lm-evaluation-harness gsm8k", "first '#### ' and a number", 1, false},
     gsm8k_strict},
    {{"gsm8k_flexible", "lm-evaluation-harness gsm8k flexible-extract", "last number", 1, false},
     gsm8k_flexible},
    {{"whole", "ReplayEval", "the text, trimmed", 1, false}, found},
};

std::string without_marks(std::string_view text) {
  if (const size_t mark = text.rfind("#### "); mark != kNone) text = text.substr(mark + 5);
  std::string out;
  for (const char c : trimmed(text))
    if (c != ',' && c != '$') out += to_lower(c);
  if (out.ends_with('.')) out.pop_back();
  return out;
}

}  // namespace

std::vector<AnswerRule> answer_rules() {
  std::vector<AnswerRule> rules;
  for (const LetterRule& rule : letter_rules())
    rules.push_back({rule.name, rule.source, rule.description, rule.stages, true});
  for (const FreeRule& free : kFreeRules) rules.push_back(free.rule);
  return rules;
}

bool is_answer_rule(std::string_view name) {
  const std::vector<AnswerRule> rules = answer_rules();
  return std::any_of(rules.begin(), rules.end(),
                     [&](const AnswerRule& rule) { return rule.name == name; });
}

ExtractedAnswer extract_answer(std::string_view rule, std::string_view text,
                               std::span<const std::string> options) {
  for (const LetterRule& letters : letter_rules()) {
    if (letters.name != rule) continue;
    const LetterAnswer answer = letters.extract(text, options);
    return answer ? ExtractedAnswer{std::string(1, answer.letter), answer.stage}
                  : ExtractedAnswer{};
  }
  for (const FreeRule& free : kFreeRules)
    if (free.rule.name == rule) return free.extract(text);
  std::string known;
  for (const AnswerRule& each : answer_rules()) known.append(" ").append(each.name);
  throw std::invalid_argument("answer rule: unknown rule '" + std::string(rule) +
                              "'; known:" + known);
}

std::vector<CompareRule> compare_rules() {
  std::vector<CompareRule> rules;
  for (const MathRule& rule : math_rules())
    rules.push_back({rule.name, rule.source, rule.description});
  rules.push_back({"exact", "ReplayEval", "equal after trimming"});
  rules.push_back({"gsm8k", "lm-evaluation-harness gsm8k",
                   "equal without case, commas, dollar signs and a final full stop"});
  return rules;
}

bool answers_equal(std::string_view rule, std::string_view gold, std::string_view answer) {
  if (rule == "exact") return trimmed(gold) == trimmed(answer);
  if (rule == "gsm8k") return without_marks(gold) == without_marks(answer);
  for (const MathRule& math : math_rules())
    if (math.name == rule) return math.compare(gold, answer, {}).equal;
  std::string known;
  for (const CompareRule& each : compare_rules()) known.append(" ").append(each.name);
  throw std::invalid_argument("compare rule: unknown rule '" + std::string(rule) +
                              "'; known:" + known);
}

}  // namespace replayeval
