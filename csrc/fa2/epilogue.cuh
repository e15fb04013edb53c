// Writes the finished row tile: output through shared memory in 16-byte stores, and the LSE. Or a
// part of it.
#pragma once

#include "common/fragment.cuh"
#include "common/lse.cuh"
#include "common/params.h"
#include "common/parts.cuh"
#include "common/tile_schedule.cuh"
#include "fa2/traits.cuh"

namespace prefill::fa2 {

// Copies the output tile from shared memory to rows of the output that exist.
template <class Traits>
CUTE_DEVICE void store_rows(typename Traits::SharedStorage& smem, const PrefillParams& params,
                            int head, int first_row) {
  using T = typename Traits::T;
  constexpr int kChunk = 16 / sizeof(T);
  constexpr int kChunks = Traits::kColumns / kChunk;
  constexpr int kRowStep = Traits::kThreads / kChunks;
  Tensor tile = make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutO{});
  const int thread_row = threadIdx.x / kChunks;
  const int thread_column = threadIdx.x % kChunks * kChunk;
  T* head_out = static_cast<T*>(params.out.data) + head * params.out.head_stride;
  CUTE_UNROLL
  for (int row = thread_row; row < Traits::kM; row += kRowStep) {
    if (first_row + row >= params.qo_len) break;
    T* to = head_out + (first_row + row) * params.out.token_stride;
    CUTE_UNROLL
    for (int column = thread_column; column < Traits::Dims::kVo; column += Traits::kColumns) {
      if (column < params.head_dim_vo) {
        *reinterpret_cast<uint128_t*>(to + column) =
            *reinterpret_cast<const uint128_t*>(&tile(row, column));
      }
    }
  }
}

template <class Traits, class Acc>
CUTE_DEVICE void write_tile(typename Traits::SharedStorage& smem, const PrefillParams& params,
                            const TileSchedule& schedule, typename Traits::Softmax const& softmax,
                            Acc& out) {
  using T = typename Traits::T;
  typename Traits::TiledMma tiled_mma;
  // For all ptxas knows, another block: the main loop has no registers to keep in what is known of
  // this one.
  int block = blockIdx.x;
  asm volatile("" : "+r"(block));
  const WorkTile work = schedule.tile(block);
  const int part = schedule.part_of_all(block), first_row = work.m_tile * Traits::kM;
  const float sink = work.is_whole() ? sink_logit(params, work.head) : -INFINITY;
  Tensor out_rows = row_column_view(out);
  Normaliser<Traits::Softmax::kRows>(softmax, Traits::kWithCare, sink,
                                     value_scale(params, work.kv_head))
      .apply(out_rows);
  using TileShape = Shape<Int<Traits::kM>, Int<Traits::Dims::kVo>>;
  const auto coordinates = element_coordinates<TileShape>(tiled_mma, threadIdx.x);
  if (part >= 0) {
    const int first_part = part * Traits::kM;
    store_part_lse(params.split, softmax, Traits::kWithCare, coordinates, first_part);
    store_part_rows<TileShape>(Results::of(params), tiled_mma, threadIdx.x, first_row, first_part,
                               out_rows);
    return;
  }
  Tensor rounded = make_tensor<T>(out.layout());
  convert_fragment<T>(out, rounded);

  // A warp writes over query rows that only it reads: no barrier is needed before.
  auto copy_out = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, T>{}, tiled_mma);
  auto thr_copy_out = copy_out.get_slice(threadIdx.x);
  Tensor tile = make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutO{});
  copy(copy_out, thr_copy_out.retile_S(rounded), thr_copy_out.partition_D(tile));

  store_lse(Results::of(params), softmax, Traits::kWithCare, coordinates, work.head, sink,
            first_row);

  __syncthreads();
  store_rows<Traits>(smem, params, work.head, first_row);
}

}  // namespace prefill::fa2
