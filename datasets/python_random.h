// CPython's `random` module, as far as published option orders depend on it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace replayeval {

/// The generator of `random.Random(seed)`: MT19937 (Matsumoto, Nishimura 1998) seeded by
/// init_by_array with the 32-bit words of the seed. Gives what CPython 3.2 and later give for
/// non-negative integer seeds.
class PythonRandom {
 public:
  explicit PythonRandom(uint64_t seed);

  /// `getrandbits(bits)`, bits 1 to 32.
  uint32_t bits(int bits);

  /// `_randbelow(n)`: uniform in 0 .. n-1 by rejection; n from 1 to 2^32 - 1.
  uint32_t below(uint32_t n);

  /// `shuffle(values)`.
  template <class T>
  void shuffle(std::vector<T>* values) {
    for (std::size_t i = values->size(); i > 1; --i)
      std::swap((*values)[i - 1], (*values)[below(static_cast<uint32_t>(i))]);
  }

  /// `sample(range(population), count)`. Throws std::invalid_argument if count exceeds the
  /// population.
  std::vector<uint32_t> sample(uint32_t population, uint32_t count);

 private:
  uint32_t next();
  std::array<uint32_t, 624> state_;
  std::size_t used_;
};

}  // namespace replayeval
