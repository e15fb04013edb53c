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

// One row tile's part of MaskTiles.
struct RowTileMask {
  const uint32_t* mixed;
  const uint32_t* full;
  int num_words;

  PREFILL_HOST_DEVICE static RowTileMask of(const MaskTiles& mask, int row_tile) {
    const int64_t first = int64_t{row_tile} * mask.num_words();
    return {mask.mixed + first, mask.full + first, mask.num_words()};
  }

  PREFILL_HOST_DEVICE int count(const uint32_t* words) const {
    int count = 0;
    for (int word = 0; word < num_words; ++word) count += count_bits(words[word]);
    return count;
  }

  PREFILL_HOST_DEVICE bool is_mixed(int tile) const { return mixed[tile / 32] >> tile % 32 & 1; }

  // The last KV tile before `end` that any row needs, or -1.
  PREFILL_HOST_DEVICE int last_before(int end) const {
    if (end <= 0) return -1;
    int word = (end - 1) / 32;
    uint32_t needed = (mixed[word] | full[word]) & ~0u >> (31 - (end - 1) % 32);
    while (needed == 0 && word > 0) {
      --word;
      needed = mixed[word] | full[word];
    }
    return needed == 0 ? -1 : word * 32 + highest_bit(needed);
  }
};

// Mixed KV tiles first, then full ones, each kind from the lowest keys on.
struct KvTileWalk {
  RowTileMask mask;
  int word;
  uint32_t left;  // of the word

  PREFILL_HOST_DEVICE static KvTileWalk of(const RowTileMask& mask) {
    return {mask, 0, mask.mixed[0]};
  }

  // Only as often as there are tiles.
  PREFILL_HOST_DEVICE int next() {
    while (left == 0) {
      ++word;
      left = word < mask.num_words ? mask.mixed[word] : mask.full[word - mask.num_words];
    }
    const int bit = lowest_bit(left);
    left &= left - 1;
    return word % mask.num_words * 32 + bit;
  }
};

}  // namespace prefill
