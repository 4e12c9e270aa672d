#include "datasets/pg19.h"

#include <set>
#include <stdexcept>

#include "datasets/csv.h"

namespace replayeval {

namespace fs = std::filesystem;

std::vector<DocumentEntry> list_pg19(const fs::path& folder, const std::string& split) {
  const auto missing = [&](const std::string& what) {
    return std::runtime_error(
        "data: " + folder.string() + ": " + what + "; PG-19 is looked for as " +
        (folder / "metadata.csv").string() +
        " (without a header: book_id,short_book_title,publication_date,book_link) and " +
        (folder / split / "<book_id>.txt").string() +
        "; it is published by github.com/deepmind/pg19 in this layout in the bucket "
        "gs://deepmind-gutenberg "
        "(https://storage.googleapis.com/deepmind-gutenberg/metadata.csv, .../test/<book_id>.txt); "
        "set data.path to "
        "your copy");
  };
  const fs::path metadata = folder / "metadata.csv";
  if (!fs::is_regular_file(metadata)) throw missing("no metadata.csv");
  if (!fs::is_directory(folder / split)) throw missing("no folder " + split);
  std::set<std::string> present;
  for (const auto& file : fs::directory_iterator(folder / split)) {
    if (file.path().extension() == ".txt") present.insert(file.path().stem().string());
  }
  if (present.empty()) throw missing("no *.txt in folder " + split);
  std::vector<DocumentEntry> books;
  for (CsvRow& row : parse_csv(read_text(metadata), metadata.string())) {
    if (row.cells.size() < 2) {
      throw std::runtime_error(metadata.string() + ":" + std::to_string(row.line) + ": " +
                               std::to_string(row.cells.size()) +
                               " column, expected book_id,short_book_title,...");
    }
    // A book listed twice is one book.
    if (present.erase(row.cells[0]) == 0) continue;
    books.push_back({row.cells[0], row.cells[1], folder / split / (row.cells[0] + ".txt")});
  }
  if (books.empty()) throw missing("metadata.csv lists none of the books in folder " + split);
  return books;
}

}  // namespace replayeval
