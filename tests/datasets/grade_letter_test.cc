// Letter rules: stored outputs under every published rule, one published run reproduced, corners of
// the patterns, linear time.
#include "datasets/grade_letter.h"

#include <doctest/doctest.h>
#include <zlib.h>

#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "datasets/grade_check.h"
#include "tests/support/case_file.h"

namespace replayeval {
namespace {

using Json = nlohmann::json;

// Lines of a gzip file.
std::vector<std::string> gzip_lines(const std::string& path) {
  std::string text;
  const gzFile file = gzopen(path.c_str(), "rb");
  REQUIRE(file != nullptr);
  std::vector<char> buffer(1 << 16);
  for (int got; (got = gzread(file, buffer.data(), static_cast<unsigned>(buffer.size()))) > 0;)
    text.append(buffer.data(), static_cast<size_t>(got));
  gzclose(file);
  std::vector<std::string> lines;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(text.substr(begin, end - begin));
  return lines;
}

std::string letter(std::string_view rule, std::string_view text,
                   std::vector<std::string> options = {}) {
  const LetterAnswer answer = extract_letter(rule, text, options);
  return answer ? std::string(1, answer.letter) + std::to_string(answer.stage) : "none";
}

TEST_CASE("letter rules agree with every stored output") {
  const std::string path = test::case_path("cases/graders/extract_letter.jsonl");
  if (path.empty()) return;
  const GraderReport report = check_grader(path);
  CHECK(report.rows == 299);
  CHECK(report.unknown_rows == 0);
  const std::map<std::string, size_t> cases{
      {"mmlu_pro_l1", 291},       {"mmlu_pro_l2", 293},
      {"mmlu_pro_l2 stage", 293}, {"lm_eval_custom_extract", 291},
      {"simple_evals_abcd", 295}, {"gpqa_authors_abcd", 291},
      {"nemo_answer_colon", 291}, {"last_answer", 4},
      {"boxed_letter", 1},        {"lm_eval_multi_choice", 1}};
  CHECK(report.checks.size() == cases.size());
  for (const GraderCheck& check : report.checks) {
    CAPTURE(check.rule);
    REQUIRE(cases.count(check.rule) == 1);
    CHECK(check.cases == cases.at(check.rule));
    CHECK(check.agree == check.cases);
    if (check.worst)
      MESSAGE(check.worst->id << ": expected " << check.worst->expected << ", got "
                              << check.worst->got << ": " << check.worst->excerpt);
  }
}

// The run's accuracy, its stages and its categories, with no answer counted as wrong.
TEST_CASE("a published MMLU-Pro run is reproduced") {
  const std::string path =
      test::case_path("cases/graders/mmlu_pro_full_gemini-1.5-flash-002.jsonl.gz");
  const std::string accuracies = test::case_path("cases/graders/mmlu_pro_published_accuracy.json");
  if (path.empty() || accuracies.empty()) return;
  size_t rows = 0, right = 0, right_stage1 = 0, none = 0, differs = 0;
  size_t stages[4] = {};
  std::map<std::string, std::pair<size_t, size_t>> categories;
  for (const std::string& line : gzip_lines(path)) {
    const Json row = Json::parse(line);
    const std::string text = row["model_outputs"].get<std::string>();
    const std::string gold = row["answer"].get<std::string>();
    const LetterAnswer answer = extract_letter("mmlu_pro_l2", text);
    const std::string got = answer ? std::string(1, answer.letter) : std::string();
    const std::string published =
        row["pred"].is_null() ? std::string() : row["pred"].get<std::string>();
    if (got != published && differs++ == 0)
      MESSAGE("row " << rows << ": published '" << published << "', got '" << got << "'");
    ++rows;
    ++stages[answer.stage];
    none += answer ? 0 : 1;
    right += got == gold ? 1 : 0;
    const LetterAnswer first = extract_letter("mmlu_pro_l1", text);
    right_stage1 += first && gold == std::string(1, first.letter) ? 1 : 0;
    auto& [correct, total] = categories[row["category"].get<std::string>()];
    correct += got == gold ? 1 : 0;
    ++total;
  }
  CHECK(rows == 12012);
  CHECK(differs == 0);
  CHECK(right == 7699);
  CHECK(none == 71);
  CHECK(stages[1] == 11545);
  CHECK(stages[2] == 0);
  CHECK(stages[3] == 396);
  std::ifstream in(accuracies);
  bool found = false;
  for (const Json& run : Json::parse(in)) {
    if (run["model"] != "gemini-1.5-flash-002") continue;
    found = true;
    CHECK(right_stage1 == run["l1_correct"].get<size_t>());
    CHECK(categories.size() == run["per_category_l2"].size());
    for (const auto& [name, counts] : run["per_category_l2"].items()) {
      CAPTURE(name);
      CHECK(categories[name].first == counts["correct"].get<size_t>());
      CHECK(categories[name].second == counts["n"].get<size_t>());
    }
  }
  CHECK(found);
}

// By hand from the published patterns.
TEST_CASE("corners of the letter rules") {
  CHECK(letter("mmlu_pro_l1", "the answer is Decreased") == "D1");  // no word end
  CHECK(letter("mmlu_pro_l1", "the answer is **C") == "none");
  CHECK(letter("mmlu_pro_l1", "Answer is (K). The answer is  (A). answer is B") == "B1");
  CHECK(letter("mmlu_pro_l2", "Answer: A\nanswer: B answer: C\nAnswer: D") ==
        "A2");  // the first line
  CHECK(letter("mmlu_pro_l2", "x\nanswer: B answer: C answer: z\nAnswer: D") == "C2");  // its last
  CHECK(letter("mmlu_pro_l2", "Answer:\n\n \xC2\xA0 Because") ==
        "B2");  // white space crosses lines
  CHECK(letter("mmlu_pro_l2",
               "A or \xC3\xA9"
               "B or C\xC3\xA9 or _D or E_") == "A3");
  CHECK(letter("mmlu_pro_l2",
               "A\xCC\x81 and \xC2\xB2"
               "B") == "A3");  // a combining mark is no word character, a superscript digit is one
  CHECK(letter("mmlu_pro_l2", "K or L") == "none");
  CHECK(letter("simple_evals_abcd", "Answer : E, aNSWER\t: $c$") == "c1");
  CHECK(letter("simple_evals_abcd", "Answer:\nB") == "none");
  CHECK(letter("gpqa_authors_abcd", "answer is (x) answer is (A) answer (B)") ==
        "B4");  // only the first match
  CHECK(letter("gpqa_authors_abcd", "(\xC3\xA9) (A)") == "none");
  CHECK(letter("gpqa_authors_abcd", "(\n) (A)") == "A5");
  CHECK(letter("nemo_answer_colon", "**Answer:** *b* then _Answer_ :  D") == "D1");
  CHECK(letter("nemo_answer_colon", "Answer: **B**") ==
        "none");  // three characters before the letter, one too many marks
  CHECK(letter("nemo_answer_colon", "Answer:**B**, Answer: C4") == "B1");
  CHECK(letter("nemo_skills", "\\boxed{\\text{(E)}}") == "E1");
  CHECK(letter("nemo_skills", "The final answer is **C**.") == "C2");
  CHECK(letter("nemo_skills", "\\boxed{12} Answer: b") == "B3");
  CHECK(letter("lm_eval_multi_choice", ": B", {"alpha", "beta"}) == "B3");
  CHECK(letter("lm_eval_multi_choice", "it is beta, then alpha", {"alpha", "beta"}) == "B2");
  CHECK(letter("lm_eval_gpqa_flexible", "it is BE-TA, then al.pha!", {"Alpha", "beta"}) == "A2");
  CHECK(letter("lm_eval_gpqa_flexible", "(A) or (B)", {"alpha", "beta"}) == "B1");
  CHECK(letter("lm_eval_gpqa_flexible", ": C", {"alpha", "beta"}) == "none");
  CHECK(letter("lm_eval_gpqa_strict", "The answer is (B).") == "B1");
  CHECK(letter("lm_eval_gpqa_strict", "The answer is (B) 12.") == "none");
  CHECK(letter("boxed_letter", "\\boxed{\\textbf{(C) } 12}") == "C1");
  CHECK(letter("boxed_letter", "\\boxed{Because}") == "none");
  CHECK(letter("last_answer", "Answer: A. Wait, the correct answer is **(D)**.") == "D2");
  CHECK(letter("last_answer", "the answer is A good start. Answer: \"C\"") == "C2");
  CHECK(letter("last_answer", "the answer is I think unclear") == "none");
  CHECK(letter("last_answer", "The answer is (C).", {"one", "two"}) == "none");
  CHECK(letter("last_answer", "The answer is (B). So \\boxed{C}") == "C1");
}

TEST_CASE("offsets point at the letter, rules are listed, unknown rules are refused") {
  std::set<std::string_view> names;
  const std::string text = "\xC3\xA9 It is TWO! (B)\nThe answer is (B).\nAnswer: B \\boxed{B}";
  for (const LetterRule& rule : letter_rules()) {
    names.insert(rule.name);
    const LetterAnswer answer = rule.extract(text, {});
    CAPTURE(rule.name);
    REQUIRE(bool(answer));
    CHECK(text[answer.offset] == 'B');
    CHECK(answer.stage <= rule.stages);
  }
  CHECK(names.size() == letter_rules().size());
  const std::vector<std::string> options{"one", "two"};
  CHECK(extract_letter("lm_eval_gpqa_flexible", "\xC3\xA9-It. is TWO!", options).offset == 10);
  CHECK_THROWS_WITH_AS(extract_letter("mmlu", text),
                       doctest::Contains("unknown rule 'mmlu'; known: mmlu_pro_l1"),
                       std::invalid_argument);
}

// The stated limit for 1 MB of output, in processor time; sanitizers slow the program down about
// tenfold.
TEST_CASE("letter rules take linear time on a megabyte") {
#if defined(__SANITIZE_ADDRESS__)
  constexpr double limit_ms = 1000;
#else
  constexpr double limit_ms = 50;
#endif
  const std::vector<std::string> options{"aaaaaaaaaaaaaaab", "answer is", "the sky (is) blue",
                                         ": :"};
  for (const std::string unit : {"answer is (", "Answer: ", "nswer: z ", "\\boxed{", "A1 ", "aaaa",
                                 "\xC3\xA9 ", "answer \t"}) {
    std::string text;
    while (text.size() < (1u << 20)) text += unit;
    for (const LetterRule& rule : letter_rules()) {
      double best = 1e9;
      for (int attempt = 0; attempt < 2 && best > limit_ms; ++attempt) {
        const std::clock_t start = std::clock();
        rule.extract(text, options);
        best = std::min(best, 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
      }
      CAPTURE(rule.name);
      CAPTURE(unit);
      CHECK(best < limit_ms);
    }
  }
}

}  // namespace
}  // namespace replayeval
