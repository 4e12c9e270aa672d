// Chat templates: the Jinja text that turns messages into a model's prompt, as
// tokenizer_config.json or chat_template.jinja beside it gives it.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "datasets/jinja.h"

namespace replayeval {

struct ChatMessage {
  std::string role;  // system, user, assistant
  std::string content;
};

class ChatTemplate {
 public:
  /// Compiles a template. `special_tokens` are its variables bos_token, eos_token, ... Throws
  /// std::invalid_argument naming line and construct for text that is no template or uses something
  /// that is not known.
  ChatTemplate(const std::string& text, const std::string& name,
               std::map<std::string, std::string> special_tokens = {});

  /// The prompt for these messages, with what opens the assistant's turn when
  /// `add_generation_prompt`. `variables` are further ones (enable_thinking: "false" is a Boolean,
  /// digits are a number, as in YAML). Throws std::invalid_argument with the template's line for
  /// what the template refuses (raise_exception) or cannot do.
  std::string render(std::span<const ChatMessage> messages, bool add_generation_prompt = true,
                     const std::map<std::string, std::string>& variables = {}) const;

  const std::string& name() const { return name_; }
  const std::string& sha256() const { return sha256_; }  // of the text

 private:
  JinjaTemplate template_;
  std::string name_;
  std::string sha256_;
  std::map<std::string, std::string> special_tokens_;
};

/// The template of a model: chat_template.jinja of the folder, else `chat_template` of its
/// tokenizer_config.json (a text, or a list of named ones of which "default" is taken), else
/// chat_template.json. Null when there is none. Throws std::runtime_error for files that cannot be
/// read, and as the constructor.
std::unique_ptr<ChatTemplate> load_chat_template(const std::filesystem::path& folder);

}  // namespace replayeval
