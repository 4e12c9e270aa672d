#include "datasets/csv.h"

#include <stdexcept>

namespace replayeval {

std::vector<CsvRow> parse_csv(std::string_view text, const std::string& name) {
  std::vector<CsvRow> rows;
  size_t line = 1;
  size_t at = 0;
  const auto at_line_end = [&] {
    return at == text.size() || text[at] == '\n' || text.substr(at, 2) == "\r\n";
  };
  while (at < text.size()) {
    CsvRow row;
    row.line = line;
    while (true) {
      std::string cell;
      if (at < text.size() && text[at] == '"') {
        const size_t opened = line;
        const auto broken = [&](const std::string& what) {
          return std::runtime_error(name + ":" + std::to_string(opened) + ": row " +
                                    std::to_string(rows.size() + 1) + ", cell " +
                                    std::to_string(row.cells.size() + 1) + ": " + what);
        };
        ++at;
        while (true) {
          const size_t quote = text.find('"', at);
          if (quote == std::string_view::npos)
            throw broken("the quote that opens here never closes");
          for (size_t i = at; i < quote; ++i) line += text[i] == '\n';
          cell.append(text.substr(at, quote - at));
          at = quote + 1;
          if (at == text.size() || text[at] != '"') break;
          cell += '"';
          ++at;
        }
        if (!at_line_end() && text[at] != ',') {
          throw broken(
              "text follows the closing quote; quotes inside a quoted cell must be doubled");
        }
      } else {
        while (!at_line_end() && text[at] != ',') cell += text[at++];
      }
      row.cells.push_back(std::move(cell));
      if (at_line_end()) break;
      ++at;  // the comma
    }
    if (at < text.size()) at += text[at] == '\r' ? 2 : 1;
    ++line;
    const bool empty_line = row.cells.size() == 1 && row.cells[0].empty();
    if (!empty_line) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace replayeval
