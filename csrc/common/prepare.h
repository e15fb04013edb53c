// Tensors made ready for kernels that know neither positions nor fp8: the pass that copies q, k and
// v, as far as a call needs it, in the kernel's 16 bits, rotated (ROPE_LLAMA) and widened from fp8.
// What it is made of is host and device code, and brute-forced on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "common/host_device.h"
#include "common/kernel_key.h"
#include "common/mask.cuh"
#include "common/params.h"

namespace prefill {

inline constexpr int kPrepareThreads = 256;
inline constexpr int kPrepareAhead = 2;          // items that a thread loads at a time
inline constexpr int kMaxBlockRotations = 2048;  // 16 KB of shared memory
inline constexpr int kMaxRotatedPairs = 128;     // of the largest head dim

// What a source holds: elements of the target's type, or of 8 bits.
enum class SourceType { same, float8_e4m3, float8_e5m2 };

struct SourceTypes {
  SourceType q;
  SourceType k;
  SourceType v;

  bool all_same() const {
    return q == SourceType::same && k == SourceType::same && v == SourceType::same;
  }
};

// Angles are position / scale * theta^(-2d / head_dim).
struct Rope {
  double scale;
  double theta;
};

// How far a position turns each pair of dims, in whole turns.
struct RopeTurns {
  double per_position[kMaxRotatedPairs];

  static RopeTurns of(const Rope& rope, int head_dim) {
    constexpr double kTurn = 6.283185307179586;
    // As a power of two: what the exponent's rounding costs grows with it, but the turns shrink.
    const double octaves = std::log2(rope.theta);
    RopeTurns turns;
    for (int d = 0; d < head_dim / 2; ++d) {
      turns.per_position[d] = std::exp2(-2. * d / head_dim * octaves) / rope.scale / kTurn;
    }
    return turns;
  }
};

struct alignas(8) Rotation {
  float cos;
  float sin;

  // Whole turns are taken off in double, exactly: so the angle is right to float32 however many
  // there are.
  PREFILL_HOST_DEVICE static float half_turns(double turns) {
    return static_cast<float>(2. * (turns - rint(turns)));
  }

  PREFILL_HOST_DEVICE static Rotation of(double turns) {
    Rotation rotation;
#if defined(__CUDA_ARCH__)
    sincospif(half_turns(turns), &rotation.sin, &rotation.cos);
#else
    const double angle = 3.141592653589793 * half_turns(turns);
    rotation = {static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
#endif
    return rotation;
  }

  PREFILL_HOST_DEVICE void apply(float& first, float& second) const {
    const float x = first, y = second;
    first = fmaf(x, cos, -(y * sin));
    second = fmaf(y, cos, x * sin);
  }
};

// Where an item lies: `vector` dims from `column` on, and as many half a head dim further.
struct PrepareItem {
  int row;  // of the block's
  int head;
  int column;
};

// What is to be made of one tensor. A block takes whole rows, so that it works out the rotations of
// a row once for all heads; its threads take items.
struct PrepareJob {
  TensorView source;  // [length, num_heads, head_dim]
  TensorView target;
  SourceType type;
  bool rotates;
  SourceType rounded;  // what rotated values are rounded to before they become the target's
  int first_position;  // of row 0
  int first_row;       // rows before are not needed
  int length;
  int head_dim;
  int vector;      // 8 elements, 4 where half a head dim is no multiple of 8
  int head_items;  // of one head of a row
  int row_items;
  int block_rows;
  int64_t num_blocks;  // 0: the tensor is taken as it is

  static PrepareJob of(const TensorView& source, SourceType type, bool rotates, SourceType rounded,
                       int first_position, int first_row, int length, int num_heads, int head_dim) {
    PrepareJob job{};
    job.source = source;
    job.type = type;
    job.rotates = rotates;
    job.rounded = rounded;
    job.first_position = first_position;
    job.first_row = first_row;
    job.length = length;
    job.head_dim = head_dim;
    job.vector = head_dim % 16 == 0 ? 8 : 4;
    job.head_items = head_dim / 2 / job.vector;
    job.row_items = num_heads * job.head_items;
    job.block_rows = std::clamp(kPrepareAhead * kPrepareThreads / job.row_items, 1,
                                kMaxBlockRotations / (head_dim / 2));
    job.num_blocks = (int64_t{length} - first_row + job.block_rows - 1) / job.block_rows;
    return job;
  }

  bool is_needed() const { return num_blocks > 0; }

  int64_t target_bytes() const {
    constexpr int64_t kAlignment = 256, kElementBytes = 2;
    const int64_t bytes = row_elements() * length * kElementBytes;
    return is_needed() ? (bytes + kAlignment - 1) / kAlignment * kAlignment : 0;
  }

  PREFILL_HOST_DEVICE int64_t row_elements() const { return int64_t{row_items} * 2 * vector; }

  PREFILL_HOST_DEVICE int block_begin(int block) const { return first_row + block * block_rows; }

  PREFILL_HOST_DEVICE int rows_of(int block) const {
    const int left = length - block_begin(block);
    return left < block_rows ? left : block_rows;
  }

  // Neighbours in a head are neighbours in a warp.
  PREFILL_HOST_DEVICE PrepareItem item(int index) const {
    // Devices divide unsigned numbers in fewer steps.
    const auto row =
        static_cast<int>(static_cast<uint32_t>(index) / static_cast<uint32_t>(row_items));
    const int in_row = index - row * row_items;
    const auto head =
        static_cast<int>(static_cast<uint32_t>(in_row) / static_cast<uint32_t>(head_items));
    return {row, head, (in_row - head * head_items) * vector};
  }
};

// The pass of one call. Blocks of the jobs follow each other.
struct PreparePass {
  PrepareJob q;
  PrepareJob k;
  PrepareJob v;
  RopeTurns turns;

  // For the views, lengths and windows of `params`; without rope nothing is rotated. Rotated values
  // are rounded to q's type. Keys before the first KV tile, of `tile_n`, that a row sees are left
  // out: no kernel reads them.
  static PreparePass of(const PrefillParams& params, const SourceTypes& types,
                        const std::optional<Rope>& rope, int tile_n) {
    const int first_key = BandMask::of(params).row_begin(0) / tile_n * tile_n;
    const bool rotates = rope.has_value();
    PreparePass pass{};
    if (rotates) pass.turns = RopeTurns::of(*rope, params.head_dim_qk);
    if (rotates || types.q != SourceType::same) {
      pass.q = PrepareJob::of(params.q, types.q, rotates, types.q, params.kv_len - params.qo_len, 0,
                              params.qo_len, params.num_qo_heads, params.head_dim_qk);
    }
    if (rotates || types.k != SourceType::same) {
      pass.k = PrepareJob::of(params.k, types.k, rotates, types.q, 0, first_key, params.kv_len,
                              params.num_kv_heads, params.head_dim_qk);
    }
    if (types.v != SourceType::same) {
      pass.v = PrepareJob::of(params.v, types.v, false, SourceType::same, 0, first_key,
                              params.kv_len, params.num_kv_heads, params.head_dim_vo);
    }
    return pass;
  }

  int64_t num_blocks() const { return q.num_blocks + k.num_blocks + v.num_blocks; }

  int64_t workspace_bytes() const { return q.target_bytes() + k.target_bytes() + v.target_bytes(); }

  // Shares out memory of that size, at an address that is a multiple of 16, and lets `params` find
  // the copies there.
  void carve(void* workspace, PrefillParams& params) {
    auto* memory = static_cast<char*>(workspace);
    const auto place = [&](PrepareJob& job, TensorView& view) {
      if (!job.is_needed()) return;
      view = job.target = {memory, job.row_elements(), job.head_dim};
      memory += job.target_bytes();
    };
    place(q, params.q);
    place(k, params.k);
    place(v, params.v);
  }
};

// Fills the targets, which PreparePass::carve gave, with elements of `dtype`. `pass` has some job.
// `programmatic`: as pass_launch.cuh has it.
cudaError_t prepare(const PreparePass& pass, DType dtype, bool programmatic, cudaStream_t stream);

}  // namespace prefill
