// GSM8K (Cobbe et al. 2021): question, and a solution that ends "#### result".
#include "datasets/data_files.h"
#include "datasets/item_readers.h"

namespace replayeval {

RawItems read_gsm8k(const ItemSource& source) {
  RawItems raw;
  std::vector<std::string> patterns{source.split + ".jsonl", "data/" + source.split + ".jsonl",
                                    "grade_school_math/data/" + source.split + ".jsonl"};
  for (std::string& pattern : parquet_patterns(source.split, {"main"}))
    patterns.push_back(std::move(pattern));
  raw.files = find_files(source, patterns);
  std::vector<DataRow> rows;
  for (const auto& file : raw.files)
    for (DataRow& row : read_rows(file)) rows.push_back(std::move(row));
  for (const DataRow& each : rows) {
    const nlohmann::json* const object = raw.take(each);
    if (object == nullptr) continue;
    const nlohmann::json& row = *object;
    Item item;
    item.row = raw.rows - 1;
    item.task = task_name(Task::kGsm8k);
    item.id = std::to_string(item.row);
    if (const std::string problem = kind_problem(row, {"question", "answer"}); !problem.empty()) {
      raw.refuse(item.id, item.row, problem);
      continue;
    }
    item.question = text_of(row, "question");
    item.solution = text_of(row, "answer");
    if (const size_t mark = item.solution.rfind("####"); mark != std::string::npos) {
      // Thousands are marked by commas in the file, which are no part of the number.
      for (char c : item.solution.substr(mark + 4)) {
        if (c != ',' && c != ' ' && c != '\n' && c != '\r') item.gold += c;
      }
    }
    raw.add(std::move(item));
  }
  return raw;
}

}  // namespace replayeval
