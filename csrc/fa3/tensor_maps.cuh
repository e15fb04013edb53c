// TMA descriptors of one call: how boxes of Q, K, V and the output lie in global memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace prefill::fa3 {

struct TensorMaps {
  CUtensorMap q, k, v, out;
};

// The driver's encoder, found through the runtime: the library does not link to libcuda.
inline cudaError_t find_encoder(decltype(&cuTensorMapEncodeTiled)& encoder) {
  static void* entry = nullptr;
  static const cudaError_t error = [] {
    cudaDriverEntryPointQueryResult result;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &result);
    if (status != cudaSuccess) return status;
    return result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorInsufficientDriver;
  }();
  encoder = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  return error;
}

// Boxes of `box_rows` rows by 64 columns (128 bytes) of one head, swizzled as WGMMA reads them.
// What a box covers outside the tensor reads as zero, and is not written.
inline cudaError_t encode(CUtensorMap& map, const TensorView& tensor, CUtensorMapDataType type,
                          int head_dim, int length, int num_heads, int box_rows) {
  decltype(&cuTensorMapEncodeTiled) encoder = nullptr;
  if (cudaError_t error = find_encoder(encoder); error != cudaSuccess) return error;
  constexpr cuuint64_t kElementBytes = 2;
  // A dim of size 1 may come with any stride; TMA wants a multiple of 16 bytes all the same.
  const auto stride_bytes = [](int size, int64_t stride) {
    return size == 1 ? cuuint64_t{16} : static_cast<cuuint64_t>(stride) * kElementBytes;
  };
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(length),
                               static_cast<cuuint64_t>(num_heads)};
  const cuuint64_t strides[2] = {stride_bytes(length, tensor.token_stride),
                                 stride_bytes(num_heads, tensor.head_stride)};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result =
      encoder(&map, type, 3, tensor.data, sizes, strides, box, element_strides,
              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace prefill::fa3
