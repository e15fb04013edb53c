// Which steps of a row tile keep a running maximum, and which take the maximum so far as the anchor
// of their weights (README.md). Host and device, and tested on the host.
#pragma once

#include <cmath>

#include "common/mask.cuh"

namespace prefill::fa3 {

// Rows of up to so many keys, in whole KV tiles, have no anchors if no causal bound runs through
// their keys.
inline constexpr int kShortRow = 640;

// Whether all steps of a row tile had better keep a running maximum. The fewer keys, the more the
// weight of the largest counts, which is exact relative to itself. Under a causal bound it is most
// often among the nearest keys, which anchors come from: exact enough for 16 bits, while parts may
// be written as float32.
PREFILL_HOST_DEVICE bool needs_care(BandMask const& mask, KvTileOrder const& order, int tile_n,
                                    bool is_custom, bool is_whole, float value_scale) {
  const bool has_nearest =
      mask.window_right == 0 && order.first < order.end && !is_custom && is_whole;
  const bool is_short = order.count * tile_n <= kShortRow && !has_nearest;
  // Over a sum of up to 2^40 a smaller value scale might vanish.
  return is_short || !(fabsf(value_scale) >= 0x1p-80f);
}

// How many steps keep a running maximum elsewhere. Anchors come from the keys under a mask, which
// are the nearest to the rows, and one tile more.
PREFILL_HOST_DEVICE int num_exact_steps(KvTileOrder const& order) {
  const int num_masked = order.num_masked > 1 ? order.num_masked : 1;
  return num_masked + 1 < order.count ? num_masked + 1 : order.count;
}

}  // namespace prefill::fa3
