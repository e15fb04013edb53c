// Types, layouts and budgets of one fa3 kernel, derived from its dtype and head-dim class.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "common/fragment.cuh"
#include "common/online_softmax.cuh"
#include "common/scores.h"
#include "fa3/barriers.cuh"
#include "fa3/tiles.h"
#include "fa3/work_list.cuh"

namespace prefill::fa3 {

using namespace cute;

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
constexpr int kWarpgroupRows = 64;

// The same, for all ptxas knows elsewhere: so that what a rare path reads of it, or where, is not
// worked out at the start and kept in registers throughout.
template <class T>
CUTE_DEVICE T& afresh(T& value) {
  T* place = &value;
  asm volatile("" : "+l"(place));
  return *place;
}

// Rows of so many elements side by side, of 128 bytes or of 64, swizzled over as many.
template <class T, int kColumns>
using LayoutAtomK = std::conditional_t<kColumns * sizeof(T) == 128, GMMA::Layout_K_SW128_Atom<T>,
                                       GMMA::Layout_K_SW64_Atom<T>>;

// V as the B operand of P V, (head_dim_vo, keys, stages): keys run along the rows of a box, of 8
// bits head dims do.
template <class T, int kVo, int kN, int kStages, int kColumns>
CUTE_HOST_DEVICE constexpr auto layout_vt() {
  using VtShape = Shape<Int<kVo>, Int<kN>, Int<kStages>>;
  if constexpr (sizeof(T) == 1) {
    return tile_to_shape(LayoutAtomK<T, kColumns>{}, VtShape{});
  } else {
    return tile_to_shape(GMMA::Layout_MN_SW128_Atom<T>{}, VtShape{}, Step<_2, _1, _3>{});
  }
}

template <DType kDType, class Dims_, Scores kScores>
struct Traits {
  using Dims = Dims_;
  using T = Element<kDType>;  // of Q, K and V
  static constexpr bool kIsFloat8 = sizeof(T) == 1;
  using Weight = std::conditional_t<kIsFloat8, cutlass::float_e4m3_t, T>;  // of P
  using Out = std::conditional_t<kIsFloat8, cutlass::bfloat16_t, T>;
  using Tile = std::conditional_t<kIsFloat8, Float8Tile<Dims>, fa3::Tile<Dims>>;
  // Weights of 8 bits are no good relative to anything but the maximum so far: all steps are exact,
  // with care, and nothing is done again.
  static constexpr bool kHasAnchors = !kIsFloat8;
  static constexpr bool kTakesMasks = kScores != Scores::Plain;    // custom ones
  static constexpr bool kTransforms = kScores == Scores::General;  // by caps and biases
  static constexpr int kWarpgroups = Tile::kWarpgroups;
  static constexpr int kM = kWarpgroups * kWarpgroupRows;
  static constexpr int kN = Tile::kN;
  static constexpr int kStages = Tile::kStages;
  static constexpr int kQStages = Tile::kQStages;
  static constexpr bool kStagesOutput = Tile::kStagesOutput;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;  // one producer

  // A block gets as many registers as its threads may have at its start, in eights; setmaxnreg
  // moves them from the producer to the consumers. More than there are would never be granted.
  static constexpr int kSharedRegisters = 65536 / kThreads / 8 * 8 * (kWarpgroups + 1);
  static constexpr int kProducerRegisters =
      kTakesMasks ? Tile::kMaskProducerRegisters : Tile::kProducerRegisters;
  static constexpr int kConsumerRegisters =
      (kSharedRegisters - kProducerRegisters) / kWarpgroups / 8 * 8;

  // Each consumer warpgroup multiplies its own 64 rows.
  using MmaQk = decltype(make_tiled_mma(
      GMMA::ss_op_selector<T, T, float, Shape<_64, Int<kN>, Int<Dims::kQk>>>()));
  // Columns of the output whose product with V is worked on at a time.
  static constexpr int kChunkVo = Tile::kChunkVo;
  // Of 8 bits WGMMA takes keys side by side alone: V has been transposed (transpose_v.h).
  static constexpr GMMA::Major kMajorV = kIsFloat8 ? GMMA::Major::K : GMMA::Major::MN;
  using MmaPv = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Weight, T, float, Shape<_64, Int<kChunkVo>, Int<kN>>, GMMA::Major::K,
                           kMajorV>()));

  static_assert(get<1>(typename MmaQk::AtomShape_MNK{}) == kN,
                "this number of keys needs CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED");

  // A tile is a row of boxes as TMA writes them: rows of 128 bytes, or 64 where that does not
  // divide the head dim, swizzled over as many.
  static constexpr int kColumns = Dims::kQk * sizeof(T) % 128 == 0 ? 128 / sizeof(T) : 64;
  using LayoutAtom = LayoutAtomK<T, kColumns>;
  using LayoutQ = decltype(tile_to_shape(
      LayoutAtom{}, Shape<Int<kWarpgroupRows>, Int<Dims::kQk>, Int<kQStages>>{}));
  using LayoutK =
      decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kN>, Int<Dims::kQk>, Int<kStages>>{}));
  static constexpr int kColumnsV = kIsFloat8 && kN % 128 != 0 ? 64 : 128 / sizeof(T);
  using LayoutVt = decltype(layout_vt<T, Dims::kVo, kN, kStages, kColumnsV>());
  static constexpr int kColumnsOut = 64;  // of a box of the output

  // The producer is at most two ahead of the row tile that a consumer works on, while the one
  // before is still to be written.
  static constexpr int kRowTiles = 4;
  static_assert(kRowTiles >= kQStages + 2, "a row tile would be told over one that is in use");
  static_assert(kRowTiles <= Progress::kRows && 2 * kQStages <= Progress::kRows &&
                    (kRowTiles & (kRowTiles - 1)) == 0,
                "row tiles are counted modulo a power of two");

  struct ConsumerStorage {
    alignas(1024) T q[kQStages][kWarpgroupRows * Dims::kQk];
    alignas(1024) Out out[kStagesOutput ? kWarpgroupRows * Dims::kVo : 1];  // as TMA reads it
    RingBarriers<kQStages> q_ring;
    RowTile rows[kRowTiles];
    float held[kIsFloat8 ? 1 : kWarpgroupThreads];  // only ever written, by Consumer::hold
  };

  struct SharedStorage {
    ConsumerStorage consumers[kWarpgroups];
    alignas(1024) T k[kStages][kN * Dims::kQk];
    alignas(1024) T v[kStages][kN * Dims::kVo];
    RingBarriers<kStages> k_ring;
    RingBarriers<kStages> v_ring;
    Results results;            // read once a row tile: ptxas would keep it in registers throughout
    int kv_tiles[2 * kStages];  // those in k, until the step after them has its K
    RedoList redo_list;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory of a Hopper SM");

  static constexpr int kRowsPerThread = 2;
  // E4M3 goes from 2^-9 to 448: the largest weight is 2^8.
  using Softmax = OnlineSoftmax<kRowsPerThread, kIsFloat8 ? 8 : 0>;
};

}  // namespace prefill::fa3
