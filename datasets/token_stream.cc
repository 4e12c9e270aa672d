#include "datasets/token_stream.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "base/hash.h"
#include "datasets/parquet.h"
#include "datasets/pg19.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

std::vector<DocumentEntry> list_texts(const fs::path& path) {
  if (fs::is_regular_file(path))
    return {{path.stem().string(), path.stem().string(), path, nullptr, 0}};
  if (!fs::is_directory(path)) {
    throw std::runtime_error("data: " + path.string() +
                             ": no such file or folder; kind text takes a text file or a " +
                             "folder of *.txt");
  }
  std::vector<DocumentEntry> entries;
  for (const auto& file : fs::directory_iterator(path)) {
    if (file.is_regular_file() && file.path().extension() == ".txt") {
      const std::string name = file.path().stem().string();
      if (find_invalid_utf8(name) != std::string::npos) {
        throw std::runtime_error("data: " + file.path().string() +
                                 ": its name is not UTF-8; rename it");
      }
      entries.push_back({name, name, file.path(), nullptr, 0});
    }
  }
  if (entries.empty())
    throw std::runtime_error("data: " + path.string() + ": no *.txt in this folder");
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.id < b.id; });
  return entries;
}

// Where a document's text stands, for messages.
std::string place_of(const DocumentEntry& entry) {
  return entry.path.string() + (entry.table ? ", row " + std::to_string(entry.row) : "");
}

void check_request(const DataSource& source) {
  const auto refuse = [](const std::string& what, int64_t value, const std::string& expected) {
    throw std::invalid_argument("data: " + what + " is " + std::to_string(value) + ", expected " +
                                expected);
  };
  if (source.documents && *source.documents < 1)
    refuse("documents", *source.documents, "a number from 1 or a list of ids");
  if (source.tokens && *source.tokens < 2) {
    refuse("tokens", *source.tokens, "2 or more: bos and a token to predict");
  }
  if (source.documents && !source.ids.empty()) {
    throw std::invalid_argument(
        "data: documents is both a number and a list of ids; give one of them");
  }
}

// The documents asked for by id, or all of them.
std::vector<DocumentEntry> choose(const DataSource& source, std::vector<DocumentEntry> all) {
  if (source.ids.empty()) return all;
  std::vector<DocumentEntry> chosen;
  for (const std::string& id : source.ids) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const DocumentEntry& e) { return e.id == id; });
    if (found == all.end()) {
      std::string known;
      for (size_t i = 0; i < std::min<size_t>(all.size(), 8); ++i) known += " " + all[i].id;
      if (all.size() > 8) known += " ...";
      throw std::invalid_argument(
          "data: documents: no document '" + id + "' in " + source.path.string() +
          (source.kind == DataSource::Kind::kPg19 ? ", split " + source.split : "") + "; " +
          std::to_string(all.size()) + " are there:" + known);
    }
    const auto same = [&](const DocumentEntry& e) { return e.id == id; };
    if (std::any_of(chosen.begin(), chosen.end(), same)) {
      throw std::invalid_argument("data: documents: '" + id + "' is listed twice");
    }
    chosen.push_back(*found);
  }
  return chosen;
}

// Appends bos, text and eos as far as `budget` tokens allow; returns whether all of them fitted.
bool append_text(const Tokenizer& tokenizer, const std::string& text, const std::string& name,
                 size_t budget, std::vector<int32_t>* tokens) {
  if (tokenizer.bos_id() && tokens->size() < budget) tokens->push_back(*tokenizer.bos_id());
  const size_t room = budget - tokens->size();
  // One id more than there is room for tells whether the text ends there.
  const std::vector<int32_t> ids =
      tokenizer.encode(text, room == Tokenizer::kAll ? room : room + 1);
  if (ids.empty()) throw std::runtime_error(name + ": the tokenizer makes no token of this text");
  tokens->insert(tokens->end(), ids.begin(),
                 ids.begin() + static_cast<ptrdiff_t>(std::min(room, ids.size())));
  if (ids.size() > room) return false;
  if (tokenizer.eos_ids().empty()) return true;
  if (tokens->size() == budget) return false;
  tokens->push_back(tokenizer.eos_ids().front());
  return true;
}

LoadedDocuments load_joined(const DataSource& source, const Tokenizer& tokenizer,
                            const std::vector<DocumentEntry>& entries) {
  Document joined;
  std::string texts;
  const size_t budget = source.tokens ? static_cast<size_t>(*source.tokens) : Tokenizer::kAll;
  const size_t wanted = source.documents ? static_cast<size_t>(*source.documents) : entries.size();
  size_t used = 0;
  joined.complete = true;
  for (size_t i = 0; i < std::min(wanted, entries.size()); ++i) {
    joined.id += (i == 0 ? "" : "+") + entries[i].id;
    joined.title += (i == 0 ? "" : " + ") + entries[i].title;
    if (joined.tokens.size() == budget) {
      joined.complete = false;
      continue;
    }
    const std::string text = read_document(entries[i]);
    joined.complete = append_text(tokenizer, text, place_of(entries[i]), budget, &joined.tokens);
    texts += text;
    ++used;
  }
  if (source.tokens && joined.tokens.size() < budget) {
    throw std::invalid_argument("data: tokens is " + std::to_string(budget) + ", but the " +
                                std::to_string(used) + " joined documents have " +
                                std::to_string(joined.tokens.size()) + " together");
  }
  joined.sha256 = sha256_hex(texts);
  joined.stream = stream_of(joined.id);
  LoadedDocuments loaded;
  loaded.description = std::to_string(used) + " documents joined with eos and bos between them";
  loaded.documents.push_back(std::move(joined));
  return loaded;
}

LoadedDocuments load_apart(const DataSource& source, const Tokenizer& tokenizer,
                           const std::vector<DocumentEntry>& entries) {
  LoadedDocuments loaded;
  const size_t budget = source.tokens ? static_cast<size_t>(*source.tokens) : Tokenizer::kAll;
  const size_t wanted = source.documents ? static_cast<size_t>(*source.documents) : entries.size();
  for (const DocumentEntry& entry : entries) {
    if (loaded.documents.size() == wanted) break;
    const std::string text = read_document(entry);
    Document document{entry.id, entry.title, sha256_hex(text), stream_of(entry.id), {}, false};
    document.complete = append_text(tokenizer, text, place_of(entry), budget, &document.tokens);
    if (source.tokens && document.tokens.size() < budget) {
      loaded.skipped.push_back({entry.id, static_cast<int64_t>(document.tokens.size())});
    } else {
      loaded.documents.push_back(std::move(document));
    }
  }
  if (loaded.documents.empty()) {
    const auto longest =
        std::max_element(loaded.skipped.begin(), loaded.skipped.end(),
                         [](const auto& a, const auto& b) { return a.tokens < b.tokens; });
    throw std::invalid_argument("data: tokens is " + std::to_string(budget) + ", but none of the " +
                                std::to_string(loaded.skipped.size()) +
                                " documents is that long: the longest, " + longest->id + ", has " +
                                std::to_string(longest->tokens) +
                                " tokens; lower tokens, or join the documents with join: true");
  }
  loaded.description = std::to_string(loaded.documents.size()) + " of " +
                       std::to_string(entries.size()) + " documents";
  if (source.documents && loaded.documents.size() < wanted) {
    loaded.description += " (" + std::to_string(wanted) + " asked for)";
  }
  if (!loaded.skipped.empty()) {
    loaded.description += "; shorter than " + std::to_string(budget) + " tokens, skipped:";
    for (const SkippedDocument& skipped : loaded.skipped) {
      loaded.description += " " + skipped.id + " (" + std::to_string(skipped.tokens) + ")";
    }
  }
  return loaded;
}

}  // namespace

namespace {

// With LF line ends and without a byte order mark.
std::string clean_text(const std::string& bytes, const std::string& place) {
  if (const size_t invalid = find_invalid_utf8(bytes); invalid != std::string::npos) {
    throw std::runtime_error(place + ": not UTF-8 at byte " + std::to_string(invalid) + " (value " +
                             std::to_string(static_cast<unsigned char>(bytes[invalid])) +
                             "); convert the file to UTF-8");
  }
  std::string text;
  text.reserve(bytes.size());
  const std::string_view byte_order_mark = "\xEF\xBB\xBF";
  for (size_t i = bytes.starts_with(byte_order_mark) ? 3 : 0; i < bytes.size(); ++i) {
    if (bytes[i] != '\r') {
      text += bytes[i];
    } else {
      text += '\n';
      if (i + 1 < bytes.size() && bytes[i + 1] == '\n') ++i;
    }
  }
  if (text.empty()) throw std::runtime_error(place + ": the text is empty");
  return text;
}

}  // namespace

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be read");
  std::stringstream stream;
  stream << file.rdbuf();
  return clean_text(stream.str(), path.string());
}

std::string read_document(const DocumentEntry& entry) {
  if (entry.table == nullptr) return read_text(entry.path);
  return clean_text(text_of(entry.table->read("text", entry.row, 1).front()), place_of(entry));
}

std::vector<DocumentEntry> list_documents(const DataSource& source) {
  check_request(source);
  if (source.path.empty()) throw std::invalid_argument("data: path is not set");
  return choose(source, source.kind == DataSource::Kind::kPg19
                            ? list_pg19(source.path, source.split)
                            : list_texts(source.path));
}

LoadedDocuments load_documents(const DataSource& source, const Tokenizer& tokenizer) {
  const std::vector<DocumentEntry> entries = list_documents(source);
  LoadedDocuments loaded = source.join ? load_joined(source, tokenizer, entries)
                                       : load_apart(source, tokenizer, entries);
  loaded.description =
      source.path.string() +
      (source.kind != DataSource::Kind::kPg19 ? ": "
       : entries.front().table                ? " (PG-19 as Parquet, split " + source.split + "): "
                                              : " (PG-19 layout, split " + source.split + "): ") +
      loaded.description;
  return loaded;
}

}  // namespace replayeval
