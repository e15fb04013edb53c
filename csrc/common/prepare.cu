#include "common/prepare.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstring>
#include <type_traits>

#include "common/pass_launch.cuh"

namespace prefill {
namespace {

__device__ float2 widen(__half2 pair) { return __half22float2(pair); }
__device__ float2 widen(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ float2 widen(__nv_fp8x2_e4m3 pair) { return static_cast<float2>(pair); }
__device__ float2 widen(__nv_fp8x2_e5m2 pair) { return static_cast<float2>(pair); }

__device__ void round_to(__half2& pair, float2 x) { pair = __floats2half2_rn(x.x, x.y); }
__device__ void round_to(__nv_bfloat162& pair, float2 x) { pair = __floats2bfloat162_rn(x.x, x.y); }
// What is past the largest becomes the largest.
__device__ void round_to(__nv_fp8x2_e4m3& pair, float2 x) { pair = __nv_fp8x2_e4m3(x); }
__device__ void round_to(__nv_fp8x2_e5m2& pair, float2 x) { pair = __nv_fp8x2_e5m2(x); }

template <class Pair, int kVector>
__device__ void round_through(float (&values)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    Pair pair;
    round_to(pair, make_float2(values[i], values[i + 1]));
    const float2 rounded = widen(pair);
    values[i] = rounded.x;
    values[i + 1] = rounded.y;
  }
}

// A load or a store of one instruction.
template <int kBytes>
using Word =
    std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, uint32_t>>;

// Dims in a row as memory holds them, two in a Pair.
template <class Pair, int kVector>
struct Dims {
  static constexpr int kPairs = kVector / 2;
  using Bits = Word<kPairs * sizeof(Pair)>;
  static_assert(sizeof(Bits) == kPairs * sizeof(Pair), "a run of dims is one word");

  Bits bits;

  __device__ static Dims load(const char* data, int64_t element) {
    // The source is read once: what is written is worth more in the L2 cache.
    return {__ldcs(reinterpret_cast<const Bits*>(data + element * (sizeof(Pair) / 2)))};
  }

  __device__ void store(char* data, int64_t element) const {
    *reinterpret_cast<Bits*>(data + element * (sizeof(Pair) / 2)) = bits;
  }

  __device__ void widen_to(float (&values)[kVector]) const {
    Pair pairs[kPairs];
    memcpy(pairs, &bits, sizeof(bits));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 pair = widen(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }

  __device__ static Dims rounded(const float (&values)[kVector]) {
    Pair pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      round_to(pairs[i], make_float2(values[2 * i], values[2 * i + 1]));
    }
    Dims dims;
    memcpy(&dims.bits, pairs, sizeof(dims.bits));
    return dims;
  }
};

// The work of one block on one tensor.
template <class Target, class Source, int kVector>
struct BlockRows {
  struct Loaded {
    PrepareItem item;
    Dims<Source, kVector> first;
    Dims<Source, kVector> second;
  };

  const PrepareJob& job;
  Rotation* rotations;  // [rows][head_dim / 2], in shared memory
  int begin;
  int num_rows;
  int num_items;

  __device__ static int64_t element(const TensorView& tensor, int row, const PrepareItem& item) {
    return row * tensor.token_stride + item.head * tensor.head_stride + item.column;
  }

  __device__ Loaded load(int index) const {
    const PrepareItem item = job.item(index);
    const auto* data = static_cast<const char*>(job.source.data);
    const int64_t at = element(job.source, begin + item.row, item);
    return {item, Dims<Source, kVector>::load(data, at),
            Dims<Source, kVector>::load(data, at + job.head_dim / 2)};
  }

  __device__ void finish(const Loaded& loaded) const {
    const PrepareItem& item = loaded.item;
    float first[kVector], second[kVector];
    loaded.first.widen_to(first);
    loaded.second.widen_to(second);
    if (job.rotates) {
      const auto* of_item =
          reinterpret_cast<const float4*>(rotations + item.row * (job.head_dim / 2) + item.column);
#pragma unroll
      for (int i = 0; i < kVector; i += 2) {
        const float4 two = of_item[i / 2];
        Rotation{two.x, two.y}.apply(first[i], second[i]);
        Rotation{two.z, two.w}.apply(first[i + 1], second[i + 1]);
      }
      round_rotated(first);
      round_rotated(second);
    }
    auto* data = static_cast<char*>(job.target.data);
    const int64_t at = element(job.target, begin + item.row, item);
    Dims<Target, kVector>::rounded(first).store(data, at);
    Dims<Target, kVector>::rounded(second).store(data, at + job.head_dim / 2);
  }

  // Where q is of 8 bits, k is too: others need no code for it.
  __device__ void round_rotated(float (&values)[kVector]) const {
    if constexpr (!std::is_same_v<Source, Target>) {
      if (job.rounded == SourceType::float8_e4m3) round_through<__nv_fp8x2_e4m3>(values);
      if (job.rounded == SourceType::float8_e5m2) round_through<__nv_fp8x2_e5m2>(values);
    }
  }

  __device__ void work_out_rotations(const RopeTurns& turns) const {
    const int half = job.head_dim / 2;
    for (int i = threadIdx.x; i < num_rows * half; i += kPrepareThreads) {
      const int row = i / half;
      const double position = job.first_position + begin + row;
      rotations[i] = Rotation::of(position * turns.per_position[i - row * half]);
    }
  }

  __device__ void run(const RopeTurns& turns) const {
    Loaded loaded[kPrepareAhead];
    const auto load_some = [&](int first) {
#pragma unroll
      for (int i = 0; i < kPrepareAhead; ++i) {
        const int index = first + i * kPrepareThreads;
        if (index < num_items) loaded[i] = load(index);
      }
    };
    int first = threadIdx.x;
    load_some(first);
    if (job.rotates) {  // while the loads are on their way
      work_out_rotations(turns);
      __syncthreads();
    }
    while (true) {
#pragma unroll
      for (int i = 0; i < kPrepareAhead; ++i) {
        const int index = first + i * kPrepareThreads;
        if (index < num_items) finish(loaded[i]);
      }
      first += kPrepareAhead * kPrepareThreads;
      if (first >= num_items) break;
      load_some(first);
    }
  }
};

template <class Target, class Source>
__device__ void run_block(const PrepareJob& job, const RopeTurns& turns, int block,
                          Rotation* rotations) {
  const int num_rows = job.rows_of(block);
  const int begin = job.block_begin(block), num_items = num_rows * job.row_items;
  if (job.vector == 8) {
    BlockRows<Target, Source, 8>{job, rotations, begin, num_rows, num_items}.run(turns);
  } else {
    BlockRows<Target, Source, 4>{job, rotations, begin, num_rows, num_items}.run(turns);
  }
}

template <class Target>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_rows(const __grid_constant__ PreparePass pass) {
  __shared__ alignas(16) Rotation rotations[kMaxBlockRotations];
  int64_t block = blockIdx.x;
  const PrepareJob* job = &pass.q;
  if (block >= job->num_blocks) {
    block -= job->num_blocks;
    job = &pass.k;
  }
  if (block >= job->num_blocks) {
    block -= job->num_blocks;
    job = &pass.v;
  }
  const auto of_job = static_cast<int>(block);
  wait_for_kernel_before();
  switch (job->type) {
    case SourceType::same:
      return run_block<Target, Target>(*job, pass.turns, of_job, rotations);
    case SourceType::float8_e4m3:
      return run_block<Target, __nv_fp8x2_e4m3>(*job, pass.turns, of_job, rotations);
    case SourceType::float8_e5m2:
      return run_block<Target, __nv_fp8x2_e5m2>(*job, pass.turns, of_job, rotations);
  }
}

}  // namespace

cudaError_t prepare(const PreparePass& pass, DType dtype, bool programmatic, cudaStream_t stream) {
  if (pass.num_blocks() > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto blocks = static_cast<unsigned>(pass.num_blocks());
  const auto rows = dtype == DType::float16 ? prepare_rows<__half2> : prepare_rows<__nv_bfloat162>;
  return launch_pass(rows, blocks, kPrepareThreads, programmatic, stream, pass);
}

}  // namespace prefill
