// Scaled formats against the stored vectors of published implementations: NVFP4 in three orders,
// 4over6, row scales.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include "quant/packed_layout.h"
#include "quant/quantize.h"
#include "quant/state_format.h"
#include "tests/support/case_file.h"

using namespace replayeval;
using replayeval::test::case_path;
using replayeval::test::CaseFile;

namespace {

struct Encoded {
  PackedLayout layout;
  std::vector<std::byte> packed;
  std::vector<float> decoded;
  EncodeHealth health;

  uint32_t code(size_t i) const {
    if (layout.code_size == 4) return static_cast<uint32_t>(packed[i / 2]) >> (4 * (i % 2)) & 15u;
    uint32_t value = 0;
    std::memcpy(&value, packed.data() + i * layout.code_size / 8, layout.code_size / 8);
    return value;
  }
  uint32_t scale(size_t i) const { return static_cast<uint32_t>(packed[layout.scales + i]); }
  float outer(size_t i) const {
    float value;
    std::memcpy(&value, packed.data() + layout.outer + 4 * i, 4);
    return value;
  }
};

Encoded encode(const std::string& name, StateShape shape, const std::vector<float>& x) {
  auto format = find_format(name);
  Encoded e;
  e.layout = packed_layout(format->descriptor, shape.head_dim, shape.state_dim);
  e.packed.resize(packed_bytes(*format, shape));
  e.decoded.resize(x.size());
  encode_head({format, Rounding::nearest_even}, shape, x.data(), RandomKey{}, 0, e.packed.data(),
              nullptr, &e.health);
  decode_head(*format, shape, e.packed.data(), e.decoded.data());
  return e;
}

}  // namespace

TEST_CASE("NVFP4 and 4over6 equal the published implementations") {
  std::string path = case_path("cases/quant/nvfp4.h5");
  if (path.empty()) return;
  CaseFile file(path);
  struct Variant {
    const char* format;
    const char* group;
    const char* decode;  // dataset with the stored FP32 scale
  };
  const Variant variants[] = {{"nvfp4", "vllm", nullptr},
                              {"nvfp4_te", "te", "global_decode"},
                              {"nvfp4_modelopt", "modelopt", "global_decode"},
                              {"4over6", "te_4over6_448_mae", "global_decode"},
                              {"4over6_448_mae", "te_4over6_448_mae", "global_decode"},
                              {"4over6_448_mse", "te_4over6_448_mse", "global_decode"},
                              {"4over6_256_mae", "te_4over6_256_mae", "global_decode"},
                              {"4over6_256_mse", "te_4over6_256_mse", "global_decode"}};
  int compared = 0;
  for (const std::string& name : file.members("/")) {
    std::vector<float> x = file.floats(name + "/x");
    std::vector<int64_t> dims = file.shape(name + "/x");
    StateShape shape{static_cast<int>(dims[0]), static_cast<int>(dims[1])};
    float amax = state_amax(x.data(), shape.elements());
    for (const Variant& v : variants) {
      std::string group = name + "/" + v.group;
      Encoded e = encode(v.format, shape, x);
      INFO(group << " as " << std::string(v.format));
      if (name == "f32_subnormal" || name == "tiny_normal") {
        for (size_t i = 0; i < x.size(); ++i) {
          REQUIRE(std::isfinite(e.decoded[i]));
          REQUIRE(std::fabs(e.decoded[i] - x[i]) <= amax);
        }
        continue;
      }
      if (!file.has(group + "/codes")) continue;
      ++compared;
      std::vector<uint32_t> codes = file.u32(group + "/codes"),
                            scales = file.u32(group + "/scales");
      for (size_t b = 0; b < scales.size(); ++b) {
        if (e.scale(b) != scales[b])
          FAIL_CHECK("scale " << b << " is " << e.scale(b) << " expected " << scales[b]);
      }
      size_t wrong = 0;
      for (size_t i = 0; i < codes.size(); ++i) {
        uint32_t code = e.code(i);
        bool both_zero = (code & 7u) == 0 && (codes[i] & 7u) == 0;
        if (code != codes[i] && !both_zero && wrong++ == 0) {
          FAIL_CHECK("code " << i << " is " << code << " expected " << codes[i] << " x " << x[i]
                             << " scale " << e.scale(i / 16));
        }
      }
      CHECK(wrong == 0);
      if (v.decode != nullptr) CHECK(e.outer(0) == file.floats(group + "/" + v.decode)[0]);
      if (file.has(group + "/global_scale"))
        CHECK(e.outer(0) == 1.0f / file.floats(group + "/global_scale")[0]);
      if (file.has(group + "/dequantized")) {
        std::vector<float> expected = file.floats(group + "/dequantized");
        for (size_t i = 0; i < x.size(); ++i) {
          if (e.decoded[i] != expected[i])
            FAIL_CHECK("decoded " << i << " is " << e.decoded[i] << " expected " << expected[i]);
        }
        std::vector<uint32_t> bytes = file.u32(group + "/packed");
        for (size_t i = 0; i < bytes.size(); ++i) {
          uint32_t byte = static_cast<uint32_t>(e.packed[i]);
          bool zeros = (byte & 7u) == 0 || (byte >> 4 & 7u) == 0;
          if (byte != bytes[i] && !zeros)
            FAIL_CHECK("packed byte " << i << " is " << byte << " expected " << bytes[i]);
        }
      }
    }
  }
  CHECK(compared > 30);
}

TEST_CASE("row-scaled formats equal FlashInfer's") {
  std::string path = case_path("cases/quant/perchannel.h5");
  if (path.empty()) return;
  CaseFile file(path);
  const char* formats[][2] = {{"int8", "int8"}, {"int16", "int16"}, {"fp8", "e4m3"}};
  for (const std::string& name : file.members("/")) {
    std::vector<float> x = file.floats(name + "/x");
    std::vector<int64_t> dims = file.shape(name + "/x");
    StateShape shape{static_cast<int>(dims[0]), static_cast<int>(dims[1])};
    for (auto& [format, group_name] : formats) {
      std::string group = name + "/" + group_name;
      INFO(group);
      Encoded e = encode(format, shape, x);
      std::vector<int32_t> codes = file.i32(group + "/codes");
      std::vector<float> scales = file.floats(group + "/decode_scale");
      uint32_t mask = e.layout.code_size == 8 ? 0xFFu : 0xFFFFu;
      for (size_t i = 0; i < x.size(); ++i) {
        uint32_t expected = static_cast<uint32_t>(codes[i]) & mask;
        bool zeros = std::string(format) == "fp8" && ((e.code(i) | expected) & 0x7Fu) == 0;
        if (e.code(i) != expected && !zeros)
          FAIL_CHECK("code " << i << " is " << e.code(i) << " expected " << expected);
      }
      for (size_t r = 0; r < scales.size(); ++r) CHECK(e.outer(r) == scales[r]);
    }
  }
}
