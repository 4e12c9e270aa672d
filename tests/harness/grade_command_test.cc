// Answers of other programs through import, show, compare and gate, from files; stored answers
// graded again.
#include "harness/grade_command.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/hash.h"
#include "harness/report_command.h"
#include "reports/compare.h"
#include "reports/files.h"
#include "reports/html.h"
#include "reports/schema.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;
namespace fs = std::filesystem;

namespace {

const fs::path kRoot = REPLAYEVAL_SOURCE_DIR;
const fs::path kAnswers = kRoot / "eval_configs/ci/answers";

GradeOptions import_of(std::vector<std::pair<fs::path, std::string>> files, const fs::path& out) {
  GradeOptions options;
  for (const auto& [file, state] : files) {
    options.imports.push_back(file.string());
    options.states.push_back(state);
  }
  options.tasks = {(kRoot / "eval_configs/tasks/mini-math.yaml").string()};
  options.data = (kRoot / "datasets/mini_tasks/math").string();
  options.out = out.string();
  return options;
}

/// The message of an invalid_argument ("2: ...") or runtime_error ("1: ...").
template <class Call>
std::string refused(Call call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return std::string("2: ") + error.what();
  } catch (const std::runtime_error& error) {
    return std::string("1: ") + error.what();
  }
  return {};
}

std::vector<std::string> lines_of(const fs::path& file) {
  std::istringstream in(as_text(*read_file(file)));
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

void write_lines(const fs::path& file, const std::vector<std::string>& lines) {
  std::ofstream out(file, std::ios::binary);
  for (const std::string& line : lines) out << line << "\n";
}

}  // namespace

TEST_CASE("the CI example: two imported files, in both layouts, gated with exit codes 0 and 3") {
  const TemporaryFolder place;
  const std::string text =
      grade_answers(import_of({{kAnswers / "served.jsonl", "engine"}}, place / "served.h5"));
  CHECK(contains(text, "served.jsonl: 60 answers to 60 of the 100 items of task mini-math\n"));
  CHECK(contains(text, "90.00 [79.85, 95.34]"));
  grade_answers(import_of({{kAnswers / "proposed.jsonl", "engine"}}, place / "proposed.h5"));
  grade_answers(import_of({{kAnswers / "worse.jsonl", "engine"}}, place / "worse.h5"));
  const Gate gate = read_gate(kRoot / "eval_configs/ci/answers-gate.yaml");
  const Report served = read_run((place / "served.h5").string());
  auto verdict = [&](const std::string& file) {
    return compare(served, read_run((place / file).string()), {}, &gate);
  };
  CHECK(verdict("proposed.h5").exit_code() == 0);
  CHECK(verdict("worse.h5").exit_code() == 3);
  // The second file is in the layout of logged samples: no finish reason and no token count.
  const Report proposed = read_run((place / "proposed.h5").string());
  CHECK(proposed.states[0].answers[0].tokens == -1);
  CHECK(proposed.states[0].answers[0].finish_reason.empty());
  CHECK(proposed.items[0].prompt_sha256 == served.items[0].prompt_sha256);
  CHECK(served.items[0].prompt_sha256.size() == 64);
  CHECK(served.run.tasks[0].name == "mini-math");
  CHECK(served.run.tasks[0].definition.size() > 100);
  CHECK_FALSE(served.run.finished.empty());
  CHECK(served.items[0].level == 5);
  // The page of imported answers.
  const std::string page = report_html(served, kl_statistics(served));
  CHECK(contains(page, "mini-math"));
}

TEST_CASE("several files become paired states of one report") {
  const TemporaryFolder place;
  GradeOptions options = import_of(
      {{kAnswers / "worse.jsonl", "worse"}, {kAnswers / "served.jsonl", "served"}}, place / "r.h5");
  options.baseline = "served";
  options.label = "some-model";
  grade_answers(options);
  ShowOptions show;
  show.runs = {(place / "r.h5").string()};
  show.flips = true;
  const std::string text = show_runs(show);
  CHECK(contains(text, "some-model"));
  CHECK(contains(text, "-26.67 ["));
  CHECK(contains(text, "Q4: "));
  CHECK(contains(text, "worse  mini-math/29"));
  CHECK(contains(text, "(cut off)"));
  show.csv = true;
  CHECK(contains(show_runs(show), "worse,mini-math,29,0,89,90,stop,,,,,,"));
  show.flips = false;
  CHECK(contains(show_runs(show), "mini-math,worse,0,0,all,,60,60,38,"));
  show.csv = false;
  show.json = true;
  CHECK(nlohmann::json::parse(show_runs(show))["rows"][0]["correct"] == 38);
}

TEST_CASE("a request or a file that is wrong is one line: place, expected, got, hint") {
  const TemporaryFolder place;
  const std::vector<std::string> good = lines_of(kAnswers / "served.jsonl");
  const fs::path file = place / "a.jsonl", out = place / "r.h5";
  auto import = [&](const std::vector<std::string>& lines) {
    write_lines(file, lines);
    const std::string message = refused([&] { grade_answers(import_of({{file, "engine"}}, out)); });
    CHECK_FALSE(fs::exists(out));
    CHECK(message.find('\n') == std::string::npos);
    return message;
  };
  auto changed = [&](size_t line, const std::string& from, const std::string& to) {
    std::vector<std::string> lines = good;
    const size_t at = lines[line].find(from);
    REQUIRE(at != std::string::npos);
    lines[line].replace(at, from.size(), to);
    return import(lines);
  };
  CHECK(contains(changed(4, "\"id\"", "\"id"), "a.jsonl:5: expected a JSON object, got text that"));
  CHECK(contains(changed(4, "\"text\"", "\"txt\""),
                 "a.jsonl:5: expected the field 'text', got only id, prompt_sha256, txt"));
  std::string message = changed(4, "\"24\"", "\"m24\"");
  CHECK(message.starts_with("2: grade: "));
  CHECK(contains(message,
                 "a.jsonl:5: id 'm24': expected ids of the 100 items of task mini-math ('4', '9', "
                 "'14', ...), got others; is this the right --task and --data?"));
  std::vector<std::string> twice = good;
  twice.push_back(good[7]);
  CHECK(contains(import(twice),
                 "a.jsonl:61: expected one answer to each item and repeat, got id '39', repeat 0 "
                 "again, after line 8"));
  CHECK(contains(
      import({}),
      "1: " + file.string() + ": expected one JSON object a line, got a file without an answer"));
  // Prompts of another task version: refused with their count, unless accepted.
  std::vector<std::string> other = good;
  for (size_t i : {3, 8, 9}) {
    const size_t at = other[i].find("\"prompt_sha256\": \"") + 18;
    other[i].replace(at, 4, "0000");
  }
  message = import(other);
  CHECK(contains(message, "a.jsonl:4: id '19': expected a prompt with SHA-256 "));
  CHECK(contains(message,
                 "; 3 of 60 answers are to other prompts than those of task mini-math; ask with "
                 "the task's prompts, or accept it with --allow prompts"));
  GradeOptions options = import_of({{file, "engine"}}, out);
  options.allow_prompts = true;
  CHECK(contains(grade_answers(options), ", 3 to other prompts\n"));
  // They do not pass for the same prompts later.
  grade_answers(import_of({{kAnswers / "served.jsonl", "engine"}}, place / "served.h5"));
  CHECK(contains(refused([&] {
                   compare(read_run((place / "served.h5").string()), read_run(out.string()), {},
                           nullptr);
                 }),
                 "prompts differs: "));
  fs::remove(out);

  auto request = [&](auto change) {
    GradeOptions wrong = import_of({{kAnswers / "served.jsonl", "engine"}}, out);
    change(wrong);
    return refused([&] { grade_answers(wrong); });
  };
  CHECK(request([](GradeOptions& o) { o.states.clear(); }) ==
        "2: grade: --import: expected one --state for each of 1 files, got 0; give --import FILE "
        "--state NAME in pairs");
  CHECK(contains(request([](GradeOptions& o) { o.tasks.clear(); }), "expected one --task, got 0"));
  CHECK(contains(request([](GradeOptions& o) { o.out.clear(); }), "expected -o"));
  CHECK(contains(request([](GradeOptions& o) { o.baseline = "x"; }),
                 "--baseline: expected one of the states engine, got 'x'"));
  CHECK(contains(request([](GradeOptions& o) {
                   o.imports.push_back(o.imports[0]);
                   o.states.push_back("engine");
                 }),
                 "expected a name of its own for each file, got 'engine' twice"));
  for (const char* name : {"two\nlines", "not \xFF UTF-8"}) {
    CHECK(contains(request([&](GradeOptions& o) { o.states[0] = name; }),
                   "2: grade: --state: expected a name of one line of UTF-8"));
  }
  CHECK(contains(request([](GradeOptions& o) { o.imports[0] = "nowhere.jsonl"; }),
                 "1: nowhere.jsonl: no such file"));
  CHECK(contains(request([](GradeOptions& o) { o.run = "r"; }),
                 "expected either a run or --import FILE, got both"));
  CHECK(contains(request([](GradeOptions& o) { o.imports.clear(); }), "got neither"));
  CHECK(contains(refused([&] {
                   const Report served = read_run((place / "served.h5").string());
                   Gate gate;
                   gate.limits = {parse_limit("accuracy.mini-math[other] >= base",
                                              LimitKind::regression, "g:1:1")};
                   compare(served, served, {}, &gate);
                 }),
                 "2: compare: the candidate run has no state 'other'; it has engine"));
}

TEST_CASE("answers without a prompt hash are matched by id and never pass for verified prompts") {
  const TemporaryFolder place;
  std::vector<std::string> lines = lines_of(kAnswers / "served.jsonl");
  for (std::string& line : lines) {
    const size_t at = line.find("\"prompt_sha256\"");
    line.erase(at, line.find("\"text\"") - at);
  }
  write_lines(place / "a.jsonl", lines);
  CHECK(contains(grade_answers(import_of({{place / "a.jsonl", "engine"}}, place / "a.h5")),
                 ", 60 of them without a prompt or its hash, matched by id alone"));
  const Report report = read_run((place / "a.h5").string());
  CHECK(report.items[0].prompt_sha256.empty());
  CHECK(compare(report, report, {}, nullptr).exit_code() == 0);
  grade_answers(import_of({{kAnswers / "served.jsonl", "engine"}}, place / "b.h5"));
  const Report hashed = read_run((place / "b.h5").string());
  CHECK(contains(refused([&] { compare(hashed, report, {}, nullptr); }), "prompts differs"));
  CompareOptions allowed;
  allowed.allow = {"prompts"};
  CHECK(compare(hashed, report, allowed, nullptr).exit_code() == 0);
}

TEST_CASE("stored answers are graded again, and the verdicts that changed are named") {
  const TemporaryFolder place;
  grade_answers(import_of({{kAnswers / "served.jsonl", "served"}}, place / "r.h5"));
  GradeOptions again;
  again.run = (place / "r.h5").string();
  again.tasks = {(kRoot / "eval_configs/tasks/mini-math.yaml").string()};
  again.data = (kRoot / "datasets/mini_tasks/math").string();
  CHECK(contains(grade_answers(again), "task mini-math: 60 answers graded, 0 verdicts changed"));

  // A report whose verdicts were wrong: two are, and the task was another version.
  Report report = read_report(place / "r.h5");
  report.states[0].answers[0].correct = false;
  report.states[0].answers[0].extracted = "";
  report.states[0].answers[3].correct = true;
  report.run.tasks[0].sha256 = std::string(64, '0');
  report.run.tasks[0].version = 0;
  write_report(report, place / "r.h5");
  again.out = (place / "new.h5").string();
  const std::string text = grade_answers(again);
  CHECK(contains(text, "task mini-math: graded as version 1 (sha256 "));
  CHECK(contains(text, "), was version 0 (sha256 000000000000)"));
  CHECK(
      contains(text, "served  mini-math/4   69    wrong: nothing extracted  right: '69' by boxed"));
  CHECK(contains(text, "served  mini-math/19"));
  CHECK(contains(text, "60 answers graded, 2 verdicts changed"));
  const Report graded = read_report(place / "new.h5");
  CHECK(graded.states[0].answers[0].correct);
  CHECK_FALSE(graded.states[0].answers[3].correct);
  CHECK(graded.run.tasks[0].version == 1);
  CHECK(graded.states[0].answers[0].text == report.states[0].answers[0].text);

  // Without the data: by what the report holds.
  again.data = (place / "nowhere").string();
  CHECK(contains(grade_answers(again), "60 answers graded, 2 verdicts changed"));

  again.tasks = {(kRoot / "eval_configs/tasks/mini-gpqa.yaml").string()};
  CHECK(contains(refused([&] { grade_answers(again); }),
                 "2: grade: --task: expected tasks of the run (mini-math), got mini-gpqa"));
  Report none = report;
  none.states[0].answers.clear();
  none.items.clear();
  write_report(none, place / "none.h5");
  again.run = (place / "none.h5").string();
  CHECK(contains(refused([&] { grade_answers(again); }),
                 "expected a run with graded answers, got one without"));
}

TEST_CASE("samples exported from a report are imported again as the same verdicts") {
  const TemporaryFolder place;
  grade_answers(import_of({{kAnswers / "served.jsonl", "engine"}}, place / "r.h5"));
  ReportOptions options;
  options.runs = {(place / "r.h5").string()};
  options.export_as = "samples";
  options.out = (place / "out").string();
  CHECK(report_command(options) == 0);
  const fs::path file = place / "out/samples_mini-math_engine.jsonl";
  REQUIRE(fs::exists(file));
  const std::vector<std::string> lines = lines_of(file);
  REQUIRE(lines.size() == 60);
  const nlohmann::json first = nlohmann::json::parse(lines[0]);
  CHECK(first["filtered_resps"][0] == "69");
  CHECK(first["finish_reason"] == "stop");
  CHECK(contains(grade_answers(import_of({{file, "engine"}}, place / "again.h5")),
                 "60 answers to 60 of the 100 items"));
  const Report a = read_report(place / "r.h5"), b = read_report(place / "again.h5");
  CHECK(a.items == b.items);
  REQUIRE(b.states[0].answers.size() == 60);
  for (size_t i = 0; i < 60; ++i) {
    const Answer &x = a.states[0].answers[i], &y = b.states[0].answers[i];
    CHECK(x.text == y.text);
    CHECK(x.correct == y.correct);
    CHECK(x.tokens == y.tokens);
    CHECK(x.finish_reason == y.finish_reason);
  }
  CHECK(compare(a, b, {}, nullptr).tables.size() == 1);

  options.export_as = "parquet";
  CHECK(report_command(options) == 0);
  CHECK(fs::exists(place / "out/answers.parquet"));
  CHECK_FALSE(fs::exists(place / "out/positions.parquet"));
  options.export_as = "xls";
  CHECK(refused([&] { report_command(options); }) ==
        "2: report: --export: expected csv, parquet or samples, got 'xls'");
}

TEST_CASE("graded again, a rule that reads the options' texts finds them in the data") {
  const TemporaryFolder place;
  std::string task = as_text(*read_file(kRoot / "eval_configs/tasks/mini-gpqa.yaml"));
  const std::string rule = "[gpqa_authors_abcd]";
  REQUIRE(contains(task, rule));
  task.replace(task.find(rule), rule.size(), "[lm_eval_gpqa_flexible]");
  std::ofstream(place / "task.yaml") << task;
  write_lines(place / "a.jsonl",
              {"{\"doc_id\": 0, \"doc\": {}, \"resps\": [[\"It must be the queen then\"]]}"});
  GradeOptions options;
  options.imports = {(place / "a.jsonl").string()};
  options.states = {"engine"};
  options.tasks = {(place / "task.yaml").string()};
  options.data = (kRoot / "datasets/mini_tasks/gpqa/gpqa_mini.csv").string();
  options.out = (place / "r.h5").string();
  CHECK(contains(grade_answers(options), "1 answers to 1 of the 500 items of task mini-gpqa"));
  const Report report = read_report(place / "r.h5");
  CHECK(report.states[0].answers[0].correct);
  CHECK(report.states[0].answers[0].extracted == report.items[0].gold);
  GradeOptions again;
  again.run = options.out;
  again.tasks = options.tasks;
  again.data = options.data;
  CHECK(contains(grade_answers(again), "1 answers graded, 0 verdicts changed"));
  again.data = (place / "nowhere").string();
  CHECK(contains(grade_answers(again), "wrong: nothing extracted"));
  // Another seed's option order in the report: its own order and gold stand.
  Report other = report;
  other.run.seed = 77;
  write_report(other, place / "r.h5");
  again.data = options.data;
  CHECK(contains(grade_answers(again), "1 answers graded"));
}
