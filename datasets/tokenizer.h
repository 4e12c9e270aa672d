// Text to token ids and back: SentencePiece models (tokenizer.model) and byte-level BPE
// (tokenizer.json), behind one interface; a decoder that hands out text while tokens arrive;
// comparison with stored answers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace replayeval {

/// How the text of single tokens becomes the text of a sequence (see StreamingDecoder).
struct DecodeRules {
  enum class Bytes {
    kStream,         // pieces are bytes of one UTF-8 stream; one U+FFFD for each invalid sequence
    kRunOrReplaced,  // a run of byte pieces is text if it is valid UTF-8 as a whole, otherwise one
                     // U+FFFD a byte
    kRun,  // a run of byte pieces is UTF-8 of its own; one U+FFFD for each byte that belongs to no
           // code point
  };
  enum class LeadingSpace {
    kKeep,
    kDropFirst,     // the text loses one space at its very beginning
    kDropOfPiece,   // the first text piece loses one, if nothing stands before it
    kDropOfPieces,  // every text piece loses one until there is text
  };
  Bytes bytes = Bytes::kStream;
  LeadingSpace leading_space = LeadingSpace::kKeep;
};

/// One token for the decoder.
struct TokenPiece {
  enum class Kind {
    kText,      // `bytes` is UTF-8 (any bytes under Bytes::kStream)
    kVerbatim,  // the same, and keeps its leading space
    kByte,      // `bytes` is one byte of a run
    kControl,   // a token without text; ends a run of bytes
    kAbsent,    // the id has no token
  };
  Kind kind = Kind::kAbsent;
  std::string_view bytes;
};

/// A vocabulary with its rules. Immutable after loading; all functions may be called from several
/// threads at once.
class Tokenizer {
 public:
  static constexpr size_t kAll = std::numeric_limits<size_t>::max();

  virtual ~Tokenizer() = default;

  /// Ids of `text` without bos or eos. Added tokens that occur in the text become their id where
  /// the format says so (tokenizer.json does, tokenizer.model does not). At most `limit` ids:
  /// exactly the first `limit` ids of the whole text, with no more work than they need. Throws
  /// std::invalid_argument with the byte offset for invalid UTF-8.
  virtual std::vector<int32_t> encode(std::string_view text, size_t limit = kAll) const = 0;

  /// Ids with what the tokenizer adds by itself: tokenizer.json's post-processor, or bos for a
  /// tokenizer.model.
  virtual std::vector<int32_t> encode_with_special(std::string_view text) const = 0;

  /// Text of the ids, special tokens kept as text where the format has text for them. Always valid
  /// UTF-8: U+FFFD where the bytes are not. Ids without a token (padding rows of an embedding) give
  /// nothing.
  std::string decode(std::span<const int32_t> ids) const;

  /// One more than the largest id.
  virtual int32_t vocabulary_size() const = 0;

  /// Token at the start of a document, absent if the tokenizer has none. Order of authority:
  /// `bos_token` of tokenizer_config.json (null: none), the tokenizer file itself, `bos_token_id`
  /// of generation_config.json.
  std::optional<int32_t> bos_id() const { return bos_; }

  /// Tokens that end a text; the first one ends a document. `eos_token` of tokenizer_config.json or
  /// of the tokenizer file, then `eos_token_id` of generation_config.json (a number or a list),
  /// without repetition; may be empty.
  const std::vector<int32_t>& eos_ids() const { return eos_; }

  /// Id of a token by its name in the file ("<s>", "<|im_end|>"), absent if there is none.
  virtual std::optional<int32_t> id_of(std::string_view token) const = 0;

  /// What the decoder needs of one id (any number).
  virtual TokenPiece piece(int32_t id) const = 0;
  virtual DecodeRules decode_rules() const = 0;

  /// SHA-256 over "<file name> <sha256>\n" of every file that was read, sorted by name.
  const std::string& sha256() const { return sha256_; }

  /// Path of the tokenizer file as it was given.
  const std::string& name() const { return name_; }

 protected:
  friend std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& folder);
  std::optional<int32_t> bos_;
  std::vector<int32_t> eos_;
  std::string sha256_;
  std::string name_;
};

/// Reads tokenizer.json if the folder has one, otherwise tokenizer.model; `folder` may also name
/// one of these files. tokenizer_config.json and generation_config.json beside it are used for bos
/// and eos. Throws std::runtime_error naming what was looked for when neither exists, when a file
/// is damaged, or when it needs a rule that is not known.
std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& folder);

/// Turns ids into text one at a time and never hands out part of a code point: what push() returned
/// so far is valid UTF-8 and a prefix of decode(all ids); with finish() it is equal to it. The
/// tokenizer must outlive the decoder.
class StreamingDecoder {
 public:
  explicit StreamingDecoder(const Tokenizer& tokenizer);
  /// Text that is certain after this id; may be empty.
  std::string push(int32_t id);
  /// The rest: an unfinished sequence becomes U+FFFD. The decoder then starts anew.
  std::string finish();

 private:
  void put(std::string_view text, bool piece, std::string* out);
  void settle(bool end_of_run, std::string* out);
  const Tokenizer* tokenizer_;
  DecodeRules rules_;
  std::string pending_;         // bytes that are not text yet
  bool nothing_yet_ = true;     // no text so far
  bool space_dropped_ = false;  // the leading space is gone, or there was none
};

/// Result of check_tokenizer.
struct TokenizerCheck {
  struct Mismatch {
    std::string file;  // name of the file with the stored answer
    size_t line = 0;   // from 1
    std::string what;  // "ids", "ids_with_special", "ids_with_bos", "decoded" or "text"
    std::string input;
    std::string expected, got;    // ids as "[1, 2, 3]", text as it is
    size_t first_difference = 0;  // index of the first differing id, or byte of the text
  };
  size_t texts = 0, ids_equal = 0;
  size_t with_special = 0, with_special_equal = 0;
  size_t decodes = 0, decodes_equal = 0;
  std::optional<Mismatch> worst;  // the one that goes wrong earliest in its input
  bool passed() const {
    return texts + decodes > 0 && ids_equal == texts && with_special_equal == with_special &&
           decodes_equal == decodes;
  }
};

/// Compares with stored answers. `answers` is a JSON-lines file; each line has `text` and `ids`
/// (encoding without special tokens), and may have `decoded` and `ids_with_special` or
/// `ids_with_bos`. Lines of a file whose name starts with "decode" have `ids` and the `text` they
/// decode to. Throws std::runtime_error when the file cannot be read, a line is no such object, or
/// there is none.
TokenizerCheck check_tokenizer(const Tokenizer& tokenizer, const std::filesystem::path& answers);

/// As above for a folder: its tokenizer against `answers`, or, if that is empty, against the
/// folder's own expected.jsonl and decode.jsonl.
TokenizerCheck check_tokenizer(const std::filesystem::path& folder,
                               const std::filesystem::path& answers = {});

/// Byte offset of the first byte that is not valid UTF-8 (overlong forms, surrogates and values
/// above U+10FFFF are invalid), or std::string_view::npos.
size_t find_invalid_utf8(std::string_view text);

}  // namespace replayeval
