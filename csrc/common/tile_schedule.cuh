// Which (tile of query rows, head) a work index stands for. Shared by all kernels, host-tested.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/params.h"

namespace prefill {

struct WorkTile {
  int m_tile;
  int head;
};

// With a bound on the right, row tiles with the most keys come first, over all heads, so that the
// short ones fill the end. Without one, heads are visited in sections whose K and V fit in the L2
// cache together.
struct TileSchedule {
  int num_m_tiles;
  int num_heads;
  int heads_per_section;
  bool last_rows_first;

  PREFILL_HOST_DEVICE int num_tiles() const { return num_m_tiles * num_heads; }

  PREFILL_HOST_DEVICE WorkTile tile(int index) const {
    const int tiles_per_section = num_m_tiles * heads_per_section;
    const int section = index / tiles_per_section;
    const int within = index - section * tiles_per_section;
    const int first_head = section * heads_per_section;
    const int heads_left = num_heads - first_head;
    const int heads = heads_left < heads_per_section ? heads_left : heads_per_section;
    const int m_rank = within / heads;
    return {last_rows_first ? num_m_tiles - 1 - m_rank : m_rank,
            first_head + within - m_rank * heads};
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
    const int64_t section = kv_heads * (params.num_qo_heads / params.num_kv_heads);
    const bool last_rows_first = params.window_right < params.qo_len - 1;
    const bool one_section = last_rows_first || section >= params.num_qo_heads;
    return {(params.qo_len + tile_m - 1) / tile_m, params.num_qo_heads,
            one_section ? params.num_qo_heads : static_cast<int>(section), last_rows_first};
  }
};

}  // namespace prefill
