// The rotation that rotary embeddings on the device share.
#pragma once

#include "kernels/math_cuda.cuh"

namespace replayeval {

/// rotary_apply of four pairs: low' = low cos - high sin, high' = high cos + low sin.
template <WeightType Type>
__device__ __forceinline__ void rotate(Quad* low, Quad* high, const Quad& cosine,
                                       const Quad& sine) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x1 = low->v[i], x2 = high->v[i], cs = cosine.v[i], sn = sine.v[i];
    if constexpr (Type == WeightType::fp32) {
      low->v[i] = __fmaf_rn(x1, cs, 0.0F - x2 * sn);
      high->v[i] = __fmaf_rn(x2, cs, x1 * sn);
    } else {
      low->v[i] = rounded<Type>(rounded<Type>(x1 * cs) - rounded<Type>(x2 * sn));
      high->v[i] = rounded<Type>(rounded<Type>(x2 * cs) + rounded<Type>(x1 * sn));
    }
  }
}

}  // namespace replayeval
