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
  int head;    // a block of RowMap's heads
  int kv_head;
  int part;  // of its KV tiles; -1 where it is whole

  PREFILL_HOST_DEVICE bool exists() const { return m_tile >= 0; }
  PREFILL_HOST_DEVICE bool is_whole() const { return part < 0; }
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
// Pairs of a late and an early row tile of a head are all as long: the blocks of a persistent grid
// take one each, head after head, so that few heads' K and V are wanted at a time, by many blocks
// at once. What the last rounds of that would take is ordered over all heads instead, late row
// tiles first, so that early ones fill the end.
struct LengthOrder {
  // Some row tiles, late ones first, and all heads from one on of each.
  struct Run {
    int num_tiles;
    int last_m_tile;
    int first_head;
    cutlass::FastDivmod heads;
  };

  int num_m_tiles;
  int num_left;  // tiles
  cutlass::FastDivmod head_pairs;
  Run left[5];

  PREFILL_HOST_DEVICE void pair(int index, bool late, int& m_tile, int& head) const {
    int rank;
    head_pairs(head, rank, index);
    m_tile = late ? num_m_tiles - 1 - rank : rank;
  }

  PREFILL_HOST_DEVICE void tile(int index, int& m_tile, int& head) const {
    int run = 0;
    for (; index >= left[run].num_tiles; ++run) index -= left[run].num_tiles;
    int rank;
    left[run].heads(rank, head, index);
    m_tile = left[run].last_m_tile - rank;
    head += left[run].first_head;
  }

  static LengthOrder of(int num_m_tiles, int num_heads, int num_paired) {
    // Of heads before `partial` all pairs are taken, of that one the outermost `outer`.
    const int pairs = std::max(num_m_tiles / 2, 1);
    const int partial = num_paired / pairs, outer = num_paired % pairs;
    const int middle = num_m_tiles % 2, inner = num_m_tiles / 2 - outer;
    LengthOrder order{
        num_m_tiles, num_m_tiles * num_heads - 2 * num_paired, cutlass::FastDivmod(pairs), {}};
    int m_tile = num_m_tiles - 1, run = 0;
    const auto add = [&](int count, int first_head) {
      const int heads = num_heads - first_head;
      order.left[run++] = {count * heads, m_tile, first_head,
                           cutlass::FastDivmod(std::max(heads, 1))};
      m_tile -= count;
    };
    add(outer, partial + 1);
    add(inner, partial);
    add(middle, 0);
    add(inner, partial);
    add(outer, partial + 1);
    return order;
  }
};

// Row tiles may be done in parts (SplitKv): all of them, or the last in this order, so that blocks
// which would have no whole one left get some.
struct TileSchedule {
  bool late_rows_first;
  int num_blocks;  // of a persistent grid; 0: a block for each tile
  int num_pair_rounds;
  int num_rounds;
  int num_whole;  // row tiles, of those after the pairs
  SectionOrder sections;
  LengthOrder lengths;
  cutlass::FastDivmod group;   // heads of a KV head
  cutlass::FastDivmod splits;  // parts of a row tile

  PREFILL_HOST_DEVICE int num_tiles() const { return sections.num_tiles(); }
  PREFILL_HOST_DEVICE int num_in_parts() const { return num_left() - num_whole; }

  // What a grid without persistent blocks has a block for: row tiles, or parts.
  PREFILL_HOST_DEVICE int num_items() const { return num_whole + num_in_parts() * splits.divisor; }

  // Work of a grid with a block for each item.
  PREFILL_HOST_DEVICE WorkTile tile(int index) const {
    int part = -1;
    if (index >= num_whole) {
      splits(index, part, index - num_whole);
      index += num_whole;
    }
    int m_tile, head;
    if (late_rows_first) {
      lengths.tile(index, m_tile, head);
    } else {
      sections.tile(index, m_tile, head);
    }
    return work_tile(m_tile, head, part);
  }

  // Which part of all row tiles' that is; -1 for a whole row tile.
  PREFILL_HOST_DEVICE int part_of_all(int index) const {
    return index >= num_whole ? index - num_whole : -1;
  }

  // Work of a persistent grid's block in each of its rounds: first both tiles of a pair, round by
  // round, then what is left, every other round in reverse, so that the block which got the longest
  // tile of one round gets the shortest of the next.
  PREFILL_HOST_DEVICE WorkTile tile(int round, int block) const {
    if (round < num_pair_rounds) {
      int m_tile, head;
      lengths.pair(round / 2 * num_blocks + block, round % 2 == 0, m_tile, head);
      return work_tile(m_tile, head, -1);
    }
    const int index = index_of(round, block);
    return index < num_items() ? tile(index) : WorkTile{-1, 0, 0, -1};
  }

  PREFILL_HOST_DEVICE int part_of_all(int round, int block) const {
    return round < num_pair_rounds ? -1 : part_of_all(index_of(round, block));
  }

  static TileSchedule make(const PrefillParams& params, int tile_m, int num_blocks) {
    constexpr int64_t kL2Share = int64_t{32} << 20;  // of 40 MB on A100, 50 to 60 MB on Hopper
    constexpr int64_t kElementBytes = 2;
    const int64_t kv_head_bytes =
        int64_t{params.kv_len} * (params.head_dim_qk + params.head_dim_vo) * kElementBytes;
    const int64_t kv_heads = std::clamp<int64_t>(kL2Share / kv_head_bytes, 1, params.num_kv_heads);
    const int num_heads = params.num_qo_heads / params.rows.heads;
    const int group = num_heads / params.num_kv_heads;
    const int tile_tokens = params.rows.tile_tokens(tile_m);
    // A bound on the left makes late row tiles as long as each other, and pairs not.
    const bool pairs = params.window_left >= params.kv_len - 1 && params.qo_len <= params.kv_len;
    // Custom masks are likely to be causal ones with exceptions.
    const bool is_causal = params.window_right < params.qo_len - 1 || params.mask.mixed != nullptr;
    return of((params.qo_len + tile_tokens - 1) / tile_tokens, num_heads,
              static_cast<int>(kv_heads) * group, group, is_causal, pairs && !params.split.exists(),
              num_blocks, params.split);
  }

  static TileSchedule of(int num_m_tiles, int num_heads, int heads_per_section, int group,
                         bool late_rows_first, bool pairs, int num_blocks,
                         const SplitKv& split = {}) {
    const int num_tiles = num_m_tiles * num_heads;
    const int num_in_parts = split.exists() ? num_tiles - split.num_whole : 0;
    const int num_items = num_tiles + num_in_parts * (split.num_splits - 1);
    num_blocks = std::min(num_blocks, num_items);
    // Of the rounds, so many are left unpaired that the last of them are short.
    constexpr int kUnpaired = 2;
    const bool is_paired = late_rows_first && pairs && num_blocks > 0;
    const int pairs_a_block =
        is_paired ? std::max(num_m_tiles / 2 * num_heads / num_blocks - kUnpaired, 0) : 0;
    const int num_paired = pairs_a_block * num_blocks;
    const int num_left_rounds =
        num_blocks > 0 ? (num_items - 2 * num_paired + num_blocks - 1) / num_blocks : 1;
    return {late_rows_first,
            num_blocks,
            2 * pairs_a_block,
            2 * pairs_a_block + num_left_rounds,
            num_tiles - 2 * num_paired - num_in_parts,
            SectionOrder::of(num_m_tiles, num_heads, heads_per_section),
            LengthOrder::of(num_m_tiles, num_heads, num_paired),
            cutlass::FastDivmod(group),
            cutlass::FastDivmod(split.num_splits)};
  }

 private:
  PREFILL_HOST_DEVICE int num_left() const {
    return late_rows_first ? lengths.num_left : num_tiles();
  }
  // After the pairs.
  PREFILL_HOST_DEVICE int index_of(int round, int block) const {
    round -= num_pair_rounds;
    return round * num_blocks + (round % 2 == 0 ? block : num_blocks - 1 - block);
  }
  PREFILL_HOST_DEVICE WorkTile work_tile(int m_tile, int head, int part) const {
    return {m_tile, head, group.div(head), part};
  }
};

}  // namespace prefill
