// Tokenizers against stored answers, the streaming decoder, limits, error messages, and time on
// long runs.
#include "datasets/tokenizer.h"

#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "base/hash.h"
#include "datasets/pre_tokenize.h"
#include "datasets/token_stream.h"
#include "datasets/tokenizer_formats.h"
#include "datasets/utf8.h"
#include "tests/support/case_file.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

using test::TemporaryFolder;
using Json = nlohmann::json;

const char* const kFolders[] = {"qwen3",      "qwen3_5-first60k", "tekken-first50k",
                                "mistral-v1", "mistral-v1-json",  "sp-unigram-ja"};

std::string stored(const std::string& folder) { return test::case_path("tokenizers/" + folder); }

std::string mini_model() { return std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-mamba2"; }

// Loaded once for all tests; null (after a line that says so) when the folder is missing.
const Tokenizer* tokenizer_of(const std::string& folder) {
  static std::map<std::string, std::unique_ptr<Tokenizer>> loaded;
  if (folder.empty()) return nullptr;
  auto& tokenizer = loaded[folder];
  if (!tokenizer) tokenizer = load_tokenizer(folder);
  return tokenizer.get();
}

std::vector<std::string> all_folders() {
  std::vector<std::string> folders{mini_model()};
  for (const char* name : kFolders) folders.push_back(stored(name));
  return folders;
}

std::string describe(const TokenizerCheck& check) {
  if (!check.worst) return "no mismatch";
  const auto& w = *check.worst;
  return w.file + ":" + std::to_string(w.line) + ": " + w.what + " differ at " +
         std::to_string(w.first_difference) + "\n  input    " + w.input + "\n  expected " +
         w.expected + "\n  got      " + w.got;
}

// A byte-level tokenizer small enough to follow by hand: 256 bytes, eight merges, an added token of
// each kind.
Json small_tokenizer() {
  Json vocab = Json::object();
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    vocab[spell_bytes({&byte, 1})] = b;
  }
  Json merges = Json::array();
  const auto merge = [&](const std::string& left, const std::string& right) {
    vocab[left + right] = vocab.size();
    merges.push_back({left, right});
  };
  merge("a", "b");                              // 256
  merge("b", "c");                              // 257
  merge("ab", "c");                             // 258
  merge("Ġ", "a");                              // 259: a space is spelled U+0120
  merge("c", "c");                              // 260
  merge("cc", "cc");                            // 261
  merge("\u00C3", "\u00A9");                    // 262: the bytes of U+00E9
  merge(spell_bytes("\r"), spell_bytes("\n"));  // 263
  const auto added = [](int id, const char* content, bool special, bool normalized, bool lstrip,
                        bool single_word) {
    return Json{{"id", id},
                {"content", content},
                {"special", special},
                {"normalized", normalized},
                {"lstrip", lstrip},
                {"rstrip", false},
                {"single_word", single_word}};
  };
  return {
      {"added_tokens",
       {added(264, "<s>", true, false, false, false), added(265, "</s>", true, false, true, false),
        added(266, "e\u0301!", false, true, false, false),
        added(267, "cat", false, false, false, true),
        added(268, "</s", false, false, false, false)}},
      {"normalizer", {{"type", "NFC"}}},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"},
           {"pattern",
            {{"Regex", "(?i:'s)| ?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"}}},
           {"behavior", "Isolated"},
           {"invert", false}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
          {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair", Json::array()},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {264}}, {"tokens", {"<s>"}}}}}}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
}

std::unique_ptr<Tokenizer> load_json(const TemporaryFolder& folder, const Json& file) {
  folder.write("tokenizer.json", file.dump());
  return load_tokenizer(folder.path());
}

std::string random_text(std::mt19937_64* random, size_t pieces) {
  static const char* const kSnippets[] = {
      "the ",   "Fox's",   " 1999",   "\n",           "\r\n",         "   ", "\t",
      "\u00E9", "e\u0301", "\u2581",  "\u65E5\u672C", "\U0001F600",   "<s>", "<0x41>",
      "!!",     "\u00A0",  "aaaaaaa", "\uAC00",       "\u1112\u1161", "x"};
  std::string text;
  for (size_t i = 0; i < pieces; ++i) {
    if ((*random)() % 4 == 0) {
      append_utf8(static_cast<char32_t>(1 + (*random)() % 0xD7FF), &text);
    } else {
      text += kSnippets[(*random)() % std::size(kSnippets)];
    }
  }
  return text;
}

TEST_CASE("every stored encoding and decoding is reproduced") {
  for (const char* name : kFolders) {
    const std::string folder = stored(name);
    if (folder.empty()) continue;
    CAPTURE(name);
    const TokenizerCheck check = check_tokenizer(std::filesystem::path(folder));
    INFO(describe(check));
    CHECK(check.texts == 233);
    CHECK(check.ids_equal == check.texts);
    CHECK(check.with_special_equal == check.with_special);
    CHECK(check.decodes == 233 + 60);
    CHECK(check.decodes_equal == check.decodes);
    CHECK(check.passed());
  }
}

// Ids by tokenizers 0.23.3 and sentencepiece 0.2.3, joined by spaces.
TEST_CASE("a whole book has the ids of the original libraries") {
  const std::string book = test::case_path("datasets/pg19/test/3608.txt");
  if (book.empty()) return;
  struct Stored {
    const char* folder;  // empty: the mini model
    size_t ids;
    const char* sha256;
  };
  const Stored answers[] = {
      {"qwen3", 339441, "7ff7c1302072729efa6010af4069c817b00e9d71719e133443969b5219c254ea"},
      {"qwen3_5-first60k", 354122,
       "75d01f10dcb4df9169302a2f1d8b41f618e98dc107b371f7e81f50730ca7f10a"},
      {"tekken-first50k", 363264,
       "eecbfa4cbc19a3e42d31201d772d26c81db1f29c10b73b4687dd1c048f449d53"},
      {"mistral-v1", 374240, "4be66f84a8639097d935e9899c03bca57c1044deacb9ca0d9ee261928466f752"},
      {"sp-unigram-ja", 1273932,
       "218401ad44971dc345f511b5a2636c349f44319d615d80b448ec7d14209d9eaa"},
      {"", 433858, "77cae51f9fbc1a40e31936d88d42a8150542002365cb2fd9841d3309df103691"},
  };
  const std::string text = read_text(book);
  for (const Stored& answer : answers) {
    const Tokenizer* tokenizer =
        tokenizer_of(*answer.folder == '\0' ? mini_model() : stored(answer.folder));
    if (tokenizer == nullptr) continue;
    CAPTURE(answer.folder);
    const std::vector<int32_t> ids = tokenizer->encode(text);
    CHECK(ids.size() == answer.ids);
    std::string joined;
    for (int32_t id : ids) joined += (joined.empty() ? "" : " ") + std::to_string(id);
    CHECK(sha256_hex(joined) == answer.sha256);
  }
}

TEST_CASE("check_tokenizer names the earliest mismatch") {
  TemporaryFolder folder;
  const auto tokenizer = load_json(folder, small_tokenizer());
  folder.write("expected.jsonl",
               "{\"text\": \"abc\", \"ids\": [256, 99], \"decoded\": \"abc\"}\n"
               "{\"text\": \"b\", \"ids\": [99], \"ids_with_special\": [264, 98]}\n");
  const TokenizerCheck check = check_tokenizer(folder.path());
  CHECK_FALSE(check.passed());
  CHECK(check.texts == 2);
  CHECK(check.ids_equal == 0);
  CHECK(check.with_special_equal == 1);
  CHECK(check.decodes_equal == 1);
  REQUIRE(check.worst);
  CHECK(check.worst->line == 1);
  CHECK(check.worst->what == "ids");
  CHECK(check.worst->expected == "[256, 99]");
  CHECK(check.worst->got == "[258]");
  CHECK(check.worst->first_difference == 0);
  folder.write("expected.jsonl", "{\"text\": 3}\n");
  CHECK_THROWS_WITH_AS(check_tokenizer(folder.path()),
                       doctest::Contains("expected.jsonl:1: expected an object"),
                       std::runtime_error);
}

// The ids of the first group follow from the table by hand; all were also given by the tokenizers
// library (0.23).
TEST_CASE("a small tokenizer.json") {
  TemporaryFolder folder;
  const auto tokenizer = load_json(folder, small_tokenizer());
  using Ids = std::vector<int32_t>;
  CHECK(tokenizer->vocabulary_size() == 269);
  CHECK(tokenizer->encode("") == Ids{});
  CHECK(tokenizer->encode("abc") == Ids{258});
  CHECK(tokenizer->encode("bcc") == Ids{257, 'c'});
  CHECK(tokenizer->encode("ccccc") == Ids{261, 'c'});
  CHECK(tokenizer->encode("x abc") == Ids{'x', ' ', 258});  // "ab" ranks before " a"
  CHECK(tokenizer->encode("12") == Ids{'1', '2'});
  CHECK(tokenizer->encode("e\u0301") == Ids{262});   // NFC
  CHECK(tokenizer->encode("e\u0301!") == Ids{266});  // found after normalization
  CHECK(tokenizer->encode("a \n</s>b") ==
        Ids{'a', 265, 'b'});  // takes the white space before it along
  CHECK(tokenizer->encode("cats cat") == Ids{'c', 'a', 't', 's', ' ', 267});
  CHECK(tokenizer->encode("<s><s") == Ids{264, '<', 's'});
  CHECK(tokenizer->encode("</s</s>") == Ids{268, 265});  // of two, the longer
  CHECK(tokenizer->encode("\r\n\r\nx") == Ids{263, '\r', '\n', 'x'});
  CHECK(tokenizer->encode_with_special("ab") == Ids{264, 256});
  CHECK(tokenizer->bos_id() == 264);
  CHECK(tokenizer->eos_ids().empty());
  CHECK(tokenizer->id_of("</s>") == 265);
  CHECK(tokenizer->id_of("Ġa") == 259);
  CHECK_FALSE(tokenizer->id_of("<pad>"));
  // One U+FFFD for each maximal subpart; ids without a token give nothing.
  CHECK(tokenizer->decode(Ids{0xE2, 0x82, 'a', 0xFF, 900, -1, 262}) == "\uFFFDa\uFFFD\u00E9");
}

TEST_CASE("bos and eos come from the configuration files beside the tokenizer") {
  TemporaryFolder folder;
  Json file = small_tokenizer();
  const std::string alone = load_json(folder, file)->sha256();
  folder.write("generation_config.json", R"({"bos_token_id": 5, "eos_token_id": [265, 7]})");
  auto tokenizer = load_tokenizer(folder.path());
  CHECK(tokenizer->bos_id() == 264);
  CHECK(tokenizer->eos_ids() == std::vector<int32_t>{265, 7});
  CHECK(tokenizer->sha256() != alone);
  folder.write("tokenizer_config.json", R"({"bos_token": null, "eos_token": {"content": "cat"}})");
  tokenizer = load_tokenizer(folder.path());
  CHECK_FALSE(tokenizer->bos_id());
  CHECK(tokenizer->eos_ids() == std::vector<int32_t>{267, 265, 7});
  folder.write("tokenizer_config.json", R"({"bos_token": "<nope>"})");
  CHECK_THROWS_WITH_AS(load_tokenizer(folder.path()), doctest::Contains("token '<nope>' is not in"),
                       std::runtime_error);
}

TEST_CASE("the mini model's tokenizer") {
  const auto tokenizer = load_tokenizer(mini_model());
  CHECK(tokenizer->vocabulary_size() == 4096);
  CHECK(tokenizer->bos_id() == 1);
  CHECK(tokenizer->eos_ids() == std::vector<int32_t>{2});
  CHECK(tokenizer->sha256().size() == 64);
  std::ifstream file(std::string(REPLAYEVAL_SOURCE_DIR) + "/datasets/sample/test/1.txt");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto ids = tokenizer->encode(text);
  CHECK(tokenizer->decode(ids) == text);
  CHECK(tokenizer->encode_with_special(text).size() == ids.size() + 1);
  // Digits are apart and a newline is a piece of its own (the model's README).
  CHECK(tokenizer->encode("1234").size() == 4);
  CHECK(tokenizer->decode(std::vector<int32_t>{tokenizer->encode("a\nb")[1]}) == "\n");
}

TEST_CASE("merging by rank equals the sentencepiece library") {
  std::mt19937_64 random(3);
  for (const std::string& folder : {mini_model(), stored("mistral-v1")}) {
    if (folder.empty()) continue;
    const auto fast = load_sentencepiece(folder + "/tokenizer.model");
    const auto slow = load_sentencepiece(folder + "/tokenizer.model", true);
    for (int i = 0; i < 400; ++i) {
      const std::string text = random_text(&random, 1 + random() % 60);
      CAPTURE(text);
      REQUIRE(fast->encode(text) == slow->encode(text));
    }
  }
}

// A SentencePiece model file: sentencepiece_model.proto, written by hand. Answers below also by
// sentencepiece 0.2.3.
struct SmallModel {
  struct Piece {
    std::string text;
    float score;
    int type;  // 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
  };
  std::vector<Piece> pieces;
  int model_type;  // 1 unigram, 2 BPE
  bool dummy_prefix, remove_spaces, whitespace_suffix;

  std::string serialized() const {
    std::string file;
    for (const Piece& piece : pieces) {
      std::string score(4, '\0');
      std::memcpy(score.data(), &piece.score, 4);
      put_bytes(1, bytes(1, piece.text) + '\x15' + score + number(3, piece.type), &file);
    }
    put_bytes(2, number(3, model_type) + number(24, whitespace_suffix), &file);
    put_bytes(3, bytes(1, "identity") + number(3, dummy_prefix) + number(4, remove_spaces), &file);
    return file;
  }
  static std::string varint(uint64_t value) {
    std::string out;
    for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
    return out + static_cast<char>(value);
  }
  static std::string number(uint64_t field, int value) {
    return varint(field << 3) + varint(static_cast<uint64_t>(value));
  }
  static std::string bytes(uint64_t field, const std::string& value) {
    return varint(field << 3 | 2) + varint(value.size()) + value;
  }
  static void put_bytes(uint64_t field, const std::string& value, std::string* out) {
    *out += bytes(field, value);
  }
};

TEST_CASE("user-defined and unknown characters, spaces: small SentencePiece models") {
  using Ids = std::vector<int32_t>;
  const std::string space = "\u2581";
  SmallModel model{{{"<unk>", 0, 2},       // 0
                    {"<s>", 0, 3},         // 1
                    {"</s>", 0, 3},        // 2
                    {space, -9, 1},        // 3
                    {"a", -5, 1},          // 4
                    {"b", -6, 1},          // 5
                    {"c", -7, 1},          // 6
                    {"ab", -2, 1},         // 7
                    {"bc", -1, 1},         // 8
                    {space + "a", -3, 1},  // 9
                    {"cc", -4, 4},         // 10: found in the text before anything merges
                    {"ccb", -6, 1}},       // 11: out of reach, since 10 never merges
                   2,
                   true,
                   false,
                   false};
  TemporaryFolder folder;
  const auto load = [&] {
    folder.write("tokenizer.model", model.serialized());
    return load_tokenizer(folder.path());
  };
  const auto agrees = [&](const Tokenizer& tokenizer, const std::string& text) {
    CHECK(tokenizer.encode(text) ==
          load_sentencepiece(folder.path() / "tokenizer.model", true)->encode(text));
    return tokenizer.encode(text);
  };
  auto tokenizer = load();
  CHECK(agrees(*tokenizer, "abc") == Ids{9, 8});
  CHECK(agrees(*tokenizer, "b ab") == Ids{3, 5, 3, 7});  // "ab" before "\u2581a"
  CHECK(agrees(*tokenizer, "accb") == Ids{9, 10, 5});
  CHECK(agrees(*tokenizer, "xyazcc") == Ids{3, 0, 4, 0, 10});
  CHECK(agrees(*tokenizer, "  ") == Ids{3, 3, 3});
  CHECK(tokenizer->encode_with_special("a") == Ids{1, 9});
  CHECK(tokenizer->decode(Ids{1, 9, 8, 2, 3, 0, 7}) == "abc  \u2047 ab");
  CHECK(tokenizer->decode(Ids{3, 9, 9}) == " a a");

  model.remove_spaces = true;
  tokenizer = load();
  CHECK(agrees(*tokenizer, "  b   a ") == Ids{3, 5, 9});
  CHECK(agrees(*tokenizer, "   ") == Ids{});
  CHECK(tokenizer->decode(Ids{3, 3, 9, 9}) == "a a");

  model.whitespace_suffix = true;
  tokenizer = load();
  CHECK(agrees(*tokenizer, " a b") == Ids{4, 3, 5, 3});

  // Unigram: the best sum, -2 - 7 for "ab" "c" against -5 - 1 for "a" "bc"; a user-defined piece
  // always wins.
  model.whitespace_suffix = model.remove_spaces = model.dummy_prefix = false;
  model.model_type = 1;
  tokenizer = load();
  CHECK(agrees(*tokenizer, "abc") == Ids{4, 8});
  CHECK(agrees(*tokenizer, "ab") == Ids{7});
  CHECK(agrees(*tokenizer, "xxab") == Ids{0, 7});
  CHECK(tokenizer->encode("acc") == Ids{4, 10});
  CHECK(tokenizer->encode("accb") == Ids{4, 10, 5});  // 0.1 - 6 against -6
  CHECK(tokenizer->decode(Ids{9, 10}) == " acc");

  // An unused piece is never the answer.
  model.model_type = 2;
  model.pieces[8].type = 5;
  tokenizer = load();
  CHECK(agrees(*tokenizer, "abc") == Ids{4, 5, 6});
  model.model_type = 1;
  tokenizer = load();
  CHECK(agrees(*tokenizer, "abc") == Ids{7, 6});
}

TEST_CASE("a limit gives the first ids of the whole text") {
  std::mt19937_64 random(4);
  for (const std::string& folder : all_folders()) {
    const Tokenizer* tokenizer = tokenizer_of(folder);
    if (tokenizer == nullptr) continue;
    CAPTURE(folder);
    for (int i = 0; i < 20; ++i) {
      const std::string text = random_text(&random, 40);
      const auto all = tokenizer->encode(text);
      for (size_t limit = 0; limit <= all.size() + 1; ++limit) {
        auto expected = all;
        if (expected.size() > limit) expected.resize(limit);
        REQUIRE(tokenizer->encode(text, limit) == expected);
      }
    }
  }
}

TEST_CASE("the streaming decoder never splits a code point and adds up to decode") {
  std::mt19937_64 random(5);
  for (const std::string& folder : all_folders()) {
    const Tokenizer* tokenizer = tokenizer_of(folder);
    if (tokenizer == nullptr) continue;
    CAPTURE(folder);
    StreamingDecoder decoder(*tokenizer);
    for (int i = 0; i < 300; ++i) {
      std::vector<int32_t> ids;
      if (i % 3 == 0) {
        ids = tokenizer->encode(random_text(&random, 30));
      } else {
        for (size_t k = random() % 40; k > 0; --k) {
          // Half of them from the front, where the single bytes are; some beyond the vocabulary.
          const auto size = static_cast<uint64_t>(tokenizer->vocabulary_size());
          ids.push_back(static_cast<int32_t>(random() % (random() % 2 == 0 ? 300 : size + 10)));
        }
      }
      const std::string whole = tokenizer->decode(ids);
      std::string sum;
      for (int32_t id : ids) {
        const std::string part = decoder.push(id);
        REQUIRE(find_invalid_utf8(part) == std::string::npos);
        sum += part;
        REQUIRE(whole.starts_with(sum));
      }
      REQUIRE(sum + decoder.finish() == whole);
    }
  }
}

TEST_CASE("text is handed out as soon as it is certain") {
  TemporaryFolder folder;
  const auto tokenizer = load_json(folder, small_tokenizer());
  StreamingDecoder decoder(*tokenizer);
  CHECK(decoder.push('a') == "a");
  CHECK(decoder.push(0xE2) == "");
  CHECK(decoder.push(0x82) == "");
  CHECK(decoder.push(0xAC) == "\u20AC");
  CHECK(decoder.push(0xE2) == "");
  CHECK(decoder.push('b') == "\uFFFDb");
  CHECK(decoder.push(0xF0) == "");
  CHECK(decoder.finish() == "\uFFFD");
  CHECK(decoder.finish() == "");
}

TEST_CASE("wrong tokenizers and texts are refused with place and reason") {
  TemporaryFolder folder;
  CHECK_THROWS_WITH_AS(
      load_tokenizer(folder.path()),
      doctest::Contains("no tokenizer: looked for tokenizer.json and tokenizer.model"),
      std::runtime_error);
  const auto refuses = [&](const Json& file, const char* message) {
    CHECK_THROWS_WITH_AS(load_json(folder, file), doctest::Contains(message), std::runtime_error);
  };
  Json file = small_tokenizer();
  file["model"]["type"] = "WordPiece";
  refuses(file, "model type 'WordPiece' is not known; known: BPE");
  file = small_tokenizer();
  file["pre_tokenizer"]["pretokenizers"][0]["type"] = "Bert";
  refuses(file, "pre_tokenizer 'Bert' is not known");
  file = small_tokenizer();
  file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a&&b]";
  refuses(file, "pattern '[a&&b]': a class intersection at offset 2");
  file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a";
  refuses(file, "pattern '(a': missing closing parenthesis at offset 2");
  file = small_tokenizer();
  file["model"]["merges"].push_back({"a", "zz"});
  refuses(file, "merge 8: token 'zz' is not in vocab");
  file = small_tokenizer();
  file["decoder"]["type"] = "WordPiece";
  refuses(file, "decoder 'WordPiece' is not supported");
  folder.write("tokenizer.json", "{\"model\": ");
  CHECK_THROWS_WITH_AS(load_tokenizer(folder.path()), doctest::Contains("tokenizer.json: "),
                       std::runtime_error);
  folder.write("cut.model", std::string("\x0A\x10\x0A\x02", 4));
  CHECK_THROWS_WITH_AS(load_tokenizer(folder.path() / "cut.model"),
                       doctest::Contains("the file ends inside a field"), std::runtime_error);
  folder.write("passwd", "root:x:0:0:root:/root:/bin/bash\n");
  CHECK_THROWS_WITH_AS(
      load_tokenizer(folder.path() / "passwd"),
      doctest::Contains("passwd: expected a SentencePiece model, or a tokenizer.json under a name "
                        "that ends in .json; read as the former: "),
      std::runtime_error);

  const auto tokenizer = load_json(folder, small_tokenizer());
  const auto mini = load_tokenizer(mini_model());
  for (const Tokenizer* t : {tokenizer.get(), mini.get()}) {
    CHECK_THROWS_WITH_AS(t->encode("abc\xE2\x82"), doctest::Contains("not UTF-8 at byte 3"),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(t->encode("\xED\xA0\x80"), doctest::Contains("not UTF-8 at byte 0"),
                         std::invalid_argument);
  }
}

// A million bytes take well under a second; with a quadratic step anywhere it would be hours. The
// bound only has to lie between, on a busy machine and with sanitizers.
TEST_CASE("long runs take linear time") {
  constexpr size_t kBytes = 1'000'000;
  const auto repeated = [](std::string_view unit) {
    std::string text;
    while (text.size() < kBytes) text += unit;
    return text;
  };
  const std::string texts[] = {
      repeated("a"), repeated("A"),       repeated("\u0301"),  repeated("\u0301\u0316"),
      repeated(" "), repeated("\n"),      repeated("0"),       repeated("\u65E5\u672C"),
      repeated("!"), repeated(" ") + "x", "a" + repeated("'"), repeated("\u1100"),
      repeated("<"), repeated("x ")};
  for (const std::string& folder : all_folders()) {
    const Tokenizer* tokenizer = tokenizer_of(folder);
    if (tokenizer == nullptr) continue;
    for (const std::string& text : texts) {
      const auto start = std::chrono::steady_clock::now();
      tokenizer->encode(text);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      CAPTURE(folder);
      CAPTURE(text.substr(0, 8));
      CHECK(seconds.count() < 30);
    }
  }
}

}  // namespace
}  // namespace replayeval
