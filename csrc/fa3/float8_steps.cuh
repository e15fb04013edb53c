// The steps of a consumer warpgroup whose operands have 8 bits.
#pragma once

#include "fa3/consumer.cuh"

namespace prefill::fa3 {

// As Consumer::run, one stream of steps across row tiles, with three differences. Keys of P's
// registers lie as WGMMA takes them, which V has been ordered for (round_to_float8). All steps keep
// a running maximum, with care. And WGMMA keeps but some 13 bits of the fractions that it adds up
// in one accumulator: so the product of each KV tile has accumulators of its own, and joins the
// output in float32, in the instruction that multiplies that by the growth of the maximum.
template <class Traits>
CUTE_DEVICE void Consumer<Traits>::run_float8() {
  using Weight = typename Traits::Weight;
  using ScoresShape = Shape<Int<kWarpgroupRows>, Int<Traits::kN>>;
  typename Traits::MmaQk mma_qk;
  typename Traits::MmaPv mma_pv;
  Tensor k_tiles = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::LayoutK{});
  Tensor vt_tiles = make_tensor(make_smem_ptr(smem.v[0]), typename Traits::LayoutVt{});
  Tensor q_rows = make_tensor(make_smem_ptr(own.q[0]), typename Traits::LayoutQ{});
  Tensor q = mma_qk.get_slice(thread).partition_fragment_A(q_rows);   // (MMA, MMA_M, MMA_K, PIPE)
  Tensor k = mma_qk.get_slice(thread).partition_fragment_B(k_tiles);  // (MMA, MMA_N, MMA_K, PIPE)
  // In chunks of the head dim: (MMA, MMA_N, MMA_K, CHUNK, PIPE).
  using ChunkShape = Shape<Int<Traits::kChunkVo>, Int<Traits::kN>>;
  Tensor vt = mma_pv.get_slice(thread).partition_fragment_B(
      local_tile(vt_tiles, ChunkShape{}, make_coord(_, _0{}, _)));
  constexpr int kChunks = Dims::kVo / Traits::kChunkVo;
  Tensor p = make_tensor<Weight>(partition_shape_A(mma_pv, ScoresShape{}));
  Tensor product =  // P V of one KV tile, of a chunk
      partition_fragment_C(mma_pv, Shape<Int<kWarpgroupRows>, Int<Traits::kChunkVo>>{});
  Tensor out = partition_fragment_C(mma_pv, OutputShape{});
  constexpr int kProduct = decltype(size(product))::value;
  constexpr int kColumns = Traits::kN / 4;  // of a thread, in each of its two rows
  constexpr int kGroups = kColumns / 4;     // that a register of P takes

  const auto start_qk = [&](auto& scores) {
    turn.take();
    smem.k_ring.wait_full(progress.steps());
    start_gemm(mma_qk, q(_, _, _, (progress.rows() - 1) % Traits::kQStages),
               k(_, _, _, progress.steps() % Traits::kStages), false, scores);
  };
  const auto finish_qk = [&](bool is_last) {
    release(smem.k_ring, progress.steps());
    if (is_last) release(own.q_ring, progress.rows() - 1);
  };
  // `is_pending`: P of the step before waits for its product. `skipped`: KV tiles since then.
  const auto start_pv = [&](bool is_pending, int skipped = 0) {
    if (is_pending) smem.v_ring.wait_full(pending_step(skipped));
    start_gemm(mma_pv, p, vt(_, _, _, 0, pending_step(skipped) % Traits::kStages), false, product);
  };
  // What the output is multiplied by: the growth of the maximum in the step of the product's P.
  auto growth = Softmax::no_growth();
  // Elements [first, end) of a chunk of the product join the output.
  const auto fold = [&](int chunk, int first, int end) {
    CUTE_UNROLL
    for (int i = first; i < end; ++i) {  // pairs are of a thread's two rows in turn
      float& sum = out(chunk * kProduct + i);
      sum = fmaf(sum, growth[i / 2 % 2], product(i));
    }
  };
  // Waits for a chunk of the product.
  const auto finish_chunk = [&](int chunk, bool is_pending, int skipped = 0) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(product);
    if (is_pending && chunk + 1 == kChunks) release(smem.v_ring, pending_step(skipped));
  };
  // Starts the next one, when that has been folded.
  const auto start_chunk = [&](int chunk, int skipped = 0) {
    start_gemm(mma_pv, p, vt(_, _, _, chunk, pending_step(skipped) % Traits::kStages), false,
               product);
  };
  const auto finish_pv = [&](bool is_pending, int skipped = 0) {
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      finish_chunk(chunk, is_pending, skipped);
      fold(chunk, 0, kProduct);
      if (chunk + 1 < kChunks) start_chunk(chunk + 1, skipped);
    }
  };

  while (true) {
    Softmax softmax(1.f);
    while (next_rows()) {
      const int count = rows().order.count;
      // Steps that mask wait for both products: registers are short.
      const auto finish_both = [&](auto& scores, bool is_pending, bool is_last, int skipped = 0) {
        warpgroup_wait<0>();
        warpgroup_fence_operand(scores);
        finish_qk(is_last);
        turn.give();
        finish_pv(is_pending, skipped);
      };
      const auto weigh_masked = [&](auto& scores, int step) {
        Tensor score_rows = row_column_view(scores);
        if constexpr (Traits::kTakesMasks) transform(score_rows, step);
        mask_scores(score_rows, step);
        const auto lifted = softmax.start_lifted(score_rows);
        growth = lifted.factor;
        softmax.weigh_lifted(score_rows, lifted, 0, kColumns);
        round_to_float8<Weight>(score_rows, p, 0, kColumns);
        progress.next_step();
      };
      // The first also ends the row tile before. Where there is none, its product multiplies what
      // happens to be in registers and shared memory, and is forgotten.
      {
        const bool has_previous = previous_rows().order.count > 0;
        skip_first();
        Tensor scores = partition_fragment_C(mma_qk, ScoresShape{});
        start_qk(scores);
        RowNormaliser normaliser;
        if (has_previous) normaliser = finish(previous_rows(), softmax);
        start_pv(has_previous, num_skipped());
        finish_both(scores, has_previous, count == 1, num_skipped());
        if (has_previous) write(previous_rows(), normaliser, out);
        softmax = Softmax(rows().transform.multiplier);
        weigh_masked(scores, 0);
        clear(out);
      }
      int step = 1;
      for (; step < (Traits::kTakesMasks ? count : rows().num_first); ++step) {
        Tensor scores = partition_fragment_C(mma_qk, ScoresShape{});
        start_qk(scores);
        start_pv(true);
        finish_both(scores, true, step + 1 == count);
        weigh_masked(scores, step);
      }
      for (int left = Traits::kTakesMasks ? 0 : count - step; left > 0; --left) {
        Tensor scores = partition_fragment_C(mma_qk, ScoresShape{});
        Tensor score_rows = row_column_view(scores);
        start_qk(scores);
        start_pv(true);
        warpgroup_wait<1>();
        warpgroup_fence_operand(scores);
        finish_qk(left == 1);
        const auto lifted = softmax.start_lifted(score_rows);
        turn.give();  // not before: products of another would hold up P V
        // What exp2 leaves of the issue slots goes to the output and to P.
        if constexpr (kChunks == 1) {
          finish_chunk(0, true);
          CUTE_UNROLL
          for (int i = 0; i < kGroups; ++i) {
            softmax.weigh_lifted(score_rows, lifted, 4 * i, 4 * i + 4);
            fold(0, kProduct / kGroups * i, kProduct / kGroups * (i + 1));
            round_to_float8<Weight>(score_rows, p, 4 * i, 4 * i + 4);
          }
        } else {
          for_each(make_seq<kChunks>{}, [&](auto chunk) CUTLASS_LAMBDA_FUNC_INLINE {
            constexpr int kChunk = decltype(chunk)::value;
            softmax.weigh_lifted(score_rows, lifted, kChunk * kColumns / kChunks,
                                 (kChunk + 1) * kColumns / kChunks);
            finish_chunk(kChunk, true);
            fold(kChunk, 0, kProduct);
            if constexpr (kChunk + 1 < kChunks) start_chunk(kChunk + 1);
          });
          round_to_float8<Weight>(score_rows, p, 0, kColumns);
        }
        growth = lifted.factor;
        progress.next_step();
      }
    }

    const bool has_previous = previous_rows().order.count > 0;
    turn.take();
    start_pv(has_previous);
    turn.give();
    finish_pv(has_previous);
    write_last(has_previous, softmax, out);
    if (rows().is_end()) {
      if (thread == 0) smem.redo_list.arrive();  // empty: the producer's next pass does not come
      break;
    }
  }
  leave();
}

}  // namespace prefill::fa3
