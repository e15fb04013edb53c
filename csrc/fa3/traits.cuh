// Types, layouts and budgets of one fa3 kernel, derived from its dtype and head-dim class.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "common/fragment.cuh"
#include "common/online_softmax.cuh"
#include "fa3/barriers.cuh"
#include "fa3/tiles.h"

namespace prefill::fa3 {

using namespace cute;

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;

template <DType kDType, class Dims_>
struct Traits {
  using Dims = Dims_;
  using T = Element<kDType>;
  static constexpr int kWarpgroups = Tile<Dims>::kWarpgroups;
  static constexpr int kM = kWarpgroups * kWarpgroupRows;
  static constexpr int kN = Tile<Dims>::kN;
  static constexpr int kStages = Tile<Dims>::kStages;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;  // one producer

  // An SM has 512 registers for each thread of a warpgroup, and runs one block. setmaxnreg counts
  // in eights.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = (512 - kProducerRegisters) / kWarpgroups / 8 * 8;
  static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <= 512,
                "the warpgroups share the register file");

  // Each consumer warpgroup multiplies its own 64 rows.
  using MmaQk = decltype(make_tiled_mma(
      GMMA::ss_op_selector<T, T, float, Shape<_64, Int<kN>, Int<Dims::kQk>>>()));
  using MmaPv =
      decltype(make_tiled_mma(GMMA::rs_op_selector<T, T, float, Shape<_64, Int<Dims::kVo>, Int<kN>>,
                                                   GMMA::Major::K, GMMA::Major::MN>()));

  static_assert(get<1>(typename MmaQk::AtomShape_MNK{}) == kN,
                "this number of keys needs CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED");

  // A tile is a row of 64-column boxes, as TMA writes them: 128-byte rows, 128-byte swizzle.
  static constexpr int kColumns = 64;
  using LayoutAtom = GMMA::Layout_K_SW128_Atom<T>;
  using LayoutQ = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kM>, Int<Dims::kQk>>{}));
  using LayoutO = decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kM>, Int<Dims::kVo>>{}));
  using LayoutK =
      decltype(tile_to_shape(LayoutAtom{}, Shape<Int<kN>, Int<Dims::kQk>, Int<kStages>>{}));
  // V as the B operand of P V, (head_dim_vo, keys, stages): keys run along the rows of a box.
  using LayoutVt =
      decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<T>{},
                             Shape<Int<Dims::kVo>, Int<kN>, Int<kStages>>{}, Step<_2, _1, _3>{}));

  struct SharedStorage {
    alignas(1024) T q[kM * Dims::kQk];  // the output tile in the end
    alignas(1024) T k[kStages][kN * Dims::kQk];
    alignas(1024) T v[kStages][kN * Dims::kVo];
    RingBarriers<1> q_ring;
    RingBarriers<kStages> k_ring;
    RingBarriers<kStages> v_ring;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory of a Hopper SM");

  static constexpr int kRowsPerThread = 2;
  using Softmax = OnlineSoftmax<kRowsPerThread>;
};

}  // namespace prefill::fa3
