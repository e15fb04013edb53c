// The ops of this library: torch tensors in, PrefillParams out. Python has checked every argument
// and says what is wrong in its own words; what is checked here are this file's own assumptions.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "common/kernel_table.h"
#include "common/mask_tiles.h"
#include "common/params.h"
#include "common/prepare.h"
#include "common/split_plan.h"
#include "common/torch_stream.h"
#include "common/transpose_v.h"

namespace prefill {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Backend parse_backend(const std::string& backend) {
  if (backend == "fa2") return Backend::fa2;
  STD_TORCH_CHECK(backend == "fa3", "backend must be fa2 or fa3, got ", backend);
  return Backend::fa3;
}

DType parse_dtype(const std::string& dtype) {
  constexpr DType kKnown[] = {DType::float16, DType::bfloat16, DType::float8_e4m3,
                              DType::float8_e5m2};
  const auto* found = std::find_if(std::begin(kKnown), std::end(kKnown),
                                   [&](DType known) { return dtype == name(known); });
  STD_TORCH_CHECK(found != std::end(kKnown),
                  "dtype must be float16, bfloat16, float8_e4m3fn or float8_e5m2, got ", dtype);
  return *found;
}

SourceType source_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float8_e4m3fn:
      return SourceType::float8_e4m3;
    case ScalarType::Float8_e5m2:
      return SourceType::float8_e5m2;
    default:
      return SourceType::same;
  }
}

OutputType output_type(const Tensor& out) {
  switch (out.scalar_type()) {
    case ScalarType::Half:
      return OutputType::float16;
    case ScalarType::BFloat16:
      return OutputType::bfloat16;
    default:
      STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float,
                      "out is a float16, bfloat16 or float32 tensor");
      return OutputType::float32;
  }
}

// The dtype of the kernel for a call: q's. Unless there is a kernel for them (float8_kernel),
// float8 tensors are widened, exactly by either, to what is written; else to float16, which rounds
// softmax weights less.
DType kernel_dtype(const Tensor& q, OutputType out) {
  if (q.scalar_type() == ScalarType::Half) return DType::float16;
  if (q.scalar_type() == ScalarType::BFloat16) return DType::bfloat16;
  STD_TORCH_CHECK(source_type(q) != SourceType::same,
                  "q is a float16, bfloat16, float8_e4m3fn or float8_e5m2 tensor");
  return out == OutputType::bfloat16 ? DType::bfloat16 : DType::float16;
}

// k and v are of the dtype of q, or of 8 bits each.
SourceTypes source_types(const Tensor& q, const Tensor& k, const Tensor& v) {
  const SourceTypes types{source_type(q), source_type(k), source_type(v)};
  const auto fits = [&](const Tensor& tensor, SourceType type) {
    return type != SourceType::same ||
           (types.q == SourceType::same && tensor.scalar_type() == q.scalar_type());
  };
  STD_TORCH_CHECK(fits(k, types.k) && fits(v, types.v), "k and v are of the dtype of q, or float8");
  return types;
}

// Whether a [length, heads, head_dim] tensor can be read and written so many elements at a time.
bool is_aligned(const Tensor& tensor, int64_t elements) {
  const auto has_aligned = [&](int dim) {
    return tensor.size(dim) == 1 || tensor.stride(dim) % elements == 0;
  };
  return tensor.dim() == 3 && tensor.size(2) % elements == 0 && tensor.stride(2) == 1 &&
         has_aligned(0) && has_aligned(1) &&
         reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

// By the kernels, or, in 8 bits, by the pass that widens it.
TensorView view(const Tensor& tensor) {
  STD_TORCH_CHECK(is_aligned(tensor, 8),
                  "kernels take 16-byte aligned [length, heads, head_dim] tensors");
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1)};
}

PerHead per_head(const std::optional<Tensor>& values, int num_heads) {
  if (!values) return {nullptr, 0};
  STD_TORCH_CHECK(values->dim() == 1 && values->size(0) == num_heads &&
                      values->scalar_type() == ScalarType::Float,
                  "scales, ALiBi slopes and sinks are float32 [num_heads] tensors");
  return {static_cast<const float*>(values->data_ptr()), values->stride(0)};
}

// A soft cap as a float: one that is on stays on, and finite.
float soft_cap_of(double cap) {
  if (!(cap > 0.)) return 0.f;
  return static_cast<float>(std::clamp<double>(cap, std::numeric_limits<float>::min(),
                                               std::numeric_limits<float>::max()));
}

// -1 means unbounded, which a window that spans everything is too.
int window(int64_t given, int64_t widest) {
  return static_cast<int>(given < 0 || given > widest ? widest : given);
}

PrefillParams make_params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                          const std::optional<Tensor>& lse, const std::optional<Tensor>& scale_q,
                          const std::optional<Tensor>& scale_k,
                          const std::optional<Tensor>& scale_v,
                          const std::optional<Tensor>& alibi_slopes,
                          const std::optional<Tensor>& sinks, int64_t window_left,
                          int64_t window_right, bool alibi, double soft_cap, double sm_scale,
                          double v_scale, double lse_scale) {
  constexpr int64_t kMaxLength = int64_t{1} << 30;  // row and key indices stay in 32 bits
  PrefillParams params{};
  params.q = view(q);
  params.k = view(k);
  params.v = view(v);
  params.out = view(out);
  const int64_t qo_len = q.size(0), kv_len = k.size(0);
  const int64_t num_qo_heads = q.size(1), num_kv_heads = k.size(1);
  STD_TORCH_CHECK(qo_len > 0 && qo_len < kMaxLength && kv_len > 0 && kv_len < kMaxLength,
                  "lengths lie in 1..2^30-1");
  STD_TORCH_CHECK(num_kv_heads > 0 && num_qo_heads > 0 && num_qo_heads % num_kv_heads == 0,
                  "num_qo_heads is a multiple of num_kv_heads");
  STD_TORCH_CHECK(k.size(2) == q.size(2) && v.size(0) == kv_len && v.size(1) == num_kv_heads &&
                      out.size(0) == qo_len && out.size(1) == num_qo_heads &&
                      out.size(2) == v.size(2),
                  "shapes of q, k, v and out agree");
  const auto elsewhere = [&](const std::optional<Tensor>& tensor) {
    return tensor && tensor->get_device() != q.get_device();
  };
  STD_TORCH_CHECK(!elsewhere(k) && !elsewhere(v) && !elsewhere(out) && !elsewhere(lse) &&
                      !elsewhere(scale_q) && !elsewhere(scale_k) && !elsewhere(scale_v) &&
                      !elsewhere(alibi_slopes) && !elsewhere(sinks),
                  "all tensors are on one device");
  if (lse) {
    STD_TORCH_CHECK(lse->dim() == 2 && lse->size(0) == qo_len && lse->size(1) == num_qo_heads &&
                        lse->scalar_type() == ScalarType::Float,
                    "lse is a float32 [qo_len, num_qo_heads] tensor");
    params.lse = static_cast<float*>(lse->data_ptr());
    params.lse_token_stride = lse->stride(0);
    params.lse_head_stride = lse->stride(1);
  }
  params.qo_len = static_cast<int>(qo_len);
  params.kv_len = static_cast<int>(kv_len);
  params.num_qo_heads = static_cast<int>(num_qo_heads);
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.head_dim_qk = static_cast<int>(q.size(2));
  params.head_dim_vo = static_cast<int>(v.size(2));
  params.window_left = window(window_left, kv_len);
  params.window_right = window(window_right, qo_len);
  params.scale_q = per_head(scale_q, params.num_qo_heads);
  params.scale_k = per_head(scale_k, params.num_kv_heads);
  params.scale_v = per_head(scale_v, params.num_kv_heads);
  params.sm_scale = static_cast<float>(sm_scale);
  params.v_scale = static_cast<float>(v_scale);
  params.soft_cap = soft_cap_of(soft_cap);
  params.has_alibi = alibi;
  params.alibi_slopes = per_head(alibi_slopes, params.num_qo_heads);
  params.sinks = per_head(sinks, params.num_qo_heads);
  params.lse_scale = static_cast<float>(lse_scale);
  params.out_type = output_type(out);
  return params;
}

// The kernel that multiplies q, k and v of 8 bits as they are, or null: they are all of one float8
// type, positions do not rotate them, a head dim is beyond 64 (below, 16 bits are faster), the
// build has it, and TMA can address them.
const KernelEntry* float8_kernel(Backend backend, const Tensor& q, const Tensor& k, const Tensor& v,
                                 bool rope) {
  const SourceTypes types = source_types(q, k, v);
  const bool is_one_type = types.q == types.k && types.q == types.v;
  if (types.q == SourceType::same || !is_one_type || rope) return nullptr;
  constexpr int64_t kWidenedHeadDim = 64;
  if (q.size(2) <= kWidenedHeadDim && v.size(2) <= kWidenedHeadDim) return nullptr;
  if (!is_aligned(q, 16) || !is_aligned(k, 16) || !is_aligned(v, 16)) return nullptr;
  const DType dtype = types.q == SourceType::float8_e4m3 ? DType::float8_e4m3 : DType::float8_e5m2;
  return find_kernel(backend, dtype, static_cast<int>(q.size(2)), static_cast<int>(v.size(2)));
}

// A bool [qo_len, kv_len] mask, or a packed one.
MaskSource mask_source(const Tensor& mask, const PrefillParams& params) {
  const int64_t qo_len = params.qo_len, kv_len = params.kv_len;
  const auto* data = static_cast<const uint8_t*>(mask.data_ptr());
  if (mask.scalar_type() == ScalarType::Bool) {
    STD_TORCH_CHECK(mask.dim() == 2 && mask.size(0) == qo_len && mask.size(1) == kv_len &&
                        (kv_len == 1 || mask.stride(1) == 1),
                    "a bool mask is [qo_len, kv_len], with dense rows");
    return {MaskFormat::bools, data, mask.stride(0)};
  }
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Byte && mask.dim() == 1 &&
                      mask.size(0) == (qo_len * kv_len + 7) / 8 && mask.is_contiguous(),
                  "a packed mask is a dense uint8 [ceil(qo_len * kv_len / 8)] tensor");
  return {MaskFormat::bits, data, kv_len};
}

// The devices of fa3 know how to wait for the kernel before (pass_launch.cuh).
bool has_programmatic_passes(const KernelEntry& kernel) { return kernel.backend == Backend::fa3; }

// Lays the mask out for a kernel's tiles. The memory of `params.mask` is the tensor's: its
// allocator gives it to no other stream before what has been launched here is done.
Tensor lay_out(const Tensor& mask, const KernelEntry& kernel, PrefillParams& params,
               cudaStream_t stream) {
  const KernelInfo info = kernel.info();
  const MaskTileCounts counts =
      MaskTileCounts::of(params.qo_len, params.kv_len, params.rows, info.tile_m, info.tile_n);
  Tensor workspace = torch::stable::new_empty(mask, {counts.workspace_bytes()}, ScalarType::Byte);
  params.mask = counts.carve(workspace.data_ptr());
  const cudaError_t error =
      lay_out_mask(mask_source(mask, params), params, info.tile_m, info.tile_n, params.mask,
                   has_programmatic_passes(kernel), stream);
  STD_TORCH_CHECK(error == cudaSuccess, "the mask pass failed to launch: ", cudaGetErrorName(error),
                  " (", cudaGetErrorString(error), ")");
  return workspace;
}

// Copies what the kernels cannot take as it is, and lets `params` find the copies. Their memory is
// the tensor's, as that of a mask is (lay_out).
Tensor prepare_inputs(const Tensor& q, PreparePass& pass, const KernelEntry& kernel,
                      PrefillParams& params, cudaStream_t stream) {
  Tensor workspace = torch::stable::new_empty(q, {pass.workspace_bytes()}, ScalarType::Byte);
  pass.carve(workspace.data_ptr(), params);
  const cudaError_t error = prepare(pass, kernel.dtype, has_programmatic_passes(kernel), stream);
  STD_TORCH_CHECK(error == cudaSuccess,
                  "the pass over q, k and v failed to launch: ", cudaGetErrorName(error), " (",
                  cudaGetErrorString(error), ")");
  return workspace;
}

// Transposes v for a kernel of 8 bits, which `params` lets find it, in memory as that of
// prepare_inputs.
Tensor transpose_values(const Tensor& v, const KernelEntry& kernel, PrefillParams& params,
                        cudaStream_t stream) {
  TransposePass pass = TransposePass::of(params, kernel.info().tile_n);
  Tensor workspace = torch::stable::new_empty(v, {pass.workspace_bytes()}, ScalarType::Byte);
  pass.carve(workspace.data_ptr(), params);
  const cudaError_t error = transpose_v(pass, has_programmatic_passes(kernel), stream);
  STD_TORCH_CHECK(error == cudaSuccess,
                  "the pass over v failed to launch: ", cudaGetErrorName(error), " (",
                  cudaGetErrorString(error), ")");
  return workspace;
}

SplitPlan plan_of(const PrefillParams& params, const KernelInfo& kernel, bool packs,
                  bool only_parts, int64_t num_splits) {
  STD_TORCH_CHECK(num_splits >= 0 && num_splits <= SplitKv::kMaxSplits, "num_splits is one of 0..",
                  SplitKv::kMaxSplits, ", got ", num_splits);
  return SplitPlanner(params, kernel, packs, only_parts).plan(static_cast<int>(num_splits));
}

// Whether heads of a KV head may share row tiles: what is one head's own is not looked up by row.
bool can_pack(const PrefillParams& params) {
  return !params.has_alibi && (params.scale_q.data == nullptr || params.scale_q.stride == 0);
}

// Follows the plan, with memory for the parts that is the tensor's, as that of a mask is (lay_out).
std::optional<Tensor> follow(const SplitPlan& plan, const KernelEntry& kernel, const Tensor& q,
                             PrefillParams& params) {
  if (!plan.has_parts()) return std::nullopt;
  constexpr int64_t kLseFloats = sizeof(PartLse) / sizeof(float);
  const int64_t rows = plan.num_parts() * kernel.info().tile_m;
  STD_TORCH_CHECK(rows <= std::numeric_limits<int>::max(), "num_splits ", plan.num_splits,
                  " makes too many parts of this call");
  const int64_t values = rows * kernel.head_dim_vo;
  Tensor workspace = torch::stable::new_empty(q, {values + kLseFloats * rows}, ScalarType::Float);
  auto* data = static_cast<float*>(workspace.data_ptr());
  params.rows = RowMap::of(plan.packed_heads);
  params.split = {plan.num_splits, plan.num_whole, data, reinterpret_cast<PartLse*>(data + values)};
  return workspace;
}

int multiprocessors(int device) {
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  STD_TORCH_CHECK(error == cudaSuccess, "no answer about the device: ", cudaGetErrorName(error));
  return count;
}

void attention(std::string backend, Tensor q, Tensor k, Tensor v, Tensor out,
               std::optional<Tensor> lse, std::optional<Tensor> scale_q,
               std::optional<Tensor> scale_k, std::optional<Tensor> scale_v,
               std::optional<Tensor> mask, std::optional<Tensor> alibi_slopes,
               std::optional<Tensor> sinks, int64_t window_left, int64_t window_right, bool alibi,
               bool rope, double rope_scale, double rope_theta, double soft_cap, double sm_scale,
               double v_scale, double lse_scale, int64_t num_splits) {
  PrefillParams params =
      make_params(q, k, v, out, lse, scale_q, scale_k, scale_v, alibi_slopes, sinks, window_left,
                  window_right, alibi, soft_cap, sm_scale, v_scale, lse_scale);
  const SourceTypes types = source_types(q, k, v);
  const KernelEntry* kernel = float8_kernel(parse_backend(backend), q, k, v, rope);
  if (kernel == nullptr) {
    kernel = find_kernel(parse_backend(backend), kernel_dtype(q, params.out_type),
                         params.head_dim_qk, params.head_dim_vo);
  }
  STD_TORCH_CHECK(kernel != nullptr, "this build has no ", backend, " kernel for head dims ",
                  params.head_dim_qk, " and ", params.head_dim_vo);

  const int32_t device = out.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  STD_TORCH_CHECK(current_stream(device, stream), "torch gave no CUDA stream");
  params.num_sms = multiprocessors(device);
  const bool only_parts = params.out_type != kernel_output(kernel->dtype);
  const SplitPlan plan = plan_of(params, kernel->info(), can_pack(params), only_parts, num_splits);
  const std::optional<Tensor> parts = follow(plan, *kernel, q, params);
  std::optional<Tensor> workspace;
  if (is_float8(kernel->dtype)) {
    workspace = transpose_values(v, *kernel, params, stream);
  } else if (rope || !types.all_same()) {
    const auto angles = rope ? std::optional<Rope>({rope_scale, rope_theta}) : std::nullopt;
    PreparePass pass = PreparePass::of(params, types, angles, kernel->info().tile_n);
    workspace = prepare_inputs(q, pass, *kernel, params, stream);
  }
  std::optional<Tensor> mask_workspace;
  if (mask) {
    STD_TORCH_CHECK(mask->get_device() == device, "all tensors are on one device");
    mask_workspace = lay_out(*mask, *kernel, params, stream);
  }
  const cudaError_t error = kernel->launch(params, stream);
  STD_TORCH_CHECK(error == cudaSuccess, backend, " failed to launch: ", cudaGetErrorName(error),
                  " (", cudaGetErrorString(error), ")");
}

// What `attention` would do of such a call, as JSON; no device is needed.
std::string split_plan(std::string backend, std::string dtype, int64_t qo_len, int64_t kv_len,
                       int64_t num_qo_heads, int64_t num_kv_heads, int64_t head_dim_qk,
                       int64_t head_dim_vo, int64_t window_left, int64_t window_right, bool packs,
                       bool only_parts, int64_t num_sms, int64_t num_splits) {
  const KernelEntry* kernel =
      find_kernel(parse_backend(backend), parse_dtype(dtype), static_cast<int>(head_dim_qk),
                  static_cast<int>(head_dim_vo));
  STD_TORCH_CHECK(kernel != nullptr, "this build has no ", backend, " kernel for head dims ",
                  head_dim_qk, " and ", head_dim_vo);
  STD_TORCH_CHECK(qo_len > 0 && kv_len > 0 && num_kv_heads > 0 && num_qo_heads > 0 && num_sms > 0,
                  "a plan is of a call that launches something");
  PrefillParams params{};
  params.qo_len = static_cast<int>(qo_len);
  params.kv_len = static_cast<int>(kv_len);
  params.num_qo_heads = static_cast<int>(num_qo_heads);
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.head_dim_qk = static_cast<int>(head_dim_qk);
  params.head_dim_vo = static_cast<int>(head_dim_vo);
  params.window_left = window(window_left, kv_len);
  params.window_right = window(window_right, qo_len);
  params.num_sms = static_cast<int>(num_sms);
  const SplitPlan plan = plan_of(params, kernel->info(), packs, only_parts, num_splits);
  std::ostringstream json;
  json << R"({"packed_heads": )" << plan.packed_heads << R"(, "num_splits": )" << plan.num_splits
       << R"(, "num_row_tiles": )" << plan.num_row_tiles << R"(, "num_whole_tiles": )"
       << plan.num_whole << "}";
  return json.str();
}

// The newest CUDA that the driver serves, as 1000 * major + 10 * minor; 0 without a driver.
int64_t driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace
}  // namespace prefill

STABLE_TORCH_LIBRARY(prefill, library) {
  library.def("build_info() -> str");
  library.def("driver_version() -> int");
  library.def(
      "attention(str backend, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, "
      "Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, Tensor? mask, Tensor? alibi_slopes, "
      "Tensor? sinks, int window_left, int window_right, bool alibi, bool rope, float rope_scale, "
      "float rope_theta, float soft_cap, float sm_scale, float v_scale, float lse_scale, int "
      "num_splits) -> ()");
  library.def(
      "split_plan(str backend, str dtype, int qo_len, int kv_len, int num_qo_heads, int "
      "num_kv_heads, int head_dim_qk, int head_dim_vo, int window_left, int window_right, bool "
      "packs, bool only_parts, int num_sms, int num_splits) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(prefill, CompositeExplicitAutograd, library) {
  library.impl("build_info", TORCH_BOX(&prefill::build_info));
  library.impl("driver_version", TORCH_BOX(&prefill::driver_version));
  library.impl("split_plan", TORCH_BOX(&prefill::split_plan));
}

STABLE_TORCH_LIBRARY_IMPL(prefill, CUDA, library) {
  library.impl("attention", TORCH_BOX(&prefill::attention));
}
