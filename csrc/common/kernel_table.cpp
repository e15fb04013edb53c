#include "common/kernel_table.h"

#include <sstream>

namespace prefill {

// The explicit instantiations live in the generated .cu files, one for each row of the list.
namespace fa2 {
template <DType kDType, class Dims>
KernelInfo kernel_info();
template <DType kDType, class Dims>
cudaError_t launch(const PrefillParams&, cudaStream_t);
}  // namespace fa2

namespace fa3 {
template <DType kDType, class Dims>
KernelInfo kernel_info();
template <DType kDType, class Dims>
cudaError_t launch(const PrefillParams&, cudaStream_t);
}  // namespace fa3

namespace {

#include "build_info.inc"  // kVersion, kCuda, kCutlass, kTorchTarget; kArchs is a JSON object

constexpr KernelEntry kKernels[] = {
#define PREFILL_KERNEL(backend, dtype, qk, vo)            \
  {Backend::backend,                                      \
   DType::dtype,                                          \
   qk,                                                    \
   vo,                                                    \
   &backend::kernel_info<DType::dtype, HeadDims<qk, vo>>, \
   &backend::launch<DType::dtype, HeadDims<qk, vo>>},
#include "kernel_table.inc"
#undef PREFILL_KERNEL
};

}  // namespace

const KernelEntry* kernel_table(int& count) {
  count = static_cast<int>(sizeof(kKernels) / sizeof(kKernels[0]));
  return kKernels;
}

const KernelEntry* find_kernel(Backend backend, DType dtype, int head_dim_qk, int head_dim_vo) {
  const KernelEntry* best = nullptr;
  for (const KernelEntry& entry : kKernels) {
    const bool fits = entry.backend == backend && entry.dtype == dtype &&
                      head_dim_qk <= entry.head_dim_qk && head_dim_vo <= entry.head_dim_vo;
    if (fits && (best == nullptr ||
                 entry.head_dim_qk + entry.head_dim_vo < best->head_dim_qk + best->head_dim_vo)) {
      best = &entry;
    }
  }
  return best;
}

const char* name(Backend backend) { return backend == Backend::fa2 ? "fa2" : "fa3"; }

const char* name(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float8_e4m3:
      return "float8_e4m3fn";
    case DType::float8_e5m2:
      return "float8_e5m2";
  }
  return "";
}

std::string build_info() {
  std::ostringstream json;
  json << R"({"version": ")" << kVersion << R"(", "cuda": ")" << kCuda << R"(", "cutlass": ")"
       << kCutlass << R"(", "torch_target": ")" << kTorchTarget << R"(", "archs": )" << kArchs
       << R"(, "kernels": [)";
  const char* separator = "";
  for (const KernelEntry& entry : kKernels) {
    const KernelInfo info = entry.info();
    json << separator << R"({"backend": ")" << name(entry.backend) << R"(", "dtype": ")"
         << name(entry.dtype) << R"(", "head_dim_qk": )" << entry.head_dim_qk
         << R"(, "head_dim_vo": )" << entry.head_dim_vo << R"(, "tile_m": )" << info.tile_m
         << R"(, "tile_n": )" << info.tile_n << R"(, "stages": )" << info.stages
         << R"(, "threads": )" << info.threads << R"(, "smem_bytes": )" << info.smem_bytes << "}";
    separator = ", ";
  }
  json << "]}";
  return json.str();
}

}  // namespace prefill
