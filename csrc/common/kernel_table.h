// The kernels of this build, as CMake listed them (kernel_table.inc).
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "common/kernel_key.h"
#include "common/params.h"

namespace prefill {

struct KernelEntry {
  Backend backend;
  DType dtype;
  int head_dim_qk;  // of the class
  int head_dim_vo;
  KernelInfo (*info)();
  cudaError_t (*launch)(const PrefillParams&, cudaStream_t);
};

// All entries; `count` receives how many there are.
const KernelEntry* kernel_table(int& count);

// The entry of the smallest class that holds both head dims, or null where this build has none.
const KernelEntry* find_kernel(Backend backend, DType dtype, int head_dim_qk, int head_dim_vo);

const char* name(Backend backend);
const char* name(DType dtype);

// Version, toolchain, archs and kernels of this build as JSON.
std::string build_info();

}  // namespace prefill
