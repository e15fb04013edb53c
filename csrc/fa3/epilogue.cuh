// Writes a warpgroup's finished rows, through shared memory and TMA or straight from registers.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "common/fragment.cuh"
#include "common/lse.cuh"
#include "common/params.h"
#include "fa3/traits.cuh"

namespace prefill::fa3 {

// The pair of columns that a thread holds of a chunk of 8, in its first row or in that 8 below,
// rounded to 16 bits.
template <class T, class Acc>
CUTE_DEVICE uint32_t rounded_pair(Acc const& accumulators, int chunk, int half) {
  cutlass::NumericArrayConverter<T, float, 2> convert;
  auto const* pair = accumulators.data() + 4 * chunk + 2 * half;
  const cutlass::Array<T, 2> values = convert({pair[0], pair[1]});
  return reinterpret_cast<uint32_t const&>(values);
}

// Rounds accumulators of a warpgroup and puts them where TMA takes them from: boxes of 64 columns,
// rows of 128 bytes whose 16-byte chunks are swizzled by the row.
template <class T, class Acc>
CUTE_DEVICE void stage_rows(T* boxes, int thread, Acc const& accumulators) {
  constexpr int kChunks = decltype(size(accumulators))::value / 4;  // in a row
  constexpr int kBoxBytes = kWarpgroupRows * 128;
  // stmatrix takes four 8 x 8 matrices, the rows' addresses from 8 lanes each: two chunks of 16
  // rows.
  const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  const uint32_t first = cast_smem_ptr_to_uint(boxes) + row * 128 + ((lane / 16 ^ row % 8) * 16);
  CUTE_UNROLL
  for (int chunk = 0; chunk < kChunks; chunk += 2) {
    const uint32_t address = (first ^ chunk % 8 * 16) + chunk / 8 * kBoxBytes;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(rounded_pair<T>(accumulators, chunk, 0)),
                 "r"(rounded_pair<T>(accumulators, chunk, 1)),
                 "r"(rounded_pair<T>(accumulators, chunk + 1, 0)),
                 "r"(rounded_pair<T>(accumulators, chunk + 1, 1))
                 : "memory");
  }
}

// Where shared memory has no place for it: straight from registers, from row `first_row` on. Two
// neighbours of a quad hold 4 bytes each of chunks of 8 columns; they swap, so that each has 8
// bytes of one chunk and a quad writes whole 32-byte sectors.
template <class T, class Acc>
CUTE_DEVICE void store_rows(Results const& to, int head, int first_row, Acc const& accumulators) {
  constexpr int kChunks = decltype(size(accumulators))::value / 4;  // in a row
  static_assert(kChunks % 2 == 0);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const bool is_odd = thread % 2 == 1;
  const int row = first_row + thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 2 * 8 + thread % 4 / 2 * 4;
  T* destination = static_cast<T*>(to.out.data) + head * to.out.head_stride + column;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const bool in_range = row + 8 * half < to.qo_len;
    T* row_start = destination + (row + 8 * half) * to.out.token_stride;
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      const uint32_t even = rounded_pair<T>(accumulators, chunk, half);
      const uint32_t odd = rounded_pair<T>(accumulators, chunk + 1, half);
      const uint32_t received = __shfl_xor_sync(0xffffffffu, is_odd ? even : odd, 1);
      if (in_range && chunk * 8 + column < to.head_dim_vo) {
        *reinterpret_cast<uint2*>(row_start + chunk * 8) =
            is_odd ? make_uint2(received, odd) : make_uint2(even, received);
      }
    }
  }
}

// Whether no element of a (rows, columns) view is inf or NaN, which times 0 is NaN. Rows whose
// factor is NaN are NaN however they are computed, and are not asked.
template <class Outputs, class Normaliser>
CUTE_DEVICE bool all_finite(Outputs const& outputs, Normaliser const& normaliser) {
  bool finite = true;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(outputs); ++r) {
    float sums[2] = {};  // independent ones, to hide latency
    CUTE_UNROLL
    for (int c = 0; c < size<1>(outputs); ++c) {
      sums[c % 2] = fmaf(outputs(r, c), 0.f, sums[c % 2]);
    }
    finite = finite && (sums[0] + sums[1] == 0.f || isnan(normaliser.factor[r]));
  }
  return finite;
}

}  // namespace prefill::fa3
