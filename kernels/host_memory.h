// Memory of arrays that live as long as a row or a call: states, rings, caches, activations. Blocks
// that are given back are handed out again, and lie on large pages where the system has them: with
// many rows, state is read from far-away caches, and most of such a read is finding its page.
#pragma once

#include <cstddef>

namespace replayeval {

/// `bytes` uninitialised bytes, 64-byte aligned. Any thread may call. Throws std::bad_alloc.
std::byte* take_host_memory(size_t bytes);

/// Gives back what take_host_memory(bytes) returned; null does nothing. Blocks of up to 8 MiB are
/// kept for later calls, larger ones return to the system.
void give_host_memory(std::byte* memory, size_t bytes) noexcept;

}  // namespace replayeval
