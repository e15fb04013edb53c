// One head of a tensor in global memory.
#pragma once

#include <cute/config.hpp>

#include "common/params.h"

namespace prefill::fa2 {

// Rows of `head_dim` elements, `row_stride` apart.
template <class T>
struct HeadRows {
  const T* data;
  int64_t row_stride;
  int num_rows;
  int head_dim;

  CUTE_DEVICE static HeadRows of(const TensorView& tensor, int head, int num_rows, int head_dim) {
    return {static_cast<const T*>(tensor.data) + head * tensor.head_stride, tensor.token_stride,
            num_rows, head_dim};
  }
};

}  // namespace prefill::fa2
