#include "harness/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>

namespace replayeval {
namespace {

volatile std::sig_atomic_t stop_signals = 0;

extern "C" void on_stop_signal(int signal) {
  stop_signals = stop_signals + 1;
  if (stop_signals > 1) _exit(128 + signal);
  static constexpr char kMessage[] =
      "\nstopping after the current chunk; a second signal stops at once\n";
  // The result does not matter: there is nobody to tell.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
}

constexpr double kRateSeconds = 15;
constexpr auto kRedraw = std::chrono::milliseconds(200);
constexpr auto kPlainLine = std::chrono::seconds(10);

double seconds_between(Progress::Clock::time_point from, Progress::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

void install_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool stop_requested() { return stop_signals > 0; }

std::string format_duration(double seconds) {
  if (!(seconds >= 0) || !std::isfinite(seconds)) return "-";
  const auto total = static_cast<int64_t>(std::llround(std::min(seconds, 1e12)));
  char text[48];
  if (total >= 3600) {
    std::snprintf(text, sizeof text, "%lld:%02d:%02d", static_cast<long long>(total / 3600),
                  static_cast<int>(total / 60 % 60), static_cast<int>(total % 60));
  } else {
    std::snprintf(text, sizeof text, "%d:%02d", static_cast<int>(total / 60),
                  static_cast<int>(total % 60));
  }
  return text;
}

std::string format_count(int64_t count) {
  std::string text = std::to_string(count);
  const int first = count < 0 ? 1 : 0;
  for (int i = static_cast<int>(text.size()) - 3; i > first; i -= 3)
    text.insert(static_cast<size_t>(i), ",");
  return text;
}

bool is_terminal(std::FILE* stream) { return isatty(fileno(stream)) == 1; }

Progress::Progress(std::vector<std::string> states, int64_t total, int64_t done, std::FILE* stream,
                   bool terminal)
    : states_(std::move(states)),
      means_(states_.size()),
      total_(total),
      done_(done),
      stream_(stream),
      terminal_(terminal) {
  drawn_ = Clock::now();
  history_.emplace_back(drawn_, done_);
}

Progress::Progress(std::vector<std::string> states, int64_t total, int64_t done, std::FILE* stream,
                   bool terminal, std::string unit, std::string figure)
    : Progress(std::move(states), total, done, stream, terminal) {
  unit_ = std::move(unit);
  figure_ = std::move(figure);
  figures_.assign(states_.size(), "-");
}

Progress::~Progress() {
  if (!finished_ && lines_ > 0) std::fflush(stream_);
}

void Progress::observe(int state, std::span<const float> kl_nats) {
  Mean& mean = means_.at(static_cast<size_t>(state));
  for (const float kl : kl_nats) {
    if (std::isnan(kl)) {
      ++mean.non_finite;
    } else {
      mean.sum += kl;
      ++mean.count;
    }
  }
}

void Progress::set_figure(int state, std::string text) {
  figures_.at(static_cast<size_t>(state)) = std::move(text);
}

std::string Progress::figure(size_t state) const {
  return figures_.empty() ? mean_kl(static_cast<int>(state)) : figures_[state];
}

void Progress::skip(int64_t tokens) {
  done_ += tokens;
  for (auto& [time, done] : history_) done += tokens;
}

void Progress::advance(int64_t tokens, Clock::time_point now) {
  done_ += tokens;
  history_.emplace_back(now, done_);
  // One sample from before the interval stays, so that slow chunks have a rate too.
  while (history_.size() > 2 && seconds_between(history_[1].first, now) > kRateSeconds)
    history_.pop_front();
  if (now - drawn_ >= (terminal_ ? std::chrono::duration_cast<Clock::duration>(kRedraw)
                                 : std::chrono::duration_cast<Clock::duration>(kPlainLine))) {
    draw(now, false);
  }
}

void Progress::set_stage(std::string stage) { stage_ = std::move(stage); }

void Progress::note(const std::string& line) {
  erase();
  std::fprintf(stream_, "%s\n", line.c_str());
  std::fflush(stream_);
}

void Progress::finish(Clock::time_point now) {
  if (finished_) return;
  draw(now, true);
  finished_ = true;
}

double Progress::tokens_per_second() const {
  const double seconds = seconds_between(history_.front().first, history_.back().first);
  const int64_t tokens = history_.back().second - history_.front().second;
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

double Progress::eta_seconds() const {
  if (done_ >= total_) return 0;
  const double rate = tokens_per_second();
  return rate > 0 ? static_cast<double>(total_ - done_) / rate : -1;
}

std::string Progress::status() const {
  char percent[32];
  std::snprintf(
      percent, sizeof percent, "%.1f %%",
      total_ > 0 ? 100.0 * static_cast<double>(done_) / static_cast<double>(total_) : 100.0);
  const double per_second = tokens_per_second();
  char rate[32];
  std::snprintf(rate, sizeof rate, "%.2f", per_second);
  return std::string(percent) + "  " + format_count(done_) + " of " + format_count(total_) + " " +
         unit_ + "  " +
         (per_second < 10 && unit_ != "tokens" ? std::string(rate)
                                               : format_count(std::llround(per_second))) +
         " " + unit_ + "/s  ETA " + format_duration(eta_seconds()) +
         (stage_.empty() ? "" : "  " + stage_);
}

std::string Progress::mean_kl(int state) const {
  const Mean& mean = means_.at(static_cast<size_t>(state));
  char text[64] = "-";
  if (mean.count > 0)
    std::snprintf(text, sizeof text, "%.3e", mean.sum / static_cast<double>(mean.count));
  std::string result = text;
  if (mean.non_finite > 0) result += " (" + format_count(mean.non_finite) + " non-finite)";
  return result;
}

void Progress::erase() {
  if (stop_requested() &&
      !stop_seen_) {  // the signal's message stands below the status, which stays
    stop_seen_ = true;
    lines_ = 0;
  }
  if (lines_ > 0) std::fprintf(stream_, "\r\x1b[%dA\x1b[J", lines_);
  lines_ = 0;
}

void Progress::draw(Clock::time_point now, bool last) {
  drawn_ = now;
  if (!terminal_) {
    std::string line = status();
    for (size_t s = 0; s < states_.size(); ++s) {
      line += (s == 0 ? "  " + figure_ + ": " : ", ") + states_[s] + " " + figure(s);
    }
    std::fprintf(stream_, "%s\n", line.c_str());
    std::fflush(stream_);
    return;
  }
  winsize window{};
  if (ioctl(fileno(stream_), TIOCGWINSZ, &window) != 0 || window.ws_row == 0) window.ws_row = 24;
  if (window.ws_col == 0) window.ws_col = 80;
  const size_t columns = window.ws_col;
  // A wrapped or scrolled-off line could not be redrawn, so lines are cut and states that do not
  // fit are counted.
  const size_t shown =
      std::min(states_.size(), static_cast<size_t>(std::max(1, window.ws_row - 3)));
  size_t width = 0;
  for (const std::string& name : states_) width = std::max(width, name.size());
  std::vector<std::string> lines = {status()};
  for (size_t s = 0; s < shown; ++s) {
    lines.push_back("  " + states_[s] + std::string(width - states_[s].size(), ' ') + "  " +
                    figure_ + " " + figure(s));
  }
  if (shown < states_.size())
    lines.push_back("  and " + std::to_string(states_.size() - shown) + " more");
  erase();
  for (const std::string& line : lines)
    std::fprintf(stream_, "%s\n", line.substr(0, columns - 1).c_str());
  std::fflush(stream_);
  lines_ = last ? 0 : static_cast<int>(lines.size());
}

}  // namespace replayeval
