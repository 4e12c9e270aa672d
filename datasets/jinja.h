// Templates in a subset of Jinja 2.x: what chat templates of published models and the prompts of
// tasks need.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace replayeval {

struct JinjaNode;
struct JinjaObject;

/// A value of a template: undefined, none, a Boolean, an integer, a float, text, a list, a map that
/// keeps its order, or something callable. Lists and maps are shared by reference, as in Python.
class JinjaValue {
 public:
  enum class Kind { kUndefined, kNone, kBool, kInt, kFloat, kText, kList, kMap, kCallable };
  using List = std::vector<JinjaValue>;
  using Map = std::vector<std::pair<std::string, JinjaValue>>;

  JinjaValue() = default;
  JinjaValue(bool value) : kind_(Kind::kBool), integer_(value) {}
  JinjaValue(int value) : kind_(Kind::kInt), integer_(value) {}
  JinjaValue(int64_t value) : kind_(Kind::kInt), integer_(value) {}
  JinjaValue(double value) : kind_(Kind::kFloat), real_(value) {}
  JinjaValue(const char* text) : JinjaValue(std::string(text)) {}
  JinjaValue(std::string text);
  JinjaValue(List list);
  JinjaValue(Map map);
  static JinjaValue none();
  static JinjaValue callable(std::shared_ptr<JinjaObject> object);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  int64_t integer() const { return integer_; }
  double real() const { return real_; }
  const std::string& text() const { return *text_; }
  List& list() const { return *list_; }
  Map& map() const { return *map_; }
  JinjaObject* object() const { return object_.get(); }
  const JinjaValue* find(std::string_view key) const;  // of a map; null: not there

 private:
  Kind kind_ = Kind::kUndefined;
  int64_t integer_ = 0;
  double real_ = 0;
  std::shared_ptr<const std::string> text_;
  std::shared_ptr<List> list_;
  std::shared_ptr<Map> map_;
  std::shared_ptr<JinjaObject> object_;
};

/// White space around blocks, as Jinja's environment options of the same names. Transformers reads
/// chat templates with the first two and without the third.
struct JinjaOptions {
  bool trim_blocks = true;    // the newline behind a block tag is dropped
  bool lstrip_blocks = true;  // blanks before a block tag at the start of a line are dropped
  bool keep_trailing_newline = false;  // otherwise one newline at the template's end is dropped
};

/// A compiled template; immutable, usable from several threads.
///
/// Statements: if / elif / else, for (unpacking, filter `if`, else, break, continue, loop.*), set
/// (variables, unpacking, namespace attributes, blocks), macro, call-free; generation (its body);
/// comments; white-space control; raw. Expressions: literals, lists, tuples, maps, attributes,
/// subscripts, slices, calls with keywords, filters, tests, arithmetic, ~, comparisons, in,
/// and / or / not, x if c else y. Functions: range, namespace, dict, raise_exception, strftime_now.
class JinjaTemplate {
 public:
  /// Throws std::invalid_argument, `name:line: message`, for text that does not parse and for
  /// statements, filters, tests and functions that are not known.
  JinjaTemplate(std::string_view text, const std::string& name, const JinjaOptions& options = {});

  /// The text that the template makes of `variables`. Throws std::invalid_argument, `name:line:
  /// message`, where the template raises, or an operation does not exist for its values.
  std::string render(const JinjaValue::Map& variables) const;

 private:
  std::shared_ptr<const JinjaNode> root_;
  std::string name_;
};

}  // namespace replayeval
