// Scores in registers on their way to logits: soft cap, ALiBi and scales that are not positive
// (LogitTransform), alone and as part of the softmax.
#pragma once

#include <cute/tensor.hpp>

#include "common/logits.cuh"
#include "common/mask.cuh"
#include "common/online_softmax.cuh"

namespace prefill {

template <class Scores>
CUTE_DEVICE void scale_scores(Scores& scores, float factor) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(scores); ++i) scores(i) *= factor;
}

// What soft caps make of scores, less the cap as a factor. Most are small, with a polynomial that
// costs a third of what is right everywhere, which a warp turns to as a whole; small ones come out
// the same either way.
template <class Scores>
CUTE_DEVICE void cap_scores(Scores& scores, float to_cap) {
  using namespace cute;
  uint32_t bits[2] = {0, 0};  // chains that do not wait for each other
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) {
    scores(i) *= to_cap;
    bits[i / 2 % 2] |= __float_as_uint(scores(i));
  }
  if (__any_sync(0xffffffffu, (bits[0] | bits[1]) >> 30 & 1)) {  // 2 or more, or NaN
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of(scores(i));
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of_small(scores(i));
  }
}

// What ALiBi adds to a row's score of `key`.
CUTE_DEVICE float alibi_bias(LogitTransform const& transform, BandMask const& band, int row,
                             int key) {
  const int position = band.position(min(row, band.qo_len - 1));
  return transform.slope * static_cast<float>(key - position);
}

// Makes of scores what the softmax takes. `row` and `key` are those of the thread's first element,
// and `offsets` what the others add to that (element_offsets).
template <class Scores, class Offsets>
CUTE_DEVICE void transform_scores(Scores& scores, Offsets const& offsets,
                                  LogitTransform const& transform, BandMask const& band, int row,
                                  int key) {
  using namespace cute;
  if (transform.is_capped) cap_scores(scores, transform.to_cap);
  if (!transform.is_affine) return;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const float first =
        alibi_bias(transform, band, row + static_cast<int>(get<0>(offsets(r, _0{}))), key);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      const float bias = fmaf(transform.slope, static_cast<float>(get<1>(offsets(_0{}, c))), first);
      scores(r, c) = fmaf(scores(r, c), transform.gain, bias);
    }
  }
}

// Whether all of the warp's scores are below `bound`; NaN counts as below.
template <class Scores>
CUTE_DEVICE bool all_below(Scores const& scores, float bound) {
  using namespace cute;
  float largest[4] = {0.f, 0.f, 0.f, 0.f};  // chains that do not wait for each other
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) largest[i % 4] = fmaxf(largest[i % 4], fabsf(scores(i)));
  const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  return __all_sync(0xffffffffu, all < bound);
}

// The anchored step of scores below the cap's bound. ptxas takes the first instruction of every
// polynomial forward, and is left with registers for one after the other. What holds those of a
// batch back is a zero that comes of the weights two batches before.
template <class Softmax, class Scores>
CUTE_DEVICE void anchored_capped_step(Softmax& softmax, Scores& scores, SmallCap const& cap) {
  using namespace cute;
  constexpr int kBatch = 4;
  constexpr int kColumns = decltype(size<1>(scores))::value;
  static_assert(kColumns % kBatch == 0);
  float zero = 0.f, next_zero = 0.f;
  CUTE_UNROLL
  for (int first = 0; first < kColumns; first += kBatch) {
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      CUTE_UNROLL
      for (int c = first; c < first + kBatch; ++c) {
        scores(r, c) = exp2_approx(cap.exponent(scores(r, c), softmax.anchor(r), zero));
        softmax.row_sum[r] += scores(r, c);
      }
      zero = next_zero;
      next_zero = fminf(scores(r, first), 0.f);
    }
  }
}

// transform_scores and the softmax's anchored step in one, so that arithmetic of the one fills the
// time in which the other waits for exp2.
template <class Softmax, class Scores, class Offsets>
CUTE_DEVICE void transform_and_weigh(Softmax& softmax, Scores& scores, Offsets const& offsets,
                                     LogitTransform const& transform, BandMask const& band, int row,
                                     int key) {
  using namespace cute;
  if (transform.is_affine) {
    if (transform.is_capped) cap_scores(scores, transform.to_cap);
    const float gain = transform.gain * transform.multiplier;
    const float slope = transform.slope * transform.multiplier;
    softmax.anchored_step(scores, [&](int r, int c, float score, float anchor) {
      const float first =
          alibi_bias(transform, band, row + static_cast<int>(get<0>(offsets(r, _0{}))), key);
      const float bias = fmaf(slope, static_cast<float>(get<1>(offsets(_0{}, c))),
                              fmaf(first, transform.multiplier, -anchor));
      return fmaf(score, gain, bias);
    });
    return;
  }
  if (transform.is_capped) {
    const SmallCap cap = SmallCap::of(transform);
    if (all_below(scores, cap.bound)) {
      anchored_capped_step(softmax, scores, cap);
      return;
    }
    cap_scores(scores, transform.to_cap);
  }
  softmax.anchored_step(scores);
}

}  // namespace prefill
