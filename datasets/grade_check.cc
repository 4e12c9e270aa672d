// Stored grader cases: each row names its columns, each column a rule.
#include "datasets/grade_check.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "datasets/grade_boxed.h"
#include "datasets/grade_letter.h"
#include "datasets/grade_math.h"

namespace replayeval {
namespace {

using Json = nlohmann::json;
constexpr size_t kExcerptBytes = 160;

std::string excerpt(const std::string& text) {
  if (text.size() <= kExcerptBytes) return text;
  size_t begin = text.size() - kExcerptBytes;  // answers stand at the end
  while (begin < text.size() && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) ++begin;
  return text.substr(begin);
}

std::string shown(const Json& value) {
  if (value.is_null()) return "null";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

class Checker {
 public:
  explicit Checker(GraderReport* report) : report_(report) {}

  void row(const Json& row, size_t line) {
    line_ = line;
    id_ = row.contains("id")            ? shown(row["id"])
          : row.contains("question_id") ? shown(row["question_id"])
                                        : "line " + std::to_string(line);
    if (row.contains("expect") && row.contains("output")) {
      letters(row);
    } else if (row.contains("gold") && row.contains("answer") && row.contains("equal")) {
      equality(row);
    } else if (row.contains("text") && row.contains("expected")) {
      boxes(row);
    } else if (row.contains("model_outputs") && row.contains("pred")) {
      published(row);
    } else {
      ++report_->unknown_rows;
    }
  }

 private:
  GraderCheck& check(const std::string& rule, const std::string& against) {
    for (GraderCheck& existing : report_->checks)
      if (existing.rule == rule && existing.against == against) return existing;
    report_->checks.push_back({});
    report_->checks.back().rule = rule;
    report_->checks.back().against = against;
    return report_->checks.back();
  }

  // Runs `grade`, which returns what the rule says, and books it.
  template <class Grade>
  void compare(const std::string& rule, const std::string& against, const std::string& expected,
               const std::string& text, bool equality, Grade grade) {
    GraderCheck& book = check(rule, against);
    const auto start = std::chrono::steady_clock::now();
    const std::string got = grade();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    book.slowest_seconds = std::max(book.slowest_seconds, seconds.count());
    ++book.cases;
    if (got == expected) {
      ++book.agree;
      return;
    }
    GraderDisagreement difference{id_, line_,         expected,
                                  got, excerpt(text), equality && got == "true"};
    if (equality) ++(got == "true" ? book.false_accepts : book.false_rejects);
    if (!book.worst || (difference.false_accept && !book.worst->false_accept))
      book.worst = difference;
    book.disagreements.push_back(std::move(difference));
  }

  static std::string spelled(const LetterAnswer& answer) {
    return answer ? std::string(1, answer.letter) : "null";
  }

  void letters(const Json& row) {
    const std::string text = row["output"].get<std::string>();
    std::vector<std::string> options;
    if (row.contains("choices")) options = row["choices"].get<std::vector<std::string>>();
    for (const auto& [name, value] : row["expect"].items()) {
      std::string expected = shown(value);
      if (expected == "[invalid]") expected = "null";
      if (name == "mmlu_pro_stage") {
        compare("mmlu_pro_l2 stage", name, expected, text, false,
                [&] { return std::to_string(extract_letter("mmlu_pro_l2", text).stage); });
        continue;
      }
      if (name == "upstream_score" && row.contains("gold")) {
        const std::string gold = row["gold"].get<std::string>();
        compare("last_answer", name, value.get<double>() == 1.0 ? "right" : "wrong", text, false,
                [&] {
                  return spelled(extract_letter("last_answer", text)) == gold ? "right" : "wrong";
                });
        continue;
      }
      std::string rule = name == "multi_choice_regex" ? "lm_eval_multi_choice" : name;
      const auto rules = letter_rules();
      if (std::none_of(rules.begin(), rules.end(),
                       [&](const LetterRule& known) { return known.name == rule; }))
        continue;
      if (expected.size() == 3 && expected[0] == '(') expected = expected.substr(1, 1);
      compare(rule, name, expected, text, false,
              [&] { return spelled(extract_letter(rule, text, options)); });
    }
  }

  void equality(const Json& row) {
    const std::string gold = row["gold"].get<std::string>(),
                      answer = row["answer"].get<std::string>();
    const bool truth = row.value("equal_true", row["equal"].get<bool>());
    const bool text = row.value("mode", "answer").starts_with("text");
    const std::string pair = gold + " | " + answer;
    const auto spelled_verdict = [](bool equal) { return std::string(equal ? "true" : "false"); };
    MathOptions options;
    if (row.contains("options") && row["options"].contains("precision"))
      options.decimal_places = row["options"]["precision"].get<int>();
    compare("math", text ? "texts" : "bare answers", spelled_verdict(truth), pair, true, [&] {
      if (!text) return spelled_verdict(compare_math(gold, answer, options).equal);
      return spelled_verdict(
          compare_math(final_math_answer(gold), final_math_answer(answer), options).equal);
    });
    const Json verdicts = row.value("upstream_verdicts", Json::object());
    for (const auto& [column, rule] :
         {std::pair<const char*, const char*>{"hendrycks_is_equiv", "hendrycks"},
          {"minerva_normalized_equal", "minerva"}}) {
      if (!verdicts.contains(column)) continue;
      compare(rule, column, spelled_verdict(verdicts[column].get<bool>()), pair, true,
              [&, name = rule] {
                return spelled_verdict(math_rule(name).compare(gold, answer, options).equal);
              });
    }
    for (const bool of_gold : {true, false}) {
      const std::string& side = of_gold ? gold : answer;
      const std::string suffix = of_gold ? "gold" : "answer";
      if (verdicts.contains("hendrycks_strip_" + suffix))
        compare("hendrycks normaliser", "hendrycks_strip_" + suffix,
                shown(verdicts["hendrycks_strip_" + suffix]), side, false, [&]() -> std::string {
                  try {
                    return hendrycks_normalized(side);
                  } catch (const std::runtime_error& error) {
                    return error.what();
                  }
                });
      if (verdicts.contains("minerva_norm_" + suffix))
        compare("minerva normaliser", "minerva_norm_" + suffix,
                shown(verdicts["minerva_norm_" + suffix]), side, false,
                [&] { return minerva_normalized(side); });
    }
  }

  void boxes(const Json& row) {
    const std::string text = row["text"].get<std::string>();
    for (const char* column : {"expected", "hendrycks_last_boxed"}) {
      if (!row.contains(column)) continue;
      compare("last_boxed", column, shown(row[column]), text, false, [&] {
        const auto box = last_boxed(text);
        return box ? box->content : std::string("null");
      });
    }
  }

  void published(const Json& row) {
    const std::string text = shown(row["model_outputs"]);
    compare("mmlu_pro_l2", "pred", shown(row["pred"]), text, false,
            [&] { return spelled(extract_letter("mmlu_pro_l2", text)); });
  }

  GraderReport* report_;
  std::string id_;
  size_t line_ = 0;
};

}  // namespace

const GraderCheck* GraderReport::find(const std::string& rule, const std::string& against) const {
  for (const GraderCheck& check : checks)
    if (check.rule == rule && check.against == against) return &check;
  return nullptr;
}

GraderReport check_grader(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error("check grader: cannot read " + file.string());
  GraderReport report;
  report.file = file.string();
  Checker checker(&report);
  std::string text;
  for (size_t line = 1; std::getline(in, text); ++line) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto complain = [&](const std::string& what) {
      throw std::runtime_error(file.string() + ":" + std::to_string(line) + ": " + what);
    };
    Json row;
    try {
      row = Json::parse(text);
      if (!row.is_object()) complain("expected a JSON object");
      ++report.rows;
      checker.row(row, line);
    } catch (const Json::exception& error) {
      complain(error.what());
    }
  }
  if (report.rows == 0)
    throw std::runtime_error(file.string() + ": no rows, expected JSON lines of cases");
  return report;
}

}  // namespace replayeval
