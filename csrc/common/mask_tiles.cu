#include "common/mask_tiles.h"

#include <algorithm>

#include "common/pass_launch.cuh"

namespace prefill {
namespace {

constexpr int kQuad = 4;
constexpr unsigned kWholeWarp = ~0u;
constexpr int kMaxWarps = 32;
constexpr int kMaxTileN = 128;  // a word of 32 keys for each lane of a quad

// The KV tiles of a thread block: a byte of `mixed` and of `full`, which no other block writes.
constexpr int kStripTiles = 8;
constexpr int kWordStrips = 32 / kStripTiles;

// The columns of lane `lane % 4` of the quad; each lane brings the 32 keys at its place of the
// tile.
__device__ uint32_t quad_transpose(uint32_t keys, int lane) {
  uint32_t columns = columns_of_quad(keys);
  columns = transpose_step_1(columns, __shfl_xor_sync(kWholeWarp, columns, 1), lane);
  return transpose_step_2(columns, __shfl_xor_sync(kWholeWarp, columns, 2), lane);
}

// A warp's block of 16 rows. Its lanes hold rows as accumulators do, lane / 4 and that plus 8, and
// of these the 32 keys at lane % 4.
template <class Format>
struct WarpBlock {
  MaskMemory<Format> mask;
  MaskRow upper;
  MaskRow lower;
  int first_row;
  int last_row;

  __device__ static WarpBlock of(const MaskMemory<Format>& mask, const BandMask& band,
                                 const RowMap& rows, int row_block, int lane) {
    const int row = kMaskBlockRows * row_block;
    const auto token = [&](int i) { return min(rows.token(row + i), band.qo_len - 1); };
    return {mask, MaskRow::of(band, token(lane / kQuad)),
            MaskRow::of(band, token(lane / kQuad + kMaskBlockRows / 2)), token(0),
            token(kMaskBlockRows - 1)};
  }

  template <WordAccess kAccess>
  __device__ MaskWords seen_keys(int key, int limit) const {
    return {{upper.template seen_keys<kAccess>(mask, key, limit),
             lower.template seen_keys<kAccess>(mask, key, limit)}};
  }

  // Of the KV tile of keys [begin, end). Memory ends at kv_len.
  __device__ MaskWords seen_keys(int begin, int end, int kv_len, int lane) const {
    const int key = begin + 32 * (lane % kQuad);
    return mask.is_whole(first_row, last_row, begin, min(end, kv_len))
               ? seen_keys<WordAccess::whole>(key, end)
               : seen_keys<WordAccess::checked>(key, end);
  }
};

// A block lays out a strip of a row tile: threads are (lane, block of 16 rows, share of the strip).
// A warp writes the words of the blocks that are mixed by themselves at once. All of a block that
// is empty or full by itself is known before it is clear whether the rest of the row tile is alike.
template <class Format>
__global__ void __launch_bounds__(kMaskLanes* kMaxWarps)
    lay_out_strip(const MaskMemory<Format> mask, const BandMask band, const RowMap rows, int tile_n,
                  const MaskTiles target) {
  __shared__ uint32_t votes[kMaxWarps];
  const int lane = threadIdx.x;
  const int num_strips = kWordStrips * target.num_words();
  const int row_tile = blockIdx.x / num_strips;
  const int strip = blockIdx.x % num_strips;
  const int row_block = row_tile * blockDim.y + threadIdx.y;
  const int first_tile = kStripTiles * strip;
  auto* words = const_cast<MaskWords*>(target.bits) +
                (int64_t{row_block} * target.num_kv_tiles + first_tile) * kMaskLanes + lane;

  // One bit for each KV tile of this warp's: rows see some key, and not all see all.
  uint32_t mine = 0, some = 0, lacking = 0;
  const auto block = WarpBlock<Format>::of(mask, band, rows, row_block, lane);
  const KvTileRange range =
      band.kv_tiles(block.first_row, block.last_row + 1 - block.first_row, tile_n);
  const uint32_t whole = low_bits(tile_n - 32 * (lane % kQuad));
  const int num_tiles = min(kStripTiles, target.num_kv_tiles - first_tile);
  wait_for_kernel_before();
  for (int i = threadIdx.z; i < num_tiles; i += blockDim.z) {
    const int tile = first_tile + i;
    MaskWords keys{};
    if (range.begin <= tile && tile < range.end) {
      keys = block.seen_keys(tile * tile_n, (tile + 1) * tile_n, band.kv_len, lane);
    }
    const bool any = __any_sync(kWholeWarp, (keys.rows[0] | keys.rows[1]) != 0);
    const bool all = __all_sync(kWholeWarp, keys.rows[0] == whole && keys.rows[1] == whole);
    mine |= 1u << i;
    some |= uint32_t{any} << i;
    lacking |= uint32_t{!all} << i;
    if (any && !all) {
      words[i * kMaskLanes] = {
          {quad_transpose(keys.rows[0], lane), quad_transpose(keys.rows[1], lane)}};
    }
  }

  const int warp = threadIdx.y + blockDim.y * threadIdx.z;
  if (lane == 0) votes[warp] = some | lacking << kStripTiles;
  __syncthreads();
  const uint32_t vote = lane < static_cast<int>(blockDim.y * blockDim.z) ? votes[lane] : 0;
  const uint32_t all_votes = __reduce_or_sync(kWholeWarp, vote);
  const uint32_t tile_some = all_votes & low_bits(kStripTiles);
  const uint32_t tile_lacking = all_votes >> kStripTiles;
  const uint32_t mixed = tile_some & tile_lacking;

  for (uint32_t left = mixed & mine & ~(some & lacking); left != 0; left &= left - 1) {
    const int i = __ffs(left) - 1;
    const uint32_t columns = some >> i & 1 ? low_bits(tile_n / kQuad) : 0;
    words[i * kMaskLanes] = {{columns, columns}};
  }
  if (warp == 0 && lane == 0) {
    const auto write = [&](const uint32_t* classes, uint32_t tiles) {
      auto* bytes = reinterpret_cast<uint8_t*>(const_cast<uint32_t*>(classes));
      bytes[int64_t{row_tile} * num_strips + strip] = static_cast<uint8_t>(tiles);
    };
    write(target.mixed, mixed);
    write(target.full, tile_some & ~tile_lacking);
  }
}

template <class Format>
cudaError_t launch(const MaskSource& source, const BandMask& band, const RowMap& rows, int tile_m,
                   int tile_n, const MaskTiles& target, bool programmatic, cudaStream_t stream) {
  // Warps with one KV tile after another hide less of the memory's latency than more warps do, but
  // are fewer to start and to synchronise: it is large grids that are better off with them.
  constexpr int64_t kFewBlocks = 256;
  const MaskTileCounts counts = MaskTileCounts::of(band.qo_len, band.kv_len, rows, tile_m, tile_n);
  const int64_t num_blocks = kWordStrips * counts.class_words();
  if (num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int row_blocks = tile_m / kMaskBlockRows;
  const int warps = num_blocks <= kFewBlocks ? kMaxWarps : kMaxWarps / 2;
  const int shares = std::clamp(warps / row_blocks, 1, kStripTiles);
  return launch_pass(lay_out_strip<Format>, static_cast<unsigned>(num_blocks),
                     dim3(kMaskLanes, row_blocks, shares), programmatic, stream,
                     MaskMemory<Format>::of(source, band.qo_len, band.kv_len), band, rows, tile_n,
                     target);
}

}  // namespace

cudaError_t lay_out_mask(const MaskSource& source, const PrefillParams& params, int tile_m,
                         int tile_n, const MaskTiles& target, bool programmatic,
                         cudaStream_t stream) {
  const bool fits = tile_m > 0 && tile_m % RowMap::kBlock == 0 &&
                    tile_m <= kMaskBlockRows * kMaxWarps && tile_n > 0 && tile_n % 16 == 0 &&
                    tile_n <= kMaxTileN;
  if (!fits) return cudaErrorInvalidValue;
  const BandMask band = BandMask::of(params);
  if (source.format == MaskFormat::bits) {
    return launch<PackedBits>(source, band, params.rows, tile_m, tile_n, target, programmatic,
                              stream);
  }
  const int64_t start = static_cast<int64_t>(reinterpret_cast<uintptr_t>(source.data));
  const bool aligned = (start | source.row_keys) % int64_t{sizeof(uint4)} == 0;
  return (aligned ? launch<AlignedBools> : launch<Bools>)(source, band, params.rows, tile_m, tile_n,
                                                          target, programmatic, stream);
}

}  // namespace prefill
