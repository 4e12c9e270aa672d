// The plain interpreter of a FormatDescriptor: element by element, straight from the definition
// (DESIGN.md section 1). Kept as what the vectorised one is compared with.
#include <cstring>
#include <vector>

#include "quant/quantize_core.h"

namespace replayeval {
namespace {

void store_code(std::byte* codes, int size, size_t index, uint32_t code) {
  if (size == 4) {
    std::byte nibble = static_cast<std::byte>(code & 15u);
    std::byte& pair = codes[index / 2];
    pair = index % 2 == 0 ? (pair & std::byte{0xF0}) | nibble
                          : (pair & std::byte{0x0F}) | (nibble << 4);
    return;
  }
  size_t bytes = static_cast<size_t>(size) / 8;
  for (size_t b = 0; b < bytes; ++b) {
    codes[index * bytes + b] = static_cast<std::byte>(code >> (8 * b));
  }
}

uint32_t load_code(const std::byte* codes, int size, size_t index) {
  if (size == 4) {
    uint32_t pair = static_cast<uint32_t>(codes[index / 2]);
    return index % 2 == 0 ? pair & 15u : pair >> 4;
  }
  size_t bytes = static_cast<size_t>(size) / 8;
  uint32_t code = 0;
  for (size_t b = 0; b < bytes; ++b) {
    code |= static_cast<uint32_t>(codes[index * bytes + b]) << (8 * b);
  }
  return code;
}

}  // namespace

void encode_reference(const EncodeTask& task, EncodeCounts* counts) {
  const FormatDescriptor& d = *task.descriptor;
  const PackedLayout& l = task.layout;
  const int columns = l.state_dim;
  std::byte* packed = task.packed;
  std::memset(packed, 0, l.zeros);  // zero points, behind, are there already
  bool blocks = d.block_scale != BlockScale::none;
  const float* x = task.x;

  auto each_in_block = [&](int down, int across, auto&& body) {
    for (int r = down * l.block_rows; r < (down + 1) * l.block_rows; ++r) {
      for (int c = across * l.block_columns; c < (across + 1) * l.block_columns; ++c) {
        body(r, c, static_cast<size_t>(r) * columns + c);
      }
    }
  };

  std::vector<OuterScale> outer(static_cast<size_t>(l.head_dim));
  float head_amax = 0;
  for (int i = 0; i < l.head_dim * columns; ++i) head_amax = larger(head_amax, amax_term(x[i]));
  for (int r = 0; r < l.head_dim; ++r) {
    float amax = d.span == Span::layer ? task.layer_amax : head_amax;
    if (d.span == Span::row) {
      amax = 0;
      for (int c = 0; c < columns; ++c) {
        amax = larger(amax, amax_term(x[static_cast<size_t>(r) * columns + c]));
      }
    }
    outer[r] = d.span == Span::fixed ? fixed_outer_scale(task.fixed_scale) : outer_scale(d, amax);
  }
  for (int i = 0; i < l.outer_count; ++i) {
    std::memcpy(packed + l.outer + 4 * static_cast<size_t>(i), &outer[i].decode, 4);
  }

  auto element = [&](float value, const ScaledBlock& scale) {
    return d.order == ScaleOrder::modelopt && blocks ? value / scale.factor : value * scale.factor;
  };
  auto encode_one = [&](int r, int c, size_t i, const ScaledBlock& scale) {
    float y = d.scaled() ? element(x[i], scale) : x[i];
    uint32_t random = task.stochastic ? random_word(task.key, r, c) : 0u;
    store_code(packed, l.code_size, i, encode_element(d, y, task.stochastic, random));
    bool finite = magnitude(x[i]) <= kFloatMax;
    counts->non_finite += finite ? 0 : 1;
    bool outside = (y > d.clip_high || y < d.clip_low) && d.saturate;
    bool vanished = blocks && scale.scale == 0 && x[i] != 0;
    counts->vanished += vanished && finite ? 1 : 0;
    if (!outside || vanished) return;
    if (!d.scaled() || !finite) {
      ++counts->saturated;
    } else {
      ++counts->clipped;
    }
  };

  if (!blocks) {
    for (int r = 0; r < l.head_dim; ++r) {
      ScaledBlock scale = block_scale(d, 0, outer[r], 1.0f);
      for (int c = 0; c < columns; ++c) {
        encode_one(r, c, static_cast<size_t>(r) * columns + c, scale);
      }
    }
    return;
  }

  for (int down = 0; down < l.blocks_down; ++down) {
    const OuterScale& o = outer[static_cast<size_t>(down) * l.block_rows];
    for (int across = 0; across < l.blocks_across; ++across) {
      float amax = 0;
      each_in_block(down, across,
                    [&](int, int, size_t i) { amax = larger(amax, amax_term(x[i])); });
      ScaledBlock best = block_scale(d, amax, o, d.candidates[0]);
      float best_error = 0;
      for (int k = 0; k < d.candidate_count && d.candidate_count > 1; ++k) {
        ScaledBlock scale = block_scale(d, amax, o, d.candidates[k]);
        float error = 0;
        each_in_block(down, across, [&](int, int, size_t i) {
          uint32_t code = encode_element(d, element(x[i], scale), false, 0);
          float difference = candidate_value(d, decode_element(d, code) * scale.scale, o) - x[i];
          error =
              error + (d.choose == Choose::mse ? difference * difference : magnitude(difference));
        });
        if (k == 0 || error < best_error) {
          best = scale;
          best_error = error;
        }
      }
      size_t block = static_cast<size_t>(down) * l.blocks_across + across;
      store_code(packed + l.scales, l.scale_size * 8, block, best.code);
      each_in_block(down, across, [&](int r, int c, size_t i) { encode_one(r, c, i, best); });
    }
  }
}

void decode_reference(const FormatDescriptor& d, const PackedLayout& l, const std::byte* packed,
                      float* x) {
  for (int r = 0; r < l.head_dim; ++r) {
    float outer = 1;
    if (l.outer_count > 0) {
      size_t index = d.span == Span::row ? static_cast<size_t>(r) : 0;
      std::memcpy(&outer, packed + l.outer + 4 * index, 4);
    }
    for (int c = 0; c < l.state_dim; ++c) {
      size_t i = static_cast<size_t>(r) * l.state_dim + c;
      float value = decode_element(d, load_code(packed, l.code_size, i));
      if (l.blocks_down > 0) {
        size_t block =
            static_cast<size_t>(r / l.block_rows) * l.blocks_across + c / l.block_columns;
        value =
            value * decode_block_scale(d, load_code(packed + l.scales, l.scale_size * 8, block));
        if (l.outer_count > 0) value = value * outer;
      } else if (l.outer_count > 0) {
        value = value * outer;
      }
      x[i] = value;
    }
  }
}

}  // namespace replayeval
