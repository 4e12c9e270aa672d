#include "models/hub.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace replayeval {
namespace {

namespace fs = std::filesystem;

fs::path home() {
  if (const char* path = std::getenv("HOME"); path != nullptr && *path != '\0') return path;
  const passwd* user = ::getpwuid(::getuid());
  return user != nullptr && user->pw_dir != nullptr ? fs::path(user->pw_dir) : fs::path();
}

fs::path expanded(std::string_view path) {
  if (path == "~" || path.substr(0, 2) == "~/")
    return home() / fs::path(path.substr(std::min<size_t>(2, path.size())));
  return fs::path(path);
}

/// "NAME" or "ORG/NAME" of letters, digits, '-', '_', '.'.
bool is_hub_name(std::string_view name) {
  if (name.empty() || name.front() == '/' || name.back() == '/' || name.front() == '.')
    return false;
  if (std::count(name.begin(), name.end(), '/') > 1) return false;
  if (name.find("..") != std::string_view::npos || name.find("--") != std::string_view::npos)
    return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.' || c == '/';
  });
}

std::string first_line(const fs::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
  return line;
}

}  // namespace

fs::path default_hub() {
  const fs::path folder = home();
  return folder.empty() ? folder : folder / ".cache" / "huggingface" / "hub";
}

fs::path find_model(std::string_view model, const fs::path& hub) {
  std::error_code error;
  const fs::path folder = expanded(model);
  const std::string place = std::string(model) + ": ";
  if (fs::exists(folder / "config.json", error)) return folder;
  if (fs::exists(folder, error)) {
    throw std::invalid_argument(
        place + "expected a folder with config.json and model.safetensors, got " +
        (fs::is_directory(folder, error) ? "one without config.json" : "a file"));
  }
  const size_t at = model.find('@');
  const std::string name(model.substr(0, at));
  const std::string revision(at == std::string_view::npos ? std::string_view("main")
                                                          : model.substr(at + 1));
  if (!is_hub_name(name) || revision.empty() || revision.find("..") != std::string::npos ||
      revision.front() == '/') {
    throw std::invalid_argument(
        place + "expected a model folder or a hub name (ORG/NAME), got no such folder");
  }

  const fs::path cache = hub.empty() ? default_hub() : expanded(hub.string());
  std::string flattened = name;
  if (const size_t slash = flattened.find('/'); slash != std::string::npos)
    flattened.replace(slash, 1, "--");
  const fs::path repository = cache / ("models--" + flattened);
  std::string download = "download it with: hf download " + name;
  if (revision != "main") download += " --revision " + revision;
  if (!hub.empty()) download += " --cache-dir " + cache.string();

  if (!fs::is_directory(repository, error)) {
    throw std::invalid_argument(place + "expected a model folder, or a hub name in the cache (" +
                                repository.string() + "), got neither; " + download);
  }
  fs::path snapshot;
  const std::string commit = first_line(repository / "refs" / revision);
  if (!commit.empty()) {
    snapshot = repository / "snapshots" / commit;
  } else if (fs::is_directory(repository / "snapshots" / revision, error)) {
    snapshot = repository / "snapshots" / revision;
  } else if (at == std::string_view::npos) {
    std::vector<fs::path> all;
    for (const fs::directory_entry& entry :
         fs::directory_iterator(repository / "snapshots", error)) {
      if (entry.is_directory(error)) all.push_back(entry.path());
    }
    if (all.size() == 1) snapshot = all.front();
  }
  if (snapshot.empty()) {
    throw std::invalid_argument(place + "expected the revision " + revision + " in " +
                                (repository / "refs").string() + " or " +
                                (repository / "snapshots").string() + ", got nothing; " + download);
  }
  // exists() follows the link: a blob that is not there yet counts as absent.
  if (!fs::exists(snapshot / "config.json", error)) {
    throw std::invalid_argument(place + "expected " + (snapshot / "config.json").string() +
                                ", got nothing (an unfinished download); " + download);
  }
  return snapshot;
}

}  // namespace replayeval
