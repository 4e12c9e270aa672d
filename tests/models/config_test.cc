// config.json: forms of infinity, nulls, nested text part, rotary settings, and the line that each
// mistake gets.
#include "models/config.h"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>

#include "tests/models/checkpoint_files.h"
#include "tests/support/case_file.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Config parse(std::string_view text) { return Config::parse(text, "m/config.json"); }

std::string refusal(const auto& call) { return message_of<std::invalid_argument>(call); }
}  // namespace

TEST_CASE("infinity in every form") {
  const Config c = parse(R"({"a": {"__float__": "Infinity"}, "b": [0.0, {"__float__": "-Infinity"}],
      "c": Infinity, "d": [-Infinity,Infinity], "e": NaN, "f": {"g": [1, {"h": Infinity}]},
      "s": "Infinity, \" -Infinity NaN", "Infinity": 3})");
  CHECK(c.number("a") == kInfinity);
  CHECK(c.numbers("b") == std::vector<double>{0.0, -kInfinity});
  CHECK(c.number("c") == kInfinity);
  CHECK(c.numbers("d") == std::vector<double>{-kInfinity, kInfinity});
  CHECK(std::isnan(c.number("e")));
  CHECK(c.text("s") == "Infinity, \" -Infinity NaN");
  CHECK(c.integer("Infinity") == 3);
  CHECK(refusal([&] { (void)c.integer("a"); }) ==
        "m/config.json: a: expected an integer, got Infinity");
}

TEST_CASE("typed getters") {
  const Config c =
      parse(R"({"n": 4, "whole": 4.0, "part": 4.5, "big": 1e300, "null": null, "yes": true,
      "word": "silu", "deep": {"a": {"b": 7}}, "list": [1, 2.0], "words": ["M", "E"], "unknown": {"x": []}})");
  CHECK(c.integer("n") == 4);
  CHECK(c.integer("whole") == 4);
  CHECK(c.size("n") == 4);
  CHECK(c.number("n") == 4.0);
  CHECK(c.boolean("yes"));
  CHECK(c.text("word") == "silu");
  CHECK(c.integer("deep.a.b") == 7);
  CHECK(c.integers("list") == std::vector<int64_t>{1, 2});
  CHECK(c.texts("words") == std::vector<std::string>{"M", "E"});
  CHECK(c.members("deep") == std::vector<std::string>{"a"});
  CHECK(c.members("").size() == 11);

  // null and absent take the fallback; a value of another type does not.
  CHECK(!c.has("null"));
  CHECK(!c.has("deep.a.c"));
  CHECK(!c.has("n.b"));
  CHECK(c.integer("null", 9) == 9);
  CHECK(c.number("absent", 0.5) == 0.5);
  CHECK(c.boolean("absent", true));
  CHECK(c.text("null", "x") == "x");
  CHECK(c.count("absent", 0) == 0);
  CHECK(c.members("absent").empty());

  CHECK(refusal([&] { (void)c.integer("part"); }) ==
        "m/config.json: part: expected an integer, got 4.5");
  CHECK(refusal([&] { (void)c.integer("big", 1); }) ==
        "m/config.json: big: expected an integer, got 1e+300");
  CHECK(refusal([&] { (void)c.size("null"); }) ==
        "m/config.json: null: expected an integer of at least 1, got nothing");
  CHECK(refusal([&] { (void)c.number("word", 1.0); }) ==
        "m/config.json: word: expected a number, got \"silu\"");
  CHECK(refusal([&] { (void)c.boolean("n"); }) ==
        "m/config.json: n: expected true or false, got 4");
  CHECK(refusal([&] { (void)c.text("deep.a"); }) ==
        "m/config.json: deep.a: expected a string, got {\"b\":7}");
  CHECK(refusal([&] { (void)c.integers("words"); }) ==
        "m/config.json: words: expected a list of integers, got [\"M\",\"E\"]");
}

TEST_CASE("sizes and counts") {
  const Config c = parse(R"({"zero": 0, "minus": -1, "huge": 1099511627776, "one": 1})");
  CHECK(c.size("one") == 1);
  CHECK(c.count("zero", 5) == 0);
  for (const char* field : {"zero", "minus", "huge"}) {
    CHECK(contains(refusal([&] { (void)c.size(field); }), "expected an integer of at least 1"));
  }
  for (const char* field : {"minus", "huge"}) {
    CHECK(contains(refusal([&] { (void)c.count(field, 0); }), "expected an integer of at least 0"));
  }
}

TEST_CASE("text_config is merged over the fields outside") {
  TemporaryFolder folder;
  write_file(folder / "config.json",
             R"({"model_type": "qwen3_5", "tie_word_embeddings": true, "only_outside": 1,
      "both": 1, "kept": 5, "text_config": {"model_type": "qwen3_5_text", "tie_word_embeddings": false, "both": 2,
      "only_inside": 3, "kept": null, "rope_parameters": {"rope_theta": 7}}})");
  const Config c = Config::load(folder.path());
  CHECK(c.text("model_type") == "qwen3_5_text");
  CHECK(c.integer("both") == 2);
  CHECK(c.integer("only_outside") == 1);
  CHECK(c.integer("only_inside") == 3);
  CHECK(c.integer("kept") == 5);
  CHECK(c.integer("rope_parameters.rope_theta") == 7);
  CHECK(!c.has("text_config"));
  CHECK(!c.has("tie_word_embeddings"));  // the two differ
  CHECK(c.source() == read_file(folder / "config.json"));

  const auto tie = [](std::string_view text) {
    return parse(text).merged_text_config().boolean("tie_word_embeddings");
  };
  CHECK(tie(R"({"tie_word_embeddings": true, "text_config": {}})"));
  CHECK(!tie(R"({"text_config": {"tie_word_embeddings": false}})"));
  CHECK(!tie(R"({"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": false}})"));
}

TEST_CASE("rotary settings, new and old") {
  const RopeConfig fallback{10000.0, 0.25};
  const auto read = [&](std::string_view text) { return rope_config(parse(text), fallback); };
  CHECK(read("{}").theta == 10000.0);
  CHECK(read("{}").partial_rotary_factor == 0.25);
  const RopeConfig old =
      read(R"({"rope_theta": 1e7, "partial_rotary_factor": 0.5, "rope_scaling": null})");
  CHECK(old.theta == 1e7);
  CHECK(old.partial_rotary_factor == 0.5);
  // Files of transformers 5 may repeat the old field; the new object holds.
  const RopeConfig now = read(R"({"partial_rotary_factor": 1.0,
      "rope_parameters": {"rope_theta": 5, "partial_rotary_factor": 0.75, "rope_type": "default", "mrope_section": [1]}})");
  CHECK(now.theta == 5);
  CHECK(now.partial_rotary_factor == 0.75);
  CHECK(read(R"({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}})").theta ==
        10000.0);
  CHECK(refusal([&] { (void)read(R"({"rope_scaling": {"rope_type": "yarn", "factor": 4}})"); }) ==
        "m/config.json: rope_scaling.rope_type: expected \"default\" (scaled rotary positions are "
        "not supported), got "
        "\"yarn\"");
  CHECK(contains(refusal([&] { (void)read(R"({"rope_parameters": {"rope_theta": 0}})"); }),
                 "rope_parameters.rope_theta: expected a positive number, got 0"));
  CHECK(contains(refusal([&] { (void)read(R"({"rope_parameters": 5})"); }),
                 "rope_parameters: expected an object, got 5"));
  CHECK(contains(refusal([&] { (void)read(R"({"rope_scaling": "linear"})"); }),
                 "rope_scaling: expected an object, got \"linear\""));
  CHECK(contains(refusal([&] { (void)read(R"({"partial_rotary_factor": 1.5})"); }),
                 "partial_rotary_factor: expected a number above 0, at most 1, got 1.5"));
}

TEST_CASE("what is no config") {
  CHECK(contains(refusal([&] { (void)parse("{\"a\": }"); }), "m/config.json: expected JSON, got "));
  CHECK(contains(refusal([&] { (void)parse("{\"a\": Infinitys}"); }), "expected JSON, got "));
  CHECK(contains(refusal([&] { (void)parse("{\"a\": 1Infinity}"); }), "expected JSON, got "));
  CHECK(refusal([&] { (void)parse("[1, 2]"); }) ==
        "m/config.json: expected a JSON object, got [1,2]");
  CHECK(
      contains(refusal([&] { (void)parse("Infinity"); }), "expected a JSON object, got Infinity"));
  CHECK(contains(refusal([&] { (void)parse(std::string(200000, '[')); }),
                 "nested deeper than 64 levels"));
  TemporaryFolder folder;
  CHECK(contains(message_of<std::runtime_error>([&] { (void)Config::load(folder.path()); }),
                 "config.json: expected a checkpoint's config.json, got nothing"));
}

TEST_CASE("random damage never crashes the reader") {
  const std::string good =
      R"({"a": {"__float__": "Infinity"}, "b": [0.0, Infinity], "text_config": {"c": -Infinity, "d": "x\"y"}})";
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string text = good;
    for (int k = 0; k < 1 + i % 4; ++k)
      text[random() % text.size()] = static_cast<char>(random() % 256);
    if (i % 3 == 0) text.resize(random() % text.size());
    try {
      const Config c = parse(text).merged_text_config();
      (void)c.members("");
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  CHECK(refused > 1000);
}

TEST_CASE("stored configs of the library") {
  const std::string folder = case_path("models-ref");
  if (folder.empty()) return;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.is_directory()) continue;
    const Config c = Config::load(entry.path());
    CHECK_MESSAGE(c.size("hidden_size") == 64, entry.path().string());
    CHECK(c.size("vocab_size") == 256);
    if (c.has("time_step_limit")) {
      CHECK(c.numbers("time_step_limit") == std::vector<double>{0.0, kInfinity});
    }
    ++files;
  }
  CHECK(files >= 12);
  CHECK(Config::load(folder + "/qwen3_5-dense-hub").text("model_type") == "qwen3_5_text");
}
