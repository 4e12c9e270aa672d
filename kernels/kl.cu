// One position and candidate a block: both rows are read once, four tokens a thread at a time;
// terms in FP32, sums in FP64 in a fixed order (kl_cuda.h has the equations).
#include <limits>

#include "kernels/kl_cuda.h"
#include "quant/cuda_check.cuh"

namespace replayeval {
namespace {

constexpr int kThreads = 512;
__device__ constexpr float kNone = -std::numeric_limits<float>::infinity();

__device__ KlSums nothing() {
  KlSums s{};
  s.scale = s.candidate_scale = s.max_reference = s.max_candidate = kNone;
  s.argmax_reference = s.argmax_candidate = -1;
  s.target_reference = s.target_candidate = std::numeric_limits<float>::quiet_NaN();
  return s;
}

/// e^-d - 1 + d for |d| <= 1, as d^2 h(d), h of degree 7 with a relative error of 5e-9; never
/// negative.
__device__ __forceinline__ float divergence_near(float d) {
  float h = -2.77228341e-6f;
  h = __fmaf_rn(h, d, 2.53548293e-5f);
  h = __fmaf_rn(h, d, -1.98440236e-4f);
  h = __fmaf_rn(h, d, 1.38854520e-3f);
  h = __fmaf_rn(h, d, -8.33331028e-3f);
  h = __fmaf_rn(h, d, 4.16667345e-2f);
  h = __fmaf_rn(h, d, -1.66666670e-1f);
  h = __fmaf_rn(h, d, 4.99999998e-1f);
  return d * d * h;
}

__device__ __forceinline__ double factor(float from, float to) {
  return from == to ? 1.0 : exp(static_cast<double>(from) - static_cast<double>(to));
}

/// Raises the common scale; sums of nothing stay nothing.
__device__ __forceinline__ void raise(KlSums* s, float scale) {
  if (!(scale > s->scale)) return;
  const double f = s->scale == kNone ? 0.0 : factor(s->scale, scale);
  s->z *= f;
  s->a = s->scale == kNone ? 0.0 : s->a * f;
  s->b = s->scale == kNone ? 0.0 : s->b * f;
  s->scale = scale;
}
__device__ __forceinline__ void raise_candidate(KlSums* s, float scale) {
  if (!(scale > s->candidate_scale)) return;
  s->zc *= s->candidate_scale == kNone ? 0.0 : factor(s->candidate_scale, scale);
  s->candidate_scale = scale;
}

__device__ void merge(KlSums* s, KlSums other) {
  raise(s, other.scale);
  raise(&other, s->scale);
  raise_candidate(s, other.candidate_scale);
  raise_candidate(&other, s->candidate_scale);
  s->z += other.z;
  s->a += other.a;
  s->b += other.b;
  s->zc += other.zc;
  const auto best = [](float* value, int32_t* place, float v, int32_t p) {
    if (p >= 0 && (v > *value || *place < 0 || (v == *value && p < *place))) *value = v, *place = p;
  };
  best(&s->max_reference, &s->argmax_reference, other.max_reference, other.argmax_reference);
  best(&s->max_candidate, &s->argmax_candidate, other.max_candidate, other.argmax_candidate);
  if (!isnan(other.target_reference)) s->target_reference = other.target_reference;
  if (!isnan(other.target_candidate)) s->target_candidate = other.target_candidate;
  s->nan_reference += other.nan_reference;
  s->nan_candidate += other.nan_candidate;
}

__device__ __forceinline__ KlSums shuffled(const KlSums& s, int distance) {
  static_assert(sizeof(KlSums) % 4 == 0);
  KlSums result;
  const int* from = reinterpret_cast<const int*>(&s);
  int* to = reinterpret_cast<int*>(&result);
#pragma unroll
  for (size_t i = 0; i < sizeof(KlSums) / 4; ++i)
    to[i] = __shfl_xor_sync(0xFFFFFFFFu, from[i], distance);
  return result;
}

/// `count` (1 to 4) tokens from `token` on.
__device__ __forceinline__ void add_tokens(KlSums* s, const float* r, const float* c, int count,
                                           int32_t token) {
  float largest = kNone, candidate_largest = kNone;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= count) break;
    if (r[i] > s->max_reference) s->max_reference = r[i], s->argmax_reference = token + i;
    if (c[i] > s->max_candidate) s->max_candidate = c[i], s->argmax_candidate = token + i;
    s->nan_reference += isnan(r[i]) ? 1 : 0;
    s->nan_candidate += isnan(c[i]) ? 1 : 0;
    largest = fmaxf(largest, r[i]);
    candidate_largest = fmaxf(candidate_largest, c[i]);
  }
  // The scale need not belong to r: where it has given nothing yet, c keeps e^(c - m) from
  // overflowing.
  raise(s, largest == kNone && s->scale == kNone ? candidate_largest : largest);
  raise_candidate(s, candidate_largest);
  if (s->scale == kNone) return;  // only impossible tokens so far, in both rows
  float z = 0.0f, a = 0.0f, b = 0.0f, zc = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= count) break;
    const float d = r[i] - c[i];
    const float p = expf(r[i] - s->scale);
    if (c[i] != kNone) zc += expf(c[i] - s->candidate_scale);
    z += p;
    if (fabsf(d) < 1.0f) {
      const float near = divergence_near(d);
      a = __fmaf_rn(p, near, a);
      b = __fmaf_rn(p, near - d, b);
    } else {
      const double q = exp(static_cast<double>(c[i]) - static_cast<double>(s->scale));
      const bool none = r[i] == kNone;
      const double exact = none ? 0.0 : static_cast<double>(p);
      s->a +=
          none ? q : q - exact + exact * (static_cast<double>(r[i]) - static_cast<double>(c[i]));
      s->b += q - exact;
    }
  }
  s->z += static_cast<double>(z);
  s->a += static_cast<double>(a);
  s->b += static_cast<double>(b);
  s->zc += static_cast<double>(zc);
}

__global__ void __launch_bounds__(kThreads) add_slice(KlSlice slice, KlSums* sums) {
  __shared__ KlSums partial[kThreads / 32];
  const int64_t position = blockIdx.x / slice.candidates;
  const int candidate = static_cast<int>(blockIdx.x % slice.candidates);
  const float* r = slice.reference + position * slice.reference_stride;
  const float* c = slice.candidate +
                   (candidate * slice.candidate_stride_rows + position) * slice.candidate_stride;
  const bool aligned = (reinterpret_cast<uintptr_t>(r) | reinterpret_cast<uintptr_t>(c)) % 16 == 0;
  KlSums own = nothing();
  for (int64_t t = 4 * threadIdx.x; t < slice.tokens; t += 4 * kThreads) {
    const int count = static_cast<int>(slice.tokens - t < 4 ? slice.tokens - t : 4);
    float rs[4], cs[4];
    if (aligned && count == 4) {
      const float4 x = __ldg(reinterpret_cast<const float4*>(r + t)),
                   y = __ldcs(reinterpret_cast<const float4*>(c + t));
      rs[0] = x.x, rs[1] = x.y, rs[2] = x.z, rs[3] = x.w;
      cs[0] = y.x, cs[1] = y.y, cs[2] = y.z, cs[3] = y.w;
    } else {
      for (int i = 0; i < count; ++i) rs[i] = r[t + i], cs[i] = c[t + i];
    }
    add_tokens(&own, rs, cs, count, static_cast<int32_t>(slice.first_token + t));
  }
  for (int distance = 1; distance < 32; distance *= 2) merge(&own, shuffled(own, distance));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  own = sums[candidate * slice.positions + position];
  for (const KlSums& p : partial) merge(&own, p);
  const int64_t target = slice.targets ? slice.targets[position] - slice.first_token : -1;
  if (target >= 0 && target < slice.tokens && slice.targets[position] >= 0) {
    own.target_reference = r[target];
    own.target_candidate = c[target];
  }
  sums[candidate * slice.positions + position] = own;
}

__global__ void begin(KlSums* sums, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) sums[i] = nothing();
}

__global__ void finish(const KlSums* sums, int64_t count, double* kl, double* nll_reference,
                       double* nll_candidate, uint8_t* top1) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  const KlSums s = sums[i];
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const bool reference =
      s.argmax_reference >= 0 && s.nan_reference == 0 && isfinite(s.max_reference);
  const bool candidate =
      s.argmax_candidate >= 0 && s.nan_candidate == 0 && isfinite(s.max_candidate);
  const double lse_reference = static_cast<double>(s.scale) + log(s.z);
  const double big_b = s.b / s.z, big_a = s.a / s.z;
  const double direct = static_cast<double>(s.candidate_scale) + log(s.zc) - lse_reference;
  const bool near = fabs(big_b) < 0.5;
  const double shift = near ? log1p(big_b) : direct;  // lse_candidate - lse_reference
  if (kl) {
    double value = near ? big_a - (big_b - shift) : (big_a - big_b) + shift;
    if (isinf(big_a)) value = big_a;
    kl[i] = reference && candidate ? (value > 0 ? value : 0.0) : nan;
  }
  if (nll_reference)
    nll_reference[i] = reference ? lse_reference - static_cast<double>(s.target_reference) : nan;
  if (nll_candidate) {
    nll_candidate[i] = candidate
                           ? (reference ? lse_reference + shift
                                        : static_cast<double>(s.candidate_scale) + log(s.zc)) -
                                 static_cast<double>(s.target_candidate)
                           : nan;
  }
  if (top1) {
    top1[i] = !(reference && candidate) ? 255 : s.argmax_reference == s.argmax_candidate ? 1 : 0;
  }
}

unsigned blocks_of(int64_t count) { return static_cast<unsigned>((count + 255) / 256); }

}  // namespace

void kl_begin_cuda(KlSums* sums, int64_t count, CudaStream stream) {
  if (count == 0) return;
  begin<<<blocks_of(count), 256, 0, stream>>>(sums, count);
  CUDA_CHECK(cudaGetLastError());
}

void kl_add_cuda(const KlSlice& slice, KlSums* sums, CudaStream stream) {
  if (slice.positions == 0 || slice.candidates == 0 || slice.tokens == 0) return;
  add_slice<<<static_cast<unsigned>(slice.positions * slice.candidates), kThreads, 0, stream>>>(
      slice, sums);
  CUDA_CHECK(cudaGetLastError());
}

void kl_finish_cuda(const KlSums* sums, int64_t count, double* kl, double* nll_reference,
                    double* nll_candidate, uint8_t* top1, CudaStream stream) {
  if (count == 0) return;
  finish<<<blocks_of(count), 256, 0, stream>>>(sums, count, kl, nll_reference, nll_candidate, top1);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
