// The products of one KV tile on the tensor cores, and the loop over the KV tiles of a row tile.
#pragma once

#include "common/fragment.cuh"
#include "common/mask.cuh"
#include "common/transform.cuh"
#include "fa2/load.cuh"
#include "fa2/traits.cuh"

namespace prefill::fa2 {

// accumulators += A B, with both operands read from shared memory, kAhead k-steps before their use.
template <class T, int kAhead, class TiledMma, class TiledCopyA, class TiledCopyB, class SmemA,
          class SmemB, class Acc>
CUTE_DEVICE void gemm_smem(TiledMma const& tiled_mma, TiledCopyA const& copy_a,
                           TiledCopyB const& copy_b, SmemA const& smem_a, SmemB const& smem_b,
                           Acc& accumulators) {
  auto thr_copy_a = copy_a.get_slice(threadIdx.x);
  auto thr_copy_b = copy_b.get_slice(threadIdx.x);
  Tensor a = make_tensor<T>(partition_shape_A(tiled_mma, shape(smem_a)));  // (MMA, MMA_M, MMA_K)
  Tensor b = make_tensor<T>(partition_shape_B(tiled_mma, shape(smem_b)));  // (MMA, MMA_N, MMA_K)
  Tensor a_smem = thr_copy_a.partition_S(smem_a);
  Tensor b_smem = thr_copy_b.partition_S(smem_b);
  Tensor a_copy = thr_copy_a.retile_D(a);
  Tensor b_copy = thr_copy_b.retile_D(b);
  constexpr int kSteps = decltype(size<2>(a))::value;
  CUTE_UNROLL
  for (int read = 0; read < kSteps + kAhead; ++read) {
    if (read < kSteps) {
      copy(copy_a, a_smem(_, _, read), a_copy(_, _, read));
      copy(copy_b, b_smem(_, _, read), b_copy(_, _, read));
    }
    const int k = read - kAhead;
    if (k >= 0) gemm(tiled_mma, a(_, _, k), b(_, _, k), accumulators);
  }
}

// accumulators += A B with A in registers.
template <class T, int kAhead, class TiledMma, class TiledCopyB, class FragmentA, class SmemB,
          class Acc>
CUTE_DEVICE void gemm_registers(TiledMma const& tiled_mma, TiledCopyB const& copy_b,
                                FragmentA const& a, SmemB const& smem_b, Acc& accumulators) {
  auto thr_copy_b = copy_b.get_slice(threadIdx.x);
  Tensor b = make_tensor<T>(partition_shape_B(tiled_mma, shape(smem_b)));  // (MMA, MMA_N, MMA_K)
  Tensor b_smem = thr_copy_b.partition_S(smem_b);
  Tensor b_copy = thr_copy_b.retile_D(b);
  constexpr int kSteps = decltype(size<2>(a))::value;
  CUTE_UNROLL
  for (int read = 0; read < kSteps + kAhead; ++read) {
    if (read < kSteps) copy(copy_b, b_smem(_, _, read), b_copy(_, _, read));
    const int k = read - kAhead;
    if (k >= 0) gemm(tiled_mma, a(_, _, k), b(_, _, k), accumulators);
  }
}

// Accumulates P V and the softmax state over the KV tiles of one row tile, of which `last` is the
// first to come. The caller has started the loads of Q and of that K.
template <class Traits, class Acc>
CUTE_DEVICE void attend(const KvLoader<Traits>& loader, const RowTile<typename Traits::T>& row_tile,
                        const PrefillParams& params, const BandMask& band, int last,
                        typename Traits::Softmax& softmax, Acc& out) {
  using T = typename Traits::T;
  typename Traits::TiledMma tiled_mma;
  auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, tiled_mma);
  auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, tiled_mma);
  auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, T>{}, tiled_mma);
  Tensor q = make_tensor(make_smem_ptr(loader.smem.q), typename Traits::LayoutQ{});
  Tensor k = make_tensor(make_smem_ptr(loader.smem.k), typename Traits::LayoutK{});
  Tensor vt = make_tensor(make_smem_ptr(loader.smem.v), typename Traits::LayoutVt{});
  const KvTiles& tiles = row_tile.tiles;
  const LogitTransform& transform = row_tile.transform;
  using TileShape = Shape<Int<Traits::kM>, Int<Traits::kN>>;
  const auto offsets = element_offsets<TileShape>(tiled_mma);

  // Of a thread's first element. In general kernels the thread is for all ptxas knows new each
  // time, so that nothing that masks need is worked out once and kept throughout; plain ones have
  // registers for it.
  const auto origin = [&] {
    int thread = threadIdx.x;
    if constexpr (Traits::kIsGeneral) asm volatile("" : "+r"(thread));
    return element_coordinates<TileShape>(tiled_mma, thread)(_0{}, _0{});
  };

  for (int tile = last, next; tile >= 0; tile = next) {
    const auto start_next_k = [&] {  // V has landed, K is no longer read
      next = tiles.before(tile);
      loader.wait();
      if (Traits::kAlwaysLoads || next >= 0) loader.start_k(next);
    };
    Tensor scores = partition_fragment_C(tiled_mma, Shape<Int<Traits::kM>, Int<Traits::kN>>{});
    clear(scores);
    loader.wait();
    loader.start_v(tile);
    gemm_smem<T, Traits::kAhead>(tiled_mma, copy_q, copy_k, q, k, scores);
    if constexpr (Traits::kEarlyV) start_next_k();

    Tensor rows = row_column_view(scores);
    const auto mask_scores = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
      const auto at = origin();
      if (Traits::kIsGeneral && tiles.is_custom) {
        apply_bits(rows, offsets, params.mask, row_tile.first_row + get<0>(at), tile);
      } else {
        const int* queries = loader.smem.queries + get<0>(at);
        apply_mask(rows, offsets, band, tile * Traits::kN + get<1>(at),
                   [&](int offset) { return queries[offset]; });
      }
    };
    if constexpr (Traits::kIsGeneral) {
      if (!transform.is_idle()) {
        const auto at = origin();
        transform_scores(rows, offsets, transform, band, row_tile.first_row + get<0>(at),
                         tile * Traits::kN + get<1>(at));
      }
      if (tiles.template needs_mask<Traits::kN>(tile)) mask_scores();
    } else {
      const bool is_idle = transform.is_idle();
      const bool needs_mask = tiles.template needs_mask<Traits::kN>(tile);
      if (!Traits::kOneBranch || !is_idle || needs_mask) {
        if (!is_idle) scale_scores(rows, transform.gain);
        if (needs_mask) mask_scores();
      }
    }
    const auto factor = softmax.exact_step(rows, Traits::kWithCare);
    Tensor out_rows = row_column_view(out);
    scale_rows(out_rows, factor);
    Tensor p = make_tensor<T>(scores.layout());
    convert_fragment<T>(scores, p);

    if constexpr (!Traits::kEarlyV) start_next_k();
    Tensor p_operand = make_tensor(p.data(), operand_a_layout(p.layout()));
    gemm_registers<T, Traits::kAhead>(tiled_mma, copy_v, p_operand, vt, out);
  }
  if constexpr (Traits::kAlwaysLoads) cp_async_wait<0>();  // for the K of no tile
  softmax.finish();
}

}  // namespace prefill::fa2
