// The parts of jinja.h: syntax tree, evaluation of filters, tests and methods.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "datasets/jinja.h"

namespace replayeval::jinja {

/// What goes wrong inside a template; `line` from 1, 0: not known yet.
struct TemplateError : std::runtime_error {
  TemplateError(const std::string& message, int line = 0)
      : std::runtime_error(message), line(line) {}
  int line;
};

/// Arguments of a call, in order, with the positional ones first. Functions take() what they know
/// and done() refuses the rest.
class Arguments {
 public:
  std::vector<JinjaValue> positional;
  std::vector<std::pair<std::string, JinjaValue>> named;

  /// Whether an argument is in the next place, or has that name.
  bool has(std::string_view name) const;
  /// The argument in the next place, or of that name; `fallback` when neither is there.
  JinjaValue take(std::string_view name, JinjaValue fallback);
  /// The same, throwing TemplateError when it is missing.
  JinjaValue need(std::string_view name);
  /// Throws TemplateError when arguments are left over.
  void done() const;

 private:
  size_t next_ = 0;
};

/// Something that can be called: a macro, a function, a bound method; or a namespace, whose
/// attributes can be set.
struct Callable {
  virtual ~Callable() = default;
  virtual JinjaValue call(Arguments& arguments) = 0;
  virtual std::optional<JinjaValue> attribute(std::string_view) { return std::nullopt; }
  virtual bool set_attribute(const std::string&, JinjaValue) { return false; }
};

/// A function as a Callable.
std::shared_ptr<Callable> function(std::function<JinjaValue(Arguments&)> body);

struct Expression {
  enum class Kind {
    kConstant,
    kName,
    kList,
    kTuple,
    kMap,        // parts: key, value, key, value, ...
    kAttribute,  // parts[0].text
    kItem,       // parts[0][parts[1]]
    kSlice,      // parts[0][parts[1]:parts[2]:parts[3]], the last three may be null
    kCall,       // parts[0](parts[1], ..., named)
    kFilter,     // parts[0] | text(parts[1], ..., named)
    kTest,       // parts[0] is text(parts[1], ..., named)
    kNot,
    kNegative,
    kPositive,
    kBinary,   // text: + - * / // % ** ~
    kCompare,  // parts[0] operators[0] parts[1] operators[1] ...
    kAnd,
    kOr,
    kConditional,  // parts[0] if parts[1] else parts[2], which may be null
  };
  Kind kind = Kind::kConstant;
  int line = 0;
  std::string text;
  JinjaValue value;
  std::vector<std::unique_ptr<Expression>> parts;
  std::vector<std::pair<std::string, std::unique_ptr<Expression>>> named;
  std::vector<std::string> operators;
};
using ExpressionPtr = std::unique_ptr<Expression>;

/// What an assignment sets: names, or an attribute of a namespace.
struct Target {
  std::vector<std::string> names;  // more than one: the value is unpacked
  bool unpack = false;             // also with one name ("a,")
  std::string attribute;           // names[0].attribute
};

struct Node {
  enum class Kind {
    kBody,      // children
    kText,      // text
    kOutput,    // expression
    kIf,        // branches: condition (null: else) and body
    kFor,       // target, expression, condition (may be null), children[0] body, children[1] else
    kSet,       // target, expression
    kSetBlock,  // target, children[0]; filter applied through `expression`, whose innermost input
                // is the constant of `filter_input`
    kMacro,     // text: name; parameters; children[0]
    kWith,      // bindings; children[0]
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kBody;
  int line = 0;
  std::string text;
  ExpressionPtr expression;
  ExpressionPtr condition;
  Target target;
  std::vector<std::unique_ptr<Node>> children;
  std::vector<std::pair<ExpressionPtr, std::unique_ptr<Node>>> branches;
  std::vector<std::pair<std::string, ExpressionPtr>>
      parameters;  // with defaults, which may be null
  std::vector<std::pair<Target, ExpressionPtr>> bindings;
};
using NodePtr = std::unique_ptr<Node>;

/// Parses a template. Throws TemplateError.
NodePtr parse(std::string_view text, const JinjaOptions& options);

/// Name under which the text of a set block stands in its filters.
inline constexpr const char* kBlockText = "\x01";

// Values as Python has them. All throw TemplateError for operations that do not exist.

/// "list", "str", "NoneType", ...
std::string type_name(const JinjaValue& value);
bool truth(const JinjaValue& value);
bool equal(const JinjaValue& a, const JinjaValue& b);
/// Negative, 0 or positive for values that have an order.
int compare(const JinjaValue& a, const JinjaValue& b);
bool contains(const JinjaValue& container, const JinjaValue& element);
/// str(value): what {{ value }} prints.
std::string to_text(const JinjaValue& value);
/// json.dumps(value, ensure_ascii=False); indent < 0: on one line.
std::string to_json(const JinjaValue& value, int indent, std::string_view item_separator,
                    std::string_view key_separator, bool sort_keys, bool ensure_ascii);
/// The elements that a loop visits: of a list, the characters of a text, the keys of a map.
JinjaValue::List elements(const JinjaValue& value);
size_t length(const JinjaValue& value);
JinjaValue binary(const std::string& operation, const JinjaValue& a, const JinjaValue& b);
/// value.name: a method before a key.
JinjaValue attribute(const JinjaValue& value, const std::string& name);
/// value[key]: an element or key before a method.
JinjaValue item(const JinjaValue& value, const JinjaValue& key);
JinjaValue slice(const JinjaValue& value, const JinjaValue& start, const JinjaValue& stop,
                 const JinjaValue& step);
JinjaValue call(const JinjaValue& value, Arguments& arguments);
int64_t to_integer(const JinjaValue& value, const char* what);

/// A bound method of a text or map; undefined when there is none.
JinjaValue method(const JinjaValue& value, const std::string& name);

using Filter = JinjaValue (*)(const JinjaValue& value, Arguments& arguments);
using Test = bool (*)(const JinjaValue& value, Arguments& arguments);
/// Null for unknown names.
Filter find_filter(std::string_view name);
Test find_test(std::string_view name);

/// Python's str.strip, of white space or of the code points of `characters`.
std::string strip(std::string_view text, bool left, bool right, const std::string* characters);
std::string replace_all(std::string_view text, std::string_view from, std::string_view to,
                        int64_t most);
std::vector<std::string> code_points(std::string_view text);

}  // namespace replayeval::jinja
