// How a raw score q . k becomes a logit in base-2 units. Shared by all kernels.
#pragma once

#include <cmath>

#include "common/host_device.h"
#include "common/params.h"

namespace prefill {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMaxFloat = 3.4028235e38f;

// Capped scores are worked out in units of kCapUnit caps: so the bound of what is small is 2, which
// the bits of a float tell.
constexpr float kCapUnit = 0.375f;

// logit * log2(e) = (score * factor) * multiplier with multiplier > 0, as the softmax takes the
// maximum of scores before it scales them. A factor other than 1 stands for a negative or zero
// scale.
struct LogitScale {
  float factor;
  float multiplier;

  PREFILL_HOST_DEVICE static LogitScale of(float scale) {
    const float magnitude = scale < 0.f ? -scale : scale;
    if (scale == 0.f || !(magnitude <= kMaxFloat)) return {scale, 1.f};  // masks come after NaN
    // An infinite multiplier would make NaN of zero scores.
    const float multiplier = magnitude * kLog2e <= kMaxFloat ? magnitude * kLog2e : kMaxFloat;
    return {scale < 0.f ? -1.f : 1.f, multiplier};
  }
};

// What logits are multiplied by before anything else.
PREFILL_HOST_DEVICE float logit_scale(const PrefillParams& params, int head, int kv_head) {
  return params.sm_scale * params.scale_q.at(head, 1.f) * params.scale_k.at(kv_head, 1.f);
}

PREFILL_HOST_DEVICE float value_scale(const PrefillParams& params, int kv_head) {
  return params.v_scale * params.scale_v.at(kv_head, 1.f);
}

// The nearer of x and +-bound to 0; NaN stays NaN.
PREFILL_HOST_DEVICE float clamp_magnitude(float x, float bound) {
#if defined(__CUDA_ARCH__)
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-bound));
  return x;
#else
  return x > bound ? bound : x < -bound ? -bound : x;
#endif
}

// A head's slope of ALiBi by the paper's rule. With n the largest power of two up to num_heads:
// 2^(-8k/n) for heads k = 1..n, 2^(-4k/n) with k = 1, 3, 5, ... for the others.
PREFILL_HOST_DEVICE float alibi_rule(int head, int num_heads) {
  int n = 1;
  while (n <= num_heads / 2) n *= 2;
  const int eighths = head < n ? 2 * (head + 1) : 2 * (head - n) + 1;
  return exp2f(static_cast<float>(-4 * eighths) / static_cast<float>(n));
}

// A head's sink in base-2 units; -inf, which adds nothing to a sum of weights, where it has none.
PREFILL_HOST_DEVICE float sink_logit(const PrefillParams& params, int head) {
  return params.sinks.at(head, -INFINITY) * kLog2e;
}

// What the softmax takes of a pair of row and key, and how to scale it:
//   logit * log2(e) = multiplier * (gain * y + slope * (key - position of the row))
// where y is the score, or with a soft cap tanh(kCapUnit * score * to_cap). It is applied before
// masks, so that NaN and infinities of keys that are not seen vanish.
struct LogitTransform {
  float multiplier;  // > 0
  float gain;
  float to_cap;
  float slope;
  bool is_capped;
  bool is_affine;  // gain and slope do something

  // Scores go to the softmax as they are.
  PREFILL_HOST_DEVICE bool is_idle() const { return !is_capped && !is_affine; }

  PREFILL_HOST_DEVICE static LogitTransform of_scale(float scale) {
    const LogitScale parts = LogitScale::of(scale);
    return {parts.multiplier, parts.factor, 0.f, 0.f, false, parts.factor != 1.f};
  }

  PREFILL_HOST_DEVICE static LogitTransform of(const PrefillParams& params, int head, int kv_head) {
    const float scale = logit_scale(params, head, kv_head);
    LogitTransform transform = of_scale(scale);
    if (params.soft_cap > 0.f) {
      // Infinities that finite factors do not have would make NaN of zero scores.
      const float cap = fminf(params.soft_cap, kMaxFloat / kLog2e);
      const float to_cap = scale / cap * (1.f / kCapUnit);
      const float bounded = clamp_magnitude(to_cap, kMaxFloat);
      transform = {cap * kLog2e, 1.f,  fabsf(scale) <= kMaxFloat ? bounded : to_cap,
                   0.f,          true, false};
    }
    if (params.has_alibi) {
      const float slope = params.alibi_slopes.data == nullptr
                              ? alibi_rule(head, params.num_qo_heads)
                              : params.alibi_slopes.at(head, 0.f);
      transform.gain *= transform.multiplier;
      transform.multiplier = 1.f;
      transform.slope = slope * kLog2e;
      transform.is_affine = true;
    }
    return transform;
  }
};

PREFILL_HOST_DEVICE float exp2_approx(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// The LSE of keys and a sink, both in base 2; -inf is none.
PREFILL_HOST_DEVICE float lse_with_sink(float keys, float sink) {
  if (sink == -INFINITY) return keys;
  if (keys == -INFINITY || sink == INFINITY) return sink;
  const float larger = fmaxf(keys, sink), difference = -fabsf(keys - sink);
  return larger + log2f(1.f + exp2_approx(difference));
}

PREFILL_HOST_DEVICE float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

// tanh(kCapUnit x) for |x| < 2, relatively right to 2^-16.2 and more so the smaller x, without a
// division.
PREFILL_HOST_DEVICE float tanh_of_small(float x) {
  const float z = x * x;
  const float quotient = fmaf(fmaf(-3.7608494e-5f, z, 9.4938546e-4f), z, -1.7553225e-2f);
  return x * fmaf(quotient, z, kCapUnit);
}

// The same for any x, with the same bits below 2; from there right to 2^-18.7: y N(y^2) / D(y^2),
// fitted to the least relative error up to where tanh is 1 within that. 1 - 2 / (1 + exp(2y)) is
// shorter: so much that ptxas makes a selection of the branch, for many x at a time, and spills.
PREFILL_HOST_DEVICE float tanh_of(float x) {
  if (fabsf(x) < 2.f) return tanh_of_small(x);
  const float y = clamp_magnitude(kCapUnit * x, 7.89f);  // where the fit is 1
  const float z = y * y;
  const float numerator =
      fmaf(fmaf(fmaf(3.3890071e-6f, z, 2.1536755e-3f), z, 0.12157924f), z, 0.99998168f);
  const float denominator =
      fmaf(fmaf(fmaf(1.2939762e-4f, z, 2.0482103e-2f), z, 0.45486752f), z, 1.f);
  return y * numerator * reciprocal(denominator);
}

// Capped logits of scores below a bound, the logits 0.43 of the cap: all factors in one polynomial,
// tanh(y) = y (1 + a y^2 + b y^4) relatively right to 2^-16.2 and more so the smaller y.
struct SmallCap {
  float bound;  // 0 where the coefficients would leave float's range
  float linear, cubic, quintic;

  // Of transforms without ALiBi.
  PREFILL_HOST_DEVICE static SmallCap of(const LogitTransform& transform) {
    const float to_cap = transform.to_cap * kCapUnit;
    const float squared = to_cap * to_cap;
    const float linear = to_cap * transform.multiplier;
    const bool in_range =
        fabsf(to_cap) > 0x1p-20f && fabsf(to_cap) < 0x1p20f && fabsf(linear) < 0x1p40f;
    return {in_range ? 0.43f / fabsf(to_cap) : 0.f, linear, linear * squared * -0.33261700f,
            linear * (squared * squared) * 0.12050072f};
  }

  // The logit in base-2 units less `anchor`. `zero` is one for whoever needs the result to wait.
  PREFILL_HOST_DEVICE float exponent(float score, float anchor, float zero = 0.f) const {
    const float z = fmaf(score, score, zero);
    return fmaf(score, fmaf(fmaf(quintic, z, cubic), z, linear), -anchor);
  }
};

}  // namespace prefill
