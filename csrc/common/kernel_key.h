// What names a kernel (backend, dtype, head-dim class) and what a kernel tells of itself.
#pragma once

#include <cstdint>

namespace prefill {

enum class Backend : int32_t { fa2, fa3 };
enum class DType : int32_t { float16, bfloat16, float8_e4m3, float8_e5m2 };

constexpr bool is_float8(DType dtype) {
  return dtype == DType::float8_e4m3 || dtype == DType::float8_e5m2;
}

// What a call writes: what its kernel does, or another type by way of parts (SplitKv).
enum class OutputType : int32_t { float16, bfloat16, float32 };

constexpr OutputType kernel_output(DType dtype) {
  return dtype == DType::float16 ? OutputType::float16 : OutputType::bfloat16;
}

// A head-dim class. Any pair of dims that both fit rides on it: what is missing is read as zero.
template <int kQk_, int kVo_>
struct HeadDims {
  static constexpr int kQk = kQk_;
  static constexpr int kVo = kVo_;
  static_assert(kQk % 64 == 0 && kVo % 64 == 0, "shared memory is laid out in 64-element columns");
  static_assert(kVo <= kQk, "the output tile takes the place of the query tile");
};

struct KernelInfo {
  int tile_m;
  int tile_n;
  int stages;
  int threads;
  int smem_bytes;
};

}  // namespace prefill
