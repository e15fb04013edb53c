// Every kernel of the table that this device can run, against naive attention: shapes that cross
// tile edges, masks, soft caps, ALiBi, sinks, head groups, strided views and head dims below the
// class. All memory around tensors is NaN: nothing of it may reach a result, and outputs leave it
// as it is.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstring>
#include <ostream>
#include <type_traits>
#include <vector>

#include "check.h"
#include "common/kernel_table.h"
#include "common/mask_tiles.h"
#include "common/transpose_v.h"
#include "gpu.h"
#include "naive_attention.cuh"
#include "random.h"

namespace {

using prefill::Backend;
using prefill::DType;
using prefill::KernelEntry;
using prefill::KernelInfo;
using prefill::lay_out_mask;
using prefill::MaskFormat;
using prefill::MaskTileCounts;
using prefill::PrefillParams;
using prefill::TensorView;
using prefill::TransposePass;
using prefill::test::DeviceArray;
using prefill::test::NaiveOutput;
using prefill::test::Random;
using prefill::test::Rounding;

constexpr int kUnbounded = -1;
constexpr float kLn2 = 0.693147181f;

enum class Layout { nhd, hnd, padded };

enum class Alibi { none, rule, given };

// What comes on top of a band mask and scales.
struct Extras {
  bool mask = false;
  float soft_cap = 0.f;
  Alibi alibi = Alibi::none;
  bool sinks = false;
};

struct Case {
  const char* name;
  int qo_len;
  int kv_len;
  int num_kv_heads;
  int group;
  int window_left;
  int window_right;
  Layout layout;
  bool has_lse = true;
  bool has_scales = false;
  Extras extras = {};
};

struct HeadDims {
  int qk;
  int vo;
};

// Where a check failed.
struct Place {
  const KernelEntry& entry;
  HeadDims dims;
  const Case& test;
};

std::ostream& operator<<(std::ostream& stream, const Place& place) {
  return stream << prefill::name(place.entry.backend) << " " << prefill::name(place.entry.dtype)
                << " " << place.entry.head_dim_qk << "x" << place.entry.head_dim_vo
                << ", head dims " << place.dims.qk << " and " << place.dims.vo << ", "
                << place.test.name;
}

// A [length, heads, dim] tensor amid storage whose every other bit is set, which is NaN. Dims of
// size 1 have a stride that nobody could use.
template <class Value>
class Tensor {
 public:
  Tensor(int length, int heads, int dim, Layout layout)
      : length_(length),
        heads_(heads),
        dim_(dim),
        token_stride_(token_stride(length, heads, dim, layout)),
        head_stride_(head_stride(length, heads, dim, layout)),
        host_(2 * kGuard + (length - 1) * token_stride_ + (heads - 1) * head_stride_ + dim),
        device_(static_cast<int64_t>(host_.size())) {
    poison();
  }

  int64_t token_stride() const { return token_stride_; }
  int64_t head_stride() const { return head_stride_; }
  Value* data() const { return device_.data() + kGuard; }
  TensorView view() const { return {data(), token_stride_, head_stride_}; }
  const Value& at(int token, int head, int d) const { return host_[index(token, head, d)]; }

  void poison() {
    std::memset(static_cast<void*>(host_.data()), 0xff, host_.size() * sizeof(Value));
    device_.upload(host_.data());
  }

  void fill(Random& random, float bound) {
    for (int token = 0; token < length_; ++token) {
      for (int head = 0; head < heads_; ++head) {
        for (int d = 0; d < dim_; ++d) {
          host_[index(token, head, d)] = static_cast<Value>(random.real(-bound, bound));
        }
      }
    }
    device_.upload(host_.data());
  }

  void download() { device_.download(host_.data()); }

  // Whether all but the elements of the tensor is still as poisoned.
  bool untouched_around() const {
    std::vector<bool> inside(host_.size());
    for (int token = 0; token < length_; ++token) {
      for (int head = 0; head < heads_; ++head) {
        for (int d = 0; d < dim_; ++d) inside[index(token, head, d)] = true;
      }
    }
    Value poison;
    std::memset(static_cast<void*>(&poison), 0xff, sizeof(Value));
    for (size_t i = 0; i < host_.size(); ++i) {
      if (!inside[i] && std::memcmp(&host_[i], &poison, sizeof(Value)) != 0) return false;
    }
    return true;
  }

  bool same_bits(const std::vector<Value>& other) const {
    return std::memcmp(host_.data(), other.data(), host_.size() * sizeof(Value)) == 0;
  }

  const std::vector<Value>& storage() const { return host_; }

 private:
  static constexpr int64_t kGuard = 1024;
  // Elements: the views that kernels take step by 8, and by 16 where those are bytes.
  static constexpr int64_t kPadding = sizeof(Value) == 1 ? 16 : 8;
  static constexpr int64_t kUseless = 3;

  static int64_t token_stride(int length, int heads, int dim, Layout layout) {
    if (length == 1) return kUseless;
    if (layout == Layout::hnd) return dim;
    return layout == Layout::nhd ? int64_t{heads} * dim : heads * (dim + kPadding) + 2 * kPadding;
  }

  static int64_t head_stride(int length, int heads, int dim, Layout layout) {
    if (heads == 1) return kUseless;
    if (layout == Layout::hnd) return int64_t{length} * dim;
    return layout == Layout::nhd ? dim : dim + kPadding;
  }

  int64_t index(int token, int head, int d) const {
    return kGuard + token * token_stride_ + head * head_stride_ + d;
  }

  int length_;
  int heads_;
  int dim_;
  int64_t token_stride_;
  int64_t head_stride_;
  std::vector<Value> host_;
  DeviceArray<Value> device_;
};

// Random bools. Every fifth row shows no key, every seventh all, and every third only keys far from
// the diagonal's end.
std::vector<uint8_t> random_mask(Random& random, int qo_len, int kv_len) {
  std::vector<uint8_t> mask;
  for (int row = 0; row < qo_len; ++row) {
    for (int key = 0; key < kv_len; ++key) {
      const bool drawn = random.bits() & 1;
      const bool none = row % 5 == 2 || (row % 3 == 1 && key > kv_len / 3);
      mask.push_back(!none && (drawn || row % 7 == 3));
    }
  }
  return mask;
}

template <class T>
constexpr bool kIsFloat8 = sizeof(T) == 1;

// Of softmax weights beside values of this type. With 8 bits they are E4M3, of which the largest is
// 2^8 and the smallest unit 2^-9.
template <class T>
Rounding rounding_of() {
  if (kIsFloat8<T>) return {0x1p-4, 0x1p-18};
  return std::is_same_v<T, __half> ? Rounding{0x1p-11, 0x1p-25} : Rounding{0x1p-8, 0.};
}

template <class T>
using OutputOf = std::conditional_t<kIsFloat8<T>, __nv_bfloat16, T>;

// The LSE is fp32 throughout. With |q|, |k| <= 2 the products of a logit add up to about
// sqrt(head_dim) <= 16 in magnitude, in at most 16 steps on the tensor cores of an error of 2^-22
// each (they truncate): below 2^-13 in all. Those of 8 bits keep 13 bits of fraction.
template <class T>
constexpr double kLseTolerance = kIsFloat8<T> ? 0x1p-6 : 0x1p-12;

// Outputs differ by the rounding of the weights (the naive kernel adds up how much), by their own
// rounding, and by the errors of the logits, which move both numerator and denominator.
template <class T>
void check_output(const Tensor<OutputOf<T>>& out, const std::vector<NaiveOutput>& outputs,
                  const Place& place) {
  const Case& test = place.test;
  const Rounding of_weights = rounding_of<T>(), rounding = rounding_of<OutputOf<T>>();
  constexpr double kLogitError = kLseTolerance<T>;
  // Beside a sink of 2^126 times the keys' weights, which are lifted by 2^8 in 8 bits.
  constexpr double kFlushed = kIsFloat8<T> ? 0x1p-114 : 0x1p-122;
  for (int head = 0; head < test.num_kv_heads * test.group; ++head) {
    for (int row = 0; row < test.qo_len; ++row) {
      const int64_t index = int64_t{head} * test.qo_len + row;
      for (int d = 0; d < place.dims.vo; ++d) {
        const NaiveOutput expected = outputs[index * place.dims.vo + d];
        const double tolerance =
            expected.has_keys
                ? expected.weight_error * (1. + kLogitError / of_weights.relative) +
                      std::abs(expected.value) * rounding.relative + rounding.absolute + kFlushed
                : 0.;
        CHECK_NEAR(static_cast<float>(out.at(row, head, d)), expected.value, tolerance,
                   place << ": out[" << row << ", " << head << ", " << d << "]");
      }
    }
  }
  CHECK(out.untouched_around(), place << ": wrote outside the output");
}

template <class T>
void check_lse(const Tensor<float>& actual, const std::vector<double>& lse, const Place& place) {
  const Case& test = place.test;
  for (int head = 0; head < test.num_kv_heads * test.group; ++head) {
    for (int row = 0; row < test.qo_len; ++row) {
      CHECK_NEAR(actual.at(row, head, 0), lse[int64_t{head} * test.qo_len + row], kLseTolerance<T>,
                 place << ": lse[" << row << ", " << head << "]");
    }
  }
  CHECK(actual.untouched_around(), place << ": wrote outside the LSE");
}

template <class T>
void run_case(const KernelEntry& entry, HeadDims dims, const Case& test, cudaStream_t stream) {
  const Place place{entry, dims, test};
  Random random(test.qo_len + 31 * test.kv_len);
  const int num_qo_heads = test.num_kv_heads * test.group;
  Tensor<T> q(test.qo_len, num_qo_heads, dims.qk, test.layout);
  Tensor<T> k(test.kv_len, test.num_kv_heads, dims.qk, test.layout);
  Tensor<T> v(test.kv_len, test.num_kv_heads, dims.vo, test.layout);
  Tensor<OutputOf<T>> out(test.qo_len, num_qo_heads, dims.vo, test.layout);
  Tensor<float> lse(test.qo_len, num_qo_heads, 1, test.layout);
  Tensor<float> scale_q(num_qo_heads, 1, 1, Layout::nhd);
  Tensor<float> scale_k(test.num_kv_heads, 1, 1, Layout::padded);
  Tensor<float> scale_v(test.num_kv_heads, 1, 1, Layout::nhd);
  q.fill(random, 2.f);
  k.fill(random, 2.f);
  v.fill(random, 1.f);
  scale_q.fill(random, 1.f);
  scale_k.fill(random, 1.f);
  scale_v.fill(random, 2.f);

  PrefillParams params{};
  params.q = q.view();
  params.k = k.view();
  params.v = v.view();
  params.out = out.view();
  if (test.has_lse) {
    params.lse = lse.data();
    params.lse_token_stride = lse.token_stride();
    params.lse_head_stride = lse.head_stride();
  }
  params.qo_len = test.qo_len;
  params.kv_len = test.kv_len;
  params.num_qo_heads = num_qo_heads;
  params.num_kv_heads = test.num_kv_heads;
  params.head_dim_qk = dims.qk;
  params.head_dim_vo = dims.vo;
  CHECK_CUDA(cudaDeviceGetAttribute(&params.num_sms, cudaDevAttrMultiProcessorCount, 0));
  params.window_left = test.window_left == kUnbounded ? test.kv_len : test.window_left;
  params.window_right = test.window_right == kUnbounded ? test.qo_len : test.window_right;
  params.sm_scale = 1.f / std::sqrt(static_cast<float>(dims.qk));
  params.v_scale = 1.f;
  params.lse_scale = 1.f;
  if (test.has_scales) {
    params.scale_q = {scale_q.data(), scale_q.token_stride()};
    params.scale_k = {scale_k.data(), scale_k.token_stride()};
    params.scale_v = {scale_v.data(), 0};
    params.v_scale = -0.75f;
    params.lse_scale = kLn2;
  }
  Tensor<float> slopes(num_qo_heads, 1, 1, Layout::padded);
  Tensor<float> sinks(num_qo_heads, 1, 1, Layout::padded);
  slopes.fill(random, 0.5f);
  sinks.fill(random, 4.f);
  const auto bools = random_mask(random, test.qo_len, test.kv_len);
  DeviceArray<uint8_t> mask(static_cast<int64_t>(bools.size()));
  mask.upload(bools.data());
  const KernelInfo info = entry.info();
  const auto counts = MaskTileCounts::of(test.qo_len, test.kv_len, {}, info.tile_m, info.tile_n);
  const DeviceArray<uint8_t> mask_workspace(counts.workspace_bytes());
  if (test.extras.mask) {
    params.mask = counts.carve(mask_workspace.data());
    CHECK_CUDA(lay_out_mask({MaskFormat::bools, mask.data(), test.kv_len}, params, info.tile_m,
                            info.tile_n, params.mask, /*programmatic=*/false, stream));
  }
  params.soft_cap = test.extras.soft_cap;
  params.has_alibi = test.extras.alibi != Alibi::none;
  if (test.extras.alibi == Alibi::given) {
    params.alibi_slopes = {slopes.data(), slopes.token_stride()};
  }
  if (test.extras.sinks) params.sinks = {sinks.data(), sinks.token_stride()};

  TransposePass transpose = TransposePass::of(params, info.tile_n);
  const DeviceArray<uint8_t> transposed(transpose.workspace_bytes());
  if (kIsFloat8<T>) {
    transpose.carve(transposed.data(), params);
    CHECK_CUDA(transpose_v(transpose, /*programmatic=*/false, stream));
  }

  CHECK_CUDA(entry.launch(params, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  out.download();
  lse.download();
  const std::vector<OutputOf<T>> first_out = out.storage();
  const std::vector<float> first_lse = lse.storage();
  out.poison();
  lse.poison();
  CHECK_CUDA(entry.launch(params, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  out.download();
  lse.download();
  CHECK(out.same_bits(first_out), place << ": another output the second time");
  CHECK(lse.same_bits(first_lse), place << ": another LSE the second time");

  std::vector<double> expected_lse(static_cast<size_t>(num_qo_heads) * test.qo_len);
  std::vector<NaiveOutput> expected(expected_lse.size() * dims.vo);
  const DeviceArray<double> device_lse(static_cast<int64_t>(expected_lse.size()));
  const DeviceArray<NaiveOutput> device_expected(static_cast<int64_t>(expected.size()));
  prefill::test::naive_attention<T>(params, test.extras.mask ? mask.data() : nullptr,
                                    rounding_of<T>(), device_lse.data(), device_expected.data(),
                                    stream);
  device_lse.download(expected_lse.data());
  device_expected.download(expected.data());
  check_output<T>(out, expected, place);
  if (test.has_lse) check_lse<T>(lse, expected_lse, place);
}

// Lengths are put around the edges of the kernel's tiles of m rows and n keys.
std::vector<Case> small_cases(const KernelInfo& info) {
  const int m = info.tile_m, n = info.tile_n;
  constexpr int U = kUnbounded;
  return {
      {"one row, one key", 1, 1, 1, 1, U, U, Layout::nhd},
      {"one row", 1, 3 * n + 1, 2, 7, U, 0, Layout::hnd},
      {"whole tiles", 2 * m, 2 * n, 2, 1, U, U, Layout::nhd},
      {"one short of a tile", m - 1, n - 1, 1, 7, U, U, Layout::hnd},
      {"one more than tiles", m + 1, 2 * n + 1, 2, 1, U, U, Layout::padded},
      {"causal, as many rows as keys", 2 * m + 1, 2 * m + 1, 1, 7, U, 0, Layout::hnd},
      {"causal, more keys", m + 3, 4 * n + 1, 2, 7, U, 0, Layout::padded},
      {"causal, row tiles without keys", 2 * m + n + 3, n + 1, 2, 1, U, 0, Layout::padded},
      {"causal, one key", 2 * m, 1, 1, 7, U, 0, Layout::nhd},
      {"window", 2 * m + 1, 5 * n + 3, 1, 7, n / 2, 0, Layout::nhd},
      {"window, more rows", 2 * m + 5, n + 3, 2, 1, 3, 0, Layout::hnd},
      {"window without a right bound", m + 5, 3 * n + 2, 2, 1, 7, U, Layout::padded},
      {"window to both sides", 2 * m + 1, 4 * n, 1, 7, n + 1, 5, Layout::hnd},
      {"diagonal", m + 2, m + 2, 1, 7, 0, 0, Layout::nhd},
      {"scales", m + 1, 2 * n + 3, 3, 7, U, 0, Layout::padded, true, true},
      {"no LSE", m + 1, n + 1, 2, 1, U, U, Layout::nhd, false},
  };
}

// Each extra alone, and together.
std::vector<Case> extra_cases(const KernelInfo& info) {
  const int m = info.tile_m, n = info.tile_n;
  constexpr int U = kUnbounded;
  const Extras mask{true}, cap{false, 2.f}, rule{false, 0.f, Alibi::rule};
  const Extras slopes{false, 0.f, Alibi::given}, sinks{false, 0.f, Alibi::none, true};
  const Extras all{true, 1.5f, Alibi::rule, true};
  const Extras no_mask{false, 1.5f, Alibi::given, true};
  return {
      {"mask", m + 5, 3 * n + 3, 2, 7, U, U, Layout::nhd, true, false, mask},
      {"mask, more rows", 2 * m + 1, n - 3, 1, 7, U, U, Layout::hnd, true, false, mask},
      {"mask of one bit", 1, 1, 1, 1, U, U, Layout::nhd, true, false, mask},
      {"mask and window", m + 1, 4 * n + 5, 2, 1, n + 1, U, Layout::padded, true, false, mask},
      {"mask and scales", m + 1, 2 * n + 7, 2, 1, U, U, Layout::nhd, true, true, mask},
      {"soft cap", m + 1, 3 * n + 1, 2, 7, U, U, Layout::hnd, true, false, cap},
      {"soft cap, causal", 2 * m + n, n + 9, 2, 1, U, 0, Layout::nhd, true, false, cap},
      {"soft cap and scales", m + 1, 2 * n + 3, 2, 7, U, 0, Layout::nhd, true, true, cap},
      {"ALiBi", m + 1, 3 * n + 1, 1, 7, U, U, Layout::padded, true, false, rule},
      {"ALiBi, causal", 2 * m + 3, 2 * m + 3, 3, 1, U, 0, Layout::hnd, true, false, rule},
      {"ALiBi, given slopes", m + 1, 2 * n, 2, 7, U, 0, Layout::nhd, true, false, slopes},
      {"sinks", m + 1, 5 * n + 1, 2, 7, U, U, Layout::nhd, true, false, sinks},
      {"sinks, causal", 2 * m + n + 3, n + 1, 2, 1, U, 0, Layout::hnd, true, false, sinks},
      {"sinks and scales", m + 1, 2 * n + 3, 2, 7, n, 0, Layout::nhd, true, true, sinks},
      {"all extras", m + 3, 3 * n + 3, 2, 7, U, U, Layout::padded, true, true, all},
      {"all extras and window", 2 * m + 1, 4 * n + 1, 1, 7, n / 2, U, Layout::hnd, true, false,
       all},
      {"all but a mask", 2 * m + 1, 3 * n + 2, 2, 7, U, 0, Layout::nhd, true, true, no_mask},
      {"all but a mask, window", m, 4 * n, 2, 1, n, 3, Layout::nhd, true, false, no_mask},
  };
}

// What needs many heads or many keys, and is tried with one pair of head dims. All have more tiles
// than there are SMs.
template <class T>
std::vector<Case> large_cases(const KernelEntry& entry, int num_sms) {
  const KernelInfo info = entry.info();
  constexpr int U = kUnbounded;
  // Two KV heads of 17 MB are more than TileSchedule lets share the L2 cache.
  const int long_kv =
      (17 << 20) / (static_cast<int>(sizeof(T)) * (entry.head_dim_qk + entry.head_dim_vo));
  const int third = num_sms / 3 + 1;
  return {
      {"three rounds", info.tile_m + 1, info.tile_n + 1, num_sms / 2 + 2, 2, U, 0, Layout::nhd},
      {"sections of heads", 2, long_kv, 3, third, U, U, Layout::nhd},
      {"causal, heads beyond L2", 2, long_kv, 3, third, U, 0, Layout::nhd},
  };
}

template <class T>
void run_row(const KernelEntry& entry, int num_sms, cudaStream_t stream) {
  const HeadDims whole{entry.head_dim_qk, entry.head_dim_vo};
  // One chunk of 8, or of 16 bytes, less; and a partial last column of 64, with whole columns of V
  // missing.
  constexpr int kChunk = kIsFloat8<T> ? 16 : 8;
  const HeadDims less{whole.qk - kChunk, whole.vo - kChunk};
  const HeadDims few{whole.qk - 64 + kChunk, kChunk};
  for (const HeadDims& dims : {whole, less, few}) {
    for (const Case& test : small_cases(entry.info())) run_case<T>(entry, dims, test, stream);
    for (const Case& test : extra_cases(entry.info())) run_case<T>(entry, dims, test, stream);
  }
  for (const Case& test : large_cases<T>(entry, num_sms)) run_case<T>(entry, whole, test, stream);
}

bool runs_on(Backend backend, int major, int minor) {
  return backend == Backend::fa2 ? major >= 8 : major == 9 && minor == 0;
}

}  // namespace

int main() {
  if (prefill::test::no_gpu()) return prefill::test::kSkipped;
  int major = 0, minor = 0, num_sms = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  CHECK_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  // Not ordered with the default stream: a kernel that does not run here is not waited for.
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

  int count = 0, run = 0;
  const KernelEntry* table = prefill::kernel_table(count);
  for (int i = 0; i < count; ++i) {
    const KernelEntry& entry = table[i];
    const bool runs = runs_on(entry.backend, major, minor);
    std::printf("%s %s %dx%d%s\n", prefill::name(entry.backend), prefill::name(entry.dtype),
                entry.head_dim_qk, entry.head_dim_vo, runs ? "" : ": not for this device");
    if (!runs) continue;
    ++run;
    switch (entry.dtype) {
      case DType::float16:
        run_row<__half>(entry, num_sms, stream);
        break;
      case DType::bfloat16:
        run_row<__nv_bfloat16>(entry, num_sms, stream);
        break;
      case DType::float8_e4m3:
        run_row<__nv_fp8_e4m3>(entry, num_sms, stream);
        break;
      case DType::float8_e5m2:
        run_row<__nv_fp8_e5m2>(entry, num_sms, stream);
        break;
    }
    if (cudaFree(nullptr) != cudaSuccess) return prefill::test::result();  // the context is lost
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
  if (run == 0) {
    std::printf("skipped: no kernel of this build runs on compute capability %d.%d\n", major,
                minor);
    return prefill::test::kSkipped;
  }
  return prefill::test::result();
}
