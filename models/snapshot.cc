// The state of all rows as bytes and back, so that a run continues inside a document (DESIGN.md
// section 6).
#include <stdexcept>
#include <string>

#include "models/state_store.h"

namespace replayeval {

void StateStore::save(int r, ByteWriter& writer) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  writer.value(static_cast<uint8_t>(row.in_prompt));
  writer.array(row.pending);
  writer.array(row.recurrence);
  writer.array(row.read);
  writer.array(row.memory);
  writer.array(row.health);
  writer.value(static_cast<int32_t>(row.records));
  writer.array(row.channels);
  writer.array(row.scalars);
  writer.array(row.corrections);
  writer.array(row.conv);
}

void StateStore::restore(int r, ByteReader& reader) {
  Row& row = rows_[static_cast<size_t>(r)];
  row.in_prompt = reader.value<uint8_t>() != 0;
  reader.array_of_equal_size(row.pending);
  reader.array_of_equal_size(row.recurrence);
  reader.array_of_equal_size(row.read);
  reader.array_of_equal_size(row.memory);
  reader.array_of_equal_size(row.health);
  row.records = reader.value<int32_t>();
  row.uncommitted = 0;
  reader.array(row.channels);
  reader.array(row.scalars);
  reader.array(row.corrections);
  reader.array(row.conv);
  const size_t records = static_cast<size_t>(row.records);
  if (row.records < 0 || row.channels.size() != records * static_cast<size_t>(shape_.channels) ||
      row.scalars.size() != records * static_cast<size_t>(shape_.scalars) ||
      row.corrections.size() != records * static_cast<size_t>(shape_.corrections)) {
    throw std::runtime_error("saved state of layer " + std::to_string(shape_.layer) +
                             ": the ring does not hold " + std::to_string(row.records) +
                             " records of this layer's widths");
  }
}

std::vector<std::byte> StateSet::save() const {
  ByteWriter writer;
  writer.array(positions_);
  for (int uncommitted : uncommitted_) {
    if (uncommitted > 0) {
      throw std::invalid_argument("save: " + std::to_string(uncommitted) +
                                  " tokens are not committed, expected none");
    }
  }
  for (const auto& block : slots_) {
    for (const Slot& slot : block) {
      if (!slot.store) continue;
      writer.array(slot.decay_sum);
      for (int r = 0; r < rows(); ++r) slot.store->save(r, writer);
    }
  }
  return writer.take();
}

void StateSet::restore(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  std::vector<int64_t> positions(rows_.size());
  reader.array_of_equal_size(positions);
  for (auto& block : slots_) {
    for (Slot& slot : block) {
      for (KvCache& cache : slot.caches) cache.truncate(0);
      if (!slot.store) continue;
      reader.array_of_equal_size(slot.decay_sum);
      for (int r = 0; r < rows(); ++r) slot.store->restore(r, reader);
    }
  }
  if (!reader.at_end()) throw std::runtime_error("saved state: bytes are left over");
  positions_ = positions;
  uncommitted_.assign(rows_.size(), 0);
}

std::vector<std::byte> StateSet::save_cache(int r, int64_t first, int64_t end) const {
  ByteWriter writer;
  writer.value(first);
  writer.value(end);
  std::vector<float> k, v;
  std::vector<uint16_t> narrow;
  for (const auto& block : slots_) {
    for (const Slot& slot : block) {
      if (slot.caches.empty()) continue;
      const KvCache& cache = slot.caches[static_cast<size_t>(r)];
      const size_t size = static_cast<size_t>((end - first) * cache.kv_heads() * cache.head_dim());
      k.resize(size);
      v.resize(size);
      cache.read(first, end - first, k.data(), v.data());
      for (const std::vector<float>* values : {&k, &v}) {
        if (cache.type() == KvType::fp32) {
          writer.array(*values);
          continue;
        }
        // A BF16 value is the upper half of its FP32 form.
        narrow.resize(size);
        for (size_t i = 0; i < size; ++i) {
          uint32_t bits;
          std::memcpy(&bits, &(*values)[i], sizeof bits);
          narrow[i] = static_cast<uint16_t>(bits >> 16);
        }
        writer.array(narrow);
      }
    }
  }
  return writer.take();
}

void StateSet::append_cache(int r, std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  const int64_t first = reader.value<int64_t>();
  const int64_t end = reader.value<int64_t>();
  std::vector<uint16_t> narrow;
  for (auto& block : slots_) {
    for (Slot& slot : block) {
      if (slot.caches.empty()) continue;
      KvCache& cache = slot.caches[static_cast<size_t>(r)];
      if (cache.length() != first || end < first) {
        throw std::runtime_error("saved keys and values: positions " + std::to_string(first) +
                                 " to " + std::to_string(end) + ", expected the first at " +
                                 std::to_string(cache.length()));
      }
      const int64_t width = int64_t{cache.kv_heads()} * cache.head_dim();
      std::vector<float> k(static_cast<size_t>((end - first) * width)), v(k.size());
      for (std::vector<float>* values : {&k, &v}) {
        if (cache.type() == KvType::fp32) {
          reader.array_of_equal_size(*values);
          continue;
        }
        narrow.resize(values->size());
        reader.array_of_equal_size(narrow);
        for (size_t i = 0; i < narrow.size(); ++i) {
          const uint32_t bits = uint32_t{narrow[i]} << 16;
          std::memcpy(&(*values)[i], &bits, sizeof bits);
        }
      }
      cache.append(k.data(), width, v.data(), width, end - first);
    }
  }
  if (!reader.at_end()) throw std::runtime_error("saved keys and values: bytes are left over");
}

}  // namespace replayeval
