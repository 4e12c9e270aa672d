// One token of GDN with plain FP32 checkpoints (decode_cuda.h) where there are too few of them to
// stream (gdn_decode_fp32.cu): the time of one counts. A block has 32 rows of a value head. Its
// first warp copies them before the cursor has come and multiplies them with key and query, one row
// a thread, while the others prepare what the ring's records weigh; both meet once, and a row that
// does not flush is then the first warp's alone. A flush is folded by the others, some columns
// each.
#include <cmath>

#include "kernels/gdn_unit.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 32;
constexpr int kWarps = 8;  // that prepare

struct Launch {
  GdnUnits units;
  DecodeStates states;
};

/// Shared memory in bytes, behind that of a unit: rows of the checkpoint, normalised key and query,
/// corrections of the ring and the token's.
struct FewLayout {
  int state, own, us, u, end;
  __host__ __device__ FewLayout(int key_dim, int window, int u_bytes, int unit_end) {
    state = unit_end;
    own = state + kTileRows * key_dim * 4;
    us = own + 2 * key_dim * 4;
    u = us + kTileRows * window * u_bytes;
    end = u + kTileRows * 4;
  }
};

template <class Act, int kKeyDim>
__global__ void __launch_bounds__(32 * (kWarps + 1)) decode_few(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr int kChunks = kKeyDim / 4, kN16 = kKeyDim / 16;
  using Unit = GdnUnit<Act, kKeyDim>;
  using Preparing = Team<kWarps>;
  const GdnLayer& layer = p.units.layer;
  const int window = p.units.window, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5,
            head = blockIdx.y, row = blockIdx.z;
  const int t = p.units.rows.pending[row];
  const RecordType ring_u = p.units.ring_u;
  const GdnUnitLayout at(kKeyDim, window, p.units.heads, sizeof(Act));
  const FewLayout few(kKeyDim, window, ring_u == RecordType::bf16 ? 2 : 4, at.end);
  const Unit unit(p.units, TileRun{row, head / p.units.heads, t, 0, 1});
  const int h = head - unit.head0;
  const int64_t first = int64_t{head} * layer.value_dim + int64_t{blockIdx.x} * kTileRows;
  float4* tile = reinterpret_cast<float4*>(p.states.recurrence + row * p.states.row_stride +
                                           head * p.states.head_stride) +
                 static_cast<int>(blockIdx.x) * (kTileRows * kChunks);
  // Threads that read the same columns of eight rows meet different banks.
  const auto state = [&](int r, int chunk) {
    return reinterpret_cast<float4*>(shared + few.state) + (r * kChunks + (chunk ^ (r & 7)));
  };
  float* own = reinterpret_cast<float*>(shared + few.own);
  std::byte* us = shared + few.us;
  float* token_u = reinterpret_cast<float*>(shared + few.u);
  const auto stored = [&](int j) { return load_record(ring_u, us, j * kTileRows + lane); };
  float with_key = 0.0f, with_query = 0.0f, v = 0.0f;
  if (warp == 0) {
#pragma unroll
    for (int m = 0; m < kChunks; ++m) {
      const int i = 32 * m + lane;
      copy_async(state(i / kChunks, i % kChunks), tile + i);
    }
    const int side = lane >> 4;
    float value[kN16];
    Unit::normalise(static_cast<const Act*>(side == 0 ? p.units.step.k : p.units.step.q) +
                        row * unit.k_stride() + unit.key_head * kKeyDim,
                    side == 0 ? 1.0f : p.units.query_scale, value);
#pragma unroll
    for (int m = 0; m < kN16; ++m) own[side * kKeyDim + (lane & 15) + 16 * m] = value[m];
    v = to_float(static_cast<const Act*>(p.units.step.v)[row * unit.v_stride() + first + lane]);
    unit.template copy_corrections<kTileRows>(first, us);
    finish_copies();
    __syncwarp();
#pragma unroll 8
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const float4 s = *state(lane, chunk);
      with_key = chain(load4(own + 4 * chunk), s, with_key);
      with_query = chain(load4(own + kKeyDim + 4 * chunk), s, with_query);
    }
  } else {
    unit.template copy_inputs<Preparing>(at, shared);
    finish_copies();
    Preparing::meet();
    const bool append = t + 1 < window && h == 0 && blockIdx.x == 0;
    unit.template prepare<Preparing>(at, append, shared, shared);
  }
  __syncthreads();

  const bool flush = t + 1 == window;
  const float* key_weight =
      reinterpret_cast<const float*>(shared + at.key_weights) + h * (window + 1);
  const float* query_weight =
      reinterpret_cast<const float*>(shared + at.query_weights) + h * (window + 1);
  Act* out = static_cast<Act*>(p.units.step.o) + row * unit.v_stride() + first;
  if (warp == 0) {
    float rest = __fmaf_rn(key_weight[window], with_key, v), o = query_weight[window] * with_query;
#pragma unroll 4
    for (int j = 0; j < t; ++j) {
      const float u = stored(j);
      rest = __fmaf_rn(key_weight[j], u, rest);
      o = __fmaf_rn(query_weight[j], u, o);
    }
    const float u = unit.rounded_beta(reinterpret_cast<const float*>(shared + at.beta)[h]) * rest;
    if (!flush) {
      out[lane] = from_float<Act>(__fmaf_rn(query_weight[t], u, o));
      const int64_t to = unit.slot(t) * unit.v_stride() + first + lane;
      static_cast<Act*>(p.units.step.ring_v)[to] = from_float<Act>(v);
      store_record(ring_u, p.units.step.ring_u, to, u);
    }
    token_u[lane] = u;
  }
  if (!flush) return;
  __syncthreads();

  // S = carried S + sum_j (decayed u_j) k_j^T, one row a thread.
  constexpr int kEach = kChunks / kWarps;
  if (warp > 0) {
    const float* fold = reinterpret_cast<const float*>(shared + at.fold_weights) + h * window;
    const float* keys = reinterpret_cast<const float*>(shared + at.keys);
    const float carry = query_weight[window];
    const int chunk0 = (warp - 1) * kEach;
    float4 s[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float4 x = *state(lane, chunk0 + k);
      s[k] = make_float4(carry * x.x, carry * x.y, carry * x.z, carry * x.w);
    }
#pragma unroll 2
    for (int j = 0; j <= t; ++j) {
      const float w = fold[j] * (j == t ? token_u[lane] : stored(j));
#pragma unroll
      for (int k = 0; k < kEach; ++k)
        s[k] = fma1(w, load4(keys + j * at.k_row + 4 * (chunk0 + k)), s[k]);
    }
    uint32_t non_finite = 0, infinite = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      *state(lane, chunk0 + k) = s[k];
      if (p.states.health) count_odd(s[k], &non_finite, &infinite);
    }
    if (p.states.health) {
      add_tile_health(p.states.health + int64_t{row} * layer.value_heads + head,
                      kTileRows * 4 * kEach, non_finite, infinite, p.units.rows.position[row]);
    }
  }
  __syncthreads();
  if (warp == 0) {
    float o = 0.0f;
#pragma unroll 8
    for (int chunk = 0; chunk < kChunks; ++chunk)
      o = chain(load4(own + kKeyDim + 4 * chunk), *state(lane, chunk), o);
    out[lane] = from_float<Act>(o);
  } else {
    for (int i = tid - 32; i < kTileRows * kChunks; i += 32 * kWarps)
      __stcs(tile + i, *state(i / kChunks, i % kChunks));
  }
}

using Kernel = void (*)(const Launch);
template <class Act>
Kernel kernel_of(int key_dim) {
  return key_dim == 128  ? decode_few<Act, 128>
         : key_dim == 64 ? decode_few<Act, 64>
                         : decode_few<Act, 256>;
}

}  // namespace

bool gdn_decode_few(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                    const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream) {
  const int n = layer.key_dim;
  const int64_t bytes = int64_t{rows.rows} * layer.value_heads * layer.value_dim * n * 4;
  const bool bf16 = step.activation == RecordType::bf16;
  const int heads = layer.value_heads / layer.key_heads;
  const GdnUnitLayout at(n, plan.window, heads, bf16 ? 2 : 4);
  const size_t shared = static_cast<size_t>(
      FewLayout(n, plan.window, plan.ring_u == RecordType::bf16 ? 2 : 4, at.end).end);
  if (states.streamed || bytes > kFewGdnBytes || shared > block_shared_limit() ||
      layer.value_dim % kTileRows != 0) {
    return false;
  }
  const Kernel kernel = bf16 ? kernel_of<__nv_bfloat16>(n) : kernel_of<float>(n);
  allow_shared(kernel, shared);
  const Launch launch{
      {layer, rows, step, static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))), plan.ring_u,
       plan.beta, plan.window, Divisor(heads)},
      states};
  kernel<<<dim3(static_cast<unsigned>(layer.value_dim / kTileRows),
                static_cast<unsigned>(layer.value_heads), static_cast<unsigned>(rows.rows)),
           32 * (kWarps + 1), shared, stream>>>(launch);
  CUDA_CHECK(cudaGetLastError());
  return true;
}

}  // namespace replayeval
