#include "datasets/csv.h"

#include <algorithm>
#include <stdexcept>

namespace replayeval {
namespace {

// Reads rows one by one.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool at_end() const { return at_ >= text_.size(); }

  void skip_line() {
    const size_t end = text_.find('\n', at_);
    at_ = end == std::string_view::npos ? text_.size() : end + 1;
    ++line_;
  }

  /// The next row, which must exist. On a broken one `problem` is set, and the reader stands at the
  /// beginning of the line behind the one that the row begins on.
  CsvRow next() {
    CsvRow row;
    row.line = line_;
    const size_t begin = at_;
    while (true) {
      std::string cell;
      if (at_ < text_.size() && text_[at_] == '"') {
        const size_t opened = line_;
        row.problem = quoted(&cell);
        if (!row.problem.empty()) {
          row.problem = "line " + std::to_string(opened) + ", cell " +
                        std::to_string(row.cells.size() + 1) + ": " + row.problem;
          at_ = begin;
          line_ = row.line;
          skip_line();
          return row;
        }
      } else {
        while (!at_line_end() && text_[at_] != ',') cell += text_[at_++];
      }
      row.cells.push_back(std::move(cell));
      if (at_line_end()) break;
      ++at_;  // the comma
    }
    if (at_ < text_.size()) at_ += text_[at_] == '\r' ? 2 : 1;
    ++line_;
    return row;
  }

 private:
  bool at_line_end() const {
    return at_ == text_.size() || text_[at_] == '\n' || text_.substr(at_, 2) == "\r\n";
  }

  // A cell that begins with a quote; returns what is wrong with it.
  std::string quoted(std::string* cell) {
    ++at_;
    while (true) {
      const size_t quote = text_.find('"', at_);
      if (quote == std::string_view::npos) return "the quote that opens here never closes";
      line_ += static_cast<size_t>(std::count(text_.begin() + static_cast<ptrdiff_t>(at_),
                                              text_.begin() + static_cast<ptrdiff_t>(quote), '\n'));
      cell->append(text_.substr(at_, quote - at_));
      at_ = quote + 1;
      if (at_ == text_.size() || text_[at_] != '"') break;
      *cell += '"';
      ++at_;
    }
    if (!at_line_end() && text_[at_] != ',') {
      return "text follows the closing quote; quotes inside a quoted cell must be doubled";
    }
    return "";
  }

  std::string_view text_;
  size_t at_ = 0;
  size_t line_ = 1;
};

bool is_empty_line(const CsvRow& row) { return row.cells.size() == 1 && row.cells[0].empty(); }

}  // namespace

std::vector<CsvRow> parse_csv(std::string_view text, const std::string& name, CsvErrors errors) {
  // Lines behind a broken row that are tried for the next one; beyond, each is a row of its own.
  constexpr int kMostTried = 1000;
  std::vector<CsvRow> rows;
  Reader reader(text);
  while (!reader.at_end()) {
    CsvRow row = reader.next();
    if (!row.problem.empty()) {
      if (errors == CsvErrors::kThrow || rows.empty()) {
        throw std::runtime_error(name + ":" + std::to_string(row.line) + ": row " +
                                 std::to_string(rows.size() + 1) + ": " + row.problem);
      }
      for (int tried = 0; tried < kMostTried && !reader.at_end(); ++tried) {
        Reader trial = reader;
        const CsvRow candidate = trial.next();
        if (candidate.problem.empty() && candidate.cells.size() == rows[0].cells.size()) break;
        // Only the candidate's first line is given up.
        reader.skip_line();
      }
      rows.push_back(std::move(row));
      continue;
    }
    if (!is_empty_line(row)) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace replayeval
