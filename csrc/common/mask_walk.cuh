// The KV tiles that a row tile needs under a custom mask, in the order in which kernels take them.
#pragma once

#include "common/host_device.h"
#include "common/mask.cuh"
#include "common/params.h"

namespace prefill {

PREFILL_HOST_DEVICE int count_bits(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

// Of a word with any bit.
PREFILL_HOST_DEVICE int lowest_bit(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(word)) - 1;
#else
  return __builtin_ctz(word);
#endif
}

PREFILL_HOST_DEVICE int highest_bit(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(static_cast<int>(word));
#else
  return 31 - __builtin_clz(word);
#endif
}

// One row tile's part of MaskTiles, KV tiles [begin, end) of it.
struct RowTileMask {
  const uint32_t* mixed;
  const uint32_t* full;
  int begin;
  int end;

  PREFILL_HOST_DEVICE static RowTileMask of(const MaskTiles& mask, int row_tile, int begin,
                                            int end) {
    const int64_t first = int64_t{row_tile} * mask.num_words();
    return {mask.mixed + first, mask.full + first, begin, end};
  }

  // Words [first_word(), end_word()) hold the KV tiles.
  PREFILL_HOST_DEVICE int first_word() const { return begin / 32; }
  PREFILL_HOST_DEVICE int end_word() const { return begin < end ? (end + 31) / 32 : first_word(); }

  // One of these, without KV tiles that are not.
  PREFILL_HOST_DEVICE uint32_t bits(const uint32_t* words, int word) const {
    uint32_t bits = words[word];
    if (word == begin / 32) bits &= ~0u << begin % 32;
    if (word == (end - 1) / 32) bits &= ~0u >> (31 - (end - 1) % 32);
    return bits;
  }

  struct Counts {
    int mixed, full;
  };
  PREFILL_HOST_DEVICE Counts counts() const {
    Counts counts{0, 0};
    for (int word = first_word(); word < end_word(); ++word) {
      const uint32_t of_mixed = bits(mixed, word), of_full = bits(full, word);  // one wait for both
      counts.mixed += count_bits(of_mixed);
      counts.full += count_bits(of_full);
    }
    return counts;
  }

  PREFILL_HOST_DEVICE bool is_mixed(int tile) const { return mixed[tile / 32] >> tile % 32 & 1; }

  // The last KV tile before `limit`, which is one of these or their end, that any row needs; -1
  // where there is none.
  PREFILL_HOST_DEVICE int last_before(int limit) const {
    uint32_t wanted = limit % 32 == 0 ? 0u : ~0u >> (32 - limit % 32);
    for (int word = limit / 32; word >= first_word(); --word) {
      const uint32_t needed = wanted == 0 ? 0u : (bits(mixed, word) | bits(full, word)) & wanted;
      if (needed != 0) return word * 32 + highest_bit(needed);
      wanted = ~0u;
    }
    return -1;
  }
};

// Mixed KV tiles first, then full ones, each kind from the lowest keys on, or falling.
template <bool kFalling>
struct KvTileWalk {
  int word = -1;      // of those that hold the KV tiles, first of mixed ones and then of full ones
  uint32_t left = 0;  // of the word

  // Only as often as there are tiles; `tiles` are the same each time.
  PREFILL_HOST_DEVICE int next(const RowTileMask& tiles) {
    const int num_words = tiles.end_word() - tiles.first_word();
    const auto place = [&] {
      const int of_kind = word < num_words ? word : word - num_words;
      return kFalling ? tiles.end_word() - 1 - of_kind : tiles.first_word() + of_kind;
    };
    while (left == 0) {
      ++word;
      left = tiles.bits(word < num_words ? tiles.mixed : tiles.full, place());
    }
    const int bit = kFalling ? highest_bit(left) : lowest_bit(left);
    left ^= 1u << bit;
    return place() * 32 + bit;
  }
};

}  // namespace prefill
