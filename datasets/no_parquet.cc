// What a Parquet file is to a program built without Arrow.
#include <stdexcept>

#include "datasets/parquet.h"

namespace replayeval {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path) {
  throw std::runtime_error(path.string() +
                           ": this program was built without Parquet (REPLAYEVAL_PARQUET=OFF); "
                           "expected json, jsonl, csv or text");
}

}  // namespace

struct ParquetFile::State {};

ParquetFile::ParquetFile(const std::filesystem::path& path) { refuse(path); }
int64_t ParquetFile::rows() const { refuse("parquet"); }
const std::vector<std::string>& ParquetFile::columns() const { refuse("parquet"); }
bool ParquetFile::has(const std::string&) const { refuse("parquet"); }
bool ParquetFile::readable(const std::string&) const { refuse("parquet"); }
std::vector<ParquetCell> ParquetFile::read(const std::string&, int64_t, int64_t) const {
  refuse("parquet");
}
std::string text_of(const ParquetCell&) { refuse("parquet"); }

}  // namespace replayeval
