#include "datasets/chat_template.h"

#include <charconv>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/hash.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// A scalar as YAML reads it.
JinjaValue scalar(const std::string& text) {
  if (text == "true") return true;
  if (text == "false") return false;
  if (text == "null" || text == "~") return JinjaValue::None{};
  const char* const end = text.data() + text.size();
  int64_t integer = 0;
  if (!text.empty() && std::from_chars(text.data(), end, integer).ptr == end) return integer;
  double real = 0;
  if (!text.empty() && std::from_chars(text.data(), end, real).ptr == end) return real;
  return text;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Json read_json(const fs::path& path) {
  try {
    return Json::parse(read_file(path));
  } catch (const Json::parse_error& error) {
    throw std::runtime_error(path.string() + ": not JSON: " + error.what());
  }
}

// The text of the key `chat_template`: a text, or the "default" one (else the only one) of a list
// of {name, template}. Empty: there is none.
std::string template_text(const Json& config, const fs::path& path) {
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return "";
  if (found->is_string()) return found->get<std::string>();
  if (!found->is_array())
    throw std::runtime_error(path.string() + ": chat_template: expected a text or a list, got " +
                             found->type_name());
  std::string names;
  for (const Json& entry : *found) {
    const std::string name = entry.value("name", "");
    if (name == "default" || found->size() == 1) return entry.value("template", "");
    names += " " + name;
  }
  throw std::runtime_error(path.string() +
                           ": chat_template: none is called default; there are:" + names);
}

// bos_token, eos_token, ... of a tokenizer_config.json: texts, or maps with `content`.
std::map<std::string, std::string> special_tokens_of(const Json& config) {
  std::map<std::string, std::string> tokens;
  for (const auto& [key, value] : config.items()) {
    if (!key.ends_with("_token")) continue;
    if (value.is_string()) tokens[key] = value.get<std::string>();
    if (value.is_object() && value.contains("content") && value["content"].is_string())
      tokens[key] = value["content"].get<std::string>();
  }
  return tokens;
}

}  // namespace

ChatTemplate::ChatTemplate(const std::string& text, const std::string& name,
                           std::map<std::string, std::string> special_tokens)
    : template_(text, name),
      name_(name),
      sha256_(sha256_hex(text)),
      special_tokens_(std::move(special_tokens)) {}

std::string ChatTemplate::render(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                 const std::map<std::string, std::string>& variables) const {
  JinjaValue::List list;
  for (const ChatMessage& message : messages) {
    list.emplace_back(JinjaValue::Map{{"role", message.role}, {"content", message.content}});
  }
  // Transformers defines tools and documents as none when there are none.
  JinjaValue::Map all{{"messages", std::move(list)},
                      {"tools", JinjaValue::None{}},
                      {"documents", JinjaValue::None{}},
                      {"add_generation_prompt", add_generation_prompt}};
  for (const auto& [token, text] : special_tokens_) all.emplace_back(token, text);
  for (const auto& [variable, value] : variables) all.emplace_back(variable, scalar(value));
  return template_.render(all);
}

std::unique_ptr<ChatTemplate> load_chat_template(const fs::path& folder) {
  std::map<std::string, std::string> tokens;
  std::string text;
  fs::path source;
  const fs::path config_path = folder / "tokenizer_config.json";
  if (fs::is_regular_file(config_path)) {
    const Json config = read_json(config_path);
    if (!config.is_object())
      throw std::runtime_error(config_path.string() + ": expected an object");
    tokens = special_tokens_of(config);
    text = template_text(config, config_path);
    source = config_path;
  }
  if (const fs::path file = folder / "chat_template.jinja"; fs::is_regular_file(file)) {
    text = read_file(file);
    source = file;
  } else if (const fs::path json = folder / "chat_template.json";
             text.empty() && fs::is_regular_file(json)) {
    text = template_text(read_json(json), json);
    source = json;
  }
  if (text.empty()) return nullptr;
  const std::string name =
      source.string() + (source.extension() == ".json" ? ": chat_template" : "");
  return std::make_unique<ChatTemplate>(text, name, std::move(tokens));
}

}  // namespace replayeval
