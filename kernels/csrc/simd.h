// Vectors of W floats: the few operations the kernels need, for AVX2 and AVX-512 with intrinsics where the compiler
// would not find the instruction itself, and for any other processor through the compiler's vector types.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace cohort {

#if defined(__AVX512F__) || defined(COHORT_WIDE_LANES)  // the latter to try the wide kernels on any processor
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif

// bfloat16 as stored: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // round to nearest even; a NaN must not round up to infinity
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return bf16{uint16_t(nan ? 0x7fc0 : rounded)};
}

template <int W>
struct Lanes;
template <>
struct Lanes<8> {
  typedef float F __attribute__((vector_size(32)));
  typedef int32_t I __attribute__((vector_size(32)));
  typedef uint16_t H __attribute__((vector_size(16)));
#if defined(__AVX512BF16__)
  typedef __m256bh Pairs;  // 16 bfloat16
#endif
};
template <>
struct Lanes<16> {
  typedef float F __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));
  typedef uint16_t H __attribute__((vector_size(32)));
#if defined(__AVX512BF16__)
  typedef __m512bh Pairs;  // 32 bfloat16
#endif
};

template <int W>
struct Simd {
  using F = typename Lanes<W>::F;
  using I = typename Lanes<W>::I;
  using H = typename Lanes<W>::H;

  static inline F load(const float* from) {
    F v;
    std::memcpy(&v, from, sizeof(F));
    return v;
  }
  static inline void store(float* to, F v) { std::memcpy(to, &v, sizeof(F)); }
  static inline F load(const bf16* from) {
    H half;
    std::memcpy(&half, from, sizeof(H));
    I bits = __builtin_convertvector(half, I) << 16;
    F v;
    std::memcpy(&v, &bits, sizeof(F));
    return v;
  }
  // The bits of v rounded to bfloat16, still in the upper half of each lane; to nearest even, as from_float.
  static inline I round_bits(F v) {
    I bits;
    std::memcpy(&bits, &v, sizeof(I));
    I rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & int32_t(0xffff0000);
    return (bits & 0x7fffffff) > 0x7f800000 ? I{} + 0x7fc00000 : rounded;
  }
  static inline void store(bf16* to, F v) {
    I low = (round_bits(v) >> 16) & 0xffff;
#if defined(__AVX2__)
    if constexpr (W == 8) {
      __m256i twice = _mm256_packus_epi32((__m256i)low, (__m256i)low);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08)));
      return;
    }
#endif
#if defined(__AVX512F__)
    if constexpr (W == 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)low));
      return;
    }
#endif
    H half = __builtin_convertvector(low, H);
    std::memcpy(to, &half, sizeof(H));
  }
  static inline F splat(float x) { return x - F{}; }

  // v rounded to T and back
  template <typename T>
  static inline F rounded(F v) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return v;
    } else {
      I bits = round_bits(v);
      std::memcpy(&v, &bits, sizeof(F));
      return v;
    }
  }

  // The operand order matters for NaN: a NaN in `b` survives.
  static inline F max(F a, F b) { return a > b ? a : b; }

  // a · b + sum, rounded once where the processor can: written out where two kernels must round alike.
  static inline F madd(F a, F b, F sum) {
#if defined(__FMA__) && defined(__AVX2__)
    if constexpr (W == 8) return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#endif
#if defined(__AVX512F__)
    if constexpr (W == 16) return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#endif
    return a * b + sum;
  }

  // The largest lane; a NaN need not survive.
  static inline float highest(F v) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return _mm512_reduce_max_ps((__m512)v);
#endif
    float best = v[0];
    for (int lane = 1; lane < W; ++lane) best = v[lane] > best ? v[lane] : best;
    return best;
  }

  // 2^x for x ≤ 0 to about 1e-7 relative; below 2^-126 it is 0.
  static inline F exp2(F x) {
    const F lowest = splat(-126.0f);
    F clamped = max(lowest, x);
    const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer held in the low bits
    F shifted = clamped + magic;
    F f = clamped - (shifted - magic);
    F p = splat(1.5403530e-4f);
    for (float next : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
      p = madd(p, f, splat(next));
    }
    I n, bits;
    std::memcpy(&n, &shifted, sizeof(I));
    std::memcpy(&bits, &p, sizeof(I));
    bits += n << 23;  // the constant's own bits leave at the top
    F result;
    std::memcpy(&result, &bits, sizeof(F));
    return x < lowest ? F{} : result;
  }

  // tanh(x) to about 3e-7 relative: near zero its series, since 1 - e^-2|x| would cancel there.
  static inline F tanh(F x) {
    const F size = x < 0.0f ? -x : x;
    const F small = exp2(size * -2.88539008f);
    const F large = (1.0f - small) / (1.0f + small);
    const F square = size * size;
    F p = splat(-8.8632355e-3f);
    p = p * square + 2.1869489e-2f;
    p = p * square - 5.3968254e-2f;
    p = p * square + 1.3333334e-1f;
    p = p * square - 3.3333334e-1f;
    const F series = size + size * square * p;
    const F result = size < 0.35f ? series : large;
    return x < 0.0f ? -result : result;
  }

  // rows[i][j] and rows[j][i] change places.
  static inline void transpose(F (&rows)[W]) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return transpose_sixteen(rows);
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return transpose_eight(rows);
#endif
    for (int i = 0; i < W; ++i) {
      for (int j = 0; j < i; ++j) {
        const float other = rows[i][j];
        rows[i][j] = rows[j][i];
        rows[j][i] = other;
      }
    }
  }

#if defined(__AVX512F__)
  // By pairs of elements, by fours, and then by 128 bits.
  static inline void transpose_sixteen(F (&rows)[W]) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 2]);
      const __m512d c = _mm512_castps_pd(t[i + 1]), d = _mm512_castps_pd(t[i + 3]);
      r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
      r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
      r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
    for (int e = 0; e < 4; ++e) {
      const __m512 a = _mm512_shuffle_f32x4(r[e], r[4 + e], 0x88), b = _mm512_shuffle_f32x4(r[e], r[4 + e], 0xdd);
      const __m512 c = _mm512_shuffle_f32x4(r[8 + e], r[12 + e], 0x88);
      const __m512 d = _mm512_shuffle_f32x4(r[8 + e], r[12 + e], 0xdd);
      rows[e] = (F)_mm512_shuffle_f32x4(a, c, 0x88);
      rows[4 + e] = (F)_mm512_shuffle_f32x4(b, d, 0x88);
      rows[8 + e] = (F)_mm512_shuffle_f32x4(a, c, 0xdd);
      rows[12 + e] = (F)_mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }
#endif
#if defined(__AVX2__)
  static inline void transpose_eight(F (&rows)[W]) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int e = 0; e < 4; ++e) {
      rows[e] = (F)_mm256_permute2f128_ps(r[e], r[4 + e], 0x20);
      rows[4 + e] = (F)_mm256_permute2f128_ps(r[e], r[4 + e], 0x31);
    }
  }
#endif

  static inline float sum(F v) {
    float total = 0;
    for (int lane = 0; lane < W; ++lane) total += v[lane];
    return total;
  }
};

}  // namespace cohort
