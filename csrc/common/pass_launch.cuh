// How passes before and after a kernel are launched, and how they wait for what is before them.
#pragma once

#include <cuda_runtime_api.h>

namespace prefill {

// `programmatic`: the pass may begin before the kernel before it has ended, as it waits by itself
// (wait_for_kernel_before). Code for sm90 and up alone does, which is what runs beside fa3.
template <class... Parameters>
cudaError_t launch_pass(void (*pass)(Parameters...), dim3 blocks, dim3 threads, bool programmatic,
                        cudaStream_t stream, const Parameters&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, pass, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // or the next launch would answer it again
  return error;
}

// By all threads of a pass, before they read or write any memory of the call: what the kernel
// before wrote is there then. The next kernel may begin, and waits for this one's end by itself.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace prefill
