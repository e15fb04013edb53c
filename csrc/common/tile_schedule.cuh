// Which (tile of query rows, head) a work index stands for. Shared by all kernels, host-tested.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/params.h"

namespace prefill {

struct WorkTile {
  int m_tile;
  int head;
  int kv_head;
};

// With a bound on the right, row tiles with the most keys come first, over all heads, so that the
// short ones fill the end. Without one, heads are visited in sections whose K and V fit in the L2
// cache together.
struct TileSchedule {
  int num_m_tiles;
  int num_heads;
  int heads_per_section;
  bool last_rows_first;
  // Divisors with their reciprocals: integer division is slow on a GPU.
  cutlass::FastDivmod section_tiles;
  cutlass::FastDivmod section_heads;
  cutlass::FastDivmod last_section_heads;
  cutlass::FastDivmod group;  // query heads of a KV head

  PREFILL_HOST_DEVICE int num_tiles() const { return num_m_tiles * num_heads; }

  PREFILL_HOST_DEVICE WorkTile tile(int index) const {
    int section, within;
    section_tiles(section, within, index);
    const int first_head = section * heads_per_section;
    const bool is_last = num_heads - first_head <= heads_per_section;
    int m_rank, rank_head;
    (is_last ? last_section_heads : section_heads)(m_rank, rank_head, within);
    const int head = first_head + rank_head;
    return {last_rows_first ? num_m_tiles - 1 - m_rank : m_rank, head, group.div(head)};
  }

  // A persistent grid of `num_blocks` takes its work in rounds, every other round in reverse: the
  // block that got the longest tile of one round gets the shortest of the next.
  PREFILL_HOST_DEVICE static int work_index(int round, int block, int num_blocks) {
    return round * num_blocks + (round % 2 == 0 ? block : num_blocks - 1 - block);
  }

  static TileSchedule make(const PrefillParams& params, int tile_m) {
    constexpr int64_t kL2Share = int64_t{32} << 20;  // of 40 MB on A100, 50 to 60 MB on Hopper
    constexpr int64_t kElementBytes = 2;
    const int64_t kv_head_bytes =
        int64_t{params.kv_len} * (params.head_dim_qk + params.head_dim_vo) * kElementBytes;
    const int64_t kv_heads = kv_head_bytes < kL2Share ? kL2Share / kv_head_bytes : 1;
    const int num_heads = params.num_qo_heads;
    const int group = num_heads / params.num_kv_heads;
    const bool last_rows_first = params.window_right < params.qo_len - 1;
    const bool one_section = last_rows_first || kv_heads >= params.num_kv_heads;
    const int section_heads = one_section ? num_heads : static_cast<int>(kv_heads) * group;
    return of((params.qo_len + tile_m - 1) / tile_m, num_heads, section_heads, group,
              last_rows_first);
  }

  static TileSchedule of(int num_m_tiles, int num_heads, int heads_per_section, int group,
                         bool last_rows_first) {
    const int last_section_heads = (num_heads - 1) % heads_per_section + 1;
    return {num_m_tiles,
            num_heads,
            heads_per_section,
            last_rows_first,
            cutlass::FastDivmod(num_m_tiles * heads_per_section),
            cutlass::FastDivmod(heads_per_section),
            cutlass::FastDivmod(last_section_heads),
            cutlass::FastDivmod(group)};
  }
};

}  // namespace prefill
