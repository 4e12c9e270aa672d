#include "harness/answer_documents.h"

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>

#include "base/hash.h"
#include "harness/report_command.h"
#include "harness/score.h"
#include "reports/results.h"

namespace replayeval {
namespace {

/// SHA-256 over "<id> " of every token.
std::string tokens_sha256(const std::vector<int32_t>& tokens) {
  std::string text;
  for (int32_t token : tokens) text += std::to_string(token) + " ";
  return sha256_hex(text);
}

/// The items of the report's tasks as they are asked now, by task and id.
using ItemsByName = std::map<std::pair<std::string, std::string>, const AskedItem*>;

std::string task_names(const std::vector<TaskInfo>& tasks) {
  std::string names;
  for (const TaskInfo& task : tasks) names += (names.empty() ? "" : ", ") + task.name;
  return names;
}

}  // namespace

AnswerDocuments load_answer_documents(const Experiment& experiment, const Tokenizer& tokenizer) {
  const std::string path = experiment.data.path.string();
  const auto refuse = [&](const std::string& key, const std::string& message) {
    throw std::invalid_argument("data." + key + ": " + path + ": " + message);
  };
  const Report report = read_run(path);
  if (report.run.job != "score" || report.run.experiment.empty() || report.items.empty()) {
    refuse("path", "expected a run of job score, got one of job " + report.run.job + " with " +
                       std::to_string(report.items.size()) + " items");
  }
  if (report.run.tokenizer_sha256 != tokenizer.sha256()) {
    refuse("path", "expected answers in tokens of " + tokenizer.name() + " (SHA-256 " +
                       tokenizer.sha256().substr(0, 12) + "), got tokens of " +
                       report.run.tokenizer + " (" + report.run.tokenizer_sha256.substr(0, 12) +
                       ")");
  }
  const std::string name =
      experiment.data_state.empty() ? report.run.baseline : experiment.data_state;
  const int state = report.find_state(name);
  if (state < 0) {
    std::string known;
    for (const StateReport& s : report.states) known += " " + s.info.name;
    refuse("state", "expected one of" + known + ", got '" + name + "'");
  }

  Experiment source = parse_experiment(report.run.experiment, path + ": its experiment");
  source.on_bad_item = OnBadItem::skip;
  const AskedItems asked = load_asked_items(source, tokenizer, 0);
  for (const TaskInfo& stored : report.run.tasks) {
    const auto task = std::find_if(asked.tasks.begin(), asked.tasks.end(),
                                   [&](const TaskSpec& t) { return t.name == stored.name; });
    if (task == asked.tasks.end() || task->sha256 != stored.sha256) {
      refuse("path", "task " + stored.name +
                         " is another one now (tasks of the run: " + task_names(report.run.tasks) +
                         "); expected the task files that the answers were given to");
    }
  }
  ItemsByName items;
  for (const AskedItem& item : asked.items) {
    items[{asked.tasks[static_cast<size_t>(item.task)].name, item.item.item.id}] = &item;
  }

  std::vector<const Answer*> answers;
  for (const Answer& answer : report.states[static_cast<size_t>(state)].answers)
    answers.push_back(&answer);
  std::stable_sort(answers.begin(), answers.end(), [](const Answer* a, const Answer* b) {
    return std::pair(a->item, a->repeat) < std::pair(b->item, b->repeat);
  });

  AnswerDocuments documents;
  documents.model_sha256 = report.run.model_sha256;
  const DataSource& selection = experiment.data;
  std::map<std::string, size_t> places;
  for (const Answer* answer : answers) {
    const ItemInfo& info = report.items[static_cast<size_t>(answer->item)];
    Document document;
    document.id = info.task + "/" + info.id + "/" + std::to_string(answer->repeat);
    if (!selection.ids.empty() &&
        std::find(selection.ids.begin(), selection.ids.end(), document.id) == selection.ids.end()) {
      continue;
    }
    if (selection.documents &&
        static_cast<int64_t>(documents.loaded.documents.size()) >= *selection.documents) {
      break;
    }
    const auto item = items.find({info.task, info.id});
    if (item == items.end() || item->second->item.prompt_sha256 != info.prompt_sha256) {
      refuse("path", "the prompt of " + info.task + "/" + info.id + " is " +
                         (item == items.end() ? "not in the task's data" : "another one now") +
                         "; expected the data that the answers were given to (" + report.run.data +
                         ")");
    }
    const std::vector<int32_t>& prompt = item->second->prompt->tokens;
    document.tokens = prompt;
    document.tokens.insert(document.tokens.end(), answer->token_ids.begin(),
                           answer->token_ids.end());
    const int64_t whole = static_cast<int64_t>(document.tokens.size());
    document.complete = !selection.tokens || whole <= *selection.tokens;
    if (!document.complete) document.tokens.resize(static_cast<size_t>(*selection.tokens));
    const int64_t length = static_cast<int64_t>(document.tokens.size());
    if (answer->token_ids.empty() || length <= static_cast<int64_t>(prompt.size())) {
      documents.loaded.skipped.push_back({document.id, whole});
      continue;
    }
    document.title = info.category;
    document.sha256 = tokens_sha256(document.tokens);
    document.stream = stream_of(document.id);
    places[document.id] = documents.loaded.documents.size();
    documents.prompt_tokens.push_back(static_cast<int64_t>(prompt.size()));
    documents.loaded.documents.push_back(std::move(document));
  }
  for (const std::string& id : selection.ids) {
    if (places.contains(id)) continue;
    refuse("documents", "expected answers of the run such as '" +
                            (documents.loaded.documents.empty()
                                 ? report.items[0].task + "/" + report.items[0].id + "/0"
                                 : documents.loaded.documents[0].id) +
                            "', got '" + id + "', which " + name + " has not given");
  }
  if (documents.loaded.documents.empty()) {
    refuse("path", "no answer of " + name + " is left (" +
                       std::to_string(documents.loaded.skipped.size()) + " have no tokens" +
                       (selection.tokens
                            ? " or a prompt of " + std::to_string(*selection.tokens) + " or more"
                            : "") +
                       ")");
  }
  documents.loaded.description =
      path + ": " + std::to_string(documents.loaded.documents.size()) + " answers of " + name +
      " to " + task_names(report.run.tasks) +
      (documents.loaded.skipped.empty()
           ? ""
           : "; skipped " + std::to_string(documents.loaded.skipped.size()));
  return documents;
}

}  // namespace replayeval
