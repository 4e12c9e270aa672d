#include "models/config.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace replayeval {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 64;

/// Puts the object form {"__float__": "..."} where Infinity, -Infinity or NaN stands bare outside
/// of a string.
std::string without_bare_floats(std::string_view text) {
  static constexpr std::string_view kWords[] = {"-Infinity", "Infinity", "NaN"};
  std::string out;
  out.reserve(text.size());
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      out += c;
      if (c == '\\' && i + 1 < text.size()) {
        out += text[++i];
      } else if (c == '"') {
        in_string = false;
      }
      continue;
    }
    if (c == '"') {
      in_string = true;
      out += c;
      continue;
    }
    // Outside of strings JSON has no other word with these letters, so a longer word stays an
    // error.
    bool replaced = false;
    for (std::string_view word : kWords) {
      if (text.substr(i, word.size()) == word) {
        out += "{\"__float__\": \"" + std::string(word) + "\"}";
        i += word.size() - 1;
        replaced = true;
        break;
      }
    }
    if (!replaced) out += c;
  }
  return out;
}

/// Turns every {"__float__": "Infinity"} into the number. Depth is limited by the parser.
void resolve_floats(Json& value) {
  if (value.is_object() && value.size() == 1 && value.contains("__float__") &&
      value["__float__"].is_string()) {
    const std::string word = value["__float__"].get<std::string>();
    if (word == "Infinity" || word == "inf") {
      value = std::numeric_limits<double>::infinity();
    } else if (word == "-Infinity" || word == "-inf") {
      value = -std::numeric_limits<double>::infinity();
    } else if (word == "NaN" || word == "nan") {
      value = std::numeric_limits<double>::quiet_NaN();
    }
    return;
  }
  if (value.is_structured()) {
    for (Json& member : value) resolve_floats(member);
  }
}

/// JSON text for messages: short, and with infinity spelled out (dump() prints null for it).
std::string printed(const Json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double x = value.get<double>();
    return std::isnan(x) ? "NaN" : x > 0 ? "Infinity" : "-Infinity";
  }
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

/// A whole number held in the value, or nothing.
std::optional<int64_t> whole(const Json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t x = value.get<uint64_t>();
    if (x > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(x);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const double x = value.get<double>();
    if (std::abs(x) <= 9007199254740992.0 && x == std::floor(x)) return static_cast<int64_t>(x);
  }
  return std::nullopt;
}

/// The member at a dotted path; null when absent or null.
const Json* find(const Json& root, std::string_view field) {
  const Json* value = &root;
  while (!field.empty()) {
    const size_t dot = field.find('.');
    const std::string name(field.substr(0, dot));
    if (!value->is_object()) return nullptr;
    const auto member = value->find(name);
    if (member == value->end()) return nullptr;
    value = &*member;
    field = dot == std::string_view::npos ? std::string_view{} : field.substr(dot + 1);
  }
  return value->is_null() ? nullptr : value;
}

}  // namespace

struct Config::Value {
  Json json;
};

Config::Config(std::shared_ptr<const Value> root, std::shared_ptr<const std::string> source,
               std::string file)
    : root_(std::move(root)), source_(std::move(source)), file_(std::move(file)) {}

Config Config::load(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::path file =
      std::filesystem::is_directory(path, error) ? path / "config.json" : path;
  if (!std::filesystem::is_regular_file(file, error)) {
    throw std::runtime_error(
        file.string() +
        ": expected a checkpoint's config.json, got nothing; a model is a folder "
        "with config.json and model.safetensors");
  }
  std::ifstream stream(file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  if (!stream.good() && !stream.eof()) throw std::runtime_error(file.string() + ": cannot be read");
  return parse(text, file.string()).merged_text_config();
}

Config Config::parse(std::string_view text, std::string file) {
  // The depth limit keeps the walk below, and everything else that recurses, within the stack.
  const Json::parser_callback_t limit = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) {
      throw std::invalid_argument(file + ": nested deeper than " + std::to_string(kMaxDepth) +
                                  " levels");
    }
    return true;
  };
  auto value = std::make_shared<Value>();
  try {
    value->json = Json::parse(without_bare_floats(text), limit);
  } catch (const Json::exception& e) {
    throw std::invalid_argument(file + ": expected JSON, got " + e.what());
  }
  if (!value->json.is_object()) {
    throw std::invalid_argument(file + ": expected a JSON object, got " + printed(value->json));
  }
  resolve_floats(value->json);
  if (!value->json.is_object()) {
    throw std::invalid_argument(file + ": expected a JSON object, got " + printed(value->json));
  }
  return Config(std::move(value), std::make_shared<const std::string>(text), std::move(file));
}

Config Config::merged_text_config() const {
  const Json* inner = find(root_->json, "text_config");
  if (inner == nullptr) return *this;
  if (!inner->is_object()) fail("text_config", "an object");
  auto merged = std::make_shared<Value>(*root_);
  merged->json.erase("text_config");
  for (const auto& [name, member] : inner->items()) {
    if (!member.is_null() || !merged->json.contains(name)) merged->json[name] = member;
  }
  const Json* outer_tie = find(root_->json, "tie_word_embeddings");
  const Json* inner_tie = find(*inner, "tie_word_embeddings");
  if (outer_tie != nullptr && inner_tie != nullptr && *outer_tie != *inner_tie) {
    merged->json.erase("tie_word_embeddings");
  }
  return Config(std::move(merged), source_, file_);
}

bool Config::has(std::string_view field) const { return find(root_->json, field) != nullptr; }

void Config::fail(std::string_view field, const std::string& expected) const {
  const Json* value = find(root_->json, field);
  throw std::invalid_argument(file_ + ": " + std::string(field) + ": expected " + expected +
                              ", got " + (value == nullptr ? "nothing" : printed(*value)));
}

int64_t Config::integer(std::string_view field) const {
  const Json* value = find(root_->json, field);
  if (value == nullptr) fail(field, "an integer");
  const std::optional<int64_t> x = whole(*value);
  if (!x) fail(field, "an integer");
  return *x;
}

int64_t Config::integer(std::string_view field, int64_t fallback) const {
  return has(field) ? integer(field) : fallback;
}

int Config::size(std::string_view field) const {
  const Json* value = find(root_->json, field);
  const std::optional<int64_t> x = value == nullptr ? std::nullopt : whole(*value);
  if (!x || *x < 1 || *x > std::numeric_limits<int>::max()) fail(field, "an integer of at least 1");
  return static_cast<int>(*x);
}

int Config::size(std::string_view field, int fallback) const {
  return has(field) ? size(field) : fallback;
}

int Config::count(std::string_view field, int fallback) const {
  if (!has(field)) return fallback;
  const std::optional<int64_t> x = whole(*find(root_->json, field));
  if (!x || *x < 0 || *x > std::numeric_limits<int>::max()) fail(field, "an integer of at least 0");
  return static_cast<int>(*x);
}

double Config::number(std::string_view field) const {
  const Json* value = find(root_->json, field);
  if (value == nullptr || !value->is_number()) fail(field, "a number");
  return value->get<double>();
}

double Config::number(std::string_view field, double fallback) const {
  return has(field) ? number(field) : fallback;
}

double Config::epsilon(std::string_view field, double fallback) const {
  const double value = number(field, fallback);
  if (!(value >= 0) || !std::isfinite(value)) fail(field, "a number, 0 or more");
  return value;
}

bool Config::boolean(std::string_view field) const {
  const Json* value = find(root_->json, field);
  if (value == nullptr || !value->is_boolean()) fail(field, "true or false");
  return value->get<bool>();
}

bool Config::boolean(std::string_view field, bool fallback) const {
  return has(field) ? boolean(field) : fallback;
}

std::string Config::text(std::string_view field) const {
  const Json* value = find(root_->json, field);
  if (value == nullptr || !value->is_string()) fail(field, "a string");
  return value->get<std::string>();
}

std::string Config::text(std::string_view field, std::string_view fallback) const {
  return has(field) ? text(field) : std::string(fallback);
}

std::vector<int64_t> Config::integers(std::string_view field) const {
  const Json* value = find(root_->json, field);
  if (value == nullptr || !value->is_array()) fail(field, "a list of integers");
  std::vector<int64_t> out;
  for (const Json& element : *value) {
    const std::optional<int64_t> x = whole(element);
    if (!x) fail(field, "a list of integers");
    out.push_back(*x);
  }
  return out;
}

std::vector<double> Config::numbers(std::string_view field) const {
  const Json* value = find(root_->json, field);
  if (value == nullptr || !value->is_array()) fail(field, "a list of numbers");
  std::vector<double> out;
  for (const Json& element : *value) {
    if (!element.is_number()) fail(field, "a list of numbers");
    out.push_back(element.get<double>());
  }
  return out;
}

std::vector<std::string> Config::texts(std::string_view field) const {
  const Json* value = find(root_->json, field);
  if (value == nullptr || !value->is_array()) fail(field, "a list of strings");
  std::vector<std::string> out;
  for (const Json& element : *value) {
    if (!element.is_string()) fail(field, "a list of strings");
    out.push_back(element.get<std::string>());
  }
  return out;
}

std::vector<std::string> Config::members(std::string_view field) const {
  const Json* value = find(root_->json, field);
  std::vector<std::string> names;
  if (value == nullptr) return names;
  if (!value->is_object()) fail(field, "an object");
  for (const auto& [name, member] : value->items()) names.push_back(name);
  return names;
}

RopeConfig rope_config(const Config& config, RopeConfig fallback) {
  for (const char* field : {"rope_parameters", "rope_scaling"}) {
    if (config.has(field)) config.members(field);  // an object, or refused
  }
  RopeConfig rope;
  rope.theta = config.number("rope_theta", fallback.theta);
  rope.theta = config.number("rope_parameters.rope_theta", rope.theta);
  rope.partial_rotary_factor =
      config.number("partial_rotary_factor", fallback.partial_rotary_factor);
  rope.partial_rotary_factor =
      config.number("rope_parameters.partial_rotary_factor", rope.partial_rotary_factor);
  for (const char* field : {"rope_parameters.rope_type", "rope_parameters.type",
                            "rope_scaling.rope_type", "rope_scaling.type"}) {
    const std::string type = config.text(field, "default");
    if (type != "default" && type != "mrope") {
      config.fail(field, "\"default\" (scaled rotary positions are not supported)");
    }
  }
  if (!(rope.theta > 0) || !std::isfinite(rope.theta)) {
    config.fail(
        config.has("rope_parameters.rope_theta") ? "rope_parameters.rope_theta" : "rope_theta",
        "a positive number");
  }
  if (!(rope.partial_rotary_factor > 0 && rope.partial_rotary_factor <= 1)) {
    config.fail(config.has("rope_parameters.partial_rotary_factor")
                    ? "rope_parameters.partial_rotary_factor"
                    : "partial_rotary_factor",
                "a number above 0, at most 1");
  }
  return rope;
}

}  // namespace replayeval
