#include "datasets/data_files.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <stdexcept>

namespace replayeval {
namespace {

namespace fs = std::filesystem;

// Whether `name` matches a pattern with * (greedy from the left, each * tried once more on
// failure).
bool matches(std::string_view name, std::string_view pattern) {
  size_t n = 0, p = 0, star = std::string_view::npos, resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

void collect(const fs::path& folder, std::string_view pattern, std::vector<fs::path>* found) {
  const size_t slash = pattern.find('/');
  const std::string_view here = pattern.substr(0, slash);
  if (here.find('*') == std::string_view::npos) {
    const fs::path next = folder / std::string(here);
    if (slash != std::string_view::npos) {
      collect(next, pattern.substr(slash + 1), found);
    } else if (fs::is_regular_file(next)) {
      found->push_back(next);
    }
    return;
  }
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    if (!matches(entry.path().filename().string(), here)) continue;
    if (slash == std::string_view::npos) {
      if (entry.is_regular_file()) found->push_back(entry.path());
    } else if (entry.is_directory()) {
      collect(entry.path(), pattern.substr(slash + 1), found);
    }
  }
}

// MMMMM of "name-NNNNN-of-MMMMM..."; 0: the name has no such part.
int shards_of(const std::string& name, int* index) {
  const size_t of = name.find("-of-");
  if (of == std::string::npos || of < 6) return 0;
  int count = 0;
  const char* const text = name.data();
  if (std::from_chars(text + of - 5, text + of, *index).ptr != text + of) return 0;
  if (std::from_chars(text + of + 4, text + name.size(), count).ec != std::errc()) return 0;
  return count;
}

}  // namespace

fs::path data_folder(const fs::path& path) {
  const fs::path snapshots = path / "snapshots";
  if (!fs::is_directory(snapshots)) return path;
  std::ifstream main(path / "refs" / "main");
  std::string revision;
  if (main >> revision && fs::is_directory(snapshots / revision)) return snapshots / revision;
  std::vector<fs::path> all;
  for (const auto& entry : fs::directory_iterator(snapshots)) all.push_back(entry.path());
  return all.size() == 1 ? all.front() : path;
}

std::vector<fs::path> matching_files(const fs::path& folder, const std::string& pattern) {
  std::vector<fs::path> found;
  collect(folder, pattern, &found);
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<std::string> parquet_patterns(const std::string& split,
                                          const std::vector<std::string>& configurations) {
  std::vector<std::string> patterns;
  const auto add = [&](const std::string& below) {
    for (const char* form : {"@-*.parquet", "data/@-*.parquet", "@.parquet", "@/*.parquet"}) {
      std::string pattern = below + form;
      pattern.replace(pattern.find('@'), 1, split);
      patterns.push_back(std::move(pattern));
    }
  };
  add("");
  for (const std::string& configuration : configurations) add(configuration + "/");
  add("default/");
  return patterns;
}

std::vector<fs::path> find_data_files(const fs::path& folder,
                                      const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    std::vector<fs::path> files = matching_files(folder, pattern);
    if (files.empty()) continue;
    std::map<std::string, std::pair<int, int>>
        shards;  // of each folder: there are, there should be
    for (const fs::path& file : files) {
      int index = 0;
      if (const int count = shards_of(file.filename().string(), &index); count > 0) {
        auto& [there, wanted] = shards[file.parent_path().string()];
        ++there;
        wanted = std::max(wanted, count);
      }
    }
    for (const auto& [parent, counts] : shards) {
      if (counts.first < counts.second) {
        throw std::runtime_error("data: " + parent + ": has " + std::to_string(counts.first) +
                                 " of " + std::to_string(counts.second) +
                                 " files of this split; download the others");
      }
    }
    return files;
  }
  return {};
}

}  // namespace replayeval
