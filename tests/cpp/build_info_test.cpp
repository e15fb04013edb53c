// The description of the build is JSON and agrees with the table it describes.
#include <cctype>
#include <sstream>
#include <string>

#include "check.h"
#include "common/kernel_table.h"

namespace {

// Whether a text is one JSON value; of escapes only what build_info may hold: none.
class JsonSyntax {
 public:
  explicit JsonSyntax(const std::string& text) : text_(text) {}

  bool valid() { return value() && at_ == text_.size(); }

 private:
  char peek() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool accept(char expected) {
    if (peek() != expected) return false;
    ++at_;
    return true;
  }

  bool string() {
    if (!accept('"')) return false;
    const size_t end = text_.find_first_of("\"\\\n", at_);
    if (end == std::string::npos || text_[end] != '"') return false;
    at_ = end + 1;
    return true;
  }

  bool number() {
    const size_t begin = at_;
    while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ > begin;
  }

  // What stands between the brackets: nothing, or members with commas between them.
  template <class Member>
  bool members(char end, Member member) {
    if (accept(end)) return true;
    do {
      if (!member()) return false;
    } while (accept(','));
    return accept(end);
  }

  bool value() {
    if (peek() == '"') return string();
    if (accept('[')) return members(']', [this] { return value(); });
    if (accept('{')) return members('}', [this] { return string() && accept(':') && value(); });
    return number();
  }

  const std::string& text_;
  size_t at_ = 0;
};

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

void check_kernel(const std::string& info, const prefill::KernelEntry& entry) {
  const prefill::KernelInfo kernel = entry.info();
  std::ostringstream row;
  row << "{\"backend\": \"" << prefill::name(entry.backend) << "\", \"dtype\": \""
      << prefill::name(entry.dtype) << "\", \"head_dim_qk\": " << entry.head_dim_qk
      << ", \"head_dim_vo\": " << entry.head_dim_vo << ", \"tile_m\": " << kernel.tile_m
      << ", \"tile_n\": " << kernel.tile_n << ", \"stages\": " << kernel.stages
      << ", \"threads\": " << kernel.threads << ", \"smem_bytes\": " << kernel.smem_bytes << "}";
  CHECK_EQ(occurrences(info, row.str()), 1, row.str() << " in " << info);
  const std::string archs = "\"" + std::string(prefill::name(entry.backend)) + "\": [\"";
  CHECK_EQ(occurrences(info, archs), 1, archs << " in " << info);
}

}  // namespace

int main() {
  int count = 0;
  const prefill::KernelEntry* table = prefill::kernel_table(count);
  const std::string info = prefill::build_info();
  CHECK(count > 0);
  CHECK(JsonSyntax(info).valid(), info);
  CHECK_EQ(occurrences(info, "\"head_dim_qk\": "), count, info);
  for (int i = 0; i < count; ++i) check_kernel(info, table[i]);
  for (const char* key : {"version", "cuda", "cutlass", "torch_target", "archs", "kernels"}) {
    CHECK_EQ(occurrences(info, "\"" + std::string(key) + "\": "), 1, info);
  }
  return prefill::test::result();
}
