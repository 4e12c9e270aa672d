#include "models/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "quant/codec.h"

static_assert(std::endian::native == std::endian::little, "safetensors data are little-endian");

namespace replayeval {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr int kMaxHeaderDepth = 8;

struct TypeRow {
  TensorType type;
  std::string_view name;
  size_t bytes;
};
constexpr TypeRow kTypes[] = {
    {TensorType::f64, "F64", 8},         {TensorType::f32, "F32", 4},
    {TensorType::f16, "F16", 2},         {TensorType::bf16, "BF16", 2},
    {TensorType::f8_e4m3, "F8_E4M3", 1}, {TensorType::f8_e5m2, "F8_E5M2", 1},
    {TensorType::i64, "I64", 8},         {TensorType::i32, "I32", 4},
    {TensorType::i16, "I16", 2},         {TensorType::i8, "I8", 1},
    {TensorType::u8, "U8", 1},           {TensorType::boolean, "BOOL", 1},
};

TensorType type_of(std::string_view name) {
  for (const TypeRow& row : kTypes) {
    if (row.name == name) return row.type;
  }
  return TensorType::other;
}

/// Product of a shape, nothing when it overflows or a dimension is negative.
std::optional<int64_t> product(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (int64_t d : shape) {
    if (d < 0 || __builtin_mul_overflow(count, d, &count)) return std::nullopt;
  }
  return count;
}

[[noreturn]] void fail(const fs::path& file, const std::string& what) {
  throw std::runtime_error(file.string() + ": " + what);
}

std::string system_error() { return std::strerror(errno); }

/// A read-only mapping of a whole file.
class Mapping {
 public:
  explicit Mapping(const fs::path& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) fail(path, "cannot be opened: " + system_error());
    struct stat status {};
    if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(descriptor);
      fail(path, "expected a regular file");
    }
    size_ = static_cast<size_t>(status.st_size);
    if (size_ > 0) {
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
    }
    const std::string error = system_error();
    ::close(descriptor);
    if (data_ == MAP_FAILED) {
      data_ = nullptr;
      fail(path, "cannot be mapped: " + error);
    }
  }
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&&) = delete;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

std::optional<int64_t> whole(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t x = value.get<uint64_t>();
  if (x > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(x);
}

/// Names and JSON values come from the file: shortened for messages, without control characters.
std::string printable(std::string text) {
  if (text.size() > 120) text = text.substr(0, 117) + "...";
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return text;
}

std::string printed(const Json& value) {
  return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

/// Reads one file's header into `tensors`; data pointers stay within the mapping.
Shard read_header(const fs::path& path, std::span<const std::byte> file, int shard,
                  std::vector<TensorInfo>& tensors) {
  if (file.size() < 8) {
    fail(path, "expected a safetensors file (8 bytes of header length first), got " +
                   std::to_string(file.size()) + " bytes");
  }
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const uint64_t available = file.size() - 8;
  if (length > available) {
    fail(path, "header: expected a length of at most " + std::to_string(available) +
                   " bytes (what the file holds), got " + std::to_string(length) +
                   "; the file is truncated or is not safetensors");
  }
  Shard out;
  out.path = path;
  out.file = file;
  out.header = file.first(8 + length);
  const std::span<const std::byte> data = file.subspan(8 + length);

  std::set<std::string> names;
  const Json::parser_callback_t watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxHeaderDepth) fail(path, "header: nested too deeply");
    if (event == Json::parse_event_t::key && depth == 1 &&
        !names.insert(value.get<std::string>()).second) {
      fail(path, "tensor " + printable(value.get<std::string>()) +
                     ": expected once in the header, got it twice");
    }
    return true;
  };
  Json header;
  try {
    const char* text = reinterpret_cast<const char*>(file.data()) + 8;
    header = Json::parse(text, text + length, watch);
  } catch (const Json::exception& e) {
    fail(path, std::string("header: expected JSON, got ") + printable(e.what()));
  }
  if (!header.is_object()) fail(path, "header: expected a JSON object, got " + printed(header));

  struct Range {
    int64_t begin, end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) continue;
      for (const auto& [key, value] : entry.items()) {
        if (value.is_string()) out.metadata.emplace(key, value.get<std::string>());
      }
      continue;
    }
    const std::string place = "tensor " + printable(name) + ": ";
    if (!entry.is_object()) fail(path, place + "expected an object, got " + printed(entry));
    TensorInfo tensor;
    tensor.name = name;
    tensor.shard = shard;
    const auto dtype = entry.find("dtype");
    if (dtype == entry.end() || !dtype->is_string()) {
      fail(path, place + "dtype: expected a string, got " +
                     (dtype == entry.end() ? "nothing" : printed(*dtype)));
    }
    tensor.type_name = dtype->get<std::string>();
    tensor.type = type_of(tensor.type_name);
    const auto shape = entry.find("shape");
    if (shape == entry.end() || !shape->is_array()) {
      fail(path, place + "shape: expected a list, got " +
                     (shape == entry.end() ? "nothing" : printed(*shape)));
    }
    for (const Json& d : *shape) {
      const std::optional<int64_t> x = whole(d);
      if (!x) fail(path, place + "shape: expected sizes, got " + printed(*shape));
      tensor.shape.push_back(*x);
    }
    const auto offsets = entry.find("data_offsets");
    if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2) {
      fail(path, place + "data_offsets: expected [begin, end], got " +
                     (offsets == entry.end() ? "nothing" : printed(*offsets)));
    }
    const std::optional<int64_t> begin = whole((*offsets)[0]);
    const std::optional<int64_t> end = whole((*offsets)[1]);
    if (!begin || !end || *begin > *end) {
      fail(path, place + "data_offsets: expected 0 <= begin <= end, got " + printed(*offsets));
    }
    if (static_cast<uint64_t>(*end) > data.size()) {
      fail(path, place + "expected data up to byte " + std::to_string(*end) + ", got a file with " +
                     std::to_string(data.size()) +
                     " bytes of data; it is truncated, download it again");
    }
    const std::optional<int64_t> count = product(tensor.shape);
    if (!count) fail(path, place + "shape: expected fewer elements, got " + printed(*shape));
    if (tensor.type != TensorType::other) {
      int64_t bytes = 0;
      const auto size = static_cast<int64_t>(element_bytes(tensor.type));
      if (__builtin_mul_overflow(*count, size, &bytes) || bytes != *end - *begin) {
        fail(path, place + "expected " + std::to_string(*count) + " elements of " +
                       tensor.type_name + " for shape " + printed(*shape) + ", got " +
                       std::to_string(*end - *begin) + " bytes");
      }
    }
    tensor.data = data.data() + *begin;
    tensor.bytes = static_cast<size_t>(*end - *begin);
    tensors.push_back(std::move(tensor));
    ranges.push_back({*begin, *end, &name});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t covered = 0;
  for (const Range& range : ranges) {
    if (range.begin != covered) {
      fail(path, "tensor " + printable(*range.name) + ": expected data that begin at byte " +
                     std::to_string(covered) + ", where the tensor before ends, got " +
                     std::to_string(range.begin) + (range.begin < covered ? "; they overlap" : ""));
    }
    covered = range.end;
  }
  if (static_cast<uint64_t>(covered) != data.size()) {
    fail(path, "expected " + std::to_string(covered) + " bytes of data after the header, got " +
                   std::to_string(data.size()));
  }
  return out;
}

}  // namespace

size_t element_bytes(TensorType type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row.bytes;
  }
  return 0;
}

std::string_view name_of(TensorType type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row.name;
  }
  return "other";
}

int64_t TensorInfo::elements() const { return product(shape).value_or(0); }

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

struct Safetensors::Implementation {
  fs::path path;
  std::vector<Mapping> mappings;
  std::vector<Shard> shards;
  std::vector<TensorInfo> tensors;

  std::vector<TensorInfo> map(const fs::path& file) {
    std::vector<TensorInfo> found;
    mappings.emplace_back(file);
    shards.push_back(
        read_header(file, mappings.back().bytes(), static_cast<int>(shards.size()), found));
    return found;
  }

  void read_index(const fs::path& index) {
    std::ifstream stream(index, std::ios::binary);
    if (!stream) fail(index, "cannot be opened: " + system_error());
    const std::string text{std::istreambuf_iterator<char>(stream),
                           std::istreambuf_iterator<char>()};
    // The callback only limits the depth; a name given twice would go to the last shard, as in the
    // library.
    const Json::parser_callback_t limit = [&](int depth, Json::parse_event_t, Json&) {
      if (depth > kMaxHeaderDepth) fail(index, "nested too deeply");
      return true;
    };
    Json root;
    try {
      root = Json::parse(text, limit);
    } catch (const Json::exception& e) {
      fail(index, std::string("expected JSON, got ") + printable(e.what()));
    }
    const auto where = root.is_object() ? root.find("weight_map") : root.end();
    if (!root.is_object() || where == root.end() || !where->is_object()) {
      fail(index, "weight_map: expected an object {tensor: shard file}, got " +
                      (root.is_object() && where != root.end() ? printed(*where) : "nothing"));
    }
    std::map<std::string, std::vector<std::string>> names_of;
    for (const auto& [name, file] : where->items()) {
      if (!file.is_string()) {
        fail(index, "weight_map: tensor " + printable(name) + ": expected a file name, got " +
                        printed(file));
      }
      names_of[file.get<std::string>()].push_back(name);
    }
    for (const auto& [file, names] : names_of) {
      const fs::path relative(file);
      if (file.empty() || relative.is_absolute() ||
          std::any_of(relative.begin(), relative.end(),
                      [](const fs::path& p) { return p == ".."; })) {
        fail(index, "weight_map: expected a file beside the index, got " + printable(file));
      }
      const fs::path shard = index.parent_path() / relative;
      std::error_code error;
      if (!fs::exists(shard, error)) {
        fail(index, "weight_map: tensor " + printable(names.front()) + ": expected the shard " +
                        printable(file) + " beside the index, got no such file; download it again");
      }
      std::vector<TensorInfo> found = map(shard);
      for (const std::string& name : names) {
        // A header's tensors come in the order of their names.
        const auto tensor =
            std::lower_bound(found.begin(), found.end(), name,
                             [](const TensorInfo& t, const std::string& n) { return t.name < n; });
        if (tensor == found.end() || tensor->name != name) {
          fail(index, "weight_map: tensor " + printable(name) + ": expected in " + printable(file) +
                          ", got a shard without it");
        }
        tensors.push_back(*tensor);
      }
    }
  }
};

Safetensors::Safetensors(std::unique_ptr<Implementation> implementation)
    : implementation_(std::move(implementation)) {}
Safetensors::Safetensors(Safetensors&&) noexcept = default;
Safetensors& Safetensors::operator=(Safetensors&&) noexcept = default;
Safetensors::~Safetensors() = default;

Safetensors Safetensors::open(const fs::path& path) {
  auto files = std::make_unique<Implementation>();
  files->path = path;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    const fs::path single = path / "model.safetensors";
    const fs::path index = path / "model.safetensors.index.json";
    if (fs::exists(single, error)) {
      files->tensors = files->map(single);
    } else if (fs::exists(index, error)) {
      files->read_index(index);
    } else {
      std::string got = "neither";
      if (fs::is_symlink(single, error) || fs::is_symlink(index, error)) {
        got = "a link that leads nowhere (an unfinished download)";
      } else if (fs::exists(path / "pytorch_model.bin", error) ||
                 fs::exists(path / "pytorch_model.bin.index.json", error)) {
        got = "pytorch_model.bin; save it again as safetensors";
      }
      fail(path, "expected model.safetensors or model.safetensors.index.json, got " + got);
    }
  } else if (path.extension() == ".json") {
    files->read_index(path);
  } else {
    files->tensors = files->map(path);
  }
  std::sort(files->tensors.begin(), files->tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  return Safetensors(std::move(files));
}

std::span<const TensorInfo> Safetensors::tensors() const { return implementation_->tensors; }
std::span<const Shard> Safetensors::shards() const { return implementation_->shards; }
const fs::path& Safetensors::path() const { return implementation_->path; }

const TensorInfo* Safetensors::find(std::string_view name) const {
  const std::vector<TensorInfo>& all = implementation_->tensors;
  const auto at =
      std::lower_bound(all.begin(), all.end(), name,
                       [](const TensorInfo& t, std::string_view n) { return t.name < n; });
  return at == all.end() || at->name != name ? nullptr : &*at;
}

const TensorInfo& Safetensors::at(std::string_view name) const {
  const TensorInfo* tensor = find(name);
  if (tensor == nullptr) {
    fail(path(), "tensor " + std::string(name) + ": expected in the file, got " +
                     std::to_string(tensors().size()) + " tensors without it");
  }
  return *tensor;
}

void Safetensors::drop_pages(const TensorInfo& tensor) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(tensor.data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(tensor.data) + tensor.bytes) / page * page;
  // Advice only: a refusal changes nothing.
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

namespace {

template <class T>
T load(const std::byte* data, int64_t i) {
  T value;
  std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

/// The values of all codes of a format.
template <FloatFormat kFormat>
const std::vector<float>& table() {
  static const std::vector<float> values = [] {
    std::vector<float> v(size_t{1} << kFormat.bits());
    for (size_t i = 0; i < v.size(); ++i) v[i] = decode_float(kFormat, static_cast<uint32_t>(i));
    return v;
  }();
  return values;
}

template <class T>
void convert(const std::byte* data, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(load<T>(data, i));
}

template <class T>
void look_up(const std::vector<float>& values, const std::byte* data, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = values[load<T>(data, i)];
}

}  // namespace

void widen_to_floats(TensorType type, const std::byte* data, int64_t count, float* out) {
  switch (type) {
    case TensorType::f64:
      return convert<double>(data, count, out);
    case TensorType::f32:
      if (count > 0) std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
      return;
    case TensorType::f16:
      return look_up<uint16_t>(table<kFp16>(), data, count, out);
    case TensorType::bf16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(data, i)) << 16);
      }
      return;
    case TensorType::f8_e4m3:
      return look_up<uint8_t>(table<kE4m3>(), data, count, out);
    case TensorType::f8_e5m2:
      return look_up<uint8_t>(table<kE5m2>(), data, count, out);
    case TensorType::i64:
      return convert<int64_t>(data, count, out);
    case TensorType::i32:
      return convert<int32_t>(data, count, out);
    case TensorType::i16:
      return convert<int16_t>(data, count, out);
    case TensorType::i8:
      return convert<int8_t>(data, count, out);
    case TensorType::u8:
    case TensorType::boolean:
      return convert<uint8_t>(data, count, out);
    case TensorType::other:
      break;
  }
  throw std::invalid_argument(
      "safetensors: a tensor of an unknown dtype cannot be widened to FP32");
}

std::vector<float> read_floats(const TensorInfo& tensor) {
  if (tensor.type == TensorType::other) {
    throw std::invalid_argument("tensor " + tensor.name + ": expected a known dtype, got " +
                                printable(tensor.type_name));
  }
  std::vector<float> out(static_cast<size_t>(tensor.elements()));
  widen_to_floats(tensor.type, tensor.data, tensor.elements(), out.data());
  return out;
}

std::vector<int64_t> read_integers(const TensorInfo& tensor) {
  std::vector<int64_t> out(static_cast<size_t>(tensor.elements()));
  for (size_t i = 0; i < out.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    switch (tensor.type) {
      case TensorType::i64:
        out[i] = load<int64_t>(tensor.data, at);
        break;
      case TensorType::i32:
        out[i] = load<int32_t>(tensor.data, at);
        break;
      case TensorType::i16:
        out[i] = load<int16_t>(tensor.data, at);
        break;
      case TensorType::i8:
        out[i] = load<int8_t>(tensor.data, at);
        break;
      case TensorType::u8:
      case TensorType::boolean:
        out[i] = load<uint8_t>(tensor.data, at);
        break;
      default:
        throw std::invalid_argument("tensor " + tensor.name + ": expected an integer dtype, got " +
                                    printable(tensor.type_name));
    }
  }
  return out;
}

struct SafetensorsWriter::Implementation {
  fs::path path, partial;
  std::FILE* file = nullptr;
  uint64_t expected = 0, written = 0;

  void write(const void* bytes, size_t size) {
    if (size > 0 && std::fwrite(bytes, 1, size, file) != size) {
      fail(partial, "cannot be written: " + system_error());
    }
  }
};

SafetensorsWriter::SafetensorsWriter(const fs::path& path, std::vector<TensorHeader> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : implementation_(std::make_unique<Implementation>()) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const TensorHeader& tensor : tensors) {
    const std::optional<int64_t> count = product(tensor.shape);
    const size_t size = element_bytes(tensor.type);
    if (!count || size == 0 || tensor.name == "__metadata__" || header.contains(tensor.name)) {
      throw std::invalid_argument(path.string() + ": tensor " + tensor.name +
                                  ": expected a new name, a known dtype and a shape, got " +
                                  std::string(name_of(tensor.type)) + " " +
                                  shape_text(tensor.shape));
    }
    const uint64_t end = offset + static_cast<uint64_t>(*count) * size;
    header[tensor.name] = {
        {"dtype", name_of(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  implementation_->path = path;
  implementation_->partial = path;
  implementation_->partial += ".partial";
  implementation_->expected = offset;
  implementation_->file = std::fopen(implementation_->partial.c_str(), "wb");
  if (implementation_->file == nullptr) fail(path, "cannot be written: " + system_error());
  const uint64_t length = text.size();
  try {
    implementation_->write(&length, 8);
    implementation_->write(text.data(), text.size());
  } catch (...) {
    std::fclose(implementation_->file);
    std::error_code error;
    fs::remove(implementation_->partial, error);
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (implementation_->file == nullptr) return;
  std::fclose(implementation_->file);
  std::error_code error;
  fs::remove(implementation_->partial, error);
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  Implementation& out = *implementation_;
  if (bytes.size() > out.expected - out.written) {
    throw std::invalid_argument(out.path.string() + ": expected " + std::to_string(out.expected) +
                                " bytes of data, got more");
  }
  out.write(bytes.data(), bytes.size());
  out.written += bytes.size();
}

void SafetensorsWriter::finish() {
  Implementation& out = *implementation_;
  if (out.written != out.expected) {
    throw std::invalid_argument(out.path.string() + ": expected " + std::to_string(out.expected) +
                                " bytes of data, got " + std::to_string(out.written));
  }
  const bool flushed = std::fflush(out.file) == 0;
  const std::string error = system_error();
  if (!flushed) fail(out.partial, "cannot be written: " + error);
  std::fclose(std::exchange(out.file, nullptr));
  fs::rename(out.partial, out.path);
}

void write_safetensors(const fs::path& path, std::span<const TensorSource> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorHeader> headers;
  for (const TensorSource& tensor : tensors) headers.push_back(tensor.header);
  SafetensorsWriter writer(path, headers, metadata);
  for (const TensorSource& tensor : tensors) {
    const auto count = static_cast<size_t>(product(tensor.header.shape).value_or(0));
    writer.append(
        {static_cast<const std::byte*>(tensor.data), count * element_bytes(tensor.header.type)});
  }
  writer.finish();
}

}  // namespace replayeval
