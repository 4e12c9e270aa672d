// Reading commands over run folders that lost something.
#include "harness/report_command.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "harness/grade_command.h"
#include "reports/files.h"
#include "reports/run_folder.h"
#include "reports/schema.h"
#include "tests/reports/sample_run.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;
namespace fs = std::filesystem;

namespace {

void fill(const fs::path& path, const RunPlan& plan) {
  RunFolder folder = RunFolder::open(path, plan, OpenMode::resume);
  put_all(folder);
  folder.assemble("2026-11-29T19:00:00Z");
}

std::string bytes_of(const fs::path& path) { return std::string(as_text(*read_file(path))); }

std::string kept_line(const fs::path& path) {
  std::string kept;
  RunFolder::open_read_only(path).fullest_report(&kept);
  return kept;
}

}  // namespace

TEST_CASE("reading never replaces a report by one that holds less") {
  TemporaryFolder place;
  const RunPlan plan = sample_plan();
  const fs::path run = place / "run";
  fill(run, plan);
  const std::string before = bytes_of(run / "report.h5");
  const Report whole = read_report(run / "report.h5");

  SUBCASE("all parts are gone") {
    fs::remove_all(run / "parts");
    CHECK(kept_line(run) ==
          run.string() +
              ": the parts lack what report.h5 holds: 100 of 100 positions of document 3608 by "
              "state fp32, and 7 more; report.h5 is kept and read instead (replayeval run --resume "
              "computes the parts again)");
  }
  SUBCASE("one part is gone") {
    for (const auto& part : fs::directory_iterator(run / "parts")) {
      fs::remove(part);
      break;
    }
    CHECK(contains(kept_line(run), "the parts lack what report.h5 holds: "));
  }
  SUBCASE("one part is damaged") {
    std::ofstream(fs::directory_iterator(run / "parts")->path()) << "x";
    CHECK(contains(kept_line(run), "the parts lack what report.h5 holds: "));
  }
  SUBCASE("the run was also grown") {
    fs::remove_all(run / "parts");
    RunPlan grown = sample_plan({"fp32", "fp32@L=1", "nvfp4+sr", "fp32/nvfp4", "int8"}, {120, 70});
    RunFolder::open(run, grown, OpenMode::resume);
    CHECK(contains(kept_line(run), "100 of 100 positions of document 3608"));
  }
  CHECK(figures_differ(read_run(run.string()), whole) == "");
  CHECK(figures_differ(load_report(run), whole) == "");
  CHECK(contains(show_runs({{run.string()}}), "nvfp4+sr"));
  ReportOptions page;
  page.runs = {run.string()};
  page.out = (place / "page.html").string();
  report_command(page);
  CHECK((bytes_of(run / "report.h5") == before));
}

TEST_CASE("reading writes a report that holds as much as before, or more") {
  TemporaryFolder place;
  const fs::path run = place / "run";
  fill(run, sample_plan());
  // Grown, not computed yet: the last position counts for nothing until its nll is known.
  const RunPlan grown = sample_plan({"fp32", "fp32@L=1", "nvfp4+sr", "fp32/nvfp4"}, {120, 70});
  RunFolder folder = RunFolder::open(run, grown, OpenMode::resume);
  CHECK(kept_line(run) == "");
  CHECK(read_run(run.string()).states[0].documents[0].length == 99);
  folder.put(sample_span(grown, 0, 96, {0, 1, 2}));
  CHECK(read_run(run.string()).states[2].documents[0].length == 120);
  CHECK(read_report(run / "report.h5").states[2].documents[0].length == 120);
}

TEST_CASE("a report that cannot be read is not replaced by an unfinished one") {
  TemporaryFolder place;
  const fs::path run = place / "run";
  fill(run, sample_plan());
  fs::remove_all(run / "parts");
  std::ofstream(run / "report.h5") << "damaged";
  CHECK(contains(kept_line(run), "holds no checksum"));
  CHECK(contains(kept_line(run), "remove it to have it written anew"));
  read_run(run.string());
  CHECK(bytes_of(run / "report.h5") == "damaged");
}

TEST_CASE("grade does not write over the report of a run folder or the run that it reads") {
  TemporaryFolder place;
  const fs::path run = place / "run";
  fill(run, sample_plan());
  const std::string before = bytes_of(run / "report.h5");
  auto refused = [&](const fs::path& from, const fs::path& out) {
    GradeOptions options;
    options.run = from.string();
    options.out = out.string();
    return message_of([&] { grade_answers(options); });
  };
  CHECK(refused(run, run / "report.h5") ==
        "grade: -o " + (run / "report.h5").string() +
            ": expected a new report, got the report of the run in " + run.string() +
            "; choose another name, such as regraded.h5");
  CHECK(contains(refused(run, place / "run/../run/report.h5"), "got the report of the run"));
  CHECK(contains(refused(run / "report.h5", run / "report.h5"), "got the run that is read"));
  GradeOptions import;
  import.imports = {"answers.jsonl"};
  import.states = {"a"};
  import.out = (run / "report.h5").string();
  CHECK(contains(message_of([&] { grade_answers(import); }), "got the report of the run"));
  CHECK(contains(refused(run, place / "new.h5"), "expected a run with graded answers"));
  CHECK((bytes_of(run / "report.h5") == before));
}

TEST_CASE("runs that do not go together are refused in the name of the command, with a hint") {
  TemporaryFolder place;
  RunPlan other = sample_plan();
  fill(place / "kl", other);
  other.run.job = "score";
  fill(place / "score", other);
  ReportOptions page;
  page.runs = {(place / "kl").string(), (place / "score").string()};
  page.out = (place / "page.html").string();
  const std::string message = message_of([&] { report_command(page); });
  CHECK(message.starts_with("report: "));
  CHECK(contains(message, "job differs: 'kl' and 'score'; give each of them a report of its own"));
  CHECK(message_of([&] { show_runs({page.runs}); }).starts_with("show: "));
}
