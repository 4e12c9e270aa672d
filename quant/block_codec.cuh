// Encoding and decoding of one head by the threads of one block: the device's interpreter of a
// FormatDescriptor, with the numbers and the order of operations of quantize_reference.cc, so that
// the bits are the host's. A matrix is rounded where it lies: afterwards it holds what its codes
// decode to, so that a kernel that carries a state through many flushes never reads the codes back.
#pragma once

#include <cuda_runtime.h>

#include "quant/packed_layout.h"
#include "quant/quantize.h"
#include "quant/random.h"

namespace replayeval {

/// x(r, c) = x[r * row_stride + c * column_stride]; shared or global memory.
struct MatrixView {
  float* x;
  int row_stride;
  int column_stride;
  __device__ float& at(int r, int c) const { return x[r * row_stride + c * column_stride]; }
};

/// A format as the device sees it, in device memory.
struct DeviceFormat {
  FormatDescriptor descriptor;
  int residual = -1;  // index of the residual's format in the same table
  int fixed_first =
      -1;  // Span::fixed: where the scales of the call's heads begin in EncodeCall::fixed_scales
};

/// Shared memory of the functions below.
struct BlockCodecMemory {
  float partial[32];
  float head_amax;
  uint32_t seen;
  float factor;       // of the Hadamard transform
  float row_amax[1];  // [head_dim]; the caller provides block_codec_bytes
};
inline __host__ __device__ size_t block_codec_bytes(int head_dim) {
  return (sizeof(BlockCodecMemory) + sizeof(float) * static_cast<size_t>(head_dim) + 15) / 16 * 16;
}

/// Counts of one thread.
struct ThreadCounts {
  uint32_t non_finite = 0, saturated = 0, clipped = 0, vanished = 0;

  __device__ void add(const ThreadCounts& c) {
    non_finite += c.non_finite;
    saturated += c.saturated;
    clipped += c.clipped;
    vanished += c.vanished;
  }
};

/// body(element) for the thread's share of the matrix: warps take lines along the contiguous axis.
template <class Body>
__device__ inline void each_element(const MatrixView& m, int head_dim, int state_dim, Body&& body) {
  const bool by_row = m.column_stride == 1;
  const int lines = by_row ? head_dim : state_dim, length = by_row ? state_dim : head_dim;
  const int step = by_row ? m.row_stride : m.column_stride;
  for (int line = threadIdx.x >> 5; line < lines; line += blockDim.x >> 5) {
    float* x = m.x + line * step;
#pragma unroll 4
    for (int i = threadIdx.x & 31; i < length; i += 32) body(x[i]);
  }
}

namespace block_codec {

__device__ inline float warp_max(float v) {
  for (int d = 16; d > 0; d >>= 1) v = larger(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
  return v;
}

/// Largest value over the block, to every thread. Values are not negative.
__device__ inline float block_max(float v, float* partial) {
  v = warp_max(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = v;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x + 31) / 32;
  float result = 0;
  for (int i = 0; i < warps; ++i) result = larger(result, partial[i]);
  return result;
}

// ---- Elements. A rule is what encode_element and decode_element do for one kind, with the
// constants of the common formats known when the kernel is compiled.

struct Fp32Rule {
  static constexpr int kCodeSize = 32;
  __device__ int code_size() const { return 32; }
  __device__ uint32_t encode(float y, bool, uint32_t) const { return float_bits(y); }
  __device__ float decode(uint32_t code) const { return bits_float(code); }
};

template <FloatFormat kFormat>
struct KnownFloatRule {
  static constexpr int kCodeSize = storage_bits(kFormat.bits());
  __device__ int code_size() const { return kCodeSize; }
  __device__ uint32_t encode(float y, bool stochastic, uint32_t random) const {
    constexpr FloatFormat f = kFormat;
    return stochastic
               ? encode_float_stochastic(f, y, random >> (32 - f.random_bits), f.random_bits, true)
               : encode_float(f, y, true);
  }
  __device__ float decode(uint32_t code) const {
    constexpr FloatFormat f = kFormat;
    return decode_float(f, code);
  }
};

/// Any element, read from the descriptor.
struct DescribedRule {
  const FormatDescriptor* d;
  int size;
  __device__ explicit DescribedRule(const FormatDescriptor& descriptor)
      : d(&descriptor), size(storage_bits(descriptor.code_bits)) {}
  __device__ int code_size() const { return size; }
  __device__ uint32_t encode(float y, bool stochastic, uint32_t random) const {
    return encode_element(*d, y, stochastic, random);
  }
  __device__ float decode(uint32_t code) const { return decode_element(*d, code); }
};

/// A float that is no built-in: its constants in registers.
struct FloatRule {
  FloatFormat f;
  int random_bits, size;
  bool saturate;
  __device__ explicit FloatRule(const FormatDescriptor& d)
      : f(d.number),
        random_bits(d.random_bits),
        size(storage_bits(d.code_bits)),
        saturate(d.saturate) {}
  __device__ int code_size() const { return size; }
  __device__ uint32_t encode(float y, bool stochastic, uint32_t random) const {
    return stochastic
               ? encode_float_stochastic(f, y, random >> (32 - random_bits), random_bits, saturate)
               : encode_float(f, y, saturate);
  }
  __device__ float decode(uint32_t code) const { return decode_float(f, code); }
};

/// Neighbours of a list so far apart and not further: quotient_past is exact.
constexpr float kLeastGap = 0x1p-60f, kMostGap = 0x1p60f;

constexpr float kRandomUnit = 0x1p-24f;

/// For q = a / (2^24 b) in FP32, b not 0, and r of 24 bits: has the sign of b exactly when
/// floor(q 2^24) + r >= 2^24. That is q >= rho = 1 - r 2^-24; with 2^k the power below rho, the
/// numbers that FP32 rounds to rho or more begin at rho - 2^(k - 24), no quotient of two FP32
/// numbers itself. a - 2^24 rho b is exact where it is as small as 2^k b.
__device__ __forceinline__ float quotient_past(float a, float b, uint32_t r) {
  const float minus_rho = static_cast<float>(static_cast<int32_t>(r | 0xFF000000u));  // 2^24 times
  constexpr uint32_t kLess = (24u << 23) + 1u;
  const float power = bits_float((float_bits(minus_rho) - kLess) & 0x7F800000u);  // 2^k
  return __fmaf_rn(power, b, __fmaf_rn(minus_rho, b, a));
}

/// A list of values: encode_value and encode_value_stochastic searching by halves.
struct ValuesRule {
  const ValueList* list;
  int size, half;
  __device__ explicit ValuesRule(const FormatDescriptor& d)
      : list(&d.list), size(storage_bits(d.code_bits)), half(1) {
    while (2 * half < d.list.count) half *= 2;
  }
  __device__ int code_size() const { return size; }
  /// Number of dividers not above y.
  __device__ __forceinline__ int count_below(const float* dividers, float y) const {
    int index = 0;
    for (int step = half; step > 0; step >>= 1) index += dividers[index + step - 1] <= y ? step : 0;
    return index;
  }
  __device__ uint32_t encode(float y, bool stochastic, uint32_t random) const {
    if (is_nan(y)) return list->zero_code;
    if (!stochastic)
      return static_cast<uint32_t>(min(count_below(list->thresholds, y), list->count - 1));
    if (list->count < 2) return 0u;
    // Past the last value the list repeats it.
    const int left = min(count_below(list->values + 1, y), list->count - 2);
    const float a = list->values[left], b = list->values[left + 1];
    if (!(b - a >= kLeastGap && b - a <= kMostGap))
      return encode_value_stochastic(*list, y, random >> 8);
    const bool negative = y < 0;
    const bool up =
        quotient_past(negative ? b - y : y - a, (b - a) * kRandomUnit, random >> 8) >= 0;
    return static_cast<uint32_t>(left) + (up != negative ? 1u : 0u);
  }
  __device__ float decode(uint32_t code) const {
    return list->values[code < kMaxValues ? code : kMaxValues - 1];
  }
};

/// Values of codes of a signed float of up to 16 bits: a magnitude shifted to where FP32 has its
/// exponent is 2^(bias - 127) of it, subnormals included.
struct ShiftedFloat {
  uint32_t mask, most, infinity;
  int shift, sign_shift;
  float scale;

  static __host__ __device__ bool takes(const FormatDescriptor& d) {
    return d.element == ElementKind::floating && d.number.has_sign && d.number.bias >= 0 &&
           d.number.bias <= 127;
  }
  __device__ explicit ShiftedFloat(const FloatFormat& f)
      : mask((1u << f.magnitude_bits()) - 1u),
        most(f.max_code),
        infinity(f.inf_code),
        shift(23 - f.mantissa_bits),
        sign_shift(31 - f.magnitude_bits()),
        scale(power_of_two(127 - f.bias)) {}
  __device__ __forceinline__ float operator()(uint32_t code) const {
    const uint32_t size = code & mask;
    const float finite = bits_float(size << shift) * scale;
    const uint32_t special = size == infinity ? 0x7F800000u : 0x7FC00000u;
    return bits_float((size > most ? special : float_bits(finite)) |
                      (code << sign_shift & 0x80000000u));
  }
};

template <FloatFormat kFormat>
__device__ inline bool is_known(const FormatDescriptor& d) {
  constexpr FloatFormat f = kFormat;
  return d.element == ElementKind::floating && d.number == f && d.random_bits == f.random_bits &&
         d.saturate;
}

template <class Body>
__device__ inline void with_rule(const FormatDescriptor& d, Body&& body) {
  if (d.element == ElementKind::fp32) {
    body(Fp32Rule{});
  } else if (is_known<kE2m1>(d)) {
    body(KnownFloatRule<kE2m1>{});
  } else if (is_known<kFp16>(d)) {
    body(KnownFloatRule<kFp16>{});
  } else if (is_known<kE4m3>(d)) {
    body(KnownFloatRule<kE4m3>{});
  } else if (d.element == ElementKind::floating) {
    body(FloatRule(d));
  } else if (d.element == ElementKind::values) {
    body(ValuesRule(d));
  } else {
    body(DescribedRule(d));
  }
}

// ---- Codes in packed memory.

__device__ inline void store_small(std::byte* to, int size, uint32_t code) {
  for (int b = 0; b < size; ++b) to[b] = static_cast<std::byte>(code >> (8 * b));
}
__device__ inline uint32_t load_small(const std::byte* from, int size) {
  uint32_t code = 0;
  for (int b = 0; b < size; ++b) code |= static_cast<uint32_t>(from[b]) << (8 * b);
  return code;
}

/// One code; 4-bit codes into bytes that were zeroed, by any thread.
__device__ inline void store_one(std::byte* packed, int size, size_t index, uint32_t code) {
  if (size == 4) {
    atomicOr(reinterpret_cast<uint32_t*>(packed) + index / 8, (code & 15u) << (4 * (index % 8)));
  } else {
    store_small(packed + index * (size / 8), size / 8, code);
  }
}
__device__ inline uint32_t load_one(const std::byte* packed, int size, size_t index) {
  if (size == 4) {
    const uint32_t pair = static_cast<uint32_t>(packed[index / 2]);
    return index % 2 == 0 ? pair & 15u : pair >> 4;
  }
  return load_small(packed + index * (size / 8), size / 8);
}

/// Four codes of elements index .. index + 3, index a multiple of 4.
__device__ inline void store_four(std::byte* packed, int size, size_t index, const uint32_t* code) {
  if (size == 4) {
    *reinterpret_cast<uint16_t*>(packed + index / 2) = static_cast<uint16_t>(
        (code[0] & 15u) | (code[1] & 15u) << 4 | (code[2] & 15u) << 8 | code[3] << 12);
  } else if (size == 8) {
    *reinterpret_cast<uint32_t*>(packed + index) =
        (code[0] & 255u) | (code[1] & 255u) << 8 | (code[2] & 255u) << 16 | code[3] << 24;
  } else if (size == 16) {
    uint32_t* to = reinterpret_cast<uint32_t*>(packed + 2 * index);
    to[0] = (code[0] & 0xFFFFu) | code[1] << 16;
    to[1] = (code[2] & 0xFFFFu) | code[3] << 16;
  } else {
    uint32_t* to = reinterpret_cast<uint32_t*>(packed + 4 * index);
    for (int i = 0; i < 4; ++i) to[i] = code[i];
  }
}
__device__ inline void load_four(const std::byte* packed, int size, size_t index, uint32_t* code) {
  if (size == 4) {
    const uint32_t all = *reinterpret_cast<const uint16_t*>(packed + index / 2);
    for (int i = 0; i < 4; ++i) code[i] = all >> (4 * i) & 15u;
  } else if (size == 8) {
    const uint32_t all = *reinterpret_cast<const uint32_t*>(packed + index);
    for (int i = 0; i < 4; ++i) code[i] = all >> (8 * i) & 255u;
  } else if (size == 16) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(packed + 2 * index);
    for (int i = 0; i < 4; ++i) code[i] = from[i / 2] >> (16 * (i % 2)) & 0xFFFFu;
  } else {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(packed + 4 * index);
    for (int i = 0; i < 4; ++i) code[i] = from[i];
  }
}

/// x(r, c .. c + 3).
__device__ inline void get_four(const MatrixView& m, int r, int c, float* x) {
  if (m.column_stride == 1 && m.row_stride % 4 == 0) {
    const float4 v = *reinterpret_cast<const float4*>(m.x + r * m.row_stride + c);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    for (int i = 0; i < 4; ++i) x[i] = m.at(r, c + i);
  }
}
__device__ inline void put_four(const MatrixView& m, int r, int c, const float* x) {
  if (m.column_stride == 1 && m.row_stride % 4 == 0) {
    *reinterpret_cast<float4*>(m.x + r * m.row_stride + c) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    for (int i = 0; i < 4; ++i) m.at(r, c + i) = x[i];
  }
}

/// In-place orthonormal Walsh-Hadamard transform along one axis, the host's butterflies; a barrier
/// a distance.
__device__ inline void transform(const FormatDescriptor& d, int head_dim, int state_dim,
                                 MatrixView m, BlockCodecMemory* memory) {
  if (d.hadamard == Axis::none) return;
  const bool along_state = d.hadamard == Axis::state_dim;
  const int length = along_state ? state_dim : head_dim;
  const int lines = along_state ? head_dim : state_dim;
  const int size = d.hadamard_size > 0 ? d.hadamard_size : length;
  const int step = along_state ? m.column_stride : m.row_stride;
  const int line_step = along_state ? m.row_stride : m.column_stride;
  const int pairs = length / 2;
  for (int distance = 1; distance < size; distance *= 2) {
    for (int i = threadIdx.x; i < pairs * lines; i += blockDim.x) {
      const int line = i / pairs, pair = i % pairs;
      const int first = pair / distance * (2 * distance) + pair % distance;
      float* x = m.x + line * line_step + first * step;
      const float a = x[0], b = x[distance * step];
      x[0] = a + b;
      x[distance * step] = a - b;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    memory->factor = static_cast<float>(1.0 / sqrt(static_cast<double>(size)));
  }
  __syncthreads();
  const float factor = memory->factor;
  for (int i = threadIdx.x; i < length * lines; i += blockDim.x) {
    m.x[i / length * line_step + i % length * step] *= factor;
  }
  __syncthreads();
}

/// c_n = max over rows of |x|, 1 if 0, into the packed head; x becomes x / c.
__device__ inline void divide_columns(const PackedLayout& l, MatrixView m, std::byte* packed) {
  for (int c = threadIdx.x; c < l.state_dim; c += blockDim.x) {
    float scale = 0;
    for (int r = 0; r < l.head_dim; ++r) scale = larger(scale, amax_term(m.at(r, c)));
    scale = scale > 0 ? scale : 1.0f;
    reinterpret_cast<float*>(packed + l.columns)[c] = scale;
    for (int r = 0; r < l.head_dim; ++r) m.at(r, c) = m.at(r, c) / scale;
  }
  __syncthreads();
}

/// Measures, stores and subtracts the zero point of every block.
__device__ inline void subtract_zero_points(const FormatDescriptor& d, const PackedLayout& l,
                                            MatrixView m, std::byte* packed) {
  for (int block = threadIdx.x; block < l.blocks_down * l.blocks_across; block += blockDim.x) {
    const int r0 = block / l.blocks_across * l.block_rows,
              c0 = block % l.blocks_across * l.block_columns;
    float least = kFloatMax, most = -kFloatMax;
    bool any = false;
    for (int r = r0; r < r0 + l.block_rows; ++r) {
      for (int c = c0; c < c0 + l.block_columns; ++c) {
        const float x = m.at(r, c);
        if (is_nan(x)) continue;
        any = true;
        least = smaller(least, larger(x, -kFloatMax));
        most = larger(most, smaller(x, kFloatMax));
      }
    }
    const uint32_t code = any ? zero_point_code(d, least, most) : 0u;
    store_small(packed + l.zeros + static_cast<size_t>(block) * l.zero_size, l.zero_size, code);
    const float z = zero_point_value(d, code);
    for (int r = r0; r < r0 + l.block_rows; ++r) {
      for (int c = c0; c < c0 + l.block_columns; ++c) m.at(r, c) = m.at(r, c) - z;
    }
  }
  __syncthreads();
}

/// What follows the scales when a head is decoded: zero points, column scales, the transform back.
__device__ inline void undo_preparation(const FormatDescriptor& d, const PackedLayout& l,
                                        MatrixView m, const std::byte* packed,
                                        BlockCodecMemory* memory) {
  if (d.zero_point != ZeroPoint::none) {
    for (int i = threadIdx.x; i < l.head_dim * l.state_dim; i += blockDim.x) {
      const int r = i / l.state_dim, c = i % l.state_dim;
      const size_t block =
          static_cast<size_t>(r / l.block_rows) * l.blocks_across + c / l.block_columns;
      m.at(r, c) =
          m.at(r, c) +
          zero_point_value(d, load_small(packed + l.zeros + block * l.zero_size, l.zero_size));
    }
    __syncthreads();
  }
  if (d.column_scale) {
    for (int i = threadIdx.x; i < l.head_dim * l.state_dim; i += blockDim.x) {
      const int r = i / l.state_dim, c = i % l.state_dim;
      m.at(r, c) = m.at(r, c) * reinterpret_cast<const float*>(packed + l.columns)[c];
    }
    __syncthreads();
  }
  transform(d, l.head_dim, l.state_dim, m, memory);
}

/// One head to round, after preparation.
struct EncodeJob {
  const FormatDescriptor* d;
  PackedLayout l;
  MatrixView m;
  bool stochastic;
  PhiloxKey key;
  float layer_amax, fixed_scale;
  std::byte* packed;
  bool store;  // false: the codes are not wanted, only the rounded matrix
  bool round;  // false: the rounded matrix is not wanted
  BlockCodecMemory* memory;
};

__device__ inline OuterScale outer_of_row(const EncodeJob& job, int r) {
  const FormatDescriptor& d = *job.d;
  return d.span == Span::fixed   ? fixed_outer_scale(job.fixed_scale)
         : d.span == Span::layer ? outer_scale(d, job.layer_amax)
         : d.span == Span::row   ? outer_scale(d, job.memory->row_amax[r])
                                 : outer_scale(d, job.memory->head_amax);
}

/// Counts of elements, as encode_reference; what it needs of the format and the sums stay in
/// registers.
struct ElementCounter {
  float low, high;
  bool saturate, scaled, blocks;
  ThreadCounts counts;

  __device__ explicit ElementCounter(const FormatDescriptor& d)
      : low(d.clip_low),
        high(d.clip_high),
        saturate(d.saturate),
        scaled(d.scaled()),
        blocks(d.block_scale != BlockScale::none) {}
  __device__ __forceinline__ void see(float x, float y, float scale) {
    const bool finite = magnitude(x) <= kFloatMax;
    const bool vanished = blocks && scale == 0 && x != 0;
    const bool outside = (y > high || y < low) && saturate && !vanished;
    counts.non_finite += finite ? 0 : 1;
    counts.vanished += vanished && finite ? 1 : 0;
    counts.saturated += outside && (!scaled || !finite) ? 1 : 0;
    counts.clipped += outside && scaled && finite ? 1 : 0;
  }
  __device__ void add_to(ThreadCounts* to) const { to->add(counts); }
};

template <class Rule>
__device__ inline float block_error(const EncodeJob& job, const Rule& rule, const OuterScale& o,
                                    const ScaledBlock& scale, int r0, int c0, int rows,
                                    int columns) {
  const FormatDescriptor& d = *job.d;
  float error = 0;
  for (int r = r0; r < r0 + rows; ++r) {
    for (int c = c0; c < c0 + columns; ++c) {
      const float x = job.m.at(r, c);
      const float y = d.order == ScaleOrder::modelopt ? x / scale.factor : x * scale.factor;
      const float difference =
          candidate_value(d, rule.decode(rule.encode(y, false, 0)) * scale.scale, o) - x;
      error = error + (d.choose == Choose::mse ? difference * difference : magnitude(difference));
    }
  }
  return error;
}

/// A block of columns within a row for each thread in turn; columns and lengths are multiples of 4.
template <class Rule>
__device__ inline void encode_runs(const EncodeJob& job, const Rule& rule, int columns,
                                   ThreadCounts* counts) {
  const FormatDescriptor& d = *job.d;
  const PackedLayout& l = job.l;
  // Stores may alias what the job points to; copies spare reading it again for every element.
  const MatrixView matrix = job.m;
  const PhiloxKey key = job.key;
  const bool stochastic = job.stochastic, store = job.store, round = job.round;
  std::byte* const packed = job.packed;
  const int state_dim = l.state_dim, head_dim = l.head_dim;
  const bool has_outer = l.outer_count > 0;
  ElementCounter counter(d);
  const bool blocks = d.block_scale != BlockScale::none, scaled = d.scaled();
  const bool divide = d.order == ScaleOrder::modelopt && blocks;
  const int across = (state_dim + columns - 1) / columns;
  for (int unit = threadIdx.x; unit < across * head_dim; unit += blockDim.x) {
    const int r = unit % head_dim, b = unit / head_dim;
    const int c0 = b * columns, c1 = c0 + columns < state_dim ? c0 + columns : state_dim;
    const OuterScale o = outer_of_row(job, r);
    ScaledBlock scale;
    if (blocks) {
      float amax = 0;
      for (int c = c0; c < c1; c += 4) {
        float x[4];
        get_four(matrix, r, c, x);
        for (int i = 0; i < 4; ++i) amax = larger(amax, amax_term(x[i]));
      }
      scale = block_scale(d, amax, o, d.candidates[0]);
      if (d.candidate_count > 1) {
        float best_error = block_error(job, rule, o, scale, r, c0, 1, c1 - c0);
        for (int k = 1; k < d.candidate_count; ++k) {
          const ScaledBlock next = block_scale(d, amax, o, d.candidates[k]);
          const float error = block_error(job, rule, o, next, r, c0, 1, c1 - c0);
          if (error < best_error) {
            scale = next;
            best_error = error;
          }
        }
      }
      if (store) {
        store_small(
            packed + l.scales + (static_cast<size_t>(r) * l.blocks_across + b) * l.scale_size,
            l.scale_size, scale.code);
      }
    } else {
      scale = block_scale(d, 0, o, 1.0f);
    }
    for (int c = c0; c < c1; c += 4) {
      float x[4];
      uint32_t code[4];
      get_four(matrix, r, c, x);
      PhiloxWords random{};
      if (stochastic) {
        random = philox4x32<10>((static_cast<uint32_t>(c) >> 2) + (static_cast<uint32_t>(r) << 16),
                                key.counter1, key.counter2, key.counter3, key.key0, key.key1);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float y = !scaled ? x[i] : divide ? x[i] / scale.factor : x[i] * scale.factor;
        code[i] = rule.encode(y, stochastic, random.word[i]);
        counter.see(x[i], y, scale.scale);
        float value = rule.decode(code[i]);
        if (blocks) value = value * scale.scale;
        if (has_outer) value = value * o.decode;
        x[i] = value;
      }
      if (store) store_four(packed, rule.code_size(), static_cast<size_t>(r) * state_dim + c, code);
      if (round) put_four(matrix, r, c, x);
    }
  }
  counter.add_to(counts);
}

/// A block for each warp in turn, whatever its shape; without blocks, a row.
template <class Rule>
__device__ inline void encode_blocks(const EncodeJob& job, const Rule& rule, ThreadCounts* counts) {
  const FormatDescriptor& d = *job.d;
  const PackedLayout& l = job.l;
  ElementCounter counter(d);
  const bool blocks = d.block_scale != BlockScale::none, scaled = d.scaled();
  const bool divide = d.order == ScaleOrder::modelopt && blocks;
  const int rows = blocks ? l.block_rows : 1, columns = blocks ? l.block_columns : l.state_dim;
  const int across = l.state_dim / columns, count = l.head_dim / rows * across;
  const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  for (int block = threadIdx.x >> 5; block < count; block += warps) {
    const int r0 = block / across * rows, c0 = block % across * columns;
    const OuterScale o = outer_of_row(job, r0);
    ScaledBlock scale = block_scale(d, 0, o, 1.0f);
    if (blocks) {
      float amax = 0;
      for (int e = lane; e < rows * columns; e += 32) {
        amax = larger(amax, amax_term(job.m.at(r0 + e / columns, c0 + e % columns)));
      }
      amax = warp_max(amax);
      int best = 0;
      if (d.candidate_count > 1) {
        // A sum of errors has one order, so a candidate belongs to one lane.
        float error = 0;
        if (lane < d.candidate_count) {
          error = block_error(job, rule, o, block_scale(d, amax, o, d.candidates[lane]), r0, c0,
                              rows, columns);
        }
        float best_error = __shfl_sync(0xFFFFFFFFu, error, 0);
        for (int k = 1; k < d.candidate_count; ++k) {
          const float next = __shfl_sync(0xFFFFFFFFu, error, k);
          if (next < best_error) {
            best = k;
            best_error = next;
          }
        }
      }
      scale = block_scale(d, amax, o, d.candidates[best]);
      if (job.store && lane == 0) {
        store_small(job.packed + l.scales + static_cast<size_t>(block) * l.scale_size, l.scale_size,
                    scale.code);
      }
      __syncwarp();
    }
    for (int e = lane; e < rows * columns; e += 32) {
      const int r = r0 + e / columns, c = c0 + e % columns;
      const float x = job.m.at(r, c);
      const float y = !scaled ? x : divide ? x / scale.factor : x * scale.factor;
      const uint32_t code =
          rule.encode(y, job.stochastic, job.stochastic ? random_word(job.key, r, c) : 0u);
      counter.see(x, y, scale.scale);
      if (job.store)
        store_one(job.packed, rule.code_size(), static_cast<size_t>(r) * l.state_dim + c, code);
      float value = rule.decode(code);
      if (blocks) value = value * scale.scale;
      if (l.outer_count > 0) value = value * o.decode;
      if (job.round) job.m.at(r, c) = value;
    }
  }
  counter.add_to(counts);
}

/// Rounds one prepared head in place. Called by all threads of the block, the matrix visible to
/// all; ends with a barrier.
inline __device__ __noinline__ void encode_prepared(const EncodeJob& job, ThreadCounts* counts) {
  const FormatDescriptor& d = *job.d;
  const PackedLayout& l = job.l;
  const bool blocks = d.block_scale != BlockScale::none;
  const bool runs =
      l.state_dim % 4 == 0 &&
      (!blocks || (l.block_rows == 1 && l.block_columns % 4 == 0 && l.block_columns <= 64));
  if (d.span == Span::head) {
    float amax = 0;
    each_element(job.m, l.head_dim, l.state_dim,
                 [&](float x) { amax = larger(amax, amax_term(x)); });
    amax = block_max(amax, job.memory->partial);
    if (threadIdx.x == 0) job.memory->head_amax = amax;
  } else if (d.span == Span::row) {
    const int lane = threadIdx.x & 31;
    for (int r = threadIdx.x >> 5; r < l.head_dim; r += blockDim.x >> 5) {
      float amax = 0;
      for (int c = lane; c < l.state_dim; c += 32) amax = larger(amax, amax_term(job.m.at(r, c)));
      amax = warp_max(amax);
      if (lane == 0) job.memory->row_amax[r] = amax;
    }
  }
  if (job.store) {
    if (!runs && l.code_size == 4) {
      for (size_t i = threadIdx.x; i < l.scales / 4; i += blockDim.x)
        reinterpret_cast<uint32_t*>(job.packed)[i] = 0;
    }
    // Padding behind the codes, the block scales and the zero points.
    if (threadIdx.x == 0) {
      const size_t elements = static_cast<size_t>(l.head_dim) * l.state_dim;
      const size_t count = static_cast<size_t>(l.blocks_down) * l.blocks_across;
      for (size_t i = (elements * l.code_size + 7) / 8; i < l.scales; ++i)
        job.packed[i] = std::byte{0};
      for (size_t i = l.scales + count * l.scale_size; i < l.zeros; ++i)
        job.packed[i] = std::byte{0};
      for (size_t i = l.zeros + count * l.zero_size; i < l.outer; ++i) job.packed[i] = std::byte{0};
      if (l.code_size == 4 && elements % 2 != 0 && runs) job.packed[elements / 2] = std::byte{0};
    }
  }
  __syncthreads();
  if (job.store) {
    for (int i = threadIdx.x; i < l.outer_count; i += blockDim.x) {
      reinterpret_cast<float*>(job.packed + l.outer)[i] = outer_of_row(job, i).decode;
    }
  }
  if (runs) {
    with_rule(d, [&](const auto& rule) {
      encode_runs(job, rule, blocks ? l.block_columns : 16, counts);
    });
  } else {
    encode_blocks(job, DescribedRule(d), counts);
  }
  __syncthreads();
}

/// Non-finite elements of the thread's share of the matrix.
__device__ inline uint32_t non_finite_share(const PackedLayout& l, const MatrixView& m) {
  uint32_t count = 0;
  each_element(m, l.head_dim, l.state_dim,
               [&](float x) { count += magnitude(x) <= kFloatMax ? 0 : 1; });
  return count;
}

}  // namespace block_codec

/// Decodes a packed head into m. Called by all threads of the block; ends with a barrier.
inline __device__ __noinline__ void decode_block(const FormatDescriptor& d, int head_dim,
                                                 int state_dim, const std::byte* packed,
                                                 MatrixView m, BlockCodecMemory* memory) {
  using namespace block_codec;
  const PackedLayout l = packed_layout(d, head_dim, state_dim);
  const bool blocks = l.blocks_down > 0;
  const auto value_of = [&](int r, int c, float value) {
    if (blocks) {
      const size_t block =
          static_cast<size_t>(r / l.block_rows) * l.blocks_across + c / l.block_columns;
      value = value * decode_block_scale(
                          d, load_small(packed + l.scales + block * l.scale_size, l.scale_size));
    }
    if (l.outer_count > 0) {
      value = value * reinterpret_cast<const float*>(packed + l.outer)[d.span == Span::row ? r : 0];
    }
    return value;
  };
  if (state_dim % 4 == 0) {
    with_rule(d, [&](const auto& rule) {
      const int quads = state_dim / 4;
      for (int i = threadIdx.x; i < head_dim * quads; i += blockDim.x) {
        // Neighbouring threads write neighbouring places of the matrix.
        const int r = m.column_stride == 1 ? i / quads : i % head_dim;
        const int c = m.column_stride == 1 ? i % quads * 4 : i / head_dim * 4;
        uint32_t code[4];
        float x[4];
        load_four(packed, rule.code_size(), static_cast<size_t>(r) * state_dim + c, code);
        for (int k = 0; k < 4; ++k) x[k] = value_of(r, c + k, rule.decode(code[k]));
        put_four(m, r, c, x);
      }
    });
  } else {
    const DescribedRule rule(d);
    for (int i = threadIdx.x; i < head_dim * state_dim; i += blockDim.x) {
      const int r = i / state_dim, c = i % state_dim;
      m.at(r, c) =
          value_of(r, c, rule.decode(load_one(packed, rule.code_size(), static_cast<size_t>(i))));
    }
  }
  __syncthreads();
  undo_preparation(d, l, m, packed, memory);
}

/// What one encoding of a head needs beside the matrix.
struct EncodeCall {
  const DeviceFormat* formats = nullptr;  // table that `format` and its residual index
  int format = 0;
  bool stochastic = false;
  int head_dim = 0, state_dim = 0;
  const float* fixed_scales = nullptr;
  int head = 0;  // of the call: index of its fixed scale
  PhiloxKey key;
  float layer_amax = 0;
  std::byte* packed = nullptr;
  std::byte* residual_memory = nullptr;
  float* spare = nullptr;  // [head_dim * state_dim] where the format keeps a residual
  bool store = true;
  bool round = true;  // false: the matrix stays what it was; not for formats that are prepared or
                      // keep a residual
};

constexpr size_t kDeviceResidualHeader = 16;  // as on the host: the number of encodings seen

namespace block_codec {

__device__ inline void encode_plain(const EncodeCall& call, int format, PhiloxKey key,
                                    float layer_amax, MatrixView m, std::byte* packed, bool store,
                                    BlockCodecMemory* memory, ThreadCounts* counts) {
  const DeviceFormat& f = call.formats[format];
  const FormatDescriptor& d = f.descriptor;
  EncodeJob job{&d,
                packed_layout(d, call.head_dim, call.state_dim),
                m,
                call.stochastic && d.element != ElementKind::fp32,
                key,
                layer_amax,
                f.fixed_first >= 0 ? call.fixed_scales[f.fixed_first + call.head] : 0.0f,
                packed,
                store,
                call.round,
                memory};
  const bool prepared =
      d.hadamard != Axis::none || d.column_scale || d.zero_point != ZeroPoint::none;
  if (!prepared) {
    encode_prepared(job, counts);
    return;
  }
  job.store = true;  // zero points and column scales are kept there
  ThreadCounts inner = *counts;
  inner.non_finite += non_finite_share(job.l, m);
  __syncthreads();
  transform(d, call.head_dim, call.state_dim, m, memory);
  if (d.column_scale) divide_columns(job.l, m, packed);
  if (d.zero_point != ZeroPoint::none) subtract_zero_points(d, job.l, m, packed);
  const uint32_t non_finite = inner.non_finite;
  encode_prepared(job, &inner);
  inner.non_finite = non_finite;
  *counts = inner;
  undo_preparation(d, job.l, m, packed, memory);
}

}  // namespace block_codec

/// Rounds m in place and stores its codes; equal to encode_head followed by decode_head. Adds to
/// the thread's counts. Called by all threads of the block, the matrix visible to all; ends with a
/// barrier. The packed head starts on a multiple of 4 bytes.
inline __device__ __noinline__ void encode_block(const EncodeCall& call, MatrixView m,
                                                 BlockCodecMemory* memory, ThreadCounts* counts) {
  using namespace block_codec;
  const int residual = call.formats[call.format].residual;
  if (residual < 0) {
    encode_plain(call, call.format, call.key, call.layer_amax, m, call.packed, call.store, memory,
                 counts);
    return;
  }
  const int count = call.head_dim * call.state_dim;
  const PackedLayout l =
      packed_layout(call.formats[call.format].descriptor, call.head_dim, call.state_dim);
  const MatrixView spare{call.spare, call.state_dim, 1};
  std::byte* kept = call.residual_memory + kDeviceResidualHeader;
  ThreadCounts outer = *counts;
  outer.non_finite += non_finite_share(l, m);
  const uint32_t non_finite = outer.non_finite;
  uint64_t seen = 0;
  for (int i = 0; i < 2; ++i) {
    seen |= static_cast<uint64_t>(reinterpret_cast<uint32_t*>(call.residual_memory)[i]) << (32 * i);
  }
  __syncthreads();
  if (seen > 0) {
    decode_block(call.formats[residual].descriptor, call.head_dim, call.state_dim, kept, spare,
                 memory);
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      float& x = m.at(i / call.state_dim, i % call.state_dim);
      x = x + spare.x[i];
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    spare.x[i] = m.at(i / call.state_dim, i % call.state_dim);
  __syncthreads();
  encode_plain(call, call.format, call.key, call.layer_amax, m, call.packed, true, memory, &outer);
  outer.non_finite = non_finite;
  *counts = outer;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const float e = spare.x[i] - m.at(i / call.state_dim, i % call.state_dim);
    spare.x[i] = magnitude(e) <= kFloatMax ? e : 0.0f;
  }
  __syncthreads();
  PhiloxKey key = call.key;
  key.counter3 += 2;
  ThreadCounts ignored;
  encode_plain(call, residual, key, 0.0f, spare, kept, true, memory, &ignored);
  if (threadIdx.x == 0) {
    ++seen;
    reinterpret_cast<uint32_t*>(call.residual_memory)[0] = static_cast<uint32_t>(seen);
    reinterpret_cast<uint32_t*>(call.residual_memory)[1] = static_cast<uint32_t>(seen >> 32);
  }
  __syncthreads();
}

/// Adds the block's counts of `matrices` encodings to a head's health; returns the non-finite ones
/// to thread 0.
__device__ inline void add_health(EncodeHealth* health, uint64_t elements,
                                  const ThreadCounts& counts) {
  if (!health) return;
  uint32_t value[4] = {counts.non_finite, counts.saturated, counts.clipped, counts.vanished};
  for (int i = 0; i < 4; ++i) value[i] = __reduce_add_sync(0xFFFFFFFFu, value[i]);
  if ((threadIdx.x & 31) == 0) {
    unsigned long long* to[4] = {reinterpret_cast<unsigned long long*>(&health->non_finite),
                                 reinterpret_cast<unsigned long long*>(&health->saturated),
                                 reinterpret_cast<unsigned long long*>(&health->clipped),
                                 reinterpret_cast<unsigned long long*>(&health->vanished)};
    for (int i = 0; i < 4; ++i) {
      if (value[i]) atomicAdd(to[i], value[i]);
    }
  }
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&health->elements),
              static_cast<unsigned long long>(elements));
  }
}

}  // namespace replayeval
