#include "common/combine.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "common/logits.cuh"
#include "common/split_plan.h"

namespace prefill {
namespace {

constexpr int kWarpLanes = 32;
constexpr unsigned kWholeWarp = ~0u;
constexpr int kWarps = 8;
constexpr int kLaneColumns = 4;
constexpr int kMaxColumns = 256;
constexpr int kMaxSplits = SplitPlanner::kMaxSplits;
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

template <class Combine>
__device__ float reduce_warp(float x, Combine const& combine) {
#pragma unroll
  for (int lane = kWarpLanes / 2; lane > 0; lane /= 2) {
    x = combine(x, __shfl_xor_sync(kWholeWarp, x, lane));
  }
  return x;
}

// A row of one head, and where its parts are.
struct PartsOfRow {
  int token;
  int head;
  int64_t first;  // row of the first part; the others lie tile_m rows apart
  bool exists;

  __device__ static PartsOfRow of(const PrefillParams& params, const Parts& parts, int index) {
    const TileSchedule& schedule = parts.schedule;
    const int tile = index / parts.tile_m, row = index % parts.tile_m;
    if (tile >= schedule.num_in_parts()) return {0, 0, 0, false};
    const int first_part = tile * params.split.num_splits;
    const WorkTile work = schedule.tile(schedule.num_whole + first_part);
    const int of_call = work.m_tile * parts.tile_m + row;
    const int head = work.head * params.rows.heads + params.rows.head(of_call);
    return {params.rows.token(of_call), head, int64_t{first_part} * parts.tile_m + row,
            params.rows.exists(of_call, params.qo_len)};
  }
};

// By a warp: what to multiply the outputs of the parts by, and the LSE of the whole. A row that no
// part saw a key for has weights of 0.
__device__ void weigh(const PrefillParams& params, const Parts& parts, const PartsOfRow& row,
                      int lane, float* weights) {
  const int num_splits = params.split.num_splits;
  const float* lse = params.split.lse + row.first;
  float largest = -INFINITY;
  for (int i = lane; i < num_splits; i += kWarpLanes) {
    weights[i] = lse[int64_t{i} * parts.tile_m];
    largest = fmaxf(largest, weights[i]);
  }
  largest = reduce_warp(largest, [](float x, float y) { return fmaxf(x, y); });
  const float base = largest == -INFINITY ? 0.f : largest;
  float sum = 0.f;
  for (int i = lane; i < num_splits; i += kWarpLanes) {
    weights[i] = exp2_approx(weights[i] - base);
    sum += weights[i];
  }
  sum = reduce_warp(sum, [](float x, float y) { return x + y; });
  const float sink = sink_logit(params, row.head);
  const float total = sum + exp2_approx(sink - base);
  for (int i = lane; i < num_splits; i += kWarpLanes) {
    weights[i] = sum == 0.f ? 0.f : __fdividef(weights[i], total);
  }
  if (params.lse != nullptr && lane == 0) {
    const float keys = sum == 0.f ? -INFINITY : base + log2f(sum);
    params.lse[row.token * params.lse_token_stride + row.head * params.lse_head_stride] =
        lse_with_sink(keys, sink) * params.lse_scale;
  }
}

// Warps share a row's parts out among them where there are many.
template <class T>
__global__ void __launch_bounds__(kWarps* kWarpLanes)
    combine_rows(const __grid_constant__ PrefillParams params, const __grid_constant__ Parts parts,
                 int row_warps) {
  __shared__ float weights[kWarps][kMaxSplits];
  __shared__ float4 sums[kWarps][kChunks][kWarpLanes];
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int block_rows = kWarps / row_warps;
  const int share = warp % row_warps, first_warp = warp - share;
  const PartsOfRow row =
      PartsOfRow::of(params, parts, blockIdx.x * block_rows + warp / row_warps);
#if __CUDA_ARCH__ >= 900
  // The next kernel waits for this one's end by itself; what the one before wrote is there now.
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (share == 0 && row.exists) weigh(params, parts, row, lane, weights[warp]);
  __syncthreads();

  float4 sum[kChunks] = {};
  if (row.exists) {
#pragma unroll 4
    for (int i = share; i < params.split.num_splits; i += row_warps) {
      const float weight = weights[first_warp][i];
      const float* values =
          params.split.out + (row.first + int64_t{i} * parts.tile_m) * parts.columns;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int column = (chunk * kWarpLanes + lane) * kLaneColumns;
        if (column >= params.head_dim_vo) break;
        const float4 part = *reinterpret_cast<const float4*>(values + column);
        sum[chunk].x = fmaf(weight, part.x, sum[chunk].x);
        sum[chunk].y = fmaf(weight, part.y, sum[chunk].y);
        sum[chunk].z = fmaf(weight, part.z, sum[chunk].z);
        sum[chunk].w = fmaf(weight, part.w, sum[chunk].w);
      }
    }
  }
  if (row_warps > 1) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) sums[warp][chunk][lane] = sum[chunk];
    __syncthreads();
  }
  if (share != 0 || !row.exists) return;
  T* out = static_cast<T*>(params.out.data) + row.token * params.out.token_stride +
           row.head * params.out.head_stride;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = (chunk * kWarpLanes + lane) * kLaneColumns;
    if (column >= params.head_dim_vo) break;
    for (int other = 1; other < row_warps; ++other) {
      const float4 more = sums[warp + other][chunk][lane];
      sum[chunk].x += more.x;
      sum[chunk].y += more.y;
      sum[chunk].z += more.z;
      sum[chunk].w += more.w;
    }
    *reinterpret_cast<uint2*>(out + column) = make_uint2(
        round_pair(sum[chunk].x, sum[chunk].y, T{}), round_pair(sum[chunk].z, sum[chunk].w, T{}));
  }
}

}  // namespace

cudaError_t combine(const PrefillParams& params, const Parts& parts, DType dtype,
                    bool programmatic, cudaStream_t stream) {
  constexpr int kWarpParts = 4;  // that are worth a warp
  const int num_splits = params.split.num_splits;
  if (num_splits > kMaxSplits || params.head_dim_vo > kMaxColumns) return cudaErrorInvalidValue;
  int row_warps = 1;
  while (row_warps < kWarps && row_warps * kWarpParts < num_splits) row_warps *= 2;
  const int64_t num_rows = int64_t{parts.schedule.num_in_parts()} * parts.tile_m;
  const int block_rows = kWarps / row_warps;

  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>((num_rows + block_rows - 1) / block_rows);
  config.blockDim = kWarps * kWarpLanes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return dtype == DType::float16
             ? cudaLaunchKernelEx(&config, combine_rows<__half>, params, parts, row_warps)
             : cudaLaunchKernelEx(&config, combine_rows<__nv_bfloat16>, params, parts, row_warps);
}

}  // namespace prefill
