// TMA descriptors of one call: how boxes of Q, K, V and the output lie in global memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cutlass/numeric_types.h>

#include <type_traits>

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

// A dim after the first, in elements, and how much of it a box covers.
struct MapDim {
  int size;
  int64_t stride;
  int box;
};

// Elements of a tensor, and how many neighbours a box covers: rows of 128 or of 64 bytes.
struct MapElements {
  CUtensorMapDataType type;
  int bytes;
  int box;

  template <class T>
  static MapElements of(int box) {
    constexpr auto kType = std::is_same_v<T, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                           : std::is_same_v<T, cutlass::bfloat16_t>
                               ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                               : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    return {kType, sizeof(T), box};
  }
};

// Boxes by what `elements` and `dims` say, swizzled as WGMMA reads them. What a box covers outside
// the tensor reads as zero, and is not written.
template <int kDims>
cudaError_t encode(CUtensorMap& map, void* data, const MapElements& elements, int row_size,
                   const MapDim (&dims)[kDims]) {
  decltype(&cuTensorMapEncodeTiled) encoder = nullptr;
  if (cudaError_t error = find_encoder(encoder); error != cudaSuccess) return error;
  cuuint64_t sizes[kDims + 1] = {static_cast<cuuint64_t>(row_size)}, strides[kDims];
  cuuint32_t box[kDims + 1] = {static_cast<cuuint32_t>(elements.box)};
  cuuint32_t element_strides[kDims + 1] = {1};
  for (int i = 0; i < kDims; ++i) {
    sizes[i + 1] = static_cast<cuuint64_t>(dims[i].size);
    // A dim of size 1 may come with any stride; TMA wants a multiple of 16 bytes all the same.
    strides[i] = dims[i].size == 1 ? 16 : static_cast<cuuint64_t>(dims[i].stride * elements.bytes);
    box[i + 1] = static_cast<cuuint32_t>(dims[i].box);
    element_strides[i + 1] = 1;
  }
  const auto swizzle =
      elements.box * elements.bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result =
      encoder(&map, elements.type, kDims + 1, data, sizes, strides, box, element_strides,
              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Boxes of `box_rows` tokens of one head.
inline cudaError_t encode(CUtensorMap& map, const TensorView& tensor, const MapElements& elements,
                          int head_dim, int length, int num_heads, int box_rows) {
  return encode(map, tensor.data, elements, head_dim,
                {{length, tensor.token_stride, box_rows}, {num_heads, tensor.head_stride, 1}});
}

// Boxes of a block of rows.
inline cudaError_t encode(CUtensorMap& map, const TensorView& tensor, const MapElements& elements,
                          int head_dim, int length, int num_heads, const RowMap& rows) {
  return encode(map, tensor.data, elements, head_dim,
                {{rows.heads, tensor.head_stride, rows.heads},
                 {length, tensor.token_stride, rows.tokens},
                 {num_heads / rows.heads, tensor.head_stride * rows.heads, 1}});
}

}  // namespace prefill::fa3
