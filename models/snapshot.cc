// The state of all rows as bytes and back, so that a run continues inside a document (DESIGN.md
// section 6).
#include <stdexcept>
#include <string>

#include "models/state_store.h"

namespace replayeval {

namespace {

std::vector<std::byte> saved(const Memory& memory, int first, int count, size_t size) {
  std::vector<std::byte> bytes(static_cast<size_t>(count) * size);
  if (!bytes.empty()) {
    memory.backend()->download(bytes.data(), memory.data() + static_cast<size_t>(first) * size,
                               bytes.size());
  }
  return bytes;
}

/// Reads an array of exactly memory's size into it.
void read_into(ByteReader& reader, const Memory& memory) {
  std::vector<std::byte> bytes(memory.bytes());
  reader.array_of_equal_size(bytes);
  memory.backend()->upload(memory.data(), bytes.data(), bytes.size());
}

}  // namespace

void StateStore::save(int r, ByteWriter& writer) const {
  const Row& row = rows_[static_cast<size_t>(r)];
  writer.value(static_cast<uint8_t>(row.in_prompt));
  writer.array(row.pending);
  for (const Memory* memory : {&row.recurrence, &row.read, &row.memory, &row.health}) {
    writer.array(saved(*memory, 0, 1, memory->bytes()));
  }
  if (!row.device_plans.empty()) {
    writer.array(row.host_recurrence);
    writer.array(row.host_read);
    writer.array(row.host_memory);
    writer.array(row.host_health);
  }
  writer.value(static_cast<int32_t>(row.records));
  const auto values = [&](const Memory& memory, int first, int count, int width) {
    writer.array(saved(memory, first, count, static_cast<size_t>(width) * sizeof(float)));
  };
  values(row.channels, row.ring_first, row.records, shape_.channels);
  values(row.scalars, row.ring_first, row.records, shape_.scalars);
  values(row.corrections, row.ring_first, row.records, shape_.corrections);
  values(row.conv, row.conv_first, taps(), shape_.channels);
}

void StateStore::restore(int r, ByteReader& reader) {
  Row& row = rows_[static_cast<size_t>(r)];
  row.in_prompt = reader.value<uint8_t>() != 0;
  reader.array_of_equal_size(row.pending);
  row.corrections_hold = false;  // the bytes do not say
  for (const Memory* memory : {&row.recurrence, &row.read, &row.memory, &row.health}) {
    read_into(reader, *memory);
  }
  if (!row.device_plans.empty()) {
    reader.array_of_equal_size(row.host_recurrence);
    reader.array_of_equal_size(row.host_read);
    reader.array_of_equal_size(row.host_memory);
    reader.array_of_equal_size(row.host_health);
  }
  const int32_t records = reader.value<int32_t>();
  row.records = row.uncommitted = 0;
  row.ring_first = row.conv_first = 0;
  const auto values = [&](const Memory& memory, int count, int width) {
    std::vector<std::byte> bytes;
    reader.array(bytes);
    if (bytes.size() != static_cast<size_t>(count) * static_cast<size_t>(width) * sizeof(float)) {
      throw std::runtime_error("saved state of layer " + std::to_string(shape_.layer) +
                               ": the ring does not hold " + std::to_string(records) +
                               " records of this layer's widths");
    }
    if (!bytes.empty()) backend_->upload(memory.data(), bytes.data(), bytes.size());
  };
  if (records < 0 || records > 2 * kMaxWindow) {
    throw std::runtime_error("saved state of layer " + std::to_string(shape_.layer) + ": " +
                             std::to_string(records) + " records in the ring");
  }
  make_room(row, records, 0);
  values(row.channels, records, shape_.channels);
  values(row.scalars, records, shape_.scalars);
  values(row.corrections, records, shape_.corrections);
  values(row.conv, taps(), shape_.channels);
  row.records = records;
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
      writer.array(saved(slot.decay_sum, 0, 1, slot.decay_sum.bytes()));
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
      for (int r = 0; slot.cache && r < rows(); ++r) slot.cache->truncate(r, 0);
      if (!slot.store) continue;
      read_into(reader, slot.decay_sum);
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
      if (!slot.cache) continue;
      const KvStore& cache = *slot.cache;
      const size_t size = static_cast<size_t>((end - first) * cache.kv_heads() * cache.head_dim());
      k.resize(size);
      v.resize(size);
      cache.read(r, first, end - first, k.data(), v.data());
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
      if (!slot.cache) continue;
      KvStore& cache = *slot.cache;
      if (cache.length(r) != first || end < first) {
        throw std::runtime_error("saved keys and values: positions " + std::to_string(first) +
                                 " to " + std::to_string(end) + ", expected the first at " +
                                 std::to_string(cache.length(r)));
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
      cache.append_host(r, k.data(), v.data(), end - first);
    }
  }
  if (!reader.at_end()) throw std::runtime_error("saved keys and values: bytes are left over");
}

}  // namespace replayeval
