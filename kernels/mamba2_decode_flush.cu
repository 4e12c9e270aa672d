// The rows of a token of Mamba-2 that flush, where formats are those of row_codec.cuh: fold, output
// and the codes of both roles with a head's matrix in registers. A block takes heads of such rows
// in turn; the next head's inputs come while codes are made.
#include "kernels/decode_codes.cuh"

namespace replayeval {
namespace {

constexpr int kMostRows = 128;  // of a head
constexpr int kBRow = 144;      // of B and C: neighbouring records lie in different banks

struct Launch {
  Mamba2Layer layer;
  DecodeRows rows;
  DecodeStates states;
  Mamba2DecodeStep step;
  TileWork work;
  FlushRoles roles;
  size_t packed;  // bytes of a recurrence head
  bool output;
  Divisor group_heads;
};

/// Shared memory in bytes.
struct Layout {
  int state, raw_x, raw_b, raw_c, dt, b, c, u, last_x, weights, words, roles, share;

  __host__ __device__ Layout(int head_dim, int window, int act_bytes, size_t packed) {
    int at = 0;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    state = take(static_cast<int>(packed));
    raw_x = take(window * head_dim * act_bytes);
    raw_b = take(window * kRowColumns * act_bytes);
    raw_c = take(kRowColumns * act_bytes);
    dt = take(4 * window);
    b = take(4 * window * kBRow);
    c = take(4 * kBRow);
    u = take(4 * window * head_dim);
    last_x = take(4 * head_dim);
    weights = take(4 * (window + 1));
    words = take(4 * 2 * HeadMax::kWords);
    roles = take(FlushRoles::kBytes);
    share = at;
  }
};

template <class Act>
__global__ void __launch_bounds__(kRowThreads* kMostRows / 2, 2)
    flush_rows(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) std::byte shared[];
  using namespace row_codec;
  constexpr int kEach = 16 / sizeof(Act), kBChunks = kRowColumns / kEach;
  const Mamba2Layer& layer = p.layer;
  const int head_dim = layer.head_dim, window = p.work.window, last = window - 1;
  const Layout at(head_dim, window, sizeof(Act), p.packed);
  const int tid = threadIdx.x, threads = static_cast<int>(blockDim.x), part = tid & 3;
  const int half = (head_dim + 1) / 2, own = tid >> 2;
  const int row[2] = {own < half ? own : head_dim, own < half ? half + own : head_dim};
  const bool has_row[2] = {row[0] < half, row[1] < head_dim};
  const TileShare share(p.work, shared + at.share);
  const HeadCopy<LaneColumns> state = p.roles.copy<LaneColumns>(shared + at.state, head_dim);
  p.roles.prepare(shared + at.roles, head_dim);
  HeadMax head_max(reinterpret_cast<float*>(shared + at.words), 0, 1);
  const int64_t x_stride = int64_t{layer.heads} * head_dim,
                b_stride = int64_t{layer.groups} * kRowColumns;
  struct Place {
    int row, head, group;
  };
  const auto place_of = [&](int item) {
    const int listed = item / p.work.row_units, head = item - listed * p.work.row_units;
    return Place{p.work.first_row + (share.order[listed] >> 6), head, head / p.group_heads};
  };
  const auto copy_inputs = [&](int item) {
    const Place place = place_of(item);
    const std::byte* from =
        p.states.recurrence + place.row * p.states.row_stride + place.head * p.states.head_stride;
#pragma unroll 1
    for (int i = 16 * tid; i < static_cast<int>(p.packed); i += 16 * threads)
      copy_async(shared + at.state + i, from + i);
    const int64_t own_x = place.row * x_stride + int64_t{place.head} * head_dim,
                  ring_x = place.row * window * x_stride + int64_t{place.head} * head_dim,
                  own_b = place.row * b_stride + place.group * kRowColumns,
                  ring_b = place.row * window * b_stride + place.group * kRowColumns;
    const auto record = [&](const void* now, const void* ring, int64_t own, int64_t first,
                            int64_t stride, int j) {
      return j == last ? static_cast<const Act*>(now) + own
                       : static_cast<const Act*>(ring) + first + j * stride;
    };
    const int warp = tid >> 5, warps = threads >> 5, lane = tid & 31;
#pragma unroll 1
    for (int j = warp; j < window; j += warps) {
      const Act* x = record(p.step.x, p.step.ring_x, own_x, ring_x, x_stride, j);
#pragma unroll 1
      for (int i = lane; i < head_dim / kEach; i += 32)
        copy_async(shared + at.raw_x + (j * head_dim + i * kEach) * sizeof(Act), x + i * kEach);
      const Act* b = record(p.step.b, p.step.ring_b, own_b, ring_b, b_stride, j);
#pragma unroll 1
      for (int i = lane; i < kBChunks; i += 32)
        copy_async(shared + at.raw_b + 16 * (j * kBChunks + i), b + i * kEach);
    }
#pragma unroll 1
    for (int i = tid; i < kBChunks; i += threads)
      copy_async(shared + at.raw_c + 16 * i, static_cast<const Act*>(p.step.c) + own_b + i * kEach);
#pragma unroll 1
    for (int j = tid; j < window; j += threads) {
      copy_word(shared + at.dt + 4 * j,
                j == last ? p.step.dt + int64_t{place.row} * layer.heads + place.head
                          : p.step.ring_dt + (int64_t{place.row} * window + j) * layer.heads +
                                place.head);
    }
    commit_copies();
  };
  int item = share.bounds[0];
  const int end = share.bounds[1];
  if (item < end) copy_inputs(item);
  const float *dt = reinterpret_cast<const float*>(shared + at.dt),
              *bs = reinterpret_cast<const float*>(shared + at.b) + 4 * part,
              *cs = reinterpret_cast<const float*>(shared + at.c) + 4 * part,
              *us = reinterpret_cast<const float*>(shared + at.u),
              *last_x = reinterpret_cast<const float*>(shared + at.last_x);
  float* weights = reinterpret_cast<float*>(shared + at.weights);
  const int own_rows[2] = {has_row[0] ? row[0] : 0, has_row[1] ? row[1] : 0};
  for (; item < end; ++item) {
    const Place place = place_of(item);
    finish_copies();
    __syncthreads();
    if (tid <= window) {
      // 2^D dt of record tid, or the checkpoint's 2^D.
      const float decay = layer.decay_log2[place.head];
      float exponent = 0.0f;
#pragma unroll 4
      for (int k = tid == window ? 0 : tid + 1; k < window; ++k)
        exponent = exponent + dt[k] * decay;
      const float power = exp2_ordered(exponent);
      weights[tid] = tid == window ? power : power * dt[tid];
    }
    __syncthreads();
    const Act *raw_x = reinterpret_cast<const Act*>(shared + at.raw_x),
              *raw_b = reinterpret_cast<const Act*>(shared + at.raw_b),
              *raw_c = reinterpret_cast<const Act*>(shared + at.raw_c);
#pragma unroll 1
    for (int i = tid; i < (window + 1) * (kRowColumns / 4); i += threads) {
      const int j = i / (kRowColumns / 4), column = i % (kRowColumns / 4) * 4;
      float* to = reinterpret_cast<float*>(shared + (j < window ? at.b : at.c)) +
                  (j < window ? j * kBRow : 0) + column;
      store4(to, four((j < window ? raw_b + j * kRowColumns : raw_c) + column));
    }
#pragma unroll 1
    for (int j = tid >> 5; j < window; j += threads >> 5) {
#pragma unroll 1
      for (int i = (tid & 31) * 4; i < head_dim; i += 128) {
        const float w = weights[j];
        const float4 x = four(raw_x + j * head_dim + i);
        float* to = reinterpret_cast<float*>(shared + at.u) + j * head_dim + i;
        store4(to, make_float4(w * x.x, w * x.y, w * x.z, w * x.w));
        if (j == last) store4(reinterpret_cast<float*>(shared + at.last_x) + i, x);
      }
    }
    __syncthreads();
    float4 v[2][kRowQuads];
    const float carry = weights[window];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.row(own_rows[r], part, v[r]);
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        const float4 from = v[r][i];
        v[r][i] = make_float4(carry * from.x, carry * from.y, carry * from.z, carry * from.w);
      }
    }
#pragma unroll 2
    for (int j = 0; j < window; ++j) {
      const float u0 = has_row[0] ? us[j * head_dim + own_rows[0]] : 0.0f,
                  u1 = has_row[1] ? us[j * head_dim + own_rows[1]] : 0.0f;
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        const float4 b = load4(bs + j * kBRow + 16 * i);
        v[0][i] = fma1(u0, b, v[0][i]);
        v[1][i] = fma1(u1, b, v[1][i]);
      }
    }
    if (p.output) {
      float4 sum[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll
      for (int i = 0; i < kRowQuads; ++i) {
        const float4 c = load4(cs + 16 * i);
        sum[0] = fma4(v[0][i], c, sum[0]);
        sum[1] = fma4(v[1][i], c, sum[1]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float y = sum_of_lanes(sum[r]);
        if (layer.skip) y = __fmaf_rn(layer.skip[place.head], last_x[own_rows[r]], y);
        if (part == 0 && has_row[r]) {
          static_cast<Act*>(
              p.step.y)[place.row * x_stride + int64_t{place.head} * head_dim + row[r]] =
              from_float<Act>(y);
        }
      }
    }
    p.roles.store<LaneColumns>(shared + at.roles, p.rows, p.states, place.row, place.head,
                               layer.heads, head_dim, v, row, part, &head_max, [&] {
                                 if (item + 1 < end) copy_inputs(item + 1);
                               });
  }
}

}  // namespace

bool mamba2_flush_rows(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                       const DecodeStates& states, const Mamba2DecodeStep& step,
                       CudaStream stream) {
  if (plan.dot != DotType::fp32 || layer.head_dim > kMostRows || plan.window >= 32 ||
      !FlushRoles::takes(plan, layer.state_dim)) {
    return false;
  }
  const bool bf16 = step.activation == RecordType::bf16;
  const StateShape shape{layer.head_dim, layer.state_dim};
  const size_t packed = (packed_bytes(*plan.recurrence.format, shape) + 15) / 16 * 16;
  const int threads = (kRowThreads * ((layer.head_dim + 1) / 2) + 31) / 32 * 32;
  const Layout at(layer.head_dim, plan.window, bf16 ? 2 : 4, packed);
  const size_t shared =
      static_cast<size_t>(at.share) + TileShare::bytes(std::min(rows.rows, kMostTileRows));
  const auto kernel = bf16 ? flush_rows<__nv_bfloat16> : flush_rows<float>;
  if (shared > block_shared_limit()) return false;
  allow_shared(kernel, shared);
  const int64_t resident = resident_blocks(kernel, threads, shared);
  TileWork::each(rows, plan.window, false, 1, layer.heads, 1, [&](const TileWork& work) {
    const Launch launch{layer,
                        rows,
                        states,
                        step,
                        work,
                        FlushRoles(plan, shape, layer.layer, layer.head_offset),
                        packed,
                        plan.flush_output == FlushOutput::recurrence,
                        Divisor(layer.heads / layer.groups)};
    kernel<<<static_cast<unsigned>(std::min(int64_t{work.rows} * layer.heads, resident)),
             static_cast<unsigned>(threads), shared, stream>>>(launch);
    CUDA_CHECK(cudaGetLastError());
  });
  return true;
}

}  // namespace replayeval
