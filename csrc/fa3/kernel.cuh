// A persistent, warp-specialised grid: warpgroup 0 loads, the others compute 64 query rows each.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_desc.hpp>

#include "common/mask.cuh"
#include "common/tile_schedule.cuh"
#include "fa3/consumer.cuh"
#include "fa3/float8_steps.cuh"
#include "fa3/producer.cuh"
#include "fa3/tensor_maps.cuh"
#include "fa3/traits.cuh"

namespace prefill::fa3 {

// TMA never writes the spare rows of a block. They are computed like all others: what they hold
// must be finite.
template <class Storage>
CUTE_DEVICE void clear_queries(Storage& smem) {
  for (auto& consumer : smem.consumers) {
    auto* words = reinterpret_cast<uint4*>(consumer.q);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(consumer.q) / sizeof(uint4));
         i += blockDim.x) {
      words[i] = make_uint4(0, 0, 0, 0);
    }
  }
  cutlass::arch::fence_view_async_shared();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ PrefillParams params,
                     const __grid_constant__ TensorMaps maps,
                     const __grid_constant__ TileSchedule schedule, const bool has_per_head) {
  extern __shared__ __align__(1024) char raw_smem[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw_smem);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&maps.k));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&maps.q));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&maps.v));
    if constexpr (Traits::kStagesOutput) {
      prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&maps.out));
    }
    constexpr int kConsumerWarps = Traits::kWarpgroups * kWarpgroupWarps;
    for (auto& consumer : smem.consumers) {
      consumer.q_ring.init(kWarpgroupWarps);
      consumer.rows[Traits::kRowTiles - 1] = RowTile::end(0);  // before the first
    }
    smem.k_ring.init(kConsumerWarps);
    smem.v_ring.init(kConsumerWarps);
    smem.redo_list.init(Traits::kWarpgroups);
    cutlass::arch::fence_barrier_init();
  } else if (threadIdx.x / 32 == 1) {
    smem.redo_list.clear();
    if (threadIdx.x % 32 == 0) smem.results = Results::of(params);
  }
  if (params.rows.rows() < kWarpgroupRows) clear_queries(smem);
  __syncthreads();
  // The next kernel may start on SMs that this one leaves. Of this one only the producer waits for
  // the kernel before; consumers wait for the producer.
  asm volatile("griddepcontrol.launch_dependents;");

  const BandMask mask = BandMask::of(params);
  if (threadIdx.x < kWarpgroupThreads) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer<Traits>{smem, params, maps, schedule, mask, has_per_head}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<Traits> consumer(smem, params, maps, mask, cutlass::canonical_warp_group_idx() - 1);
    if constexpr (Traits::kIsFloat8) {
      consumer.run_float8();
    } else {
      consumer.run();
    }
  }
}

}  // namespace prefill::fa3
