// Questions with known answers: MMLU-Pro, GPQA, MATH and GSM8K in the files that their authors
// publish.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace replayeval {

/// One question.
struct Item {
  std::string id;        // from the file, or its row number: unique in a task
  std::string task;      // mmlu_pro, gpqa, math, gsm8k
  std::string category;  // subject, domain or problem type; may be empty
  int level = 0;         // MATH: 1 to 5; 0: not stated
  std::string question;
  std::vector<std::string> options;  // empty: a free answer
  int gold_option = -1;              // index into options
  std::string gold;                  // its letter, or the free answer
  std::string solution;              // worked solution, explanation or reasoning; may be empty
  size_t row = 0;  // in the whole file (MATH folder: of the sorted files), whatever was left out
};

enum class Task { kMmluPro, kGpqa, kMath, kGsm8k };

/// "mmlu_pro", "gpqa", "math", "gsm8k".
std::string task_name(Task task);

/// Which items of which files.
struct ItemSource {
  Task task = Task::kMath;
  std::filesystem::path path;  // a file, or the data set's folder
  std::string split = "test";  // GPQA: diamond, main or extended
  std::optional<int> level;    // MATH: only this one
  bool published = true;       // compare counts and texts with the published sets
  // In the file's order, so that a smaller selection is part of a larger one; both may be given.
  std::optional<int64_t> items;         // the first n
  std::optional<int64_t> per_category;  // the first n of each category
  std::vector<std::string> ids;         // or exactly these
};

/// An item that cannot be asked or graded.
struct BadItem {
  std::string id;
  size_t row = 0;
  std::string reason;
};

struct ItemSet {
  std::vector<Item> items;
  std::vector<BadItem> bad;  // of the whole file; none of them is among `items`
  size_t rows = 0;           // in the file
  std::string sha256;       // of the file; a folder: over "<sha256> <name>\n" of its files in order
  std::string description;  // one line: file, counts, selection
  std::vector<std::string> warnings;  // a part of the published set, altered texts
};

/// Reads and checks the items of a source. Layouts:
/// - MMLU-Pro: .parquet, .json (an array) or .jsonl with question, options, answer, answer_index,
///   category, cot_content; a folder with <split> in one of these forms (data/test-*.parquet as the
///   hub has it). Options "N/A" are fillers and are dropped.
/// - GPQA: gpqa_<split>.csv (or any .csv) with the authors' column names; options are the correct
///   answer, then the three wrong ones.
/// - MATH: .json or .jsonl with problem, solution, level ("Level 5" or 5), type or subject, and
///   answer or a \boxed{} in the solution; a folder <split>.jsonl, <split>/<subject>/<number>.json,
///   MATH/<split>/<subject>/<number>.json, or <subject>/<split>-*.parquet as the hub has it.
/// - GSM8K: .jsonl or .parquet with question and answer, the result behind "####"; a folder with
///   <split>.jsonl or main/<split>-*.parquet.
/// A folder may also be one of the hub cache (datasets--ORG--NAME). Rows that cannot be read are
/// bad items: CSV with broken quotes, lines that are not UTF-8, not JSON or no object. So are keys
/// that hold a list where a text belongs, and, where a level is asked for, problems that state
/// none.
///
/// Throws std::invalid_argument for a wrong selection and std::runtime_error for missing files
/// (naming the layouts that were looked for), files that are no CSV or JSON array (file and line),
/// a CSV column that occurs twice, and a file without one good item.
ItemSet load_items(const ItemSource& source);

}  // namespace replayeval
