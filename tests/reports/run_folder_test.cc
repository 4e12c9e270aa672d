#include "reports/run_folder.h"

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
#include "reports/hdf5_image.h"
#include "reports/schema.h"
#include "reports/tables.h"
#include "tests/reports/sample_run.h"
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
  put_all(folder);
  return folder.report();
}

/// Runs `child` in a forked process, which ends with its return value.
template <class Child>
pid_t fork_child(Child child) {
  std::fflush(nullptr);
  pid_t pid = ::fork();
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

TEST_CASE("parts written are read back, assembled and loaded equal") {
  TemporaryFolder place;
  const RunPlan plan = sample_plan();
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  CHECK(folder.missing().size() == 4 + 3);
  put_all(folder);
  CHECK(folder.missing().empty());
  CHECK(folder.finished().size() == 7);
  CHECK(folder.finished_tokens(0) == 100);

  const Report report = folder.report();
  for (int d = 0; d < 2; ++d) {
    for (int64_t first = 0; first < plan.documents[d].tokens; first += plan.unit_tokens) {
      const KlSpan span = sample_span(plan, d, first);
      for (const StateSpan& state : span.states) {
        const StateDocument& document = report.states[state.state].documents[d];
        for (int64_t i = 0; i < span.count(); ++i) {
          REQUIRE(same_float(document.kl[first + i], state.kl[i]));
          REQUIRE(same_float(document.nll[first + i], state.nll[i]));
          REQUIRE(document.top1[first + i] == state.top1[i]);
          REQUIRE(report.token_ids[d][first + i] == span.tokens[i]);
        }
      }
    }
  }
  // Head h of layer l has the decay 0.5 + (3 l + h) / 16 at every position; layer 1 has two heads.
  CHECK(report.layers[0].mean_decay == std::vector<float>{0.5f, 0.5625f, 0.625f});
  CHECK(report.layers[1].mean_decay == std::vector<float>{0.6875f, 0.75f});
  CHECK(report.states[2].health()[1].first_non_finite_position == 40);
  CHECK(report.states[2].health()[1].first_non_finite_head == 1);
  CHECK(report.states[2].health()[1].non_finite == 4);
  CHECK(report.states[2].health()[0].elements == 64 * 170);

  const fs::path path = folder.assemble("2026-11-29T19:00:00Z");
  const Report loaded = load_report(path);
  CHECK(figures_differ(report, loaded) == "");
  CHECK(loaded.run.experiment == plan.run.experiment);
  for (std::string RunInfo::*field :
       {&RunInfo::job, &RunInfo::created, &RunInfo::model, &RunInfo::family, &RunInfo::tokenizer,
        &RunInfo::tokenizer_sha256, &RunInfo::data, &RunInfo::data_sha256, &RunInfo::revision,
        &RunInfo::compiler, &RunInfo::device, &RunInfo::compute, &RunInfo::dense,
        &RunInfo::baseline}) {
    CHECK(loaded.run.*field == plan.run.*field);
    CHECK_FALSE((plan.run.*field).empty());
  }
  CHECK(loaded.run.threads == 2);
  CHECK(loaded.run.window == 16);
  CHECK(loaded.run.seed == plan.run.seed);
  CHECK(loaded.run.versions == plan.run.versions);
  CHECK(loaded.run.notes == plan.run.notes);
  CHECK(as_text(run_table(loaded)).find("not asked: item 7: no answer") != std::string::npos);
  CHECK(loaded.run.finished == "2026-11-29T19:00:00Z");
  CHECK(loaded.run.model_sha256 == plan.run.model_sha256);
  CHECK(loaded.run.vocabulary == 4096);
  CHECK(loaded.documents[1].title == "Book 3609");
  CHECK(loaded.documents[1].stream == stream_of("3609"));
  CHECK(loaded.states[3].info.bytes_per_sequence == 1234567890123);
  CHECK(loaded.states[3].info.read == "nvfp4");
  CHECK(loaded.states[3].info.options.at("gdn_fold") == "rederive");
  CHECK(loaded.find_state("nvfp4+sr") == 2);
  CHECK(loaded.find_state("nvfp4") == -1);
  CHECK(loaded.baseline() == 0);
  CHECK(figures_differ(report, load_report(place / "run")) == "");
  CHECK(load_report(place / "run").run.finished == "2026-11-29T19:00:00Z");
}

TEST_CASE("equal figures give equal bytes, whenever they are written") {
  TemporaryFolder place;
  RunFolder folder = RunFolder::open(place / "run", sample_plan(), OpenMode::fresh);
  put_all(folder);
  const std::vector<std::byte> first = *read_file(folder.assemble());
  // HDF5 can store times of a resolution of one second.
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  RunFolder other = RunFolder::open(place / "other", sample_plan(), OpenMode::fresh);
  put_all(other);
  CHECK(first == *read_file(other.assemble()));
}

TEST_CASE("a partial run reports what it has from the start without a gap") {
  TemporaryFolder place;
  const RunPlan plan = sample_plan();
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  folder.put(sample_span(plan, 0, 0));
  folder.put(sample_span(plan, 0, 32, {0, 2}));
  folder.put(sample_span(plan, 0, 96));  // behind a gap
  const Report report = folder.report();
  CHECK(report.states[0].documents[0].length == 64);
  CHECK(report.states[1].documents[0].length == 32);
  CHECK(report.states[2].documents[0].length == 64);
  CHECK(report.states[2].documents[1].length == 0);
  CHECK(report.token_ids[0].size() == 64);
  CHECK(folder.finished_tokens(0) == 32);
  const std::vector<Unit> missing = folder.missing();
  REQUIRE(missing.size() == 2 + 3);
  CHECK(missing[0].first == 32);
  CHECK(missing[0].states == std::vector<int>{1, 3});
  CHECK(missing[1].first == 64);
  CHECK(missing[1].states.size() == 4);
  CHECK(figures_differ(report, load_report(folder.assemble())) == "");
}

TEST_CASE("the report is readable by h5dump") {
  if (std::system("h5dump --version > /dev/null 2>&1") != 0) {
    std::fprintf(stderr, "SKIPPED: no h5dump on this machine\n");
    return;
  }
  TemporaryFolder place;
  RunFolder folder = RunFolder::open(place / "run", sample_plan(), OpenMode::fresh);
  put_all(folder);
  const fs::path report = folder.assemble();
  auto dump = [&](const std::string& options, const fs::path& file) {
    const fs::path text = place / "dump.txt";
    CHECK(std::system(("h5dump " + options + " " + file.string() + " > " + text.string() + " 2>&1")
                          .c_str()) == 0);
    return as_text(*read_file(text));
  };
  CHECK(contains(dump("-a /schema", report), "\"replayeval/1\""));
  CHECK(contains(dump("-a /states/00/kl/first_position", report), "0, 0"));
  CHECK(contains(dump("-a /states/00/nll/length", report), "99, 69"));
  CHECK(contains(dump("-H -p -d /states/02/kl", report), "COMPRESSION DEFLATE"));
  CHECK(contains(dump("-d /states/02/health", report), "\"first_non_finite_position\""));
  CHECK(contains(dump("-a /document", part_files(folder.path()).front()), "\"3608\""));
}

TEST_CASE("finished spans are compared, and a difference names span, state and values") {
  TemporaryFolder place;
  const RunPlan plan = sample_plan();
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  CHECK(folder.put(sample_span(plan, 1, 32)) == PutOutcome::written);
  CHECK(folder.put(sample_span(plan, 1, 32)) == PutOutcome::compared);
  auto changed = [&](auto change) {
    KlSpan span = sample_span(plan, 1, 32);
    change(span);
    return message_of([&] { folder.put(span); });
  };
  std::string text = changed([](KlSpan& s) { s.states[2].kl[5] += 1e-9f; });
  CHECK(contains(text, "document 3609, positions 32 to 63"));
  CHECK(contains(text, "state nvfp4+sr: kl at position 37 is "));
  CHECK(contains(changed([](KlSpan& s) { s.states[1].nll[0] = 0; }),
                 "fp32@L=1: nll at position 32 is 0 (0x00000000)"));
  CHECK(contains(changed([](KlSpan& s) { s.states[0].top1[31] = 0; }),
                 "fp32: top1 at position 63 is 0, stored 1"));
  CHECK(contains(changed([](KlSpan& s) { s.states[3].health[1].clipped = 9; }),
                 "health of layer number 1"));
  CHECK(contains(changed([](KlSpan& s) { s.states[3].error[0] = 9; }), "state_error value 0 is 9"));
  CHECK(contains(changed([](KlSpan& s) { s.states[3].error_read[1] = 9; }),
                 "state_error_read value 1 is 9"));
  CHECK(contains(changed([](KlSpan& s) { s.tokens[3] = -5; }), "token at position 35 is -5"));
  CHECK(changed([](KlSpan& s) { s.seconds = 99; }).empty());
  // Nothing was changed by the refused ones.
  CHECK(folder.put(sample_span(plan, 1, 32)) == PutOutcome::compared);
  CHECK(contains(changed([](KlSpan& s) { s.states[0].kl.pop_back(); }),
                 "fp32: kl has 31 values, expected 32"));
  CHECK(contains(changed([](KlSpan& s) { s.first = 33; }), "no unit begins there"));
}

TEST_CASE("a folder of other settings is refused by field; growth and free settings are accepted") {
  TemporaryFolder place;
  const fs::path path = place / "run";
  const RunPlan plan = sample_plan();
  {
    RunFolder folder = RunFolder::open(path, plan, OpenMode::fresh);
    put_all(folder);
  }
  CHECK(contains(message_of([&] { RunFolder::open(path, plan, OpenMode::fresh); }),
                 "holds a run already"));
  auto refused = [&](auto change) {
    RunPlan other = plan;
    change(other);
    return message_of([&] { RunFolder::open(path, other, OpenMode::resume); });
  };
  std::string text = refused([](RunPlan& p) { p.settings[0].value = "8"; });
  CHECK(contains(text, "window differs: the folder has 16, the request has 8"));
  CHECK(contains(refused([](RunPlan& p) { p.run.seed = 7; }),
                 "seed differs: the folder has 18446744073709551615, the request has 7"));
  CHECK(contains(refused([](RunPlan& p) { p.settings[3].value = "validation"; }),
                 "data.split differs"));
  CHECK(contains(refused([](RunPlan& p) {
                   p.settings.push_back({"ring", "fp32"});
                 }),
                 "ring differs: the folder has (nothing), the request has fp32"));
  CHECK(contains(refused([](RunPlan& p) { p.settings.erase(p.settings.begin() + 3); }),
                 "data.split differs"));
  CHECK(contains(refused([](RunPlan& p) { p.run.model_sha256 = "x"; }), "model_sha256 differs"));
  CHECK(contains(refused([](RunPlan& p) { p.states[2].sha256 = "x"; }),
                 "states: definition of nvfp4+sr differs"));
  CHECK(contains(refused([](RunPlan& p) { p.states.erase(p.states.begin() + 2); }),
                 "states differs: the folder has nvfp4+sr, the request has no such state"));
  CHECK(contains(refused([](RunPlan& p) { p.documents[1].sha256 = "x"; }),
                 "documents: sha256 of 3609 differs"));
  CHECK(contains(refused([](RunPlan& p) { p.documents[0].tokens = 99; }),
                 "tokens of document 3608 differs: the folder has 100, the request has 99"));
  CHECK(contains(refused([](RunPlan& p) { p.unit_tokens = 64; }), "unit_tokens differs"));

  RunPlan grown =
      sample_plan({"bf16", "fp32", "fp32@L=1", "nvfp4+sr", "fp32/nvfp4"}, {140, 70, 50});
  grown.settings[2].value = "8";
  grown.run.threads = 8;
  RunFolder folder = RunFolder::open(path, grown, OpenMode::resume);
  // bf16 everywhere; all states where document 3608 grew (its unit at 96 was cut short, 128 is new)
  // and in the new document.
  std::vector<Unit> missing = folder.missing();
  REQUIRE(missing.size() == 5 + 3 + 2);
  CHECK(missing[0].states == std::vector<int>{0});
  CHECK(missing[3].first == 96);
  CHECK(missing[3].states.size() == 5);
  CHECK(folder.report().states[1].documents[0].length ==
        99);  // the old last position has no nll yet
  // As a run without snapshot does it: from the start, all states.
  int written = 0, compared = 0;
  for (int d = 0; d < 3; ++d) {
    for (int64_t first = 0; first < grown.documents[d].tokens; first += grown.unit_tokens) {
      const std::vector<int> states =
          first == 0 ? std::vector<int>{} : std::vector<int>{1, 2, 3, 4};
      (folder.put(sample_span(grown, d, first, states)) == PutOutcome::written ? written
                                                                               : compared) += 1;
    }
  }
  CHECK(written == 3 + 2 + 1);
  CHECK(compared == 2 + 2);
  put_all(folder);
  CHECK(folder.missing().empty());
  CHECK(figures_differ(folder.report(), undisturbed(grown)) == "");
  RunFolder again = RunFolder::open(path, grown, OpenMode::resume);
  CHECK(again.missing().empty());
  CHECK(again.notes().empty());
  CHECK(figures_differ(again.report(), undisturbed(grown)) == "");
}

TEST_CASE("growth at a unit's boundary recomputes the unit whose last nll was unknown") {
  TemporaryFolder place;
  const RunPlan plan = sample_plan({"fp32", "nvfp4+sr"}, {64});
  {
    RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
    put_all(folder);
  }
  const RunPlan grown = sample_plan({"fp32", "nvfp4+sr"}, {96});
  RunFolder folder = RunFolder::open(place / "run", grown, OpenMode::resume);
  const std::vector<Unit> missing = folder.missing();
  REQUIRE(missing.size() == 2);
  CHECK(missing[0].first == 32);
  CHECK(folder.finished_tokens(0) == 32);
  put_all(folder);
  CHECK(figures_differ(folder.report(), undisturbed(grown)) == "");
  CHECK(!std::isnan(folder.report().states[1].documents[0].nll[63]));
}

TEST_CASE("kill -9 in the middle of writing leaves every finished part whole") {
  TemporaryFolder place;
  const RunPlan plan = sample_plan({"fp32", "nvfp4+sr"}, {40000}, 16);
  const fs::path path = place / "run";
  const Report expected = undisturbed(sample_plan({"fp32", "nvfp4+sr"}, {1600}, 16));
  size_t before = 0;
  for (int round = 0; round < 8; ++round) {
    pid_t pid = fork_child([&] {
      RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
      put_all(folder);
      return 0;
    });
    // Once a part more is there, after a random moment of the next ones.
    auto parts = [&] {
      size_t count = 0;
      std::error_code ignored;
      for (const auto& entry : fs::directory_iterator(path / "parts", ignored))
        count += entry.path().extension() == ".h5";
      return count;
    };
    for (int i = 0; i < 20000 && parts() <= before; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(
        std::chrono::microseconds(mix(static_cast<uint64_t>(round)) % 40000));
    ::kill(pid, SIGKILL);
    CHECK(wait_for(pid) == 128 + SIGKILL);
    if (!RunFolder::holds_run(path)) continue;
    RunFolder folder = RunFolder::open_read_only(path);
    CHECK(folder.notes().empty());
    const size_t finished = folder.finished().size();
    CHECK(finished >= before);
    before = finished;
    const Report report = folder.report();
    for (size_t s = 0; s < 2; ++s) {
      const StateDocument& document = report.states[s].documents[0];
      CHECK(document.length == static_cast<int64_t>(finished) * 16);
      for (size_t t = 0; t < std::min<size_t>(document.kl.size(), 1599); ++t) {
        REQUIRE(same_float(document.kl[t], expected.states[s].documents[0].kl[t]));
        REQUIRE(same_float(document.nll[t], expected.states[s].documents[0].nll[t]));
      }
    }
  }
  CHECK(before > 0);
  // Temporary files of the dead are cleared away by the next process.
  RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
  for (const fs::path& file : part_files(path)) CHECK(file.extension() == ".h5");
  for (const auto& entry : fs::directory_iterator(path / "parts")) {
    CHECK_FALSE(entry.path().filename().string().starts_with("."));
  }
}

TEST_CASE("truncated and bit-flipped parts are detected, reported and computed again") {
  TemporaryFolder place;
  const RunPlan plan = sample_plan();
  const fs::path path = place / "run";
  {
    RunFolder folder = RunFolder::open(path, plan, OpenMode::fresh);
    put_all(folder);
  }
  const Report expected = undisturbed(plan);
  const std::vector<fs::path> files = part_files(path);
  std::set<std::string> kinds;
  for (uint64_t trial = 0; trial < 30; ++trial) {
    const fs::path& file = files[mix(trial) % files.size()];
    std::vector<std::byte> bytes = *read_file(file);
    const size_t at = mix(trial + 1000) % bytes.size();
    if (trial % 3 == 0) {
      bytes.resize(at);
      kinds.insert("truncated");
    } else {
      bytes[at] ^= static_cast<std::byte>(1u << (mix(trial + 2000) % 8));
      kinds.insert("flipped");
    }
    {
      std::ofstream out(file, std::ios::binary | std::ios::trunc);
      out.write(reinterpret_cast<const char*>(bytes.data()),
                static_cast<std::streamsize>(bytes.size()));
    }
    {
      RunFolder reader = RunFolder::open_read_only(path);
      CAPTURE(trial);
      CAPTURE(at);
      REQUIRE(reader.notes().size() == 1);
      CHECK(contains(reader.notes()[0], file.filename().string()));
      CHECK(contains(reader.notes()[0], "left out"));
      CHECK(reader.missing().size() == 1);
    }
    RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
    REQUIRE(folder.notes().size() == 1);
    CHECK(contains(folder.notes()[0], "computed again"));
    CHECK(folder.missing().size() == 1);
    put_all(folder);
    REQUIRE(figures_differ(folder.report(), expected) == "");
  }
  CHECK(kinds.size() == 2);

  // The assembled report carries the same protection.
  RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
  const fs::path report = folder.assemble();
  std::vector<std::byte> bytes = *read_file(report);
  bytes[bytes.size() / 2] ^= std::byte{4};
  replace_file(report, bytes);
  CHECK(contains(message_of([&] { read_report(report); }), "damaged: checksum is"));
}

TEST_CASE("a part of another run is left out") {
  TemporaryFolder place;
  RunPlan other = sample_plan();
  other.settings[0].value = "8";
  other.run.window = 8;
  RunFolder foreign = RunFolder::open(place / "other", other, OpenMode::fresh);
  foreign.put(sample_span(other, 0, 0));
  RunFolder folder = RunFolder::open(place / "run", sample_plan(), OpenMode::fresh);
  fs::copy_file(part_files(place / "other").front(), place / "run/parts/copied.h5");
  folder.refresh();
  REQUIRE(folder.notes().size() == 1);
  CHECK(contains(folder.notes()[0], "copied.h5: belongs to a run of other settings"));
  CHECK(folder.finished().empty());
}

TEST_CASE("several processes fill one folder, each unit once, also when one of them is killed") {
  TemporaryFolder place;
  const RunPlan plan = sample_plan({"fp32", "nvfp4+sr"}, std::vector<int64_t>(24, 64), 32);
  const fs::path path = place / "run";
  const fs::path log = place / "log";
  auto work = [&](int worker, bool slow) {
    RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
    // Documents are the unit that is claimed; keep trying until nothing is missing.
    for (int attempt = 0; attempt < 500; ++attempt) {
      folder.refresh();
      std::set<int> documents;
      for (const Unit& unit : folder.missing()) documents.insert(unit.document);
      if (documents.empty()) return 0;
      for (int d : documents) {
        std::optional<Claim> claim = folder.claim("document " + plan.documents[d].id);
        if (!claim) continue;
        folder.refresh();
        for (int64_t first = 0; first < 64; first += 32) {
          if (folder.put(sample_span(plan, d, first)) == PutOutcome::written) {
            std::string line = std::to_string(worker) + " " + std::to_string(d) + "\n";
            int fd = ::open(log.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0644);
            if (::write(fd, line.data(), line.size()) < 0) return 4;
            ::close(fd);
          }
          if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        }
        if (!claim->held()) return 5;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return 6;
  };
  pid_t victim = fork_child([&] { return work(0, true); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  pid_t a = fork_child([&] { return work(1, false); });
  pid_t b = fork_child([&] { return work(2, false); });
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  ::kill(victim, SIGKILL);
  CHECK(wait_for(victim) == 128 + SIGKILL);
  CHECK(wait_for(a) == 0);
  CHECK(wait_for(b) == 0);
  CHECK(figures_differ(RunFolder::open_read_only(path).report(), undisturbed(plan)) == "");
  std::ifstream lines(log);
  int worker = 0, document = 0;
  std::map<int, int> writes, workers;
  while (lines >> worker >> document) {
    writes[document] += 1;
    workers[worker] += 1;
  }
  for (const auto& [d, count] : writes) CHECK(count <= 2);
  CHECK(workers[1] + workers[2] > 0);
}

TEST_CASE("claims exclude one another, and stale ones are taken over") {
  TemporaryFolder place;
  RunFolder folder = RunFolder::open(place / "run", sample_plan(), OpenMode::fresh);
  RunFolder other = RunFolder::open(place / "run", sample_plan(), OpenMode::resume);
  {
    std::optional<Claim> first = folder.claim("document 1/part a");
    REQUIRE(first);
    CHECK(first->held());
    CHECK_FALSE(other.claim("document 1/part a"));
    CHECK(other.claim("document 2"));
  }
  std::optional<Claim> second = other.claim("document 1/part a");
  REQUIRE(second);

  // A heartbeat that stood still: the file is set back by an hour, and the other takes it.
  fs::path file;
  for (const auto& entry : fs::directory_iterator(place / "run/claims")) file = entry.path();
  const timespec past[2] = {{::time(nullptr) - 3600, 0}, {::time(nullptr) - 3600, 0}};
  REQUIRE(::utimensat(AT_FDCWD, file.c_str(), past, 0) == 0);
  std::optional<Claim> third = folder.claim("document 1/part a");
  REQUIRE(third);
  CHECK(third->held());
  CHECK_FALSE(second->held());
  second->release();  // does not remove the claim of the other
  CHECK_FALSE(other.claim("document 1/part a"));
  third->release();
  CHECK(other.claim("document 1/part a"));

  // The claim of a killed process of this machine is free at once.
  pid_t pid = fork_child([&] {
    RunFolder mine = RunFolder::open(place / "run", sample_plan(), OpenMode::resume);
    std::optional<Claim> claim = mine.claim("document 9");
    ::kill(::getpid(), SIGKILL);
    return 0;
  });
  CHECK(wait_for(pid) == 128 + SIGKILL);
  CHECK(folder.claim("document 9"));
}

TEST_CASE("snapshots are replaced whole and recognised when broken") {
  TemporaryFolder place;
  RunFolder folder = RunFolder::open(place / "run", sample_plan(), OpenMode::fresh);
  CHECK_FALSE(folder.get_snapshot("document 1"));
  std::vector<std::byte> bytes(100000, std::byte{7});
  folder.put_snapshot("document 1", bytes);
  bytes[5] = std::byte{9};
  folder.put_snapshot("document 1", bytes);
  CHECK(folder.get_snapshot("document 1") == bytes);
  fs::path file;
  for (const auto& entry : fs::directory_iterator(place / "run/snapshots")) file = entry.path();
  // In the place of another.
  folder.put_snapshot("document 2", std::vector<std::byte>(100000, std::byte{8}));
  for (const auto& entry : fs::directory_iterator(place / "run/snapshots")) {
    if (entry.path() != file)
      fs::copy_file(file, entry.path(), fs::copy_options::overwrite_existing);
  }
  CHECK_FALSE(folder.get_snapshot("document 2"));
  folder.remove_snapshot("document 2");
  std::vector<std::byte> raw = *read_file(file);
  raw[raw.size() - 3] ^= std::byte{1};
  replace_file(file, raw);
  CHECK_FALSE(folder.get_snapshot("document 1"));
  CHECK(contains(folder.notes().back(), "checksum differs"));
  folder.remove_snapshot("document 1");
  CHECK_FALSE(fs::exists(file));
}

TEST_CASE("a full disk and a read-only folder are one clear line, and finished parts stay") {
  TemporaryFolder place;
  const fs::path disk = place / "disk";
  fs::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=320k") != 0) {
    std::fprintf(stderr, "SKIPPED: a small tmpfs cannot be mounted here (%s)\n",
                 std::strerror(errno));
    return;
  }
  struct Unmount {
    fs::path path;
    ~Unmount() { ::umount2(path.c_str(), MNT_DETACH); }
  } unmount{disk};
  const RunPlan plan = sample_plan({"fp32", "nvfp4+sr"}, {16000}, 256);
  {
    RunFolder folder = RunFolder::open(disk / "run", plan, OpenMode::fresh);
    std::string text = message_of([&] { put_all(folder); });
    CAPTURE(text);
    CHECK(contains(text, "cannot be written: No space left on device"));
    CHECK(contains(text, "--resume"));
    CHECK(text.find('\n') == std::string::npos);
    CHECK(contains(message_of([&] { folder.assemble(); }), "No space left on device"));
    for (const auto& entry : fs::directory_iterator(disk / "run/parts")) {
      CHECK_FALSE(entry.path().filename().string().starts_with("."));
    }
  }
  size_t kept = 0;
  {
    RunFolder folder = RunFolder::open_read_only(disk / "run");
    kept = folder.finished().size();
    CHECK(kept > 3);
    CHECK(folder.notes().empty());
  }
  REQUIRE(::mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=320k") == 0);
  std::string text = message_of([&] { RunFolder::open(disk / "run", plan, OpenMode::resume); });
  CAPTURE(text);
  CHECK(contains(text, "not writable: Read-only file system"));
  CHECK(load_report(disk / "run").states[0].documents[0].length ==
        static_cast<int64_t>(kept) * 256);
  REQUIRE(::mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT, "size=40m") == 0);
  RunFolder folder = RunFolder::open(disk / "run", plan, OpenMode::resume);
  CHECK(folder.finished().size() == kept);
  put_all(folder);
  CHECK(figures_differ(folder.report(), undisturbed(plan)) == "");

  // Made read-only while a run is under way.
  TemporaryFolder spare;
  RunPlan more = plan;
  more.documents.push_back(more.documents[0]);
  more.documents.back().id = "another";
  RunFolder busy = RunFolder::open(disk / "run", more, OpenMode::resume);
  REQUIRE(::mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=40m") == 0);
  text = message_of([&] { busy.put(sample_span(more, 1, 0)); });
  CHECK(contains(text, "cannot be written: Read-only file system; finished parts are kept"));
}

TEST_CASE("a file is replaced behind a link, and a pipe is written to and stays one") {
  TemporaryFolder place;
  const std::string text = "contents";
  std::ofstream(place / "file") << "old";
  fs::create_symlink("file", place / "link");
  replace_file(place / "link", as_byte_span(text));
  CHECK(fs::is_symlink(place / "link"));
  CHECK(as_text(read_file(place / "file").value()) == text);
  fs::create_symlink("new", place / "dangling");
  replace_file(place / "dangling", as_byte_span(text));
  CHECK(fs::is_symlink(place / "dangling"));
  CHECK(as_text(read_file(place / "new").value()) == text);

  const fs::path pipe = place / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  REQUIRE(reader >= 0);
  replace_file(pipe, as_byte_span(text));
  char got[16] = {};
  CHECK(::read(reader, got, sizeof got) == static_cast<ssize_t>(text.size()));
  ::close(reader);
  CHECK(got == text);
  CHECK(fs::is_fifo(pipe));
  CHECK(std::distance(fs::directory_iterator(place / "."), fs::directory_iterator()) == 5);
}

TEST_CASE("files that are no report are refused with what they are") {
  TemporaryFolder place;
  CHECK(contains(message_of([&] { load_report(place / "nothing"); }), "no such file"));
  CHECK(contains(message_of([&] { load_report(place.path()); }),
                 "holds neither run.json nor report.h5"));
  std::ofstream(place / "text.h5") << "hello";
  CHECK(contains(message_of([&] { load_report(place / "text.h5"); }), "holds no checksum"));

  // A text that is no JSON, under a checksum of its own.
  Report whole;
  whole.run.notes = {"a note"};
  write_report(whole, place / "broken.h5");
  std::vector<std::byte> bytes = *read_file(place / "broken.h5");
  const auto behind = [&](const std::string& text) {
    const std::span<const std::byte> what = as_byte_span(text);
    const auto at = std::search(bytes.begin(), bytes.end(), what.begin(), what.end());
    REQUIRE(at != bytes.end());
    return at + static_cast<ptrdiff_t>(text.size());
  };
  *behind("[\"a note\"") = std::byte{')'};
  std::fill_n(behind("replayeval-sha256:"), 64, std::byte{'0'});
  seal_checksum(bytes);
  replace_file(place / "broken.h5", bytes);
  CHECK(contains(message_of([&] { load_report(place / "broken.h5"); }),
                 "broken.h5: is no report of this program or is damaged: "));
  fs::create_directory(place / "run");
  std::ofstream(place / "run/run.json") << "{\"schema\": \"replayeval/7\"}";
  CHECK(contains(message_of([&] { RunFolder::open_read_only(place / "run"); }),
                 "schema is replayeval/7, expected replayeval/1"));
  std::ofstream(place / "blocked") << "x";
  CHECK(contains(
      message_of([&] { RunFolder::open(place / "blocked", sample_plan(), OpenMode::fresh); }),
      "the folder cannot be created"));
}

TEST_CASE("numbers of run.json that no run has are refused by field, and changes by the checksum") {
  TemporaryFolder place;
  const fs::path path = place / "run/run.json";
  RunFolder::open(place / "run", sample_plan(), OpenMode::fresh);
  std::ifstream file(path);
  const std::string whole((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  auto changed = [&](const std::string& was, const std::string& is, bool checksum) {
    std::string text = whole;
    const size_t at = text.find(was);
    REQUIRE(at != std::string::npos);
    text.replace(at, was.size(), is);
    if (!checksum) {
      const size_t line = text.find("\"sha256\": \"", text.find("\"settings\""));
      REQUIRE(line != std::string::npos);
      text.replace(line, 64 + 12, "\"other\": \"\"");
    }
    std::ofstream(path) << text;
    return message_of([&] { RunFolder::open_read_only(place / "run"); });
  };
  CHECK(contains(changed("Book 3608", "Book 3609", true),
                 "run.json: checksum differs: the file was changed or is damaged"));
  // Without a checksum, as older programs wrote it.
  CHECK(changed("Book 3608", "Book 3609", false) == "");
  auto refused = [&](const std::string& was, const std::string& is, const std::string& what) {
    CAPTURE(is);
    const std::string message = changed(was, is, false);
    CAPTURE(message);
    CHECK(contains(message, "run/run.json: " + what));
  };
  refused("\"tokens\": 100", "\"tokens\": 9000000000000",
          "documents[0].tokens is 9000000000000, expected a whole number from 1 to 1099511627776");
  refused("\"tokens\": 70", "\"tokens\": -5", "documents[1].tokens is -5, expected");
  refused("\"tokens\": 70", "\"tokens\": 7.5", "documents[1].tokens is 7.5, expected");
  refused("\"tokens\": 70", "\"tokens\": 18446744073709551615",
          "documents[1].tokens is 18446744073709551615, expected");
  refused("\"tokens\": 70", "\"tokens\": 900000000000",
          "documents: tokens of the documents up to 3609 make 28125000004 units of unit_tokens = "
          "32, expected at most 16777216");
  refused("\"heads\": 3", "\"heads\": 2000000000",
          "layers[0].heads is 2000000000, expected a whole number from 0 to 65536");
  refused("\"heads\": 3", "\"heads\": 4294967299", "layers[0].heads is 4294967299, expected");
  refused("\"unit_tokens\": 32", "\"unit_tokens\": 0", "unit_tokens is 0, expected");
  refused("\"repeats\": 1", "\"repeats\": -1", "run.repeats is -1, expected");
  refused("\"prompt_tokens\": 0,\n   \"sha256\"", "\"prompt_tokens\": 100,\n   \"sha256\"",
          "document 3608 has 100 prompt tokens of 100");
}

TEST_CASE("offsets of a long run are 64-bit") {
  // 6.4e9 positions in units of 2^31: first positions and counts that do not fit 32 bits.
  RunPlan plan = sample_plan({"fp32"}, {int64_t{3} << 31}, int64_t{1} << 31);
  TemporaryFolder place;
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  const std::vector<Unit> missing = folder.missing();
  REQUIRE(missing.size() == 3);
  CHECK(missing[2].first == int64_t{2} << 31);
  CHECK(missing[2].count == int64_t{1} << 31);
}
