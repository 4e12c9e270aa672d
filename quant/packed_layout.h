// Where the parts of one packed head lie, and the rules for its scales: shared by the host and
// device interpreters of a FormatDescriptor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/codec.h"
#include "quant/state_format.h"

namespace replayeval {

/// Byte offsets of the sections of a packed head [head_dim, state_dim], each aligned to 4: codes,
/// block scales, block zero points, outer FP32 scales (one a row for Span::row, otherwise one),
/// column scales [state_dim] FP32. Codes of at most 4 bits lie two a byte, element 2i in the low
/// nibble; of at most 8, 16, 32 bits in 1, 2, 4 bytes, little-endian.
struct PackedLayout {
  int head_dim, state_dim;
  int block_rows, block_columns;  // resolved; head_dim x state_dim when there are no blocks
  int blocks_down, blocks_across;
  int code_size;   // bits in storage: 4, 8, 16, 32
  int scale_size;  // bytes of a block scale
  int zero_size;   // bytes of a zero point
  int outer_count;
  size_t scales, zeros, outer, columns, total;
};

REPLAYEVAL_HD constexpr size_t align_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

REPLAYEVAL_HD constexpr int storage_bits(int bits) {
  return bits <= 4 ? 4 : bits <= 8 ? 8 : bits <= 16 ? 16 : 32;
}

/// The block must divide the shape (check_shape).
REPLAYEVAL_HD constexpr PackedLayout packed_layout(const FormatDescriptor& d, int head_dim,
                                                   int state_dim) {
  PackedLayout l{};
  l.head_dim = head_dim;
  l.state_dim = state_dim;
  bool blocks = d.block_scale != BlockScale::none;
  l.block_rows = blocks && d.block_rows > 0 ? d.block_rows : head_dim;
  l.block_columns = blocks && d.block_columns > 0 ? d.block_columns : state_dim;
  l.blocks_down = blocks && l.block_rows > 0 ? head_dim / l.block_rows : 0;
  l.blocks_across = blocks && l.block_columns > 0 ? state_dim / l.block_columns : 0;
  l.code_size = storage_bits(d.code_bits);
  l.scale_size = d.block_scale == BlockScale::fp32       ? 4
                 : d.block_scale == BlockScale::e8m0     ? 1
                 : d.block_scale == BlockScale::floating ? storage_bits(d.scale_number.bits()) / 8
                                                         : 0;
  if (d.block_scale == BlockScale::floating && l.scale_size == 0) l.scale_size = 1;
  l.zero_size = d.zero_point == ZeroPoint::none ? 0 : d.zero_point_fp32 ? 4 : 2;
  l.outer_count = d.span == Span::none ? 0 : d.span == Span::row ? head_dim : 1;
  size_t elements = static_cast<size_t>(head_dim) * static_cast<size_t>(state_dim);
  size_t count = static_cast<size_t>(l.blocks_down) * static_cast<size_t>(l.blocks_across);
  l.scales = align_up((elements * static_cast<size_t>(l.code_size) + 7) / 8, 4);
  l.zeros = align_up(l.scales + count * static_cast<size_t>(l.scale_size), 4);
  l.outer = align_up(l.zeros + count * static_cast<size_t>(l.zero_size), 4);
  l.columns = l.outer + 4 * static_cast<size_t>(l.outer_count);
  l.total = l.columns + (d.column_scale ? 4 * static_cast<size_t>(state_dim) : 0);
  return l;
}

/// The FP32 scale of a span: g (`encode`), what is stored (`decode`), and the maximum it came from.
struct OuterScale {
  float encode = 1;
  float decode = 1;
  float amax = 0;
};

/// The limit t is q, or m q above block scales. g = min((1 / amax) t, FLT_MAX), 1 if amax = 0, in
/// this order as the vLLM and FlashInfer references round it; te, four_six: g = min(t / amax,
/// FLT_MAX), FLT_MAX if amax = 0; decode = 1 / g. modelopt: decode = amax / t, 1 if amax = 0.
REPLAYEVAL_HD constexpr OuterScale outer_scale(const FormatDescriptor& d, float amax) {
  OuterScale o;
  if (d.span == Span::none) return o;
  o.amax = amax;
  float limit = d.scale_max * d.divisor;  // scale_max is 1 without blocks
  if (d.order == ScaleOrder::modelopt) {
    o.decode = amax > 0 ? amax / limit : 1.0f;
    return o;
  }
  bool quotient = d.order == ScaleOrder::te || d.order == ScaleOrder::four_six;
  o.encode = quotient   ? (amax > 0 ? smaller(limit / amax, kFloatMax) : kFloatMax)
             : amax > 0 ? smaller(1.0f / amax * limit, kFloatMax)
                        : 1.0f;
  o.decode = 1.0f / o.encode;
  return o;
}

/// The outer scale given in advance: decode = scale.
REPLAYEVAL_HD constexpr OuterScale fixed_outer_scale(float scale) {
  return {smaller(1.0f / scale, kFloatMax), scale, 0};
}

/// A block scale: its code, its value s, and what x is multiplied by (divided by, in order
/// modelopt) to give the element y.
struct ScaledBlock {
  uint32_t code = 0;
  float scale = 1;
  float factor = 1;
};

REPLAYEVAL_HD constexpr float decode_block_scale(const FormatDescriptor& d, uint32_t code) {
  return d.block_scale == BlockScale::e8m0       ? decode_e8m0(code)
         : d.block_scale == BlockScale::floating ? decode_float(d.scale_number, code)
                                                 : bits_float(code);
}

/// Equations: ScaleOrder. FP32 block scales: e = min((1 / a) (q / c), FLT_MAX), 1 if a = 0, stored
/// 1 / e, y = x e. E8M0: the power of two is rounded from the exact quotient a g c / q in FP64
/// (`down` with q = 2^emax is 2^(floor(log2 a) - emax), OCP MX v1.0).
REPLAYEVAL_HD constexpr ScaledBlock block_scale(const FormatDescriptor& d, float amax,
                                                const OuterScale& outer, float candidate) {
  ScaledBlock b;
  if (d.block_scale == BlockScale::none) {
    b.factor = outer.encode;
    return b;
  }
  if (d.block_scale == BlockScale::fp32) {
    b.factor = amax > 0 ? smaller(1.0f / amax * (d.divisor / candidate), kFloatMax) : 1.0f;
    b.scale = 1.0f / b.factor;
    b.code = float_bits(b.scale);
    return b;
  }
  if (d.block_scale == BlockScale::e8m0) {
    double quotient = static_cast<double>(amax) * static_cast<double>(outer.encode) *
                      static_cast<double>(candidate) / static_cast<double>(d.divisor);
    b.code = quotient > 0 ? encode_e8m0(quotient, d.scale_rounding) : 0u;
    b.code = b.code < 0xFEu ? b.code : 0xFEu;
    b.scale = decode_e8m0(b.code);
    b.factor = smaller(1.0f / (b.scale * outer.decode), kFloatMax);
    return b;
  }
  float raw = d.order == ScaleOrder::vllm       ? outer.encode * (amax * (1.0f / d.divisor))
              : d.order == ScaleOrder::te       ? amax * (outer.encode * (1.0f / d.divisor))
              : d.order == ScaleOrder::four_six ? amax / d.divisor * outer.encode
              : amax > 0                        ? amax / (d.divisor * outer.decode)
                                                : 1.0f;
  b.code = encode_float_directed(d.scale_number, raw * candidate, d.scale_rounding);
  b.scale = decode_float(d.scale_number, b.code);
  float product = b.scale * outer.decode;
  b.factor = d.order == ScaleOrder::modelopt              ? product
             : b.scale > 0 || d.order != ScaleOrder::vllm ? smaller(1.0f / product, kFloatMax)
                                                          : 0.0f;
  return b;
}

/// What a candidate's element stands for when candidates are compared, from code * s: (code s A) /
/// (m q) under a measured outer scale (NVFP4 4over6 as published), (code s) / g under a fixed one.
REPLAYEVAL_HD constexpr float candidate_value(const FormatDescriptor& d, float product,
                                              const OuterScale& outer) {
  return d.span == Span::none    ? product
         : d.span == Span::fixed ? product * outer.decode
                                 : product * outer.amax / (d.scale_max * d.divisor);
}

/// The zero point of a block from its extremes (NaN ignored, infinity taken as FLT_MAX), as its
/// code: minimum, or midpoint = 0.5 least + 0.5 most.
REPLAYEVAL_HD constexpr uint32_t zero_point_code(const FormatDescriptor& d, float least,
                                                 float most) {
  float z = d.zero_point == ZeroPoint::minimum ? least : 0.5f * least + 0.5f * most;
  return d.zero_point_fp32 ? float_bits(z) : encode_float(d.zero_point_number, z);
}

REPLAYEVAL_HD constexpr float zero_point_value(const FormatDescriptor& d, uint32_t code) {
  return d.zero_point_fp32 ? bits_float(code) : decode_float(d.zero_point_number, code);
}

/// Code of one scaled element y. `random` is the Philox word; used only with `stochastic`.
REPLAYEVAL_HD constexpr uint32_t encode_element(const FormatDescriptor& d, float y, bool stochastic,
                                                uint32_t random) {
  switch (d.element) {
    case ElementKind::fp32:
      return float_bits(y);
    case ElementKind::floating:
      return stochastic ? encode_float_stochastic(d.number, y, random >> (32 - d.random_bits),
                                                  d.random_bits, d.saturate)
                        : encode_float(d.number, y, d.saturate);
    case ElementKind::integer: {
      int q = stochastic ? encode_integer_stochastic(y, d.lowest, d.highest, random >> 8)
                         : encode_integer(y, d.lowest, d.highest);
      return static_cast<uint32_t>(q) & ((1u << storage_bits(d.code_bits)) - 1u);
    }
    case ElementKind::values:
      return stochastic ? encode_value_stochastic(d.list, y, random >> 8) : encode_value(d.list, y);
  }
  return 0;
}

/// Value of one element code, before scales.
REPLAYEVAL_HD constexpr float decode_element(const FormatDescriptor& d, uint32_t code) {
  switch (d.element) {
    case ElementKind::fp32:
      return bits_float(code);
    case ElementKind::floating:
      return decode_float(d.number, code);
    case ElementKind::integer: {
      int unused = 32 - storage_bits(d.code_bits);
      return static_cast<float>(d.lowest < 0 ? static_cast<int32_t>(code << unused) >> unused
                                             : static_cast<int32_t>(code));
    }
    case ElementKind::values:
      return d.list.values[code < kMaxValues ? code : kMaxValues - 1];
  }
  return 0;
}

}  // namespace replayeval
