// What the C++ tests check with. A failed check prints the place, the expression and the values,
// and the test goes on; `return prefill::test::result();` at the end of main gives the exit status.
#pragma once

#include <cmath>
#include <cstdio>
#include <iostream>

namespace prefill::test {

inline constexpr int kSkipped = 77;  // SKIP_RETURN_CODE
inline constexpr int kMaxPrinted = 20;

struct Counts {
  long long checks = 0;
  long long failures = 0;
};

inline Counts& counts() {
  static Counts counts;
  return counts;
}

// Counts one check. True if it failed and is still to be printed.
inline bool failed(bool passed) {
  ++counts().checks;
  return !passed && ++counts().failures <= kMaxPrinted;
}

// Prints the totals; 0 if there were checks and all of them passed.
inline int result() {
  const auto [checks, failures] = counts();
  std::printf("%lld checks, %lld failed\n", checks, failures);
  return checks > 0 && failures == 0 ? 0 : 1;
}

}  // namespace prefill::test

// CHECK(condition) or CHECK(condition, "what holds it: " << value << ...)
#define CHECK(condition, ...)                                                       \
  do {                                                                              \
    if (prefill::test::failed(static_cast<bool>(condition))) {                      \
      std::cerr << __FILE__ << ":" << __LINE__ << ": CHECK(" << #condition << ") "; \
      __VA_OPT__(std::cerr << __VA_ARGS__;)                                         \
      std::cerr << std::endl;                                                       \
    }                                                                               \
  } while (false)

// CHECK_EQ(a, b) or CHECK_EQ(a, b, "where: " << value << ...)
#define CHECK_EQ(actual, expected, ...)                                                         \
  do {                                                                                          \
    const auto check_actual = (actual);                                                         \
    const auto check_expected = (expected);                                                     \
    if (prefill::test::failed(check_actual == check_expected)) {                                \
      std::cerr << __FILE__ << ":" << __LINE__ << ": CHECK_EQ(" << #actual << ", " << #expected \
                << "): " << check_actual << " != " << check_expected << " ";                    \
      __VA_OPT__(std::cerr << __VA_ARGS__;)                                                     \
      std::cerr << std::endl;                                                                   \
    }                                                                                           \
  } while (false)

// CHECK_NEAR(a, b, tolerance): |a - b| <= tolerance; equal infinities are near, NaN never is.
#define CHECK_NEAR(actual, expected, tolerance, ...)                                              \
  do {                                                                                            \
    const double check_actual = (actual);                                                         \
    const double check_expected = (expected);                                                     \
    if (prefill::test::failed(check_actual == check_expected ||                                   \
                              std::abs(check_actual - check_expected) <= (tolerance))) {          \
      std::cerr << __FILE__ << ":" << __LINE__ << ": CHECK_NEAR(" << #actual << ", " << #expected \
                << "): " << check_actual << " vs " << check_expected << " ";                      \
      __VA_OPT__(std::cerr << __VA_ARGS__;)                                                       \
      std::cerr << std::endl;                                                                     \
    }                                                                                             \
  } while (false)
