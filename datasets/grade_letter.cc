// Letters of multiple-choice answers: linear scans that return what the published regular
// expressions return.
#include "datasets/grade_letter.h"

#include <unicode/uchar.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "datasets/grade_boxed.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

using Options = std::span<const std::string>;
constexpr size_t kNone = std::string_view::npos;

bool ascii_upper(char c) { return c >= 'A' && c <= 'Z'; }
bool ascii_letter(char c) { return ascii_upper(c) || (c >= 'a' && c <= 'z'); }
bool ascii_alnum(char c) { return ascii_letter(c) || (c >= '0' && c <= '9'); }
char to_upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }
char to_lower(char c) { return ascii_upper(c) ? static_cast<char>(c - 'A' + 'a') : c; }

// Code point at `at` and its length; an invalid byte counts as U+FFFD of length 1.
char32_t code_point_at(std::string_view text, size_t at, size_t* length) {
  const auto byte = static_cast<unsigned char>(text[at]);
  *length = 1;
  if (byte < 0x80) return byte;
  const Utf8Step step = utf8_step(text.substr(at, 4));
  if (step.kind != Utf8Step::Kind::kCodePoint) return 0xFFFD;
  *length = step.length;
  return step.code_point;
}

// Python's \s on text.
bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// Python's \w on text: letters, anything with a numeric value, and "_"; not combining marks.
bool is_word(char32_t c) {
  if (c < 0x80) return ascii_alnum(static_cast<char>(c)) || c == '_';
  const auto point = static_cast<UChar32>(c);
  return (U_GET_GC_MASK(point) & U_GC_L_MASK) != 0 ||
         u_getIntPropertyValue(point, UCHAR_NUMERIC_TYPE) != U_NT_NONE;
}

size_t skip_space(std::string_view text, size_t at) {
  while (at < text.size()) {
    size_t length;
    if (!is_space(code_point_at(text, at, &length))) break;
    at += length;
  }
  return at;
}

bool word_before(std::string_view text, size_t at) {
  if (at == 0) return false;
  size_t start = at - 1;
  while (start > 0 && at - start < 4 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80)
    --start;
  size_t length;
  const char32_t point = code_point_at(text, start, &length);
  return start + length == at && is_word(point);
}

bool word_after(std::string_view text, size_t at) {
  size_t length;
  return at < text.size() && is_word(code_point_at(text, at, &length));
}

bool starts_with_any_case(std::string_view text, size_t at, std::string_view lower) {
  if (text.size() - at < lower.size()) return false;
  for (size_t i = 0; i < lower.size(); ++i)
    if (to_lower(text[at + i]) != lower[i]) return false;
  return true;
}

// Calls visit(offset behind the word) for each "answer" in any case, until it returns false.
template <class Visit>
void for_each_answer_word(std::string_view text, Visit visit) {
  for (size_t at = text.find_first_of("aA"); at != kNone; at = text.find_first_of("aA", at + 1))
    if (starts_with_any_case(text, at, "answer") && !visit(at + 6)) return;
}

LetterAnswer found(std::string_view text, size_t at, int stage = 1) {
  return {text[at], stage, at};
}

LetterAnswer first_answer_is(std::string_view text, Options) {
  constexpr std::string_view phrase = "answer is ";
  for (size_t at = text.find(phrase); at != kNone; at = text.find(phrase, at + 1)) {
    size_t letter = at + phrase.size();
    if (letter < text.size() && text[letter] == '(') ++letter;
    if (letter < text.size() && text[letter] >= 'A' && text[letter] <= 'J')
      return found(text, letter);
  }
  return {};
}

LetterAnswer answer_colon_of_first_line(std::string_view text) {
  constexpr std::string_view phrase = "nswer:";
  LetterAnswer best;
  size_t line_end = text.size();
  for (size_t at = text.find(phrase); at < line_end; at = text.find(phrase, at + 1)) {
    if (at == 0 || (text[at - 1] != 'a' && text[at - 1] != 'A')) continue;
    const size_t letter = skip_space(text, at + phrase.size());
    if (letter == text.size() || text[letter] < 'A' || text[letter] > 'J') continue;
    if (!best) line_end = std::min(text.find('\n', at), text.size());
    best = found(text, letter, 2);
  }
  return best;
}

// The last ASCII capital up to `last` that stands alone as a word.
LetterAnswer last_lone_capital(std::string_view text, char last, int stage) {
  for (size_t at = text.size(); at-- > 0;)
    if (text[at] >= 'A' && text[at] <= last && !word_before(text, at) && !word_after(text, at + 1))
      return found(text, at, stage);
  return {};
}

LetterAnswer mmlu_pro_cascade(std::string_view text, Options options) {
  if (const LetterAnswer answer = first_answer_is(text, options)) return answer;
  if (const LetterAnswer answer = answer_colon_of_first_line(text)) return answer;
  return last_lone_capital(text, 'J', 3);
}

LetterAnswer simple_evals(std::string_view text, Options) {
  LetterAnswer answer;
  const auto blank = [&](size_t at) {
    return at < text.size() && (text[at] == ' ' || text[at] == '\t');
  };
  for_each_answer_word(text, [&](size_t at) {
    while (blank(at)) ++at;
    if (at == text.size() || text[at] != ':') return true;
    ++at;
    while (blank(at)) ++at;
    if (at < text.size() && text[at] == '$') ++at;
    if (at < text.size() && to_upper(text[at]) >= 'A' && to_upper(text[at]) <= 'D')
      answer = found(text, at);
    return !answer;
  });
  return answer;
}

LetterAnswer gpqa_authors(std::string_view text, Options) {
  constexpr std::string_view patterns[] = {"answer is (", "Answer: (", "answer: (", "answer (",
                                           "("};
  int stage = 0;
  for (const std::string_view pattern : patterns) {
    ++stage;
    for (size_t at = text.find(pattern); at != kNone; at = text.find(pattern, at + 1)) {
      const size_t inside = at + pattern.size();
      size_t length;
      if (inside >= text.size() || text[inside] == '\n') continue;
      code_point_at(text, inside, &length);
      if (inside + length >= text.size() || text[inside + length] != ')') continue;
      if (text[inside] >= 'A' && text[inside] <= 'D') return found(text, inside, stage);
      break;  // only the first match of a pattern counts
    }
  }
  return {};
}

// [*_]{0,2} \s* : [\s*_]{0,2} \s* ([A-Z]) (?![a-zA-Z0-9]) behind the word "answer"; offset of the
// letter, or kNone.
size_t letter_behind_colon(std::string_view text, size_t at) {
  const auto mark = [&](size_t i) { return i < text.size() && (text[i] == '*' || text[i] == '_'); };
  for (int i = 0; i < 2 && mark(at); ++i) ++at;
  at = skip_space(text, at);
  if (at >= text.size() || text[at] != ':') return kNone;
  ++at;
  // Two characters may be marks, everything else must be white space.
  for (int i = 0; i < 2 && at < text.size(); ++i) {
    size_t length = 1;
    if (!mark(at) && !is_space(code_point_at(text, at, &length))) break;
    at += length;
  }
  at = skip_space(text, at);
  if (at >= text.size() || !ascii_letter(text[at])) return kNone;
  if (at + 1 < text.size() && ascii_alnum(text[at + 1])) return kNone;
  return at;
}

LetterAnswer nemo_colon(std::string_view text, Options) {
  LetterAnswer answer;
  for_each_answer_word(text, [&](size_t at) {
    const size_t letter = letter_behind_colon(text, at);
    if (letter != kNone) answer = {to_upper(text[letter]), 1, letter};
    return true;
  });
  return answer;
}

size_t code_points(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

LetterAnswer nemo_skills(std::string_view text, Options options) {
  std::string_view extracted;
  int stage = 0;
  if (text.find("\\boxed") != kNone || text.find("\\fbox") != kNone) {
    if (const auto box = last_boxed(text)) {
      extracted = text.substr(text.find(box->content, box->begin), box->content.size());
      stage = 1;
    }
  } else {
    constexpr std::string_view phrase = "The final answer is ";
    // (.+)$ without flags: up to the end of the text, which a single newline may follow.
    std::string_view body = text;
    if (body.ends_with('\n')) body.remove_suffix(1);
    const size_t line = body.rfind('\n') == kNone ? 0 : body.rfind('\n') + 1;
    const size_t at = body.find(phrase, line);
    if (at != kNone && at + phrase.size() < body.size()) {
      extracted = body.substr(at + phrase.size());
      stage = 2;
    }
  }
  const auto place = static_cast<size_t>(extracted.data() - text.data());
  if (stage != 0 && code_points(extracted) == 1)
    return extracted.size() == 1 ? LetterAnswer{extracted[0], stage, place} : LetterAnswer{};
  if (stage != 0) {
    LetterAnswer answer = last_lone_capital(extracted, 'Z', stage);
    if (answer) {
      answer.offset += place;
      return answer;
    }
  }
  LetterAnswer answer = nemo_colon(text, options);
  if (answer) answer.stage = 3;
  return answer;
}

// Python's string.punctuation, less what Unicode calls symbols: $ + < = > ^ ` | ~.
bool ascii_punctuation(char c) {
  return c > ' ' && c < 127 && !ascii_alnum(c) && std::string_view("$+<=>^`|~").find(c) == kNone;
}

// Lower case without punctuation.
std::string without_punctuation(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0, length = 1; at < text.size(); at += length) {
    length = 1;
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      if (!ascii_punctuation(text[at])) out += to_lower(text[at]);
      continue;
    }
    const auto point = static_cast<UChar32>(code_point_at(text, at, &length));
    if ((U_GET_GC_MASK(point) & U_GC_P_MASK) != 0) continue;
    append_utf8(static_cast<char32_t>(u_tolower(point)), &out);
  }
  return out;
}

// Starts of `needle` in `text` (Knuth, Morris, Pratt), in order.
std::vector<size_t> occurrences(std::string_view text, std::string_view needle) {
  std::vector<size_t> border(needle.size() + 1, 0), starts;
  for (size_t i = 1, k = 0; i < needle.size(); ++i) {
    while (k > 0 && needle[i] != needle[k]) k = border[k];
    if (needle[i] == needle[k]) ++k;
    border[i + 1] = k;
  }
  for (size_t i = 0, k = 0; i < text.size(); ++i) {
    if (k == 0 && text[i] != needle[0]) {
      i = text.find(needle[0], i);
      if (i == kNone) break;
    }
    while (k > 0 && (k == needle.size() || text[i] != needle[k])) k = border[k];
    if (text[i] == needle[k]) ++k;
    if (k == needle.size()) starts.push_back(i + 1 - k);
  }
  return starts;
}

// First or last match of the alternation of the options, leftmost and without overlap.
LetterAnswer option_text(std::string_view text, Options options, bool last) {
  std::vector<std::vector<size_t>> starts;
  for (const std::string& option : options) {
    if (option.empty()) return {};  // matches nothing everywhere, which counts as no match
    starts.push_back(occurrences(text, option));
  }
  std::vector<size_t> next(options.size(), 0);
  LetterAnswer answer;
  for (size_t from = 0; from < text.size();) {
    size_t best = kNone, which = 0;
    for (size_t i = 0; i < options.size(); ++i) {
      while (next[i] < starts[i].size() && starts[i][next[i]] < from) ++next[i];
      if (next[i] < starts[i].size() && starts[i][next[i]] < best) {
        best = starts[i][next[i]];
        which = i;
      }
    }
    if (best == kNone) break;
    answer = {static_cast<char>('A' + which), 2, best};
    if (!last) break;
    from = best + options[which].size();
  }
  return answer;
}

LetterAnswer multi_choice(std::string_view text, Options options, bool last, bool clean) {
  LetterAnswer answer;
  for (size_t at = text.find('('); at != kNone; at = text.find('(', at + 1)) {
    if (at + 2 >= text.size() || !ascii_upper(text[at + 1]) || text[at + 2] != ')') continue;
    answer = found(text, at + 1);
    if (!last) break;
  }
  if (answer || options.empty()) return answer;

  const auto trimmed = [](std::string_view option) {
    size_t begin = skip_space(option, 0), end = option.size();
    while (end > begin && is_space(static_cast<unsigned char>(option[end - 1])) &&
           static_cast<unsigned char>(option[end - 1]) < 0x80)
      --end;
    return option.substr(begin, end - begin);
  };
  std::vector<std::string> wanted;
  for (const std::string& option : options)
    wanted.push_back(clean ? without_punctuation(trimmed(option)) : std::string(trimmed(option)));
  if (clean) {
    answer = option_text(without_punctuation(text), wanted, last);
    // The offset in the text: the shortest beginning that leaves more than the match's own offset.
    if (answer) {
      size_t kept = 0, at = 0;
      for (size_t length = 0; at < text.size(); at += length) {
        code_point_at(text, at, &length);
        const size_t left = without_punctuation(text.substr(at, length)).size();
        if (kept + left > answer.offset) break;
        kept += left;
      }
      answer.offset = at;
    }
  } else {
    answer = option_text(text, wanted, last);
  }
  if (answer) return answer;

  const size_t letters = std::min<size_t>(options.size(), 26);
  for (size_t at = text.find(':'); at != kNone; at = text.find(':', at + 1)) {
    const size_t letter = skip_space(text, at + 1);
    if (letter >= text.size() || !ascii_upper(text[letter]) ||
        static_cast<size_t>(text[letter] - 'A') >= letters)
      continue;
    answer = found(text, letter, 3);
    if (!last) break;
  }
  return answer;
}

LetterAnswer lm_eval_multi_choice(std::string_view text, Options options) {
  return multi_choice(text, options, false, false);
}
LetterAnswer lm_eval_gpqa_flexible(std::string_view text, Options options) {
  return multi_choice(text, options, true, true);
}

LetterAnswer lm_eval_gpqa_strict(std::string_view text, Options) {
  constexpr std::string_view phrase = "The answer is ";
  for (size_t at = text.find(phrase); at != kNone; at = text.find(phrase, at + 1)) {
    const size_t begin = at + phrase.size();
    size_t end = std::min(text.find('\n', begin), text.size());
    if (end == begin) continue;
    --end;
    while (end > begin && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    LetterAnswer answer;
    for (size_t i = begin; i < end; ++i) {
      const char c = text[i];
      if (static_cast<unsigned char>(c) < 0x80 && c > ' ' && c < 127 && !ascii_alnum(c)) continue;
      if (c == ' ' && (i + 1 == end || !answer)) continue;
      if (answer || !ascii_letter(c)) return {};
      answer = {to_upper(c), 1, i};
    }
    return answer;
  }
  return {};
}

// The letter that a boxed answer holds: X, (X), \text{X}, \text{(X)}, X. ..., X) ...
LetterAnswer letter_in_box(std::string_view text, const BoxedAnswer& box) {
  size_t at = text.find('{', box.begin);
  at = at == kNone || at >= box.end ? box.begin : at;
  size_t end = std::min(box.end, text.size());
  at = at == box.begin ? box.end - box.content.size() : at + 1;
  while (at < end) {
    const char c = text[at];
    if (c == '\\' && at + 1 < end && ascii_letter(text[at + 1])) {
      size_t name = at + 1;
      while (name < end && ascii_letter(text[name])) ++name;
      const std::string_view command = text.substr(at + 1, name - at - 1);
      if (!command.starts_with("text") && !command.starts_with("math") && command != "mbox" &&
          command != "left")
        return {};
      at = name;
    } else if (c == ' ' || c == '(' || c == '{' || c == '~' || c == '*' || c == '$' || c == '\\') {
      ++at;
    } else {
      break;
    }
  }
  if (at >= end || !ascii_upper(text[at])) return {};
  const char next = at + 1 < end ? text[at + 1] : '}';
  if (next == ')' || next == '}' || next == '.' || next == ':' || next == '$' || next == '\\' ||
      next == ' ' || next == '*')
    return found(text, at);
  return {};
}

LetterAnswer boxed_letter(std::string_view text, Options) {
  const auto box = last_boxed(text);
  return box ? letter_in_box(text, *box) : LetterAnswer{};
}

LetterAnswer last_answer(std::string_view text, Options options) {
  const char last =
      static_cast<char>('A' + (options.empty() ? 10 : std::min<size_t>(options.size(), 26)) - 1);
  LetterAnswer answer = boxed_letter(text, options);
  if (answer && answer.letter > last) answer = {};
  for_each_answer_word(text, [&](size_t at) {
    constexpr std::string_view marks = "*_\"'`$({[:=\\~";
    constexpr std::string_view fillers[] = {"is",    "option", "choice", "letter",
                                            "would", "be",     "should", "must",
                                            "the",   "boxed",  "text",   "correct"};
    bool stated = false;
    for (int steps = 0; steps < 16 && at < text.size(); ++steps) {
      at = skip_space(text, at);
      size_t length = 1;
      if (at == text.size()) return true;
      if (marks.find(text[at]) != kNone) {
        stated = stated || text[at] == ':' || text[at] == '=';
        ++at;
        continue;
      }
      const char32_t point = code_point_at(text, at, &length);
      if (point == 0x201C || point == 0x2018) {
        at += length;
        continue;
      }
      size_t end = at;
      while (end < text.size() && text[end] >= 'a' && text[end] <= 'z') ++end;
      const std::string_view word = text.substr(at, end - at);
      if (std::find(std::begin(fillers), std::end(fillers), word) == std::end(fillers)) break;
      stated = stated || word == "is" || word == "be";
      at = end;
    }
    if (!stated || at >= text.size() || text[at] < 'A' || text[at] > last ||
        word_after(text, at + 1))
      return true;
    if (at + 1 < text.size() && (text[at + 1] == '\'' || text[at + 1] == '-')) return true;
    // "the answer is A good idea", "answer: I think": an article or a pronoun, not a letter.
    if ((text[at] == 'A' || text[at] == 'I') && at + 2 < text.size() && text[at + 1] == ' ' &&
        text[at + 2] >= 'a' && text[at + 2] <= 'z')
      return true;
    if (!answer || at > answer.offset) answer = found(text, at, 2);
    return true;
  });
  return answer;
}

constexpr LetterRule kRules[] = {
    {"mmlu_pro_l1", "MMLU-Pro", "first 'answer is (X)', A-J", 1, first_answer_is},
    {"mmlu_pro_l2", "MMLU-Pro", "cascade: 'answer is (X)', 'answer: X', last lone A-J", 3,
     mmlu_pro_cascade},
    {"lm_eval_custom_extract", "lm-evaluation-harness mmlu_pro", "first 'answer is (X)', A-J", 1,
     first_answer_is},
    {"simple_evals_abcd", "simple-evals", "first 'Answer: X' in any case, A-D", 1, simple_evals},
    {"gpqa_authors_abcd", "GPQA", "five parenthesised patterns in order, A-D", 5, gpqa_authors},
    {"nemo_answer_colon", "NeMo-Skills", "last 'Answer: X' with * or _ around", 1, nemo_colon},
    {"nemo_skills", "NeMo-Skills", "last box, 'The final answer is', then 'Answer: X'", 3,
     nemo_skills},
    {"lm_eval_multi_choice", "lm-evaluation-harness", "first '(X)', option text, ': X'", 3,
     lm_eval_multi_choice},
    {"lm_eval_gpqa_flexible", "lm-evaluation-harness gpqa flexible-extract",
     "last '(X)', option text in lower case without punctuation, ': X'", 3, lm_eval_gpqa_flexible},
    {"lm_eval_gpqa_strict", "lm-evaluation-harness gpqa strict-match",
     "one letter after 'The answer is '", 1, lm_eval_gpqa_strict},
    {"boxed_letter", "ReplayEval", "the letter in the last box", 1, boxed_letter},
    {"last_answer", "ReplayEval",
     "the last stated answer: box, 'answer is X', 'Answer: X', with any markup", 2, last_answer},
};

}  // namespace

std::span<const LetterRule> letter_rules() { return kRules; }

const LetterRule& letter_rule(std::string_view name) {
  std::string known;
  for (const LetterRule& rule : kRules) {
    if (rule.name == name) return rule;
    known.append(" ").append(rule.name);
  }
  throw std::invalid_argument("letter rule: unknown rule '" + std::string(name) +
                              "'; known:" + known);
}

LetterAnswer extract_letter(std::string_view rule, std::string_view text, Options options) {
  return letter_rule(rule).extract(text, options);
}

}  // namespace replayeval
