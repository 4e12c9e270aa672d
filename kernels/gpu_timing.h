// Timing of the decode kernels on the device, for `replayeval bench decode` with `device: cuda`:
// whole flush cycles with device events, states of several layers in turn so that none is still in
// the cache, and the checkpoints of two rows compared with the host's afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/decode_cuda.h"

namespace replayeval {

/// Rates of this device in bytes a second: reading a large array once, and copying one (bytes read
/// and written).
struct DeviceRates {
  double read = 0;
  double copy = 0;
};
DeviceRates measure_device_rates(size_t bytes = size_t{4} << 30);

/// Where rows are in their windows: from row to row one place on; neighbours at the same place, as
/// many rows at each; all at the same.
enum class RowPhases : uint8_t { staggered, clustered, in_step };

/// What to time. `layer` and `gdn` give sizes; their arrays are not used.
struct DecodeWorkload {
  bool is_gdn = false;
  Mamba2Layer mamba2;
  GdnLayer gdn;
  HeadPlan plan;
  RecordType activation = RecordType::bf16;
  int rows = 256;
  int layers = 4;  // at least so many that their states together are several times the cache
  int cycles = 3;  // timed, after one that is not
  RowPhases phases = RowPhases::staggered;
  bool sums_freely = false;  // DecodeStates
  bool only_reads = false;   // every step in the middle of the window; nothing is flushed
};

struct DecodeTiming {
  double seconds = 0;      // a layer and step
  double bytes = 0;        // that must move in one, on average
  std::string difference;  // of the checkpoints from the host's; empty: none
};

/// A chunk in teacher forcing: one row a plan, `tokens` tokens of one layer in one call, from empty
/// rings.
struct ChunkWorkload {
  bool is_gdn = false;
  Mamba2Layer mamba2;
  GdnLayer gdn;
  std::vector<HeadPlan> plans;
  int tokens = 512;
  int repeats = 5;  // the fastest counts
};
/// Seconds of a call. Throws as the advance functions do.
double time_chunk(const ChunkWorkload& workload);

/// Seconds of encoding and of decoding `heads` heads of random numbers, the fastest of `repeats`.
struct CodecTiming {
  double encode = 0;
  double decode = 0;
};
/// Throws std::invalid_argument as encode_heads_cuda does.
CodecTiming time_codec(const StateCodec& codec, StateShape shape, int heads, int repeats = 5);

/// Seconds of kl_add_cuda over `positions` positions of `candidates` candidates.
double time_kl(int64_t positions, int candidates, int64_t vocabulary, int repeats = 5);

/// Throws std::invalid_argument as the decode functions do, std::runtime_error for errors of the
/// device.
DecodeTiming time_decode(const DecodeWorkload& workload);

}  // namespace replayeval
