// One token of GDN (decode_cuda.h). A block serves one value head of one row. The checkpoint goes
// to shared memory in copies that need no thread while the keys of the window are normalised and
// multiplied; then a thread owns a row of the state, so that each of its two sums over key_dim (S k
// and S q) is one chain, in the order of kernels/gdn.h. Rows that flush are served by a second
// kernel: gdn_decode_flush.cu, or here the window code of the chunk kernels on the ring. Plain FP32
// checkpoints have kernels of their own (gdn_decode_fp32.cu, gdn_decode_few.cu).
#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/decode_tiles.cuh"
#include "kernels/gdn_block.cuh"

namespace replayeval {
namespace {

constexpr int kMostHeads = 512;  // of a call, where a format has scales given in advance
constexpr int kFlushThreads = 256;
constexpr int kMostKeys = 256;  // key_dim

/// How the reading kernel decodes a checkpoint. `coded`: any format of up to 16 bits an element
/// whose rows are whole 16-byte chunks, without blocks or with blocks of a multiple of 16 columns;
/// `described`: any, element by element from where it lies.
enum class ReadKind : int { fp32, fp16, nvfp4, coded, described };

constexpr int kCodes = 256;  // of elements and of block scales that are looked up

struct GdnDecodeLaunch {
  GdnLayer layer;
  DecodeRows rows;
  DecodeStates states;
  GdnDecodeStep step;
  float query_scale;
  DeviceFormat
      formats[2];  // recurrence, read; arguments of a kernel, so that nothing is sent before it
  float fixed_scales[2 * kMostHeads];
  DevicePlan plan;
  PackedLayout read_layout;
};

/// Shared memory of the reading kernel, in bytes.
struct ReadLayout {
  int k_row;      // floats
  int state_row;  // bytes of a state row as it is copied
  int keys, query, key_weights, query_weights, decay, dots, partial, u, scales, tables, state, end;

  __host__ __device__ ReadLayout(int value_dim, int key_dim, int window, int u_size, int code_bits,
                                 int blocks_across, bool coded) {
    k_row = padded_row(key_dim);
    state_row = key_dim * code_bits / 8 + 16;  // rows of neighbouring threads in different banks
    int at = 0;
    const auto take = [&at](int bytes) {
      const int from = at;
      at += (bytes + 15) / 16 * 16;
      return from;
    };
    tables = take(coded ? 8 * kCodes : 0);  // first, at an offset that the compiler knows
    keys = take(4 * window * k_row);
    query = take(4 * k_row);
    key_weights = take(4 * window);
    query_weights = take(4 * window);
    decay = take(4 * window);
    dots = take(4);
    partial = take(8 * value_dim);
    u = take(window * value_dim * u_size);
    scales = take(value_dim * blocks_across);
    state = take(value_dim * state_row);
    end = at;
  }
};

/// Where the records of one head of one row lie.
struct RingInputs {
  const GdnDecodeLaunch* p;
  int row, head, key_head, pending;

  __device__ float value(const void* x, int64_t at) const {
    return load_record(p->step.activation, x, at);
  }

  __device__ int64_t slot(int64_t t) const { return int64_t{row} * p->plan.window + pending + t; }
  __device__ float k(int64_t t, int n) const {
    const int64_t at = int64_t{key_head} * p->layer.key_dim + n,
                  width = int64_t{p->layer.key_heads} * p->layer.key_dim;
    return t == 0 ? value(p->step.k, row * width + at)
                  : value(p->step.ring_k, slot(t) * width + at);
  }
  __device__ float q(int64_t, int n) const {
    return value(p->step.q, (int64_t{row} * p->layer.key_heads + key_head) * p->layer.key_dim + n);
  }
  __device__ float v(int64_t t, int i) const {
    const int64_t at = int64_t{head} * p->layer.value_dim + i,
                  width = int64_t{p->layer.value_heads} * p->layer.value_dim;
    return t == 0 ? value(p->step.v, row * width + at)
                  : value(p->step.ring_v, slot(t) * width + at);
  }
  __device__ float beta(int64_t t) const {
    const int64_t width = p->layer.value_heads;
    return t == 0 ? p->step.beta[row * width + head] : p->step.ring_beta[slot(t) * width + head];
  }
  __device__ float decay(int64_t t, int) const {
    const int64_t width = p->layer.value_heads;
    return t == 0 ? p->step.decay_log2[row * width + head]
                  : p->step.ring_decay[slot(t) * width + head];
  }
  /// Index of the first correction of a token in its ring.
  __device__ int64_t at_u(int64_t t) const {
    return (slot(t) * p->layer.value_heads + head) * p->layer.value_dim;
  }
  __device__ float u(int64_t t, int i) const {
    return load_record(p->plan.ring_u, p->step.ring_u, at_u(t) + i);
  }
  /// The ring is empty after a flush.
  __device__ void store_u(int64_t, int, float) const {}
  __device__ void store_o(int64_t, int i, float o) const {
    store_record(p->step.activation, p->step.o,
                 (int64_t{row} * p->layer.value_heads + head) * p->layer.value_dim + i, o);
  }
};

/// Four elements n .. n + 3 of a row of the checkpoint, decoded.
template <ReadKind kKind>
__device__ __forceinline__ float4 state_four(const std::byte* row, int n, __half2 scale,
                                             float outer) {
  if constexpr (kKind == ReadKind::fp32) {
    return *reinterpret_cast<const float4*>(row + 4 * n);
  } else if constexpr (kKind == ReadKind::fp16) {
    return four_fp16(*reinterpret_cast<const uint2*>(row + 2 * n));
  } else {
    return four_nvfp4(*reinterpret_cast<const uint16_t*>(row + n / 2), scale, outer);
  }
}

/// Values of codes of 4 or 8 bits by table, of the code that begins at bit `at` of a word.
template <int kBits>
struct TableValues {
  const std::byte* values;

  __device__ __forceinline__ float operator()(uint32_t word, int at) const {
    const uint32_t offset = (at < 2 ? word << 2 : word >> (at - 2)) & ((1u << kBits) - 1u) << 2;
    return *reinterpret_cast<const float*>(values + offset);
  }
};

/// The products of a decoded row with the key and with the query, each one chain over the columns.
struct RowProducts {
  float key = 0, query = 0;
};

/// `codes`: a row of kBits-bit codes in shared memory, `scales`: those of its blocks (of a multiple
/// of 16 columns), or null; value(word, bit) is what the code there decodes to.
template <int kBits, class Value>
__device__ __forceinline__ RowProducts coded_row(const std::byte* codes, const std::byte* scales,
                                                 const float* scale_values, int block, float outer,
                                                 const float* key, const float* query, int key_dim,
                                                 Value&& value) {
  RowProducts sum;
  float scale = 1.0f;
  int next = scales ? 0 : key_dim;  // column that the next block begins at
  for (int n = 0; n < key_dim; n += 128 / kBits) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(codes + n * kBits / 8);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int m = 0; m < 128 / kBits; m += 4) {
      if (m % 16 == 0 && n + m == next) {
        scale = scale_values[static_cast<uint32_t>(*scales++)];
        next += block;
      }
      float v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = (m + e) * kBits;
        v[e] = value(words[at / 32], at % 32) * scale * outer;
      }
      const float4 s = make_float4(v[0], v[1], v[2], v[3]);
      sum.key = chain(load4(key + n + m), s, sum.key);
      sum.query = chain(load4(query + n + m), s, sum.query);
    }
  }
  return sum;
}

template <ReadKind kKind>
__global__ void __launch_bounds__(512) gdn_read(const __grid_constant__ GdnDecodeLaunch p) {
  extern __shared__ __align__(16) std::byte shared[];
  const GdnLayer& layer = p.layer;
  const int row = blockIdx.x / layer.value_heads, head = blockIdx.x % layer.value_heads;
  const int sharing = layer.value_heads / layer.key_heads, key_head = head / sharing;
  const int t = p.rows.pending[row], window = p.plan.window, tid = threadIdx.x,
            threads = blockDim.x;
  const int key_dim = layer.key_dim, value_dim = layer.value_dim;
  const bool flush = t + 1 == window;
  if (flush && p.plan.flush_output == FlushOutput::recurrence) return;
  const bool own = p.plan.read >= 0;
  const std::byte* packed =
      own ? p.states.read + row * p.states.read_row_stride + head * p.states.read_head_stride
          : p.states.recurrence + row * p.states.row_stride + head * p.states.head_stride;
  const PackedLayout& l = p.read_layout;
  constexpr bool kCopied = kKind != ReadKind::described;
  const int u_size = p.plan.ring_u == RecordType::bf16 ? 2 : 4;
  const ReadLayout at(value_dim, key_dim, window, u_size, kCopied ? l.code_size : 0,
                      kKind == ReadKind::nvfp4 || kKind == ReadKind::coded ? l.blocks_across : 0,
                      kKind == ReadKind::coded);
  const RingInputs in{&p, row, head, key_head, t};

  if constexpr (kCopied) {
    const int chunks = key_dim * l.code_size / 128;
    for (int i = tid; i < value_dim * chunks; i += threads) {
      const int r = i / chunks, c = i % chunks;
      copy_async(shared + at.state + r * at.state_row + 16 * c,
                 packed + (static_cast<size_t>(r) * chunks + c) * 16);
    }
    if constexpr (kKind == ReadKind::nvfp4 || kKind == ReadKind::coded) {
      for (int i = tid; i < value_dim * l.blocks_across / 16; i += threads) {
        copy_async(shared + at.scales + 16 * i, packed + l.scales + 16 * i);
      }
    }
  }
  const FormatDescriptor& d = p.formats[own ? p.plan.read : p.plan.recurrence].descriptor;
  float* values = reinterpret_cast<float*>(shared + at.tables);
  if constexpr (kKind == ReadKind::coded) {
    for (int i = tid; i < kCodes; i += threads) {
      if (l.code_size <= 8 && i < 1 << l.code_size)
        values[i] = decode_element(d, static_cast<uint32_t>(i));
      if (l.blocks_down > 0) values[kCodes + i] = decode_block_scale(d, static_cast<uint32_t>(i));
    }
  }
  const int u_chunks = value_dim * u_size / 16;
  for (int i = tid; i < t * u_chunks; i += threads) {
    copy_async(shared + at.u + 16 * i, static_cast<const std::byte*>(p.step.ring_u) +
                                           in.at_u(i / u_chunks - t) * u_size +
                                           16 * (i % u_chunks));
  }
  commit_copies();

  float* keys = reinterpret_cast<float*>(shared + at.keys);
  float* query = reinterpret_cast<float*>(shared + at.query);
  float* decay = reinterpret_cast<float*>(shared + at.decay);
  float* key_weights = reinterpret_cast<float*>(shared + at.key_weights);
  float* query_weights = reinterpret_cast<float*>(shared + at.query_weights);
  float* dots = reinterpret_cast<float*>(shared + at.dots);
  // Normalised keys of the window and, as the last row, the query; sixteen threads a row.
  {
    const int lane = tid & 15;
    const int64_t width = int64_t{layer.key_heads} * key_dim, from = int64_t{key_head} * key_dim;
    const int64_t ring = int64_t{row} * window * width + from;
    for (int base = 0; base < t + 2; base += threads / 16) {
      const int i = base + (tid >> 4), j = min(i, t + 1);
      const void* x = j < t ? p.step.ring_k : j == t ? p.step.k : p.step.q;
      const int64_t at_x = j < t ? ring + j * width : row * width + from;
      float value[kMostKeys / 16];
      float squares = 0.0f;
#pragma unroll
      for (int m = 0; m < kMostKeys / 16; ++m) {
        const int n = lane + 16 * m;
        value[m] = n < key_dim ? load_record(p.step.activation, x, at_x + n) : 0.0f;
      }
#pragma unroll
      for (int m = 0; m < kMostKeys / 16; ++m) squares = __fmaf_rn(value[m], value[m], squares);
      for (int d = 8; d > 0; d >>= 1) squares = squares + __shfl_xor_sync(0xFFFFFFFFu, squares, d);
      if (i > t + 1) continue;
      const float factor = (j <= t ? 1.0f : p.query_scale) / sqrtf(squares + 1e-6f);
      float* to = j <= t ? keys + j * at.k_row : query;
#pragma unroll
      for (int m = 0; m < kMostKeys / 16; ++m) {
        const int n = lane + 16 * m;
        if (n < key_dim) to[n] = value[m] * factor;
      }
    }
  }
  for (int j = tid; j <= t; j += threads) decay[j] = in.decay(j - t, 0);
  float beta = in.beta(0);
  if (!flush) {
    const int64_t slot = in.slot(0);
    if (head % sharing == 0) {
      const int64_t width = int64_t{layer.key_heads} * key_dim, from = int64_t{key_head} * key_dim;
      for (int n = tid; n < key_dim; n += threads) {
        store_record(p.step.activation, p.step.ring_k, slot * width + from + n, in.k(0, n));
      }
    }
    const int64_t width = int64_t{layer.value_heads} * value_dim, from = int64_t{head} * value_dim;
    for (int i = tid; i < value_dim; i += threads) {
      store_record(p.step.activation, p.step.ring_v, slot * width + from + i, in.v(0, i));
    }
    if (tid == 0) {
      p.step.ring_decay[slot * layer.value_heads + head] = in.decay(0, 0);
      p.step.ring_beta[slot * layer.value_heads + head] = beta;
    }
  }
  if (p.plan.beta == RecordType::bf16) beta = round_value(DotType::bf16, beta);
  __syncthreads();
  // k_t . k_j and q_t . k_j: one chain a thread, the two kinds in different warps.
  for (int i = tid; i < 2 * 32 * ((t + 32) / 32); i += threads) {
    const int j = i / 64 * 32 + (i & 31);
    if (j > t) continue;
    const bool with_query = (i & 32) != 0;
    const float *a = with_query ? query : keys + t * at.k_row, *b = keys + j * at.k_row;
    float sum = 0.0f;
#pragma unroll 4
    for (int n = 0; n < key_dim; n += 4) {
      const float4 x = load4(a + n), y = load4(b + n);
      sum = __fmaf_rn(x.w, y.w, __fmaf_rn(x.z, y.z, __fmaf_rn(x.y, y.y, __fmaf_rn(x.x, y.x, sum))));
    }
    float exponent = 0.0f;
    for (int k = j + 1; k <= t; ++k) exponent = exponent + decay[k];
    (with_query ? query_weights : key_weights)[j] = exp2_ordered(exponent) * sum;
  }
  if (tid == threads - 1) {
    float exponent = 0.0f;
    for (int k = 0; k <= t; ++k) exponent = exponent + decay[k];
    dots[0] = exp2_ordered(exponent);
  }
  wait_for_copies();
  __syncthreads();

  const float carried = dots[0];
  float* partial = reinterpret_cast<float*>(shared + at.partial);
  const auto stored = [&](int j, int i) {
    return load_record(p.plan.ring_u, shared + at.u, j * value_dim + i);
  };
  // From the products with the checkpoint's row i: u, and what o has of earlier tokens.
  const auto correct = [&](int i, float with_key) {
    float rest = __fmaf_rn(-carried, with_key, in.v(0, i));
#pragma unroll 4
    for (int j = 0; j < t; ++j) rest = __fmaf_rn(-key_weights[j], stored(j, i), rest);
    const float own_u = beta * rest;
    if (!flush) store_record(p.plan.ring_u, p.step.ring_u, in.at_u(0) + i, own_u);
    partial[value_dim + i] = own_u;
  };
  const auto earlier = [&](int i, float with_query) {
    float o = carried * with_query;
#pragma unroll 4
    for (int j = 0; j < t; ++j) o = __fmaf_rn(query_weights[j], stored(j, i), o);
    partial[i] = o;
  };
  if constexpr (kKind == ReadKind::coded) {
    // A thread takes both products of a row, so that it is decoded once.
    const float* key = keys + t * at.k_row;
    for (int i = tid; i < value_dim; i += threads) {
      const std::byte* codes = shared + at.state + i * at.state_row;
      const std::byte* scales =
          l.blocks_down > 0 ? shared + at.scales + i * l.blocks_across : nullptr;
      const float outer =
          l.outer_count > 0
              ? reinterpret_cast<const float*>(packed + l.outer)[d.span == Span::row ? i : 0]
              : 1.0f;
      const auto row = [&](auto bits, auto&& value) {
        return coded_row<decltype(bits)::value>(codes, scales, values + kCodes, l.block_columns,
                                                outer, key, query, key_dim, value);
      };
      const std::byte* table = shared + at.tables;
      RowProducts sum;
      if (l.code_size == 4) {
        sum = row(std::integral_constant<int, 4>(), TableValues<4>{table});
      } else if (l.code_size == 8) {
        sum = row(std::integral_constant<int, 8>(), TableValues<8>{table});
      } else if (block_codec::ShiftedFloat::takes(d)) {
        const block_codec::ShiftedFloat number(d.number);
        sum = row(std::integral_constant<int, 16>(),
                  [&](uint32_t word, int at) { return number(word >> at & 0xFFFFu); });
      } else {
        sum = row(std::integral_constant<int, 16>(),
                  [&](uint32_t word, int at) { return decode_element(d, word >> at & 0xFFFFu); });
      }
      correct(i, sum.key);
      earlier(i, sum.query);
    }
  } else {
    // Half of the threads read with the key and make u, the others with the query and make what o
    // has of earlier tokens.
    const int half = threads / 2, side = tid >= half ? 1 : 0;
    for (int i = tid - side * half; i < value_dim; i += half) {
      const float* operand = side == 0 ? keys + t * at.k_row : query;
      float sum = 0.0f;
      const auto add = [&](int n, float4 s) { sum = chain(load4(operand + n), s, sum); };
      if constexpr (kCopied) {
        const std::byte* state = shared + at.state + i * at.state_row;
        const float outer =
            kKind == ReadKind::nvfp4 ? *reinterpret_cast<const float*>(packed + l.outer) : 1.0f;
        for (int m = 0; m < key_dim; m += 16) {
          __half2 scale{};
          if constexpr (kKind == ReadKind::nvfp4) {
            scale =
                e4m3_scale(static_cast<uint32_t>(shared[at.scales + i * l.blocks_across + m / 16]));
          }
#pragma unroll
          for (int n = 0; n < 16; n += 4) add(m + n, state_four<kKind>(state, m + n, scale, outer));
        }
      } else {
        const block_codec::DescribedRule rule(d);
        const float outer =
            l.outer_count > 0
                ? reinterpret_cast<const float*>(packed + l.outer)[d.span == Span::row ? i : 0]
                : 1.0f;
        for (int n = 0; n < key_dim; n += 4) {
          float v[4];
          uint32_t code[4];
          block_codec::load_four(packed, rule.code_size(), static_cast<size_t>(i) * key_dim + n,
                                 code);
          for (int e = 0; e < 4; ++e) {
            v[e] = rule.decode(code[e]);
            if (l.blocks_down > 0) {
              const size_t block = static_cast<size_t>(i / l.block_rows) * l.blocks_across +
                                   (n + e) / l.block_columns;
              v[e] = v[e] * decode_block_scale(
                                d, block_codec::load_small(packed + l.scales + block * l.scale_size,
                                                           l.scale_size));
            }
            if (l.outer_count > 0) v[e] = v[e] * outer;
          }
          add(n, make_float4(v[0], v[1], v[2], v[3]));
        }
      }
      if (side == 0) {
        correct(i, sum);
      } else {
        earlier(i, sum);
      }
    }
  }
  __syncthreads();
  for (int i = tid; i < value_dim; i += threads) {
    in.store_o(0, i, __fmaf_rn(query_weights[t], partial[value_dim + i], partial[i]));
  }
}

/// The rows that flush; a block takes one head and every gridDim.y-th of them.
__global__ void __launch_bounds__(kFlushThreads)
    gdn_flush(const __grid_constant__ GdnDecodeLaunch p) {
  extern __shared__ __align__(16) std::byte shared[];
  const GdnLayer& layer = p.layer;
  const int head_index = blockIdx.x, window = p.plan.window;
  const int start = static_cast<int>(blockIdx.y), step = static_cast<int>(gridDim.y);
  each_flushing_row(p.rows, window, start, step, [&](int row) {
    DeviceRow device_row{};
    device_row.position = p.rows.position[row];
    device_row.stream = p.rows.stream[row];
    device_row.recurrence = p.states.recurrence + row * p.states.row_stride;
    device_row.recurrence_stride = p.states.head_stride;
    device_row.read = p.states.read + row * p.states.read_row_stride;
    device_row.read_stride = p.states.read_head_stride;
    device_row.health =
        p.states.health ? p.states.health + int64_t{row} * layer.value_heads : nullptr;
    ReplayTables tables{};
    tables.formats = p.formats;
    tables.fixed_scales = p.fixed_scales;
    tables.layer = layer.layer;
    tables.head_offset = layer.head_offset;
    const GdnLayout at(layer.value_dim, layer.key_dim, window, false, false);
    DeviceHead head{};
    head.tables = &tables;
    head.row = &device_row;
    head.plan = &p.plan;
    head.head = head_index;
    head.head_dim = layer.value_dim;
    head.state_dim = layer.key_dim;
    head.codec = reinterpret_cast<BlockCodecMemory*>(shared);
    float* work = reinterpret_cast<float*>(shared + block_codec_bytes(layer.value_dim));
    float* matrix = work + at.end;
    head.state = {matrix, 1, at.v_row};
    head.read = head.state;
    head.codes_only = true;
    for (int i = threadIdx.x; i < at.end + at.matrices_end; i += kFlushThreads) work[i] = 0.0f;
    __syncthreads();
    const RingInputs in{&p, row, head_index, head_index / (layer.value_heads / layer.key_heads),
                        window - 1};
    const GdnSpan<RingInputs> fold{&layer, p.query_scale, &head, in, work, at};
    WalkSpan span{1 - window, window, 0, true, false};
    // With flush_output `read` the output is the reading kernel's.
    fold(span, p.plan.flush_output == FlushOutput::read);
    head.flush(device_row.position, 0.0f, true);
    head.finish();
    __syncthreads();
  });
}

using Kernel = void (*)(const GdnDecodeLaunch);

Kernel read_kernel(ReadKind kind) {
  return kind == ReadKind::fp32    ? gdn_read<ReadKind::fp32>
         : kind == ReadKind::fp16  ? gdn_read<ReadKind::fp16>
         : kind == ReadKind::nvfp4 ? gdn_read<ReadKind::nvfp4>
         : kind == ReadKind::coded ? gdn_read<ReadKind::coded>
                                   : gdn_read<ReadKind::described>;
}

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("gdn decode: " + message);
}

void check_format(const StateFormat& format) {
  const FormatDescriptor& d = format.descriptor;
  if (format.residual || format.library || d.hadamard != Axis::none || d.column_scale ||
      d.zero_point != ZeroPoint::none || d.span == Span::layer) {
    refuse(format.name +
           ": expected a format without transform, zero point, column scale, residual, library and "
           "scale "
           "over the layer; gdn_advance_cuda takes more");
  }
}

ReadKind kind_of(const FormatDescriptor& d, const PackedLayout& l) {
  if (d.element == ElementKind::fp32 && !d.scaled()) return ReadKind::fp32;
  const bool floating = d.element == ElementKind::floating;
  if (floating && d.number == kFp16 && !d.scaled() && l.state_dim % 8 == 0) return ReadKind::fp16;
  const bool scales_copied = l.head_dim * l.blocks_across % 16 == 0;
  const bool nvfp4 = floating && d.number == kE2m1 && d.block_scale == BlockScale::floating &&
                     d.scale_number == kE4m3 && l.block_rows == 1 && l.block_columns == 16 &&
                     l.outer_count == 1 && l.state_dim % 32 == 0 && scales_copied;
  if (nvfp4) return ReadKind::nvfp4;
  const bool blocks = l.blocks_down > 0;
  const bool coded = l.code_size <= 16 && l.state_dim * l.code_size % 128 == 0 &&
                     (!blocks || (l.block_rows == 1 && l.block_columns % 16 == 0 &&
                                  l.scale_size == 1 && scales_copied));
  return coded ? ReadKind::coded : ReadKind::described;
}

}  // namespace

void gdn_decode_cuda(const GdnLayer& layer, const HeadPlan& plan, const DecodeRows& rows,
                     const DecodeStates& states, const GdnDecodeStep& step, CudaStream stream) {
  if (rows.rows == 0) return;
  if (layer.channel_decay)
    refuse("a decay a channel (KDA), expected one a head; gdn_advance_cuda takes both");
  if (layer.key_dim % 16 != 0 || layer.key_dim > kMostKeys || layer.value_dim % 8 != 0) {
    refuse("key_dim " + std::to_string(layer.key_dim) + ", value_dim " +
           std::to_string(layer.value_dim) + ", expected multiples of 16 (up to " +
           std::to_string(kMostKeys) + ") and 8");
  }
  if (plan.window < 1 || plan.window > kMaxWindow) {
    refuse("window " + std::to_string(plan.window) + ", expected 1 to " +
           std::to_string(kMaxWindow));
  }
  check_format(*plan.recurrence.format);
  if (plan.read) check_format(*plan.read->format);
  if (!rows.pending || !rows.position || !rows.stream || !states.recurrence ||
      (plan.read && !states.read) || !step.q || !step.k || !step.v || !step.decay_log2 ||
      !step.beta || !step.o || !step.ring_k || !step.ring_v || !step.ring_u || !step.ring_decay ||
      !step.ring_beta) {
    refuse("an array is null");
  }
  if (!on_16_bytes({step.q, step.k, step.v, step.o, step.ring_k, step.ring_v, step.ring_u}))
    refuse("an array is not on a multiple of 16 bytes");
  if (gdn_decode_fp32(layer, plan, rows, states, step, stream)) return;
  std::vector<RandomKey> heads(static_cast<size_t>(layer.value_heads));
  for (int h = 0; h < layer.value_heads; ++h) {
    heads[static_cast<size_t>(h)].layer = static_cast<uint32_t>(layer.layer);
    heads[static_cast<size_t>(h)].head = static_cast<uint32_t>(layer.head_offset + h);
  }
  GdnDecodeLaunch launch{};
  launch.layer = layer;
  launch.rows = rows;
  launch.states = states;
  launch.step = step;
  launch.query_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(layer.key_dim)));
  FormatTable formats(heads);
  DevicePlan& p = launch.plan;
  p.recurrence = formats.add(*plan.recurrence.format);
  if (plan.read) p.read = formats.add(*plan.read->format);
  std::copy(formats.on_host().begin(), formats.on_host().end(), launch.formats);
  if (formats.scales_on_host().size() > std::size(launch.fixed_scales)) {
    refuse(std::to_string(layer.value_heads) +
           " heads with scales given in advance, expected at most " + std::to_string(kMostHeads));
  }
  std::copy(formats.scales_on_host().begin(), formats.scales_on_host().end(), launch.fixed_scales);
  p.recurrence_stochastic = plan.recurrence.rounding == Rounding::stochastic;
  p.read_stochastic = plan.read && plan.read->rounding == Rounding::stochastic;
  p.window = plan.window;
  p.flush_output = plan.flush_output;
  p.gdn_fold = plan.gdn_fold;
  p.ring_u = plan.ring_u;
  p.beta = plan.beta;
  p.dot = plan.dot;
  p.seed = plan.seed;
  const FormatDescriptor& read =
      (plan.read ? *plan.read->format : *plan.recurrence.format).descriptor;
  launch.read_layout = packed_layout(read, layer.value_dim, layer.key_dim);
  const ReadKind kind = kind_of(read, launch.read_layout);
  const auto start = [&](Kernel kernel, dim3 grid, int threads, size_t shared) {
    if (shared > block_shared_limit()) {
      refuse("a window of " + std::to_string(plan.window) + " needs " + std::to_string(shared) +
             " bytes of shared memory, this GPU has " + std::to_string(block_shared_limit()));
    }
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)));
    kernel<<<grid, static_cast<unsigned>(threads), shared, stream>>>(launch);
    CUDA_CHECK(cudaGetLastError());
  };
  if ((plan.window > 1 || plan.flush_output == FlushOutput::read) &&
      !gdn_read_nvfp4(layer, plan, rows, states, step, stream)) {
    const ReadLayout at(
        layer.value_dim, layer.key_dim, plan.window, plan.ring_u == RecordType::bf16 ? 2 : 4,
        kind == ReadKind::described ? 0 : launch.read_layout.code_size,
        kind == ReadKind::nvfp4 || kind == ReadKind::coded ? launch.read_layout.blocks_across : 0,
        kind == ReadKind::coded);
    const int threads =
        (kind == ReadKind::coded ? 1 : 2) * std::clamp((layer.value_dim + 31) / 32 * 32, 32, 256);
    start(read_kernel(kind), dim3(static_cast<unsigned>(rows.rows * layer.value_heads)), threads,
          static_cast<size_t>(at.end));
  }
  if (gdn_flush_rows(layer, plan, rows, states, step, stream)) return;
  const GdnLayout at(layer.value_dim, layer.key_dim, plan.window, false, false);
  const dim3 some(static_cast<unsigned>(layer.value_heads),
                  static_cast<unsigned>(std::min(rows.rows, plan.window == 1 ? 65535 : 32)));
  start(gdn_flush, some, kFlushThreads,
        block_codec_bytes(layer.value_dim) +
            static_cast<size_t>(at.end + at.matrices_end) * sizeof(float));
}

}  // namespace replayeval
