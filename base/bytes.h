// Plain values one after the other in an array of bytes, in the machine's own byte order: what is
// saved to be read back by the same program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace replayeval {

/// Appends to an array.
class ByteWriter {
 public:
  template <class T>
  void value(const T& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    raw(&v, sizeof v);
  }
  /// The count, then the elements.
  template <class Range>
  void array(const Range& values) {
    using T = std::remove_cvref_t<decltype(*std::data(values))>;
    static_assert(std::is_trivially_copyable_v<T>);
    value(static_cast<uint64_t>(std::size(values)));
    raw(std::data(values), std::size(values) * sizeof(T));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void raw(const void* data, size_t size) {
    const std::byte* bytes = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
  }
  std::vector<std::byte> bytes_;
};

/// Reads back in the same order. Every read throws std::runtime_error when the bytes end before it.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  T value() {
    T v;
    raw(&v, sizeof v);
    return v;
  }
  /// Into a container of any size.
  template <class Container>
  void array(Container& values) {
    const size_t count = size(sizeof(typename Container::value_type));
    values.resize(count);
    raw(values.data(), count * sizeof(typename Container::value_type));
  }
  /// Into a container that must have the stored size already.
  template <class Container>
  void array_of_equal_size(Container& values) {
    const size_t count = size(sizeof(typename Container::value_type));
    if (count != values.size()) {
      throw std::runtime_error("saved bytes: an array of " + std::to_string(count) +
                               " elements, expected " + std::to_string(values.size()));
    }
    raw(values.data(), count * sizeof(typename Container::value_type));
  }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  size_t size(size_t element) {
    const uint64_t count = value<uint64_t>();
    if (count > (bytes_.size() - at_) / element) ends();
    return static_cast<size_t>(count);
  }
  void raw(void* data, size_t size) {
    if (size > bytes_.size() - at_) ends();
    if (size > 0) std::memcpy(data, bytes_.data() + at_, size);
    at_ += size;
  }
  [[noreturn]] void ends() const {
    throw std::runtime_error("saved bytes: they end at byte " + std::to_string(bytes_.size()) +
                             ", inside a value that begins at " + std::to_string(at_));
  }

  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

}  // namespace replayeval
