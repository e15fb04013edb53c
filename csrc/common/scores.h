// The two kernels of a class.
#pragma once

#include "common/params.h"

namespace prefill {

// What a call asks of scores on their way to the softmax: nothing but a scale and a band, or
// anything. Plain calls through a kernel for anything lose 7 to 21 % on fa2 (docs/tuning.md).
enum class Scores { Plain, General };

inline Scores scores_of(const PrefillParams& params) {
  const bool is_general = params.mask.mixed != nullptr || params.soft_cap > 0.f ||
                          params.has_alibi || params.sinks.data != nullptr;
  return is_general ? Scores::General : Scores::Plain;
}

}  // namespace prefill
