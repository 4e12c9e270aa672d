// Comma-separated values as spreadsheets write them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace replayeval {

/// One row and the line (from 1) that it begins on.
struct CsvRow {
  size_t line = 0;
  std::vector<std::string> cells;
};

/// Rows of a CSV text (RFC 4180): quoted cells may hold commas, line ends and doubled quotes; rows
/// end with LF or CRLF; a quote inside an unquoted cell is a character like others; empty lines are
/// passed over. `name` is for messages. Throws std::runtime_error naming row and line for a quote
/// that never closes, or that closes before the end of its cell.
std::vector<CsvRow> parse_csv(std::string_view text, const std::string& name);

}  // namespace replayeval
