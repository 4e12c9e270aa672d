// Documents of tokens for teacher forcing: PG-19 in its on-disk layout or as Parquet, any text
// file, or a folder of text files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "datasets/tokenizer.h"

namespace replayeval {

class ParquetFile;

/// The `data:` section of an experiment.
struct DataSource {
  enum class Kind { kPg19, kText };
  Kind kind = Kind::kText;
  std::filesystem::path path;  // pg19: folder with metadata.csv or Parquet; text: a file, or a
                               // folder of *.txt (by name)
  std::string split = "test";  // pg19: folder of the books: train, validation, test
  std::optional<int64_t> documents;  // the first n in order; absent with empty `ids`: all
  std::vector<std::string> ids;      // or these documents, in this order
  std::optional<int64_t> tokens;     // per document, bos included; absent: whole documents with eos
  bool join = false;                 // one document: the chosen texts with eos and bos between them
};

/// One document as the model sees it.
struct Document {
  std::string id;
  std::string title;
  std::string
      sha256;  // of the text (UTF-8, line ends as LF); joined: of the texts one after the other
  uint32_t stream = 0;          // stream_of(id): base/hash.h
  std::vector<int32_t> tokens;  // bos, text, eos; bos and eos where the tokenizer has one, eos only
                                // at the end of a whole text
  bool complete = false;        // nothing was cut off
};

/// A document shorter than the budget.
struct SkippedDocument {
  std::string id;
  int64_t tokens = 0;  // how many it has, bos and eos included
};

struct LoadedDocuments {
  std::vector<Document> documents;
  std::vector<SkippedDocument> skipped;
  std::string
      description;  // one line for logs and reports: source, order, what was joined or skipped
};

/// Reads and tokenizes the documents of a source. CRLF and CR are read as LF. `documents: n` counts
/// documents that are long enough: shorter ones are passed over and listed. Throws
/// std::invalid_argument for a wrong request (unknown id, no document with `tokens` tokens: the
/// message says how many the longest has) and std::runtime_error for missing files (naming the
/// layout that was looked for), invalid UTF-8 (file and byte offset) and empty texts.
LoadedDocuments load_documents(const DataSource& source, const Tokenizer& tokenizer);

/// A document named in a source, before its text is read.
struct DocumentEntry {
  std::string id;
  std::string title;
  std::filesystem::path path;
  // The text is a file of its own, or this row of the table's column `text`.
  std::shared_ptr<const ParquetFile> table;
  int64_t row = 0;
};

/// The documents of a source in order: those that exist (a PG-19 folder may hold a part of the
/// split) and that `ids` names, if it does. Reads no text: for --dry-run. Throws as load_documents.
std::vector<DocumentEntry> list_documents(const DataSource& source);

/// The text of a document; as read_text.
std::string read_document(const DocumentEntry& entry);

/// A text file as UTF-8 with LF line ends; a leading byte order mark is dropped. Throws
/// std::runtime_error when it cannot be read, is empty, or is not UTF-8 (naming the byte offset).
std::string read_text(const std::filesystem::path& path);

}  // namespace replayeval
