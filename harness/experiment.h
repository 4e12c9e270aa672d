// An experiment: the YAML file that a run is described by, read strictly, completed with defaults
// and validated as a whole before anything large is opened. One table of keys serves parsing,
// `replayeval list keys` and the resolved text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "datasets/token_stream.h"
#include "kernels/state_row.h"
#include "models/model.h"
#include "models/state_precision.h"

namespace replayeval {

/// One row of the table of keys. Nested keys are dotted ("data.path").
struct ExperimentKey {
  std::string_view name;
  std::string_view type;           // for people: "integer", "fp32 | bf16", ...
  std::string_view default_value;  // YAML text; empty: none
  std::string_view help;
  std::string_view job;  // "kl", "score" or "all"
  bool required;
  bool available;  // false: this version accepts only the default
};

/// All keys, in the order of the resolved text.
std::span<const ExperimentKey> experiment_keys();

/// `sweep:`: one state for each layer (or each head of each layer) with recurrent state, which has
/// `state` there alone (only), everywhere but there (except), or one of each (both). Layers are
/// known once the model's config is read (expand_sweep, harness/sweep.h).
struct Sweep {
  enum class Over : uint8_t { layers, heads };
  enum class Keep : uint8_t { only, except, both };
  std::optional<StatePrecision> state;  // none: no sweep
  Over over = Over::layers;
  Keep keep = Keep::only;
};

/// How answers are drawn, where the experiment says so instead of the task.
struct DrawSettings {
  std::optional<int64_t> max_tokens;
  std::optional<double> temperature, top_p;
  std::optional<int> top_k;
};

/// One entry of `tasks:`: a task file or its name, and which of its items.
struct TaskRequest {
  std::string task;
  std::filesystem::path path;  // of its data; empty: the task's own
  std::string split;           // empty: the task's own
  std::optional<int> level;
  std::optional<int64_t> items, per_category;
  std::vector<std::string> ids;
  DrawSettings draw;  // over those of the experiment
};

/// What happens to an item that cannot be asked.
enum class OnBadItem : uint8_t { stop, skip };

/// A resolved experiment. Defaults of the members are those of the table, set by load_experiment.
struct Experiment {
  std::filesystem::path file;
  std::string job;
  std::string model;                   // as written
  std::filesystem::path model_folder;  // found on disk or in the hub cache
  std::filesystem::path tokenizer;     // folder or file; the model's folder unless given
  std::filesystem::path hub;
  DtClamp dt_clamp = DtClamp::forward;
  DataSource data;
  bool data_answers = false;  // data.kind answers: data.path is a report of job score
  std::string data_state;     // whose answers; empty: its baseline's
  std::vector<std::pair<std::string, std::filesystem::path>> format_files;
  NamedFormats formats;
  StateOptions state_options;  // what states take unless their spelling says otherwise
  int seeds = 1;
  StatePrecision baseline;
  std::vector<StatePrecision> listed_states;  // as written
  std::vector<StatePrecision> states;         // with one state for each of the seeds
  Sweep sweep;
  std::vector<int64_t> dump_states;  // positions whose states are written, ascending
  Device device = Device::cpu;
  ComputeType compute = ComputeType::fp32;
  DenseMode dense = DenseMode::invariant;
  KernelForm kernels = KernelForm::fast;
  int threads = 0;  // 0: all cores of the machine
  int chunk_tokens = 0;
  int64_t prompt_tokens = 0;
  int64_t prefill_chunk = 0;      // 0: the prompt in one piece
  int64_t state_error_every = 0;  // positions between two comparisons of the states; 0: none
  int64_t snapshot_tokens = 0;    // between two snapshots of a document; 0: at a signal only
  std::filesystem::path out;
  // job score
  std::vector<TaskRequest> tasks;
  DrawSettings draw;
  std::optional<int> repeats;  // none: the tasks'
  int slots = 0;               // 0: as memory allows
  OnBadItem on_bad_item = OnBadItem::stop;
  bool decode_prompt = false;
};

/// Reads `file`, what it includes, and `settings` ("key=value", dotted keys, values in YAML) over
/// it; completes and validates. Throws std::invalid_argument for a wrong request,
/// `file:line:column: key: message`, and std::runtime_error for a file that cannot be read.
Experiment load_experiment(const std::filesystem::path& file,
                           std::span<const std::string> settings = {});

/// The same from text (a report's resolved experiment); `name` stands for the file in messages, and
/// includes are relative to the working directory.
Experiment parse_experiment(const std::string& text, const std::string& name,
                            std::span<const std::string> settings = {});

/// The whole experiment as canonical YAML, every key with its value and no include. Reading it
/// gives the same experiment.
std::string resolved_text(const Experiment& experiment);

/// One key with its value as in the resolved text.
struct ExperimentField {
  std::string name;
  std::string value;
};

/// Every key of the resolved text in table order: what a run folder compares on --resume.
std::vector<ExperimentField> experiment_fields(const Experiment& experiment);

/// The known name with the smallest edit distance to `name`, or an empty string when none is near.
std::string nearest_name(std::string_view name, std::span<const std::string_view> known);

}  // namespace replayeval
