// The producer: one thread that keeps shared memory filled by TMA.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "fa3/tensor_maps.cuh"
#include "fa3/traits.cuh"
#include "fa3/work_list.cuh"

namespace prefill::fa3 {

// Loads a (kRows, kCols) tile of one head, box by box.
template <class Traits, int kRows, int kCols>
CUTE_DEVICE void load_tile(CUtensorMap const& map, typename Traits::T* tile,
                           cutlass::arch::ClusterTransactionBarrier& full, TMA::CacheHintSm90 hint,
                           int row, int head) {
  constexpr int kBytes = kRows * kCols * static_cast<int>(sizeof(typename Traits::T));
  compiler_fence();
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
  PrefillParams const& params;
  TensorMaps const& maps;
  TileSchedule const& schedule;
  BandMask const& mask;
  uint32_t num_rows = 0;   // row tiles told
  uint32_t num_steps = 0;  // KV tiles whose K has been loaded; V lags one behind
  int v_tile = 0, v_head = 0;
  bool v_is_pending = false;

  CUTE_DEVICE void load_k(int tile, int kv_head) {
    const uint32_t stage = num_steps % Traits::kStages;
    smem.k_ring.wait_empty(num_steps);
    load_tile<Traits, Traits::kN, Traits::Dims::kQk>(maps.k, smem.k[stage], smem.k_ring.full[stage],
                                                     TMA::CacheHintSm90::EVICT_LAST,
                                                     tile * Traits::kN, kv_head);
  }

  // V of the KV tile whose K was loaded last.
  CUTE_DEVICE void load_pending_v() {
    if (!v_is_pending) return;
    v_is_pending = false;
    const uint32_t stage = (num_steps - 1) % Traits::kStages;
    smem.v_ring.wait_empty(num_steps - 1);
    load_tile<Traits, Traits::kN, Traits::Dims::kVo>(maps.v, smem.v[stage], smem.v_ring.full[stage],
                                                     TMA::CacheHintSm90::EVICT_LAST,
                                                     v_tile * Traits::kN, v_head);
  }

  // Tells each consumer of its rows, and loads Q for them where they see any key.
  CUTE_DEVICE void tell(RowTile rows) {
    for (auto& consumer : smem.consumers) {
      auto& ring = consumer.q_ring;
      ring.wait_empty(num_rows);
      consumer.rows[num_rows % Traits::kRowTiles] = rows;
      if (rows.order.empty()) {
        compiler_fence();
        ring.full[num_rows % Traits::kQStages].arrive();
      } else {
        load_tile<Traits, kWarpgroupRows, Traits::Dims::kQk>(
            maps.q, consumer.q[num_rows % Traits::kQStages], ring.full[num_rows % Traits::kQStages],
            TMA::CacheHintSm90::EVICT_FIRST, rows.first_row, rows.head);
      }
      rows.first_row += kWarpgroupRows;
    }
    ++num_rows;
  }

  // In the order of use: V one KV tile behind K, across row tiles too.
  CUTE_DEVICE void load_row_tile(int round, int index, bool exact) {
    const WorkTile work = schedule.tile(index);
    const int first_row = work.m_tile * Traits::kM;
    KvTileOrder order =
        mask.kv_tiles<Traits::kM, Traits::kN>(first_row).template masked_first<Traits::kN>();
    const LogitScale scale = logit_scale(params, work.head, work.kv_head);
    if (scale.factor != 1.f) {  // is applied with the mask
      order.num_masked = order.count;
      exact = true;
    }
    const float v_scale = value_scale(params, work.kv_head);
    // Over an anchored sum of up to 2^100 a smaller one would vanish.
    exact = exact || !(fabsf(v_scale) >= 0x1p-26f);
    // The anchor of narrow weights is better not left to a row's first keys alone.
    const int num_anchoring =
        Traits::kHasWideWeights ? order.num_anchoring : min(order.num_masked + 1, order.count);
    const RowTile rows{
        round, work.head, first_row, scale, v_scale, exact ? order.count : num_anchoring, order};
    if (rows.order.empty()) {
      load_pending_v();  // consumers finish what they have before they write these rows
      tell(rows);
    }
    for (int step = 0; step < rows.order.count; ++step) {
      const int tile = rows.order.tile(step);
      load_k(tile, work.kv_head);
      load_pending_v();
      if (step == 0) tell(rows);
      v_tile = tile;
      v_head = work.kv_head;
      v_is_pending = true;
      ++num_steps;
    }
  }

  CUTE_DEVICE void run() {
    for (int pass = 0; pass < 2; ++pass) {
      const bool redo = pass == 1;
      if (redo && !smem.redo_list.wait_any()) return;
      for (int round = 0; round * static_cast<int>(gridDim.x) < schedule.num_tiles(); ++round) {
        const int index = TileSchedule::work_index(round, blockIdx.x, gridDim.x);
        if (index >= schedule.num_tiles()) continue;
        const bool is_late = round >= RedoList::kRounds;
        if (redo && (is_late || !smem.redo_list.holds(round))) continue;
        load_row_tile(round, index, redo || is_late);
      }
      load_pending_v();
      tell(RowTile::end(pass));
    }
  }
};

}  // namespace prefill::fa3
