// tokenizer.json: added tokens, normalizer, pre-tokenizer, BPE over bytes or code points, template,
// decoder.
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <unordered_map>

#include "datasets/bpe.h"
#include "datasets/pre_tokenize.h"
#include "datasets/tokenizer_formats.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

using Json = nlohmann::json;

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using StringTable = std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>>;

// "<0x41>" is byte 0x41; -1 for other names.
int byte_of_name(std::string_view name) {
  if (name.size() != 6 || !name.starts_with("<0x") || name[5] != '>') return -1;
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  };
  const int high = digit(name[3]), low = digit(name[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

std::string byte_name(unsigned char byte) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  return {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
}

void replace_all(std::string* text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text->find(from, at)) != std::string::npos; at += to.size()) {
    text->replace(at, from.size(), to);
  }
}

class ByteBpeTokenizer final : public Tokenizer {
 public:
  explicit ByteBpeTokenizer(const Json& file);

  std::vector<int32_t> encode(std::string_view text, size_t limit) const override;

  std::vector<int32_t> encode_with_special(std::string_view text) const override {
    std::vector<int32_t> ids = encode(text, kAll);
    ids.insert(ids.begin(), prefix_.begin(), prefix_.end());
    ids.insert(ids.end(), suffix_.begin(), suffix_.end());
    return ids;
  }

  int32_t vocabulary_size() const override { return static_cast<int32_t>(pieces_.size()); }

  std::optional<int32_t> id_of(std::string_view token) const override {
    const auto found = ids_.find(token);
    return found == ids_.end() ? std::nullopt : std::optional<int32_t>(found->second);
  }

  TokenPiece piece(int32_t id) const override {
    if (id < 0 || id >= vocabulary_size()) return {};
    const Piece& piece = pieces_[static_cast<size_t>(id)];
    return {piece.kind, piece.bytes};
  }

  DecodeRules decode_rules() const override { return rules_; }

 private:
  struct Piece {
    TokenPiece::Kind kind = TokenPiece::Kind::kAbsent;
    std::string bytes;
  };

  void read_vocabulary(const Json& model, const Json& added);
  void read_merges(const Json& model);
  void read_template(const Json& processor);
  void read_decoder(const Json& decoder);
  void push_word(std::string_view word, MergeStream* merges, std::vector<int32_t>* ids,
                 size_t limit) const;

  StringTable ids_;            // names as the file spells them, added tokens included
  StringTable words_;          // ignore_merges: words that are one token, as their bytes
  std::vector<Piece> pieces_;  // for decoding
  std::array<int32_t, 256>
      byte_ids_{};  // byte level: the byte's symbol; byte fallback: the token "<0xXX>"; -1: none
  bool byte_fallback_ = false, fuse_unknown_ = false, ignore_merges_ = false;
  std::optional<int32_t> unknown_;
  std::optional<TextNormalizer> normalizer_;
  std::optional<PreTokenizer> words_of_;
  std::optional<AddedTokenFinder> raw_added_, normalized_added_;
  std::optional<MergeTable> merges_;
  std::vector<int32_t> prefix_, suffix_;
  DecodeRules rules_;
};

ByteBpeTokenizer::ByteBpeTokenizer(const Json& file) {
  const Json& model = file.at("model");
  if (const std::string type = model.value("type", "BPE"); type != "BPE") {
    throw std::runtime_error("model type '" + type + "' is not known; known: BPE");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.contains(key) && model[key].is_string() && !model[key].get<std::string>().empty()) {
      throw std::runtime_error(std::string("model: ") + key + " is set, which is not supported");
    }
  }
  if (model.contains("dropout") && model["dropout"].is_number() &&
      model["dropout"].get<double>() != 0) {
    throw std::runtime_error("model: dropout is set: encoding would be random");
  }
  normalizer_.emplace(file.value("normalizer", Json()));
  words_of_.emplace(file.value("pre_tokenizer", Json()));
  byte_fallback_ = model.value("byte_fallback", false);
  fuse_unknown_ = model.value("fuse_unk", false);
  ignore_merges_ = model.value("ignore_merges", false);
  read_vocabulary(model, file.value("added_tokens", Json::array()));
  read_merges(model);
  read_template(file.value("post_processor", Json()));
  read_decoder(file.value("decoder", Json()));
}

void ByteBpeTokenizer::read_vocabulary(const Json& model, const Json& added) {
  const auto put = [&](const std::string& name, int64_t id) {
    // Ids are dense in practice; a limit keeps a damaged file from asking for terabytes.
    if (id < 0 || id > 1 << 24) {
      throw std::runtime_error("token '" + name + "' has id " + std::to_string(id) +
                               ", expected 0 to 16777216");
    }
    if (pieces_.size() <= static_cast<size_t>(id)) pieces_.resize(static_cast<size_t>(id) + 1);
    pieces_[static_cast<size_t>(id)] = {TokenPiece::Kind::kText, name};
    ids_[name] = static_cast<int32_t>(id);
  };
  for (const auto& [name, id] : model.at("vocab").items()) put(name, id.get<int64_t>());
  if (const Json unknown = model.value("unk_token", Json()); unknown.is_string()) {
    unknown_ = id_of(unknown.get<std::string>());
    if (!unknown_)
      throw std::runtime_error("model: unk_token '" + unknown.get<std::string>() +
                               "' is not in vocab");
  }
  byte_ids_.fill(-1);
  for (size_t b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    const std::string name = words_of_->byte_level() ? spell_bytes({&byte, 1})
                                                     : byte_name(static_cast<unsigned char>(b));
    if (const auto id = id_of(name)) byte_ids_[b] = *id;
  }
  if (ignore_merges_) {
    for (const auto& [name, id] : ids_) {
      std::string bytes = name;
      if (!words_of_->byte_level() || unspell_bytes(name, &bytes)) words_[bytes] = id;
    }
  }
  std::vector<AddedToken> raw, normalized;
  for (const Json& entry : added) {
    AddedToken token{entry.at("content"), 0, entry.value("single_word", false),
                     entry.value("lstrip", false), entry.value("rstrip", false)};
    if (token.content.empty()) continue;
    if (!ids_.contains(token.content)) put(token.content, entry.at("id").get<int64_t>());
    token.id = ids_[token.content];
    const bool normalize = entry.value("normalized", !entry.value("special", false));
    if (normalize) token.content = normalizer_->apply(token.content);
    (normalize ? normalized : raw).push_back(std::move(token));
  }
  raw_added_.emplace(std::move(raw));
  normalized_added_.emplace(std::move(normalized));
}

void ByteBpeTokenizer::read_merges(const Json& model) {
  const Json& merges = model.at("merges");
  std::vector<MergeRule> rules;
  rules.reserve(merges.size());
  const auto id = [&](const std::string& name) {
    const auto found = id_of(name);
    if (!found) {
      throw std::runtime_error("model: merge " + std::to_string(rules.size()) + ": token '" + name +
                               "' is not in vocab");
    }
    return *found;
  };
  for (const Json& merge : merges) {
    std::string left, right;
    if (merge.is_string()) {
      const std::string both = merge;
      const size_t space = both.find(' ');
      if (space == std::string::npos || both.find(' ', space + 1) != std::string::npos) {
        throw std::runtime_error("model: merge '" + both +
                                 "' is not two tokens with a space between");
      }
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else {
      left = merge.at(0);
      right = merge.at(1);
    }
    rules.push_back({id(left), id(right), id(left + right), static_cast<uint32_t>(rules.size())});
  }
  // Byte tokens and the unknown token enter words as symbols of their own, whatever their names are
  // made of.
  std::unordered_set<int32_t> also_initial;
  if (unknown_) also_initial.insert(*unknown_);
  if (byte_fallback_) also_initial.insert(byte_ids_.begin(), byte_ids_.end());
  merges_.emplace(rules, also_initial);
}

void ByteBpeTokenizer::read_template(const Json& processor) {
  if (processor.is_null()) return;
  const std::string type = processor.value("type", "");
  if (type == "ByteLevel") return;  // changes offsets, not ids
  if (type == "Sequence") {
    for (const Json& part : processor.at("processors")) read_template(part);
    return;
  }
  if (type != "TemplateProcessing") {
    throw std::runtime_error("post_processor '" + type +
                             "' is not known; known: Sequence ByteLevel TemplateProcessing");
  }
  std::vector<int32_t> before, after;
  bool seen_text = false;
  for (const Json& item : processor.at("single")) {
    if (item.contains("Sequence")) {
      seen_text = true;
      continue;
    }
    const std::string name = item.at("SpecialToken").at("id");
    for (const Json& id : processor.at("special_tokens").at(name).at("ids")) {
      (seen_text ? after : before).push_back(id.get<int32_t>());
    }
  }
  prefix_.insert(prefix_.begin(), before.begin(), before.end());
  suffix_.insert(suffix_.end(), after.begin(), after.end());
  if (!before.empty()) bos_ = before.front();
  if (!after.empty()) eos_ = {after.front()};
}

void ByteBpeTokenizer::read_decoder(const Json& decoder) {
  const Json steps =
      decoder.value("type", "") == "Sequence" ? decoder.at("decoders") : Json::array({decoder});
  bool fused = false;
  for (const Json& step : steps) {
    const std::string type = step.is_null() ? "none" : step.value("type", "");
    if (type == "ByteLevel" && steps.size() == 1) {
      for (Piece& piece : pieces_) {
        // Names that are no spelling of bytes, such as added tokens with a space, stand for
        // themselves.
        if (std::string bytes; unspell_bytes(piece.bytes, &bytes)) piece.bytes = std::move(bytes);
      }
      rules_.bytes = DecodeRules::Bytes::kStream;
    } else if (type == "Replace" && !fused && step.at("pattern").contains("String")) {
      for (Piece& piece : pieces_) {
        replace_all(&piece.bytes, step["pattern"]["String"].get<std::string>(),
                    step.at("content").get<std::string>());
      }
    } else if (type == "ByteFallback" && !fused) {
      for (Piece& piece : pieces_) {
        const int byte = byte_of_name(piece.bytes);
        if (byte >= 0) piece = {TokenPiece::Kind::kByte, std::string(1, static_cast<char>(byte))};
      }
      rules_.bytes = DecodeRules::Bytes::kRunOrReplaced;
    } else if (type == "Fuse") {
      fused = true;
    } else if (type == "Strip" && fused && step.value("content", "") == " " &&
               step.value("start", 0) == 1 && step.value("stop", 0) == 0) {
      rules_.leading_space = DecodeRules::LeadingSpace::kDropFirst;
    } else {
      throw std::runtime_error("decoder '" + type +
                               "' is not supported here; known: ByteLevel alone, or Sequence of "
                               "Replace, ByteFallback, Fuse, Strip (one leading space)");
    }
  }
}

void ByteBpeTokenizer::push_word(std::string_view word, MergeStream* merges,
                                 std::vector<int32_t>* ids, size_t limit) const {
  if (ignore_merges_) {
    if (const auto whole = words_.find(word); whole != words_.end()) {
      ids->push_back(whole->second);
      return;
    }
  }
  bool unknown_before = false;
  const auto push_unknown = [&] {
    if (unknown_ && !(unknown_before && fuse_unknown_)) merges->push(*unknown_);
    unknown_before = true;
  };
  // Ids of finished segments are final, so a long word need not be read to its end.
  if (words_of_->byte_level()) {
    for (size_t i = 0; i < word.size() && ids->size() < limit; ++i) {
      const int32_t id = byte_ids_[static_cast<unsigned char>(word[i])];
      if (id < 0) {
        push_unknown();
      } else {
        merges->push(id);
        unknown_before = false;
      }
    }
  } else {
    for (size_t offset = 0; offset < word.size() && ids->size() < limit;) {
      const size_t begin = offset;
      next_code_point(word, &offset);
      const std::string_view character = word.substr(begin, offset - begin);
      if (const auto found = ids_.find(character); found != ids_.end()) {
        merges->push(found->second);
        unknown_before = false;
        continue;
      }
      bool all_bytes = byte_fallback_;
      for (char byte : character)
        all_bytes = all_bytes && byte_ids_[static_cast<unsigned char>(byte)] >= 0;
      if (!all_bytes) {
        push_unknown();
        continue;
      }
      for (char byte : character) merges->push(byte_ids_[static_cast<unsigned char>(byte)]);
    }
  }
  merges->end_word();
}

std::vector<int32_t> ByteBpeTokenizer::encode(std::string_view text, size_t limit) const {
  if (const size_t invalid = find_invalid_utf8(text); invalid != std::string_view::npos) {
    throw std::invalid_argument("tokenizer: the text is not UTF-8 at byte " +
                                std::to_string(invalid));
  }
  std::vector<int32_t> ids;
  MergeStream merges(*merges_, &ids);
  const auto encode_words = [&](std::string_view part, int32_t added_id) {
    if (added_id >= 0) {
      ids.push_back(added_id);
    } else {
      words_of_->for_each_word(part, [&](std::string_view word) {
        push_word(word, &merges, &ids, limit);
        return ids.size() < limit;
      });
    }
    return ids.size() < limit;
  };
  if (limit > 0) {
    raw_added_->split(text, [&](std::string_view part, int32_t added_id) {
      if (added_id >= 0) return encode_words(part, added_id);
      if (normalizer_->is_identity()) return normalized_added_->split(part, encode_words);
      return normalized_added_->split(normalizer_->apply(part), encode_words);
    });
  }
  if (ids.size() > limit) ids.resize(limit);
  return ids;
}

}  // namespace

std::unique_ptr<Tokenizer> load_byte_bpe(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error(file.string() + ": cannot be read");
  try {
    return std::make_unique<ByteBpeTokenizer>(Json::parse(stream));
  } catch (const std::exception& error) {
    throw std::runtime_error(file.string() + ": " + error.what());
  }
}

}  // namespace replayeval
