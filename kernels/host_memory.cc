#include "kernels/host_memory.h"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <mutex>
#include <new>

#include "kernels/aligned.h"

namespace replayeval {
namespace {

constexpr size_t kSmallest = 4096;                // less comes from the allocator
constexpr size_t kLargestKept = size_t{8} << 20;  // more is not kept
constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kArena = size_t{32} << 20;  // blocks are cut from arenas of this size
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kReuse = false;  // AddressSanitizer sees the ends of blocks that it allocates
#else
constexpr bool kReuse = true;
#endif

/// Classes of size: four steps to each power of two.
struct SizeClass {
  size_t index;
  size_t bytes;
};

SizeClass class_of(size_t bytes) {
  const size_t power = std::bit_width(bytes - 1) - 1;  // 2^power < bytes <= 2^(power + 1)
  const size_t step = (size_t{1} << power) / 4;
  const size_t steps = (bytes - (size_t{1} << power) + step - 1) / step;
  return {4 * power + steps - 1, (size_t{1} << power) + steps * step};
}

bool kept(size_t bytes) { return kReuse && bytes > kSmallest && bytes <= kLargestKept; }

/// A block of the system's, on large pages where there are some.
std::byte* map_pages(size_t bytes) {
  auto* pages = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kLargePage}));
#if defined(MADV_HUGEPAGE)
  madvise(pages, bytes / kLargePage * kLargePage, MADV_HUGEPAGE);  // only a wish
#endif
  return pages;
}

/// Free blocks by class, each holding the next one's address.
class Blocks {
 public:
  std::byte* take(SizeClass size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Free*& first = free_[size.index];
    if (first != nullptr) {
      Free* block = first;
      first = block->next;
      return reinterpret_cast<std::byte*>(block);
    }
    if (left_ < size.bytes) {
      arena_ = map_pages(kArena);
      left_ = kArena;
    }
    std::byte* block = arena_;
    arena_ += size.bytes;
    left_ -= size.bytes;
    return block;
  }

  void give(std::byte* memory, SizeClass size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[size.index] = new (memory) Free{free_[size.index]};
  }

 private:
  struct Free {
    Free* next;
  };
  std::mutex mutex_;
  std::array<Free*, 4 * 64> free_{};
  std::byte* arena_ = nullptr;
  size_t left_ = 0;
};

/// Never destroyed: arrays with static lifetime may be given back last.
Blocks& blocks() {
  static Blocks* const all = new Blocks;
  return *all;
}

}  // namespace

std::byte* take_host_memory(size_t bytes) {
  if (kept(bytes)) return blocks().take(class_of(bytes));
  if (kReuse && bytes > kLargestKept) return map_pages(bytes);
  return static_cast<std::byte*>(
      ::operator new (bytes > 0 ? bytes : 1, std::align_val_t{kCacheLine}));
}

void give_host_memory(std::byte* memory, size_t bytes) noexcept {
  if (memory == nullptr) return;
  if (kept(bytes)) return blocks().give(memory, class_of(bytes));
  const bool pages = kReuse && bytes > kLargestKept;
  ::operator delete (memory, std::align_val_t{pages ? kLargePage : kCacheLine});
}

}  // namespace replayeval
