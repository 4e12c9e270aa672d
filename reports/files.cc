#include "reports/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace replayeval {
namespace fs = std::filesystem;
namespace {

constexpr const char* kTemporaryPrefix = ".tmp-";

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  int close() {
    int status = ::close(fd_);
    fd_ = -1;
    return status;
  }

 private:
  int fd_;
};

std::string megabytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MB", bytes / 1e6);
  return text;
}

/// Whether a file is a run's own, which goes on from what it has: run.json and the report beside
/// it, and what lies in its folders.
bool is_of_run(const fs::path& path) {
  std::error_code error;
  const fs::path folder = path.parent_path();
  if (path.filename() == kManifest || fs::exists(folder.parent_path() / kManifest, error))
    return true;
  return path.extension() == ".h5" && fs::exists(folder / kManifest, error);
}

[[noreturn]] void fail_write(const fs::path& path, size_t size, int error) {
  std::string message = path.string() + ": cannot be written: " + std::strerror(error);
  const bool of_run = is_of_run(path);
  if (error == ENOSPC || error == EDQUOT) {
    struct statvfs info {};
    message += " (" + megabytes(static_cast<double>(size)) + " needed";
    if (::statvfs(path.parent_path().c_str(), &info) == 0) {
      message +=
          ", " +
          megabytes(static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize)) +
          " free";
    }
    message += ")";
    if (of_run) message += "; finished parts are kept, free space and go on with --resume";
  } else if (of_run && (error == EROFS || error == EACCES || error == EPERM)) {
    message += "; finished parts are kept, make the folder writable and go on with --resume";
  }
  throw std::runtime_error(message);
}

void sync_folder(const fs::path& folder) {
  FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some network file systems refuse to sync a folder; the rename itself is still atomic there.
  if (fd.get() >= 0) ::fsync(fd.get());
}

/// Writes all bytes; the error, or 0.
int write_all(int fd, std::span<const std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count =
        ::write(fd, bytes.data() + done, std::min(bytes.size() - done, size_t{1} << 30));
    if (count > 0) {
      done += static_cast<size_t>(count);
    } else if (count == 0) {
      return ENOSPC;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

fs::path write_temporary(const fs::path& path, std::span<const std::byte> bytes) {
  fs::path temporary = temporary_name(path);
  FileDescriptor fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (fd.get() < 0) fail_write(path, bytes.size(), errno);
  int error = write_all(fd.get(), bytes);
  if (error == 0 && ::fsync(fd.get()) != 0) error = errno;
  if (fd.close() != 0 && error == 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    fail_write(path, bytes.size(), error);
  }
  return temporary;
}

/// Into a device, pipe or socket, which stays what it is.
void write_through(const fs::path& path, std::span<const std::byte> bytes) {
  FileDescriptor fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (fd.get() < 0) fail_write(path, bytes.size(), errno);
  int error = write_all(fd.get(), bytes);
  if (fd.close() != 0 && error == 0) error = errno;
  if (error != 0) fail_write(path, bytes.size(), error);
}

std::string read_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

fs::path temporary_name(const fs::path& path) {
  static std::atomic<uint64_t> counter{0};
  return path.parent_path() /
         (kTemporaryPrefix + machine_name() + "-" + std::to_string(::getpid()) + "-" +
          std::to_string(counter++) + "-" + path.filename().string());
}

std::optional<std::vector<std::byte>> read_file(const fs::path& path) {
  FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) {
    if (errno == ENOENT) return std::nullopt;
    throw std::runtime_error(path.string() + ": cannot be read: " + std::strerror(errno));
  }
  std::vector<std::byte> bytes;
  struct stat info {};
  if (::fstat(fd.get(), &info) == 0) {
    if (S_ISDIR(info.st_mode))
      throw std::runtime_error(path.string() + ": cannot be read: is a folder");
    bytes.resize(static_cast<size_t>(info.st_size));
  }
  size_t done = 0;
  while (true) {
    if (done == bytes.size()) bytes.resize(done + 4096);
    ssize_t count = ::read(fd.get(), bytes.data() + done, bytes.size() - done);
    if (count == 0) break;
    if (count > 0) {
      done += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      throw std::runtime_error(path.string() + ": cannot be read: " + std::strerror(errno));
    }
  }
  bytes.resize(done);
  return bytes;
}

void replace_file(const fs::path& named, std::span<const std::byte> bytes) {
  std::error_code none;
  const fs::file_status target = fs::status(named, none);
  if (fs::exists(target) && !fs::is_regular_file(target) && !fs::is_directory(target))
    return write_through(named, bytes);
  fs::path path = named;
  constexpr int kMostLinks = 40;
  for (int links = 0; fs::is_symlink(path, none); ++links) {
    if (links == kMostLinks) fail_write(named, bytes.size(), ELOOP);
    path = path.parent_path() / fs::read_symlink(path, none);
  }
  fs::path temporary = write_temporary(path, bytes);
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    int error = errno;
    ::unlink(temporary.c_str());
    fail_write(path, bytes.size(), error);
  }
  sync_folder(path.parent_path());
}

bool create_file(const fs::path& path, std::span<const std::byte> bytes) {
  fs::path temporary = write_temporary(path, bytes);
  int status = ::link(temporary.c_str(), path.c_str());
  int error = errno;
  ::unlink(temporary.c_str());
  if (status == 0) {
    sync_folder(path.parent_path());
    return true;
  }
  if (error == EEXIST) return false;
  if (error == EPERM || error == EOPNOTSUPP || error == ENOSYS) {
    // A file system without hard links: exclusive creation, not atomic in its content.
    FileDescriptor fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (fd.get() < 0) {
      if (errno == EEXIST) return false;
      fail_write(path, bytes.size(), errno);
    }
    fd.close();
    replace_file(path, bytes);
    return true;
  }
  fail_write(path, bytes.size(), error);
}

void make_writable_folder(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error || !fs::is_directory(path)) {
    throw std::runtime_error(path.string() + ": the folder cannot be created: " +
                             (error ? error.message() : "a file of that name is in the way"));
  }
  fs::path probe = temporary_name(path / "probe");
  FileDescriptor fd(::open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (fd.get() < 0) {
    throw std::runtime_error(path.string() + ": the folder is not writable: " +
                             std::strerror(errno) + "; choose another");
  }
  ::unlink(probe.c_str());
}

void remove_stale_temporaries(const fs::path& folder) {
  const std::string own = kTemporaryPrefix + machine_name() + "-";
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    std::string name = entry.path().filename().string();
    if (!name.starts_with(kTemporaryPrefix)) continue;
    bool stale = false;
    if (name.starts_with(own)) {
      int pid = std::atoi(name.c_str() + own.size());
      stale = pid > 0 && pid != ::getpid() && process_start(pid) == 0;
    }
    std::error_code ignored;
    auto changed = fs::last_write_time(entry.path(), ignored);
    if (!ignored && fs::file_time_type::clock::now() - changed > std::chrono::hours(24))
      stale = true;
    if (stale) ::unlink(entry.path().c_str());
  }
}

const std::string& machine_name() {
  static const std::string name = [] {
    char host[256] = "host";
    ::gethostname(host, sizeof host - 1);
    char space[64] = "";
    ssize_t size = ::readlink("/proc/self/ns/pid", space, sizeof space - 1);
    std::string text =
        host + std::string("-") + read_line("/proc/sys/kernel/random/boot_id").substr(0, 8) + "-";
    for (ssize_t i = 0; i < size; ++i) {
      if (space[i] >= '0' && space[i] <= '9') text += space[i];
    }
    return text;
  }();
  return name;
}

unsigned long long process_start(int pid) {
  if (pid <= 0 || (::kill(pid, 0) != 0 && errno == ESRCH)) return 0;
  std::string line = read_line(("/proc/" + std::to_string(pid) + "/stat").c_str());
  // Field 2 is the program's name in parentheses and may contain blanks; the start time is field
  // 22, a zombie has state Z.
  size_t at = line.rfind(')');
  if (at == std::string::npos) return 1;
  char state = 0;
  unsigned long long start = 0;
  if (std::sscanf(
          line.c_str() + at + 1,
          " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
          &state, &start) != 2) {
    return 1;
  }
  return state == 'Z' ? 0 : start;
}

std::span<const std::byte> as_byte_span(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace replayeval
