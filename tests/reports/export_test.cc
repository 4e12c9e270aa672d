#include "reports/export.h"

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <doctest/doctest.h>
#include <parquet/arrow/reader.h>
#include <sys/mount.h>

#include <cstdio>
#include <limits>
#include <memory>

#include "reports/files.h"
#include "tests/reports/sample_answers.h"

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

std::shared_ptr<arrow::Table> read_parquet(const std::filesystem::path& path) {
  auto file = arrow::io::ReadableFile::Open(path.string()).ValueOrDie();
  auto reader = parquet::arrow::OpenFile(file, arrow::default_memory_pool()).ValueOrDie();
  return reader->ReadTable().ValueOrDie()->CombineChunks().ValueOrDie();
}

/// One value as text, "null" where there is none.
std::string cell(const std::shared_ptr<arrow::Table>& table, const std::string& column,
                 int64_t row) {
  return table->GetColumnByName(column)->GetScalar(row).ValueOrDie()->ToString();
}

std::string content(const std::filesystem::path& path) { return as_text(*read_file(path)); }

}  // namespace

TEST_CASE("positions as CSV") {
  TemporaryFolder place;
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
  TemporaryFolder place;
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
  TemporaryFolder place;
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

TEST_CASE("positions and answers as Parquet read back through Arrow as the figures of the CSV") {
  TemporaryFolder place;
  const Report report = small_report();
  CHECK(write_positions_parquet(report, place / "positions.parquet") == 8);
  auto table = read_parquet(place / "positions.parquet");
  REQUIRE(table->num_rows() == 8);
  CHECK(table->schema()->metadata()->Get("schema").ValueOrDie() == "replayeval/1");
  CHECK(table->schema()->ToString(false) ==
        "document: string not null\nposition: int64 not null\ntoken: int32 not null\nstate: string "
        "not null\nkl: float not null\nnll: float\ntop1: uint8");
  CHECK(cell(table, "document", 7) == "a \"b\", c");
  CHECK(cell(table, "state", 2) == "nvfp4+sr@L=1;layers=0,2");
  CHECK(cell(table, "kl", 2) == "1e-30");
  CHECK(cell(table, "kl", 4) == "nan");
  CHECK(cell(table, "nll", 2) == "nan");
  CHECK(cell(table, "nll", 3) == "null");
  CHECK(cell(table, "nll", 6) == "inf");
  CHECK(cell(table, "nll", 7) == "null");
  CHECK(cell(table, "top1", 4) == "null");
  CHECK(cell(table, "top1", 2) == "0");
  CHECK(cell(table, "token", 3) == "300");

  const RunPlan plan = sample_score_plan({"fp32", "nvfp4+sr"}, 6, 1);
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  put_answers(folder);
  Report answers = folder.report();
  Answer& odd = answers.states[1].answers[2];
  odd.token_ids.clear();
  odd.margins.clear();
  odd.tokens = -1;
  odd.finish_reason.clear();
  odd.extracted.clear();
  CHECK(write_answers_parquet(answers, place / "answers.parquet") == 12);
  table = read_parquet(place / "answers.parquet");
  REQUIRE(table->num_rows() == 12);
  for (int64_t i = 0; i < 12; ++i) {
    const Answer& answer =
        answers.states[static_cast<size_t>(i / 6)].answers[static_cast<size_t>(i % 6)];
    const ItemInfo& item = answers.items[static_cast<size_t>(answer.item)];
    CHECK(cell(table, "item", i) == item.id);
    CHECK(cell(table, "text", i) == answer.text);
    CHECK(cell(table, "correct", i) == (answer.correct ? "true" : "false"));
    CHECK(cell(table, "finish_reason", i) ==
          (answer.finish_reason.empty() ? "null" : answer.finish_reason));
    CHECK(cell(table, "tokens", i) == (answer.tokens < 0 ? "null" : std::to_string(answer.tokens)));
    CHECK(cell(table, "extracted", i) == (answer.extracted.empty() ? "null" : answer.extracted));
    const auto ids =
        std::static_pointer_cast<arrow::ListArray>(table->GetColumnByName("token_ids")->chunk(0));
    CHECK(ids->IsNull(i) == answer.token_ids.empty());
    CHECK(ids->value_length(i) == static_cast<int32_t>(answer.token_ids.size()));
    const auto margins =
        std::static_pointer_cast<arrow::ListArray>(table->GetColumnByName("margins")->chunk(0));
    for (int64_t t = 0; t < static_cast<int64_t>(answer.margins.size()); ++t) {
      CHECK(static_cast<const arrow::FloatArray&>(*margins->values())
                .Value(margins->value_offset(i) + t) == answer.margins[static_cast<size_t>(t)]);
      CHECK(static_cast<const arrow::Int32Array&>(*ids->values()).Value(ids->value_offset(i) + t) ==
            answer.token_ids[static_cast<size_t>(t)]);
    }
  }
  // Not one row: still a table. And a place that cannot be written is named.
  CHECK(write_answers_parquet(report, place / "none.parquet") == 0);
  CHECK(read_parquet(place / "none.parquet")->num_rows() == 0);
  CHECK_THROWS_WITH_AS(
      write_answers_parquet(report, place / "absent/x.parquet"),
      ((place / "absent/x.parquet").string() + ": cannot be written: No such file or directory")
          .c_str(),
      std::runtime_error);
}

TEST_CASE("Parquet on a full disk is one line, and nothing is left behind") {
  TemporaryFolder place;
  const std::filesystem::path disk = place / "disk";
  std::filesystem::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=64k") != 0) {
    std::fprintf(stderr, "SKIPPED: a small tmpfs cannot be mounted here\n");
    return;
  }
  Report report = small_report();
  report.documents.resize(1);
  report.token_ids.resize(1);
  report.documents[0].tokens = 100000;
  report.states.resize(1);
  report.states[0].documents.resize(1);
  StateDocument& values = report.states[0].documents[0];
  values.length = 100000;
  for (uint64_t i = 0; i < 100000; ++i) {
    report.token_ids[0].push_back(static_cast<int32_t>(mix(i) % 100000));
    values.kl.push_back(uniform(3 * i));
    values.nll.push_back(uniform(3 * i + 1));
    values.top1.push_back(1);
  }
  std::string message;
  try {
    write_positions_parquet(report, disk / "p.parquet");
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  CHECK(message == (disk / "p.parquet").string() + ": cannot be written: No space left on device");
  CHECK(std::filesystem::is_empty(disk));
  ::umount2(disk.c_str(), MNT_DETACH);
}
