// The pass after kernels that work on parts of row tiles (SplitKv): merges them.
#pragma once

#include <cuda_runtime_api.h>

#include "common/params.h"
#include "common/tile_schedule.cuh"

namespace prefill {

// Writes outputs and LSEs of the schedule's row tiles in parts, sinks included. Row tiles have
// `tile_m` rows, and parts `columns` floats in a row. `programmatic`: the pass may be launched
// before the kernel has ended, on devices that know how to wait for that (sm90 and up).
cudaError_t combine(const PrefillParams& params, const TileSchedule& schedule, int tile_m,
                    int columns, bool programmatic, cudaStream_t stream);

}  // namespace prefill
