// The activation of the gated MLP, for the kernels that apply it.
#pragma once

#include "simd.h"

namespace cohort {

// silu(g) = g / (1 + e^-g), through e^-|g| so that nothing overflows
template <typename T>
inline typename Simd<kWide>::F silu_mul_lanes(typename Simd<kWide>::F gate, typename Simd<kWide>::F up) {
  using S = Simd<kWide>;
  auto positive = gate > 0.0f;
  auto small = S::exp2((positive ? -gate : gate) * 1.44269504f);
  auto silu = (positive ? gate : gate * small) / (1.0f + small);
  return S::template rounded<T>(silu) * up;
}

// gpt-oss: (up + 1) · g · sigmoid(alpha · g) with gates clamped from above and ups from both sides; roundings where
// transformers rounds, that is after every operation.
template <typename T>
inline typename Simd<kWide>::F clamped_swiglu_lanes(typename Simd<kWide>::F gate, typename Simd<kWide>::F up,
                                                    float alpha, float limit) {
  using S = Simd<kWide>;
  const auto highest = S::splat(limit);
  gate = gate < highest ? gate : highest;
  up = S::max(up < highest ? up : highest, -highest);
  const auto steep = S::template rounded<T>(gate * alpha);
  auto positive = steep > 0.0f;
  auto small = S::exp2((positive ? -steep : steep) * 1.44269504f);
  auto sigmoid = S::template rounded<T>((positive ? S::splat(1.0f) : small) / (1.0f + small));
  return S::template rounded<T>(up + 1.0f) * S::template rounded<T>(gate * sigmoid);
}

}  // namespace cohort
