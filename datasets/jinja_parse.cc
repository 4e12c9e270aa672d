// From the text of a template to its syntax tree: tags with Jinja's rules for white space, then
// statements and expressions by recursive descent.
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "datasets/jinja_syntax.h"
#include "datasets/utf8.h"

namespace replayeval::jinja {
namespace {

constexpr int kDeepest = 200;  // nested expressions and blocks

bool is_space(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v';
}
bool name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool name_part(char c) { return name_start(c) || is_digit(c); }

struct Token {
  enum class Kind { kName, kInteger, kReal, kText, kOperator, kEnd };
  Kind kind = Kind::kEnd;
  std::string text;
  int line = 0;
};

// One piece of a template: text between tags, or a tag with its tokens.
struct Piece {
  enum class Kind { kText, kOutput, kBlock };
  Kind kind = Kind::kText;
  std::string text;
  std::vector<Token> tokens;
  int line = 0;
};

// ---------------------------------------------------------------------------------------------------------------
// Tags
// ---------------------------------------------------------------------------------------------------------------

class Scanner {
 public:
  Scanner(std::string_view text, const JinjaOptions& options) : options_(options) {
    // Line ends become LF, as Jinja reads them.
    source_.reserve(text.size());
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\r') {
        source_ += '\n';
        if (i + 1 < text.size() && text[i + 1] == '\n') ++i;
      } else {
        source_ += text[i];
      }
    }
    if (!options.keep_trailing_newline && source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Piece> scan() {
    while (at_ < source_.size()) {
      size_t tag = source_.find('{', at_);
      while (tag != std::string::npos &&
             (tag + 1 >= source_.size() ||
              std::string_view("{%#").find(source_[tag + 1]) == std::string_view::npos)) {
        tag = source_.find('{', tag + 1);
      }
      if (tag == std::string::npos) {
        add_text(source_.substr(at_));
        break;
      }
      std::string before = source_.substr(at_, tag - at_);
      const char kind = source_[tag + 1];
      size_t inside = tag + 2;
      const char sign = inside < source_.size() ? source_[inside] : '\0';
      if (sign == '-' || sign == '+') ++inside;
      trim_before(&before, sign, kind != '{');
      const int text_line = line_;
      line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(at_),
                                           source_.begin() + static_cast<ptrdiff_t>(tag), '\n'));
      add_text(std::move(before), text_line);
      at_ = inside;
      if (kind == '#') {
        comment();
      } else {
        block_or_output(kind == '%');
      }
    }
    return std::move(pieces_);
  }

 private:
  void add_text(std::string text, int line = 0) {
    if (text.empty()) return;
    Piece piece;
    piece.text = std::move(text);
    piece.line = line == 0 ? line_ : line;
    pieces_.push_back(std::move(piece));
  }

  // White space at the end of the text before a tag.
  void trim_before(std::string* text, char sign, bool block) const {
    if (sign == '-') {
      while (!text->empty() && is_space(text->back())) text->pop_back();
    } else if (sign != '+' && options_.lstrip_blocks && block) {
      const size_t newline = text->rfind('\n');
      const size_t line = newline == std::string::npos ? 0 : newline + 1;
      if (newline == std::string::npos && !line_starting_) return;
      if (text->find_first_not_of(" \t\f\v", line) == std::string::npos) text->resize(line);
    }
  }

  // Consumes the end of a tag at at_ (behind an optional sign), and white space behind it.
  void end_of_tag(char sign, bool block) {
    const auto skip = [&](bool all) {
      while (at_ < source_.size() && (all ? is_space(source_[at_]) : source_[at_] == '\n')) {
        line_ += source_[at_] == '\n';
        ++at_;
        if (!all) break;
      }
    };
    if (sign == '-') {
      skip(true);
    } else if (sign != '+' && block && options_.trim_blocks) {
      skip(false);
    }
    line_starting_ = source_[at_ - 1] == '\n';
  }

  void comment() {
    const int opened = line_;
    const size_t close = source_.find("#}", at_);
    if (close == std::string::npos) throw TemplateError("the comment never ends", opened);
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(at_),
                                         source_.begin() + static_cast<ptrdiff_t>(close), '\n'));
    const char sign = close > at_ ? source_[close - 1] : '\0';
    at_ = close + 2;
    end_of_tag(sign, true);
  }

  void block_or_output(bool block) {
    Piece piece;
    piece.kind = block ? Piece::Kind::kBlock : Piece::Kind::kOutput;
    piece.line = line_;
    const char* const close = block ? "%}" : "}}";
    std::string open;  // brackets that are open, so that "}}" may end two maps
    while (true) {
      while (at_ < source_.size() && is_space(source_[at_])) line_ += source_[at_++] == '\n';
      if (at_ >= source_.size()) {
        throw TemplateError(
            std::string(block ? "{%" : "{{") + ": the tag never ends, expected " + close,
            piece.line);
      }
      const std::string_view rest = std::string_view(source_).substr(at_);
      if (open.empty()) {
        const bool sign = rest[0] == '-' || (block && rest[0] == '+');
        if (rest.starts_with(close)) {
          at_ += 2;
          end_of_tag('\0', block);
          break;
        }
        if (sign && rest.substr(1).starts_with(close)) {
          at_ += 3;
          end_of_tag(rest[0], block);
          break;
        }
      }
      piece.tokens.push_back(token(&open));
    }
    Token end;
    end.line = line_;
    piece.tokens.push_back(end);
    if (block && piece.tokens.size() == 2 && piece.tokens[0].text == "raw") {
      raw();
      return;
    }
    pieces_.push_back(std::move(piece));
  }

  // Text up to {% endraw %}.
  void raw() {
    const int opened = line_;
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos;
         tag = source_.find("{%", tag + 1)) {
      size_t at = tag + 2;
      const char sign = at < source_.size() ? source_[at] : '\0';
      if (sign == '-' || sign == '+') ++at;
      while (at < source_.size() && is_space(source_[at])) ++at;
      if (source_.compare(at, 6, "endraw") != 0) continue;
      at += 6;
      while (at < source_.size() && is_space(source_[at])) ++at;
      const char end_sign = at < source_.size() ? source_[at] : '\0';
      if (end_sign == '-' || end_sign == '+') ++at;
      if (source_.compare(at, 2, "%}") != 0) continue;
      std::string text = source_.substr(at_, tag - at_);
      trim_before(&text, sign, true);
      const int line = line_;
      line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(at_),
                                           source_.begin() + static_cast<ptrdiff_t>(at), '\n'));
      add_text(std::move(text), line);
      at_ = at + 2;
      end_of_tag(end_sign, true);
      return;
    }
    throw TemplateError("{% raw %} without {% endraw %}", opened);
  }

  Token token(std::string* open) {
    Token token;
    token.line = line_;
    const char c = source_[at_];
    if (c == '\'' || c == '"') {
      token.kind = Token::Kind::kText;
      token.text = text_literal(c);
    } else if (is_digit(c)) {
      number(&token);
    } else if (name_start(c)) {
      token.kind = Token::Kind::kName;
      const size_t begin = at_;
      while (at_ < source_.size() && name_part(source_[at_])) ++at_;
      token.text = source_.substr(begin, at_ - begin);
    } else {
      token.kind = Token::Kind::kOperator;
      static constexpr std::array<std::string_view, 7> pairs = {
          "**", "//", "==", "!=", ">=", "<=", "=>"};
      const std::string_view two = std::string_view(source_).substr(at_, 2);
      if (std::find(pairs.begin(), pairs.end(), two) != pairs.end()) {
        token.text = two;
      } else if (std::string_view("+-*/%~<>=.,:|()[]{}").find(c) != std::string_view::npos) {
        token.text = std::string(1, c);
      } else {
        throw TemplateError("unexpected character '" + std::string(1, c) + "'", line_);
      }
      at_ += token.text.size();
      if (c == '(' || c == '[' || c == '{') *open += c;
      if (c == ')' || c == ']' || c == '}') {
        const char partner = c == ')' ? '(' : c == ']' ? '[' : '{';
        if (open->empty() || open->back() != partner) {
          throw TemplateError("unexpected '" + std::string(1, c) + "'", line_);
        }
        open->pop_back();
      }
    }
    return token;
  }

  void number(Token* token) {
    token->kind = Token::Kind::kInteger;
    const auto digits = [&] {
      while (at_ < source_.size() &&
             (is_digit(source_[at_]) ||
              (source_[at_] == '_' && at_ + 1 < source_.size() && is_digit(source_[at_ + 1])))) {
        if (source_[at_] != '_') token->text += source_[at_];
        ++at_;
      }
    };
    digits();
    if (at_ + 1 < source_.size() && source_[at_] == '.' && is_digit(source_[at_ + 1])) {
      token->kind = Token::Kind::kReal;
      token->text += source_[at_++];
      digits();
    }
    if (at_ < source_.size() && (source_[at_] == 'e' || source_[at_] == 'E')) {
      size_t behind = at_ + 1;
      if (behind < source_.size() && (source_[behind] == '+' || source_[behind] == '-')) ++behind;
      if (behind < source_.size() && is_digit(source_[behind])) {
        token->kind = Token::Kind::kReal;
        token->text += source_.substr(at_, behind - at_);
        at_ = behind;
        digits();
      }
    }
  }

  // A literal with Python's escapes.
  std::string text_literal(char quote) {
    const int opened = line_;
    std::string text;
    ++at_;
    while (at_ < source_.size() && source_[at_] != quote) {
      line_ += source_[at_] == '\n';
      if (source_[at_] != '\\' || at_ + 1 >= source_.size()) {
        text += source_[at_++];
        continue;
      }
      const char c = source_[at_ + 1];
      at_ += 2;
      static constexpr std::string_view kNames = "abfnrtv\\'\"";
      static constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
      if (const size_t known = kNames.find(c); known != std::string_view::npos) {
        text += kValues[known];
      } else if (c == '\n') {
        ++line_;
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t count = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        uint32_t point = 0;
        const char* const begin = source_.data() + at_;
        const char* const end = begin + std::min(count, source_.size() - at_);
        const auto [read, error] = std::from_chars(begin, end, point, 16);
        if (error != std::errc() || read != begin + count || point > 0x10FFFF ||
            (point >= 0xD800 && point < 0xE000)) {
          throw TemplateError("the escape \\" + std::string(1, c) + " needs " +
                                  std::to_string(count) + " hexadecimal digits of a character",
                              line_);
        }
        append_utf8(point, &text);
        at_ += count;
      } else if (c >= '0' && c <= '7') {
        uint32_t point = static_cast<uint32_t>(c - '0');
        for (int i = 0; i < 2 && at_ < source_.size() && source_[at_] >= '0' && source_[at_] <= '7';
             ++i)
          point = point * 8 + static_cast<uint32_t>(source_[at_++] - '0');
        append_utf8(point, &text);
      } else {
        text += '\\';
        text += c;
      }
    }
    if (at_ >= source_.size()) throw TemplateError("the text that opens here never ends", opened);
    ++at_;
    return text;
  }

  JinjaOptions options_;
  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Piece> pieces_;
};

// ---------------------------------------------------------------------------------------------------------------
// Expressions
// ---------------------------------------------------------------------------------------------------------------

class ExpressionParser {
 public:
  explicit ExpressionParser(const std::vector<Token>& tokens) : tokens_(tokens) {}

  const Token& current() const { return tokens_[at_]; }
  const Token& next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  void advance() {
    if (at_ + 1 < tokens_.size()) ++at_;
  }
  bool at_end() const { return current().kind == Token::Kind::kEnd; }
  bool is_operator(std::string_view text) const {
    return current().kind == Token::Kind::kOperator && current().text == text;
  }
  bool is_name(std::string_view text) const {
    return current().kind == Token::Kind::kName && current().text == text;
  }
  bool accept(std::string_view text) {
    if (!is_operator(text) && !is_name(text)) return false;
    advance();
    return true;
  }
  void expect(std::string_view text) {
    if (!accept(text)) fail("expected '" + std::string(text) + "'");
  }
  std::string name(const char* what) {
    if (current().kind != Token::Kind::kName) fail(std::string("expected ") + what);
    std::string text = current().text;
    advance();
    return text;
  }
  [[noreturn]] void fail(const std::string& message) const {
    static const char* const kEnd = "the end of the tag";
    throw TemplateError(message + ", got " +
                            (at_end()                               ? kEnd
                             : current().kind == Token::Kind::kText ? "a text"
                                                                    : "'" + current().text + "'"),
                        current().line);
  }
  void expect_end(const std::string& construct) const {
    if (!at_end()) fail(construct + ": expected its end");
  }

  // A tuple without parentheses, or one expression.
  ExpressionPtr tuple() {
    ExpressionPtr first = expression();
    if (!is_operator(",")) return first;
    ExpressionPtr all = make(Expression::Kind::kTuple);
    all->parts.push_back(std::move(first));
    while (accept(",")) {
      if (at_end() || is_operator(")")) break;
      all->parts.push_back(expression());
    }
    return all;
  }

  ExpressionPtr expression(bool conditional = true) {
    const Depth depth(this);
    ExpressionPtr value = disjunction();
    while (conditional && is_name("if")) {
      ExpressionPtr choice = make(Expression::Kind::kConditional);
      advance();
      choice->parts.push_back(std::move(value));
      choice->parts.push_back(disjunction());
      choice->parts.push_back(accept("else") ? expression() : nullptr);
      value = std::move(choice);
    }
    return value;
  }

  // The filters behind {% set x | filter %}.
  ExpressionPtr filters(ExpressionPtr input) {
    while (is_operator("|")) input = filter(std::move(input));
    return input;
  }

  ExpressionPtr make(Expression::Kind kind) const {
    auto made = std::make_unique<Expression>();
    made->kind = kind;
    made->line = current().line;
    return made;
  }

 private:
  // Guards the stack against templates that nest without end.
  struct Depth {
    explicit Depth(ExpressionParser* parser) : parser(parser) {
      if (++parser->depth_ > kDeepest) parser->fail("the expression nests too deeply");
    }
    ~Depth() { --parser->depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
    ExpressionParser* parser;
  };

  ExpressionPtr pair(Expression::Kind kind, const std::string& text, ExpressionPtr a,
                     ExpressionPtr b) {
    ExpressionPtr made = make(kind);
    made->line = a->line;
    made->text = text;
    made->parts.push_back(std::move(a));
    made->parts.push_back(std::move(b));
    return made;
  }

  ExpressionPtr disjunction() {
    ExpressionPtr left = conjunction();
    while (accept("or")) left = pair(Expression::Kind::kOr, "or", std::move(left), conjunction());
    return left;
  }

  ExpressionPtr conjunction() {
    ExpressionPtr left = negation();
    while (accept("and")) left = pair(Expression::Kind::kAnd, "and", std::move(left), negation());
    return left;
  }

  ExpressionPtr negation() {
    if (!is_name("not")) return comparison();
    const Depth depth(this);
    ExpressionPtr made = make(Expression::Kind::kNot);
    advance();
    made->parts.push_back(negation());
    return made;
  }

  ExpressionPtr comparison() {
    ExpressionPtr left = sum();
    ExpressionPtr chain;
    while (true) {
      std::string operation;
      for (const char* known : {"==", "!=", "<=", ">=", "<", ">"}) {
        if (is_operator(known)) operation = known;
      }
      if (is_name("in")) operation = "in";
      if (is_name("not") && next().kind == Token::Kind::kName && next().text == "in") {
        operation = "not in";
        advance();
      }
      if (operation.empty()) return chain ? std::move(chain) : std::move(left);
      advance();
      if (!chain) {
        chain = make(Expression::Kind::kCompare);
        chain->line = left->line;
        chain->parts.push_back(std::move(left));
      }
      chain->operators.push_back(operation);
      chain->parts.push_back(sum());
    }
  }

  ExpressionPtr sum() {
    ExpressionPtr left = concatenation();
    while (is_operator("+") || is_operator("-")) {
      const std::string operation = current().text;
      advance();
      left = pair(Expression::Kind::kBinary, operation, std::move(left), concatenation());
    }
    return left;
  }

  ExpressionPtr concatenation() {
    ExpressionPtr left = product();
    while (accept("~")) left = pair(Expression::Kind::kBinary, "~", std::move(left), product());
    return left;
  }

  ExpressionPtr product() {
    ExpressionPtr left = power();
    while (is_operator("*") || is_operator("/") || is_operator("//") || is_operator("%")) {
      const std::string operation = current().text;
      advance();
      left = pair(Expression::Kind::kBinary, operation, std::move(left), power());
    }
    return left;
  }

  ExpressionPtr power() {
    ExpressionPtr left = unary(true);
    while (accept("**")) left = pair(Expression::Kind::kBinary, "**", std::move(left), unary(true));
    return left;
  }

  ExpressionPtr unary(bool with_filters) {
    const Depth depth(this);
    ExpressionPtr value;
    if (is_operator("-") || is_operator("+")) {
      value = make(is_operator("-") ? Expression::Kind::kNegative : Expression::Kind::kPositive);
      advance();
      value->parts.push_back(unary(false));
    } else {
      value = primary();
    }
    value = postfix(std::move(value));
    if (!with_filters) return value;
    while (true) {
      if (is_operator("|")) {
        value = filter(std::move(value));
      } else if (is_name("is")) {
        value = test(std::move(value));
      } else if (is_operator("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr constant(JinjaValue value) {
    ExpressionPtr made = make(Expression::Kind::kConstant);
    made->value = std::move(value);
    return made;
  }

  ExpressionPtr primary() {
    const Token token = current();
    ExpressionPtr made;
    switch (token.kind) {
      case Token::Kind::kName:
        if (token.text == "true" || token.text == "True") {
          made = constant(true);
        } else if (token.text == "false" || token.text == "False") {
          made = constant(false);
        } else if (token.text == "none" || token.text == "None") {
          made = constant(JinjaValue::None{});
        } else if (token.text == "if" || token.text == "else" || token.text == "in" ||
                   token.text == "is" || token.text == "and" || token.text == "or" ||
                   token.text == "not") {
          fail("expected a value");
        } else {
          made = make(Expression::Kind::kName);
          made->text = token.text;
        }
        advance();
        return made;
      case Token::Kind::kText: {
        made = make(Expression::Kind::kConstant);
        std::string text;
        for (; current().kind == Token::Kind::kText; advance()) text += current().text;
        made->value = std::move(text);
        return made;
      }
      case Token::Kind::kInteger: {
        int64_t value = 0;
        const char* const end = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), end, value).ec != std::errc())
          fail("expected a number of 64 bits");
        made = constant(value);
        advance();
        return made;
      }
      case Token::Kind::kReal: {
        double value = 0;
        std::from_chars(token.text.data(), token.text.data() + token.text.size(), value);
        made = constant(value);
        advance();
        return made;
      }
      case Token::Kind::kOperator:
        if (token.text == "(") return parentheses();
        if (token.text == "[") return list();
        if (token.text == "{") return map();
        break;
      case Token::Kind::kEnd:
        break;
    }
    fail("expected a value");
  }

  ExpressionPtr parentheses() {
    ExpressionPtr empty = make(Expression::Kind::kTuple);
    advance();
    if (accept(")")) return empty;
    ExpressionPtr inside = tuple();
    expect(")");
    return inside;
  }

  ExpressionPtr list() {
    ExpressionPtr made = make(Expression::Kind::kList);
    advance();
    while (!accept("]")) {
      made->parts.push_back(expression());
      if (!is_operator("]")) expect(",");
    }
    return made;
  }

  ExpressionPtr map() {
    ExpressionPtr made = make(Expression::Kind::kMap);
    advance();
    while (!accept("}")) {
      made->parts.push_back(expression());
      expect(":");
      made->parts.push_back(expression());
      if (!is_operator("}")) expect(",");
    }
    return made;
  }

  ExpressionPtr postfix(ExpressionPtr value) {
    while (true) {
      if (is_operator(".")) {
        ExpressionPtr made = make(Expression::Kind::kAttribute);
        advance();
        if (current().kind == Token::Kind::kInteger) {
          made->kind = Expression::Kind::kItem;
          made->parts.push_back(std::move(value));
          made->parts.push_back(primary());
        } else {
          made->text = name("the name of an attribute");
          made->parts.push_back(std::move(value));
        }
        value = std::move(made);
      } else if (is_operator("[")) {
        value = subscript(std::move(value));
      } else if (is_operator("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr value) {
    ExpressionPtr made = make(Expression::Kind::kItem);
    advance();
    made->parts.push_back(std::move(value));
    if (!is_operator(":")) made->parts.push_back(expression());
    if (is_operator(":")) {
      made->kind = Expression::Kind::kSlice;
      made->parts.resize(2);
      for (int i = 0; i < 2 && accept(":"); ++i) {
        made->parts.push_back(is_operator(":") || is_operator("]") ? nullptr : expression());
      }
      made->parts.resize(4);
    } else if (is_operator(",")) {
      fail("subscripts with several values are not known");
    }
    expect("]");
    return made;
  }

  void arguments(Expression* made) {
    expect("(");
    while (!accept(")")) {
      if (is_operator("*") || is_operator("**")) {
        fail("arguments that are unpacked with * are not known");
      }
      if (current().kind == Token::Kind::kName && next().kind == Token::Kind::kOperator &&
          next().text == "=") {
        std::string keyword = name("a keyword");
        advance();
        made->named.emplace_back(std::move(keyword), expression());
      } else if (!made->named.empty()) {
        fail("expected a keyword: an argument without one follows one that has it");
      } else {
        made->parts.push_back(expression());
      }
      if (!is_operator(")")) expect(",");
    }
  }

  ExpressionPtr call(ExpressionPtr value) {
    ExpressionPtr made = make(Expression::Kind::kCall);
    made->parts.push_back(std::move(value));
    arguments(made.get());
    return made;
  }

  ExpressionPtr filter(ExpressionPtr value) {
    ExpressionPtr made = make(Expression::Kind::kFilter);
    advance();
    made->text = name("the name of a filter");
    if (find_filter(made->text) == nullptr) {
      throw TemplateError("the filter '" + made->text + "' is not known", made->line);
    }
    made->parts.push_back(std::move(value));
    if (is_operator("(")) arguments(made.get());
    return made;
  }

  ExpressionPtr test(ExpressionPtr value) {
    ExpressionPtr made = make(Expression::Kind::kTest);
    advance();
    const bool negated = accept("not");
    made->text = name("the name of a test");
    if (find_test(made->text) == nullptr) {
      throw TemplateError("the test '" + made->text + "' is not known", made->line);
    }
    made->parts.push_back(std::move(value));
    const Token& token = current();
    if (is_operator("(")) {
      arguments(made.get());
    } else if ((token.kind == Token::Kind::kName && token.text != "else" && token.text != "or" &&
                token.text != "and" && token.text != "is" && token.text != "if" &&
                token.text != "not" && token.text != "in") ||
               token.kind == Token::Kind::kText || token.kind == Token::Kind::kInteger ||
               token.kind == Token::Kind::kReal || is_operator("[") || is_operator("{")) {
      made->parts.push_back(postfix(primary()));
    }
    if (!negated) return made;
    ExpressionPtr inverse = make(Expression::Kind::kNot);
    inverse->line = made->line;
    inverse->parts.push_back(std::move(made));
    return inverse;
  }

  const std::vector<Token>& tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------
// Statements
// ---------------------------------------------------------------------------------------------------------------

class Parser {
 public:
  explicit Parser(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  NodePtr template_body() {
    NodePtr body = block_body({}, nullptr);
    return body;
  }

 private:
  static NodePtr make(Node::Kind kind, int line) {
    auto node = std::make_unique<Node>();
    node->kind = kind;
    node->line = line;
    return node;
  }

  // Nodes up to a block tag whose name is among `ends`, which stays current. `opener` is the tag
  // that this belongs to.
  NodePtr block_body(const std::vector<std::string>& ends, const Piece* opener) {
    if (++depth_ > kDeepest) throw TemplateError("blocks nest too deeply", pieces_[at_].line);
    NodePtr body = make(Node::Kind::kBody, at_ < pieces_.size() ? pieces_[at_].line : 0);
    while (at_ < pieces_.size()) {
      const Piece& piece = pieces_[at_];
      if (piece.kind == Piece::Kind::kText) {
        NodePtr text = make(Node::Kind::kText, piece.line);
        text->text = piece.text;
        body->children.push_back(std::move(text));
        ++at_;
      } else if (piece.kind == Piece::Kind::kOutput) {
        ExpressionParser parser(piece.tokens);
        NodePtr output = make(Node::Kind::kOutput, piece.line);
        output->expression = parser.tuple();
        parser.expect_end("{{ ... }}");
        body->children.push_back(std::move(output));
        ++at_;
      } else {
        const std::string& name = piece.tokens[0].text;
        if (std::find(ends.begin(), ends.end(), name) != ends.end()) {
          --depth_;
          return body;
        }
        statement(piece, body.get());
      }
    }
    if (!ends.empty()) {
      throw TemplateError(
          "{% " + opener->tokens[0].text + " %} never ends: expected {% " + ends.back() + " %}",
          opener->line);
    }
    --depth_;
    return body;
  }

  // The tag that ends a block; nothing may follow its name.
  void close(const std::string& name) {
    const Piece& piece = pieces_[at_];
    ExpressionParser parser(piece.tokens);
    parser.advance();
    // Jinja lets a macro's name follow {% endmacro %}.
    if (name == "endmacro" && !parser.at_end()) parser.advance();
    parser.expect_end("{% " + name + " %}");
    ++at_;
  }

  void statement(const Piece& piece, Node* body) {
    ExpressionParser parser(piece.tokens);
    if (parser.current().kind != Token::Kind::kName)
      parser.fail("expected the name of a statement");
    const std::string name = parser.name("the name of a statement");
    ++at_;
    if (name == "if") {
      body->children.push_back(if_statement(piece, &parser));
    } else if (name == "for") {
      body->children.push_back(for_statement(piece, &parser));
    } else if (name == "set") {
      body->children.push_back(set_statement(piece, &parser));
    } else if (name == "macro") {
      body->children.push_back(macro_statement(piece, &parser));
    } else if (name == "with") {
      body->children.push_back(with_statement(piece, &parser));
    } else if (name == "generation") {
      parser.expect_end("{% generation %}");
      body->children.push_back(block_body({"endgeneration"}, &piece));
      close("endgeneration");
    } else if (name == "break" || name == "continue") {
      if (loops_ == 0) throw TemplateError("{% " + name + " %} outside of a loop", piece.line);
      parser.expect_end("{% " + name + " %}");
      body->children.push_back(
          make(name == "break" ? Node::Kind::kBreak : Node::Kind::kContinue, piece.line));
    } else if (name.starts_with("end") || name == "else" || name == "elif") {
      throw TemplateError("{% " + name + " %} without its beginning", piece.line);
    } else {
      throw TemplateError("the statement {% " + name +
                              " %} is not known; known: if for set macro with raw generation break "
                              "continue",
                          piece.line);
    }
  }

  NodePtr if_statement(const Piece& piece, ExpressionParser* first) {
    NodePtr node = make(Node::Kind::kIf, piece.line);
    ExpressionPtr condition = first->tuple();
    first->expect_end("{% if %}");
    while (true) {
      NodePtr body = block_body({"elif", "else", "endif"}, &piece);
      node->branches.emplace_back(std::move(condition), std::move(body));
      const Piece& tag = pieces_[at_];
      if (tag.tokens[0].text == "elif") {
        ExpressionParser parser(tag.tokens);
        parser.advance();
        condition = parser.tuple();
        parser.expect_end("{% elif %}");
        ++at_;
        continue;
      }
      if (tag.tokens[0].text == "else") {
        close("else");
        node->branches.emplace_back(nullptr, block_body({"endif"}, &piece));
      }
      close("endif");
      return node;
    }
  }

  Target target(ExpressionParser* parser, bool attributes) {
    Target target;
    const bool parenthesised = parser->accept("(");
    target.names.push_back(parser->name("a name to set"));
    if (attributes && parser->accept(".")) {
      target.attribute = parser->name("the name of an attribute");
      return target;
    }
    while (parser->accept(",")) {
      target.unpack = true;
      if (parser->is_name("in") || parser->is_operator("=") || parser->is_operator(")")) break;
      target.names.push_back(parser->name("a name to set"));
    }
    if (parenthesised) parser->expect(")");
    return target;
  }

  NodePtr for_statement(const Piece& piece, ExpressionParser* parser) {
    NodePtr node = make(Node::Kind::kFor, piece.line);
    node->target = target(parser, false);
    parser->expect("in");
    // "if" belongs to the loop here, not to its sequence.
    ExpressionPtr sequence = parser->expression(false);
    if (parser->is_operator(",")) {
      ExpressionPtr all = parser->make(Expression::Kind::kTuple);
      all->parts.push_back(std::move(sequence));
      while (parser->accept(",")) all->parts.push_back(parser->expression(false));
      sequence = std::move(all);
    }
    node->expression = std::move(sequence);
    if (parser->accept("if")) node->condition = parser->expression();
    if (parser->is_name("recursive")) {
      throw TemplateError("{% for ... recursive %} is not known", piece.line);
    }
    parser->expect_end("{% for %}");
    ++loops_;
    node->children.push_back(block_body({"else", "endfor"}, &piece));
    --loops_;
    if (pieces_[at_].tokens[0].text == "else") {
      close("else");
      node->children.push_back(block_body({"endfor"}, &piece));
    }
    close("endfor");
    return node;
  }

  NodePtr set_statement(const Piece& piece, ExpressionParser* parser) {
    NodePtr node = make(Node::Kind::kSet, piece.line);
    node->target = target(parser, true);
    if (parser->accept("=")) {
      node->expression = parser->tuple();
      parser->expect_end("{% set %}");
      return node;
    }
    node->kind = Node::Kind::kSetBlock;
    ExpressionPtr input = parser->make(Expression::Kind::kName);
    input->text = kBlockText;
    node->expression = parser->filters(std::move(input));
    parser->expect_end("{% set %}");
    node->children.push_back(block_body({"endset"}, &piece));
    close("endset");
    return node;
  }

  NodePtr macro_statement(const Piece& piece, ExpressionParser* parser) {
    NodePtr node = make(Node::Kind::kMacro, piece.line);
    node->text = parser->name("the macro's name");
    parser->expect("(");
    while (!parser->accept(")")) {
      std::string parameter = parser->name("the name of a parameter");
      ExpressionPtr fallback;
      if (parser->accept("=")) {
        fallback = parser->expression();
      } else if (!node->parameters.empty() && node->parameters.back().second) {
        parser->fail("a parameter without a default follows one that has it");
      }
      node->parameters.emplace_back(std::move(parameter), std::move(fallback));
      if (!parser->is_operator(")")) parser->expect(",");
    }
    parser->expect_end("{% macro %}");
    const int loops = std::exchange(loops_, 0);
    node->children.push_back(block_body({"endmacro"}, &piece));
    loops_ = loops;
    close("endmacro");
    return node;
  }

  NodePtr with_statement(const Piece& piece, ExpressionParser* parser) {
    NodePtr node = make(Node::Kind::kWith, piece.line);
    while (!parser->at_end()) {
      if (!node->bindings.empty()) parser->expect(",");
      Target one;
      one.names.push_back(parser->name("a name to set"));
      parser->expect("=");
      node->bindings.emplace_back(std::move(one), parser->expression());
    }
    node->children.push_back(block_body({"endwith"}, &piece));
    close("endwith");
    return node;
  }

  std::vector<Piece> pieces_;
  size_t at_ = 0;
  int loops_ = 0;
  int depth_ = 0;
};

}  // namespace

NodePtr parse(std::string_view text, const JinjaOptions& options) {
  return Parser(Scanner(text, options).scan()).template_body();
}

}  // namespace replayeval::jinja
