// An HDF5 file as bytes in memory: written or read through the C library's core driver. Files reach
// the disk through files.h, so that a full disk is an ordinary error, and broken files are
// recognised by a checksum before the library parses them. All calls are serialised: the C library
// is not thread-safe as packaged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "reports/results.h"

namespace replayeval {

/// Writes datasets and attributes into a file in memory. Paths are absolute ("/states/00/kl");
/// groups are created as needed. Numeric data of more than one element is chunked, shuffled and
/// deflated. Throws std::runtime_error naming `file` and the object.
class Hdf5Writer {
 public:
  /// `file` is only a name for messages.
  explicit Hdf5Writer(std::string file);
  ~Hdf5Writer();
  Hdf5Writer(const Hdf5Writer&) = delete;
  Hdf5Writer& operator=(const Hdf5Writer&) = delete;

  void group(const std::string& path);

  /// data [product of dims], row-major. T: float, double, uint8_t, int32_t, uint32_t, int64_t,
  /// uint64_t, std::string (UTF-8, variable length), LayerHealth (compound).
  template <class T>
  void dataset(const std::string& path, const std::vector<int64_t>& dims, std::span<const T> data);

  /// Creates [rows, columns] filled with `fill`, chunked by row; rows are written by write_row.
  /// Chunks that are never written take no space.
  template <class T>
  void table(const std::string& path, int64_t rows, int64_t columns, T fill);
  template <class T>
  void write_row(const std::string& path, int64_t row, std::span<const T> data);

  template <class T>
  void attribute(const std::string& path, const std::string& name, const T& value);
  template <class T>
  void attribute_list(const std::string& path, const std::string& name, std::span<const T> values);

  /// Closes the file and returns its bytes.
  std::vector<std::byte> finish();

 private:
  std::string file_;
  int64_t id_ = -1;
};

/// Reads from the bytes of an HDF5 file. Throws std::runtime_error naming `file` and the object
/// when something is missing or has another shape or type.
class Hdf5Reader {
 public:
  Hdf5Reader(std::string file, std::span<const std::byte> bytes);
  ~Hdf5Reader();
  Hdf5Reader(const Hdf5Reader&) = delete;
  Hdf5Reader& operator=(const Hdf5Reader&) = delete;

  bool has(const std::string& path) const;
  bool has_attribute(const std::string& path, const std::string& name) const;
  std::vector<std::string> members(const std::string& group) const;
  std::vector<int64_t> dims(const std::string& path) const;
  template <class T>
  std::vector<T> dataset(const std::string& path) const;
  /// The first `count` values of a row of a [rows, columns] dataset.
  template <class T>
  std::vector<T> row(const std::string& path, int64_t row, int64_t count) const;
  template <class T>
  T attribute(const std::string& path, const std::string& name) const;
  template <class T>
  std::vector<T> attribute_list(const std::string& path, const std::string& name) const;

 private:
  std::string file_;
  int64_t id_ = -1;
};

/// Writes the attribute `checksum` of the root: SHA-256 of the whole file in which the attribute's
/// 64 digits are zeros. Call placeholder before finish(), then seal the bytes.
void checksum_placeholder(Hdf5Writer& writer);
void seal_checksum(std::vector<std::byte>& bytes);
/// Empty when the checksum is right, otherwise what is wrong. Never parses HDF5.
std::string check_checksum(std::span<const std::byte> bytes);

}  // namespace replayeval
