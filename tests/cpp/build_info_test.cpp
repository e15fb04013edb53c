// The description of the build agrees with the table it describes.
#include <string>

#include "check.h"
#include "common/kernel_table.h"

namespace {

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

int main() {
  int count = 0;
  prefill::kernel_table(count);
  const std::string info = prefill::build_info();
  CHECK(count > 0);
  CHECK_EQ(occurrences(info, "\"head_dim_qk\": "), count, info);
  for (const char* key : {"version", "cuda", "cutlass", "torch_target", "archs", "kernels"}) {
    CHECK_EQ(occurrences(info, "\"" + std::string(key) + "\": "), 1, info);
  }
  return prefill::test::result();
}
