// Filters, tests and methods of templates: Jinja's own, and those of Python's str and dict.
#include <unicode/locid.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>

#include "datasets/jinja_syntax.h"
#include "datasets/utf8.h"

namespace replayeval::jinja {
namespace {

using List = JinjaValue::List;
using Map = JinjaValue::Map;

// Python's str.isspace of one character.
bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

const std::string& need_text(const JinjaValue& value, const char* what) {
  if (value.text() == nullptr)
    throw TemplateError(std::string(what) + " needs a text, got a " + type_name(value));
  return *value.text();
}

std::string upper(const std::string& text) {
  std::string out;
  icu::UnicodeString::fromUTF8(text).toUpper(icu::Locale::getRoot()).toUTF8String(out);
  return out;
}

std::string lower(const std::string& text) {
  std::string out;
  icu::UnicodeString::fromUTF8(text).toLower(icu::Locale::getRoot()).toUTF8String(out);
  return out;
}

std::string capitalized(const std::string& text) {
  const std::vector<std::string> points = code_points(text);
  if (points.empty()) return text;
  std::string out;
  icu::UnicodeString::fromUTF8(points[0])
      .toTitle(nullptr, icu::Locale::getRoot())
      .toUTF8String(out);
  return out + lower(text.substr(points[0].size()));
}

// Each word in lower case but for its first letter; `starts` says where words begin.
template <class First, class Starts>
std::string titled(const std::string& text, First first, Starts starts) {
  std::string out;
  bool begin = true;
  for (const std::string& point : code_points(text)) {
    size_t at = 0;
    const char32_t code = next_code_point(point, &at);
    out += begin ? first(point) : lower(point);
    begin = starts(code);
  }
  return out;
}

std::string python_title(const std::string& text) {
  return titled(text, capitalized, [](char32_t c) { return !u_isalpha(static_cast<UChar32>(c)); });
}

// Jinja's title: words begin behind white space and one of - ( { [ <.
std::string jinja_title(const std::string& text) {
  return titled(text, upper, [](char32_t c) {
    return is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
  });
}

List split_white_space(const std::string& text, int64_t most, bool from_right) {
  std::vector<std::pair<size_t, size_t>> words;  // begin, end
  for (size_t at = 0; at < text.size();) {
    size_t behind = at;
    if (is_space(next_code_point(text, &behind))) {
      at = behind;
      continue;
    }
    const size_t begin = at;
    while (at < text.size()) {
      behind = at;
      if (is_space(next_code_point(text, &behind))) break;
      at = behind;
    }
    words.emplace_back(begin, at);
  }
  // After the most splits the rest stays as it is, with the white space at its outer end.
  if (most >= 0 && words.size() > static_cast<size_t>(most)) {
    const size_t limit = static_cast<size_t>(most) + 1;
    if (from_right) {
      words.erase(words.begin(), words.end() - static_cast<ptrdiff_t>(limit));
      words.front().first = 0;
    } else {
      words.resize(limit);
      words.back().second = text.size();
    }
  }
  List out;
  for (const auto& [begin, end] : words) out.emplace_back(text.substr(begin, end - begin));
  return out;
}

List split_at(const std::string& text, const std::string& separator, int64_t most,
              bool from_right) {
  if (separator.empty()) throw TemplateError("split: the separator is empty");
  std::vector<std::string> parts;
  if (!from_right) {
    size_t at = 0;
    while (most < 0 || static_cast<int64_t>(parts.size()) < most) {
      const size_t found = text.find(separator, at);
      if (found == std::string::npos) break;
      parts.push_back(text.substr(at, found - at));
      at = found + separator.size();
    }
    parts.push_back(text.substr(at));
  } else {
    size_t end = text.size();
    while (most < 0 || static_cast<int64_t>(parts.size()) < most) {
      if (end < separator.size()) break;
      const size_t found = text.rfind(separator, end - separator.size());
      if (found == std::string::npos) break;
      parts.push_back(text.substr(found + separator.size(), end - found - separator.size()));
      end = found;
    }
    parts.push_back(text.substr(0, end));
    std::reverse(parts.begin(), parts.end());
  }
  List out;
  for (std::string& part : parts) out.emplace_back(std::move(part));
  return out;
}

// Whether `text` begins (ends) with a text, or one of a tuple of them.
bool has_affix(const std::string& text, const JinjaValue& affix, bool end) {
  const auto one = [&](const JinjaValue& value) {
    const std::string& part = need_text(value, end ? "endswith" : "startswith");
    return end ? text.ends_with(part) : text.starts_with(part);
  };
  if (affix.list() == nullptr) return one(affix);
  return std::any_of(affix.list()->begin(), affix.list()->end(), one);
}

template <class Predicate>
bool all_points(const std::string& text, Predicate predicate) {
  bool any = false;
  for (size_t at = 0; at < text.size();) {
    if (!predicate(next_code_point(text, &at))) return false;
    any = true;
  }
  return any;
}

// Python's islower / isupper: something has case, and nothing has the other.
bool has_case(const std::string& text, bool upper_case) {
  bool any = false;
  for (size_t at = 0; at < text.size();) {
    const auto c = static_cast<UChar32>(next_code_point(text, &at));
    if (upper_case ? u_isULowercase(c) : u_isUUppercase(c)) return false;
    if (u_istitle(c)) return false;
    any = any || (upper_case ? u_isUUppercase(c) : u_isULowercase(c));
  }
  return any;
}

// Index in code points of a byte offset; -1 for npos.
int64_t point_index(const std::string& text, size_t offset) {
  if (offset == std::string::npos) return -1;
  return static_cast<int64_t>(length(JinjaValue(text.substr(0, offset))));
}

std::string join(const List& parts, const std::string& separator) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += separator;
    out += to_text(parts[i]);
  }
  return out;
}

List split_lines(const std::string& text) {
  List lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t here = at;
    const char32_t c = next_code_point(text, &at);
    if ((c < 10 || c > 13) && (c < 0x1C || c > 0x1E) && c != 0x85 && c != 0x2028 && c != 0x2029)
      continue;
    lines.emplace_back(text.substr(begin, here - begin));
    if (c == '\r' && at < text.size() && text[at] == '\n') ++at;
    begin = at;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

List pairs_of(const Map& map) {
  List pairs;
  for (const auto& [key, value] : map) pairs.push_back(JinjaValue::tuple({key, value}));
  return pairs;
}

// A dotted path ("function.name", "0") as `attribute=` of several filters takes it.
JinjaValue path(const JinjaValue& value, const JinjaValue& name) {
  if (name.text() == nullptr) return item(value, name);
  JinjaValue at = value;
  for (const JinjaValue& part : split_at(*name.text(), ".", -1, false)) {
    const std::string& key = *part.text();
    int64_t index = 0;
    const char* const end = key.data() + key.size();
    const bool number = !key.empty() && std::from_chars(key.data(), end, index).ptr == end;
    at = number ? item(at, index) : item(at, key);
  }
  return at;
}

// Order of sort, unique, min, max: without case unless asked for.
JinjaValue order_key(const JinjaValue& value, bool case_sensitive) {
  return value.text() != nullptr && !case_sensitive ? JinjaValue(lower(*value.text())) : value;
}

// ---------------------------------------------------------------------------------------------------------------
// Filters
// ---------------------------------------------------------------------------------------------------------------

JinjaValue filter_trim(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue characters = arguments.take("chars", JinjaValue::None{});
  arguments.done();
  return strip(to_text(value), true, true, characters.text());
}

JinjaValue filter_tojson(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue ascii = arguments.take("ensure_ascii", false);
  const JinjaValue indent = arguments.take("indent", JinjaValue::None{});
  const JinjaValue separators = arguments.take("separators", JinjaValue::None{});
  const JinjaValue sort = arguments.take("sort_keys", false);
  arguments.done();
  std::string between = indent.is_none() ? ", " : ",", colon = ": ";
  if (!separators.is_none()) {
    if (separators.list() == nullptr || separators.list()->size() != 2)
      throw TemplateError("tojson: separators needs two texts");
    between = need_text((*separators.list())[0], "tojson: separators");
    colon = need_text((*separators.list())[1], "tojson: separators");
  }
  const int64_t width = indent.is_none() ? -1 : to_integer(indent, "tojson: indent");
  if (width > 100) throw TemplateError("tojson: indent exceeds 100");
  return to_json(value, static_cast<int>(width), between, colon, truth(sort), truth(ascii));
}

JinjaValue filter_length(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return static_cast<int64_t>(length(value));
}

JinjaValue filter_default(const JinjaValue& value, Arguments& arguments) {
  JinjaValue fallback = arguments.take("default_value", "");
  const JinjaValue boolean = arguments.take("boolean", false);
  arguments.done();
  return value.is_undefined() || (truth(boolean) && !truth(value)) ? fallback : value;
}

JinjaValue filter_join(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue separator = arguments.take("d", "");
  const JinjaValue name = arguments.take("attribute", JinjaValue::None{});
  arguments.done();
  List parts = elements(value);
  if (!name.is_none())
    for (JinjaValue& part : parts) part = path(part, name);
  return join(parts, to_text(separator));
}

JinjaValue filter_upper(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return upper(to_text(value));
}
JinjaValue filter_lower(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return lower(to_text(value));
}
JinjaValue filter_capitalize(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return capitalized(to_text(value));
}
JinjaValue filter_title(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return jinja_title(to_text(value));
}

JinjaValue filter_replace(const JinjaValue& value, Arguments& arguments) {
  const std::string from = to_text(arguments.need("old"));
  const std::string to = to_text(arguments.need("new"));
  const JinjaValue count = arguments.take("count", JinjaValue::None{});
  arguments.done();
  return replace_all(to_text(value), from, to,
                     count.is_none() ? -1 : to_integer(count, "replace: count"));
}

JinjaValue filter_first(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  const List all = elements(value);
  return all.empty() ? JinjaValue::undefined("first element of nothing") : all.front();
}
JinjaValue filter_last(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  const List all = elements(value);
  return all.empty() ? JinjaValue::undefined("last element of nothing") : all.back();
}

JinjaValue filter_string(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return to_text(value);
}

JinjaValue filter_int(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue fallback = arguments.take("default", 0);
  const int64_t base = to_integer(arguments.take("base", 10), "int: base");
  arguments.done();
  if (const bool* flag = value.boolean()) return int64_t{*flag};
  if (value.integer() != nullptr) return value;
  double real = 0;
  if (value.real() != nullptr) {
    real = *value.real();
  } else if (value.text() != nullptr) {
    std::string text = strip(*value.text(), true, true, nullptr);
    const bool negative = text.starts_with('-');
    if (negative || text.starts_with('+')) text.erase(0, 1);
    std::erase(text, '_');
    if (base == 16 && (text.starts_with("0x") || text.starts_with("0X"))) text.erase(0, 2);
    int64_t integer = 0;
    const char* const end = text.data() + text.size();
    if (base < 2 || base > 36) throw TemplateError("int: base is outside of 2 to 36");
    auto read = std::from_chars(text.data(), end, integer, static_cast<int>(base));
    if (read.ec == std::errc() && read.ptr == end && !text.empty())
      return negative ? -integer : integer;
    read = std::from_chars(text.data(), end, real);
    if (read.ec != std::errc() || read.ptr != end || text.empty()) return fallback;
    if (negative) real = -real;
  } else {
    return fallback;
  }
  if (!std::isfinite(real) || std::fabs(real) >= 9.2e18) return fallback;
  return static_cast<int64_t>(real);
}

JinjaValue filter_float(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue fallback = arguments.take("default", 0.0);
  arguments.done();
  if (const bool* flag = value.boolean()) return static_cast<double>(*flag);
  if (const int64_t* integer = value.integer()) return static_cast<double>(*integer);
  if (value.real() != nullptr) return value;
  if (value.text() == nullptr) return fallback;
  std::string text = strip(*value.text(), true, true, nullptr);
  if (text.starts_with('+')) text.erase(0, 1);
  double real = 0;
  const char* const end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, real);
  return error == std::errc() && read == end && !text.empty() ? JinjaValue(real) : fallback;
}

JinjaValue filter_list(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return elements(value);
}

JinjaValue filter_items(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  if (value.is_undefined()) return List{};
  if (value.map() == nullptr) throw TemplateError("items needs a map, got a " + type_name(value));
  return pairs_of(*value.map());
}

JinjaValue filter_same(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return value;
}

JinjaValue filter_reverse(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  List all = elements(value);
  std::reverse(all.begin(), all.end());
  if (value.text() == nullptr) return all;
  return join(all, "");
}

JinjaValue filter_sort(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue reverse = arguments.take("reverse", false);
  const bool case_sensitive = truth(arguments.take("case_sensitive", false));
  const JinjaValue name = arguments.take("attribute", JinjaValue::None{});
  arguments.done();
  std::vector<std::pair<JinjaValue, JinjaValue>> keyed;
  for (const JinjaValue& element : elements(value)) {
    keyed.emplace_back(order_key(name.is_none() ? element : path(element, name), case_sensitive),
                       element);
  }
  const bool backward = truth(reverse);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return backward ? compare(b.first, a.first) < 0 : compare(a.first, b.first) < 0;
  });
  List out;
  for (auto& [key, element] : keyed) out.push_back(std::move(element));
  return out;
}

JinjaValue filter_unique(const JinjaValue& value, Arguments& arguments) {
  const bool case_sensitive = truth(arguments.take("case_sensitive", false));
  const JinjaValue name = arguments.take("attribute", JinjaValue::None{});
  arguments.done();
  List seen, out;
  for (const JinjaValue& element : elements(value)) {
    JinjaValue key = order_key(name.is_none() ? element : path(element, name), case_sensitive);
    if (contains(seen, key)) continue;
    seen.push_back(std::move(key));
    out.push_back(element);
  }
  return out;
}

JinjaValue extreme(const JinjaValue& value, Arguments& arguments, bool largest) {
  const bool case_sensitive = truth(arguments.take("case_sensitive", false));
  const JinjaValue name = arguments.take("attribute", JinjaValue::None{});
  arguments.done();
  JinjaValue best = JinjaValue::undefined("extreme element of nothing"), best_key;
  for (const JinjaValue& element : elements(value)) {
    JinjaValue key = order_key(name.is_none() ? element : path(element, name), case_sensitive);
    const int order = best_key.is_undefined() ? 0 : compare(key, best_key);
    if (!best_key.is_undefined() && (largest ? order <= 0 : order >= 0)) continue;
    best = element;
    best_key = std::move(key);
  }
  return best;
}
JinjaValue filter_min(const JinjaValue& value, Arguments& arguments) {
  return extreme(value, arguments, false);
}
JinjaValue filter_max(const JinjaValue& value, Arguments& arguments) {
  return extreme(value, arguments, true);
}

JinjaValue filter_sum(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue name = arguments.take("attribute", JinjaValue::None{});
  JinjaValue total = arguments.take("start", 0);
  arguments.done();
  for (const JinjaValue& element : elements(value))
    total = binary("+", total, name.is_none() ? element : path(element, name));
  return total;
}

JinjaValue filter_abs(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return compare(value, 0) < 0 ? binary("-", 0, value) : value;
}

JinjaValue filter_round(const JinjaValue& value, Arguments& arguments) {
  const int64_t digits = to_integer(arguments.take("precision", 0), "round: precision");
  const JinjaValue how = arguments.take("method", "common");
  arguments.done();
  const JinjaValue real = binary("*", value, 1.0);
  const std::string& method = need_text(how, "round: method");
  const double scale = std::pow(10.0, static_cast<double>(digits));
  if (method == "ceil") return std::ceil(*real.real() * scale) / scale;
  if (method == "floor") return std::floor(*real.real() * scale) / scale;
  if (method != "common") throw TemplateError("round: method is common, ceil or floor");
  if (digits < 0) return std::nearbyint(*real.real() * scale) / scale;
  // Correct rounding of the decimal expansion, as Python's round.
  char buffer[400];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, *real.real(), std::chars_format::fixed,
                    static_cast<int>(std::min<int64_t>(digits, 50)))
          .ptr;
  double rounded = 0;
  std::from_chars(buffer, end, rounded);
  return rounded;
}

JinjaValue filter_indent(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue width = arguments.take("width", 4);
  const bool first = truth(arguments.take("first", false));
  const bool blank = truth(arguments.take("blank", false));
  arguments.done();
  const std::string padding = width.text() != nullptr
                                  ? *width.text()
                                  : std::string(static_cast<size_t>(std::clamp<int64_t>(
                                                    to_integer(width, "indent: width"), 0, 1000)),
                                                ' ');
  std::string out;
  const List lines = split_at(to_text(value), "\n", -1, false);
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = *lines[i].text();
    if (i > 0) out += '\n';
    if (i == 0 ? first : blank || !line.empty()) out += padding;
    out += line;
  }
  return out;
}

JinjaValue filter_dictsort(const JinjaValue& value, Arguments& arguments) {
  const bool case_sensitive = truth(arguments.take("case_sensitive", false));
  const JinjaValue by = arguments.take("by", "key");
  const bool reverse = truth(arguments.take("reverse", false));
  arguments.done();
  if (value.map() == nullptr)
    throw TemplateError("dictsort needs a map, got a " + type_name(value));
  const bool values = need_text(by, "dictsort: by") == "value";
  List pairs = pairs_of(*value.map());
  std::stable_sort(pairs.begin(), pairs.end(), [&](const JinjaValue& a, const JinjaValue& b) {
    const JinjaValue x = order_key((*a.list())[values], case_sensitive);
    const JinjaValue y = order_key((*b.list())[values], case_sensitive);
    return reverse ? compare(y, x) < 0 : compare(x, y) < 0;
  });
  return pairs;
}

// map(attribute="a", default=...) or map("filter", ...).
JinjaValue filter_map(const JinjaValue& value, Arguments& arguments) {
  List out;
  const auto attribute_argument =
      std::find_if(arguments.named.begin(), arguments.named.end(),
                   [](const auto& named) { return named.first == "attribute"; });
  if (attribute_argument != arguments.named.end()) {
    const JinjaValue name = arguments.take("attribute", {});
    const JinjaValue fallback = arguments.take("default", {});
    arguments.done();
    for (const JinjaValue& element : elements(value)) {
      JinjaValue got = path(element, name);
      out.push_back(got.is_undefined() && !fallback.is_undefined() ? fallback : std::move(got));
    }
    return out;
  }
  const std::string name = need_text(arguments.need("filter"), "map");
  const Filter filter = find_filter(name);
  if (filter == nullptr) throw TemplateError("the filter '" + name + "' is not known");
  Arguments rest;
  rest.positional.assign(arguments.positional.begin() + 1, arguments.positional.end());
  rest.named = arguments.named;
  for (const JinjaValue& element : elements(value)) {
    Arguments copy = rest;
    out.push_back(filter(element, copy));
  }
  return out;
}

JinjaValue choose(const JinjaValue& value, Arguments& arguments, bool keep, bool by_attribute) {
  const JinjaValue name = by_attribute ? arguments.need("attribute") : JinjaValue();
  const JinjaValue test_name = arguments.take("test", {});
  Test test = nullptr;
  if (!test_name.is_undefined()) {
    test = find_test(need_text(test_name, "the name of a test"));
    if (test == nullptr) throw TemplateError("the test '" + *test_name.text() + "' is not known");
  }
  Arguments rest;
  const auto used = std::min<size_t>(arguments.positional.size(), by_attribute ? 2 : 1);
  rest.positional.assign(arguments.positional.begin() + static_cast<ptrdiff_t>(used),
                         arguments.positional.end());
  rest.named = arguments.named;
  List out;
  for (const JinjaValue& element : elements(value)) {
    const JinjaValue looked_at = by_attribute ? path(element, name) : element;
    Arguments copy = rest;
    if ((test == nullptr ? truth(looked_at) : test(looked_at, copy)) == keep)
      out.push_back(element);
  }
  return out;
}
JinjaValue filter_select(const JinjaValue& value, Arguments& arguments) {
  return choose(value, arguments, true, false);
}
JinjaValue filter_reject(const JinjaValue& value, Arguments& arguments) {
  return choose(value, arguments, false, false);
}
JinjaValue filter_selectattr(const JinjaValue& value, Arguments& arguments) {
  return choose(value, arguments, true, true);
}
JinjaValue filter_rejectattr(const JinjaValue& value, Arguments& arguments) {
  return choose(value, arguments, false, true);
}

JinjaValue filter_attr(const JinjaValue& value, Arguments& arguments) {
  const std::string name = need_text(arguments.need("name"), "attr");
  arguments.done();
  return attribute(value, name);
}

JinjaValue filter_escape(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  std::string out;
  for (const char c : to_text(value)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

JinjaValue filter_wordcount(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return static_cast<int64_t>(split_white_space(to_text(value), -1, false).size());
}

struct NamedFilter {
  std::string_view name;
  Filter filter;
};
constexpr NamedFilter kFilters[] = {
    {"abs", filter_abs},           {"attr", filter_attr},       {"capitalize", filter_capitalize},
    {"count", filter_length},      {"d", filter_default},       {"default", filter_default},
    {"dictsort", filter_dictsort}, {"e", filter_escape},        {"escape", filter_escape},
    {"first", filter_first},       {"float", filter_float},     {"indent", filter_indent},
    {"int", filter_int},           {"items", filter_items},     {"join", filter_join},
    {"last", filter_last},         {"length", filter_length},   {"list", filter_list},
    {"lower", filter_lower},       {"map", filter_map},         {"max", filter_max},
    {"min", filter_min},           {"reject", filter_reject},   {"rejectattr", filter_rejectattr},
    {"replace", filter_replace},   {"reverse", filter_reverse}, {"round", filter_round},
    {"safe", filter_same},         {"select", filter_select},   {"selectattr", filter_selectattr},
    {"sort", filter_sort},         {"string", filter_string},   {"sum", filter_sum},
    {"title", filter_title},       {"tojson", filter_tojson},   {"trim", filter_trim},
    {"unique", filter_unique},     {"upper", filter_upper},     {"wordcount", filter_wordcount},
};

// ---------------------------------------------------------------------------------------------------------------
// Tests
// ---------------------------------------------------------------------------------------------------------------

template <bool (*predicate)(const JinjaValue&)>
bool plain_test(const JinjaValue& value, Arguments& arguments) {
  arguments.done();
  return predicate(value);
}

template <bool (*predicate)(const JinjaValue&, const JinjaValue&)>
bool test_with(const JinjaValue& value, Arguments& arguments) {
  const JinjaValue other = arguments.need("other");
  arguments.done();
  return predicate(value, other);
}

bool is_defined(const JinjaValue& v) { return !v.is_undefined(); }
bool is_undefined(const JinjaValue& v) { return v.is_undefined(); }
bool is_none(const JinjaValue& v) { return v.is_none(); }
bool is_string(const JinjaValue& v) { return v.text() != nullptr; }
bool is_boolean(const JinjaValue& v) { return v.boolean() != nullptr; }
bool is_true(const JinjaValue& v) { return v.boolean() != nullptr && *v.boolean(); }
bool is_false(const JinjaValue& v) { return v.boolean() != nullptr && !*v.boolean(); }
bool is_integer(const JinjaValue& v) { return v.integer() != nullptr; }
bool is_float(const JinjaValue& v) { return v.real() != nullptr; }
bool is_number(const JinjaValue& v) { return is_integer(v) || is_float(v) || is_boolean(v); }
bool is_mapping(const JinjaValue& v) { return v.map() != nullptr; }
bool is_sequence(const JinjaValue& v) {
  return v.list() != nullptr || v.text() != nullptr || v.map() != nullptr || v.is_undefined();
}
bool is_callable(const JinjaValue& v) { return v.callable() != nullptr; }
bool is_odd(const JinjaValue& v) { return to_integer(v, "odd") % 2 != 0; }
bool is_even(const JinjaValue& v) { return to_integer(v, "even") % 2 == 0; }
bool is_lower(const JinjaValue& v) { return has_case(to_text(v), false); }
bool is_upper(const JinjaValue& v) { return has_case(to_text(v), true); }
bool is_filter(const JinjaValue& v) {
  return v.text() != nullptr && find_filter(*v.text()) != nullptr;
}
bool is_test(const JinjaValue& v) { return v.text() != nullptr && find_test(*v.text()) != nullptr; }

bool not_equal(const JinjaValue& a, const JinjaValue& b) { return !equal(a, b); }
bool less(const JinjaValue& a, const JinjaValue& b) { return compare(a, b) < 0; }
bool less_equal(const JinjaValue& a, const JinjaValue& b) { return compare(a, b) <= 0; }
bool greater(const JinjaValue& a, const JinjaValue& b) { return compare(a, b) > 0; }
bool greater_equal(const JinjaValue& a, const JinjaValue& b) { return compare(a, b) >= 0; }
bool is_in(const JinjaValue& element, const JinjaValue& container) {
  return contains(container, element);
}
bool same_as(const JinjaValue& a, const JinjaValue& b) {
  return type_name(a) == type_name(b) && equal(a, b);
}
bool divisible(const JinjaValue& a, const JinjaValue& b) { return equal(binary("%", a, b), 0); }

struct NamedTest {
  std::string_view name;
  Test test;
};
constexpr NamedTest kTests[] = {
    {"boolean", plain_test<is_boolean>},
    {"callable", plain_test<is_callable>},
    {"defined", plain_test<is_defined>},
    {"divisibleby", test_with<divisible>},
    {"eq", test_with<equal>},
    {"equalto", test_with<equal>},
    {"even", plain_test<is_even>},
    {"false", plain_test<is_false>},
    {"filter", plain_test<is_filter>},
    {"float", plain_test<is_float>},
    {"ge", test_with<greater_equal>},
    {"greaterthan", test_with<greater>},
    {"gt", test_with<greater>},
    {"in", test_with<is_in>},
    {"integer", plain_test<is_integer>},
    {"iterable", plain_test<is_sequence>},
    {"le", test_with<less_equal>},
    {"lessthan", test_with<less>},
    {"lower", plain_test<is_lower>},
    {"lt", test_with<less>},
    {"mapping", plain_test<is_mapping>},
    {"ne", test_with<not_equal>},
    {"none", plain_test<is_none>},
    {"number", plain_test<is_number>},
    {"odd", plain_test<is_odd>},
    {"sameas", test_with<same_as>},
    {"sequence", plain_test<is_sequence>},
    {"string", plain_test<is_string>},
    {"test", plain_test<is_test>},
    {"true", plain_test<is_true>},
    {"undefined", plain_test<is_undefined>},
    {"upper", plain_test<is_upper>},
};

// ---------------------------------------------------------------------------------------------------------------
// Methods
// ---------------------------------------------------------------------------------------------------------------

using TextMethod = JinjaValue (*)(const std::string& text, Arguments& arguments);

template <bool left, bool right>
JinjaValue method_strip(const std::string& text, Arguments& arguments) {
  const JinjaValue characters = arguments.take("chars", JinjaValue::None{});
  return strip(text, left, right, characters.text());
}

template <bool from_right>
JinjaValue method_split(const std::string& text, Arguments& arguments) {
  const JinjaValue separator = arguments.take("sep", JinjaValue::None{});
  const int64_t most = to_integer(arguments.take("maxsplit", -1), "split: maxsplit");
  if (separator.is_none()) return split_white_space(text, most, from_right);
  return split_at(text, need_text(separator, "split"), most, from_right);
}

template <bool end>
JinjaValue method_affix(const std::string& text, Arguments& arguments) {
  return has_affix(text, arguments.need("prefix"), end);
}

template <bool end>
JinjaValue method_remove_affix(const std::string& text, Arguments& arguments) {
  const std::string affix = need_text(arguments.need("prefix"), "removeprefix");
  if (end) return text.ends_with(affix) ? text.substr(0, text.size() - affix.size()) : text;
  return text.starts_with(affix) ? text.substr(affix.size()) : text;
}

JinjaValue method_replace(const std::string& text, Arguments& arguments) {
  const std::string from = need_text(arguments.need("old"), "replace");
  const std::string to = need_text(arguments.need("new"), "replace");
  return replace_all(text, from, to, to_integer(arguments.take("count", -1), "replace: count"));
}

template <std::string (*change)(const std::string&)>
JinjaValue method_change(const std::string& text, Arguments&) {
  return change(text);
}

template <bool last>
JinjaValue method_find(const std::string& text, Arguments& arguments) {
  const std::string part = need_text(arguments.need("sub"), "find");
  return point_index(text, last ? text.rfind(part) : text.find(part));
}

JinjaValue method_index(const std::string& text, Arguments& arguments) {
  const int64_t found = point_index(text, text.find(need_text(arguments.need("sub"), "index")));
  if (found < 0) throw TemplateError("index: the text does not occur");
  return found;
}

JinjaValue method_count(const std::string& text, Arguments& arguments) {
  const std::string part = need_text(arguments.need("sub"), "count");
  if (part.empty()) return static_cast<int64_t>(length(text)) + 1;
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size()))
    ++count;
  return count;
}

JinjaValue method_join(const std::string& text, Arguments& arguments) {
  const List parts = elements(arguments.need("iterable"));
  for (const JinjaValue& part : parts) need_text(part, "join");
  return join(parts, text);
}

JinjaValue method_splitlines(const std::string& text, Arguments&) { return split_lines(text); }

bool point_is_digit(char32_t c) {
  const int type = u_getIntPropertyValue(static_cast<UChar32>(c), UCHAR_NUMERIC_TYPE);
  return type == U_NT_DECIMAL || type == U_NT_DIGIT;
}
bool point_is_letter(char32_t c) {
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_L_MASK) != 0;
}
bool point_is_alnum(char32_t c) {
  return point_is_letter(c) ||
         u_getIntPropertyValue(static_cast<UChar32>(c), UCHAR_NUMERIC_TYPE) != U_NT_NONE;
}

template <bool (*predicate)(char32_t)>
JinjaValue method_all(const std::string& text, Arguments&) {
  return all_points(text, predicate);
}

template <bool upper_case>
JinjaValue method_case(const std::string& text, Arguments&) {
  return has_case(text, upper_case);
}

struct NamedTextMethod {
  std::string_view name;
  TextMethod body;
};
constexpr NamedTextMethod kTextMethods[] = {
    {"capitalize", method_change<capitalized>},
    {"count", method_count},
    {"endswith", method_affix<true>},
    {"find", method_find<false>},
    {"index", method_index},
    {"isalnum", method_all<point_is_alnum>},
    {"isalpha", method_all<point_is_letter>},
    {"isdigit", method_all<point_is_digit>},
    {"islower", method_case<false>},
    {"isspace", method_all<is_space>},
    {"isupper", method_case<true>},
    {"join", method_join},
    {"lower", method_change<lower>},
    {"lstrip", method_strip<true, false>},
    {"removeprefix", method_remove_affix<false>},
    {"removesuffix", method_remove_affix<true>},
    {"replace", method_replace},
    {"rfind", method_find<true>},
    {"rsplit", method_split<true>},
    {"rstrip", method_strip<false, true>},
    {"split", method_split<false>},
    {"splitlines", method_splitlines},
    {"startswith", method_affix<false>},
    {"strip", method_strip<true, true>},
    {"title", method_change<python_title>},
    {"upper", method_change<upper>},
};

JinjaValue map_method(const JinjaValue& value, const std::string& name) {
  if (name == "items" || name == "keys" || name == "values") {
    return function([value, name](Arguments& arguments) -> JinjaValue {
      arguments.done();
      if (name == "items") return pairs_of(*value.map());
      List out;
      for (const auto& [key, element] : *value.map())
        out.push_back(name == "keys" ? JinjaValue(key) : element);
      return out;
    });
  }
  if (name == "get") {
    return function([value](Arguments& arguments) -> JinjaValue {
      const JinjaValue key = arguments.need("key");
      JinjaValue fallback = arguments.take("default", JinjaValue::None{});
      arguments.done();
      const JinjaValue* found = key.text() == nullptr ? nullptr : value.find(*key.text());
      return found == nullptr ? fallback : *found;
    });
  }
  for (const char* changing : {"update", "pop", "popitem", "setdefault", "clear"}) {
    if (name == changing) throw TemplateError("the method " + name + " of a map would change it");
  }
  return {};
}

JinjaValue list_method(const JinjaValue& value, const std::string& name) {
  if (name == "index" || name == "count") {
    return function([value, name](Arguments& arguments) -> JinjaValue {
      const JinjaValue wanted = arguments.need("value");
      arguments.done();
      const List& list = *value.list();
      const auto same = [&](const JinjaValue& element) { return equal(element, wanted); };
      if (name == "count")
        return static_cast<int64_t>(std::count_if(list.begin(), list.end(), same));
      const auto found = std::find_if(list.begin(), list.end(), same);
      if (found == list.end()) throw TemplateError("index: the value is not in the list");
      return static_cast<int64_t>(found - list.begin());
    });
  }
  for (const char* changing : {"append", "extend", "insert", "pop", "remove", "reverse", "sort"}) {
    if (name == changing) throw TemplateError("the method " + name + " of a list would change it");
  }
  return {};
}

}  // namespace

JinjaValue method(const JinjaValue& value, const std::string& name) {
  if (value.map() != nullptr) return map_method(value, name);
  if (value.list() != nullptr) return list_method(value, name);
  if (value.text() == nullptr) return {};
  for (const NamedTextMethod& known : kTextMethods) {
    if (known.name != name) continue;
    return function([value, body = known.body](Arguments& arguments) -> JinjaValue {
      JinjaValue out = body(*value.text(), arguments);
      arguments.done();
      return out;
    });
  }
  throw TemplateError("the method '" + name + "' of a text is not known");
}

Filter find_filter(std::string_view name) {
  for (const NamedFilter& known : kFilters)
    if (known.name == name) return known.filter;
  return nullptr;
}

Test find_test(std::string_view name) {
  for (const NamedTest& known : kTests)
    if (known.name == name) return known.test;
  return nullptr;
}

std::string strip(std::string_view text, bool left, bool right, const std::string* characters) {
  const auto dropped = [&](std::string_view point) {
    if (characters != nullptr) return characters->find(point) != std::string::npos;
    size_t at = 0;
    return is_space(next_code_point(point, &at));
  };
  while (left && !text.empty()) {
    size_t length = 0;
    next_code_point(text, &length);
    if (!dropped(text.substr(0, length))) break;
    text.remove_prefix(length);
  }
  while (right && !text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!dropped(text.substr(begin))) break;
    text.remove_suffix(text.size() - begin);
  }
  return std::string(text);
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to,
                        int64_t most) {
  std::string out;
  if (from.empty()) {
    // Python puts the new text around every character.
    for (const std::string& point : code_points(text)) {
      if (most != 0) out += to;
      if (most > 0) --most;
      out += point;
    }
    if (most != 0) out += to;
    return out;
  }
  size_t at = 0;
  for (size_t found = text.find(from); found != std::string_view::npos && most != 0;
       found = text.find(from, at)) {
    out.append(text.substr(at, found - at)).append(to);
    at = found + from.size();
    if (most > 0) --most;
  }
  return out.append(text.substr(at));
}

}  // namespace replayeval::jinja
