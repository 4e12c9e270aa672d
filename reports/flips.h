// Answers that a state turned from right to wrong: where its tokens leave those of the baseline,
// how sure the baseline was there, and how far the state's distribution had moved.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reports/results.h"
#include "reports/tables.h"

namespace replayeval {

/// One answer that the baseline has right and a state wrong.
struct Flip {
  int state = 0;  // index into Report::states
  int item = 0;   // index into Report::items
  int repeat = 0;
  int64_t token = -1;           // index of the first token that differs; -1: ids are not known
  int32_t baseline_token = -1;  // there; -1: the answer ended before it
  int32_t state_token = -1;
  double margin = 0;          // of the baseline there, nats; NaN when not known
  double kl = 0;              // of the state against the baseline there, nats; NaN when not known
  std::string before;         // text that both have in common, its end
  std::string baseline_text;  // what follows
  std::string state_text;
};

/// By state, item and repeat. `kl` holds a kl run over the baseline's stored answers (documents
/// "task/item/repeat"), of which the KL is taken where tokens, states and positions agree; null:
/// none.
std::vector<Flip> find_flips(const Report& report, const Report* kl);

/// One row a flip. Without `private_texts`, tokens and texts of private tasks are left out.
Table flips_table(const Report& report, const std::vector<Flip>& flips, bool private_texts);

/// The same as CSV, one line a flip, with a header; and as a JSON array.
std::string flips_csv(const Report& report, const std::vector<Flip>& flips);
std::string flips_json(const Report& report, const std::vector<Flip>& flips);

}  // namespace replayeval
