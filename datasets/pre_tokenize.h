// The `normalizer` and `pre_tokenizer` sections of tokenizer.json: text to normal text, and text to
// words.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "datasets/regex.h"

namespace replayeval {

/// `normalizer`: Sequence, NFC, NFD, NFKC, NFKD, Prepend, Replace.
class TextNormalizer {
 public:
  /// Throws std::runtime_error for kinds that are not known.
  explicit TextNormalizer(const nlohmann::json& config);
  bool is_identity() const { return steps_.empty(); }
  std::string apply(std::string_view text) const;

 private:
  using Step = std::function<std::string(std::string_view)>;
  void add(const nlohmann::json& config);
  std::vector<Step> steps_;
};

/// `pre_tokenizer`: Sequence, Split, ByteLevel, Digits, Punctuation.
class PreTokenizer {
 public:
  /// Throws std::runtime_error for kinds and behaviours that are not known.
  explicit PreTokenizer(const nlohmann::json& config);

  /// True if there is a ByteLevel step: words are then bytes, otherwise code points.
  bool byte_level() const { return byte_level_; }

  /// Calls word(bytes) for each word in order, as UTF-8 of the text, not in ByteLevel's spelling.
  /// Stops early, with no more work than needed, when it returns false. `text` is not empty.
  void for_each_word(std::string_view text,
                     const std::function<bool(std::string_view)>& word) const;

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Step {
    enum class Kind { kSplit, kPrefixSpace, kSpellBytes } kind;
    std::shared_ptr<const Regex> regex;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
  };
  void add(const nlohmann::json& config);
  void add_split(Regex regex, const std::string& behavior, bool invert);
  bool run(size_t step, std::string_view text,
           const std::function<bool(std::string_view)>& word) const;
  bool split(const Step& step, std::string_view text,
             const std::function<bool(std::string_view)>& piece) const;

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

/// ByteLevel's spelling of bytes: each byte is a printable character (GPT-2): the printable ones of
/// Latin-1 themselves, the other 68 U+0100 and up in order of their value.
std::string spell_bytes(std::string_view bytes);

/// The bytes that a spelling stands for; false if a character is none of the 256.
bool unspell_bytes(std::string_view spelling, std::string* bytes);

}  // namespace replayeval
