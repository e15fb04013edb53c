// TileSchedule: all work once, in the order it promises.
#include <algorithm>
#include <climits>
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
using prefill::RowMap;
using prefill::SplitKv;
using prefill::TileSchedule;
using prefill::WorkTile;
using prefill::test::Random;

std::ostream& operator<<(std::ostream& stream, const TileSchedule& schedule) {
  return stream << schedule.sections.num_m_tiles << " row tiles, " << schedule.sections.num_heads
                << " heads, " << schedule.sections.heads_per_section << " a section, "
                << schedule.num_blocks << " blocks, " << schedule.num_pair_rounds
                << " rounds of pairs, " << (schedule.late_rows_first ? "late" : "early")
                << " rows first";
}

// Sections one after the other, row tiles in order within a section, heads one after the other
// within a row tile. That leaves one order, in which every (row tile, head) comes once.
void check_sections(const TileSchedule& schedule) {
  const auto& sections = schedule.sections;
  CHECK(sections.heads_per_section >= 1, schedule);
  if (sections.heads_per_section < 1 || schedule.late_rows_first) return;
  int index = 0;
  for (int section = 0; section < sections.num_heads; section += sections.heads_per_section) {
    const int end = std::min(section + sections.heads_per_section, sections.num_heads);
    for (int m_tile = 0; m_tile < sections.num_m_tiles; ++m_tile) {
      for (int head = section; head < end; ++head) {
        const WorkTile work = schedule.tile(index);
        CHECK_EQ(work.m_tile, m_tile, schedule << ", index " << index);
        CHECK_EQ(work.head, head, schedule << ", index " << index);
        ++index;
      }
    }
  }
  CHECK_EQ(schedule.num_tiles(), index, schedule);
}

// Walked as kernels do, every (row tile, head) comes once, or each of its parts.
void check_all_once(const TileSchedule& schedule, int group) {
  const int num_m_tiles = schedule.sections.num_m_tiles;
  const int num_splits = schedule.splits.divisor;
  std::vector<int> visits(schedule.num_tiles());
  std::vector<int> part_visits(schedule.num_in_parts() * num_splits);
  const auto visit = [&](const WorkTile& work, int part_of_all) {
    CHECK_EQ(part_of_all < 0, work.is_whole(), schedule);
    if (!work.is_whole()) {
      CHECK_EQ(part_of_all % num_splits, work.part, schedule);
      ++part_visits.at(part_of_all);
    }
    CHECK(0 <= work.m_tile && work.m_tile < num_m_tiles, schedule << ", tile " << work.m_tile);
    CHECK(0 <= work.head && work.head < schedule.sections.num_heads, schedule);
    CHECK_EQ(work.kv_head, work.head / group, schedule);
    visits.at(work.head * num_m_tiles + work.m_tile) += work.is_whole() ? num_splits : 1;
  };
  if (schedule.num_blocks == 0) {
    for (int index = 0; index < schedule.num_items(); ++index) {
      visit(schedule.tile(index), schedule.part_of_all(index));
    }
  }
  for (int block = 0; block < schedule.num_blocks; ++block) {
    for (int round = 0; round < schedule.num_rounds; ++round) {
      const WorkTile work = schedule.tile(round, block);
      if (work.exists()) visit(work, schedule.part_of_all(round, block));
    }
  }
  for (int visit : visits) CHECK_EQ(visit, num_splits, schedule);
  for (int visit : part_visits) CHECK_EQ(visit, 1, schedule);
}

// Causal, square tiles: pairs are equally long, and in the end no block has worked for longer than
// another by more than the longest row tile that was left after them.
void check_balance(int num_m_tiles, int num_heads, int num_blocks) {
  const TileSchedule schedule =
      TileSchedule::of(num_m_tiles, num_heads, num_heads, 1, true, true, num_blocks);
  const int pair_rounds = schedule.num_pair_rounds;
  int longest = 0, most = 0, least = INT_MAX, first_head = 0, last_head = 0;
  for (int block = 0; block < schedule.num_blocks; ++block) {
    int length = 0;
    for (int round = 0; round < schedule.num_rounds; ++round) {
      const WorkTile work = schedule.tile(round, block);
      if (work.exists()) length += work.m_tile + 1;
      if (work.exists() && round >= pair_rounds) longest = std::max(longest, work.m_tile + 1);
      if (round < pair_rounds && round % 2 == 1) {
        CHECK_EQ(length, (round + 1) / 2 * (num_m_tiles + 1), schedule << ", block " << block);
      }
      if (round == 0 && block == 0) first_head = work.head;
      if (round == 0) last_head = work.head;
    }
    most = std::max(most, length);
    least = std::min(least, length);
  }
  CHECK(most - least <= longest, schedule << ": " << least << " to " << most);
  if (pair_rounds > 0) {  // few heads at a time
    const int head_pairs = num_m_tiles / 2;
    CHECK(last_head - first_head <= (num_blocks + head_pairs - 1) / head_pairs, schedule);
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
  params.window_left = kv_len;
  params.window_right = qo_len;
  return params;
}

int64_t kv_head_bytes(const PrefillParams& params) {
  return int64_t{params.kv_len} * (params.head_dim_qk + params.head_dim_vo) * 2;
}

void check_made(const PrefillParams& params, int tile_m) {
  const TileSchedule schedule = TileSchedule::make(params, tile_m, 132);
  const auto& sections = schedule.sections;
  const int64_t rows = int64_t{sections.num_m_tiles} * tile_m;
  CHECK(params.qo_len <= rows && rows < int64_t{params.qo_len} + tile_m, schedule);
  CHECK_EQ(sections.num_heads, params.num_qo_heads);
  CHECK(sections.heads_per_section >= 1 && sections.heads_per_section <= sections.num_heads,
        schedule);

  const int group = params.num_qo_heads / params.num_kv_heads;
  CHECK_EQ(sections.heads_per_section % group, 0, schedule << ": a group is torn apart");
  constexpr int64_t kSmallestL2 = int64_t{40} << 20;  // A100
  const int64_t bytes = kv_head_bytes(params);
  CHECK(sections.heads_per_section == group ||
            sections.heads_per_section / group * bytes < kSmallestL2,
        schedule << ": a section of " << bytes << " bytes a KV head overflows the L2 cache");
  if (params.num_kv_heads * bytes < kSmallestL2 / 4) {
    CHECK_EQ(sections.heads_per_section, sections.num_heads, schedule << ": sections in vain");
  }
}

// With a block for each tile, no row tile comes after one with fewer KV tiles: of its section,
// where there are several.
void check_longest_first(const PrefillParams& params) {
  constexpr int kTileM = 64, kTileN = 80;
  const TileSchedule schedule = TileSchedule::make(params, kTileM, 0);
  const BandMask mask = BandMask::of(params);
  int section = -1, length = 0;
  for (int index = 0; index < schedule.num_tiles(); ++index) {
    const WorkTile work = schedule.tile(index);
    const auto tiles = mask.kv_tiles(work.m_tile * kTileM, kTileM, kTileN);
    const int work_section =
        schedule.late_rows_first ? 0 : work.head / schedule.sections.heads_per_section;
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
    const TileSchedule schedule = TileSchedule::of(
        random.integer(1, 30), heads, random.integer(1, heads), group, random.integer(0, 1) == 1,
        random.integer(0, 1) == 1, random.integer(0, 40));
    check_sections(schedule);
    check_all_once(schedule, group);
    check_balance(random.integer(1, 30), heads, random.integer(1, 40));

    const int num_m_tiles = random.integer(1, 10), num_tiles = num_m_tiles * heads;
    float memory = 0.f;  // what makes them exist
    SplitKv split{random.integer(1, 9), random.integer(0, num_tiles), &memory, nullptr};
    check_all_once(TileSchedule::of(num_m_tiles, heads, random.integer(1, heads), group,
                                    random.integer(0, 1) == 1, false, random.integer(0, 40), split),
                   group);
  }
  for (int i = 0; i < 2000; ++i) {
    PrefillParams params =
        make_params(random.integer(1, 5000), random.integer(1, 300000), random.integer(1, 12),
                    random.integer(1, 8), 8 * random.integer(1, 32));
    check_made(params, 64 * random.integer(1, 3));
    check_sections(TileSchedule::make(params, 128, 132));
    params.window_right = 0;  // causal
    check_longest_first(params);
    check_all_once(TileSchedule::make(params, 128, 132), params.num_qo_heads / params.num_kv_heads);
    check_sections(TileSchedule::make(params, 128, 132));
    params.window_left = random.integer(0, params.kv_len);  // a window without a right bound
    params.window_right = params.qo_len;
    check_longest_first(params);
  }

  constexpr int kLongest = (1 << 30) - 1;
  check_made(make_params(kLongest, kLongest, 1, 8, 256), 64);  // a KV head of 2^40 bytes
  check_made(make_params(1, kLongest, 8, 1, 8), 192);
  check_made(make_params(kLongest, 1, 8, 1, 8), 192);
  check_made(make_params(1, 1, 1, 1, 8), 128);

  // 8 heads of 20 tokens in row tiles of 16 tokens: 2 for each of 3 KV heads.
  PrefillParams packed = make_params(20, 1000, 3, 8, 128);
  packed.rows = RowMap::of(8);
  CHECK_EQ(TileSchedule::make(packed, 128, 132).num_tiles(), 6);
  CHECK_EQ(TileSchedule::make(packed, 128, 132).tile(5).kv_head, 2);
  return prefill::test::result();
}
