// A persistent, warp-specialised grid: warpgroup 0 loads, the others compute 64 query rows each.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/logits.cuh"
#include "common/mask.cuh"
#include "common/tile_schedule.cuh"
#include "fa3/consumer.cuh"
#include "fa3/epilogue.cuh"
#include "fa3/producer.cuh"
#include "fa3/tensor_maps.cuh"
#include "fa3/traits.cuh"

namespace prefill::fa3 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ PrefillParams params,
                     const __grid_constant__ TensorMaps maps,
                     const __grid_constant__ TileSchedule schedule) {
  extern __shared__ __align__(1024) char raw_smem[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw_smem);
  const int warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = Traits::kWarpgroups * 4;
    smem.q_ring.init(Traits::kWarpgroups);
    smem.k_ring.init(kConsumerWarps);
    smem.v_ring.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  const BandMask mask = BandMask::of(params);
  const int group = params.num_qo_heads / params.num_kv_heads;
  // The round-robin over row tiles is the same for all warpgroups.
  const auto for_each_tile = [&](auto&& compute) {
    for (int round = 0;; ++round) {
      const int index = TileSchedule::work_index(round, blockIdx.x, gridDim.x);
      if (round * static_cast<int>(gridDim.x) >= schedule.num_tiles()) break;
      if (index >= schedule.num_tiles()) continue;
      const WorkTile work = schedule.tile(index);
      const int first_row = work.m_tile * Traits::kM;
      compute(work, first_row, mask.kv_tiles<Traits::kM, Traits::kN>(first_row));
    }
  };

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer<Traits> producer(smem, maps);
      for_each_tile([&](WorkTile work, int first_row, KvTileRange const& tiles) {
        producer.load_row_tile(tiles, first_row, work.head, work.head / group);
      });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<Traits> consumer(smem, warpgroup - 1);
    for_each_tile([&](WorkTile work, int tile_row, KvTileRange const& tiles) {
      const int first_row = tile_row + consumer.warpgroup * kWarpgroupRows;
      const int kv_head = work.head / group;
      const LogitScale scale = logit_scale(params, work.head, kv_head);
      typename Traits::Softmax softmax(scale.multiplier);
      Tensor out = partition_fragment_C(typename Traits::MmaPv{},
                                        Shape<Int<kWarpgroupRows>, Int<Traits::Dims::kVo>>{});
      clear(out);
      consumer.wait_q();
      if (!tiles.empty()) consumer.attend(mask, tiles, scale, first_row, softmax, out);
      write_rows(consumer, params, maps, work.head, first_row, value_scale(params, kv_head),
                 softmax, out);
      consumer.q_cursor.advance();
    });
    consumer.turn.finish();
  }
}

}  // namespace prefill::fa3
