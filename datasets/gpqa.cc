// GPQA (Rein et al. 2023) in the authors' CSV files; columns are found by name.
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "datasets/csv.h"
#include "datasets/item_readers.h"
#include "datasets/tokenizer.h"

namespace replayeval {

RawItems read_gpqa(const ItemSource& source) {
  RawItems raw;
  const std::string name = "gpqa_" + source.split + ".csv";
  raw.files = find_files(source, {name, "dataset/" + name});
  const std::string path = raw.files.front().string();
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  std::stringstream stream;
  stream << file.rdbuf();
  std::string text = stream.str();
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  if (const size_t invalid = find_invalid_utf8(text); invalid != std::string::npos) {
    throw std::runtime_error(path + ": not UTF-8 at byte " + std::to_string(invalid));
  }
  const std::vector<CsvRow> rows = parse_csv(text, path, CsvErrors::kMark);
  if (rows.empty()) throw std::runtime_error(path + ": empty, expected a header row");
  std::map<std::string, size_t> columns;
  std::set<std::string> twice;
  for (size_t i = 0; i < rows[0].cells.size(); ++i)
    if (!columns.emplace(rows[0].cells[i], i).second) twice.insert(rows[0].cells[i]);
  for (const char* read : {"Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2",
                           "Incorrect Answer 3", "Record ID", "High-level domain", "Explanation"}) {
    if (twice.contains(read)) {
      throw std::runtime_error(path + ":1: two columns are called '" + read + "'; expected one");
    }
  }
  for (const char* needed : {"Question", "Correct Answer", "Incorrect Answer 1",
                             "Incorrect Answer 2", "Incorrect Answer 3"}) {
    if (!columns.contains(needed)) {
      throw std::runtime_error(path + ":1: no column '" + needed + "' among " +
                               std::to_string(columns.size()));
    }
  }
  for (size_t i = 1; i < rows.size(); ++i) {
    const std::vector<std::string>& cells = rows[i].cells;
    const auto cell = [&](const char* column) {
      const auto found = columns.find(column);
      return found == columns.end() || found->second >= cells.size() ? std::string()
                                                                     : cells[found->second];
    };
    Item item;
    item.row = raw.rows++;
    item.task = task_name(Task::kGpqa);
    item.id = cell("Record ID");
    if (item.id.empty()) item.id = "row " + std::to_string(item.row);
    if (!rows[i].problem.empty()) {
      raw.refuse("row " + std::to_string(item.row), item.row, rows[i].problem);
      continue;
    }
    if (cells.size() != rows[0].cells.size()) {
      raw.refuse(item.id, item.row,
                 "line " + std::to_string(rows[i].line) + " has " + std::to_string(cells.size()) +
                     " cells, the header " + std::to_string(rows[0].cells.size()));
      continue;
    }
    item.category = cell("High-level domain");
    item.question = cell("Question");
    item.solution = cell("Explanation");
    item.options = {cell("Correct Answer"), cell("Incorrect Answer 1"), cell("Incorrect Answer 2"),
                    cell("Incorrect Answer 3")};
    item.gold_option = 0;
    raw.add(std::move(item));
  }
  return raw;
}

}  // namespace replayeval
