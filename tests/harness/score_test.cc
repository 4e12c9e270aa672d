// The job score on a mini model: items that cannot be asked, common starts of prompts, a run from
// the experiment to the report, its growth, and its answers as documents of a kl run.
#include "harness/score.h"

#include <doctest/doctest.h>
#include <omp.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/hash.h"
#include "harness/answer_documents.h"
#include "reports/run_folder.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

const std::string kModel = std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-mamba2";

/// A folder, and one thread while it is there.
class Folder : public test::TemporaryFolder {
 public:
  Folder() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~Folder() { omp_set_num_threads(threads_); }

 private:
  int threads_;
};

std::string problem(const std::string& text, const std::string& answer) {
  return "{\"problem\": \"" + text +
         "\", \"level\": \"Level 5\", \"type\": \"Ledger\", \"answer\": \"" + answer + "\"}\n";
}

/// A task of three sums that can be asked, and the experiment that asks them.
struct Small {
  explicit Small(const std::string& more_items = {}, const std::string& stop = "[]") {
    folder.write(
        "data.jsonl",
        problem("A chest holds 32 coins. (1) take 6; (2) add 2; (3) take 24. How many "
                "coins are in the chest?",
                "4") +
            problem("A chest holds 17 apples. (1) add 1; (2) add 5. How many apples are in "
                    "the chest?",
                    "23") +
            problem("A chest holds 40 lamps. (1) take 1; (2) add 2. How many lamps are in "
                    "the chest?",
                    "41") +
            more_items);
    task = folder.write("sums.yaml",
                        "name: sums\nversion: 1\nabout: sums\ndata: {set: math, path: " +
                            (folder / "data.jsonl").string() +
                            ", published: false}\nprompt:\n  question: \"Problem:\\n{{ question "
                            "}}\\n\\nSolution:\"\ngeneration: {max_tokens: 60, stop: " +
                            stop + "}\nanswer: {rules: [boxed], compare: [math]}\n");
  }
  Experiment experiment(const std::vector<std::string>& settings = {}) const {
    const std::string file = folder.write(
        "score.yaml", "job: score\nmodel: " + kModel + "\ntasks: [" + task +
                          "]\nstates: [nvfp4+sr, nvfp4+sr@L=1]\nthreads: 1\nslots: 4\nout: " +
                          (folder / "run").string() + "\n");
    return load_experiment(file, settings);
  }
  Folder folder;
  std::string task;
};

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "(no error)";
}

TEST_CASE("items that cannot be asked are named and counted, or stop the run") {
  std::string long_text = "A chest holds 1 coins.";
  for (int i = 1; i < 40; ++i) long_text += " (" + std::to_string(i) + ") add 1;";
  const Small small(
      problem(long_text + " How many?", "40") +
      // U+2581 stands for a space inside sentencepiece models: it does not come back as itself.
      problem("A \xE2\x96\x81 chest holds 2 coins. How many?", "2") +
      // No answer.
      "{\"problem\": \"A chest?\", \"level\": \"Level 5\", \"type\": \"Ledger\", \"solution\": "
      "\"\"}\n");
  const auto tokenizer = load_tokenizer(kModel);
  const std::string message =
      error_of([&] { load_asked_items(small.experiment(), *tokenizer, 120); });
  CAPTURE(message);
  CHECK(
      message.starts_with("tasks: 3 items cannot be asked; on_bad_item: skip goes on without "
                          "them:\n  task sums, row "));
  const AskedItems asked =
      load_asked_items(small.experiment({"on_bad_item=skip"}), *tokenizer, 120);
  CHECK(asked.items.size() == 3);
  REQUIRE(asked.skipped.size() == 3);
  std::string all;
  for (const std::string& line : asked.skipped) all += line + "\n";
  CAPTURE(all);
  CHECK(all.find("the model's context 120") != std::string::npos);
  CHECK(all.find("the tokenizer does not give its prompt back: they differ from byte 11 of") !=
        std::string::npos);
  // Where the context is the limit, answers are shorter.
  for (const AskedItem& item : asked.items) {
    const int64_t length = static_cast<int64_t>(item.prompt->tokens.size());
    CHECK(item.max_tokens == std::min<int64_t>(60, 120 - length));
    CHECK(item.prompt->tokens[0] == 1);
    CHECK(tokenizer->decode(item.prompt->tokens) == item.item.prompt);
  }
  CHECK(load_asked_items(small.experiment({"on_bad_item=skip"}), *tokenizer, 0).items.size() == 4);
  CHECK(error_of([&] {
          load_asked_items(small.experiment({"on_bad_item=skip"}), *tokenizer, 20);
        }).starts_with("tasks: no item is left; 6 items cannot be asked"));
}

TEST_CASE("the experiment's draws change what a task is, its repeats do not") {
  const Small small;
  const auto tokenizer = load_tokenizer(kModel);
  const auto load = [&](const std::vector<std::string>& settings) {
    return load_asked_items(small.experiment(settings), *tokenizer, 0);
  };
  const std::string identity = load({}).tasks[0].sha256;
  CHECK(load({"repeats=5"}).tasks[0].sha256 == identity);
  CHECK(load({"repeats=5"}).repeats == 5);
  const AskedItems warm = load({"temperature=0.5", "top_k=3", "max_tokens=7"});
  CHECK(warm.tasks[0].sha256 != identity);
  CHECK(warm.tasks[0].generation.temperature == 0.5);
  CHECK(warm.tasks[0].generation.top_k == 3);
  CHECK(warm.items[0].max_tokens == 7);
  // An entry's own settings come after the experiment's.
  const AskedItems own =
      load({"temperature=0.5", "tasks=[{task: " + small.task + ", temperature: 0.25, items: 2}]"});
  CHECK(own.tasks[0].generation.temperature == 0.25);
  CHECK(own.items.size() == 2);
  CHECK(error_of([&] {
          load({"tasks=[" + small.task + ", " + small.task + "]"});
        }).starts_with("tasks: sums: expected each task once, got it twice"));
}

TEST_CASE("common starts of prompts are found for groups of two and more, from 32 tokens on") {
  const auto prompt = [](std::vector<int> parts) {
    Prompt p;
    for (int part : parts) p.tokens.insert(p.tokens.end(), 20, part);
    return p;
  };
  std::vector<Prompt> prompts = {prompt({1, 2, 3}),    prompt({1, 2, 4}),
                                 prompt({1, 2, 4, 4}), prompt({1, 2, 3}),  // alone in its group
                                 prompt({5, 6}),       prompt({5, 7})};
  share_prefixes({"a", "a", "a", "b", "c", "c"}, prompts);
  for (int i = 0; i < 3; ++i) {
    CHECK(prompts[static_cast<size_t>(i)].group == "a");
    CHECK(prompts[static_cast<size_t>(i)].shared_tokens == 40);
  }
  for (int i = 3; i < 6; ++i) {
    CHECK(prompts[static_cast<size_t>(i)].group.empty());
    CHECK(prompts[static_cast<size_t>(i)].shared_tokens == 0);
  }
}

TEST_CASE("a run answers, grades, grows, and its answers are documents of a kl run") {
  const Small small;
  const std::string two = "tasks=[{task: " + small.task + ", items: 2}]";
  CHECK(run_score(small.experiment({two}), {}) == 0);
  Report report = load_report(small.folder / "run");
  CHECK(report.run.job == "score");
  REQUIRE(report.items.size() == 2);
  REQUIRE(report.states.size() == 3);
  CHECK(report.run.tasks[0].name == "sums");
  const auto tokenizer = load_tokenizer(kModel);
  for (const StateReport& state : report.states) {
    REQUIRE(state.answers.size() == 2);
    for (const Answer& answer : state.answers) {
      CHECK(answer.tokens == static_cast<int64_t>(answer.token_ids.size()));
      CHECK(answer.margins.size() == answer.token_ids.size());
      CHECK(answer.finish_reason == (answer.tokens < 60 ? "stop" : "length"));
    }
  }
  // The mini model can do these two in FP32.
  const Answer& first = report.states[0].answers[0];
  CHECK(first.text ==
        " (1) 32 - 6 = 26; (2) 26 + 2 = 28; (3) 28 - 24 = 4. The final answer is "
        "$\\boxed{4}$.");
  CHECK(first.extracted == "4");
  CHECK(first.correct);
  CHECK(first.finish_reason == "stop");
  CHECK(first.token_ids.back() == 2);

  // More items are more of the same run; other draws are not, and a fresh run needs a fresh folder.
  CHECK_THROWS_AS(run_score(small.experiment(), {}), std::invalid_argument);
  RunOptions resume;
  resume.resume = true;
  CHECK(error_of([&] { run_score(small.experiment({"temperature=1"}), resume); }) != "(no error)");
  CHECK(run_score(small.experiment({"slots=1", "repeats=2"}), resume) == 0);
  const Report grown = load_report(small.folder / "run");
  REQUIRE(grown.items.size() == 3);
  for (const StateReport& state : grown.states) REQUIRE(state.answers.size() == 6);
  const auto same = [](const Answer& a, const Answer& b) {
    return a.token_ids == b.token_ids && a.margins == b.margins && a.seconds == b.seconds;
  };
  for (size_t s = 0; s < 3; ++s) {
    for (const Answer& kept : report.states[s].answers) {
      bool found = false;
      for (const Answer& now : grown.states[s].answers)
        found = found || (now.item == kept.item && now.repeat == kept.repeat && same(now, kept));
      CHECK(found);
    }
  }
  // Greedy repeats differ only in what they draw for rounding: FP32 not at all.
  const std::vector<Answer>& fp32 = grown.states[0].answers;
  for (const Answer& a : fp32) {
    for (const Answer& b : fp32) CHECK((a.item != b.item || a.token_ids == b.token_ids));
  }

  // The same answers in a report.h5 of their own serve as documents.
  const std::string kl = small.folder.write(
      "kl.yaml", "job: kl\nmodel: " + kModel +
                     "\ndata: {kind: answers, path: " + (small.folder / "run").string() +
                     "/report.h5, state: fp32}\nstates: [nvfp4+sr]\n" +
                     "threads: 1\nout: " + (small.folder / "kl").string() + "\n");
  CHECK(run_teacher_forced(load_experiment(kl), {}) == 0);
  const Report forced = load_report(small.folder / "kl");
  REQUIRE(forced.documents.size() == 6);
  const AskedItems asked = load_asked_items(small.experiment(), *tokenizer, 0);
  for (size_t d = 0; d < 6; ++d) {
    CAPTURE(d);
    const Answer& answer = fp32[d];
    const AskedItem& item = asked.items[static_cast<size_t>(answer.item)];
    const std::string id = "sums/" + item.item.item.id + "/" + std::to_string(answer.repeat);
    CHECK(forced.documents[d].id == id);
    CHECK(forced.documents[d].stream == stream_of(id));
    const size_t prompt = item.prompt->tokens.size();
    CHECK(forced.documents[d].prompt_tokens == static_cast<int64_t>(prompt));
    std::vector<int32_t> tokens = item.prompt->tokens;
    tokens.insert(tokens.end(), answer.token_ids.begin(), answer.token_ids.end());
    CHECK(forced.token_ids[d] == tokens);
    for (const StateReport& state : forced.states) {
      const StateDocument& figures = state.documents[d];
      CHECK(figures.first_position == static_cast<int64_t>(prompt));
      REQUIRE(figures.kl.size() == tokens.size());
      for (size_t t = 0; t < tokens.size(); ++t) CHECK(std::isnan(figures.kl[t]) == (t < prompt));
    }
    // The baseline chose each of these tokens as the likeliest of 4,096.
    for (size_t t = prompt; t + 1 < tokens.size(); ++t)
      CHECK(forced.states[0].documents[d].nll[t] < std::log(4096.0f));
  }
  // A part of them, by name; and what is not there is refused.
  const auto documents = [&](const std::vector<std::string>& settings) {
    return load_answer_documents(load_experiment(kl, settings), *tokenizer);
  };
  const std::string id = forced.documents[3].id;
  const AnswerDocuments one = documents({"data.documents=[" + id + "]", "data.state=nvfp4+sr"});
  REQUIRE(one.loaded.documents.size() == 1);
  CHECK(one.loaded.documents[0].id == id);
  CHECK(documents({"data.documents=2"}).loaded.documents.size() == 2);
  CHECK(documents({"data.tokens=70"}).loaded.documents[0].tokens.size() == 70);
  CHECK(error_of([&] {
          documents({"data.state=fp8"});
        }).find("expected one of fp32 nvfp4+sr nvfp4+sr@L=1, got 'fp8'") != std::string::npos);
  CHECK(error_of([&] {
          documents({"data.documents=[sums/99/0]"});
        }).find("got 'sums/99/0', which fp32 has not given") != std::string::npos);
  CHECK(error_of([&] { documents({"data.tokens=20"}); }).find("no answer of fp32 is left") !=
        std::string::npos);
  // Another question under the same id.
  small.folder.write("data.jsonl", problem("A chest holds 1 coins. How many?", "1") +
                                       problem("A chest holds 2 coins. How many?", "2") +
                                       problem("A chest holds 3 coins. How many?", "3"));
  CHECK(error_of([&] { documents({}); }).find(" is another one now; expected the data") !=
        std::string::npos);
}

}  // namespace
}  // namespace replayeval
