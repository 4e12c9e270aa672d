// Readers of MMLU-Pro, GPQA, MATH and GSM8K; selections; option orders; CPython's random numbers.
#include "datasets/items.h"

#include <doctest/doctest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "datasets/grade_boxed.h"
#include "datasets/option_order.h"
#include "datasets/python_random.h"
#include "tests/support/case_file.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

using test::TemporaryFolder;
using Json = nlohmann::json;

ItemSource source_of(Task task, const std::filesystem::path& path,
                     const std::string& split = "test") {
  ItemSource source;
  source.task = task;
  source.path = path;
  source.split = split;
  return source;
}

std::vector<std::string> ids_of(const ItemSet& set) {
  std::vector<std::string> ids;
  for (const Item& item : set.items) ids.push_back(item.id);
  return ids;
}

using Strings = std::vector<std::string>;

// `random.Random(seed)` of CPython 3.11: getrandbits(32) twice, getrandbits(5), _randbelow(1000);
// sample; shuffle.
TEST_CASE("random numbers of CPython") {
  const auto first = [](uint64_t seed) {
    PythonRandom random(seed);
    return std::vector<uint32_t>{random.bits(32), random.bits(32), random.bits(5),
                                 random.below(1000)};
  };
  CHECK(first(0) == std::vector<uint32_t>{3626764237u, 1654615998, 24, 911});
  CHECK(first(42) == std::vector<uint32_t>{2746317213u, 478163327, 0, 759});
  CHECK(first(0x123456789ABCDEF0u) == std::vector<uint32_t>{3646699384u, 2523371432u, 30, 930});
  CHECK(PythonRandom(7).sample(10, 10) == std::vector<uint32_t>{5, 2, 6, 9, 0, 7, 4, 1, 3, 8});
  CHECK(PythonRandom(7).sample(1000, 5) == std::vector<uint32_t>{331, 970, 154, 404, 666});
  CHECK(PythonRandom(7).sample(80, 20) == std::vector<uint32_t>{41, 19, 50, 6,  9,  68, 12,
                                                                46, 7,  64, 27, 4,  11, 55,
                                                                53, 8,  30, 5,  35, 69});
  std::vector<int> values{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  PythonRandom(3).shuffle(&values);
  CHECK(values == std::vector<int>{1, 5, 6, 0, 9, 4, 7, 2, 8, 3});
  CHECK_THROWS_AS(PythonRandom(1).sample(3, 4), std::invalid_argument);
}

TEST_CASE("published option orders of GPQA") {
  const std::string path = test::case_path("cases/graders/gpqa_shuffle_reference.json");
  if (path.empty()) return;
  std::ifstream file(path);
  const Json reference = Json::parse(file);
  const auto orders = [&](const char* name, const char* key) {
    return reference.at(name).at(key).get<std::vector<OptionOrder>>();
  };
  CHECK(gpqa_shuffled_orders(198, 0) == orders("gpqa_authors_seed0_shuffle_198", "orders"));
  CHECK(gpqa_shuffled_orders(198, 42) == orders("nemo_skills_seed42_shuffle_198", "orders"));
  CHECK(gpqa_sampled_orders(198, 4) == orders("simple_evals_random0_sample_198x4", "permutations"));
}

TEST_CASE("an item's order depends on item and seed only") {
  Item item;
  item.task = "gpqa";
  item.id = "recA";
  item.options = {"right", "w1", "w2", "w3"};
  item.gold_option = 0;
  const OptionOrder order = item_option_order(item, 1);
  CHECK(order == item_option_order(item, 1));
  int differ = 0;
  for (uint64_t seed = 2; seed < 12; ++seed) differ += item_option_order(item, seed) != order;
  CHECK(differ > 5);
  const Item shown = with_option_order(item, {2, 3, 0, 1});
  CHECK(shown.options == Strings{"w2", "w3", "right", "w1"});
  CHECK(shown.gold_option == 2);
  CHECK(shown.gold == "C");
  CHECK_THROWS_AS(with_option_order(item, {0, 1, 2}), std::invalid_argument);
  CHECK_THROWS_AS(with_option_order(item, {0, 1, 2, 2}), std::invalid_argument);
}

TEST_CASE("MMLU-Pro rows") {
  TemporaryFolder folder;
  folder.write("test.json", R"([
    {"question_id": 70, "question": "Q1?", "options": ["a", "b", "c"], "answer": "B", "answer_index": 1, "category": "law", "cot_content": "A: ..."},
    {"question_id": 71, "question": "Q2?", "options": ["N/A", "b", "N/A", "d"], "answer": "D", "answer_index": 3, "category": "law"},
    {"question_id": 72, "question": "", "options": ["a"], "answer": "A", "answer_index": 0, "category": "art"},
    {"question_id": 73, "question": "Q4?", "options": ["a", "b"], "answer": "C", "category": "art"},
    {"question_id": 74, "question": "Q5?", "options": ["a", "b"], "answer": "A", "answer_index": 1, "category": "art"},
    {"question_id": 75, "question": "Q6?", "options": ["1","2","3","4","5","6","7","8","9","10","11"], "answer": "A", "answer_index": 0, "category": "art"},
    {"question_id": 70, "question": "Q7?", "options": ["a"], "answer": "A", "answer_index": 0, "category": "art"},
    {"question_id": 76, "question": "Q8?", "options": [], "answer": "A", "category": "art"},
    {"question_id": 77, "question": "Q9?", "options": ["only"], "answer_index": 0, "category": "art"},
    {"question_id": 78, "question": "Q10?", "options": ["a", " "], "answer": "A", "category": "art"}])");
  const ItemSet set = load_items(source_of(Task::kMmluPro, folder.path()));
  CHECK(set.rows == 10);
  CHECK(ids_of(set) == Strings{"70", "71", "77"});
  CHECK(set.items[0].gold == "B");
  CHECK(set.items[0].category == "law");
  CHECK(set.items[0].solution == "A: ...");
  CHECK(set.items[1].options == Strings{"b", "d"});
  CHECK(set.items[1].gold == "B");
  CHECK(set.items[2].gold_option == 0);
  CHECK(set.items[2].row == 8);
  Strings reasons;
  for (const BadItem& bad : set.bad) reasons.push_back(bad.id + ": " + bad.reason);
  CHECK(reasons == Strings{"72: the question is empty", "73: its answer is none of the 2 options",
                           "74: answer is A, but answer_index 1",
                           "75: 11 options; letters end at J", "70: its id occurred before",
                           "76: it has no options", "78: option B is empty"});
  REQUIRE(set.warnings.size() == 1);
  CHECK(set.warnings[0].starts_with("3 items; MMLU-Pro test has 12032"));
  CHECK(set.description.find("3 of 3 items, 7 unusable") != std::string::npos);
  CHECK(set.sha256.size() == 64);
}

TEST_CASE("selections are nested and in the file's order") {
  TemporaryFolder folder;
  std::string lines;
  for (int i = 0; i < 9; ++i) {
    lines += Json{{"question_id", i},
                  {"question", "q"},
                  {"options", {"a", "b"}},
                  {"answer", "A"},
                  {"category", std::string(1, static_cast<char>('x' + i % 3))}}
                 .dump() +
             "\n";
  }
  folder.write("few.jsonl", lines);
  ItemSource source = source_of(Task::kMmluPro, folder.path() / "few.jsonl");
  source.items = 4;
  CHECK(ids_of(load_items(source)) == Strings{"0", "1", "2", "3"});
  source.items = 100;
  CHECK(load_items(source).items.size() == 9);
  source.items.reset();
  source.per_category = 2;
  CHECK(ids_of(load_items(source)) == Strings{"0", "1", "2", "3", "4", "5"});
  source.items = 5;
  CHECK(ids_of(load_items(source)) == Strings{"0", "1", "2", "3", "4"});
  source = source_of(Task::kMmluPro, folder.path() / "few.jsonl");
  source.ids = {"7", "1"};
  CHECK(ids_of(load_items(source)) == Strings{"7", "1"});
  source.ids = {"9"};
  CHECK_THROWS_WITH_AS(load_items(source), doctest::Contains("ids: no item '9'"),
                       std::invalid_argument);
  source.ids.clear();
  source.items = 0;
  CHECK_THROWS_WITH_AS(load_items(source), doctest::Contains("items is 0, expected 1 or more"),
                       std::invalid_argument);
  source.items.reset();
  source.level = 5;
  CHECK_THROWS_WITH_AS(load_items(source), doctest::Contains("level is a key of math only"),
                       std::invalid_argument);
}

TEST_CASE("data that are not named") {
  CHECK_THROWS_WITH_AS(load_items(source_of(Task::kMmluPro, "")),
                       "data: mmlu_pro: path is not set; expected the data set's folder or file, "
                       "published as huggingface.co/datasets/TIGER-Lab/MMLU-Pro",
                       std::invalid_argument);
}

TEST_CASE("GPQA rows") {
  TemporaryFolder folder;
  folder.write("gpqa_diamond.csv",
               "\xEF\xBB\xBFQuestion,Incorrect Answer 2,Correct Answer,Incorrect Answer "
               "1,Incorrect Answer 3,"
               "Record ID,High-level domain,Explanation\r\n"
               "\"Two\nlines, a \"\"quote\"\"?\",w2,right,w1,w3,recA,Physics,why\r\n"
               "Q,w2,,w1,w3,recB,Physics,\r\n"
               "Q,w2,right,w1\r\n"
               "Q,w2,right,w1,w3,,Chemistry,\r\n");
  const ItemSet set = load_items(source_of(Task::kGpqa, folder.path(), "diamond"));
  CHECK(ids_of(set) == Strings{"recA", "row 3"});
  CHECK(set.items[0].question == "Two\nlines, a \"quote\"?");
  CHECK(set.items[0].options == Strings{"right", "w1", "w2", "w3"});
  CHECK(set.items[0].gold == "A");
  CHECK(set.items[0].category == "Physics");
  CHECK(set.items[0].solution == "why");
  REQUIRE(set.bad.size() == 2);
  CHECK(set.bad[0].reason == "option A is empty");
  CHECK(set.bad[1].reason == "line 5 has 4 cells, the header 8");
  folder.write("gpqa_main.csv",
               "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2\nq,a,b,c\n");
  CHECK_THROWS_WITH_AS(load_items(source_of(Task::kGpqa, folder.path(), "main")),
                       doctest::Contains("gpqa_main.csv:1: no column 'Incorrect Answer 3' among 4"),
                       std::runtime_error);
  folder.write("gpqa_main.csv", "Question,\"Correct Answer\nq,a\n");
  CHECK_THROWS_WITH_AS(
      load_items(source_of(Task::kGpqa, folder.path(), "main")),
      doctest::Contains(
          "gpqa_main.csv:1: row 1: line 1, cell 2: the quote that opens here never closes"),
      std::runtime_error);
  CHECK_THROWS_WITH_AS(load_items(source_of(Task::kGpqa, folder.path(), "extended")),
                       doctest::Contains("gpqa_extended.csv; published as"), std::runtime_error);
  CHECK_THROWS_WITH_AS(load_items(source_of(Task::kGpqa, folder.path() / "nowhere", "main")),
                       doctest::Contains("there is no file or folder; a folder would hold one of "
                                         "gpqa_main.csv dataset/gpqa_main.csv; published as"),
                       std::runtime_error);
}

TEST_CASE("GPQA rows with broken quotes are named, and those behind them are read") {
  TemporaryFolder folder;
  const std::string header =
      "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Record "
      "ID\n";
  folder.write("gpqa_main.csv", header +
                                    "Q0,a,b,c,d,rec0\n"
                                    "\"never closed,a,b,c,d,rec1\n"
                                    "Q2,a,b,c,d,rec2\n"
                                    "\"two\nlines\",a,\"x\"y,c,d,rec3\n"
                                    "\"two\nlines\",a,b,c,d,rec4\n"
                                    "Q5,a,b,c,d,rec5\n");
  const ItemSet set = load_items(source_of(Task::kGpqa, folder.path(), "main"));
  CHECK(ids_of(set) == Strings{"rec0", "rec2", "rec4", "rec5"});
  CHECK(set.rows == 6);
  CHECK(set.items[1].row == 2);
  CHECK(set.items[2].question == "two\nlines");
  REQUIRE(set.bad.size() == 2);
  CHECK(set.bad[0].id == "row 1");
  CHECK(set.bad[0].reason.starts_with("line 3, cell 1: text follows the closing quote"));
  CHECK(set.bad[1].id == "row 3");
  CHECK(set.bad[1].reason.starts_with("line 6, cell 3: text follows the closing quote"));
  folder.write("gpqa_main.csv", header + "Q0,a,b,c,d,rec0\nQ1,\"a,b,c,d,rec1\nQ2,a,b,c,d,rec2\n");
  const ItemSet open = load_items(source_of(Task::kGpqa, folder.path(), "main"));
  CHECK(ids_of(open) == Strings{"rec0", "rec2"});
  REQUIRE(open.bad.size() == 1);
  CHECK(open.bad[0].reason == "line 3, cell 2: the quote that opens here never closes");
}

TEST_CASE("MATH rows and folders") {
  TemporaryFolder folder;
  folder.write("test.jsonl",
               "{\"problem\": \"p0\", \"level\": \"Level 5\", \"type\": \"Algebra\", \"solution\": "
               "\"so $\\\\boxed{1}$ or "
               "$\\\\boxed{\\\\frac{1}{2}}$.\"}\n\n"
               "{\"problem\": \"p1\", \"level\": 4, \"subject\": \"Geometry\", \"solution\": "
               "\"s\", \"answer\": \"7\", "
               "\"unique_id\": \"test/geometry/1.json\"}\n"
               "{\"problem\": \"p2\", \"level\": \"Level ?\", \"type\": \"Geometry\", "
               "\"solution\": \"no box\"}\n"
               "{\"problem\": \"p3\", \"level\": \"5\", \"type\": \"Algebra\", \"solution\": "
               "\"\\\\boxed{x\"}\n");
  ItemSource source = source_of(Task::kMath, folder.path());
  ItemSet set = load_items(source);
  CHECK(ids_of(set) == Strings{"0", "test/geometry/1.json"});
  CHECK(set.items[0].gold == "\\frac{1}{2}");
  CHECK(set.items[0].level == 5);
  CHECK(set.items[1].level == 4);
  CHECK(set.items[1].category == "Geometry");
  REQUIRE(set.bad.size() == 2);
  CHECK(set.bad[0].reason == "it has no answer");
  source.level = 5;
  CHECK(ids_of(load_items(source)) == Strings{"0"});
  source.level = 1;
  CHECK_THROWS_WITH_AS(load_items(source), doctest::Contains("none of its 2 items is of level 1"),
                       std::invalid_argument);
  folder.write("test.jsonl", "{\"problem\": \n");
  source.level.reset();
  CHECK_THROWS_WITH_AS(load_items(source), doctest::Contains("test.jsonl:1: not JSON"),
                       std::runtime_error);

  for (const char* name : {"algebra/10.json", "algebra/9.json", "prealgebra/1.json"}) {
    folder.write(std::string("all/MATH/train/") + name,
                 R"({"problem": "p", "level": "Level 2", "type": "T", "solution": "\\boxed{3}"})");
  }
  set = load_items(source_of(Task::kMath, folder.path() / "all", "train"));
  CHECK(ids_of(set) ==
        Strings{"train/algebra/9.json", "train/algebra/10.json", "train/prealgebra/1.json"});
  CHECK_THROWS_WITH_AS(load_items(source_of(Task::kMath, folder.path() / "all", "test")),
                       doctest::Contains("MATH/test/*/*.json"), std::runtime_error);
}

// Each bad item as "id: reason", with the part of the reason up to the file's name left out.
Strings bad_of(const ItemSet& set, const std::string& file) {
  Strings bad;
  for (const BadItem& item : set.bad) {
    const size_t name = item.reason.find(file);
    bad.push_back(item.id + ": " + item.reason.substr(name == std::string::npos ? 0 : name));
  }
  return bad;
}

TEST_CASE("lines that are no JSON object are bad items, and those behind them are read") {
  TemporaryFolder folder;
  const std::string good = R"("answer": "1", "options": ["a", "1"], "category": "c"})";
  folder.write("test.jsonl", "{\"problem\": \"p0\", " + good +
                                 "\n\n"
                                 "{\"problem\": \"p1\", \n"
                                 "[1, 2]\n"
                                 "7\n"
                                 "{\"problem\": \"\xC3(\", \"answer\": \"1\"}\n"
                                 "{\"problem\": \"p5\", \"answer\": [1]}\n"
                                 "{\"problem\": {\"a\": 1}, \"answer\": 1}\n"
                                 "{\"problem\": \"p7\", \"answer\": 1}\n");
  const ItemSet set = load_items(source_of(Task::kMath, folder.path()));
  CHECK(ids_of(set) == Strings{"0", "7"});
  CHECK(set.rows == 8);
  const Strings bad = bad_of(set, "test.jsonl");
  REQUIRE(bad.size() == 6);
  CHECK(bad[0].starts_with("row 1: test.jsonl:3: not JSON: syntax error while parsing"));
  CHECK(bad[0].ends_with(" at byte 19 of the line"));
  CHECK(bad[0].find("line 1") == std::string::npos);
  CHECK(bad[1] == "row 2: test.jsonl:4: expected an object, got a list");
  CHECK(bad[2] == "row 3: test.jsonl:5: expected an object, got a number");
  CHECK(bad[3] == "row 4: test.jsonl:6: not UTF-8 at byte 14 of the line");
  CHECK(bad[4] == "5: its answer is a list, expected a text or number");
  CHECK(bad[5] == "6: its problem is a map, expected a text or number");
  for (const Task task : {Task::kMmluPro, Task::kGsm8k}) {
    folder.write("test.jsonl",
                 "{\"question\": \"q\", \"answer\": \"A\", \"options\": [\"a\"]}\n"
                 "{\"question\": \"q\", \"answer\": \"#### 1\"}\n"
                 "{\"question\": \"q\", \"answer\": [\"A\"], \"options\": [\"a\"]}\n"
                 "nothing\n"
                 "{\"question\": \"q\", \"answer\": \"A\", \"options\": [\"a\", [\"b\"]]}\n");
    const ItemSet other = load_items(source_of(task, folder.path()));
    CAPTURE(task_name(task));
    CHECK(ids_of(other) == Strings{task == Task::kMmluPro ? "0" : "1"});
    const Strings reasons = bad_of(other, "test.jsonl");
    REQUIRE(reasons.size() == 4);
    CHECK(reasons[1] == "2: its answer is a list, expected a text or number");
    CHECK(reasons[2].starts_with("row 3: test.jsonl:4: not JSON: "));
    CHECK(reasons[3] == (task == Task::kMmluPro ? "4: its option 1 (from 0) is no text or number"
                                                : "4: it has no answer"));
  }
  // An array that breaks off has no rows; one with another element has.
  folder.write("a.json", "[{\"problem\": \"p\", \"answer\": 1},\n 5]");
  const ItemSet array = load_items(source_of(Task::kMath, folder.path() / "a.json"));
  CHECK(array.items.size() == 1);
  CHECK(bad_of(array, "a.json") ==
        Strings{"row 1: a.json: element 1: expected an object, got a number"});
  folder.write("a.json", "[{\"problem\": \"p\", \"answer\": 1},\n {\"problem\"");
  CHECK_THROWS_WITH_AS(load_items(source_of(Task::kMath, folder.path() / "a.json")),
                       doctest::Contains("a.json:2: not JSON: syntax error"), std::runtime_error);
  folder.write("b/test/algebra/1.json", R"({"problem": "p", "answer": 1})");
  folder.write("b/test/algebra/2.json", "{\n\"problem\": \n}");
  folder.write("b/test/algebra/3.json", "[]");
  const ItemSet files = load_items(source_of(Task::kMath, folder.path() / "b"));
  CHECK(ids_of(files) == Strings{"test/algebra/1.json"});
  REQUIRE(files.bad.size() == 2);
  CHECK(files.bad[0].reason.find("algebra/2.json:3: not JSON: ") != std::string::npos);
  CHECK(files.bad[1].reason.find("algebra/3.json: expected an object") != std::string::npos);
}

TEST_CASE("MATH problems without a level are bad items where a level is asked for") {
  TemporaryFolder folder;
  folder.write("test.jsonl",
               "{\"problem\": \"p0\", \"answer\": \"1\", \"level\": \"Level 5\"}\n"
               "{\"problem\": \"p1\", \"answer\": \"1\"}\n"
               "{\"problem\": \"p2\", \"answer\": \"1\", \"level\": \"Level ?\"}\n"
               "{\"problem\": \"p3\", \"answer\": \"1\", \"level\": null}\n"
               "{\"problem\": \"p4\", \"answer\": \"1\", \"level\": 4}\n");
  ItemSource source = source_of(Task::kMath, folder.path());
  ItemSet set = load_items(source);
  CHECK(set.items.size() == 5);
  CHECK(set.bad.empty());
  source.level = 5;
  set = load_items(source);
  CHECK(ids_of(set) == Strings{"0"});
  CHECK(bad_of(set, "test.jsonl") == Strings{"1: it has no level",
                                             "2: its level is 'Level ?', expected 1 to 5",
                                             "3: it has no level"});
  CHECK(set.description.find("1 of 1 items of level 5, 3 unusable") != std::string::npos);
}

TEST_CASE("GPQA columns that occur twice, and equal options") {
  TemporaryFolder folder;
  const std::string header =
      "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3";
  const ItemSource source = source_of(Task::kGpqa, folder.path(), "main");
  folder.write("gpqa_main.csv", header + ",Question\nq,a,b,c,d,other\n");
  CHECK_THROWS_WITH_AS(
      load_items(source),
      doctest::Contains("gpqa_main.csv:1: two columns are called 'Question'; expected one"),
      std::runtime_error);
  // Columns that are not read may be called what they like.
  folder.write("gpqa_main.csv", header + ",x,x\nq,a,b,b,d,1,2\nr,a,b,c,d,1,2\ns,a,b,c,a,1,2\n");
  ItemSource unpublished = source;
  unpublished.published = false;
  CHECK(load_items(unpublished).warnings ==
        Strings{"two options or more are equal in 2 of 3 items"});
  unpublished.ids = {"row 1"};
  CHECK(load_items(unpublished).warnings.empty());
}

TEST_CASE("GSM8K rows") {
  TemporaryFolder folder;
  folder.write(
      "test.jsonl",
      "{\"question\": \"How many?\", \"answer\": \"2*600=<<2*600=1200>>1200\\n#### 1,200\"}\n"
      "{\"question\": \"How many?\", \"answer\": \"no mark\"}\n");
  const ItemSet set = load_items(source_of(Task::kGsm8k, folder.path()));
  REQUIRE(set.items.size() == 1);
  CHECK(set.items[0].gold == "1200");
  CHECK(set.items[0].options.empty());
  CHECK(set.bad.at(0).reason == "it has no answer");
  folder.write("test.jsonl", "{\"prompt\": 1}\n");
  CHECK_THROWS_WITH_AS(
      load_items(source_of(Task::kGsm8k, folder.path())),
      doctest::Contains("no usable item in 1 rows; the first, 0: the question is empty"),
      std::runtime_error);
}

TEST_CASE("the files of the authors") {
  const std::string data = test::case_path("datasets");
  if (data.empty()) return;
  ItemSource source = source_of(Task::kMath, data + "/math/MATH-500");
  ItemSet set = load_items(source);
  CHECK(set.items.size() == 500);
  CHECK(set.warnings.empty());  // count and texts as published
  for (const Item& item : set.items) {
    CAPTURE(item.id);
    const auto boxed = last_boxed(item.solution);
    REQUIRE(boxed);
    CHECK(boxed->content == item.gold);
  }
  source.level = 5;
  set = load_items(source);
  CHECK(set.items.size() == 134);
  CHECK(set.warnings.empty());
  const Strings of_level = ids_of(set);

  set = load_items(source_of(Task::kMath, data + "/math/original_tar_layout_sample"));
  CHECK(set.items.size() == 20);
  CHECK(set.warnings.size() == 1);
  std::ifstream index(data + "/math/level5_test_index.jsonl");
  std::map<std::string, std::string> gold;
  for (std::string line; std::getline(index, line);) {
    const Json row = Json::parse(line);
    gold[row.at("unique_id")] = row.at("answer");
  }
  for (const Item& item : set.items) CHECK(gold.at(item.id) == item.gold);
  for (const std::string& id : of_level) CHECK(gold.contains(id));

  set = load_items(source_of(Task::kMmluPro, data + "/mmlu_pro", "validation"));
  CHECK(set.items.size() == 70);
  CHECK(set.bad.empty());
  CHECK(set.warnings.empty());
  set = load_items(source_of(Task::kMmluPro, data + "/mmlu_pro/test_slice_20_per_category.json"));
  CHECK(set.items.size() == 280);
  CHECK(set.bad.empty());
  set = load_items(source_of(Task::kGpqa, data + "/gpqa/gpqa_madeup.csv", "main"));
  CHECK(set.rows == 6);
  CHECK(set.items.size() + set.bad.size() == 6);
}

TEST_CASE("a changed text among as many items as published is noticed") {
  const std::string path = test::case_path("datasets/math/MATH-500/test_level5.jsonl");
  if (path.empty()) return;
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  TemporaryFolder folder;
  text.replace(text.find("problem\": \"") + 11, 1, "#");
  folder.write("test.jsonl", text);
  ItemSource source = source_of(Task::kMath, folder.path());
  source.level = 5;
  const ItemSet set = load_items(source);
  REQUIRE(set.warnings.size() == 1);
  CHECK(set.warnings[0] == "as many items as MATH-500, Level 5, but other texts");
}

}  // namespace
}  // namespace replayeval
