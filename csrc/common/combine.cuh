// Parts of rows, merged: by the pass that combine.h launches, or by the blocks of a cluster that
// worked on them. By warps, a row each or a share of one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "common/logits.cuh"
#include "common/params.h"
#include "common/tile_schedule.cuh"

namespace prefill::combining {

constexpr int kWarpLanes = 32;
constexpr unsigned kWholeWarp = ~0u;
constexpr int kLaneColumns = 4;

__device__ inline uint32_t round_pair(float x, float y, __half) {
  const __half2 pair = __floats2half2_rn(x, y);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

__device__ inline uint32_t round_pair(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

template <class T>
__device__ void store_four(T* to, const float4& four) {
  *reinterpret_cast<uint2*>(to) =
      make_uint2(round_pair(four.x, four.y, T{}), round_pair(four.z, four.w, T{}));
}

__device__ inline void store_four(float* to, const float4& four) {
  *reinterpret_cast<float4*>(to) = four;
}

template <class Combine>
__device__ float reduce_warp(float x, Combine const& combine) {
#pragma unroll
  for (int lane = kWarpLanes / 2; lane > 0; lane /= 2) {
    x = combine(x, __shfl_xor_sync(kWholeWarp, x, lane));
  }
  return x;
}

// What merging needs to know of a call: where it lies, as a copy would be one of all schedules.
struct Merge {
  Results const& results;
  PerHead const& sinks;
  TileSchedule const& schedule;
  int tile_m;
  int columns;  // of a row of a part

  // Of a row tile, those that may have a query.
  PREFILL_HOST_DEVICE int tile_rows() const {
    const int tile_tokens = results.rows.tile_tokens(tile_m);
    return (results.qo_len < tile_tokens ? results.qo_len : tile_tokens) * results.rows.heads;
  }
};

// A row of one head, and where its parts are.
struct PartsOfRow {
  int head;
  int64_t first;  // row of the first part; the others lie tile_m rows apart
  int64_t out;    // elements from the start of the output
  int64_t lse;
  bool exists;

  // Query `query` of row tile `tile`, of those that are in parts.
  __device__ static PartsOfRow of(const Merge& merge, int tile, int query) {
    const RowMap& rows = merge.results.rows;
    if (tile >= merge.schedule.num_in_parts() || query >= merge.tile_rows()) return {};
    const int first_part = tile * merge.results.split.num_splits;
    const WorkTile work = merge.schedule.tile(merge.schedule.num_whole + first_part);
    const int of_tile = query / rows.heads, of_block = query % rows.heads;
    const int64_t token = work.m_tile * rows.tile_tokens(merge.tile_m) + of_tile;
    const int64_t head = work.head * rows.heads + of_block;
    const int row = rows.row(of_tile, of_block);
    return {static_cast<int>(head), int64_t{first_part} * merge.tile_m + row,
            token * merge.results.out.token_stride + head * merge.results.out.head_stride,
            token * merge.results.lse_token_stride + head * merge.results.lse_head_stride,
            token < merge.results.qo_len};
  }
};

// What a lane knows of a row's parts: of every 32nd, from its own number on.
template <int kMaxParts>
struct LaneParts {
  static constexpr int kParts = (kMaxParts + kWarpLanes - 1) / kWarpLanes;
  PartLse parts[kParts];

  __device__ void load(const Merge& merge, const PartsOfRow& row, int lane) {
    const auto* lse = reinterpret_cast<const float4*>(merge.results.split.lse + row.first);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int part = i * kWarpLanes + lane;
      parts[i] = {-INFINITY, 0.f, 0.f};
      if (part < merge.results.split.num_splits) {
        const float4 loaded = __ldcg(lse + int64_t{part} * merge.tile_m);
        parts[i] = {loaded.x, loaded.y, loaded.z};
      }
    }
  }

  // Puts what to multiply the outputs of the parts by into `weights`, and answers the LSE of the
  // whole. A row that no part saw a key for has weights of 0.
  __device__ float weigh(const Merge& merge, const PartsOfRow& row, int lane,
                         float* weights) const {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kParts; ++i) largest = fmaxf(largest, parts[i].score);
    largest = reduce_warp(largest, [](float x, float y) { return fmaxf(x, y); });
    const float base = largest == -INFINITY ? 0.f : largest;
    const float multiplier = __shfl_sync(kWholeWarp, parts[0].multiplier, 0);
    // No part's weights add up to more than 2^40: nothing overflows.
    float of_lane[kParts];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      of_lane[i] = exp2_approx(fmaf(parts[i].score - base, multiplier, parts[i].sum));
      if (i * kWarpLanes + lane < merge.results.split.num_splits) sum += of_lane[i];
    }
    sum = reduce_warp(sum, [](float x, float y) { return x + y; });
    const float sink = merge.sinks.at(row.head, -INFINITY) * kLog2e;
    // Without a sink: a logit beyond float32 must not meet its infinity.
    const float total = sink == -INFINITY ? sum : sum + exp2_approx(fmaf(-base, multiplier, sink));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int part = i * kWarpLanes + lane;
      if (part >= merge.results.split.num_splits) continue;
      weights[part] = sum == 0.f ? 0.f : __fdividef(of_lane[i], total);
    }
    __syncwarp();
    const float keys = sum == 0.f ? -INFINITY : fmaf(base, multiplier, log2f(sum));
    return lse_with_sink(keys, sink);
  }
};

// A lane's columns of a row.
template <int kMaxColumns>
struct Columns {
  static constexpr int kStep = kWarpLanes * kLaneColumns;
  static constexpr int kChunks = (kMaxColumns + kStep - 1) / kStep;
  float4 chunks[kChunks] = {};

  // Past this SM's L1: other SMs have written what is read.
  __device__ void load(const float* row, int lane, int columns) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = chunk * kStep + lane * kLaneColumns;
      if (column < columns) chunks[chunk] = __ldcg(reinterpret_cast<const float4*>(row + column));
    }
  }

  __device__ void add(const Columns& other, float weight) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      chunks[chunk].x = fmaf(weight, other.chunks[chunk].x, chunks[chunk].x);
      chunks[chunk].y = fmaf(weight, other.chunks[chunk].y, chunks[chunk].y);
      chunks[chunk].z = fmaf(weight, other.chunks[chunk].z, chunks[chunk].z);
      chunks[chunk].w = fmaf(weight, other.chunks[chunk].w, chunks[chunk].w);
    }
  }

  template <class T>
  __device__ void store(T* row, int lane, int columns) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = chunk * kStep + lane * kLaneColumns;
      if (column < columns) store_four(row + column, chunks[chunk]);
    }
  }
};

// Rows of up to kMaxParts parts, one after another: the next one's are on their way while one is
// added up.
template <class T, int kMaxColumns, int kMaxParts>
struct RowMerger {
  struct Row {
    PartsOfRow place;
    LaneParts<kMaxParts> parts;
    Columns<kMaxColumns> columns[kMaxParts];

    __device__ void load(const Merge& merge, int tile, int query, int lane) {
      place = PartsOfRow::of(merge, tile, query);
      if (!place.exists) return;
      parts.load(merge, place, lane);
      const float* first = merge.results.split.out + place.first * merge.columns;
#pragma unroll
      for (int i = 0; i < kMaxParts; ++i) {
        if (i >= merge.results.split.num_splits) break;
        columns[i].load(first + int64_t{i} * merge.tile_m * merge.columns, lane,
                        merge.results.head_dim_vo);
      }
    }

    __device__ void merge_into(const Merge& merge, int lane, float* weights) const {
      const Results& results = merge.results;
      const float lse = parts.weigh(merge, place, lane, weights);
      Columns<kMaxColumns> sum;
#pragma unroll
      for (int i = 0; i < kMaxParts; ++i) {
        if (i < results.split.num_splits) sum.add(columns[i], weights[i]);
      }
      if (lane == 0 && results.lse != nullptr) results.lse[place.lse] = lse * results.lse_scale;
      sum.store(static_cast<T*>(results.out.data) + place.out, lane, results.head_dim_vo);
    }
  };

  // Every `step`-th query of a row tile, from `first` on. `weights` is this warp's.
  __device__ static void run(const Merge& merge, int tile, int first, int step, int lane,
                             float* weights) {
    const int num_rows = merge.tile_rows();
    Row next;
    next.load(merge, tile, first, lane);
    for (int query = first; query < num_rows; query += step) {
      const Row row = next;
      next.load(merge, tile, query + step, lane);
      if (row.place.exists) row.merge_into(merge, lane, weights);
    }
  }
};

}  // namespace prefill::combining
