// The parts of the mask pass, put together on the host as a warp does it, against naive loops.
#include <array>
#include <cstring>
#include <vector>

#include "check.h"
#include "common/mask_tiles.h"
#include "naive_mask.h"
#include "random.h"

namespace {

using prefill::AlignedBools;
using prefill::BandMask;
using prefill::Bools;
using prefill::kMaskBlockRows;
using prefill::kMaskLanes;
using prefill::MaskFormat;
using prefill::MaskMemory;
using prefill::MaskRow;
using prefill::MaskSource;
using prefill::MaskTileCounts;
using prefill::MaskTiles;
using prefill::MaskWords;
using prefill::PackedBits;
using prefill::WordAccess;
using prefill::test::MaskCase;
using prefill::test::Random;

using WarpKeys = std::array<uint32_t, kMaskLanes>;

// 32 keys of a row for each lane, those of a quad after each other.
template <WordAccess kAccess, class Format>
WarpKeys warp_keys(const MaskMemory<Format>& memory, const MaskCase& test, int first_row, int begin,
                   int end) {
  WarpKeys keys{};
  for (int lane = 0; lane < kMaskLanes; ++lane) {
    keys[lane] = MaskRow::of(test.band(), test.rows.token(first_row + lane / 4))
                     .seen_keys<kAccess>(memory, begin + 32 * (lane % 4), end);
  }
  return keys;
}

WarpKeys quad_transpose(WarpKeys keys) {
  for (uint32_t& word : keys) word = prefill::columns_of_quad(word);
  const WarpKeys before = keys;
  for (int lane = 0; lane < kMaskLanes; ++lane) {
    keys[lane] = prefill::transpose_step_1(before[lane], before[lane ^ 1], lane);
  }
  const WarpKeys between = keys;
  for (int lane = 0; lane < kMaskLanes; ++lane) {
    keys[lane] = prefill::transpose_step_2(between[lane], between[lane ^ 2], lane);
  }
  return keys;
}

// All of the pass, but for one thing: blocks of mixed and of other tiles are written alike.
template <class Format>
void lay_out(const MaskSource& source, const MaskCase& test, std::vector<uint32_t>& mixed,
             std::vector<uint32_t>& full, std::vector<MaskWords>& bits) {
  const BandMask band = test.band();
  const auto memory = MaskMemory<Format>::of(source, test.qo_len, test.kv_len);
  const MaskTileCounts counts = test.counts();
  const int num_words = (counts.kv_tiles + 31) / 32;
  std::vector<bool> some(counts.row_tiles * counts.kv_tiles), lacking(some.size());
  for (int block = 0; block < counts.row_blocks; ++block) {
    const auto token = [&](int i) {
      return std::min(test.rows.token(kMaskBlockRows * block + i), test.qo_len - 1);
    };
    const int first_row = token(0), last_row = token(kMaskBlockRows - 1);
    const auto range = band.kv_tiles(first_row, last_row + 1 - first_row, test.tile_n);
    for (int tile = 0; tile < counts.kv_tiles; ++tile) {
      const size_t row_tile = block * kMaskBlockRows / test.tile_m;
      const size_t index = row_tile * counts.kv_tiles + tile;
      const int begin = tile * test.tile_n, end = begin + test.tile_n;
      for (int half = 0; half < 2; ++half) {
        WarpKeys keys{};
        if (range.begin <= tile && tile < range.end) {
          const int row = kMaskBlockRows * block + 8 * half;
          keys = memory.is_whole(first_row, last_row, begin, std::min(end, test.kv_len))
                     ? warp_keys<WordAccess::whole>(memory, test, row, begin, end)
                     : warp_keys<WordAccess::checked>(memory, test, row, begin, end);
        }
        const WarpKeys columns = quad_transpose(keys);
        for (int lane = 0; lane < kMaskLanes; ++lane) {
          some[index] = some[index] || keys[lane] != 0;
          lacking[index] =
              lacking[index] || keys[lane] != prefill::low_bits(test.tile_n - 32 * (lane % 4));
          bits[(int64_t{block} * counts.kv_tiles + tile) * kMaskLanes + lane].rows[half] =
              columns[lane];
          for (int w = 0; w < 4; ++w) {
            CHECK_EQ(columns[lane] >> 8 * w & 0xff,
                     prefill::quad_columns(keys[lane / 4 * 4 + w], lane % 4), test);
          }
        }
      }
    }
  }
  for (size_t i = 0; i < some.size(); ++i) {
    const size_t tile = i % counts.kv_tiles;
    const size_t word = i / counts.kv_tiles * num_words + tile / 32;
    mixed[word] |= uint32_t{some[i] && lacking[i]} << tile % 32;
    full[word] |= uint32_t{some[i] && !lacking[i]} << tile % 32;
  }
}

// The source ends with its memory: an address sanitizer would see a read past that.
void check_case(const MaskCase& test, Random& random) {
  const auto mask = prefill::test::make_mask(test.kind, random, test.qo_len, test.kv_len);
  const auto stored =
      prefill::test::store_mask(mask, test.format, random, test.kv_len, test.lead, test.gap);
  const MaskSource source{test.format, stored.data() + test.lead, test.row_keys()};
  const MaskTileCounts counts = test.counts();
  std::vector<uint32_t> mixed(counts.class_words()), full(counts.class_words());
  std::vector<MaskWords> bits(counts.words());
  const auto check = [&] {
    check_mask_tiles({mixed.data(), full.data(), bits.data(), counts.kv_tiles}, mask, test);
    std::fill(mixed.begin(), mixed.end(), 0);
    std::fill(full.begin(), full.end(), 0);
  };
  if (test.format == MaskFormat::bits) {
    lay_out<PackedBits>(source, test, mixed, full, bits);
    return check();
  }
  lay_out<Bools>(source, test, mixed, full, bits);
  check();
  if ((reinterpret_cast<uintptr_t>(source.data) | source.row_keys) % 16 == 0) {
    lay_out<AlignedBools>(source, test, mixed, full, bits);
    check();
  }
}

// Any 32 keys from anywhere, whatever lies around the mask.
template <class Format>
void check_keys(MaskFormat format, Random& random) {
  for (int i = 0; i < 400; ++i) {
    const int qo_len = random.integer(1, 5), kv_len = random.integer(1, 100);
    const int lead = random.integer(0, 33), gap = random.integer(0, 20);
    const auto mask =
        prefill::test::make_mask(prefill::test::MaskKind::random, random, qo_len, kv_len);
    const auto stored = prefill::test::store_mask(mask, format, random, kv_len, lead, gap);
    const int64_t row_keys = format == MaskFormat::bits ? kv_len : kv_len + gap;
    const auto memory =
        MaskMemory<Format>::of({format, stored.data() + lead, row_keys}, qo_len, kv_len);
    for (int row = 0; row < qo_len; ++row) {
      for (int key = 0; key < kv_len; ++key) {
        const int count = random.integer(0, std::min(32, kv_len - key));
        uint32_t expected = 0;
        for (int k = 0; k < count; ++k) {
          expected |= uint32_t{mask[row * kv_len + key + k]} << k;
        }
        const auto check = [&](uint32_t found) {
          CHECK_EQ(found & prefill::low_bits(count), expected,
                   count << " keys from " << key << " of row " << row << " of " << qo_len << " x "
                         << kv_len << ", lead " << lead << ", gap " << gap);
        };
        check(memory.template keys<WordAccess::checked>(row, key, count));
        if (count > 0 && memory.is_whole(row, row, key, key + count)) {
          check(memory.template keys<WordAccess::whole>(row, key, count));
        }
      }
    }
  }
}

// Bits and bools beyond 2^31 and 2^32: only the words that are asked for are there.
void check_far_keys() {
  const int length = 65537;
  alignas(16) const uint8_t here[48] = {0, 1, 1, 0, 1};
  for (int row : {32768, 46341, 65535}) {
    for (MaskFormat format : {MaskFormat::bits, MaskFormat::bools}) {
      const bool packed = format == MaskFormat::bits;
      // A key whose bit or byte is the first of an aligned word.
      const int64_t unit = packed ? 32 : 16;
      const int key = static_cast<int>(unit - int64_t{row} * length % unit);
      const int64_t bytes = (int64_t{row} * length + key) / (packed ? 8 : 1);
      const MaskSource source{format,
                              reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(here) -
                                                               static_cast<uintptr_t>(bytes)),
                              length};
      uint32_t found, expected;
      if (packed) {
        found = MaskMemory<PackedBits>::of(source, length, length)
                    .keys<WordAccess::whole>(row, key + 8, 32);
        std::memcpy(&expected, here + 1, sizeof(expected));
      } else {
        found =
            MaskMemory<Bools>::of(source, length, length).keys<WordAccess::whole>(row, key + 1, 32);
        expected = 0b1011;
      }
      CHECK_EQ(found, expected, "row " << row << (packed ? " of bits" : " of bools"));
    }
  }
}

void check_sizes() {
  const MaskTileCounts counts = MaskTileCounts::of(65537, 65537, {}, 128, 80);
  CHECK_EQ(counts.row_tiles, 513);
  CHECK_EQ(counts.row_blocks, 513 * 8);
  CHECK_EQ(counts.kv_tiles, 820);
  CHECK_EQ(counts.words(), int64_t{513 * 8} * 820 * 32);
  CHECK_EQ(counts.class_words(), 513 * 26);
  CHECK_EQ(counts.workspace_bytes(), int64_t{513 * 8} * 820 * 256 + 2 * 513 * 26 * 4);
  const int longest = (1 << 30) - 1;
  const MaskTileCounts most = MaskTileCounts::of(longest, longest, {}, 64, 64);
  CHECK_EQ(most.words(), (int64_t{1} << 26) * (1 << 24) * 32);
  alignas(8) static char memory[8];
  const MaskTiles tiles = counts.carve(memory);
  CHECK_EQ(reinterpret_cast<const char*>(tiles.bits) - memory, 0);
  CHECK_EQ(reinterpret_cast<const char*>(tiles.mixed) - memory, counts.words() * 8);
  CHECK_EQ(tiles.full - tiles.mixed, counts.class_words());
  CHECK_EQ(tiles.num_kv_tiles, 820);
  CHECK_EQ(tiles.num_words(), 26);
}

}  // namespace

int main() {
  Random random(3);
  check_keys<PackedBits>(MaskFormat::bits, random);
  check_keys<Bools>(MaskFormat::bools, random);
  check_far_keys();
  check_sizes();
  for (int i = 0; i < 300; ++i) check_case(prefill::test::random_case(random, 420), random);
  for (int i = 0; i < 200; ++i) check_case(prefill::test::random_case(random, 40), random);
  return prefill::test::result();
}
