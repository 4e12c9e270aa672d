// Boxed answers: stored texts, forms by hand, groups, nesting.
#include "datasets/grade_boxed.h"

#include <doctest/doctest.h>

#include "datasets/grade_check.h"
#include "tests/support/case_file.h"

namespace replayeval {
namespace {

std::string content(std::string_view text) {
  const auto box = last_boxed(text);
  return box ? box->content : "none";
}

std::string group(std::string_view text) {
  std::string out;
  for (const BoxedAnswer& box : last_boxed_group(text)) out += box.content + "|";
  return out;
}

TEST_CASE("boxed answers agree with every stored text") {
  const std::string path = test::case_path("cases/graders/boxed.jsonl");
  if (path.empty()) return;
  const GraderReport report = check_grader(path);
  CHECK(report.rows == 198);
  for (const char* column : {"expected", "hendrycks_last_boxed"}) {
    const GraderCheck* check = report.find("last_boxed", column);
    REQUIRE(check != nullptr);
    CHECK(check->cases == 198);
    CHECK(check->agree == 198);
    if (check->worst)
      MESSAGE(check->worst->id << ": expected " << check->worst->expected << ", got "
                               << check->worst->got);
  }
}

TEST_CASE("forms of a box") {
  CHECK(content("so \\boxed{5} and \\fbox{6}.") == "6");
  CHECK(content("$\\boxed 5$ is it") == "5");
  CHECK(content("\\(\\boxed 5 \\) is it") == "5");
  CHECK(content("\\boxed  {\\frac{1}{2}}") == "\\frac{1}{2}");
  CHECK(content("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}");
  CHECK(content("\\boxed{\\left\\{ x \\right.}") == "\\left\\{ x \\right.");
  CHECK(content("\\boxed{a \\\\} b}") == "a \\\\");  // a line break, then the end
  CHECK(content("\\boxed{\\boxed{7}}") == "7");
  CHECK(content("\\boxed{1} and \\boxed{2") == "none");  // cut inside the last one
  CHECK(content("\\boxedness{1}") == "none");
  CHECK(content("\\boxed") == "none");
  CHECK(content("") == "none");
  const auto box = last_boxed("ab\\boxed{xyz}c");
  REQUIRE(box.has_value());
  CHECK(box->begin == 2);
  CHECK(box->end == 13);
}

TEST_CASE("boxes that state one answer together") {
  CHECK(group("\\boxed{1}\\boxed{2}") == "1|2|");
  CHECK(group("\\boxed{1} papers and \\boxed{2} bins") == "1|2|");
  CHECK(group("\\(\\boxed{a}\\), \\(\\boxed{b}\\) or $\\boxed{c}$") == "a|b|c|");
  CHECK(group("\\boxed{4}. Check and recheck: \\boxed{5}") == "5|");
  CHECK(group("\\boxed{4}, and\n\\boxed{5}") == "5|");
  CHECK(group("\\boxed{4} sandy \\boxed{5}") == "5|");  // "and" only as a word
  CHECK(group("none") == "");
}

TEST_CASE("a hundred thousand nested braces") {
  const std::string open(100000, '{'), close(100000, '}');
  CHECK(last_boxed("\\boxed{" + open + "1" + close + "}")->content.size() == 200001);
  CHECK(!last_boxed("\\boxed{" + open + "1" + close));
}

}  // namespace
}  // namespace replayeval
