// Lenient reader of a checkpoint's config.json: infinity as {"__float__": "Infinity"} or bare,
// nulls as absent, unknown fields ignored, the text part of multimodal files merged in (models.md,
// JSON).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace replayeval {

/// A JSON object with typed getters. A field is named by its path, "rope_parameters.rope_theta";
/// null counts as absent. The getters without a fallback throw std::invalid_argument naming file,
/// field, expected and got when it is absent; all of them do when it has another type.
class Config {
 public:
  /// Reads `path`, a config.json or a folder that has one, and merges text_config (see
  /// merged_text_config). Throws std::runtime_error when it cannot be read, std::invalid_argument
  /// when it is not a JSON object.
  static Config load(const std::filesystem::path& path);

  /// Reads JSON text; `file` is the place that messages name. Nothing is merged.
  static Config parse(std::string_view text, std::string file);

  /// The fields of text_config over those outside, which stay where text_config says nothing. Where
  /// both have tie_word_embeddings and differ, neither is kept: the presence of lm_head.weight
  /// decides. Without text_config: a copy.
  Config merged_text_config() const;

  const std::string& file() const { return file_; }
  /// The bytes that were read.
  const std::string& source() const { return *source_; }

  bool has(std::string_view field) const;

  /// Whole numbers; 4.0 is accepted for 4.
  int64_t integer(std::string_view field) const;
  int64_t integer(std::string_view field, int64_t fallback) const;
  /// An integer of at least 1 that fits an int: a size or a count.
  int size(std::string_view field) const;
  int size(std::string_view field, int fallback) const;
  /// An integer of at least 0 that fits an int.
  int count(std::string_view field, int fallback) const;

  /// A number, infinity included.
  double number(std::string_view field) const;
  double number(std::string_view field, double fallback) const;
  /// A finite number, 0 or more.
  double epsilon(std::string_view field, double fallback) const;
  bool boolean(std::string_view field) const;
  bool boolean(std::string_view field, bool fallback) const;
  std::string text(std::string_view field) const;
  std::string text(std::string_view field, std::string_view fallback) const;

  std::vector<int64_t> integers(std::string_view field) const;
  std::vector<double> numbers(std::string_view field) const;
  std::vector<std::string> texts(std::string_view field) const;

  /// Names of the members of the object at `field` ("" is the root), in the order of their bytes;
  /// empty when absent.
  std::vector<std::string> members(std::string_view field) const;

  /// std::invalid_argument's message for a field whose value is contradictory: "FILE: FIELD:
  /// expected ..., got VALUE". The value is printed as JSON, or "nothing" when absent.
  [[noreturn]] void fail(std::string_view field, const std::string& expected) const;

 private:
  struct Value;
  Config(std::shared_ptr<const Value> root, std::shared_ptr<const std::string> source,
         std::string file);

  std::shared_ptr<const Value> root_;
  std::shared_ptr<const std::string> source_;
  std::string file_;
};

/// Rotary settings in either form: `rope_parameters` of files saved by transformers 5, or
/// `rope_theta`, `partial_rotary_factor`, `rope_scaling` at the top. Unscaled kinds only
/// ("default", and "mrope", which is the same for text): another kind throws std::invalid_argument
/// naming it.
struct RopeConfig {
  double theta = 10000.0;
  double partial_rotary_factor = 1.0;
};
RopeConfig rope_config(const Config& config, RopeConfig fallback);

}  // namespace replayeval
