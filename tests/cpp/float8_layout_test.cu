// How fa3 kernels of 8 bits lay operands out, against what TMA writes and WGMMA reads: which keys
// meet in P V, and where elements of Q, K and V lie in shared memory.
#include "check.h"
#include "common/fragment.cuh"
#include "common/transpose_v.h"
#include "fa3/traits.cuh"

namespace {

using namespace cute;
using prefill::DType;
using prefill::HeadDims;
using prefill::Scores;
using prefill::fa3::kWarpgroupRows;
using prefill::fa3::kWarpgroupThreads;

// Byte `i` of a thread's P is at a position of the keys of V, in a row. There a thread has the
// score that round_to_float8 takes for it.
template <class Traits>
void check_weights() {
  using Pv = typename Traits::MmaPv;
  using ScoresShape = Shape<Int<kWarpgroupRows>, Int<Traits::kN>>;
  for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
    const auto scores =
        typename Traits::MmaQk{}.get_slice(thread).partition_C(make_identity_tensor(ScoresShape{}));
    const auto rows = make_tensor(scores.data(), prefill::row_column_layout(scores.layout()));
    const auto weights = Pv{}.get_slice(thread).partition_A(make_identity_tensor(ScoresShape{}));
    CHECK_EQ(int{size(weights)}, int{size(scores)});
    for (int c = 0; c < size<1>(rows); ++c) {
      for (int r = 0; r < 2; ++r) {
        const auto position = weights((c / 4 * 2 + r) * 4 + c % 4);
        const int key = get<1>(position) / 16 * 16 + prefill::transposed_key(get<1>(position) % 16);
        CHECK_EQ(int(get<0>(position)), int(get<0>(rows(r, c))));
        CHECK_EQ(key, int(get<1>(rows(r, c))));
      }
    }
  }
}

// Where TMA puts an element of a tile, in boxes of `box` bytes that are swizzled over as many.
int byte_of(int row, int column, int rows, int box) {
  const int swizzle = box == 128 ? row % 8 : row / 2 % 4;
  const int in_box = column % box;
  return column / box * rows * box + row * box + (in_box / 16 ^ swizzle) * 16 + in_box % 16;
}

template <class Layout>
void check_tile(Layout const& layout, int box) {
  const int rows = size<0>(layout), columns = size<1>(layout);
  for (int stage = 0; stage < size<2>(layout); ++stage) {
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        CHECK_EQ(int(layout(row, column, stage)),
                 stage * rows * columns + byte_of(row, column, rows, box));
      }
    }
  }
}

template <DType kDType, int kQk, int kVo>
void check_class() {
  using Traits = prefill::fa3::Traits<kDType, HeadDims<kQk, kVo>, Scores::Plain>;
  check_weights<Traits>();
  check_tile(typename Traits::LayoutQ{}, Traits::kColumns);
  check_tile(typename Traits::LayoutK{}, Traits::kColumns);
  check_tile(typename Traits::LayoutVt{}, Traits::kColumnsV);
}

}  // namespace

int main() {
  check_class<DType::float8_e4m3, 128, 128>();
  check_class<DType::float8_e5m2, 192, 128>();
  check_class<DType::float8_e4m3, 256, 256>();
  return prefill::test::result();
}
