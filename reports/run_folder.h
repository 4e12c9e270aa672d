// The folder that a run writes: one small HDF5 part a finished unit of work, each written under a
// temporary name, synced and renamed, so that a kill at any moment loses at most the unit in
// progress (DESIGN.md section 6). Several processes may fill one folder; they share out the work by
// claims.
//
//   run.json          what the run is: RunInfo, settings, documents, layers, states
//   parts/*.h5        one KlSpan or AnswerBatch each, with a checksum over the whole file
//   claims/*          who works on what; the modification time is the heartbeat
//   snapshots/*       state saved inside a document, with a checksum
//   report.h5         the assembled report
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reports/results.h"

namespace replayeval {

/// What resuming a folder demands of a setting: `fixed` must be equal; `grows` (states, documents,
/// tokens, items, repeats, seeds) is checked by the lists of the plan instead of by its text;
/// `free` may change.
enum class SettingRule : uint8_t { fixed, grows, free };

/// The rule of an experiment key; a key not listed is fixed.
SettingRule setting_rule(std::string_view key);

/// One resolved key of the experiment with its canonical text.
struct Setting {
  std::string key;
  std::string value;
};

/// Everything known before the first token is computed. Units of work are the spans
/// [k unit_tokens, min((k + 1) unit_tokens, tokens)) of each document.
struct RunPlan {
  RunInfo run;
  std::vector<Setting> settings;
  std::vector<DocumentInfo> documents;
  std::vector<LayerInfo> layers;
  std::vector<StateInfo> states;
  int64_t unit_tokens = 1024;
  std::vector<ItemInfo> items;  // each answered RunInfo::repeats times by every state
};

/// A unit and those states (indices into RunPlan::states) it is about.
struct Unit {
  int document = 0;
  int64_t first = 0;
  int64_t count = 0;
  std::vector<int> states;
};

enum class OpenMode : uint8_t {
  fresh,   // the folder must not hold a run yet
  resume,  // goes on with the run it holds, or begins one; also for several processes on one folder
};

enum class PutOutcome : uint8_t { written, compared };

/// Held while working on something; its file carries machine, pid and a heartbeat, kept by a thread
/// of the RunFolder, which has to live as long. Released by the destructor.
class Claim {
 public:
  Claim(Claim&&) noexcept;
  Claim& operator=(Claim&&) noexcept;
  ~Claim();
  const std::string& name() const;
  /// False once another process has taken the claim over because the heartbeat stood still for too
  /// long.
  bool held() const;
  void release();

 private:
  friend class RunFolder;
  struct State;
  explicit Claim(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// A claim without a sign of life for so long is taken over.
constexpr double kStaleSeconds = 120;

/// Thread-safe.
class RunFolder {
 public:
  /// Creates or opens `path` for writing. Corrupt or truncated parts are removed and named in
  /// notes(). Throws std::invalid_argument when the folder holds a run (fresh), or one whose
  /// settings, documents or states do not agree with the plan: the message names the field with
  /// both values. Throws std::runtime_error when it is not writable.
  static RunFolder open(const std::filesystem::path& path, const RunPlan& plan, OpenMode mode);

  /// Opens a folder, finished or still being filled, without changing it. Throws std::runtime_error
  /// when it holds no run.
  static RunFolder open_read_only(const std::filesystem::path& path);

  /// Whether `path` holds a run.
  static bool holds_run(const std::filesystem::path& path);

  RunFolder(RunFolder&&) noexcept;
  RunFolder& operator=(RunFolder&&) noexcept;
  ~RunFolder();

  const std::filesystem::path& path() const;
  /// The plan as asked for; read-only folders: as stored.
  const RunPlan& plan() const;
  /// One line for each part that was found broken or of another run, and each stale claim taken
  /// over.
  std::vector<std::string> notes() const;

  /// Looks again at what other processes have finished.
  void refresh();
  /// Units of the plan with the states that are not stored yet, in order of document and position.
  std::vector<Unit> missing() const;
  /// Units of the plan with the states that are stored.
  std::vector<Unit> finished() const;
  /// Positions of the document that all states have from the start without a gap.
  int64_t finished_tokens(int document) const;
  /// Reads back the stored figures of one unit, states as far as stored; none when nothing is.
  std::optional<KlSpan> get(int document, int64_t first) const;

  /// Stores a unit. Where it is already stored it is compared bit by bit instead, and only what is
  /// new is written (states that are not stored yet; a unit that grew). Throws
  /// std::invalid_argument when the shapes do not fit the plan, std::runtime_error when a value
  /// differs from the stored one (document, state, position, both values) or when writing fails
  /// (disk full, read-only): what is stored stays as it was.
  PutOutcome put(const KlSpan& span);

  /// Stores answers. Those that are stored already are compared bit by bit instead (all but the
  /// seconds), and only what is new is written. Throws as put of a span.
  PutOutcome put(const AnswerBatch& batch);
  /// Answers of the plan that are not stored yet, in order of item, repeat and state.
  std::vector<AnswerKey> missing_answers() const;

  /// Claims `name` (letters, digits, - _ . for anything else) for this process, none when another
  /// live process holds it. A claim whose process is dead (same host) or whose heartbeat is older
  /// than `stale_seconds` is taken over.
  std::optional<Claim> claim(const std::string& name, double stale_seconds = kStaleSeconds);
  /// Who holds the claim `name`, for messages; none when it is free.
  std::optional<std::string> claimed_by(const std::string& name) const;

  /// Saves bytes under a name, replacing what was there, atomically and with a checksum; reads them
  /// back, none when absent or broken.
  void put_snapshot(const std::string& name, std::span<const std::byte> bytes);
  std::optional<std::vector<std::byte>> get_snapshot(const std::string& name) const;
  bool has_snapshot(const std::string& name) const;  // whole or broken
  void remove_snapshot(const std::string& name);

  /// The report of what is finished so far, in memory.
  Report report() const;
  /// report(), or the report.h5 of the folder where that holds something which the parts lack (they
  /// were removed, say). `kept` is then a line naming the folder and what is lacking, also when
  /// report.h5 cannot be read and thus not be known to hold less; otherwise it is empty, and writing
  /// what is returned over report.h5 loses nothing.
  Report fullest_report(std::string* kept) const;
  /// Writes report.h5 of what is finished so far. `finished` is the time for RunInfo, empty while
  /// units are missing. Returns its path.
  std::filesystem::path assemble(const std::string& finished = {}) const;

 private:
  struct State;
  explicit RunFolder(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// Now, as RunInfo spells times.
std::string utc_now();

/// A report from a report.h5, or from a run folder: of its parts, which may be newer than its
/// report.h5, or from that where it holds more.
Report load_report(const std::filesystem::path& path);

}  // namespace replayeval
