// One head a block: the matrix goes to shared memory (to global scratch where it does not fit) and
// is rounded there.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "quant/device_formats.cuh"
#include "quant/quantize_cuda.h"

namespace replayeval {
namespace {

constexpr int kThreads = 256;

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("quantize: " + message);
}

struct HeadsToEncode {
  const DeviceFormat* formats;
  const float* fixed_scales;
  int format;
  bool stochastic;
  int head_dim, state_dim;
  const RandomKey* keys;
  const float* state;
  const float* span_amax;
  std::byte* packed;
  size_t packed_stride;
  std::byte* memory;
  size_t memory_stride;
  EncodeHealth* health;
  float* work;   // [heads, elements] or null: shared memory
  float* spare;  // [heads, elements] for residuals
};

__global__ void __launch_bounds__(kThreads) encode_heads(HeadsToEncode p) {
  extern __shared__ __align__(16) std::byte shared[];
  BlockCodecMemory* memory = reinterpret_cast<BlockCodecMemory*>(shared);
  const size_t head = blockIdx.x;
  const int elements = p.head_dim * p.state_dim;
  const float* from = p.state + head * elements;
  MatrixView m{p.work ? p.work + head * elements
                      : reinterpret_cast<float*>(shared + block_codec_bytes(p.head_dim)),
               p.work ? p.state_dim : padded_row(p.state_dim), 1};
  for (int i = threadIdx.x; i < elements; i += blockDim.x)
    m.at(i / p.state_dim, i % p.state_dim) = from[i];
  __syncthreads();
  EncodeCall call;
  call.formats = p.formats;
  call.fixed_scales = p.fixed_scales;
  call.format = p.format;
  call.stochastic = p.stochastic;
  call.head_dim = p.head_dim;
  call.state_dim = p.state_dim;
  call.head = static_cast<int>(head);
  call.key = device_philox_key(p.keys[head]);
  call.layer_amax = p.span_amax ? *p.span_amax : 0.0f;
  call.packed = p.packed + head * p.packed_stride;
  call.residual_memory = p.memory ? p.memory + head * p.memory_stride : nullptr;
  call.spare = p.spare ? p.spare + head * elements : nullptr;
  ThreadCounts counts;
  encode_block(call, m, memory, &counts);
  add_health(p.health ? p.health + head : nullptr, static_cast<uint64_t>(elements), counts);
}

__global__ void __launch_bounds__(kThreads)
    decode_heads(const DeviceFormat* format, int head_dim, int state_dim, const std::byte* packed,
                 size_t packed_stride, float* state) {
  extern __shared__ __align__(16) std::byte shared[];
  const size_t head = blockIdx.x;
  decode_block(format->descriptor, head_dim, state_dim, packed + head * packed_stride,
               MatrixView{state + head * head_dim * state_dim, state_dim, 1},
               reinterpret_cast<BlockCodecMemory*>(shared));
}

__global__ void __launch_bounds__(kThreads)
    amax_of(const float* state, int64_t count, uint32_t* amax) {
  float largest = 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    largest = larger(largest, amax_term(state[i]));
  }
  largest = block_codec::warp_max(largest);
  // Magnitudes are ordered as their bits.
  if ((threadIdx.x & 31) == 0) atomicMax(amax, float_bits(largest));
}

}  // namespace

int FormatTable::add(const StateFormat& format) {
  const auto found = std::find(known_.begin(), known_.end(), &format);
  if (found != known_.end()) return static_cast<int>(found - known_.begin());
  if (format.library) {
    throw std::invalid_argument(
        format.name +
        ": a codec from a library runs on the host; expected a described format on the device");
  }
  const int index = static_cast<int>(known_.size());
  known_.push_back(&format);
  formats_.emplace_back();
  DeviceFormat entry;
  entry.descriptor = format.descriptor;
  for (bool stochastic : {false, true}) {
    buckets_.push_back(format.descriptor.element == ElementKind::values
                           ? list_buckets(format.descriptor.list, stochastic)
                           : ListBuckets{});
  }
  if (format.descriptor.span == Span::fixed) {
    entry.fixed_first = static_cast<int>(scales_.size());
    for (const RandomKey& key : heads_) {
      const int layer = static_cast<int>(key.layer), head = static_cast<int>(key.head);
      check_fixed_scales(format, layer, head, 1);
      for (const FixedScale& s : format.fixed_scales) {
        if (s.layer == layer && s.head == head) {
          scales_.push_back(s.scale);
          break;
        }
      }
    }
  }
  if (format.residual) entry.residual = add(*format.residual);
  formats_[static_cast<size_t>(index)] = entry;
  return index;
}

void state_amax_cuda(const float* state, int64_t count, float* amax, CudaStream stream) {
  CUDA_CHECK(cudaMemsetAsync(amax, 0, sizeof(float), stream));
  const int64_t blocks = std::clamp<int64_t>((count + 4 * kThreads - 1) / (4 * kThreads), 1, 4096);
  amax_of<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      state, count, reinterpret_cast<uint32_t*>(amax));
  CUDA_CHECK(cudaGetLastError());
}

void encode_heads_cuda(const StateCodec& codec, StateShape shape, std::span<const RandomKey> keys,
                       const float* state, const float* span_amax, std::byte* packed,
                       size_t packed_stride, std::byte* memory, size_t memory_stride,
                       EncodeHealth* health, CudaStream stream) {
  if (keys.empty()) return;
  const StateFormat& format = *codec.format;
  if (packed_stride < packed_bytes(format, shape) && keys.size() > 1) {
    refuse(format.name + ": packed_stride " + std::to_string(packed_stride) +
           ", expected at least " + std::to_string(packed_bytes(format, shape)) + " bytes");
  }
  if (needs_layer_amax(format) && !span_amax)
    refuse(format.name + ": span_amax is null, expected the layer's largest");
  if (memory_bytes(format, shape) > 0 && !memory)
    refuse(format.name + ": memory is null, expected the residuals");
  FormatTable formats(std::vector<RandomKey>(keys.begin(), keys.end()));
  CallTables tables(stream);
  HeadsToEncode p{};
  p.format = formats.add(format);
  formats.add_to(&tables);
  const size_t keys_at = tables.add(keys);
  const size_t matrix_bytes = keys.size() * static_cast<size_t>(shape.elements()) * sizeof(float);
  size_t shared = block_codec_bytes(shape.head_dim) +
                  static_cast<size_t>(shape.head_dim) * padded_row(shape.state_dim) * sizeof(float);
  const bool in_shared = shared <= block_shared_limit();
  if (!in_shared) shared = block_codec_bytes(shape.head_dim);
  const size_t work_at = in_shared ? 0 : tables.reserve(matrix_bytes);
  const size_t spare_at = format.residual ? tables.reserve(matrix_bytes) : 0;
  tables.upload();
  p.formats = formats.formats(tables);
  p.fixed_scales = formats.scales(tables);
  p.stochastic = codec.rounding == Rounding::stochastic;
  p.head_dim = shape.head_dim;
  p.state_dim = shape.state_dim;
  p.keys = tables.table<const RandomKey>(keys_at);
  p.state = state;
  p.span_amax = span_amax;
  p.packed = packed;
  p.packed_stride = packed_stride;
  p.memory = memory;
  p.memory_stride = memory_stride;
  p.health = health;
  p.work = in_shared ? nullptr : tables.scratch<float>(work_at);
  p.spare = format.residual ? tables.scratch<float>(spare_at) : nullptr;
  CUDA_CHECK(cudaFuncSetAttribute(encode_heads, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared)));
  encode_heads<<<static_cast<unsigned>(keys.size()), kThreads, shared, stream>>>(p);
  CUDA_CHECK(cudaGetLastError());
}

void decode_heads_cuda(const StateFormat& format, StateShape shape, int heads,
                       const std::byte* packed, size_t packed_stride, float* state,
                       CudaStream stream) {
  if (heads == 0) return;
  if (packed_stride < packed_bytes(format, shape) && heads > 1) {
    refuse(format.name + ": packed_stride " + std::to_string(packed_stride) +
           ", expected at least " + std::to_string(packed_bytes(format, shape)) + " bytes");
  }
  if (format.library)
    refuse(format.name + ": a codec from a library runs on the host, expected a described format");
  CallTables tables(stream);
  DeviceFormat entry;
  entry.descriptor = format.descriptor;
  const size_t at = tables.add(std::span<const DeviceFormat>(&entry, 1));
  tables.upload();
  const size_t shared = block_codec_bytes(shape.head_dim);
  decode_heads<<<static_cast<unsigned>(heads), kThreads, shared, stream>>>(
      tables.table<const DeviceFormat>(at), shape.head_dim, shape.state_dim, packed, packed_stride,
      state);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace replayeval
