// Tile sizes of fa3, one row for each head-dim class.
#pragma once

#include "common/kernel_key.h"

namespace prefill::fa3 {

//   kWarpgroups: consumers, 64 query rows each; kStages: K and V tiles held in shared memory.
template <class Dims>
struct Tile;

template <>
struct Tile<HeadDims<64, 64>> {  // 24 KB of Q + 2 x 32 KB
  static constexpr int kWarpgroups = 3, kN = 128, kStages = 2;
};
template <>
struct Tile<HeadDims<128, 128>> {  // 32 KB + 2 x 64 KB
  static constexpr int kWarpgroups = 2, kN = 128, kStages = 2;
};
template <>
struct Tile<HeadDims<192, 128>> {  // 48 KB + 2 x 80 KB
  static constexpr int kWarpgroups = 2, kN = 128, kStages = 2;
};
template <>
struct Tile<HeadDims<256, 256>> {  // 64 KB + 2 x 80 KB; more keys need more than 227 KB
  static constexpr int kWarpgroups = 2, kN = 80, kStages = 2;
};

}  // namespace prefill::fa3
