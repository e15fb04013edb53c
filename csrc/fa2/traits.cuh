// Types and layouts of one fa2 kernel, derived from its dtype and head-dim class.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/fragment.cuh"
#include "common/logits.cuh"
#include "common/online_softmax.cuh"
#include "common/scores.h"
#include "fa2/head_rows.cuh"
#include "fa2/kv_tiles.cuh"
#include "fa2/tiles.h"

namespace prefill::fa2 {

using namespace cute;

// What a block needs to know of its row tile, apart from Q.
template <class T>
struct RowTile {
  HeadRows<T> k, v;
  KvTiles tiles;
  LogitTransform transform;
  int first_row;
};
struct Nothing {};

template <DType kDType, class Dims_, Scores kScores>
struct Traits {
  using Dims = Dims_;
  using T = Element<kDType>;
  static constexpr bool kIsGeneral = kScores == Scores::General;
  static constexpr int kM = Tile<Dims>::kM;
  static constexpr int kN = Tile<Dims>::kN;
  static constexpr int kAhead = Tile<Dims>::kAhead;
  static constexpr bool kEarlyV = Tile<Dims>::kEarlyV;
  static constexpr bool kOneBranch = Tile<Dims>::kOneBranch;
  static constexpr bool kAlwaysLoads = !kIsGeneral && Tile<Dims>::kAlwaysLoads;
  static constexpr int kThreads = Tile<Dims>::kWarps * 32;

  using MmaOp = std::conditional_t<kDType == DType::float16, SM80_16x8x16_F32F16F16F32_TN,
                                   SM80_16x8x16_F32BF16BF16F32_TN>;
  // Every warp owns whole rows; 16 columns at a time let one ldmatrix.x4 feed two mma.
  using TiledMma =
      decltype(make_tiled_mma(MmaOp{}, Layout<Shape<Int<Tile<Dims>::kWarps>, _1, _1>>{},
                              cute::Tile<Int<Tile<Dims>::kWarps * 16>, _16, _16>{}));

  // Rows of 64 elements (128 bytes), 16-byte chunks swizzled over 8 rows: no bank conflicts for
  // cp.async, ldmatrix and ldmatrix.trans.
  static constexpr int kColumns = 64;
  using LayoutAtom =
      decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
  template <int kRows, int kCols>
  using SmemLayout = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kRows>, Int<kCols>>{}));
  using LayoutQ = SmemLayout<kM, Dims::kQk>;
  using LayoutK = SmemLayout<kN, Dims::kQk>;
  using LayoutV = SmemLayout<kN, Dims::kVo>;
  using LayoutO = SmemLayout<kM, Dims::kVo>;
  // V as the B operand of P V: (head_dim_vo, keys)
  using LayoutVt = decltype(composition(
      LayoutV{}, make_layout(Shape<Int<Dims::kVo>, Int<kN>>{}, GenRowMajor{})));

  struct SharedStorage {
    alignas(128) T q[kM * Dims::kQk];  // the output tile in the end
    alignas(128) T k[kN * Dims::kQk];
    alignas(128) T v[kN * Dims::kVo];
    int queries[kM];  // which of the call's each row is; for masks the last one past the end
    // What general kernels use once a KV tile; in registers it would cost spills. Plain ones have
    // registers for it.
    std::conditional_t<kIsGeneral, RowTile<T>, Nothing> row_tile;
  };

  static constexpr int kRowsPerThread = 2 * kM / (Tile<Dims>::kWarps * 16);
  using Softmax = OnlineSoftmax<kRowsPerThread>;
  // Exponentials leave issue slots free for it.
  static constexpr bool kWithCare = true;
};

}  // namespace prefill::fa2
