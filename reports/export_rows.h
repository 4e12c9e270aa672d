// The rows of the exported tables, alike in every format, and files of any length that take their
// place only when they are complete.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string_view>

#include "reports/results.h"

namespace replayeval {

/// A file that takes its place, synced, only when it is complete.
class LargeFile {
 public:
  /// Throws std::runtime_error with the system's reason, as do write and finish.
  explicit LargeFile(const std::filesystem::path& path);
  LargeFile(const LargeFile&) = delete;
  LargeFile& operator=(const LargeFile&) = delete;
  ~LargeFile();

  void write(std::string_view bytes);
  int64_t written() const { return written_; }
  void finish();

 private:
  [[noreturn]] void fail() const;

  std::filesystem::path path_, temporary_;
  std::FILE* file_;
  int64_t written_ = 0;
};

/// One state at one position. `kl` and `nll` NaN or inf: not finite; none: no value (nll without a
/// next token, top1 at non-finite logits).
struct PositionRow {
  size_t document = 0;
  int64_t position = 0;
  int32_t token = 0;
  size_t state = 0;
  float kl = 0;
  std::optional<float> nll;
  std::optional<uint8_t> top1;
};

/// Calls `visit` for everything measured, by document, position and state.
template <class Visit>
void visit_positions(const Report& report, Visit visit) {
  for (size_t d = 0; d < report.documents.size(); ++d) {
    int64_t length = 0;
    for (const StateReport& state : report.states)
      length = std::max(length, state.documents[d].length);
    for (int64_t t = 0; t < length; ++t) {
      const auto i = static_cast<size_t>(t);
      for (size_t s = 0; s < report.states.size(); ++s) {
        const StateDocument& values = report.states[s].documents[d];
        if (t < values.first_position || t >= values.length) continue;
        PositionRow row{d, t, report.token_ids[d].at(i), s, values.kl[i], {}, {}};
        if (t + 1 < report.documents[d].tokens && i < values.nll.size()) row.nll = values.nll[i];
        if (values.top1[i] != kNoTop1) row.top1 = values.top1[i];
        visit(row);
      }
    }
  }
}

}  // namespace replayeval
