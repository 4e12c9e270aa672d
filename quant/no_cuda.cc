// What the CUDA functions of this folder are without CUDA.
#include <stdexcept>

#include "quant/quantize_cuda.h"

namespace replayeval {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "cuda: this program was built without CUDA; ./dev build cuda, or device: cpu");
}

}  // namespace

bool cuda_available(std::string* reason) {
  if (reason) *reason = "this program was built without CUDA";
  return false;
}
CudaDevice cuda_device() { refuse(); }
void* device_allocate(size_t) { refuse(); }
void device_free(void*) noexcept {}
void copy_to_device(void*, const void*, size_t, CudaStream) { refuse(); }
void copy_to_host(void*, const void*, size_t, CudaStream) { refuse(); }
void device_copy(void*, const void*, size_t, CudaStream) { refuse(); }
void device_fill(void*, int, size_t, CudaStream) { refuse(); }
void cuda_synchronize(CudaStream) { refuse(); }
CudaTimer::CudaTimer() { refuse(); }
CudaTimer::~CudaTimer() = default;
void CudaTimer::start(CudaStream) { refuse(); }
double CudaTimer::stop(CudaStream) { refuse(); }

void state_amax_cuda(const float*, int64_t, float*, CudaStream) { refuse(); }
void encode_heads_cuda(const StateCodec&, StateShape, std::span<const RandomKey>, const float*,
                       const float*, std::byte*, size_t, std::byte*, size_t, EncodeHealth*,
                       CudaStream) {
  refuse();
}
void decode_heads_cuda(const StateFormat&, StateShape, int, const std::byte*, size_t, float*,
                       CudaStream) {
  refuse();
}

}  // namespace replayeval
