// What a person sees while a run goes on, and how it is asked to stop: a status that redraws itself
// on a terminal and plain lines elsewhere; SIGINT and SIGTERM as a flag.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace replayeval {

/// After this the first SIGINT or SIGTERM only sets a flag, and a second one ends the process at
/// once (exit code 128 + signal).
void install_stop_signals();
/// True from the first signal on; a run then stops after the chunk or unit in progress.
bool stop_requested();

/// "0:42", "12:05", "3:07:00"; "-" for a negative or non-finite number of seconds.
std::string format_duration(double seconds);
/// "131,072".
std::string format_count(int64_t count);

/// Status of a run on a stream. Not thread-safe: the run's main thread calls it.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;

  /// `total` tokens are to be done, of which `done` were stored by an earlier run and do not count
  /// for the rate. One mean KL is shown for each of `states`. Writes to `stream`; `terminal` says
  /// whether it can redraw (is_terminal(stream)).
  Progress(std::vector<std::string> states, int64_t total, int64_t done, std::FILE* stream,
           bool terminal);
  /// The same with another `unit` of work than "tokens", and for each state the `figure` that
  /// set_figure gives instead of its mean KL.
  Progress(std::vector<std::string> states, int64_t total, int64_t done, std::FILE* stream,
           bool terminal, std::string unit, std::string figure);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Adds KL values in nats of a state's new positions; NaN (non-finite logits) is left out of the
  /// mean and counted.
  void observe(int state, std::span<const float> kl_nats);
  /// Text that stands for a state's figure from now on.
  void set_figure(int state, std::string text);
  /// `tokens` (or other units of work) more are done; draws when it is time.
  void advance(int64_t tokens, Clock::time_point now = Clock::now());
  /// `tokens` more turn out to be done already; they do not count for the rate.
  void skip(int64_t tokens);
  /// What the work consists of at the moment ("document 3608, wave 1 of 2").
  void set_stage(std::string stage);
  /// Prints a line of its own above the status.
  void note(const std::string& line);
  /// Draws the last status and leaves it standing.
  void finish(Clock::time_point now = Clock::now());

  /// Tokens a second over the last quarter minute, 0 before the first.
  double tokens_per_second() const;
  /// Seconds that the rest takes at that rate; negative when unknown.
  double eta_seconds() const;
  /// "43.0 %  3,520 of 8,192 tokens  1,234 tokens/s  ETA 0:42".
  std::string status() const;
  /// Mean of a state so far: "1.234e-05", "-" without values, "1.234e-05 (3 non-finite)".
  std::string mean_kl(int state) const;

 private:
  struct Mean {
    double sum = 0;
    int64_t count = 0;
    int64_t non_finite = 0;
  };
  std::string figure(size_t state) const;
  void draw(Clock::time_point now, bool last);
  void erase();

  std::vector<std::string> states_;
  std::vector<Mean> means_;
  int64_t total_;
  int64_t done_;
  std::FILE* stream_;
  bool terminal_;
  std::string stage_;
  std::string unit_ = "tokens";
  std::string figure_ = "mean KL";
  std::vector<std::string> figures_;  // empty: the means
  Clock::time_point drawn_;
  int lines_ = 0;  // of the status that stands on the terminal
  bool finished_ = false;
  bool stop_seen_ = false;
  std::deque<std::pair<Clock::time_point, int64_t>> history_;  // time, tokens done by then
};

/// Whether the stream is a terminal that understands cursor movement.
bool is_terminal(std::FILE* stream);

}  // namespace replayeval
