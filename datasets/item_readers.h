// The parts of load_items: one reader a task, and what they share.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "datasets/items.h"

namespace replayeval {

/// Items of one task as they stand in the files; `bad` rows are left out.
struct RawItems {
  std::vector<Item> items;
  std::vector<BadItem> bad;
  size_t rows = 0;
  std::vector<std::filesystem::path> files;

  /// Takes over an item, or names what is wrong with it: an empty question, no answer, more than
  /// ten options, an id that occurred before.
  void add(Item item);
  std::set<std::string> ids;  // of the items so far

  void refuse(const std::string& id, size_t row, const std::string& reason) {
    bad.push_back({id, row, reason});
  }
};

RawItems read_mmlu_pro(const ItemSource& source);
RawItems read_gpqa(const ItemSource& source);
RawItems read_math(const ItemSource& source);
RawItems read_gsm8k(const ItemSource& source);

/// Where a data set comes from, for messages.
const char* published_as(Task task);

/// The source's path if it is a file, otherwise the files of the first of `patterns` (see
/// find_data_files) that has any in that folder. Throws std::runtime_error listing what was looked
/// for, and where the data set is published.
std::vector<std::filesystem::path> find_files(const ItemSource& source,
                                              const std::vector<std::string>& patterns);

/// Objects of a JSON array (.json), of a Parquet file's rows (.parquet; columns that hold neither
/// text nor numbers nor lists of them are left out), or of a file with one a line. Throws
/// std::runtime_error with file and line for text that is neither.
std::vector<nlohmann::json> read_rows(const std::filesystem::path& path);

/// Text of a key: a string as it is, a number in decimal; empty for null and where the key is
/// missing.
std::string text_of(const nlohmann::json& row, const char* key);

}  // namespace replayeval
