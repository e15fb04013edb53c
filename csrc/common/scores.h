// The kernels of a class.
#pragma once

#include "common/params.h"

namespace prefill {

// What a call asks of scores on their way to the softmax. Plain: nothing but a scale and a band.
// Masked: a custom mask too. General: anything. Each knows what those before it know; fa2, and
// fa3 in 8 bits, have none for Masked but their general one. Through a general kernel plain calls
// lose 7 to 21 % on fa2, and short calls without caps or biases up to 30 % on fa3, as long code
// takes its time to fetch (docs/tuning.md).
enum class Scores { Plain, Masked, General };

inline Scores scores_of(const PrefillParams& params) {
  if (params.soft_cap > 0.f || params.has_alibi) return Scores::General;
  return params.mask.mixed != nullptr ? Scores::Masked : Scores::Plain;
}

}  // namespace prefill
