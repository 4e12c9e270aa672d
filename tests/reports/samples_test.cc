// Answers as JSON lines: both layouts read, our own written and read back, and every broken line
// named.
#include "reports/samples.h"

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "reports/files.h"
#include "tests/reports/sample_answers.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;
namespace fs = std::filesystem;

namespace {

std::vector<Sample> read_text(const std::string& text) {
  TemporaryFolder place;
  std::ofstream(place / "a.jsonl", std::ios::binary) << text;
  return read_samples(place / "a.jsonl");
}

std::string refused(const std::string& text) {
  try {
    read_text(text);
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    CHECK(message.find('\n') == std::string::npos);
    return message.substr(message.find("a.jsonl"));
  }
  return {};
}

}  // namespace

TEST_CASE("plain lines are read: text and number ids, token lists, prompts, line numbers") {
  const std::vector<Sample> samples = read_text(
      "{\"id\": \"q1\", \"text\": \"x\\n\\u00e9\", \"finish_reason\": \"eos\", \"tokens\": 3}\r\n"
      "\n"
      "{\"id\": 17, \"text\": \"\", \"finish_reason\": \"max_tokens\", \"tokens\": [5, 6], "
      "\"repeat\": 2, \"prompt\": \"Why?\"}\n"
      "{\"id\": \"q1\", \"repeat\": 1, \"text\": \"y\", \"finish_reason\": \"stop\", \"tokens\": "
      "1, "
      "\"token_ids\": [9], \"prompt_sha256\": \"ab\", \"extra\": {}}");
  REQUIRE(samples.size() == 3);
  CHECK(samples[0].ids == std::vector<std::string>{"q1"});
  CHECK(samples[0].text == "x\n\xC3\xA9");
  CHECK(samples[0].finish_reason == "stop");
  CHECK(samples[0].tokens == 3);
  CHECK(samples[0].token_ids.empty());
  CHECK(samples[0].prompt_sha256.empty());
  CHECK(samples[0].line == 1);
  CHECK(samples[1].ids == std::vector<std::string>{"17"});
  CHECK(samples[1].finish_reason == "length");
  CHECK(samples[1].tokens == 2);
  CHECK(samples[1].token_ids == std::vector<int32_t>{5, 6});
  CHECK(samples[1].repeat == 2);
  CHECK(samples[1].prompt_sha256 == sha256_hex("Why?"));
  CHECK(samples[1].line == 3);
  CHECK(samples[2].token_ids == std::vector<int32_t>{9});
  CHECK(samples[2].prompt_sha256 == "ab");
}

TEST_CASE("logged samples are read: repeats in resps, one of several filters, no finish reason") {
  // The layout of EvaluationTracker.save_results_samples, as of 2026.
  const std::string line =
      "{\"doc_id\": 3, \"doc\": {\"question_id\": 70, \"question\": \"?\"}, \"target\": \"B\", "
      "\"arguments\": {\"gen_args_0\": {\"arg_0\": \"Why?\", \"arg_1\": {\"until\": [\"Q\"]}}}, "
      "\"resps\": [[\"first\", \"second\"]], \"filtered_resps\": [\"B\"], \"filter\": \"FILTER\", "
      "\"metrics\": [\"exact_match\"], \"doc_hash\": \"d\", \"prompt_hash\": \"p\", "
      "\"target_hash\": \"t\", \"exact_match\": 1.0}\n";
  std::string strict = line, flexible = line;
  strict.replace(strict.find("FILTER"), 6, "strict");
  flexible.replace(flexible.find("FILTER"), 6, "flexible");
  const std::vector<Sample> samples = read_text(strict + flexible);
  REQUIRE(samples.size() == 2);
  CHECK(samples[0].ids == std::vector<std::string>{"70"});
  CHECK(samples[0].row == 3);
  CHECK(samples[0].text == "first");
  CHECK(samples[0].repeat == 0);
  CHECK(samples[1].text == "second");
  CHECK(samples[1].repeat == 1);
  CHECK(samples[1].prompt_sha256 == "p");
  CHECK(samples[1].finish_reason.empty());
  CHECK(samples[1].tokens == -1);
  // A document without an id of its own has its row.
  const std::vector<Sample> rows =
      read_text("{\"doc_id\": 0, \"doc\": {\"problem\": \"1+1\"}, \"resps\": [\"2\"]}\n");
  CHECK(rows[0].ids.empty());
  CHECK(rows[0].row == 0);
}

TEST_CASE("a broken line is one message with file, line, what is expected and what is there") {
  const std::string good =
      "{\"id\": \"q1\", \"text\": \"x\", \"finish_reason\": \"stop\", \"tokens\": 3}\n";
  CHECK(refused(good + "{\"id\": \"q2\", \"text\": \n") ==
        "a.jsonl:2: expected a JSON object, got text that is none from byte 22 on; each line is "
        "one answer");
  CHECK(refused("[1]\n") ==
        "a.jsonl:1: expected a JSON object, got array; each line is one answer");
  CHECK(refused("{\"text\": \"x\", \"tokens\": 3}") ==
        "a.jsonl:1: expected the field 'id', got only text, tokens");
  CHECK(contains(refused("{\"id\": \"q\", \"finish_reason\": \"stop\", \"tokens\": 3}"),
                 "expected the field 'text'"));
  CHECK(contains(refused("{\"id\": \"q\", \"text\": \"x\", \"tokens\": 3}"),
                 "expected the field 'finish_reason'"));
  CHECK(contains(refused("{\"id\": \"q\", \"text\": \"x\", \"finish_reason\": \"stop\"}"),
                 "expected the field 'tokens'"));
  CHECK(contains(refused("{}"), "expected the field 'id', got only an empty object"));
  auto with = [&](const std::string& from, const std::string& to) {
    std::string line = good;
    line.replace(line.find(from), from.size(), to);
    return refused(line);
  };
  CHECK(with("\"q1\"", "[]") == "a.jsonl:1: id: expected a text or a whole number, got []");
  CHECK(with("\"x\"", "7") == "a.jsonl:1: text: expected a text, got 7");
  CHECK(with("\"stop\"", "\"abort\"") ==
        "a.jsonl:1: finish_reason: expected stop or length, got \"abort\"");
  CHECK(with("3", "-3") == "a.jsonl:1: tokens: expected a whole number from 0, got -3");
  CHECK(with("3", "\"3\"") == "a.jsonl:1: tokens: expected a whole number from 0, got \"3\"");
  CHECK(with("3", "[1, 2.5]") == "a.jsonl:1: tokens: expected a list of token ids, got [1,2.5]");
  CHECK(contains(with("3", "3, \"token_ids\": [1]"), "expected 3 ids as `tokens` says, got 1"));
  CHECK(refused("") == "a.jsonl: expected one JSON object a line, got a file without an answer");
  CHECK(contains(refused("\n \n"), "got a file without an answer"));
  CHECK(contains(refused("{\"doc_id\": 1, \"resps\": [[[-1.5, false]]]}"),
                 "resps: expected generated texts (log-likelihoods cannot be graded)"));
  CHECK(contains(refused("{\"doc_id\": 1, \"resps\": []}"),
                 "resps: expected a list with a list of generated texts, got []"));
  CHECK(contains(refused("{\"resps\": [[\"x\"]]}"), "expected the field 'doc_id'"));
  std::string message;
  try {
    read_samples("nowhere.jsonl");
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  CHECK(message == "nowhere.jsonl: no such file");
}

TEST_CASE("samples written in lm-evaluation-harness's layout are read back as the same answers") {
  TemporaryFolder place;
  const RunPlan plan = sample_score_plan({"fp32", "fp16+sr/nvfp4@L=1"}, 6, 2);
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  put_answers(folder);
  Report report = folder.report();
  report.states[0].answers[0].text = "a \"quote\", a\nline and a broken byte: \xFF.";
  report.states[0].answers[1].finish_reason.clear();
  report.states[0].answers[1].token_ids.clear();
  report.states[0].answers[1].tokens = -1;
  const auto files =
      write_samples(report, {{plan.items[0].prompt_sha256, "the prompt"}}, place.path());
  REQUIRE(files.size() == 4);
  CHECK(files[0].first.filename() == "samples_math_fp32.jsonl");
  CHECK(files[1].first.filename() == "samples_math_fp16+sr-nvfp4-L=1.jsonl");
  CHECK(files[2].first.filename() == "samples_quiz_fp32.jsonl");
  CHECK(files[0].second == 6);

  std::istringstream lines(as_text(*read_file(files[0].first)));
  std::string line;
  std::getline(lines, line);
  const nlohmann::json json = nlohmann::json::parse(line);
  for (const char* key :
       {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics",
        "doc_hash", "prompt_hash", "target_hash", "exact_match"})
    CHECK(json.contains(key));
  CHECK(json["arguments"]["gen_args_0"]["arg_0"] == "the prompt");
  CHECK(json["resps"][0][0] == "a \"quote\", a\nline and a broken byte: \xEF\xBF\xBD.");
  CHECK(json["doc"]["id"] == "m0");
  CHECK(json["prompt_hash"] == plan.items[0].prompt_sha256);

  for (const auto& [file, count] : files) {
    const std::vector<Sample> samples = read_samples(file);
    REQUIRE(static_cast<int64_t>(samples.size()) == count);
    const bool quiz = contains(file.string(), "quiz");
    const StateReport& state = report.states[contains(file.string(), "nvfp4") ? 1 : 0];
    size_t next = 0;
    for (const Answer& answer : state.answers) {
      const ItemInfo& item = report.items[static_cast<size_t>(answer.item)];
      if ((item.task == "quiz") != quiz) continue;
      const Sample& sample = samples[next++];
      CHECK(sample.ids == std::vector<std::string>{item.id});
      CHECK(sample.repeat == answer.repeat);
      if (answer.text.find('\xFF') == std::string::npos) CHECK(sample.text == answer.text);
      CHECK(sample.finish_reason == answer.finish_reason);
      CHECK(sample.tokens == answer.tokens);
      CHECK(sample.token_ids == answer.token_ids);
      CHECK(sample.prompt_sha256 == item.prompt_sha256);
    }
    CHECK(next == samples.size());
  }
}
