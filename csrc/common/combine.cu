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

// Rows of a row tile that may have a query.
PREFILL_HOST_DEVICE int rows_of_tile(const PrefillParams& params, int tile_m) {
  const int tokens = params.rows.tile_tokens(tile_m);
  return (params.qo_len < tokens ? params.qo_len : tokens) * params.rows.heads;
}

// A row of one head, and where its parts are.
struct PartsOfRow {
  int token;
  int head;
  int64_t first;  // row of the first part; the others lie tile_m rows apart
  bool exists;

  __device__ static PartsOfRow of(const PrefillParams& params, const Parts& parts, int index) {
    const TileSchedule& schedule = parts.schedule;
    const int tile_rows = rows_of_tile(params, parts.tile_m);
    const int tile = index / tile_rows, query = index % tile_rows;
    if (tile >= schedule.num_in_parts()) return {0, 0, 0, false};
    const int first_part = tile * params.split.num_splits;
    const WorkTile work = schedule.tile(schedule.num_whole + first_part);
    const int of_tile = query / params.rows.heads, head = query % params.rows.heads;
    const int token = work.m_tile * params.rows.tile_tokens(parts.tile_m) + of_tile;
    const int row = of_tile / params.rows.tokens * RowMap::kBlock +
                    of_tile % params.rows.tokens * params.rows.heads + head;
    return {token, work.head * params.rows.heads + head, int64_t{first_part} * parts.tile_m + row,
            token < params.qo_len};
  }
};

// By a warp: what to multiply the outputs of the parts by, and the LSE of the whole. A row that no
// part saw a key for has weights of 0.
struct Weights {
  float* of_parts;
  float lse;

  __device__ static Weights of(const PrefillParams& params, const Parts& parts,
                               const PartsOfRow& row, int lane, float* of_parts) {
    const int num_splits = params.split.num_splits;
    const float* lse = params.split.lse + row.first;
    float largest = -INFINITY;
    for (int i = lane; i < num_splits; i += kWarpLanes) {
      of_parts[i] = lse[int64_t{i} * parts.tile_m];
      largest = fmaxf(largest, of_parts[i]);
    }
    largest = reduce_warp(largest, [](float x, float y) { return fmaxf(x, y); });
    const float base = largest == -INFINITY ? 0.f : largest;
    float sum = 0.f;
    for (int i = lane; i < num_splits; i += kWarpLanes) {
      of_parts[i] = exp2_approx(of_parts[i] - base);
      sum += of_parts[i];
    }
    sum = reduce_warp(sum, [](float x, float y) { return x + y; });
    const float sink = sink_logit(params, row.head);
    const float total = sum + exp2_approx(sink - base);
    for (int i = lane; i < num_splits; i += kWarpLanes) {
      of_parts[i] = sum == 0.f ? 0.f : __fdividef(of_parts[i], total);
    }
    __syncwarp();
    return {of_parts, lse_with_sink(sum == 0.f ? -INFINITY : base + log2f(sum), sink)};
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
      const float4& four = chunks[chunk];
      if (column < columns) {
        *reinterpret_cast<uint2*>(row + column) =
            make_uint2(round_pair(four.x, four.y, T{}), round_pair(four.z, four.w, T{}));
      }
    }
  }
};

// `row_warps` warps share a row's parts out among them, each every so manyth.
template <class T>
__global__ void __launch_bounds__(kWarps* kWarpLanes)
    combine_rows(const __grid_constant__ PrefillParams params, const __grid_constant__ Parts parts,
                 int row_warps) {
  constexpr int kAhead = 4;  // parts on their way while weights are worked out
  __shared__ float weights[kWarps][kMaxSplits];
  __shared__ Columns sums[kWarps][kWarpLanes];
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int share = warp % row_warps;
  const PartsOfRow row =
      PartsOfRow::of(params, parts, (blockIdx.x * kWarps + warp) / row_warps);
#if __CUDA_ARCH__ >= 900
  // The next kernel waits for this one's end by itself; what the one before wrote is there now.
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  const int columns = params.head_dim_vo, num_splits = params.split.num_splits;
  Columns sum;
  if (row.exists) {
    const auto part = [&](int index) {
      return params.split.out + (row.first + int64_t{index} * parts.tile_m) * parts.columns;
    };
    Columns ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int index = share + i * row_warps;
      if (index < num_splits) ahead[i].load(part(index), lane, columns);
    }
    const Weights row_weights = Weights::of(params, parts, row, lane, weights[warp]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int index = share + i * row_warps;
      if (index < num_splits) sum.add(ahead[i], row_weights.of_parts[index]);
    }
#pragma unroll 4
    for (int index = share + kAhead * row_warps; index < num_splits; index += row_warps) {
      Columns more;
      more.load(part(index), lane, columns);
      sum.add(more, row_weights.of_parts[index]);
    }
    if (share == 0 && lane == 0 && params.lse != nullptr) {
      params.lse[row.token * params.lse_token_stride + row.head * params.lse_head_stride] =
          row_weights.lse * params.lse_scale;
    }
  }
  if (row_warps > 1) {
    sums[warp][lane] = sum;
    __syncthreads();
  }
  if (share != 0 || !row.exists) return;
  for (int other = 1; other < row_warps; ++other) sum.add(sums[warp + other][lane], 1.f);
  sum.store(static_cast<T*>(params.out.data) + row.token * params.out.token_stride +
                row.head * params.out.head_stride,
            lane, columns);
}

}  // namespace

cudaError_t combine(const PrefillParams& params, const Parts& parts, DType dtype,
                    bool programmatic, cudaStream_t stream) {
  constexpr int kWarpParts = 4;  // that are worth a warp
  const int num_splits = params.split.num_splits;
  if (num_splits > kMaxSplits || params.head_dim_vo > kMaxColumns) return cudaErrorInvalidValue;
  int row_warps = 1;
  while (row_warps < kWarps && row_warps * kWarpParts < num_splits) row_warps *= 2;
  const int64_t num_rows =
      int64_t{parts.schedule.num_in_parts()} * rows_of_tile(params, parts.tile_m);
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
