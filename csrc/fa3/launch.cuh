// The host side of an fa3 kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "common/combine.h"
#include "common/kernel_key.h"
#include "common/params.h"
#include "common/smem_limit.h"
#include "fa3/kernel.cuh"

namespace prefill::fa3 {

template <DType kDType, class Dims>
KernelInfo kernel_info() {
  using Traits = Traits<kDType, Dims, Scores::Plain>;
  return {Traits::kM, Traits::kN, Traits::kStages, Traits::kThreads,
          static_cast<int>(sizeof(typename Traits::SharedStorage))};
}

template <class Traits>
cudaError_t encode_v(const PrefillParams& params, CUtensorMap& map) {
  const auto elements = MapElements::of<typename Traits::T>(Traits::kColumnsV);
  if constexpr (Traits::kIsFloat8) {
    const int64_t keys = params.vt.keys;
    return encode(map, params.vt.data, elements, params.vt.keys,
                  {{params.head_dim_vo, keys, Traits::Dims::kVo},
                   {params.num_kv_heads, keys * params.head_dim_vo, 1}});
  } else {
    return encode(map, params.v, elements, params.head_dim_vo, params.kv_len, params.num_kv_heads,
                  Traits::kN);
  }
}

template <class Traits>
cudaError_t encode_maps(const PrefillParams& params, TensorMaps& maps) {
  const auto elements = MapElements::of<typename Traits::T>(Traits::kColumns);
  cudaError_t error = encode(maps.q, params.q, elements, params.head_dim_qk, params.qo_len,
                             params.num_qo_heads, params.rows);
  if (error != cudaSuccess) return error;
  error = encode(maps.k, params.k, elements, params.head_dim_qk, params.kv_len, params.num_kv_heads,
                 Traits::kN);
  if (error != cudaSuccess) return error;
  error = encode_v<Traits>(params, maps.v);
  if (error != cudaSuccess || !Traits::kStagesOutput) return error;
  return encode(maps.out, params.out, MapElements::of<typename Traits::Out>(Traits::kColumnsOut),
                params.head_dim_vo, params.qo_len, params.num_qo_heads, kWarpgroupRows);
}

template <DType kDType, class Dims, Scores kScores>
cudaError_t launch_kernel(const PrefillParams& params, cudaStream_t stream) {
  using Traits = Traits<kDType, Dims, kScores>;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  auto kernel = attention_kernel<Traits>;
  static SmemLimit smem_limit;
  cudaError_t error = smem_limit.raise(kernel, kSmemBytes);
  if (error != cudaSuccess) return error;

  TensorMaps maps{};
  error = encode_maps<Traits>(params, maps);
  if (error != cudaSuccess) return error;

  const TileSchedule schedule = TileSchedule::make(params, Traits::kM, params.num_sms);
  // Programmatic: the launch need not wait until the kernel before has ended (kernel.cuh does).
  cudaLaunchAttribute programmatic{};
  programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  programmatic.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = schedule.num_blocks;
  config.blockDim = Traits::kThreads;
  config.dynamicSmemBytes = kSmemBytes;
  config.stream = stream;
  config.attrs = &programmatic;
  config.numAttrs = 1;
  error = cudaLaunchKernelEx(&config, kernel, params, maps, schedule, params.has_per_head());
  if (error != cudaSuccess || !params.split.exists()) return error;
  return combine(params, schedule, Traits::kM, Dims::kVo, /*programmatic=*/true, stream);
}

template <DType kDType, class Dims>
cudaError_t launch(const PrefillParams& params, cudaStream_t stream) {
  const Scores scores = scores_of(params);
  if (scores == Scores::Plain) return launch_kernel<kDType, Dims, Scores::Plain>(params, stream);
  // Of 8 bits two kernels do, to be built in less time.
  if constexpr (sizeof(Element<kDType>) > 1) {
    if (scores == Scores::Masked) {
      return launch_kernel<kDType, Dims, Scores::Masked>(params, stream);
    }
  }
  return launch_kernel<kDType, Dims, Scores::General>(params, stream);
}

}  // namespace prefill::fa3
