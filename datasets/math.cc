// MATH (Hendrycks et al. 2021): rows of JSON, or the original folders with one problem a file.
#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <tuple>

#include "datasets/data_files.h"
#include "datasets/grade_boxed.h"
#include "datasets/item_readers.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// "Level 5", "5" or 5; 0 for anything else ("Level ?" occurs).
int level_of(const Json& row) {
  std::string text = text_of(row, "level");
  if (text.starts_with("Level ")) text = text.substr(6);
  return text.size() == 1 && text[0] >= '1' && text[0] <= '5' ? text[0] - '0' : 0;
}

// With a level asked for, a problem must say its own.
void add_problem(const DataRow& read, const std::string& id, bool needs_level, RawItems* raw) {
  const Json* const object = raw->take(read);
  if (object == nullptr) return;
  const Json& row = *object;
  Item item;
  item.row = raw->rows - 1;
  item.task = task_name(Task::kMath);
  item.id = id.empty() ? std::to_string(item.row) : id;
  std::string problem =
      kind_problem(row, {"problem", "solution", "answer", "level", "type", "subject"});
  item.level = level_of(row);
  if (problem.empty() && needs_level && item.level == 0) {
    const std::string level = text_of(row, "level");
    problem = level.empty() ? "it has no level" : "its level is '" + level + "', expected 1 to 5";
  }
  if (!problem.empty()) {
    raw->refuse(item.id, item.row, problem);
    return;
  }
  item.category = text_of(row, row.contains("type") ? "type" : "subject");
  item.question = text_of(row, "problem");
  item.solution = text_of(row, "solution");
  item.gold = text_of(row, "answer");
  if (item.gold.empty()) {
    if (auto boxed = last_boxed(item.solution)) item.gold = std::move(boxed->content);
  }
  raw->add(std::move(item));
}

// A file with one problem.
DataRow read_problem(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) return {Json(), path.string() + ": cannot be read"};
  try {
    Json value = parse_json(text, path.string());
    if (!value.is_object()) return {Json(), path.string() + ": expected an object"};
    return {std::move(value), ""};
  } catch (const std::runtime_error& error) {
    return {Json(), error.what()};
  }
}

// <subject>/<number>.json below a split's folder, by subject, then by number.
std::vector<fs::path> problem_files(const fs::path& folder) {
  struct Entry {
    std::string subject;
    long number;
    fs::path path;
  };
  std::vector<Entry> entries;
  for (const auto& subject : fs::directory_iterator(folder)) {
    if (!subject.is_directory()) continue;
    for (const auto& file : fs::directory_iterator(subject.path())) {
      if (file.path().extension() != ".json") continue;
      const std::string stem = file.path().stem().string();
      const bool number = !stem.empty() && stem.size() < 10 &&
                          stem.find_first_not_of("0123456789") == std::string::npos;
      entries.push_back(
          {subject.path().filename().string(), number ? std::stol(stem) : -1, file.path()});
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.subject, a.number, a.path) < std::tie(b.subject, b.number, b.path);
  });
  std::vector<fs::path> files;
  for (Entry& entry : entries) files.push_back(std::move(entry.path));
  return files;
}

}  // namespace

RawItems read_math(const ItemSource& source) {
  RawItems raw;
  const std::string& split = source.split;
  const fs::path root = data_folder(source.path);
  for (const fs::path& folder : {root / split, root / "MATH" / split}) {
    if (!fs::is_directory(folder)) continue;
    raw.files = problem_files(folder);
    for (const fs::path& path : raw.files) {
      const std::string id =
          split + "/" + path.parent_path().filename().string() + "/" + path.filename().string();
      add_problem(read_problem(path), id, source.level.has_value(), &raw);
    }
    if (!raw.files.empty()) return raw;
  }
  std::vector<std::string> patterns{split + ".jsonl", split + ".json", "*/" + split + "-*.parquet"};
  for (std::string& pattern : parquet_patterns(split)) patterns.push_back(std::move(pattern));
  // Found above when they exist; here they are named for the message.
  patterns.push_back("MATH/" + split + "/*/*.json");
  patterns.push_back(split + "/*/*.json");
  raw.files = find_files(source, patterns);
  for (const fs::path& file : raw.files) {
    // A subject's file numbers its own rows.
    const bool of_subject = raw.files.size() > 1 && file.extension() == ".parquet";
    const std::string subject = split + "/" + file.parent_path().filename().string() + "/";
    size_t number = 0;
    for (const DataRow& row : read_rows(file)) {
      std::string id = text_of(row.value, "unique_id");
      if (id.empty() && of_subject) id = subject + std::to_string(number);
      ++number;
      add_problem(row, id, source.level.has_value(), &raw);
    }
  }
  return raw;
}

}  // namespace replayeval
