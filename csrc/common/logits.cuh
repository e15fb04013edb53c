// How a raw score q . k becomes a logit in base-2 units. Shared by all kernels.
#pragma once

#include "common/host_device.h"
#include "common/params.h"

namespace prefill {

// logit * log2(e) = (score * factor) * multiplier with multiplier > 0, as the softmax takes the
// maximum of scores before it scales them. A factor other than 1 stands for a negative or zero
// scale; it is applied where masks are, and makes every KV tile a masked one.
struct LogitScale {
  float factor;
  float multiplier;

  PREFILL_HOST_DEVICE static LogitScale of(float scale) {
    constexpr float kLog2e = 1.4426950408889634f;
    constexpr float kMax = 3.4028235e38f;
    const float magnitude = scale < 0.f ? -scale : scale;
    if (scale == 0.f || !(magnitude <= kMax)) return {scale, 1.f};  // so that masks come after NaN
    // An infinite multiplier would make NaN of zero scores.
    const float multiplier = magnitude * kLog2e <= kMax ? magnitude * kLog2e : kMax;
    return {scale < 0.f ? -1.f : 1.f, multiplier};
  }
};

PREFILL_HOST_DEVICE float head_scale(const HeadScale& scale, int head) {
  return scale.data == nullptr ? 1.f : scale.data[head * scale.stride];
}

PREFILL_HOST_DEVICE LogitScale logit_scale(const PrefillParams& params, int head, int kv_head) {
  return LogitScale::of(params.sm_scale * head_scale(params.scale_q, head) *
                        head_scale(params.scale_k, kv_head));
}

PREFILL_HOST_DEVICE float value_scale(const PrefillParams& params, int kv_head) {
  return params.v_scale * head_scale(params.scale_v, kv_head);
}

}  // namespace prefill
