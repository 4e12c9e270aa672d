// The CUDA runtime for plain C++: streams, whether there is a GPU, memory on it. Without CUDA every
// function but cuda_available throws std::runtime_error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct CUstream_st;

namespace replayeval {

/// The runtime's cudaStream_t; null is the default stream.
using CudaStream = CUstream_st*;

/// True with a CUDA build and a GPU of compute capability 8.0 or newer. `reason` (may be null) says
/// why not.
bool cuda_available(std::string* reason = nullptr);

/// The current device.
struct CudaDevice {
  std::string name;
  int capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  size_t memory_bytes = 0;
  size_t free_bytes = 0;
  size_t l2_bytes = 0;
  size_t block_shared_bytes = 0;  // largest dynamic shared memory of a block
};
CudaDevice cuda_device();

/// Bytes on the device. Throws std::runtime_error when there is not enough, naming what was asked
/// for and what is free.
void* device_allocate(size_t bytes);
void device_free(void* memory) noexcept;
void copy_to_device(void* to, const void* from, size_t bytes, CudaStream stream = nullptr);
/// Waits for the stream before it returns.
void copy_to_host(void* to, const void* from, size_t bytes, CudaStream stream = nullptr);
/// Within the device.
void device_copy(void* to, const void* from, size_t bytes, CudaStream stream = nullptr);
void device_fill(void* to, int byte, size_t bytes, CudaStream stream = nullptr);
/// Waits for the stream and throws the first error of the work in it.
void cuda_synchronize(CudaStream stream = nullptr);

/// An array of plain values on the device.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count)
      : data_(static_cast<T*>(device_allocate(count * sizeof(T)))), count_(count) {}
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { set(values); }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { device_free(data_); }
  T* data() const { return data_; }
  size_t size() const { return count_; }
  void set(const std::vector<T>& values) {
    copy_to_device(data_, values.data(), count_ * sizeof(T));
  }
  void fill(int byte) { device_fill(data_, byte, count_ * sizeof(T)); }
  std::vector<T> get() const {
    std::vector<T> values(count_);
    copy_to_host(values.data(), data_, count_ * sizeof(T));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

/// Times work in a stream with events of the device.
class CudaTimer {
 public:
  CudaTimer();
  ~CudaTimer();
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;
  void start(CudaStream stream = nullptr);
  /// Seconds since `start` once everything between them is done.
  double stop(CudaStream stream = nullptr);

 private:
  void* begin_ = nullptr;
  void* end_ = nullptr;
};

}  // namespace replayeval
