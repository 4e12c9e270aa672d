// One token of Mamba-2 with plain FP32 checkpoints (decode_cuda.h) where there are too few of them
// to stream (mamba2_decode_fp32.cu): the time of one counts. A block has some rows of one head, a
// warp eight of them, four threads a row as there. They are asked for before the cursor has come,
// the records right behind it. The warps share the records' products with the query, eight threads
// a record, and meet twice: when the records have come, and when those products are there.
#include "kernels/mamba2_unit.cuh"

namespace replayeval {
namespace {

constexpr int kTileRows = 8, kMostWarps = 8;
constexpr int kMostRecords = 32;    // window
constexpr int kMostPlaces = 65535;  // of a grid

struct Launch {
  Mamba2Units units;
  DecodeStates states;
};

/// Two neighbouring ones, from a multiple of 2 on.
__device__ __forceinline__ float2 two(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}
__device__ __forceinline__ float2 two(const __nv_bfloat16* p) {
  const uint32_t u = *reinterpret_cast<const uint32_t*>(p);
  return make_float2(__uint_as_float(u << 16), __uint_as_float(u & 0xFFFF0000u));
}

/// Shared memory in elements of the activation type: query, B of records, x of a warp's records.
template <class Act, int kN16>
struct FewLayout {
  static constexpr int kRow = 16 * kN16 + 16;  // records of neighbouring threads in other banks
  static constexpr int kXs = kTileRows * kMostRecords;
  __host__ __device__ static int xs(int window) { return (window + 1) * kRow; }
  static size_t bytes(int window, int warps) {
    return static_cast<size_t>(xs(window) + warps * kXs) * sizeof(Act);
  }
};

template <class Act, int kN16>
__global__ void __launch_bounds__(32 * kMostWarps) decode_few(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ __align__(16) float weights[kMostRecords];
  using Unit = Mamba2Unit<Act, 16 * kN16>;
  using At = FewLayout<Act, kN16>;
  constexpr int kEach = Unit::kEach, kChunks = Unit::kChunks;
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const Mamba2Layer& layer = p.units.layer;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, warps = blockDim.x >> 5,
            part = lane & 3, r = lane >> 2, head = blockIdx.y, row = blockIdx.z,
            first = (static_cast<int>(blockIdx.x) * warps + warp) * kTileRows;
  const int t = p.units.rows.pending[row];
  float4* state = reinterpret_cast<float4*>(p.states.recurrence + row * p.states.row_stride +
                                            head * p.states.head_stride) +
                  (first + r) * (4 * kN16) + part;
  float4 s[kN16];
#pragma unroll
  for (int m = 0; m < kN16; ++m) s[m] = __ldcs(state + 4 * m);
  const float decay = layer.decay_log2[head], skip = layer.skip ? layer.skip[head] : 0.0f;
  const Unit unit(p.units, TileRun{row, head, t, 0, 1});
  const int64_t x_stride = unit.x_stride(), b_stride = unit.b_stride(),
                of_group = unit.group * (16 * kN16),
                of_rows = int64_t{head} * layer.head_dim + first;
  const Act* token_b = static_cast<const Act*>(p.units.step.b) + row * b_stride + of_group;
  const Act* token_x = static_cast<const Act*>(p.units.step.x) + row * x_stride + of_rows;
  Act* query = reinterpret_cast<Act*>(shared);
  Act* records = query + At::kRow;
  Act* xs = query + At::xs(p.units.window) + warp * At::kXs;
  for (int i = tid; i < kChunks; i += static_cast<int>(blockDim.x)) {
    copy_async(query + kEach * i,
               static_cast<const Act*>(p.units.step.c) + row * b_stride + of_group + kEach * i);
  }

  Act* ring_x = static_cast<Act*>(p.units.step.ring_x) + unit.slot(0) * x_stride + of_rows;
  Act* ring_b = static_cast<Act*>(p.units.step.ring_b) + unit.slot(0) * b_stride + of_group;
  float* ring_dt = p.units.step.ring_dt + unit.slot(0) * layer.heads + head;
  float dt = 0.0f;  // of the lane's record
  if (lane <= t) {
    const bool token = lane == t;
    dt = *(token ? p.units.step.dt + row * layer.heads + head : ring_dt + lane * layer.heads);
    const Act* x = (token ? token_x : ring_x) + (token ? 0 : lane) * x_stride;
#pragma unroll
    for (int k = 0; k < kTileRows; k += kEach) copy_async(xs + lane * kTileRows + k, x + k);
  }
  for (int i = tid; i < (t + 1) * kChunks; i += static_cast<int>(blockDim.x)) {
    const int j = i / kChunks, chunk = i % kChunks;
    copy_async(records + j * At::kRow + kEach * chunk,
               (j < t ? ring_b : token_b) + (j < t ? j : 0) * b_stride + kEach * chunk);
  }
  // Lane l has 2^(decays from record l on): the checkpoint's in lane 0, that of record l - 1 in the
  // others, 1 behind the token.
  const bool flush = t + 1 == p.units.window;
  const float own_decay = lane <= t ? dt * decay : 0.0f;
  float exponent = 0.0f;
  for (int k = 0; k <= t; k += 4) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float e = __shfl_sync(kAll, own_decay, k + q);
      if (k + q >= lane) exponent = exponent + e;
    }
  }
  const float power = exp2_ordered(exponent), carry = __shfl_sync(kAll, power, 0),
              next = __shfl_down_sync(kAll, power, 1),
              weight = (lane == kMostRecords - 1 ? 1.0f : next) * dt;
  if (flush && tid <= t) weights[tid] = weight;
  finish_copies();
  __syncthreads();

  const Act* own_x = xs + r;
  float4 sum = make_float4(0, 0, 0, 0);
  float y;
  if (!flush) {
    for (int base = 4 * warp; base <= t; base += 4 * warps) {
      const int record = base + (lane >> 3), j = min(record, t), i = lane & 7;
      float2 product = make_float2(0, 0);
#pragma unroll
      for (int m = 0; m < kN16; ++m) {
        const float2 b = two(records + j * At::kRow + 16 * m + 2 * i),
                     c = two(query + 16 * m + 2 * i);
        product = make_float2(__fmaf_rn(b.x, c.x, product.x), __fmaf_rn(b.y, c.y, product.y));
      }
      // The order of sum_of_lanes: columns 8, 4, 2 apart, then neighbours.
#pragma unroll
      for (int d = 4; d > 0; d /= 2) {
        product.x += __shfl_xor_sync(kAll, product.x, d);
        product.y += __shfl_xor_sync(kAll, product.y, d);
      }
      const float of_record = __shfl_sync(kAll, weight, j);
      if (i == 0 && record <= t) weights[j] = of_record * (product.x + product.y);
    }
#pragma unroll
    for (int m = 0; m < kN16; ++m) sum = fma4(s[m], four(query + 16 * m + 4 * part), sum);
    y = carry * sum_of_lanes(sum);
    __syncthreads();
    y = add_records<kTileRows>(weights, own_x, t, y);
  } else {
#pragma unroll
    for (int m = 0; m < kN16; ++m)
      s[m] = make_float4(carry * s[m].x, carry * s[m].y, carry * s[m].z, carry * s[m].w);
#pragma unroll 2
    for (int j = 0; j <= t; ++j) {
      const float u = weights[j] * to_float(own_x[j * kTileRows]);
      const Act* b = records + j * At::kRow + 4 * part;
#pragma unroll
      for (int m = 0; m < kN16; ++m) s[m] = fma1(u, four(b + 16 * m), s[m]);
    }
    uint32_t non_finite = 0, infinite = 0;
#pragma unroll
    for (int m = 0; m < kN16; ++m) {
      __stcs(state + 4 * m, s[m]);
      sum = fma4(s[m], four(query + 16 * m + 4 * part), sum);
      if (p.states.health) count_odd(s[m], &non_finite, &infinite);
    }
    if (p.states.health) {
      add_tile_health(p.states.health + int64_t{row} * layer.heads + head, kTileRows * 16 * kN16,
                      non_finite, infinite, p.units.rows.position[row]);
    }
    y = sum_of_lanes(sum);
  }
  if (layer.skip) y = __fmaf_rn(skip, to_float(own_x[t * kTileRows]), y);
  if (part == 0)
    static_cast<Act*>(p.units.step.y)[row * x_stride + of_rows + r] = from_float<Act>(y);
  if (flush) return;
  // The token's record goes to the ring.
  if (lane < kTileRows / kEach) {
    reinterpret_cast<uint4*>(ring_x + t * x_stride)[lane] =
        reinterpret_cast<const uint4*>(xs + t * kTileRows)[lane];
  }
  if (blockIdx.x == 0 && warp == 0) {
    if (lane == t) ring_dt[t * layer.heads] = dt;
    for (int i = lane; head % p.units.group_heads == 0 && i < kChunks; i += 32) {
      reinterpret_cast<uint4*>(ring_b + t * b_stride)[i] =
          reinterpret_cast<const uint4*>(records + t * At::kRow)[i];
    }
  }
}

template <class Act, int kN16>
void start(const Launch& launch, dim3 blocks, int warps, CudaStream stream) {
  decode_few<Act, kN16>
      <<<blocks, static_cast<unsigned>(32 * warps),
         FewLayout<Act, kN16>::bytes(launch.units.window, warps), stream>>>(launch);
  CUDA_CHECK(cudaGetLastError());
}
template <class Act>
void start(const Launch& launch, dim3 blocks, int warps, CudaStream stream) {
  const int n = launch.units.layer.state_dim;
  if (n == 64) start<Act, 4>(launch, blocks, warps, stream);
  if (n == 128) start<Act, 8>(launch, blocks, warps, stream);
  if (n == 256) start<Act, 16>(launch, blocks, warps, stream);
}

}  // namespace

bool mamba2_decode_few(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                       const DecodeStates& states, const Mamba2DecodeStep& step,
                       CudaStream stream) {
  const int64_t bytes = int64_t{rows.rows} * layer.heads * layer.head_dim * layer.state_dim * 4;
  if (states.streamed || bytes > kFewMamba2Bytes || plan.window > kMostRecords ||
      std::max(rows.rows, layer.heads) > kMostPlaces) {
    return false;
  }
  const int head_tiles = layer.head_dim / kTileRows;
  int warps = std::min(head_tiles, kMostWarps);
  while (head_tiles % warps != 0) --warps;
  const Launch launch{
      {layer, rows, step, plan.window, Divisor(1), Divisor(layer.heads / layer.groups)}, states};
  const dim3 blocks(static_cast<unsigned>(head_tiles / warps), static_cast<unsigned>(layer.heads),
                    static_cast<unsigned>(rows.rows));
  if (step.activation == RecordType::bf16) {
    start<__nv_bfloat16>(launch, blocks, warps, stream);
  } else {
    start<float>(launch, blocks, warps, stream);
  }
  return true;
}

}  // namespace replayeval
