// Which keys a query row sees, and which KV tiles a tile of rows needs. Shared by all kernels, and
// brute-forced against naive loops on the host.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/params.h"

namespace prefill {

// The order in which a row tile takes its KV tiles [begin, end): first those that need masking, at
// the right edge from the last one down and then at the left, then those that all rows see, lowest
// keys first.
struct KvTileOrder {
  int first;  // at the right edge, or `end`
  int end;
  int count;
  int num_masked;

  PREFILL_HOST_DEVICE bool empty() const { return count <= 0; }

  // The same from the last one down, where none needs masking at the left.
  PREFILL_HOST_DEVICE KvTileOrder falling() const {
    KvTileOrder order = *this;
    if (num_masked == end - first) order.first = end - count;
    return order;
  }

  PREFILL_HOST_DEVICE int tile(int index) const {
    return first + index < end ? end - 1 - index : first + index - count;
  }
};

// KV tiles [begin, end) hold every key that a tile of rows sees. Keys [full_begin, full_end) are
// seen by all of its rows, so a KV tile within them needs no masking.
struct KvTileRange {
  int begin;
  int end;
  int full_begin;
  int full_end;

  PREFILL_HOST_DEVICE bool empty() const { return begin >= end; }

  // One of `count` parts.
  PREFILL_HOST_DEVICE KvTileRange part(int index, int count) const {
    if (empty()) return *this;
    const auto tiles = static_cast<uint32_t>(end - begin), parts = static_cast<uint32_t>(count);
    const int least = static_cast<int>(tiles / parts), longer = static_cast<int>(tiles % parts);
    const int first = begin + index * least + (index < longer ? index : longer);
    return {first, first + least + (index < longer ? 1 : 0), full_begin, full_end};
  }

  template <int kTileN>
  PREFILL_HOST_DEVICE bool needs_mask(int tile) const {
    return tile * kTileN < full_begin || (tile + 1) * kTileN > full_end;
  }

  template <int kTileN>
  PREFILL_HOST_DEVICE KvTileOrder masked_first() const {
    if (empty()) return {0, 0, 0, 0};
    const auto clamp = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
    const int right = clamp(full_end / kTileN, begin, end);
    const int left = clamp((full_begin + kTileN - 1) / kTileN, begin, right);
    const int num_masked = (end - right) + (left - begin);
    return {right, end, end - begin, num_masked};
  }
};

// A band around the diagonal that is aligned to the bottom right corner: full, causal and window
// attention are all of this kind. Rows that the caller passes lie in [0, qo_len).
struct BandMask {
  int qo_len;
  int kv_len;
  int window_left;   // 0..kv_len, which bounds nothing
  int window_right;  // 0..qo_len, likewise

  PREFILL_HOST_DEVICE static BandMask of(const PrefillParams& params) {
    return {params.qo_len, params.kv_len, params.window_left, params.window_right};
  }

  PREFILL_HOST_DEVICE int position(int row) const { return row + kv_len - qo_len; }

  // Row `row` sees keys [row_begin, row_end); none when row_begin >= row_end.
  PREFILL_HOST_DEVICE int row_begin(int row) const {
    const int begin = position(row) - window_left;
    return begin > 0 ? begin : 0;
  }

  PREFILL_HOST_DEVICE int row_end(int row) const {
    const int end = position(row) + window_right + 1;
    return end < 0 ? 0 : end < kv_len ? end : kv_len;
  }

  // The KV tiles of rows [row, row + tile_m); rows from qo_len on do not count. None of the rows
  // sees a key only where the last one ends at key 0, and then the first one begins there too.
  PREFILL_HOST_DEVICE KvTileRange kv_tiles(int row, int tile_m, int tile_n) const {
    const int last = row + tile_m < qo_len ? row + tile_m - 1 : qo_len - 1;
    return {row_begin(row) / tile_n, (row_end(last) + tile_n - 1) / tile_n, row_begin(last),
            row_end(row)};
  }

  // What of a row tile's order rows [row, row + tile_m), some of it, take: without the first KV
  // tile where none of them sees it, and, if there is no bound on the left, with masks where they
  // need them. Something is always left.
  template <int kTileN>
  PREFILL_HOST_DEVICE KvTileOrder narrowed(KvTileOrder order, int row, int tile_m) const {
    const KvTileRange own = kv_tiles(row < qo_len ? row : qo_len - 1, tile_m, kTileN);
    if (own.end < order.end && order.first < order.end && order.count > 1) {
      --order.end;
      --order.count;
      --order.num_masked;
    }
    const int num_masked = order.end - own.full_end / kTileN;
    if (window_left >= kv_len - 1 && num_masked < order.num_masked) {
      order.num_masked = num_masked > 0 ? num_masked : 0;
    }
    return order;
  }
};

// Of the bits of 32 keys, those of the columns that thread `lane` of a quad holds: 2 lane and
// 2 lane + 1 of every 8. Two bits of each byte are brought together.
PREFILL_HOST_DEVICE uint32_t quad_columns(uint32_t keys, int lane) {
  return (keys >> 2 * lane & 0x03030303u) * 0x01041040u >> 24;
}

}  // namespace prefill
