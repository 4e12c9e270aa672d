#include "reports/hdf5_image.h"

#include <hdf5.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/hash.h"

namespace replayeval {
namespace {

constexpr std::string_view kChecksumMark = "replayeval-sha256:";
constexpr size_t kChecksumDigits = 64;
constexpr hsize_t kChunk = 16384;
constexpr unsigned kDeflateLevel = 4;
constexpr size_t kGrowth = size_t{64} << 10;  // bytes by which a file in memory grows

std::recursive_mutex& library_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

using Lock = std::lock_guard<std::recursive_mutex>;

/// Owns an identifier of any kind.
class Id {
 public:
  explicit Id(hid_t id) : id_(id) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Id& operator=(Id&&) = delete;
  ~Id() {
    if (id_ < 0) return;
    switch (H5Iget_type(id_)) {
      case H5I_FILE:
        H5Fclose(id_);
        break;
      case H5I_GROUP:
        H5Gclose(id_);
        break;
      case H5I_DATATYPE:
        H5Tclose(id_);
        break;
      case H5I_DATASPACE:
        H5Sclose(id_);
        break;
      case H5I_DATASET:
        H5Dclose(id_);
        break;
      case H5I_ATTR:
        H5Aclose(id_);
        break;
      default:
        H5Pclose(id_);
        break;
    }
  }
  operator hid_t() const { return id_; }

 private:
  hid_t id_;
};

void quiet() {
  static const bool done = [] {
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
    return true;
  }();
  (void)done;
}

[[noreturn]] void fail(const std::string& file, const std::string& object,
                       const std::string& what) {
  throw std::runtime_error(file + ": " + object + ": " + what);
}

template <class T>
Id type_of() {
  if constexpr (std::is_same_v<T, float>) return Id(H5Tcopy(H5T_IEEE_F32LE));
  if constexpr (std::is_same_v<T, double>) return Id(H5Tcopy(H5T_IEEE_F64LE));
  if constexpr (std::is_same_v<T, uint8_t>) return Id(H5Tcopy(H5T_STD_U8LE));
  if constexpr (std::is_same_v<T, int32_t>) return Id(H5Tcopy(H5T_STD_I32LE));
  if constexpr (std::is_same_v<T, uint32_t>) return Id(H5Tcopy(H5T_STD_U32LE));
  if constexpr (std::is_same_v<T, int64_t>) return Id(H5Tcopy(H5T_STD_I64LE));
  if constexpr (std::is_same_v<T, uint64_t>) return Id(H5Tcopy(H5T_STD_U64LE));
  if constexpr (std::is_same_v<T, std::string>) {
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, H5T_VARIABLE);
    H5Tset_cset(type, H5T_CSET_UTF8);
    return Id(type);
  }
  if constexpr (std::is_same_v<T, LayerHealth>) {
    hid_t type = H5Tcreate(H5T_COMPOUND, sizeof(LayerHealth));
    H5Tinsert(type, "elements", HOFFSET(LayerHealth, elements), H5T_NATIVE_UINT64);
    H5Tinsert(type, "non_finite", HOFFSET(LayerHealth, non_finite), H5T_NATIVE_UINT64);
    H5Tinsert(type, "saturated", HOFFSET(LayerHealth, saturated), H5T_NATIVE_UINT64);
    H5Tinsert(type, "clipped", HOFFSET(LayerHealth, clipped), H5T_NATIVE_UINT64);
    H5Tinsert(type, "vanished", HOFFSET(LayerHealth, vanished), H5T_NATIVE_UINT64);
    H5Tinsert(type, "first_non_finite_position", HOFFSET(LayerHealth, first_non_finite_position),
              H5T_NATIVE_INT64);
    H5Tinsert(type, "first_non_finite_head", HOFFSET(LayerHealth, first_non_finite_head),
              H5T_NATIVE_INT32);
    return Id(type);
  }
}

Id space_of(const std::vector<int64_t>& dims) {
  std::vector<hsize_t> sizes(dims.begin(), dims.end());
  return Id(H5Screate_simple(static_cast<int>(sizes.size()), sizes.data(), nullptr));
}

Id creating_groups() {
  Id list(H5Pcreate(H5P_LINK_CREATE));
  H5Pset_create_intermediate_group(list, 1);
  return list;
}

template <class T>
herr_t write_values(hid_t object, bool attribute, hid_t type, hid_t memory, hid_t file,
                    const T* data, size_t count) {
  const void* values = data;
  std::vector<const char*> pointers;
  if constexpr (std::is_same_v<T, std::string>) {
    for (size_t i = 0; i < count; ++i) pointers.push_back(data[i].c_str());
    values = pointers.data();
  }
  return attribute ? H5Awrite(object, type, values)
                   : H5Dwrite(object, type, memory, file, H5P_DEFAULT, values);
}

/// Reads `count` values through `read(type, buffer)`.
template <class T, class Read>
std::vector<T> read_values(hid_t object_type, hid_t space, size_t count, Read read, bool* good) {
  std::vector<T> values(count);
  Id type = type_of<T>();
  if constexpr (std::is_same_v<T, std::string>) {
    *good = H5Tis_variable_str(object_type) > 0;
    if (!*good) return {};
    std::vector<char*> pointers(count, nullptr);
    *good = read(type, pointers.data()) >= 0;
    for (size_t i = 0; *good && i < count; ++i)
      values[i] = pointers[i] == nullptr ? "" : pointers[i];
    if (*good) H5Dvlen_reclaim(type, space, H5P_DEFAULT, pointers.data());
  } else {
    *good = H5Tget_class(object_type) == H5Tget_class(type) && read(type, values.data()) >= 0;
  }
  return values;
}

}  // namespace

Hdf5Writer::Hdf5Writer(std::string file) : file_(std::move(file)) {
  Lock lock(library_mutex());
  quiet();
  static std::atomic<uint64_t> counter{0};
  Id access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_fapl_core(access, kGrowth, 0);
  H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
  // The core driver needs a name but no file; it must differ from that of every other open file.
  id_ = H5Fcreate(("replayeval-memory-" + std::to_string(counter++)).c_str(), H5F_ACC_TRUNC,
                  H5P_DEFAULT, access);
  if (id_ < 0) fail(file_, "/", "cannot be created in memory");
}

Hdf5Writer::~Hdf5Writer() {
  Lock lock(library_mutex());
  if (id_ >= 0) H5Fclose(id_);
}

void Hdf5Writer::group(const std::string& path) {
  Lock lock(library_mutex());
  Id links = creating_groups();
  Id made(H5Gcreate2(id_, path.c_str(), links, H5P_DEFAULT, H5P_DEFAULT));
  if (made < 0) fail(file_, path, "cannot be created");
}

template <class T>
void Hdf5Writer::dataset(const std::string& path, const std::vector<int64_t>& dims,
                         std::span<const T> data) {
  Lock lock(library_mutex());
  int64_t count = 1;
  for (int64_t d : dims) count *= d;
  if (count != static_cast<int64_t>(data.size())) {
    fail(file_, path,
         "has " + std::to_string(data.size()) + " values, expected " + std::to_string(count));
  }
  Id type = type_of<T>();
  Id space = space_of(dims);
  Id links = creating_groups();
  Id creation(H5Pcreate(H5P_DATASET_CREATE));
  H5Pset_obj_track_times(creation, false);  // equal content, equal bytes
  if (count > 1 && !std::is_same_v<T, std::string>) {
    // Chunks of about kChunk elements along the trailing dimensions.
    std::vector<hsize_t> chunk(dims.begin(), dims.end());
    hsize_t left = kChunk;
    for (size_t i = chunk.size(); i-- > 0;) {
      chunk[i] = std::max<hsize_t>(1, std::min(chunk[i], left));
      left = std::max<hsize_t>(1, left / chunk[i]);
    }
    H5Pset_chunk(creation, static_cast<int>(chunk.size()), chunk.data());
    H5Pset_shuffle(creation);
    H5Pset_deflate(creation, kDeflateLevel);
  }
  Id stored(H5Tcopy(type));
  if (std::is_same_v<T, LayerHealth>) H5Tpack(stored);
  Id set(H5Dcreate2(id_, path.c_str(), stored, space, links, creation, H5P_DEFAULT));
  if (set < 0 || (count > 0 &&
                  write_values(set, false, type, H5S_ALL, H5S_ALL, data.data(), data.size()) < 0)) {
    fail(file_, path, "cannot be written");
  }
}

template <class T>
void Hdf5Writer::table(const std::string& path, int64_t rows, int64_t columns, T fill) {
  Lock lock(library_mutex());
  Id type = type_of<T>();
  Id space = space_of({rows, columns});
  Id links = creating_groups();
  Id creation(H5Pcreate(H5P_DATASET_CREATE));
  H5Pset_obj_track_times(creation, false);  // equal content, equal bytes
  hsize_t chunk[2] = {1, std::max<hsize_t>(1, std::min(static_cast<hsize_t>(columns), kChunk))};
  H5Pset_chunk(creation, 2, chunk);
  H5Pset_shuffle(creation);
  H5Pset_deflate(creation, kDeflateLevel);
  H5Pset_fill_value(creation, type, &fill);
  Id set(H5Dcreate2(id_, path.c_str(), type, space, links, creation, H5P_DEFAULT));
  if (set < 0) fail(file_, path, "cannot be created");
}

template <class T>
void Hdf5Writer::write_row(const std::string& path, int64_t row, std::span<const T> data) {
  if (data.empty()) return;
  Lock lock(library_mutex());
  Id set(H5Dopen2(id_, path.c_str(), H5P_DEFAULT));
  Id file_space(H5Dget_space(set));
  hsize_t start[2] = {static_cast<hsize_t>(row), 0};
  hsize_t count[2] = {1, data.size()};
  Id memory(H5Screate_simple(2, count, nullptr));
  Id type = type_of<T>();
  if (H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start, nullptr, count, nullptr) < 0 ||
      H5Dwrite(set, type, memory, file_space, H5P_DEFAULT, data.data()) < 0) {
    fail(file_, path, "row " + std::to_string(row) + " cannot be written");
  }
}

template <class T>
void Hdf5Writer::attribute(const std::string& path, const std::string& name, const T& value) {
  Lock lock(library_mutex());
  Id object(H5Oopen(id_, path.c_str(), H5P_DEFAULT));
  Id space(H5Screate(H5S_SCALAR));
  Id type = type_of<T>();
  Id made(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT));
  if (made < 0 || write_values(made, true, type, 0, 0, &value, 1) < 0)
    fail(file_, path + "@" + name, "cannot be written");
}

template <class T>
void Hdf5Writer::attribute_list(const std::string& path, const std::string& name,
                                std::span<const T> values) {
  Lock lock(library_mutex());
  Id object(H5Oopen(id_, path.c_str(), H5P_DEFAULT));
  Id space = space_of({static_cast<int64_t>(values.size())});
  Id type = type_of<T>();
  Id made(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT));
  if (made < 0 ||
      (!values.empty() && write_values(made, true, type, 0, 0, values.data(), values.size()) < 0)) {
    fail(file_, path + "@" + name, "cannot be written");
  }
}

std::vector<std::byte> Hdf5Writer::finish() {
  Lock lock(library_mutex());
  H5Fflush(id_, H5F_SCOPE_LOCAL);
  ssize_t size = H5Fget_file_image(id_, nullptr, 0);
  std::vector<std::byte> bytes(size > 0 ? static_cast<size_t>(size) : 0);
  if (size <= 0 || H5Fget_file_image(id_, bytes.data(), bytes.size()) != size)
    fail(file_, "/", "has no file image");
  H5Fclose(id_);
  id_ = -1;
  return bytes;
}

Hdf5Reader::Hdf5Reader(std::string file, std::span<const std::byte> bytes)
    : file_(std::move(file)) {
  Lock lock(library_mutex());
  quiet();
  static std::atomic<uint64_t> counter{0};
  Id access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_fapl_core(access, kGrowth, 0);
  H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
  // The library copies the image; it does not write to it.
  H5Pset_file_image(access, const_cast<std::byte*>(bytes.data()), bytes.size());
  id_ = H5Fopen(("replayeval-image-" + std::to_string(counter++)).c_str(), H5F_ACC_RDONLY, access);
  if (id_ < 0) throw std::runtime_error(file_ + ": is no HDF5 file, or a broken one");
}

Hdf5Reader::~Hdf5Reader() {
  Lock lock(library_mutex());
  if (id_ >= 0) H5Fclose(id_);
}

bool Hdf5Reader::has(const std::string& path) const {
  Lock lock(library_mutex());
  size_t start = 1;
  while (start < path.size()) {
    size_t end = std::min(path.find('/', start), path.size());
    if (H5Lexists(id_, path.substr(0, end).c_str(), H5P_DEFAULT) <= 0) return false;
    start = end + 1;
  }
  return true;
}

bool Hdf5Reader::has_attribute(const std::string& path, const std::string& name) const {
  Lock lock(library_mutex());
  return has(path) && H5Aexists_by_name(id_, path.c_str(), name.c_str(), H5P_DEFAULT) > 0;
}

std::vector<std::string> Hdf5Reader::members(const std::string& group) const {
  Lock lock(library_mutex());
  std::vector<std::string> names;
  Id id(H5Gopen2(id_, group.c_str(), H5P_DEFAULT));
  if (id < 0) fail(file_, group, "is missing");
  H5Literate(
      id, H5_INDEX_NAME, H5_ITER_INC, nullptr,
      [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
        static_cast<std::vector<std::string>*>(out)->emplace_back(name);
        return 0;
      },
      &names);
  return names;
}

std::vector<int64_t> Hdf5Reader::dims(const std::string& path) const {
  Lock lock(library_mutex());
  Id set(H5Dopen2(id_, path.c_str(), H5P_DEFAULT));
  if (set < 0) fail(file_, path, "is missing");
  Id space(H5Dget_space(set));
  std::vector<hsize_t> sizes(static_cast<size_t>(std::max(0, H5Sget_simple_extent_ndims(space))));
  H5Sget_simple_extent_dims(space, sizes.data(), nullptr);
  return {sizes.begin(), sizes.end()};
}

template <class T>
std::vector<T> Hdf5Reader::dataset(const std::string& path) const {
  Lock lock(library_mutex());
  Id set(H5Dopen2(id_, path.c_str(), H5P_DEFAULT));
  if (set < 0) fail(file_, path, "is missing");
  Id space(H5Dget_space(set));
  Id type(H5Dget_type(set));
  hssize_t count = H5Sget_simple_extent_npoints(space);
  bool good = count >= 0;
  std::vector<T> values;
  if (count > 0) {
    values = read_values<T>(
        type, space, static_cast<size_t>(count),
        [&](hid_t memory, void* out) {
          return H5Dread(set, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, out);
        },
        &good);
  }
  if (!good) fail(file_, path, "cannot be read");
  return values;
}

template <class T>
std::vector<T> Hdf5Reader::row(const std::string& path, int64_t row, int64_t count) const {
  std::vector<T> values(static_cast<size_t>(count));
  if (count == 0) return values;
  Lock lock(library_mutex());
  Id set(H5Dopen2(id_, path.c_str(), H5P_DEFAULT));
  if (set < 0) fail(file_, path, "is missing");
  Id file_space(H5Dget_space(set));
  hsize_t start[2] = {static_cast<hsize_t>(row), 0};
  hsize_t size[2] = {1, static_cast<hsize_t>(count)};
  Id memory(H5Screate_simple(2, size, nullptr));
  Id type = type_of<T>();
  if (H5Sget_simple_extent_ndims(file_space) != 2 ||
      H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start, nullptr, size, nullptr) < 0 ||
      H5Dread(set, type, memory, file_space, H5P_DEFAULT, values.data()) < 0) {
    fail(file_, path, "row " + std::to_string(row) + " cannot be read");
  }
  return values;
}

template <class T>
T Hdf5Reader::attribute(const std::string& path, const std::string& name) const {
  std::vector<T> values = attribute_list<T>(path, name);
  if (values.size() != 1)
    fail(file_, path + "@" + name, "has " + std::to_string(values.size()) + " values, expected 1");
  return values.front();
}

template <class T>
std::vector<T> Hdf5Reader::attribute_list(const std::string& path, const std::string& name) const {
  Lock lock(library_mutex());
  Id object(H5Aopen_by_name(id_, path.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT));
  if (object < 0) fail(file_, path + "@" + name, "is missing");
  Id space(H5Aget_space(object));
  Id type(H5Aget_type(object));
  hssize_t count = H5Sget_simple_extent_npoints(space);
  bool good = count >= 0;
  std::vector<T> values;
  if (count > 0) {
    values = read_values<T>(
        type, space, static_cast<size_t>(count),
        [&](hid_t memory, void* out) { return H5Aread(object, memory, out); }, &good);
  }
  if (!good) fail(file_, path + "@" + name, "cannot be read");
  return values;
}

#define REPLAYEVAL_HDF5_TYPE(T)                                                          \
  template void Hdf5Writer::dataset(const std::string&, const std::vector<int64_t>&,     \
                                    std::span<const T>);                                 \
  template void Hdf5Writer::attribute(const std::string&, const std::string&, const T&); \
  template void Hdf5Writer::attribute_list(const std::string&, const std::string&,       \
                                           std::span<const T>);                          \
  template std::vector<T> Hdf5Reader::dataset(const std::string&) const;                 \
  template T Hdf5Reader::attribute(const std::string&, const std::string&) const;        \
  template std::vector<T> Hdf5Reader::attribute_list(const std::string&, const std::string&) const;
#define REPLAYEVAL_HDF5_TABLE(T)                                                        \
  template void Hdf5Writer::table(const std::string&, int64_t, int64_t, T);             \
  template void Hdf5Writer::write_row(const std::string&, int64_t, std::span<const T>); \
  template std::vector<T> Hdf5Reader::row(const std::string&, int64_t, int64_t) const;
REPLAYEVAL_HDF5_TYPE(float)
REPLAYEVAL_HDF5_TYPE(double)
REPLAYEVAL_HDF5_TYPE(uint8_t)
REPLAYEVAL_HDF5_TYPE(int32_t)
REPLAYEVAL_HDF5_TYPE(uint32_t)
REPLAYEVAL_HDF5_TYPE(int64_t)
REPLAYEVAL_HDF5_TYPE(uint64_t)
REPLAYEVAL_HDF5_TYPE(std::string)
REPLAYEVAL_HDF5_TYPE(LayerHealth)
REPLAYEVAL_HDF5_TABLE(float)
REPLAYEVAL_HDF5_TABLE(uint8_t)
REPLAYEVAL_HDF5_TABLE(int32_t)
REPLAYEVAL_HDF5_TABLE(int64_t)

void checksum_placeholder(Hdf5Writer& writer) {
  writer.attribute("/", "checksum", std::string(kChecksumMark) + std::string(kChecksumDigits, '0'));
}

namespace {

/// Offset of the digits behind the first mark, npos when there is none. The attribute is written
/// before any text of a run, which may hold the mark as well.
size_t find_digits(std::string_view text) {
  size_t at = text.find(kChecksumMark);
  if (at == std::string_view::npos) return at;
  at += kChecksumMark.size();
  return at + kChecksumDigits <= text.size() ? at : std::string_view::npos;
}

std::string_view view(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

void seal_checksum(std::vector<std::byte>& bytes) {
  size_t at = find_digits(view(bytes));
  if (at == std::string_view::npos ||
      view(bytes).substr(at, kChecksumDigits) != std::string(kChecksumDigits, '0'))
    throw std::logic_error("seal_checksum: the placeholder is not there, or not first");
  std::string digest = sha256_hex(view(bytes));
  std::memcpy(bytes.data() + at, digest.data(), kChecksumDigits);
}

std::string check_checksum(std::span<const std::byte> bytes) {
  size_t at = find_digits(view(bytes));
  if (at == std::string_view::npos) return "holds no checksum (truncated, or not one of our files)";
  std::string copy(view(bytes));
  std::string stored = copy.substr(at, kChecksumDigits);
  std::fill_n(copy.begin() + static_cast<std::ptrdiff_t>(at), kChecksumDigits, '0');
  std::string digest = sha256_hex(copy);
  if (digest != stored)
    return "checksum is " + digest.substr(0, 12) + "..., expected " + stored.substr(0, 12) + "...";
  return {};
}

}  // namespace replayeval
