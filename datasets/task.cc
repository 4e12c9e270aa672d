// Task files: strict YAML to TaskSpec, and back to a canonical text whose hash is the task's
// identity.
#include "datasets/task.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <functional>
#include <set>
#include <stdexcept>

#include "base/hash.h"
#include "datasets/answer_rules.h"
#include "datasets/jinja.h"
#include "datasets/prompts.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

const char* const kTaskFolder = "eval_configs/tasks";

// One file while it is read: places for messages.
class Reader {
 public:
  explicit Reader(fs::path file) : file_(std::move(file)) {}

  [[noreturn]] void fail(const YAML::Node& node, const std::string& key,
                         const std::string& message) const {
    fail_at(node.Mark(), key, message);
  }
  [[noreturn]] void fail_at(const YAML::Mark& mark, const std::string& key,
                            const std::string& message) const {
    std::string place = file_.string();
    if (!mark.is_null())
      place += ":" + std::to_string(mark.line + 1) + ":" + std::to_string(mark.column + 1);
    throw std::invalid_argument(place + ": " + (key.empty() ? "" : key + ": ") + message);
  }

  static std::string describe(const YAML::Node& node) {
    if (node.IsMap()) return "a map";
    if (node.IsSequence()) return "a list";
    if (node.IsScalar()) return "'" + node.Scalar() + "'";
    return "nothing";
  }

  std::string text(const YAML::Node& node, const std::string& key) const {
    if (!node.IsScalar()) fail(node, key, "expected a text, got " + describe(node));
    return node.Scalar();
  }

  template <class Number>
  Number number(const YAML::Node& node, const std::string& key, Number least, Number most) const {
    Number value{};
    const std::string text = node.IsScalar() ? node.Scalar() : "";
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || !(value >= least) ||
        !(value <= most)) {
      fail(node, key,
           "expected a number from " + shown(least) + " to " + shown(most) + ", got " +
               describe(node));
    }
    return value;
  }

  bool boolean(const YAML::Node& node, const std::string& key) const {
    const std::string text = node.IsScalar() ? node.Scalar() : "";
    if (text != "true" && text != "false")
      fail(node, key, "expected true or false, got " + describe(node));
    return text == "true";
  }

  template <class Value>
  Value choice(const YAML::Node& node, const std::string& key,
               const std::vector<std::pair<std::string, Value>>& choices) const {
    std::string known;
    for (const auto& [name, value] : choices) {
      if (node.IsScalar() && node.Scalar() == name) return value;
      known += (known.empty() ? "" : " | ") + name;
    }
    fail(node, key, "expected " + known + ", got " + describe(node));
  }

  std::vector<std::string> texts(const YAML::Node& node, const std::string& key) const {
    if (node.IsScalar()) return {node.Scalar()};
    if (!node.IsSequence()) fail(node, key, "expected a text or a list, got " + describe(node));
    std::vector<std::string> all;
    for (const YAML::Node& item : node) all.push_back(text(item, key));
    return all;
  }

  std::map<std::string, std::string> map_of_texts(const YAML::Node& node,
                                                  const std::string& key) const {
    if (!node.IsMap()) fail(node, key, "expected a map, got " + describe(node));
    std::map<std::string, std::string> all;
    for (const auto& entry : node)
      all[text(entry.first, key)] = text(entry.second, key + "." + text(entry.first, key));
    return all;
  }

  // Calls the reader of each key of a map; refuses unknown and repeated ones.
  using Keys =
      std::vector<std::pair<std::string, std::function<void(const YAML::Node&, std::string)>>>;
  void map(const YAML::Node& node, const std::string& prefix, const Keys& keys) const {
    if (!node.IsMap()) fail(node, prefix, "expected a map of keys, got " + describe(node));
    std::map<std::string, int> seen;
    for (const auto& entry : node) {
      const std::string name = text(entry.first, prefix);
      const std::string key = prefix.empty() ? name : prefix + "." + name;
      const auto [earlier, first] = seen.emplace(name, entry.first.Mark().line + 1);
      if (!first)
        fail(entry.first, key, "is given twice, first on line " + std::to_string(earlier->second));
      const auto found = std::find_if(keys.begin(), keys.end(),
                                      [&](const auto& known) { return known.first == name; });
      if (found == keys.end()) {
        std::string known;
        for (const auto& [each, read] : keys) known += " " + each;
        fail(entry.first, key, "unknown key; known:" + known);
      }
      found->second(entry.second, key);
    }
  }

  // A template over these variables, compiled once to see that it is one; its own line numbers
  // follow the file's place.
  std::string jinja(const YAML::Node& node, const std::string& key,
                    const std::vector<std::string>& variables) const {
    std::string source = text(node, key);
    std::vector<JinjaTemplate::Name> needed;
    try {
      needed = JinjaTemplate(source, "template", prompt_template_options()).needed_names();
    } catch (const std::invalid_argument& error) {
      fail(node, key, error.what());
    }
    for (const JinjaTemplate::Name& name : needed) {
      if (std::find(variables.begin(), variables.end(), name.text) != variables.end()) continue;
      fail(node, key,
           "template:" + std::to_string(name.line) + ": '" + name.text +
               "' is undefined; known:" + listed(variables));
    }
    return source;
  }

  static std::string listed(const std::vector<std::string>& names) {
    std::string list;
    for (const std::string& name : names) list += " " + name;
    return list;
  }

 private:
  template <class Number>
  static std::string shown(Number value) {
    std::string text = std::to_string(value);
    if constexpr (std::is_floating_point_v<Number>) {
      text.erase(text.find_last_not_of('0') + 1);
      if (text.ends_with('.')) text.pop_back();
    }
    return text;
  }

  fs::path file_;
};

const std::vector<std::pair<std::string, Task>>& task_kinds() {
  static const std::vector<std::pair<std::string, Task>> kinds = [] {
    std::vector<std::pair<std::string, Task>> all;
    for (const Task task : {Task::kMmluPro, Task::kGpqa, Task::kMath, Task::kGsm8k})
      all.emplace_back(task_name(task), task);
    return all;
  }();
  return kinds;
}

const std::vector<std::pair<std::string, OptionRule::Order>> kOrders = {
    {"file", OptionRule::Order::kFile},
    {"item", OptionRule::Order::kItem},
    {"gpqa_authors", OptionRule::Order::kGpqaAuthors},
    {"simple_evals", OptionRule::Order::kSimpleEvals},
};
const std::vector<std::pair<std::string, NoAnswer>> kNoAnswers = {
    {"wrong", NoAnswer::kWrong},
    {"chance", NoAnswer::kChance},
};

template <class Value>
std::string name_of(const std::vector<std::pair<std::string, Value>>& names, Value value) {
  for (const auto& [name, each] : names)
    if (each == value) return name;
  throw std::logic_error("task: a value without a name");
}

void read_data(const Reader& reader, const YAML::Node& node, ItemSource* source) {
  reader.map(
      node, "data",
      {{"set", [&](const YAML::Node& n,
                   const std::string& k) { source->task = reader.choice(n, k, task_kinds()); }},
       {"path",
        [&](const YAML::Node& n, const std::string& k) { source->path = reader.text(n, k); }},
       {"split",
        [&](const YAML::Node& n, const std::string& k) { source->split = reader.text(n, k); }},
       {"level", [&](const YAML::Node& n,
                     const std::string& k) { source->level = reader.number<int>(n, k, 1, 5); }},
       {"published", [&](const YAML::Node& n, const std::string& k) {
          source->published = reader.boolean(n, k);
        }}});
  if (!node["set"]) reader.fail(node, "data.set", "missing");
}

void read_shots(const Reader& reader, const YAML::Node& node, ShotSource* shots) {
  const std::vector<std::string>& fields = template_variable_names();
  reader.map(
      node, "prompt.shots",
      {{"count", [&](const YAML::Node& n,
                     const std::string& k) { shots->count = reader.number<int>(n, k, 0, 1000); }},
       {"split",
        [&](const YAML::Node& n, const std::string& k) { shots->split = reader.text(n, k); }},
       {"same_category",
        [&](const YAML::Node& n, const std::string& k) {
          shots->same_category = reader.boolean(n, k);
        }},
       {"prompt_tokens",
        [&](const YAML::Node& n, const std::string& k) {
          shots->prompt_tokens = reader.number<int64_t>(n, k, 0, INT64_MAX);
        }},
       {"fixed", [&](const YAML::Node& n, const std::string& k) {
          if (!n.IsSequence())
            reader.fail(n, k, "expected a list of maps, got " + Reader::describe(n));
          for (const YAML::Node& shot : n) {
            shots->fixed.push_back(reader.map_of_texts(shot, k));
            for (const auto& [name, text] : shots->fixed.back()) {
              if (std::find(fields.begin(), fields.end(), name) != fields.end()) continue;
              reader.fail(shot, k, "unknown field '" + name + "'; known:" + Reader::listed(fields));
            }
          }
        }}});
  if (shots->fixed.empty() == shots->split.empty()) {
    reader.fail(node, "prompt.shots",
                "expected either `split`, where shots are taken from, or `fixed` ones");
  }
  if (!shots->fixed.empty() && shots->same_category)
    reader.fail(node["same_category"], "prompt.shots.same_category", "is a key of `split` only");
  if (!shots->fixed.empty() && !node["count"]) shots->count = static_cast<int>(shots->fixed.size());
  if (!shots->fixed.empty() && shots->count > static_cast<int>(shots->fixed.size())) {
    reader.fail(node["count"], "prompt.shots.count",
                "expected at most the " + std::to_string(shots->fixed.size()) +
                    " fixed ones, got " + std::to_string(shots->count));
  }
  if (shots->fixed.empty() && shots->count == 0)
    reader.fail(node, "prompt.shots.count", "missing; expected 1 or more");
}

void read_prompt(const Reader& reader, const YAML::Node& node, PromptForm* prompt) {
  const std::vector<std::string>& of_item = template_variable_names();
  // The head stands before all questions of a category.
  const std::vector<std::string> of_category = {"category"};
  reader.map(
      node, "prompt",
      {{"head", [&](const YAML::Node& n,
                    const std::string& k) { prompt->head = reader.jinja(n, k, of_category); }},
       {"shot", [&](const YAML::Node& n,
                    const std::string& k) { prompt->shot = reader.jinja(n, k, of_item); }},
       {"question", [&](const YAML::Node& n,
                        const std::string& k) { prompt->question = reader.jinja(n, k, of_item); }},
       {"shots",
        [&](const YAML::Node& n, const std::string&) { read_shots(reader, n, &prompt->shots); }}});
  if (prompt->question.empty()) reader.fail(node, "prompt.question", "missing");
  if ((prompt->shots.count > 0) == prompt->shot.empty()) {
    reader.fail(node, "prompt.shot",
                prompt->shot.empty() ? "missing: there are shots" : "there are no shots");
  }
}

void read_options(const Reader& reader, const YAML::Node& node, OptionRule* options) {
  reader.map(
      node, "options",
      {{"order", [&](const YAML::Node& n,
                     const std::string& k) { options->order = reader.choice(n, k, kOrders); }},
       {"seed",
        [&](const YAML::Node& n, const std::string& k) {
          options->seed = reader.number<uint64_t>(n, k, 0, UINT64_MAX);
        }},
       {"rounds",
        [&](const YAML::Node& n, const std::string& k) {
          options->rounds = reader.number<int>(n, k, 1, 1000);
        }},
       {"clean", [&](const YAML::Node& n, const std::string& k) {
          options->clean =
              reader.choice<std::string>(n, k, {{"none", ""}, {"lm_eval_gpqa", "lm_eval_gpqa"}});
        }}});
  if (options->seed != 0 && options->order != OptionRule::Order::kGpqaAuthors)
    reader.fail(node["seed"], "options.seed", "is a key of order: gpqa_authors only");
  if (options->rounds != 1 && options->order != OptionRule::Order::kSimpleEvals)
    reader.fail(node["rounds"], "options.rounds", "is a key of order: simple_evals only");
}

void read_generation(const Reader& reader, const YAML::Node& node, GenerationLimits* generation) {
  reader.map(
      node, "generation",
      {{"max_tokens",
        [&](const YAML::Node& n, const std::string& k) {
          generation->max_tokens = reader.number<int64_t>(n, k, 1, 1'000'000'000);
        }},
       {"stop",
        [&](const YAML::Node& n, const std::string& k) {
          generation->stop = reader.texts(n, k);
          for (const std::string& stop : generation->stop)
            if (stop.empty()) reader.fail(n, k, "a stop text is empty");
        }},
       {"think_end", [&](const YAML::Node& n,
                         const std::string& k) { generation->think_end = reader.text(n, k); }},
       {"temperature",
        [&](const YAML::Node& n, const std::string& k) {
          generation->temperature = reader.number<double>(n, k, 0, 1000);
        }},
       {"top_p",
        [&](const YAML::Node& n, const std::string& k) {
          generation->top_p = reader.number<double>(n, k, 0, 1);
          if (generation->top_p == 0) reader.fail(n, k, "expected more than 0");
        }},
       {"top_k",
        [&](const YAML::Node& n, const std::string& k) {
          generation->top_k = reader.number<int>(n, k, 0, 1'000'000'000);
        }},
       {"repeats", [&](const YAML::Node& n, const std::string& k) {
          generation->repeats = reader.number<int>(n, k, 1, 1'000'000);
        }}});
}

void read_answer(const Reader& reader, const YAML::Node& node, TaskSpec* task) {
  reader.map(node, "answer",
             {{"rules",
               [&](const YAML::Node& n, const std::string& k) {
                 task->rules = reader.texts(n, k);
                 for (const std::string& rule : task->rules) {
                   if (is_answer_rule(rule)) continue;
                   std::string known;
                   for (const AnswerRule& each : answer_rules())
                     known.append(" ").append(each.name);
                   reader.fail(n, k, "unknown rule '" + rule + "'; known:" + known);
                 }
               }},
              {"compare",
               [&](const YAML::Node& n, const std::string& k) {
                 task->compare = reader.texts(n, k);
                 const std::vector<CompareRule> known_rules = compare_rules();
                 for (const std::string& rule : task->compare) {
                   if (std::any_of(known_rules.begin(), known_rules.end(),
                                   [&](const CompareRule& each) { return each.name == rule; }))
                     continue;
                   std::string known;
                   for (const CompareRule& each : known_rules) known.append(" ").append(each.name);
                   reader.fail(n, k, "unknown rule '" + rule + "'; known:" + known);
                 }
               }},
              {"no_answer", [&](const YAML::Node& n, const std::string& k) {
                 task->no_answer = reader.choice(n, k, kNoAnswers);
               }}});
  if (task->rules.empty()) reader.fail(node, "answer.rules", "missing");
  const bool letters = task->source.task == Task::kMmluPro || task->source.task == Task::kGpqa;
  for (const AnswerRule& rule : answer_rules()) {
    if (std::find(task->rules.begin(), task->rules.end(), rule.name) == task->rules.end()) continue;
    if (rule.letters != letters) {
      reader.fail(node["rules"], "answer.rules",
                  std::string(rule.name) + " finds " + (rule.letters ? "letters" : "free answers") +
                      ", but answers to " + task_name(task->source.task) + " are " +
                      (letters ? "letters" : "free"));
    }
  }
  if (letters != task->compare.empty()) {
    reader.fail(node, "answer.compare",
                letters ? "letters are compared as they are; expected no such key" : "missing");
  }
  if (!letters && task->no_answer == NoAnswer::kChance)
    reader.fail(node["no_answer"], "answer.no_answer", "free answers have no chance level");
}

YAML::Node parse_yaml(const fs::path& file, const Reader& reader) {
  std::ifstream stream(file, std::ios::binary);
  if (fs::is_directory(file)) {
    throw std::runtime_error(file.string() +
                             ": is a folder; expected a task file (.yaml), or the name of one in " +
                             kTaskFolder);
  }
  if (!stream) throw std::runtime_error(file.string() + ": cannot be read");
  const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  try {
    return YAML::Load(text);
  } catch (const YAML::Exception& error) {
    reader.fail_at(error.mark, "", "not valid YAML: " + error.msg);
  }
}

fs::path find_task(const fs::path& given) {
  const bool bare =
      !given.has_parent_path() && given.extension() != ".yaml" && given.extension() != ".yml";
  if (!bare) return given;
  const fs::path file = fs::path(kTaskFolder) / (given.string() + ".yaml");
  if (fs::is_regular_file(file)) return file;
  std::vector<std::string> known;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(kTaskFolder, missing))
    if (entry.path().extension() == ".yaml") known.push_back(entry.path().stem().string());
  std::sort(known.begin(), known.end());
  std::string list;
  for (const std::string& name : known) list += " " + name;
  throw std::invalid_argument("task '" + given.string() + "': there is no " + file.string() +
                              (list.empty()
                                   ? "; that folder, below the working directory, has no tasks"
                                   : "; known:" + list));
}

void emit_texts(YAML::Emitter& out, const char* key, const std::vector<std::string>& texts) {
  out << YAML::Key << key << YAML::Value << YAML::Flow << YAML::BeginSeq;
  for (const std::string& text : texts) out << YAML::DoubleQuoted << text;
  out << YAML::EndSeq;
}

void emit_text(YAML::Emitter& out, const char* key, const std::string& text) {
  out << YAML::Key << key << YAML::Value << YAML::DoubleQuoted << text;
}

void emit_map(YAML::Emitter& out, const std::map<std::string, std::string>& map) {
  out << YAML::BeginMap;
  for (const auto& [key, text] : map)
    out << YAML::Key << key << YAML::Value << YAML::DoubleQuoted << text;
  out << YAML::EndMap;
}

template <class Value>
void emit(YAML::Emitter& out, const char* key, const Value& value) {
  out << YAML::Key << key << YAML::Value << value;
}

// Shortest decimal that reads back as the same number.
std::string decimal(double value) {
  char buffer[64];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

std::string definition_of(const TaskSpec& task) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  emit_text(out, "name", task.name);
  emit(out, "version", task.version);
  emit_text(out, "about", task.about);
  emit(out, "private", task.private_data);
  out << YAML::Key << "data" << YAML::Value << YAML::BeginMap;
  emit(out, "set", task_name(task.source.task));
  emit_text(out, "split", task.source.split);
  if (task.source.level) emit(out, "level", *task.source.level);
  emit(out, "published", task.source.published);
  out << YAML::EndMap;
  out << YAML::Key << "prompt" << YAML::Value << YAML::BeginMap;
  emit_text(out, "head", task.prompt.head);
  emit_text(out, "shot", task.prompt.shot);
  emit_text(out, "question", task.prompt.question);
  const ShotSource& shots = task.prompt.shots;
  if (shots.count > 0) {
    out << YAML::Key << "shots" << YAML::Value << YAML::BeginMap;
    emit(out, "count", shots.count);
    if (!shots.split.empty()) {
      emit_text(out, "split", shots.split);
      emit(out, "same_category", shots.same_category);
    }
    emit(out, "prompt_tokens", shots.prompt_tokens);
    if (!shots.fixed.empty()) {
      out << YAML::Key << "fixed" << YAML::Value << YAML::BeginSeq;
      for (const auto& shot : shots.fixed) emit_map(out, shot);
      out << YAML::EndSeq;
    }
    out << YAML::EndMap;
  }
  out << YAML::EndMap;
  out << YAML::Key << "options" << YAML::Value << YAML::BeginMap;
  emit(out, "order", name_of(kOrders, task.options.order));
  emit(out, "seed", task.options.seed);
  emit(out, "rounds", task.options.rounds);
  emit(out, "clean", task.options.clean.empty() ? "none" : task.options.clean);
  out << YAML::EndMap;
  out << YAML::Key << "chat" << YAML::Value << YAML::BeginMap;
  emit(out, "use", task.chat.use);
  emit_text(out, "system", task.chat.system);
  out << YAML::Key << "variables" << YAML::Value;
  emit_map(out, task.chat.variables);
  out << YAML::EndMap;
  out << YAML::Key << "generation" << YAML::Value << YAML::BeginMap;
  emit(out, "max_tokens", task.generation.max_tokens);
  emit_texts(out, "stop", task.generation.stop);
  emit_text(out, "think_end", task.generation.think_end);
  emit(out, "temperature", decimal(task.generation.temperature));
  emit(out, "top_p", decimal(task.generation.top_p));
  emit(out, "top_k", task.generation.top_k);
  // Repeats may grow when a run is resumed, so they are no part of what a task is.
  out << YAML::EndMap;
  out << YAML::Key << "answer" << YAML::Value << YAML::BeginMap;
  emit_texts(out, "rules", task.rules);
  if (!task.compare.empty()) emit_texts(out, "compare", task.compare);
  emit(out, "no_answer", name_of(kNoAnswers, task.no_answer));
  out << YAML::EndMap << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace

TaskSpec load_task(const fs::path& file) {
  TaskSpec task;
  task.file = find_task(file);
  const Reader reader(task.file);
  const YAML::Node root = parse_yaml(task.file, reader);
  using Node = YAML::Node;
  using Text = std::string;
  reader.map(
      root, "",
      {{"name", [&](const Node& n, const Text& k) { task.name = reader.text(n, k); }},
       {"version", [&](const Node& n,
                       const Text& k) { task.version = reader.number<int>(n, k, 1, 1'000'000); }},
       {"about", [&](const Node& n, const Text& k) { task.about = reader.text(n, k); }},
       {"private", [&](const Node& n, const Text& k) { task.private_data = reader.boolean(n, k); }},
       {"data", [&](const Node& n, const Text&) { read_data(reader, n, &task.source); }},
       {"prompt", [&](const Node& n, const Text&) { read_prompt(reader, n, &task.prompt); }},
       {"options", [&](const Node& n, const Text&) { read_options(reader, n, &task.options); }},
       {"chat",
        [&](const Node& n, const Text& k) {
          reader.map(n, k,
                     {{"use", [&](const Node& v,
                                  const Text& key) { task.chat.use = reader.boolean(v, key); }},
                      {"system", [&](const Node& v,
                                     const Text& key) { task.chat.system = reader.text(v, key); }},
                      {"variables", [&](const Node& v, const Text& key) {
                         task.chat.variables = reader.map_of_texts(v, key);
                       }}});
        }},
       {"generation",
        [&](const Node& n, const Text&) { read_generation(reader, n, &task.generation); }},
       // Read behind the loop: its rules depend on the data set.
       {"answer", [](const Node&, const Text&) {}}});
  for (const char* key : {"name", "version", "data", "prompt", "answer"})
    if (!root[key]) reader.fail(root, key, "missing");
  read_answer(reader, root["answer"], &task);
  const bool allowed =
      !task.name.empty() && std::all_of(task.name.begin(), task.name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
      });
  if (!allowed) {
    reader.fail(root["name"], "name",
                "expected letters a to z, digits, _ and -, got '" + task.name + "'");
  }
  const bool options =
      task.options.order != OptionRule::Order::kFile || !task.options.clean.empty();
  if (options && (task.source.task == Task::kMath || task.source.task == Task::kGsm8k))
    reader.fail(root["options"], "options", task_name(task.source.task) + " has no options");
  const bool gpqa_order = task.options.order == OptionRule::Order::kGpqaAuthors ||
                          task.options.order == OptionRule::Order::kSimpleEvals;
  if (gpqa_order && task.source.task != Task::kGpqa)
    reader.fail(root["options"], "options.order", "this order is one of gpqa only");
  update_identity(&task);
  return task;
}

void update_identity(TaskSpec* task) {
  task->definition = definition_of(*task);
  task->sha256 = sha256_hex(task->definition);
}

std::vector<TaskListing> list_tasks(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing))
    if (entry.path().extension() == ".yaml") files.push_back(entry.path());
  if (files.empty()) {
    throw std::runtime_error(
        folder.string() +
        ": no tasks (*.yaml) there; the folder is looked for below the working "
        "directory");
  }
  std::sort(files.begin(), files.end());
  std::vector<TaskListing> tasks;
  for (const fs::path& file : files) {
    const TaskSpec task = load_task(file);
    std::string data = task_name(task.source.task) + " " + task.source.split;
    if (task.source.level) data += ", level " + std::to_string(*task.source.level);
    tasks.push_back({task.name, task.version, std::move(data), task.about, file});
  }
  return tasks;
}

}  // namespace replayeval
