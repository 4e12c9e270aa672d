// Value lists as intervals: every number finds the value, or the neighbours and the way to them,
// that the list's own encoders have.
#include "quant/list_buckets.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <vector>

using namespace replayeval;

namespace {

const float kInfinity = std::numeric_limits<float>::infinity();

ValueList make_list(const std::vector<float>& values) {
  return make_value_list(values, [](size_t i) { return "value " + std::to_string(i); });
}

std::string text_of(const std::vector<float>& values) {
  std::ostringstream text;
  for (float v : values) text << v << " ";
  return text.str();
}

/// What a list's buckets hold for y.
const ListBuckets::Bucket& found(const ListBuckets& all, float y) {
  const int i = all.bucket(y);
  return all.buckets[y >= all.buckets[i].divider ? i + 1 : i];
}

/// Numbers around all values, thresholds, zero and between them, and some far away.
std::vector<float> numbers_of(const ValueList& list) {
  std::vector<float> all = {0.0f,  -0.0f,  1e-45f,    -1e-45f,    1e-30f,    -1e-30f,
                            1e30f, -1e30f, kInfinity, -kInfinity, kFloatMax, -kFloatMax};
  const auto add_around = [&](float x) {
    for (float y : {x, std::nextafter(x, kInfinity), std::nextafter(x, -kInfinity)})
      all.push_back(y);
  };
  for (int i = 0; i < list.count; ++i) {
    add_around(list.values[i]);
    if (i + 1 == list.count) continue;
    add_around(list.thresholds[i]);
    for (int k = 1; k < 40; ++k) {
      all.push_back(list.values[i] +
                    static_cast<float>(k) / 40 * (list.values[i + 1] - list.values[i]));
    }
  }
  return all;
}

const std::vector<std::vector<float>> kTaken = {
    {-1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.09105004f, 0.0f,
     0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.0f},
    {-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6},
    {-8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8},
    {-7.5f, -0.5f, 0.5f, 7.5f},
    {-1.5f, 0.75f},
    {0, 1},
    {1, 2, 5},
    {-5, -3, -1},
    {-5, -3, 0},
    {0, 1, 3},
    {-2, -0.0f, 1},
    {1000, 1000.25f, 1000.5f, 1001},
    {-0x1p59f, 0, 0x1p59f},
    {0x1p-59f, 0x1p-58f, 3 * 0x1p-59f},
    {-8e37f, 0, 3e37f, 8e37f}};

}  // namespace

TEST_CASE("buckets of a list hold what its encoders find") {
  for (const std::vector<float>& values : kTaken) {
    CAPTURE(text_of(values));
    const ValueList list = make_list(values);
    const ListBuckets nearest = list_buckets(list, false), stochastic = list_buckets(list, true);
    REQUIRE(nearest.taken);
    REQUIRE(stochastic.taken);
    size_t different = 0;
    float first = 0;
    const auto compare = [&](float y, float got, uint32_t code) {
      if (float_bits(got) == float_bits(list.values[code])) return;
      if (++different == 1) first = y;
    };
    for (float y : numbers_of(list)) {
      compare(y, found(nearest, y).near, encode_value(list, y));
      const ListBuckets::Bucket& b = found(stochastic, y);
      const float d = (y - b.near) / (b.far - b.near);
      for (uint32_t r : {0u, 1u, 0x3FFFFFu, 0x800000u, 0xFFFFFFu}) {
        const bool up = d >= 1.0f - static_cast<float>(r) * 0x1p-24f;
        compare(y, up ? b.far : b.near, encode_value_stochastic(list, y, r));
      }
      if (b.gap != 0x1p-24f * (b.far - b.near)) compare(y, kInfinity, 0);
    }
    CAPTURE(first);
    CHECK(different == 0);
  }
}

TEST_CASE("lists with values too near each other have no buckets") {
  const std::vector<float> near = {-1, -0.01f, 0, 0.01f, 1},
                           denormal = {-1e-44f, 0, 1e-44f, 1e-43f}, one = {5};
  CHECK_FALSE(list_buckets(make_list(one), false).taken);
  CHECK_FALSE(list_buckets(make_list(one), true).taken);
  CHECK_FALSE(list_buckets(make_list(denormal), true).taken);
  CHECK(list_buckets(make_list(near), true).taken);  // what divides it is in the middle
  const std::vector<float> wide = {-1, -0.5f, -0.01f, 0, 0.01f, 0.5f, 1};
  CHECK_FALSE(list_buckets(make_list(wide), false).taken);
  CHECK_FALSE(list_buckets(make_list(wide), true).taken);
}
