// What the Parquet export is to a program built without Arrow.
#include <stdexcept>

#include "reports/export.h"

namespace replayeval {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path) {
  throw std::runtime_error(path.string() +
                           ": this program was built without Parquet (REPLAYEVAL_PARQUET=OFF); "
                           "expected csv");
}

}  // namespace

int64_t write_positions_parquet(const Report&, const std::filesystem::path& path) { refuse(path); }
int64_t write_answers_parquet(const Report&, const std::filesystem::path& path) { refuse(path); }

}  // namespace replayeval
