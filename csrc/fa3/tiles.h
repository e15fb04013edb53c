// Tile sizes of fa3, one row for each head-dim class. docs/tuning.md has what was measured.
#pragma once

#include "common/kernel_key.h"

namespace prefill::fa3 {

//   kWarpgroups         consumers, 64 query rows each
//   kN                  keys of a KV tile
//   kStages, kQStages   tiles of K and V, and of Q, held in shared memory
//   kChunkVo            columns of the output that one product makes: all but for want of registers
//   kProducerRegisters  what consumers do not get; kMask... in kernels that know custom masks
//   kKeepsQ             descriptors of Q stay in registers from step to step
//   kHoldsWaits         the softmax of a step comes before the wait for the product it runs under;
//                       ptxas by itself puts three quarters of it after the wait
//   kStagesOutput       the output goes through shared memory and TMA, where there is room for it
//   kTurnOverlap        instructions of a product still to come when the next consumer gets its
//                       turn
template <class Dims>
struct Tile;

template <>
struct Tile<HeadDims<64, 64>> {  // 24 KB of Q + 2 x 28 KB. 128 keys would spill
  static constexpr int kWarpgroups = 3, kN = 112, kStages = 2, kQStages = 1, kChunkVo = 64;
  static constexpr int kProducerRegisters = 32, kMaskProducerRegisters = 32, kTurnOverlap = 0;
  static constexpr bool kKeepsQ = true, kHoldsWaits = false, kStagesOutput = false;
};
template <>
struct Tile<HeadDims<128, 128>> {  // 2 x 32 KB + 2 x 64 KB + 32 KB of output
  static constexpr int kWarpgroups = 2, kN = 128, kStages = 2, kQStages = 2, kChunkVo = 128;
  static constexpr int kProducerRegisters = 40, kMaskProducerRegisters = 40, kTurnOverlap = 2;
  static constexpr bool kKeepsQ = true, kHoldsWaits = true, kStagesOutput = true;
};
template <>
struct Tile<HeadDims<192, 128>> {  // 48 KB + 2 x 80 KB
  static constexpr int kWarpgroups = 2, kN = 128, kStages = 2, kQStages = 1, kChunkVo = 128;
  static constexpr int kProducerRegisters = 40, kMaskProducerRegisters = 40, kTurnOverlap = 2;
  static constexpr bool kKeepsQ = true, kHoldsWaits = true, kStagesOutput = false;
};
template <>
struct Tile<HeadDims<256, 256>> {  // 64 KB + 2 x 80 KB; more keys need more than 227 KB
  static constexpr int kWarpgroups = 2, kN = 80, kStages = 2, kQStages = 1, kChunkVo = 256;
  static constexpr int kProducerRegisters = 24, kMaskProducerRegisters = 24, kTurnOverlap = 2;
  static constexpr bool kKeepsQ = false, kHoldsWaits = true, kStagesOutput = false;
};

// Of operands of 8 bits. Their consumers hold accumulators of S, of one tile's P V and of O. Their
// steps have no use for kKeepsQ, kHoldsWaits and kTurnOverlap.
template <class Dims>
struct Float8Tile;

template <>
struct Float8Tile<HeadDims<128, 128>> {  // 32 KB + 4 x 32 KB + 32 KB
  static constexpr int kWarpgroups = 2, kN = 128, kStages = 4, kQStages = 2, kChunkVo = 128;
  static constexpr int kProducerRegisters = 24, kMaskProducerRegisters = 40;
  static constexpr bool kStagesOutput = true;
};
template <>
struct Float8Tile<HeadDims<192, 128>> {  // 24 KB + 4 x 40 KB + 32 KB
  static constexpr int kWarpgroups = 2, kN = 128, kStages = 4, kQStages = 1, kChunkVo = 128;
  static constexpr int kProducerRegisters = 24, kMaskProducerRegisters = 24;
  static constexpr bool kStagesOutput = true;
};
template <>
struct Float8Tile<HeadDims<256, 256>> {  // 32 KB + 4 x 32 KB
  static constexpr int kWarpgroups = 2, kN = 64, kStages = 4, kQStages = 1, kChunkVo = 64;
  static constexpr int kProducerRegisters = 24, kMaskProducerRegisters = 24;
  static constexpr bool kStagesOutput = false;
};

}  // namespace prefill::fa3
