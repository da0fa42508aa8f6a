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

  // 2W bfloat16 as two float vectors: the elements at even and at odd places. One shift and one mask instead of a
  // shuffle each; whoever cares about the order undoes it at the end (see `even_odd_place`).
  static inline void load_even_odd(const bf16* from, F& even, F& odd) {
    I pairs;
    std::memcpy(&pairs, from, sizeof(I));
    I low = pairs << 16;
    I high = pairs & int32_t(0xffff0000);
    std::memcpy(&even, &low, sizeof(F));
    std::memcpy(&odd, &high, sizeof(F));
  }

  // 2^x for x ≤ 0 to about 1e-7 relative; below 2^-126 it is 0.
  static inline F exp2(F x) {
    const F lowest = splat(-126.0f);
    F clamped = max(lowest, x);
    const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer held in the low bits
    F shifted = clamped + magic;
    F f = clamped - (shifted - magic);
    F p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
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

  // out[i] = sum of the lanes of rows[i]
  static inline F sum_rows(const F (&rows)[W]) {
#if defined(__AVX2__)
    if constexpr (W == 8) {
      return sum_eight(rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7]);
    }
#endif
#if defined(__AVX512F__)
    if constexpr (W == 16) {
      // A tree of pairwise sums: each level interleaves two vectors and halves what is left of every row.
      __m512 four[4];
      for (int i = 0; i < 4; ++i) {
        __m512 a = (__m512)rows[4 * i], b = (__m512)rows[4 * i + 1];
        __m512 c = (__m512)rows[4 * i + 2], d = (__m512)rows[4 * i + 3];
        __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
        __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
        four[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
      }
      auto join = [](__m512 a, __m512 b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
      };
      return (F)join(join(four[0], four[1]), join(four[2], four[3]));
    }
#endif
    F out{};
    for (int i = 0; i < W; ++i) {
      float sum = 0;
      for (int lane = 0; lane < W; ++lane) sum += rows[i][lane];
      out[i] = sum;
    }
    return out;
  }

#if defined(__AVX2__)
  static inline __m256 sum_eight(__m256 a, __m256 b, __m256 c, __m256 d, __m256 e, __m256 f, __m256 g, __m256 h) {
    __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    __m256 efgh = _mm256_hadd_ps(_mm256_hadd_ps(e, f), _mm256_hadd_ps(g, h));
    return _mm256_permute2f128_ps(abcd, efgh, 0x20) + _mm256_permute2f128_ps(abcd, efgh, 0x31);
  }
#endif

  static inline float sum(F v) {
    float total = 0;
    for (int lane = 0; lane < W; ++lane) total += v[lane];
    return total;
  }
};

// Where element i of a row lies after `load_even_odd` of every 2W elements.
template <int W>
inline int even_odd_place(int i) {
  int chunk = i / (2 * W), rest = i % (2 * W);
  return chunk * 2 * W + (rest & 1) * W + rest / 2;
}

}  // namespace cohort
