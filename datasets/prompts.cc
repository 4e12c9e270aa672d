#include "datasets/prompts.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>

#include "base/hash.h"
#include "datasets/answer_rules.h"
#include "datasets/chat_template.h"
#include "datasets/jinja_syntax.h"
#include "datasets/tokenizer.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

const JinjaValue& letters() {
  static const JinjaValue all = [] {
    JinjaValue::List list;
    for (char c = 'A'; c <= 'Z'; ++c) list.emplace_back(std::string(1, c));
    return JinjaValue(std::move(list));
  }();
  return all;
}

// Head and shots as they stand before every question of a category.
struct Opening {
  std::string head;
  std::vector<std::string> shots;

  std::string text(size_t count) const {
    std::string all = head;
    for (size_t i = 0; i < count; ++i) all += shots[i];
    return all;
  }
};

// The three templates of a task, and its shots.
class PromptWriter {
 public:
  PromptWriter(const TaskSpec& task, PromptSet* set)
      : task_(task),
        head_(task.prompt.head, place("head"), prompt_template_options()),
        shot_(task.prompt.shot, place("shot"), prompt_template_options()),
        question_(task.prompt.question, place("question"), prompt_template_options()) {
    const ShotSource& shots = task.prompt.shots;
    if (shots.count > 0 && shots.fixed.empty()) load_shots(set);
  }

  std::string question(const Item& item) const {
    return question_.render(template_variables(item));
  }

  // The same for all items of a category.
  const Opening& opening(const Item& item) {
    const auto known = openings_.find(item.category);
    if (known != openings_.end()) return known->second;
    Opening opening;
    opening.head = head_.render({{"category", item.category}});
    const ShotSource& shots = task_.prompt.shots;
    if (!shots.fixed.empty()) {
      for (int i = 0; i < shots.count; ++i) {
        JinjaValue::Map variables;
        for (const auto& [key, text] : shots.fixed[static_cast<size_t>(i)])
          variables.emplace_back(key, text);
        opening.shots.push_back(shot_.render(variables));
      }
    } else if (shots.count > 0) {
      for (const Item& shot : shot_items_) {
        if (shots.same_category && shot.category != item.category) continue;
        if (static_cast<int>(opening.shots.size()) == shots.count) break;
        opening.shots.push_back(shot_.render(template_variables(shot)));
      }
      if (static_cast<int>(opening.shots.size()) < shots.count) {
        throw std::invalid_argument(
            "task " + task_.name + ": expected " + std::to_string(shots.count) + " shots" +
            (shots.same_category ? " of category '" + item.category + "'" : "") + " in split " +
            shots.split + ", got " + std::to_string(opening.shots.size()));
      }
    }
    return openings_.emplace(item.category, std::move(opening)).first->second;
  }

 private:
  std::string place(const char* part) const { return task_.file.string() + ": prompt." + part; }

  void load_shots(PromptSet* set) {
    ItemSource source = task_.source;
    source.split = task_.prompt.shots.split;
    source.level.reset();
    source.items.reset();
    source.per_category.reset();
    source.ids.clear();
    // Beside a file of questions the other split stands in the same folder, or is the folder's.
    if (fs::is_regular_file(source.path)) source.path = source.path.parent_path();
    if (source.path.empty()) source.path = ".";
    ItemSet shots;
    try {
      shots = load_items(source);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error("task " + task_.name + ": shots, split " + source.split + ": " +
                               error.what());
    }
    shot_items_ = std::move(shots.items);
    set->data_sha256 = sha256_hex(set->data_sha256 + " " + shots.sha256 + "\n");
    set->description +=
        "; " + std::to_string(task_.prompt.shots.count) + " shots from " + shots.description;
    if (!shots.bad.empty()) {
      set->warnings.push_back("shots: " + std::to_string(shots.bad.size()) +
                              " unusable items are passed over; the first, " + shots.bad[0].id +
                              ": " + shots.bad[0].reason);
    }
    for (const std::string& warning : shots.warnings) set->warnings.push_back("shots: " + warning);
  }

  const TaskSpec& task_;
  JinjaTemplate head_, shot_, question_;
  std::vector<Item> shot_items_;
  std::map<std::string, Opening> openings_;
};

// Whether a prompt has fewer tokens than ShotSource::prompt_tokens.
class TokenLimit {
 public:
  TokenLimit(int64_t limit, const Tokenizer* tokenizer, bool bos)
      : limit_(static_cast<size_t>(limit)), tokenizer_(limit == 0 ? nullptr : tokenizer) {
    bos_ = tokenizer_ != nullptr && bos && tokenizer_->bos_id() ? 1 : 0;
  }

  /// The first `shared` bytes are those of many prompts. Only prompts near the limit are tokenized
  /// as a whole: elsewhere the tokens of both parts are added up, which is off by no more than the
  /// tokens at the border between them.
  bool keeps(const std::string& prompt, size_t shared) {
    constexpr size_t kBorder = 64;
    // A token has at least one byte, but for one that a tokenizer may put before the text.
    if (tokenizer_ == nullptr || prompt.size() + bos_ + 1 < limit_) return true;
    if (shared > 0) {
      const size_t before = bos_ + shared_tokens(prompt.substr(0, shared));
      if (before + prompt.size() - shared + kBorder < limit_) return true;
      const size_t parts =
          before + tokenizer_->encode(std::string_view(prompt).substr(shared)).size();
      if (parts + kBorder < limit_) return true;
      if (parts > limit_ + kBorder) return false;
    }
    return tokenizer_->encode(prompt, limit_).size() + bos_ < limit_;
  }

 private:
  size_t shared_tokens(const std::string& text) {
    const auto known = counts_.find(text);
    if (known != counts_.end()) return known->second;
    return counts_.emplace(text, tokenizer_->encode(text).size()).first->second;
  }

  size_t limit_;
  const Tokenizer* tokenizer_;
  size_t bos_ = 0;
  std::map<std::string, size_t> counts_;
};

// The option orders of a task.
class Orders {
 public:
  Orders(const OptionRule& rule, size_t rows, uint64_t seed) : rule_(rule), seed_(seed) {
    if (rule.order == OptionRule::Order::kGpqaAuthors)
      by_row_ = gpqa_shuffled_orders(rows, rule.seed);
    if (rule.order == OptionRule::Order::kSimpleEvals)
      by_row_ = gpqa_sampled_orders(rows, static_cast<size_t>(rule.rounds));
    rows_ = rows;
  }

  OptionOrder order(const Item& item, int round) const {
    OptionOrder order(item.options.size());
    switch (rule_.order) {
      case OptionRule::Order::kFile:
        for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
        return order;
      case OptionRule::Order::kItem:
        return item_option_order(item, seed_);
      case OptionRule::Order::kGpqaAuthors:
      case OptionRule::Order::kSimpleEvals:
        return by_row_[static_cast<size_t>(round) * rows_ + item.row];
    }
    return order;
  }

 private:
  OptionRule rule_;
  uint64_t seed_;
  size_t rows_ = 0;
  std::vector<OptionOrder> by_row_;
};

// The item with its options as they are shown.
Item shown_item(const Item& item, const OptionRule& rule, const OptionOrder& order) {
  Item shown = item;
  if (!rule.clean.empty())
    for (std::string& option : shown.options) option = lm_eval_gpqa_clean(option);
  shown = with_option_order(std::move(shown), order);
  if (rule.order == OptionRule::Order::kGpqaAuthors ||
      rule.order == OptionRule::Order::kSimpleEvals) {
    // Of two equal options these harnesses take the first as the right one.
    const auto right = static_cast<size_t>(shown.gold_option);
    const auto first = std::find(shown.options.begin(), shown.options.end(), shown.options[right]);
    shown.gold_option = static_cast<int>(first - shown.options.begin());
    shown.gold = std::string(1, static_cast<char>('A' + shown.gold_option));
  }
  return shown;
}

// How many items have the prompt of an item of another row.
size_t items_with_equal_prompts(const std::vector<PromptedItem>& items) {
  std::map<std::string_view, std::set<size_t>> rows;  // of each prompt
  for (const PromptedItem& item : items) rows[item.prompt].insert(item.item.row);
  std::set<size_t> equal;
  for (const auto& [prompt, of_prompt] : rows)
    if (of_prompt.size() > 1) equal.insert(of_prompt.begin(), of_prompt.end());
  return equal.size();
}

}  // namespace

JinjaOptions prompt_template_options() {
  JinjaOptions options;
  options.keep_trailing_newline = true;
  options.strict_undefined = true;
  return options;
}

JinjaValue::Map template_variables(const Item& item) {
  JinjaValue::List options;
  options.reserve(item.options.size());
  for (const std::string& option : item.options) options.emplace_back(option);
  return {{"question", item.question}, {"options", std::move(options)},
          {"letters", letters()},      {"category", item.category},
          {"level", item.level},       {"gold", item.gold},
          {"solution", item.solution}, {"id", item.id}};
}

const std::vector<std::string>& template_variable_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& [name, value] : template_variables({})) all.push_back(name);
    return all;
  }();
  return names;
}

std::string lm_eval_gpqa_clean(std::string_view given) {
  std::string text = jinja::strip(given, true, true, nullptr);
  text = jinja::replace_all(text, " [title]", ". ", -1);
  // What stands in brackets on one line goes.
  std::string kept;
  size_t at = 0, closed_until = 0;  // up to there a "[" of this line has no "]" behind it
  while (at < text.size()) {
    if (text[at] == '[' && at >= closed_until) {
      const size_t end = text.find_first_of("]\n", at);
      if (end != std::string::npos && text[end] == ']') {
        at = end + 1;
        continue;
      }
      closed_until = end == std::string::npos ? text.size() : end;
    }
    kept += text[at++];
  }
  return jinja::replace_all(kept, "  ", " ", -1);
}

std::string_view graded_part(std::string_view think_end, std::string_view prompt,
                             std::string_view text) {
  if (think_end.empty()) return text;
  if (const size_t end = text.rfind(think_end); end != std::string_view::npos)
    return text.substr(end + think_end.size());
  const auto trimmed = [](std::string_view t) {
    const size_t begin = t.find_first_not_of(" \t\r\n");
    if (begin == std::string_view::npos) return std::string_view();
    return t.substr(begin, t.find_last_not_of(" \t\r\n") - begin + 1);
  };
  std::string opening(think_end);
  if (const size_t slash = opening.find('/'); slash != std::string::npos) opening.erase(slash, 1);
  if (opening != think_end &&
      (trimmed(prompt).ends_with(opening) || trimmed(text).starts_with(opening)))
    return {};
  return text;
}

PromptSet load_prompts(const TaskSpec& task, uint64_t seed, const ChatTemplate* chat,
                       const Tokenizer* tokenizer) {
  PromptSet set;
  ItemSet items = load_items(task.source);
  set.bad = std::move(items.bad);
  set.data_sha256 = items.sha256;
  set.description = std::move(items.description);
  set.warnings = std::move(items.warnings);
  if (task.chat.use && chat == nullptr) {
    set.warnings.push_back("task " + task.name +
                           " asks through a chat template, and the model has none: prompts are "
                           "plain text");
  }
  if (!task.chat.use) chat = nullptr;
  set.add_bos = chat == nullptr;

  PromptWriter writer(task, &set);
  const Orders orders(task.options, items.rows, seed);
  const auto through_chat = [&](const std::string& text) {
    if (chat == nullptr) return text;
    std::vector<ChatMessage> messages;
    if (!task.chat.system.empty()) messages.push_back({"system", task.chat.system});
    messages.push_back({"user", text});
    return chat->render(messages, true, task.chat.variables);
  };
  TokenLimit limit(task.prompt.shots.prompt_tokens, tokenizer, set.add_bos);
  size_t fewer_shots = 0;
  set.items.reserve(items.items.size() * static_cast<size_t>(task.options.rounds));
  for (int round = 0; round < task.options.rounds; ++round) {
    for (const Item& item : items.items) {
      PromptedItem prompted;
      if (item.options.empty()) {
        prompted.item = item;
      } else {
        prompted.option_order = orders.order(item, round);
        prompted.item = shown_item(item, task.options, prompted.option_order);
      }
      if (round > 0) prompted.item.id += "/" + std::to_string(round);
      prompted.gold = prompted.item.gold;
      const Opening& opening = writer.opening(item);
      const std::string question = writer.question(prompted.item);
      size_t shots = opening.shots.size();
      while (true) {
        const std::string before = opening.text(shots);
        prompted.prompt = through_chat(before + question);
        const size_t at = before.empty() ? std::string::npos : prompted.prompt.find(before);
        prompted.shared_bytes = at == std::string::npos ? 0 : at + before.size();
        if (shots == 0 || limit.keeps(prompted.prompt, prompted.shared_bytes)) break;
        --shots;
      }
      fewer_shots += shots < opening.shots.size();
      prompted.prompt_sha256 = sha256_hex(prompted.prompt);
      set.items.push_back(std::move(prompted));
    }
  }
  if (const size_t same = items_with_equal_prompts(set.items); same > 0) {
    set.warnings.push_back(std::to_string(same) + " of " + std::to_string(items.items.size()) +
                           " items have the prompt of another item: the data repeat them, or "
                           "prompt.question leaves out what tells them apart");
  }
  if (fewer_shots > 0) {
    set.description += "; fewer shots in " + std::to_string(fewer_shots) +
                       " prompts, so that they have less than " +
                       std::to_string(task.prompt.shots.prompt_tokens) + " tokens";
  }
  return set;
}

Grade grade_answer(const TaskSpec& task, const PromptedItem& item, std::string_view answer_text) {
  const std::string_view text = graded_part(task.generation.think_end, item.prompt, answer_text);
  Grade grade;
  for (const std::string& rule : task.rules) {
    ExtractedAnswer answer = extract_answer(rule, text, item.item.options);
    if (!answer) continue;
    grade.extracted = std::move(answer.text);
    grade.rule = rule;
    grade.stage = answer.stage;
    break;
  }
  if (grade.rule.empty()) return grade;
  if (!item.item.options.empty()) {
    grade.correct = grade.extracted == item.gold;
  } else {
    grade.correct = std::any_of(
        task.compare.begin(), task.compare.end(),
        [&](const std::string& rule) { return answers_equal(rule, item.gold, grade.extracted); });
  }
  return grade;
}

}  // namespace replayeval
