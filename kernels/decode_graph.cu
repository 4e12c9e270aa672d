#include "kernels/decode_cuda.h"
#include "quant/cuda_check.cuh"

namespace replayeval {

CapturedSteps::CapturedSteps(const std::function<void(CudaStream)>& queue) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  const auto release = [&] {
    if (graph) cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  };
  CUDA_CHECK(cudaStreamCreate(&stream));
  try {
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      queue(stream);
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      throw;
    }
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t ready = nullptr;
    CUDA_CHECK(cudaGraphInstantiate(&ready, graph, 0));
    graph_ = ready;
  } catch (...) {
    release();
    throw;
  }
  release();
}

CapturedSteps::~CapturedSteps() { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_)); }

void CapturedSteps::run(CudaStream stream) const {
  CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), stream));
}

}  // namespace replayeval
