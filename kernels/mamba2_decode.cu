// One token of Mamba-2 (decode_cuda.h). A block serves one head of one row: its checkpoint is read
// packed into shared memory and decoded on the way into the sums, and flushed by the block codec.
// Plain FP32 checkpoints have kernels of their own (mamba2_decode_fp32.cu, mamba2_decode_few.cu).
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/decode_tiles.cuh"
#include "kernels/mamba2_block.cuh"

namespace replayeval {
namespace {

constexpr int kCodes = 256;      // of block scales that are looked up, and of elements at most
constexpr int kMostHeads = 512;  // of a call, where a format has scales given in advance

struct DecodeLaunch {
  Mamba2Layer layer;
  DecodeRows rows;
  DecodeStates states;
  Mamba2DecodeStep step;
  DeviceFormat
      formats[2];  // recurrence, read; arguments of a kernel, so that nothing is sent before it
  float fixed_scales[2 * kMostHeads];
  DevicePlan plan;
  size_t read_bytes;  // packed head that non-flush steps read
  PackedLayout read_layout;
  Span read_span;
  BlockScale read_scale;
  bool coded_scales;  // read checkpoint: no blocks, or scales of a byte for multiples of 16 columns
};

/// Offsets in floats behind the codec's memory.
struct DecodeLayout {
  int n_row, p_row;
  int c, x, z, dt, decay, weights, b, u, large;

  __host__ __device__ DecodeLayout(int head_dim, int state_dim, int window) {
    n_row = state_dim + 4;
    p_row = (head_dim + 3) / 4 * 4;
    int at = 0;
    const auto take = [&at](int count) {
      const int from = at;
      at += (count + 3) / 4 * 4;
      return from;
    };
    c = take(state_dim);
    x = take(p_row);
    z = take(p_row);
    dt = take(window);
    decay = take(window);
    weights = take(window + 1);
    b = take(window * n_row);
    u = take(window * p_row);
    large = at;  // a packed head, or a matrix
  }
};

template <class Act>
struct DecodeBlock {
  const DecodeLaunch& p;
  DecodeLayout at;
  float* work;
  int row, head, group, t;  // t: index of this token in the ring
  const Act *x, *c;
  const Act *ring_x, *ring_b, *b;
  int64_t x_stride, b_stride;
  // The ring's records where they are read from: the ring, or copies in shared memory.
  const Act *seen_x, *seen_b;
  int64_t seen_x_stride, seen_b_stride;

  __device__ DecodeBlock(const DecodeLaunch& launch, float* memory)
      : DecodeBlock(launch, memory, blockIdx.x / launch.layer.heads,
                    blockIdx.x % launch.layer.heads) {}
  __device__ DecodeBlock(const DecodeLaunch& launch, float* memory, int row, int head)
      : p(launch),
        at(launch.layer.head_dim, launch.layer.state_dim, launch.plan.window),
        work(memory),
        row(row),
        head(head) {
    const Mamba2Layer& layer = p.layer;
    group = head / (layer.heads / layer.groups);
    t = p.rows.pending[row];
    x_stride = int64_t{layer.heads} * layer.head_dim;
    b_stride = int64_t{layer.groups} * layer.state_dim;
    const int64_t window = p.plan.window, r = row;
    x = static_cast<const Act*>(p.step.x) + r * x_stride + int64_t{head} * layer.head_dim;
    b = static_cast<const Act*>(p.step.b) + r * b_stride + int64_t{group} * layer.state_dim;
    c = static_cast<const Act*>(p.step.c) + r * b_stride + int64_t{group} * layer.state_dim;
    ring_x = static_cast<const Act*>(p.step.ring_x) + r * window * x_stride +
             int64_t{head} * layer.head_dim;
    ring_b = static_cast<const Act*>(p.step.ring_b) + r * window * b_stride +
             int64_t{group} * layer.state_dim;
    seen_x = ring_x;
    seen_b = ring_b;
    seen_x_stride = x_stride;
    seen_b_stride = b_stride;
  }
  __device__ const Act* x_of(int j) const { return j == t ? x : seen_x + j * seen_x_stride; }
  __device__ const Act* b_of(int j) const { return j == t ? b : seen_b + j * seen_b_stride; }

  /// Begins to copy the ring's records to `memory`; they are there after wait_for_copies and a
  /// barrier.
  __device__ void copy_ring(std::byte* memory) {
    constexpr int kEach = 16 / sizeof(Act);
    const int x_chunks = p.layer.head_dim / kEach, b_chunks = p.layer.state_dim / kEach;
    Act* to_x = reinterpret_cast<Act*>(memory);
    Act* to_b = to_x + p.plan.window * p.layer.head_dim;
    for (int j = threadIdx.x >> 5; j < t; j += blockDim.x >> 5) {
      for (int i = threadIdx.x & 31; i < x_chunks + b_chunks; i += 32) {
        if (i < x_chunks) {
          copy_async(to_x + j * p.layer.head_dim + kEach * i, ring_x + j * x_stride + kEach * i);
        } else {
          const int k = i - x_chunks;
          copy_async(to_b + j * p.layer.state_dim + kEach * k, ring_b + j * b_stride + kEach * k);
        }
      }
    }
    commit_copies();
    seen_x = to_x;
    seen_b = to_b;
    seen_x_stride = p.layer.head_dim;
    seen_b_stride = p.layer.state_dim;
  }

  /// The token's own inputs, into shared memory and the ring; ends without a barrier.
  __device__ void take_inputs(bool flush) const {
    const Mamba2Layer& layer = p.layer;
    const int tid = threadIdx.x, threads = blockDim.x;
    for (int i = tid; i < at.p_row; i += threads) {
      const bool real = i < layer.head_dim;
      work[at.x + i] = real ? to_float(x[i]) : 0.0f;
      if (real && !flush) const_cast<Act*>(ring_x)[t * x_stride + i] = x[i];
    }
    for (int n = tid; n < layer.state_dim; n += threads) {
      work[at.c + n] = to_float(c[n]);
      if (!flush && head % (layer.heads / layer.groups) == 0)
        const_cast<Act*>(ring_b)[t * b_stride + n] = b[n];
    }
    float* ring_dt = p.step.ring_dt + (int64_t{row} * p.plan.window) * layer.heads + head;
    const float own = p.step.dt[int64_t{row} * layer.heads + head], a = layer.decay_log2[head];
    for (int j = tid; j <= t; j += threads) {
      const float dt = j == t ? own : ring_dt[j * layer.heads];
      work[at.dt + j] = dt;
      work[at.decay + j] = dt * a;
    }
    if (tid == 0 && !flush) ring_dt[t * layer.heads] = own;
  }
  /// 2^(decays from the window's start).
  __device__ float carry() const {
    float sum = 0.0f;
    for (int k = 0; k <= t; ++k) sum = sum + work[at.decay + k];
    return exp2_ordered(sum);
  }
  __device__ float weight(int j) const {
    float sum = 0.0f;
    for (int k = j + 1; k <= t; ++k) sum = sum + work[at.decay + k];
    return exp2_ordered(sum) * work[at.dt + j];
  }
  /// weights[j] = 2^D(j, t) dt_j (B_j . C_t), four threads a record; weights[window] = carry.
  __device__ void read_weights() const {
    const int part = threadIdx.x & 3, groups = blockDim.x >> 2, n16 = p.layer.state_dim / 16;
    for (int base = 0; base <= t; base += groups) {
      const int j = min(base + static_cast<int>(threadIdx.x >> 2), t);
      const Act* record = b_of(j) + 4 * part;
      const float* query = work + at.c + 4 * part;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (int m = 0; m < n16; ++m) sum = fma4(four(record + 16 * m), load4(query + 16 * m), sum);
      const float product = sum_of_lanes(sum);
      if (part == 0 && base + static_cast<int>(threadIdx.x >> 2) <= t)
        work[at.weights + j] = weight(j) * product;
    }
    if (threadIdx.x == blockDim.x - 1) work[at.weights + p.plan.window] = carry();
  }
  /// y = carry z + sum_j weights_j x_j + D x.
  __device__ void window_output() const {
    for (int i = threadIdx.x; i < p.layer.head_dim; i += blockDim.x) {
      float sum = work[at.weights + p.plan.window] * work[at.z + i];
      for (int j = 0; j < t; ++j)
        sum = __fmaf_rn(work[at.weights + j], to_float(seen_x[j * seen_x_stride + i]), sum);
      sum = __fmaf_rn(work[at.weights + t], work[at.x + i], sum);
      output(i, sum);
    }
  }
  __device__ void output(int i, float sum) const {
    if (p.layer.skip) sum = __fmaf_rn(p.layer.skip[head], work[at.x + i], sum);
    static_cast<Act*>(p.step.y)[row * x_stride + int64_t{head} * p.layer.head_dim + i] =
        from_float<Act>(sum);
  }
  /// Operands of the fold, into shared memory: u_j = w_j x_j and B_j (or as `dot` rounds them).
  __device__ void fold_operands() const {
    const int tid = threadIdx.x, threads = blockDim.x, n = p.layer.state_dim;
    for (int j = tid; j <= t; j += threads) work[at.weights + j] = weight(j);
    if (tid == threads - 1) work[at.weights + p.plan.window] = carry();
    __syncthreads();
    const DotType dot = p.plan.dot;
    const bool exact = dot == DotType::fp32;
    for (int i = tid; i < (t + 1) * (n / 4); i += threads) {
      const int j = i / (n / 4), m = i % (n / 4) * 4;
      float4 v = four(b_of(j) + m);
      if (!exact) {
        const float w = work[at.weights + j];
        v = make_float4(round_operand_device(dot, w * v.x), round_operand_device(dot, w * v.y),
                        round_operand_device(dot, w * v.z), round_operand_device(dot, w * v.w));
      }
      store4(work + at.b + j * at.n_row + m, v);
    }
    for (int i = tid; i < (t + 1) * at.p_row; i += threads) {
      const int j = i / at.p_row, q = i % at.p_row;
      const float value = q < p.layer.head_dim ? to_float(x_of(j)[q]) : 0.0f;
      work[at.u + i] = exact ? work[at.weights + j] * value : round_operand_device(dot, value);
    }
    __syncthreads();
  }
};

template <class Act>
__device__ void flush_head(const DecodeLaunch& p, int row, int head, std::byte* shared) {
  const Mamba2Layer& layer = p.layer;
  BlockCodecMemory* codec = reinterpret_cast<BlockCodecMemory*>(shared);
  const DecodeBlock<Act> block(
      p, reinterpret_cast<float*>(shared + block_codec_bytes(layer.head_dim)), row, head);
  float* work = block.work;
  const DecodeLayout& at = block.at;
  const bool separate = p.plan.read >= 0;
  std::byte* recurrence =
      p.states.recurrence + row * p.states.row_stride + head * p.states.head_stride;
  const bool from_new = p.plan.flush_output == FlushOutput::recurrence;
  const int head_dim = layer.head_dim, state_dim = layer.state_dim;
  block.take_inputs(true);
  __syncthreads();
  block.fold_operands();
  const MatrixView matrix{work + at.large, padded_row(state_dim), 1};
  decode_block(p.formats[p.plan.recurrence].descriptor, head_dim, state_dim, recurrence, matrix,
               codec);
  fold_state(matrix.x, matrix.row_stride, head_dim, state_dim, work[at.weights + p.plan.window],
             work + at.u, at.p_row, work + at.b, at.n_row, block.t + 1);
  __syncthreads();
  if (from_new) {
    dot_rows(matrix.x, matrix.row_stride, head_dim, work + at.c, state_dim, 1, state_dim / 16,
             work + at.z, at.p_row);
    __syncthreads();
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) block.output(i, work[at.z + i]);
  }
  ThreadCounts counts;
  EncodeCall call;
  call.formats = p.formats;
  call.fixed_scales = p.fixed_scales;
  call.head_dim = head_dim;
  call.state_dim = state_dim;
  call.head = block.head;
  call.round = false;
  RandomKey key{p.plan.seed,
                p.rows.stream[block.row],
                static_cast<uint32_t>(layer.layer),
                static_cast<uint32_t>(layer.head_offset + block.head),
                static_cast<uint32_t>(p.rows.position[block.row]),
                StateRole::read};
  if (separate) {
    call.format = p.plan.read;
    call.stochastic = p.plan.read_stochastic;
    call.key = device_philox_key(key);
    call.packed = p.states.read + row * p.states.read_row_stride + head * p.states.read_head_stride;
    encode_block(call, matrix, codec, &counts);
  }
  key.role = StateRole::recurrence;
  call.format = p.plan.recurrence;
  call.stochastic = p.plan.recurrence_stochastic;
  call.key = device_philox_key(key);
  call.packed = recurrence;
  const uint32_t before = counts.non_finite;
  encode_block(call, matrix, codec, &counts);
  if (!p.states.health) return;
  HeadHealth* health = p.states.health + int64_t{block.row} * layer.heads + block.head;
  add_health(&health->encode, static_cast<uint64_t>(separate ? 2 : 1) * head_dim * state_dim,
             counts);
  if (__syncthreads_or(counts.non_finite != before) && threadIdx.x == 0 &&
      health->first_non_finite_position < 0) {
    health->first_non_finite_position = p.rows.position[block.row];
  }
}

/// Four neighbouring elements of a packed head, before scales, from `index` on, a multiple of 4.
template <class Base>
struct LoadRule : Base {
  static constexpr bool kCoded = false;
  __device__ LoadRule(const FormatDescriptor&, float*) {}
  __device__ float4 load(const std::byte* packed, int index) const {
    uint32_t code[4];
    block_codec::load_four(packed, Base::kCodeSize, static_cast<size_t>(index), code);
    return make_float4(this->decode(code[0]), this->decode(code[1]), this->decode(code[2]),
                       this->decode(code[3]));
  }
};
/// Codes of 4 or 8 bits, decoded once a block: `tables` holds what they and the codes of block
/// scales stand for.
template <int kBits>
struct CodedLoad {
  static constexpr bool kCoded = true;
  const float* values;
  __device__ CodedLoad(const FormatDescriptor& d, float* tables) : values(tables) {
    for (int i = threadIdx.x; i < 1 << kBits; i += blockDim.x)
      tables[i] = decode_element(d, static_cast<uint32_t>(i));
    if (d.block_scale == BlockScale::none) return;
    for (int i = threadIdx.x; i < kCodes; i += blockDim.x)
      tables[kCodes + i] = decode_block_scale(d, static_cast<uint32_t>(i));
  }
  __device__ float4 load(const std::byte* packed, int index) const {
    uint32_t code[4];
    block_codec::load_four(packed, kBits, static_cast<size_t>(index), code);
    return make_float4(values[code[0]], values[code[1]], values[code[2]], values[code[3]]);
  }
};
template <>
struct LoadRule<block_codec::DescribedRule> : block_codec::DescribedRule {
  static constexpr bool kCoded = false;
  __device__ LoadRule(const FormatDescriptor& d, float*) : DescribedRule(d) {}
  __device__ float4 load(const std::byte* packed, int index) const {
    uint32_t code[4];
    block_codec::load_four(packed, size, static_cast<size_t>(index), code);
    return make_float4(decode(code[0]), decode(code[1]), decode(code[2]), decode(code[3]));
  }
};
struct Fp16Load {
  static constexpr bool kCoded = false;
  __device__ Fp16Load(const FormatDescriptor&, float*) {}
  __device__ float4 load(const std::byte* packed, int index) const {
    return four_fp16(*reinterpret_cast<const uint2*>(packed + 2 * index));
  }
};
/// Any other float of 16 bits.
struct ShiftedLoad : block_codec::ShiftedFloat {
  static constexpr bool kCoded = false;
  __device__ ShiftedLoad(const FormatDescriptor& d, float*) : ShiftedFloat(d.number) {}
  __device__ float4 load(const std::byte* packed, int index) const {
    const uint2 codes = *reinterpret_cast<const uint2*>(packed + 2 * index);
    return make_float4((*this)(codes.x & 0xFFFFu), (*this)(codes.x >> 16),
                       (*this)(codes.y & 0xFFFFu), (*this)(codes.y >> 16));
  }
};
/// Blocks of 16 columns with E4M3 scales below an FP32 scale: decode_read decodes them itself.
struct Nvfp4Load {
  static constexpr bool kCoded = false;
  __device__ Nvfp4Load(const FormatDescriptor&, float*) {}
};

/// Outputs from a packed read checkpoint: of the rows that do not flush, and of all where a flush
/// reads the old checkpoint too. Rule loads elements.
template <class Act, class Rule>
__global__ void __launch_bounds__(256) decode_read(const __grid_constant__ DecodeLaunch p) {
  extern __shared__ __align__(16) std::byte shared[];
  const Mamba2Layer& layer = p.layer;
  DecodeBlock<Act> block(p, reinterpret_cast<float*>(shared));
  const bool flush = block.t + 1 == p.plan.window;
  if (flush && p.plan.flush_output == FlushOutput::recurrence) return;
  float* work = block.work;
  const DecodeLayout& at = block.at;
  const std::byte* read = p.plan.read >= 0 ? p.states.read + block.row * p.states.read_row_stride +
                                                 block.head * p.states.read_head_stride
                                           : p.states.recurrence + block.row * p.states.row_stride +
                                                 block.head * p.states.head_stride;
  const int head_dim = layer.head_dim, state_dim = layer.state_dim;
  // The packed head as it lies, 16 bytes a copy, over what a fold would use.
  std::byte* packed = reinterpret_cast<std::byte*>(work + at.b);
  for (size_t i = 16 * threadIdx.x; i < p.read_bytes; i += 16 * blockDim.x) {
    copy_async(packed + i, read + i);
  }
  std::byte* behind = packed + (p.read_bytes + 15) / 16 * 16;
  const FormatDescriptor& d =
      p.formats[p.plan.read >= 0 ? p.plan.read : p.plan.recurrence].descriptor;
  float* tables = reinterpret_cast<float*>(behind);
  const Rule rule(d, tables);
  block.copy_ring(behind + (Rule::kCoded ? 2 * kCodes * sizeof(float) : 0));
  block.take_inputs(flush);
  wait_for_copies();
  __syncthreads();
  block.read_weights();
  const PackedLayout& l = p.read_layout;
  const int part = threadIdx.x & 3, groups = blockDim.x >> 2, n16 = state_dim / 16;
  const bool blocks = l.blocks_down > 0, row_span = p.read_span == Span::row;
  const BlockScale kind = p.read_scale;
  const float* outers = reinterpret_cast<const float*>(packed + l.outer);
  for (int base = 0; base < head_dim; base += groups) {
    const int r = min(base + static_cast<int>(threadIdx.x >> 2), head_dim - 1);
    const float outer = l.outer_count > 0 ? outers[row_span ? r : 0] : 1.0f;
    float4 sum = make_float4(0, 0, 0, 0);
    if constexpr (std::is_same_v<Rule, Nvfp4Load>) {
      const std::byte* scales = packed + l.scales + r * n16;
#pragma unroll 4
      for (int m = 0; m < n16; ++m) {
        const int column = 16 * m + 4 * part;
        const float4 v =
            four_nvfp4(*reinterpret_cast<const uint16_t*>(packed + (r * state_dim + column) / 2),
                       e4m3_scale(static_cast<uint32_t>(scales[m])), outer);
        sum = fma4(v, load4(work + at.c + column), sum);
      }
    } else if (Rule::kCoded && p.coded_scales) {
      // Blocks within a row that begin on multiples of 16 columns, or none.
      const std::byte* scales = packed + l.scales + r * l.blocks_across;
      float scale = 1.0f;
      int next = blocks ? 0 : state_dim;
#pragma unroll 4
      for (int m = 0; m < n16; ++m) {
        const int column = 16 * m + 4 * part;
        if (16 * m == next) {
          scale = tables[kCodes + static_cast<int>(*scales++)];
          next += l.block_columns;
        }
        float4 v = rule.load(packed, r * state_dim + column);
        v = make_float4(v.x * scale * outer, v.y * scale * outer, v.z * scale * outer,
                        v.w * scale * outer);
        sum = fma4(v, load4(work + at.c + column), sum);
      }
    } else {
      for (int m = 0; m < n16; ++m) {
        const int column = 16 * m + 4 * part;
        const float4 loaded = rule.load(packed, r * state_dim + column);
        float v[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        if (blocks) {
          // Blocks of 4 columns and more begin on multiples of 4; others are looked up one by one.
          const bool one = l.block_columns % 4 == 0;
          float scale = 1;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (i == 0 || !one) {
              const size_t index = static_cast<size_t>(r / l.block_rows) * l.blocks_across +
                                   (column + i) / l.block_columns;
              const uint32_t code =
                  block_codec::load_small(packed + l.scales + index * l.scale_size, l.scale_size);
              scale = kind == BlockScale::e8m0 ? decode_e8m0(code) : decode_block_scale(d, code);
            }
            v[i] = v[i] * scale;
          }
        }
        if (l.outer_count > 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] = v[i] * outer;
        }
        sum = fma4(make_float4(v[0], v[1], v[2], v[3]), load4(work + at.c + column), sum);
      }
    }
    const float total = sum_of_lanes(sum);
    if (part == 0 && base + static_cast<int>(threadIdx.x >> 2) < head_dim) work[at.z + r] = total;
  }
  __syncthreads();
  block.window_output();
}

/// The rows that flush: fold, output, encoding of both roles. A block takes one head and every
/// gridDim.y-th of them.
template <class Act>
__global__ void __launch_bounds__(256) decode_flush(const __grid_constant__ DecodeLaunch p) {
  extern __shared__ __align__(16) std::byte shared[];
  each_flushing_row(p.rows, p.plan.window, static_cast<int>(blockIdx.y),
                    static_cast<int>(gridDim.y), [&](int row) {
                      flush_head<Act>(p, row, static_cast<int>(blockIdx.x), shared);
                      __syncthreads();
                    });
}

using Kernel = void (*)(const DecodeLaunch);

bool same_float(const FormatDescriptor& d, const FloatFormat& f) {
  return d.element == ElementKind::floating && d.number == f;
}

template <class Act>
Kernel read_kernel(const FormatDescriptor& read, const PackedLayout& l, bool nvfp4) {
  using namespace block_codec;
  if (read.element == ElementKind::fp32) return decode_read<Act, LoadRule<Fp32Rule>>;
  if (nvfp4) return decode_read<Act, Nvfp4Load>;
  if (same_float(read, kFp16)) return decode_read<Act, Fp16Load>;
  if (l.code_size == 4) return decode_read<Act, CodedLoad<4>>;
  if (l.code_size == 8) return decode_read<Act, CodedLoad<8>>;
  if (l.code_size == 16 && ShiftedFloat::takes(read)) return decode_read<Act, ShiftedLoad>;
  return decode_read<Act, LoadRule<DescribedRule>>;
}

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("mamba2 decode: " + message);
}

void check_format(const StateFormat& format) {
  const FormatDescriptor& d = format.descriptor;
  if (format.residual || format.library || d.hadamard != Axis::none || d.column_scale ||
      d.zero_point != ZeroPoint::none || d.span == Span::layer) {
    refuse(format.name +
           ": expected a format without transform, zero point, column scale, residual, library and "
           "scale "
           "over the layer; mamba2_advance_cuda takes more");
  }
}

__global__ void move_on(DecodeRows rows, int window) {
  const int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows.rows) return;
  rows.pending[r] = rows.pending[r] + 1 == window ? 0 : rows.pending[r] + 1;
  rows.position[r] += 1;
}

}  // namespace

void mamba2_decode_cuda(const Mamba2Layer& layer, const HeadPlan& plan, const DecodeRows& rows,
                        const DecodeStates& states, const Mamba2DecodeStep& step,
                        CudaStream stream) {
  if (rows.rows == 0) return;
  if (layer.state_dim % 16 != 0) {
    refuse("state_dim " + std::to_string(layer.state_dim) + ", expected a multiple of 16");
  }
  if (layer.head_dim % 8 != 0)
    refuse("head_dim " + std::to_string(layer.head_dim) + ", expected a multiple of 8");
  if (plan.window < 1 || plan.window > kMaxWindow) {
    refuse("window " + std::to_string(plan.window) + ", expected 1 to " +
           std::to_string(kMaxWindow));
  }
  check_format(*plan.recurrence.format);
  if (plan.read) check_format(*plan.read->format);
  if (!rows.pending || !rows.position || !rows.stream || !states.recurrence ||
      (plan.read && !states.read) || !step.x || !step.dt || !step.b || !step.c || !step.y ||
      !step.ring_x || !step.ring_dt || !step.ring_b) {
    refuse("an array is null");
  }
  if (!on_16_bytes({step.x, step.b, step.c, step.y, step.ring_x, step.ring_b}))
    refuse("an array is not on a multiple of 16 bytes");
  if (mamba2_decode_fp32(layer, plan, rows, states, step, stream)) return;
  const StateShape shape{layer.head_dim, layer.state_dim};
  std::vector<RandomKey> heads(static_cast<size_t>(layer.heads));
  for (int h = 0; h < layer.heads; ++h) {
    heads[static_cast<size_t>(h)].layer = static_cast<uint32_t>(layer.layer);
    heads[static_cast<size_t>(h)].head = static_cast<uint32_t>(layer.head_offset + h);
  }
  DecodeLaunch launch{};
  launch.layer = layer;
  launch.rows = rows;
  launch.states = states;
  launch.step = step;
  const StateFormat& read = plan.read ? *plan.read->format : *plan.recurrence.format;
  launch.read_bytes = packed_bytes(read, shape);
  launch.plan.window = plan.window;
  launch.plan.flush_output = plan.flush_output;
  launch.plan.dot = plan.dot;
  launch.plan.seed = plan.seed;
  launch.plan.recurrence_stochastic = plan.recurrence.rounding == Rounding::stochastic;
  launch.plan.read_stochastic = plan.read && plan.read->rounding == Rounding::stochastic;
  launch.read_layout = packed_layout(read.descriptor, layer.head_dim, layer.state_dim);
  launch.read_span = read.descriptor.span;
  launch.read_scale = read.descriptor.block_scale;
  const bool nvfp4 = same_float(read.descriptor, kE2m1) &&
                     launch.read_scale == BlockScale::floating &&
                     read.descriptor.scale_number == kE4m3 && launch.read_layout.block_rows == 1 &&
                     launch.read_layout.block_columns == 16 && launch.read_layout.outer_count == 1;
  launch.coded_scales =
      launch.read_layout.blocks_down == 0 ||
      (launch.read_layout.block_rows == 1 && launch.read_layout.block_columns % 16 == 0 &&
       launch.read_layout.scale_size == 1);
  launch.plan.read = -1;
  const bool bf16 = step.activation == RecordType::bf16;
  const int threads = std::clamp((2 * layer.head_dim + 31) / 32 * 32, 64, 256);
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
  const DecodeLayout at(layer.head_dim, layer.state_dim, plan.window);
  const dim3 all(static_cast<unsigned>(rows.rows * layer.heads));
  const size_t ring_bytes =
      static_cast<size_t>(plan.window) * (layer.head_dim + layer.state_dim) * (bf16 ? 2 : 4);
  FormatTable formats(heads);
  launch.plan.recurrence = formats.add(*plan.recurrence.format);
  if (plan.read) launch.plan.read = formats.add(*plan.read->format);
  std::copy(formats.on_host().begin(), formats.on_host().end(), launch.formats);
  if (formats.scales_on_host().size() > std::size(launch.fixed_scales)) {
    refuse(std::to_string(layer.heads) + " heads with scales given in advance, expected at most " +
           std::to_string(kMostHeads));
  }
  std::copy(formats.scales_on_host().begin(), formats.scales_on_host().end(), launch.fixed_scales);
  if ((plan.window > 1 || plan.flush_output == FlushOutput::read) &&
      !mamba2_read_nvfp4(layer, plan, rows, states, step, stream)) {
    const PackedLayout& l = launch.read_layout;
    start(bf16 ? read_kernel<__nv_bfloat16>(read.descriptor, l, nvfp4)
               : read_kernel<float>(read.descriptor, l, nvfp4),
          all, threads,
          static_cast<size_t>(at.b) * sizeof(float) + (launch.read_bytes + 15) / 16 * 16 +
              (l.code_size <= 8 && !nvfp4 ? 2 * kCodes * sizeof(float) : 0) + ring_bytes);
  }
  if (mamba2_flush_rows(layer, plan, rows, states, step, stream)) return;
  const dim3 some(static_cast<unsigned>(layer.heads),
                  static_cast<unsigned>(std::min(rows.rows, plan.window == 1 ? 65535 : 32)));
  start(bf16 ? decode_flush<__nv_bfloat16> : decode_flush<float>, some, threads,
        block_codec_bytes(layer.head_dim) +
            (static_cast<size_t>(at.large) +
             static_cast<size_t>(layer.head_dim) * padded_row(layer.state_dim)) *
                sizeof(float));
}

void decode_step_cuda(const DecodeRows& rows, int window, CudaStream stream) {
  if (rows.rows == 0) return;
  move_on<<<static_cast<unsigned>((rows.rows + 127) / 128), 128, 0, stream>>>(rows, window);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
