#include "reports/schema.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "reports/answer_part.h"
#include "reports/answer_statistics.h"
#include "reports/answer_tables.h"
#include "reports/files.h"
#include "reports/hdf5_image.h"
#include "reports/statistics.h"
#include "reports/tables.h"

namespace replayeval {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::string state_group(size_t index) {
  char name[32];
  std::snprintf(name, sizeof name, "/states/%02zu", index);
  return name;
}

int64_t dim(size_t size) { return static_cast<int64_t>(size); }

template <class T, class Items, class Get>
void write_column(Hdf5Writer& file, const std::string& path, const Items& items, Get get) {
  std::vector<T> values;
  for (const auto& item : items) values.push_back(static_cast<T>(get(item)));
  file.dataset<T>(path, {dim(values.size())}, values);
}

std::string as_json(const std::map<std::string, std::string>& map) {
  return nlohmann::json(map).dump();
}

std::map<std::string, std::string> from_json(const std::string& text) {
  return nlohmann::json::parse(text).get<std::map<std::string, std::string>>();
}

int64_t head_count(const std::vector<LayerInfo>& layers) {
  int64_t heads = 0;
  for (const LayerInfo& layer : layers) heads = std::max<int64_t>(heads, layer.heads);
  return heads;
}

/// Each string field of RunInfo that is an attribute of the root, in one table for writing and
/// reading.
struct RunField {
  const char* name;
  std::string RunInfo::*member;
};
constexpr RunField kRunFields[] = {
    {"job", &RunInfo::job},
    {"created", &RunInfo::created},
    {"finished", &RunInfo::finished},
    {"experiment", &RunInfo::experiment},
    {"model", &RunInfo::model},
    {"model_sha256", &RunInfo::model_sha256},
    {"family", &RunInfo::family},
    {"tokenizer", &RunInfo::tokenizer},
    {"tokenizer_sha256", &RunInfo::tokenizer_sha256},
    {"data", &RunInfo::data},
    {"data_sha256", &RunInfo::data_sha256},
    {"revision", &RunInfo::revision},
    {"compiler", &RunInfo::compiler},
    {"device", &RunInfo::device},
    {"compute", &RunInfo::compute},
    {"dense", &RunInfo::dense},
    {"baseline", &RunInfo::baseline},
};

struct StateField {
  const char* name;
  std::string StateInfo::*member;
};
constexpr StateField kStateFields[] = {
    {"name", &StateInfo::name},
    {"definition", &StateInfo::definition},
    {"sha256", &StateInfo::sha256},
    {"recurrence", &StateInfo::recurrence},
    {"read", &StateInfo::read},
    {"recurrence_rounding", &StateInfo::recurrence_rounding},
    {"read_rounding", &StateInfo::read_rounding},
};

void write_errors(Hdf5Writer& file, const std::string& group, const Report& report,
                  const StateReport& state) {
  size_t samples = 0;
  bool read = false;
  for (const StateDocument& document : state.documents) {
    samples = std::max(samples, document.error_positions.size());
    read = read || !document.error_read.empty();
  }
  if (samples == 0) return;
  const int64_t documents = dim(state.documents.size());
  const int64_t layers = dim(report.layers.size());
  const int64_t heads = head_count(report.layers);
  const size_t block = samples * static_cast<size_t>(layers * heads);
  std::vector<int64_t> positions(static_cast<size_t>(documents) * samples, -1);
  std::vector<float> error(static_cast<size_t>(documents) * block, kNaN);
  std::vector<float> error_read(read ? error.size() : 0, kNaN);
  for (size_t d = 0; d < state.documents.size(); ++d) {
    const StateDocument& document = state.documents[d];
    std::copy(document.error_positions.begin(), document.error_positions.end(),
              positions.begin() + static_cast<std::ptrdiff_t>(d * samples));
    std::copy(document.error.begin(), document.error.end(),
              error.begin() + static_cast<std::ptrdiff_t>(d * block));
    std::copy(document.error_read.begin(), document.error_read.end(),
              error_read.begin() + static_cast<std::ptrdiff_t>(d * block));
  }
  file.dataset<int64_t>(group + "/state_error_position", {documents, dim(samples)}, positions);
  file.dataset<float>(group + "/state_error", {documents, dim(samples), layers, heads}, error);
  if (read)
    file.dataset<float>(group + "/state_error_read", {documents, dim(samples), layers, heads},
                        error_read);
}

void write_state(Hdf5Writer& file, const std::string& group, const Report& report,
                 const StateReport& state) {
  file.group(group);
  for (const StateField& field : kStateFields)
    file.attribute<std::string>(group, field.name, state.info.*field.member);
  file.attribute<int64_t>(group, "window", state.info.window);
  file.attribute<uint64_t>(group, "seed", state.info.seed);
  file.attribute<std::string>(group, "options", as_json(state.info.options));
  file.attribute<double>(group, "bits_per_element", state.info.bits_per_element);
  file.attribute<int64_t>(group, "bytes_per_sequence", state.info.bytes_per_sequence);

  const int64_t documents = dim(state.documents.size());
  int64_t columns = 0;
  for (const DocumentInfo& document : report.documents)
    columns = std::max(columns, document.tokens);
  file.table<float>(group + "/kl", documents, columns, kNaN);
  file.table<float>(group + "/nll", documents, columns, kNaN);
  file.table<uint8_t>(group + "/top1", documents, columns, kNoTop1);
  std::vector<int64_t> first, length, nll_length;
  std::vector<LayerHealth> health;
  for (size_t d = 0; d < state.documents.size(); ++d) {
    const StateDocument& document = state.documents[d];
    file.write_row<float>(group + "/kl", dim(d), document.kl);
    file.write_row<float>(group + "/nll", dim(d), document.nll);
    file.write_row<uint8_t>(group + "/top1", dim(d), document.top1);
    first.push_back(document.first_position);
    length.push_back(std::max<int64_t>(0, document.length - document.first_position));
    bool whole = document.length == report.documents[d].tokens;
    nll_length.push_back(std::max<int64_t>(0, length.back() - (whole ? 1 : 0)));
    std::vector<LayerHealth> row = document.health;
    row.resize(report.layers.size());
    health.insert(health.end(), row.begin(), row.end());
  }
  for (const char* name : {"/kl", "/nll", "/top1"}) {
    file.attribute_list<int64_t>(group + name, "first_position", first);
    file.attribute_list<int64_t>(group + name, "length",
                                 name == std::string("/nll") ? nll_length : length);
  }
  file.attribute<std::string>(group + "/kl", "unit", "nats");
  file.attribute<std::string>(group + "/nll", "unit", "nats");
  file.dataset<LayerHealth>(group + "/health", {documents, dim(report.layers.size())}, health);
  write_errors(file, group, report, state);
}

void write_items(Hdf5Writer& file, const std::vector<ItemInfo>& items) {
  if (items.empty()) return;
  write_column<std::string>(file, "/items/id", items, [](auto& i) { return i.id; });
  write_column<std::string>(file, "/items/task", items, [](auto& i) { return i.task; });
  write_column<std::string>(file, "/items/category", items, [](auto& i) { return i.category; });
  write_column<int32_t>(file, "/items/level", items, [](auto& i) { return i.level; });
  write_column<std::string>(file, "/items/gold", items, [](auto& i) { return i.gold; });
  write_column<int32_t>(file, "/items/options", items, [](auto& i) { return i.options; });
  write_column<std::string>(file, "/items/prompt_sha256", items,
                            [](auto& i) { return i.prompt_sha256; });
  write_column<std::string>(file, "/items/grading", items, [](auto& i) { return i.grading; });
  size_t columns = 0;
  for (const ItemInfo& item : items) columns = std::max(columns, item.option_order.size());
  std::vector<int32_t> order;
  for (const ItemInfo& item : items) {
    order.insert(order.end(), item.option_order.begin(), item.option_order.end());
    order.resize(order.size() + columns - item.option_order.size(), -1);
  }
  file.dataset<int32_t>("/items/option_order", {dim(items.size()), dim(columns)}, order);
}

void write_tasks(Hdf5Writer& file, const std::vector<TaskInfo>& tasks) {
  if (tasks.empty()) return;
  write_column<std::string>(file, "/tasks/name", tasks, [](auto& t) { return t.name; });
  write_column<int32_t>(file, "/tasks/version", tasks, [](auto& t) { return t.version; });
  write_column<std::string>(file, "/tasks/sha256", tasks, [](auto& t) { return t.sha256; });
  write_column<std::string>(file, "/tasks/definition", tasks, [](auto& t) { return t.definition; });
  write_column<uint8_t>(file, "/tasks/private", tasks,
                        [](auto& t) { return t.private_data ? 1 : 0; });
  write_column<uint8_t>(file, "/tasks/chance_for_none", tasks,
                        [](auto& t) { return t.chance_for_none ? 1 : 0; });
}

std::vector<TaskInfo> read_tasks(const Hdf5Reader& file) {
  std::vector<TaskInfo> tasks;
  if (!file.has("/tasks")) return tasks;
  const auto name = file.dataset<std::string>("/tasks/name");
  const auto version = file.dataset<int32_t>("/tasks/version");
  const auto sha256 = file.dataset<std::string>("/tasks/sha256");
  const auto definition = file.dataset<std::string>("/tasks/definition");
  const auto hidden = file.dataset<uint8_t>("/tasks/private");
  const auto chance = file.dataset<uint8_t>("/tasks/chance_for_none");
  for (size_t i = 0; i < name.size(); ++i)
    tasks.push_back({name[i], version.at(i), sha256.at(i), definition.at(i), hidden.at(i) != 0,
                     chance.at(i) != 0});
  return tasks;
}

void write_answers(Hdf5Writer& file, const std::string& group, const std::vector<Answer>& answers) {
  if (answers.empty()) return;
  write_column<int32_t>(file, group + "/item", answers, [](auto& a) { return a.item; });
  write_column<int32_t>(file, group + "/repeat", answers, [](auto& a) { return a.repeat; });
  write_answer_columns(file, group, answers);
}

std::vector<ItemInfo> read_items(const Hdf5Reader& file) {
  std::vector<ItemInfo> items;
  if (!file.has("/items")) return items;
  auto id = file.dataset<std::string>("/items/id");
  auto task = file.dataset<std::string>("/items/task");
  auto category = file.dataset<std::string>("/items/category");
  auto level = file.dataset<int32_t>("/items/level");
  auto gold = file.dataset<std::string>("/items/gold");
  auto options = file.dataset<int32_t>("/items/options");
  auto prompt = file.dataset<std::string>("/items/prompt_sha256");
  auto grading = file.dataset<std::string>("/items/grading");
  auto order = file.dataset<int32_t>("/items/option_order");
  const size_t columns = id.empty() ? 0 : order.size() / id.size();
  for (size_t i = 0; i < id.size(); ++i) {
    ItemInfo item{id[i],         task.at(i), category.at(i), level.at(i),  gold.at(i),
                  options.at(i), {},         prompt.at(i),   grading.at(i)};
    for (size_t c = 0; c < columns && order[i * columns + c] >= 0; ++c)
      item.option_order.push_back(order[i * columns + c]);
    items.push_back(std::move(item));
  }
  return items;
}

std::vector<Answer> read_answers(const Hdf5Reader& file, const std::string& group) {
  std::vector<Answer> answers = read_answer_columns(file, group);
  if (answers.empty()) return answers;
  const auto item = file.dataset<int32_t>(group + "/item");
  const auto repeat = file.dataset<int32_t>(group + "/repeat");
  for (size_t i = 0; i < answers.size(); ++i) {
    answers[i].item = item.at(i);
    answers[i].repeat = repeat.at(i);
  }
  return answers;
}

/// Column 0 of each [state, range] dataset is all positions, the others are the bins.
void write_kl_summary(Hdf5Writer& file, const Report& report) {
  const StatisticsOptions options;
  const KlStatistics statistics = kl_statistics(report, options);
  const int64_t states = dim(statistics.states.size());
  const int64_t ranges = dim(statistics.bins.size()) + 1;
  const int64_t fractions = dim(kQuantiles.size());

  std::vector<std::string> names = {"all"};
  std::vector<int64_t> first = {0},
                       last = {statistics.bins.empty() ? 0 : statistics.bins.back().last};
  for (const Bin& bin : statistics.bins) {
    names.push_back(bin.name);
    first.push_back(bin.first);
    last.push_back(bin.last);
  }
  file.dataset<std::string>("/summary/range", {ranges}, names);
  file.dataset<int64_t>("/summary/range_first", {ranges}, first);
  file.dataset<int64_t>("/summary/range_last", {ranges}, last);
  file.dataset<double>("/summary/quantile", {fractions}, kQuantiles);
  write_column<std::string>(file, "/summary/state", statistics.states,
                            [](auto& s) { return s.name; });

  std::vector<const KlFigures*> cells;
  for (const StateStatistics& state : statistics.states) {
    cells.push_back(&state.all);
    for (const KlFigures& figures : state.bins) cells.push_back(&figures);
  }
  auto integers = [&](const char* name, auto get) {
    std::vector<int64_t> values;
    for (const KlFigures* f : cells) values.push_back(get(*f));
    file.dataset<int64_t>(std::string("/summary/") + name, {states, ranges}, values);
  };
  auto reals = [&](const std::string& name, auto get) {
    std::vector<double> values;
    for (const KlFigures* f : cells) values.push_back(get(*f));
    file.dataset<double>("/summary/" + name, {states, ranges}, values);
  };
  auto estimates = [&](const std::string& name, Estimate KlFigures::*member) {
    reals(name, [&](const KlFigures& f) { return (f.*member).value; });
    reals(name + "_low", [&](const KlFigures& f) { return (f.*member).interval.low; });
    reals(name + "_high", [&](const KlFigures& f) { return (f.*member).interval.high; });
  };
  auto quantiles = [&](const std::string& name, auto member) {
    std::vector<double> value, low, high;
    for (const KlFigures* f : cells) {
      for (const Estimate& e : f->*member) {
        value.push_back(e.value);
        low.push_back(e.interval.low);
        high.push_back(e.interval.high);
      }
    }
    file.dataset<double>("/summary/" + name, {states, ranges, fractions}, value);
    file.dataset<double>("/summary/" + name + "_low", {states, ranges, fractions}, low);
    file.dataset<double>("/summary/" + name + "_high", {states, ranges, fractions}, high);
  };
  integers("documents", [](const KlFigures& f) { return f.documents; });
  integers("reaching", [](const KlFigures& f) { return f.reaching; });
  integers("positions", [](const KlFigures& f) { return f.positions; });
  integers("non_finite", [](const KlFigures& f) { return f.non_finite; });
  integers("below_floor", [](const KlFigures& f) { return f.below_floor ? 1 : 0; });
  estimates("kl_mean", &KlFigures::kl);
  quantiles("kl_quantile", &KlFigures::kl_quantiles);
  reals("kl_max", [](const KlFigures& f) { return f.kl_max; });
  integers("kl_max_document", [](const KlFigures& f) { return f.kl_max_document; });
  integers("kl_max_position", [](const KlFigures& f) { return f.kl_max_position; });
  estimates("nll_mean", &KlFigures::nll);
  quantiles("nll_quantile", &KlFigures::nll_quantiles);
  reals("nll_max", [](const KlFigures& f) { return f.nll_max; });
  integers("nll_max_document", [](const KlFigures& f) { return f.nll_max_document; });
  integers("nll_max_position", [](const KlFigures& f) { return f.nll_max_position; });
  estimates("top1", &KlFigures::top1);
  estimates("perplexity", &KlFigures::perplexity);
  estimates("perplexity_ratio", &KlFigures::perplexity_ratio);
  write_column<double>(file, "/summary/growth", statistics.states,
                       [](auto& s) { return s.growth.value; });
  write_column<double>(file, "/summary/growth_low", statistics.states,
                       [](auto& s) { return s.growth.interval.low; });
  write_column<double>(file, "/summary/growth_high", statistics.states,
                       [](auto& s) { return s.growth.interval.high; });

  std::string text;
  const std::vector<Table> tables = kl_tables(report, statistics);
  for (size_t i = 1; i < tables.size(); ++i)
    text += (text.empty() ? "" : "\n") + as_text(tables[i]);
  file.attribute<std::string>("/summary", "text", text);
  file.attribute<int64_t>("/summary", "between_documents", statistics.between_documents ? 1 : 0);
  file.attribute<int64_t>("/summary", "growth_documents", statistics.growth_documents);
  file.attribute<int64_t>("/summary", "floor_state", statistics.floor_state);
  file.attribute<uint64_t>("/summary", "bootstrap_seed", options.seed);
  file.attribute<int64_t>("/summary", "bootstrap_replicates", options.replicates);
}

/// One row of every column for each row of the statistics.
void write_answer_summary(Hdf5Writer& file, const Report& report) {
  const AnswerStatistics statistics = answer_statistics(report);
  const std::string group = "/summary/answers";
  const std::vector<AnswerRow>& rows = statistics.rows;
  file.group(group);
  auto texts = [&](const char* name, auto get) {
    write_column<std::string>(file, group + "/" + name, rows, get);
  };
  auto integers = [&](const char* name, auto get) {
    write_column<int64_t>(file, group + "/" + name, rows, get);
  };
  auto reals = [&](const char* name, auto get) {
    write_column<double>(file, group + "/" + name, rows, get);
  };
  auto of_pairs = [](double PairedFigures::*member) {
    return [member](const AnswerRow& r) {
      return r.against_baseline ? (*r.against_baseline).*member : std::nan("");
    };
  };
  texts("task", [](auto& r) { return r.task; });
  integers("state", [](auto& r) { return r.state; });
  texts("by", [](auto& r) { return group_name(r.by); });
  texts("group", [](auto& r) { return r.group; });
  integers("items", [](auto& r) { return r.figures.items; });
  integers("answers", [](auto& r) { return r.figures.answers; });
  integers("correct", [](auto& r) { return r.figures.correct; });
  reals("accuracy_low", [](auto& r) { return r.figures.accuracy.low; });
  reals("accuracy_high", [](auto& r) { return r.figures.accuracy.high; });
  integers("finished", [](auto& r) { return r.figures.finish_known ? r.figures.finished() : -1; });
  integers("finished_correct",
           [](auto& r) { return r.figures.finish_known ? r.figures.finished_correct : -1; });
  reals("finished_accuracy_low", [](auto& r) { return r.figures.finished_accuracy.low; });
  reals("finished_accuracy_high", [](auto& r) { return r.figures.finished_accuracy.high; });
  integers("truncated", [](auto& r) { return r.figures.finish_known ? r.figures.truncated : -1; });
  integers("no_answer", [](auto& r) { return r.figures.missing; });
  integers("lost", [](auto& r) { return r.against_baseline ? r.against_baseline->lost : -1; });
  integers("gained", [](auto& r) { return r.against_baseline ? r.against_baseline->gained : -1; });
  reals("change", of_pairs(&PairedFigures::change));
  reals("change_low", [](auto& r) {
    return r.against_baseline ? r.against_baseline->interval.low : std::nan("");
  });
  reals("change_high", [](auto& r) {
    return r.against_baseline ? r.against_baseline->interval.high : std::nan("");
  });
  reals("mcnemar_p", of_pairs(&PairedFigures::p));
  std::string text;
  for (const Table& table : answer_tables(report, statistics))
    text += (text.empty() ? "" : "\n") + as_text(table);
  file.attribute<std::string>(group, "text", text);
}

void write_summary(Hdf5Writer& file, const Report& report) {
  file.group("/summary");
  if (report.baseline() < 0) return;
  if (!report.documents.empty() || report.items.empty()) write_kl_summary(file, report);
  if (has_answers(report)) write_answer_summary(file, report);
}

}  // namespace

void write_report(const Report& report, const std::filesystem::path& path) {
  const size_t documents = report.documents.size();
  for (const StateReport& state : report.states) {
    if (state.documents.size() != documents) {
      throw std::invalid_argument("write_report: state " + state.info.name + " has " +
                                  std::to_string(state.documents.size()) + " documents, expected " +
                                  std::to_string(documents));
    }
  }
  Hdf5Writer file(path.string());
  file.attribute<std::string>("/", "schema", kSchema);
  checksum_placeholder(file);
  for (const RunField& field : kRunFields)
    file.attribute<std::string>("/", field.name, report.run.*field.member);
  file.attribute<std::string>("/", "versions", as_json(report.run.versions));
  file.attribute<int64_t>("/", "window", report.run.window);
  file.attribute<uint64_t>("/", "seed", report.run.seed);
  file.attribute<int64_t>("/", "vocabulary", report.run.vocabulary);
  file.attribute<int64_t>("/", "prompt_tokens", report.run.prompt_tokens);
  file.attribute<int64_t>("/", "threads", report.run.threads);
  file.attribute<int64_t>("/", "repeats", report.run.repeats);
  file.attribute<std::string>("/", "notes", nlohmann::json(report.run.notes).dump());
  write_tasks(file, report.run.tasks);

  write_column<std::string>(file, "/documents/id", report.documents, [](auto& d) { return d.id; });
  write_column<std::string>(file, "/documents/title", report.documents,
                            [](auto& d) { return d.title; });
  write_column<int64_t>(file, "/documents/tokens", report.documents,
                        [](auto& d) { return d.tokens; });
  write_column<std::string>(file, "/documents/sha256", report.documents,
                            [](auto& d) { return d.sha256; });
  write_column<uint32_t>(file, "/documents/stream", report.documents,
                         [](auto& d) { return d.stream; });
  write_column<int64_t>(file, "/documents/prompt_tokens", report.documents,
                        [](auto& d) { return d.prompt_tokens; });
  int64_t columns = 0;
  for (const DocumentInfo& document : report.documents)
    columns = std::max(columns, document.tokens);
  file.table<int32_t>("/documents/token_ids", dim(documents), columns, -1);
  std::vector<int64_t> lengths(documents, 0);
  for (size_t d = 0; d < std::min(documents, report.token_ids.size()); ++d) {
    file.write_row<int32_t>("/documents/token_ids", dim(d), report.token_ids[d]);
    lengths[d] = dim(report.token_ids[d].size());
  }
  file.attribute_list<int64_t>("/documents/token_ids", "length", lengths);

  write_column<int32_t>(file, "/layers/index", report.layers, [](auto& l) { return l.index; });
  write_column<std::string>(file, "/layers/kind", report.layers, [](auto& l) { return l.kind; });
  write_column<int32_t>(file, "/layers/heads", report.layers, [](auto& l) { return l.heads; });
  const int64_t heads = head_count(report.layers);
  std::vector<float> decays;
  for (const LayerInfo& layer : report.layers) {
    for (int64_t h = 0; h < heads; ++h) {
      decays.push_back(h < dim(layer.mean_decay.size()) ? layer.mean_decay[static_cast<size_t>(h)]
                                                        : kNaN);
    }
  }
  file.dataset<float>("/layers/mean_decay", {dim(report.layers.size()), heads}, decays);

  file.group("/states");
  for (size_t s = 0; s < report.states.size(); ++s) {
    write_state(file, state_group(s), report, report.states[s]);
    write_answers(file, state_group(s) + "/answers", report.states[s].answers);
  }
  write_items(file, report.items);
  write_summary(file, report);

  std::vector<std::byte> bytes = file.finish();
  seal_checksum(bytes);
  replace_file(path, bytes);
}

namespace {

Report read_checked(const std::filesystem::path& path) {
  std::optional<std::vector<std::byte>> bytes = read_file(path);
  if (!bytes) throw std::runtime_error(path.string() + ": no such file");
  std::string wrong = check_checksum(*bytes);
  if (!wrong.empty()) {
    throw std::runtime_error(path.string() + ": is no report of this program or is damaged: " +
                             wrong + "; assemble it anew from its run folder");
  }
  Hdf5Reader file(path.string(), *bytes);
  std::string schema =
      file.has_attribute("/", "schema") ? file.attribute<std::string>("/", "schema") : "none";
  if (schema != kSchema) {
    throw std::runtime_error(path.string() + ": schema is " + schema + ", expected " + kSchema);
  }
  Report report;
  report.path = path.string();
  for (const RunField& field : kRunFields)
    report.run.*field.member = file.attribute<std::string>("/", field.name);
  report.run.versions = from_json(file.attribute<std::string>("/", "versions"));
  report.run.window = static_cast<int>(file.attribute<int64_t>("/", "window"));
  report.run.seed = file.attribute<uint64_t>("/", "seed");
  report.run.vocabulary = file.attribute<int64_t>("/", "vocabulary");
  report.run.prompt_tokens = file.attribute<int64_t>("/", "prompt_tokens");
  report.run.threads = static_cast<int>(file.attribute<int64_t>("/", "threads"));
  if (file.has_attribute("/", "notes")) {
    report.run.notes = nlohmann::json::parse(file.attribute<std::string>("/", "notes"))
                           .get<std::vector<std::string>>();
  }
  if (file.has_attribute("/", "repeats"))
    report.run.repeats = static_cast<int>(file.attribute<int64_t>("/", "repeats"));
  report.run.tasks = read_tasks(file);

  auto ids = file.dataset<std::string>("/documents/id");
  auto titles = file.dataset<std::string>("/documents/title");
  auto tokens = file.dataset<int64_t>("/documents/tokens");
  auto hashes = file.dataset<std::string>("/documents/sha256");
  auto streams = file.dataset<uint32_t>("/documents/stream");
  auto lengths = file.attribute_list<int64_t>("/documents/token_ids", "length");
  std::vector<int64_t> prompts(ids.size(), 0);
  if (file.has("/documents/prompt_tokens"))
    prompts = file.dataset<int64_t>("/documents/prompt_tokens");
  for (size_t d = 0; d < ids.size(); ++d) {
    report.documents.push_back(
        {ids[d], titles.at(d), tokens.at(d), hashes.at(d), streams.at(d), prompts.at(d)});
    report.token_ids.push_back(file.row<int32_t>("/documents/token_ids", dim(d), lengths.at(d)));
  }

  auto indices = file.dataset<int32_t>("/layers/index");
  auto kinds = file.dataset<std::string>("/layers/kind");
  auto head_counts = file.dataset<int32_t>("/layers/heads");
  auto decays = file.dataset<float>("/layers/mean_decay");
  const size_t decay_heads = indices.empty() ? 0 : decays.size() / indices.size();
  for (size_t i = 0; i < indices.size(); ++i) {
    LayerInfo layer{indices[i], kinds.at(i), head_counts.at(i), {}};
    for (size_t h = 0; h < static_cast<size_t>(layer.heads); ++h) {
      layer.mean_decay.push_back(decays.at(i * decay_heads + h));
    }
    if (std::all_of(layer.mean_decay.begin(), layer.mean_decay.end(),
                    [](float x) { return std::isnan(x); })) {
      layer.mean_decay.clear();
    }
    report.layers.push_back(std::move(layer));
  }

  const size_t count = file.members("/states").size();
  const size_t layers = report.layers.size();
  for (size_t s = 0; s < count; ++s) {
    const std::string group = state_group(s);
    StateReport state;
    for (const StateField& field : kStateFields)
      state.info.*field.member = file.attribute<std::string>(group, field.name);
    state.info.window = static_cast<int>(file.attribute<int64_t>(group, "window"));
    state.info.seed = file.attribute<uint64_t>(group, "seed");
    state.info.options = from_json(file.attribute<std::string>(group, "options"));
    state.info.bits_per_element = file.attribute<double>(group, "bits_per_element");
    state.info.bytes_per_sequence = file.attribute<int64_t>(group, "bytes_per_sequence");
    auto first = file.attribute_list<int64_t>(group + "/kl", "first_position");
    auto length = file.attribute_list<int64_t>(group + "/kl", "length");
    auto health = file.dataset<LayerHealth>(group + "/health");
    std::vector<int64_t> positions, error_dims;
    std::vector<float> error, error_read;
    size_t samples = 0;
    if (file.has(group + "/state_error")) {
      positions = file.dataset<int64_t>(group + "/state_error_position");
      error = file.dataset<float>(group + "/state_error");
      if (file.has(group + "/state_error_read"))
        error_read = file.dataset<float>(group + "/state_error_read");
      samples = ids.empty() ? 0 : positions.size() / ids.size();
    }
    const size_t block = positions.empty() ? 0 : error.size() / positions.size();
    for (size_t d = 0; d < ids.size(); ++d) {
      StateDocument document;
      document.first_position = first.at(d);
      document.length = length.at(d) == 0 ? 0 : first.at(d) + length.at(d);
      document.kl = file.row<float>(group + "/kl", dim(d), document.length);
      document.nll = file.row<float>(group + "/nll", dim(d), document.length);
      document.top1 = file.row<uint8_t>(group + "/top1", dim(d), document.length);
      document.health.assign(health.begin() + static_cast<std::ptrdiff_t>(d * layers),
                             health.begin() + static_cast<std::ptrdiff_t>((d + 1) * layers));
      for (size_t i = 0; i < samples && positions[d * samples + i] >= 0; ++i) {
        document.error_positions.push_back(positions[d * samples + i]);
        auto begin = static_cast<std::ptrdiff_t>((d * samples + i) * block);
        auto end = begin + static_cast<std::ptrdiff_t>(block);
        document.error.insert(document.error.end(), error.begin() + begin, error.begin() + end);
        if (!error_read.empty()) {
          document.error_read.insert(document.error_read.end(), error_read.begin() + begin,
                                     error_read.begin() + end);
        }
      }
      state.documents.push_back(std::move(document));
    }
    state.answers = read_answers(file, group + "/answers");
    report.states.push_back(std::move(state));
  }
  report.items = read_items(file);
  return report;
}

}  // namespace

Report read_report(const std::filesystem::path& path) {
  try {
    return read_checked(path);
  } catch (const std::runtime_error&) {  // says what is wrong
    throw;
  } catch (const std::exception& error) {  // sizes, texts and numbers that do not fit
    throw std::runtime_error(path.string() +
                             ": is no report of this program or is damaged: " + error.what());
  }
}

}  // namespace replayeval
