// Which KV tiles a row tile takes, and in which order.
#pragma once

#include "common/mask.cuh"
#include "common/mask_walk.cuh"
#include "common/params.h"

namespace prefill::fa2 {

// The KV tiles of one row tile, from the last to the first: under causal bounds, those that need
// masking come first.
struct KvTiles {
  KvTileRange band;
  RowTileMask mask;  // instead, under a custom mask
  bool is_custom;

  PREFILL_HOST_DEVICE static KvTiles of_band(const KvTileRange& band) { return {band, {}, false}; }

  PREFILL_HOST_DEVICE static KvTiles of(const MaskTiles& mask, const KvTileRange& band,
                                        int m_tile) {
    if (mask.mixed == nullptr) return of_band(band);
    return {band, RowTileMask::of(mask, m_tile, band.begin, band.end), true};
  }

  template <int kN>
  PREFILL_HOST_DEVICE bool needs_mask(int tile) const {
    return is_custom ? mask.is_mixed(tile) : band.needs_mask<kN>(tile);
  }

  // -1: there is none.
  PREFILL_HOST_DEVICE int before(int tile) const {
    if (is_custom) return mask.last_before(tile);
    return tile > band.begin ? tile - 1 : -1;
  }
  PREFILL_HOST_DEVICE int last() const { return before(band.end); }
};

}  // namespace prefill::fa2
