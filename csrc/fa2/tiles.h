// Tile sizes of fa2, one row for each head-dim class.
#pragma once

#include "common/kernel_key.h"

namespace prefill::fa2 {

// Every choice fits in the 99 KB of consumer cards (sm86, sm89, sm120), and twice in the 164 KB of
// an A100 where it can: two blocks on an SM hide each other's barriers and softmax.
//   kEarlyV: wait for V before the softmax, which gives the next load the softmax to land in, but
//   keeps more registers alive; where they are short it spills.
//   kAhead: k-steps that operands are read from shared memory before their use; costs registers
//   too.
//   kOneBranch: in plain kernels scaling and masking, which few steps do, are behind one branch;
//   kAlwaysLoads: they load K without asking whether there is a next tile, zeros if there is none.
//   Where each is faster and does not spill.
template <class Dims>
struct Tile;

template <>
struct Tile<HeadDims<64, 64>> {  // 48 KB; O and S take 192 registers; reading ahead would spill
  static constexpr int kM = 128, kN = 128, kWarps = 4, kAhead = 0;
  static constexpr bool kEarlyV = false, kOneBranch = true, kAlwaysLoads = true;
};
template <>
struct Tile<HeadDims<128, 128>> {  // 64 KB; O and S take 192 registers
  static constexpr int kM = 128, kN = 64, kWarps = 4, kAhead = 1;
  static constexpr bool kEarlyV = false, kOneBranch = false, kAlwaysLoads = false;
};
template <>
struct Tile<HeadDims<192, 128>> {  // 88 KB; O and S take 192 registers
  static constexpr int kM = 128, kN = 64, kWarps = 4, kAhead = 0;
  static constexpr bool kEarlyV = false, kOneBranch = true, kAlwaysLoads = false;
};
template <>
struct Tile<HeadDims<256, 256>> {  // 96 KB; O and S take 160 registers; 128 rows would need 128 KB
  static constexpr int kM = 64, kN = 64, kWarps = 4, kAhead = 1;
  static constexpr bool kEarlyV = true, kOneBranch = true, kAlwaysLoads = false;
};

}  // namespace prefill::fa2
