// For tests that need a device.
#pragma once

#include <cuda_runtime_api.h>

#include "check.h"

namespace prefill::test {

// Whether there is no device to test on; a gpu test then returns kSkipped from main.
inline bool no_gpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return false;
  cudaGetLastError();
  std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorString(error));
  return true;
}

}  // namespace prefill::test

// A CUDA call that must succeed: its error is a failed check.
#define CHECK_CUDA(call)                                                               \
  do {                                                                                 \
    const cudaError_t check_error = (call);                                            \
    CHECK(check_error == cudaSuccess, #call << ": " << cudaGetErrorName(check_error)); \
  } while (false)
