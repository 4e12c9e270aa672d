// MMLU-Pro (Wang et al. 2024) as Parquet or JSON: the columns of TIGER-Lab/MMLU-Pro.
#include <algorithm>

#include "datasets/data_files.h"
#include "datasets/item_readers.h"

namespace replayeval {

RawItems read_mmlu_pro(const ItemSource& source) {
  RawItems raw;
  const std::string& split = source.split;
  std::vector<std::string> patterns = parquet_patterns(split);
  for (const char* folder : {"", "data/"})
    for (const char* form : {".json", ".jsonl"}) patterns.push_back(folder + split + form);
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
    item.task = task_name(Task::kMmluPro);
    item.id = text_of(row, "question_id");
    if (item.id.empty()) item.id = std::to_string(item.row);
    if (const std::string problem = kind_problem(
            row, {"question_id", "category", "question", "cot_content", "answer", "answer_index"});
        !problem.empty()) {
      raw.refuse(item.id, item.row, problem);
      continue;
    }
    item.category = text_of(row, "category");
    item.question = text_of(row, "question");
    item.solution = text_of(row, "cot_content");
    if (!row.contains("options") || !row.at("options").is_array() || row.at("options").empty()) {
      raw.refuse(item.id, item.row, "it has no options");
      continue;
    }
    // The answer is given twice; a file may lack one of them.
    const std::string letter = text_of(row, "answer");
    int64_t gold = -1;
    if (letter.size() == 1) gold = letter[0] - 'A';
    if (row.contains("answer_index") && row.at("answer_index").is_number_integer()) {
      const auto index = row.at("answer_index").get<int64_t>();
      if (!letter.empty() && index != gold) {
        raw.refuse(item.id, item.row,
                   "answer is " + letter + ", but answer_index " + std::to_string(index));
        continue;
      }
      gold = index;
    }
    const auto& options = row.at("options");
    const auto nested = std::find_if(options.begin(), options.end(), [](const auto& option) {
      return option.is_structured() || option.is_null();
    });
    if (nested != options.end()) {
      raw.refuse(item.id, item.row,
                 "its option " + std::to_string(nested - options.begin()) +
                     " (from 0) is no text or number");
      continue;
    }
    for (size_t i = 0; i < options.size(); ++i) {
      const nlohmann::json& option = options[i];
      std::string text = option.is_string() ? option.get<std::string>() : option.dump();
      if (text == "N/A") continue;
      if (static_cast<int64_t>(i) == gold) item.gold_option = static_cast<int>(item.options.size());
      item.options.push_back(std::move(text));
    }
    raw.add(std::move(item));
  }
  return raw;
}

}  // namespace replayeval
