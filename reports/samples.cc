#include "reports/samples.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>

#include "base/hash.h"
#include "reports/files.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// One line of a file and the checks on its fields.
class Line {
 public:
  Line(const fs::path& file, size_t number, const std::string& text)
      : place_(file.string() + ":" + std::to_string(number)) {
    try {
      json_ = Json::parse(text);
    } catch (const Json::parse_error& error) {
      throw std::runtime_error(place_ +
                               ": expected a JSON object, got text that is none from byte " +
                               std::to_string(error.byte) + " on; each line is one answer");
    }
    if (!json_.is_object()) {
      throw std::runtime_error(place_ + ": expected a JSON object, got " + json_.type_name() +
                               "; each line is one answer");
    }
  }

  const Json& json() const { return json_; }
  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  [[noreturn]] void wrong(const std::string& field, const std::string& expected,
                          const Json& got) const {
    std::string text = got.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 60) + "...";
    throw std::runtime_error(place_ + ": " + field + ": expected " + expected + ", got " + text);
  }

  const Json& field(const char* key) const {
    if (has(key)) return json_[key];
    std::string keys;
    for (const auto& [name, value] : json_.items()) keys += (keys.empty() ? "" : ", ") + name;
    throw std::runtime_error(place_ + ": expected the field '" + key + "', got only " +
                             (keys.empty() ? "an empty object" : keys));
  }
  std::string text(const char* key) const {
    const Json& value = field(key);
    if (!value.is_string()) wrong(key, "a text", value);
    return value.get<std::string>();
  }
  int64_t whole(const char* key) const {
    const Json& value = field(key);
    if (!value.is_number_integer() || value.get<int64_t>() < 0)
      wrong(key, "a whole number from 0", value);
    return value.get<int64_t>();
  }
  std::vector<int32_t> ids(const char* key) const {
    const Json& value = field(key);
    std::vector<int32_t> out;
    for (const Json& id : value.is_array() ? value : Json::array({value})) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX)
        wrong(key, "a list of token ids", value);
      out.push_back(id.get<int32_t>());
    }
    return out;
  }

 private:
  std::string place_;
  Json json_;
};

/// A text or a number as an id, none for anything else.
std::optional<std::string> id_of(const Json& object, const char* key) {
  if (!object.is_object() || !object.contains(key)) return std::nullopt;
  const Json& value = object[key];
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_integer()) return std::to_string(value.get<int64_t>());
  return std::nullopt;
}

std::string finish_reason(const Line& line) {
  const std::string reason = line.text("finish_reason");
  if (reason == "stop" || reason == "eos" || reason == "eos_token" || reason == "end_turn" ||
      reason == "stop_sequence")
    return "stop";
  if (reason == "length" || reason == "max_tokens") return "length";
  line.wrong("finish_reason", "stop or length", line.json()["finish_reason"]);
}

/// What both layouts may state beside id and text.
void read_common(const Line& line, Sample* sample) {
  if (line.has("finish_reason")) sample->finish_reason = finish_reason(line);
  if (line.has("repeat")) sample->repeat = static_cast<int>(line.whole("repeat"));
  if (line.has("token_ids")) sample->token_ids = line.ids("token_ids");
  if (line.has("tokens")) {
    if (line.json()["tokens"].is_array()) {
      sample->token_ids = line.ids("tokens");
    } else {
      sample->tokens = line.whole("tokens");
    }
  }
  const auto ids = static_cast<int64_t>(sample->token_ids.size());
  if (ids == 0) return;
  if (sample->tokens >= 0 && sample->tokens != ids)
    line.wrong("token_ids", std::to_string(sample->tokens) + " ids as `tokens` says", Json(ids));
  sample->tokens = ids;
}

/// Answers of one line of logged samples; more than one when the request was repeated.
std::vector<Sample> read_logged(const Line& line) {
  Sample sample;
  const Json& doc = line.has("doc") ? line.json()["doc"] : Json();
  for (const char* key : {"id", "question_id", "unique_id", "Record ID"}) {
    if (std::optional<std::string> id = id_of(doc, key)) sample.ids.push_back(*id);
  }
  sample.row = line.whole("doc_id");
  if (line.has("prompt_hash")) sample.prompt_sha256 = line.text("prompt_hash");
  read_common(line, &sample);
  const Json& responses = line.field("resps");
  const Json* texts = &responses;
  if (texts->is_array() && texts->size() == 1 && (*texts)[0].is_array()) texts = &(*texts)[0];
  if (!texts->is_array() || texts->empty())
    line.wrong("resps", "a list with a list of generated texts", responses);
  std::vector<Sample> out;
  for (const Json& text : *texts) {
    if (!text.is_string()) {
      line.wrong("resps", "generated texts (log-likelihoods cannot be graded)", responses);
    }
    sample.text = text.get<std::string>();
    out.push_back(sample);
    ++sample.repeat;
  }
  return out;
}

Sample read_plain(const Line& line) {
  Sample sample;
  const Json& id = line.field("id");
  const std::optional<std::string> name = id_of(line.json(), "id");
  if (!name) line.wrong("id", "a text or a whole number", id);
  sample.ids.push_back(*name);
  sample.text = line.text("text");
  line.field("finish_reason");
  line.field("tokens");
  read_common(line, &sample);
  if (line.has("prompt_sha256")) {
    sample.prompt_sha256 = line.text("prompt_sha256");
  } else if (line.has("prompt")) {
    sample.prompt_sha256 = sha256_hex(line.text("prompt"));
  }
  return sample;
}

/// Characters of a name that no file system minds.
std::string file_part(const std::string& name) {
  std::string out;
  for (char c : name) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       c == '.' || c == '_' || c == '-' || c == '+' || c == '=';
    out += plain ? c : '-';
  }
  return out;
}

}  // namespace

std::vector<Sample> read_samples(const fs::path& path) {
  const std::optional<std::vector<std::byte>> bytes = read_file(path);
  if (!bytes) throw std::runtime_error(path.string() + ": no such file");
  const std::string text = as_text(*bytes);
  std::vector<Sample> samples;
  std::map<int64_t, std::string> filters;  // by doc_id, the one that is read
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string one = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (one.find_first_not_of(" \t\r") == std::string::npos) continue;
    const Line line(path, number, one);
    std::vector<Sample> read;
    if (line.has("resps")) {
      read = read_logged(line);
      if (line.has("filter")) {
        const auto [known, fresh] = filters.emplace(read[0].row, line.text("filter"));
        if (!fresh && known->second != line.text("filter")) continue;
      }
    } else {
      read.push_back(read_plain(line));
    }
    for (Sample& sample : read) {
      sample.line = number;
      samples.push_back(std::move(sample));
    }
  }
  if (samples.empty()) {
    throw std::runtime_error(path.string() +
                             ": expected one JSON object a line, got a file without an answer");
  }
  return samples;
}

std::vector<std::pair<fs::path, int64_t>> write_samples(
    const Report& report, const std::map<std::string, std::string>& prompts,
    const fs::path& folder) {
  std::vector<std::string> tasks;
  std::map<std::string, int64_t> seen;
  std::vector<int64_t> numbers;  // of an item inside its task
  for (const ItemInfo& item : report.items) {
    if (!seen.contains(item.task)) tasks.push_back(item.task);
    numbers.push_back(seen[item.task]++);
  }
  std::vector<std::pair<fs::path, int64_t>> files;
  std::set<std::string> names;
  for (const std::string& task : tasks) {
    for (const StateReport& state : report.states) {
      std::string text;
      int64_t lines = 0;
      for (const Answer& answer : state.answers) {
        const auto index = static_cast<size_t>(answer.item);
        const ItemInfo& item = report.items.at(index);
        if (item.task != task) continue;
        Json doc = {{"id", item.id}};
        if (!item.category.empty()) doc["category"] = item.category;
        if (item.level != 0) doc["level"] = item.level;
        if (!item.option_order.empty()) doc["option_order"] = item.option_order;
        const auto prompt = prompts.find(item.prompt_sha256);
        const Json argument = prompt == prompts.end() ? Json(nullptr) : Json(prompt->second);
        Json line = {
            {"doc_id", numbers[index]},
            {"doc", doc},
            {"target", item.gold},
            {"arguments", {{"gen_args_0", {{"arg_0", argument}}}}},
            {"resps", Json::array({Json::array({answer.text})})},
            {"filtered_resps",
             Json::array({answer.extracted.empty() ? "[invalid]" : answer.extracted})},
            {"filter", "none"},
            {"metrics", {"exact_match"}},
            {"doc_hash", sha256_hex(doc.dump(2, ' ', false, Json::error_handler_t::replace))},
            {"prompt_hash", item.prompt_sha256},
            {"target_hash", sha256_hex(item.gold)},
            {"exact_match", answer.correct ? 1.0 : 0.0},
            {"state", state.info.name},
            {"repeat", answer.repeat},
            {"rule", answer.rule},
            {"stage", answer.stage}};
        line["finish_reason"] =
            answer.finish_reason.empty() ? Json(nullptr) : Json(answer.finish_reason);
        line["tokens"] = answer.tokens < 0 ? Json(nullptr) : Json(answer.tokens);
        line["token_ids"] = answer.token_ids.empty() ? Json(nullptr) : Json(answer.token_ids);
        text += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
        ++lines;
      }
      if (lines == 0) continue;
      std::string name = "samples_" + file_part(task) + "_" + file_part(state.info.name);
      while (!names.insert(name).second) name += "_";
      files.emplace_back(folder / (name + ".jsonl"), lines);
      replace_file(files.back().first, as_byte_span(text));
    }
  }
  return files;
}

}  // namespace replayeval
