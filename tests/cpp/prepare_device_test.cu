// The pass over q, k and v on a device against naive loops, for all types, head dims and strides.
// Sources end with their allocation, so that memcheck sees a read past them, and what is not the
// tensor's is NaN; results go to poisoned memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>
#include <ostream>
#include <vector>

#include "check.h"
#include "common/prepare.h"
#include "gpu.h"
#include "naive_attention.cuh"
#include "random.h"

namespace {

using prefill::DType;
using prefill::PrefillParams;
using prefill::PrepareJob;
using prefill::PreparePass;
using prefill::Rope;
using prefill::SourceType;
using prefill::SourceTypes;
using prefill::TensorView;
using prefill::test::DeviceArray;
using prefill::test::Random;

constexpr uint8_t kPoison = 0xff;  // NaN in every type

// How a tensor lies in memory.
enum class Layout { dense, heads_first, wide_rows, wide_heads, one_head_for_all };

constexpr Layout kLayouts[] = {Layout::dense, Layout::heads_first, Layout::wide_rows,
                               Layout::wide_heads, Layout::one_head_for_all};

struct Case {
  DType dtype;
  SourceTypes types;
  std::optional<Rope> rope;
  int qo_len;
  int kv_len;
  int num_qo_heads;
  int num_kv_heads;
  int head_dim_qk;
  int head_dim_vo;
  int window_left;
  int tile_n;
  Layout layout;
};

std::ostream& operator<<(std::ostream& stream, const Case& test) {
  stream << (test.dtype == DType::float16 ? "fp16, " : "bf16, ") << test.qo_len << " x "
         << test.kv_len << ", heads " << test.num_qo_heads << "/" << test.num_kv_heads << " of "
         << test.head_dim_qk << "/" << test.head_dim_vo << ", types "
         << static_cast<int>(test.types.q) << static_cast<int>(test.types.k)
         << static_cast<int>(test.types.v) << ", window " << test.window_left << ", layout "
         << static_cast<int>(test.layout);
  if (test.rope) stream << ", rope " << test.rope->scale << " " << test.rope->theta;
  return stream;
}

double value_of(DType dtype, uint16_t bits) {
  if (dtype == DType::float16) {
    __half_raw raw;
    raw.x = bits;
    return __half2float(__half(raw));
  }
  __nv_bfloat16_raw raw;
  raw.x = bits;
  return __bfloat162float(__nv_bfloat16(raw));
}

// By the definition of the format: e4m3 has one NaN and no infinity, e5m2 is the upper half of an
// fp16.
double value_of_fp8(SourceType type, uint8_t bits) {
  if (type == SourceType::float8_e5m2) {
    return value_of(DType::float16, static_cast<uint16_t>(bits << 8));
  }
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return NAN;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -size : size;
}

// A tensor on the host and the device.
struct Source {
  SourceType type;
  DType dtype;
  int element_bytes;
  int64_t token_stride;
  int64_t head_stride;
  std::vector<uint8_t> bytes;
  DeviceArray<uint8_t> memory;

  static int64_t size(int length, int num_heads, int head_dim, int64_t token_stride,
                      int64_t head_stride) {
    return (length - 1) * token_stride + (num_heads - 1) * head_stride + head_dim;
  }

  Source(SourceType type, DType dtype, Layout layout, int length, int num_heads, int head_dim,
         Random& random)
      : type(type),
        dtype(dtype),
        element_bytes(type == SourceType::same ? 2 : 1),
        token_stride(layout == Layout::heads_first || layout == Layout::one_head_for_all ? head_dim
                     : layout == Layout::wide_rows  ? num_heads * head_dim + 24
                     : layout == Layout::wide_heads ? num_heads * (head_dim + 8)
                                                    : num_heads * head_dim),
        head_stride(layout == Layout::heads_first        ? int64_t{length} * head_dim
                    : layout == Layout::one_head_for_all ? 0
                    : layout == Layout::wide_heads       ? head_dim + 8
                                                         : head_dim),
        bytes(size(length, num_heads, head_dim, token_stride, head_stride) * element_bytes,
              kPoison),
        memory(static_cast<int64_t>(bytes.size())) {
    for (int64_t row = 0; row < length; ++row) {
      for (int head = 0; head < num_heads; ++head) {
        for (int d = 0; d < head_dim; ++d) {
          set(row * token_stride + head * head_stride + d, random);
        }
      }
    }
    memory.upload(bytes.data());
  }

  // All bits may come up, but most values are of one size.
  void set(int64_t element, Random& random) {
    uint32_t bits = random.bits();
    if (element_bytes == 1) {
      bytes[element] = static_cast<uint8_t>(bits);
      return;
    }
    if (random.integer(0, 63) != 0) {
      const float value = random.real(-4.f, 4.f);
      bits = dtype == DType::float16 ? static_cast<__half_raw>(__float2half_rn(value)).x
                                     : static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(value)).x;
    }
    const auto half = static_cast<uint16_t>(bits);
    std::memcpy(&bytes[element * 2], &half, sizeof(half));
  }

  double at(int64_t row, int head, int d) const {
    const int64_t element = row * token_stride + head * head_stride + d;
    if (element_bytes == 1) return value_of_fp8(type, bytes[element]);
    uint16_t bits;
    std::memcpy(&bits, &bytes[element * 2], sizeof(bits));
    return value_of(dtype, bits);
  }

  TensorView view() const { return {memory.data(), token_stride, head_stride}; }
};

// All finite values of a type of 8 bits, in order.
std::vector<double> values_of_fp8(SourceType type) {
  std::vector<double> values;
  for (int bits = 0; bits < 256; ++bits) {
    const double value = value_of_fp8(type, static_cast<uint8_t>(bits));
    if (std::isfinite(value)) values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Whether `found` is a value of the type than which none lies nearer to `exact`, by more than
// `slack`. What is past the largest is the largest.
bool is_rounded_to_fp8(SourceType type, double found, double exact, double slack) {
  static const std::vector<double> kOfE4m3 = values_of_fp8(SourceType::float8_e4m3);
  static const std::vector<double> kOfE5m2 = values_of_fp8(SourceType::float8_e5m2);
  if (std::isnan(exact)) return std::isnan(found);
  const std::vector<double>& values = type == SourceType::float8_e4m3 ? kOfE4m3 : kOfE5m2;
  if (!std::binary_search(values.begin(), values.end(), found)) return false;
  exact = std::clamp(exact, values.front(), values.back());
  const auto above = std::lower_bound(values.begin(), values.end(), exact);
  double nearest = *above - exact;
  if (above != values.begin()) nearest = std::min(nearest, exact - *(above - 1));
  return std::abs(found - exact) <= nearest + slack;
}

// Whether `found` is `exact` rounded to the dtype; `slack` is what float32 may add to it.
bool is_rounded(DType dtype, double found, double exact, double slack) {
  if (std::isnan(exact)) return std::isnan(found);
  if (std::isinf(exact)) return found == exact;
  const double largest = dtype == DType::float16 ? 65504. : 0x1.fep127;
  const double unit = dtype == DType::float16 ? 0x1p-11 : 0x1p-8;
  const double smallest = dtype == DType::float16 ? 0x1p-25 : 0x1p-134;
  if (std::isinf(found)) {
    return std::signbit(found) == std::signbit(exact) &&
           std::abs(exact) + slack >= largest * (1 + unit / 2);
  }
  return std::abs(found - exact) <= unit * std::abs(exact) + smallest + slack;
}

void check_tensor(const Case& test, const char* name, const PrepareJob& job, const Source& source,
                  int num_heads, const uint8_t* result) {
  const int half = job.head_dim / 2;
  const auto at = [&](int64_t row, int head, int d) {
    uint16_t bits;
    std::memcpy(&bits, result + 2 * ((row * num_heads + head) * job.head_dim + d), sizeof(bits));
    return value_of(test.dtype, bits);
  };
  std::vector<long double> frequencies(half);
  for (int d = 0; job.rotates && d < half; ++d) {
    frequencies[d] = std::pow(static_cast<long double>(test.rope->theta), -2.L * d / job.head_dim) /
                     test.rope->scale;
  }
  std::vector<double> cosines(half), sines(half);
  for (int64_t row = job.first_row; row < job.length; ++row) {
    for (int d = 0; job.rotates && d < half; ++d) {
      const long double angle = (job.first_position + row) * frequencies[d];
      cosines[d] = static_cast<double>(std::cos(angle));
      sines[d] = static_cast<double>(std::sin(angle));
    }
    for (int head = 0; head < num_heads; ++head) {
      const auto check = [&](int d, double exact, double slack) {
        const double found = at(row, head, d);
        const bool is_right = !job.rotates
                                  ? found == exact || (std::isnan(found) && std::isnan(exact))
                              : test.types.q == SourceType::same
                                  ? is_rounded(test.dtype, found, exact, slack)
                                  : is_rounded_to_fp8(test.types.q, found, exact, slack);
        CHECK(is_right, test << ", " << name << " row " << row << ", head " << head << ", dim " << d
                             << ": " << found << " for " << exact);
      };
      for (int d = 0; d < half; ++d) {
        const double x = source.at(row, head, d), y = source.at(row, head, d + half);
        // Two roundings of the sum, one of a product, and angles off by 2^-23.
        const double size = (std::abs(x) + std::abs(y)) * 0x1p-21;
        const double slack = std::isfinite(size) ? size : 0.;
        check(d, job.rotates ? x * cosines[d] - y * sines[d] : x, slack);
        check(d + half, job.rotates ? y * cosines[d] + x * sines[d] : y, slack);
      }
    }
  }
}

void check_poison(const Case& test, const std::vector<uint8_t>& result, int64_t begin,
                  int64_t end) {
  CHECK(std::all_of(result.begin() + begin, result.begin() + end,
                    [](uint8_t byte) { return byte == kPoison; }),
        test << ": bytes " << begin << " to " << end << " were written");
}

void run_case(const Case& test, Random& random, cudaStream_t stream) {
  const Source q(test.types.q, test.dtype, test.layout, test.qo_len, test.num_qo_heads,
                 test.head_dim_qk, random);
  const Source k(test.types.k, test.dtype, test.layout, test.kv_len, test.num_kv_heads,
                 test.head_dim_qk, random);
  const Source v(test.types.v, test.dtype, test.layout, test.kv_len, test.num_kv_heads,
                 test.head_dim_vo, random);
  PrefillParams params{};
  params.q = q.view();
  params.k = k.view();
  params.v = v.view();
  params.qo_len = test.qo_len;
  params.kv_len = test.kv_len;
  params.num_qo_heads = test.num_qo_heads;
  params.num_kv_heads = test.num_kv_heads;
  params.head_dim_qk = test.head_dim_qk;
  params.head_dim_vo = test.head_dim_vo;
  params.window_left = test.window_left;
  params.window_right = test.qo_len + test.kv_len;
  PreparePass pass = PreparePass::of(params, test.types, test.rope, test.tile_n);

  const int64_t bytes = pass.workspace_bytes();
  const DeviceArray<uint8_t> workspace(bytes);
  pass.carve(workspace.data(), params);
  std::vector<uint8_t> result(bytes), again(bytes);
  for (std::vector<uint8_t>* target : {&result, &again}) {
    CHECK_CUDA(cudaMemsetAsync(workspace.data(), kPoison, bytes, stream));
    CHECK_CUDA(prefill::prepare(pass, test.dtype, /*programmatic=*/false, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    workspace.download(target->data());
  }
  CHECK(result == again, test << ": another result the second time");

  int64_t offset = 0;
  const auto check = [&](const char* name, const PrepareJob& job, const Source& source,
                         int num_heads, int head_dim) {
    if (!job.is_needed()) return;
    check_tensor(test, name, job, source, num_heads, result.data() + offset);
    const int64_t row_bytes = int64_t{2} * num_heads * head_dim;
    check_poison(test, result, offset, offset + job.first_row * row_bytes);
    check_poison(test, result, offset + job.length * row_bytes, offset + job.target_bytes());
    offset += job.target_bytes();
  };
  check("q", pass.q, q, test.num_qo_heads, test.head_dim_qk);
  check("k", pass.k, k, test.num_kv_heads, test.head_dim_qk);
  check("v", pass.v, v, test.num_kv_heads, test.head_dim_vo);
  CHECK_EQ(offset, bytes, test);
}

constexpr SourceType kSame = SourceType::same, kE4m3 = SourceType::float8_e4m3,
                     kE5m2 = SourceType::float8_e5m2;
constexpr SourceTypes kTypes[] = {
    {kSame, kSame, kSame}, {kSame, kE4m3, kE4m3}, {kSame, kE5m2, kE5m2}, {kSame, kE4m3, kE5m2},
    {kE4m3, kE4m3, kE4m3}, {kE5m2, kE5m2, kE5m2}, {kE4m3, kE5m2, kE4m3}, {kE5m2, kE4m3, kE5m2}};

void run_all_dims(Random& random, cudaStream_t stream) {
  int number = 0;
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    for (const SourceTypes& types : kTypes) {
      for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
        const bool rotates = types.all_same() || number % 2 != 0;
        const auto rope = rotates ? std::optional<Rope>({1., 1e4}) : std::nullopt;
        const Layout layout = kLayouts[number++ % 5];
        run_case({dtype, types, rope, 37, 101, 6, 2, head_dim, 264 - head_dim, 138, 64, layout},
                 random, stream);
      }
    }
  }
}

Case random_case(Random& random) {
  Case test{};
  test.dtype = random.integer(0, 1) ? DType::float16 : DType::bfloat16;
  test.types = kTypes[random.integer(0, std::size(kTypes) - 1)];
  if (test.types.all_same() || random.integer(0, 1)) {
    test.rope = Rope{random.integer(0, 1) ? 1. : random.real(0.1f, 16.f),
                     random.integer(0, 1) ? 1e4 : random.real(1.f, 1e6f)};
  }
  test.qo_len = random.integer(1, random.integer(0, 1) ? 5 : 300);
  test.kv_len = random.integer(1, random.integer(0, 1) ? 5 : 300);
  test.num_kv_heads = random.integer(1, 5);
  test.num_qo_heads = test.num_kv_heads * random.integer(1, 9);
  test.head_dim_qk = 8 * random.integer(1, 32);
  test.head_dim_vo = 8 * random.integer(1, 32);
  const int unbounded = test.qo_len + test.kv_len;
  test.window_left = random.integer(0, 1) ? unbounded : random.integer(0, unbounded);
  test.tile_n = random.integer(0, 1) ? 80 : 128;
  test.layout = kLayouts[random.integer(0, 4)];
  return test;
}

// Positions of a million, before and after 0; more heads than a block takes at a time.
void run_large(Random& random, cudaStream_t stream) {
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    for (const SourceTypes& types : {kTypes[0], kTypes[1], kTypes[4]}) {
      run_case({dtype, types, Rope{1., 1e4}, 5, 1'000'003, 1, 1, 24, 8, 1000, 128, Layout::dense},
               random, stream);
      run_case(
          {dtype, types, Rope{1., 5e5}, 1'000'003, 5, 1, 1, 16, 8, 2'000'000, 128, Layout::dense},
          random, stream);
      run_case({dtype, types, Rope{8., 1e4}, 3, 20, 264, 132, 128, 256, 23, 64, Layout::wide_heads},
               random, stream);
    }
  }
}

// Keys up to the longest cache, all of them one row in memory: the last ones are prepared, beyond
// 2^31 elements and 2^32 bytes of the target.
void run_huge(Random& random, cudaStream_t stream) {
  constexpr int kLength = (1 << 30) - 1, kHeadDim = 8, kRows = 100;
  size_t free_bytes = 0, all_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &all_bytes));
  const int64_t needed = int64_t{kLength} * kHeadDim * 2;
  if (static_cast<int64_t>(free_bytes) < 2 * needed) return;
  const Case test{DType::float16, kTypes[0], Rope{1., 1e4}, 1,  kLength,      1, 1,
                  kHeadDim,       kHeadDim,  kRows,         64, Layout::dense};
  const Source row(SourceType::same, test.dtype, Layout::dense, 1, 1, kHeadDim, random);
  PrefillParams params{};
  params.q = row.view();
  params.k = {row.memory.data(), 0, 0};
  params.qo_len = params.num_qo_heads = params.num_kv_heads = 1;
  params.kv_len = kLength;
  params.head_dim_qk = kHeadDim;
  params.window_left = kRows;
  params.window_right = kLength + 1;
  PreparePass pass = PreparePass::of(params, test.types, test.rope, test.tile_n);
  const DeviceArray<uint8_t> workspace(pass.workspace_bytes());
  pass.carve(workspace.data(), params);
  CHECK_CUDA(prefill::prepare(pass, test.dtype, /*programmatic=*/false, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  const int num_rows = kLength - pass.k.first_row;
  CHECK(num_rows >= kRows && num_rows < kRows + 64);
  std::vector<uint16_t> result(num_rows * kHeadDim);
  const auto* data = static_cast<const uint16_t*>(params.k.data);
  CHECK_CUDA(cudaMemcpy(result.data(), data + int64_t{pass.k.first_row} * kHeadDim,
                        result.size() * 2, cudaMemcpyDeviceToHost));
  for (int i = 0; i < num_rows; ++i) {
    for (int d = 0; d < kHeadDim / 2; ++d) {
      const long double angle = (pass.k.first_row + i) * std::pow(1e4L, -2.L * d / kHeadDim);
      const double x = row.at(0, 0, d), y = row.at(0, 0, d + kHeadDim / 2);
      const double cosine = static_cast<double>(std::cos(angle));
      const double sine = static_cast<double>(std::sin(angle));
      // A double's own roundings of so many turns.
      const double slack = (std::abs(x) + std::abs(y)) * 0x1p-19;
      const double first = value_of(test.dtype, result[i * kHeadDim + d]);
      const double second = value_of(test.dtype, result[i * kHeadDim + d + kHeadDim / 2]);
      CHECK(is_rounded(test.dtype, first, x * cosine - y * sine, slack), "huge row " << i);
      CHECK(is_rounded(test.dtype, second, y * cosine + x * sine, slack), "huge row " << i);
    }
  }
}

}  // namespace

int main() {
  if (prefill::test::no_gpu()) return prefill::test::kSkipped;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Random random(6);
  run_all_dims(random, stream);
  for (int i = 0; i < 150; ++i) run_case(random_case(random), random, stream);
  run_large(random, stream);
  run_huge(random, stream);
  CHECK_CUDA(cudaStreamDestroy(stream));
  return prefill::test::result();
}
