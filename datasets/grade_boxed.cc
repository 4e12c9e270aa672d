// Boxed answers: one search from the end, one walk over the braces.
#include "datasets/grade_boxed.h"

#include <algorithm>

namespace replayeval {
namespace {

constexpr std::string_view kBoxed = "\\boxed";
constexpr std::string_view kFbox = "\\fbox";
constexpr size_t kLongestGap = 60;

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// The box that starts at `begin`, none if it is not closed before `limit`.
std::optional<BoxedAnswer> box_at(std::string_view text, size_t begin, size_t limit) {
  const size_t name = text.substr(begin).starts_with(kBoxed) ? kBoxed.size() : kFbox.size();
  size_t open = begin + name;
  while (open < limit && is_space(text[open])) ++open;
  if (open == limit) return std::nullopt;
  BoxedAnswer box;
  box.begin = begin;
  if (text[open] != '{') {
    if (open == begin + name) return std::nullopt;  // \boxedsomething
    size_t end = open;
    while (
        end < limit && text[end] != '$' && text[end] != '\n' &&
        !(text[end] == '\\' && end + 1 < limit && (text[end + 1] == ')' || text[end + 1] == ']')))
      ++end;
    box.end = end;
    while (end > open && is_space(text[end - 1])) --end;
    box.content = text.substr(open, end - open);
    return box;
  }
  size_t depth = 0;
  for (size_t i = open; i < limit; ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '{') {
      ++depth;
    } else if (text[i] == '}' && --depth == 0) {
      box.content = text.substr(open + 1, i - open - 1);
      box.end = i + 1;
      return box;
    }
  }
  return std::nullopt;
}

// Offset of the last box name in text[0, limit), npos if there is none.
size_t last_name(std::string_view text, size_t limit) {
  for (size_t at = text.substr(0, limit).rfind('\\'); at != std::string_view::npos;
       at = at == 0 ? std::string_view::npos : text.rfind('\\', at - 1)) {
    const std::string_view rest = text.substr(at, limit - at);
    if (rest.starts_with(kBoxed) || rest.starts_with(kFbox)) return at;
  }
  return std::string_view::npos;
}

bool joins(std::string_view gap) {
  if (gap.size() >= kLongestGap || gap.find_first_of(".\n") != std::string_view::npos) return false;
  const bool blank =
      std::all_of(gap.begin(), gap.end(), [](char c) { return is_space(c) || c == '$'; });
  const auto has_word = [&](std::string_view word) {
    for (size_t at = gap.find(word); at != std::string_view::npos; at = gap.find(word, at + 1)) {
      const auto letter = [&](size_t i) {
        return i < gap.size() &&
               ((gap[i] >= 'a' && gap[i] <= 'z') || (gap[i] >= 'A' && gap[i] <= 'Z'));
      };
      if (!letter(at - 1) && !letter(at + word.size())) return true;
    }
    return false;
  };
  return blank || gap.find_first_of(",;") != std::string_view::npos || has_word("and") ||
         has_word("or");
}

}  // namespace

std::optional<BoxedAnswer> last_boxed(std::string_view text) {
  const size_t at = last_name(text, text.size());
  if (at == std::string_view::npos) return std::nullopt;
  return box_at(text, at, text.size());
}

std::vector<BoxedAnswer> last_boxed_group(std::string_view text) {
  std::vector<BoxedAnswer> group;
  const std::optional<BoxedAnswer> last = last_boxed(text);
  if (!last) return group;
  group.push_back(*last);
  while (true) {
    const size_t limit = group.back().begin;
    const size_t at = last_name(text, limit);
    if (at == std::string_view::npos || limit - at > 4096) break;
    const std::optional<BoxedAnswer> box = box_at(text, at, limit);
    if (!box || !joins(text.substr(box->end, limit - box->end))) break;
    group.push_back(*box);
  }
  std::reverse(group.begin(), group.end());
  return group;
}

}  // namespace replayeval
