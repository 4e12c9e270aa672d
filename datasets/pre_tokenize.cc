#include "datasets/pre_tokenize.h"

#include <array>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "datasets/unicode_normalize.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

using Json = nlohmann::json;

// What ByteLevel splits by when `use_regex` is set (GPT-2's pattern).
constexpr char kByteLevelPattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::string type_of(const Json& config) { return config.value("type", "without a type"); }

Regex pattern_of(const Json& pattern) {
  if (pattern.contains("Regex")) return Regex(pattern.at("Regex").get<std::string>());
  return Regex::literal(pattern.at("String").get<std::string>());
}

struct ByteSpelling {
  std::array<std::string, 256> spelling;
  std::array<int, 0x144> byte;
  ByteSpelling() {
    byte.fill(-1);
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      const char32_t character = printable ? static_cast<char32_t>(b) : next++;
      append_utf8(character, &spelling[static_cast<size_t>(b)]);
      byte[character] = b;
    }
  }
};

const ByteSpelling& byte_spelling() {
  static const ByteSpelling table;
  return table;
}

}  // namespace

std::string spell_bytes(std::string_view bytes) {
  std::string out;
  for (char c : bytes) out += byte_spelling().spelling[static_cast<unsigned char>(c)];
  return out;
}

bool unspell_bytes(std::string_view spelling, std::string* bytes) {
  bytes->clear();
  for (size_t offset = 0; offset < spelling.size();) {
    const char32_t c = next_code_point(spelling, &offset);
    if (c >= byte_spelling().byte.size() || byte_spelling().byte[c] < 0) return false;
    bytes->push_back(static_cast<char>(byte_spelling().byte[c]));
  }
  return true;
}

TextNormalizer::TextNormalizer(const Json& config) {
  if (!config.is_null()) add(config);
}

void TextNormalizer::add(const Json& config) {
  const std::string type = type_of(config);
  const auto add_form = [&](NormalForm form) {
    steps_.push_back([form](std::string_view text) { return normalize_unicode(text, form); });
  };
  if (type == "Sequence") {
    for (const Json& step : config.at("normalizers")) add(step);
  } else if (type == "NFC") {
    add_form(NormalForm::kNfc);
  } else if (type == "NFD") {
    add_form(NormalForm::kNfd);
  } else if (type == "NFKC") {
    add_form(NormalForm::kNfkc);
  } else if (type == "NFKD") {
    add_form(NormalForm::kNfkd);
  } else if (type == "Prepend") {
    steps_.push_back([prefix = config.at("prepend").get<std::string>()](std::string_view text) {
      return text.empty() ? std::string() : prefix + std::string(text);
    });
  } else if (type == "Replace") {
    steps_.push_back([regex = pattern_of(config.at("pattern")),
                      content = config.at("content").get<std::string>()](std::string_view text) {
      std::string out;
      size_t done = 0;
      regex.for_each_match(text, [&](size_t begin, size_t end) {
        out.append(text.substr(done, begin - done)).append(content);
        done = end;
        return true;
      });
      return out.append(text.substr(done));
    });
  } else {
    throw std::runtime_error("normalizer '" + type +
                             "' is not known; known: Sequence NFC NFD NFKC NFKD Prepend Replace");
  }
}

std::string TextNormalizer::apply(std::string_view text) const {
  if (steps_.empty()) return std::string(text);
  std::string out = steps_.front()(text);
  for (size_t i = 1; i < steps_.size(); ++i) out = steps_[i](out);
  return out;
}

PreTokenizer::PreTokenizer(const Json& config) {
  if (!config.is_null()) add(config);
  // Spelling the bytes as characters matters only to later steps.
  if (!steps_.empty() && steps_.back().kind == Step::Kind::kSpellBytes) steps_.pop_back();
}

void PreTokenizer::add(const Json& config) {
  const std::string type = type_of(config);
  if (type == "Sequence") {
    for (const Json& step : config.at("pretokenizers")) add(step);
  } else if (type == "Split") {
    add_split(pattern_of(config.at("pattern")), config.at("behavior"),
              config.value("invert", false));
  } else if (type == "ByteLevel") {
    if (byte_level_) throw std::runtime_error("pre_tokenizer: two ByteLevel steps");
    byte_level_ = true;
    if (config.value("add_prefix_space", true)) {
      steps_.push_back({Step::Kind::kPrefixSpace, nullptr});
    }
    if (config.value("use_regex", true)) add_split(Regex(kByteLevelPattern), "Isolated", false);
    steps_.push_back({Step::Kind::kSpellBytes, nullptr});
  } else if (type == "Digits") {
    add_split(Regex("\\p{N}"), config.value("individual_digits", false) ? "Isolated" : "Contiguous",
              false);
  } else if (type == "Punctuation") {
    add_split(Regex("[!-/:-@\\[-`{-~\\p{P}]"), config.value("behavior", "Isolated"), false);
  } else {
    throw std::runtime_error("pre_tokenizer '" + type +
                             "' is not known; known: Sequence Split ByteLevel Digits Punctuation");
  }
}

void PreTokenizer::add_split(Regex regex, const std::string& behavior, bool invert) {
  Step step{Step::Kind::kSplit, std::make_shared<const Regex>(std::move(regex)),
            Behavior::kIsolated, invert};
  if (behavior == "Removed") {
    step.behavior = Behavior::kRemoved;
  } else if (behavior == "MergedWithPrevious") {
    step.behavior = Behavior::kMergedWithPrevious;
  } else if (behavior == "MergedWithNext") {
    step.behavior = Behavior::kMergedWithNext;
  } else if (behavior == "Contiguous") {
    step.behavior = Behavior::kContiguous;
  } else if (behavior != "Isolated") {
    throw std::runtime_error(
        "pre_tokenizer Split: behavior '" + behavior +
        "' is not known; known: Removed Isolated MergedWithPrevious MergedWithNext Contiguous");
  }
  steps_.push_back(std::move(step));
}

bool PreTokenizer::split(const Step& step, std::string_view text,
                         const std::function<bool(std::string_view)>& piece) const {
  struct Range {
    size_t begin, end;
    bool is_match;
  };
  Range held{0, 0, false};
  bool has_held = false, previous_match = false;
  bool go_on = true;
  const auto release = [&] {
    if (has_held && held.end > held.begin)
      go_on = piece(text.substr(held.begin, held.end - held.begin));
    has_held = false;
    return go_on;
  };
  // Ranges come alternately: matches, and what lies between them. `held` may still grow by its
  // right neighbour.
  const auto take = [&](size_t begin, size_t end, bool is_match) {
    is_match = is_match != step.invert;
    if (step.behavior == Behavior::kRemoved && is_match) return true;
    bool grows = false;
    if (has_held) {
      grows = (step.behavior == Behavior::kContiguous && is_match == held.is_match) ||
              (step.behavior == Behavior::kMergedWithPrevious && is_match && !previous_match) ||
              (step.behavior == Behavior::kMergedWithNext && held.is_match && !is_match);
    }
    previous_match = is_match;
    if (grows) {
      held.end = end;
      held.is_match = is_match;
      return true;
    }
    if (!release()) return false;
    held = {begin, end, is_match};
    has_held = true;
    return true;
  };
  size_t done = 0;
  step.regex->for_each_match(text, [&](size_t begin, size_t end) {
    if (begin > done && !take(done, begin, false)) return false;
    done = end;
    return begin == end ? release() : take(begin, end, true);
  });
  if (go_on && done < text.size()) take(done, text.size(), false);
  return go_on && release();
}

bool PreTokenizer::run(size_t step, std::string_view text,
                       const std::function<bool(std::string_view)>& word) const {
  if (step == steps_.size()) return word(text);
  switch (steps_[step].kind) {
    case Step::Kind::kPrefixSpace: {
      if (text.starts_with(' ')) return run(step + 1, text, word);
      return run(step + 1, " " + std::string(text), word);
    }
    case Step::Kind::kSpellBytes: {
      return run(step + 1, spell_bytes(text), [&](std::string_view spelled) {
        std::string bytes;
        if (!unspell_bytes(spelled, &bytes))
          throw std::logic_error("pre_tokenizer: a spelling was cut");
        return word(bytes);
      });
    }
    case Step::Kind::kSplit:
      break;
  }
  return split(steps_[step], text,
               [&](std::string_view piece) { return run(step + 1, piece, word); });
}

void PreTokenizer::for_each_word(std::string_view text,
                                 const std::function<bool(std::string_view)>& word) const {
  run(0, text, word);
}

}  // namespace replayeval
