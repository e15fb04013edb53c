// A consumer warpgroup: products on the tensor cores, softmax between them, for 64 query rows.
#pragma once

#include "common/fragment.cuh"
#include "common/logits.cuh"
#include "common/mask.cuh"
#include "fa3/traits.cuh"

namespace prefill::fa3 {

enum class Accumulate : bool { no, yes };

// Starts acc (+)= A B and commits it as one group.
template <Accumulate kAccumulate, class TiledMma, class A, class B, class Acc>
CUTE_DEVICE void start_gemm(TiledMma& mma, A const& a, B const& b, Acc& acc) {
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = kAccumulate == Accumulate::yes ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    gemm(mma, a(_, _, k), b(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

template <class Traits>
struct Consumer {
  using T = typename Traits::T;
  using Ring = RingBarriers<Traits::kStages>;
  using Cursor = RingCursor<Traits::kStages>;

  typename Traits::SharedStorage& smem;
  const int warpgroup;
  const int thread;  // within the warpgroup
  Turn<Traits::kWarpgroups> turn;
  RingCursor<1> q_cursor;
  Cursor k_cursor, v_cursor;

  CUTE_DEVICE Consumer(typename Traits::SharedStorage& smem_, int warpgroup_)
      : smem(smem_),
        warpgroup(warpgroup_),
        thread(threadIdx.x % kWarpgroupThreads),
        turn(warpgroup_) {}

  CUTE_DEVICE static void wait_full(Ring& ring, Cursor const& cursor) {
    ring.full[cursor.stage].wait(cursor.phase);
  }

  // Every warp reports for itself: its part of the product is done.
  CUTE_DEVICE void release(Ring& ring, Cursor& cursor) const {
    if (thread % 32 == 0) ring.empty[cursor.stage].arrive();
    cursor.advance();
  }

  template <class Scores>
  CUTE_DEVICE void mask_scores(Scores& scores, BandMask const& mask, KvTileRange const& tiles,
                               LogitScale const& scale, int first_row, int tile) const {
    if (scale.factor == 1.f && !tiles.template needs_mask<Traits::kN>(tile)) return;
    Tensor element_coordinates = typename Traits::MmaQk{}.get_slice(thread).partition_C(
        make_identity_tensor(Shape<Int<kWarpgroupRows>, Int<Traits::kN>>{}));
    Tensor coordinates = row_column_view(element_coordinates);
    scale_scores(scores, scale.factor);
    apply_mask(scores, coordinates, mask, first_row, tile * Traits::kN);
  }

  // One row tile. `first_row` is this warpgroup's. While the softmax of one KV tile runs, the
  // product P V of the tile before is in flight.
  template <class Acc>
  CUTE_DEVICE void attend(BandMask const& mask, KvTileRange const& tiles, LogitScale const& scale,
                          int first_row, typename Traits::Softmax& softmax, Acc& out) {
    typename Traits::MmaQk mma_qk;
    typename Traits::MmaPv mma_pv;
    Tensor q_tile = make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{});
    Tensor k_tiles = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::LayoutK{});
    Tensor vt_tiles = make_tensor(make_smem_ptr(smem.v[0]), typename Traits::LayoutVt{});
    Tensor q_rows = local_tile(q_tile, Shape<Int<kWarpgroupRows>, Int<Traits::Dims::kQk>>{},
                               make_coord(warpgroup, _0{}));
    Tensor q = mma_qk.get_slice(thread).partition_fragment_A(q_rows);   // (MMA, MMA_M, MMA_K)
    Tensor k = mma_qk.get_slice(thread).partition_fragment_B(k_tiles);  // (MMA, MMA_N, MMA_K, PIPE)
    Tensor vt =
        mma_pv.get_slice(thread).partition_fragment_B(vt_tiles);  // (MMA, MMA_N, MMA_K, PIPE)

    Tensor scores = partition_fragment_C(mma_qk, Shape<Int<kWarpgroupRows>, Int<Traits::kN>>{});
    Tensor score_rows = row_column_view(scores);
    Tensor out_rows = row_column_view(out);
    Tensor p_scores = make_tensor<T>(scores.layout());
    Tensor p = make_tensor(p_scores.data(), operand_a_layout(p_scores.layout()));

    wait_full(smem.k_ring, k_cursor);
    start_gemm<Accumulate::no>(mma_qk, q, k(_, _, _, k_cursor.stage), scores);
    warpgroup_wait<0>();
    warpgroup_fence_operand(scores);
    release(smem.k_ring, k_cursor);
    mask_scores(score_rows, mask, tiles, scale, first_row, tiles.end - 1);
    softmax.step(score_rows);
    convert_fragment<T>(scores, p_scores);

    for (int tile = tiles.end - 2; tile >= tiles.begin; --tile) {
      wait_full(smem.k_ring, k_cursor);
      turn.take();
      start_gemm<Accumulate::no>(mma_qk, q, k(_, _, _, k_cursor.stage), scores);
      wait_full(smem.v_ring, v_cursor);
      start_gemm<Accumulate::yes>(mma_pv, p, vt(_, _, _, v_cursor.stage), out);
      turn.give();
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      release(smem.k_ring, k_cursor);
      mask_scores(score_rows, mask, tiles, scale, first_row, tile);
      const auto factor = softmax.step(score_rows);
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      release(smem.v_ring, v_cursor);
      scale_rows(out_rows, factor);
      convert_fragment<T>(scores, p_scores);
    }

    wait_full(smem.v_ring, v_cursor);
    start_gemm<Accumulate::yes>(mma_pv, p, vt(_, _, _, v_cursor.stage), out);
    warpgroup_wait<0>();
    warpgroup_fence_operand(out);
    release(smem.v_ring, v_cursor);
  }

  CUTE_DEVICE void wait_q() const { smem.q_ring.full[0].wait(q_cursor.phase); }

  // Q's place is free again. One thread of the warpgroup calls this, after its output has left.
  CUTE_DEVICE void release_q() const { smem.q_ring.empty[0].arrive(); }
};

}  // namespace prefill::fa3
