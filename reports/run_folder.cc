#include "reports/run_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "base/hash.h"
#include "reports/answer_part.h"
#include "reports/files.h"
#include "reports/hdf5_image.h"
#include "reports/schema.h"
#include "reports/shortfall.h"

namespace replayeval {
namespace fs = std::filesystem;
using Json = nlohmann::json;
namespace {

constexpr const char* kPartSchema = "replayeval/1 part";
constexpr double kHeartbeatSeconds = 5;
// Far beyond any run, and small enough that no list of what is missing fills the memory.
constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr int64_t kMostHeads = int64_t{1} << 16;
constexpr int64_t kMostUnits = int64_t{1} << 24;  // and answers of each state

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- run.json ----

Json to_json(const RunPlan& plan) {
  const RunInfo& run = plan.run;
  Json json;
  json["schema"] = kSchema;
  json["run"] = {{"job", run.job},
                 {"experiment", run.experiment},
                 {"model", run.model},
                 {"model_sha256", run.model_sha256},
                 {"family", run.family},
                 {"tokenizer", run.tokenizer},
                 {"tokenizer_sha256", run.tokenizer_sha256},
                 {"data", run.data},
                 {"data_sha256", run.data_sha256},
                 {"revision", run.revision},
                 {"compiler", run.compiler},
                 {"versions", run.versions},
                 {"device", run.device},
                 {"compute", run.compute},
                 {"dense", run.dense},
                 {"baseline", run.baseline},
                 {"window", run.window},
                 {"seed", run.seed},
                 {"vocabulary", run.vocabulary},
                 {"prompt_tokens", run.prompt_tokens},
                 {"threads", run.threads},
                 {"repeats", run.repeats},
                 {"notes", run.notes},
                 {"created", run.created},
                 {"finished", run.finished}};
  json["unit_tokens"] = plan.unit_tokens;
  json["settings"] = Json::array();
  for (const Setting& s : plan.settings)
    json["settings"].push_back({{"key", s.key}, {"value", s.value}});
  json["tasks"] = Json::array();
  for (const TaskInfo& t : run.tasks) {
    json["tasks"].push_back({{"name", t.name},
                             {"version", t.version},
                             {"sha256", t.sha256},
                             {"definition", t.definition},
                             {"private", t.private_data},
                             {"chance_for_none", t.chance_for_none}});
  }
  json["items"] = Json::array();
  for (const ItemInfo& i : plan.items) {
    json["items"].push_back({{"id", i.id},
                             {"task", i.task},
                             {"category", i.category},
                             {"level", i.level},
                             {"gold", i.gold},
                             {"options", i.options},
                             {"option_order", i.option_order},
                             {"prompt_sha256", i.prompt_sha256},
                             {"grading", i.grading}});
  }
  json["documents"] = Json::array();
  for (const DocumentInfo& d : plan.documents) {
    json["documents"].push_back({{"id", d.id},
                                 {"title", d.title},
                                 {"tokens", d.tokens},
                                 {"sha256", d.sha256},
                                 {"stream", d.stream},
                                 {"prompt_tokens", d.prompt_tokens}});
  }
  json["layers"] = Json::array();
  for (const LayerInfo& l : plan.layers) {
    json["layers"].push_back({{"index", l.index}, {"kind", l.kind}, {"heads", l.heads}});
  }
  json["states"] = Json::array();
  for (const StateInfo& s : plan.states) {
    json["states"].push_back({{"name", s.name},
                              {"definition", s.definition},
                              {"sha256", s.sha256},
                              {"recurrence", s.recurrence},
                              {"read", s.read},
                              {"recurrence_rounding", s.recurrence_rounding},
                              {"read_rounding", s.read_rounding},
                              {"window", s.window},
                              {"seed", s.seed},
                              {"options", s.options},
                              {"bits_per_element", s.bits_per_element},
                              {"bytes_per_sequence", s.bytes_per_sequence}});
  }
  return json;
}

/// A whole number of an object, between `low` and `high`; `place` is the object's place.
template <class T>
T whole(const Json& object, const std::string& place, const char* key,
        int64_t low = std::numeric_limits<T>::min(), int64_t high = std::numeric_limits<T>::max()) {
  const Json& value = object.at(key);
  const bool small = value.is_number_integer() &&
                     (!value.is_number_unsigned() ||
                      value.get<uint64_t>() <= static_cast<uint64_t>(std::max<int64_t>(high, 0)));
  if (!small || value.get<int64_t>() < low || value.get<int64_t>() > high) {
    throw std::runtime_error(place + key + " is " + value.dump().substr(0, 80) +
                             ", expected a whole number from " + std::to_string(low) + " to " +
                             std::to_string(high));
  }
  return static_cast<T>(value.get<int64_t>());
}

/// "documents[2]."
std::string entry_place(const char* list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "].";
}

RunPlan plan_from_json(const Json& json) {
  RunPlan plan;
  const Json& r = json.at("run");
  RunInfo& run = plan.run;
  run.job = r.at("job");
  run.experiment = r.at("experiment");
  run.model = r.at("model");
  run.model_sha256 = r.at("model_sha256");
  run.family = r.at("family");
  run.tokenizer = r.at("tokenizer");
  run.tokenizer_sha256 = r.at("tokenizer_sha256");
  run.data = r.at("data");
  run.data_sha256 = r.at("data_sha256");
  run.revision = r.at("revision");
  run.compiler = r.at("compiler");
  run.versions = r.at("versions").get<std::map<std::string, std::string>>();
  run.device = r.at("device");
  run.compute = r.at("compute");
  run.dense = r.at("dense");
  run.baseline = r.at("baseline");
  run.window = whole<int>(r, "run.", "window", 0);
  run.seed = r.at("seed");
  run.vocabulary = whole<int64_t>(r, "run.", "vocabulary", 0);
  run.prompt_tokens = whole<int64_t>(r, "run.", "prompt_tokens", 0, kMostTokens);
  run.threads = whole<int>(r, "run.", "threads");
  run.created = r.at("created");
  run.finished = r.at("finished");
  plan.unit_tokens = whole<int64_t>(json, "", "unit_tokens", 1, kMostTokens);
  for (const Json& s : json.at("settings")) plan.settings.push_back({s.at("key"), s.at("value")});
  for (const Json& d : json.at("documents")) {
    const std::string place = entry_place("documents", plan.documents.size());
    const bool prompt = d.contains("prompt_tokens");
    plan.documents.push_back(
        {d.at("id"), d.at("title"), whole<int64_t>(d, place, "tokens", 1, kMostTokens),
         d.at("sha256"), whole<uint32_t>(d, place, "stream"),
         prompt ? whole<int64_t>(d, place, "prompt_tokens", 0, kMostTokens) : 0});
  }
  // Folders written before there were answers have none of these.
  if (r.contains("notes")) run.notes = r.at("notes").get<std::vector<std::string>>();
  if (r.contains("repeats")) run.repeats = whole<int>(r, "run.", "repeats", 1);
  for (const Json& t : json.value("tasks", Json::array())) {
    const std::string place = entry_place("tasks", run.tasks.size());
    run.tasks.push_back({t.at("name"), whole<int>(t, place, "version"), t.at("sha256"),
                         t.at("definition"), t.at("private"), t.at("chance_for_none")});
  }
  for (const Json& i : json.value("items", Json::array())) {
    const std::string place = entry_place("items", plan.items.size());
    plan.items.push_back({i.at("id"), i.at("task"), i.at("category"), whole<int>(i, place, "level"),
                          i.at("gold"), whole<int>(i, place, "options", 0),
                          i.at("option_order").get<std::vector<int32_t>>(), i.at("prompt_sha256"),
                          i.at("grading")});
  }
  for (const Json& l : json.at("layers")) {
    const std::string place = entry_place("layers", plan.layers.size());
    plan.layers.push_back({whole<int>(l, place, "index", 0),
                           l.at("kind"),
                           whole<int>(l, place, "heads", 0, kMostHeads),
                           {}});
  }
  for (const Json& s : json.at("states")) {
    StateInfo state;
    state.name = s.at("name");
    state.definition = s.at("definition");
    state.sha256 = s.at("sha256");
    state.recurrence = s.at("recurrence");
    state.read = s.at("read");
    state.recurrence_rounding = s.at("recurrence_rounding");
    state.read_rounding = s.at("read_rounding");
    const std::string place = entry_place("states", plan.states.size());
    state.window = whole<int>(s, place, "window", 0);
    state.seed = s.at("seed");
    state.options = s.at("options").get<std::map<std::string, std::string>>();
    state.bits_per_element = s.at("bits_per_element");
    state.bytes_per_sequence = whole<int64_t>(s, place, "bytes_per_sequence", 0);
    plan.states.push_back(std::move(state));
  }
  return plan;
}

void check_plan(const RunPlan& plan, const std::string& place);

/// The text of run.json: its last key is the SHA-256 of the text without it.
std::string manifest_text(const RunPlan& plan) {
  Json json = to_json(plan);
  json["sha256"] = sha256_hex(json.dump(1));
  return json.dump(1) + "\n";
}

RunPlan read_manifest(const fs::path& folder) {
  const fs::path path = folder / kManifest;
  std::optional<std::vector<std::byte>> bytes = read_file(path);
  if (!bytes) throw std::runtime_error(folder.string() + ": holds no run (no " + kManifest + ")");
  Json json = Json::parse(as_text(*bytes), nullptr, false);
  std::string schema = json.is_object() && json.contains("schema") && json["schema"].is_string()
                           ? json["schema"].get<std::string>()
                           : "none";
  if (schema != kSchema)
    throw std::runtime_error(path.string() + ": schema is " + schema + ", expected " + kSchema);
  try {
    // Folders written before there was a checksum have none.
    if (json.contains("sha256")) {
      const std::string stated = json["sha256"];
      json.erase("sha256");
      if (sha256_hex(json.dump(1)) != stated)
        throw std::runtime_error("checksum differs: the file was changed or is damaged");
    }
    RunPlan plan = plan_from_json(json);
    check_plan(plan, "");
    return plan;
  } catch (const std::exception& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
}

/// The settings that must be equal between a folder and a request.
std::vector<Setting> fixed_settings(const RunPlan& plan) {
  std::vector<Setting> fields;
  for (const Setting& setting : plan.settings) {
    if (setting_rule(setting.key) == SettingRule::fixed) fields.push_back(setting);
  }
  return fields;
}

/// What else must be equal.
std::vector<Setting> fixed_run_fields(const RunPlan& plan) {
  std::vector<Setting> fields;
  const RunInfo& run = plan.run;
  fields.push_back({"job", run.job});
  fields.push_back({"model_sha256", run.model_sha256});
  fields.push_back({"tokenizer_sha256", run.tokenizer_sha256});
  fields.push_back({"device", run.device});
  fields.push_back({"compute", run.compute});
  fields.push_back({"dense", run.dense});
  fields.push_back({"baseline", run.baseline});
  fields.push_back({"window", std::to_string(run.window)});
  fields.push_back({"seed", std::to_string(run.seed)});
  fields.push_back({"vocabulary", std::to_string(run.vocabulary)});
  fields.push_back({"prompt_tokens", std::to_string(run.prompt_tokens)});
  fields.push_back({"unit_tokens", std::to_string(plan.unit_tokens)});
  std::string layers;
  for (const LayerInfo& layer : plan.layers) {
    layers +=
        std::to_string(layer.index) + ":" + layer.kind + ":" + std::to_string(layer.heads) + " ";
  }
  fields.push_back({"layers", layers});
  return fields;
}

std::string fingerprint(const RunPlan& plan) {
  std::string text;
  std::vector<Setting> fields = fixed_settings(plan);
  for (Setting& field : fixed_run_fields(plan)) fields.push_back(std::move(field));
  std::sort(fields.begin(), fields.end(), [](const Setting& a, const Setting& b) {
    return std::tie(a.key, a.value) < std::tie(b.key, b.value);
  });
  for (const Setting& field : fields) text += field.key + "=" + field.value + "\n";
  return sha256_hex(text);
}

[[noreturn]] void refuse(const fs::path& folder, const std::string& field,
                         const std::string& stored, const std::string& asked) {
  auto shown = [](const std::string& value) {
    if (value.empty()) return std::string("(nothing)");
    return value.size() > 200 ? value.substr(0, 200) + "..." : value;
  };
  throw std::invalid_argument(folder.string() +
                              ": cannot go on with the run in this folder: " + field +
                              " differs: the folder has " + shown(stored) + ", the request has " +
                              shown(asked) + "; use the same value or another --out");
}

void check_equal(const fs::path& folder, const std::vector<Setting>& stored,
                 const std::vector<Setting>& asked) {
  std::map<std::string, std::string> have, want;
  for (const Setting& s : stored) have[s.key] = s.value;
  for (const Setting& s : asked) want[s.key] = s.value;
  for (const auto& [key, value] : have) {
    if (want[key] != value) refuse(folder, key, value, want[key]);
  }
  for (const auto& [key, value] : want) {
    if (have[key] != value) refuse(folder, key, have[key], value);
  }
}

std::string item_key(const ItemInfo& item) { return item.task + "/" + item.id; }

/// Throws unless `asked` equals `stored` or is a growth of it.
void check_growth(const fs::path& folder, const RunPlan& stored, const RunPlan& asked) {
  check_equal(folder, fixed_settings(stored), fixed_settings(asked));
  check_equal(folder, fixed_run_fields(stored), fixed_run_fields(asked));
  for (const StateInfo& state : stored.states) {
    auto same_name = std::find_if(asked.states.begin(), asked.states.end(),
                                  [&](const StateInfo& other) { return other.name == state.name; });
    if (same_name == asked.states.end()) refuse(folder, "states", state.name, "no such state");
    if (same_name->sha256 != state.sha256) {
      refuse(folder, "states: definition of " + state.name, state.definition,
             same_name->definition);
    }
  }
  for (const DocumentInfo& document : stored.documents) {
    auto same = std::find_if(asked.documents.begin(), asked.documents.end(),
                             [&](const DocumentInfo& other) { return other.id == document.id; });
    if (same == asked.documents.end()) refuse(folder, "documents", document.id, "no such document");
    if (same->sha256 != document.sha256) {
      refuse(folder, "documents: sha256 of " + document.id, document.sha256, same->sha256);
    }
    if (same->tokens < document.tokens) {
      refuse(folder, "tokens of document " + document.id, std::to_string(document.tokens),
             std::to_string(same->tokens));
    }
    if (same->prompt_tokens != document.prompt_tokens) {
      refuse(folder, "prompt tokens of document " + document.id,
             std::to_string(document.prompt_tokens), std::to_string(same->prompt_tokens));
    }
  }
  for (const TaskInfo& task : stored.run.tasks) {
    auto same = std::find_if(asked.run.tasks.begin(), asked.run.tasks.end(),
                             [&](const TaskInfo& other) { return other.name == task.name; });
    if (same == asked.run.tasks.end()) refuse(folder, "tasks", task.name, "no such task");
    auto identity = [](const TaskInfo& t) {
      return "version " + std::to_string(t.version) + ", sha256 " + t.sha256.substr(0, 12);
    };
    if (same->version != task.version || same->sha256 != task.sha256)
      refuse(folder, "definition of task " + task.name, identity(task), identity(*same));
  }
  std::map<std::string, const ItemInfo*> items;
  for (const ItemInfo& item : asked.items) items[item_key(item)] = &item;
  for (const ItemInfo& item : stored.items) {
    const std::string key = item_key(item);
    auto found = items.find(key);
    if (found == items.end()) refuse(folder, "items", key, "no such item");
    const ItemInfo& same = *found->second;
    if (same.gold != item.gold) refuse(folder, "gold of item " + key, item.gold, same.gold);
    if (same.prompt_sha256 != item.prompt_sha256)
      refuse(folder, "prompt of item " + key, item.prompt_sha256, same.prompt_sha256);
    if (same.grading != item.grading)
      refuse(folder, "grading of item " + key, item.grading, same.grading);
    if (!(same == item)) refuse(folder, "item " + key, "other options or category", "these");
  }
  if (asked.run.repeats < stored.run.repeats)
    refuse(folder, "repeats", std::to_string(stored.run.repeats),
           std::to_string(asked.run.repeats));
}

void check_plan(const RunPlan& plan, const std::string& place) {
  auto bad = [&](const std::string& what) { throw std::invalid_argument(place + what); };
  if (plan.unit_tokens < 1)
    bad("unit_tokens is " + std::to_string(plan.unit_tokens) + ", expected 1 or more");
  std::set<std::string> seen;
  for (const StateInfo& state : plan.states) {
    if (!seen.insert(state.name).second) bad("state " + state.name + " is listed twice");
  }
  seen.clear();
  for (const StateInfo& state : plan.states) {
    if (!seen.insert(state.sha256).second)
      bad("state " + state.name + " has the definition of another one");
  }
  seen.clear();
  for (const DocumentInfo& document : plan.documents) {
    if (!seen.insert(document.id).second) bad("document " + document.id + " is listed twice");
    if (document.tokens < 1) bad("document " + document.id + " has no tokens");
    if (document.prompt_tokens < 0 || document.prompt_tokens >= document.tokens) {
      bad("document " + document.id + " has " + std::to_string(document.prompt_tokens) +
          " prompt tokens of " + std::to_string(document.tokens));
    }
  }
  int64_t units = 0;
  for (const DocumentInfo& document : plan.documents) {
    units += (document.tokens - 1) / plan.unit_tokens + 1;
    if (units > kMostUnits) {
      bad("documents: tokens of the documents up to " + document.id + " make " +
          std::to_string(units) + " units of unit_tokens = " + std::to_string(plan.unit_tokens) +
          ", expected at most " + std::to_string(kMostUnits));
    }
  }
  seen.clear();
  for (const ItemInfo& item : plan.items) {
    if (!seen.insert(item_key(item)).second) bad("item " + item_key(item) + " is listed twice");
  }
  if (plan.run.repeats < 1)
    bad("repeats is " + std::to_string(plan.run.repeats) + ", expected 1 or more");
  if (static_cast<int64_t>(plan.items.size()) * plan.run.repeats > kMostUnits) {
    bad("repeats is " + std::to_string(plan.run.repeats) + " for " +
        std::to_string(plan.items.size()) + " items, expected at most " +
        std::to_string(kMostUnits) + " answers of a state");
  }
}

// ---- parts ----

/// A name that is safe as a file's and still readable; distinct ids give distinct names.
std::string file_safe(const std::string& name) {
  std::string safe;
  for (char c : name.substr(0, 40)) {
    bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                 c == '.' || c == '_' || c == '-';
    safe += plain ? c : '_';
  }
  if (safe.empty() || safe.front() == '.') safe.insert(safe.begin(), '_');
  if (safe != name) safe += "-" + sha256_hex(name).substr(0, 8);
  return safe;
}

/// What a part says about itself.
struct PartHead {
  std::string document;
  int64_t first = 0;
  int64_t count = 0;
  int64_t document_tokens = 0;           // of the document when the part was written
  std::vector<std::string> states;       // sha256, in the order of /states/NN
  std::vector<StoredAnswerKey> answers;  // of a batch of answers, which has nothing of the above
};

std::string state_group(size_t index) {
  char name[32];
  std::snprintf(name, sizeof name, "/states/%02zu", index);
  return name;
}

int64_t head_count(const RunPlan& plan) {
  int64_t heads = 0;
  for (const LayerInfo& layer : plan.layers) heads = std::max<int64_t>(heads, layer.heads);
  return heads;
}

std::vector<std::byte> encode_part(const std::string& name, const RunPlan& plan, const KlSpan& span,
                                   const std::vector<const StateSpan*>& states) {
  const DocumentInfo& document = plan.documents[static_cast<size_t>(span.document)];
  const int64_t layers = static_cast<int64_t>(plan.layers.size());
  const int64_t heads = head_count(plan);
  Hdf5Writer file(name);
  file.attribute<std::string>("/", "schema", kPartSchema);
  checksum_placeholder(file);
  file.attribute<std::string>("/", "settings_sha256", fingerprint(plan));
  file.attribute<std::string>("/", "document", document.id);
  file.attribute<int64_t>("/", "first_position", span.first);
  file.attribute<int64_t>("/", "length", span.count());
  file.attribute<int64_t>("/", "document_tokens", document.tokens);
  file.attribute<double>("/", "seconds", span.seconds);
  file.dataset<int32_t>("/tokens", {span.count()}, span.tokens);
  if (!span.decay_sum.empty()) file.dataset<double>("/decay_sum", {layers, heads}, span.decay_sum);
  for (size_t i = 0; i < states.size(); ++i) {
    const StateSpan& state = *states[i];
    const StateInfo& info = plan.states[static_cast<size_t>(state.state)];
    const std::string group = state_group(i);
    file.group(group);
    file.attribute<std::string>(group, "name", info.name);
    file.attribute<std::string>(group, "sha256", info.sha256);
    file.dataset<float>(group + "/kl", {span.count()}, state.kl);
    file.dataset<float>(group + "/nll", {span.count()}, state.nll);
    file.dataset<uint8_t>(group + "/top1", {span.count()}, state.top1);
    file.dataset<LayerHealth>(group + "/health", {layers}, state.health);
    const int64_t samples = static_cast<int64_t>(state.error_positions.size());
    if (samples > 0) {
      file.dataset<int64_t>(group + "/state_error_position", {samples}, state.error_positions);
      file.dataset<float>(group + "/state_error", {samples, layers, heads}, state.error);
      if (!state.error_read.empty()) {
        file.dataset<float>(group + "/state_error_read", {samples, layers, heads},
                            state.error_read);
      }
    }
  }
  std::vector<std::byte> bytes = file.finish();
  seal_checksum(bytes);
  return bytes;
}

std::vector<std::byte> encode_part(const std::string& name, const RunPlan& plan, double seconds,
                                   std::span<const StoredAnswerKey> keys,
                                   std::span<const Answer> answers) {
  Hdf5Writer file(name);
  file.attribute<std::string>("/", "schema", kPartSchema);
  checksum_placeholder(file);
  file.attribute<std::string>("/", "settings_sha256", fingerprint(plan));
  file.attribute<double>("/", "seconds", seconds);
  write_answer_rows(file, keys, answers);
  std::vector<std::byte> bytes = file.finish();
  seal_checksum(bytes);
  return bytes;
}

PartHead read_head(const Hdf5Reader& file) {
  PartHead head;
  if (file.has("/answers")) {
    head.answers = read_answer_keys(file);
    return head;
  }
  head.document = file.attribute<std::string>("/", "document");
  head.first = file.attribute<int64_t>("/", "first_position");
  head.count = file.attribute<int64_t>("/", "length");
  head.document_tokens = file.attribute<int64_t>("/", "document_tokens");
  const size_t count = file.members("/states").size();
  for (size_t i = 0; i < count; ++i)
    head.states.push_back(file.attribute<std::string>(state_group(i), "sha256"));
  return head;
}

StateSpan read_state(const Hdf5Reader& file, size_t index) {
  const std::string group = state_group(index);
  StateSpan state;
  state.kl = file.dataset<float>(group + "/kl");
  state.nll = file.dataset<float>(group + "/nll");
  state.top1 = file.dataset<uint8_t>(group + "/top1");
  state.health = file.dataset<LayerHealth>(group + "/health");
  if (file.has(group + "/state_error_position")) {
    state.error_positions = file.dataset<int64_t>(group + "/state_error_position");
    state.error = file.dataset<float>(group + "/state_error");
    if (file.has(group + "/state_error_read"))
      state.error_read = file.dataset<float>(group + "/state_error_read");
  }
  return state;
}

bool same_bits(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

std::string exact(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  char text[64];
  std::snprintf(text, sizeof text, "%.9g (0x%08" PRIx32 ")", static_cast<double>(value), bits);
  return text;
}

/// Compares the figures of a state with the stored ones; `open_end` is the absolute position whose
/// nll is not comparable (the document ended there when it was stored), -1 for none. Empty when
/// equal, otherwise where and what.
std::string difference(const StateSpan& stored, const StateSpan& computed, int64_t first,
                       int64_t open_end) {
  const size_t count = stored.kl.size();
  auto at = [&](size_t i) {
    return " at position " + std::to_string(first + static_cast<int64_t>(i));
  };
  for (size_t i = 0; i < count; ++i) {
    if (!same_bits(stored.kl[i], computed.kl[i])) {
      return "kl" + at(i) + " is " + exact(computed.kl[i]) + ", stored " + exact(stored.kl[i]);
    }
    if (first + static_cast<int64_t>(i) != open_end && !same_bits(stored.nll[i], computed.nll[i])) {
      return "nll" + at(i) + " is " + exact(computed.nll[i]) + ", stored " + exact(stored.nll[i]);
    }
    if (stored.top1[i] != computed.top1[i]) {
      return "top1" + at(i) + " is " + std::to_string(computed.top1[i]) + ", stored " +
             std::to_string(stored.top1[i]);
    }
  }
  const bool whole = count == computed.kl.size();
  if (whole && stored.health != computed.health) {
    for (size_t i = 0; i < std::min(stored.health.size(), computed.health.size()); ++i) {
      if (!(stored.health[i] == computed.health[i]))
        return "health of layer number " + std::to_string(i);
    }
    return "health: number of layers";
  }
  // A shorter stored unit holds the first samples of the longer one.
  const size_t samples = stored.error_positions.size();
  auto prefix = [](const auto& a, const auto& b) { return a.size() <= b.size(); };
  if ((whole && samples != computed.error_positions.size()) ||
      !prefix(stored.error_positions, computed.error_positions) ||
      !prefix(stored.error, computed.error) || !prefix(stored.error_read, computed.error_read)) {
    return "number of state error samples is " + std::to_string(computed.error_positions.size()) +
           ", stored " + std::to_string(samples);
  }
  for (size_t i = 0; i < samples; ++i) {
    if (stored.error_positions[i] != computed.error_positions[i]) {
      return "position of state error sample " + std::to_string(i) + " is " +
             std::to_string(computed.error_positions[i]) + ", stored " +
             std::to_string(stored.error_positions[i]);
    }
  }
  for (size_t i = 0; i < stored.error.size(); ++i) {
    if (!same_bits(stored.error[i], computed.error[i])) {
      return "state_error value " + std::to_string(i) + " is " + exact(computed.error[i]) +
             ", stored " + exact(stored.error[i]);
    }
  }
  for (size_t i = 0; i < stored.error_read.size(); ++i) {
    if (!same_bits(stored.error_read[i], computed.error_read[i])) {
      return "state_error_read value " + std::to_string(i) + " is " +
             exact(computed.error_read[i]) + ", stored " + exact(stored.error_read[i]);
    }
  }
  return {};
}

/// Identity of a file's content as far as the file system tells.
struct FileStamp {
  ino_t inode = 0;
  off_t size = 0;
  int64_t changed_ns = 0;
  bool operator==(const FileStamp&) const = default;
};

std::optional<FileStamp> stamp_of(const fs::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return FileStamp{
      info.st_ino, info.st_size,
      int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + static_cast<int64_t>(info.st_mtim.tv_nsec)};
}

struct PartFile {
  FileStamp stamp;
  PartHead head;
  bool usable = false;
};

/// Where an answer is.
struct AnswerSource {
  std::string part;
  size_t row = 0;
};

/// Where the figures of one state of one unit are.
struct Source {
  std::string part;
  size_t index = 0;  // of /states/NN inside the part
  int64_t count = 0;
  int64_t document_tokens = 0;
};

}  // namespace

// ---- claims ----

struct Claim::State {
  std::string name;
  fs::path path;
  std::string token;
  int fd = -1;
  std::atomic<bool> held{true};
  std::mutex mutex;  // of fd

  ~State() { close(); }

  void close() {
    std::lock_guard lock(mutex);
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  /// Touches the file through the descriptor, so that a claim that someone else took over is never
  /// touched by its path.
  void beat() {
    std::lock_guard lock(mutex);
    if (fd < 0 || !held) return;
    ::futimens(fd, nullptr);
    struct stat ours {
    }, theirs{};
    if (::fstat(fd, &ours) != 0 || ::stat(path.c_str(), &theirs) != 0 ||
        ours.st_ino != theirs.st_ino)
      held = false;
  }
  void release() {
    beat();
    if (held.exchange(false)) ::unlink(path.c_str());
    close();
  }
};

Claim::Claim(std::shared_ptr<State> state) : state_(std::move(state)) {}
Claim::Claim(Claim&&) noexcept = default;
Claim& Claim::operator=(Claim&& other) noexcept {
  if (this != &other) {
    release();
    state_ = std::move(other.state_);
  }
  return *this;
}
Claim::~Claim() { release(); }
const std::string& Claim::name() const { return state_->name; }
bool Claim::held() const {
  if (state_ == nullptr) return false;
  state_->beat();
  return state_->held;
}
void Claim::release() {
  if (state_ != nullptr) state_->release();
}

// ---- the folder ----

struct RunFolder::State {
  fs::path path;
  RunPlan plan;
  std::string settings_sha256;
  bool writable = false;
  mutable std::mutex mutex;
  std::map<std::string, PartFile> parts;  // by file name
  std::map<std::pair<int, int64_t>, std::map<int, Source>>
      units;  // (document, first) -> state -> source
  std::map<AnswerKey, AnswerSource> answers;
  std::optional<FileStamp> scanned;  // of the folder of parts, when nothing in it was unknown
  std::vector<std::string> notes;
  std::map<std::string, int> document_index, state_index, item_index;

  std::vector<std::shared_ptr<Claim::State>> claims;
  std::thread heart;
  std::condition_variable wake;
  bool stopping = false;

  ~State() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    if (heart.joinable()) heart.join();
  }

  fs::path parts_folder() const { return path / "parts"; }

  void index_plan() {
    settings_sha256 = fingerprint(plan);
    document_index.clear();
    state_index.clear();
    for (size_t i = 0; i < plan.documents.size(); ++i)
      document_index[plan.documents[i].id] = static_cast<int>(i);
    for (size_t i = 0; i < plan.states.size(); ++i)
      state_index[plan.states[i].sha256] = static_cast<int>(i);
    item_index.clear();
    for (size_t i = 0; i < plan.items.size(); ++i)
      item_index[item_key(plan.items[i])] = static_cast<int>(i);
  }

  int64_t unit_count(int document, int64_t first) const {
    return std::min(plan.unit_tokens, plan.documents[static_cast<size_t>(document)].tokens - first);
  }

  /// A part's bytes if they are whole and belong to this run; otherwise the reason in `problem`.
  std::optional<std::vector<std::byte>> part_bytes(const std::string& name,
                                                   std::string* problem) const {
    const fs::path file = parts_folder() / name;
    std::optional<std::vector<std::byte>> bytes = read_file(file);
    if (!bytes) {
      *problem = "is gone";
      return std::nullopt;
    }
    *problem = check_checksum(*bytes);
    if (!problem->empty()) return std::nullopt;
    return bytes;
  }

  /// Drops or keeps a broken part: a folder opened for writing forgets it, so that what it
  /// held is computed again.
  void broken(const std::string& name, const std::string& problem) {
    std::string note = (parts_folder() / name).string() + ": " + problem;
    if (writable) {
      ::unlink((parts_folder() / name).c_str());
      note += "; removed, what it held is computed again";
    } else {
      note += "; left out";
    }
    notes.push_back(note);
  }

  void scan() {
    std::set<std::string> present;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(parts_folder(), error)) {
      std::string name = entry.path().filename().string();
      if (name.starts_with('.') || !name.ends_with(".h5")) continue;
      std::optional<FileStamp> stamp = stamp_of(entry.path());
      if (!stamp) continue;
      present.insert(name);
      auto known = parts.find(name);
      if (known != parts.end() && known->second.stamp == *stamp) continue;
      PartFile part{*stamp, {}, false};
      std::string problem;
      std::optional<std::vector<std::byte>> bytes = part_bytes(name, &problem);
      if (!bytes && problem == "is gone") continue;
      if (bytes) {
        try {
          Hdf5Reader file((parts_folder() / name).string(), *bytes);
          if (file.attribute<std::string>("/", "settings_sha256") != settings_sha256) {
            notes.push_back((parts_folder() / name).string() +
                            ": belongs to a run of other settings; left out");
          } else {
            part.head = read_head(file);
            part.usable = true;
          }
        } catch (const std::runtime_error& failure) {
          problem = failure.what();
        }
      }
      if (!problem.empty()) {
        broken(name, problem);
        if (writable) {
          present.erase(name);
          continue;
        }
      }
      parts[name] = std::move(part);
    }
    std::erase_if(parts, [&](const auto& item) { return !present.contains(item.first); });
    rebuild_units();
  }

  /// Answers of states, items and repeats that are not in the plan stay where they are.
  void index_answers(const std::string& name, const std::vector<StoredAnswerKey>& keys) {
    for (size_t row = 0; row < keys.size(); ++row) {
      const StoredAnswerKey& key = keys[row];
      auto state = state_index.find(key.state_sha256);
      auto item = item_index.find(key.task + "/" + key.item);
      if (state == state_index.end() || item == item_index.end() || key.repeat < 0 ||
          key.repeat >= plan.run.repeats)
        continue;
      answers.emplace(AnswerKey{state->second, item->second, key.repeat}, AnswerSource{name, row});
    }
  }

  void rebuild_units() {
    units.clear();
    answers.clear();
    for (const auto& [name, part] : parts) {
      if (!part.usable) continue;
      if (!part.head.answers.empty()) {
        index_answers(name, part.head.answers);
        continue;
      }
      auto document = document_index.find(part.head.document);
      if (document == document_index.end()) continue;
      for (size_t i = 0; i < part.head.states.size(); ++i) {
        auto state = state_index.find(part.head.states[i]);
        if (state == state_index.end()) continue;
        Source& source = units[{document->second, part.head.first}][state->second];
        // The longest one; of equally long ones, the one stored when the document was longest.
        if (std::pair(part.head.count, part.head.document_tokens) >
            std::pair(source.count, source.document_tokens)) {
          source = {name, i, part.head.count, part.head.document_tokens};
        }
      }
    }
    if (!writable) return;
    std::set<std::string> used;
    for (const auto& [key, states] : units) {
      for (const auto& [state, source] : states) used.insert(source.part);
    }
    for (auto it = parts.begin(); it != parts.end();) {
      const bool known =
          it->second.usable && it->second.head.answers.empty() &&
          document_index.contains(it->second.head.document) &&
          std::all_of(it->second.head.states.begin(), it->second.head.states.end(),
                      [&](const std::string& sha) { return state_index.contains(sha); });
      if (known && !used.contains(it->first)) {
        ::unlink((parts_folder() / it->first).c_str());  // superseded by longer ones
        it = parts.erase(it);
      } else {
        ++it;
      }
    }
  }

  /// Whether the stored figures are all that the plan asks of this unit: as long as the unit, and
  /// not without the nll of what was the document's last position.
  bool complete(int document, int64_t first, const Source& source) const {
    const int64_t tokens = plan.documents[static_cast<size_t>(document)].tokens;
    const int64_t end = first + source.count;
    return source.count >= unit_count(document, first) &&
           (end < source.document_tokens || source.document_tokens >= tokens);
  }

  std::vector<Unit> list(bool stored) const {
    std::vector<Unit> out;
    for (size_t d = 0; d < plan.documents.size(); ++d) {
      const int document = static_cast<int>(d);
      for (int64_t first = 0; first < plan.documents[d].tokens; first += plan.unit_tokens) {
        Unit unit{document, first, unit_count(document, first), {}};
        auto found = units.find({document, first});
        for (size_t s = 0; s < plan.states.size(); ++s) {
          bool have = false;
          if (found != units.end()) {
            auto source = found->second.find(static_cast<int>(s));
            have = source != found->second.end() && complete(document, first, source->second);
          }
          if (have == stored) unit.states.push_back(static_cast<int>(s));
        }
        if (!unit.states.empty()) out.push_back(std::move(unit));
      }
    }
    return out;
  }

  /// The figures behind `sources`, opening each part once. Throws std::runtime_error when a part
  /// broke since it was indexed.
  KlSpan load(int document, int64_t first, const std::map<int, Source>& sources) const {
    KlSpan span;
    span.document = document;
    span.first = first;
    std::map<std::string, std::vector<std::pair<int, Source>>> by_part;
    for (const auto& [state, source] : sources) by_part[source.part].push_back({state, source});
    for (const auto& [name, wanted] : by_part) {
      std::string problem;
      std::optional<std::vector<std::byte>> bytes = part_bytes(name, &problem);
      if (!bytes)
        throw std::runtime_error((parts_folder() / name).string() + ": " + problem +
                                 "; run again with --resume");
      Hdf5Reader file((parts_folder() / name).string(), *bytes);
      std::vector<int32_t> tokens = file.dataset<int32_t>("/tokens");
      if (tokens.size() > span.tokens.size()) {
        span.tokens = std::move(tokens);
        span.seconds = file.attribute<double>("/", "seconds");
        span.decay_sum.clear();
        if (file.has("/decay_sum")) span.decay_sum = file.dataset<double>("/decay_sum");
      }
      for (const auto& [state, source] : wanted) {
        StateSpan one = read_state(file, source.index);
        one.state = state;
        span.states.push_back(std::move(one));
      }
    }
    std::sort(span.states.begin(), span.states.end(),
              [](const StateSpan& a, const StateSpan& b) { return a.state < b.state; });
    return span;
  }

  /// The stored answers of `keys`, opening each part once. Throws as load of spans.
  std::map<AnswerKey, Answer> load(const std::vector<AnswerKey>& keys) const {
    std::map<std::string, std::vector<AnswerKey>> by_part;
    for (const AnswerKey& key : keys) by_part[answers.at(key).part].push_back(key);
    std::map<AnswerKey, Answer> out;
    for (const auto& [name, wanted] : by_part) {
      std::string problem;
      std::optional<std::vector<std::byte>> bytes = part_bytes(name, &problem);
      if (!bytes)
        throw std::runtime_error((parts_folder() / name).string() + ": " + problem +
                                 "; run again with --resume");
      const Hdf5Reader file((parts_folder() / name).string(), *bytes);
      std::vector<Answer> stored = read_answer_columns(file, "/answers");
      for (const AnswerKey& key : wanted) {
        Answer& answer = stored.at(answers.at(key).row);
        answer.item = key.item;
        answer.repeat = key.repeat;
        out.emplace(key, std::move(answer));
      }
    }
    return out;
  }

  void check(const KlSpan& span) const;
  void check(const AnswerBatch& batch) const;
  std::string answer_name(const AnswerKey& key) const {
    return "state " + plan.states[static_cast<size_t>(key.state)].name + ", item " +
           item_key(plan.items[static_cast<size_t>(key.item)]) + ", repeat " +
           std::to_string(key.repeat);
  }
  Report report() const;
  void keep_claims_alive();
};

SettingRule setting_rule(std::string_view key) {
  static constexpr std::string_view kGrows[] = {"states",       "documents", "tokens",  "items",
                                                "repeats",      "seeds",     "formats", "sweep",
                                                "per_category", "ids",       "tasks"};
  static constexpr std::string_view kFree[] = {
      "threads",   "out", "progress",    "shard",           "resume", "include",    "path", "model",
      "tokenizer", "hub", "dump_states", "snapshot_tokens", "slots",  "on_bad_item"};
  const std::string_view head = key.substr(0, key.find('.'));
  const std::string_view tail = key.substr(key.rfind('.') + 1);
  for (std::string_view name : kGrows) {
    if (head == name || tail == name) return SettingRule::grows;
  }
  for (std::string_view name : kFree) {
    if (head == name || tail == name) return SettingRule::free;
  }
  return SettingRule::fixed;
}

std::string utc_now() {
  std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

bool RunFolder::holds_run(const fs::path& path) { return fs::exists(path / kManifest); }

RunFolder::RunFolder(std::shared_ptr<State> state) : state_(std::move(state)) {}
RunFolder::RunFolder(RunFolder&&) noexcept = default;
RunFolder& RunFolder::operator=(RunFolder&&) noexcept = default;
RunFolder::~RunFolder() = default;

RunFolder RunFolder::open(const fs::path& path, const RunPlan& asked, OpenMode mode) {
  check_plan(asked, "run plan: ");
  if (mode == OpenMode::fresh && holds_run(path)) {
    throw std::invalid_argument(
        path.string() +
        ": holds a run already; go on with it with --resume, or choose another --out");
  }
  make_writable_folder(path);
  for (const char* name : {"parts", "claims", "snapshots"}) {
    make_writable_folder(path / name);
    remove_stale_temporaries(path / name);
  }
  remove_stale_temporaries(path);

  auto state = std::make_shared<State>();
  state->path = path;
  state->plan = asked;
  state->writable = true;
  if (state->plan.run.created.empty()) state->plan.run.created = utc_now();
  const fs::path manifest = path / kManifest;
  std::string text = manifest_text(state->plan);
  if (!create_file(manifest, as_byte_span(text))) {
    if (mode == OpenMode::fresh) {
      throw std::invalid_argument(
          path.string() + ": another process has just begun a run here; choose another --out");
    }
    // Another process may grow the run at the same time: write the request, and see that it stayed.
    for (int attempt = 0;; ++attempt) {
      RunPlan stored = read_manifest(path);
      check_growth(path, stored, state->plan);
      state->plan.run.created = stored.run.created;
      text = manifest_text(state->plan);
      const bool grown = stored.states.size() != state->plan.states.size() ||
                         stored.documents.size() != state->plan.documents.size() ||
                         stored.items.size() != state->plan.items.size() ||
                         stored.run.repeats != state->plan.run.repeats ||
                         stored.run.tasks.size() != state->plan.run.tasks.size() ||
                         !std::equal(stored.documents.begin(), stored.documents.end(),
                                     state->plan.documents.begin(),
                                     [](const DocumentInfo& a, const DocumentInfo& b) {
                                       return a.id == b.id && a.tokens == b.tokens;
                                     });
      const bool changed = to_json(stored) != to_json(state->plan);
      if (!changed) break;
      if (attempt > 0 && !grown) break;
      if (attempt > 10)
        throw std::runtime_error(manifest.string() +
                                 ": several processes keep changing the run's plan");
      replace_file(manifest, as_byte_span(text));
    }
  }
  state->index_plan();
  state->scan();
  return RunFolder(std::move(state));
}

RunFolder RunFolder::open_read_only(const fs::path& path) {
  auto state = std::make_shared<State>();
  state->path = path;
  state->plan = read_manifest(path);
  state->index_plan();
  state->scan();
  return RunFolder(std::move(state));
}

const fs::path& RunFolder::path() const { return state_->path; }
const RunPlan& RunFolder::plan() const { return state_->plan; }

std::vector<std::string> RunFolder::notes() const {
  std::lock_guard lock(state_->mutex);
  return state_->notes;
}

void RunFolder::refresh() {
  std::lock_guard lock(state_->mutex);
  state_->scan();
}

std::vector<Unit> RunFolder::missing() const {
  std::lock_guard lock(state_->mutex);
  return state_->list(false);
}

std::vector<Unit> RunFolder::finished() const {
  std::lock_guard lock(state_->mutex);
  return state_->list(true);
}

int64_t RunFolder::finished_tokens(int document) const {
  std::lock_guard lock(state_->mutex);
  const int64_t tokens = state_->plan.documents.at(static_cast<size_t>(document)).tokens;
  int64_t first = 0;
  for (; first < tokens; first += state_->plan.unit_tokens) {
    auto found = state_->units.find({document, first});
    if (found == state_->units.end() || found->second.size() != state_->plan.states.size()) break;
    const bool whole = std::all_of(
        found->second.begin(), found->second.end(),
        [&](const auto& item) { return state_->complete(document, first, item.second); });
    if (!whole) break;
  }
  return std::min(first, tokens);
}

std::optional<KlSpan> RunFolder::get(int document, int64_t first) const {
  std::lock_guard lock(state_->mutex);
  auto found = state_->units.find({document, first});
  if (found == state_->units.end()) return std::nullopt;
  return state_->load(document, first, found->second);
}

void RunFolder::State::check(const KlSpan& span) const {
  auto bad = [&](const std::string& what) {
    throw std::invalid_argument("put: document " + std::to_string(span.document) + ", position " +
                                std::to_string(span.first) + ": " + what);
  };
  auto size = [&](const std::string& name, size_t got, int64_t expected) {
    if (static_cast<int64_t>(got) != expected) {
      bad(name + " has " + std::to_string(got) + " values, expected " + std::to_string(expected));
    }
  };
  if (span.document < 0 || span.document >= static_cast<int>(plan.documents.size()))
    bad("no such document");
  const DocumentInfo& document = plan.documents[static_cast<size_t>(span.document)];
  if (span.first < 0 || span.first >= document.tokens || span.first % plan.unit_tokens != 0) {
    bad("no unit begins there (unit_tokens " + std::to_string(plan.unit_tokens) + ")");
  }
  size("tokens", span.tokens.size(), unit_count(span.document, span.first));
  const int64_t layers = static_cast<int64_t>(plan.layers.size());
  const int64_t heads = head_count(plan);
  if (!span.decay_sum.empty()) size("decay_sum", span.decay_sum.size(), layers * heads);
  if (span.states.empty()) bad("no state");
  std::set<int> seen;
  for (const StateSpan& state : span.states) {
    if (state.state < 0 || state.state >= static_cast<int>(plan.states.size()) ||
        !seen.insert(state.state).second) {
      bad("state " + std::to_string(state.state) + " is not in the plan or is given twice");
    }
    const std::string name = plan.states[static_cast<size_t>(state.state)].name + ": ";
    size(name + "kl", state.kl.size(), span.count());
    size(name + "nll", state.nll.size(), span.count());
    size(name + "top1", state.top1.size(), span.count());
    size(name + "health", state.health.size(), layers);
    const int64_t block = static_cast<int64_t>(state.error_positions.size()) * layers * heads;
    size(name + "error", state.error.size(), block);
    if (!state.error_read.empty()) size(name + "error_read", state.error_read.size(), block);
  }
}

PutOutcome RunFolder::put(const KlSpan& span) {
  std::lock_guard lock(state_->mutex);
  State& s = *state_;
  if (!s.writable) throw std::logic_error("put: the run folder was opened read-only");
  s.check(span);
  s.scan();
  const DocumentInfo& document = s.plan.documents[static_cast<size_t>(span.document)];
  std::vector<const StateSpan*> fresh;
  std::map<int, Source> stored_sources;
  auto found = s.units.find({span.document, span.first});
  for (const StateSpan& state : span.states) {
    bool complete = false;
    if (found != s.units.end()) {
      auto source = found->second.find(state.state);
      if (source != found->second.end()) {
        stored_sources.insert(*source);
        complete = s.complete(span.document, span.first, source->second);
      }
    }
    if (!complete) fresh.push_back(&state);
  }
  if (!stored_sources.empty()) {
    const KlSpan stored = s.load(span.document, span.first, stored_sources);
    auto differs = [&](const std::string& what) {
      throw std::runtime_error(
          s.path.string() + ": document " + document.id + ", positions " +
          std::to_string(span.first) + " to " + std::to_string(span.first + span.count() - 1) +
          ": the stored span was computed again and differs: " + what +
          "; the program, the machine or its settings have changed: use another --out");
    };
    for (size_t i = 0; i < std::min(stored.tokens.size(), span.tokens.size()); ++i) {
      if (stored.tokens[i] != span.tokens[i]) {
        differs("token at position " + std::to_string(span.first + static_cast<int64_t>(i)) +
                " is " + std::to_string(span.tokens[i]) + ", stored " +
                std::to_string(stored.tokens[i]));
      }
    }
    for (const StateSpan& old : stored.states) {
      const StateSpan& now =
          *std::find_if(span.states.begin(), span.states.end(),
                        [&](const StateSpan& state) { return state.state == old.state; });
      const Source& source = stored_sources.at(old.state);
      const int64_t open_end =
          source.document_tokens < document.tokens ? source.document_tokens - 1 : -1;
      std::string what = difference(old, now, span.first, open_end);
      if (!what.empty())
        differs("state " + s.plan.states[static_cast<size_t>(old.state)].name + ": " + what);
    }
  }
  if (fresh.empty()) return PutOutcome::compared;

  std::string hashes;
  PartHead head{document.id, span.first, span.count(), document.tokens, {}, {}};
  for (const StateSpan* state : fresh) {
    head.states.push_back(s.plan.states[static_cast<size_t>(state->state)].sha256);
    hashes += head.states.back() + " ";
  }
  char tail[64];
  std::snprintf(tail, sizeof tail, "-%09" PRId64 "-%s.h5", span.first,
                sha256_hex(hashes).substr(0, 8).c_str());
  const std::string name = file_safe(document.id) + tail;
  const fs::path file = s.parts_folder() / name;
  replace_file(file, encode_part(file.string(), s.plan, span, fresh));
  if (std::optional<FileStamp> stamp = stamp_of(file))
    s.parts[name] = {*stamp, std::move(head), true};
  s.rebuild_units();
  return PutOutcome::written;
}

void RunFolder::State::check(const AnswerBatch& batch) const {
  auto bad = [](const std::string& what) { throw std::invalid_argument("put: answers: " + what); };
  if (batch.rows.empty()) bad("no answer");
  std::set<AnswerKey> seen;
  for (const AnswerBatch::Row& row : batch.rows) {
    const Answer& answer = row.answer;
    if (row.state < 0 || row.state >= static_cast<int>(plan.states.size()))
      bad("state " + std::to_string(row.state) + " is not in the plan");
    if (answer.item < 0 || answer.item >= static_cast<int>(plan.items.size()))
      bad("item " + std::to_string(answer.item) + " is not in the plan");
    const AnswerKey key{row.state, answer.item, answer.repeat};
    const std::string name = answer_name(key);
    if (answer.repeat < 0 || answer.repeat >= plan.run.repeats)
      bad(name + ": expected a repeat below " + std::to_string(plan.run.repeats));
    if (!seen.insert(key).second) bad(name + ": is given twice");
    const auto ids = static_cast<int64_t>(answer.token_ids.size());
    if (ids != 0 && ids != answer.tokens) {
      bad(name + ": has " + std::to_string(ids) + " token ids, expected " +
          std::to_string(answer.tokens));
    }
    if (!answer.margins.empty() && answer.margins.size() != answer.token_ids.size()) {
      bad(name + ": has " + std::to_string(answer.margins.size()) + " margins, expected " +
          std::to_string(ids));
    }
  }
}

PutOutcome RunFolder::put(const AnswerBatch& batch) {
  std::lock_guard lock(state_->mutex);
  State& s = *state_;
  if (!s.writable) throw std::logic_error("put: the run folder was opened read-only");
  s.check(batch);
  // A run puts many small batches: the parts are listed again only when another process added some.
  if (!s.scanned || s.scanned != stamp_of(s.parts_folder())) {
    s.scanned = stamp_of(s.parts_folder());
    s.scan();
  }
  std::vector<AnswerKey> known;
  std::vector<StoredAnswerKey> keys;
  std::vector<Answer> fresh;
  std::string names;
  for (const AnswerBatch::Row& row : batch.rows) {
    const AnswerKey key{row.state, row.answer.item, row.answer.repeat};
    if (s.answers.contains(key)) {
      known.push_back(key);
      continue;
    }
    const ItemInfo& item = s.plan.items[static_cast<size_t>(key.item)];
    keys.push_back(
        {s.plan.states[static_cast<size_t>(key.state)].sha256, item.task, item.id, key.repeat});
    names += keys.back().state_sha256 + " " + s.answer_name(key) + "\n";
    fresh.push_back(row.answer);
  }
  if (!known.empty()) {
    const std::map<AnswerKey, Answer> stored = s.load(known);
    for (const AnswerBatch::Row& row : batch.rows) {
      const AnswerKey key{row.state, row.answer.item, row.answer.repeat};
      auto old = stored.find(key);
      if (old == stored.end()) continue;
      const std::string what = answer_difference(old->second, row.answer);
      if (what.empty()) continue;
      throw std::runtime_error(s.path.string() + ": " + s.answer_name(key) +
                               ": the stored answer was computed again and differs: " + what +
                               "; the program, the machine or its settings have changed: use "
                               "another --out");
    }
  }
  if (fresh.empty()) return PutOutcome::compared;
  const std::string name = "answers-" + sha256_hex(names).substr(0, 16) + ".h5";
  const fs::path file = s.parts_folder() / name;
  const std::vector<std::byte> bytes =
      encode_part(file.string(), s.plan, batch.seconds, keys, fresh);
  const bool alone = s.scanned == stamp_of(s.parts_folder());
  replace_file(file, bytes);
  if (alone) s.scanned = stamp_of(s.parts_folder());
  if (std::optional<FileStamp> stamp = stamp_of(file)) {
    PartHead head;
    head.answers = std::move(keys);
    s.index_answers(name, head.answers);
    s.parts[name] = {*stamp, std::move(head), true};
  }
  return PutOutcome::written;
}

std::vector<AnswerKey> RunFolder::missing_answers() const {
  std::lock_guard lock(state_->mutex);
  const State& s = *state_;
  std::vector<AnswerKey> missing;
  for (int item = 0; item < static_cast<int>(s.plan.items.size()); ++item) {
    for (int repeat = 0; repeat < s.plan.run.repeats; ++repeat) {
      for (int state = 0; state < static_cast<int>(s.plan.states.size()); ++state) {
        const AnswerKey key{state, item, repeat};
        if (!s.answers.contains(key)) missing.push_back(key);
      }
    }
  }
  return missing;
}

// ---- claims of the folder ----

void RunFolder::State::keep_claims_alive() {
  std::unique_lock lock(mutex);
  while (!stopping) {
    wake.wait_for(lock, std::chrono::duration<double>(kHeartbeatSeconds), [&] { return stopping; });
    std::erase_if(claims, [](const auto& claim) { return !claim->held; });
    std::vector<std::shared_ptr<Claim::State>> current = claims;
    lock.unlock();
    for (const auto& claim : current) claim->beat();
    current.clear();
    lock.lock();
  }
}

namespace {

/// The file system's idea of now, so that clocks of several machines need not agree.
int64_t folder_clock_ns(const fs::path& folder) {
  const fs::path probe = temporary_name(folder / "clock");
  int fd = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return 0;
  ::futimens(fd, nullptr);
  ::close(fd);
  std::optional<FileStamp> stamp = stamp_of(probe);
  ::unlink(probe.c_str());
  return stamp ? stamp->changed_ns : 0;
}

/// Whether the process that wrote this claim is known to be gone.
bool owner_is_dead(const Json& content) {
  if (!content.is_object() || content.value("machine", "") != machine_name()) return false;
  const int pid = content.value("pid", 0);
  const auto start = content.value("start", 0ULL);
  const auto now = process_start(pid);
  return now == 0 || (start > 1 && now > 1 && start != now);
}

}  // namespace

std::optional<Claim> RunFolder::claim(const std::string& name, double stale_seconds) {
  static std::atomic<uint64_t> counter{0};
  State& s = *state_;
  const fs::path file = s.path / "claims" / (file_safe(name) + ".json");
  std::random_device device;
  const std::string token = machine_name() + "-" + std::to_string(::getpid()) + "-" +
                            std::to_string(counter++) + "-" + std::to_string(device());
  const Json content = {{"name", name},       {"machine", machine_name()},
                        {"pid", ::getpid()},  {"start", process_start(::getpid())},
                        {"since", utc_now()}, {"token", token}};
  const std::string text = content.dump() + "\n";
  if (!create_file(file, as_byte_span(text))) {
    std::optional<std::vector<std::byte>> bytes = read_file(file);
    std::optional<FileStamp> stamp = stamp_of(file);
    if (bytes && stamp) {
      const std::string seen = as_text(*bytes);
      const Json owner = Json::parse(seen, nullptr, false);
      const double age =
          static_cast<double>(folder_clock_ns(file.parent_path()) - stamp->changed_ns) * 1e-9;
      if (!owner_is_dead(owner) && age < stale_seconds) return std::nullopt;
      // Only one process can rename the stale claim away. Should a fresh claim have taken its place
      // meanwhile, it is put back.
      const fs::path grave = temporary_name(file);
      if (::rename(file.c_str(), grave.c_str()) == 0) {
        std::optional<std::vector<std::byte>> moved = read_file(grave);
        if (moved && as_text(*moved) != seen) {
          if (::link(grave.c_str(), file.c_str()) != 0) ::rename(grave.c_str(), file.c_str());
          ::unlink(grave.c_str());
          return std::nullopt;
        }
        ::unlink(grave.c_str());
        std::lock_guard lock(s.mutex);
        s.notes.push_back(file.string() + ": stale claim taken over");
      }
    }
    if (!create_file(file, as_byte_span(text))) return std::nullopt;
  }
  auto state = std::make_shared<Claim::State>();
  state->name = name;
  state->path = file;
  state->token = token;
  state->fd = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  std::optional<std::vector<std::byte>> now = read_file(file);
  if (state->fd < 0 || !now || as_text(*now) != text) return std::nullopt;
  std::lock_guard lock(s.mutex);
  s.claims.push_back(state);
  if (!s.heart.joinable()) s.heart = std::thread([&s] { s.keep_claims_alive(); });
  return Claim(std::move(state));
}

std::optional<std::string> RunFolder::claimed_by(const std::string& name) const {
  const fs::path file = state_->path / "claims" / (file_safe(name) + ".json");
  const std::optional<std::vector<std::byte>> bytes = read_file(file);
  const std::optional<FileStamp> stamp = stamp_of(file);
  if (!bytes || !stamp) return std::nullopt;
  const Json owner = Json::parse(as_text(*bytes), nullptr, false);
  std::string text = "an unknown process";
  if (owner.is_object() && owner.contains("pid") && owner["pid"].is_number_integer()) {
    text = "process " + std::to_string(owner["pid"].get<int64_t>());
    if (owner.contains("machine") && owner["machine"].is_string())
      text += " on " + owner["machine"].get<std::string>();
  }
  const double age =
      static_cast<double>(folder_clock_ns(file.parent_path()) - stamp->changed_ns) * 1e-9;
  return text + ", last heard of " + std::to_string(static_cast<int64_t>(std::max(age, 0.0))) +
         " s ago (" + file.string() + ")";
}

// ---- snapshots ----

namespace {

constexpr std::string_view kSnapshotMark = "replayeval snapshot 1 ";

fs::path snapshot_path(const fs::path& folder, const std::string& name) {
  return folder / "snapshots" / (file_safe(name) + ".bin");
}

/// Of the bytes and the name, so that a piece in the place of another is not taken for it.
std::string snapshot_checksum(const std::string& name, std::string_view bytes) {
  return sha256_hex(sha256_hex(bytes) + name);
}

}  // namespace

void RunFolder::put_snapshot(const std::string& name, std::span<const std::byte> bytes) {
  const std::string head =
      std::string(kSnapshotMark) +
      snapshot_checksum(name, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}) + "\n";
  std::vector<std::byte> all(head.size() + bytes.size());
  std::memcpy(all.data(), head.data(), head.size());
  if (!bytes.empty()) std::memcpy(all.data() + head.size(), bytes.data(), bytes.size());
  replace_file(snapshot_path(state_->path, name), all);
}

std::optional<std::vector<std::byte>> RunFolder::get_snapshot(const std::string& name) const {
  std::optional<std::vector<std::byte>> all = read_file(snapshot_path(state_->path, name));
  if (!all) return std::nullopt;
  const size_t head = kSnapshotMark.size() + 65;
  const std::string_view text(reinterpret_cast<const char*>(all->data()), all->size());
  if (text.size() < head || !text.starts_with(kSnapshotMark) || text[head - 1] != '\n' ||
      snapshot_checksum(name, text.substr(head)) != text.substr(kSnapshotMark.size(), 64)) {
    std::lock_guard lock(state_->mutex);
    state_->notes.push_back(snapshot_path(state_->path, name).string() +
                            ": checksum differs; not used");
    return std::nullopt;
  }
  all->erase(all->begin(), all->begin() + static_cast<std::ptrdiff_t>(head));
  return all;
}

bool RunFolder::has_snapshot(const std::string& name) const {
  return fs::exists(snapshot_path(state_->path, name));
}

void RunFolder::remove_snapshot(const std::string& name) {
  ::unlink(snapshot_path(state_->path, name).c_str());
}

// ---- the report ----

Report RunFolder::State::report() const {
  Report report;
  report.run = plan.run;
  report.path = path.string();
  report.documents = plan.documents;
  report.layers = plan.layers;
  report.items = plan.items;
  const size_t heads = static_cast<size_t>(head_count(plan));
  std::vector<double> decay_sum(plan.layers.size() * heads, 0);
  int64_t decay_positions = 0;
  for (const StateInfo& info : plan.states) {
    StateReport state{info, {}};
    state.documents.resize(plan.documents.size());
    for (size_t d = 0; d < plan.documents.size(); ++d) {
      StateDocument& document = state.documents[d];
      document.first_position = std::max(plan.run.prompt_tokens, plan.documents[d].prompt_tokens);
      document.health.resize(plan.layers.size());
    }
    report.states.push_back(std::move(state));
  }
  report.token_ids.resize(plan.documents.size());
  for (size_t d = 0; d < plan.documents.size(); ++d) {
    for (int64_t first = 0; first < plan.documents[d].tokens; first += plan.unit_tokens) {
      auto found = units.find({static_cast<int>(d), first});
      if (found == units.end()) continue;
      // Behind a gap nothing is reported: a state goes on only where it has reached this unit.
      std::map<int, Source> wanted;
      for (const auto& [index, source] : found->second) {
        if (report.states[static_cast<size_t>(index)].documents[d].length == first)
          wanted.insert({index, source});
      }
      if (wanted.empty()) continue;
      KlSpan span = load(static_cast<int>(d), first, wanted);
      std::vector<int32_t>& ids = report.token_ids[d];
      if (static_cast<int64_t>(ids.size()) < first + span.count()) {
        ids.resize(static_cast<size_t>(first));
        ids.insert(ids.end(), span.tokens.begin(), span.tokens.end());
      }
      if (!span.decay_sum.empty()) {
        for (size_t i = 0; i < decay_sum.size(); ++i) decay_sum[i] += span.decay_sum[i];
        decay_positions += span.count();
      }
      for (StateSpan& one : span.states) {
        StateDocument& out = report.states[static_cast<size_t>(one.state)].documents[d];
        // A unit from before the document grew: its last nll is not known yet, so the report ends
        // before it.
        const bool open = !complete(static_cast<int>(d), first, wanted.at(one.state));
        const auto count = static_cast<std::ptrdiff_t>(one.kl.size()) - (open ? 1 : 0);
        out.kl.insert(out.kl.end(), one.kl.begin(), one.kl.begin() + count);
        out.nll.insert(out.nll.end(), one.nll.begin(), one.nll.begin() + count);
        out.top1.insert(out.top1.end(), one.top1.begin(), one.top1.begin() + count);
        out.error_positions.insert(out.error_positions.end(), one.error_positions.begin(),
                                   one.error_positions.end());
        out.error.insert(out.error.end(), one.error.begin(), one.error.end());
        out.error_read.insert(out.error_read.end(), one.error_read.begin(), one.error_read.end());
        for (size_t l = 0; l < one.health.size(); ++l) out.health[l].merge(one.health[l]);
        out.length = static_cast<int64_t>(out.kl.size());
      }
    }
  }
  std::vector<AnswerKey> keys;
  for (const auto& [key, source] : answers) keys.push_back(key);
  for (auto& [key, answer] : load(keys))  // in order of state, item and repeat
    report.states[static_cast<size_t>(key.state)].answers.push_back(std::move(answer));
  if (decay_positions > 0) {
    for (size_t l = 0; l < report.layers.size(); ++l) {
      LayerInfo& layer = report.layers[l];
      layer.mean_decay.clear();
      for (size_t h = 0; h < static_cast<size_t>(layer.heads); ++h) {
        layer.mean_decay.push_back(
            static_cast<float>(decay_sum[l * heads + h] / static_cast<double>(decay_positions)));
      }
    }
  }
  return report;
}

Report RunFolder::report() const {
  std::lock_guard lock(state_->mutex);
  return state_->report();
}

Report RunFolder::fullest_report(std::string* kept) const {
  kept->clear();
  Report report = this->report();
  const fs::path file = state_->path / "report.h5";
  if (!fs::exists(file)) return report;
  if (missing().empty() && missing_answers().empty()) {
    // Only the report says when the run ended.
    try {
      report.run.finished = read_report(file).run.finished;
    } catch (const std::runtime_error&) {
      report.run.finished.clear();
    }
    return report;
  }
  Report stored;
  try {
    stored = read_report(file);
  } catch (const std::runtime_error& error) {
    *kept = std::string(error.what()) +
            "; kept, as it may hold more than the parts do; remove it to have it written anew";
    return report;
  }
  const std::string lacking = shortfall(stored, report);
  if (lacking.empty()) return report;
  *kept = state_->path.string() + ": the parts lack what report.h5 holds: " + lacking +
          "; report.h5 is kept and read instead (replayeval run --resume computes the parts again)";
  return stored;
}

fs::path RunFolder::assemble(const std::string& finished) const {
  Report report = this->report();
  report.run.finished = finished;
  fs::path path = state_->path / "report.h5";
  write_report(report, path);
  return path;
}

Report load_report(const fs::path& path) {
  if (fs::is_directory(path)) {
    std::string kept;
    if (RunFolder::holds_run(path)) return RunFolder::open_read_only(path).fullest_report(&kept);
    if (fs::exists(path / "report.h5")) return read_report(path / "report.h5");
    throw std::runtime_error(path.string() + ": holds neither " + kManifest + " nor report.h5");
  }
  return read_report(path);
}

}  // namespace replayeval
