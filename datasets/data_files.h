// Finds the files of a data set in the layouts that they are published in.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace replayeval {

/// The folder that holds the files: `path` itself, or, for a folder of the hub cache
/// (datasets--ORG--NAME), its snapshot: the one that refs/main names, else the only one.
std::filesystem::path data_folder(const std::filesystem::path& path);

/// Files below `folder` whose path matches `pattern`, in which each * stands for any characters but
/// a slash; sorted by path.
std::vector<std::filesystem::path> matching_files(const std::filesystem::path& folder,
                                                  const std::string& pattern);

/// The patterns under which hubs store a split as Parquet: test-*.parquet, data/test-*.parquet,
/// test.parquet, test/*.parquet, default/test/*.parquet, and the same below each of
/// `configurations`.
std::vector<std::string> parquet_patterns(const std::string& split,
                                          const std::vector<std::string>& configurations = {});

/// The files of the first pattern that has any; empty when none does. Throws std::runtime_error
/// when files are numbered NNNNN-of-MMMMM and some are missing.
std::vector<std::filesystem::path> find_data_files(const std::filesystem::path& folder,
                                                   const std::vector<std::string>& patterns);

}  // namespace replayeval
