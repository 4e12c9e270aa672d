// Values of templates with the meaning that Python gives them: truth, order, text, JSON,
// arithmetic, subscripts.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "datasets/jinja_syntax.h"
#include "datasets/utf8.h"

namespace replayeval {

using jinja::TemplateError;

JinjaValue JinjaValue::undefined(std::string name) {
  JinjaValue value;
  value.value_ = Undefined{std::move(name)};
  return value;
}

JinjaValue JinjaValue::tuple(List list) {
  JinjaValue value(std::move(list));
  value.tuple_ = true;
  return value;
}

const std::string* JinjaValue::text() const {
  const auto* held = std::get_if<std::shared_ptr<const std::string>>(&value_);
  return held == nullptr ? nullptr : held->get();
}

const JinjaValue::List* JinjaValue::list() const {
  const auto* held = std::get_if<std::shared_ptr<const List>>(&value_);
  return held == nullptr ? nullptr : held->get();
}

const JinjaValue::Map* JinjaValue::map() const {
  const auto* held = std::get_if<std::shared_ptr<const Map>>(&value_);
  return held == nullptr ? nullptr : held->get();
}

jinja::Callable* JinjaValue::callable() const {
  const auto* held = std::get_if<std::shared_ptr<jinja::Callable>>(&value_);
  return held == nullptr ? nullptr : held->get();
}

const JinjaValue* JinjaValue::find(std::string_view key) const {
  if (const Map* entries = map()) {
    for (const auto& [name, value] : *entries)
      if (name == key) return &value;
  }
  return nullptr;
}

namespace jinja {
namespace {

using List = JinjaValue::List;

// Numbers of both kinds; Booleans count as 0 and 1, as in Python.
struct Number {
  bool is_number = false;
  bool is_integer = false;
  int64_t integer = 0;
  double real = 0;
};

Number number_of(const JinjaValue& value) {
  if (const bool* flag = value.boolean()) return {true, true, *flag, static_cast<double>(*flag)};
  if (const int64_t* integer = value.integer())
    return {true, true, *integer, static_cast<double>(*integer)};
  if (const double* real = value.real()) return {true, false, 0, *real};
  return {};
}

[[noreturn]] void undefined_used(const JinjaValue& value) {
  throw TemplateError("'" + value.undefined_name() + "' is undefined");
}

// repr() of a float.
std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const double magnitude = std::fabs(value);
  const bool scientific = value != 0 && (magnitude < 1e-4 || magnitude >= 1e16);
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value,
                    scientific ? std::chars_format::scientific : std::chars_format::fixed)
          .ptr;
  std::string text(buffer, end);
  if (!scientific && text.find('.') == std::string::npos) text += ".0";
  return text;
}

void append_hex(uint32_t value, int digits, std::string* out) {
  static constexpr char kDigits[] = "0123456789abcdef";
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) *out += kDigits[value >> shift & 15];
}

// repr() of a text, with what ASCII cannot print escaped.
std::string quoted(const std::string& text) {
  const char quote =
      text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    if (c == quote || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      out += "\\x";
      append_hex(static_cast<unsigned char>(c), 2, &out);
    } else {
      out += c;
    }
  }
  return out + quote;
}

std::string represent(const JinjaValue& value);

template <class Sequence, class Write>
std::string joined(const Sequence& sequence, char open, char close, Write write) {
  std::string out(1, open);
  bool first = true;
  for (const auto& element : sequence) {
    if (!first) out += ", ";
    first = false;
    out += write(element);
  }
  return out + close;
}

// What a list of such values shows.
std::string represent(const JinjaValue& value) {
  if (const std::string* text = value.text()) return quoted(*text);
  if (value.is_undefined()) return "Undefined";
  return to_text(value);
}

void append_json_text(const std::string& text, bool ascii, std::string* out) {
  *out += '"';
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '"' || c == '\\') {
      *out += '\\';
      *out += c;
      ++at;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      static constexpr std::string_view kNamed = "\b\f\n\r\t";
      if (const size_t named = kNamed.find(c); named != std::string_view::npos) {
        *out += '\\';
        *out += "bfnrt"[named];
      } else {
        *out += "\\u";
        append_hex(static_cast<unsigned char>(c), 4, out);
      }
      ++at;
    } else if (!ascii || static_cast<unsigned char>(c) < 0x80) {
      *out += c;
      ++at;
    } else {
      const char32_t point = next_code_point(text, &at);
      *out += "\\u";
      if (point < 0x10000) {
        append_hex(point, 4, out);
      } else {
        append_hex(0xD800 + ((point - 0x10000) >> 10), 4, out);
        *out += "\\u";
        append_hex(0xDC00 + ((point - 0x10000) & 0x3FF), 4, out);
      }
    }
  }
  *out += '"';
}

struct JsonStyle {
  int indent;
  std::string_view item_separator, key_separator;
  bool sort_keys, ascii;
};

void append_json(const JinjaValue& value, const JsonStyle& style, int depth, std::string* out) {
  if (depth > 200) throw TemplateError("tojson: the value nests too deeply");
  const auto new_line = [&](int level) {
    if (style.indent < 0) return;
    *out += '\n';
    out->append(static_cast<size_t>(style.indent) * static_cast<size_t>(level), ' ');
  };
  if (const std::string* text = value.text()) {
    append_json_text(*text, style.ascii, out);
  } else if (const List* list = value.list()) {
    *out += '[';
    for (size_t i = 0; i < list->size(); ++i) {
      if (i > 0) *out += style.item_separator;
      new_line(depth + 1);
      append_json((*list)[i], style, depth + 1, out);
    }
    if (!list->empty()) new_line(depth);
    *out += ']';
  } else if (const JinjaValue::Map* map = value.map()) {
    std::vector<const std::pair<std::string, JinjaValue>*> entries;
    for (const auto& entry : *map) entries.push_back(&entry);
    if (style.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(),
                       [](const auto* a, const auto* b) { return a->first < b->first; });
    }
    *out += '{';
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) *out += style.item_separator;
      new_line(depth + 1);
      append_json_text(entries[i]->first, style.ascii, out);
      *out += style.key_separator;
      append_json(entries[i]->second, style, depth + 1, out);
    }
    if (!entries.empty()) new_line(depth);
    *out += '}';
  } else if (value.is_none()) {
    *out += "null";
  } else if (const bool* flag = value.boolean()) {
    *out += *flag ? "true" : "false";
  } else if (const double* real = value.real(); real != nullptr && !std::isfinite(*real)) {
    *out += std::isnan(*real) ? "NaN" : *real > 0 ? "Infinity" : "-Infinity";
  } else if (number_of(value).is_number) {
    *out += to_text(value);
  } else {
    throw TemplateError("tojson: a value of type " + type_name(value) + " has no JSON form");
  }
}

[[noreturn]] void overflow() { throw TemplateError("a whole number exceeds 64 bits"); }

JinjaValue repeated(const JinjaValue& value, int64_t times) {
  times = std::max<int64_t>(times, 0);
  if (length(value) * static_cast<uint64_t>(times) > 10'000'000)
    throw TemplateError("a repeated value exceeds 10,000,000 elements");
  if (const std::string* text = value.text()) {
    std::string out;
    for (int64_t i = 0; i < times; ++i) out += *text;
    return out;
  }
  List out;
  for (int64_t i = 0; i < times; ++i)
    out.insert(out.end(), value.list()->begin(), value.list()->end());
  return value.is_tuple() ? JinjaValue::tuple(std::move(out)) : JinjaValue(std::move(out));
}

JinjaValue arithmetic(const std::string& operation, const Number& a, const Number& b) {
  const bool integers = a.is_integer && b.is_integer;
  int64_t out = 0;
  if (integers && operation == "+") {
    if (__builtin_add_overflow(a.integer, b.integer, &out)) overflow();
    return out;
  }
  if (integers && operation == "-") {
    if (__builtin_sub_overflow(a.integer, b.integer, &out)) overflow();
    return out;
  }
  if (integers && operation == "*") {
    if (__builtin_mul_overflow(a.integer, b.integer, &out)) overflow();
    return out;
  }
  if (operation == "+") return a.real + b.real;
  if (operation == "-") return a.real - b.real;
  if (operation == "*") return a.real * b.real;
  if (operation == "**") {
    if (!integers || b.integer < 0) return std::pow(a.real, b.real);
    if (a.integer == 0 || a.integer == 1) return b.integer == 0 ? 1 : a.integer;
    if (a.integer == -1) return b.integer % 2 == 0 ? 1 : -1;
    out = 1;
    for (int64_t i = 0; i < b.integer; ++i)
      if (__builtin_mul_overflow(out, a.integer, &out)) overflow();
    return out;
  }
  if (b.real == 0) throw TemplateError("division by zero");
  if (operation == "/") return a.real / b.real;
  // Python rounds quotients down, and gives remainders the divisor's sign.
  if (integers) {
    if (b.integer == -1) return operation == "//" ? binary("-", 0, a.integer) : JinjaValue(0);
    const int64_t remainder = a.integer % b.integer;
    const bool adjust = remainder != 0 && (remainder < 0) != (b.integer < 0);
    if (operation == "%") return adjust ? remainder + b.integer : remainder;
    return a.integer / b.integer - adjust;
  }
  double remainder = std::fmod(a.real, b.real);
  if (remainder != 0 && (remainder < 0) != (b.real < 0)) remainder += b.real;
  return operation == "%" ? remainder : std::round((a.real - remainder) / b.real);
}

// Start, end and step of a slice over `size` elements, as Python's slice.indices.
struct Range {
  int64_t start, stop, step;
};

Range indices(int64_t size, const JinjaValue& start, const JinjaValue& stop,
              const JinjaValue& step) {
  const auto given = [](const JinjaValue& value) {
    return !value.is_none() && !value.is_undefined();
  };
  Range range{0, 0, given(step) ? to_integer(step, "the step of a slice") : 1};
  if (range.step == 0) throw TemplateError("the step of a slice is zero");
  const bool backward = range.step < 0;
  const int64_t least = backward ? -1 : 0;
  const int64_t most = backward ? size - 1 : size;
  const auto place = [&](const JinjaValue& value, int64_t fallback) {
    if (!given(value)) return fallback;
    int64_t index = to_integer(value, "an end of a slice");
    if (index < 0) index = index < -size ? least : index + size;
    return std::clamp(index, least, most);
  };
  range.start = place(start, backward ? most : least);
  range.stop = place(stop, backward ? least : most);
  return range;
}

}  // namespace

std::string type_name(const JinjaValue& value) {
  if (value.is_undefined()) return "Undefined";
  if (value.is_none()) return "NoneType";
  if (value.boolean() != nullptr) return "bool";
  if (value.integer() != nullptr) return "int";
  if (value.real() != nullptr) return "float";
  if (value.text() != nullptr) return "str";
  if (value.list() != nullptr) return value.is_tuple() ? "tuple" : "list";
  if (value.map() != nullptr) return "dict";
  return "function";
}

bool truth(const JinjaValue& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (const std::string* text = value.text()) return !text->empty();
  if (const List* list = value.list()) return !list->empty();
  if (const JinjaValue::Map* map = value.map()) return !map->empty();
  const Number number = number_of(value);
  return !number.is_number || number.real != 0;
}

bool equal(const JinjaValue& a, const JinjaValue& b) {
  const Number x = number_of(a), y = number_of(b);
  if (x.is_number && y.is_number)
    return x.is_integer && y.is_integer ? x.integer == y.integer : x.real == y.real;
  if (a.text() != nullptr && b.text() != nullptr) return *a.text() == *b.text();
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.list() != nullptr && b.list() != nullptr && a.is_tuple() == b.is_tuple())
    return std::equal(a.list()->begin(), a.list()->end(), b.list()->begin(), b.list()->end(),
                      equal);
  if (a.map() != nullptr && b.map() != nullptr) {
    if (a.map()->size() != b.map()->size()) return false;
    return std::all_of(a.map()->begin(), a.map()->end(), [&](const auto& entry) {
      const JinjaValue* other = b.find(entry.first);
      return other != nullptr && equal(entry.second, *other);
    });
  }
  return a.callable() != nullptr && a.callable() == b.callable();
}

int compare(const JinjaValue& a, const JinjaValue& b) {
  const Number x = number_of(a), y = number_of(b);
  if (x.is_number && y.is_number) {
    if (x.is_integer && y.is_integer) return x.integer < y.integer ? -1 : x.integer > y.integer;
    return x.real < y.real ? -1 : x.real > y.real;
  }
  if (a.text() != nullptr && b.text() != nullptr) return a.text()->compare(*b.text());
  if (a.list() != nullptr && b.list() != nullptr) {
    const size_t shared = std::min(a.list()->size(), b.list()->size());
    for (size_t i = 0; i < shared; ++i) {
      if (!equal((*a.list())[i], (*b.list())[i])) return compare((*a.list())[i], (*b.list())[i]);
    }
    return a.list()->size() < b.list()->size() ? -1 : a.list()->size() > b.list()->size();
  }
  for (const JinjaValue* value : {&a, &b})
    if (value->is_undefined()) undefined_used(*value);
  throw TemplateError("values of types " + type_name(a) + " and " + type_name(b) +
                      " have no order");
}

bool contains(const JinjaValue& container, const JinjaValue& element) {
  if (const std::string* text = container.text()) {
    if (element.text() == nullptr)
      throw TemplateError("'in' a text needs a text, got a " + type_name(element));
    return text->find(*element.text()) != std::string::npos;
  }
  if (const List* list = container.list())
    return std::any_of(list->begin(), list->end(),
                       [&](const JinjaValue& value) { return equal(value, element); });
  if (container.map() != nullptr)
    return element.text() != nullptr && container.find(*element.text()) != nullptr;
  if (container.is_undefined()) return false;
  throw TemplateError("'in' needs a list, text or map, got a " + type_name(container));
}

std::string to_text(const JinjaValue& value) {
  if (const std::string* text = value.text()) return *text;
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (const bool* flag = value.boolean()) return *flag ? "True" : "False";
  if (const int64_t* integer = value.integer()) return std::to_string(*integer);
  if (const double* real = value.real()) return real_text(*real);
  if (const List* list = value.list()) {
    if (!value.is_tuple()) return joined(*list, '[', ']', represent);
    if (list->size() == 1) return "(" + represent((*list)[0]) + ",)";
    return joined(*list, '(', ')', represent);
  }
  if (const JinjaValue::Map* map = value.map()) {
    return joined(*map, '{', '}', [](const auto& entry) {
      return quoted(entry.first) + ": " + represent(entry.second);
    });
  }
  throw TemplateError("a function cannot be printed");
}

std::string to_json(const JinjaValue& value, int indent, std::string_view item_separator,
                    std::string_view key_separator, bool sort_keys, bool ensure_ascii) {
  std::string out;
  append_json(value, {indent, item_separator, key_separator, sort_keys, ensure_ascii}, 0, &out);
  return out;
}

List elements(const JinjaValue& value) {
  if (const List* list = value.list()) return *list;
  List out;
  if (const std::string* text = value.text()) {
    for (std::string& point : code_points(*text)) out.emplace_back(std::move(point));
  } else if (const JinjaValue::Map* map = value.map()) {
    for (const auto& entry : *map) out.emplace_back(entry.first);
  } else if (!value.is_undefined()) {
    throw TemplateError("a value of type " + type_name(value) + " has no elements");
  }
  return out;
}

size_t length(const JinjaValue& value) {
  if (const List* list = value.list()) return list->size();
  if (const JinjaValue::Map* map = value.map()) return map->size();
  if (const std::string* text = value.text()) {
    return static_cast<size_t>(std::count_if(text->begin(), text->end(), [](char c) {
      return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    }));
  }
  if (value.is_undefined()) return 0;
  throw TemplateError("a value of type " + type_name(value) + " has no length");
}

JinjaValue binary(const std::string& operation, const JinjaValue& a, const JinjaValue& b) {
  if (operation == "~") return to_text(a) + to_text(b);
  const Number x = number_of(a), y = number_of(b);
  if (x.is_number && y.is_number) return arithmetic(operation, x, y);
  if (operation == "+") {
    if (a.text() != nullptr && b.text() != nullptr) return *a.text() + *b.text();
    if (a.list() != nullptr && b.list() != nullptr && a.is_tuple() == b.is_tuple()) {
      List out = *a.list();
      out.insert(out.end(), b.list()->begin(), b.list()->end());
      return a.is_tuple() ? JinjaValue::tuple(std::move(out)) : JinjaValue(std::move(out));
    }
  }
  if (operation == "*") {
    const auto sequence = [](const JinjaValue& v) {
      return v.text() != nullptr || v.list() != nullptr;
    };
    if (sequence(a) && y.is_integer) return repeated(a, y.integer);
    if (sequence(b) && x.is_integer) return repeated(b, x.integer);
  }
  if (operation == "%" && a.text() != nullptr)
    throw TemplateError("formatting with % is not known; ~ joins texts");
  for (const JinjaValue* value : {&a, &b})
    if (value->is_undefined()) undefined_used(*value);
  throw TemplateError("'" + operation + "' is not defined for " + type_name(a) + " and " +
                      type_name(b));
}

JinjaValue attribute(const JinjaValue& value, const std::string& name) {
  if (value.is_undefined()) undefined_used(value);
  if (JinjaValue bound = method(value, name); !bound.is_undefined()) return bound;
  if (const JinjaValue* found = value.find(name)) return *found;
  if (Callable* object = value.callable()) {
    if (std::optional<JinjaValue> found = object->attribute(name)) return *std::move(found);
  }
  return JinjaValue::undefined(name);
}

JinjaValue item(const JinjaValue& value, const JinjaValue& key) {
  if (value.is_undefined()) undefined_used(value);
  if (const std::string* name = key.text()) {
    if (const JinjaValue* found = value.find(*name)) return *found;
    return attribute(value, *name);
  }
  const Number number = number_of(key);
  if (number.is_integer && (value.list() != nullptr || value.text() != nullptr)) {
    const auto size = static_cast<int64_t>(length(value));
    const int64_t index = number.integer < 0 ? number.integer + size : number.integer;
    if (index < 0 || index >= size)
      return JinjaValue::undefined(type_name(value) + " element " + std::to_string(number.integer));
    if (value.list() != nullptr) return (*value.list())[static_cast<size_t>(index)];
    return code_points(*value.text())[static_cast<size_t>(index)];
  }
  return JinjaValue::undefined(to_text(key));
}

JinjaValue slice(const JinjaValue& value, const JinjaValue& start, const JinjaValue& stop,
                 const JinjaValue& step) {
  if (value.is_undefined()) undefined_used(value);
  if (value.list() == nullptr && value.text() == nullptr)
    throw TemplateError("a value of type " + type_name(value) + " has no slices");
  const List all = elements(value);
  const Range range = indices(static_cast<int64_t>(all.size()), start, stop, step);
  List chosen;
  for (int64_t i = range.start; range.step > 0 ? i < range.stop : i > range.stop; i += range.step)
    chosen.push_back(all[static_cast<size_t>(i)]);
  if (value.list() != nullptr)
    return value.is_tuple() ? JinjaValue::tuple(std::move(chosen)) : JinjaValue(std::move(chosen));
  std::string text;
  for (const JinjaValue& point : chosen) text += *point.text();
  return text;
}

JinjaValue call(const JinjaValue& value, Arguments& arguments) {
  if (value.is_undefined()) undefined_used(value);
  if (value.callable() == nullptr)
    throw TemplateError("a value of type " + type_name(value) + " cannot be called");
  return value.callable()->call(arguments);
}

int64_t to_integer(const JinjaValue& value, const char* what) {
  const Number number = number_of(value);
  if (!number.is_integer)
    throw TemplateError(std::string(what) + " needs a whole number, got a " + type_name(value));
  return number.integer;
}

std::vector<std::string> code_points(std::string_view text) {
  std::vector<std::string> points;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    next_code_point(text, &at);
    points.emplace_back(text.substr(begin, at - begin));
  }
  return points;
}

}  // namespace jinja
}  // namespace replayeval
