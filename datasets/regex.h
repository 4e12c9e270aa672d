// Regular expressions of tokenizer files (Oniguruma's dialect) through PCRE2 with Unicode
// properties.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace replayeval {

/// A compiled pattern; immutable, usable from several threads.
class Regex {
 public:
  /// Differences of the dialects are translated: \s, \S, \w, \W, \h, \H mean Unicode's White_Space,
  /// word characters (Alphabetic, M, Nd, Pc, and the superscripts and fractions of Latin-1) and
  /// hexadecimal digits; ^ and $ match at every line. Throws std::runtime_error for a pattern that
  /// PCRE2 refuses (with the offset) and for class intersections (&&) and nested classes, which it
  /// does not have.
  explicit Regex(const std::string& pattern);

  /// A pattern that matches the text itself.
  static Regex literal(std::string_view text);

  /// Calls match(begin, end) for the leftmost matches in turn, each searched from the end of the
  /// one before; an empty match directly behind another one is passed over. `text` is valid UTF-8,
  /// its ends are the ends of the subject. Stops early when match returns false. Throws
  /// std::runtime_error when PCRE2 gives up.
  void for_each_match(std::string_view text,
                      const std::function<bool(size_t, size_t)>& match) const;

 private:
  Regex(const std::string& pcre2_pattern, bool literal);
  void compile(const std::string& pcre2_pattern, bool literal);
  std::shared_ptr<const void> code_;
  std::string pattern_;
};

/// The PCRE2 form of an Oniguruma pattern: see Regex.
std::string translate_pattern(const std::string& pattern);

}  // namespace replayeval
