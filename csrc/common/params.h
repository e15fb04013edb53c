// One attention call in plain data: what every kernel of every backend receives. No torch, no CuTe.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/mask_tiles.h"

namespace prefill {

// A [length, heads, head_dim] tensor. Strides count elements; the head_dim stride is 1.
struct TensorView {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// One float per head; a stride of 0 repeats one value. A null pointer means that there is none.
struct PerHead {
  const float* data;
  int64_t stride;

  PREFILL_HOST_DEVICE float at(int head, float otherwise) const {
    return data == nullptr ? otherwise : data[head * stride];
  }
};

struct PrefillParams {
  TensorView q;    // [qo_len, num_qo_heads, head_dim_qk]
  TensorView k;    // [kv_len, num_kv_heads, head_dim_qk]
  TensorView v;    // [kv_len, num_kv_heads, head_dim_vo]
  TensorView out;  // [qo_len, num_qo_heads, head_dim_vo]
  float* lse;      // [qo_len, num_qo_heads], or null
  int64_t lse_token_stride;
  int64_t lse_head_stride;

  int qo_len;
  int kv_len;
  int num_qo_heads;
  int num_kv_heads;
  int head_dim_qk;
  int head_dim_vo;

  // Key j is visible to row i when pos(i) - window_left <= j <= pos(i) + window_right, with
  // pos(i) = i + kv_len - qo_len. Both are non-negative; qo_len + kv_len stands for "no bound".
  int window_left;
  int window_right;

  // A custom mask within the band, laid out for the kernel's tiles; none: a null `mixed`.
  MaskTiles mask;

  PerHead scale_q;  // [num_qo_heads]
  PerHead scale_k;  // [num_kv_heads]
  PerHead scale_v;  // [num_kv_heads]
  float sm_scale;   // any float: zero and negative ones too
  float v_scale;
  float soft_cap;        // logits become soft_cap * tanh(logit / soft_cap); 0: they do not
  bool has_alibi;        // logits get slope * (j - pos(i)) added
  PerHead alibi_slopes;  // [num_qo_heads]; none: slopes by the rule (logits.cuh)
  PerHead sinks;         // [num_qo_heads]: a logit that joins the sum of weights, without a value
  float lse_scale;       // the LSE is in base 2 times this: 1, or ln 2 for the natural logarithm
};

}  // namespace prefill
