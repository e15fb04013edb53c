// Writes the log-sum-exp of the rows that a thread holds, sinks included. Shared by all kernels.
#pragma once

#include "common/online_softmax.cuh"
#include "common/params.h"

namespace prefill {

// `coordinates` gives each accumulator's (row, column) within the tile; the thread of a quad that
// holds column 0 writes.
template <class Softmax, class Coordinates>
CUTE_DEVICE void store_lse(const Results& to, Softmax const& softmax, bool with_care,
                           Coordinates const& coordinates, int head, float sink, int first_row) {
  using namespace cute;
  if (to.lse == nullptr || get<1>(coordinates(_0{}, _0{})) != 0) return;
  float* head_lse = to.lse + head * to.lse_head_stride;
  CUTE_UNROLL
  for (int r = 0; r < Softmax::kRows; ++r) {
    const int row = first_row + static_cast<int>(get<0>(coordinates(r, _0{})));
    if (row < to.qo_len) {
      head_lse[row * to.lse_token_stride] = softmax.row_lse(r, with_care, sink) * to.lse_scale;
    }
  }
}

}  // namespace prefill
