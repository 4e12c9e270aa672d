// The device's walk over a call's spans gives those of replay_spans.
#include "kernels/span_walk.h"

#include <doctest/doctest.h>

#include "kernels/replay.h"

using namespace replayeval;

namespace {

int compared = 0;

void compare(SpanWalk walk, const std::vector<ReplaySpan>& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    WalkSpan got;
    REQUIRE(walk.next(&got));
    CHECK(got.first == want[i].first);
    CHECK(got.records == want[i].records);
    CHECK(got.queries() == want[i].queries());
    CHECK((got.queries() == 0 || got.first_query == want[i].first_query));
    CHECK(got.flush == want[i].flush);
    CHECK(got.from_unencoded == want[i].from_unencoded);
    bool again = false;
    for (size_t k = i + 1; k < want.size(); ++k) again = again || want[k].flush;
    if (got.flush) CHECK(walk.flushes_again() == again);
    ++compared;
  }
  WalkSpan none;
  CHECK(!walk.next(&none));
}

}  // namespace

TEST_CASE("replay: the walk without memory gives the spans of replay_spans") {
  compared = 0;
  for (FlushOutput output : {FlushOutput::recurrence, FlushOutput::read}) {
    for (int window = 1; window <= 6; ++window) {
      for (int pending = 0; pending <= 9; ++pending) {
        compare(SpanWalk(pending, window, 0, WalkMode::flush, output), flush_spans(pending));
        for (int tokens = 0; tokens <= 20; ++tokens) {
          INFO("window " << window << ", pending " << pending << ", tokens " << tokens);
          int after = 0;
          compare(SpanWalk(pending, window, tokens, WalkMode::commit, output),
                  replay_spans(pending, window, tokens, AdvanceMode::commit, output, &after));
          compare(SpanWalk(pending, window, tokens, WalkMode::verify, output),
                  replay_spans(pending, window, tokens, AdvanceMode::verify, output, &after));
        }
      }
    }
  }
  CHECK(compared > 5000);
}
