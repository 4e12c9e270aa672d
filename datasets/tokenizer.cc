#include "datasets/tokenizer.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/hash.h"
#include "datasets/tokenizer_formats.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

Json read_json(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(path.string() + ": cannot be read");
  try {
    return Json::parse(stream);
  } catch (const Json::parse_error& error) {
    throw std::runtime_error(path.string() + ": not JSON: " + error.what());
  }
}

// The token behind "bos_token": a name, or an object with its `content`.
std::optional<int32_t> named_token(const Tokenizer& tokenizer, const Json& value,
                                   const fs::path& path) {
  if (value.is_null()) return std::nullopt;
  const std::string name =
      value.is_object() ? value.at("content").get<std::string>() : value.get<std::string>();
  const auto id = tokenizer.id_of(name);
  if (!id)
    throw std::runtime_error(path.string() + ": token '" + name + "' is not in " +
                             tokenizer.name());
  return id;
}

std::vector<int32_t> id_list(const Json& value) {
  if (value.is_number_integer()) return {value.get<int32_t>()};
  std::vector<int32_t> ids;
  if (value.is_array()) {
    for (const Json& id : value) ids.push_back(id.get<int32_t>());
  }
  return ids;
}

void append_new(const std::vector<int32_t>& more, std::vector<int32_t>* ids) {
  for (int32_t id : more) {
    if (std::find(ids->begin(), ids->end(), id) == ids->end()) ids->push_back(id);
  }
}

std::string list_text(const std::vector<int32_t>& ids) {
  std::string text = "[";
  for (size_t i = 0; i < ids.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ids[i]);
  return text + "]";
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const fs::path& folder) {
  fs::path file = folder;
  if (!fs::is_regular_file(file)) {
    file = folder / "tokenizer.json";
    if (!fs::is_regular_file(file)) file = folder / "tokenizer.model";
    if (!fs::is_regular_file(file)) {
      throw std::runtime_error(folder.string() +
                               ": no tokenizer: looked for tokenizer.json and tokenizer.model");
    }
  }
  auto tokenizer = file.extension() == ".json" ? load_byte_bpe(file) : load_sentencepiece(file);
  tokenizer->name_ = file.string();
  std::map<std::string, std::string> hashes;  // by file name
  hashes[file.filename().string()] = sha256_file(file);

  bool bos_decided = false;
  if (const fs::path path = file.parent_path() / "tokenizer_config.json";
      fs::is_regular_file(path)) {
    const Json config = read_json(path);
    hashes[path.filename().string()] = sha256_file(path);
    if (config.contains("bos_token")) {
      tokenizer->bos_ = named_token(*tokenizer, config["bos_token"], path);
      bos_decided = true;
    }
    if (config.contains("eos_token")) {
      const auto eos = named_token(*tokenizer, config["eos_token"], path);
      tokenizer->eos_.clear();
      if (eos) tokenizer->eos_.push_back(*eos);
    }
  }
  if (const fs::path path = file.parent_path() / "generation_config.json";
      fs::is_regular_file(path)) {
    const Json config = read_json(path);
    hashes[path.filename().string()] = sha256_file(path);
    const auto bos = id_list(config.value("bos_token_id", Json()));
    if (!bos_decided && !tokenizer->bos_ && !bos.empty()) tokenizer->bos_ = bos.front();
    append_new(id_list(config.value("eos_token_id", Json())), &tokenizer->eos_);
  }
  std::string lines;
  for (const auto& [name, hash] : hashes) lines += name + " " + hash + "\n";
  tokenizer->sha256_ = sha256_hex(lines);
  return tokenizer;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  StreamingDecoder decoder(*this);
  std::string text;
  for (int32_t id : ids) text += decoder.push(id);
  return text + decoder.finish();
}

StreamingDecoder::StreamingDecoder(const Tokenizer& tokenizer)
    : tokenizer_(&tokenizer), rules_(tokenizer.decode_rules()) {}

void StreamingDecoder::put(std::string_view text, bool piece, std::string* out) {
  using Space = DecodeRules::LeadingSpace;
  const Space rule = rules_.leading_space;
  const bool applies = rule == Space::kDropFirst || (piece && rule != Space::kKeep);
  if (nothing_yet_ && !space_dropped_ && applies && text.starts_with(' ')) {
    text.remove_prefix(1);
    space_dropped_ = rule != Space::kDropOfPieces;
  }
  if (!text.empty()) nothing_yet_ = false;
  out->append(text);
}

void StreamingDecoder::settle(bool end_of_run, std::string* out) {
  using Bytes = DecodeRules::Bytes;
  if (rules_.bytes == Bytes::kRunOrReplaced) {
    if (!end_of_run) return;  // one bad byte at the end would change the whole run
    if (find_invalid_utf8(pending_) == std::string::npos) {
      put(pending_, false, out);
    } else {
      for (size_t i = 0; i < pending_.size(); ++i) put(kReplacementCharacter, false, out);
    }
    pending_.clear();
    return;
  }
  size_t offset = 0;
  while (offset < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(offset);
    const Utf8Step step = utf8_step(rest);
    if (step.kind == Utf8Step::Kind::kCodePoint) {
      put(rest.substr(0, step.length), false, out);
      offset += step.length;
      continue;
    }
    if (step.kind == Utf8Step::Kind::kIncomplete && !end_of_run) break;
    put(kReplacementCharacter, false, out);
    offset += rules_.bytes == Bytes::kRun ? 1 : step.length;
  }
  pending_.erase(0, offset);
}

std::string StreamingDecoder::push(int32_t id) {
  std::string out;
  const TokenPiece piece = tokenizer_->piece(id);
  if (piece.kind == TokenPiece::Kind::kAbsent) return out;
  if (rules_.bytes == DecodeRules::Bytes::kStream || piece.kind == TokenPiece::Kind::kByte) {
    pending_ += piece.bytes;
    settle(false, &out);
    return out;
  }
  settle(true, &out);
  if (piece.kind != TokenPiece::Kind::kControl) {
    put(piece.bytes, piece.kind == TokenPiece::Kind::kText, &out);
  }
  return out;
}

std::string StreamingDecoder::finish() {
  std::string out;
  settle(true, &out);
  nothing_yet_ = true;
  space_dropped_ = false;
  return out;
}

TokenizerCheck check_tokenizer(const Tokenizer& tokenizer, const fs::path& answers) {
  std::ifstream stream(answers, std::ios::binary);
  if (!stream) throw std::runtime_error(answers.string() + ": cannot be read");
  const bool decode_only = answers.filename().string().starts_with("decode");
  TokenizerCheck check;
  const auto note = [&](size_t line, const char* what, const std::string& input,
                        std::string expected, std::string got, size_t difference) {
    if (check.worst && check.worst->first_difference <= difference) return;
    check.worst = {answers.filename().string(), line,           what,      input,
                   std::move(expected),         std::move(got), difference};
  };
  const auto compare = [&](size_t line, const char* what, const std::string& input,
                           const auto& expected, const auto& got) {
    if (expected == got) return true;
    const auto difference = static_cast<size_t>(
        std::mismatch(expected.begin(), expected.end(), got.begin(), got.end()).first -
        expected.begin());
    if constexpr (std::is_same_v<std::decay_t<decltype(got)>, std::string>) {
      note(line, what, input, expected, got, difference);
    } else {
      note(line, what, input, list_text(expected), list_text(got), difference);
    }
    return false;
  };
  std::string text;
  size_t lines = 0;
  for (size_t line = 1; std::getline(stream, text); ++line) {
    if (text.empty()) continue;
    ++lines;
    try {
      const Json row = Json::parse(text);
      const std::string input = row.at("text");
      const std::vector<int32_t> ids = row.at("ids");
      if (decode_only) {
        ++check.decodes;
        check.decodes_equal += compare(line, "text", list_text(ids), input, tokenizer.decode(ids));
        continue;
      }
      ++check.texts;
      check.ids_equal += compare(line, "ids", input, ids, tokenizer.encode(input));
      if (row.contains("decoded")) {
        ++check.decodes;
        check.decodes_equal += compare(line, "decoded", list_text(ids),
                                       row["decoded"].get<std::string>(), tokenizer.decode(ids));
      }
      for (const char* what : {"ids_with_special", "ids_with_bos"}) {
        if (!row.contains(what)) continue;
        ++check.with_special;
        check.with_special_equal +=
            compare(line, what, input, row[what].get<std::vector<int32_t>>(),
                    tokenizer.encode_with_special(input));
      }
    } catch (const Json::exception& error) {
      throw std::runtime_error(answers.string() + ":" + std::to_string(line) +
                               ": expected an object with `text` and `ids`: " + error.what());
    }
  }
  if (lines == 0) throw std::runtime_error(answers.string() + ": no stored answers in it");
  return check;
}

TokenizerCheck check_tokenizer(const fs::path& folder, const fs::path& answers) {
  const auto tokenizer = load_tokenizer(folder);
  if (!answers.empty()) return check_tokenizer(*tokenizer, answers);
  const fs::path place = fs::is_directory(folder) ? folder : folder.parent_path();
  TokenizerCheck sum = check_tokenizer(*tokenizer, place / "expected.jsonl");
  if (fs::is_regular_file(place / "decode.jsonl")) {
    TokenizerCheck more = check_tokenizer(*tokenizer, place / "decode.jsonl");
    sum.decodes += more.decodes;
    sum.decodes_equal += more.decodes_equal;
    if (more.worst && (!sum.worst || more.worst->first_difference < sum.worst->first_difference)) {
      sum.worst = std::move(more.worst);
    }
  }
  return sum;
}

}  // namespace replayeval
