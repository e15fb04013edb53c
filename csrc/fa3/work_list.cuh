// The row tiles of one block. The producer walks the schedule and tells the consumers through
// shared memory, along with Q.
#pragma once

#include "common/logits.cuh"
#include "common/mask.cuh"
#include "common/tile_schedule.cuh"
#include "fa3/barriers.cuh"

namespace prefill::fa3 {

// All that a consumer needs to know of its next rows.
struct RowTile {
  int round;  // of the schedule; instead of a row tile, at the end of a pass over it: the pass
  int head;
  int first_row;  // of the consumer's own rows
  int part;       // which of the parts of all row tiles; negative: they are whole
  LogitTransform transform;
  float sink;  // in base-2 units
  float value_scale;
  bool is_careful;    // exact steps with care, without anchors
  int num_first;      // steps of the loop that masks and that ends the rows before
  int num_exact;      // steps of the online softmax, these included; anchored ones follow
  KvTileOrder order;  // of the consumer's own rows
  bool skips_first;   // which lacks the first KV tile of the row tile's

  CUTE_DEVICE static RowTile end(int pass) {
    return {pass, 0, 0, -1, {}, 0.f, 0.f, true, 0, 0, {0, 0, -1, 0}, false};
  }
  CUTE_DEVICE bool is_end() const { return order.count < 0; }
};

// What consumers tell of row tiles in which weights have left their range: a bit for each round of
// the schedule. Each consumer arrives at `complete` once, after its last row tile.
struct RedoList {
  static constexpr int kRounds = 4096;  // later rounds are exact at once

  cutlass::arch::ClusterBarrier complete;
  uint32_t any;
  uint32_t rounds[kRounds / 32];

  CUTE_DEVICE void init(int num_consumers) {
    complete.init(num_consumers);
    any = 0;
  }

  // By one warp.
  CUTE_DEVICE void clear() {
    for (int word = threadIdx.x % 32; word < kRounds / 32; word += 32) rounds[word] = 0;
  }

  CUTE_DEVICE void add(int round) {
    atomicOr(&rounds[round / 32], 1u << round % 32);
    any = 1;
  }

  CUTE_DEVICE bool holds(int round) const { return rounds[round / 32] >> round % 32 & 1; }

  CUTE_DEVICE void arrive() {
    compiler_fence();
    complete.arrive();
  }

  CUTE_DEVICE bool wait_any() {
    complete.wait(0);
    compiler_fence();
    return any != 0;
  }
};

}  // namespace prefill::fa3
