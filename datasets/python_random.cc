#include "datasets/python_random.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace replayeval {
namespace {

constexpr size_t kWords = 624, kMiddle = 397;

}  // namespace

PythonRandom::PythonRandom(uint64_t seed) : used_(kWords) {
  state_[0] = 19650218u;
  for (uint32_t i = 1; i < kWords; ++i)
    state_[i] = 1812433253u * (state_[i - 1] ^ state_[i - 1] >> 30) + i;
  const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const uint32_t length = key[1] != 0 ? 2 : 1;
  size_t i = 1;
  const auto advance = [&] {
    if (++i == kWords) {
      state_[0] = state_[kWords - 1];
      i = 1;
    }
  };
  const auto mixed = [&] { return state_[i - 1] ^ state_[i - 1] >> 30; };
  for (uint32_t k = 0; k < kWords; ++k) {
    state_[i] = (state_[i] ^ mixed() * 1664525u) + key[k % length] + k % length;
    advance();
  }
  for (uint32_t k = 1; k < kWords; ++k) {
    state_[i] = (state_[i] ^ mixed() * 1566083941u) - static_cast<uint32_t>(i);
    advance();
  }
  state_[0] = 0x80000000u;
}

uint32_t PythonRandom::next() {
  if (used_ == kWords) {
    for (size_t i = 0; i < kWords; ++i) {
      const uint32_t y = (state_[i] & 0x80000000u) | (state_[(i + 1) % kWords] & 0x7FFFFFFFu);
      state_[i] = state_[(i + kMiddle) % kWords] ^ y >> 1 ^ ((y & 1) != 0 ? 0x9908B0DFu : 0);
    }
    used_ = 0;
  }
  uint32_t y = state_[used_++];
  y ^= y >> 11;
  y ^= y << 7 & 0x9D2C5680u;
  y ^= y << 15 & 0xEFC60000u;
  return y ^ y >> 18;
}

uint32_t PythonRandom::bits(int bits) { return next() >> (32 - bits); }

uint32_t PythonRandom::below(uint32_t n) {
  const int width = std::bit_width(n);
  uint32_t value = bits(width);
  while (value >= n) value = bits(width);
  return value;
}

std::vector<uint32_t> PythonRandom::sample(uint32_t population, uint32_t count) {
  if (count > population) {
    throw std::invalid_argument("sample: " + std::to_string(count) + " out of " +
                                std::to_string(population));
  }
  std::vector<uint32_t> chosen;
  // CPython draws from a list while that is smaller than a set: 21 entries, or for count > 5 four
  // to the power of ceil(log4(3 count)) more.
  uint64_t set_size = 21;
  if (count > 5) {
    uint64_t power = 1;
    while (power < 3 * uint64_t{count}) power *= 4;
    set_size += power;
  }
  if (population <= set_size) {
    std::vector<uint32_t> pool(population);
    std::iota(pool.begin(), pool.end(), 0u);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t j = below(population - i);
      chosen.push_back(pool[j]);
      pool[j] = pool[population - i - 1];
    }
  } else {
    std::unordered_set<uint32_t> selected;
    for (uint32_t i = 0; i < count; ++i) {
      uint32_t j = below(population);
      while (!selected.insert(j).second) j = below(population);
      chosen.push_back(j);
    }
  }
  return chosen;
}

}  // namespace replayeval
