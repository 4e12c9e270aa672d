// Parquet: column types, row groups, and data sets as the hub lays them out. Files are written here
// through Arrow.
#include "datasets/parquet.h"

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <doctest/doctest.h>
#include <parquet/arrow/writer.h>

#include <fstream>
#include <map>
#include <set>

#include "datasets/data_files.h"
#include "datasets/items.h"
#include "datasets/token_stream.h"
#include "tests/support/case_file.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;
using test::TemporaryFolder;
using Strings = std::vector<std::string>;

void check(const arrow::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

std::shared_ptr<arrow::Array> finish(arrow::ArrayBuilder& builder) {
  std::shared_ptr<arrow::Array> array;
  check(builder.Finish(&array));
  return array;
}

template <class Builder, class Value>
std::shared_ptr<arrow::Array> array_of(const std::vector<Value>& values) {
  Builder builder;
  for (const Value& value : values) check(builder.Append(value));
  return finish(builder);
}

std::shared_ptr<arrow::Array> texts(const Strings& values) {
  return array_of<arrow::StringBuilder>(values);
}

template <class ListBuilder>
std::shared_ptr<arrow::Array> lists(const std::vector<Strings>& values) {
  auto inner = std::make_shared<arrow::StringBuilder>();
  ListBuilder builder(arrow::default_memory_pool(), inner);
  for (const Strings& list : values) {
    check(builder.Append());
    for (const std::string& text : list) check(inner->Append(text));
  }
  return finish(builder);
}

using Column = std::pair<std::string, std::shared_ptr<arrow::Array>>;

void write(const fs::path& path, const std::vector<Column>& columns, int64_t rows_a_group = 1000) {
  fs::create_directories(path.parent_path());
  std::vector<std::shared_ptr<arrow::Field>> fields;
  std::vector<std::shared_ptr<arrow::Array>> arrays;
  for (const auto& [name, array] : columns) {
    fields.push_back(arrow::field(name, array->type()));
    arrays.push_back(array);
  }
  const auto table = arrow::Table::Make(arrow::schema(fields), arrays);
  const auto file = arrow::io::FileOutputStream::Open(path.string());
  check(file.status());
  // The Arrow schema is stored, so that large, dictionary and view types come back as they are.
  check(parquet::arrow::WriteTable(
      *table, arrow::default_memory_pool(), *file, rows_a_group,
      parquet::default_writer_properties(),
      parquet::ArrowWriterProperties::Builder().store_schema()->build()));
}

TEST_CASE("cells of every type, over row groups") {
  TemporaryFolder folder;
  arrow::StringDictionaryBuilder dictionary;
  for (const char* word : {"x", "y", "x", "x", "z"}) check(dictionary.Append(word));
  arrow::StringBuilder gaps;
  check(gaps.AppendNull());
  for (const char* word : {"b", "", "d"}) check(gaps.Append(word));
  check(gaps.AppendNull());
  const fs::path path = folder.path() / "all.parquet";
  write(
      path,
      {{"text", texts({"a", "b", "c", "d", "e"})},
       {"large", array_of<arrow::LargeStringBuilder>(Strings{"1", "2", "3", "4", "5"})},
       {"coded", finish(dictionary)},
       {"gaps", finish(gaps)},
       {"long", array_of<arrow::Int64Builder>(std::vector<int64_t>{1, -2, 3, INT64_MAX, 5})},
       {"short", array_of<arrow::Int16Builder>(std::vector<int16_t>{-1, 2, 3, 4, 5})},
       {"byte", array_of<arrow::UInt8Builder>(std::vector<uint8_t>{1, 255, 3, 4, 5})},
       {"flag", array_of<arrow::BooleanBuilder>(std::vector<bool>{true, false, true, true, true})},
       {"single", array_of<arrow::FloatBuilder>(std::vector<float>{0.5F, 1, 2, 3, 4})},
       {"double", array_of<arrow::DoubleBuilder>(std::vector<double>{0.25, 1, 2, 3, 4})},
       {"list", lists<arrow::ListBuilder>({{"p", "q"}, {}, {"r"}, {"s"}, {"t", "u"}})},
       {"large_list", lists<arrow::LargeListBuilder>({{"p"}, {"q", "r"}, {}, {}, {}})},
       {"date", array_of<arrow::Date32Builder>(std::vector<int32_t>{1, 2, 3, 4, 5})}},
      2);
  const ParquetFile file(path);
  CHECK(file.rows() == 5);
  CHECK(file.columns().size() == 13);
  using Cells = std::vector<ParquetCell>;
  CHECK(file.read("text") == Cells{"a", "b", "c", "d", "e"});
  CHECK(file.read("text", 1, 3) == Cells{"b", "c", "d"});  // from three row groups
  CHECK(file.read("text", 4, 1) == Cells{"e"});
  CHECK(file.read("text", 5, 0).empty());
  CHECK(file.read("large", 3) == Cells{"4", "5"});
  CHECK(file.read("coded") == Cells{"x", "y", "x", "x", "z"});
  const ParquetCell none;
  CHECK(file.read("gaps") == Cells{none, "b", "", "d", none});
  CHECK(file.read("long", 1, 3) == Cells{int64_t{-2}, int64_t{3}, INT64_MAX});
  CHECK(file.read("short", 0, 1) == Cells{int64_t{-1}});
  CHECK(file.read("byte", 1, 1) == Cells{int64_t{255}});
  CHECK(file.read("flag", 0, 2) == Cells{int64_t{1}, int64_t{0}});
  CHECK(file.read("single", 0, 1) == Cells{0.5});
  CHECK(file.read("double", 0, 1) == Cells{0.25});
  CHECK(file.read("list", 1) == Cells{Strings{}, Strings{"r"}, Strings{"s"}, Strings{"t", "u"}});
  CHECK(file.read("large_list", 1, 1) == Cells{Strings{"q", "r"}});
  CHECK(text_of(file.read("long", 3, 1)[0]) == "9223372036854775807");
  CHECK(text_of(none).empty());

  CHECK_FALSE(file.readable("date"));
  CHECK_THROWS_WITH_AS(file.read("date"),
                       doctest::Contains("all.parquet: column 'date' is of type date32"),
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(file.read("nothing"),
                       doctest::Contains("no column 'nothing'; there are: text large coded"),
                       std::runtime_error);
  folder.write("broken.parquet", "PAR1 this is no table PAR1");
  CHECK_THROWS_WITH_AS(ParquetFile(folder.path() / "broken.parquet"),
                       doctest::Contains("broken.parquet: not Parquet"), std::runtime_error);
  CHECK_THROWS_WITH_AS(ParquetFile(folder.path() / "none.parquet"),
                       doctest::Contains("none.parquet: cannot be read"), std::runtime_error);
  // Cut in the middle of its data.
  std::ifstream whole(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(whole)), {});
  folder.write("cut.parquet", bytes.substr(0, bytes.size() / 2));
  CHECK_THROWS_AS(ParquetFile(folder.path() / "cut.parquet"), std::runtime_error);
}

TEST_CASE("files of a split in the hub's layouts") {
  TemporaryFolder folder;
  const auto found = [&](const fs::path& root) {
    Strings names;
    for (const fs::path& file :
         find_data_files(data_folder(root), parquet_patterns("test", {"main"})))
      names.push_back(file.lexically_relative(folder.path()).string());
    return names;
  };
  CHECK(found(folder.path()).empty());
  folder.write("default/test/0000.parquet", "");
  CHECK(found(folder.path()) == Strings{"default/test/0000.parquet"});
  folder.write("main/test-00000-of-00001.parquet", "");
  CHECK(found(folder.path()) == Strings{"main/test-00000-of-00001.parquet"});
  folder.write("data/test-00001-of-00002-0123456789abcdef.parquet", "");
  CHECK_THROWS_WITH_AS(found(folder.path()), doctest::Contains("data: has 1 of 2 files"),
                       std::runtime_error);
  folder.write("data/test-00000-of-00002-fedcba9876543210.parquet", "");
  folder.write("data/train-00000-of-00001.parquet", "");
  CHECK(found(folder.path()) == Strings{"data/test-00000-of-00002-fedcba9876543210.parquet",
                                        "data/test-00001-of-00002-0123456789abcdef.parquet"});
  // A folder of the hub cache: the snapshot that refs/main names.
  const std::string cache = "datasets--org--name/";
  folder.write(cache + "snapshots/aaa/data/test-00000-of-00001.parquet", "");
  CHECK(found(folder.path() / cache).size() == 1);
  folder.write(cache + "snapshots/bbb/test.parquet", "");
  CHECK(found(folder.path() / cache).empty());
  folder.write(cache + "refs/main", "bbb\n");
  CHECK(found(folder.path() / cache) == Strings{cache + "snapshots/bbb/test.parquet"});
}

TEST_CASE("MMLU-Pro, MATH and GSM8K as Parquet") {
  TemporaryFolder folder;
  write(folder.path() / "mmlu/data/test-00000-of-00001.parquet",
        {{"question_id", array_of<arrow::Int64Builder>(std::vector<int64_t>{70, 71, 72})},
         {"question", texts({"Q1?", "Q2?", "Q3?"})},
         {"options", lists<arrow::ListBuilder>({{"a", "N/A", "b"}, {"x", "y"}, {}})},
         {"answer", texts({"C", "A", "A"})},
         {"answer_index", array_of<arrow::Int64Builder>(std::vector<int64_t>{2, 0, 0})},
         {"cot_content", texts({"", "", ""})},
         {"category", texts({"law", "law", "art"})},
         {"src", texts({"", "", ""})}});
  ItemSource source;
  source.task = Task::kMmluPro;
  source.path = folder.path() / "mmlu";
  const ItemSet mmlu = load_items(source);
  REQUIRE(mmlu.items.size() == 2);
  CHECK(mmlu.items[0].id == "70");
  CHECK(mmlu.items[0].options == Strings{"a", "b"});
  CHECK(mmlu.items[0].gold == "B");
  CHECK(mmlu.items[1].gold == "A");
  REQUIRE(mmlu.bad.size() == 1);
  CHECK(mmlu.bad[0].reason == "it has no options");

  for (const char* subject : {"geometry", "algebra"}) {
    write(folder.path() / "math" / subject / "test-00000-of-00001.parquet",
          {{"problem", texts({std::string(subject) + " 0", std::string(subject) + " 1"})},
           {"level", texts({"Level 5", "Level ?"})},
           {"type", texts({subject, subject})},
           {"solution", texts({"\\boxed{1}", "\\boxed{\\frac{1}{2}}"})}});
  }
  source.task = Task::kMath;
  source.path = folder.path() / "math";
  const ItemSet math = load_items(source);
  REQUIRE(math.items.size() == 4);
  CHECK(math.items[0].id == "test/algebra/0");
  CHECK(math.items[0].level == 5);
  CHECK(math.items[1].level == 0);
  CHECK(math.items[3].id == "test/geometry/1");
  CHECK(math.items[3].gold == "\\frac{1}{2}");
  CHECK(math.items[3].row == 3);
  CHECK(math.items[3].category == "geometry");

  write(folder.path() / "gsm8k/main/test-00000-of-00001.parquet",
        {{"question", texts({"How many?"})}, {"answer", texts({"1+1=2\n#### 1,002"})}});
  source.task = Task::kGsm8k;
  source.path = folder.path() / "gsm8k";
  CHECK(load_items(source).items.at(0).gold == "1002");
}

TEST_CASE("PG-19 as Parquet gives the tokens of its text files") {
  TemporaryFolder folder;
  const fs::path sample = std::string(REPLAYEVAL_SOURCE_DIR) + "/datasets/sample";
  const std::string first = read_text(sample / "test/1.txt"),
                    second = read_text(sample / "test/2.txt");
  std::string crlf;
  for (const char c : second) crlf += c == '\n' ? "\r\n" : std::string(1, c);
  const fs::path file = folder.path() / "data/test-00000-of-00001.parquet";
  write(file,
        {{"short_book_title", texts({"One by A", "Two by B", "One again"})},
         {"publication_date", array_of<arrow::Int32Builder>(std::vector<int32_t>{1900, 1901, 1})},
         {"url", texts({"http://www.gutenberg.org/ebooks/1", "http://www.gutenberg.org/ebooks/2",
                        "http://www.gutenberg.org/ebooks/1"})},
         {"text", texts({first, crlf, "x"})}},
        1);
  DataSource source;
  source.kind = DataSource::Kind::kPg19;
  source.path = sample;
  const auto tokenizer = load_tokenizer(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-gdn");
  const LoadedDocuments texts_of_files = load_documents(source, *tokenizer);
  for (const fs::path& path : {folder.path(), file}) {
    source.path = path;
    const LoadedDocuments loaded = load_documents(source, *tokenizer);
    REQUIRE(loaded.documents.size() == 2);
    for (size_t i = 0; i < 2; ++i) {
      CHECK(loaded.documents[i].id == texts_of_files.documents[i].id);
      CHECK(loaded.documents[i].sha256 == texts_of_files.documents[i].sha256);
      CHECK(loaded.documents[i].stream == texts_of_files.documents[i].stream);
      CHECK((loaded.documents[i].tokens == texts_of_files.documents[i].tokens));
    }
    CHECK(loaded.documents[1].title == "Two by B");
    CHECK(loaded.description.find("PG-19 as Parquet, split test") != std::string::npos);
  }
  source.ids = {"2"};
  source.tokens = 64;
  CHECK(load_documents(source, *tokenizer).documents.at(0).id == "2");
  source.path = folder.path() / "nowhere";
  CHECK_THROWS_WITH_AS(load_documents(source, *tokenizer),
                       doctest::Contains("test-*.parquet, also in data/, or test/*.parquet"),
                       std::runtime_error);
  write(folder.path() / "other/test.parquet", {{"words", texts({"x"})}});
  source.path = folder.path() / "other";
  CHECK_THROWS_WITH_AS(load_documents(source, *tokenizer),
                       doctest::Contains("no column 'text'; there are: words"), std::runtime_error);
}

TEST_CASE("the published files") {
  const std::string data = test::case_path("datasets");
  if (data.empty()) return;
  ItemSource source;
  source.task = Task::kMmluPro;
  source.path = data + "/mmlu_pro";
  ItemSet set = load_items(source);
  CHECK(set.items.size() == 12032);
  CHECK(set.bad.empty());
  CHECK(set.warnings.empty());
  std::map<size_t, size_t> by_options;
  for (const Item& item : set.items) ++by_options[item.options.size()];
  CHECK(by_options == std::map<size_t, size_t>{{1, 5},
                                               {2, 2},
                                               {3, 20},
                                               {4, 603},
                                               {5, 51},
                                               {6, 92},
                                               {7, 157},
                                               {8, 320},
                                               {9, 801},
                                               {10, 9981}});
  // The slice in JSON holds rows of the Parquet file.
  std::map<std::string, const Item*> by_id;
  for (const Item& item : set.items) by_id[item.id] = &item;
  source.path = data + "/mmlu_pro/test_slice_20_per_category.json";
  for (const Item& item : load_items(source).items) {
    const Item* const same = by_id.at(item.id);
    CHECK(item.question == same->question);
    CHECK(item.options == same->options);
    CHECK(item.gold == same->gold);
    CHECK(item.category == same->category);
  }
  source.path = data + "/mmlu_pro/data/test-00000-of-00001.parquet";
  source.per_category = 3;
  set = load_items(source);
  CHECK(set.items.size() == 42);

  source = {};
  source.task = Task::kMath;
  source.path = data + "/math/hendrycks_layout_from_MATH-500";
  set = load_items(source);
  CHECK(set.items.size() == 500);
  CHECK(set.warnings.empty());  // counts and texts as published
  source.level = 5;
  set = load_items(source);
  CHECK(set.items.size() == 134);
  CHECK(set.warnings.empty());
  std::set<std::string> problems;
  for (const Item& item : set.items) problems.insert(item.question + "|" + item.gold);
  source.path = data + "/math/MATH-500";
  for (const Item& item : load_items(source).items)
    CHECK(problems.contains(item.question + "|" + item.gold));
}

}  // namespace
}  // namespace replayeval
