// What the decode kernels of GDN share that work on units (gdn_decode_fp32.cu,
// gdn_decode_nvfp4.cu, gdn_decode_few.cu, gdn_decode_flush.cu): what a unit, the value heads of one
// key head of one row, needs beside checkpoints and corrections. Its keys are normalised and
// multiplied once.
#pragma once

#include "kernels/decode_tiles.cuh"
#include "kernels/gdn_block.cuh"

namespace replayeval {

struct GdnUnits {
  GdnLayer layer;
  DecodeRows rows;
  GdnDecodeStep step;
  float query_scale;
  RecordType ring_u, beta;
  int window;
  Divisor heads;  // value heads of a key head
};

/// Shared memory in bytes.
struct GdnUnitLayout {
  int k_row, raw_row;  // floats, activations
  // Of a unit, twice. Of a head: records, then the checkpoint's.
  int key, query, key_weights, query_weights, fold_weights, beta, scale, unit;
  int raw, decay, keys, dots, end;

  __host__ __device__ GdnUnitLayout(int key_dim, int window, int heads, int act_bytes) {
    k_row = key_dim + 4;
    raw_row = key_dim + 16 / act_bytes;
    int at = 0;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    key = take(4 * k_row);
    query = take(4 * k_row);
    key_weights = take(4 * heads * (window + 1));
    query_weights = take(4 * heads * (window + 1));
    fold_weights = take(4 * heads * window);
    beta = take(4 * heads);
    scale = take(4 * heads);
    unit = at;
    at *= 2;
    raw = take((window + 1) * raw_row * act_bytes);  // keys, query
    decay = take(4 * (window + 1) * heads);          // of the records, beta
    keys = take(4 * window * k_row);
    dots = take(8 * window);
    end = at;
  }
};

/// A unit, key head `part` of a row with t records in its ring.
template <class Act, int kKeyDim>
struct GdnUnit {
  static constexpr int kEach = 16 / sizeof(Act), kKeyChunks = kKeyDim / kEach, kN16 = kKeyDim / 16;
  const GdnUnits& p;
  int row, key_head, t, head0;

  __device__ GdnUnit(const GdnUnits& units, const TileRun& run)
      : p(units), row(run.row), key_head(run.part), t(run.t), head0(run.part * units.heads) {}
  __device__ int64_t k_stride() const { return int64_t{p.layer.key_heads} * kKeyDim; }
  __device__ int64_t v_stride() const { return int64_t{p.layer.value_heads} * p.layer.value_dim; }
  __device__ int64_t slot(int j) const { return int64_t{row} * p.window + j; }
  /// First value of the unit's heads in entry `index` of arrays such as v, o (rows) or the ring's v
  /// and u (slots).
  __device__ int64_t value_of(int64_t index) const {
    return index * v_stride() + head0 * p.layer.value_dim;
  }

  /// Begins to copy raw keys and query, decays and beta.
  template <class Team>
  __device__ void copy_inputs(const GdnUnitLayout& at, std::byte* shared) const {
    const int tid = Team::rank(), threads = Team::size();
    const Divisor heads = p.heads;
    const int64_t slot = this->slot(0), own = row * k_stride() + key_head * kKeyDim;
    const Act *key = static_cast<const Act*>(p.step.k) + own,
              *query = static_cast<const Act*>(p.step.q) + own,
              *ring_k =
                  static_cast<const Act*>(p.step.ring_k) + slot * k_stride() + key_head * kKeyDim;
    // Of the records in the ring, of the token, and what else lies behind them.
    const auto of = [&](int j, const auto* ring, int64_t stride, const auto* own,
                        const auto* last) {
      return j < t ? ring + j * stride : j == t ? own : last;
    };
#pragma unroll 1
    for (int i = tid; i < (t + 2) * kKeyChunks; i += threads) {
      const int j = i / kKeyChunks;
      copy_async(shared + at.raw + 16 * (i + j),
                 of(j, ring_k, k_stride(), key, query) + i % kKeyChunks * kEach);
    }
    const int64_t first = int64_t{row} * p.layer.value_heads + head0;
    const float *decay = p.step.decay_log2 + first, *beta = p.step.beta + first,
                *ring_decay = p.step.ring_decay + slot * p.layer.value_heads + head0;
#pragma unroll 1
    for (int i = tid; i < (t + 2) * heads; i += threads) {
      const int j = i / heads;
      copy_word(shared + at.decay + 4 * i,
                of(j, ring_decay, p.layer.value_heads, decay, beta) + (i - j * heads));
    }
  }

  static __device__ __forceinline__ float norm_factor(float squares, float scale) {
    return scale / sqrtf(squares + 1e-6f);
  }
  /// Of a row of keys or queries the thread's elements, part + 16 m with part = threadIdx.x % 16,
  /// normalised and times `scale`. Sixteen threads have a row; the whole warp takes part.
  static __device__ __forceinline__ void normalise(const Act* x, float scale,
                                                   float (&value)[kN16]) {
    const int part = threadIdx.x & 15;
    float squares = 0.0f;
#pragma unroll
    for (int m = 0; m < kN16; ++m) value[m] = to_float(x[part + 16 * m]);
#pragma unroll
    for (int m = 0; m < kN16; ++m) squares = __fmaf_rn(value[m], value[m], squares);
#pragma unroll
    for (int d = 8; d > 0; d >>= 1) squares = squares + __shfl_xor_sync(0xFFFFFFFFu, squares, d);
    const float factor = norm_factor(squares, scale);
#pragma unroll
    for (int m = 0; m < kN16; ++m) value[m] = value[m] * factor;
  }

  /// The same by one warp with two threads a row, 16 apart, that have every second eight elements
  /// of it: from `x` to `to`, the first of them; `to` may be null.
  static __device__ __forceinline__ void normalise_halves(const Act* x, float scale, float* to) {
    float4 low, high, low_sum = make_float4(0, 0, 0, 0), high_sum = low_sum;
#pragma unroll 2
    for (int m = 0; m < kN16; ++m) {
      load_eight(x + 16 * m, &low, &high);
      low_sum = fma4(low, low, low_sum);
      high_sum = fma4(high, high, high_sum);
    }
    // In the order of normalise: parts 8, 4, 2 apart, then neighbours.
    const auto both = [](float sum) { return sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 16); };
    const float squares =
        ((both(low_sum.x) + both(high_sum.x)) + (both(low_sum.z) + both(high_sum.z))) +
        ((both(low_sum.y) + both(high_sum.y)) + (both(low_sum.w) + both(high_sum.w)));
    const float factor = norm_factor(squares, scale);
    if (to == nullptr) return;
#pragma unroll 2
    for (int m = 0; m < kN16; ++m) {
      load_eight(x + 16 * m, &low, &high);
      store4(to + 16 * m,
             make_float4(low.x * factor, low.y * factor, low.z * factor, low.w * factor));
      store4(to + 16 * m + 4,
             make_float4(high.x * factor, high.y * factor, high.z * factor, high.w * factor));
    }
  }

  /// With `append` the token's k, decay and beta go to the ring. Makes normalised keys and query,
  /// and of every record the negative weight of its u in this token's u, its weight in the output
  /// and its decay, from inputs that have come; ends with the team's barrier.
  template <class Team>
  __device__ void prepare(const GdnUnitLayout& at, bool append, std::byte* unit,
                          std::byte* shared) const {
    const int tid = Team::rank(), threads = Team::size();
    const Divisor heads = p.heads;
    const Act* raw = reinterpret_cast<const Act*>(shared + at.raw);
    const float* decays = reinterpret_cast<const float*>(shared + at.decay);
    float* keys = reinterpret_cast<float*>(shared + at.keys);
    float* dots = reinterpret_cast<float*>(shared + at.dots);
    float* key = reinterpret_cast<float*>(unit + at.key);
    float* query = reinterpret_cast<float*>(unit + at.query);
    float* betas = reinterpret_cast<float*>(unit + at.beta);
    float* key_weights = reinterpret_cast<float*>(unit + at.key_weights);
    float* query_weights = reinterpret_cast<float*>(unit + at.query_weights);
    float* fold_weights = reinterpret_cast<float*>(unit + at.fold_weights);
#pragma unroll 1
    for (int h = tid; h < heads; h += threads) {
      const float beta = decays[(t + 1) * heads + h];
      betas[h] = beta;
      if (append) {
        const int64_t to = slot(t) * p.layer.value_heads + head0 + h;
        p.step.ring_decay[to] = decays[t * heads + h];
        p.step.ring_beta[to] = beta;
      }
    }
    if (append) {
      Act* to = static_cast<Act*>(p.step.ring_k) + slot(t) * k_stride() + key_head * kKeyDim;
#pragma unroll 1
      for (int i = tid; i < kKeyChunks; i += threads) {
        *reinterpret_cast<uint4*>(to + i * kEach) =
            *reinterpret_cast<const uint4*>(raw + t * at.raw_row + i * kEach);
      }
    }
    // Normalised keys of the window and, as the last row, the query.
    if constexpr (Team::kIsWarp) {
#pragma unroll 1
      for (int base = 0; base < t + 2; base += 16) {
        const int i = base + (tid & 15), j = min(i, t + 1), part = tid >> 4 << 3;
        const Act* x = raw + j * at.raw_row + part;
        float* to = i > t + 1 ? nullptr : (j <= t ? keys + j * at.k_row : query) + part;
        normalise_halves(x, j <= t ? 1.0f : p.query_scale, to);
      }
    } else {
#pragma unroll 1
      for (int base = 0; base < t + 2; base += threads / 16) {
        const int part = tid & 15, i = base + (tid >> 4), j = min(i, t + 1);
        float value[kN16];
        normalise(raw + j * at.raw_row, j <= t ? 1.0f : p.query_scale, value);
        if (i > t + 1) continue;
        float* to = j <= t ? keys + j * at.k_row : query;
#pragma unroll
        for (int m = 0; m < kN16; ++m) to[part + 16 * m] = value[m];
      }
    }
    Team::meet();
#pragma unroll 1
    for (int i = tid; i < kKeyDim / 4; i += threads)
      store4(key + 4 * i, load4(keys + t * at.k_row + 4 * i));
    // k_t . k_j and q_t . k_j, one chain a thread, by the first warps; decays by the others.
    const int records = (t + 16) / 16, dot_threads = 32 * records < threads ? 32 * records : 0;
#pragma unroll 1
    for (int i = tid; i < 32 * records; i += threads) {
      const int j = i / 32 * 16 + (i & 15), side = i >> 4 & 1;
      const float *a = side == 1 ? query : keys + t * at.k_row, *b = keys + min(j, t) * at.k_row;
      float sum = 0.0f;
#pragma unroll 4
      for (int n = 0; n < kKeyDim; n += 4) sum = chain(load4(a + n), load4(b + n), sum);
      if (j <= t) dots[side * p.window + j] = sum;
    }
#pragma unroll 1
    for (int i = tid < dot_threads ? (t + 2) * heads : tid - dot_threads; i < (t + 2) * heads;
         i += threads - dot_threads) {
      const int j = i / heads, h = i - j * heads;
      float exponent = 0.0f;
#pragma unroll 2
      for (int k = j == t + 1 ? 0 : j + 1; k <= t; ++k) exponent = exponent + decays[k * heads + h];
      const float weight = exp2_ordered(exponent);
      if (j <= t) {
        fold_weights[h * p.window + j] = weight;
      } else {
        key_weights[h * (p.window + 1) + p.window] = -weight;
        query_weights[h * (p.window + 1) + p.window] = weight;
      }
    }
    Team::meet();
#pragma unroll 1
    for (int i = tid; i < (t + 1) * heads; i += threads) {
      const int j = i / heads, h = i - j * heads;
      const float weight = fold_weights[h * p.window + j];
      key_weights[h * (p.window + 1) + j] = -(weight * dots[j]);
      query_weights[h * (p.window + 1) + j] = weight * dots[p.window + j];
    }
    Team::meet();
  }
  /// The warp that prepares, the block's last one: what a block needs for all its runs, once the
  /// whole block has prepared the first one. `folds`: rows that flush are folded, which reads the
  /// keys of the window where they were prepared. `scales(unit, place)` adds what else a unit
  /// needs, `finish(run)` comes when all else is there.
  template <class Scales, class Finish>
  static __device__ void prepare_runs(const GdnUnits& units, const GdnUnitLayout& at, bool folds,
                                      TileRuns& runs, const PreparedPlaces& prepared,
                                      std::byte* shared, Scales&& scales, Finish&& finish) {
#pragma unroll 1
    for (int run = 0;;) {
      finish(run);
      prepared.fill(run);
      const bool fold = folds && runs.now.t + 1 == units.window;
      runs.move();
      if (!runs.now.real()) return;
      const GdnUnit unit(units, runs.now);
      unit.template copy_inputs<Team<1>>(at, shared);
      ++run;
      prepared.wait_emptied(fold ? run - 1 : run - 2);
      std::byte* place = shared + (run & 1) * at.unit;
      scales(unit, place);
      finish_copies();
      Team<1>::meet();
      unit.template prepare<Team<1>>(at, unit.t + 1 < units.window, place, shared);
    }
  }
  __device__ float rounded_beta(float beta) const {
    return p.beta == RecordType::bf16 ? round_value(DotType::bf16, beta) : beta;
  }
  /// Begins to copy the token's v of kRows rows, from `first` on.
  template <int kRows>
  __device__ void copy_v(int64_t first, std::byte* to) const {
    const int lane = threadIdx.x & 31;
    static_assert(kRows / kEach <= 32);
    if (lane < kRows / kEach) {
      copy_async_of_line(to + 16 * lane, static_cast<const Act*>(p.step.v) + row * v_stride() +
                                             first + lane * kEach);
    }
  }
  /// Begins to copy the corrections of the ring's records of kRows rows, from `first` of a record's
  /// on, to [records, kRows].
  template <int kRows>
  __device__ void copy_corrections(int64_t first, std::byte* to) const {
    const int bytes = p.ring_u == RecordType::bf16 ? 2 : 4, chunks = kRows * bytes / 16;
    const unsigned stride = static_cast<unsigned>(p.layer.value_heads * p.layer.value_dim * bytes);
    const int shift = __popc(chunks - 1), lane = threadIdx.x & 31;
    const std::byte* from =
        static_cast<const std::byte*>(p.step.ring_u) + first * bytes +
        uint64_t{static_cast<unsigned>(row * p.window + (lane >> shift))} * stride +
        16 * (lane & (chunks - 1));
    to += 16 * lane;
#pragma unroll 2
    for (int j = lane >> shift; j < t; j += 32 >> shift) {
      copy_async_of_line(to, from);
      to += 16 * 32;
      from += uint64_t{32u >> shift} * stride;
    }
  }
};

}  // namespace replayeval
