// The table against the list it was made from, the lookup, and what kernels tell of themselves.
#include "common/kernel_table.h"

#include <ostream>

#include "check.h"

namespace {

using prefill::Backend;
using prefill::DType;
using prefill::KernelEntry;
using prefill::KernelInfo;

struct Row {
  Backend backend;
  DType dtype;
  int head_dim_qk;
  int head_dim_vo;
};

constexpr Row kList[] = {
#define PREFILL_KERNEL(backend, dtype, qk, vo) {Backend::backend, DType::dtype, qk, vo},
#include "kernel_table.inc"
#undef PREFILL_KERNEL
};
constexpr int kListed = sizeof(kList) / sizeof(kList[0]);

std::ostream& operator<<(std::ostream& stream, const Row& row) {
  return stream << prefill::name(row.backend) << " " << prefill::name(row.dtype) << " "
                << row.head_dim_qk << "x" << row.head_dim_vo;
}

bool same_kind(const Row& a, const Row& b) { return a.backend == b.backend && a.dtype == b.dtype; }

bool holds(const Row& a, const Row& b) {
  return a.head_dim_qk >= b.head_dim_qk && a.head_dim_vo >= b.head_dim_vo;
}

bool equal(const Row& a, const Row& b) { return same_kind(a, b) && holds(a, b) && holds(b, a); }

Row row_of(const KernelEntry& entry) {
  return {entry.backend, entry.dtype, entry.head_dim_qk, entry.head_dim_vo};
}

void check_table() {
  int count = 0;
  const KernelEntry* table = prefill::kernel_table(count);
  CHECK_EQ(count, kListed);
  for (int i = 0; i < count && i < kListed; ++i) {
    CHECK(equal(row_of(table[i]), kList[i]), row_of(table[i]) << " in the place of " << kList[i]);
    CHECK(table[i].info != nullptr && table[i].launch != nullptr, kList[i]);
    for (int j = 0; j < i; ++j) CHECK(!equal(kList[i], kList[j]), kList[i] << " is listed twice");
  }
}

// What is found holds both head dims, and nothing smaller does.
void check_lookup(const Row& wanted) {
  const KernelEntry* found =
      prefill::find_kernel(wanted.backend, wanted.dtype, wanted.head_dim_qk, wanted.head_dim_vo);
  bool exists = false;
  for (const Row& row : kList) exists = exists || (same_kind(row, wanted) && holds(row, wanted));
  CHECK_EQ(found != nullptr, exists, wanted);
  if (found == nullptr) return;
  const Row best = row_of(*found);
  CHECK(same_kind(best, wanted) && holds(best, wanted), best << " for " << wanted);
  for (const Row& row : kList) {
    if (same_kind(row, wanted) && holds(row, wanted) && !equal(row, best)) {
      CHECK(!holds(best, row), best << " for " << wanted << ", but " << row << " is smaller");
    }
  }
}

void check_lookups() {
  constexpr int kAboveAll = 264;
  for (Backend backend : {Backend::fa2, Backend::fa3}) {
    for (DType dtype : {DType::float16, DType::bfloat16, DType::float8_e4m3, DType::float8_e5m2}) {
      for (int qk = 8; qk <= kAboveAll; qk += 8) {
        for (int vo = 8; vo <= kAboveAll; vo += 8) check_lookup({backend, dtype, qk, vo});
        CHECK(prefill::find_kernel(backend, dtype, qk, kAboveAll) == nullptr);
        CHECK(prefill::find_kernel(backend, dtype, kAboveAll, qk) == nullptr);
      }
    }
  }
}

void check_info(const KernelEntry& entry) {
  const Row row = row_of(entry);
  const KernelInfo info = entry.info();
  const int smem_limit = (entry.backend == Backend::fa2 ? 99 : 227) * 1024;  // consumer cards, sm90
  const int element_bytes = prefill::is_float8(entry.dtype) ? 1 : 2;
  const int q_bytes = info.tile_m * entry.head_dim_qk * element_bytes;
  const int k_bytes = info.tile_n * entry.head_dim_qk * element_bytes;
  const int v_bytes = info.tile_n * entry.head_dim_vo * element_bytes;
  const int tile_bytes = q_bytes + info.stages * (k_bytes + v_bytes);
  CHECK(info.tile_m > 0 && info.tile_m % 64 == 0, row << ": tile_m " << info.tile_m);
  CHECK(info.tile_n > 0 && info.tile_n % 16 == 0, row << ": tile_n " << info.tile_n);
  CHECK(info.stages >= 1, row << ": stages " << info.stages);
  CHECK(info.threads > 0 && info.threads % 32 == 0 && info.threads <= 1024,
        row << ": threads " << info.threads);
  CHECK(info.smem_bytes >= tile_bytes && info.smem_bytes <= smem_limit,
        row << ": smem_bytes " << info.smem_bytes);
}

}  // namespace

int main() {
  check_table();
  check_lookups();
  int count = 0;
  const KernelEntry* table = prefill::kernel_table(count);
  for (int i = 0; i < count; ++i) check_info(table[i]);
  return prefill::test::result();
}
