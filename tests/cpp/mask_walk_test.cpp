// The order of a row tile's KV tiles under a custom mask, against a plain list of classes.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "common/mask_walk.cuh"
#include "random.h"

namespace {

using prefill::KvTileWalk;
using prefill::MaskTiles;
using prefill::RowTileMask;
using prefill::test::Random;

enum class Class { empty, mixed, full };

struct Mask {
  int num_row_tiles;
  int num_kv_tiles;
  std::vector<Class> classes;  // [num_row_tiles, num_kv_tiles]
  std::vector<uint32_t> mixed;
  std::vector<uint32_t> full;

  // Of a hundred KV tiles about so many are needed, and about half of those mixed.
  static Mask random(Random& random, int num_row_tiles, int num_kv_tiles, uint32_t needed) {
    const int words = (num_kv_tiles + 31) / 32;
    Mask mask{num_row_tiles, num_kv_tiles, {}, {}, {}};
    mask.mixed.resize(num_row_tiles * words);
    mask.full.resize(num_row_tiles * words);
    for (int row_tile = 0; row_tile < num_row_tiles; ++row_tile) {
      for (int tile = 0; tile < num_kv_tiles; ++tile) {
        const bool is_needed = random.bits() % 100 < needed, is_mixed = random.bits() % 2 == 0;
        mask.classes.push_back(!is_needed ? Class::empty : is_mixed ? Class::mixed : Class::full);
        auto& bitmap = is_mixed ? mask.mixed : mask.full;
        bitmap[row_tile * words + tile / 32] |= uint32_t{is_needed} << tile % 32;
      }
    }
    return mask;
  }

  MaskTiles tiles() const { return {mixed.data(), full.data(), nullptr, num_kv_tiles}; }
  Class of(int row_tile, int tile) const { return classes[row_tile * num_kv_tiles + tile]; }
};

// KV tiles [begin, end) of a row tile.
void check_row_tile(const Mask& mask, int row_tile, int begin, int end) {
  const RowTileMask actual = RowTileMask::of(mask.tiles(), row_tile, begin, end);
  std::vector<int> mixed, full;
  int last = -1;
  for (int tile = begin; tile < end; ++tile) {
    const Class kind = mask.of(row_tile, tile);
    CHECK_EQ(actual.is_mixed(tile), kind == Class::mixed, "row tile " << row_tile << ", " << tile);
    CHECK_EQ(actual.last_before(tile), last, "row tile " << row_tile << ", before " << tile);
    if (kind == Class::mixed) mixed.push_back(tile);
    if (kind == Class::full) full.push_back(tile);
    if (kind != Class::empty) last = tile;
  }
  CHECK_EQ(actual.last_before(end), last, "row tile " << row_tile);
  CHECK_EQ(actual.counts().mixed, static_cast<int>(mixed.size()), "row tile " << row_tile);
  CHECK_EQ(actual.counts().full, static_cast<int>(full.size()), "row tile " << row_tile);

  KvTileWalk</*kFalling=*/false> walk;
  for (int tile : mixed) CHECK_EQ(walk.next(actual), tile, "row tile " << row_tile);
  for (int tile : full) CHECK_EQ(walk.next(actual), tile, "row tile " << row_tile);

  KvTileWalk</*kFalling=*/true> falling;
  std::reverse(mixed.begin(), mixed.end());
  std::reverse(full.begin(), full.end());
  for (int tile : mixed) CHECK_EQ(falling.next(actual), tile, "falling, row tile " << row_tile);
  for (int tile : full) CHECK_EQ(falling.next(actual), tile, "falling, row tile " << row_tile);
}

}  // namespace

int main() {
  Random random(3);
  for (int num_kv_tiles : {1, 2, 31, 32, 33, 64, 65, 100, 1000}) {
    for (uint32_t needed : {0u, 1u, 10u, 50u, 100u}) {
      for (int i = 0; i < 20; ++i) {
        const Mask mask = Mask::random(random, 3, num_kv_tiles, needed);
        for (int row_tile = 0; row_tile < 3; ++row_tile) {
          const int begin = random.integer(0, num_kv_tiles);
          check_row_tile(mask, row_tile, 0, num_kv_tiles);
          check_row_tile(mask, row_tile, begin, random.integer(begin, num_kv_tiles));
        }
      }
    }
  }
  return prefill::test::result();
}
