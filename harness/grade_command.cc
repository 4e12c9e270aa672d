#include "harness/grade_command.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>

#include "base/hash.h"
#include "datasets/chat_template.h"
#include "datasets/task.h"
#include "datasets/tokenizer.h"
#include "datasets/utf8.h"
#include "harness/build_info.h"
#include "harness/report_command.h"
#include "harness/task_results.h"
#include "models/hub.h"
#include "reports/answer_statistics.h"
#include "reports/answer_tables.h"
#include "reports/files.h"
#include "reports/run_folder.h"
#include "reports/samples.h"
#include "reports/schema.h"
#include "reports/tables.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void reject(const std::string& message) {
  throw std::invalid_argument("grade: " + message);
}

PromptSet prompts_of(TaskSpec* task, const GradeOptions& options) {
  if (!options.data.empty()) task->source.path = options.data;
  std::unique_ptr<ChatTemplate> chat;
  std::unique_ptr<Tokenizer> tokenizer;
  if (!options.model.empty()) {
    const fs::path folder = find_model(options.model);
    chat = load_chat_template(folder);
    if (task->prompt.shots.prompt_tokens > 0) tokenizer = load_tokenizer(folder);
  }
  return load_prompts(*task, options.seed, chat.get(), tokenizer.get());
}

/// Refuses to write over what a run folder keeps, or over the run that is read.
void check_out(const GradeOptions& options) {
  if (options.out.empty()) return;
  const fs::path out = options.out;
  std::error_code error;
  const bool same = !options.run.empty() && fs::equivalent(out, options.run, error);
  const fs::path target = fs::weakly_canonical(out, error);
  if (same || (target.filename() == "report.h5" && RunFolder::holds_run(target.parent_path()))) {
    reject("-o " + options.out + ": expected a new report, got the " +
           (same ? "run that is read" : "report of the run in " + out.parent_path().string()) +
           "; choose another name, such as regraded.h5");
  }
}

// ---- import ----

/// Finds the items of samples.
class ItemFinder {
 public:
  explicit ItemFinder(const PromptSet& prompts) {
    for (size_t i = 0; i < prompts.items.size(); ++i) {
      by_id_[prompts.items[i].item.id] = i;
      by_row_[static_cast<int64_t>(prompts.items[i].item.row)] = i;
    }
  }
  std::optional<size_t> find(const Sample& sample) const {
    for (const std::string& id : sample.ids) {
      const auto found = by_id_.find(id);
      if (found != by_id_.end()) return found->second;
    }
    if (!sample.ids.empty()) return std::nullopt;
    const auto found = by_row_.find(sample.row);
    if (found == by_row_.end()) return std::nullopt;
    return found->second;
  }

 private:
  std::map<std::string, size_t> by_id_;
  std::map<int64_t, size_t> by_row_;
};

std::string named(const Sample& sample) {
  return sample.ids.empty() ? "doc_id " + std::to_string(sample.row) : "id '" + sample.ids[0] + "'";
}

std::string and_more(int64_t count) {
  return count > 1 ? " and " + std::to_string(count - 1) + " more" : "";
}

/// A file's samples with the items they answer, in the task's order.
struct Import {
  std::string file;
  std::string sha256;
  std::string state;
  std::vector<std::pair<size_t, Sample>> answers;  // index into PromptSet::items
  int64_t other_prompts = 0;
  int64_t without_hash = 0;
};

Import read_import(const std::string& file, const std::string& state, const TaskSpec& task,
                   const PromptSet& prompts, const GradeOptions& options) {
  Import out{file, "", state, {}, 0, 0};
  const ItemFinder finder(prompts);
  std::map<std::pair<size_t, int>, size_t> lines;
  int64_t unknown = 0;
  std::string first_unknown, first_other;
  std::vector<Sample> samples = read_samples(file);
  out.sha256 = sha256_file(file);
  for (Sample& sample : samples) {
    const std::string place = file + ":" + std::to_string(sample.line) + ": ";
    const std::optional<size_t> item = finder.find(sample);
    if (!item) {
      if (unknown++ == 0) first_unknown = place + named(sample);
      continue;
    }
    const auto [known, fresh] = lines.emplace(std::pair(*item, sample.repeat), sample.line);
    if (!fresh) {
      reject(place + "expected one answer to each item and repeat, got " + named(sample) +
             ", repeat " + std::to_string(sample.repeat) + " again, after line " +
             std::to_string(known->second) + "; number the repeats, or remove one");
    }
    const PromptedItem& asked = prompts.items[*item];
    if (sample.prompt_sha256.empty()) {
      ++out.without_hash;
    } else if (sample.prompt_sha256 != asked.prompt_sha256) {
      if (out.other_prompts++ == 0) {
        first_other = place + named(sample) + ": expected a prompt with SHA-256 " +
                      asked.prompt_sha256.substr(0, 12) + "..., got " +
                      sample.prompt_sha256.substr(0, 12) + "...";
      }
    }
    out.answers.emplace_back(*item, std::move(sample));
  }
  if (unknown > 0) {
    std::string known;
    for (size_t i = 0; i < std::min<size_t>(3, prompts.items.size()); ++i)
      known += (i == 0 ? "'" : "', '") + prompts.items[i].item.id;
    reject(first_unknown + and_more(unknown) + ": expected ids of the " +
           std::to_string(prompts.items.size()) + " items of task " + task.name + " (" + known +
           "', ...), got others; is this the right --task and --data?");
  }
  if (out.other_prompts > 0 && !options.allow_prompts) {
    reject(first_other + "; " + std::to_string(out.other_prompts) + " of " +
           std::to_string(lines.size()) + " answers are to other prompts than those of task " +
           task.name + "; ask with the task's prompts, or accept it with --allow prompts");
  }
  std::stable_sort(out.answers.begin(), out.answers.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first, a.second.repeat) < std::pair(b.first, b.second.repeat);
  });
  return out;
}

/// The prompt's hash as far as every file agrees on one for the item, empty where a file states
/// none: what is not known to be the same prompt must not compare as the same.
std::string prompt_hash(const std::vector<Import>& imports, size_t item) {
  std::optional<std::string> hash;
  for (const Import& import : imports) {
    for (const auto& [index, sample] : import.answers) {
      if (index != item) continue;
      if (!hash) hash = sample.prompt_sha256;
      if (*hash != sample.prompt_sha256) return {};
    }
  }
  return hash.value_or("");
}

std::string import_answers(const GradeOptions& options) {
  if (options.tasks.size() != 1)
    reject("--import: expected one --task, got " + std::to_string(options.tasks.size()));
  if (options.states.size() != options.imports.size()) {
    reject("--import: expected one --state for each of " + std::to_string(options.imports.size()) +
           " files, got " + std::to_string(options.states.size()) +
           "; give --import FILE --state NAME in pairs");
  }
  if (options.out.empty()) reject("--import: expected -o with the name of the report");
  std::set<std::string> names;
  for (const std::string& state : options.states) {
    if (state.empty()) reject("--state: expected a name, got nothing");
    const bool printable = std::ranges::none_of(
        state, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; });
    if (!printable || find_invalid_utf8(state) != std::string::npos)
      reject("--state: expected a name of one line of UTF-8");
    if (!names.insert(state).second)
      reject("--state: expected a name of its own for each file, got '" + state + "' twice");
  }
  const std::string baseline = options.baseline.empty() ? options.states[0] : options.baseline;
  if (!names.contains(baseline)) {
    std::string known;
    for (const std::string& state : options.states) known += " " + state;
    reject("--baseline: expected one of the states" + known + ", got '" + baseline + "'");
  }

  TaskSpec task = load_task(options.tasks[0]);
  const PromptSet prompts = prompts_of(&task, options);
  for (const std::string& warning : prompts.warnings) std::fprintf(stderr, "%s\n", warning.c_str());
  std::vector<Import> imports;
  for (size_t i = 0; i < options.imports.size(); ++i)
    imports.push_back(read_import(options.imports[i], options.states[i], task, prompts, options));

  Report report;
  const BuildInfo build = build_info();
  RunInfo& run = report.run;
  run.job = "score";
  run.model = options.label;
  run.data = task.source.path.string();
  run.data_sha256 = prompts.data_sha256;
  run.revision = build.revision;
  run.compiler = build.compiler;
  run.versions = build.versions;
  run.baseline = baseline;
  run.window = 0;
  run.seed = options.seed;
  run.tasks = {task_info(task)};
  run.created = utc_now();
  run.experiment = "import:\n";
  for (const Import& import : imports) {
    run.experiment += "- {file: \"" + import.file + "\", sha256: " + import.sha256 + ", state: \"" +
                      import.state + "\"}\n";
  }
  run.experiment += "task: " + task.name + "\n";

  std::set<size_t> answered;
  for (const Import& import : imports) {
    for (const auto& [item, sample] : import.answers) {
      answered.insert(item);
      run.repeats = std::max(run.repeats, sample.repeat + 1);
    }
  }
  std::map<size_t, int32_t> place;
  for (const size_t i : answered) {
    place[i] = static_cast<int32_t>(report.items.size());
    ItemInfo item = item_info(task, prompts.items[i]);
    item.prompt_sha256 = prompt_hash(imports, i);
    report.items.push_back(std::move(item));
  }
  std::string text;
  bool complete = true;
  for (const Import& import : imports) {
    StateReport state;
    state.info.name = import.state;
    state.info.definition = "answers of another program, called " + import.state;
    state.info.sha256 = sha256_hex(state.info.definition);
    state.info.window = 0;
    for (const auto& [index, sample] : import.answers) {
      Answer answer;
      answer.item = place.at(index);
      answer.repeat = sample.repeat;
      answer.text = sample.text;
      answer.tokens = sample.tokens;
      answer.finish_reason = sample.finish_reason;
      answer.token_ids = sample.token_ids;
      grade_into(task, prompts.items[index], &answer);
      state.answers.push_back(std::move(answer));
    }
    complete =
        complete && state.answers.size() == report.items.size() * static_cast<size_t>(run.repeats);
    report.states.push_back(std::move(state));
    text += import.file + ": " + std::to_string(import.answers.size()) + " answers to " +
            std::to_string(answered.size()) + " of the " + std::to_string(prompts.items.size()) +
            " items of task " + task.name;
    if (import.other_prompts > 0) {
      text += ", " + std::to_string(import.other_prompts) + " to other prompts";
    } else if (import.without_hash > 0) {
      text += ", " + std::to_string(import.without_hash) +
              " of them without a prompt or its hash, matched by id alone";
    }
    text += "\n";
  }
  if (complete) run.finished = utc_now();
  const fs::path out = options.out;
  if (out.has_parent_path()) make_writable_folder(out.parent_path());
  write_report(report, out);
  return text + "\n" + as_text(answer_tables(report, answer_statistics(report))[0]) + "\n" +
         options.out + "\n";
}

// ---- grade again ----

/// The stored item as the graders see it: gold and number of options as stored; the options' texts
/// from the data where it is at hand, for the rules that read them.
PromptedItem stored_item(const ItemInfo& info, const PromptedItem* loaded) {
  PromptedItem item;
  item.item.id = info.id;
  item.item.task = info.task;
  item.item.category = info.category;
  item.item.level = info.level;
  item.item.gold = info.gold;
  item.gold = info.gold;
  item.option_order.assign(info.option_order.begin(), info.option_order.end());
  for (int i = 0; i < info.options; ++i) {
    // A text that no answer holds stands for one that is not known.
    item.item.options.push_back(loaded != nullptr
                                    ? loaded->item.options[static_cast<size_t>(i)]
                                    : std::string("\x01option ") + static_cast<char>('A' + i));
    if (info.gold == std::string(1, static_cast<char>('A' + i))) item.item.gold_option = i;
  }
  if (loaded != nullptr) {
    item.prompt = loaded->prompt;
    item.item.question = loaded->item.question;
    item.item.solution = loaded->item.solution;
  }
  return item;
}

/// Whether the data's item is the stored one.
bool agrees(const ItemInfo& info, const PromptedItem& loaded) {
  return info.gold == loaded.gold && info.options == static_cast<int>(loaded.item.options.size()) &&
         std::equal(info.option_order.begin(), info.option_order.end(), loaded.option_order.begin(),
                    loaded.option_order.end());
}

std::string verdict(const std::string& extracted, const std::string& rule, bool correct) {
  return std::string(correct ? "right: " : "wrong: ") +
         (extracted.empty() ? "nothing extracted" : "'" + extracted + "' by " + rule);
}

std::string grade_again(const GradeOptions& options) {
  Report report = read_run(options.run);
  if (!has_answers(report)) {
    reject(options.run + ": expected a run with graded answers, got one without; it is of job " +
           report.run.job);
  }
  std::map<std::string, TaskSpec> tasks;
  for (const std::string& file : options.tasks) {
    TaskSpec task = load_task(file);
    const std::string name = task.name;
    if (!tasks.emplace(name, std::move(task)).second)
      reject("--task: task " + name + " is given twice");
  }
  std::set<std::string> used;
  for (const ItemInfo& item : report.items) used.insert(item.task);
  for (const auto& [name, task] : tasks) {
    if (!used.contains(name)) {
      std::string known;
      for (const std::string& other : used) known += " " + other;
      reject("--task: expected tasks of the run (" + known.substr(1) + "), got " + name);
    }
  }
  std::string text;
  Table changes{"Verdicts that changed", {"state", "item", "gold", "was", "is"}, {}};
  changes.left = {1, 2, 3, 4};
  std::map<std::string, std::pair<int64_t, int64_t>> counts;  // by task: answers, changed
  for (const std::string& name : used) {
    if (!tasks.contains(name)) tasks.emplace(name, load_task(name));
    TaskSpec& task = tasks.at(name);
    std::map<std::string, PromptedItem> loaded;
    try {
      GradeOptions with_seed = options;
      with_seed.seed = report.run.seed;
      for (PromptedItem& item : prompts_of(&task, with_seed).items)
        loaded.emplace(item.item.id, std::move(item));
    } catch (const std::runtime_error& error) {
      std::fprintf(stderr, "%s\ntask %s: graded without the texts of its options\n", error.what(),
                   name.c_str());
    }
    for (TaskInfo& info : report.run.tasks) {
      if (info.name != name) continue;
      if (info.sha256 != task.sha256) {
        auto identity = [](int version, const std::string& sha256) {
          return "version " + std::to_string(version) + " (sha256 " + sha256.substr(0, 12) + ")";
        };
        text += "task " + name + ": graded as " + identity(task.version, task.sha256) + ", was " +
                identity(info.version, info.sha256) + "\n";
      }
      info = task_info(task);
    }
    int64_t others = 0;
    std::vector<std::optional<PromptedItem>> items(report.items.size());
    for (size_t i = 0; i < report.items.size(); ++i) {
      ItemInfo& info = report.items[i];
      if (info.task != name) continue;
      const auto found = loaded.find(info.id);
      const bool same = found != loaded.end() && agrees(info, found->second);
      others += found != loaded.end() && !same ? 1 : 0;
      items[i] = stored_item(info, same ? &found->second : nullptr);
      info.grading = item_info(task, *items[i]).grading;
    }
    if (others > 0) {
      std::fprintf(stderr,
                   "task %s: %" PRId64
                   " items have another gold answer or order of options in the data than in the "
                   "report; graded as the report has them\n",
                   name.c_str(), others);
    }
    for (StateReport& state : report.states) {
      for (Answer& answer : state.answers) {
        const std::optional<PromptedItem>& item = items[static_cast<size_t>(answer.item)];
        if (!item) continue;
        Answer graded = answer;
        grade_into(task, *item, &graded);
        auto& [total, changed] = counts[name];
        ++total;
        if (graded.extracted != answer.extracted || graded.correct != answer.correct) {
          ++changed;
          const std::string repeat =
              report.run.repeats > 1 ? "/" + std::to_string(answer.repeat) : "";
          changes.rows.push_back({state.info.name, name + "/" + item->item.id + repeat, item->gold,
                                  verdict(answer.extracted, answer.rule, answer.correct),
                                  verdict(graded.extracted, graded.rule, graded.correct)});
        }
        answer = std::move(graded);
      }
    }
  }
  if (!changes.rows.empty()) text += as_text(changes) + "\n";
  for (const auto& [name, count] : counts) {
    text += "task " + name + ": " + std::to_string(count.first) + " answers graded, " +
            std::to_string(count.second) + " verdicts changed\n";
  }
  text += "\n" + as_text(answer_tables(report, answer_statistics(report))[0]);
  if (options.out.empty()) return text;
  const fs::path out = options.out;
  if (out.has_parent_path()) make_writable_folder(out.parent_path());
  write_report(report, out);
  return text + "\n" + options.out + "\n";
}

}  // namespace

std::string grade_answers(const GradeOptions& options) {
  if (options.run.empty() == options.imports.empty())
    reject("expected either a run or --import FILE, got " +
           std::string(options.run.empty() ? "neither" : "both"));
  if (!options.run.empty() && !options.states.empty())
    reject("--state: expected with --import only; a run's states are all graded again");
  check_out(options);
  return options.run.empty() ? import_answers(options) : grade_again(options);
}

}  // namespace replayeval
