// MMLU-Pro (Wang et al. 2024) as Parquet or JSON: the columns of TIGER-Lab/MMLU-Pro.
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
  std::vector<nlohmann::json> rows;
  for (const auto& file : raw.files)
    for (nlohmann::json& row : read_rows(file)) rows.push_back(std::move(row));
  for (const nlohmann::json& row : rows) {
    Item item;
    item.row = raw.rows++;
    item.task = task_name(Task::kMmluPro);
    item.id = text_of(row, "question_id");
    if (item.id.empty()) item.id = std::to_string(item.row);
    item.category = text_of(row, "category");
    item.question = text_of(row, "question");
    item.solution = text_of(row, "cot_content");
    if (!row.contains("options") || !row["options"].is_array() || row["options"].empty()) {
      raw.refuse(item.id, item.row, "it has no options");
      continue;
    }
    // The answer is given twice; a file may lack one of them.
    const std::string letter = text_of(row, "answer");
    int64_t gold = -1;
    if (letter.size() == 1) gold = letter[0] - 'A';
    if (row.contains("answer_index") && row["answer_index"].is_number_integer()) {
      const auto index = row["answer_index"].get<int64_t>();
      if (!letter.empty() && index != gold) {
        raw.refuse(item.id, item.row,
                   "answer is " + letter + ", but answer_index " + std::to_string(index));
        continue;
      }
      gold = index;
    }
    for (size_t i = 0; i < row["options"].size(); ++i) {
      const nlohmann::json& option = row["options"][i];
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
