#include "common/transpose_v.h"

#include "common/pass_launch.cuh"

namespace prefill {
namespace {

using Block = TransposePass::Block;

constexpr int kChunkBytes = 16;
constexpr int kRowChunks = kTransposeDims / kChunkBytes;
constexpr int kLoads = kTransposeKeys * kRowChunks / kTransposeThreads;  // of a thread

// What is past the last key or dim becomes zero.
__device__ void load(const TransposePass& pass, const Block& block, uint4* chunks) {
  const auto* source = static_cast<const char*>(pass.v.data) + block.head * pass.v.head_stride;
  uint4 loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int index = threadIdx.x + i * kTransposeThreads;
    const int key = block.first_key + index / kRowChunks;
    const int dim = block.first_dim + index % kRowChunks * kChunkBytes;
    loaded[i] = make_uint4(0, 0, 0, 0);
    if (key < pass.kv_len && dim < pass.head_dim) {
      // The source is read once: what is written is worth more in the L2 cache.
      loaded[i] = __ldcs(reinterpret_cast<const uint4*>(source + key * pass.v.token_stride + dim));
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int index = threadIdx.x + i * kTransposeThreads;
    chunks[transpose_chunk(index / kRowChunks, index % kRowChunks)] = loaded[i];
  }
}

// Four dims of four keys become four keys of four dims.
__device__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t low_first = __byte_perm(words[0], words[1], 0x5140);
  const uint32_t low_second = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high_first = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t high_second = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low_first, low_second, 0x5410);
  words[1] = __byte_perm(low_first, low_second, 0x7632);
  words[2] = __byte_perm(high_first, high_second, 0x5410);
  words[3] = __byte_perm(high_first, high_second, 0x7632);
}

__device__ void store(const TransposePass& pass, const Block& block, const uint4* chunks) {
  const TransposeItem item = TransposeItem::of(threadIdx.x);
  if (block.first_dim + item.first_dim >= pass.head_dim) return;
  const auto* words = reinterpret_cast<const uint32_t*>(chunks);
  uint32_t rows[TransposeItem::kDims][TransposeItem::kKeys / 4];
#pragma unroll
  for (int position = 0; position < TransposeItem::kKeys; position += 4) {
    uint32_t bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = item.group * TransposeItem::kKeys + transposed_key(position + i);
      bytes[i] = words[transpose_chunk(key, item.first_dim / kChunkBytes) * 4 +
                       item.first_dim % kChunkBytes / 4];
    }
    transpose_bytes(bytes);
#pragma unroll
    for (int dim = 0; dim < TransposeItem::kDims; ++dim) rows[dim][position / 4] = bytes[dim];
  }
  auto* target = static_cast<char*>(pass.target.data);
#pragma unroll
  for (int dim = 0; dim < TransposeItem::kDims; ++dim) {
    const int64_t element =
        pass.target_element(block.head, block.first_dim + item.first_dim + dim,
                            block.first_key + item.group * TransposeItem::kKeys);
    *reinterpret_cast<uint4*>(target + element) =
        make_uint4(rows[dim][0], rows[dim][1], rows[dim][2], rows[dim][3]);
  }
}

__global__ void __launch_bounds__(kTransposeThreads)
    transpose_blocks(const __grid_constant__ TransposePass pass) {
  __shared__ uint4 chunks[kTransposeKeys * kRowChunks];
  const Block block = pass.block(static_cast<int>(blockIdx.x));
  wait_for_kernel_before();
  load(pass, block, chunks);
  __syncthreads();
  store(pass, block, chunks);
}

}  // namespace

cudaError_t transpose_v(const TransposePass& pass, bool programmatic, cudaStream_t stream) {
  const int64_t blocks = pass.num_blocks();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_pass(transpose_blocks, static_cast<unsigned>(blocks), kTransposeThreads,
                     programmatic, stream, pass);
}

}  // namespace prefill
