// The parts of the pass that transposes V, by marking every element; and that its accesses to
// shared memory meet in no bank.
#include "common/transpose_v.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "random.h"

namespace {

using prefill::kTransposeDims;
using prefill::kTransposeKeys;
using prefill::kTransposeThreads;
using prefill::PrefillParams;
using prefill::transpose_chunk;
using prefill::transposed_key;
using prefill::TransposeItem;
using prefill::TransposePass;
using prefill::test::Random;

constexpr int kTileN = 128;

// Positions 4l to 4l + 3 hold the keys whose columns thread l of a quad has: 2l and 2l + 1 of both
// eights.
void check_keys() {
  std::set<int> keys;
  for (int position = 0; position < 16; ++position) {
    const int key = transposed_key(position);
    CHECK_EQ(key % 8 / 2, position / 4);
    keys.insert(key);
  }
  CHECK(keys.size() == 16 && *keys.begin() == 0 && *keys.rbegin() == 15);
  for (int position = 0; position < 16; position += 4) {
    for (int i = 1; i < 4; ++i) {
      CHECK(transposed_key(position + i - 1) < transposed_key(position + i));
    }
  }
}

void check_items() {
  std::vector<int> taken(kTransposeKeys / TransposeItem::kKeys * kTransposeDims);
  for (int thread = 0; thread < kTransposeThreads; ++thread) {
    const TransposeItem item = TransposeItem::of(thread);
    for (int dim = item.first_dim; dim < item.first_dim + TransposeItem::kDims; ++dim) {
      ++taken[item.group * kTransposeDims + dim];
    }
  }
  CHECK(std::all_of(taken.begin(), taken.end(), [](int count) { return count == 1; }));
}

void check_banks() {
  constexpr int kChunks = kTransposeDims / 16;
  std::set<int> places;
  for (int key = 0; key < kTransposeKeys; ++key) {
    std::set<int> banks;  // of 16 bytes: eight threads write at a time
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      places.insert(transpose_chunk(key, chunk));
      banks.insert(transpose_chunk(key, chunk) % 8);
    }
    CHECK_EQ(static_cast<int>(banks.size()), kChunks);
  }
  CHECK_EQ(static_cast<int>(places.size()), kTransposeKeys * kChunks);
  CHECK(*places.begin() == 0 && *places.rbegin() == kTransposeKeys * kChunks - 1);
  for (int warp = 0; warp < kTransposeThreads / 32; ++warp) {
    for (int i = 0; i < TransposeItem::kKeys; ++i) {
      std::set<int> banks;
      for (int lane = 0; lane < 32; ++lane) {
        const TransposeItem item = TransposeItem::of(warp * 32 + lane);
        const int chunk =
            transpose_chunk(item.group * TransposeItem::kKeys + i, item.first_dim / 16);
        banks.insert((chunk * 4 + item.first_dim % 16 / 4) % 32);
      }
      CHECK_EQ(static_cast<int>(banks.size()), 32);
    }
  }
}

// Every dim of every key from the first KV tile that is seen on, and of those past the end, belongs
// to one block, and none of the blocks of keys before it does.
void check_pass(int qo_len, int kv_len, int num_heads, int head_dim, int window_left) {
  PrefillParams params{};
  params.qo_len = qo_len;
  params.kv_len = kv_len;
  params.num_kv_heads = num_heads;
  params.head_dim_vo = head_dim;
  params.window_left = window_left;
  params.window_right = qo_len;
  TransposePass pass = TransposePass::of(params, kTileN);
  std::vector<int> written(static_cast<size_t>(pass.workspace_bytes()));
  pass.carve(written.data(), params);
  const int keys = params.vt.keys;
  const std::string where = std::to_string(qo_len) + " x " + std::to_string(kv_len) + " x " +
                            std::to_string(num_heads) + " x " + std::to_string(head_dim) +
                            ", window " + std::to_string(window_left);
  CHECK(keys % kTransposeKeys == 0 && keys >= kv_len && keys - kTransposeKeys < kv_len, where);
  CHECK_EQ(params.vt.data, static_cast<void*>(written.data()));
  for (int index = 0; index < pass.num_blocks(); ++index) {
    const TransposePass::Block block = pass.block(index);
    CHECK(block.head < num_heads && block.first_key < kv_len && block.first_dim < head_dim, where);
    const int dims = std::min(kTransposeDims, head_dim - block.first_dim);
    for (int dim = block.first_dim; dim < block.first_dim + dims; ++dim) {
      for (int i = 0; i < kTransposeKeys; ++i) {
        ++written[pass.target_element(block.head, dim, block.first_key + i)];
      }
    }
  }
  const int first_key = std::max(0, kv_len - qo_len - window_left) / kTileN * kTileN;
  for (size_t i = 0; i < written.size(); ++i) {
    const bool is_needed = static_cast<int>(i % keys) >= first_key;
    CHECK(written[i] == (is_needed ? 1 : 0), where << ": element " << i);
  }
}

void check_passes(Random& random) {
  for (int head_dim = 16; head_dim <= 256; head_dim += 16) {
    for (int kv_len : {1, 127, 128, 129}) check_pass(1, kv_len, 1, head_dim, kv_len);
    const int kv_len = random.integer(1, 1500), qo_len = random.integer(1, 300);
    check_pass(qo_len, kv_len, random.integer(1, 5), head_dim, random.integer(0, kv_len));
  }
}

}  // namespace

int main() {
  Random random(1);
  check_keys();
  check_items();
  check_banks();
  check_passes(random);
  return prefill::test::result();
}
