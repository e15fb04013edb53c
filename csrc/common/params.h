// One attention call in plain data: what every kernel of every backend receives. No torch, no CuTe.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/kernel_key.h"
#include "common/row_map.h"

namespace prefill {

// A [length, heads, head_dim] tensor. Strides count elements; the head_dim stride is 1.
struct TensorView {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// V as kernels of 8 bits take it (transpose_v.h): [num_kv_heads][head_dim_vo][keys], without gaps.
struct TransposedV {
  void* data;
  int keys;  // kv_len and, of zeros, what it lacks to a multiple of kTransposeKeys
};

// One float per head; a stride of 0 repeats one value. A null pointer means that there is none.
struct PerHead {
  const float* data;
  int64_t stride;

  PREFILL_HOST_DEVICE float at(int head, float otherwise) const {
    return data == nullptr ? otherwise : data[head * stride];
  }
};

// Which columns of a KV tile a lane's two rows of a block of 16 see: rows lane / 4 and lane / 4
// + 8. Bit c is the lane's c-th column as accumulators have them, key 8 (c / 2) + 2 (lane % 4) + c
// % 2.
struct alignas(8) MaskWords {
  uint32_t rows[2];
};

// A custom mask as a kernel with row tiles of tile_m rows and KV tiles of tile_n keys takes it
// (mask_tiles.h makes it so). The band is folded in: what is seen here needs no further mask. Null
// pointers: there is no custom mask.
struct MaskTiles {
  // [num_row_tiles of a head][num_words()]: bit t % 32 of word t / 32 tells of KV tile t. Mixed:
  // some row sees some key, but not each of them all. Full: each row sees all tile_n keys. Neither:
  // none sees any.
  const uint32_t* mixed;
  const uint32_t* full;
  // [16-row blocks of all row tiles][num_kv_tiles][32 lanes], there only where the KV tile is
  // mixed. Rows past the end are as the last one.
  const MaskWords* bits;
  int num_kv_tiles;

  PREFILL_HOST_DEVICE int num_words() const { return (num_kv_tiles + 31) / 32; }
};

// The LSE in base 2 of a row of a part: score * multiplier + sum. Kept apart, as one number would
// keep nothing of the sum where logits are steep, and parts could not be weighed against each
// other.
struct alignas(16) PartLse {
  float score;       // the largest, which weights are relative to; -inf: no key is seen
  float multiplier;  // that makes logits of scores: the same in all parts of a row
  float sum;         // log2 of what the weights add up to
};

// Split-KV: row tiles of which parts of the KV tiles are worked on apart, and merged (combine.h).
struct SplitKv {
  static constexpr int kMaxSplits = 256;

  int num_splits = 1;  // parts of a row tile
  // Row tiles over all heads, in the order of the schedule, before those in parts.
  int num_whole = 0;
  float* out = nullptr;    // [parts][tile_m][head_dim_vo of the class]; null: all are whole
  PartLse* lse = nullptr;  // [parts][tile_m]

  PREFILL_HOST_DEVICE bool exists() const { return out != nullptr; }
};

struct PrefillParams {
  TensorView q;    // [qo_len, num_qo_heads, head_dim_qk]
  TensorView k;    // [kv_len, num_kv_heads, head_dim_qk]
  TensorView v;    // [kv_len, num_kv_heads, head_dim_vo]
  TransposedV vt;  // of v, where the kernel takes that instead
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
  int num_sms;  // of the device

  // Key j is visible to row i when pos(i) - window_left <= j <= pos(i) + window_right, with
  // pos(i) = i + kv_len - qo_len. They lie in 0..kv_len and 0..qo_len, so that sums stay in 32
  // bits, and bound nothing at their largest.
  int window_left;
  int window_right;

  RowMap rows;     // of row tiles; more than one head only where all are in parts
  MaskTiles mask;  // for the tiles of the kernel that is called
  SplitKv split;

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
  OutputType out_type;   // of `out`; where it is not the kernel's, all row tiles are in parts

  PREFILL_HOST_DEVICE bool has_per_head() const {
    return scale_q.data != nullptr || scale_k.data != nullptr || scale_v.data != nullptr ||
           alibi_slopes.data != nullptr || sinks.data != nullptr;
  }
};

// Of a call, what is needed to write its results.
struct Results {
  TensorView out;
  float* lse;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  SplitKv split;
  RowMap rows;
  int qo_len;
  int head_dim_vo;
  float lse_scale;

  PREFILL_HOST_DEVICE static Results of(const PrefillParams& params) {
    return {params.out,      params.lse,  params.lse_token_stride, params.lse_head_stride,
            params.split,    params.rows, params.qo_len,           params.head_dim_vo,
            params.lse_scale};
  }
};

}  // namespace prefill
