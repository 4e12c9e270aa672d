// Arrays that start on a cache line: the vector loads of the kernels are fastest when none of them
// crosses one.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace replayeval {

constexpr size_t kCacheLine = 64;

template <class T>
struct AlignedAllocator {
  using value_type = T;

  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new (count * sizeof(T), std::align_val_t{kCacheLine}));
  }
  void deallocate(T* pointer, size_t) { ::operator delete (pointer, std::align_val_t{kCacheLine}); }
  friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
};

/// A vector whose first element is 64-byte aligned.
template <class T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;

}  // namespace replayeval
