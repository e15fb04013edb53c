// Lets a kernel use more dynamic shared memory than the default 48 KB.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace prefill {

// One per kernel. Raises the limit once on each device: the attribute stays with the context.
class SmemLimit {
 public:
  template <class Kernel>
  cudaError_t raise(Kernel* kernel, int bytes) {
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const uint64_t bit = uint64_t{1} << (device % 64);
    if (device < 64 && (raised_.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) raised_.fetch_or(bit, std::memory_order_relaxed);
    return error;
  }

 private:
  std::atomic<uint64_t> raised_{0};
};

}  // namespace prefill
