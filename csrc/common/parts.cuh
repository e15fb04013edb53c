// Writes parts of rows, which combine.h merges: outputs in float32, and their log-sum-exp. Shared
// by all kernels.
#pragma once

#include "common/fragment.cuh"
#include "common/online_softmax.cuh"
#include "common/params.h"

namespace prefill {

// `coordinates` gives each accumulator's (row, column) within the tile; the thread of a quad that
// holds column 0 writes. `first_part` is the place of the tile's first row in SplitKv. Rows without
// a query are written too: nobody reads them.
template <class Softmax, class Coordinates>
CUTE_DEVICE void store_part_lse(SplitKv const& split, Softmax const& softmax, bool with_care,
                                Coordinates const& coordinates, int first_part) {
  using namespace cute;
  if (get<1>(coordinates(_0{}, _0{})) != 0) return;
  CUTE_UNROLL
  for (int r = 0; r < Softmax::kRows; ++r) {
    const int row = first_part + static_cast<int>(get<0>(coordinates(r, _0{})));
    split.lse[row] = softmax.part_lse(r, with_care);
  }
}

// The outputs, as a (rows, columns) view of accumulators. Columns go in pairs of neighbours, so
// that a quad writes whole 32-byte sectors. A warp whose first row has no query writes none.
template <class TileShape, class TiledMma, class Outputs>
CUTE_DEVICE void store_part_rows(Results const& results, TiledMma const& tiled_mma, int thread,
                                 int first_row, int first_part, Outputs const& outputs) {
  using namespace cute;
  constexpr int kColumns = size<1>(TileShape{});
  const auto warp_first = element_coordinates<TileShape>(tiled_mma, thread / 32 * 32)(_0{}, _0{});
  const int warp_row = static_cast<int>(get<0>(warp_first));
  if (results.rows.token(first_row + warp_row) >= results.qo_len) return;
  const auto first = element_coordinates<TileShape>(tiled_mma, thread)(_0{}, _0{});
  const auto offsets = element_offsets<TileShape>(tiled_mma);
  float* to = results.split.out + int64_t{first_part + static_cast<int>(get<0>(first))} * kColumns +
              static_cast<int>(get<1>(first));
  CUTE_UNROLL
  for (int r = 0; r < size<0>(outputs); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(outputs); c += 2) {
      const auto offset = offsets(r, c);
      *reinterpret_cast<float2*>(to + static_cast<int>(get<0>(offset)) * kColumns +
                                 static_cast<int>(get<1>(offset))) =
          make_float2(outputs(r, c), outputs(r, c + 1));
    }
  }
}

}  // namespace prefill
