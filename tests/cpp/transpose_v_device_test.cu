// The pass that transposes V against loops, byte by byte: any head dims, lengths and strides that
// it is for.
#include <cstring>
#include <ostream>
#include <vector>

#include "check.h"
#include "common/transpose_v.h"
#include "gpu.h"
#include "naive_attention.cuh"
#include "random.h"

namespace {

using prefill::PrefillParams;
using prefill::transposed_key;
using prefill::TransposePass;
using prefill::test::DeviceArray;
using prefill::test::Random;

struct Case {
  int qo_len;
  int kv_len;
  int num_heads;
  int head_dim;
  int window_left;
  int padding;  // between heads, and after a token
};

std::ostream& operator<<(std::ostream& stream, const Case& test) {
  return stream << test.kv_len << " keys, " << test.num_heads << " heads, head dim "
                << test.head_dim << ", window " << test.window_left << " of " << test.qo_len
                << ", padding " << test.padding;
}

void run_case(const Case& test, Random& random) {
  constexpr int kTileN = 128;
  constexpr uint8_t kUntouched = 0xa5;
  const int head_stride = test.head_dim + test.padding;
  const int token_stride = test.num_heads * head_stride + test.padding;
  std::vector<uint8_t> values(static_cast<size_t>(test.kv_len) * token_stride);
  for (uint8_t& value : values) value = static_cast<uint8_t>(random.bits());
  DeviceArray<uint8_t> device_values(static_cast<int64_t>(values.size()));
  device_values.upload(values.data());

  PrefillParams params{};
  params.v = {device_values.data(), token_stride, head_stride};
  params.qo_len = test.qo_len;
  params.kv_len = test.kv_len;
  params.num_kv_heads = test.num_heads;
  params.head_dim_vo = test.head_dim;
  params.window_left = test.window_left;
  params.window_right = test.qo_len;
  TransposePass pass = TransposePass::of(params, kTileN);
  std::vector<uint8_t> expected(static_cast<size_t>(pass.workspace_bytes()), kUntouched);
  DeviceArray<uint8_t> target(static_cast<int64_t>(expected.size()));
  target.upload(expected.data());
  pass.carve(target.data(), params);
  CHECK_CUDA(prefill::transpose_v(pass, /*programmatic=*/false, nullptr));
  std::vector<uint8_t> actual(expected.size());
  target.download(actual.data());

  const int hidden = test.kv_len - test.qo_len - test.window_left;
  const int first_key = hidden > 0 ? hidden / kTileN * kTileN : 0;
  size_t i = 0;
  for (int head = 0; head < test.num_heads; ++head) {
    for (int dim = 0; dim < test.head_dim; ++dim) {
      for (int position = 0; position < params.vt.keys; ++position, ++i) {
        const int key = position / 16 * 16 + transposed_key(position % 16);
        if (position < first_key) continue;
        expected[i] =
            key >= test.kv_len
                ? 0
                : values[static_cast<size_t>(key) * token_stride + head * head_stride + dim];
      }
    }
  }
  CHECK(std::memcmp(actual.data(), expected.data(), actual.size()) == 0, test);
}

}  // namespace

int main() {
  if (prefill::test::no_gpu()) return prefill::test::kSkipped;
  Random random(1);
  for (int head_dim = 16; head_dim <= 256; head_dim += 16) {
    for (int kv_len : {1, 15, 128, 129}) run_case({1, kv_len, 2, head_dim, kv_len, 0}, random);
    const int kv_len = random.integer(1, 2000), qo_len = random.integer(1, 300);
    run_case({qo_len, kv_len, random.integer(1, 9), head_dim, kv_len, 16}, random);
    run_case({qo_len, kv_len, random.integer(1, 9), head_dim, random.integer(0, kv_len), 48},
             random);
  }
  return prefill::test::result();
}
