// Tables in Parquet files, as the hub ships data sets, through Arrow. Only parquet.cc includes
// Arrow's headers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace replayeval {

/// A cell: nothing, an integer (Booleans are 0 and 1), a float, text (or bytes), or a list of texts
/// (numbers in it in decimal).
using ParquetCell =
    std::variant<std::monostate, int64_t, double, std::string, std::vector<std::string>>;

/// An open Parquet file. Columns are read when they are asked for; copies share what was read. May
/// be used from several threads.
class ParquetFile {
 public:
  /// Throws std::runtime_error naming the file when it cannot be read or is no Parquet.
  explicit ParquetFile(const std::filesystem::path& path);

  int64_t rows() const;

  /// Names of the columns in the file's order; nested ones by their outermost name.
  const std::vector<std::string>& columns() const;
  bool has(const std::string& column) const;
  /// Whether read() knows the column's type.
  bool readable(const std::string& column) const;

  /// The cells of rows first .. first + count - 1 (count < 0: to the end) of a column; reads the
  /// row groups that hold them. Throws std::runtime_error naming file and column for a column that
  /// is not there or of another type than those of ParquetCell, and for damaged data.
  std::vector<ParquetCell> read(const std::string& column, int64_t first = 0,
                                int64_t count = -1) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// A cell as text: numbers in decimal, empty for nothing; a list is refused (std::runtime_error).
std::string text_of(const ParquetCell& cell);

}  // namespace replayeval
