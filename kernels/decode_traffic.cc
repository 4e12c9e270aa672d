#include "kernels/decode_traffic.h"

namespace replayeval {
namespace {

struct TokenBytes {
  double checkpoint = 0, read = 0;  // packed, all heads of a row
  double record = 0;                // in the ring
  double io = 0;                    // inputs and outputs
};

TokenBytes token_bytes(const DecodeWorkload& w) {
  const auto size = [](RecordType type) { return type == RecordType::bf16 ? 2.0 : 4.0; };
  const double act = size(w.activation);
  const StateShape shape = w.is_gdn ? StateShape{w.gdn.value_dim, w.gdn.key_dim}
                                    : StateShape{w.mamba2.head_dim, w.mamba2.state_dim};
  const double heads = w.is_gdn ? w.gdn.value_heads : w.mamba2.heads;
  TokenBytes bytes;
  bytes.checkpoint = heads * static_cast<double>(packed_bytes(*w.plan.recurrence.format, shape));
  bytes.read = w.plan.read ? heads * static_cast<double>(packed_bytes(*w.plan.read->format, shape))
                           : bytes.checkpoint;
  const double values = heads * shape.head_dim;
  if (!w.is_gdn) {
    const double x = values * act, b = w.mamba2.groups * double{1} * shape.state_dim * act;
    bytes.record = x + b + 4 * heads;
    bytes.io = 2 * x + 2 * b + 4 * heads;
  } else {
    const double k = w.gdn.key_heads * double{1} * shape.state_dim * act, v = values * act;
    // v and beta of the ring are read by flushes only.
    bytes.record = k + values * size(w.plan.ring_u) + 4 * heads;
    bytes.io = 2 * k + 3 * v + 8 * heads;
  }
  return bytes;
}

}  // namespace

double decode_bytes(const DecodeWorkload& w) {
  const TokenBytes t = token_bytes(w);
  const double window = w.plan.window;
  const double flushes = w.only_reads ? 0 : 1 / window;
  const double records = w.only_reads ? static_cast<double>(w.plan.window / 2) : (window - 1) / 2;
  const double at_flush = 2 * t.checkpoint + (w.plan.read ? t.read : 0);
  return w.rows * ((1 - flushes) * t.read + flushes * at_flush + records * t.record +
                   (1 - flushes) * t.record + t.io);
}

double conventional_bytes(const DecodeWorkload& w) {
  const TokenBytes t = token_bytes(w);
  return w.rows * (2 * t.checkpoint + t.io);
}

int best_window(const DecodeWorkload& workload) {
  DecodeWorkload w = workload;
  int best = 1;
  double least = 0;
  for (int window = 1; window <= kMaxWindow; ++window) {
    w.plan.window = window;
    const double bytes = decode_bytes(w);
    if (window == 1 || bytes < least) {
      best = window;
      least = bytes;
    }
  }
  return best;
}

}  // namespace replayeval
