#include <stdexcept>

#include "quant/cuda_check.cuh"
#include "quant/cuda_support.h"

namespace replayeval {

void cuda_fail(cudaError_t error, const char* call, const char* file, int line) {
  cudaGetLastError();
  std::string message = std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                        cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) {
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
      message += " (" + std::to_string(free >> 20) + " of " + std::to_string(total >> 20) +
                 " MiB free); fewer states at a time need less";
    }
  }
  throw std::runtime_error(message);
}

bool cuda_available(std::string* reason) {
  const auto refuse = [reason](const std::string& why) {
    cudaGetLastError();
    if (reason) *reason = why;
    return false;
  };
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return refuse(std::string("no GPU: ") + cudaGetErrorString(error));
  if (count == 0) return refuse("no GPU");
  int device = 0, major = 0, minor = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major < 8) {
    return refuse("the GPU has compute capability " + std::to_string(major) + "." +
                  std::to_string(minor) + ", expected 8.0 or newer");
  }
  return true;
}

CudaDevice cuda_device() {
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  CudaDevice result;
  result.name = properties.name;
  result.capability = 10 * properties.major + properties.minor;
  result.multiprocessors = properties.multiProcessorCount;
  result.l2_bytes = static_cast<size_t>(properties.l2CacheSize);
  result.block_shared_bytes = properties.sharedMemPerBlockOptin;
  CUDA_CHECK(cudaMemGetInfo(&result.free_bytes, &result.memory_bytes));
  return result;
}

void* device_allocate(size_t bytes) {
  void* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, bytes > 0 ? bytes : 1));
  return memory;
}

void device_free(void* memory) noexcept {
  if (memory) cudaFree(memory);
}

void copy_to_device(void* to, const void* from, size_t bytes, CudaStream stream) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void copy_to_host(void* to, const void* from, size_t bytes, CudaStream stream) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void device_copy(void* to, const void* from, size_t bytes, CudaStream stream) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

void device_fill(void* to, int byte, size_t bytes, CudaStream stream) {
  CUDA_CHECK(cudaMemsetAsync(to, byte, bytes, stream));
}

void cuda_synchronize(CudaStream stream) { CUDA_CHECK(cudaStreamSynchronize(stream)); }

CudaTimer::CudaTimer() {
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  begin_ = begin;
  end_ = end;
}
CudaTimer::~CudaTimer() {
  cudaEventDestroy(static_cast<cudaEvent_t>(begin_));
  cudaEventDestroy(static_cast<cudaEvent_t>(end_));
}
void CudaTimer::start(CudaStream stream) {
  CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(begin_), stream));
}
double CudaTimer::stop(CudaStream stream) {
  CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(end_), stream));
  CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(end_)));
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin_),
                                  static_cast<cudaEvent_t>(end_)));
  return 1e-3 * static_cast<double>(milliseconds);
}

}  // namespace replayeval
