// Writes a warpgroup's finished rows: output through Q's place in shared memory and TMA, and LSE.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/fragment.cuh"
#include "common/lse.cuh"
#include "common/params.h"
#include "fa3/consumer.cuh"
#include "fa3/tensor_maps.cuh"
#include "fa3/traits.cuh"

namespace prefill::fa3 {

template <class Traits, class Acc>
CUTE_DEVICE void write_rows(Consumer<Traits>& consumer, PrefillParams const& params,
                            TensorMaps const& maps, int head, int first_row, float value_scale,
                            typename Traits::Softmax& softmax, Acc& out) {
  using T = typename Traits::T;
  typename Traits::MmaPv mma_pv;
  const int warpgroup = consumer.warpgroup;
  const int thread = consumer.thread;

  softmax.finish();
  Tensor element_coordinates = mma_pv.get_slice(thread).partition_C(
      make_identity_tensor(Shape<Int<kWarpgroupRows>, Int<Traits::Dims::kVo>>{}));
  Tensor coordinates = row_column_view(element_coordinates);
  store_lse(params, softmax, coordinates, head, first_row);

  Tensor out_rows = row_column_view(out);
  normalise_rows(out_rows, softmax, value_scale);
  Tensor rounded = make_tensor<T>(out.layout());
  convert_fragment<T>(out, rounded);

  // The whole warpgroup is done with its rows of Q before they are overwritten.
  named_barrier_sync(NamedBarrier::kWarpgroup, warpgroup, kWarpgroupThreads);
  Tensor tile = make_tensor(make_smem_ptr(consumer.smem.q), typename Traits::LayoutO{});
  Tensor rows = local_tile(tile, Shape<Int<kWarpgroupRows>, Int<Traits::Dims::kVo>>{},
                           make_coord(warpgroup, _0{}));
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, T>{}, mma_pv);
  auto thr_copy_out = copy_out.get_slice(thread);
  copy(copy_out, thr_copy_out.retile_S(rounded), thr_copy_out.partition_D(rows));
  tma_store_fence();
  named_barrier_sync(NamedBarrier::kWarpgroup, warpgroup, kWarpgroupThreads);
  if (thread == 0) {
    if (first_row < params.qo_len) {
      for (int column = 0; column < params.head_dim_vo; column += Traits::kColumns) {
        T const* box =
            consumer.smem.q + Traits::kM * column + warpgroup * kWarpgroupRows * Traits::kColumns;
        SM90_TMA_STORE_3D::copy(&maps.out, box, column, first_row, head);
      }
      tma_store_arrive();
      tma_store_wait<0>();
    }
    consumer.release_q();
  }
}

}  // namespace prefill::fa3
