// The two matrix products of attention, over operands packed into 32-bit units.
//
// A unit is a float, or a pair of bfloat16 where the processor multiplies these. Either way an element of a product is one
// chain of multiply-adds over its units in order, from zero: its bits do not depend on which rows and columns are computed
// beside it, or in tiles of which size.
#pragma once

#include <algorithm>

#include "attention.h"
#include "matrix_unit.h"

namespace cohort {

constexpr int kRows = 6;                            // rows of a register tile, and
constexpr int kVectors = kWide == 16 ? 4 : 2;       // its vectors: as many sums as the register file holds
constexpr int kStripe = kVectors * kWide;           // tokens whose keys lie side by side

// float32, and bfloat16 widened to it
template <typename T>
struct Units {
  using S = Simd<kWide>;
  using F = S::F;
  using Weight = float;
  static constexpr int kElements = 1;
  static inline F load(const T* from) { return S::load(from); }
  static inline F splat(const float* from) { return S::splat(*from); }
  static inline F madd(F a, F b, F sum) { return S::madd(a, b, sum); }
  static inline void store_weights(float* to, F weights) { S::store(to, weights); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Products of bfloat16 are exact in float32: one instruction does the work of two multiply-adds and the widening.
template <>
struct Units<bf16> {
  using S = Simd<kWide>;
  using F = S::F;
  using Weight = bf16;
  static constexpr int kElements = 2;
  static inline F load(const bf16* from) { return (F)_mm512_loadu_si512(from); }
  static inline F splat(const float* from) {
    int32_t pair;
    std::memcpy(&pair, from, 4);
    return (F)_mm512_set1_epi32(pair);
  }
  static inline F madd(F a, F b, F sum) { return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
  static inline void store_weights(bf16* to, F weights) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)weights));
  }
};
#endif

// Whether the matrix unit multiplies what is in T.
template <typename T>
constexpr bool kByMatrixUnit = kHasMatrixUnit && Units<T>::kElements == 2;

template <typename T>
inline int units_of(int elements) {
  return (elements + Units<T>::kElements - 1) / Units<T>::kElements;
}

// A vector of a row's units from unit `first` on; beyond its `head_dim` elements zeros, and nothing is read there.
template <typename T>
inline Simd<kWide>::F load_units(const T* row, int first, int head_dim) {
  constexpr int kSpan = kWide * Units<T>::kElements;
  const int begin = first * Units<T>::kElements, rest = head_dim - begin;
  if (rest >= kSpan) return Units<T>::load(row + begin);
  T some[kSpan] = {};
  std::copy(row + begin, row + std::max(begin, head_dim), some);
  return Units<T>::load(some);
}

// keys[unit][token] of W tokens, in rows of kStripe; `units` of head_dim may be more than there are: zeros
template <typename T>
inline void pack_keys(const T* const* rows, int head_dim, int units, float* keys) {
  using S = Simd<kWide>;
  for (int first = 0; first < units; first += kWide) {
    S::F square[kWide];
    for (int t = 0; t < kWide; ++t) square[t] = load_units(rows[t], first, head_dim);
    S::transpose(square);
    const int count = std::min(kWide, units - first);
    for (int u = 0; u < count; ++u) S::store(keys + (first + u) * kStripe, square[u]);
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Pairs of the elements of two rows, in order.
inline void interleave(Simd<kWide>::F first, Simd<kWide>::F second, Simd<kWide>::F* pairs) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  pairs[0] = (Simd<kWide>::F)_mm512_permutex2var_epi16((__m512i)first, low, (__m512i)second);
  pairs[1] = (Simd<kWide>::F)_mm512_permutex2var_epi16((__m512i)first, high, (__m512i)second);
}
#endif

// values[unit of tokens][d] of W tokens, in rows of `width`
template <typename T>
inline void pack_values(const T* const* rows, int head_dim, int width, float* values) {
  using S = Simd<kWide>;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  if constexpr (Units<T>::kElements == 2) {
    for (int t = 0; t < kWide; t += 2, values += width) {
      for (int d = 0; d < width; d += 2 * kWide) {
        S::F pairs[2];
        interleave(load_units(rows[t], d / 2, head_dim), load_units(rows[t + 1], d / 2, head_dim), pairs);
        S::store(values + d, pairs[0]);
        if (d + kWide < width) S::store(values + d + kWide, pairs[1]);
      }
    }
    return;
  }
#endif
  for (int t = 0; t < kWide; ++t, values += width) {
    for (int d = 0; d < width; d += kWide) S::store(values + d, load_units(rows[t], d, head_dim));
  }
}

// c[m][n] = Σ_k a[m][k] · b[k][n] for MR rows and NV vectors
template <typename T, int MR, int NV>
inline void multiply_tile(int depth, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                          int64_t c_stride) {
  using S = Simd<kWide>;
  using U = Units<T>;
  S::F held[MR][NV];
  for (int m = 0; m < MR; ++m)
    for (int v = 0; v < NV; ++v) held[m][v] = S::F{};
  for (int k = 0; k < depth; ++k, b += b_stride) {
    S::F row[NV];
    for (int v = 0; v < NV; ++v) row[v] = S::load(b + v * kWide);
    for (int m = 0; m < MR; ++m) {
      const S::F factor = U::splat(a + m * a_stride + k);
      for (int v = 0; v < NV; ++v) held[m][v] = U::madd(factor, row[v], held[m][v]);
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int v = 0; v < NV; ++v) S::store(c + m * c_stride + v * kWide, held[m][v]);
}

template <typename T, int NV, int MR = kRows>
inline void multiply_rows(int rows, int depth, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                          float* c, int64_t c_stride) {
  if constexpr (MR > 0) {
    if (rows == MR) return multiply_tile<T, MR, NV>(depth, a, a_stride, b, b_stride, c, c_stride);
    multiply_rows<T, NV, MR - 1>(rows, depth, a, a_stride, b, b_stride, c, c_stride);
  }
}

// For at most kRows rows and kVectors vectors.
template <typename T, int NV = kVectors>
inline void multiply(int rows, int vectors, int depth, const float* a, int64_t a_stride, const float* b,
                     int64_t b_stride, float* c, int64_t c_stride) {
  if constexpr (NV > 0) {
    if (vectors == NV) return multiply_rows<T, NV>(rows, depth, a, a_stride, b, b_stride, c, c_stride);
    multiply<T, NV - 1>(rows, vectors, depth, a, a_stride, b, b_stride, c, c_stride);
  }
}

}  // namespace cohort
