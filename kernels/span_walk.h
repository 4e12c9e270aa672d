// The spans of replay_spans (kernels/replay.h) one after the other, without memory: for device
// code, which walks them itself.
#pragma once

#include "kernels/state_row.h"
#include "quant/float_format.h"

namespace replayeval {

/// What a call does with a plan's ring. `flush`: the explicit one of *_flush.
enum class WalkMode : uint8_t { commit, verify, flush };

/// As ReplaySpan.
struct WalkSpan {
  int first = 0;
  int records = 0;
  int first_query = 0;
  bool flush = false;
  bool from_unencoded = false;

  REPLAYEVAL_HD constexpr int end() const { return first + records; }
  REPLAYEVAL_HD constexpr int queries() const { return end() - first_query; }
};

class SpanWalk {
 public:
  REPLAYEVAL_HD constexpr SpanWalk(int pending, int window, int tokens, WalkMode mode,
                                   FlushOutput output)
      : pending_(pending),
        window_(window),
        tokens_(tokens),
        mode_(mode),
        output_(output),
        first_(-pending) {}

  /// The next span; false at the end.
  REPLAYEVAL_HD constexpr bool next(WalkSpan* span) {
    if (done_ || (mode_ != WalkMode::flush && tokens_ == 0)) return false;
    if (mode_ == WalkMode::flush) {
      done_ = true;
      *span = {-pending_, pending_, 0, true, false};
      return pending_ > 0;
    }
    if (mode_ == WalkMode::verify) {
      if (!folded_ && pending_ > 0 && pending_ + tokens_ > window_) {
        folded_ = true;
        *span = {-pending_, pending_, 0, true, false};
        return true;
      }
      done_ = true;
      if (folded_) {
        *span = {0, tokens_, 0, false, output_ == FlushOutput::recurrence};
      } else {
        *span = {-pending_, pending_ + tokens_, 0, false, false};
      }
      return true;
    }
    if (first_ < 0 && pending_ >= window_) {
      *span = {first_, pending_, 0, true, false};
      first_ = 0;
      return true;
    }
    if (first_ >= tokens_) return false;
    int end = first_ + window_ < tokens_ ? first_ + window_ : tokens_;
    bool full = end - first_ == window_;
    *span = {first_, end - first_, first_ > 0 ? first_ : 0, full, false};
    first_ = end;
    done_ = !full;
    return true;
  }

  /// Whether a later span flushes.
  REPLAYEVAL_HD constexpr bool flushes_again() const {
    return mode_ == WalkMode::commit && !done_ && tokens_ - first_ >= window_;
  }

 private:
  int pending_, window_, tokens_;
  WalkMode mode_;
  FlushOutput output_;
  int first_;
  bool folded_ = false;
  bool done_ = false;
};

}  // namespace replayeval
