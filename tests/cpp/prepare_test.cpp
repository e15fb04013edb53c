// The parts of the pass over q, k and v against naive ones: angles in long double, index maps by
// marking every element.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "common/prepare.h"
#include "random.h"

namespace {

using prefill::PrefillParams;
using prefill::PrepareItem;
using prefill::PrepareJob;
using prefill::PreparePass;
using prefill::Rope;
using prefill::RopeTurns;
using prefill::Rotation;
using prefill::SourceType;
using prefill::SourceTypes;
using prefill::TensorView;
using prefill::test::Random;

constexpr long double kTurn = 6.283185307179586476925286766559L;

long double exact_turns(const Rope& rope, int head_dim, int d, int position) {
  const long double power = std::pow(static_cast<long double>(rope.theta), -2.L * d / head_dim);
  return position / static_cast<long double>(rope.scale) * power / kTurn;
}

// Turns are off by six roundings of doubles, and by the three of the exponent of two that makes the
// frequency, which count as often as the exponent is large; angles by half a unit of float32 near
// half a turn as well, and the results by their own rounding.
void check_angle(const RopeTurns& turns, const Rope& rope, int head_dim, int d, int position) {
  const long double exact = exact_turns(rope, head_dim, d, position);
  const double turned = position * turns.per_position[d];
  const double exponent = 2. * d / head_dim * std::abs(std::log2(rope.theta));
  const long double drift = std::abs(exact) * 0x1p-53L * (6 + 3 * 0.693L * exponent);
  CHECK_NEAR(static_cast<double>(turned - exact), 0., static_cast<double>(drift),
             "turns of position " << position << ", dim " << d << " of " << head_dim << ", theta "
                                  << rope.theta);
  const long double angle = kTurn * (exact - std::rint(exact));
  const double allowed = static_cast<double>(kTurn * (drift + 0x1p-26L) + 0x1p-25L);
  const Rotation rotation = Rotation::of(turned);
  CHECK_NEAR(rotation.cos, static_cast<double>(std::cos(angle)), allowed,
             "cos at position " << position << ", dim " << d << " of " << head_dim << ", theta "
                                << rope.theta << ", scale " << rope.scale);
  CHECK_NEAR(rotation.sin, static_cast<double>(std::sin(angle)), allowed,
             "sin at position " << position << ", dim " << d << " of " << head_dim << ", theta "
                                << rope.theta << ", scale " << rope.scale);
  CHECK(std::abs(Rotation::half_turns(turned)) <= 1.f, "position " << position);
}

void check_angles(Random& random) {
  constexpr int kLast = (1 << 30) - 1;
  for (const Rope rope : {Rope{1., 1e4}, {8., 5e5}, {0.25, 1e6}, {3., 1.}, {1., 0.5}}) {
    for (int head_dim : {8, 24, 64, 72, 80, 128, 192, 256}) {
      const RopeTurns turns = RopeTurns::of(rope, head_dim);
      for (int d = 0; d < head_dim / 2; ++d) {
        for (int position : {0, 1, -1, 2, 1000, 999'983, -1'000'003, 1 << 24, kLast, -kLast}) {
          check_angle(turns, rope, head_dim, d, position);
        }
        for (int i = 0; i < 20; ++i) {
          check_angle(turns, rope, head_dim, d, random.integer(-kLast, kLast) >> i);
        }
      }
    }
  }
}

void check_quarters() {
  CHECK_EQ(Rotation::of(0.).cos, 1.f);
  CHECK_EQ(Rotation::of(0.).sin, 0.f);
  CHECK_EQ(Rotation::half_turns(1e9 + 0.25), 0.5f);
  CHECK_EQ(Rotation::half_turns(-1e9 - 0.125), -0.25f);
  float first = 3.f, second = -2.f;
  Rotation{0.f, 1.f}.apply(first, second);
  CHECK_EQ(first, 2.f);
  CHECK_EQ(second, 3.f);
}

// Every element of every row from `first_row` on belongs to one item of one block, and none before.
void check_job(int length, int num_heads, int head_dim, int first_row) {
  const PrepareJob job = PrepareJob::of({nullptr, 0, 0}, SourceType::same, true, SourceType::same,
                                        0, first_row, length, num_heads, head_dim);
  const std::string where = std::to_string(length) + " x " + std::to_string(num_heads) + " x " +
                            std::to_string(head_dim) + " from " + std::to_string(first_row);
  CHECK_EQ(job.row_elements(), int64_t{num_heads} * head_dim);
  CHECK_EQ(job.vector, head_dim % 16 == 0 ? 8 : 4);
  std::vector<int> written(static_cast<size_t>(length) * num_heads * head_dim);
  for (int block = 0; block < job.num_blocks; ++block) {
    const int rows = job.rows_of(block);
    CHECK(rows > 0 && rows * head_dim / 2 <= prefill::kMaxBlockRotations, where);
    for (int index = 0; index < rows * job.row_items; ++index) {
      const PrepareItem item = job.item(index);
      CHECK(item.row < rows && item.head < num_heads && item.column % job.vector == 0);
      const int64_t row = job.block_begin(block) + item.row;
      for (int i = 0; i < job.vector; ++i) {
        for (int dim : {item.column + i, item.column + i + head_dim / 2}) {
          ++written[(row * num_heads + item.head) * head_dim + dim];
        }
      }
    }
  }
  const auto begin = written.begin() + int64_t{first_row} * num_heads * head_dim;
  CHECK(std::all_of(written.begin(), begin, [](int count) { return count == 0; }), where);
  CHECK(std::all_of(begin, written.end(), [](int count) { return count == 1; }), where);
}

void check_jobs(Random& random) {
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    for (int num_heads : {1, 3, 8, 40}) {
      for (int length : {1, 2, 63}) check_job(length, num_heads, head_dim, 0);
      const int length = random.integer(1, 300);
      check_job(length, num_heads, head_dim, random.integer(0, length - 1));
    }
  }
  const PrepareJob longest = PrepareJob::of({nullptr, 0, 0}, SourceType::same, true,
                                            SourceType::same, 0, 0, (1 << 30) - 1, 4, 256);
  const int last = static_cast<int>(longest.num_blocks) - 1;
  CHECK_EQ(longest.block_begin(last) + longest.rows_of(last), (1 << 30) - 1);
  CHECK_EQ(longest.target_bytes(), (int64_t{1} << 30) * 4 * 256 * 2 - 4 * 256 * 2);
}

PrefillParams make_params() {
  PrefillParams params{};
  params.qo_len = 10;
  params.kv_len = 1000;
  params.num_qo_heads = 6;
  params.num_kv_heads = 2;
  params.head_dim_qk = 72;
  params.head_dim_vo = 40;
  params.window_left = params.window_right = 1010;
  params.q = {&params, 1, 2};
  params.k = {&params, 3, 4};
  params.v = {&params, 5, 6};
  return params;
}

// What is prepared, and where: copies do not overlap, and what needs none stays.
void check_pass(bool rotates, const SourceTypes& types) {
  const PrefillParams given = make_params();
  PrefillParams params = given;
  const auto rope = rotates ? std::optional<Rope>({1., 1e4}) : std::nullopt;
  PreparePass pass = PreparePass::of(params, types, rope, 64);
  std::vector<char> workspace(pass.workspace_bytes());
  pass.carve(workspace.data(), params);
  char* free = workspace.data();
  const auto check = [&](bool is_needed, const PrepareJob& job, const TensorView& before,
                         const TensorView& after, int length, int num_heads, int head_dim) {
    CHECK_EQ(job.is_needed(), is_needed);
    CHECK_EQ(after.data == before.data, !is_needed);
    CHECK_EQ(after.head_stride, is_needed ? head_dim : before.head_stride);
    CHECK_EQ(after.token_stride, is_needed ? num_heads * head_dim : before.token_stride);
    if (!is_needed) return;
    CHECK(static_cast<char*>(after.data) >= free && (static_cast<char*>(after.data) - free) < 256);
    CHECK_EQ((static_cast<char*>(after.data) - workspace.data()) % 16, 0);
    CHECK(job.source.data == before.data && job.source.token_stride == before.token_stride &&
          job.target.data == after.data);
    free = static_cast<char*>(after.data) + int64_t{2} * length * num_heads * head_dim;
  };
  check(rotates || types.q != SourceType::same, pass.q, given.q, params.q, 10, 6, 72);
  check(rotates || types.k != SourceType::same, pass.k, given.k, params.k, 1000, 2, 72);
  check(types.v != SourceType::same, pass.v, given.v, params.v, 1000, 2, 40);
  CHECK(free <= workspace.data() + workspace.size());
  CHECK_EQ(pass.num_blocks() > 0, rotates || !types.all_same());
  CHECK_EQ(pass.q.first_position, pass.q.is_needed() ? 990 : 0);
  CHECK_EQ(pass.k.first_position, 0);
  CHECK(pass.q.rotates == rotates && pass.k.rotates == rotates && !pass.v.rotates);
  CHECK(!pass.q.is_needed() || pass.q.type == types.q);
  CHECK(!pass.k.is_needed() || pass.k.type == types.k);
  CHECK(!pass.v.is_needed() || pass.v.type == types.v);
  // The contract: to q's dtype, whatever k's is.
  if (rotates) CHECK(pass.q.rounded == types.q && pass.k.rounded == types.q);
}

// No KV tile that the kernels read begins before the first key that is prepared.
void check_first_keys() {
  for (int tile_n : {64, 80, 112, 128}) {
    for (int window = 0; window < 1010; ++window) {
      PrefillParams params = make_params();
      params.window_left = window;
      const SourceTypes types{SourceType::same, SourceType::same, SourceType::float8_e5m2};
      const PreparePass pass = PreparePass::of(params, types, Rope{1., 1.}, tile_n);
      const auto tiles = prefill::BandMask::of(params).kv_tiles(0, 64, tile_n);
      CHECK_EQ(pass.k.first_row, tiles.begin * tile_n, "window " << window);
      CHECK_EQ(pass.v.first_row, pass.k.first_row);
      CHECK_EQ(pass.q.first_row, 0);
    }
  }
}

}  // namespace

int main() {
  Random random(5);
  check_angles(random);
  check_quarters();
  check_jobs(random);
  constexpr SourceType kTypes[] = {SourceType::same, SourceType::float8_e4m3,
                                   SourceType::float8_e5m2};
  for (bool rotates : {false, true}) {
    for (SourceType q : kTypes) {
      for (SourceType k : kTypes) {
        for (SourceType v : kTypes) check_pass(rotates, {q, k, v});
      }
    }
  }
  check_first_keys();
  return prefill::test::result();
}
