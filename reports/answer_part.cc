#include "reports/answer_part.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace replayeval {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class T, class Row, class Get>
void write_column(Hdf5Writer& file, const std::string& path, std::span<const Row> rows, Get get) {
  std::vector<T> values;
  for (const Row& row : rows) values.push_back(static_cast<T>(get(row)));
  file.dataset<T>(path, {static_cast<int64_t>(values.size())}, values);
}

bool same_bits(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

/// Where two texts part, with what follows on both sides.
std::string text_difference(const std::string& name, const std::string& stored,
                            const std::string& computed) {
  const auto parting =
      std::mismatch(stored.begin(), stored.end(), computed.begin(), computed.end());
  const auto at = static_cast<size_t>(parting.first - stored.begin());
  return name + " differs at byte " + std::to_string(at) + ": is '" + computed.substr(at, 24) +
         "', stored '" + stored.substr(at, 24) + "'";
}

}  // namespace

std::string storable_text(std::string text) {
  for (size_t at = 0; (at = text.find('\0', at)) != std::string::npos; at += 3)
    text.replace(at, 1, "\xEF\xBF\xBD");
  return text;
}

void write_answer_columns(Hdf5Writer& file, const std::string& group,
                          std::span<const Answer> answers) {
  if (answers.empty()) return;
  write_column<std::string>(file, group + "/text", answers,
                            [](auto& a) { return storable_text(a.text); });
  write_column<int64_t>(file, group + "/tokens", answers, [](auto& a) { return a.tokens; });
  write_column<std::string>(file, group + "/finish_reason", answers,
                            [](auto& a) { return a.finish_reason; });
  write_column<std::string>(file, group + "/extracted", answers,
                            [](auto& a) { return storable_text(a.extracted); });
  write_column<std::string>(file, group + "/rule", answers, [](auto& a) { return a.rule; });
  write_column<int32_t>(file, group + "/stage", answers, [](auto& a) { return a.stage; });
  write_column<uint8_t>(file, group + "/correct", answers,
                        [](auto& a) { return a.correct ? 1 : 0; });
  write_column<double>(file, group + "/seconds", answers, [](auto& a) { return a.seconds; });
  // Ids and margins of all answers one after another.
  std::vector<int64_t> first = {0};
  std::vector<int32_t> ids;
  std::vector<float> margins;
  bool any_margin = false;
  for (const Answer& answer : answers) {
    ids.insert(ids.end(), answer.token_ids.begin(), answer.token_ids.end());
    margins.insert(margins.end(), answer.margins.begin(), answer.margins.end());
    any_margin = any_margin || !answer.margins.empty();
    margins.resize(ids.size(), kNaN);
    first.push_back(static_cast<int64_t>(ids.size()));
  }
  file.dataset<int64_t>(group + "/first_token", {static_cast<int64_t>(first.size())}, first);
  file.dataset<int32_t>(group + "/token_ids", {static_cast<int64_t>(ids.size())}, ids);
  if (any_margin)
    file.dataset<float>(group + "/margins", {static_cast<int64_t>(margins.size())}, margins);
}

std::vector<Answer> read_answer_columns(const Hdf5Reader& file, const std::string& group) {
  std::vector<Answer> answers;
  if (!file.has(group)) return answers;
  const auto text = file.dataset<std::string>(group + "/text");
  const auto tokens = file.dataset<int64_t>(group + "/tokens");
  const auto finish = file.dataset<std::string>(group + "/finish_reason");
  const auto extracted = file.dataset<std::string>(group + "/extracted");
  const auto rule = file.dataset<std::string>(group + "/rule");
  const auto stage = file.dataset<int32_t>(group + "/stage");
  const auto correct = file.dataset<uint8_t>(group + "/correct");
  const auto seconds = file.dataset<double>(group + "/seconds");
  std::vector<int64_t> first(text.size() + 1, 0);
  std::vector<int32_t> ids;
  std::vector<float> margins;
  if (file.has(group + "/first_token")) {
    first = file.dataset<int64_t>(group + "/first_token");
    ids = file.dataset<int32_t>(group + "/token_ids");
    if (file.has(group + "/margins")) margins = file.dataset<float>(group + "/margins");
  }
  const size_t count = text.size();
  if (tokens.size() != count || finish.size() != count || extracted.size() != count ||
      rule.size() != count || stage.size() != count || correct.size() != count ||
      seconds.size() != count || first.size() != count + 1 ||
      !std::is_sorted(first.begin(), first.end()) || first.front() != 0 ||
      first.back() != static_cast<int64_t>(ids.size()) ||
      (!margins.empty() && margins.size() != ids.size()))
    throw std::runtime_error(group + ": the columns of the answers have different lengths");
  for (size_t i = 0; i < count; ++i) {
    Answer answer;
    answer.text = text[i];
    answer.tokens = tokens[i];
    answer.finish_reason = finish[i];
    answer.extracted = extracted[i];
    answer.rule = rule[i];
    answer.stage = stage[i];
    answer.correct = correct[i] != 0;
    answer.seconds = seconds[i];
    answer.token_ids.assign(ids.begin() + first[i], ids.begin() + first[i + 1]);
    if (!margins.empty()) {
      answer.margins.assign(margins.begin() + first[i], margins.begin() + first[i + 1]);
      if (std::all_of(answer.margins.begin(), answer.margins.end(),
                      [](float m) { return std::isnan(m); }))
        answer.margins.clear();
    }
    answers.push_back(std::move(answer));
  }
  return answers;
}

void write_answer_rows(Hdf5Writer& file, std::span<const StoredAnswerKey> keys,
                       std::span<const Answer> answers) {
  write_column<std::string>(file, "/answers/state_sha256", keys,
                            [](auto& k) { return k.state_sha256; });
  write_column<std::string>(file, "/answers/task", keys, [](auto& k) { return k.task; });
  write_column<std::string>(file, "/answers/item", keys, [](auto& k) { return k.item; });
  write_column<int32_t>(file, "/answers/repeat", keys, [](auto& k) { return k.repeat; });
  write_answer_columns(file, "/answers", answers);
}

std::vector<StoredAnswerKey> read_answer_keys(const Hdf5Reader& file) {
  const auto state = file.dataset<std::string>("/answers/state_sha256");
  const auto task = file.dataset<std::string>("/answers/task");
  const auto item = file.dataset<std::string>("/answers/item");
  const auto repeat = file.dataset<int32_t>("/answers/repeat");
  std::vector<StoredAnswerKey> keys;
  for (size_t i = 0; i < state.size(); ++i)
    keys.push_back({state[i], task.at(i), item.at(i), repeat.at(i)});
  return keys;
}

std::string answer_difference(const Answer& stored, const Answer& computed) {
  auto number = [](const std::string& name, auto computed_value, auto stored_value) {
    return name + " is " + std::to_string(computed_value) + ", stored " +
           std::to_string(stored_value);
  };
  for (size_t i = 0; i < std::min(stored.token_ids.size(), computed.token_ids.size()); ++i) {
    if (stored.token_ids[i] != computed.token_ids[i])
      return number("token " + std::to_string(i), computed.token_ids[i], stored.token_ids[i]);
  }
  if (stored.token_ids.size() != computed.token_ids.size())
    return number("number of token ids", computed.token_ids.size(), stored.token_ids.size());
  if (stored.tokens != computed.tokens) return number("tokens", computed.tokens, stored.tokens);
  // Margins that are NaN throughout are not told from none.
  if (stored.margins.size() != computed.margins.size() && !stored.margins.empty())
    return number("number of margins", computed.margins.size(), stored.margins.size());
  for (size_t i = 0; i < computed.margins.size(); ++i) {
    const float old = stored.margins.empty() ? kNaN : stored.margins[i];
    if (!same_bits(old, computed.margins[i]))
      return number("margin of token " + std::to_string(i), computed.margins[i], old);
  }
  const std::string text = storable_text(computed.text);
  const std::string extracted = storable_text(computed.extracted);
  if (stored.text != text) return text_difference("text", stored.text, text);
  if (stored.finish_reason != computed.finish_reason)
    return text_difference("finish reason", stored.finish_reason, computed.finish_reason);
  if (stored.extracted != extracted)
    return text_difference("extracted", stored.extracted, extracted);
  if (stored.rule != computed.rule) return text_difference("rule", stored.rule, computed.rule);
  if (stored.stage != computed.stage) return number("stage", computed.stage, stored.stage);
  if (stored.correct != computed.correct)
    return number("correct", computed.correct ? 1 : 0, stored.correct ? 1 : 0);
  return {};
}

}  // namespace replayeval
