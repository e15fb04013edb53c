// One block computes one tile of query rows of one head.
#pragma once

#include "common/logits.cuh"
#include "common/mask.cuh"
#include "common/tile_schedule.cuh"
#include "fa2/epilogue.cuh"
#include "fa2/load.cuh"
#include "fa2/mainloop.cuh"
#include "fa2/traits.cuh"

namespace prefill::fa2 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    attention_kernel(const __grid_constant__ PrefillParams params,
                     const __grid_constant__ TileSchedule schedule) {
  using T = typename Traits::T;
  extern __shared__ __align__(128) char raw_smem[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw_smem);

  const WorkTile work = schedule.tile(blockIdx.x);
  const int first_row = work.m_tile * Traits::kM;
  const BandMask mask = BandMask::of(params);
  const LogitTransform transform = LogitTransform::of(params, work.head, work.kv_head);
  const KvTiles tiles = KvTiles::of<Traits::kM, Traits::kN>(params, mask, work.m_tile);
  const int last = tiles.last();
  if (threadIdx.x == 0) {
    smem.k_rows = HeadRows<T>::of(params.k, work.kv_head, params.kv_len, params.head_dim_qk);
    smem.v_rows = HeadRows<T>::of(params.v, work.kv_head, params.kv_len, params.head_dim_vo);
    smem.tiles = tiles;
    smem.transform = transform;
  }
  __syncthreads();

  const KvLoader<Traits> loader{smem};
  if (last >= 0) {
    load_rows<Traits, Traits::kM, Traits::Dims::kQk>(
        HeadRows<T>::of(params.q, work.head, params.qo_len, params.head_dim_qk), first_row, smem.q);
    loader.start_k(last);
  }

  typename Traits::Softmax softmax(transform.multiplier);
  Tensor out = partition_fragment_C(typename Traits::TiledMma{},
                                    Shape<Int<Traits::kM>, Int<Traits::Dims::kVo>>{});
  clear(out);
  attend<Traits>(loader, params, mask, last, first_row, softmax, out);
  write_tile<Traits>(smem, params, work.head, first_row, sink_logit(params, work.head),
                     value_scale(params, work.kv_head), softmax, out);
}

}  // namespace prefill::fa2
