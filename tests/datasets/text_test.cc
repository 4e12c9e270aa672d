// The parts under the tokenizers: UTF-8, normalization, patterns, pre-tokenizers, merging, CSV.
#include <doctest/doctest.h>
#include <unicode/unorm2.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "datasets/bpe.h"
#include "datasets/csv.h"
#include "datasets/pre_tokenize.h"
#include "datasets/regex.h"
#include "datasets/tokenizer.h"
#include "datasets/unicode_normalize.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

using Json = nlohmann::json;

TEST_CASE("UTF-8: every code point, and the ill-formed sequences of the Unicode standard") {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(c, &text);
    const Utf8Step step = utf8_step(text);
    REQUIRE(step.kind == Utf8Step::Kind::kCodePoint);
    REQUIRE(step.length == text.size());
    REQUIRE(step.code_point == c);
    for (size_t cut = 1; cut < text.size(); ++cut) {
      REQUIRE(utf8_step(text.substr(0, cut)).kind == Utf8Step::Kind::kIncomplete);
    }
  }
  // Unicode 15.0, section 3.9, tables 3-8 to 3-11: lengths of the maximal subparts.
  const auto subparts = [](std::string_view bytes) {
    std::vector<uint32_t> lengths;
    while (!bytes.empty()) {
      const Utf8Step step = utf8_step(bytes);
      lengths.push_back(step.kind == Utf8Step::Kind::kCodePoint ? 0 : step.length);
      bytes.remove_prefix(step.length);
    }
    return lengths;
  };
  using Lengths = std::vector<uint32_t>;
  CHECK(subparts("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41") == Lengths{1, 1, 1, 1, 1, 1, 1, 1, 0});
  CHECK(subparts("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41") == Lengths{1, 1, 1, 1, 1, 1, 1, 1, 0});
  CHECK(subparts("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42") == Lengths{1, 1, 1, 1, 1, 0, 1, 1, 0});
  CHECK(subparts("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41") == Lengths{2, 1, 3, 2, 0});
  CHECK(find_invalid_utf8("ab\u00E9\xC3") == 4);
  CHECK(find_invalid_utf8("ab\u00E9") == std::string_view::npos);
}

std::string icu_normalize(const std::string& text, NormalForm form) {
  UErrorCode error = U_ZERO_ERROR;
  const UNormalizer2* data = form == NormalForm::kNfc    ? unorm2_getNFCInstance(&error)
                             : form == NormalForm::kNfd  ? unorm2_getNFDInstance(&error)
                             : form == NormalForm::kNfkc ? unorm2_getNFKCInstance(&error)
                                                         : unorm2_getNFKDInstance(&error);
  std::u16string source, result(64 * text.size() + 16, u'\0');
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, &i);
    if (c >= 0x10000) {
      source += static_cast<char16_t>(0xD7C0 + (c >> 10));
      source += static_cast<char16_t>(0xDC00 + (c & 0x3FF));
    } else {
      source += static_cast<char16_t>(c);
    }
  }
  const int32_t length =
      unorm2_normalize(data, source.data(), static_cast<int32_t>(source.size()), result.data(),
                       static_cast<int32_t>(result.size()), &error);
  REQUIRE(U_SUCCESS(error));
  std::string out;
  for (int32_t i = 0; i < length; ++i) {
    char32_t c = result[static_cast<size_t>(i)];
    if (c >= 0xD800 && c < 0xDC00)
      c = ((c - 0xD7C0) << 10) + (result[static_cast<size_t>(++i)] & 0x3FF);
    append_utf8(c, &out);
  }
  return out;
}

TEST_CASE("normalization equals ICU's own on every code point and on random mixtures") {
  const NormalForm forms[] = {NormalForm::kNfc, NormalForm::kNfd, NormalForm::kNfkc,
                              NormalForm::kNfkd};
  for (NormalForm form : forms) {
    std::string all;
    for (char32_t c = 1; c <= 0x10FFFF; ++c) {
      if (c >= 0xD800 && c <= 0xDFFF) continue;
      append_utf8(c, &all);
      // A letter between, so that neighbours by number do not compose; and a mark that composes
      // with some.
      if (c % 2 == 0) append_utf8('x', &all);
      if (c % 3 == 0) append_utf8(0x301, &all);
      if (all.size() > 4000) {
        REQUIRE(normalize_unicode(all, form) == icu_normalize(all, form));
        all.clear();
      }
    }
    std::mt19937_64 random(1);
    const std::pair<char32_t, char32_t> ranges[] = {
        {0x41, 0x7A},   {0x300, 0x34E}, {0xC0, 0x24F},    {0x1100, 0x11FF},  {0xAC00, 0xAC80},
        {0x591, 0x5C7}, {0x93C, 0x94D}, {0x1E00, 0x1EFF}, {0x1D15E, 0x1D172}};
    for (int i = 0; i < 3000; ++i) {
      std::string text;
      for (size_t k = random() % 24; k > 0; --k) {
        const auto [low, high] = ranges[random() % std::size(ranges)];
        append_utf8(low + static_cast<char32_t>(random() % (high - low + 1)), &text);
      }
      CAPTURE(text);
      REQUIRE(normalize_unicode(text, form) == icu_normalize(text, form));
    }
  }
}

std::vector<std::string> matches(const std::string& pattern, const std::string& text) {
  std::vector<std::string> found;
  Regex(pattern).for_each_match(text, [&](size_t begin, size_t end) {
    found.push_back(text.substr(begin, end - begin));
    return true;
  });
  return found;
}

TEST_CASE("patterns mean what they mean to Oniguruma") {
  using Words = std::vector<std::string>;
  // White_Space: U+0085 and U+00A0 are, U+180E (which PCRE2's \s has), U+001C and U+200B are not.
  CHECK(matches("\\s",
                "a\u0085b\u00A0c\u180Ed\x1C"
                "e\u200Bf\u3000g") == Words{"\u0085", "\u00A0", "\u3000"});
  CHECK(matches("[^\\s]+", "a\u180E b") == Words{"a\u180E", "b"});
  CHECK(matches("\\S+", "a\u180E b") == Words{"a\u180E", "b"});
  // Word characters: combining marks, connectors, Latin-1 fractions; not other numbers than Nd
  // elsewhere.
  CHECK(matches("\\w+", "e\u0301_\u00BD-\u2153\u24B6") == Words{"e\u0301_\u00BD", "\u24B6"});
  CHECK(matches("\\W", "a\u2153b") == Words{"\u2153"});
  CHECK(matches("\\h+", "xAf09g ") == Words{"Af09"});
  CHECK(matches("(?i:'s)", "'s 'S '\u017F") == Words{"'s", "'S", "'\u017F"});
  CHECK(matches("^a$", "a\nb\na") == Words{"a", "a"});
  CHECK(matches("[]a]+", "x]a") == Words{"]a"});
  CHECK(matches("[[:alpha:]]+", "1\u00E9a2") == Words{"\u00E9a"});
  CHECK(matches("x*", "axb") == Words{"", "x", ""});
  CHECK(translate_pattern("[\\s\\d]\\\\s") == "[\\p{White_Space}\\d]\\\\s");
  CHECK_THROWS_AS(Regex("[a[b]]"), std::runtime_error);
  CHECK_THROWS_AS(Regex("[a&&b]"), std::runtime_error);
  CHECK_THROWS_AS(Regex("[\\W]"), std::runtime_error);
}

TEST_CASE("a match that gives back twelve million characters is found") {
  const std::string text(12'000'000, 'A');
  size_t total = 0;
  Regex("[\\p{Lu}\\p{Lo}]*[\\p{Ll}\\p{Lo}]+|[\\p{Lu}\\p{Lo}]+")
      .for_each_match(text, [&](size_t begin, size_t end) {
        total += end - begin;
        return true;
      });
  CHECK(total == text.size());
}

std::vector<std::string> words(const Json& config, const std::string& text) {
  std::vector<std::string> found;
  PreTokenizer(config).for_each_word(text, [&](std::string_view word) {
    found.emplace_back(word);
    return true;
  });
  return found;
}

// Answers by the tokenizers library (0.23).
TEST_CASE("split behaviours") {
  using Words = std::vector<std::string>;
  const std::string text = "the--final-count";
  const auto split = [&](const char* behavior, bool invert) {
    return words({{"type", "Split"},
                  {"pattern", {{"String", "-"}}},
                  {"behavior", behavior},
                  {"invert", invert}},
                 text);
  };
  CHECK(split("Removed", false) == Words{"the", "final", "count"});
  CHECK(split("Isolated", false) == Words{"the", "-", "-", "final", "-", "count"});
  CHECK(split("MergedWithPrevious", false) == Words{"the-", "-", "final-", "count"});
  CHECK(split("MergedWithNext", false) == Words{"the", "-", "-final", "-count"});
  CHECK(split("Contiguous", false) == Words{"the", "--", "final", "-", "count"});
  CHECK(split("Removed", true) == Words{"-", "-", "-"});
  CHECK_THROWS_AS(split("Apart", false), std::runtime_error);
  CHECK(words({{"type", "Digits"}, {"individual_digits", true}}, "a12b") ==
        Words{"a", "1", "2", "b"});
  CHECK(words({{"type", "Digits"}, {"individual_digits", false}}, "a12b") == Words{"a", "12", "b"});
  CHECK(words({{"type", "Punctuation"}}, "a.,\u3002b$") ==
        Words{"a", ".", ",", "\u3002", "b", "$"});
  CHECK(words({{"type", "ByteLevel"}}, "it's  2 x") == Words{" it", "'s", " ", " 2", " x"});
  // A step behind ByteLevel sees the spelled bytes: U+00B2 stands for byte B2, and is a number.
  CHECK(words({{"type", "Sequence"},
               {"pretokenizers",
                {{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}},
                 {{"type", "Digits"}, {"individual_digits", true}}}}},
              "a\u00F2") == Words{"a\xC3", "\xB2"});
}

TEST_CASE("stopping early") {
  int seen = 0;
  PreTokenizer({{"type", "Digits"}, {"individual_digits", true}})
      .for_each_word("a1b2c3", [&](std::string_view) { return ++seen < 3; });
  CHECK(seen == 3);
}

TEST_CASE("bytes are spelled as GPT-2 does") {
  CHECK(spell_bytes(" \nA~\x7F\xAD\xFF") == "\u0120\u010AA~\u0121\u0143\u00FF");
  std::string all, back;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  CHECK(unspell_bytes(spell_bytes(all), &back));
  CHECK(back == all);
  CHECK_FALSE(unspell_bytes("\u0144", &back));
  CHECK_FALSE(unspell_bytes(" ", &back));
}

// The definition, one merge at a time: the lowest rank, of those the leftmost.
std::vector<int32_t> merge_slowly(const std::vector<MergeRule>& rules,
                                  std::vector<int32_t> symbols) {
  std::map<std::pair<int32_t, int32_t>, const MergeRule*> table;
  for (const MergeRule& rule : rules) table[{rule.left, rule.right}] = &rule;
  while (true) {
    const MergeRule* best = nullptr;
    size_t place = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = table.find({symbols[i], symbols[i + 1]});
      if (found != table.end() && (best == nullptr || found->second->rank < best->rank)) {
        best = found->second;
        place = i;
      }
    }
    if (best == nullptr) return symbols;
    symbols[place] = best->result;
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(place) + 1);
  }
}

TEST_CASE("merging a stream equals merging by definition") {
  std::mt19937_64 random(7);
  for (int round = 0; round < 400; ++round) {
    // Ranks in random order: later merges make pairs of lower rank than the current one.
    const auto alphabet = static_cast<int32_t>(1 + random() % 4);
    const size_t count = 1 + random() % 30;
    std::vector<uint32_t> ranks(count);
    for (size_t i = 0; i < count; ++i) ranks[i] = static_cast<uint32_t>(round % 2 == 0 ? i : i / 3);
    std::shuffle(ranks.begin(), ranks.end(), random);
    std::vector<MergeRule> rules;
    for (size_t i = 0; i < count; ++i) {
      const auto known = static_cast<uint64_t>(alphabet) + i;
      const auto left = static_cast<int32_t>(random() % known),
                 right = static_cast<int32_t>(random() % known);
      const bool taken = std::any_of(rules.begin(), rules.end(), [&](const MergeRule& r) {
        return r.left == left && r.right == right;
      });
      rules.push_back(taken ? MergeRule{1000 + static_cast<int32_t>(i), 0,
                                        alphabet + static_cast<int32_t>(i), ranks[i]}
                            : MergeRule{left, right, alphabet + static_cast<int32_t>(i), ranks[i]});
    }
    const MergeTable table(rules, {});
    std::vector<int32_t> merged, expected;
    MergeStream stream(table, &merged);
    for (int word = 0; word < 20; ++word) {
      std::vector<int32_t> symbols(random() % (word == 0 ? 300 : 12));
      for (int32_t& symbol : symbols)
        symbol = static_cast<int32_t>(random() % static_cast<uint64_t>(alphabet));
      for (int32_t symbol : symbols) stream.push(symbol);
      stream.end_word();
      const auto slow = merge_slowly(rules, symbols);
      expected.insert(expected.end(), slow.begin(), slow.end());
      REQUIRE(merged == expected);
    }
  }
}

TEST_CASE("a stream is cut exactly where no rule can join") {
  // 0 1 -> 10, 10 2 -> 11: the pairs (0, 1) and (1, 2) can be crossed.
  const std::vector<MergeRule> rules{{0, 1, 10, 0}, {10, 2, 11, 1}};
  const MergeTable table(rules, {});
  CHECK(table.crossable(0, 1));
  CHECK(table.crossable(1, 2));
  CHECK_FALSE(table.crossable(0, 2));
  CHECK_FALSE(table.crossable(2, 0));
  // Symbol 10 may stand in the input too: then (10, 2) is a boundary of initial symbols as well.
  CHECK(MergeTable(rules, {10}).crossable(10, 2));
  CHECK_FALSE(table.crossable(10, 2));
  const std::vector<MergeRule> circle{{0, 0, 2, 0}, {2, 2, 0, 1}};
  CHECK_THROWS_AS(MergeTable(circle, {}), std::runtime_error);
}

TEST_CASE("csv") {
  const auto rows = parse_csv("a,\"b,\"\"c\"\"\",\r\n\"x\ny\",5\" tall,\n\nlast", "f.csv");
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].cells == std::vector<std::string>{"a", "b,\"c\"", ""});
  CHECK(rows[1].cells == std::vector<std::string>{"x\ny", "5\" tall", ""});
  CHECK(rows[2].cells == std::vector<std::string>{"last"});
  CHECK(rows[1].line == 2);
  CHECK(rows[2].line == 5);
  CHECK(parse_csv("", "f.csv").empty());
  CHECK_THROWS_WITH_AS(
      parse_csv("a\nb,\"c\nd", "f.csv"),
      doctest::Contains("f.csv:2: row 2: line 2, cell 2: the quote that opens here never closes"),
      std::runtime_error);
  CHECK_THROWS_WITH_AS(parse_csv("\"a\"b", "f.csv"),
                       doctest::Contains("f.csv:1: row 1: line 1, cell 1: text follows"),
                       std::runtime_error);
}

}  // namespace
}  // namespace replayeval
