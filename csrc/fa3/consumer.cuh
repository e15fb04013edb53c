// A consumer warpgroup: products on the tensor cores, softmax between them, for 64 query rows.
#pragma once

#include "common/fragment.cuh"
#include "common/mask.cuh"
#include "common/params.h"
#include "common/parts.cuh"
#include "common/transform.cuh"
#include "fa3/epilogue.cuh"
#include "fa3/tensor_maps.cuh"
#include "fa3/traits.cuh"
#include "fa3/work_list.cuh"

namespace prefill::fa3 {

// Starts acc = A B, or acc += A B, and commits it as one group; calls `near_end` when all but the
// last `kLeft` instructions are on their way.
template <int kLeft = 0, class TiledMma, class A, class B, class Acc, class NearEnd>
CUTE_DEVICE void start_gemm(TiledMma& mma, A const& a, B const& b, bool accumulate, Acc& acc,
                            NearEnd&& near_end) {
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = accumulate ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  constexpr int kSteps = decltype(size<2>(a))::value;
  static_assert(kLeft <= kSteps, "near_end would never be called");
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    if (k + kLeft == kSteps) near_end();
    gemm(mma, a(_, _, k), b(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  if (kLeft == 0) near_end();
}
template <class TiledMma, class A, class B, class Acc>
CUTE_DEVICE void start_gemm(TiledMma& mma, A const& a, B const& b, bool accumulate, Acc& acc) {
  start_gemm(mma, a, b, accumulate, acc, [] {});
}

template <class Traits>
struct Consumer {
  using T = typename Traits::T;
  using Dims = typename Traits::Dims;
  using Softmax = typename Traits::Softmax;

  typename Traits::SharedStorage& smem;
  typename Traits::ConsumerStorage& own;
  PrefillParams const& params;
  TensorMaps const& maps;
  BandMask const& mask;
  const int warpgroup;
  const int thread;  // within the warpgroup
  Turn<Traits::kWarpgroups> turn;
  Progress progress;
  uint32_t q_stage = 0;  // of the row tile started last

  CUTE_DEVICE Consumer(typename Traits::SharedStorage& smem_, PrefillParams const& params_,
                       TensorMaps const& maps_, BandMask const& mask_, int warpgroup_)
      : smem(smem_),
        own(smem_.consumers[warpgroup_]),
        params(params_),
        maps(maps_),
        mask(mask_),
        warpgroup(warpgroup_),
        thread(threadIdx.x % kWarpgroupThreads),
        turn(warpgroup_) {}

  // The row tile started last, and the one before.
  CUTE_DEVICE RowTile const& rows() const {
    return own.rows[(progress.rows() - 1) % Traits::kRowTiles];
  }
  CUTE_DEVICE RowTile const& previous_rows() const {
    return own.rows[(progress.rows() - 2) % Traits::kRowTiles];
  }

  // ptxas moves the wait for a product up, above arithmetic that is meant to run under the product.
  // A store of what the arithmetic gave holds it in its place.
  CUTE_DEVICE void hold(float value) {
    if constexpr (Traits::Tile::kHoldsWaits) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(cast_smem_ptr_to_uint(&own.held[thread])),
                   "f"(value)
                   : "memory");
    }
  }

  // Every warp reports for itself: its part of the product is done.
  template <int kStages>
  CUTE_DEVICE void release(RingBarriers<kStages>& ring, uint32_t use) const {
    if (thread % 32 == 0) ring.empty[use % kStages].arrive();
  }

  // For all ptxas knows, another one: so that what a path that is seldom taken makes of it is not
  // worked out once and kept throughout.
  CUTE_DEVICE int new_thread() const {
    int this_thread = thread;
    asm volatile("" : "+r"(this_thread));
    return this_thread;
  }

  CUTE_DEVICE static bool is_careful(RowTile const& rows) {
    return !Traits::kHasAnchors || rows.is_careful;
  }

  // What masks and transforms need to know of a thread's scores.
  struct Place {
    int row, column;  // of the first, within the warpgroup's rows and within the KV tile
    decltype(element_offsets<Shape<Int<kWarpgroupRows>, Int<Traits::kN>>>(
        typename Traits::MmaQk{})) offsets;
  };
  CUTE_DEVICE Place place() const {
    using TileShape = Shape<Int<kWarpgroupRows>, Int<Traits::kN>>;
    typename Traits::MmaQk mma;
    const int this_thread = Traits::kTakesMasks || Traits::kIsFloat8 ? new_thread() : thread;
    const auto origin = element_coordinates<TileShape>(mma, this_thread)(_0{}, _0{});
    return {static_cast<int>(get<0>(origin)), static_cast<int>(get<1>(origin)),
            element_offsets<TileShape>(mma)};
  }

  CUTE_DEVICE int kv_tile(int step) const {
    if constexpr (Traits::kTakesMasks)
      return smem.kv_tiles[progress.steps() % (2 * Traits::kStages)];
    return rows().order.tile(step);
  }

  // Makes of a step's scores what the softmax takes; plain kernels do where they mask.
  template <class Scores>
  CUTE_DEVICE void transform(Scores& scores, int step) const {
    if (rows().transform.is_idle()) return;
    const LogitTransform transform = rows().transform;
    if constexpr (Traits::kTransforms) {
      const Place at = place();
      transform_scores(scores, at.offsets, transform, mask, rows().first_row + at.row,
                       kv_tile(step) * Traits::kN + at.column);
    } else {
      scale_scores(scores, transform.gain);
    }
  }

  template <class Scores>
  CUTE_DEVICE void mask_scores(Scores& scores, int step) const {
    if (step >= rows().order.num_masked) return;
    if constexpr (!Traits::kTakesMasks) transform(scores, step);
    const Place at = place();
    const int tile = kv_tile(step);
    if (Traits::kTakesMasks && afresh(params).mask.mixed != nullptr) {
      apply_bits(scores, at.offsets, afresh(params).mask, rows().first_row + at.row, tile);
    } else {
      const int first_token = params.rows.first_token(rows().first_row);
      // Rows past the end take the last one's bounds.
      apply_mask(scores, at.offsets, mask, tile * Traits::kN + at.column, [&](int offset) {
        return min(first_token + params.rows.token_in_block(at.row + offset), mask.qo_len - 1);
      });
    }
  }

  template <class Scores>
  CUTE_DEVICE void anchored_step(Softmax& softmax, Scores& scores, int step) const {
    if constexpr (Traits::kTransforms) {
      const LogitTransform transform = rows().transform;
      const Place at = place();
      transform_and_weigh(softmax, scores, at.offsets, transform, mask, rows().first_row + at.row,
                          kv_tile(step) * Traits::kN + at.column);
    } else {
      softmax.anchored_step(scores);
    }
  }

  using OutputShape = Shape<Int<kWarpgroupRows>, Int<Dims::kVo>>;

  // The place in SplitKv of this warpgroup's rows of a part.
  CUTE_DEVICE int first_row_of(int part) const {
    return part * Traits::kM + warpgroup * kWarpgroupRows;
  }

  using RowNormaliser = Normaliser<Softmax::kRows>;

  // For rows whose last product has been started: writes the LSE, and answers what to multiply the
  // output by. That is infinite where weights have left their range.
  CUTE_DEVICE RowNormaliser finish(RowTile const& rows, Softmax& softmax) const {
    softmax.finish();
    const auto coordinates =
        element_coordinates<OutputShape>(typename Traits::MmaPv{}, new_thread());
    if (rows.part < 0) {
      store_lse(smem.results, softmax, is_careful(rows), coordinates, rows.head, rows.sink,
                rows.first_row);
    } else {
      store_part_lse(smem.results.split, softmax, is_careful(rows), coordinates,
                     first_row_of(rows.part));
    }
    RowNormaliser normaliser(softmax, is_careful(rows), rows.sink, rows.value_scale);
    if (!is_careful(rows)) {
      CUTE_UNROLL
      for (int r = 0; r < Softmax::kRows; ++r) {
        if (!softmax.anchor_held(r, rows.order.count * Traits::kN)) normaliser.factor[r] = INFINITY;
      }
    }
    return normaliser;
  }

  // Writes the output, or puts the row tile on the redo list where weights turn out to have left
  // their range.
  template <class Acc>
  CUTE_DEVICE void write(RowTile const& rows, RowNormaliser const& normaliser, Acc& out) {
    Tensor out_rows = row_column_view(out);
    normaliser.apply(out_rows);
    const bool failed = !is_careful(rows) && !all_finite(out_rows, normaliser);
    if constexpr (Traits::kStagesOutput) {
      if (thread == 0) tma_store_wait<0>();  // until the rows before have left their place
    }
    if (named_barrier_any(NamedBarrier::kWarpgroup, warpgroup, kWarpgroupThreads, failed)) {
      if (thread == 0) smem.redo_list.add(rows.round);
      return;
    }
    if (rows.part >= 0) {
      store_part_rows<OutputShape>(smem.results, typename Traits::MmaPv{}, new_thread(),
                                   rows.first_row, first_row_of(rows.part), out_rows);
      return;
    }
    if constexpr (Traits::kStagesOutput) {
      stage_rows(own.out, Traits::kIsFloat8 ? new_thread() : thread, out);
      tma_store_fence();
      named_barrier_sync(NamedBarrier::kWarpgroup, warpgroup, kWarpgroupThreads);
      if (thread == 0 && rows.first_row < params.qo_len) {
        for (int column = 0; column < Dims::kVo; column += Traits::kColumnsOut) {
          SM90_TMA_STORE_3D::copy(&maps.out, own.out + kWarpgroupRows * column, column,
                                  rows.first_row, rows.head);
        }
        tma_store_arrive();
      }
    } else {
      store_rows<typename Traits::Out>(smem.results, rows.head, rows.first_row, out);
    }
  }

  // Starts the next row tile; false where it sees no key, or there is none.
  CUTE_DEVICE bool next_rows() {
    afresh(own).q_ring.wait_full(progress.rows());
    q_stage = progress.rows() % Traits::kQStages;
    progress.next_rows();
    return !rows().order.empty();
  }

  // KV tiles between those rows and the rows before that others use alone.
  CUTE_DEVICE int num_skipped() const { return rows().skips_first ? 1 : 0; }
  // The step whose P waits for its product, when so many have been skipped since.
  CUTE_DEVICE uint32_t pending_step(int skipped) const { return progress.steps() - 1 - skipped; }
  CUTE_DEVICE void skip_first() {
    if (!rows().skips_first) return;
    turn.take();  // the others need their turns all the same
    turn.give();
    progress.next_step();
  }

  // When the last product has ended: the rows before, and rows that see no key.
  template <class Acc>
  CUTE_DEVICE void write_last(bool has_previous, Softmax& softmax, Acc& out) {
#pragma unroll 1
    for (int i = has_previous ? 0 : 1; i < (rows().is_end() ? 1 : 2); ++i) {
      if (i == 1) {
        softmax = Softmax(rows().transform.multiplier);
        clear(out);
      }
      RowTile const& which = i == 1 ? rows() : previous_rows();
      write(which, finish(which, softmax), out);
    }
    release(own.q_ring, progress.rows() - 1);
  }

  CUTE_DEVICE void leave() {
    turn.finish();
    if (Traits::kStagesOutput && thread == 0)
      tma_store_wait<0>();  // shared memory goes with the block
  }

  // The same as below for operands of 8 bits (float8_steps.cuh).
  CUTE_DEVICE void run_float8();

  // All row tiles, as one stream of steps: while the softmax of one KV tile runs, the product P V
  // of the KV tile before is in flight, be it of the same row tile or of the one before.
  CUTE_DEVICE void run() {
    typename Traits::MmaQk mma_qk;
    typename Traits::MmaPv mma_pv;
    Tensor k_tiles = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::LayoutK{});
    Tensor vt_tiles = make_tensor(make_smem_ptr(smem.v[0]), typename Traits::LayoutVt{});
    Tensor k = mma_qk.get_slice(thread).partition_fragment_B(k_tiles);  // (MMA, MMA_N, MMA_K, PIPE)
    Tensor vt =
        mma_pv.get_slice(thread).partition_fragment_B(vt_tiles);  // (MMA, MMA_N, MMA_K, PIPE)
    Tensor out = partition_fragment_C(mma_pv, OutputShape{});
    Tensor out_rows = row_column_view(out);
    const auto new_scores = [&] {
      return partition_fragment_C(mma_qk, Shape<Int<kWarpgroupRows>, Int<Traits::kN>>{});
    };
    Tensor weights = make_tensor<T>(typename decltype(new_scores())::layout_type{});
    Tensor p = make_tensor(weights.data(), operand_a_layout(weights.layout()));

    const auto start_qk = [&](auto& scores) {
      T* q_data = own.q[0];
      if constexpr (!Traits::Tile::kKeepsQ)
        asm volatile("" : "+l"(q_data));  // for all ptxas knows, new
      Tensor q_rows = make_tensor(make_smem_ptr(q_data), typename Traits::LayoutQ{});
      Tensor q =
          mma_qk.get_slice(thread).partition_fragment_A(q_rows);  // (MMA, MMA_M, MMA_K, PIPE)
      turn.take();
      smem.k_ring.wait_full(progress.steps());
      start_gemm(mma_qk, q(_, _, _, q_stage), k(_, _, _, progress.steps() % Traits::kStages), false,
                 scores);
    };
    // `is_pending`: P of the step before waits for its product. `skipped`: KV tiles since then.
    const auto start_pv = [&](bool is_pending, bool accumulate, int skipped = 0) {
      if (is_pending) smem.v_ring.wait_full(pending_step(skipped));
      start_gemm<Traits::Tile::kTurnOverlap>(mma_pv, p,
                                             vt(_, _, _, pending_step(skipped) % Traits::kStages),
                                             accumulate, out, [&] { turn.give(); });
    };
    const auto finish_qk = [&](auto& scores, bool is_last) {
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      release(smem.k_ring, progress.steps());
      if (is_last) release(own.q_ring, progress.rows() - 1);
    };
    const auto finish_pv = [&](bool is_pending, int skipped = 0) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      if (is_pending) release(smem.v_ring, pending_step(skipped));
    };

    while (true) {
      Softmax softmax(1.f);
      while (next_rows()) {
        const int count = rows().order.count;
        int num_first = 1;
        int step = 0;
        skip_first();
        // The first step also ends the row tile before. Where there is none, its second product
        // multiplies what happens to be in registers and shared memory, and the next overwrites the
        // result: ptxas serialises products that are under a condition.
        for (; step < num_first; ++step) {
          const bool has_previous = previous_rows().order.count > 0;
          const bool is_pending = step > 0 || has_previous;
          const int skipped = step == 0 ? num_skipped() : 0;
          Tensor scores = new_scores();
          Tensor score_rows = row_column_view(scores);
          start_qk(scores);
          start_pv(is_pending, step > 1 || (step == 0 && previous_rows().order.count > 1), skipped);
          RowNormaliser normaliser;
          if (step == 0) {
            if (has_previous) normaliser = finish(previous_rows(), softmax);
            softmax = Softmax(rows().transform.multiplier);
            num_first = rows().num_first;
          }
          finish_qk(scores, step + 1 == count);
          if constexpr (Traits::kTakesMasks) transform(score_rows, step);
          mask_scores(score_rows, step);
          const auto growth = softmax.exact_step(score_rows, rows().is_careful);
          hold(softmax.row_sum[0] + softmax.row_sum[1]);
          finish_pv(is_pending, skipped);
          convert_fragment<T>(scores, weights);
          if (step > 0) {
            scale_rows(out_rows, growth);
          } else if (has_previous) {
            write(previous_rows(), normaliser, out);
          }
          progress.next_step();
        }
        // Exact steps: a running maximum. What it asks of the output is done under the next Q K.
        const auto exact_steps = [&](auto with_care) CUTLASS_LAMBDA_FUNC_INLINE {
          auto growth = Softmax::no_growth();
          for (int num_exact = rows().num_exact; step < num_exact; ++step) {
            Tensor scores = new_scores();
            Tensor score_rows = row_column_view(scores);
            start_qk(scores);
            scale_rows(out_rows, growth);
            start_pv(true, step > 1);
            finish_qk(scores, step + 1 == count);
            if constexpr (Traits::kTakesMasks) {
              transform(score_rows, step);
              mask_scores(score_rows, step);
            }
            growth = softmax.exact_step(score_rows, with_care);
            hold(softmax.row_sum[0] + softmax.row_sum[1]);
            finish_pv(true);
            convert_fragment<T>(scores, weights);
            progress.next_step();
          }
          scale_rows(out_rows, growth);
        };
        if (rows().is_careful) {
          exact_steps(true_type{});
        } else {
          exact_steps(false_type{});
          softmax.settle_nan();
        }
        bool accumulate = step > 1;
        for (int left = count - step; left > 0; --left) {
          Tensor scores = new_scores();
          Tensor score_rows = row_column_view(scores);
          start_qk(scores);
          start_pv(true, accumulate);
          accumulate = true;
          finish_qk(scores, left == 1);
          anchored_step(softmax, score_rows, count - left);
          hold(softmax.row_sum[0] + softmax.row_sum[1]);
          finish_pv(true);
          convert_fragment<T>(scores, weights);
          progress.next_step();
        }
      }

      const bool has_previous = previous_rows().order.count > 0;
      turn.take();
      start_pv(has_previous, previous_rows().order.count > 1);
      finish_pv(has_previous);
      write_last(has_previous, softmax, out);
      if (rows().is_end()) {
        if (rows().round > 0) break;
        if (thread == 0) smem.redo_list.arrive();
        if (!smem.redo_list.wait_any()) break;
      }
    }
    leave();
  }
};

}  // namespace prefill::fa3
