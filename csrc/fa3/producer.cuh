// The producer: one thread that keeps shared memory filled by TMA.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/mask.cuh"
#include "fa3/tensor_maps.cuh"
#include "fa3/traits.cuh"

namespace prefill::fa3 {

// Loads a (kRows, kCols) tile of one head, box by box.
template <class Traits, int kRows, int kCols>
CUTE_DEVICE void load_tile(CUtensorMap const& map, typename Traits::T* tile,
                           cutlass::arch::ClusterTransactionBarrier& full, TMA::CacheHintSm90 hint,
                           int row, int head) {
  constexpr int kBytes = kRows * kCols * static_cast<int>(sizeof(typename Traits::T));
  full.arrive_and_expect_tx(kBytes);
  CUTE_UNROLL
  for (int column = 0; column < kCols; column += Traits::kColumns) {
    SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(hint),
                           tile + kRows * column, column, row, head);
  }
}

template <class Traits>
struct Producer {
  typename Traits::SharedStorage& smem;
  TensorMaps const& maps;
  RingCursor<1> q_cursor;
  RingCursor<Traits::kStages> k_cursor, v_cursor;

  CUTE_DEVICE Producer(typename Traits::SharedStorage& smem_, TensorMaps const& maps_)
      : smem(smem_), maps(maps_) {}

  CUTE_DEVICE void load_q(int first_row, int head) {
    smem.q_ring.empty[0].wait(q_cursor.phase ^ 1);
    load_tile<Traits, Traits::kM, Traits::Dims::kQk>(
        maps.q, smem.q, smem.q_ring.full[0], TMA::CacheHintSm90::EVICT_FIRST, first_row, head);
    q_cursor.advance();
  }

  CUTE_DEVICE void load_k(int tile, int kv_head) {
    smem.k_ring.empty[k_cursor.stage].wait(k_cursor.phase ^ 1);
    load_tile<Traits, Traits::kN, Traits::Dims::kQk>(
        maps.k, smem.k[k_cursor.stage], smem.k_ring.full[k_cursor.stage],
        TMA::CacheHintSm90::EVICT_LAST, tile * Traits::kN, kv_head);
    k_cursor.advance();
  }

  CUTE_DEVICE void load_v(int tile, int kv_head) {
    smem.v_ring.empty[v_cursor.stage].wait(v_cursor.phase ^ 1);
    load_tile<Traits, Traits::kN, Traits::Dims::kVo>(
        maps.v, smem.v[v_cursor.stage], smem.v_ring.full[v_cursor.stage],
        TMA::CacheHintSm90::EVICT_LAST, tile * Traits::kN, kv_head);
    v_cursor.advance();
  }

  // In the order of use: each V one KV tile behind its K. K of the first KV tile does not have to
  // wait until the output of the row tile before has left Q's place.
  CUTE_DEVICE void load_row_tile(KvTileRange const& tiles, int first_row, int head, int kv_head) {
    if (!tiles.empty()) load_k(tiles.end - 1, kv_head);
    load_q(first_row, head);
    for (int tile = tiles.end - 2; tile >= tiles.begin; --tile) {
      load_k(tile, kv_head);
      load_v(tile + 1, kv_head);
    }
    if (!tiles.empty()) load_v(tiles.begin, kv_head);
  }
};

}  // namespace prefill::fa3
