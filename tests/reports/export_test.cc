#include "reports/export.h"

#include <doctest/doctest.h>

#include <limits>

#include "reports/files.h"
#include "tests/reports/sample_run.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Two documents, two states; the second state starts later and was not measured to the end.
Report small_report() {
  Report report;
  report.documents = {{"3608", "", 3, "", 0}, {"a \"b\", c", "", 2, "", 0}};
  report.token_ids = {{1, 20, 300}, {1, 7}};
  for (const char* name : {"fp32", "nvfp4+sr@L=1;layers=0,2"}) {
    StateReport state;
    state.info.name = name;
    report.states.push_back(state);
  }
  report.states[0].documents = {{0, 3, {0, 0, 0}, {0.1f, 2.5f, kNaN}, {1, 1, 1}, {}, {}, {}, {}},
                                {0, 2, {0, 0}, {1, kNaN}, {1, 1}, {}, {}, {}, {}}};
  report.states[1].documents = {
      {1, 3, {9, 1e-30f, -kNaN}, {9, kNaN, kNaN}, {9, 0, kNoTop1}, {}, {}, {}, {}},
      {0, 1, {3e-5f}, {std::numeric_limits<float>::infinity()}, {0}, {}, {}, {}, {}}};
  return report;
}

std::string content(const std::filesystem::path& path) { return as_text(*read_file(path)); }

}  // namespace

TEST_CASE("positions as CSV") {
  TemporaryFolder place("export");
  const auto path = place / "positions.csv";
  CHECK(write_positions_csv(small_report(), path) == 8);
  CHECK(content(path) ==
        "document,position,token,state,kl,nll,top1\n"
        "3608,0,1,fp32,0,0.1,1\n"
        "3608,1,20,fp32,0,2.5,1\n"
        "3608,1,20,\"nvfp4+sr@L=1;layers=0,2\",1e-30,nan,0\n"
        "3608,2,300,fp32,0,,1\n"
        "3608,2,300,\"nvfp4+sr@L=1;layers=0,2\",nan,,\n"
        "\"a \"\"b\"\", c\",0,1,fp32,0,1,1\n"
        "\"a \"\"b\"\", c\",0,1,\"nvfp4+sr@L=1;layers=0,2\",3e-05,inf,0\n"
        "\"a \"\"b\"\", c\",1,7,fp32,0,,1\n");
}

TEST_CASE("answers as CSV") {
  TemporaryFolder place("export-answers");
  const auto path = place / "answers.csv";
  Report report = small_report();
  ItemInfo item;
  item.id = "q1";
  item.task = "gpqa";
  item.category = "Physics, optics";
  item.gold = "C";
  item.prompt_sha256 = "abc";
  report.items = {item};
  Answer answer;
  answer.repeat = 1;
  answer.text = "not in the table";
  answer.tokens = 12;
  answer.finish_reason = "length";
  answer.rule = "letter";
  answer.seconds = 0.5;
  report.states[1].answers = {answer};
  CHECK(write_answers_csv(report, path) == 1);
  CHECK(content(path) ==
        "task,item,category,level,repeat,state,gold,extracted,correct,finish_reason,tokens,rule,"
        "stage,seconds,prompt_sha256\n"
        "gpqa,q1,\"Physics, optics\",0,1,\"nvfp4+sr@L=1;layers=0,2\",C,,0,length,12,letter,0,0.5,"
        "abc\n");
}

TEST_CASE("an export that cannot be written says why and leaves nothing behind") {
  TemporaryFolder place("export-fails");
  const std::filesystem::path missing = place / "absent" / "positions.csv";
  std::string message;
  try {
    write_positions_csv(small_report(), missing);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  CHECK(message == missing.string() + ": cannot be written: No such file or directory");
  // The name of a folder: everything is written, renaming fails.
  std::filesystem::create_directories(place / "taken" / "inside");
  CHECK_THROWS_AS(write_positions_csv(small_report(), place / "taken"), std::runtime_error);
  size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(place.path()))
    ++entries;
  CHECK(entries == 1);
}
