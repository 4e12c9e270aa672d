// Evaluates templates: a walk over the syntax tree that datasets/jinja_parse.cc makes.
#include "datasets/jinja.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "datasets/jinja_syntax.h"

namespace replayeval {
namespace jinja {

bool Arguments::has(std::string_view name) const {
  return next_ < positional.size() ||
         std::any_of(named.begin(), named.end(),
                     [&](const auto& argument) { return argument.first == name; });
}

JinjaValue Arguments::take(std::string_view name, JinjaValue fallback) {
  if (next_ < positional.size()) return positional[next_++];
  const auto found = std::find_if(named.begin(), named.end(),
                                  [&](const auto& argument) { return argument.first == name; });
  if (found == named.end()) return fallback;
  JinjaValue value = std::move(found->second);
  named.erase(found);
  return value;
}

JinjaValue Arguments::need(std::string_view name) {
  if (!has(name)) throw TemplateError("the argument '" + std::string(name) + "' is missing");
  return take(name, {});
}

void Arguments::done() const {
  if (!named.empty()) throw TemplateError("unexpected argument '" + named.front().first + "'");
  if (next_ < positional.size())
    throw TemplateError("expected " + std::to_string(next_) + " arguments, got " +
                        std::to_string(positional.size()));
}

namespace {

struct Function : Callable {
  explicit Function(std::function<JinjaValue(Arguments&)> body) : body(std::move(body)) {}
  JinjaValue call(Arguments& arguments) override { return body(arguments); }
  std::function<JinjaValue(Arguments&)> body;
};

struct Namespace : Callable {
  JinjaValue call(Arguments&) override { throw TemplateError("a namespace cannot be called"); }
  std::optional<JinjaValue> attribute(std::string_view name) override {
    const auto found = values.find(name);
    if (found == values.end()) return std::nullopt;
    return found->second;
  }
  bool set_attribute(const std::string& name, JinjaValue value) override {
    values.insert_or_assign(name, std::move(value));
    return true;
  }
  std::map<std::string, JinjaValue, std::less<>> values;
};

// What `loop` is inside a loop.
struct Loop : Callable {
  JinjaValue call(Arguments&) override { throw TemplateError("recursive loops are not known"); }
  std::optional<JinjaValue> attribute(std::string_view name) override {
    const auto index = static_cast<int64_t>(at);
    const auto size = static_cast<int64_t>(all->size());
    if (name == "index") return index + 1;
    if (name == "index0") return index;
    if (name == "revindex") return size - index;
    if (name == "revindex0") return size - index - 1;
    if (name == "first") return index == 0;
    if (name == "last") return index + 1 == size;
    if (name == "length") return size;
    if (name == "depth") return depth;
    if (name == "depth0") return depth - 1;
    if (name == "previtem")
      return index == 0 ? JinjaValue::undefined("there is no previous item") : (*all)[at - 1];
    if (name == "nextitem")
      return index + 1 == size ? JinjaValue::undefined("there is no next item") : (*all)[at + 1];
    if (name == "cycle") {
      return function([this](Arguments& arguments) -> JinjaValue {
        if (arguments.positional.empty()) throw TemplateError("loop.cycle needs values");
        return arguments.positional[at % arguments.positional.size()];
      });
    }
    if (name == "changed") {
      return function([this](Arguments& arguments) -> JinjaValue {
        const bool same = seen && equal(*seen, arguments.positional);
        seen = arguments.positional;
        return !same;
      });
    }
    return std::nullopt;
  }
  const JinjaValue::List* all = nullptr;
  size_t at = 0;
  int depth = 1;
  std::optional<JinjaValue> seen;  // by `changed`
};

constexpr int kDeepestCall = 100;
constexpr int64_t kLongestRange = 100'000;
constexpr size_t kMostSteps = 20'000'000;  // expressions evaluated

// Names that a body sees: its own and those of the bodies around it.
struct Scope {
  std::map<std::string, JinjaValue, std::less<>> names;
  std::shared_ptr<Scope> parent;
};
using ScopePtr = std::shared_ptr<Scope>;

ScopePtr inside(const ScopePtr& scope) {
  auto made = std::make_shared<Scope>();
  made->parent = scope;
  return made;
}

enum class Flow { kNext, kBreak, kContinue };

// Whether the input of a filter or test may be undefined also in strict templates.
bool asks_for_definition(const Expression& e) {
  if (e.kind == Expression::Kind::kTest) return e.text == "defined" || e.text == "undefined";
  return e.kind == Expression::Kind::kFilter && (e.text == "default" || e.text == "d");
}

// How an expression was written, as far as it names something: a.b, a[0], a['b'].
std::string spelled(const Expression& e) {
  switch (e.kind) {
    case Expression::Kind::kName:
      return e.text;
    case Expression::Kind::kConstant:
      return e.value.text() != nullptr ? "'" + *e.value.text() + "'" : to_text(e.value);
    case Expression::Kind::kNegative:
      return "-" + spelled(*e.parts[0]);
    case Expression::Kind::kAttribute:
      return spelled(*e.parts[0]) + "." + e.text;
    case Expression::Kind::kItem:
      return spelled(*e.parts[0]) + "[" + spelled(*e.parts[1]) + "]";
    default:
      return "(...)";
  }
}

// Collects the names that a template uses, and those that it defines.
class NameCollector {
 public:
  void visit(const Node& node) {
    define(node.target);
    if (node.kind == Node::Kind::kFor) defined.insert("loop");
    if (node.kind == Node::Kind::kSetBlock) defined.insert(kBlockText);
    if (node.kind == Node::Kind::kMacro) defined.insert(node.text);
    if (node.expression) visit(*node.expression);
    if (node.condition) visit(*node.condition);
    for (const auto& [name, fallback] : node.parameters) {
      defined.insert(name);
      if (fallback) visit(*fallback);
    }
    for (const auto& [target, bound] : node.bindings) {
      define(target);
      visit(*bound);
    }
    for (const auto& [condition, body] : node.branches) {
      if (condition) visit(*condition);
      visit(*body);
    }
    for (const NodePtr& child : node.children) visit(*child);
  }

  std::vector<JinjaTemplate::Name> used;
  std::set<std::string, std::less<>> defined;

 private:
  void define(const Target& target) {
    if (target.attribute.empty()) defined.insert(target.names.begin(), target.names.end());
  }

  void visit(const Expression& e) {
    if (e.kind == Expression::Kind::kName) used.push_back({e.text, e.line});
    for (size_t i = 0; i < e.parts.size(); ++i) {
      const bool asked = i == 0 && asks_for_definition(e);
      if (e.parts[i] && !(asked && e.parts[i]->kind == Expression::Kind::kName)) visit(*e.parts[i]);
    }
    for (const auto& [name, argument] : e.named) visit(*argument);
  }
};

class Evaluator {
 public:
  explicit Evaluator(bool strict_undefined) : strict_undefined_(strict_undefined) {}

  Flow run(const Node& node, const ScopePtr& scope, std::string* out) {
    switch (node.kind) {
      case Node::Kind::kBody:
        for (const NodePtr& child : node.children) {
          if (const Flow flow = run(*child, scope, out); flow != Flow::kNext) return flow;
        }
        return Flow::kNext;
      case Node::Kind::kText:
        *out += node.text;
        return Flow::kNext;
      case Node::Kind::kOutput:
        at_line(node.line, [&] { *out += to_text(value(*node.expression, scope)); });
        return Flow::kNext;
      case Node::Kind::kIf:
        for (const auto& [condition, body] : node.branches) {
          if (!condition || truth(value(*condition, scope))) return run(*body, scope, out);
        }
        return Flow::kNext;
      case Node::Kind::kFor:
        return loop(node, scope, out);
      case Node::Kind::kSet:
        at_line(node.line, [&] { assign(node.target, value(*node.expression, scope), scope); });
        return Flow::kNext;
      case Node::Kind::kSetBlock: {
        std::string text;
        const ScopePtr body = inside(scope);
        run(*node.children[0], body, &text);
        body->names[kBlockText] = std::move(text);
        at_line(node.line, [&] { assign(node.target, value(*node.expression, body), scope); });
        return Flow::kNext;
      }
      case Node::Kind::kMacro:
        scope->names[node.text] = macro(node, scope);
        return Flow::kNext;
      case Node::Kind::kWith: {
        const ScopePtr body = inside(scope);
        for (const auto& [target, bound] : node.bindings)
          body->names[target.names[0]] = value(*bound, scope);
        return run(*node.children[0], body, out);
      }
      case Node::Kind::kBreak:
        return Flow::kBreak;
      case Node::Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNext;
  }

  JinjaValue value(const Expression& e, const ScopePtr& scope) {
    if (++steps_ > kMostSteps)
      throw TemplateError("the template takes more than 20,000,000 steps", e.line);
    try {
      JinjaValue result = evaluate(e, scope);
      // An `if` without `else` means nothing on purpose.
      if (strict_undefined_ && result.is_undefined() && e.kind != Expression::Kind::kConditional)
        throw TemplateError("'" + missing_name(e, result) + "' is undefined");
      return result;
    } catch (TemplateError& error) {
      if (error.line == 0) error.line = e.line;
      throw;
    }
  }

 private:
  static std::string missing_name(const Expression& e, const JinjaValue& undefined) {
    const bool named = e.kind == Expression::Kind::kName ||
                       e.kind == Expression::Kind::kAttribute || e.kind == Expression::Kind::kItem;
    return named ? spelled(e) : undefined.undefined_name();
  }

  // The input of a filter or test.
  JinjaValue input_of(const Expression& e, const ScopePtr& scope) {
    return asks_for_definition(e) ? evaluate(*e.parts[0], scope) : value(*e.parts[0], scope);
  }

  template <class Body>
  static void at_line(int line, Body body) {
    try {
      body();
    } catch (TemplateError& error) {
      if (error.line == 0) error.line = line;
      throw;
    }
  }

  static JinjaValue look_up(const std::string& name, const ScopePtr& scope) {
    for (const Scope* s = scope.get(); s != nullptr; s = s->parent.get()) {
      const auto found = s->names.find(name);
      if (found != s->names.end()) return found->second;
    }
    return JinjaValue::undefined(name);
  }

  static void assign(const Target& target, const JinjaValue& to, const ScopePtr& scope) {
    if (!target.attribute.empty()) {
      const JinjaValue object = look_up(target.names[0], scope);
      if (object.callable() == nullptr || !object.callable()->set_attribute(target.attribute, to)) {
        throw TemplateError("set: '" + target.names[0] + "' is no namespace");
      }
      return;
    }
    if (!target.unpack) {
      scope->names.insert_or_assign(target.names[0], to);
      return;
    }
    const JinjaValue::List all = elements(to);
    if (all.size() != target.names.size()) {
      throw TemplateError("expected " + std::to_string(target.names.size()) +
                          " values to unpack, got " + std::to_string(all.size()));
    }
    for (size_t i = 0; i < all.size(); ++i) scope->names.insert_or_assign(target.names[i], all[i]);
  }

  Flow loop(const Node& node, const ScopePtr& scope, std::string* out) {
    JinjaValue::List all;
    at_line(node.line, [&] { all = elements(value(*node.expression, scope)); });
    if (node.condition) {
      JinjaValue::List kept;
      for (JinjaValue& element : all) {
        const ScopePtr trial = inside(scope);
        at_line(node.line, [&] { assign(node.target, element, trial); });
        if (truth(value(*node.condition, trial))) kept.push_back(std::move(element));
      }
      all = std::move(kept);
    }
    if (all.empty()) {
      return node.children.size() > 1 ? run(*node.children[1], inside(scope), out) : Flow::kNext;
    }
    const auto state = std::make_shared<Loop>();
    state->depth = ++loops_;
    for (size_t i = 0; i < all.size(); ++i) {
      const ScopePtr body = inside(scope);
      state->all = &all;
      state->at = i;
      body->names["loop"] = std::shared_ptr<Callable>(state);
      at_line(node.line, [&] { assign(node.target, all[i], body); });
      if (run(*node.children[0], body, out) == Flow::kBreak) break;
    }
    --loops_;
    return Flow::kNext;
  }

  JinjaValue macro(const Node& node, const ScopePtr& scope) {
    // The scope holds the macro, so the macro must not hold the scope.
    return function(
        [this, &node, outer = std::weak_ptr<Scope>(scope)](Arguments& arguments) -> JinjaValue {
          if (++calls_ > kDeepestCall) throw TemplateError("macros call each other too deeply");
          ScopePtr defined = outer.lock();
          if (!defined)
            throw TemplateError("the macro " + node.text + " is called outside its scope");
          const ScopePtr body = inside(defined);
          for (const auto& [name, fallback] : node.parameters) {
            if (arguments.has(name)) {
              body->names[name] = arguments.take(name, {});
            } else {
              body->names[name] = fallback ? value(*fallback, body) : JinjaValue::undefined(name);
            }
          }
          try {
            arguments.done();
          } catch (const TemplateError& error) {
            throw TemplateError("macro " + node.text + ": " + error.what());
          }
          std::string out;
          run(*node.children[0], body, &out);
          --calls_;
          return out;
        });
  }

  JinjaValue evaluate(const Expression& e, const ScopePtr& scope) {
    using Kind = Expression::Kind;
    const auto part = [&](size_t i) { return value(*e.parts[i], scope); };
    const auto optional_part = [&](size_t i) {
      return e.parts[i] ? value(*e.parts[i], scope) : JinjaValue(JinjaValue::None{});
    };
    const auto all_parts = [&] {
      JinjaValue::List list;
      for (const ExpressionPtr& p : e.parts) list.push_back(value(*p, scope));
      return list;
    };
    switch (e.kind) {
      case Kind::kConstant:
        return e.value;
      case Kind::kName:
        return look_up(e.text, scope);
      case Kind::kList:
        return all_parts();
      case Kind::kTuple:
        return JinjaValue::tuple(all_parts());
      case Kind::kMap:
        return map(e, scope);
      case Kind::kAttribute:
        return attribute(part(0), e.text);
      case Kind::kItem:
        return item(part(0), part(1));
      case Kind::kSlice:
        return slice(part(0), optional_part(1), optional_part(2), optional_part(3));
      case Kind::kCall: {
        const JinjaValue callee = part(0);
        Arguments arguments = arguments_of(e, scope);
        return call(callee, arguments);
      }
      case Kind::kFilter: {
        const JinjaValue input = input_of(e, scope);
        Arguments arguments = arguments_of(e, scope);
        return find_filter(e.text)(input, arguments);
      }
      case Kind::kTest: {
        const JinjaValue input = input_of(e, scope);
        Arguments arguments = arguments_of(e, scope);
        return find_test(e.text)(input, arguments);
      }
      case Kind::kNot:
        return !truth(part(0));
      case Kind::kNegative:
        return binary("-", 0, part(0));
      case Kind::kPositive:
        return binary("+", 0, part(0));
      case Kind::kBinary: {
        const JinjaValue left = part(0);
        return binary(e.text, left, part(1));
      }
      case Kind::kCompare: {
        JinjaValue left = part(0);
        for (size_t i = 0; i < e.operators.size(); ++i) {
          JinjaValue right = part(i + 1);
          if (!holds(e.operators[i], left, right)) return false;
          left = std::move(right);
        }
        return true;
      }
      case Kind::kAnd: {
        JinjaValue left = part(0);
        return truth(left) ? part(1) : left;
      }
      case Kind::kOr: {
        JinjaValue left = part(0);
        return truth(left) ? left : part(1);
      }
      case Kind::kConditional:
        if (truth(part(1))) return part(0);
        return e.parts[2] ? part(2) : JinjaValue::undefined("the missing else");
    }
    return {};
  }

  static bool holds(const std::string& operation, const JinjaValue& a, const JinjaValue& b) {
    if (operation == "==") return equal(a, b);
    if (operation == "!=") return !equal(a, b);
    if (operation == "in") return contains(b, a);
    if (operation == "not in") return !contains(b, a);
    const int order = compare(a, b);
    if (operation == "<") return order < 0;
    if (operation == "<=") return order <= 0;
    if (operation == ">") return order > 0;
    return order >= 0;
  }

  JinjaValue map(const Expression& e, const ScopePtr& scope) {
    JinjaValue::Map entries;
    for (size_t i = 0; i < e.parts.size(); i += 2) {
      const JinjaValue key = value(*e.parts[i], scope);
      if (key.text() == nullptr)
        throw TemplateError("the keys of a map must be texts, got a " + type_name(key));
      const auto same = std::find_if(entries.begin(), entries.end(),
                                     [&](const auto& entry) { return entry.first == *key.text(); });
      JinjaValue element = value(*e.parts[i + 1], scope);
      if (same != entries.end()) {
        same->second = std::move(element);
      } else {
        entries.emplace_back(*key.text(), std::move(element));
      }
    }
    return entries;
  }

  Arguments arguments_of(const Expression& e, const ScopePtr& scope) {
    Arguments arguments;
    for (size_t i = 1; i < e.parts.size(); ++i)
      arguments.positional.push_back(value(*e.parts[i], scope));
    for (const auto& [name, argument] : e.named)
      arguments.named.emplace_back(name, value(*argument, scope));
    return arguments;
  }

  bool strict_undefined_;
  size_t steps_ = 0;
  int calls_ = 0;
  int loops_ = 0;
};

// What Jinja and transformers define for every template.
void define_functions(Scope* scope) {
  scope->names["range"] = function([](Arguments& arguments) -> JinjaValue {
    const int64_t first = to_integer(arguments.need("start"), "range");
    const JinjaValue second = arguments.take("stop", JinjaValue::None{});
    const int64_t step = to_integer(arguments.take("step", 1), "range");
    arguments.done();
    if (step == 0) throw TemplateError("range: the step is zero");
    const int64_t start = second.is_none() ? 0 : first;
    const int64_t stop = second.is_none() ? first : to_integer(second, "range");
    JinjaValue::List out;
    for (int64_t i = start; step > 0 ? i < stop : i > stop; i += step) {
      if (static_cast<int64_t>(out.size()) >= kLongestRange)
        throw TemplateError("range: more than " + std::to_string(kLongestRange) + " numbers");
      out.emplace_back(i);
    }
    return out;
  });
  scope->names["namespace"] = function([](Arguments& arguments) -> JinjaValue {
    const auto made = std::make_shared<Namespace>();
    for (const JinjaValue& initial : arguments.positional) {
      if (initial.map() == nullptr)
        throw TemplateError("namespace: expected a map, got a " + type_name(initial));
      for (const auto& [name, value] : *initial.map()) made->values.insert_or_assign(name, value);
    }
    for (const auto& [name, value] : arguments.named) made->values.insert_or_assign(name, value);
    return std::shared_ptr<Callable>(made);
  });
  scope->names["dict"] = function([](Arguments& arguments) -> JinjaValue {
    JinjaValue::Map entries;
    const auto put = [&](const std::string& name, const JinjaValue& value) {
      const auto same = std::find_if(entries.begin(), entries.end(),
                                     [&](const auto& entry) { return entry.first == name; });
      if (same != entries.end()) {
        same->second = value;
      } else {
        entries.emplace_back(name, value);
      }
    };
    for (const JinjaValue& initial : arguments.positional) {
      if (initial.map() == nullptr)
        throw TemplateError("dict: expected a map, got a " + type_name(initial));
      for (const auto& [name, value] : *initial.map()) put(name, value);
    }
    for (const auto& [name, value] : arguments.named) put(name, value);
    return entries;
  });
  scope->names["raise_exception"] = function([](Arguments& arguments) -> JinjaValue {
    throw TemplateError("the template refuses: " + to_text(arguments.need("message")));
  });
}

}  // namespace

std::shared_ptr<Callable> function(std::function<JinjaValue(Arguments&)> body) {
  return std::make_shared<Function>(std::move(body));
}

}  // namespace jinja

namespace {

[[noreturn]] void report(const std::string& name, const jinja::TemplateError& error) {
  throw std::invalid_argument(name + (error.line > 0 ? ":" + std::to_string(error.line) : "") +
                              ": " + error.what());
}

}  // namespace

JinjaTemplate::JinjaTemplate(std::string_view text, const std::string& name,
                             const JinjaOptions& options)
    : name_(name), strict_undefined_(options.strict_undefined) {
  try {
    root_ = jinja::parse(text, options);
  } catch (const jinja::TemplateError& error) {
    report(name_, error);
  }
}

std::string JinjaTemplate::render(const JinjaValue::Map& variables) const {
  const auto scope = std::make_shared<jinja::Scope>();
  jinja::define_functions(scope.get());
  for (const auto& [name, value] : variables) scope->names.insert_or_assign(name, value);
  std::string out;
  jinja::Evaluator evaluator(strict_undefined_);
  try {
    evaluator.run(*root_, scope, &out);
  } catch (const jinja::TemplateError& error) {
    report(name_, error);
  }
  return out;
}

std::vector<JinjaTemplate::Name> JinjaTemplate::needed_names() const {
  jinja::Scope functions;
  jinja::define_functions(&functions);
  jinja::NameCollector names;
  names.visit(*root_);
  std::erase_if(names.used, [&](const Name& name) {
    return names.defined.contains(name.text) || functions.names.contains(name.text);
  });
  return std::move(names.used);
}

}  // namespace replayeval
