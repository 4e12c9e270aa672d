#include "reports/export.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "reports/files.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

/// A text file of any length that takes its place, synced, only when it is complete.
class TextFile {
 public:
  explicit TextFile(const fs::path& path)
      : path_(path), temporary_(temporary_name(path)), file_(std::fopen(temporary_.c_str(), "wb")) {
    if (file_ == nullptr) fail();
  }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  ~TextFile() {
    if (file_ == nullptr) return;
    std::fclose(file_);
    std::error_code ignored;
    fs::remove(temporary_, ignored);
  }

  void write(const std::string& text) {
    if (std::fwrite(text.data(), 1, text.size(), file_) != text.size()) fail();
  }

  void finish() {
    if (std::fflush(file_) != 0 || ::fsync(::fileno(file_)) != 0) fail();
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail();
    std::fclose(file_);
    file_ = nullptr;
    fs::path folder = path_.parent_path();
    if (folder.empty()) folder = ".";
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return;
    ::fsync(descriptor);
    ::close(descriptor);
  }

 private:
  [[noreturn]] void fail() const {
    const int reason = errno;
    throw std::runtime_error(path_.string() + ": cannot be written: " + std::strerror(reason));
  }

  fs::path path_, temporary_;
  std::FILE* file_;
};

std::string field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

template <class T>
void append_number(std::string* line, T value) {
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof digits, value);
  line->append(digits, end);
}

void append_figure(std::string* line, float value) {
  if (std::isnan(value)) {
    *line += "nan";  // to_chars writes the sign of a NaN, which means nothing here
  } else {
    append_number(line, value);
  }
}

}  // namespace

int64_t write_positions_csv(const Report& report, const fs::path& path) {
  TextFile file(path);
  file.write("document,position,token,state,kl,nll,top1\n");
  int64_t lines = 0;
  std::vector<std::string> names;
  for (const StateReport& state : report.states) names.push_back(field(state.info.name));
  std::string text;
  for (size_t d = 0; d < report.documents.size(); ++d) {
    const std::string id = field(report.documents[d].id);
    int64_t length = 0;
    for (const StateReport& state : report.states)
      length = std::max(length, state.documents[d].length);
    for (int64_t t = 0; t < length; ++t) {
      const auto i = static_cast<size_t>(t);
      for (size_t s = 0; s < report.states.size(); ++s) {
        const StateDocument& values = report.states[s].documents[d];
        if (t < values.first_position || t >= values.length) continue;
        text += id + ",";
        append_number(&text, t);
        text += ",";
        append_number(&text, report.token_ids[d].at(i));
        text += "," + names[s] + ",";
        append_figure(&text, values.kl[i]);
        text += ",";
        if (t + 1 < report.documents[d].tokens && i < values.nll.size())
          append_figure(&text, values.nll[i]);
        text += ",";
        if (values.top1[i] != kNoTop1) append_number(&text, static_cast<int>(values.top1[i]));
        text += "\n";
        ++lines;
      }
      if (text.size() > 1 << 20) {
        file.write(text);
        text.clear();
      }
    }
  }
  file.write(text);
  file.finish();
  return lines;
}

int64_t write_answers_csv(const Report& report, const fs::path& path) {
  TextFile file(path);
  file.write(
      "task,item,category,level,repeat,state,gold,extracted,correct,finish_reason,tokens,rule,"
      "stage,seconds,prompt_sha256\n");
  int64_t lines = 0;
  for (const StateReport& state : report.states) {
    for (const Answer& answer : state.answers) {
      const ItemInfo& item = report.items.at(static_cast<size_t>(answer.item));
      std::string line = field(item.task) + "," + field(item.id) + "," + field(item.category) + ",";
      append_number(&line, item.level);
      line += ",";
      append_number(&line, answer.repeat);
      line += "," + field(state.info.name) + "," + field(item.gold) + "," +
              field(answer.extracted) + "," + (answer.correct ? "1" : "0") + "," +
              field(answer.finish_reason) + ",";
      append_number(&line, answer.tokens);
      line += "," + field(answer.rule) + ",";
      append_number(&line, answer.stage);
      line += ",";
      append_number(&line, answer.seconds);
      line += "," + field(item.prompt_sha256) + "\n";
      file.write(line);
      ++lines;
    }
  }
  file.finish();
  return lines;
}

}  // namespace replayeval
