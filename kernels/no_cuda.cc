// What the CUDA functions of this folder are without CUDA.
#include <stdexcept>

#include "kernels/gdn_cuda.h"
#include "kernels/mamba2_cuda.h"

namespace replayeval {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "cuda: this program was built without CUDA; ./dev build cuda, or device: cpu");
}

}  // namespace

void mamba2_advance_cuda(const Mamba2Layer&, std::span<StateRow>, std::span<const Mamba2Inputs>,
                         AdvanceMode, CudaStream) {
  refuse();
}
void mamba2_flush_cuda(const Mamba2Layer&, std::span<StateRow>, std::span<const Mamba2Inputs>,
                       CudaStream) {
  refuse();
}

void gdn_advance_cuda(const GdnLayer&, std::span<StateRow>, std::span<const GdnInputs>, AdvanceMode,
                      CudaStream) {
  refuse();
}
void gdn_flush_cuda(const GdnLayer&, std::span<StateRow>, std::span<const GdnInputs>, CudaStream) {
  refuse();
}

}  // namespace replayeval
