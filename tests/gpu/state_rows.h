// Rows of one layer twice, on the host and on the device, with equal checkpoints to begin with;
// plans by name.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/simd_dispatch.h"
#include "kernels/replay.h"
#include "quant/codec.h"
#include "quant/format_file.h"
#include "quant/quantize.h"
#include "tests/gpu/gpu.h"

namespace replayeval::test {

/// The host's kernels give the device's bits where fused multiply-add rounds once.
inline bool host_has_fma() {
  if (simd_level() != SimdLevel::generic) return true;
  std::fprintf(
      stderr,
      "SKIPPED: this processor has no fused multiply-add, whose bits the GPU is compared with\n");
  return false;
}

inline StateCodec codec_of(const std::string& name) {
  const bool stochastic = name.size() > 3 && name.substr(name.size() - 3) == "+sr";
  return {find_or_load_format(stochastic ? name.substr(0, name.size() - 3) : name),
          stochastic ? Rounding::stochastic : Rounding::nearest_even};
}

/// "recurrence" or "recurrence|read".
inline HeadPlan plan_of(const std::string& name, int window) {
  HeadPlan plan;
  const size_t bar = name.find('|');
  plan.recurrence = codec_of(name.substr(0, bar));
  if (bar != std::string::npos) plan.read = codec_of(name.substr(bar + 1));
  plan.window = window;
  plan.seed = 0x123456789abcdefull;
  return plan;
}

inline float bf16_normal(std::mt19937* random, float scale = 1.0f) {
  return round_operand(DotType::bf16, scale * std::normal_distribution<float>()(*random));
}

inline std::string different_floats(const std::vector<float>& got, const std::vector<float>& want) {
  size_t count = 0, first = 0;
  for (size_t i = want.size(); i-- > 0;) {
    const bool equal =
        float_bits(got[i]) == float_bits(want[i]) || (is_nan(got[i]) && is_nan(want[i]));
    if (!equal) ++count, first = i;
  }
  if (count == 0) return {};
  std::ostringstream text;
  text.precision(9);
  text << count << " of " << want.size() << " numbers differ, the first at " << first << ": got "
       << got[first] << " (0x" << std::hex << float_bits(got[first]) << "), expected "
       << want[first] << " (0x" << float_bits(want[first]) << ")";
  return text.str();
}

/// One row, host and device.
class RowPair {
 public:
  RowPair(StateShape shape, int heads, std::vector<HeadPlan> plans,
          std::vector<uint8_t> plan_of_head, uint32_t stream, std::mt19937* random,
          float state_scale = 1.0f)
      : shape_(shape),
        heads_(heads),
        plans_(std::move(plans)),
        plan_of_head_(std::move(plan_of_head)) {
    pending_.assign(plans_.size(), 0);
    device_pending_ = pending_;
    for (const HeadPlan& plan : plans_) {
      const size_t recurrence_memory = memory_bytes(*plan.recurrence.format, shape);
      stride_ = std::max(stride_, packed_bytes(*plan.recurrence.format, shape));
      if (plan.read) read_stride_ = std::max(read_stride_, packed_bytes(*plan.read->format, shape));
      memory_stride_ =
          std::max(memory_stride_,
                   recurrence_memory + (plan.read ? memory_bytes(*plan.read->format, shape) : 0));
    }
    for (size_t* stride : {&stride_, &read_stride_, &memory_stride_})
      *stride = (*stride + 15) / 16 * 16;
    const size_t count = static_cast<size_t>(heads);
    recurrence_.assign(count * stride_, std::byte{0});
    read_.assign(count * read_stride_, std::byte{0});
    memory_.assign(count * memory_stride_, std::byte{0});
    health_.assign(count, HeadHealth{});
    std::normal_distribution<float> normal;
    for (int h = 0; h < heads; ++h) {
      const HeadPlan& plan = plans_[plan_of_head_.empty() ? 0 : plan_of_head_[h]];
      std::vector<float> state(static_cast<size_t>(shape.elements()));
      for (float& x : state) x = state_scale == 0 ? 0.0f : state_scale * normal(*random);
      EncodeHealth unused;
      std::vector<std::byte> scratch(memory_bytes(*plan.recurrence.format, shape) +
                                     (plan.read ? memory_bytes(*plan.read->format, shape) : 0));
      encode_head({plan.recurrence.format, Rounding::nearest_even}, shape, state.data(), {}, 4.0f,
                  recurrence_.data() + h * stride_, scratch.data(), &unused);
      if (!plan.read) continue;
      std::fill(scratch.begin(), scratch.end(), std::byte{0});
      encode_head({plan.read->format, Rounding::nearest_even}, shape, state.data(), {}, 4.0f,
                  read_.data() + h * read_stride_, scratch.data(), &unused);
    }
    device_recurrence_ = DeviceArray<std::byte>(recurrence_);
    device_read_ = DeviceArray<std::byte>(read_);
    device_memory_ = DeviceArray<std::byte>(memory_);
    device_health_ = DeviceArray<HeadHealth>(health_);
    row_.stream = stream;
    row_.position = 1000;
  }

  StateRow host() {
    StateRow row = common();
    row.pending = pending_.data();
    row.recurrence = recurrence_.data();
    row.read = read_.empty() ? nullptr : read_.data();
    row.memory = memory_.empty() ? nullptr : memory_.data();
    row.health = health_.data();
    return row;
  }
  StateRow device() {
    StateRow row = common();
    row.pending = device_pending_.data();
    row.recurrence = device_recurrence_.data();
    row.read = read_.empty() ? nullptr : device_read_.data();
    row.memory = memory_.empty() ? nullptr : device_memory_.data();
    row.health = device_health_.data();
    return row;
  }
  /// Moves on by tokens that are final.
  void move(int tokens) { row_.position += tokens; }
  /// Accepts drafts of a verify step: they become pending.
  void accept(int count) {
    for (int& h : pending_) h += count;
    for (int& h : device_pending_) h += count;
    row_.position += count;
  }
  int most_pending() const { return *std::max_element(pending_.begin(), pending_.end()); }

  void check_equal() const {
    CHECK(device_pending_ == pending_);
    CHECK(different_bytes(device_recurrence_.get(), recurrence_) == "");
    CHECK(different_bytes(device_read_.get(), read_) == "");
    CHECK(different_bytes(device_memory_.get(), memory_) == "");
    const std::vector<HeadHealth> got = device_health_.get();
    for (size_t h = 0; h < got.size(); ++h) {
      INFO("head " << h);
      CHECK(got[h].encode.elements == health_[h].encode.elements);
      CHECK(got[h].encode.non_finite == health_[h].encode.non_finite);
      CHECK(got[h].encode.saturated == health_[h].encode.saturated);
      CHECK(got[h].encode.clipped == health_[h].encode.clipped);
      CHECK(got[h].encode.vanished == health_[h].encode.vanished);
      CHECK(got[h].first_non_finite_position == health_[h].first_non_finite_position);
    }
  }
  uint64_t non_finite() const {
    uint64_t count = 0;
    for (const HeadHealth& h : health_) count += h.encode.non_finite;
    return count;
  }
  const std::vector<std::byte>& recurrence() const { return recurrence_; }
  const std::vector<std::byte>& read() const { return read_; }
  const std::vector<HeadHealth>& health() const { return health_; }
  size_t stride() const { return stride_; }
  size_t read_stride() const { return read_stride_; }

 private:
  StateRow common() {
    StateRow row = row_;
    row.plans = plans_;
    row.plan_of_head = plan_of_head_.empty() ? nullptr : plan_of_head_.data();
    row.recurrence_stride = stride_;
    row.read_stride = read_stride_;
    row.memory_stride = memory_stride_;
    return row;
  }

  StateShape shape_;
  int heads_;
  std::vector<HeadPlan> plans_;
  std::vector<uint8_t> plan_of_head_;
  std::vector<int> pending_, device_pending_;
  size_t stride_ = 0, read_stride_ = 0, memory_stride_ = 0;
  std::vector<std::byte> recurrence_, read_, memory_;
  std::vector<HeadHealth> health_;
  DeviceArray<std::byte> device_recurrence_, device_read_, device_memory_;
  DeviceArray<HeadHealth> device_health_;
  StateRow row_;
};

/// The states that a run is about, and one of every kind of format and option.
inline std::vector<HeadPlan> plans_to_test() {
  std::vector<HeadPlan> plans;
  for (const char* name :
       {"fp32", "fp16+sr", "fp8+sr", "nvfp4+sr", "fp32|nvfp4", "fp16+sr|nvfp4", "fp8+sr|nvfp4"}) {
    plans.push_back(plan_of(name, 16));
  }
  plans.push_back(plan_of("fp32", 1));
  plans.push_back(plan_of("nvfp4+sr", 1));
  plans.push_back(plan_of("bf16+sr|4over6", 5));
  plans.push_back(plan_of("mxfp4", 3));
  plans.push_back(plan_of("int8+sr|mxfp8", 7));
  plans.push_back(plan_of("formats/int8_residual_int4.yaml|fp16", 4));
  plans.push_back(plan_of("fp32|nvfp4", 8));
  plans.back().flush_output = FlushOutput::read;
  plans.push_back(plan_of("fp16+sr", 6));
  plans.back().dot = DotType::bf16;
  plans.push_back(plan_of("fp32|fp16", 6));
  plans.back().dot = DotType::tf32;
  plans.push_back(plan_of("nvfp4+sr", 8));
  plans.back().recurrence.format = format_with_span(find_format("nvfp4"), Span::layer);
  plans.push_back(plan_of("fp16+sr|nvfp4", 4));
  plans.back().read->format = format_with_span(find_format("nvfp4"), Span::layer);
  return plans;
}

/// Elements and scales as a format file describes them, of widths that built-in formats have and
/// with rules that they have not.
inline std::vector<std::shared_ptr<const StateFormat>> described_formats() {
  const std::string block16 = "scale: {format: e4m3, block: 16}\nouter: {span: head}\n",
                    block32 = "scale: {format: e8m0, block: 32, rounding: down}\n",
                    row = "outer: {span: row}\n", none;
  const auto list_of = [](int count, const std::function<float(int)>& value) {
    std::ostringstream text;
    for (int i = 0; i < count; ++i) text << (i ? ", " : "{values: [") << value(i);
    return text.str() + "]}";
  };
  const std::string fifteen =
                        "{values: [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]}",
                    sixteen =
                        "{values: [-1, -0.6961928, -0.525, -0.395, -0.28444138, -0.1847, -0.09105, "
                        "0, 0.0795803, 0.161, 0.2461123, 0.338, 0.44070983, 0.5626, 0.723, 1]}",
                    forty =
                        list_of(40, [](int i) { return 0.1f * static_cast<float>(i * i - 300); });
  const std::pair<std::string, std::string> texts[] = {
      {"{exponent: 1, mantissa: 2}", block16},
      {"{exponent: 3, mantissa: 0}", block16},
      {"{exponent: 3, mantissa: 0}", none},
      {"{exponent: 3, mantissa: 0, bias: 2}", none},
      {"{exponent: 2, mantissa: 3, nan: true}", block32},
      {"{exponent: 6, mantissa: 9}", none},
      {"{exponent: 6, mantissa: 9}", block32},
      {"{exponent: 4, mantissa: 3, random_bits: 24}", row},
      {"{exponent: 5, mantissa: 2, inf: true, nan: true, overflow: inf}", none},
      {"{exponent: 5, mantissa: 10, random_bits: 24}", none},
      {"{format: fp16, overflow: inf}", none},
      {"{format: bf16, random_bits: 8}", none},
      {"{exponent: 8, mantissa: 4, inf: true, nan: true, random_bits: 24}", row},
      {"{integer: {from: -128, to: 127}}", row},
      {"{integer: {from: -8, to: 7}}", block16},
      {"{integer: {from: 0, to: 15}}", block16},
      {"{integer: {from: -32768, to: 32767}}", row},
      {fifteen, block16},
      {fifteen, none},
      {"{values: [-1.5, 0.75]}", row},
      {"{values: [1, 2, 5]}", block32},
      {list_of(17, [](int i) { return static_cast<float>(i) - 7.25f; }), block16},
      {list_of(32, [](int i) { return 0.3f * static_cast<float>(i) - 9.7f; }), row},
      {forty, row},
      {forty, block32},
      {list_of(256, [](int i) { return std::sinh(0.02f * static_cast<float>(i - 127)); }), row},
      {"{values: [-31, -8, -1, 0, 1, 8, 31]}", row},
      {sixteen, block16},
      {sixteen, none},
      {"{values: [-8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8]}", block32},
      {"{values: [-3, -1.25, 0.5, 2, 3.5]}", block16},
      {"{values: [-5, -3, -1]}", row},
      {"{values: [-1, -0.5, -0.01, 0, 0.01, 0.5, 1]}", block16},
  };
  std::vector<std::shared_ptr<const StateFormat>> formats;
  for (const auto& [element, scales] : texts) {
    const std::string name = element.substr(0, 60) + " " + scales;
    formats.push_back(parse_format("element: " + element + "\n" + scales, name, ".", name));
  }
  return formats;
}
/// Formats of every kind of element and scale whose rows may lie in registers, rounded both ways.
inline std::vector<StateCodec> row_codecs() {
  std::vector<std::shared_ptr<const StateFormat>> formats;
  for (const char* name :
       {"fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp8", "int8", "int16", "nvfp4", "mxfp4",
        "mxfp8", "mxfp8_e5m2", "4over6", "formats/e3m2_block32.yaml", "formats/int4_block32.yaml",
        "formats/nf4.yaml"}) {
    formats.push_back(find_or_load_format(name));
  }
  for (const auto& format : described_formats()) formats.push_back(format);
  std::vector<StateCodec> codecs;
  for (const auto& format : formats) {
    for (Rounding rounding : {Rounding::nearest_even, Rounding::stochastic})
      codecs.push_back({format, rounding});
  }
  return codecs;
}
/// Sizes of the numbers of a state for which formats saturate, vanish, or are not left at all.
inline float row_magnitude(size_t i) {
  constexpr float kMagnitudes[] = {1.0f, 1e-6f, 1e5f, 1e-39f, 3e33f, 1e-12f, 300.0f};
  return kMagnitudes[i % (sizeof kMagnitudes / sizeof kMagnitudes[0])];
}

}  // namespace replayeval::test
