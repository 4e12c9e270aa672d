// Chat templates as models keep them: where the text stands, special tokens, variables.
#include "datasets/chat_template.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

using test::TemporaryFolder;
using Json = nlohmann::json;

// ChatML with a thinking switch.
const std::string kTemplate =
    "{{ bos_token }}{% for message in messages %}\n"
    "<|im_start|>{{ message.role }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if tools is not none %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{% if add_generation_prompt %}\n"
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}\n"
    "{% endif %}\n";

const std::vector<ChatMessage> kMessages = {{"system", "Be brief."}, {"user", " 2+2?\n"}};

TEST_CASE("a model without a template") {
  TemporaryFolder folder;
  CHECK(load_chat_template(folder.path()) == nullptr);
  folder.write("tokenizer_config.json", R"({"bos_token": "<s>", "chat_template": null})");
  CHECK(load_chat_template(folder.path()) == nullptr);
}

TEST_CASE("tokenizer_config.json") {
  TemporaryFolder folder;
  folder.write("tokenizer_config.json", Json{{"bos_token", {{"content", "<s>"}, {"lstrip", false}}},
                                             {"eos_token", "</s>"},
                                             {"chat_template", kTemplate}}
                                            .dump());
  const auto chat = load_chat_template(folder.path());
  REQUIRE(chat != nullptr);
  CHECK(chat->sha256() == sha256_hex(kTemplate));
  const std::string turns =
      "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n";
  CHECK(chat->render(kMessages, false) == turns);
  CHECK(chat->render(kMessages) == turns + "<|im_start|>assistant\n");
  CHECK(chat->render(kMessages, true, {{"enable_thinking", "false"}}) ==
        turns + "<|im_start|>assistant\n<think></think>");
  CHECK_THROWS_WITH_AS(
      chat->render(kMessages, true, {{"tools", "3"}}),
      doctest::Contains("tokenizer_config.json: chat_template:5: the template refuses: no tools"),
      std::invalid_argument);

  folder.write("tokenizer_config.json",
               Json{{"chat_template",
                     {{{"name", "tool_use"}, {"template", "tools"}},
                      {{"name", "default"}, {"template", "plain {{ messages[0].content }}"}}}}}
                   .dump());
  CHECK(load_chat_template(folder.path())->render(kMessages) == "plain Be brief.");
  folder.write("tokenizer_config.json",
               Json{{"chat_template",
                     {{{"name", "a"}, {"template", "x"}}, {{"name", "b"}, {"template", "y"}}}}}
                   .dump());
  CHECK_THROWS_WITH_AS(load_chat_template(folder.path()),
                       doctest::Contains("none is called default; there are: a b"),
                       std::runtime_error);
  folder.write("tokenizer_config.json", R"({"chat_template": "a\n{% nonsense %}"})");
  CHECK_THROWS_WITH_AS(
      load_chat_template(folder.path()),
      doctest::Contains("tokenizer_config.json: chat_template:2: the statement {% nonsense %}"),
      std::invalid_argument);
  folder.write("tokenizer_config.json", "{");
  CHECK_THROWS_WITH_AS(load_chat_template(folder.path()), doctest::Contains("not JSON"),
                       std::runtime_error);
}

TEST_CASE("a file of its own comes first") {
  TemporaryFolder folder;
  folder.write("chat_template.json", R"({"chat_template": "of a processor"})");
  CHECK(load_chat_template(folder.path())->render(kMessages) == "of a processor");
  folder.write("tokenizer_config.json",
               R"({"bos_token": "<s>", "chat_template": "of the config"})");
  CHECK(load_chat_template(folder.path())->render(kMessages) == "of the config");
  folder.write("chat_template.jinja", "{{ bos_token }} of the file\n");
  const auto chat = load_chat_template(folder.path());
  CHECK(chat->render(kMessages) == "<s> of the file");
  CHECK(chat->name().ends_with("chat_template.jinja"));
}

}  // namespace
}  // namespace replayeval
