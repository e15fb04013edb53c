// Softmax over a row that arrives tile by tile: running maximum and running sum (the online
// normaliser of Milakov and Gimelshein, as FlashAttention uses it), in base 2.
#pragma once

#include <cute/tensor.hpp>

namespace prefill {

CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The four threads of a quad hold one row's columns between them.
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x + __shfl_xor_sync(0xffffffffu, x, 1);
}

template <int kRows_>
struct OnlineSoftmax {
  static constexpr int kRows = kRows_;
  using Row = cute::array<float, kRows>;

  // exp2(s c - m c) is one FFMA and one ex2, but keeps the rounding error of m c, up to 2^-24 of
  // it. The error is the same for the whole row and cancels in the quotient, as long as m c is
  // rounded alike wherever it stands (hence __fmul_rn) and 2 to its power is in range: below this
  // bound.
  static constexpr float kFusedBound = 1073741824.f;  // 2^30

  float multiplier;  // > 0: logits in base-2 units are scores times this
  Row row_max;       // of the scores seen; -inf when none
  Row row_sum;       // this thread's share, relative to row_max

  CUTE_DEVICE explicit OnlineSoftmax(float multiplier_) : multiplier(multiplier_) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Turns scores into exp2(logit - max) in place. What was summed before must be multiplied by the
  // row factors that come back.
  template <class Scores>
  CUTE_DEVICE Row step(Scores& scores) {
    using namespace cute;
    static_assert(decltype(size<0>(scores))::value == kRows);
    Row factor, offset;
    float steepness = multiplier;
    bool fused = true;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float tile_max = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) tile_max = fmaxf(tile_max, scores(r, c));
      const float previous = row_max[r];
      row_max[r] = fmaxf(previous, quad_max(tile_max));
      offset[r] = row_max[r] == -INFINITY ? 0.f : __fmul_rn(row_max[r], multiplier);
      factor[r] = exp2_approx(__fmul_rn(previous, multiplier) - offset[r]);
      fused = fused && fabsf(offset[r]) < kFusedBound;
    }
    if (!fused) {  // rare: subtract first, so that no product is rounded
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float maximum = row_max[r] == -INFINITY ? 0.f : row_max[r];
        CUTE_UNROLL
        for (int c = 0; c < size<1>(scores); ++c) {
          scores(r, c) = (scores(r, c) - maximum) * multiplier;
        }
        offset[r] = 0.f;
      }
      steepness = 1.f;
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] *= factor[r];
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), steepness, -offset[r]));
        row_sum[r] += scores(r, c);
      }
    }
    return factor;
  }

  // After the last tile: makes row_sum the whole row's sum.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) row_sum[r] = quad_sum(row_sum[r]);
  }

  // No key was seen: the sum of a row with keys is at least that of its maximum, 1 (or NaN).
  CUTE_DEVICE bool row_is_empty(int r) const { return row_sum[r] == 0.f; }

  // log2 of the sum of exp(logit); -inf for an empty row.
  CUTE_DEVICE float row_lse(int r) const {
    return row_is_empty(r) ? -INFINITY : __fmul_rn(row_max[r], multiplier) + log2f(row_sum[r]);
  }
};

// Multiplies each row of `accumulators`, a (rows, columns) view, by its factor.
template <class Accumulators, class Row>
CUTE_DEVICE void scale_rows(Accumulators& accumulators, Row const& factor) {
  CUTE_UNROLL
  for (int r = 0; r < cute::size<0>(accumulators); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(accumulators); ++c) accumulators(r, c) *= factor[r];
  }
}

// Turns weighted sums into means times `value_scale`; rows without keys become exactly zero,
// whatever the masked values were.
template <class Accumulators, class Softmax>
CUTE_DEVICE void normalise_rows(Accumulators& accumulators, Softmax const& softmax,
                                float value_scale) {
  CUTE_UNROLL
  for (int r = 0; r < cute::size<0>(accumulators); ++r) {
    const bool is_empty = softmax.row_is_empty(r);
    const float factor = value_scale / softmax.row_sum[r];
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(accumulators); ++c) {
      accumulators(r, c) = is_empty ? 0.f : accumulators(r, c) * factor;
    }
  }
}

}  // namespace prefill
