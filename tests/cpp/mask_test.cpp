// BandMask against naive loops over the rules in params.h.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <vector>

#include "check.h"
#include "common/mask.cuh"
#include "fa3/anchors.cuh"
#include "random.h"

namespace {

using prefill::BandMask;
using prefill::KvTileOrder;
using prefill::KvTileRange;
using prefill::fa3::needs_care;
using prefill::fa3::num_exact_steps;
using prefill::test::Random;

std::ostream& operator<<(std::ostream& stream, const BandMask& mask) {
  return stream << "qo_len " << mask.qo_len << ", kv_len " << mask.kv_len << ", window -"
                << mask.window_left << " +" << mask.window_right;
}

bool sees(const BandMask& mask, int64_t row, int64_t key) {
  const int64_t position = row + mask.kv_len - mask.qo_len;
  return position - mask.window_left <= key && key <= position + mask.window_right;
}

// A row sees exactly the keys of [row_begin, row_end).
void check_rows(const BandMask& mask) {
  for (int row = 0; row < mask.qo_len; ++row) {
    const int begin = mask.row_begin(row);
    const int end = mask.row_end(row);
    CHECK(begin >= 0 && end >= 0 && end <= mask.kv_len, mask << ", row " << row);
    for (int key = 0; key < mask.kv_len; ++key) {
      CHECK_EQ(begin <= key && key < end, sees(mask, row, key),
               mask << ", row " << row << ", key " << key);
    }
  }
}

// Parts of a range follow each other without a gap, and none is longer than another by more than
// one.
void check_parts(const KvTileRange& range, int count, const BandMask& mask) {
  const int tiles = std::max(range.end - range.begin, 0);
  int end = range.begin;
  for (int index = 0; index < count; ++index) {
    const KvTileRange part = range.part(index, count);
    if (range.empty()) {
      CHECK(part.empty(), mask << ": a part of nothing");
      continue;
    }
    const int length = part.end - part.begin;
    CHECK_EQ(part.begin, end, mask << ", part " << index << " of " << count);
    CHECK(length == tiles / count || length == tiles / count + 1, mask << ", part " << index);
    CHECK_EQ(part.full_begin, range.full_begin, mask);
    CHECK_EQ(part.full_end, range.full_end, mask);
    end = part.end;
  }
  if (!range.empty()) CHECK_EQ(end, range.end, mask << ", " << count << " parts");
}

// Rows [first, end) take the KV tiles of their row tile's order, or all but its first one, of which
// they see nothing. Where they go unmasked each of them sees all keys. When one more than the
// masked ones are done, each has seen a key that sees any.
template <int kTileN>
void check_narrowed(const BandMask& mask, const KvTileOrder& order, int first, int end) {
  const KvTileOrder own = mask.narrowed<kTileN>(order, first, end - first);
  const int skipped = order.count - own.count;
  CHECK(skipped == 0 || (skipped == 1 && own.count > 0), mask << ", rows from " << first);
  const auto seen_keys = [&](int row, int tile) {
    int count = 0;
    for (int key = tile * kTileN; key < (tile + 1) * kTileN; ++key) {
      count += key < mask.kv_len && sees(mask, row, key);
    }
    return count;
  };
  for (int row = first; row < std::min(end, mask.qo_len); ++row) {
    if (skipped > 0) CHECK_EQ(seen_keys(row, order.tile(0)), 0, mask << ", row " << row);
    bool sees_any = false, anchored = false;
    for (int index = 0; index < own.count; ++index) {
      const int tile = own.tile(index);
      CHECK_EQ(tile, order.tile(index + skipped), mask << ", rows from " << first);
      const int seen = seen_keys(row, tile);
      if (index >= own.num_masked) {
        CHECK_EQ(seen, kTileN, mask << ", row " << row << ", tile " << tile);
      }
      sees_any = sees_any || seen > 0;
      anchored = anchored || (seen > 0 && index <= own.num_masked);
    }
    CHECK_EQ(anchored, sees_any, mask << ", row " << row);
  }
  // It is skipped wherever the rows that exist do not see it and others come after it.
  const bool exists = first < mask.qo_len;
  if (exists && skipped == 0 && order.count > 1 && order.first < order.end) {
    bool sees_first = false;
    for (int row = first; row < std::min(end, mask.qo_len); ++row) {
      sees_first = sees_first || mask.row_end(row) > order.tile(0) * kTileN;
    }
    CHECK(sees_first, mask << ", rows from " << first);
  }
}

// All KV tiles of a row tile's range come once: those that need masking first, the others in rising
// order. When the exact steps are done, each row has seen a key that sees any: anchors may follow.
template <int kTileM, int kTileN>
void check_order(const BandMask& mask, int first, int part, int num_parts) {
  const KvTileRange whole = mask.kv_tiles(first, kTileM, kTileN);
  check_parts(whole, num_parts, mask);
  const KvTileRange range = whole.part(part, num_parts);
  const KvTileOrder order = range.masked_first<kTileN>();
  CHECK_EQ(order.empty(), range.empty(), mask << ", rows from " << first);
  if (range.empty()) return;
  CHECK_EQ(order.count, range.end - range.begin, mask << ", rows from " << first);
  std::vector<int> place(order.count, -1);
  for (int index = 0; index < order.count; ++index) {
    const int tile = order.tile(index);
    CHECK(range.begin <= tile && tile < range.end, mask << ", rows from " << first);
    CHECK_EQ(range.needs_mask<kTileN>(tile), index < order.num_masked,
             mask << ", rows from " << first << ", tile " << tile << " comes as number " << index);
    if (index > order.num_masked) {
      CHECK_EQ(tile, order.tile(index - 1) + 1, mask << ", rows from " << first);
    }
    place.at(tile - range.begin) = index;
  }
  const KvTileOrder falling = order.falling();
  const bool has_left = order.num_masked > order.end - order.first;
  for (int index = 0; index < order.count; ++index) {
    CHECK_EQ(falling.tile(index), has_left ? order.tile(index) : range.end - 1 - index,
             mask << ", rows from " << first);
  }
  const int num_anchoring = num_exact_steps(order);
  CHECK(order.num_masked <= num_anchoring && num_anchoring <= order.count, mask);
  for (int row = first; row < std::min(first + kTileM, mask.qo_len); ++row) {
    bool sees_any = false, anchored = false;
    for (int key = range.begin * kTileN; key < std::min(range.end * kTileN, mask.kv_len); ++key) {
      if (!sees(mask, row, key)) continue;
      sees_any = true;
      anchored = anchored || place.at(key / kTileN - range.begin) < num_anchoring;
    }
    CHECK_EQ(anchored, sees_any, mask << ", row " << row << " of " << kTileM << " x " << kTileN);
  }
  constexpr int kRows = kTileM > 2 ? kTileM / 3 : 1;  // of a consumer
  for (int row = first; row < first + kTileM; row += kRows) {
    check_narrowed<kTileN>(mask, order, row, std::min(row + kRows, first + kTileM));
    check_narrowed<kTileN>(mask, falling, row, std::min(row + kRows, first + kTileM));
  }
}

// The range of a row tile is exactly the KV tiles that hold a key which some row sees: nothing is
// missed and nothing is computed in vain. A KV tile of it goes unmasked exactly when each row that
// exists sees all kTileN keys, so never where the tile runs past kv_len.
template <int kTileM, int kTileN>
void check_tiles(const BandMask& mask) {
  const int num_tiles = (mask.kv_len + kTileN - 1) / kTileN;
  for (int first = 0; first < mask.qo_len; first += kTileM) {
    const int rows = std::min(kTileM, mask.qo_len - first);
    std::vector<int> pairs(num_tiles);
    for (int row = first; row < first + rows; ++row) {
      for (int key = 0; key < mask.kv_len; ++key) pairs[key / kTileN] += sees(mask, row, key);
    }
    const KvTileRange range = mask.kv_tiles(first, kTileM, kTileN);
    check_order<kTileM, kTileN>(mask, first, 0, 1);
    constexpr int kMostParts = 5;
    const int num_parts = 2 + (first + mask.kv_len) % kMostParts;
    for (int part = 0; part < num_parts; ++part) {
      check_order<kTileM, kTileN>(mask, first, part, num_parts);
    }
    const bool any = std::any_of(pairs.begin(), pairs.end(), [](int count) { return count > 0; });
    CHECK_EQ(range.empty(), !any, mask << ", rows from " << first);
    if (range.empty()) continue;
    CHECK(range.begin >= 0 && range.end <= num_tiles, mask << ", rows from " << first);
    for (int tile = 0; tile < num_tiles; ++tile) {
      const bool inside = range.begin <= tile && tile < range.end;
      CHECK_EQ(inside, pairs[tile] > 0,
               mask << ", rows from " << first << ", tile " << tile << " of " << kTileM << " x "
                    << kTileN);
      if (inside) {
        CHECK_EQ(range.needs_mask<kTileN>(tile), pairs[tile] < rows * kTileN,
                 mask << ", rows from " << first << ", tile " << tile << " of " << kTileM << " x "
                      << kTileN);
      }
    }
  }
}

void check_small_exhaustively() {
  constexpr int kLongest = 9;
  for (int qo_len = 1; qo_len <= kLongest; ++qo_len) {
    for (int kv_len = 1; kv_len <= kLongest; ++kv_len) {
      for (int left = 0; left <= kv_len; ++left) {
        for (int right = 0; right <= qo_len; ++right) {
          const BandMask mask{qo_len, kv_len, left, right};
          check_rows(mask);
          check_tiles<1, 1>(mask);
          check_tiles<1, 4>(mask);
          check_tiles<4, 1>(mask);
          check_tiles<2, 3>(mask);
          check_tiles<5, 2>(mask);
          check_tiles<16, 16>(mask);
        }
      }
    }
  }
}

// A bound that matters, or none.
int random_window(Random& random, int qo_len, int kv_len) {
  switch (random.integer(0, 3)) {
    case 0:
      return qo_len + kv_len;
    case 1:
      return random.integer(0, 3);
    default:
      return random.integer(0, qo_len + kv_len);
  }
}

void check_real_tiles_at_random() {
  Random random(1);
  for (int i = 0; i < 150; ++i) {
    const int qo_len = random.integer(1, 420);
    const int kv_len = random.integer(1, 560);
    const BandMask mask{qo_len, kv_len, random_window(random, qo_len, kv_len),
                        random_window(random, qo_len, kv_len)};
    check_rows(mask);
    check_tiles<64, 64>(mask);
    check_tiles<64, 80>(mask);
    check_tiles<64, 128>(mask);
    check_tiles<128, 64>(mask);
    check_tiles<128, 80>(mask);
    check_tiles<128, 96>(mask);
    check_tiles<128, 128>(mask);
    check_tiles<192, 64>(mask);
    check_tiles<192, 80>(mask);
    check_tiles<192, 128>(mask);
  }
}

// The same bounds in 64 bits.
int64_t wide_begin(const BandMask& mask, int64_t row) {
  return std::max(row + mask.kv_len - mask.qo_len - mask.window_left, int64_t{0});
}

int64_t wide_end(const BandMask& mask, int64_t row) {
  return std::clamp(row + mask.kv_len - mask.qo_len + mask.window_right + 1, int64_t{0},
                    int64_t{mask.kv_len});
}

template <int kTileM, int kTileN>
void check_huge_tile(const BandMask& mask, int row) {
  const int64_t last = std::min(int64_t{row} + kTileM, int64_t{mask.qo_len}) - 1;
  const int64_t key_begin = wide_begin(mask, row);
  const int64_t key_end = wide_end(mask, last);
  const KvTileRange range = mask.kv_tiles(row, kTileM, kTileN);
  CHECK_EQ(range.empty(), key_begin >= key_end, mask << ", rows from " << row);
  if (range.empty()) return;
  CHECK_EQ(range.begin, key_begin / kTileN, mask << ", rows from " << row);
  CHECK_EQ(range.end, (key_end + kTileN - 1) / kTileN, mask << ", rows from " << row);
  const int middle = range.begin + (range.end - range.begin) / 2;
  for (int tile : {range.begin, middle, range.end - 1}) {
    const bool all_seen = wide_begin(mask, last) <= int64_t{tile} * kTileN &&
                          (int64_t{tile} + 1) * kTileN <= wide_end(mask, row);
    CHECK_EQ(range.needs_mask<kTileN>(tile), !all_seen,
             mask << ", rows from " << row << ", tile " << tile);
  }
}

void check_huge() {
  constexpr int kLongest = (1 << 30) - 1;
  const int lengths[] = {1, 2, 1 << 20, 1 << 29, 715827883, kLongest - 1, kLongest};
  for (int qo_len : lengths) {
    for (int kv_len : lengths) {
      const int windows[] = {0, 1, 1 << 20, qo_len - 1, kv_len - 1, qo_len, kv_len};
      for (int left : windows) {
        for (int right : windows) {
          const BandMask mask{qo_len, kv_len, std::min(left, kv_len), std::min(right, qo_len)};
          for (int row : {0, qo_len / 2, qo_len - qo_len / 1024 - 1, qo_len - 1}) {
            CHECK_EQ(mask.row_begin(row), wide_begin(mask, row), mask << ", row " << row);
            CHECK_EQ(mask.row_end(row), wide_end(mask, row), mask << ", row " << row);
            check_huge_tile<64, 64>(mask, row / 64 * 64);
            check_huge_tile<192, 80>(mask, row / 192 * 192);
          }
        }
      }
    }
  }
}

// A thread of a quad holds columns 2 lane and 2 lane + 1 of every 8.
void check_quad_columns(Random& random) {
  for (int i = 0; i < 1000; ++i) {
    const uint32_t keys = random.bits();
    for (int lane = 0; lane < 4; ++lane) {
      uint32_t expected = 0;
      for (int column = 0; column < 8; ++column) {
        const int key = column / 2 * 8 + 2 * lane + column % 2;
        expected |= (keys >> key & 1) << column;
      }
      CHECK_EQ(prefill::quad_columns(keys, lane), expected, "lane " << lane << " of " << keys);
    }
  }
}

// Which row tiles of fa3 keep a running maximum throughout: few keys without a causal bound among
// them, and all whose anchored sums a value scale could make vanish.
void check_care() {
  constexpr int kTileM = 128, kTileN = 64;
  const auto cares = [](int kv_len, bool causal, bool is_custom, bool is_whole, float scale) {
    const BandMask mask{kTileM, kv_len, kv_len, causal ? 0 : kTileM};
    const auto order = mask.kv_tiles(0, kTileM, kTileN).masked_first<kTileN>();
    return needs_care(mask, order, kTileN, is_custom, is_whole, scale);
  };
  for (float scale : {1.f, -1.f, 0x1p-80f}) {
    CHECK(cares(640, false, false, true, scale), "640 keys, full");
    CHECK(!cares(641, false, false, true, scale), "641 keys, full");
    CHECK(!cares(640, true, false, true, scale), "640 keys, causal");
    CHECK(cares(640, true, true, true, scale), "640 keys under a custom mask");
    CHECK(cares(640, true, false, false, scale), "640 keys of a part");
    CHECK(!cares(641, true, false, false, scale), "641 keys of a part");
  }
  for (float scale : {0.f, 0x1p-81f, -0x1p-81f, NAN}) {
    CHECK(cares(9000, false, false, true, scale), "value scale " << scale);
  }
}

}  // namespace

int main() {
  check_small_exhaustively();
  check_care();
  check_real_tiles_at_random();
  check_huge();
  Random random(2);
  check_quad_columns(random);
  return prefill::test::result();
}
