// Function qualifiers for code that runs on the host (and is tested there) as well as in kernels.
#pragma once

#if defined(__CUDACC__)
#define PREFILL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PREFILL_HOST_DEVICE inline
#endif
