// UTF-8 by code points: validation, iteration, and the two ways of replacing what is not valid.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace replayeval {

/// What starts at the front of some bytes (Unicode 15, table 3-7: well-formed UTF-8).
struct Utf8Step {
  enum class Kind {
    kCodePoint,   // `length` bytes are one code point
    kInvalid,     // the first `length` >= 1 bytes can be no code point, whatever follows (a maximal
                  // subpart)
    kIncomplete,  // all `length` bytes are the beginning of one
  };
  Kind kind;
  uint32_t length;
  char32_t code_point;  // for kCodePoint
};

/// Looks at the front of `bytes`, which must not be empty.
Utf8Step utf8_step(std::string_view bytes);

/// Code point at the front of valid UTF-8; adds its length to *offset.
char32_t next_code_point(std::string_view text, size_t* offset);

/// Appends the UTF-8 form of a code point.
void append_utf8(char32_t code_point, std::string* out);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace replayeval
