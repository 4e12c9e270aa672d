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
  std::string
      problem;  // why the row cannot be read (CsvErrors::kMark); its cells are not to be used
};

enum class CsvErrors {
  kThrow,
  kMark,  // the broken row is named in `problem`, and reading goes on at the next line that begins
          // a row with as many cells as the first
};

/// Rows of a CSV text (RFC 4180): quoted cells may hold commas, line ends and doubled quotes; rows
/// end with LF or CRLF; a quote inside an unquoted cell is a character like others; empty lines are
/// passed over. `name` is for messages. A quote that never closes, or that closes before the end of
/// its cell, is an error that names line and row (std::runtime_error, or as `errors` says; the
/// first row always throws).
std::vector<CsvRow> parse_csv(std::string_view text, const std::string& name,
                              CsvErrors errors = CsvErrors::kThrow);

}  // namespace replayeval
