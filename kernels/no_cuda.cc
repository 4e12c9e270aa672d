// What the CUDA functions of this folder are without CUDA.
#include <stdexcept>

#include "kernels/causal_conv_cuda.h"
#include "kernels/decode_cuda.h"
#include "kernels/gdn_cuda.h"
#include "kernels/gpu_timing.h"
#include "kernels/kl_cuda.h"
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

void causal_conv_cuda(const CausalConv&, std::span<const CausalConvRow>, CudaStream) { refuse(); }
void kl_begin_cuda(KlSums*, int64_t, CudaStream) { refuse(); }
void kl_add_cuda(const KlSlice&, KlSums*, CudaStream) { refuse(); }
void kl_finish_cuda(const KlSums*, int64_t, double*, double*, double*, uint8_t*, CudaStream) {
  refuse();
}

void mamba2_decode_cuda(const Mamba2Layer&, const HeadPlan&, const DecodeRows&, const DecodeStates&,
                        const Mamba2DecodeStep&, CudaStream) {
  refuse();
}
void gdn_decode_cuda(const GdnLayer&, const HeadPlan&, const DecodeRows&, const DecodeStates&,
                     const GdnDecodeStep&, CudaStream) {
  refuse();
}
void decode_step_cuda(const DecodeRows&, int, CudaStream) { refuse(); }

DeviceRates measure_device_rates(size_t) { refuse(); }
DecodeTiming time_decode(const DecodeWorkload&) { refuse(); }
double time_chunk(const ChunkWorkload&) { refuse(); }
double time_kl(int64_t, int, int64_t, int) { refuse(); }

}  // namespace replayeval
