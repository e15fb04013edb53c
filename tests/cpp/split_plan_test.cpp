// SplitPlanner: plans that cover a call, fill a device where they can, and leave long calls alone.
#include "common/split_plan.h"

#include <cstdint>
#include <ostream>

#include "check.h"
#include "random.h"

namespace {

using prefill::KernelInfo;
using prefill::PrefillParams;
using prefill::RowMap;
using prefill::SplitPlan;
using prefill::SplitPlanner;
using prefill::test::Random;

constexpr int kSms = 132;
constexpr KernelInfo kFa3{128, 128, 2, 384, 0};  // one block of it on an SM
constexpr KernelInfo kFa2{128, 64, 1, 128, 0};   // two

PrefillParams make_params(int qo_len, int kv_len, int num_qo_heads, int num_kv_heads, bool causal) {
  PrefillParams params{};
  params.qo_len = qo_len;
  params.kv_len = kv_len;
  params.num_qo_heads = num_qo_heads;
  params.num_kv_heads = num_kv_heads;
  params.num_sms = kSms;
  params.head_dim_qk = params.head_dim_vo = 128;
  params.window_left = kv_len;
  params.window_right = causal ? 0 : qo_len;
  return params;
}

SplitPlan plan_of(const PrefillParams& params, const KernelInfo& kernel = kFa3, int num_splits = 0,
                  bool can_pack = true, bool only_parts = false) {
  return SplitPlanner(params, kernel, can_pack, only_parts).plan(num_splits);
}

struct Asked {
  const PrefillParams& params;
  int num_splits;
};

std::ostream& operator<<(std::ostream& stream, const Asked& asked) {
  const PrefillParams& params = asked.params;
  return stream << params.qo_len << " x " << params.kv_len << ", " << params.num_qo_heads << "/"
                << params.num_kv_heads << " heads, asked for " << asked.num_splits;
}

void check_sane(const PrefillParams& params, const KernelInfo& kernel, int num_splits,
                bool only_parts) {
  const Asked asked{params, num_splits};
  const SplitPlan plan = plan_of(params, kernel, num_splits, true, only_parts);
  const int group = params.num_qo_heads / params.num_kv_heads;
  CHECK_EQ(group % plan.packed_heads, 0, asked);
  CHECK(plan.packed_heads >= 1 && plan.packed_heads <= RowMap::kBlock, asked);
  const int tile_tokens = RowMap::of(plan.packed_heads).tile_tokens(kernel.tile_m);
  const int64_t row_tiles = int64_t{(params.qo_len + tile_tokens - 1) / tile_tokens} *
                            (params.num_qo_heads / plan.packed_heads);
  CHECK_EQ(plan.num_row_tiles, row_tiles, asked);
  CHECK(plan.num_whole >= 0 && plan.num_whole <= plan.num_row_tiles, asked);
  CHECK(plan.num_splits >= 1 && plan.num_splits <= prefill::SplitKv::kMaxSplits, asked);
  CHECK(plan.packed_heads == 1 || plan.num_whole == 0,
        asked << ": row tiles of several heads are in parts");
  CHECK(plan.has_parts() || plan.num_splits == 1, asked);
  // What bounds the memory for parts: of the rule's own plans.
  const int slots = kSms * (kernel.threads == kFa2.threads ? 2 : 1);
  const bool are_few = plan.num_parts() <= 8 * slots;
  if (only_parts) {
    CHECK_EQ(plan.num_whole, 0, asked);
    if (num_splits == 0) CHECK(are_few || plan.num_parts() == plan.num_row_tiles, asked);
  } else if (num_splits == 0) {
    CHECK(!plan.has_parts() || are_few, asked);
  }
  if (num_splits > 0) {
    CHECK_EQ(plan.num_splits, num_splits, asked);
    CHECK_EQ(plan.num_whole, 0, asked);
  }
  // The same call gives the same plan.
  const SplitPlan again = plan_of(params, kernel, num_splits, true, only_parts);
  CHECK_EQ(again.num_splits, plan.num_splits, asked);
  CHECK_EQ(again.packed_heads, plan.packed_heads, asked);
  CHECK_EQ(again.num_whole, plan.num_whole, asked);
}

}  // namespace

int main() {
  Random random(5);
  for (int i = 0; i < 5000; ++i) {
    const int num_kv_heads = random.integer(1, 12), group = random.integer(1, 130);
    const PrefillParams params =
        make_params(random.integer(1, random.integer(0, 1) ? 300 : 20000),
                    random.integer(1, random.integer(0, 1) ? 3000 : 1 << 20), num_kv_heads * group,
                    num_kv_heads, random.integer(0, 1) == 1);
    check_sane(params, random.integer(0, 1) ? kFa3 : kFa2,
               random.integer(0, 1) ? 0 : random.integer(1, 64), random.integer(0, 1) == 1);
  }

  // One token over a long cache: every SM has a part, and a KV head's queries share a row tile.
  const SplitPlan decode = plan_of(make_params(1, 128 << 10, 32, 4, true));
  CHECK_EQ(decode.packed_heads, 8);
  CHECK(decode.num_parts() > kSms * 9 / 10 && decode.num_parts() <= 4 * kSms, decode.num_parts());
  // Two blocks of fa2 on an SM.
  const SplitPlan fa2 = plan_of(make_params(1, 128 << 10, 32, 4, true), kFa2);
  CHECK(fa2.num_parts() > 2 * kSms * 9 / 10, fa2.num_parts());
  // What is a head's own keeps heads apart, but not keys together.
  const SplitPlan apart = plan_of(make_params(1, 128 << 10, 32, 4, true), kFa3, 0, false);
  CHECK_EQ(apart.packed_heads, 1);
  CHECK(apart.num_splits > 1, apart.num_splits);
  // Long calls, and calls that fill the device, are left alone.
  for (bool causal : {false, true}) {
    CHECK(!plan_of(make_params(16384, 16384, 32, 8, causal)).has_parts(), "16k");
    CHECK(!plan_of(make_params(4096, 4096, 32, 8, causal)).has_parts(), "4k");
    CHECK(!plan_of(make_params(512, 512, 32, 8, causal)).has_parts(), "512");
    CHECK(!plan_of(make_params(1 << 29, 1 << 29, 256, 256, causal)).has_parts(), "all");
    // Where only the merging can write the output, each row tile is one part.
    for (int length : {4096, 16384}) {
      const SplitPlan all =
          plan_of(make_params(length, length, 32, 8, causal), kFa3, 0, true, true);
      CHECK_EQ(all.num_whole, 0, length);
      CHECK_EQ(all.num_splits, 1, length);
      CHECK_EQ(all.num_parts(), int64_t{all.num_row_tiles}, length);
    }
  }
  // Short calls are laid out as ever.
  const SplitPlan short_call = plan_of(make_params(1, 128 << 10, 32, 4, true), kFa3, 0, true, true);
  CHECK(short_call.packed_heads == 8 && short_call.num_splits > 1, short_call.num_splits);
  // A last wave of 52 row tiles on 132 SMs.
  const SplitPlan tail = plan_of(make_params(2048, 8192, 28, 4, false));
  CHECK_EQ(tail.num_whole, 3 * kSms);
  CHECK(tail.num_splits > 1, tail.num_splits);
  // One head: row tiles of all lengths, too few of them.
  CHECK(plan_of(make_params(8192, 8192, 1, 1, true)).num_splits > 1, "one head");
  return prefill::test::result();
}
