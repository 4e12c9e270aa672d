#include "quant/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "quant/codec_library.h"
#include "quant/quantize_core.h"
#include "quant/state_format.h"

namespace replayeval {
namespace {

/// Bytes at the start of a residual memory: how many encodings it has seen. Before the first the
/// residual is zero whatever zero bytes decode to.
constexpr size_t kResidualHeader = 16;

/// In-place orthonormal Walsh-Hadamard transform of `count` numbers `stride` apart: butterflies of
/// distance 1, 2, 4, ..., then one product with 1 / sqrt(count) in FP32. It is its own inverse.
void hadamard(float* x, int count, int stride) {
  for (int distance = 1; distance < count; distance *= 2) {
    for (int start = 0; start < count; start += 2 * distance) {
      for (int i = start; i < start + distance; ++i) {
        float a = x[static_cast<size_t>(i) * stride];
        float b = x[static_cast<size_t>(i + distance) * stride];
        x[static_cast<size_t>(i) * stride] = a + b;
        x[static_cast<size_t>(i + distance) * stride] = a - b;
      }
    }
  }
  float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(count)));
  for (int i = 0; i < count; ++i) x[static_cast<size_t>(i) * stride] *= factor;
}

void transform(const FormatDescriptor& d, StateShape shape, float* x) {
  if (d.hadamard == Axis::state_dim) {
    int size = d.hadamard_size > 0 ? d.hadamard_size : shape.state_dim;
    for (int64_t start = 0; start < shape.elements(); start += size) hadamard(x + start, size, 1);
  } else if (d.hadamard == Axis::head_dim) {
    int size = d.hadamard_size > 0 ? d.hadamard_size : shape.head_dim;
    for (int r = 0; r < shape.head_dim; r += size) {
      for (int c = 0; c < shape.state_dim; ++c) {
        hadamard(x + static_cast<size_t>(r) * shape.state_dim + c, size, shape.state_dim);
      }
    }
  }
}

/// c_n = max over rows of |x|, 1 if 0; x becomes x / c. Returns c.
std::vector<float> divide_columns(StateShape shape, float* x) {
  std::vector<float> scale(static_cast<size_t>(shape.state_dim), 0.0f);
  for (int r = 0; r < shape.head_dim; ++r) {
    const float* row = x + static_cast<size_t>(r) * shape.state_dim;
    for (int c = 0; c < shape.state_dim; ++c) scale[c] = larger(scale[c], amax_term(row[c]));
  }
  for (float& s : scale) s = s > 0 ? s : 1.0f;
  for (int r = 0; r < shape.head_dim; ++r) {
    float* row = x + static_cast<size_t>(r) * shape.state_dim;
    for (int c = 0; c < shape.state_dim; ++c) row[c] = row[c] / scale[c];
  }
  return scale;
}

float fixed_scale(const StateFormat& format, const RandomKey& key) {
  if (format.descriptor.span != Span::fixed) return 0;
  std::pair<int, int> wanted(static_cast<int>(key.layer), static_cast<int>(key.head));
  auto found = std::partition_point(
      format.fixed_scales.begin(), format.fixed_scales.end(),
      [&](const FixedScale& s) { return std::pair(s.layer, s.head) < wanted; });
  if (found != format.fixed_scales.end() && std::pair(found->layer, found->head) == wanted) {
    return found->scale;
  }
  throw std::invalid_argument(format.name + ": no scale for layer " + std::to_string(key.layer) +
                              ", head " + std::to_string(key.head) +
                              "; the file of scales needs one line for each");
}

/// Scratch memory of a thread; parts are taken by index so that a residual's inner encoding finds
/// its own.
float* scratch(int part, size_t count) {
  thread_local std::vector<float> memory[3];
  if (memory[part].size() < count) memory[part].resize(count);
  return memory[part].data();
}
constexpr int kKernelScratch = 0, kWorkScratch = 1, kResidualScratch = 2;

uint32_t load_bytes(const std::byte* from, int size) {
  uint32_t value = 0;
  std::memcpy(&value, from, static_cast<size_t>(size));
  return value;
}

template <class Body>
void each_block(const PackedLayout& l, Body&& body) {
  for (int down = 0; down < l.blocks_down; ++down) {
    for (int across = 0; across < l.blocks_across; ++across) {
      size_t first = static_cast<size_t>(down) * l.block_rows * l.state_dim +
                     static_cast<size_t>(across) * l.block_columns;
      body(static_cast<size_t>(down) * l.blocks_across + across, first);
    }
  }
}

/// Measures and stores the zero point of every block and subtracts it from x.
void subtract_zero_points(const FormatDescriptor& d, const PackedLayout& l, float* x,
                          std::byte* packed) {
  each_block(l, [&](size_t block, size_t first) {
    float least = kFloatMax, most = -kFloatMax;
    bool any = false;
    for (int r = 0; r < l.block_rows; ++r) {
      const float* row = x + first + static_cast<size_t>(r) * l.state_dim;
      for (int c = 0; c < l.block_columns; ++c) {
        if (is_nan(row[c])) continue;
        any = true;
        least = smaller(least, larger(row[c], -kFloatMax));
        most = larger(most, smaller(row[c], kFloatMax));
      }
    }
    uint32_t code = any ? zero_point_code(d, least, most) : 0u;
    std::memcpy(packed + l.zeros + block * l.zero_size, &code, static_cast<size_t>(l.zero_size));
    float z = zero_point_value(d, code);
    for (int r = 0; r < l.block_rows; ++r) {
      float* row = x + first + static_cast<size_t>(r) * l.state_dim;
      for (int c = 0; c < l.block_columns; ++c) row[c] = row[c] - z;
    }
  });
}

void add_zero_points(const FormatDescriptor& d, const PackedLayout& l, const std::byte* packed,
                     float* x) {
  each_block(l, [&](size_t block, size_t first) {
    float z = zero_point_value(d, load_bytes(packed + l.zeros + block * l.zero_size, l.zero_size));
    for (int r = 0; r < l.block_rows; ++r) {
      float* row = x + first + static_cast<size_t>(r) * l.state_dim;
      for (int c = 0; c < l.block_columns; ++c) row[c] = row[c] + z;
    }
  });
}

/// encode_head without residual; `state` is what is rounded. The number of non-finite elements goes
/// to counts.
void encode_plain(const StateFormat& format, Rounding rounding, StateShape shape,
                  const float* state, const RandomKey& key, uint32_t role_offset, float span_amax,
                  std::byte* packed, EncodeCounts* counts) {
  const FormatDescriptor& d = format.descriptor;
  EncodeTask task;
  task.descriptor = &d;
  task.layout = packed_layout(d, shape.head_dim, shape.state_dim);
  task.stochastic = rounding == Rounding::stochastic && d.element != ElementKind::fp32;
  task.key = philox_key(key, role_offset);
  task.layer_amax = span_amax;
  task.fixed_scale = fixed_scale(format, key);
  task.packed = packed;
  task.x = state;
  const PackedLayout& l = task.layout;
  for (size_t section : {l.scales, l.zeros, l.outer}) {  // padding before a section
    if (section >= 4) std::memset(packed + section - 4, 0, 4);
  }
  bool prepared = d.hadamard != Axis::none || d.column_scale || d.zero_point != ZeroPoint::none;
  uint64_t non_finite = 0;
  if (prepared) {
    size_t n = static_cast<size_t>(shape.elements());
    non_finite = count_non_finite(state, shape.elements());
    float* work = scratch(kWorkScratch, n);
    std::memcpy(work, state, n * sizeof(float));
    transform(d, shape, work);
    if (d.column_scale) {
      std::vector<float> scale = divide_columns(shape, work);
      std::memcpy(packed + l.columns, scale.data(), scale.size() * sizeof(float));
    }
    if (d.zero_point != ZeroPoint::none) subtract_zero_points(d, l, work, packed);
    task.x = work;
  }
  if (has_fast_path(d, l)) {
    REPLAYEVAL_SIMD_CALL(encode_fast)
    (task, scratch(kKernelScratch, fast_scratch_floats(l)), counts);
  } else {
    encode_reference(task, counts);
  }
  if (prepared) counts->non_finite = non_finite;
}

void decode_plain(const StateFormat& format, StateShape shape, const std::byte* packed,
                  float* state) {
  const FormatDescriptor& d = format.descriptor;
  PackedLayout l = packed_layout(d, shape.head_dim, shape.state_dim);
  if (has_fast_path(d, l)) {
    REPLAYEVAL_SIMD_CALL(decode_fast)
    (d, l, packed, scratch(kKernelScratch, fast_scratch_floats(l)), state);
  } else {
    decode_reference(d, l, packed, state);
  }
  if (d.zero_point != ZeroPoint::none) add_zero_points(d, l, packed, state);
  if (d.column_scale) {
    std::vector<float> scale(static_cast<size_t>(shape.state_dim));
    std::memcpy(scale.data(), packed + l.columns, scale.size() * sizeof(float));
    for (int r = 0; r < shape.head_dim; ++r) {
      float* row = state + static_cast<size_t>(r) * shape.state_dim;
      for (int c = 0; c < shape.state_dim; ++c) row[c] = row[c] * scale[c];
    }
  }
  transform(d, shape, state);
}

bool fast_float(const FloatFormat& f, int random_bits) {
  bool decodes = f.exponent_bits == 8 ? f.bias == 127 : f.bias + f.mantissa_bits <= 126;
  return decodes && f.bias <= 127 && f.mantissa_bits > 0 && random_bits + f.mantissa_bits + 1 <= 31;
}

}  // namespace

PhiloxKey philox_key(const RandomKey& key, uint32_t role_offset) {
  PhiloxKey p;
  p.key0 = static_cast<uint32_t>(key.seed);
  p.key1 = static_cast<uint32_t>(key.seed >> 32);
  p.counter1 = key.head + (key.layer << 16);
  p.counter2 = key.position;
  p.counter3 = static_cast<uint32_t>(key.role) + role_offset + 4 * key.stream;
  return p;
}

bool has_fast_path(const FormatDescriptor& d, const PackedLayout& l) {
  if (l.code_size == 4 && l.state_dim % 2 != 0) return false;
  if (d.element == ElementKind::floating && !fast_float(d.number, d.random_bits)) return false;
  if (d.element == ElementKind::values && d.list.count < 2) return false;
  return d.block_scale != BlockScale::floating || fast_float(d.scale_number, 1);
}

size_t fast_scratch_floats(const PackedLayout& l) {
  // Five rows and eight matrices of blocks, each padded, and a search tree.
  size_t row = static_cast<size_t>(l.state_dim) + 80;
  size_t blocks = static_cast<size_t>(l.blocks_down) * static_cast<size_t>(l.blocks_across) + 32;
  return 512 + 5 * row + 8 * blocks;
}

size_t packed_bytes(const StateFormat& format, StateShape shape) {
  check_shape(format, shape);
  if (format.library)
    return format.library->codec().packed_bytes({shape.head_dim, shape.state_dim});
  return packed_layout(format.descriptor, shape.head_dim, shape.state_dim).total;
}

size_t memory_bytes(const StateFormat& format, StateShape shape) {
  check_shape(format, shape);
  if (format.library)
    return format.library->codec().memory_bytes({shape.head_dim, shape.state_dim});
  return format.residual ? kResidualHeader + packed_bytes(*format.residual, shape) : 0;
}

float state_amax(const float* state, int64_t count) {
  return REPLAYEVAL_SIMD_CALL(amax_fast)(state, count);
}

uint64_t count_non_finite(const float* state, int64_t count) {
  return REPLAYEVAL_SIMD_CALL(non_finite_fast)(state, count);
}

void encode_head(const StateCodec& codec, StateShape shape, const float* state,
                 const RandomKey& key, float span_amax, std::byte* packed, std::byte* memory,
                 EncodeHealth* health) {
  const StateFormat& format = *codec.format;
  health->elements += static_cast<uint64_t>(shape.elements());
  if (format.library) {
    health->non_finite += count_non_finite(state, shape.elements());
    encode_library(*format.library, codec.rounding, shape, state, key, packed, memory, health);
    return;
  }
  EncodeCounts counts;
  if (!format.residual) {
    encode_plain(format, codec.rounding, shape, state, key, 0, span_amax, packed, &counts);
  } else {
    size_t n = static_cast<size_t>(shape.elements());
    float* sum = scratch(kResidualScratch, 2 * n);
    float* error = sum + n;
    std::memcpy(sum, state, n * sizeof(float));
    uint64_t seen = 0;
    std::memcpy(&seen, memory, sizeof(seen));
    if (seen > 0) {
      decode_plain(*format.residual, shape, memory + kResidualHeader, error);
      for (size_t i = 0; i < n; ++i) sum[i] = sum[i] + error[i];
    }
    encode_plain(format, codec.rounding, shape, sum, key, 0, span_amax, packed, &counts);
    counts.non_finite = count_non_finite(state, shape.elements());
    decode_plain(format, shape, packed, error);
    for (size_t i = 0; i < n; ++i) {
      float e = sum[i] - error[i];
      error[i] = magnitude(e) <= kFloatMax ? e : 0.0f;
    }
    EncodeCounts ignored;
    encode_plain(*format.residual, codec.rounding, shape, error, key, 2, 0,
                 memory + kResidualHeader, &ignored);
    ++seen;
    std::memcpy(memory, &seen, sizeof(seen));
  }
  health->non_finite += counts.non_finite;
  health->saturated += counts.saturated;
  health->clipped += counts.clipped;
  health->vanished += counts.vanished;
}

void decode_head(const StateFormat& format, StateShape shape, const std::byte* packed,
                 float* state) {
  if (format.library) {
    decode_library(*format.library, shape, packed, state);
  } else {
    decode_plain(format, shape, packed, state);
  }
}

}  // namespace replayeval
