// The parts of load_items: one reader a task, and what they share.
#pragma once

#include <filesystem>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "datasets/items.h"

namespace replayeval {

/// One row of a file.
struct DataRow {
  nlohmann::json value;  // an object
  std::string problem;   // why there is none, with file and line; empty: there is
};

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

  /// Counts a row and refuses it when it could not be read; otherwise the row's object.
  const nlohmann::json* take(const DataRow& row) {
    const size_t number = rows++;
    if (row.problem.empty()) return &row.value;
    refuse("row " + std::to_string(number), number, row.problem);
    return nullptr;
  }

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

/// Rows of a JSON array (.json), of a Parquet file (.parquet; columns that hold neither text nor
/// numbers nor lists of them are left out), or of a file with one object a line. Lines and elements
/// that are no object are marked. Throws std::runtime_error, with file and line, for a .json file
/// that is no array.
std::vector<DataRow> read_rows(const std::filesystem::path& path);

/// The JSON value of a text. Throws std::runtime_error, `place:line: message`, for text that is not
/// UTF-8 or not JSON; its first line is number `first_line`.
nlohmann::json parse_json(std::string_view text, const std::string& place, size_t first_line = 1);

/// What is wrong with the first of these keys that holds a list or map instead of a text or number;
/// empty: nothing.
std::string kind_problem(const nlohmann::json& row, std::initializer_list<const char*> keys);

/// Text of a key: a string as it is, a number in decimal; empty for null and where the key is
/// missing.
std::string text_of(const nlohmann::json& row, const char* key);

}  // namespace replayeval
