// Formats of one call as a table on the device (host side of block_codec.cuh).
#pragma once

#include <span>
#include <vector>

#include "quant/block_codec.cuh"
#include "quant/cuda_check.cuh"
#include "quant/list_buckets.h"
#include "quant/state_format.h"

namespace replayeval {

/// Collects formats, each once, with the scales given in advance for `heads` heads: those of
/// layer(i), head(i).
class FormatTable {
 public:
  explicit FormatTable(std::vector<RandomKey> heads) : heads_(std::move(heads)) {}

  /// Index of the format in the table. Throws std::invalid_argument for a library's format, which
  /// only the host can run, and where a scale is missing.
  int add(const StateFormat& format);

  void add_to(CallTables* tables) {
    formats_at_ = tables->add(std::span<const DeviceFormat>(formats_));
    scales_at_ = tables->add(std::span<const float>(scales_));
    buckets_at_ = tables->add(std::span<const ListBuckets>(buckets_));
  }
  const std::vector<DeviceFormat>& on_host() const { return formats_; }
  const std::vector<float>& scales_on_host() const { return scales_; }
  const DeviceFormat* formats(const CallTables& tables) const {
    return tables.table<const DeviceFormat>(formats_at_);
  }
  const float* scales(const CallTables& tables) const {
    return tables.table<const float>(scales_at_);
  }

  /// Of format f: 2 f to nearest, 2 f + 1 stochastically.
  const ListBuckets* buckets(const CallTables& tables) const {
    return tables.table<const ListBuckets>(buckets_at_);
  }

 private:
  std::vector<RandomKey> heads_;  // layer and head of each head of the call
  std::vector<const StateFormat*> known_;
  std::vector<DeviceFormat> formats_;
  std::vector<float> scales_;
  std::vector<ListBuckets> buckets_;
  size_t formats_at_ = 0, scales_at_ = 0, buckets_at_ = 0;
};

/// Philox key of one encoding; as philox_key of quantize_core.h, for the device.
__host__ __device__ inline PhiloxKey device_philox_key(const RandomKey& key) {
  PhiloxKey p;
  p.key0 = static_cast<uint32_t>(key.seed);
  p.key1 = static_cast<uint32_t>(key.seed >> 32);
  p.counter1 = key.head + (key.layer << 16);
  p.counter2 = key.position;
  p.counter3 = static_cast<uint32_t>(key.role) + 4 * key.stream;
  return p;
}

/// Row stride of a head's matrix in shared memory, state_dim along the row: float4 accesses of
/// threads in neighbouring rows fall into different banks.
__host__ __device__ inline int padded_row(int state_dim) { return (state_dim + 31) / 32 * 32 + 4; }

}  // namespace replayeval
