// TileSchedule: all work once, in the order it promises.
#include <cstdint>
#include <ostream>
#include <vector>

#include "check.h"
#include "common/mask.cuh"
#include "common/tile_schedule.cuh"
#include "random.h"

namespace {

using prefill::BandMask;
using prefill::PrefillParams;
using prefill::TileSchedule;
using prefill::WorkTile;
using prefill::test::Random;

std::ostream& operator<<(std::ostream& stream, const TileSchedule& schedule) {
  return stream << schedule.num_m_tiles << " row tiles, " << schedule.num_heads << " heads, "
                << schedule.heads_per_section << " a section, "
                << (schedule.last_rows_first ? "last" : "first") << " rows first";
}

// Sections one after the other, row tiles from one end within a section, heads one after the other
// within a row tile. That leaves one order, in which every (row tile, head) comes once.
void check_order(const TileSchedule& schedule, int group) {
  CHECK(schedule.heads_per_section >= 1, schedule);
  if (schedule.heads_per_section < 1) return;
  int index = 0;
  for (int section = 0; section < schedule.num_heads; section += schedule.heads_per_section) {
    for (int rank = 0; rank < schedule.num_m_tiles; ++rank) {
      const int m_tile = schedule.last_rows_first ? schedule.num_m_tiles - 1 - rank : rank;
      for (int head = section;
           head < section + schedule.heads_per_section && head < schedule.num_heads; ++head) {
        const WorkTile work = schedule.tile(index);
        CHECK_EQ(work.m_tile, m_tile, schedule << ", index " << index);
        CHECK_EQ(work.head, head, schedule << ", index " << index);
        CHECK_EQ(work.kv_head, head / group, schedule << ", index " << index);
        ++index;
      }
    }
  }
  CHECK_EQ(schedule.num_tiles(), index, schedule);
}

// The rounds of a persistent grid, walked as kernels do: all indices below num_tiles come once.
void check_rounds(int num_tiles, int num_blocks) {
  std::vector<int> visits(num_tiles);
  for (int block = 0; block < num_blocks; ++block) {
    for (int round = 0; round * num_blocks < num_tiles; ++round) {
      const int index = TileSchedule::work_index(round, block, num_blocks);
      CHECK(index / num_blocks == round, index << " in round " << round << " of " << num_blocks);
      if (index < num_tiles) ++visits[index];
    }
    // First of one round, last of the next: two rounds weigh the same for all blocks.
    CHECK_EQ(TileSchedule::work_index(0, block, num_blocks) +
                 TileSchedule::work_index(1, block, num_blocks),
             2 * num_blocks - 1);
  }
  for (int index = 0; index < num_tiles; ++index) {
    CHECK_EQ(visits[index], 1, "index " << index << " of " << num_tiles << " in " << num_blocks);
  }
}

PrefillParams make_params(int qo_len, int kv_len, int num_kv_heads, int group, int head_dim) {
  PrefillParams params{};
  params.qo_len = qo_len;
  params.kv_len = kv_len;
  params.num_qo_heads = num_kv_heads * group;
  params.num_kv_heads = num_kv_heads;
  params.head_dim_qk = head_dim;
  params.head_dim_vo = head_dim;
  params.window_left = qo_len + kv_len;
  params.window_right = qo_len + kv_len;
  return params;
}

int64_t kv_head_bytes(const PrefillParams& params) {
  return int64_t{params.kv_len} * (params.head_dim_qk + params.head_dim_vo) * 2;
}

void check_made(const PrefillParams& params, int tile_m) {
  const TileSchedule schedule = TileSchedule::make(params, tile_m);
  const int64_t rows = int64_t{schedule.num_m_tiles} * tile_m;
  CHECK(params.qo_len <= rows && rows < int64_t{params.qo_len} + tile_m, schedule);
  CHECK_EQ(schedule.num_heads, params.num_qo_heads);
  CHECK(schedule.heads_per_section >= 1 && schedule.heads_per_section <= schedule.num_heads,
        schedule);

  const int group = params.num_qo_heads / params.num_kv_heads;
  CHECK_EQ(schedule.heads_per_section % group, 0, schedule << ": a group is torn apart");
  constexpr int64_t kSmallestL2 = int64_t{40} << 20;  // A100
  const int64_t bytes = kv_head_bytes(params);
  CHECK(schedule.heads_per_section == group ||
            schedule.heads_per_section / group * bytes < kSmallestL2,
        schedule << ": a section of " << bytes << " bytes a KV head overflows the L2 cache");
  if (params.num_kv_heads * bytes < kSmallestL2 / 4) {
    CHECK_EQ(schedule.heads_per_section, schedule.num_heads, schedule << ": sections in vain");
  }
}

// Within a section no row tile comes after one with fewer KV tiles.
void check_longest_first(const PrefillParams& params) {
  constexpr int kTileM = 64, kTileN = 80;
  const TileSchedule schedule = TileSchedule::make(params, kTileM);
  const BandMask mask = BandMask::of(params);
  int section = -1, length = 0;
  for (int index = 0; index < schedule.num_tiles(); ++index) {
    const WorkTile work = schedule.tile(index);
    const auto tiles = mask.kv_tiles<kTileM, kTileN>(work.m_tile * kTileM);
    const int work_section = work.head / schedule.heads_per_section;
    CHECK(work_section != section || tiles.end - tiles.begin <= length,
          schedule << ", index " << index);
    section = work_section;
    length = tiles.end - tiles.begin;
  }
}

}  // namespace

int main() {
  Random random(2);
  for (int i = 0; i < 2000; ++i) {
    const int group = random.integer(1, 4);
    const int heads = group * random.integer(1, 12);
    check_order(TileSchedule::of(random.integer(1, 30), heads, random.integer(1, heads), group,
                                 random.integer(0, 1) == 1),
                group);
    check_rounds(random.integer(1, 700), random.integer(1, 150));
  }
  for (int i = 0; i < 2000; ++i) {
    PrefillParams params =
        make_params(random.integer(1, 5000), random.integer(1, 300000), random.integer(1, 12),
                    random.integer(1, 8), 8 * random.integer(1, 32));
    check_made(params, 64 * random.integer(1, 3));
    check_order(TileSchedule::make(params, 128), params.num_qo_heads / params.num_kv_heads);
    params.window_right = 0;  // causal
    check_longest_first(params);
    CHECK_EQ(TileSchedule::make(params, 64).heads_per_section, params.num_qo_heads);
    check_order(TileSchedule::make(params, 128), params.num_qo_heads / params.num_kv_heads);
    params.window_left = random.integer(0, params.kv_len);  // a window without a right bound
    params.window_right = params.qo_len + params.kv_len;
    check_longest_first(params);
  }

  constexpr int kLongest = (1 << 30) - 1;
  check_made(make_params(kLongest, kLongest, 1, 8, 256), 64);  // a KV head of 2^40 bytes
  check_made(make_params(1, kLongest, 8, 1, 8), 192);
  check_made(make_params(kLongest, 1, 8, 1, 8), 192);
  check_made(make_params(1, 1, 1, 1, 8), 128);
  return prefill::test::result();
}
