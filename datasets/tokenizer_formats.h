// The two tokenizer formats behind load_tokenizer, and the added tokens that tokenizer.json knows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "datasets/tokenizer.h"

namespace replayeval {

/// tokenizer.json with a BPE model (Hugging Face tokenizers). Throws std::runtime_error naming the
/// section for damaged files and for rules that are not known.
std::unique_ptr<Tokenizer> load_byte_bpe(const std::filesystem::path& file);

/// tokenizer.model (SentencePiece). BPE and unigram models are encoded here; models of characters
/// or words, and BPE models with unused pieces, by the sentencepiece library, as all are with
/// `use_library`. Throws std::runtime_error for a damaged file.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::filesystem::path& file,
                                              bool use_library = false);

/// One entry of `added_tokens`.
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false;             // only where no word character touches it
  bool lstrip = false, rstrip = false;  // takes the white space before, after it along
};

/// Finds added tokens in a text: leftmost, of those the longest.
class AddedTokenFinder {
 public:
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);
  bool empty() const { return tokens_.empty(); }
  /// Cuts valid UTF-8 into added tokens and what lies between: part(text, id), id -1 for text.
  /// Stops early when it returns false; returns false then.
  bool split(std::string_view text,
             const std::function<bool(std::string_view, int32_t)>& part) const;

 private:
  struct Node {
    std::vector<std::pair<unsigned char, uint32_t>> next;
    int32_t token = -1;  // index into tokens_
  };
  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::vector<bool> starts_;  // by first byte
};

}  // namespace replayeval
