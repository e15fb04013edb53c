// Scales, the transform of scores before the softmax, soft caps, ALiBi slopes and sinks.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"
#include "common/logits.cuh"

namespace {

using prefill::LogitScale;
using prefill::LogitTransform;
using prefill::PerHead;
using prefill::PrefillParams;
using prefill::SmallCap;

constexpr double kLog2e = 1.4426950408889634;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Three roundings to float lie between the parts and their product.
constexpr double kTolerance = 3 * 0x1p-24;

void check_scale(float scale) {
  const LogitScale parts = LogitScale::of(scale);
  CHECK(parts.multiplier > 0.f && std::isfinite(parts.multiplier), "scale " << scale);
  CHECK_EQ(parts.factor, scale > 0.f ? 1.f : (scale < 0.f ? -1.f : 0.f), "scale " << scale);
  for (float score : {0.f, 1.f, -1.f, 0.37f, -20.5f, 64000.f, -64000.f}) {
    const float logit = (score * parts.factor) * parts.multiplier;
    const double expected = double{score} * scale * kLog2e;
    if (std::abs(expected) > std::numeric_limits<float>::max()) {
      CHECK(std::isinf(logit) && (logit > 0) == (expected > 0), scale << " * " << score);
    } else {
      // Below the normal range what counts is the distance to the next float.
      const double smallest = std::numeric_limits<float>::denorm_min();
      const double scale_error = std::abs(double{score}) * smallest;
      CHECK_NEAR(logit, expected, kTolerance * std::abs(expected) + scale_error + smallest,
                 scale << " * " << score);
    }
  }
}

void check_scales() {
  for (float scale :
       {1.f, 0.125f, 0.0883883476f, 3.f, 1e-10f, 1e10f, 1e-38f, 1e38f, 1e-42f,
        std::numeric_limits<float>::min(), std::numeric_limits<float>::denorm_min()}) {
    check_scale(scale);
    check_scale(-scale);
  }
  check_scale(0.f);
  check_scale(-0.f);
}

void check_per_head() {
  const float values[] = {2.f, 3.f, 5.f, 7.f, 11.f, 13.f};
  for (int head = 0; head < 3; ++head) {
    CHECK_EQ((PerHead{nullptr, 1}.at(head, 17.f)), 17.f);
    CHECK_EQ((PerHead{values, 0}.at(head, 17.f)), 2.f);
    CHECK_EQ((PerHead{values, 1}.at(head, 17.f)), values[head]);
    CHECK_EQ((PerHead{values, 2}.at(head, 17.f)), values[2 * head]);
    CHECK_EQ((PerHead{values + 5, -1}.at(head, 17.f)), values[5 - head]);
  }
}

// Which scale goes by which head, and which of them make the logit.
void check_params() {
  const float scale_q[] = {2.f, -3.f, 5.f, 7.f};
  const float scale_k[] = {11.f, 13.f};
  const float scale_v[] = {17.f, 19.f};
  PrefillParams params{};
  params.sm_scale = 0.5f;
  params.v_scale = 23.f;
  CHECK_EQ(LogitTransform::of(params, 3, 1).multiplier, LogitScale::of(0.5f).multiplier);
  CHECK_EQ(prefill::value_scale(params, 1), 23.f);

  params.scale_q = {scale_q, 1};
  params.scale_k = {scale_k, 1};
  params.scale_v = {scale_v, 1};
  for (int head = 0; head < 4; ++head) {
    const int kv_head = head / 2;
    const LogitScale expected = LogitScale::of(0.5f * scale_q[head] * scale_k[kv_head]);
    const LogitTransform actual = LogitTransform::of(params, head, kv_head);
    CHECK_EQ(actual.gain, expected.factor, "head " << head);
    CHECK_EQ(actual.multiplier, expected.multiplier, "head " << head);
    CHECK_EQ(actual.slope, 0.f, "head " << head);
    CHECK_EQ(actual.is_idle(), expected.factor == 1.f, "head " << head);
    CHECK_EQ(prefill::value_scale(params, kv_head), 23.f * scale_v[kv_head]);
  }
}

// What cap_scores takes.
float capped(float score, float to_cap) { return prefill::tanh_of(score * to_cap); }

// What a kernel makes of a score, in base-2 units (transform_scores, without its order of sums).
double transformed(const LogitTransform& transform, bool is_capped, float score, int distance) {
  const float y = is_capped ? capped(score, transform.to_cap) : score;
  const float bias = transform.slope * static_cast<float>(distance);
  return double{transform.multiplier} * std::fma(y, transform.gain, bias);
}

// Against the contract in double precision. The tanh is right to 2^-16.2, and a few roundings come
// on top. The error is relative to the terms, which may cancel.
void check_transforms() {
  const float slopes[] = {0.5f, -0.25f, 3.f};
  for (float scale : {0.125f, -0.125f, 0.f, 1.f, 1e-10f, 1e10f}) {
    for (float cap : {0.f, 1e-3f, 1.f, 30.f, 1e6f, 1e30f}) {
      for (bool has_alibi : {false, true}) {
        PrefillParams params{};
        params.num_qo_heads = 3;
        params.sm_scale = scale;
        params.soft_cap = cap;
        params.has_alibi = has_alibi;
        params.alibi_slopes = {slopes + 2, -1};
        for (int head = 0; head < 3; ++head) {
          const LogitTransform transform = LogitTransform::of(params, head, 0);
          CHECK_EQ(transform.is_idle(), cap == 0.f && !has_alibi && scale > 0.f,
                   "scale " << scale << ", cap " << cap);
          for (float score : {0.f, 1.f, -1.f, 0.37f, -20.5f, 64000.f, -64000.f}) {
            for (int distance : {0, -1, -100, 77, -(1 << 30)}) {
              double logit = double{score} * scale;
              if (cap > 0.f) logit = cap * std::tanh(logit / cap);
              const double bias = has_alibi ? double{slopes[2 - head]} * distance : 0.;
              const double expected = (logit + bias) * kLog2e;
              const double size = (std::abs(logit) + std::abs(bias)) * kLog2e;
              // Scores over a cap may be subnormal.
              const double smallest = std::numeric_limits<float>::denorm_min();
              const double rounding = 4 * smallest * (1. + cap) * (1. + std::abs(score));
              CHECK_NEAR(transformed(transform, cap > 0.f, score, distance), expected,
                         0x1p-16 * size + rounding,
                         "scale " << scale << ", cap " << cap << ", score " << score
                                  << ", distance " << distance << ", head " << head);
            }
          }
        }
      }
    }
  }
}

// No finite score may become NaN, whatever the scale and the cap.
void check_extreme_caps() {
  for (float scale : {1e-38f, 1.f, 1e38f, -1e38f}) {
    for (float cap : {std::numeric_limits<float>::min(), 1.f, std::numeric_limits<float>::max()}) {
      PrefillParams params{};
      params.sm_scale = scale;
      params.soft_cap = cap;
      const LogitTransform transform = LogitTransform::of(params, 0, 0);
      CHECK_EQ(transformed(transform, true, 0.f, 0), 0., "scale " << scale << ", cap " << cap);
      for (float score : {1e-30f, -1.f, 3e38f}) {
        const double logit = transformed(transform, true, score, 0);
        CHECK(!std::isnan(logit), "scale " << scale << ", cap " << cap << ", score " << score);
      }
    }
  }
}

template <class Tanh>
void check_tanh(Tanh tanh, float limit, double tolerance) {
  double worst = 0.;
  const auto check = [&](float x) {
    worst = std::max(worst, std::abs(tanh(x) / std::tanh(double{x} * prefill::kCapUnit) - 1.));
    CHECK_EQ(tanh(-x), -tanh(x), x);
  };
  for (int i = 1; i <= 80000; ++i) check(static_cast<float>(i) / 80001 * limit);
  for (float x = 0x1p-100f; x < limit; x *= 1.37f) check(x);
  CHECK(worst < tolerance, "relative error " << worst << " up to " << limit);
  CHECK_EQ(tanh(0.f), 0.f);
}

void check_tanhs() {
  check_tanh(prefill::tanh_of, 40.f, 0x1.bcp-17);
  check_tanh(prefill::tanh_of_small, 2.f, 0x1.bcp-17);
  for (float large : {40.f, 1e30f, kInfinity}) {
    CHECK_NEAR(prefill::tanh_of(large), 1., 0x1p-20, large);
    CHECK_NEAR(prefill::tanh_of(-large), -1., 0x1p-20, large);
  }
  CHECK(std::isnan(prefill::tanh_of(kNan)));
}

// Below its bound the short form of a cap is right to 2^-16.2 and a rounding of the anchor; where
// its coefficients would leave float's range nothing is below.
void check_small_caps() {
  for (float scale : {0.125f, -0.125f, 1.f, 1e-10f, 1e10f}) {
    for (float cap : {1e-3f, 1.f, 30.f, 1e6f, 1e30f}) {
      PrefillParams params{};
      params.sm_scale = scale;
      params.soft_cap = cap;
      const SmallCap small = SmallCap::of(LogitTransform::of(params, 0, 0));
      const double ratio = std::abs(double{scale} / cap);
      const bool in_range = ratio > 0x1p-20 && ratio < 0x1p20 && std::abs(scale) < 0x1p39;
      CHECK_EQ(small.bound > 0.f, in_range, "scale " << scale << ", cap " << cap);
      if (!in_range) continue;
      CHECK_NEAR(double{small.bound} * ratio, 0.43, 1e-6, "scale " << scale << ", cap " << cap);
      for (int i = -1000; i <= 1000; ++i) {
        const float score = static_cast<float>(i) / 1000.f * small.bound;
        const double expected = cap * std::tanh(double{score} * scale / cap) * double{kLog2e};
        CHECK_NEAR(small.exponent(score, 0.f), expected, 0x1.bcp-17 * std::abs(expected),
                   "scale " << scale << ", cap " << cap << ", score " << score);
        CHECK_EQ(small.exponent(score, 3.f, 0.f), small.exponent(score, 3.f), score);
      }
    }
  }
  PrefillParams params{};  // a scale of 0
  params.soft_cap = 30.f;
  CHECK_EQ(SmallCap::of(LogitTransform::of(params, 0, 0)).bound, 0.f);
}

// The rule for the heads of powers of two, and that others interleave with twice as many.
void check_slopes() {
  for (int num_heads = 1; num_heads <= 200; ++num_heads) {
    const int n = 1 << static_cast<int>(std::log2(num_heads) + 1e-9);
    for (int head = 0; head < num_heads; ++head) {
      const double k = head < n ? head + 1 : head - n + 0.5;
      const double expected = std::exp2(-8. * k / n);
      CHECK_NEAR(prefill::alibi_rule(head, num_heads), expected, 0x1p-22 * expected,
                 "head " << head << " of " << num_heads);
    }
  }
}

void check_sinks() {
  const float sinks[] = {0.5f, -3.f, kInfinity};
  PrefillParams params{};
  CHECK_EQ(prefill::sink_logit(params, 1), -kInfinity);
  params.sinks = {sinks, 1};
  CHECK_EQ(prefill::sink_logit(params, 1), -3.f * static_cast<float>(kLog2e));
  CHECK_EQ(prefill::sink_logit(params, 2), kInfinity);
  params.sinks = {sinks, 0};
  CHECK_EQ(prefill::sink_logit(params, 2), 0.5f * static_cast<float>(kLog2e));
}

}  // namespace

int main() {
  check_scales();
  check_per_head();
  check_params();
  check_transforms();
  check_extreme_caps();
  check_tanhs();
  check_small_caps();
  check_slopes();
  check_sinks();
  return prefill::test::result();
}
