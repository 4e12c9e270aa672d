// Documents: PG-19's layout, text files, budgets, joins, and the messages for what is missing.
#include "datasets/token_stream.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "base/hash.h"
#include "tests/support/case_file.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

using test::TemporaryFolder;

const Tokenizer& mini() {
  static const auto tokenizer =
      load_tokenizer(std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-mamba2");
  return *tokenizer;
}

DataSource sample() {
  DataSource source;
  source.kind = DataSource::Kind::kPg19;
  source.path = std::string(REPLAYEVAL_SOURCE_DIR) + "/datasets/sample";
  return source;
}

TEST_CASE("the sample in PG-19's layout") {
  const LoadedDocuments loaded = load_documents(sample(), mini());
  REQUIRE(loaded.documents.size() == 2);
  for (const Document& document : loaded.documents) {
    const std::string text = read_text(sample().path / "test" / (document.id + ".txt"));
    std::vector<int32_t> expected{1};
    const auto ids = mini().encode(text);
    expected.insert(expected.end(), ids.begin(), ids.end());
    expected.push_back(2);
    CHECK(document.tokens == expected);
    CHECK(document.complete);
    CHECK(document.sha256 == sha256_hex(text));
    CHECK(document.stream == stream_of(document.id));
  }
  CHECK(loaded.documents[0].id == "1");
  CHECK(loaded.documents[0].title == "The Bell Petrel by ReplayEval");

  DataSource source = sample();
  source.documents = 1;
  source.tokens = 8192;
  const LoadedDocuments first = load_documents(source, mini());
  REQUIRE(first.documents.size() == 1);
  CHECK(first.documents[0].tokens.size() == 8192);
  CHECK_FALSE(first.documents[0].complete);
  CHECK(std::equal(first.documents[0].tokens.begin(), first.documents[0].tokens.end(),
                   loaded.documents[0].tokens.begin()));
  CHECK(list_documents(source).size() == 2);
}

TEST_CASE("budgets around the length of a text") {
  TemporaryFolder folder;
  folder.write("b.txt", "The boat.\r\nThe sea.\r");
  folder.write("a.txt", "\xEF\xBB\xBFThe boat.\nThe sea.\nIt is a long way home from here.\n");
  folder.write("c.md", "not a text of this folder");
  DataSource source;
  source.path = folder.path();
  const auto all = load_documents(source, mini());
  REQUIRE(all.documents.size() == 2);
  CHECK(all.documents[0].id == "a");  // by name
  CHECK(all.documents[1].sha256 == sha256_hex("The boat.\nThe sea.\n"));
  const auto length = static_cast<int64_t>(all.documents[1].tokens.size());

  source.ids = {"b"};
  for (int64_t tokens = 2; tokens <= length; ++tokens) {
    source.tokens = tokens;
    const Document document = load_documents(source, mini()).documents.at(0);
    CHECK(document.tokens.size() == static_cast<size_t>(tokens));
    CHECK(document.tokens[0] == 1);
    CHECK((document.tokens.back() == 2) == (tokens == length));
    CHECK(document.complete == (tokens == length));
  }
  source.tokens = length + 1;
  CHECK_THROWS_WITH_AS(
      load_documents(source, mini()),
      doctest::Contains(("tokens is " + std::to_string(length + 1) +
                         ", but none of the 1 documents is " + "that long: the longest, b, has " +
                         std::to_string(length) + " tokens")
                            .c_str()),
      std::invalid_argument);
  source.ids.clear();
  source.tokens = 1000;
  CHECK_THROWS_WITH_AS(
      load_documents(source, mini()),
      doctest::Contains("none of the 2 documents is that long: the longest, a, has"),
      std::invalid_argument);
  source.tokens = length + 1;
  // A number counts the documents that are long enough; the others are listed.
  source.documents = 2;
  const auto loaded = load_documents(source, mini());
  REQUIRE(loaded.documents.size() == 1);
  CHECK(loaded.documents[0].id == "a");
  REQUIRE(loaded.skipped.size() == 1);
  CHECK(loaded.skipped[0].id == "b");
  CHECK(loaded.skipped[0].tokens == length);
  CHECK(loaded.description.find("b (" + std::to_string(length) + ")") != std::string::npos);

  source.documents.reset();
  source.ids = {"b", "a"};
  source.tokens.reset();
  source.join = true;
  const auto joined = load_documents(source, mini());
  REQUIRE(joined.documents.size() == 1);
  std::vector<int32_t> expected = all.documents[1].tokens;
  expected.insert(expected.end(), all.documents[0].tokens.begin(), all.documents[0].tokens.end());
  CHECK(joined.documents[0].tokens == expected);
  CHECK(joined.documents[0].id == "b+a");
  CHECK(joined.documents[0].complete);
  for (size_t budget = 2; budget <= expected.size(); ++budget) {
    source.tokens = static_cast<int64_t>(budget);
    const Document cut = load_documents(source, mini()).documents.at(0);
    CHECK(cut.id == "b+a");
    CHECK(cut.complete == (budget == expected.size()));
    CHECK(cut.tokens == std::vector<int32_t>(expected.begin(),
                                             expected.begin() + static_cast<ptrdiff_t>(budget)));
  }
  source.tokens = static_cast<int64_t>(expected.size()) + 1;
  CHECK_THROWS_WITH_AS(load_documents(source, mini()), doctest::Contains("joined documents have"),
                       std::invalid_argument);
}

TEST_CASE("what is missing or wrong is named") {
  TemporaryFolder folder;
  DataSource source;
  source.kind = DataSource::Kind::kPg19;
  source.path = folder.path();
  const auto fails = [&](const char* message) {
    CHECK_THROWS_WITH_AS(load_documents(source, mini()), doctest::Contains(message),
                         std::runtime_error);
  };
  const auto refuses = [&](const char* message) {
    CHECK_THROWS_WITH_AS(load_documents(source, mini()), doctest::Contains(message),
                         std::invalid_argument);
  };
  fails("no metadata.csv; PG-19 is looked for as");
  fails("(without a header: book_id,short_book_title,publication_date,book_link)");
  fails("test/<book_id>.txt; it is published by github.com/deepmind/pg19");
  folder.write("metadata.csv",
               "7,\"Boats, \"\"old\"\" and new by A\",1900,x\n8,Two,1901,x\n9,Three,1902,x\n");
  fails("no folder test");
  folder.write("test/55.txt", "x");
  fails("metadata.csv lists none of the books in folder test");
  folder.write("test/9.txt", "nine");
  folder.write("test/7.txt", "seven");
  const auto entries = list_documents(source);
  REQUIRE(entries.size() == 2);
  CHECK(entries[0].id == "7");
  CHECK(entries[0].title == "Boats, \"old\" and new by A");
  CHECK(entries[1].id == "9");
  source.ids = {"8"};
  refuses("no document '8' in");
  refuses("2 are there: 7 9");
  source.ids = {"9", "9"};
  refuses("'9' is listed twice");
  source.ids.clear();
  source.documents = 0;
  refuses("documents is 0");
  source.documents.reset();
  source.tokens = 1;
  refuses("tokens is 1, expected 2 or more");
  source.tokens.reset();
  folder.write("test/7.txt", "bad \xFF byte");
  fails("7.txt: not UTF-8 at byte 4 (value 255)");
  folder.write("test/7.txt", "");
  fails("7.txt: the text is empty");
  source.split = "train";
  fails("no folder train");

  source.kind = DataSource::Kind::kText;
  source.path = folder.path() / "nowhere";
  fails("no such file or folder");
  source.path = folder.path();
  fails("no *.txt in this folder");
  folder.write("names/\xFF.txt", "text");
  source.path = folder.path() / "names";
  fails("its name is not UTF-8; rename it");
  source.path = folder.path() / "test" / "9.txt";
  CHECK(load_documents(source, mini()).documents.at(0).id == "9");
  source.path.clear();
  refuses("path is not set");
}

TEST_CASE("PG-19 books") {
  DataSource source;
  source.kind = DataSource::Kind::kPg19;
  source.path = test::case_path("datasets/pg19");
  if (source.path.empty()) return;
  CHECK(list_documents(source).size() == 26);
  source.split = "validation";
  CHECK(list_documents(source).size() == 3);
  source.split = "test";
  source.ids = {"3608"};
  source.tokens = 131072;
  for (const char* name : {"qwen3", "mistral-v1"}) {
    const std::string folder = test::case_path(std::string("tokenizers/") + name);
    if (folder.empty()) continue;
    const auto tokenizer = load_tokenizer(folder);
    const Document book = load_documents(source, *tokenizer).documents.at(0);
    CHECK(book.title == "The Ragged Trousered Philanthropists by Robert Tressell");
    CHECK(book.tokens.size() == 131072);
    CHECK_FALSE(book.complete);
    // CRLF is read as LF.
    const std::string text = tokenizer->decode(book.tokens);
    CHECK(text.find('\r') == std::string::npos);
    const std::vector<int32_t> whole = tokenizer->encode(read_text(source.path / "test/3608.txt"));
    const size_t bos = tokenizer->bos_id() ? 1 : 0;
    CHECK(std::equal(book.tokens.begin() + static_cast<ptrdiff_t>(bos), book.tokens.end(),
                     whole.begin()));
  }
  source.tokens = 4'000'000;
  CHECK_THROWS_WITH_AS(load_documents(source, mini()), doctest::Contains("the longest, 3608, has"),
                       std::invalid_argument);
}

}  // namespace
}  // namespace replayeval
