// The codec on the device: packed bytes, decoded values, residual memory and health equal the
// host's, bit for bit.
#include <doctest/doctest.h>

#include "quant/codec.h"
#include "quant/format_file.h"
#include "quant/quantize_cuda.h"
#include "tests/gpu/state_rows.h"
#include "tests/support/format_variants.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

/// Formats with a preparation, a residual or scales given in advance, and the files that ship.
std::vector<std::shared_ptr<const StateFormat>> prepared_formats() {
  std::vector<std::shared_ptr<const StateFormat>> list;
  for (const char* file :
       {"e3m2_block32", "fp8_tile32", "int4_block32", "int8_residual_int4", "nf4"}) {
    list.push_back(load_format_file(std::string("formats/") + file + ".yaml", file));
  }
  for (Axis axis : {Axis::state_dim, Axis::head_dim}) {
    FormatDescriptor d = find_format("nvfp4")->descriptor;
    d.hadamard = axis;
    list.push_back(variant("nvfp4 hadamard", d));
    d.hadamard_size = 4;
    list.push_back(variant("nvfp4 hadamard 4", d));
  }
  FormatDescriptor d = find_format("fp8")->descriptor;
  d.column_scale = true;
  list.push_back(variant("fp8 columns", d));
  for (ZeroPoint zero : {ZeroPoint::midpoint, ZeroPoint::minimum}) {
    d = {};
    d.element = ElementKind::integer;
    d.lowest = zero == ZeroPoint::minimum ? 0 : -7;
    d.highest = zero == ZeroPoint::minimum ? 15 : 7;
    d.block_scale = BlockScale::fp32;
    d.block_rows = 1;
    d.block_columns = 16;
    d.zero_point = zero;
    list.push_back(variant("int4 zero point", d));
    d.zero_point_fp32 = false;
    d.zero_point_number = kFp16;
    list.push_back(variant("int4 zero point fp16", d));
  }
  auto fixed = std::make_shared<StateFormat>();
  fixed->name = "fp8 fixed";
  fixed->descriptor = find_format("fp8")->descriptor;
  fixed->descriptor.span = Span::fixed;
  for (int layer : {2, 3}) {
    for (int head = 0; head < 12; ++head) {
      fixed->fixed_scales.push_back({layer, head, 0.01f * static_cast<float>(head + layer)});
    }
  }
  finish_format(fixed.get(), fixed->name);
  list.push_back(fixed);
  return list;
}

/// Encodes six heads of awkward data on both sides `rounds` times and compares everything; returns
/// comparisons made.
int compare(const std::shared_ptr<const StateFormat>& format, StateShape shape, int rounds,
            std::mt19937* random) {
  const FormatDescriptor& d = format->descriptor;
  if (d.block_rows > 0 && shape.head_dim % d.block_rows != 0) return 0;
  if (d.block_columns > 0 && shape.state_dim % d.block_columns != 0) return 0;
  try {
    check_shape(*format, shape);
  } catch (const std::invalid_argument&) {
    return 0;
  }
  constexpr int kHeads = 6;
  const size_t elements = static_cast<size_t>(shape.elements());
  const size_t stride = (packed_bytes(*format, shape) + 15) / 16 * 16;
  const size_t memory_stride = (memory_bytes(*format, shape) + 15) / 16 * 16;
  int compared = 0;
  for (Rounding rounding : {Rounding::nearest_even, Rounding::stochastic}) {
    const StateCodec codec{format, rounding};
    // Bytes that no section owns keep what they were, on both sides.
    std::vector<std::byte> packed(kHeads * stride, std::byte{0xA5}),
        memory(kHeads * memory_stride, std::byte{0});
    std::vector<EncodeHealth> health(kHeads);
    DeviceArray<std::byte> device_packed(packed), device_memory(memory);
    DeviceArray<EncodeHealth> device_health(health);
    for (int round = 0; round < rounds; ++round) {
      std::vector<float> state;
      std::vector<RandomKey> keys;
      for (int head = 0; head < kHeads; ++head) {
        const std::vector<float> x = test_state(head, shape, random);
        state.insert(state.end(), x.begin(), x.end());
        keys.push_back({0x123456789abcdefull, 0x2345678u, 3u, static_cast<uint32_t>(head + 5),
                        static_cast<uint32_t>(100 + round),
                        round % 2 ? StateRole::read : StateRole::recurrence});
      }
      const float amax = state_amax(state.data(), static_cast<int64_t>(state.size()));
      for (int head = 0; head < kHeads; ++head) {
        encode_head(codec, shape, state.data() + head * elements, keys[head], amax,
                    packed.data() + head * stride, memory.data() + head * memory_stride,
                    &health[head]);
      }
      const DeviceArray<float> device_state(state), device_amax(1);
      state_amax_cuda(device_state.data(), static_cast<int64_t>(state.size()), device_amax.data());
      CHECK(float_bits(device_amax.get()[0]) == float_bits(amax));
      encode_heads_cuda(codec, shape, keys, device_state.data(), device_amax.data(),
                        device_packed.data(), stride, device_memory.data(), memory_stride,
                        device_health.data());
    }
    INFO(format->name << " [" << shape.head_dim << ", " << shape.state_dim << "] "
                      << (rounding == Rounding::stochastic ? "sr" : "rtn"));
    CHECK(different_bytes(device_packed.get(), packed) == "");
    CHECK(different_bytes(device_memory.get(), memory) == "");
    const std::vector<EncodeHealth> got = device_health.get();
    for (int head = 0; head < kHeads; ++head) {
      CHECK(got[head].elements == health[head].elements);
      CHECK(got[head].non_finite == health[head].non_finite);
      CHECK(got[head].saturated == health[head].saturated);
      CHECK(got[head].clipped == health[head].clipped);
      CHECK(got[head].vanished == health[head].vanished);
    }
    std::vector<float> want(kHeads * elements);
    for (int head = 0; head < kHeads; ++head) {
      decode_head(*format, shape, packed.data() + head * stride, want.data() + head * elements);
    }
    DeviceArray<float> decoded(kHeads * elements);
    device_packed.set(packed);
    decode_heads_cuda(*format, shape, kHeads, device_packed.data(), stride, decoded.data());
    const std::vector<float> values = decoded.get();
    for (size_t i = 0; i < values.size(); ++i) {
      if (float_bits(values[i]) == float_bits(want[i]) || (is_nan(values[i]) && is_nan(want[i])))
        continue;
      FAIL_CHECK("decoded element " << i << " is " << values[i] << ", expected " << want[i]);
      break;
    }
    ++compared;
  }
  return compared;
}

}  // namespace

TEST_CASE("gpu: every format's bytes, values and counts equal the host's") {
  if (!gpu()) return;
  std::mt19937 random(21);
  int compared = 0;
  for (const auto& format : all_formats()) {
    for (StateShape shape :
         {StateShape{4, 128}, StateShape{80, 128}, StateShape{12, 96}, StateShape{4, 40},
          StateShape{4, 30}, StateShape{4, 7}, StateShape{4, 1}}) {
      compared += compare(format, shape, 1, &random);
    }
  }
  CHECK(compared > 800);
}

TEST_CASE(
    "gpu: transforms, zero points, column scales, residuals and fixed scales equal the host's") {
  if (!gpu()) return;
  std::mt19937 random(22);
  int compared = 0;
  for (const auto& format : prepared_formats()) {
    for (StateShape shape :
         {StateShape{64, 128}, StateShape{32, 64}, StateShape{128, 128}, StateShape{8, 16}}) {
      compared += compare(format, shape, 3, &random);
    }
  }
  CHECK(compared > 60);
}

TEST_CASE("gpu: formats as files describe them equal the host's") {
  if (!gpu()) return;
  std::mt19937 random(24);
  int compared = 0;
  for (const auto& format : described_formats()) {
    for (StateShape shape : {StateShape{48, 128}, StateShape{4, 32}, StateShape{3, 7}})
      compared += compare(format, shape, 1, &random);
  }
  CHECK(compared > 120);
}

TEST_CASE("gpu: a head beyond the shared memory of a block is rounded in global memory") {
  if (!gpu()) return;
  std::mt19937 random(23);
  for (const char* name : {"nvfp4", "fp8", "fp16", "mxfp8"}) {
    CHECK(compare(find_format(name), {256, 256}, 1, &random) == 2);
  }
}
