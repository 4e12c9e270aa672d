// Progress on a terminal and elsewhere: rate, remaining time, running means.
#include "harness/progress.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

namespace replayeval {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::string contents(std::FILE* file) {
  std::fflush(file);
  std::rewind(file);
  std::string text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
  return text;
}

TEST_CASE("durations and counts") {
  CHECK(format_duration(0) == "0:00");
  CHECK(format_duration(41.6) == "0:42");
  CHECK(format_duration(725) == "12:05");
  CHECK(format_duration(11220) == "3:07:00");
  CHECK(format_duration(-1) == "-");
  CHECK(format_duration(std::numeric_limits<double>::infinity()) == "-");
  CHECK(format_count(0) == "0");
  CHECK(format_count(999) == "999");
  CHECK(format_count(1000) == "1,000");
  CHECK(format_count(131072) == "131,072");
  CHECK(format_count(-1234567) == "-1,234,567");
}

TEST_CASE("rate over the last quarter minute, remaining time, means without non-finite values") {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  Progress progress({"fp16", "nvfp4"}, 10000, 1000, file, false);
  const auto start = Progress::Clock::now();
  CHECK(progress.eta_seconds() < 0);
  // 100 tokens a second for a minute, then 200: the rate is that of the last 15 seconds.
  for (int s = 1; s <= 60; ++s) progress.advance(100, start + seconds(s));
  CHECK(progress.tokens_per_second() == doctest::Approx(100).epsilon(0.02));
  for (int s = 61; s <= 65; ++s) progress.advance(200, start + seconds(s));
  const double mixed = progress.tokens_per_second();
  CHECK(mixed > 110);
  CHECK(mixed < 160);
  // 1000 + 6000 + 1000 = 8000 of 10000.
  CHECK(progress.eta_seconds() == doctest::Approx(2000 / mixed));
  CHECK(progress.status().starts_with("80.0 %  8,000 of 10,000 tokens  "));

  const float nan = std::nanf("");
  progress.observe(0, std::vector<float>{1e-5f, 3e-5f});
  progress.observe(0, std::vector<float>{nan, 2e-5f});
  CHECK(progress.mean_kl(0) == "2.000e-05 (1 non-finite)");
  CHECK(progress.mean_kl(1) == "-");
  progress.set_stage("document 7");
  progress.finish(start + seconds(66));
  const std::string text = contents(file);
  // A plain line every ten seconds at most, none of them redrawn, all states on it.
  size_t lines = 0;
  for (char c : text) lines += c == '\n' ? 1 : 0;
  CHECK(lines == 7);
  CHECK(text.find('\x1b') == std::string::npos);
  CHECK(text.ends_with("document 7  mean KL: fp16 2.000e-05 (1 non-finite), nvfp4 -\n"));
  std::fclose(file);
}

TEST_CASE("a terminal's status replaces itself and leaves notes standing") {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  Progress progress({"a", "bcd"}, 100, 0, file, true);
  const auto start = Progress::Clock::now();
  progress.advance(10, start + milliseconds(300));
  progress.advance(10, start + milliseconds(310));  // too soon to draw again
  progress.note("a note");
  progress.advance(10, start + milliseconds(700));
  progress.finish(start + milliseconds(800));
  const std::string text = contents(file);
  // Three lines a drawing; erased before the note and before the last drawing.
  const size_t note = text.find("\r\x1b[3A\x1b[Ja note\n");
  CHECK(note != std::string::npos);
  CHECK(text.find("10.0 %") < note);
  CHECK(text.find("20.0 %") == std::string::npos);
  CHECK(text.find("\r\x1b[3A\x1b[J", text.find("30.0 %")) != std::string::npos);
  CHECK(text.find("  a    mean KL -\n  bcd  mean KL -\n") != std::string::npos);
  std::fclose(file);
}

TEST_CASE("the first signal is a request, the second ends the process") {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    install_stop_signals();
    if (stop_requested()) _exit(10);
    raise(SIGTERM);
    if (!stop_requested()) _exit(11);
    raise(SIGINT);
    _exit(12);
  }
  int status = 0;
  waitpid(child, &status, 0);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 128 + SIGINT);
  CHECK_FALSE(stop_requested());
}

}  // namespace
}  // namespace replayeval
