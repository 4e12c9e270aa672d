// Memory-mapped reader of safetensors checkpoints, one file or sharded behind an index, and a
// writer. Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape,
// data_offsets: [begin, end]}}, then the data that offsets count from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace replayeval {

enum class TensorType : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e5m2,
  i64,
  i32,
  i16,
  i8,
  u8,
  boolean,
  other
};

/// Bytes of an element; 0 for `other`.
size_t element_bytes(TensorType type);
/// "F32", "F8_E4M3", ...; "other" for `other`.
std::string_view name_of(TensorType type);

/// A tensor in mapped memory. `data` need not be aligned to its element. A dtype that this reader
/// does not know is kept as `other`, so that a tensor nobody asks for does no harm.
struct TensorInfo {
  std::string name;
  TensorType type = TensorType::other;
  std::string type_name;  // as the file spells it
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  size_t bytes = 0;
  int shard = 0;

  int64_t elements() const;
};

/// "[2, 3]".
std::string shape_text(std::span<const int64_t> shape);

/// One mapped file.
struct Shard {
  std::filesystem::path path;
  std::span<const std::byte> file;    // all bytes
  std::span<const std::byte> header;  // length field and JSON
  std::map<std::string, std::string> metadata;
};

class Safetensors {
 public:
  /// Maps a .safetensors file, an .index.json, or a folder with model.safetensors or
  /// model.safetensors.index.json (looked for in this order, links followed). Reads the headers
  /// only. Throws std::runtime_error with one line, file, tensor, expected and got: a header beyond
  /// the file or not JSON, data that overlap, leave gaps, end beyond the file or do not fit shape
  /// and dtype, a name twice, an index that names an absent shard or a tensor that its shard does
  /// not hold.
  static Safetensors open(const std::filesystem::path& path);

  Safetensors(Safetensors&&) noexcept;
  Safetensors& operator=(Safetensors&&) noexcept;
  ~Safetensors();

  /// In the order of their names' bytes.
  std::span<const TensorInfo> tensors() const;
  /// Null when absent.
  const TensorInfo* find(std::string_view name) const;
  /// Throws std::runtime_error naming the folder when absent.
  const TensorInfo& at(std::string_view name) const;
  std::span<const Shard> shards() const;
  /// Tells the system that the tensor's pages will not be read soon, after they were copied
  /// elsewhere: they leave resident memory.
  void drop_pages(const TensorInfo& tensor) const;
  /// What `open` was given.
  const std::filesystem::path& path() const;

 private:
  struct Implementation;
  explicit Safetensors(std::unique_ptr<Implementation> implementation);
  std::unique_ptr<Implementation> implementation_;
};

/// Widens `count` elements of a floating or integer type to FP32 (F64 and integers are rounded to
/// nearest). `data` need not be aligned. Throws std::invalid_argument for `other`.
void widen_to_floats(TensorType type, const std::byte* data, int64_t count, float* out);

/// All elements as FP32, row-major.
std::vector<float> read_floats(const TensorInfo& tensor);
/// All elements of an integer or boolean tensor. Throws std::invalid_argument for another type.
std::vector<int64_t> read_integers(const TensorInfo& tensor);

struct TensorHeader {
  std::string name;
  TensorType type = TensorType::f32;
  std::vector<int64_t> shape;
};

/// Writes a file tensor by tensor, so that a checkpoint larger than memory can be made: to
/// `path`.partial, renamed by finish(). Throws std::invalid_argument for bad headers or data that
/// do not fit them, std::runtime_error when the disk refuses.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorHeader> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  /// Removes the unfinished file.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// The next bytes of the data, in the order of the headers; calls may split tensors anywhere.
  void append(std::span<const std::byte> bytes);
  void finish();

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

/// A tensor in memory. `data` holds elements * element_bytes bytes.
struct TensorSource {
  TensorHeader header;
  const void* data = nullptr;
};
void write_safetensors(const std::filesystem::path& path, std::span<const TensorSource> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace replayeval
