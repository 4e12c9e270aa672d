// Boxed answers: the content of the last \boxed{...} of a text.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace replayeval {

/// One box of a text.
struct BoxedAnswer {
  std::string content;  // between the braces, or what follows "\boxed "
  size_t begin = 0;     // byte offset of the backslash
  size_t end = 0;       // one past the closing brace
};

/// The last \boxed{...}, \fbox{...} or "\boxed 5" of `text` (the latter up to a dollar sign, a
/// closing \) or \] or the end of the line), with its braces balanced; `\{` and `\}` do not count.
/// None when there is no box, and when the last one is not closed (a generation that was cut inside
/// it), even if earlier ones are. Linear time.
std::optional<BoxedAnswer> last_boxed(std::string_view text);

/// The last box with the boxes before it that state one answer together with it: each gap is on one
/// line, shorter than 60 bytes, without a full stop, and holds a comma, semicolon, "and", "or", or
/// nothing but white space and dollar signs. In order; empty where last_boxed finds none.
std::vector<BoxedAnswer> last_boxed_group(std::string_view text);

}  // namespace replayeval
