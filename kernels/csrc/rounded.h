// Rows of inputs in 8 bits, with a scale for every unit: what a product over codes multiplies.
#pragma once

#include <algorithm>

#include "simd.h"

namespace cohort {

constexpr float kLeast = 1e-30f;  // a unit of x below this counts as zero

// A unit of a row of x in 8 bits: x[i] ≈ scale · q[i].
template <int U>
struct Rounded {
  int8_t q[U];
  int32_t initial;  // -zero · Σ q: where a unit's integer sums begin
  float scale;
  float total;  // scale · Σ q: what an offset is multiplied with
};

// The horizontal maximum orders bits as integers, so a NaN counts as the largest and spoils the row, as it should.
template <int U>
inline void round_unit(const float* x, int32_t zero, Rounded<U>& to) {
  using S = Simd<kWide>;
  using F = S::F;
  using I = S::I;
  constexpr int kVectors = U / kWide;
  F v[kVectors];
  I largest{};
  for (int i = 0; i < kVectors; ++i) {
    v[i] = S::load(x + i * kWide);
    I size;
    std::memcpy(&size, &v[i], sizeof(I));
    size &= 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  int32_t most = 0;
  for (int lane = 0; lane < kWide; ++lane) most = std::max(most, largest[lane]);
  float extent;
  std::memcpy(&extent, &most, 4);
  const bool nothing = extent < kLeast;
  const float inverse = nothing ? 0.0f : 127.0f / extent;
  const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer held in the low bits
  I sum{};
  for (int i = 0; i < kVectors; ++i) {
    const F shifted = v[i] * inverse + magic;
    I q;
    std::memcpy(&q, &shifted, sizeof(I));
    q -= 0x4b400000;
    sum += q;
#if defined(__AVX512F__)
    if constexpr (kWide == 16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to.q + i * kWide), _mm512_cvtepi32_epi8((__m512i)q));
      continue;
    }
#endif
    for (int lane = 0; lane < kWide; ++lane) to.q[i * kWide + lane] = int8_t(q[lane]);
  }
  int32_t total = 0;
  for (int lane = 0; lane < kWide; ++lane) total += sum[lane];
  to.initial = -zero * total;
  to.scale = nothing ? 0.0f : extent / 127.0f;
  to.total = to.scale * float(total);
}

template <int U, typename T>
inline void round_row(const T* x, int64_t inputs, int32_t zero, Rounded<U>* to) {
  float wide[U];
  for (int64_t first = 0; first < inputs; first += U, ++to) {
    const int count = int(std::min<int64_t>(U, inputs - first));
    if (count == U) {
      using S = Simd<kWide>;
      for (int i = 0; i < U; i += kWide) S::store(wide + i, S::load(x + first + i));
    } else {
      for (int i = 0; i < U; ++i) wide[i] = i < count ? to_float(x[first + i]) : 0.0f;
    }
    round_unit<U>(wide, zero, *to);
  }
}

}  // namespace cohort
