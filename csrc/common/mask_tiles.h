// A custom mask made ready for a kernel: the pass that classifies the tiles of the kernel's grid
// and lays the bits of mixed ones out for its accumulators, and what that pass is made of. The
// parts are host and device code, and brute-forced on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/mask.cuh"
#include "common/params.h"

namespace prefill {

enum class MaskFormat { bits, bools };

// A [qo_len, kv_len] mask at any address: true, or 1, where the row sees the key. Bits lie in a
// flat row, the lowest of a byte first, without padding between rows; a bool is a byte, 0 or 1.
struct MaskSource {
  MaskFormat format;
  const uint8_t* data;
  int64_t row_keys;  // from one row to the next: kv_len for bits, the stride for bools
};

// A warp lays out the rows of one step of an MMA, and writes a word for each of its lanes.
inline constexpr int kMaskBlockRows = 16;
inline constexpr int kMaskLanes = 32;

struct MaskTileCounts {
  int64_t row_tiles;
  int64_t row_blocks;
  int kv_tiles;

  static MaskTileCounts of(int qo_len, int kv_len, const RowMap& rows, int tile_m, int tile_n) {
    const int tile_tokens = rows.tile_tokens(tile_m);
    const int64_t row_tiles = (qo_len + tile_tokens - 1) / tile_tokens;
    return {row_tiles, row_tiles * (tile_m / kMaskBlockRows), (kv_len + tile_n - 1) / tile_n};
  }

  int64_t words() const { return row_blocks * kv_tiles * kMaskLanes; }
  int64_t class_words() const { return row_tiles * ((kv_tiles + 31) / 32); }

  int64_t workspace_bytes() const {
    return words() * static_cast<int64_t>(sizeof(MaskWords)) +
           2 * class_words() * static_cast<int64_t>(sizeof(uint32_t));
  }

  // The three arrays in memory of that size, at an address that is a multiple of 8.
  MaskTiles carve(void* workspace) const {
    const auto* bits = static_cast<const MaskWords*>(workspace);
    const auto* mixed = reinterpret_cast<const uint32_t*>(bits + words());
    return {mixed, mixed + class_words(), bits, kv_tiles};
  }
};

// Fills `target`, which MaskTileCounts::carve gave, for the lengths and windows of `params`. Tile
// sizes are multiples of 64 rows, up to 512, and of 16 keys, up to 128. `programmatic`: as
// pass_launch.cuh has it.
cudaError_t lay_out_mask(const MaskSource& source, const PrefillParams& params, int tile_m,
                         int tile_n, const MaskTiles& target, bool programmatic,
                         cudaStream_t stream);

// The lowest `count` bits; any count.
PREFILL_HOST_DEVICE uint32_t low_bits(int count) {
  return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
}

// How a format is read: in aligned words, of which kWords hold any 32 keys in a row.
struct PackedBits {
  using Word = uint32_t;
  static constexpr int kByteKeys = 8;
  static constexpr int kWords = 2;

  PREFILL_HOST_DEVICE static uint32_t keys(Word word) { return word; }
};

struct Bools {
  using Word = uint4;
  static constexpr int kByteKeys = 1;
  static constexpr int kWords = 3;

  PREFILL_HOST_DEVICE static uint32_t keys(Word word) {
    return four_keys(word.x) | four_keys(word.y) << 4 | four_keys(word.z) << 8 |
           four_keys(word.w) << 12;
  }

  // Brings the lowest bits of four bytes together. The others may be of memory between rows.
  PREFILL_HOST_DEVICE static uint32_t four_keys(uint32_t bytes) {
    return (bytes & 0x01010101u) * 0x10204080u >> 28;
  }
};

// Bools with rows that begin at multiples of 16 bytes.
struct AlignedBools : Bools {
  static constexpr int kWords = 2;
};

// Whether all bytes of the words to be read lie within the mask, or that is to be checked.
enum class WordAccess { whole, checked };

// The memory of a mask, seen as aligned words. No byte before or after it is read.
template <class Format>
struct MaskMemory {
  using Word = typename Format::Word;
  static constexpr int kWordBytes = sizeof(Word);
  static constexpr int kWordKeys = kWordBytes * Format::kByteKeys;

  const Word* words;  // the first of these holds the first byte
  int64_t begin;      // bytes from there
  int64_t end;
  int64_t row_keys;

  static MaskMemory of(const MaskSource& source, int qo_len, int kv_len) {
    const auto lead = static_cast<int>(reinterpret_cast<uintptr_t>(source.data) % kWordBytes);
    const int64_t keys = (qo_len - 1) * source.row_keys + kv_len;
    return {reinterpret_cast<const Word*>(source.data - lead), lead,
            lead + (keys + Format::kByteKeys - 1) / Format::kByteKeys, source.row_keys};
  }

  // Whether all words that hold keys [key, key_end) of these rows are whole.
  PREFILL_HOST_DEVICE bool is_whole(int first_row, int last_row, int key, int key_end) const {
    return is_whole(position(first_row, key) / kWordKeys) &&
           is_whole(position(last_row, key_end - 1) / kWordKeys);
  }

  // The bits of `count` keys of a row from `key` on, at most 32; the others mean nothing. No word
  // without any of these keys is read.
  template <WordAccess kAccess>
  PREFILL_HOST_DEVICE uint32_t keys(int row, int key, int count) const {
    constexpr bool kShifts = Format::kWords * kWordKeys > 32;
    const int64_t first = position(row, key);
    const int shift = kShifts ? static_cast<int>(first % kWordKeys) : 0;
    const int needed = count > 0 ? shift + count : 0;
    const int64_t word = first / kWordKeys;
    uint64_t found = 0;
    if constexpr (kAccess == WordAccess::whole) {
      Word loaded[Format::kWords] = {};  // all are on their way before the first is waited for
      for (int i = 0; i < Format::kWords; ++i) {
        if (kWordKeys * i < needed) loaded[i] = words[word + i];
      }
      for (int i = 0; i < Format::kWords; ++i) {
        found |= uint64_t{Format::keys(loaded[i])} << kWordKeys * i;
      }
    } else {
      for (int i = 0; i < Format::kWords; ++i) {
        if (kWordKeys * i < needed) found |= uint64_t{checked_keys(word + i)} << kWordKeys * i;
      }
    }
    return static_cast<uint32_t>(found >> shift);
  }

 private:
  // Keys from the first word on.
  PREFILL_HOST_DEVICE int64_t position(int row, int key) const {
    return begin * Format::kByteKeys + row * row_keys + key;
  }

  PREFILL_HOST_DEVICE bool is_whole(int64_t word) const {
    return word * kWordBytes >= begin && (word + 1) * kWordBytes <= end;
  }

  PREFILL_HOST_DEVICE uint32_t checked_keys(int64_t word) const {
    if (is_whole(word)) return Format::keys(words[word]);
    const auto* bytes = reinterpret_cast<const uint8_t*>(words + word);
    uint32_t keys = 0;
    for (int i = 0; i < kWordBytes; ++i) {
      const int64_t byte = word * kWordBytes + i;
      if (byte < begin || byte >= end) continue;
      keys |= (bytes[i] & low_bits(Format::kByteKeys)) << i * Format::kByteKeys;
    }
    return keys;
  }
};

// A row and the keys that the band shows it. Rows past the end are the last row.
struct MaskRow {
  int row;
  int begin;
  int end;

  PREFILL_HOST_DEVICE static MaskRow of(const BandMask& band, int row) {
    const int this_row = row < band.qo_len ? row : band.qo_len - 1;
    return {this_row, band.row_begin(this_row), band.row_end(this_row)};
  }

  // Of the 32 keys from `key` on, those before `limit` that the row sees.
  template <WordAccess kAccess, class Format>
  PREFILL_HOST_DEVICE uint32_t seen_keys(const MaskMemory<Format>& mask, int key, int limit) const {
    const int count = (end < limit ? end : limit) - key;
    return mask.template keys<kAccess>(row, key, count < 32 ? count : 32) & low_bits(count) &
           ~low_bits(begin - key);
  }
};

// Of the bits of 32 keys, those of the columns of each lane of a quad: byte `lane` is what
// quad_columns gives. That transposes a 4 by 4 matrix of pairs of bits.
PREFILL_HOST_DEVICE uint32_t columns_of_quad(uint32_t keys) {
  uint32_t swapped = (keys ^ keys >> 6) & 0x00cc00ccu;
  keys ^= swapped ^ swapped << 6;
  swapped = (keys ^ keys >> 12) & 0x0000f0f0u;
  return keys ^ swapped ^ swapped << 12;
}

// Four of the bytes of two words, one for each digit of `selector`: 0 to 3 of `low`, 4 to 7 of
// `high`.
PREFILL_HOST_DEVICE uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, selector);
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) {
    selected |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return selected;
#endif
}

// The lanes of a quad hold a 4 by 4 matrix of bytes, a row each. To transpose it they exchange with
// lane ^ 1 and then with lane ^ 2.
PREFILL_HOST_DEVICE uint32_t transpose_step_1(uint32_t own, uint32_t other, int lane) {
  return select_bytes(own, other, lane & 1 ? 0x3715 : 0x6240);
}

PREFILL_HOST_DEVICE uint32_t transpose_step_2(uint32_t own, uint32_t other, int lane) {
  return select_bytes(own, other, lane & 2 ? 0x3276 : 0x5410);
}

}  // namespace prefill
