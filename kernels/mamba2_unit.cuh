// What the decode kernels of Mamba-2 that take units in turn share (mamba2_decode_fp32.cu,
// mamba2_decode_nvfp4.cu): what a unit, some heads of a group of one row, needs beside checkpoints.
#pragma once

#include "kernels/decode_tiles.cuh"

namespace replayeval {

struct Mamba2Units {
  Mamba2Layer layer;
  DecodeRows rows;
  Mamba2DecodeStep step;
  int window, unit_heads, row_units, units;
};

/// Shared memory in bytes.
struct Mamba2UnitLayout {
  int weight_row;                            // weights of a head: records, then the checkpoint's
  int b, c, dt, decay, skip, scale, inputs;  // of a unit, twice
  int dots, weights, end;

  __host__ __device__ Mamba2UnitLayout(int state_dim, int window, int heads, int act_bytes) {
    weight_row = window + 1;
    int at = 0;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    b = take(window * state_dim * act_bytes);
    c = take(state_dim * act_bytes);
    dt = take(4 * window * heads);
    decay = take(4 * heads);
    skip = take(4 * heads);
    scale = take(4 * heads);
    inputs = at;
    at *= 2;
    dots = take(4 * window);
    weights = take(4 * heads * weight_row);
    end = at;
  }
};

/// A unit as a block sees it; `records` of them lie in its row's ring.
template <class Act, int kStateDim>
struct Mamba2Unit {
  static constexpr int kEach = 16 / sizeof(Act), kChunks = kStateDim / kEach;
  const Mamba2Units& p;
  int row, head0, group;

  __device__ Mamba2Unit(const Mamba2Units& units, int unit) : p(units) {
    row = unit / p.row_units;
    head0 = unit % p.row_units * p.unit_heads;
    group = head0 / (p.layer.heads / p.layer.groups);
  }
  __device__ int64_t x_stride() const { return int64_t{p.layer.heads} * p.layer.head_dim; }
  __device__ int64_t b_stride() const { return int64_t{p.layer.groups} * kStateDim; }
  __device__ int64_t slot(int j) const { return int64_t{row} * p.window + j; }
  /// x of record j of `t` and the token behind them.
  __device__ const Act* x_of(int j, int t) const {
    return j == t ? static_cast<const Act*>(p.step.x) + row * x_stride()
                  : static_cast<const Act*>(p.step.ring_x) + slot(j) * x_stride();
  }

  /// Begins to copy the records of B, C, steps, decays and skips.
  __device__ void copy_inputs(const Mamba2UnitLayout& at, int t, std::byte* to) const {
    const int tid = threadIdx.x, threads = blockDim.x, heads = p.unit_heads, all = p.layer.heads;
    const int64_t own = row * b_stride() + group * kStateDim;
    const Act* own_b = static_cast<const Act*>(p.step.b) + own;
    const Act* ring_b =
        static_cast<const Act*>(p.step.ring_b) + slot(0) * b_stride() + group * kStateDim;
    for (int i = tid; i < (t + 1) * kChunks; i += threads) {
      const int j = i / kChunks;
      copy_async(to + at.b + 16 * i,
                 (j == t ? own_b : ring_b + j * b_stride()) + i % kChunks * kEach);
    }
    for (int i = tid; i < kChunks; i += threads)
      copy_async(to + at.c + 16 * i, static_cast<const Act*>(p.step.c) + own + i * kEach);
    const float* own_dt = p.step.dt + int64_t{row} * all + head0;
    const float* ring_dt = p.step.ring_dt + slot(0) * all + head0;
    for (int i = tid; i < (t + 1) * heads; i += threads) {
      const int j = i / heads;
      copy_word(to + at.dt + 4 * i, (j == t ? own_dt : ring_dt + int64_t{j} * all) + i % heads);
    }
    for (int h = tid; h < heads; h += threads) {
      copy_word(to + at.decay + 4 * h, p.layer.decay_log2 + head0 + h);
      if (p.layer.skip) copy_word(to + at.skip + 4 * h, p.layer.skip + head0 + h);
    }
  }

  /// With `append` the token's B and step go to the ring. Makes the weights of all records,
  /// (2^D dt) (B . C) or for a fold 2^D dt, and of the checkpoint, from inputs that have come; ends
  /// with a barrier. c: the thread's columns 16 m + 4 (thread % 4) of C.
  __device__ void prepare(const Mamba2UnitLayout& at, int t, bool append, bool fold,
                          const std::byte* inputs, const float4 (&c)[kStateDim / 16],
                          std::byte* shared) const {
    const int tid = threadIdx.x, threads = blockDim.x, part = tid & 3, heads = p.unit_heads;
    const Act* bs = reinterpret_cast<const Act*>(inputs + at.b);
    const float* dts = reinterpret_cast<const float*>(inputs + at.dt);
    const float* decays = reinterpret_cast<const float*>(inputs + at.decay);
    float* dots = reinterpret_cast<float*>(shared + at.dots);
    float* weights = reinterpret_cast<float*>(shared + at.weights);
    if (append) {
      for (int h = tid; h < heads; h += threads)
        p.step.ring_dt[slot(t) * p.layer.heads + head0 + h] = dts[t * heads + h];
      if (head0 % (p.layer.heads / p.layer.groups) == 0) {
        Act* to = static_cast<Act*>(p.step.ring_b) + slot(t) * b_stride() + group * kStateDim;
        for (int i = tid; i < kChunks; i += threads) {
          *reinterpret_cast<uint4*>(to + i * kEach) =
              *reinterpret_cast<const uint4*>(bs + t * kStateDim + i * kEach);
        }
      }
    }
    if (!fold) {
      // B_j . C_t, four threads a record.
      for (int base = 0; base <= t; base += threads / 4) {
        const int record = base + tid / 4, j = min(record, t);
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int m = 0; m < kStateDim / 16; ++m)
          sum = fma4(four(bs + j * kStateDim + 16 * m + 4 * part), c[m], sum);
        const float product = sum_of_lanes(sum);
        if (record <= t && part == 0) dots[j] = product;
      }
      __syncthreads();
    }
    for (int i = tid; i < (t + 2) * heads; i += threads) {
      const int j = i / heads, h = i % heads;
      const bool carry = j == t + 1;
      float exponent = 0.0f;
      for (int k = carry ? 0 : j + 1; k <= t; ++k)
        exponent = exponent + dts[k * heads + h] * decays[h];
      float weight = exp2_ordered(exponent);
      if (!carry) weight = weight * dts[j * heads + h];
      if (!carry && !fold) weight = weight * dots[j];
      weights[h * at.weight_row + (carry ? p.window : j)] = weight;
    }
    __syncthreads();
  }
};

}  // namespace replayeval
