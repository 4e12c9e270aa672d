#include "reports/export.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "reports/export_rows.h"
#include "reports/files.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

std::string field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

template <class T>
void append_number(std::string* line, T value) {
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof digits, value);
  line->append(digits, end);
}

void append_figure(std::string* line, float value) {
  if (std::isnan(value)) {
    *line += "nan";  // to_chars writes the sign of a NaN, which means nothing here
  } else {
    append_number(line, value);
  }
}

}  // namespace

int64_t write_positions_csv(const Report& report, const fs::path& path) {
  LargeFile file(path);
  file.write("document,position,token,state,kl,nll,top1\n");
  int64_t lines = 0;
  std::vector<std::string> names, documents;
  for (const StateReport& state : report.states) names.push_back(field(state.info.name));
  for (const DocumentInfo& document : report.documents) documents.push_back(field(document.id));
  std::string text;
  visit_positions(report, [&](const PositionRow& row) {
    text += documents[row.document] + ",";
    append_number(&text, row.position);
    text += ",";
    append_number(&text, row.token);
    text += "," + names[row.state] + ",";
    append_figure(&text, row.kl);
    text += ",";
    if (row.nll) append_figure(&text, *row.nll);
    text += ",";
    if (row.top1) append_number(&text, static_cast<int>(*row.top1));
    text += "\n";
    ++lines;
    if (text.size() > 1 << 20) {
      file.write(text);
      text.clear();
    }
  });
  file.write(text);
  file.finish();
  return lines;
}

int64_t write_answers_csv(const Report& report, const fs::path& path) {
  LargeFile file(path);
  file.write(
      "task,item,category,level,repeat,state,gold,extracted,correct,finish_reason,tokens,rule,"
      "stage,seconds,prompt_sha256\n");
  int64_t lines = 0;
  for (const StateReport& state : report.states) {
    for (const Answer& answer : state.answers) {
      const ItemInfo& item = report.items.at(static_cast<size_t>(answer.item));
      std::string line = field(item.task) + "," + field(item.id) + "," + field(item.category) + ",";
      append_number(&line, item.level);
      line += ",";
      append_number(&line, answer.repeat);
      line += "," + field(state.info.name) + "," + field(item.gold) + "," +
              field(answer.extracted) + "," + (answer.correct ? "1" : "0") + "," +
              field(answer.finish_reason) + ",";
      if (answer.tokens >= 0) append_number(&line, answer.tokens);
      line += "," + field(answer.rule) + ",";
      append_number(&line, answer.stage);
      line += ",";
      append_number(&line, answer.seconds);
      line += "," + field(item.prompt_sha256) + "\n";
      file.write(line);
      ++lines;
    }
  }
  file.finish();
  return lines;
}

}  // namespace replayeval
