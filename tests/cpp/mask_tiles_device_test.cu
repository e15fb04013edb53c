// The mask pass on a device against naive loops, for all kinds of masks, formats, addresses and row
// strides. Sources end with their allocation, so that memcheck sees a read past them, and all that
// is not the mask's is random; results go to poisoned memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "common/mask_tiles.h"
#include "gpu.h"
#include "naive_attention.cuh"
#include "naive_mask.h"
#include "random.h"

namespace {

using prefill::kMaskLanes;
using prefill::MaskFormat;
using prefill::MaskSource;
using prefill::MaskTileCounts;
using prefill::MaskTiles;
using prefill::MaskWords;
using prefill::PrefillParams;
using prefill::test::DeviceArray;
using prefill::test::MaskCase;
using prefill::test::MaskKind;
using prefill::test::Random;

constexpr int kPoison = 0xa5;

// The tiles are in the order of the workspace: words, mixed, full.
std::vector<uint8_t> lay_out(const MaskCase& test, const MaskSource& source, cudaStream_t stream) {
  PrefillParams params{};
  params.qo_len = test.qo_len;
  params.kv_len = test.kv_len;
  params.rows = test.rows;
  params.window_left = test.window_left;
  params.window_right = test.window_right;
  std::vector<uint8_t> result(test.counts().workspace_bytes());
  const DeviceArray<uint8_t> workspace(static_cast<int64_t>(result.size()));
  CHECK_CUDA(cudaMemsetAsync(workspace.data(), kPoison, result.size(), stream));
  CHECK_CUDA(prefill::lay_out_mask(source, params, test.tile_m, test.tile_n,
                                   test.counts().carve(workspace.data()), /*programmatic=*/false,
                                   stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  workspace.download(result.data());
  return result;
}

// What is not mixed has no words.
void check_unwritten(const MaskTiles& tiles, const MaskCase& test) {
  MaskWords poison;
  std::memset(&poison, kPoison, sizeof(poison));
  const MaskTileCounts counts = test.counts();
  for (int64_t block = 0; block < counts.row_blocks; ++block) {
    const uint32_t* mixed = tiles.mixed + block * 16 / test.tile_m * tiles.num_words();
    for (int tile = 0; tile < counts.kv_tiles; ++tile) {
      if (mixed[tile / 32] >> tile % 32 & 1) continue;
      const MaskWords* words = tiles.bits + (block * counts.kv_tiles + tile) * kMaskLanes;
      const bool untouched = std::all_of(words, words + kMaskLanes, [&](const MaskWords& word) {
        return std::memcmp(&word, &poison, sizeof(word)) == 0;
      });
      CHECK(untouched, test << ", block " << block << ", tile " << tile);
    }
  }
}

void run_case(const MaskCase& test, Random& random, cudaStream_t stream) {
  const auto mask = prefill::test::make_mask(test.kind, random, test.qo_len, test.kv_len);
  const auto stored =
      prefill::test::store_mask(mask, test.format, random, test.kv_len, test.lead, test.gap);
  DeviceArray<uint8_t> memory(static_cast<int64_t>(stored.size()));
  memory.upload(stored.data());
  const MaskSource source{test.format, memory.data() + test.lead, test.row_keys()};
  std::vector<uint8_t> result = lay_out(test, source, stream);
  const MaskTiles tiles = test.counts().carve(result.data());
  check_mask_tiles(tiles, mask, test);
  check_unwritten(tiles, test);
  CHECK(lay_out(test, source, stream) == result, test << ": another result the second time");
}

void run_all_kinds(Random& random, cudaStream_t stream) {
  for (MaskKind kind : prefill::test::kMaskKinds) {
    for (MaskFormat format : {MaskFormat::bits, MaskFormat::bools}) {
      for (int tile_n : {64, 80, 112, 128}) {
        const int tile_m = 64 * random.integer(1, 3);
        const int unbounded = 200 + 700;
        run_case({200, 700, unbounded, unbounded, tile_m, tile_n, kind, format, 0, 0}, random,
                 stream);
        run_case({201, 599, 250, unbounded, tile_m, tile_n, kind, format, 1, 3}, random, stream);
      }
    }
  }
}

void run_all_addresses(Random& random, cudaStream_t stream) {
  for (MaskFormat format : {MaskFormat::bits, MaskFormat::bools}) {
    for (int lead = 0; lead < 17; ++lead) {
      for (int kv_len : {1, 7, 128, 161}) {
        run_case({35, kv_len, 1000, 1000, 64, 80, MaskKind::random, format, lead, 0}, random,
                 stream);
      }
    }
  }
}

// More KV tiles than a word has bits, and so many blocks that each has fewer warps.
void run_large(Random& random, cudaStream_t stream) {
  for (MaskKind kind : {MaskKind::random, MaskKind::triangle, MaskKind::diagonal_blocks}) {
    for (MaskFormat format : {MaskFormat::bits, MaskFormat::bools}) {
      run_case({1999, 5003, 1 << 14, 1 << 14, 64, 64, kind, format, 0, 5}, random, stream);
      run_case({2048, 6144, 1 << 14, 1 << 14, 192, 80, kind, format, 0, 0}, random, stream);
    }
  }
}

// Of a mask with more than 2^32 keys, the last rows: a source of bools repeats one row, one of bits
// is as large as it must be.
void run_huge(cudaStream_t stream) {
  const int length = 65537, tile_m = 128, tile_n = 128;
  PrefillParams params{};
  params.qo_len = params.kv_len = length;
  params.window_left = params.window_right = 2 * length;
  const MaskTileCounts counts = MaskTileCounts::of(length, length, {}, tile_m, tile_n);
  const int64_t bytes = (int64_t{length} * length + 7) / 8;
  size_t free_bytes = 0, all_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &all_bytes));
  if (static_cast<int64_t>(free_bytes) < 2 * (bytes + counts.workspace_bytes())) return;
  const DeviceArray<uint8_t> workspace(counts.workspace_bytes());
  const MaskTiles tiles = counts.carve(workspace.data());
  std::vector<uint32_t> mixed(counts.class_words()), full(counts.class_words());

  const auto check = [&](const MaskSource& source, int first_key, const char* what) {
    CHECK_CUDA(cudaMemsetAsync(workspace.data(), kPoison, counts.workspace_bytes(), stream));
    CHECK_CUDA(prefill::lay_out_mask(source, params, tile_m, tile_n, tiles, /*programmatic=*/false,
                                     stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    const int64_t class_bytes = counts.class_words() * sizeof(uint32_t);
    CHECK_CUDA(cudaMemcpy(mixed.data(), tiles.mixed, class_bytes, cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(full.data(), tiles.full, class_bytes, cudaMemcpyDeviceToHost));
    const int64_t last = (counts.row_tiles - 1) * tiles.num_words();
    for (int tile = 0; tile < counts.kv_tiles; ++tile) {
      const int begin = tile * tile_n, end = begin + tile_n;
      const bool is_full = begin >= first_key && end <= length;
      const bool is_mixed = !is_full && end > first_key;
      CHECK_EQ(mixed[last + tile / 32] >> tile % 32 & 1, uint32_t{is_mixed}, what << tile);
      CHECK_EQ(full[last + tile / 32] >> tile % 32 & 1, uint32_t{is_full}, what << tile);
    }
    // The last tile holds one key, and that is column 0 of the first lane of a quad.
    std::vector<MaskWords> words(kMaskLanes);
    CHECK_CUDA(cudaMemcpy(words.data(), tiles.bits + counts.words() - kMaskLanes,
                          kMaskLanes * sizeof(MaskWords), cudaMemcpyDeviceToHost));
    for (int lane = 0; lane < kMaskLanes; ++lane) {
      for (uint32_t word : words[lane].rows) CHECK_EQ(word, uint32_t{lane % 4 == 0}, what << lane);
    }
  };

  std::vector<uint8_t> row(length);
  std::fill(row.begin() + 1000, row.end(), 1);
  DeviceArray<uint8_t> bools(length);
  bools.upload(row.data());
  check({MaskFormat::bools, bools.data(), 0}, 1000, "bools, tile or lane ");

  // The last row, which is a row tile of its own, sees keys from 1004 on; the others none.
  const DeviceArray<uint8_t> bits(bytes);
  const int64_t first_bit = int64_t{length} * (length - 1) + 1004;
  CHECK_EQ(first_bit % 8, 4);
  CHECK_CUDA(cudaMemsetAsync(bits.data(), 0, bytes, stream));
  CHECK_CUDA(cudaMemsetAsync(bits.data() + first_bit / 8, 0xf0, 1, stream));
  CHECK_CUDA(
      cudaMemsetAsync(bits.data() + first_bit / 8 + 1, 0xff, bytes - first_bit / 8 - 1, stream));
  check({MaskFormat::bits, bits.data(), length}, 1004, "bits, tile or lane ");
}

}  // namespace

int main() {
  if (prefill::test::no_gpu()) return prefill::test::kSkipped;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Random random(4);
  run_all_kinds(random, stream);
  run_all_addresses(random, stream);
  for (int i = 0; i < 150; ++i) run_case(prefill::test::random_case(random, 700), random, stream);
  run_large(random, stream);
  run_huge(stream);
  CHECK_CUDA(cudaStreamDestroy(stream));
  return prefill::test::result();
}
