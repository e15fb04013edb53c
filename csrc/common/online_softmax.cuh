// Softmax over a row that arrives tile by tile: running maximum and running sum (the online
// normaliser of Milakov and Gimelshein, as FlashAttention uses it), in base 2.
#pragma once

#include <cute/tensor.hpp>

#include "common/logits.cuh"

namespace prefill {

// The four threads of a quad hold one row's columns between them.
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

CUTE_DEVICE float finite_or_nan(float x) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(kMaxFloat));
  return x;
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x + __shfl_xor_sync(0xffffffffu, x, 1);
}

// Weights are lifted by a power of two, kLift, where their type has little room below 1; so are
// their sums, but nothing that is told of a row.
template <int kRows_, int kLift = 0>
struct OnlineSoftmax {
  static constexpr int kRows = kRows_;
  using Row = cute::array<float, kRows>;

  // Anchored weights are relative to the row's maximal logit, rounded: exp2(s m - rn(max m)) is one
  // FFMA and one ex2. The largest weight is then 2 to the rounding error instead of 1; the quotient
  // does not care, as long as everything in a row shares the error (hence __fmul_rn: no FFMA by
  // contraction) and weights fit the 16-bit type. From this bound on rows are done with care:
  // exp2((s - max) m), relative to the unrounded product.
  static constexpr float kSteep = 4096.f;  // below it errors stay within 2^-12, less than fp16's

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

  CUTE_DEVICE static Row no_growth() {
    Row ones;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) ones[r] = 1.f;
    return ones;
  }

  // Turns scores into exp2(logit - max) in place. What was summed before must be multiplied by the
  // row factors that come back. With care in all of a row's steps or in none. There is no branch: a
  // row's maximum is found beside another's.
  template <class Scores>
  CUTE_DEVICE Row exact_step(Scores& scores, bool with_care) {
    static_assert(kLift == 0);
    Row factor;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float previous = raise_max(r, scores);
      const float maximum = row_max[r] == -INFINITY ? 0.f : row_max[r];
      const float base = with_care ? maximum : 0.f;
      // Finite, as sums are kept: so NaN comes of scores alone (anchor_held).
      const float offset = with_care ? 0.f : fmaxf(__fmul_rn(maximum, multiplier), -kMaxFloat);
      factor[r] = exp2_approx(with_care ? (previous - base) * multiplier
                                        : __fmul_rn(previous, multiplier) - offset);
      row_sum[r] = (with_care ? row_sum[r] : finite_or_nan(row_sum[r])) * factor[r];
      add_weights(r, scores,
                  [&](int, float score) { return fmaf(score - base, multiplier, -offset); });
    }
    return factor;
  }

  // What a lifted step's weights are relative to, in base-2 units, and what was summed before must
  // be multiplied by.
  struct Lifted {
    Row offset;
    Row factor;
  };

  // The same with care, lifted, in two parts: first what needs all scores, then weights a few
  // columns at a time. Only rows that are steep at this step pay for care: elsewhere the rounding
  // of the maximal logit, which all of a step's weights share, is too small to be seen.
  template <class Scores>
  CUTE_DEVICE Lifted start_lifted(Scores& scores) {
    Lifted lifted;
    Row maximum = tile_maxima(scores);
    bool any_steep = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) maximum[r] = quad_max(maximum[r]);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float previous = row_max[r];
      row_max[r] = fmaxf(previous, maximum[r]);
      maximum[r] = row_max[r] == -INFINITY ? 0.f : row_max[r];
      lifted.factor[r] = exp2_approx((previous - maximum[r]) * multiplier);
      row_sum[r] *= lifted.factor[r];
      const float offset = __fmul_rn(maximum[r], multiplier);
      lifted.offset[r] = offset - kLift;
      any_steep = any_steep || !(fabsf(offset) < kSteep);
    }
    if (__any_sync(0xffffffffu, any_steep)) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        // Others stay as they are, bit by bit: less zero.
        const bool is_steep = !(fabsf(lifted.offset[r] + kLift) < kSteep);
        const float base = is_steep ? maximum[r] : 0.f;
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(scores); ++c) scores(r, c) -= base;
        if (is_steep) lifted.offset[r] = -kLift;
      }
    }
    return lifted;
  }

  template <class Scores>
  CUTE_DEVICE void weigh_lifted(Scores& scores, Lifted const& lifted, int first, int end) {
    CUTE_UNROLL
    for (int c = first; c < end; c += 4) {
      CUTE_UNROLL
      for (int i = c; i < c + 4; ++i) {
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          scores(r, i) = exp2_approx(fmaf(scores(r, i), multiplier, -lifted.offset[r]));
        }
      }
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {  // in pairs: additions wait less for each other
        row_sum[r] += (scores(r, c) + scores(r, c + 1)) + (scores(r, c + 2) + scores(r, c + 3));
      }
    }
  }

  // Before anchored steps, and with care in none: a row that has seen NaN alone is NaN for good,
  // and told from one that has seen no key, or logits of -inf, by a maximum of +inf.
  CUTE_DEVICE void settle_nan() {
    bool any = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) any = any || row_max[r] == -INFINITY;
    if (!__any_sync(0xffffffffu, any)) return;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const bool is_nan = isnan(quad_sum(row_sum[r]));
      if (row_max[r] == -INFINITY && is_nan) row_max[r] = INFINITY;
    }
  }

  // What anchored steps take weights relative to, in base-2 units; -inf where no key was seen.
  CUTE_DEVICE float anchor(int r) const { return __fmul_rn(row_max[r], multiplier); }

  // As an exact step without care, with the maximum of the tiles before as the anchor of the
  // weights: nothing is multiplied afterwards. Rows must have seen a key; anchor_held tells in the
  // end whether it was good enough.
  template <class Scores>
  CUTE_DEVICE void anchored_step(Scores& scores) {
    anchored_step(scores, [&](int, int, float score, float anchor) {
      return fmaf(score, multiplier, -anchor);
    });
  }

  // The same of logits that `exponent` makes of scores: exponent(r, c, score, anchor) is the logit
  // in base-2 units less the row's anchor.
  template <class Scores, class Exponent>
  CUTE_DEVICE void anchored_step(Scores& scores, Exponent const& exponent) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float row_anchor = anchor(r);
      add_weights(r, scores, [&](int c, float score) { return exponent(r, c, score, row_anchor); });
    }
  }

  // False where an anchored sum may have overflowed or lost bits, where the row is steep, or where
  // the mean weight of its keys is far above the anchor's: then few keys take all, and the rounding
  // of their weights shows. Weighted sums of V may overflow before it does. A sum that is NaN has
  // held where a score is NaN or the maximum infinite, as care would not change that: in rows that
  // are not steep it comes of nothing else, once a key was seen before the anchored steps.
  CUTE_DEVICE bool anchor_held(int r, int num_keys) const {
    constexpr float kLargestMean = 256.f;
    const bool is_calm = fabsf(rounded_logit(r)) < kSteep;
    if (isnan(row_sum[r])) {
      return row_max[r] == INFINITY || (row_max[r] != -INFINITY && is_calm);
    }
    return row_sum[r] < kLargestMean * static_cast<float>(num_keys) && is_calm;
  }

  // After the last tile: makes row_sum the whole row's sum.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) row_sum[r] = quad_sum(row_sum[r]);
  }

  // No key was seen: the sum of a row with keys is at least that of its maximum, 1 or lifted (or
  // NaN).
  CUTE_DEVICE bool row_is_empty(int r) const { return row_sum[r] == 0.f; }

  // The log-sum-exp of this row's keys, for what merges parts of rows.
  CUTE_DEVICE PartLse part_lse(int r, bool with_care) const {
    if (row_is_empty(r)) return {-INFINITY, multiplier, 0.f};
    const float rounding = with_care ? 0.f : fmaf(row_max[r], multiplier, -rounded_logit(r));
    return {row_max[r], multiplier, log2f(row_sum[r]) - kLift - rounding};
  }

  // log2 of the sum of exp(logit), -inf for an empty row. A sink is a logit in base-2 units that
  // has no key; -inf is none.
  CUTE_DEVICE float row_lse(int r, bool with_care, float sink) const {
    if (row_is_empty(r)) return lse_with_sink(-INFINITY, sink);
    const float sum = log2f(row_sum[r]) - kLift;
    return lse_with_sink(with_care ? fmaf(row_max[r], multiplier, sum) : rounded_logit(r) + sum,
                         sink);
  }

  // What the weights of a row with keys and of the sink, relative to the same logit, sum up to.
  CUTE_DEVICE float sum_with(int r, bool with_care, float sink) const {
    if (sink == -INFINITY) return row_sum[r];
    const float above = with_care ? fmaf(-row_max[r], multiplier, sink) : sink - rounded_logit(r);
    return row_sum[r] + exp2_approx(above + kLift);
  }

 private:
  // Of each row's scores. In chains that do not wait for each other.
  template <class Scores>
  CUTE_DEVICE static Row tile_maxima(Scores const& scores) {
    constexpr int kColumns = decltype(cute::size<1>(scores))::value, kChains = 8;
    float maxima[kRows][kChains];
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float& chain = maxima[r][c % kChains];
        chain = c < kChains ? scores(r, c) : fmaxf(chain, scores(r, c));
      }
    }
    Row tile_max;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      tile_max[r] = maxima[r][0];
      CUTE_UNROLL
      for (int chain = 1; chain < kChains; ++chain) {
        tile_max[r] = fmaxf(tile_max[r], maxima[r][chain]);
      }
    }
    return tile_max;
  }

  // Answers what the maximum was before.
  template <class Scores>
  CUTE_DEVICE float raise_max(int r, Scores const& scores) {
    using namespace cute;
    static_assert(decltype(size<0>(scores))::value == kRows);
    float tile_max = scores(r, 0);
    CUTE_UNROLL
    for (int c = 1; c < size<1>(scores); ++c) tile_max = fmaxf(tile_max, scores(r, c));
    const float previous = row_max[r];
    row_max[r] = fmaxf(previous, quad_max(tile_max));
    return previous;
  }

  // The row's scores become exp2(exponent(column, score)), and are added up.
  template <class Scores, class Exponent>
  CUTE_DEVICE void add_weights(int r, Scores& scores, Exponent const& exponent) {
    using namespace cute;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = exp2_approx(exponent(c, scores(r, c)));
      row_sum[r] += scores(r, c);
    }
  }

  // 0 for a row that has seen no key, so that its weights come out as exp2(-inf).
  CUTE_DEVICE float rounded_logit(int r) const {
    return row_max[r] == -INFINITY ? 0.f : __fmul_rn(row_max[r], multiplier);
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

// Turns weighted sums into means times `value_scale`, with the sink's weight among those that are
// divided by; rows without keys become exactly zero, whatever the masked values were. One number a
// row: -0 stands for a row without keys.
template <int kRows>
struct Normaliser {
  cute::array<float, kRows> factor;

  Normaliser() = default;

  template <class Softmax>
  CUTE_DEVICE Normaliser(Softmax const& softmax, bool with_care, float sink, float value_scale) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      factor[r] = softmax.row_is_empty(r)
                      ? -0.f
                      : __fdividef(value_scale, softmax.sum_with(r, with_care, sink)) + 0.f;
    }
  }

  template <class Accumulators>
  CUTE_DEVICE void apply(Accumulators& accumulators) const {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(accumulators); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(accumulators); ++c) accumulators(r, c) *= factor[r];
      if (__float_as_uint(factor[r]) == 0x80000000u) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(accumulators); ++c) accumulators(r, c) = 0.f;
      }
    }
  }
};

}  // namespace prefill
