#include "tests/support/case_file.h"

#include <hdf5.h>

#include <cstdio>
#include <filesystem>
#include <stdexcept>

namespace replayeval::test {
namespace {

std::vector<hsize_t> dims_of(hid_t dataset) {
  hid_t space = H5Dget_space(dataset);
  std::vector<hsize_t> dims(static_cast<size_t>(H5Sget_simple_extent_ndims(space)));
  H5Sget_simple_extent_dims(space, dims.data(), nullptr);
  H5Sclose(space);
  return dims;
}

template <class T>
std::vector<T> read_all(int64_t file, const std::string& name, hid_t type) {
  hid_t dataset = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
  if (dataset < 0) throw std::runtime_error("case file: no dataset " + name);
  size_t count = 1;
  for (hsize_t d : dims_of(dataset)) count *= d;
  std::vector<T> values(count);
  herr_t status = H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
  H5Dclose(dataset);
  if (status < 0) throw std::runtime_error("case file: cannot read " + name);
  return values;
}

}  // namespace

std::string case_path(const std::string& path) {
  std::vector<std::string> places = {std::string(REPLAYEVAL_SHARED_DIR) + "/" + path};
  // Other folders of tests/ have names of ../shared's, as datasets.
  if (path.starts_with("cases/")) places.push_back(std::string(REPLAYEVAL_SOURCE_DIR) + "/tests/" + path);
  for (const std::string& place : places) {
    if (std::filesystem::exists(place)) return place;
  }
  std::fprintf(stderr, "SKIPPED: %s is neither in ../shared nor in tests/\n", path.c_str());
  return {};
}

CaseFile::CaseFile(const std::string& path) : file_(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)) {
  if (file_ < 0) throw std::runtime_error("case file: cannot open " + path);
}
CaseFile::~CaseFile() { H5Fclose(file_); }

std::vector<std::string> CaseFile::members(const std::string& group) const {
  std::vector<std::string> names;
  hid_t id = H5Gopen2(file_, group.c_str(), H5P_DEFAULT);
  if (id < 0) throw std::runtime_error("case file: no group " + group);
  H5Literate(
      id, H5_INDEX_NAME, H5_ITER_INC, nullptr,
      [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
        static_cast<std::vector<std::string>*>(out)->emplace_back(name);
        return 0;
      },
      &names);
  H5Gclose(id);
  return names;
}

bool CaseFile::has(const std::string& path) const {
  std::string prefix;
  size_t start = path.front() == '/' ? 1 : 0;
  while (start <= path.size()) {
    size_t end = path.find('/', start);
    if (end == std::string::npos) end = path.size();
    prefix += "/" + path.substr(start, end - start);
    if (H5Lexists(file_, prefix.c_str(), H5P_DEFAULT) <= 0) return false;
    start = end + 1;
  }
  return true;
}

std::vector<int64_t> CaseFile::shape(const std::string& dataset) const {
  hid_t id = H5Dopen2(file_, dataset.c_str(), H5P_DEFAULT);
  if (id < 0) throw std::runtime_error("case file: no dataset " + dataset);
  std::vector<hsize_t> dims = dims_of(id);
  H5Dclose(id);
  return {dims.begin(), dims.end()};
}

std::vector<float> CaseFile::floats(const std::string& d) const { return read_all<float>(file_, d, H5T_NATIVE_FLOAT); }
std::vector<uint32_t> CaseFile::u32(const std::string& d) const { return read_all<uint32_t>(file_, d, H5T_NATIVE_UINT32); }
std::vector<int32_t> CaseFile::i32(const std::string& d) const { return read_all<int32_t>(file_, d, H5T_NATIVE_INT32); }
std::vector<uint64_t> CaseFile::u64(const std::string& d) const { return read_all<uint64_t>(file_, d, H5T_NATIVE_UINT64); }

double CaseFile::attribute(const std::string& object, const std::string& name) const {
  hid_t id = H5Aopen_by_name(file_, object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT);
  if (id < 0) throw std::runtime_error("case file: no attribute " + object + "@" + name);
  double value = 0;
  H5Aread(id, H5T_NATIVE_DOUBLE, &value);
  H5Aclose(id);
  return value;
}

}  // namespace replayeval::test
