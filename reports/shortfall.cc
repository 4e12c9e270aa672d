#include "reports/shortfall.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace replayeval {

std::string shortfall(const Report& stored, const Report& report) {
  std::vector<std::string> lacking;
  auto answers_of = [](const Report& run, const StateReport& state) {
    std::set<std::pair<std::string, int32_t>> keys;
    for (const Answer& answer : state.answers) {
      const ItemInfo& item = run.items.at(static_cast<size_t>(answer.item));
      keys.insert({item.task + "/" + item.id, answer.repeat});
    }
    return keys;
  };
  for (const StateReport& state : stored.states) {
    const auto same = std::find_if(
        report.states.begin(), report.states.end(),
        [&](const StateReport& other) { return other.info.sha256 == state.info.sha256; });
    for (size_t d = 0; d < state.documents.size(); ++d) {
      const DocumentInfo& document = stored.documents.at(d);
      const int64_t had = state.documents[d].length;
      int64_t has = 0, end = had;
      for (size_t i = 0; same != report.states.end() && i < report.documents.size(); ++i) {
        if (report.documents[i].id != document.id) continue;
        has = same->documents.at(i).length;
        if (report.documents[i].tokens > document.tokens && had == document.tokens) --end;
      }
      if (has >= end) continue;
      lacking.push_back(std::to_string(had - has) + " of " + std::to_string(had) +
                        " positions of document " + document.id + " by state " + state.info.name);
    }
    const std::set<std::pair<std::string, int32_t>> had = answers_of(stored, state);
    std::set<std::pair<std::string, int32_t>> has;
    if (same != report.states.end()) has = answers_of(report, *same);
    const auto gone =
        std::count_if(had.begin(), had.end(), [&](const auto& key) { return !has.contains(key); });
    if (gone > 0) {
      lacking.push_back(std::to_string(gone) + " of " + std::to_string(had.size()) +
                        " answers by state " + state.info.name);
    }
  }
  if (lacking.size() < 2) return lacking.empty() ? "" : lacking[0];
  return lacking[0] + ", and " + std::to_string(lacking.size() - 1) + " more";
}

}  // namespace replayeval
