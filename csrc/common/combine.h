// The pass after kernels that work on parts of row tiles (SplitKv): merges them.
#pragma once

#include <cuda_runtime_api.h>

#include "common/kernel_key.h"
#include "common/params.h"
#include "common/tile_schedule.cuh"

namespace prefill {

// What is merged: which row tiles, of `tile_m` rows with outputs of `columns` floats.
struct Parts {
  TileSchedule schedule;
  int tile_m;
  int columns;
};

// Writes outputs and LSEs of all row tiles in parts, sinks included. `programmatic`: it may be
// launched before the kernel has ended, on devices that know how to wait for that (sm90 and up).
cudaError_t combine(const PrefillParams& params, const Parts& parts, DType dtype,
                    bool programmatic, cudaStream_t stream);

}  // namespace prefill
