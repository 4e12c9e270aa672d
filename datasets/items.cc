#include "datasets/items.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "base/hash.h"
#include "datasets/data_files.h"
#include "datasets/item_readers.h"
#include "datasets/parquet.h"
#include "datasets/tokenizer.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kMostOptions = 10;  // letters A to J

// Published sizes. The digest, where the text is fixed, is over the items that are counted: SHA-256
// of the sorted lines "<sha256 of question> <sha256 of solution>\n".
struct PublishedSet {
  Task task;
  const char* split;
  int level;  // 0: all
  size_t items;
  const char* name;
  const char* digest;
};
constexpr PublishedSet kPublished[] = {
    {Task::kMmluPro, "test", 0, 12032, "MMLU-Pro test", ""},
    {Task::kMmluPro, "validation", 0, 70, "MMLU-Pro validation", ""},
    {Task::kGpqa, "diamond", 0, 198, "GPQA diamond", ""},
    {Task::kGpqa, "main", 0, 448, "GPQA main", ""},
    {Task::kGpqa, "extended", 0, 546, "GPQA extended", ""},
    {Task::kMath, "test", 5, 1324, "MATH test, Level 5",
     "7d736e91b80b911cb162e7cf8e0770e3529e89c2245a47ddc51bfe34e6f45560"},
    {Task::kMath, "test", 5, 134, "MATH-500, Level 5",
     "4eb2353b9667b4ef62a1f6d40a8aa85fbba39846822c18b55d25a73a57272298"},
    {Task::kMath, "test", 0, 5000, "MATH test", ""},
    {Task::kMath, "test", 0, 500, "MATH-500",
     "aaedf76b9d90939fdad650fd49e16da5168cfc93fbd9183a593c098a30cad959"},
    {Task::kGsm8k, "test", 0, 1319, "GSM8K test", ""},
    {Task::kGsm8k, "train", 0, 7473, "GSM8K train", ""},
};

std::string digest_of(const std::vector<const Item*>& items) {
  std::vector<std::string> lines;
  for (const Item* item : items)
    lines.push_back(sha256_hex(item->question) + " " + sha256_hex(item->solution) + "\n");
  std::sort(lines.begin(), lines.end());
  std::string text;
  for (const std::string& line : lines) text += line;
  return sha256_hex(text);
}

// Compares with the published sizes: before any selection but the level.
void check_published(const ItemSource& source, const std::vector<const Item*>& items, size_t bad,
                     ItemSet* set) {
  const int level = source.level.value_or(0);
  const PublishedSet* closest = nullptr;
  for (const PublishedSet& published : kPublished) {
    if (published.task != source.task || published.split != source.split ||
        published.level != level)
      continue;
    if (closest == nullptr || published.items >= items.size() + bad) closest = &published;
    if (published.items != items.size()) continue;
    if (*published.digest != '\0' && digest_of(items) != published.digest) {
      set->warnings.push_back(std::string("as many items as ") + published.name +
                              ", but other texts");
    }
    return;
  }
  if (closest == nullptr) return;
  set->warnings.push_back(std::to_string(items.size()) + " items; " + closest->name + " has " +
                          std::to_string(closest->items) +
                          ": figures are not comparable with published ones");
}

std::string hash_of_files(const std::vector<fs::path>& files) {
  if (files.size() == 1) return sha256_file(files.front());
  std::string lines;
  for (const fs::path& file : files) {
    lines += sha256_file(file) + " " + file.parent_path().filename().string() + "/" +
             file.filename().string() + "\n";
  }
  return sha256_hex(lines);
}

void check_request(const ItemSource& source) {
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument("data: " + task_name(source.task) + ": " + what);
  };
  if (source.path.empty()) {
    refuse("path is not set; expected the data set's folder or file, published as " +
           std::string(published_as(source.task)));
  }
  if (source.items && *source.items < 1)
    refuse("items is " + std::to_string(*source.items) + ", expected 1 or more");
  if (source.per_category && *source.per_category < 1) {
    refuse("per_category is " + std::to_string(*source.per_category) + ", expected 1 or more");
  }
  if (source.level && (*source.level < 1 || *source.level > 5)) {
    refuse("level is " + std::to_string(*source.level) + ", expected 1 to 5");
  }
  if (source.level && source.task != Task::kMath) refuse("level is a key of math only");
}

}  // namespace

std::string task_name(Task task) {
  switch (task) {
    case Task::kMmluPro:
      return "mmlu_pro";
    case Task::kGpqa:
      return "gpqa";
    case Task::kMath:
      return "math";
    case Task::kGsm8k:
      return "gsm8k";
  }
  throw std::logic_error("task_name: no such task");
}

void RawItems::add(Item item) {
  const auto blank = [](const std::string& text) {
    return text.find_first_not_of(" \t\r\n") == std::string::npos;
  };
  const auto damaged = [](const std::string& text) {
    return find_invalid_utf8(text) != std::string_view::npos;
  };
  std::string reason;
  if (damaged(item.question) || damaged(item.gold) || damaged(item.solution) ||
      std::any_of(item.options.begin(), item.options.end(), damaged)) {
    reason = "its text is not UTF-8";
  } else if (blank(item.question)) {
    reason = "the question is empty";
  } else if (static_cast<int>(item.options.size()) > kMostOptions) {
    reason = std::to_string(item.options.size()) + " options; letters end at J";
  } else if (item.options.empty() && blank(item.gold)) {
    reason = "it has no answer";
  } else if (!item.options.empty() &&
             (item.gold_option < 0 || item.gold_option >= static_cast<int>(item.options.size()))) {
    reason = "its answer is none of the " + std::to_string(item.options.size()) + " options";
  } else if (const auto empty = std::find_if(item.options.begin(), item.options.end(), blank);
             empty != item.options.end()) {
    reason = std::string("option ") + static_cast<char>('A' + (empty - item.options.begin())) +
             " is empty";
  } else if (!ids.insert(item.id).second) {
    reason = "its id occurred before";
  }
  if (!reason.empty()) {
    refuse(item.id, item.row, reason);
    return;
  }
  if (!item.options.empty()) item.gold = std::string(1, static_cast<char>('A' + item.gold_option));
  items.push_back(std::move(item));
}

const char* published_as(Task task) {
  switch (task) {
    case Task::kMmluPro:
      return "huggingface.co/datasets/TIGER-Lab/MMLU-Pro";
    case Task::kGpqa:
      return "huggingface.co/datasets/Idavidrein/gpqa (gated: the authors ask not to republish it)";
    case Task::kMath:
      return "github.com/hendrycks/math, on the hub as EleutherAI/hendrycks_math; its 500-problem "
             "test split with github.com/openai/prm800k";
    case Task::kGsm8k:
      return "github.com/openai/grade-school-math and huggingface.co/datasets/openai/gsm8k";
  }
  throw std::logic_error("published_as: no such task");
}

std::vector<fs::path> find_files(const ItemSource& source,
                                 const std::vector<std::string>& patterns) {
  if (fs::is_regular_file(source.path)) return {source.path};
  const fs::path folder = data_folder(source.path);
  std::vector<fs::path> files = find_data_files(folder, patterns);
  if (!files.empty()) return files;
  std::string looked_for;
  for (const std::string& pattern : patterns) looked_for += " " + pattern;
  throw std::runtime_error(
      "data: " + task_name(source.task) + ": no data at " + source.path.string() +
      (fs::is_directory(source.path)
           ? "; looked in this folder for" + looked_for
           : ", where there is no file or folder; a folder would hold one of" + looked_for) +
      "; published as " + published_as(source.task));
}

namespace {

Json json_of(const ParquetCell& cell) {
  return std::visit(
      [](const auto& value) -> Json {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::monostate>) {
          return nullptr;
        } else {
          return value;
        }
      },
      cell);
}

std::vector<Json> read_parquet_rows(const fs::path& path) {
  const ParquetFile file(path);
  std::vector<Json> rows(static_cast<size_t>(file.rows()), Json::object());
  for (const std::string& column : file.columns()) {
    if (!file.readable(column)) continue;
    const std::vector<ParquetCell> cells = file.read(column);
    for (size_t i = 0; i < cells.size(); ++i) rows[i][column] = json_of(cells[i]);
  }
  return rows;
}

}  // namespace

Json parse_json(std::string_view text, const std::string& place, size_t first_line) {
  const auto fail = [&](size_t byte, const std::string& what) {
    const std::string_view before = text.substr(0, byte);
    const size_t line_begin = before.rfind('\n') + 1;  // npos + 1 is 0
    const auto lines = static_cast<size_t>(std::count(before.begin(), before.end(), '\n'));
    throw std::runtime_error(place + ":" + std::to_string(first_line + lines) + ": " + what +
                             " at byte " + std::to_string(before.size() - line_begin + 1) +
                             " of the line");
  };
  if (const size_t invalid = find_invalid_utf8(text); invalid != std::string_view::npos)
    fail(invalid, "not UTF-8");
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    // The library's text is "[...] parse error at line 1, column 18: message".
    std::string what = error.what();
    if (const size_t column = what.find(", column "); column != std::string::npos)
      what = what.substr(std::min(what.size(), what.find(": ", column) + 2));
    fail(std::max<size_t>(error.byte, 1) - 1, "not JSON: " + what);
  }
  throw std::logic_error("parse_json: unreachable");
}

namespace {

std::string kind_name(const Json& value) {
  if (value.is_null()) return "null";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "a map";
  return value.is_string() ? "a text" : value.is_number() ? "a number" : "true or false";
}

}  // namespace

std::string kind_problem(const Json& row, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const auto found = row.find(key);
    if (found != row.end() && found->is_structured())
      return std::string("its ") + key + " is " + kind_name(*found) + ", expected a text or number";
  }
  return "";
}

std::vector<DataRow> read_rows(const fs::path& path) {
  std::vector<DataRow> rows;
  if (path.extension() == ".parquet") {
    for (Json& row : read_parquet_rows(path)) rows.push_back({std::move(row), ""});
    return rows;
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be read");
  const auto add = [&](Json value, const std::string& place) {
    DataRow row;
    if (value.is_object()) {
      row.value = std::move(value);
    } else {
      row.problem = place + ": expected an object, got " + kind_name(value);
    }
    rows.push_back(std::move(row));
  };
  if (path.extension() == ".json") {
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    Json array = parse_json(text, path.string());
    if (!array.is_array()) {
      throw std::runtime_error(path.string() + ": expected an array of objects, got " +
                               kind_name(array));
    }
    for (Json& row : array)
      add(std::move(row), path.string() + ": element " + std::to_string(rows.size()));
    return rows;
  }
  std::string line;
  for (size_t number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      add(parse_json(line, path.string(), number), path.string() + ":" + std::to_string(number));
    } catch (const std::runtime_error& error) {
      rows.push_back({Json(), error.what()});
    }
  }
  return rows;
}

std::string text_of(const Json& row, const char* key) {
  const auto found = row.find(key);
  if (found == row.end() || found->is_null()) return "";
  return found->is_string() ? found->get<std::string>() : found->dump();
}

ItemSet load_items(const ItemSource& source) {
  check_request(source);
  RawItems raw = source.task == Task::kMmluPro ? read_mmlu_pro(source)
                 : source.task == Task::kGpqa  ? read_gpqa(source)
                 : source.task == Task::kMath  ? read_math(source)
                                               : read_gsm8k(source);
  ItemSet set;
  set.rows = raw.rows;
  set.bad = std::move(raw.bad);
  const std::string place = "data: " + task_name(source.task) + ": " + source.path.string();
  if (raw.items.empty()) {
    throw std::runtime_error(
        place + ": no usable item in " + std::to_string(raw.rows) + " rows" +
        (set.bad.empty() ? "" : "; the first, " + set.bad[0].id + ": " + set.bad[0].reason));
  }
  set.sha256 = hash_of_files(raw.files);
  std::vector<const Item*> of_level;
  for (const Item& item : raw.items) {
    if (!source.level || item.level == *source.level) of_level.push_back(&item);
  }
  if (of_level.empty()) {
    throw std::invalid_argument(place + ": none of its " + std::to_string(raw.items.size()) +
                                " items is of level " + std::to_string(*source.level));
  }
  if (source.published) check_published(source, of_level, set.bad.size(), &set);
  if (!source.ids.empty()) {
    for (const std::string& id : source.ids) {
      const auto found = std::find_if(of_level.begin(), of_level.end(),
                                      [&](const Item* i) { return i->id == id; });
      if (found != of_level.end()) {
        set.items.push_back(**found);
        continue;
      }
      const auto bad = std::find_if(set.bad.begin(), set.bad.end(),
                                    [&](const BadItem& b) { return b.id == id; });
      throw std::invalid_argument(
          place + ": ids: " +
          (bad == set.bad.end() ? "no item '" + id + "'" : "item '" + id + "': " + bad->reason));
    }
  } else {
    std::map<std::string, int64_t> in_category;
    for (const Item* item : of_level) {
      if (source.items && static_cast<int64_t>(set.items.size()) == *source.items) break;
      if (source.per_category && in_category[item->category]++ >= *source.per_category) continue;
      set.items.push_back(*item);
    }
  }
  const auto equal = std::count_if(set.items.begin(), set.items.end(), [](const Item& item) {
    const std::set<std::string_view> different(item.options.begin(), item.options.end());
    return different.size() < item.options.size();
  });
  if (equal > 0) {
    set.warnings.push_back("two options or more are equal in " + std::to_string(equal) + " of " +
                           std::to_string(set.items.size()) + " items");
  }
  set.description = source.path.string() + ": " + std::to_string(set.items.size()) + " of " +
                    std::to_string(of_level.size()) + " items" +
                    (source.level ? " of level " + std::to_string(*source.level) : "") +
                    (set.bad.empty() ? "" : ", " + std::to_string(set.bad.size()) + " unusable");
  return set;
}

}  // namespace replayeval
