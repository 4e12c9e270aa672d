#include "harness/document_snapshot.h"

#include <stdexcept>

#include "base/bytes.h"

namespace replayeval {
namespace {

std::string piece_name(const std::string& name, int row, size_t piece) {
  return name + "-row-" + std::to_string(row) + "-cache-" + std::to_string(piece);
}

std::vector<std::byte> progress_bytes(const std::string& identity, const DocumentProgress& p) {
  ByteWriter writer;
  writer.array(identity);
  writer.value(p.position);
  writer.value(p.span_first);
  for (const PositionFigures& figures : p.figures) {
    writer.array(figures.kl_nats);
    writer.array(figures.nll_nats);
    writer.array(figures.top1);
  }
  for (const StateSpan& sample : p.samples) {
    writer.array(sample.error_positions);
    writer.array(sample.error);
    writer.array(sample.error_read);
  }
  for (const std::vector<StoreHealth>& layers : p.health) writer.array(layers);
  writer.value(static_cast<uint64_t>(p.decay.size()));
  for (const std::vector<double>& heads : p.decay) writer.array(heads);
  writer.value(p.nll_sum);
  writer.value(p.nll_count);
  writer.array(p.cache_ends);
  return writer.take();
}

/// Into a progress with as many rows; false for another identity.
bool read_progress(ByteReader& reader, const std::string& identity, DocumentProgress& p) {
  std::string stored;
  reader.array(stored);
  if (stored != identity) return false;
  p.position = reader.value<int64_t>();
  p.span_first = reader.value<int64_t>();
  for (PositionFigures& figures : p.figures) {
    reader.array(figures.kl_nats);
    reader.array(figures.nll_nats);
    reader.array(figures.top1);
  }
  for (StateSpan& sample : p.samples) {
    reader.array(sample.error_positions);
    reader.array(sample.error);
    reader.array(sample.error_read);
  }
  for (std::vector<StoreHealth>& layers : p.health) reader.array_of_equal_size(layers);
  p.decay.clear();
  for (uint64_t left = reader.value<uint64_t>(); left > 0; --left) {
    reader.array(p.decay.emplace_back());
  }
  p.nll_sum = reader.value<double>();
  p.nll_count = reader.value<int64_t>();
  reader.array(p.cache_ends);
  return true;
}

}  // namespace

void save_snapshot(RunFolder& folder, const std::string& name, const std::string& identity,
                   DocumentProgress& progress, const StateSet& states) {
  const int64_t saved = progress.cache_ends.empty() ? 0 : progress.cache_ends.back();
  if (progress.position > saved) {
    const size_t piece = progress.cache_ends.size();
    for (int r = 0; r < states.rows(); ++r) {
      folder.put_snapshot(piece_name(name, r, piece),
                          states.save_cache(r, saved, progress.position));
    }
    progress.cache_ends.push_back(progress.position);
  }
  ByteWriter writer;
  writer.array(progress_bytes(identity, progress));
  writer.array(states.save());
  // Last, since it says which pieces belong to it.
  folder.put_snapshot(name, writer.take());
}

SnapshotOutcome load_snapshot(const RunFolder& folder, const std::string& name,
                              const std::string& identity, DocumentProgress& progress,
                              StateSet& states) {
  const std::optional<std::vector<std::byte>> bytes = folder.get_snapshot(name);
  if (!bytes) {
    if (folder.has_snapshot(name)) return {false, "its checksum differs"};
    return {};
  }
  DocumentProgress stored = progress;
  try {
    ByteReader reader(*bytes);
    std::vector<std::byte> head, state;
    reader.array(head);
    reader.array(state);
    ByteReader head_reader(head);
    if (!read_progress(head_reader, identity, stored)) {
      return {false, "it belongs to other states or another text"};
    }
    states.restore(state);
    for (int r = 0; r < states.rows(); ++r) {
      for (size_t piece = 0; piece < stored.cache_ends.size(); ++piece) {
        const auto cache = folder.get_snapshot(piece_name(name, r, piece));
        if (!cache) {
          throw std::runtime_error("the piece " + piece_name(name, r, piece) +
                                   " of the key-value cache is missing or broken");
        }
        states.append_cache(r, *cache);
      }
      if (states.position(r) != stored.position) {
        throw std::runtime_error("row " + std::to_string(r) + " stands elsewhere");
      }
    }
  } catch (const std::runtime_error& error) {
    for (int r = 0; r < states.rows(); ++r) {
      const RowSpec spec = states.row(r);
      states.reset(r, spec);
    }
    return {false, error.what()};
  }
  progress = std::move(stored);
  return {true, {}};
}

void remove_snapshot(RunFolder& folder, const std::string& name, const DocumentProgress& progress,
                     int rows) {
  folder.remove_snapshot(name);
  for (int r = 0; r < rows; ++r) {
    for (size_t piece = 0; piece < progress.cache_ends.size(); ++piece) {
      folder.remove_snapshot(piece_name(name, r, piece));
    }
  }
}

}  // namespace replayeval
