#include "reports/export_rows.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "reports/files.h"

namespace replayeval {

namespace fs = std::filesystem;

LargeFile::LargeFile(const fs::path& path)
    : path_(path), temporary_(temporary_name(path)), file_(std::fopen(temporary_.c_str(), "wb")) {
  if (file_ == nullptr) fail();
}

LargeFile::~LargeFile() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  std::error_code ignored;
  fs::remove(temporary_, ignored);
}

void LargeFile::write(std::string_view bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size()) fail();
  written_ += static_cast<int64_t>(bytes.size());
}

void LargeFile::finish() {
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

void LargeFile::fail() const {
  const int reason = errno;
  throw std::runtime_error(path_.string() + ": cannot be written: " + std::strerror(reason));
}

}  // namespace replayeval
