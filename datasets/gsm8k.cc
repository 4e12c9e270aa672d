// GSM8K (Cobbe et al. 2021): question, and a solution that ends "#### result".
#include "datasets/item_readers.h"

namespace replayeval {

RawItems read_gsm8k(const ItemSource& source) {
  RawItems raw;
  raw.files = {find_file(source, {source.split + ".jsonl", "data/" + source.split + ".jsonl"},
                         "github.com/openai/grade-school-math")};
  for (const nlohmann::json& row : read_rows(raw.files.front())) {
    Item item;
    item.row = raw.rows++;
    item.task = task_name(Task::kGsm8k);
    item.id = std::to_string(item.row);
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
