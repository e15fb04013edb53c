// One block computes one tile of query rows, or a part of it.
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
  const int tile_tokens = params.rows.tile_tokens(Traits::kM);
  const BandMask mask = BandMask::of(params);
  KvTileRange band = mask.kv_tiles(work.m_tile * tile_tokens, tile_tokens, Traits::kN);
  if (!work.is_whole()) band = band.part(work.part, params.split.num_splits);
  RowTile<T> here{HeadRows<T>::of(params.k, work.kv_head, params.kv_len, params.head_dim_qk),
                  HeadRows<T>::of(params.v, work.kv_head, params.kv_len, params.head_dim_vo),
                  KvTiles::of_band(band),
                  LogitTransform::of_scale(logit_scale(params, work.head, work.kv_head)),
                  first_row};
  const RowTile<T>* row_tile = &here;
  if constexpr (Traits::kIsGeneral) {
    here.tiles = KvTiles::of(params.mask, band, work.m_tile);
    here.transform = LogitTransform::of(params, work.head, work.kv_head);
    row_tile = &smem.row_tile;
    if (threadIdx.x == 0) smem.row_tile = here;
    __syncthreads();
  }
  const int last = here.tiles.last();

  // Barriers before the first mask make it known to all threads.
  for (int row = threadIdx.x; row < Traits::kM; row += Traits::kThreads) {
    smem.queries[row] = min(params.rows.token(first_row + row), params.qo_len - 1);
  }
  const KvLoader<Traits> loader{row_tile->k, row_tile->v, smem};
  if (last >= 0) {
    load_q<Traits>(params, work.head, first_row, smem.q);
    loader.start_k(last);
  }

  typename Traits::Softmax softmax(here.transform.multiplier);
  Tensor out = partition_fragment_C(typename Traits::TiledMma{},
                                    Shape<Int<Traits::kM>, Int<Traits::Dims::kVo>>{});
  clear(out);
  attend<Traits>(loader, *row_tile, params, mask, last, softmax, out);
  write_tile<Traits>(smem, params, schedule, softmax, out);
}

}  // namespace prefill::fa2
