// Which query each row of a row tile is. Shared by all kernels and passes, host-tested.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace prefill {

// Rows come in blocks of 64: the same tokens of `heads` query heads of one KV head, token by token,
// heads side by side. So short calls fill row tiles, and read K and V once for all these heads. By
// default a block is 64 tokens of one head. Rows in which no token has room for all heads are
// spare; in masks they count as the first of the next block.
struct RowMap {
  static constexpr int kBlock = 64;

  int heads = 1;
  int tokens = kBlock;  // of a block
  uint32_t reciprocal = 1u << 16;

  // Of up to kBlock heads.
  static RowMap of(int heads) {
    return {heads, kBlock / heads, ((1u << 16) + static_cast<uint32_t>(heads) - 1) / heads};
  }

  PREFILL_HOST_DEVICE int rows() const { return heads * tokens; }  // of a block, without spare ones

  PREFILL_HOST_DEVICE int token(int row) const {
    return first_token(row) + token_in_block(row % kBlock);
  }
  // Of the first row of a block.
  PREFILL_HOST_DEVICE int first_token(int row) const { return row / kBlock * tokens; }
  // Of a row of a block, counted from there.
  PREFILL_HOST_DEVICE int token_in_block(int row) const {
    return static_cast<int>(static_cast<uint32_t>(row) * reciprocal >> 16);
  }
  // Among those of the block.
  PREFILL_HOST_DEVICE int head(int row) const {
    return row % kBlock - token_in_block(row % kBlock) * heads;
  }
  PREFILL_HOST_DEVICE int row(int token, int head) const {
    return token / tokens * kBlock + token % tokens * heads + head;
  }

  PREFILL_HOST_DEVICE bool exists(int row, int qo_len) const {
    return row % kBlock < rows() && token(row) < qo_len;
  }

  // Of a tile of so many rows, whole blocks.
  PREFILL_HOST_DEVICE int tile_tokens(int tile_m) const { return tile_m / kBlock * tokens; }
};

}  // namespace prefill
