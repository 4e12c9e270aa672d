// Unicode normalization forms in linear time, from ICU's character data.
#pragma once

#include <string>
#include <string_view>

namespace replayeval {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

/// Unicode normalization (UAX #15) of valid UTF-8. Linear in the length for runs of combining marks
/// of any length and order, where an insertion sort (as inside ICU's own function) would be
/// quadratic.
std::string normalize_unicode(std::string_view text, NormalForm form);

}  // namespace replayeval
