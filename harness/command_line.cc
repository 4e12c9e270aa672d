#include "harness/command_line.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "datasets/grade_check.h"
#include "datasets/task.h"
#include "datasets/tokenizer.h"
#include "datasets/utf8.h"
#include "harness/bench.h"
#include "harness/bench_decoder.h"
#include "harness/bench_gpu.h"
#include "harness/bench_traffic.h"
#include "harness/build_info.h"
#include "harness/check_model.h"
#include "harness/check_quant.h"
#include "harness/experiment.h"
#include "harness/fold_stability.h"
#include "harness/grade_command.h"
#include "harness/metrics.h"
#include "harness/progress.h"
#include "harness/report_command.h"
#include "harness/score.h"
#include "harness/show_format.h"
#include "harness/teacher_forced.h"
#include "models/hub.h"
#include "models/random_checkpoint.h"
#include "quant/quantize.h"
#include "quant/state_format.h"
#include "reports/compare.h"
#include "reports/files.h"
#include "reports/run_folder.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void reject(const std::string& message) { throw std::invalid_argument(message); }

/// Rows of equal length as left-aligned columns, two spaces apart; the last column is not padded.
void print_columns(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c + 1 < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) {
      const bool last = c + 1 == row.size();
      std::printf("%-*s%s", last ? 0 : static_cast<int>(widths[c]), row[c].c_str(),
                  last ? "\n" : "  ");
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------
// run
// ---------------------------------------------------------------------------------------------------------------

struct RunArguments {
  std::vector<std::string> experiment;  // the file, then key=value
  std::vector<std::string> settings;
  std::string out;
  std::string shard = "1/1";
  RunOptions options;
};

int parse_whole(const std::string& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : -1;
}

int run(RunArguments arguments) {
  for (size_t i = 1; i < arguments.experiment.size(); ++i)
    arguments.settings.push_back(arguments.experiment[i]);
  Experiment experiment = load_experiment(arguments.experiment.at(0), arguments.settings);
  if (find_invalid_utf8(arguments.out) != std::string::npos)
    reject("--out: expected UTF-8, got '" + arguments.out + "'");
  if (!arguments.out.empty()) experiment.out = arguments.out;
  constexpr int kMostShards = 4096;
  const size_t slash = arguments.shard.find('/');
  const int shard = slash == std::string::npos ? -1 : parse_whole(arguments.shard.substr(0, slash));
  const int shards =
      slash == std::string::npos ? -1 : parse_whole(arguments.shard.substr(slash + 1));
  if (shard < 1 || shards < shard || shards > kMostShards) {
    reject("--shard: expected i/n with 1 <= i <= n <= " + std::to_string(kMostShards) +
           ", such as 2/4, got '" + arguments.shard + "'");
  }
  arguments.options.shard = shard - 1;
  arguments.options.shards = shards;
  install_stop_signals();
  return experiment.job == "score" ? run_score(experiment, arguments.options)
                                   : run_teacher_forced(experiment, arguments.options);
}

// ---------------------------------------------------------------------------------------------------------------
// show
// ---------------------------------------------------------------------------------------------------------------

int show(const ShowOptions& options) {
  const std::string text = show_runs(options);
  std::printf("%s%s", text.c_str(), text.ends_with('\n') ? "" : "\n");
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// compare
// ---------------------------------------------------------------------------------------------------------------

struct CompareArguments {
  std::string base, candidate, gate, junit, markdown;
  std::vector<std::string> pairs;
  CompareOptions options;
};

int compare_command(CompareArguments arguments) {
  for (const std::string& pair : arguments.pairs) {
    // Names of states hold '=' themselves (nvfp4@L=1=fp8@L=1): the one that leaves a state on both
    // sides of it divides.
    const Report base = load_report(arguments.base);
    const Report candidate = load_report(arguments.candidate);
    bool found = false;
    for (size_t at = pair.find('='); at != std::string::npos && !found;
         at = pair.find('=', at + 1)) {
      const std::string left = pair.substr(0, at);
      const std::string right = pair.substr(at + 1);
      if (base.find_state(left) < 0 || candidate.find_state(right) < 0) continue;
      arguments.options.pairs.emplace_back(left, right);
      found = true;
    }
    if (!found) {
      reject("--pair " + pair + ": expected A=B with A a state of " + arguments.base +
             " and B one of " + arguments.candidate);
    }
  }
  std::optional<Gate> gate;
  if (!arguments.gate.empty()) gate = read_gate(arguments.gate);
  const Comparison comparison = compare(read_run(arguments.base), read_run(arguments.candidate),
                                        arguments.options, gate ? &*gate : nullptr);
  std::printf("%s", comparison_text(comparison).c_str());
  if (!arguments.junit.empty())
    replace_file(arguments.junit, as_byte_span(comparison_junit(comparison)));
  if (!arguments.markdown.empty())
    replace_file(arguments.markdown, as_byte_span(comparison_markdown(comparison)));
  return comparison.exit_code();
}

// ---------------------------------------------------------------------------------------------------------------
// list
// ---------------------------------------------------------------------------------------------------------------

void list_formats() {
  // Bits an element at a common head shape; scales of rows and heads make it depend on the shape.
  const StateShape shape{64, 128};
  std::vector<std::vector<std::string>> rows = {{"FORMAT", "BITS", "WHAT"}};
  for (const BuiltinFormat& format : builtin_formats()) {
    char bits[32];
    std::snprintf(bits, sizeof bits, "%.4g", bits_per_element(*find_format(format.name), shape));
    rows.push_back({format.name, bits, format.description});
  }
  print_columns(rows);
  std::printf("bits an element, scales included, for a head of %d x %d\n", shape.head_dim,
              shape.state_dim);
}

void list_families() {
  std::vector<std::vector<std::string>> rows = {{"FAMILY", "SEEN WITH", "WHAT"}};
  for (const ModelFamily& family : model_families()) {
    rows.push_back({family.name, family.trained_weights_seen ? "trained weights" : "structure only",
                    family.description});
  }
  print_columns(rows);
}

void list_tasks_of(const fs::path& folder) {
  std::vector<std::vector<std::string>> rows = {{"TASK", "VERSION", "DATA", "WHAT"}};
  for (const TaskListing& task : list_tasks(folder))
    rows.push_back({task.name, std::to_string(task.version), task.data, task.about});
  print_columns(rows);
}

void list_metrics() {
  std::vector<std::vector<std::string>> rows = {{"METRIC", "UNIT", "WHAT"}};
  for (const MetricInfo& metric : metric_infos()) {
    rows.push_back(
        {std::string(metric.name), std::string(metric.unit), std::string(metric.meaning)});
  }
  print_columns(rows);
}

void list_keys() {
  std::vector<std::vector<std::string>> rows = {{"KEY", "TYPE", "DEFAULT", "JOB", "WHAT"}};
  rows.push_back({"include", "file | list of files", "-", "all",
                  "read first, relative to this file; later keys override"});
  for (const ExperimentKey& key : experiment_keys()) {
    const std::string fallback = key.required                ? "(required)"
                                 : key.default_value.empty() ? "-"
                                                             : std::string(key.default_value);
    rows.push_back(
        {std::string(key.name), std::string(key.type), fallback, std::string(key.job),
         std::string(key.help) + (key.available ? "" : " (not available in this version)")});
  }
  print_columns(rows);
}

int list(const std::string& what) {
  if (what == "formats") {
    list_formats();
  } else if (what == "families") {
    list_families();
  } else if (what == "metrics") {
    list_metrics();
  } else if (what == "keys") {
    list_keys();
  } else if (what == "tasks") {
    list_tasks_of("eval_configs/tasks");
  } else {
    reject("list: expected formats, families, tasks, metrics or keys, got '" + what + "'");
  }
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// check
// ---------------------------------------------------------------------------------------------------------------

struct CheckModelArguments {
  std::string folder;
  std::string reference;
  std::string compute = "fp32";
  std::string dense = "invariant";
  std::string kernels = "fast";
  std::string dt_clamp = "forward";
  std::string device = "cpu";
  CheckModelOptions options;
};

int check_model_command(const CheckModelArguments& arguments) {
  CheckModelOptions options = arguments.options;
  options.folder = find_model(arguments.folder);
  if (!arguments.reference.empty()) options.reference = arguments.reference;
  options.compute = arguments.compute == "bf16" ? ComputeType::bf16 : ComputeType::fp32;
  options.dense = arguments.dense == "fast" ? DenseMode::fast : DenseMode::invariant;
  options.kernels = arguments.kernels == "reference" ? KernelForm::reference : KernelForm::fast;
  options.device = arguments.device == "cuda" ? Device::cuda : Device::cpu;
  options.dt_clamp = arguments.dt_clamp == "none" ? DtClamp::none : DtClamp::forward;
  return check_model(options);
}

int check_tokenizer_command(const std::string& folder, const std::string& answers) {
  if (!fs::exists(folder))
    reject("check tokenizer: expected a folder with tokenizer.json or tokenizer.model, got '" +
           folder + "', which does not exist");
  const TokenizerCheck check = check_tokenizer(fs::path(folder), fs::path(answers));
  std::printf("ids                 %zu of %zu equal\n", check.ids_equal, check.texts);
  if (check.with_special > 0)
    std::printf("ids with special    %zu of %zu equal\n", check.with_special_equal,
                check.with_special);
  if (check.decodes > 0)
    std::printf("decoded text        %zu of %zu equal\n", check.decodes_equal, check.decodes);
  if (check.worst) {
    const TokenizerCheck::Mismatch& worst = *check.worst;
    std::printf(
        "worst: %s:%zu: %s differ from %zu on\n  input    %s\n  expected %s\n  got      %s\n",
        worst.file.c_str(), worst.line, worst.what.c_str(), worst.first_difference,
        worst.input.c_str(), worst.expected.c_str(), worst.got.c_str());
  }
  return check.passed() ? 0 : 1;
}

/// 0 when every case agrees.
int check_grader_command(const std::string& file) {
  const GraderReport report = check_grader(file);
  bool agrees = true;
  for (const GraderCheck& check : report.checks) {
    std::printf("%-24s against %-32s %5zu of %5zu agree", check.rule.c_str(), check.against.c_str(),
                check.agree, check.cases);
    if (check.false_accepts > 0) std::printf(", %zu wrongly accepted", check.false_accepts);
    std::printf("\n");
    agrees = agrees && check.agree == check.cases;
    if (!check.worst) continue;
    std::printf("  worst: %s:%zu: %s: expected %s, got %s\n  %s\n", report.file.c_str(),
                check.worst->line, check.worst->id.c_str(), check.worst->expected.c_str(),
                check.worst->got.c_str(), check.worst->excerpt.c_str());
  }
  if (report.unknown_rows > 0)
    std::printf("%zu of %zu rows are of no known layout\n", report.unknown_rows, report.rows);
  return agrees && report.unknown_rows == 0 ? 0 : 1;
}

int parse_and_run(int argc, const char* const* argv) {
  CLI::App app(
      "How far does a hybrid state-space model move when its recurrent state is stored in low "
      "precision?",
      "replayeval");
  app.set_version_flag("--version", [] {
    const BuildInfo build = build_info();
    return "replayeval " + build.version + " (" + build.revision + ", " + build.compiler + ")";
  });
  app.require_subcommand(1);
  int result = 0;

  RunArguments run_arguments;
  CLI::App* run_command = app.add_subcommand("run", "run an experiment into its run folder");
  run_command->add_option("experiment", run_arguments.experiment, "EXPERIMENT.yaml [key=value ...]")
      ->required();
  run_command
      ->add_option("--set", run_arguments.settings,
                   "key=value: override one key (repeatable; dotted keys, YAML values)")
      ->allow_extra_args(false);
  run_command->add_option("--out", run_arguments.out, "run folder");
  run_command->add_flag("--resume", run_arguments.options.resume,
                        "go on with the run folder's run");
  run_command->add_flag("--dry-run", run_arguments.options.dry_run,
                        "validate and print what the run needs");
  run_command->add_option("--shard", run_arguments.shard,
                          "i/n: this is process i of n on one run folder");
  run_command->callback([&] { result = run(run_arguments); });

  ShowOptions show_options;
  CLI::App* show_command = app.add_subcommand("show", "tables of finished and unfinished runs");
  show_command->add_option("runs", show_options.runs, "run folders or report.h5 files")->required();
  CLI::Option* csv_option = show_command->add_flag(
      "--csv", show_options.csv, "a line for each state and position bin, or group of answers");
  show_command->add_flag("--json", show_options.json, "everything as JSON")->excludes(csv_option);
  show_command->add_flag("--health", show_options.health, "also the state health of every layer");
  show_command->add_flag("--flips", show_options.flips,
                         "also the answers that a state turned from right to wrong");
  show_command->callback([&] { result = show(show_options); });

  ReportOptions report_options;
  CLI::App* report_app =
      app.add_subcommand("report", "one self-contained page of runs, or their tables");
  report_app->add_option("runs", report_options.runs, "run folders or report.h5 files")->required();
  report_app->add_option("-o,--out", report_options.out,
                         "the page to write (report.html); with --export, a folder");
  report_app->add_option(
      "--export", report_options.export_as,
      "csv or parquet: tables by position and by answer instead of the page; samples: answers as "
      "JSON lines in the layout of lm-evaluation-harness's logged samples");
  report_app->add_option("--redact", report_options.redact,
                         "formats: hide names and definitions of formats");
  report_app->callback([&] { result = report_command(report_options); });

  CompareArguments compare_arguments;
  CLI::App* compare_app =
      app.add_subcommand("compare", "differences of two runs, and a gate with an exit code");
  compare_app->add_option("base", compare_arguments.base, "run folder or report.h5")->required();
  compare_app->add_option("candidate", compare_arguments.candidate, "run folder or report.h5")
      ->required();
  compare_app->add_option(
      "--gate", compare_arguments.gate,
      "gate file: limits that the candidate must keep. Documents, positions and "
      "answers that a limit is about and one run lacks are an error");
  compare_app
      ->add_option("--pair", compare_arguments.pairs,
                   "A=B: compare state A of the base with state B of the candidate (repeatable)")
      ->allow_extra_args(false);
  compare_app
      ->add_option("--allow", compare_arguments.options.allow,
                   "a field that may differ (repeatable): job, model, tokenizer, data, baseline, "
                   "prompt_tokens, tasks, repeats, gold, prompts, grading or states. With data, "
                   "documents and positions that the experiment of one run alone has are left out")
      ->allow_extra_args(false);
  compare_app->add_option("--junit", compare_arguments.junit, "also write JUnit XML to this file");
  compare_app->add_option("--markdown", compare_arguments.markdown,
                          "also write Markdown to this file");
  compare_app->callback([&] { result = compare_command(compare_arguments); });

  GradeOptions grade_options;
  std::vector<std::string> grade_allow;
  CLI::App* grade_app =
      app.add_subcommand("grade", "grade answers of other programs, or stored ones again");
  grade_app->add_option("run", grade_options.run, "run folder or report.h5 to grade again");
  grade_app
      ->add_option("--import", grade_options.imports,
                   "JSON lines of answers: logged samples of lm-evaluation-harness, or id, text, "
                   "finish_reason, tokens (repeatable, each with its --state)")
      ->allow_extra_args(false);
  grade_app
      ->add_option("--state", grade_options.states, "name of what gave these answers (repeatable)")
      ->allow_extra_args(false);
  grade_app->add_option("--task", grade_options.tasks, "task file or name (repeatable for a run)")
      ->allow_extra_args(false);
  grade_app->add_option("--data", grade_options.data, "file or folder of the task's data");
  grade_app->add_option("--model", grade_options.model,
                        "folder or hub name, for its chat template where the task uses one");
  grade_app->add_option("--label", grade_options.label,
                        "what the report calls the model of imported answers");
  grade_app->add_option("--baseline", grade_options.baseline,
                        "state that the others are compared with, the first unless given");
  grade_app->add_option("--seed", grade_options.seed, "of option orders, 1 unless given");
  grade_app->add_option("--allow", grade_allow, "prompts: take answers to other prompts too")
      ->check(CLI::IsMember({"prompts"}))
      ->allow_extra_args(false);
  grade_app->add_option("-o,--output", grade_options.out, "report to write");
  grade_app->callback([&] {
    grade_options.allow_prompts = !grade_allow.empty();
    std::printf("%s", grade_answers(grade_options).c_str());
    result = 0;
  });

  BenchOptions bench_options;
  std::string bench_model, bench_data;
  CLI::App* bench_app =
      app.add_subcommand("bench", "rates of the kernels, and where a run's time goes");
  bench_app->add_option("what", bench_options.what,
                        "all (unless given) | formats | kernels | job | growth; with --device "
                        "cuda all | decode | formats | kernels | kl | job; with --model decode");
  GpuBenchOptions gpu_options;
  std::string bench_device = "cpu";
  bench_app->add_option("--device", bench_device, "cpu unless given, or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  bench_app->add_option("--rows", gpu_options.rows, "sequences of a decode step on a GPU, 256");
  bench_app->add_option("--window", gpu_options.window, "L of a decode step on a GPU, 16");
  bench_app
      ->add_option("--shape", gpu_options.shapes,
                   "on a GPU: mamba2-h96, mamba2-h128, gdn-h32 (repeatable), all unless given")
      ->allow_extra_args(false);
  std::string bench_dense = "fast";
  bench_app
      ->add_option("--dense", bench_dense,
                   "decode on a GPU: fast unless given, or invariant, sums as the CPU's")
      ->check(CLI::IsMember({"invariant", "fast"}));
  bench_app->add_option("--threads", bench_options.threads, "all cores unless given")
      ->check(CLI::Range(1, 4096));
  bench_app->add_option("--model", bench_model,
                        "folder or hub name, models/mini-mamba2 unless given");
  bench_app->add_option("--data", bench_data,
                        "folder in PG-19's layout, datasets/sample unless given");
  int64_t bench_context = 1024;
  bench_app
      ->add_option("--context", bench_context,
                   "tokens before the first step of a whole model's decode, 1024 unless given")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  std::string bench_sweep;
  bench_app->add_option("--sweep", bench_sweep,
                        "decode on a GPU: batch=1..512 or window=1..64, measured beside predicted");
  bench_app->add_flag("--single", bench_options.single,
                      "job on a GPU: 2,048 tokens in the middle go one at a time, for the ratio");
  bench_app->add_option("--tokens", bench_options.tokens, "of the job, 8192 unless given");
  bench_app->add_option("--longest", bench_options.longest,
                        "longest context of the growth table, 32768 unless given");
  bench_app
      ->add_option("--state", bench_options.states,
                   "state precision of the job (repeatable); the quickstart's unless given")
      ->allow_extra_args(false);
  std::string random_name, random_folder;
  uint64_t random_seed = 1;
  CLI::App* random_app =
      bench_app->add_subcommand("checkpoint", "write a checkpoint with random weights");
  random_app
      ->add_option("name", random_name,
                   "bench-gdn-4b, bench-mamba2-4b, bench-gdn-200m, bench-gdn-tiny or "
                   "bench-mamba2-tiny")
      ->required();
  random_app
      ->add_option("folder", random_folder, "where to write config.json and model.safetensors")
      ->required();
  random_app->add_option("--seed", random_seed);
  bench_app->callback([&] {
    if (random_app->parsed()) {
      write_random_checkpoint(random_name, random_folder, random_seed);
      return;
    }
    gpu_options.states = bench_options.states;
    gpu_options.dense = bench_dense == "fast" ? DenseMode::fast : DenseMode::invariant;
    if (bench_options.what == "decode" && !bench_model.empty()) {
      if (!bench_sweep.empty()) reject("bench: --sweep: expected no --model with it");
      if (bench_device == "cuda") {
        result = run_decoder_bench(find_model(bench_model), gpu_options, bench_context, stdout);
        return;
      }
      result = print_model_traffic(find_model(bench_model), gpu_options, stdout);
      return;
    }
    if (!bench_sweep.empty()) {
      if (bench_options.what != "decode" || bench_device != "cuda")
        reject("bench: --sweep: expected decode --device cuda with it");
      result = run_decode_sweep(bench_sweep, gpu_options, stdout);
      return;
    }
    if (bench_device == "cuda" && bench_options.what == "job") {
      if (!bench_model.empty()) bench_options.model = find_model(bench_model);
      if (!bench_data.empty()) bench_options.data = bench_data;
      result = run_device_job_bench(bench_options);
      return;
    }
    if (bench_device == "cuda") {
      result = run_gpu_bench(bench_options.what, gpu_options, stdout);
      return;
    }
    if (!bench_model.empty()) bench_options.model = find_model(bench_model);
    if (!bench_data.empty()) bench_options.data = bench_data;
    result = run_bench(bench_options);
  });

  ShowFormatOptions format_options;
  CLI::App* format_app = app.add_subcommand("format", "properties and error of a number format");
  format_app->add_option("format", format_options.format, "built-in name, or a YAML file")
      ->required();
  format_app->add_option("--head-dim", format_options.shape.head_dim,
                         "rows of a head's state, 64 unless given");
  format_app->add_option("--state-dim", format_options.shape.state_dim,
                         "columns of a head's state, 128 unless given");
  format_app->add_option("--seed", format_options.seed,
                         "of the synthetic data and of stochastic rounding");
  format_app->add_flag("--json", format_options.json, "as JSON");
  format_app->add_option(
      "--states", format_options.states,
      "state dumps to measure the error on: a file, a folder, or a run with dump_states");
  format_app->add_option(
      "--run", format_options.run,
      "a run with state_error_every: error of each head, predicted and measured");
  format_app->add_option("-o,--output", format_options.output, "HDF5 file to save the figures in");
  format_app->callback([&] { result = show_format(format_options); });

  std::string list_what;
  CLI::App* list_command = app.add_subcommand("list", "formats, families, tasks, metrics or keys");
  list_command->add_option("what", list_what, "formats | families | tasks | metrics | keys")
      ->required();
  list_command->callback([&] { result = list(list_what); });

  CLI::App* check_command =
      app.add_subcommand("check", "compare with stored answers of other programs");
  check_command->require_subcommand(1);
  CheckModelArguments model_arguments;
  CLI::App* check_model_app =
      check_command->add_subcommand("model", "logits, states and greedy tokens of a checkpoint");
  check_model_app->add_option("folder", model_arguments.folder, "model folder or hub name")
      ->required();
  check_model_app->add_option("--reference", model_arguments.reference,
                              "stored answers; reference.safetensors in the folder unless given");
  check_model_app
      ->add_option("--window", model_arguments.options.windows,
                   "window lengths L to run with, 16,1 unless given")
      ->delimiter(',');
  check_model_app
      ->add_option("--chunk", model_arguments.options.chunks,
                   "tokens a call, 0: the whole sequence; 0,7,64,1 unless given")
      ->delimiter(',');
  check_model_app->add_option("--state", model_arguments.options.state,
                              "state precision, fp32 unless given");
  check_model_app->add_option("--compute", model_arguments.compute)
      ->check(CLI::IsMember({"fp32", "bf16"}));
  check_model_app->add_option("--dense", model_arguments.dense)
      ->check(CLI::IsMember({"invariant", "fast"}));
  check_model_app->add_option("--kernels", model_arguments.kernels)
      ->check(CLI::IsMember({"fast", "reference"}));
  check_model_app->add_option("--device", model_arguments.device)
      ->check(CLI::IsMember({"cpu", "cuda"}));
  check_model_app->add_option("--dt-clamp", model_arguments.dt_clamp)
      ->check(CLI::IsMember({"forward", "none"}));
  check_model_app->add_flag("!--no-greedy", model_arguments.options.greedy,
                            "leave out the greedy continuation");
  check_model_app->callback([&] { result = check_model_command(model_arguments); });
  std::string tokenizer_folder, tokenizer_answers;
  CLI::App* check_tokenizer_app =
      check_command->add_subcommand("tokenizer", "ids and decoded text of a tokenizer");
  check_tokenizer_app
      ->add_option("folder", tokenizer_folder, "folder with tokenizer.json or tokenizer.model")
      ->required();
  check_tokenizer_app->add_option(
      "answers", tokenizer_answers,
      "JSON lines; expected.jsonl and decode.jsonl in the folder unless given");
  check_tokenizer_app->callback(
      [&] { result = check_tokenizer_command(tokenizer_folder, tokenizer_answers); });
  FoldStabilityOptions fold_options;
  CLI::App* check_fold_app = check_command->add_subcommand(
      "fold", "is gdn_fold: cached stable, head by head, on dumped windows of GDN layers");
  check_fold_app
      ->add_option("dumps", fold_options.dumps,
                   "a dump, a folder of them, or a run with dump_states")
      ->required();
  check_fold_app->add_option("--read", fold_options.read,
                             "format of the read checkpoint, nvfp4 unless given");
  check_fold_app->callback([&] {
    std::printf("%s", fold_stability_text(fold_options).c_str());
    result = 0;
  });
  std::string grader_file;
  CLI::App* check_grader_app =
      check_command->add_subcommand("grader", "grading rules against stored cases");
  check_grader_app->add_option("file", grader_file, "JSON lines of cases")->required();
  check_grader_app->callback([&] { result = check_grader_command(grader_file); });
  std::string quant_file;
  CLI::App* check_quant_app = check_command->add_subcommand("quant", "codes of the number formats");
  check_quant_app->add_option("file", quant_file, "HDF5 file of vectors")->required();
  check_quant_app->callback([&] { result = check_quant(quant_file); });

  if (argc > 1 && argv[1][0] != '-') {
    const std::string command = argv[1];
    std::string known;
    bool found = false;
    for (const CLI::App* subcommand : app.get_subcommands([](CLI::App*) { return true; })) {
      known += " " + subcommand->get_name();
      found |= subcommand->get_name() == command;
    }
    if (!found) reject("unknown command '" + command + "'; known:" + known);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request);
  } catch (const CLI::ParseError& error) {
    reject("command line: " + std::string(error.what()) +
           "; `replayeval --help` lists commands and options");
  }
  return result;
}

extern "C" void on_lost_file(int) {
  static constexpr char kMessage[] =
      "replayeval: a file that was being read is shorter now, or its disk cannot be read "
      "(SIGBUS)\n";
  // The result does not matter: there is nobody to tell.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  _exit(1);
}

}  // namespace

int run_command_line(int argc, const char* const* argv) {
  const auto report = [](const char* message) {
    std::fprintf(stderr, "replayeval: %s\n", message);
  };
  // A file beyond the limit of its size is an error of writing; one that gets shorter while it is
  // mapped cannot be read on.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGBUS, on_lost_file);
  try {
    const bool printing = ::fcntl(STDOUT_FILENO, F_GETFD) >= 0;  // and not closed by the caller
    const int result = parse_and_run(argc, argv);
    errno = 0;
    if (printing && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
      throw std::runtime_error(std::string("standard output: cannot be written") +
                               (errno != 0 ? std::string(": ") + std::strerror(errno) : ""));
    }
    return result;
  } catch (const std::invalid_argument& error) {
    report(error.what());
    return 2;
  } catch (const std::exception& error) {
    report(error.what());
    return 1;
  }
}

}  // namespace replayeval
