#include "harness/experiment.h"

#include <pwd.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>

#include "datasets/utf8.h"
#include "models/hub.h"
#include "quant/format_file.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void reject(const std::string& message) { throw std::invalid_argument(message); }

std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

/// Where YAML text comes from; `set` marks a --set argument, whose positions mean nothing to
/// people.
struct Source {
  std::string name;
  bool set = false;
};

std::string place(const Source& source, const YAML::Mark& mark) {
  if (source.set || mark.is_null()) return source.name;
  return source.name + ":" + std::to_string(mark.line + 1) + ":" + std::to_string(mark.column + 1);
}

/// A message that already starts with its place.
struct PlacedError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// The value of one flat key and where it stands.
struct Entry {
  std::string key;
  YAML::Node node;
  Source source;
  YAML::Mark mark;  // the value's; the key's where there is no value
};

// ---------------------------------------------------------------------------------------------------------------
// Reading values
// ---------------------------------------------------------------------------------------------------------------

std::string describe(const YAML::Node& node) {
  if (node.IsMap()) return "a map";
  if (node.IsSequence()) return "a list of " + std::to_string(node.size());
  if (node.IsScalar()) return in_quotes(node.Scalar());
  return "nothing";
}

/// The shortest text that reads back as the number.
std::string number_text(double value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return error == std::errc() ? std::string(text, end) : std::string();
}

std::string read_text_value(const YAML::Node& node) {
  if (!node.IsScalar() || node.Scalar().empty()) reject("expected a text, got " + describe(node));
  if (find_invalid_utf8(node.Scalar()) != std::string::npos)
    reject("expected UTF-8, got " + in_quotes(node.Scalar()));
  return node.Scalar();
}

template <class Integer>
std::optional<Integer> to_integer(std::string_view text) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

template <class Integer>
Integer read_integer(const YAML::Node& node, Integer least,
                     Integer most = std::numeric_limits<Integer>::max()) {
  const auto value = node.IsScalar() ? to_integer<Integer>(node.Scalar()) : std::nullopt;
  if (!value || *value < least || *value > most) {
    reject("expected a whole number from " + std::to_string(least) + " to " + std::to_string(most) +
           ", got " + describe(node));
  }
  return *value;
}

double read_number(const YAML::Node& node, double least, double most) {
  double value = 0;
  const std::string text = node.IsScalar() ? node.Scalar() : "";
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() ||
      !(value >= least && value <= most)) {
    reject("expected a number from " + number_text(least) + " to " + number_text(most) + ", got " +
           describe(node));
  }
  return value;
}

bool read_boolean(const YAML::Node& node) {
  const std::string text = node.IsScalar() ? node.Scalar() : "";
  if (text != "true" && text != "false") reject("expected true or false, got " + describe(node));
  return text == "true";
}

/// One of a few names; `values` in the order of `names`.
template <class Value>
Value read_choice(const YAML::Node& node,
                  std::initializer_list<std::pair<std::string_view, Value>> choices) {
  std::string known;
  for (const auto& [name, value] : choices) {
    if (node.IsScalar() && node.Scalar() == name) return value;
    known += (known.empty() ? "" : " | ") + std::string(name);
  }
  reject("expected " + known + ", got " + describe(node));
}

fs::path expand_home(const std::string& text) {
  if (!text.starts_with("~/")) return text;
  const passwd* user = getpwuid(getuid());
  return fs::path(user != nullptr && user->pw_dir != nullptr ? user->pw_dir : "/") / text.substr(2);
}

// ---------------------------------------------------------------------------------------------------------------
// Writing values
// ---------------------------------------------------------------------------------------------------------------

/// A YAML scalar that reads back as `text`, in block and flow context.
std::string scalar(const std::string& text) {
  static constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+@;=-";
  const bool plain = !text.empty() && text.find_first_not_of(kPlain) == std::string::npos &&
                     text[0] != '@' && text[0] != '-' && text != "null" && text != "Null" &&
                     text != "NULL";
  if (plain) return text;
  std::string out = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20) {
      static constexpr char kDigits[] = "0123456789ABCDEF";
      out += "\\x";
      out += kDigits[c >> 4];
      out += kDigits[c & 15];
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

template <class Range, class Text>
std::string flow_list(const Range& items, const Text& text) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() == 1 ? "" : ", ") + text(item);
  return out + "]";
}

// ---------------------------------------------------------------------------------------------------------------
// The table of keys
// ---------------------------------------------------------------------------------------------------------------

/// Reads the entry's value into the experiment; keys are read in table order, so that later ones
/// may use earlier ones.
using ReadKey = void (*)(Experiment&, const Entry&);
/// Value as YAML flow text; empty: the key is left out.
using WriteKey = std::string (*)(const Experiment&);

struct KeyRule {
  ExperimentKey key;
  ReadKey read;
  WriteKey write;
};

/// A message about one node inside an entry (a list item), placed there.
[[noreturn]] void reject_at(const Entry& entry, const YAML::Node& node,
                            const std::string& message) {
  throw PlacedError(place(entry.source, node.Mark()) + ": " + entry.key + ": " + message);
}

std::vector<YAML::Node> items_of(const YAML::Node& node) {
  std::vector<YAML::Node> items;
  if (node.IsSequence()) {
    for (const YAML::Node& item : node) items.push_back(item);
  } else {
    items.push_back(node);
  }
  return items;
}

/// Adds an id to those before it; false where it is one of them.
bool add_new(const std::string& id, std::vector<std::string>* ids) {
  if (std::ranges::find(*ids, id) != ids->end()) return false;
  ids->push_back(id);
  return true;
}

void read_documents(Experiment& e, const Entry& entry) {
  e.data.documents.reset();
  e.data.ids.clear();
  if (entry.node.IsSequence()) {
    for (const YAML::Node& item : entry.node) {
      if (!item.IsScalar() || item.Scalar().empty()) {
        reject_at(entry, item, "expected a document id, got " + describe(item));
      }
      if (!add_new(item.Scalar(), &e.data.ids))
        reject_at(entry, item, "document " + in_quotes(item.Scalar()) + " is listed twice");
    }
    if (e.data.ids.empty()) reject("expected at least one document id, got an empty list");
    return;
  }
  if (entry.node.IsScalar() && entry.node.Scalar() == "all") return;
  const auto count =
      entry.node.IsScalar() ? to_integer<int64_t>(entry.node.Scalar()) : std::nullopt;
  if (!count || *count < 1) {
    reject("expected a number of documents (at least 1), a list of ids, or all, got " +
           describe(entry.node));
  }
  e.data.documents = *count;
}

std::string write_documents(const Experiment& e) {
  if (!e.data.ids.empty()) return flow_list(e.data.ids, scalar);
  return e.data.documents ? std::to_string(*e.data.documents) : "all";
}

void read_formats(Experiment& e, const Entry& entry) {
  if (!entry.node.IsMap())
    reject("expected a map from names to files, got " + describe(entry.node));
  for (const auto& item : entry.node) {
    const std::string name = item.first.Scalar();
    const auto valid = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    };
    if (name.empty() || !std::ranges::all_of(name, valid)) {
      reject_at(entry, item.first, "expected a name of a-z, 0-9 and _, got " + in_quotes(name));
    }
    const std::vector<BuiltinFormat> builtin = builtin_formats();
    if (std::ranges::find(builtin, name, &BuiltinFormat::name) != builtin.end()) {
      reject_at(entry, item.first,
                in_quotes(name) + " is a built-in format; expected another name");
    }
    if (e.formats.contains(name))
      reject_at(entry, item.first, in_quotes(name) + " is defined twice");
    if (!item.second.IsScalar() || item.second.Scalar().empty()) {
      reject_at(entry, item.second, name + ": expected a file, got " + describe(item.second));
    }
    const fs::path file = expand_home(item.second.Scalar());
    try {
      e.formats[name] = load_format_file(file, name);
    } catch (const std::invalid_argument& error) {
      reject_at(entry, item.second, name + ": " + error.what());
    }
    e.format_files.emplace_back(name, file);
  }
}

std::string write_formats(const Experiment& e) {
  std::string out = "{";
  for (const auto& [name, file] : e.format_files) {
    out += (out.size() == 1 ? "" : ", ") + name + ": " + scalar(file.string());
  }
  return out + "}";
}

void read_states(Experiment& e, const Entry& entry) {
  const std::vector<YAML::Node> items = items_of(entry.node);
  if (items.empty()) reject("expected at least one state precision, got an empty list");
  for (const YAML::Node& item : items) {
    if (!item.IsScalar() || item.Scalar().empty()) {
      reject_at(entry, item,
                "expected a state precision such as fp16+sr/nvfp4, got " + describe(item));
    }
    StatePrecision state;
    try {
      state = parse_state_precision(item.Scalar(), e.state_options, e.formats);
    } catch (const std::invalid_argument& error) {
      reject_at(entry, item, error.what());
    }
    std::vector<StatePrecision> expanded;
    if (e.seeds > 1 && state.stochastic() && !state.seed_in_name) {
      for (int i = 0; i < e.seeds; ++i) {
        expanded.push_back(
            with_seed(state, e.state_options.seed + static_cast<uint64_t>(i), e.state_options));
      }
    } else {
      expanded.push_back(state);
    }
    for (StatePrecision& candidate : expanded) {
      const std::string identity = state_identity(candidate, e.baseline);
      if (identity == state_identity(e.baseline, e.baseline)) {
        reject_at(
            entry, item,
            candidate.name + ": the baseline's own state; it is computed as the reference anyway");
      }
      for (const StatePrecision& other : e.states) {
        if (state_identity(other, e.baseline) == identity) {
          reject_at(entry, item,
                    candidate.name + ": the same state as " + in_quotes(other.name) + " before it");
        }
      }
      e.states.push_back(std::move(candidate));
    }
    e.listed_states.push_back(std::move(state));
  }
}

void read_baseline(Experiment& e, const Entry& entry) {
  e.baseline = parse_state_precision(read_text_value(entry.node), e.state_options, e.formats);
  if (!e.baseline.whole_model()) {
    reject(e.baseline.name +
           ": the baseline holds for the whole model; expected no layers= or heads=");
  }
}

void read_data_path(Experiment& e, const Entry& entry) {
  e.data.path = expand_home(read_text_value(entry.node));
}

/// One setting of how answers are drawn; false when `name` is none.
bool read_draw_setting(std::string_view name, const YAML::Node& node, DrawSettings* draw) {
  if (name == "max_tokens") {
    draw->max_tokens = read_integer<int64_t>(node, 1);
  } else if (name == "temperature") {
    draw->temperature = read_number(node, 0, 1e6);
  } else if (name == "top_p") {
    draw->top_p = read_number(node, 0, 1);
    if (*draw->top_p == 0) reject("expected a number above 0, got 0");
  } else if (name == "top_k") {
    draw->top_k = read_integer<int>(node, 0);
  } else {
    return false;
  }
  return true;
}

std::string write_draw_setting(std::string_view name, const DrawSettings& draw) {
  if (name == "max_tokens") return draw.max_tokens ? std::to_string(*draw.max_tokens) : "";
  if (name == "top_k") return draw.top_k ? std::to_string(*draw.top_k) : "";
  const std::optional<double>& value = name == "top_p" ? draw.top_p : draw.temperature;
  return value ? number_text(*value) : "";
}

constexpr std::string_view kDrawSettings[] = {"max_tokens", "temperature", "top_p", "top_k"};

TaskRequest read_task(const Entry& entry, const YAML::Node& node) {
  TaskRequest task;
  if (node.IsScalar() && !node.Scalar().empty()) {
    task.task = node.Scalar();
    return task;
  }
  static constexpr std::string_view kNames[] = {
      "task",       "path",        "split",        "level", "items", "ids",
      "max_tokens", "temperature", "per_category", "top_p", "top_k"};
  if (!node.IsMap()) {
    reject_at(entry, node, "expected a task's name or file, or a map, got " + describe(node));
  }
  std::vector<std::string> seen;
  for (const auto& item : node) {
    const std::string name = item.first.IsScalar() ? item.first.Scalar() : "";
    const YAML::Node& value = item.second;
    if (std::ranges::find(seen, name) != seen.end())
      reject_at(entry, item.first, in_quotes(name) + " is given twice");
    seen.push_back(name);
    try {
      if (name == "task") {
        task.task = read_text_value(value);
      } else if (name == "path") {
        task.path = expand_home(read_text_value(value));
      } else if (name == "split") {
        task.split = read_text_value(value);
      } else if (name == "level") {
        task.level = read_integer<int>(value, 1, 5);
      } else if (name == "items") {
        task.items = read_integer<int64_t>(value, 1);
      } else if (name == "per_category") {
        task.per_category = read_integer<int64_t>(value, 1);
      } else if (name == "ids") {
        for (const YAML::Node& id : items_of(value)) {
          if (!add_new(read_text_value(id), &task.ids))
            reject(in_quotes(id.Scalar()) + " is listed twice");
        }
        if (task.ids.empty()) reject("expected at least one id, got an empty list");
      } else if (!read_draw_setting(name, value, &task.draw)) {
        const std::string near = nearest_name(name, kNames);
        reject(near.empty() ? "unknown key; expected task, path, split, level, items, "
                              "per_category, ids, max_tokens, temperature, top_p or top_k"
                            : "unknown key; the nearest known key is " + in_quotes(near));
      }
    } catch (const std::invalid_argument& error) {
      reject_at(entry, value.IsNull() ? item.first : value, name + ": " + error.what());
    }
  }
  if (task.task.empty()) reject_at(entry, node, "task: missing; expected a task's name or file");
  return task;
}

void read_tasks(Experiment& e, const Entry& entry) {
  e.tasks.clear();
  for (const YAML::Node& node : items_of(entry.node)) e.tasks.push_back(read_task(entry, node));
  if (e.tasks.empty()) reject("expected at least one task, got an empty list");
}

std::string write_tasks(const Experiment& e) {
  return flow_list(e.tasks, [](const TaskRequest& task) {
    std::string text = "{task: " + scalar(task.task);
    const auto add = [&](std::string_view name, const std::string& value) {
      if (!value.empty()) text += ", " + std::string(name) + ": " + value;
    };
    const auto number = [](const auto& value) { return value ? std::to_string(*value) : ""; };
    add("path", task.path.empty() ? "" : scalar(task.path.string()));
    add("split", task.split.empty() ? "" : scalar(task.split));
    add("level", number(task.level));
    add("items", number(task.items));
    add("per_category", number(task.per_category));
    add("ids", task.ids.empty() ? "" : flow_list(task.ids, scalar));
    for (std::string_view name : kDrawSettings) add(name, write_draw_setting(name, task.draw));
    return text + "}";
  });
}

#define UNAVAILABLE(name, type, default_value, help, job) \
  KeyRule { {name, type, default_value, help, job, false, false}, nullptr, nullptr }

/// Rule of a state option that is a table of names.
#define STATE_OPTION(member, type, default_value, help, parse)                           \
  KeyRule {                                                                              \
    {#member, type, default_value, help, "all", false, true},                            \
        [](Experiment& e, const Entry& entry) {                                          \
          e.state_options.member = parse(read_text_value(entry.node));                   \
        },                                                                               \
        [](const Experiment& e) { return std::string(name_of(e.state_options.member)); } \
  }

/// Rule of a setting of how answers are drawn.
#define DRAW_SETTING(member, type, help)                                        \
  KeyRule {                                                                     \
    {#member, type, "", help, "score", false, true},                            \
        [](Experiment& e, const Entry& entry) {                                 \
          read_draw_setting(#member, entry.node, &e.draw);                      \
        },                                                                      \
        [](const Experiment& e) { return write_draw_setting(#member, e.draw); } \
  }

const KeyRule kKeys[] = {
    {{"job", "kl | score", "", "what to do: drift over a text, or graded answers", "all", true,
      true},
     [](Experiment& e, const Entry& entry) {
       e.job = read_choice<std::string>(entry.node, {{"kl", "kl"}, {"score", "score"}});
     },
     [](const Experiment& e) { return e.job; }},
    {{"hub", "folder", "~/.cache/huggingface/hub",
      "hub cache in which `model: org/name` is looked up", "all", false, true},
     [](Experiment& e, const Entry& entry) { e.hub = read_text_value(entry.node); },
     [](const Experiment& e) { return scalar(e.hub.string()); }},
    {{"model", "folder | org/name", "",
      "folder with config.json and *.safetensors, or a name in the hub cache", "all", true, true},
     [](Experiment& e, const Entry& entry) {
       e.model = read_text_value(entry.node);
       e.model_folder = find_model(e.model, expand_home(e.hub.string()));
     },
     [](const Experiment& e) { return scalar(e.model); }},
    {{"tokenizer", "folder | file", "",
      "tokenizer.json or tokenizer.model; the model's folder unless given", "all", false, true},
     [](Experiment& e, const Entry& entry) {
       e.tokenizer = expand_home(read_text_value(entry.node));
     },
     [](const Experiment& e) {
       return e.tokenizer.empty() ? std::string() : scalar(e.tokenizer.string());
     }},
    {{"dt_clamp", "forward | none", "forward",
      "clamp dt of Mamba-2 as the model's forward pass does, or not at all", "all", false, true},
     [](Experiment& e, const Entry& entry) {
       e.dt_clamp = read_choice<DtClamp>(entry.node,
                                         {{"forward", DtClamp::forward}, {"none", DtClamp::none}});
     },
     [](const Experiment& e) {
       return std::string(e.dt_clamp == DtClamp::forward ? "forward" : "none");
     }},

    {{"data.kind", "pg19 | text | answers", "text",
      "PG-19's on-disk layout, a text file or a folder of *.txt, or the answers of a score run",
      "kl", false, true},
     [](Experiment& e, const Entry& entry) {
       enum class Kind { pg19, text, answers };
       const Kind kind = read_choice<Kind>(
           entry.node, {{"pg19", Kind::pg19}, {"text", Kind::text}, {"answers", Kind::answers}});
       e.data.kind = kind == Kind::pg19 ? DataSource::Kind::kPg19 : DataSource::Kind::kText;
       e.data_answers = kind == Kind::answers;
     },
     [](const Experiment& e) {
       return std::string(e.data_answers                           ? "answers"
                          : e.data.kind == DataSource::Kind::kPg19 ? "pg19"
                                                                   : "text");
     }},
    {{"data.path", "folder | file", "",
      "pg19: folder with metadata.csv and <split>/<id>.txt; text: file or folder; answers: "
      "report.h5 or run folder",
      "kl", true, true},
     read_data_path,
     [](const Experiment& e) { return scalar(e.data.path.string()); }},
    {{"data.state", "state precision", "", "answers: whose; the baseline of that run unless given",
      "kl", false, true},
     [](Experiment& e, const Entry& entry) { e.data_state = read_text_value(entry.node); },
     [](const Experiment& e) {
       return e.data_state.empty() ? std::string() : scalar(e.data_state);
     }},
    {{"data.split", "text", "test", "pg19: train, validation or test", "kl", false, true},
     [](Experiment& e, const Entry& entry) { e.data.split = read_text_value(entry.node); },
     [](const Experiment& e) { return scalar(e.data.split); }},
    {{"data.documents", "all | integer | list of ids", "all",
      "the first n in metadata order that are long enough, or these (answers: task/item/repeat)",
      "kl", false, true},
     read_documents,
     write_documents},
    {{"data.tokens", "all | integer", "all", "tokens of each document, bos included", "kl", false,
      true},
     [](Experiment& e, const Entry& entry) {
       e.data.tokens.reset();
       if (entry.node.IsScalar() && entry.node.Scalar() == "all") return;
       e.data.tokens = read_integer<int64_t>(entry.node, 2);
     },
     [](const Experiment& e) {
       return e.data.tokens ? std::to_string(*e.data.tokens) : std::string("all");
     }},
    {{"data.join", "true | false", "false",
      "join the chosen documents into one, eos and bos between them", "kl", false, true},
     [](Experiment& e, const Entry& entry) { e.data.join = read_boolean(entry.node); },
     [](const Experiment& e) { return std::string(e.data.join ? "true" : "false"); }},

    {{"formats", "map from names to files", "{}",
      "number formats described in YAML, usable in `states` by name", "all", false, true},
     read_formats,
     write_formats},
    {{"window", "integer", "16",
      "L: tokens between two flushes of the state, 1 to 64; 1 is eager decoding", "all", false,
      true},
     [](Experiment& e, const Entry& entry) {
       e.state_options.window = read_integer<int>(entry.node, 1, kMaxWindow);
     },
     [](const Experiment& e) { return std::to_string(e.state_options.window); }},
    STATE_OPTION(gdn_fold, "rederive | cached", "rederive",
                 "GDN, KDA: corrections of a flush from the recurrence checkpoint, or as stored",
                 parse_gdn_fold),
    STATE_OPTION(flush_output, "recurrence | read", "recurrence",
                 "what a flush step's output comes from", parse_flush_output),
    STATE_OPTION(ring, "activation | fp32", "activation", "type of the inputs kept in the ring",
                 parse_ring_type),
    STATE_OPTION(ring_u, "fp32 | bf16", "fp32",
                 "GDN, KDA: type of the corrections kept in the ring", parse_record_type),
    STATE_OPTION(beta, "fp32 | bf16", "fp32", "GDN, KDA: type that beta passes through",
                 parse_record_type),
    STATE_OPTION(dot, "fp32 | tf32 | bf16", "fp32", "type of the operands of a flush's products",
                 parse_dot_type),
    {{"seed", "integer", "1", "seed of stochastic rounding", "all", false, true},
     [](Experiment& e, const Entry& entry) {
       e.state_options.seed = read_integer<uint64_t>(entry.node, 0);
     },
     [](const Experiment& e) { return std::to_string(e.state_options.seed); }},
    {{"seeds", "integer", "1", "run every stochastic state with seed, seed+1, ...: this many",
      "all", false, true},
     [](Experiment& e, const Entry& entry) { e.seeds = read_integer<int>(entry.node, 1, 1000); },
     [](const Experiment& e) { return std::to_string(e.seeds); }},
    {{"baseline", "state precision", "fp32", "what every state is compared with", "all", false,
      true},
     read_baseline,
     [](const Experiment& e) { return scalar(e.baseline.name); }},
    {{"states", "list of state precisions", "",
      "recurrence/read@option=value;..., e.g. fp16+sr/nvfp4@L=8", "all", true, true},
     read_states,
     [](const Experiment& e) {
       return flow_list(e.listed_states, [](const StatePrecision& s) { return scalar(s.name); });
     }},

    {{"sweep.state", "state precision", "",
      "adds a state for each layer (or head): this one there, the baseline elsewhere", "kl", false,
      true},
     [](Experiment& e, const Entry& entry) {
       StatePrecision state =
           parse_state_precision(read_text_value(entry.node), e.state_options, e.formats);
       if (!state.whole_model()) {
         reject(state.name + ": the sweep selects the layers; expected no layers= or heads=");
       }
       e.sweep.state = std::move(state);
     },
     [](const Experiment& e) {
       return e.sweep.state ? scalar(e.sweep.state->name) : std::string();
     }},
    {{"sweep.over", "layers | heads", "layers",
      "a state for each layer, or each head of each layer", "kl", false, true},
     [](Experiment& e, const Entry& entry) {
       e.sweep.over = read_choice<Sweep::Over>(
           entry.node, {{"layers", Sweep::Over::layers}, {"heads", Sweep::Over::heads}});
     },
     [](const Experiment& e) {
       return std::string(e.sweep.over == Sweep::Over::layers ? "layers" : "heads");
     }},
    {{"sweep.keep", "only | except | both", "only",
      "the format in that layer alone, everywhere but there, or one state of each", "kl", false,
      true},
     [](Experiment& e, const Entry& entry) {
       e.sweep.keep = read_choice<Sweep::Keep>(entry.node, {{"only", Sweep::Keep::only},
                                                            {"except", Sweep::Keep::except},
                                                            {"both", Sweep::Keep::both}});
     },
     [](const Experiment& e) {
       return std::string(e.sweep.keep == Sweep::Keep::only     ? "only"
                          : e.sweep.keep == Sweep::Keep::except ? "except"
                                                                : "both");
     }},

    {{"device", "cpu | cuda", "cpu", "where the model runs", "all", false, true},
     [](Experiment& e, const Entry& entry) {
       e.device = read_choice<Device>(entry.node, {{"cpu", Device::cpu}, {"cuda", Device::cuda}});
     },
     [](const Experiment& e) { return std::string(name_of(e.device)); }},
    {{"compute", "fp32 | bf16", "fp32", "type of weights and activations in the dense layers",
      "all", false, true},
     [](Experiment& e, const Entry& entry) {
       e.compute = read_choice<ComputeType>(
           entry.node, {{"fp32", ComputeType::fp32}, {"bf16", ComputeType::bf16}});
     },
     [](const Experiment& e) {
       return std::string(e.compute == ComputeType::fp32 ? "fp32" : "bf16");
     }},
    {{"dense", "invariant | fast", "invariant",
      "products, attention and sums over 4-bit states bit-equal for any chunk, set of states and "
      "device, or as fast as they go; device cuda: fast unless given",
      "all", false, true},
     [](Experiment& e, const Entry& entry) {
       e.dense = read_choice<DenseMode>(
           entry.node, {{"invariant", DenseMode::invariant}, {"fast", DenseMode::fast}});
     },
     [](const Experiment& e) {
       return std::string(e.dense == DenseMode::invariant ? "invariant" : "fast");
     }},
    {{"kernels", "fast | reference", "fast",
      "state kernels: window form, or token by token from the equation in FP64", "all", false,
      true},
     [](Experiment& e, const Entry& entry) {
       e.kernels = read_choice<KernelForm>(
           entry.node, {{"fast", KernelForm::fast}, {"reference", KernelForm::reference}});
     },
     [](const Experiment& e) {
       return std::string(e.kernels == KernelForm::fast ? "fast" : "reference");
     }},
    {{"threads", "integer", "0", "threads of the CPU; 0: one a core", "all", false, true},
     [](Experiment& e, const Entry& entry) { e.threads = read_integer<int>(entry.node, 0, 4096); },
     [](const Experiment& e) { return std::to_string(e.threads); }},
    {{"chunk_tokens", "integer", "256",
      "tokens that go through the model in one call; score: prompt tokens; device cuda: 1024 "
      "unless "
      "given",
      "all", false, true},
     [](Experiment& e, const Entry& entry) {
       e.chunk_tokens = read_integer<int>(entry.node, 1, 1 << 20);
     },
     [](const Experiment& e) { return std::to_string(e.chunk_tokens); }},
    {{"prompt_tokens", "integer", "0",
      "positions before this run with FP32 state and are not compared", "kl", false, true},
     [](Experiment& e, const Entry& entry) {
       e.prompt_tokens = read_integer<int64_t>(entry.node, 0);
     },
     [](const Experiment& e) { return std::to_string(e.prompt_tokens); }},
    {{"prefill_chunk", "integer", "0",
      "also encode and decode the state every this many prompt tokens; 0: never", "all", false,
      true},
     [](Experiment& e, const Entry& entry) {
       e.prefill_chunk = read_integer<int64_t>(entry.node, 0);
     },
     [](const Experiment& e) { return std::to_string(e.prefill_chunk); }},
    {{"state_error_every", "integer", "0",
      "compare the states themselves every this many positions (a multiple of L); 0: never", "kl",
      false, true},
     [](Experiment& e, const Entry& entry) {
       e.state_error_every = read_integer<int64_t>(entry.node, 0);
     },
     [](const Experiment& e) { return std::to_string(e.state_error_every); }},
    {{"out", "folder", "", "run folder; out/<name of the experiment file> unless given", "all",
      false, true},
     [](Experiment& e, const Entry& entry) { e.out = expand_home(read_text_value(entry.node)); },
     [](const Experiment& e) { return scalar(e.out.string()); }},

    {{"dump_states", "list of positions", "[]",
      "write the FP32 row's states, with the records of the window before, after these positions",
      "kl", false, true},
     [](Experiment& e, const Entry& entry) {
       e.dump_states.clear();
       if (entry.node.IsSequence() && entry.node.size() == 0) return;
       for (const YAML::Node& item : items_of(entry.node)) {
         e.dump_states.push_back(read_integer<int64_t>(item, 0));
       }
       std::ranges::sort(e.dump_states);
     },
     [](const Experiment& e) {
       return flow_list(e.dump_states, [](int64_t p) { return std::to_string(p); });
     }},

    {{"snapshot_tokens", "integer", "0",
      "save the state every this many tokens, so that --resume goes on inside a document; 0: only "
      "when stopped by a signal",
      "kl", false, true},
     [](Experiment& e, const Entry& entry) {
       e.snapshot_tokens = read_integer<int64_t>(entry.node, 0);
     },
     [](const Experiment& e) { return std::to_string(e.snapshot_tokens); }},
    {{"tasks", "list of tasks", "",
      "names or files, or maps with task and some of path, split, level, items, per_category, ids, "
      "max_tokens, temperature, top_p, top_k",
      "score", true, true},
     read_tasks,
     write_tasks},
    {{"repeats", "integer", "", "answers to each item; the tasks' unless given", "score", false,
      true},
     [](Experiment& e, const Entry& entry) {
       e.repeats = read_integer<int>(entry.node, 1, 100000);
     },
     [](const Experiment& e) { return e.repeats ? std::to_string(*e.repeats) : std::string(); }},
    DRAW_SETTING(max_tokens, "integer", "tokens of an answer at most; the tasks' unless given"),
    DRAW_SETTING(temperature, "number", "0: greedy; the tasks' unless given"),
    DRAW_SETTING(top_p, "number",
                 "share of the probability that is drawn from; the tasks' unless "
                 "given"),
    DRAW_SETTING(top_k, "integer", "0: draw from all tokens; the tasks' unless given"),
    {{"slots", "integer", "0",
      "answers generated side by side; 0: up to 64 (on a GPU 256) as memory allows", "score", false,
      true},
     [](Experiment& e, const Entry& entry) { e.slots = read_integer<int>(entry.node, 0, 65536); },
     [](const Experiment& e) { return std::to_string(e.slots); }},
    {{"on_bad_item", "stop | skip", "stop", "what to do when an item cannot be asked", "score",
      false, true},
     [](Experiment& e, const Entry& entry) {
       e.on_bad_item = read_choice<OnBadItem>(
           entry.node, {{"stop", OnBadItem::stop}, {"skip", OnBadItem::skip}});
     },
     [](const Experiment& e) {
       return std::string(e.on_bad_item == OnBadItem::stop ? "stop" : "skip");
     }},
    {{"decode_prompt", "true | false", "false",
      "the prompt, too, runs in each state's precision instead of FP32", "score", false, true},
     [](Experiment& e, const Entry& entry) { e.decode_prompt = read_boolean(entry.node); },
     [](const Experiment& e) { return std::string(e.decode_prompt ? "true" : "false"); }},

    UNAVAILABLE("speculate", "integer", "0", "tokens of a verification step; 0: none", "all"),
    UNAVAILABLE("acceptance", "text", "none", "how many drafts a verification step accepts", "all"),
};
#undef UNAVAILABLE
#undef STATE_OPTION
#undef DRAW_SETTING

const KeyRule* find_key(std::string_view name) {
  const auto rule = std::ranges::find(kKeys, name, [](const KeyRule& r) { return r.key.name; });
  return rule == std::end(kKeys) ? nullptr : &*rule;
}

/// Is `name` the first part of dotted keys ("data")?
bool is_section(std::string_view name) {
  return std::ranges::any_of(kKeys, [&](const KeyRule& rule) {
    return rule.key.name.starts_with(name) && rule.key.name.size() > name.size() &&
           rule.key.name[name.size()] == '.';
  });
}

[[noreturn]] void reject_unknown(const std::string& where, const std::string& key) {
  std::vector<std::string_view> known = {"include"};
  for (const KeyRule& rule : kKeys) known.push_back(rule.key.name);
  const std::string near = nearest_name(key, known);
  reject(where + ": unknown key " + in_quotes(key) +
         (near.empty() ? "; `replayeval list keys` prints all"
                       : "; the nearest known key is " + in_quotes(near)));
}

// ---------------------------------------------------------------------------------------------------------------
// From files to one value a key
// ---------------------------------------------------------------------------------------------------------------

class KeyCollector {
 public:
  void add_file(const fs::path& path, std::vector<fs::path> including) {
    std::error_code error;
    const fs::path canonical = fs::weakly_canonical(path, error);
    if (std::ranges::find(including, canonical) != including.end()) {
      reject(path.string() + ": include: the file includes itself");
    }
    including.push_back(canonical);
    std::ifstream stream(path, std::ios::binary);
    if (!stream || fs::is_directory(path, error))
      throw std::runtime_error(path.string() + ": cannot be read");
    add_text({std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()}, path,
             std::move(including));
  }

  /// Text that stands for the file `path`; `including` are the files that it is included from.
  void add_text(const std::string& text, const fs::path& path, std::vector<fs::path> including) {
    std::error_code error;
    const Source source{path.string()};
    const YAML::Node root = parse(text, source);
    if (!root.IsMap())
      reject(place(source, root.Mark()) + ": expected a map of keys, got " + describe(root));
    for (const auto& item : root) {
      if (!item.first.IsScalar() || item.first.Scalar() != "include") continue;
      for (const YAML::Node& file : items_of(item.second)) {
        if (!file.IsScalar() || file.Scalar().empty()) {
          reject(place(source, file.Mark()) +
                 ": include: expected a file or a list of files, got " + describe(file));
        }
        const fs::path included = path.parent_path() / file.Scalar();
        if (!fs::is_regular_file(included, error)) {
          reject(place(source, file.Mark()) + ": include: expected a file, got " +
                 in_quotes(included.string()) + ", which " +
                 (fs::exists(included, error) ? "is none" : "does not exist"));
        }
        add_file(included, including);
      }
    }
    std::map<std::string, YAML::Mark> seen;
    flatten(root, "", source, &seen);
  }

  void add_setting(const std::string& setting) {
    const size_t equals = setting.find('=');
    const std::string key = setting.substr(0, equals);
    if (equals == std::string::npos || key.empty()) {
      reject("--set " + setting + ": expected key=value");
    }
    const Source source{"--set " + key, true};
    if (key == "include")
      reject("--set include: an include stands in the file; expected another key");
    const YAML::Node value = parse(setting.substr(equals + 1), source);
    if (find_key(key) != nullptr) {
      put(key, value, source, value.Mark());
    } else if (is_section(key)) {
      std::map<std::string, YAML::Mark> seen;
      flatten_section(key, value, source, &seen);
    } else {
      reject_unknown("--set", key);
    }
  }

  const Entry* find(std::string_view key) const {
    const auto entry = entries_.find(key);
    return entry == entries_.end() ? nullptr : &entry->second;
  }

 private:
  using Seen = std::map<std::string, YAML::Mark>;

  static YAML::Node parse(const std::string& text, const Source& source) {
    try {
      const std::vector<YAML::Node> documents = YAML::LoadAll(text);
      if (documents.size() > 1)
        reject(source.name + ": expected one YAML document, got " +
               std::to_string(documents.size()));
      return documents.empty() ? YAML::Node() : documents[0];
    } catch (const YAML::Exception& error) {
      reject(place(source, error.mark) + ": not valid YAML: " + error.msg);
    }
  }

  void flatten_section(const std::string& name, const YAML::Node& node, const Source& source,
                       Seen* seen) {
    if (!node.IsMap()) {
      std::string keys;
      for (const KeyRule& rule : kKeys) {
        if (rule.key.name.starts_with(name + "."))
          keys += " " + std::string(rule.key.name.substr(name.size() + 1));
      }
      reject(place(source, node.Mark()) + ": " + name + ": expected a map with some of" + keys +
             ", got " + describe(node));
    }
    flatten(node, name + ".", source, seen);
  }

  void flatten(const YAML::Node& map, const std::string& prefix, const Source& source, Seen* seen) {
    for (const auto& item : map) {
      const std::string where = place(source, item.first.Mark());
      if (!item.first.IsScalar()) reject(where + ": expected a key, got " + describe(item.first));
      const std::string key = prefix + item.first.Scalar();
      const auto [earlier, inserted] = seen->emplace(key, item.first.Mark());
      if (!inserted)
        reject(where + ": key " + in_quotes(key) + " is given twice, first on line " +
               std::to_string(earlier->second.line + 1));
      if (key == "include") continue;
      if (is_section(key)) {
        flatten_section(key, item.second, source, seen);
      } else if (find_key(key) != nullptr) {
        put(key, item.second, source, item.first.Mark());
      } else {
        reject_unknown(where, key);
      }
    }
  }

  void put(const std::string& key, const YAML::Node& node, const Source& source,
           const YAML::Mark& key_mark) {
    entries_.insert_or_assign(key,
                              Entry{key, node, source, node.IsNull() ? key_mark : node.Mark()});
  }

  std::map<std::string, Entry, std::less<>> entries_;
};

/// chunk_tokens on a GPU unless given.
constexpr int kDeviceChunk = 1024;

/// What the folder of data.kind pg19 looks like and where it comes from.
std::string pg19_layout(const Experiment& e) {
  return "the folder of PG-19 with metadata.csv and " + e.data.split +
         "/<id>.txt, as published at https://github.com/google-deepmind/pg19";
}

/// What is missing when a required key has no value.
std::string missing_message(const Experiment& e, const ExperimentKey& key) {
  std::string message = std::string(key.name) + ": missing; expected " + std::string(key.type);
  if (key.name == "data.path" && e.data.kind == DataSource::Kind::kPg19) {
    message = "data.path: missing; expected " + pg19_layout(e);
  }
  return message + "; give it in the file or with --set " + std::string(key.name) + "=...";
}

/// Rules about several keys together; each names the key to change.
void check_together(const Experiment& e, const KeyCollector& keys) {
  const auto complain = [&keys, &e](std::string_view key, const std::string& message) {
    const Entry* entry = keys.find(key);
    reject((entry != nullptr ? place(entry->source, entry->mark) : e.file.string()) + ": " +
           std::string(key) + ": " + message);
  };
  if (e.device == Device::cuda && e.kernels == KernelForm::reference) {
    complain("kernels", "got reference with device cuda; the FP64 reference runs on the CPU");
  }
  if (e.job == "score") {
    if (e.decode_prompt && e.prefill_chunk > 0) {
      complain("prefill_chunk", "got " + std::to_string(e.prefill_chunk) +
                                    " with decode_prompt; expected one of the two");
    }
    return;
  }
  // A resolved text without a sweep holds both keys, at their defaults.
  const Entry* const over = keys.find("sweep.over");
  const Entry* const keep = keys.find("sweep.keep");
  const bool resolved = over != nullptr && keep != nullptr && e.sweep.over == Sweep().over &&
                        e.sweep.keep == Sweep().keep;
  if (!e.sweep.state && (over != nullptr || keep != nullptr) && !resolved) {
    complain(over != nullptr ? "sweep.over" : "sweep.keep",
             "got no sweep.state; expected the state precision that the sweep tries, such as "
             "sweep: {state: nvfp4+sr, over: layers}");
  }
  if (e.data_answers) {
    const auto refuse = [&](std::string_view key, const std::string& why) {
      complain(key, why + "; expected no such key with data.kind answers");
    };
    if (e.prompt_tokens > 0) refuse("prompt_tokens", "each answer has its own prompt");
    if (e.data.join) refuse("data.join", "answers are documents of their own");
    if (e.state_error_every > 0 || !e.dump_states.empty()) {
      refuse(e.state_error_every > 0 ? "state_error_every" : "dump_states",
             "prompts end at different positions");
    }
  } else if (!e.data_state.empty()) {
    complain("data.state",
             "got " + in_quotes(e.data_state) + "; expected data.kind answers, or no such key");
  }
  if (e.data.tokens && e.prompt_tokens >= *e.data.tokens) {
    complain("prompt_tokens", "expected less than data.tokens (" + std::to_string(*e.data.tokens) +
                                  "), got " + std::to_string(e.prompt_tokens) +
                                  "; nothing would be left to compare");
  }
  for (int64_t position : e.dump_states) {
    if ((position + 1 - e.prompt_tokens) % e.baseline.options.window != 0 ||
        position < e.prompt_tokens) {
      complain("dump_states", "position " + std::to_string(position) +
                                  " is not the last one of a window of the baseline; expected L k "
                                  "- 1 after the prompt, L = " +
                                  std::to_string(e.baseline.options.window));
    }
  }
  if (e.state_error_every > 0 && e.state_error_every % e.baseline.options.window != 0) {
    complain("state_error_every", "expected a multiple of the baseline's window, " +
                                      std::to_string(e.baseline.options.window) + ", got " +
                                      std::to_string(e.state_error_every));
  }
  if (e.prefill_chunk > 0 && e.prompt_tokens == 0 && !e.data_answers) {
    complain("prefill_chunk", "got " + std::to_string(e.prefill_chunk) +
                                  " without a prompt; expected prompt_tokens above 0");
  }
  if (e.data.kind == DataSource::Kind::kText && keys.find("data.split") != nullptr &&
      e.data.split != "test") {
    complain("data.split", "only data.kind pg19 has splits; expected no such key");
  }
  std::error_code error;
  if (!fs::exists(e.data.path, error)) {
    complain("data.path",
             "expected " +
                 (e.data.kind == DataSource::Kind::kPg19 ? pg19_layout(e)
                  : e.data_answers ? std::string("a report.h5 or a run folder of job score")
                                   : std::string("a file or folder")) +
                 ", got " + in_quotes(e.data.path.string()) + ", which does not exist");
  }
}

}  // namespace

std::span<const ExperimentKey> experiment_keys() {
  static const std::vector<ExperimentKey> keys = [] {
    std::vector<ExperimentKey> list;
    for (const KeyRule& rule : kKeys) list.push_back(rule.key);
    return list;
  }();
  return keys;
}

namespace {

/// Keys of another job have no place in an experiment.
bool belongs(const ExperimentKey& key, const Experiment& experiment) {
  return key.job == "all" || key.job == experiment.job;
}

Experiment resolve(const KeyCollector& keys, const fs::path& file) {
  Experiment experiment;
  experiment.file = file;
  experiment.out = fs::path("out") / file.stem();
  for (const KeyRule& rule : kKeys) {
    const ExperimentKey& key = rule.key;
    const Entry* given = keys.find(key.name);
    Entry entry;
    if (!belongs(key, experiment)) {
      if (given == nullptr) continue;
      reject_at(*given, given->node,
                "a key of job " + std::string(key.job) + "; expected no such key in job " +
                    experiment.job);
    }
    if (given != nullptr) {
      entry = *given;
    } else if (key.required) {
      reject(file.string() + ": " + missing_message(experiment, key));
    } else if (key.default_value.empty()) {
      continue;
    } else {
      entry = Entry{std::string(key.name), YAML::Load(std::string(key.default_value)),
                    Source{file.string()}, YAML::Mark::null_mark()};
    }
    if (!key.available) {
      if (!entry.node.IsScalar() || entry.node.Scalar() != key.default_value) {
        reject_at(entry, entry.node,
                  "not available in this version; expected no such key, or " +
                      std::string(key.default_value));
      }
      continue;
    }
    try {
      rule.read(experiment, entry);
    } catch (const PlacedError&) {
      throw;
    } catch (const std::invalid_argument& error) {
      reject(place(entry.source, entry.mark) + ": " + entry.key + ": " + error.what());
    }
  }
  if (experiment.tokenizer.empty()) experiment.tokenizer = experiment.model_folder;
  if (experiment.device == Device::cuda) {
    if (keys.find("dense") == nullptr) experiment.dense = DenseMode::fast;
    if (keys.find("chunk_tokens") == nullptr) experiment.chunk_tokens = kDeviceChunk;
  }
  check_together(experiment, keys);
  return experiment;
}

}  // namespace

Experiment load_experiment(const fs::path& file, std::span<const std::string> settings) {
  KeyCollector keys;
  keys.add_file(file, {});
  for (const std::string& setting : settings) keys.add_setting(setting);
  return resolve(keys, file);
}

Experiment parse_experiment(const std::string& text, const std::string& name,
                            std::span<const std::string> settings) {
  KeyCollector keys;
  keys.add_text(text, name, {});
  for (const std::string& setting : settings) keys.add_setting(setting);
  return resolve(keys, name);
}

std::string resolved_text(const Experiment& experiment) {
  std::string text;
  std::string section;
  for (const ExperimentField& setting : experiment_fields(experiment)) {
    const size_t dot = setting.name.find('.');
    const std::string prefix = dot == std::string::npos ? "" : setting.name.substr(0, dot);
    if (prefix != section && !prefix.empty()) text += prefix + ":\n";
    section = prefix;
    text += (prefix.empty() ? setting.name : "  " + setting.name.substr(dot + 1)) + ": " +
            setting.value + "\n";
  }
  return text;
}

std::vector<ExperimentField> experiment_fields(const Experiment& experiment) {
  std::vector<ExperimentField> settings;
  for (const KeyRule& rule : kKeys) {
    if (rule.write == nullptr || !belongs(rule.key, experiment)) continue;
    std::string value = rule.write(experiment);
    if (!value.empty()) settings.push_back({std::string(rule.key.name), std::move(value)});
  }
  return settings;
}

std::string nearest_name(std::string_view name, std::span<const std::string_view> known) {
  const auto distance = [](std::string_view a, std::string_view b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= b.size(); ++j) {
        const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
      }
    }
    return row[b.size()];
  };
  std::string_view best;
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string_view candidate : known) {
    const size_t d = distance(name, candidate);
    if (d < best_distance) {
      best = candidate;
      best_distance = d;
    }
  }
  return std::string(best);
}

}  // namespace replayeval
