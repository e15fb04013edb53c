// V made ready for kernels of 8 bits: the pass that transposes it, so that the keys of a dim lie
// side by side, in the order in which a thread's softmax weights meet them. What it is made of is
// host and device code, and brute-forced on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/mask.cuh"
#include "common/params.h"

namespace prefill {

// A block takes so many keys and up to as many dims of a head. A row of the transposed V is a
// multiple of it.
inline constexpr int kTransposeKeys = 128;
inline constexpr int kTransposeDims = 128;

// Which of a group of 16 keys lies at a position of the transposed V. Thread l of a quad holds
// columns 2l and 2l + 1 of every 8 of S, but takes positions 4l to 4l + 3 of 16 of P for WGMMA:
// what lies there in V belongs to the columns that it holds.
PREFILL_HOST_DEVICE constexpr int transposed_key(int position) {
  return position % 4 / 2 * 8 + position / 4 * 2 + position % 2;
}

// A thread's work in a block: the transposed rows of 4 dims, over a group of 16 keys. Threads that
// are neighbours take groups that are, so that a row is written in 128 bytes.
struct TransposeItem {
  static constexpr int kKeys = 16, kDims = 4;
  static constexpr int kGroups = kTransposeKeys / kKeys;

  int group;
  int first_dim;

  PREFILL_HOST_DEVICE static TransposeItem of(int thread) {
    return {thread % kGroups, thread / kGroups * kDims};
  }
};
inline constexpr int kTransposeThreads =
    TransposeItem::kGroups * (kTransposeDims / TransposeItem::kDims);

// Where the block's shared memory has 16 dims (a chunk) of a key, in chunks: so that neither
// writers, with the chunks of a key side by side, nor readers, with 4 dims of 8 groups, meet in a
// bank.
PREFILL_HOST_DEVICE constexpr int transpose_chunk(int key, int chunk) {
  constexpr int kChunks = kTransposeDims / 16;
  return key * kChunks + (chunk ^ key / TransposeItem::kKeys % kChunks);
}

// The pass of one call.
struct TransposePass {
  struct Block {
    int head;
    int first_key;
    int first_dim;
  };

  TensorView v;  // 8 bits; rows begin at multiples of 16 bytes
  TransposedV target;
  int kv_len;
  int head_dim;  // a multiple of 16
  int num_heads;
  int first_block;  // keys of blocks before are not needed
  int key_blocks;
  int dim_blocks;

  // Keys before the first KV tile, of `tile_n`, that a row sees are left out: no kernel reads them.
  static TransposePass of(const PrefillParams& params, int tile_n) {
    const int first_key = BandMask::of(params).row_begin(0) / tile_n * tile_n;
    const int all_blocks = (params.kv_len + kTransposeKeys - 1) / kTransposeKeys;
    TransposePass pass{};
    pass.v = params.v;
    pass.target.keys = all_blocks * kTransposeKeys;
    pass.kv_len = params.kv_len;
    pass.head_dim = params.head_dim_vo;
    pass.num_heads = params.num_kv_heads;
    pass.first_block = first_key / kTransposeKeys;
    pass.key_blocks = all_blocks - pass.first_block;
    pass.dim_blocks = (params.head_dim_vo + kTransposeDims - 1) / kTransposeDims;
    return pass;
  }

  int64_t workspace_bytes() const { return int64_t{num_heads} * head_dim * target.keys; }

  // Lets `params` find the transposed V in memory of that size, at an address that is a multiple of
  // 16.
  void carve(void* workspace, PrefillParams& params) {
    target.data = workspace;
    params.vt = target;
  }

  int64_t num_blocks() const { return int64_t{num_heads} * key_blocks * dim_blocks; }

  // Blocks of the same keys follow each other, as do their bytes in most tensors.
  PREFILL_HOST_DEVICE Block block(int index) const {
    const auto of_keys = static_cast<uint32_t>(num_heads * dim_blocks);
    const auto keys = static_cast<uint32_t>(index) / of_keys;
    const uint32_t in_keys = static_cast<uint32_t>(index) - keys * of_keys;
    const uint32_t head = in_keys / static_cast<uint32_t>(dim_blocks);
    const auto dims = static_cast<int>(in_keys - head * static_cast<uint32_t>(dim_blocks));
    return {static_cast<int>(head), (first_block + static_cast<int>(keys)) * kTransposeKeys,
            dims * kTransposeDims};
  }

  // In elements of the transposed V.
  PREFILL_HOST_DEVICE int64_t target_element(int head, int dim, int position) const {
    return (int64_t{head} * head_dim + dim) * target.keys + position;
  }
};

// Fills the target, which TransposePass::carve gave: keys past the last one are zero.
// `programmatic`: as pass_launch.cuh has it.
cudaError_t transpose_v(const TransposePass& pass, bool programmatic, cudaStream_t stream);

}  // namespace prefill
