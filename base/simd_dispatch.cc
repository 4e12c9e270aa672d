#include "base/simd_dispatch.h"

namespace replayeval {

SimdLevel simd_level() {
#if defined(__x86_64__)
  static const SimdLevel level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return SimdLevel::v4;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
      return SimdLevel::v3;
    }
    return SimdLevel::generic;
  }();
  return level;
#else
  return SimdLevel::generic;
#endif
}

}  // namespace replayeval
