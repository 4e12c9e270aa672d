// What the CUDA functions of this folder are without CUDA.
#include <stdexcept>

#include "kernels/attention_cuda.h"
#include "kernels/attention_merge_cuda.h"
#include "kernels/causal_conv_cuda.h"
#include "kernels/decode_cuda.h"
#include "kernels/decode_inputs_cuda.h"
#include "kernels/dense_cuda.h"
#include "kernels/elementwise_cuda.h"
#include "kernels/gdn_cuda.h"
#include "kernels/gpu_timing.h"
#include "kernels/kl_cuda.h"
#include "kernels/mamba2_cuda.h"
#include "kernels/paged_attention_cuda.h"

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
CapturedSteps::CapturedSteps(const std::function<void(CudaStream)>&) { refuse(); }
CapturedSteps::~CapturedSteps() = default;
void CapturedSteps::run(CudaStream) const { refuse(); }

void rms_norm_cuda(const RmsNorm&, const float*, int64_t, const float*, int64_t, float*, int64_t,
                   int64_t, int64_t, CudaStream) {
  refuse();
}
void activate_cuda(Activation, const float*, int64_t, const float*, float*, int64_t, int64_t,
                   int64_t, WeightType, CudaStream) {
  refuse();
}
void activate_multiply_cuda(Activation, const float*, int64_t, float, const float*, int64_t, float*,
                            int64_t, int64_t, int64_t, WeightType, CudaStream) {
  refuse();
}
void add_scaled_cuda(float*, int64_t, const float*, int64_t, float, int64_t, int64_t, WeightType,
                     CudaStream) {
  refuse();
}
void add_row_scaled_cuda(float*, int64_t, const float*, int64_t, const float*, int64_t, int64_t,
                         WeightType, CudaStream) {
  refuse();
}
void scale_cuda(float*, int64_t, float, const float*, int64_t, int64_t, WeightType, CudaStream) {
  refuse();
}
void round_to_cuda(WeightType, float*, int64_t, CudaStream) { refuse(); }
void clamp_cuda(float*, int64_t, float, float, CudaStream) { refuse(); }
void rotary_apply_cuda(float*, int64_t, int64_t, int, int, int, const float*, const float*,
                       WeightType, CudaStream) {
  refuse();
}
void softmax_cuda(const float*, int64_t, float*, int64_t, int64_t, int64_t, CudaStream) {
  refuse();
}
void combine_experts_cuda(const int32_t*, const float*, int, const float*, int64_t, float*, int64_t,
                          int64_t, WeightType, bool, CudaStream) {
  refuse();
}
void widen_rows_cuda(const WeightView&, const int32_t*, int64_t, float*, CudaStream) { refuse(); }
void rms_norm_cuda(const RmsNorm&, const uint16_t*, int64_t, const uint16_t*, int64_t, uint16_t*,
                   int64_t, int64_t, int64_t, CudaStream) {
  refuse();
}
void rms_norm_cuda(const RmsNorm&, const uint16_t*, int64_t, float*, int64_t, int64_t, int64_t,
                   CudaStream) {
  refuse();
}
void activate_cuda(Activation, const uint16_t*, int64_t, const float*, uint16_t*, int64_t, int64_t,
                   int64_t, WeightType, CudaStream) {
  refuse();
}
void activate_multiply_cuda(Activation, const uint16_t*, int64_t, float, const uint16_t*, int64_t,
                            uint16_t*, int64_t, int64_t, int64_t, WeightType, CudaStream) {
  refuse();
}
void add_scaled_cuda(uint16_t*, int64_t, const uint16_t*, int64_t, float, int64_t, int64_t,
                     WeightType, CudaStream) {
  refuse();
}
void scale_cuda(uint16_t*, int64_t, float, const float*, int64_t, int64_t, WeightType, CudaStream) {
  refuse();
}
template <class T>
void add_rms_norm_cuda(const RmsNorm&, WeightType, float*, const T*, T*, int64_t, int64_t,
                       CudaStream) {
  refuse();
}
template void add_rms_norm_cuda(const RmsNorm&, WeightType, float*, const float*, float*, int64_t,
                                int64_t, CudaStream);
template void add_rms_norm_cuda(const RmsNorm&, WeightType, float*, const uint16_t*, uint16_t*,
                                int64_t, int64_t, CudaStream);
void widen_cuda(WeightType, const void*, int64_t, int64_t, int64_t, float*, CudaStream) {
  refuse();
}
void narrow_cuda(const float*, int64_t, int64_t, int64_t, WeightType, void*, CudaStream) {
  refuse();
}
void copy_cuda(std::span<const CopyJob>, CudaStream) { refuse(); }
void gdn_scalars_cuda(const float*, const float*, const float*, int64_t, int, float*, CudaStream) {
  refuse();
}
void decay_sum_cuda(const float*, int64_t, const float*, int64_t, int, double*, CudaStream) {
  refuse();
}

void linear_cuda(std::span<const LinearJob>, CudaStream) { refuse(); }
void linear_cuda(const float*, int64_t, int64_t, const WeightView&, const float*, float*, int64_t,
                 CudaStream) {
  refuse();
}

void attention_cuda(std::span<const AttentionRowCuda>, int, int, int, float, CudaStream) {
  refuse();
}
void merge_attention_cuda(std::span<const AttentionPart>, int64_t, int, int, float*, int64_t,
                          CudaStream) {
  refuse();
}
void append_kv_cuda(const float*, int64_t, const float*, int64_t, int64_t, int64_t, void*, void*,
                    KvType, CudaStream) {
  refuse();
}

size_t paged_kv_bytes(const PagedKv&, int64_t) { refuse(); }
void append_paged_cuda(const float*, int64_t, const float*, int64_t, int, const PagedKv&,
                       const int64_t*, CudaStream) {
  refuse();
}
void load_paged_cuda(const void*, const void*, int64_t, const PagedKv&, int, CudaStream) {
  refuse();
}
size_t paged_attention_workspace(int, int, int64_t) { refuse(); }
void paged_attention_cuda(const float*, int64_t, float*, int64_t, int, int, const PagedKv&,
                          const int64_t*, int64_t, float, void*, CudaStream) {
  refuse();
}
bool paged_attention_fast_fits(const PagedKv&) { refuse(); }
size_t paged_attention_fast_workspace(int, int, const PagedKv&, int64_t) { refuse(); }
void paged_attention_fast_cuda(const float*, int64_t, float*, int64_t, int, int, const PagedKv&,
                               const int64_t*, int64_t, float, void*, CudaStream) {
  refuse();
}

void conv_decode_cuda(const CausalConv&, const ConvDecodeStep&, CudaStream) { refuse(); }
void rotary_decode_cuda(float*, int64_t, int, int, int, int, const float*, const float*,
                        const int64_t*, WeightType, CudaStream) {
  refuse();
}
void mamba2_steps_cuda(WeightType, const void*, int64_t, const float*, float, float, int, int,
                       float*, CudaStream) {
  refuse();
}
void gdn_steps_cuda(const GdnStepScalars&, int, int, float*, float*, CudaStream) { refuse(); }
void choose_greedy_cuda(const float*, int64_t, int, int64_t, int32_t*, float*, CudaStream) {
  refuse();
}

DeviceRates measure_device_rates(size_t) { refuse(); }
DecodeTiming time_decode(const DecodeWorkload&) { refuse(); }
double time_chunk(const ChunkWorkload&) { refuse(); }
CodecTiming time_codec(const StateCodec&, StateShape, int, int) { refuse(); }
double time_kl(int64_t, int, int64_t, int) { refuse(); }

}  // namespace replayeval
