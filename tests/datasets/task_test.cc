// Task files, prompts byte for byte, option orders, grading of answers.
#include "datasets/task.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "base/hash.h"
#include "datasets/answer_rules.h"
#include "datasets/chat_template.h"
#include "datasets/prompts.h"
#include "datasets/tokenizer.h"
#include "tests/support/case_file.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;
using test::TemporaryFolder;
using Json = nlohmann::json;
using Strings = std::vector<std::string>;

const fs::path kSource = REPLAYEVAL_SOURCE_DIR;

// A task that ships; paths of its data from the source folder.
TaskSpec shipped(const std::string& name) {
  TaskSpec task = load_task(kSource / "eval_configs/tasks" / (name + ".yaml"));
  if (!task.source.path.empty()) task.source.path = kSource / task.source.path;
  return task;
}

// SHA-256 over the prompts' hashes, one a line.
std::string digest_of(const PromptSet& set) {
  std::string lines;
  for (const PromptedItem& item : set.items) lines += item.prompt_sha256 + "\n";
  return sha256_hex(lines);
}

const std::string kMinimal =
    "name: t\nversion: 1\ndata: {set: math}\nprompt: {question: '{{ question }}'}\n"
    "answer: {rules: [boxed], compare: [math]}\n";

std::string error_of(const std::string& yaml) {
  TemporaryFolder folder;
  folder.write("t.yaml", yaml);
  try {
    load_task(folder.path() / "t.yaml");
    return "(none)";
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    return text.substr(std::min(text.find("t.yaml"), text.size()));
  }
}

TEST_CASE("tasks that ship") {
  const std::vector<TaskListing> tasks = list_tasks(kSource / "eval_configs/tasks");
  Strings names;
  for (const TaskListing& task : tasks) {
    names.push_back(task.name);
    CHECK(task.file.stem() == task.name);
    CHECK(task.version >= 1);
    CHECK_FALSE(task.about.empty());
  }
  CHECK(names == Strings{"gpqa_authors", "gpqa_lm_eval", "gpqa_simple_evals", "gsm8k", "math_boxed",
                         "math_minerva", "mini-gpqa", "mini-math", "mini-mmlu-pro", "mmlu_pro"});
  // The definition is a task file of its own with the same identity.
  TemporaryFolder folder;
  for (const std::string& name : names) {
    CAPTURE(name);
    const TaskSpec task = shipped(name);
    CHECK(task.sha256 == sha256_hex(task.definition));
    folder.write("again.yaml", task.definition);
    const TaskSpec again = load_task(folder.path() / "again.yaml");
    CHECK(again.definition == task.definition);
    CHECK(again.prompt.question == task.prompt.question);
    CHECK(again.prompt.shots.fixed == task.prompt.shots.fixed);
    CHECK(again.private_data == task.private_data);
    CHECK(task.private_data == name.starts_with("gpqa_"));
  }
  // Where data lie and how many are asked is no part of what a task is; its limits are.
  TaskSpec task = shipped("mini-math");
  const std::string identity = task.sha256;
  task.source.path = "elsewhere";
  task.source.items = 3;
  task.generation.repeats = 4;
  update_identity(&task);
  CHECK(task.sha256 == identity);
  task.generation.max_tokens = 641;
  update_identity(&task);
  CHECK(task.sha256 != identity);
}

TEST_CASE("task files are read strictly") {
  CHECK(error_of(kMinimal) == "(none)");
  CHECK(error_of(kMinimal + "stop: x\n") ==
        "t.yaml:6:1: stop: unknown key; known: name version about private data prompt options chat "
        "generation answer");
  CHECK(error_of(kMinimal + "generation: {max_token: 5}\n")
            .starts_with("t.yaml:6:14: generation.max_token: unknown key; known: max_tokens stop"));
  CHECK(error_of(kMinimal + "name: u\n") == "t.yaml:6:1: name: is given twice, first on line 1");
  CHECK(error_of("version: 1\n") == "t.yaml:1:1: name: missing");
  CHECK(error_of("name: [\n").starts_with("t.yaml:2:1: not valid YAML"));
  CHECK(error_of("just text\n") == "t.yaml:1:1: expected a map of keys, got 'just text'");
  CHECK(error_of(kMinimal + "generation: {max_tokens: 0}\n") ==
        "t.yaml:6:26: generation.max_tokens: expected a number from 1 to 1000000000, got '0'");
  CHECK(error_of(kMinimal + "generation: {temperature: hot}\n") ==
        "t.yaml:6:27: generation.temperature: expected a number from 0 to 1000, got 'hot'");
  CHECK(error_of(kMinimal + "generation: {temperature: nan}\n").find("got 'nan'") !=
        std::string::npos);
  CHECK(error_of(kMinimal + "generation: {top_p: 0}\n") ==
        "t.yaml:6:21: generation.top_p: expected more than 0");
  CHECK(error_of(kMinimal + "generation: {stop: ['']}\n") ==
        "t.yaml:6:20: generation.stop: a stop text is empty");
  CHECK(error_of(kMinimal + "options: {order: item}\n") ==
        "t.yaml:6:10: options: math has no options");
  CHECK(error_of(kMinimal + "private: yes\n") ==
        "t.yaml:6:10: private: expected true or false, got 'yes'");

  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = kMinimal;
    text.replace(text.find(from), from.size(), to);
    return error_of(text);
  };
  CHECK(with("name: t", "name: T/x") ==
        "t.yaml:1:7: name: expected letters a to z, digits, _ and -, got 'T/x'");
  CHECK(with("set: math", "set: maths") ==
        "t.yaml:3:13: data.set: expected mmlu_pro | gpqa | math | gsm8k, got 'maths'");
  CHECK(with("set: math", "split: test") == "t.yaml:3:7: data.set: missing");
  CHECK(with("{{ question }}", "{{ question") ==
        "t.yaml:4:20: prompt.question: template:1: {{: the tag never ends, expected }}");
  CHECK(with("[boxed]", "[box]")
            .starts_with("t.yaml:5:17: answer.rules: unknown rule 'box'; known: "
                         "mmlu_pro_l1 mmlu_pro_l2"));
  CHECK(with("[boxed]", "[mmlu_pro_l2]") ==
        "t.yaml:5:17: answer.rules: mmlu_pro_l2 finds letters, but answers to math are free");
  CHECK(with("[math]", "[sympy]") ==
        "t.yaml:5:35: answer.compare: unknown rule 'sympy'; known: math hendrycks minerva exact "
        "gsm8k");
  CHECK(with(", compare: [math]", "") == "t.yaml:5:9: answer.compare: missing");
  CHECK(with(", compare: [math]", ", compare: [math], no_answer: chance") ==
        "t.yaml:5:54: answer.no_answer: free answers have no chance level");
  CHECK(with("set: math", "set: gpqa")
            .find("boxed finds free answers, but answers to gpqa are "
                  "letters") != std::string::npos);
  const auto shots = [&](const std::string& keys) {
    return with("prompt: {", "prompt: {shot: 'S', shots: {" + keys + "}, ");
  };
  CHECK(shots("split: train, count: 2") == "(none)");
  CHECK(shots("split: train") == "t.yaml:4:28: prompt.shots.count: missing; expected 1 or more");
  CHECK(
      shots("count: 2") ==
      "t.yaml:4:28: prompt.shots: expected either `split`, where shots are taken from, or `fixed` "
      "ones");
  CHECK(shots("fixed: [{gold: b}], count: 2") ==
        "t.yaml:4:56: prompt.shots.count: expected at most the 1 fixed ones, got 2");
  CHECK(shots("fixed: [{question: a}, {foo: 1}]") ==
        "t.yaml:4:52: prompt.shots.fixed: unknown field 'foo'; known: question options letters "
        "category level gold solution id");
  CHECK(with("prompt: {", "prompt: {shot: 'S', ") == "t.yaml:4:9: prompt.shot: there are no shots");

  CHECK_THROWS_WITH_AS(load_task("/nowhere/t.yaml"), "/nowhere/t.yaml: cannot be read",
                       std::runtime_error);
  TemporaryFolder is_folder;
  CHECK_THROWS_WITH_AS(load_task(is_folder.path()),
                       doctest::Contains(": is a folder; expected a task file (.yaml), or the name "
                                         "of one in eval_configs/tasks"),
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(load_task("no-such-task"),
                       doctest::Contains("task 'no-such-task': there is no "
                                         "eval_configs/tasks/no-such-task.yaml"),
                       std::invalid_argument);
  TemporaryFolder empty;
  CHECK_THROWS_WITH_AS(list_tasks(empty.path()), doctest::Contains("no tasks (*.yaml) there"),
                       std::runtime_error);
}

TEST_CASE("templates that ask for what is not there") {
  const auto with = [&](const std::string& prompt) {
    std::string text = kMinimal;
    text.replace(text.find("question: '{{ question }}'"), 26, prompt);
    return error_of(text);
  };
  const std::string known =
      "' is undefined; known: question options letters category level gold solution id";
  CHECK(with("question: \"x\\n{{ nosuch }}\"") ==
        "t.yaml:4:20: prompt.question: template:2: 'nosuch" + known);
  CHECK(with("question: '{% for o in optionz %}{{ o }}{% endfor %}'").find("'optionz" + known) !=
        std::string::npos);
  CHECK(with("question: '{% if nosuch %}{% endif %}'").find("'nosuch" + known) !=
        std::string::npos);
  CHECK(with("question: '{{ question | replace(\"a\", b) }}'").find("'b" + known) !=
        std::string::npos);
  CHECK(with("head: '{{ question }}', question: '{{ question }}'") ==
        "t.yaml:4:16: prompt.head: template:1: 'question' is undefined; known: category");
  CHECK(with("question: '{% set a = 1 %}{% macro m(b, c=a) %}{{ b }}{{ loop }}{% endmacro %}"
             "{% for d, e in [[1, 2]] %}{{ m(d) }}{{ e }}{{ loop.index }}{% endfor %}"
             "{% with f = 1 %}{{ f }}{% endwith %}{{ range(2) | list }}"
             "{{ x is defined }}{{ y | default(1) }}{{ z is undefined }}{{ question }}'") ==
        "(none)");

  TemporaryFolder folder;
  folder.write("test.jsonl",
               "{\"problem\": \"a\", \"answer\": \"1\"}\n{\"problem\": \"b\", \"answer\": \"1\"}\n"
               "{\"problem\": \"c\", \"answer\": \"1\"}\n");
  folder.write("t.yaml", kMinimal);
  TaskSpec task = load_task(folder.path() / "t.yaml");
  task.source.path = folder.path();
  task.source.published = false;
  CHECK(load_prompts(task, 1).warnings.empty());
  task.prompt.question = "one\n{{ options[7] }}";
  CHECK_THROWS_WITH_AS(load_prompts(task, 1),
                       doctest::Contains("t.yaml: prompt.question:2: 'options[7]' is undefined"),
                       std::invalid_argument);
  task.prompt.question = "{{ options[0].text }}{{ question }}";
  CHECK_THROWS_WITH_AS(load_prompts(task, 1),
                       doctest::Contains("t.yaml: prompt.question:1: 'options[0]' is undefined"),
                       std::invalid_argument);
  task.prompt.question =
      "{{ options[7] | default('-') }}{{ options[7] is defined }}{{ 'x' if level > 3 }}{{ "
      "question }}";
  CHECK(load_prompts(task, 1).items[0].prompt == "-Falsea");
  task.prompt.shot = "{{ question }}{{ gold }} ";
  task.prompt.shots.fixed = {{{"question", "q"}}};
  task.prompt.shots.count = 1;
  CHECK_THROWS_WITH_AS(load_prompts(task, 1),
                       doctest::Contains("t.yaml: prompt.shot:1: 'gold' is undefined"),
                       std::invalid_argument);
}

TEST_CASE("prompts that are equal for different items") {
  TemporaryFolder folder;
  folder.write("test.jsonl",
               "{\"problem\": \"a\", \"answer\": \"1\"}\n{\"problem\": \"b\", \"answer\": \"1\"}\n"
               "{\"problem\": \"a\", \"answer\": \"2\"}\n");
  folder.write("t.yaml", kMinimal);
  TaskSpec task = load_task(folder.path() / "t.yaml");
  task.source.path = folder.path();
  task.source.published = false;
  const auto warnings = [&] { return load_prompts(task, 1).warnings; };
  CHECK(warnings() == Strings{"2 of 3 items have the prompt of another item: the data repeat "
                              "them, or prompt.question leaves out what tells them apart"});
  task.prompt.question = "constant";
  REQUIRE(warnings().size() == 1);
  CHECK(warnings()[0].starts_with("3 of 3 items have the prompt of another item"));
  task.prompt.question = "{{ id }}";
  CHECK(warnings().empty());
}

// The token ids that the mini models were asked with by an independent program.
TEST_CASE("prompts of the mini tasks are those of greedy.json") {
  const std::string path = test::case_path("cases/models-mini/greedy.json");
  REQUIRE_FALSE(path.empty());
  std::ifstream file(path);
  const Json greedy = Json::parse(file);
  TaskSpec task = shipped("mini-math");
  CHECK(task.generation.max_tokens == 640);
  CHECK(load_prompts(task, 1).items.size() == 100);
  task.source.level.reset();  // item is the row of the whole file
  const PromptSet set = load_prompts(task, 1);
  REQUIRE(set.items.size() == 500);
  CHECK(set.warnings.empty());
  CHECK(set.bad.empty());
  size_t compared = 0;
  for (const char* model : {"mini-gdn", "mini-mamba2"}) {
    const auto tokenizer = load_tokenizer(kSource / "models" / model);
    for (const Json& row : greedy.at(model)) {
      const PromptedItem& item = set.items.at(row.at("item").get<size_t>());
      CHECK(item.item.row == row.at("item").get<size_t>());
      std::vector<int32_t> ids{*tokenizer->bos_id()};
      const std::vector<int32_t> text = tokenizer->encode(item.prompt);
      ids.insert(ids.end(), text.begin(), text.end());
      CHECK(ids == row.at("prompt").get<std::vector<int32_t>>());
      // The stored answers grade.
      const auto tokens = row.at("tokens").get<std::vector<int32_t>>();
      const Grade grade = grade_answer(task, item, tokenizer->decode(tokens));
      CHECK(grade.rule == "boxed");
      CHECK(grade.correct == (grade.extracted == item.gold));
      ++compared;
    }
  }
  CHECK(compared == 40);
}

// make_tasks.py's prompts, written out.
TEST_CASE("prompts of the other mini tasks") {
  const PromptSet quiz = load_prompts(shipped("mini-mmlu-pro"), 1);
  REQUIRE(quiz.items.size() == 500);
  for (const PromptedItem& item : quiz.items) {
    std::string expected = "Question:\n" + item.item.question + "\nOptions:\n";
    for (size_t i = 0; i < 10; ++i)
      expected += std::string(1, "ABCDEFGHIJ"[i]) + ". " + item.item.options[i] + "\n";
    CHECK(item.prompt == expected + "Answer: Let's think step by step.");
    CHECK(item.shared_bytes == 0);
    const Grade grade = grade_answer(shipped("mini-mmlu-pro"), item, item.item.solution);
    CHECK(grade.correct);
    if (&item - quiz.items.data() == 20) break;
  }
  const TaskSpec contest_task = shipped("mini-gpqa");
  const PromptSet contest = load_prompts(contest_task, 1);
  REQUIRE(contest.items.size() == 500);
  std::set<std::string> letters;
  for (const PromptedItem& item : contest.items) {
    std::string expected =
        "What is the correct answer to this question: " + item.item.question + "\nChoices:\n";
    for (size_t i = 0; i < 4; ++i)
      expected += std::string("(") + "ABCD"[i] + ") " + item.item.options[i] + "\n";
    CHECK(item.prompt == expected + "Let's think step by step:");
    letters.insert(item.gold);
    CHECK(grade_answer(contest_task, item,
                       " The most is 7. The correct answer is (" + item.gold + ").")
              .correct);
  }
  CHECK(letters.size() == 4);
  // Orders are a function of seed and item: the same in a subset, others with another seed.
  TaskSpec few = contest_task;
  few.source.items = 20;
  const PromptSet subset = load_prompts(few, 1), other = load_prompts(few, 2);
  size_t differ = 0;
  for (size_t i = 0; i < 20; ++i) {
    CHECK(subset.items[i].prompt_sha256 == contest.items[i].prompt_sha256);
    differ += other.items[i].prompt != subset.items[i].prompt;
  }
  CHECK(differ > 10);
}

// Digests of prompts that a short Python program made from the published rules (harnesses.md).
TEST_CASE("MMLU-Pro's local prompt, every item") {
  const std::string data = test::case_path("datasets/mmlu_pro");
  if (data.empty()) return;
  TaskSpec task = shipped("mmlu_pro");
  task.source.path = data;
  const auto start = std::chrono::steady_clock::now();
  const PromptSet set = load_prompts(task, 1);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  MESSAGE("12,032 items and prompts in " << seconds.count() << " s");
  REQUIRE(set.items.size() == 12032);
  REQUIRE(set.warnings.size() == 1);  // the set repeats itself
  CHECK(set.warnings[0].starts_with("318 of 12032 items have the prompt of another item"));
  CHECK(digest_of(set) == "a6eb8ac51df50abb365ec6fbfc57a7e114111933558787f8c8cbd9927b91215e");
  std::map<std::string, std::set<std::string>> openings;
  for (const PromptedItem& item : set.items)
    openings[item.item.category].insert(item.prompt.substr(0, item.shared_bytes));
  CHECK(openings.size() == 14);
  for (const auto& [category, texts] : openings) CHECK(texts.size() == 1);
  const PromptedItem& first = set.items.front();
  CHECK(first.prompt.substr(first.shared_bytes).starts_with("Question:\nTypical advertising"));
  CHECK(first.prompt.starts_with(
      "The following are multiple choice questions (with answers) about business. Think step by "
      "step "
      "and then finish your answer with \"the answer is (X)\" where X is the correct letter "
      "choice.\n\n\n\nQuestion:\n"));

  // A file of questions finds the shots in the folder beside it.
  task.source.path = data + "/test_slice_20_per_category.json";
  const PromptSet slice = load_prompts(task, 1);
  CHECK(slice.items.size() == 280);
  CHECK(slice.warnings.size() == 1);  // 280 of 12,032
  const auto same = std::find_if(set.items.begin(), set.items.end(), [&](const PromptedItem& item) {
    return item.item.id == slice.items[7].item.id;
  });
  CHECK(same->prompt == slice.items[7].prompt);
  CHECK(slice.data_sha256 != set.data_sha256);
}

TEST_CASE("shots are left out until the prompt has few enough tokens") {
  const std::string data = test::case_path("datasets/mmlu_pro");
  const std::string qwen = test::case_path("tokenizers/qwen3");
  if (data.empty() || qwen.empty()) return;
  const auto tokenizer = load_tokenizer(qwen);
  TaskSpec task = shipped("mmlu_pro");
  task.source.path = data;
  task.source.per_category = 40;
  const PromptSet limited = load_prompts(task, 1, nullptr, tokenizer.get());
  task.prompt.shots.prompt_tokens = 0;
  const PromptSet whole = load_prompts(task, 1, nullptr, tokenizer.get());
  size_t fewer = 0;
  for (size_t i = 0; i < whole.items.size(); ++i) {
    const std::string& prompt = limited.items[i].prompt;
    const std::string& all = whole.items[i].prompt;
    if (tokenizer->encode(all).size() < 2048) {
      CHECK(prompt == all);
      continue;
    }
    ++fewer;
    CHECK(tokenizer->encode(prompt).size() < 2048);
    CHECK(limited.items[i].shared_bytes < whole.items[i].shared_bytes);
    CHECK(prompt.substr(limited.items[i].shared_bytes) == all.substr(whole.items[i].shared_bytes));
    // One shot more would be too many.
    const size_t next = all.find("\n\nQuestion:\n", limited.items[i].shared_bytes) + 2;
    CHECK(tokenizer->encode(all.substr(0, next) + all.substr(whole.items[i].shared_bytes)).size() >=
          2048);
  }
  CHECK(fewer > 3);
  CHECK(limited.description.find("fewer shots in " + std::to_string(fewer) + " prompts") !=
        std::string::npos);
}

TEST_CASE("GPQA in three forms, with the published orders") {
  TemporaryFolder folder;
  std::string csv =
      "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Record "
      "ID\n";
  for (int i = 0; i < 198; ++i) {
    const std::string n = std::to_string(i);
    csv +=
        "Q" + n + ",right" + n + ", w" + n + " [title]b  c,x[1]" + n + ",y" + n + ",rec" + n + "\n";
  }
  // Rows that cannot be asked keep their place in the order of the others.
  csv.replace(csv.find("Q5,"), 3, ",");
  folder.write("gpqa_diamond.csv", csv);
  const std::string path = test::case_path("cases/graders/gpqa_shuffle_reference.json");
  if (path.empty()) return;
  std::ifstream file(path);
  const Json reference = Json::parse(file);
  const auto authors = reference.at("gpqa_authors_seed0_shuffle_198").at("orders");
  const auto simple = reference.at("simple_evals_random0_sample_198x4").at("permutations");

  const auto options_of = [](int i, bool clean) {
    const std::string n = std::to_string(i);
    return clean ? Strings{"right" + n, "w" + n + ". b c", "x" + n, "y" + n}
                 : Strings{"right" + n, " w" + n + " [title]b  c", "x[1]" + n, "y" + n};
  };
  for (const char* name : {"gpqa_authors", "gpqa_lm_eval", "gpqa_simple_evals"}) {
    CAPTURE(name);
    TaskSpec task = shipped(name);
    task.source.path = folder.path();
    const bool is_simple = task.options.order == OptionRule::Order::kSimpleEvals;
    if (is_simple) task.options.rounds = 4;
    const PromptSet set = load_prompts(task, 77);
    REQUIRE(set.items.size() == (is_simple ? 788 : 197));
    CHECK(set.bad.size() == 1);
    size_t at = 0;
    for (int round = 0; round < task.options.rounds; ++round) {
      for (int row = 0; row < 198; ++row) {
        if (row == 5) continue;
        const PromptedItem& item = set.items[at++];
        CHECK(item.item.id ==
              "rec" + std::to_string(row) + (round > 0 ? "/" + std::to_string(round) : ""));
        const auto order = (is_simple ? simple[static_cast<size_t>(198 * round + row)]
                                      : authors[static_cast<size_t>(row)])
                               .get<std::vector<int>>();
        CHECK(item.option_order == order);
        const Strings options = options_of(row, task.options.clean == "lm_eval_gpqa");
        Strings shown;
        for (const int option : order) shown.push_back(options[static_cast<size_t>(option)]);
        CHECK(item.item.options == shown);
        CHECK(shown[static_cast<size_t>(item.gold[0] - 'A')] == options[0]);
        const std::string question = "Q" + std::to_string(row);
        std::string expected;
        if (std::string(name) == "gpqa_authors") {
          expected = "What is the correct answer to this question: " + question +
                     "\n\nChoices:\n(A) " + shown[0] + "\n(B) " + shown[1] + "\n(C) " + shown[2] +
                     "\n(D) " + shown[3] +
                     "\n\nFormat your response as follows: \"The correct answer is (insert answer "
                     "here)\"";
        } else if (std::string(name) == "gpqa_lm_eval") {
          expected = "What is the correct answer to this question:" + question +
                     "\nChoices:\n(A) " + shown[0] + "\n(B) " + shown[1] + "\n(C) " + shown[2] +
                     "\n(D) " + shown[3] + "\nLet's think step by step: ";
        } else {
          expected =
              "Answer the following multiple choice question. The last line of your response "
              "should "
              "be of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one "
              "of "
              "ABCD. Think step by step before answering.\n\n" +
              question + "\n\nA) " + shown[0] + "\nB) " + shown[1] + "\nC) " + shown[2] + "\nD) " +
              shown[3];
        }
        CHECK(item.prompt == expected);
      }
    }
  }
}

TEST_CASE("options as lm-evaluation-harness cleans them") {
  CHECK(lm_eval_gpqa_clean("  a [title] b\n") == "a. b");
  CHECK(lm_eval_gpqa_clean("x [1] y [2]z") == "x y z");
  CHECK(lm_eval_gpqa_clean("[a\nb] c") == "[a\nb] c");
  CHECK(lm_eval_gpqa_clean("a] b [c") == "a] b [c");
  CHECK(lm_eval_gpqa_clean("[[a]] b") == "] b");
  CHECK(lm_eval_gpqa_clean("a    b") == "a  b");
  CHECK(lm_eval_gpqa_clean("") == "");
}

TEST_CASE("of two equal options the first is the right one, as upstream") {
  TemporaryFolder folder;
  folder.write("gpqa_diamond.csv",
               "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
               "Q,same,same,same,same\n");
  for (const char* name : {"gpqa_authors", "gpqa_simple_evals"}) {
    TaskSpec task = shipped(name);
    task.source.path = folder.path();
    CHECK(load_prompts(task, 1).items.at(0).gold == "A");
  }
}

TEST_CASE("MATH: Minerva's shots and the boxed form") {
  TemporaryFolder folder;
  folder.write("test.jsonl",
               "{\"problem\": \"What is {{ 1 + 1 }} in $\\\\mathbb{Z}$?\", \"level\": \"Level 5\", "
               "\"type\": \"Algebra\", \"solution\": \"$\\\\boxed{\\\\frac{4}{2}}$\"}\n");
  TaskSpec task = shipped("math_minerva");
  task.source.path = folder.path();
  const PromptSet set = load_prompts(task, 1);
  REQUIRE(set.items.size() == 1);
  const PromptedItem& item = set.items[0];
  // SHA-256 of the prompt text of lm-evaluation-harness's minerva_math and two newlines.
  CHECK(item.shared_bytes == 1794);
  CHECK(sha256_hex(item.prompt.substr(0, item.shared_bytes)) ==
        "b01348e31b4392a0aff3c3587bba7ccb2da4df065a56f85fce330b2f13e94419");
  CHECK(item.prompt.substr(item.shared_bytes) ==
        "Problem:\nWhat is {{ 1 + 1 }} in $\\mathbb{Z}$?\n\nSolution:");
  const auto graded = [&](const std::string& text) { return grade_answer(task, item, text); };
  CHECK(graded("so.\nFinal Answer: The final answer is $2$. I hope it is correct.").correct);
  CHECK(graded("Final Answer: The final answer is $\\frac42$. ").correct);
  CHECK_FALSE(graded("Final Answer: The final answer is $3$. I hope it is correct.").correct);
  CHECK(graded("\\boxed{2}").rule.empty());  // boxed answers do not count in this form

  task = shipped("math_boxed");
  task.source.path = folder.path();
  const PromptSet boxed = load_prompts(task, 1);
  CHECK(boxed.items[0].prompt ==
        "What is {{ 1 + 1 }} in $\\mathbb{Z}$?\nPlease reason step by step, and put your final "
        "answer "
        "within \\boxed{}.");
  CHECK(boxed.items[0].shared_bytes == 0);
  CHECK(grade_answer(task, boxed.items[0], "It is \\boxed{1} or \\boxed{2}.").extracted == "2");
  CHECK(grade_answer(task, boxed.items[0], "The final answer is 2.").rule == "final_answer");
}

TEST_CASE("GSM8K: shots from the training split") {
  TemporaryFolder folder;
  std::string train;
  for (int i = 0; i < 6; ++i) {
    const std::string n = std::to_string(i);
    train += "{\"question\": \"q" + n + "\", \"answer\": \"a" + n + "\\n#### " + n + "\"}\n";
  }
  folder.write("train.jsonl", train);
  folder.write("test.jsonl", "{\"question\": \"q\", \"answer\": \"#### 1,234\"}\n");
  TaskSpec task = shipped("gsm8k");
  task.source.path = folder.path();
  const PromptSet set = load_prompts(task, 1);
  const PromptedItem& item = set.items.at(0);
  CHECK(item.prompt.starts_with("Question: q0\nAnswer: a0\n#### 0\n\nQuestion: q1\n"));
  CHECK(item.prompt.ends_with("Answer: a4\n#### 4\n\nQuestion: q\nAnswer:"));
  CHECK(item.prompt.substr(item.shared_bytes) == "Question: q\nAnswer:");
  CHECK(grade_answer(task, item, " 1,000 + 234\n#### 1,234.").correct);
  CHECK(grade_answer(task, item, "It is $1234.").rule == "gsm8k_flexible");
  CHECK(grade_answer(task, item, "It is $1234.").correct);
  CHECK_FALSE(grade_answer(task, item, "#### 1235 1234").correct);
  folder.write("train.jsonl", "broken\n" + train);
  const PromptSet other = load_prompts(task, 1);
  CHECK(other.items.at(0).prompt == item.prompt);
  CHECK(std::any_of(other.warnings.begin(), other.warnings.end(), [](const std::string& warning) {
    return warning.starts_with("shots: 1 unusable items are passed over; the first, row 0: ");
  }));
  folder.write("train.jsonl", "{\"question\": \"q0\", \"answer\": \"#### 0\"}\n");
  CHECK_THROWS_WITH_AS(load_prompts(task, 1), "task gsm8k: expected 5 shots in split train, got 1",
                       std::invalid_argument);
  fs::remove(folder.path() / "train.jsonl");
  CHECK_THROWS_WITH_AS(load_prompts(task, 1),
                       doctest::Contains("task gsm8k: shots, split train: data: gsm8k: no data at"),
                       std::runtime_error);
}

TEST_CASE("prompts through a chat template") {
  const ChatTemplate chat(
      "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% "
      "endfor %}"
      "{% if add_generation_prompt %}<|assistant|>{{ mode }}{% endif %}",
      "chat", {{"bos_token", "<s>"}});
  TaskSpec task = shipped("mini-math");
  task.source.items = 2;
  CHECK(load_prompts(task, 1, &chat).items[0].prompt.starts_with("Problem:"));  // not asked for
  CHECK(load_prompts(task, 1, &chat).add_bos);
  task.chat.use = true;
  task.chat.system = "Be brief.";
  task.chat.variables = {{"mode", "2"}};
  const PromptSet set = load_prompts(task, 1, &chat);
  CHECK_FALSE(set.add_bos);
  CHECK(set.warnings.empty());
  CHECK(set.items[0].prompt.starts_with("<s><|system|>Be brief.<|end|><|user|>Problem:\n"));
  CHECK(set.items[0].prompt.ends_with("Solution:<|end|><|assistant|>2"));
  const PromptSet without = load_prompts(task, 1);
  REQUIRE(without.warnings.size() == 1);
  CHECK(without.warnings[0].starts_with(
      "task mini-math asks through a chat template, and the model"));
  CHECK(without.add_bos);

  task.prompt.shot = "Problem: {{ question }}\n\n";
  task.prompt.shots.fixed = {{{"question", "one"}}, {{"question", "two"}}};
  task.prompt.shots.count = 2;
  for (const PromptedItem& item : load_prompts(task, 1, &chat).items) {
    CHECK(item.prompt.substr(0, item.shared_bytes) ==
          "<s><|system|>Be brief.<|end|><|user|>Problem: one\n\nProblem: two\n\n");
  }
}

TEST_CASE("what is graded of an answer with thinking") {
  const std::string end = "</think>";
  CHECK(graded_part("", "p", "a</think>b") == "a</think>b");
  CHECK(graded_part(end, "p", "a</think>b</think>c") == "c");
  CHECK(graded_part(end, "p", "plain") == "plain");
  CHECK(graded_part(end, "p", " <think>never ends, \\boxed{1}").empty());
  CHECK(graded_part(end, "...<think>\n\n", "never ends, \\boxed{1}").empty());
  CHECK(graded_part(end, "...<think></think>", "plain") == "plain");
  CHECK(graded_part("[/THINK]", "x[THINK]", "a").empty());
  TaskSpec task = shipped("mini-math");
  task.generation.think_end = end;
  PromptedItem item;
  item.item.task = "math";
  item.gold = "7";
  CHECK(grade_answer(task, item, "<think>\\boxed{8}</think>so \\boxed{7}").correct);
  const Grade cut = grade_answer(task, item, "<think>it is \\boxed{7}");
  CHECK_FALSE(cut.correct);
  CHECK(cut.rule.empty());
  CHECK(cut.extracted.empty());
}

TEST_CASE("rules in order, and every rule by name") {
  TaskSpec task = shipped("mini-mmlu-pro");
  task.rules = {"mmlu_pro_l1", "boxed_letter", "mmlu_pro_l2"};
  PromptedItem item;
  item.item.options = {"x", "y", "z"};
  item.gold = "B";
  Grade grade = grade_answer(task, item, "the answer is (B).");
  CHECK(grade.rule == "mmlu_pro_l1");
  CHECK(grade.correct);
  grade = grade_answer(task, item, "so \\boxed{C}");
  CHECK(grade.rule == "boxed_letter");
  CHECK(grade.extracted == "C");
  CHECK_FALSE(grade.correct);
  grade = grade_answer(task, item, "perhaps B");
  CHECK(grade.rule == "mmlu_pro_l2");
  CHECK(grade.stage == 3);
  CHECK(grade.correct);
  CHECK(grade_answer(task, item, "none").rule.empty());

  const auto free = [](const char* rule, const char* text) {
    return extract_answer(rule, text).text;
  };
  CHECK(free("boxed", "\\boxed{1} \\boxed{ 2 }") == "2");
  CHECK(free("boxed", "\\boxed{1} \\boxed{2") == "");
  CHECK(free("minerva", "Final Answer: The final answer is $1$. I hope it is correct.") == "$1$");
  CHECK(free("minerva", "Final Answer: The final answer is\n1. I hope it is correct.") == "");
  CHECK(free("minerva",
             "Final Answer: The final answer is 1\nFinal Answer: The final answer is 2. I "
             "hope it is correct.") == "2");
  CHECK(free("minerva", "Final Answer: The final answer is 1é I hope it is correct!") == "1");
  CHECK(free("lm_eval_hendrycks", "a $1$ b $2$ c") == "1$ b $2");
  CHECK(free("lm_eval_hendrycks", " a $1 ") == "a $1");
  CHECK(free("simple_evals_line", "x ANSWER :\n 42 m\nAnswer: 3") == "42 m");
  CHECK(free("simple_evals_line", "the answer is 4\nAnswer:") == "");
  CHECK(free("gsm8k_strict", "#### x\n#### -1,000.5 apples #### 3") == "-1,000.5");
  CHECK(free("gsm8k_flexible", "It costs $12.50 or -7 - 3.") == "3.");
  CHECK(free("gsm8k_flexible", "no -. , 5 x -") == "5");
  CHECK(free("whole", " a b \n") == "a b");
  CHECK(free("final_answer", "The final answer is $\\frac{1}{2}$.") == "\\frac{1}{2}");
  CHECK(answers_equal("exact", " a", "a\n"));
  CHECK_FALSE(answers_equal("exact", "A", "a"));
  CHECK(answers_equal("gsm8k", "1000", "$1,000."));
  CHECK(answers_equal("math", "1/2", "0.5"));
  CHECK_FALSE(answers_equal("hendrycks", "1/3", "0.333"));
  CHECK_THROWS_WITH_AS(extract_answer("guess", "x"),
                       doctest::Contains("unknown rule 'guess'; known: mmlu_pro_l1"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(answers_equal("guess", "x", "x"), doctest::Contains("known: math hendrycks"),
                       std::invalid_argument);
  std::set<std::string_view> names;
  for (const AnswerRule& rule : answer_rules()) {
    CHECK(names.insert(rule.name).second);
    CHECK(is_answer_rule(rule.name));
    CHECK_FALSE(extract_answer(rule.name, ""));
  }
  CHECK(names.size() == 20);
}

// A megabyte without an answer, in shapes that each rule nearly matches; sanitizers slow it down
// about tenfold.
TEST_CASE("rules take linear time") {
#if defined(__SANITIZE_ADDRESS__)
  constexpr double limit = 1.5;
#else
  constexpr double limit = 0.05;
#endif
  const size_t size = 1 << 20;
  const auto repeated = [&](const std::string& part) {
    std::string text;
    while (text.size() < size) text += part;
    return text;
  };
  const std::vector<std::pair<std::string, std::string>> texts = {
      {"prose", repeated("the quick brown fox jumps over the lazy dog. ")},
      {"letters", repeated("BB ")},
      {"answer is", repeated("answer is answer is ")},
      {"answer:", repeated("answer: ")},
      {"Answer", repeated("Answer \n")},
      {"open boxes", repeated("\\boxed{")},
      {"dollars", repeated("$")},
      {"minerva", repeated("Final Answer: The final answer is;")},
      {"hopes", repeated(" I hope it is correct")},
      {"hashes", repeated("#### ")},
      {"digits", repeated("1")},
      {"minus", repeated("-")},
      {"parentheses", repeated("(((")},
      {"colons", repeated(": : ")},
      {"spaces", repeated(" ")},
      {"newlines", repeated("\n")},
      {"commas", repeated("{1,")},
  };
  const Strings options{"first option", "second", "(((", "1"};
  double worst = 0;
  std::string where;
  for (const AnswerRule& rule : answer_rules()) {
    for (const auto& [name, text] : texts) {
      double best = 1e9;
      for (int attempt = 0; attempt < 3 && best > limit; ++attempt) {
        const std::clock_t start = std::clock();
        extract_answer(rule.name, text, options);
        best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
      }
      if (best > worst) {
        worst = best;
        where = std::string(rule.name) + " on " + name;
      }
    }
  }
  // What a rule extracts is compared: the whole text in the worst case.
  for (const CompareRule& rule : compare_rules()) {
    for (const auto& [name, text] : texts) {
      double best = 1e9;
      for (int attempt = 0; attempt < 3 && best > limit; ++attempt) {
        const std::clock_t start = std::clock();
        answers_equal(rule.name, "\\frac{1}{2}", text);
        best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
      }
      if (best > worst) {
        worst = best;
        where = "comparison " + std::string(rule.name) + " on " + name;
      }
    }
  }
  MESSAGE("slowest: " << where << ", " << worst * 1e3 << " ms");
  CHECK(worst < limit);
}

}  // namespace
}  // namespace replayeval
