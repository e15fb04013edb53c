// Which (tile of query rows, head) a block works on, and when. Shared by all kernels, host-tested.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"
#include "common/params.h"

namespace prefill {

struct WorkTile {
  int m_tile;  // -1: none
  int head;
  int kv_head;

  PREFILL_HOST_DEVICE bool exists() const { return m_tile >= 0; }
};

// Without a bound on the right all row tiles are about as long, and heads are visited in sections
// whose K and V fit in the L2 cache together.
struct SectionOrder {
  int num_m_tiles;
  int num_heads;
  int heads_per_section;
  // Divisors with their reciprocals: integer division is slow on a GPU.
  cutlass::FastDivmod section_tiles;
  cutlass::FastDivmod section_heads;
  cutlass::FastDivmod last_section_heads;

  PREFILL_HOST_DEVICE int num_tiles() const { return num_m_tiles * num_heads; }

  PREFILL_HOST_DEVICE void tile(int index, int& m_tile, int& head) const {
    int section, within;
    section_tiles(section, within, index);
    const int first_head = section * heads_per_section;
    const bool is_last = num_heads - first_head <= heads_per_section;
    (is_last ? last_section_heads : section_heads)(m_tile, head, within);
    head += first_head;
  }

  static SectionOrder of(int num_m_tiles, int num_heads, int heads_per_section) {
    const int last_section_heads = (num_heads - 1) % heads_per_section + 1;
    return {num_m_tiles,
            num_heads,
            heads_per_section,
            cutlass::FastDivmod(num_m_tiles * heads_per_section),
            cutlass::FastDivmod(heads_per_section),
            cutlass::FastDivmod(last_section_heads)};
  }
};

// With a bound on the right, late row tiles have the most keys.
//
// Pairs of a late and an early row tile of a head (or the one in the middle) are all as long: the blocks of a persistent grid
// take one each, head after head, so that few heads' K and V are wanted at a time, by many blocks at
// once. What one or two rounds of that would leave is ordered over all of its heads, late row tiles
// first, so that early ones fill the end.
struct LengthOrder {
  int num_m_tiles;
  int num_paired;     // pairs that are taken as such
  int partial_head;   // its outermost `partial_pairs` pairs are taken, as all those of heads before
  int partial_pairs;
  int num_left;       // tiles
  int num_outer;      // those before the first of partial_head
  cutlass::FastDivmod head_pairs;
  cutlass::FastDivmod outer_heads;  // after partial_head
  cutlass::FastDivmod inner_heads;  // from partial_head on

  PREFILL_HOST_DEVICE void pair(int index, bool late, int& m_tile, int& head) const {
    int rank;
    head_pairs(head, rank, index);
    const int late_tile = num_m_tiles - 1 - rank;
    m_tile = late ? late_tile : rank < late_tile ? rank : -1;
  }

  PREFILL_HOST_DEVICE void tile(int index, int& m_tile, int& head) const {
    const int num_inner = num_left - 2 * num_outer;
    const bool is_inner = index >= num_outer && index < num_outer + num_inner;
    int rank;
    if (is_inner) {
      inner_heads(rank, head, index - num_outer);
      rank += partial_pairs;
      head += partial_head;
    } else {
      const bool is_early = index >= num_outer;
      outer_heads(rank, head, is_early ? index - num_inner : index);
      if (is_early) rank += num_m_tiles - 2 * partial_pairs;
      head += partial_head + 1;
    }
    m_tile = num_m_tiles - 1 - rank;
  }

  static LengthOrder of(int num_m_tiles, int num_heads, int num_paired) {
    const int head_pairs = (num_m_tiles + 1) / 2;
    const int partial_head = num_paired / head_pairs, partial_pairs = num_paired % head_pairs;
    const int inner_heads = num_heads - partial_head, outer_heads = inner_heads - 1;
    const int num_outer = partial_pairs * outer_heads;
    return {num_m_tiles,
            num_paired,
            partial_head,
            partial_pairs,
            2 * num_outer + (num_m_tiles - 2 * partial_pairs) * inner_heads,
            num_outer,
            cutlass::FastDivmod(head_pairs),
            cutlass::FastDivmod(std::max(outer_heads, 1)),
            cutlass::FastDivmod(std::max(inner_heads, 1))};
  }
};

struct TileSchedule {
  bool late_rows_first;
  int num_blocks;  // of a persistent grid; 0: a block for each tile
  SectionOrder sections;
  LengthOrder lengths;
  cutlass::FastDivmod group;  // query heads of a KV head

  PREFILL_HOST_DEVICE int num_tiles() const { return sections.num_tiles(); }

  // Work of a grid with a block for each tile.
  PREFILL_HOST_DEVICE WorkTile tile(int index) const {
    int m_tile, head;
    if (late_rows_first) {
      lengths.tile(index, m_tile, head);
    } else {
      sections.tile(index, m_tile, head);
    }
    return work_tile(m_tile, head);
  }

  // Work of a persistent grid's block in each of its rounds: first both tiles of a pair, round by
  // round, then what is left, every other round in reverse, so that the block which got the longest
  // tile of one round gets the shortest of the next.
  PREFILL_HOST_DEVICE int num_rounds() const {
    return num_pair_rounds() + (num_left() + num_blocks - 1) / num_blocks;
  }
  PREFILL_HOST_DEVICE WorkTile tile(int round, int block) const {
    if (round < num_pair_rounds()) {
      int m_tile, head;
      lengths.pair(round / 2 * num_blocks + block, round % 2 == 0, m_tile, head);
      return work_tile(m_tile, head);
    }
    round -= num_pair_rounds();
    const int index = round * num_blocks + (round % 2 == 0 ? block : num_blocks - 1 - block);
    return index < num_left() ? tile(index) : WorkTile{-1, 0, 0};
  }

  static TileSchedule make(const PrefillParams& params, int tile_m, int num_blocks) {
    constexpr int64_t kL2Share = int64_t{32} << 20;  // of 40 MB on A100, 50 to 60 MB on Hopper
    constexpr int64_t kElementBytes = 2;
    const int64_t kv_head_bytes =
        int64_t{params.kv_len} * (params.head_dim_qk + params.head_dim_vo) * kElementBytes;
    const int64_t kv_heads = std::clamp<int64_t>(kL2Share / kv_head_bytes, 1, params.num_kv_heads);
    const int group = params.num_qo_heads / params.num_kv_heads;
    // A bound on the left makes late row tiles as long as each other, and pairs not.
    const bool pairs = params.window_left >= params.kv_len - 1 && params.qo_len <= params.kv_len;
    return of((params.qo_len + tile_m - 1) / tile_m, params.num_qo_heads,
              static_cast<int>(kv_heads) * group, group, params.window_right < params.qo_len - 1,
              pairs, num_blocks);
  }

  static TileSchedule of(int num_m_tiles, int num_heads, int heads_per_section, int group,
                         bool late_rows_first, bool pairs, int num_blocks) {
    num_blocks = std::min(num_blocks, num_m_tiles * num_heads);
    const int num_pairs = (num_m_tiles + 1) / 2 * num_heads;
    const int num_paired = late_rows_first && pairs && num_blocks > 0
                               ? std::max(num_pairs / num_blocks - 1, 0) * num_blocks
                               : 0;
    return {late_rows_first, num_blocks,
            SectionOrder::of(num_m_tiles, num_heads, heads_per_section),
            LengthOrder::of(num_m_tiles, num_heads, num_paired), cutlass::FastDivmod(group)};
  }

 private:
  PREFILL_HOST_DEVICE int num_pair_rounds() const {
    return num_blocks == 0 ? 0 : 2 * (lengths.num_paired / num_blocks);
  }
  PREFILL_HOST_DEVICE int num_left() const {
    return late_rows_first ? lengths.num_left : num_tiles();
  }
  PREFILL_HOST_DEVICE WorkTile work_tile(int m_tile, int head) const {
    return {m_tile, head, group.div(head)};
  }
};

}  // namespace prefill
