#include "reports/flips.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

namespace replayeval {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kBefore = 24, kAfter = 32;  // bytes of text shown around the place

bool continues(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

/// `text` from `first` for about `bytes` bytes, whole characters.
std::string piece(const std::string& text, size_t first, size_t bytes) {
  size_t end = std::min(text.size(), first + bytes);
  while (end < text.size() && continues(text[end])) ++end;
  return text.substr(first, end - first);
}

void add_texts(const std::string& baseline, const std::string& state, Flip* flip) {
  const auto parting = std::mismatch(baseline.begin(), baseline.end(), state.begin(), state.end());
  auto at = static_cast<size_t>(parting.first - baseline.begin());
  while (at > 0 && ((at < baseline.size() && continues(baseline[at])) ||
                    (at < state.size() && continues(state[at]))))
    --at;
  size_t begin = at > kBefore ? at - kBefore : 0;
  while (begin < at && continues(baseline[begin])) ++begin;
  flip->before = baseline.substr(begin, at - begin);
  flip->baseline_text = piece(baseline, at, kAfter);
  flip->state_text = piece(state, at, kAfter);
}

/// KL of `state` at the position whose distribution token `token` of the answer was drawn from, NaN
/// unless the run has measured it on these very tokens.
double kl_at(const Report& kl, const std::string& document, const StateInfo& state,
             const Answer& baseline, int64_t token) {
  const int index = kl.find_state(state.name);
  if (index < 0 || kl.states[static_cast<size_t>(index)].info.sha256 != state.sha256) return kNaN;
  for (size_t d = 0; d < kl.documents.size(); ++d) {
    if (kl.documents[d].id != document) continue;
    const int64_t prompt = kl.documents[d].prompt_tokens, position = prompt + token - 1;
    const StateDocument& values = kl.states[static_cast<size_t>(index)].documents[d];
    if (position < values.first_position || position >= values.length) return kNaN;
    const std::vector<int32_t>& ids = kl.token_ids[d];
    for (int64_t t = 0; t < token; ++t) {
      if (ids.at(static_cast<size_t>(prompt + t)) != baseline.token_ids[static_cast<size_t>(t)])
        return kNaN;
    }
    return static_cast<double>(values.kl[static_cast<size_t>(position)]);
  }
  return kNaN;
}

/// A text in one line of a table.
std::string one_line(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out;
}

std::string id_text(int32_t id) { return id < 0 ? "-" : std::to_string(id); }

const ItemInfo& item_of(const Report& report, const Flip& flip) {
  return report.items[static_cast<size_t>(flip.item)];
}

const Answer* answer_of(const Report& report, int state, const Flip& flip) {
  for (const Answer& answer : report.states[static_cast<size_t>(state)].answers) {
    if (answer.item == flip.item && answer.repeat == flip.repeat) return &answer;
  }
  return nullptr;
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string csv_number(double value) {
  if (!std::isfinite(value)) return "";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

Json optional(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

}  // namespace

std::vector<Flip> find_flips(const Report& report, const Report* kl) {
  std::vector<Flip> flips;
  const int baseline = report.baseline();
  if (baseline < 0) return flips;
  std::map<std::pair<int32_t, int32_t>, const Answer*> right;
  for (const Answer& answer : report.states[static_cast<size_t>(baseline)].answers) {
    if (answer.correct) right[{answer.item, answer.repeat}] = &answer;
  }
  for (size_t s = 0; s < report.states.size(); ++s) {
    if (static_cast<int>(s) == baseline) continue;
    for (const Answer& answer : report.states[s].answers) {
      const auto found = right.find({answer.item, answer.repeat});
      if (answer.correct || found == right.end()) continue;
      const Answer& reference = *found->second;
      Flip flip;
      flip.state = static_cast<int>(s);
      flip.item = answer.item;
      flip.repeat = answer.repeat;
      flip.margin = flip.kl = kNaN;
      const std::vector<int32_t>&a = reference.token_ids, &b = answer.token_ids;
      const auto parting = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
      if (!a.empty() && !b.empty() && (parting.first != a.end() || parting.second != b.end())) {
        const auto at = static_cast<size_t>(parting.first - a.begin());
        flip.token = static_cast<int64_t>(at);
        if (at < a.size()) flip.baseline_token = a[at];
        if (at < b.size()) flip.state_token = b[at];
        if (at < reference.margins.size()) flip.margin = static_cast<double>(reference.margins[at]);
        if (kl != nullptr) {
          const ItemInfo& item = report.items[static_cast<size_t>(answer.item)];
          flip.kl = kl_at(*kl, item.task + "/" + item.id + "/" + std::to_string(answer.repeat),
                          report.states[s].info, reference, flip.token);
        }
      }
      add_texts(reference.text, answer.text, &flip);
      flips.push_back(std::move(flip));
    }
  }
  std::stable_sort(flips.begin(), flips.end(), [](const Flip& a, const Flip& b) {
    return std::tie(a.state, a.item, a.repeat) < std::tie(b.state, b.item, b.repeat);
  });
  return flips;
}

Table flips_table(const Report& report, const std::vector<Flip>& flips, bool private_texts) {
  Table table;
  table.title = "Answers that " + report.run.baseline + " has right and a state has wrong";
  table.head = {"state",
                "item",
                "gold",
                "given",
                "token",
                report.run.baseline,
                "state's",
                "margin",
                "KL",
                "in common",
                "then " + report.run.baseline,
                "then the state"};
  table.left = {1, 2, 3, 9, 10, 11};
  bool hidden = false;
  for (const Flip& flip : flips) {
    const ItemInfo& item = item_of(report, flip);
    const bool open = private_texts || std::none_of(report.run.tasks.begin(),
                                                    report.run.tasks.end(), [&](const TaskInfo& t) {
                                                      return t.name == item.task && t.private_data;
                                                    });
    hidden = hidden || !open;
    auto text = [&](const std::string& value) { return open ? one_line(value) : "-"; };
    const Answer* given = answer_of(report, flip.state, flip);
    std::string extracted = given == nullptr ? "" : given->extracted;
    if (extracted.empty())
      extracted = given != nullptr && given->finish_reason == "length" ? "(cut off)" : "(none)";
    else
      extracted = text(extracted);
    table.rows.push_back(
        {report.states[static_cast<size_t>(flip.state)].info.name,
         item.task + "/" + item.id +
             (report.run.repeats > 1 ? "/" + std::to_string(flip.repeat) : ""),
         text(item.gold), extracted, flip.token < 0 ? "-" : std::to_string(flip.token),
         open ? id_text(flip.baseline_token) : "-", open ? id_text(flip.state_token) : "-",
         number(flip.margin), number(flip.kl), text(flip.before), text(flip.baseline_text),
         text(flip.state_text)});
  }
  table.notes.push_back(
      "token: index of the first generated token that differs, with its ids on both sides; margin: "
      "the baseline's largest minus second largest logit there, nats; KL of the state there, nats, "
      "where a kl run over the baseline's answers is among the runs.");
  if (hidden) table.notes.push_back("Texts and tokens of private tasks are left out.");
  return table;
}

std::string flips_csv(const Report& report, const std::vector<Flip>& flips) {
  std::string text =
      "state,task,item,repeat,gold,extracted,finish_reason,token,baseline_token,state_token,margin,"
      "kl,before,baseline_text,state_text\n";
  for (const Flip& flip : flips) {
    const ItemInfo& item = item_of(report, flip);
    const Answer* given = answer_of(report, flip.state, flip);
    auto id = [](int64_t value) { return value < 0 ? std::string() : std::to_string(value); };
    text += csv_field(report.states[static_cast<size_t>(flip.state)].info.name) + "," +
            csv_field(item.task) + "," + csv_field(item.id) + "," + std::to_string(flip.repeat) +
            "," + csv_field(item.gold) + "," + csv_field(given->extracted) + "," +
            csv_field(given->finish_reason) + "," + id(flip.token) + "," + id(flip.baseline_token) +
            "," + id(flip.state_token) + "," + csv_number(flip.margin) + "," + csv_number(flip.kl) +
            "," + csv_field(flip.before) + "," + csv_field(flip.baseline_text) + "," +
            csv_field(flip.state_text) + "\n";
  }
  return text;
}

std::string flips_json(const Report& report, const std::vector<Flip>& flips) {
  Json json = Json::array();
  for (const Flip& flip : flips) {
    const ItemInfo& item = item_of(report, flip);
    const Answer* given = answer_of(report, flip.state, flip);
    auto id = [](int64_t value) { return value < 0 ? Json(nullptr) : Json(value); };
    json.push_back({{"state", report.states[static_cast<size_t>(flip.state)].info.name},
                    {"task", item.task},
                    {"item", item.id},
                    {"repeat", flip.repeat},
                    {"gold", item.gold},
                    {"extracted", given->extracted},
                    {"finish_reason", given->finish_reason},
                    {"token", id(flip.token)},
                    {"baseline_token", id(flip.baseline_token)},
                    {"state_token", id(flip.state_token)},
                    {"margin", optional(flip.margin)},
                    {"kl", optional(flip.kl)},
                    {"before", flip.before},
                    {"baseline_text", flip.baseline_text},
                    {"state_text", flip.state_text}});
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace replayeval
