// Random bits of stochastic rounding: Philox-4x32 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC11), counter based, so that a bit is a pure function of what is being rounded
// (DESIGN.md section 1). Host and device.
#pragma once

#include <cstdint>

#include "quant/float_format.h"

namespace replayeval {

struct PhiloxWords {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;

/// Philox-4x32-Rounds of one counter under key (key0, key1). A round maps (c0, c1, c2, c3) to
/// (hi(M1 c2) ^ c1 ^ key0, lo(M1 c2), hi(M0 c0) ^ c3 ^ key1, lo(M0 c0)); the key is raised by the
/// Weyl constants between rounds.
template <int Rounds = 10>
REPLAYEVAL_HD constexpr PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                               uint32_t key0, uint32_t key1) {
  for (int round = 0; round < Rounds; ++round) {
    uint64_t product0 = uint64_t{kPhiloxMultiplier0} * c0;
    uint64_t product1 = uint64_t{kPhiloxMultiplier1} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// The part of a key that is equal for every element of one head's encoding; plain data for
/// kernels.
struct PhiloxKey {
  uint32_t key0 = 0, key1 = 0;  // seed, low and high
  uint32_t counter1 = 0;        // head + 2^16 layer
  uint32_t counter2 = 0;        // position
  uint32_t counter3 = 0;        // role + 4 stream
};

/// The word for element (row, column) of a head's matrix: counter (column / 4 + 2^16 row, ...),
/// word column mod 4.
REPLAYEVAL_HD constexpr uint32_t random_word(const PhiloxKey& key, int row, int column) {
  PhiloxWords words =
      philox4x32<10>((static_cast<uint32_t>(column) >> 2) + (static_cast<uint32_t>(row) << 16),
                     key.counter1, key.counter2, key.counter3, key.key0, key.key1);
  return words.word[column & 3];
}

}  // namespace replayeval
