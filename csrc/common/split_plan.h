// How short calls are laid out over a device: heads packed into row tiles (RowMap), row tiles done
// in parts (SplitKv). It depends on shapes and the number of SMs alone, so the same call gives the
// same bits. Host only, and tested there.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/kernel_key.h"
#include "common/mask.cuh"
#include "common/params.h"

namespace prefill {

struct SplitPlan {
  int packed_heads = 1;
  int num_splits = 1;     // of row tiles that are done in parts
  int num_row_tiles = 0;  // over all heads
  int num_whole = 0;      // of these

  bool has_parts() const { return num_whole < num_row_tiles; }
  int64_t num_parts() const { return int64_t{num_row_tiles - num_whole} * num_splits; }
};

// What a plan takes, by rule of thumb: in units of the work on one KV tile of one row tile, which
// is 1.2 us for fa3 at head dim 128 (docs/tuning.md).
class SplitPlanner {
 public:
  // `can_pack`: nothing differs between heads of a KV head but their queries. `only_parts`: no row
  // tile may be whole, as it is the merging that writes what the kernel cannot.
  SplitPlanner(const PrefillParams& params, const KernelInfo& kernel, bool can_pack,
               bool only_parts)
      : params_(params), kernel_(kernel), can_pack_(can_pack), only_parts_(only_parts) {}

  // `num_splits`: so many parts of all row tiles; 0: what is best.
  SplitPlan plan(int num_splits) const {
    const Costed single = best(1, num_splits);
    const int heads = most_packed_heads();
    // Long calls fill their row tiles.
    const bool is_long = single.plan.num_row_tiles > kManyRounds * num_slots();
    if (heads == 1 || is_long) return single.plan;
    const Costed packed = best(heads, num_splits);
    return packed.cost < single.cost * kWorthwhile ? packed.plan : single.plan;
  }

 private:
  static constexpr float kTileCost = 1.f;        // a row tile's beginning and end
  static constexpr float kMergeCost = 2.f;       // the pass that merges
  static constexpr float kSplitCost = 1.f / 16;  // the same, of each part of a row
  // Of a byte that parts write and the merging reads, for each thread of a block, over the
  // multiplications of a step: all of the device's memory waits for it.
  static constexpr float kByteCost = 0.0025f;
  static constexpr float kSharedSm = 1.5f;  // of two blocks on an SM each takes so much longer
  static constexpr float kWorthwhile = 0.95f;
  static constexpr int kManyRounds = 8;

  struct Costed {
    SplitPlan plan;
    float cost;
  };

  // KV tiles of row tiles of a head.
  struct Lengths {
    int longest;
    float mean;
  };

  // Of a row of a part.
  float row_cost() const {
    const int dims = params_.head_dim_qk + params_.head_dim_vo;
    const float products = static_cast<float>(kernel_.tile_m) * static_cast<float>(kernel_.tile_n) *
                           static_cast<float>(dims);
    const auto bytes = static_cast<float>(2 * sizeof(float) * params_.head_dim_vo);
    return kByteCost * bytes * static_cast<float>(kernel_.threads) / products;
  }

  // Blocks that run at a time, by their registers. fa2 has fewer where shared memory is scarce.
  int num_slots() const {
    constexpr int kRegisters = 65536, kThreadRegisters = 256;
    return params_.num_sms * std::max(kRegisters / (kThreadRegisters * kernel_.threads), 1);
  }

  // How much longer `count` blocks take than one alone, as they share SMs.
  float slowdown(int count) const { return count > params_.num_sms ? kSharedSm : 1.f; }

  // The most of a KV head's heads that a block has rows for and that divide the group.
  int most_packed_heads() const {
    const int group = params_.num_qo_heads / params_.num_kv_heads;
    if (!can_pack_) return 1;
    int heads = std::min(group, RowMap::kBlock);
    while (group % heads != 0) --heads;
    return heads;
  }

  Lengths lengths(int tile_tokens, int num_m_tiles) const {
    constexpr int kSamples = 64;
    const BandMask band = BandMask::of(params_);
    const int step = (num_m_tiles + kSamples - 1) / kSamples;
    Lengths lengths{0, 0.f};
    int count = 0;
    for (int m_tile = num_m_tiles - 1; m_tile >= 0; m_tile -= step, ++count) {
      const auto tiles = band.kv_tiles(m_tile * tile_tokens, tile_tokens, kernel_.tile_n);
      const int length = std::max(tiles.end - tiles.begin, 0);
      lengths.longest = std::max(lengths.longest, length);
      lengths.mean += static_cast<float>(length);
    }
    lengths.mean /= static_cast<float>(count);
    return lengths;
  }

  // `count` pieces of work: of one length in rounds; of several, longest first, blocks end within
  // half of a piece of each other.
  float makespan(int count, float longest, float mean) const {
    const int slots = num_slots(), rounds = count / slots, rest = count % slots;
    if (count <= slots) return longest * slowdown(count);
    const float full = slowdown(slots);
    if (is_even(longest, mean)) {
      return mean * (static_cast<float>(rounds) * full + (rest > 0 ? slowdown(rest) : 0.f));
    }
    const float balanced = mean * (static_cast<float>(count) / static_cast<float>(slots) + 0.5f);
    return std::max(balanced, longest) * full;
  }

  static bool is_even(float longest, float mean) { return mean >= 0.9f * longest; }

  Costed best(int heads, int num_splits) const {
    const RowMap rows = RowMap::of(heads);
    const int tile_tokens = rows.tile_tokens(kernel_.tile_m);
    const int num_m_tiles = (params_.qo_len + tile_tokens - 1) / tile_tokens;
    const int num_tiles = num_m_tiles * (params_.num_qo_heads / heads);
    const Lengths length = lengths(tile_tokens, num_m_tiles);
    const auto whole_cost = [&](int count) {
      return makespan(count, static_cast<float>(length.longest) + kTileCost,
                      length.mean + kTileCost);
    };
    const auto parts_cost = [&](int count, int splits) {
      const auto part = [&](float tiles) { return tiles / static_cast<float>(splits) + kTileCost; };
      const float longest = static_cast<float>((length.longest + splits - 1) / splits) + kTileCost;
      const int64_t rows = int64_t{std::min(params_.qo_len, tile_tokens)} * heads * count * splits;
      return makespan(count * splits, longest, std::min(part(length.mean), longest)) + kMergeCost +
             kSplitCost * static_cast<float>(splits) + row_cost() * static_cast<float>(rows);
    };
    const auto costed = [&](int splits, int num_whole) {
      const int in_parts = num_tiles - num_whole;
      float cost = num_whole > 0 ? whole_cost(num_whole) : 0.f;
      if (in_parts > 0) cost += parts_cost(in_parts, splits);
      return Costed{{heads, in_parts > 0 ? splits : 1, num_tiles, num_whole}, cost};
    };
    if (num_splits > 0) return costed(num_splits, 0);

    const bool has_whole = heads == 1 && !only_parts_;
    Costed best = has_whole ? costed(1, num_tiles) : costed(1, 0);
    const float without = best.cost;
    const int most = std::min(length.longest, SplitKv::kMaxSplits);
    const auto consider = [&](int num_whole) {
      // Parts for a third of the SMs, for half of them, for all, for rounds of them.
      constexpr int kSixths[] = {2, 3, 6, 12, 18, 24};
      const int in_parts = num_tiles - num_whole;
      if (in_parts <= 0) return;
      for (int sixths : kSixths) {
        const int splits = std::min(sixths * params_.num_sms / (6 * in_parts), most);
        if (splits < 2) continue;
        const Costed candidate = costed(splits, num_whole);
        if (candidate.cost < best.cost && candidate.cost < without * kWorthwhile) best = candidate;
      }
    };
    const int slots = num_slots();
    if (num_tiles <= kManyRounds * slots) {
      consider(0);
      // The last row tiles alone: of those as long as each other, and with whole ones all their
      // heads to themselves.
      if (has_whole && is_even(static_cast<float>(length.longest), length.mean)) {
        consider(num_tiles / slots * slots);
      }
    }
    return best;
  }

  const PrefillParams& params_;
  const KernelInfo& kernel_;
  const bool can_pack_;
  const bool only_parts_;
};

}  // namespace prefill
