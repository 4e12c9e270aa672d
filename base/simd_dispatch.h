// Chooses, once a process, the widest instruction set among those that hot files are compiled for
// (cmake/replayeval.cmake, replayeval_simd). Results of quant/ do not depend on the choice; results of kernels/ may,
// through fused multiply-add.
#pragma once

namespace replayeval {

enum class SimdLevel { generic, v3, v4 };

/// The level in use on this machine: x86-64-v4 (AVX-512), x86-64-v3 (AVX2, FMA), or the compiler's default target.
SimdLevel simd_level();

}  // namespace replayeval

// REPLAYEVAL_SIMD_DECLARE(declaration) declares one function in the namespace of each level, and
// REPLAYEVAL_SIMD_CALL(name)(arguments) calls the one in use. Both are used inside namespace replayeval.
#if defined(__x86_64__)
#define REPLAYEVAL_SIMD_DECLARE(...)    \
  namespace simd_generic {              \
  __VA_ARGS__;                          \
  }                                     \
  namespace simd_v3 {                   \
  __VA_ARGS__;                          \
  }                                     \
  namespace simd_v4 {                   \
  __VA_ARGS__;                          \
  }
#define REPLAYEVAL_SIMD_CALL(name)                                              \
  (::replayeval::simd_level() == ::replayeval::SimdLevel::v4   ? simd_v4::name  \
   : ::replayeval::simd_level() == ::replayeval::SimdLevel::v3 ? simd_v3::name  \
                                                               : simd_generic::name)
#else
#define REPLAYEVAL_SIMD_DECLARE(...) \
  namespace simd_generic {           \
  __VA_ARGS__;                       \
  }
#define REPLAYEVAL_SIMD_CALL(name) simd_generic::name
#endif
