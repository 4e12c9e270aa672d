#include "datasets/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdint>
#include <stdexcept>

#include "datasets/utf8.h"

namespace replayeval {
namespace {

std::string pcre2_message(int error) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(error, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

template <class T>
using Handle = std::unique_ptr<T, void (*)(T*)>;

// Oniguruma's word characters; its Latin-1 table has the superscripts and fractions as well.
constexpr char kWord[] = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}";
constexpr char kHex[] = "0-9A-Fa-f";

}  // namespace

std::string translate_pattern(const std::string& pattern) {
  const auto unsupported = [&](const char* what, size_t offset) {
    return std::runtime_error("pattern '" + pattern + "': " + what + " at offset " +
                              std::to_string(offset) + " cannot be expressed in PCRE2");
  };
  std::string out;
  bool in_class = false;
  size_t class_begin = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char kind = pattern[++i];
      const auto put_class = [&](const char* members) {
        out += in_class ? members : std::string("[") + members + "]";
      };
      const auto put_negated = [&](const char* members) {
        if (in_class) throw unsupported("a negated set inside a class", i - 1);
        out += std::string("[^") + members + "]";
      };
      switch (kind) {
        case 's':
          out += "\\p{White_Space}";
          break;
        case 'S':
          out += "\\P{White_Space}";
          break;
        case 'w':
          put_class(kWord);
          break;
        case 'W':
          put_negated(kWord);
          break;
        case 'h':
          put_class(kHex);
          break;
        case 'H':
          put_negated(kHex);
          break;
        default:
          out += {c, kind};
      }
      continue;
    }
    if (in_class) {
      const bool first =
          i == class_begin + 1 || (i == class_begin + 2 && pattern[class_begin + 1] == '^');
      if (c == '[' && pattern.compare(i, 2, "[:") != 0) throw unsupported("a nested class", i);
      if (pattern.compare(i, 2, "&&") == 0) throw unsupported("a class intersection", i);
      if (c == '[') {  // [:name:]
        const size_t end = pattern.find(":]", i + 2);
        if (end == std::string::npos) throw unsupported("an open [: in a class", i);
        out += pattern.substr(i, end + 2 - i);
        i = end + 1;
        continue;
      }
      if (c == ']' && !first) in_class = false;
    } else if (c == '[') {
      in_class = true;
      class_begin = i;
    }
    out += c;
  }
  return out;
}

Regex::Regex(const std::string& pattern) : pattern_(pattern) {
  compile(translate_pattern(pattern), false);
}

Regex::Regex(const std::string& pcre2_pattern, bool literal) : pattern_(pcre2_pattern) {
  compile(pcre2_pattern, literal);
}

Regex Regex::literal(std::string_view text) { return Regex(std::string(text), true); }

void Regex::compile(const std::string& pcre2_pattern, bool literal) {
  const Handle<pcre2_compile_context> context(pcre2_compile_context_create(nullptr),
                                              pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  const uint32_t options =
      literal ? PCRE2_UTF | PCRE2_LITERAL : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre2_pattern.data()),
                                   pcre2_pattern.size(), options, &error, &offset, context.get());
  if (code == nullptr) {
    throw std::runtime_error("pattern '" + pattern_ + "': " + pcre2_message(error) + " at offset " +
                             std::to_string(offset));
  }
  code_ = std::shared_ptr<const void>(
      code, [](const void* p) { pcre2_code_free(static_cast<pcre2_code*>(const_cast<void*>(p))); });
  pcre2_jit_compile(
      code, PCRE2_JIT_COMPLETE);  // where there is no JIT, the interpreter gives the same matches
}

void Regex::for_each_match(std::string_view text,
                           const std::function<bool(size_t, size_t)>& match) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const Handle<pcre2_match_data> data(pcre2_match_data_create_from_pattern(code, nullptr),
                                      pcre2_match_data_free);
  const Handle<pcre2_match_context> context(pcre2_match_context_create(nullptr),
                                            pcre2_match_context_free);
  const Handle<pcre2_jit_stack> stack(pcre2_jit_stack_create(32 << 10, 64 << 20, nullptr),
                                      pcre2_jit_stack_free);
  if (stack) pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  // A run of ten million letters may be given back one by one: that is linear, but above the
  // default limit of steps.
  pcre2_set_match_limit(context.get(), UINT32_MAX);
  size_t start = 0;
  size_t last_end = SIZE_MAX;
  uint32_t without_jit = 0;
  while (start <= text.size()) {
    int found = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), start,
                            PCRE2_NO_UTF_CHECK | without_jit, data.get(), context.get());
    if (found == PCRE2_ERROR_NOMATCH) return;
    if (found == PCRE2_ERROR_JIT_STACKLIMIT && without_jit == 0) {
      without_jit = PCRE2_NO_JIT;
      continue;
    }
    if (found < 0) {
      throw std::runtime_error("pattern '" + pattern_ + "': matching at byte " +
                               std::to_string(start) + " failed: " + pcre2_message(found));
    }
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data.get());
    const size_t begin = bounds[0], end = bounds[1];
    if (begin != end || begin != last_end) {
      if (!match(begin, end)) return;
      last_end = end;
    }
    start = end;
    if (begin == end) {
      if (end == text.size()) return;
      next_code_point(text, &start);
    }
  }
}

}  // namespace replayeval
