// Who waits for whom: mbarrier rings between producer and consumers, named barriers among
// consumers.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

namespace prefill::fa3 {

// Keeps memory accesses on their side of a barrier operation, which tells the compiler nothing of
// memory.
CUTLASS_DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

// A ring of shared-memory stages. TMA completes `full`, consumers arrive at `empty`.
template <int kStages>
struct RingBarriers {
  static_assert((kStages & (kStages - 1)) == 0, "uses are counted in 32 bits");

  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  CUTLASS_DEVICE void init(int num_releases) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(1);
      empty[stage].init(num_releases);
    }
  }

  // Uses of the ring are counted from 0.
  CUTLASS_DEVICE void wait_full(uint32_t use) {
    full[use % kStages].wait(use / kStages & 1);
    compiler_fence();
  }
  CUTLASS_DEVICE void wait_empty(uint32_t use) {
    empty[use % kStages].wait(~use / kStages & 1);
    compiler_fence();
  }

  // In the place of so many that have no need of this use. `empty` has been waited for.
  CUTLASS_DEVICE void release_for(int releases, uint32_t use) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(
                     cute::cast_smem_ptr_to_uint(&empty[use % kStages])),
                 "r"(releases)
                 : "memory");
  }
};

// How far a consumer is, in one register: rings count their uses modulo powers of two. The two
// upper bits count row tiles that have been started; below them are KV tiles whose K has been used,
// of which V lags one behind.
struct Progress {
  static constexpr int kStepBits = 30, kRows = 1 << (32 - kStepBits);
  uint32_t counts = 0;

  CUTLASS_DEVICE uint32_t rows() const { return counts >> kStepBits; }
  // Every row tile makes room for its steps, which take far less than half of the bits.
  CUTLASS_DEVICE void next_rows() {
    counts = (counts + (1u << kStepBits)) & ~(1u << (kStepBits - 1));
  }

  // Its lower bits alone mean something.
  CUTLASS_DEVICE uint32_t steps() const { return counts; }
  CUTLASS_DEVICE void next_step() { ++counts; }
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

// As named_barrier_sync; true for all where `vote` is for one.
CUTLASS_DEVICE bool named_barrier_any(NamedBarrier barrier, int index, int threads, bool vote) {
  int any;
  asm volatile(
      "{.reg .pred mine, all; setp.ne.b32 mine, %1, 0; barrier.cta.red.or.pred all, %2, %3, mine;\n"
      "selp.b32 %0, 1, 0, all;}"
      : "=r"(any)
      : "r"(static_cast<int>(vote)), "r"(static_cast<int>(barrier) + index), "r"(threads)
      : "memory");
  return any != 0;
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
