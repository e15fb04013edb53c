// LogitScale and the scales per head.
#include <cmath>
#include <limits>

#include "check.h"
#include "common/logits.cuh"

namespace {

using prefill::HeadScale;
using prefill::LogitScale;
using prefill::PrefillParams;

constexpr double kLog2e = 1.4426950408889634;

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

void check_head_scales() {
  const float values[] = {2.f, 3.f, 5.f, 7.f, 11.f, 13.f};
  for (int head = 0; head < 3; ++head) {
    CHECK_EQ(prefill::head_scale({nullptr, 1}, head), 1.f);
    CHECK_EQ(prefill::head_scale({values, 0}, head), 2.f);
    CHECK_EQ(prefill::head_scale({values, 1}, head), values[head]);
    CHECK_EQ(prefill::head_scale({values, 2}, head), values[2 * head]);
    CHECK_EQ(prefill::head_scale({values + 5, -1}, head), values[5 - head]);
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
  CHECK_EQ(prefill::logit_scale(params, 3, 1).multiplier, LogitScale::of(0.5f).multiplier);
  CHECK_EQ(prefill::value_scale(params, 1), 23.f);

  params.scale_q = {scale_q, 1};
  params.scale_k = {scale_k, 1};
  params.scale_v = {scale_v, 1};
  for (int head = 0; head < 4; ++head) {
    const int kv_head = head / 2;
    const LogitScale expected = LogitScale::of(0.5f * scale_q[head] * scale_k[kv_head]);
    const LogitScale actual = prefill::logit_scale(params, head, kv_head);
    CHECK_EQ(actual.factor, expected.factor, "head " << head);
    CHECK_EQ(actual.multiplier, expected.multiplier, "head " << head);
    CHECK_EQ(prefill::value_scale(params, kv_head), 23.f * scale_v[kv_head]);
  }
}

}  // namespace

int main() {
  check_scales();
  check_head_scales();
  check_params();
  return prefill::test::result();
}
