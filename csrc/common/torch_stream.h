// The current CUDA stream of a device, by way of torch's C shim.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// Torch exports this from its CUDA library alone: a weak reference keeps this library loadable
// beside a CPU build of torch, where it is null and never called.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                            void** stream);

namespace prefill {

// False where torch has no CUDA.
inline bool current_stream(int32_t device_index, cudaStream_t& stream) {
  if (aoti_torch_get_current_cuda_stream == nullptr) return false;
  return aoti_torch_get_current_cuda_stream(device_index, reinterpret_cast<void**>(&stream)) == 0;
}

}  // namespace prefill
