// Experiment files: strictness, places of errors, include, --set, seeds, resolved text.
#include "harness/experiment.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "harness/command_line.h"
#include "harness/run_plan.h"
#include "quant/cuda_support.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;
using test::TemporaryFolder;

const std::string kModel = std::string(REPLAYEVAL_SOURCE_DIR) + "/models/mini-mamba2";
const std::string kSample = std::string(REPLAYEVAL_SOURCE_DIR) + "/datasets/sample";

/// A complete experiment, for tests that add to it.
std::string minimal() {
  return "job: kl\nmodel: " + kModel + "\ndata: {kind: pg19, path: " + kSample +
         ", tokens: 64}\nstates: [fp32@L=1, nvfp4+sr]\n";
}

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("(another error) ") + error.what();
  }
  return "(no error)";
}

std::string error_of(const std::string& file, const std::vector<std::string>& settings = {}) {
  return refusal([&] { load_experiment(file, settings); });
}

std::vector<std::string> names(const std::vector<StatePrecision>& states) {
  std::vector<std::string> list;
  for (const StatePrecision& state : states) list.push_back(state.name);
  return list;
}

TEST_CASE("a sweep without a state is refused, but for a resolved text") {
  const TemporaryFolder folder;
  const std::string file = folder.write("small.yaml", minimal());
  CHECK(error_of(file, {"sweep={over: layers}"}).find("sweep.over: got no sweep.state; expected") !=
        std::string::npos);
  CHECK(error_of(file, {"sweep.keep=both"}).find("sweep.keep: got no sweep.state; expected") !=
        std::string::npos);
  CHECK(
      error_of(file, {"sweep={over: heads, keep: only}"}).find("sweep.over: got no sweep.state") !=
      std::string::npos);
  CHECK(error_of(file, {"sweep={over: layers, state: nvfp4}"}) == "(no error)");
  const std::string resolved = resolved_text(load_experiment(file));
  CHECK(resolved.find("sweep:") != std::string::npos);
  CHECK(error_of(folder.write("resolved.yaml", resolved)) == "(no error)");
}

TEST_CASE("shards that make no sense are refused") {
  const TemporaryFolder folder;
  const std::string file = folder.write("small.yaml", minimal());
  const std::string out = folder / "out";
  const auto code = [&](const char* shard) {
    const char* const arguments[] = {"replayeval", "run",     file.c_str(), "--out",
                                     out.c_str(),  "--shard", shard,        "--dry-run"};
    return run_command_line(8, arguments);
  };
  for (const char* shard : {"", "0/2", "3/2", "1/100000", "1/4097", "1", "a/b", "1/2/3"}) {
    CAPTURE(std::string(shard));
    CHECK(code(shard) == 2);
  }
  CHECK(code("1/4096") == 0);
}

TEST_CASE("a dry run for a GPU is made without one, the run itself is not") {
  if (cuda_available()) return;
  const TemporaryFolder folder;
  const std::string file = folder.write("small.yaml", minimal() + "device: cuda\n");
  const std::string out = folder / "out";
  const char* const arguments[] = {"replayeval", "run",       file.c_str(),
                                   "--out",      out.c_str(), "--dry-run"};
  CHECK(run_command_line(6, arguments) == 0);
  CHECK(run_command_line(5, arguments) == 1);
  CHECK_FALSE(std::filesystem::exists(out));
  CHECK(available_text(kUnknownMemory) == "unknown without a GPU");
  CHECK(available_text(3 << 20).find("3.0 MiB") != std::string::npos);
}

TEST_CASE("a minimal experiment gets the defaults of the table") {
  const TemporaryFolder folder;
  const Experiment e = load_experiment(folder.write("small.yaml", minimal()));
  CHECK(e.job == "kl");
  CHECK(e.model == kModel);
  CHECK(e.model_folder == kModel);
  CHECK(e.tokenizer == kModel);
  CHECK(e.data.kind == DataSource::Kind::kPg19);
  CHECK(e.data.path == kSample);
  CHECK(e.data.split == "test");
  CHECK_FALSE(e.data.documents.has_value());
  CHECK(e.data.ids.empty());
  REQUIRE(e.data.tokens.has_value());
  CHECK(*e.data.tokens == 64);
  CHECK_FALSE(e.data.join);
  CHECK(e.state_options.window == 16);
  CHECK(e.state_options.seed == 1u);
  CHECK(e.baseline.name == "fp32");
  CHECK(names(e.states) == std::vector<std::string>{"fp32@L=1", "nvfp4+sr"});
  CHECK(e.device == Device::cpu);
  CHECK(e.compute == ComputeType::fp32);
  CHECK(e.dense == DenseMode::invariant);
  CHECK(e.kernels == KernelForm::fast);
  CHECK(e.threads == 0);
  CHECK(e.chunk_tokens == 256);
  CHECK(e.prompt_tokens == 0);
  CHECK(e.out == fs::path("out/small"));
}

TEST_CASE("every key is read") {
  const TemporaryFolder folder;
  const std::string file = folder.write(
      "all.yaml", "job: kl\nhub: " + (folder / "hub").string() + "\nmodel: " + kModel +
                      "\ntokenizer: " + kModel +
                      "/tokenizer.model\ndt_clamp: none\n"
                      "data:\n  kind: pg19\n  path: " +
                      kSample +
                      "\n  split: validation\n  documents: [2, 1]\n  tokens: 4096\n  join: true\n"
                      "window: 8\ngdn_fold: cached\nflush_output: read\nring: fp32\nring_u: bf16\n"
                      "beta: bf16\ndot: tf32\nseed: 18446744073709551615\nbaseline: bf16\n"
                      "states:\n  - nvfp4@L=4\ndevice: cpu\ncompute: bf16\ndense: fast\n"
                      "kernels: reference\nthreads: 3\nchunk_tokens: 7\nprompt_tokens: 100\n"
                      "prefill_chunk: 50\nstate_error_every: 16\nout: elsewhere\n");
  const Experiment e = load_experiment(file);
  CHECK(e.hub == folder / "hub");
  CHECK(e.tokenizer == kModel + "/tokenizer.model");
  CHECK(e.dt_clamp == DtClamp::none);
  CHECK(e.data.split == "validation");
  CHECK(e.data.ids == std::vector<std::string>{"2", "1"});
  CHECK(e.data.join);
  CHECK(e.state_options.window == 8);
  CHECK(e.state_options.gdn_fold == GdnFold::cached);
  CHECK(e.state_options.flush_output == FlushOutput::read);
  CHECK(e.state_options.ring == RingType::fp32);
  CHECK(e.state_options.ring_u == RecordType::bf16);
  CHECK(e.state_options.beta == RecordType::bf16);
  CHECK(e.state_options.dot == DotType::tf32);
  CHECK(e.state_options.seed == 18446744073709551615u);
  CHECK(e.baseline.name == "bf16");
  CHECK(e.compute == ComputeType::bf16);
  CHECK(e.dense == DenseMode::fast);
  CHECK(e.kernels == KernelForm::reference);
  CHECK(e.threads == 3);
  CHECK(e.chunk_tokens == 7);
  CHECK(e.prompt_tokens == 100);
  CHECK(e.prefill_chunk == 50);
  CHECK(e.state_error_every == 16);
  CHECK(e.out == "elsewhere");
  // Each key stands in the resolved text with the value given, so no row of the table reads or
  // writes another's member.
  const std::vector<ExperimentField> fields = experiment_fields(e);
  const auto value = [&](const std::string& name) {
    const auto field = std::ranges::find(fields, name, &ExperimentField::name);
    return field == fields.end() ? std::string("(none)") : field->value;
  };
  CHECK(value("dt_clamp") == "none");
  CHECK(value("data.split") == "validation");
  CHECK(value("data.documents") == "[2, 1]");
  CHECK(value("data.tokens") == "4096");
  CHECK(value("data.join") == "true");
  CHECK(value("window") == "8");
  CHECK(value("gdn_fold") == "cached");
  CHECK(value("flush_output") == "read");
  CHECK(value("ring") == "fp32");
  CHECK(value("ring_u") == "bf16");
  CHECK(value("beta") == "bf16");
  CHECK(value("dot") == "tf32");
  CHECK(value("seed") == "18446744073709551615");
  CHECK(value("baseline") == "bf16");
  CHECK(value("compute") == "bf16");
  CHECK(value("dense") == "fast");
  CHECK(value("kernels") == "reference");
  CHECK(value("threads") == "3");
  CHECK(value("chunk_tokens") == "7");
  CHECK(value("prompt_tokens") == "100");
  CHECK(value("prefill_chunk") == "50");
  CHECK(value("state_error_every") == "16");
  CHECK(value("out") == "elsewhere");
}

TEST_CASE("the resolved text reads back as the same experiment") {
  const TemporaryFolder folder;
  const std::string odd = folder / "a folder, with: odd #name";
  fs::create_directories(odd);
  for (const std::vector<std::string>& settings : std::vector<std::vector<std::string>>{
           {},
           {"seeds=3", "states=[nvfp4+sr, fp16+sr/nvfp4, fp32/nvfp4, \"fp8@layers=0,2\"]"},
           {"formats={mine: " + std::string(REPLAYEVAL_SOURCE_DIR) + "/formats/e3m2_block32.yaml}",
            "states=[fp16+sr/mine, mine+sr]"},
           {"data.documents=[1, 2]", "data.join=true", "data.tokens=all", "out=\"" + odd + "\""},
           {"data.kind=text", "data.path=\"" + odd + "\"", "window=4", "baseline=fp32@L=2",
            "out=\"@out\""}}) {
    const Experiment first = load_experiment(folder.write("first.yaml", minimal()), settings);
    const std::string text = resolved_text(first);
    CAPTURE(text);
    const Experiment second = load_experiment(folder.write("second.yaml", text));
    CHECK(resolved_text(second) == text);
    CHECK(names(second.states) == names(first.states));
    for (size_t s = 0; s < std::min(first.states.size(), second.states.size()); ++s) {
      CHECK(state_identity(second.states[s], second.baseline) ==
            state_identity(first.states[s], first.baseline));
    }
    CHECK(second.data.path == first.data.path);
    CHECK(second.out == first.out);
    // As written, not as the seeds expand it.
    if (first.seeds > 1)
      CHECK(text.find("states: [nvfp4+sr, fp16+sr/nvfp4, ") != std::string::npos);
  }
}

TEST_CASE("unknown keys name line, column and the nearest key") {
  const TemporaryFolder folder;
  const std::string file = folder.write("a.yaml", minimal() + "chunk_token: 4\n");
  CHECK(error_of(file) ==
        file + ":5:1: unknown key 'chunk_token'; the nearest known key is 'chunk_tokens'");
  const std::string nested = folder.write("b.yaml", "job: kl\ndata:\n  pth: x\n");
  CHECK(error_of(nested) ==
        nested + ":3:3: unknown key 'data.pth'; the nearest known key is 'data.path'");
  const std::string far = folder.write("c.yaml", "something_else_entirely: 1\n");
  CHECK(error_of(far) ==
        far + ":1:1: unknown key 'something_else_entirely'; `replayeval list keys` prints all");
  CHECK(error_of(folder.write("d.yaml", minimal()), {"windw=4"}) ==
        "--set: unknown key 'windw'; the nearest known key is 'window'");
}

TEST_CASE("wrong values name line, column, key, what was expected and what was there") {
  const TemporaryFolder folder;
  struct Case {
    const char* line;
    const char* message;  // after "FILE:5:"
  };
  for (const Case& c : std::vector<Case>{
           {"window: 0", "9: window: expected a whole number from 1 to 64, got '0'"},
           {"window: 65", "9: window: expected a whole number from 1 to 64, got '65'"},
           {"window: [4]", "9: window: expected a whole number from 1 to 64, got a list of 1"},
           {"window: 4.0", "9: window: expected a whole number from 1 to 64, got '4.0'"},
           {"window: ", "1: window: expected a whole number from 1 to 64, got nothing"},
           {"threads: -1", "10: threads: expected a whole number from 0 to 4096, got '-1'"},
           {"seed: 18446744073709551616",
            "7: seed: expected a whole number from 0 to 18446744073709551615, got "
            "'18446744073709551616'"},
           {"compute: fp16", "10: compute: expected fp32 | bf16, got 'fp16'"},
           {"gdn_fold: closed", "11: gdn_fold: expected one of rederive cached, got 'closed'"},
           {"dense: {a: b}", "8: dense: expected invariant | fast, got a map"},
           {"baseline: nvfp4@layers=0",
            "11: baseline: nvfp4@layers=0: the baseline holds for the whole model; expected no "
            "layers= or heads="},
           {"dump_states: true",
            "14: dump_states: expected a whole number from 0 to 9223372036854775807, got 'true'"},
           {"speculate: 4",
            "12: speculate: not available in this version; expected no such key, or 0"},
           {"prompt_tokens: 64",
            "16: prompt_tokens: expected less than data.tokens (64), got 64; nothing would be left "
            "to compare"},
           {"prefill_chunk: 8",
            "16: prefill_chunk: got 8 without a prompt; expected prompt_tokens above 0"},
           {"formats: {nvfp4: x.yaml}",
            "11: formats: 'nvfp4' is a built-in format; expected another name"},
           {"formats: {My-Format: x.yaml}",
            "11: formats: expected a name of a-z, 0-9 and _, got 'My-Format'"},
       }) {
    CAPTURE(c.line);
    const std::string file = folder.write("a.yaml", minimal() + c.line + "\n");
    CHECK(error_of(file) == file + ":5:" + c.message);
  }
  CHECK(error_of(folder.write("off.yaml", minimal() + "speculate: 0\n")) == "(no error)");

  const auto states_error = [&](const std::string& states) {
    const std::string file =
        folder.write("s.yaml", "job: kl\nmodel: " + kModel + "\ndata: {path: " + kSample +
                                   "}\nstates:\n" + states);
    const std::string error = error_of(file);
    return error.starts_with(file + ":") ? error.substr(file.size() + 1) : error;
  };
  CHECK(states_error("  - fp16\n  - fp32/nvfp5+sr\n")
            .starts_with("6:5: states: fp32/nvfp5+sr: unknown format 'nvfp5'; known: fp32 "));
  CHECK(states_error("  - nvfp4\n  - fp32@L=16\n") ==
        "6:5: states: fp32: the baseline's own state; it is computed as the reference anyway");
  CHECK(states_error("  - nvfp4\n  - nvfp4@L=16\n") ==
        "6:5: states: nvfp4: the same state as 'nvfp4' before it");
  CHECK(states_error("  - nvfp4+sr\n  - nvfp4+sr@seed=1\n") ==
        "6:5: states: nvfp4+sr@seed=1: the same state as 'nvfp4+sr' before it");
  CHECK(states_error("  - {a: b}\n") ==
        "5:5: states: expected a state precision such as fp16+sr/nvfp4, got a map");
  CHECK(states_error("  []\n") ==
        "5:3: states: expected at least one state precision, got an empty list");
  CHECK(states_error("  [nvfp4@layers=0-5,7]\n").find("needs quotes") != std::string::npos);

  const auto data_error = [&](const std::string& data) {
    const std::string file = folder.write(
        "d.yaml", "job: kl\nmodel: " + kModel + "\ndata: " + data + "\nstates: [fp16]\n");
    const std::string error = error_of(file);
    return error.starts_with(file + ":") ? error.substr(file.size() + 1) : error;
  };
  CHECK(data_error("x") ==
        "3:7: data: expected a map with some of kind path state split documents tokens "
        "join, got 'x'");
  CHECK(data_error("{path: " + kSample + ", documents: 0}")
            .find("data.documents: expected a number of documents (at least 1)") !=
        std::string::npos);
  CHECK(data_error("{path: " + kSample + ", documents: [1, 1]}")
            .find("document '1' is listed twice") != std::string::npos);
  CHECK(data_error("{path: " + kSample + ", tokens: 1}")
            .find("data.tokens: expected a whole number from 2") != std::string::npos);
  CHECK(data_error("{path: " + kSample + ", join: yes}")
            .find("data.join: expected true or false, got 'yes'") != std::string::npos);
  CHECK(data_error("{kind: c4, path: x}")
            .find("data.kind: expected pg19 | text | answers, got 'c4'") != std::string::npos);
  CHECK(data_error("{path: \"/no/\xFF\"}").find("expected UTF-8") != std::string::npos);
  CHECK(data_error("{path: /no/such/file}") ==
        "3:14: data.path: expected a file or folder, got '/no/such/file', which does not exist");
  const std::string no_path = data_error("{kind: pg19}");
  CHECK(
      no_path.find(
          "data.path: missing; expected the folder of PG-19 with metadata.csv and test/<id>.txt") !=
      std::string::npos);
  CHECK(no_path.find("https://github.com/google-deepmind/pg19") != std::string::npos);
  CHECK(no_path.find("--set data.path=") != std::string::npos);
}

std::string score() { return "job: score\nmodel: " + kModel + "\nstates: [nvfp4+sr]\n"; }

TEST_CASE("the keys of job score") {
  const TemporaryFolder folder;
  const Experiment small =
      load_experiment(folder.write("small.yaml", score() + "tasks: mini-math\n"));
  REQUIRE(small.tasks.size() == 1);
  CHECK(small.tasks[0].task == "mini-math");
  CHECK(small.slots == 0);
  CHECK(small.on_bad_item == OnBadItem::stop);
  CHECK_FALSE(small.repeats.has_value());
  CHECK_FALSE(small.draw.temperature.has_value());
  CHECK_FALSE(small.decode_prompt);
  CHECK(small.chunk_tokens == 256);

  const std::string file = folder.write(
      "all.yaml",
      score() +
          "tasks:\n  - mini-math\n  - {task: a/b.yaml, path: ~x, split: validation, level: 4,"
          " items: 7, per_category: 3, ids: [q 1, q2], max_tokens: 9, temperature: 0.25,"
          " top_p: 0.5, top_k: 6}\n"
          "repeats: 4\nmax_tokens: 100\ntemperature: 0.7\ntop_p: 0.95\ntop_k: 40\nslots: 12\n"
          "on_bad_item: skip\ndecode_prompt: true\nchunk_tokens: 33\n");
  const Experiment e = load_experiment(file);
  CHECK(e.repeats == 4);
  CHECK(e.draw.max_tokens == 100);
  CHECK(e.draw.temperature == 0.7);
  CHECK(e.draw.top_p == 0.95);
  CHECK(e.draw.top_k == 40);
  CHECK(e.slots == 12);
  CHECK(e.on_bad_item == OnBadItem::skip);
  CHECK(e.decode_prompt);
  REQUIRE(e.tasks.size() == 2);
  const TaskRequest& task = e.tasks[1];
  CHECK(task.task == "a/b.yaml");
  CHECK(task.path == "~x");
  CHECK(task.split == "validation");
  CHECK(task.level == 4);
  CHECK(task.items == 7);
  CHECK(task.per_category == 3);
  CHECK(task.ids == std::vector<std::string>{"q 1", "q2"});
  CHECK(task.draw.max_tokens == 9);
  CHECK(task.draw.temperature == 0.25);
  CHECK(task.draw.top_p == 0.5);
  CHECK(task.draw.top_k == 6);

  const std::string text = resolved_text(e);
  CAPTURE(text);
  CHECK(text.find("\ntasks: [{task: mini-math}, {task: a/b.yaml, path: \"~x\", split: validation, "
                  "level: 4, items: 7, per_category: 3, ids: [\"q 1\", q2], max_tokens: 9, "
                  "temperature: 0.25, top_p: 0.5, top_k: 6}]\n") != std::string::npos);
  CHECK(text.find("data:") == std::string::npos);
  const Experiment again = parse_experiment(text, "a report");
  CHECK(resolved_text(again) == text);
  CHECK(again.job == "score");
}

TEST_CASE("wrong values of job score") {
  const TemporaryFolder folder;
  const auto error = [&](const std::string& line) {
    const std::string file = folder.write("s.yaml", score() + line + "\n");
    const std::string message = error_of(file);
    return message.starts_with(file + ":") ? message.substr(file.size() + 1) : message;
  };
  CHECK(error("slots: 4") ==
        " tasks: missing; expected list of tasks; give it in the file or with --set tasks=...");
  const std::string tasks = "tasks: [mini-math]\n";
  CHECK(error(tasks + "data: {path: x}") ==
        "5:14: data.path: a key of job kl; expected no such key in job score");
  CHECK(error(tasks + "prompt_tokens: 5") ==
        "5:16: prompt_tokens: a key of job kl; expected no such key in job score");
  CHECK(error(tasks + "on_bad_item: fail") ==
        "5:14: on_bad_item: expected stop | skip, got 'fail'");
  CHECK(error(tasks + "temperature: hot") ==
        "5:14: temperature: expected a number from 0 to 1e+06, got 'hot'");
  CHECK(error(tasks + "temperature: -1") ==
        "5:14: temperature: expected a number from 0 to 1e+06, got '-1'");
  CHECK(error(tasks + "top_p: 0") == "5:8: top_p: expected a number above 0, got 0");
  CHECK(error(tasks + "top_p: 1.5") == "5:8: top_p: expected a number from 0 to 1, got '1.5'");
  CHECK(error(tasks + "max_tokens: 0") ==
        "5:13: max_tokens: expected a whole number from 1 to 9223372036854775807, got '0'");
  CHECK(error(tasks + "decode_prompt: true\nprefill_chunk: 8") ==
        "6:16: prefill_chunk: got 8 with decode_prompt; expected one of the two");
  CHECK(error("tasks: []") == "4:8: tasks: expected at least one task, got an empty list");
  CHECK(error("tasks: [{path: x}]") == "4:9: tasks: task: missing; expected a task's name or file");
  CHECK(error("tasks: [{task: a, itms: 3}]") ==
        "4:25: tasks: itms: unknown key; the nearest known key is 'items'");
  CHECK(error("tasks: [{task: a, level: 6}]") ==
        "4:26: tasks: level: expected a whole number from 1 to 5, got '6'");
  CHECK(error("tasks: [{task: a, items: 2, items: 3}]") == "4:29: tasks: 'items' is given twice");
  CHECK(error("tasks: [{task: a, ids: [q, r, q]}]") == "4:24: tasks: ids: 'q' is listed twice");
  CHECK(error("tasks: [[a]]") ==
        "4:9: tasks: expected a task's name or file, or a map, got a list of 1");
  const std::string kl = folder.write("kl.yaml", minimal() + "slots: 4\n");
  CHECK(error_of(kl) == kl + ":5:8: slots: a key of job score; expected no such key in job kl");
  const auto answers = [&](const std::string& line) {
    const std::string file = folder.write(
        "a.yaml", "job: kl\nmodel: " + kModel + "\nstates: [fp16]\ndata: {kind: answers, path: " +
                      (folder / "").string() + "}\n" + line + "\n");
    const std::string message = error_of(file);
    return message.starts_with(file + ":") ? message.substr(file.size() + 1) : message;
  };
  CHECK(answers("") == "(no error)");
  CHECK(answers("prompt_tokens: 4") ==
        "5:16: prompt_tokens: each answer has its own prompt; expected no such key with data.kind "
        "answers");
  CHECK(answers("state_error_every: 16") ==
        "5:20: state_error_every: prompts end at different positions; expected no such key with "
        "data.kind answers");
  CHECK(error_of(folder.write("dst.yaml", "job: kl\nmodel: " + kModel + "\ndata: {path: " +
                                              kSample + ", state: fp32}\nstates: [fp16]\n"))
            .find("data.state: got 'fp32'; expected data.kind answers, or no such key") !=
        std::string::npos);
}

TEST_CASE("broken files") {
  const TemporaryFolder folder;
  const std::string not_yaml = folder.write("a.yaml", "job: kl\nstates: [fp32\n");
  CHECK(error_of(not_yaml).starts_with(not_yaml + ":3:1: not valid YAML: "));
  const std::string twice = folder.write("b.yaml", "job: kl\nwindow: 4\nwindow: 8\n");
  CHECK(error_of(twice) == twice + ":3:1: key 'window' is given twice, first on line 2");
  const std::string empty = folder.write("c.yaml", "");
  CHECK(error_of(empty) == empty + ": expected a map of keys, got nothing");
  const std::string list = folder.write("d.yaml", "- a\n");
  CHECK(error_of(list) == list + ":1:1: expected a map of keys, got a list of 1");
  CHECK(error_of(folder / "none.yaml") ==
        "(another error) " + (folder / "none.yaml").string() + ": cannot be read");
  const std::string job = folder.write("e.yaml", "model: x\n");
  CHECK(error_of(job) ==
        job + ": job: missing; expected kl | score; give it in the file or with --set job=...");
  const std::string score =
      folder.write("f.yaml", "job: score\nmodel: " + kModel + "\nstates: []\n");
  CHECK(error_of(score) ==
        score + ":3:9: states: expected at least one state precision, got an empty list");
  const std::string model = folder.write("g.yaml", "job: kl\nmodel: no/such-model\n");
  CHECK(error_of(model).starts_with(model + ":2:8: model: "));
}

TEST_CASE("include: relative to its file, own keys override, maps merge by key") {
  const TemporaryFolder folder;
  folder.write("base/common.yaml",
               "window: 4\nseed: 9\ndata: {kind: pg19, tokens: 32, path: " + kSample + "}\n");
  folder.write("base/more.yaml", "include: common.yaml\nseed: 10\nchunk_tokens: 5\n");
  const std::string file = folder.write(
      "x.yaml", "states: [fp16]\nwindow: 2\ninclude: base/more.yaml\njob: kl\nmodel: " + kModel +
                    "\ndata: {tokens: 48}\n");
  const Experiment e = load_experiment(file);
  CHECK(e.state_options.window == 2);
  CHECK(e.state_options.seed == 10u);
  CHECK(e.chunk_tokens == 5);
  CHECK(e.data.kind == DataSource::Kind::kPg19);
  CHECK(*e.data.tokens == 48);
  CHECK(resolved_text(e).find("include") == std::string::npos);

  // The later file of a list overrides the earlier one.
  folder.write("base/other.yaml", "window: 32\n");
  const Experiment both = load_experiment(folder.write(
      "y.yaml", "include: [base/common.yaml, base/other.yaml]\nstates: [fp16]\njob: kl\nmodel: " +
                    kModel + "\n"));
  CHECK(both.state_options.window == 32);

  const std::string bad = folder.write("base/bad.yaml", "job: kl\nwindw: 3\n");
  CHECK(error_of(folder.write("z.yaml", "include: base/bad.yaml\n"))
            .starts_with(bad + ":2:1: unknown key 'windw'"));
  const std::string missing = folder.write("m.yaml", "job: kl\ninclude: nowhere.yaml\n");
  CHECK(error_of(missing) == missing + ":2:10: include: expected a file, got '" +
                                 (folder / "nowhere.yaml").string() + "', which does not exist");
  const std::string no_file = folder.write("n.yaml", "job: kl\ninclude: base\n");
  CHECK(error_of(no_file) == no_file + ":2:10: include: expected a file, got '" +
                                 (folder / "base").string() + "', which is none");
  const std::string self = folder.write("self.yaml", "include: self.yaml\n");
  CHECK(error_of(self) == self + ": include: the file includes itself");
}

TEST_CASE("--set overrides the file") {
  const TemporaryFolder folder;
  const std::string file = folder.write("a.yaml", minimal());
  const Experiment e = load_experiment(
      file, std::vector<std::string>{"window=2", "data.tokens=33", "states=[fp16+sr@L=3, nvfp4]",
                                     "data={documents: 2, join: true}", "window=3"});
  CHECK(e.state_options.window == 3);
  CHECK(*e.data.tokens == 33);
  CHECK(*e.data.documents == 2);
  CHECK(e.data.join);
  CHECK(names(e.states) == std::vector<std::string>{"fp16+sr", "nvfp4"});
  CHECK(names(load_experiment(file, std::vector<std::string>{"states=nvfp4@L=1;layers=0-5"})
                  .states) == std::vector<std::string>{"nvfp4@L=1;layers=0-5"});

  CHECK(error_of(file, {"window"}) == "--set window: expected key=value");
  CHECK(error_of(file, {"window=99"}) ==
        "--set window: window: expected a whole number from 1 to 64, got '99'");
  CHECK(error_of(file, {"states=[fp16, nvfp5]"})
            .starts_with("--set states: states: nvfp5: unknown format 'nvfp5'"));
  CHECK(error_of(file, {"states=[fp32"}).starts_with("--set states: not valid YAML: "));
  CHECK(error_of(file, {"data=3"}).starts_with("--set data: data: expected a map"));
  CHECK(error_of(file, {"include=x"}).starts_with("--set include: "));
}

TEST_CASE("formats from files are used by name, and their mistakes are placed") {
  const TemporaryFolder folder;
  const std::string good = folder.write(
      "good.yaml", "element: {exponent: 3, mantissa: 2}\nscale: {format: e8m0, block: 32}\n");
  const std::string bad = folder.write("bad.yaml", "element: {values: [1, 0]}\n");
  const std::string file = folder.write("a.yaml", minimal());
  const Experiment e = load_experiment(
      file, std::vector<std::string>{"formats={mine: " + good + "}", "states=[fp16+sr/mine]"});
  REQUIRE(e.states.size() == 1);
  CHECK(e.states[0].name == "fp16+sr/mine");
  CHECK(e.states[0].read->format->descriptor.block_columns == 32);
  const std::string error = error_of(file, {"formats={mine: " + bad + "}"});
  CHECK(error.starts_with("--set formats: formats: mine: " + bad + ":1"));
  CHECK(error_of(file, {"formats={mine: " + (folder / "none.yaml").string() + "}"})
            .find(folder / "none.yaml") != std::string::npos);
  // Two names of one definition are one state.
  CHECK(
      error_of(file, {"formats={mine: " + good + ", yours: " + good + "}", "states=[mine, yours]"})
          .find("the same state as 'mine'") != std::string::npos);
}

TEST_CASE("seeds: one state for each seed where something is random") {
  const TemporaryFolder folder;
  const std::string file = folder.write("a.yaml", minimal());
  const Experiment e = load_experiment(
      file, std::vector<std::string>{"seed=5", "seeds=3",
                                     "states=[fp16, nvfp4+sr, fp16/nvfp4+sr@L=8, fp8+sr@seed=2]"});
  CHECK(names(e.listed_states) ==
        std::vector<std::string>{"fp16", "nvfp4+sr", "fp16/nvfp4+sr@L=8", "fp8+sr@seed=2"});
  CHECK(names(e.states) == std::vector<std::string>{"fp16", "nvfp4+sr@seed=5", "nvfp4+sr@seed=6",
                                                    "nvfp4+sr@seed=7", "fp16/nvfp4+sr@L=8;seed=5",
                                                    "fp16/nvfp4+sr@L=8;seed=6",
                                                    "fp16/nvfp4+sr@L=8;seed=7", "fp8+sr@seed=2"});
  CHECK(head_plan(e.states[3]).seed == 7u);
  // More seeds only add states: what an earlier run stored stays valid.
  const Experiment fewer =
      load_experiment(file, std::vector<std::string>{"seed=5", "states=[nvfp4+sr]"});
  CHECK(state_identity(fewer.states[0], fewer.baseline) == state_identity(e.states[1], e.baseline));
  CHECK(error_of(file, {"seeds=2", "states=[nvfp4+sr, nvfp4+sr@seed=2]"})
            .find("the same state as 'nvfp4+sr@seed=2'") != std::string::npos);
}

TEST_CASE("the shipped experiments are valid") {
  const std::string root = std::string(REPLAYEVAL_SOURCE_DIR) + "/eval_configs/";
  const Experiment quickstart = load_experiment(root + "quickstart.yaml");
  CHECK(names(quickstart.states) == std::vector<std::string>{"fp32@L=1", "fp16+sr", "fp8+sr",
                                                             "nvfp4+sr", "nvfp4+sr@L=1",
                                                             "fp32/nvfp4", "fp16+sr/nvfp4"});
  CHECK(*quickstart.data.tokens == 8192);
  for (const std::string name : {"pg19.yaml", "pg19-128k.yaml"}) {
    CAPTURE(name);
    CHECK(error_of(root + name).find("https://github.com/google-deepmind/pg19") !=
          std::string::npos);
    const Experiment e =
        load_experiment(root + name, std::vector<std::string>{"data.path=" + kSample});
    CHECK(e.data.kind == DataSource::Kind::kPg19);
  }
  for (const std::string name : {"score-mini.yaml", "score.yaml"}) {
    CAPTURE(name);
    const Experiment e = load_experiment(root + name);
    CHECK(e.job == "score");
    CHECK(names(e.states) ==
          std::vector<std::string>{"fp16+sr", "fp16+sr/nvfp4", "nvfp4+sr", "nvfp4+sr@L=1"});
    for (const TaskRequest& task : e.tasks)
      CHECK(fs::exists(root + "tasks/" + task.task + ".yaml"));
  }
}

TEST_CASE("nearest name") {
  const std::vector<std::string_view> known = {"window", "states", "data.path"};
  CHECK(nearest_name("windw", known) == "window");
  CHECK(nearest_name("state", known) == "states");
  CHECK(nearest_name("data.pat", known) == "data.path");
  CHECK(nearest_name("zzzzzz", known).empty());
}

/// What a call of the program prints on standard output, and its exit code.
std::pair<int, std::string> run_program(const TemporaryFolder& folder,
                                        const std::vector<const char*>& arguments) {
  const std::string file = folder / "stdout";
  std::fflush(stdout);
  const int saved = dup(STDOUT_FILENO);
  REQUIRE(std::freopen(file.c_str(), "w", stdout) != nullptr);
  std::vector<const char*> argv = {"replayeval"};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  const int code = run_command_line(static_cast<int>(argv.size()), argv.data());
  std::fflush(stdout);
  dup2(saved, STDOUT_FILENO);
  close(saved);
  std::ifstream stream(file);
  return {code, std::string(std::istreambuf_iterator<char>(stream), {})};
}

TEST_CASE("list keys prints every key") {
  const TemporaryFolder folder;
  const auto [code, text] = run_program(folder, {"list", "keys"});
  CHECK(code == 0);
  std::set<std::string> seen;
  for (const ExperimentKey& key : experiment_keys()) {
    CAPTURE(key.name);
    CHECK(seen.insert(std::string(key.name)).second);
    CHECK(text.find("\n" + std::string(key.name) + " ") != std::string::npos);
    CHECK_FALSE(key.help.empty());
  }
  // The keys that the design names.
  for (const std::string name : {"job",
                                 "model",
                                 "tokenizer",
                                 "hub",
                                 "dt_clamp",
                                 "seeds",
                                 "slots",
                                 "on_bad_item",
                                 "speculate",
                                 "acceptance",
                                 "formats",
                                 "data.kind",
                                 "window",
                                 "baseline",
                                 "states",
                                 "seed",
                                 "device",
                                 "compute",
                                 "dense",
                                 "threads",
                                 "chunk_tokens",
                                 "prompt_tokens",
                                 "prefill_chunk",
                                 "gdn_fold",
                                 "flush_output",
                                 "ring",
                                 "ring_u",
                                 "beta",
                                 "dot",
                                 "dump_states",
                                 "state_error_every",
                                 "snapshot_tokens",
                                 "out",
                                 "tasks",
                                 "repeats",
                                 "temperature",
                                 "max_tokens",
                                 "decode_prompt",
                                 "data.state",
                                 "kernels"}) {
    CAPTURE(name);
    CHECK(seen.contains(name));
  }
  CHECK(text.find("\ninclude ") != std::string::npos);
}

TEST_CASE("exit codes of the command line") {
  const TemporaryFolder folder;
  CHECK(run_program(folder, {"list", "formats"}).first == 0);
  CHECK(run_program(folder, {"list", "nothing"}).first == 2);
  CHECK(run_program(folder, {"--help"}).first == 0);
  CHECK(run_program(folder, {}).first == 2);
  CHECK(run_program(folder, {"no-such-command"}).first == 2);
  CHECK(run_program(folder, {"grade", "run"}).first == 1);
  CHECK(run_program(folder, {"format", "mxfp4"}).first == 0);
  CHECK(run_program(folder, {"format", "mxfp5"}).first == 2);
  CHECK(run_program(folder, {"format", "mxfp4", "--state-dim", "48"}).first == 2);
  CHECK(run_program(folder, {"run"}).first == 2);
  const std::string wrong = folder.write("w.yaml", "job: kl\nwindw: 1\n");
  CHECK(run_program(folder, {"run", wrong.c_str()}).first == 2);
  const std::string none = folder / "none.yaml";
  CHECK(run_program(folder, {"run", none.c_str()}).first == 1);
  CHECK(run_program(folder, {"check", "quant", none.c_str()}).first == 1);
}

TEST_CASE("selections are of layers and heads that the model has") {
  const auto checkpoint = Checkpoint::open(kModel);
  const ModelSpec model = find_family(*checkpoint).build(*checkpoint);
  const auto selected = [&](const char* name) {
    return refusal([&] { check_selections(parse_state_precision(name, {}), model); });
  };
  CHECK(selected("nvfp4") == "(no error)");
  CHECK(selected("nvfp4@layers=0,2;heads=7") == "(no error)");
  CHECK(selected("nvfp4@layers=0,99") ==
        "states: nvfp4@layers=0,99: there is no layer 99; the model has 0 to 11");
  CHECK(selected("nvfp4@heads=0,8") ==
        "states: nvfp4@heads=0,8: there is no head 8; the model has 0 to 7");
  CHECK(selected("nvfp4@layers=4").find("the selection holds no layer and head with state") !=
        std::string::npos);
}

}  // namespace
}  // namespace replayeval
