// Templates in a subset of Jinja 3: what chat templates of published models and the prompts of
// tasks need.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace replayeval {

namespace jinja {
struct Callable;
struct Node;
}  // namespace jinja

/// A value of a template. Lists and maps are shared by reference and never change; a map keeps the
/// order of its keys, which are texts.
class JinjaValue {
 public:
  struct Undefined {
    std::string name;  // of what was not there
  };
  struct None {};
  using List = std::vector<JinjaValue>;
  using Map = std::vector<std::pair<std::string, JinjaValue>>;

  JinjaValue() : value_(Undefined{}) {}
  JinjaValue(None) : value_(None{}) {}
  JinjaValue(bool value) : value_(value) {}
  JinjaValue(int value) : value_(int64_t{value}) {}
  JinjaValue(int64_t value) : value_(value) {}
  JinjaValue(double value) : value_(value) {}
  JinjaValue(const char* text) : JinjaValue(std::string(text)) {}
  JinjaValue(std::string text) : value_(std::make_shared<const std::string>(std::move(text))) {}
  JinjaValue(List list) : value_(std::make_shared<const List>(std::move(list))) {}
  JinjaValue(Map map) : value_(std::make_shared<const Map>(std::move(map))) {}
  JinjaValue(std::shared_ptr<jinja::Callable> callable) : value_(std::move(callable)) {}

  static JinjaValue undefined(std::string name);
  static JinjaValue tuple(List list);

  bool is_undefined() const { return std::holds_alternative<Undefined>(value_); }
  bool is_none() const { return std::holds_alternative<None>(value_); }
  const bool* boolean() const { return std::get_if<bool>(&value_); }
  const int64_t* integer() const { return std::get_if<int64_t>(&value_); }
  const double* real() const { return std::get_if<double>(&value_); }
  const std::string* text() const;  // null: another kind; likewise below
  const List* list() const;         // tuples too
  const Map* map() const;
  jinja::Callable* callable() const;
  bool is_tuple() const { return tuple_; }
  const std::string& undefined_name() const { return std::get<Undefined>(value_).name; }

  /// The value of a map's key; null when there is none, or when this is no map.
  const JinjaValue* find(std::string_view key) const;

 private:
  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const std::string>,
               std::shared_ptr<const List>, std::shared_ptr<const Map>,
               std::shared_ptr<jinja::Callable>>
      value_;
  bool tuple_ = false;  // of a list: Python writes it with parentheses
};

/// White space around blocks, as Jinja's environment options of the same names. Transformers reads
/// chat templates with the defaults here.
struct JinjaOptions {
  bool trim_blocks = true;    // the newline behind a block or comment is dropped
  bool lstrip_blocks = true;  // blanks before a block or comment that begins a line are dropped
  bool keep_trailing_newline = false;  // otherwise one newline at the template's end is dropped
  // Values that are not there are errors, but for `is defined`, `is undefined` and the filter
  // `default`; otherwise they print as nothing, as in Jinja.
  bool strict_undefined = false;
};

/// A compiled template; immutable, usable from several threads.
///
/// Statements: if / elif / else; for with unpacking, filter, else, break, continue and loop.*; set
/// (names, unpacking, attributes of a namespace, blocks); macro; with; generation (its body); raw;
/// comments; white-space control. Expressions: literals, lists, tuples, maps, attributes,
/// subscripts, slices, calls with keywords, filters, tests, arithmetic, ~, comparisons, in, and,
/// or, not, x if c else y. Functions: range, namespace, dict, raise_exception. As transformers does
/// it, `tojson` escapes nothing for HTML. strftime_now is not defined, so that a prompt does not
/// depend on the day.
class JinjaTemplate {
 public:
  /// Throws std::invalid_argument, `name:line: message`, for text that does not parse and for
  /// statements, filters and tests that are not known.
  JinjaTemplate(std::string_view text, const std::string& name, const JinjaOptions& options = {});

  /// The text that the template makes of `variables`. Throws std::invalid_argument, `name:line:
  /// message`, where the template raises an exception, an operation does not exist for its values,
  /// with strict_undefined a value is not there, and for what would never end.
  std::string render(const JinjaValue::Map& variables) const;

  /// A name and the line that it stands on, from 1.
  struct Name {
    std::string text;
    int line = 0;
  };
  /// The names that the template neither defines anywhere itself nor asks for with `is defined` or
  /// `default`, in its order: what render() needs as variables.
  std::vector<Name> needed_names() const;

 private:
  std::shared_ptr<const jinja::Node> root_;
  std::string name_;
  bool strict_undefined_ = false;
};

}  // namespace replayeval
