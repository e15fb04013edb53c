// Custom masks of several kinds, and what MaskTiles hold for them by the rules in params.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <vector>

#include "check.h"
#include "common/mask.cuh"
#include "common/mask_tiles.h"
#include "common/params.h"
#include "random.h"

namespace prefill::test {

enum class MaskKind { random, all_true, all_false, triangle, diagonal_blocks, padding, few_holes };

inline constexpr MaskKind kMaskKinds[] = {
    MaskKind::random,          MaskKind::all_true, MaskKind::all_false, MaskKind::triangle,
    MaskKind::diagonal_blocks, MaskKind::padding,  MaskKind::few_holes};

// [qo_len, kv_len] bools, a byte each.
inline std::vector<uint8_t> make_mask(MaskKind kind, Random& random, int qo_len, int kv_len) {
  const int document = std::max(1, kv_len / 3 + 5), padded = kv_len - kv_len / 4;
  const auto sees = [&](int row, int key) -> bool {
    const int position = row + kv_len - qo_len;
    switch (kind) {
      case MaskKind::random:
        return random.bits() & 1;
      case MaskKind::all_true:
        return true;
      case MaskKind::all_false:
        return false;
      case MaskKind::triangle:
        return key <= position;
      case MaskKind::diagonal_blocks:
        return position >= 0 && key / document == position / document;
      case MaskKind::padding:
        return key < padded;
      case MaskKind::few_holes:
        return random.integer(0, 2000) != 0;
    }
    return false;
  };
  std::vector<uint8_t> mask(static_cast<size_t>(qo_len) * kv_len);
  for (int row = 0; row < qo_len; ++row) {
    for (int key = 0; key < kv_len; ++key) mask[int64_t{row} * kv_len + key] = sees(row, key);
  }
  return mask;
}

// The same as a source of either format; what is not the mask's is as random as can be. Rows of
// bools are `gap` bytes apart. The first `lead` bytes of the storage, which ends with the mask, are
// not the mask's.
inline std::vector<uint8_t> store_mask(const std::vector<uint8_t>& mask, MaskFormat format,
                                       Random& random, int kv_len, int lead, int gap) {
  const auto keys = static_cast<int64_t>(mask.size());
  const int64_t qo_len = keys / kv_len;
  const bool packed = format == MaskFormat::bits;
  std::vector<uint8_t> stored(lead + (packed ? (keys + 7) / 8 : keys + (qo_len - 1) * gap));
  for (uint8_t& byte : stored) byte = static_cast<uint8_t>(random.bits());
  for (int64_t i = 0; i < keys; ++i) {
    if (packed) {
      uint8_t& byte = stored[lead + i / 8];
      byte = static_cast<uint8_t>((byte & ~(1u << i % 8)) | unsigned{mask[i]} << i % 8);
    } else {
      stored[lead + i / kv_len * (kv_len + gap) + i % kv_len] = mask[i];
    }
  }
  return stored;
}

struct MaskCase {
  int qo_len;
  int kv_len;
  int window_left;
  int window_right;
  int tile_m;
  int tile_n;
  MaskKind kind;
  MaskFormat format;
  int lead;  // address of the source
  int gap;   // bytes between rows of bools
  RowMap rows = {};

  BandMask band() const { return {qo_len, kv_len, window_left, window_right}; }
  MaskTileCounts counts() const { return MaskTileCounts::of(qo_len, kv_len, rows, tile_m, tile_n); }
  int64_t row_keys() const { return format == MaskFormat::bits ? kv_len : int64_t{kv_len} + gap; }
};

inline std::ostream& operator<<(std::ostream& stream, const MaskCase& test) {
  return stream << test.qo_len << " x " << test.kv_len << ", window -" << test.window_left << " +"
                << test.window_right << ", tiles " << test.tile_m << " x " << test.tile_n
                << ", kind " << static_cast<int>(test.kind)
                << (test.format == MaskFormat::bits ? ", bits" : ", bools") << " from byte "
                << test.lead << ", gap " << test.gap << ", " << test.rows.heads
                << " heads a row tile";
}

// A random case of any kind.
inline MaskCase random_case(Random& random, int longest) {
  constexpr int kTilesM[] = {64, 128, 192}, kTilesN[] = {64, 80, 112, 128, 16, 48};
  MaskCase test{};
  test.qo_len = random.integer(1, longest);
  test.kv_len = random.integer(1, longest);
  const int unbounded = test.qo_len + test.kv_len;
  const auto window = [&] {
    const int choice = random.integer(0, 3);
    return choice < 2 ? unbounded : random.integer(0, choice == 2 ? 3 : unbounded);
  };
  test.window_left = window();
  test.window_right = window();
  test.tile_m = kTilesM[random.integer(0, 2)];
  if (random.integer(0, 1)) test.rows = RowMap::of(random.integer(1, RowMap::kBlock));
  test.tile_n = kTilesN[random.integer(0, 5)];
  test.kind = kMaskKinds[random.integer(0, 6)];
  test.format = random.integer(0, 1) ? MaskFormat::bits : MaskFormat::bools;
  test.lead = random.integer(0, 1) ? 0 : random.integer(0, 17);
  test.gap = random.integer(0, 1) ? 0 : random.integer(0, 40);
  if (random.integer(0, 2) == 0) test.gap = (test.kv_len + 15) / 16 * 16 - test.kv_len;
  return test;
}

// Checks `found`, whose arrays lie on the host, against loops over all rows and keys.
inline void check_mask_tiles(const MaskTiles& found, const std::vector<uint8_t>& mask,
                             const MaskCase& test) {
  const int num_kv_tiles = (test.kv_len + test.tile_n - 1) / test.tile_n;
  CHECK_EQ(found.num_kv_tiles, num_kv_tiles, test);
  const int num_words = (num_kv_tiles + 31) / 32;
  const auto sees = [&](int row, int key) {
    const int position = row + test.kv_len - test.qo_len;
    return key < test.kv_len && mask[int64_t{row} * test.kv_len + key] != 0 &&
           position - test.window_left <= key && key <= position + test.window_right;
  };
  const auto token = [&](int row) { return std::min(test.rows.token(row), test.qo_len - 1); };
  const int tile_tokens = test.rows.tile_tokens(test.tile_m);
  const int num_row_tiles = (test.qo_len + tile_tokens - 1) / tile_tokens;
  for (int row_tile = 0; row_tile < num_row_tiles; ++row_tile) {
    const int first = row_tile * test.tile_m, end = first + test.tile_m;
    for (int tile = 0; tile < 32 * num_words; ++tile) {
      int64_t count = 0;
      for (int row = first; row < end; ++row) {
        for (int c = 0; c < test.tile_n; ++c) count += sees(token(row), tile * test.tile_n + c);
      }
      const bool full = count == int64_t{end - first} * test.tile_n;
      const bool mixed = count > 0 && !full;
      const int64_t word = int64_t{row_tile} * num_words + tile / 32;
      CHECK_EQ(found.mixed[word] >> tile % 32 & 1, uint32_t{mixed},
               test << ", rows from " << first << ", tile " << tile << " of " << num_kv_tiles);
      CHECK_EQ(found.full[word] >> tile % 32 & 1, uint32_t{full},
               test << ", rows from " << first << ", tile " << tile << " of " << num_kv_tiles);
      if (!mixed) continue;
      for (int block = first / 16; block < end / 16; ++block) {
        for (int lane = 0; lane < 32; ++lane) {
          const MaskWords words = found.bits[(int64_t{block} * num_kv_tiles + tile) * 32 + lane];
          for (int half = 0; half < 2; ++half) {
            const int row = token(16 * block + lane / 4 + 8 * half);
            uint32_t expected = 0;
            for (int c = 0; c < test.tile_n / 4; ++c) {
              const int column = 8 * (c / 2) + 2 * (lane % 4) + c % 2;
              expected |= uint32_t{sees(row, tile * test.tile_n + column)} << c;
            }
            CHECK_EQ(words.rows[half], expected,
                     test << ", row " << row << ", tile " << tile << ", lane " << lane);
          }
        }
      }
    }
  }
}

}  // namespace prefill::test
