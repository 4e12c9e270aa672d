#include "datasets/utf8.h"

#include <algorithm>

#include "datasets/tokenizer.h"

namespace replayeval {

Utf8Step utf8_step(std::string_view bytes) {
  using Kind = Utf8Step::Kind;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {Kind::kCodePoint, 1, lead};
  if (lead < 0xC2 || lead > 0xF4) return {Kind::kInvalid, 1, 0};
  const uint32_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms (E0, F0), surrogates (ED) and values above
  // U+10FFFF (F4).
  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  char32_t value = lead & (0x7Fu >> length);
  for (uint32_t i = 1; i < length; ++i) {
    if (i >= bytes.size()) return {Kind::kIncomplete, i, 0};
    const unsigned char next = byte(i);
    if (next < (i == 1 ? low : 0x80) || next > (i == 1 ? high : 0xBF))
      return {Kind::kInvalid, i, 0};
    value = value << 6 | (next & 0x3Fu);
  }
  return {Kind::kCodePoint, length, value};
}

char32_t next_code_point(std::string_view text, size_t* offset) {
  const Utf8Step step = utf8_step(text.substr(*offset, 4));
  *offset += step.length;
  return step.code_point;
}

void append_utf8(char32_t code_point, std::string* out) {
  const auto put = [&](char32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

size_t find_invalid_utf8(std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    if (static_cast<unsigned char>(text[offset]) < 0x80) {
      ++offset;
      continue;
    }
    const Utf8Step step = utf8_step(text.substr(offset, 4));
    if (step.kind != Utf8Step::Kind::kCodePoint) return offset;
    offset += step.length;
  }
  return std::string_view::npos;
}

}  // namespace replayeval
