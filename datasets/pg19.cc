#include "datasets/pg19.h"

#include <set>
#include <stdexcept>

#include "datasets/csv.h"
#include "datasets/data_files.h"
#include "datasets/parquet.h"

namespace replayeval {

namespace fs = std::filesystem;

namespace {

std::vector<DocumentEntry> list_tables(const std::vector<fs::path>& files) {
  std::vector<DocumentEntry> books;
  std::set<std::string> seen;
  for (const fs::path& path : files) {
    const auto table = std::make_shared<const ParquetFile>(path);
    if (!table->has("text")) {
      std::string there;
      for (const std::string& column : table->columns()) there += " " + column;
      throw std::runtime_error(path.string() + ": no column 'text'; there are:" + there);
    }
    const auto column = [&](const char* name) {
      return table->has(name) ? table->read(name)
                              : std::vector<ParquetCell>(static_cast<size_t>(table->rows()));
    };
    const std::vector<ParquetCell> titles = column("short_book_title"), urls = column("url");
    for (size_t row = 0; row < titles.size(); ++row) {
      const std::string url = text_of(urls[row]);
      std::string id = url.substr(url.find_last_of('/') + 1);
      if (id.empty()) id = std::to_string(books.size());
      // A book listed twice is one book.
      if (!seen.insert(id).second) continue;
      books.push_back(
          {std::move(id), text_of(titles[row]), path, table, static_cast<int64_t>(row)});
    }
  }
  if (books.empty()) throw std::runtime_error(files.front().string() + ": it has no rows");
  return books;
}

}  // namespace

std::vector<DocumentEntry> list_pg19(const fs::path& folder, const std::string& split) {
  const fs::path root = data_folder(folder);
  std::vector<fs::path> tables;
  if (folder.extension() == ".parquet" && fs::is_regular_file(folder)) {
    tables = {folder};
  } else if (!fs::is_regular_file(root / "metadata.csv")) {
    tables = find_data_files(root, parquet_patterns(split));
  }
  if (!tables.empty()) return list_tables(tables);
  const auto missing = [&](const std::string& what) {
    return std::runtime_error(
        "data: " + folder.string() + ": " + what + "; PG-19 is looked for as " +
        (folder / "metadata.csv").string() +
        " (without a header: book_id,short_book_title,publication_date,book_link) and " +
        (folder / split / "<book_id>.txt").string() +
        "; it is published by github.com/deepmind/pg19 in this layout in the bucket "
        "gs://deepmind-gutenberg "
        "(https://storage.googleapis.com/deepmind-gutenberg/metadata.csv, .../test/<book_id>.txt), "
        "and as Parquet by copies on the hub (" +
        split + "-*.parquet, also in data/, or " + split +
        "/*.parquet, with columns short_book_title, url, text); "
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
    books.push_back(
        {row.cells[0], row.cells[1], folder / split / (row.cells[0] + ".txt"), nullptr, 0});
  }
  if (books.empty()) throw missing("metadata.csv lists none of the books in folder " + split);
  return books;
}

}  // namespace replayeval
