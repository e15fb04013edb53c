// Register fragments of mma.sync and WGMMA seen in the same way. Both give a thread pairs of
// neighbouring columns in rows r and r + 8; only the nesting of the modes differs.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include "common/kernel_key.h"
#include "common/mask.cuh"
#include "common/params.h"

namespace prefill {

template <DType kDType>
struct ElementOf;
template <>
struct ElementOf<DType::float16> {
  using type = cutlass::half_t;
};
template <>
struct ElementOf<DType::bfloat16> {
  using type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<DType::float8_e4m3> {
  using type = cutlass::float_e4m3_t;
};
template <>
struct ElementOf<DType::float8_e5m2> {
  using type = cutlass::float_e5m2_t;
};
template <DType kDType>
using Element = typename ElementOf<kDType>::type;

// Accumulator layout as (rows, columns):
//   mma.sync  ((2, 2), MMA_M, MMA_N)        -> ((2, MMA_M), (2, MMA_N))
//   WGMMA     ((2, 2, N/8), MMA_M, MMA_N)   -> ((2, MMA_M), (2, N/8, MMA_N))
template <class Layout>
CUTE_HOST_DEVICE constexpr auto row_column_layout(Layout const& layout) {
  using namespace cute;
  static_assert(decltype(rank(layout))::value == 3);
  auto value = get<0>(layout);
  if constexpr (decltype(rank(value))::value == 2) {
    return make_layout(make_layout(get<1>(value), get<1>(layout)),
                       make_layout(get<0>(value), get<2>(layout)));
  } else {
    return make_layout(make_layout(get<1>(value), get<1>(layout)),
                       make_layout(get<0>(value), get<2>(value), get<2>(layout)));
  }
}

template <class Fragment>
CUTE_DEVICE auto row_column_view(Fragment& accumulators) {
  return cute::make_tensor(accumulators.data(), row_column_layout(accumulators.layout()));
}

// The accumulators of one product as the A operand of the next, K being the columns:
//   mma.sync  ((2, 2), MMA_M, MMA_N)        -> ((2, 2, 2), MMA_M, MMA_N/2)
//   WGMMA     ((2, 2, N/8), MMA_M, MMA_N)   -> ((2, 2, 2), MMA_M, (N/16, MMA_N))
template <class Layout>
CUTE_HOST_DEVICE constexpr auto operand_a_layout(Layout const& layout) {
  using namespace cute;
  auto value = get<0>(layout);
  if constexpr (decltype(rank(value))::value == 2) {
    auto columns = logical_divide(get<2>(layout), _2{});  // (2, MMA_N/2)
    return make_layout(make_layout(get<0>(value), get<1>(value), get<0>(columns)), get<1>(layout),
                       get<1>(columns));
  } else {
    auto columns = logical_divide(get<2>(value), _2{});  // (2, N/16)
    return make_layout(make_layout(get<0>(value), get<1>(value), get<0>(columns)), get<1>(layout),
                       make_layout(get<1>(columns), get<2>(layout)));
  }
}

// Rounds fp32 registers to a 16-bit type, element by element in register order.
template <class Target, class Source, class Destination>
CUTE_DEVICE void convert_fragment(Source const& source, Destination& destination) {
  constexpr int kSize = decltype(cute::size(source))::value;
  static_assert(kSize == decltype(cute::size(destination))::value);
  cutlass::NumericArrayConverter<Target, float, kSize> convert;
  auto const& from = *reinterpret_cast<cutlass::Array<float, kSize> const*>(source.data());
  *reinterpret_cast<cutlass::Array<Target, kSize>*>(destination.data()) = convert(from);
}

// Rounds the (rows, columns) view of accumulators of S to 8 bits, as the A operand of P V: WGMMA
// takes four neighbouring keys in a register, ((4, 2, 2), MMA_M, N/32), of which each thread has
// those of four columns, here columns [first, end). What makes neighbours of them is the order of
// keys in V (transpose_v.h).
template <class Target, class Scores, class Weights>
CUTE_DEVICE void round_to_float8(Scores const& scores, Weights& weights, int first, int end) {
  using namespace cute;
  constexpr int kColumns = decltype(size<1>(scores))::value;
  static_assert(decltype(size<0>(scores))::value == 2 && kColumns % 4 == 0);
  static_assert(decltype(size(weights))::value == 2 * kColumns);
  cutlass::NumericArrayConverter<Target, float, 4> convert;
  auto* registers = reinterpret_cast<cutlass::Array<Target, 4>*>(weights.data());
  CUTE_UNROLL
  for (int c = first; c < end; c += 4) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      registers[c / 2 + r] =
          convert({scores(r, c), scores(r, c + 1), scores(r, c + 2), scores(r, c + 3)});
    }
  }
}

// A thread's columns in a row of accumulators, counted from its first: 0, 1, 8, 9, 16, 17 and so
// on. As a set of bits, those before `key`.
CUTE_HOST_DEVICE constexpr uint32_t columns_before(int key) {
  if (key <= 0) return 0;
  const int rest = key % 8;
  const int count = key / 8 * 2 + (rest < 2 ? rest : 2);
  return count < 32 ? (1u << count) - 1 : ~0u;
}

// Sets scores of the columns whose bit is 0 to -inf.
template <class Scores>
CUTE_DEVICE void keep_columns(Scores& scores, int row, uint32_t visible) {
  using namespace cute;
  constexpr int kColumns = decltype(size<1>(scores))::value;
  static_assert(kColumns <= 32, "a bit for each column");
  CUTE_UNROLL
  for (int c = 0; c < kColumns; ++c) {
    scores(row, c) = visible >> c & 1 ? scores(row, c) : -INFINITY;
  }
}

// Sets scores outside the band to -inf. `key` is that of the thread's first element, and `offsets`,
// which are compile-time constants, what the others add to that (element_offsets). `query` answers
// which query a row is, by its offset: one of the call's.
template <class Scores, class Offsets, class Query>
CUTE_DEVICE void apply_mask(Scores& scores, Offsets const& offsets, BandMask const& band, int key,
                            Query const& query) {
  using namespace cute;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const int this_row = query(static_cast<int>(get<0>(offsets(r, _0{}))));
    keep_columns(scores, r,
                 columns_before(band.row_end(this_row) - key) &
                     ~columns_before(band.row_begin(this_row) - key));
  }
}

// Sets scores that a custom mask's mixed KV tile does not show to -inf. `row` is that of the
// thread's first element; the rows of accumulators are pairs 8 apart.
template <class Scores, class Offsets>
CUTE_DEVICE void apply_bits(Scores& scores, Offsets const& offsets, MaskTiles const& mask, int row,
                            int tile) {
  using namespace cute;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); r += 2) {
    const int block = (row + static_cast<int>(get<0>(offsets(r, _0{})))) / 16;
    const MaskWords* words = mask.bits + (int64_t{block} * mask.num_kv_tiles + tile) * 32;
    const MaskWords shown = words[threadIdx.x % 32];
    keep_columns(scores, r, shown.rows[0]);
    keep_columns(scores, r + 1, shown.rows[1]);
  }
}

// (row, column) of each accumulator of a thread within its tile.
template <class TileShape, class TiledMma>
CUTE_DEVICE auto element_coordinates(TiledMma const& tiled_mma, int thread) {
  using namespace cute;
  Tensor coordinates = tiled_mma.get_slice(thread).partition_C(make_identity_tensor(TileShape{}));
  return row_column_view(coordinates);
}

// The same relative to the thread's first accumulator: alike for all threads, hence constants.
template <class TileShape, class TiledMma>
CUTE_DEVICE auto element_offsets(TiledMma const& tiled_mma) {
  return element_coordinates<TileShape>(tiled_mma, 0);
}

}  // namespace prefill
