#include "datasets/unicode_normalize.h"

#include <unicode/unorm2.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "datasets/utf8.h"

namespace replayeval {
namespace {

struct Character {
  char32_t code_point;
  uint8_t combining_class;
};

class Normalizer {
 public:
  explicit Normalizer(NormalForm form)
      : compose_(form == NormalForm::kNfc || form == NormalForm::kNfkc) {
    UErrorCode error = U_ZERO_ERROR;
    const bool compatibility = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
    data_ = compatibility ? unorm2_getNFKCInstance(&error) : unorm2_getNFCInstance(&error);
    if (U_FAILURE(error)) {
      throw std::runtime_error(std::string("unicode normalization: ICU has no data: ") +
                               u_errorName(error));
    }
  }

  std::string run(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    size_t offset = 0;
    while (offset < text.size()) {
      // ASCII is its own normal form; the last one before another character may still compose with
      // it.
      size_t ascii = offset;
      while (ascii < text.size() && static_cast<unsigned char>(text[ascii]) < 0x80) ++ascii;
      if (ascii > offset) {
        const size_t copied = ascii == text.size() ? ascii : ascii - 1;
        out.append(text.substr(offset, copied - offset));
        offset = copied;
        if (offset == text.size()) break;
      }
      offset = segment(text, offset, &out);
    }
    return out;
  }

 private:
  // Normalizes from `offset` up to the next character that interacts with nothing before it;
  // returns its offset.
  size_t segment(std::string_view text, size_t offset, std::string* out) {
    characters_.clear();
    size_t end = offset;
    do {
      decompose(next_code_point(text, &end));
      if (end == text.size()) break;
      size_t after = end;
      if (unorm2_hasBoundaryBefore(data_, static_cast<UChar32>(next_code_point(text, &after))))
        break;
    } while (true);
    reorder();
    if (compose_) compose();
    for (const Character& c : characters_) append_utf8(c.code_point, out);
    return end;
  }

  void decompose(char32_t c) {
    UErrorCode error = U_ZERO_ERROR;
    UChar buffer[64];  // the longest decomposition, U+FDFA under NFKC, has 18 units
    const int32_t units =
        c < 0x80 ? -1 : unorm2_getDecomposition(data_, static_cast<UChar32>(c), buffer, 64, &error);
    if (units < 0) {
      push(c);
      return;
    }
    for (int32_t i = 0; i < units;) {
      UChar32 part;
      U16_NEXT(buffer, i, units, part);
      push(static_cast<char32_t>(part));
    }
  }

  void push(char32_t c) {
    characters_.push_back(
        {c, c < 0x80 ? uint8_t{0} : unorm2_getCombiningClass(data_, static_cast<UChar32>(c))});
  }

  // Canonical ordering: each run of non-starters is sorted by class, stably.
  void reorder() {
    const auto starter = [](const Character& c) { return c.combining_class == 0; };
    auto begin = characters_.begin();
    while (begin != characters_.end()) {
      begin = std::find_if_not(begin, characters_.end(), starter);
      const auto end = std::find_if(begin, characters_.end(), starter);
      std::stable_sort(begin, end, [](const Character& a, const Character& b) {
        return a.combining_class < b.combining_class;
      });
      begin = end;
    }
  }

  // Canonical composition: a character joins the last starter unless one of equal or higher class
  // lies between.
  void compose() {
    size_t kept = 0;
    size_t starter = SIZE_MAX;
    uint8_t last_class = 0;  // of the last kept character; 0: it is the starter itself
    for (const Character c : characters_) {
      if (starter != SIZE_MAX && (last_class == 0 || last_class < c.combining_class)) {
        const UChar32 pair =
            unorm2_composePair(data_, static_cast<UChar32>(characters_[starter].code_point),
                               static_cast<UChar32>(c.code_point));
        if (pair >= 0) {
          characters_[starter].code_point = static_cast<char32_t>(pair);
          continue;
        }
      }
      if (c.combining_class == 0) starter = kept;
      last_class = c.combining_class;
      characters_[kept++] = c;
    }
    characters_.resize(kept);
  }

  const UNormalizer2* data_;
  bool compose_;
  std::vector<Character> characters_;
};

}  // namespace

std::string normalize_unicode(std::string_view text, NormalForm form) {
  return Normalizer(form).run(text);
}

}  // namespace replayeval
