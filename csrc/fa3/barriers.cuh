// Who waits for whom: mbarrier rings between producer and consumers, named barriers among
// consumers.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

namespace prefill::fa3 {

// A ring of shared-memory stages. TMA completes `full`, consumers arrive at `empty`.
template <int kStages>
struct RingBarriers {
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  CUTLASS_DEVICE void init(int num_releases) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(1);
      empty[stage].init(num_releases);
    }
  }
};

// A position in a ring that is walked round and round.
template <int kStages>
struct RingCursor {
  int stage = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Ids of the hardware's 16 named barriers; 0 is __syncthreads.
enum class NamedBarrier : int {
  kTurn = 1,               // one for each of up to 3 consumer warpgroups
  kWarpgroup = kTurn + 3,  // likewise
};

CUTLASS_DEVICE void named_barrier_sync(NamedBarrier barrier, int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier) + index), "r"(threads)
               : "memory");
}

CUTLASS_DEVICE void named_barrier_arrive(NamedBarrier barrier, int index, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier) + index), "r"(threads)
               : "memory");
}

// Consumer warpgroups issue their products in turn, so that one's softmax runs while the tensor
// cores work for another.
template <int kWarpgroups>
struct Turn {
  static constexpr int kThreads = 256;  // the warpgroup that waits and the one that gives
  int warpgroup;

  CUTLASS_DEVICE explicit Turn(int warpgroup_) : warpgroup(warpgroup_) {
    if (warpgroup == kWarpgroups - 1) give();  // the first turn is warpgroup 0's
  }

  CUTLASS_DEVICE void take() const { named_barrier_sync(NamedBarrier::kTurn, warpgroup, kThreads); }

  CUTLASS_DEVICE void give() const {
    const int next = warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1;
    named_barrier_arrive(NamedBarrier::kTurn, next, kThreads);
  }

  // Takes back the turn that is on its way, so that no barrier is left half full.
  CUTLASS_DEVICE void finish() const {
    if (warpgroup == 0) take();
  }
};

}  // namespace prefill::fa3
