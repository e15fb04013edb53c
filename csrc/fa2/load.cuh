// Global to shared memory by cp.async, 16 bytes at a time, with zero fill outside the tensor.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "fa2/traits.cuh"

namespace prefill::fa2 {

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
  const T* from = source.data + thread_column;
  // Holds the compiler to this order of sums: in another the column, in two registers, would be
  // kept from load to load, and spill.
  asm volatile("" : "+l"(from));
  from += (first_row + thread_row) * source.row_stride;
  CUTE_UNROLL
  for (int row = 0; row < kRows; row += kRowStep) {
    // Nor do rows before the first.
    const bool row_exists = static_cast<unsigned>(first_row + thread_row + row) <
                            static_cast<unsigned>(source.num_rows);
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

// Queries from row `first_row` of the call on, of a block of heads (RowMap), in the same way.
template <class Traits>
CUTE_DEVICE void load_q(const PrefillParams& params, int head, int first_row,
                        typename Traits::T* tile) {
  using T = typename Traits::T;
  constexpr int kChunk = 16 / sizeof(T);
  constexpr int kChunks = Traits::kColumns / kChunk;
  const typename Traits::LayoutQ layout;
  const int thread_column = threadIdx.x % kChunks * kChunk;
  const T* from = static_cast<const T*>(params.q.data) + thread_column +
                  int64_t{head} * params.rows.heads * params.q.head_stride;
  CUTE_UNROLL
  for (int row = threadIdx.x / kChunks; row < Traits::kM; row += Traits::kThreads / kChunks) {
    const int of_call = first_row + row;
    const bool row_exists = params.rows.exists(of_call, params.qo_len);
    const T* of_row = from + params.rows.token(of_call) * params.q.token_stride +
                      params.rows.head(of_call) * params.q.head_stride;
    CUTE_UNROLL
    for (int column = 0; column < Traits::Dims::kQk; column += Traits::kColumns) {
      const bool exists = row_exists && thread_column + column < params.head_dim_qk;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
          *reinterpret_cast<const uint128_t*>(of_row + column),
          *reinterpret_cast<uint128_t*>(&tile[layout(row, thread_column + column)]), exists);
    }
  }
}

// K and V of one KV head. Shared memory holds one tile of each; while one is in use, the other
// loads.
template <class Traits>
struct KvLoader {
  using T = typename Traits::T;
  const HeadRows<T>& k;
  const HeadRows<T>& v;
  typename Traits::SharedStorage& smem;

  CUTE_DEVICE void start_k(int tile) const {
    load_rows<Traits, Traits::kN, Traits::Dims::kQk>(k, tile * Traits::kN, smem.k);
    cp_async_fence();
  }

  CUTE_DEVICE void start_v(int tile) const {
    load_rows<Traits, Traits::kN, Traits::Dims::kVo>(v, tile * Traits::kN, smem.v);
    cp_async_fence();
  }

  // What was started has landed for all threads, and all are done with what they read before.
  CUTE_DEVICE static void wait() {
    cp_async_wait<0>();
    __syncthreads();
  }
};

}  // namespace prefill::fa2
