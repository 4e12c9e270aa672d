#include "harness/report_command.h"

#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>

#include "datasets/chat_template.h"
#include "datasets/task.h"
#include "datasets/tokenizer.h"
#include "models/hub.h"
#include "reports/answer_statistics.h"
#include "reports/answer_tables.h"
#include "reports/attribution.h"
#include "reports/compare.h"
#include "reports/export.h"
#include "reports/files.h"
#include "reports/flips.h"
#include "reports/health_tables.h"
#include "reports/html.h"
#include "reports/run_folder.h"
#include "reports/samples.h"
#include "reports/schema.h"
#include "reports/statistics.h"
#include "reports/tables.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

/// The report of a run folder, written to its report.h5 where that lacks something of it.
Report refreshed_report(const fs::path& path) {
  const RunFolder folder = RunFolder::open_read_only(path);
  for (const std::string& note : folder.notes()) std::fprintf(stderr, "%s\n", note.c_str());
  std::string kept;
  Report report = folder.fullest_report(&kept);
  if (!kept.empty()) {
    std::fprintf(stderr, "%s\n", kept.c_str());
    return report;
  }
  const size_t units = folder.missing().size(), answers = folder.missing_answers().size();
  if (units + answers > 0 && folder.finished().empty() && !has_answers(report)) {
    std::fprintf(stderr, "%s: nothing is finished: %zu units of work and %zu answers are missing\n",
                 path.c_str(), units, answers);
  }
  if (fs::exists(path / "report.h5") && units + answers == 0) return report;
  try {
    report.run.finished.clear();
    write_report(report, path / "report.h5");
  } catch (const std::runtime_error& error) {
    // a folder of someone else's: its parts are read all the same
    std::fprintf(stderr, "%s\n", error.what());
  }
  return report;
}

/// Prompts by hash, of the tasks of the report as far as their files and data are at hand.
std::map<std::string, std::string> prompts_at_hand(const Report& report) {
  std::set<std::string> wanted;
  for (const ItemInfo& item : report.items) wanted.insert(item.prompt_sha256);
  std::map<std::string, std::string> prompts;
  std::unique_ptr<ChatTemplate> chat;
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    const fs::path model = find_model(report.run.model);
    chat = load_chat_template(model);
    tokenizer =
        load_tokenizer(report.run.tokenizer.empty() ? model : fs::path(report.run.tokenizer));
  } catch (const std::exception&) {
    // A report without a model at hand: prompts that need one do not have the hash of the items.
  }
  for (const TaskInfo& info : report.run.tasks) {
    try {
      const TaskSpec task = load_task(info.name);
      const PromptSet set = load_prompts(task, report.run.seed, chat.get(), tokenizer.get());
      for (const PromptedItem& item : set.items) {
        if (wanted.contains(item.prompt_sha256)) prompts[item.prompt_sha256] = item.prompt;
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\nsamples of task %s: without the texts of the prompts\n",
                   error.what(), info.name.c_str());
    }
  }
  return prompts;
}

int export_tables(const Report& report, const std::string& as, const fs::path& folder) {
  make_writable_folder(folder);
  auto wrote = [](const fs::path& file, int64_t lines) {
    std::printf("%s: %" PRId64 " lines\n", file.c_str(), lines);
  };
  if (as == "samples") {
    for (const auto& [file, lines] : write_samples(report, prompts_at_hand(report), folder))
      wrote(file, lines);
    return 0;
  }
  const bool csv = as == "csv";
  if (!report.documents.empty() || report.items.empty()) {
    const fs::path file = folder / ("positions." + as);
    wrote(file, csv ? write_positions_csv(report, file) : write_positions_parquet(report, file));
  }
  if (!report.items.empty()) {
    const fs::path file = folder / ("answers." + as);
    wrote(file, csv ? write_answers_csv(report, file) : write_answers_parquet(report, file));
  }
  return 0;
}

}  // namespace

Report read_run(const std::string& run) {
  return RunFolder::holds_run(run) ? refreshed_report(run) : load_report(run);
}

Report read_runs(const std::vector<std::string>& runs, const std::string& command) {
  std::vector<Report> reports;
  for (const std::string& run : runs) reports.push_back(read_run(run));
  return reports.size() == 1 ? std::move(reports[0]) : merge_reports(reports, command);
}

std::string show_runs(const ShowOptions& options) {
  std::vector<Report> answered, measured;
  for (const std::string& run : options.runs) {
    Report report = read_run(run);
    (report.items.empty() ? measured : answered).push_back(std::move(report));
  }
  auto joined = [](std::vector<Report>& reports) {
    return reports.size() == 1 ? std::move(reports[0]) : merge_reports(reports);
  };
  if (options.flips && answered.empty())
    throw std::invalid_argument("show: --flips: none of the runs has graded answers");
  if (options.csv && !options.flips && !answered.empty() && !measured.empty())
    throw std::invalid_argument(
        "show: --csv: expected runs of one kind, got graded answers and KL; show them apart");
  std::string text;
  std::optional<Report> kl;
  if (!measured.empty()) kl = joined(measured);
  if (!answered.empty()) {
    const Report report = joined(answered);
    const AnswerStatistics statistics = answer_statistics(report);
    // A report may hold KL beside answers.
    const Report* with_kl = kl ? &*kl : report.documents.empty() ? nullptr : &report;
    std::vector<Flip> flips;
    if (options.flips) flips = find_flips(report, with_kl);
    if (options.csv)
      return options.flips ? flips_csv(report, flips) : answer_csv(report, statistics);
    if (options.json) {
      text = answer_json(report, statistics, options.flips ? flips_json(report, flips) : "");
      if (!kl) return text;
      text.pop_back();
      return "[" + text + ",\n" + kl_json(*kl, kl_statistics(*kl)) + "]\n";
    }
    text = answer_text(report, statistics);
    if (options.flips) text += "\n" + as_text(flips_table(report, flips, true));
    if (!kl && !report.documents.empty()) text += "\n" + kl_text(report, kl_statistics(report));
  }
  if (!kl) return text;
  const KlStatistics statistics = kl_statistics(*kl);
  if (options.csv) return kl_csv(*kl, statistics);
  if (options.json) return kl_json(*kl, statistics);
  if (!text.empty()) text += "\n";
  text += kl_text(*kl, statistics);
  if (options.health) {
    for (const Table& table : health_tables(*kl)) text += "\n" + as_text(table);
  }
  for (const Table& table : attribution_tables(*kl, statistics)) text += "\n" + as_text(table);
  return text;
}

int report_command(const ReportOptions& options) {
  if (!options.redact.empty() && options.redact != "formats")
    throw std::invalid_argument("report: --redact: expected formats, got '" + options.redact + "'");
  if (!options.export_as.empty() && options.export_as != "csv" && options.export_as != "parquet" &&
      options.export_as != "samples")
    throw std::invalid_argument("report: --export: expected csv, parquet or samples, got '" +
                                options.export_as + "'");
  if (options.out.empty())
    throw std::invalid_argument(
        "report: expected -o with the name of the page, or of a folder for --export");
  if (!options.export_as.empty() && fs::exists(options.out) && !fs::is_directory(options.out))
    throw std::invalid_argument("report: -o " + options.out +
                                ": expected a folder for --export, got a file");
  if (options.export_as.empty() && fs::is_directory(options.out))
    throw std::invalid_argument("report: -o " + options.out +
                                ": expected the name of a page, got a folder; add report.html");
  Report report = read_runs(options.runs, "report");
  if (!options.export_as.empty()) {
    if (!options.redact.empty()) {
      KlStatistics unused;
      redact_formats(&report, &unused);
    }
    if (options.export_as == "samples" && report.items.empty()) {
      throw std::invalid_argument(
          "report: --export samples: expected a run with graded answers, got one without");
    }
    return export_tables(report, options.export_as, options.out);
  }
  HtmlOptions html;
  html.redact_formats = !options.redact.empty();
  const std::string page = report_html(report, kl_statistics(report), html);
  const fs::path out = options.out;
  if (out.has_parent_path()) make_writable_folder(out.parent_path());
  replace_file(out, as_byte_span(page));
  std::printf("%s: %.1f MB, %zu states\n", options.out.c_str(),
              static_cast<double>(page.size()) / 1e6, report.states.size());
  return 0;
}

}  // namespace replayeval
