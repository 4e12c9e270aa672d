// What the CUDA backend is without CUDA.
#include <stdexcept>

#include "models/backend.h"

namespace replayeval {

namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "device: cuda: this program was built without CUDA; ./dev build cuda, or device: cpu");
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(bool, bool) { refuse(); }
double device_matrix_rate(bool) { refuse(); }

}  // namespace replayeval
