// The producer: one thread that keeps shared memory filled by TMA.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/mask_walk.cuh"
#include "fa3/anchors.cuh"
#include "fa3/tensor_maps.cuh"
#include "fa3/traits.cuh"
#include "fa3/work_list.cuh"

namespace prefill::fa3 {

// Loads a (kRows, kCols) tile of one head, box of kBox columns by box.
template <int kRows, int kCols, int kBox, class T>
CUTE_DEVICE void load_tile(CUtensorMap const& map, T* tile,
                           cutlass::arch::ClusterTransactionBarrier& full, TMA::CacheHintSm90 hint,
                           int row, int head, int first_column = 0) {
  constexpr int kBytes = kRows * kCols * static_cast<int>(sizeof(T));
  compiler_fence();
  full.arrive_and_expect_tx(kBytes);
  CUTE_UNROLL
  for (int column = 0; column < kCols; column += kBox) {
    SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(hint),
                           tile + kRows * column, first_column + column, row, head);
  }
}

template <class Traits>
struct Producer {
  // A row tile of the schedule.
  struct Work {
    int round;
    WorkTile tile;
    KvTileOrder order;                      // under a custom mask, bounds and counts alone
    KvTileWalk<!Traits::kHasAnchors> walk;  // instead

    CUTE_DEVICE RowTileMask mask_of(MaskTiles const& mask) const {
      return RowTileMask::of(mask, tile.m_tile, order.first, order.end);
    }
    CUTE_DEVICE int first_row() const { return tile.m_tile * Traits::kM; }
  };

  typename Traits::SharedStorage& smem;
  PrefillParams const& params;
  TensorMaps const& maps;
  TileSchedule const& schedule;
  BandMask const& mask;
  const bool has_per_head;  // PrefillParams::has_per_head, which is too long to ask each time
  bool redo = false;
  int round = 0;           // of the schedule, to be looked at next
  uint32_t num_rows = 0;   // row tiles told
  uint32_t num_steps = 0;  // KV tiles whose K has been loaded; V lags one behind
  int v_tile = -1;         // whose V is still to be loaded; -1: none
  int v_head = 0;

  CUTE_DEVICE void load_k(int tile, int kv_head) {
    const uint32_t stage = num_steps % Traits::kStages;
    smem.k_ring.wait_empty(num_steps);
    if constexpr (Traits::kTakesMasks) smem.kv_tiles[num_steps % (2 * Traits::kStages)] = tile;
    load_tile<Traits::kN, Traits::Dims::kQk, Traits::kColumns>(
        maps.k, smem.k[stage], smem.k_ring.full[stage], TMA::CacheHintSm90::EVICT_LAST,
        tile * Traits::kN, kv_head);
  }

  CUTE_DEVICE void load_q(typename Traits::T* rows, cutlass::arch::ClusterTransactionBarrier& full,
                          int token, int head) const {
    constexpr int kRowBytes = Traits::Dims::kQk * static_cast<int>(sizeof(typename Traits::T));
    compiler_fence();
    full.arrive_and_expect_tx(params.rows.rows() * kRowBytes);
    CUTE_UNROLL
    for (int column = 0; column < Traits::Dims::kQk; column += Traits::kColumns) {
      SM90_TMA_LOAD_4D::copy(&maps.q, reinterpret_cast<uint64_t*>(&full),
                             static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_FIRST),
                             rows + kWarpgroupRows * column, column, 0, token, head);
    }
  }

  // V of the KV tile whose K was loaded last.
  CUTE_DEVICE void load_pending_v() {
    if (v_tile < 0) return;
    const uint32_t stage = (num_steps - 1) % Traits::kStages;
    smem.v_ring.wait_empty(num_steps - 1);
    auto& full = smem.v_ring.full[stage];
    constexpr auto kHint = TMA::CacheHintSm90::EVICT_LAST;
    if constexpr (Traits::kIsFloat8) {
      load_tile<Traits::Dims::kVo, Traits::kN, Traits::kColumnsV>(
          maps.v, smem.v[stage], full, kHint, 0, v_head, v_tile * Traits::kN);
    } else {
      load_tile<Traits::kN, Traits::Dims::kVo, Traits::kColumnsV>(
          maps.v, smem.v[stage], full, kHint, v_tile * Traits::kN, v_head);
    }
    v_tile = -1;
  }

  // Late rounds have no place on the redo list: they are done with care at once.
  CUTE_DEVICE static bool is_late(int round) { return round >= RedoList::kRounds; }

  // For all ptxas knows, another one: so that sums with it are not kept throughout.
  CUTE_DEVICE BandMask new_band() const {
    BandMask band = mask;
    asm volatile("" : "+r"(band.window_left), "+r"(band.qo_len));
    return band;
  }

  CUTE_DEVICE Work next_work() {
    for (; round < schedule.num_rounds; ++round) {
      if (redo && (is_late(round) || !smem.redo_list.holds(round))) continue;
      const WorkTile tile = schedule.tile(round, blockIdx.x);
      if (!tile.exists()) continue;
      Work work{round++, tile, {}, {}};
      const int tile_tokens = params.rows.tile_tokens(Traits::kM);
      const BandMask band = new_band();
      KvTileRange kv_tiles = band.kv_tiles(tile.m_tile * tile_tokens, tile_tokens, Traits::kN);
      if (!tile.is_whole()) kv_tiles = kv_tiles.part(tile.part, params.split.num_splits);
      if (has_custom_mask()) {
        wait_for_inputs();
        work.order = {kv_tiles.begin, kv_tiles.end, 0, 0};
        const RowTileMask::Counts counts = work.mask_of(params.mask).counts();
        work.order.num_masked = counts.mixed;
        work.order.count = counts.mixed + counts.full;
      } else {
        work.order = kv_tiles.template masked_first<Traits::kN>();
        // The lowest keys, which take much of a row where they are attention sinks, come first as
        // anchors alone: what follows the largest weight so far is rounded relative to it.
        if constexpr (!Traits::kHasAnchors) work.order = work.order.falling();
      }
      return work;
    }
    return {round, {-1, 0, 0, -1}, {0, 0, 0, 0}, {}};
  }

  CUTE_DEVICE bool has_custom_mask() const {
    return Traits::kTakesMasks && params.mask.mixed != nullptr;
  }

  // The kernel before has ended, and what it wrote is there, after this wait. All that can be done
  // before comes before, as the first look at arguments takes a microsecond.
  CUTE_DEVICE void wait_for_inputs() const {
    const bool has_waited = num_rows > 0;
    if (!has_waited) asm volatile("griddepcontrol.wait;" ::: "memory");
  }

  // Of the steps in turn.
  CUTE_DEVICE int next_tile(Work& work, int step) const {
    return has_custom_mask() ? work.walk.next(work.mask_of(params.mask)) : work.order.tile(step);
  }

  CUTE_DEVICE RowTile row_tile(Work const& work) const {
    WorkTile const& tile = work.tile;
    if (!tile.exists()) return RowTile::end(redo);
    if (has_per_head) wait_for_inputs();
    LogitTransform transform;
    if constexpr (Traits::kTransforms) {
      transform = LogitTransform::of(params, tile.head, tile.kv_head);
    } else {
      transform = LogitTransform::of_scale(logit_scale(params, tile.head, tile.kv_head));
    }
    // The sink of parts joins where they are merged.
    const float sink = tile.is_whole() ? sink_logit(params, tile.head) : -INFINITY;
    const float v_scale = value_scale(params, tile.kv_head);
    KvTileOrder const& order = work.order;
    // A scale that is not positive is applied in steps with care alone.
    const bool is_scaled = !Traits::kTransforms && !transform.is_idle();
    const bool is_careful =
        !Traits::kHasAnchors || redo || is_late(work.round) || is_scaled ||
        needs_care(mask, order, Traits::kN, has_custom_mask(), tile.is_whole(), v_scale);
    return {work.round, tile.head, work.first_row(), -1, transform, sink, v_scale, is_careful, 0, 0,
            order,      false};
  }

  // Makes of a row tile what one consumer does of it.
  CUTE_DEVICE void narrow(RowTile& rows, int consumer) const {
    rows.first_row += consumer * kWarpgroupRows;
    KvTileOrder& order = rows.order;
    if (!has_custom_mask()) {
      const KvTileOrder own = new_band().template narrowed<Traits::kN>(
          order, params.rows.first_token(rows.first_row), params.rows.tile_tokens(kWarpgroupRows));
      rows.skips_first = own.count < order.count;
      order = own;
    }
    // Plain kernels apply a scale where they mask.
    if (!Traits::kTakesMasks && !rows.transform.is_idle()) order.num_masked = order.count;
    // Others mask in exact steps too, which plain kernels keep free of it.
    rows.num_first = Traits::kTakesMasks ? 1 : max(order.num_masked, 1);
    rows.num_exact = rows.is_careful ? order.count : num_exact_steps(order);
  }

  // For consumers that skip the first KV tile of the rows told last: in its first step K of it, in
  // the second, when it has been loaded, V.
  CUTE_DEVICE void release_skipped(int step) {
    for (auto const& consumer : smem.consumers) {
      if (!consumer.rows[(num_rows - 1) % Traits::kRowTiles].skips_first) continue;
      if (step == 0) smem.k_ring.release_for(kWarpgroupWarps, num_steps);
      if (step == 1) smem.v_ring.release_for(kWarpgroupWarps, num_steps - 1);
    }
  }

  // Tells a consumer of its rows, when it has a place for their Q.
  CUTE_DEVICE void tell(RowTile const& rows, int consumer) const {
    smem.consumers[consumer].q_ring.wait_empty(num_rows);
    auto& told = smem.consumers[consumer].rows[num_rows % Traits::kRowTiles];
    told = rows;
    narrow(told, consumer);
  }

  // Loads Q for the rows that a consumer has been told of, where they see any key.
  CUTE_DEVICE void ask(RowTile const& rows, int index) const {
    auto& consumer = smem.consumers[index];
    auto& full = consumer.q_ring.full[num_rows % Traits::kQStages];
    if (rows.order.empty()) {
      compiler_fence();
      full.arrive();
    } else {
      const int first_row = consumer.rows[num_rows % Traits::kRowTiles].first_row;
      load_q(consumer.q[num_rows % Traits::kQStages], full, params.rows.first_token(first_row),
             rows.head);
    }
  }

  // Tells all consumers of their rows: in plain kernels, of the very first before the kernel before
  // has ended (others have no registers for it).
  CUTE_DEVICE void tell_all(RowTile rows) {
    rows.part = schedule.part_of_all(rows.round, blockIdx.x);
    const bool is_early = !Traits::kTakesMasks && num_rows == 0;
    if (!is_early) wait_for_inputs();  // also where there is no Q: consumers write
#pragma unroll 1
    for (int i = 0; i < Traits::kWarpgroups; ++i) {
      tell(rows, i);
      if (!is_early) ask(rows, i);
    }
    if (is_early) {
      wait_for_inputs();
#pragma unroll 1
      for (int i = 0; i < Traits::kWarpgroups; ++i) ask(rows, i);
    }
    ++num_rows;
  }

  // All row tiles of a pass, and its end. Loads are in the order of use: V one KV tile behind K,
  // across row tiles too. Consumers are told of their next rows, and Q is asked for, as early as
  // there is a place for it: with one place when they need it, else in the course of the row tile
  // before.
  CUTE_DEVICE void load_all() {
    // By then V of the rows before is done with, as V of this row tile has been loaded in its
    // place.
    constexpr int kAhead = Traits::kStages;
    static_assert(kAhead >= 2, "release_skipped takes the rows told last for those of the step");
    Work work = next_work();
    bool is_told = false;
    while (true) {
      const int count = work.order.count;
      Work next{};
      bool next_is_told = false;
      for (int step = 0; step == 0 || step < count; ++step) {
        const int tile = count > 0 ? next_tile(work, step) : 0;
        bool tells = step == 0 && !is_told;
        // K of the very first after telling, which waits for the kernel before.
        const bool k_is_last = num_rows == 0;
        if (count > 0 && !k_is_last) load_k(tile, work.tile.kv_head);
        load_pending_v();  // where there is no K to load, consumers finish what they have
        Work news = work;
        if (Traits::kQStages > 1 && step == kAhead) {
          news = next = next_work();
          tells = next_is_told = true;
        }
        if (tells) tell_all(row_tile(news));
        if (count > 0 && k_is_last) load_k(tile, work.tile.kv_head);
        if (step < 2) release_skipped(step);
        if (count == 0) break;
        v_tile = tile;
        v_head = work.tile.kv_head;
        ++num_steps;
      }
      if (!work.tile.exists()) break;
      if (!next_is_told) next = next_work();
      work = next;
      is_told = next_is_told;
    }
  }

  CUTE_DEVICE void run() {
    while (true) {
      load_all();
      if (redo || !smem.redo_list.wait_any()) break;
      redo = true;
      round = 0;
    }
  }
};

}  // namespace prefill::fa3
