// Which KV tiles a row tile takes, and in which order.
#pragma once

#include "common/anchors.cuh"
#include "common/mask.cuh"
#include "common/mask_walk.cuh"
#include "common/params.h"

namespace prefill::fa2 {

// The KV tiles of one row tile in a plain kernel: those under a mask come first, then the lowest.
struct PlainKvTiles {
  static constexpr bool is_custom = false;
  KvTileOrder order;
  int num_exact;  // steps that keep a running maximum

  // No anchors, and nothing to be done again.
  PREFILL_HOST_DEVICE bool is_careful() const { return num_exact == order.count; }

  template <int kN>
  PREFILL_HOST_DEVICE bool needs_mask(int step, int) const {
    return step < order.num_masked;
  }

  // The first one, and that of a step after the one with another. -1: there is none.
  PREFILL_HOST_DEVICE int first() const { return next(0, 0); }
  PREFILL_HOST_DEVICE int next(int step, int) const {
    return step < order.count ? order.tile(step) : -1;
  }
};

// In a general kernel, from the last one down.
struct GeneralKvTiles {
  KvTileRange band;
  RowTileMask mask;  // instead, under a custom mask
  bool is_custom;

  PREFILL_HOST_DEVICE static GeneralKvTiles of(const MaskTiles& mask, const KvTileRange& band,
                                               int m_tile) {
    if (mask.mixed == nullptr) return {band, {}, false};
    return {band, RowTileMask::of(mask, m_tile, band.begin, band.end), true};
  }

  template <int kN>
  PREFILL_HOST_DEVICE bool needs_mask(int, int tile) const {
    return is_custom ? mask.is_mixed(tile) : band.needs_mask<kN>(tile);
  }

  PREFILL_HOST_DEVICE int first() const { return next(0, band.end); }
  PREFILL_HOST_DEVICE int next(int, int before) const {
    if (is_custom) return mask.last_before(before);
    return before > band.begin ? before - 1 : -1;
  }
};

}  // namespace prefill::fa2
