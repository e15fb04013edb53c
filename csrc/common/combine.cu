#include "common/combine.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "common/logits.cuh"
#include "common/pass_launch.cuh"

namespace prefill {
namespace {

constexpr int kWarpLanes = 32;
constexpr unsigned kWholeWarp = ~0u;
constexpr int kWarps = 8;
constexpr int kLaneColumns = 4;
constexpr int kMaxColumns = 256;
constexpr int kMaxSplits = SplitKv::kMaxSplits;
constexpr int kChunks = kMaxColumns / (kWarpLanes * kLaneColumns);

__device__ uint32_t round_pair(float x, float y, __half) {
  const __half2 pair = __floats2half2_rn(x, y);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

__device__ uint32_t round_pair(float x, float y, __nv_bfloat16) {
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

__device__ void store_four(float* to, const float4& four) { *reinterpret_cast<float4*>(to) = four; }

template <class Combine>
__device__ float reduce_warp(float x, Combine const& combine) {
#pragma unroll
  for (int lane = kWarpLanes / 2; lane > 0; lane /= 2) {
    x = combine(x, __shfl_xor_sync(kWholeWarp, x, lane));
  }
  return x;
}

// What the pass needs of a call.
struct Merge {
  Results results;
  PerHead sinks;
  TileSchedule schedule;
  int tile_m;
  int columns;    // of a row of a part
  int tile_rows;  // of a row tile, those that may have a query
  int row_warps;  // that share a row's parts out among them
};

// A row of one head, and where its parts are.
struct PartsOfRow {
  int head;
  int64_t first;  // row of the first part; the others lie tile_m rows apart
  int64_t out;    // elements from the start of the output
  int64_t lse;
  bool exists;

  __device__ static PartsOfRow of(const Merge& merge, int index) {
    const RowMap& rows = merge.results.rows;
    const int tile = index / merge.tile_rows, query = index % merge.tile_rows;
    if (tile >= merge.schedule.num_in_parts()) return {};
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

// By a warp: what to multiply the outputs of the parts by, and the LSE of the whole. A row that no
// part saw a key for has weights of 0.
struct Weights {
  float* of_parts;
  float lse;

  __device__ static Weights of(const Merge& merge, const PartsOfRow& row, int lane,
                               float* of_parts) {
    const int num_splits = merge.results.split.num_splits;
    const PartLse* lse = merge.results.split.lse + row.first;
    float largest = -INFINITY;
    for (int i = lane; i < num_splits; i += kWarpLanes) {
      largest = fmaxf(largest, lse[int64_t{i} * merge.tile_m].score);
    }
    largest = reduce_warp(largest, [](float x, float y) { return fmaxf(x, y); });
    const float base = largest == -INFINITY ? 0.f : largest, multiplier = lse->multiplier;
    // No part's weights add up to more than 2^40: nothing overflows.
    float sum = 0.f;
    for (int i = lane; i < num_splits; i += kWarpLanes) {
      const PartLse part = lse[int64_t{i} * merge.tile_m];
      of_parts[i] = exp2_approx(fmaf(part.score - base, multiplier, part.sum));
      sum += of_parts[i];
    }
    sum = reduce_warp(sum, [](float x, float y) { return x + y; });
    const float sink = merge.sinks.at(row.head, -INFINITY) * kLog2e;
    // Without a sink: a logit beyond float32 must not meet its infinity.
    const float total = sink == -INFINITY ? sum : sum + exp2_approx(fmaf(-base, multiplier, sink));
    for (int i = lane; i < num_splits; i += kWarpLanes) {
      of_parts[i] = sum == 0.f ? 0.f : __fdividef(of_parts[i], total);
    }
    __syncwarp();
    const float keys = sum == 0.f ? -INFINITY : fmaf(base, multiplier, log2f(sum));
    return {of_parts, lse_with_sink(keys, sink)};
  }
};

// A lane's columns of a row.
struct Columns {
  float4 chunks[kChunks] = {};

  __device__ void load(const float* row, int lane, int columns) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = (chunk * kWarpLanes + lane) * kLaneColumns;
      if (column < columns) chunks[chunk] = *reinterpret_cast<const float4*>(row + column);
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
      const int column = (chunk * kWarpLanes + lane) * kLaneColumns;
      if (column < columns) store_four(row + column, chunks[chunk]);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kWarps* kWarpLanes)
    combine_rows(const __grid_constant__ Merge merge) {
  constexpr int kAhead = 4;  // parts on their way while weights are worked out
  __shared__ float weights[kWarps][kMaxSplits];
  __shared__ Columns sums[kWarps][kWarpLanes];
  const Results& results = merge.results;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int row_warps = merge.row_warps, share = warp % row_warps;
  const PartsOfRow row = PartsOfRow::of(merge, (blockIdx.x * kWarps + warp) / row_warps);
  const int columns = results.head_dim_vo, num_splits = results.split.num_splits;
  const float* first =
      results.split.out + (row.first + share * int64_t{merge.tile_m}) * merge.columns;
  const int64_t stride = int64_t{row_warps} * merge.tile_m * merge.columns;
  T* out = static_cast<T*>(results.out.data) + row.out;
  float* lse = results.lse == nullptr ? nullptr : results.lse + row.lse;
  // The first look at arguments takes its time: before the wait.
  asm volatile("" ::"l"(first), "l"(out), "l"(lse), "l"(stride), "r"(columns), "r"(num_splits));
  wait_for_kernel_before();

  Columns sum;
  if (row.exists) {
    Columns ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (share + i * row_warps < num_splits) ahead[i].load(first + i * stride, lane, columns);
    }
    const Weights row_weights = Weights::of(merge, row, lane, weights[warp]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int index = share + i * row_warps;
      if (index < num_splits) sum.add(ahead[i], row_weights.of_parts[index]);
    }
    const float* next = first + kAhead * stride;
#pragma unroll 4
    for (int index = share + kAhead * row_warps; index < num_splits; index += row_warps) {
      Columns more;
      more.load(next, lane, columns);
      sum.add(more, row_weights.of_parts[index]);
      next += stride;
    }
    if (share == 0 && lane == 0 && lse != nullptr) *lse = row_weights.lse * results.lse_scale;
  }
  if (row_warps > 1) {
    sums[warp][lane] = sum;
    __syncthreads();
  }
  if (share != 0 || !row.exists) return;
  for (int other = 1; other < row_warps; ++other) sum.add(sums[warp + other][lane], 1.f);
  sum.store(out, lane, columns);
}

}  // namespace

cudaError_t combine(const PrefillParams& params, const TileSchedule& schedule, int tile_m,
                    int columns, bool programmatic, cudaStream_t stream) {
  constexpr int kWarpParts = 4;  // that are worth a warp
  const int num_splits = params.split.num_splits;
  if (num_splits > kMaxSplits || columns > kMaxColumns) return cudaErrorInvalidValue;
  int row_warps = 1;
  while (row_warps < kWarps && row_warps * kWarpParts < num_splits) row_warps *= 2;
  const int tile_rows =
      std::min(params.qo_len, params.rows.tile_tokens(tile_m)) * params.rows.heads;
  const int64_t num_rows = int64_t{schedule.num_in_parts()} * tile_rows;
  const int block_rows = kWarps / row_warps;
  const Merge merge{Results::of(params), params.sinks, schedule, tile_m, columns,
                    tile_rows,           row_warps};

  const auto launch = [&](auto* pass) {
    return launch_pass(pass, static_cast<unsigned>((num_rows + block_rows - 1) / block_rows),
                       kWarps * kWarpLanes, programmatic, stream, merge);
  };
  switch (params.out_type) {
    case OutputType::float16:
      return launch(combine_rows<__half>);
    case OutputType::bfloat16:
      return launch(combine_rows<__nv_bfloat16>);
    case OutputType::float32:
      return launch(combine_rows<float>);
  }
  return cudaErrorInvalidValue;
}

}  // namespace prefill
