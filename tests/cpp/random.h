// Random numbers that are the same on every machine (splitmix64).
#pragma once

#include <cstdint>

namespace prefill::test {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // In [low, high].
  int integer(int low, int high) {
    const uint64_t count = static_cast<uint64_t>(int64_t{high} - low) + 1;
    return static_cast<int>(low + static_cast<int64_t>(next() % count));
  }

  uint32_t bits() { return static_cast<uint32_t>(next() >> 32); }

  // In [low, high).
  float real(float low, float high) {
    return low + (high - low) * static_cast<float>(next() >> 40) * 0x1p-24f;
  }

 private:
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  uint64_t state_;
};

}  // namespace prefill::test
