// What the decode kernels of Mamba-2 share that work on units (mamba2_decode_fp32.cu,
// mamba2_decode_nvfp4.cu, mamba2_decode_few.cu): what a unit, some heads of a group of one row,
// needs beside checkpoints.
#pragma once

#include "kernels/decode_tiles.cuh"

namespace replayeval {

struct Mamba2Units {
  Mamba2Layer layer;
  DecodeRows rows;
  Mamba2DecodeStep step;
  int window;
  Divisor unit_heads, group_heads;
};

/// Shared memory in bytes.
struct Mamba2UnitLayout {
  int weight_row;  // weights of a head: records, the checkpoint's; whole float4
  int b, c, dt, decay, skip, scale, weights, unit;  // of a unit, twice
  int dots, end;

  /// `fold`: with room for the records' B.
  __host__ __device__ Mamba2UnitLayout(int state_dim, int window, int heads, bool fold) {
    weight_row = (window + 4) / 4 * 4;
    int at = 0;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    b = take(fold ? 4 * window * state_dim : 0);
    c = take(4 * state_dim);
    dt = take(4 * window * heads);
    decay = take(4 * heads);
    skip = take(4 * heads);
    scale = take(4 * heads);
    weights = take(4 * heads * weight_row);
    unit = at;
    at *= 2;
    dots = take(4 * window);
    end = at;
  }
};

/// y + sum_{j <= t} weight_j x_j, x_j at x[j * kStride]; both may be read up to a multiple of 4.
template <int kStride, class Act>
__device__ __forceinline__ float add_records(const float* weight, const Act* x, int t, float y) {
#pragma unroll 2
  for (int j = 0; j <= t; j += 4) {
    const float4 w = load4(weight + j);
    const float x0 = to_float(x[j * kStride]), x1 = to_float(x[(j + 1) * kStride]),
                x2 = to_float(x[(j + 2) * kStride]), x3 = to_float(x[(j + 3) * kStride]);
    y = __fmaf_rn(w.x, x0, y);
    if (j + 1 <= t) y = __fmaf_rn(w.y, x1, y);
    if (j + 2 <= t) y = __fmaf_rn(w.z, x2, y);
    if (j + 3 <= t) y = __fmaf_rn(w.w, x3, y);
  }
  return y;
}

/// A unit, part `part` of a row with t records in its ring.
template <class Act, int kStateDim>
struct Mamba2Unit {
  static constexpr int kEach = 16 / sizeof(Act), kChunks = kStateDim / kEach;
  const Mamba2Units& p;
  int row, t, head0, group;

  __device__ Mamba2Unit(const Mamba2Units& units, const TileRun& run)
      : p(units), row(run.row), t(run.t) {
    head0 = run.part * p.unit_heads;
    group = head0 / p.group_heads;
  }
  __device__ int64_t x_stride() const { return int64_t{p.layer.heads} * p.layer.head_dim; }
  __device__ int64_t b_stride() const { return int64_t{p.layer.groups} * kStateDim; }
  __device__ int64_t slot(int j) const { return int64_t{row} * p.window + j; }
  /// x of record j; the token is record t.
  __device__ const Act* x_of(int j) const {
    return j == t ? static_cast<const Act*>(p.step.x) + row * x_stride()
                  : static_cast<const Act*>(p.step.ring_x) + slot(j) * x_stride();
  }
  __device__ const Act* b_of(int j) const {
    return (j == t ? static_cast<const Act*>(p.step.b) + row * b_stride()
                   : static_cast<const Act*>(p.step.ring_b) + slot(j) * b_stride()) +
           group * kStateDim;
  }

  __device__ const Act* c() const {
    return static_cast<const Act*>(p.step.c) + row * b_stride() + group * kStateDim;
  }

  /// Has B of the records and C come to the second-level cache.
  template <class Team>
  __device__ void fetch() const {
    constexpr int kLine = 128 / sizeof(Act), kLines = (kStateDim + kLine - 1) / kLine;
#pragma unroll 1
    for (int i = Team::rank(); i < (t + 2) * kLines; i += Team::size()) {
      const int j = i / kLines;
      asm volatile("prefetch.global.L2 [%0];" ::"l"((j > t ? c() : b_of(j)) + i % kLines * kLine));
    }
  }
  /// Begins to copy steps, decays and skips.
  template <class Team>
  __device__ void copy_inputs(const Mamba2UnitLayout& at, std::byte* unit) const {
    const int tid = Team::rank(), threads = Team::size();
    const Divisor heads = p.unit_heads;
    const float* own_dt = p.step.dt + int64_t{row} * p.layer.heads + head0;
    const float* ring_dt = p.step.ring_dt + slot(0) * p.layer.heads + head0;
#pragma unroll 1
    for (int i = tid; i < (t + 1) * heads; i += threads) {
      const int j = i / heads, h = i - j * heads;
      copy_word(unit + at.dt + 4 * i, (j == t ? own_dt : ring_dt + int64_t{j} * p.layer.heads) + h);
    }
#pragma unroll 1
    for (int h = tid; h < heads; h += threads) {
      copy_word(unit + at.decay + 4 * h, p.layer.decay_log2 + head0 + h);
      if (p.layer.skip) copy_word(unit + at.skip + 4 * h, p.layer.skip + head0 + h);
    }
  }

  /// Of all records the weights, (2^D dt) (B . C), or 2^D dt where a flush `folds` them, and that
  /// of the checkpoint; C, for a fold B, and skips. The token's B and step go to the ring unless it
  /// is flushed. wait() waits for the inputs. Ends with the team's barrier.
  template <class Team, class Wait>
  __device__ void prepare(const Mamba2UnitLayout& at, bool folds, std::byte* unit, float* dots,
                          Wait&& wait) const {
    const bool append = t + 1 < p.window, fold = folds && !append;
    const int tid = Team::rank(), threads = Team::size(), part = tid & 3;
    const Divisor heads = p.unit_heads;
    const Act* act_c = c();
    const float* dts = reinterpret_cast<const float*>(unit + at.dt);
    const float* decays = reinterpret_cast<const float*>(unit + at.decay);
    float* weights = reinterpret_cast<float*>(unit + at.weights);
    float* ring_dt = p.step.ring_dt + slot(0) * p.layer.heads + head0;
    if (fold) {
      float* b = reinterpret_cast<float*>(unit + at.b);
#pragma unroll 4
      for (int i = tid; i < (t + 1) * (kStateDim / 4); i += threads) {
        const int j = i / (kStateDim / 4), column = i % (kStateDim / 4) * 4;
        store4(b + 4 * i, four(b_of(j) + column));
      }
    } else {
      // B_j . C_t, four threads a record.
#pragma unroll 1
      for (int base = 0; base <= t; base += threads / 4) {
        const int record = base + tid / 4, j = min(record, t);
        const Act* b = b_of(j);
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int m = 0; m < kStateDim / 16; ++m)
          sum = fma4(four(b + 16 * m + 4 * part), four(act_c + 16 * m + 4 * part), sum);
        const float product = sum_of_lanes(sum);
        if (record <= t && part == 0) dots[j] = product;
      }
    }
#pragma unroll 1
    for (int i = tid; i < kStateDim / 4; i += threads)
      store4(reinterpret_cast<float*>(unit + at.c) + 4 * i, four(act_c + 4 * i));
    if (append && head0 % p.group_heads == 0) {
      Act* to = static_cast<Act*>(p.step.ring_b) + slot(t) * b_stride() + group * kStateDim;
#pragma unroll 1
      for (int i = tid; i < kChunks; i += threads) {
        *reinterpret_cast<uint4*>(to + i * kEach) =
            *reinterpret_cast<const uint4*>(b_of(t) + i * kEach);
      }
    }
    wait();
    Team::meet();
    if (append) {
#pragma unroll 1
      for (int h = tid; h < heads; h += threads)
        ring_dt[int64_t{t} * p.layer.heads + h] = dts[t * heads + h];
    }
#pragma unroll 1
    for (int i = tid; i < (t + 2) * heads; i += threads) {
      const int j = i / heads, h = i - j * heads;
      const bool carry = j == t + 1;
      const float decay = decays[h];
      float exponent = 0.0f;
#pragma unroll 2
      for (int k = carry ? 0 : j + 1; k <= t; ++k) exponent = exponent + dts[k * heads + h] * decay;
      float weight = exp2_ordered(exponent);
      if (!carry) weight = weight * dts[j * heads + h];
      if (!carry && !fold) weight = weight * dots[j];
      weights[h * at.weight_row + (carry ? p.window : j)] = weight;
    }
    Team::meet();
  }
  /// The warp that prepares, the block's last one: what a block needs for all its runs, once the
  /// whole block has prepared the first one. `copy(unit, run)` begins to copy what else a unit
  /// needs, `finish(run)` comes when all is there.
  template <class Copy, class Finish>
  static __device__ void prepare_runs(const Mamba2Units& units, const Mamba2UnitLayout& at,
                                      bool folds, TileRuns& runs, const PreparedPlaces& prepared,
                                      std::byte* shared, float* dots, Copy&& copy,
                                      Finish&& finish) {
#pragma unroll 1
    for (int run = 0;;) {
      finish(run);
      prepared.fill(run);
      runs.move();
      if (!runs.now.real()) return;
      const Mamba2Unit unit(units, runs.now);
      unit.template fetch<Team<1>>();
      ++run;
      prepared.wait_emptied(run - 2);
      std::byte* place = shared + (run & 1) * at.unit;
      copy(unit, run);
      unit.template copy_inputs<Team<1>>(at, place);
      unit.template prepare<Team<1>>(at, folds, place, dots, finish_copies);
    }
  }
};

}  // namespace replayeval
