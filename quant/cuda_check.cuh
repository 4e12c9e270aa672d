// CUDA_CHECK, and the arguments of one call on their way to the device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace replayeval {

/// Throws std::runtime_error: `file:line: call: message`; for out of memory with what is free.
[[noreturn]] void cuda_fail(cudaError_t error, const char* call, const char* file, int line);

#define CUDA_CHECK(call)                                                    \
  do {                                                                      \
    const cudaError_t cuda_check_error = (call);                            \
    if (cuda_check_error != cudaSuccess)                                    \
      ::replayeval::cuda_fail(cuda_check_error, #call, __FILE__, __LINE__); \
  } while (false)

/// Largest dynamic shared memory of a block on the current device.
inline size_t block_shared_limit() {
  int device = 0, bytes = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return static_cast<size_t>(bytes);
}

/// Tables of one call: gathered on the host, sent in one copy, freed in stream order behind the
/// call's kernels.
class CallTables {
 public:
  explicit CallTables(cudaStream_t stream) : stream_(stream) {}
  CallTables(const CallTables&) = delete;
  CallTables& operator=(const CallTables&) = delete;
  ~CallTables() {
    if (device_) cudaFreeAsync(device_, stream_);
  }

  /// Adds a table; its address is known after `upload`.
  template <class T>
  size_t add(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    const size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + values.size_bytes());
    if (!values.empty()) std::memcpy(bytes_.data() + at, values.data(), values.size_bytes());
    return at;
  }
  /// Room on the device behind the tables, not initialised.
  size_t reserve(size_t bytes) {
    const size_t at = reserved_;
    reserved_ += (bytes + 255) / 256 * 256;
    return at;
  }
  void upload() {
    scratch_at_ = (bytes_.size() + 255) / 256 * 256;
    CUDA_CHECK(cudaMallocAsync(&device_, scratch_at_ + reserved_ + 16, stream_));
    CUDA_CHECK(
        cudaMemcpyAsync(device_, bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice, stream_));
  }
  template <class T>
  T* table(size_t at) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(device_) + at);
  }
  template <class T>
  T* scratch(size_t at) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(device_) + scratch_at_ + at);
  }

 private:
  cudaStream_t stream_;
  std::vector<std::byte> bytes_;
  size_t reserved_ = 0;
  size_t scratch_at_ = 0;
  void* device_ = nullptr;
};

}  // namespace replayeval
