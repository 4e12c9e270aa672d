// Templates: stored results of Jinja itself, and the messages for what is not known.
#include "datasets/jinja.h"

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/case_file.h"

namespace replayeval {
namespace {

using Json = nlohmann::ordered_json;

JinjaValue value_of(const Json& json) {
  if (json.is_null()) return JinjaValue::None{};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    JinjaValue::List list;
    for (const Json& element : json) list.push_back(value_of(element));
    return list;
  }
  JinjaValue::Map map;
  for (const auto& [key, element] : json.items()) map.emplace_back(key, value_of(element));
  return map;
}

std::string render(const std::string& text, const JinjaValue::Map& variables = {},
                   const JinjaOptions& options = {}) {
  return JinjaTemplate(text, "t", options).render(variables);
}

std::string error_of(const std::string& text) {
  try {
    return "rendered: " + render(text, {{"l", JinjaValue::List{1, 2}}, {"s", "text"}});
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

TEST_CASE("what Jinja makes of the same templates") {
  std::ifstream file(std::string(REPLAYEVAL_SOURCE_DIR) + "/tests/cases/jinja/cases.json");
  REQUIRE(file);
  const Json stored = Json::parse(file);
  size_t refused = 0;
  for (const Json& row : stored.at("cases")) {
    const std::string text = stored.at("templates").at(row.at("template").get<size_t>());
    JinjaOptions options;
    if (row.contains("options")) {
      options.trim_blocks = row["options"].value("trim", true);
      options.lstrip_blocks = row["options"].value("lstrip", true);
      options.keep_trailing_newline = row["options"].value("keep", false);
    }
    const JinjaValue variables =
        value_of(stored.at("variables").at(row.at("variables").get<size_t>()));
    CAPTURE(text);
    CAPTURE(row.at("variables").get<size_t>());
    if (row.at("expected").is_null()) {
      CHECK_THROWS_AS(render(text, *variables.map(), options), std::invalid_argument);
      ++refused;
      continue;
    }
    std::string got;
    try {
      got = render(text, *variables.map(), options);
    } catch (const std::invalid_argument& error) {
      got = std::string("(an error) ") + error.what();
    }
    CHECK(got == row.at("expected").get<std::string>());
  }
  CHECK(stored.at("cases").size() > 500);
  CHECK(refused > 30);
}

TEST_CASE("what is not known is named with its line") {
  CHECK(error_of("a\n{% include 'x' %}")
            .starts_with("t:2: the statement {% include %} is not known; known: if for set macro"));
  CHECK(error_of("{{ 1 }}\n\n{{ s | truncate }}") == "t:3: the filter 'truncate' is not known");
  CHECK(error_of("{{ s is escaped }}") == "t:1: the test 'escaped' is not known");
  CHECK(error_of("{{ s.format(1) }}") == "t:1: the method 'format' of a text is not known");
  CHECK(error_of("{% for x in l recursive %}{% endfor %}") ==
        "t:1: {% for ... recursive %} is not known");
  CHECK(error_of("{{ dict(*l) }}") ==
        "t:1: arguments that are unpacked with * are not known, got '*'");
  CHECK(error_of("{{ '%d' % 1 }}") == "t:1: formatting with % is not known; ~ joins texts");
  CHECK(error_of("{{ {1: 2} }}") == "t:1: the keys of a map must be texts, got a int");
  CHECK(error_of("{{ strftime_now('%Y') }}") == "t:1: 'strftime_now' is undefined");
  CHECK(error_of("{% set x = l.append(1) %}") ==
        "t:1: the method append of a list would change it");
}

TEST_CASE("errors say where") {
  CHECK(error_of("\n{{ a b }}") == "t:2: {{ ... }}: expected its end, got 'b'");
  CHECK(error_of("{% if s %}\n{% for x in l %}\n{% endif %}") ==
        "t:3: {% endif %} without its beginning");
  CHECK(error_of("x\n{% if s %}y") == "t:2: {% if %} never ends: expected {% endif %}");
  CHECK(error_of("\n{{ 'abc }}") == "t:2: the text that opens here never ends");
  CHECK(error_of("{{ s") == "t:1: {{: the tag never ends, expected }}");
  CHECK(error_of("{# s") == "t:1: the comment never ends");
  CHECK(error_of("{{ s ] }}") == "t:1: unexpected ']'");
  CHECK(error_of("{{ s | join(1, 2, 3) }}") == "t:1: expected 2 arguments, got 3");
  CHECK(error_of("{{ s | join(x=3) }}") == "t:1: unexpected argument 'x'");
  CHECK(error_of("{{ raise_exception('no ' ~ s) }}") == "t:1: the template refuses: no text");
  CHECK(error_of("\n{{ 1 + s }}") == "t:2: '+' is not defined for int and str");
  CHECK(error_of("\n{{ nothing.x }}") == "t:2: 'nothing' is undefined");
  CHECK(error_of("{% macro m() %}\n{{ 1 // 0 }}{% endmacro %}{{ m() }}") ==
        "t:2: division by zero");
  CHECK(error_of("{% break %}") == "t:1: {% break %} outside of a loop");
  CHECK(error_of("{{ 99999999999999999999 }}").starts_with("t:1: expected a number of 64 bits"));
  CHECK(error_of("{{ 9223372036854775807 + 1 }}") == "t:1: a whole number exceeds 64 bits");
  CHECK(error_of("{{ '\\ud800' }}").starts_with("t:1: the escape \\u needs 4 hexadecimal digits"));
}

TEST_CASE("templates that would not end") {
  CHECK(error_of("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}") ==
        "t:1: macros call each other too deeply");
  CHECK(error_of("{{ range(1000000) }}") == "t:1: range: more than 100000 numbers");
  CHECK(error_of("{{ 'x' * 100000000 }}") == "t:1: a repeated value exceeds 10,000,000 elements");
  CHECK(error_of("{% for a in range(99999) %}{% for b in range(99999) %}{% if a %}{% endif %}"
                 "{% endfor %}{% endfor %}") ==
        "t:1: the template takes more than 20,000,000 steps");
  const std::string deep = std::string(100'000, '(') + "1" + std::string(100'000, ')');
  CHECK(error_of("{{ " + deep + " }}").starts_with("t:1: the expression nests too deeply"));
  std::string blocks;
  for (int i = 0; i < 100'000; ++i) blocks += "{% if 1 %}";
  CHECK(error_of(blocks) == "t:1: blocks nest too deeply");
  std::string negative = "{{ ";
  for (int i = 0; i < 100'000; ++i) negative += "not ";
  CHECK(error_of(negative + "1 }}").starts_with("t:1: the expression nests too deeply"));
}

}  // namespace
}  // namespace replayeval
