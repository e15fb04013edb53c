// Global to shared memory by cp.async, 16 bytes at a time, with zero fill outside the tensor.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "common/params.h"
#include "fa2/traits.cuh"

namespace prefill::fa2 {

// One head of a tensor: rows of `head_dim` elements, `row_stride` apart.
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

// Copies rows [first_row, first_row + kRows) to `tile`, laid out as Traits::SmemLayout<kRows,
// kCols>. Eight threads read the 128 bytes of one row's 64 columns.
template <class Traits, int kRows, int kCols, class T>
CUTE_DEVICE void load_rows(const HeadRows<T>& source, int first_row, T* tile) {
  constexpr int kChunk = 16 / sizeof(T);
  constexpr int kChunks = Traits::kColumns / kChunk;
  constexpr int kRowStep = Traits::kThreads / kChunks;
  static_assert(kRows % kRowStep == 0, "every thread copies the same number of rows");
  static_assert(kRowStep % 8 == 0, "a thread's chunks are swizzled alike in all of its rows");
  const int thread_row = threadIdx.x / kChunks;
  const int thread_column = threadIdx.x % kChunks * kChunk;
  const typename Traits::template SmemLayout<kRows, kCols> layout;
  T* to = tile + layout(thread_row, thread_column);
  const T* from = source.data + (first_row + thread_row) * source.row_stride + thread_column;
  CUTE_UNROLL
  for (int row = 0; row < kRows; row += kRowStep) {
    const bool row_exists = first_row + thread_row + row < source.num_rows;
    CUTE_UNROLL
    for (int column = 0; column < kCols; column += Traits::kColumns) {
      // What does not exist is not read: its address does not matter.
      const bool exists = row_exists && thread_column + column < source.head_dim;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
          *reinterpret_cast<const uint128_t*>(from + column),
          *reinterpret_cast<uint128_t*>(to + row * Traits::kColumns + column * kRows), exists);
    }
    from += kRowStep * source.row_stride;
  }
}

// K and V tiles pass through a ring of slots in the order in which they are used: K of the last
// KV tile, its V, K of the tile before, and so on.
template <class Traits>
struct KvRing {
  using T = typename Traits::T;
  HeadRows<T> k, v;
  T* slots;
  int next;       // sequence number of the next load
  int num_loads;  // two for each KV tile
  int last_tile;

  CUTE_DEVICE T* slot(int sequence) const {
    return slots + sequence % Traits::kSlots * Traits::kSlotElements;
  }

  // Starts the next load, if there is one. Always commits a group, so that groups count loads.
  CUTE_DEVICE void load_next() {
    if (next < num_loads) {
      const int first_row = (last_tile - next / 2) * Traits::kN;
      if (next % 2 == 0) {
        load_rows<Traits, Traits::kN, Traits::Dims::kQk>(k, first_row, slot(next));
      } else {
        load_rows<Traits, Traits::kN, Traits::Dims::kVo>(v, first_row, slot(next));
      }
    }
    cp_async_fence();
    ++next;
  }

  // Waits until load `sequence` has landed for all threads and they are done with the one before
  // it; then starts the load that takes that one's slot.
  CUTE_DEVICE T* acquire(int sequence) {
    cp_async_wait<Traits::kSlots - 2>();
    __syncthreads();
    load_next();
    return slot(sequence);
  }
};

}  // namespace prefill::fa2
