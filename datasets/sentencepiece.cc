// tokenizer.model (SentencePiece). The library encodes unigram models and models with character
// rules; BPE over plain text, which the library does slowly, goes through MergeStream with the
// library's order: best score, then leftmost.
#include <sentencepiece_processor.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "datasets/bpe.h"
#include "datasets/tokenizer_formats.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581, how pieces spell a space

// Symbols of MergeStream that are no piece ids. Characters outside the vocabulary take part in
// merges only if a longer piece contains them; user-defined symbols found in the text never do.
constexpr int32_t kFrozen = 1 << 28;     // + piece id
constexpr int32_t kCharacter = 1 << 29;  // + code point

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using StringTable = std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>>;

// Fields of a serialized protocol buffer message, in order.
class ProtoReader {
 public:
  struct Field {
    uint32_t number = 0;
    uint64_t value = 0;      // varint and fixed-width fields
    std::string_view bytes;  // length-delimited fields
  };
  explicit ProtoReader(std::string_view message) : rest_(message) {}

  bool next(Field* field) {
    if (rest_.empty()) return false;
    const uint64_t key = varint();
    *field = {static_cast<uint32_t>(key >> 3), 0, {}};
    switch (key & 7) {
      case 0:
        field->value = varint();
        break;
      case 1:
        field->value = fixed(8);
        break;
      case 2:
        field->bytes = take(varint());
        break;
      case 5:
        field->value = fixed(4);
        break;
      default:
        throw std::runtime_error("field " + std::to_string(field->number) +
                                 " has an unknown wire type");
    }
    return true;
  }

 private:
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) throw std::runtime_error("the file ends inside a field");
    const std::string_view bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return bytes;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    throw std::runtime_error("a number is longer than 64 bits");
  }
  uint64_t fixed(size_t size) {
    uint64_t value = 0;
    const std::string_view bytes = take(size);
    for (size_t i = 0; i < size; ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    }
    return value;
  }
  std::string_view rest_;
};

// What is used of sentencepiece_model.proto, with its defaults.
struct Model {
  enum Type { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
  struct Piece {
    std::string text;
    float score = 0;
    uint64_t type = kNormal;
  };
  std::vector<Piece> pieces;
  uint64_t model_type = 1;  // 1 unigram, 2 BPE
  bool byte_fallback = false, whitespace_suffix = false;
  std::string unknown_surface = " \xE2\x81\x87 ";
  std::string character_rules;
  bool denormalizer_rules = false;
  bool add_dummy_prefix = true, remove_extra_whitespaces = true, escape_whitespaces = true;
};

Model parse_model(std::string_view bytes) {
  Model model;
  ProtoReader file(bytes);
  for (ProtoReader::Field field; file.next(&field);) {
    ProtoReader part(field.bytes);
    ProtoReader::Field inner;
    switch (field.number) {
      case 1: {
        Model::Piece piece;
        while (part.next(&inner)) {
          if (inner.number == 1) piece.text = inner.bytes;
          if (inner.number == 2) {
            const auto bits = static_cast<uint32_t>(inner.value);
            std::memcpy(&piece.score, &bits, sizeof bits);
          }
          if (inner.number == 3) piece.type = inner.value;
        }
        model.pieces.push_back(std::move(piece));
        break;
      }
      case 2:
        while (part.next(&inner)) {
          if (inner.number == 3) model.model_type = inner.value;
          if (inner.number == 24) model.whitespace_suffix = inner.value != 0;
          if (inner.number == 35) model.byte_fallback = inner.value != 0;
          if (inner.number == 44) model.unknown_surface = inner.bytes;
        }
        break;
      case 3:
        while (part.next(&inner)) {
          if (inner.number == 2) model.character_rules = inner.bytes;
          if (inner.number == 3) model.add_dummy_prefix = inner.value != 0;
          if (inner.number == 4) model.remove_extra_whitespaces = inner.value != 0;
          if (inner.number == 5) model.escape_whitespaces = inner.value != 0;
        }
        break;
      case 5:
        while (part.next(&inner)) {
          if (inner.number == 2) model.denormalizer_rules = !inner.bytes.empty();
        }
        break;
      default:
        break;
    }
  }
  return model;
}

bool is_code_point(std::string_view text) {
  return !text.empty() && utf8_step(text).kind == Utf8Step::Kind::kCodePoint &&
         utf8_step(text).length == text.size();
}

// NormalizerSpec.precompiled_charsmap: the size of a double array (Darts), the array, and
// replacements ended by NUL. A unit of the array holds a label in bits 0-7 and 31, a mark for a
// value in bit 8, and the distance to its children.
class CharacterRules {
 public:
  explicit CharacterRules(std::string_view blob) {
    if (blob.empty()) return;
    uint32_t size = 0;
    if (blob.size() < 4)
      throw std::runtime_error("precompiled_charsmap is shorter than its header");
    for (size_t i = 0; i < 4; ++i)
      size |= static_cast<uint32_t>(static_cast<unsigned char>(blob[i])) << (8 * i);
    if (size % 4 != 0 || size > blob.size() - 4) {
      throw std::runtime_error("precompiled_charsmap: table of " + std::to_string(size) +
                               " bytes in " + std::to_string(blob.size()));
    }
    for (size_t i = 4; i < 4 + size; i += 4) {
      uint32_t unit = 0;
      for (size_t k = 0; k < 4; ++k)
        unit |= static_cast<uint32_t>(static_cast<unsigned char>(blob[i + k])) << (8 * k);
      units_.push_back(unit);
    }
    replacements_ = blob.substr(4 + size);
  }

  /// Length of the longest rule at the front of the text and what it becomes; 0 if there is none.
  std::pair<size_t, std::string_view> match(std::string_view text) const {
    if (units_.empty()) return {0, {}};
    std::pair<size_t, std::string_view> best{0, {}};
    size_t node = offset(units_[0]);
    for (size_t i = 0; i < text.size(); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      node ^= byte;
      if (node >= units_.size() || (units_[node] & 0x800000FFu) != byte) break;
      const uint32_t unit = units_[node];
      node ^= offset(unit);
      if ((unit >> 8 & 1) == 0) continue;
      const size_t value = node < units_.size() ? units_[node] & 0x7FFFFFFFu : SIZE_MAX;
      if (value >= replacements_.size())
        throw std::runtime_error("precompiled_charsmap points outside itself");
      best = {i + 1, std::string_view(replacements_.c_str() + value)};
    }
    return best;
  }

 private:
  static size_t offset(uint32_t unit) { return size_t{unit >> 10} << ((unit & 1u << 9) >> 6); }
  std::vector<uint32_t> units_;
  std::string replacements_;
};

// Pieces by their bytes, for all prefixes of a text at once.
class PieceTrie {
 public:
  static constexpr int32_t kRoot = 0;
  explicit PieceTrie(const StringTable& pieces) : next_(bytes_of(pieces)), ids_(1, -1) {
    for (const auto& [text, id] : pieces) {
      int32_t node = kRoot;
      for (char c : text) {
        const int32_t byte = static_cast<unsigned char>(c);
        if (const int32_t* child = next_.find(node, byte)) {
          node = *child;
        } else {
          const auto created = static_cast<int32_t>(ids_.size());
          next_.put(node, byte, created);
          ids_.push_back(-1);
          node = created;
        }
      }
      ids_[static_cast<size_t>(node)] = id;
    }
  }
  /// Child of a node, -1 if there is none.
  int32_t next(int32_t node, char byte) const {
    const int32_t* child = next_.find(node, static_cast<unsigned char>(byte));
    return child == nullptr ? -1 : *child;
  }
  /// Piece that ends at a node, -1 if there is none.
  int32_t id(int32_t node) const { return ids_[static_cast<size_t>(node)]; }

 private:
  static size_t bytes_of(const StringTable& pieces) {
    size_t bytes = 0;
    for (const auto& [text, id] : pieces) bytes += text.size();
    return bytes;
  }
  PairTable<int32_t> next_;
  std::vector<int32_t> ids_;
};

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string bytes, bool use_library);

  std::vector<int32_t> encode(std::string_view text, size_t limit) const override;

  std::vector<int32_t> encode_with_special(std::string_view text) const override {
    std::vector<int32_t> ids = encode(text, kAll);
    if (bos_) ids.insert(ids.begin(), *bos_);
    return ids;
  }

  int32_t vocabulary_size() const override { return static_cast<int32_t>(model_.pieces.size()); }

  std::optional<int32_t> id_of(std::string_view token) const override {
    const auto found = ids_.find(token);
    return found == ids_.end() ? std::nullopt : std::optional<int32_t>(found->second);
  }

  TokenPiece piece(int32_t id) const override {
    if (id < 0 || id >= vocabulary_size()) return {};
    const auto i = static_cast<size_t>(id);
    return {kinds_[i], surfaces_[i]};
  }

  DecodeRules decode_rules() const override {
    using Space = DecodeRules::LeadingSpace;
    return {DecodeRules::Bytes::kRun, model_.remove_extra_whitespaces ? Space::kDropOfPieces
                                      : model_.add_dummy_prefix       ? Space::kDropOfPiece
                                                                      : Space::kKeep};
  }

 private:
  void build_merges();
  std::string normalize(std::string_view text) const;
  std::vector<int32_t> encode_bpe(std::string_view normalized, size_t limit) const;
  std::vector<int32_t> encode_unigram(std::string_view normalized) const;
  void append_unknown(std::string_view character, bool unknown_before,
                      std::vector<int32_t>* ids) const;
  int32_t character_symbol(std::string_view character) const;
  // Length and id of the longest user-defined symbol at the front of the text.
  std::optional<std::pair<size_t, int32_t>> user_defined_at(std::string_view text) const;

  Model model_;
  sentencepiece::SentencePieceProcessor library_;
  StringTable ids_;     // all pieces
  StringTable pieces_;  // those that text can become by merging
  StringTable user_defined_;
  size_t longest_user_defined_ = 0;
  std::array<bool, 256> starts_user_defined_{};
  std::vector<std::string> surfaces_;
  std::vector<TokenPiece::Kind> kinds_;
  std::array<int32_t, 256> byte_ids_{};
  int32_t unknown_ = 0;
  std::optional<CharacterRules> rules_;
  std::optional<MergeTable> merges_;  // BPE
  std::optional<PieceTrie> trie_;     // unigram; with neither the library encodes
  float lowest_score_ = 0;            // of normal pieces
};

SentencePieceTokenizer::SentencePieceTokenizer(std::string bytes, bool use_library)
    : model_(parse_model(bytes)) {
  if (const auto status = library_.LoadFromSerializedProto(bytes); !status.ok()) {
    throw std::runtime_error("sentencepiece refuses the model: " + status.ToString());
  }
  if (model_.denormalizer_rules)
    throw std::runtime_error("the model has a denormalizer, which is not supported");
  unknown_ = library_.unk_id();
  if (library_.bos_id() >= 0) bos_ = library_.bos_id();
  if (library_.eos_id() >= 0) eos_ = {library_.eos_id()};
  byte_ids_.fill(-1);
  rules_.emplace(model_.character_rules);
  bool has_unused = false;
  bool first_normal = true;
  for (size_t i = 0; i < model_.pieces.size(); ++i) {
    const Model::Piece& piece = model_.pieces[i];
    const auto id = static_cast<int32_t>(i);
    ids_.try_emplace(piece.text, id);
    std::string surface;
    TokenPiece::Kind kind = TokenPiece::Kind::kText;
    switch (piece.type) {
      case Model::kControl:
        kind = TokenPiece::Kind::kControl;
        break;
      case Model::kUnknown:
        kind = TokenPiece::Kind::kVerbatim;
        surface = model_.unknown_surface;
        break;
      case Model::kByte: {
        const int byte =
            piece.text.size() == 6 ? std::stoi(piece.text.substr(3, 2), nullptr, 16) : -1;
        if (byte < 0)
          throw std::runtime_error("byte piece " + std::to_string(i) + " is named '" + piece.text +
                                   "'");
        kind = TokenPiece::Kind::kByte;
        surface.push_back(static_cast<char>(byte));
        byte_ids_[static_cast<size_t>(byte)] = id;
        break;
      }
      default: {
        has_unused = has_unused || piece.type == Model::kUnused;
        if (piece.type == Model::kNormal) {
          lowest_score_ = first_normal ? piece.score : std::min(lowest_score_, piece.score);
          first_normal = false;
        }
        pieces_[piece.text] = id;
        if (piece.type == Model::kUserDefined) {
          user_defined_[piece.text] = id;
          if (!piece.text.empty())
            starts_user_defined_[static_cast<unsigned char>(piece.text[0])] = true;
          longest_user_defined_ = std::max(longest_user_defined_, piece.text.size());
        }
        surface = piece.text;
        if (!surface.starts_with(kSpace)) kind = TokenPiece::Kind::kVerbatim;
        for (size_t at = 0; (at = surface.find(kSpace, at)) != std::string::npos; ++at) {
          surface.replace(at, kSpace.size(), " ");
        }
      }
    }
    surfaces_.push_back(std::move(surface));
    kinds_.push_back(kind);
  }
  if (use_library) return;
  // With BPE the library takes unused pieces apart again, in an order that depends on the whole
  // text.
  if (model_.model_type == 2 && !has_unused) build_merges();
  if (model_.model_type == 1) trie_.emplace(pieces_);
}

int32_t SentencePieceTokenizer::character_symbol(std::string_view character) const {
  if (const auto found = pieces_.find(character); found != pieces_.end()) return found->second;
  size_t offset = 0;
  return kCharacter + static_cast<int32_t>(next_code_point(character, &offset));
}

std::optional<std::pair<size_t, int32_t>> SentencePieceTokenizer::user_defined_at(
    std::string_view text) const {
  if (!starts_user_defined_[static_cast<unsigned char>(text[0])]) return std::nullopt;
  for (size_t size = std::min(longest_user_defined_, text.size()); size > 0; --size) {
    const auto found = user_defined_.find(text.substr(0, size));
    if (found != user_defined_.end()) return std::pair(size, found->second);
  }
  return std::nullopt;
}

// Every way to cut a piece in two pieces or characters is a rule; its rank is the place of the
// piece's score.
void SentencePieceTokenizer::build_merges() {
  std::vector<float> scores;
  for (const Model::Piece& piece : model_.pieces) scores.push_back(piece.score);
  std::sort(scores.begin(), scores.end(), std::greater<>());
  scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
  const auto part = [&](std::string_view text) -> int32_t {
    const auto found = pieces_.find(text);
    if (is_code_point(text)) {
      // A user-defined character is frozen wherever it occurs.
      return found != pieces_.end() && user_defined_.contains(text) ? -1 : character_symbol(text);
    }
    return found != pieces_.end() ? found->second : -1;
  };
  std::vector<MergeRule> rules;
  for (const auto& [text, id] : pieces_) {
    const float score = model_.pieces[static_cast<size_t>(id)].score;
    const auto rank =
        std::lower_bound(scores.begin(), scores.end(), score, std::greater<>()) - scores.begin();
    for (size_t cut = 1; cut < text.size(); ++cut) {
      if ((static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) continue;
      const int32_t left = part(std::string_view(text).substr(0, cut));
      const int32_t right = left < 0 ? -1 : part(std::string_view(text).substr(cut));
      if (right >= 0) rules.push_back({left, right, id, static_cast<uint32_t>(rank)});
    }
  }
  merges_.emplace(rules, std::unordered_set<int32_t>());
}

// Character rules, a space at the front (or the end), spaces removed at the ends and doubled ones,
// as the model says; spaces as U+2581.
std::string SentencePieceTokenizer::normalize(std::string_view text) const {
  std::string out;
  const bool remove_spaces = model_.remove_extra_whitespaces;
  const std::string_view space = model_.escape_whitespaces ? kSpace : std::string_view(" ");
  const auto next = [&](size_t* offset) {
    const std::string_view rest = text.substr(*offset);
    size_t length = 0;
    std::string_view becomes;
    if (const auto frozen = user_defined_at(rest)) {
      length = frozen->first;
    } else {
      std::tie(length, becomes) = rules_->match(rest);
      if (length > 0) {
        *offset += length;
        return becomes;
      }
      length = utf8_step(rest).length;
    }
    *offset += length;
    return rest.substr(0, length);
  };
  size_t offset = 0;
  if (remove_spaces) {
    for (size_t after = 0; offset < text.size() && next(&after) == " ";) offset = after;
  }
  if (offset == text.size()) return out;
  if (model_.add_dummy_prefix && !model_.whitespace_suffix) out += space;
  bool after_space = remove_spaces;
  while (offset < text.size()) {
    std::string_view part = next(&offset);
    while (after_space && part.starts_with(' ')) part.remove_prefix(1);
    if (part.empty()) continue;
    for (char c : part) c == ' ' ? out.append(space) : out.append(1, c);
    after_space = remove_spaces && part.ends_with(' ');
  }
  while (remove_spaces && out.ends_with(space)) out.resize(out.size() - space.size());
  if (model_.add_dummy_prefix && model_.whitespace_suffix) out += space;
  return out;
}

void SentencePieceTokenizer::append_unknown(std::string_view character, bool unknown_before,
                                            std::vector<int32_t>* ids) const {
  if (!model_.byte_fallback) {
    if (!unknown_before) ids->push_back(unknown_);  // a run of unknown characters is one token
    return;
  }
  for (char byte : character) {
    const int32_t id = byte_ids_[static_cast<unsigned char>(byte)];
    ids->push_back(id < 0 ? unknown_ : id);
  }
}

std::vector<int32_t> SentencePieceTokenizer::encode_bpe(std::string_view normalized,
                                                        size_t limit) const {
  std::vector<int32_t> ids;
  std::vector<int32_t> symbols;
  MergeStream merges(*merges_, &symbols);
  bool unknown_before = false;
  const auto drain = [&] {
    for (int32_t symbol : symbols) {
      const bool unknown = symbol >= kCharacter;
      if (unknown) {
        std::string character;
        append_utf8(static_cast<char32_t>(symbol - kCharacter), &character);
        append_unknown(character, unknown_before, &ids);
      } else {
        ids.push_back(symbol >= kFrozen ? symbol - kFrozen : symbol);
      }
      unknown_before = unknown;
    }
    symbols.clear();
  };
  for (size_t offset = 0; offset < normalized.size() && ids.size() < limit;) {
    if (const auto frozen = user_defined_at(normalized.substr(offset))) {
      merges.push(kFrozen + frozen->second);
      offset += frozen->first;
    } else {
      const size_t begin = offset;
      next_code_point(normalized, &offset);
      merges.push(character_symbol(normalized.substr(begin, offset - begin)));
    }
    if (!symbols.empty()) drain();
  }
  merges.end_word();
  drain();
  return ids;
}

// Best path over all segmentations, character by character: the score of a path is the sum of its
// pieces' scores. Ties are decided by rounding, so the sums are kept as the library (0.2.3) keeps
// them: in FP32, the first of equal candidates stays, and all open paths start again from the
// current one when that has fallen below -100,000.
std::vector<int32_t> SentencePieceTokenizer::encode_unigram(std::string_view normalized) const {
  struct Node {
    float score = 0;
    int32_t id = -1;
    size_t begin = SIZE_MAX;  // of the last piece of the best path that ends here
  };
  constexpr float kUnknownPenalty = 10;
  constexpr float kLowestSum = -100000;
  std::vector<Node> ends(normalized.size() + 1);
  size_t furthest = 0;
  const auto offer = [&](size_t begin, size_t end, int32_t id, float score) {
    const float candidate = score + ends[begin].score;
    if (ends[end].begin == SIZE_MAX || candidate > ends[end].score)
      ends[end] = {candidate, id, begin};
    furthest = std::max(furthest, end);
  };
  for (size_t begin = 0; begin < normalized.size();) {
    if (const float sum = ends[begin].score; sum < kLowestSum) {
      for (size_t end = begin; end <= furthest; ++end) {
        if (ends[end].begin != SIZE_MAX) ends[end].score -= sum;
      }
    }
    const size_t after = begin + utf8_step(normalized.substr(begin)).length;
    bool has_character = false;
    int32_t node = PieceTrie::kRoot;
    for (size_t end = begin; end < normalized.size();) {
      node = trie_->next(node, normalized[end++]);
      if (node < 0) break;
      const int32_t id = trie_->id(node);
      if (id < 0) continue;
      const Model::Piece& piece = model_.pieces[static_cast<size_t>(id)];
      if (piece.type == Model::kUnused) continue;
      has_character = has_character || end == after;
      // Scores are logarithms of probabilities, so nothing normal beats a user-defined symbol over
      // the same characters.
      const float score = piece.type == Model::kUserDefined
                              ? static_cast<float>(0.1 * (static_cast<double>(end - begin) - 1))
                              : piece.score;
      offer(begin, end, id, score);
    }
    if (!has_character) offer(begin, after, unknown_, lowest_score_ - kUnknownPenalty);
    begin = after;
  }
  std::vector<std::pair<size_t, size_t>> path;
  for (size_t end = normalized.size(); end > 0; end = ends[end].begin)
    path.emplace_back(ends[end].begin, end);
  std::vector<int32_t> ids;
  bool unknown_before = false;
  for (size_t i = path.size(); i-- > 0;) {
    const auto [begin, end] = path[i];
    const int32_t id = ends[end].id;
    if (id == unknown_) {
      append_unknown(normalized.substr(begin, end - begin), unknown_before, &ids);
    } else {
      ids.push_back(id);
    }
    unknown_before = id == unknown_;
  }
  return ids;
}

std::vector<int32_t> SentencePieceTokenizer::encode(std::string_view text, size_t limit) const {
  if (const size_t invalid = find_invalid_utf8(text); invalid != std::string_view::npos) {
    throw std::invalid_argument("tokenizer: the text is not UTF-8 at byte " +
                                std::to_string(invalid));
  }
  std::vector<int32_t> ids;
  if (merges_) {
    ids = encode_bpe(normalize(text), limit);
  } else if (trie_) {
    ids = encode_unigram(normalize(text));
  } else if (const auto status = library_.Encode(absl::string_view(text.data(), text.size()), &ids);
             !status.ok()) {
    throw std::runtime_error("sentencepiece: " + status.ToString());
  }
  if (ids.size() > limit) ids.resize(limit);
  return ids;
}

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::filesystem::path& file, bool use_library) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error(file.string() + ": cannot be read");
  std::stringstream bytes;
  bytes << stream.rdbuf();
  try {
    return std::make_unique<SentencePieceTokenizer>(bytes.str(), use_library);
  } catch (const std::exception& error) {
    throw std::runtime_error(file.string() +
                             ": expected a SentencePiece model, or a tokenizer.json under a name "
                             "that ends in .json; read as the former: " +
                             error.what());
  }
}

}  // namespace replayeval
