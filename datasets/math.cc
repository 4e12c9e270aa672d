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

void add_problem(const Json& row, const std::string& id, RawItems* raw) {
  Item item;
  item.row = raw->rows++;
  item.task = task_name(Task::kMath);
  item.id = id.empty() ? std::to_string(item.row) : id;
  item.category = text_of(row, row.contains("type") ? "type" : "subject");
  item.level = level_of(row);
  item.question = text_of(row, "problem");
  item.solution = text_of(row, "solution");
  item.gold = text_of(row, "answer");
  if (item.gold.empty()) {
    if (auto boxed = last_boxed(item.solution)) item.gold = std::move(boxed->content);
  }
  raw->add(std::move(item));
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
      std::ifstream file(path, std::ios::binary);
      try {
        add_problem(
            Json::parse(file),
            split + "/" + path.parent_path().filename().string() + "/" + path.filename().string(),
            &raw);
      } catch (const Json::exception& error) {
        throw std::runtime_error(path.string() + ": not the JSON of a problem: " + error.what());
      }
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
    for (const Json& row : read_rows(file)) {
      std::string id = text_of(row, "unique_id");
      if (id.empty() && of_subject) id = subject + std::to_string(number);
      ++number;
      add_problem(row, id, &raw);
    }
  }
  return raw;
}

}  // namespace replayeval
