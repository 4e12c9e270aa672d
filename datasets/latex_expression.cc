// Answers as trees: a lexer that hides how LaTeX is spelled, and a recursive-descent parser with
// bounded depth.
#include "datasets/latex_expression.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "datasets/utf8.h"

namespace replayeval {
namespace {

enum class TokenKind { kNumber, kSymbol, kFunction, kText, kCommand, kMark, kEnd };

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string text;
  bool space_before = false;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
bool is_letter(char c) { return is_lower(c) || (c >= 'A' && c <= 'Z'); }
bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (is_blank(text.front()) || text.front() == '~')) text.remove_prefix(1);
  while (!text.empty() && (is_blank(text.back()) || text.back() == '~')) text.remove_suffix(1);
  return text;
}

using Names = std::unordered_set<std::string_view>;
using NameMap = std::unordered_map<std::string_view, std::string_view>;

const Names& function_names() {
  static const Names names{"sin",    "cos",  "tan",   "cot",  "sec",  "csc",    "arcsin", "arccos",
                           "arctan", "sinh", "cosh",  "tanh", "ln",   "log",    "exp",    "lg",
                           "max",    "min",  "gcd",   "lcm",  "det",  "arccot", "asin",   "acos",
                           "atan",   "abs",  "floor", "ceil", "sqrt", "arcsec", "arccsc", "sgn",
                           "lim",    "deg",  "dim",   "ker"};
  return names;
}

// Commands without meaning for the value; they separate like a space.
const Names& ignored_commands() {
  static const Names names{
      "left",         "right",     "big",     "Big",      "bigg",  "Bigg",   "bigl", "bigr",
      "Bigl",         "Bigr",      "biggl",   "biggr",    "Biggl", "Biggr",  "quad", "qquad",
      "displaystyle", "textstyle", "limits",  "nolimits", "hfill", "pounds", "euro", "scriptstyle",
      "middle",       "hspace",    "protect", "boldmath", "bf",    "rm",     "it",   "thinspace",
      "enspace",      "space",     "Large",   "large"};
  return names;
}

const NameMap& command_marks() {
  static const NameMap marks{{"cdot", "*"},
                             {"times", "*"},
                             {"ast", "*"},
                             {"div", "/"},
                             {"le", "<="},
                             {"leq", "<="},
                             {"leqslant", "<="},
                             {"leqq", "<="},
                             {"ge", ">="},
                             {"geq", ">="},
                             {"geqslant", ">="},
                             {"geqq", ">="},
                             {"lt", "<"},
                             {"gt", ">"},
                             {"ne", "!="},
                             {"neq", "!="},
                             {"approx", "~="},
                             {"simeq", "~="},
                             {"thickapprox", "~="},
                             {"doteq", "~="},
                             {"in", "in"},
                             {"cup", "cup"},
                             {"bigcup", "cup"},
                             {"pm", "+-"},
                             {"mp", "-+"},
                             {"lbrace", "\\{"},
                             {"rbrace", "\\}"},
                             {"langle", "("},
                             {"rangle", ")"},
                             {"lfloor", "lfloor"},
                             {"rfloor", "rfloor"},
                             {"lceil", "lceil"},
                             {"rceil", "rceil"},
                             {"lvert", "|("},
                             {"rvert", "|)"},
                             {"vert", "|"},
                             {"mid", "|"},
                             {"lbrack", "["},
                             {"rbrack", "]"},
                             {"lparen", "("},
                             {"rparen", ")"},
                             {"colon", ":"},
                             {"degree", "deg"},
                             {"prime", "'"},
                             {"lor", "or"},
                             {"vee", "or"},
                             {"land", "and"},
                             {"wedge", "and"},
                             {"backslash", "setminus"},
                             {"setminus", "setminus"},
                             {"equiv", "equiv"},
                             {"cap", "cap"},
                             {"slash", "/"},
                             {"over", "over"},
                             {"choose", "choose"}};
  return marks;
}

const Names& argument_commands() {
  static const Names names{"frac", "sqrt", "binom", "begin", "end",  "overline", "bar",
                           "sum",  "prod", "int",   "pmod",  "bmod", "mathbb"};
  return names;
}

// \command{text}: words; \command{x} of a single letter is that letter.
bool is_text_command(std::string_view name) {
  return name.starts_with("text") || name == "mbox" || name == "hbox" || name == "emph" ||
         name == "mathrm" || name == "operatorname" || name == "mathsf" || name == "mathtt" ||
         name == "mathit";
}

bool is_decoration(std::string_view name) {
  return name == "mathbf" || name == "boldsymbol" || name == "vec" || name == "hat" ||
         name == "overrightarrow" || name == "tilde" || name == "widehat" || name == "bm" ||
         name == "mathcal" || name == "widetilde" || name == "boxed" || name == "fbox" ||
         name == "underline" || name == "ensuremath" || name == "pmb";
}

const Names& short_words() {
  static const Names names{"and", "or",  "odd",  "yes",  "no",  "the", "for", "if",  "is",   "all",
                           "not", "any", "one",  "two",  "six", "ten", "of",  "to",  "on",   "per",
                           "mph", "sec", "min",  "hrs",  "day", "lbs", "ton", "cup", "ways", "red",
                           "km",  "cm",  "mm",   "kg",   "ft",  "mi",  "hr",  "lb",  "oz",   "mg",
                           "ml",  "so",  "do",   "go",   "sum", "men", "dog", "cat", "car",  "box",
                           "job", "up",  "west", "east", "are", "has", "was", "off", "none", "dne"};
  return names;
}

// Words that may follow a number without a space.
const Names& attached_words() {
  static const Names names{
      "percent", "degrees", "degree", "meters", "meter",    "inches",  "inch",   "feet",
      "foot",    "miles",   "mile",   "hours",  "hour",     "minutes", "minute", "seconds",
      "second",  "dollars", "dollar", "cents",  "cent",     "units",   "unit",   "grams",
      "gram",    "years",   "year",   "days",   "weeks",    "months",  "liters", "yards",
      "pounds",  "euros",   "yuan",   "people", "students", "points",  "times",  "ways"};
  return names;
}

struct Lexer {
  std::string_view text;
  CommaReading reading;
  std::vector<Token> tokens;
  std::vector<std::string> owned;
  size_t at = 0;
  int brackets = 0;
  int braces = 0;
  bool space = false;
  bool row_breaks;  // inside an environment \\ ends a row; elsewhere it is a doubled backslash

  Lexer(std::string_view source, CommaReading how)
      : text(source), reading(how), row_breaks(source.find("\\begin") != std::string_view::npos) {}

  void push(TokenKind kind, std::string value) {
    tokens.push_back({kind, std::move(value), space});
    space = false;
  }
  void mark(std::string value) {
    if (value == "(" || value == "[" || value == "\\{") ++brackets;
    if ((value == ")" || value == "]" || value == "\\}") && brackets > 0) --brackets;
    push(TokenKind::kMark, std::move(value));
  }
  char peek(size_t i) const { return i < text.size() ? text[i] : '\0'; }
  bool three_digits(size_t i) const {
    return is_digit(peek(i)) && is_digit(peek(i + 1)) && is_digit(peek(i + 2)) &&
           !is_digit(peek(i + 3));
  }

  // Offset of the digits behind a separator of digit groups at i, 0 if there is none.
  size_t group_behind(size_t i, bool* comma) const {
    size_t j = i;
    const auto blanks = [&] {
      while (is_blank(peek(j))) ++j;
    };
    *comma = false;
    blanks();
    if (text.substr(j).starts_with("\\!")) {
      j += 2;
      blanks();
      if (peek(j) == ',') ++j;
      blanks();
      return three_digits(j) ? j : 0;
    }
    if (peek(j) == '{') {
      ++j;
      blanks();
      if (peek(j) != ',') return 0;
      ++j;
      blanks();
      if (peek(j) != '}') return 0;
      ++j;
      blanks();
      return three_digits(j) ? j : 0;
    }
    if (text.substr(j).starts_with("\\,") || text.substr(j).starts_with("\\ ")) {
      j += 2;
      return three_digits(j) ? j : 0;
    }
    if (peek(j) == ',') {
      const bool tight = j == i;
      ++j;
      if (text.substr(j).starts_with("\\!") || text.substr(j).starts_with("\\,\\!")) {
        j += text.substr(j).starts_with("\\!") ? 2 : 4;
        blanks();
        return three_digits(j) ? j : 0;
      }
      *comma = true;
      return tight && reading == CommaReading::kThousands && brackets == 0 && three_digits(j) ? j
                                                                                              : 0;
    }
    if (j == i + 1 && text[i] == ' ' && three_digits(j)) return j;  // 1 000
    return 0;
  }

  void number() {
    std::string digits;
    while (is_digit(peek(at))) digits += text[at++];
    if (!digits.empty() && digits.size() <= 3 && digits[0] != '0') {
      bool comma;
      for (size_t next; (next = group_behind(at, &comma)) != 0;) {
        digits.append(text.substr(next, 3));
        at = next + 3;
      }
    }
    if (reading == CommaReading::kDecimal && brackets == 0 && peek(at) == ',' &&
        is_digit(peek(at + 1))) {
      digits += '.';
      ++at;
      while (is_digit(peek(at))) digits += text[at++];
    } else if (peek(at) == '.' && is_digit(peek(at + 1))) {
      digits += '.';
      ++at;
      while (is_digit(peek(at))) digits += text[at++];
    } else if (peek(at) == '.' && text.substr(at + 1).starts_with("\\overline")) {
      digits += '.';
      ++at;
    }
    // 0.1\overline{23}
    if (digits.find('.') != std::string::npos) {
      for (const std::string_view name : {"\\overline{", "\\bar{"}) {
        if (!text.substr(at).starts_with(name)) continue;
        size_t i = at + name.size();
        const size_t begin = i;
        while (is_digit(peek(i))) ++i;
        if (i == begin || peek(i) != '}') continue;
        digits += "(" + std::string(text.substr(begin, i - begin)) + ")";
        at = i + 1;
        break;
      }
    }
    if (digits.front() == '.') digits.insert(0, "0");
    push(TokenKind::kNumber, digits);
    // 1.5e10
    if ((peek(at) == 'e' || peek(at) == 'E') && digits.back() != ')') {
      size_t i = at + 1;
      if (peek(i) == '+' || peek(i) == '-') ++i;
      const size_t begin = i;
      while (is_digit(peek(i))) ++i;
      if (i > begin && i - begin <= 9 && !is_letter(peek(i)) && peek(i) != '.') {
        mark("*");
        push(TokenKind::kNumber, "10");
        mark("^");
        mark("{");
        if (text[at + 1] == '-') mark("-");
        push(TokenKind::kNumber, std::string(text.substr(begin, i - begin)));
        mark("}");
        at = i;
      }
    }
  }

  void word(std::string_view letters) {
    if (function_names().count(letters) != 0) {
      push(TokenKind::kFunction, std::string(letters));
    } else if (letters == "pi" || letters == "Pi") {
      push(TokenKind::kSymbol, "pi");
    } else if (letters == "infinity" || letters == "inf" || letters == "oo") {
      push(TokenKind::kSymbol, "infinity");
    } else {
      std::string lower(letters);
      for (char& c : lower)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
      // 2abcd is a product, 2meters is not.
      const bool behind_number =
          !space && !tokens.empty() && tokens.back().kind == TokenKind::kNumber;
      const auto split = [&](std::string_view head) {
        return lower.size() == head.size() + 1 && lower.starts_with(head) && at > 0 &&
               !tokens.empty() && tokens.back().kind != TokenKind::kSymbol;
      };
      if (split("or") || split("and")) {  // 1orW(x)
        const size_t head = lower.size() - 1;
        push(TokenKind::kText, std::string(letters.substr(0, head)));
        push(TokenKind::kSymbol, std::string(letters.substr(head)));
      } else if ((letters.size() >= 4 && !(behind_number && attached_words().count(lower) == 0)) ||
                 (letters.size() > 1 && short_words().count(lower) != 0)) {
        push(TokenKind::kText, std::string(letters));
      } else {
        for (const char c : letters) push(TokenKind::kSymbol, std::string(1, c));
      }
    }
  }

  // Content of the balanced braces at `at` (after blanks); moves behind them. None: no braces.
  std::optional<std::string_view> group() {
    size_t i = at;
    while (is_blank(peek(i))) ++i;
    if (peek(i) != '{') return std::nullopt;
    size_t depth = 0;
    for (size_t j = i; j < text.size(); ++j) {
      if (text[j] == '\\') {
        ++j;
      } else if (text[j] == '{') {
        ++depth;
      } else if (text[j] == '}' && --depth == 0) {
        at = j + 1;
        return text.substr(i + 1, j - i - 1);
      }
    }
    return std::nullopt;
  }

  void words(std::string_view name, std::string_view content) {
    const std::string_view inner = trimmed(content);
    if (inner.empty()) {
      space = true;
      return;
    }
    const bool math = name.starts_with("math") || name == "operatorname";
    if (inner.size() == 1 && is_letter(inner[0]) && (math || inner.size() == content.size())) {
      // After a number a letter in upright type is a unit.
      const bool unit = !tokens.empty() && tokens.back().kind == TokenKind::kNumber &&
                        content.size() > inner.size();
      push(unit ? TokenKind::kText : TokenKind::kSymbol, std::string(inner));
      return;
    }
    if (function_names().count(inner) != 0) {
      push(TokenKind::kFunction, std::string(inner));
      return;
    }
    if (std::none_of(inner.begin(), inner.end(), is_letter) ||
        inner.find('$') != std::string_view::npos) {
      lex_inside(inner);
      return;
    }
    push(TokenKind::kText, std::string(inner));
  }

  void lex_inside(std::string_view inner) {
    Lexer nested(inner, reading);
    nested.brackets = brackets;
    nested.depth = depth + 1;
    if (nested.depth > 8) {
      push(TokenKind::kText, std::string(inner));
      return;
    }
    nested.run();
    for (Token& token : nested.tokens) tokens.push_back(std::move(token));
  }
  int depth = 0;

  void command() {
    size_t i = at + 1;
    while (is_letter(peek(i))) ++i;
    const std::string_view name = text.substr(at + 1, i - at - 1);
    at = i;
    if (ignored_commands().count(name) != 0) {
      space = true;
      if (name == "left" || name == "right" || name == "middle") {
        while (is_blank(peek(at))) ++at;
        if (peek(at) == '.') {
          ++at;
        } else if (peek(at) == '|') {
          mark(name == "left" ? "|(" : name == "right" ? "|)" : "|");
          ++at;
        } else if (peek(at) == '<' || peek(at) == '>') {
          mark(peek(at) == '<' ? "(" : ")");
          ++at;
        }
      }
      if (name == "hspace") group();
      return;
    }
    if (is_text_command(name)) {
      while (is_blank(peek(at)) || peek(at) == '*') ++at;
      if (const auto content = group()) {
        words(name, *content);
      } else if (is_letter(peek(at))) {
        push(TokenKind::kSymbol, std::string(1, text[at++]));
      }
      return;
    }
    if (name == "color" || name == "label" || name == "tag" || name == "phantom" ||
        name == "hphantom") {
      group();
      return;
    }
    if (is_decoration(name)) return;
    if (name == "dfrac" || name == "tfrac" || name == "cfrac") {
      push(TokenKind::kCommand, "frac");
    } else if (name == "dbinom" || name == "tbinom") {
      push(TokenKind::kCommand, "binom");
    } else if (argument_commands().count(name) != 0) {
      push(TokenKind::kCommand, std::string(name));
    } else if (function_names().count(name) != 0) {
      push(TokenKind::kFunction, std::string(name));
    } else if (name == "infty") {
      push(TokenKind::kSymbol, "infinity");
    } else if (name == "emptyset" || name == "varnothing") {
      push(TokenKind::kSymbol, "emptyset");
    } else if (name == "varphi" || name == "varepsilon" || name == "vartheta") {
      push(TokenKind::kSymbol, std::string(name.substr(3)));
    } else if (name == "cdots" || name == "dots" || name == "ldots" || name == "dotsc" ||
               name == "dotsb") {
      push(TokenKind::kCommand, "ldots");
    } else if (const auto found = command_marks().find(name); found != command_marks().end()) {
      if (found->second == "and" || found->second == "or")
        push(TokenKind::kText, std::string(found->second));
      else
        mark(std::string(found->second));
    } else if (!name.empty()) {
      push(TokenKind::kSymbol, std::string(name));  // Greek letters and whatever else is a name
    }
  }

  void unicode() {
    const Utf8Step step = utf8_step(text.substr(at, 4));
    const size_t length = step.length;
    const char32_t c = step.kind == Utf8Step::Kind::kCodePoint ? step.code_point : 0xFFFD;
    const std::string_view bytes = text.substr(at, length);
    at += length;
    static const std::unordered_map<char32_t, std::string_view> marks{
        {0x2212, "-"},     {0x2013, "-"},     {0x00D7, "*"},      {0x00B7, "*"},
        {0x22C5, "*"},     {0x2219, "*"},     {0x00F7, "/"},      {0x2044, "/"},
        {0x2215, "/"},     {0x2264, "<="},    {0x2265, ">="},     {0x2260, "!="},
        {0x2248, "~="},    {0x2208, "in"},    {0x222A, "cup"},    {0x00B1, "+-"},
        {0x2213, "-+"},    {0x00B0, "deg"},   {0x2032, "'"},      {0x2019, "'"},
        {0x27E8, "("},     {0x27E9, ")"},     {0x230A, "lfloor"}, {0x230B, "rfloor"},
        {0x2308, "lceil"}, {0x2309, "rceil"}, {0x2236, ":"},      {0x2A7D, "<="},
        {0x2A7E, ">="},    {0xFF0C, ","},     {0xFF1A, ":"}};
    static const std::unordered_map<char32_t, std::string_view> symbols{
        {0x03C0, "pi"},   {0x221E, "infinity"}, {0x2205, "emptyset"}, {0x03B1, "alpha"},
        {0x03B2, "beta"}, {0x03B3, "gamma"},    {0x03B8, "theta"},    {0x03BB, "lambda"},
        {0x03BC, "mu"},   {0x03C6, "phi"},      {0x03C9, "omega"}};
    if (c == 0x00A0 || (c >= 0x2000 && c <= 0x200F) || c == 0x202F || c == 0x20AC || c == 0xA3 ||
        c == 0xA5 || c == 0x201C || c == 0x201D || c == 0x2018) {
      space = true;
    } else if (const auto mark_found = marks.find(c); mark_found != marks.end()) {
      mark(std::string(mark_found->second));
    } else if (const auto symbol = symbols.find(c); symbol != symbols.end()) {
      push(TokenKind::kSymbol, std::string(symbol->second));
    } else if (c == 0x221A) {
      push(TokenKind::kCommand, "sqrt");
    } else if (c == 0xB2 || c == 0xB3 || c == 0xB9) {
      mark("^");
      push(TokenKind::kNumber, c == 0xB2 ? "2" : c == 0xB3 ? "3" : "1");
    } else if (c == 0xBC || c == 0xBD || c == 0xBE) {
      push(TokenKind::kCommand, "frac");
      for (const char* part : {c == 0xBE ? "3" : "1", c == 0xBD ? "2" : "4"})
        push(TokenKind::kNumber, part);
    } else {
      push(TokenKind::kMark, std::string(bytes));
    }
  }

  void run() {
    while (at < text.size()) {
      const char c = text[at];
      const char next = peek(at + 1);
      if (is_blank(c) || c == '~' || c == '$' || c == '"' || c == '`') {
        if (c != '$') space = true;
        ++at;
      } else if (is_digit(c) || (c == '.' && is_digit(next))) {
        number();
      } else if (is_letter(c)) {
        size_t end = at;
        while (is_letter(peek(end))) ++end;
        const std::string_view letters = text.substr(at, end - at);
        word(letters);
        at = end;
      } else if (c == '\\') {
        if (is_letter(next)) {
          command();
        } else if (next == '\\') {
          at += 2;
          if (row_breaks) {
            mark("\\\\");
          } else if (is_letter(peek(at))) {
            --at;
            command();
          }
        } else if (next == '{' || next == '}') {
          mark(next == '{' ? "\\{" : "\\}");
          at += 2;
        } else if (next == '%') {
          mark("%");
          at += 2;
        } else if (next == '|') {
          mark("|");
          at += 2;
        } else {  // \, \; \! \( \) \[ \] \$ and a blank
          if (next != '!' && next != '$') space = true;
          at += next == '\0' ? 1 : 2;
        }
      } else if (c == '^' || c == '{') {
        // ^\circ, ^{\circ}; {,}
        std::string_view rest = text.substr(at + 1);
        rest = rest.substr(0, 16);
        if (c == '^') {
          std::string tight;
          size_t used = 0;
          for (; used < rest.size() && tight.size() < 7; ++used)
            if (!is_blank(rest[used])) tight += rest[used];
          if (tight.starts_with("{\\circ}") ||
              (tight.starts_with("\\circ") && !is_letter(tight.size() > 5 ? tight[5] : ' '))) {
            const size_t wanted = tight.starts_with("{") ? 7 : 5;
            size_t seen = 0, i = at + 1;
            for (; seen < wanted; ++i)
              if (!is_blank(text[i])) ++seen;
            mark("deg");
            at = i;
            continue;
          }
        } else if (rest.starts_with(",}")) {
          mark(",");
          at += 3;
          continue;
        }
        mark(std::string(1, c));
        ++at;
      } else if (c == '<' || c == '>') {
        mark(next == '=' ? std::string{c, '='} : std::string(1, c));
        at += next == '=' ? 2 : 1;
      } else if (c == '!' && next == '=' && !tokens.empty() &&
                 (tokens.back().kind == TokenKind::kSymbol || space)) {
        mark("!=");
        at += 2;
      } else if (c == '*' && next == '*') {
        at += 2;
        if (!tokens.empty() && at < text.size()) mark("^");
      } else if (static_cast<unsigned char>(c) >= 0x80) {
        unicode();
      } else {
        mark(std::string(1, c));
        ++at;
      }
    }
  }
};

std::vector<Token> lex(std::string_view text, CommaReading reading) {
  Lexer lexer(text, reading);
  lexer.run();
  std::vector<Token> tokens = std::move(lexer.tokens);
  // A full stop or a separator at the end belongs to the sentence.
  while (!tokens.empty() && tokens.back().kind == TokenKind::kMark &&
         (tokens.back().text == "." || tokens.back().text == "," || tokens.back().text == ";" ||
          tokens.back().text == ":"))
    tokens.pop_back();
  return tokens;
}

struct NotUnderstood {};

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {
    tokens_.push_back({});
    for (size_t i = 0; i < tokens_.size(); ++i)
      if (tokens_[i].kind == TokenKind::kMark && tokens_[i].text == "|)") last_bar_ = i;
  }

  MathTree parse() {
    tree_.root = list();
    if (peek().kind != TokenKind::kEnd) fail();
    // Postfix signs and quotients nest without nested calls.
    std::vector<int> depth(tree_.nodes.size(), 0);
    for (size_t i = 0; i < depth.size(); ++i) {
      for (const int child : tree_.nodes[i].children)
        depth[i] = std::max(depth[i], depth[static_cast<size_t>(child)] + 1);
      if (depth[i] > 2 * kMaxAnswerDepth) fail();
    }
    return std::move(tree_);
  }

 private:
  [[noreturn]] static void fail() { throw NotUnderstood(); }
  Token& peek(size_t ahead = 0) { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  bool is_mark(std::string_view text, size_t ahead = 0) {
    return peek(ahead).kind == TokenKind::kMark && peek(ahead).text == text;
  }
  bool is_command(std::string_view text) {
    return peek().kind == TokenKind::kCommand && peek().text == text;
  }
  bool take(std::string_view text) {
    if (!is_mark(text)) return false;
    ++at_;
    return true;
  }
  void expect(std::string_view text) {
    if (!take(text)) fail();
  }

  struct Depth {
    explicit Depth(int* depth) : depth_(depth) {
      if (++*depth_ > kMaxAnswerDepth) {
        --*depth_;
        fail();
      }
    }
    ~Depth() { --*depth_; }
    int* depth_;
  };

  static bool is_joint(const std::string& word) {
    std::string lower;
    for (const char c : word)
      if (!is_blank(c) && c != ',' && c != ';')
        lower += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    return lower == "and" || lower == "or";
  }
  bool at_separator() {
    return is_mark(",") || is_mark(";") ||
           (peek().kind == TokenKind::kText && is_joint(peek().text));
  }
  bool at_close() {
    if (peek().kind == TokenKind::kEnd) return true;
    if (peek().kind == TokenKind::kCommand) return peek().text == "end";
    if (peek().kind != TokenKind::kMark) return false;
    const std::string& mark = peek().text;
    return mark == ")" || mark == "]" || mark == "}" || mark == "\\}" || mark == "|)" ||
           mark == "rfloor" || mark == "rceil" || mark == "&" || mark == "\\\\";
  }

  std::vector<int> items() {
    std::vector<int> result;
    while (true) {
      while (at_separator()) ++at_;
      if (at_close()) break;
      result.push_back(item());
      if (!at_separator()) break;
    }
    return result;
  }

  int list() {
    std::vector<int> parts = items();
    if (parts.empty()) fail();
    return parts.size() == 1 ? parts[0] : tree_.add(MathKind::kList, {}, std::move(parts));
  }

  static std::optional<char> relation_sign(const Token& token) {
    static const std::unordered_map<std::string_view, char> signs{
        {"=", '='}, {"~=", '~'}, {"!=", '!'}, {"<", '<'},
        {">", '>'}, {"<=", 'l'}, {">=", 'g'}, {"in", 'i'}};
    if (token.kind != TokenKind::kMark) return std::nullopt;
    const auto found = signs.find(token.text);
    return found == signs.end() ? std::nullopt : std::optional<char>(found->second);
  }

  int item() {
    if (is_mark("=") || is_mark("~=")) ++at_;  // "= 5"
    std::vector<int> operands{operand()};
    std::string signs;
    while (const auto sign = relation_sign(peek())) {
      ++at_;
      signs += *sign;
      operands.push_back(operand());
    }
    return signs.empty() ? operands[0] : tree_.add(MathKind::kRelation, signs, std::move(operands));
  }

  int operand() {
    const Depth guard(&depth_);
    if (peek().kind == TokenKind::kText) {
      std::string words = peek().text;
      ++at_;
      while (peek().kind == TokenKind::kText && !is_joint(peek().text)) {
        words += " " + peek().text;
        ++at_;
      }
      if (take(":") || words.ends_with(" is") || words.ends_with(":"))
        return operand();  // \text{Area: } 12
      if (!at_separator() && !at_close() && !relation_sign(peek())) fail();
      return tree_.add(MathKind::kText, words);
    }
    std::vector<int> parts{ratio()};
    while (take("cup")) parts.push_back(ratio());
    int node = parts.size() == 1 ? parts[0] : tree_.add(MathKind::kUnion, {}, std::move(parts));
    if (peek().kind == TokenKind::kText && !is_joint(peek().text)) node = quantity(node);
    return node;
  }

  // Words behind a value: a unit or a remark.
  int quantity(int value) {
    std::string unit;
    while (true) {
      if (peek().kind == TokenKind::kText && !is_joint(peek().text)) {
        unit += (unit.empty() ? "" : " ") + peek().text;
        ++at_;
      } else if (is_mark("^") && !unit.empty()) {
        ++at_;
        const bool brace = take("{");
        const bool minus = take("-");
        if (peek().kind != TokenKind::kNumber) fail();
        unit += (minus ? "^-" : "^") + peek().text;
        ++at_;
        if (brace) expect("}");
      } else if (is_mark("/") && peek(1).kind == TokenKind::kText) {
        unit += "/";
        ++at_;
      } else if (is_mark(".") || is_mark("*")) {
        ++at_;
      } else {
        break;
      }
    }
    return tree_.add(MathKind::kQuantity, unit, {value});
  }

  int ratio() {
    std::vector<int> parts{sum()};
    while (is_mark(":")) {
      ++at_;
      parts.push_back(sum());
    }
    return parts.size() == 1 ? parts[0] : tree_.add(MathKind::kRatio, {}, std::move(parts));
  }

  int sum() {
    std::vector<int> terms;
    std::string sign = "+";
    if (is_mark("+") || is_mark("-") || is_mark("+-") || is_mark("-+")) sign = tokens_[at_++].text;
    while (true) {
      const int value = term();
      if (sign == "+")
        terms.push_back(value);
      else if (sign == "-")
        terms.push_back(tree_.add(MathKind::kNegate, {}, {value}));
      else
        terms.push_back(tree_.add(MathKind::kPlusMinus, sign == "-+" ? "-" : "", {value}));
      if (!(is_mark("+") || is_mark("-") || is_mark("+-") || is_mark("-+"))) break;
      sign = tokens_[at_++].text;
      // Several signs in a row: 2 - -3.
      while (is_mark("-") || is_mark("+")) {
        if (is_mark("-") && (sign == "+" || sign == "-")) sign = sign == "+" ? "-" : "+";
        ++at_;
      }
    }
    int node = terms.size() == 1 ? terms[0] : tree_.add(MathKind::kSum, {}, std::move(terms));
    if (is_mark("over") || is_mark("choose")) {
      const bool over = tokens_[at_++].text == "over";
      const int below = sum();
      node = over ? tree_.add(MathKind::kQuotient, {}, {node, below})
                  : tree_.add(MathKind::kFunction, "binomial", {node, below});
    }
    return node;
  }

  bool starts_factor() {
    const Token& token = peek();
    switch (token.kind) {
      case TokenKind::kNumber:
      case TokenKind::kSymbol:
      case TokenKind::kFunction:
        return true;
      case TokenKind::kCommand:
        return token.text == "frac" || token.text == "sqrt" || token.text == "binom" ||
               token.text == "begin" || token.text == "overline" || token.text == "bar";
      case TokenKind::kMark:
        return token.text == "(" || token.text == "[" || token.text == "{" || token.text == "\\{" ||
               token.text == "|(" || token.text == "lfloor" || token.text == "lceil" ||
               (token.text == "|" && !in_abs_);
      default:
        return false;
    }
  }

  const MathNode* integer(int node) const {
    const MathNode& candidate = tree_.at(node);
    return candidate.kind == MathKind::kNumber &&
                   candidate.text.find_first_of(".(") == std::string::npos
               ? &candidate
               : nullptr;
  }
  bool proper_fraction(int node) const {
    const MathNode& candidate = tree_.at(node);
    if (candidate.kind != MathKind::kQuotient) return false;
    const MathNode* above = integer(candidate.children[0]);
    const MathNode* below = integer(candidate.children[1]);
    if (above == nullptr || below == nullptr) return false;
    return above->text.size() < below->text.size() ||
           (above->text.size() == below->text.size() && above->text < below->text);
  }

  int term() {
    std::vector<int> factors{factor()};
    const auto product = [&] {
      return factors.size() == 1 ? factors[0]
                                 : tree_.add(MathKind::kProduct, {}, std::exchange(factors, {}));
    };
    while (true) {
      if (take("*")) {
        factors.push_back(signed_factor());
      } else if (take("/")) {
        const int above = product();
        factors = {tree_.add(MathKind::kQuotient, {}, {above, signed_factor()})};
      } else if (starts_factor()) {
        const bool whole = factors.size() == 1 && integer(factors[0]) != nullptr;
        if (peek().kind == TokenKind::kNumber) {
          if (tree_.at(factors.back()).kind == MathKind::kNumber) {
            // 7 3/4
            if (!whole || !peek().space_before) fail();
            const int above = factor();
            if (!take("/")) fail();
            const int part = tree_.add(MathKind::kQuotient, {}, {above, factor()});
            if (!proper_fraction(part)) fail();
            factors = {tree_.add(MathKind::kSum, {}, {factors[0], part})};
          } else {
            factors.push_back(factor());
          }
        } else {
          const bool fraction = is_command("frac");
          const int right = factor();
          const MathNode part = tree_.at(right);
          const bool marked = part.kind == MathKind::kPercent || part.kind == MathKind::kDegree;
          if (whole && fraction && proper_fraction(right))
            factors = {tree_.add(MathKind::kSum, {}, {factors[0], right})};
          else if (whole && fraction && marked && proper_fraction(part.children[0]))  // 33\frac13\%
            factors = {tree_.add(part.kind, {},
                                 {tree_.add(MathKind::kSum, {}, {factors[0], part.children[0]})})};
          else
            factors.push_back(right);
        }
      } else {
        return product();
      }
    }
  }

  int signed_factor() {
    if (take("-")) return tree_.add(MathKind::kNegate, {}, {factor()});
    if (take("+")) return factor();
    return factor();
  }

  int factor() {
    int node = primary();
    while (true) {
      if (take("^")) {
        const int exponent = script();
        node = tree_.add(MathKind::kPower, {}, {node, exponent});
      } else if (is_mark("!") || is_mark("'")) {
        const bool factorial = tokens_[at_++].text == "!";
        if (factorial) {
          node = tree_.add(MathKind::kFunction, "factorial", {node});
        } else {
          if (tree_.at(node).kind != MathKind::kSymbol) fail();
          node = tree_.add(MathKind::kSymbol, tree_.at(node).text + "'");
        }
      } else if (is_mark("_")) {
        ++at_;
        const std::string subscript = raw_script();
        const MathNode base = tree_.at(node);
        if (base.kind == MathKind::kSymbol) {
          node = tree_.add(MathKind::kSymbol, base.text + "_" + subscript);
        } else if (base.kind == MathKind::kNumber && !subscript.empty() && subscript.size() <= 2 &&
                   std::all_of(subscript.begin(), subscript.end(), is_digit)) {
          node = tree_.add(MathKind::kFunction, "base",
                           {node, tree_.add(MathKind::kNumber, subscript)});
        } else {
          fail();
        }
      } else if (take("%")) {
        node = tree_.add(MathKind::kPercent, {}, {node});
      } else if (take("deg")) {
        node = tree_.add(MathKind::kDegree, {}, {node});
        if (peek().kind == TokenKind::kSymbol && (peek().text == "C" || peek().text == "F") &&
            !peek().space_before)
          ++at_;
      } else {
        return node;
      }
    }
  }

  // The exponent behind ^: a group, a signed number (2^-3) or one factor without postfix.
  int script() {
    const Depth guard(&depth_);
    if (is_mark("{")) return braces();
    if (take("-")) return tree_.add(MathKind::kNegate, {}, {script()});
    if (take("'")) fail();
    return primary();
  }

  std::string raw_script() {
    if (!is_mark("{")) {
      if (peek().kind == TokenKind::kEnd) fail();
      return tokens_[at_++].text;
    }
    std::string raw;
    int depth = 0;
    while (peek().kind != TokenKind::kEnd) {
      if (is_mark("{")) ++depth;
      if (is_mark("}") && --depth == 0) {
        ++at_;
        return raw.substr(1);
      }
      raw += tokens_[at_++].text;
    }
    fail();
  }

  // One argument of a command: a group, or the first digit or token.
  int argument() {
    if (is_mark("{")) return braces();
    if (peek().kind == TokenKind::kNumber && peek().text.size() > 1 &&
        peek().text.find('(') == std::string::npos) {
      Token& token = peek();
      const int digit = tree_.add(MathKind::kNumber, token.text.substr(0, 1));
      token.text.erase(0, 1);
      token.space_before = false;
      if (token.text.front() == '.') fail();
      return digit;
    }
    return primary();
  }

  int braces() {
    expect("{");
    const bool outer = std::exchange(in_abs_, false);
    std::vector<int> parts = items();
    in_abs_ = outer;
    expect("}");
    if (parts.empty()) fail();
    return parts.size() == 1 ? parts[0] : tree_.add(MathKind::kSet, {}, std::move(parts));
  }

  int between(std::string_view close, std::string name) {
    const bool outer = std::exchange(in_abs_, close == "|");
    const int value = sum();
    in_abs_ = outer;
    expect(close);
    return tree_.add(MathKind::kFunction, std::move(name), {value});
  }

  int primary() {
    const Depth guard(&depth_);
    const Token token = peek();
    ++at_;
    switch (token.kind) {
      case TokenKind::kNumber:
        return tree_.add(MathKind::kNumber, token.text);
      case TokenKind::kSymbol:
        return tree_.add(MathKind::kSymbol, token.text);
      case TokenKind::kFunction:
        return function(token.text);
      case TokenKind::kCommand:
        return command(token.text);
      case TokenKind::kMark:
        break;
      default:
        fail();
    }
    if (token.text == "(" || token.text == "[") {
      const bool outer = std::exchange(in_abs_, false);
      std::vector<int> parts = items();
      in_abs_ = outer;
      const bool round = is_mark(")");
      if (!round && !is_mark("]")) fail();
      ++at_;
      if (parts.empty()) fail();
      if (parts.size() == 1 && (token.text == "(") == round) return parts[0];
      return tree_.add(MathKind::kBracketed, token.text + (round ? ")" : "]"), std::move(parts));
    }
    if (token.text == "{") {
      --at_;
      return braces();
    }
    if (token.text == "\\{") {
      // {x | x > 5} is its condition.
      const bool builder =
          peek().kind == TokenKind::kSymbol && (is_mark("|", 1) || is_mark(":", 1));
      if (builder) at_ += 2;
      const bool outer = std::exchange(in_abs_, false);
      std::vector<int> parts = items();
      in_abs_ = outer;
      expect("\\}");
      if (builder && parts.size() == 1) return parts[0];
      if (builder) fail();
      return tree_.add(MathKind::kSet, {}, std::move(parts));
    }
    if (token.text == "|") return between("|", "abs");
    if (token.text == "|(") return between(at_ < last_bar_ ? "|)" : "|", "abs");
    if (token.text == "lfloor") return between("rfloor", "floor");
    if (token.text == "lceil") return between("rceil", "ceil");
    fail();
  }

  int function(std::string name) {
    if (name == "asin" || name == "acos" || name == "atan") name.insert(1, "rc");
    if (name == "sqrt") {
      if (is_mark("(")) return tree_.add(MathKind::kFunction, "sqrt", {primary()});
      return tree_.add(MathKind::kFunction, "sqrt", {argument()});
    }
    int base = -1, exponent = -1;
    while (true) {
      if (is_mark("_") && name == "log" && base < 0) {
        ++at_;
        base = argument();
      } else if (is_mark("^") && exponent < 0) {
        ++at_;
        exponent = script();
      } else {
        break;
      }
    }
    if (is_mark("_")) fail();
    std::vector<int> arguments;
    if (is_mark("(") || is_mark("{") || is_mark("[")) {
      const int value = primary();
      if (tree_.at(value).kind == MathKind::kBracketed || tree_.at(value).kind == MathKind::kSet)
        arguments = tree_.at(value).children;
      else
        arguments = {value};
    } else {
      // sin 2x: implicit factors up to the next function or operator.
      bool negative = take("-");
      std::vector<int> factors;
      while (starts_factor() && peek().kind != TokenKind::kFunction) factors.push_back(factor());
      if (factors.empty() && peek().kind == TokenKind::kFunction) factors.push_back(factor());
      if (factors.empty()) fail();
      int value =
          factors.size() == 1 ? factors[0] : tree_.add(MathKind::kProduct, {}, std::move(factors));
      if (negative) value = tree_.add(MathKind::kNegate, {}, {value});
      arguments = {value};
    }
    if (base >= 0) arguments.push_back(base);
    if (exponent >= 0 && tree_.at(exponent).kind == MathKind::kNegate &&
        tree_.at(tree_.at(exponent).children[0]).text == "1") {
      static const std::unordered_map<std::string_view, std::string_view> inverse{
          {"sin", "arcsin"}, {"cos", "arccos"}, {"tan", "arctan"}, {"cot", "arccot"}};
      const auto found = inverse.find(name);
      if (found == inverse.end()) fail();
      return tree_.add(MathKind::kFunction, std::string(found->second), std::move(arguments));
    }
    const int call = tree_.add(MathKind::kFunction, std::move(name), std::move(arguments));
    return exponent < 0 ? call : tree_.add(MathKind::kPower, {}, {call, exponent});
  }

  int command(const std::string& name) {
    if (name == "frac") {
      const int above = argument();
      const int below = argument();
      return tree_.add(MathKind::kQuotient, {}, {above, below});
    }
    if (name == "binom") {
      const int above = argument();
      const int below = argument();
      return tree_.add(MathKind::kFunction, "binomial", {above, below});
    }
    if (name == "sqrt") {
      int degree = -1;
      if (take("[")) {
        degree = sum();
        expect("]");
      }
      const int value = is_mark("{") ? braces() : primary();
      if (degree < 0) return tree_.add(MathKind::kFunction, "sqrt", {value});
      return tree_.add(MathKind::kFunction, "root", {value, degree});
    }
    if (name == "overline" || name == "bar")
      return tree_.add(MathKind::kSymbol, "overline " + raw_script());
    if (name == "mathbb") return tree_.add(MathKind::kSymbol, "set " + raw_script());
    if (name == "begin") return matrix();
    fail();
  }

  int matrix() {
    const std::string kind = raw_script();
    if (kind != "pmatrix" && kind != "bmatrix" && kind != "matrix" && kind != "smallmatrix" &&
        kind != "array" && kind != "Bmatrix")
      fail();
    if (kind == "array" && is_mark("{")) raw_script();
    std::vector<int> cells;
    int columns = -1, in_row = 0;
    const bool outer = std::exchange(in_abs_, false);
    while (true) {
      if (is_command("end")) {
        if (in_row != 0) fail();
        break;
      }
      cells.push_back(item());
      ++in_row;
      if (take("&")) continue;
      const bool row = take("\\\\");
      if (columns >= 0 && columns != in_row) fail();
      columns = in_row;
      in_row = 0;
      if (!row) break;
    }
    in_abs_ = outer;
    if (!is_command("end")) fail();
    ++at_;
    if (raw_script() != kind || cells.empty()) fail();
    const int node = tree_.add(MathKind::kMatrix, {}, std::move(cells));
    tree_.nodes[static_cast<size_t>(node)].columns = columns;
    return node;
  }

  std::vector<Token> tokens_;
  MathTree tree_;
  size_t at_ = 0;
  size_t last_bar_ = 0;  // the last closing bar
  int depth_ = 0;
  bool in_abs_ = false;
};

}  // namespace

int MathTree::add(MathKind kind, std::string text, std::vector<int> children) {
  nodes.push_back({kind, std::move(text), std::move(children), 0});
  return static_cast<int>(nodes.size()) - 1;
}

std::optional<MathTree> parse_answer(std::string_view text, CommaReading reading) {
  if (text.size() > kMaxAnswerBytes) return std::nullopt;
  try {
    std::vector<Token> tokens = lex(text, reading);
    if (tokens.empty()) return std::nullopt;
    return Parser(std::move(tokens)).parse();
  } catch (const NotUnderstood&) {
    return std::nullopt;
  }
}

std::string canonical_answer(std::string_view text, bool* has_words) {
  if (has_words != nullptr) *has_words = false;
  std::string out;
  if (text.size() > kMaxAnswerBytes) {
    for (const char c : text)
      if (!is_blank(c)) out += c;
    return out;
  }
  for (const Token& token : lex(text, CommaReading::kSeparator)) {
    if (token.kind == TokenKind::kText && has_words != nullptr) *has_words = true;
    if (token.kind == TokenKind::kCommand) out += '\\';
    for (const char c : token.text)
      if (!is_blank(c)) out += c;
    // Two numbers side by side stay two numbers.
    if (token.kind == TokenKind::kNumber) out += ' ';
  }
  return out;
}

}  // namespace replayeval
