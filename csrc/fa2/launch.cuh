// The host side of an fa2 kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "common/combine.h"
#include "common/kernel_key.h"
#include "common/params.h"
#include "common/smem_limit.h"
#include "fa2/kernel.cuh"

namespace prefill::fa2 {

template <DType kDType, class Dims>
KernelInfo kernel_info() {
  using Traits = Traits<kDType, Dims, Scores::General>;  // which has a little more of it
  return {Traits::kM, Traits::kN, /*stages=*/1, Traits::kThreads,
          static_cast<int>(sizeof(typename Traits::SharedStorage))};
}

template <DType kDType, class Dims, Scores kScores>
cudaError_t launch_kernel(const PrefillParams& params, cudaStream_t stream) {
  using Traits = Traits<kDType, Dims, kScores>;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  auto kernel = attention_kernel<Traits>;
  static SmemLimit smem_limit;
  if (cudaError_t error = smem_limit.raise(kernel, kSmemBytes); error != cudaSuccess) return error;
  const TileSchedule schedule = TileSchedule::make(params, Traits::kM, 0);
  kernel<<<schedule.num_items(), Traits::kThreads, kSmemBytes, stream>>>(params, schedule);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || !params.split.exists()) return error;
  return combine(params, schedule, Traits::kM, Dims::kVo, /*programmatic=*/false, stream);
}

template <DType kDType, class Dims>
cudaError_t launch(const PrefillParams& params, cudaStream_t stream) {
  return scores_of(params) == Scores::Plain
             ? launch_kernel<kDType, Dims, Scores::Plain>(params, stream)
             : launch_kernel<kDType, Dims, Scores::General>(params, stream);
}

}  // namespace prefill::fa2
