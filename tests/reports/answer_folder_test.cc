// Answers in the run folder: stored, compared, grown, and under fire.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <thread>

#include "reports/files.h"
#include "reports/run_folder.h"
#include "reports/schema.h"
#include "tests/reports/sample_answers.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;
namespace fs = std::filesystem;

namespace {

std::vector<fs::path> part_files(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder / "parts")) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

Report undisturbed(const RunPlan& plan) {
  TemporaryFolder place;
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  put_answers(folder);
  return folder.report();
}

template <class Child>
pid_t fork_child(Child child) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    int status = 3;
    try {
      status = child();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(status);
  }
  return pid;
}

int wait_for(pid_t pid) {
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("answers put in batches are read back, assembled and loaded equal") {
  TemporaryFolder place;
  const RunPlan plan = sample_score_plan();
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  const std::vector<AnswerKey> all = folder.missing_answers();
  REQUIRE(all.size() == 7 * 2 * 3);
  CHECK(all[0] == AnswerKey{0, 0, 0});  // by item, repeat, state
  CHECK(all[1] == AnswerKey{1, 0, 0});
  CHECK(all[3] == AnswerKey{0, 0, 1});
  CHECK(all[6] == AnswerKey{0, 1, 0});
  CHECK(folder.missing().empty());
  put_answers(folder, 4);
  CHECK(folder.missing_answers().empty());

  const Report report = folder.report();
  REQUIRE(report.items == plan.items);
  CHECK(report.run.repeats == 2);
  CHECK(report.run.tasks == plan.run.tasks);
  for (size_t s = 0; s < 3; ++s) {
    const std::vector<Answer>& answers = report.states[s].answers;
    REQUIRE(answers.size() == 14);
    for (size_t i = 0; i < answers.size(); ++i) {
      const Answer expected = sample_answer(
          plan, {static_cast<int>(s), static_cast<int>(i / 2), static_cast<int>(i % 2)});
      CHECK(same_answer(answers[i], expected) == "");
    }
  }
  CHECK(report.states[0].answers[0].text.find("\xEF\xBF\xBD") == std::string::npos);

  const Report loaded = load_report(folder.assemble("2026-11-29T19:00:00Z"));
  CHECK(answers_differ(report, loaded) == "");
  CHECK(answers_differ(report, load_report(place / "run")) == "");
  CHECK(loaded.items == plan.items);
  CHECK(loaded.run.tasks == plan.run.tasks);
  CHECK(loaded.run.repeats == 2);
}

TEST_CASE("texts with a NUL, the checksum's mark or nothing at all are kept") {
  TemporaryFolder place;
  const RunPlan plan = sample_score_plan();
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  AnswerBatch batch;
  batch.rows.push_back({0, sample_answer(plan, {0, 0, 0})});
  batch.rows.push_back({0, sample_answer(plan, {0, 1, 0})});
  batch.rows.push_back({0, sample_answer(plan, {0, 2, 0})});
  const std::string mark = "replayeval-sha256:" + std::string(64, '0');
  batch.rows[0].answer.text = std::string("a\0b", 3);
  batch.rows[1].answer.text = mark + mark;
  batch.rows[2].answer.text = "";
  batch.rows[2].answer.tokens = 0;
  batch.rows[2].answer.token_ids.clear();
  batch.rows[2].answer.margins.clear();
  CHECK(folder.put(batch) == PutOutcome::written);
  CHECK(folder.put(batch) == PutOutcome::compared);
  for (const Report& report : {folder.report(), load_report(folder.assemble())}) {
    const std::vector<Answer>& answers = report.states[0].answers;
    REQUIRE(answers.size() == 3);
    CHECK(answers[0].text ==
          "a\xEF\xBF\xBD"
          "b");
    CHECK(answers[1].text == mark + mark);
    CHECK(answers[2].text == "");
    CHECK(answers[2].token_ids.empty());
  }
}

TEST_CASE("stored answers are compared, and a difference names the answer and both values") {
  TemporaryFolder place;
  const RunPlan plan = sample_score_plan();
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  AnswerBatch batch;
  for (int state = 0; state < 3; ++state)
    batch.rows.push_back({state, sample_answer(plan, {state, 2, 1})});
  CHECK(folder.put(batch) == PutOutcome::written);
  CHECK(folder.put(batch) == PutOutcome::compared);
  // Of a batch that is stored in part, only the rest is written.
  AnswerBatch more = batch;
  more.rows.push_back({0, sample_answer(plan, {0, 3, 0})});
  CHECK(folder.put(more) == PutOutcome::written);
  CHECK(part_files(folder.path()).size() == 2);
  CHECK(folder.missing_answers().size() == 42 - 4);
  auto changed = [&](auto change) {
    AnswerBatch other = batch;
    change(other.rows[1].answer);
    return message_of([&] { folder.put(other); });
  };
  std::string text = changed([](Answer& a) { a.token_ids[3] = 77777; });
  CHECK(contains(text,
                 "state nvfp4+sr, item math/m2, repeat 1: the stored answer was computed "
                 "again and differs: token 3 is 77777, stored "));
  CHECK(contains(changed([](Answer& a) { a.margins[1] += 1e-6f; }), "margin of token 1 is "));
  CHECK(contains(changed([](Answer& a) { a.text += "x"; }), "text differs at byte "));
  CHECK(contains(changed([](Answer& a) { a.finish_reason = "length"; }), "finish reason differs"));
  CHECK(contains(changed([](Answer& a) { a.extracted = "9"; }), "extracted differs"));
  CHECK(contains(changed([](Answer& a) { a.rule = "x"; }), "rule differs"));
  CHECK(contains(changed([](Answer& a) { a.stage = 7; }), "stage is 7, stored"));
  CHECK(contains(changed([](Answer& a) { a.correct = !a.correct; }), "correct is "));
  CHECK(contains(changed([](Answer& a) {
                   a.token_ids.pop_back();
                   a.margins.pop_back();
                   a.tokens -= 1;
                 }),
                 "number of token ids is "));
  CHECK(changed([](Answer& a) { a.seconds = 99; }).empty());
  CHECK(folder.put(batch) == PutOutcome::compared);

  CHECK(contains(changed([](Answer& a) { a.item = 7; }), "item 7 is not in the plan"));
  CHECK(contains(changed([](Answer& a) { a.repeat = 2; }), "expected a repeat below 2"));
  CHECK(contains(changed([](Answer& a) { a.tokens += 1; }), "token ids, expected "));
  CHECK(contains(changed([](Answer& a) { a.margins.pop_back(); }), "margins, expected "));
  AnswerBatch twice = batch;
  twice.rows[1] = twice.rows[0];
  CHECK(contains(message_of([&] { folder.put(twice); }), "is given twice"));
  CHECK(contains(message_of([&] { folder.put(AnswerBatch{}); }), "no answer"));
}

TEST_CASE("items, states and repeats grow; a changed item or task is refused by name") {
  TemporaryFolder place;
  const fs::path path = place / "run";
  const RunPlan plan = sample_score_plan({"fp32", "nvfp4+sr"}, 4, 1);
  {
    RunFolder folder = RunFolder::open(path, plan, OpenMode::fresh);
    put_answers(folder, 3);
  }
  auto refused = [&](auto change) {
    RunPlan other = plan;
    change(other);
    return message_of([&] { RunFolder::open(path, other, OpenMode::resume); });
  };
  CHECK(contains(refused([](RunPlan& p) { p.items.pop_back(); }),
                 "items differs: the folder has quiz/q3, the request has no such item"));
  CHECK(
      contains(refused([](RunPlan& p) { p.items[1].gold = "?"; }), "gold of item quiz/q1 differs"));
  CHECK(contains(refused([](RunPlan& p) { p.items[2].prompt_sha256 = "?"; }),
                 "prompt of item math/m2 differs"));
  CHECK(contains(refused([](RunPlan& p) { p.items[2].grading = "?"; }),
                 "grading of item math/m2 differs"));
  CHECK(contains(refused([](RunPlan& p) {
                   p.items[1].option_order = {0, 1, 2, 3};
                 }),
                 "item quiz/q1 differs"));
  CHECK(contains(refused([](RunPlan& p) { p.run.tasks[1].sha256 = "?"; }),
                 "definition of task math differs"));
  CHECK(contains(refused([](RunPlan& p) { p.run.tasks.pop_back(); }), "tasks differs"));
  CHECK(contains(
      message_of([&] {
        RunFolder::open(path, sample_score_plan({"fp32", "nvfp4+sr"}, 4, 0), OpenMode::resume);
      }),
      "repeats is 0, expected 1 or more"));
  CHECK(contains(message_of([&] {
                   RunPlan twice = plan;
                   twice.items.push_back(twice.items[0]);
                   RunFolder::open(path, twice, OpenMode::resume);
                 }),
                 "item math/m0 is listed twice"));

  RunPlan grown = sample_score_plan({"bf16", "fp32", "nvfp4+sr"}, 6, 2);
  std::rotate(grown.items.begin(), grown.items.begin() + 3, grown.items.end());
  RunFolder folder = RunFolder::open(path, grown, OpenMode::resume);
  CHECK(folder.missing_answers().size() == 6 * 2 * 3 - 4 * 2);
  put_answers(folder, 5);
  CHECK(answers_differ(folder.report(), undisturbed(grown)) == "");
  // The smaller plan is refused now, and its repeats too.
  CHECK(contains(refused([](RunPlan&) {}), "states differs: the folder has bf16"));
  RunPlan fewer = grown;
  fewer.run.repeats = 1;
  CHECK(contains(message_of([&] { RunFolder::open(path, fewer, OpenMode::resume); }),
                 "repeats differs: the folder has 2, the request has 1"));
  // run.json holds what it was grown to.
  const RunFolder reader = RunFolder::open_read_only(path);
  CHECK(reader.plan().items == grown.items);
  CHECK(reader.plan().run.tasks == grown.run.tasks);
  CHECK(reader.missing_answers().empty());
}

TEST_CASE(
    "kill -9 while answers are written keeps every finished batch, and the resumed report is "
    "the undisturbed one") {
  TemporaryFolder place;
  const RunPlan plan = sample_score_plan({"fp32", "nvfp4+sr"}, 400, 2);
  const fs::path path = place / "run";
  size_t before = 0;
  for (int round = 0; round < 6; ++round) {
    const pid_t pid = fork_child([&] {
      RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
      put_answers(folder, 3);
      return 0;
    });
    auto parts = [&] {
      size_t count = 0;
      std::error_code ignored;
      for (const auto& entry : fs::directory_iterator(path / "parts", ignored))
        count += entry.path().extension() == ".h5";
      return count;
    };
    for (int i = 0; i < 20000 && parts() * 3 <= before; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(
        std::chrono::microseconds(mix(static_cast<uint64_t>(round) + 77) % 40000));
    ::kill(pid, SIGKILL);
    CHECK(wait_for(pid) == 128 + SIGKILL);
    const RunFolder folder = RunFolder::open_read_only(path);
    CHECK(folder.notes().empty());
    const size_t finished = 1600 - folder.missing_answers().size();
    CHECK(finished >= before);
    before = finished;
    size_t reported = 0;
    const Report report = folder.report();
    for (size_t s = 0; s < 2; ++s) {
      for (const Answer& answer : report.states[s].answers) {
        REQUIRE(same_answer(answer, sample_answer(plan, {static_cast<int>(s), answer.item,
                                                         answer.repeat})) == "");
        ++reported;
      }
    }
    CHECK(reported == finished);
  }
  CHECK(before > 0);
  CHECK(before < 1600);
  const Report expected = undisturbed(plan);
  RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
  put_answers(folder, 100);
  CHECK(answers_differ(folder.report(), expected) == "");
  if (std::system("h5diff --version > /dev/null 2>&1") != 0) {
    std::fprintf(stderr, "SKIPPED: no h5diff on this machine\n");
    return;
  }
  const fs::path a = folder.assemble();
  write_report(expected, place / "expected.h5");
  // Only times differ: created and the seconds of answers (h5diff 1.10 returns 1 for differences).
  for (const char* object : {"/items", "/tasks", "/states/00/answers", "/states/01/answers"}) {
    const std::string command =
        "h5diff " +
        std::string(contains(object, "answers")
                        ? "--exclude-path " + std::string(object) + "/seconds "
                        : "") +
        a.string() + " " + (place / "expected.h5").string() + " " + object + " " + object + " > " +
        (place / "diff").string() + " 2>&1";
    CAPTURE(command);
    CHECK(std::system(command.c_str()) == 0);
    CHECK(as_text(*read_file(place / "diff")) == "");
  }
}

TEST_CASE("truncated and flipped parts of answers are left out, named, and computed again") {
  TemporaryFolder place;
  const RunPlan plan = sample_score_plan();
  const fs::path path = place / "run";
  {
    RunFolder folder = RunFolder::open(path, plan, OpenMode::fresh);
    put_answers(folder, 6);
  }
  const Report expected = undisturbed(plan);
  const std::vector<fs::path> files = part_files(path);
  REQUIRE(files.size() == 7);
  for (uint64_t trial = 0; trial < 30; ++trial) {
    const fs::path& file = files[mix(trial) % files.size()];
    std::vector<std::byte> bytes = *read_file(file);
    const size_t at = mix(trial + 1000) % bytes.size();
    if (trial % 3 == 0) {
      bytes.resize(at);
    } else {
      bytes[at] ^= static_cast<std::byte>(1u << (mix(trial + 2000) % 8));
    }
    {
      std::ofstream out(file, std::ios::binary | std::ios::trunc);
      out.write(reinterpret_cast<const char*>(bytes.data()),
                static_cast<std::streamsize>(bytes.size()));
    }
    CAPTURE(trial);
    CAPTURE(at);
    {
      const RunFolder reader = RunFolder::open_read_only(path);
      REQUIRE(reader.notes().size() == 1);
      CHECK(contains(reader.notes()[0], file.filename().string()));
      CHECK(contains(reader.notes()[0], "left out"));
      CHECK(reader.missing_answers().size() == 6);
    }
    RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
    REQUIRE(folder.notes().size() == 1);
    CHECK(contains(folder.notes()[0], "removed, what it held is computed again"));
    CHECK(folder.missing_answers().size() == 6);
    put_answers(folder, 6);
    REQUIRE(answers_differ(folder.report(), expected) == "");
  }
}

TEST_CASE("several processes answer into one folder, each batch once, one of them killed") {
  TemporaryFolder place;
  const RunPlan plan = sample_score_plan({"fp32", "nvfp4+sr"}, 30, 1);
  const fs::path path = place / "run";
  auto work = [&](bool slow) {
    RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
    for (int attempt = 0; attempt < 500; ++attempt) {
      folder.refresh();
      std::set<int> items;
      for (const AnswerKey& key : folder.missing_answers()) items.insert(key.item);
      if (items.empty()) return 0;
      for (int item : items) {
        const std::optional<Claim> claim = folder.claim("item " + std::to_string(item));
        if (!claim) continue;
        folder.refresh();
        AnswerBatch batch;
        for (int s = 0; s < 2; ++s) batch.rows.push_back({s, sample_answer(plan, {s, item, 0})});
        folder.put(batch);
        if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        if (!claim->held()) return 5;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return 6;
  };
  const pid_t victim = fork_child([&] { return work(true); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const pid_t a = fork_child([&] { return work(false); });
  const pid_t b = fork_child([&] { return work(false); });
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  ::kill(victim, SIGKILL);
  CHECK(wait_for(victim) == 128 + SIGKILL);
  CHECK(wait_for(a) == 0);
  CHECK(wait_for(b) == 0);
  CHECK(answers_differ(RunFolder::open_read_only(path).report(), undisturbed(plan)) == "");
}

TEST_CASE("answers that another process has put meanwhile are compared, not written again") {
  TemporaryFolder place;
  const RunPlan plan = sample_score_plan();
  RunFolder mine = RunFolder::open(place / "run", plan, OpenMode::fresh);
  RunFolder other = RunFolder::open(place / "run", plan, OpenMode::resume);
  auto batch = [&](int item) {
    AnswerBatch rows;
    rows.rows.push_back({0, sample_answer(plan, {0, item, 0})});
    return rows;
  };
  CHECK(mine.put(batch(0)) == PutOutcome::written);
  CHECK(mine.put(batch(1)) == PutOutcome::written);
  CHECK(other.put(batch(2)) == PutOutcome::written);
  CHECK(mine.put(batch(2)) == PutOutcome::compared);
  CHECK(other.put(batch(1)) == PutOutcome::compared);
  AnswerBatch changed = batch(3);
  CHECK(other.put(changed) == PutOutcome::written);
  changed.rows[0].answer.token_ids[0] += 1;
  CHECK(contains(message_of([&] { mine.put(changed); }), "token 0 is "));
  CHECK(part_files(place / "run").size() == 4);
}

TEST_CASE("a full disk and a read-only folder: one line, and finished answers stay") {
  TemporaryFolder place;
  const fs::path disk = place / "disk";
  fs::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=640k") != 0) {
    std::fprintf(stderr, "SKIPPED: a small tmpfs cannot be mounted here (%s)\n",
                 std::strerror(errno));
    return;
  }
  struct Unmount {
    fs::path path;
    ~Unmount() { ::umount2(path.c_str(), MNT_DETACH); }
  } unmount{disk};
  const RunPlan plan = sample_score_plan({"fp32", "nvfp4+sr"}, 100, 2);
  {
    RunFolder folder = RunFolder::open(disk / "run", plan, OpenMode::fresh);
    const std::string text = message_of([&] { put_answers(folder, 5); });
    CAPTURE(text);
    CHECK(contains(text, "cannot be written: No space left on device"));
    CHECK(contains(text, "--resume"));
    CHECK(text.find('\n') == std::string::npos);
    for (const auto& entry : fs::directory_iterator(disk / "run/parts"))
      CHECK_FALSE(entry.path().filename().string().starts_with("."));
  }
  size_t left = 0;
  {
    const RunFolder folder = RunFolder::open_read_only(disk / "run");
    left = folder.missing_answers().size();
    CHECK(left < 400);
    CHECK(left > 0);
    CHECK(folder.notes().empty());
  }
  REQUIRE(::mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=640k") == 0);
  CHECK(contains(message_of([&] { RunFolder::open(disk / "run", plan, OpenMode::resume); }),
                 "not writable: Read-only file system"));
  size_t stored = 0;
  for (const StateReport& state : load_report(disk / "run").states) stored += state.answers.size();
  CHECK(stored == 400 - left);
  REQUIRE(::mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT, "size=40m") == 0);
  RunFolder folder = RunFolder::open(disk / "run", plan, OpenMode::resume);
  CHECK(folder.missing_answers().size() == left);
  REQUIRE(::mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=40m") == 0);
  CHECK(contains(message_of([&] { put_answers(folder, 5); }),
                 "cannot be written: Read-only file system; finished parts are kept"));
  REQUIRE(::mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT, "size=40m") == 0);
  put_answers(folder, 50);
  CHECK(answers_differ(folder.report(), undisturbed(plan)) == "");
}

TEST_CASE("answers and spans live in one folder, and documents keep their prompts") {
  TemporaryFolder place;
  RunPlan plan = sample_score_plan();
  const RunPlan spans = sample_plan({"fp32", "nvfp4+sr", "fp16+sr/nvfp4"});
  plan.documents = spans.documents;
  plan.layers = spans.layers;
  plan.unit_tokens = spans.unit_tokens;
  plan.documents[1].prompt_tokens = 20;
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  put_all(folder);
  put_answers(folder);
  CHECK(folder.missing().empty());
  CHECK(folder.missing_answers().empty());
  const Report report = folder.report(), loaded = load_report(folder.assemble());
  CHECK(answers_differ(report, loaded) == "");
  CHECK(loaded.documents[1].prompt_tokens == 20);
  CHECK(loaded.states[0].documents[0].first_position == 0);
  CHECK(loaded.states[0].documents[1].first_position == 20);
  CHECK(loaded.states[0].documents[1].length == 70);
  // Opened again by a process that only reads: parts of both kinds are known.
  const RunFolder again = RunFolder::open(place / "run", plan, OpenMode::resume);
  CHECK(again.missing().empty());
  CHECK(again.missing_answers().empty());
  RunPlan other = plan;
  other.documents[1].prompt_tokens = 19;
  CHECK(contains(message_of([&] { RunFolder::open(place / "run", other, OpenMode::resume); }),
                 "prompt tokens of document 3609 differs: the folder has 20, the request has 19"));
}
