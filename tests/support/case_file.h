// Reads datasets and attributes of the stored HDF5 case files, and says where ../shared is; tests whose data is missing skip loudly.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace replayeval::test {

/// `path` below ../shared if it exists there, otherwise, of cases/..., below tests; empty (after a loud line on standard error) when in neither.
std::string case_path(const std::string& path);

class CaseFile {
 public:
  explicit CaseFile(const std::string& path);
  ~CaseFile();
  CaseFile(const CaseFile&) = delete;
  CaseFile& operator=(const CaseFile&) = delete;

  /// Names of the members of a group ("/" for the root).
  std::vector<std::string> members(const std::string& group) const;
  bool has(const std::string& path) const;
  std::vector<int64_t> shape(const std::string& dataset) const;
  std::vector<float> floats(const std::string& dataset) const;
  std::vector<uint32_t> u32(const std::string& dataset) const;
  std::vector<int32_t> i32(const std::string& dataset) const;
  std::vector<uint64_t> u64(const std::string& dataset) const;
  double attribute(const std::string& object, const std::string& name) const;

 private:
  int64_t file_;
};

}  // namespace replayeval::test
