// Added tokens of tokenizer.json in running text.
#include <unicode/uchar.h>

#include <algorithm>

#include "datasets/tokenizer_formats.h"
#include "datasets/utf8.h"

namespace replayeval {
namespace {

// Offset of the code point that ends at `end` > 0.
size_t previous_code_point(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

bool is_word_character(char32_t c) {
  const auto code_point = static_cast<UChar32>(c);
  return u_isUAlphabetic(code_point) || u_hasBinaryProperty(code_point, UCHAR_JOIN_CONTROL) ||
         (U_GET_GC_MASK(code_point) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0;
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)), nodes_(1), starts_(256) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    uint32_t node = 0;
    for (char c : tokens_[i].content) {
      const auto byte = static_cast<unsigned char>(c);
      auto& next = nodes_[node].next;
      const auto found =
          std::find_if(next.begin(), next.end(), [&](const auto& n) { return n.first == byte; });
      if (found != next.end()) {
        node = found->second;
      } else {
        const auto created = static_cast<uint32_t>(nodes_.size());
        next.emplace_back(byte, created);
        nodes_.emplace_back();
        node = created;
      }
    }
    if (node != 0 && nodes_[node].token < 0) nodes_[node].token = static_cast<int32_t>(i);
  }
  for (const auto& [byte, node] : nodes_[0].next) starts_[byte] = true;
}

bool AddedTokenFinder::split(std::string_view text,
                             const std::function<bool(std::string_view, int32_t)>& part) const {
  size_t done = 0;
  for (size_t position = 0; position < text.size();) {
    if (!starts_[static_cast<unsigned char>(text[position])]) {
      ++position;
      continue;
    }
    uint32_t node = 0;
    int32_t token = -1;
    size_t end = position;
    for (size_t i = position; i < text.size(); ++i) {
      const auto& next = nodes_[node].next;
      const auto found = std::find_if(next.begin(), next.end(), [&](const auto& n) {
        return n.first == static_cast<unsigned char>(text[i]);
      });
      if (found == next.end()) break;
      node = found->second;
      if (nodes_[node].token >= 0) {
        token = nodes_[node].token;
        end = i + 1;
      }
    }
    if (token < 0) {
      ++position;
      continue;
    }
    const AddedToken& added = tokens_[static_cast<size_t>(token)];
    size_t begin = position, stop = end;
    position = end;
    if (added.single_word) {
      size_t before = begin == 0 ? 0 : previous_code_point(text, begin);
      size_t after = stop;
      if (begin > 0 && is_word_character(next_code_point(text, &before))) continue;
      if (stop < text.size() && is_word_character(next_code_point(text, &after))) continue;
    }
    if (added.lstrip) {
      while (begin > done) {
        const size_t before = previous_code_point(text, begin);
        size_t offset = before;
        if (!u_isUWhiteSpace(static_cast<UChar32>(next_code_point(text, &offset)))) break;
        begin = before;
      }
    }
    if (added.rstrip) {
      size_t offset = stop;
      while (offset < text.size() &&
             u_isUWhiteSpace(static_cast<UChar32>(next_code_point(text, &offset)))) {
        stop = offset;
      }
    }
    if (done < begin && !part(text.substr(done, begin - done), -1)) return false;
    if (!part(text.substr(begin, stop - begin), added.id)) return false;
    done = stop;
  }
  return done >= text.size() || part(text.substr(done), -1);
}

}  // namespace replayeval
