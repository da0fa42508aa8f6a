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

}  // namespace cohort
